"""The shard's side of routers: what it gives a forwarder to read, and what it makes of what a forwarder brings."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import EXHAUSTIVE, Record, error_of, examples
from pipeshard import Forwarder, PipeShard, numbers, rule

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.storage.config import TopicConfig
from topics.storage.control import PipeFrame
from topics.walshard.forwards import pipes as pipes_module
from topics.walshard.forwards.copies import Pipe
from topics.walshard.log.commit import Commit
from topics.walshard.topic import topic as topic_module
from topics.walshard.topic.topic import Topic, Totals


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


@pytest.fixture
def shard(tmp_path: Path) -> PipeShard:
    shard = PipeShard(tmp_path, segment_max_events=25)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig())
    return shard


def config(durability: str = "disk", **more: Any) -> TopicConfig:
    return TopicConfig(durability=durability, durable=durability == "fsync", **more)  # type: ignore[arg-type]


# --- opening and closing -----------------------------------------------------------------------------


def test_a_pipe_begins_where_it_is_asked_to_and_goes_on_where_it_stands(shard: PipeShard) -> None:
    opened = shard.open_pipe("s", "d", 7)
    assert (opened.at, opened.forwarded) == (7, {})
    assert shard.forward("s", "d", numbers(1, 3)) == 10
    again = shard.open_pipe("s", "d", 0)
    assert (again.at, again.forwarded) == (10, {"r": 3})


def test_a_pipe_survives_before_anything_was_copied(shard: PipeShard) -> None:
    shard.open_pipe("s", "d", 7)
    shard.restart()
    assert shard.open_pipe("s", "d", 0).at == 7


def test_pipes_are_listed(shard: PipeShard) -> None:
    assert shard.ask(Op.LIST_PIPES, messages.ListPipes()).rows == []
    shard.open_pipe("s", "d", 3)
    (row,) = shard.ask(Op.LIST_PIPES, messages.ListPipes()).rows
    assert (row.topic, row.topic_id, row.source_id, row.at) == ("d", shard.id_of("d"), shard.id_of("s"), 3)
    shard.close_pipe("s", "d")
    assert shard.ask(Op.LIST_PIPES, messages.ListPipes()).rows == []
    shard.restart()
    assert shard.ask(Op.LIST_PIPES, messages.ListPipes()).rows == []


def test_only_the_life_that_is_meant(shard: PipeShard) -> None:
    for op, head in (
        (Op.OPEN_PIPE, messages.OpenPipe("d", 999, shard.id_of("s"), 0, [], False)),
        (Op.OPEN_PIPE, messages.OpenPipe("none", 1, shard.id_of("s"), 0, [], False)),
        (Op.READ_RAW, messages.ReadRaw("s", 999, 0, 10, 10, False)),
        (Op.READ_RAW, messages.ReadRaw("none", 1, 0, 10, 10, False)),
        (Op.FOLLOW_HEAD, messages.FollowHead("s", 999)),
    ):
        assert error_of(lambda op=op, head=head: shard.ask(op, head)).code == "topic_not_found"
    shard.open_pipe("s", "d")
    assert error_of(lambda: shard.forward("s", "d", numbers(1, 1), topic_id=999)).code == "topic_not_found"
    assert error_of(lambda: shard.forward("s", "d", numbers(1, 1), source_id=999)).code == "not_found"
    closed = shard.ask(Op.CLOSE_PIPE, messages.ClosePipe("d", 999, shard.id_of("s"), False))
    assert (closed.at, closed.forwarded) == (None, {})


def test_without_a_pipe_nothing_is_taken(shard: PipeShard) -> None:
    assert error_of(lambda: shard.forward("s", "d", numbers(1, 1))).code == "not_found"
    shard.open_pipe("s", "d")
    shard.close_pipe("s", "d")
    assert error_of(lambda: shard.forward("s", "d", numbers(1, 1))).code == "not_found"
    assert shard.data("d") == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_close_is_answered_when_every_copy_is_in_a_snapshot(shard: PipeShard, keep: bool) -> None:
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 30))
    before = shard.everything("d")
    assert shard.topic("d").has_copies
    closed = shard.close_pipe("s", "d", keep=keep)
    assert (closed.at, closed.forwarded) == (30, {"r": 30})
    assert not shard.topic("d").has_copies
    assert (shard.topic("d").pipe is not None) == keep
    shard.restart()
    if keep:
        assert shard.open_pipe("s", "d").at == 30
        shard.forward("s", "d", [], to_seq=30)
    assert shard.everything("d") == before


@pytest.mark.parametrize("keep", [True, False])
def test_a_flush_alone_is_not_enough_for_a_close(shard: PipeShard, keep: bool) -> None:
    """The segments are written, but no snapshot names them yet."""
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 5))
    before = shard.everything("d")
    shard.flush("d")
    shard.close_pipe("s", "d", keep=keep)
    shard.restart()
    if keep:
        assert shard.open_pipe("s", "d").at == 5
        shard.forward("s", "d", [], to_seq=5)
    assert shard.everything("d") == before


def test_another_source_begins_when_the_copies_of_the_first_are_safe(shard: PipeShard) -> None:
    shard.put("other", TopicConfig())
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 3))
    before = shard.everything("d")
    assert shard.open_pipe("other", "d", 50).at == 50
    shard.restart()
    assert shard.open_pipe("other", "d").at == 50
    shard.forward("other", "d", [], to_seq=50)
    assert shard.everything("d") == before


def test_a_topic_that_is_dropped_takes_its_copies_along(shard: PipeShard) -> None:
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 5))
    assert shard.engine.copies.bytes > 0
    shard.drop("d")
    assert shard.engine.copies.bytes == 0
    shard.put("d", TopicConfig())
    assert shard.topic("d").pipe is None
    assert shard.data("d") == []


# --- forwarding --------------------------------------------------------------------------------------


def test_a_copy_gets_a_seq_and_a_time_and_its_bytes_are_not_logged(shard: PipeShard) -> None:
    shard.append("d", numbers(0, 1))
    shard.open_pipe("s", "d")
    shard.sync()
    frames, written = shard.engine.wal.frames, shard.engine.wal.bytes_written
    shard.wall.pass_ms(5_000)
    records = [Record(b'"%b"' % (b"x" * 10_000), tag="t", node="n", meta=b'{"m": 1}'), Record(b"2")]
    assert shard.forward("s", "d", records) == 2
    _, *copies = shard.everything("d")
    assert [stored.record for stored in copies] == records
    assert [stored.seq for stored in copies] == [2, 3]
    assert {stored.ts for stored in copies} == {shard.clock.now_ms()}
    assert shard.engine.wal.frames == frames + 1, "which seqs they have, and no more"
    assert shard.engine.wal.bytes_written < written + 200
    report = shard.report("d")
    assert (report.count, report.head_seq, report.last_write_ts) == (3, 3, shard.clock.now_ms())


@pytest.mark.parametrize("durability", ["fsync", "disk", "memory", "ephemeral"])
def test_copies_wait_for_no_sync_in_any_class(shard: PipeShard, durability: str) -> None:
    shard.put("x", config(durability))
    shard.open_pipe("s", "x")
    shard.sync()
    sent = shard.send_forward("s", "x", numbers(1, 3))
    shard.engine.commit.write()
    assert shard.answered(sent)
    assert shard.data("x") == [b"1", b"2", b"3"]
    assert not shard.syncer.busy


def test_whoever_begins_elsewhere_is_told_where_it_stands(shard: PipeShard) -> None:
    shard.open_pipe("s", "d")
    assert shard.forward("s", "d", numbers(1, 3)) == 3
    for from_seq in (0, 1, 2, 4, 100):
        assert shard.forward("s", "d", numbers(50, 2), from_seq=from_seq) == 3
    assert shard.data("d") == [b"1", b"2", b"3"]
    assert shard.forward("s", "d", numbers(4, 1), from_seq=3) == 4


def test_nothing_to_copy_moves_the_position(shard: PipeShard) -> None:
    shard.open_pipe("s", "d")
    assert shard.forward("s", "d", [], to_seq=10) == 10
    assert shard.report("d").head_seq == 0
    shard.checkpoint()
    shard.restart()
    assert shard.open_pipe("s", "d").at == 10


def test_totals_are_kept_by_router(shard: PipeShard) -> None:
    shard.open_pipe("s", "d", routers=("p", "q"))
    shard.forward("s", "d", numbers(1, 3), counts={"p": 2, "q": 1})
    shard.forward("s", "d", numbers(4, 2), counts={"q": 2})
    assert shard.open_pipe("s", "d", routers=("p", "q")).forwarded == {"p": 2, "q": 3}
    shard.flush("d")
    shard.checkpoint()
    shard.forward("s", "d", numbers(6, 1), counts={"q": 1})
    shard.restart()
    assert shard.open_pipe("s", "d", routers=("p", "q")).forwarded == {"p": 2, "q": 4}
    assert shard.open_pipe("s", "d", routers=("q",)).forwarded == {"q": 4}
    assert shard.open_pipe("s", "d", routers=("p", "q")).forwarded == {"q": 4}


def test_room_is_asked_for_as_by_anybody(shard: PipeShard) -> None:
    shard.put("d", TopicConfig(cap_records=3, discard="reject"))
    shard.open_pipe("s", "d")
    assert shard.forward("s", "d", numbers(1, 2)) == 2
    assert error_of(lambda: shard.forward("s", "d", numbers(3, 2))).code == "topic_full"
    assert error_of(lambda: shard.forward("s", "d", numbers(3, 4))).code == "record_too_large"
    assert shard.open_pipe("s", "d").at == 2
    assert shard.forward("s", "d", numbers(3, 1)) == 3
    assert shard.forward("s", "d", [], to_seq=9) == 9, "nothing needs no room"


def test_too_much_in_memory_has_to_wait(shard: PipeShard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPIES_BYTES", 100)
    shard.open_pipe("s", "d")
    assert shard.forward("s", "d", [Record(b'"' + b"x" * 200 + b'"')]) == 1
    assert error_of(lambda: shard.forward("s", "d", numbers(2, 1))).code == "throttled"
    shard.flush("d")
    assert shard.engine.copies.bytes == 0
    assert shard.forward("s", "d", numbers(2, 1)) == 2


@pytest.mark.parametrize("how", ["flush", "evict", "delete", "drop", "expire"])
def test_memory_is_given_back_once(shard: PipeShard, how: str) -> None:
    shard.put("d", TopicConfig(ttl_ms=1_000 if how == "expire" else 0))
    shard.open_pipe("s", "d")
    for first in range(1, 31, 5):
        shard.forward("s", "d", numbers(first, 5))
    if how == "flush":
        shard.flush("d")
    elif how == "evict":
        shard.put("d", TopicConfig(cap_records=1))
        shard.put("d", TopicConfig())
        shard.delete("d", before_seq=100)
    elif how == "delete":
        shard.delete("d", before_seq=12)
        shard.delete("d", before_seq=100)
    elif how == "expire":
        shard.wall.pass_ms(2_000)
        assert shard.data("d") == []
    else:
        shard.drop("d")
    assert shard.engine.copies.bytes == 0


def test_memory_is_given_back_once_when_a_flush_meets_deletes(shard: PipeShard) -> None:
    shard.open_pipe("s", "d")
    for first in range(1, 31, 5):
        shard.forward("s", "d", numbers(first, 5, tag=str(first % 2)))
    shard.mover.flush(shard.topic("d"))
    shard.delete("d", before_seq=12)
    shard.delete("d", tag="0")
    shard.forward("s", "d", numbers(31, 2))
    shard.work()
    left = [b"%d" % number for number in [*range(12, 16), *range(21, 26), 31, 32]]
    assert shard.data("d") == left
    shard.flush("d")
    assert shard.engine.copies.bytes == 0
    assert shard.data("d") == left
    shard.checkpoint()
    shard.restart()
    Forwarder(shard, "s", "d").step()
    assert shard.data("d") == left


# --- copies among others in one round ----------------------------------------------------------------


def test_direct_records_of_the_same_round_are_not_taken_for_copies(shard: PipeShard) -> None:
    """What is remembered of copies is about their own seqs."""
    shard.open_pipe("s", "d", ring=True)
    sent = shard.send_forward("s", "d", numbers(1, 3), hops=[1, 1, 1])
    direct = shard.send_append("d", numbers(100, 2))
    shard.work()
    shard.answer(sent)
    assert shard.answer(direct).first_seq == 4
    assert shard.topic("d").hops == [(1, 3, 1)]
    piece, _ = shard.read_raw("d", 0)
    assert piece.hops == [1, 1, 1, 0, 0]


def test_deletes_of_copies_of_such_a_round_are_permanent(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 3, tag="x"))
    shard.open_pipe("s", "d")
    sent = shard.send_forward("s", "d", numbers(1, 3, tag="x"))
    shard.send_append("d", numbers(100, 1))
    shard.work()
    shard.answer(sent)
    shard.delete("d", tag="x")
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.data("d") == [b"100"]


def test_two_forwards_of_one_place_while_the_first_waits(shard: PipeShard) -> None:
    """The first stands behind a record that waits for its sync; a second forwarder opens the pipe meanwhile."""
    shard.append("s", numbers(1, 2))
    shard.put("d", config("fsync"))
    shard.open_pipe("s", "d")
    shard.sync()
    shard.send_append("d", numbers(100, 1))
    shard.engine.commit.write()
    first = shard.send_forward("s", "d", numbers(1, 2), from_seq=0)
    shard.engine.commit.write()
    opened = shard.send(Op.OPEN_PIPE, messages.OpenPipe("d", shard.id_of("d"), shard.id_of("s"), 0, ["r"], False))
    if getattr(shard.outcome(opened), "at", 0) == 0:
        shard.send_forward("s", "d", numbers(1, 2), from_seq=0)  # to be refused, or told where it stands
    shard.work()
    assert shard.answer(first).at == 2
    assert shard.data("d") == [b"100", b"1", b"2"]


def test_a_topic_that_goes_while_a_forward_waits(shard: PipeShard) -> None:
    shard.put("d", config("fsync"))
    shard.open_pipe("s", "d")
    shard.sync()
    shard.send_append("d", numbers(100, 1))
    shard.engine.commit.write()
    waiting = shard.send_forward("s", "d", numbers(1, 2))
    closing = shard.send(Op.CLOSE_PIPE, messages.ClosePipe("d", shard.id_of("d"), shard.id_of("s"), False))
    shard.drop("d")
    shard.work()
    assert shard.outcome(waiting) is not None
    assert shard.outcome(closing) is not None
    assert shard.engine.copies.bytes == 0
    shard.put("d", TopicConfig())
    shard.open_pipe("s", "d")
    assert shard.forward("s", "d", numbers(5, 1)) == 1
    assert shard.data("d") == [b"5"]


@pytest.mark.parametrize("keep", [True, False])
def test_a_close_waits_for_copies_that_are_not_readable_yet(shard: PipeShard, keep: bool) -> None:
    shard.put("d", config("fsync"))
    shard.open_pipe("s", "d")
    shard.sync()
    shard.send_append("d", numbers(100, 1))
    shard.engine.commit.write()
    shard.send_forward("s", "d", numbers(1, 2))
    closed = shard.close_pipe("s", "d", keep=keep)
    assert (closed.at, closed.forwarded) == (2, {"r": 2})
    assert not shard.topic("d").has_copies
    before = shard.everything("d")
    shard.restart()
    if keep:
        shard.open_pipe("s", "d")
        shard.forward("s", "d", [], to_seq=2)
    assert shard.everything("d") == before


# --- what the source has lost ------------------------------------------------------------------------


def test_what_was_lost_takes_as_many_seqs(shard: PipeShard) -> None:
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 2))
    shard.forward("s", "d", numbers(8, 2), lost=5, to_seq=9, complete=False)
    assert shard.seqs("d") == {1: b"1", 2: b"2", 8: b"8", 9: b"9"}
    gap = shard.diff("d", 2).tombstone
    assert gap is not None
    assert (gap.gap_from, gap.gap_to, gap.reason, gap.missed_estimate) == (3, 7, "source_trim", 5)
    assert shard.diff("d", 7).tombstone is None
    page = shard.diff("d", 0)
    assert ([stored.seq for stored in page.stored], page.next_from_seq, page.caught_up) == ([1, 2], 2, False)


@pytest.mark.parametrize("behind", [True, False])
def test_a_loss_behind_what_a_client_deleted_is_told_at_once(shard: PipeShard, behind: bool) -> None:
    """And not after a long poll's whole time."""
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 2))
    shard.forward("s", "d", numbers(8, 2) if behind else [], lost=5, to_seq=9 if behind else 7, complete=False)
    shard.delete("d", before_seq=3)
    for wait_ms in (0, 60_000):
        page = shard.diff("d", 0, wait_ms=wait_ms)
        assert page.tombstone is not None
        gap = page.tombstone
        assert (gap.gap_from, gap.gap_to, gap.reason, gap.missed_estimate) == (3, 7, "source_trim", 5)
        assert [stored.seq for stored in page.stored] == ([8, 9] if behind else [])
        assert page.next_from_seq == (9 if behind else 7)


