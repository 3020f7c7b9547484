"""The segments that a snapshot names, as they are found: in the data folder, or in the cold tier.

What is missing or belongs to another topic is refused, with the file and what to do; while the cold tier is away the
shard waits for it. Of a sealed segment only its index
is read; an open one is scanned, as far as the snapshot says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from topics.errors import CorruptData, Unreachable
from topics.storage.format import DELETED
from topics.storage.paths import segment_name, topic_dir
from topics.storage.segment import BlockEntry, scan_blocks
from topics.storage.snapshot import TopicState
from topics.walshard.disk import Disk
from topics.walshard.rows import Row
from topics.walshard.segments import OpenFiles, Segment, read_header
from topics.walshard.tier import ColdTier
from topics.walshard.topic import Topic, record_sizes


class Loader:
    def __init__(self, data_dir: str, cold: ColdTier | None, *, disk: Disk, files: OpenFiles) -> None:
        self._data_dir = data_dir
        self._cold = cold  # where segments may be that are not in the data folder
        self._disk = disk
        self._files = files

    def load(self, topic: Topic, state: TopicState) -> None:
        """Give a topic its segments, their rows, and the head that follows from them."""
        topic.head_seq = 0
        for known in state.segments:
            segment = self._find_segment(state, known.first_seq)
            if segment.header.topic_id != state.id:
                raise CorruptData(f"{segment.path}: belongs to another topic")
            segment.flagged = known.flagged
            if known.sealed:
                blocks = self._sealed_blocks(segment)
            else:
                blocks = self._open_blocks(segment, known.data_bytes)
            topic.segments.append(segment)
            for entry in blocks:
                self._add_block(topic, segment, entry, flagged=known.flagged, floor=state.floor)
            segment.data_bytes = known.data_bytes
            if known.sealed:
                segment.seal()
        topic.head_seq = max(topic.head_seq, min(state.flushed_seq, state.head_seq))
        topic.next_seq = topic.head_seq + 1

    def _find_segment(self, state: TopicState, first_seq: int) -> Segment:
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
        self._require_cold(state)
        try:
            segment = Segment(path, read_header(cold, self._disk), self._files)
        except FileNotFoundError:
            self._require_cold(state)  # it may just have gone
            raise CorruptData(
                f"{cold}: this segment of topic {state.name!r} is missing in the cold tier, which is there, and so is "
                f"{path}: restore it from a backup, or let topics repair keep what is good"
            ) from None
        segment.path, segment.tier, segment.cold = cold, self._cold, True
        return segment

    def _require_cold(self, state: TopicState) -> None:
        if self._cold is not None and (away := self._cold.why_not()) is not None:
            raise Unreachable(
                f"{away}, and the shard goes on by itself. A segment of topic {state.name!r} is there, if not others"
            )

    def _sealed_blocks(self, segment: Segment) -> list[BlockEntry]:
        path = segment.index_path
        if not os.path.exists(path):
            raise CorruptData(f"{path}: the index of this segment is missing; restore it from a backup")
        return segment.index().blocks

    def _open_blocks(self, segment: Segment, data_bytes: int) -> list[BlockEntry]:
        with open(segment.path, "rb") as source:
            data = source.read(data_bytes)
        if len(data) < data_bytes:
            raise CorruptData(f"{segment.path}: {data_bytes} bytes expected, {len(data)} found")
        return [entry for entry, _ in scan_blocks(data, salt=segment.header.salt, path=segment.path)]

    def _add_block(self, topic: Topic, segment: Segment, entry: BlockEntry, *, flagged: bool, floor: int) -> None:
        row = segment.add_block(entry)
        row.skip = min(max(0, floor - row.first), row.count)
        if flagged:
            flags = segment.read_flags(entry)
            if DELETED in flags:
                row.flags = bytearray(flags)
        recount(row, topic.sizes_or_shares)
        topic.head_seq = max(topic.head_seq, row.last)
        if row.live:
            topic.rows.append(row)
            topic.add_live(row.live, row.size)
        else:
            segment.release(row)


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
