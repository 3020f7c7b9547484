"""A client's connection in the HTTP/1 lane: what has come, what is asked, what goes out. The lane does the work."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time
from collections import deque
from typing import Any

import msgspec

from topics import limits
from topics.gateway.api.types import Response, error_response
from topics.gateway.http1.append_batch import PlainAppend
from topics.gateway.http1.chunks import ChunkDecoder
from topics.gateway.http1.head import Head
from topics.gateway.large.answer import is_large
from topics.gateway.streams.registry import Stream

_INT = struct.Struct("i")
INPUT = select.EPOLLIN | select.EPOLLRDHUP
EMPTY = b""
_NONE: list[Any] = []  # never written to


def _queued(fd: int) -> int:
    """Bytes that the kernel holds for a peer that has not acknowledged them; 0 if it can't be asked."""
    try:
        return int(_INT.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(_INT.size)))[0])
    except OSError:
        return 0


class Exchange(msgspec.Struct, gc=False, eq=False):
    """One request of one connection, waiting for its answer's turn."""

    connection: Any  # a Connection
    keep_alive: bool
    gzipped: bool
    bodiless: bool
    id: int
    started_ns: int
    number: int  # of its route
    slot: int = 0  # the key whose slot it holds
    request_id: bytes | None = None
    line: tuple[str, str] | None = None
    key: int | str = 0  # what the access log says of it: the number or the name of the key that it shows
    holds: bool = False  # it may become a stream: what follows it waits
    again: bool = False  # the client can ask again without harm: without room for the answer it is told to
    most: int = 0  # bytes that the answer may have, if these are many
    packing: int = 0  # bytes of the answer that is being compressed
    answer: bytes | None = None

    def finish(self, value: Response) -> None:
        connection = self.connection
        if connection.closed:
            connection.lane.answered(self, value)
            if value.stream is not None:
                value.stream.discard()
            return
        lane = connection.lane
        if self.packing:
            self.packing = 0
        elif self.again and not lane.budget.takes_answer(len(value.body)):
            value = error_response(lane.budget.refusal())
        elif self.gzipped and is_large(value):
            self.packing = len(value.body) + len(value.tail)
            lane.sender.settle_unread(connection)
            lane.pack(self, value)
            return
        if value.stream is not None:
            connection.starting = value.stream  # before anything can go wrong: whoever closes gives it back
        lane.answered(self, value)
        keep_alive = self.keep_alive = self.keep_alive and not value.close and not lane.handlers.draining
        if value.stream is not None:
            self.keep_alive = True
            self.answer = lane.answers.encode_stream(value, id=self.id, request_id=self.request_id)
        else:
            self.answer = lane.answers.encode(
                value,
                keep_alive=keep_alive,
                gzipped=self.gzipped,
                bodiless=self.bodiless,
                id=self.id,
                request_id=self.request_id,
            )
            if len(self.answer) > limits.SMALL_BODY_BYTES:
                lane.sender.settle_unread(connection)
        if self.holds:
            connection.held = value.stream is not None  # what follows a stream's head is the stream's
        lane.dirty.add(connection)

    @property
    def gone(self) -> bool:
        return bool(self.connection.closed)

    def let_go(self) -> None:
        """Its large body is read."""
        self.connection.reading = 0
        self.connection.lane.settle(self.connection)

    def abort(self) -> None:
        self.connection.abort()


