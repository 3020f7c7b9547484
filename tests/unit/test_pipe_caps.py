"""Caps of a router's destination and a kill: what a cap took stays away, also if the source has lost later records
since, whose copies come back as a tombstone and take no room."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from model import batch_of
from pipeshard import Forwarder, PipeShard, Record, numbers
from test_engine_faults import FaultyDisk

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.storage.config import TopicConfig
from topics.walshard.forwards.copies import logged_sizes
from topics.walshard.log import commit
from topics.walshard.topic.index import Row
from topics.walshard.topic.topic import Topic

SIZES = [10, 90, 10, 90, 10, 10, 90, 10, 10, 10]


@pytest.fixture
def shard(tmp_path: Path) -> PipeShard:
    shard = PipeShard(tmp_path, segment_max_events=25)
    shard.put("s", TopicConfig())
    return shard


def uneven(count: int = len(SIZES)) -> list[Record]:
    return [Record(b'"%s"' % (b"x" * SIZES[at]), tag=f"t{at + 1}") for at in range(count)]


@pytest.mark.parametrize("lost", [[10], [8, 9, 10], [6], [7, 10], [5, 6, 7, 8, 9, 10]])
@pytest.mark.parametrize(
    ("cap", "batches"),
    [*((TopicConfig(cap_records=6), batches) for batches in (1, 2, 10)), (TopicConfig(cap_bytes=250), 10)],
    ids=["records-1", "records-2", "records-10", "bytes-10"],
)
def test_what_a_cap_took_stays_away(shard: PipeShard, cap: TopicConfig, lost: list[int], batches: int) -> None:
    shard.put("d", cap)
    for record in uneven():
        shard.append("s", [record])
    Forwarder(shard, "s", "d").pump(limit=len(SIZES) // batches)
    before = shard.seqs("d")
    assert 0 < len(before) < len(SIZES)
    gap = shard.diff("d", 0).tombstone
    for seq in lost:
        shard.delete("s", tag=f"t{seq}")
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {seq: data for seq, data in before.items() if seq not in lost}
    again = shard.diff("d", 0).tombstone
    assert gap is not None
    assert again is not None
    assert again.reason == gap.reason or min(before) in lost
    shard.checkpoint()
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {seq: data for seq, data in before.items() if seq not in lost}


@pytest.mark.parametrize("lost", [[10], [8, 9, 10], [6], [7, 10], [5, 6, 7, 8, 9, 10], [4], [3, 5], [4, 10]])
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_what_cap_bytes_took_of_a_batch_stays_away(shard: PipeShard, lost: list[int], batches: int) -> None:
    """It had cut into the batch, by the size of each record."""
    shard.put("d", TopicConfig(cap_bytes=350))
    for record in uneven():
        shard.append("s", [record])
    Forwarder(shard, "s", "d").pump(limit=len(SIZES) // batches)
    before = shard.seqs("d")
    assert min(before) == 5
    for seq in lost:
        shard.delete("s", tag=f"t{seq}")
    for _ in range(2):
        shard.restart()
        Forwarder(shard, "s", "d").pump(limit=3)
        found = shard.seqs("d")
        assert {seq: data for seq, data in before.items() if seq not in lost}.items() <= found.items()
        assert found.keys() <= before.keys()
        assert shard.topic("d").unaccounted == 0
        shard.checkpoint()


@pytest.mark.parametrize("saved", [False, True])
def test_a_cap_takes_nothing_by_a_guess(shard: PipeShard, saved: bool) -> None:
    """A client has deleted the large record of a batch: how many bytes that left is not known before it is filled."""
    large = Record(b'"%s"' % (b"x" * 400), tag="large")
    small = Record(b"1")
    shard.put("d", TopicConfig(cap_bytes=610))
    forwarder = Forwarder(shard, "s", "d")
    batches = [[Record(b'"%s"' % (b"x" * 100))], [small, large], [Record(b'"%s"' % (b"x" * 250))]]
    for batch in batches[:2]:
        shard.append("s", batch)
        forwarder.pump()
    shard.delete("d", tag="large")
    shard.append("s", batches[2])
    forwarder.pump()
    before, report = shard.everything("d"), shard.report("d")
    assert [stored.seq for stored in before] == [1, 2, 4]
    if saved:
        shard.checkpoint()
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.everything("d") == before
    assert shard.report("d").bytes == report.bytes


def test_a_direct_record_behind_copies_took_their_room(shard: PipeShard) -> None:
    shard.put("d", TopicConfig(cap_records=6))
    for record in uneven(6):
        shard.append("s", [record])
    Forwarder(shard, "s", "d").pump()
    shard.append("d", numbers(7, 3))
    before = shard.seqs("d")
    assert min(before) == 4
    for tag in ("t5", "t6"):
        shard.delete("s", tag=tag)
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert sorted(shard.seqs("d")) == [4, 7, 8, 9]


def direct(shard: PipeShard) -> None:
    shard.append("d", numbers(100, 1))


def large(shard: PipeShard) -> None:
    shard.append_large("d", [Record(b'"%s"' % (b"x" * limits.PLACED_BYTES))])


def one_more_copy(shard: PipeShard) -> None:
    shard.append("s", numbers(100, 1))
    Forwarder(shard, "s", "d").pump()


def lower_cap(shard: PipeShard) -> None:
    shard.put("d", TopicConfig(durability="fsync", durable=True, cap_records=2))


def delete_and_more(shard: PipeShard) -> None:
    shard.delete("d", tag="t1")
    shard.append("d", numbers(100, 2))


@pytest.mark.parametrize("then", [direct, large, one_more_copy, lower_cap, delete_and_more])
@pytest.mark.parametrize("failed", [False, True], ids=["", "again"])
def test_a_second_kill_evicts_nothing_that_stood_there(
    tmp_path: Path, then: Callable[[PipeShard], None], failed: bool
) -> None:
    """What the first start did not find in the source takes no room after it. That is in the log before anything that
    does, also if the first try to write it fails."""
    disk = FaultyDisk()
    shard = PipeShard(tmp_path, disk=disk)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig(durability="fsync", durable=True, cap_records=3))
    shard.open_pipe("s", "d")
    shard.append("d", [Record(b'"acknowledged"')])
    shard.append("s", uneven(2))
    Forwarder(shard, "s", "d").pump()
    shard.delete("s", tag="t2")
    shard.restart(disk)
    Forwarder(shard, "s", "d").pump()
    assert sorted(shard.seqs("d")) == [1, 2]
    if failed:
        disk.broken()
        with pytest.raises(ApiError):
            shard.append("d", numbers(50, 1))
        disk.well()
    then(shard)
    before = shard.seqs("d")
    assert before[1] == b'"acknowledged"'
    for _ in range(2):
        shard.restart(disk)
        Forwarder(shard, "s", "d").pump()
        assert shard.seqs("d") == before
        assert shard.topic("d").unaccounted == 0
        assert shard.topic("d").trims == [(3, 3)]


@pytest.mark.parametrize("batches", [[4, 3], [7], [2, 2, 3]])
@pytest.mark.parametrize("deleted", [3, 4])
@pytest.mark.parametrize("lost", [(6,), (5, 6), (3, 7)])
def test_what_cap_bytes_took_of_a_batch_stays_away_where_clients_deleted(
    shard: PipeShard, batches: list[int], deleted: int, lost: tuple[int, ...]
) -> None:
    """The log has the size of each copy, so a start knows what a delete left of a batch."""
    shard.put("d", TopicConfig(cap_bytes=330))
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    records = uneven(7)
    for count in batches:
        for record in records[:count]:
            shard.append("s", [record])
        del records[:count]
        forwarder.pump()
        shard.delete("d", tag=f"t{deleted}")
    before = shard.seqs("d")
    for seq in lost:
        shard.delete("s", tag=f"t{seq}")
    for _ in range(2):
        shard.restart()
        Forwarder(shard, "s", "d").pump(limit=3)
        assert shard.seqs("d") == {seq: data for seq, data in before.items() if seq not in lost}


@pytest.mark.parametrize("flushed", [(), ("half",), ("all",), ("half", "saved"), ("half", "saved", "all")])
@pytest.mark.parametrize("lost", [(5, 9), (7, 9), (6, 7, 8, 9, 10)])
def test_a_cap_that_comes_later_knows_the_sizes_too(
    shard: PipeShard, flushed: tuple[str, ...], lost: tuple[int, ...]
) -> None:
    """Also of copies in segments that no snapshot names yet: a start finds them in the log. The block has a record of a
    client between them."""
    shard.put("d", TopicConfig())
    forwarder = Forwarder(shard, "s", "d")
    for at, record in enumerate(uneven()):
        shard.append("s", [record])
        if at == 4:
            forwarder.pump(limit=3)
            if "half" in flushed:
                shard.flush("d")
            if "saved" in flushed:
                shard.checkpoint()
            shard.append("d", numbers(0, 1))
    forwarder.pump(limit=3)
    if "all" in flushed:
        shard.flush("d")
    shard.put("d", TopicConfig(cap_bytes=390))
    before = shard.seqs("d")
    assert min(before) == 5
    for seq in lost:
        shard.delete("s", tag=f"t{seq}")
    gone = {seq if seq == 5 else seq + 1 for seq in lost if "saved" not in flushed or seq > 5}
    for _ in range(2):
        shard.restart()
        Forwarder(shard, "s", "d").pump()
        assert shard.seqs("d") == {seq: data for seq, data in before.items() if seq not in gone}


def test_a_cap_knows_the_sizes_of_copies_that_are_not_readable_yet(shard: PipeShard) -> None:
    """They wait behind a record whose sync is under way."""
    shard.put("d", TopicConfig(durability="fsync", durable=True))
    shard.open_pipe("s", "d")
    for record in uneven():
        shard.append("s", [record])
    shard.send_append("d", numbers(0, 1))
    shard.engine.commit.write()
    shard.send_forward("s", "d", uneven())
    shard.engine.commit.write()
    shard.put("d", TopicConfig(durability="fsync", durable=True, cap_bytes=350))
    before = shard.seqs("d")
    assert min(before) == 6
    for tag in ("t7", "t9"):
        shard.delete("s", tag=tag)
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {seq: data for seq, data in before.items() if seq not in (8, 10)}


def test_lines_of_an_earlier_program_make_no_cap_take_too_much(
    shard: PipeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They don't say how large each copy is: a start takes nothing by a guess."""
    monkeypatch.setattr("topics.walshard.log.commit.logged_sizes", lambda config, body, count: [])
    shard.put("d", TopicConfig(cap_bytes=350))
    for record in uneven():
        shard.append("s", [record])
    Forwarder(shard, "s", "d").pump()
    before = shard.seqs("d")
    shard.delete("s", tag="t9")
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    found = shard.seqs("d")
    assert {seq: data for seq, data in before.items() if seq != 9}.items() <= found.items()


