"""The load generator that works: equal workers of one queue, one thread, one epoll loop.

Rules: a worker claims, acknowledges all it got in one request, and claims again; it does nothing with a job. With
`push` the server gives jobs by itself on a stream per worker, and each worker acknowledges on a second connection
whatever came since its last acknowledgement. The queue was filled before and nothing is added. The clock runs from
the end of the warm-up until the time is over or the last job is acknowledged. Afterwards each worker acknowledges
what it claimed, so that what is left in the queue is known exactly; streams are closed with jobs on them.

A claim that gets nothing while jobs are left is a failure; so is a job that is given out twice (claims.py).

`python -m benchmarks.generators.workers` takes one WorkJob and gives one Worked, as apart.py has it.
"""

from __future__ import annotations

import select
import socket
import sys
import time

import msgspec

from benchmarks import BenchFailed, tree
from benchmarks.generators import apart, payload
from benchmarks.generators.claims import LEASE_MS, Pushed, Wire, claims
from benchmarks.generators.load import BUFFER_BYTES, SILENCE_S, connect

MOST_ACKED = 1_000  # jobs that one request may name


class WorkJob(msgspec.Struct, kw_only=True, frozen=True):
    port: int
    wire: Wire
    queue: str
    workers: int
    size: int  # jobs per claim, or in flight on a stream
    jobs: int = 0  # in the queue before the first claim
    push: bool = False
    timed: bool = False  # the time of every claim
    warm_s: float = 0.0
    seconds: float = 0.0
    watch: list[tree.Process] = []


class Worked(apart.Window, kw_only=True, frozen=True):
    jobs: int  # acknowledged within the window
    per_worker: list[int]  # likewise, of each
    acknowledged: int  # at all
    claims_ns: list[int] = msgspec.field(default_factory=list)  # from the question to the whole answer


class _Worker:
    __slots__ = ("asked_ns", "claiming", "claims", "held", "jobs", "pushed", "socket", "stream", "waiting")

    def __init__(self, job: WorkJob, number: int) -> None:
        node = f"worker-{number}"
        self.socket = connect(job.port)
        self.claims = claims(job.wire, queue=job.queue, node=node, size=job.size)
        self.jobs = 0  # acknowledged
        self.held = 0  # named in the acknowledgement that is out
        self.claiming = False
        self.asked_ns = 0
        self.stream: socket.socket | None = None
        self.pushed = Pushed()
        self.waiting: list[bytes] = []  # came on the stream, not yet acknowledged
        if job.push:
            self.stream = connect(job.port)
            path = f"/v0/topics/{job.queue}/work?node={node}&max={job.size}&lease_ms={LEASE_MS}"
            self.stream.sendall(payload.http_get(path, accept="text/event-stream"))
            self.waiting = self.pushed.take(_after_head(self.stream))

    def close(self) -> None:
        self.socket.close()
        if self.stream is not None:
            self.stream.close()


