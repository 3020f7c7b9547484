"""The guard by itself: which key a request has, whether that is enough, and what the table of routes asks for.

Also what a gateway remembers of heads: never a secret.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from e2e.keyed import AREAS, KEYS, PROBES, ROUTES, SCOPES, STREAMS
from e2e.keyed import Route as Expected
from parts import metrics, queues, routers, watches

from topics.errors import ApiError
from topics.gateway.api.routes import Route, Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.auth import Guard, check_names, check_scope, owner_of
from topics.gateway.http1.head import Heads
from topics.keys import Key, Scope, digest_of, parse_keys
from topics.settings import Settings
from topics.shm.counters import Board

FLAGS = {"read": Scope.READ, "write": Scope.WRITE, "delete": Scope.DELETE, "admin": Scope.ADMIN}


@pytest.fixture(scope="module")
def routes() -> Routes:
    handlers = Handlers(Settings(), shards=2, board=Board.create(["shard-0"]))
    return Routes(handlers, watches(shards=2), routers(shards=2), queues(shards=2), metrics(shards=2))


def keys(text: str) -> tuple[Key, ...]:
    return parse_keys(text, source="test")


def guard(text: str, *, probes: bool = False) -> Guard:
    return Guard(keys(text), probes=probes)


def route(
    name: str = "", *, scope: int = 0, query: Mapping[str, str] | None = None, token: bool = False, **more: Any
) -> Route:
    return Route(lambda request: None, name, 0, dict(query or {}), False, scope, token=token, **more)  # type: ignore[arg-type, return-value]


def refusal(guard: Guard, to: Route, *authorization: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        guard.admit(to, authorization)
    assert caught.value.status == {"unauthorized": 401, "forbidden": 403}[caught.value.code]
    return caught.value.code


def test_the_log_is_told_which_key_was_refused() -> None:
    """Expired, without the scope, gone: by name if it has one. What a client is told is the same for a key that is gone
    and for one that never was."""
    text = "one:read name=first\ntwo:read\nold:read name=ended expires=2020-01-01T00:00:00Z"
    asked = Guard(parse_keys(text, source="test", attributes=True), probes=False)
    to = route("x", scope=Scope.WRITE)

    def shown(secret: str) -> int | str:
        return asked.shown_by(to, [b"Bearer " + secret.encode()])

    assert [shown(secret) for secret in ("one", "two", "old", "none")] == ["first", 2, "ended", 0]
    for given in ([], [b"one"], [b"Basic one"], [b"Bearer one", b"Bearer one"]):
        assert asked.shown_by(to, given) == 0
    assert asked.shown_by(route(query={"token": "one"}, token=True), []) == "first"
    assert asked.shown_by(route(query={"token": "one"}), []) == 0
    asked.replace(parse_keys("three name=third", source="test", attributes=True))
    assert [shown(secret) for secret in ("one", "two", "old", "none", "three")] == ["first", 0, "ended", 0, "third"]
    told = set()
    for secret in (b"one", b"two", b"none"):
        with pytest.raises(ApiError) as caught:
            asked.admit(to, [b"Bearer " + secret])
        told.add((caught.value.code, caught.value.message))
    assert told == {("unauthorized", "this key is not known here")}
    asked.replace(parse_keys("one name=again", source="test", attributes=True))
    assert [shown("one"), shown("three")] == ["again", "third"]
    for number in range(1_100):
        asked.replace(parse_keys(f"secret{number} name=n{number}", source="test", attributes=True))
    assert [shown("three"), shown("secret900")] == [0, "n900"], "not for ever"


# --- the table ---------------------------------------------------------------------------------------


def test_there_is_no_route_whose_needs_are_not_known(routes: Routes) -> None:
    """A route that somebody adds has to be thought about here."""
    found = {
        (method, "/" + "/".join("*" if part == "\0" else part for part in path))
        for path, methods in routes._table.items()
        for method in methods
    }
    watch = "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA"
    expected = {
        (known.method, known.path.partition("?")[0].replace("{name}", "*").replace(watch, "/v0/watch/*"))
        for known in ROUTES
        if known.method != "HEAD"
    }
    assert found == expected | {("GET", probe) for probe in PROBES}


@pytest.mark.parametrize("expected", [known for known in ROUTES if not known.creates], ids=str)
def test_what_a_route_asks_for(routes: Routes, expected: Expected) -> None:
    found = routes.find(expected.method, expected.path.format(name="in:x"))
    assert Scope(found.scope) == sum((FLAGS[scope] for scope in expected.needs), Scope(0))
    assert bool(found.name and found.named) == (expected.named and expected.path != "/v0/watch")
    assert found.token == (expected.path in STREAMS)
    assert not found.probe


@pytest.mark.parametrize("path", PROBES)
def test_what_a_probe_asks_for(routes: Routes, path: str) -> None:
    found = routes.find("GET", path)
    assert (found.probe, found.scope, found.token, found.name) == (True, 0, False, "")


@pytest.mark.parametrize(
    "expected", [known for known in ROUTES if known.path != "/v0/watch" and not known.creates], ids=str
)
def test_every_key_on_every_route(routes: Routes, expected: Expected) -> None:
    every = guard(",".join(key.entry for key in KEYS))
    found = routes.find(expected.method, expected.path.format(name="in:x"))
    for key in KEYS:
        authorization = b"Bearer " + key.secret.encode()
        if expected.allows(key.scopes, key.area):
            admitted = every.admit(found, [authorization])
            assert admitted is not None
            assert admitted.digest == digest_of(key.secret.encode())
        else:
            assert refusal(every, found, authorization) == "forbidden", key


# --- which key ---------------------------------------------------------------------------------------

GOOD = [
    b"Bearer one",
    b"bearer one",
    b"BEARER one",
    b"bEaReR one",
    b"Bearer  one",
    b"Bearer one ",
    b"Bearer \tone",
]
BAD = [
    b"",
    b" ",
    b"one",
    b"Bearer",
    b"Bearer ",
    b"Bearer  ",
    b"Bearer\tone",
    b"Bearerone",
    b"Bearer: one",
    b"Bearer=one",
    b" Bearer one",
    b"Basic one",
    b"Basic b25lOg==",
    b"Bearer one two",
    b"Bearer one,",
    b"Bearer one, Bearer one",
    b"Bearer one:read",
    b"Bearer on",
    b"Bearer onee",
    b"Bearer ONE",
    b'Bearer "one"',
    b"Bearer %6fne",
    b"Bearer \xff\xfe\x80",
    b"Bearer o\xc3\xb1e",
    b"Bearer " + b"x" * 10_000,
    digest_of(b"one"),
    b"Bearer " + digest_of(b"one"),
    b"Bearer " + digest_of(b"one").hex().encode(),
]


@pytest.mark.parametrize("header", GOOD)
def test_a_token_as_it_may_be_written(header: bytes) -> None:
    assert guard("one:r,two:w").admit(route(scope=1), [header]) is not None


@pytest.mark.parametrize("header", BAD, ids=lambda header: repr(header[:24]))
def test_what_is_no_known_token(header: bytes) -> None:
    assert refusal(guard("one:r,two:w"), route(scope=1), header) == "unauthorized"


def test_no_header_or_two() -> None:
    both = guard("one,two")
    assert refusal(both, route()) == "unauthorized"
    assert refusal(both, route(), b"Bearer one", b"Bearer one") == "unauthorized"
    assert refusal(both, route(), b"Bearer one", b"Bearer two") == "unauthorized"


def test_a_refusal_repeats_nothing_of_the_token() -> None:
    for header in (b"Bearer Zq9secret", b"Zq9secret", b"Basic Zq9secret"):
        with pytest.raises(ApiError) as caught:
            guard("one").admit(route(), [header])
        assert "Zq9secret" not in f"{caught.value} {caught.value.message} {caught.value.detail}"


def test_unknown_before_forbidden() -> None:
    """Who is not known is not told what would have been needed."""
    assert refusal(guard("one:r"), route("x", scope=15), b"Bearer two") == "unauthorized"


def test_without_keys_nothing_is_looked_at() -> None:
    off = Guard((), probes=True)
    assert not off.on
    for headers in ([], [b"nonsense"], [b"Bearer x", b"Bearer y"]):
        assert off.admit(route("any", scope=15), headers) is None


# --- keys that end ---

END_MS = 1_798_761_600_000


def timed(text: str, now: list[int]) -> Guard:
    return Guard(parse_keys(text, source="test", attributes=True), probes=False, now_ms=lambda: now[0])


def test_an_expired_key_is_told_so_and_nobody_else() -> None:
    now = [END_MS - 1]
    one = timed("one:r name=n expires=2027-01-01T00:00:00Z\ntwo", now)
    key = one.admit(route(scope=1), [b"Bearer one"])
    assert key is not None
    assert one.refusal(key) is None
    now[0] = END_MS
    for needed in (1, 15):
        with pytest.raises(ApiError, match="has expired") as caught:
            one.admit(route(scope=needed), [b"Bearer one"])
        assert (caught.value.code, caught.value.detail) == ("unauthorized", {"expired": "2027-01-01T00:00:00Z"})
    with pytest.raises(ApiError, match="not known"):
        one.admit(route(scope=1), [b"Bearer onee"])
    refusal = one.refusal(key)
    assert refusal is not None
    assert "has expired" in refusal.message
    assert one.admit(route(scope=1), [b"Bearer two"]) is not None


def test_news_are_told_once_and_after_a_clock_that_went_back_again() -> None:
    now = [0]
    three = timed(
        "one expires=2027-01-01T00:00:00Z\ntwo expires=2027-01-02T00:00:00Z\nthree expires=1999-01-01T00:00:00Z", now
    )
    now[0] = END_MS - 1
    assert three.has_news(), "three has ended since it was read"
    seen = []
    for moment in (END_MS - 1, END_MS, END_MS + 1, END_MS - 1, END_MS, END_MS + 86_400_000, 2**50):
        now[0] = moment
        seen.append(three.has_news())
    assert seen == [False, True, False, False, True, True, False]
    now[0] = END_MS
    three.replace(keys("one"))
    assert not three.has_news()


def test_a_guard_whose_keys_never_end_does_not_look_at_the_clock() -> None:
    def broken() -> int:
        raise AssertionError("nobody needs to know")

    steady = Guard(keys("one,two:r"), probes=False, now_ms=lambda: 0)
    steady._now_ms = broken
    assert not steady.has_news()


@pytest.mark.parametrize(
    ("after", "says"),
    [
        ("one:rw:a|b", None),
        ("one:w+r:b|a name=n", None),
        ("one:rw:a|b expires=2030-01-01T00:00:00Z", None),
        ("two", "revoked"),
        ("one:r:a|b", "changed"),
        ("one:rw:a", "changed"),
        ("one:rw", "changed"),
        ("one:rw:a|b expires=1999-01-01T00:00:00Z", "expired"),
    ],
)
def test_what_a_reload_makes_of_a_key(after: str, says: str | None) -> None:
    some = timed("one:rw:a|b", [END_MS])
    key = some.admit(route("a", scope=1), [b"Bearer one"])
    some.replace(parse_keys(after, source="test", attributes=True))
    refused = some.refusal(key)
    assert (refused is None) is (says is None)
    if refused is not None:
        assert refused.code == "unauthorized"
        assert says is not None
        assert says in refused.message
    assert some.refusal(None) is None


# --- in the query ------------------------------------------------------------------------------------


def test_a_token_in_the_query_of_a_stream_alone() -> None:
    one = guard("one")
    query = {"token": "one"}
    assert one.admit(route(query=query, token=True), []) is not None
    assert refusal(one, route(query=query)) == "unauthorized"
    assert refusal(one, route(query={"token": "two"}, token=True)) == "unauthorized"
    assert refusal(one, route(query={"token": ""}, token=True)) == "unauthorized"
    assert refusal(one, route(query={"Token": "one"}, token=True)) == "unauthorized"
    assert refusal(one, route(query={"token": "Bearer one"}, token=True)) == "unauthorized"
    assert refusal(one, route(query={"token": "\u00fc"}, token=True)) == "unauthorized"


def test_a_bad_header_is_not_mended_by_the_query() -> None:
    one = guard("one")
    assert refusal(one, route(query={"token": "one"}, token=True), b"Bearer two") == "unauthorized"
    assert one.admit(route(query={"token": "two"}, token=True), [b"Bearer one"]) is not None


def test_the_scopes_count_for_a_token_in_the_query_too() -> None:
    assert refusal(guard("one:r"), route(scope=2, query={"token": "one"}, token=True)) == "forbidden"


# --- probes ------------------------------------------------------------------------------------------


def test_probes_are_open_unless_said_otherwise() -> None:
    probe = route(probe=True)
    assert guard("one").admit(probe, []) is None
    assert guard("one").admit(probe, [b"Bearer wrong"]) is None
    strict = guard("one,two:d:x", probes=True)
    assert refusal(strict, probe) == "unauthorized"
    assert refusal(strict, probe, b"Bearer wrong") == "unauthorized"
    assert strict.admit(probe, [b"Bearer two"]) is not None


# --- what is missing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("has", range(1, 16))
@pytest.mark.parametrize("needs", range(1, 16))
def test_the_refusal_names_what_is_missing(has: int, needs: int) -> None:
    names = [name for name in SCOPES if FLAGS[name] & has]
    only = guard(f"one:{'+'.join(names)}")
    missing = [name for name in SCOPES if FLAGS[name] & needs & ~has]
    if not missing:
        assert only.admit(route(scope=needs), [b"Bearer one"]) is not None
        return
    with pytest.raises(ApiError) as caught:
        only.admit(route(scope=needs), [b"Bearer one"])
    assert caught.value.detail == {"scopes": missing}


def test_checks_of_the_handlers() -> None:
    (key,) = keys(f"one:read+write:{AREAS['in']}")
    check_names(None, ["anything"])
    check_names(key, [])
    check_names(key, ["in:a", "also.b"])
    with pytest.raises(ApiError) as caught:
        check_names(key, ["in:a", "out:b", "in:c"])
    assert (caught.value.code, caught.value.detail) == ("forbidden", {"name": "out:b"})
    check_scope(None, 15)
    check_scope(key, Scope.READ | Scope.WRITE)
    with pytest.raises(ApiError) as caught:
        check_scope(key, Scope.READ | Scope.ADMIN)
    assert (caught.value.code, caught.value.detail) == ("forbidden", {"scopes": ["admin"]})
    assert owner_of(None) == b""
    assert owner_of(key) == digest_of(b"one")


# --- what is remembered of heads ---------------------------------------------------------------------


def head_of(target: str, *lines: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode("latin-1")


def test_heads_that_differ_in_the_key_alone_are_not_confused(routes: Routes) -> None:
    heads = Heads(routes, max_body_bytes=1_000, guard=guard("aaa:r,bbb:w,ccc:r:out:"))
    seen: list[tuple[str, str | None, bytes | None]] = []
    for secret in ("aaa", "bbb", "ccc", "ddd") * 2:
        head = heads.get(head_of("/v0/topics/in:x", f"Authorization: Bearer {secret}"))
        seen.append((secret, head.error.code if head.error else None, head.key.digest if head.key else None))
    expected = [
        ("aaa", None, digest_of(b"aaa")),
        ("bbb", "forbidden", None),
        ("ccc", "forbidden", None),
        ("ddd", "unauthorized", None),
    ]
    assert seen == expected * 2


def everything_from(root: object) -> list[object]:
    """All objects that can be reached, but for modules, classes and functions, which remember nothing."""
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, type | type(gc) | type(everything_from)):
            continue
        seen[id(found)] = found
        todo.extend(gc.get_referents(found))
        for name in getattr(type(found), "__struct_fields__", ()):  # those with gc=False are not followed otherwise
            todo.append(getattr(found, name))
    return list(seen.values())


@pytest.mark.parametrize("secret", ["Zq9known", "Zq9stranger"])
def test_no_secret_is_remembered(routes: Routes, secret: str) -> None:
    heads = Heads(routes, max_body_bytes=1_000, guard=guard("Zq9known:r"))
    for path in ("/v0/topics", "/v0/topics/a", "/v0/health", "/v0/topics/q/work", "/v0/nothing"):
        for method in ("GET", "DELETE"):
            heads.get(head_of(path, f"Authorization: Bearer {secret}", method=method))
            heads.get(head_of(path, f"Authorization: {secret}", method=method))
            for lines in ((), ("Authorization: Bearer Zq9known",), (f"Authorization: Bearer {secret}",)):
                heads.get(head_of(f"{path}?node=w&token={secret}", *lines, method=method))
    assert heads._known, "nothing is remembered: this test looks at nothing"
    texts = [found for found in everything_from(heads) if isinstance(found, str | bytes | bytearray)]
    assert any(found == digest_of(b"Zq9known") for found in texts)
    found = [text for text in texts if secret in (text if isinstance(text, str) else bytes(text).decode("latin-1"))]
    assert not found


def garbage_with(secret: str, work: Callable[[], object]) -> list[str]:
    """Texts with the secret that `work` left in what refers to itself and nothing else does.

    Not how much garbage there is: what other tests and their threads have left is counted with it.
    """
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        referred = [text for thing in gc.garbage for text in gc.get_referents(thing)]
        # Structs with gc=False are no garbage themselves; their texts are still held.
        structs = [thing for thing in referred if isinstance(thing, msgspec.Struct)]
        referred += [getattr(thing, name) for thing in structs for name in thing.__struct_fields__]
        return [repr(text) for text in referred if isinstance(text, str | bytes | bytearray) and secret in repr(text)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_heads_leave_no_garbage_that_holds_a_secret(routes: Routes) -> None:
    """What refers to itself stays until a collection comes by, which is rare in a gateway."""
    heads = Heads(routes, max_body_bytes=1_000, guard=guard("Zq9known:r"))
    paths = ("/v0/topics/t", "/v0/topics", "/v0/nothing", "/v0/watch/w?token=Zq9known", "/v0/metrics", "/v0/ws")

    def ask() -> None:
        for path in paths:
            for secret in ("Zq9known", "Zq9stranger"):
                for method in ("GET", "DELETE", "BREW"):
                    heads.get(head_of(path, f"Authorization: Bearer {secret}", method=method))

    assert garbage_with("Zq9", ask) == []


def test_garbage_that_holds_a_secret_is_seen() -> None:
    def leave_it() -> None:
        kept: list[object] = ["Bearer Zq9known"]
        kept.append(kept)

    assert garbage_with("Zq9", leave_it) == ["'Bearer Zq9known'"]
