"""A disk that fails on purpose: what failed leaves no trace, what works goes on, and space that returns is used."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figures import CRASH_POINTS, DISK_FAULTS
from model import QuickDisk, Record, Shard, error_of, shown

from topics import limits
from topics.actors.messages import Diff, Op
from topics.errors import ApiError, DiskFull
from topics.storage.config import TopicConfig


class FaultyDisk(QuickDisk):
    """Fails when `when(call, path or fd)` gives it an exception; a failing write may leave a part of itself."""

    def __init__(self) -> None:
        self.when: Callable[[str], Exception | None] = lambda call: None
        self.partial = 0.0  # of a failing write, how much still gets through
        self.calls: list[str] = []

    def _call(self, call: str) -> None:
        self.calls.append(call)
        if (error := self.when(call)) is not None:
            DISK_FAULTS.add()
            raise error

    def full(self) -> None:
        self.when = lambda call: DiskFull("no space") if call in ("create", "write", "write_whole") else None

    def no_new_files(self) -> None:
        """As a disk is full for a log that reserves its space: what was reserved can still be written."""
        self.when = lambda call: DiskFull("no space") if call in ("create", "write_whole") else None

    def broken(self) -> None:
        self.when = lambda call: OSError(errno.EIO, "bad sector") if call == "write" else None

    def well(self) -> None:
        self.when = lambda call: None

    def create(self, path: str, *, size: int = 0) -> int:
        self._call("create")
        return super().create(path, size=size)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        try:
            self._call("write")
        except Exception:
            super().write(fd, data[: int(len(data) * self.partial)], offset)
            raise
        super().write(fd, data, offset)

    def write_whole(self, path: str, data: bytes) -> None:
        self._call("write_whole")
        super().write_whole(path, data)

    def sync(self, fd: int) -> None:
        self._call("sync")
        super().sync(fd)

    def cut(self, fd: int, end: int, size: int) -> None:
        self._call("cut")
        super().cut(fd, end, size)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 2_000)
    monkeypatch.setattr(limits, "PLACED_BYTES", 1_000)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def shard(tmp_path: Path, disk: FaultyDisk) -> Shard:
    return Shard(tmp_path, disk=disk, wal_file_bytes=16_384)


def records(count: int, **more: object) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(count)]  # type: ignore[arg-type]


def long(count: int, size: int = 500) -> list[Record]:
    return [Record(b'"' + b"x" * size + b'"') for _ in range(count)]


CLASSES = ["disk", "fsync", "memory"]


def config(durability: str) -> TopicConfig:
    return TopicConfig(durability=durability, durable=durability == "fsync")  # type: ignore[arg-type]


def state_of(shard: Shard, name: str) -> tuple[object, ...]:
    topic = shard.topic(name)
    report = shard.report(name)
    return (
        report.head_seq,
        report.earliest_seq,
        report.count,
        report.bytes,
        topic.next_seq,
        topic.ceiling,
        topic.ceiling_lsn,
        topic.sure_ceiling,
        topic.pending,
        topic.pending_records,
        topic.pending_bytes,
        dict(topic.keys),
        shard.engine.totals.records,
        shard.engine.totals.bytes,
        shard.engine.wal.written_lsn,
        [file.pins for file in shard.engine.wal.files],
    )


# --- appends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("partial", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("fault", ["full", "broken"])
def test_a_failed_append_leaves_no_trace(
    shard: Shard, disk: FaultyDisk, durability: str, partial: float, fault: str
) -> None:
    shard.put("t", config(durability))
    shard.append("t", records(3), key="first")
    shard.sync()
    before = state_of(shard, "t")
    getattr(disk, fault)()
    disk.partial = partial
    sent = [shard.send_append("t", long(2), key=f"k{number}") for number in range(3)]
    shard.settle()
    for one in sent:
        error = error_of(lambda one=one: shard.answer(one))
        assert error.code == ("storage_full" if fault == "full" else "internal")
    assert state_of(shard, "t") == before
    assert len(shard.everything("t")) == 3
    disk.well()
    answer = shard.append("t", records(1), key="k1")
    assert (answer.first_seq, answer.deduped) == (4, False)
    shard.restart()
    assert [stored.seq for stored in shard.everything("t")] == [1, 2, 3, 4]
    assert shard.append("t", records(1), key="k1").deduped
    assert not shard.append("t", records(1), key="k0").deduped


@pytest.mark.parametrize("partial", [0.0, 0.5, 0.9, 1.0])
def test_a_failed_append_is_not_found_by_recovery_either(shard: Shard, disk: FaultyDisk, partial: float) -> None:
    shard.append("t", records(3))
    disk.full()
    disk.partial = partial
    for number in range(4):
        shard.send_append("t", long(1), key=f"k{number}")
    shard.settle()
    shard.restart()
    assert len(shard.everything("t")) == 3
    assert len(shard.topic("t").keys) == 0
    assert shard.append("t", records(1)).first_seq == 4


@pytest.mark.parametrize("fault", ["full", "broken"])
def test_a_topic_that_could_not_be_created_does_not_exist(shard: Shard, disk: FaultyDisk, fault: str) -> None:
    shard.append("other", records(1))
    getattr(disk, fault)()
    one, two = shard.send_append("new", records(2)), shard.send_append("new", records(2))
    shard.settle()
    for sent in (one, two):
        assert isinstance(error_of(lambda sent=sent: shard.answer(sent)), ApiError)
    assert set(shard.engine.topics) == {"other"}
    assert error_of(lambda: shard.put("newer", TopicConfig())).code in ("storage_full", "internal")
    assert set(shard.engine.topics) == {"other"}
    disk.well()
    assert shard.append("new", records(1)).created
    shard.restart()
    assert set(shard.engine.topics) == {"other", "new"}
    assert shard.report("new").count == 1


def test_nothing_of_a_failed_round_is_published_or_wakes_anybody(shard: Shard, disk: FaultyDisk) -> None:
    shard.append("t", records(1))
    poll = shard.send(Op.DIFF, Diff("t", 1, 10, 1_000, wait_ms=10_000))
    assert not shard.answered(poll)
    disk.full()
    failed = shard.send_append("t", records(1))
    shard.settle()
    assert error_of(lambda: shard.answer(failed)).code == "storage_full"
    assert not shard.answered(poll)
    disk.well()
    shard.append("t", records(1))
    assert shard.answered(poll)


def test_the_error_says_when_to_come_back(shard: Shard, disk: FaultyDisk) -> None:
    disk.full()
    error = error_of(lambda: shard.append("t", records(1)))
    assert (error.code, error.status) == ("storage_full", 503)
    assert error.retry_after_s


def test_a_retry_in_the_same_failed_round_fails_too(shard: Shard, disk: FaultyDisk) -> None:
    shard.append("t", records(1))
    disk.full()
    first, again = shard.send_append("t", records(1), key="k"), shard.send_append("t", records(1), key="k")
    shard.settle()
    assert error_of(lambda: shard.answer(first)).code == "storage_full"
    assert error_of(lambda: shard.answer(again)).code == "storage_full"


def test_a_promise_of_seqs_that_was_not_written_is_none(
    shard: Shard, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEQ_RESERVE", 20)
    shard.append("t", records(1))
    shard.sync()
    before = state_of(shard, "t")
    disk.full()
    failed = shard.send_append("t", records(30))
    shard.settle()
    assert error_of(lambda: shard.answer(failed)).code == "storage_full"
    assert state_of(shard, "t") == before
    disk.well()
    assert shard.append("t", records(30)).first_seq == 2
    shard.restart(boot=bytes(16))
    assert shard.append("t", records(1)).first_seq > 31


# --- a log without room ------------------------------------------------------------------------------


def fill(shard: Shard, name: str) -> int:
    """Append until the log has no room for more; returns how many got in."""
    for done in range(1_000):
        try:
            shard.append(name, long(1))
        except ApiError:
            assert error_of(lambda: shard.append(name, long(1))).code == "storage_full"
            return done
    raise AssertionError("never full")


def test_reads_and_deletes_go_on_when_the_log_is_full(shard: Shard, disk: FaultyDisk) -> None:
    shard.append("t", records(10, tag="x"))
    disk.no_new_files()
    filled = fill(shard, "t")
    assert filled > 5
    assert shard.engine.commit.read_only
    assert shard.report("t").count == 10 + filled
    assert len(shard.everything("t")) == 10 + filled
    assert shard.delete("t", tag="x").deleted == 10
    assert shard.delete("t", before_seq=15).deleted == 4
    assert shard.report("t").earliest_seq == 15
    assert error_of(lambda: shard.append("t", long(1))).code == "storage_full"
    assert error_of(lambda: shard.append("new", records(1))).code == "storage_full"
    assert "new" not in shard.engine.topics
    shard.restart()
    assert shard.report("t").earliest_seq == 15
    assert shard.report("t").count == 10 + filled - 14
    assert set(shard.engine.topics) == {"t"}


def test_dropping_a_topic_works_in_the_reserve_too(shard: Shard, disk: FaultyDisk) -> None:
    shard.append("t", records(1))
    shard.append("u", records(1))
    disk.no_new_files()
    fill(shard, "t")
    assert shard.drop("t")
    shard.restart()
    assert set(shard.engine.topics) == {"u"}


def test_writes_resume_by_themselves_when_space_returns(shard: Shard, disk: FaultyDisk) -> None:
    shard.append("t", records(1))
    disk.no_new_files()
    filled = fill(shard, "t")
    disk.well()
    answer = shard.append("t", long(1))
    assert answer.first_seq == filled + 2
    assert not shard.engine.commit.read_only
    shard.restart()
    assert shard.report("t").count == filled + 2


def test_a_write_that_fails_takes_the_ones_behind_it_along(shard: Shard, disk: FaultyDisk) -> None:
    """The second batch needs a new file, so the first is written for it; that write fails, the new file does not."""
    shard.append("t", records(1))
    while shard.engine.wal.fits(3_000, reserve=False):
        shard.append("t", long(1, 300))
    last = shard.report("t").head_seq
    failing = iter([OSError(errno.EIO, "once")])
    one = shard.send_append("t", long(4))
    disk.when = lambda call: next(failing, None) if call == "write" else None
    two = shard.send_append("t", long(6))
    shard.settle()
    assert error_of(lambda: shard.answer(one)).code == "internal"
    try:
        answer = shard.answer(two)
    except ApiError:
        assert shard.append("t", records(1)).first_seq == last + 1
    else:
        assert answer.first_seq == last + 1
    seqs = [stored.seq for stored in shard.everything("t")]
    assert seqs == list(range(1, len(seqs) + 1))
    shard.restart()
    assert [stored.seq for stored in shard.everything("t")] == seqs


def test_a_creation_that_fails_takes_the_batches_behind_it_along(shard: Shard, disk: FaultyDisk) -> None:
    shard.append("t", records(1))
    while shard.engine.wal.fits(3_000, reserve=False):
        shard.append("t", long(1, 300))
    failing = iter([OSError(errno.EIO, "once")])
    one = shard.send_append("new", long(4))
    disk.when = lambda call: next(failing, None) if call == "write" else None
    two = shard.send_append("new", long(6))
    shard.settle()
    assert error_of(lambda: shard.answer(one)).code == "internal"
    try:
        shard.answer(two)
        acknowledged = 6
    except ApiError:
        acknowledged = 0
    assert ("new" in shard.engine.topics) == bool(acknowledged)
    shard.restart()
    assert ("new" in shard.engine.topics) == bool(acknowledged)
    if acknowledged:
        assert shard.report("new").count == 6


# --- control commands and deletes --------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.parametrize("partial", [0.0, 1.0])
def test_failed_commands_change_nothing(shard: Shard, disk: FaultyDisk, fault: str, partial: float) -> None:
    shard.put("t", TopicConfig(cap_records=100))
    shard.append("t", records(10, tag="x"))
    shard.sync()
    before, stored, old = state_of(shard, "t"), shard.everything("t"), shard.report("t").config
    getattr(disk, fault)()
    disk.partial = partial
    code = "storage_full" if fault == "full" else "internal"
    assert error_of(lambda: shard.put("t", TopicConfig(cap_records=2))).code == code
    assert error_of(lambda: shard.put("t", TopicConfig(durability="ephemeral"))).code == code
    assert error_of(lambda: shard.delete("t", tag="x")).code == code
    assert error_of(lambda: shard.delete("t", before_seq=5)).code == code
    assert error_of(lambda: shard.drop("t")).code == code
    assert state_of(shard, "t") == before
    assert shard.everything("t") == stored
    assert shard.report("t").config == old
    shard.restart()
    assert shard.everything("t") == stored
    assert shard.report("t").config == old
    assert shard.topic("t").deleted_total == 0


# --- syncs -------------------------------------------------------------------------------------------


def test_a_failed_sync_stops_the_shard_and_acknowledges_nothing(shard: Shard, disk: FaultyDisk) -> None:
    shard.put("t", config("fsync"))
    disk.when = lambda call: OSError(errno.EIO, "lost page") if call == "sync" else None
    sent = shard.send_append("t", records(1))
    with pytest.raises(OSError, match="lost page"):
        shard.settle()
    assert not shard.answered(sent)
    assert shard.topic("t").count == 0


def test_a_failed_sync_of_the_disk_class_stops_the_shard_too(shard: Shard, disk: FaultyDisk) -> None:
    shard.append("t", records(1))
    disk.when = lambda call: OSError(errno.EIO, "lost page") if call == "sync" else None
    shard.append("t", records(1))
    with pytest.raises(OSError, match="lost page"):
        shard.sync()


def test_a_sync_that_failed_is_not_tried_again(shard: Shard, disk: FaultyDisk) -> None:
    """The kernel reports a page that it could not write once, and forgets it: the second sync succeeds and lies."""
    shard.put("t", config("fsync"))
    failures = [OSError(errno.EIO, "lost page")]
    disk.when = lambda call: failures.pop() if call == "sync" and failures else None
    sent = shard.send_append("t", records(1))
    with pytest.raises(OSError, match="lost page"):
        shard.settle()
    assert not shard.answered(sent)
    assert shard.topic("t").count == 0


class SyncedFiles(FaultyDisk):
    """Knows which files were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def sync(self, fd: int) -> None:
        self.synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        super().sync(fd)


