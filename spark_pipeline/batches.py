"""Slices of topics as Arrow record batches. Runs in the executors; needs pyarrow and the files, no Spark.

Nothing here is done per record in Python: data values are split, times unrolled and deleted records dropped by Arrow, a
group of blocks at a time. Only tags, nodes and meta, which are JSON on the disk, are decoded one by one, and only where
a query wants them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from itertools import accumulate, chain

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from spark_pipeline.plan import MIB, DataLoss, Piece, Slice, Wanted, slices
from spark_pipeline.plan import Range as SeqRange
from topics.datadir.files import Files
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.errors import CorruptData, TopicsError
from topics.storage.columns import Columns
from topics.storage.format import DELETED, RECORD_SEPARATOR, aligned
from topics.storage.frames import Frame, decode_frame

ARROW = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_READ_BYTES = 8 * MIB  # one read from a file
_SKIP_BYTES = 64 * 1024  # a gap between two batches that is read rather than jumped over
_GROUP_ROWS = 65_536
_GROUP_BYTES = 16 * MIB
_TRIES = 3  # to find files that are there; a server replaces them every few seconds at most


class Loaded(msgspec.Struct):
    """A batch in memory."""

    first: int
    columns: Columns
    flags: bytes | None  # None: nothing is deleted

    @property
    def last(self) -> int:
        return self.first + self.columns.count - 1


class Reading(msgspec.Struct, frozen=True):
    """What a query wants of each record; the same for all its tasks."""

    data_dir: str
    cold_dir: str | None
    columns: list[tuple[str, str]]
    wanted: Wanted
    deleted: bool
    fail_on_loss: bool
    drops_are_loss: bool = True  # a topic that is deleted while it is read; to a stream that is no loss

    def read(self, parts: list[Slice]) -> Iterator[pa.RecordBatch]:
        """Record batches of these slices, in order."""
        files = Files(self.data_dir, cold_dir=self.cold_dir)
        for part in parts:
            at = part.first
            try:
                for last, batch in self._batches(files, part):
                    at = last + 1
                    if batch.num_rows:
                        yield batch
            except FileNotFoundError:
                # From the next batch that is wanted on: what lies before it may go as it likes.
                following = next(piece.first for piece in part.pieces if piece.last >= at)
                yield from self._read_again(part, max(at, following))

    def _batches(self, files: Files, part: Slice) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(up to which seq, the records)"""
        for group in _groups(_read_pieces(files, part)):
            yield group[-1].last, self._arrow(part, group)

    def _read_again(self, part: Slice, at: int) -> Iterator[pa.RecordBatch]:
        """The rest of a slice whose files went since it was planned: its seqs are looked up anew."""
        for _ in range(_TRIES):
            folder = Folder(self.data_dir, cold_dir=self.cold_dir)
            topic = folder.topic(part.topic_id)
            if topic is None:
                if self.drops_are_loss:
                    self._lost(part.topic, at, part.last, "the topic was deleted while it was read")
                return
            self._check_loss(part, topic, at)
            again = slices([SeqRange(topic, at, part.last)], self.wanted, deleted=self.deleted)
            try:
                for each in again:
                    for last, batch in self._batches(folder.files, each):
                        at = last + 1
                        if batch.num_rows:
                            yield batch
                return
            except FileNotFoundError:
                continue
        raise TopicsError(f"topic {part.topic}: its files change faster than they can be read; try again")

    def _check_loss(self, part: Slice, topic: Topic, at: int) -> None:
        while (gap := topic.find_gap(at, part.last)) is not None:
            self._lost(part.topic, gap[0], gap[1], f"reason: {gap[2]}, while they were read")
            at = gap[1] + 1

    def _lost(self, topic: str, first: int, last: int, why: str) -> None:
        text = f"topic {topic}: records {first} to {last} are gone ({why})"
        if self.fail_on_loss:
            raise DataLoss(f"{text}. Set failOnDataLoss to false to go on without them")
        warnings.warn(text, stacklevel=2)

    # --- from batches to columns ---

    def _arrow(self, part: Slice, group: list[Loaded]) -> pa.RecordBatch:
        schema = pa.schema([(name, ARROW[kind]) for name, kind in self.columns])
        rows = sum(loaded.columns.count for loaded in group)
        mask = self._mask(part, group)
        arrays = [self._column(name, part, group, rows) for name, _ in self.columns]
        # A query that wants no column at all (a count) still has to learn how many rows there are.
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema) if arrays else pa.record_batch({"": pa.nulls(rows)})
        return batch if mask is None else batch.filter(mask)

    def _mask(self, part: Slice, group: list[Loaded]) -> pa.Array | None:
        masks = []
        wanted = self.wanted
        start = max(part.first, 1) if self.deleted else max(part.first, part.low)
        if group[0].first < start or group[-1].last > part.last:
            seqs = _seqs(group)
            masks.append(pc.and_(pc.greater_equal(seqs, start), pc.less_equal(seqs, part.last)))
        if any(loaded.flags is not None for loaded in group):
            flags = _flags(group)
            if not self.deleted:
                masks.append(pc.invert(flags))
            elif group[0].first < part.low:
                masks.append(pc.or_(flags, pc.greater_equal(_seqs(group), part.low)))
        elif self.deleted and group[0].first < part.low:
            masks.append(pc.greater_equal(_seqs(group), part.low))
        if wanted.start_ms is not None:
            masks.append(pc.greater_equal(_times(group), wanted.start_ms * 1_000))
        if wanted.end_ms is not None:
            masks.append(pc.less(_times(group), wanted.end_ms * 1_000))
        if not masks:
            return None
        whole = masks[0]
        for mask in masks[1:]:
            whole = pc.and_(whole, mask)
        return whole

    def _column(self, name: str, part: Slice, group: list[Loaded], rows: int) -> pa.Array:
        if name == "topic":
            return pa.repeat(pa.scalar(part.topic, pa.string()), rows)
        if name == "partition":
            return pa.repeat(pa.scalar(0, pa.int32()), rows)
        if name == "shard":
            return pa.repeat(pa.scalar(part.shard, pa.int32()), rows)
        if name == "offset":
            return _seqs(group)
        if name == "timestamp":
            return _times(group).cast(ARROW["timestamp"])
        if name == "key":
            return _tags(group)
        if name == "value":
            return _values(group, part)
        if name == "size":
            return pc.binary_length(_values(group, part))
        if name == "deleted":
            return _flags(group)
        if name == "node":
            return _strings([loaded.columns.nodes() for loaded in group])
        if name == "meta":
            return _strings([loaded.columns.metas() for loaded in group])
        raise TopicsError(f"records have no column {name}")


