"""What recovery makes of a folder: power cuts, torn tails, damage, other shard counts, and its own death."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figures import CHECKED, CRASH_POINTS, LOST, POWER_CUTS
from folderplay import write_manifest
from hypothesis import given
from hypothesis import strategies as st
from model import BOOT, QuickDisk, Record, Shard, Stored, Wall, examples, shown
from pipeshard import Forwarder, PipeShard

from topics import limits
from topics.cli.datadir.repair import Report, _in_place
from topics.datadir.fsck.verify import verify
from topics.errors import ApiError, CorruptData, FormatError
from topics.settings import Settings
from topics.storage.config import TopicConfig, owner_of_name
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import Frame, decode_wal_header, scan
from topics.storage.paths import shard_dir
from topics.walshard.log.recovery import Recovery
from topics.walshard.segments.segments import OpenFiles

OTHER_BOOT = bytes(16)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "PLACED_BYTES", 1_000)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path, wal_file_bytes=16_384, segment_max_events=10)


def records(count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(count)]


def long(count: int) -> list[Record]:
    return [Record(b'"' + b"x" * 900 + b'"') for _ in range(count)]


def frames_of(path: str) -> list[Any]:
    data = Path(path).read_bytes()
    header = decode_wal_header(data[:FILE_HEADER_BYTES], path=path)
    return list(scan(data, salt=header.salt))


def overwrite(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: str, offset: int) -> None:
    before = Path(path).read_bytes()[offset]
    overwrite(path, offset, bytes([before ^ 0x40]))


# --- a power cut -------------------------------------------------------------------------------------

PAGE = 512


class PowerDisk(QuickDisk):
    """Knows what was written to each file since it was last synced, so that a power cut can take it back."""

    def __init__(self) -> None:
        self.unsynced: dict[int, list[tuple[int, bytes]]] = {}  # by inode: (offset, what was there before)
        self.unnamed: list[tuple[str, str]] = []  # what a file was called before, and is called now

    def write(self, fd: int, data: bytes, offset: int) -> None:
        end = offset + len(data)
        pieces = []
        for start in range(offset - offset % PAGE, end, PAGE):
            at, to = max(start, offset), min(start + PAGE, end)
            old = os.pread(fd, to - at, at)
            pieces.append((at, old.ljust(to - at, b"\0")))
        self.unsynced.setdefault(os.fstat(fd).st_ino, []).extend(pieces)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self.unsynced.pop(os.fstat(fd).st_ino, None)

    def name(self, temporary: str, path: str) -> None:
        super().name(temporary, path)
        self.unnamed.append((temporary, path))

    def sync_dir(self, path: str) -> None:
        self.unnamed = [names for names in self.unnamed if os.path.dirname(names[1]) != path]

    def write_whole(self, path: str, data: bytes) -> None:
        super().write_whole(path, data)
        self.sync_dir(os.path.dirname(path))

    def cut_power(self, folder: Path, survives: Callable[[], bool]) -> None:
        POWER_CUTS.add()
        lost = False
        for temporary, named in self.unnamed:  # the file system keeps their order
            lost = lost or not survives()
            if lost:
                os.replace(named, temporary)
        for path in folder.rglob("*"):
            if path.is_file():
                for offset, old in reversed(self.unsynced.get(path.stat().st_ino, [])):
                    if not survives():
                        overwrite(os.fspath(path), offset, old)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from(["fsync", "disk", "memory", "ephemeral"]), st.integers(1, 12)),
        st.tuples(st.just("long"), st.sampled_from(["fsync", "disk", "memory"]), st.integers(1, 8)),
        st.tuples(st.just("large"), st.sampled_from(["fsync", "disk", "memory"]), st.integers(1, 8)),
        st.tuples(st.just("delete"), st.sampled_from(["fsync", "disk"]), st.integers(0, 20)),
        st.tuples(st.sampled_from(["flush"]), st.sampled_from(["fsync", "disk", "memory"]), st.just(0)),
        st.tuples(st.sampled_from(["sync", "checkpoint"]), st.just(""), st.just(0)),
        st.tuples(st.just("put"), st.sampled_from(["p", "q"]), st.integers(1, 9)),
        st.tuples(st.just("drop"), st.sampled_from(["p", "q"]), st.just(0)),
    ),
    max_size=25,
)


@examples(150)
@given(steps=STEPS, data=st.data())
def test_a_power_cut_takes_nothing_that_was_promised(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("power")
    disk = PowerDisk()
    shard = Shard(folder, disk=disk, wal_file_bytes=9_000, segment_max_events=10)
    sent: dict[str, list[Stored]] = {name: [] for name in ("fsync", "disk", "memory", "ephemeral")}
    batches: dict[str, list[set[int]]] = {name: [] for name in sent}
    for name in sent:
        shard.put(name, TopicConfig(durability=name, durable=name == "fsync"))  # type: ignore[arg-type]
    configured: dict[str, TopicConfig] = {}
    deleted = 0
    for at, (step, name, number) in enumerate(steps):
        if step in ("append", "long", "large"):
            batch = records(number, tag="t") if step == "append" else long(number)
            append = shard.append_large if step == "large" else shard.append
            answer = append(name, batch, key=f"key-{at}")
            ts = shard.clock.now_ms()
            sent[name] += [Stored(answer.first_seq + at, ts, record) for at, record in enumerate(batch)]
            batches[name].append({answer.first_seq + at for at in range(len(batch))})
        elif step == "delete":
            shard.delete(name, before_seq=number)
            if name == "fsync":
                deleted = max(deleted, min(number, len(sent[name]) + 1))
        elif step == "flush":
            shard.flush(name)
        elif step == "put":
            configured[name] = TopicConfig(ttl_ms=number * 1_000)
            shard.put(name, configured[name])
        elif step == "drop":
            assert shard.drop(name) == (configured.pop(name, None) is not None)
        elif step == "sync":
            shard.be_quiet()
        else:
            shard.checkpoint()
    shard.crash()
    fate = data.draw(st.sampled_from(["none", "some", "all"]))
    random = data.draw(st.randoms(use_true_random=False))
    disk.cut_power(folder, lambda: fate == "all" or (fate == "some" and random.random() < 0.5))
    shard.open(boot=OTHER_BOOT)
    assert set(shard.engine.topics) == {*sent, *configured}, "a creation or a drop was lost"
    for name, config in configured.items():
        assert shard.report(name).config == config
    for at, (step, name, _) in enumerate(steps):
        if step in ("append", "long", "large") and name == "fsync":
            assert shard.append(name, records(1), key=f"key-{at}").deduped, "an acknowledged key was lost"
    for name in sent:
        found = shown(shard.everything(name))
        known = {stored.seq: stored for stored in sent[name]}
        for stored in found:
            assert known.get(stored.seq) == stored, "a record that nobody sent"
        seqs = {stored.seq for stored in found}
        if name == "fsync":
            expected = {seq for seq in known if seq >= deleted}
            CHECKED.add(len(expected))
            LOST.add(len(expected - seqs))
            assert seqs == expected, "an acknowledged record or delete was lost"
        elif name == "memory":
            for whole in batches[name]:
                assert whole <= seqs or not whole & seqs, "half a batch"
        elif name == "ephemeral":
            assert not found
        if name != "memory":
            assert shard.append(name, records(1)).first_seq > len(known), "a seq was given out twice"
    shard.crash()
    shard.open(boot=OTHER_BOOT)
    shard.crash()


def test_an_unsynced_tail_over_two_files_is_cut_and_said(shard: Shard) -> None:
    shard.append("t", records(1))
    shard.sync()
    while len(shard.engine.wal.files) < 3:
        shard.append("t", long(1))
    first = shard.engine.wal.files[0].path
    last = frames_of(first)[-1]
    shard.crash()
    overwrite(first, last.offset, bytes(last.length))
    shard.open(boot=OTHER_BOOT)
    assert any("unsynced" in note for note in shard.recovered.notes)
    assert [stored.seq for stored in shard.everything("t")] == list(range(1, last.first_seq))
    assert shard.append("t", records(1)).first_seq > last.first_seq
    shard.restart(boot=OTHER_BOOT)
    assert len(shard.everything("t")) == last.first_seq


FSYNC = TopicConfig(durability="fsync", durable=True)


def one_round(shard: Shard, topic: str = "f") -> list[Any]:
    """The frames of four appends that were written together, and of two more, each after a sync of its own."""
    shard.put(topic, FSYNC)
    for number in range(4):
        shard.send_append(topic, records(1), key=f"k{number}")
    shard.settle()
    shard.append(topic, records(1))
    shard.append(topic, records(1))
    *_, first, second, third, fourth, fifth, sixth = frames_of(shard.engine.wal.current.path)
    assert first.synced == second.synced == third.synced == fourth.synced < first.lsn
    assert (fifth.synced, sixth.synced) == (fourth.lsn, fifth.lsn)
    return [first, second, third, fourth, fifth, sixth]


def contents(shard: Shard) -> dict[str, bytes]:
    folder = Path(shard_dir(shard.settings.data_dir, 0))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(shard: Shard, match: str) -> None:
    """After a reboot, and with every file as it was."""
    before = contents(shard)
    with pytest.raises(CorruptData, match=match):
        shard.open(boot=OTHER_BOOT)
    assert contents(shard) == before, "a refused file was changed"


@pytest.mark.parametrize("which", range(4))
def test_damage_in_what_was_acknowledged_is_no_unsynced_tail(shard: Shard, which: int) -> None:
    """Frames of the same round can't know that it was synced; the one behind them does."""
    path = shard.engine.wal.current.path
    frame = one_round(shard)[which]
    shard.crash()
    flip(path, frame.offset + frame.length // 2)
    refused(shard, f"offset {frame.offset}")


def test_a_frame_in_a_newer_file_tells_that_it_was_synced(shard: Shard) -> None:
    shard.put("f", FSYNC)
    for _ in range(12):
        shard.send_append("f", long(1))
    shard.settle()
    first = shard.engine.wal.current.path
    hole, *_ = (frame for frame in frames_of(first) if frame.count)
    while shard.engine.wal.current.path == first:
        shard.append("f", long(6))
    shard.append("f", records(1))
    shard.crash()
    behind = [frame for frame in frames_of(first) if frame.lsn > hole.lsn]
    assert behind
    for frame in behind:
        if frame.synced >= hole.lsn:
            overwrite(first, frame.offset, bytes(frame.length))
    flip(first, hole.offset + hole.length // 2)
    refused(shard, f"offset {hole.offset}")


def test_a_file_that_is_missing_and_had_been_synced(shard: Shard) -> None:
    shard.append("t", records(1))
    while len(shard.engine.wal.files) < 4:
        shard.append("t", long(1))
    shard.sync()
    shard.append("t", records(1))
    middle = shard.engine.wal.files[1].path
    shard.crash()
    os.unlink(middle)
    refused(shard, "missing")


def damaged(shard: Shard, how: str) -> tuple[str, Any]:
    """The last frame of the log that somebody was answered for: its file, and what it was."""
    path = shard.engine.wal.current.path
    last = [frame for frame in frames_of(path) if frame.type != FrameType.HEAD][-1]
    shard.crash()
    if how == "a bit":
        flip(path, last.offset + last.length // 2)
    elif how == "its head":
        overwrite(path, last.offset, bytes(64))
    elif how == "all of it":
        overwrite(path, last.offset, bytes(last.length))
    else:
        sector = limits.SECTOR_BYTES
        first = last.offset - last.offset % sector
        end = last.offset + last.length
        overwrite(path, max(FILE_HEADER_BYTES, first), bytes(end + -end % sector - max(FILE_HEADER_BYTES, first)))
    return path, last


HOWS = ["a bit", "its head", "all of it", "its sectors"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("before", [0, 1, 7])
def test_a_quiet_log_tells_after_a_reboot_that_its_last_frame_was_synced(shard: Shard, how: str, before: int) -> None:
    shard.put("f", FSYNC)
    shard.be_quiet()
    for _ in range(before):
        shard.append("f", records(5))
    shard.append("f", long(1))
    shard.be_quiet()
    _, last = damaged(shard, how)
    refused(shard, "damaged at offset" if how != "its sectors" else "wal")
    folder = Path(shard.settings.data_dir)
    write_manifest(folder)
    verdict = verify(str(folder), deep=True, running=False)
    assert any("damaged" in problem.text or "frame" in problem.text for problem in verdict.problems)
    report = _in_place(str(folder), report=Report(data_dir=str(folder)))
    assert report.whole
    assert any(loss.last >= last.last_seq for loss in report.lost) or how == "its sectors"
    shard.open(boot=OTHER_BOOT)
    if how != "its sectors":  # the topic's own frame may have been there
        assert len(shard.everything("f")) == 5 * before
        assert shard.append("f", records(1)).first_seq > last.last_seq


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("boot", [BOOT, OTHER_BOOT])
def test_a_bit_of_the_last_frame_is_no_torn_tail(shard: Shard, quiet: bool, boot: bytes) -> None:
    """Whatever the machine did since, and however soon it went down: a power cut takes more than that."""
    shard.put("f", FSYNC)
    shard.append("f", records(5))
    if quiet:
        shard.be_quiet()
    shard.append("f", records(1))
    _, last = damaged(shard, "a bit")
    with pytest.raises(CorruptData, match=f"damaged at offset {last.offset}"):
        shard.open(boot=boot)
    folder = Path(shard.settings.data_dir)
    write_manifest(folder)
    assert not verify(str(folder), deep=True, running=False).clean
    report = _in_place(str(folder), report=Report(data_dir=str(folder)))
    assert report.whole
    assert [loss.first for loss in report.lost] == [6]
    shard.open(boot=boot)
    assert len(shard.everything("f")) == 5
    assert shard.append("f", records(1)).first_seq > 6


def test_a_bit_of_a_frame_whose_sync_no_other_one_saw(shard: Shard) -> None:
    """Those behind it were written together with it."""
    path = shard.engine.wal.current.path
    first, *_, fifth, sixth = one_round(shard)
    shard.crash()
    overwrite(path, fifth.offset, bytes(fifth.length + sixth.length))
    flip(path, first.offset + first.length // 2)
    refused(shard, f"offset {first.offset}")
    folder = Path(shard.settings.data_dir)
    write_manifest(folder)
    report = _in_place(str(folder), report=Report(data_dir=str(folder)))
    assert report.whole
    assert [(loss.first, loss.last) for loss in report.lost] == [(1, 1)]
    shard.open(boot=OTHER_BOOT)
    assert [stored.seq for stored in shard.everything("f")] == [2, 3, 4]


@pytest.mark.parametrize("how", [how for how in HOWS if how != "a bit"])
def test_a_witness_names_nothing_that_is_not_synced(shard: Shard, how: str) -> None:
    """What is written behind it and not synced goes with the power, without an alarm."""
    shard.append("t", records(1))
    shard.be_quiet()
    path = shard.engine.wal.current.path
    witness = frames_of(path)[-1]
    assert witness.synced == witness.lsn - 2
    shard.append("t", records(2))
    if how == "its sectors":
        overwrite(path, witness.offset + witness.length, bytes(shard.engine.wal.current.end - witness.offset))
        shard.crash()
    else:
        damaged(shard, how)
    shard.open(boot=OTHER_BOOT)
    assert len(shard.everything("t")) == 1


def test_a_witness_comes_once_and_only_where_it_says_something(shard: Shard) -> None:
    wal, commit = shard.engine.wal, shard.engine.commit

    def bears(ms: int = 0) -> tuple[bool, int]:
        before = wal.written_lsn
        shard.wall.pass_ms(ms)
        return commit.bear_witness(shard.clock.now_ms(), covered=shard.mover.snapshot_lsn), wal.written_lsn - before

    assert bears(60_000) == (False, 0), "an empty log"
    shard.append("t", records(1))
    assert bears() == (True, 0)
    shard.append("t", records(1))
    assert bears(9_000) == (True, 0), "not quiet"
    if wal.synced_lsn < wal.written_lsn:
        assert bears(9_000) == (True, 0), "not synced"
    shard.append("t", records(1))
    shard.sync()
    bears()
    assert [bears(900)[1], bears(100)[1]] == [0, 2], "after a second"
    shard.sync()
    assert bears(60_000) == (False, 0), "nothing new"
    shard.append("t", records(1))
    shard.sync()
    bears()
    assert bears(1_000) == (False, 2), "a minute later"
    shard.append("t", records(1))
    shard.sync()
    assert [bears(3_000)[1] for _ in range(4)] == [0, 0, 0, 2], "not more often than every ten seconds"
    shard.append("t", records(1))
    shard.checkpoint()
    assert bears(60_000) == (False, 0), "the snapshot has it"
    assert wal.current.end < 6 * limits.SECTOR_BYTES


def test_a_witness_makes_no_new_file(shard: Shard) -> None:
    wal = shard.engine.wal
    shard.append("t", records(1))
    while wal.fits(3_000, reserve=False):
        shard.append("t", long(1))
    files, lsn = wal.files, wal.written_lsn
    shard.be_quiet()
    assert (wal.files, wal.written_lsn) == (files, lsn)
    count = len(shard.everything("t"))
    shard.restart(boot=OTHER_BOOT)
    assert len(shard.everything("t")) == count


def test_the_same_hole_is_cut_off_if_nobody_saw_it_synced(shard: Shard) -> None:
    path = shard.engine.wal.current.path
    first, *_, fifth, sixth = one_round(shard)
    shard.crash()
    overwrite(path, fifth.offset, bytes(fifth.length + sixth.length))
    overwrite(path, first.offset + first.length // 2, bytes(first.length - first.length // 2))
    shard.open(boot=OTHER_BOOT)
    assert any("unsynced" in note for note in shard.recovered.notes)
    assert shard.everything("f") == []


def test_damage_below_the_snapshot_is_no_unsynced_tail(shard: Shard) -> None:
    shard.put("t", TopicConfig())
    shard.put("u", TopicConfig())
    for _ in range(3):
        shard.append("t", records(2))
    shard.checkpoint()
    path = shard.engine.wal.current.path
    *_, before, last = frames_of(path)
    assert last.synced < before.lsn, "only the snapshot knows"
    shard.crash()
    flip(path, before.offset + before.length // 2)
    refused(shard, f"offset {before.offset}")


def test_a_log_that_ends_below_the_snapshot_is_refused(shard: Shard) -> None:
    """No good frame follows, so it looks like a torn write."""
    shard.put("t", TopicConfig())
    for _ in range(3):
        shard.append("t", records(2))
    shard.checkpoint()
    path = shard.engine.wal.current.path
    last = frames_of(path)[-1]
    shard.crash()
    overwrite(path, last.offset, bytes(64))
    refused(shard, f"frame {last.lsn}")


def test_the_first_frame_behind_a_snapshot_may_go_with_the_power(shard: Shard) -> None:
    """The snapshot was made when its log file was still empty."""
    shard.append("t", records(20))
    shard.stop()
    shard.open()
    shard.flush("t")
    shard.checkpoint()
    assert len(shard.engine.wal.files) == 1
    path = shard.engine.wal.current.path
    assert frames_of(path) == []
    shard.append("t", records(2))
    shard.append("t", records(2))
    first, _ = frames_of(path)
    shard.crash()
    overwrite(path, first.offset, bytes(first.length))
    shard.open(boot=OTHER_BOOT)
    assert any("unsynced" in note for note in shard.recovered.notes)
    assert len(shard.everything("t")) == 20


def test_a_kill_long_after_a_reboot_loses_nothing(shard: Shard) -> None:
    """Log files of the boot before are still there; what stands in them is covered by the snapshot."""
    shard.append("t", records(3))
    shard.stop()
    shard.open(boot=OTHER_BOOT)
    shard.append("t", records(1))
    shard.restart(boot=OTHER_BOOT)
    assert (shard.topic("t").head_seq, shard.topic("t").holes) == (4, [])
    shard.restart()
    assert shard.topic("t").head_seq == limits.SEQ_RESERVE, "the machine did go down: seqs may be gone"
    shard.append("t", records(1))
    shard.checkpoint()
    shard.append("t", records(1))
    shard.restart()
    assert shard.topic("t").head_seq == limits.SEQ_RESERVE + 2
    assert len(shard.engine.wal.files) > 3, "none of them went"


def test_what_came_after_a_snapshot_may_be_gone_without_a_trace(shard: Shard) -> None:
    shard.append("t", records(3))
    shard.checkpoint()
    path = shard.engine.wal.current.path
    shard.append("t", records(2))
    last = frames_of(path)[-1]
    shard.crash()
    overwrite(path, last.offset, bytes(last.length))
    shard.open(boot=OTHER_BOOT)
    assert shard.append("t", records(1)).first_seq > 5, "a seq was given out twice"


def test_what_went_with_the_power_below_the_first_record_counts_as_evicted(shard: Shard) -> None:
    """So that every seq that was ever given out is accounted for."""
    shard.append("t", records(3))
    shard.delete("t", before_seq=4)
    shard.crash()
    shard.open(boot=OTHER_BOOT)
    topic = shard.topic("t")
    assert topic.head_seq > 3, "seqs that may have been given out are not given out again"
    assert topic.count == 0
    assert topic.head_seq == topic.deleted_total + topic.evicted_total + topic.expired_total
    shard.restart()
    topic = shard.topic("t")
    assert topic.head_seq == topic.deleted_total + topic.evicted_total + topic.expired_total


# --- torn tails and damage ---------------------------------------------------------------------------


@pytest.mark.parametrize("boot", [BOOT, OTHER_BOOT])
def test_a_tail_torn_at_every_length_loses_that_batch_only(tmp_path: Path, boot: bytes) -> None:
    shard = Shard(tmp_path / "whole", wal_file_bytes=8_192)
    shard.append("t", records(3), key="a")
    shard.append("t", records(2), key="b")
    path = shard.engine.wal.current.path
    *_, last = frames_of(path)
    shard.crash()
    whole = Path(path).read_bytes()
    for length in range(0, last.length, 3):
        if not any(whole[last.offset + length : last.offset + last.length]):
            continue  # its xxh3 ends with zeros: nothing is missing
        Path(path).write_bytes(whole[: last.offset + length] + bytes(len(whole) - last.offset - length))
        shard.open(boot=boot)
        assert len(shard.everything("t")) == 3
        assert [key for key, _ in shard.topic("t").keys] == ["a"]
        expected = 4 if boot == BOOT else limits.SEQ_RESERVE + 1
        assert shard.append("t", records(1)).first_seq == expected
        shard.crash()
        for name in os.listdir(os.path.dirname(path)):
            if name != os.path.basename(path):
                os.unlink(os.path.join(os.path.dirname(path), name))


def test_a_torn_tail_is_no_damage_to_the_starts_that_follow(shard: Shard) -> None:
    shard.append("t", records(3))
    shard.append("t", records(2))
    path = shard.engine.wal.current.path
    *_, last = frames_of(path)
    shard.crash()
    overwrite(path, last.offset + last.length // 2, bytes(last.length))
    shard.open()
    shard.append("t", records(1))
    stored = shard.everything("t")
    assert [one.seq for one in stored] == [1, 2, 3, 4]
    for _ in range(2):
        shard.restart()
        assert shard.everything("t") == stored


def test_a_delete_that_a_snapshot_covers_counts_for_what_is_still_in_the_log(shard: Shard) -> None:
    """The snapshot says where the topic begins, and nothing of the deletes behind that."""
    shard.append("t", [Record(b"1"), Record(b"2", tag="x"), Record(b"3"), Record(b"4", tag="x"), Record(b"5")])
    assert shard.delete("t", tag="x").deleted == 2
    stored = shard.everything("t")
    assert [one.seq for one in stored] == [1, 3, 5]
    shard.checkpoint()
    for _ in range(2):
        shard.restart()
        assert shard.everything("t") == stored
        assert (shard.report("t").count, shard.topic("t").deleted_total) == (3, 2)


def test_damage_in_the_middle_is_refused_with_file_place_and_remedy(shard: Shard) -> None:
    for _ in range(4):
        shard.append("t", records(3))
    path = shard.engine.wal.current.path
    frame = frames_of(path)[2]
    shard.crash()
    flip(path, frame.offset + frame.length // 2)
    before = Path(path).read_bytes()
    with pytest.raises(CorruptData) as caught:
        shard.open()
    text = str(caught.value)
    assert path in text
    assert str(frame.offset) in text
    assert "backup" in text
    assert Path(path).read_bytes() == before, "a refused file was changed"


def untold(path: str, at: int, last: Frame) -> bool:
    """Whether the flipped byte is the last one of all and 0 now: a write that was cut short there looks the same."""
    return at == last.offset + last.length - 1 and not Path(path).read_bytes()[at]


@pytest.mark.parametrize("boot", [BOOT, OTHER_BOOT])
def test_every_flipped_bit_of_the_log_is_refused_and_more_than_a_bit_if_it_is_no_power_cut(
    tmp_path: Path, boot: bytes
) -> None:
    shard = Shard(tmp_path, wal_file_bytes=8_192)
    for number in range(4):
        shard.append("t", records(1), key=f"k{number}")
    path = shard.engine.wal.current.path
    last = frames_of(path)[-1]
    whole = Path(path).read_bytes()
    shard.crash()
    for at in range(0 if boot == BOOT else last.offset, last.offset + last.length):
        Path(path).write_bytes(whole)
        flip(path, at)
        if not untold(path, at, last):
            with pytest.raises((CorruptData, FormatError)):
                shard.open(boot=boot)
            if boot == BOOT:
                continue
            overwrite(path, at, bytes([whole[at] ^ 0xFF]))
        shard.open(boot=boot)
        assert len(shard.everything("t")) == 3
        current = shard.engine.wal.current.path
        shard.crash()
        os.unlink(current)


def test_the_oldest_log_file_is_missing(shard: Shard) -> None:
    shard.append("t", records(1))
    while len(shard.engine.wal.files) < 3:
        shard.append("t", long(1))
    first = shard.engine.wal.files[0].path
    shard.crash()
    os.unlink(first)
    with pytest.raises(CorruptData, match="missing"):
        shard.open()


def test_a_log_file_in_the_middle_is_missing(shard: Shard) -> None:
    while len(shard.engine.wal.files) < 4:
        shard.append("t", long(1))
    middle = shard.engine.wal.files[2].path
    shard.crash()
    os.unlink(middle)
    with pytest.raises(CorruptData, match="missing"):
        shard.open()


@pytest.mark.parametrize("boot", [BOOT, OTHER_BOOT])
@pytest.mark.parametrize("clean", [True, False])
def test_records_that_the_snapshot_has_seen_in_the_log_are_missed(shard: Shard, boot: bytes, clean: bool) -> None:
    """The log goes on behind the file that is missing, and the snapshot covers every frame of it."""
    shard.append("t", records(3), config=FSYNC)
    shard.append("u", records(1), config=FSYNC)
    while len(shard.engine.wal.files) < 3:
        shard.append("u", long(1))
    shard.checkpoint()
    gone = shard.engine.wal.files[0].path
    if clean:
        shard.stop()
    else:
        shard.append("u", records(1))
        shard.crash()
    copy = Path(gone).read_bytes()
    os.unlink(gone)
    before = contents(shard)
    with pytest.raises(CorruptData, match="3 of seqs 1 to 3 of topic 't' were in the log alone"):
        shard.open(boot=boot)
    assert contents(shard) == before, "nothing was changed"
    Path(gone).write_bytes(copy)
    shard.open(boot=boot)
    assert len(shard.everything("t")) == 3


def test_a_file_whose_records_are_all_deleted_may_be_missing(shard: Shard) -> None:
    shard.append("t", records(3))
    while len(shard.engine.wal.files) < 3:
        shard.append("t", long(1))
    first = shard.engine.wal.files[0]
    last = frames_of(first.path)[-1].last_seq
    shard.delete("t", before_seq=last + 1)
    shard.wall.pass_ms(1)
    shard.checkpoint()
    left = shard.everything("t")
    assert not os.path.exists(first.path)
    shard.restart()
    assert shard.everything("t") == left
    shard.delete("t", before_seq=left[-1].seq)
    shard.restart()
    assert shard.everything("t") == left[-1:], "what was deleted after the snapshot is in the log all the same"


def test_the_file_that_was_written_when_the_snapshot_was_made_is_missing(shard: Shard) -> None:
    """The only one: what came after the snapshot is gone with it."""
    shard.append("t", records(3), config=FSYNC)
    shard.flush("t")
    shard.checkpoint()
    shard.append("t", records(2))
    path = shard.engine.wal.current.path
    shard.crash()
    os.unlink(path)
    before = contents(shard)
    with pytest.raises(CorruptData, match="is missing; the snapshot knows of it"):
        shard.open()
    assert contents(shard) == before


def flushed(shard: Shard) -> str:
    """A topic with a sealed and an open segment, checkpointed; returns its folder."""
    shard.append("t", records(25, tag="x"))
    shard.flush("t")
    shard.append("t", records(3))
    shard.flush("t")
    shard.checkpoint()
    return os.path.dirname(shard.topic("t").segments[0].path)


@pytest.mark.parametrize("which", [0, -1])
def test_a_missing_segment_is_refused(shard: Shard, which: int) -> None:
    flushed(shard)
    path = shard.topic("t").segments[which].path
    shard.crash()
    os.unlink(path)
    with pytest.raises(CorruptData, match="missing"):
        shard.open()


def test_a_damaged_snapshot_is_refused(shard: Shard) -> None:
    flushed(shard)
    folder = shard_dir(shard.settings.data_dir, 0)
    [snapshot] = [name for name in os.listdir(folder) if name.endswith(".snap")]
    shard.crash()
    flip(os.path.join(folder, snapshot), 60)
    with pytest.raises(CorruptData, match="snapshot"):
        shard.open()


def test_a_damaged_open_segment_is_refused(shard: Shard) -> None:
    flushed(shard)
    path = shard.topic("t").segments[-1].path
    shard.crash()
    flip(path, FILE_HEADER_BYTES + 70)
    with pytest.raises(CorruptData):
        shard.open()


def test_a_damaged_block_is_an_error_for_its_readers_and_nobody_else(shard: Shard) -> None:
    flushed(shard)
    shard.append("other", records(2))
    path = shard.topic("t").segments[0].path
    shard.crash()
    flip(path, FILE_HEADER_BYTES + 70)
    shard.open()
    with pytest.raises(ApiError, match="damaged"):
        shard.everything("t")
    assert len(shard.everything("other")) == 2
    assert shard.diff("t", 25).stored != []


def test_a_newer_format_is_refused_with_the_word_upgrade(shard: Shard) -> None:
    shard.append("t", records(1))
    path = shard.engine.wal.current.path
    shard.crash()
    overwrite(path, 8, (99).to_bytes(4, "little"))
    with pytest.raises(FormatError, match="upgrade"):
        shard.open()


def test_a_file_that_never_got_its_header_is_no_loss(shard: Shard) -> None:
    shard.append("t", records(3))
    folder = shard_dir(shard.settings.data_dir, 0)
    shard.crash()
    empty = os.path.join(folder, "00000001-0000000000ff.wal")
    for content in (b"", bytes(10), bytes(4096)):
        Path(empty).write_bytes(content)
        shard.open()
        assert len(shard.everything("t")) == 3
        current = shard.engine.wal.current.path
        shard.crash()
        if current != empty:
            os.unlink(current)
        assert current == empty or not os.path.exists(empty)


# --- leftovers ---------------------------------------------------------------------------------------


def test_blocks_that_no_snapshot_names_are_written_again(shard: Shard) -> None:
    shard.append("t", records(25))
    stored = shard.everything("t")
    shard.mover.flush(shard.topic("t"))
    shard.restart()
    assert shard.everything("t") == stored
    shard.flush("t")
    shard.checkpoint()
    shard.restart()
    assert shard.everything("t") == stored
    assert shard.topic("t").tail_rows == 0


def test_files_of_dropped_topics_and_temporary_files_go(shard: Shard) -> None:
    folder = flushed(shard)
    shard.drop("t")
    shard.append("u", records(25))
    shard.flush("u")
    shard.checkpoint()
    assert not os.path.exists(folder)
    stray = os.path.join(os.path.dirname(shard.topic("u").segments[0].path), "00000000000000000099.data")
    Path(stray).write_bytes(b"rubbish")
    Path(stray + ".tmp").write_bytes(b"rubbish")
    shard.restart()
    assert not os.path.exists(stray)
    assert not os.path.exists(stray + ".tmp")
    assert len(shard.everything("u")) == 25


def test_a_drop_survives_two_crashes(shard: Shard) -> None:
    flushed(shard)
    shard.drop("t")
    shard.restart()
    assert "t" not in shard.engine.topics
    shard.restart()
    assert "t" not in shard.engine.topics
    shard.checkpoint()
    assert os.listdir(os.path.join(shard.settings.data_dir, "topics")) == []


def test_the_log_is_trimmed_when_a_snapshot_covers_it(shard: Shard) -> None:
    shard.append("t", records(1))
    while len(shard.engine.wal.files) < 4:
        shard.append("t", long(1))
    stored = shard.everything("t")
    shard.flush("t")
    shard.checkpoint()
    assert len(shard.engine.wal.files) == 1
    names = os.listdir(shard_dir(shard.settings.data_dir, 0))
    assert sorted(name.split(".")[1] for name in names) == ["snap", "wal"]
    shard.restart()
    assert shard.everything("t") == stored


def test_a_clean_stop_leaves_nothing_to_replay(shard: Shard) -> None:
    flushed(shard)
    shard.append("e", records(3), config=TopicConfig(durability="ephemeral"))
    shard.stop()
    shard.open()
    assert len(shard.everything("t")) == 28
    assert shard.everything("e") == []
    assert shard.append("e", records(1)).first_seq == 4
    assert shard.append("t", records(1)).first_seq == 29


# --- the shard count changed ---------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [2, 3])
def test_every_topic_goes_to_its_owner_and_to_nobody_else(shard: Shard, shards: int) -> None:
    names = [f"topic-{number}" for number in range(12)]
    for name in names:
        shard.append(name, records(5, tag="x"), key="k")
    for name in names[:6]:
        shard.flush(name)
    shard.checkpoint()
    for name in names:
        shard.append(name, records(2))
        shard.delete(name, before_seq=3)
    shard.be_quiet()
    expected = {name: shard.everything(name) for name in names}
    shard.crash()
    seen: list[str] = []
    for index in range(shards):
        disk = QuickDisk()
        recovered = Recovery(
            settings=shard.settings,
            disk=disk,
            files=OpenFiles(disk),
            clock=Wall().clock(),
            shard=index,
            shards=shards,
            boot=BOOT,
            progress=lambda permille: None,
        ).run(layout=1, old_shards=1)
        assert all(owner_of_name(name, shards) == index for name in recovered.topics)
        for name, topic in recovered.topics.items():
            assert topic.count == len(expected[name]) == 5
            assert topic.earliest_seq == 3
            assert "k" in topic.keys
        seen += recovered.topics
        for file in recovered.wal_files:
            os.close(file.fd)
    assert sorted(seen) == sorted(names)


def test_how_one_folder_ended_says_nothing_of_another(tmp_path: Path) -> None:
    """Copies in memory that a snapshot knows of are made again under the same seqs, also if the shard whose folder is
    read next was stopped cleanly."""
    crashed = PipeShard(tmp_path / "data")
    crashed.put("source", TopicConfig())
    crashed.put("dest", TopicConfig())
    crashed.append("source", records(3))
    Forwarder(crashed, "source", "dest").pump()
    crashed.flush("dest")
    crashed.checkpoint()
    crashed.append("source", records(4))
    Forwarder(crashed, "source", "dest").pump()
    crashed.checkpoint()
    crashed.crash()
    clean = Shard(tmp_path / "other")
    clean.append("t", records(2), config=TopicConfig(durability="ephemeral"))
    clean.stop()
    other = shard_dir(os.fspath(tmp_path / "other"), 0)
    for first, second in ((0, 1), (1, 0)):
        folder = tmp_path / f"as-{first}"
        shutil.copytree(tmp_path / "data", folder)
        os.rename(shard_dir(os.fspath(folder), 0), shard_dir(os.fspath(folder), first))
        shutil.copytree(other, shard_dir(os.fspath(folder), second))
        disk = QuickDisk()
        recovered = Recovery(
            settings=Settings(data_dir=os.fspath(folder)),
            disk=disk,
            files=OpenFiles(disk),
            clock=Wall().clock(),
            shard=0,
            shards=1,
            boot=BOOT,
            progress=lambda permille: None,
        ).run(layout=1, old_shards=2)
        dest = recovered.topics["dest"]
        assert dest.pipe is not None
        assert dest.pipe.rebuilding
        assert (dest.pipe.flushed_to, dest.next_seq) == (3, 8)
        assert recovered.topics["t"].next_seq == 3
        disk.close_all()


# --- recovery dies too ---------------------------------------------------------------------------------


class Gone(Exception):
    pass


class DyingDisk(QuickDisk):
    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> None:
        self.left -= 1
        if self.left <= 0:
            CRASH_POINTS.add(self.left == 0)
            raise Gone

    def create(self, path: str, *, size: int = 0) -> int:
        self._count()
        return super().create(path, size=size)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._count()
        super().write(fd, data, offset)

    def truncate(self, path: str, size: int) -> None:
        self._count()
        super().truncate(path, size)

    def unlink(self, path: str) -> None:
        self._count()
        super().unlink(path)

    def sync(self, fd: int) -> None:
        self._count()


def test_recovery_may_die_at_every_step_and_start_over(shard: Shard) -> None:
    flushed(shard)
    shard.append("t", long(30), key="k")
    shard.mover.flush(shard.topic("t"))
    shard.delete("t", tag="x")
    shard.drop("nothing")
    path = shard.engine.wal.current.path
    expected = shard.everything("t")
    shard.crash()
    with open(path, "r+b") as file:
        file.seek(frames_of(path)[-1].offset + frames_of(path)[-1].length)
        file.write(b"torn")
    # Every life that ends too early leaves an empty log file, so later ones have a little more to do.
    for at in [*range(1, 40), 80, 160, 320]:
        try:
            shard.open(DyingDisk(at))
        except Gone:
            continue
        break
    assert shard.is_open
    assert at > 3
    assert shard.everything("t") == expected
    assert shard.append("t", records(1), key="k").deduped


def test_what_was_deleted_before_it_was_lost_is_counted_once(shard: Shard) -> None:
    shard.append("e", [*records(3, tag="x"), *records(7)], config=TopicConfig(durability="ephemeral"))
    shard.append("e", records(5, tag="y"))
    shard.delete("e", tag="x")
    shard.delete("e", tag="y", before_seq=13)
    shard.checkpoint()
    for _ in range(2):
        shard.restart()
        topic = shard.topic("e")
        assert topic.count == 0
        assert topic.deleted_total == 5
        assert topic.evicted_total + topic.deleted_total == topic.head_seq
        shard.checkpoint()
