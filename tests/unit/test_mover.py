"""From the log into segments, snapshots, and letting go of what they replace."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from model import QuickDisk, Record, Shard

from topics import limits
from topics.errors import DiskFull
from topics.storage.config import TopicConfig
from topics.storage.paths import shard_dir
from topics.storage.snapshot import decode_snapshot, decode_topic
from topics.walshard.log.disk import Disk


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path, segment_max_events=25, wal_file_bytes=16_384)


def records(count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(count)]


def rows(shard: Shard) -> list[tuple[int, int]]:
    return [(row.first, row.count) for row in shard.topic("t").rows]


class Ordered(QuickDisk):
    """Knows what was done to which kind of file, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def _note(self, what: str, fd: int | str) -> None:
        path = fd if isinstance(fd, str) else os.readlink(f"/proc/self/fd/{fd}")
        self.done.append((what, os.path.splitext(path)[1]))

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._note("write", fd)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._note("sync", fd)

    def write_whole(self, path: str, data: bytes) -> None:
        self._note("write whole", path)
        super().write_whole(path, data)

    def unlink(self, path: str) -> None:
        self._note("unlink", path)
        super().unlink(path)


def test_a_checkpoint_promises_nothing_that_is_not_on_the_disk_yet(tmp_path: Path) -> None:
    """The log that the snapshot covers and the delete flags that it relies on come before it; what it replaces goes
    after it. A power cut between any two of these loses nothing."""
    disk = Ordered()
    shard = Shard(tmp_path, disk=disk, segment_max_events=5)
    shard.append("t", [*records(2), *records(1, tag="x"), *records(2)])
    shard.flush("t")
    shard.checkpoint()
    shard.delete("t", tag="x")
    shard.append("t", records(1))
    disk.done.clear()
    shard.checkpoint()
    assert disk.done == [
        ("sync", ".wal"),
        ("write", ".data"),
        ("sync", ".data"),
        ("write whole", ".snap"),
        ("unlink", ".snap"),
    ]


def test_small_appends_become_blocks(shard: Shard) -> None:
    for _ in range(24):
        shard.append("t", records(1))
    stored = shard.everything("t")
    assert len(shard.topic("t").rows) == 24
    shard.flush("t")
    assert rows(shard) == [(1, 10), (11, 10), (21, 4)]
    assert shard.everything("t") == stored
    assert shard.topic("t").flushed_seq == 24
    assert (shard.topic("t").tail_rows, shard.topic("t").tail_records, shard.topic("t").tail_bytes) == (0, 0, 0)


def test_an_open_segment_is_gone_on_with_until_it_is_full(shard: Shard) -> None:
    for _ in range(3):
        shard.append("t", records(5))
        shard.flush("t")
    [segment] = shard.topic("t").segments
    assert (segment.sealed, segment.records, segment.first_seq, segment.last_seq) == (False, 15, 1, 15)
    shard.append("t", records(10))
    shard.flush("t")
    assert segment.sealed
    assert os.path.exists(segment.path.removesuffix(".data") + ".idx")
    shard.append("t", records(1))
    shard.flush("t")
    assert [one.first_seq for one in shard.topic("t").segments] == [1, 26]
    assert not os.path.exists(shard.topic("t").segments[1].path.removesuffix(".data") + ".idx")


def test_one_flush_may_fill_several_segments(shard: Shard) -> None:
    for _ in range(8):
        shard.append("t", records(10))
    shard.flush("t")
    assert [(one.first_seq, one.last_seq, one.sealed) for one in shard.topic("t").segments] == [
        (1, 30, True),
        (31, 60, True),
        (61, 80, False),
    ]


def test_a_flush_of_nothing_is_no_job(shard: Shard) -> None:
    shard.put("t", TopicConfig())
    shard.mover.flush(shard.topic("t"))
    assert not shard.mover.busy


def test_resident_records_stay_where_they_are(shard: Shard) -> None:
    shard.append("t", records(3), config=TopicConfig(durability="ephemeral"))
    shard.mover.flush(shard.topic("t"))
    assert not shard.mover.busy
    shard.put("t", TopicConfig())
    shard.append("t", records(3))
    shard.flush("t")
    assert [stored.seq for stored in shard.everything("t")] == [1, 2, 3, 4, 5, 6]


