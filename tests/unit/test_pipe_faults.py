"""A pipe that could not be logged: nothing has happened, whoever asked is told, and the shard goes on."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model import Record, error_of
from pipeshard import Forwarder, PipeShard, numbers
from test_engine_faults import FaultyDisk, fill

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, DiskFull
from topics.storage.config import TopicConfig


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 2_000)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def shard(tmp_path: Path, disk: FaultyDisk) -> PipeShard:
    shard = PipeShard(tmp_path, disk=disk, wal_file_bytes=65_536)
    for name in ("s", "other", "d"):
        shard.put(name, TopicConfig())
    return shard


def no_new_log_files(disk: FaultyDisk) -> None:
    """There is room for a snapshot, and none for a log file."""
    disk.when = lambda call: DiskFull("no space") if call == "create" else None


FAULTS: list[Callable[[FaultyDisk], None]] = [FaultyDisk.full, FaultyDisk.broken]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pipe_that_could_not_be_logged_is_none(
    shard: PipeShard, disk: FaultyDisk, fault: Callable[[FaultyDisk], None]
) -> None:
    """Opened again, it is logged: after a kill the copies that readers saw keep their seqs."""
    fault(disk)
    error_of(lambda: shard.open_pipe("s", "d"))
    assert shard.ask(Op.LIST_PIPES, messages.ListPipes()).rows == []
    disk.well()
    shard.append("s", numbers(1, 3))
    Forwarder(shard, "s", "d").pump()
    seen = shard.seqs("d")
    assert len(seen) == 3
    shard.restart()
    assert shard.topic("d").rebuilding
    assert error_of(lambda: shard.append("d", numbers(9, 1))).code == "shard_unavailable"
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == seen


@pytest.mark.parametrize("fault", FAULTS)
def test_a_ring_that_could_not_be_logged_is_asked_for_again(
    shard: PipeShard, disk: FaultyDisk, fault: Callable[[FaultyDisk], None]
) -> None:
    shard.open_pipe("s", "d")
    fault(disk)
    error_of(lambda: shard.open_pipe("s", "d", ring=True))
    disk.well()
    shard.open_pipe("s", "d", ring=True)
    shard.restart()
    pipe = shard.topic("d").pipe
    assert pipe is not None
    assert pipe.ring


def settling(shard: PipeShard, disk: FaultyDisk) -> None:
    """The pipe's copies are in segments that no snapshot names yet, and the log has no room for what comes then."""
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 5))
    shard.flush("d")
    no_new_log_files(disk)
    fill(shard, "other")


def test_a_close_that_could_not_be_logged_is_answered(shard: PipeShard, disk: FaultyDisk) -> None:
    settling(shard, disk)
    before = shard.everything("d")
    assert error_of(lambda: shard.close_pipe("s", "d")).code == "storage_full"
    assert len(shard.ask(Op.LIST_PIPES, messages.ListPipes()).rows) == 1
    disk.well()
    assert shard.close_pipe("s", "d").at == 5
    shard.restart()
    assert shard.topic("d").pipe is None
    assert shard.everything("d") == before


def test_another_source_that_could_not_be_logged_is_answered(shard: PipeShard, disk: FaultyDisk) -> None:
    settling(shard, disk)
    assert error_of(lambda: shard.open_pipe("other", "d", 50)).code == "storage_full"
    (row,) = shard.ask(Op.LIST_PIPES, messages.ListPipes()).rows
    assert row.source_id == shard.id_of("s")
    disk.well()
    assert shard.open_pipe("other", "d", 50).at == 50
    shard.restart()
    assert shard.open_pipe("other", "d").at == 50


def test_a_bad_disk_when_the_mover_is_done(shard: PipeShard, disk: FaultyDisk) -> None:
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 5))
    shard.flush("d")
    disk.when = lambda call: OSError(errno.EIO, "bad sector") if call == "write" else None
    assert error_of(lambda: shard.close_pipe("s", "d")).code == "internal"
    disk.well()
    assert shard.close_pipe("s", "d").at == 5


# --- who comes while the mover is at work ------------------------------------------------------------


