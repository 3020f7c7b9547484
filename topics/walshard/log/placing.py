"""A large append's frame, put into a log file of its own before the append takes effect.

The body is written and synced on a thread, under a temporary name: recovery and readers don't see such a file, and a
start removes it. What depends on what others do meanwhile (seqs, the lsn, and with them the header and the checksum) is
written on the loop when the append's turn has come, and then the file gets its name: from that moment the frame counts,
whole. It is the first frame of the file, and the log goes on behind it.

Frames that have to come before it, because it makes its topic or needs more seqs, are written to the current file
first. A crash right behind that leaves a topic without records, as a torn write could: nothing was answered.

While the body is written the log goes on in the current file. If that is full and another one follows it, the placed
file has to be numbered anew.

    write ─► [renumber] ─► seal ─► publish: it is a file of the log
      └──────────┴───────────┴──► drop: there is no such file
"""

from __future__ import annotations

import os

import msgspec

from topics import limits
from topics.errors import DiskFull
from topics.storage.format import FILE_HEADER_BYTES, FRAME_HEADER, FrameType, frame_bytes
from topics.storage.frames import WalHeader, encode_around
from topics.storage.paths import numbered_name
from topics.walshard.log.disk import Disk, kill_point


class Placing:
    def __init__(self, disk: Disk, folder: str, header: WalHeader, *, key: bytes, body: memoryview, room: int) -> None:
        self._disk = disk
        self._folder = folder
        self._temporary = self._path(header) + ".tmp"
        self._key = key
        self._body = body
        self._before = self._behind = b""
        self.header = header
        self.fd = -1
        self.published = False
        self.length = frame_bytes(key_len=len(key), body_len=len(body))
        self.size = FILE_HEADER_BYTES + self.length + room

    def _path(self, header: WalHeader) -> str:
        return os.path.join(self._folder, numbered_name(header.layout, header.file_no, "wal"))

    @property
    def path(self) -> str:
        return self._path(self.header)

    # --- on the thread ---

    def write(self) -> None:
        """All that is known: the file's header and the body. They are on the platter then, and whoever syncs the log
        after this frame does not wait for them."""
        disk, body = self._disk, self._body
        fd = disk.create(self._temporary, size=self.size)
        try:
            disk.write(fd, self.header.encode(), 0)
            at = FILE_HEADER_BYTES + FRAME_HEADER.size + len(self._key)
            for start in range(0, len(body), limits.COPY_BYTES):
                disk.write(fd, bytes(body[start : start + limits.COPY_BYTES]), at + start)
            disk.sync(fd)
        except (DiskFull, OSError):
            disk.close(fd)
            disk.unlink(self._temporary)
            raise
        self.fd = fd
        kill_point("placed")

    def renumber(self, file_no: int) -> None:
        """Another file has come before this one."""
        self.header = msgspec.structs.replace(self.header, file_no=file_no)
        self._disk.write(self.fd, self.header.encode(), 0)
        self._disk.sync(self.fd)

    # --- on the loop ---

    def seal(self, *, topic_id: int, first_seq: int, count: int, ts: int, lsn: int, synced: int) -> None:
        self._before, self._behind = encode_around(
            FrameType.APPEND, self.header.salt, topic_id, first_seq, count, ts, lsn, synced, self._body, self._key
        )

    def publish(self) -> None:
        """The frame becomes whole, and the file one of the log."""
        end = FILE_HEADER_BYTES + self.length
        self._disk.write(self.fd, self._behind, end - len(self._behind))
        self._disk.write(self.fd, self._before, FILE_HEADER_BYTES)
        self._disk.name(self._temporary, self.path)
        self.published = True

    def drop(self) -> None:
        """It is not wanted any more, or could not be published."""
        if self.fd >= 0 and not self.published:
            self._disk.close(self.fd)
            self._disk.unlink(self._temporary)
            self.fd = -1