def test_all_that_was_to_come_was_lost(shard: PipeShard) -> None:
    shard.open_pipe("s", "d")
    shard.forward("s", "d", [], lost=5, to_seq=5, complete=False)
    assert shard.report("d").head_seq == 5
    page = shard.diff("d", 0)
    assert page.tombstone is not None
    assert (page.tombstone.reason, page.next_from_seq, page.caught_up) == ("source_trim", 5, True)
    shard.forward("s", "d", numbers(6, 1))
    assert shard.seqs("d") == {6: b"6"}


@pytest.mark.parametrize("how", ["crash", "stop"])
def test_what_was_lost_stays_lost_after_a_restart(shard: PipeShard, how: str) -> None:
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 2))
    shard.forward("s", "d", numbers(8, 2), lost=5, to_seq=9, complete=False)
    if how == "crash":
        shard.flush("d")
        shard.checkpoint()
        shard.restart()
        shard.open_pipe("s", "d")
        shard.forward("s", "d", [], to_seq=9)
    else:
        shard.stop()
        shard.open()
    gap = shard.diff("d", 2).tombstone
    assert gap is not None
    assert (gap.gap_from, gap.gap_to, gap.reason) == (3, 7, "source_trim")
    assert shard.seqs("d") == {1: b"1", 2: b"2", 8: b"8", 9: b"9"}


