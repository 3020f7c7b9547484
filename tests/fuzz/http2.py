"""Hostile HTTP/2: frames that are right one by one and wrong together, and frames that are wrong by themselves.

A case is a conversation: the preface, settings, some requests, each of them header blocks and data. What is done to it
is done to the list of frames (other order, other stream, other type), to one frame (length, flags, payload), to the
header block (HPACK bytes, or fields that must not be), or to the bytes as a whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import hpack
from e2e.sockets import CLOSE, TEXT

from . import pages
from .http1 import ENDPOINTS, KEYS, pack
from .mutations import in_pieces, mutate, splice
from .player import Case, Leaving
from .verdict import (
    CONTINUATION_FRAME,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)
from .websocket import frame, text_frame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20
Fields = list[tuple[bytes, bytes]]
_DATA_BYTES = 16_384  # of a frame, at most


@dataclass(slots=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes = b""
    announced: int | None = None  # a length other than the payload's

    def encode(self) -> bytes:
        size = len(self.payload) if self.announced is None else self.announced
        head = struct.pack(">I", size)[1:] + bytes([self.kind, self.flags]) + struct.pack(">I", self.stream)
        return head + self.payload


@dataclass(slots=True)
class Talk:
    """What a client says: its frames behind the preface."""

    frames: list[Frame]
    preface: bytes = PREFACE
    next_stream: int = 1
    encoder: hpack.Encoder = field(default_factory=hpack.Encoder)

    def encode(self) -> bytes:
        return self.preface + b"".join(frame.encode() for frame in self.frames)


def settings(*pairs: tuple[int, int]) -> Frame:
    return Frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in pairs))


def window(stream: int, size: int) -> Frame:
    return Frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def fields_of(dice: Random, method: str, path: str, body: bytes | None, more: tuple[tuple[str, bytes], ...]) -> Fields:
    fields = [
        (b":method", method.encode()),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", pages.HOST),
    ]
    if body is not None:
        fields.append((b"content-type", b"application/json"))
        if dice.random() < 0.5:
            fields.append((b"content-length", b"%d" % len(body)))
    if dice.random() < 0.95:
        fields.append((b"authorization", dice.choice(KEYS)))
    return fields + [(name.lower().encode(), value) for name, value in more]


def encode_fields(talk: Talk, fields: Fields) -> bytes:
    try:
        return bytes(talk.encoder.encode(fields))
    except (UnicodeDecodeError, hpack.HPACKError):
        return b"\x82\x86\x84\x41\x01t"


def add_request(dice: Random, talk: Talk, wid: str, change: Callable[[Random, Fields], Fields] | None = None) -> None:
    """Header block and data of one request, in one frame each or in several."""
    stream, talk.next_stream = talk.next_stream, talk.next_stream + 2
    method, path, body, more = dice.choice(ENDPOINTS)
    path = path.replace("{t}", dice.choice(("log", "jobs", "absent", "new-1"))).replace("{w}", wid)
    if method == "GET" and path == "/v0/ws":
        _add_tunnel(dice, talk, stream, change)
        return
    if body is not None and dice.random() < 0.03:
        body, more = pack(dice, body), (*more, ("content-encoding", b"gzip"))
    fields = fields_of(dice, method, path, body, more)
    block = encode_fields(talk, change(dice, fields) if change is not None else fields)
    ends = END_STREAM if body is None else 0
    _add_block(dice, talk, stream, block, ends)
    if body is not None:
        cut = dice.randrange(min(len(body), _DATA_BYTES) + 1) if dice.random() < 0.4 else len(body)
        if cut < len(body):
            talk.frames.append(Frame(DATA, 0, stream, body[:cut]))
            body = body[cut:]
        while len(body) > _DATA_BYTES - 256:
            talk.frames.append(Frame(DATA, 0, stream, body[: _DATA_BYTES - 256]))
            body = body[_DATA_BYTES - 256 :]
        if dice.random() < 0.2:
            pad = dice.choice((0, 1, 255))
            talk.frames.append(Frame(DATA, END_STREAM | PADDED, stream, bytes([pad]) + body + bytes(pad)))
        else:
            talk.frames.append(Frame(DATA, END_STREAM, stream, body))


def _add_block(dice: Random, talk: Talk, stream: int, block: bytes, flags: int) -> None:
    if dice.random() < 0.8 or len(block) < 3:
        talk.frames.append(Frame(HEADERS, flags | END_HEADERS, stream, block))
        return
    first, second = sorted(dice.randrange(len(block) + 1) for _ in range(2))
    talk.frames.append(Frame(HEADERS, flags, stream, block[:first]))
    talk.frames.append(Frame(CONTINUATION_FRAME, 0, stream, block[first:second]))
    talk.frames.append(Frame(CONTINUATION_FRAME, END_HEADERS, stream, block[second:]))


def _add_tunnel(dice: Random, talk: Talk, stream: int, change: Callable[[Random, Fields], Fields] | None) -> None:
    """A WebSocket over HTTP/2, with sense or nonsense in it."""
    fields = [
        (b":method", b"CONNECT"),
        (b":protocol", b"websocket"),
        (b":scheme", b"http"),
        (b":path", b"/v0/ws"),
        (b":authority", pages.HOST),
        (b"sec-websocket-version", b"13"),
        (b"authorization", b"Bearer full-access-key"),
    ]
    talk.frames.append(
        Frame(HEADERS, END_HEADERS, stream, encode_fields(talk, change(dice, fields) if change is not None else fields))
    )
    commands = (
        {"op": "ping", "request_id": 1},
        {"op": "subscribe", "topic": "log", "request_id": "s"},
        {"op": "publish", "topic": "log", "records": [{"data": 1}]},
    )
    data = b"".join(text_frame(json.dumps(dice.choice(commands)).encode()) for _ in range(dice.randrange(4)))
    data += dice.choice((b"", frame(CLOSE, b"\x03\xe8"), frame(TEXT, b"\xff"), frame(TEXT, b"{", announced=2**40)))
    if dice.random() < 0.4:
        data = mutate(dice, data)
    talk.frames.append(Frame(DATA, dice.choice((0, END_STREAM)), stream, data))


def talk_of(dice: Random, wid: str, *, change: Callable[[Random, Fields], Fields] | None = None) -> Talk:
    """A conversation as it should be."""
    talk = Talk([settings((4, dice.choice((65_535, 1 << 20))))])
    if dice.random() < 0.5:
        talk.frames.append(window(0, 1 << 20))
    count = dice.choice((1, 1, 2, 3, 6))
    wrong = dice.randrange(count)
    for at in range(count):
        add_request(dice, talk, wid, change if at == wrong else None)
    return talk


# --- fields that must not be -------------------------------------------------------------------------

_ODD_FIELDS: tuple[tuple[bytes, bytes], ...] = (
    (b":method", b"GET"),
    (b":status", b"200"),
    (b":unknown", b"x"),
    (b":protocol", b"websocket"),
    (b":protocol", b""),
    (b":path", b"/v0/health"),
    (b"Upper-Case", b"x"),
    (b"connection", b"keep-alive"),
    (b"transfer-encoding", b"chunked"),
    (b"te", b"gzip"),
    (b"te", b"trailers"),
    (b"upgrade", b"h2c"),
    (b"host", b"other"),
    (b"host", b""),
    (b"content-length", b"3"),
    (b"content-length", b"-1"),
    (b"content-length", b"x"),
    (b"content-length", b"99999999999999999999"),
    (b"content-encoding", b"gzip"),
    (b"content-type", b"text/html"),
    (b"content-type", b"\xff"),
    (b"expect", b"100-continue"),
    (b"accept-encoding", b"gzip"),
    (b"accept", b"text/event-stream"),
    (b"idempotency-key", b"\xc3\x28"),
    (b"idempotency-key", b"\xff\xff"),
    (b"authorization", b"\xff"),
    (b"x-request-id", b"a\xffb"),
    (b"last-event-id", b"\xff"),
    (b"cookie", b"a=1"),
    (b"x-nul", b"a\0b"),
    (b"x-lf", b"a\nb"),
    (b"x-space", b" a "),
    (b"", b"no name"),
    (b"bad name", b"x"),
    (b"n\0l", b"x"),
    (b"\xff\xfe", b"x"),
    (b"x-long", b"v" * 20_000),
    (b"x-longer", b"v" * 40_000),
)
_ODD_VALUES: dict[bytes, tuple[bytes, ...]] = {
    b":method": (b"", b"get", b"CONNECT", b"OPTIONS", b"X" * 500, b"G T", b"\xff\xfe", b"HEAD", b"PRI"),
    b":scheme": (b"", b"https", b"ftp", b"\xff", b"x" * 1_000),
    b":path": (
        b"",
        b"*",
        b"?",
        b"v0/health",
        b"//",
        b"/v0/topics/\xff",
        b"/v0/topics/\xc3\xa9",
        b"/v0/topics/%ff",
        b"/v0/topics/%",
        b"/v0/topics/a%00b",
        b"/v0/topics?cursor=\xff",
        b"/v0/topics?prefix=%ed%a0%80",
        b"/v0/topics?" + b"a=b&" * 100,
        b"/v0/health#x",
        b"/v0/health?\x00",
        b"/v0/he alth",
        b"http://t/v0/health",
        b"http://[t",
        b"http://\xef\xbc\x8f/x",
        b"?a=b",
        b"/" + b"a" * 8_300,
    ),
    b":authority": (b"", b"\xff", b"a b", b"x" * 64, b"x" * 5_000, b"a..b", b".", b"[::1", b"t:x", b"a@b", b"xn--a"),
}


def odd_fields(dice: Random, fields: Fields) -> Fields:
    changed = list(fields)
    for _ in range(dice.choice((1, 1, 2))):
        changed.insert(dice.randrange(len(changed) + 1), dice.choice(_ODD_FIELDS))
    return changed


def odd_pseudo(dice: Random, fields: Fields) -> Fields:
    changed = list(fields)
    at = dice.randrange(4)
    name = changed[at][0]
    match dice.randrange(4):
        case 0:
            del changed[at]
        case 1:
            changed.append(changed.pop(at))
        case _:
            changed[at] = (name, dice.choice(_ODD_VALUES.get(name, (b"", b"\xff"))))
    return changed


def many_fields(dice: Random, fields: Fields) -> Fields:
    count = dice.choice((99, 101, 500, 3_000))
    return fields + [(b"x-%d" % number, b"v") for number in range(count)]


def some_page(dice: Random, fields: Fields) -> Fields:
    host, headers = pages.some_page(dice)
    kept = [(name, host if name == b":authority" else value) for name, value in fields]
    return kept + [(name.lower(), value) for name, value in headers]


def mutated_field(dice: Random, fields: Fields) -> Fields:
    changed = list(fields)
    at = dice.randrange(len(changed))
    name, value = changed[at]
    changed[at] = (name, mutate(dice, value or b"v", times=1)) if dice.random() < 0.7 else (mutate(dice, name), value)
    return changed


FIELD_CHANGES = (odd_fields, odd_fields, odd_pseudo, odd_pseudo, some_page, some_page, many_fields, mutated_field)


# --- frames that must not be -------------------------------------------------------------------------


def _streams(talk: Talk) -> tuple[int, ...]:
    """Of all kinds: the connection, open or closed ones, idle, even, the last possible."""
    return (0, 1, 1, 3, talk.next_stream, talk.next_stream + 100, 2, 2**31 - 1, 2**32 - 1)


def odd_settings(dice: Random, talk: Talk) -> Frame:
    name = dice.choice((0, 1, 2, 3, 4, 4, 5, 6, 8, 9, 0xFFFF))
    value = dice.choice((0, 1, 2, 100, 16_383, 16_384, 65_535, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1))
    match dice.randrange(6):
        case 0:
            return Frame(SETTINGS, 0, 0, dice.randbytes(dice.choice((1, 5, 7, 11))))
        case 1:
            return Frame(SETTINGS, 0x1, 0, dice.choice((b"", b"\0" * 6)))
        case 2:
            return replace(settings((name, value)), stream=dice.choice(_streams(talk)))
        case 3:
            return settings(*((dice.randrange(10), dice.choice((0, 1, 65_535))) for _ in range(200)))
        case _:
            return settings((name, value))


def odd_window(dice: Random, talk: Talk) -> Frame:
    if dice.random() < 0.2:
        return Frame(WINDOW_UPDATE, 0, dice.choice(_streams(talk)), dice.randbytes(dice.choice((0, 3, 5))))
    return window(dice.choice(_streams(talk)), dice.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)))


def odd_reset(dice: Random, talk: Talk) -> Frame:
    size = dice.choice((4, 4, 4, 3, 5, 0))
    return Frame(RST_STREAM, 0, dice.choice(_streams(talk)), dice.randbytes(size))


def odd_ping(dice: Random, talk: Talk) -> Frame:
    stream = 0 if dice.random() < 0.7 else dice.choice(_streams(talk))
    return Frame(PING, dice.choice((0, 1, 0xFF)), stream, dice.randbytes(dice.choice((8, 8, 8, 7, 9, 0))))


def odd_goaway(dice: Random, talk: Talk) -> Frame:
    last = struct.pack(">II", dice.choice((0, 1, 2**31 - 1, 2**32 - 1)), dice.choice((0, 1, 11, 2**32 - 1)))
    return Frame(GOAWAY, 0, dice.choice((0, 0, 1)), dice.choice((last, last + b"debug" * 100, last[:5], b"")))


def odd_priority(dice: Random, talk: Talk) -> Frame:
    stream = dice.choice(_streams(talk))
    on = dice.choice((stream, 0, 1, 2**31 - 1, 2**31 + 1)) & 0xFFFFFFFF
    return Frame(PRIORITY, 0, stream, struct.pack(">IB", on, dice.randrange(256))[: dice.choice((5, 5, 5, 4, 0))])


def odd_data(dice: Random, talk: Talk) -> Frame:
    match dice.randrange(4):
        case 0:
            return Frame(DATA, PADDED, dice.choice(_streams(talk)), bytes([dice.choice((0, 5, 255))]) + b"abc")
        case 1:
            return Frame(DATA, 0, dice.choice(_streams(talk)), b"x" * dice.choice((16_384, 16_385, 70_000)))
        case 2:
            return Frame(DATA, dice.choice((0, 1, 0xFF)), dice.choice(_streams(talk)))
        case _:
            return Frame(DATA, END_STREAM, dice.choice(_streams(talk)), b"{}")


def odd_continuation(dice: Random, talk: Talk) -> Frame:
    return Frame(CONTINUATION_FRAME, dice.choice((0, END_HEADERS)), dice.choice(_streams(talk)), dice.randbytes(5))


def odd_push(dice: Random, talk: Talk) -> Frame:
    return Frame(PUSH_PROMISE, END_HEADERS, dice.choice(_streams(talk)), struct.pack(">I", 2) + b"\x82\x86\x84")


def odd_headers(dice: Random, talk: Talk) -> Frame:
    block = dice.choice(
        (b"", b"\x82\x86\x84\x41\x01t", b"\x80", b"\xff" * 20, b"\x3f\xe1\xff\xff\xff\x0f", b"\x00\x00")
    )
    flags = dice.choice(
        (0, END_HEADERS, END_HEADERS | END_STREAM, END_HEADERS | PADDED, END_HEADERS | WITH_PRIORITY, 0xFF)
    )
    return Frame(HEADERS, flags, dice.choice(_streams(talk)), block)


def odd_kind(dice: Random, talk: Talk) -> Frame:
    return Frame(dice.randrange(10, 256), dice.randrange(256), dice.choice(_streams(talk)), dice.randbytes(20))


ODD_FRAMES = (
    odd_settings,
    odd_settings,
    odd_window,
    odd_window,
    odd_reset,
    odd_reset,
    odd_ping,
    odd_goaway,
    odd_priority,
    odd_data,
    odd_data,
    odd_continuation,
    odd_push,
    odd_headers,
    odd_headers,
    odd_kind,
)


# --- what may be done to a conversation --------------------------------------------------------------


def insert_odd(dice: Random, talk: Talk) -> None:
    for _ in range(dice.choice((1, 1, 2, 5))):
        talk.frames.insert(dice.randrange(len(talk.frames) + 1), dice.choice(ODD_FRAMES)(dice, talk))


def change_frame(dice: Random, talk: Talk) -> None:
    at = dice.randrange(len(talk.frames))
    one = talk.frames[at]
    match dice.randrange(6):
        case 0:
            one = replace(one, kind=dice.randrange(12))
        case 1:
            one = replace(one, flags=dice.choice((0, 0xFF, one.flags ^ 1 << dice.randrange(8))))
        case 2:
            one = replace(one, stream=dice.choice(_streams(talk)))
        case 3:
            size = dice.choice((0, len(one.payload) + 1, max(len(one.payload) - 1, 0), 16_385, 2**24 - 1))
            one = replace(one, announced=size)
        case _:
            one = replace(one, payload=mutate(dice, one.payload or b"\0"))
    talk.frames[at] = one


def disorder(dice: Random, talk: Talk) -> None:
    frames = talk.frames
    at = dice.randrange(len(frames))
    match dice.randrange(4):
        case 0:
            del frames[at]
        case 1:
            frames.insert(dice.randrange(len(frames) + 1), frames[at])
        case 2:
            dice.shuffle(frames)
        case _:
            frames.append(frames.pop(at))


def storm(dice: Random, talk: Talk) -> None:
    """Much of what is cheap to send."""
    count = dice.choice((50, 150, 400))
    match dice.randrange(7):
        case 0:
            talk.frames += [Frame(PING, 0, 0, bytes(8))] * count
        case 1:
            talk.frames += [settings((3, 1))] * count
        case 2:
            block = encode_fields(talk, [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/v0/health")])
            for _ in range(count):
                talk.frames.append(Frame(HEADERS, END_HEADERS | END_STREAM, talk.next_stream, block))
                talk.frames.append(Frame(RST_STREAM, 0, talk.next_stream, struct.pack(">I", 8)))
                talk.next_stream += 2
        case 3:
            talk.frames.append(Frame(HEADERS, 0, talk.next_stream, b"\x82"))
            talk.frames += [
                Frame(CONTINUATION_FRAME, 0, talk.next_stream, dice.choice((b"", b"\x00\x01a\x01b")))
            ] * count
        case 4:
            talk.frames += [Frame(DATA, 0, 1, b"")] * count
        case 5:
            talk.frames += [Frame(PRIORITY, 0, 2 * n + 1, struct.pack(">IB", 0, 1)) for n in range(count)]
        case _:
            talk.frames += [window(0, 1)] * count


CHANGES = (insert_odd, insert_odd, insert_odd, change_frame, change_frame, change_frame, disorder, storm)


# --- cases -------------------------------------------------------------------------------------------


def _leaving(dice: Random) -> Leaving:
    roll = dice.random()
    return "quiet" if roll < 0.75 else "half" if roll < 0.85 else "reset" if roll < 0.92 else "close"


def case(dice: Random, number: int, wid: str) -> Case:
    roll = dice.random()
    if roll < 0.25:
        change = dice.choice(FIELD_CHANGES)
        label, data = change.__name__, talk_of(dice, wid, change=change).encode()
    elif roll < 0.80:
        talk = talk_of(dice, wid)
        label = ""
        for _ in range(dice.choice((1, 1, 2))):
            alter = dice.choice(CHANGES)
            label += f"{alter.__name__} "
            alter(dice, talk)
        data = talk.encode()
    elif roll < 0.92:
        label, data = "mutate", PREFACE + mutate(dice, talk_of(dice, wid).encode()[len(PREFACE) :])
    elif roll < 0.95:
        label, data = "splice", splice(dice, talk_of(dice, wid).encode(), talk_of(dice, wid).encode())
    elif roll < 0.97:
        label, data = "preface", mutate(dice, PREFACE, times=1) + talk_of(dice, wid).encode()[len(PREFACE) :]
    else:
        label, data = "noise", PREFACE + dice.randbytes(dice.choice((1, 9, 100, 3_000)))
    return Case(number, label, in_pieces(dice, data), _leaving(dice))
