"""A region of shared memory: an anonymous POSIX object, a mapping of it, and the fd that passes it on.

Rules: the name is removed before the region is used, so a region lives exactly as long as somebody holds
its fd or its mapping, and whatever way the processes die nothing is left over. All its pages are reserved
when it is made: a full /dev/shm is an error here, where it can be reported, and not a SIGBUS in the
middle of a write.

A crash in the few microseconds between making the name and removing it leaves an empty object under
`/topics-<pid>-...`, which holds no memory; the next server sweeps it away.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets

import posix_ipc

from topics.errors import TopicsError

_PREFIX = "topics-"
_SHM_DIR = "/dev/shm"
_MFD_NOEXEC_SEAL = 8
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class OutOfSharedMemory(TopicsError):
    """The shared-memory filesystem has no room for a region of this size."""


class Region:
    __slots__ = ("_map", "fd", "size", "view")

    def __init__(self, fd: int, size: int, *, writable: bool = True) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=access)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int, label: str = "") -> Region:
        """A new region of zeros, reserved in full. /proc/<pid>/fd shows the label to those who may look there."""
        fd = _nameless(label)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(fd, size)
        except OSError as exc:
            os.close(fd)
            if exc.errno in (errno.ENOSPC, errno.ENOMEM):
                raise OutOfSharedMemory(
                    f"no room for {size} bytes of shared memory in {_SHM_DIR}: enlarge it (in a container "
                    "--shm-size), or make the rings smaller with TOPICS_RING_BYTES"
                ) from None
            raise

    @classmethod
    def attach(cls, fd: int, size: int, *, writable: bool = True) -> Region:
        """Map a region that another process made; the fd belongs to the region from here on."""
        return cls(fd, size, writable=writable)

    def close_fd(self) -> None:
        """Keep the mapping and give up the fd, for a region that is not passed on."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Let go. Where slices of the view are still in use the mapping goes with the last of them."""
        self.close_fd()
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # mmap refuses to pull the memory from under a slice; garbage collection finishes this


def _nameless(label: str) -> int:
    """The fd of a new empty object whose name is gone again."""
    while True:
        name = f"/{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}{label and '-' + label}"
        try:
            memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
        except posix_ipc.ExistentialError:
            continue
        try:
            memory.unlink()
        except posix_ipc.ExistentialError:
            pass  # swept away by a server that just started; all we want is the fd
        fd: int = memory.fd
        os.set_inheritable(fd, False)
        return fd


def sealed_copy(content: bytes) -> int:
    """The fd of memory with this in it, which nobody can change any more, whoever owns it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("topics-sealed", flags | _MFD_NOEXEC_SEAL)  # some systems demand it
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("topics-sealed", flags)  # a kernel that does not know it
    try:
        os.posix_fallocate(fd, 0, len(content))
        with mmap.mmap(fd, len(content)) as memory:
            memory[:] = content
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """Whether it can be mapped without fear: it will neither change nor shrink. OSError: it is no memory at all."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def free_bytes() -> int:
    """What the shared-memory filesystem still has room for."""
    try:
        found = os.statvfs(_SHM_DIR)
    except OSError:
        return 0
    # A tmpfs mounted without a limit reports no blocks at all.
    return found.f_bavail * found.f_frsize if found.f_blocks else 2**63


def sweep_leftovers() -> int:
    """Remove the names that processes killed inside create() left behind; returns how many."""
    removed = 0
    try:
        names = os.listdir(_SHM_DIR)
    except OSError:
        return 0
    for name in names:
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if not name.startswith(_PREFIX) or not pid.isdigit() or os.path.exists(f"/proc/{pid}"):
            continue
        try:
            posix_ipc.unlink_shared_memory(f"/{name}")
            removed += 1
        except (posix_ipc.Error, OSError):
            pass  # another user's, or another server was faster
    return removed
