"""Segments that go to the cold tier, what happens to them meanwhile, and that nobody waits for that disk."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from figures import CRASH_POINTS
from model import QuickDisk, Record, Shard, error_of
from test_tails import Follower, Stage

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import DiskFull
from topics.storage.columns import pack
from topics.storage.config import TopicConfig
from topics.storage.leases import CHECKPOINT_TAG, log_name
from topics.walshard.tiering.relocator import surplus


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    given = {"segment_max_events": 20, "wal_file_bytes": 16_384, "cold_dir": str(tmp_path / "cold")}
    return {**given, "hot_retain_segments": 1, "cache_bytes": 0, **more}


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path / "data", **settings(tmp_path))


def records(count: int, *, start: int = 0, **more: Any) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(start, start + count)]


def fill(shard: Shard, topic: str = "t", count: int = 100, **more: Any) -> None:
    """Segments of twenty records, in blocks of ten. Every fifth is tagged, unless all are."""
    for start in range(0, count, 10):
        batch = records(10, start=start, **more)
        if "tag" not in more:
            batch[4] = Record(b"5", tag="fifth")
            batch[9] = Record(b"10", tag="fifth")
        shard.append(topic, batch)
    shard.flush(topic)
    shard.checkpoint()


def forget_log(shard: Shard) -> None:
    """What is in the log now is only in segments and snapshots then."""
    files = list(shard.engine.wal.files)
    shard.checkpoint()
    while shard.engine.wal.current in files:
        shard.append("filler", [Record(b'"%b"' % (b"x" * 1_000))] * 3)
    for topic in list(shard.engine.topics):
        shard.flush(topic)
    shard.checkpoint()
    assert not any(os.path.exists(file.path) for file in files)


def tiers(shard: Shard, topic: str = "t") -> str:
    return "".join("c" if segment.cold else "h" for segment in shard.topic(topic).segments)


def files(root: Path) -> list[str]:
    found = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return sorted(name for name in found if name != "cold.json")


def seqs(shard: Shard, topic: str = "t", **more: Any) -> list[int]:
    return [stored.seq for stored in shard.everything(topic, **more)]


# --- which ---------------------------------------------------------------------------------------------


def segment(size: int, **more: Any) -> Any:
    return SimpleNamespace(data_bytes=size, sealed=True, cold=False, live_rows=1, **more)


@pytest.mark.parametrize(
    ("sizes", "keep_segments", "keep_bytes", "going"),
    [
        ([], 4, 0, 0),
        ([1] * 4, 4, 0, 0),
        ([1] * 6, 4, 0, 2),
        ([1] * 6, 0, 0, 6),
        ([10] * 6, 4, 30, 3),  # the stricter of the two
        ([10] * 6, 2, 1_000, 4),
        ([10] * 3, 4, 5, 3),  # not even the newest fits
        ([10, 10, 50, 10], 4, 40, 3),
    ],
)
def test_the_oldest_go_beyond_either_bound(sizes: list[int], keep_segments: int, keep_bytes: int, going: int) -> None:
    segments = [segment(size) for size in sizes]
    assert surplus(segments, keep_segments=keep_segments, keep_bytes=keep_bytes) == segments[:going]


def test_open_cold_and_dead_segments_do_not_count() -> None:
    opened, cold, dead, old, new = (segment(1) for _ in range(5))
    opened.sealed, cold.cold, dead.live_rows = False, True, 0
    assert surplus([cold, dead, old, new, opened], keep_segments=1, keep_bytes=0) == [old]


# --- there and back ------------------------------------------------------------------------------------


def test_what_is_old_goes_and_is_read_as_before(shard: Shard, tmp_path: Path) -> None:
    fill(shard, tag="x", meta=b'{"m":1}', node="n")
    before = shard.everything("t")
    shard.relocate()
    assert tiers(shard) == "cccch"
    home = f"topics/{shard.topic('t').id:016x}"
    old = [f"{home}/{first:020d}" for first in (1, 21, 41, 61)]
    assert files(tmp_path / "cold") == [f"{name}.data" for name in old]
    hot = [name for name in files(tmp_path / "data") if name.startswith(home)]
    assert hot == sorted([*(f"{name}.idx" for name in old), f"{home}/{81:020d}.data", f"{home}/{81:020d}.idx"])
    assert shard.everything("t") == before
    assert shard.everything("t", limit=7) == before
    assert shard.everything("t", include_tags=False, include_meta=False, limit=3)[0].record.data == b"0"
    shard.restart()
    assert tiers(shard) == "cccch"
    assert shard.everything("t") == before
    assert shard.relocator is not None
    assert not shard.relocator.step(), "there is nothing to do"


def test_a_page_is_as_long_as_it_was_asked_for(shard: Shard) -> None:
    """One fetch brings all that a request wants."""
    fill(shard)
    shard.relocate()
    assert [one.seq for one in shard.diff("t", 0, limit=55).stored] == list(range(1, 56))
    assert shard.engine.fetcher.fetches == 1


def test_where_nothing_is_configured_nothing_goes_and_the_rest_is_read(shard: Shard, tmp_path: Path) -> None:
    fill(shard)
    shard.relocate()
    before = shard.everything("t")
    shard.crash()
    later = Shard(tmp_path / "data", cold=str(tmp_path / "cold"), **settings(tmp_path, cold_dir=None))
    fill(later, count=100)
    later.relocate()
    assert tiers(later) == "cccchhhhhh"
    assert later.everything("t")[:100] == before


def test_deletes_reach_it(shard: Shard) -> None:
    fill(shard)
    fill(shard, "u")
    shard.relocate()
    shard.append("t", [Record(b"1", tag="z")])
    assert shard.delete("t", before_seq=5).deleted == 4
    assert shard.delete("u", tag="fifth", before_seq=31).deleted == 6
    expected = seqs(shard), seqs(shard, "u")
    assert expected[0] == list(range(5, 102))
    assert all(row.sizes is None for topic in ("t", "u") for row in shard.topic(topic).rows), "they cost memory"
    assert expected[1] == [seq for seq in range(1, 101) if seq % 5 or seq > 30]
    forget_log(shard)
    shard.restart()
    assert (seqs(shard), seqs(shard, "u")) == expected
    shard.checkpoint()
    shard.restart()
    assert (seqs(shard), seqs(shard, "u")) == expected
    assert shard.report("t").bytes == sum(stored.record.size for stored in shard.everything("t"))


def test_caps_and_ttl_reach_it(shard: Shard, tmp_path: Path) -> None:
    shard.put("t", TopicConfig(cap_records=100))
    fill(shard)
    shard.relocate()
    for number in range(1, 34):
        shard.append("t", records(1))
        assert shard.report("t").count == 100
        assert shard.report("t").earliest_seq == number + 1
    gap = shard.diff("t", 0).tombstone
    assert gap is not None
    assert (gap.gap_from, gap.gap_to, gap.reason) == (1, 33, "cap")
    shard.checkpoint()
    assert shard.relocator is not None
    shard.relocator.wait()
    assert len(files(tmp_path / "cold")) == 3, "a segment without a live record is gone from there too"
    shard.put("t", TopicConfig(ttl_ms=50))
    shard.wall.pass_ms(51)
    assert seqs(shard) == []
    shard.checkpoint()
    shard.relocator.wait()
    assert files(tmp_path / "cold") == []


def test_a_dropped_topic_leaves_nothing(shard: Shard, tmp_path: Path) -> None:
    fill(shard)
    shard.relocate()
    shard.drop("t")
    shard.checkpoint()
    assert shard.relocator is not None
    shard.relocator.wait()
    assert list((tmp_path / "cold" / "topics").iterdir()) == []


# --- while it is copied --------------------------------------------------------------------------------


class Gate(QuickDisk):
    """Stops whoever reads or writes a cold file, until it is opened."""

    def __init__(self) -> None:
        self.open_ = threading.Event()
        self.open_.set()
        self.stopped = threading.Event()
        self.broken: Exception | None = None
        self._cold: set[int] = set()

    def _pass(self) -> None:
        if not self.open_.is_set():
            self.stopped.set()
            assert self.open_.wait(20)

    def open(self, path: str, *, write: bool = False) -> int:
        fd = super().open(path, write=write)
        if "/cold/" in path:
            self._cold.add(fd)
        else:
            self._cold.discard(fd)
        return fd

    def read(self, fd: int, length: int, offset: int) -> bytes:
        if fd in self._cold:
            self._pass()
            if self.broken is not None:
                raise self.broken
        return super().read(fd, length, offset)

    def copy(self, source: str, path: str, size: int, *, go_on: Any) -> bool:
        if self.broken is not None:
            raise self.broken

        def stop_in_the_middle(took_s: float) -> bool:
            self._pass()
            return True

        return super().copy(source, path, size, go_on=stop_in_the_middle)


@pytest.fixture
def gate(shard: Shard) -> Gate:
    gate = Gate()
    shard.restart(gate)
    return gate


def stopped_copy(shard: Shard, gate: Gate) -> None:
    gate.open_.clear()
    assert shard.relocator is not None
    shard.relocator.consider(shard.topic("t"))
    assert shard.relocator.step()
    assert gate.stopped.wait(10)


def test_deletes_during_the_copy_are_in_it(shard: Shard, gate: Gate) -> None:
    """Their flags were written to the hot file, behind the copy's back, and the log has forgotten them."""
    fill(shard)
    stopped_copy(shard, gate)
    shard.delete("t", tag="fifth", before_seq=12)
    forget_log(shard)
    assert tiers(shard) == "hhhhh"
    gate.open_.set()
    shard.relocate()
    assert tiers(shard) == "cccch"
    shard.restart()
    assert seqs(shard) == [seq for seq in range(1, 101) if seq not in (5, 10)]
    assert shard.report("t").count == 98


