"""A block that can't be read is an error for whoever reads it, and for nobody else."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from model import QuickDisk, Record, Shard, error_of
from test_relocator import Gate
from test_tails import Follower, Stage

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import DiskFull
from topics.storage.config import TopicConfig

CAUSES = ["rot", "cold disk"]
SIZE = Record(b"1234").size


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    more: dict[str, Any] = {"cold_dir": str(tmp_path / "cold"), "hot_retain_segments": 1, "cache_bytes": 0}
    return Stage(tmp_path / "data", segment_max_events=20, wal_file_bytes=16_384, **more)


@pytest.fixture
def shard(stage: Stage) -> Shard:
    return stage.shard


def records(count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % (1_000 + number), **more) for number in range(count)]


def fill(shard: Shard, config: TopicConfig, *, step_ms: int = 0, count: int = 60, **more: Any) -> None:
    """Blocks of ten records in segments of two, the last of which is in the tail."""
    shard.put("t", config)
    for _ in range(count):
        shard.append("t", records(1, **more))
        shard.wall.pass_ms(step_ms)
    shard.flush("t")
    shard.append("t", records(1))
    shard.checkpoint()


def spoil(shard: Shard, cause: str) -> Gate:
    """The first block, or everything in the cold tier."""
    gate = Gate()
    if cause == "cold disk":
        shard.relocate()
        shard.restart(gate)
        gate.broken = OSError(errno.EIO, "broken")
    else:
        flip(shard, shard.topic("t").rows.front())
        shard.restart(gate)
    return gate


def flip(shard: Shard, row: Any) -> None:
    fd = os.open(row.source.path, os.O_RDWR)
    at = row.offset + row.length - 5
    before = os.pread(fd, 1, at)[0]
    os.pwrite(fd, bytes([before ^ 0x40]), at)
    os.close(fd)


def unreadable(shard: Shard, from_seq: int = 0) -> None:
    assert error_of(lambda: shard.diff("t", from_seq)).status in (500, 503)  # 503: the disk may come back


def complaints(shard: Shard) -> int:
    return len(shard.engine.totals.unreadable)


# --- caps ---


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cap_of_records_stays_exact(shard: Shard, cause: str) -> None:
    fill(shard, TopicConfig(cap_records=61))
    spoil(shard, cause)
    for number in range(1, 26):
        shard.append("t", records(1))
        report = shard.report("t")
        assert (report.count, report.earliest_seq, report.bytes) == (61, number + 1, 61 * SIZE)
        if number == 5:
            unreadable(shard, 5)
    assert complaints(shard) == (3 if cause == "cold disk" else 1), "one for each block"
    assert shard.diff("t", 41).tombstone is None


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cap_of_bytes_holds(shard: Shard, cause: str) -> None:
    fill(shard, TopicConfig(cap_bytes=61 * SIZE))
    spoil(shard, cause)
    for number in range(1, 26):
        shard.append("t", records(1))
        report = shard.report("t")
        assert (report.count, report.earliest_seq, report.bytes) == (61, number + 1, 61 * SIZE)


def test_a_share_is_taken_where_sizes_differ(shard: Shard) -> None:
    """What all of a block count for together is known, and gone when all of them are."""
    shard.put("t", TopicConfig(cap_records=20))
    for number in range(20):
        shard.append("t", [Record(b"1" * (number + 1))])
    shard.flush("t")
    shard.checkpoint()
    rest = sum(Record(b"1" * (number + 1)).size for number in range(10, 20))
    spoil(shard, "rot")
    for number in range(1, 11):
        shard.append("t", [Record(b"1")])
        assert shard.report("t").bytes > rest
        assert shard.report("t").earliest_seq == number + 1
    assert shard.report("t").bytes == rest + 10 * Record(b"1").size


def test_a_cap_that_was_set_before_is_kept_by_a_start(shard: Shard) -> None:
    """The floor is in a block that has rotted since, and so is what the log says was taken or deleted."""
    fill(shard, TopicConfig(cap_records=61))
    shard.append("t", records(3))
    shard.checkpoint()
    shard.append("t", records(2))
    shard.delete("t", before_seq=8)
    front = shard.topic("t").rows.front()
    shard.crash()
    flip(shard, front)
    for _ in range(2):
        shard.open()
        report = shard.report("t")
        assert (report.count, report.earliest_seq, report.bytes) == (59, 8, 59 * SIZE)
        unreadable(shard, 7)
        assert complaints(shard) == 1
        shard.checkpoint()
        shard.crash()


def test_a_tighter_cap_reaches_through_it(shard: Shard) -> None:
    fill(shard, TopicConfig())
    spoil(shard, "rot")
    shard.put("t", TopicConfig(cap_records=56))
    assert shard.report("t").earliest_seq == 6
    shard.put("t", TopicConfig(cap_records=30))
    assert [stored.seq for stored in shard.everything("t")] == list(range(32, 62))


# --- TTL ---


@pytest.mark.parametrize("cause", CAUSES)
def test_ttl_takes_it_when_all_of_it_has_expired(shard: Shard, cause: str) -> None:
    fill(shard, TopicConfig(ttl_ms=10_000), step_ms=100)
    gate = spoil(shard, cause)
    shard.wall.pass_ms(4_000 + 501)  # six records have expired
    for _ in range(3):
        shard.mover.step(quiet=False)
        assert shard.report("t").earliest_seq == 1
    assert shard.append("t", records(1)).records == 1
    assert complaints(shard) == 1
    shard.wall.pass_ms(400)
    if cause == "cold disk":
        gate.broken = None
        shard.wall.pass_ms(300)
        assert [stored.seq for stored in shard.everything("t")] == list(range(14, 63))
    else:
        assert [stored.seq for stored in shard.everything("t")] == list(range(11, 63))


def test_what_can_be_read_again_expires_by_record(shard: Shard) -> None:
    fill(shard, TopicConfig(ttl_ms=10_000), step_ms=100)
    gate = spoil(shard, "cold disk")
    shard.wall.pass_ms(4_000 + 301)
    assert shard.report("t").earliest_seq == 1
    gate.broken = None
    shard.wall.pass_ms(1_000)
    assert shard.report("t").earliest_seq == 15


@pytest.mark.parametrize("cause", CAUSES)
def test_whoever_comes_by_meets_nothing_of_it(stage: Stage, cause: str) -> None:
    """Followers, long polls, maintenance: outside of any request of the reader that wants the block."""
    shard = stage.shard
    fill(shard, TopicConfig(ttl_ms=10_000, cap_records=61), step_ms=100)
    spoil(shard, cause)
    follower = Follower()
    stage.follow(follower)
    waiting = shard.send(Op.DIFF, messages.Diff("t", 61, 100, 2**20, None, True, True, 1))
    shard.wall.pass_ms(4_000 + 501)
    shard.engine.tails.push()
    shard.engine.polls.end(shard.engine.refresh)
    assert shard.answered(waiting)
    shard.mover.step(quiet=True)
    shard.mover.wait()
    shard.append("t", records(1))
    shard.engine.tails.push()
    assert [seqs for _, seqs in follower.pieces()] == [[62]]


def test_a_start_expires_what_it_can(shard: Shard) -> None:
    fill(shard, TopicConfig(ttl_ms=10_000), step_ms=100)
    spoil(shard, "rot")
    shard.wall.pass_ms(4_000 + 501)
    shard.restart()
    assert shard.report("t").earliest_seq == 1
    shard.wall.pass_ms(400)
    shard.restart()
    assert shard.report("t").earliest_seq == 11


# --- deletes ---


def visible(shard: Shard, from_seq: int) -> tuple[Any, ...]:
    topic = shard.topic("t")
    report = shard.report("t")
    flags = [bytes(row.flags or b"") for row in topic.rows]
    stored = shard.diff("t", from_seq).stored
    return report.count, report.bytes, report.earliest_seq, report.removals, flags, stored, shard.engine.wal.written_lsn


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("delete", [{"before_seq": 5}, {"tag": "x"}, {"tag": "x", "prefix": True, "before_seq": 60}])
def test_a_delete_that_cuts_it_changes_nothing(shard: Shard, cause: str, delete: dict[str, Any]) -> None:
    shard.put("t", TopicConfig())
    for _ in range(6):
        batch = records(10)
        batch[3] = Record(b"1003", tag="x")
        shard.append("t", batch)
    shard.flush("t")
    shard.append("t", records(1))
    shard.checkpoint()
    gate = spoil(shard, cause)
    before = visible(shard, 40)
    for _ in range(2):
        assert error_of(lambda: shard.delete("t", **delete)).status == (503 if cause == "cold disk" else 500)
        shard.engine.fetcher.wait()
        assert visible(shard, 40) == before
    shard.restart(gate if cause == "rot" else None)
    assert visible(shard, 40)[:4] == before[:4]
    if cause == "cold disk":
        assert shard.delete("t", **delete).deleted == (4 if "tag" not in delete else 6)
    else:
        assert shard.delete("t", before_seq=11).deleted == 10, "all of it can go"


def test_an_ack_that_cuts_it_changes_nothing(shard: Shard) -> None:
    shard.put("t", TopicConfig(type="queue"))
    for _ in range(3):
        shard.append("t", records(10))
    shard.flush("t")
    shard.checkpoint()
    spoil(shard, "rot")
    topic = shard.topic("t")

    def ack(*seqs: int) -> messages.JobsCompleted:
        head = messages.CompleteJobs("t", topic.id, list(seqs), True, 0, 0)
        answer: messages.JobsCompleted = shard.call(Op.COMPLETE_JOBS, head)
        return answer

    before = visible(shard, 10)
    assert error_of(lambda: ack(3, 15)).status == 500
    assert visible(shard, 10) == before
    assert ack(15).live == 29
    assert ack(*range(1, 11)).live == 19
    shard.restart()
    assert [stored.seq for stored in shard.everything("t")] == [*range(11, 15), *range(16, 31)]


def test_a_delete_of_what_has_rotted_since_is_repeated_by_a_start(shard: Shard) -> None:
    fill(shard, TopicConfig(), count=40, tag="x")
    assert shard.delete("t", before_seq=5).deleted == 4
    front = shard.topic("t").rows.front()
    shard.crash()
    flip(shard, front)
    shard.open()
    report = shard.report("t")
    assert (report.count, report.earliest_seq, report.bytes) == (37, 5, 37 * SIZE)


# --- long polls ---


class Broken(QuickDisk):
    broken = False

    def read(self, fd: int, length: int, offset: int) -> bytes:
        if self.broken:
            raise OSError(errno.EIO, "broken")
        return super().read(fd, length, offset)


@pytest.mark.parametrize("nodes", [None, ["me"]])
def test_a_long_poll_that_meets_it_is_told(shard: Shard, nodes: list[str] | None) -> None:
    """Nothing is kept in memory here, so what was just written is read back."""
    disk = Broken()
    shard.restart(disk)
    shard.append("t", records(1))
    waiting = shard.send(Op.DIFF, messages.Diff("t", 1, 100, 2**20, nodes, True, True, 30_000))
    disk.broken = True
    assert shard.append("t", records(1, node="you")).first_seq == 2
    assert error_of(lambda: shard.answer(waiting)).status == 500
    assert shard.engine.polls._by_topic == {}
    disk.broken = False
    assert [stored.seq for stored in shard.everything("t")] == [1, 2]


def test_a_delete_that_ends_in_an_emptied_block_of_the_cold_tier(shard: Shard) -> None:
    """There is nothing to fetch: asked for its sizes, it was fetched again and again."""
    shard.put("t", TopicConfig(durability="disk"))
    for number in range(60):
        shard.append("t", records(1, tag="x" if 10 <= number < 20 else "y"))
    shard.flush("t")
    shard.append("t", records(1))
    assert shard.delete("t", tag="x").deleted == 10
    shard.checkpoint()
    shard.relocate()
    row = shard.topic("t").rows.find(14)
    assert row is not None
    assert row.source.cold
    assert shard.delete("t", before_seq=15).deleted == 10
    assert shard.topic("t").earliest_seq == 21


def test_segments_that_could_not_leave_the_hot_disk_go_though_nobody_asks_for_anything(shard: Shard) -> None:
    fill(shard, TopicConfig(durability="disk"))
    shard.copy_to_cold()
    whole = shard.disk.write_whole

    def full(*given: Any, **more: Any) -> None:
        raise DiskFull("no space")

    shard.disk.write_whole = full  # type: ignore[method-assign]
    shard.checkpoint()
    shard.disk.write_whole = whole  # type: ignore[method-assign]
    shard.mover.snapshot_lsn = shard.engine.wal.written_lsn  # nothing was written since
    shard.mover._flushed = shard.mover._pipe_flushed = False
    hot = [segment.leaving for segment in shard.topic("t").segments if segment.leaving]
    assert hot
    shard.wall.pass_ms(60_000)
    assert shard.mover.step(quiet=True)
    shard.mover.wait()
    assert not [segment for segment in shard.topic("t").segments if segment.leaving]
