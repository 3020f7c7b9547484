"""The log of a shard: staging, one write per commit, rotation, trimming."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model import BOOT, QuickDisk

from topics import limits
from topics.errors import CorruptData, DiskFull
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import Frame, decode_wal_header, scan
from topics.walshard.log.wal import Wal, WalFile
from topics.walshard.topic.index import Row


class CountingDisk(QuickDisk):
    def __init__(self) -> None:
        self.writes = 0
        self.full = False

    def create(self, path: str, *, size: int = 0) -> int:
        if self.full:
            raise DiskFull("no space")
        return super().create(path, size=size)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self.writes += 1
        if self.full:
            raise DiskFull("no space")
        super().write(fd, data, offset)


@pytest.fixture
def disk() -> CountingDisk:
    return CountingDisk()


@pytest.fixture
def wal(tmp_path: Path, disk: CountingDisk, monkeypatch: pytest.MonkeyPatch) -> Wal:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    return Wal(
        disk,
        str(tmp_path),
        shard=2,
        layout=3,
        boot_id=BOOT,
        file_bytes=8_000,
        next_lsn=10,
        next_file_no=5,
        recovered=[],
    )


def frames(file: WalFile) -> list[Frame]:
    return list(scan(Path(file.path).read_bytes(), salt=file.header.salt))


def batch(wal: Wal, first: int = 1, size: int = 100) -> Row:
    body = b"x" * size
    file = wal.current
    offset, _ = wal.stage_batch(7, first, 1, 99, body, b"key")
    file.pins += 1
    return Row(first, 1, 99, 99, size, file, offset, 0, 1)


def test_a_new_file_has_a_header_and_its_space(wal: Wal, tmp_path: Path) -> None:
    [name] = os.listdir(tmp_path)
    assert name == "00000003-000000000005.wal"
    data = (tmp_path / name).read_bytes()
    header = decode_wal_header(data[:FILE_HEADER_BYTES], path=name)
    assert (header.shard, header.layout, header.file_no, header.boot_id) == (2, 3, 5, BOOT)
    assert len(data) == 8_000
    assert not any(data[FILE_HEADER_BYTES:])


def test_nothing_is_on_disk_before_the_write_and_all_of_it_after_one(wal: Wal, disk: CountingDisk) -> None:
    before = disk.writes
    batch(wal, 1)
    batch(wal, 2)
    wal.stage(FrameType.HEAD, topic_id=7, ts=99, first_seq=500, body=b"head")
    assert wal.staged
    assert frames(wal.current) == []
    wal.write()
    assert disk.writes == before + 1
    assert not wal.staged
    found = frames(wal.current)
    assert [(frame.lsn, frame.type) for frame in found] == [(10, 1), (11, 1), (12, 5)]
    assert [frame.synced for frame in found] == [9, 9, 9]
    assert found[0].key == b"key"
    assert (wal.written_lsn, wal.synced_lsn) == (12, 9)
    assert wal.current.end == found[-1].offset + found[-1].length
    wal.write()
    assert disk.writes == before + 1


def test_a_row_reads_its_body_back(wal: Wal) -> None:
    row = batch(wal, 1, size=500)
    wal.write()
    [frame] = frames(wal.current)
    row.offset, row.length = frame.offset, frame.length
    assert wal.current.read_body(row) == b"x" * 500
    with open(wal.current.path, "r+b") as file:
        file.seek(frame.offset + 80)
        file.write(b"y")
    with pytest.raises(CorruptData, match="checksum"):
        wal.current.read_body(row)


def test_a_failed_write_gives_its_lsns_back(wal: Wal, disk: CountingDisk) -> None:
    batch(wal, 1)
    wal.write()
    end = wal.current.end
    disk.full = True
    batch(wal, 2)
    with pytest.raises(DiskFull):
        wal.write()
    assert not wal.staged
    assert (wal.written_lsn, wal.current.end) == (10, end)
    disk.full = False
    batch(wal, 2)
    wal.write()
    assert [(frame.lsn, frame.first_seq) for frame in frames(wal.current)] == [(10, 1), (11, 2)]


def test_the_end_of_a_file_is_kept_for_deletes(wal: Wal) -> None:
    room = 8_000 - FILE_HEADER_BYTES
    assert wal.fits(room, reserve=True)
    assert not wal.fits(room + 1, reserve=True)
    assert wal.fits(room - 1_000, reserve=False)
    assert not wal.fits(room - 999, reserve=False)
    batch(wal, 1, size=2_000)
    used = sum(len(frame) for frame in wal._staged)
    assert not wal.fits(room - 1_000 - used + 1, reserve=False)
    assert wal.fits(room - 1_000 - used, reserve=False)


def test_rotation_goes_on_with_the_same_lsns_and_another_salt(wal: Wal) -> None:
    batch(wal, 1)
    wal.write()
    first = wal.current
    wal.rotate(100)
    batch(wal, 2)
    wal.write()
    assert wal.files == [first, wal.current]
    assert (first.last_lsn, wal.current.last_lsn) == (10, 11)
    assert first.header.salt != wal.current.header.salt
    assert wal.current.header.file_no == 6
    assert [frame.lsn for frame in frames(wal.current)] == [11]
    assert wal.rotations == 1
    assert wal.backlog_bytes == first.end + wal.current.end


def test_a_frame_larger_than_a_file_gets_a_larger_file(wal: Wal) -> None:
    assert not wal.fits(50_000, reserve=False)
    wal.rotate(50_000)
    assert wal.fits(50_000, reserve=False)


def test_no_space_for_the_next_file_leaves_the_current_one(wal: Wal, disk: CountingDisk, tmp_path: Path) -> None:
    current = wal.current
    disk.full = True
    with pytest.raises(DiskFull):
        wal.rotate(100)
    assert wal.files == [current]
    assert len(os.listdir(tmp_path)) == 1
    disk.full = False
    wal.rotate(100)
    assert wal.files[0] is current


def begin(disk: QuickDisk, folder: Path) -> Wal:
    return Wal(
        disk,
        str(folder),
        shard=2,
        layout=3,
        boot_id=BOOT,
        file_bytes=80_000,
        next_lsn=10,
        next_file_no=5,
        recovered=[],
    )


class ScarceDisk(QuickDisk):
    """Has so many bytes for new files, and for writes to what was not reserved."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.reserved: dict[int, int] = {}

    def create(self, path: str, *, size: int = 0) -> int:
        if size > self.free:
            raise DiskFull("no space")
        self.free -= size
        fd = super().create(path, size=size)
        self.reserved[fd] = size
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        more = max(0, offset + len(data) - self.reserved[fd])
        if more > self.free:
            raise DiskFull("no space")
        self.free -= more
        self.reserved[fd] += more
        super().write(fd, data, offset)


