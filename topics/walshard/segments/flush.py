"""A flush of one topic: which rows of its tail become which blocks, and how they are built and written.

Planned on the loop, written on the mover's thread. Until the mover has taken the result in, nothing names these blocks:
a crash leaves them behind, and they are written again.
"""

from __future__ import annotations

import os
from typing import NamedTuple, TypedDict

from topics import limits
from topics.errors import DiskFull
from topics.settings import Settings
from topics.storage.columns import NO_TIMES, Columns, coalesce, coalesce_plain, measure
from topics.storage.format import frame_bytes
from topics.storage.paths import segment_name, topic_dir
from topics.storage.segment import BlockEntry, SegmentHeader, encode_block, encode_block_around
from topics.walshard.forwards.copies import Copies
from topics.walshard.log.disk import Disk, kill_point
from topics.walshard.log.wal import WalFile
from topics.walshard.segments.segments import OpenFiles, Segment
from topics.walshard.topic.index import Row
from topics.walshard.topic.topic import Topic


class Block(NamedTuple):
    """Planned: neighbouring rows that become one block."""

    segment: Segment
    rows: list[Row]
    seals: bool  # the last block of its segment


class Moved(NamedTuple):
    block: Block
    entry: BlockEntry
    flags: bytes | None


class _Head(TypedDict):
    salt: int
    topic_id: int
    first_seq: int
    count: int
    first_ts: int
    last_ts: int
    size: int
    flags: bytes | None


class Flush:
    def __init__(self, disk: Disk, files: OpenFiles, *, settings: Settings) -> None:
        self._disk = disk
        self._files = files
        self._settings = settings

    def plan(self, topic: Topic, *, now_ms: int) -> list[Block]:
        """On the loop: which rows become which blocks of which segments."""
        settings = self._settings
        groups: list[list[Row]] = []
        records = size = 0
        following = -1
        for row in topic.rows.since(topic.rows.position(topic.flushed_seq + 1)):
            if row.live == 0 or not isinstance(row.source, WalFile | Copies):
                continue
            if isinstance(row.source, Copies) and row.body is None:
                break  # it is filled later, and segments are in seq order
            if (
                not groups
                or row.first != following
                or records + row.count > limits.BLOCK_RECORDS
                or size + row.length > limits.BLOCK_BYTES
            ):
                groups.append([])
                records = size = 0
            groups[-1].append(row)
            records += row.count
            size += row.length
            following = row.last + 1
        blocks: list[Block] = []
        segment = topic.segments[-1] if topic.segments and not topic.segments[-1].sealed else None
        filled = segment.records if segment else 0
        written = segment.data_bytes if segment else 0
        for group in groups:
            if segment is None:
                segment = self._new_segment(topic, group[0].first, now_ms)
                filled = written = 0
            filled += sum(row.count for row in group)
            written += sum(row.length for row in group)
            seals = filled >= settings.segment_max_events or written >= settings.segment_max_bytes
            blocks.append(Block(segment, group, seals))
            if seals:
                segment = None
        return blocks

    def _new_segment(self, topic: Topic, first_seq: int, now_ms: int) -> Segment:
        header = SegmentHeader(
            topic_id=topic.id,
            first_seq=first_seq,
            created_ms=now_ms,
            salt=int.from_bytes(os.urandom(4), "little") | 1,
        )
        path = os.path.join(topic_dir(self._settings.data_dir, topic.id), segment_name(first_seq))
        return Segment(path, header, self._files)

    def write(self, topic: Topic, blocks: list[Block]) -> list[Moved]:
        """On the thread: build and write every block, sync each file, write the index of those that end.
        All or nothing: what finds no space gives back what it took."""
        try:
            return self._write(topic, blocks)
        except DiskFull:
            for segment in {block.segment: None for block in blocks}:
                self._disk.unlink(segment.index_path)
                if segment.records:
                    self._disk.truncate(segment.path, segment.data_bytes)
                else:
                    self._disk.unlink(segment.path)
            raise

    def _write(self, topic: Topic, blocks: list[Block]) -> list[Moved]:
        moved: list[Moved] = []
        at = 0
        while at < len(blocks):
            segment = blocks[at].segment
            mine = [block for block in blocks[at:] if block.segment is segment]
            at += len(mine)
            offset = segment.data_bytes
            if segment.records:
                fd = self._disk.open(segment.path, write=True)
            else:
                self._disk.make_dir(os.path.dirname(segment.path))
                fd = self._disk.create(segment.path)
            entries = list(segment.blocks)
            try:
                if not segment.records:
                    self._disk.write(fd, segment.header.encode(), 0)
                for block in mine:
                    pieces, entry, flags = _encode(topic, block, offset)
                    for piece in pieces:
                        self._disk.write(fd, piece, offset)
                        offset += len(piece)
                    assert offset == entry.end
                    entries.append(entry)
                    moved.append(Moved(block, entry, flags))
                self._disk.sync(fd)
            finally:
                self._disk.close(fd)
            kill_point("flushed")
            if mine[-1].seals:
                self._disk.write_whole(segment.index_path, segment.encode_index(entries))
        return moved


def _encode(topic: Topic, block: Block, offset: int) -> tuple[list[bytes], BlockEntry, bytes | None]:
    """The bytes of a block. A large one is the body of one row: it is not copied, because while this thread does that
    the loop has to wait."""
    rows = block.rows
    bodies = []
    for row in rows:
        body = row.body  # the loop may let go of it meanwhile
        bodies.append(row.load() if body is None else body)
    counts = [row.count for row in rows]
    count = sum(counts)
    flags = None
    if any(row.flags is not None for row in rows):
        flags = b"".join(bytes(row.flags or bytes(row.count)) for row in rows)
    times = [row.first_ts for row in rows]
    large = len(rows) == 1 and len(bodies[0]) > limits.PLACED_BYTES and bodies[0].startswith(NO_TIMES)
    if large:
        merged = bodies[0]
        size, tagged = measure(merged, count=count)
    else:
        merged = _merge(bodies, counts, times)
        columns = Columns(merged, count=count, ts=times[0])
        size, tagged = columns.size, columns.has_tags
    head = _Head(
        salt=block.segment.header.salt,
        topic_id=topic.id,
        first_seq=rows[0].first,
        count=count,
        first_ts=rows[0].first_ts,
        last_ts=rows[-1].last_ts,
        size=size,
        flags=flags,
    )
    if large:
        before, behind = encode_block_around(merged, **head)
        pieces = [before, merged, behind]
    else:
        pieces = [encode_block(merged, **head)]
    entry = BlockEntry(
        first_seq=rows[0].first,
        count=count,
        offset=offset,
        length=frame_bytes(key_len=0, body_len=len(merged)),
        first_ts=rows[0].first_ts,
        last_ts=rows[-1].last_ts,
        bytes=size,
        tagged=tagged,
    )
    return pieces, entry, flags


def _merge(bodies: list[bytes], counts: list[int], times: list[int]) -> bytes:
    merged = coalesce_plain(bodies, counts, times)
    if merged is None:
        merged = coalesce(
            [Columns(body, count=count, ts=ts) for body, count, ts in zip(bodies, counts, times, strict=True)]
        )
    return merged
