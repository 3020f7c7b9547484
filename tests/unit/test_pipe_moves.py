"""Pipes that move and copy nothing: a filter may let nothing through for days."""

from __future__ import annotations

from pathlib import Path

import pytest
from model import Record
from pipeshard import Forwarder, PipeShard, numbers, rule
from test_engine_faults import FaultyDisk

from topics.storage.config import TopicConfig


@pytest.fixture
def shard(tmp_path: Path) -> PipeShard:
    shard = PipeShard(tmp_path)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig())
    return shard


def marks(shard: PipeShard) -> int:
    pipe = shard.topic("d").pipe
    assert pipe is not None
    return len(pipe.marks)


def rarely(shard: PipeShard) -> Forwarder:
    return Forwarder(shard, "s", "d", [rule(shard, "s", "d", filter=["tag", "Eq", "rare"])])


@pytest.mark.parametrize("before", ["nothing", "a copy", "a direct record", "both"])
def test_a_thousand_moves_are_one(shard: PipeShard, before: str) -> None:
    shard.open_pipe("s", "d")
    if before in ("a copy", "both"):
        shard.forward("s", "d", numbers(1, 1), to_seq=1)
    if before in ("a direct record", "both"):
        shard.append("d", numbers(100, 1))
    expected = shard.everything("d")
    for at in range(1, 1_001):
        assert shard.forward("s", "d", [], to_seq=at + 1) == at + 1
    assert marks(shard) <= 1 + (before == "both")
    shard.flush("d")
    assert marks(shard) == 0
    shard.checkpoint()
    shard.restart()
    opened = shard.open_pipe("s", "d")
    assert opened.at == 1_001
    assert opened.forwarded == ({"r": 1} if before in ("a copy", "both") else {})
    shard.forward("s", "d", [], to_seq=1_001)
    assert shard.everything("d") == expected


def test_where_it_stands_is_saved_without_a_copy(shard: PipeShard) -> None:
    """After a kill nobody waits for the source to be read again, nor is told of a loss that was none."""
    forwarder = rarely(shard)
    shard.append("s", [Record(b"0", tag="rare")])
    forwarder.pump()
    shard.flush("d")
    shard.mover.step(quiet=False)
    shard.mover.wait()
    for number in range(1, 100):
        shard.append("s", numbers(number, 1))
        forwarder.pump()
    shard.wall.pass_ms(61_000)
    shard.mover.step(quiet=False)
    shard.mover.wait()
    shard.put("s", TopicConfig(cap_records=1))
    shard.restart()
    assert shard.open_pipe("s", "d").at == 100
    rarely(shard).pump()
    assert shard.seqs("d") == {1: b"0"}
    assert shard.topic("d").trims == []
    assert shard.diff("d", 0).tombstone is None


def test_a_kill_makes_no_loss_of_what_was_not_to_be_copied(shard: PipeShard) -> None:
    """The source has evicted by then what the filter had kept back: the log says how far it had come."""
    shard.put("s", TopicConfig(cap_records=10))
    forwarder = rarely(shard)
    shard.append("s", [Record(b"0", tag="rare")])
    forwarder.pump()
    for number in range(1, 100):
        shard.append("s", numbers(number, 1))
        forwarder.pump()
        if number == 50:
            shard.checkpoint()
    for _ in range(2):
        shard.restart()
        pipe = shard.topic("d").pipe
        assert pipe is not None
        assert pipe.at == 100
        rarely(shard).pump()
        assert shard.everything("d") == []  # its only copy went with the source's record
        assert shard.topic("d").trims == [(1, 1)]
        assert shard.topic("d").head_seq == 1


@pytest.mark.parametrize("full", [False, True])
def test_nobody_hears_of_a_move_before_the_log(tmp_path: Path, full: bool) -> None:
    """A router that said it has looked at all would be wrong after a kill. On a full disk it moves all the same."""
    disk = FaultyDisk()
    shard = PipeShard(tmp_path, disk=disk)
    shard.put("s", TopicConfig(cap_records=3))
    shard.put("d", TopicConfig())
    shard.open_pipe("s", "d")
    shard.append("s", numbers(1, 3))
    sent = shard.send_forward("s", "d", [], to_seq=3)
    assert not shard.answered(sent)
    pipe = shard.topic("d").pipe
    assert pipe is not None
    assert (pipe.at, pipe.pending) == (0, True)
    if full:
        disk.broken()
    shard.settle()
    assert shard.answer(sent).at == 3
    assert (pipe.at, pipe.pending) == (3, False)
    disk.well()
    shard.restart(disk)
    assert shard.open_pipe("s", "d").at == (0 if full else 3)


