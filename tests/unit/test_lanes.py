"""What both lanes make of the same requests, without a process around them; the other lane over real HTTP/2."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import socket
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import msgspec
import pytest
import trio
from delivery import Answer, House, send
from hypercorn.protocol.events import Body
from parts import metrics, queues, routers

from topics import limits
from topics.actors import messages
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.api.types import Request, Response
from topics.gateway.api.watch import SSE_HEADERS, Watches
from topics.gateway.auth import Guard
from topics.gateway.calls import Calls
from topics.gateway.http2.h2 import Tunnel
from topics.gateway.http2.lane import ColdLane
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.registry import Streams
from topics.gateway.streams.sse import Definition, SseStream
from topics.keys import parse_keys
from topics.settings import Settings

PATIENCE_S = 30.0
DEEP = base64.b64encode(b'{"x":%b%b}' % (b"[" * 2_000, b"]" * 2_000)).decode()


class Bug(Exception):
    pass


def fail(*given: Any) -> Any:
    raise Bug


class Gateway:
    """Linked to nobody: what asks a shard is 503."""

    def __init__(self) -> None:
        settings = Settings()
        self.faults: list[Exception] = []
        calls = Calls(shards=1, timeout_ms=1_000)
        calls.on_fault = lambda error, id: self.faults.append(error)
        self.slices = calls.slices  # nobody does them but the test
        self.streams = Streams(settings=settings, calls=calls, feeds=Feeds(calls, shards=1))
        self.watches = Watches(self.streams, shards=1)
        self.handlers = Handlers(settings, shards=1, board=None)  # type: ignore[arg-type]
        self.lane = ColdLane(
            settings=settings,
            routes=Routes(self.handlers, self.watches, routers(shards=1), queues(shards=1), metrics(shards=1)),
            handlers=self.handlers,
            calls=calls,
            watches=self.watches,
            guard=Guard((), probes=False),
            prefix="",
            slots=None,
            meter=None,
            access=None,
        )


class Client:
    """One connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._h2.initiate_connection()
        self.headers: dict[bytes, bytes] = {}  # of the last answer

    async def ask(self, target: str, *headers: tuple[str, str], method: str = "GET") -> int:
        """The stream that was begun."""
        number: int = self._h2.get_next_available_stream_id()
        head = [(":method", method), (":path", target), (":scheme", "http"), (":authority", "localhost"), *headers]
        self._h2.send_headers(number, head, end_stream=True)
        await self._stream.send_all(self._h2.data_to_send())
        return number

    async def reset(self, number: int) -> None:
        self._h2.reset_stream(number)
        await self._stream.send_all(self._h2.data_to_send())

    async def get(self, target: str, *headers: tuple[str, str], method: str = "GET") -> tuple[int, bytes]:
        """The answer; one that breaks off has status 0."""
        number = await self.ask(target, *headers, method=method)
        status, body = 0, b""
        while True:
            data = await self._stream.receive_some()
            assert data, "the connection is gone"
            events = self._h2.receive_data(bytes(data))
            for event in [event for event in events if getattr(event, "stream_id", None) == number]:
                if isinstance(event, h2.events.ResponseReceived):
                    self.headers = dict(event.headers)
                    status = int(self.headers[b":status"])
                elif isinstance(event, h2.events.DataReceived):
                    self._h2.acknowledge_received_data(event.flow_controlled_length, number)
                    body += event.data
                elif isinstance(event, h2.events.StreamReset):
                    return 0, body
                elif isinstance(event, h2.events.StreamEnded):
                    return status, body
            await self._stream.send_all(self._h2.data_to_send())

    async def error(self, target: str) -> tuple[int, str]:
        status, body = await self.get(target)
        return status, json.loads(body)["error"]["code"]


def run(gateway: Gateway, script: Any) -> None:
    async def main() -> None:
        with trio.fail_after(PATIENCE_S), socket.create_server(("127.0.0.1", 0)) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(gateway.lane.run)
                async with await trio.open_tcp_stream(*listener.getsockname()) as stream:
                    sock, _ = listener.accept()
                    sock.setblocking(False)
                    gateway.lane.hand_over(sock, b"")
                    await script(Client(stream))
                nursery.cancel_scope.cancel()

    trio.run(main)


