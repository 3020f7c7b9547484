"""Clients of `/v0/ws`: what is said over it (`Conversation`) apart from how it travels.

`Socket` goes through trio-websocket, which knows nothing of this project; one trio loop in a thread serves all of them,
so a test stays synchronous. It takes one message at a time from the network, so a test that does not read is a client
that does not read. `RawSocket` puts RFC 6455 frames on a plain socket, also those that no library would send.

Every frame of the server is checked for exactly the fields that belong to its `op`, and every wait has a deadline.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, open_websocket_url

from topics.errors import STATUS

from .wire import Wire

DEADLINE_S = 30.0
CLOSING_S = 15.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
T = TypeVar("T")
Json = dict[str, Any]

_numbers = itertools.count(1)


class Closed(Exception):
    """The server ended the conversation. 1006: without saying so."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"{code} {reason}".rstrip())
        self.code = code
        self.reason = reason


# --- what the server says ----------------------------------------------------------------------------

ABNORMAL = 1006  # RFC 6455 §7.1.5
REPLIES: dict[str, set[str]] = {
    "subscribed": {"topics"},
    "unsubscribed": {"topics"},  # and topic, if it was asked so
    "pong": {"ts"},
    "ack": {"topic", "first_seq", "last_seq", "seqs", "head_seq", "count", "created", "deduped", "performance"},
    "error": {"code", "message"},
}
PUSHES: dict[str, set[str]] = {
    "record": {"topic", "from_seq", "to_seq", "head_seq", "records"},
    "caught_up": {"topic", "head_seq"},
    "tombstone": {"topic", "reason", "gap_from", "gap_to", "earliest_seq", "head_seq"},
    "topic_deleted": {"topic", "head_seq", "reason"},
}
REASONS = {"cap", "ttl", "mixed", "recreated", "source_trim", "from_seq_too_old"}


class Frame:
    """One message of the server."""

    def __init__(self, raw: str) -> None:
        self.raw = raw
        self.json: Json = json.loads(raw)
        self.op: str = self.json["op"]
        fields = set(self.json) - {"op"}
        if self.op in PUSHES:
            assert fields == PUSHES[self.op], raw[:400]
            getattr(self, f"_check_{self.op}", lambda: None)()
        else:
            fields -= {"request_id"}
            optional = {"ack": {"seqs"}, "error": {"detail"}, "unsubscribed": {"topic"}}.get(self.op, set())
            assert fields | optional == REPLIES[self.op] | optional, raw[:400]
            getattr(self, f"_check_{self.op}", lambda: None)()

    def _check_record(self) -> None:
        seqs = self.seqs
        assert seqs, "a record frame without records"
        assert seqs == sorted(set(seqs)), seqs
        assert self["from_seq"] < seqs[0], self
        assert seqs[-1] <= self["to_seq"] <= self["head_seq"], self
        for record in self["records"]:
            assert set(record) <= {"$seq", "$ts", "$node", "$tag", "data", "meta"}, record
            assert isinstance(record["$ts"], int)

    def _check_tombstone(self) -> None:
        assert self["reason"] in REASONS, self

    def _check_subscribed(self) -> None:
        for place in self["topics"].values():
            assert set(place) == {"from_seq", "head_seq", "earliest_seq"}, self
            assert all(isinstance(seq, int) for seq in place.values()), self

    def _check_ack(self) -> None:
        performance = self["performance"]
        assert set(performance) == {"server_total_ms", "wal_append_ms", "fsync_ms", "throttle_wait_ms"}, performance
        assert all(isinstance(value, int | float) and value >= 0 for value in performance.values()), performance
        first, last = self["first_seq"], self["last_seq"]
        assert self["count"] == last - first + 1, self
        assert self.json.get("seqs") in (None, list(range(first, last + 1))), self
        assert self["head_seq"] >= last

    def _check_error(self) -> None:
        assert self["code"] in STATUS, self
        assert isinstance(self["message"], str)
        assert self["message"]
        assert isinstance(self.json.get("detail", {}), dict)

    def __getitem__(self, name: str) -> Any:
        return self.json[name]

    def __contains__(self, name: str) -> bool:
        return name in self.json

    def __repr__(self) -> str:
        return f"<{self.raw[:400]}>"

    @property
    def request_id(self) -> Any:
        return self.json.get("request_id")

    @property
    def topic(self) -> str | None:
        return self.json.get("topic")

    @property
    def error(self) -> str | None:
        """The error code, None for anything else."""
        return self.json["code"] if self.op == "error" else None

    @property
    def seqs(self) -> list[int]:
        """Of the records of a record frame."""
        return [record["$seq"] for record in self.json["records"]]

    @property
    def data(self) -> list[Any]:
        """Of the records of a record frame."""
        return [record["data"] for record in self.json["records"]]

    def without(self, *names: str) -> Json:
        return {name: value for name, value in self.json.items() if name not in names}


