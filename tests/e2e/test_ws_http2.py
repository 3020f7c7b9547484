"""WebSockets over HTTP/2: the same conversation on streams of one connection, beside each other and beside requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame

from .client import Answer, Client, unique
from .conftest import SMALL
from .h2wire import H2Wire
from .h2ws import H2Socket, H2Sockets
from .server import Server, eventually
from .sockets import BINARY, CLOSE, CONTINUATION, PING, TEXT, RawSocket, close_frame, frame, handshake, text_frame

pytestmark = pytest.mark.e2e

PING_COMMAND = b'{"op":"ping","request_id":1}'
MOST = SMALL["TOPICS_MAX_BODY_BYTES"]
Connect = Callable[..., H2Sockets]


@pytest.fixture
def connect(server: Server) -> Iterator[Connect]:
    wires: list[H2Sockets] = []

    def open_wire(to: Server = server, **options: Any) -> H2Sockets:
        wires.append(H2Sockets(to.port, **options))
        return wires[-1]

    yield open_wire
    for wire in wires:
        wire.close()


@pytest.fixture
def sockets(connect: Connect) -> H2Sockets:
    return connect()


@pytest.fixture
def ws(sockets: H2Sockets) -> H2Socket:
    return sockets.socket()


def refusal(opened: H2Socket) -> Answer:
    stream = opened.wire.finish(opened.number)
    return Answer(status=int(stream.headers[":status"]), headers=stream.headers, raw=stream.body)


def _round_trip(wire: H2Wire) -> None:
    """What was sent before has been seen; needs no window."""
    number = wire.open("GET", "/v0/health", end=True)
    while not wire.streams[number].headers:
        assert wire.receive()
    if not wire.streams[number].ended:
        wire.cancel(number)


def healthy(wire: H2Wire) -> bool:
    return wire.finish(wire.ask("GET", "/v0/health")).headers[":status"] == "200"


@contextmanager
def granting_nothing(wire: H2Wire) -> Iterator[None]:
    """What is received meanwhile does not give its window back."""
    granting = wire.receive
    wire.receive = lambda *, grant=True: granting(grant=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        wire.receive = granting  # type: ignore[method-assign]


# --- opening -----------------------------------------------------------------------------------------


def test_opening(sockets: H2Sockets) -> None:
    opened = sockets.connect()
    assert opened.status() == 200
    headers = opened.stream.headers
    assert not headers.keys() & {"sec-websocket-accept", "upgrade", "connection", "sec-websocket-extensions"}
    opened.ping()


def test_no_compression_and_no_protocol_is_agreed_on(sockets: H2Sockets) -> None:
    opened = sockets.socket(
        ("sec-websocket-extensions", "permessage-deflate; client_max_window_bits"), ("sec-websocket-protocol", "chat")
    )
    assert not opened.stream.headers.keys() & {"sec-websocket-extensions", "sec-websocket-protocol"}
    opened.ping()


@pytest.mark.parametrize("version", [None, "8", "14"])
def test_another_version_is_426(sockets: H2Sockets, version: str | None) -> None:
    answer = refusal(sockets.connect(version=version))
    assert answer.refusal == (426, "upgrade_required")
    assert answer.headers["sec-websocket-version"] == "13"
    assert healthy(sockets)


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost", 200), ("http://elsewhere", 403), ("http://localhost:81", 403), ("null", 403)],
)
def test_a_page_of_another_origin_is_refused(sockets: H2Sockets, origin: str, status: int) -> None:
    opened = sockets.connect(("origin", origin))
    assert opened.status() == status
    if status == 403:
        assert refusal(opened).error == "forbidden"
    assert healthy(sockets)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"path": "/v0/wss"}, (404, "not_found")),
        ({"path": "/v0/health"}, (405, "method_not_allowed")),
        ({"path": "/v0/topics/x"}, (405, "method_not_allowed")),
        ({"protocol": "connect-udp"}, (426, "upgrade_required")),
    ],
)
def test_what_is_no_websocket_of_ours_is_refused(
    sockets: H2Sockets, given: dict[str, Any], refused: tuple[int, str]
) -> None:
    assert refusal(sockets.connect(**given)).refusal == refused
    assert healthy(sockets)


def test_clients_that_leave_at_once_leave_no_slots_behind(
    start_server: Callable[..., Server], connect: Connect
) -> None:
    server = start_server(TOPICS_MAX_SSE_CONNECTIONS=2)
    sockets = connect(server)
    for _ in range(100):
        sockets.connect().cancel()
    for wire in [connect(server) for _ in range(10)]:
        wire.connect()
        wire.close()
    eventually(lambda: _opens(server), every_s=0.05)


def test_a_slot_is_free_as_soon_as_the_client_ends_its_side(
    start_server: Callable[..., Server], connect: Connect
) -> None:
    """Also if there is something left to send that it does not take."""
    server = start_server(TOPICS_MAX_SSE_CONNECTIONS=1)
    sockets = connect(server, window=0)
    for _ in range(3):
        opened: list[H2Socket] = []

        def admitted(opened: list[H2Socket] = opened) -> bool:
            opened.append(sockets.connect())
            return opened[-1].status() == 200

        eventually(admitted, every_s=0.05)
        opened[-1].tell("ping")
        _round_trip(sockets)
        sockets.h2.end_stream(opened[-1].number)
        sockets.flush()


def test_sockets_of_both_kinds_share_the_slots(start_server: Callable[..., Server], connect: Connect) -> None:
    server = start_server(TOPICS_MAX_SSE_CONNECTIONS=2)
    sockets = connect(server)
    first = sockets.socket()
    with RawSocket(server.port) as second:
        answer = refusal(sockets.connect())
        assert answer.refusal == (429, "throttled")
        assert answer.detail["limit"] == "max_sse_connections"
        with RawSocket(server.port, upgraded=False) as third:
            assert third.ask(handshake()).refusal == (429, "throttled")
        second.ping()
    eventually(lambda: sockets.connect().status() == 200, every_s=0.05)
    for leave in (H2Socket.end, H2Socket.cancel):
        leave(first)
        found: list[H2Socket] = []

        def admitted(found: list[H2Socket] = found) -> bool:
            found.append(sockets.connect())
            return found[-1].status() == 200

        eventually(admitted, every_s=0.05)
        first = found[-1]
    sockets.close()  # the whole connection goes
    eventually(lambda: _opens(server), every_s=0.05)


def _opens(server: Server) -> bool:
    with RawSocket(server.port, upgraded=False) as raw:
        raw.send(handshake())
        return raw.head()[0] == 101


# --- the conversation --------------------------------------------------------------------------------


def test_every_command(ws: H2Socket, api1: Client, topic: str) -> None:
    assert ws.call("ping", request_id=7).without("ts") == {"op": "pong", "request_id": 7}
    ack = ws.publish(topic, "a", "b")
    assert (ack["seqs"], ack["created"], ack["deduped"]) == ([1, 2], True, False)
    assert ws.subscribe(topic, from_seq=1)["topics"] == {topic: {"from_seq": 1, "head_seq": 2, "earliest_seq": 1}}
    assert ws.data(topic, 1) == ["b"]
    assert ws.receive().json == {"op": "caught_up", "topic": topic, "head_seq": 2}
    api1.append(topic, "c")
    assert ws.data(topic, 1) == ["c"]
    ws.unsubscribe(topic)
    api1.append(topic, "d")
    ws.assert_quiet()
    ws.subscribe(topic, tail=True)
    ws.until("caught_up")
    api1.drop(topic)
    assert ws.receive().json == {"op": "topic_deleted", "topic": topic, "head_seq": 4, "reason": "deleted"}
    assert ws.call("subscribe", topic=topic).error == "topic_not_found"
    assert ws.call("sing").error == "unsupported_message"
    assert ws.end() == 1000


def test_gaps(ws: H2Socket, api1: Client, topic: str) -> None:
    api1.append(topic, *range(10), config={"cap_records": 3})
    ws.subscribe(topic, from_seq=2)
    gap = ws.receive()
    assert (gap.op, gap["reason"], gap["gap_from"], gap["gap_to"]) == ("tombstone", "from_seq_too_old", 3, 7)
    assert ws.data(topic, 3) == [7, 8, 9]


def test_sockets_side_by_side(sockets: H2Sockets, topic: str) -> None:
    """A chat room on one connection; requests go on beside it."""
    opened = [sockets.socket() for _ in range(10)]
    opened[0].publish(topic, "first")
    for number, ws in enumerate(opened):
        ws.settle(topic, tail=True, node=str(number))
    for number, ws in enumerate(opened):
        ws.publish(topic, number, node=str(number))
    assert healthy(sockets)
    for number, ws in enumerate(opened):
        assert ws.data(topic, 9) == [other for other in range(10) if other != number]
    for number, ws in enumerate(opened):
        assert ws.end() == 1000
        for other in opened[number + 1 :]:
            other.ping()
    assert healthy(sockets)


def test_hundreds_of_publishes_in_flight(ws: H2Socket, topic: str) -> None:
    for number in range(300):
        ws.tell("publish", request_id=number, topic=topic, records=[{"data": number}])
    acks = ws.replies(300)
    assert [(ack.op, ack.request_id, ack["last_seq"]) for ack in acks] == [("ack", n, n + 1) for n in range(300)]


def test_both_lanes_hear_each_other(ws: H2Socket, server: Server, topic: str) -> None:
    with RawSocket(server.port) as other:
        other.publish(topic, 0)
        for one in (ws, other):
            one.settle(topic, tail=True)
        ws.publish(topic, 1)
        other.publish(topic, 2)
        assert ws.data(topic, 2) == [1, 2]
        assert other.data(topic, 2) == [1, 2]


def test_large_messages_pass_the_flow_control(ws: H2Socket, topic: str) -> None:
    data = ["é" * 150_000, "x" * 700_000]
    assert ws.publish(topic, *data)["count"] == 2
    ws.subscribe(topic)
    assert ws.data(topic, 2) == data


def test_a_socket_without_window_holds_up_nobody(connect: Connect, api1: Client, topic: str) -> None:
    """One stream's window is used up; the other sockets of the connection go on."""
    sockets = connect(window=20_000)
    stuck, lively = sockets.socket(), sockets.socket()
    api1.append(topic, 0)
    quiet = unique()
    lively.publish(quiet, 0)
    lively.settle(quiet, tail=True)
    stuck.settle(topic, tail=True)
    for _ in range(20):
        api1.append(topic, "x" * 50_000)
    with granting_nothing(sockets):
        for number in range(20):
            lively.publish(quiet, number)
        assert lively.data(quiet, 20) == list(range(20))
        assert len(stuck.stream.body) <= 20_000


