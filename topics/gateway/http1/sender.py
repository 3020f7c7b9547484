"""Answers and frames on their way out: once per connection and round, as much as its socket takes.

Rules: answers leave in the order of their requests; while a socket does not take what it was given, what is behind that
stays where it is; a stream begins when its response's turn has come, and from then on its frames are all that is sent.
Large answers before it have to be with the socket first: they are counted and judged as answers, which a stream's
frames are not.
Before a connection is closed the client gets a moment to read the last answer.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from topics import limits
from topics.gateway.admission.budget import Budget
from topics.gateway.http1.connection import EMPTY, INPUT, Connection, Exchange
from topics.gateway.http1.response import CONTINUE
from topics.gateway.streams.registry import Stream
from topics.shm.usage import Meter, Slots

RECEIVE_BYTES = 256 * limits.KIB
_SEND_BYTES = 1 * limits.MIB  # answers in one send, or waiting to be: those behind them wait where they are
NEVER_NS = 2**63


class Sender:
    def __init__(
        self,
        *,
        epoll: select.epoll,
        slots: Slots | None,
        meter: Meter | None,
        close: Callable[[Connection], None],
        fail: Callable[[Connection, Exception], None],
        resume: Callable[[Connection], None],
        budget: Budget,
    ) -> None:
        self._budget = budget
        self.dirty: set[Connection] = set()
        self._epoll = epoll
        self._slots = slots
        self._held = slots.held if slots is not None and slots.alone else None
        self._meter = meter
        self._close = close
        self._fail = fail
        self._resume = resume  # there is room for answers again: go on with what it has sent
        self._input = INPUT  # what connections between two requests are asked for

    def stop_reading(self) -> None:
        """From now on connections get their answers and are not read from: another process goes on with them."""
        self._input = 0

    def forget_counters(self) -> None:
        """They belong to another process now."""
        self._slots = self._meter = None

    def send_dirty(self, until_ns: int = NEVER_NS) -> None:
        """Send to every connection that has something new, once; at `until_ns` (perf_counter_ns) the rest stays for the
        next call."""
        if self._meter is not None and self._meter.plain_us:
            self._meter.flush()
        sent = 0
        while self.dirty:
            connection = self.dirty.pop()
            try:
                self.send(connection)
            except Exception as error:
                self._fail(connection, error)
            sent += 1
            if not sent & 7 and time.perf_counter_ns() > until_ns:
                break

    def send(self, connection: Connection) -> None:
        if connection.stream is not None:
            self._send_frames(connection, connection.stream)
            return
        exchanges = connection.exchanges
        parts: list[bytes | memoryview] = [connection.out] if connection.out else []
        size = len(connection.out)
        last = True
        while exchanges and (answer := exchanges[0].answer) is not None and size < _SEND_BYTES:
            exchange = exchanges.popleft()
            parts.append(answer)
            size += len(answer)
            connection.asks -= isinstance(exchange, Exchange)
            if exchange.slot:
                if self._held is not None:
                    self._held[exchange.slot] -= 1
                elif self._slots is not None:
                    self._slots.give(exchange.slot)
            last = exchange.keep_alive
            if not last:
                self.drop_exchanges(connection)
                connection.closing = True
        if connection.owes_continue and not exchanges:
            connection.owes_continue = False
            if connection.head is not None:
                parts.append(CONTINUE)
        starts = connection.starting is not None and not exchanges
        if starts and size <= limits.SMALL_BODY_BYTES:
            self._start_stream(connection, parts)
            return
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            try:
                sent = connection.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent:
                connection.progress_ns = time.monotonic_ns()
            if sent == len(data):
                connection.out = EMPTY
            else:
                if connection.out:
                    connection.out_sent += sent
                else:
                    connection.falls_behind(time.monotonic_ns())
                connection.out = memoryview(data)[sent:]
        if connection.out or connection.unread:
            self.settle_unread(connection)
        if connection.out or (exchanges and exchanges[0].answer is not None):
            if not connection.out:
                connection.falls_behind(time.monotonic_ns())  # the kernel may have taken just that, and no more
            self.set_interest(connection, connection.interest | select.EPOLLOUT)
        elif starts:
            self._start_stream(connection, [])
        elif connection.closing and not exchanges:
            self._finish(connection)
        elif connection.closing or connection.held:
            self.set_interest(connection, connection.interest & ~select.EPOLLOUT)
        elif connection.interest != self._input:
            self.set_interest(connection, self._input)
            if connection.buffer and self._input:
                self._resume(connection)

    def settle_unread(self, connection: Connection) -> None:
        """Account for the answers that it has not taken. A crowd of small ones is counted when its socket is full."""
        waits = connection.unread_bytes
        self._budget.book(connection.owed, waits)
        connection.owed = connection.unread = waits
        for exchange in connection.exchanges:
            if exchange.answer is None and isinstance(exchange, Exchange) and not exchange.packing:
                connection.unread += exchange.most

    def drop_exchanges(self, connection: Connection) -> None:
        """Nobody waits for their answers; what they hold is given back."""
        if self._slots is not None:
            for exchange in connection.exchanges:
                if exchange.slot:
                    self._slots.give(exchange.slot)
        connection.exchanges.clear()
        connection.asks = 0

    def _start_stream(self, connection: Connection, parts: list[bytes | memoryview]) -> None:
        """Its response's turn has come: the connection is the stream's from here on."""
        stream = connection.stream = connection.starting
        assert stream is not None
        connection.starting = None
        connection.closing = False  # a client that would have closed after its answer waits for this one's end
        connection.out = EMPTY
        self.settle_unread(connection)
        connection.frames = parts
        connection.written = sum(map(len, parts))
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.STREAM_TIMEOUT_MS)
        stream.start(connection, EMPTY)
        self.listen(connection)
        if connection.buffer:
            self._resume(connection)  # what came behind its request
        if connection.stream is stream:
            self._send_frames(connection, stream)

    def listen(self, connection: Connection) -> None:
        """Ask epoll for what a stream's connection waits for."""
        interest = (0 if connection.paused else INPUT) | (select.EPOLLOUT if connection.out else 0)
        self.set_interest(connection, interest)

    def _send_frames(self, connection: Connection, stream: Stream) -> None:
        frames = connection.frames
        if connection.discarding or connection.closed:
            return
        if connection.out or frames:
            if connection.out:
                data: bytes | memoryview = b"".join((connection.out, *frames)) if frames else connection.out
            else:
                data = frames[0] if len(frames) == 1 else b"".join(frames)
            frames.clear()
            try:
                sent = connection.sock.send(data)
            except BlockingIOError:
                sent = 0
            connection.sent += sent
            if sent == len(data):
                if connection.out:
                    connection.out = EMPTY
                    self.listen(connection)
                stream.drained()
            else:
                waits = bool(connection.out)
                connection.out = memoryview(data)[sent:]
                if not waits:
                    self.listen(connection)
                elif sent:
                    stream.drained()
            if sent:
                connection.progress_ns = time.monotonic_ns()
        if connection.closing and not connection.out and not frames:
            self._finish(connection)

    def _finish(self, connection: Connection) -> None:
        """Everything is said. Closing with bytes unread would reset the connection and take the answer with it, so
        shut our side down and wait a moment for the client's."""
        if connection.discarding:
            return
        connection.sock.shutdown(socket.SHUT_WR)
        connection.discarding = True
        connection.progress_ns = time.monotonic_ns()
        self.set_interest(connection, INPUT)

    def discard(self, connection: Connection) -> None:
        for _ in range(16):
            try:
                data = connection.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close(connection)
                return

    def set_interest(self, connection: Connection, interest: int) -> None:
        if connection.interest != interest and not connection.closed:
            connection.interest = interest
            self._epoll.modify(connection.fd, interest)
