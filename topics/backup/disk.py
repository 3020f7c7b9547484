"""The only place of this room that writes. Whatever gets its final name is whole and synced by then.

Kill points as in walshard/log/disk.py, and two more: `made` (a folder is there) and `unlinked`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress

from topics.actors.startup.datadir_lock import file_mode, new_folders
from topics.errors import DiskFull
from topics.walshard.log.disk import Disk, kill_point

_FULL = (errno.ENOSPC, errno.EDQUOT)


class BackupDisk(Disk):
    def make_dir(self, path: str) -> None:
        super().make_dir(os.path.abspath(path))
        kill_point("made")

    def add_dir(self, path: str) -> None:
        """A folder and its parents; sure when the folders above them are synced."""
        new_folders(path)
        kill_point("made")

    def write_new(self, path: str, pieces: Iterable[bytes], *, patches: Iterable[tuple[int, bytes]] = ()) -> None:
        """A synced file of these bytes, the patches (offset, bytes) on top. If it can't be made there is none."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, file_mode(os.path.dirname(path)))
        try:
            at = 0
            for piece in pieces:
                self.write(fd, piece, at)
                at += len(piece)
            for offset, piece in patches:
                self.write(fd, piece, offset)
            self.sync(fd)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(path)
            if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _FULL):
                raise DiskFull(f"no space to write {path}; make room, and the same command goes on") from error
            raise
        finally:
            os.close(fd)

    def rename(self, path: str, final: str) -> None:
        """Durable once the folder is synced."""
        kill_point("rename")
        os.replace(path, final)
        kill_point("renamed")

    def remove(self, path: str) -> None:
        self.unlink(path)
        kill_point("unlinked")

    def open_log(self, path: str) -> int:
        """A file that is added to."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, file_mode(os.path.dirname(path)))

    def add(self, fd: int, data: bytes) -> None:
        kill_point("write")
        if os.write(fd, data) < len(data):
            raise DiskFull(f"no space to write {len(data)} bytes")
        kill_point("written")

    def add_to(self, path: str, data: bytes) -> None:
        fd = self.open_log(path)
        try:
            self.add(fd, data)
        finally:
            os.close(fd)

    def sync_file(self, path: str) -> None:
        fd = self.open(path)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def link(self, target: str, path: str) -> None:
        """A symbolic link: seen under that name, and not copied."""
        os.symlink(target, path)