def test_what_happens_during_a_flush_is_kept(shard: Shard) -> None:
    for _ in range(10):
        shard.append("t", records(2, tag="x"))
    shard.mover.flush(shard.topic("t"))
    assert shard.topic("t").flushing
    shard.append("t", records(3))
    shard.delete("t", before_seq=6)
    shard.delete("t", tag="x", before_seq=9)
    shard.mover.wait()
    expected = list(range(9, 24))
    assert [stored.seq for stored in shard.everything("t")] == expected
    assert shard.topic("t").tail_rows == 1
    shard.checkpoint()
    shard.restart()
    assert [stored.seq for stored in shard.everything("t")] == expected
    assert shard.report("t").earliest_seq == 9


def test_everything_evicted_during_a_flush(shard: Shard) -> None:
    shard.append("t", records(5))
    shard.append("t", records(5))
    shard.mover.flush(shard.topic("t"))
    shard.put("t", TopicConfig(cap_records=1))
    shard.append("t", records(1))
    shard.mover.wait()
    assert [stored.seq for stored in shard.everything("t")] == [11]
    shard.checkpoint()
    assert shard.topic("t").segments == []
    shard.restart()
    assert [stored.seq for stored in shard.everything("t")] == [11]


def test_a_topic_dropped_during_its_flush(shard: Shard) -> None:
    shard.append("t", records(5))
    folder = Path(shard.settings.data_dir) / "topics"
    shard.mover.flush(shard.topic("t"))
    shard.drop("t")
    shard.put("t", TopicConfig())
    shard.mover.wait()
    assert shard.everything("t") == []
    shard.checkpoint()
    assert list(folder.iterdir()) == []
    shard.restart()
    assert shard.report("t").head_seq == 0


def test_pins_follow_the_rows(shard: Shard) -> None:
    for _ in range(4):
        shard.append("t", records(3))
    file = shard.engine.wal.current
    assert file.pins == 4
    shard.delete("t", before_seq=4)
    assert file.pins == 3
    shard.flush("t")
    assert file.pins == 0
    shard.append("u", records(1))
    assert file.pins == 1
    shard.drop("u")
    assert file.pins == 0


def test_a_snapshot_holds_everything_but_payloads(shard: Shard) -> None:
    shard.append("t", records(30), key="k")
    shard.flush("t")
    shard.delete("t", before_seq=4)
    shard.checkpoint()
    folder = shard_dir(shard.settings.data_dir, 0)
    [name] = [name for name in os.listdir(folder) if name.endswith(".snap")]
    state = decode_snapshot(Path(folder, name).read_bytes(), path=name)
    assert state.lsn == shard.engine.wal.written_lsn == shard.mover.snapshot_lsn
    topic = decode_topic(state.topics[0])
    assert (topic.name, topic.head_seq, topic.floor, topic.evict_floor) == ("t", 30, 4, 1)
    assert (topic.flushed_seq, topic.deleted_total) == (30, 3)
    assert [(one.first_seq, one.last_seq, one.sealed, one.flagged) for one in topic.segments] == [(1, 30, True, True)]
    assert [(key.key, key.first_seq, key.count) for key in topic.keys] == [("k", 1, 30)]


def test_the_previous_snapshot_goes_when_the_next_is_there(shard: Shard) -> None:
    folder = shard_dir(shard.settings.data_dir, 0)

    def snapshots() -> list[str]:
        return sorted(name for name in os.listdir(folder) if name.endswith(".snap"))

    shard.append("t", records(1))
    shard.checkpoint()
    first = snapshots()
    shard.append("t", records(1))
    shard.checkpoint()
    second = snapshots()
    assert len(first) == len(second) == 1
    assert first < second
    shard.restart()
    shard.append("t", records(1))
    shard.checkpoint()
    assert len(snapshots()) == 1
    assert snapshots() > second


# --- when ---


def test_nothing_to_do(shard: Shard) -> None:
    assert not shard.mover.step(quiet=True)
    shard.append("t", records(1))
    assert not shard.mover.step(quiet=True), "a small tail is no reason"


def steps(shard: Shard) -> int:
    done = 0
    while shard.mover.step(quiet=True):
        shard.mover.wait()
        done += 1
        assert done < 50, "it never ends"
    return done


