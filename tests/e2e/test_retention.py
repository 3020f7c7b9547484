"""What leaves a topic by itself: caps, TTL, both; refusing instead; the tombstones readers see; in both lanes."""

from __future__ import annotations

from typing import Any

import pytest

from .client import Answer, Client
from .server import eventually

pytestmark = pytest.mark.e2e


def tombstone(gap_from: int, gap_to: int, reason: str, *, head_seq: int) -> dict[str, Any]:
    return {
        "gap_from": gap_from,
        "gap_to": gap_to,
        "reason": reason,
        "missed_estimate": gap_to - gap_from + 1,
        "earliest_seq": gap_to + 1,
        "head_seq": head_seq,
    }


# --- caps, discard old -------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [[10], [1] * 10, [4, 4, 2]], ids=["one batch", "single records", "mixed"])
def test_cap_records_keeps_the_newest(api: Client, topic: str, batches: list[int]) -> None:
    api.put(topic, cap_records=3)
    at = 1
    for size in batches:
        api.append(topic, *range(at, at + size))
        at += size
    state = api.state(topic)
    assert (state["head_seq"], state["earliest_seq"], state["count"]) == (10, 8, 3)
    answer = api.diff(topic)
    assert answer.data == [8, 9, 10]
    assert answer["tombstone"] == tombstone(1, 7, "cap", head_seq=10)
    assert (answer["next_from_seq"], answer["caught_up"]) == (10, True)


@pytest.mark.parametrize(("cursor", "gap"), [(0, (1, 7)), (5, (6, 7)), (6, (7, 7)), (7, None), (8, None), (10, None)])
def test_only_a_cursor_below_the_floor_sees_a_tombstone(
    api: Client, topic: str, cursor: int, gap: tuple[int, int] | None
) -> None:
    api.put(topic, cap_records=3)
    api.append(topic, *range(1, 11))
    answer = api.diff(topic, cursor)
    assert answer["tombstone"] == (None if gap is None else tombstone(*gap, "cap", head_seq=10))
    assert answer.seqs == [seq for seq in (8, 9, 10) if seq > cursor]


def test_after_the_tombstone_the_reader_goes_on_without_one(api: Client, topic: str) -> None:
    api.put(topic, cap_records=3)
    api.append(topic, *range(1, 11))
    first = api.diff(topic, limit=1)
    assert (first.seqs, first["tombstone"]["gap_to"]) == ([8], 7)
    second = api.diff(topic, first["next_from_seq"], limit=1)
    assert (second.seqs, second["tombstone"]) == ([9], None)


def test_cap_bytes_is_exact(api: Client, topic: str) -> None:
    api.append(f"{topic}.measure", "x" * 100)
    size = api.state(f"{topic}.measure")["bytes"]
    api.put(topic, cap_bytes=3 * size)
    for number in range(1, 6):
        api.append(topic, "x" * 100)
        state = api.state(topic)
        assert state["bytes"] == min(number, 3) * size
    assert (state["count"], state["earliest_seq"]) == (3, 3)
    api.append(topic, "x" * 101)
    state = api.state(topic)
    assert (state["count"], state["bytes"]) == (2, 2 * size + 1)
    assert api.diff(topic, 1)["tombstone"] == tombstone(2, 4, "cap", head_seq=6)


def test_the_cap_that_is_hit_first_counts(api: Client, topic: str) -> None:
    api.put(topic, cap_records=2, cap_bytes=10_000)
    api.append(topic, 1, 2, 3)
    assert api.state(topic)["count"] == 2
    api.append(topic, "x" * 9_900)
    assert api.state(topic)["count"] <= 2
    assert api.state(topic)["bytes"] <= 10_000


def test_a_tightened_cap_evicts_what_is_there(api: Client, topic: str) -> None:
    api.append(topic, *range(1, 11))
    api.put(topic, cap_records=4)
    state = api.state(topic)
    assert (state["count"], state["earliest_seq"]) == (4, 7)
    assert api.diff(topic)["tombstone"] == tombstone(1, 6, "cap", head_seq=10)


