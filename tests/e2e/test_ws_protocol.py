"""RFC 6455 byte by byte: the handshake, frames in every form a client may choose, and those it must not send. What is
wrong with one socket stays with it."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .client import Client, unique
from .conftest import SMALL
from .server import Server, eventually
from .sockets import (
    BINARY,
    CLOSE,
    CONTINUATION,
    KEY,
    PING,
    PONG,
    TEXT,
    Closed,
    RawSocket,
    accept_for,
    close_frame,
    close_reason,
    frame,
    handshake,
    text_frame,
)
from .test_bad_input import MALFORMED
from .wire import request

pytestmark = pytest.mark.e2e

PING_COMMAND = b'{"op":"ping","request_id":1}'
MOST = SMALL["TOPICS_MAX_BODY_BYTES"]
Open = Callable[..., RawSocket]


@pytest.fixture
def open_raw(server: Server) -> Iterator[Open]:
    """Open raw sockets to the server; all are closed at the end."""
    opened: list[RawSocket] = []

    def connect(to: Server = server, **options: Any) -> RawSocket:
        opened.append(RawSocket(to.port, **options))
        return opened[-1]

    yield connect
    for raw in opened:
        raw.close()


@pytest.fixture
def raw(open_raw: Open) -> RawSocket:
    """An open WebSocket."""
    return open_raw()


@pytest.fixture
def plain(open_raw: Open) -> RawSocket:
    """A connection without a handshake."""
    return open_raw(upgraded=False)


# --- the handshake -----------------------------------------------------------------------------------


def test_the_example_of_the_rfc(plain: RawSocket) -> None:
    headers = plain.upgrade(handshake({"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}))
    assert headers["upgrade"].lower() == "websocket"
    assert headers["connection"].lower() == "upgrade"
    assert headers["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert not headers.keys() & {"sec-websocket-extensions", "sec-websocket-protocol", "content-length"}
    plain.ping()


def test_the_answer_belongs_to_the_key(open_raw: Open) -> None:
    for seed in range(20):
        key = base64.b64encode(random.Random(seed).randbytes(16)).decode()
        headers = open_raw(upgraded=False).upgrade(handshake({"Sec-WebSocket-Key": key}))
        assert headers["sec-websocket-accept"] == accept_for(key)


@pytest.mark.parametrize(
    "changes",
    [
        {"Connection": "keep-alive, Upgrade"},
        {"Connection": "Upgrade, keep-alive"},
        {"Connection": "keep-alive , upgrade , x"},
        {"Connection": "UPGRADE"},
        {"Upgrade": "WebSocket"},
        {"Upgrade": "WEBSOCKET"},
        {"Upgrade": None, "UPGRADE": "websocket"},
        {"Sec-WebSocket-Key": None, "sec-websocket-key": KEY},
        {"Sec-WebSocket-Version": None, "SEC-WEBSOCKET-VERSION": "13"},
        {"Sec-WebSocket-Version": "  13  "},
        {"Sec-WebSocket-Protocol": "chat, superchat"},
        {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"},
        {"Sec-WebSocket-Extensions": "permessage-deflate, x-webkit-deflate-frame"},
        {"User-Agent": "x", "Pragma": "no-cache", "Cache-Control": "no-cache", "Accept-Encoding": "gzip"},
        {"Cookie": "a=" + "b" * 4_000},
    ],
    ids=str,
)
def test_what_is_accepted(plain: RawSocket, changes: dict[str, str | None]) -> None:
    headers = plain.upgrade(handshake(changes))
    assert headers["sec-websocket-accept"] == accept_for(KEY)
    assert not headers.keys() & {"sec-websocket-extensions", "sec-websocket-protocol"}
    plain.ping()


def test_a_query_does_not_matter(plain: RawSocket) -> None:
    plain.upgrade(handshake(path="/v0/ws?a=b&c"))
    plain.ping()


@pytest.mark.parametrize(
    "changes",
    [
        {"Upgrade": None, "Connection": None, "Sec-WebSocket-Key": None, "Sec-WebSocket-Version": None},
        {"Upgrade": None},
        {"Connection": None},
        {"Connection": "keep-alive"},
        {"Connection": "upgraded"},
        {"Upgrade": "h2c"},
        {"Sec-WebSocket-Version": None},
        {"Sec-WebSocket-Version": "8"},
        {"Sec-WebSocket-Version": "14"},
        {"Sec-WebSocket-Version": "013"},
        {"Sec-WebSocket-Version": "x"},
        {"Sec-WebSocket-Version": ""},
    ],
    ids=str,
)
def test_what_is_no_upgrade_is_426(plain: RawSocket, changes: dict[str, str | None]) -> None:
    answer = plain.ask(handshake(changes))
    assert answer.refusal == (426, "upgrade_required")
    assert answer.headers["sec-websocket-version"] == "13"


def test_a_plain_get_is_426_in_both_lanes(api: Client) -> None:
    answer = api.get("/v0/ws")
    assert answer.refusal == (426, "upgrade_required")
    assert answer.headers["sec-websocket-version"] == "13"


@pytest.mark.parametrize(
    "key",
    [None, "", "x", "dGhlIHNhbXBsZSBub25jZQ", "dGhlIHNhbXBsZSBub25j", "dGhlIHNhbXBsZSBub25jZXg=", "!" * 24, KEY * 2],
)
def test_a_bad_key_is_400(plain: RawSocket, key: str | None) -> None:
    assert plain.ask(handshake({"Sec-WebSocket-Key": key})).refusal == (400, "invalid_request")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_methods_are_405(plain: RawSocket, method: str) -> None:
    answer = plain.ask(handshake(method=method))
    assert answer.refusal == (405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]


def test_http_1_0_has_no_upgrade(plain: RawSocket) -> None:
    assert plain.ask(handshake(version="HTTP/1.0")).status in (400, 426, 505)
    plain.assert_closed()


def test_a_refused_handshake_leaves_the_server_as_it_was(open_raw: Open) -> None:
    refused: list[dict[str, str | None]] = [
        {"Sec-WebSocket-Key": "x"},
        {"Sec-WebSocket-Version": "8"},
        {"Origin": "http://elsewhere"},
    ]
    for changes in refused:
        for _ in range(10):
            open_raw(upgraded=False).ask(handshake(changes))
    open_raw().ping()


def test_commands_in_the_packet_of_the_handshake(plain: RawSocket, topic: str) -> None:
    publish = json.dumps({"op": "publish", "topic": topic, "records": [{"data": 1}]})
    subscribe = json.dumps({"op": "subscribe", "topic": topic})
    plain.send(handshake() + text_frame(publish) + frame(PING, b"here") + text_frame(PING_COMMAND))
    plain.upgrade_answer()
    assert {plain.receive().op, plain.receive().op} == {"ack", "pong"}
    plain.ping()  # a pong may come behind the replies, not behind this one
    assert [pong.payload for pong in plain.frames] == [b"here"]
    plain.send_text(subscribe)
    assert plain.data(topic, 1) == [1]


def test_a_close_in_the_packet_of_the_handshake(plain: RawSocket) -> None:
    plain.upgrade(handshake() + close_frame(1000))
    assert plain.close_code() == 1000


def test_half_a_frame_in_the_packet_of_the_handshake(plain: RawSocket) -> None:
    content = text_frame(PING_COMMAND)
    plain.upgrade(handshake() + content[:9])
    plain.send(content[9:])
    assert plain.receive().op == "pong"


def test_a_handshake_behind_other_requests(plain: RawSocket) -> None:
    plain.send(request() + request(path="/v0/ready") + handshake() + text_frame(PING_COMMAND))
    assert plain.answer().status == 200
    assert plain.answer().status == 200
    plain.upgrade_answer()
    assert plain.receive().op == "pong"


def test_a_handshake_byte_by_byte(plain: RawSocket) -> None:
    content = handshake() + text_frame(PING_COMMAND) + frame(PING, b"x")
    plain.send(*(content[at : at + 1] for at in range(len(content))))
    plain.upgrade_answer()
    assert plain.receive().op == "pong"
    assert plain.take().payload == b"x"


# --- where a page may come from ----------------------------------------------------------------------


def origin(plain: RawSocket, host: str, value: str) -> int:
    """The status that a handshake with this Host and Origin gets."""
    plain.send(handshake({"Host": host, "Origin": value}))
    status, headers = plain.head()
    if status != 101:
        assert json.loads(plain.body(headers))["error"]["code"] == "forbidden"
    return status


@pytest.mark.parametrize(
    ("host", "value", "status"),
    [
        ("127.0.0.1:4000", "http://127.0.0.1:4000", 101),
        ("localhost:4000", "http://localhost:4000", 101),
        ("LocalHost:4000", "http://localhost:4000", 101),
        ("topics.localhost", "http://topics.localhost", 101),
        ("topics.localhost", "https://topics.localhost", 101),  # behind a proxy that ends TLS
        ("[::1]:4000", "http://[::1]:4000", 101),
        ("127.0.0.1:4000", "http://127.0.0.1:4001", 403),
        ("127.0.0.1:4000", "http://127.0.0.1", 403),
        ("127.0.0.1:4000", "http://localhost:4000", 403),
        ("topics.localhost", "http://evil.example", 403),
        ("topics.localhost", "http://topics.localhost.evil.example", 403),
        ("topics.localhost", "http://eviltopics.localhost", 403),
        ("topics.localhost", "http://sub.topics.localhost", 403),
        ("topics.localhost", "http://evil.example/topics.localhost", 403),
        ("topics.localhost", "http://topics.localhost@evil.example", 403),
        ("topics.localhost", "null", 403),
        ("topics.localhost", "file://", 403),
        ("topics.localhost", "nonsense", 403),
    ],
)
def test_a_page_of_another_origin_is_refused(plain: RawSocket, host: str, value: str, status: int) -> None:
    assert origin(plain, host, value) == status


def test_origins_can_be_allowed(start_server: Callable[..., Server], open_raw: Open) -> None:
    listed = start_server(TOPICS_ALLOWED_ORIGINS="http://app.example, https://other.example:8443")
    for value, status in (
        ("http://app.example", 101),
        ("HTTP://APP.example", 101),
        ("https://other.example:8443", 101),
        ("http://localhost", 101),
        ("https://app.example", 403),
        ("http://app.example:81", 403),
        ("https://other.example", 403),
        ("http://evil.example", 403),
        ("null", 403),
    ):
        assert origin(open_raw(listed, upgraded=False), "localhost", value) == status, value


def test_every_origin_can_be_allowed(start_server: Callable[..., Server], open_raw: Open) -> None:
    anywhere = start_server(TOPICS_ALLOWED_ORIGINS="*")
    for value in ("http://evil.example", "null", "file://"):
        assert origin(open_raw(anywhere, upgraded=False), "localhost", value) == 101


# --- frames of every form ----------------------------------------------------------------------------


def test_a_message_in_fragments(raw: RawSocket) -> None:
    raw.send(
        frame(TEXT, PING_COMMAND[:5], fin=False),
        frame(CONTINUATION, PING_COMMAND[5:9], fin=False),
        frame(CONTINUATION, PING_COMMAND[9:]),
    )
    assert raw.receive().request_id == 1


def test_fragments_of_one_byte_and_of_none(raw: RawSocket) -> None:
    parts = [b"", *(PING_COMMAND[at : at + 1] for at in range(len(PING_COMMAND))), b""]
    for at, part in enumerate(parts):
        raw.send(frame(CONTINUATION if at else TEXT, part, fin=False))
    raw.send(frame(CONTINUATION))
    assert raw.receive().request_id == 1


def test_fragments_may_cut_a_character(raw: RawSocket) -> None:
    content = '{"op":"ping","request_id":"é漢🎈"}'.encode()
    for at in range(1, len(content)):
        raw.send(frame(TEXT, content[:at], fin=False) + frame(CONTINUATION, content[at:]))
    assert {reply.request_id for reply in raw.replies(len(content) - 1)} == {"é漢🎈"}


def test_control_frames_between_fragments(raw: RawSocket) -> None:
    raw.send(frame(TEXT, PING_COMMAND[:5], fin=False), frame(PING, b"now"))
    pong = raw.take()
    assert (pong.opcode, pong.payload) == (PONG, b"now")
    raw.send(frame(PONG, b"whatever"), frame(CONTINUATION, PING_COMMAND[5:]))
    assert raw.receive().request_id == 1


def test_close_between_fragments(raw: RawSocket) -> None:
    """Allowed, though the message was never finished; it may also be taken for a fault."""
    raw.send(frame(TEXT, PING_COMMAND[:5], fin=False), close_frame(1000))
    assert raw.close_code() in (1000, 1002)


@pytest.mark.parametrize("payload", [b"", b"x", b"\x00\xff\x80", b"y" * 125])
def test_ping_is_answered_with_its_payload(raw: RawSocket, payload: bytes) -> None:
    raw.send(frame(PING, payload))
    pong = raw.take()
    assert (pong.opcode, pong.payload) == (PONG, payload)


def test_many_pings_in_one_packet(raw: RawSocket) -> None:
    """An answer to the last one is enough, but there is none to anything else."""
    raw.send(b"".join(frame(PING, b"%d" % number) for number in range(500)))
    answered: list[int] = []
    while not answered or answered[-1] != 499:
        pong = raw.take()
        assert pong.opcode == PONG
        answered.append(int(pong.payload))
    assert answered == sorted(set(answered))
    raw.ping()


def test_a_pong_nobody_asked_for_is_ignored(raw: RawSocket) -> None:
    raw.send(frame(PONG), frame(PONG, b"x" * 125))
    raw.ping()
    assert raw.frames == []


def test_messages_of_every_length_form(raw: RawSocket) -> None:
    for size in (40, 125, 126, 127, 65_535, 65_536, 200_000):
        raw.send(text_frame(PING_COMMAND.ljust(size)))
        assert raw.receive().op == "pong"


def test_answers_of_every_length_form(raw: RawSocket) -> None:
    empty = len(raw.call("unsubscribe", request_id=1, topics=[""]).raw)
    for size in (125, 126, 127, 65_535, 65_536, 200_000):
        topics = ["x" * (size - empty)]
        assert len(raw.call("unsubscribe", request_id=1, topics=topics).raw) == size


def test_frames_byte_by_byte(raw: RawSocket) -> None:
    content = text_frame(PING_COMMAND.ljust(300)) + frame(PING, b"x")
    raw.send(*(content[at : at + 1] for at in range(len(content))))
    assert raw.receive().op == "pong"
    assert raw.take().payload == b"x"


def test_many_frames_in_one_packet(raw: RawSocket) -> None:
    raw.send(b"".join(text_frame(f'{{"op":"ping","request_id":{number}}}') for number in range(500)))
    assert [reply.request_id for reply in raw.replies(500)] == list(range(500))


# --- closing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [(1000, b""), (1000, b"bye"), (1001, "é".encode()), (1011, b""), (3000, b"x" * 123), (4999, b"")],
)
def test_a_close_is_answered(raw: RawSocket, code: int, reason: bytes) -> None:
    raw.send(close_frame(code, reason))
    answer = raw.take()
    assert answer.opcode == CLOSE
    assert close_reason(answer.payload).code == code
    raw.assert_ended()


def test_a_close_without_a_code_is_answered(raw: RawSocket) -> None:
    raw.send(close_frame())
    answer = raw.take()
    assert answer.opcode == CLOSE
    assert close_reason(answer.payload).code in (1000, 1005)
    raw.assert_ended()


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65_535])
def test_a_close_with_a_code_that_nobody_may_send(raw: RawSocket, code: int) -> None:
    raw.send(close_frame(code))
    assert raw.close_code() == 1002


def test_a_close_with_half_a_code(raw: RawSocket) -> None:
    raw.send(frame(CLOSE, b"\x03"))
    assert raw.close_code() == 1002


def test_a_close_whose_reason_is_no_text(raw: RawSocket) -> None:
    raw.send(close_frame(1000, b"\xff\xfe"))
    assert raw.close_code() in (1002, 1007)


def test_what_comes_after_a_close_is_not_looked_at(raw: RawSocket, api1: Client, topic: str) -> None:
    publish = json.dumps({"op": "publish", "topic": topic, "records": [{"data": 1}]})
    raw.send(text_frame(PING_COMMAND) + close_frame(1000) + text_frame(publish))
    assert raw.close_code() == 1000
    assert [kept.op for kept in raw.kept()] == ["pong"]
    assert api1.state(topic).status == 404


def test_what_was_asked_before_a_close_is_done(raw: RawSocket, api1: Client, topic: str) -> None:
    api1.put(topic)
    publish = json.dumps({"op": "publish", "topic": topic, "records": [{"data": 1}]})
    raw.send(text_frame(publish) * 20 + close_frame(1000))
    raw.wait_closed()
    eventually(lambda: api1.state(topic)["head_seq"] == 20)


# --- what breaks the protocol ------------------------------------------------------------------------

BROKEN: dict[str, bytes] = {
    "not masked": text_frame(PING_COMMAND, masked=False),
    "a ping that is not masked": frame(PING, b"x", masked=False),
    "a close that is not masked": frame(CLOSE, b"\x03\xe8", masked=False),
    "first reserved bit": text_frame(PING_COMMAND, reserved=4),
    "second reserved bit": text_frame(PING_COMMAND, reserved=2),
    "third reserved bit": text_frame(PING_COMMAND, reserved=1),
    "all reserved bits": text_frame(PING_COMMAND, reserved=7),
    "a reserved bit on a ping": frame(PING, b"x", reserved=4),
    "a reserved bit on a continuation": frame(TEXT, b"{", fin=False) + frame(CONTINUATION, b"}", reserved=4),
    **{f"opcode {code}": frame(code, b"x") for code in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    "continuation of nothing": frame(CONTINUATION, PING_COMMAND),
    "continuation after the end": text_frame(PING_COMMAND) + frame(CONTINUATION, b"x"),
    "a message inside a message": frame(TEXT, b"{", fin=False) + text_frame(PING_COMMAND),
    "fragmented ping": frame(PING, b"x", fin=False),
    "fragmented close": frame(CLOSE, b"\x03\xe8", fin=False),
    "long ping": frame(PING, b"x" * 126),
    "long pong": frame(PONG, b"x" * 70_000),
    "long close": close_frame(1000, b"x" * 124),
    "HTTP": request(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_framing_is_1002(raw: RawSocket, api1: Client, topic: str, content: bytes) -> None:
    publish = json.dumps({"op": "publish", "topic": topic, "records": [{"data": 1}]})
    raw.send(content + text_frame(publish))
    assert raw.close_code() == 1002
    assert api1.state(topic).status == 404  # nothing behind it is looked at


def test_a_length_beyond_all_measure(raw: RawSocket) -> None:
    raw.send(frame(TEXT, b"", announced=2**63, length_bytes=8))
    assert raw.close_code() in (1002, 1009)


@pytest.mark.parametrize("fin", [True, False])
@pytest.mark.parametrize("content", [b"", PING_COMMAND, b"\x00\xff"])
def test_binary_messages_are_1003(raw: RawSocket, content: bytes, fin: bool) -> None:
    raw.send(frame(BINARY, content, fin=fin))
    assert raw.receive().error == "unsupported_message"
    assert raw.close_code() == 1003


NOT_UTF8: dict[str, list[bytes]] = {
    "a byte that never occurs": [b'{"op":"ping","request_id":"\xff"}'],
    "a continuation byte alone": [b"\x80"],
    "cut off": [b"\xf0\x9f\x8e"],
    "overlong": [b'{"op":"ping","request_id":"\xc0\xaf"}'],
    "a surrogate": [b'{"op":"ping","request_id":"\xed\xa0\x80"}'],
    "beyond the last character": [b'"\xf4\x90\x80\x80"'],
    "in the second fragment": [b'{"op":"ping","request_id":"', b'\xff"}'],
    "cut off at the last fragment": [b'{"op":"ping","request_id":"\xe2', b"\x82"],
    "broken by the next fragment": [b'{"op":"ping","request_id":"\xe2', b'x"}'],
}


@pytest.mark.parametrize("parts", NOT_UTF8.values(), ids=NOT_UTF8.keys())
def test_text_that_is_not_utf8_is_1007(raw: RawSocket, parts: list[bytes]) -> None:
    for at, part in enumerate(parts):
        raw.send(frame(CONTINUATION if at else TEXT, part, fin=at == len(parts) - 1))
    assert raw.close_code() == 1007


def test_a_message_of_the_largest_size(small_server: Server, open_raw: Open) -> None:
    raw = open_raw(small_server)
    raw.send(text_frame(PING_COMMAND.ljust(MOST)))
    assert raw.receive().op == "pong"
    half = PING_COMMAND.ljust(MOST // 2)
    raw.send(frame(TEXT, half, fin=False), frame(PING, b"x" * 125), frame(CONTINUATION, b" " * (MOST - MOST // 2)))
    assert raw.receive().op == "pong"
    raw.send(text_frame(PING_COMMAND.ljust(MOST)))  # each counts for itself
    assert raw.receive().op == "pong"


@pytest.mark.parametrize(
    "content",
    [
        text_frame(PING_COMMAND.ljust(MOST + 1)),
        frame(TEXT, b"", announced=MOST + 1),
        frame(TEXT, PING_COMMAND.ljust(MOST), fin=False) + frame(CONTINUATION, b" "),
        frame(TEXT, PING_COMMAND.ljust(1_000), fin=False) + frame(CONTINUATION, b" " * 1_000, fin=False) * 20,
        frame(TEXT, b"", announced=2**40, length_bytes=8),
    ],
    ids=["one byte", "announced", "last fragment", "endless fragments", "announced terabyte"],
)
def test_a_message_that_is_too_large_is_1009(small_server: Server, open_raw: Open, content: bytes) -> None:
    raw = open_raw(small_server)
    raw.send(content)
    assert raw.close_code() == 1009
    open_raw(small_server).ping()


def test_the_size_is_counted_in_bytes(small_server: Server, open_raw: Open) -> None:
    raw = open_raw(small_server)
    content = '{"op":"ping","request_id":1,"x":"' + "é" * (MOST // 2) + '"}'
    assert len(content) < MOST < len(content.encode())
    raw.send(text_frame(content))
    assert raw.close_code() == 1009


# --- what is wrong inside a message ------------------------------------------------------------------

NOT_JSON: dict[str, str] = {
    "empty": "",
    "spaces": "   ",
    "deep": '{"op":"ping","x":' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep objects": '{"op":"publish","topic":"t","records":[{"data":' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}]}",
    "deep and never closed": "[" * 200_000,
    "two commands": '{"op":"ping"}{"op":"ping"}',
    "lines of commands": '{"op":"ping"}\n{"op":"ping"}',
    "cut off": '{"op":"ping"',
    "a lone surrogate": r'{"op":"ping","request_id":"\ud800"}',
    "NaN": '{"op":"ping","request_id":NaN}',
    "control character": '{"op":"ping","request_id":"a\x01b"}',
    "byte order mark": '\ufeff{"op":"ping"}',
}
NO_COMMAND: dict[str, str] = {
    "null": "null",
    "a number": "5",
    "a string": '"ping"',
    "a list": '[{"op":"ping"}]',
    "an empty object": "{}",
    "no op": '{"request_id":"r"}',
    "unknown op": '{"op":"sing"}',
    "op in capitals": '{"op":"PING"}',
    "op empty": '{"op":""}',
    "op null": '{"op":null}',
    "op a number": '{"op":1}',
    "op a list": '{"op":["ping"]}',
    "an op of the server": '{"op":"ack"}',
    "op of a megabyte": json.dumps({"op": "x" * 1_000_000}),
}
WRONG = {
    **dict.fromkeys(NOT_JSON.values(), "invalid_json"),
    **dict.fromkeys(NO_COMMAND.values(), "unsupported_message"),
}


@pytest.mark.parametrize(("content", "code"), WRONG.items(), ids=[*NOT_JSON, *NO_COMMAND])
def test_a_message_that_makes_no_sense_is_an_error_and_no_more(raw: RawSocket, content: str, code: str) -> None:
    raw.send_text(content)
    assert raw.receive().error == code
    raw.ping()


def test_every_malformed_body_is_an_error_here_too(raw: RawSocket, api1: Client, topic: str) -> None:
    """The list of the HTTP tests as the rest of a command; one socket for all."""
    for name, body in MALFORMED.items():
        try:
            text = body.decode()
        except UnicodeDecodeError:
            continue
        raw.send_text(f'{{"op":"publish","topic":"{topic}",' + text.removeprefix("{"))
        assert raw.receive().error in ("invalid_request", "invalid_json"), name
    raw.ping()
    assert api1.state(topic).status == 404


def test_an_error_names_the_request_if_it_can(raw: RawSocket) -> None:
    commands: list[dict[str, object]] = [{"op": "sing"}, {}, {"op": 5}, {"op": "subscribe", "topic": 5}]
    for number, fields in enumerate(commands):
        raw.send_text(json.dumps({"request_id": number, **fields}))
        refused = raw.receive()
        assert refused.error == ("invalid_request" if fields.get("op") == "subscribe" else "unsupported_message")
        assert refused.request_id in ((number,) if fields.get("op") in ("sing", "subscribe") else (number, None))


# --- abuse -------------------------------------------------------------------------------------------


def test_thousands_of_senseless_messages(server: Server, open_raw: Open) -> None:
    gateway = server.pid_of("gateway-0")
    raw = open_raw()
    chance = random.Random(5)
    letters = '{}[]":,ops01 \\é\x7f'
    total = 5_000
    texts = ["x" + "".join(chance.choices(letters, k=chance.randrange(40))) for _ in range(total)]
    for at in range(0, total, 500):
        raw.send(b"".join(text_frame(text) for text in texts[at : at + 500]))
        assert {reply.error for reply in raw.replies(500)} == {"invalid_json"}
    raw.ping()
    assert server.pid_of("gateway-0") == gateway


def test_hundreds_of_sockets_that_send_noise(server: Server, open_raw: Open, api1: Client) -> None:
    """Each is closed with a code that says so, or goes without a word; nobody else is disturbed."""
    gateway = server.pid_of("gateway-0")
    bystander = open_raw()
    chance = random.Random(6)
    for _ in range(300):
        raw = RawSocket(server.port)
        try:
            raw.send(chance.randbytes(chance.randrange(1, 3_000)))
            raw.half_close()
            assert raw.wait_closed().code in (1000, 1001, 1002, 1003, 1005, 1006, 1007, 1009)
        except ConnectionError:
            pass  # closed while we were sending
        finally:
            raw.close()
    bystander.ping()
    assert api1.get("/v0/health").status == 200
    assert server.pid_of("gateway-0") == gateway
    assert "Traceback" not in server.output()


def test_noise_between_good_frames(server: Server) -> None:
    """A good command, then noise: the command is answered all the same."""
    chance = random.Random(7)
    for _ in range(50):
        with RawSocket(server.port) as raw:
            raw.send(text_frame(PING_COMMAND) + b"\xff" + chance.randbytes(50))
            assert raw.close_code() == 1002
            assert [kept.op for kept in raw.kept()] == ["pong"]


# --- slots -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two-slots")
    environ = {"TOPICS_MAX_SSE_CONNECTIONS": 2, "TOPICS_MAX_BODY_BYTES": MOST}
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


def fill(server: Server) -> list[RawSocket]:
    """All slots, as soon as they are free."""
    opened: list[RawSocket] = []

    def try_one() -> bool:
        raw = RawSocket(server.port, upgraded=False)
        raw.send(handshake())
        if raw.head()[0] == 101:
            opened.append(raw)
        else:
            raw.close()
        return len(opened) == 2

    eventually(try_one, every_s=0.02, what="two free slots")
    return opened


def test_one_socket_more_than_allowed_is_429(two_slots: Server) -> None:
    opened = fill(two_slots)
    with RawSocket(two_slots.port, upgraded=False) as third:
        refused = third.ask(handshake())
        assert refused.refusal == (429, "throttled")
        assert (refused.detail["limit"], refused.detail["max"]) == ("max_sse_connections", 2)
    with two_slots.client() as client:
        assert client.get("/v0/health").status == 200  # plain requests are no streams
    for raw in opened:
        raw.ping()
        raw.close()


def _end_properly(raw: RawSocket) -> None:
    raw.send(close_frame(1000))
    assert raw.close_code() == 1000
    raw.close()


def _break_the_protocol(raw: RawSocket) -> None:
    raw.send(frame(3))
    assert raw.close_code() == 1002
    raw.close()


def _send_too_much(raw: RawSocket) -> None:
    raw.send(frame(TEXT, b"", announced=MOST + 1))
    assert raw.close_code() == 1009
    raw.close()


def _half_close(raw: RawSocket) -> None:
    raw.half_close()
    raw.wait_closed()


def _half_close_in_a_frame(raw: RawSocket) -> None:
    raw.send(text_frame(PING_COMMAND)[:7])
    raw.half_close()
    raw.wait_closed()


def _leave_commands_behind(raw: RawSocket) -> None:
    publish = json.dumps({"op": "publish", "topic": unique(), "records": [{"data": 1}]})
    raw.send(text_frame(publish) * 50)
    raw.reset()


def _never_answer_the_close(raw: RawSocket) -> None:
    """Nor close the connection."""
    raw.send(frame(3))
    assert raw.take().opcode == CLOSE


@pytest.mark.parametrize(
    "leave",
    [
        _end_properly,
        _break_the_protocol,
        _send_too_much,
        _half_close,
        _half_close_in_a_frame,
        _leave_commands_behind,
        _never_answer_the_close,
        RawSocket.reset,
        RawSocket.close,
    ],
    ids=lambda leave: leave.__name__.strip("_").replace("_", " "),
)
@pytest.mark.parametrize("subscribed", [False, True])
def test_whoever_goes_frees_the_slot(two_slots: Server, leave: Callable[[RawSocket], None], subscribed: bool) -> None:
    opened = fill(two_slots)
    if subscribed:
        for raw in opened:
            topic = unique()
            raw.publish(topic, 1)
            raw.subscribe(topic)
            raw.until("caught_up")
    for raw in opened:
        leave(raw)
    started = time.monotonic()
    for raw in fill(two_slots):
        raw.close()
    assert time.monotonic() - started < 10
    for raw in opened:
        raw.close()


def test_a_refused_handshake_takes_no_slot(two_slots: Server) -> None:
    for raw in fill(two_slots):
        raw.close()
    refusals: list[dict[str, str | None]] = [
        {"Sec-WebSocket-Key": "x"},
        {"Sec-WebSocket-Version": "8"},
        {"Origin": "http://elsewhere"},
    ]
    with RawSocket(two_slots.port, upgraded=False) as plain:
        for changes in refusals * 3:
            try:
                assert plain.ask(handshake(changes)).status in (400, 403, 426)
            except (EOFError, ConnectionError):
                plain = RawSocket(two_slots.port, upgraded=False)
    for raw in fill(two_slots):
        raw.close()


def test_the_peer_that_vanishes_hurts_nobody(server: Server) -> None:
    """A subscriber resets while records are pushed to it; the others get all of them."""
    topic = unique()
    with RawSocket(server.port) as witness:
        witness.publish(topic, 0)
        witness.subscribe(topic)
        for number in range(50):
            raw = RawSocket(server.port)
            raw.tell("subscribe", topic=topic)
            witness.tell("publish", topic=topic, records=[{"data": number}] * 20)
            raw.reset()
        received = witness.data(topic, 1_001)
        assert received == [0, *(number for number in range(50) for _ in range(20))]
    with pytest.raises((Closed, OSError)):
        raw.ping()
