"""The load generator that watches: writers and many watchers of one stream, one thread, one epoll loop.

Rules: everything that is sent is made before the clock starts; what comes is counted by its marks and not
decoded (deliveries.py); the same loop serves event streams, WebSockets and Redis. Each writer sends its next
write when its answer came: at once, or, with a rate, when it is due. A Redis reader asks again after every
reply; first all that have a reply are read, so that no reader waits for the questions of the others.

With a rate every record carries the time just before it was sent, and every watcher notes when the bytes that
hold it were read. After the end the loop goes on until each watcher has every record that was acknowledged:
one too few or too many is a failure.

`python -m benchmarks.generators.watch` takes one WatchJob and gives one Delivered, as apart.py has it.
"""

from __future__ import annotations

import itertools
import select
import sys
import time
from collections.abc import Iterator

import msgspec

from benchmarks import BenchFailed, tree
from benchmarks.generators import apart, payload
from benchmarks.generators.deliveries import MARGIN
from benchmarks.generators.load import BUFFER_BYTES, SILENCE_S, connect
from benchmarks.generators.opening import Watcher, Wire, close_watchers, open_watchers
from benchmarks.generators.replies import HttpReplies, PipelineReplies, Replies

DRAIN_S = 20.0  # a watcher that is further behind than this is no live one


class WatchJob(msgspec.Struct, kw_only=True, frozen=True):
    port: int
    wire: Wire
    stream: str
    watchers: int
    writes: list[bytes]
    batch: int = 1  # records per write
    writers: int = 1
    rate: float = 0.0  # writes per second, of one writer; 0: as fast as they are answered
    warm_s: float = 0.0
    seconds: float = 0.0
    watch: list[tree.Process] = []


class Delivered(apart.Window, kw_only=True, frozen=True):
    frames: int  # received within the window, by all watchers
    records: int
    acknowledged: int  # writes, warm-up and stragglers too
    times_ns: list[int] = msgspec.field(default_factory=list)  # per write and watcher
    served_ns: list[int] = msgspec.field(default_factory=list)  # per write: until the last watcher had it


class _Writer:
    __slots__ = ("receive_into", "replies", "send", "socket", "waiting", "writes")

    def __init__(self, job: WatchJob, number: int) -> None:
        self.socket = connect(job.port)
        self.send = self.socket.send
        self.receive_into = self.socket.recv_into
        turn = job.writes[number % len(job.writes) :] + job.writes[: number % len(job.writes)]
        self.writes: Iterator[bytes] = itertools.cycle(turn)
        self.replies: Replies = PipelineReplies(job.batch) if job.wire == "redis" else HttpReplies()
        self.waiting = False


class _Totals(msgspec.Struct, frozen=True):
    frames: int
    records: int
    used: apart.Mark


