"""Every route once over HTTP/2, beside the same request over HTTP/1.1.

The lanes share their handlers, so `make test` runs the contract over HTTP/1.1 alone; what a lane adds of its own (the
head, the body, the answer, a stream) is seen here for each route. A route without a step here fails the last test.
"""

from __future__ import annotations

from typing import Any

import pytest

from topics.gateway.api.queues import QueueHandlers
from topics.gateway.api.routers import RouterHandlers
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.api.watch import Watches
from topics.gateway.calls import Calls
from topics.gateway.metrics.page import MetricsHandlers
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.registry import Streams
from topics.settings import Settings
from topics.shm.counters import Board

from .client import Client, Lane, unique
from .h2wire import H2Wire
from .h2ws import H2Sockets
from .queues import make_queue
from .server import Server
from .sockets import Conversation, Socket
from .sse import Watching
from .wire import Wire
from .working import Working

pytestmark = pytest.mark.e2e

Label = tuple[str, str]
VARIABLE = {
    *("performance", "wid", "lease_id", "deadline", "deadlines", "topic_id", "created_at", "$ts"),
    *("router", "source", "dest", "topic", "effective_priority"),
}


def alike(value: Any) -> Any:
    """An answer without what differs from one request to the next."""
    if isinstance(value, dict):
        return {name: alike(inner) for name, inner in value.items() if name not in VARIABLE and not _is_time(name)}
    return [alike(inner) for inner in value] if isinstance(value, list) else value


def _is_time(name: str) -> bool:
    return name.endswith(("_ms", "_ts", "_at")) or name in ("epoch", "uptime_s")


class Tour:
    """One walk through all routes by one lane; `seen` has what each answered."""

    def __init__(self, server: Server, lane: Lane) -> None:
        self.server = server
        self.lane = lane
        self.seen: dict[Label, Any] = {}
        with server.client(lane) as client:
            self._topics(client)
            self._queues(client)
            self._routers(client)
            self._streams(client)
            self._probes(client)

    def _ask(self, client: Client, method: str, template: str, body: object = None, **names: str) -> Any:
        path = template
        for name, value in names.items():
            path = path.replace(f":{name}", value)
        answer = client.send(method, path, body)
        assert answer.status in (200, 201), (method, path, answer)
        self.seen[method, template] = (answer.status, alike(answer.json))
        return answer

    def _topics(self, client: Client) -> None:
        topic = unique()
        self._ask(client, "PUT", "/v0/topics/:topic", {"durability": "disk"}, topic=topic)
        records = [{"data": {"n": number}, "tag": "t", "meta": {"m": "1"}} for number in range(3)]
        assert self._ask(client, "POST", "/v0/topics/:topic", {"records": records}, topic=topic)["seqs"] == [1, 2, 3]
        page = self._ask(client, "POST", "/v0/topics/:topic/diff", {"from_seq": 1}, topic=topic)
        assert page.seqs == [2, 3]
        self._ask(client, "POST", "/v0/topics/:topic/delete", {"before_seq": 2}, topic=topic)
        assert client.diff(topic).seqs == [2, 3]
        self._ask(client, "GET", "/v0/topics/:topic", topic=topic)
        listed = client.list(prefix=topic)
        self.seen["GET", "/v0/topics"] = (listed.status, alike(listed.json))
        assert [row["topic"] for row in listed["topics"]] == [topic]
        self._ask(client, "DELETE", "/v0/topics/:topic", topic=topic)
        assert client.state(topic).status == 404

    def _queues(self, client: Client) -> None:
        queue = unique()
        client.put(queue, type="queue")
        client.append(queue, 1, 2, 3)
        claim = {"node": "w", "max": 2, "lease_ms": 60_000}
        jobs = self._ask(client, "POST", "/v0/topics/:topic/claim", claim, topic=queue)
        first, second = [[job["$seq"]] for job in jobs["claimed"]]
        self._ask(
            client, "POST", "/v0/topics/:topic/extend", {"node": "w", "seqs": first, "lease_ms": 9_000}, topic=queue
        )
        self._ask(client, "POST", "/v0/topics/:topic/ack", {"node": "w", "seqs": first}, topic=queue)
        self._ask(client, "POST", "/v0/topics/:topic/nack", {"node": "w", "seqs": second}, topic=queue)
        with Working(self.server, self.lane) as working:
            stream = working.open(queue, "w", max=1)
            self.seen["GET", "/v0/topics/:topic/work"] = stream.job()["$seq"]
        client.drop(queue)

    def _routers(self, client: Client) -> None:
        router, source, dest = unique("r"), unique(), unique()
        client.put(source)
        client.put(dest)
        body = {"source": source, "dest": dest}
        self._ask(client, "PUT", "/v0/routers/:router", body, router=router)
        self._ask(client, "GET", "/v0/routers/:router", router=router)
        listed = client.get("/v0/routers", source=source)  # the server has routers of other tests, too
        assert [row["router"] for row in listed["routers"]] == [router]
        self.seen["GET", "/v0/routers"] = (listed.status, alike(listed.json))
        self._ask(client, "DELETE", "/v0/routers/:router", router=router)

    def _streams(self, client: Client) -> None:
        topic = unique()
        client.put(topic)
        client.append(topic, "x")
        with Watching(self.server, self.lane) as watching:
            session = watching.create({topic: {"from_seq": 0}})
            self.seen["POST", "/v0/watch"] = (session.status, sorted(session.json))
            stream = watching.open(session)
            self.seen["GET", "/v0/watch/:wid"] = [stream.event().event, stream.event().event]
        if self.lane == "http2":
            with H2Sockets(self.server.port) as wire:
                self._socket(wire.socket(), topic)
        else:
            with Socket(self.server.port) as socket:
                self._socket(socket, topic)

    def _socket(self, socket: Conversation, topic: str) -> None:
        socket.subscribe(topic, from_seq=0)
        self.seen["GET", "/v0/ws"] = socket.data(topic, 1)

    def _probes(self, client: Client) -> None:
        for path in ("/v0/health", "/v0/ready", "/healthz", "/health", "/readyz", "/ready"):
            self.seen["GET", path] = client.get(path).status
        answer = client.send("GET", "/v0/metrics", headers={"Accept": "application/json"})
        self.seen["GET", "/v0/metrics"] = (answer.status, sorted(answer.json))


