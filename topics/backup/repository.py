"""A repository: a folder with many backups, and one store of content for all of them.

    <repository>/repository.json       what this is, and its format
    <repository>/LOCK                  one at a time writes; readers keep writers out
    <repository>/objects/ab/ab12...    content, named by its SHA-256: `sha256sum` checks it
    <repository>/backups/NAME.jsonl    a backup (catalog.py). It is put in place last: without it there is none
    <repository>/backups/NAME.part     one that is under way, or was cut off: what it has copied so far

Rules: an object has its name when it is whole and synced, so one that is there need not be written again. A backup is
written when all its objects are sure. A backup goes first, then the objects that no other one names. So a crash leaves
objects that nobody needs, and never a backup that lacks one; `sweep` removes them.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from topics.actors.startup.datadir_lock import file_mode
from topics.backup.catalog import FORMAT, NAME, NAME_RULE, Backup, Summary, decode_backup, decode_summary, encode_backup
from topics.backup.disk import BackupDisk
from topics.datadir.files import reading
from topics.errors import CorruptData, FormatError, TopicsError

MARK = "repository.json"
LOCK = "LOCK"
_COMPLETE = ".jsonl"
_PART = ".part"
_TEMPORARY = ".tmp"
_READ_BYTES = 4 << 20
_SUMMARY_BYTES = 64 << 10


class Mark(msgspec.Struct, frozen=True):
    format: int


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a part."""

    name: str
    source: str
    begun_ms: int


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a part: this content is in the repository."""

    identity: str
    object: str
    bytes: int


class Put(msgspec.Struct, frozen=True):
    object: str
    bytes: int
    new: bool  # it was not there


class Repository:
    def __init__(self, path: str) -> None:
        self.path = path
        self._disk = BackupDisk()
        self._numbers = itertools.count(1)
        mark = self._path(MARK)
        try:
            with reading(mark), open(mark, "rb") as source:
                found = msgspec.json.decode(source.read(), type=Mark)
        except (FileNotFoundError, CorruptData):
            what = "is no repository of backups" if os.path.isdir(path) else "does not exist or is no folder"
            raise FormatError(
                f"{path}: {what} ({MARK} is missing or damaged); `topics backup create` makes one"
            ) from None
        if found.format > FORMAT:
            raise FormatError(
                f"{mark}: written in format {found.format}, this program reads up to {FORMAT}; upgrade topics"
            )

    @classmethod
    def made(cls, path: str) -> Repository:
        """The one that is there, or a new one in an empty folder."""
        mark = os.path.join(path, MARK)
        if not os.path.exists(mark):
            if os.path.isdir(path) and set(os.listdir(path)) - {"lost+found", f"{MARK}{_TEMPORARY}"}:
                raise TopicsError(f"{path}: is not empty and no repository of backups; name another folder with --to")
            disk = BackupDisk()
            disk.make_dir(path)
            disk.write_whole(mark, msgspec.json.encode(Mark(FORMAT)) + b"\n")
        return cls(path)

    def _path(self, *parts: str) -> str:
        return os.path.join(self.path, *parts)

    def _backup_path(self, name: str, suffix: str) -> str:
        return self._path("backups", name + suffix)

    def object_path(self, name: str) -> str:
        return self._path("objects", name[:2], name)

    @contextmanager
    def locked(self, *, writing: bool) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY
        try:
            fd = os.open(self._path(LOCK), flags | os.O_CLOEXEC, file_mode(self.path))
        except FileNotFoundError:
            yield  # nobody has ever written
            return
        try:
            try:
                fcntl.flock(fd, (fcntl.LOCK_EX if writing else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TopicsError(f"{self.path}: another `topics backup` is at work there; try again later") from None
            except OSError as exc:
                raise TopicsError(f"{self.path}: its file system has no locks ({exc.strerror}); use another") from None
            yield
        finally:
            os.close(fd)

    # --- content ---

    def holds(self, name: str, size: int) -> bool:
        try:
            return os.stat(self.object_path(name)).st_size == size
        except FileNotFoundError:
            return False

    def put(self, pieces: Iterable[bytes]) -> Put:
        """May be called by several threads. The new names are sure after `commit`."""
        digest = hashlib.sha256()
        size = 0

        def hashed() -> Iterator[bytes]:
            nonlocal size
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                yield piece

        temporary = self._path("objects", f"{next(self._numbers)}{_TEMPORARY}")
        self._disk.write_new(temporary, hashed())
        name = digest.hexdigest()
        if self.holds(name, size):
            self._disk.remove(temporary)
            return Put(name, size, False)
        final = self.object_path(name)
        folder = os.path.dirname(final)
        self._disk.make_dir(folder)
        self._disk.rename(temporary, final)
        return Put(name, size, True)

    def _settle(self, names: Iterable[str]) -> None:
        """Make names of objects sure, whoever gave them: one that was cut off could not."""
        folders = {os.path.dirname(self.object_path(name)) for name in names}
        for folder in (*sorted(folders), self._path("objects"), self.path):
            self._disk.sync_dir(folder)

    def content(self, name: str, size: int) -> Iterator[bytes]:
        """The bytes of an object. What fails its checksum is told at the end: don't use any of it before."""
        path = self.object_path(name)
        digest = hashlib.sha256()
        left = size
        try:
            with reading(path), open(path, "rb", buffering=0) as source:
                while piece := source.read(_READ_BYTES):
                    digest.update(piece)
                    left -= len(piece)
                    yield piece
        except FileNotFoundError:
            raise CorruptData(f"{path}: this content is missing") from None
        if left or digest.hexdigest() != name:
            raise CorruptData(f"{path}: this content is damaged (its checksum fails)")

    def read(self, name: str, size: int) -> bytes:
        return b"".join(self.content(name, size))

    def objects(self) -> Iterator[str]:
        for folder in self._listed("objects"):
            yield from self._listed("objects", folder)

    # --- backups ---

    def names(self) -> list[str]:
        return [name.removesuffix(_COMPLETE) for name in self._listed("backups") if name.endswith(_COMPLETE)]

    def unfinished(self) -> list[str]:
        whole = set(self.names())
        parts = [name.removesuffix(_PART) for name in self._listed("backups") if name.endswith(_PART)]
        return [name for name in parts if name not in whole]

    def _listed(self, *parts: str) -> list[str]:
        path = self._path(*parts)
        try:
            with reading(path):
                return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def summary(self, name: str) -> Summary:
        path = self._backup_path(name, _COMPLETE)
        with reading(path), open(path, "rb") as source:
            return decode_summary(source.readline(_SUMMARY_BYTES), path=path)

    def load(self, name: str) -> Backup:
        path = self._backup_path(name, _COMPLETE)
        try:
            with reading(path), open(path, "rb") as source:
                return decode_backup(source.read(), path=path)
        except FileNotFoundError:
            raise TopicsError(self.absent(name)) from None

    def absent(self, name: str) -> str:
        if name in self.unfinished():
            return f"the backup {name} was not finished: `topics backup create --name {name}` goes on with it"
        return f"there is no backup {name} in {self.path}; `topics backup ls --from {self.path}` lists them"

    def commit(self, backup: Backup) -> None:
        """From now on it is there."""
        self._settle(content for entry in backup.entries for content, _ in entry.objects())
        self._disk.write_whole(self._backup_path(backup.summary.name, _COMPLETE), encode_backup(backup))
        self._disk.remove(self._backup_path(backup.summary.name, _PART))

    # --- one that is under way ---

    def begin(self, begun: Begun) -> Part:
        """Or go on with one of this name that was cut off."""
        name = begun.name
        if not NAME.fullmatch(name):
            raise TopicsError(f"a backup can't be called {name!r}: {NAME_RULE}")
        if name in self.names():
            raise TopicsError(f"there is a backup {name} in {self.path} already: choose another name, or remove it")
        for folder in ("backups", "objects"):
            self._disk.make_dir(self._path(folder))
        for left in self._listed("objects"):
            if left.endswith(_TEMPORARY):
                self._disk.remove(self._path("objects", left))
        path = self._backup_path(name, _PART)
        earlier, done = self.part(name)
        if earlier is not None and earlier.source != begun.source:
            raise TopicsError(
                f"the backup {name} was begun from {earlier.source}: choose another name, or remove it first"
            )
        if earlier is None:
            self._disk.write_whole(path, msgspec.json.encode(begun) + b"\n")
        else:
            # A line that was cut short must not run into the next one.
            lines = [msgspec.json.encode(line) + b"\n" for line in (earlier, *done)]
            self._disk.write_whole(path, b"".join(lines))
        return Part(self._disk, path, done)

    def part(self, name: str) -> tuple[Begun | None, list[Done]]:
        """What a backup that was not finished has copied."""
        path = self._backup_path(name, _PART)
        try:
            with reading(path), open(path, "rb") as source:
                head, *lines = source.read().split(b"\n")
            begun = msgspec.json.decode(head, type=Begun)
        except (FileNotFoundError, msgspec.DecodeError, CorruptData):
            return None, []
        done: list[Done] = []
        for line in lines:
            try:
                done.append(msgspec.json.decode(line, type=Done))
            except msgspec.DecodeError:
                break
        return begun, done

    # --- removing ---

    def remove(self, names: Iterable[str]) -> int:
        """Backups, finished or not, and the content that only they had; returns the bytes of that."""
        gone = list(names)
        there = {*self.names(), *self.unfinished()}
        for name in gone:
            if name not in there:
                raise TopicsError(self.absent(name))
        wanted = self._wanted(without=gone)  # if one of the others can't be read nothing goes
        for name in gone:
            for suffix in (_COMPLETE, _PART):
                self._disk.remove(self._backup_path(name, suffix))
        self._disk.sync_dir(self._path("backups"))
        return self._sweep(wanted)

    def _wanted(self, *, without: list[str]) -> set[str]:
        wanted: set[str] = set()
        for name in self.names():
            if name not in without:
                wanted.update(content for entry in self.load(name).entries for content, _ in entry.objects())
        for name in self.unfinished():
            if name not in without:
                wanted.update(done.object for done in self.part(name)[1])
        return wanted

    def _sweep(self, wanted: set[str]) -> int:
        freed = 0
        for name in self._listed("objects"):
            if name.endswith(_TEMPORARY):
                self._disk.remove(self._path("objects", name))
        for name in self.objects():
            if name not in wanted:
                path = self.object_path(name)
                freed += os.stat(path).st_size
                self._disk.remove(path)
        return freed


class Part:
    """A backup under way: a line for each object that is in the repository."""

    def __init__(self, disk: BackupDisk, path: str, done: list[Done]) -> None:
        self.done = done
        self._disk = disk
        self._fd = disk.open_log(path)

    def add(self, done: Done) -> None:
        self._disk.add(self._fd, msgspec.json.encode(done) + b"\n")

    def close(self) -> None:
        os.close(self._fd)