def test_a_topic_that_is_dropped_during_the_copy(shard: Shard, gate: Gate, tmp_path: Path) -> None:
    fill(shard)
    stopped_copy(shard, gate)
    shard.drop("t")
    shard.checkpoint()
    gate.open_.set()
    assert shard.relocator is not None
    shard.relocator.wait()
    shard.checkpoint()
    shard.relocator.wait()
    assert files(tmp_path / "cold") == []


def test_a_segment_that_dies_during_the_copy(shard: Shard, gate: Gate, tmp_path: Path) -> None:
    fill(shard)
    stopped_copy(shard, gate)
    shard.delete("t", before_seq=31)
    shard.checkpoint()
    gate.open_.set()
    shard.relocate()
    assert shard.relocator is not None
    shard.relocator.wait()
    assert tiers(shard) == "ccch"
    assert len(files(tmp_path / "cold")) == 3
    assert seqs(shard) == list(range(31, 101))


def test_stopping_gives_a_copy_up(shard: Shard, tmp_path: Path) -> None:
    fill(shard)
    assert shard.relocator is not None
    shard.relocator.consider(shard.topic("t"))
    shard.relocator._closing = True
    assert shard.relocator.step()
    shard.relocator.wait()
    assert shard.relocator.arrived == []
    assert files(tmp_path / "cold") == []


