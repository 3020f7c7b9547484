"""One shard of a data folder: its newest snapshot, the segments that names, and its log as far as it reaches.

The log may go on while we look; the next look goes on where this one stopped. A new snapshot makes the files of the old
one go, so everything is read again then; whoever finds a file missing in between starts over, too.
"""

from __future__ import annotations

import os
import struct

import msgspec

from topics.datadir.batch import Batch
from topics.datadir.files import Files, Superseded, reading
from topics.datadir.log import Log, Placed, WalFile
from topics.datadir.view.topic import Topic
from topics.errors import CorruptData, FormatError
from topics.storage.columns import Columns
from topics.storage.config import owner_of_id
from topics.storage.control import DeleteFrame, HeadFrame, TopicFrame, decode_copies
from topics.storage.format import DELETED, FILE_HEADER_BYTES, RECORD_OVERHEAD, FrameType
from topics.storage.frames import Frame
from topics.storage.paths import (
    index_path,
    parse_numbered,
    parse_topic_dir,
    segment_name,
    shard_dir,
    topic_dir,
    topics_dir,
)
from topics.storage.segment import BlockEntry, decode_segment_header, scan_blocks
from topics.storage.snapshot import (
    ColdState,
    SegmentState,
    TopicState,
    decode_snapshot,
    decode_topic,
    join_flags,
    unpack_flags,
)

_LENGTHS = struct.Struct("<4I")
_APPEND = int(FrameType.APPEND)
_decode_topic_frame = msgspec.msgpack.Decoder(TopicFrame).decode
_decode_head_frame = msgspec.msgpack.Decoder(HeadFrame).decode
_decode_delete_frame = msgspec.msgpack.Decoder(DeleteFrame).decode


