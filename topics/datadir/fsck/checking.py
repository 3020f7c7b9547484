"""One file of a data folder, read from end to end and held against all that is known about it.

Log files are always read whole. Of a sealed segment that is not checked deeply its header, its index and the head of
every block are read, but no record. A problem is a place in a file and a sentence. Whatever the bytes are, checking
ends with an answer: damage is what it is for. The file of a running server may be written meanwhile: a frame that looks
broken is looked at again.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator

import msgspec

from topics.datadir.files import ColdTierAway, Files
from topics.datadir.inventory import Entry
from topics.datadir.log import find_data
from topics.errors import TopicsError
from topics.storage.columns import Columns
from topics.storage.config import owner_of_id
from topics.storage.control import DeleteFrame, HeadFrame, TopicFrame
from topics.storage.format import CHECKSUM, DELETED, FILE_HEADER_BYTES, FRAME_HEADER, FrameType, aligned, frame_bytes
from topics.storage.frames import (
    WHOLE,
    Frame,
    decode_frame,
    decode_wal_header,
    find_frame_after,
    frames_after,
    header_is_whole,
)
from topics.storage.paths import index_path
from topics.storage.recovery import Behind, Later, TailVerdict, judge_tail, look_behind, sum_up
from topics.storage.segment import (
    BlockEntry,
    SegmentIndex,
    block_entry,
    decode_index,
    decode_segment_header,
    decode_tag_page,
    tag_rows,
)

MOST_PROBLEMS = 100  # of one file: a disk that rots does not fill the report
_LOOKS = 3
_PAUSE_S = 0.1
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
UNREADABLE = (TopicsError, msgspec.MsgspecError, struct.error, ValueError, IndexError)
_BODIES: dict[int, type] = {
    FrameType.DELETE: DeleteFrame,
    FrameType.TOPIC: TopicFrame,
    FrameType.HEAD: HeadFrame,
}


class Problem(msgspec.Struct, frozen=True):
    file: str
    offset: int
    text: str


class Checked(msgspec.Struct):
    """What was read, and what is wrong with it."""

    missing: bool = False
    away: bool = False  # likely in the cold tier, which is not there
    bytes: int = 0
    frames: int = 0  # or blocks
    records: int = 0
    deleted: int = 0  # delete flags that are set
    first_lsn: int = 0  # of a WAL file with frames
    last_lsn: int = 0
    torn: int | None = None  # where a log file ends with bytes that are no frame, of a write that was cut short
    problems: list[Problem] = []

    def note(self, file: str, offset: int, text: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(Problem(file, offset, text))


def check_file(data_dir: str, entry: Entry, *, deep: bool = True) -> Checked:
    found = Checked()
    try:
        files = Files(data_dir)
        with files.opened(entry.file) as fd:
            if entry.kind == "wal":
                _check_wal(fd, entry, found, shards=files.manifest.shards)
            else:
                _Segment(files, fd, entry, found).check(deep=deep)
    except FileNotFoundError:
        found.missing = True
    except ColdTierAway:
        found.away = True
    except UNREADABLE as exc:
        found.note(entry.file, 0, _sentence(exc, entry.file))
    return found


def _sentence(exc: Exception, file: str) -> str:
    return str(exc).removeprefix(f"{file}: ") or type(exc).__name__


def _frame_at(fd: int, offset: int, *, end: int, salt: int) -> Frame | None:
    """The frame that stands there, with its place in the file; None if there is no good one."""
    head = os.pread(fd, FRAME_HEADER.size, offset)
    if len(head) < FRAME_HEADER.size:
        return None
    _, body_len, _, _, key_len, *_ = FRAME_HEADER.unpack(head)
    length = frame_bytes(key_len=key_len, body_len=body_len)
    if offset + length > end:
        return None
    frame = decode_frame(os.pread(fd, length, offset), 0, salt=salt)
    return None if frame is None else frame._replace(offset=offset)


def check_columns(columns: Columns) -> None:
    """Every column can be taken apart and has one value a record; raises what is wrong."""
    columns.data()
    for name, values in (("tags", columns.tags()), ("nodes", columns.nodes()), ("metas", columns.metas())):
        if len(values) != columns.count:
            raise ValueError(f"batch of {columns.count} records holds {len(values)} {name}")
    if (times := sum(count for count, _ in columns.runs())) != columns.count:
        raise ValueError(f"batch of {columns.count} records holds {times} times")


# --- segments ----------------------------------------------------------------------------------------


class _Segment:
    def __init__(self, files: Files, fd: int, entry: Entry, found: Checked) -> None:
        self._files = files
        self._fd = fd
        self._entry = entry
        self._found = found
        self._blocks: list[BlockEntry] = []
        self._tags: dict[str, list[int]] = {}
        self._whole = True  # no block was missing

    def check(self, *, deep: bool) -> None:
        entry, found = self._entry, self._found
        size = os.fstat(self._fd).st_size
        header = decode_segment_header(os.pread(self._fd, FILE_HEADER_BYTES, 0), path=entry.file)
        if header.topic_id != entry.topic_id:
            found.note(entry.file, 0, f"belongs to topic {header.topic_id:016x}, not {entry.topic_id:016x}")
        if header.first_seq != entry.first_seq:
            found.note(entry.file, 0, f"says that it begins with seq {header.first_seq}, not {entry.first_seq}")
        end = min(size, entry.data_bytes)
        if size < entry.data_bytes:
            found.note(entry.file, size, f"ends here, {entry.data_bytes - size} bytes too early")
            self._whole = False
        index = self._read_index() if entry.sealed else None
        if not deep and index is not None:
            self._check_heads(index, end, header.salt)
            return
        found.bytes += end
        offset = FILE_HEADER_BYTES
        while offset < end:
            frame = _frame_at(self._fd, offset, end=end, salt=header.salt)
            if frame is None or frame.type != FrameType.BLOCK:
                found.note(entry.file, offset, "no good block: its checksum fails or it is cut short")
                self._whole = False
                offset = self._next_block(offset, end, header.salt, index)
                continue
            self._check_block(frame)
            offset += frame.length + aligned(frame.count)
        if self._whole:
            last = self._blocks[-1].last_seq if self._blocks else 0
            if last != entry.last_seq:
                found.note(entry.file, end, f"ends with seq {last}; the snapshot says {entry.last_seq}")
            if index is not None:
                self._compare(index)

    def _check_heads(self, index: SegmentIndex, end: int, salt: int) -> None:
        """The index against the heads of the blocks that it lists, without reading a record."""
        entry, found = self._entry, self._found
        name = index_path(entry.file)
        self._check_identity(index)
        offset, last = FILE_HEADER_BYTES, 0
        for block in index.blocks:
            if block.offset != offset or block.first_seq <= last:
                found.note(name, 0, f"its block of seq {block.first_seq} does not follow the one before")
                return
            offset, last = block.end, block.last_seq
            found.frames += 1
            found.records += block.count
            if block.end > end:
                continue  # cut off: that has been said
            head = FRAME_HEADER.unpack(os.pread(self._fd, FRAME_HEADER.size, block.offset))
            known = (salt, FrameType.BLOCK, block.count, entry.topic_id, block.first_seq, block.first_ts)
            if (head[0], head[2], *head[5:9]) != known or head[9:] != (block.last_ts, block.bytes):
                found.note(entry.file, block.offset, "no good block: its head is not what the index says")
            elif frame_bytes(key_len=head[4], body_len=head[1]) != block.length:
                found.note(entry.file, block.offset, "no good block: its length is not what the index says")
            self._check_flags(block)
        found.bytes += len(index.blocks) * FRAME_HEADER.size
        if offset != entry.data_bytes or last != entry.last_seq:
            found.note(
                name,
                0,
                f"ends with seq {last} at offset {offset}; the snapshot says {entry.last_seq} at {entry.data_bytes}",
            )

    def _next_block(self, bad: int, end: int, salt: int, index: SegmentIndex | None) -> int:
        """Where to go on behind a block that can't be read."""
        if index is not None:
            return next((block.offset for block in index.blocks if block.offset > bad), end)
        rest = os.pread(self._fd, end - bad, bad)
        frame = find_frame_after(rest, salt=salt, start=8)
        return end if frame is None else bad + frame.offset

    def _check_block(self, frame: Frame) -> None:
        entry, found, offset = self._entry, self._found, frame.offset
        found.frames += 1
        found.records += frame.count
        if frame.topic_id != entry.topic_id:
            found.note(entry.file, offset, f"block of topic {frame.topic_id:016x}")
        if self._blocks and frame.first_seq <= self._blocks[-1].last_seq:
            found.note(entry.file, offset, f"seq {frame.first_seq} follows seq {self._blocks[-1].last_seq}")
        columns = Columns(frame.body, count=frame.count, ts=frame.ts)
        try:
            check_columns(columns)
            runs = columns.runs()
            if (runs[0][1], runs[-1][1], columns.size) != (frame.ts, frame.lsn, frame.synced):
                found.note(entry.file, offset, "the block's times or size are not those of its records")
            for tag, seqs in tag_rows([(frame.first_seq, columns)]).items():
                self._tags.setdefault(tag, []).extend(seqs)
        except UNREADABLE as exc:
            found.note(entry.file, offset, _sentence(exc, entry.file))
            self._whole = False
        self._blocks.append(block_entry(frame))
        self._check_flags(self._blocks[-1])

    def _check_flags(self, block: BlockEntry) -> None:
        at = block.flags_offset
        flags = os.pread(self._fd, block.count, at)
        deleted = flags.count(DELETED)
        self._found.deleted += deleted
        if deleted + flags.count(0) != block.count:
            odd = next((n for n, flag in enumerate(flags) if flag not in (0, DELETED)), len(flags))
            self._found.note(
                self._entry.file, at + odd, f"the delete flag of seq {block.first_seq + odd} is neither set nor clear"
            )

    def _read_index(self) -> SegmentIndex | None:
        """None: it can't be used, and that has been said."""
        name = index_path(self._entry.file)
        try:
            with self._files.opened(name) as fd:
                data = os.pread(fd, os.fstat(fd).st_size, 0)
            self._found.bytes += len(data)
            index = decode_index(data, path=name)
            listed: dict[str, list[int]] = {}
            for _, offset, length in index.directory:
                at = index.pages_offset + offset
                try:
                    listed.update(decode_tag_page(data[at : at + length], path=name))
                except UNREADABLE as exc:
                    self._found.note(name, at, _sentence(exc, name))
            self._listed = listed
            return index
        except FileNotFoundError:
            self._found.note(name, 0, "this index is missing; it can be made again from its segment")
        except UNREADABLE as exc:
            self._found.note(name, 0, _sentence(exc, name))
        return None

    def _check_identity(self, index: SegmentIndex) -> None:
        entry = self._entry
        name = index_path(entry.file)
        if (index.topic_id, index.first_seq, index.last_seq) != (entry.topic_id, entry.first_seq, entry.last_seq):
            self._found.note(name, 0, "this index was made for another segment")

    def _compare(self, index: SegmentIndex) -> None:
        entry = self._entry
        name = index_path(entry.file)
        self._check_identity(index)
        for listed, block in zip(index.blocks, self._blocks, strict=False):
            if listed != block:
                self._found.note(entry.file, block.offset, "the index describes this block differently")
        if len(index.blocks) != len(self._blocks):
            self._found.note(name, 0, f"lists {len(index.blocks)} blocks of {len(self._blocks)}")
        if self._listed != self._tags:
            self._found.note(name, index.pages_offset, "the tags in the index are not those of the records")


