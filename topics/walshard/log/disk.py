"""The only place that writes, syncs and renames data files. A test gives the shard a Disk that fails on purpose.

Rules: a short write is a failed write; ENOSPC and EDQUOT are DiskFull and leave nothing that counts, unless sync()
finds them: what was written before it is in doubt then. Every other error goes up. A kill point at each boundary lets
a test end the process exactly there: TOPICS_KILL_POINT=name or name:n for the n-th time.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from topics import limits
from topics.actors.startup.datadir_lock import file_mode, folder_mode
from topics.errors import CorruptData, DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT)
_point, _, _times = os.environ.get("TOPICS_KILL_POINT", "").partition(":")
_left = int(_times or 1)
KILL_POINTS = bool(_point)  # for callers that can't afford the call


def kill_point(name: str) -> None:
    """End this process here, as kill -9 would, if the environment asks for it."""
    global _left
    if name == _point:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _needs_space(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(f"no space {what}") from error
        raise


class Disk:
    def make_dir(self, path: str) -> None:
        """Create a folder, its parents and their entries, durably."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            made = True
            with _needs_space(f"for the folder {folder}"):
                try:
                    os.mkdir(folder, folder_mode(os.path.dirname(folder)))
                except FileExistsError:
                    made = False  # another shard was quicker; its entry is synced here all the same
            try:
                self.sync_dir(os.path.dirname(folder))
            except DiskFull:
                if made:
                    self.remove_empty(folder)  # or the next try would take its entry for durable
                raise

    def create(self, path: str, *, size: int = 0) -> int:
        """A new file, its space reserved and its entry durable; returns the descriptor."""
        mode = file_mode(os.path.dirname(path))
        with _needs_space(f"for {size} bytes at {path}"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            try:
                if size:
                    os.posix_fallocate(fd, 0, size)
                self.sync_dir(os.path.dirname(path))
            except (DiskFull, OSError):
                os.close(fd)
                os.unlink(path)
                raise
        return fd

    def open(self, path: str, *, write: bool = False) -> int:
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        kill_point("write")
        try:
            written = os.pwrite(fd, data, offset)
            while written < len(data):
                more = os.pwrite(fd, memoryview(data)[written:], offset + written)
                if more == 0:
                    raise OSError(errno.ENOSPC, "write returned 0")
                written += more
        except OSError as error:
            if error.errno in _FULL:
                raise DiskFull(f"no space to write {len(data)} bytes") from error
            raise
        kill_point("written")

    def cut(self, fd: int, end: int, size: int) -> None:
        """Forget everything behind `end`, and reserve the space up to `size` again if there is any."""
        os.ftruncate(fd, end)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in _FULL:
                raise

    def shorten(self, fd: int, end: int) -> None:
        """Give back the space behind `end`: nothing will be written there."""
        os.ftruncate(fd, end)

    def name(self, temporary: str, path: str) -> None:
        """Give a file that is written its name. Its entry is durable after the next sync_dir()."""
        kill_point("rename")
        os.replace(temporary, path)
        kill_point("renamed")

    def sync(self, fd: int) -> None:
        kill_point("sync")
        os.fdatasync(fd)
        kill_point("synced")

    def sync_dir(self, path: str) -> None:
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _needs_space(f"for the entries of {path}"):
                os.fsync(fd)
        finally:
            os.close(fd)

    def write_whole(self, path: str, data: bytes) -> None:
        """Replace a file: all of the new content or all of the old one, whatever happens."""
        temporary = path + ".tmp"
        mode = file_mode(os.path.dirname(path))
        with _needs_space(f"for {len(data)} bytes at {path}"):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            try:
                try:
                    self.write(fd, data, 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                kill_point("rename")
                os.replace(temporary, path)
            except BaseException:
                self.unlink(temporary)
                raise
        kill_point("renamed")
        self.sync_dir(os.path.dirname(path))

    def copy(self, source: str, path: str, size: int, *, go_on: Callable[[float], bool]) -> bool:
        """The first `size` bytes of a file to another place, durably and all or nothing. After each piece `go_on` is
        told how long it took; False: it is given up."""
        temporary = path + ".tmp"
        with open(source, "rb", buffering=0) as reader:
            mode = file_mode(os.path.dirname(path))
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            try:
                at = 0
                while at < size:
                    started = time.monotonic()
                    piece = self.read(reader.fileno(), min(limits.COPY_BYTES, size - at), at)
                    self.write(fd, piece, at)
                    at += len(piece)
                    if not go_on(time.monotonic() - started):
                        os.unlink(temporary)
                        return False
                kill_point("copied")
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # nobody is about to read it
            except BaseException:
                self.unlink(temporary)
                raise
            finally:
                os.close(fd)
        kill_point("relocate")
        os.replace(temporary, path)
        kill_point("relocated")
        self.sync_dir(os.path.dirname(path))
        return True

    def truncate(self, path: str, size: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        data = os.pread(fd, length, offset)
        if len(data) != length:
            raise CorruptData(f"expected {length} bytes at offset {offset}, the file has {len(data)}")
        return data

    def unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass

    def remove_empty(self, path: str) -> None:
        """Remove a folder if there is nothing in it."""
        try:
            os.rmdir(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def remove_dir(self, path: str) -> None:
        """Remove a folder of plain files; what is already gone is fine."""
        try:
            for name in os.listdir(path):
                self.unlink(os.path.join(path, name))
            os.rmdir(path)
        except FileNotFoundError:
            pass