def labels() -> set[Label]:
    """Method and path of every row of the table that both lanes serve from."""
    settings, board = Settings(), Board.create(["shard-0", "router"])
    calls = Calls(shards=1, timeout_ms=1_000)
    streams = Streams(settings=settings, calls=calls, feeds=Feeds(calls, shards=1))
    routes = Routes(
        Handlers(settings, shards=1, board=board),
        Watches(streams, shards=1),
        RouterHandlers(peer=1, board=board),
        QueueHandlers(streams, peer=2),
        MetricsHandlers(board, shards=1),
    )
    return set(routes.labels[1:])


@pytest.fixture(scope="module")
def over_http2(server: Server) -> Tour:
    return Tour(server, "http2")


def test_every_route_answers_as_over_http1(server: Server, over_http2: Tour) -> None:
    over_http1 = Tour(server, "http1")
    for label, answer in over_http2.seen.items():
        assert answer == over_http1.seen[label], label


def test_every_route_was_asked(over_http2: Tour) -> None:
    assert set(over_http2.seen) == labels()


TWICE: tuple[tuple[str, str, tuple[tuple[str, str], ...], int], ...] = (
    ("GET", "/work?node=x", (("sec-fetch-dest", "image"), ("sec-fetch-dest", "empty")), 406),
    ("GET", "/work?node=x", (("accept", "text/html"), ("accept", "*/*")), 406),
    (
        "POST",
        "/diff",
        (("content-type", "application/json"), ("content-encoding", "identity"), ("content-encoding", "br")),
        415,
    ),
    ("POST", "/diff", (("content-type", "application/json"), ("content-type", "text/html")), 415),
)


@pytest.mark.parametrize(("method", "rest", "headers", "status"), TWICE)
def test_headers_that_stand_there_twice(
    server: Server, method: str, rest: str, headers: tuple[tuple[str, str], ...], status: int
) -> None:
    """What one lane refuses the other does not let through."""
    with server.client() as client:
        queue = make_queue(client)
    target = f"/v0/topics/{queue.name}{rest}"
    body = b"{}" if method == "POST" else b""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    raw = "\r\n".join([*lines, *[f"{name}: {value}" for name, value in headers], "", ""]).encode() + body
    with Wire(server.port) as wire, H2Wire(server.port) as other:
        number = other.open(method, target, *headers, end=not body)
        if body:
            other.send(number, body, end=True)
        stream = other.streams[number]
        while ":status" not in stream.headers:
            assert other.receive()
        assert (wire.ask(raw).status, stream.headers[":status"]) == (status, str(status))
