"""A topic in memory: what holds between any two calls, and what its snapshot says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, Shard, examples

from topics.storage.config import TopicConfig
from topics.storage.snapshot import decode_topic
from topics.walshard.topic.topic import Topic


def records(count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(count)]


def check(topic: Topic) -> None:
    """The rules that open topic.py."""
    assert topic.evict_floor <= topic.earliest_seq <= topic.head_seq + 1 <= topic.next_seq
    front = topic.rows.front()
    if front is not None:
        assert front.live > 0
        assert topic.earliest_seq == front.first_live()
    live = [row for row in topic.rows if row.live]
    assert topic.count == sum(row.live for row in live) == sum(len(list(row.live_indexes())) for row in live)
    assert topic.bytes == sum(row.size for row in live)
    for row in live:
        assert row.live == len(list(row.live_indexes()))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 6)),
        st.tuples(st.just("before"), st.integers(0, 40)),
        st.tuples(st.just("tag"), st.sampled_from([0, 1])),
        st.tuples(st.just("cap"), st.integers(0, 9)),
        st.tuples(st.just("flush"), st.just(0)),
    ),
    max_size=25,
)


@examples(80)
@given(steps=STEPS)
def test_its_rules_hold_after_every_step(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    shard = Shard(tmp_path_factory.mktemp("topic"), segment_max_events=7)
    shard.put("t", TopicConfig())
    topic = shard.topic("t")
    earliest = 1
    for step, value in steps:
        if step == "append":
            shard.append("t", [Record(b"1", tag=str(number % 2)) for number in range(value)])
        elif step == "before":
            shard.delete("t", before_seq=value)
        elif step == "tag":
            shard.delete("t", tag=str(value))
        elif step == "cap":
            shard.put("t", TopicConfig(cap_records=value))
        else:
            shard.flush("t")
        check(topic)
        assert topic.earliest_seq >= earliest, "earliest_seq went back"
        earliest = topic.earliest_seq
        assert sum(file.pins for file in shard.engine.wal.files) == topic.tail_rows
    shard.crash()


def test_its_snapshot_is_what_it_restores(tmp_path: Path) -> None:
    shard = Shard(tmp_path, segment_max_events=5)
    shard.put("t", TopicConfig(cap_records=12, ttl_ms=10**6))
    shard.append("t", records(15), key="k")
    shard.flush("t")
    shard.delete("t", before_seq=7)
    shard.diff("t")
    topic = shard.topic("t")
    before = decode_topic(topic.encoded_state())
    shard.stop()
    shard.open()
    after = decode_topic(shard.topic("t").encoded_state())
    assert after == before


def test_an_unchanged_topic_is_not_encoded_again(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.append("t", records(1))
    topic = shard.topic("t")
    first = topic.encoded_state()
    assert topic.encoded_state() is first
    shard.append("u", records(1))
    assert topic.encoded_state() is first


@pytest.mark.parametrize("change", ["append", "pending key", "delete", "put", "cap", "flush", "expire"])
def test_every_change_reaches_the_next_snapshot(tmp_path: Path, change: str) -> None:
    shard = Shard(tmp_path)
    shard.put("t", TopicConfig(durability="fsync", durable=True, ttl_ms=100))
    shard.append("t", records(5))
    topic = shard.topic("t")
    before = topic.encoded_state()
    if change == "append":
        shard.append("t", records(1))
    elif change == "pending key":
        shard.send_append("t", records(1), key="k")
        shard.engine.commit.write()
    elif change == "delete":
        shard.delete("t", before_seq=2)
    elif change == "put":
        shard.put("t", TopicConfig(durability="fsync", durable=True, ttl_ms=200))
    elif change == "cap":
        shard.put("t", TopicConfig(durability="fsync", durable=True, ttl_ms=100, cap_records=2))
    elif change == "flush":
        shard.flush("t")
    else:
        shard.wall.pass_ms(101)
        shard.report("t")
    assert topic.encoded_state() != before


@pytest.mark.parametrize(
    ("cap_seq", "ttl_seq", "from_seq", "reason"),
    [(5, 0, 0, "cap"), (0, 5, 0, "ttl"), (3, 5, 0, "mixed"), (3, 5, 3, "ttl"), (5, 3, 3, "cap"), (5, 3, 2, "mixed")],
)
def test_reasons(tmp_path: Path, cap_seq: int, ttl_seq: int, from_seq: int, reason: str) -> None:
    shard = Shard(tmp_path)
    shard.put("t", TopicConfig())
    topic = shard.topic("t")
    topic.cap_seq, topic.ttl_seq = cap_seq, ttl_seq
    assert topic.tombstone_reason(from_seq) == reason


def test_totals_are_the_sum_over_topics(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    for name in ("a", "b", "c"):
        shard.append(name, records(5))
    shard.delete("a", before_seq=3)
    shard.drop("b")
    shard.put("c", TopicConfig(cap_records=1))
    for _ in range(2):
        totals = shard.engine.totals
        assert totals.records == 3 + 1
        assert totals.bytes == sum(topic.bytes for topic in shard.engine.topics.values())
        shard.restart()
