"""Who may do what, over sockets: every route with every kind of key in both lanes, names in bodies, lists, bad headers.

A refusal is checked for its form by the client; that it had no effect is checked here.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from topics.keys import HIDDEN

from .client import Answer, Client, Lane, unique
from .h2wire import H2Wire
from .keyed import (
    ENTRIES,
    FULL,
    INSIDER,
    KEYS,
    OTHER,
    OUTSIDER,
    PAGES_ENVIRON,
    PROBES,
    READER,
    ROUTES,
    SCOPES,
    STREAMS,
    VISITS,
    WRITER,
    Keyed,
    KeyedWatching,
    KeyedWorking,
    Route,
    bearer,
)
from .permits import NOBODY, PAGES, READERS, ROWS, STATUS, UNKNOWN, Cell, Lists, every_cell, may_create, verdict_of
from .server import Server, eventually, run_topics
from .sockets import Socket
from .wire import Wire, request

pytestmark = pytest.mark.e2e

LISTER = "lists:read:l1:|l2."
ODD = "odd+key%41&=/?~"  # every sign of it must come through a query


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a key of every kind."""
    folder = tmp_path_factory.mktemp("guarded")
    server = Server(
        folder / "data", log=folder / "server.log", TOPICS_API_KEYS=f"{ENTRIES},{LISTER},{ODD}", **PAGES_ENVIRON
    )
    try:
        server.wait_ready()
        with Keyed(server.port, "http1", FULL) as api:
            for name in ("in:watched", "in:source", "in:dest", "out:there"):
                assert api.put(name).status == 201
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture
def by(guarded: Server, lane: Lane) -> Iterator[Callable[[str | None], Keyed]]:
    """A client with this key, by one lane and then by the other."""
    made: list[Keyed] = []

    def make(secret: str | None) -> Keyed:
        made.append(Keyed(guarded.port, lane, secret))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def full(by: Callable[[str | None], Keyed]) -> Keyed:
    return by(FULL)


@pytest.fixture
def inside(by: Callable[[str | None], Keyed]) -> Keyed:
    """All scopes, names under in: and also."""
    return by(INSIDER)


def status_of(client: Client, method: str, path: str, secret: str | None, body: object = None, **more: str) -> int:
    """Of any request, with `more` headers; the answer to HEAD has no body to look at."""
    headers = more | bearer(secret) | ({"Content-Type": "application/json"} if body is not None else {})
    content = None if body is None else json.dumps(body).encode()
    status, received, raw = client._transport.ask(method, path, content, headers)
    if method != "HEAD" and not received["content-type"].startswith("text/plain"):  # but for figures
        Answer(status=status, headers=received, raw=raw)
    if status == 401:
        assert received["www-authenticate"] == "Bearer"
    return status


def refuses(answer: Answer) -> bool:
    """Whether it is a 403; anything else but a success would be a mistake of the test."""
    assert answer.status in (200, 201, 403), answer
    return answer.refusal == (403, "forbidden")


# --- the matrix --------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_every_route_with_every_key(full: Keyed, route: Route) -> None:
    wrong = []
    for key in KEYS:
        path = route.path.format(name=f"in:{unique()}")
        status = status_of(full, route.method, path, key.secret, route.body)
        expected = route.success if route.allows(key.scopes, key.area) else (403,)
        if status not in expected:
            wrong.append((key.secret, status, expected))
    assert not wrong, wrong


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_every_route_on_every_page(full: Keyed, server: Server, lane: Lane, route: Route) -> None:
    """Host and page come before the key, whichever it is; where they are right, the key decides as ever. The same
    without keys, where no name and no origin is listed."""
    keys = [
        (FULL, route.success),
        (None, (401,)),
        ("unknown", (401,)),
        (OUTSIDER, route.success if route.allows(frozenset(SCOPES), "out") else (403,)),
        (READER, route.success if route.allows(frozenset({"read"}), "any") else (403,)),
    ]
    wrong = []
    with server.client(lane) as open_to_all:
        for visit in VISITS:
            path = route.path.format(name=f"in:{unique()}")
            refused = visit.refused(route, listed=True)
            for secret, allowed in keys:
                status = status_of(full, route.method, path, secret, route.body, **visit.headers)
                if status not in (allowed if refused is None else (refused,)):
                    wrong.append((visit, secret, status))
            refused = visit.refused(route, listed=False)
            status = status_of(open_to_all, route.method, path, None, route.body, **visit.headers)
            if status not in ((*route.success, 404) if refused is None else (refused,)):
                wrong.append((visit, "no keys", status))
    assert not wrong, wrong


