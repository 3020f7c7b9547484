"""Creating, configuring, reading, listing and deleting topics, in both lanes."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from .client import Client, unique

pytestmark = pytest.mark.e2e

DEFAULTS: dict[str, Any] = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durable": False,
    "durability": "disk",
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
}
U64_MAX = 2**64 - 1

# --- PUT ---------------------------------------------------------------------------------------------


def test_put_creates_with_defaults(api: Client, topic: str) -> None:
    answer = api.put(topic)
    assert answer.status == 201
    assert answer.without_performance() == {"topic": topic, "created": True, "config": DEFAULTS}


def test_put_without_a_body_creates_with_defaults(api: Client, topic: str) -> None:
    answer = api.send("PUT", f"/v0/topics/{topic}")
    assert answer.status == 201
    assert answer["config"] == DEFAULTS


def test_an_identical_put_changes_nothing(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=60_000)
    answer = api.put(topic, ttl_ms=60_000)
    assert (answer.status, answer["created"]) == (200, False)
    assert answer["config"] == DEFAULTS | {"ttl_ms": 60_000}


# field, what is sent, what is stored
STORED = [
    ("type", "queue", "queue"),
    ("ttl_ms", 60_000, 60_000),
    ("ttl_ms", U64_MAX, U64_MAX),
    ("cap_records", 1, 1),
    ("cap_records", U64_MAX, U64_MAX),
    ("cap_bytes", 1_000_000, 1_000_000),
    ("cap_bytes", U64_MAX, U64_MAX),
    ("discard", "reject", "reject"),
    ("priority", 10, 10),
    ("priority", 0, 0),
    ("priority", -1_000, -1_000),
    ("priority", -1_001, -1_000),
    ("priority", 2_000_000, 1_000),
    ("auto_priority", False, False),
    ("auto_create", False, False),
    ("idempotency_window_ms", 0, 0),
    ("idempotency_window_ms", U64_MAX, U64_MAX),
    ("dedupe_node", False, False),
    ("lease_ms", 100, 100),
    ("lease_ms", 99, 100),
    ("lease_ms", 0, 100),
    ("lease_ms", 86_400_001, 86_400_000),
    ("claim_jitter_ms", 5_000, 5_000),
    ("claim_jitter_ms", 5_001, 5_000),
    ("max_deliveries", 5, 5),
    ("dead_letter", "jobs.dlq", "jobs.dlq"),
    ("leases_durable", True, True),
]


@pytest.mark.parametrize(("field", "sent", "stored"), STORED)
def test_every_config_field_is_stored_and_echoed(api: Client, topic: str, field: str, sent: Any, stored: Any) -> None:
    wanted = DEFAULTS | {field: stored}
    assert api.put(topic, **{field: sent})["config"] == wanted
    assert api.state(topic)["config"] == wanted


@pytest.mark.parametrize(
    ("sent", "durability"),
    [
        ({"durable": True}, "fsync"),
        ({"durable": False}, "disk"),
        ({"durability": "ephemeral"}, "ephemeral"),
        ({"durability": "memory"}, "memory"),
        ({"durability": "disk"}, "disk"),
        ({"durability": "fsync"}, "fsync"),
        ({"durable": True, "durability": "memory"}, "memory"),
        ({"durable": False, "durability": "fsync"}, "fsync"),
    ],
)
def test_durability_is_resolved_and_durable_follows_it(
    api: Client, topic: str, sent: dict[str, Any], durability: str
) -> None:
    wanted = DEFAULTS | {"durability": durability, "durable": durability == "fsync"}
    assert api.put(topic, **sent)["config"] == wanted
    assert api.state(topic)["config"] == wanted


def test_fields_left_out_of_a_second_put_take_their_defaults(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=5, cap_records=6, discard="reject", durability="fsync", priority=7, lease_ms=1_000)
    answer = api.put(topic, cap_records=8)
    assert (answer.status, answer["created"]) == (200, False)
    assert answer["config"] == DEFAULTS | {"cap_records": 8}
    assert api.state(topic)["config"] == DEFAULTS | {"cap_records": 8}


def test_a_put_without_type_keeps_the_type(api: Client, topic: str) -> None:
    api.put(topic, type="queue")
    answer = api.put(topic, ttl_ms=5)
    assert answer.status == 200
    assert answer["config"] == DEFAULTS | {"type": "queue", "ttl_ms": 5}


@pytest.mark.parametrize(("before", "after"), [("log", "queue"), ("queue", "log")])
def test_the_type_can_not_change(api: Client, topic: str, before: str, after: str) -> None:
    api.put(topic, type=before)
    assert api.put(topic, type=after, ttl_ms=5).refusal == (409, "topic_exists_incompatible")
    assert api.state(topic)["config"] == DEFAULTS | {"type": before}


def test_the_last_of_duplicate_keys_counts(api: Client, topic: str) -> None:
    answer = api.send("PUT", f"/v0/topics/{topic}", content=b'{"ttl_ms":1,"ttl_ms":2}')
    assert answer["config"]["ttl_ms"] == 2


def test_unknown_config_fields_are_ignored(api: Client, topic: str) -> None:
    answer = api.put(topic, colour="blue", ttl_ms=5)
    assert answer["config"] == DEFAULTS | {"ttl_ms": 5}


NO_NUMBERS: tuple[object, ...] = (1.5, "5", True, [], {}, None)
REFUSED: list[tuple[str, object]] = [
    *((field, value) for field in ("ttl_ms", "cap_records", "cap_bytes", "max_deliveries") for value in (-1, 2**64)),
    *((field, -1) for field in ("idempotency_window_ms", "lease_ms", "claim_jitter_ms")),
    *((field, value) for field in ("ttl_ms", "cap_records", "lease_ms") for value in NO_NUMBERS),
    *((field, value) for field in ("durable", "auto_priority", "auto_create", "dedupe_node") for value in (1, "true")),
    ("leases_durable", 0),
    ("type", "stack"),
    ("type", 1),
    ("discard", "new"),
    ("discard", "OLD"),
    ("durability", "ram"),
    ("durability", True),
    ("priority", "high"),
    ("priority", 1.5),
    ("dead_letter", 5),
    ("dead_letter", ""),
    ("dead_letter", "a/b"),
    ("dead_letter", "x" * 256),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_bad_config_value_is_refused_and_creates_nothing(api: Client, topic: str, field: str, value: object) -> None:
    assert api.put(topic, **{field: value}).refusal == (400, "invalid_request")
    assert api.state(topic).refusal == (404, "topic_not_found")


def test_a_topic_is_not_its_own_dead_letter(api: Client, topic: str) -> None:
    assert api.put(topic, dead_letter=topic).refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


def test_a_refused_put_leaves_the_config_as_it_was(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=5)
    assert api.put(topic, ttl_ms=-5).status == 400
    assert api.state(topic)["config"] == DEFAULTS | {"ttl_ms": 5}


# --- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "9", "A.b_c:d-e", "render-queue:tenantA", "a..b", "Z" * 255])
def test_good_names(api: Client, name: str) -> None:
    name = f"{unique('n')}.{name}"[-255:].lstrip(".-")
    assert api.put(name)["topic"] == name
    assert api.state(name)["topic"] == name


def test_names_are_case_sensitive(api: Client, topic: str) -> None:
    api.append(f"{topic}-a", 1)
    assert api.state(f"{topic}-A").status == 404


def test_an_escaped_name_is_the_name(api: Client, topic: str) -> None:
    api.put(f"{topic}:x")
    assert api.state(f"{topic}%3Ax")["topic"] == f"{topic}:x"


BAD_NAMES = [
    ("empty", ""),
    ("leading dot", ".a"),
    ("leading dash", "-a"),
    ("leading underscore", "_a"),
    ("leading colon", "%3Aa"),
    ("escaped slash", "a%2Fb"),
    ("escaped slash up", "..%2F..%2Fetc"),
    ("dot dot", "%2e%2e"),
    ("space", "a%20b"),
    ("plus", "a+b"),
    ("arrow", "a->b"),
    ("unicode", "caf%C3%A9"),
    ("unicode digit", "%D9%A1"),
    ("invalid utf-8", "a%FF"),
    ("nul", "a%00"),
    ("newline", "a%0A"),
    ("trailing newline", "abc%0a"),
    ("256 characters", "x" * 256),
    ("percent sign", "a%25b"),
    ("double escape", "a%253Ab"),
]


@pytest.mark.parametrize("name", [name for _, name in BAD_NAMES], ids=[what for what, _ in BAD_NAMES])
def test_bad_names_are_refused_everywhere(api: Client, name: str) -> None:
    bodies: dict[str, Any] = {"PUT": {}, "POST": {"records": [{"data": 1}]}}
    for method in ("PUT", "GET", "DELETE", "POST"):
        assert api.send(method, f"/v0/topics/{name}", bodies.get(method)).refusal == (400, "invalid_request"), method
    assert api.diff(name).refusal == (400, "invalid_request")
    assert api.delete(name, before_seq=1).refusal == (400, "invalid_request")


# --- GET ---------------------------------------------------------------------------------------------


def test_state_of_an_empty_topic(api: Client, topic: str) -> None:
    api.put(topic)
    answer = api.state(topic, touch=False)
    assert answer.status == 200
    assert answer.without_performance() == {
        "topic": topic,
        "type": "log",
        "head_seq": 0,
        "earliest_seq": 1,
        "next_seq": 1,
        "count": 0,
        "bytes": 0,
        "config": DEFAULTS,
        "effective_priority": 0,
        "last_write_ts": None,
        "last_read_ts": None,
    }


def test_state_after_writes(api: Client, topic: str) -> None:
    before = time.time_ns() // 1_000_000
    api.append(topic, 1, 2)
    api.append(topic, 3)
    state = api.state(topic)
    after = time.time_ns() // 1_000_000
    assert (state["head_seq"], state["earliest_seq"], state["next_seq"], state["count"]) == (3, 1, 4, 3)
    assert state["bytes"] >= 3
    assert before <= state["last_write_ts"] <= after
    assert before <= state["last_read_ts"] <= after


def test_state_never_creates(api: Client, topic: str) -> None:
    answer = api.state(topic)
    assert answer.refusal == (404, "topic_not_found")
    assert answer.detail == {"topic": topic}
    assert api.list(prefix=topic)["topics"] == []


@pytest.mark.parametrize(("touch", "counts"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_touch_decides_whether_a_look_counts_as_a_read(api: Client, topic: str, touch: str, counts: bool) -> None:
    api.put(topic)
    api.state(topic, touch=touch)
    state = api.state(topic, touch=False)
    assert (state["last_read_ts"] is not None) == counts
    assert (state["effective_priority"] > 400) == counts


def test_a_look_counts_as_a_read_unless_told_otherwise(api: Client, topic: str) -> None:
    api.put(topic)
    api.state(topic)
    assert api.state(topic, touch=False)["last_read_ts"] is not None


def test_a_diff_counts_as_a_read(api: Client, topic: str) -> None:
    api.put(topic)
    api.diff(topic)
    state = api.state(topic, touch=False)
    assert state["last_read_ts"] is not None
    assert 450 <= state["effective_priority"] <= 500


def test_a_manual_priority_is_the_effective_one(api: Client, topic: str) -> None:
    api.put(topic, priority=-3)
    assert api.state(topic)["effective_priority"] == -3


def test_without_auto_priority_reading_earns_nothing(api: Client, topic: str) -> None:
    api.put(topic, auto_priority=False)
    api.state(topic)
    assert api.state(topic)["effective_priority"] == 0


@pytest.mark.parametrize("value", ["yes", "", "2", "TRUE "])
def test_a_bad_touch_is_refused(api: Client, topic: str, value: str) -> None:
    api.put(topic)
    assert api.state(topic, touch=value).refusal == (400, "invalid_request")


# --- DELETE ------------------------------------------------------------------------------------------


def test_delete_and_delete_again(api: Client, topic: str) -> None:
    api.append(topic, 1)
    first = api.drop(topic)
    assert first.status == 200
    assert first.without_performance() == {"topic": topic, "deleted": True, "routers_removed": []}
    assert api.state(topic).status == 404
    again = api.drop(topic)
    assert again.status == 200
    assert again.without_performance() == {"topic": topic, "deleted": False, "routers_removed": []}


def test_a_deleted_topic_starts_anew(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=60_000)
    api.append(topic, "old", "older", idempotency_key="k")
    api.drop(topic)
    answer = api.append(topic, "new", idempotency_key="k")
    assert (answer.status, answer["created"], answer["deduped"], answer["seqs"]) == (201, True, False, [1])
    assert api.state(topic)["config"] == DEFAULTS
    assert api.diff(topic).data == ["new"]


def test_if_empty_spares_what_is_not(api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    assert api.drop(topic, if_empty=True).refusal == (409, "topic_not_empty")
    assert api.state(topic)["count"] == 2
    api.delete(topic, before_seq=3)
    assert api.drop(topic, if_empty=True)["deleted"] is True


def test_if_empty_on_an_absent_topic(api: Client, topic: str) -> None:
    assert api.drop(topic, if_empty=True)["deleted"] is False


def test_if_empty_false_deletes(api: Client, topic: str) -> None:
    api.append(topic, 1)
    assert api.drop(topic, if_empty=False)["deleted"] is True


def test_a_bad_if_empty_is_refused_and_deletes_nothing(api: Client, topic: str) -> None:
    api.append(topic, 1)
    assert api.drop(topic, if_empty="maybe").refusal == (400, "invalid_request")
    assert api.state(topic)["count"] == 1


# --- list --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def listed(clients: dict[str, Client]) -> tuple[str, list[str]]:
    """A prefix, and the topics that have it, sorted; they live on both shards."""
    prefix = unique("list")
    names = sorted(f"{prefix}.{number:02}" for number in range(25))
    for name in reversed(names):
        clients["http1"].append(name, name)
    return prefix, names


def test_a_row_of_the_list(api: Client, topic: str) -> None:
    api.put(topic, durable=True, priority=4)
    api.append(topic, 1, 2, 3)
    api.delete(topic, before_seq=2)
    state = api.state(topic, touch=False)
    answer = api.list(prefix=topic)
    assert answer.without_performance() == {
        "topics": [
            {
                "topic": topic,
                "head_seq": 3,
                "earliest_seq": 2,
                "count": 2,
                "bytes": state["bytes"],
                "durable": True,
                "effective_priority": 4,
            }
        ]
    }


@pytest.mark.parametrize("page_size", [1, 7, 24, 25, 26, 1_000])
def test_pages_are_complete_sorted_and_without_repetition(
    api: Client, listed: tuple[str, list[str]], page_size: int
) -> None:
    prefix, names = listed
    seen: list[str] = []
    query: dict[str, object] = {}
    while True:
        answer = api.list(prefix=prefix, page_size=page_size, **query)
        rows = [row["topic"] for row in answer["topics"]]
        assert len(rows) <= page_size
        seen += rows
        if "next_cursor" not in answer.json:
            break
        assert len(rows) == page_size
        query = {"cursor": answer["next_cursor"]}
    assert seen == names


def test_the_last_page_has_no_cursor_even_if_it_is_full(api: Client, listed: tuple[str, list[str]]) -> None:
    prefix, names = listed
    assert "next_cursor" not in api.list(prefix=prefix, page_size=len(names)).json


def test_the_cursor_is_base64_and_survives_a_deleted_topic(api: Client, topic: str) -> None:
    for number in range(4):
        api.put(f"{topic}.{number}")
    cursor = api.list(prefix=f"{topic}.", page_size=2)["next_cursor"]
    base64.b64decode(cursor, validate=True)
    api.drop(f"{topic}.1")
    rest = api.list(prefix=f"{topic}.", page_size=2, cursor=cursor)
    assert [row["topic"] for row in rest["topics"]] == [f"{topic}.2", f"{topic}.3"]


def test_the_default_page_has_a_hundred(api1: Client) -> None:
    prefix = unique("hundred")
    for number in range(101):
        api1.put(f"{prefix}.{number:03}", durability="ephemeral")
    assert len(api1.list(prefix=prefix)["topics"]) == 100


def test_a_prefix_is_literal_and_exact(api: Client, listed: tuple[str, list[str]]) -> None:
    prefix, names = listed
    assert [row["topic"] for row in api.list(prefix=f"{prefix}.1")["topics"]] == names[10:20]
    assert api.list(prefix=prefix.upper())["topics"] == []
    assert api.list(prefix=f"{prefix}.*")["topics"] == []


def test_listing_is_not_reading_unless_asked(api: Client, topic: str) -> None:
    api.put(topic)
    api.list(prefix=topic)
    assert api.state(topic, touch=False)["last_read_ts"] is None
    api.list(prefix=topic, touch=True)
    assert api.state(topic, touch=False)["last_read_ts"] is not None


@pytest.mark.parametrize("page_size", ["0", "-1", "x", "1.5", "", "٣"])
def test_a_bad_page_size_is_refused(api: Client, page_size: str) -> None:
    assert api.list(page_size=page_size).refusal == (400, "invalid_request")


@pytest.mark.parametrize("page_size", [1_001, 10**15])
def test_a_large_page_size_is_clamped(api: Client, page_size: int) -> None:
    assert api.list(prefix="no-such-", page_size=page_size).status == 200


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "!!!!",
        "abc",
        base64.b64encode(b"not json").decode(),
        base64.b64encode(b'{"after":5}').decode(),
        base64.b64encode(b"{}").decode(),
        base64.b64encode(b"\xff\xfe").decode(),
        pytest.param(base64.b64encode(b'{"x":%b%b}' % (b"[" * 2_000, b"]" * 2_000)).decode(), id="deep"),
    ],
)
def test_a_corrupt_cursor_is_refused(api: Client, cursor: str) -> None:
    assert api.list(cursor=cursor).refusal == (400, "invalid_request")


def test_unknown_query_parameters_are_ignored(api: Client, topic: str) -> None:
    api.put(topic)
    assert api.list(prefix=topic, colour="blue")["topics"][0]["topic"] == topic