class Shard:
    def __init__(self, files: Files, number: int, *, layout: int, shards: int) -> None:
        self.number = number
        self.layout = layout
        self.topics: dict[int, Topic] = {}
        self.dropped: list[Topic] = []  # since the snapshot, which names their segments: whoever reads it wants them
        self.snapshot: str | None = None  # the file
        self.covered = 0  # its last frame
        self.clean = False
        self.clock_ms = 0
        self._shards = shards
        self._files = files
        self._folder = shard_dir(files.data_dir, number)
        self._log = Log(files, shard=number)
        self._file_no = 0  # of the WAL file that was written when the snapshot was made

    @property
    def wals(self) -> list[WalFile]:
        return self._log.wals

    @property
    def torn(self) -> list[tuple[str, int]]:
        """(file, offset): bytes behind the log that are no frames."""
        return self._log.torn

    def look(self) -> None:
        """Read what is there, or what has come since the last look. Raises Superseded where one has to start over."""
        for topic in self.topics.values():
            topic.resume()
        snapshots, wals = self._list()
        newest = snapshots[-1] if snapshots else None
        try:
            if not self.wals and self.snapshot is None and newest is not None:
                self._load(newest)
            elif newest != self.snapshot:
                raise Superseded
            for placed in self._log.follow(wals, covered=self.covered, file_no=self._file_no):
                self._apply(placed)
            if newest is None and not self._log.last_lsn:
                self._refuse_if_topics_exist()
        except FileNotFoundError as exc:
            if self._newest() != newest:
                raise Superseded from None
            raise self._files.lost(exc) from None
        if self._newest() != newest:
            raise Superseded

    def _newest(self) -> str | None:
        snapshots, _ = self._list()
        return snapshots[-1] if snapshots else None

    def _list(self) -> tuple[list[str], list[str]]:
        """(snapshots, WAL files) of the layout, oldest first."""
        try:
            with reading(self._folder):
                names = os.listdir(self._folder)
        except FileNotFoundError:
            return [], []
        found: dict[str, list[tuple[int, str]]] = {"snap": [], "wal": []}
        for name in names:
            parsed = parse_numbered(name)
            if parsed is not None and parsed[0] == self.layout:
                found[parsed[2]].append((parsed[1], os.path.join(self._folder, name)))
        return [path for _, path in sorted(found["snap"])], [path for _, path in sorted(found["wal"])]

    def _refuse_if_topics_exist(self) -> None:
        """Neither snapshot nor frames: a new shard, unless there are topics that only they could explain."""
        root = topics_dir(self._files.data_dir)
        with reading(root):
            names = os.listdir(root) if os.path.isdir(root) else []
        for name in names:
            if (topic_id := parse_topic_dir(name)) is not None and owner_of_id(topic_id, self._shards) == self.number:
                raise CorruptData(
                    f"{self._folder}: holds neither a snapshot nor a log, but {os.path.join(root, name)} belongs to "
                    "this shard. Restore the folder from a backup"
                )

    # --- snapshot and segments ---

    def _load(self, path: str) -> None:
        name = self._files.relative(path)
        with reading(name), open(path, "rb") as source:
            state = decode_snapshot(source.read(), path=name)
            topics = [decode_topic(raw) for raw in state.topics]
        if (state.shard, state.layout) != (self.number, self.layout):
            raise CorruptData(
                f"{name}: this is a snapshot of layout {state.layout}, shard {state.shard}, under another name. Put it "
                "back to where it belongs"
            )
        self.snapshot = path
        self.covered = state.lsn
        self.clean = state.clean
        self.clock_ms = state.clock_ms
        self._file_no = state.file_no
        for topic in topics:
            self._load_topic(topic)

    def _load_topic(self, state: TopicState) -> None:
        topic = Topic.restored(state, shard=self.number)
        self.topics[state.id] = topic
        cold = {noted.first_seq: noted for noted in state.cold}
        for known in state.segments:
            noted = cold.get(known.first_seq)
            for batch in self._load_segment(state.id, known):
                if noted is not None:
                    _add_flags(batch, noted)
                topic.add(batch)

    def _load_segment(self, topic_id: int, known: SegmentState) -> list[Batch]:
        file = os.path.join(topic_dir("", topic_id), segment_name(known.first_seq))
        with self._files.opened(file) as fd:
            header = decode_segment_header(os.pread(fd, FILE_HEADER_BYTES, 0), path=file)
            if (header.topic_id, header.first_seq) != (topic_id, known.first_seq):
                raise CorruptData(f"{file}: belongs to another topic, or to another place in this one")
            if (size := os.fstat(fd).st_size) < known.data_bytes:
                raise CorruptData(f"{file}: ends at offset {size}; {known.data_bytes} bytes expected")
            if known.sealed:
                blocks = self._sealed_blocks(file, topic_id, known)
            else:
                data = os.pread(fd, known.data_bytes, 0)
                blocks = [entry for entry, _ in scan_blocks(data, salt=header.salt, path=file)]
            flags = _flags(fd, blocks) if known.flagged else [None] * len(blocks)
        return [_block(file, header.salt, entry, deleted) for entry, deleted in zip(blocks, flags, strict=True)]

    def _sealed_blocks(self, file: str, topic_id: int, known: SegmentState) -> list[BlockEntry]:
        index = self._files.read_index(file)
        end = index.blocks[-1].end if index.blocks else 0
        found = (index.topic_id, index.first_seq, index.last_seq, end)
        if found != (topic_id, known.first_seq, known.last_seq, known.data_bytes):
            raise CorruptData(f"{index_path(file)}: this is the index of another segment")
        return index.blocks

    # --- the log ---

    def _apply(self, placed: Placed) -> None:
        frame = placed.frame
        topic = self.topics.get(frame.topic_id)
        if frame.ts > self.clock_ms:
            self.clock_ms = frame.ts
        try:
            if frame.type == _APPEND:
                placed.wal.records += frame.count
                if topic is not None and frame.last_seq > topic.flushed_seq:
                    topic.append(_batch(placed))
            else:
                self._control(topic, frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise CorruptData(
                f"{placed.wal.file}: nobody can read the frame at offset {placed.offset} ({exc}). Upgrade topics"
            ) from None
        except FormatError as exc:
            raise FormatError(f"{placed.wal.file}: at offset {placed.offset}: {exc}") from None

    def _control(self, topic: Topic | None, frame: Frame) -> None:
        kind = frame.type
        fresh = frame.lsn > self.covered
        if kind == FrameType.DELETE:
            if topic is not None:
                topic.delete(_decode_delete_frame(frame.body), fresh=fresh)
        elif kind == FrameType.HEAD:
            if topic is not None:
                topic.head(_decode_head_frame(frame.body).head_seq)
            for line in decode_copies(frame):
                if (dest := self.topics.get(line.topic_id)) is not None:
                    dest.copied(line, fresh=fresh)
        elif kind == FrameType.TOPIC:
            if fresh:
                self._configure(topic, frame)
        elif kind == FrameType.DROP:
            if fresh and topic is not None:
                self.dropped.append(self.topics.pop(frame.topic_id))
        else:
            raise FormatError(f"frame type {kind} is unknown; upgrade topics")

    def _configure(self, topic: Topic | None, frame: Frame) -> None:
        body = _decode_topic_frame(frame.body)
        if topic is None:
            topic = self.topics[frame.topic_id] = Topic(
                shard=self.number, id=frame.topic_id, name=body.name, config=body.config, created_ms=body.created_ms
            )
        topic.configure(body)


def _flags(fd: int, blocks: list[BlockEntry]) -> list[bytearray | None]:
    found: list[bytearray | None] = []
    for entry in blocks:
        flags = os.pread(fd, entry.count, entry.flags_offset)
        found.append(bytearray(flags) if DELETED in flags else None)
    return found


def _add_flags(batch: Batch, noted: ColdState) -> None:
    """What the snapshot knows of a segment in the cold tier, and its file may not."""
    if batch.first in noted.dead:
        batch.flags = bytearray([DELETED]) * batch.count
    for first, bits, _ in noted.rows:
        if first == batch.first and bits:
            flags = unpack_flags(bits, batch.count)
            batch.flags = flags if batch.flags is None else join_flags(batch.flags, flags)


def _block(file: str, salt: int, entry: BlockEntry, flags: bytearray | None) -> Batch:
    return Batch(
        file=file,
        wal=False,
        salt=salt,
        offset=entry.offset,
        length=entry.length,
        first=entry.first_seq,
        count=entry.count,
        first_ts=entry.first_ts,
        last_ts=entry.last_ts,
        size=entry.bytes,
        tagged=entry.tagged,
        flags=flags,
    )


def _batch(placed: Placed) -> Batch:
    frame, wal, offset = placed
    body = frame.body
    lengths = _LENGTHS.unpack_from(body) if len(body) >= _LENGTHS.size else (len(body),) * 4
    data_bytes = len(body) - _LENGTHS.size - sum(lengths)
    if data_bytes < 0:
        raise CorruptData(f"{wal.file}: the columns of the batch at offset {offset} are longer than the batch")
    _, tags, _, metas = lengths
    size = data_bytes - (frame.count - 1) + frame.count * RECORD_OVERHEAD
    if metas:
        size = Columns(body, count=frame.count, ts=frame.ts).size
    return Batch(
        file=wal.file,
        wal=True,
        salt=wal.salt,
        offset=offset,
        length=frame.length,
        first=frame.first_seq,
        count=frame.count,
        first_ts=frame.ts,
        last_ts=frame.ts,
        size=size,
        tagged=tags > 0,
    )