# --- what is said to it ------------------------------------------------------------------------------


class Conversation(ABC):
    """Commands and frames, over whatever carries text messages."""

    def __init__(self) -> None:
        self._kept: deque[Frame] = deque()  # came while something else was waited for

    @abstractmethod
    def send_text(self, text: str) -> None: ...

    @abstractmethod
    def receive_text(self, within_s: float) -> str:
        """The next message. TimeoutError: there is none; Closed: there will be none."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tell(self, op: str, **fields: object) -> None:
        self.send_text(json.dumps({"op": op, **fields}))

    def receive(self, within_s: float = DEADLINE_S) -> Frame:
        """The next frame, in the order they came."""
        return self._kept.popleft() if self._kept else Frame(self.receive_text(within_s))

    def call(self, op: str, **fields: object) -> Frame:
        """Say it and wait for its reply; what comes before is kept."""
        request_id = fields.setdefault("request_id", f"r{next(_numbers)}")
        self.tell(op, **fields)
        return self.reply_to(request_id)

    def reply_to(self, request_id: object) -> Frame:
        deadline = time.monotonic() + DEADLINE_S
        for at, frame in enumerate(self._kept):
            if frame.request_id == request_id:
                del self._kept[at]
                return frame
        while True:
            frame = Frame(self.receive_text(max(deadline - time.monotonic(), 0)))
            if frame.request_id == request_id:
                return frame
            self._kept.append(frame)

    def replies(self, count: int) -> list[Frame]:
        """The next so many replies, in order; what is pushed meanwhile is kept."""
        found: list[Frame] = []
        pushed: list[Frame] = []
        while len(found) < count:
            frame = self.receive()
            (pushed if frame.op in PUSHES else found).append(frame)
        self._kept.extendleft(reversed(pushed))
        return found

    def subscribe(self, topic: str, **fields: object) -> Frame:
        return self._expect("subscribed", self.call("subscribe", topic=topic, **fields))

    def unsubscribe(self, topic: str, **fields: object) -> Frame:
        return self._expect("unsubscribed", self.call("unsubscribe", topic=topic, **fields))

    def publish(self, topic: str, *data: object, **fields: object) -> Frame:
        """Records that are data alone."""
        records = [{"data": value} for value in data]
        return self._expect("ack", self.call("publish", topic=topic, records=records, **fields))

    def ping(self) -> Frame:
        return self._expect("pong", self.call("ping"))

    @staticmethod
    def _expect(op: str, frame: Frame) -> Frame:
        assert frame.op == op, frame
        return frame

    def records(self, topic: str, count: int) -> list[Json]:
        """The next so many records of a topic, no gap reported between them; frames of other topics are kept."""
        found: list[Json] = []
        others: list[Frame] = []
        while len(found) < count:
            frame = self.receive()
            if frame.topic != topic or frame.op in REPLIES:
                others.append(frame)
                continue
            assert frame.op in ("record", "caught_up"), frame
            found += frame.json.get("records", [])
        self._kept.extendleft(reversed(others))
        assert len(found) == count, [record["$seq"] for record in found]
        return found

    def data(self, topic: str, count: int) -> list[Any]:
        return [record["data"] for record in self.records(topic, count)]

    def until(self, op: str, topic: str | None = None) -> list[Frame]:
        """All frames up to and with the next one of that kind."""
        frames = [self.receive()]
        while frames[-1].op != op or (topic is not None and frames[-1].topic != topic):
            frames.append(self.receive())
        return frames

    def settle(self, topic: str, **fields: object) -> Frame:
        """Subscribe to what has nothing to send and wait until it is live; the reply."""
        reply = self.subscribe(topic, **fields)
        caught = self.receive()
        assert (caught.op, caught.topic) == ("caught_up", topic), caught
        return reply

    def assert_quiet(self, for_s: float = 0.2) -> None:
        """Nothing is pushed: neither before the answer to a ping nor a little later."""
        self.ping()
        assert not self._kept, list(self._kept)
        try:
            frame = self.receive(for_s)
        except TimeoutError:
            return
        raise AssertionError(f"expected silence, got {frame}")

    def wait_closed(self) -> Closed:
        """How the server ends it; what it still sends before is kept."""
        while True:
            try:
                self._kept.append(Frame(self.receive_text(DEADLINE_S)))
            except Closed as closed:
                return closed

    def kept(self) -> list[Frame]:
        """What has come and was not asked for yet."""
        frames = list(self._kept)
        self._kept.clear()
        return frames


# --- over trio-websocket -----------------------------------------------------------------------------


class _Loop:
    """A trio loop in a thread of its own."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        threading.Thread(target=trio.run, args=(self._main,), name="sockets", daemon=True).start()
        self._ready.wait()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self.nursery:
            self._ready.set()
            await trio.sleep_forever()

    def run(self, function: Callable[[], Awaitable[T]], within_s: float) -> T:
        """TimeoutError if it takes longer."""

        async def limited() -> T:
            with trio.fail_after(within_s):
                return await function()

        try:
            return trio.from_thread.run(limited, trio_token=self._token)
        except trio.TooSlowError:
            raise TimeoutError(f"not within {within_s} s") from None


