from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import posix_ipc
import pytest

from topics.shm.region import OutOfSharedMemory, Region, sweep_leftovers

SHM = Path("/dev/shm")


def test_a_region_has_no_name() -> None:
    region = Region.create(65_536)
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{region.fd}")
    assert not [path for path in SHM.iterdir() if path.name.startswith(f"topics-{os.getpid()}-")]
    region.close()


def test_two_mappings_share_their_bytes() -> None:
    one = Region.create(8_192)
    two = Region.attach(os.dup(one.fd), 8_192)
    assert bytes(one.view) == bytes(8_192)
    one.view[100:104] = b"ring"
    assert bytes(two.view[100:104]) == b"ring"
    one.close()
    assert bytes(two.view[100:104]) == b"ring"
    two.close()


def test_fd_is_not_inherited() -> None:
    region = Region.create(4_096)
    assert not os.get_inheritable(region.fd)
    region.close()


def test_closing_with_slices_in_use_leaves_them_usable() -> None:
    region = Region.create(4_096)
    words = region.view.cast("Q")
    region.close()
    words[5] = 9
    assert words[5] == 9


def test_mapping_outlives_the_fd() -> None:
    region = Region.create(4_096)
    region.close_fd()
    region.view[0] = 1
    region.close()


def test_all_pages_are_reserved_at_once() -> None:
    region = Region.create(1 << 20)
    assert os.fstat(region.fd).st_blocks * 512 >= 1 << 20
    region.close()


def test_no_room_is_an_error_and_leaks_no_fd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says so; asking for more than there is would first take all there is, from everyone else."""

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OutOfSharedMemory, match="TOPICS_RING_BYTES"):
        Region.create(1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_read_only_mapping_can_not_be_written() -> None:
    region = Region.create(4_096)
    reader = Region.attach(os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY), 4_096, writable=False)
    with pytest.raises(TypeError):
        reader.view[0] = 1
    reader.close()
    region.close()


def test_sweep_takes_the_names_of_the_dead_only() -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead = SHM / f"topics-{gone.stdout.strip()}-0011223344556677"
    mine = SHM / f"topics-{os.getpid()}-0011223344556677"
    other = SHM / "topics-somebody-else"
    try:
        for path in (dead, mine, other):
            path.touch()
        assert sweep_leftovers() >= 1
        assert not dead.exists()
        assert mine.exists()
        assert other.exists()
    finally:
        for path in (dead, mine, other):
            path.unlink(missing_ok=True)


def test_creating_survives_a_sweep_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server's sweep may take the name before we do; the region is as good."""
    real = posix_ipc.SharedMemory

    def swept(name: str, *args: object, **kwargs: object) -> object:
        memory = real(name, *args, **kwargs)
        (SHM / name.removeprefix("/")).unlink()
        return memory

    monkeypatch.setattr(posix_ipc, "SharedMemory", swept)
    Region.create(4_096).close()
