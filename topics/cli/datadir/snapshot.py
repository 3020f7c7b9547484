"""`topics snapshot`: stable views of a data folder for long jobs, made while the server runs.

Sealed segments and finished log files are hard links, so a snapshot of any size takes moments and at first no space;
the tail is copied. What the server drops later stays on the disk until the snapshot is removed. Segments of the cold
tier are linked on its own disk, in `<cold>/snapshots`. A snapshot is made under a temporary name: one that is listed is
whole. The server is not asked and does not notice.

Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 the command was not understood.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from datetime import UTC, datetime

import click
import msgspec

from topics.actors.startup.datadir_lock import new_file, new_folders
from topics.cli.shared.place import data_dir_option, fail, failures_told, folder_name, json_option
from topics.cli.shared.terminal import cell, say
from topics.datadir.files import Deletes, Files
from topics.datadir.view.folder import Folder
from topics.datadir.view.holdings import Holding, holdings
from topics.errors import TopicsError
from topics.storage.manifest import MANIFEST_NAME, SNAPSHOT_NOTE, encode_manifest
from topics.tools.snapshot_links import (
    UNFINISHED,
    begin_links,
    check_links,
    new_links,
    remove_folder,
    remove_links,
    unlink_in,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TRIES = 5
_COPY_BYTES = 8 * 2**20
_APART = "apart"  # in an unfinished one: where its links in the cold tier are


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What snapshot.json says."""

    name: str
    created_ms: int
    data_dir: str
    topics: int
    records: int
    linked_files: int
    copied_bytes: int
    cold: str | None = None  # where its segments of the cold tier are, if they could not be linked here


class _Written(Snapshot, frozen=True, kw_only=True):
    """And what only a reader of the folder wants to know."""

    deletes: dict[str, Deletes]  # by topic id, where there are any


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: Snapshot
    path: str
    own_bytes: int  # what removing it would give back now


@click.group()
def snapshot() -> None:
    """Make, list and remove stable views of a data folder.

    A snapshot is a folder that Spark and the reports read like a data folder, and that does not change while they do:

    \b
      topics snapshot create nightly
      topics report --snapshot topics-data/snapshots/nightly
      topics snapshot rm nightly
    """


_dir = click.option("--dir", "place", help="Where snapshots are kept (default: snapshots in the data folder).")


@snapshot.command()
@click.argument("name", required=False)
@data_dir_option
@_dir
@json_option
def create(name: str | None, data_dir: str | None, place: str | None, as_json: bool) -> None:
    """Make a snapshot of the folder as it is now. NAME is the time unless it is given.

    On another disk than the data nothing can be linked, and everything is copied.

    \b
      topics snapshot create nightly
      topics snapshot create --dir /mnt/other/snapshots
      topics snapshot create nightly --json | jq .records
    """
    source, place = _places(data_dir, place)
    name = name or datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
    if not _NAME.fullmatch(name):
        raise click.BadParameter("letters, digits, dots, dashes and underscores", param_hint="NAME")
    try:
        made = make(source, place, name)
    except TopicsError as exc:
        fail(str(exc))
    except OSError as exc:
        fail(f"can't make the snapshot: {exc.filename or place}: {exc.strerror}")
    if as_json:
        say(msgspec.json.encode(made))
    else:
        say(
            f"{os.path.join(place, name)}: {made.records:,} records of {made.topics:,} topics, "
            f"{made.linked_files:,} files linked, {made.copied_bytes / 2**20:.1f} MiB copied"
        )


