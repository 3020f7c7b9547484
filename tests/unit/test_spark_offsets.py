"""Offsets of a stream, and how many records a batch may take: arithmetic, without a folder."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from hypothesis import given
from hypothesis import strategies as st

from spark_pipeline.stream import Offsets, admitted, forward, losses, losses_between
from topics.datadir.view.topic import Topic
from topics.storage.config import TopicConfig


def at(*, id: str = "1", **places: int) -> Offsets:
    return of(places, id=id)


def of(places: dict[str, int], *, id: str = "1") -> Offsets:
    return {name: {"id": id, "next": following} for name, following in places.items()}


def places(offsets: Offsets) -> dict[str, int]:
    return {name: place["next"] for name, place in offsets.items()}


def from_one(name: str) -> int:
    return 1


# --- forward ---


def test_a_query_never_goes_back() -> None:
    assert forward(at(a=10, b=5), at(a=8, b=9)) == at(a=10, b=9)


def test_a_topic_that_was_made_again_begins_anew() -> None:
    again = at(id="2", a=3)
    assert forward(at(a=10), again) == again


def test_a_topic_that_is_gone_is_forgotten_unless_it_was_asked_for_by_name() -> None:
    start = at(a=10, b=5)
    assert forward(start, at(b=7)) == at(b=7)
    assert forward(start, at(b=7), keep=frozenset(["a", "c"])) == at(a=10, b=7)


def test_offsets_are_compared_as_text() -> None:
    assert list(forward({}, at(c=1, a=1, b=1))) == ["a", "b", "c"]
    assert list(forward(at(b=1), at(c=1, a=1), keep=frozenset("b"))) == ["a", "b", "c"]
    assert list(admitted(at(b=1, a=1), at(c=9, a=9, b=9), 5, from_one)) == ["a", "b", "c"]


# --- admission ---


def test_everything_if_it_fits() -> None:
    assert admitted(at(a=1, b=1), at(a=11, b=6), 15, from_one) == at(a=11, b=6)


def test_shares_are_in_proportion_and_none_is_left_out() -> None:
    found = places(admitted(at(large=1, small=1), at(large=1_001, small=11), 101, from_one))
    assert found == {"large": 100, "small": 2}


def test_a_topic_that_is_new_is_left_out_until_it_gets_a_share() -> None:
    first = admitted(at(a=1), at(a=101, b=101), 1, from_one)
    assert first == at(a=2)
    assert admitted(first, at(a=101, b=101), 1, from_one) == at(a=2, b=2)


def test_a_new_topic_begins_where_it_begins() -> None:
    found = admitted({}, at(a=101), 10, lambda name: 51)
    assert found == at(a=61)


def test_there_may_be_less_than_where_a_topic_begins() -> None:
    assert admitted(at(b=1), at(a=5, b=100), 10, lambda name: 51) == at(b=11)


where_and_how_many = st.tuples(st.integers(1, 50), st.integers(0, 200))
offset_maps = st.dictionaries(st.sampled_from("abcdefgh"), where_and_how_many, min_size=1)


@given(topics=offset_maps, most=st.integers(1, 300), known=st.sets(st.sampled_from("abcdefgh")))
def test_never_more_than_allowed_and_never_nothing(
    topics: dict[str, tuple[int, int]], most: int, known: set[str]
) -> None:
    start = of({name: first for name, (first, _) in topics.items() if name in known})
    heads = of({name: first + count for name, (first, count) in topics.items()})
    found = admitted(start, heads, most, lambda name: topics[name][0])
    taken = {name: place["next"] - topics[name][0] for name, place in found.items()}
    waiting = {name: count for name, (_, count) in topics.items()}
    assert all(0 <= taken[name] <= waiting[name] for name in taken)
    assert sum(taken.values()) <= most
    assert sum(taken.values()) > 0 or not any(waiting.values())
    assert set(start) <= set(found)
    if len([1 for count in waiting.values() if count]) <= most:
        assert all(taken[name] for name, count in waiting.items() if count)
    if sum(waiting.values()) <= most:
        assert found == dict(sorted(heads.items()))


@given(topics=offset_maps, most=st.integers(1, 30))
def test_batch_after_batch_reaches_the_heads_and_stays_there(topics: dict[str, tuple[int, int]], most: int) -> None:
    heads = of({name: first + count for name, (first, count) in topics.items()})
    place: Offsets = {}
    for _ in range(sum(count for _, count in topics.values()) + 1):
        place = admitted(place, heads, most, lambda name: topics[name][0])
    assert place == dict(sorted(heads.items()))
    assert admitted(place, heads, most, lambda name: topics[name][0]) == place


def test_topics_take_turns_although_all_of_them_go_on_being_written() -> None:
    names = [f"t{n}" for n in range(10)]
    place = of(dict.fromkeys(names, 1))
    heads = dict.fromkeys(names, 1_000)
    for batch in range(20):
        heads = {name: head + (100 if batch % 2 else 1) for name, head in heads.items()}
        place = admitted(place, of(heads), 3, from_one)
    assert sum(places(place).values()) == 10 + 60
    assert set(places(place).values()) == {7}


# --- losses ---


def topic(**fields: object) -> Topic:
    made = Topic(shard=3, id=0xAB, name="t", config=TopicConfig(), created_ms=0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def told(since: Topic, to: Topic) -> list[tuple[str, int, int, int]]:
    rows = losses_between(to, losses(since), losses(to))
    return [(reason, first, last, missed) for _, _, reason, first, last, missed in rows]


def test_each_loss_is_told_once() -> None:
    fresh = topic()
    capped = topic(evict_floor=11, cap_seq=10, evicted_total=7)  # 3 had been deleted
    later = topic(evict_floor=21, cap_seq=10, ttl_seq=20, evicted_total=7, expired_total=10)
    assert told(fresh, fresh) == []
    assert told(fresh, capped) == [("cap", 1, 10, 7)]
    assert told(capped, later) == [("ttl", 11, 20, 10)]
    assert told(fresh, later) == [("mixed", 1, 20, 17)]


def test_holes_and_trims_are_apart() -> None:
    lost = topic(holes=[(50, 59)])
    trimmed = topic(holes=[(50, 59)], trims=[(20, 29)])
    assert told(topic(), lost) == [("lost", 50, 59, 10)]
    assert told(lost, trimmed) == [("source_trim", 20, 29, 10)]


def test_a_hole_that_grows_is_told_in_parts() -> None:
    assert told(topic(holes=[(10, 19)]), topic(holes=[(10, 29)])) == [("lost", 20, 29, 10)]


def test_a_hole_below_the_floor_is_told_by_the_floor() -> None:
    assert told(topic(), topic(holes=[(5, 14)], evict_floor=11, cap_seq=10, evicted_total=10)) == [
        ("cap", 1, 10, 10),
        ("lost", 11, 14, 4),
    ]
