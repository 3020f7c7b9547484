"""Where the space of a shard is, and what keeps it.

A segment goes as a whole, when none of its records is live any more. A log file goes when three things hold: a snapshot
covers its frames, no live record is read from it, and the files before it are gone. So one live record can keep a file;
this says which topics' records do, and what would let it go.

Bytes inside a block are shared out by records: what one of them takes exactly is not known without reading it.
"""

from __future__ import annotations

import os
import time

import msgspec

from topics.datadir.files import Files, Superseded
from topics.datadir.log import WalFile
from topics.datadir.view.shard import Shard
from topics.datadir.view.topic import Topic
from topics.errors import CorruptData
from topics.storage.format import DELETED
from topics.storage.paths import index_path, segment_name, topic_dir

_TRIES = 20
_PAUSE_S = 0.05
_TOLD = 3  # topics that keep a log file, by name


class SegmentSpace(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    topic: str
    tier: str
    sealed: bool
    first_seq: int
    last_seq: int
    disk_bytes: int  # with its index
    blocks: int
    records: int
    live: int
    deleted: int  # by clients
    dead: int  # taken by a cap or TTL, or behind what was deleted
    live_bytes: int
    deleted_bytes: int
    dead_bytes: int
    kept_by: str


class LogSpace(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    disk_bytes: int
    used_bytes: int
    first_lsn: int
    last_lsn: int
    records: int
    live: int  # that are read from here
    live_topics: int
    kept_by: str


class ShardSpace(msgspec.Struct, frozen=True, kw_only=True):
    shard: int
    layout: int
    snapshot: str | None
    snapshot_ms: int | None  # when it was written
    covered_lsn: int
    last_lsn: int
    clean: bool
    topics: int
    records: int
    torn: list[str]
    segments: list[SegmentSpace]
    logs: list[LogSpace]


def look_at(files: Files, number: int, *, now_ms: int) -> Shard:
    """One shard alone, so that damage in another does not stand in the way."""
    for _ in range(_TRIES):
        manifest = files.read_manifest()
        shard = Shard(files, number, layout=manifest.layout, shards=manifest.shards)
        try:
            shard.look()
        except Superseded:
            time.sleep(_PAUSE_S)
            continue
        for topic in shard.topics.values():
            topic.retain(now_ms=max(now_ms, shard.clock_ms), columns=files.columns)
        return shard
    raise CorruptData(f"{files.data_dir}: its files change faster than they can be read; try again")


def space_of(files: Files, shard: Shard) -> ShardSpace:
    segments = [space for topic in shard.topics.values() for space in segments_of(files, topic)]
    last = max((wal.last_lsn for wal in shard.wals), default=shard.covered)
    return ShardSpace(
        shard=shard.number,
        layout=shard.layout,
        snapshot=files.relative(shard.snapshot) if shard.snapshot else None,
        snapshot_ms=os.stat(shard.snapshot).st_mtime_ns // 1_000_000 if shard.snapshot else None,
        covered_lsn=shard.covered,
        last_lsn=max(last, shard.covered),
        clean=shard.clean,
        topics=sum(not topic.internal for topic in shard.topics.values()),
        records=sum(topic.count for topic in shard.topics.values()),
        torn=[f"{file} at offset {offset}" for file, offset in shard.torn],
        segments=segments,
        logs=_logs(files, shard),
    )


def segments_of(files: Files, topic: Topic) -> list[SegmentSpace]:
    home = files.relative(topic_dir(files.data_dir, topic.id))
    found = []
    for known in topic.segments:
        file = os.path.join(home, segment_name(known.first_seq))
        batches = [batch for batch in topic.batches if batch.file == file]
        counts = {"live": 0, "deleted": 0, "dead": 0}
        sizes = {"live": 0.0, "deleted": 0.0, "dead": 0.0}
        for batch in batches:
            live = batch.live(topic.low)
            deleted = batch.flags.count(DELETED) if batch.flags is not None else 0
            shares = {"live": live, "deleted": deleted, "dead": batch.count - live - deleted}
            for name, count in shares.items():
                counts[name] += count
                sizes[name] += batch.length * count / batch.count
        tier, _, size = files.find(file)
        if known.sealed:
            size += files.find(index_path(file))[2]
        found.append(
            SegmentSpace(
                file=file,
                topic=topic.name,
                tier=tier,
                sealed=known.sealed,
                first_seq=known.first_seq,
                last_seq=known.last_seq,
                disk_bytes=size,
                blocks=len(batches),
                records=sum(batch.count for batch in batches),
                live=counts["live"],
                deleted=counts["deleted"],
                dead=counts["dead"],
                live_bytes=round(sizes["live"]),
                deleted_bytes=round(sizes["deleted"]),
                dead_bytes=round(sizes["dead"]),
                kept_by=_keeps_segment(counts["live"], sum(counts.values()), topic),
            )
        )
    return found


def _keeps_segment(live: int, records: int, topic: Topic) -> str:
    if not live:
        return "nothing: it goes with the next snapshot"
    if live == records:
        return "all its records are live"
    config = topic.config
    ways = ["deleting them"]
    if config.ttl_ms:
        ways.append("their TTL")
    if (config.cap_records or config.cap_bytes) and config.discard == "old":
        ways.append("newer records, by the cap")
    return f"{live:,} of {records:,} records are live; {' or '.join(ways)} frees all of it"


def _logs(files: Files, shard: Shard) -> list[LogSpace]:
    pins: dict[str, dict[str, int]] = {}
    for topic in shard.topics.values():
        for batch in topic.batches:
            if batch.wal and (live := batch.live(topic.low)):
                of_file = pins.setdefault(batch.file, {})
                of_file[topic.name] = of_file.get(topic.name, 0) + live
    found: list[LogSpace] = []
    kept_before: str | None = None
    for wal in shard.wals:
        pinned = pins.get(wal.file, {})
        last = wal is shard.wals[-1]
        why = _keeps_log(wal, pinned, covered=shard.covered, last=last, kept_before=kept_before)
        if kept_before is None:
            kept_before = os.path.basename(wal.file)
        found.append(
            LogSpace(
                file=wal.file,
                disk_bytes=files.find(wal.file)[2],
                used_bytes=wal.end,
                first_lsn=wal.first_lsn,
                last_lsn=wal.last_lsn,
                records=wal.records,
                live=sum(pinned.values()),
                live_topics=len(pinned),
                kept_by=why,
            )
        )
    return found


def _keeps_log(wal: WalFile, pinned: dict[str, int], *, covered: int, last: bool, kept_before: str | None) -> str:
    if last:
        return "the log goes on here"
    if pinned:
        most = sorted(pinned.items(), key=lambda item: -item[1])
        names = ", ".join(f"{name} ({count:,})" for name, count in most[:_TOLD])
        more = f" and {len(most) - _TOLD:,} more topics" if len(most) > _TOLD else ""
        return (
            f"live records are read from here: {names}{more}. They move to segments when a topic has enough of them "
            "or they are old enough (TOPICS_SEGMENT_MAX_EVENTS, _BYTES, _AGE_MS), or when the log gets long"
        )
    if wal.last_lsn > covered:
        return f"no snapshot covers its frames yet (the last one ends with {covered}); the next one does"
    if kept_before is not None:
        return f"only by {kept_before} before it: files go oldest first"
    return "nothing: it goes with the next snapshot"