def get(house: House, target: str) -> Answer:
    client = send(house.gateways[0], f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    house.settle()
    client.read()
    assert client.answer is not None
    return client.answer


# --- while the server stops ---

ANSWERED = ("/v0/health", "/healthz", "/health", "/v0/metrics")
REFUSED = ("/v0/ready", "/readyz", "/v0/topics", "/v0/topics/t")


def test_the_fast_lane_while_the_server_stops(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.gateways[0].stop()
    for target in ANSWERED:
        assert get(house, target).status == 200, target
    for target in REFUSED:
        answer = get(house, target)
        assert (answer.status, answer.json["error"]["code"]) == (503, "shutting_down"), target
    house.crash()


def test_the_other_lane_while_the_server_stops() -> None:
    async def script(client: Client) -> None:
        gateway.handlers.draining = True
        for target in ANSWERED:
            assert (await client.get(target))[0] == 200, target
        for target in REFUSED:
            assert await client.error(target) == (503, "shutting_down"), target

    gateway = Gateway()
    run(gateway, script)
    assert gateway.faults == []


# --- heads and bodies ---


def test_a_head_that_is_known_and_shorter_than_the_last_one(tmp_path: Path) -> None:
    """It comes alone, its body later: all of that belongs to it."""

    def head_of(body: bytes) -> bytes:
        length = f"Content-Length: {len(body)}\r\n\r\n"
        return f"POST /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}".encode()

    house = House(tmp_path)
    longer, shorter = (b'{"records":[{"data":"%b"}]}' % (b"x" * size) for size in (1_000_000, 900_000))
    assert len(head_of(longer)) == len(head_of(shorter)) + 1
    client = send(house.gateways[0], b"")
    for body in (shorter, longer, shorter):
        for part in (head_of(body), body):
            client.pipe.inbox += part
            house.settle()
    assert client.pipe.took.count(b"HTTP/1.1 20") == 3
    house.crash()


# --- places of a key ---


@pytest.mark.parametrize("requests", [1, 3])
def test_whoever_goes_before_its_answer_gives_its_places_back(tmp_path: Path, requests: int) -> None:
    house = House(tmp_path, api_keys=parse_keys("secret", source="here"), max_inflight_per_key=3)
    [gateway] = house.gateways
    for _ in range(2):
        client = send(
            gateway, b"GET /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n" * requests
        )
        gateway.round()
        assert gateway.slots.held == [0, requests]
        client.pipe.reset = True
        gateway.round()
        assert gateway.slots.held == [0, 0]
    house.crash()


# --- what is refused, and what breaks ---


@pytest.mark.parametrize("target", ["/v0/topics", "/v0/routers"])
def test_a_cursor_that_is_nested_too_deeply(tmp_path: Path, target: str) -> None:
    house = House(tmp_path)
    assert get(house, f"{target}?cursor={DEEP}").status == 400
    house.crash()

    async def script(client: Client) -> None:
        assert await client.error(f"{target}?cursor={DEEP}") == (400, "invalid_request")

    gateway = Gateway()
    run(gateway, script)
    assert gateway.faults == []


def test_a_bug_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(client: Client) -> None:
        assert await client.error("/v0/topics/t") == (500, "internal")
        assert (await client.get("/v0/health"))[0] == 200

    monkeypatch.setattr(Handlers, "get_topic", fail)
    gateway = Gateway()
    run(gateway, script)
    assert [type(error) for error in gateway.faults] == [Bug]


@pytest.mark.parametrize("name", ["start", "drained"])
def test_a_bug_in_a_stream_ends_that_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As it begins, and when its first bytes are with the socket."""
    definition = msgspec.msgpack.encode(Definition(["t"], None, 10, 1_000, False, True, True, 60_000))
    opened = messages.StreamOpened(7, 1, definition, [0], [0], False)

    def work(request: Request) -> Response:
        stream = SseStream(gateway.streams, "wid", opened, shards=1, last_id=None)
        return Response(200, b"", SSE_HEADERS, stream=stream)

    async def script(client: Client) -> None:
        await client.get("/v0/watch/wid")
        assert (await client.get("/v0/health"))[0] == 200

    monkeypatch.setattr(SseStream, name, fail)
    monkeypatch.setattr(Watches, "open", staticmethod(work))
    gateway = Gateway()
    run(gateway, script)
    assert [type(error) for error in gateway.faults] == [Bug]
    assert len(gateway.streams) == 0


# --- large answers as gzip, in the other lane ---

GZIP = ("accept-encoding", "gzip")
LARGE = bytes(number * number % 251 for number in range(5 * limits.GZIP_SLICE_BYTES))


@pytest.fixture
def lists_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handlers, "list_topics", lambda handlers, request: Response(200, LARGE, tail=b"}"))


@pytest.mark.usefixtures("lists_much")
def test_the_other_lane_answers_others_between_slices() -> None:
    async def script(client: Client) -> None:
        slices = gateway.slices
        await client.ask("/v0/topics", GZIP)
        while not slices:
            assert (await client.get("/v0/health"))[0] == 200
        for _ in range(7):  # five, the tail, and the end
            assert (len(slices), (await client.get("/v0/health"))[0]) == (1, 200)
            slices.run(0)
        asked: list[tuple[int, bytes]] = []

        async def ask() -> None:
            asked.append(await client.get("/v0/topics", GZIP))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not asked:
                slices.run(0)
                await trio.lowlevel.checkpoint()
        [(status, packed)] = asked
        assert (status, gzip.decompress(packed)) == (200, LARGE + b"}")
        assert (client.headers[b"content-encoding"], client.headers[b"vary"]) == (b"gzip", b"Accept-Encoding")
        assert await client.get("/v0/topics") == (200, LARGE + b"}")
        assert not slices

    gateway = Gateway()
    run(gateway, script)
    assert gateway.faults == []


@pytest.mark.usefixtures("lists_much")
def test_the_other_lane_says_how_long_the_body_would_be() -> None:
    async def script(client: Client) -> None:
        for wanted in ((), (GZIP,)):
            assert await client.get("/v0/topics", *wanted, method="HEAD") == (200, b"")
            assert client.headers[b"content-length"] == b"%d" % (len(LARGE) + 1)

    gateway = Gateway()
    run(gateway, script)
    assert gateway.faults == []


@pytest.mark.usefixtures("lists_much")
def test_the_other_lane_drops_the_answer_of_a_client_that_leaves() -> None:
    async def script(client: Client) -> None:
        slices = gateway.slices
        number = await client.ask("/v0/topics", GZIP)
        while not slices:
            assert (await client.get("/v0/health"))[0] == 200
        slices.run(0)
        await client.reset(number)
        while slices:
            assert (await client.get("/v0/health"))[0] == 200

    gateway = Gateway()
    run(gateway, script)
    assert gateway.faults == []


# --- sockets of the other lane ---


class _Carrier:
    """The connection of a tunnel: what it is to send goes nowhere."""

    async def stream_send(self, event: object) -> None: ...


class _Listener:
    """A stream that writes down what it hears."""

    def __init__(self, name: str, heard: list[tuple[str, int]]) -> None:
        self._name = name
        self._heard = heard

    def start(self, outlet: object, received: bytes) -> None:
        self._heard.append((self._name, len(received)))

    def received(self, data: bytes) -> None:
        self._heard.append((self._name, len(data)))

    def closed(self) -> None: ...


def test_sockets_that_send_small_frames_are_heard_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came with the handshake, too: of all of them some bytes, then whatever else there is to do."""
    monkeypatch.setattr("topics.gateway.http2.lane._COSTLY_NS", -1)
    lane = Gateway().lane
    heard: list[tuple[str, int]] = []

    async def wait_heard(name: str, size: int) -> None:
        while sum(size for who, size in heard if who == name) < size:
            await trio.lowlevel.checkpoint()

    async def talk(name: str) -> None:
        tunnel = Tunnel(_Carrier(), 1, {b":method": b"CONNECT"}, {})  # type: ignore[arg-type]
        await tunnel.handle(Body(1, bytes(10_000)))
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope, lane._life(scope) as life:
                listener: Any = _Listener(name, heard)
                nursery.start_soon(lane._talk, life, tunnel, listener, [])
                await wait_heard(name, 10_000)
                await tunnel.handle(Body(1, bytes(10_000)))
                await wait_heard(name, 20_000)
                nursery.cancel_scope.cancel()

    async def tick() -> None:
        while True:
            heard.append(("", 0))
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tick)
                async with trio.open_nursery() as talks:
                    for name in "ab":
                        talks.start_soon(talk, name)
                nursery.cancel_scope.cancel()

    trio.run(main)
    for name in "ab":
        assert sum(size for who, size in heard if who == name) == 20_000
    assert max(size for _, size in heard) <= 2_048
    assert not [pair for pair in itertools.pairwise(heard) if pair[0][1] and pair[1][1]], "two without a tick between"