def begun(shard: PipeShard) -> int:
    """Another source is to begin when the copies of the first are safe."""
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 5))
    head = messages.OpenPipe("d", shard.id_of("d"), shard.id_of("other"), 50, ["r"], False)
    return shard.send(Op.OPEN_PIPE, head)


def test_a_topic_that_is_dropped_meanwhile_stays_dropped(shard: PipeShard) -> None:
    sent = begun(shard)
    shard.drop("d")
    shard.work()
    error = shard.outcome(sent)
    assert isinstance(error, ApiError)
    assert error.code == "topic_not_found"
    shard.restart()
    assert "d" not in shard.engine.topics


def test_a_pipe_that_was_begun_meanwhile_is_not_begun_again(shard: PipeShard) -> None:
    """Two that ask for the same, as a router that was restarted does: the second may not set the first back."""
    first = begun(shard)
    head = messages.OpenPipe("d", shard.id_of("d"), shard.id_of("other"), 50, ["r"], False)
    second = shard.send(Op.OPEN_PIPE, head)
    close = shard.send(Op.CLOSE_PIPE, messages.ClosePipe("d", shard.id_of("d"), shard.id_of("s"), False))
    shard.work()
    assert shard.outcome(first).at == 50
    assert shard.outcome(second).code == "throttled"
    assert shard.outcome(close).at == 5
    (row,) = shard.ask(Op.LIST_PIPES, messages.ListPipes()).rows
    assert row.source_id == shard.id_of("other")


# --- copies that are made again ----------------------------------------------------------------------


def test_copies_are_not_given_up_before_their_seqs_are(shard: PipeShard, disk: FaultyDisk) -> None:
    """After a power cut, and the source is not what it was: the next copy gets a seq that nobody has seen, also after a
    write that failed."""
    shard.put("d", TopicConfig(durability="fsync"))
    shard.append("s", numbers(1, 3))
    shard.restart(disk, boot=bytes(16))
    shard.open_pipe("s", "d")
    shard.restart(disk)
    shard.open_pipe("s", "d")
    ceiling = shard.topic("d").ceiling
    disk.full()
    new = [Record(b'"new"')]
    error_of(lambda: shard.forward("s", "d", new, complete=False))
    assert shard.seqs("d") == {}
    assert shard.topic("d").head_seq == ceiling
    disk.well()
    shard.forward("s", "d", new, complete=False)
    assert shard.seqs("d") == {ceiling + 1: b'"new"'}


@pytest.mark.parametrize("gone", [False, True])
def test_copies_are_there_again_on_a_full_disk(shard: PipeShard, disk: FaultyDisk, gone: bool) -> None:
    """Their bytes are read from the source, and nothing has to be written for it."""
    shard.append("s", numbers(1, 3))
    Forwarder(shard, "s", "d").pump()
    shard.append("d", numbers(4, 1))
    before = shard.seqs("d")
    if gone:
        shard.delete("s", before_seq=3)
    shard.restart(disk)
    disk.full()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == ({3: b"3", 4: b"4"} if gone else before)
    gap = shard.diff("d", 0).tombstone
    assert (None if gap is None else (gap.gap_to, gap.reason)) == ((2, "source_trim") if gone else None)
    disk.well()
    assert shard.append("d", numbers(5, 1)).first_seq == 5


# --- records that the source has lost ----------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_lost_is_told_once(shard: PipeShard, disk: FaultyDisk, fault: Callable[[FaultyDisk], None]) -> None:
    """Its seqs are logged with the copies behind it: neither could be, and both are with the next try."""
    shard.open_pipe("s", "d")
    shard.append("s", numbers(1, 9))
    shard.forward("s", "d", numbers(1, 2))
    loss: dict[str, Any] = {"lost": 5, "from_seq": 2, "to_seq": 9, "complete": False, "sources": [(8, 2)]}
    sent = shard.send_forward("s", "d", numbers(8, 2), **loss)
    fault(disk)
    shard.work()
    assert isinstance(shard.outcome(sent), ApiError)
    disk.well()
    assert shard.open_pipe("s", "d").at == 2
    assert shard.topic("d").trims == []
    assert shard.forward("s", "d", numbers(8, 2), **loss) == 9
    as_told_once(shard)


