"""Bodies that nobody will read: they pass by, in both lanes, and a gateway keeps nothing of them."""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import h2.connection
import h2.events
import pytest
import trio
from delivery import House, Pipe, parse_answer
from parts import metrics, queues, routers

from topics import limits
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.api.watch import Watches
from topics.gateway.auth import Guard
from topics.gateway.calls import Calls
from topics.gateway.http2.lane import ColdLane
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.registry import Streams
from topics.keys import parse_keys
from topics.settings import Settings
from topics.shm.counters import Board

MIB = limits.MIB
KEYS = parse_keys("secret", source="test")
SIZE = 8 * MIB
PIECE = 64 * 1024
APPEND = "/v0/topics/t"
# What is asked, with which key, and what is answered when the body has passed by.
REFUSED = [
    ("POST", APPEND, "wrong", 401),
    ("POST", APPEND, None, 401),
    ("PUT", "/v0/nothing", None, 404),
    ("PATCH", "/v0/topics/t", None, 405),
    ("GET", "/v0/health", None, 200),
]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, api_keys=KEYS)
    yield house
    house.crash()


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    """How many bytes are there more than when the test began."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    yield lambda: tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()


# --- HTTP/1.1 ------------------------------------------------------------------------------------------


def head(method: str, path: str, key: str | None, *, framing: str) -> bytes:
    bearer = "" if key is None else f"Authorization: Bearer {key}\r\n"
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{bearer}Content-Type: application/json\r\n{framing}\r\n\r\n"
    ).encode()


def pieces(size: int, *, chunked: bool) -> Iterator[bytes]:
    piece = b"x" * PIECE
    for _ in range(size // PIECE):
        yield b"%x\r\n%b\r\n" % (PIECE, piece) if chunked else piece
    if chunked:
        yield b"0\r\n\r\n"


def framing_of(size: int, *, chunked: bool) -> str:
    return "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"


def status(house: House, pipe: Pipe) -> int:
    """Of the answer that has come since the last call."""
    house.settle()
    answer = parse_answer(bytes(pipe.took))
    pipe.took.clear()
    assert answer is not None
    return answer.status


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("method", "path", "key", "answered"), REFUSED)
def test_http1(
    house: House,
    memory: Callable[[], int],
    method: str,
    path: str,
    key: str | None,
    answered: int,
    chunked: bool,
) -> None:
    pipe = Pipe()
    house.gateways[0].adopt(pipe)
    pipe.inbox += head(method, path, key, framing=framing_of(SIZE, chunked=chunked))
    for piece in pieces(SIZE, chunked=chunked):
        house.settle()
        assert not pipe.took
        assert not pipe.inbox
        assert memory() < MIB
        pipe.inbox += piece
    assert status(house, pipe) == answered
    body = b'{"records":[{"data":1}]}'
    pipe.inbox += head("POST", APPEND, "secret", framing=framing_of(len(body), chunked=False)) + body
    assert status(house, pipe) == 201


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_read_is_kept(house: House, chunked: bool) -> None:
    start, end = b'{"records":[{"data":"', b'"}]}'
    text = start + b"x" * (4 * PIECE - len(start) - len(end)) + end
    pipe = Pipe()
    house.gateways[0].adopt(pipe)
    pipe.inbox += head("POST", APPEND, "secret", framing=framing_of(len(text), chunked=chunked))
    for at in range(0, len(text), PIECE):
        part = text[at : at + PIECE]
        pipe.inbox += b"%x\r\n%b\r\n" % (len(part), part) if chunked else part
        house.settle()
    pipe.inbox += b"0\r\n\r\n" if chunked else b""
    assert status(house, pipe) == 201


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("path", "answered"), [(APPEND, 401), ("/v0/health", 503)])
def test_it_is_answered_at_once_if_the_gateway_retires(house: House, path: str, answered: int, chunked: bool) -> None:
    """Nobody else could go on with it."""
    gateway = house.gateways[0]
    pipe = Pipe()
    connection = gateway.adopt(pipe)
    method = "POST" if path == APPEND else "GET"
    pipe.inbox += head(method, path, "wrong", framing=framing_of(SIZE, chunked=chunked))
    pipe.inbox += next(pieces(SIZE, chunked=chunked))
    house.settle()
    assert not pipe.took
    assert connection.movable
    gateway.lane.retire()
    assert not connection.movable
    gateway.lane.send_dirty()
    answer = parse_answer(bytes(pipe.took))
    assert answer is not None
    assert (answer.status, answer.headers["connection"]) == (answered, "close")
    assert pipe.shut


# --- HTTP/2 --------------------------------------------------------------------------------------------


def cold_lane() -> ColdLane:
    settings = Settings(api_keys=KEYS, body_timeout_ms=600_000)
    calls = Calls(shards=1, timeout_ms=5_000)
    streams = Streams(settings=settings, calls=calls, feeds=Feeds(calls, shards=1))
    handlers = Handlers(settings, shards=1, board=Board.create(["shard-0"]))
    watches = Watches(streams, shards=1)
    return ColdLane(
        settings=settings,
        routes=Routes(handlers, watches, routers(shards=1), queues(shards=1), metrics(shards=1)),
        handlers=handlers,
        calls=calls,
        watches=watches,
        guard=Guard(KEYS, probes=False),
        prefix="",
        slots=None,
        meter=None,
        access=None,
    )


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    return client, server


class Client:
    """A connection with some streams whose bodies go out side by side."""

    def __init__(self, sock: socket.socket) -> None:
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self.h2 = h2.connection.H2Connection()
        self.h2.initiate_connection()
        self.answered: dict[int, int] = {}

    def open(self, method: str, path: str, key: str | None) -> int:
        number = self.h2.get_next_available_stream_id()
        bearer = [] if key is None else [("authorization", f"Bearer {key}")]
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "localhost")]
        self.h2.send_headers(number, [*pseudo, ("content-type", "application/json"), *bearer])
        return number

    async def flush(self) -> None:
        await self.stream.send_all(self.h2.data_to_send())

    async def receive(self) -> None:
        for event in self.h2.receive_data(await self.stream.receive_some(1 << 16)):
            if isinstance(event, h2.events.ResponseReceived):
                assert event.stream_id is not None
                self.answered[event.stream_id] = int(dict(event.headers)[b":status"])
        await self.flush()

    async def send(self, number: int, size: int) -> None:
        while size:
            room = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size, size)
            if room == 0:
                await self.receive()
                continue
            self.h2.send_data(number, b"x" * room)
            size -= room
            await self.flush()


def test_http2(memory: Callable[[], int]) -> None:
    """All streams have sent all but the end of their bodies, and nothing is there of them."""
    lane = cold_lane()
    ours, theirs = connected()

    async def play() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.run)
            client = Client(ours)
            lane.hand_over(theirs, client.h2.data_to_send())
            wanted = {client.open(method, path, key): answered for method, path, key, answered in REFUSED}
            await client.flush()
            for number in wanted:
                await client.send(number, 2 * MIB)
            assert memory() < 3 * MIB
            assert client.answered == {}
            for number in wanted:
                client.h2.end_stream(number)
            await client.flush()
            with trio.fail_after(30):
                while len(client.answered) < len(wanted):
                    await client.receive()
            assert client.answered == wanted
            nursery.cancel_scope.cancel()
            await client.stream.aclose()

    trio.run(play)
