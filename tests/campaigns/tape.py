"""A tape of the calls that a shard makes to its disk, in order: writes, syncs, renames, syncs of folders.

The real Disk runs on a real folder; what `os` is to it, and to whoever draws salts, is the Recorder here, which passes
every call on and notes those that change something. So a sync that Disk forgets is missing on the tape. Calls come from
several threads, but the histories of stepped.py wait for each, so the order is the same for the same seed.

A Recorder can also make a call fail (ioerrors.py): `fault` is asked before each.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from topics.walshard.log import disk as disk_module
from topics.walshard.log import wal as wal_module
from topics.walshard.log.disk import Disk
from topics.walshard.segments import flush as flush_module

Kind = Literal[
    "create", "write", "truncate", "allocate", "sync", "sync_dir", "rename", "unlink", "make_dir", "remove_dir"
]


@dataclass(frozen=True, slots=True)
class Call:
    """One change of the disk. `file` is a number that stays with a file whatever it is called."""

    kind: Kind
    path: str = ""  # of create, rename (the new one), unlink, and of folders
    old_path: str = ""  # of rename
    file: int = 0  # of create, write, truncate, allocate, sync
    offset: int = 0  # of write
    size: int = 0  # of truncate, allocate
    data: bytes = b""  # of write

    def __str__(self) -> str:
        what = self.path or f"file {self.file}"
        if self.kind == "write":
            return f"write {len(self.data)} bytes at {self.offset} of {what}"
        if self.kind in ("truncate", "allocate"):
            return f"{self.kind} {what} to {self.size}"
        return f"{self.kind} {what}" + (f" from {self.old_path}" if self.old_path else "")


Fault = Callable[[Kind, str], OSError | int | None]  # an int: so many bytes of a write get through, and no error


def no_fault(kind: Kind, what: str) -> OSError | int | None:
    return None


class Recorder:
    """Stands for the module `os`. Paths on the tape are relative to the base folder."""

    def __init__(self, base: str, seed: int) -> None:
        self._base = os.path.realpath(base)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}  # inode -> number
        self._fds: dict[int, int] = {}  # descriptor -> number of its file; of folders 0
        self._inodes: dict[int, int] = {}  # of descriptors that may still be open
        self._folders: dict[int, str] = {}
        self.calls: list[Call] = []
        self.fault: Fault = no_fault
        self.asked = 0  # how often fault() was

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def urandom(self, size: int) -> bytes:
        return self._random.randbytes(size)

    # --- what changes something ---

    def _ask(self, kind: Kind, what: str) -> int | None:
        self.asked += 1
        found = self.fault(kind, what)
        if isinstance(found, OSError):
            raise found
        return found

    def _note(self, kind: Kind, **more: Any) -> None:
        self.calls.append(Call(kind, **more))

    def _relative(self, path: str) -> str:
        folder, name = os.path.split(path)
        return os.path.relpath(os.path.join(os.path.realpath(folder), name), self._base)

    def open(self, path: str, flags: int, mode: int = 0o777, **more: Any) -> int:
        with self._lock:
            creates = bool(flags & os.O_CREAT) and not os.path.exists(path)
            if creates:
                self._ask("create", path)
            fd = os.open(path, flags, mode, **more)
            if flags & os.O_DIRECTORY:
                self._fds[fd] = 0
                self._folders[fd] = os.path.relpath(os.path.realpath(path), self._base)
                return fd
            inode = self._inodes[fd] = os.fstat(fd).st_ino
            if creates:
                self._files[inode] = len(self._files) + 1
                self._note("create", path=self._relative(path), file=self._files[inode])
            self._fds[fd] = self._files[inode]
            if flags & os.O_TRUNC and not creates:
                self._note("truncate", file=self._fds[fd])
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._fds.pop(fd, None)
            self._inodes.pop(fd, None)
            os.close(fd)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        with self._lock:
            short = self._ask("write", str(fd))
            piece = bytes(data) if short is None else bytes(data)[: max(1, short)]
            written = os.pwrite(fd, piece, offset)
            self._note("write", file=self._fds[fd], offset=offset, data=piece[:written])
            return written

    def ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            self._ask("truncate", str(fd))
            os.ftruncate(fd, size)
            self._note("truncate", file=self._fds[fd], size=size)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        with self._lock:
            self._ask("allocate", str(fd))
            if os.fstat(fd).st_size < offset + size:
                os.ftruncate(fd, offset + size)  # nobody can tell, and a folder in memory is spared the pages
            self._note("allocate", file=self._fds[fd], size=offset + size)

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)

    def fsync(self, fd: int) -> None:
        with self._lock:
            if self._fds[fd]:
                self._ask("sync", str(fd))
                self._note("sync", file=self._fds[fd])
            else:
                self._ask("sync_dir", self._folders[fd])
                self._note("sync_dir", path=self._folders[fd])

    def replace(self, old: str, new: str) -> None:
        with self._lock:
            self._ask("rename", new)
            os.replace(old, new)
            self._note("rename", path=self._relative(new), old_path=self._relative(old))

    def unlink(self, path: str) -> None:
        with self._lock:
            self._ask("unlink", path)
            os.unlink(path)
            self._note("unlink", path=self._relative(path))

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        with self._lock:
            self._ask("make_dir", path)
            os.mkdir(path, mode)
            self._note("make_dir", path=self._relative(path))

    def rmdir(self, path: str) -> None:
        with self._lock:
            self._ask("remove_dir", path)
            os.rmdir(path)
            self._note("remove_dir", path=self._relative(path))

    # --- the end of a process ---

    def close_all(self) -> None:
        with self._lock:
            for fd, inode in self._inodes.items():
                try:
                    if os.fstat(fd).st_ino == inode:
                        os.close(fd)
                except OSError:
                    pass  # closed by somebody who does not ask the disk
            self._fds.clear()
            self._inodes.clear()


class TapedDisk(Disk):
    """The real one; it ends as the disks of model.py do."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def close_all(self) -> None:
        self._recorder.close_all()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While it lasts, every Disk of this process is on the tape."""
    modules: list[Any] = [disk_module, wal_module, flush_module]
    before = [module.os for module in modules]
    for module in modules:
        module.os = recorder
    try:
        yield
    finally:
        for module, was in zip(modules, before, strict=True):
            module.os = was
