"""A topic and its batches by themselves: what is live, what is lost and why, and what a long log costs."""

from __future__ import annotations

import time
from itertools import product

import pytest

from topics.datadir.batch import Batch
from topics.datadir.view.topic import Topic
from topics.storage.columns import Columns, pack
from topics.storage.config import TopicConfig
from topics.storage.control import CopiesLine, DeleteFrame, PipeFrame, TopicFrame
from topics.storage.format import DELETED


def batch(first: int, count: int = 1, *, ts: int = 0, offset: int = 0) -> Batch:
    return Batch("a.wal", True, 1, offset, 100, first, count, ts, ts, count * 40, False)


def topic(**config: object) -> Topic:
    return Topic(shard=0, id=7, name="t", config=TopicConfig(**config), created_ms=0)  # type: ignore[arg-type]


def unread(batch: Batch) -> Columns:
    raise AssertionError(f"batch {batch.first} need not be read")


def columns(batch: Batch) -> Columns:
    return Columns(pack([b"12345678"] * batch.count), count=batch.count, ts=batch.first_ts)


# --- a batch ---


@pytest.mark.parametrize("deleted", [(), (10,), (11, 13), (10, 11, 12, 13)])
def test_what_is_live_in_a_batch(deleted: tuple[int, ...]) -> None:
    one = batch(10, 4)
    for seq in deleted:
        assert one.mark_deleted(seq)
        assert not one.mark_deleted(seq)
    assert [one.deleted(index) for index in range(4)] == [seq in deleted for seq in range(10, 14)]
    for low, high in product(range(8, 16), [None, *range(8, 16)]):
        until = 99 if high is None else high
        live = [seq for seq in range(10, 14) if seq not in deleted and low <= seq <= until]
        assert one.live(low, high) == len(live)
        if high is None:
            assert one.live_seqs(low) == live
        if live:
            assert one.last_live(until) == live[-1]


def test_a_range_is_deleted_where_it_meets_the_batch() -> None:
    one = batch(10, 4)
    one.mark_deleted_between(1, 9)
    one.mark_deleted_between(14, 20)
    assert one.flags is None
    one.mark_deleted_between(5, 11)
    assert one.flags == bytearray([DELETED, DELETED, 0, 0])
    one.mark_deleted_between(13, 99)
    assert one.live_seqs(0) == [12]


# --- what is lost ---


def test_a_gap_is_named_by_what_made_it() -> None:
    one = topic()
    one.append(batch(1, 10))
    one.configure(TopicFrame("t", TopicConfig(), 0, 0, cap_seq=3, ttl_seq=0))
    one.head(14)
    one.append(batch(15, 2))
    one.append(batch(18, 1))
    one.trims = [(17, 17)]
    assert one.holes == [(11, 14), (17, 17)]
    one.holes = [(11, 14)]
    assert one.find_gap(1, 18) == (1, 3, "cap")
    assert one.find_gap(2, 2) == (2, 2, "cap")
    assert one.find_gap(4, 18) == (11, 14, "lost")
    assert one.find_gap(12, 13) == (12, 13, "lost")
    assert one.find_gap(15, 18) == (17, 17, "source_trim")
    assert one.find_gap(18, 18) is None
    assert one.find_gap(5, 4) is None
    one.configure(TopicFrame("t", TopicConfig(), 0, 0, cap_seq=3, ttl_seq=5))
    assert one.find_gap(1, 18) == (1, 5, "mixed")
    assert one.find_gap(4, 18) == (4, 5, "ttl")
    assert (one.count, one.earliest_seq, one.evict_floor) == (8, 6, 6)
    assert (one.evicted_total, one.expired_total) == (3, 2)


def test_seqs_that_were_promised_and_never_seen() -> None:
    one = topic()
    one.append(batch(1, 3))
    one.head(3)
    assert (one.head_seq, one.holes) == (3, [])
    one.head(9)
    assert (one.head_seq, one.holes, one.lost, one.earliest_seq) == (9, [(4, 9)], 6, 1)
    one.append(batch(10))
    one.head(12)
    assert (one.head_seq, one.holes, one.disk_seq) == (12, [(4, 9), (11, 12)], 12)
    # Copies of an older program are in no frame: where some may be nobody is told of a loss.
    one.configure(TopicFrame("t", TopicConfig(), 0, 0, pipe=PipeFrame(9, 0)))
    one.head(20)
    one.append(batch(25))
    assert (one.head_seq, one.holes, one.disk_seq) == (25, [(4, 9), (11, 12)], 12)


