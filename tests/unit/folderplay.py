"""A shard stepped by hand and somebody who looks at its folder, held against each other.

What the shard answers to its clients is right by definition (model.py tests that). An onlooker has read the folder at
every step; a newcomer reads it now. Both must see the same, down to the last byte offset, and what they see must be
what the shard says, as far as it is on the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model import Record, Shard, Stored
from onlooker import assert_same, live_records, named

from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.storage.manifest import MANIFEST_NAME, Manifest, encode_manifest
from topics.walshard.forwards.copies import Copies


def write_manifest(folder: Path | str, **more: Any) -> None:
    """A Shard has no supervisor that would."""
    manifest = Manifest(format=1, layout=1, shards=1, **more)
    Path(folder, MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def newcomer(shard: Shard, **more: Any) -> Folder:
    return Folder(shard.settings.data_dir, now_ms=shard.clock.now_ms(), **more)


def stored_records(folder: Folder, topic: Topic) -> list[Stored]:
    """From the bytes on the disk, as the shard's model has them."""
    return [
        Stored(seen.seq, seen.ts, Record(seen.data, seen.tag, seen.node, seen.meta))
        for seen in live_records(folder, topic)
    ]


# --- held against the shard ---


def check_same(onlooker: Folder, shard: Shard) -> Folder:
    """Whoever was there all the time sees what a newcomer sees."""
    now = shard.clock.now_ms()
    onlooker.look(now_ms=now)
    fresh = Folder(shard.settings.data_dir, now_ms=now)
    assert_same(onlooker, fresh)
    return fresh


def resident(shard: Shard, name: str) -> set[int]:
    """Seqs of records that are in memory only."""
    return {
        seq
        for row in shard.topic(name).rows
        if row.source is None or isinstance(row.source, Copies)
        for seq in range(row.first, row.last + 1)
    }


def unexplained(seen: Topic) -> int:
    """Seqs that were given out and of which nobody can say what became of them."""
    records = seen.count + seen.deleted_total + seen.evicted_total - seen.lost_total + seen.expired_total
    return seen.head_seq - records - seen.lost - seen.trimmed - seen.skipped_total


def check_truth(folder: Folder, shard: Shard, *, forgetful: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """What the folder shows is what the shard tells its clients. forgetful: topics of which some records were never
    on the disk; of those only the others can be seen."""
    assert {topic.name for topic in folder.topics} == set(shard.engine.topics)
    for name in shard.engine.topics:
        seen = named(folder, name)
        report = shard.report(name)
        unseen = resident(shard, name)
        expected = [stored for stored in shard.everything(name) if stored.seq not in unseen]
        assert stored_records(folder, seen) == expected, name
        assert seen.config == report.config
        assert (seen.id, seen.created_ms) == (shard.topic(name).id, shard.topic(name).created_ms)
        assert seen.count == len(expected)
        assert seen.bytes(folder.columns) == sum(stored.record.size for stored in expected)
        if name in forgetful:
            assert seen.head_seq <= report.head_seq
            continue
        topic = shard.topic(name)
        assert (seen.head_seq, seen.earliest_seq) == (report.head_seq, report.earliest_seq), name
        assert (seen.count, seen.bytes(folder.columns)) == (report.count, report.bytes)
        assert seen.disk_seq == report.head_seq
        assert seen.last_write_ms == report.last_write_ts
        assert seen.evict_floor == topic.evict_floor
        assert unexplained(seen) == 0, f"{name}: what was given out and what became of it"
        assert seen.deleted_total == topic.deleted_total
        check_tombstones(seen, shard, name)


def check_tombstones(seen: Topic, shard: Shard, name: str) -> None:
    """A reader of the folder is told of a loss where a client is, and of the same records."""
    for from_seq in {0, seen.evict_floor - 2, seen.evict_floor - 1, seen.head_seq // 2, seen.head_seq}:
        if not 0 <= from_seq <= seen.head_seq:
            continue
        told = shard.diff(name, from_seq, limit=1).tombstone
        gap = seen.find_gap(from_seq + 1, seen.head_seq)
        assert (told is None) == (gap is None), f"{name} from {from_seq}: {told} {gap}"
        if told is not None and gap is not None:
            # A client is told to go on behind what was deleted, too.
            assert told.gap_from == gap[0]
            assert gap[1] <= told.gap_to
            assert not [seq for batch in seen.batches for seq in batch.live_seqs(gap[1] + 1) if seq <= told.gap_to]