# --- the log -----------------------------------------------------------------------------------------


def _check_wal(fd: int, entry: Entry, found: Checked, *, shards: int) -> None:
    head = os.pread(fd, FILE_HEADER_BYTES, 0)
    if not header_is_whole(head) and (not any(head) or not find_data(fd, FILE_HEADER_BYTES)):
        return  # made when a crash came, or right now
    header = decode_wal_header(head, path=entry.file)
    if header.shard != entry.shard:
        found.note(entry.file, 0, f"belongs to shard {header.shard}")
    offset = FILE_HEADER_BYTES
    looks = _LOOKS
    while True:
        size = os.fstat(fd).st_size
        for frame in _frames(fd, offset, end=size, salt=header.salt):
            _check_frame(frame, entry, found, shards=shards)
            offset = frame.offset + frame.length
        later, behind = _behind(fd, offset, size, header.salt)
        same_boot = header.boot_id in (WHOLE, boot_id())
        verdict = judge_tail(last_lsn=found.last_lsn, behind=behind, later=later, same_boot=same_boot)
        if verdict is not TailVerdict.CORRUPT or not looks:
            break
        looks -= 1
        time.sleep(_PAUSE_S)  # a write that is under way shows its pages in any order
    found.bytes = size
    if verdict in (TailVerdict.TORN, TailVerdict.UNSYNCED):
        found.torn = offset
    if verdict is TailVerdict.CORRUPT:
        but = "a whole one stood here" if later is None else f"frame {later.first_lsn} stands behind it"
        found.note(entry.file, offset, f"no good frame after frame {found.last_lsn}, but {but}")


