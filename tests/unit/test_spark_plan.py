"""Slices and partitions without a folder: topics that are made up, cut and gathered."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_pipeline.options import Options, parse
from spark_pipeline.plan import (
    MIB,
    DataLoss,
    Range,
    Slice,
    Wanted,
    beginning,
    check_loss,
    partitions,
    shown_name,
    slices,
    starting_seq,
)
from topics.datadir.batch import Batch
from topics.datadir.view.topic import Topic
from topics.storage.config import TopicConfig
from topics.storage.format import DELETED

OPTIONS = Options(path="/data")


def batch(first: int, count: int, *, length: int = 100, ts: tuple[int, int] = (0, 0)) -> Batch:
    return Batch(
        file="f",
        wal=False,
        salt=1,
        offset=first * 1_000,
        length=length,
        first=first,
        count=count,
        first_ts=ts[0],
        last_ts=ts[1],
        size=count,
        tagged=False,
    )


def topic(*batches: Batch, name: str = "t", number: int = 1) -> Topic:
    made = Topic(shard=0, id=number, name=name, config=TopicConfig(), created_ms=0)
    for each in batches:
        made.add(each)
    made.head_seq = made.batches[-1].last if made.batches else 0
    return made


def sliced(made: Topic, first: int = 1, last: int = 10**9, *, deleted: bool = False, **wanted: object) -> list[Slice]:
    return list(slices([Range(made, first, last)], Wanted(**wanted), deleted=deleted))  # type: ignore[arg-type]


def firsts(found: list[Slice]) -> list[int]:
    return [piece.first for each in found for piece in each.pieces]


# --- slices ---


def test_only_batches_that_hold_what_is_wanted() -> None:
    made = topic(*(batch(first, 10, ts=(first, first + 9)) for first in (1, 11, 21, 31)))
    assert firsts(sliced(made)) == [1, 11, 21, 31]
    assert firsts(sliced(made, 10, 21)) == [1, 11, 21]
    assert firsts(sliced(made, 11, 20)) == [11]
    assert firsts(sliced(made, start_ms=20)) == [11, 21, 31]
    assert firsts(sliced(made, end_ms=11)) == [1]
    assert firsts(sliced(made, start_ms=12, end_ms=15)) == [11]
    assert sliced(made, 41, 50) == []


def test_batches_without_a_live_record_are_not_read_unless_deleted_ones_are_wanted() -> None:
    made = topic(batch(1, 10), batch(11, 10), batch(21, 10))
    made.batches[1].flags = bytearray([DELETED] * 10)
    made.evict_floor = 11
    assert firsts(sliced(made)) == [21]
    assert firsts(sliced(made, deleted=True)) == [1, 11, 21]


def test_what_was_known_to_be_deleted_goes_along() -> None:
    made = topic(batch(1, 3))
    made.batches[0].mark_deleted(2)
    ((piece,),) = [each.pieces for each in sliced(made)]
    assert piece.flags == bytes([0, DELETED, 0])


# --- where to begin ---


def test_beginnings() -> None:
    made = topic(batch(1, 20))
    made.floor, made.evict_floor = 9, 4  # 1 to 3 were evicted, 4 to 8 deleted
    assert beginning(made, OPTIONS) == 9
    assert beginning(made, Options(path="/", deleted=True)) == 4


@pytest.mark.parametrize(
    ("given_", "expected"),
    [("earliest", 4), ("latest", 21), ('{"t": 12}', 12), ('{"t": 0}', 1), ('{"t": -1}', 21), ('{"t": 21}', 21)],
)
def test_starting_seqs(given_: str, expected: int) -> None:
    made = topic(batch(1, 20))
    made.evict_floor = 4
    assert starting_seq(made, parse({"path": "/", "startingOffsets": given_}), "t") == expected


def test_a_start_beyond_the_end_is_a_loss() -> None:
    made = topic(batch(1, 20))
    options = parse({"path": "/", "startingOffsets": '{"t": 30}'})
    with pytest.raises(DataLoss, match=r"^topic t: records 21 to 29 are gone \(the start is beyond the end, 20: "):
        starting_seq(made, options, "t")
    forgiving = parse({"path": "/", "startingOffsets": '{"t": 30}', "failOnDataLoss": "false"})
    with pytest.warns(UserWarning, match="records 21 to 29 are gone"):
        assert starting_seq(made, forgiving, "t") == 1


def test_every_gap_is_told() -> None:
    made = topic(batch(1, 100))
    made.evict_floor, made.cap_seq = 11, 10
    made.holes = [(30, 39)]
    made.trims = [(50, 50)]
    with pytest.raises(DataLoss, match=r"^topic t: records 5 to 10 are gone \(reason: cap\)\. Start behind them, or"):
        check_loss(Range(made, 5, 100), OPTIONS)
    with pytest.warns(UserWarning, match="are gone") as told:
        check_loss(Range(made, 5, 45), Options(path="/", fail_on_loss=False))
    assert [str(each.message) for each in told] == [
        "topic t: records 5 to 10 are gone (reason: cap)",
        "topic t: records 30 to 39 are gone (reason: lost)",
    ]
    check_loss(Range(made, 11, 29), OPTIONS)
    check_loss(Range(made, 51, 100), OPTIONS)
    with pytest.raises(DataLoss, match=r"records 35 to 36 are gone \(reason: lost\)"):
        check_loss(Range(made, 35, 36), OPTIONS)


def test_the_log_of_a_queue_is_shown_as_the_queue() -> None:
    assert shown_name(topic(name="mail#leases")) == "mail"
    assert shown_name(topic(name="mail")) == "mail"


# --- partitions ---


def covered(parts: list[list[Slice]]) -> list[tuple[int, int]]:
    """(topic, first seq of a batch) in the order of partitions."""
    return [(each.topic_id, piece.first) for part in parts for each in part for piece in each.pieces]


def test_one_hot_topic_is_cut_so_that_all_cores_have_work() -> None:
    hot = topic(*(batch(1 + 1_000 * n, 1_000, length=128 * 1024) for n in range(400)))  # 50 MiB
    parts = partitions(sliced(hot), at_least=0)
    assert len(parts) == 8
    sizes = [sum(each.bytes for each in part) for part in parts]
    assert max(sizes) < 1.2 * min(sizes)
    assert covered(parts) == [(1, 1 + 1_000 * n) for n in range(400)]


def test_no_partition_is_larger_than_a_task_should_be() -> None:
    hot = topic(*(batch(1 + n, 1, length=8 * MIB) for n in range(200)))
    parts = partitions(sliced(hot), at_least=0)
    assert all(sum(each.bytes for each in part) <= 64 * MIB for part in parts)
    assert len(parts) == 25


def test_small_topics_share_a_partition() -> None:
    many = [each for n in range(1, 501) for each in sliced(topic(batch(1, 5, length=1_000), number=n))]
    parts = partitions(many, at_least=0)
    assert len(parts) == 1
    assert len(parts[0]) == 500


def test_slices_of_one_topic_meet_without_a_gap() -> None:
    hot = topic(*(batch(1 + 10 * n, 10, length=MIB) for n in range(20)))
    parts = partitions(sliced(hot, 5, 195), at_least=7)
    bounds = [(each.first, each.last) for part in parts for each in part]
    assert bounds[0][0] == 5
    assert bounds[-1][1] == 195
    assert all(after[0] == before[1] + 1 for before, after in pairwise(bounds))


@given(
    lengths=st.lists(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=8), max_size=6),
    at_least=st.integers(0, 20),
)
def test_every_batch_once_and_as_many_partitions_as_asked_for(lengths: list[list[int]], at_least: int) -> None:
    whole: list[Slice] = []
    for number, sizes in enumerate(lengths):
        whole += sliced(topic(*(batch(1 + n, 1, length=size) for n, size in enumerate(sizes)), number=number))
    parts = partitions(whole, at_least=at_least)
    assert covered(parts) == [(number, 1 + n) for number, sizes in enumerate(lengths) for n in range(len(sizes))]
    assert all(part for part in parts)
    assert len(parts) >= min(at_least, sum(map(len, lengths)))