@pytest.mark.parametrize("broken", [DiskFull("no space"), OSError(errno.EIO, "broken"), FileNotFoundError("gone")])
def test_a_cold_disk_that_takes_nothing_stops_nothing_else(shard: Shard, gate: Gate, broken: Exception) -> None:
    fill(shard)
    assert shard.relocator is not None
    said: list[str] = []
    shard.relocator.on_trouble = said.append
    gate.broken = broken
    shard.relocator.consider(shard.topic("t"))
    for _ in range(3):
        shard.relocator.step()
        shard.relocator.wait()
        shard.wall.pass_ms(40_000)
    assert said == [str(broken)], "said once"
    shard.append("t", records(1))
    shard.checkpoint()
    assert tiers(shard) == "hhhhh"
    gate.broken = None
    shard.relocate()
    assert tiers(shard) == "cccch"
    assert len(seqs(shard)) == 101


def test_flags_that_the_cold_disk_does_not_take_wait(shard: Shard, gate: Gate, tmp_path: Path) -> None:
    fill(shard)
    shard.relocate()
    shard.delete("t", tag="fifth", before_seq=12)
    away = tmp_path / "away"
    (tmp_path / "cold").rename(away)
    shard.checkpoint()
    covered = shard.mover.snapshot_lsn
    assert covered == shard.engine.wal.written_lsn, "the snapshot has the flags"
    shard.append("t", records(1))
    away.rename(tmp_path / "cold")
    shard.checkpoint()
    assert shard.mover.snapshot_lsn > covered
    shard.restart()
    assert seqs(shard) == [seq for seq in range(1, 102) if seq not in (5, 10)]


