"""Large appends in a shard: placed by a thread, committed on the loop, whole or absent; others are served meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from model import QuickDisk, Record, Shard, error_of, shown

from topics import limits
from topics.errors import ApiError, DiskFull
from topics.storage.config import TopicConfig
from topics.storage.paths import shard_dir

DEADLINE_S = 20
DISK = TopicConfig(durability="disk")


class GatedDisk(QuickDisk):
    """Its thread stops before each write until it is let on; writes and names of the loop can fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.loop = threading.get_ident()
        self.on_loop: list[int] = []  # bytes that each write of the loop had
        self.placed: list[int] = []  # likewise of the thread
        self.fails: dict[str, Exception] = {}  # by call: on the loop alone

    def _fail(self, call: str) -> None:
        if threading.get_ident() == self.loop and call in self.fails:
            raise self.fails[call]

    def create(self, path: str, *, size: int = 0) -> int:
        if threading.get_ident() != self.loop and "create" in self.fails:
            raise self.fails["create"]
        return super().create(path, size=size)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._fail("write")
        if threading.get_ident() == self.loop:
            self.on_loop.append(len(data))
        else:
            self.arrived.set()
            assert self.gate.wait(DEADLINE_S)
            self.placed.append(len(data))
        super().write(fd, data, offset)

    def name(self, temporary: str, path: str) -> None:
        self._fail("name")
        super().name(temporary, path)

    def shorten(self, fd: int, end: int) -> None:
        self._fail("shorten")
        super().shorten(fd, end)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 2_000)
    monkeypatch.setattr(limits, "PLACED_BYTES", 4_000)
    monkeypatch.setattr(limits, "COPY_BYTES", 1_000)


@pytest.fixture
def disk() -> GatedDisk:
    return GatedDisk()


@pytest.fixture
def shard(tmp_path: Path, disk: GatedDisk) -> Shard:
    return Shard(tmp_path, disk=disk, wal_file_bytes=20_000)


def some(count: int) -> list[Record]:
    return [Record(b"%d" % number) for number in range(count)]


def large(count: int = 30) -> list[Record]:
    return [Record(b'"%b"' % (b"%03d" % number * 100), tag=f"t{number}") for number in range(count)]


def files(shard: Shard) -> list[str]:
    return sorted(os.listdir(shard_dir(shard.settings.data_dir, 0)))


def datas(shard: Shard, topic: str) -> list[bytes]:
    return [stored.record.data for stored in shard.everything(topic)]


CLASSES = ["disk", "fsync", "memory"]


@pytest.mark.parametrize("durability", CLASSES)
def test_a_large_append_is_as_any_other(shard: Shard, durability: str) -> None:
    shard.put("t", TopicConfig(durability=durability))  # type: ignore[arg-type]
    shard.append("t", some(2))
    answer = shard.append_large("t", large(), key="k")
    assert (answer.first_seq, answer.records, answer.head_seq) == (3, 30, 32)
    assert shard.append("t", some(1)).first_seq == 33
    expected = shard.everything("t")
    assert [stored.seq for stored in expected] == list(range(1, 34))
    assert [stored.record for stored in expected[2:32]] == large()
    assert shard.append_large("t", large(), key="k").deduped
    shard.sync()
    shard.restart()
    assert shown(shard.everything("t")) == shown(expected)
    assert shard.append_large("t", large(), key="k").deduped
    assert not any(name.endswith(".tmp") for name in files(shard))


def test_it_makes_its_topic(shard: Shard) -> None:
    assert shard.append_large("new", large(), config=TopicConfig(ttl_ms=10_000_000)).created
    shard.restart()
    assert datas(shard, "new") == [record.data for record in large()]
    assert shard.report("new").config.ttl_ms == 10_000_000


