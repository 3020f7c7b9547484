"""The data folder as a whole: who may serve it (LOCK) and how it is divided among shards (topics.json).

LOCK is flocked for as long as any process lives that may write the folder. The supervisor takes the lock
and passes the locked file on to those processes: when the supervisor is killed while a shard hangs in a
write, the folder stays locked until that write is over. The text in the file says who holds it and where
its counters are; without the lock it is only what the last server left behind. The file is never removed.

topics.json is the manifest: format version, layout number, shard count. It exists before the first byte
of data. When the shard count changes, the shards write a new layout beside the old one, and replacing the
manifest is the one step that makes it count: before it a crash leaves the old layout in force, after it
the new one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from typing import BinaryIO

import msgspec

from topics.actors.startup.coldtier import settle_cold, why_away
from topics.errors import CorruptData, DataDirLocked, FormatError, ServerNotRunning, StartRefused
from topics.storage.format import FORMAT_VERSION
from topics.storage.manifest import (
    MANIFEST_NAME,
    RESTORE_NOTE,
    SNAPSHOT_NOTE,
    Manifest,
    decode_manifest,
    encode_manifest,
    is_checked,
    unfinished_restore,
)
from topics.storage.routers import encode_rules, routers_path

LOCK_NAME = "LOCK"
# A killed server's processes are gone within moments; `topics ps` borrows the lock for less than that.
LOCK_WAIT_MS = 5_000
_POLL_S = 0.02


class LockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What LOCK says; the fields that are None come when the server has got that far."""

    pid: int
    started_ms: int
    host: str
    version: str
    port: int | None = None
    board_fd: int | None = None
    board_size: int | None = None
    orders: str | None = None  # the name of the socket that takes them (supervisor/admin_socket.py)
    inspect: str | None = None  # likewise of the one that shows the board (inspect/inspect_socket.py)

    @property
    def address(self) -> str:
        return "an address not chosen yet" if self.port is None else url(self.host, self.port)


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which layout the shards write, and the one they read first where it is another."""

    layout: int
    shards: int
    old_layout: int | None = None
    old_shards: int | None = None
    cold: str | None = None  # where segments may be that are not in the data folder
    cold_id: str | None = None  # what its marker says
    cold_away: str | None = None  # why it can't be reached, and what to do

    @property
    def changes(self) -> bool:
        return self.old_layout is not None


def file_mode(folder: str) -> int:
    """Of a new file in a data folder: for its owner, and to be read by the group that may read the folder. So whoever
    makes the folder decides; a service makes it for reports that run as another user."""
    return 0o600 | (os.stat(folder or ".").st_mode & 0o040)


def folder_mode(parent: str) -> int:
    """Likewise of a new folder in it."""
    return 0o700 | (os.stat(parent or ".").st_mode & 0o050)


def new_file(path: str) -> BinaryIO:
    """For writing, with that mode. One that is there goes first: it would keep its mode, and whoever has it open."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, file_mode(os.path.dirname(path))), "wb")