# --- nobody waits --------------------------------------------------------------------------------------


@pytest.fixture
def away(shard: Shard, gate: Gate) -> Shard:
    """A shard whose cold disk hangs."""
    fill(shard)
    shard.relocate()
    shard.append("u", records(3))
    gate.open_.clear()
    return shard


def diff_of(shard: Shard, topic: str, from_seq: int = 0) -> int:
    return shard.send(Op.DIFF, messages.Diff(topic, from_seq, 100, 2**20, None, True, True))


def test_writes_and_other_reads_do_not_wait(away: Shard, gate: Gate) -> None:
    waiting = diff_of(away, "t")
    assert gate.stopped.wait(10)
    assert not away.answered(waiting)
    for topic in ("t", "u"):
        sent = away.send_append(topic, records(1))
        away.engine.commit.write()
        assert away.answer(sent).records == 1
    for other in (diff_of(away, "u"), diff_of(away, "t", 80)):
        assert away.answered(other)
        away.answers.messages.pop(other)
    assert not away.answered(waiting)
    gate.open_.set()
    away.engine.fetcher.wait()
    _, body = messages.decode_answer(away.answers.messages.pop(waiting))
    assert [record["$seq"] for record in json.loads(bytes(body) + b"}")["records"]] == list(range(1, 101))


def test_two_who_want_the_same_are_one_fetch(away: Shard, gate: Gate) -> None:
    both = diff_of(away, "t"), diff_of(away, "t")
    gate.open_.set()
    away.engine.fetcher.wait()
    assert all(map(away.answered, both))
    assert away.engine.fetcher.fetches == 1


def test_deletes_wait_but_nothing_waits_for_them(away: Shard, gate: Gate) -> None:
    head = messages.DeleteRecords("t", 5, None, False)
    waiting = away.send(Op.DELETE_RECORDS, head)
    away.engine.commit.write()
    assert gate.stopped.wait(10)
    lsn = away.engine.wal.written_lsn
    assert not away.answered(waiting)
    assert away.topic("t").count == 100
    sent = away.send_append("t", records(1))
    away.engine.commit.write()
    assert away.answered(sent)
    assert away.engine.wal.written_lsn == lsn + 1, "nothing of the delete is in the log"
    gate.open_.set()
    away.settle()
    assert away.answer(waiting).deleted == 4
    assert seqs(away) == list(range(5, 102))


def test_whole_blocks_are_deleted_without_a_look(away: Shard) -> None:
    assert away.delete("t", before_seq=41).deleted == 40


def test_one_who_has_gone_is_not_answered(away: Shard, gate: Gate) -> None:
    gone, cancelled, stays = diff_of(away, "t"), diff_of(away, "t"), diff_of(away, "t", 20)
    other = away.answers
    away.engine.handle(messages.pack_cancel(cancelled), other)
    away.answers = type(other)()
    late = diff_of(away, "t", 40)
    away.engine.caller_gone(away.answers)
    away.answers = other
    gate.open_.set()
    away.engine.fetcher.wait()
    assert set(other.messages) == {gone, stays}
    assert late not in other.messages


