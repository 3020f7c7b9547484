"""What a power cut would show: everything has reached the disk before it gets its name, and every name has before the
one step that counts. Writes, syncs and renames are watched while they happen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_backup_steps import filled

from topics.backup.create import create
from topics.backup.repository import Repository
from topics.backup.restore import restore


class Watch:
    """Which files have bytes, and which folders names, that are not on the disk yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unsynced: set[str] = set()
        self.names: set[str] = set()
        self.counted: list[str] = []  # the steps that count
        for name in ("pwrite", "write", "fsync", "fdatasync", "replace", "mkdir", "unlink"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            done = real(*args, **more)
            getattr(self, f"_{name}")(*args)
            return done

        return call

    def _write(self, fd: int, *_: object) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.endswith((".part", "LOCK")) and path.startswith("/"):  # a part may be short of lines
            self.unsynced.add(path)

    _pwrite = _write

    def _fsync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.unsynced.discard(path)
        self.names.discard(path)

    _fdatasync = _fsync

    def _mkdir(self, path: str, *_: object) -> None:
        self.names.add(os.path.dirname(os.path.abspath(path)))

    def _unlink(self, path: str) -> None:
        self.unsynced.discard(path)

    def _replace(self, source: str, target: str) -> None:
        assert source not in self.unsynced, f"{target} has its name before its bytes are sure"
        if target.endswith((".jsonl", "topics.json")):
            assert not self.unsynced
            assert not self.names, f"{target} counts before these are sure: {self.names}"
            self.counted.append(os.path.basename(target))
        self.names.add(os.path.dirname(target))


@pytest.mark.parametrize("name", ["one", "two"])
def test_what_was_copied_before_a_kill_is_made_sure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Gone on with, or found by another backup: the names were given by a process that is no more."""
    shard = filled(tmp_path / "data")
    shard.crash()
    monkeypatch.setattr("topics.backup.create._THREADS", 1)
    path = str(tmp_path / "repository")
    watch = Watch(monkeypatch)
    with monkeypatch.context() as killed:
        killed.setattr(Repository, "commit", _killed)
        with pytest.raises(Killed):
            create(shard.settings.data_dir, Repository.made(path), "one")
    objects = {os.path.dirname(found) for found in map(str, Path(path).glob("objects/*/*"))}
    assert len(objects) > 2
    assert objects <= watch.names
    create(shard.settings.data_dir, Repository(path), name)
    assert watch.counted == [f"{name}.jsonl"]


class Killed(BaseException):
    pass


def _killed(*_: object) -> None:
    raise Killed


def test_nothing_counts_before_it_is_sure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = filled(tmp_path / "data")
    shard.crash()
    monkeypatch.setattr("topics.backup.create._THREADS", 1)
    monkeypatch.setattr("topics.backup.restore._THREADS", 1)
    watch = Watch(monkeypatch)
    repository = Repository.made(str(tmp_path / "repository"))
    create(shard.settings.data_dir, repository, "one")
    assert watch.counted == ["one.jsonl"]
    assert not watch.names - {str(tmp_path)}
    for shards in (1, 3):
        restore(repository, "one", str(tmp_path / f"back-{shards}"), shards=shards)
    assert watch.counted == ["one.jsonl", "topics.json", "topics.json"]
    repository.remove(["one"])
    assert not watch.unsynced
