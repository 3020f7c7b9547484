"""Rows that die while a snapshot is written: it was made when they were alive, and a start needs their log files."""

from __future__ import annotations

from pathlib import Path

from model import Shard
from pipeshard import Forwarder, PipeShard, numbers

from topics.storage.config import TopicConfig


def rotate(shard: Shard) -> None:
    shard.settle()
    shard.engine.wal.rotate(100)


def test_copies_that_are_deleted_meanwhile_stay_deleted(tmp_path: Path) -> None:
    shard = PipeShard(tmp_path)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig())
    shard.append("s", numbers(1, 5))
    shard.flush("s")
    Forwarder(shard, "s", "d").pump()
    assert len(shard.seqs("d")) == 5
    rotate(shard)
    shard.mover.checkpoint()
    shard.delete("d", before_seq=6)
    shard.mover.wait()
    shard.restart()
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {}


def test_records_that_a_cap_takes_meanwhile_have_a_tombstone(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.put("t", TopicConfig(cap_records=5))
    shard.append("t", numbers(1, 5))
    rotate(shard)
    shard.mover.checkpoint()
    shard.append("t", numbers(6, 5))
    told = shard.diff("t", 0).tombstone
    assert told is not None
    shard.mover.wait()
    shard.restart()
    assert shard.diff("t", 0).tombstone == told