def test_a_loosened_cap_brings_nothing_back(api: Client, topic: str) -> None:
    api.put(topic, cap_records=2)
    api.append(topic, 1, 2, 3, 4)
    api.put(topic)
    api.append(topic, 5)
    assert api.diff(topic).data == [3, 4, 5]


def test_deletes_before_evictions_make_no_tombstone_of_their_own(api: Client, topic: str) -> None:
    """The gap a reader is told reaches to the first live record, deleted or evicted."""
    api.put(topic, cap_records=5)
    api.append(topic, *range(1, 7))  # 1 is evicted
    api.delete(topic, before_seq=4)  # 2 and 3 go on purpose
    answer = api.diff(topic)
    assert answer["tombstone"] == tombstone(1, 3, "cap", head_seq=6)
    assert answer.seqs == [4, 5, 6]
    for cursor in (1, 2, 3):
        assert api.diff(topic, cursor)["tombstone"] is None, cursor


def test_deleted_records_do_not_count_against_the_cap(api: Client, topic: str) -> None:
    api.put(topic, cap_records=3)
    api.append(topic, 1, 2, 3)
    api.delete(topic, before_seq=3)
    api.append(topic, 4, 5)
    answer = api.diff(topic)
    assert answer.data == [3, 4, 5]
    assert answer["tombstone"] is None


def test_an_evicted_tag_is_not_deleted_again(api: Client, topic: str) -> None:
    api.put(topic, cap_records=2)
    api.append_records(topic, [{"data": n, "tag": "t"} for n in range(5)])
    assert api.delete(topic, match="t")["deleted"] == 2


# --- discard reject ----------------------------------------------------------------------------------


def _assert_full(answer: Answer, topic: str, **detail: object) -> None:
    assert answer.refusal == (422, "topic_full")
    assert {name: answer.detail[name] for name in detail} == detail


def test_a_full_topic_refuses(api: Client, topic: str) -> None:
    api.put(topic, cap_records=3, discard="reject")
    assert api.append(topic, 1, 2, 3).status == 200
    _assert_full(api.append(topic, 4), topic, cap_records=3, cap_bytes=0, head_seq=3, earliest_seq=1)
    assert api.diff(topic).data == [1, 2, 3]


def test_a_batch_is_refused_whole(api: Client, topic: str) -> None:
    api.put(topic, cap_records=3, discard="reject")
    api.append(topic, 1, 2)
    assert api.append(topic, 3, 4).refusal == (422, "topic_full")
    assert api.state(topic)["head_seq"] == 2
    assert api.append(topic, 3)["seqs"] == [3]


def test_a_topic_full_of_bytes_refuses(api: Client, topic: str) -> None:
    api.append(f"{topic}.measure", "x" * 100)
    size = api.state(f"{topic}.measure")["bytes"]
    api.put(topic, cap_bytes=2 * size, discard="reject")
    api.append(topic, "x" * 100)
    assert api.append(topic, "x" * 101).refusal == (422, "topic_full")
    assert api.append(topic, "x" * 100).status == 200
    _assert_full(api.append(topic, 1), topic, cap_records=0, cap_bytes=2 * size, head_seq=2, earliest_seq=1)


@pytest.mark.parametrize(
    ("caps", "data"),
    [({"cap_records": 2}, [1, 2, 3]), ({"cap_bytes": 200}, ["x" * 300])],
    ids=["more records than the cap", "more bytes than the cap"],
)
@pytest.mark.parametrize("exists", [True, False])
def test_what_can_never_fit_is_another_error(
    api: Client, topic: str, caps: dict[str, int], data: list[Any], exists: bool
) -> None:
    config = {**caps, "discard": "reject"}
    if exists:
        api.put(topic, **config)
    assert api.append(topic, *data, config=config).refusal == (400, "record_too_large")
    if exists:
        assert api.state(topic)["head_seq"] == 0
    else:
        assert api.state(topic).status == 404