def test_recovery_syncs_what_it_read_before_anybody_may_read_it(shard: Shard) -> None:
    shard.append("t", records(1))
    written = shard.engine.wal.current.path
    fresh = SyncedFiles()
    shard.restart(fresh)
    assert fresh.synced == [written, shard.engine.wal.current.path]  # and the header of the file that follows
    assert shard.engine.wal.synced_lsn == shard.engine.wal.written_lsn
    shard.crash()
    failing = FaultyDisk()
    failing.when = lambda call: OSError(errno.EIO, "lost page") if call == "sync" else None
    with pytest.raises(OSError, match="lost page"):
        shard.open(failing)


# --- the mover ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["create", "write", "write_whole"])
def test_a_flush_without_space_changes_nothing_and_is_tried_again(tmp_path: Path, disk: FaultyDisk, call: str) -> None:
    shard = Shard(tmp_path, disk=disk, segment_max_events=10)
    shard.append("t", records(25))
    stored = shard.everything("t")
    disk.when = lambda now: DiskFull("no space") if now == call else None
    shard.flush("t")
    assert not shard.topic("t").flushing
    assert shard.everything("t") == stored
    disk.well()
    shard.flush("t")
    assert shard.topic("t").tail_rows == 0
    assert shard.everything("t") == stored
    shard.checkpoint()
    shard.restart()
    assert shard.everything("t") == stored