def test_a_handful_of_the_matrix(full: Keyed, server: Server, lane: Lane) -> None:
    """All of it is in tests/unit/test_matrix.py, without sockets. Here some two hundred cells, with every verdict among
    them: with keys and lists, and with neither."""
    (insider,) = (key for key in KEYS if key.secret == INSIDER)
    wrong, verdicts = [], set()
    with server.client(lane) as open_to_all:
        for lists, client, keys, step, reading in (
            (Lists(keys=True, names=True), full, [*KEYS, NOBODY, UNKNOWN], 337, insider),
            (Lists(keys=False, names=False), open_to_all, [NOBODY], 13, NOBODY),
        ):
            streams = [Cell(row, reading, PAGES[0], reader) for row in ROWS if row.streams for reader in READERS]
            for cell in (*itertools.islice(every_cell(keys), 0, None, step), *streams):
                row, key = cell.row, cell.key
                verdict, _ = verdict_of(cell, lists, known=key in KEYS)
                if verdict == "through" and row.route.creates and lists.keys and not may_create(key):
                    verdict = "scopes"  # there is no such topic
                path = row.route.path.format(name=f"in:{unique()}")
                secret = None if key is NOBODY else key.secret
                headers = cell.page.headers | cell.reader.headers
                status = status_of(client, row.route.method, path, secret, row.route.body, **headers)
                verdicts.add(verdict)
                if status not in ((*row.route.success, 404) if verdict == "through" else (STATUS[verdict],)):
                    wrong.append((str(row), secret, headers, verdict, status))
    assert not wrong, wrong
    assert verdicts == {*STATUS, "through"}


@pytest.mark.parametrize("path", PROBES)
def test_probes_are_for_every_page(full: Keyed, path: str) -> None:
    for visit in VISITS:
        assert status_of(full, "GET", path, None, **visit.headers) == 200, visit


def test_every_publish_with_every_key(guarded: Server, full: Keyed) -> None:
    """The same rule as for appends, but that a config needs admin whether there is such a topic or not."""
    exists = f"in:{unique()}"
    full.put(exists)
    wrong = []
    for key in KEYS:
        with Socket(guarded.port, **bearer(key.secret)) as socket:
            for topic in (exists, f"in:{unique()}"):
                for config in (None, {"type": "log"}):
                    needs = {"write"} if config is None else {"write", "admin"}
                    more = {} if config is None else {"config": config}
                    told = socket.call("publish", topic=topic, records=[{"data": 1}], **more)
                    done = told.op == "ack"
                    if done is not (needs <= key.scopes and key.area != "out") or (
                        not done and told["code"] != "forbidden"
                    ):
                        wrong.append((key.secret, topic == exists, config, told))
    assert not wrong, wrong


def test_no_answer_names_what_is_outside(full: Keyed) -> None:
    """Routers and their refusals, to every key whose prefixes leave something out."""
    mark = unique("Yp9")
    mine, hidden = f"in:{mark}-here", f"Zz9:{mark}-there"
    routers = [f"in:{mark}-1", f"in:{mark}-2"]
    for router, source, dest in ((routers[0], hidden, mine), (routers[1], f"in:{mark}-a", f"Zz9:{mark}-b")):
        assert full.send("PUT", f"/v0/routers/{router}", {"source": source, "dest": dest}).status == 201
    asked: list[tuple[str, str, object, tuple[int, ...]]] = [
        ("GET", "/v0/routers?page_size=1000", None, (200,)),
        *(("GET", f"/v0/routers/{router}", None, (200,)) for router in routers),
        ("PUT", f"/v0/routers/in:{mark}-3", {"source": f"in:{mark}-a", "dest": mine}, (409,)),
        ("PUT", f"/v0/routers/{routers[0]}", {"source": f"in:{mark}-a", "dest": mine}, (409,)),
        ("GET", f"/v0/routers?source={hidden}", None, (200,)),
        ("GET", "/v0/topics?page_size=1000", None, (200,)),
        ("GET", f"/v0/topics/{hidden}", None, (403,)),
    ]
    wrong = []
    for key in KEYS:
        if key.area == "any":
            continue
        for method, path, body, expected in asked:
            answer = full.send(method, path, body, headers=bearer(key.secret))
            told = answer.raw.replace(f'"{hidden}\\"'.encode(), b"").replace(f'"name":"{hidden}"'.encode(), b"")
            if b"Zz9:" in told or answer.status not in (*expected, 403):
                wrong.append((key.secret, method, path, answer))
    for router in routers:
        full.send("DELETE", f"/v0/routers/{router}")
    assert not wrong, wrong


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("secret", [None, "unknown", FULL + "x", FULL[:-1], FULL.upper(), READER + ":read"])
def test_every_route_without_a_known_key(full: Keyed, route: Route, secret: str | None) -> None:
    name = f"in:{unique()}"
    assert status_of(full, route.method, route.path.format(name=name), secret, route.body) == 401
    assert full.state(name).status == 404


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_a_full_key_may_do_everything(full: Keyed, route: Route) -> None:
    for name in (f"in:{unique()}", f"out:{unique()}"):
        assert status_of(full, route.method, route.path.format(name=name), FULL, route.body) in route.success


