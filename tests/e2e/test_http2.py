"""What is particular to HTTP/2: streams side by side, flow control, and that a fault of one stream is its own.

The contract itself runs over this lane in the other files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hyperframe.frame import DataFrame, PriorityFrame

from .client import Answer, Client
from .conftest import SMALL
from .h2wire import H2Wire, Stream
from .server import Server, eventually
from .wire import Wire, append_request, request

pytestmark = pytest.mark.e2e

JSON = ("content-type", "application/json")
BODY = b'{"records":[{"data":1}]}'
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture
def connect2(server: Server) -> Iterator[Callable[..., H2Wire]]:
    wires: list[H2Wire] = []

    def open_wire(to: Server = server, **options: Any) -> H2Wire:
        wires.append(H2Wire(to.port, **options))
        return wires[-1]

    yield open_wire
    for wire in wires:
        wire.close()


@pytest.fixture
def wire2(connect2: Callable[..., H2Wire]) -> H2Wire:
    return connect2()


def answer(wire2: H2Wire, number: int) -> Answer:
    stream = wire2.finish(number)
    return Answer(status=int(stream.headers[":status"]), headers=stream.headers, raw=stream.body)


def test_streams_are_answered_as_they_are_done(wire2: H2Wire, api1: Client, topic: str) -> None:
    api1.put(topic)
    poll = wire2.ask("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":20000}')
    fast = [wire2.ask("GET", "/v0/health") for _ in range(20)]
    assert all(answer(wire2, stream).status == 200 for stream in fast)
    assert not wire2.streams[poll].ended
    feeding = wire2.ask("POST", f"/v0/topics/{topic}", BODY)
    assert answer(wire2, feeding)["seqs"] == [1]
    assert answer(wire2, poll).seqs == [1]


def test_more_than_a_thousand_requests_on_one_connection(wire2: H2Wire) -> None:
    for _ in range(21):
        streams = [wire2.ask("GET", "/v0/health") for _ in range(50)]
        assert all(answer(wire2, stream).status == 200 for stream in streams)
    assert not wire2.goodbye


def test_a_hundred_appends_at_a_time(wire2: H2Wire, topic: str) -> None:
    streams = [wire2.ask("POST", f"/v0/topics/{topic}", BODY) for _ in range(100)]
    seqs = [answer(wire2, stream)["first_seq"] for stream in streams]
    assert sorted(seqs) == list(range(1, 101))


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v0/nowhere", [JSON], 404),
        ("PUT", "/v0/topics/a%20b", [JSON], 400),
        ("POST", "/v0/health", [JSON], 405),
        ("PATCH", "/v0/topics/abc", [JSON], 405),
        ("POST", "/v0/topics/abc", [("content-type", "text/plain")], 415),
        ("POST", "/v0/topics/abc", [JSON, ("content-encoding", "br")], 415),
    ],
    ids=["no route", "bad name", "wrong method", "unknown method", "content type", "coding"],
)
def test_a_refusal_that_does_not_need_the_body_survives_it(
    wire2: H2Wire, method: str, path: str, headers: list[tuple[str, str]], status: int
) -> None:
    """The body comes after the server could have answered; neither the answer nor the other streams suffer."""
    refused = wire2.open(method, path, *headers)
    assert answer(wire2, wire2.ask("GET", "/v0/health")).status == 200  # the refused head has been seen by now
    if not wire2.streams[refused].ended:
        wire2.send(refused, BODY, end=True)
    else:
        wire2.sock.sendall(_late_body(refused))
    assert answer(wire2, refused).status == status
    assert answer(wire2, wire2.ask("GET", "/v0/health")).status == 200


def _late_body(stream: int) -> bytes:
    """What was under way when the answer came, in two frames."""
    return DataFrame(stream, BODY[:10]).serialize() + DataFrame(stream, BODY[10:], flags=["END_STREAM"]).serialize()


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_413_on_its_stream_alone(
    small_server: Server, connect2: Callable[..., H2Wire], topic: str, announced: bool
) -> None:
    wire2 = connect2(small_server)
    size = SMALL["TOPICS_MAX_BODY_BYTES"] * 3
    length = [("content-length", str(size))] if announced else []
    stream = wire2.open("POST", f"/v0/topics/{topic}", JSON, *length)
    wire2.send(stream, b" " * size, end=True)
    assert answer(wire2, stream).refusal == (413, "payload_too_large")
    assert answer(wire2, wire2.ask("GET", "/v0/health")).status == 200
    assert answer(wire2, wire2.ask("GET", f"/v0/topics/{topic}")).status == 404


def test_a_body_far_beyond_the_limit_may_cost_the_connection_but_nothing_more(
    small_server: Server, connect2: Callable[..., H2Wire], topic: str
) -> None:
    wire2 = connect2(small_server)
    stream = wire2.open("POST", f"/v0/topics/{topic}", JSON)
    try:
        wire2.send(stream, b" " * 5_000_000, end=True)
        assert answer(wire2, stream).refusal == (413, "payload_too_large")
    except (OSError, EOFError):
        pass
    wire2 = connect2(small_server)
    assert answer(wire2, wire2.ask("POST", f"/v0/topics/{topic}", BODY))["seqs"] == [1]
    assert "Traceback" not in small_server.output()


def test_a_body_in_many_frames(wire2: H2Wire, topic: str) -> None:
    stream = wire2.open("POST", f"/v0/topics/{topic}", JSON)
    for at in range(len(BODY)):
        wire2.send(stream, BODY[at : at + 1], end=at == len(BODY) - 1)
    assert answer(wire2, stream)["seqs"] == [1]


def test_a_large_body_passes_the_flow_control(wire2: H2Wire, topic: str) -> None:
    body = json.dumps({"records": [{"data": "x" * 10_000}] * 200}).encode()
    assert answer(wire2, wire2.ask("POST", f"/v0/topics/{topic}", body))["count"] == 200


def test_a_large_answer_waits_for_the_window(connect2: Callable[..., H2Wire], api1: Client, topic: str) -> None:
    api1.append(topic, *["x" * 1_000] * 500)
    wire2 = connect2(window=5_000)
    assert len(answer(wire2, wire2.ask("POST", f"/v0/topics/{topic}/diff", b'{"limit":500}')).data) == 500


def test_half_a_request_keeps_nobody_waiting(wire2: H2Wire, topic: str) -> None:
    half = wire2.open("POST", f"/v0/topics/{topic}", JSON)
    wire2.send(half, BODY[:10], end=False)
    assert answer(wire2, wire2.ask("GET", "/v0/health")).status == 200
    wire2.send(half, BODY[10:], end=True)
    assert answer(wire2, half)["seqs"] == [1]


def test_a_cancelled_stream_takes_nothing_with_it(wire2: H2Wire, api1: Client, topic: str) -> None:
    api1.put(topic)
    poll = wire2.ask("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":20000}')
    half = wire2.open("POST", f"/v0/topics/{topic}", JSON)
    wire2.send(half, BODY[:10], end=False)
    eventually(lambda: api1.state(topic, touch=False)["last_read_ts"] is not None)
    wire2.cancel(poll)
    wire2.cancel(half)
    assert answer(wire2, wire2.ask("POST", f"/v0/topics/{topic}", BODY))["seqs"] == [1]


def test_a_client_that_leaves_in_a_long_poll_leaves_nothing_behind(
    server: Server, connect2: Callable[..., H2Wire], api1: Client, topic: str
) -> None:
    api1.put(topic)
    sockets = server.sockets_of("gateway-0")
    wire2 = connect2()
    for _ in range(5):
        wire2.ask("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}')
    eventually(lambda: api1.state(topic, touch=False)["last_read_ts"] is not None)
    wire2.close()
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, within_s=15, what="the connection's end")
    assert api1.append(topic, 1)["seqs"] == [1]


def test_half_a_body_is_nothing(server: Server, connect2: Callable[..., H2Wire], api1: Client, topic: str) -> None:
    sockets = server.sockets_of("gateway-0")
    wire2 = connect2()
    stream = wire2.open("POST", f"/v0/topics/{topic}", JSON)
    wire2.send(stream, BODY, end=False)
    wire2.close()
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, what="the connection's end")
    assert api1.state(topic).status == 404


@pytest.mark.parametrize(("path", "status"), [("/v0/health", "200"), ("/nowhere", "404")])
def test_head_is_a_get_without_the_body(wire2: H2Wire, path: str, status: str) -> None:
    stream = wire2.ask("HEAD", path)
    while not wire2.streams[stream].ended:
        assert wire2.receive()
    assert wire2.streams[stream].headers[":status"] == status
    assert wire2.streams[stream].body == b""


def test_a_large_header_is_refused(wire2: H2Wire, api1: Client, topic: str) -> None:
    """Where the headers can't be decoded the connection can't go on; nothing of it runs."""
    try:
        headers = [(f"x-{n}", "a" * 4_000) for n in range(20)]
        stream = wire2.open("PUT", f"/v0/topics/{topic}", *headers, end=True)
        assert answer(wire2, stream).status in (400, 431)
    except (OSError, EOFError):
        pass
    assert api1.state(topic).status == 404


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [
        (b"GET", b"/v0/topics/\xff", {400}),
        (b"GET", b"/v0/\xc3\xa9", {400, 404}),
        (b"G\xcb", b"/v0/health", {400, 405}),
        (b"get", b"/v0/health", {405}),
        (b"GET", b"*", {400, 404}),
        (b"CONNECT", None, {404}),
    ],
    ids=["name", "path", "method", "lower case", "asterisk", "a proxy's connect"],
)
def test_a_strange_head_is_refused_on_its_stream_alone(
    wire2: H2Wire, method: bytes, path: bytes | None, statuses: set[int]
) -> None:
    poll = wire2.open("GET", "/v0/health")
    wire2.h2.config.validate_outbound_headers = wire2.h2.config.normalize_outbound_headers = False
    number = wire2.h2.get_next_available_stream_id()
    wire2.streams[number] = Stream()
    target = [] if path is None else [(b":path", path), (b":scheme", b"http")]
    fields = [(b":method", method), (b":authority", b"localhost"), *target]
    wire2.h2.send_headers(number, fields, end_stream=path is not None)
    wire2.flush()
    assert answer(wire2, number).status in statuses
    wire2.send(poll, b"", end=True)
    assert answer(wire2, poll).status == 200


def test_priorities_change_nothing(wire2: H2Wire) -> None:
    """Not even those of many streams that nobody has opened."""
    for number, parent, exclusive in [(99, 77, True), (101, 99, False), (77, 101, False), (99, 0, True)]:
        wire2.sock.sendall(PriorityFrame(number, depends_on=parent, stream_weight=5, exclusive=exclusive).serialize())
    for number in range(1_001, 1_301, 2):
        wire2.sock.sendall(PriorityFrame(number, depends_on=0, stream_weight=5).serialize())
    number = wire2.h2.get_next_available_stream_id()
    wire2.streams[number] = Stream()
    head = [(":method", "GET"), (":path", "/v0/health"), (":scheme", "http"), (":authority", "localhost")]
    wire2.h2.send_headers(number, head, end_stream=True, priority_weight=10, priority_depends_on=55)
    wire2.flush()
    assert answer(wire2, number).status == 200
    assert all(answer(wire2, wire2.ask("GET", "/v0/health")).status == 200 for _ in range(3))


def _asked(wire2: H2Wire) -> None:
    assert answer(wire2, wire2.ask("GET", "/v0/health")).status == 200


def _cancelled(wire2: H2Wire) -> None:
    wire2.cancel(wire2.open("POST", "/v0/topics/abc", JSON))


@pytest.mark.parametrize("use", [lambda wire2: None, _asked, _cancelled], ids=["silent", "answered", "cancelled"])
def test_an_idle_connection_is_closed(
    small_server: Server, connect2: Callable[..., H2Wire], use: Callable[[H2Wire], None]
) -> None:
    wire2 = connect2(small_server)
    use(wire2)
    started = time.monotonic()
    while wire2.receive():
        pass
    assert time.monotonic() - started < 5 * SMALL["TOPICS_IDLE_TIMEOUT_MS"] / 1_000


@pytest.mark.parametrize("at", [1, 3, 14, 16, 18, 23, 24, 30])
def test_the_preface_may_arrive_in_pieces(server: Server, connect2: Callable[..., H2Wire], at: int) -> None:
    def another_request() -> None:  # when it is answered, the first piece has been read
        with H2Wire(server.port) as other:
            assert answer(other, other.ask("GET", "/v0/health")).status == 200

    wire2 = connect2(split_at=at, between=another_request)
    assert answer(wire2, wire2.ask("GET", "/v0/health")).status == 200


def test_a_preface_behind_a_request_is_refused(connect: Callable[..., Wire]) -> None:
    wire = connect()
    wire.send(request() + PREFACE)
    assert wire.answer().status == 200
    assert wire.answer().status == 400
    wire.assert_closed()


@pytest.mark.parametrize(
    "garbage",
    [
        PREFACE[:-4] + b"nonsense\r\n\r\n",
        PREFACE + b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        PREFACE + b"\xff" * 100,
        PREFACE + b"\x00\x00\x00\x01\x05\x00\x00\x00\x00",
    ],
    ids=["half a preface", "HTTP/1.1 behind it", "noise", "headers on stream 0"],
)
def test_garbage_ends_the_connection_and_nothing_else(
    small_server: Server, connect: Callable[..., Wire], small_clients: dict[str, Client], topic: str, garbage: bytes
) -> None:
    """At once where it can't be HTTP/2; like any idle connection where it could be the start of a huge frame."""
    gateway = small_server.pid_of("gateway-0")
    wire = connect(small_server)
    wire.send(garbage + append_request(topic))
    while wire.sock.recv(1 << 16):
        pass
    assert small_clients["http1"].state(topic).status == 404
    assert small_server.pid_of("gateway-0") == gateway
