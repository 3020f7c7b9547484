"""Put a backup back: a data folder that a server can be started on, whose every byte was checked on the way.

The manifest topics.json is written last, and no server starts without it where there is a log; so a restore that was
cut off is never taken for a data folder. It can be gone on with: a file that has its name is whole. Until it is done a
note says which backup this is going to be, and the folder is locked as a server would lock it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import msgspec

from topics import __version__
from topics.actors.startup.datadir_lock import DataDir, LockInfo, read_lock_info, write_manifest
from topics.backup.catalog import Backup, Entry, Summary, decode_flags, encode_backup
from topics.backup.disk import BackupDisk
from topics.backup.division import Old, divide
from topics.backup.repository import Repository
from topics.errors import CorruptData, FormatError, ServerNotRunning, TopicsError
from topics.storage.format import DELETED, FILE_HEADER_BYTES, FORMAT_VERSION
from topics.storage.frames import Frame, WalHeader, decode_wal_header, scan
from topics.storage.manifest import MANIFEST_NAME, RESTORE_NOTE, Manifest
from topics.storage.paths import parse_numbered, shard_dir
from topics.storage.snapshot import decode_snapshot
from topics.walshard.log.disk import kill_point

Progress = Callable[[str, int, int], None]  # (file, bytes done, bytes in all)
_TEMPORARY = ".tmp"
_HARMLESS = {"LOCK", "lost+found", RESTORE_NOTE, RESTORE_NOTE + _TEMPORARY}
_THREADS = 8
_FLUSH_BYTES = 4 << 20


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What the folder is going to be."""

    backup: str
    sha256: str  # of the backup's list of files
    shards: int