@pytest.mark.parametrize("call", ["write", "write_whole"])
def test_a_checkpoint_without_space_forgets_no_delete(tmp_path: Path, disk: FaultyDisk, call: str) -> None:
    shard = Shard(tmp_path, disk=disk, segment_max_events=10, wal_file_bytes=16_384)
    shard.append("t", records(20, tag="x") + records(5))
    shard.append("gone", records(5))
    shard.flush("t")
    shard.flush("gone")
    shard.checkpoint()
    shard.delete("t", before_seq=4)
    shard.delete("t", tag="x")
    shard.drop("gone")
    stored = shard.everything("t")
    disk.when = lambda now: DiskFull("no space") if now == call else None
    shard.checkpoint()
    disk.well()
    shard.checkpoint()
    shard.append("t", long(30))
    shard.flush("t")
    shard.checkpoint()
    stored = shard.everything("t")
    assert len(shard.engine.wal.files) == 1
    shard.restart()
    assert shard.everything("t") == stored
    assert set(shard.engine.topics) == {"t"}
    assert len(os.listdir(tmp_path / "topics")) == 1


@pytest.mark.parametrize("work", ["flush", "checkpoint"])
def test_other_errors_of_the_mover_go_up(shard: Shard, disk: FaultyDisk, work: str) -> None:
    shard.append("t", records(5))
    disk.when = lambda call: OSError(errno.EIO, "bad sector") if call in ("write", "write_whole") else None
    with pytest.raises(OSError, match="bad sector"):
        shard.flush("t") if work == "flush" else shard.checkpoint()