def test_equal_sizes_take_one_number_in_the_log(shard: PipeShard) -> None:
    config = TopicConfig(cap_bytes=350)
    even, _ = batch_of(numbers(1, 9))
    assert len(logged_sizes(config, even, 9)) == 1
    odd, _ = batch_of(uneven())
    assert logged_sizes(config, odd, len(SIZES)) == [record.size for record in uneven()]
    assert logged_sizes(TopicConfig(), odd, len(SIZES)) == []


@pytest.mark.parametrize("between", ["", "more", "written down", "full"])
def test_many_copies_are_measured_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str) -> None:
    """A config that makes a cap count bytes takes effect when the log has the sizes of all of them: no round computes
    more than a few. They come and go meanwhile."""
    monkeypatch.setattr(commit, "_SIZED_RECORDS", 20)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)
    disk = FaultyDisk()
    shard = PipeShard(tmp_path, disk=disk)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig())
    forwarder = Forwarder(shard, "s", "d")
    for _ in range(10):
        shard.append("s", uneven())
    forwarder.pump(limit=10)
    measured = []
    sizes_of = Topic.sizes_or_shares

    def measure(topic: Topic, row: Row) -> array[int]:
        if row.sizes is None:
            measured.append(row.count)
        return sizes_of(topic, row)

    monkeypatch.setattr(Topic, "sizes_or_shares", measure)
    config = TopicConfig(cap_bytes=10_000)
    sent = shard.send(Op.PUT_TOPIC, messages.PutTopic("d", config, None))
    assert not shard.answered(sent)
    assert shard.topic("d").config == TopicConfig()
    if between == "more":
        shard.append("s", uneven())
        forwarder.pump()
    elif between == "written down":
        shard.flush("d")
    elif between == "full":
        disk.full()
    shard.settle()
    disk.well()
    assert sum(measured) <= 20
    if between == "full":
        assert isinstance(shard.outcome(sent), ApiError)
        shard.put("d", config)
    else:
        shard.answer(sent)
    assert shard.topic("d").config == config
    assert all(row.sizes is None for row in shard.topic("d").copies())
    report = shard.report("d")
    shard.delete("s", before_seq=35)
    shard.restart()
    pipe = shard.topic("d").pipe
    assert pipe is not None
    assert all(pipe.knows_sizes(row) for row in shard.topic("d").copies())
    assert (shard.topic("d").count, shard.topic("d").bytes) == (report.count, report.bytes)
    shard.crash()
