"""The write-ahead log of a shard: preallocated files, frames staged in memory, one write per commit.

Rules: frames get their lsn when staged; a commit writes all of them with one call or counts for nothing; what it
did not write is forgotten and its lsns are used again. A large append's frame comes in a file of its own, which takes
the place of the current one when the frame is committed (placing.py). After a start the log goes on in a new file, so
that nothing is ever written behind a tail that had to be cut. A file goes when a snapshot covers its frames and no row
read from it when that snapshot was made: what dies while it is written is still alive in it, and so after a crash.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import takewhile

from topics import limits
from topics.errors import CorruptData, DiskFull
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import WalHeader, decode_frame, encode_batch, encode_frame, read_large_body
from topics.storage.paths import numbered_name
from topics.walshard.log.disk import Disk, kill_point
from topics.walshard.log.placing import Placing
from topics.walshard.topic.index import Row


class WalFile:
    def __init__(self, path: str, header: WalHeader, disk: Disk, *, fd: int, size: int) -> None:
        self.path = path
        self.header = header
        self.salt = header.salt
        self.fd = fd
        self.size = size
        self.end = FILE_HEADER_BYTES  # where the next frame goes
        self.last_lsn = 0  # it is synced before this one is
        self.pins = 0  # rows that read from this file
        self._disk = disk

    def read_body(self, row: Row) -> bytes:
        if row.length > limits.PLACED_BYTES:
            body = read_large_body(
                lambda length, at: self._disk.read(self.fd, length, row.offset + at), length=row.length, salt=self.salt
            )
            if body is None:
                raise self._damaged(row)
            return body
        data = self._disk.read(self.fd, row.length, row.offset)
        frame = decode_frame(data, 0, salt=self.header.salt)
        if frame is None:
            raise self._damaged(row)
        return frame.body

    def _damaged(self, row: Row) -> CorruptData:
        return CorruptData(f"{self.path}: checksum of the frame at offset {row.offset} fails")

    def pin(self) -> None:
        self.pins += 1

    def release(self, row: Row) -> None:
        self.pins -= 1

    def unlink(self) -> None:
        self._disk.close(self.fd)
        self._disk.unlink(self.path)


class Wal:
    def __init__(
        self,
        disk: Disk,
        folder: str,
        *,
        shard: int,
        layout: int,
        boot_id: bytes,
        file_bytes: int,
        next_lsn: int,
        next_file_no: int,
        recovered: list[WalFile],
    ) -> None:
        self._disk = disk
        self.folder = folder
        self.shard = shard
        self._layout = layout
        self._boot_id = boot_id
        self._file_bytes = file_bytes
        self._next_lsn = next_lsn
        self._next_file_no = next_file_no
        self._staged: list[bytes] = []
        self._staged_bytes = 0
        self._staged_from = next_lsn
        self._placed: Placing | None = None  # staged behind all the others
        self.renamed = False  # a file has got its name, and the folder was not synced since
        self.older = recovered  # files before the current one, oldest first
        self.written_lsn = next_lsn - 1
        self.synced_lsn = next_lsn - 1  # recovery synced what it read
        self.syncing: list[WalFile] = []  # those that the syncer is at
        self.frames = 0
        self.batches = 0
        self.bytes_written = 0
        self.rotations = 0
        self._reserve = min(limits.WAL_RESERVE_BYTES, file_bytes // 8)
        self.room = 0  # what the current file still takes, its reserve left alone
        self.current = self._begin(self._first_file())

    def _begin(self, file: WalFile) -> WalFile:
        self._reserve = min(limits.WAL_RESERVE_BYTES, self._file_bytes // 8, file.size - file.end)
        self.room = file.size - file.end - self._reserve
        return file

    # --- staging ---

    def fits(self, size: int, *, reserve: bool) -> bool:
        """Whether a frame of this size still goes into the current file; `reserve`: it may use the last part too."""
        return size <= (self.room + self._reserve if reserve else self.room)

    @property
    def staged(self) -> bool:
        return bool(self._staged) or self._placed is not None

    def stage(
        self,
        type: FrameType,
        *,
        topic_id: int,
        ts: int,
        first_seq: int = 0,
        body: bytes = b"",
    ) -> int:
        """Put a frame into the next commit; returns its lsn."""
        lsn = self._next_lsn
        frame = encode_frame(
            salt=self.current.header.salt,
            type=type,
            topic_id=topic_id,
            first_seq=first_seq,
            ts=ts,
            lsn=lsn,
            synced=self.synced_lsn,
            body=body,
        )
        self._staged.append(frame)
        self._staged_bytes += len(frame)
        self.room -= len(frame)
        self._next_lsn = lsn + 1
        return lsn

    def stage_batch(
        self, topic_id: int, first_seq: int, count: int, ts: int, body: bytes, key: bytes
    ) -> tuple[int, int]:
        """The same for an append, by position because it is the hottest call of all; returns offset and lsn."""
        lsn = self._next_lsn
        current = self.current
        frame = encode_batch(current.salt, topic_id, first_seq, count, ts, lsn, self.synced_lsn, body, key)
        offset = current.end + self._staged_bytes
        self._staged.append(frame)
        length = len(frame)
        self._staged_bytes += length
        self.room -= length
        self._next_lsn = lsn + 1
        return offset, lsn

    def place(self, body: memoryview, key: bytes) -> Placing:
        """A file for a large append, yet to be written; only one at a time."""
        header = self._header()
        return Placing(self._disk, self.folder, header, key=key, body=body, room=self._file_bytes)

    def file_no_of(self, placing: Placing) -> int | None:
        """The number that the file must have, if it is another one than it has."""
        return None if placing.header.file_no == self._next_file_no else self._next_file_no

    def stage_placed(
        self, placing: Placing, topic_id: int, first_seq: int, count: int, ts: int
    ) -> tuple[WalFile, int, int]:
        """Put it into the next commit, which has to be the next thing that is done: its file, offset and lsn."""
        assert self.file_no_of(placing) is None
        lsn = self._next_lsn
        placing.seal(topic_id=topic_id, first_seq=first_seq, count=count, ts=ts, lsn=lsn, synced=self.synced_lsn)
        self._placed = placing
        self._next_lsn = lsn + 1
        file = self._placed_file = WalFile(placing.path, placing.header, self._disk, fd=placing.fd, size=placing.size)
        return file, file.end, lsn

    def write(self) -> None:
        """Write all staged frames. If it fails none of them counts, and the error goes up."""
        if self._placed is not None:
            self._write_placed(self._placed, self._placed_file)
            return
        if not self._staged:
            return
        staged, size = self._staged, self._staged_bytes
        data = staged[0] if len(staged) == 1 else b"".join(staged)
        try:
            self._disk.write(self.current.fd, data, self.current.end)
        except BaseException:
            self.discard()
            self._cut()
            raise
        self.current.end += size
        self.current.last_lsn = self.written_lsn = self._next_lsn - 1
        self.frames += len(staged)
        self.batches += 1
        self.bytes_written += size
        self._staged = []
        self._staged_bytes = 0
        self._staged_from = self._next_lsn

    def _write_placed(self, placing: Placing, fresh: WalFile) -> None:
        """What is staged before the large frame goes into the current file, and the log goes on behind that frame."""
        staged, size, current = self._staged, self._staged_bytes, self.current
        try:
            if staged:
                self._disk.write(current.fd, b"".join(staged), current.end)
            placing.publish()
        except BaseException:
            self.discard()
            placing.drop()
            if staged:
                self._cut()
            raise
        current.end += size
        if staged:
            current.last_lsn = self._next_lsn - 2
        with suppress(OSError):  # the frame counts already; this only gives space back
            self._disk.shorten(current.fd, current.end)
            current.size = current.end
        self.older.append(current)
        fresh.end += placing.length
        fresh.last_lsn = self.written_lsn = self._next_lsn - 1
        self.current = self._begin(fresh)
        self.renamed = True
        self._next_file_no += 1
        self.rotations += 1
        self.frames += len(staged) + 1
        self.batches += 1
        self.bytes_written += size + placing.length
        self._placed = None
        self._staged = []
        self._staged_bytes = 0
        self._staged_from = self._next_lsn

    def _cut(self) -> None:
        """Some frames may be there in part or whole; recovery must not find them behind the next write. That may go
        into another file: this one is synced with it, or a power cut brings back what was cut off, with its lsn."""
        self.current.last_lsn = self._next_lsn
        self._disk.cut(self.current.fd, self.current.end, self.current.size)

    def discard(self) -> None:
        self._placed = None
        self.room += self._staged_bytes
        self._staged = []
        self._staged_bytes = 0
        self._next_lsn = self._staged_from

    # --- files ---

    def rotate(self, size: int) -> None:
        """Go on in a new file that has room for a frame of this size; DiskFull leaves the current one in place."""
        assert not self._staged
        fresh = self._new_file(self._file_size(size))
        self.older.append(self.current)
        self.current = self._begin(fresh)
        self.rotations += 1

    def _file_size(self, frame_size: int) -> int:
        return max(self._file_bytes, FILE_HEADER_BYTES + frame_size + limits.WAL_RESERVE_BYTES)

    def _first_file(self) -> WalFile:
        """On a full disk one that is all reserve, as much as there is space for: reads need none, deletes little, and
        who appends asks for the next file."""
        size = self._file_size(0)
        least = FILE_HEADER_BYTES + limits.CONTROL_BYTES
        reserve = self._reserve
        while size >= least:
            try:
                return self._new_file(size)
            except DiskFull:
                size = FILE_HEADER_BYTES + reserve
                reserve //= 2
        return self._new_file(FILE_HEADER_BYTES + self._reserve, reserved=False)

    def _header(self) -> WalHeader:
        """Of the next file."""
        return WalHeader(
            shard=self.shard,
            layout=self._layout,
            file_no=self._next_file_no,
            salt=int.from_bytes(os.urandom(4), "little") | 1,
            boot_id=self._boot_id,
        )

    def _new_file(self, size: int, *, reserved: bool = True) -> WalFile:
        header = self._header()
        path = os.path.join(self.folder, numbered_name(self._layout, self._next_file_no, "wal"))
        fd = self._disk.create(path, size=size if reserved else 0)
        try:
            self._disk.write(fd, header.encode(), 0)
            self._disk.sync(fd)  # a file whose header a power cut took could not be told from damage
        except (DiskFull, OSError):
            self._disk.close(fd)
            self._disk.unlink(path)
            raise
        self._next_file_no += 1
        kill_point("rotated")
        return WalFile(path, header, self._disk, fd=fd, size=size)

    @property
    def backlog_bytes(self) -> int:
        return sum(file.end for file in self.older) + self.current.end

    @property
    def files(self) -> list[WalFile]:
        return [*self.older, self.current]

    def unused(self) -> int:
        """How many of the oldest files no row reads from. A snapshot that is made now does without them; one that is
        being written may not do without a file whose last row has died since."""
        return sum(1 for _ in takewhile(lambda file: file.pins == 0, self.older))

    def trim(self, *, covered_lsn: int, unused: int | None = None) -> list[WalFile]:
        """Files that nothing needs any more; the caller unlinks them. `unused`: as many were so when the snapshot was
        made, if that is not now."""
        unused = self.unused() if unused is None else unused
        gone: list[WalFile] = []
        while len(gone) < unused and self.older[0].last_lsn <= covered_lsn:
            gone.append(self.older.pop(0))
        return gone
