"""Segments of a topic on disk, as the running shard sees them.

Blocks are appended to a topic's open segment when its tail leaves the WAL; a full one is sealed, which writes its
index. What a snapshot does not name does not count: blocks behind `data_bytes` are overwritten or cut off, and a
segment that died is unlinked only after a snapshot without it. Delete flags change in memory first and on disk with
the next checkpoint, before the WAL frame that asked for it may go.

A sealed segment may be in the cold tier (tiering/relocator.py): then `path` is there, and its index stayed where it
was. While its hot file has not gone yet (`leaving`), that one is read: the cold disk may be gone by then.

A shard can start while the cold tier is away. Its segments there are `unseen`: what is known of them is in their
indexes and in the snapshot, and the first read after the disk has come back looks at their headers.
"""

from __future__ import annotations

import os
from collections import OrderedDict

from topics.errors import ColdTierGone, CorruptData, DiskFull, FormatError, Unreachable
from topics.storage.columns import Columns
from topics.storage.format import DELETED, FILE_HEADER_BYTES
from topics.storage.paths import index_path
from topics.storage.segment import (
    BlockEntry,
    SegmentHeader,
    SegmentIndex,
    decode_index,
    decode_segment_header,
    decode_tag_page,
    encode_index,
    index_head_bytes,
    read_block,
    tag_rows,
)
from topics.storage.snapshot import SegmentState, pack_flags
from topics.walshard.log.disk import Disk, kill_point
from topics.walshard.tiering.tier import ColdTier
from topics.walshard.topic.index import Row


class OpenFiles:
    """Read descriptors of segments, the least recently used closed first."""

    def __init__(self, disk: Disk, *, most: int = 256) -> None:
        self.disk = disk
        self._most = most
        self._fds: OrderedDict[str, int] = OrderedDict()

    def fd(self, path: str) -> int:
        fd = self._fds.get(path)
        if fd is None:
            fd = self._fds[path] = self.disk.open(path)
            if len(self._fds) > self._most:
                self.disk.close(self._fds.popitem(last=False)[1])
        else:
            self._fds.move_to_end(path)
        return fd

    def forget(self, path: str) -> None:
        if (fd := self._fds.pop(path, None)) is not None:
            self.disk.close(fd)


