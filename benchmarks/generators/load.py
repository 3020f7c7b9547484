"""The load generator: a process of its own, one thread, one epoll loop over non-blocking sockets.

Rules: every request is bytes made before the clock starts; the loop is closed (a connection sends its next
request when its answer came); the same loop serves both protocols, and only the recogniser of the end of an
answer differs. The sockets are edge-triggered for both directions, so that a request the socket did not
take whole costs no epoll_ctl. Between the warm-up and the end it does nothing but receive, recognise and
send; after the end it waits for the answers still out, so that what was acknowledged is known exactly.

`python -m benchmarks.generators.load` takes one Job and gives one Outcome, as apart.py has it.
"""

from __future__ import annotations

import itertools
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

from benchmarks import BenchFailed, tree
from benchmarks.generators import apart, payload
from benchmarks.generators.replies import HttpReplies, PipelineReplies, Replies, SizedReplies, WsReplies

BUFFER_BYTES = 1 << 20
SILENCE_S = 20.0  # no answer on any connection for this long is a failure, not a slow server


class Job(msgspec.Struct, kw_only=True, frozen=True):
    port: int
    requests: list[bytes]
    plans: list[list[int]]  # per connection: which requests, in turn
    replies: Literal["http", "pipeline", "sized", "ws"]
    depth: int = 1  # answers per request, for "pipeline" and "ws"
    sizes: list[int] = []  # bytes of the answer to each request, for "sized"
    once: bool = False  # each plan one time instead of for `seconds`
    timed: bool = False  # one connection, the time of every request
    warm_s: float = 0.0
    seconds: float = 0.0
    watch: list[tree.Process] = []  # whose processor time to take over the same window


class Outcome(apart.Window, kw_only=True, frozen=True):
    requests: int  # answered within the window
    acknowledged: int  # answered at all: warm-up and stragglers too
    times_ns: list[int] = msgspec.field(default_factory=list)


class _Mark(msgspec.Struct, frozen=True):
    done: int
    used: apart.Mark


def _mark(done: int, watch: list[tree.Process]) -> _Mark:
    return _Mark(done, apart.mark(watch))


def _outcome(begin: _Mark, end: _Mark, *, acknowledged: int, times_ns: list[int] | None = None) -> Outcome:
    window = begin.used.until(end.used)
    return Outcome(
        requests=end.done - begin.done,
        wall_s=window.wall_s,
        own_cpu_s=window.own_cpu_s,
        watched_cpu_s=window.watched_cpu_s,
        acknowledged=acknowledged,
        times_ns=times_ns or [],
    )


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def shake_hands(connection: socket.socket) -> None:
    """Turn a new connection into a WebSocket."""
    connection.sendall(payload.WS_HANDSHAKE)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        chunk = connection.recv(4096)
        if not chunk:
            raise BenchFailed(f"the server closed a connection in the handshake: {head[:300]!r}")
        head += chunk
    if not head.startswith(b"HTTP/1.1 101") or payload.WS_ACCEPT not in head:
        raise BenchFailed(f"no WebSocket: {head[:300]!r}")


class _Connection:
    __slots__ = ("receive_into", "replies", "requests", "send", "socket", "unsent")

    def __init__(self, job: Job, plan: list[int]) -> None:
        self.socket = connect(job.port)
        if job.replies == "ws":
            shake_hands(self.socket)
        self.send = self.socket.send
        self.receive_into = self.socket.recv_into
        requests = [job.requests[index] for index in plan]
        self.requests: Iterator[bytes] = iter(requests) if job.once else itertools.cycle(requests)
        self.replies = _recogniser(job, plan)
        self.unsent: memoryview | None = None


def _recogniser(job: Job, plan: list[int]) -> Replies:
    if job.replies == "http":
        return HttpReplies()
    if job.replies == "pipeline":
        return PipelineReplies(job.depth)
    if job.replies == "ws":
        return WsReplies(job.depth)
    sizes = [job.sizes[index] for index in plan]
    return SizedReplies(iter(sizes) if job.once else itertools.cycle(sizes))


def _send(connection: _Connection, request: bytes) -> None:
    sent = connection.send(request)
    if sent != len(request):
        connection.unsent = memoryview(request)[sent:]