@pytest.mark.parametrize("route", [route for route in ROUTES if route.method in ("PUT", "POST")], ids=str)
def test_the_key_comes_before_the_body(full: Keyed, route: Route) -> None:
    """Who may not is not told what is wrong with the body."""
    path = route.path.format(name="in:x")
    for content in (b"", b"{", b"\xff", b"[]"):
        assert full.send(route.method, path, content=content, headers=bearer("unknown")).status == 401
        if route.needs == {"read"}:
            assert full.send(route.method, path, content=content, headers=bearer("key-admin-any")).status == 403
        elif route.path != "/v0/watch":
            assert full.send(route.method, path, content=content, headers=bearer(READER)).status == 403


def test_refused_writes_have_no_effect(full: Keyed, by: Callable[[str | None], Keyed]) -> None:
    name, router = f"in:{unique()}", f"in:{unique()}"
    full.append(name, "kept")
    full.send("PUT", f"/v0/routers/{router}", {"source": "in:source", "dest": "in:dest"})
    before = full.state(name, touch=False).without_performance()
    for client in (by(None), by("unknown"), by(OUTSIDER), by(READER)):
        refused = [
            client.append(name, "more"),
            client.put(name, cap_records=1),
            client.drop(name),
            client.delete(name, before_seq=100),
            client.send("DELETE", f"/v0/routers/{router}"),
            client.append(f"{name}-new", 1),
            client.put(f"{name}-new"),
            client.send("PUT", f"/v0/routers/{name}-new", {"source": f"{name}-s", "dest": f"{name}-d"}),
        ]
        assert {answer.status for answer in refused} <= {401, 403}, refused
    assert full.state(name, touch=False).without_performance() == before
    assert full.diff(name).data == ["kept"]
    assert full.send("GET", f"/v0/routers/{router}").status == 200
    for made in ("-new", "-s", "-d"):
        assert full.state(name + made).status == 404


def test_an_escaped_name_is_the_name(by: Callable[[str | None], Keyed]) -> None:
    assert by(INSIDER).send("PUT", f"/v0/topics/%69n%3A{unique()}", {}).status == 201
    assert by(OUTSIDER).send("PUT", f"/v0/topics/%69n%3A{unique()}", {}).status == 403
    assert by(INSIDER).send("PUT", "/v0/topics/out%3Ax", {}).refusal == (403, "forbidden")


def test_what_a_refusal_says(by: Callable[[str | None], Keyed]) -> None:
    assert by(READER).append("in:x", 1).detail == {"scopes": ["write"]}
    assert by(WRITER).send("POST", "/v0/topics/in:x/claim", {"node": "w"}).detail == {"scopes": ["read"]}
    assert by(OUTSIDER).append("in:x", 1).detail == {"name": "in:x"}
    for client in (by("Zq9unknown"), by(READER), by(OUTSIDER)):
        assert client.secret is not None
        assert client.secret.encode() not in client.append("in:x", 1).raw


# --- names in bodies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("topics", [["out:there"], ["in:watched", "out:there"], ["out:nothing"], ["in:watched", "i"]])
@pytest.mark.parametrize("lenient", [False, True])
def test_a_watch_names_only_what_its_key_may_touch(
    guarded: Server, lane: Lane, topics: list[str], lenient: bool
) -> None:
    with KeyedWatching(guarded, lane, INSIDER) as watching:
        assert watching.create(topics, lenient=lenient).refusal == (403, "forbidden")
        assert watching.create({name: {"tail": True} for name in topics}, lenient=lenient).status == 403
        assert watching.create("in:watched").status == 200


