"""Reading with a cursor: windows, filters, watermarks, the byte budget and the long poll; in both lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from .client import Answer, Client
from .server import eventually

pytestmark = pytest.mark.e2e

# --- the answer --------------------------------------------------------------------------------------


def test_an_empty_topic(api: Client, topic: str) -> None:
    api.put(topic)
    answer = api.diff(topic)
    assert answer.status == 200
    assert answer.without_performance() == {
        "topic": topic,
        "records": [],
        "next_from_seq": 0,
        "head_seq": 0,
        "earliest_seq": 1,
        "caught_up": True,
        "tombstone": None,
        "lag": 0,
    }


def test_records_and_watermarks(api: Client, topic: str) -> None:
    api.append_records(topic, [{"data": "a", "tag": "t", "node": "n", "meta": {"k": "v"}}, {"data": "b"}])
    answer = api.diff(topic)
    first, second = answer["records"]
    assert first.keys() == {"$seq", "$ts", "$node", "data", "meta"}
    assert (first["$seq"], first["$node"], first["data"], first["meta"]) == (1, "n", "a", {"k": "v"})
    assert second.keys() == {"$seq", "$ts", "data"}
    assert isinstance(first["$ts"], int)
    del answer.json["records"]
    assert answer.without_performance() == {
        "topic": topic,
        "next_from_seq": 2,
        "head_seq": 2,
        "earliest_seq": 1,
        "caught_up": True,
        "tombstone": None,
        "lag": 0,
    }
    assert answer["performance"]["records_scanned"] == 2


def test_a_large_answer_as_gzip(api: Client, topic: str) -> None:
    """It is compressed in slices, and the same in the end."""
    data = [f"{number}:" + "".join(chr(33 + number * at % 90) for at in range(50_000)) for number in range(1, 9)]
    api.append(topic, *data)
    body = {"max_batch_bytes": 1 << 20}
    answer = api.send("POST", f"/v0/topics/{topic}/diff", body, headers={"Accept-Encoding": "gzip"})
    assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("gzip", "Accept-Encoding")
    assert answer.data == data
    assert int(answer.headers["content-length"]) < len(answer.raw)
    plain = api.send("POST", f"/v0/topics/{topic}/diff", body)
    assert "content-encoding" not in plain.headers
    del plain.json["performance"], answer.json["performance"]
    assert answer.json == plain.json


def test_a_diff_never_creates(api: Client, topic: str) -> None:
    answer = api.diff(topic)
    assert answer.refusal == (404, "topic_not_found")
    assert answer.detail == {"topic": topic}
    assert api.state(topic).status == 404


def test_without_a_body_everything_is_default(api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    assert api.send("POST", f"/v0/topics/{topic}/diff").seqs == [1, 2]


def test_reading_is_repeatable(api: Client, topic: str) -> None:
    api.append(topic, 1, 2, 3)
    first, second = api.diff(topic), api.diff(topic)
    assert first.without_performance() == second.without_performance()


# --- the window --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thousands(clients: dict[str, Client]) -> str:
    """A topic with 1,500 records in uneven batches; each record's data is its seq."""
    at = 1
    for size in (1, 299, 2, 700, 1, 1, 496):
        clients["http1"].append("thousands", *range(at, at + size))
        at += size
    return "thousands"


@pytest.mark.parametrize(
    ("limit", "delivered"), [(1, 1), (2, 2), (300, 300), (301, 301), (0, 256), (1_000, 1_000), (1_001, 1_000)]
)
def test_limit(api: Client, thousands: str, limit: int, delivered: int) -> None:
    answer = api.diff(thousands, limit=limit)
    assert answer.data == answer.seqs == list(range(1, delivered + 1))
    assert (answer["next_from_seq"], answer["lag"], answer["caught_up"]) == (delivered, 1_500 - delivered, False)


@pytest.mark.parametrize("limit", [2**32 - 1, 2**32, 2**63])
def test_a_huge_limit_is_clamped(api: Client, thousands: str, limit: int) -> None:
    assert len(api.diff(thousands, limit=limit).seqs) == 1_000