# --- a crash at every call ---------------------------------------------------------------------------


class Gone(Exception):
    """The process died here."""


class GoneInSync(Gone, OSError):
    """On the syncer's thread, which carries only what a disk can raise."""


class DyingDisk(FaultyDisk):
    """Dies at its n-th call, before or after doing it; nothing gets through from then on."""

    def __init__(self, at: int, *, before: bool) -> None:
        super().__init__()
        self.left = at
        self.before = before
        self.dead = False

    def _die(self, call: Callable[[], object], gone: type[Gone] = Gone) -> object:
        if self.dead:
            raise gone
        self.left -= 1
        if self.left:
            return call()
        self.dead = True
        CRASH_POINTS.add()
        if not self.before:
            call()
        raise gone

    def create(self, path: str, *, size: int = 0) -> int:
        return self._die(lambda: QuickDisk.create(self, path, size=size))  # type: ignore[return-value]

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._die(lambda: QuickDisk.write(self, fd, data, offset))

    def write_whole(self, path: str, data: bytes) -> None:
        self._die(lambda: QuickDisk.write_whole(self, path, data))

    def sync(self, fd: int) -> None:
        self._die(lambda: QuickDisk.sync(self, fd), GoneInSync)

    def truncate(self, path: str, size: int) -> None:
        self._die(lambda: QuickDisk.truncate(self, path, size))

    def name(self, temporary: str, path: str) -> None:
        self._die(lambda: QuickDisk.name(self, temporary, path))

    def shorten(self, fd: int, end: int) -> None:
        self._die(lambda: QuickDisk.shorten(self, fd, end))

    def unlink(self, path: str) -> None:
        self._die(lambda: QuickDisk.unlink(self, path))

    def remove_dir(self, path: str) -> None:
        self._die(lambda: QuickDisk.remove_dir(self, path))

    def cut(self, fd: int, end: int, size: int) -> None:
        if self.dead:
            raise Gone
        super().cut(fd, end, size)


