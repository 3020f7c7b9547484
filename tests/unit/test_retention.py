"""Caps, TTL and deletes, case by case. The machine in test_engine_machine.py mixes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model import Record, Shard, error_of

from topics.storage.config import TopicConfig
from topics.storage.format import RECORD_OVERHEAD


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path, segment_max_events=5)


def records(count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % (number % 10), **more) for number in range(count)]


SIZE = 1 + RECORD_OVERHEAD


def live(shard: Shard) -> list[int]:
    return [stored.seq for stored in shard.everything("t")]


def floors(shard: Shard) -> tuple[int, int]:
    return shard.topic("t").evict_floor, shard.report("t").earliest_seq


# --- caps ---


@pytest.mark.parametrize("batches", [[10], [1] * 10, [3, 3, 4], [6, 4]])
@pytest.mark.parametrize("cap", [1, 3, 4, 5, 9, 10, 11])
def test_a_cap_of_records_is_exact(shard: Shard, batches: list[int], cap: int) -> None:
    shard.put("t", TopicConfig(cap_records=cap))
    for size in batches:
        shard.append("t", records(size))
    assert live(shard) == list(range(max(1, 11 - cap), 11))
    report = shard.report("t")
    assert (report.count, report.bytes) == (min(cap, 10), min(cap, 10) * SIZE)
    assert floors(shard) == (max(1, 11 - cap), max(1, 11 - cap))
    assert shard.topic("t").evicted_total == max(0, 10 - cap)


@pytest.mark.parametrize("batches", [[10], [1] * 10, [3, 3, 4]])
@pytest.mark.parametrize(
    ("cap", "kept"), [(SIZE - 1, 0), (SIZE, 1), (2 * SIZE - 1, 1), (5 * SIZE, 5), (5 * SIZE + 1, 5)]
)
def test_a_cap_of_bytes_is_exact(shard: Shard, batches: list[int], cap: int, kept: int) -> None:
    shard.put("t", TopicConfig(cap_bytes=cap))
    for size in batches:
        shard.append("t", records(size))
    assert live(shard) == list(range(11 - kept, 11))
    assert shard.report("t").bytes == kept * SIZE


def test_whichever_cap_is_hit_first(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=5, cap_bytes=3 * SIZE))
    shard.append("t", records(10))
    assert shard.report("t").count == 3
    shard.put("t", TopicConfig(cap_records=2, cap_bytes=300 * SIZE))
    assert shard.report("t").count == 2


def test_a_tighter_cap_applies_at_once_and_a_wider_one_brings_nothing_back(shard: Shard) -> None:
    shard.append("t", records(10))
    shard.put("t", TopicConfig(cap_records=4))
    assert live(shard) == [7, 8, 9, 10]
    shard.put("t", TopicConfig())
    assert live(shard) == [7, 8, 9, 10]
    shard.restart()
    assert live(shard) == [7, 8, 9, 10]
    assert floors(shard) == (7, 7)


def test_deleted_records_do_not_count_towards_a_cap(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=5))
    shard.append("t", records(2) + records(3, tag="x"))
    shard.delete("t", tag="x")
    shard.append("t", records(3))
    assert live(shard) == [1, 2, 6, 7, 8]
    assert floors(shard) == (1, 1)
    shard.append("t", records(1))
    assert live(shard) == [2, 6, 7, 8, 9]
    assert floors(shard) == (2, 2)


def test_popping_deleted_slots_is_no_eviction(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=3))
    shard.append("t", records(2, tag="x") + records(1))
    shard.delete("t", tag="x")
    assert floors(shard) == (1, 3)
    shard.append("t", records(3))
    assert live(shard) == [4, 5, 6]
    assert floors(shard) == (4, 4)


def test_caps_reach_into_segments(shard: Shard) -> None:
    shard.append("t", records(20))
    shard.flush("t")
    shard.put("t", TopicConfig(cap_records=7))
    assert live(shard) == list(range(14, 21))
    shard.checkpoint()
    assert len(shard.topic("t").segments) == 1
    shard.restart()
    assert live(shard) == list(range(14, 21))


# --- reject ---


def test_reject_refuses_before_giving_out_seqs(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=5, discard="reject"))
    shard.append("t", records(4))
    error = error_of(lambda: shard.append("t", records(2)))
    assert (error.code, error.status) == ("topic_full", 422)
    assert error.detail is not None
    assert {key: error.detail[key] for key in ("cap_records", "cap_bytes", "head_seq", "earliest_seq")} == {
        "cap_records": 5,
        "cap_bytes": 0,
        "head_seq": 4,
        "earliest_seq": 1,
    }
    assert shard.append("t", records(1)).first_seq == 5
    assert error_of(lambda: shard.append("t", records(1))).code == "topic_full"
    shard.delete("t", before_seq=3)
    assert shard.append("t", records(2)).first_seq == 6


def test_reject_by_bytes(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_bytes=3 * SIZE, discard="reject"))
    shard.append("t", records(3))
    assert error_of(lambda: shard.append("t", records(1))).code == "topic_full"
    assert error_of(lambda: shard.append("t", records(4))).code == "record_too_large"


def test_a_write_that_can_never_fit_is_another_error(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=5, discard="reject"))
    error = error_of(lambda: shard.append("t", records(6)))
    assert (error.code, error.status) == ("record_too_large", 400)


def test_a_new_topic_that_can_never_hold_the_write_is_not_made(shard: Shard) -> None:
    config = TopicConfig(cap_records=2, discard="reject")
    assert error_of(lambda: shard.append("t", records(3), config=config)).code == "record_too_large"
    assert "t" not in shard.engine.topics


def test_reject_counts_what_is_not_readable_yet(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=3, discard="reject", durability="fsync", durable=True))
    first = shard.send_append("t", records(2))
    second = shard.send_append("t", records(2))
    third = shard.send_append("t", records(1))
    assert error_of(lambda: shard.answer(second)).code == "topic_full"
    shard.settle()
    assert shard.answer(first).first_seq == 1
    assert shard.answer(third).first_seq == 3


def test_reject_makes_room_of_what_has_expired(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=2, discard="reject", ttl_ms=10))
    shard.append("t", records(2))
    shard.wall.pass_ms(11)
    assert shard.append("t", records(2)).first_seq == 3


def test_reject_never_drops_what_it_took(shard: Shard) -> None:
    shard.append("t", records(10))
    shard.put("t", TopicConfig(cap_records=4, discard="reject"))
    assert len(live(shard)) == 10
    shard.restart()
    assert len(live(shard)) == 10


# --- ttl ---


def test_expiry_is_strict_and_by_record(shard: Shard) -> None:
    shard.put("t", TopicConfig(ttl_ms=100))
    for _ in range(4):
        shard.append("t", records(1))
        shard.wall.pass_ms(30)
    assert live(shard) == [2, 3, 4]  # 120 ms, 90, 60, 30
    shard.wall.pass_ms(10)
    assert live(shard) == [2, 3, 4]
    shard.wall.pass_ms(1)
    assert live(shard) == [3, 4]
    report = shard.report("t")
    assert (report.count, report.bytes, report.earliest_seq) == (2, 2 * SIZE, 3)


def test_expiry_cuts_through_a_block(shard: Shard) -> None:
    shard.put("t", TopicConfig(ttl_ms=100))
    for _ in range(4):
        shard.append("t", records(1))
        shard.wall.pass_ms(10)
    shard.flush("t")
    assert len(shard.topic("t").rows) == 1
    shard.wall.pass_ms(75)  # 115, 105, 95, 85
    assert live(shard) == [3, 4]
    assert floors(shard) == (3, 3)
    shard.restart()
    assert live(shard) == [3, 4]


def test_a_clock_set_back_neither_revives_nor_ages(shard: Shard) -> None:
    shard.put("t", TopicConfig(ttl_ms=100))
    shard.append("t", records(1))
    shard.wall.pass_ms(101)
    assert live(shard) == []
    shard.wall.set_back_ms(10_000)
    assert live(shard) == []
    shard.append("t", records(1))
    assert live(shard) == [2]
    [stored] = shard.everything("t")
    shard.wall.pass_ms(400)
    assert live(shard) == [], "time passes although the wall clock is behind"
    shard.append("t", records(1))
    [later] = shard.everything("t")
    assert later.ts > stored.ts


def test_another_ttl_brings_nothing_back(shard: Shard) -> None:
    shard.put("t", TopicConfig(ttl_ms=10))
    shard.append("t", records(3))
    shard.wall.pass_ms(11)
    shard.put("t", TopicConfig(ttl_ms=0))
    assert live(shard) == []
    shard.restart()
    assert live(shard) == []
    assert floors(shard) == (4, 4)


def test_a_ttl_set_later_applies_to_what_is_there(shard: Shard) -> None:
    shard.append("t", records(3))
    shard.wall.pass_ms(100)
    shard.append("t", records(1))
    shard.put("t", TopicConfig(ttl_ms=50))
    assert live(shard) == [4]


# --- deletes ---


def test_deletes_by_seq(shard: Shard) -> None:
    shard.append("t", records(5))
    shard.append("t", records(5))
    answer = shard.delete("t", before_seq=4)
    assert (answer.deleted, answer.earliest_seq, answer.head_seq, answer.count, answer.bytes) == (3, 4, 10, 7, 7 * SIZE)
    assert shard.delete("t", before_seq=4).deleted == 0
    assert shard.delete("t", before_seq=0).deleted == 0
    assert shard.delete("t", before_seq=2**64 - 1).deleted == 7
    assert floors(shard) == (1, 11)
    assert shard.append("t", records(1)).first_seq == 11
    assert live(shard) == [11], "a delete is no standing filter"


@pytest.mark.parametrize("flushed", [0, 1, 2])
@pytest.mark.parametrize(
    ("tag", "prefix", "before", "expected"),
    [
        ("a", False, None, [1, 6]),
        ("a", True, None, [1, 2, 3, 6]),
        ("a:", True, None, [2, 3]),
        ("", True, None, [1, 2, 3, 4, 6]),
        ("", False, None, []),
        ("a*", False, None, []),
        ("z", True, None, []),
        ("a", True, 3, [1, 2]),
        ("a", False, 6, [1]),
        ("a", False, 1, []),
    ],
)
def test_deletes_by_tag(
    shard: Shard, flushed: int, tag: str, prefix: bool, before: int | None, expected: list[int]
) -> None:
    tags = ["a", "a:1", "a:2", "b", None, "a", None]
    for at, one in enumerate(tags):
        shard.append("t", [Record(b"1", tag=one)])
        if (flushed == 1 and at == 4) or (flushed == 2 and at == 6):
            shard.flush("t")
    answer = shard.delete("t", tag=tag, prefix=prefix, before_seq=before)
    assert answer.deleted == len(expected)
    assert live(shard) == [seq for seq in range(1, 8) if seq not in expected]
    shard.checkpoint()
    shard.restart()
    assert live(shard) == [seq for seq in range(1, 8) if seq not in expected]
    assert shard.topic("t").deleted_total == len(expected)


def test_deletes_survive_every_kind_of_restart(shard: Shard) -> None:
    shard.append("t", records(12, tag="x") + records(3))
    shard.flush("t")
    shard.delete("t", before_seq=3)
    expected = list(range(3, 16))
    shard.restart()
    assert live(shard) == expected
    shard.checkpoint()
    shard.restart()
    assert live(shard) == expected
    shard.delete("t", tag="x", before_seq=8)
    expected = list(range(8, 16))
    shard.stop()
    shard.open()
    assert live(shard) == expected


def test_a_segment_that_is_all_deleted_goes_as_a_whole(shard: Shard) -> None:
    for tag in ("x", "y", "x"):
        shard.append("t", records(5, tag=tag))
        shard.flush("t")
    paths = [Path(segment.path) for segment in shard.topic("t").segments]
    assert len(paths) == 3
    shard.delete("t", tag="y")
    shard.checkpoint()
    assert [path.exists() for path in paths] == [True, False, True]
    assert live(shard) == [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]
    shard.restart()
    assert live(shard) == [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]


def test_flags_on_disk_are_flipped_in_place(shard: Shard) -> None:
    shard.append("t", records(3) + records(1, tag="x") + records(1))
    shard.flush("t")
    [segment] = shard.topic("t").segments
    before = Path(segment.path).read_bytes()
    shard.delete("t", tag="x")
    assert Path(segment.path).read_bytes() == before
    shard.checkpoint()
    after = Path(segment.path).read_bytes()
    changed = [at for at in range(len(before)) if before[at] != after[at]]
    assert len(changed) == 1
    assert after[changed[0]] == 0xD5
    assert len(before) == len(after)