def _after_head(stream: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = stream.recv(1 << 16)
        if not chunk:
            break
        data += chunk
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end or not head.startswith(b"HTTP/1.1 200"):
        raise BenchFailed(f"no stream of jobs: {data[:300]!r}")
    return rest


class _Mark(msgspec.Struct, frozen=True):
    per_worker: list[int]
    used: apart.Mark


class _Run:
    """One job over its sockets."""

    def __init__(self, job: WorkJob) -> None:
        self._job = job
        self._poller = select.epoll()
        self._buffer = bytearray(BUFFER_BYTES)
        self._workers: list[_Worker] = []
        self._given = 0  # jobs that came in answers to claims
        self._done = 0  # jobs acknowledged
        self._out = 0  # requests without their answer
        self._begin: _Mark | None = None
        self._end: _Mark | None = None
        self._claims_ns: list[int] = []

    def go(self) -> Worked:
        try:
            for number in range(self._job.workers):
                self._workers.append(_Worker(self._job, number))
            self._by_fd = {worker.socket.fileno(): worker for worker in self._workers}
            self._by_stream_fd = {
                worker.stream.fileno(): worker for worker in self._workers if worker.stream is not None
            }
            for worker in self._workers:
                for connection in (worker.socket, worker.stream):
                    if connection is not None:
                        connection.setblocking(False)
                        self._poller.register(connection.fileno(), select.EPOLLIN)
            self._next_mark_at = time.perf_counter() + self._job.warm_s
            self._tick()
            for worker in self._workers:
                self._next_request(worker)
            while self._out or (self._by_stream_fd and self._end is None):
                self._serve()
        finally:
            self._poller.close()
            for worker in self._workers:
                worker.close()
        return self._worked()

    # --- the loop ------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        events = self._poller.poll(SILENCE_S)
        if not events:
            raise BenchFailed(f"nothing came to any of {len(self._workers)} workers for {SILENCE_S:.0f} s")
        for fd, _ in events:
            worker = self._by_fd.get(fd)
            if worker is None:
                self._take_pushed(self._by_stream_fd[fd])
                continue
            n = worker.socket.recv_into(self._buffer)
            if n == 0:
                raise BenchFailed("the server closed a worker's connection")
            if worker.claiming:
                self._take_claimed(worker, n)
            elif worker.claims.acked(self._buffer, n):
                self._out -= 1
                worker.jobs += worker.held
                self._done += worker.held
                self._next_request(worker)
        self._tick()

    def _next_request(self, worker: _Worker) -> None:
        worker.held = 0
        if self._end is not None:
            return
        if worker.stream is not None:
            if worker.waiting:
                self._acknowledge(worker, worker.waiting[:MOST_ACKED])
                worker.waiting = worker.waiting[MOST_ACKED:]
        elif self._given < self._job.jobs:
            worker.claiming = True
            worker.asked_ns = time.perf_counter_ns()
            self._send(worker, worker.claims.claim)

    def _take_claimed(self, worker: _Worker, n: int) -> None:
        ids = worker.claims.claimed(self._buffer, n)
        if ids is None:
            return
        if self._job.timed and self._end is None:
            self._claims_ns.append(time.perf_counter_ns() - worker.asked_ns)
        worker.claiming = False
        self._out -= 1
        self._given += len(ids)
        if ids:
            self._acknowledge(worker, ids)
            return
        # The last jobs may be in answers that are not read yet.
        left = self._job.jobs - self._given
        if left > self._job.size * sum(each.claiming for each in self._workers):
            raise BenchFailed(f"a claim got nothing while {left:,} jobs were left")

    def _take_pushed(self, worker: _Worker) -> None:
        assert worker.stream is not None
        n = worker.stream.recv_into(self._buffer)
        if n == 0:
            raise BenchFailed("the server closed a stream of jobs")
        worker.waiting += worker.pushed.take(bytes(memoryview(self._buffer)[:n]))
        if not worker.held:
            self._next_request(worker)

    def _acknowledge(self, worker: _Worker, ids: list[bytes]) -> None:
        worker.held = len(ids)
        self._send(worker, worker.claims.ack(ids))

    def _send(self, worker: _Worker, request: bytes) -> None:
        # Fact: a request is some kilobytes and the one before was answered, so the socket is empty.
        if worker.socket.send(request) != len(request):
            raise BenchFailed("a request was not taken whole")
        self._out += 1

    # --- the window ----------------------------------------------------------------------------------------
    def _tick(self) -> None:
        dry = self._done == self._job.jobs
        if self._end is not None or (time.perf_counter() < self._next_mark_at and not dry):
            return
        if self._begin is not None:
            self._end = self._mark()
        elif dry:
            raise BenchFailed(f"{self._job.jobs:,} jobs were done before the warm-up was over")
        else:
            self._claims_ns.clear()
            self._begin = self._mark()
            self._next_mark_at = self._begin.used.at + self._job.seconds

    def _mark(self) -> _Mark:
        return _Mark([worker.jobs for worker in self._workers], apart.mark(self._job.watch))

    def _worked(self) -> Worked:
        if self._begin is None or self._end is None:
            raise BenchFailed(f"{self._job.jobs - self._done:,} jobs were left, and no worker got them")
        window = self._begin.used.until(self._end.used)
        per_worker = [
            after - before for after, before in zip(self._end.per_worker, self._begin.per_worker, strict=True)
        ]
        return Worked(
            wall_s=window.wall_s,
            own_cpu_s=window.own_cpu_s,
            watched_cpu_s=window.watched_cpu_s,
            jobs=sum(per_worker),
            per_worker=per_worker,
            acknowledged=self._done,
            claims_ns=self._claims_ns,
        )


def drive(job: WorkJob) -> Worked:
    return _Run(job).go()


def run_apart(job: WorkJob) -> Worked:
    return apart.run("benchmarks.generators.workers", job, Worked)


if __name__ == "__main__":
    sys.exit(apart.serve(WorkJob, drive))