def test_what_can_not_be_read_is_an_error_of_whoever_wants_it(away: Shard, gate: Gate) -> None:
    gate.broken = OSError(errno.EIO, "broken")
    gate.open_.set()
    waiting = diff_of(away, "t")
    away.engine.fetcher.wait()
    assert error_of(lambda: away.answer(waiting)).status >= 500
    assert away.append("t", records(1)).records == 1
    gate.broken = None
    assert len(seqs(away)) == 101


def test_caps_do_not_wait_for_what_was_looked_ahead(shard: Shard, gate: Gate) -> None:
    shard.put("t", TopicConfig(cap_records=100))
    fill(shard)
    shard.relocate()
    shard.engine.fetcher.look_ahead(shard.topic("t"))
    shard.engine.fetcher.wait()
    gate.open_.clear()
    shard.engine.fetcher.look_ahead(shard.topic("t"))
    assert not shard.engine.fetcher.busy, "it is known already"
    for number in range(1, 20):
        shard.append("t", records(1))
        assert shard.report("t").count == 100
        assert shard.report("t").earliest_seq == number + 1
    assert not gate.stopped.is_set()
    gate.open_.set()


@pytest.mark.parametrize("config", [TopicConfig(), TopicConfig(cap_records=500, discard="reject")])
def test_nothing_is_looked_ahead_where_nothing_is_cut(shard: Shard, config: TopicConfig) -> None:
    shard.put("t", config)
    fill(shard)
    shard.relocate()
    shard.engine.fetcher.look_ahead(shard.topic("t"))
    assert not shard.engine.fetcher.busy


def test_ttl_does_not_wait_for_what_was_looked_ahead(shard: Shard, gate: Gate) -> None:
    shard.put("t", TopicConfig(ttl_ms=1_000))
    for start in range(0, 60, 2):
        shard.append("t", records(2, start=start))
        shard.wall.pass_ms(10)
    shard.flush("t")
    shard.relocate()
    shard.engine.fetcher.look_ahead(shard.topic("t"))
    shard.engine.fetcher.wait()
    gate.open_.clear()
    shard.wall.pass_ms(1_000 - 300 + 41)
    assert shard.report("t").earliest_seq == 11
    assert not gate.stopped.is_set()
    gate.open_.set()
    assert seqs(shard) == list(range(11, 61))


# --- streams, queues and routers -----------------------------------------------------------------------


def test_a_tail_that_is_far_behind(tmp_path: Path) -> None:
    """It gets everything in order, and one at the head gets what is new at once."""
    stage = Stage(tmp_path / "data", **settings(tmp_path))
    shard = stage.shard
    gate = Gate()
    shard.restart(gate)
    fill(shard)
    shard.relocate()
    gate.open_.clear()
    far, near = Follower(), Follower()
    stage.follow(far, from_seq=0, limit=15)
    stage.follow(near)
    far.take(), near.take()
    shard.engine.tails.push()
    assert gate.stopped.wait(10)
    assert far.pieces() == []
    shard.send_append("t", records(1))
    shard.engine.commit.write()
    shard.engine.tails.push()
    assert [seqs for _, seqs in near.pieces()] == [[101]]
    assert far.pieces() == []
    gate.open_.set()
    found: list[int] = []
    for _ in range(60):
        shard.engine.fetcher.wait()
        shard.engine.tails.push()
        for _, pushed in far.pieces():
            found += pushed
    assert found == list(range(1, 102))