@snapshot.command("ls")
@data_dir_option
@_dir
@json_option
def ls(data_dir: str | None, place: str | None, as_json: bool) -> None:
    """List snapshots, and the space that removing each would give back.

    \b
      topics snapshot ls
      topics snapshot ls --json | jq -r '.[] | select(.own_bytes > 1e9) | .snapshot.name'
    """
    _, place = _places(data_dir, place)
    with failures_told():
        found = listed(place)
    if as_json:
        say(msgspec.json.encode(found))
        return
    if not found:
        say(f"no snapshots in {place}; make one with `topics snapshot create`")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("snapshot")
    table.add_column("made")
    for title in ("topics", "records", "own space"):
        table.add_column(title, justify="right")
    for each in found:
        made = datetime.fromtimestamp(each.snapshot.created_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        own = f"{each.own_bytes / 2**20:.1f} MiB"
        table.add_row(cell(each.snapshot.name), made, f"{each.snapshot.topics:,}", f"{each.snapshot.records:,}", own)
    Console().print(table)


@snapshot.command("rm")
@click.argument("names", nargs=-1, required=True)
@data_dir_option
@_dir
def rm(names: tuple[str, ...], data_dir: str | None, place: str | None) -> None:
    """Remove snapshots. The data folder keeps what it has.

    \b
      topics snapshot rm nightly
      topics snapshot rm monday tuesday
    """
    source, place = _places(data_dir, place)
    with failures_told():
        found = [_Removal.planned(source, place, name) for name in dict.fromkeys(names)]  # all of them, or none
        for each in found:
            each.run()
            say(f"removed {each.name}")


class _Removal(msgspec.Struct, frozen=True):
    place: str
    name: str
    links: str | None  # what is in the cold tier
    cold: str | None  # of the data folder

    @property
    def path(self) -> str:
        return os.path.join(self.place, self.name)

    @classmethod
    def planned(cls, data_dir: str, place: str, name: str) -> _Removal:
        """Everything that can be refused is refused here, before anything goes."""
        path = os.path.join(place, name)
        if not _NAME.fullmatch(name) or not os.path.exists(os.path.join(path, SNAPSHOT_NOTE)):
            raise TopicsError(f"there is no snapshot {name} in {place}; `topics snapshot ls` lists them")
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise TopicsError(f"{path} is a symbolic link: nothing was removed. Remove the link by hand")
        note = _read_note(path)
        links = None if note is None else note.cold
        cold = None if links is None or not os.path.lexists(links) else Files(data_dir).manifest.cold
        if links is not None:
            check_links(links, cold=cold, snapshot=path)
        return cls(place, name, links, cold)

    def run(self) -> None:
        # The note goes last: a snapshot that is half removed is no data folder, and can be removed again.
        fd = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(FileNotFoundError):
                unlink_in(self.name, MANIFEST_NAME, within=fd)
            if self.links is not None:
                remove_links(self.links, cold=self.cold, snapshot=self.path)
            remove_folder(self.name, last=SNAPSHOT_NOTE, within=fd)
        finally:
            os.close(fd)


def make(data_dir: str, place: str, name: str) -> Snapshot:
    final = os.path.join(place, name)
    if os.path.lexists(final):
        raise TopicsError(f"there is a snapshot {name} in {place} already: choose another name, or remove it")
    work = os.path.join(place, f"{name}{UNFINISHED}")
    folder = Folder(data_dir)
    for attempt in range(_TRIES):
        _discard(work, folder.files)  # of a try that was cut off
        new_folders(work)
        try:
            made = _fill(folder, work, name, _apart(folder.files, work, name))
            break
        except FileNotFoundError as exc:
            # The server made a newer snapshot of its own, and files of the older one went.
            if attempt + 1 == _TRIES:
                raise TopicsError(f"{exc.filename}: files go faster than they can be linked; try again") from None
            folder.look()
        except BaseException:
            _discard(work, folder.files)
            raise
    try:
        os.rename(work, final)
    except OSError:
        _discard(work, folder.files)
        raise
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(final, _APART))
    return made


def _apart(files: Files, work: str, name: str) -> str | None:
    """Where on the disk of the cold tier its segments are linked, if there is one. Written down first, for the next
    try if this one is cut off."""
    cold = dict(files.roots()).get("cold")
    if cold is None:
        return None
    apart = new_links(cold, name)
    _write(os.path.join(work, _APART), apart.encode())
    return apart


