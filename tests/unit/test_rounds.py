"""A round of the HTTP/1 lane ends in time: what is left comes first in the next one, and nothing is lost."""

from __future__ import annotations

import select
from pathlib import Path

import pytest
from delivery import House, Pipe, WsClient
from websockets.frames import Frame, Opcode

from topics.gateway.api.routes import Route
from topics.gateway.api.types import Request, Response, Sink, Wait

TURN_BYTES = 2_048
HEALTH = b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_what_is_not_sent_in_time_is_sent_in_the_next_round(tmp_path: Path) -> None:
    house = House(tmp_path)
    lane = house.gateways[0].lane
    pipes = [Pipe() for _ in range(30)]
    for pipe in pipes:
        pipe.inbox += HEALTH
        house.gateways[0].adopt(pipe)
        lane.handle(pipe.fileno(), select.EPOLLIN)
    assert len(lane.dirty) == 30
    rounds = 0
    while lane.dirty:
        before = len(lane.dirty)
        lane.send_dirty(0)
        assert 1 <= before - len(lane.dirty) <= 8
        rounds += 1
    assert rounds == 4
    assert all(pipe.took.count(b"HTTP/1.1 200") == 1 for pipe in pipes)
    house.crash()


def test_requests_behind_answers_obey_the_round_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that go out let more requests in, which are answered at once, and so on: not in one round."""
    house = House(tmp_path)
    [gateway] = house.gateways
    pipe = Pipe()
    pipe.inbox += HEALTH * 200
    gateway.adopt(pipe)
    monkeypatch.setattr("topics.gateway.http1.server._TAKE_NS", 0)
    rounds = 0
    while (answered := pipe.took.count(b"HTTP/1.1 200")) < 200:
        gateway.round()
        assert 1 <= pipe.took.count(b"HTTP/1.1 200") - answered <= 2
        rounds += 1
    assert rounds >= 100
    house.crash()


def test_what_follows_a_scrape_waits_with_it(tmp_path: Path) -> None:
    """One connection has one scrape under way, however many it has sent."""
    house = House(tmp_path)
    [gateway] = house.gateways
    waiting: list[Sink] = []

    def scrape(request: Request) -> Wait:
        return Wait(waiting.append)

    find = gateway.lane._heads._routes.find

    def found(method: str, target: str) -> Route:
        route = find(method, target)
        return route._replace(handler=scrape) if target == "/v0/metrics" else route

    gateway.lane._heads._routes.find = found  # type: ignore[method-assign]
    pipe = Pipe()
    pipe.inbox += b"GET /v0/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3 + HEALTH
    gateway.adopt(pipe)
    for number in range(1, 4):
        house.settle()
        assert len(waiting) == number
        waiting[-1].finish(Response(200, b"{}"))
        gateway.lane.send_dirty()
    house.settle()
    assert pipe.took.count(b"HTTP/1.1 200") == 4
    house.crash()


@pytest.mark.parametrize("early", [False, True], ids=["later", "with the handshake"])
def test_frames_of_a_socket_obey_the_round_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """Thousands of fragments without content fit into one receive: others are served between some and some more."""
    monkeypatch.setattr("topics.gateway.http1.server._TAKE_NS", 0)
    house = House(tmp_path)
    [gateway] = house.gateways
    parts = [
        Frame(Opcode.TEXT, b'{"op":', fin=False),
        *[Frame(Opcode.CONT, b"", fin=False)] * 5_000,
        Frame(Opcode.CONT, b'"ping"}'),
    ]
    raw = b"".join(frame.serialize(mask=True) for frame in parts)
    client = WsClient(gateway, first=raw if early else b"")
    connection = client.connection
    while connection.stream is None:
        gateway.round()
        house.shards[0].round()
    if not early:
        client.pipe.inbox += raw
        gateway.round()
    assert len(raw) - 2 * TURN_BYTES <= len(connection.buffer) <= len(raw)
    assert gateway.lane.budget.held >= len(connection.buffer)
    rounds = 0
    while left := len(connection.buffer):
        pipe = Pipe()
        pipe.inbox += HEALTH
        gateway.adopt(pipe)
        for _ in range(3):
            gateway.round()
        assert pipe.took.count(b"HTTP/1.1 200") == 1
        assert left - 3 * TURN_BYTES <= len(connection.buffer) < left
        rounds += 1
    assert rounds >= 4
    house.settle()
    assert [said["op"] for said in client.read()] == ["pong"]
    assert gateway.lane.budget.held == 0
    house.crash()


def test_frames_behind_the_end_of_a_socket_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics.gateway.http1.server._TAKE_NS", 0)
    house = House(tmp_path)
    [gateway] = house.gateways
    client = WsClient(gateway)
    house.settle()
    client.pipe.inbox += Frame(Opcode.BINARY, b"1").serialize(mask=True)
    client.pipe.inbox += Frame(Opcode.PONG, b"").serialize(mask=True) * 5_000
    house.settle()
    assert client.connection.buffer == b""
    assert client.connection not in gateway.lane.unfinished
    assert gateway.lane.budget.held == 0
    house.crash()


def test_what_a_socket_is_told_in_the_round_of_its_end_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last frames had to wait for the next round, and its end is there by then."""
    monkeypatch.setattr("topics.gateway.http1.server._TAKE_NS", 0)
    house = House(tmp_path)
    client = WsClient(house.gateways[0])
    house.settle()
    client.pipe.inbox += Frame(Opcode.PONG, b"").serialize(mask=True) * 400
    client.pipe.inbox += Frame(Opcode.TEXT, b'{"op":"ping"}').serialize(mask=True)
    client.pipe.ended = True
    house.settle()
    assert [said["op"] for said in client.read()] == ["pong"]
    assert client.connection.closed
    house.crash()
