"""Every route with every set of scopes, with no prefixes, with those of its names and with others, from every page and
by every reader: what a gateway decides by itself, from the bytes of the head to the question that it asks a shard.

What must come out stands in e2e/permits.py. What the others decide is asked of them, with the question that the gateway
would send: an append whose config would make a topic of a real shard, routers of real rules.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from e2e.keyed import AREAS, KEYS, LISTED_HOST, LISTED_ORIGIN, SCOPES, Secret, bearer
from e2e.permits import (
    NAME,
    NOBODY,
    OUTSIDE,
    ROWS,
    STATUS,
    THROUGH,
    UNKNOWN,
    Cell,
    Lists,
    Verdict,
    covers,
    every_cell,
    may_create,
    verdict_of,
)
from model import Record, Shard, error_of
from parts import metrics, queues, routers, watches
from routerplay import Play, run

from topics.actors import messages
from topics.errors import ApiError
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.api.types import Gather, Outcome, Request, Response
from topics.gateway.auth import Guard
from topics.gateway.http1.head import Head, Heads
from topics.gateway.origins import Origins
from topics.keys import HIDDEN, Key, digest_of, parse_keys
from topics.settings import Settings
from topics.shm.counters import Board
from topics.storage.config import TopicConfig

NOTHING = [Secret(f"key-of-no-scope-{area}", frozenset(), area) for area in AREAS]  # none that could be configured
ENDED = Secret("key-that-has-ended", frozenset(SCOPES), "any")
ALL = [*KEYS, *NOTHING, NOBODY, UNKNOWN, ENDED]
SOME = [key for key in ALL if len(key.scopes) in (0, 1, 4) and (key.area == "any" or len(key.scopes) == 4)]
_PREFIXES = {area: tuple(text.split("|")) if text else () for area, text in AREAS.items()}
RING = (
    *parse_keys(",".join(key.entry for key in KEYS), source="a test"),
    *(Key(digest_of(key.secret.encode()), 0, _PREFIXES[key.area], 90 + n) for n, key in enumerate(NOTHING)),
    Key(digest_of(ENDED.secret.encode()), number=99, expires_ms=1),
)
KEY_OF = {key: next(one for one in RING if one.digest == digest_of(key.secret.encode())) for key in (*KEYS, *NOTHING)}

KEYS_AND_LISTS = Lists(keys=True, names=True)


class Gateway:
    """Heads and handlers, linked to nobody: what is let through is a question."""

    def __init__(self, lists: Lists = KEYS_AND_LISTS) -> None:
        settings = Settings(
            api_keys=RING if lists.keys else (),
            allowed_hosts=(LISTED_HOST,) if lists.names else (),
            allowed_origins=(LISTED_ORIGIN,) if lists.names else (),
        )
        handlers = Handlers(settings, shards=2, board=Board.create(["shard-0"]))
        self.routes = Routes(handlers, watches(shards=2), routers(shards=2), queues(shards=2), metrics(shards=2))
        self.heads = Heads(
            self.routes,
            max_body_bytes=settings.max_body_bytes,
            guard=Guard(settings.api_keys, probes=False),
            origins=Origins(settings),
        )

    def outcome(self, head: Head, body: bytes) -> Outcome:
        assert head.route is not None
        route = head.route
        return route.handler(
            Request(
                name=route.name,
                shard=route.shard,
                query=route.query,
                body=body,
                idempotency_key=None,
                started_ns=0,
                headers=head.headers or {},
                key=head.key,
            )
        )

    def asked(self, method: str, path: str, key: Secret, body: object = None) -> Any:
        """What a request that is let through asks of others."""
        content = b"" if body is None else json.dumps(body).encode()
        head = self.heads.get(raw(method, path, bearer(key.secret), content))
        if head.error is not None:
            raise head.error
        return self.outcome(head, content)


def raw(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"{name}: {value}" for name, value in ({"Host": "localhost"} | headers).items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


def found(gateway: Gateway, cell: Cell) -> Verdict:
    row, key, page, reader = cell
    secret = {} if key is NOBODY else bearer(key.secret)
    path = row.route.path.format(name=NAME)
    head = gateway.heads.get(raw(row.route.method, path, page.headers | reader.headers | secret, row.content))
    error = head.error
    if error is None and not row.probe:
        try:
            gateway.outcome(head, row.content)
        except ApiError as refused:
            error = refused
    return THROUGH if error is None or error.status in row.route.success else reason(error)


def reason(error: ApiError) -> Verdict:
    detail = error.detail or {}
    assert error.status in (401, 403, 406, 421), error
    if error.status != 403:
        return {401: "key", 406: "reader", 421: "host"}[error.status], None
    (kind,) = detail
    return {"scopes": ("scopes", detail.get(kind)), "name": ("name", detail.get(kind))}.get(kind, ("page", None))


# --- the matrix --------------------------------------------------------------------------------------


def test_no_route_is_missing() -> None:
    """Of the server's own table; a route that somebody adds has to be thought about in e2e/keyed.py and permits.py."""
    routes = Gateway().routes
    asked = {routes.find(row.route.method, row.route.path.format(name=NAME)).number for row in ROWS}
    assert asked == set(range(1, len(routes.labels)))
    heads = {routes.find("HEAD", row.route.path.format(name=NAME)).number for row in ROWS if row.route.method == "HEAD"}
    gets = {number for number, (method, _) in enumerate(routes.labels) if method == "GET"}
    others = {routes.find("GET", row.route.path.format(name=NAME)).number for row in ROWS if row.streams}
    assert gets - heads == others | {routes.find("GET", "/v0/ws").number}


