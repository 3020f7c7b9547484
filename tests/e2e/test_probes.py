"""Health and readiness, unknown paths and methods, in both lanes."""

from __future__ import annotations

import pytest

from .client import Client, unique

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("path", ["/v0/health", "/health", "/healthz"])
def test_health(api: Client, path: str) -> None:
    answer = api.get(path)
    assert answer.status == 200
    assert answer.json.keys() == {"status", "version", "uptime_ms", "performance"}
    assert (answer["status"], answer["version"]) == ("ok", "0.1.0")
    assert isinstance(answer["uptime_ms"], int)


@pytest.mark.parametrize("path", ["/v0/ready", "/ready", "/readyz"])
def test_ready(api: Client, path: str) -> None:
    api.put(unique())
    answer = api.get(path)
    assert answer.status == 200
    assert answer.json.keys() == {"status", "wal_replay_complete", "topics", "performance"}
    assert (answer["status"], answer["wal_replay_complete"]) == ("ready", True)
    assert answer["topics"] >= 1


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v0",
        "/v0/",
        "/v0/topic",
        "/v1/topics",
        "/v0/topics/a/b",
        "/v0/topics/a/diff/x",
        "/V0/health",
        "//v0/health",
        "/v0//health",
        "/v0/health/",
        "/v0/topics/a/diff/",
    ],
)
def test_unknown_paths_are_404(api: Client, path: str) -> None:
    assert api.get(path).refusal == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v0/topics", {"GET", "HEAD"}),
        ("/v0/topics/abc", {"GET", "HEAD", "PUT", "POST", "DELETE"}),
        ("/v0/topics/abc/diff", {"POST"}),
        ("/v0/topics/abc/delete", {"POST"}),
        ("/v0/health", {"GET", "HEAD"}),
        ("/v0/ready", {"GET", "HEAD"}),
        ("/healthz", {"GET", "HEAD"}),
    ],
)
def test_wrong_methods_are_405_and_say_which_are_right(api: Client, path: str, allowed: set[str]) -> None:
    for method in sorted({"GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"} - allowed):
        answer = api.send(method, path, headers={"Content-Type": "application/json"})
        assert answer.refusal == (405, "method_not_allowed"), method
        assert {name.strip() for name in answer.headers["allow"].split(",")} == allowed