# --- hops --------------------------------------------------------------------------------------------


def test_hops_are_read_back_with_the_records(shard: PipeShard) -> None:
    shard.append("d", numbers(100, 2))
    shard.open_pipe("s", "d", ring=True)
    shard.forward("s", "d", numbers(1, 4), hops=[1, 1, 2, 1])
    shard.append("d", numbers(102, 1))
    piece, records = shard.read_raw("d", 0)
    assert [record.data for record in records] == [b"100", b"101", b"1", b"2", b"3", b"4", b"102"]
    assert piece.hops == [0, 0, 1, 1, 2, 1, 0]
    assert shard.read_raw("d", 6)[0].hops is None
    assert shard.read_raw("d", 4)[0].hops == [2, 1, 0]
    shard.delete("d", before_seq=4)
    assert shard.read_raw("d", 0)[0].hops == [1, 2, 1, 0]


def test_hops_survive(shard: PipeShard) -> None:
    shard.open_pipe("s", "d", ring=True)
    shard.forward("s", "d", numbers(1, 3), hops=[1, 2, 1])
    shard.flush("d")
    shard.checkpoint()
    shard.restart()
    shard.open_pipe("s", "d", ring=True)
    shard.forward("s", "d", [], to_seq=3)
    assert shard.read_raw("d", 0)[0].hops == [1, 2, 1]


