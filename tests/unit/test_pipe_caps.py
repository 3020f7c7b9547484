"""Caps of a router's destination and a kill: what a cap took stays away, also if the source has lost later records
since, whose copies come back as a tombstone and take no room."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeshard import Forwarder, PipeShard, Record, numbers

from topics.storage.config import TopicConfig

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
