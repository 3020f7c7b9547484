"""The segments that a snapshot names, as they are found: in the data folder, or in the cold tier.

What is missing or belongs to another topic is refused, with the file and what to do. Of a sealed segment only its index
is read; an open one is scanned, as far as the snapshot says.

While the cold tier is away, a sealed segment that is not in the data folder is taken to be there: its index is hot, and
the snapshot has its delete flags. A snapshot that does not (an earlier program wrote it, or the segment left the data
folder before it, because a full disk had no room for another) does not tell what is deleted: then the shard waits for
the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from topics.errors import CorruptData, Unreachable
from topics.storage.format import DELETED
from topics.storage.paths import segment_name, topic_dir
from topics.storage.segment import BlockEntry, SegmentHeader, scan_blocks
from topics.storage.snapshot import ColdState, TopicState, join_flags, unpack_flags
from topics.walshard.log.disk import Disk
from topics.walshard.segments.segments import OpenFiles, Segment, read_header
from topics.walshard.tiering.tier import ColdTier
from topics.walshard.topic.index import Row
from topics.walshard.topic.topic import Topic, record_sizes


class Loader:
    def __init__(self, data_dir: str, cold: ColdTier | None, *, disk: Disk, files: OpenFiles) -> None:
        self._data_dir = data_dir
        self._cold = cold  # where segments may be that are not in the data folder
        self._disk = disk
        self._files = files
        self.away: str | None = None  # why segments that are in the cold tier have not been seen

    def load(self, topic: Topic, state: TopicState) -> None:
        """Give a topic its segments, their rows, and the head that follows from them."""
        topic.head_seq = 0
        noted = {cold.first_seq: cold for cold in state.cold}
        for known in state.segments:
            told = known.sealed and (not known.flagged or known.first_seq in noted)
            segment = self._find_segment(state, known.first_seq, told=told)
            if segment.header.topic_id != state.id:
                raise CorruptData(f"{segment.path}: belongs to another topic")
            segment.flagged = known.flagged
            if known.sealed:
                blocks = self._sealed_blocks(segment)
            else:
                blocks = self._open_blocks(segment, known.data_bytes)
            topic.segments.append(segment)
            deleted = _Deleted(noted.get(known.first_seq))
            for entry in blocks:
                self._add_block(topic, segment, entry, deleted, floor=state.floor)
            segment.data_bytes = known.data_bytes
            if known.sealed:
                segment.seal()
        topic.head_seq = max(topic.head_seq, min(state.flushed_seq, state.head_seq))
        topic.next_seq = topic.head_seq + 1

    def _find_segment(self, state: TopicState, first_seq: int, *, told: bool) -> Segment:
        """The hot file counts where both are: the copy may be without its latest delete flags."""
        path = os.path.join(topic_dir(self._data_dir, state.id), segment_name(first_seq))
        try:
            return Segment(path, read_header(path, self._disk), self._files)
        except FileNotFoundError:
            if self._cold is None:
                raise CorruptData(
                    f"{path}: this segment of topic {state.name!r} is missing; restore it from a backup"
                ) from None
        cold = os.path.join(topic_dir(self._cold.path, state.id), segment_name(first_seq))
        header = None
        if not self._is_away(state, told=told):
            try:
                header = read_header(cold, self._disk)
            except OSError as error:
                if not self._is_away(state, told=told):  # it may just have gone
                    if not isinstance(error, FileNotFoundError):
                        raise
                    raise CorruptData(
                        f"{cold}: this segment of topic {state.name!r} is missing in the cold tier, which is there, "
                        f"and so is {path}: restore it from a backup, or let topics repair keep what is good"
                    ) from None
        unseen = SegmentHeader(topic_id=state.id, first_seq=first_seq, created_ms=0, salt=0)
        segment = Segment(path, header or unseen, self._files)
        segment.path, segment.tier, segment.cold, segment.unseen = cold, self._cold, True, header is None
        return segment

    def _is_away(self, state: TopicState, *, told: bool) -> bool:
        assert self._cold is not None
        if (away := self._cold.why_not()) is None:
            return False
        if not told:
            raise Unreachable(
                f"{away}, and the shard goes on by itself. A segment of topic {state.name!r} is there, if not others, "
                "and nothing else tells which of its records are deleted"
            )
        self.away = away
        return True

    def _sealed_blocks(self, segment: Segment) -> list[BlockEntry]:
        path = segment.index_path
        if not os.path.exists(path):
            raise CorruptData(f"{path}: the index of this segment is missing; restore it from a backup")
        index = segment.index()
        if (index.topic_id, index.first_seq) != (segment.header.topic_id, segment.first_seq):
            raise CorruptData(f"{path}: this is the index of another segment; restore it from a backup")
        return index.blocks

    def _open_blocks(self, segment: Segment, data_bytes: int) -> list[BlockEntry]:
        with open(segment.path, "rb") as source:
            data = source.read(data_bytes)
        if len(data) < data_bytes:
            raise CorruptData(f"{segment.path}: {data_bytes} bytes expected, {len(data)} found")
        return [entry for entry, _ in scan_blocks(data, salt=segment.header.salt, path=segment.path)]

    def _add_block(self, topic: Topic, segment: Segment, entry: BlockEntry, deleted: _Deleted, *, floor: int) -> None:
        row = segment.add_block(entry)
        row.skip = min(max(0, floor - row.first), row.count)
        stored = bytearray(segment.read_flags(entry)) if segment.flagged and not segment.unseen else None
        known = deleted.flags(row)
        if known is None or stored is None:
            flags = known or stored
        else:
            flags = join_flags(known, stored)
        if flags is not None and DELETED in flags:
            row.flags = flags
            if known is not None and known != stored:
                segment.dirty.add(row)  # its file does not have them, or nobody can tell
        size = deleted.size(row)
        if size and row.flags == known:  # and the floor is of the same snapshot
            row.live, row.size = sum(1 for _ in row.live_indexes()), size
        else:
            recount(row, topic.sizes_or_shares)
        topic.head_seq = max(topic.head_seq, row.last)
        if row.live:
            topic.rows.append(row)
            topic.add_live(row.live, row.size)
        else:
            segment.release(row)


class _Deleted:
    """What a snapshot says of the blocks of a segment in the cold tier."""

    def __init__(self, state: ColdState | None) -> None:
        self._rows = {} if state is None else {first: (bits, size) for first, bits, size in state.rows}
        self._dead = frozenset(() if state is None else state.dead)

    def flags(self, row: Row) -> bytearray | None:
        if row.first in self._dead:
            return bytearray([DELETED]) * row.count
        bits, _ = self._rows.get(row.first, (b"", 0))
        return unpack_flags(bits, row.count) if bits else None

    def size(self, row: Row) -> int:
        """Of what is live; 0: it is not known."""
        return self._rows.get(row.first, (b"", 0))[1]


def recount(row: Row, sizes_of: Callable[[Row], Sequence[int]] = record_sizes) -> None:
    """What of a row is live, by its floor and its flags."""
    if row.skip == 0 and row.flags is None:
        return
    live = list(row.live_indexes())
    if live and len(live) < row.count:
        sizes = sizes_of(row)
        row.size = sum(sizes[index] for index in live)
    elif not live:
        row.size = 0
    row.live = len(live)