def test_no_combination_is_missing() -> None:
    for area in AREAS:
        scopes = {key.scopes for key in ALL if key.area == area}
        assert len(scopes) == 2 ** len(SCOPES), area


@pytest.mark.parametrize(
    ("lists", "keys"),
    [
        (KEYS_AND_LISTS, ALL),
        (Lists(keys=True, names=False), SOME),
        (Lists(keys=False, names=True), [NOBODY, UNKNOWN]),
        (Lists(keys=False, names=False), [NOBODY, UNKNOWN]),
    ],
    ids=["keys and lists", "keys", "lists", "neither"],
)
def test_every_cell(lists: Lists, keys: list[Secret]) -> None:
    gateway = Gateway(lists)
    wrong, counts = [], Counter[str]()
    for cell in every_cell(keys):
        expected = verdict_of(cell, lists, known=cell.key in KEY_OF)
        counts[expected[0]] += 1
        if (told := found(gateway, cell)) != expected:
            wrong.append((str(cell.row), cell.key.secret, cell.page, cell.reader, expected, told))
    assert not wrong, (len(wrong), wrong[:5])
    assert set(counts) == {*STATUS, THROUGH[0]} - (set() if lists.keys else {"key", "scopes", "name"}) - (
        set() if lists.checks_hosts else {"host"}
    )


# --- what the gateway leaves to others ---------------------------------------------------------------


def test_who_may_make_a_topic_with_a_config(tmp_path: Path) -> None:
    """For every key that may write: the head that the gateway sends, to a shard with such a topic and without one."""
    shard, gateway = Shard(tmp_path), Gateway()
    shard.append("in:there", [Record(b"1")])
    body = {"records": [{"data": 1}], "config": {"type": "queue"}}
    writers = [key for key in KEYS if "write" in key.scopes and covers(key.area, NAME)]
    assert len(writers) == 16
    for number, key in enumerate(writers):
        for name in ("in:there", f"in:new-{number}"):
            head = gateway.asked("POST", f"/v0/topics/{name}", key, body).head

            def append(head: messages.Append = head) -> bool:
                made: bool = shard.append(head.topic, [Record(b"1")], config=head.config, modest=head.modest).created
                return made

            if name == "in:there" or may_create(key):
                assert append() is (name != "in:there"), (key.secret, name)
            else:
                error = error_of(append)
                assert (error.code, error.detail) == ("forbidden", {"scopes": ["admin"]}), key.secret
                assert name not in shard.engine.topics


# --- names outside of the prefixes -------------------------------------------------------------------

MINE, ALSO = "in:here", "also.here"
NAMES = (MINE, ALSO, OUTSIDE)
SHOWN = {area: {name: name if covers(area, name) else HIDDEN for name in NAMES} for area in AREAS}
INSIDERS = [key for key in KEYS if key.area != "out"]


def may(key: Secret, *scopes: str) -> bool:
    return key.scopes >= set(scopes)