@pytest.mark.parametrize("fresh", [True, False])
def test_what_was_evicted_is_not_deleted_again(fresh: bool) -> None:
    """A delete of everything below a seq finds only what caps and TTL had left."""
    one = topic()
    one.append(batch(1, 4))
    one.append(batch(5, 6))
    if not fresh:  # a snapshot has it all already
        one.configure(TopicFrame("t", TopicConfig(), 0, 0, cap_seq=9))
    one.delete(DeleteFrame(before_seq=8, cap_seq=5, ttl_seq=2), fresh=fresh)
    flags = [each.deleted(index) for each in one.batches for index in range(each.count)]
    assert [seq for seq, deleted in enumerate(flags, 1) if deleted] == [6, 7]
    assert one.deleted_total == (2 if fresh else 0)
    assert (one.count, one.evict_floor) == ((3, 6) if fresh else (1, 10))
    one.delete(DeleteFrame(before_seq=9, cap_seq=5), fresh=fresh)
    assert one.batches[1].deleted(3)
    assert one.count == (2 if fresh else 1)


@pytest.mark.parametrize("fresh", [True, False])
def test_copies_that_went_are_a_tombstone_and_not_deleted(fresh: bool) -> None:
    one = topic()
    one.delete(DeleteFrame(seqs=[], trims=[(3, 4)]), fresh=fresh)
    assert (one.trims, one.deleted_total) == ([(3, 4)] if fresh else [], 0)


def test_a_line_that_names_no_seqs_changes_nothing() -> None:
    one = topic()
    one.configure(TopicFrame("t", TopicConfig(), 0, 0, pipe=PipeFrame(9, 0, logged=True)))
    one.copied(CopiesLine(1, 0, 1, 2, 2, 2, 70, [(1, 2)]), fresh=True)
    one.copied(CopiesLine(1, 0, 3, 2, 9), fresh=True)
    one.copied(CopiesLine(1, 0, 1, 2, 0, 2, 70, sizes=[35]), fresh=True)
    assert (one.head_seq, one.trims, one.unsettled) == (2, [], 2)


def test_the_batches_of_a_range() -> None:
    one = topic()
    for first in (1, 5, 20):
        one.append(batch(first, 4))
    assert [each.first for each in one.select(1, 99)] == [1, 5, 20]
    assert [each.first for each in one.select(4, 5)] == [1, 5]
    assert [each.first for each in one.select(9, 19)] == []
    assert [each.first for each in one.select(8, 20)] == [5, 20]
    assert [each.first for each in one.select(24, 99)] == []


def test_caps_and_ages_are_worked_out_anew_each_time() -> None:
    one = topic(cap_records=3)
    one.append(batch(1, 2, ts=10))
    one.append(batch(3, 2, ts=20))
    one.retain(now_ms=99, columns=unread)
    assert (one.count, one.evict_floor, one.evicted_total) == (3, 2, 1)
    one.resume()
    assert (one.count, one.evict_floor, one.evicted_total) == (4, 1, 0)
    one.delete(DeleteFrame(seqs=[1]), fresh=True)
    one.retain(now_ms=99, columns=unread)
    assert (one.count, one.evict_floor, one.evicted_total, one.deleted_total) == (3, 1, 0, 1)
    one.resume()
    one.configure(TopicFrame("t", TopicConfig(ttl_ms=5), 0, 0))
    one.retain(now_ms=24, columns=unread)
    assert (one.count, one.evict_floor, one.expired_total) == (2, 3, 1)
    one.retain(now_ms=25, columns=unread)
    assert one.count == 2, "a record is as old as it may be"
    one.retain(now_ms=26, columns=unread)
    assert (one.count, one.earliest_seq, one.expired_total) == (0, 5, 3)
    one.retain(now_ms=24, columns=unread)
    assert (one.count, one.expired_total) == (2, 1), "as of a time before"


def test_bytes_are_read_only_where_a_batch_is_cut() -> None:
    one = topic(cap_bytes=200)
    for first in range(1, 40, 4):
        one.append(batch(first, 4))
    read: list[int] = []

    def reading(batch: Batch) -> Columns:
        read.append(batch.first)
        return columns(batch)

    one.retain(now_ms=0, columns=reading)
    assert (one.count, one.bytes(reading)) == (5, 200)
    assert set(read) == {33}
    one.bytes(reading)
    assert read.count(33) <= 2, "what was worked out once is known"


# --- what a long log costs ---


def replay(many: int) -> float:
    """Seconds for a queue of so many jobs, each acked in its turn."""
    one = topic()
    batches = [batch(seq) for seq in range(1, many + 1)]
    started = time.process_time()
    for each in batches:
        one.append(each)
    for seq in range(1, many, 2):
        one.delete(DeleteFrame(seqs=[seq]), fresh=True)
        one.delete(DeleteFrame(before_seq=seq), fresh=True)
    one.retain(now_ms=0, columns=unread)
    return time.process_time() - started


def test_an_ack_costs_the_same_in_a_long_queue() -> None:
    """Eight times the jobs take about eight times as long, not sixty-four times."""
    short, long = (min(replay(many) for _ in range(5)) for many in (1_000, 8_000))
    assert long < 24 * short, f"{long / short:.1f} times as long"