def _send_rest(connection: _Connection) -> None:
    rest = connection.unsent
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            break
    connection.unsent = rest if rest else None


def drive(job: Job) -> Outcome:
    """Run the job over all its connections at once."""
    poller = select.epoll()
    by_fd: dict[int, _Connection] = {}
    buffer = bytearray(BUFFER_BYTES)
    try:
        for plan in job.plans:
            connection = _Connection(job, plan)
            connection.socket.setblocking(False)
            fd = connection.socket.fileno()
            by_fd[fd] = connection
            poller.register(fd, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        return _rounds(job, poller, by_fd, buffer)
    finally:
        poller.close()
        for connection in by_fd.values():
            connection.socket.close()


def _rounds(job: Job, poller: select.epoll, by_fd: dict[int, _Connection], buffer: bytearray) -> Outcome:
    clock = time.perf_counter
    poll = poller.poll
    done = 0
    out = 0  # connections with an answer to come
    stopping = False
    begin = end = None if job.warm_s else _mark(0, job.watch)
    started = clock()
    next_mark_at = started + (job.warm_s or job.seconds) if not job.once else float("inf")

    for connection in by_fd.values():
        request = next(connection.requests, None)
        if request is not None:
            _send(connection, request)
            out += 1
    while out:
        events = poll(SILENCE_S)
        if not events:
            raise BenchFailed(f"no answer on any of {len(by_fd)} connections for {SILENCE_S:.0f} s")
        for fd, _ in events:
            connection = by_fd[fd]
            if connection.unsent is not None:
                _send_rest(connection)
            try:
                n = connection.receive_into(buffer)
            except BlockingIOError:
                continue
            complete = n > 0 and connection.replies.take(buffer, n)
            # The edge is spent only by a read that came back short of the buffer.
            while n == BUFFER_BYTES and not complete:
                try:
                    n = connection.receive_into(buffer)
                except BlockingIOError:
                    break
                complete = n > 0 and connection.replies.take(buffer, n)
            if complete:
                done += 1
                request = None if stopping else next(connection.requests, None)
                if request is None:
                    out -= 1
                else:
                    sent = connection.send(request)
                    if sent != len(request):
                        connection.unsent = memoryview(request)[sent:]
            elif n == 0:
                raise BenchFailed("the server closed a connection")
        if clock() >= next_mark_at:
            if begin is None:
                begin = _mark(done, job.watch)
                next_mark_at = begin.used.at + job.seconds
            else:
                end = _mark(done, job.watch)
                next_mark_at = float("inf")
                stopping = True
    if begin is None:
        raise BenchFailed("the plan was over before the warm-up")
    if not stopping:
        end = _mark(done, job.watch)
    assert end is not None
    return _outcome(begin, end, acknowledged=done)


def drive_timed(job: Job) -> Outcome:
    """One connection and a blocking socket, as the simplest client would do it; every request is timed."""
    connection = _Connection(job, job.plans[0])
    clock = time.perf_counter_ns
    buffer = bytearray(BUFFER_BYTES)
    times_ns: list[int] = []
    warm = 0
    begin = None
    started = clock()
    warm_until = started + int(job.warm_s * 1e9)
    deadline = warm_until + int(job.seconds * 1e9)
    try:
        for request in connection.requests:
            asked = clock()
            if begin is None and asked >= warm_until:
                begin = _mark(warm, job.watch)
                asked = clock()
            if asked >= deadline:
                break
            connection.socket.sendall(request)
            complete = False
            while not complete:
                n = connection.receive_into(buffer)
                if n == 0:
                    raise BenchFailed("the server closed the connection")
                complete = connection.replies.take(buffer, n)
            if begin is None:
                warm += 1
            else:
                times_ns.append(clock() - asked)
    finally:
        connection.socket.close()
    if begin is None:
        raise BenchFailed("the plan was over before the warm-up")
    done = warm + len(times_ns)
    return _outcome(begin, _mark(done, job.watch), acknowledged=done, times_ns=times_ns)


def run_apart(job: Job) -> Outcome:
    return apart.run("benchmarks.generators.load", job, Outcome)


def _work(job: Job) -> Outcome:
    return drive_timed(job) if job.timed else drive(job)


if __name__ == "__main__":
    sys.exit(apart.serve(Job, _work))
