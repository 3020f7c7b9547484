"""Kinds of damage one by one: what exactly a repair does about each, and what exactly it calls lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from figures import DAMAGES
from folderplay import write_manifest
from mended import check_server, check_word, frames_of, records, repair, seen
from model import Shard
from onlooker import contents

from topics import limits
from topics.cli.datadir.repair import Report, _repair
from topics.datadir.fsck.verify import verify
from topics.datadir.log import _boot_id
from topics.datadir.ranges import both, joined, minus, total
from topics.datadir.repair import plan as plans
from topics.datadir.view.folder import Folder
from topics.errors import CorruptData, TopicsError
from topics.storage.config import TopicConfig
from topics.storage.format import FrameType
from topics.storage.frames import Frame
from topics.storage.routers import decode_rules
from topics.storage.segment import decode_segment_header, scan_blocks
from topics.storage.snapshot import decode_snapshot, decode_topic, encode_snapshot, encode_topic

pytestmark = pytest.mark.usefixtures("small_files")

SHARD = Path("wal", "shard-00")


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    DAMAGES.add()
    path.write_bytes(data)


def lost(report: Report) -> list[tuple[str, int, int]]:
    return [(loss.topic, loss.first, loss.last) for loss in report.lost]


def placed(folder: Path, kind: FrameType, name: str, at: int = -1) -> tuple[Path, Frame]:
    """A frame of a topic in the log."""
    topics = Folder(str(folder)).topics
    wanted = next(topic.id for topic in topics if topic.name == name)
    found = [
        (path, frame)
        for path in sorted((folder / SHARD).glob("*.wal"))
        for frame in frames_of(path)
        if (frame.topic_id, frame.type) == (wanted, kind)
    ]
    return found[at]


def segment_of(folder: Path, name: str, number: int) -> Path:
    topic = next(topic for topic in Folder(str(folder)).topics if topic.name == name)
    return folder / "topics" / f"{topic.id:016x}" / f"{topic.segments[number].first_seq:020d}.data"


# --- the log -------------------------------------------------------------------------------------------


def test_a_batch_whose_head_can_be_read_is_lost_alone(whole: Path, mine: Path) -> None:
    path, frame = placed(mine, FrameType.APPEND, "u", -2)
    flip(path, frame.offset + 80)
    report = repair(mine)
    assert lost(report) == [("u", frame.first_seq, frame.last_seq)]
    assert not report.also_lost
    check_word(whole, mine, report)


def test_a_batch_that_nothing_follows(whole: Path, mine: Path) -> None:
    """Nobody else tells that its seqs were given out."""
    path, frame = placed(mine, FrameType.APPEND, "u")
    flip(path, frame.offset + 80)
    report = repair(mine)
    assert lost(report) == [("u", frame.first_seq, frame.last_seq)]
    check_word(whole, mine, report)


def test_a_batch_without_a_head_puts_all_in_doubt(whole: Path, mine: Path) -> None:
    path, frame = placed(mine, FrameType.APPEND, "t", -2)
    flip(path, frame.offset + 40)  # its number
    report = repair(mine)
    found = {topic: (first, last) for topic, first, last in lost(report)}
    assert found.pop("t") == (frame.first_seq, frame.last_seq)  # the next batch tells
    assert set(found) == {"old", "u"}  # of "new" there is more behind it, which goes on where it was
    for first, last in found.values():
        assert 0 < last - first < frame.length  # no more than the frame had room for
    assert "can't be told" in report.also_lost[0]
    check_word(whole, mine, report)


@pytest.mark.full
@pytest.mark.parametrize("field", [4, 8, 10, 12, 16, 24, 40])
@pytest.mark.parametrize(("at", "bit"), [(-1, 4), (-1, 16), (-2, 4)])
def test_a_damaged_head_clears_nobody(whole: Path, mine: Path, field: int, at: int, bit: int) -> None:
    """Length, type, key, count, topic, first seq, number: what can't be trusted puts all in doubt."""
    path, frame = placed(mine, FrameType.APPEND, "u", at)
    flip_bit(path, frame.offset + field, bit)
    report = repair(mine)
    covered = {seq for topic, first, last in lost(report) if topic == "u" for seq in range(first, last + 1)}
    assert covered >= set(range(frame.first_seq, frame.last_seq + 1))
    check_word(whole, mine, report)


