"""A repository, proved: every checksum of everything its backups need, and what nobody needs.

Deeply: each backup is also laid out as a restore would, in a folder of its own, and proved as a data folder is
(datadir/fsck/verify.py). Content is linked there and not copied, but for segments with delete flags.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import msgspec

from topics.actors.startup.datadir_lock import write_manifest
from topics.backup.catalog import Backup
from topics.backup.disk import BackupDisk
from topics.backup.repository import Repository
from topics.backup.restore import place
from topics.datadir.fsck import verify as proving
from topics.errors import TopicsError
from topics.storage.manifest import Manifest

Progress = Callable[[str, int, int], None]  # (what, bytes done, bytes in all)


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    text: str
    backups: list[str] = []  # that can't be restored because of it


class Verdict(msgspec.Struct, kw_only=True):
    deep: bool
    backups: list[str] = []  # those that were looked at
    unfinished: list[str] = []
    objects: int = 0
    bytes: int = 0
    problems: list[Trouble] = []
    notes: list[Trouble] = []

    @property
    def clean(self) -> bool:
        return not self.problems

    @property
    def broken(self) -> set[str]:
        return {name for trouble in self.problems for name in trouble.backups}


def verify(repository: Repository, names: list[str], *, deep: bool, progress: Progress = lambda *_: None) -> Verdict:
    """names: none means all, and then also what no backup needs."""
    with repository.locked(writing=False):
        verdict = Verdict(deep=deep, unfinished=repository.unfinished())
        backups: list[Backup] = []
        for name in names or repository.names():
            verdict.backups.append(name)
            try:
                backups.append(repository.load(name))
            except TopicsError as exc:
                if name not in repository.names():
                    raise
                verdict.problems.append(Trouble(path=name, text=str(exc), backups=[name]))
        wanted = _wanted(backups)
        _check_objects(repository, wanted, verdict, progress)
        if not names and verdict.clean:
            _note_leftovers(repository, set(wanted), verdict)
        for backup in backups if deep else []:
            if backup.summary.name not in verdict.broken:
                _check_deeply(repository, backup, verdict)
    return verdict


class _Wanted(msgspec.Struct):
    bytes: int
    file: str  # one that it is the content of
    backups: list[str]


def _wanted(backups: list[Backup]) -> dict[str, _Wanted]:
    wanted: dict[str, _Wanted] = {}
    for backup in backups:
        for entry in backup.entries:
            for content, size in entry.objects():
                found = wanted.setdefault(content, _Wanted(size, entry.file, []))
                if backup.summary.name not in found.backups[-1:]:
                    found.backups.append(backup.summary.name)
    return wanted


def _check_objects(repository: Repository, wanted: dict[str, _Wanted], verdict: Verdict, progress: Progress) -> None:
    total, done = sum(each.bytes for each in wanted.values()), 0
    for content, each in wanted.items():
        try:
            for piece in repository.content(content, each.bytes):
                done += len(piece)
                progress(each.file, done, total)
        except TopicsError as exc:
            path = repository.object_path(content)
            text = f"{str(exc).removeprefix(f'{path}: ')}: {each.file}"
            verdict.problems.append(Trouble(path=path, text=text, backups=each.backups))
        verdict.objects += 1
    verdict.bytes = done


def _note_leftovers(repository: Repository, wanted: set[str], verdict: Verdict) -> None:
    for name in verdict.unfinished:
        wanted |= {done.object for done in repository.part(name)[1]}
    for name in repository.objects():
        if name not in wanted:
            text = "no backup needs it; the next `topics backup rm` removes it"
            verdict.notes.append(Trouble(path=repository.object_path(name), text=text))


def _check_deeply(repository: Repository, backup: Backup, verdict: Verdict) -> None:
    summary, disk = backup.summary, BackupDisk()
    with tempfile.TemporaryDirectory(prefix="topics-backup-") as folder:
        for entry in backup.entries:
            path = os.path.join(folder, entry.file)
            disk.add_dir(os.path.dirname(path))
            if entry.flags:
                place(repository, entry, path, disk)
            else:
                disk.link(os.path.abspath(repository.object_path(entry.object)), path)
        write_manifest(folder, Manifest(format=summary.data_format, layout=summary.layout, shards=summary.shards))
        found = proving.verify(folder, deep=True, running=False)
    for trouble in found.problems:
        text = f"at offset {trouble.offset}: {trouble.text}"
        verdict.problems.append(Trouble(path=trouble.file, text=text, backups=[summary.name]))