def _read_pieces(files: Files, part: Slice) -> Iterator[Loaded]:
    """Neighbours in a file come with one read."""
    at = 0
    pieces = part.pieces
    while at < len(pieces):
        run = _run(pieces, at)
        start = pieces[at].offset
        stop = max(_end(piece) for piece in pieces[at : at + run])
        with files.opened(pieces[at].file) as fd:
            data = os.pread(fd, stop - start, start)
        for piece in pieces[at : at + run]:
            yield _decode(piece, data, piece.offset - start)
        at += run


def _run(pieces: list[Piece], at: int) -> int:
    """How many pieces from here on are read together."""
    first = pieces[at]
    count = 1
    for piece in pieces[at + 1 :]:
        gap = piece.offset - _end(pieces[at + count - 1])
        if piece.file != first.file or not 0 <= gap <= _SKIP_BYTES or _end(piece) - first.offset > _READ_BYTES:
            break
        count += 1
    return count


def _end(piece: Piece) -> int:
    return piece.offset + piece.length + (0 if piece.wal else aligned(piece.count))


def _decode(piece: Piece, data: bytes, at: int) -> Loaded:
    frame: Frame | None = decode_frame(data, at, salt=piece.salt)
    if frame is None or frame.first_seq != piece.first or frame.count != piece.count:
        raise CorruptData(f"{piece.file}: checksum of the batch at offset {piece.offset} fails")
    flags = piece.flags
    if not piece.wal:
        on_disk = data[at + piece.length : at + piece.length + piece.count]
        if DELETED in on_disk:
            flags = on_disk if flags is None else bytes(map(max, *(_deleted(each) for each in (flags, on_disk))))
    return Loaded(piece.first, Columns(frame.body, count=frame.count, ts=frame.ts), flags)


_ONLY_DELETED = bytes(DELETED if value == DELETED else 0 for value in range(256))


def _deleted(flags: bytes) -> bytes:
    return flags.translate(_ONLY_DELETED)


def _groups(batches: Iterator[Loaded]) -> Iterator[list[Loaded]]:
    """As many batches as make one Arrow batch."""
    group: list[Loaded] = []
    rows = size = 0
    try:
        for loaded in batches:
            group.append(loaded)
            rows += loaded.columns.count
            size += loaded.columns.data_bytes
            if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
                yield group
                group, rows, size = [], 0, 0
    except FileNotFoundError:
        if group:
            yield group  # what was read of files that have gone meanwhile is nowhere else
        raise
    if group:
        yield group


def _seqs(group: list[Loaded]) -> pa.Array:
    runs: list[list[int]] = []
    for loaded in group:
        if runs and runs[-1][1] == loaded.first:
            runs[-1][1] = loaded.last + 1
        else:
            runs.append([loaded.first, loaded.last + 1])
    found = [pa.arange(first, stop) for first, stop in runs]
    return found[0] if len(found) == 1 else pa.concat_arrays(found)


def _times(group: list[Loaded]) -> pa.Array:
    """In microseconds."""
    runs = list(chain.from_iterable(loaded.columns.runs() for loaded in group))
    ends = pa.array(list(accumulate(count for count, _ in runs)), pa.int32())
    values = pa.array([ts * 1_000 for _, ts in runs], pa.int64())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, values))


def _values(group: list[Loaded], part: Slice) -> pa.Array:
    joined = pa.array([RECORD_SEPARATOR.join([loaded.columns.joined for loaded in group])], pa.binary())
    values = pc.split_pattern(joined, pattern=RECORD_SEPARATOR).values
    if len(values) != sum(loaded.columns.count for loaded in group):
        for loaded in group:
            loaded.columns.data()  # raises for the batch whose number of values is wrong
        raise CorruptData(f"topic {part.topic}: records {group[0].first} to {group[-1].last} can't be told apart")
    return values


def _flags(group: list[Loaded]) -> pa.Array:
    """Whether each record is deleted."""
    joined = b"".join([bytes(loaded.columns.count) if loaded.flags is None else loaded.flags for loaded in group])
    flags = pa.Array.from_buffers(pa.uint8(), len(joined), [None, pa.py_buffer(joined)])
    return pc.equal(flags, pa.scalar(DELETED, pa.uint8()))


def _tags(group: list[Loaded]) -> pa.Array:
    return _strings([loaded.columns.tags() for loaded in group])


def _strings(parts: list[list[str | None]] | list[list[bytes | None]]) -> pa.Array:
    return pa.array(list(chain.from_iterable(parts)), pa.string())
