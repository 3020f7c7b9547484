"""A WebSocket over a real gateway and shard: commands in order, their pace, frames in pieces, and every way it ends."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from delivery import SECOND, UNLIMITED, House, WsClient
from hypothesis import given
from hypothesis import strategies as st
from model import Record, examples
from websockets.frames import CloseCode, Frame, Opcode

from topics import limits
from topics.storage.config import TopicConfig, owner_of_name

BACKLOG = 4_000


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, stream_backlog_bytes=BACKLOG, max_body_bytes=20_000, max_watch_topics=3)
    house.shards[0].shard.append("t", [Record(b"1"), Record(b"2")])
    yield house
    house.crash()


def connect(house: House, **more: Any) -> WsClient:
    client = WsClient(house.gateways[0], **more)
    house.settle()
    return client


@pytest.fixture
def client(house: House) -> WsClient:
    client = connect(house)
    assert client.read() == []
    return client


def talk(house: House, client: WsClient, *commands: Any) -> list[Any]:
    client.send(*commands)
    house.settle()
    return client.read()


def ops(said: list[Any]) -> list[str]:
    return [one["op"] for one in said]


def append(house: House, *records: Record, topic: str = "t") -> None:
    house.shards[0].shard.send_append(topic, list(records))
    house.shards[0].round()
    house.settle()


def subscribe(**more: Any) -> dict[str, Any]:
    return {"op": "subscribe", "topic": "t", **more}


def publish(*data: Any, **more: Any) -> dict[str, Any]:
    return {"op": "publish", "topic": "t", "records": [{"data": one} for one in data], **more}


# --- the handshake -------------------------------------------------------------------------------------


def test_the_upgrade(house: House, client: WsClient) -> None:
    assert client.answer is not None
    assert client.answer.status == 101
    headers = client.answer.headers
    assert (headers["upgrade"], headers["connection"]) == ("websocket", "Upgrade")
    proof = hashlib.sha1(b"dGhlIHNhbXBsZSBub25jZQ==258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    assert headers["sec-websocket-accept"] == base64.b64encode(proof).decode()
    assert house.shards[0].engine.sessions.streams == 1


def test_what_came_with_the_handshake_is_heard(house: House) -> None:
    frame = Frame(Opcode.TEXT, b'{"op":"ping","request_id":1}').serialize(mask=True)
    client = connect(house, first=frame + frame[:5])
    assert ops(client.read()) == ["pong"]
    client.pipe.inbox += frame[5:]
    house.settle()
    assert ops(client.read()) == ["pong"]


def test_sockets_and_streams_share_a_limit(tmp_path: Path) -> None:
    house = House(tmp_path, gateways=2, max_sse_connections=2)
    clients = [WsClient(gateway) for gateway in house.gateways]
    house.settle()
    late = WsClient(house.gateways[0])
    house.settle()
    assert late.pipe.took.startswith(b"HTTP/1.1 429 ")
    assert b"max_sse_connections" in late.pipe.took
    clients[0].pipe.ended = True
    house.settle()
    again = connect(house)
    again.read()
    assert again.answer is not None
    assert again.answer.status == 101
    house.crash()


def test_a_client_that_left_before_its_socket_opened(house: House) -> None:
    client = WsClient(house.gateways[0])
    house.gateways[0].round()
    house.gateways[0].lane.close(client.connection)
    house.settle()
    assert house.shards[0].engine.sessions.streams == 0
    assert len(house.gateways[0].streams) == 0


# --- commands ------------------------------------------------------------------------------------------


def test_ping(house: House, client: WsClient) -> None:
    said = talk(house, client, {"op": "ping", "request_id": "p"}, {"op": "ping", "request_id": 7}, {"op": "ping"})
    assert [sorted(one) for one in said] == [["op", "request_id", "ts"]] * 2 + [["op", "ts"]]
    assert [one.get("request_id") for one in said] == ["p", 7, None]


def test_subscribe_reads_and_goes_live(house: House, client: WsClient) -> None:
    said = talk(house, client, subscribe(request_id="s"))
    assert said[0] == {
        "op": "subscribed",
        "request_id": "s",
        "topics": {"t": {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}},
    }
    assert ops(said[1:]) == ["record", "caught_up"]
    assert [record["data"] for record in said[1]["records"]] == [1, 2]
    append(house, Record(b"3", node="n"))
    [record] = client.read()
    assert (record["from_seq"], record["to_seq"], record["records"][0]["$node"]) == (2, 3, "n")


def test_subscribed_comes_before_the_first_frame_of_its_topics(house: House, client: WsClient) -> None:
    """Also if the feed is there and level already."""
    assert ops(talk(house, client, subscribe(tail=True))) == ["subscribed", "caught_up"]
    other = connect(house)
    other.read()
    assert ops(talk(house, other, subscribe(tail=True))) == ["subscribed", "caught_up"]


def test_a_second_subscribe_replaces_the_first(house: House, client: WsClient) -> None:
    talk(house, client, subscribe(tail=True))
    said = talk(house, client, subscribe(from_seq=1, include_data=False, limit=5))
    assert ops(said) == ["subscribed", "record", "caught_up"]
    assert [sorted(record) for record in said[1]["records"]] == [["$seq", "$ts"]]
    append(house, Record(b"3"))
    assert ops(client.read()) == ["record"]
    assert len(house.gateways[0].feeds) == 1


def test_subscribe_twice_in_one_go(house: House, client: WsClient) -> None:
    said = talk(house, client, subscribe(request_id=1), subscribe(request_id=2, tail=True))
    assert [one["request_id"] for one in said if one["op"] == "subscribed"] == [1, 2]
    assert said[-1] == {"op": "caught_up", "topic": "t", "head_seq": 2}
    append(house, Record(b"3"))
    assert ops(client.read()) == ["record"]


def test_unsubscribe(house: House, client: WsClient) -> None:
    talk(house, client, subscribe())
    said = talk(house, client, {"op": "unsubscribe", "topic": "t", "request_id": "u"})
    assert said == [{"op": "unsubscribed", "request_id": "u", "topic": "t", "topics": ["t"]}]
    append(house, Record(b"3"))
    assert client.read() == []
    assert len(house.gateways[0].feeds) == len(house.shards[0].engine.tails) == 0
    said = talk(house, client, {"op": "unsubscribe", "topics": ["t", "other"]})
    assert said == [{"op": "unsubscribed", "topics": ["t", "other"]}]


def test_unsubscribed_is_the_last_word_about_a_topic(house: House, client: WsClient) -> None:
    client.send(subscribe())
    house.gateways[0].round()
    house.shards[0].round()
    said = talk(house, client, {"op": "unsubscribe", "topic": "t"})
    assert said[-1]["op"] == "unsubscribed"


def test_topics_that_are_not_there(house: House, client: WsClient) -> None:
    [error] = talk(house, client, {"op": "subscribe", "request_id": 1, "topics": {"t": {}, "nothing": {}}})
    assert (error["op"], error["request_id"], error["code"]) == ("error", 1, "topic_not_found")
    assert error["detail"] == {"topic": "nothing"}
    append(house, Record(b"3"))
    assert client.read() == []
    said = talk(house, client, {"op": "subscribe", "topics": {"t": {"tail": True}, "nothing": {}}, "lenient": True})
    assert list(said[0]["topics"]) == ["t"]
    assert talk(house, client, {"op": "subscribe", "topic": "nothing", "lenient": True}) == [
        {"op": "subscribed", "topics": {}}
    ]


def test_so_many_topics(house: House, client: WsClient) -> None:
    for name in "abcd":
        house.shards[0].shard.append(name, [Record(b"1")])
    talk(house, client, {"op": "subscribe", "topics": {"a": {}, "b": {}, "c": {}}})
    [error] = talk(house, client, {"op": "subscribe", "topic": "d", "request_id": 5})
    assert (error["code"], error["request_id"]) == ("invalid_request", 5)
    assert ops(talk(house, client, {"op": "subscribe", "topic": "c", "tail": True})) == ["subscribed", "caught_up"]
    talk(house, client, {"op": "unsubscribe", "topic": "a"})
    assert talk(house, client, {"op": "subscribe", "topic": "d"})[0]["op"] == "subscribed"


def test_a_topic_goes_and_comes_back(house: House, client: WsClient) -> None:
    talk(house, client, subscribe())
    house.shards[0].shard.drop("t")
    house.shards[0].round()
    house.settle()
    assert client.read() == [{"op": "topic_deleted", "topic": "t", "head_seq": 2, "reason": "deleted"}]
    assert len(house.gateways[0].feeds) == 0
    house.shards[0].shard.append("t", [Record(b"9")])
    house.settle()
    assert client.read() == []  # that is another topic
    said = talk(house, client, subscribe())
    assert ops(said) == ["subscribed", "record", "caught_up"]


def test_what_cannot_be_understood_leaves_the_socket_usable(house: House, client: WsClient) -> None:
    said = talk(house, client, "", "{", "[]", '{"op":"nothing","request_id":"x"}', subscribe(limit="5"), {"op": "ping"})
    assert ops(said) == ["error"] * 5 + ["pong"]
    codes = ["invalid_json", "invalid_json", "unsupported_message", "unsupported_message", "invalid_request"]
    assert [one["code"] for one in said[:-1]] == codes
    assert said[3]["request_id"] == "x"
    assert all(one["message"] for one in said[:-1])


@pytest.mark.parametrize(
    "given", [b'"r1"', b"7", b"1.50", b"true", b"null", b'["a", 1e2]', b'{ "a" : [null], "b":"\\u00e9" }']
)
def test_any_request_id_comes_back_byte_for_byte(house: House, client: WsClient, given: bytes) -> None:
    for op in ("ping", "publish", "subscribe", "unsubscribe", "nothing"):
        content = b'{"op":"%b","request_id":%b,"topic":"t","records":[{"data":1}]}' % (op.encode(), given)
        before = len(client.pipe.took)
        said = talk(house, client, content)
        assert any("request_id" in one for one in said)
        assert b'"request_id":%b' % given in bytes(client.pipe.took)[before:]


def test_a_long_request_id_is_refused_without_it(house: House, client: WsClient) -> None:
    longest, longer = "x" * (limits.WS_REQUEST_ID_BYTES - 2), "x" * (limits.WS_REQUEST_ID_BYTES - 1)
    error, other, ack = talk(  # errors don't wait for the shard
        house,
        client,
        publish(1, request_id=longest),
        publish(2, request_id=longer),
        {"op": "nothing", "request_id": longer},
    )
    assert (ack["op"], ack["request_id"]) == ("ack", longest)
    assert (error["code"], error["detail"]) == (
        "invalid_request",
        {"field": "request_id", "max": limits.WS_REQUEST_ID_BYTES},
    )
    assert "request_id" not in error
    assert other["code"] == "unsupported_message"
    assert "request_id" not in other


# --- publishing ----------------------------------------------------------------------------------------


def test_publish(house: House, client: WsClient) -> None:
    said = talk(house, client, publish(1, {"a": 2}, request_id="p"), publish(3, node="n", return_seqs=False))
    performance = [one.pop("performance") for one in said]
    assert all(
        sorted(one) == ["fsync_ms", "server_total_ms", "throttle_wait_ms", "wal_append_ms"] for one in performance
    )
    shown = {"op": "ack", "topic": "t", "created": False, "deduped": False}
    assert said == [
        {**shown, "request_id": "p", "first_seq": 3, "last_seq": 4, "seqs": [3, 4], "head_seq": 4, "count": 2},
        {**shown, "first_seq": 5, "last_seq": 5, "head_seq": 5, "count": 1},
    ]


def test_a_meta_of_any_depth_is_answered(house: House, client: WsClient) -> None:
    for depth in range(900, 1_001):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        command = b'{"op":"publish","topic":"t","records":[{"data":1,"meta":%b}]}' % deep
        said = talk(house, client, command, {"op": "ping"})
        assert sorted(ops(said)) in (["ack", "pong"], ["error", "pong"]), depth


def test_publish_makes_a_topic(house: House, client: WsClient) -> None:
    [ack] = talk(house, client, publish(1, topic="new"))
    assert (ack["created"], ack["first_seq"]) == (True, 1)
    [error] = talk(house, client, publish(1, topic="other", create=False, request_id=3))
    assert (error["code"], error["request_id"]) == ("topic_not_found", 3)


def test_a_retry_is_recognised(house: House, client: WsClient) -> None:
    first, second = talk(house, client, publish(1, idempotency_key="k"), publish(1, idempotency_key="k"))
    assert (first["first_seq"], second["first_seq"], second["deduped"]) == (3, 3, True)


def test_publishes_that_are_refused(house: House, client: WsClient) -> None:
    house.shards[0].shard.append("full", [Record(b"1")], config=TopicConfig(cap_records=1, discard="reject"))
    said = talk(
        house,
        client,
        publish(request_id="none"),
        publish(1, topic="a/b", request_id="name"),
        publish(1, topic="full", request_id="full"),
        publish(1, 2, topic="full", request_id="never"),
        publish(1, topic="full", node="n", request_id="full again"),
    )
    codes = {one["request_id"]: one["code"] for one in said}
    assert codes == {
        "none": "invalid_request",
        "name": "invalid_request",
        "full": "topic_full",
        "never": "record_too_large",
        "full again": "topic_full",
    }


@pytest.mark.parametrize("first", [{}, {"node": "n"}])
@pytest.mark.parametrize("second", [{}, {"node": "n"}, {"idempotency_key": "k"}])
def test_publishes_take_effect_in_order(
    house: House, client: WsClient, first: dict[str, Any], second: dict[str, Any]
) -> None:
    said = talk(house, client, publish(1, request_id=1, **first), publish(2, request_id=2, **second), publish(3))
    assert sorted((one["first_seq"], one.get("request_id")) for one in said) == [(3, 1), (4, 2), (5, None)]


def test_a_subscribe_sees_what_was_published_before_it(house: House, client: WsClient) -> None:
    said = talk(house, client, publish(1), subscribe(tail=True))
    [subscribed] = [one for one in said if one["op"] == "subscribed"]
    assert subscribed["topics"]["t"]["from_seq"] == 3
    assert "record" not in ops(said)


def test_what_is_published_behind_a_subscribe_is_pushed(house: House, client: WsClient) -> None:
    said = talk(house, client, subscribe(tail=True), publish(7))
    assert sorted(ops(said)) == ["ack", "caught_up", "record", "subscribed"]


def test_publishes_of_several_sockets_travel_together(house: House, client: WsClient) -> None:
    other = connect(house)
    other.read()
    client.send(publish(1, request_id="a"), publish(2, 3, request_id="b"))
    other.send(publish(4, request_id="c", return_seqs=False))
    house.settle()
    acks = {one["request_id"]: one for one in client.read() + other.read()}
    assert acks["b"]["first_seq"] == acks["a"]["last_seq"] + 1
    assert sorted(one["first_seq"] for one in acks.values()) in ([3, 4, 6], [3, 4, 5])
    assert "seqs" not in acks["c"]


# --- commands behind a subscribe -----------------------------------------------------------------------


def test_commands_wait_behind_a_subscribe(house: House, client: WsClient) -> None:
    client.send(subscribe(), {"op": "ping"}, publish(3), {"op": "unsubscribe", "topic": "t"}, {"op": "ping"})
    house.gateways[0].round()
    assert client.read() == []
    house.settle()
    said = ops(client.read())
    assert said[0] == "subscribed"
    assert [op for op in said if op in ("subscribed", "pong", "unsubscribed")] == [
        "subscribed",
        "pong",
        "unsubscribed",
        "pong",
    ]
    assert "ack" in said


def test_subscribes_are_complete_one_after_the_other(house: House, client: WsClient) -> None:
    names = ["a", "b", "c"]
    for name in names:
        house.shards[0].shard.append(name, [Record(b"1")])
    said = talk(house, client, *[{"op": "subscribe", "topic": name, "request_id": name} for name in names])
    assert [one["request_id"] for one in said if one["op"] == "subscribed"] == names


def test_a_subscribe_that_fails_lets_the_next_command_go(house: House, client: WsClient) -> None:
    said = talk(house, client, {"op": "subscribe", "topic": "nothing"}, {"op": "ping"}, subscribe(tail=True))
    assert ops(said) == ["error", "pong", "subscribed", "caught_up"]


def hear_all(house: House) -> None:
    """Rounds until the gateway has heard what has come: how much of it one round takes depends on the machine."""
    gateway = house.gateways[0]
    gateway.round()
    for _ in range(100):
        if not gateway.lane.unfinished:
            return
        gateway.round()


def test_many_subscribes_are_held_when_their_shard_dies(house: House, client: WsClient) -> None:
    """Each fails at once inside of the one before it; that must not pile up."""
    count = 300
    client.send(*[subscribe(request_id=number) for number in range(count)])
    hear_all(house)
    house.shard_dies(0)
    house.gateways[0].round()
    said = client.read()
    assert [one["request_id"] for one in said] == list(range(count))
    assert {one["code"] for one in said} == {"shard_unavailable"}
    house.shard_returns(0)
    house.settle()
    assert ops(talk(house, client, subscribe())) == ["subscribed", "record", "caught_up"]


def test_it_ends_while_commands_are_held(house: House, client: WsClient) -> None:
    client.send(subscribe(), publish(1), {"op": "ping"})
    house.gateways[0].round()
    house.gateways[0].lane.close(client.connection)
    house.settle()
    assert len(house.gateways[0].feeds) == len(house.gateways[0].streams) == 0
    assert house.shards[0].shard.report("t").head_seq == 2


# --- the pace ------------------------------------------------------------------------------------------


def test_a_client_with_many_publishes_out_is_not_read_from(house: House, client: WsClient) -> None:
    client.send(*[publish(number, request_id=number) for number in range(limits.MAX_PIPELINED)])
    hear_all(house)
    assert not client.is_read_from
    client.send({"op": "ping"})
    house.gateways[0].round()
    assert client.read() == []
    house.settle()
    said = client.read()
    assert client.is_read_from
    assert [one["request_id"] for one in said[:-1]] == list(range(limits.MAX_PIPELINED))
    assert said[-1]["op"] == "pong"


def test_fewer_publishes_do_not_stop_it(house: House, client: WsClient) -> None:
    client.send(*[publish(1) for _ in range(limits.MAX_PIPELINED - 1)])
    hear_all(house)
    assert client.is_read_from
    house.settle()
    assert len(client.read()) == limits.MAX_PIPELINED - 1


def test_a_client_with_many_commands_held_is_not_read_from(house: House, client: WsClient) -> None:
    client.send(subscribe(), *[{"op": "ping"} for _ in range(limits.MAX_PIPELINED)])
    hear_all(house)
    assert not client.is_read_from
    house.settle()
    assert client.is_read_from
    assert ops(client.read()).count("pong") == limits.MAX_PIPELINED


def test_a_client_that_does_not_read_its_answers_is_not_read_from(house: House, client: WsClient) -> None:
    client.pipe.window = 0
    client.send(*[{"op": "ping", "request_id": "x" * 100} for _ in range(BACKLOG // 100)])
    house.settle()
    assert not client.is_read_from
    client.send({"op": "ping", "request_id": "last"})
    house.settle()
    client.pipe.window = BACKLOG // 4
    house.settle()
    assert not client.is_read_from  # not yet down to half
    client.pipe.window = UNLIMITED
    house.settle()
    assert client.is_read_from
    assert client.read()[-1]["request_id"] == "last"
    house.pass_time(100 * SECOND)
    client.send({"op": "ping"})
    house.gateways[0].round()
    house.settle()
    assert not client.over


def test_answers_that_fill_the_backlog_and_go_out_at_once(house: House, client: WsClient) -> None:
    client.send(*[{"op": "ping", "request_id": "x" * 100} for _ in range(BACKLOG // 50)])
    house.settle()
    assert client.is_read_from
    assert len(client.read()) == BACKLOG // 50
    assert ops(talk(house, client, {"op": "ping"})) == ["pong"]


def test_a_lagging_socket_goes_on_from_the_log(house: House, client: WsClient) -> None:
    talk(house, client, subscribe(tail=True))
    client.pipe.window = 0
    for number in range(12):
        append(house, Record(b'"%b"' % (b"x" * 1_000)))
        connection = client.connection
        assert connection.written - connection.sent <= BACKLOG + 1_200, f"after {number}"
    client.pipe.window = UNLIMITED
    house.settle()
    said = client.read()
    seqs = [record["$seq"] for one in said if one["op"] == "record" for record in one["records"]]
    assert seqs == list(range(3, 15))
    assert said[-1] == {"op": "caught_up", "topic": "t", "head_seq": 14}


def test_too_slow(house: House, client: WsClient) -> None:
    talk(house, client, subscribe(tail=True))
    client.pipe.window = 0
    for _ in range(6):
        append(house, Record(b'"%b"' % (b"x" * 1_000)))
    house.pass_time(limits.SLOW_CONSUMER_TIMEOUT_MS * 1_000_000 - SECOND)
    house.gateways[0].round()
    assert not client.connection.closing
    house.pass_time(2 * SECOND)
    house.gateways[0].round()
    assert client.connection.closing
    client.pipe.window = UNLIMITED
    house.settle()
    said = client.read()
    assert (said[-1]["op"], said[-1]["code"]) == ("error", "request_timeout")
    assert (client.close_code, client.over) == (CloseCode.TRY_AGAIN_LATER, True)


# --- frames in pieces ----------------------------------------------------------------------------------


def frame(opcode: Opcode, data: bytes, *, fin: bool = True, mask: bool = True) -> bytes:
    return Frame(opcode, data, fin=fin).serialize(mask=mask)


def raw(house: House, client: WsClient, *frames: bytes) -> list[Any]:
    for data in frames:
        client.pipe.inbox += data
    house.settle()
    return client.read()


def test_a_message_byte_by_byte(house: House, client: WsClient) -> None:
    for byte in frame(Opcode.TEXT, b'{"op":"ping"}'):
        client.pipe.inbox.append(byte)
        house.settle()
    assert ops(client.read()) == ["pong"]


def test_fragments(house: House, client: WsClient) -> None:
    text = '{"op":"ping","request_id":"é"}'.encode()
    at = text.index(b"\xc3") + 1  # inside of a character
    pieces = [
        frame(Opcode.TEXT, b"", fin=False),
        frame(Opcode.CONT, text[:at], fin=False),
        frame(Opcode.PING, b"between"),
        frame(Opcode.CONT, text[at:], fin=False),
        frame(Opcode.CONT, b""),
        frame(Opcode.TEXT, b'{"op":"ping"}'),
    ]
    said = raw(house, client, *pieces)
    assert [one.get("request_id") for one in said] == ["é", None]
    for piece in pieces:
        client.pipe.inbox += piece
        house.settle()
    assert [one.get("request_id") for one in client.read()] == ["é", None]


def test_empty_fragments_take_no_room(house: House, client: WsClient) -> None:
    raw(house, client, frame(Opcode.TEXT, b'{"op":', fin=False))
    socket = client.socket
    for _ in range(10):
        client.pipe.inbox += frame(Opcode.CONT, b"", fin=False) * 10_000
        house.settle()
    assert sys.getsizeof(socket._fragments.data) < 1_024
    assert ops(raw(house, client, frame(Opcode.CONT, b'"ping"}'))) == ["pong"]
    assert socket._fragments is None


def test_a_ping_of_the_protocol_is_answered(house: House, client: WsClient) -> None:
    raw(house, client, frame(Opcode.PING, b"hello"))
    assert bytes(client.pipe.took).endswith(b"\x8a\x05hello")


@pytest.mark.parametrize(
    ("code", "frames"),
    [
        (CloseCode.INVALID_DATA, [frame(Opcode.TEXT, b"\xff")]),
        (CloseCode.INVALID_DATA, [frame(Opcode.TEXT, b"\xc3", fin=False), frame(Opcode.CONT, b"x")]),
        (CloseCode.INVALID_DATA, [frame(Opcode.TEXT, b"\xed\xa0\x80")]),
        (CloseCode.MESSAGE_TOO_BIG, [frame(Opcode.TEXT, b" " * 20_001)]),
        (
            CloseCode.MESSAGE_TOO_BIG,
            [frame(Opcode.TEXT, b" " * 15_000, fin=False), frame(Opcode.CONT, b" " * 15_000)],
        ),
        (CloseCode.PROTOCOL_ERROR, [frame(Opcode.TEXT, b"{}", mask=False)]),
        (CloseCode.PROTOCOL_ERROR, [frame(Opcode.CONT, b"{}")]),
        (CloseCode.PROTOCOL_ERROR, [frame(Opcode.TEXT, b"{", fin=False), frame(Opcode.TEXT, b"}")]),
        (CloseCode.PROTOCOL_ERROR, [b"\x83\x80\0\0\0\0"]),  # an opcode that nobody knows
        (CloseCode.PROTOCOL_ERROR, [b"\xc1\x80\0\0\0\0"]),  # an extension that was not agreed on
        (CloseCode.PROTOCOL_ERROR, [b"\x09\x80\0\0\0\0"]),  # a control frame in pieces
    ],
)
def test_a_broken_rule_ends_it(house: House, client: WsClient, code: CloseCode, frames: list[bytes]) -> None:
    talk(house, client, subscribe(tail=True))
    ping = frame(Opcode.TEXT, b'{"op":"ping"}')
    said = raw(house, client, ping, *frames, ping)
    assert ops(said) == ["pong"]  # what came before, and nothing that came behind
    assert (client.close_code, client.over) == (code, True)
    append(house, Record(b"3"))
    assert client.read() == []
    client.pipe.ended = True
    house.settle()
    assert len(house.gateways[0].feeds) == len(house.gateways[0].streams) == 0
    assert house.shards[0].engine.sessions.streams == 0


@pytest.mark.parametrize(
    "frames",
    [[frame(Opcode.BINARY, b'{"op":"ping"}')], [frame(Opcode.BINARY, b"", fin=False), frame(Opcode.CONT, b"x")]],
    ids=["whole", "in pieces"],
)
def test_a_binary_message_is_told_why_before_the_close(house: House, client: WsClient, frames: list[bytes]) -> None:
    ping = frame(Opcode.TEXT, b'{"op":"ping"}')
    pong, error = raw(house, client, ping, *frames, ping)
    assert pong["op"] == "pong"
    assert (error["op"], error["code"]) == ("error", "unsupported_message")
    assert (client.close_code, client.over) == (CloseCode.UNSUPPORTED_DATA, True)


def test_the_largest_message(house: House, client: WsClient) -> None:
    text = b'{"op":"ping"}'
    said = raw(house, client, frame(Opcode.TEXT, text + b" " * (20_000 - len(text))))
    assert ops(said) == ["pong"]


# --- anything at all -----------------------------------------------------------------------------------

_pieces = st.one_of(
    st.binary(max_size=30),
    st.binary(max_size=20).map(lambda data: frame(Opcode.TEXT, data)),
    st.builds(
        frame,
        st.sampled_from([Opcode.TEXT, Opcode.CONT, Opcode.BINARY]),
        st.sampled_from([b"", b'{"op":"ping"}', b"\xff", b"{"]),
        fin=st.booleans(),
        mask=st.sampled_from([True, True, True, False]),
    ),
    st.builds(
        frame,
        st.sampled_from([Opcode.PING, Opcode.PONG, Opcode.CLOSE]),
        st.sampled_from([b"", b"\x03\xe8", b"\x03\xe8bye", b"\x03", b"\0\0", b"\x03\xe8\xff"]),
    ),
)


@examples(150)
@given(pieces=st.lists(_pieces, max_size=8), cut=st.integers(1, 40))
def test_any_bytes_end_a_socket_or_leave_it_usable(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], cut: int
) -> None:
    house = shared_house(tmp_path_factory)
    client = connect(house)
    data = b"".join(pieces)
    for at in range(0, len(data), cut):
        client.pipe.inbox += data[at : at + cut]
        house.settle()
    client.read()
    if client.close_code is None:
        assert not client.over
    else:
        assert client.over
    client.pipe.ended = True
    house.settle()
    assert len(house.gateways[0].streams) == house.shards[0].engine.sessions.streams == 0
    assert house.gateways[0].faults == []


_values = st.one_of(
    st.sampled_from(["t", "new", "a/b", "", "é", 0, 1, -1, 2**64, 1.5, True, None, [], {}, ["t"], {"t": {}}]),
    st.sampled_from(
        [{"t": {"tail": True}}, [{"data": 1}], [{"data": 1, "tag": "x"}], [{"data": None, "meta": {}}], [{}]]
    ),
    st.sampled_from([{"cap_records": 3}, {"durability": "ephemeral"}, {"ttl_ms": "x"}, "strong", "k" * 300]),
)
_FIELDS = [
    "topic",
    "topics",
    "from_seq",
    "tail",
    "node",
    "limit",
    "max_batch_bytes",
    "include_data",
    "consistency",
    "lenient",
    "records",
    "create",
    "config",
    "idempotency_key",
    "return_seqs",
]


@examples(200)
@given(
    commands=st.lists(
        st.tuples(
            st.sampled_from(["subscribe", "unsubscribe", "publish", "publish", "ping", "nothing"]),
            st.dictionaries(st.sampled_from(_FIELDS), _values, max_size=4),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_command_has_one_reply(
    tmp_path_factory: pytest.TempPathFactory, commands: list[tuple[str, dict[str, Any], bool]]
) -> None:
    house = shared_house(tmp_path_factory)
    client = connect(house)
    sent = []
    for number, (op, fields, likely) in enumerate(commands):
        usual = {"topic": "t", "records": [{"data": 1}]} if likely and "topics" not in fields else {}
        sent.append({**usual, **fields, "op": op, "request_id": number})
    said = talk(house, client, *sent)
    replies = [one for one in said if one["op"] in ("subscribed", "unsubscribed", "ack", "pong", "error")]
    assert sorted(one["request_id"] for one in replies) == list(range(len(commands)))
    assert not client.over
    client.pipe.ended = True
    house.settle()
    assert house.gateways[0].faults == []
    assert len(house.gateways[0].feeds) == 0


_houses: list[House] = []


def shared_house(factory: pytest.TempPathFactory) -> House:
    """One for all examples: each leaves nothing behind but records."""
    if not _houses or not _houses[0].shards[0].shard.is_open:
        _houses[:] = [House(factory.mktemp("sockets"))]
        _houses[0].shards[0].shard.append("t", [Record(b"1")])
    return _houses[0]


# --- ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1000, 1001, 3000, 4999])
def test_the_client_says_goodbye(house: House, client: WsClient, code: int) -> None:
    talk(house, client, subscribe(tail=True))
    client.send({"op": "ping"})
    client.protocol.send_close(code, "bye")
    client.pass_on()
    house.settle()
    assert ops(client.read()) == ["pong"]
    assert (client.close_code, client.over) == (code, True)
    client.pipe.ended = True
    house.settle()
    assert len(house.gateways[0].feeds) == len(house.gateways[0].streams) == 0
    assert house.shards[0].engine.sessions.streams == 0


def test_the_client_is_gone_without_a_word(house: House, client: WsClient) -> None:
    talk(house, client, subscribe(tail=True), publish(1))
    client.pipe.ended = True
    house.settle()
    assert client.pipe.closed
    assert len(house.gateways[0].feeds) == len(house.shards[0].engine.tails) == 0
    assert house.shards[0].engine.sessions.streams == 0


def test_publishes_are_out_when_the_client_goes(house: House, client: WsClient) -> None:
    client.send(publish(1), publish(2, node="n"))
    house.gateways[0].round()
    house.gateways[0].lane.close(client.connection)
    house.settle()
    assert house.shards[0].shard.report("t").head_seq == 4
    assert len(house.gateways[0].calls) == 0


def test_publishes_are_out_when_the_shard_dies(house: House, client: WsClient) -> None:
    client.send(publish(1, request_id=1), publish(2, request_id=2, node="n"), publish(3, request_id=3))
    house.gateways[0].round()
    house.shard_dies(0)
    said = client.read()
    assert sorted((one["request_id"], one["code"], one["detail"]["outcome"]) for one in said) == [
        (number, "shard_unavailable", "unknown") for number in (1, 2, 3)
    ]
    house.shard_returns(0)
    house.settle()
    assert ops(talk(house, client, publish(5))) == ["ack"]


def test_a_dead_shard_refuses_at_once(house: House, client: WsClient) -> None:
    house.shard_dies(0)
    client.send(publish(1, request_id=1), publish(2, node="n", request_id=2), subscribe(request_id=3), {"op": "ping"})
    house.gateways[0].round()
    house.gateways[0].round()
    said = client.read()
    assert sorted((one.get("request_id", 9), one.get("code")) for one in said) == [
        (1, "shard_unavailable"),
        (2, "shard_unavailable"),
        (3, "shard_unavailable"),
        (9, None),
    ]
    house.shard_returns(0)
    house.settle()


def test_a_shard_dies_and_returns_under_a_subscription(tmp_path: Path) -> None:
    """Other topics go on; this one goes on where it was."""
    house = House(tmp_path, shards=2)
    names = [next(name for name in "abcdefgh" if owner_of_name(name, 2) == number) for number in (0, 1)]
    for number, name in enumerate(names):
        house.shards[number].shard.append(name, [Record(b"1")])
    client = connect(house)
    client.read()
    talk(house, client, {"op": "subscribe", "topics": {name: {"tail": True} for name in names}})
    house.shard_dies(1)
    house.shards[0].shard.send_append(names[0], [Record(b"2")])
    house.shards[0].round()
    house.gateways[0].round()
    assert [one["topic"] for one in client.read()] == [names[0]]
    house.shards[1].shard.open()
    house.shards[1].shard.append(names[1], [Record(b"2")])
    house.shard_returns(1)
    house.settle()
    [record] = client.read()
    assert (record["topic"], record["from_seq"], record["to_seq"]) == (names[1], 1, 2)
    house.crash()


def test_the_home_dies_and_counts_it_again(house: House, client: WsClient) -> None:
    house.shard_dies(0)
    house.shard_returns(0)
    house.settle()
    assert house.shards[0].engine.sessions.streams == 1
    client.pipe.ended = True
    house.settle()
    assert house.shards[0].engine.sessions.streams == 0


def test_the_server_stops(house: House, client: WsClient) -> None:
    talk(house, client, subscribe(tail=True))
    house.gateways[0].stop()
    assert client.read() == []
    assert (client.close_code, client.over) == (CloseCode.GOING_AWAY, True)
    late = connect(house)
    assert late.pipe.took.startswith(b"HTTP/1.1 503 ")


def test_the_server_stops_while_a_socket_opens(house: House) -> None:
    client = WsClient(house.gateways[0])
    house.gateways[0].round()
    house.shards[0].round()
    house.gateways[0].stop()
    house.settle()
    client.read()
    assert client.answer is not None
    assert (client.answer.status, client.close_code) == (101, CloseCode.GOING_AWAY)


def test_a_silent_client_is_pinged_and_given_up(house: House, client: WsClient) -> None:
    ping_ns, silence_ns = limits.WS_PING_MS * 1_000_000, limits.WS_SILENCE_MS * 1_000_000
    house.pass_time(ping_ns)
    house.gateways[0].round()
    client.read()
    assert client.pings == 1
    client.pass_on()  # its pong
    house.settle()
    for _ in range(silence_ns // ping_ns):
        assert not client.over
        house.pass_time(ping_ns)
        house.gateways[0].round()
    client.read()
    assert client.over
    house.settle()
    assert house.shards[0].engine.sessions.streams == 0


def test_a_client_that_speaks_is_not_pinged(house: House, client: WsClient) -> None:
    for _ in range(8):
        house.pass_time(limits.WS_PING_MS * 1_000_000 // 2)
        client.send({"op": "ping"})
        house.gateways[0].round()
        house.settle()
    assert ops(client.read()) == ["pong"] * 8
    assert client.pings == 0