@pytest.mark.parametrize(
    ("router", "source", "dest", "refused"),
    [
        ("in:r", "in:source", "in:dest", False),
        ("also.r", "in:source", "also.dest", False),
        ("in:r", "out:there", "in:dest", True),
        ("in:r", "in:source", "out:there", True),
        ("in:r", "out:new", "out:there", True),
        ("in:r", "i", "in:dest", True),
        ("out:r", "in:source", "in:dest", True),
    ],
)
def test_a_router_joins_only_what_its_key_may_touch(
    inside: Keyed, full: Keyed, router: str, source: str, dest: str, refused: bool
) -> None:
    router = f"{router}{unique()}"
    put = inside.send("PUT", f"/v0/routers/{router}", {"source": source, "dest": dest})
    assert refuses(put) is refused
    assert full.send("GET", f"/v0/routers/{router}").status == (404 if refused else 200)
    full.send("DELETE", f"/v0/routers/{router}")
    assert full.state("out:new").status == 404


def test_an_existing_router_is_not_shown_to_whom_it_is_not_for(inside: Keyed, full: Keyed) -> None:
    router = f"out:{unique()}"
    full.send("PUT", f"/v0/routers/{router}", {"source": "in:source", "dest": "out:there"})
    for method in ("GET", "DELETE"):
        assert inside.send(method, f"/v0/routers/{router}").refusal == (403, "forbidden")
    assert full.send("DELETE", f"/v0/routers/{router}").status == 200


@pytest.mark.parametrize(("dead_letter", "refused"), [("in:dead", False), ("also.dead", False), ("out:dead", True)])
def test_dead_letters_go_only_where_the_key_may(inside: Keyed, full: Keyed, dead_letter: str, refused: bool) -> None:
    name = f"in:{unique('q')}"
    config = {"type": "queue", "dead_letter": dead_letter, "max_deliveries": 1}
    assert refuses(inside.put(name, **config)) is refused
    assert full.state(name).status == (404 if refused else 200)
    other = f"in:{unique('q')}"
    assert refuses(inside.append(other, 1, config=config)) is refused
    assert full.state(other).status == (404 if refused else 200)


def test_a_config_makes_no_topic_without_admin(by: Callable[[str | None], Keyed], full: Keyed) -> None:
    """What exists is written to as before: a producer that always sends its config needs no more than `write`."""
    name = f"in:{unique()}"
    writer = by("key-write-in")
    refused = writer.append(name, 1, config={"type": "queue", "dead_letter": "in:dead", "max_deliveries": 1})
    assert (refused.refusal, refused.detail) == ((403, "forbidden"), {"scopes": ["admin"]})
    assert full.state(name).status == 404
    assert writer.append(name, 1).status == 201
    assert writer.append(name, 1, config={"durability": "fsync"}).status == 200
    assert by("key-write-admin-in").append(f"{name}-c", 1, config={"durability": "fsync"}).status == 201


def test_refusals_name_no_topic_outside(inside: Keyed, full: Keyed) -> None:
    """A destination with another source, a router that goes elsewhere, a cycle, a queue's dead letters."""
    mark = unique("Yp8")
    dest, a, b = f"in:{mark}-dest", f"in:{mark}-a", f"in:{mark}-b"
    hidden, middle, dead = f"out:{mark}-source", f"out:{mark}-middle", f"out:{mark}-dead"
    for router, source, target in (("1", hidden, dest), ("2", a, middle), ("3", middle, b)):
        assert full.send("PUT", f"/v0/routers/in:{mark}-{router}", {"source": source, "dest": target}).status == 201
    full.put(f"in:{mark}-q", type="queue", dead_letter=dead, max_deliveries=1)
    fan_in = inside.send("PUT", f"/v0/routers/in:{mark}-4", {"source": a, "dest": dest})
    moved = inside.send("PUT", f"/v0/routers/in:{mark}-1", {"source": a, "dest": dest})
    cycle = inside.send("PUT", f"/v0/routers/in:{mark}-4", {"source": b, "dest": a})
    shown = inside.state(f"in:{mark}-q")
    assert [answer.status for answer in (fan_in, moved, cycle, shown)] == [409, 409, 409, 200]
    assert fan_in.detail == {"reason": "router_dest_fan_in", "dest": dest, "source": HIDDEN}
    assert moved.detail == {"reason": "router_repoint_forbidden", "source": HIDDEN, "dest": dest}
    assert cycle.detail == {"cycle": [b, a, HIDDEN, b]}
    assert shown["config"]["dead_letter"] == HIDDEN
    for answer in (fan_in, moved, cycle, shown, inside.list(page_size=1_000), inside.get("/v0/routers")):
        assert f"out:{mark}".encode() not in answer.raw
    assert full.send("PUT", f"/v0/routers/in:{mark}-4", {"source": a, "dest": dest}).detail["source"] == hidden
    for router in "123":
        full.send("DELETE", f"/v0/routers/in:{mark}-{router}")