def test_moves_of_a_round_are_one_frame(shard: PipeShard) -> None:
    shard.put("d2", TopicConfig())
    shard.open_pipe("s", "d")
    shard.open_pipe("s", "d2")
    frames = shard.engine.wal.frames
    shard.send_forward("s", "d", [], to_seq=1)
    shard.send_forward("s", "d2", [], to_seq=1)
    shard.work()
    assert shard.engine.wal.frames == frames + 1


def test_a_full_disk_stops_no_move(tmp_path: Path) -> None:
    disk = FaultyDisk()
    shard = PipeShard(tmp_path, disk=disk)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig())
    shard.open_pipe("s", "d")
    disk.full()
    assert shard.forward("s", "d", [], to_seq=1) == 1
    disk.well()
    assert shard.forward("s", "d", [], to_seq=2) == 2
    shard.restart()
    assert shard.open_pipe("s", "d").at == 2


def test_moves_make_no_ring_wait_for_itself(shard: PipeShard) -> None:
    """Each has moved over its own copies in the other, which are to be filled first."""

    def ring() -> list[Forwarder]:
        return [Forwarder(shard, *pair, ring_hops=1) for pair in (("s", "d"), ("d", "s"))]

    forwarders = ring()
    for number in range(3):
        for name in ("s", "d"):
            shard.append(name, numbers(10 * number + (name == "d"), 1))
            for _ in range(2):
                for forwarder in forwarders:
                    forwarder.step()
    before = shard.seqs("s"), shard.seqs("d")
    assert [len(each) for each in before] == [6, 6]
    shard.restart()
    forwarders = ring()
    for _ in range(50):
        for forwarder in forwarders:
            forwarder.step()
    assert not shard.engine.pipes.rebuilding
    assert (shard.seqs("s"), shard.seqs("d")) == before


def test_it_is_saved_once_a_minute(shard: PipeShard) -> None:
    forwarder = rarely(shard)
    forwarder.pump()
    saved = set()
    for number in range(240):
        shard.append("s", numbers(number, 1))
        forwarder.pump()
        shard.wall.pass_ms(1_000)
        shard.mover.step(quiet=False)
        shard.mover.wait()
        saved.add(shard.mover.snapshot_ms)
    assert 3 <= len(saved - {0}) <= 5


def test_copies_that_no_segment_holds_keep_it_back(shard: PipeShard) -> None:
    forwarder = rarely(shard)
    shard.append("s", [Record(b"1", tag="rare")])
    forwarder.pump()
    shard.append("s", numbers(2, 3))
    forwarder.pump()
    before = shard.seqs("d")
    shard.checkpoint()
    shard.restart()
    assert shard.open_pipe("s", "d").at == 0
    rarely(shard).pump()
    assert shard.seqs("d") == before == {1: b"1"}


@pytest.mark.parametrize("saved", [False, True])
def test_a_direct_record_that_was_taken_back_is_not_counted(tmp_path: Path, saved: bool) -> None:
    """The move came behind a batch that could not be written; its seqs go to copies."""
    disk = FaultyDisk()
    shard = PipeShard(tmp_path, disk=disk)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig())
    shard.append("s", numbers(1, 3))
    shard.open_pipe("s", "d")
    shard.sync()
    shard.send_append("d", numbers(100, 2))
    shard.send_forward("s", "d", [], to_seq=1)
    disk.broken()
    shard.engine.commit.write()
    disk.well()
    shard.answers.messages.clear()
    if saved:
        shard.checkpoint()
    shard.forward("s", "d", numbers(2, 2))
    before = shard.seqs("d")
    assert before == {1: b"2", 2: b"3"}
    if not saved:
        shard.checkpoint()
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == before