@cache
def _loop() -> _Loop:
    return _Loop()


class Socket(Conversation):
    def __init__(self, port: int, path: str = "/v0/ws", **headers: str) -> None:
        super().__init__()
        self._url = f"ws://127.0.0.1:{port}{path}"
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._done = trio.Event()
        loop = _loop()
        self._socket: WebSocketConnection = loop.run(lambda: loop.nursery.start(self._hold), DEADLINE_S)

    async def _hold(self, *, task_status: trio.TaskStatus[WebSocketConnection]) -> None:
        held: WebSocketConnection | None = None
        try:
            async with open_websocket_url(
                self._url,
                extra_headers=self._headers,
                max_message_size=MAX_MESSAGE_BYTES,
                receive_buffer_size=1 << 16,
                connect_timeout=DEADLINE_S,
                disconnect_timeout=CLOSING_S,
            ) as connection:
                held = connection
                task_status.started(connection)
                await self._done.wait()
        except Exception:
            if held is None:  # afterwards whoever reads or writes is told; the loop serves others too
                raise
        finally:
            if held is not None:  # trio-websocket leaves it open where the server closed first
                await trio.aclose_forcefully(held._stream)

    def send_text(self, text: str) -> None:
        self._run(lambda: self._socket.send_message(text), DEADLINE_S)

    def send_bytes(self, content: bytes) -> None:
        self._run(lambda: self._socket.send_message(content), DEADLINE_S)

    def receive_text(self, within_s: float) -> str:
        message = self._run(self._socket.get_message, within_s)
        assert isinstance(message, str), message
        return message

    def _run(self, function: Callable[[], Awaitable[T]], within_s: float) -> T:
        try:
            return _loop().run(function, within_s)
        except ConnectionClosed as error:
            if error.reason is None:
                raise Closed(ABNORMAL) from None
            raise Closed(error.reason.code, error.reason.reason or "") from None

    def end(self, code: int = 1000, reason: str | None = None) -> int:
        """The closing handshake, begun by us; the code that the server answered."""
        self._run(lambda: self._socket.aclose(code, reason), CLOSING_S)
        assert self._socket.closed is not None
        return int(self._socket.closed.code)

    def close(self) -> None:
        async def done() -> None:
            self._done.set()

        _loop().run(done, CLOSING_S)


# --- RFC 6455 by hand --------------------------------------------------------------------------------

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
HEADERS = {
    "Host": "localhost",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": KEY,
    "Sec-WebSocket-Version": "13",
}


def accept_for(key: str) -> str:
    digest = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    return base64.b64encode(digest).decode()


def handshake(
    changes: dict[str, str | None] | None = None,
    *,
    path: str = "/v0/ws",
    method: str = "GET",
    version: str = "HTTP/1.1",
) -> bytes:
    """The request that opens a socket; `changes` replaces headers, None leaves one out."""
    headers = {**HEADERS, **(changes or {})}
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"{method} {path} {version}", *lines, "", ""]).encode("latin-1")


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    reserved: int = 0,
    masked: bool = True,
    announced: int | None = None,
    length_bytes: int | None = None,
) -> bytes:
    """
    One frame of a client.

        FIN RSV1-3 opcode(4) | MASK length(7) | length(16 or 64) | mask(32) | payload

    `announced` is a length other than the payload's; `length_bytes` (0, 2 or 8) a form longer than needed.
    """
    size = len(payload) if announced is None else announced
    if length_bytes is None:
        length_bytes = 0 if size < 126 else 2 if size < 1 << 16 else 8
    mask_bit = 0x80 if masked else 0
    short = {0: size, 2: 126, 8: 127}[length_bytes]
    head = bytes([(0x80 if fin else 0) | reserved << 4 | opcode, mask_bit | short])
    if length_bytes:
        head += size.to_bytes(length_bytes, "big")
    if not masked:
        return head + payload
    mask = os.urandom(4)
    return head + mask + mask_bytes(payload, mask)