# --- lists -------------------------------------------------------------------------------------------


def pages(client: Client, path: str, what: str, **query: object) -> list[list[str]]:
    """The names of every page."""
    found: list[list[str]] = []
    while True:
        page = client.get(path, **query)
        assert page.status == 200, page
        found.append([row[what] for row in page[f"{what}s"]])
        if "next_cursor" not in page.json or page["next_cursor"] is None:
            return found
        query["cursor"] = page["next_cursor"]


@pytest.mark.parametrize("what", ["topic", "router"])
def test_lists_hold_what_the_key_may_touch(full: Keyed, by: Callable[[str | None], Keyed], what: str) -> None:
    """Names that it may not touch stand before, between and behind those that it may."""
    mark = unique()
    mine = [f"l1:{mark}-{number}" for number in range(5)] + [f"l2.{mark}-{number}" for number in range(4)]
    others = [
        f"{start}{mark}-{number}" for start in ("l", "l1", "l10:", "l1A", "l2", "l2:", "z") for number in range(4)
    ]
    path = f"/v0/{what}s"
    for name in mine + others:
        config = {} if what == "topic" else {"source": "in:source", "dest": "in:dest"}
        assert full.send("PUT", f"{path}/{name}", config).status == 201

    def all_pages(client: Keyed, **query: object) -> list[str]:
        return [name for page in pages(client, path, what, page_size=1_000, **query) for name in page]

    limited = by("lists")
    assert [name for name in all_pages(full) if mark in name] == sorted(mine + others)
    assert all_pages(limited) == sorted(mine)
    for size in range(1, len(mine) + 2):
        listed = pages(limited, path, what, page_size=size)
        sizes = [len(page) for page in listed]
        assert sizes[:-1] == [size] * (len(sizes) - 1), "filtered before the page is cut"
        assert len(listed) == -(-len(mine) // size), "no page that only says that there are no more"
        assert [name for page in listed for name in page] == sorted(mine)
    for prefix in ("l1:", "l1", f"l1:{mark}"):
        assert all_pages(limited, prefix=prefix) == mine[:5]
    assert all_pages(limited, prefix="l") == sorted(mine)
    for outside in ("in:", "z", f"l10:{mark}", "l1A"):
        assert all_pages(limited, prefix=outside) == []
    if what == "router":
        assert all_pages(full, source="in:source", prefix="l1:") == mine[:5]
        assert all_pages(limited, source="in:source") == [], "it would learn that there is such a topic"
        for name in (mine[0], mine[-1]):
            shown = limited.send("GET", f"{path}/{name}")
            assert (shown["source"], shown["dest"]) == (HIDDEN, HIDDEN)
        listed = limited.get(path, page_size=1)["routers"][0]
        assert (listed["source"], listed["dest"]) == (HIDDEN, HIDDEN)
        assert all_pages(limited, dest="in:source") == []
    for name in mine + others:
        full.send("DELETE", f"{path}/{name}")


@pytest.mark.parametrize("accept", ["text/plain", "application/json"])
def test_figures_name_what_the_key_may_touch(full: Keyed, by: Callable[[str | None], Keyed], accept: str) -> None:
    mine, other = f"in:{unique('Yp8')}", f"out:{unique('Yp8')}"
    full.append(mine, 1)
    full.append(other, 1)

    def seen(secret: str, query: str) -> list[bool]:
        status, _, raw = full._transport.ask("GET", f"/v0/metrics{query}", None, {**bearer(secret), "Accept": accept})
        assert status == 200
        return [name.encode() in raw for name in (mine, other)]

    assert seen(FULL, "?topic=out:*")[1]
    assert seen(FULL, "?topic=in:*")[0]
    for query in ("", "?topic=*", "?topic=out:*", "?topic=o*"):
        assert not seen("key-read-in", query)[1]
    for query in ("", "?topic=*", "?topic=in:*", "?topic=i*"):
        assert not seen("key-read-out", query)[0]
    for name in (mine, other):
        full.drop(name)


def test_a_cursor_of_another_key_opens_nothing(full: Keyed, inside: Keyed) -> None:
    first = full.list(page_size=1)
    assert first["next_cursor"]
    listed = inside.list(cursor=first["next_cursor"], page_size=1_000)
    assert all(row["topic"].startswith(("in:", "also.")) for row in listed["topics"])


def test_routers_that_go_with_a_topic_are_named_only_to_whom_they_are_for(full: Keyed, inside: Keyed) -> None:
    name, mine, other = f"in:{unique()}", f"in:{unique('r')}", f"out:{unique('r')}"
    full.put(name)
    for router in (mine, other):
        full.send("PUT", f"/v0/routers/{router}", {"source": name, "dest": "out:there"})
    assert inside.drop(name)["routers_removed"] == [mine]
    assert full.send("GET", f"/v0/routers/{other}").status == 404


# --- headers -----------------------------------------------------------------------------------------

BAD = [
    b"",
    b"Bearer",
    b"Bearer ",
    FULL.encode(),
    b"Basic " + FULL.encode(),
    b"Basic ZnVsbDo=",
    b"Digest username=full",
    b"Token " + FULL.encode(),
    b"Bearer" + FULL.encode(),
    b"Bearer\t" + FULL.encode(),
    b"Bearer: " + FULL.encode(),
    b"Bearer " + FULL.encode() + b" " + FULL.encode(),
    b"Bearer " + FULL.encode() + b",",
    b"Bearer " + FULL.encode() + b", Bearer " + FULL.encode(),
    b'Bearer "' + FULL.encode() + b'"',
    b"Bearer " + FULL.encode() + b":",
    b"Bearer \xff\xfe\x80",
    b"Bearer \xc3\xbc",
    b"\xff",
    b"Bearer " + b"x" * 6_000,
]


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value[:28]))
@pytest.mark.parametrize("path", ["/v0/topics", "/v0/topics/in:watched", "/v0/ws", "/v0/topics/in:q/work?node=w"])
def test_a_bad_header_is_401(guarded: Server, lane: Lane, value: bytes, path: str) -> None:
    with guarded.client(lane) as client:
        status, headers, raw = client._transport.ask("GET", path, None, {"Authorization": value})
        answer = Answer(status=status, headers=headers, raw=raw)
        assert answer.refusal == (401, "unauthorized")
        assert headers["www-authenticate"] == "Bearer"
        assert client.get("/v0/health").status == 200