def test_the_default_limit_is_256(api: Client, thousands: str) -> None:
    assert len(api.diff(thousands).seqs) == 256


@pytest.mark.parametrize("limit", [37, 256, 999])
def test_paging_delivers_everything_once(api: Client, thousands: str, limit: int) -> None:
    seen: list[int] = []
    cursor, caught_up = 0, False
    while not caught_up:
        answer = api.diff(thousands, cursor, limit=limit)
        seen += answer.seqs
        assert answer["next_from_seq"] > cursor
        cursor, caught_up = answer["next_from_seq"], answer["caught_up"]
        assert caught_up == (cursor == answer["head_seq"])
        assert answer["lag"] == answer["head_seq"] - cursor
    assert seen == list(range(1, 1_501))


@pytest.mark.parametrize("from_seq", [0, 1, 2, 299, 300, 301, 302, 1_001, 1_002, 1_499, 1_500])
def test_the_cursor_is_exclusive(api: Client, thousands: str, from_seq: int) -> None:
    answer = api.diff(thousands, from_seq, limit=3)
    assert answer.seqs == [seq for seq in range(from_seq + 1, from_seq + 4) if seq <= 1_500]
    assert answer["next_from_seq"] == min(from_seq + 3, 1_500)


def test_at_the_head_there_is_nothing(api: Client, thousands: str) -> None:
    answer = api.diff(thousands, 1_500)
    assert (answer.seqs, answer["next_from_seq"], answer["caught_up"], answer["lag"]) == ([], 1_500, True, 0)
    assert answer["tombstone"] is None


# --- beyond the head ---------------------------------------------------------------------------------


@pytest.mark.parametrize("from_seq", [4, 1_000, 2**64 - 1])
def test_a_cursor_beyond_the_head_means_recreated(api: Client, topic: str, from_seq: int) -> None:
    api.append(topic, 1, 2, 3)
    answer = api.diff(topic, from_seq)
    assert answer.seqs == [1, 2, 3]
    assert answer["tombstone"] == {
        "gap_from": 1,
        "gap_to": 3,
        "reason": "recreated",
        "missed_estimate": 3,
        "earliest_seq": 1,
        "head_seq": 3,
    }
    assert (answer["next_from_seq"], answer["caught_up"], answer["lag"]) == (3, True, 0)


def test_recreated_without_records(api: Client, topic: str) -> None:
    api.put(topic)
    answer = api.diff(topic, 5)
    assert answer["tombstone"] == {
        "gap_from": 1,
        "gap_to": 0,
        "reason": "recreated",
        "missed_estimate": 0,
        "earliest_seq": 1,
        "head_seq": 0,
    }
    assert (answer["next_from_seq"], answer["caught_up"]) == (0, True)


def test_a_reader_of_the_topic_before_learns_of_the_new_one(api: Client, topic: str) -> None:
    api.append(topic, *range(10))
    cursor = api.diff(topic)["next_from_seq"]
    api.drop(topic)
    api.append(topic, "new")
    answer = api.diff(topic, cursor)
    assert answer["tombstone"]["reason"] == "recreated"
    assert answer.data == ["new"]
    assert api.diff(topic, answer["next_from_seq"])["tombstone"] is None


def test_a_long_poll_beyond_the_head_does_not_wait(api: Client, topic: str) -> None:
    api.put(topic)
    started = time.monotonic()
    assert api.diff(topic, 5, wait_ms=30_000)["tombstone"]["reason"] == "recreated"
    assert time.monotonic() - started < 25


# --- what is included --------------------------------------------------------------------------------


@pytest.mark.parametrize("include_tags", [False, True, None])
@pytest.mark.parametrize("include_meta", [False, True, None])
def test_tags_and_meta_are_included_as_asked(
    api: Client, topic: str, include_tags: bool | None, include_meta: bool | None
) -> None:
    api.append_records(topic, [{"data": 1, "tag": "t", "meta": {"a": 1}}, {"data": 2}, {"data": 3, "meta": {"b": 2}}])
    asked = {"include_tags": include_tags, "include_meta": include_meta}
    records = api.diff(topic, **{name: value for name, value in asked.items() if value is not None})["records"]
    tags, meta = bool(include_tags), include_meta is not False
    assert [record.get("$tag") for record in records] == (["t", None, None] if tags else [None] * 3)
    assert [record.get("meta") for record in records] == ([{"a": 1}, None, {"b": 2}] if meta else [None] * 3)
    assert ("$tag" in records[0], "meta" in records[0]) == (tags, meta)
    assert "$tag" not in records[1]
    assert "meta" not in records[1]