def mask_bytes(payload: bytes, mask: bytes) -> bytes:
    if not payload:
        return b""
    repeated = (mask * (len(payload) // 4 + 1))[: len(payload)]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(payload), "big")


def text_frame(text: str | bytes, **options: Any) -> bytes:
    return frame(TEXT, text.encode() if isinstance(text, str) else text, **options)


def close_frame(code: int | None = None, reason: bytes = b"") -> bytes:
    return frame(CLOSE, b"" if code is None else struct.pack(">H", code) + reason)


class RawFrame(NamedTuple):
    opcode: int
    payload: bytes
    fin: bool


def take_frame(unread: bytes) -> tuple[RawFrame, bytes] | None:
    """The first frame of a server and what follows it; None: it is not all there. Checks what a server must not do."""
    if len(unread) < 2:
        return None
    fin, reserved, opcode = unread[0] >> 7, unread[0] >> 4 & 7, unread[0] & 15
    assert reserved == 0, "a reserved bit without an extension"
    assert unread[1] < 0x80, "a masked frame from the server"
    size, at = unread[1], 2
    if size >= 126:
        length_bytes = 2 if size == 126 else 8
        at += length_bytes
        if len(unread) < at:
            return None
        size = int.from_bytes(unread[2:at], "big")
        assert size >= (126 if length_bytes == 2 else 1 << 16), "a length in more bytes than it needs"
    assert opcode in (CONTINUATION, TEXT, CLOSE, PING, PONG), opcode
    if opcode >= CLOSE:
        assert fin, "a control frame in fragments"
        assert size < 126, "a control frame of that size"
    if len(unread) < at + size:
        return None
    return RawFrame(opcode, unread[at : at + size], bool(fin)), unread[at + size :]


def close_reason(payload: bytes) -> Closed:
    """What a close frame says; 1005 stands for nothing."""
    if not payload:
        return Closed(1005)
    return Closed(struct.unpack(">H", payload[:2])[0], payload[2:].decode())


class RawSocket(Wire, Conversation):
    def __init__(self, port: int, *, upgraded: bool = True, receive_buffer: int | None = None) -> None:
        Conversation.__init__(self)
        Wire.__init__(self, port)
        self.frames: list[RawFrame] = []  # pongs that came between messages
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if upgraded:
            self.upgrade(handshake())

    def upgrade(self, *parts: bytes) -> dict[str, str]:
        """Send a handshake and check that it is accepted; the headers of the answer."""
        self.send(*parts)
        return self.upgrade_answer()

    def upgrade_answer(self) -> dict[str, str]:
        status, headers = self.head()
        assert status == 101, (status, headers, self._unread)
        return headers

    # --- frames ---

    def take(self, within_s: float = DEADLINE_S) -> RawFrame:
        """The next frame of any kind. Closed (1006): the connection ended before one."""
        deadline = time.monotonic() + within_s
        while (taken := take_frame(self._unread)) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self.sock.settimeout(remaining)
            try:
                self._more()
            except (EOFError, ConnectionError) as error:
                raise Closed(ABNORMAL, repr(error)) from None
        found, self._unread = taken
        return found

    def receive_text(self, within_s: float) -> str:
        deadline = time.monotonic() + within_s
        parts: list[bytes] = []
        while True:
            found = self.take(max(deadline - time.monotonic(), 0))
            if found.opcode == PING:
                self.send(frame(PONG, found.payload))
            elif found.opcode == CLOSE:
                raise self._answer_close(found.payload)
            elif found.opcode == PONG:
                self.frames.append(found)
            else:
                assert (found.opcode == CONTINUATION) == bool(parts), found
                parts.append(found.payload)
                if found.fin:
                    return b"".join(parts).decode()

    def _answer_close(self, payload: bytes) -> Closed:
        try:
            self.send(frame(CLOSE, payload))
        except OSError:
            pass  # it may be gone already
        return close_reason(payload)

    def send_text(self, text: str) -> None:
        self.send(text_frame(text))

    def assert_ended(self) -> None:
        """The server's side is closed; what was still under way is skipped."""
        self.sock.settimeout(CLOSING_S)
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass

    def close_code(self) -> int:
        """The code the server closes with, and that it closes the connection too."""
        code = self.wait_closed().code
        if code != ABNORMAL:
            self.assert_ended()
        return code


# --- opening them ------------------------------------------------------------------------------------


@contextmanager
def dialling(port: int) -> Iterator[Callable[..., Socket]]:
    """Opens sockets to that port, or to another one; all are closed at the end."""
    sockets: list[Socket] = []

    def dial(to: int = port, **options: Any) -> Socket:
        sockets.append(Socket(to, **options))
        return sockets[-1]

    try:
        yield dial
    finally:
        for opened in sockets:
            opened.close()