def test_the_loop_writes_a_few_bytes_of_it_and_the_thread_one_piece_after_the_other(
    shard: Shard, disk: GatedDisk
) -> None:
    shard.put("t", TopicConfig())
    disk.on_loop.clear()
    shard.append_large("t", large(200))
    assert sum(disk.on_loop) < 1_000, "the loop wrote the body"
    assert sum(disk.placed) > 60_000
    assert max(disk.placed) <= limits.COPY_BYTES


def test_others_are_served_while_it_is_placed_and_come_before_it(shard: Shard, disk: GatedDisk) -> None:
    shard.put("t", TopicConfig(durability="fsync", durable=True))
    disk.gate.clear()
    waiting = shard.send_large("t", large())
    assert disk.arrived.wait(DEADLINE_S)
    assert shard.append("t", some(1)).first_seq == 1
    assert shard.append("u", some(2)).head_seq == 2
    assert datas(shard, "t") == [b"0"]
    assert not shard.answered(waiting)
    disk.gate.set()
    shard.engine.large.wait()
    shard.settle()
    assert shard.answer(waiting).first_seq == 2
    assert len(datas(shard, "t")) == 31


def test_they_are_placed_one_after_the_other_in_their_order(shard: Shard, disk: GatedDisk) -> None:
    disk.gate.clear()
    asked = [shard.send_large("t", large()) for _ in range(3)]
    disk.gate.set()
    shard.engine.large.wait()
    shard.settle()
    assert [shard.answer(correlation).first_seq for correlation in asked] == [1, 31, 61]


def test_too_many_that_wait_are_refused(shard: Shard, disk: GatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PLACED_WAITING_BYTES", 15_000)
    disk.gate.clear()
    first, second = shard.send_large("t", large()), shard.send_large("t", large())
    with pytest.raises(ApiError, match="too many large appends") as refused:
        shard.answer(second)
    assert refused.value.code == "throttled"
    disk.gate.set()
    shard.engine.large.wait()
    shard.settle()
    assert shard.answer(first).first_seq == 1


def test_the_log_may_go_on_in_another_file_meanwhile(shard: Shard, disk: GatedDisk) -> None:
    disk.gate.clear()
    waiting = shard.send_large("t", large())
    assert disk.arrived.wait(DEADLINE_S)
    before = shard.engine.wal.rotations
    while shard.engine.wal.rotations < before + 2:
        shard.append("u", [Record(b'"%b"' % (b"y" * 3_000))])
    disk.gate.set()
    shard.engine.large.wait()
    shard.settle()
    assert shard.answer(waiting).first_seq == 1
    shard.append("u", some(1))
    numbers = [file.header.file_no for file in shard.engine.wal.files]
    assert numbers == sorted(numbers)
    expected = shard.everything("t"), shard.everything("u")
    shard.restart()
    assert (shard.everything("t"), shard.everything("u")) == expected


def test_nobody_waits_for_it_any_more(shard: Shard, disk: GatedDisk) -> None:
    disk.gate.clear()
    waiting = shard.send_large("t", large())
    shard.engine.caller_gone(shard.answers)
    disk.gate.set()
    shard.engine.large.wait()
    assert not shard.answered(waiting)
    assert "t" not in shard.engine.topics
    assert len(files(shard)) == 1


# --- faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "name"])
@pytest.mark.parametrize("made", [False, True], ids=["new topic", "old topic"])
def test_a_commit_that_fails_is_taken_back(shard: Shard, disk: GatedDisk, call: str, made: bool) -> None:
    if made:
        shard.append("t", some(2), key="k0")
        shard.sync()
    waiting = shard.send_large("t", large(), key="k")
    disk.fails = {call: OSError(errno.EIO, "bad sector")}
    shard.engine.large.wait()
    shard.settle()
    with pytest.raises(ApiError, match="the log write failed"):
        shard.answer(waiting)
    disk.fails = {}
    assert ("t" in shard.engine.topics) == made
    assert len(files(shard)) == 1, "its file is still there"
    shard.restart()
    assert ("t" in shard.engine.topics) == made
    answer = shard.append("t", some(1), key="k")
    assert not answer.deduped
    assert answer.first_seq >= (3 if made else 1)
    assert len(datas(shard, "t")) == (3 if made else 1)


def test_without_space_for_its_file_it_is_appended_in_one_go_or_refused(shard: Shard, disk: GatedDisk) -> None:
    disk.fails = {"create": DiskFull("no space")}
    assert shard.append_large("t", large()).first_seq == 1, "there was room in the current file"
    waiting = shard.send_large("t", large(60))
    shard.engine.large.wait()
    shard.settle()
    assert shard.answer(waiting).first_seq == 31, "the loop could still make a file"
    assert len(datas(shard, "t")) == 90


def test_a_crash_before_the_name_leaves_nothing(shard: Shard, disk: GatedDisk) -> None:
    """What the thread has written is under a name that nobody reads."""
    shard.append("t", some(1))
    expected = shard.everything("t")
    shard.send_large("t", large())
    shard.crash()  # waits for the thread, and takes nothing in
    assert any(name.endswith(".tmp") for name in files(shard))
    shard.open()
    assert shard.everything("t") == expected
    assert shard.append("t", some(1)).first_seq >= 2


def test_a_crash_after_the_name_finds_all_of_it(shard: Shard, disk: GatedDisk) -> None:
    shard.append_large("t", large())
    shard.crash()
    shard.open()
    assert datas(shard, "t") == [record.data for record in large()]


def test_a_torn_body_is_cut(shard: Shard) -> None:
    """As a power cut could leave it, if the sync had lied: the frame is the last one, and fails its checksum."""
    shard.append("t", some(1))
    shard.sync()
    shard.append_large("t", large())
    path = shard.engine.wal.current.path
    shard.crash()
    with open(path, "r+b") as file:
        file.seek(5_000)
        file.write(bytes(100))
    shard.open(boot=bytes(16))
    assert [stored.seq for stored in shard.everything("t")] == [1]


def test_an_ephemeral_one_is_not_placed(shard: Shard, disk: GatedDisk) -> None:
    shard.put("t", TopicConfig(durability="ephemeral"))
    assert shard.append_large("t", large()).first_seq == 1
    assert not disk.placed
    assert len(datas(shard, "t")) == 30


def test_an_error_of_its_own_leaves_no_file(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=5, discard="reject"))
    waiting = shard.send_large("t", large())
    shard.engine.large.wait()
    assert error_of(lambda: shard.answer(waiting)).code == "record_too_large"
    assert len(files(shard)) == 1
    assert shard.append("t", some(1)).first_seq == 1