def test_a_follower_that_goes_while_it_is_fetched_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "data", **settings(tmp_path))
    shard = stage.shard
    fill(shard)
    shard.relocate()
    for leave in (
        lambda far, correlation: shard.engine.caller_gone(far),
        lambda far, correlation: stage.send(Op.UNFOLLOW, far, messages.Unfollow(), correlation=correlation),
    ):
        far = Follower()
        correlation = stage.follow(far, from_seq=0)
        far.take()
        shard.engine.tails.push()
        leave(far, correlation)
        shard.engine.fetcher.wait()
        shard.engine.tails.push()
        assert far.pieces() == []
        assert len(shard.engine.tails) == 0


def test_jobs_and_acks(shard: Shard) -> None:
    shard.put("q", TopicConfig(type="queue"))
    fill(shard, "q")
    shard.relocate()
    id = shard.topic("q").id
    shard.call(Op.OPEN_QUEUE, messages.OpenQueue("q"))
    taken = shard.call(Op.TAKE_JOBS, messages.TakeJobs("q", id, [], 0, [], 15, 2**20))
    assert taken.seqs == list(range(1, len(taken.seqs) + 1))
    assert taken.seqs
    again = shard.call(Op.TAKE_JOBS, messages.TakeJobs("q", id, [3, 25], taken.seqs[-1], taken.seqs, 15, 2**20))
    assert again.seqs[0] == 3
    assert not again.gone
    done = shard.call(Op.COMPLETE_JOBS, messages.CompleteJobs("q", id, [1, 3, 25], False, 0, 0))
    assert done.live == 97
    shard.checkpoint()
    shard.restart()
    assert seqs(shard, "q") == [seq for seq in range(1, 101) if seq not in (1, 3, 25)]


def test_what_a_queue_needs_to_open_stays(shard: Shard) -> None:
    """Its leases from the last checkpoint on."""
    shard.put("q", TopicConfig(type="queue"))
    id, log = shard.topic("q").id, log_name("q")

    def write(*, checkpoint: bool = False) -> None:
        tags = [CHECKPOINT_TAG] if checkpoint else None
        body = pack([b"{}" for _ in range(1 if checkpoint else 9)], tags=tags)
        head = messages.LogLeases("q", id, False, 1 if checkpoint else 9, len(body), checkpoint)
        shard.send(Op.LOG_LEASES, head, body)
        shard.settle()

    for number in range(1, 11):
        write()
        if number == 4:
            write(checkpoint=True)
    shard.flush(log)
    shard.relocate()
    first = shard.call(Op.OPEN_QUEUE, messages.OpenQueue("q")).log_from + 1
    cold = [segment for segment in shard.topic(log).segments if segment.cold]
    assert cold
    assert cold[-1].last_seq < first == 37
    assert tiers(shard, log).count("h") > shard.settings.hot_retain_segments
    write(checkpoint=True)
    for _ in range(2):
        write()
    shard.flush(log)
    shard.relocate()
    assert len([segment for segment in shard.topic(log).segments if segment.cold]) > len(cold), "it goes later"


def test_a_leases_log_that_is_damaged_stays_and_ends_nothing_else(shard: Shard) -> None:
    """Where its last checkpoint is can't be told; said once, until it can be told again."""
    log = log_name("q")
    for topic in (log, "t"):
        fill(shard, topic)
    path = Path(shard.topic(log).segments[1].index_path)
    whole = path.read_bytes()
    shard._files.forget(str(path))
    path.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    for _ in range(3):
        shard.relocate()
    assert (tiers(shard, log), tiers(shard)) == ("hhhhh", "cccch")
    [(topic, reason)] = shard.engine.totals.unreadable
    assert (topic, path.name in reason) == (log, True)
    path.write_bytes(whole)
    shard.relocate()
    assert "c" not in tiers(shard, log), "it has no checkpoint"
    path.write_bytes(b"")
    shard.relocate()
    assert len(shard.engine.totals.unreadable) == 2


