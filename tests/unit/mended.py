"""A data folder to be damaged, the repair of it, and whether the repair kept its word.

The word: every record that was live and is not any more is named as lost; a reader gets a tombstone for it; no record
has changed; no seq that was given out is given out again; `topics verify --deep` finds nothing; a shard opens the
folder and tells what an onlooker sees.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from folderplay import write_manifest
from model import Record, Shard
from onlooker import Seen, live_records

from topics import limits
from topics.cli.datadir.repair import Report, _in_place
from topics.datadir.fsck.verify import verify
from topics.datadir.log import _boot_id
from topics.datadir.view.folder import Folder
from topics.storage.config import TopicConfig
from topics.storage.frames import Frame, decode_wal_header, scan
from topics.storage.routers import Rule, encode_rules

NOW_MS = 1_700_000_100_000


def records(count: int, size: int = 0) -> list[Record]:
    return [
        Record(b'{"n":%d,"p":"%b"}' % (number, b"x" * size), tag=f"t{number % 3}", node="n", meta=b'{"m":1}')
        for number in range(count)
    ]


def build(folder: Path) -> None:
    """A killed shard: sealed and open segments with flags, a snapshot, log files before and behind it, frames of all
    types but HEAD; the blocks of `old` are in segments alone, those of the others in the log, too."""
    with pytest.MonkeyPatch.context() as patch:
        # Promises of seqs, as often as they are made, would begin log files where tests don't expect them.
        patch.setattr(limits, "SEQ_RESERVE", limits.LOST_SEQS)
        _build(folder)


def _build(folder: Path) -> None:
    shard = Shard(folder, wal_file_bytes=6_000, segment_max_events=20)
    shard.restart(boot=_boot_id())  # as if this machine had written it
    for name in ("old", "t", "u", "gone"):
        shard.put(name, TopicConfig(cap_records=30 if name == "u" else 0))
    for _ in range(9):
        shard.append("old", records(6, size=60))
    shard.flush("old")
    shard.checkpoint()
    for _ in range(6):
        shard.append("t", records(6, size=200))
        shard.append("u", records(6))
    shard.delete("t", tag="t1")
    shard.flush("t")
    shard.flush("u")
    shard.drop("gone")
    shard.checkpoint()
    for _ in range(4):
        shard.append("u", records(3, size=400), key="k")
        shard.append("t", records(4))
    shard.delete("t", before_seq=5)
    shard.checkpoint()
    shard.sync()
    for number in range(4):
        shard.append("u", records(3, size=400), key=f"key-{number}")
    shard.put("t", TopicConfig(durability="fsync"))
    shard.put("new", TopicConfig())
    shard.append("new", records(3))
    shard.append("t", records(2))
    shard.delete("u", tag="t2")
    shard.append("t", records(2))
    shard.append("new", records(2))
    shard.sync()
    shard.crash()
    write_manifest(folder)
    rule = Rule("r", "t", "elsewhere", shard.topic("t").id, 5, 0, 0)
    (folder / "routers").write_bytes(encode_rules([rule]))


def frames_of(path: Path) -> list[Frame]:
    data = path.read_bytes()
    return list(scan(data, salt=decode_wal_header(data[:64], path=path.name).salt))


def seen(folder: Path) -> tuple[dict[int, list[Seen]], dict[int, int], dict[int, str]]:
    """By topic id: its records, its head, its name."""
    found = Folder(str(folder), now_ms=NOW_MS)
    topics = found.topics
    return (
        {topic.id: live_records(found, topic) for topic in topics},
        {topic.id: topic.head_seq for topic in topics},
        {topic.id: topic.name for topic in topics},
    )


def repair(folder: Path) -> Report:
    return _in_place(str(folder), report=Report(data_dir=str(folder)))


def check_word(before: Path, after: Path, report: Report) -> int:
    """before: the folder without damage; after: repaired. Returns how many records are gone."""
    assert report.whole, report.hopeless
    verdict = verify(str(after), deep=True, running=False)
    assert verdict.clean, verdict.problems
    had, heads, names = seen(before)
    has, new_heads, new_names = seen(after)
    lost = {(loss.topic, seq) for loss in report.lost for seq in range(loss.first, loss.last + 1)}
    gone = 0
    folder = Folder(str(after), now_ms=NOW_MS)
    for topic_id, kept in had.items():
        topic = folder.topic(topic_id)
        if topic is None:
            assert any(names[topic_id] in text or "can't be told" in text for text in report.also_lost)
            gone += len(kept)
            continue
        now = {record.seq: record for record in has[topic_id]}
        assert new_heads[topic_id] >= heads[topic_id], f"{names[topic_id]}: seqs would be given out again"
        for record in kept:
            if record.seq in now:
                assert now.pop(record.seq) == record
                continue
            gone += 1
            assert (new_names[topic_id], record.seq) in lost, f"{names[topic_id]} {record.seq} went silently"
            assert topic.find_gap(record.seq, record.seq) is not None, f"{record.seq}: no tombstone"
        if now:  # back from the dead: a delete, or what a cap took by the count, is not known any more
            assert report.also_lost or report.lost or any("flag" in done.what for done in report.files)
    check_server(after)
    return gone


def check_server(folder: Path) -> None:
    """A shard takes the folder and serves what an onlooker sees in it."""
    has, _, names = seen(folder)
    shard = Shard(folder, wal_file_bytes=6_000, segment_max_events=20)
    shard.wall.pass_ms(0)
    try:
        assert set(shard.engine.topics) == set(names.values())
        for topic_id, name in names.items():
            served = {stored.seq: stored.record.data for stored in shard.everything(name)}
            assert served == {record.seq: record.data for record in has[topic_id]}, name
    finally:
        shard.crash()
