"""A destination whose class changes while copies are not in segments yet: what a durable class got stays, and what an
ephemeral one got goes with the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeshard import Forwarder, PipeShard, Record, numbers
from test_engine_faults import FaultyDisk

from topics.storage.config import TopicConfig
from topics.walshard.log import commit

EPHEMERAL = TopicConfig(durability="ephemeral", durable=False)


@pytest.fixture
def shard(tmp_path: Path) -> PipeShard:
    shard = PipeShard(tmp_path)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig())
    return shard


def kill(shard: PipeShard) -> None:
    shard.restart()
    Forwarder(shard, "s", "d").pump()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_copies_of_a_durable_class_survive_an_ephemeral_one(
    shard: PipeShard, saved: bool, more: bool, back: bool
) -> None:
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", numbers(1, 3))
    forwarder.pump()
    durable = shard.everything("d")
    shard.put("d", EPHEMERAL)
    if more:
        shard.append("s", numbers(4, 2))
        forwarder.pump()
    if back:
        shard.put("d", TopicConfig())
    seen = shard.seqs("d")
    if saved:
        shard.checkpoint()
    for _ in range(2):
        kill(shard)
        found = shard.everything("d")
        assert found[:3] == durable
        for stored in found:
            assert seen.setdefault(stored.seq, stored.record.data) == stored.record.data
        assert shard.topic("d").unaccounted == 0
        shard.append("d", numbers(100, 1))
        seen |= shard.seqs("d")
    shard.flush("d")
    shard.checkpoint()
    kill(shard)
    assert shard.everything("d")[:3] == durable


def test_copies_that_become_readable_behind_the_change_are_of_the_class_before(shard: PipeShard) -> None:
    """They waited for a sync of a direct record."""
    shard.put("d", TopicConfig(durability="fsync", durable=True))
    shard.open_pipe("s", "d")
    shard.append("s", numbers(1, 3))
    shard.send_append("d", numbers(100, 1))
    shard.engine.commit.write()
    shard.send_forward("s", "d", numbers(1, 3))
    shard.put("d", EPHEMERAL)
    before = shard.seqs("d")
    assert list(before) == [1, 2, 3, 4]
    shard.checkpoint()
    kill(shard)
    assert shard.seqs("d") == before


def test_an_ephemeral_class_keeps_nothing_for_long(shard: PipeShard) -> None:
    """When the copies of the class before are in a snapshot, a restart goes on behind those that it took along."""
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", numbers(1, 3))
    forwarder.pump()
    shard.put("d", EPHEMERAL)
    shard.append("s", numbers(4, 2))
    forwarder.pump()
    shard.flush("d")
    shard.checkpoint()
    shard.append("s", numbers(6, 2))
    forwarder.pump()
    pipe = shard.topic("d").pipe
    assert pipe is not None
    assert (len(pipe.marks), len(pipe.sources), pipe.flushed_at) == (0, 0, 7)


@pytest.mark.parametrize("before", ["nothing", "copies", "flushed copies"])
@pytest.mark.parametrize("saved", [False, True])
def test_what_an_ephemeral_class_lost_does_not_come_again(shard: PipeShard, before: str, saved: bool) -> None:
    """Not what a client had deleted, nor what readers had seen: the log says how far the source has been copied."""
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    if before != "nothing":
        shard.append("s", numbers(1, 3))
        forwarder.pump()
    if before == "flushed copies":
        shard.flush("d")
        shard.checkpoint()
    durable = shard.seqs("d")
    shard.put("d", EPHEMERAL)
    shard.append("s", numbers(4, 3, tag="x"))
    forwarder.pump()
    shard.delete("d", tag="x")
    shard.append("s", numbers(7, 2))
    forwarder.pump()
    if saved:
        shard.checkpoint()
    shard.append("s", numbers(9, 2))
    forwarder.pump()
    total = 10 if before != "nothing" else 7
    for _ in range(2):
        kill(shard)
        assert shard.seqs("d") == durable
        assert shard.topic("d").unaccounted <= 0
        opened = shard.open_pipe("s", "d")
        assert (opened.at, opened.forwarded) == (total, {"r": total})
    shard.append("s", numbers(11, 1))
    Forwarder(shard, "s", "d").pump()
    assert shard.data("d") == [*durable.values(), b"11"]


def test_a_loss_is_told_an_ephemeral_class_once(shard: PipeShard) -> None:
    shard.put("s", TopicConfig(cap_records=2))
    shard.put("d", EPHEMERAL)
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    for number in range(1, 6):
        shard.append("s", numbers(number, 1))
    shard.forward("s", "d", [], lost=3, told=[(3, 0)], to_seq=3)
    kill(shard)
    assert shard.topic("d").trims == []
    assert shard.data("d") == [b"4", b"5"]


@pytest.mark.parametrize("saved", [False, True])
def test_what_an_ephemeral_class_kept_of_a_ring_goes_on(shard: PipeShard, saved: bool) -> None:
    """Hops, times and a client's deletes of copies from the class before."""
    shard.append("s", numbers(1, 4))
    forwarder = Forwarder(shard, "s", "d", ring_hops=2)
    forwarder.pump()
    shard.put("d", EPHEMERAL)
    shard.delete("d", before_seq=3)
    before = shard.everything("d")
    if saved:
        shard.checkpoint()
    shard.wall.pass_ms(5_000)
    shard.restart()
    Forwarder(shard, "s", "d", ring_hops=2).pump()
    assert shard.everything("d") == before
    assert shard.read_raw("d", 2)[0].hops == [1, 1]


