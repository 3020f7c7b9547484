"""Hostile WebSockets: frames that RFC 6455 forbids, and commands that are JSON but not what they should be.

Two kinds of cases. In `frames` the bytes are wrong, and all that is asked for is an orderly end. In `commands` the
frames are right and their JSON is not: then every command is answered, with the request_id that it had, whatever JSON
that was, and the socket stays usable, which a last ping shows. Who has no right to configure is never told that a
publish with a config was done.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from random import Random
from typing import Any

from e2e import sockets
from e2e.sockets import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, handshake, mask_bytes

from .bodies import hostile_value, render
from .mutations import in_pieces, mutate, splice
from .player import Case, Leaving
from .scene import FULL, INSIDER, READER, WRITER
from .verdict import SocketTalk, Wrong, read_head, read_socket

_TOPICS = ("log", "log", "ws-1", "ws-2", "absent", "jobs")
COMMANDS: tuple[dict[str, Any], ...] = (
    {"op": "ping"},
    {"op": "subscribe", "topic": "log", "tail": True, "limit": 10, "max_batch_bytes": 1000, "include_data": True},
    {"op": "subscribe", "topic": "log", "from_seq": 0, "node": "n1", "include_tags": True, "include_meta": False},
    {"op": "subscribe", "topics": {"log": {"from_seq": 1}, "ws-1": {"tail": True}}, "lenient": True},
    {"op": "unsubscribe", "topic": "log"},
    {"op": "unsubscribe", "topics": ["log", "ws-1"]},
    {"op": "publish", "topic": "ws-1", "records": [{"data": 1}]},
    {"op": "publish", "topic": "ws-1", "records": [{"data": 1}, {"data": "2"}], "return_seqs": False},
    {
        "op": "publish",
        "topic": "ws-2",
        "records": [{"data": {"n": 1}, "tag": "t", "node": "n", "meta": {"a": 1}}],
        "node": "w",
        "idempotency_key": "k",
        "create": True,
        "config": {"cap_records": 20, "durability": "memory"},
        "disable_backpressure": False,
        "return_seqs": True,
    },
)


# --- frames ------------------------------------------------------------------------------------------


def frame(opcode: int, payload: bytes = b"", *, masked: bool = True, **options: Any) -> bytes:
    """One frame of a client, whose mask is not left to chance: a case is the same bytes in every run."""
    plain = sockets.frame(opcode, payload, masked=False, **options)
    if not masked:
        return plain
    at = len(plain) - len(payload)
    mask = sha256(payload).digest()[:4]
    return plain[:1] + bytes([plain[1] | 0x80]) + plain[2:at] + mask + mask_bytes(payload, mask)


def text_frame(text: bytes, **options: Any) -> bytes:
    return frame(TEXT, text, **options)


def close_frame(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, code.to_bytes(2, "big") + reason)


def _command(dice: Random) -> bytes:
    return json.dumps(dice.choice(COMMANDS)).encode()


def right(dice: Random) -> bytes:
    return text_frame(_command(dice))


def odd_opcode(dice: Random) -> bytes:
    return frame(dice.choice((3, 4, 7, 11, 12, 15)), b"x")


def reserved_bits(dice: Random) -> bytes:
    return text_frame(_command(dice), reserved=dice.randrange(1, 8))


def unmasked(dice: Random) -> bytes:
    return text_frame(_command(dice), masked=False)


def odd_length(dice: Random) -> bytes:
    announced = dice.choice(
        (0, 1, 125, 126, 65_535, 65_536, 1 << 20, (1 << 20) + 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
    )
    length_bytes = None if announced < 126 else 2 if announced < 1 << 16 else 8
    return text_frame(_command(dice), announced=announced, length_bytes=length_bytes)


def long_form(dice: Random) -> bytes:
    return text_frame(b"{}", length_bytes=dice.choice((2, 8)))


def fragments(dice: Random) -> bytes:
    text = _command(dice)
    cut = dice.randrange(len(text) + 1)
    parts = [frame(TEXT, text[:cut], fin=False), frame(CONTINUATION, text[cut:])]
    match dice.randrange(7):
        case 0:
            parts.insert(1, frame(PING, b"between"))
        case 6:
            parts.insert(
                1, frame(dice.choice((PING, PONG, CLOSE)), b"in pieces", fin=False) + frame(CONTINUATION, b"x")
            )
        case 1:
            parts.insert(1, frame(TEXT, b"{}"))
        case 2:
            parts.pop(0)
        case 3:
            parts.pop()
        case 4:
            parts[1:1] = [frame(CONTINUATION, b"", fin=False)] * dice.choice((1, 100, 1_000))
        case _:
            pass
    return b"".join(parts)


def control(dice: Random) -> bytes:
    opcode = dice.choice((PING, PONG, CLOSE))
    match dice.randrange(4):
        case 0:
            return frame(opcode, b"x" * 126)
        case 1:
            return frame(opcode, b"x", fin=False)
        case 2:
            return frame(opcode, b"x" * 125)
        case _:
            return frame(PING, b"p") * dice.choice((1, 50, 500))


def closing(dice: Random) -> bytes:
    match dice.randrange(4):
        case 0:
            return frame(CLOSE, b"\x03")
        case 1:
            return close_frame(
                dice.choice((0, 999, 1000, 1004, 1005, 1006, 1012, 1015, 2999, 3000, 4999, 5000, 65_535))
            )
        case 2:
            return close_frame(1000, dice.choice((b"\xff\xfe", b"r" * 123, b"\xc3\xa9", b"\xed\xa0\x80")))
        case _:
            return close_frame(1000) + right(dice) + close_frame(1001)


def invalid_text(dice: Random) -> bytes:
    bad = dice.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xe2\x82"))
    text = b'{"op":"ping","request_id":"' + bad + b'"}'
    if dice.random() < 0.5:
        cut = dice.randrange(len(text))
        return frame(TEXT, text[:cut], fin=False) + frame(CONTINUATION, text[cut:])
    return text_frame(text)


def binary(dice: Random) -> bytes:
    return frame(BINARY, _command(dice), fin=dice.random() < 0.7)


def whole_binary(dice: Random) -> bytes:
    return frame(BINARY, dice.choice((_command(dice), b"", b"\xff" * 200, b"\0" * 70_000)))


def large(dice: Random) -> bytes:
    size = dice.choice((65_535, 65_536, 300_000, (1 << 20) - 40, 1 << 20, (1 << 20) + 1))
    return text_frame(b'{"op":"ping","x":"' + b"x" * size + b'"}')


def mutated(dice: Random) -> bytes:
    return mutate(dice, right(dice))


FRAMES: tuple[Callable[[Random], bytes], ...] = (
    right,
    right,
    odd_opcode,
    reserved_bits,
    unmasked,
    odd_length,
    odd_length,
    long_form,
    fragments,
    fragments,
    control,
    control,
    closing,
    closing,
    invalid_text,
    binary,
    mutated,
    mutated,
    mutated,
)


def frames_case(dice: Random, number: int) -> Case:
    makers = [dice.choice(FRAMES) if dice.random() > 0.01 else large for _ in range(dice.choice((1, 1, 2, 4)))]
    data = b"".join(make(dice) for make in makers)
    label = " ".join(make.__name__ for make in makers)
    roll = dice.random()
    if roll < 0.08:
        label, data = "noise", dice.randbytes(dice.choice((1, 2, 14, 200)))
    elif roll < 0.16:
        label, data = f"splice {label}", splice(dice, data, right(dice))
    elif roll < 0.24:
        data = data[: dice.randrange(len(data) + 1)]
        label = f"cut {label}"
    if dice.random() < 0.04:
        label, data = whole_binary.__name__, whole_binary(dice) + right(dice)
    opening = handshake({"Authorization": f"Bearer {FULL}"})
    leaving: Leaving = "quiet"
    roll = dice.random()
    if label == whole_binary.__name__:
        pass
    elif roll < 0.15:
        leaving = "half"
    elif roll < 0.25:
        leaving = "reset"
    elif roll < 0.4:
        data += close_frame(1000)
        leaving = "quiet"
    parts = in_pieces(dice, opening + data) if dice.random() < 0.3 else [opening, *in_pieces(dice, data)]
    return Case(number, label, parts, leaving)


# --- commands ----------------------------------------------------------------------------------------


@cache
def _times(before: bytes, unit: bytes, times: int, after: bytes) -> bytes:
    return before + b",".join([unit] * times) + after


@cache
def _names(before: bytes, form: bytes, count: int, after: bytes) -> bytes:
    return before + b",".join(form % number for number in range(count)) + after


# Commands whose lists are longer than any may be, whose values are nested, or that say one thing many times: without
# their ends, where the request_id goes. The longest are read in slices.
OVERSIZE: tuple[Callable[[], bytes], ...] = (
    lambda: _names(b'{"op":"subscribe","topics":{', b'"t%d":{}', 257, b"}"),
    lambda: _names(b'{"op":"subscribe","topics":{', b'"t%d":{"tail":true}', 9_000, b"}"),
    lambda: _names(b'{"op":"subscribe","topics":{', b'"t%d":{}', 30_000, b"}"),
    lambda: _names(b'{"op":"subscribe","topics":[', b'"t%d"', 5_000, b"]"),
    lambda: _times(b'{"op":"subscribe","topic":"log","node":[', b'"n"', 1_001, b"]"),
    lambda: _times(b'{"op":"subscribe","topic":"log","node":[', b'"n"', 200_000, b"]"),
    lambda: _times(b'{"op":"subscribe","topic":"log","match":[', b"{}", 50_000, b"]"),
    lambda: _times(b'{"op":"subscribe","topic":"log","filter":[', b'["tag","Eq","x"]', 10_000, b"]"),
    lambda: _names(b'{"op":"unsubscribe","topics":[', b'"t%d"', 5_000, b"]"),
    lambda: _names(b'{"op":"unsubscribe","topics":[', b'"t%d"', 60_000, b"]"),
    lambda: _times(b'{"op":"publish","topic":"ws-1","records":[', b'{"data":1}', 10_001, b"]"),
    lambda: _times(b'{"op":"publish","topic":"ws-1","records":[', b'{"data":1}', 150_000, b"]"),
    lambda: _times(b'{"op":"publish","topic":"ws-1","records":[', b"{}", 30_000, b"]"),
    lambda: _times(b'{"op":"publish","topic":"ws-1",', b'"records":[]', 20_000, b',"records":[{"data":1}]'),
    lambda: _times(b'{"op":"publish","topic":"ws-1",', b'"":0', 90_000, b',"records":[{"data":1}]'),
    lambda: _times(b'{"op":"ping",', b'"op":"ping"', 1_000, b""),
    lambda: _times(b'{"op":"ping","x":[', b"[[[[[[[[]]]]]]]]", 200, b"]"),
    lambda: b'{"op":"publish","topic":"ws-1","records":[{"data":1,"meta":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}]",
    lambda: b'{"op":"subscribe","topic":"log","from_seq":18446744073709551616,"limit":' + b"9" * 4_000,
    lambda: b'{"op":"subscribe","topic":"log","limit":18446744073709551615,"max_batch_bytes":18446744073709551615',
)


def any_request_id(dice: Random, mark: str) -> Any:
    """Any JSON, and no other command's."""
    number = int(sha256(mark.encode()).hexdigest()[:12], 16)
    return dice.choice(
        (
            mark,
            mark,
            mark,
            number,
            -number,
            number + 0.5,
            [mark],
            {"id": mark, "": None},
            [[[{"a": [mark, True, False, None, 1e300, "\u00e9\ud83d\ude00\u0000"]}]]],
            mark * 10,
        )
    )