def test_forwards_read_it(shard: Shard) -> None:
    fill(shard)
    shard.relocate()
    at, found = 0, 0
    for _ in range(30):
        head = messages.ReadRaw("t", shard.topic("t").id, at, 25, 2**20)
        piece = shard.call(Op.READ_RAW, head)
        assert piece.lost == 0
        found += piece.count
        at = piece.to_seq
        if at == 100:
            break
    assert (at, found) == (100, 100)


# --- crashes -------------------------------------------------------------------------------------------


class Gone(BaseException):
    """Not an Exception: nobody may go on after it."""


class DyingDisk(QuickDisk):
    """Ends the process at the n-th step that changes something."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            CRASH_POINTS.add()
            raise Gone

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._step()
        super().write(fd, data, offset)

    def write_whole(self, path: str, data: bytes) -> None:
        self._step()
        super().write_whole(path, data)

    def unlink(self, path: str) -> None:
        self._step()
        super().unlink(path)

    def copy(self, source: str, path: str, size: int, *, go_on: Any) -> bool:
        self._step()  # nothing is there
        with open(path + ".tmp", "wb") as file:
            file.write(b"half of it")
        self._step()
        done = super().copy(source, path, size, go_on=go_on)
        self._step()  # it is complete, and nobody knows
        return done


def run_inline(shard: Shard) -> None:
    """Jobs on the calling thread, so that its end is theirs."""
    assert shard.relocator is not None
    for worker in (shard.relocator._worker, shard.mover._worker):
        worker.submit = lambda work, then: then(work(), None)  # type: ignore[method-assign]


def test_it_may_end_at_every_step(tmp_path: Path) -> None:
    steps = 0
    finished = False
    for at in range(1, 200):
        folder = tmp_path / str(at)
        shard = Shard(folder / "data", **settings(folder))
        fill(shard, count=60)
        shard.delete("t", tag="fifth", before_seq=12)
        shard.append("t", [Record(b"1", tag="y")])
        forget_log(shard)
        shard.restart(disk := DyingDisk(0))
        run_inline(shard)
        disk.left = at
        try:
            shard.copy_to_cold()
            shard.delete("t", tag="fifth", before_seq=27)
            shard.mover.checkpoint()
            shard.mover.checkpoint()
            finished = True
        except Gone:
            steps = at
        disk.left = 0
        gone = ({5, 10}, {5, 10, 15, 20, 25})
        expected = {tuple(seq for seq in range(1, 62) if seq not in deleted) for deleted in gone}
        shard.restart()
        assert tuple(seqs(shard)) in expected, f"step {at}"
        assert shard.report("t").count == len(seqs(shard))
        named = {one.path for topic in shard.engine.topics.values() for one in topic.segments}
        found = {str(path) for path in folder.rglob("*.data*")}
        assert found == named, f"step {at}: nothing is there twice, nothing half"
        shard.relocate()
        assert tiers(shard) == "cchh"
        assert tuple(seqs(shard)) in expected
        shard.restart()
        assert tuple(seqs(shard)) in expected
        shard.crash()
        if finished:
            break
    assert steps > 12
    assert os.path.isdir(folder / "cold")


def test_a_long_poll_whose_own_records_went_there_meanwhile(shard: Shard) -> None:
    """They are none of its business, so it waits on, and it has passed them when its time is up."""
    shard.put("t", TopicConfig())
    head = messages.Diff("t", 0, 100, 2**20, ["me"], True, True, 30_000)
    waiting = shard.send(Op.DIFF, head)
    fill(shard, node="me", tag="x")
    shard.relocate()
    assert not shard.answered(waiting)
    for _, _, poll in shard.engine.polls._deadlines:
        poll.deadline_ns = 0
    shard.engine.polls._deadlines = [(0, waiting, poll) for _, _, poll in shard.engine.polls._deadlines]
    shard.engine.polls.end_due(shard.engine.refresh)
    _, body = messages.decode_answer(shard.answers.messages.pop(waiting))
    page = json.loads(bytes(body) + b"}")
    assert (page["records"], page["next_from_seq"], page["caught_up"]) == ([], 100, True)