def _frames(fd: int, offset: int, *, end: int, salt: int) -> Iterator[Frame]:
    while (frame := _frame_at(fd, offset, end=end, salt=salt)) is not None:
        yield frame
        offset += frame.length


def _check_frame(frame: Frame, entry: Entry, found: Checked, *, shards: int) -> None:
    if (owner := owner_of_id(frame.topic_id, shards)) != entry.shard:
        found.note(entry.file, frame.offset, f"a frame of topic {frame.topic_id:016x}, which is shard {owner}'s")
    if found.last_lsn and frame.lsn != found.last_lsn + 1:
        found.note(entry.file, frame.offset, f"frame {frame.lsn} follows frame {found.last_lsn}")
    found.first_lsn = found.first_lsn or frame.lsn
    found.last_lsn = frame.lsn
    found.frames += 1
    try:
        if frame.type == FrameType.APPEND:
            found.records += frame.count
            check_columns(Columns(frame.body, count=frame.count, ts=frame.ts))
        elif (body := _BODIES.get(frame.type)) is not None:
            msgspec.msgpack.decode(frame.body, type=body)
        elif frame.type != FrameType.DROP:
            found.note(entry.file, frame.offset, f"a frame of type {frame.type}, which nobody knows")
    except UNREADABLE as exc:
        found.note(entry.file, frame.offset, _sentence(exc, entry.file))


def _behind(fd: int, offset: int, size: int, salt: int) -> tuple[Later | None, Behind]:
    """(good frames behind the end of the log, what stands at the place of the next one), a piece at a time: log files
    are reserved in full, so most of this is zeros."""
    at, step = offset, 1 << 20
    while at < size:
        piece = os.pread(fd, step, at)
        if not piece:
            break
        if piece.count(0) != len(piece):
            rest = os.pread(fd, size - offset, offset)
            return sum_up(frames_after(rest, salt=salt, start=CHECKSUM.size)), look_behind(rest, salt=salt)
        at += len(piece)
    return None, Behind.ZEROS


def boot_id() -> bytes:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return b""
