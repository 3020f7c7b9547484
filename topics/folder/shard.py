"""One shard of a data folder: its newest snapshot, the segments that names, and its log as far as it reaches.

The log may go on while we look. A frame that is only partly there fails its checksum; the next look goes on where this
one stopped. A new snapshot makes the files of the old one go, so everything is read again then; whoever finds a file
missing in between starts over, too.
"""

from __future__ import annotations

import mmap
import os
import struct

import msgspec

from topics.errors import CorruptData, FormatError
from topics.folder.batch import Batch
from topics.folder.files import Files
from topics.folder.topic import Topic
from topics.storage.columns import Columns
from topics.storage.control import DeleteFrame, HeadFrame, TopicFrame
from topics.storage.format import DELETED, FILE_HEADER_BYTES, RECORD_OVERHEAD, FrameType
from topics.storage.frames import Frame, decode_wal_header, find_frame_after, scan
from topics.storage.paths import parse_numbered, segment_name, shard_dir, topic_dir
from topics.storage.segment import BlockEntry, scan_blocks
from topics.storage.snapshot import ShardState, TopicState, decode_snapshot, decode_topic

_LENGTHS = struct.Struct("<4I")
_LOOK_BEHIND = 64 * 1024  # for bytes behind the last frame; files are preallocated, reading all those zeros is dear
_decode_topic_frame = msgspec.msgpack.Decoder(TopicFrame).decode
_decode_head_frame = msgspec.msgpack.Decoder(HeadFrame).decode
_decode_delete_frame = msgspec.msgpack.Decoder(DeleteFrame).decode


class WalFile(msgspec.Struct):
    """A file of the log, and how far it has been read."""

    file: str
    number: int
    salt: int
    end: int = FILE_HEADER_BYTES
    first_lsn: int = 0
    last_lsn: int = 0
    records: int = 0  # in all its batches


class Superseded(Exception):
    """Files went while they were read: there is a newer snapshot or another layout."""


