"""A reader of event streams by either lane, which checks on every frame what all frames have in common.

- The parser is a browser's: lines end with LF, CR or CRLF, a comment may stand anywhere, a blank line dispatches. So
  whatever a record could forge would be seen here as it would be there.
- Every read has a deadline. What is not read stays in the kernel (HTTP/1.1) or in the flow control window (HTTP/2): a
  stream nobody reads is a slow consumer.
- `EventStream` reads one response; `Watching` makes sessions, opens their streams, and closes all of them at the end.
"""

from __future__ import annotations

import base64
import json
import re
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self

from .client import Answer, Client, Lane
from .h2wire import H2Wire
from .server import Server
from .wire import request

WITHIN_S = 30.0
WID = re.compile(r"wid_[A-Za-z0-9_-]{22}")

Headers = Sequence[tuple[str, str]]
Topics = str | Sequence[str] | Mapping[str, Mapping[str, object]]


# --- the composite id --------------------------------------------------------------------------------


def encode_cursor(positions: Mapping[str, object]) -> str:
    raw = json.dumps(positions, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode_cursor(text: str) -> dict[str, int]:
    """The positions in an id; an id that is written in any other way than ours is a failure."""
    positions: dict[str, int] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert encode_cursor(positions) == text, text
    return positions


# --- frames ------------------------------------------------------------------------------------------

# event -> the fields of its data. All of these have an id; `error` has none, and fields that depend on its code.
SHAPES: dict[str, set[str]] = {
    "record": {"topic", "records", "from_seq", "to_seq", "head_seq"},
    "tombstone": {"topic", "reason", "gap_from", "gap_to", "earliest_seq", "head_seq"},
    "caught-up": {"topic", "head_seq"},
    "topic-deleted": {"topic", "head_seq", "reason"},
}
RECORD_ALWAYS = {"$seq", "$ts"}
RECORD_MAYBE = {"$tag", "$node", "data", "meta"}
REASONS = {"cap", "ttl", "mixed", "recreated", "source_trim", "from_seq_too_old"}


class Frame:
    """One dispatched event, or one comment. `fields` is what stood on the wire, line by line."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self.fields = fields
        found = dict(fields)
        self.id = found.get("id")
        self.event = found.get("event")
        self.comment = found.get("")
        self.text = "\n".join(value for name, value in fields if name == "data")

    def __repr__(self) -> str:
        return f"<{self.fields!r:.300}>"

    def __getitem__(self, name: str) -> Any:
        return self.json[name]

    @cached_property
    def json(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.text)
        return decoded

    @cached_property
    def cursor(self) -> dict[str, int]:
        assert self.id is not None, self
        return decode_cursor(self.id)

    @property
    def seqs(self) -> list[int]:
        return [record["$seq"] for record in self["records"]]

    @property
    def what(self) -> tuple[Any, ...]:
        """The frame in short, to compare whole sequences of them."""
        if self.event == "record":
            return ("record", self["topic"], self.seqs)
        if self.event == "tombstone":
            return ("tombstone", self["topic"], self["reason"], self["gap_from"], self["gap_to"])
        if self.event in ("caught-up", "topic-deleted"):
            return (self.event, self["topic"], self["head_seq"])
        if self.event == "error":
            return ("error", self["code"])
        return ("comment", self.comment)

    def check(self) -> None:
        """What holds for every frame by itself."""
        if self.comment is not None:
            assert re.fullmatch(r"hb \d{13}", self.comment), self
            assert len(self.fields) == 1, self
            return
        names = [name for name, _ in self.fields]
        assert names[-1] == "data", self
        lines = names.count("data")
        if self.event == "error":
            assert names == ["event"] + ["data"] * lines, self
            assert isinstance(self["code"], int), self
            assert isinstance(self["error"], str), self
            assert self["error"], self
            return
        assert names == ["id", "event"] + ["data"] * lines, self
        assert self.event in SHAPES, self
        assert self.json.keys() == SHAPES[self.event], self
        assert self["topic"] in self.cursor, self
        getattr(self, f"_check_{self.event.replace('-', '_')}")(self.cursor[self["topic"]])

    def _check_record(self, at: int) -> None:
        assert self.seqs, self
        assert self.seqs == sorted(set(self.seqs)), self
        assert self["from_seq"] < self.seqs[0] <= self.seqs[-1] <= self["to_seq"] <= self["head_seq"], self
        assert at == self["to_seq"], self
        for record in self["records"]:
            assert RECORD_ALWAYS <= record.keys() <= RECORD_ALWAYS | RECORD_MAYBE, record

    def _check_tombstone(self, at: int) -> None:
        assert self["reason"] in REASONS, self
        if self["reason"] == "recreated":
            assert at == self["earliest_seq"] - 1, self  # whoever resumes here reads the new topic from its start
        else:
            assert 1 <= self["gap_from"] <= self["gap_to"] == at, self
        assert self["earliest_seq"] <= self["head_seq"] + 1, self

    def _check_caught_up(self, at: int) -> None:
        assert at == self["head_seq"], self

    def _check_topic_deleted(self, at: int) -> None:
        assert self["reason"] == "deleted", self
        assert self["head_seq"] >= 0, self


class Parser:
    """Bytes in, frames out. A comment is a frame of its own, dispatched at once."""

    _LINE_END = re.compile(rb"\r\n|\r|\n")

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a line whose end has not come
        self._fields: list[tuple[str, str]] = []

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._parts.append(data)
        if b"\n" not in data and b"\r" not in data:
            return
        pending = b"".join(self._parts)
        held = b"\r" if pending.endswith(b"\r") else b""  # its LF may be on the way
        *lines, rest = self._LINE_END.split(pending[: len(pending) - len(held)])
        self._parts = [rest + held]
        for line in lines:
            yield from self._line(line.decode())

    def _line(self, line: str) -> Iterator[Frame]:
        if not line:
            if self._fields:
                yield Frame(self._fields)
            self._fields = []
            return
        name, _, value = line.partition(":")
        field = (name, value.removeprefix(" "))
        if name:
            self._fields.append(field)
        else:
            assert not self._fields, f"a comment inside of an event: {self._fields} {line}"
            yield Frame([field])

    @property
    def between_frames(self) -> bool:
        return not self._fields and not any(self._parts)


# --- responses ---------------------------------------------------------------------------------------


class Source(Protocol):
    """One response that is still coming."""

    status: int
    headers: dict[str, str]

    def more(self, within_s: float) -> bytes:
        """What comes next; empty when the response has ended. TimeoutError when nothing came."""

    def close(self) -> None: ...
    def reset(self) -> None: ...


class Http1Source:
    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # counts if set before connect
        self.sock.settimeout(WITHIN_S)
        try:
            self.sock.connect(("127.0.0.1", port))
        except OSError:
            self.sock.close()
            raise
        self._unread = b""
        self.status = 0
        self.headers: dict[str, str] = {}

    def get(
        self,
        path: str,
        headers: Headers,
        *,
        method: str = "GET",
        version: str = "HTTP/1.1",
        within_s: float = WITHIN_S,
    ) -> None:
        self.sock.settimeout(within_s)
        lines = tuple(f"{name}: {value}" for name, value in headers)
        self.sock.sendall(request(method, path, headers=lines, version=version))
        while b"\r\n\r\n" not in self._unread:
            received = self.sock.recv(1 << 16)
            if not received:
                raise EOFError(f"closed before the head had come: {self._unread!r}")
            self._unread += received
        head, _, self._unread = self._unread.partition(b"\r\n\r\n")
        status_line, *rest = head.decode("latin-1").split("\r\n")
        self.status = int(status_line.split(" ")[1])
        pairs = [line.split(": ", 1) for line in rest]
        self.headers = {name.lower(): value for name, value in pairs}
        assert len(self.headers) == len(pairs), rest

    def ping(self) -> None:
        """Ask for something small, to know that somebody has accepted the connection."""
        self.get("/v0/health", [])
        left = int(self.headers["content-length"])
        while left:
            left -= len(self.more(WITHIN_S))

    def more(self, within_s: float) -> bytes:
        if self._unread:
            unread, self._unread = self._unread, b""
            return unread
        self.sock.settimeout(max(within_s, 0.001))
        return self.sock.recv(1 << 18)

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Gone without a goodbye: a RST instead of a FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class Http2Source:
    """One stream of a connection; `close` ends the connection if it is this stream's own, otherwise the stream."""

    def __init__(self, wire: H2Wire, *, owns: bool) -> None:
        self.wire = wire
        self._owns = owns
        self._number = 0
        self.status = 0
        self.headers: dict[str, str] = {}

    def get(self, path: str, headers: Headers, *, method: str = "GET", within_s: float = WITHIN_S) -> None:
        self.wire.sock.settimeout(within_s)
        self._number = self.wire.open(method, path, *[(name.lower(), value) for name, value in headers], end=True)
        stream = self.wire.streams[self._number]
        while not stream.headers:
            if stream.reset or not self.wire.receive():
                raise EOFError("closed before the head had come")
        self.headers = {name: value for name, value in stream.headers.items() if not name.startswith(":")}
        self.status = int(stream.headers[":status"])

    def ping(self) -> None:
        """Ask for something small, to know that somebody has accepted the connection."""
        self.wire.finish(self.wire.ask("GET", "/v0/health"))

    def more(self, within_s: float) -> bytes:
        stream = self.wire.streams[self._number]
        deadline = time.monotonic() + within_s
        while not stream.body:
            if stream.ended or stream.reset or self.wire.goodbye:
                return b""
            self.wire.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            self.wire.receive()
        body, stream.body = stream.body, b""
        return body

    def is_over(self) -> bool:
        """Whether the server has ended or reset it, seen without giving any of the window back."""
        stream = self.wire.streams[self._number]
        while select.select([self.wire.sock], [], [], 0)[0] and not self.wire.goodbye:
            self.wire.receive(grant=False)
        return stream.ended or stream.reset or self.wire.goodbye

    def close(self) -> None:
        if self._owns:
            self.wire.close()
        else:
            self.wire.sock.settimeout(WITHIN_S)
            self.wire.cancel(self._number)

    def reset(self) -> None:
        self.wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.wire.close()


# --- one stream --------------------------------------------------------------------------------------


class Ended(Exception):
    """The response is over."""


class Silence(AssertionError):
    """No frame came in time. For a test that doesn't say otherwise it is a failure as any other."""


class EventStream:
    """An opened stream. Everything read from it is kept: `frames` in order, and by topic in what is derived of it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.status = source.status
        self.headers = source.headers
        self.frames: list[Frame] = []
        self.last_id: str | None = None
        self.ended = False
        self._parser = Parser()
        self._parsed: deque[Frame] = deque()
        self.caught_up: dict[str, int] = {}  # topic -> the head it was drained to, the last time
        self._at: dict[str, int] = {}
        self._deleted: set[str] = set()
        if self.status == 200:
            first = self._next(time.monotonic() + WITHIN_S)
            assert first.fields == [("retry", "2000")], first

    def answer(self) -> Answer:
        """Of a stream that was refused."""
        assert self.status != 200, "the stream was opened"
        body = b""
        length = int(self.headers["content-length"])
        while len(body) < length:
            body += self.source.more(WITHIN_S)
        return Answer(status=self.status, headers=self.headers, raw=body)

    def close(self) -> None:
        self.source.close()

    def reset(self) -> None:
        self.source.reset()

    # --- reading ---

    def _next(self, deadline: float) -> Frame:
        while not self._parsed:
            if self.ended:
                raise Ended
            try:
                data = self.source.more(deadline - time.monotonic())
            except TimeoutError:
                raise Silence(f"no frame came in time; the last ones: {self.frames[-3:]}") from None
            except ConnectionResetError:
                data = b""
            if not data:
                self.ended = True
            self._parsed.extend(self._parser.feed(data))
            if time.monotonic() > deadline + 1 and not self._parsed:
                raise AssertionError(f"no whole frame came in time; the last ones: {self.frames[-3:]}")
        return self._parsed.popleft()

    def frame(self, within_s: float = WITHIN_S) -> Frame:
        """The next frame, heartbeats too."""
        frame = self._next(time.monotonic() + within_s)
        frame.check()
        self._check_order(frame)
        self.frames.append(frame)
        return frame

    def event(self, within_s: float = WITHIN_S) -> Frame:
        """The next frame that is not a heartbeat."""
        deadline = time.monotonic() + within_s
        while (frame := self.frame(deadline - time.monotonic())).comment is not None:
            pass
        return frame

    def _check_order(self, frame: Frame) -> None:
        """Cursors only ever move on, but for a topic that begins anew; a topic that is gone stays gone."""
        if frame.id is None:
            return
        topic, cursor = frame["topic"], frame.cursor
        assert topic not in self._deleted, f"after topic-deleted: {frame}"
        if self._at:
            assert list(cursor) == list(self._at), "an id names other topics than the one before, or in another order"
        if frame.event == "topic-deleted":
            self._deleted.add(topic)
        elif frame.event == "caught-up":
            self.caught_up[topic] = frame["head_seq"]
        recreated = frame.event == "tombstone" and frame["reason"] == "recreated"
        for name, at in cursor.items():
            before = self._at.get(name, 0)
            assert at >= before or (recreated and name == topic), f"{name} went back from {before}: {frame}"
        if frame.event == "record":
            assert frame["from_seq"] >= self._at.get(topic, 0), f"delivered again: {frame}"
        self._at = cursor
        self.last_id = frame.id

    def until(self, done: Callable[[], object], *, within_s: float = WITHIN_S) -> EventStream:
        """Read on until it is so."""
        deadline = time.monotonic() + within_s
        while not done():
            self.frame(deadline - time.monotonic())
        return self

    def events(self, count: int, *, within_s: float = WITHIN_S) -> list[tuple[Any, ...]]:
        """The next so many events, in short."""
        deadline = time.monotonic() + within_s
        return [self.event(deadline - time.monotonic()).what for _ in range(count)]

    def rest(self, *, within_s: float = WITHIN_S) -> list[Frame]:
        """Everything up to the end of the response, which must come, and not in the middle of a frame."""
        deadline = time.monotonic() + within_s
        frames: list[Frame] = []
        try:
            while True:
                frames.append(self.frame(deadline - time.monotonic()))
        except Ended:
            assert self._parser.between_frames, "the stream ended in the middle of a frame"
            return frames

    # --- what was read ---

    def of(self, event: str, topic: str | None = None) -> list[Frame]:
        return [frame for frame in self.frames if frame.event == event and (topic is None or frame["topic"] == topic)]

    def records(self, topic: str) -> list[dict[str, Any]]:
        return [record for frame in self.of("record", topic) for record in frame["records"]]

    def seqs(self, topic: str) -> list[int]:
        return [record["$seq"] for record in self.records(topic)]

    def data(self, topic: str) -> list[Any]:
        return [record["data"] for record in self.records(topic)]

    def wait_records(self, topic: str, count: int, *, within_s: float = WITHIN_S) -> list[Any]:
        """Read on until there are so many; their data."""
        have, looked_at = len(self.records(topic)), len(self.frames)

        def enough() -> bool:
            nonlocal have, looked_at
            while looked_at < len(self.frames):
                frame = self.frames[looked_at]
                if frame.event == "record" and frame["topic"] == topic:
                    have += len(frame["records"])
                looked_at += 1
            return have >= count

        self.until(enough, within_s=within_s)
        return self.data(topic)

    def wait_caught_up(self, *topics: str, within_s: float = WITHIN_S) -> EventStream:
        """Read on until each of them has been reported as drained since this stream was opened."""
        return self.until(lambda: self.caught_up.keys() >= set(topics), within_s=within_s)


# --- sessions and their streams ----------------------------------------------------------------------


class Watching:
    """Sessions and streams on one server by one lane."""

    def __init__(self, server: Server, lane: Lane = "http1") -> None:
        self._server = server
        self.lane = lane
        self.client = Client(server.port, lane)
        self._sources: list[Source] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        for source in self._sources:
            try:
                source.close()
            except OSError:
                pass

    def create(self, topics: Topics, *, lenient: bool | None = None, **options: object) -> Answer:
        """POST /v0/watch."""
        return create(self.client, topics, lenient=lenient, **options)

    def connect(self, *, receive_buffer: int | None = None) -> Http1Source | Http2Source:
        """A connection that has not asked for anything yet."""
        source: Http1Source | Http2Source
        if self.lane == "http1":
            source = Http1Source(self._server.port, receive_buffer=receive_buffer)
        else:
            source = Http2Source(H2Wire(self._server.port), owns=True)
        self._sources.append(source)
        return source

    def get(
        self, path: str, *headers: tuple[str, str], on: Http1Source | Http2Source | None = None, **how: Any
    ) -> EventStream:
        """GET a stream, whether it will be one or not."""
        source = on or self.connect(receive_buffer=how.pop("receive_buffer", None))
        source.get(path, headers, **how)
        return EventStream(source)

    def open(self, session: Answer | str, last_event_id: str | None = None, **how: Any) -> EventStream:
        """The stream of a session or of its wid; it must open."""
        stream = self.attempt(session, last_event_id, **how)
        assert stream.status == 200, stream.answer()
        return stream

    def attempt(self, session: Answer | str, last_event_id: str | None = None, **how: Any) -> EventStream:
        """Likewise, but it may be refused."""
        wid = session if isinstance(session, str) else session["wid"]
        headers = [("Accept", "text/event-stream")]
        if last_event_id is not None:
            headers.append(("Last-Event-ID", last_event_id))
        return self.get(f"/v0/watch/{wid}", *headers, **how)

    def follow(self, topics: Topics, *, receive_buffer: int | None = None, **options: Any) -> EventStream:
        """A new session and its stream."""
        return self.open(self.create(topics, **options), receive_buffer=receive_buffer)


def create(client: Client, topics: Topics, *, lenient: bool | None = None, **options: object) -> Answer:
    """POST /v0/watch. Names alone are watched from their beginning."""
    if isinstance(topics, str):
        topics = [topics]
    if not isinstance(topics, Mapping):
        topics = {name: {} for name in topics}
    query = {} if lenient is None else {"lenient": lenient}
    return client.send("POST", "/v0/watch", {"topics": topics, **options}, **query)  # type: ignore[arg-type]