class Connection:
    """A client's connection; for a stream it is the Outlet."""

    __slots__ = (
        "asks",
        "body_ns",
        "booked",
        "buffer",
        "chunks",
        "closed",
        "closing",
        "costly",
        "discarding",
        "exchanges",
        "fd",
        "frames",
        "head",
        "head_bytes",
        "held",
        "interest",
        "lane",
        "large",
        "missing",
        "out",
        "out_ns",
        "out_queued",
        "out_sent",
        "out_taken",
        "owed",
        "owes_continue",
        "paused",
        "progress_ns",
        "raw_head",
        "reading",
        "sent",
        "sock",
        "starting",
        "stream",
        "unread",
        "written",
    )

    def __init__(self, lane: Any, sock: socket.socket) -> None:
        self.lane = lane
        self.sock = sock
        self.fd = sock.fileno()
        self.buffer: bytes | bytearray = EMPTY  # received, not yet understood
        self.head: Head | None = None  # of the request whose body is arriving ...
        self.raw_head = EMPTY  # ... and its bytes
        self.chunks: ChunkDecoder | None = None
        self.head_bytes = 0  # of the last head
        self.booked = 0  # what the budget knows of the bytes that we hold
        self.large: bytearray | None = None  # a large body, so far; empty if nobody will read it ...
        self.missing = 0  # ... and how much of it is still to come
        self.reading = 0  # bytes of a body that came whole and is read in slices
        self.body_ns = 0  # when the body began to arrive
        self.exchanges: deque[Exchange | PlainAppend] = deque()
        self.asks = 0  # of the exchanges, those that are not plain appends: their answers may be large
        self.unread = 0  # bytes of answers that wait for the client, and may come for large ones that are asked for ...
        self.owed = 0  # ... and of those that wait, what the budget knows
        self.out: bytes | memoryview = EMPTY
        self.out_ns = 0  # when the client fell behind with reading ...
        self.out_sent = 0  # ... what the kernel has taken since ...
        self.out_queued = 0  # ... with what it held already ...
        self.out_taken = 0  # ... and what the client has taken, when we last looked
        self.interest = INPUT
        self.closing = False  # no more requests: close when the last answer is out
        self.owes_continue = False
        self.discarding = False  # all is said; what the client still sends is read and dropped
        self.closed = False
        self.costly = False  # its last request took long: those of others go first
        self.progress_ns = time.monotonic_ns()
        self.held = False  # a request that may become a stream is out: what follows it waits
        self.starting: Stream | None = None  # begins when its response's turn has come
        self.stream: Stream | None = None
        self.frames: list[bytes | memoryview] = _NONE  # of the stream, to be sent in this round
        self.written = 0  # bytes of the stream given to us ...
        self.sent = 0  # ... and taken by the socket
        self.paused = False

    @property
    def body_bytes(self) -> int:
        """How much of the body under way has come."""
        if self.large is not None and self.head is not None:
            return self.head.body_length - self.missing
        return len(self.buffer) if self.chunks is None else self.chunks.size + len(self.buffer)

    @property
    def held_bytes(self) -> int:
        """What has come and was not served, in bytes of memory."""
        held = len(self.buffer) + self.reading
        if self.head is not None:
            held += len(self.raw_head)
        if self.large is not None:
            held += len(self.large)
        return held if self.chunks is None else held + len(self.chunks.body)

    @property
    def unread_bytes(self) -> int:
        """Answers that the socket has not taken, and those that are being compressed for it."""
        answers = [exchange.answer for exchange in self.exchanges if exchange.answer is not None]
        packing = [exchange.packing for exchange in self.exchanges if isinstance(exchange, Exchange)]
        return len(self.out) + sum(map(len, answers)) + sum(packing)

    @property
    def passing(self) -> Head | None:
        """The head of a body of which nothing is kept."""
        if self.head is None or self.head.reads_body or (self.large is None and self.chunks is None):
            return None
        return self.head

    @property
    def movable(self) -> bool:
        """Another process can go on with it: nothing is asked, nothing has to be sent."""
        busy = self.exchanges or self.out or self.held or self.starting or self.stream or self.owes_continue
        return not (busy or self.closed or self.closing or self.discarding)

    def unserved(self) -> bytes:
        """What has come and was not served: bytes that bring another connection to where this one is."""
        if self.head is None:
            return bytes(self.buffer)
        body = self.buffer if self.large is None else self.large
        return self.raw_head + (b"" if self.chunks is None else self.chunks.encoded()) + bytes(body)

    def falls_behind(self, now_ns: int) -> None:
        self.out_ns = now_ns
        self.out_sent = self.out_taken = 0
        self.out_queued = _queued(self.fd)

    def takes_on(self, now_ns: int) -> int:
        """What the client has taken since it fell behind. We are told in lumps, so the kernel is asked what it still
        holds: a slow reader is no dead one."""
        taken = self.out_sent + self.out_queued - _queued(self.fd)
        if taken > self.out_taken:
            self.out_taken = taken
            self.progress_ns = now_ns
        return taken

    @property
    def peer(self) -> str:
        try:
            name = self.sock.getpeername()
        except OSError:
            return "-"  # it has left
        return f"{name[0]}:{name[1]}"

    # --- what a stream may do ---

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.frames.append(data)
            self.written += len(data)
            self.lane.dirty.add(self)

    def finish(self) -> None:
        """Close when everything is out; the sweep does not wait for long."""
        if not self.closed:
            self.closing = True
            self.progress_ns = time.monotonic_ns()
            self.lane.dirty.add(self)

    def abort(self) -> None:
        self.lane.close(self)

    def pause(self) -> None:
        self.paused = True
        self.lane.listen(self)

    def resume(self) -> None:
        self.paused = False
        self.lane.listen(self)
        if self.buffer and not self.closed:
            self.lane.unfinished[self] = None  # what came while it was not heard