SLOW = {"TOPICS_STREAM_BACKLOG_BYTES": 65_536, "TOPICS_SLOW_CONSUMER_TIMEOUT_MS": 1_000}


@pytest.mark.full
@pytest.mark.parametrize("reads", [True, False], ids=["reads at last", "never reads"])
def test_a_client_that_does_not_read_is_let_go(
    start_server: Callable[..., Server], connect: Connect, reads: bool
) -> None:
    """With an error and 1013 if it takes its last frames, with a reset otherwise."""
    server = start_server(**SLOW)
    sockets, writer = connect(server, window=1_000), connect(server).socket()
    slow, topic = sockets.socket(), unique()
    writer.publish(topic, "x")
    started = time.monotonic()
    with granting_nothing(sockets):
        slow.tell("subscribe", topic=topic)
        while time.monotonic() - started < 3.0:  # it has a second, the server looks once a second, and waits for five
            writer.publish(topic, "x" * 10_000)
        if reads:
            sockets.h2.increment_flow_control_window(1 << 24)
            sockets.h2.increment_flow_control_window(1 << 24, slow.number)
            sockets.flush()
            assert slow.until("error")[-1].error == "request_timeout"
            assert slow.close_code() == 1013
        else:
            while not slow.stream.reset:
                assert sockets.receive()
    writer.ping()
    assert healthy(sockets)