def _discard(work: str, files: Files) -> None:
    """What a try that came to nothing has left."""
    apart = ""
    with suppress(OSError), open(os.path.join(work, _APART), encoding="utf-8", errors="replace") as file:
        apart = file.read()
    if re.fullmatch(r".+/snapshots/[^/]+-[0-9a-f]{12}", apart):  # else it was not written whole
        remove_links(apart, cold=files.manifest.cold, snapshot=work)
    shutil.rmtree(work, ignore_errors=True)


def _fill(folder: Folder, work: str, name: str, apart: str | None) -> Snapshot:
    linked = copied = 0
    cold: str | None = None
    for holding in holdings(folder):
        tier, path, _ = folder.files.find(holding.file)
        target = os.path.join(work, holding.file)
        new_folders(os.path.dirname(target))
        if holding.bytes is None and _link(path, target):
            linked += 1
        elif holding.bytes is None and tier == "cold" and apart is not None:
            _link_apart(path, apart, holding)
            linked += 1
            cold = apart
        else:
            copied += _copy(path, target, holding)
    manifest = folder.files.manifest
    # A shard that has not written anything has no folder, and needs none.
    _write(
        os.path.join(work, MANIFEST_NAME), encode_manifest(msgspec.structs.replace(manifest, cold=cold, cold_id=None))
    )
    visible = [topic for topic in folder.topics if not topic.internal]
    made = Snapshot(
        name=name,
        created_ms=time.time_ns() // 1_000_000,
        data_dir=os.path.abspath(folder.files.data_dir),
        topics=len(visible),
        records=sum(topic.count for topic in visible),
        linked_files=linked,
        copied_bytes=copied,
        cold=cold,
    )
    deletes = {
        f"{topic.id:016x}": Deletes(topic.deleted_total, topic.flagged)
        for topic in folder.topics
        if topic.deleted_total or topic.flagged
    }
    written = _Written(**msgspec.structs.asdict(made), deletes=deletes)
    _write(os.path.join(work, SNAPSHOT_NOTE), msgspec.json.encode(written) + b"\n")
    return made


def _link_apart(path: str, apart: str, holding: Holding) -> None:
    """It has left the disk that fills up, and is not copied back to it."""
    begin_links(apart)
    target = os.path.join(apart, holding.file)
    new_folders(os.path.dirname(target))
    if not _link(path, target):
        raise TopicsError(
            f"{path} is in a cold tier whose disk has no hard links, so no snapshot can keep it: read the data folder "
            "itself, or make a backup"
        )


def _link(path: str, target: str) -> bool:
    try:
        os.link(path, target)
        return True
    except OSError as exc:
        if exc.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            return False
        raise


def _copy(path: str, target: str, holding: Holding) -> int:
    with open(path, "rb") as source, new_file(target) as sink:
        left = os.fstat(source.fileno()).st_size if holding.bytes is None else holding.bytes
        while left and (data := source.read(min(left, _COPY_BYTES))):
            sink.write(data)
            left -= len(data)
        return sink.tell()


def _write(path: str, data: bytes) -> None:
    with new_file(path) as file:
        file.write(data)


def listed(place: str) -> list[Listed]:
    found = []
    for name in sorted(os.listdir(place)) if os.path.isdir(place) else []:
        path = os.path.join(place, name)
        if name.endswith(UNFINISHED):
            continue
        note = _read_note(path)
        if note is not None:
            own = _own_bytes(path) + (0 if note.cold is None else _own_bytes(note.cold))
            found.append(Listed(snapshot=note, path=path, own_bytes=own))
    return found


def _read_note(path: str) -> Snapshot | None:
    try:
        with open(os.path.join(path, SNAPSHOT_NOTE), "rb") as file:
            return msgspec.json.decode(file.read(), type=Snapshot)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _own_bytes(path: str) -> int:
    """Of files that nobody else links to."""
    own = 0
    for root, _, names in os.walk(path):
        for name in names:
            found = os.lstat(os.path.join(root, name))
            if found.st_nlink == 1:
                own += found.st_blocks * 512
    return own


def _places(data_dir: str | None, place: str | None) -> tuple[str, str]:
    with failures_told():
        folder = folder_name(data_dir)
    return folder, place or os.path.join(folder, "snapshots")