def test_without_caps_reject_refuses_nothing(api: Client, topic: str) -> None:
    api.put(topic, discard="reject")
    assert api.append(topic, *range(1_000)).status == 200


def test_expired_records_make_room(api: Client, topic: str) -> None:
    api.put(topic, cap_records=2, discard="reject")
    api.append(topic, 1, 2)
    assert api.append(topic, 3).status == 422
    api.put(topic, cap_records=2, discard="reject", ttl_ms=1)
    eventually(lambda: api.append(topic, 3).status == 200)


# --- TTL ---------------------------------------------------------------------------------------------


def _expire(api: Client, topic: str, **config: object) -> None:
    """Make the TTL so short that everything there is expires. So no test depends on how fast the machine is."""
    api.put(topic, ttl_ms=1, **config)
    eventually(lambda: api.state(topic)["count"] == 0)


def test_records_expire_by_themselves(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=100)
    api.append(topic, 1)
    eventually(lambda: api.diff(topic).seqs == [])
    assert api.diff(topic)["tombstone"] == tombstone(1, 1, "ttl", head_seq=1)


def test_expired_records_are_gone_with_a_tombstone(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=60_000)
    api.append(topic, 1, 2)
    assert api.diff(topic).data == [1, 2]
    _expire(api, topic)
    state = api.state(topic)
    assert (state["earliest_seq"], state["head_seq"], state["bytes"]) == (3, 2, 0)
    answer = api.diff(topic)
    assert answer.seqs == []
    assert answer["tombstone"] == tombstone(1, 2, "ttl", head_seq=2)
    assert (answer["next_from_seq"], answer["caught_up"]) == (2, True)
    assert api.diff(topic, 2)["tombstone"] is None


def test_younger_records_stay(api: Client, topic: str) -> None:
    api.append(topic, "old")
    _expire(api, topic)
    api.put(topic, ttl_ms=60_000)
    api.append(topic, "new")
    answer = api.diff(topic)
    assert (answer.data, answer["earliest_seq"]) == (["new"], 2)
    assert answer["tombstone"] == tombstone(1, 1, "ttl", head_seq=2)


def test_a_record_is_there_until_its_time(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=60_000)
    api.append(topic, 1)
    assert api.state(topic)["count"] == 1


def test_a_ttl_set_later_counts_for_what_is_there(api: Client, topic: str) -> None:
    api.append(topic, 1)
    api.put(topic, ttl_ms=1)
    eventually(lambda: api.diff(topic).seqs == [])
    assert api.diff(topic)["tombstone"]["reason"] == "ttl"


def test_expiry_shows_in_the_list_too(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=1)
    api.append(topic, 1)
    eventually(lambda: api.list(prefix=topic)["topics"][0]["count"] == 0)
    row = api.list(prefix=topic)["topics"][0]
    assert (row["earliest_seq"], row["head_seq"], row["bytes"]) == (2, 1, 0)


def test_an_expired_topic_is_empty_enough_to_delete(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=1)
    api.append(topic, 1)
    eventually(lambda: api.drop(topic, if_empty=True).status == 200)


def test_cap_and_ttl_together_are_mixed(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=60_000, cap_records=3)
    api.append(topic, 1, 2, 3, 4)
    _expire(api, topic, cap_records=3)
    assert api.diff(topic)["tombstone"] == tombstone(1, 4, "mixed", head_seq=4)
    assert api.diff(topic, 1)["tombstone"] == tombstone(2, 4, "ttl", head_seq=4)


def test_deletes_are_silent_but_for_what_expires_after_them(api: Client, topic: str) -> None:
    api.append(topic, 1, 2, 3)
    api.delete(topic, before_seq=3)
    assert api.diff(topic)["tombstone"] is None
    _expire(api, topic)
    assert api.diff(topic)["tombstone"] == tombstone(1, 3, "ttl", head_seq=3)