def hostile_command(dice: Random, request_id: Any) -> bytes:
    """JSON, nearly: one field of it is not what it should be, or there is one too many."""
    if dice.random() < 0.03:
        return dice.choice(OVERSIZE)() + b',"request_id":' + json.dumps(request_id).encode() + b"}"
    command = dict(dice.choice(COMMANDS))
    fields = [(json.dumps(name).encode(), json.dumps(value).encode()) for name, value in command.items()]
    fields.append((b'"request_id"', json.dumps(request_id).encode()))
    roll = dice.random()
    at = dice.randrange(len(fields) - 1)
    if roll < 0.55:
        fields[at] = (fields[at][0], hostile_value(dice))
    elif roll < 0.65:
        fields.insert(at, (fields[at][0], hostile_value(dice)))  # twice: the last one counts
    elif roll < 0.75:
        fields.insert(
            at, (dice.choice((b'"x"', b'""', b'"\\ud800"', b'"from_seq"', b'"topics"', b'"op"')), hostile_value(dice))
        )
    elif roll < 0.85:
        del fields[at]
    return render(fields)


def hostile_request_id(dice: Random) -> bytes:
    """One that can't be told from the others by what it is answered with."""
    command = {key: value for key, value in dice.choice(COMMANDS).items()}
    fields = [(json.dumps(name).encode(), json.dumps(value).encode()) for name, value in command.items()]
    return render([*fields, (b'"request_id"', hostile_value(dice))])


