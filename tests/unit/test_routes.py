from __future__ import annotations

import pytest
from parts import metrics, queues, routers, watches

from topics.errors import ApiError
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.settings import Settings
from topics.shm.counters import Board
from topics.storage.config import owner_of_name


@pytest.fixture
def handlers() -> Handlers:
    return Handlers(Settings(), shards=4, board=Board.create(["shard-0"]))


@pytest.fixture
def routes(handlers: Handlers) -> Routes:
    return Routes(handlers, watches(shards=4), routers(shards=4), queues(shards=4), metrics(shards=4))


@pytest.mark.parametrize(
    ("method", "target", "handler", "name"),
    [
        ("GET", "/v0/topics", "list_topics", ""),
        ("PUT", "/v0/topics/a", "put_topic", "a"),
        ("GET", "/v0/topics/a", "get_topic", "a"),
        ("HEAD", "/v0/topics/a", "get_topic", "a"),
        ("POST", "/v0/topics/a", "append", "a"),
        ("POST", "/v0/topics/a/diff", "diff", "a"),
        ("POST", "/v0/topics/a/delete", "delete_records", "a"),
        ("POST", "/v0/topics/diff/diff", "diff", "diff"),
        ("POST", "/v0/topics/diff", "append", "diff"),
        ("GET", "/v0/health", "health", ""),
        ("GET", "/v0/ready", "ready", ""),
        ("GET", "/healthz", "health", ""),
        ("GET", "/readyz", "ready", ""),
        ("GET", "/v0/topics/a%3Ab", "get_topic", "a:b"),
        ("GET", "/v0/topics/a:b.c_d-e", "get_topic", "a:b.c_d-e"),
        ("GET", "/v0/topics/%61", "get_topic", "a"),
        ("GET", "/v0/topics/" + "a" * 255, "get_topic", "a" * 255),
    ],
)
def test_found(routes: Routes, handlers: Handlers, method: str, target: str, handler: str, name: str) -> None:
    route = routes.find(method, target)
    assert route.handler == getattr(handlers, handler)
    assert route.name == name
    assert route.takes_body == (method in ("POST", "PUT"))
    if name:
        assert route.shard == owner_of_name(name, 4)


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "//",
        "/v0",
        "/v0/",
        "/v0/topics/",
        "/v0/topics//diff",
        "/v0//topics",
        "/v1/topics",
        "/V0/topics",
        "/v0/Topics",
        "/v0/topics/a/",
        "/v0/topics/a/b",
        "/v0/topics/a/diff/",
        "/v0/topics/a/diff/more",
        "/v0/health/",
        "/v0/health/x",
        "/v0/x/ready",
        "/healthz/x",
        "/v0/topics/a/Diff",
        "/v0/topics/a;b/diff",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_there_or_no_name(routes: Routes, method: str, target: str) -> None:
    with pytest.raises(ApiError) as caught:
        routes.find(method, target)
    assert caught.value.code in ("not_found", "invalid_request", "method_not_allowed")
    assert caught.value.status in (404, 400, 405)


@pytest.mark.parametrize("target", ["/v0/nothing", "/v0/topics/a/b", "/", "/v0"])
def test_not_found(routes: Routes, target: str) -> None:
    with pytest.raises(ApiError) as caught:
        routes.find("GET", target)
    assert caught.value.code == "not_found"


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("POST", "/v0/topics", ["GET", "HEAD"]),
        ("PATCH", "/v0/topics/a", ["DELETE", "GET", "HEAD", "POST", "PUT"]),
        ("GET", "/v0/topics/a/diff", ["POST"]),
        ("PUT", "/v0/topics/a/delete", ["POST"]),
        ("HEAD", "/v0/topics/a/diff", ["POST"]),
        ("POST", "/v0/health", ["GET", "HEAD"]),
        ("OPTIONS", "/readyz", ["GET", "HEAD"]),
    ],
)
def test_another_method(routes: Routes, method: str, target: str, allow: list[str]) -> None:
    with pytest.raises(ApiError) as caught:
        routes.find(method, target)
    assert caught.value.code == "method_not_allowed"
    assert caught.value.detail == {"allow": allow}


@pytest.mark.parametrize(
    "name",
    ["*", ".a", "%2A", "a%2Fb", "a%00", "%", "%zz", "a%20b", "a+b", "%E9", "%C3%A9", "a%0A", "a" * 256, "..", "%2E%2E"],
)
@pytest.mark.parametrize("tail", ["", "/diff", "/delete"])
def test_bad_names(routes: Routes, name: str, tail: str) -> None:
    with pytest.raises(ApiError) as caught:
        routes.find("POST", f"/v0/topics/{name}{tail}")
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", {}),
        ("a=1", {"a": "1"}),
        ("a=1&b=2", {"a": "1", "b": "2"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("a=1&a=2", {"a": "1"}),
        ("a=%20+b", {"a": "  b"}),
        ("prefix=a%3A", {"prefix": "a:"}),
    ],
)
def test_queries(routes: Routes, query: str, expected: dict[str, str]) -> None:
    assert routes.find("GET", f"/v0/topics?{query}").query == expected


@pytest.mark.parametrize("query", ["a=%ff", "&".join(f"k{number}=1" for number in range(100))])
def test_queries_that_can_not_be_read(routes: Routes, query: str) -> None:
    with pytest.raises(ApiError) as caught:
        routes.find("GET", f"/v0/topics?{query}")
    assert caught.value.code == "invalid_request"


def test_a_question_mark_in_the_query_is_part_of_it(routes: Routes) -> None:
    assert routes.find("GET", "/v0/topics?prefix=a?b").query == {"prefix": "a?b"}
