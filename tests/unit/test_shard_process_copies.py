"""Another number of shards while copies have no bytes yet: what stands behind them is logged again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from model import BOOT, Record
from pipeshard import Forwarder, PipeShard, numbers
from test_engine_faults import FaultyDisk
from test_shard_process import Life

from topics import limits
from topics.errors import DiskFull
from topics.storage.config import TopicConfig, owner_of_name
from topics.walshard import process
from topics.walshard.forwards.copies import Copies
from topics.walshard.segments.checkpointer import Mover
from topics.walshard.topic.topic import Topic

FILE_BYTES = 65_536
DIRECT = [Record(b'"%d%s"' % (number, b"x" * 20_000)) for number in range(8)]


@pytest.fixture(autouse=True)
def _same_boot_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "boot_id", lambda: BOOT)
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 2_000)


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk()
    yield disk
    disk.close_all()


@pytest.fixture
def move(tmp_path: Path, disk: FaultyDisk) -> Iterator[Life]:
    """Killed with copies in memory, and records of clients behind them: more than a log file takes."""
    shard = PipeShard(tmp_path, wal_file_bytes=FILE_BYTES)
    for name in ("s", "d"):
        shard.put(name, TopicConfig(durability="fsync", durable=True))
    shard.append("s", numbers(1, 3))
    Forwarder(shard, "s", "d").pump()
    for record in DIRECT:
        shard.append("d", [record])
    shard.crash()
    life = Life(tmp_path, disk, index=owner_of_name("d", 2), shards=2, layout=2, old=(1, 1), wal_file_bytes=FILE_BYTES)
    yield life
    life.end()


def test_what_was_logged_again_may_fill_several_files(move: Life) -> None:
    engine = move.begin()._engine
    topic, wal = engine.topics["d"], engine.wal
    assert topic.rebuilding
    assert wal.older, "one file was not enough"
    assert all(file.last_lsn for file in wal.older)
    direct = [row.load() for row in topic.rows if not isinstance(row.source, Copies)]
    assert len(direct) == len(DIRECT)
    assert {file.header.layout for file in wal.files} == {2}


def test_a_full_disk_refuses_the_move(move: Life, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a failure of the log, for which the shard would be started again and again."""
    log_again = Mover.log_again

    def without_space(mover: Mover, topic: Topic) -> None:
        disk.full()
        log_again(mover, topic)

    monkeypatch.setattr(Mover, "log_again", without_space)
    with pytest.raises(DiskFull, match="copies in 'd'"):
        move.begin()


@pytest.mark.parametrize("behind", ["nothing", "a direct record", "copies", "what the source lost"])
def test_copies_that_are_all_deleted_are_logged_again(tmp_path: Path, disk: FaultyDisk, behind: str) -> None:
    """A second kill, before the copies in front of them are filled, brings back nothing that a client has deleted."""
    shard = PipeShard(tmp_path)
    for name in ("s", "d"):
        shard.put(name, TopicConfig())
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", numbers(1, 3))
    forwarder.pump()
    shard.append("s", numbers(4, 2, tag="gone"))
    forwarder.pump()
    shard.delete("d", tag="gone")
    if behind == "a direct record":
        shard.append("d", numbers(100, 1))
    elif behind == "copies":
        shard.append("s", numbers(6, 2))
        forwarder.pump()
    elif behind == "what the source lost":
        shard.append("s", numbers(6, 2))
        shard.put("s", TopicConfig(cap_records=1))
        forwarder.pump()
    before, report = shard.topic("d").pipe, shard.report("d")
    assert before is not None
    shard.crash()
    index = owner_of_name("d", 2)
    for old in ((1, 1), None):
        life = Life(tmp_path, disk, index=index, shards=2, layout=2, old=old)
        topic = life.begin()._engine.topics["d"]
        assert topic.rebuilding
        assert topic.pipe is not None
        assert (topic.pipe.at, topic.pipe.forwarded) == (before.at, before.forwarded)
        assert (topic.head_seq, topic.count, topic.deleted_total) == (report.head_seq, report.count, 2)
        assert topic.unaccounted == 0
        life.end()