def test_hops_of_copies_that_a_snapshot_covers_and_does_not_show_survive(shard: PipeShard) -> None:
    """They are logged, and wait behind a direct record that is not synced yet."""
    shard.put("d", config("fsync"))
    shard.append("s", numbers(1, 3))
    shard.open_pipe("s", "d", ring=True)
    shard.send_append("d", numbers(100, 1))
    shard.engine.commit.write()
    shard.send_forward("s", "d", numbers(1, 3), hops=[1, 2, 1])
    shard.engine.commit.write()
    assert shard.topic("d").head_seq == 0
    shard.checkpoint()
    shard.restart()
    Forwarder(shard, "s", "d", ring_hops=3).pump()
    piece, records = shard.read_raw("d", 0)
    assert ([record.data for record in records], piece.hops) == ([b"100", b"1", b"2", b"3"], [0, 1, 2, 1])


def test_hops_of_what_has_not_gone_round_yet_are_never_forgotten(
    shard: PipeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has read it: a forwarder that is held back must know of every record whether it has been round."""
    monkeypatch.setattr(topic_module, "_HOP_RANGES", 8)
    shard.open_pipe("s", "d", ring=True)
    expected: list[int] = []
    for number in range(40):
        shard.forward("s", "d", numbers(number, 1), hops=[1])
        shard.append("d", numbers(100 + number, 1))
        expected += [1, 0]
    assert shard.read_raw("d", 0)[0].hops == expected


RANGES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=12)
RUNS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=6)


@examples(300)
@given(steps=RANGES, runs=RUNS)
def test_hops_like_a_naive_reader(steps: list[tuple[int, int, int]], runs: list[tuple[int, int]]) -> None:
    topic = _topic()
    at = 0
    for gap, count, passed in steps:
        topic.hops.append((at + gap, at + gap + count - 1, passed))
        at += gap + count - 1
    seqs: list[tuple[int, int]] = []
    at = 1
    for gap, count in runs:
        seqs.append((at + gap, count))
        at += gap + count
    known = {seq: passed for low, high, passed in topic.hops for seq in range(low, high + 1)}
    expected = [known.get(seq, 0) for first, count in seqs for seq in range(first, first + count)]
    assert pipes_module._hops_of(topic, seqs) == (expected if any(expected) else None)


def _topic() -> Topic:
    return Topic(id=1, name="t", config=TopicConfig(), created_ms=0, ceiling=0, totals=Totals())


@pytest.mark.parametrize("behind", [0, 4_000])
def test_whoever_lags_in_a_ring_is_served_as_quickly(shard: PipeShard, behind: int) -> None:
    """There are ranges for what it has not come to yet, as many as are kept and more."""
    shard.append("s", numbers(1, 4_096))
    first = 4_097 - behind
    shard.topic("s").hops += [(seq, seq, 1) for seq in range(first, first + 2 * 65_536, 2)]
    began = time.process_time()
    piece, _ = shard.read_raw("s", 0, limit=4_096)
    assert time.process_time() - began < 0.5
    assert piece.count == 4_096
    assert piece.hops == ([0] * 96 + [1, 0] * 2_000 if behind else None)


def test_remembering_hops_is_as_quick_while_nobody_reads_them(shard: PipeShard) -> None:
    topic = shard.topic("s")
    topic.hops += [(seq, seq, 1) for seq in range(1, 1_000_001, 2)]
    began = time.process_time()
    for seq in range(1_000_001, 1_000_401, 2):
        topic.remember_hops(seq, [1])
    assert time.process_time() - began < 1
    assert len(topic.hops) == 500_200
    topic.hops_read = 1_000_000
    topic.remember_hops(1_000_401, [1])
    assert len(topic.hops) == 65_536


# --- reading raw -------------------------------------------------------------------------------------


def test_whole_batches_as_they_are_stored(shard: PipeShard) -> None:
    records = [Record(b"1", tag="t", node="n", meta=b'{"m": 1.0}'), Record(b'{"a" : 2}')]
    shard.append("s", records)
    shard.wall.pass_ms(10)
    shard.append("s", numbers(3, 2))
    for _ in range(2):
        piece, found = shard.read_raw("s", 0)
        assert found == [*records, *numbers(3, 2)]
        assert (piece.to_seq, piece.head_seq, piece.count, piece.lost, piece.complete) == (4, 4, 4, 0, True)
        assert _seqs(piece) == [1, 2, 3, 4]
        shard.flush("s")


def test_from_the_middle_of_a_batch(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 10))
    piece, found = shard.read_raw("s", 4)
    assert (_seqs(piece), piece.complete, piece.lost) == ([5, 6, 7, 8, 9, 10], True, 0)
    assert found == numbers(5, 6)


def test_at_and_beyond_the_head(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 3))
    piece, found = shard.read_raw("s", 3)
    assert (piece.to_seq, piece.count, piece.complete, found) == (3, 0, True, [])
    piece, found = shard.read_raw("s", 9)
    assert (piece.to_seq, piece.count, found) == (3, 0, [])


def test_nothing_that_is_not_readable_is_given_away(shard: PipeShard) -> None:
    shard.put("s", config("fsync"))
    shard.append("s", numbers(1, 2))
    shard.send_append("s", numbers(3, 2))
    shard.engine.commit.write()
    piece, _ = shard.read_raw("s", 0)
    assert (piece.to_seq, piece.head_seq, piece.count) == (2, 2, 2)
    shard.work()
    assert shard.read_raw("s", 2)[0].count == 2


def _seqs(piece: messages.RawPiece) -> list[int]:
    return [seq for first, count in piece.seqs for seq in range(first, first + count)]


@examples(150)
@given(
    batches=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    deleted=st.sets(st.integers(1, 40), max_size=12),
    before=st.integers(0, 12),
    cap=st.sampled_from([0, 0, 3, 7, 15]),
    flushed=st.booleans(),
    from_seq=st.integers(0, 45),
    limit=st.integers(1, 12),
)
def test_reading_like_a_naive_reader(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[int],
    deleted: set[int],
    before: int,
    cap: int,
    flushed: bool,
    from_seq: int,
    limit: int,
) -> None:
    """Walk to the head: every live record once, every seq that caps took is counted as lost once, and `complete` is
    never said of a stretch from which something is missing."""
    shard = PipeShard(tmp_path_factory.mktemp("raw"), segment_max_events=7, cache_bytes=300)
    shard.put("s", TopicConfig())
    head = 0
    for size in batches:
        shard.append("s", [Record(b"%d" % seq, tag=str(seq)) for seq in range(head + 1, head + size + 1)])
        head += size
    live = set(range(1, head + 1))
    for seq in sorted(deleted & live):
        shard.delete("s", tag=str(seq))
    if before:
        shard.delete("s", before_seq=before)
    live -= deleted | set(range(1, before))
    evict_floor = 1
    if cap:
        shard.put("s", TopicConfig(cap_records=cap))
        while len(live) > cap:
            evict_floor = min(live) + 1
            live.remove(min(live))
    if flushed:
        shard.flush("s")
    at, lost, found = from_seq, 0, []
    for _ in range(60):
        piece, records = shard.read_raw("s", at, limit=limit)
        seqs = _seqs(piece)
        assert [record.data for record in records] == [b"%d" % seq for seq in seqs]
        assert len(seqs) <= limit
        assert piece.count == len(seqs)
        assert piece.head_seq == head
        if at <= head:
            assert at <= piece.to_seq <= head
            span = set(range(at + 1, piece.to_seq + 1))
            assert set(seqs) == span & live
            if piece.complete:
                assert span == set(seqs)
            elif not piece.lost:
                assert span != set(seqs)
            lost += piece.lost
        found += seqs
        if piece.to_seq == at:
            break
        at = piece.to_seq
    assert at == head
    if from_seq <= head:
        assert found == sorted(seq for seq in live if seq > from_seq)
        assert lost == max(0, evict_floor - 1 - from_seq)
    shard.crash()


def test_bytes_bound_a_read_but_something_always_comes(shard: PipeShard) -> None:
    for number in range(5):
        shard.append("s", [Record(b'"' + b"x" * 1_000 + b'"')] * (number + 1))
    at, reads = 0, 0
    while at < 15:
        piece, _ = shard.read_raw("s", at, max_bytes=2_500)
        assert piece.to_seq > at
        at, reads = piece.to_seq, reads + 1
    assert reads >= 5


# --- after a crash -----------------------------------------------------------------------------------


def refused(shard: PipeShard, topic: str) -> None:
    """Nobody may look at it or touch it."""
    for call in (
        lambda: shard.diff(topic),
        lambda: shard.report(topic),
        lambda: shard.append(topic, numbers(1, 1)),
        lambda: shard.delete(topic, before_seq=1),
        lambda: shard.read_raw(topic, 0),
        lambda: shard.drop(topic, if_empty=True),
        lambda: shard.put(topic, TopicConfig(cap_records=1, discard="reject")),
    ):
        error = error_of(call)
        assert (error.code, error.retry_after_s) == ("shard_unavailable", 1)


def test_until_the_copies_are_there_again_nobody_may_look(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 6))
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    before = shard.seqs("d")
    shard.restart()
    refused(shard, "d")
    known = shard.call(Op.PUT_TOPIC, messages.PutTopic("d", TopicConfig(), None, create_only=True))
    assert not known.created, "the router process only asks that there is one"
    assert listed_as_rebuilding(shard) == ["d"]
    assert shard.data("s") == [b"%d" % number for number in range(1, 7)]
    again = Forwarder(shard, "s", "d")
    again.step(limit=2)
    refused(shard, "d")
    again.step(limit=2)
    refused(shard, "d")
    again.step(limit=2)
    assert shard.seqs("d") == before
    assert listed_as_rebuilding(shard) == []


def listed_as_rebuilding(shard: PipeShard) -> list[str]:
    rows = shard.call(Op.LIST_TOPICS, messages.ListTopics("", "", 10, False)).rows
    return [row.topic for row in rows if row.rebuilding]


def test_copies_in_segments_are_not_made_again(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 6))
    Forwarder(shard, "s", "d").pump()
    shard.flush("d")
    shard.checkpoint()
    shard.append("s", numbers(7, 2))
    Forwarder(shard, "s", "d").pump()
    before = shard.everything("d")
    shard.wall.pass_ms(1_000)
    shard.restart()
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    assert [(stored.seq, stored.record) for stored in shard.everything("d")] == [
        (stored.seq, stored.record) for stored in before
    ]
    assert shard.everything("d")[:6] == before[:6]


def test_a_flush_without_a_snapshot_is_no_flush(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 6))
    Forwarder(shard, "s", "d").pump()
    before = shard.seqs("d")
    shard.flush("d")
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == before
    shard.flush("d")
    shard.checkpoint()
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == before


def test_after_a_clean_stop_nothing_is_made_again(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 6))
    Forwarder(shard, "s", "d").pump()
    before = shard.everything("d")
    shard.stop()
    shard.open()
    assert shard.everything("d") == before
    assert shard.open_pipe("s", "d").at == 6


def test_a_crash_of_the_machine_keeps_what_was_synced_and_goes_on_above_the_rest(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 6))
    shard.sync()
    Forwarder(shard, "s", "d").pump()
    shard.restart(boot=bytes(16))
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {number: b"%d" % number for number in range(1, 7)}
    assert shard.append("d", numbers(7, 1)).first_seq > 7, "what was given out behind them nobody knows"


def test_totals_are_right_after_a_crash(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 10))
    rules = [rule(shard, "s", "d", "p"), rule(shard, "s", "d", "q", filter=["tag", "Eq", "x"])]
    Forwarder(shard, "s", "d", rules).pump(limit=3)
    shard.flush("d")
    shard.checkpoint()
    shard.append("s", numbers(11, 5, tag="x"))
    Forwarder(shard, "s", "d", rules).pump()
    shard.restart()
    Forwarder(shard, "s", "d", rules).pump()
    assert shard.open_pipe("s", "d", routers=("p", "q")).forwarded == {"p": 15, "q": 5}


def test_a_pipe_whose_rule_is_gone_is_closed_while_it_waits(shard: PipeShard) -> None:
    """The copies that were in memory are lost with the rule; that is told, and their seqs are not given out again."""
    shard.append("s", numbers(1, 3))
    Forwarder(shard, "s", "d").pump()
    shard.restart()
    shard.close_pipe("s", "d")
    page = shard.diff("d", 0)
    assert page.stored == []
    assert page.tombstone is not None
    assert page.tombstone.reason == "source_trim"
    assert shard.append("d", numbers(9, 1)).first_seq > 3


def check_meanings(shard: PipeShard, before: dict[int, bytes]) -> None:
    for seq, data in shard.seqs("d").items():
        assert before.get(seq, data) == data, f"seq {seq} was {before[seq]!r} and is {data!r}"


@pytest.mark.parametrize("deleted", [False, True])
def test_copies_around_a_direct_record_keep_their_seqs(shard: PipeShard, deleted: bool) -> None:
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", numbers(1, 3))
    forwarder.pump()
    shard.append("d", numbers(100, 1, tag="x"))
    shard.append("s", numbers(4, 3))
    forwarder.pump()
    if deleted:
        shard.delete("d", tag="x")
    before = shard.seqs("d")
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == before
    assert shard.report("d").head_seq == 7


def test_direct_records_in_segments_do_not_count(shard: PipeShard) -> None:
    shard.append("d", numbers(100, 2))
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", numbers(1, 3))
    forwarder.pump()
    shard.append("d", numbers(102, 1))
    shard.flush("d")
    shard.checkpoint()
    shard.append("s", numbers(4, 2))
    forwarder.pump()
    before = shard.seqs("d")
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == before


@pytest.mark.parametrize("saved", [False, True])
def test_seqs_of_copies_that_are_all_deleted_are_not_given_out_again(shard: PipeShard, saved: bool) -> None:
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", numbers(1, 4))
    forwarder.pump()
    shard.delete("d", before_seq=5)
    if saved:
        shard.checkpoint()
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.report("d").head_seq >= 4
    assert shard.data("d") == []
    assert shard.diff("d", 4).tombstone is None
    shard.append("s", numbers(5, 1))
    Forwarder(shard, "s", "d").pump()
    assert list(shard.seqs("d").values()) == [b"5"]
    assert min(shard.seqs("d")) > 4


@pytest.mark.parametrize("flushed", [False, True])
def test_a_copy_that_was_deleted_stays_deleted(shard: PipeShard, flushed: bool) -> None:
    """Also where it was flushed, and a direct record had followed, and no snapshot named the segment yet."""
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", [*numbers(1, 2), *numbers(3, 1, tag="x")])
    forwarder.pump()
    shard.append("d", numbers(100, 1))
    if flushed:
        shard.flush("d")
    shard.delete("d", tag="x")
    before = shard.seqs("d")
    for _ in range(2):
        shard.restart()
        Forwarder(shard, "s", "d").pump()
        assert shard.seqs("d") == before
        assert shard.topic("d").deleted_total == 1
    assert shard.append("d", numbers(101, 1)).first_seq == 5


def test_a_folder_of_an_older_program_reuses_no_seq(shard: PipeShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """It logged nothing of its copies: what readers have seen above the last segment is not known."""
    monkeypatch.setattr(Pipe, "frame", lambda pipe: PipeFrame(pipe.source_id, pipe.flushed_at))
    monkeypatch.setattr(Commit, "log_copies", lambda commit, line, **more: None)
    shard.append("s", numbers(1, 3))
    Forwarder(shard, "s", "d").pump()
    seen = shard.seqs("d")
    shard.restart()
    monkeypatch.undo()
    Forwarder(shard, "s", "d").pump()
    found = shard.seqs("d")
    assert list(found.values()) == [b"1", b"2", b"3"]
    assert min(found) > max(seen)
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert list(shard.seqs("d").values()) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("how", ["evicted", "deleted"])
def test_what_the_source_has_no_more_when_copies_are_made_again(shard: PipeShard, how: str) -> None:
    """It was deleted there, not here: whoever has seen it here is told. What is left keeps its seqs."""
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", numbers(1, 6))
    forwarder.pump()
    before = shard.seqs("d")
    if how == "evicted":
        shard.put("s", TopicConfig(cap_records=2))
    else:
        shard.delete("s", before_seq=5)
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {5: b"5", 6: b"6"}
    assert before.items() >= shard.seqs("d").items()
    assert shard.report("d").head_seq == 6
    gap = shard.diff("d", 0).tombstone
    assert gap is not None
    assert (gap.gap_from, gap.gap_to, gap.reason) == (1, 4, "source_trim")
    shard.checkpoint()
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {5: b"5", 6: b"6"}
    assert shard.diff("d", 0).tombstone == gap, "also when a snapshot knows it"


def test_a_mirror_does_not_wait_for_itself(shard: PipeShard) -> None:
    """Each is the other's source: neither has to be whole before the other can be filled."""
    forwarders = [Forwarder(shard, "s", "d", ring_hops=1), Forwarder(shard, "d", "s", ring_hops=1)]
    shard.append("s", numbers(1, 2))
    for each in forwarders:
        each.pump()
    shard.append("d", numbers(3, 2))
    for each in forwarders:
        each.pump()
    before = shard.seqs("s"), shard.seqs("d")
    shard.restart()
    again = [Forwarder(shard, "s", "d", ring_hops=1), Forwarder(shard, "d", "s", ring_hops=1)]
    for _ in range(4):
        for each in again:
            each.step()
    assert not shard.engine.pipes.rebuilding
    assert (shard.seqs("s"), shard.seqs("d")) == before


def test_a_cursor_within_copies_that_have_no_bytes_yet_waits(shard: PipeShard) -> None:
    """A router behind the destination had read a part of a batch when the shard died, and copied none of it."""
    shard.put("e", TopicConfig())
    shard.append("s", [*numbers(1, 2), *numbers(3, 2, tag="x")])
    Forwarder(shard, "s", "d").pump()
    rules = [rule(shard, "d", "e", filter=["tag", "Eq", "x"])]
    assert Forwarder(shard, "d", "e", rules).step(limit=2)
    shard.checkpoint()
    shard.restart()
    assert shard.open_pipe("d", "e").at == 2
    again = Forwarder(shard, "d", "e", rules)
    for _ in range(3):
        assert not again.step(), "it has to wait"
    Forwarder(shard, "s", "d").pump()
    again.pump()
    assert shard.data("e") == [b"3", b"4"]


# --- the whole life of a pair, at random -------------------------------------------------------------

STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 6)),
    st.tuples(st.just("forward"), st.integers(1, 8)),
    st.tuples(st.just("forward"), st.integers(1, 8)),
    st.tuples(st.just("direct"), st.integers(1, 3)),
    st.tuples(st.just("delete source"), st.integers(0, 9)),
    st.tuples(st.just("delete dest"), st.integers(0, 9)),
    st.tuples(st.just("trim dest"), st.integers(0, 20)),
    st.tuples(st.sampled_from(["flush", "checkpoint", "restart", "stop", "flush source", "round"]), st.just(0)),
    st.tuples(st.sampled_from(["change", "unroute", "unroute"]), st.just(0)),
)