class Segment:
    def __init__(self, path: str, header: SegmentHeader, files: OpenFiles) -> None:
        self.path = path
        self.index_path = index_path(path)
        self.cold = False
        self.leaving: str | None = None  # its hot file, while a copy in the cold tier is to take its place ...
        self.left = False  # ... and whether that file is gone
        self.tier: ColdTier | None = None  # where `path` is, if it is cold
        self.header = header
        self.first_seq = header.first_seq
        self.last_seq = header.first_seq - 1
        self.data_bytes = FILE_HEADER_BYTES
        self.records = 0
        self.sealed = False
        self.flagged = False
        self.blocks: list[BlockEntry] = []  # while open; a sealed segment keeps its table on disk
        self.live_rows = 0
        self.dirty: set[Row] = set()  # rows whose delete flags are not on disk yet
        self.unseen = False  # in the cold tier, which was away when the shard started: nobody has read its header
        self.dead: list[int] = []  # blocks without a live record, by their first seqs
        self.guessed: set[Row] = set()  # rows that could not be read when they were cut: their bytes are an estimate
        self._packed: dict[Row, bytes] = {}  # flags as snapshots have them
        self._files = files

    def packed_flags(self, row: Row) -> bytes:
        bits = self._packed.get(row)
        if bits is None:
            bits = self._packed[row] = pack_flags(row.flags)
        return bits

    def state(self) -> SegmentState:
        return SegmentState(self.first_seq, self.last_seq, self.data_bytes, self.sealed, self.flagged)

    def add_block(self, entry: BlockEntry) -> Row:
        self.blocks.append(entry)
        self.last_seq = entry.last_seq
        self.data_bytes = entry.end
        self.records += entry.count
        return self.row(entry)

    def row(self, entry: BlockEntry) -> Row:
        self.live_rows += 1
        return Row(
            first=entry.first_seq,
            count=entry.count,
            first_ts=entry.first_ts,
            last_ts=entry.last_ts,
            size=entry.bytes,
            source=self,
            offset=entry.offset,
            length=entry.length,
            live=entry.count,
        )

    # --- reading ---

    def read_body(self, row: Row) -> bytes:
        if self.unseen:
            self._meet()
        try:
            data = self._files.disk.read(self._fd(), row.length, row.offset)
        except OSError as error:
            if not self.cold:
                raise
            raise self._unreachable(error.strerror or str(error)) from error
        except CorruptData as error:  # the file ends before the block does
            if not self.cold:
                raise CorruptData(f"{self.path}: {error}") from error
            raise self._unreachable(str(error)) from error
        return read_block(data, path=self.path, offset=row.offset, salt=self.header.salt).body

    def _fd(self) -> int:
        if self.leaving is not None:
            try:
                return self._files.fd(self.leaving)
            except FileNotFoundError:
                pass  # it has just gone, so the copy counts
        return self._files.fd(self.path)

    def _meet(self) -> None:
        """See its header for the first time, in the folder that has the marker."""
        assert self.tier is not None
        try:
            with self.tier.opened() as root:
                header = read_header(self._below(root), self._files.disk)
        except ColdTierGone as error:
            raise Unreachable(f"{self.path}: {error}") from error
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from error
        except FormatError as error:
            raise CorruptData(str(error)) from error
        if (header.topic_id, header.first_seq) != (self.header.topic_id, self.first_seq):
            raise CorruptData(f"{self.path}: belongs to another topic, or to another place in this one")
        self.header = header
        self.unseen = False

    @property
    def is_hot(self) -> bool:
        """Whether the file that counts is in the data folder."""
        return self.tier is None or (self.leaving is not None and not self.left)

    @property
    def is_missed(self) -> bool:
        """Whether the disk that it is on was away when somebody last looked."""
        return self.cold and self.leaving is None and self.tier is not None and self.tier.gone

    @property
    def out_of_reach(self) -> bool:
        """Whether the disk that it is on is away."""
        return self.cold and self.leaving is None and self.tier is not None and self.tier.why_not() is not None

    def _unreachable(self, error: str) -> Unreachable:
        why = None if self.tier is None else self.tier.why_not()
        if why is None:
            why = (
                f"{error}, though the cold tier is there: topics verify says what else is missing, and a backup has it"
            )
        return Unreachable(f"{self.path}: {why}")

    def read_bodies(self, rows: list[Row]) -> list[bytes | None]:
        """Of a cold segment, on a thread: None for what can't be read."""
        disk = self._files.disk
        leaving = self.leaving  # the loop may change it meanwhile
        try:
            if self.unseen:
                self._meet()
            fd = self._open_either(leaving)
        except (OSError, CorruptData, Unreachable):
            return [None] * len(rows)
        found: list[bytes | None] = []
        try:
            for row in rows:
                try:
                    data = disk.read(fd, row.length, row.offset)
                    found.append(read_block(data, path=self.path, offset=row.offset, salt=self.header.salt).body)
                except (OSError, CorruptData):  # read in place it raises what it is
                    found.append(None)
        finally:
            disk.close(fd)
        return found

    def _open_either(self, leaving: str | None) -> int:
        if leaving is not None:
            try:
                return self._files.disk.open(leaving)
            except FileNotFoundError:
                pass
        return self._files.disk.open(self.path)

    def read_flags(self, entry: BlockEntry) -> bytes:
        return self._files.disk.read(self._files.fd(self.path), entry.count, entry.flags_offset)

    def index(self) -> SegmentIndex:
        path = self.index_path
        fd = self._files.fd(path)
        disk = self._files.disk
        return _read_index(disk, fd, path=path)

    def seqs_with_tag(self, tag: str, *, prefix: bool) -> list[int]:
        """From the tag pages of a sealed segment; the records may be dead."""
        index = self.index()
        places = index.pages_for_prefix(tag) if prefix else index.pages_for_tag(tag)
        path = self.index_path
        found: list[int] = []
        for offset, length in places:
            data = self._files.disk.read(self._files.fd(path), length, offset)
            for known, seqs in decode_tag_page(data, path=path):
                if known == tag or (prefix and known.startswith(tag)):
                    found.extend(seqs)
        found.sort()
        return found

    # --- deletes ---

    def flags_changed(self, row: Row) -> None:
        self.flagged = True
        self.dirty.add(row)
        self._packed.pop(row, None)

    def release(self, row: Row) -> None:
        self.live_rows -= 1
        self.dead.append(row.first)
        self.guessed.discard(row)
        self._packed.pop(row, None)

    def write_flags(self, rows: list[tuple[int, bytes]]) -> None:
        """(offset, flags) of dirty rows, durably, in the file that counts. Runs on the mover's thread."""
        if self.is_hot:
            self._write_flags(self.leaving or self.path, rows)
            return
        assert self.tier is not None
        try:
            with self.tier.opened() as root:
                self._write_flags(self._below(root), rows)
        except ColdTierGone:
            raise
        except (OSError, DiskFull) as error:
            raise DiskFull(f"the cold tier does not take the delete flags of {self.path}: {error}") from error

    def _below(self, root: str) -> str:
        """Its file in the cold tier, by another name of that."""
        assert self.tier is not None
        return os.path.join(root, os.path.relpath(self.path, self.tier.path))

    def _write_flags(self, path: str, rows: list[tuple[int, bytes]]) -> None:
        disk = self._files.disk
        fd = disk.open(path, write=True)
        try:
            for offset, flags in rows:
                disk.write(fd, flags, offset)
            disk.sync(fd)
        finally:
            disk.close(fd)

    def take_dirty(self) -> list[tuple[int, bytes]]:
        rows = []
        for row in self.dirty:
            flags = row.flags or bytearray(row.count)
            rows.append((row.offset + row.length, bytes(flag if flag == DELETED else 0 for flag in flags)))
        self.dirty = set()
        return rows

    # --- sealing and dropping ---

    def encode_index(self, blocks: list[BlockEntry]) -> bytes:
        """Read the tagged blocks back and build the index. Runs on the mover's thread."""
        disk = self._files.disk
        tagged = []
        fd = disk.open(self.path)
        try:
            for entry in blocks:
                if entry.tagged:
                    data = disk.read(fd, entry.length, entry.offset)
                    block = read_block(data, path=self.path, offset=entry.offset, salt=self.header.salt)
                    tagged.append((entry.first_seq, Columns(block.body, count=entry.count, ts=entry.first_ts)))
        finally:
            disk.close(fd)
        return encode_index(
            topic_id=self.header.topic_id,
            first_seq=self.first_seq,
            last_seq=blocks[-1].last_seq,
            blocks=blocks,
            tags=tag_rows(tagged),
        )

    def seal(self) -> None:
        self.sealed = True
        self.blocks = []

    def forget_files(self) -> None:
        for path in (self.path, self.index_path, self.leaving):
            if path is not None:
                self._files.forget(path)

    def unlink(self) -> None:
        """What is hot of it; the rest is the relocator's to remove."""
        self.forget_files()
        for path in (self.path, self.index_path, self.leaving):
            if path is not None and not (self.cold and path == self.path):
                self._files.disk.unlink(path)

    # --- the cold tier ---

    def relocate(self, path: str, tier: ColdTier) -> None:
        """A complete copy is there, and is to be flagged from now on; the hot file is read until it is gone."""
        self.leaving = self.path
        self.left = False
        self.path = path
        self.tier = tier
        self.cold = True

    def leave(self) -> Exception | None:
        """Take over the flags of the hot file, then remove it; or stay hot, and say why. Again is fine. On the mover's
        thread, when a snapshot has the flags: the cold disk may be away at the next start. The loop reads the hot file
        until `settle`, as long as there is one.

        The hot file goes while the folder is open whose marker was read, and in which the copy was found."""
        assert self.leaving is not None
        disk = self._files.disk
        if self.cold and not self.left:
            assert self.tier is not None
            flags = self._hot_flags(self.leaving) if self.flagged else []
            try:
                with self.tier.opened() as root:
                    copy = self._below(root)
                    self._check_copy(copy)
                    if flags:
                        self._write_flags(copy, flags)
                    kill_point("leave")
                    self.left = True
                    disk.unlink(self.leaving)
            except (OSError, DiskFull, CorruptData) as error:
                if self.left:
                    raise
                self.path, self.tier, self.cold = self.leaving, None, False
                return error
        if self.left:
            disk.sync_dir(os.path.dirname(self.leaving))  # or the power could bring back a file without its flags
            kill_point("left")
        return None

    def settle(self) -> None:
        """Where it is now, it stays."""
        if self.leaving is not None:
            self._files.forget(self.leaving)
            self.leaving = None

    def _hot_flags(self, hot_path: str) -> list[tuple[int, bytes]]:
        disk = self._files.disk
        hot = disk.open(hot_path)
        try:
            fd = disk.open(self.index_path)
            try:
                blocks = _read_index(disk, fd, path=self.index_path).blocks
            finally:
                disk.close(fd)
            return [(entry.flags_offset, disk.read(hot, entry.count, entry.flags_offset)) for entry in blocks]
        finally:
            disk.close(hot)

    def _check_copy(self, path: str) -> None:
        """It was synced when it was made; that it is this one, and whole, is looked at again."""
        if read_header(path, self._files.disk) != self.header or os.stat(path).st_size < self.data_bytes:
            raise CorruptData(f"{path}: another segment, or a part of one")


def _read_index(disk: Disk, fd: int, *, path: str) -> SegmentIndex:
    """Its lengths are believed only as far as the file goes: damaged ones may ask for more memory than there is."""
    need = index_head_bytes(disk.read(fd, FILE_HEADER_BYTES, 0), path=path)
    return decode_index(disk.read(fd, min(need, os.fstat(fd).st_size), 0), path=path)


def read_header(path: str, disk: Disk) -> SegmentHeader:
    fd = disk.open(path)
    try:
        size = os.fstat(fd).st_size
        return decode_segment_header(disk.read(fd, min(size, FILE_HEADER_BYTES), 0), path=path)
    finally:
        disk.close(fd)