Step = tuple[str, Callable[[Shard], object]]


def life() -> list[Step]:
    """Everything that writes, in an order in which each step depends on those before."""
    return [
        ("put a", lambda s: s.put("a", TopicConfig(durability="fsync", durable=True))),
        ("append a", lambda s: s.append("a", records(5, tag="x"), key="k")),
        ("append b", lambda s: s.append("b", records(7, tag="y"), config=TopicConfig(cap_records=9))),
        ("flush a", lambda s: s.flush("a")),
        ("delete a", lambda s: s.delete("a", before_seq=3)),
        ("append b again", lambda s: s.append("b", records(5))),
        ("checkpoint", lambda s: s.checkpoint()),
        ("append c", lambda s: s.append("c", records(3))),
        ("flush c", lambda s: s.flush("c")),
        ("checkpoint c", lambda s: s.checkpoint()),
        ("drop c", lambda s: s.drop("c")),
        ("delete a by tag", lambda s: s.delete("a", tag="x")),
        ("append a long", lambda s: s.append("a", long(20))),
        ("flush a long", lambda s: s.flush("a")),
        ("put b", lambda s: s.put("b", TopicConfig(cap_records=4))),
        ("flush b", lambda s: s.flush("b")),
        ("checkpoint again", lambda s: s.checkpoint()),
        ("append a large", lambda s: s.append_large("a", long(9), key="l")),
        ("put d", lambda s: s.put("d", TopicConfig(durability="memory"))),
        ("append d large", lambda s: s.append_large("d", long(4))),
        ("append a more", lambda s: s.append("a", records(3, tag="z"), key="m")),
        ("delete a more", lambda s: s.delete("a", tag="z")),
        ("append c anew", lambda s: s.append("c", records(2))),
        ("checkpoint last", lambda s: s.checkpoint()),
    ]


