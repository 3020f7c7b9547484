"""The endpoints of routers in both lanes: every field, default, status and error, the graph, and the cascade.

What is copied, and how, is test_forwarding.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest

from .client import Client, unique
from .routing import (
    data_of,
    drained,
    drop_router,
    get_router,
    list_routers,
    put_router,
    route,
    topic_names,
    wait_data,
    wait_forwarded,
)
from .server import Server, eventually

pytestmark = pytest.mark.e2e

DEFAULTS = {
    "preserve_node": True,
    "preserve_tag": True,
    "filter": None,
    "allow_cycle": False,
    "guarantee": "at_least_once",
}


@pytest.fixture
def a() -> str:
    return unique("ra")


@pytest.fixture
def b() -> str:
    return unique("rb")


@pytest.fixture
def c() -> str:
    return unique("rc")


# --- create and change -------------------------------------------------------------------------------


def test_a_new_router_shows_every_default(api: Client, a: str, b: str) -> None:
    answer = put_router(api, f"{a}->{b}", a, b)
    assert answer.status == 201
    assert answer.without_performance() == {
        "router": f"{a}->{b}",
        "created": True,
        "source": a,
        "dest": b,
        **DEFAULTS,
    }
    shown = get_router(api, f"{a}->{b}")
    assert shown.status == 200
    assert shown.without_performance() == {
        "router": f"{a}->{b}",
        "source": a,
        "dest": b,
        **DEFAULTS,
        "forwarded_total": 0,
    }


def test_every_field_is_kept(api: Client, a: str, b: str) -> None:
    options = {
        "preserve_node": False,
        "preserve_tag": False,
        "filter": ["tag", "Glob", "public:*"],
        "allow_cycle": True,
        "guarantee": "exactly_once",
    }
    answer = put_router(api, a, a, b, create_dest=True, **options)
    assert answer.without_performance() == {"router": a, "created": True, "source": a, "dest": b, **options}
    shown = get_router(api, a).without_performance()
    assert shown == {"router": a, "source": a, "dest": b, **options, "forwarded_total": 0}


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (["tag", "Eq", "x"], ["tag", "Eq", "x"]),
        (["tag", "Eq", "x*"], ["tag", "Eq", "x*"]),
        (["tag", "Eq", ""], ["tag", "Eq", ""]),
        (["tag", "Glob", "x*"], ["tag", "Glob", "x*"]),
        (["tag", "Glob", "*"], ["tag", "Glob", "*"]),
        ("x*", ["tag", "Eq", "x*"]),
        (None, None),
    ],
)
def test_filters_of_the_language_of_matches(api: Client, a: str, b: str, sent: object, shown: object) -> None:
    assert put_router(api, a, a, b, filter=sent)["filter"] == shown
    assert get_router(api, a)["filter"] == shown


def test_the_same_again_changes_nothing(api: Client, a: str, b: str) -> None:
    first = put_router(api, a, a, b, guarantee="exactly_once").without_performance()
    again = put_router(api, a, a, b, guarantee="exactly_once")
    assert again.status == 200
    assert again.without_performance() == {**first, "created": False}


@pytest.mark.parametrize(
    "change",
    [
        {"preserve_node": False},
        {"preserve_tag": False},
        {"filter": ["tag", "Eq", "x"]},
        {"allow_cycle": True},
        {"guarantee": "exactly_once"},
    ],
)
def test_each_option_can_be_changed_and_is_a_declaration(
    api: Client, a: str, b: str, change: dict[str, object]
) -> None:
    route(api, a, b, name=a)
    changed = put_router(api, a, a, b, **change)
    assert changed.status == 200
    expected = {"router": a, "created": False, "source": a, "dest": b, **DEFAULTS}
    assert changed.without_performance() == {**expected, **change}
    assert get_router(api, a)["filter"] == change.get("filter")
    back = put_router(api, a, a, b)  # what is left out takes its default, as for topics
    assert back.status == 200
    assert back.without_performance() == expected


def test_a_router_may_be_called_anything_a_topic_may(api: Client, a: str, b: str) -> None:
    for name in (f"{a}.x_y:z-1", "0" + a, a + "x" * (255 - len(a))):
        assert put_router(api, name, a, b).status == 201
        assert get_router(api, name)["router"] == name
        assert drop_router(api, name)["deleted"] is True


def test_the_arrow_of_a_name_may_be_escaped(api: Client, a: str, b: str) -> None:
    assert put_router(api, quote(f"{a}->{b}", safe=""), a, b)["router"] == f"{a}->{b}"
    assert put_router(api, f"{a}->{b}", a, b).status == 200
    assert get_router(api, f"{a}-%3E{b}").status == 200


def test_routers_and_topics_have_names_of_their_own(api: Client, a: str, b: str) -> None:
    route(api, a, b, name=b)
    assert api.drop(b)["routers_removed"] == [b]
    assert get_router(api, b).status == 404
    assert api.state(a).status == 200


# --- what is refused ---------------------------------------------------------------------------------


def rule_with(name: str, value: object) -> dict[str, object]:
    return {"source": "{a}", "dest": "{b}", name: value}


NO_FLAGS: tuple[object, ...] = ("true", 1, None, [])
BAD: list[tuple[dict[str, object], str]] = [
    ({"dest": "{b}"}, "no source"),
    ({"source": "{a}"}, "no dest"),
    ({}, "nothing"),
    ({"source": "{a}", "dest": "{a}"}, "one topic"),
    ({"source": "", "dest": "{b}"}, "empty source"),
    ({"source": "{a}", "dest": "no/slash"}, "bad dest"),
    ({"source": "-{a}", "dest": "{b}"}, "bad source"),
    ({"source": "{a}->x", "dest": "{b}"}, "an arrow is no part of a topic name"),
    ({"source": "x" * 256, "dest": "{b}"}, "long source"),
    ({"source": None, "dest": "{b}"}, "null source"),
    ({"source": 1, "dest": "{b}"}, "number"),
    ({"source": ["{a}"], "dest": "{b}"}, "array"),
    *(
        (rule_with("filter", bad), f"filter {bad!r}")
        for bad in (
            [],
            ["tag"],
            ["tag", "Eq"],
            ["tag", "Eq", "x", "y"],
            ["tag", "eq", "x"],
            ["tag", "Prefix", "x"],
            ["node", "Eq", "x"],
            ["tag", "Glob", "x"],
            ["tag", "Glob", "*x"],
            ["tag", "Glob", "x*y*"],
            ["tag", "Glob", ""],
            ["tag", "Eq", 1],
            ["tag", "Eq", None],
            [["tag", "Eq", "x"]],
            {"tag": "x"},
            7,
            True,
        )
    ),
    *(
        (rule_with(name, bad), f"{name} {bad!r}")
        for name in ("preserve_node", "preserve_tag", "create_dest", "allow_cycle")
        for bad in NO_FLAGS
    ),
    *(
        (rule_with("guarantee", bad), f"guarantee {bad!r}")
        for bad in ("at_most_once", "", "EXACTLY_ONCE", None, 1, True)
    ),
]


@pytest.mark.parametrize("body", [body for body, _ in BAD], ids=[name for _, name in BAD])
def test_bad_rules_are_refused_and_leave_nothing(api: Client, a: str, b: str, body: dict[str, object]) -> None:
    text = json.dumps(body).replace("{a}", a).replace("{b}", b)
    answer = api.send("PUT", f"/v0/routers/{a}", content=text.encode())
    assert answer.refusal == (400, "invalid_request")
    assert get_router(api, a).refusal == (404, "router_not_found")
    assert topic_names(api, a) == topic_names(api, b) == []


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'"x"', b"{", b'{"source":"x","dest":"y"', b"\xff"])
def test_bodies_that_are_no_rule(api: Client, a: str, content: bytes) -> None:
    assert api.send("PUT", f"/v0/routers/{a}", content=content).refusal == (400, "invalid_request")
    assert get_router(api, a).status == 404


@pytest.mark.parametrize("name", ["-x", ".x", ">x", "a%20b", "a%2Fb", "%C3%A9", "a*", "x" * 256, "a%00", "a~b"])
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_names_that_are_refused(api: Client, a: str, b: str, method: str, name: str) -> None:
    body = {"source": a, "dest": b} if method == "PUT" else None
    assert api.send(method, f"/v0/routers/{name}", body).refusal == (400, "invalid_request")
    assert topic_names(api, a) == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v0/routers/x"), ("PATCH", "/v0/routers/x"), ("POST", "/v0/routers"), ("DELETE", "/v0/routers")],
)
def test_other_methods_are_not_allowed(api: Client, method: str, path: str) -> None:
    assert api.send(method, path, {}).refusal == (405, "method_not_allowed")


def test_a_path_below_a_router_does_not_exist(api: Client, a: str, b: str) -> None:
    route(api, a, b, name=a)
    assert api.get(f"/v0/routers/{a}/x").refusal == (404, "not_found")


# --- topics that a router makes ----------------------------------------------------------------------


def test_both_topics_are_made_with_defaults(api: Client, a: str, b: str, c: str) -> None:
    api.put(c)
    route(api, a, b)
    default = api.state(c).json
    for made in (a, b):
        state = api.state(made)
        assert (state["type"], state["head_seq"], state["count"]) == ("log", 0, 0)
        assert state["config"] == default["config"]


def test_topics_that_exist_stay_as_they_are(api: Client, a: str, b: str) -> None:
    api.put(a, durability="fsync", cap_records=7, ttl_ms=60_000, priority=3)
    api.put(b, durability="memory", cap_bytes=9_999, type="queue")
    before = [api.state(name)["config"] for name in (a, b)]
    route(api, a, b)
    assert [api.state(name)["config"] for name in (a, b)] == before
    assert api.state(b)["type"] == "queue"


def test_without_create_dest_the_destination_must_exist(api: Client, a: str, b: str) -> None:
    answer = put_router(api, a, a, b, create_dest=False)
    assert answer.refusal == (404, "topic_not_found")
    assert answer.detail == {"topic": b}
    assert topic_names(api, a) == topic_names(api, b) == []
    assert get_router(api, a).status == 404
    api.put(b)
    assert put_router(api, a, a, b, create_dest=False).status == 201
    assert topic_names(api, a) == [a]
    assert put_router(api, a, a, b, create_dest=False, guarantee="exactly_once").status == 200


# --- the graph ---------------------------------------------------------------------------------------


def test_a_second_source_is_refused(api: Client, a: str, b: str, c: str) -> None:
    route(api, a, b)
    answer = put_router(api, c, c, b)
    assert answer.refusal == (409, "topic_exists_incompatible")
    assert answer.detail["reason"] == "router_dest_fan_in"
    assert topic_names(api, c) == []
    assert get_router(api, c).status == 404
    assert put_router(api, c, c, b, allow_cycle=True).detail["reason"] == "router_dest_fan_in"
    assert drop_router(api, f"{a}->{b}")["deleted"] is True
    assert put_router(api, c, c, b).status == 201  # it is free again
    assert put_router(api, a, a, b).detail["reason"] == "router_dest_fan_in"


def test_the_source_is_free_when_its_last_router_goes(api: Client, a: str, b: str, c: str) -> None:
    first, second = route(api, a, b, name=f"{a}.1"), route(api, a, b, name=f"{a}.2")
    drop_router(api, first)
    assert put_router(api, c, c, b).detail["reason"] == "router_dest_fan_in"
    drop_router(api, second)
    assert put_router(api, c, c, b).status == 201


def test_a_router_cannot_be_pointed_elsewhere(api: Client, a: str, b: str, c: str) -> None:
    route(api, a, b, name=a)
    for source, dest in ((c, b), (a, c), (b, a)):
        answer = put_router(api, a, source, dest, allow_cycle=True)
        assert answer.refusal == (409, "topic_exists_incompatible")
        assert answer.detail["reason"] == "router_repoint_forbidden"
    assert topic_names(api, c) == []
    assert (get_router(api, a)["source"], get_router(api, a)["dest"]) == (a, b)


def test_a_cycle_of_two_is_refused(api: Client, a: str, b: str) -> None:
    route(api, a, b)
    answer = put_router(api, f"{b}->{a}", b, a)
    assert answer.refusal == (409, "router_cycle")
    assert answer.detail["cycle"] == [b, a, b]
    assert get_router(api, f"{b}->{a}").status == 404


def test_a_longer_cycle_is_refused_and_named(api: Client, a: str, b: str, c: str) -> None:
    d = unique("rd")
    route(api, a, b)
    route(api, c, d)
    route(api, b, c)
    for source, cycle in ((b, [b, a, b]), (c, [c, a, b, c]), (d, [d, a, b, c, d])):
        answer = put_router(api, unique("no"), source, a)
        assert answer.refusal == (409, "router_cycle")
        assert answer.detail["cycle"] == cycle
    assert put_router(api, unique("ok"), d, unique("re")).status == 201  # on from there is no cycle


def test_a_cycle_can_be_asked_for_and_not_be_taken_back(api: Client, a: str, b: str) -> None:
    route(api, a, b)
    assert put_router(api, f"{b}->{a}", b, a, allow_cycle=True).status == 201
    answer = put_router(api, f"{b}->{a}", b, a, allow_cycle=False)
    assert answer.refusal == (409, "router_cycle")
    assert answer.detail["cycle"] == [b, a, b]
    assert get_router(api, f"{b}->{a}")["allow_cycle"] is True
    drop_router(api, f"{a}->{b}")
    assert put_router(api, f"{b}->{a}", b, a, allow_cycle=False).status == 200
    assert put_router(api, f"{a}->{b}", a, b).refusal == (409, "router_cycle")


def test_a_diamond_is_a_second_source(api: Client, a: str, b: str, c: str) -> None:
    d = unique("rd")
    route(api, a, b)
    route(api, a, c)
    route(api, b, d)
    assert put_router(api, unique("no"), c, d).detail["reason"] == "router_dest_fan_in"


# --- delete ------------------------------------------------------------------------------------------


def test_a_delete_may_be_repeated(api: Client, a: str, b: str) -> None:
    route(api, a, b, name=a)
    assert drop_router(api, a).without_performance() == {"router": a, "deleted": True}
    again = drop_router(api, a)
    assert again.status == 200
    assert again.without_performance() == {"router": a, "deleted": False}
    missing = get_router(api, a)
    assert missing.refusal == (404, "router_not_found")


def test_after_a_delete_nothing_more_comes(api: Client, a: str, b: str) -> None:
    name = route(api, a, b)
    api.append(a, 1)
    wait_data(api, b, [1])
    drop_router(api, name)
    api.append(a, 2)
    assert put_router(api, name, a, b).status == 201
    api.append(a, 3)
    wait_data(api, b, [1, 3])
    wait_forwarded(api, {name: 1})


# --- list --------------------------------------------------------------------------------------------


@pytest.fixture
def listed(api1: Client) -> tuple[str, list[str]]:
    """Seven routers from two sources, by name."""
    stem = unique("rl")
    names = [f"{stem}.{number}" for number in range(7)]
    for number, name in enumerate(names):
        route(api1, f"{stem}-s{number % 2}", f"{stem}-d{number}", name=name)
    return stem, names


def test_a_row_of_the_list(api: Client, a: str, b: str) -> None:
    route(api, a, b, name=a, guarantee="exactly_once")
    api.append(a, 1, 2, 3)
    wait_data(api, b, [1, 2, 3])
    wait_forwarded(api, {a: 3})
    answer = list_routers(api, prefix=a)
    row = {"router": a, "source": a, "dest": b, "guarantee": "exactly_once", "forwarded_total": 3}
    assert answer.without_performance() == {"routers": [row]}


@pytest.mark.parametrize("page_size", [1, 2, 3, 6, 7, 8, 1_000, 5_000])
def test_pages(api: Client, listed: tuple[str, list[str]], page_size: int) -> None:
    stem, names = listed
    found: list[str] = []
    query: dict[str, object] = {}
    for _ in range(8):
        answer = list_routers(api, prefix=stem, page_size=page_size, **query)
        page = [row["router"] for row in answer["routers"]]
        assert 0 < len(page) <= page_size
        found += page
        if "next_cursor" not in answer.json:
            break
        query = {"cursor": answer["next_cursor"]}
    assert found == names
    assert "next_cursor" not in answer.json


def test_the_cursor_is_a_name_that_may_be_gone(api: Client, listed: tuple[str, list[str]]) -> None:
    stem, names = listed
    cursor = list_routers(api, prefix=stem, page_size=3)["next_cursor"]
    assert json.loads(base64.b64decode(cursor)) == {"after": names[2]}
    drop_router(api, names[2])
    drop_router(api, names[3])
    rest = list_routers(api, prefix=stem, cursor=cursor)
    assert [row["router"] for row in rest["routers"]] == names[4:]
    put_router(api, names[2], f"{stem}-s0", f"{stem}-d2")
    put_router(api, names[3], f"{stem}-s1", f"{stem}-d3")


def test_filters_of_the_list(api: Client, listed: tuple[str, list[str]]) -> None:
    stem, names = listed

    def rows(**query: object) -> list[str]:
        return [row["router"] for row in list_routers(api, **query)["routers"]]

    assert rows(source=f"{stem}-s0") == names[0::2]
    assert rows(source=f"{stem}-s1") == names[1::2]
    assert rows(dest=f"{stem}-d3") == [names[3]]
    assert rows(source=f"{stem}-s1", dest=f"{stem}-d3") == [names[3]]
    assert rows(source=f"{stem}-s0", dest=f"{stem}-d3") == []
    assert rows(source=f"{stem}-s0", prefix=names[4]) == [names[4]]
    assert rows(source="none") == rows(prefix=f"{stem}*") == rows(prefix=stem.upper()) == []
    answer = list_routers(api, source=f"{stem}-s0", page_size=2)
    assert rows(source=f"{stem}-s0", page_size=2, cursor=answer["next_cursor"]) == [names[4], names[6]]


def test_all_routers_are_listed_by_hundreds(api1: Client) -> None:
    stem = unique("rh")
    for number in range(101):
        route(api1, f"{stem}-s", f"{stem}-d", name=f"{stem}.{number:03d}")
    first = list_routers(api1, prefix=stem)
    assert len(first["routers"]) == 100
    rest = list_routers(api1, prefix=stem, cursor=first["next_cursor"])
    assert [row["router"] for row in rest["routers"]] == [f"{stem}.100"]
    assert sorted(api1.drop(f"{stem}-d")["routers_removed"]) == [f"{stem}.{number:03d}" for number in range(101)]


@pytest.mark.parametrize("page_size", ["0", "-1", "x", "", "1.5"])
def test_page_sizes_that_are_refused(api: Client, page_size: str) -> None:
    assert list_routers(api, page_size=page_size).refusal == (400, "invalid_request")


DEEP = base64.b64encode(b'{"x":%b%b}' % (b"[" * 2_000, b"]" * 2_000)).decode()


@pytest.mark.parametrize("cursor", ["x", "e30=", "bnVsbA==", "eyJhZnRlciI6MX0=", pytest.param(DEEP, id="deep")])
def test_cursors_that_are_refused(api: Client, cursor: str) -> None:
    assert list_routers(api, cursor=cursor).refusal == (400, "invalid_request")


# --- limits ------------------------------------------------------------------------------------------

Start = Callable[..., Server]


def test_the_number_of_routers_is_bounded(start_server: Start) -> None:
    server = start_server(TOPICS_MAX_ROUTERS=2)
    with server.client() as api:
        route(api, "a", "b", name="one")
        route(api, "a", "b", name="two", guarantee="exactly_once")
        refused = put_router(api, "three", "x", "y")
        assert refused.refusal == (429, "throttled")
        assert refused.detail["limit"] == "max_routers"
        assert refused.detail["max"] == 2
        assert topic_names(api, "") == ["a", "b"]
        assert put_router(api, "two", "a", "b").status == 200  # a change is no new one
        drop_router(api, "one")
        assert put_router(api, "three", "x", "y").status == 201
        assert api.drop("x")["routers_removed"] == ["three"]
        assert put_router(api, "four", "a", "c").status == 201


@pytest.mark.parametrize("most", [1, 2])
def test_no_topic_is_made_for_a_router_that_cannot_be(start_server: Start, most: int) -> None:
    """One of its topics would be one too many."""
    server = start_server(TOPICS_MAX_TOPICS=most)
    with server.client() as api:
        if most == 2:
            api.put("z")
        refused = put_router(api, "r", "s", "d")
        assert refused.refusal == (429, "throttled")
        assert refused.detail["limit"] == "max_topics"
        assert topic_names(api, "") == ["z"][: most - 1]
        assert list_routers(api)["routers"] == []


# --- the cascade -------------------------------------------------------------------------------------


def test_deleting_a_topic_takes_its_routers_along(api: Client, a: str, b: str, c: str) -> None:
    d = unique("rd")
    into = [route(api, a, b, name=f"{a}.1"), route(api, a, b, name=f"{a}.2")]
    out = [route(api, b, c, name=f"{b}.1"), route(api, b, d, name=f"{b}.2")]
    other = route(api, a, unique("re"))
    answer = api.drop(b)
    assert (answer.status, answer["deleted"]) == (200, True)
    assert answer["routers_removed"] == sorted(into + out)
    for name in into + out:
        assert get_router(api, name).refusal == (404, "router_not_found")
    assert get_router(api, other).status == 200
    assert api.drop(b).without_performance() == {"topic": b, "deleted": False, "routers_removed": []}


def test_the_cascade_is_whole_however_busy_the_routers_are(api1: Client) -> None:
    """The forwarders may notice by themselves before they are told."""
    for _ in range(15):
        a, b, c = unique("ca"), unique("cb"), unique("cc")
        names = [route(api1, a, b), route(api1, b, c), route(api1, b, unique("cd"))]
        api1.append(a, *range(50))
        assert api1.drop(b)["routers_removed"] == sorted(names)
        assert list_routers(api1, source=b)["routers"] == []


def test_a_topic_that_is_not_dropped_keeps_its_routers(api: Client, a: str, b: str) -> None:
    name = route(api, a, b)
    api.append(a, 1)
    wait_data(api, b, [1])
    assert api.drop(b, if_empty=True).refusal == (409, "topic_not_empty")
    assert get_router(api, name).status == 200
    api.append(a, 2)
    wait_data(api, b, [1, 2])
    api.delete(b, before_seq=3)
    assert api.drop(b, if_empty=True)["routers_removed"] == [name]


def test_a_new_topic_of_the_same_name_gets_nothing_of_the_old(api: Client, a: str, b: str) -> None:
    name = route(api, a, b)
    api.append(a, "old")
    wait_data(api, b, ["old"])
    assert api.drop(b)["routers_removed"] == [name]
    api.put(b)
    api.append(a, "between")
    route(api, a, b)
    api.append(a, "new")
    wait_data(api, b, ["new"])


def test_a_new_source_of_the_same_name_is_another(api: Client, a: str, b: str) -> None:
    name = route(api, a, b)
    api.append(a, *range(5))
    wait_data(api, b, list(range(5)))
    assert api.drop(a)["routers_removed"] == [name]
    assert data_of(api, b) == list(range(5))  # a copy, not a link
    api.append(a, *"abcdefg")
    route(api, a, b)
    api.append(a, "h")
    wait_data(api, b, [*range(5), "h"])
    wait_forwarded(api, {name: 1})


def test_topics_come_and_go_under_writers_and_routers(api1: Client, a: str) -> None:
    """Again and again the same names: every life of the destination holds what was written in that life."""
    b = f"{a}-d"
    for life in range(12):
        route(api1, a, b)
        api1.append(a, *[[life, number] for number in range(3)])
        if life % 3 == 0:
            wait_data(api1, b, [[life, number] for number in range(3)])
        gone = api1.drop(a if life % 2 else b)
        assert gone["routers_removed"] == [f"{a}->{b}"]
        api1.drop(b if life % 2 else a)
    route(api1, a, b)
    drained(api1, a, b)
    assert data_of(api1, b) == ["mark"]
    eventually(lambda: list_routers(api1, prefix=a)["routers"], what="the one router")


# --- forwarded_total ---------------------------------------------------------------------------------


def test_what_a_router_has_forwarded_is_counted(api: Client, a: str, b: str) -> None:
    everything = route(api, a, b, name=f"{a}.all")
    some = route(api, a, b, name=f"{a}.some", filter=["tag", "Eq", "x"])
    api.append_records(a, [{"data": number, "tag": "x" if number % 3 == 0 else None} for number in range(9)])
    wait_forwarded(api, {everything: 9, some: 3})
    assert {row["router"]: row["forwarded_total"] for row in list_routers(api, dest=b)["routers"]} == {
        everything: 9,
        some: 3,
    }
    assert put_router(api, some, a, b).status == 200
    assert get_router(api, some)["forwarded_total"] == 3  # a change does not begin anew
    api.delete(b, before_seq=100)
    assert get_router(api, everything)["forwarded_total"] == 9
    drop_router(api, some)
    route(api, a, b, name=some)
    assert get_router(api, some)["forwarded_total"] == 0
    api.append(a, "last")
    wait_forwarded(api, {some: 1, everything: 10})