def test_a_loss_stays_told_whatever_becomes_of_the_copies(
    shard: PipeShard, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for its line in the log, and none for theirs: the next try begins behind it."""
    shard.open_pipe("s", "d")
    shard.append("s", numbers(1, 9))
    shard.forward("s", "d", numbers(1, 2))
    shard.engine.wal.room = 200
    disk.full()
    sources = [(seq, 1) for seq in range(8, 400, 2)]
    sent = shard.send_forward("s", "d", numbers(8, 196), lost=5, to_seq=399, complete=False, sources=sources)
    assert isinstance(shard.outcome(sent), ApiError)
    shard.work()
    disk.well()
    assert shard.open_pipe("s", "d").at == 2, "nor is there room for its line"
    shard.engine.wal.room = 200
    monkeypatch.setattr(disk, "create", no_space)
    sent = shard.send_forward("s", "d", numbers(8, 196), lost=5, to_seq=399, complete=False, sources=sources)
    shard.work()
    assert isinstance(shard.outcome(sent), ApiError)
    assert shard.open_pipe("s", "d").at == 7
    assert shard.topic("d").trims == [(3, 7)]
    monkeypatch.undo()
    assert shard.forward("s", "d", numbers(8, 2)) == 9
    as_told_once(shard)


def no_space(path: str, *, size: int = 0) -> int:
    raise DiskFull("no space")


def as_told_once(shard: PipeShard) -> None:
    assert shard.seqs("d") == {1: b"1", 2: b"2", 8: b"8", 9: b"9"}
    assert shard.topic("d").trims == [(3, 7)]
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {1: b"1", 2: b"2", 8: b"8", 9: b"9"}
    assert shard.topic("d").unaccounted == 0


@pytest.mark.parametrize("call", ["create", "write", "write_whole"])
def test_a_stop_that_finds_no_space_once_keeps_copies_whose_originals_are_gone(
    shard: PipeShard, disk: FaultyDisk, call: str
) -> None:
    """Of a segment, or for the snapshot that names it."""
    seen = copies_without_originals(shard)
    refused: list[str] = []

    def once(now: str) -> Exception | None:
        if now != call or refused:
            return None
        refused.append(now)
        return DiskFull("no space")

    disk.when = once
    shard.stop()
    assert refused
    shard.open(FaultyDisk())
    assert not shard.topic("d").rebuilding
    assert shard.seqs("d") == seen


def test_a_stop_uses_the_space_that_its_snapshot_gives_back(shard: PipeShard, disk: FaultyDisk) -> None:
    seen = copies_without_originals(shard)
    disk.calls.clear()
    disk.when = lambda call: DiskFull("no space") if call == "create" and "write_whole" not in disk.calls else None
    shard.stop()
    assert disk.calls.index("create") < disk.calls.index("write_whole"), "it was refused before there was a snapshot"
    shard.open(FaultyDisk())
    assert not shard.topic("d").rebuilding
    assert shard.seqs("d") == seen


def test_a_stop_without_space_for_copies_is_a_kill_to_them(shard: PipeShard, disk: FaultyDisk) -> None:
    """What the source still has is made again; the rest is told."""
    shard.append("s", numbers(1, 3))
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    seen = shard.seqs("d")
    shard.delete("s", before_seq=3)
    disk.when = lambda call: DiskFull("no space") if call == "create" else None
    shard.stop()
    shard.open(FaultyDisk())
    assert shard.topic("d").rebuilding
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {3: seen[3]}
    gap = shard.diff("d", 0).tombstone
    assert gap is not None
    assert (gap.gap_from, gap.gap_to, gap.reason) == (1, 2, "source_trim")


def copies_without_originals(shard: PipeShard) -> dict[int, bytes]:
    """Copies in memory only, and what they are copies of is deleted."""
    shard.append("s", numbers(1, 3))
    Forwarder(shard, "s", "d").pump()
    shard.delete("s", before_seq=4)
    seen = shard.seqs("d")
    assert len(seen) == 3
    assert shard.topic("d").has_copies
    return seen
