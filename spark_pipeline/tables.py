"""The views that are not records: topics, segments, leases, tombstones, routers. Rows in the order of schemas.py.

All but `leases` come from metadata alone and are small: one task makes them, from one look at the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from topics.datadir.batch import Batch
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.errors import TopicsError
from topics.storage.leases import LeaseEvent, decode_event
from topics.storage.paths import segment_name, topic_dir

Row = tuple[Any, ...]
_STATES = {1: "leased", 2: "expired", 3: "free", 4: "delayed"}


def moment(ms: int | None) -> datetime | None:
    return None if not ms else datetime.fromtimestamp(ms / 1_000, UTC)


def rows(view: str, folder: Folder, wants: Callable[[str], bool]) -> Iterator[Row]:
    if view == "topics":
        return topics(folder, wants)
    if view == "segments":
        return segments(folder, wants)
    if view == "tombstones":
        return tombstones(folder, wants)
    if view == "routers":
        return routers(folder, wants)
    raise TopicsError(f"view {view} is no table")


def topics(folder: Folder, wants: Callable[[str], bool]) -> Iterator[Row]:
    names = {topic.id: topic.name for topic in folder.topics}
    for topic in folder.topics:
        if not wants(topic.name):
            continue
        config = topic.config
        yield (
            topic.name,
            f"{topic.id:016x}",
            topic.shard,
            config.type,
            topic.internal,
            config.durability,
            msgspec.json.encode(config).decode(),
            moment(topic.created_ms),
            topic.head_seq,
            topic.disk_seq,
            topic.earliest_seq,
            topic.evict_floor,
            topic.count,
            topic.bytes(folder.columns),
            topic.deleted_total,
            topic.evicted_total - topic.lost_total,
            topic.expired_total,
            topic.lost,
            topic.trimmed,
            topic.skipped_total,
            topic.unsettled,
            moment(topic.last_write_ms),
            moment(topic.last_read_ms),
            len(topic.segments),
            None if topic.pipe is None else names.get(topic.pipe.source_id),
        )


def segments(folder: Folder, wants: Callable[[str], bool]) -> Iterator[Row]:
    for topic in folder.topics:
        if not wants(topic.name):
            continue
        by_file: dict[str, list[Batch]] = {}
        for batch in topic.batches:
            if not batch.wal:
                by_file.setdefault(batch.file, []).append(batch)
        for known in topic.segments:
            path = os.path.join(topic_dir(folder.files.data_dir, topic.id), segment_name(known.first_seq))
            file = folder.files.relative(path)
            yield _segment(folder, topic, file, known.sealed, by_file.get(file, []))
    for shard in folder.shards:
        live = [batch for topic in shard.topics.values() for batch in topic.batches if batch.wal]
        lives: dict[str, int] = {}
        for topic in shard.topics.values():
            for batch in topic.batches:
                if batch.wal:
                    lives[batch.file] = lives.get(batch.file, 0) + batch.live(topic.low)
        for wal in shard.wals:
            tier, _, taken = folder.files.find(wal.file)
            mine = [batch for batch in live if batch.file == wal.file]
            yield (
                shard.number,
                None,
                "wal",
                tier,
                wal.file,
                None,
                None,
                wal is not shard.wals[-1],
                taken,
                wal.records,
                lives.get(wal.file, 0),
                None,
                None,
                None,
                sum(batch.size for batch in mine),
                moment(min((batch.first_ts for batch in mine), default=None)),
                moment(max((batch.last_ts for batch in mine), default=None)),
            )


def _segment(folder: Folder, topic: Topic, file: str, sealed: bool, batches: list[Batch]) -> Row:
    tier, _, taken = folder.files.find(file)
    low = topic.low
    records = sum(batch.count for batch in batches)
    live = sum(batch.live(low) for batch in batches)
    deleted = records - sum(batch.live(0) for batch in batches)
    return (
        topic.shard,
        topic.name,
        "segment",
        tier,
        file,
        batches[0].first if batches else None,
        batches[-1].last if batches else None,
        sealed,
        taken,
        records,
        live,
        deleted,
        records - live - deleted,
        sum(topic.live_bytes(batch, folder.columns) for batch in batches),
        sum(batch.size for batch in batches),
        moment(batches[0].first_ts if batches else None),
        moment(batches[-1].last_ts if batches else None),
    )


def tombstones(folder: Folder, wants: Callable[[str], bool]) -> Iterator[Row]:
    for topic in folder.topics:
        if not wants(topic.name):
            continue
        if topic.evict_floor > 1:
            lost = topic.evicted_total + topic.expired_total
            yield (topic.name, topic.shard, topic.eviction_reason(), 1, topic.evict_floor - 1, lost)
        for first, last in topic.holes:
            if last >= topic.evict_floor:
                first = max(first, topic.evict_floor)
                yield (topic.name, topic.shard, "lost", first, last, last - first + 1)
        for first, last in topic.trims:
            yield (topic.name, topic.shard, "source_trim", first, last, last - first + 1)


def routers(folder: Folder, wants: Callable[[str], bool]) -> Iterator[Row]:
    """A router counts as one of its source and of its destination."""
    for rule in folder.rules:
        if not (wants(rule.source) or wants(rule.dest)):
            continue
        source, dest = folder.topic(rule.source_id), folder.topic(rule.dest_id)
        pipe = None if dest is None or dest.pipe is None else dest.pipe
        if pipe is not None and pipe.source_id != rule.source_id:
            pipe = None
        head = None if source is None else source.head_seq
        copied_to = rule.since if pipe is None else max(pipe.at, rule.since)
        yield (
            rule.router,
            rule.source,
            rule.dest,
            None if dest is None else dest.shard,
            rule.guarantee,
            None if rule.filter is None else msgspec.json.encode(rule.filter).decode(),
            rule.preserve_node,
            rule.preserve_tag,
            rule.allow_cycle,
            moment(rule.created_ms),
            rule.since,
            head,
            copied_to,
            None if head is None else max(0, head - copied_to),
            0 if pipe is None else pipe.forwarded.get(rule.router, 0),
        )


def leases(queue: str, shard: int, seq: int, ts_ms: int, data: bytes) -> Iterator[Row]:
    """One record of a leases log: a row for each job that the event is about."""
    event: LeaseEvent = decode_event(data)
    head = (queue, shard, seq, moment(ts_ms), event.event)
    if event.event == "checkpoint":
        for job in event.jobs:
            lease, state = _lease(job.lease), _STATES.get(job.state)
            deadline = moment(job.deadline)
            yield (*head, job.node, job.seq, lease, job.deliveries, deadline, bool(job.stream), None, state)
        return
    for at, job_seq in enumerate(event.seqs):
        deliveries = None
        if event.event == "claimed":
            deliveries = event.deliveries[at] if at < len(event.deliveries) else 1
        yield (
            *head,
            event.node,
            job_seq,
            _lease(event.leases[at]) if at < len(event.leases) else None,
            deliveries,
            moment(event.deadline),
            bool(event.stream),
            event.reason or None,
            None,
        )


def _lease(number: int) -> str:
    return f"lease_{number:x}"
