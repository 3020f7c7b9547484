"""What a server may say, read strictly: HTTP/1.1 responses, HTTP/2 frames, WebSocket frames.

Every reader takes all the bytes of a connection and raises `Wrong` at the first that is not as it must be: broken
framing, a status of 500 and above, a body that is not the JSON that belongs to its status, a frame that RFC 9113 or
RFC 6455 does not know. One 5xx is an honest answer to hostile bytes: 505, to another version of HTTP.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from typing import Any, NoReturn

import hpack
from e2e.sockets import CLOSE, CONTINUATION, PUSHES, REPLIES, TEXT, take_frame

from topics.errors import STATUS

_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ([ -~]*)\Z")
_HEADER = re.compile(rb"([A-Za-z0-9-]+): ([\x20-\x7e\x80-\xff]*)\Z")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}\Z")
JSON_TYPE = "application/json"


class Wrong(Exception):
    """The server said something that no client should ever see."""


@dataclass(slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    json: Any = None

    @property
    def code(self) -> str | None:
        """Of the error, if it is one."""
        return self.json["error"]["code"] if isinstance(self.json, dict) and "error" in self.json else None

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")


# --- what all lanes have in common -------------------------------------------------------------------


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _whole_number(text: str) -> int:
    """Data may hold numbers that Python does not want to read."""
    return int(text) if len(text) < 4_000 else 0


def read_json(text: bytes) -> Any:
    """Strictly. ValueError: it is not JSON; RecursionError: it is nested more deeply than this reader can follow."""
    return json.loads(text, parse_constant=_no_constant, parse_int=_whole_number)


def _check_id(reply: Reply) -> None:
    if _REQUEST_ID.match(reply.headers.get("x-request-id", "")) is None:
        raise Wrong(f"{reply.status} without a request id that may be: {reply.headers}")


def check_reply(reply: Reply, *, bodiless: bool = False) -> None:
    status = reply.status
    if not 200 <= status < 500 and status != 505:
        raise Wrong(f"{status}: {reply.body[:500]!r}")
    _check_id(reply)
    kind = reply.headers.get("content-type", "").partition(";")[0]
    if bodiless or reply.is_stream or kind == "text/plain":
        return
    if kind != JSON_TYPE:
        raise Wrong(f"{status} with Content-Type {kind!r}")
    body = reply.body
    if reply.headers.get("content-encoding") == "gzip":
        body = zlib.decompress(body, wbits=31)
    try:
        reply.json = read_json(body)
    except RecursionError:
        return  # data may be nested more deeply than this reader can follow
    except ValueError as error:
        raise Wrong(f"{status} whose body is not JSON ({error}): {body[:500]!r}") from None
    if not isinstance(reply.json, dict):
        raise Wrong(f"{status} whose body is no object: {body[:500]!r}")
    if status < 300:
        if "error" in reply.json or "performance" not in reply.json:
            raise Wrong(f"{status} is not shaped like a success: {body[:500]!r}")
        return
    told = reply.json.get("error")
    if set(reply.json) != {"error"} or not isinstance(told, dict) or STATUS.get(str(told.get("code"))) != status:
        raise Wrong(f"{status} without its envelope: {body[:500]!r}")
    if not isinstance(told.get("message"), str) or not told["message"]:
        raise Wrong(f"{status} without a message: {body[:500]!r}")
    if status == 429 and not reply.headers.get("retry-after", "").isdigit():
        raise Wrong("429 without Retry-After")


# --- HTTP/1.1 ----------------------------------------------------------------------------------------


def read_head(received: bytes, at: int) -> tuple[int, dict[str, str], int] | None:
    """Status, headers and where the body begins; None: it is not all there."""
    end = received.find(b"\r\n\r\n", at)
    if end < 0:
        return None
    first, *lines = received[at:end].split(b"\r\n")
    found = _STATUS_LINE.match(first)
    if found is None:
        raise Wrong(f"no status line: {first[:200]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.match(line)
        if header is None:
            raise Wrong(f"no header line: {line[:200]!r}")
        name = header[1].decode().lower()
        if name in headers:
            raise Wrong(f"{name} twice")
        headers[name] = header[2].decode("latin-1")
    return int(found[1]), headers, end + 4


def read_replies(received: bytes, *, clean: bool, may_be_bodiless: bool = False) -> tuple[list[Reply], bytes]:
    """All responses of a connection, and what a stream or an upgraded connection said behind them.

    `clean`: the server ended it by itself, so nothing may be missing. `may_be_bodiless`: a HEAD may be among what was
    sent; then a length may be that of a body that does not come.
    """
    replies: list[Reply] = []
    at = 0
    while at < len(received):
        taken = read_head(received, at)
        if taken is None:
            if clean:
                raise Wrong(f"half a response: {received[at : at + 200]!r}")
            break
        status, headers, at = taken
        if status == 100:
            continue
        reply = Reply(status, headers, b"")
        if status == 101 or reply.is_stream:
            _check_id(reply)
            replies.append(reply)
            return replies, received[at:]
        length = headers.get("content-length", "")
        if not length.isdigit():
            raise Wrong(f"{status} without a length: {headers}")
        size = int(length)
        bodiless = may_be_bodiless and (at == len(received) or received.startswith(b"HTTP/1.1 ", at)) and size > 0
        if not bodiless:
            if len(received) - at < size:
                if clean:
                    raise Wrong(f"{status} with {len(received) - at} of {size} bytes")
                break
            reply.body = received[at : at + size]
            at += size
        check_reply(reply, bodiless=bodiless)
        replies.append(reply)
        if headers.get("connection", "").lower() == "close" and at < len(received):
            raise Wrong(f"bytes behind the last response: {received[at : at + 200]!r}")
    return replies, b""


_EVENT_LINE = re.compile(rb"(?:event|data|id|retry|):? ?[^\r\n]*\Z")


def check_events(stream: bytes) -> None:
    """A body of text/event-stream, as far as it came."""
    stream.decode()
    for line in stream.split(b"\n"):
        if line and _EVENT_LINE.match(line) is None:
            raise Wrong(f"not a line of an event stream: {line[:200]!r}")


# --- HTTP/2 ------------------------------------------------------------------------------------------

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION_FRAME = range(10)
_FIXED = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8


@dataclass(slots=True)
class H2Talk:
    """What a server said over HTTP/2."""

    replies: dict[int, Reply]
    resets: dict[int, int]
    goaway: int | None = None
    pings: int = 0
    rest: bytes = b""  # of a frame that did not come whole


def read_h2(received: bytes, *, clean: bool) -> H2Talk:
    """All frames of a connection, each checked, and the responses they carry."""
    talk = H2Talk({}, {})
    decoder = hpack.Decoder(max_header_list_size=1 << 20)
    decoder.max_allowed_table_size = 2**32  # what the client allowed is itself a hostile number
    ended: set[int] = set()
    block: bytearray | None = None
    block_of = block_flags = 0
    at = 0
    while len(received) - at >= 9:
        size = int.from_bytes(received[at : at + 3], "big")
        kind, flags = received[at + 3], received[at + 4]
        stream = int.from_bytes(received[at + 5 : at + 9], "big")
        if at == 0 and kind != SETTINGS:
            raise Wrong(f"HTTP/2 that begins with a frame of type {kind}")
        if kind > CONTINUATION_FRAME or stream >= 2**31:
            raise Wrong(f"a frame of type {kind} on stream {stream}")
        if len(received) - at - 9 < size:
            break
        payload = received[at + 9 : at + 9 + size]
        at += 9 + size
        if kind in _FIXED and size != _FIXED[kind]:
            raise Wrong(f"a frame of type {kind} with {size} bytes")
        if (kind in (SETTINGS, PING, GOAWAY)) != (stream == 0) and kind != WINDOW_UPDATE:
            raise Wrong(f"a frame of type {kind} on stream {stream}")
        if (block is not None) != (kind == CONTINUATION_FRAME):
            raise Wrong(f"a frame of type {kind} {'within' if block is not None else 'without'} a header block")
        if kind in (DATA, HEADERS) and stream in ended:
            raise Wrong(f"a frame of type {kind} on stream {stream}, which had ended")
        if kind == HEADERS:
            block, block_of, block_flags = bytearray(payload), stream, flags
            if flags & (_PADDED | 0x20):
                raise Wrong("padding or a priority from the server")
        elif kind == CONTINUATION_FRAME:
            assert block is not None
            block += payload
            if stream != block_of:
                raise Wrong("a header block on two streams")
        elif kind == DATA:
            if stream not in talk.replies:
                raise Wrong(f"data before headers on stream {stream}")
            talk.replies[stream].body += payload
            if flags & _END_STREAM:
                ended.add(stream)
        elif kind == RST_STREAM:
            talk.resets[stream] = int.from_bytes(payload, "big")
            ended.add(stream)
        elif kind == GOAWAY:
            talk.goaway = int.from_bytes(payload[4:8], "big")
        elif kind == PING and flags & _ACK:
            talk.pings += 1
        elif kind == PUSH_PROMISE:
            raise Wrong("a push nobody can have asked for")
        if block is not None and flags & _END_HEADERS:
            _take_block(talk, decoder, bytes(block), block_of)
            if block_flags & _END_STREAM:
                ended.add(block_of)
            block = None
    talk.rest = received[at:]
    if clean and talk.rest:
        raise Wrong(f"half a frame: {talk.rest[:100]!r}")
    for number, reply in talk.replies.items():
        whole = number in ended and number not in talk.resets and not reply.is_stream
        if not 200 <= reply.status < 500:
            raise Wrong(f"{reply.status}: {reply.body[:500]!r}")
        _check_id(reply)
        if reply.status == 200 and "content-type" not in reply.headers:
            read_socket(reply.body)  # a tunnel
        elif whole:
            check_reply(reply, bodiless=not reply.body)
    return talk


def _take_block(talk: H2Talk, decoder: hpack.Decoder, block: bytes, stream: int) -> None:
    try:
        fields = decoder.decode(block, raw=True)
    except hpack.HPACKError as error:
        raise Wrong(f"headers that can't be read: {error!r}") from None
    headers: dict[str, str] = {}
    for name, value in fields:
        key = name.decode()
        if key != key.lower() or key in headers or b"\n" in value or b"\r" in value or b"\0" in value:
            raise Wrong(f"a header that must not be: {name!r}: {value!r}")
        headers[key] = value.decode("latin-1")
    if stream in talk.replies:
        raise Wrong(f"headers twice on stream {stream}")
    talk.replies[stream] = Reply(int(headers.get(":status", "0")), headers, b"")


# --- WebSocket ---------------------------------------------------------------------------------------

_MAY_CLOSE_WITH = {1000, 1001, 1002, 1003, 1005, 1007, 1008, 1009, 1013}


@dataclass(slots=True)
class SocketTalk:
    messages: list[dict[str, Any]]
    close_code: int | None = None  # 1005: closed without one
    rest: bytes = b""


def read_socket(received: bytes, *, clean: bool = False) -> SocketTalk:
    """All frames behind the handshake."""
    talk = SocketTalk([])
    parts: list[bytes] = []
    while True:
        try:
            taken = take_frame(received)
        except AssertionError as error:
            raise Wrong(f"a frame that must not be: {error}") from None
        if taken is None:
            break
        if talk.close_code is not None:
            raise Wrong("a frame behind the close frame")
        frame, received = taken
        if frame.opcode == CLOSE:
            talk.close_code = 1005 if not frame.payload else int.from_bytes(frame.payload[:2], "big")
            frame.payload[2:].decode()
            echoed = 3000 <= talk.close_code <= 4999 or 1000 <= talk.close_code <= 1014
            if talk.close_code not in _MAY_CLOSE_WITH and not echoed:
                raise Wrong(f"closed with {talk.close_code}: {frame.payload!r}")
        elif frame.opcode in (TEXT, CONTINUATION):
            if (frame.opcode == CONTINUATION) != bool(parts):
                raise Wrong("fragments in disorder")
            parts.append(frame.payload)
            if frame.fin:
                talk.messages.append(_message(b"".join(parts)))
                parts = []
    talk.rest = received
    if clean and received:
        raise Wrong(f"half a frame: {received[:100]!r}")
    return talk


def _message(text: bytes) -> dict[str, Any]:
    try:
        message = read_json(text)
    except RecursionError:
        return {"op": "record"}  # data may be nested more deeply than this reader can follow
    except ValueError as error:
        raise Wrong(f"a message that is not JSON ({error}): {text[:500]!r}") from None
    if not isinstance(message, dict) or message.get("op") not in REPLIES.keys() | PUSHES.keys():
        raise Wrong(f"a message without a known op: {text[:500]!r}")
    if message["op"] == "error" and not STATUS.get(message.get("code", ""), 500) < 500:
        raise Wrong(f"an error that is the server's: {text[:500]!r}")
    return message