def said(outcome: Any, answer: Any, *, gathered: bool = False) -> dict[str, Any]:
    response = outcome.render([answer]) if gathered else outcome.render(answer, b"")
    assert isinstance(response, Response)
    content: dict[str, Any] = json.loads(bytes(response.body) + response.tail)
    return content


def router_row(source: str, dest: str) -> messages.RouterRow:
    return messages.RouterRow("in:r", source, dest, True, True, None, False, "at_least_once", 0)


@pytest.mark.parametrize(("source", "dest"), list(itertools.permutations(NAMES, 2)))
def test_answers_about_routers_name_what_the_key_may_touch(source: str, dest: str) -> None:
    gateway, row = Gateway(), router_row(source, dest)
    for key in INSIDERS:
        shown = {"source": SHOWN[key.area][source], "dest": SHOWN[key.area][dest]}
        told = []
        if may(key, "read"):
            told.append(said(gateway.asked("GET", "/v0/routers/in:r", key), row))
            listed = gateway.asked("GET", "/v0/routers", key)
            assert listed.head.prefixes == KEY_OF[key].prefixes
            told += said(listed, messages.RoutersListed([row], False))["routers"]
        if may(key, "admin"):  # a change of its options, asked for with the names that it was told
            asked = {"source": MINE, "dest": ALSO}
            told.append(said(gateway.asked("PUT", "/v0/routers/in:r", key, asked), row))
            if HIDDEN in shown.values():
                with pytest.raises(ApiError) as caught:
                    gateway.asked("PUT", "/v0/routers/in:r", key, shown)
                assert caught.value.code == "invalid_request", "what is sent back as it was told configures nothing"
        for one in told:
            assert {name: one[name] for name in shown} == shown, key.secret


def test_answers_about_topics_name_what_the_key_may_touch() -> None:
    gateway = Gateway()
    for key, name in itertools.product(INSIDERS, NAMES):
        if may(key, "read"):
            config = TopicConfig(dead_letter=name, max_deliveries=1)
            report = messages.TopicReport(1, 1, 1, 1, config, 0, 0, 0)
            told = said(gateway.asked("GET", f"/v0/topics/{MINE}", key), report, gathered=True)
            assert told["config"]["dead_letter"] == SHOWN[key.area][name], key.secret
            for path in ("/v0/topics", "/v0/metrics"):
                asked = gateway.asked("GET", path, key)
                assert {call.head.prefixes for call in asked.calls} == {KEY_OF[key].prefixes}
        if may(key, "delete"):
            dropped = gateway.asked("DELETE", f"/v0/topics/{MINE}", key)
            assert isinstance(dropped, Gather)
            cascade = dropped.render([messages.TopicDropped(True)])
            told = said(cascade, messages.RoutersDropped([MINE, name]))
            assert set(told["routers_removed"]) == {MINE, name} - ({name} if SHOWN[key.area][name] == HIDDEN else set())


def test_conflicts_of_routers_name_what_the_key_may_touch(tmp_path: Path) -> None:
    """A second source, a cycle, another pair: 409s of a real router process, asked by every key that may configure."""
    gateway = Gateway()
    askers = [key for key in INSIDERS if may(key, "admin")]
    assert len(askers) == 16

    async def script(play: Play) -> None:
        await play.put("in:r", OUTSIDE, MINE)
        await play.put("in:q", MINE, "in:next")
        await play.put("out:p", ALSO, OUTSIDE)
        for key in askers:
            for router, source, dest, code in (
                ("in:new", ALSO, MINE, "topic_exists_incompatible"),
                ("in:new", "in:next", ALSO, "router_cycle"),
                ("in:r", ALSO, MINE, "topic_exists_incompatible"),
            ):
                body = {"source": source, "dest": dest}
                head = gateway.asked("PUT", f"/v0/routers/{router}", key, body).head
                error = await play.command(play.router._put, head)
                assert isinstance(error, ApiError), error
                assert (error.code, error.status) == (code, 409)
                text = f"{error.message} {json.dumps(error.detail)}"
                named = HIDDEN if key.area == "in" else OUTSIDE
                assert named in text, (key.secret, text)
                assert (OUTSIDE in text) is (key.area == "any"), (key.secret, text)

    run(tmp_path, script)