@pytest.mark.parametrize(
    ("free", "reserved"),
    [(79_999, 10_064), (10_063, 5_064), (5_063, FILE_HEADER_BYTES), (FILE_HEADER_BYTES, FILE_HEADER_BYTES)],
)
def test_the_first_file_takes_what_space_there_is_and_leaves_it_to_deletes(
    tmp_path: Path, free: int, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 10_000)
    disk = ScarceDisk(free)
    wal = begin(disk, tmp_path)
    assert disk.reserved[wal.current.fd] == reserved
    assert os.listdir(tmp_path) == ["00000003-000000000005.wal"]
    assert decode_wal_header(Path(wal.current.path).read_bytes()[:FILE_HEADER_BYTES], path="it").file_no == 5
    assert wal.room == 0
    assert not wal.fits(1, reserve=False)
    assert wal.fits(5_000, reserve=True)
    with pytest.raises(DiskFull):
        wal.rotate(100)
    wal.stage(FrameType.DELETE, topic_id=7, ts=99, body=b"x" * 3_000)
    if free > FILE_HEADER_BYTES:
        wal.write()
        assert [frame.lsn for frame in frames(wal.current)] == [10]
    else:
        with pytest.raises(DiskFull):
            wal.write()
        assert frames(wal.current) == []
    disk.free = 200_000
    first = wal.current
    wal.rotate(100)
    assert wal.files == [first, wal.current]
    assert wal.current.size == 80_000
    assert wal.fits(60_000, reserve=False)
    assert not wal.fits(75_000, reserve=False)
    assert wal.fits(75_000, reserve=True)
    disk.close_all()


def test_a_file_that_can_not_even_have_a_header_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskFull):
        begin(ScarceDisk(FILE_HEADER_BYTES - 1), tmp_path)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_trimming_takes_the_oldest_files_that_nobody_needs(wal: Wal) -> None:
    rows = []
    for number in range(4):
        rows.append(batch(wal, number + 1))
        wal.write()
        wal.rotate(100)
    files = list(wal.older)
    assert wal.trim(covered_lsn=100) == []
    rows[1].source.release(rows[1])
    assert wal.trim(covered_lsn=100) == []
    rows[0].source.release(rows[0])
    assert wal.trim(covered_lsn=10) == files[:1]
    assert wal.trim(covered_lsn=10) == []
    assert wal.trim(covered_lsn=100) == files[1:2]
    for row in rows[2:]:
        row.source.release(row)
    assert wal.trim(covered_lsn=100) == files[2:]
    assert wal.files == [wal.current]
    for file in files:
        file.unlink()
        assert not os.path.exists(file.path)


def test_the_current_file_is_never_trimmed(wal: Wal) -> None:
    row = batch(wal, 1)
    wal.write()
    row.source.release(row)
    assert wal.trim(covered_lsn=100) == []