def flip_bit(path: Path, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    DAMAGES.add()
    path.write_bytes(data)


def test_the_first_frame_of_the_log(whole: Path, mine: Path) -> None:
    """Nothing before it tells its number; the files before it may have gone in order."""
    paths = [path for path in sorted((mine / SHARD).glob("*.wal")) if frames_of(path)]
    paths[0].unlink()
    frame = frames_of(paths[1])[0]
    flip(paths[1], frame.offset + 80)
    report = repair(mine)
    assert ("t", frame.first_seq, frame.last_seq) in lost(report)
    check_word(whole, mine, report)


def test_a_lost_delete_is_said(whole: Path, mine: Path) -> None:
    path, frame = placed(mine, FrameType.DELETE, "u")
    flip(path, frame.offset + 57)
    report = repair(mine)
    assert lost(report) == []
    assert "a delete in topic u: its records are there again" in report.also_lost[0]
    check_word(whole, mine, report)
    topic = next(topic for topic in Folder(str(mine)).topics if topic.name == "u")
    assert topic.deleted_total == 0


def test_a_topic_whose_name_is_lost_keeps_its_records(whole: Path, mine: Path) -> None:
    path, frame = placed(mine, FrameType.TOPIC, "new")
    flip(path, frame.offset + 60)
    report = repair(mine)
    (topic,) = (topic for topic in Folder(str(mine)).topics if topic.id == frame.topic_id)
    assert topic.name.startswith(f"lost-{frame.topic_id:016x}-")
    assert topic.count == 5
    assert any(topic.name in text for text in report.also_lost)
    check_server(mine)


def test_a_file_missing_in_the_middle_of_the_log(whole: Path, mine: Path) -> None:
    paths = [path for path in sorted((mine / SHARD).glob("*.wal")) if frames_of(path)]
    gone = frames_of(paths[-2])
    paths[-2].unlink()
    report = repair(mine)
    check_word(whole, mine, report)
    assert {topic for topic, _, _ in lost(report)} >= {"u"}
    after = [frame.lsn for path in sorted((mine / SHARD).glob("*.wal")) for frame in frames_of(path)]
    assert after == list(range(after[0], after[-1] + 1))
    assert gone[0].lsn in after


def test_the_file_that_the_snapshot_names(whole: Path, mine: Path) -> None:
    (snapshot,) = (mine / SHARD).glob("*.snap")
    state = decode_snapshot(snapshot.read_bytes(), path="")
    for path in (mine / SHARD).glob("*.wal"):
        if int(path.stem.split("-")[1], 16) >= state.file_no:
            path.unlink()
    report = repair(mine)
    assert report.whole
    assert any("the snapshot knows of it" in done.what for done in report.files)
    heads = {topic.name: topic.head_seq for topic in Folder(str(whole)).topics}
    for topic in Folder(str(mine)).topics:
        assert topic.head_seq >= heads[topic.name] + limits.LOST_SEQS // 2
    check_server(mine)


def test_nothing_came_after_a_clean_snapshot(tmp_path: Path) -> None:
    """So a missing log takes what was only there, and no seq is in doubt."""
    shard = Shard(tmp_path, segment_max_events=20)
    shard.restart(boot=_boot_id())
    shard.put("t", TopicConfig())
    shard.append("t", records(4))
    shard.flush("t")
    shard.append("t", records(3))
    shard.stop()
    write_manifest(tmp_path)
    for path in (tmp_path / SHARD).glob("*.wal"):
        path.unlink()
    report = repair(tmp_path)
    (loss,) = report.lost
    assert (loss.topic, loss.last) == ("t", 7)
    assert loss.first == 5
    (topic,) = Folder(str(tmp_path)).topics
    assert topic.head_seq == 7
    check_server(tmp_path)


@pytest.mark.parametrize("newer", [False, True])
def test_what_follows_an_acknowledged_round_is_kept(tmp_path: Path, newer: bool) -> None:
    """After a reboot, too. Frames of the same round can't know that it was synced; one behind them does, in this file
    or in a newer one."""
    shard = Shard(tmp_path)
    shard.put("t", TopicConfig(durability="fsync"))
    for _ in range(4):
        shard.send_append("t", records(1))
    shard.settle()
    if newer:
        shard.engine.wal.rotate(0)
    shard.append("t", records(1))
    shard.append("t", records(1))
    shard.crash()
    write_manifest(tmp_path)
    path = min((tmp_path / SHARD).glob("*.wal"))
    frame = next(frame for frame in frames_of(path) if frame.first_seq == 2)
    flip(path, frame.offset + 70)
    report = repair(tmp_path)
    assert lost(report) == [("t", 2, 2)]
    (topic,) = Folder(str(tmp_path)).topics
    assert (topic.head_seq, topic.count) == (6, 5)


@pytest.mark.parametrize("more", [0, 3])
def test_a_wrong_bit_at_the_end_of_a_file_takes_no_newer_file_with_it(tmp_path: Path, more: int) -> None:
    """After a reboot, where nothing was synced: the server refuses such a folder, so what follows is kept."""
    shard = Shard(tmp_path, wal_file_bytes=16_384, disk_sync_ms=600_000)
    shard.put("t", TopicConfig(durability="memory", durable=False))
    shard.sync()
    written = 0
    while len(shard.engine.wal.files) < 2:
        shard.append("t", records(1, size=400))
        written += 1
    for _ in range(more):
        shard.append("t", records(1, size=400))
    path = Path(shard.engine.wal.files[0].path)
    shard.crash()
    write_manifest(tmp_path)
    frame = frames_of(path)[-1]
    assert (frame.first_seq, frame.count) == (written - 1, 1)
    flip_bit(path, frame.offset + frame.length - 200, 4)
    with pytest.raises(CorruptData):
        Shard(tmp_path)
    report = repair(tmp_path)
    assert lost(report) == [("t", frame.first_seq, frame.last_seq)]
    (topic,) = Folder(str(tmp_path)).topics
    assert (topic.head_seq, topic.count) == (written + more, written + more - 1)


# --- segments ------------------------------------------------------------------------------------------


def blocks(path: Path) -> list[tuple[int, int, int]]:
    data = path.read_bytes()
    salt = decode_segment_header(data, path="").salt
    return [(entry.offset, entry.first_seq, entry.last_seq) for entry, _ in scan_blocks(data, salt=salt, path="")]


def test_a_block_that_is_nowhere_else(whole: Path, mine: Path) -> None:
    path = segment_of(mine, "old", 0)
    offset, first, last = blocks(path)[1]
    flip(path, offset + 100)
    report = repair(mine)
    assert lost(report) == [("old", first, last)]
    assert report.restored == []
    assert check_word(whole, mine, report) == last - first + 1


def test_a_block_that_is_in_the_log_too(whole: Path, mine: Path) -> None:
    path = segment_of(mine, "t", -1)
    for offset, _, _ in blocks(path):
        flip(path, offset + 100)
    report = repair(mine)
    assert lost(report) == []
    assert [(one.topic, one.first, one.last) for one in report.restored]
    assert check_word(whole, mine, report) == 0


def test_an_index_tells_what_a_missing_segment_held(whole: Path, mine: Path) -> None:
    path = segment_of(mine, "t", 0)
    held = [(first, last) for _, first, last in blocks(path)]
    path.unlink()
    report = repair(mine)
    low = next(topic.low for topic in Folder(str(whole)).topics if topic.name == "t")
    assert [(first, last) for _, first, last in lost(report)] == joined(minus(held, [(1, low - 1)]))
    check_word(whole, mine, report)
    assert not path.with_suffix(".idx").exists()


def test_a_flag_of_no_meaning(whole: Path, mine: Path) -> None:
    path = segment_of(mine, "old", 0)
    data = path.read_bytes()
    entry, _ = scan_blocks(data, salt=decode_segment_header(data, path="").salt, path="")[0]
    flip(path, entry.flags_offset + 2)
    report = repair(mine)
    assert lost(report) == []
    assert any(f"seq {entry.first_seq + 2}" in done.what for done in report.files)
    assert path.read_bytes() == data
    check_word(whole, mine, report)


def test_a_segment_that_the_snapshot_forgot(whole: Path, mine: Path) -> None:
    """Its seqs have no record then; nobody deleted them, so they are lost."""
    (snapshot,) = (mine / SHARD).glob("*.snap")
    state = decode_snapshot(snapshot.read_bytes(), path="")
    topics = [decode_topic(raw) for raw in state.topics]
    old = next(topic for topic in topics if topic.name == "old")
    gone = old.segments.pop(0)
    state.topics = [msgspec.Raw(encode_topic(topic)) for topic in topics]
    snapshot.write_bytes(encode_snapshot(state))
    report = repair(mine)
    assert lost(report) == [("old", gone.first_seq, gone.last_seq)]
    check_word(whole, mine, report)


# --- snapshots and the rest ------------------------------------------------------------------------------


def test_an_older_snapshot_takes_over(tmp_path: Path) -> None:
    shard = Shard(tmp_path, segment_max_events=20)
    shard.restart(boot=_boot_id())
    shard.put("t", TopicConfig())
    shard.append("t", records(4))
    shard.checkpoint()
    (older,) = (tmp_path / SHARD).glob("*.snap")
    kept = older.read_bytes()
    shard.append("t", records(3))
    shard.checkpoint()
    shard.crash()
    write_manifest(tmp_path)
    older.write_bytes(kept)  # the crash came before it went
    before = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-before")))
    newest = max((tmp_path / SHARD).glob("*.snap"))
    assert newest != older
    flip(newest, 50)
    report = repair(tmp_path)
    assert lost(report) == []
    assert not newest.exists()
    assert check_word(before, tmp_path, report) == 0


def test_a_log_from_the_beginning_needs_no_snapshot(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.restart(boot=_boot_id())
    shard.put("t", TopicConfig())
    shard.append("t", records(4))
    shard.checkpoint()
    shard.append("t", records(3))
    shard.crash()
    write_manifest(tmp_path)
    before = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-before")))
    flip(max((tmp_path / SHARD).glob("*.snap")), 50)
    report = repair(tmp_path)
    assert check_word(before, tmp_path, report) == 0


def test_a_header_of_a_snapshot_is_made_again(whole: Path, mine: Path) -> None:
    (snapshot,) = (mine / SHARD).glob("*.snap")
    flip(snapshot, 8)
    report = repair(mine)
    assert lost(report) == []
    assert check_word(whole, mine, report) == 0


def test_a_cold_tier_that_is_not_mounted_is_not_lost(mine: Path, tmp_path: Path) -> None:
    """Where its disk is mounted there may be an empty folder."""
    cold = tmp_path / "unmounted"
    for more in ({}, {"cold_id": "c1"}):
        write_manifest(mine, cold=str(cold), **more)
        with pytest.raises(TopicsError, match=r"the cold tier .* is not there .*: mount its disk"):
            plans.plan(str(mine), now_ms=0)
        cold.mkdir(exist_ok=True)
    (cold / "cold.json").write_text('{"id":"another"}')
    with pytest.raises(TopicsError, match=r"the cold tier .* is not there"):
        plans.plan(str(mine), now_ms=0)
    (cold / "cold.json").write_text('{"id":"c1"}')
    assert not plans.plan(str(mine), now_ms=0).losses


def test_routers_are_lost_aloud(whole: Path, mine: Path) -> None:
    flip(mine / "routers", 40)
    report = repair(mine)
    assert "all routers" in report.also_lost[0]
    assert decode_rules((mine / "routers").read_bytes(), path="") == []
    check_word(whole, mine, report)


def test_routers_that_are_missing_are_lost_aloud(whole: Path, mine: Path) -> None:
    write_manifest(mine, routers=True)
    (mine / "routers").unlink()
    verdict = verify(str(mine), deep=True, running=False)
    assert [trouble.file for trouble in verdict.problems] == ["routers"]
    report = repair(mine)
    assert "all routers" in report.also_lost[0]
    assert decode_rules((mine / "routers").read_bytes(), path="") == []
    check_word(whole, mine, report)


def test_a_file_of_somebody_else_stays(mine: Path) -> None:
    (mine / "topics" / "README").write_text("mine")
    assert repair(mine).files == []
    assert (mine / "topics" / "README").exists()


def test_a_plan_covers_what_belongs_together() -> None:
    plan = plans.Plan(steps=[plans.Step(file="topics/0/1.idx", what=""), plans.Step(file="wal/s/a", what="")])
    for file in ("topics/0/1.idx", "topics/0/1.data", "wal/s/b", "wal/s"):
        assert plans.covers(plan, file)
    for file in ("topics/0/2.data", "wal/t/a", "routers"):
        assert not plans.covers(plan, file)


# --- ranges ----------------------------------------------------------------------------------------------


def test_ranges_against_sets() -> None:
    def all_of(ranges: list[tuple[int, int]]) -> set[int]:
        return {n for first, last in ranges for n in range(first, last + 1)}

    cases = [[], [(1, 3)], [(2, 2), (5, 9)], [(4, 4)], [(1, 20)], [(7, 6), (3, 5), (4, 8)], [(1, 2), (3, 4), (9, 12)]]
    for one in cases:
        assert all_of(joined(one)) == all_of(one)
        assert total(joined(one)) == len(all_of(one))
        assert all(a[1] + 1 < b[0] for a, b in zip(joined(one), joined(one)[1:], strict=False))
        for other in cases:
            assert all_of(minus(one, other)) == all_of(one) - all_of(other)
            assert all_of(both(one, other)) == all_of(one) & all_of(other)


# --- a cold tier -----------------------------------------------------------------------------------------


@pytest.fixture
def tiered(mine: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Sealed segments of `old` have moved; their indexes stayed."""
    cold = tmp_path / "cold"
    for path in [segment_of(mine, "old", number) for number in (0, 1)]:
        target = cold / path.relative_to(mine)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    write_manifest(mine, cold=str(cold))
    return mine, cold


def test_a_copy_that_nothing_names_may_be_in_both_tiers(tiered: tuple[Path, Path]) -> None:
    """As a shard leaves it that dies between the copy of a segment and the snapshot that names one of the two."""
    mine, cold = tiered
    path = segment_of(mine, "old", 0).relative_to(mine)
    for tier in (mine, cold):
        shutil.copy(cold / path, tier / path.with_name(f"{10**9:020d}.data"))
    verdict = verify(str(mine), deep=True, running=False)
    assert verdict.clean, verdict.problems
    assert [note.file for note in verdict.notes] == [str(path.with_name(f"{10**9:020d}.data"))] * 2


def test_a_cold_segment_is_mended_where_it_is(whole: Path, tiered: tuple[Path, Path]) -> None:
    mine, cold = tiered
    here = [mine / segment_of(whole, "old", number).relative_to(whole) for number in (0, 1)]
    path = cold / here[0].relative_to(mine)
    offset, first, last = blocks(path)[1]
    flip(path, offset + 100)
    here[1].with_suffix(".idx").unlink()
    report = repair(mine)
    assert lost(report) == [("old", first, last)]
    assert check_folder_alone(whole, mine) == last - first + 1
    assert len(blocks(path)) == 3
    assert not here[0].exists()
    assert here[1].with_suffix(".idx").exists()


def test_a_copy_has_one_tier(whole: Path, tiered: tuple[Path, Path], tmp_path: Path) -> None:
    mine, cold = tiered
    path = cold / segment_of(whole, "old", 0).relative_to(whole)
    flip(path, blocks(path)[1][0] + 100)
    before = contents(tmp_path)
    report = _repair(str(mine), str(tmp_path / "copy"), False)
    assert report.into == str(tmp_path / "copy")
    assert {name: kept for name, kept in contents(tmp_path).items() if not name.startswith("copy")} == before
    assert Folder(str(tmp_path / "copy")).files.manifest.cold is None
    check_word(whole, tmp_path / "copy", report)


def check_folder_alone(before: Path, after: Path) -> int:
    """How many records of `old` are gone."""
    had, has = (seen(folder)[0] for folder in (before, after))
    wanted = next(topic.id for topic in Folder(str(before)).topics if topic.name == "old")
    return len(had[wanted]) - len(has[wanted])
