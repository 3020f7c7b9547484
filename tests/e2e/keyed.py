"""Servers with keys: which routes there are and what each needs, keys of every kind, and clients that carry one.

`ROUTES` is written from the contract and not from the server's own table; a unit test holds the two against each other.
Every name in it begins with `in:`, so a key may be about that, about anything, or about something else.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Self

from .client import Answer, Client, Headers, Lane
from .server import Server
from .sse import EventStream, Watching
from .working import Working, WorkStream

SCOPES = ("read", "write", "delete", "admin")
SCOPE_SETS = [frozenset(some) for size in range(1, 5) for some in itertools.combinations(SCOPES, size)]
AREAS = {"any": "", "in": "in:|also.", "out": "out:|i:|In:|inn"}  # None of the last is a prefix of in:


class Route(NamedTuple):
    method: str
    path: str  # {name}: a topic or router under in:
    needs: frozenset[str]
    success: tuple[int, ...] = (200,)  # what the server says to whom it lets through
    body: Any = None
    named: bool = True  # a key's prefixes decide too
    creates: bool = False  # the shard decides, too: whether there is such a topic is known there alone

    def __str__(self) -> str:
        return f"{self.method} {self.path}{' with config' if self.creates else ''}"

    def allows(self, scopes: frozenset[str], area: str) -> bool:
        return self.needs <= scopes and not (self.named and area == "out")


def _needs(*scopes: str) -> frozenset[str]:
    return frozenset(scopes)


_TOPIC = "/v0/topics/{name}"
_SEQS = {"node": "w", "seqs": [1]}
_QUEUE_FOUND_NONE = (404,)  # guarded before anybody looks whether there is such a queue
ROUTES = [
    Route("GET", "/v0/topics", _needs("read"), named=False),
    Route("PUT", _TOPIC, _needs("admin"), (200, 201), {}),
    Route("GET", _TOPIC, _needs("read"), (200, 404)),
    Route("HEAD", _TOPIC, _needs("read"), (200, 404)),
    Route("DELETE", _TOPIC, _needs("delete"), (200, 404)),
    Route("POST", _TOPIC, _needs("write"), (200, 201), {"records": [{"data": 1}]}),
    Route(
        "POST",
        _TOPIC,
        _needs("write", "admin"),
        (200, 201),
        {"records": [{"data": 1}], "config": {"type": "queue"}},
        creates=True,
    ),
    Route("POST", _TOPIC + "/diff", _needs("read"), (200, 404), {"from_seq": 0}),
    Route("POST", _TOPIC + "/delete", _needs("delete"), (200, 404), {"before_seq": 1}),
    Route("POST", _TOPIC + "/claim", _needs("read", "write"), _QUEUE_FOUND_NONE, {"node": "w"}),
    Route("POST", _TOPIC + "/ack", _needs("write"), _QUEUE_FOUND_NONE, _SEQS),
    Route("POST", _TOPIC + "/nack", _needs("write"), _QUEUE_FOUND_NONE, _SEQS),
    Route("POST", _TOPIC + "/extend", _needs("write"), _QUEUE_FOUND_NONE, {**_SEQS, "lease_ms": 1_000}),
    Route("GET", _TOPIC + "/work?node=w", _needs("read", "write"), _QUEUE_FOUND_NONE),
    Route("GET", "/v0/routers", _needs("read"), named=False),
    Route("PUT", "/v0/routers/{name}", _needs("admin"), (200, 201), {"source": "in:source", "dest": "in:dest"}),
    Route("GET", "/v0/routers/{name}", _needs("read"), (200, 404)),
    Route("DELETE", "/v0/routers/{name}", _needs("delete"), (200, 404)),
    Route("POST", "/v0/watch", _needs("read"), (200,), {"topics": {"in:watched": {}}}),
    Route("GET", "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA", _needs("read"), (404,), named=False),
    Route("GET", "/v0/metrics", _needs("read"), named=False),
    Route("GET", "/v0/ws", _needs(), (426,), named=False),  # no upgrade was asked for
]
STREAMS = {"/v0/topics/{name}/work?node=w", "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA"}  # their key may be in the query
PROBES = ("/v0/health", "/health", "/healthz", "/v0/ready", "/ready", "/readyz")


# --- where a request says that it comes from and goes to ---------------------------------------------

LISTED_HOST, LISTED_ORIGIN = "keyed.example", "https://listed.example"
PAGES_ENVIRON = {"TOPICS_ALLOWED_HOSTS": LISTED_HOST, "TOPICS_ALLOWED_ORIGINS": LISTED_ORIGIN}


class Visit(NamedTuple):
    headers: dict[str, str]
    host: str = "ours"  # or listed, or evil
    page: str = "own"  # or listed, or foreign

    def refused(self, route: Route, *, listed: bool) -> int | None:
        """What comes before the key. `listed`: the server has the lists of PAGES_ENVIRON."""
        if self.host == "evil" or (self.host == "listed" and not listed):
            return 421
        reads = route.method in ("GET", "HEAD") and route.path not in STREAMS
        if self.page == "foreign" or (self.page == "listed" and not (listed and reads)):
            return 403
        return None


VISITS = [
    Visit({"Host": LISTED_HOST}, host="listed"),
    Visit({"Host": f"{LISTED_HOST}:4000", "Origin": f"http://{LISTED_HOST}:4000"}, host="listed"),
    Visit({"Host": "evil.example"}, host="evil"),
    Visit({"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}, host="evil"),
    Visit({"Sec-Fetch-Site": "same-origin"}),
    Visit({"Sec-Fetch-Site": "none"}),
    Visit({"Sec-Fetch-Site": "cross-site"}, page="foreign"),
    Visit({"Sec-Fetch-Site": "same-site"}, page="foreign"),
    Visit({"Origin": "null"}, page="foreign"),
    Visit({"Origin": "http://evil.example"}, page="foreign"),
    Visit({"Origin": LISTED_ORIGIN, "Sec-Fetch-Site": "cross-site"}, page="listed"),
    Visit({"Origin": LISTED_ORIGIN}, page="listed"),
]


# --- keys --------------------------------------------------------------------------------------------


class Secret(NamedTuple):
    secret: str
    scopes: frozenset[str]
    area: str

    @property
    def entry(self) -> str:
        return f"{self.secret}:{'+'.join(sorted(self.scopes))}:{AREAS[self.area]}"


KEYS = [
    Secret(f"key-{'-'.join(scope for scope in SCOPES if scope in scopes)}-{area}", scopes, area)
    for scopes in SCOPE_SETS
    for area in AREAS
]
FULL = "full-access"
OTHER = "other-full-access"
READER = "key-read-any"
WRITER = "key-write-any"
INSIDER = "key-read-write-delete-admin-in"
OUTSIDER = "key-read-write-delete-admin-out"
ENTRIES = ",".join([FULL, OTHER, *(key.entry for key in KEYS)])


def bearer(secret: str | None) -> Headers:
    return {} if secret is None else {"Authorization": f"Bearer {secret}"}


# --- who carries one ---------------------------------------------------------------------------------


class Keyed(Client):
    """A client whose every request carries the same key, unless it has its own header."""

    def __init__(self, port: int, lane: Lane, secret: str | None) -> None:
        super().__init__(port, lane)
        self.secret = secret

    def __enter__(self) -> Self:
        return self

    def send(self, method: str, path: str, body: object = None, **how: Any) -> Answer:
        headers = {**bearer(self.secret), **(how.pop("headers", None) or {})}
        return super().send(method, path, body, headers=headers, **how)


class KeyedWatching(Watching):
    client: Keyed

    def __init__(self, server: Server, lane: Lane, secret: str | None) -> None:
        super().__init__(server, lane)
        self.secret = secret
        self.client = Keyed(server.port, lane, secret)

    def __enter__(self) -> Self:
        return self

    def get(self, path: str, *headers: tuple[str, str], **how: Any) -> EventStream:
        """With the key of this one, or another `key`, or none."""
        secret = how.pop("key", self.secret)
        return super().get(path, *headers, *bearer(secret).items(), **how)


class KeyedWorking(Working):
    client: Keyed

    def __init__(self, server: Server, lane: Lane, secret: str | None) -> None:
        super().__init__(server, lane)
        self.secret = secret
        self.client = Keyed(server.port, lane, secret)

    def __enter__(self) -> Self:
        return self

    def get(self, path: str, *headers: tuple[str, str], **how: Any) -> WorkStream:
        return super().get(path, *headers, *bearer(self.secret).items(), **how)