def test_a_full_tail_is_moved_in_a_quiet_moment(shard: Shard) -> None:
    shard.append("t", records(25))
    assert not shard.mover.step(quiet=False)
    assert steps(shard) >= 1
    assert shard.topic("t").tail_rows == 0


def test_an_old_tail_is_moved_too(tmp_path: Path) -> None:
    shard = Shard(tmp_path, segment_max_age_ms=1_000)
    shard.append("t", records(1))
    shard.wall.pass_ms(999)
    assert not shard.mover.step(quiet=True)
    shard.wall.pass_ms(1)
    assert steps(shard) >= 1
    assert shard.topic("t").tail_rows == 0


def test_a_large_tail_is_moved_too(tmp_path: Path) -> None:
    shard = Shard(tmp_path, segment_max_bytes=5_000)
    shard.append("t", [Record(b'"' + b"x" * 6_000 + b'"')])
    assert steps(shard) >= 1
    assert shard.topic("t").tail_rows == 0


def test_freed_log_files_go_with_the_next_snapshot(shard: Shard) -> None:
    while len(shard.engine.wal.files) < 4:
        shard.append("t", [Record(b'"' + b"x" * 900 + b'"')])
    shard.delete("t", before_seq=10**6)
    steps(shard)
    assert len(shard.engine.wal.files) == 1


def test_a_log_file_that_is_being_synced_is_not_closed_under_the_syncer(shard: Shard) -> None:
    shard.append("t", records(1))
    shard.sync()
    gate, reached = threading.Event(), threading.Event()
    sync = shard.disk.sync

    def held(fd: int) -> None:
        if threading.current_thread().name == "syncer":
            reached.set()
            assert gate.wait(30)
            os.fstat(fd)  # a closed one fails here, one that was used again would not
        sync(fd)

    shard.disk.sync = held  # type: ignore[method-assign]
    while len(shard.engine.wal.files) < 3:
        shard.append("t", [Record(b'"' + b"x" * 900 + b'"')])
    if not shard.syncer.busy:
        shard.engine.commit.sync_now()
    assert reached.wait(30)
    at_work = [file.path for file in shard.engine.wal.syncing]
    shard.engine.topics["t"].delete_before(10**6)  # nothing reads from the log any more
    shard.mover.checkpoint()
    shard.mover.wait()
    assert all(os.path.exists(path) for path in at_work)
    gate.set()
    shard.engine.commit.synced(shard.syncer.wait())
    steps(shard)
    assert len(shard.engine.wal.files) == 1, "they go once they are synced"


