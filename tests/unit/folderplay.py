"""A shard stepped by hand and somebody who looks at its folder, held against each other.

What the shard answers to its clients is right by definition (model.py tests that). An onlooker has read the folder at
every step; a newcomer reads it now. Both must see the same, down to the last byte offset, and what they see must be
what the shard says, as far as it is on the disk.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
from model import Record, Shard, Stored

from topics.folder.batch import Batch
from topics.folder.topic import Topic
from topics.folder.view import Folder
from topics.storage.format import DELETED
from topics.storage.manifest import MANIFEST_NAME, Manifest, encode_manifest
from topics.walshard.copies import Copies


def write_manifest(folder: Path | str, **more: Any) -> None:
    """A Shard has no supervisor that would."""
    manifest = Manifest(format=1, layout=1, shards=1, **more)
    Path(folder, MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def newcomer(shard: Shard, **more: Any) -> Folder:
    return Folder(shard.settings.data_dir, now_ms=shard.clock.now_ms(), **more)


def named(folder: Folder, name: str) -> Topic:
    (topic,) = (topic for topic in folder.topics if topic.name == name)
    return topic


# --- everything that a folder shows ---


def _shown_batch(batch: Batch) -> tuple[Any, ...]:
    flags = None if batch.flags is None or DELETED not in batch.flags else bytes(batch.flags)
    return (
        batch.file,
        batch.wal,
        batch.salt,
        batch.offset,
        batch.length,
        batch.first,
        batch.count,
        batch.first_ts,
        batch.last_ts,
        batch.size,
        batch.tagged,
        flags,
    )


def _shown_topic(folder: Folder, topic: Topic) -> dict[str, Any]:
    return {
        "shard": topic.shard,
        "id": topic.id,
        "name": topic.name,
        "config": topic.config,
        "created_ms": topic.created_ms,
        "head_seq": topic.head_seq,
        "earliest_seq": topic.earliest_seq,
        "disk_seq": topic.disk_seq,
        "low": topic.low,
        "evict_floor": topic.evict_floor,
        "cap_seq": topic.cap_seq,
        "ttl_seq": topic.ttl_seq,
        "count": topic.count,
        "bytes": topic.bytes(folder.columns),
        "deleted_total": topic.deleted_total,
        "evicted_total": topic.evicted_total,
        "expired_total": topic.expired_total,
        "last_write_ms": topic.last_write_ms,
        "last_read_ms": topic.last_read_ms,
        "holes": topic.holes,
        "trims": topic.trims,
        "lost": topic.lost,
        "segments": [msgspec.structs.astuple(segment) for segment in topic.segments],
        "batches": [_shown_batch(batch) for batch in topic.batches],
    }


def shown(folder: Folder) -> dict[str, Any]:
    return {
        "shards": [
            (shard.number, shard.layout, shard.snapshot, shard.covered, shard.clean, shard.clock_ms, shard.torn)
            for shard in folder.shards
        ],
        "wals": [msgspec.structs.astuple(wal) for shard in folder.shards for wal in shard.wals],
        "topics": {topic.name: _shown_topic(folder, topic) for topic in folder.topics},
        "rules": folder.rules,
    }


def live_records(folder: Folder, topic: Topic) -> list[Stored]:
    """From the bytes on the disk."""
    found = []
    for batch in topic.select(1, topic.head_seq):
        wanted = set(batch.live_seqs(topic.low))
        if not wanted:
            continue
        columns = folder.columns(batch)
        fields = zip(columns.times(), columns.data(), columns.tags(), columns.nodes(), columns.metas(), strict=True)
        for seq, (ts, data, tag, node, meta) in enumerate(fields, batch.first):
            if seq in wanted:
                found.append(Stored(seq, ts, Record(data, tag, node, meta)))
    return found


# --- held against the shard ---


def check_same(onlooker: Folder, shard: Shard) -> Folder:
    """Whoever was there all the time sees what a newcomer sees."""
    now = shard.clock.now_ms()
    onlooker.look(now_ms=now)
    fresh = Folder(shard.settings.data_dir, now_ms=now)
    seen, expected = shown(onlooker), shown(fresh)
    assert seen["topics"].keys() == expected["topics"].keys()
    for name, topic in expected["topics"].items():
        for field, value in topic.items():
            assert seen["topics"][name][field] == value, f"{name}: {field}"
    assert seen == expected
    return fresh


def resident(shard: Shard, name: str) -> set[int]:
    """Seqs of records that are in memory only."""
    return {
        seq
        for row in shard.topic(name).rows
        if row.source is None or isinstance(row.source, Copies)
        for seq in range(row.first, row.last + 1)
    }


def check_truth(folder: Folder, shard: Shard, *, forgetful: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """What the folder shows is what the shard tells its clients. forgetful: topics of which some records were never
    on the disk; of those only the others can be seen."""
    assert {topic.name for topic in folder.topics} == set(shard.engine.topics)
    for name in shard.engine.topics:
        seen = named(folder, name)
        report = shard.report(name)
        unseen = resident(shard, name)
        expected = [stored for stored in shard.everything(name) if stored.seq not in unseen]
        assert live_records(folder, seen) == expected, name
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
        gone = seen.deleted_total + seen.evicted_total + seen.expired_total + seen.lost
        assert seen.head_seq == seen.count + gone, f"{name}: what was given out and what became of it"
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


def contents(folder: Path | str) -> dict[str, tuple[int, int, int, str]]:
    """Every file: mode, size, time of the last change, content. To see that nothing is written."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        state = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else os.fspath(path.name)
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_size, state.st_mtime_ns, content)
    return found
