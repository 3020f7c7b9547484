"""The part of a snapshot that is in the cold tier: hard links to segments, on the disk where those are.

    <cold>/snapshots/NAME-0123456789ab/             one folder for each snapshot, the digits drawn at random
    <cold>/snapshots/NAME-0123456789ab/links.json   its marker, with the same digits: written first, removed last

snapshot.json names the folder, and it is a file that can be changed, copied or damaged. So a path that it names is
removed only if all of this holds; otherwise nothing is:

- it is directly below `snapshots` of the cold tier that the manifest of the data folder names;
- neither it nor `snapshots` is a symbolic link, and it is a folder;
- its marker has its digits, or there is nothing in it. Earlier versions wrote no marker: without one the folder must
  have the name that the snapshot itself has.

Folders are opened once and everything below is done relative to them: what is checked is what is removed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from topics.actors.startup.datadir_lock import new_file, new_folders
from topics.errors import TopicsError

MARKER = "links.json"
UNFINISHED = ".tmp"  # how the name of a snapshot ends that is being made
_SNAPSHOTS = "snapshots"
_FOLDER = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)-([0-9a-f]{12})")
_MARKER_BYTES = 4096
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Marker(msgspec.Struct):
    id: str


def new_links(cold: str, name: str) -> str:
    """A path of its own for each snapshot: one may be renamed, and other places have the same names."""
    return os.path.join(os.path.abspath(cold), _SNAPSHOTS, f"{name}-{secrets.token_hex(6)}")


def begin_links(path: str) -> None:
    """The folder with its marker, unless it has begun."""
    marker = os.path.join(path, MARKER)
    if not os.path.exists(marker):
        new_folders(path)
        with new_file(marker) as file:
            file.write(msgspec.json.encode(_Marker(path[-12:])) + b"\n")


def check_links(path: str, *, cold: str | None, snapshot: str) -> None:
    """Raises TopicsError unless `path` may be removed with the snapshot in the folder `snapshot`, or is gone."""
    with _opened(path, cold=cold, snapshot=snapshot):
        pass


def remove_links(path: str, *, cold: str | None, snapshot: str) -> None:
    """Check, and remove it. What was half removed can be removed again."""
    with _opened(path, cold=cold, snapshot=snapshot) as home:
        if home is not None:
            remove_folder(os.path.basename(path), last=MARKER, within=home)


def unlink_in(name: str, file: str, *, within: int) -> None:
    """A file of a folder, which is no symbolic link."""
    fd = os.open(name, _OPEN_FOLDER, dir_fd=within)
    try:
        os.unlink(file, dir_fd=fd)
    finally:
        os.close(fd)


def remove_folder(name: str, *, last: str, within: int) -> None:
    """A folder and what is in it, the file `last` after everything else. Symbolic links go, and not what they lead to.
    `within` is the descriptor of the folder that it is in."""
    fd = os.open(name, _OPEN_FOLDER, dir_fd=within)
    try:
        for entry in os.listdir(fd):
            if entry == last:
                continue
            if stat.S_ISDIR(os.lstat(entry, dir_fd=fd).st_mode):
                shutil.rmtree(entry, dir_fd=fd)
            else:
                os.unlink(entry, dir_fd=fd)
        with suppress(FileNotFoundError):
            os.unlink(last, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=within)


@contextmanager
def _opened(path: str, *, cold: str | None, snapshot: str) -> Iterator[int | None]:
    """The descriptor of the folder that `path` is in, if `path` may be removed; None if there is nothing."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except ValueError:  # a null byte
        raise _refused(path, snapshot, "which can't be a path") from None
    if cold is None:
        raise _refused(path, snapshot, "and the data folder has no cold tier (--data-dir says which folder it is)")
    home_path, base = os.path.join(os.path.abspath(cold), _SNAPSHOTS), os.path.basename(path)
    named = _FOLDER.fullmatch(base)
    if os.path.dirname(path) != home_path or named is None:
        raise _refused(path, snapshot, f"which is not the folder of a snapshot in {home_path}")
    home = fd = -1
    try:
        home = os.open(home_path, _OPEN_FOLDER)
        fd = os.open(base, _OPEN_FOLDER, dir_fd=home)
        entries, marked = set(os.listdir(fd)) - {MARKER}, _read_marker(fd)
        own_name = os.path.basename(snapshot).removesuffix(UNFINISHED)
        if entries and marked != named[2] and not (marked is None and named[1] == own_name):
            raise _refused(path, snapshot, f"which has no {MARKER} that says so")
        yield home
    except OSError as exc:
        if fd < 0 and exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _refused(path, snapshot, "which is no folder, or is reached by a symbolic link") from None
        raise
    finally:
        for opened in (home, fd):
            if opened >= 0:
                os.close(opened)


def _read_marker(folder: int) -> str | None:
    """None: there is none, or a crash came while it was written."""
    try:
        fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        return msgspec.json.decode(os.read(fd, _MARKER_BYTES), type=_Marker).id
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    finally:
        os.close(fd)


def _refused(path: str, snapshot: str, why: str) -> TopicsError:
    return TopicsError(
        f"{snapshot}: its segments in the cold tier are said to be in {path}, {why}. Nothing was removed. If they are "
        f"this snapshot's, remove them by hand and run this again; if not, remove {snapshot} alone by hand"
    )
