"""A snapshot that `topics snapshot` made shares its segments with the server: what clients delete later shows in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from folderplay import unexplained, write_manifest
from model import Shard
from onlooker import named
from pipeshard import numbers

from topics import limits
from topics.cli.datadir.snapshot import make
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.storage.config import TopicConfig
from topics.storage.manifest import SNAPSHOT_NOTE


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)
    shard = Shard(tmp_path / "data", segment_max_events=10)
    write_manifest(tmp_path / "data")
    shard.put("t", TopicConfig())
    shard.append("t", [*numbers(1, 20), *numbers(21, 1, tag="early"), *numbers(22, 4, tag="late"), *numbers(26, 15)])
    shard.flush("t")
    shard.checkpoint()
    return shard


def frozen(tmp_path: Path) -> Topic:
    return named(Folder(str(tmp_path / "early" / "one")), "t")


def test_what_is_deleted_later_is_counted_as_deleted(shard: Shard, tmp_path: Path) -> None:
    """Deletes of before that are in a flag, in the log and in both; a range, of which the log has no number."""
    shard.delete("t", tag="early")
    shard.checkpoint()
    shard.delete("t", before_seq=4)
    make(str(tmp_path / "data"), str(tmp_path / "early"), "one")
    assert (frozen(tmp_path).count, frozen(tmp_path).deleted_total) == (36, 4)
    shard.delete("t", tag="late")
    shard.checkpoint()
    topic = frozen(tmp_path)
    assert (topic.head_seq, topic.count, topic.deleted_total, unexplained(topic)) == (40, 32, 8, 0)
    shard.delete("t", before_seq=31)
    shard.checkpoint()
    topic = frozen(tmp_path)
    assert (topic.count, topic.deleted_total, unexplained(topic)) == (10, 30, 0)


def test_deletes_do_not_hide_what_is_missing(shard: Shard, tmp_path: Path) -> None:
    """The books of the snapshot name three deletes too few: they stay three, however many flags there are."""
    shard.delete("t", tag="late")
    shard.checkpoint()
    make(str(tmp_path / "data"), str(tmp_path / "early"), "one")
    note = tmp_path / "early" / "one" / SNAPSHOT_NOTE
    told = json.loads(note.read_text())
    ((total, flagged),) = told["deletes"].values()
    assert (total, flagged) == (4, 4)
    told["deletes"] = {id: [1, flagged] for id in told["deletes"]}
    note.write_text(json.dumps(told))
    assert unexplained(frozen(tmp_path)) == 3
    shard.delete("t", tag="early")
    shard.checkpoint()
    assert (frozen(tmp_path).deleted_total, unexplained(frozen(tmp_path))) == (2, 3)