@pytest.mark.parametrize("value", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer  {}", "Bearer {} "])
def test_a_good_header_in_every_spelling(guarded: Server, lane: Lane, value: str) -> None:
    if lane == "http2":
        value = value.rstrip()  # blanks around a value are not allowed there
    with guarded.client(lane) as client:
        assert client.send("GET", "/v0/topics", headers={"authorization": value.format(FULL)}).status == 200


@pytest.mark.parametrize("second", [FULL, OTHER, "unknown", ""])
def test_two_headers_are_none(guarded: Server, second: str) -> None:
    with Wire(guarded.port) as wire:
        lines = (f"Authorization: Bearer {FULL}", f"Authorization: Bearer {second}")
        for order in (lines, lines[::-1]):
            answer = wire.ask(request(path="/v0/topics", headers=order))
            assert answer.refusal == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("second", [FULL, OTHER, "unknown"])
def test_two_headers_are_none_over_http2(guarded: Server, second: str) -> None:
    with H2Wire(guarded.port) as wire:
        pairs = [("authorization", f"Bearer {FULL}"), ("authorization", f"Bearer {second}")]
        for order in (pairs, pairs[::-1]):
            stream = wire.finish(wire.open("GET", "/v0/topics", *order, end=True))
            assert stream.headers[":status"] == "401"
            assert stream.headers["www-authenticate"] == "Bearer"


def test_without_keys_headers_are_not_looked_at(api: Client) -> None:
    for value in ("Bearer x", "nonsense", "Basic eA=="):
        assert api.send("GET", "/v0/topics", headers={"Authorization": value}).status == 200
    assert api.get("/v0/topics", token="x").status == 200


# --- keys in the query -------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [route for route in ROUTES if route.path not in STREAMS], ids=str)
def test_a_key_in_the_query_is_for_streams_alone(full: Keyed, route: Route) -> None:
    path = route.path.format(name=f"in:{unique()}")
    assert status_of(full, route.method, f"{path}?token={FULL}", None, route.body) == 401
    assert status_of(full, route.method, f"{path}?token={FULL}", "unknown", route.body) == 401
    assert status_of(full, route.method, f"{path}?token=unknown", FULL, route.body) in route.success


@pytest.mark.parametrize("stream", sorted(STREAMS))
def test_keys_in_the_query_of_a_stream(full: Keyed, stream: str) -> None:
    """404: let through, and there is no such stream."""
    path = stream.format(name="in:none")
    path += "&" if "?" in path else "?"
    good = [
        f"token={FULL}",
        f"token={quote(ODD, safe='')}",
        f"token={quote_plus(ODD)}",
        "".join(["token=", *(f"%{sign:02x}" for sign in ODD.encode())]),
        f"%74oken={FULL}",
        f"x=1&token={FULL}&y=2",
        f"token={FULL}&token=unknown",
        f"token={FULL}&token=",
    ]
    bad = [
        "token=",
        "token",
        "token=unknown",
        f"token=+{FULL}",
        f"token=Bearer+{FULL}",
        f"token={FULL}%00",
        f"token=unknown&token={FULL}",
        f"token=&token={FULL}",
        f"Token={FULL}",
        f"access_token={FULL}",
        f"key={FULL}",
        f"token={ODD.partition('&')[0]}",
        "token=%C3%BC",
    ]
    assert [status_of(full, "GET", path + query, None) for query in good] == [404] * len(good)
    assert [status_of(full, "GET", path + query, None) for query in bad] == [401] * len(bad)
    assert status_of(full, "GET", f"{path}token={FULL}", "unknown") == 401
    assert status_of(full, "GET", f"{path}token=%ff", None) in (400, 401)
    assert status_of(full, "GET", f"{path}token=key-delete-admin-any", None) == 403


def test_streams_open_with_a_key_in_the_query(guarded: Server, lane: Lane) -> None:
    with KeyedWatching(guarded, lane, ODD) as watching:
        session = watching.create("in:watched")
        token = quote(ODD, safe="")
        stream = watching.get(f"{session['stream_url']}?token={token}", key=None)
        assert stream.status == 200
        stream.wait_caught_up("in:watched")
    with KeyedWorking(guarded, lane, INSIDER) as working:
        queue = working.queue(f"in:{unique('q')}")
        queue.produce("job")
        working.secret = None
        opened = working.get(f"/v0/topics/{queue.name}/work?node=w&token={INSIDER}", queue=queue.name, node="w")
        assert opened.status == 200
        assert opened.job()["data"] == "job"


# --- probes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PROBES)
@pytest.mark.parametrize("secret", [None, "unknown", FULL, "key-delete-out"])
def test_probes_need_no_key(full: Keyed, path: str, secret: str | None) -> None:
    assert status_of(full, "GET", path, secret) == 200
    assert status_of(full, "HEAD", path, secret) == 200


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Probes need a key, and the keys are in a file."""
    folder = tmp_path_factory.mktemp("strict")
    keys = folder / "keys"
    keys.write_text(f"# the keys\n{FULL}\n\nprobing:delete:none:\n")
    environ = {"TOPICS_PROBE_AUTH": 1, "TOPICS_API_KEYS_FILE": keys}
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        with Keyed(server.port, "http1", FULL) as api:
            eventually(lambda: api.get("/v0/ready").status == 200, what="readiness")
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.mark.parametrize("path", PROBES)
def test_probes_need_a_key_if_told_so(strict: Server, lane: Lane, path: str) -> None:
    with strict.client(lane) as client:
        for method in ("GET", "HEAD"):
            assert [status_of(client, method, path, secret) for secret in (None, "unknown")] == [401, 401]
            assert [status_of(client, method, path, secret) for secret in (FULL, "probing")] == [200, 200]
        assert status_of(client, "GET", f"{path}?token={FULL}", None) == 401


# --- one connection, several keys --------------------------------------------------------------------


def test_pipelined_requests_keep_their_own_rights(guarded: Server) -> None:
    """The same head but for the key, again and again, in one packet; appends that travel together too."""
    name = f"in:{unique()}"
    body = b'{"records":[{"data":1}]}'
    allowed = {FULL: True, READER: False, WRITER: True, INSIDER: True, OUTSIDER: False, "unknown": None, None: None}
    order = [secret for _ in range(8) for secret in allowed]
    sent = b""
    for secret in order:
        lines = tuple(f"{header}: {value}" for header, value in bearer(secret).items())
        sent += request("POST", f"/v0/topics/{name}", body, headers=lines)
        sent += request("GET", f"/v0/topics/{name}", headers=lines)
    with Wire(guarded.port) as wire:
        wire.send(sent)
        got = [wire.answer().status for _ in range(2 * len(order))]
    readers = {**allowed, READER: True, WRITER: False}
    expected = []
    for secret in order:
        for rights in (allowed, readers):
            right = rights[secret]
            expected.append(401 if right is None else 200 if right else 403)
    got[0] = 200 if got[0] == 201 else got[0]
    assert got == expected
    with Keyed(guarded.port, "http1", FULL) as api:
        assert api.state(name)["count"] == 8 * sum(right is True for right in allowed.values())


def test_streams_of_one_http2_connection_keep_their_own_rights(guarded: Server) -> None:
    expected = {FULL: "200", READER: "200", WRITER: "403", OUTSIDER: "403", "unknown": "401", None: "401"}
    with H2Wire(guarded.port) as wire:
        asked: list[tuple[str | None, int]] = []
        for _ in range(5):
            for secret in expected:
                pairs: list[tuple[str, Any]] = [(header.lower(), value) for header, value in bearer(secret).items()]
                asked.append((secret, wire.open("GET", "/v0/topics/in:watched", *pairs, end=True)))
        got = [(secret, wire.finish(number).headers[":status"]) for secret, number in asked]
    assert got == [(secret, expected[secret]) for secret, _ in asked]


def test_a_key_of_the_same_length_in_the_same_head_is_another(guarded: Server) -> None:
    """A head that was seen before is not parsed again: what is remembered of it depends on every byte."""
    same = "full-accesx"
    assert len(same) == len(FULL)
    with Wire(guarded.port) as wire:
        for _ in range(20):
            for secret, status in ((FULL, 200), (same, 401)):
                answer = wire.ask(request(path="/v0/topics/in:watched", headers=(f"Authorization: Bearer {secret}",)))
                assert answer.status == status


def test_a_refusal_leaves_the_connection_usable(guarded: Server) -> None:
    """Its body is passed by, not read as the next request."""
    smuggled = request("GET", "/v0/topics", headers=(f"Authorization: Bearer {FULL}",))
    with Wire(guarded.port) as wire:
        for _ in range(3):
            answer = wire.ask(request("POST", "/v0/topics/in:x", smuggled, headers=("Authorization: Bearer no",)))
            assert answer.status == 401
        assert wire.ask(request(path="/v0/topics", headers=(f"Authorization: Bearer {FULL}",))).status == 200


# --- starting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        *("Zq9s:+", "Zq9s:sudo", "Zq9s:r:a\udcff"),
        *(
            pytest.param(keys, marks=pytest.mark.full)  # unit/test_keys.py has them all
            for keys in ("Zq9s:read+", ":read", "Zq9s:read:|", "Zq9s,Zq9s", ",", "Zq9s x")
        ),
    ],
)
def test_keys_that_can_not_be_read_refuse_to_start(keys: str, tmp_path: Any) -> None:
    ended = run_topics("serve", cwd=tmp_path, TOPICS_API_KEYS=keys, TOPICS_PORT=0)
    assert ended.returncode == 2, ended
    assert "TOPICS_API_KEYS" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Zq9" not in ended.stderr + ended.stdout


def test_no_process_shows_the_keys_it_was_started_with(guarded: Server) -> None:
    for name, pid in guarded.pids().items():
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"TOPICS_DATA_DIR=" in environ, name
        assert b"TOPICS_API_KEYS" not in environ, name
        assert not [secret for secret in (FULL, OTHER, READER, ODD) if secret.encode() in environ], name


def test_a_server_without_keys_says_so_loudly(server: Server, guarded: Server) -> None:
    assert "level=warning process=supervisor event=no_api_keys" in server.output()
    assert "no_api_keys" not in guarded.output()
    for secret in (FULL, OTHER, READER, ODD):
        assert secret not in guarded.output()


# --- what refusals cost ------------------------------------------------------------------------------


def _resident_kib(server: Server) -> int:
    pages_held = int(Path(f"/proc/{server.pid_of('gateway-0')}/statm").read_text().split()[1])
    return pages_held * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.mark.parametrize(
    ("path", "secret", "status"),
    [("/v0/topics", "unknown", 401), ("/v0/topics/in:x", WRITER, 403), ("/v0/nothing", FULL, 404)],
)
def test_refusals_cost_no_memory(guarded: Server, path: str, secret: str, status: int) -> None:
    """Whoever has no key can be refused for ever; the server remembers nothing of it but the first time."""
    batch = request(path=path, headers=(f"Authorization: Bearer {secret}",)) * 100

    def ask(batches: int) -> None:
        for _ in range(batches):
            wire.send(batch)
            assert {wire.answer().status for _ in range(100)} == {status}

    with Wire(guarded.port) as wire:
        ask(20)
        before = _resident_kib(guarded)
        ask(100)
        assert _resident_kib(guarded) - before < 4_096  # 0.4 KiB each would be more
