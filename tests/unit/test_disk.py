from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figures import CRASH_POINTS

from topics.errors import CorruptData, DiskFull
from topics.walshard.log.disk import Disk


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_folders_are_made_with_their_parents_and_for_us_alone(disk: Disk, tmp_path: Path) -> None:
    disk.make_dir(str(tmp_path / "a" / "b" / "c"))
    disk.make_dir(str(tmp_path / "a" / "b" / "c"))
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("folder", "made", "file"), [(0o750, 0o750, 0o640), (0o700, 0o700, 0o600)])
def test_the_group_may_read_what_is_in_a_folder_that_it_may_read(
    disk: Disk, tmp_path: Path, folder: int, made: int, file: int
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    root.chmod(folder)
    before = os.umask(0o027)
    try:
        disk.make_dir(str(root / "a" / "b"))
        os.close(disk.create(str(root / "a" / "b" / "new")))
        disk.write_whole(str(root / "a" / "whole"), b"x")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert modes == {"a": made, "b": made, "new": file, "whole": file}


def test_a_new_file_has_its_space(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "f"
    os.close(disk.create(str(path), size=10))
    path.write_bytes(b"what an earlier try left")
    fd = disk.create(str(path), size=100_000)
    assert path.read_bytes() == bytes(100_000)
    assert path.stat().st_blocks * 512 >= 100_000
    assert path.stat().st_mode & 0o777 == 0o600
    disk.write(fd, b"hello", 10)
    assert disk.read(fd, 5, 10) == b"hello"
    disk.sync(fd)
    disk.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_for_a_new_file_leaves_none(
    disk: Disk, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(code, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull):
        disk.create(str(tmp_path / "f"), size=100)
    assert list(tmp_path.iterdir()) == []


WAYS: dict[str, Callable[[Disk, Path], object]] = {
    "make_dir": lambda disk, folder: disk.make_dir(str(folder / "a" / "b")),
    "create": lambda disk, folder: os.close(disk.create(str(folder / "f"), size=100)),
    "write_whole": lambda disk, folder: disk.write_whole(str(folder / "f"), b"new"),
}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("make_dir", "mkdir"),
        ("make_dir", "fsync"),
        ("create", "open"),
        ("create", "fsync"),
        ("write_whole", "open"),
        ("write_whole", "fsync"),
        ("write_whole", "replace"),
    ],
)
def test_whichever_call_finds_the_disk_full_it_is_that_and_leaves_nothing(
    disk: Disk, tmp_path: Path, way: str, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = getattr(os, call)

    def full(path: Any, flags: int = os.O_CREAT, *more: Any) -> Any:
        if call == "open" and not flags & os.O_CREAT:
            return works(path, flags, *more)
        raise OSError(code, "full")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(DiskFull):
            WAYS[way](disk, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    WAYS[way](disk, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_sync_without_space_is_no_full_disk(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it may not go on as if nothing had been written."""
    fd = disk.create(str(tmp_path / "f"))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="full"):
        disk.sync(fd)
    os.close(fd)


def test_other_errors_are_themselves(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = disk.create(str(tmp_path / "f"))

    def broken(*args: object) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="bad sector"):
        disk.write(fd, b"x", 0)
    os.close(fd)


def test_short_writes_are_gone_on_with(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = disk.create(str(tmp_path / "f"))
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, bytes(data)[:3], offset))
    disk.write(fd, b"0123456789", 5)
    assert (tmp_path / "f").read_bytes() == bytes(5) + b"0123456789"
    os.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_finds_the_disk_full_in_the_middle(
    disk: Disk, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = disk.create(str(tmp_path / "f"))
    whole = os.pwrite
    left = [1]

    def fills(fd: int, data: bytes, offset: int) -> int:
        if not left:
            raise OSError(code, "full")
        left.pop()
        return whole(fd, bytes(data)[:4], offset)

    monkeypatch.setattr(os, "pwrite", fills)
    with pytest.raises(DiskFull):
        disk.write(fd, b"0123456789", 0)
    os.close(fd)


def test_a_write_of_nothing_is_a_full_disk_too(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = disk.create(str(tmp_path / "f"))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(DiskFull):
        disk.write(fd, b"x", 0)
    os.close(fd)


def test_reading_beyond_the_end_is_corruption(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    fd = disk.open(str(tmp_path / "f"))
    with pytest.raises(CorruptData, match="offset 3"):
        disk.read(fd, 5, 3)
    disk.close(fd)


def test_a_file_is_replaced_whole(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "f"
    disk.write_whole(str(path), b"one")
    disk.write_whole(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_replacement_that_fails_leaves_the_old_one(
    disk: Disk, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def broken(*args: object) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(OSError, match="bad sector"):
        disk.write_whole(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


WRITTEN = {
    "write_whole": lambda disk, folder: disk.write_whole(str(folder / "f"), b"new"),
    "copy": lambda disk, folder: disk.copy(str(folder / "old"), str(folder / "f"), 3, go_on=lambda took: True),
}


@pytest.mark.parametrize("way", WRITTEN)
def test_a_name_stands_for_bytes_that_are_synced_and_is_synced_itself(
    disk: Disk, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any other order a power cut leaves a name without its bytes, or takes the name back."""
    (tmp_path / "old").write_bytes(b"old")
    order: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(fd: int) -> None:
        order.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def note_rename(source: str, path: str) -> None:
        order.append(("rename", os.path.basename(path)))
        replace(source, path)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    WRITTEN[way](disk, tmp_path)
    assert order == [("sync", "f.tmp"), ("rename", "f"), ("sync", tmp_path.name)]


def test_cutting_forgets_what_is_behind_and_keeps_the_space(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "f"
    fd = disk.create(str(path), size=10_000)
    disk.write(fd, b"x" * 5_000, 0)
    disk.cut(fd, 100, 10_000)
    assert path.read_bytes() == b"x" * 100 + bytes(9_900)
    disk.truncate(str(path), 50)
    assert path.read_bytes() == b"x" * 50
    disk.close(fd)


def test_removing_what_is_gone_is_fine(disk: Disk, tmp_path: Path) -> None:
    disk.unlink(str(tmp_path / "f"))
    disk.remove_dir(str(tmp_path / "d"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"x")
    disk.remove_dir(str(tmp_path / "d"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("point", "content"),
    [
        ("write", None),
        ("written", None),
        ("rename", None),
        ("renamed", b"new"),
        ("nothing", b"new"),
        ("rename:2", b"new"),
    ],
)
def test_kill_points_end_the_process_exactly_there(tmp_path: Path, point: str, content: bytes | None) -> None:
    code = f"from topics.walshard.log.disk import Disk; Disk().write_whole({str(tmp_path / 'f')!r}, b'new')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TOPICS_KILL_POINT": point}, check=False)
    CRASH_POINTS.add(done.returncode == -signal.SIGKILL)
    assert done.returncode == (0 if point in ("nothing", "rename:2") else -9)
    path = tmp_path / "f"
    assert (path.read_bytes() if path.exists() else None) == content
