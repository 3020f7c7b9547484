"""Web pages and a server without keys: names that are not the server's, pages of other origins, images of streams. The
rules are walked through in tests/unit/test_origins.py; here both lanes and WebSockets obey them, nothing is done for a
refused request, and programs other than browsers notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .client import LANES, Client, unique
from .h2ws import H2Sockets
from .queues import Queue, make_queue
from .server import Server
from .sockets import handshake
from .wire import Wire, request

pytestmark = pytest.mark.e2e

EVIL = "evil.example:4000"
IMAGE = "image/avif,image/webp,image/apng,image/svg+xml,image/*,*/*;q=0.8"
FOREIGN: tuple[dict[str, str], ...] = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"},
)


@pytest.fixture
def both(clients: dict[str, Client]) -> list[Client]:
    return [clients[lane] for lane in LANES]


def every_route(client: Client, queue: Queue, **headers: str) -> Iterator[tuple[str, tuple[int, str | None]]]:
    """How the server answers requests that would do something, or tell something."""
    name = queue.name
    for method, path, body in (
        ("GET", "/v0/topics", None),
        ("GET", f"/v0/topics/{name}", None),
        ("GET", f"/v0/topics/{name}/work?node=x&max=1000", None),
        ("GET", "/v0/metrics", None),
        ("POST", f"/v0/topics/{name}", {"records": [{"data": "evil"}]}),
        ("POST", f"/v0/topics/{name}/diff", {"from_seq": 0}),
        ("POST", f"/v0/topics/{name}/claim", {"node": "x", "max": 10}),
        ("PUT", f"/v0/topics/{unique()}", {}),
        ("DELETE", f"/v0/topics/{name}", None),
        ("POST", "/v0/watch", {"topics": {name: {}}}),
        ("GET", "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA", None),
        ("GET", "/v0/ws", None),
    ):
        answer = client.send(method, path, body, headers=dict(headers))
        yield f"{method} {path}", answer.refusal


def test_a_name_that_is_not_the_servers(both: list[Client]) -> None:
    for client in both:
        queue = make_queue(client)
        queue.produce(1, 2)
        for label, refusal in every_route(client, queue, Host=EVIL):
            assert refusal == (421, "misdirected_request"), label
        queue.assert_counters(2, 0)
        answer = client.send("GET", "/v0/topics", headers={"Host": EVIL})
        assert answer.detail == {"host": EVIL}
        assert "TOPICS_ALLOWED_HOSTS" in answer.json["error"]["message"]
        for host in ("localhost", "LOCALHOST:1", "app.localhost:4000", "127.0.0.1", "127.1.2.3:5", "[::1]:4000"):
            assert client.send("GET", "/v0/topics", headers={"Host": host}).status == 200, host
        for path in ("/v0/health", "/v0/ready", "/healthz", "/readyz"):
            assert client.send("GET", path, headers={"Host": EVIL, **FOREIGN[0]}).status == 200, path


def test_what_is_not_there_under_a_name_that_is_not_the_servers(both: list[Client]) -> None:
    for client in both:
        for method, path, refusal in (
            ("GET", "/v0/nothing", (404, "not_found")),
            ("PATCH", "/v0/topics", (405, "method_not_allowed")),
            ("GET", "/v0/topics/%20", (400, "invalid_request")),
        ):
            assert client.send(method, path).refusal == refusal
            assert client.send(method, path, headers={"Host": EVIL}).refusal == (421, "misdirected_request")


def test_hosts_of_http1(wire: Wire) -> None:
    """Of a target, of HTTP/1.0, and none; a refused one costs the request, not the connection."""

    def ask(target: str, *headers: str, version: str = "HTTP/1.1") -> int:
        return wire.ask("\r\n".join([f"GET {target} {version}", *headers, "", ""]).encode()).status

    assert ask("http://localhost:1/v0/topics", "Host: localhost") == 200
    assert ask("http://evil.example/v0/topics", "Host: localhost") == 421
    assert ask("HTTP://user@localhost/v0/topics", "Host: localhost") == 421
    assert ask("http://localhost/v0/topics", "Host: evil.example") == 421
    assert ask("/v0/topics", "Host: evil.example") == 421
    assert ask("/v0/topics", "Host: localhost") == 200
    body = b'{"records":[{"data":1}]}'
    append = request("POST", f"/v0/topics/{unique()}", body).replace(b"localhost", b"evil.example")
    assert [wire.ask(append).status, wire.ask(append).status] == [421, 421]
    assert ask("/v0/topics", version="HTTP/1.0") == 200


def test_a_websocket_under_a_name_that_is_not_the_servers(wire: Wire, server: Server) -> None:
    """Its page is of the same origin, as the browser sees it."""
    assert wire.ask(handshake({"Host": EVIL, "Origin": f"http://{EVIL}"})).refusal == (421, "misdirected_request")
    assert wire.ask(handshake({"Host": EVIL})).refusal == (421, "misdirected_request")
    assert wire.ask(handshake({"Sec-Fetch-Site": "cross-site"})).refusal == (403, "forbidden")
    with H2Sockets(server.port) as sockets:
        assert sockets.connect(("origin", f"http://{EVIL}"), authority=EVIL).status() == 421
        assert sockets.connect(path="/v0/nothing", authority=EVIL).status() == 421
        assert sockets.connect(("sec-fetch-site", "cross-site")).status() == 403
        sockets.socket(("origin", "http://localhost")).ping()


def test_pages_of_other_origins(both: list[Client]) -> None:
    for client in both:
        queue = make_queue(client)
        queue.produce(1, 2)
        for headers in FOREIGN:
            for label, refusal in every_route(client, queue, **headers):
                assert refusal == (403, "forbidden"), (label, headers)
        queue.assert_counters(2, 0)
        for headers in ({"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {"Origin": "http://localhost"}):
            answer = client.send(
                "POST", f"/v0/topics/{unique()}", {"records": [{"data": 1}]}, headers={"Host": "localhost", **headers}
            )
            assert answer.status == 201, headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Accept": IMAGE},
        {"Accept": "*/*", "Sec-Fetch-Dest": "image", "Sec-Fetch-Site": "same-origin"},
        {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"},
        {"Accept": "text/event-stream", "Sec-Fetch-Dest": "document", "Sec-Fetch-Site": "none"},
    ],
)
def test_an_event_stream_is_not_for_images_and_navigations(both: list[Client], headers: dict[str, str]) -> None:
    for client in both:
        queue = make_queue(client)
        queue.produce(1, 2)
        wid = client.send("POST", "/v0/watch", {"topics": {queue.name: {}}})["wid"]
        for path in (f"/v0/topics/{queue.name}/work?node=x&max=1000", f"/v0/watch/{wid}"):
            assert client.send("GET", path, headers=dict(headers)).refusal == (406, "not_acceptable"), path
        queue.assert_counters(2, 0)


def ask(client: Client, host: str, body: object = None, headers: dict[str, str] | None = None) -> int:
    given = {"Host": host, "Authorization": "Bearer secret", **(headers or {})}
    return client.send("GET" if body is None else "POST", "/v0/topics/t", body, headers=given).status


def test_names_and_origins_that_are_listed(start_server: Callable[..., Server]) -> None:
    """With keys, too, since there is a list."""
    server = start_server(
        TOPICS_ALLOWED_HOSTS="topics.example, *.internal",
        TOPICS_ALLOWED_ORIGINS="https://app.example",
        TOPICS_API_KEYS="secret",
    )
    page = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
    body = {"records": [{"data": 1}]}
    for lane in LANES:
        with server.client(lane) as client:
            for host in ("topics.example", "Topics.example:443", "a.b.internal", "localhost"):
                assert ask(client, host, body) in (200, 201), host
            for host in ("internal", "evil.example", "10.0.0.1"):
                assert ask(client, host, body) == 421, host
            assert ask(client, "topics.example", body, {"Origin": "https://topics.example"}) == 200
            assert ask(client, "topics.example", headers=page) == 200
            assert ask(client, "topics.example", body, page) == 403
            assert ask(client, "topics.example", headers={"Origin": "https://other.example"}) == 403
    with Wire(server.port) as wire:
        wire.send(handshake({"Host": "topics.example", "Authorization": "Bearer secret", **page}))
        assert wire.head()[0] == 101