_CONFIGURES: dict[str, Any] = {
    "records": [{"data": 1}],
    "config": {"type": "queue", "dead_letter": "log", "max_deliveries": 1, "cap_records": 20},
}


class Commands:
    """What one socket says, and what it may wait for."""

    def __init__(self, dice: Random, number: int) -> None:
        self.wanted: set[str] = set()  # request_ids, as JSON
        self.texts: list[bytes] = []
        self.key = dice.choice((FULL, FULL, WRITER, READER, INSIDER))
        self.may_not: set[str] = set()  # publishes with a config, of a key that has no right to it
        for at in range(dice.choice((1, 3, 8))):
            if dice.random() < 0.15:
                self.texts.append(_as_text(hostile_request_id(dice)))
                continue
            request_id = any_request_id(dice, f"r-{number}-{at}")
            if dice.random() < 0.08:
                config = {"op": "publish", **_CONFIGURES, "topic": f"ws-{dice.randrange(9)}", "request_id": request_id}
                text = json.dumps(config).encode()
                if self.key != FULL:
                    self.may_not.add(_spelled(request_id))
            else:
                text = _as_text(hostile_command(dice, request_id))
            self.texts.append(text)
            if _may_be_identified(text):
                self.wanted.add(_spelled(request_id))
        self.texts.append(json.dumps({"op": "ping", "request_id": "last"}).encode())
        self.wanted.add(_spelled("last"))

    def case(self, number: int) -> Case:
        opening = handshake({"Authorization": f"Bearer {self.key}"})
        return Case(number, "commands", [opening, *map(text_frame, self.texts)], "wait", farewell=self._farewell)

    def _farewell(self, received: bytes) -> bytes | None:
        head = read_head(received, 0)
        if head is None:
            return None
        try:
            talk = read_socket(received[head[2] :])
        except Wrong:
            return b""
        return close_frame(1000) if talk.close_code is not None or self.missing(talk) == set() else None

    def missing(self, talk: SocketTalk) -> set[str]:
        return self.wanted - {_spelled(message["request_id"]) for message in talk.messages if "request_id" in message}

    def wrongly_done(self, talk: SocketTalk) -> set[str]:
        done = {_spelled(message.get("request_id")) for message in talk.messages if message["op"] == "ack"}
        return self.may_not & done


def _spelled(request_id: Any) -> str:
    return json.dumps(request_id, sort_keys=True)


def _as_text(text: bytes) -> bytes:
    """What is not UTF-8 ends a socket, as it must; that is tried among the frames."""
    return text.decode(errors="replace").encode()


def _may_be_identified(text: bytes) -> bool:
    """Its request_id is one that any reader would find: the text is JSON, of a depth that everybody follows."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and text.count(b"[") + text.count(b"{") < 100 and b"\\ud" not in text


def _refuse(name: str) -> None:
    raise ValueError(name)