class _Run:
    """One job over its sockets. Times are of perf_counter_ns."""

    def __init__(self, job: WatchJob) -> None:
        self._job = job
        self._poller = select.epoll()
        self._buffer = bytearray(MARGIN + BUFFER_BYTES)
        self._view = memoryview(self._buffer)[MARGIN:]
        self._replies = bytearray(1 << 16)  # what comes to the writers
        self._watchers: list[Watcher] = []
        self._writers: list[_Writer] = []
        self._acknowledged = 0
        self._read_at: list[tuple[int, int]] = []  # when a record was sent, when it was read
        self._begin_ns = 0

    def go(self) -> Delivered:
        job = self._job
        try:
            self._watchers = open_watchers(
                wire=job.wire, port=job.port, stream=job.stream, count=job.watchers, timed=job.rate > 0
            )
            self._writers = [_Writer(job, number) for number in range(job.writers)]
            self._by_fd = {each.socket.fileno(): each for each in self._watchers}
            self._writer_by_fd = {each.socket.fileno(): each for each in self._writers}
            for connection in [each.socket for each in self._watchers] + [each.socket for each in self._writers]:
                connection.setblocking(False)
                self._poller.register(connection.fileno(), select.EPOLLIN | select.EPOLLET)
            begin, end = self._paced() if job.rate else self._saturated()
            self._drain()
        finally:
            self._poller.close()
            close_watchers(self._watchers)
            for writer in self._writers:
                writer.socket.close()
        return self._delivered(begin, end)

    # --- the two ways to write -----------------------------------------------------------------------------
    def _saturated(self) -> tuple[_Totals, _Totals]:
        clock = time.perf_counter
        warm_until = clock() + self._job.warm_s
        for writer in self._writers:
            self._write(writer)
        while clock() < warm_until:
            self._serve(SILENCE_S, again=True)
        begin = self._totals()
        until = begin.used.at + self._job.seconds
        while clock() < until:
            self._serve(SILENCE_S, again=True)
        return begin, self._totals()

    def _paced(self) -> tuple[_Totals, _Totals]:
        clock = time.perf_counter
        around = [payload.around_stamp(write) for write in self._job.writes]
        turn = itertools.cycle(around)
        writer = self._writers[0]
        period_s = 1 / self._job.rate
        due = clock()
        warm_until = due + self._job.warm_s
        begin = None
        while True:
            now = clock()
            if begin is None and now >= warm_until:
                begin = self._totals()
                self._read_at.clear()
                self._begin_ns = time.perf_counter_ns()
                until = begin.used.at + self._job.seconds
            if begin is not None and now >= until:
                return begin, self._totals()
            if now >= due and not writer.waiting:
                before, after = next(turn)
                writer.waiting = True
                stamp = b"%0*d" % (payload.STAMP_DIGITS, time.perf_counter_ns())
                self._send(writer, before + stamp + after)
                # Hazard: after a stall the writes that are overdue would come in a burst. They are left out.
                due = due + period_s if due + period_s > now else now + period_s
            self._serve(max(0.0, due - clock()) if not writer.waiting else 1.0, again=False)

    # --- the loop ------------------------------------------------------------------------------------------
    def _serve(self, timeout_s: float, *, again: bool) -> None:
        """Read everything that is there to read; `again`: a writer whose answer came sends its next write."""
        events = self._poller.poll(timeout_s)
        if not events and timeout_s == SILENCE_S:
            raise BenchFailed(f"nothing came on any of {len(self._watchers)} watchers for {SILENCE_S:.0f} s")
        by_fd = self._by_fd
        view = self._view
        buffer = self._buffer
        timed = self._job.rate > 0
        asking: list[Watcher] = []
        for fd, _ in events:
            watcher = by_fd.get(fd)
            if watcher is None:
                self._take_answer(self._writer_by_fd[fd], again=again)
                continue
            n = BUFFER_BYTES
            # The edge is spent only by a read that came back short of the buffer.
            while n == BUFFER_BYTES:
                try:
                    n = watcher.socket.recv_into(view)
                except BlockingIOError:
                    break
                now = time.perf_counter_ns() if timed else 0
                if n == 0:
                    raise BenchFailed("the server closed a watcher")
                if watcher.deliveries.take(buffer, MARGIN + n):
                    asking.append(watcher)
                if timed:
                    self._read_at += [(stamp, now) for stamp in watcher.deliveries.stamps]
                    watcher.deliveries.stamps.clear()
        for watcher in asking:
            question = watcher.deliveries.question()
            if watcher.socket.send(question) != len(question):
                raise BenchFailed("a question to Redis was not taken whole")

    def _take_answer(self, writer: _Writer, *, again: bool) -> None:
        try:
            n = writer.receive_into(self._replies)
        except BlockingIOError:
            return
        if n == 0:
            raise BenchFailed("the server closed a writer")
        if writer.replies.take(self._replies, n):
            self._acknowledged += 1
            writer.waiting = False
            if again:
                self._write(writer)

    def _write(self, writer: _Writer) -> None:
        writer.waiting = True
        self._send(writer, next(writer.writes))

    def _send(self, writer: _Writer, write: bytes) -> None:
        # Fact: a write is some kilobytes and the one before was answered, so the socket is empty.
        if writer.send(write) != len(write):
            raise BenchFailed("a write was not taken whole")

    def _drain(self) -> None:
        """Until every watcher has what was acknowledged, and not a record more."""
        deadline = time.perf_counter() + DRAIN_S
        while any(writer.waiting for writer in self._writers) or self._least() < self._due():
            if time.perf_counter() > deadline:
                held = f"{self._least():,} of {self._due():,}"
                raise BenchFailed(f"a watcher has {held} records {DRAIN_S:.1f} s after the end")
            self._serve(DRAIN_S / 10, again=False)
        most = max(watcher.deliveries.records for watcher in self._watchers)
        if most > self._due():
            raise BenchFailed(f"a watcher got {most:,} records, and {self._due():,} were acknowledged")

    def _due(self) -> int:
        return self._acknowledged * self._job.batch

    def _least(self) -> int:
        return min(watcher.deliveries.records for watcher in self._watchers)

    # --- what came out -------------------------------------------------------------------------------------
    def _totals(self) -> _Totals:
        return _Totals(
            sum(watcher.deliveries.frames for watcher in self._watchers),
            sum(watcher.deliveries.records for watcher in self._watchers),
            apart.mark(self._job.watch),
        )

    def _delivered(self, begin: _Totals, end: _Totals) -> Delivered:
        window = begin.used.until(end.used)
        times_ns: list[int] = []
        served_ns: dict[int, int] = {}
        for stamp, read_at in self._read_at:
            if stamp >= self._begin_ns:
                times_ns.append(read_at - stamp)
                served_ns[stamp] = max(served_ns.get(stamp, 0), read_at - stamp)
        return Delivered(
            wall_s=window.wall_s,
            own_cpu_s=window.own_cpu_s,
            watched_cpu_s=window.watched_cpu_s,
            frames=end.frames - begin.frames,
            records=end.records - begin.records,
            acknowledged=self._acknowledged,
            times_ns=times_ns,
            served_ns=list(served_ns.values()),
        )


def drive(job: WatchJob) -> Delivered:
    return _Run(job).go()


def run_apart(job: WatchJob) -> Delivered:
    return apart.run("benchmarks.generators.watch", job, Delivered)


if __name__ == "__main__":
    sys.exit(apart.serve(WatchJob, drive))