def test_a_deleted_record_in_what_a_kill_took_counts_once(tmp_path: Path) -> None:
    """The topic was ephemeral before, and skips to its ceiling behind the records that it has left."""
    shard = PipeShard(tmp_path)
    shard.put("t", TopicConfig())
    shard.append("t", numbers(1, 2))
    shard.put("t", EPHEMERAL)
    shard.append("t", [Record(b"3", tag="x"), Record(b"4")])
    shard.delete("t", before_seq=3)
    shard.delete("t", tag="x")
    shard.put("t", TopicConfig())
    shard.append("t", numbers(5, 1))
    shard.put("t", EPHEMERAL)
    assert shard.topic("t").unaccounted == 0
    shard.checkpoint()
    shard.restart()
    topic = shard.topic("t")
    assert list(shard.seqs("t").values()) == [b"5"]
    assert topic.holes
    assert (topic.deleted_total, topic.evicted_total, topic.unaccounted) == (3, 1, 0)
    shard.crash()


@pytest.mark.parametrize("name", ["d", "plain"])
@pytest.mark.parametrize("back", [False, True])
def test_what_a_cap_took_for_what_a_kill_takes_stays_away(shard: PipeShard, name: str, back: bool) -> None:
    """Its records made room for those that were in memory only; without them a start would find it within its cap."""
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    shard.put(name, TopicConfig())
    if name == "d":
        shard.append("s", numbers(1, 3))
        forwarder.pump()
    else:
        shard.append(name, numbers(1, 3))
    shard.put(name, TopicConfig(durability="ephemeral", durable=False, cap_records=0 if back else 6))
    shard.append(name, numbers(4, 5))
    if back:
        shard.put(name, TopicConfig(cap_records=6))
    assert min(shard.seqs(name)) == 3
    if back:
        shard.append(name, numbers(9, 1))
        assert min(shard.seqs(name)) == 4
    before = shard.seqs(name)
    for _ in range(2):
        kill(shard)
        gap = shard.diff(name, 0).tombstone
        assert gap is not None
        assert gap.gap_to >= min(before) - 1
        assert shard.seqs(name).items() <= before.items()


def test_a_cap_that_takes_only_what_is_in_memory_writes_nothing(shard: PipeShard) -> None:
    shard.put("d", TopicConfig(durability="ephemeral", durable=False, cap_records=2))
    shard.append("d", numbers(1, 2))
    frames = shard.engine.wal.frames
    for number in range(3, 9):
        shard.append("d", numbers(number, 1))
    assert shard.engine.wal.frames == frames


def test_a_full_disk_is_not_asked_with_each_write_for_what_a_cap_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new log file costs the loop time even where it fails. With the next write that has room it is logged."""
    disk = FaultyDisk()
    shard = PipeShard(tmp_path, disk=disk)
    shard.put("d", TopicConfig())
    shard.append("d", numbers(1, 3))
    shard.put("d", TopicConfig(durability="ephemeral", durable=False, cap_records=3))
    shard.append("d", numbers(4, 1))
    kept = shard.engine.commit
    wal = shard.engine.wal
    now_ns = 10**12
    monkeypatch.setattr(commit, "time", Clocks(lambda: now_ns))
    room, reserve, wal.room, wal._reserve = wal.room, wal._reserve, 0, 0
    disk.full()
    disk.calls.clear()
    for number in range(5, 7):
        shard.append("d", numbers(number, 1))
    for _ in range(9):
        kept.write()
    assert disk.calls.count("create") == 1
    now_ns += 1_000_000_000
    for _ in range(9):
        kept.write()
    assert disk.calls.count("create") == 2
    disk.well()
    kept.write()
    assert shard.topic("d").floor_due
    wal.room, wal._reserve = room, reserve
    kept.write()
    assert not shard.topic("d").floor_due
    shard.restart()
    assert shard.seqs("d") == {}
    shard.crash()


class Clocks:
    """The module `time`, with a monotonic clock that a test moves."""

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self.monotonic_ns = monotonic_ns
        self.perf_counter_ns = time.perf_counter_ns
