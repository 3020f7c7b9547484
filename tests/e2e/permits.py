"""What each key may do with each route, from each page, by each reader: the matrix, and what it says.

A cell is one request: a row (a route and the names in it), a key, a page and a reader. `verdict_of` says what it gets,
written from the contract; it asks none of the server's own rules. The order of refusals is part of it: host, page,
key, scopes, the name in the path, names in the body, the reader.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from .keyed import AREAS, LISTED_HOST, LISTED_ORIGIN, PROBES, ROUTES, SCOPES, STREAMS, VISITS, Route, Secret

SOCKET = "/v0/ws"
NAME = "in:x"  # in place of {name} in a path
OUTSIDE = "out:there"


class Row(NamedTuple):
    route: Route
    names: tuple[str, ...]  # that a key's prefixes are about, in the order in which they are looked at
    content: bytes = b""
    probe: bool = False

    def __str__(self) -> str:
        return f"{self.route} {' '.join(self.names)}"

    @property
    def streams(self) -> bool:
        return self.route.path in STREAMS


def _names_in(body: Any) -> list[str]:
    body = body or {}
    dead_letters = [given["dead_letter"] for given in (body, body.get("config", {})) if "dead_letter" in given]
    return [*body.get("topics", {}), *(body[name] for name in ("source", "dest") if name in body), *dead_letters]


def _row(route: Route) -> Row:
    content = b"" if route.body is None else json.dumps(route.body).encode()
    return Row(route, (*([NAME] if "{name}" in route.path else []), *_names_in(route.body)), content)


def _beside(method: str, path: str, body: dict[str, Any]) -> Route:
    """The route of this path with another body, that names what is outside of in:."""
    creates = "config" in body
    return next(
        known for known in ROUTES if (known.method, known.path, known.creates) == (method, path, creates)
    )._replace(body=body)


_QUEUE = {"type": "queue", "dead_letter": OUTSIDE, "max_deliveries": 1}
_TOPIC, _ROUTER = "/v0/topics/{name}", "/v0/routers/{name}"
ROWS = [
    *map(_row, ROUTES),
    *(  # HEAD is GET without the body
        _row(known._replace(method="HEAD"))
        for known in ROUTES
        if known.method == "GET" and known.path not in {*STREAMS, _TOPIC, SOCKET}
    ),
    *(
        _row(_beside(method, path, body))
        for method, path, body in (
            ("PUT", _TOPIC, _QUEUE),
            ("POST", _TOPIC, {"records": [{"data": 1}], "config": _QUEUE}),
            ("PUT", _ROUTER, {"source": OUTSIDE, "dest": "in:dest"}),
            ("PUT", _ROUTER, {"source": "in:source", "dest": OUTSIDE}),
            ("POST", "/v0/watch", {"topics": {"in:watched": {}, OUTSIDE: {}}}),
        )
    ),
    *(
        Row(Route(method, path, frozenset(), named=False), (), probe=True)
        for path in PROBES
        for method in ("GET", "HEAD")
    ),
]


# --- who asks, from where, as what -------------------------------------------------------------------


class Page(NamedTuple):
    """Headers of a request, and what they make of it. `page` is as a server sees it that lists LISTED_ORIGIN."""

    headers: dict[str, str]
    host: str = "ours"  # or listed, or evil
    page: str = "own"  # or listed, or foreign


_OWN = "http://localhost"
PAGES = [
    Page({}),
    *(Page(*visit) for visit in VISITS),
    Page({"Host": "LOCALHOST:4000", "Origin": "http://localhost:4000", "Sec-Fetch-Site": "none"}),
    Page({"Origin": _OWN, "Sec-Fetch-Site": "cross-site"}, page="foreign"),
    Page({"Origin": f"{_OWN}:4001"}, page="foreign"),
    Page({"Origin": LISTED_ORIGIN, "Sec-Fetch-Site": "same-site"}, page="listed"),
    Page({"Origin": f"{LISTED_ORIGIN}:8443"}, page="foreign"),
    Page({"Host": LISTED_HOST, "Origin": "http://evil.example"}, host="listed", page="foreign"),
    Page({"Host": "evil.example", "Origin": LISTED_ORIGIN}, host="evil", page="listed"),
    Page({"Host": "evil.example", "Sec-Fetch-Site": "cross-site"}, host="evil", page="foreign"),
]


class Reader(NamedTuple):
    headers: dict[str, str]
    of_events: bool = True


READERS = [
    Reader({}),
    Reader({"Accept": "*/*"}),
    Reader({"Accept": "text/event-stream", "Sec-Fetch-Dest": "empty"}),
    Reader({"Accept": "image/avif,image/webp,image/*,*/*;q=0.8"}, of_events=False),
    Reader({"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}, of_events=False),
    Reader({"Accept": "*/*", "Sec-Fetch-Dest": "image"}, of_events=False),
    Reader({"Accept": "text/event-stream", "Sec-Fetch-Dest": "document"}, of_events=False),
]

NOBODY = Secret("", frozenset(), "any")  # sends no key
UNKNOWN = Secret("nobody-knows-this", frozenset(SCOPES), "any")


class Lists(NamedTuple):
    """What a server is set to."""

    keys: bool
    names: bool  # it lists LISTED_HOST and LISTED_ORIGIN

    @property
    def checks_hosts(self) -> bool:
        return self.names or not self.keys


class Cell(NamedTuple):
    row: Row
    key: Secret
    page: Page = PAGES[0]
    reader: Reader = READERS[0]


Verdict = tuple[str, Any]
THROUGH: Verdict = ("through", None)
STATUS = {"host": 421, "page": 403, "key": 401, "scopes": 403, "name": 403, "reader": 406}


def covers(area: str, name: str) -> bool:
    return not AREAS[area] or any(name.startswith(prefix) for prefix in AREAS[area].split("|"))


def verdict_of(cell: Cell, lists: Lists, *, known: bool) -> Verdict:
    """`known`: the server has this key, and it has not ended. An append with a config is let through without admin: the
    shard decides what becomes of it (`may_create`)."""
    row, key, page, reader = cell
    if row.probe:
        return THROUGH
    if lists.checks_hosts and (page.host == "evil" or (page.host == "listed" and not lists.names)):
        return "host", None
    reads = row.route.path == SOCKET or (row.route.method in ("GET", "HEAD") and not row.streams)
    if page.page == "foreign" or (page.page == "listed" and not (lists.names and reads)):
        return "page", None
    if lists.keys:
        if not known:
            return "key", None
        needs = row.route.needs - ({"admin"} if row.route.creates else set())
        if missing := [scope for scope in SCOPES if scope in needs - key.scopes]:
            return "scopes", missing
        for name in row.names:
            if not covers(key.area, name):
                return "name", name
    if row.streams and not reader.of_events:
        return "reader", None
    return THROUGH


def may_create(key: Secret) -> bool:
    return "admin" in key.scopes


def every_cell(keys: list[Secret]) -> Iterator[Cell]:
    """Every row with every key from every page; and, from our own page, by every reader."""
    yield from itertools.starmap(Cell, itertools.product(ROWS, keys, PAGES))
    for row, key, reader in itertools.product(ROWS, keys, READERS[1:]):
        yield Cell(row, key, PAGES[0], reader)
