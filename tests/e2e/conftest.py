"""One server for all that asks for nothing special, one with small limits and short patience, a client per lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .client import LANES, Client, unique
from .server import Server
from .wire import Wire

# Small enough that a test reaches them with a few bytes or within a second.
SMALL = {
    "TOPICS_MAX_BODY_BYTES": 20_000,
    "TOPICS_MAX_BATCH_RECORDS": 5,
    "TOPICS_MAX_RECORD_BYTES": 1_000,
    "TOPICS_MAX_META_BYTES": 100,
    "TOPICS_MAX_TAG_BYTES": 10,
    "TOPICS_MAX_NODE_BYTES": 8,
    "TOPICS_MAX_LIMIT": 3,
    "TOPICS_HEAD_TIMEOUT_MS": 600,
    "TOPICS_BODY_TIMEOUT_MS": 1_500,
    "TOPICS_MIN_BODY_RATE": 0,
    "TOPICS_IDLE_TIMEOUT_MS": 1_500,
    "TOPICS_CALL_TIMEOUT_MS": 2_000,
    "TOPICS_HEARTBEAT_MS": 5_000,  # tests pause a shard for longer than a call may take
    "TOPICS_CACHE_BYTES": 1_000,
    "TOPICS_SEGMENT_MAX_EVENTS": 20,
    "TOPICS_SEGMENT_MAX_AGE_MS": 300,
}


def _serve(factory: pytest.TempPathFactory, name: str, **environ: object) -> Iterator[Server]:
    folder = factory.mktemp(name)
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        faults = [line for line in server.output().splitlines() if "Traceback" in line]
        assert not faults, f"{len(faults)} faults in the server's log, the first: {faults[0][-1_500:]}"
    finally:
        server.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory, "server")


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory, "small", **SMALL)


def _clients(server: Server) -> Iterator[dict[str, Client]]:
    clients: dict[str, Client] = {lane: server.client(lane) for lane in LANES}
    yield clients
    for client in clients.values():
        client.close()


@pytest.fixture(scope="session")
def clients(server: Server) -> Iterator[dict[str, Client]]:
    yield from _clients(server)


@pytest.fixture(scope="session")
def small_clients(small_server: Server) -> Iterator[dict[str, Client]]:
    yield from _clients(small_server)


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def api(clients: dict[str, Client], lane: str) -> Client:
    """The server, by one lane and then by the other."""
    return clients[lane]


@pytest.fixture
def small(small_clients: dict[str, Client], lane: str) -> Client:
    """The server with small limits, by one lane and then by the other."""
    return small_clients[lane]


@pytest.fixture
def api1(clients: dict[str, Client]) -> Client:
    """The fast lane alone, for what does not depend on the lane."""
    return clients["http1"]


@pytest.fixture
def topic() -> str:
    return unique()


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., Wire]]:
    """Open raw connections to the server; all are closed at the end."""
    wires: list[Wire] = []

    def open_wire(to: Server = server) -> Wire:
        wires.append(Wire(to.port))
        return wires[-1]

    yield open_wire
    for wire in wires:
        wire.close()


@pytest.fixture
def wire(connect: Callable[..., Wire]) -> Wire:
    return connect()