class Life:
    """One pair of topics with a forwarder, and what must be true of it.

    A record's data is its number and its tag the number's last digit. Where something was deleted at the source after
    it had been copied, a crash may take the copy too, and its seq is a tombstone then; everything else is certain."""

    def __init__(self, shard: PipeShard, *, cap: int, routers: int) -> None:
        self.shard = shard
        self.shard.put("s", TopicConfig())
        self.shard.put("d", TopicConfig(cap_records=cap))
        self.capped = bool(cap)
        filters: list[list[str] | None] = [None, ["tag", "Glob", "*"]]
        self.rules = [rule(shard, "s", "d", f"r{at}", filter=filters[at], preserve_tag=not at) for at in range(routers)]
        self.forwarder = Forwarder(shard, "s", "d", self.rules)
        self.forwarder.step()
        self.routed = True
        self.number = 0
        self.written: list[int] = []
        self.direct: list[int] = []
        self.gone_at_source: set[int] = set()
        self.seen: dict[int, bytes] = {}
        self.deleted_seqs: set[int] = set()
        self.deleted_copies: dict[int, int] = {}  # number -> how many of its copies a client deleted
        self.head = 0

    def run(self, action: str, size: int) -> None:
        getattr(self, action.replace(" ", "_"))(size)
        self.look()

    def _records(self, size: int) -> list[Record]:
        self.number += size
        first = self.number - size
        return [Record(b"%d" % number, tag=str(number % 10)) for number in range(first, first + size)]

    def append(self, size: int) -> None:
        records = self._records(size)
        self.shard.append("s", records)
        if self.routed:
            self.written += [int(record.data) for record in records]

    def forward(self, size: int) -> None:
        if self.routed:
            self.forwarder.step(limit=size)

    def change(self, _: int) -> None:
        """Its rules change: what was copied under the old ones is safe before."""
        if self.routed and not self.shard.topic("d").rebuilding:
            self.shard.close_pipe("s", "d", keep=True)
            self.forwarder = Forwarder(self.shard, "s", "d", self.rules)

    def unroute(self, _: int) -> None:
        """The routers go when all is copied, or come back and begin anew."""
        if self.routed:
            self.forwarder.pump()
            self.shard.close_pipe("s", "d", keep=True)
            self.shard.close_pipe("s", "d")
        else:
            since = self.shard.report("s").head_seq
            self.rules = [msgspec.structs.replace(each, since=since) for each in self.rules]
            self.forwarder = Forwarder(self.shard, "s", "d", self.rules)
            self.forwarder.step()
        self.routed = not self.routed

    def direct_append(self, size: int) -> None:
        if not self.shard.topic("d").rebuilding:
            records = self._records(size)
            self.shard.append("d", records)
            self.direct += [int(record.data) for record in records]

    def round(self, size: int) -> None:
        """A copy and a direct record in the same round."""
        if self.shard.topic("d").rebuilding or self.forwarder.at is None or not self.routed:
            return
        records = self._records(1)
        self.forwarder.together = lambda: self.shard.send_append("d", records)
        self.forwarder.step(limit=3)
        self.forwarder.together = lambda: None
        self.shard.answers.messages.clear()
        if b"%d" % (self.number - 1) in self.shard.data("d"):
            self.direct += [int(record.data) for record in records]

    def delete_source(self, digit: int) -> None:
        gone = [int(data) for data in self.shard.data("s") if int(data) % 10 == digit]
        self.shard.delete("s", tag=str(digit))
        self.gone_at_source.update(gone)

    def _deleted(self, before: dict[int, bytes]) -> None:
        for seq, data in before.items():
            if seq not in self.shard.seqs("d"):
                self.deleted_seqs.add(seq)
                self.deleted_copies[int(data)] = self.deleted_copies.get(int(data), 0) + 1

    def delete_dest(self, digit: int) -> None:
        if not self.shard.topic("d").rebuilding:
            before = self.shard.seqs("d")
            self.shard.delete("d", tag=str(digit))
            self._deleted(before)

    def trim_dest(self, size: int) -> None:
        if not self.shard.topic("d").rebuilding:
            before = self.shard.seqs("d")
            if before:
                self.shard.delete("d", before_seq=min(before) + size)
                self._deleted(before)

    def flush(self, _: int) -> None:
        self.shard.flush("d")

    def flush_source(self, _: int) -> None:
        self.shard.flush("s")

    def checkpoint(self, _: int) -> None:
        self.shard.checkpoint()

    def restart(self, _: int) -> None:
        self.shard.restart()
        self.forwarder = Forwarder(self.shard, "s", "d", self.rules)

    def stop(self, _: int) -> None:
        if not self.shard.engine.pipes.rebuilding:
            self.shard.stop()
            self.shard.open()
        self.forwarder = Forwarder(self.shard, "s", "d", self.rules)

    # --- what must hold ---

    def look(self) -> None:
        """As any reader sees it at any moment."""
        if self.shard.topic("d").rebuilding:
            return
        report = self.shard.report("d")
        assert report.head_seq >= self.head, "the head went back"
        self.head = report.head_seq
        found = self.shard.seqs("d")
        assert report.count == len(found)
        for seq, data in found.items():
            assert self.seen.setdefault(seq, data) == data, f"seq {seq} was {self.seen[seq]!r} and is {data!r}"
            assert seq not in self.deleted_seqs, f"seq {seq} ({data!r}) was deleted"
        if self.capped:
            return
        assert report.head_seq == len(self.seen), "a seq that nobody got"
        lost = {seq for seq in self.seen if seq not in found and seq not in self.deleted_seqs}
        assert {int(self.seen[seq]) for seq in lost} <= self.gone_at_source
        trims = self.shard.topic("d").trims
        assert {seq for seq in self.seen if any(first <= seq <= last for first, last in trims)} == lost

    def check_end(self) -> None:
        if self.routed:
            self.forwarder.pump()
        self.look()
        numbers_at_dest = [int(data) for data in self.shard.data("d")]
        copies = [number for number in numbers_at_dest if number not in self.direct]
        assert copies == sorted(copies), "the source's order"
        assert [n for n in numbers_at_dest if n in self.direct] == sorted(
            n for n in numbers_at_dest if n in self.direct
        )
        for number in self.written:
            there = numbers_at_dest.count(number)
            most = len(self.rules) - self.deleted_copies.get(number, 0)
            assert there <= most, f"{number}: {there} copies, {self.deleted_copies.get(number, 0)} were deleted"
            if not self.capped and number not in self.gone_at_source:
                assert there == most, f"{number}: {there} copies of {most}"
        if not self.capped:
            for number in self.direct:
                assert (number in numbers_at_dest) == (number not in self.deleted_copies)
        assert self.shard.engine.copies.bytes >= 0
        self.shard.flush("d")
        assert self.shard.engine.copies.bytes == 0