@pytest.mark.full
def test_a_client_that_does_not_read_its_replies_is_not_read_from(
    start_server: Callable[..., Server], connect: Connect
) -> None:
    """Its own window closes; the connection's does not, so its neighbours go on."""
    sockets = connect(start_server(**SLOW | {"TOPICS_SLOW_CONSUMER_TIMEOUT_MS": 30_000}), window=0)
    publish = text_frame(json.dumps({"op": "publish", "topic": unique(), "records": [{"data": "x" * 500}]}))
    published = {sockets.socket(): 0 for _ in range(3)}
    for busy in published:
        while not _stalled(sockets, busy, len(publish)):
            busy.send(publish)
            published[busy] += 1
            assert published[busy] * len(publish) < 2_000_000
    body = json.dumps({"records": [{"data": "x" * 100_000}]}).encode()
    number = sockets.ask("POST", f"/v0/topics/{unique()}", body)
    while not sockets.streams[number].headers:
        assert sockets.receive()
    assert sockets.streams[number].headers[":status"] == "201"
    sockets.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    sockets.flush()
    for busy, count in published.items():
        assert {reply.op for reply in busy.replies(count)} == {"ack"}
        busy.ping()


def _stalled(sockets: H2Sockets, ws: H2Socket, needed: int) -> bool:
    """It has no window left, not even when the server must have seen all that was sent."""
    for _ in range(5):
        if sockets.h2.local_flow_control_window(ws.number) >= needed:
            return False
        _round_trip(sockets)
    return True


