"""A log file that is gone, in a topic from which clients have deleted: deletes don't hide what is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from folderplay import write_manifest
from mended import records
from model import Record, Shard

from topics import limits
from topics.cli.datadir.repair import Report, _repair
from topics.datadir.fsck.verify import verify
from topics.datadir.log import _boot_id
from topics.datadir.repair.plan import Loss
from topics.storage.config import Durability, TopicConfig

SIZE = 40


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("wal/shard-00/*.wal"))


def build(folder: Path, config: TopicConfig, *, before_seq: int, tag: str | None = None) -> tuple[Shard, list[int]]:
    """A stopped shard with several log files, and the live seqs."""
    shard = Shard(folder, wal_file_bytes=8_000)
    shard.restart(boot=_boot_id())
    shard.put("t", config)
    for _ in range(40):
        shard.append("t", records(10, size=SIZE))
    if tag is not None:
        shard.delete("t", tag=tag)
    shard.delete("t", before_seq=before_seq)
    live = [stored.seq for stored in shard.everything("t")]
    shard.stop()
    write_manifest(folder)
    return shard, live


def mend(folder: Path) -> Report:
    report = _repair(str(folder), str(folder.with_name("copy")), False)
    assert report.whole, report
    return report


@pytest.mark.parametrize("durability", ["fsync", "disk"])
@pytest.mark.parametrize("before_seq", [2, 30, 81, 200])
def test_what_stood_in_it_is_named(tmp_path: Path, durability: Durability, before_seq: int) -> None:
    folder = tmp_path / "data"
    _, live = build(folder, TopicConfig(durability=durability), before_seq=before_seq)
    oldest = logs(folder)[0]
    oldest.unlink()
    assert not verify(str(folder), deep=False, running=False).clean
    report = mend(folder)
    copy = Shard(tmp_path / "copy")
    left = [stored.seq for stored in copy.everything("t")]
    lost = sorted(set(live) - set(left))
    assert lost
    assert left == sorted(set(live) - set(lost))
    assert report.lost == [Loss(topic="t", first=lost[0], last=lost[-1])], "record for record"
    page = copy.diff("t", before_seq - 1)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to) == (lost[0], lost[-1])
    copy.append("t", [Record(b"1")])
    assert copy.report("t").head_seq == 401


@pytest.mark.parametrize("durability", ["fsync", "disk"])
@pytest.mark.parametrize("tag", ["t0", "t1", "t2"])
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("file", [0, 1])
def test_deletes_by_tag_explain_none_of_it(
    tmp_path: Path, durability: Durability, tag: str, flushed: bool, file: int
) -> None:
    """Records that clients deleted elsewhere are as many as those that are lost, and are still in their files."""
    folder = tmp_path / "data"
    shard = Shard(folder, wal_file_bytes=8_000)
    shard.restart(boot=_boot_id())
    for topic in ("t", "u"):
        shard.put(topic, TopicConfig(durability=durability))
    for turn in range(40):
        shard.append("t", records(10, size=SIZE))
        if turn % 8 == 0:
            shard.append("u", records(10, size=SIZE))
        if flushed and turn == 20:
            shard.flush("t")
            shard.checkpoint()
    shard.delete("t", tag=tag)
    shard.delete("u", tag=tag)
    live = {topic: {stored.seq for stored in shard.everything(topic)} for topic in ("t", "u")}
    shard.stop()
    write_manifest(folder)
    assert verify(str(folder), deep=True, running=False).clean
    logs(folder)[file].unlink()
    assert not verify(str(folder), deep=False, running=False).clean
    report = mend(folder)
    assert verify(str(tmp_path / "copy"), deep=True, running=False).clean
    copy = Shard(tmp_path / "copy")
    missed = 0
    for topic in ("t", "u"):
        left = {stored.seq for stored in copy.everything(topic)}
        named = {seq for loss in report.lost if loss.topic == topic for seq in range(loss.first, loss.last + 1)}
        assert named == live[topic] - left, "record for record"
        gaps = [(1, copy.topic(topic).evict_floor - 1), *copy.topic(topic).holes]
        told = {seq for first, last in gaps for seq in range(first, last + 1)}
        assert named <= told, "and to readers"
        assert left <= live[topic]
        missed += len(named)
    assert missed


def test_nothing_is_lost_where_only_deletes_are(tmp_path: Path) -> None:
    """Floors, caps, a hole of a crash and deletes by tag together: no false alarm."""
    folder = tmp_path / "data"
    shard, _ = build(folder, TopicConfig(cap_records=300), before_seq=150, tag="t1")
    assert verify(str(folder), deep=True, running=False).clean
    shard.open(boot=_boot_id())
    for _ in range(3):
        shard.append("t", records(10, size=SIZE))
        shard.flush("t")
        shard.delete("t", tag="t2")
        shard.checkpoint()
        assert verify(str(folder), deep=True, running=False).clean
        shard.restart(boot=bytes(16))
        assert verify(str(folder), deep=True, running=False).clean
    report = _repair(str(folder), None, False)
    assert report.lost == []
