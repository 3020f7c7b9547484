"""The load generator that scrapes: appends on some connections, and now and then a scrape of the metrics on another.

Rules: the appends are those of load.py, as fast as they are answered; or, with a rate, each when it is due, on any
connection that is free. Those are timed from when they were sent; one that was due while all connections waited, from
when it was due, so that a server that stands still is charged for everyone it kept waiting. The scraper is a thread of
its own: it sleeps or waits for the kernel, and what it reads is counted, not decoded.

`python -m benchmarks.generators.scrapes` takes one ScrapeJob and gives one Scraped, as apart.py has it.
"""

from __future__ import annotations

import itertools
import select
import sys
import threading
import time
from collections import deque

import msgspec

from benchmarks import BenchFailed
from benchmarks.generators import apart, load
from benchmarks.generators.load import SILENCE_S, Job, Outcome, connect
from benchmarks.generators.replies import HttpReplies

REPLY_BYTES = 1 << 16  # no answer to an append of one record is larger
SCRAPE_BYTES = 1 << 20


class ScrapeJob(Job, kw_only=True, frozen=True):
    scrape: bytes  # the request
    scrapes_at: tuple[float, ...] = ()  # in seconds after the warm-up
    rate: float = 0.0  # appends per second, all connections together; 0: as fast as they are answered


class Scraped(Outcome, kw_only=True, frozen=True):
    scrapes_ns: list[int] = msgspec.field(default_factory=list)


class Scraper:
    """Scrapes over one connection, at the times it was given."""

    def __init__(self, job: ScrapeJob) -> None:
        self.times_ns: list[int] = []
        self._job = job
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait for the scrape that is under way; what went wrong is raised here."""
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._scrape_all()
        except (BenchFailed, OSError) as failure:
            self._failure = failure

    def _scrape_all(self) -> None:
        began = time.perf_counter() + self._job.warm_s
        buffer, replies = bytearray(SCRAPE_BYTES), HttpReplies()
        with connect(self._job.port) as connection:
            for at in self._job.scrapes_at:
                if self._over.wait(max(0.0, began + at - time.perf_counter())):
                    return
                asked = time.perf_counter_ns()
                connection.sendall(self._job.scrape)
                complete = False
                while not complete:
                    n = connection.recv_into(buffer)
                    if n == 0:
                        raise BenchFailed("the server closed the connection that scrapes")
                    complete = replies.take(buffer, n)
                self.times_ns.append(time.perf_counter_ns() - asked)


class _Writer:
    __slots__ = ("asked_ns", "replies", "requests", "socket")

    def __init__(self, job: Job, plan: list[int]) -> None:
        self.socket = connect(job.port)
        self.replies = HttpReplies()
        self.requests = itertools.cycle([job.requests[index] for index in plan])
        self.asked_ns = 0


class _Writers:
    """Connections with at most one append under way on each."""

    def __init__(self, job: Job) -> None:
        self._poller = select.epoll()
        self._by_fd: dict[int, _Writer] = {}
        self._buffer = bytearray(REPLY_BYTES)
        self.idle: deque[_Writer] = deque()
        self.busy_until_ns = 0  # when a connection was free again after none had been
        self.times_ns: list[int] = []
        try:
            for plan in job.plans:
                writer = _Writer(job, plan)
                self._by_fd[writer.socket.fileno()] = writer
                self._poller.register(writer.socket.fileno(), select.EPOLLIN)
                self.idle.append(writer)
        except BaseException:
            self.close()
            raise

    @property
    def under_way(self) -> int:
        return len(self._by_fd) - len(self.idle)

    def send(self, *, asked_ns: int) -> None:
        writer = self.idle.popleft()
        writer.asked_ns = asked_ns
        writer.socket.sendall(next(writer.requests))

    def take(self, timeout_s: float | None = None) -> None:
        """Wait for answers for so long; without a time there has to be one."""
        events = self._poller.poll(SILENCE_S if timeout_s is None else timeout_s)
        if not events and timeout_s is None:
            raise BenchFailed(f"no answer on any of {self.under_way} connections for {SILENCE_S:.0f} s")
        for fd, _ in events:
            writer = self._by_fd[fd]
            n = writer.socket.recv_into(self._buffer)
            if n == 0:
                raise BenchFailed("the server closed a connection")
            if writer.replies.take(self._buffer, n):
                now_ns = time.perf_counter_ns()
                self.times_ns.append(now_ns - writer.asked_ns)
                if not self.idle:
                    self.busy_until_ns = now_ns
                self.idle.append(writer)

    def close(self) -> None:
        self._poller.close()
        for writer in self._by_fd.values():
            writer.socket.close()


def _paced(job: ScrapeJob) -> Outcome:
    clock = time.perf_counter_ns
    period_ns = int(1e9 / job.rate)
    writers = _Writers(job)
    try:
        due_ns = clock()
        until_ns = due_ns + int(job.warm_s * 1e9)
        warm = 0
        begin: apart.Mark | None = None
        while True:
            now_ns = clock()
            if now_ns >= until_ns:
                if begin is not None:
                    break
                warm = len(writers.times_ns)
                begin = apart.mark(job.watch)
                until_ns = clock() + int(job.seconds * 1e9)
            elif not writers.idle:
                writers.take()
            elif now_ns < due_ns:
                writers.take((due_ns - now_ns) / 1e9)
            elif due_ns <= writers.busy_until_ns:
                writers.send(asked_ns=due_ns)
                due_ns += period_ns
            else:
                writers.send(asked_ns=now_ns)
                # Hazard: after a stall of this process the appends that are overdue would come in a burst. They are
                # left out; those that the server kept waiting are not.
                due_ns = max(due_ns + period_ns, now_ns)
        window = begin.until(apart.mark(job.watch))
        done = len(writers.times_ns)
        while writers.under_way:
            writers.take()
    finally:
        writers.close()
    return Outcome(
        requests=done - warm,
        wall_s=window.wall_s,
        own_cpu_s=window.own_cpu_s,
        watched_cpu_s=window.watched_cpu_s,
        acknowledged=len(writers.times_ns),
        times_ns=writers.times_ns[warm:],
    )


def drive(job: ScrapeJob) -> Scraped:
    scraper = Scraper(job)
    scraper.start()
    try:
        found = _paced(job) if job.rate else load.drive(job)
    finally:
        scraper.stop()
    return Scraped(**msgspec.structs.asdict(found), scrapes_ns=scraper.times_ns)


def run_apart(job: Job) -> Scraped:
    return apart.run("benchmarks.generators.scrapes", job, Scraped)


if __name__ == "__main__":
    sys.exit(apart.serve(ScrapeJob, drive))