# --- node filter -------------------------------------------------------------------------------------


@pytest.fixture
def nodes(api: Client, topic: str) -> str:
    """Six records by a, b, nobody, a, b, a; the last three in one batch."""
    for node in ("a", "b", None):
        api.append_records(topic, [{"data": node, "node": node}])
    api.append_records(topic, [{"data": node, "node": node} for node in ("a", "b", "a")])
    return topic


@pytest.mark.parametrize(
    ("node", "seqs"),
    [
        ("a", [2, 3, 5]),
        ("b", [1, 3, 4, 6]),
        ("c", [1, 2, 3, 4, 5, 6]),
        ("A", [1, 2, 3, 4, 5, 6]),
        ("", [1, 2, 3, 4, 5, 6]),
        (["a"], [2, 3, 5]),
        (["a", "b"], [3]),
        (["b", "zzz", "b"], [1, 3, 4, 6]),
        ([], [1, 2, 3, 4, 5, 6]),
        (None, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_own_records_are_left_out_and_the_cursor_passes_them(
    api: Client, nodes: str, node: object, seqs: list[int]
) -> None:
    answer = api.diff(nodes, node=node)
    assert answer.seqs == seqs
    assert (answer["next_from_seq"], answer["caught_up"], answer["lag"]) == (6, True, 0)
    assert answer["tombstone"] is None


def test_a_topic_of_own_records_is_passed_silently(api: Client, topic: str) -> None:
    api.append(topic, 1, 2, 3, node="me")
    answer = api.diff(topic, node="me")
    assert (answer.seqs, answer["next_from_seq"], answer["caught_up"]) == ([], 3, True)


def test_the_window_is_chosen_before_the_filter(api: Client, nodes: str) -> None:
    """Filtered records count against the limit, so a read never scans without bound."""
    cursor, pages = 0, []
    while cursor < 6:
        answer = api.diff(nodes, cursor, limit=2, node="a")
        pages.append(answer.seqs)
        assert answer["next_from_seq"] == cursor + 2
        cursor = answer["next_from_seq"]
    assert pages == [[2], [3], [5]]


def test_the_filter_can_be_switched_off_per_topic(api: Client, topic: str) -> None:
    api.put(topic, dedupe_node=False)
    api.append(topic, 1, 2, node="me")
    assert api.diff(topic, node="me").seqs == [1, 2]


# --- byte budget -------------------------------------------------------------------------------------

MIB = 1 << 20


def _read_all(api: Client, topic: str) -> list[Answer]:
    answers = [api.diff(topic, limit=1_000)]
    while not answers[-1]["caught_up"]:
        answers.append(api.diff(topic, answers[-1]["next_from_seq"], limit=1_000))
        assert len(answers) < 50
    return answers


@pytest.mark.parametrize("batches", [[1] * 12, [12], [5, 1, 6]], ids=["single records", "one batch", "mixed"])
@pytest.mark.parametrize("include_tags", [False, True])
def test_an_answer_has_one_mib_and_loses_nothing(
    api: Client, topic: str, batches: list[int], include_tags: bool
) -> None:
    for size in batches:
        api.append(topic, *["x" * 300_000] * size)
    seen: list[int] = []
    cursor = 0
    while cursor < 12:
        answer = api.diff(topic, cursor, limit=1_000, include_tags=include_tags)
        assert answer.seqs
        assert len(answer.raw) <= MIB
        assert answer["next_from_seq"] == answer.seqs[-1]
        assert answer["caught_up"] == (answer.seqs[-1] == 12)
        seen += answer.seqs
        cursor = answer["next_from_seq"]
    assert seen == list(range(1, 13))


def test_one_record_is_always_delivered(api: Client, topic: str) -> None:
    big = "x" * (MIB - 2)
    api.append(topic, big)
    api.append(topic, big)
    answers = _read_all(api, topic)
    assert [answer.seqs for answer in answers] == [[1], [2]]
    assert answers[0].data == [big]


def test_the_budget_holds_from_the_middle_of_a_batch(api: Client, topic: str) -> None:
    api.append(topic, *["x" * 300_000] * 8)
    answer = api.diff(topic, 5, limit=1_000)
    assert answer.seqs == [6, 7, 8]
    assert answer["caught_up"] is True


@pytest.mark.parametrize("batches", [[1] * 8, [8]], ids=["single records", "one batch"])
def test_max_batch_bytes_bounds_an_answer(api: Client, topic: str, batches: list[int]) -> None:
    for size in batches:
        api.append(topic, *["x" * 300_000] * size)
    assert api.diff(topic, max_batch_bytes=1).seqs == [1]  # one is always delivered
    assert api.diff(topic, 1, max_batch_bytes=500_000).seqs == [2]  # and none that would exceed the bound
    assert api.diff(topic, 1, max_batch_bytes=700_000).seqs == [2, 3]
    assert api.diff(topic).seqs == [1, 2, 3]  # 1 MiB
    assert api.diff(topic, max_batch_bytes=4 * MIB).seqs == list(range(1, 9))  # more than by default


@pytest.mark.parametrize("batch", [1, 3, 12])
def test_no_answer_is_longer_than_8_mib(api: Client, topic: str, batch: int) -> None:
    for _ in range(0, 12, batch):
        api.append(topic, *["x" * 1_000_000] * batch)
    answer = api.diff(topic, limit=1_000, max_batch_bytes=100 * MIB)
    assert answer.seqs == list(range(1, 9))
    assert len(answer.raw) <= 8 * MIB
    assert api.diff(topic, answer["next_from_seq"], max_batch_bytes=100 * MIB).seqs == [9, 10, 11, 12]


# --- long poll ---------------------------------------------------------------------------------------


class _Poll(threading.Thread):
    """A long poll on its own, started and asked for later."""

    def __init__(self, api: Client, topic: str, from_seq: int = 0, **fields: Any) -> None:
        super().__init__()
        self._api = api
        self._ask: Callable[[Client], Answer] = lambda own: own.diff(topic, from_seq, **fields)
        self.took_s = 0.0
        self._answer: Answer | None = None
        self.start()

    def run(self) -> None:
        with self._api.twin() as own:
            started = time.monotonic()
            self._answer = self._ask(own)
            self.took_s = time.monotonic() - started

    def answer(self) -> Answer:
        self.join(30)
        assert self._answer is not None
        return self._answer


def _wait_until_polled(api: Client, topic: str) -> None:
    """A read of a topic that nobody has read before shows in its state."""
    eventually(lambda: api.state(topic, touch=False)["last_read_ts"] is not None, what="the poll's arrival")


def test_a_long_poll_is_woken_by_an_append(api: Client, topic: str) -> None:
    api.put(topic)
    poll = _Poll(api, topic, wait_ms=20_000)
    _wait_until_polled(api, topic)
    api.append(topic, "news")
    answer = poll.answer()
    assert (answer.data, answer["next_from_seq"], answer["caught_up"]) == (["news"], 1, True)
    assert poll.took_s < 10


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "fsync"])
def test_every_class_wakes(api: Client, topic: str, durability: str) -> None:
    api.put(topic, durability=durability)
    poll = _Poll(api, topic, wait_ms=20_000)
    _wait_until_polled(api, topic)
    api.append(topic, "news")
    assert poll.answer().data == ["news"]


def test_all_who_wait_are_woken(api: Client, topic: str) -> None:
    api.put(topic)
    polls = [_Poll(api, topic, wait_ms=20_000) for _ in range(5)]
    _wait_until_polled(api, topic)
    api.append(topic, "news")  # some may come after this one, which is as good
    assert [poll.answer().data for poll in polls] == [["news"]] * 5
    assert max(poll.took_s for poll in polls) < 10


def test_a_long_poll_ends_empty_when_its_time_is_up(api: Client, topic: str) -> None:
    api.append(topic, 1)
    poll = _Poll(api, topic, 1, wait_ms=300)
    answer = poll.answer()
    assert (answer.seqs, answer["next_from_seq"], answer["caught_up"], answer["lag"]) == ([], 1, True, 0)
    assert 0.29 <= poll.took_s < 5


def test_a_long_poll_with_something_to_read_does_not_wait(api: Client, topic: str) -> None:
    api.append(topic, 1)
    poll = _Poll(api, topic, wait_ms=20_000)
    assert poll.answer().seqs == [1]
    assert poll.took_s < 10


def test_own_records_do_not_wake(api: Client, topic: str) -> None:
    api.put(topic)
    poll = _Poll(api, topic, wait_ms=20_000, node="me")
    _wait_until_polled(api, topic)
    api.append(topic, "mine", node="me")
    api.append(topic, "yours", node="you")
    answer = poll.answer()
    assert (answer.data, answer["next_from_seq"]) == (["yours"], 2)


def test_a_long_poll_over_own_records_only_advances_the_cursor(api: Client, topic: str) -> None:
    api.append(topic, "mine", node="me")
    answer = api.diff(topic, wait_ms=50, node="me")
    assert (answer.seqs, answer["next_from_seq"], answer["caught_up"]) == ([], 1, True)


def test_a_long_poll_ends_when_its_topic_is_deleted(api: Client, topic: str) -> None:
    api.put(topic)
    poll = _Poll(api, topic, wait_ms=20_000)
    _wait_until_polled(api, topic)
    api.drop(topic)
    assert poll.answer().refusal == (404, "topic_not_found")


def test_a_wait_beyond_the_most_is_clamped_not_refused(api: Client, topic: str) -> None:
    api.append(topic, 1)
    assert api.diff(topic, wait_ms=2**40).seqs == [1]


def test_a_follower_sees_every_batch_whole_in_order_and_once(api: Client, topic: str) -> None:
    api.put(topic)

    def write() -> None:
        with api.twin() as own:
            for number in range(60):
                own.append(topic, *[[number, at] for at in range(1 + number % 4)])

    wanted = [[number, at] for number in range(60) for at in range(1 + number % 4)]
    writer = threading.Thread(target=write)
    writer.start()
    seen: list[list[int]] = []
    cursor = 0
    while len(seen) < len(wanted):
        answer = api.diff(topic, cursor, wait_ms=5_000, limit=1_000)
        assert answer.seqs == list(range(cursor + 1, cursor + 1 + len(answer.seqs)))
        seen += answer.data
        cursor = answer["next_from_seq"]
        number, at = seen[-1]
        assert at == number % 4, "half a batch"
    writer.join()
    assert seen == wanted


def test_a_waiting_poll_keeps_nobody_else_waiting(api: Client, topic: str) -> None:
    api.put(topic)
    poll = _Poll(api, topic, wait_ms=20_000)
    _wait_until_polled(api, topic)
    assert api.append(f"{topic}.other", 1).status == 201
    assert api.get("/v0/health").status == 200
    api.append(topic, 1)
    poll.answer()


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"from_seq": -1},
        {"from_seq": 2**64},
        {"from_seq": 1.5},
        {"from_seq": "1"},
        {"from_seq": None},
        {"limit": -1},
        {"limit": "5"},
        {"limit": 2.5},
        {"wait_ms": -1},
        {"wait_ms": "5"},
        {"node": 5},
        {"node": {"a": 1}},
        {"node": ["a", 5]},
        {"node": [None]},
        {"include_tags": 1},
        {"include_meta": "no"},
        [],
        "x",
        5,
    ],
    ids=str,
)
def test_wrong_types_are_refused(api: Client, topic: str, body: object) -> None:
    api.append(topic, 1)
    assert api.send("POST", f"/v0/topics/{topic}/diff", body).refusal == (400, "invalid_request")