def restore(
    repository: Repository, name: str, data_dir: str, *, shards: int | None = None, progress: Progress = lambda *_: None
) -> Summary:
    with repository.locked(writing=False):
        backup = repository.load(name)
        summary = backup.summary
        if summary.data_format > FORMAT_VERSION:
            raise FormatError(
                f"the backup {name} holds data of format {summary.data_format}, this program reads up to "
                f"{FORMAT_VERSION}; upgrade topics"
            )
        note = Note(
            backup=name,
            sha256=hashlib.sha256(encode_backup(backup)).hexdigest(),
            shards=shards or summary.shards,
        )
        _refuse_unless_free(data_dir, note)
        info = LockInfo(pid=os.getpid(), started_ms=time.time_ns() // 1_000_000, host="", version=__version__)
        folder = DataDir.claim(data_dir, info)
        try:
            _refuse_unless_free(data_dir, note)
            _Restoring(repository, backup, data_dir, progress).run(note)
        finally:
            folder.close()
    return summary


def _refuse_unless_free(data_dir: str, note: Note) -> None:
    try:
        there = set(os.listdir(data_dir))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise TopicsError(f"{data_dir} is no folder: name one that is empty or does not exist") from None
    if not there - _HARMLESS:
        return
    _refuse_if_served(data_dir)
    if RESTORE_NOTE not in there:
        raise TopicsError(f"{data_dir} is not empty: restore into a folder that is, or does not exist yet")
    if _read_note(data_dir) != note:
        raise TopicsError(
            f"{data_dir} holds another restore that was not finished ({RESTORE_NOTE} says which): go on with that one, "
            "or empty the folder first"
        )


def _refuse_if_served(data_dir: str) -> None:
    try:
        holder = read_lock_info(data_dir)
    except ServerNotRunning:
        return
    if holder.pid != os.getpid():
        raise TopicsError(
            f"{data_dir} is in use by the server with pid {holder.pid} on {holder.address}: restore into another folder"
        )


def _read_note(data_dir: str) -> Note | None:
    try:
        with open(os.path.join(data_dir, RESTORE_NOTE), "rb") as source:
            return msgspec.json.decode(source.read(), type=Note)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class _Restoring:
    def __init__(self, repository: Repository, backup: Backup, data_dir: str, progress: Progress) -> None:
        self._repository = repository
        self._backup = backup
        self._data_dir = data_dir
        self._progress = progress
        self._disk = BackupDisk()
        self._folders: set[str] = {data_dir}  # to be synced

    def run(self, note: Note) -> None:
        summary, disk = self._backup.summary, self._disk
        note_path = self._path(RESTORE_NOTE)
        if not os.path.exists(self._path(MANIFEST_NAME)):  # else only the note was left to be removed
            if _read_note(self._data_dir) != note:  # none, or that of another which got no further than that
                disk.write_whole(note_path, msgspec.json.encode(note) + b"\n")
            layout = summary.layout
            for shard in range(note.shards):
                self._add_dir(shard_dir(self._data_dir, shard))
            entries = self._backup.entries
            if note.shards != summary.shards:
                layout += 1
                self._divide([entry for entry in entries if entry.file.startswith("wal/")], note.shards, layout)
                entries = [entry for entry in entries if not entry.file.startswith("wal/")]
            self._place_all(entries)
            self._settle()
            kill_point("manifest")
            write_manifest(self._data_dir, Manifest(format=summary.data_format, layout=layout, shards=note.shards))
        kill_point("note")
        disk.remove(note_path)
        disk.sync_dir(self._data_dir)

    def _path(self, file: str) -> str:
        return os.path.join(self._data_dir, file)

    def _add_dir(self, path: str) -> None:
        self._disk.add_dir(path)
        while path != self._data_dir and path not in self._folders:
            self._folders.add(path)
            path = os.path.dirname(path)

    def _settle(self) -> None:
        """Every name is sure; a folder for each topic takes long one by one."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as pool:
            for _ in pool.map(self._disk.sync_dir, sorted(self._folders)):
                pass

    # --- files as they were ---

    def _place_all(self, entries: list[Entry]) -> None:
        for folder in sorted({os.path.dirname(entry.file) for entry in entries}):
            self._add_dir(os.path.join(self._data_dir, folder) if folder else self._data_dir)
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="restore")
        total, done = sum(entry.bytes for entry in entries), 0
        try:
            for entry, _ in zip(entries, pool.map(self._place, entries), strict=True):
                done += entry.bytes
                self._progress(entry.file, done, total)
        finally:
            pool.shutdown(cancel_futures=True)

    def _place(self, entry: Entry) -> None:
        """On a thread."""
        final = self._path(entry.file)
        if os.path.exists(final):
            return
        place(self._repository, entry, final + _TEMPORARY, self._disk)
        self._disk.rename(final + _TEMPORARY, final)

    # --- another number of shards ---

    def _divide(self, entries: list[Entry], shards: int, layout: int) -> None:
        for shard in range(shards):  # what an earlier try has left
            folder = shard_dir(self._data_dir, shard)
            for name in os.listdir(folder):
                self._disk.remove(os.path.join(folder, name))
        olds = [_old(self._repository, entries, shard) for shard in range(self._backup.summary.shards)]
        waiting: dict[str, list[bytes]] = {}
        size = 0
        for piece in divide(olds, shards=shards, layout=layout, salt=_draw_salt):
            waiting.setdefault(piece.file, []).append(piece.data)
            size += len(piece.data)
            if size >= _FLUSH_BYTES:
                self._flush(waiting)
                size = 0
        self._flush(waiting)
        for file in waiting:
            temporary = self._path(file) + _TEMPORARY
            self._disk.sync_file(temporary)
            self._disk.rename(temporary, self._path(file))

    def _flush(self, waiting: dict[str, list[bytes]]) -> None:
        for file, pieces in waiting.items():
            if pieces:
                self._disk.add_to(self._path(file) + _TEMPORARY, b"".join(pieces))
                pieces.clear()


def place(repository: Repository, entry: Entry, path: str, disk: BackupDisk) -> None:
    """Write a file of a backup, checked, with its delete flags set."""
    runs = decode_flags(repository.read(entry.flags, entry.flags_bytes)) if entry.flags else []
    flags = ((offset, bytes([DELETED]) * count) for offset, count in runs)
    disk.write_new(path, repository.content(entry.object, entry.bytes), patches=flags)


def _old(repository: Repository, entries: list[Entry], shard: int) -> Old:
    mine = [entry for entry in entries if os.path.dirname(entry.file) == shard_dir("", shard)]
    snapshots = [entry for entry in mine if entry.file.endswith(".snap")]
    logs = sorted((entry for entry in mine if entry.file.endswith(".wal")), key=_number)
    state = None
    if snapshots:
        newest = max(snapshots, key=_number)
        state = decode_snapshot(repository.read(newest.object, newest.bytes), path=newest.file)
    headers = [_header(next(repository.content(entry.object, entry.bytes)), entry) for entry in logs]
    return Old(
        state=state,
        headers=headers,
        frames=lambda: chain.from_iterable(_frames(repository, entry) for entry in logs),
    )


def _number(entry: Entry) -> int:
    parsed = parse_numbered(os.path.basename(entry.file))
    return 0 if parsed is None else parsed[1]


def _header(data: bytes, entry: Entry) -> WalHeader:
    return decode_wal_header(data[:FILE_HEADER_BYTES], path=entry.file)


def _frames(repository: Repository, entry: Entry) -> Iterator[Frame]:
    data = repository.read(entry.object, entry.bytes)
    end = FILE_HEADER_BYTES
    for frame in scan(data, salt=_header(data, entry).salt):
        yield frame
        end = frame.offset + frame.length
    if end != len(data):
        raise CorruptData(f"{entry.file}: no good frame at offset {end} of what the backup has kept of it")


def _draw_salt() -> int:
    return int.from_bytes(os.urandom(4), "little") | 1