def seen(shard: Shard) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, topic in shard.engine.topics.items():
        report = shard.report(name)
        contents = tuple(shown(shard.everything(name)))
        found[name] = (report.head_seq, report.earliest_seq, report.count, report.bytes, topic.evict_floor, contents)
    return found


def live_until(shard: Shard, steps: list[Step]) -> int:
    """How many steps were done before the disk died."""
    for number, (_, step) in enumerate(steps):
        try:
            step(shard)
        except (Gone, ApiError):
            return number
    return len(steps)


def test_a_crash_at_every_call_of_the_disk_loses_nothing_acknowledged(tmp_path: Path) -> None:
    options: dict[str, Any] = {"segment_max_events": 10, "wal_file_bytes": 8_192}
    steps = life()
    # What can be seen after each number of steps, in a life without crashes.
    shard = Shard(tmp_path / "whole", **options)
    expected = [seen(shard)]
    for _, step in steps:
        step(shard)
        expected.append(seen(shard))
    shard.crash()
    done = at = 0
    while done < len(steps):
        at += 1
        for before in (True, False):
            folder = tmp_path / f"{at}-{before}"
            disk = DyingDisk(at, before=before)
            try:
                shard = Shard(folder, disk=disk, **options)
            except Gone:
                shard = Shard(folder, **options)
                assert seen(shard) == {}
                shard.crash()
                continue
            done = live_until(shard, steps)
            shard.crash()
            shard.open()
            found = seen(shard)
            # The step that was under way is done or not done, as a whole.
            assert found in (expected[done], expected[min(done + 1, len(steps))]), (
                f"call {at} {'before' if before else 'after'}: step {steps[min(done, len(steps) - 1)][0]!r}"
            )
            shard.restart()
            assert seen(shard) == found, "recovery is not idempotent"
            shard.append("a", records(1))
            shard.checkpoint()
            shard.restart()
            shard.crash()
    assert at > 2 * len(steps), "the disk was hardly asked"