@pytest.mark.timeout(3_600 if EXHAUSTIVE else 1_200)
@examples(150)
@given(steps=st.lists(STEP, max_size=30), cap=st.sampled_from([0, 0, 0, 4, 9]), routers=st.sampled_from([1, 1, 2]))
def test_whatever_happens_to_a_pair(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], cap: int, routers: int
) -> None:
    shard = PipeShard(tmp_path_factory.mktemp("pair"), segment_max_events=8)
    try:
        life = Life(shard, cap=cap, routers=routers)
        for action, size in steps:
            life.run("direct_append" if action == "direct" else action, size)
        life.check_end()
    finally:
        shard.crash()


# --- rings and chains, at random ---------------------------------------------------------------------

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("forward"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("forward"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("together"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("flush"), st.integers(0, 2), st.just(0)),
        st.tuples(st.sampled_from(["checkpoint", "restart", "stop"]), st.just(0), st.just(0)),
    ),
    max_size=40,
)


class Graph:
    """Topics in one shard, in a ring or in a chain. Nothing is deleted, so everything is certain: each record is in
    each topic once, and no seq is skipped."""

    def __init__(self, shard: PipeShard, *, size: int, ring: bool) -> None:
        self.shard = shard
        self.names = ["a", "b", "c"][:size]
        for name in self.names:
            shard.put(name, TopicConfig())
        self.ring = ring
        self.written: dict[str, list[int]] = {name: [] for name in self.names}
        self.number = 0
        self.seen: dict[tuple[str, int], bytes] = {}
        self.begin()

    def begin(self) -> None:
        arrows = [*pairwise(self.names), *([(self.names[-1], "a")] if self.ring else [])]
        hops = len(self.names) - 1 if self.ring else None
        self.forwarders = [Forwarder(self.shard, source, dest, ring_hops=hops) for source, dest in arrows]

    def run(self, action: str, which: int, size: int) -> None:
        name = self.names[which % len(self.names)]
        forwarder = self.forwarders[which % len(self.forwarders)]
        if action == "append":
            if self.may_write(name):
                self.shard.append(name, self.records(name, size))
        elif action == "forward":
            forwarder.step(limit=size)
        elif action == "together":
            self.together(forwarder, size)
        elif action == "flush":
            self.shard.flush(name)
        elif action == "checkpoint":
            self.shard.checkpoint()
        elif action == "restart":
            self.shard.restart()
            self.begin()
        elif not self.shard.engine.pipes.rebuilding:
            self.shard.stop()
            self.shard.open()
            self.begin()
        self.look()

    def may_write(self, name: str) -> bool:
        return not self.shard.topic(name).rebuilding

    def records(self, name: str, size: int) -> list[Record]:
        made = numbers(self.number, size)
        self.written[name] += range(self.number, self.number + size)
        self.number += size
        return made

    def together(self, forwarder: Forwarder, size: int) -> None:
        """A direct record and copies in one round, in either order."""
        shard, dest = self.shard, forwarder.dest
        if forwarder.at is None or not self.may_write(dest) or shard.topic(forwarder.source).rebuilding:
            return
        forwarder.together = lambda: shard.send_append(dest, self.records(dest, 1))
        forwarder.step(limit=size)
        forwarder.together = lambda: None
        shard.answers.messages.clear()

    def look(self) -> None:
        for name in self.names:
            if not self.shard.topic(name).rebuilding:
                for seq, data in self.shard.seqs(name).items():
                    assert self.seen.setdefault((name, seq), data) == data, f"{name}: seq {seq}"
                seen = sum(topic == name for topic, _ in self.seen)
                assert self.shard.report(name).head_seq == seen == len(self.shard.seqs(name)), name

    def check_end(self) -> None:
        for _ in range(10):
            for forwarder in self.forwarders:
                for _ in range(1_000):
                    if not forwarder.step() and forwarder.at is not None:
                        break
        self.look()
        for at, name in enumerate(self.names):
            found = [int(data) for data in self.shard.data(name)]
            sources = self.names if self.ring else self.names[: at + 1]
            expected = [number for source in sources for number in self.written[source]]
            assert sorted(found) == sorted(expected), f"{name}: each exactly once"
            for source in sources:
                mine = [number for number in found if number in self.written[source]]
                assert mine == self.written[source], f"{name}: the order of {source}"


@pytest.mark.timeout(3_600 if EXHAUSTIVE else 1_200)
@pytest.mark.parametrize(("size", "ring"), [(2, True), (3, True), (3, False)], ids=["mirror", "ring", "chain"])
@examples(40)
@given(moves=MOVES)
def test_whatever_happens_to_a_graph(
    tmp_path_factory: pytest.TempPathFactory, size: int, ring: bool, moves: list[tuple[str, int, int]]
) -> None:
    shard = PipeShard(tmp_path_factory.mktemp("graph"), segment_max_events=8)
    try:
        graph = Graph(shard, size=size, ring=ring)
        for move in moves:
            graph.run(*move)
        graph.check_end()
    finally:
        shard.crash()