def test_an_old_file_that_can_not_be_shortened_costs_nothing(shard: Shard, disk: GatedDisk) -> None:
    """The frame counts when its file has its name: nothing behind that may fail it."""
    shard.append("t", some(3), config=DISK)
    disk.fails["shorten"] = OSError(errno.EIO, "no")
    answer = shard.append_large("t", large())
    assert answer.first_seq == 4
    disk.fails.clear()
    assert shard.append("t", some(2)).first_seq == 34
    everything = shard.everything("t")
    shard.crash()
    shard.open()
    assert shard.everything("t") == everything


def test_a_snapshot_covers_no_file_whose_name_may_be_lost(tmp_path: Path) -> None:
    """A power cut may leave the name of the snapshot alone, if both are on their way to the platter."""

    class NamesLost(GatedDisk):
        unsure: set[str]

        def name(self, temporary: str, path: str) -> None:
            super().name(temporary, path)
            self.unsure.add(path)

        def sync_dir(self, path: str) -> None:
            self.unsure.clear()

        def write_whole(self, path: str, data: bytes) -> None:
            assert not self.unsure
            super().write_whole(path, data)

    disk = NamesLost()
    disk.unsure = set()
    shard = Shard(tmp_path, disk=disk, wal_file_bytes=20_000)
    shard.append("t", some(3), config=DISK)
    shard.send_large("t", large())
    shard.engine.large.wait()
    assert disk.unsure
    shard.checkpoint()