def test_a_stop_closes_with_1001(start_server: Callable[..., Server], connect: Connect) -> None:
    server = start_server()
    sockets = connect(server)
    topic = unique()
    idle, watcher = sockets.socket(), sockets.socket()
    watcher.publish(topic, 1)
    watcher.settle(topic, tail=True)
    server.popen.terminate()
    assert {idle.wait_closed().code, watcher.wait_closed().code} == {1001}
    assert server.popen.wait(20) == 0


# --- what breaks -------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[list[bytes], int]] = {
    "not masked": ([text_frame(PING_COMMAND, masked=False)], 1002),
    "a reserved bit": ([text_frame(PING_COMMAND, reserved=4)], 1002),
    "an unknown opcode": ([frame(3, b"x")], 1002),
    "continuation of nothing": ([frame(CONTINUATION, b"x")], 1002),
    "fragmented ping": ([frame(PING, b"x", fin=False)], 1002),
    "binary": ([frame(BINARY, PING_COMMAND)], 1003),
    "not UTF-8": ([text_frame(b'"\xff"')], 1007),
    "not UTF-8 over fragments": ([frame(TEXT, b'"\xe2', fin=False), frame(CONTINUATION, b'x"')], 1007),
    "half a close code": ([frame(CLOSE, b"\x03")], 1002),
}