def test_many_small_tails_are_moved_when_the_log_grows_too_long(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_BACKLOG_BYTES", 30_000)
    for number in range(60):
        shard.append(f"topic-{number}", [Record(b'"' + b"x" * 900 + b'"')])
    assert shard.engine.wal.backlog_bytes > 30_000
    for _ in range(200):
        if not shard.mover.step(quiet=False):
            break
        shard.mover.wait()
    assert shard.engine.wal.backlog_bytes <= 30_000
    shard.restart()
    assert len(shard.engine.topics) == 60
    assert all(shard.report(name).count == 1 for name in shard.engine.topics)


def test_after_a_full_disk_it_waits_a_while(shard: Shard) -> None:
    shard.append("t", records(25))
    write, shard.disk.write = shard.disk.write, _raises(DiskFull("no space"))  # type: ignore[method-assign]
    assert shard.mover.step(quiet=True)
    shard.mover.wait()
    shard.disk.write = write  # type: ignore[method-assign]
    shard.mover.step(quiet=True)
    assert not shard.mover.busy
    shard.wall.pass_ms(60_000)
    assert steps(shard) >= 1
    assert shard.topic("t").tail_rows == 0


def test_what_a_snapshot_without_space_did_not_remove_goes_when_there_is_some(shard: Shard) -> None:
    """On a shard that is not asked for anything any more: the space is what others wait for."""
    shard.append("t", records(30))
    shard.flush("t")
    shard.checkpoint()
    [segment] = shard.topic("t").segments
    shard.delete("t", before_seq=31)
    whole, shard.disk.write_whole = shard.disk.write_whole, _raises(DiskFull("no space"))  # type: ignore[method-assign]
    for _ in range(3):
        shard.wall.pass_ms(60_000)
        assert shard.mover.step(quiet=True)
        shard.mover.wait()
    assert os.path.exists(segment.path)
    shard.disk.write_whole = whole  # type: ignore[method-assign]
    shard.wall.pass_ms(60_000)
    assert steps(shard) >= 1
    assert not os.path.exists(segment.path)
    assert not shard.mover.step(quiet=True)


def test_snapshots_that_got_their_name_and_no_more_go_with_the_next(shard: Shard) -> None:
    shard.append("t", records(3))
    whole = shard.disk.write_whole

    def named(path: str, data: bytes, *given: Any, **more: Any) -> None:
        whole(path, data, *given, **more)
        raise DiskFull("no space for the entries of the folder")

    shard.disk.write_whole = named  # type: ignore[method-assign]
    for _ in range(3):
        shard.checkpoint()
    shard.disk.write_whole = whole  # type: ignore[method-assign]
    shard.checkpoint()
    assert len(list(Path(shard.settings.data_dir).rglob("*.snap"))) == 1


@pytest.mark.parametrize("begun", [0, 5])
@pytest.mark.parametrize("writes", range(8))
def test_a_flush_without_space_gives_back_what_it_took(shard: Shard, begun: int, writes: int) -> None:
    """Others need it more: the log above all."""
    folder = Path(shard.settings.data_dir) / "topics"

    def used() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    if begun:
        shard.append("t", records(begun))
        shard.flush("t")
    for _ in range(3):
        shard.append("t", records(25))
    before, stored = used(), shard.everything("t")
    write, left = shard.disk.write, writes

    def scarce(fd: int, data: bytes, offset: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            write(fd, data[: len(data) // 2], offset)
            raise DiskFull("no space")
        write(fd, data, offset)

    shard.disk.write = scarce  # type: ignore[method-assign]
    shard.flush("t")
    shard.disk.write = write  # type: ignore[method-assign]
    if shard.topic("t").tail_rows:
        assert used() == before
        shard.flush("t")
    assert shard.topic("t").tail_rows == 0
    assert shard.everything("t") == stored
    shard.checkpoint()
    shard.restart()
    assert shard.everything("t") == stored


class RealDisk(QuickDisk):
    """Makes folders and files as the real one does; only syncs of data are left out."""

    def create(self, path: str, *, size: int = 0) -> int:
        return self._opened(Disk.create(self, path, size=size))

    def write_whole(self, path: str, data: bytes) -> None:
        Disk.write_whole(self, path, data)

    def sync_dir(self, path: str) -> None:
        Disk.sync_dir(self, path)


@pytest.mark.parametrize("call", ["mkdir", "open", "replace", "fsync", "pwrite"])
def test_a_disk_that_is_full_for_any_call_is_only_waited_for(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(tmp_path, disk=RealDisk(), segment_max_events=10)
    shard.append("t", records(25))
    stored = shard.everything("t")
    works = getattr(os, call)

    def full(path: Any, flags: int = os.O_CREAT, *more: Any) -> Any:
        if call == "open" and not flags & os.O_CREAT:
            return works(path, flags, *more)
        raise OSError(errno.ENOSPC, "full")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        for _ in range(10):
            shard.flush("t")
            shard.checkpoint()
        assert shard.topic("t").tail_rows
        assert bool(shard.mover.snapshot_ms) == (call == "mkdir"), "a snapshot needs no new folder"
        assert descriptors() == before
    assert shard.everything("t") == stored
    shard.flush("t")
    shard.checkpoint()
    assert shard.topic("t").tail_rows == 0
    shard.restart()
    assert shard.everything("t") == stored


def _raises(error: Exception) -> Any:
    def raises(*args: object, **more: object) -> None:
        raise error

    return raises


def test_memory_follows_the_rows_and_not_the_bytes(tmp_path: Path) -> None:
    shard = Shard(tmp_path, cache_bytes=10_000, segment_max_events=100)
    for _ in range(50):
        shard.append("t", [Record(b'"' + b"x" * 1_000 + b'"')] * 4)
    held = sum(len(row.body) for row in shard.topic("t").rows if row.body is not None)
    assert held <= 10_000
    shard.flush("t")
    assert len(shard.everything("t")) == 200
    rows = list(shard.topic("t").rows)
    held = sum(len(row.body) for row in rows if row.body is not None)
    held += sum(len(row.rendered.text) for row in rows if row.rendered is not None)
    assert held <= 10_000
