"""The log of one shard, read from outside: its WAL files in order, and how far each has been read.

It may grow while we read. Frames come once: the next look goes on behind the last one, if that is still there (a write
that fails is cut off again, and its numbers are given to others). What stands behind the last good frame:

    behind it                              here it is
    zeros                                  the end, for now
    the beginning of a frame               the end: a write that is under way, or was cut short; `torn` says where
    what was a whole frame, or a good one  the end (storage/recovery.py)
      behind it, and a power cut left it
    the same otherwise                     damage, if it is still so at a second look

Files are read, not mapped: a server that starts cuts off what is torn, and a page that is mapped and no longer there
would end the process.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import NamedTuple

import msgspec

from topics.datadir.files import Files, Superseded, reading
from topics.errors import CorruptData
from topics.storage.format import CHECKSUM, FILE_HEADER_BYTES, FRAME_HEADER, frame_bytes
from topics.storage.frames import (
    WHOLE,
    Frame,
    decode_frame,
    decode_wal_header,
    find_frame_after,
    frames_after,
    header_is_whole,
)
from topics.storage.paths import parse_numbered, shard_dir
from topics.storage.recovery import Behind, TailVerdict, judge_tail, look_behind, sum_up

_READ_BYTES = 1 << 20
_ZEROS = bytes(_READ_BYTES)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_LOOKS = 2  # at what looks like damage
_PAUSE_S = 0.02  # between them: a write that is under way may show its end and not its beginning
_RESTORE = "Restore it from a backup"


class WalFile(msgspec.Struct):
    """A file of the log, and how far it has been read."""

    file: str
    number: int
    salt: int
    boot_id: bytes
    end: int = FILE_HEADER_BYTES
    first_lsn: int = 0
    last_lsn: int = 0
    records: int = 0  # in all its batches
    checksum: bytes = b""  # of the last frame that was read


class Placed(NamedTuple):
    """A frame, and where it stands."""

    frame: Frame
    wal: WalFile
    offset: int


class Log:
    def __init__(self, files: Files, *, shard: int) -> None:
        self.wals: list[WalFile] = []  # those that have a header
        self.torn: list[tuple[str, int]] = []  # (file, offset): bytes behind the log that are no frames
        self.last_lsn = 0  # 0: no frame was found
        self._files = files
        self._shard = shard
        self._folder = shard_dir("", shard)
        self._covered = self._file_no = 0
        self._paths: list[str] = []
        self._cut = False  # nothing behind this place counts, whatever is there

    def follow(self, paths: list[str], *, covered: int, file_no: int) -> Iterator[Placed]:
        """What has come since the last time. The snapshot covers frames up to `covered` and was made when this file
        was the current one; 0: there is none."""
        names = [self._files.relative(path) for path in paths]
        for wal in self.wals:
            if wal.file not in names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), wal.file)
        if file_no and all(_number(name) != file_no for name in names):
            raise CorruptData(
                f"{self._folder}: WAL file {file_no:012x} is missing; the snapshot knows of it. {_RESTORE}"
            )
        known = {wal.file: wal for wal in self.wals}
        self._covered, self._file_no = covered, file_no
        self._paths = paths
        self.torn = []
        self._cut = False
        for path, name in zip(paths, names, strict=True):
            found = known.get(name)
            if found is None:
                found = self._open(path, name, last=path is paths[-1])
                if found is None:
                    continue
                self.wals.append(found)
            elif found is not self.wals[-1]:
                continue  # the log went on in the next file when it was last read
            yield from self._read(found, path)
            if self._cut:
                break
        if self.last_lsn and self.last_lsn < covered:
            wal = [wal for wal in self.wals if wal.last_lsn][-1]
            raise CorruptData(
                f"{wal.file}: the log ends at offset {wal.end} with frame {self.last_lsn}, but the snapshot knows of "
                f"frame {covered}. {_RESTORE}"
            )

    def _open(self, path: str, name: str, *, last: bool) -> WalFile | None:
        """None: it has no header yet, so it holds no frame."""
        with reading(name), open(path, "rb", buffering=0) as source:
            fd = source.fileno()
            head = os.pread(fd, FILE_HEADER_BYTES, 0)
            if not header_is_whole(head):
                if last and _number(name) > self._file_no and not find_data(fd, FILE_HEADER_BYTES):
                    return None
                head = os.pread(fd, FILE_HEADER_BYTES, 0)  # it may have come just now
            if not any(head):
                raise CorruptData(f"{name}: this WAL file has lost its header. {_RESTORE}")
            header = decode_wal_header(head, path=name)
        parsed = parse_numbered(os.path.basename(path))
        if (self._shard, parsed) != (header.shard, (header.layout, header.file_no, "wal")):
            raise CorruptData(
                f"{name}: this is file {header.file_no:012x} of layout {header.layout}, shard {header.shard}, under "
                "another name. Put it back to where it belongs"
            )
        return WalFile(name, header.file_no, header.salt, header.boot_id)

    # --- frames ---

    def _read(self, wal: WalFile, path: str) -> Iterator[Placed]:
        with reading(wal.file), open(path, "rb", buffering=0) as source:
            fd = source.fileno()
            if wal.checksum and os.pread(fd, CHECKSUM.size, wal.end - CHECKSUM.size) != wal.checksum:
                raise Superseded
            looks, seen = _LOOKS, -1
            while True:
                yield from self._frames(wal, fd)
                if self._cut or not find_data(fd, wal.end):
                    return
                looks = looks - 1 if wal.end == seen else _LOOKS - 1
                seen = wal.end
                if self._judge(wal, fd, sure=looks <= 0):
                    return

    def _frames(self, wal: WalFile, fd: int) -> Iterator[Placed]:
        base, data = wal.end, b""
        salt, header_bytes, unpack = wal.salt, FRAME_HEADER.size, FRAME_HEADER.unpack_from
        size = os.fstat(fd).st_size
        while True:
            at = wal.end - base
            frame = decode_frame(data, at, salt=salt)
            if frame is None:
                # No frame, or its end is not in memory yet.
                need = header_bytes + CHECKSUM.size
                if len(data) - at >= need:
                    found, body_len, kind, _, key_len, *_ = unpack(data, at)
                    need = frame_bytes(key_len=key_len, body_len=body_len)
                    if found != salt or kind == 0 or need <= len(data) - at:
                        return
                if wal.end + need > size:
                    return
                base, data = wal.end, os.pread(fd, max(_READ_BYTES, need), wal.end)
                if len(data) < need:
                    return
                continue
            offset, length = wal.end, frame.length
            if frame.lsn != self.last_lsn + 1 and (self.last_lsn or frame.lsn > self._covered + 1):
                self._jump(wal, fd, frame, offset)
                return
            self.last_lsn = wal.last_lsn = frame.lsn
            wal.first_lsn = wal.first_lsn or frame.lsn
            wal.end = offset + length
            wal.checksum = data[at + length - CHECKSUM.size : at + length]
            yield Placed(frame, wal, offset)

    def _jump(self, wal: WalFile, fd: int, frame: Frame, offset: int) -> None:
        """Frames are missing before this one."""
        before = self.last_lsn or self._covered
        rest = os.pread(fd, os.fstat(fd).st_size - offset, offset)
        behind = chain([frame], frames_after(rest, salt=wal.salt, start=frame.length))
        if self._verdict(wal, Behind.PIECE, behind) is TailVerdict.CORRUPT:
            place = f"{wal.file}: frame {frame.lsn} at offset {offset} follows frame {before}"
            if self.torn and self.torn[-1][0] != wal.file:
                file, end = self.torn[-1]
                place = f"{file}: damaged at offset {end}, and {place}"
            raise CorruptData(f"{place}; a WAL file or a part of one is missing. {_RESTORE}")
        self._cut = True
        self.torn.append((wal.file, offset))

    def _verdict(self, wal: WalFile, rubbish: Behind, behind: Iterator[Frame]) -> TailVerdict:
        """Of a place that should be a frame; behind: the good ones that follow in its file."""
        first = next(behind, None)
        later = None if first is None else sum_up(chain([first], behind, self._newer(wal)))
        # A file before the one that the snapshot was made in is in it to its end.
        kept = wal.number < self._file_no or same_boot(wal)
        return judge_tail(last_lsn=self.last_lsn, behind=rubbish, later=later, same_boot=kept, covered=self._covered)

    def _newer(self, wal: WalFile) -> Iterator[Frame]:
        """The good frames of later files."""
        for path in self._paths:
            name = self._files.relative(path)
            if _number(name) > wal.number:
                with reading(name), open(path, "rb") as source:
                    data = source.read()
                if header_is_whole(data[:FILE_HEADER_BYTES]) or any(data[FILE_HEADER_BYTES:]):
                    salt = decode_wal_header(data[:FILE_HEADER_BYTES], path=name).salt
                    yield from frames_after(data, salt=salt, start=FILE_HEADER_BYTES)

    def _judge(self, wal: WalFile, fd: int, *, sure: bool) -> bool:
        """There is something behind the last frame. False: look again, a write is or was under way."""
        rest = os.pread(fd, os.fstat(fd).st_size - wal.end, wal.end)
        if decode_frame(rest, 0, salt=wal.salt) is not None:
            return False
        rubbish = look_behind(rest, salt=wal.salt)
        verdict = self._verdict(wal, rubbish, frames_after(rest, salt=wal.salt, start=1))
        if verdict is TailVerdict.CORRUPT:
            if not sure:
                time.sleep(_PAUSE_S)
                return False
            followed = find_frame_after(rest, salt=wal.salt, start=1) is not None
            proof = "good frames follow" if followed else "a whole frame stood here"
            raise CorruptData(
                f"{wal.file}: damaged at offset {wal.end} (after frame {self.last_lsn}), and {proof}. {_RESTORE}"
            )
        self._cut = verdict is TailVerdict.UNSYNCED
        self.torn.append((wal.file, wal.end))
        return True


def _number(name: str) -> int:
    parsed = parse_numbered(os.path.basename(name))
    return 0 if parsed is None else parsed[1]


def find_data(fd: int, start: int) -> bool:
    """Whether there is anything but zeros from here on. Files are reserved in full: most of it was never written, and
    the file system knows that."""
    at = start
    while True:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return False
            if exc.errno != errno.EINVAL:  # it does not know: read everything
                raise
        piece = os.pread(fd, _READ_BYTES, at)
        if not piece:
            return False
        if piece != _ZEROS[: len(piece)]:
            return True
        at += len(piece)


def same_boot(wal: WalFile) -> bool:
    """Whether what this machine wrote can't be missing. Elsewhere nobody can tell; a file of another machine counts as
    one that lived through a power cut, unless it was put in place whole."""
    return wal.boot_id in (WHOLE, _boot_id())


@cache
def _boot_id() -> bytes:
    try:
        with open(_BOOT_ID, encoding="ascii") as source:
            return bytes.fromhex(source.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return b""