class Shard:
    def __init__(self, files: Files, number: int, *, layout: int) -> None:
        self.number = number
        self.layout = layout
        self.topics: dict[int, Topic] = {}
        self.wals: list[WalFile] = []
        self.snapshot: str | None = None  # the file
        self.covered = 0  # its last frame
        self.clean = False
        self.clock_ms = 0
        self.torn: list[tuple[str, int]] = []  # (file, offset): bytes behind the log that are no frames
        self._files = files
        self._folder = shard_dir(files.data_dir, number)
        self._last_lsn = 0

    def look(self) -> None:
        """Read what is there, or what has come since the last look. Raises Superseded where one has to start over."""
        snapshots, wals = self._list()
        newest = snapshots[-1] if snapshots else None
        try:
            if not self.wals and self.snapshot is None and newest is not None:
                self._load(newest)
            elif newest != self.snapshot:
                raise Superseded
            self._follow(wals)
        except FileNotFoundError as exc:
            if self._newest() != newest:
                raise Superseded from None
            raise CorruptData(f"{exc.filename or exc}: this file is missing; restore it from a backup") from None
        if self._newest() != newest:
            raise Superseded

    def _newest(self) -> str | None:
        snapshots, _ = self._list()
        return snapshots[-1] if snapshots else None

    def _list(self) -> tuple[list[str], list[str]]:
        """(snapshots, WAL files) of the layout, oldest first."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return [], []
        found: dict[str, list[tuple[int, str]]] = {"snap": [], "wal": []}
        for name in names:
            parsed = parse_numbered(name)
            if parsed is not None and parsed[0] == self.layout:
                found[parsed[2]].append((parsed[1], os.path.join(self._folder, name)))
        return [path for _, path in sorted(found["snap"])], [path for _, path in sorted(found["wal"])]

    # --- snapshot and segments ---

    def _load(self, path: str) -> None:
        with open(path, "rb") as source:
            state: ShardState = decode_snapshot(source.read(), path=self._files.relative(path))
        self.snapshot = path
        self.covered = state.lsn
        self.clean = state.clean
        self.clock_ms = state.clock_ms
        for raw in state.topics:
            self._load_topic(decode_topic(raw))

    def _load_topic(self, state: TopicState) -> None:
        topic = Topic.restored(state, shard=self.number)
        self.topics[state.id] = topic
        folder = self._files.relative(topic_dir(self._files.data_dir, state.id))
        for known in state.segments:
            file = os.path.join(folder, segment_name(known.first_seq))
            header = self._files.read_header(file)
            if header.topic_id != state.id:
                raise CorruptData(f"{file}: belongs to another topic")
            if known.sealed:
                blocks = self._files.read_index(file).blocks
            else:
                blocks = self._open_blocks(file, header.salt, known.data_bytes)
            flags = self._flags(file, blocks) if known.flagged else [None] * len(blocks)
            for entry, deleted in zip(blocks, flags, strict=True):
                topic.add(_block(file, header.salt, entry, deleted))

    def _open_blocks(self, file: str, salt: int, data_bytes: int) -> list[BlockEntry]:
        with self._files.opened(file) as fd:
            data = os.pread(fd, data_bytes, 0)
        if len(data) < data_bytes:
            raise CorruptData(f"{file}: {data_bytes} bytes expected, {len(data)} found")
        return [entry for entry, _ in scan_blocks(data, salt=salt, path=file)]

    def _flags(self, file: str, blocks: list[BlockEntry]) -> list[bytearray | None]:
        found: list[bytearray | None] = []
        with self._files.opened(file) as fd:
            for entry in blocks:
                flags = os.pread(fd, entry.count, entry.flags_offset)
                found.append(bytearray(flags) if DELETED in flags else None)
        return found

    # --- the log ---

    def _follow(self, wals: list[str]) -> None:
        known = {wal.file: wal for wal in self.wals}
        self.torn = []
        for at, path in enumerate(wals):
            wal = known.get(self._files.relative(path))
            if wal is None:
                wal = self._open_wal(path)
                if wal is None:
                    continue
                self.wals.append(wal)
            elif at + 1 < len(wals) and wals[at + 1] in known:
                continue  # the log went on behind it when we last looked
            self._read(wal, path, last=at + 1 == len(wals))

    def _open_wal(self, path: str) -> WalFile | None:
        """None: it has no header yet, so it holds no frame."""
        file = self._files.relative(path)
        with open(path, "rb") as source:
            head = source.read(FILE_HEADER_BYTES)
        if len(head) < FILE_HEADER_BYTES or not any(head):
            return None
        header = decode_wal_header(head, path=file)
        return WalFile(file, header.file_no, header.salt)

    def _read(self, wal: WalFile, path: str, *, last: bool) -> None:
        with open(path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            if size <= wal.end:
                return
            with mmap.mmap(source.fileno(), size, prot=mmap.PROT_READ) as data:
                for frame in scan(data, salt=wal.salt, start=wal.end):
                    if self._last_lsn and frame.lsn != self._last_lsn + 1:
                        raise CorruptData(
                            f"{wal.file}: frame {frame.lsn} at offset {frame.offset} follows frame {self._last_lsn}; "
                            "a WAL file or a part of one is missing. Restore it from a backup"
                        )
                    if not self._last_lsn and frame.lsn > self.covered + 1:
                        raise CorruptData(
                            f"{wal.file}: the log begins with frame {frame.lsn}, but the snapshot ends with "
                            f"{self.covered}; a WAL file is missing. Restore it from a backup"
                        )
                    self._last_lsn = wal.last_lsn = frame.lsn
                    wal.first_lsn = wal.first_lsn or frame.lsn
                    wal.end = frame.offset + frame.length
                    self._apply(frame, wal)
                rest = data[wal.end : wal.end + _LOOK_BEHIND]
                if rest.count(0) != len(rest):
                    self.torn.append((wal.file, wal.end))
                    later = find_frame_after(data[wal.end :], salt=wal.salt, start=0)
                    if later is not None and self._still_bad(wal, path):
                        raise CorruptData(
                            f"{wal.file}: damaged at offset {wal.end} (after frame {wal.last_lsn}), and good frames "
                            "follow. Restore the file from a backup"
                        )

    @staticmethod
    def _still_bad(wal: WalFile, path: str) -> bool:
        """A write may have been under way while we read; then the frame is whole by now."""
        with open(path, "rb") as source:
            data = source.read()
        return next(scan(data, salt=wal.salt, start=wal.end), None) is None

    def _apply(self, frame: Frame, wal: WalFile) -> None:
        kind = frame.type
        topic = self.topics.get(frame.topic_id)
        fresh = frame.lsn > self.covered
        self.clock_ms = max(self.clock_ms, frame.ts)
        if kind == FrameType.APPEND:
            wal.records += frame.count
            if topic is not None and frame.last_seq > topic.flushed_seq:
                topic.append(_batch(wal, frame))
        elif kind == FrameType.DELETE:
            if topic is not None:
                topic.delete(_decode_delete_frame(frame.body), fresh=fresh)
        elif kind == FrameType.HEAD:
            if topic is not None:
                topic.head(_decode_head_frame(frame.body).head_seq)
        elif kind == FrameType.TOPIC:
            if fresh:
                self._configure(topic, frame)
        elif kind == FrameType.DROP:
            if fresh:
                self.topics.pop(frame.topic_id, None)
        else:
            raise FormatError(f"{wal.file}: frame type {kind} at offset {frame.offset} is unknown; upgrade topics")

    def _configure(self, topic: Topic | None, frame: Frame) -> None:
        body = _decode_topic_frame(frame.body)
        if topic is None:
            topic = self.topics[frame.topic_id] = Topic(
                shard=self.number, id=frame.topic_id, name=body.name, config=body.config, created_ms=body.created_ms
            )
        topic.configure(body)


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


def _batch(wal: WalFile, frame: Frame) -> Batch:
    body = frame.body
    if len(body) < _LENGTHS.size:
        raise CorruptData(f"{wal.file}: batch at offset {frame.offset} is shorter than its column lengths")
    times, tags, nodes, metas = _LENGTHS.unpack_from(body)
    if metas:
        size = Columns(body, count=frame.count, ts=frame.ts).size
    else:
        size = len(body) - _LENGTHS.size - times - tags - nodes - (frame.count - 1) + frame.count * RECORD_OVERHEAD
    return Batch(
        file=wal.file,
        wal=True,
        salt=wal.salt,
        offset=frame.offset,
        length=frame.length,
        first=frame.first_seq,
        count=frame.count,
        first_ts=frame.ts,
        last_ts=frame.ts,
        size=size,
        tagged=tags > 0,
    )
