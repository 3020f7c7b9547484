"""Snapshots, backups, restored folders and exports are readable by those who may read the folder they are made in, and
by no one else, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from folderplay import write_manifest
from model import Record, Shard

from topics.actors.startup import datadir_lock
from topics.backup.create import create
from topics.backup.repository import Repository
from topics.backup.restore import restore
from topics.cli.client.export import export
from topics.cli.datadir.snapshot import make
from topics.storage.manifest import Manifest
from topics.tools.snapshot_links import begin_links, new_links

FOLDERS = [(0o700, 0o700, 0o600), (0o750, 0o750, 0o640), (0o755, 0o750, 0o640)]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A data folder with a record; new files and folders would be open to everyone."""
    (tmp_path / "data").mkdir()
    shard = Shard(tmp_path / "data", segment_max_events=5)
    write_manifest(tmp_path / "data")
    shard.append("t", [Record(b"%d" % number) for number in range(7)])
    shard.flush("t")
    shard.stop()
    before = os.umask(0)
    yield Path(shard.settings.data_dir)
    os.umask(before)


def modes(root: Path) -> tuple[set[int], set[int]]:
    """Of folders and of files below."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in root.rglob("*"):
        found[path.is_dir()].add(path.stat().st_mode & 0o777)
    return found[True], found[False]


def place(tmp_path: Path, mode: int) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    folder.chmod(mode)
    return folder


@pytest.mark.parametrize(("given", "folder", "file"), FOLDERS)
def test_snapshots(data: Path, tmp_path: Path, given: int, folder: int, file: int) -> None:
    home = place(tmp_path, given)
    for path in data.rglob("*.*"):  # what is linked keeps its mode
        path.chmod(file)
    make(str(data), str(home / "snapshots"), "s")
    assert modes(home) == ({folder}, {file})


@pytest.mark.parametrize(("given", "folder", "file"), FOLDERS)
def test_links_of_snapshots_in_the_cold_tier(tmp_path: Path, given: int, folder: int, file: int) -> None:
    home = place(tmp_path, given)
    before = os.umask(0)
    try:
        begin_links(new_links(str(home), "s"))
    finally:
        os.umask(before)
    assert modes(home) == ({folder}, {file})


@pytest.mark.parametrize(("given", "folder", "file"), FOLDERS)
def test_backups_and_what_is_restored(data: Path, tmp_path: Path, given: int, folder: int, file: int) -> None:
    home = place(tmp_path, given)
    repository = Repository.made(str(home / "deep" / "repository"))
    create(str(data), repository, "b")
    assert modes(home) == ({folder}, {file})
    target = tmp_path / "restored"
    target.mkdir()
    target.chmod(given)
    restore(repository, "b", str(target), shards=2)
    assert modes(target) == ({folder}, {file})


@pytest.mark.parametrize(("given", "folder", "file"), FOLDERS)
def test_exports(data: Path, tmp_path: Path, given: int, folder: int, file: int) -> None:
    home = place(tmp_path, given)
    for name in ("new", "old"):
        out = home / name
        if name == "old":
            out.touch(0o666)
            Path(f"{out}.tmp").touch(0o666)  # of an export that was killed, or planted
        done = CliRunner().invoke(export, ["t", "--data-dir", str(data), "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert out.stat().st_mode & 0o777 == file
        assert '"data":1' in out.read_text()


def test_a_link_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "new").symlink_to(precious)
    with datadir_lock.new_file(str(tmp_path / "new")) as file:
        file.write(b"written")
    assert precious.read_text() == "kept"
    assert (tmp_path / "new").read_text() == "written"


def test_the_manifest_and_folders_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o700)
    before = os.umask(0)
    try:
        datadir_lock.new_folders("a/b/c")
        datadir_lock.new_folders("a/b/c/")
        datadir_lock.write_manifest("a", Manifest(format=1, layout=1, shards=1))
    finally:
        os.umask(before)
    assert modes(tmp_path) == ({0o700}, {0o600})
    with pytest.raises(FileExistsError):
        datadir_lock.new_folders("a/topics.json")
