"""A shard that starts while the cold disk is away serves the rest, forgets no delete, and goes on when it is back."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from folderplay import write_manifest
from model import QuickDisk, Record, Shard, error_of
from pipeshard import Forwarder, PipeShard
from test_relocator import fill, forget_log, records, run_inline, seqs, settings, tiers
from test_tier import LEFT, Disk
from test_tier_tools import Killed, kill_at

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.datadir.fsck.verify import verify
from topics.datadir.view.folder import Folder
from topics.errors import CorruptData, DiskFull, Unreachable
from topics.storage.config import TopicConfig
from topics.storage.format import DELETED
from topics.storage.snapshot import (
    ColdState,
    TopicState,
    decode_topic,
    encode_topic,
    join_flags,
    pack_flags,
    unpack_flags,
)

ALL = list(range(1, 101))
FIFTHS = [seq for seq in ALL if seq % 5 == 0]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    """A hundred records in five segments, four of them in the cold tier: 1 to 80."""
    shard = Shard(tmp_path / "data", **settings(tmp_path))
    fill(shard)
    shard.relocate()
    assert tiers(shard) == "cccch"
    write_manifest(tmp_path / "data", cold=str(tmp_path / "cold"), cold_id="c01d")
    return shard


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "cold")


def counts(shard: Shard) -> tuple[int, int, int]:
    topic = shard.topic("t")
    return topic.count, topic.bytes, topic.deleted_total


def catch_up(shard: Shard) -> None:
    """What a shard does by itself within seconds."""
    assert shard.relocator is not None
    for _ in range(4):
        shard.wall.pass_ms(40_000)
        shard.relocator.look()
        shard.relocator.wait()
        shard.relocator.step()
        shard.relocator.wait()
        shard.mover.step(quiet=True)
        shard.mover.wait()
    shard.relocator.wait()


def on_disk(place: Path) -> list[str]:
    return sorted(path.name.lstrip("0") for path in place.glob("topics/*/*"))


# --- starting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaving", LEFT)
def test_it_serves_what_is_not_there_and_goes_on_when_it_is_back(shard: Shard, disk: Disk, leaving: str) -> None:
    shard.delete("t", tag="fifth", before_seq=32)
    forget_log(shard)
    before = counts(shard)
    shard.crash()
    disk.go(leaving=leaving)
    below = sorted(disk.place.rglob("*"))
    shard.open()
    assert counts(shard) == before, "to the byte: the snapshot has it"
    assert shard.relocator is not None
    assert shard.relocator.gone
    error = error_of(lambda: shard.diff("t", 0))
    assert (error.status, error.code) == (503, "shard_unavailable")
    assert f"the cold tier {disk.place} is not there" in error.message
    assert "mount its disk" in error.message
    assert [stored.seq for stored in shard.diff("t", 80).stored] == list(range(81, 101))
    assert shard.append("t", records(1)).records == 1
    fill(shard, "u")
    catch_up(shard)
    assert tiers(shard, "u") == "hhhhh", "nothing moves"
    assert sorted(disk.place.rglob("*")) == below, "and nothing is made at its place"
    assert not shard.engine.totals.unreadable
    disk.come_back()
    assert seqs(shard) == [seq for seq in [*ALL, 101] if seq not in FIFTHS[:6]], "at once"
    catch_up(shard)
    assert not shard.relocator.gone
    shard.relocate()
    assert tiers(shard, "u") == "cccch"
    assert verify(shard.settings.data_dir, deep=True, running=False).clean


def test_a_segment_that_is_another_is_not_read(shard: Shard, disk: Disk) -> None:
    shard.crash()
    disk.go(leaving="nothing")
    shard.open()
    disk.come_back()
    first, second = sorted(disk.place.glob("topics/*/*.data"))[:2]
    first.write_bytes(second.read_bytes())
    assert error_of(lambda: shard.diff("t", 0)).status == 500
    first.unlink()
    error = error_of(lambda: shard.diff("t", 0))
    assert error.status == 503
    assert "though the cold tier is there" in error.message


def test_a_snapshot_that_does_not_know_the_flags_waits_for_the_disk(shard: Shard, disk: Disk) -> None:
    """As one of an earlier program: which records are deleted is only in the files."""
    shard.delete("t", tag="fifth", before_seq=12)
    topic = shard.topic("t")
    shard.checkpoint()
    topic._cold_states = list  # type: ignore[method-assign]
    topic.touched()
    shard.checkpoint()
    shard.crash()
    disk.go(leaving="an empty folder")
    with pytest.raises(Unreachable, match="tells which of its records are deleted"):
        shard.open()
    disk.come_back()
    shard.open()
    assert seqs(shard) == [seq for seq in ALL if seq not in (5, 10)]


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("point", ["snapshot", "leave", "left"])
def test_a_kill_while_hot_files_go_leaves_a_snapshot_that_has_their_flags(
    shard: Shard, disk: Disk, monkeypatch: pytest.MonkeyPatch, point: str, times: int
) -> None:
    """The disk may be away at the next start, and what is deleted was in the files alone."""
    fill(shard, "u")
    shard.delete("u", tag="fifth", before_seq=32)
    forget_log(shard)
    shard.copy_to_cold()
    assert shard.delete("u", tag="fifth", before_seq=42).deleted == 2
    run_inline(shard)
    with monkeypatch.context() as patched:
        kill_at(patched, point, 1 if point == "snapshot" else times)
        with pytest.raises(Killed):
            shard.mover.checkpoint()
    shard.crash()
    disk.go(leaving="an empty folder")
    left = [seq for seq in ALL if seq not in FIFTHS[:8]]
    for _ in range(2):
        shard.open()
        assert (shard.topic("u").count, shard.topic("u").deleted_total) == (len(left), 8)
        shard.crash()
    disk.come_back()
    shard.open()
    assert seqs(shard, "u") == left
    shard.relocate()
    assert tiers(shard, "u") == "cccch"
    shard.stop()
    assert verify(shard.settings.data_dir, deep=True, running=False).clean


class Crowded(QuickDisk):
    """A disk that has room for a snapshot, or for the name of a log file, when a hot file has gone."""

    def __init__(self, lacking: str = "the snapshot") -> None:
        self.lacking = lacking
        self.full = False

    def write_whole(self, path: str, data: bytes) -> None:
        if self.full and self.lacking == "the snapshot" and path.endswith(".snap"):
            raise DiskFull("no space")
        super().write_whole(path, data)

    def sync_dir(self, path: str) -> None:
        if self.full and self.lacking == "the name of a log file" and "wal" in Path(path).parts:
            raise DiskFull("no space")
        super().sync_dir(path)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.full = self.full and not path.endswith(".data")


@pytest.mark.parametrize("lacking", ["the snapshot", "the name of a log file"])
def test_hot_files_make_room_for_the_snapshot(shard: Shard, lacking: str) -> None:
    fill(shard, "u")
    shard.delete("u", tag="fifth", before_seq=32)
    shard.restart(disk := Crowded(lacking))
    shard.copy_to_cold()
    covered = shard.mover.snapshot_lsn
    shard.append("t", records(1))
    assert shard.engine.wal.synced_lsn < shard.engine.wal.written_lsn
    disk.full = True
    shard.checkpoint()
    assert shard.mover.snapshot_lsn == covered
    assert not disk.full
    shard.checkpoint()
    assert shard.mover.snapshot_lsn > covered
    assert tiers(shard, "u") == "cccch"
    shard.restart()
    assert seqs(shard, "u") == [seq for seq in ALL if seq not in FIFTHS[:6]]


# --- deletes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("started_without", [True, False])
def test_deletes_meanwhile_come_into_effect(
    shard: Shard, disk: Disk, tmp_path: Path, started_without: bool, logged: bool
) -> None:
    shard.delete("t", tag="fifth", before_seq=12)
    shard.checkpoint()
    if started_without:
        shard.crash()
    disk.go(leaving="an empty folder")
    if started_without:
        shard.open()
    assert shard.delete("t", tag="fifth", before_seq=32).deleted == 4
    assert shard.delete("t", before_seq=3).deleted == 2
    left = [seq for seq in ALL if seq > 2 and seq not in FIFTHS[:6]]
    if not logged:
        forget_log(shard)
    for _ in range(2):
        shard.restart()  # without a last word, and without the disk
        assert (shard.topic("t").count, shard.topic("t").deleted_total) == (len(left), 8)
        shard.checkpoint()
    disk.come_back()
    assert seqs(shard) == left
    catch_up(shard)
    assert not any(segment.dirty for segment in shard.topic("t").segments)
    data = b"".join(path.read_bytes() for path in sorted(disk.place.glob("topics/*/*.data")))
    assert data.count(bytes([DELETED])) >= 8, "the files have them, too"
    shard.stop()
    assert verify(shard.settings.data_dir, deep=True, running=False).clean
    shard.open()
    assert seqs(shard) == left
    assert shard.topic("t").bytes == sum(stored.record.size for stored in shard.everything("t")), "exact again"


class ReadOnly(QuickDisk):
    """The cold disk is there and takes nothing: it is full, broken, or remounted for reading only."""

    def __init__(self, cold: Path, number: int) -> None:
        self._cold = os.fspath(cold)
        self.number = number  # 0: it takes writes again

    def _change(self, path: str) -> None:
        if self.number and os.path.realpath(path).startswith(self._cold):
            raise OSError(self.number, os.strerror(self.number), path)

    def open(self, path: str, *, write: bool = False) -> int:
        if write:
            self._change(path)
        return super().open(path, write=write)

    def copy(self, source: str, path: str, size: int, *, go_on: Any) -> bool:
        self._change(os.path.dirname(path))
        return super().copy(source, path, size, go_on=go_on)

    def unlink(self, path: str) -> None:
        self._change(path)
        super().unlink(path)

    def remove_dir(self, path: str) -> None:
        self._change(path)
        super().remove_dir(path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.EACCES])
def test_snapshots_go_on_while_the_cold_disk_takes_no_delete(shard: Shard, tmp_path: Path, number: int) -> None:
    cold = tmp_path / "cold"
    disk = ReadOnly(cold, number)
    shard.restart(disk)
    assert shard.relocator is not None
    said: list[str] = []
    shard.relocator.on_trouble = said.append
    assert shard.delete("t", tag="fifth", before_seq=32).deleted == 6
    forget_log(shard)
    assert shard.mover.snapshot_lsn == shard.engine.wal.written_lsn
    catch_up(shard)
    assert len(said) == 1, "said once"
    assert os.strerror(number) in said[0]
    left = [seq for seq in ALL if seq not in FIFTHS[:6]]
    disk = ReadOnly(cold, number)
    shard.restart(disk)
    assert seqs(shard) == left, "the snapshot has them"
    assert verify(shard.settings.data_dir, deep=True, running=False).clean
    assert shard.delete("t", before_seq=2).deleted == 1
    shard.checkpoint()
    disk.number = 0
    catch_up(shard)
    assert not any(segment.dirty for segment in shard.topic("t").segments), "without another reason for a snapshot"
    shard.stop()
    assert verify(shard.settings.data_dir, deep=True, running=False).clean
    shard.open()
    assert seqs(shard) == left[1:]


def test_a_cold_disk_that_is_read_only_at_the_start_keeps_what_is_left_over(shard: Shard, tmp_path: Path) -> None:
    shard.crash()
    left = next((tmp_path / "cold").glob("topics/*")) / "00000000000000000099.data.tmp"
    left.write_bytes(b"a copy that did not get to its end")
    shard.open(ReadOnly(tmp_path / "cold", errno.EROFS))
    assert seqs(shard) == ALL
    assert left.exists()
    shard.restart()
    assert not left.exists()


def test_a_block_without_a_live_record_stays_dead(shard: Shard, disk: Disk) -> None:
    """Its row is no more, and its segment lives on."""
    shard.put("q", TopicConfig())
    for start in range(0, 60, 10):
        shard.append("q", records(10, start=start, tag="all" if start == 10 else "none"))
    shard.flush("q")
    shard.relocate()
    assert shard.delete("q", tag="all").deleted == 10
    disk.go(leaving="an empty folder")
    forget_log(shard)
    shard.restart()
    assert shard.topic("q").count == 50
    disk.come_back()
    shard.restart()
    assert seqs(shard, "q") == [*range(1, 11), *range(21, 61)]


def test_tools_know_deletes_that_the_files_lack(shard: Shard, disk: Disk) -> None:
    disk.go(leaving="an empty folder")
    shard.delete("t", tag="fifth", before_seq=32)
    forget_log(shard)
    shard.crash()
    verdict = verify(shard.settings.data_dir, deep=True, running=False)
    assert any(str(disk.place) in problem.text and "mount its disk" in problem.text for problem in verdict.problems)
    disk.come_back()
    verdict = verify(shard.settings.data_dir, deep=True, running=False)
    assert verdict.clean, verdict.problems
    topics = [topic for each in Folder(shard.settings.data_dir).shards for topic in each.topics.values()]
    assert next(topic.count for topic in topics if topic.name == "t") == 94


# --- jobs ----------------------------------------------------------------------------------------------


@pytest.fixture
def queue(shard: Shard, disk: Disk) -> Shard:
    """Jobs 1 to 80 are in the cold tier, which is away; 81 to 100 are hot."""
    shard.put("q", TopicConfig(type="queue"))
    fill(shard, "q")
    shard.relocate()
    shard.crash()
    disk.go(leaving="an empty folder")
    shard.open()
    shard.call(Op.OPEN_QUEUE, messages.OpenQueue("q"))
    return shard


def take(
    shard: Shard,
    limit: int,
    *,
    wanted: list[int] | None = None,
    after: int = 0,
    held: list[int] | None = None,
    fresh: int | None = None,
) -> messages.JobsTaken:
    head = messages.TakeJobs("q", shard.topic("q").id, wanted or [], after, held or [], limit, 2**20, fresh)
    answer: messages.JobsTaken = shard.call(Op.TAKE_JOBS, head)
    return answer


def test_hot_jobs_go_out_and_the_others_stay_fresh(queue: Shard, disk: Disk) -> None:
    taken = take(queue, 15)
    assert (taken.seqs, taken.at, taken.end) == (list(range(81, 96)), 0, False)
    rest = take(queue, 15, held=taken.seqs)
    assert (rest.seqs, rest.at, rest.end, rest.beyond) == (list(range(96, 101)), 0, True, 100)
    assert (rest.missed, rest.why) == ([(1, 80)], "")
    nothing = take(queue, 15, held=ALL[80:])
    assert (nothing.seqs, nothing.at, nothing.end, nothing.beyond) == ([], 0, True, 100)
    assert "mount its disk" in nothing.why
    head = messages.CompleteJobs("q", queue.topic("q").id, taken.seqs, False, 0, 0)
    assert queue.call(Op.COMPLETE_JOBS, head).live == 85
    everything_held = take(queue, 15, held=[*ALL[:80], *range(96, 101)])
    assert (everything_held.seqs, everything_held.end) == ([], True)
    assert (everything_held.beyond, everything_held.why) == (0, ""), "nothing is missed that somebody has"
    disk.come_back()
    assert take(queue, 3, held=rest.seqs).seqs == [81 - 80, 2, 3], "at once"
    catch_up(queue)
    assert take(queue, 3, held=rest.seqs).missed == []


def test_jobs_that_are_free_again_wait_for_the_disk_too(queue: Shard, disk: Disk) -> None:
    taken = take(queue, 4, wanted=[3, 25, 85], after=80)
    assert (taken.seqs, taken.wanted, taken.gone) == ([85, 81, 82, 83], 1, []), "85 was free, three more are fresh"
    assert take(queue, 4, wanted=[3, 25, 85], after=80, fresh=1).seqs == [85, 81], "no more than there is room for"
    assert take(queue, 2, wanted=[3, 25], after=100).why
    queue.delete("q", before_seq=4)
    told = take(queue, 2, wanted=[3, 25], after=100)
    assert (told.seqs, told.gone, told.why) == ([], [3], ""), "what is gone has to be told"
    assert take(queue, 2, wanted=[3], after=80, fresh=0).gone == [3]
    assert take(queue, 2, wanted=[3], after=80, fresh=0).seqs == [81], "in its place"
    disk.come_back()
    catch_up(queue)
    assert take(queue, 2, wanted=[25], after=100).seqs == [25]


# --- copies --------------------------------------------------------------------------------------------


def test_copies_whose_originals_are_there_wait_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    """They were in memory when the shard died. None of them counts as lost, and no seq changes."""
    shard = PipeShard(tmp_path / "data", **settings(tmp_path))
    for name in ("s", "d"):
        shard.put(name, TopicConfig())
    forwarder = Forwarder(shard, "s", "d")
    forwarder.step()
    fill(shard, "s")
    forwarder.pump()
    shard.append("d", records(1, start=7))
    before = shard.seqs("d")
    assert len(before) == 101
    shard.relocate()
    shard.crash()
    disk.go(leaving="an empty folder")
    for _ in range(2):
        shard.open()
        forwarder = Forwarder(shard, "s", "d")
        for _ in range(3):
            assert not forwarder.step()
        assert shard.topic("d").rebuilding
        assert error_of(lambda: shard.seqs("d")).status == 503
        shard.append("s", records(1))
        catch_up(shard)
        shard.crash()
    disk.come_back()
    shard.open()
    Forwarder(shard, "s", "d").pump()
    after = shard.seqs("d")
    assert {seq: after[seq] for seq in before} == before
    assert len(after) == len(before) + 2
    assert shard.topic("d").trims == []


# --- what goes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("how", ["cap", "ttl", "drop"])
def test_files_of_what_went_go_when_it_is_back(shard: Shard, disk: Disk, how: str, restarted: bool) -> None:
    shard.crash()
    disk.go(leaving="an empty folder")
    shard.open()
    if how == "cap":
        shard.put("t", TopicConfig(cap_records=50))
        shard.append("t", records(1))
    elif how == "ttl":
        shard.put("t", TopicConfig(ttl_ms=1_000))
        shard.wall.pass_ms(5_000)
        assert shard.report("t").count == 0
    else:
        shard.drop("t")
    shard.checkpoint()
    if restarted:
        shard.restart()
    assert len(on_disk(disk.real)) == 4
    disk.come_back()
    if restarted:
        shard.restart()
    else:
        catch_up(shard)
    assert on_disk(disk.place) == (["41.data", "61.data"] if how == "cap" else [])
    shard.checkpoint()
    shard.crash()
    verdict = verify(shard.settings.data_dir, deep=True, running=False)
    assert (verdict.problems, verdict.notes) == ([], [])


def test_what_the_last_snapshot_names_stays_until_there_is_another(shard: Shard, disk: Disk) -> None:
    fill(shard, "u")
    shard.relocate()
    shard.crash()
    disk.go(leaving="an empty folder")
    shard.open()
    shard.drop("u")
    shard.delete("t", before_seq=41)
    disk.come_back()
    assert shard.relocator is not None
    shard.wall.pass_ms(40_000)
    shard.relocator.look()
    shard.relocator.wait()
    assert shard.relocator.returned
    shard.mover._catch_up(shard.relocator)
    shard.relocator.wait()
    assert len(on_disk(disk.place)) == 8
    shard.restart()
    assert seqs(shard) == ALL[40:]


# --- the snapshot --------------------------------------------------------------------------------------


def test_flags_are_packed_and_joined() -> None:
    for flags in itertools.product((0, DELETED), repeat=9):
        bits = pack_flags(bytearray(flags))
        assert len(bits) <= 2
        assert unpack_flags(bits, 9) == bytearray(flags)
    assert (pack_flags(None), unpack_flags(b"", 3)) == (b"", bytearray(3))
    assert join_flags(bytearray([0, DELETED, 7, 7]), bytes([DELETED, 0, 0, DELETED])) == bytes(
        [DELETED, DELETED, 0, DELETED]
    )
    with pytest.raises(CorruptData):
        unpack_flags(b"\xff", 3)


def test_a_snapshot_says_it_only_where_there_is_something_to_say(shard: Shard) -> None:
    state = shard.topic("t").state()
    assert state.cold == []
    fields = len(TopicState.__struct_fields__)
    assert len(msgspec.msgpack.decode(encode_topic(state))) < fields - 1
    shard.delete("t", tag="fifth", before_seq=12)
    state = shard.topic("t").state()
    assert [(cold.first_seq, [row[:2] for row in cold.rows], cold.dead) for cold in state.cold] == [
        (1, [(1, b"\x10\x02")], [])
    ]
    assert decode_topic(encode_topic(state)) == state
    old = msgspec.msgpack.encode(msgspec.structs.astuple(state)[:-1])
    assert decode_topic(old).cold == []
    assert ColdState(1).rows == []


def test_sizes_that_are_estimated_are_not_passed_on(shard: Shard, disk: Disk) -> None:
    shard.append("t", [Record(b'"%b"' % (b"x" * size)) for size in range(1, 11)])
    disk.go(leaving="an empty folder")
    shard.delete("t", tag="fifth", before_seq=12)
    assert [row[2] for cold in shard.topic("t").state().cold for row in cold.rows] == [0]
    assert os.listdir(disk.place) == []