@pytest.mark.parametrize(("parts", "code"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_framing_ends_its_stream_alone(sockets: H2Sockets, parts: list[bytes], code: int) -> None:
    neighbour, broken = sockets.socket(), sockets.socket()
    broken.send(*parts)
    assert broken.close_code() == code
    neighbour.ping()
    assert healthy(sockets)


@pytest.mark.parametrize(
    "content",
    [
        text_frame(PING_COMMAND.ljust(MOST + 1)),
        frame(TEXT, b"", announced=MOST + 1),
        frame(TEXT, PING_COMMAND.ljust(MOST), fin=False) + frame(CONTINUATION, b" "),
        text_frame('{"op":"ping","request_id":1,"x":"' + "é" * (MOST // 2) + '"}'),
    ],
    ids=["one byte", "announced", "last fragment", "bytes, not characters"],
)
def test_a_message_that_is_too_large_is_1009(small_server: Server, connect: Connect, content: bytes) -> None:
    sockets = connect(small_server)
    ws = sockets.socket()
    ws.send(text_frame(PING_COMMAND.ljust(MOST)))
    assert ws.receive().op == "pong"
    ws.send(content)
    assert ws.close_code() == 1009
    sockets.socket().ping()


def test_frames_in_every_cut(ws: H2Socket) -> None:
    """Frames of the WebSocket and frames of HTTP/2 have nothing to do with each other."""
    content = text_frame(PING_COMMAND) + frame(PING, b"x") + frame(TEXT, PING_COMMAND[:9], fin=False)
    content += frame(PING, b"y") + frame(CONTINUATION, PING_COMMAND[9:])
    ws.send(content)
    assert [reply.op for reply in ws.replies(2)] == ["pong"] * 2
    ws.ping()  # pongs may come behind the replies to what came with the pings
    assert ws.pongs == [b"x", b"y"]
    for at in range(len(content)):
        ws.send(content[at : at + 1])
    assert [reply.op for reply in ws.replies(2)] == ["pong"] * 2
    ws.ping()  # pongs may come behind the replies, not behind this one
    assert ws.pongs == [b"x", b"y"] * 2


def test_senseless_messages_are_errors_and_no_more(ws: H2Socket) -> None:
    for code, texts in (
        ("invalid_json", ("", "x", "[" * 100_000, '{"op":"ping"')),
        ("unsupported_message", ("null", "[]", '{"op":5}', '{"op":"sing"}')),
    ):
        for text in texts:
            ws.send_text(text)
            assert ws.receive().error == code
    ws.ping()


@pytest.mark.parametrize("code", [1000, 1001, 3000, 4999])
def test_a_close_is_answered(ws: H2Socket, code: int) -> None:
    assert ws.end(code) == code


def test_a_close_that_ends_the_stream_is_answered(sockets: H2Sockets) -> None:
    ws = sockets.socket()
    sockets.h2.send_data(ws.number, close_frame(3001), end_stream=True)
    sockets.flush()
    answer = ws.take(10)
    assert (answer.opcode, answer.payload[:2]) == (CLOSE, (3001).to_bytes(2))
    while not ws.stream.ended:
        assert sockets.receive()
    assert not ws.stream.reset


def test_what_comes_after_a_close_is_not_looked_at(ws: H2Socket, api1: Client, topic: str) -> None:
    publish = json.dumps({"op": "publish", "topic": topic, "records": [{"data": 1}]})
    ws.send(close_frame(1000) + text_frame(publish))
    assert ws.close_code() == 1000
    assert api1.state(topic).status == 404


def test_frames_that_cross_the_close_harm_nobody(sockets: H2Sockets) -> None:
    """What a client sent before it knew that its stream had ended is dropped; the connection and the others go on."""
    neighbour, ended = sockets.socket(), sockets.socket()
    assert ended.end() == 1000
    late = text_frame(PING_COMMAND)
    sockets.sock.sendall(DataFrame(ended.number, late).serialize() + DataFrame(ended.number, late).serialize())
    neighbour.ping()
    assert healthy(sockets)


def test_cancelled_streams_leave_the_connection_whole(sockets: H2Sockets, api1: Client, topic: str) -> None:
    api1.append(topic, *["x" * 1_000] * 100)
    for _ in range(30):
        ws = sockets.socket()
        ws.tell("subscribe", topic=topic)
        ws.cancel()
    sockets.socket().ping()
    assert healthy(sockets)


def test_a_client_that_ends_its_side_is_answered(sockets: H2Sockets) -> None:
    ws, neighbour = sockets.socket(), sockets.socket()
    ws.ping()
    sockets.h2.end_stream(ws.number)
    sockets.flush()
    while not (ws.stream.ended or ws.stream.reset):
        assert sockets.receive()
    neighbour.ping()