def new_folders(path: str) -> None:
    """A folder and its parents, each of them new with that mode: os.makedirs would leave the parents to the umask."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path) or "."
    for folder in reversed(missing):
        try:
            os.mkdir(folder, folder_mode(os.path.dirname(folder)))
        except FileExistsError:
            if not os.path.isdir(folder):  # else another process was quicker
                raise


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class DataDir:
    """A claimed data folder."""

    def __init__(self, path: str, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd

    @classmethod
    def claim(cls, path: str, info: LockInfo, *, wait_ms: int = LOCK_WAIT_MS) -> DataDir:
        """Create the folder if it is missing and lock it; waits a moment for a holder that just died."""
        if os.path.exists(os.path.join(path, SNAPSHOT_NOTE)):
            raise StartRefused(
                f"{path} is a snapshot: its files are links to those of another data folder, which serving it would "
                "change. Copy it with `cp -r --no-preserve=links` and remove snapshot.json from the copy"
            )
        fd = _open_lock(path)
        deadline = time.monotonic() + wait_ms / 1_000
        try:
            while not _try_lock(fd, path):
                holder = _read_info(fd)
                if (holder is not None and alive(holder.pid)) or time.monotonic() >= deadline:
                    raise _locked(path, holder)
                time.sleep(_POLL_S)
        except BaseException:
            os.close(fd)
            raise
        folder = cls(path, fd)
        folder.announce(info)
        return folder

    def announce(self, info: LockInfo) -> None:
        """Say who holds the folder. One line in one write: a reader takes the first line only."""
        line = msgspec.json.encode(info) + b"\n"
        try:
            os.pwrite(self.lock_fd, line, 0)
            os.ftruncate(self.lock_fd, len(line))
        except OSError as exc:
            raise StartRefused(f"can't write in the data folder {self.path}: {exc.strerror}") from None

    def plan_layout(self, wal_shards: int, *, cold_dir: str | None = None) -> LayoutPlan:
        """Read the manifest, or write the first one, or one that names another cold tier."""
        manifest = read_manifest(self.path)
        if manifest is None:
            if os.path.exists(os.path.join(self.path, RESTORE_NOTE)):
                raise StartRefused(unfinished_restore(self.path))
            if _holds_data(self.path):
                raise StartRefused(
                    f"{self.path} holds data but no {MANIFEST_NAME}, which says how to read it: restore that "
                    "file from a backup, or choose an empty folder with TOPICS_DATA_DIR"
                )
            manifest = settle_cold(self.path, Manifest(format=FORMAT_VERSION, layout=1, shards=wal_shards), cold_dir)
            write_manifest(self.path, manifest)
        elif (settled := settle_cold(self.path, manifest, cold_dir)) != manifest:
            manifest = settled
            write_manifest(self.path, manifest)
        if not manifest.routers:
            # The file first: a manifest that knows of one that was never there would tell of a loss.
            _begin_rules(self.path)
            manifest = msgspec.structs.replace(manifest, routers=True)
            write_manifest(self.path, manifest)
        elif not _is_checked(self.path):
            write_manifest(self.path, manifest)
        if manifest.shards == wal_shards:
            return LayoutPlan(
                layout=manifest.layout,
                shards=wal_shards,
                cold=manifest.cold,
                cold_id=manifest.cold_id,
                cold_away=why_away(manifest),
            )
        return LayoutPlan(
            layout=manifest.layout + 1,
            shards=wal_shards,
            old_layout=manifest.layout,
            old_shards=manifest.shards,
            cold=manifest.cold,
            cold_id=manifest.cold_id,
            cold_away=why_away(manifest),
        )

    def commit_layout(self, plan: LayoutPlan) -> LayoutPlan:
        """Make the new layout the one that counts; returns the plan for shards started from now on."""
        before = read_manifest(self.path)
        assert before is not None, "there is one before there is a plan"
        write_manifest(self.path, msgspec.structs.replace(before, layout=plan.layout, shards=plan.shards))
        return LayoutPlan(layout=plan.layout, shards=plan.shards, cold=plan.cold, cold_id=plan.cold_id)

    def close(self) -> None:
        os.close(self.lock_fd)


def read_manifest(data_dir: str, *, format_version: int = FORMAT_VERSION) -> Manifest | None:
    path = os.path.join(data_dir, MANIFEST_NAME)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StartRefused(f"can't read {path}: {exc.strerror}") from None
    try:
        return decode_manifest(text, path=path, format_version=format_version)
    except (CorruptData, FormatError) as exc:
        raise StartRefused(str(exc)) from None


def _is_checked(data_dir: str) -> bool:
    with open(os.path.join(data_dir, MANIFEST_NAME), "rb") as file:
        return is_checked(file.read())


def write_manifest(data_dir: str, manifest: Manifest) -> None:
    """Replace the manifest: once this returns the new one survives a power cut, until then the old one."""
    path = os.path.join(data_dir, MANIFEST_NAME)
    temporary = f"{path}.tmp"
    try:
        with new_file(temporary) as file:
            file.write(encode_manifest(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(data_dir)
    except OSError as exc:
        raise StartRefused(f"can't write {path}: {exc.strerror}") from None


def _begin_rules(data_dir: str) -> None:
    """A file of router rules without a rule, unless there is one: from then on a missing file is a lost one."""
    path = routers_path(data_dir)
    if os.path.exists(path):
        return
    try:
        with new_file(f"{path}.tmp") as file:
            file.write(encode_rules([]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
        _sync_folder(data_dir)
    except OSError as exc:
        raise StartRefused(f"can't write {path}: {exc.strerror}") from None


def read_lock_info(data_dir: str) -> LockInfo:
    """Who serves this folder, for tools that look from outside."""
    nobody = ServerNotRunning(f"no server is running on {data_dir}; start one with `topics serve`")
    try:
        fd = os.open(os.path.join(data_dir, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise nobody from None
    except PermissionError:
        raise ServerNotRunning(f"can't read {data_dir}: run this as the user that the server runs as") from None
    try:
        info = _read_info(fd)
        # A shared lock that is granted proves that nobody holds the exclusive one; closing gives it back.
        if info is None or _try_lock(fd, data_dir, shared=True) or not alive(info.pid):
            raise nobody
        return info
    finally:
        os.close(fd)


def _open_lock(path: str) -> int:
    try:
        if not os.path.isdir(path):
            os.makedirs(path, mode=0o700)
            _sync_folder(os.path.dirname(os.path.abspath(path)))
        return os.open(os.path.join(path, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, file_mode(path))
    except OSError as exc:
        raise StartRefused(
            f"can't use {path} as the data folder: {exc.strerror}. Make it writable for this user, or choose "
            "another with TOPICS_DATA_DIR"
        ) from None


def _try_lock(fd: int, path: str, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as exc:
        if exc.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            raise StartRefused(
                f"the filesystem of {path} has no file locks: use a local disk for the data folder"
            ) from None
        raise


def _locked(path: str, holder: LockInfo | None) -> DataDirLocked:
    elsewhere = "or choose another folder with TOPICS_DATA_DIR"
    if holder is not None and alive(holder.pid):
        return DataDirLocked(
            f"the data folder {path} is in use by the server with pid {holder.pid} on {holder.address}: "
            f"stop that one first (kill {holder.pid}), {elsewhere}"
        )
    last = "" if holder is None else f" (last served by pid {holder.pid}, which is gone)"
    return DataDirLocked(
        f"the data folder {path} is locked by a process that can't be named{last} and may still be writing: "
        f"find it with `fuser {os.path.join(path, LOCK_NAME)}`, {elsewhere}"
    )


def _read_info(fd: int) -> LockInfo | None:
    line = os.pread(fd, 4096, 0).partition(b"\n")[0]
    try:
        return msgspec.json.decode(line, type=LockInfo)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


_PF_EXITING = 0x4


def alive(pid: int) -> bool:
    """Whether it runs. One that ends does not, although the kernel may not have closed its files yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return is_running(file.read())
    except ProcessLookupError:
        return False
    except OSError:
        return _takes_signals(pid)


def is_running(stat: bytes) -> bool:
    """By what /proc/<pid>/stat says: `pid (name) state ppid pgrp session tty tpgid flags …`."""
    fields = stat.rpartition(b")")[2].split()
    return len(fields) > 6 and fields[0] not in (b"Z", b"X") and not int(fields[6]) & _PF_EXITING


def _takes_signals(pid: int) -> bool:
    """Where /proc is mounted with hidepid it does not show a process that is not dumpable, even to its own user. And
    where we have no descriptor left we can't look there."""
    if pid <= 0:
        return False  # kill would take it for a group
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _holds_data(data_dir: str) -> bool:
    try:
        return bool(os.listdir(os.path.join(data_dir, "wal")))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
