"""A bug that shows in one connection: it is logged, that connection ends, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import queueplay
from delivery import Gateway, House, SseClient, WsClient, create, send, watch
from model import Record

from topics import limits
from topics.gateway.streams.feeds import Feed
from topics.gateway.streams.websocket import Socket


class Bug(Exception):
    pass


def fail(*given: Any, **named: Any) -> Any:
    raise Bug


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    house.gateways[0].tolerant = True
    house.shards[0].shard.append("t", [Record(b"1")])
    yield house
    house.crash()


@pytest.fixture
def gateway(house: House) -> Gateway:
    return house.gateways[0]


def connect(house: House) -> WsClient:
    client = WsClient(house.gateways[0])
    house.settle()
    assert client.read() == []
    return client


def append(house: House) -> None:
    house.shards[0].shard.send_append("t", [Record(b"2")])
    house.shards[0].round()


def pass_time(house: House, ms: int) -> None:
    house.pass_time(ms * 1_000_000)
    house.gateways[0].round()


SUBSCRIBE = {"op": "subscribe", "topic": "t"}
LIVE = {"op": "subscribe", "topic": "t", "tail": True}
PUBLISH = {"op": "publish", "topic": "t", "records": [{"data": 1}]}
TAGGED = {"op": "publish", "topic": "t", "records": [{"data": 1, "tag": "x"}]}


def drop_topic(house: House) -> None:
    send(house.gateways[0], b"DELETE /v0/topics/t HTTP/1.1\r\nHost: localhost\r\n\r\n")


def both(*commands: Any) -> Callable[[House, WsClient, WsClient], None]:
    def say(house: House, client: WsClient, other: WsClient) -> None:
        client.send(*commands)
        other.send(*commands)

    return say


# What fails, what both clients have said before, what brings it about, and what the other is told then.
CASES: dict[str, tuple[str, list[Any], Callable[[House, WsClient, WsClient], object], list[str]]] = {
    "bytes": ("received", [], both({"op": "ping"}), ["pong"]),
    "a plain ack": ("acknowledge", [], both(PUBLISH), ["ack"]),
    "an ack": ("acknowledge", [], both(TAGGED), ["ack"]),
    "a subscribe": ("subscribed", [], both(LIVE), ["subscribed", "caught_up"]),
    "a read": ("tell_records", [], both(SUBSCRIBE), ["subscribed", "record", "caught_up"]),
    "a push": ("tell_records", [LIVE], lambda house, *_: append(house), ["record"]),
    "a deleted topic": ("tell_gone", [LIVE], lambda house, *_: drop_topic(house), ["topic_deleted"]),
    "a ping": ("tick", [], lambda house, *_: pass_time(house, limits.WS_PING_MS + 1), []),
    "a sweep": ("sweep", [], lambda house, *_: pass_time(house, 2_000), []),
    "the home": ("restored", [], lambda house, *_: (house.shard_dies(0), house.shard_returns(0)), []),
    "the stop": ("end", [], lambda house, *_: house.gateways[0].stop(), []),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_in_one_socket_ends_that_one_alone(house: House, gateway: Gateway, case: str) -> None:
    name, before, provoke, told = CASES[case]
    client, other = connect(house), connect(house)
    for one in (client, other):
        one.send(*before)
        house.settle()
        one.read()
    setattr(client.socket, name, fail)
    provoke(house, client, other)
    house.settle()
    assert [type(error) for error in gateway.faults] == [Bug]
    assert client.pipe.closed
    assert [one["op"] for one in other.read()] == told
    if case == "the stop":
        assert other.close_code == 1001
        return
    assert not other.over
    assert len(gateway.streams) == house.shards[0].engine.sessions.streams == 1
    other.send({"op": "ping"})
    house.settle()
    assert [one["op"] for one in other.read()] == ["pong"]


def test_publishes_of_a_dead_shard(house: House, gateway: Gateway) -> None:
    client, other = connect(house), connect(house)
    client.socket.refused = fail
    client.send(PUBLISH, TAGGED)
    other.send(PUBLISH, TAGGED)
    gateway.round()
    house.shard_dies(0)
    assert {type(error) for error in gateway.faults} == {Bug}
    assert client.pipe.closed
    assert [one["op"] for one in other.read()] == ["error", "error"]
    house.shard_returns(0)


def test_calls_that_came_too_late(house: House, gateway: Gateway) -> None:
    client, other = connect(house), connect(house)
    client.socket.refused = fail
    gateway.calls.timeout_ms = 0
    for one in (client, other):
        one.send(TAGGED)
    gateway.round()
    gateway.calls.expire()
    gateway.lane.send_dirty()
    assert [type(error) for error in gateway.faults] == [Bug]
    assert client.pipe.closed
    assert [one["op"] for one in other.read()] == ["error"]


def test_a_stream_that_fails_as_it_begins(house: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    other = connect(house)
    with monkeypatch.context() as patch:
        patch.setattr(Socket, "start", fail)
        client = WsClient(gateway)
        house.settle()
    assert [type(error) for error in gateway.faults] == [Bug]
    assert client.pipe.closed
    assert not other.over
    assert len(gateway.streams) == house.shards[0].engine.sessions.streams == 1


def test_a_stream_that_fails_as_it_ends(house: House, gateway: Gateway) -> None:
    client, other = connect(house), connect(house)
    client.socket.closed = fail
    client.pipe.ended = True
    house.settle()
    assert [type(error) for error in gateway.faults] == [Bug]
    assert client.pipe.closed
    assert client.pipe.fileno() not in gateway.interests.by_fd
    assert not other.over


def test_an_event_stream_that_is_taken_by_another(house: House, gateway: Gateway) -> None:
    wid = create(house, {"topics": {"t": {}}})
    client = watch(house, wid)
    client.stream.taken = fail
    follower = watch(house, wid)
    house.settle()
    assert [type(error) for error in gateway.faults] == [Bug]
    assert client.pipe.closed
    assert follower.streaming
    assert not follower.over


def test_a_stream_whose_answer_fails_is_given_back(house: House, gateway: Gateway) -> None:
    wid = create(house, {"topics": {"t": {}}})
    answered = gateway.lane.answered
    gateway.lane.answered = fail  # type: ignore[method-assign]
    client = watch(house, wid)
    house.settle()
    gateway.lane.answered = answered  # type: ignore[method-assign]
    assert client.pipe.closed
    assert {type(error) for error in gateway.faults} == {Bug}
    house.settle()
    assert len(gateway.streams) == house.shards[0].engine.sessions.streams == 0


def test_a_follow_whose_answer_fails_is_taken_back(
    house: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Feed, "finish", fail)
        client = connect(house)
        client.send(LIVE)
        house.settle()
    assert {type(error) for error in gateway.faults} == {Bug}
    pass_time(house, 2_000)
    house.settle()
    assert len(house.shards[0].engine.tails) == 1
    append(house)
    house.settle()
    assert [one["op"] for one in client.read()].count("record") == 1


def request(house: House, target: str = "/v0/topics/t") -> SseClient:
    return send(house.gateways[0], f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


@pytest.mark.parametrize("target", ["/v0/topics/t", "/v0/health"])
def test_an_answer_that_fails(house: House, gateway: Gateway, target: str) -> None:
    """With and without asking a shard."""
    client, other = request(house, target), request(house)
    answered = gateway.lane.answered

    def picky(exchange: Any, value: Any) -> None:
        if exchange.connection is client.connection:
            raise Bug
        answered(exchange, value)

    gateway.lane.answered = picky  # type: ignore[method-assign]
    house.settle()
    assert {type(error) for error in gateway.faults} == {Bug}
    assert client.pipe.closed
    other.read()
    assert other.answer is not None
    assert other.answer.status == 200


def test_requests_that_the_last_round_had_no_time_for(house: House, gateway: Gateway) -> None:
    client, other = request(house), request(house)
    understand = gateway.lane._understand

    def picky(connection: Any, data: Any) -> None:
        if connection is client.connection:
            raise Bug
        understand(connection, data)

    gateway.lane.late = True
    for one in (client, other):
        one.connection.buffer = bytes(one.pipe.inbox)
        one.pipe.inbox.clear()
        gateway.lane.unfinished[one.connection] = None
    gateway.lane._understand = picky  # type: ignore[method-assign]
    house.settle()
    assert [type(error) for error in gateway.faults] == [Bug]
    assert client.pipe.closed
    other.read()
    assert other.answer is not None
    assert other.answer.status == 200


def test_a_connection_that_can_not_be_judged(house: House, gateway: Gateway) -> None:
    client, other = connect(house), connect(house)
    judge = gateway.lane._patience.judge

    def picky(connection: Any, now_ns: int) -> Any:
        if connection is client.connection:
            raise Bug
        return judge(connection, now_ns)

    gateway.lane._patience.judge = picky  # type: ignore[method-assign]
    gateway.lane.sweep()
    assert [type(error) for error in gateway.faults] == [Bug]
    assert client.pipe.closed
    assert not other.over


# --- work streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jobs", "again"])
def test_a_work_stream_that_fails(tmp_path: Path, name: str) -> None:
    """As it is given a job, and as the next coordinator is asked to go on with it. Its jobs are another's."""

    async def script(house: queueplay.House) -> None:
        faults: list[Exception] = []
        house.gateway.calls.on_fault = lambda error, id: faults.append(error)
        house.make("q")
        client = house.gateway.work("q", "a", 1, 60_000)
        await house.settle()
        other = house.gateway.work("q", "b", 1, 60_000)
        await house.settle()
        setattr(client.stream, name, fail)
        client.socket.abort = client.close  # type: ignore[method-assign]
        if name == "again":
            await house.queue_dies_and_returns()
        house.owner("q").shard.append("q", [Record(b"1"), Record(b"2")])
        await house.settle()
        assert [type(error) for error in faults] == [Bug]
        assert client.closed
        await house.ask(house.gateway.ack("q", "b", other.seqs))
        await house.settle()
        assert sorted(other.seqs) == [1, 2]

    queueplay.run(tmp_path, script)
