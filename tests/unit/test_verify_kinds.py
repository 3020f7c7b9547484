"""Everything that `topics verify` can say is said about a folder that deserves it, and about no other.

A case damages one thing and names the sentence that must come of it. The last test reads the sentences out of the
program: one that no case has brought about has no test, and a checker that goes takes its case along.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from figures import DAMAGES
from mended import frames_of

from topics.datadir.fsck import checking
from topics.datadir.fsck import verify as proving
from topics.datadir.fsck.verify import Verdict
from topics.storage.format import CHECKSUM, FRAME_HEADER, FrameType
from topics.storage.frames import Frame, decode_wal_header, encode_frame
from topics.storage.manifest import Manifest, decode_manifest, encode_manifest
from topics.storage.segment import (
    SegmentHeader,
    decode_index,
    decode_segment_header,
    encode_index,
    scan_blocks,
)
from topics.storage.snapshot import (
    ShardState,
    TopicState,
    decode_snapshot,
    decode_topic,
    encode_snapshot,
    encode_topic,
)

pytestmark = pytest.mark.usefixtures("small_files")

SHARD = Path("wal", "shard-00")
Case = Callable[[Path], None]
CASES: dict[str, tuple[str, bool, Case]] = {}  # what is done -> (what is said, whether only --deep sees it, do it)


def case(says: str, *, deep: bool = False) -> Callable[[Case], Case]:
    def add(do: Case) -> Case:
        CASES[do.__name__] = (says, deep, do)
        return do

    return add


# --- doing damage under a good checksum ------------------------------------------------------------------


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0x40]))


def sealed(folder: Path, name: str = "old") -> Path:
    state = topic_state(folder, name)
    return folder / "topics" / f"{state.id:016x}" / f"{state.segments[0].first_seq:020d}.data"


def logs(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / SHARD).glob("*.wal")) if frames_of(path)]


def snapshot(folder: Path) -> Path:
    return max((folder / SHARD).glob("*.snap"))


def shard_state(folder: Path) -> ShardState:
    return decode_snapshot(snapshot(folder).read_bytes(), path="")


def topic_state(folder: Path, name: str) -> TopicState:
    return next(state for raw in shard_state(folder).topics if (state := decode_topic(raw)).name == name)


def rewrite(folder: Path, change: Callable[[TopicState], Any], name: str = "old") -> None:
    state = shard_state(folder)
    topics = [decode_topic(raw) for raw in state.topics]
    for topic in topics:
        if topic.name == name:
            change(topic)
    state.topics = [msgspec.Raw(encode_topic(topic)) for topic in topics]
    snapshot(folder).write_bytes(encode_snapshot(state))


def reframed(path: Path, frame: Frame, *, salt: int, **changes: Any) -> None:
    """The same frame with other fields and a checksum that holds. A body has to keep its length."""
    new = frame._replace(**changes)
    data = encode_frame(
        salt=salt,
        type=new.type,  # type: ignore[arg-type]
        topic_id=new.topic_id,
        first_seq=new.first_seq,
        count=new.count,
        ts=new.ts,
        lsn=new.lsn,
        synced=new.synced,
        body=new.body,
        key=new.key,
        flags=new.flags,
    )
    assert len(data) == frame.length
    overwrite(path, frame.offset, data)


def block(folder: Path, number: int, *, name: str = "old", **changes: Any) -> None:
    path = sealed(folder, name)
    data = path.read_bytes()
    salt = decode_segment_header(data, path="").salt
    _, frame = scan_blocks(data, salt=salt, path="")[number]
    reframed(path, frame, salt=salt, **changes)


def logged(folder: Path, kind: FrameType, **changes: Any) -> None:
    for path in reversed(logs(folder)):
        for frame in reversed(frames_of(path)):
            if frame.type == kind:
                salt = decode_wal_header(path.read_bytes()[:64], path="").salt
                reframed(path, frame, salt=salt, **changes)
                return
    raise AssertionError(f"no {kind} in the log")


def reindexed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = sealed(folder).with_suffix(".idx")
    data = path.read_bytes()
    index = decode_index(data, path="")
    tags: dict[str, list[int]] = {}
    for _, offset, length in index.directory:
        at = index.pages_offset + offset
        tags.update(msgspec.msgpack.decode(data[at : at + length - CHECKSUM.size], type=list[tuple[str, list[int]]]))
    parts: dict[str, Any] = {
        "topic_id": index.topic_id,
        "first_seq": index.first_seq,
        "last_seq": index.last_seq,
        "blocks": list(index.blocks),
        "tags": tags,
    }
    change(parts)
    path.write_bytes(encode_index(**parts))


# --- segments and their indexes --------------------------------------------------------------------------


@case("this file is missing, though it counts")
def a_segment_is_missing(folder: Path) -> None:
    sealed(folder).unlink()


@case("can't read .*: Is a directory")
def a_segment_is_a_folder(folder: Path) -> None:
    sealed(folder).unlink()
    sealed(folder).mkdir()


@case("belongs to topic 0000000000000007, not ")
def a_segment_of_another_topic(folder: Path) -> None:
    header = decode_segment_header(sealed(folder).read_bytes(), path="")
    overwrite(sealed(folder), 0, SegmentHeader(7, header.first_seq, header.created_ms, header.salt).encode())


@case("says that it begins with seq 3, not 1")
def a_segment_of_another_place(folder: Path) -> None:
    header = decode_segment_header(sealed(folder).read_bytes(), path="")
    overwrite(sealed(folder), 0, SegmentHeader(header.topic_id, 3, header.created_ms, header.salt).encode())


@case("ends here, 50 bytes too early")
def a_segment_is_cut_short(folder: Path) -> None:
    data = sealed(folder).read_bytes()
    sealed(folder).write_bytes(data[:-50])


@case("no good block: its checksum fails", deep=True)
def a_record_is_damaged(folder: Path) -> None:
    flip(sealed(folder), 64 + 120)


@case("no good block: its head is not what the index says")
def the_head_of_a_block(folder: Path) -> None:
    flip(sealed(folder), 64 + 32)


@case("no good block: its length is not what the index says")
def the_length_of_a_block(folder: Path) -> None:
    flip(sealed(folder), 64 + 4)


@case("block of topic 0000000000000007", deep=True)
def a_block_of_another_topic(folder: Path) -> None:
    block(folder, 1, topic_id=7)


@case("seq 2 follows seq 6", deep=True)
def blocks_out_of_order(folder: Path) -> None:
    block(folder, 1, first_seq=2)


@case("batch of 6 records holds 5 data values", deep=True)
def a_block_with_too_few_records(folder: Path) -> None:
    _, frame = _first_block(folder)
    block(folder, 0, body=frame.body.replace(b"\x1e", b" ", 1))


@case("batch of 6 records holds 5 tags", deep=True)
def a_block_with_too_few_tags(folder: Path) -> None:
    _, frame = _first_block(folder)
    block(folder, 0, body=frame.body.replace(b'["t0","t1",', b'["t0__t1",', 1).replace(b'"t2"]', b'"t2" ]', 1))


@case("batch of 3 records holds 4 times")
def a_batch_with_too_many_times(folder: Path) -> None:
    times = b"[[4,1234]]"
    body = len(times).to_bytes(4, "little") + bytes(12) + times + b"1\x1e2\x1e3"
    path = logs(folder)[-1]
    salt = decode_wal_header(path.read_bytes()[:64], path="").salt
    last = frames_of(path)[-1]
    frame = encode_frame(
        salt=salt,
        type=FrameType.APPEND,
        topic_id=last.topic_id,
        first_seq=last.last_seq + 1,
        count=3,
        ts=last.ts,
        lsn=last.lsn + 1,
        synced=0,
        body=body,
    )
    overwrite(path, last.offset + last.length, frame)


@case("the block's times or size are not those of its records", deep=True)
def the_size_of_a_block(folder: Path) -> None:
    _, frame = _first_block(folder)
    block(folder, 0, synced=frame.synced + 1)


@case("the delete flag of seq 2 is neither set nor clear")
def a_flag_of_no_meaning(folder: Path) -> None:
    entry, _ = _first_block(folder)
    overwrite(sealed(folder), entry.flags_offset + 1, b"\x01")


@case("ends with seq 12; the snapshot says 24", deep=True)
def a_snapshot_that_knows_less(folder: Path) -> None:
    data = sealed(folder).read_bytes()
    entry, _ = scan_blocks(data, salt=decode_segment_header(data, path="").salt, path="")[1]
    rewrite(folder, lambda topic: setattr(topic.segments[0], "data_bytes", entry.end))


@case("this index is missing; it can be made again from its segment")
def an_index_is_missing(folder: Path) -> None:
    sealed(folder).with_suffix(".idx").unlink()


@case("index checksum fails")
def an_index_is_damaged(folder: Path) -> None:
    flip(sealed(folder).with_suffix(".idx"), 70)


@case("tag page checksum fails")
def a_page_of_tags(folder: Path) -> None:
    path = sealed(folder).with_suffix(".idx")
    flip(path, path.stat().st_size - 3)


@case("can't read .*: Is a directory")
def an_index_is_a_folder(folder: Path) -> None:
    path = sealed(folder).with_suffix(".idx")
    path.unlink()
    path.mkdir()


@case("this index was made for another segment")
def an_index_of_another_segment(folder: Path) -> None:
    reindexed(folder, lambda parts: parts.update(topic_id=7))


@case("its block of seq 13 does not follow the one before")
def an_index_that_leaves_a_block_out(folder: Path) -> None:
    reindexed(folder, lambda parts: parts["blocks"].pop(1))


@case("lists 3 blocks of 4", deep=True)
def an_index_that_leaves_the_last_block_out(folder: Path) -> None:
    reindexed(folder, lambda parts: parts["blocks"].pop())


@case("ends with seq 18 at offset ")
def an_index_that_ends_early(folder: Path) -> None:
    reindexed(folder, lambda parts: parts["blocks"].pop())


@case("the index describes this block differently", deep=True)
def an_index_with_another_time(folder: Path) -> None:
    def change(parts: dict[str, Any]) -> None:
        parts["blocks"][1] = msgspec.structs.replace(parts["blocks"][1], last_ts=parts["blocks"][1].last_ts + 1)

    reindexed(folder, change)


@case("the tags in the index are not those of the records", deep=True)
def an_index_without_a_tag(folder: Path) -> None:
    reindexed(folder, lambda parts: parts["tags"].pop("t1"))


def _first_block(folder: Path) -> Any:
    data = sealed(folder).read_bytes()
    return scan_blocks(data, salt=decode_segment_header(data, path="").salt, path="")[0]


# --- the log ---------------------------------------------------------------------------------------------


@case("belongs to shard 3")
def a_log_of_another_shard(folder: Path) -> None:
    path = logs(folder)[-1]
    header = decode_wal_header(path.read_bytes()[:64], path="")
    overwrite(path, 0, msgspec.structs.replace(header, shard=3).encode())


@case("header checksum fails")
def the_header_of_a_log(folder: Path) -> None:
    flip(logs(folder)[0], 40)


@case("no good frame after frame ")
def a_frame_is_damaged(folder: Path) -> None:
    path = logs(folder)[-1]
    flip(path, frames_of(path)[1].offset + 60)


@case("follows frame ")
def a_frame_that_jumps(folder: Path) -> None:
    path = logs(folder)[-1]
    frame = frames_of(path)[-1]
    salt = decode_wal_header(path.read_bytes()[:64], path="").salt
    reframed(path, frame, salt=salt, lsn=frame.lsn + 5)


@case("a frame of type 9, which nobody knows")
def a_frame_of_another_world(folder: Path) -> None:
    logged(folder, FrameType.DELETE, type=9)


@case("Object missing required fields|Expected `|truncated|malformed|trailing")
def a_frame_that_can_not_be_read(folder: Path) -> None:
    logged(folder, FrameType.TOPIC, body=b"\xc1" * len(_last(folder, FrameType.TOPIC).body))


def _last(folder: Path, kind: FrameType) -> Frame:
    return [frame for path in logs(folder) for frame in frames_of(path) if frame.type == kind][-1]


@case("begins with frame .*; the file before ends with ")
def a_log_file_is_missing(folder: Path) -> None:
    logs(folder)[-2].unlink()


@case("the log begins with frame .*, but the snapshot ends with ")
def the_first_log_files_are_missing(folder: Path) -> None:
    state = shard_state(folder)
    state.lsn = 1
    snapshot(folder).write_bytes(encode_snapshot(state))


@case("the log ends with frame .*, but the snapshot has seen ")
def the_last_log_files_are_missing(folder: Path) -> None:
    covered = shard_state(folder).lsn
    for path in logs(folder):
        if frames_of(path)[-1].lsn >= covered:
            path.unlink()


# --- snapshots -------------------------------------------------------------------------------------------


@case("snapshot checksum fails")
def a_snapshot_is_damaged(folder: Path) -> None:
    flip(snapshot(folder), 100)


@case("shard 0 has no snapshot, so nobody names its ")
def no_snapshot(folder: Path) -> None:
    snapshot(folder).unlink()


@case("says that it is of shard 2")
def a_snapshot_of_another_shard(folder: Path) -> None:
    state = shard_state(folder)
    state.shard = 2
    snapshot(folder).write_bytes(encode_snapshot(state))


@case("a topic in it can't be read")
def a_topic_that_can_not_be_read(folder: Path) -> None:
    state = shard_state(folder)
    state.topics.append(msgspec.Raw(msgspec.msgpack.encode(["no", "topic"])))
    snapshot(folder).write_bytes(encode_snapshot(state))


@case("topic 'old' is there twice, also on shard 0")
def a_topic_twice(folder: Path) -> None:
    state = shard_state(folder)
    state.topics.append(msgspec.Raw(encode_topic(topic_state(folder, "old"))))
    snapshot(folder).write_bytes(encode_snapshot(state))


@case("does not belong to its name")
def a_topic_with_another_name(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "name", "older"))


@case("belongs to shard 1")
def a_topic_of_another_shard(folder: Path) -> None:
    (folder / "topics.json").write_bytes(encode_manifest(Manifest(format=1, layout=1, shards=3)))


@case("which is shard 1's|which is shard 2's")
def frames_of_another_shard(folder: Path) -> None:
    (folder / "topics.json").write_bytes(encode_manifest(Manifest(format=1, layout=1, shards=3)))


@case("is above its ceiling 3")
def a_ceiling_below_the_head(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "ceiling", 3))


@case("evict_floor 100 is outside 1..55")
def a_floor_above_the_head(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "evict_floor", 100))


@case("evict_floor 40, earliest_seq 40 and head_seq 30 are out of order|flushed_seq 54 is above head_seq 30")
def a_head_below_the_segments(folder: Path) -> None:
    def below(topic: TopicState) -> None:
        topic.head_seq, topic.floor = 30, 40

    rewrite(folder, below)


@case("are out of order")
def a_floor_that_nobody_reaches(folder: Path) -> None:
    def unreached(topic: TopicState) -> None:
        topic.evict_floor = topic.floor = 56

    rewrite(folder, unreached)


@case("flushed_seq 99 is above head_seq 54")
def more_flushed_than_there_was(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "flushed_seq", 99))


@case("a hole from 9 to 4 is outside 1..")
def a_hole_turned_round(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "holes", [(9, 4)]))


@case("a segment holds 49 to 54, flushed_seq is 50")
def a_segment_beyond_what_was_flushed(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "flushed_seq", 50))


@case("a segment that is not its last is not sealed")
def an_open_segment_in_the_middle(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic.segments[0], "sealed", False))


@case("begins with seq 1; the one before ends with 24")
def segments_that_overlap(folder: Path) -> None:
    rewrite(folder, lambda topic: topic.segments.insert(1, topic.segments[0]))


@case("evict_floor 1 is below what caps and TTL took .7.")
def a_cap_above_the_floor(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "cap_seq", 7))


@case("54 live and 9 gone are more records than the 54 that were ever there")
def more_gone_than_there_was(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "expired_total", 9))


@case("20 of seqs 55 to 74 were in the log alone, and a file of it is missing")
def records_that_no_log_has(folder: Path) -> None:
    rewrite(folder, lambda topic: setattr(topic, "tail", [(55, 74)]))


@case("24 seqs have no record, and only 0 of them can have been deleted or skipped")
def a_segment_that_is_forgotten(folder: Path) -> None:
    rewrite(folder, lambda topic: topic.segments.pop(0))


# --- the rest --------------------------------------------------------------------------------------------


@case("not a file of router rules")
def the_file_of_routers(folder: Path) -> None:
    (folder / "routers").write_bytes(b"rubbish" * 10)


@case("is damaged")
def the_manifest(folder: Path) -> None:
    (folder / "topics.json").write_text("{")


@case("no good frame after frame [0-9]+, but a whole one stood here")
def a_last_frame_that_is_damaged(folder: Path) -> None:
    path = logs(folder)[-1]
    flip(path, frames_of(path)[-1].offset + 60)


@case("counts for nothing .in no snapshot.; the next start removes it")
def a_file_that_nobody_names(folder: Path) -> None:
    shutil.copy(sealed(folder), sealed(folder).with_name(f"{10**9:020d}.data"))


@case("the log ends here; what follows was cut short and never acknowledged")
def a_torn_tail(folder: Path) -> None:
    path = logs(folder)[-1]
    last = frames_of(path)[-1]
    overwrite(path, last.offset + last.length + FRAME_HEADER.size, b"half a frame")


@case("topics were not held against their records")
def so_much_that_nobody_can_read_it(folder: Path) -> None:
    flip(snapshot(folder), 100)


NOTES = {"a_file_that_nobody_names", "a_torn_tail"}


# --- the tests -------------------------------------------------------------------------------------------


def texts(verdict: Verdict, *, notes: bool = True) -> list[str]:
    return [one.text for one in [*verdict.problems, *(verdict.notes if notes else [])]]


def test_a_whole_folder_has_nothing(whole: Path) -> None:
    for deep in (False, True):
        assert texts(proving.verify(str(whole), deep=deep, running=False)) == []


def with_cold(mine: Path, *, marked: bool) -> Path:
    """Its first sealed segment is moved to a cold tier."""
    cold = mine.with_name(f"{mine.name}-cold")
    first = min(mine.glob("topics/*/*.idx")).with_suffix(".data")
    target = cold / first.relative_to(mine)
    target.parent.mkdir(parents=True)
    first.rename(target)
    if marked:
        (cold / "cold.json").write_text('{"id":"c01d"}')
    manifest = decode_manifest((mine / "topics.json").read_bytes(), path="")
    changed = msgspec.structs.replace(manifest, cold=str(cold), cold_id="c01d")
    (mine / "topics.json").write_bytes(encode_manifest(changed))
    return target


@case("this file is missing here and in the cold tier .*-cold, though it counts; restore it")
def missing_in_both_tiers(mine: Path) -> None:
    with_cold(mine, marked=True).unlink()


@case(r"the cold tier .*-cold of this folder is not there .*: mount its disk; 1 segments are in it and were not looked")
def cold_tier_away(mine: Path) -> None:
    with_cold(mine, marked=False).unlink()


@case(r"the cold tier .* is not there .*; no segment is missed")
def cold_tier_away_with_nothing_in_it(mine: Path) -> None:
    cold = with_cold(mine, marked=False)
    cold.rename(mine / cold.relative_to(mine.with_name(f"{mine.name}-cold")))


@pytest.mark.parametrize("name", CASES)
def test_damage_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    says, only_deep, do = CASES[name]
    mine = Path(shutil.copytree(whole, tmp_path / "data"))
    do(mine)
    DAMAGES.add()
    shallow = texts(proving.verify(str(mine), deep=False, running=False))
    verdict = proving.verify(str(mine), deep=True, running=False)
    assert verdict.clean == (name in NOTES)
    found = texts(verdict)
    heard = [text for text in shallow if re.search(says, text)]
    if only_deep:
        assert not heard
        heard = [text for text in found if re.search(says, text)]
    assert heard, f"{says!r} in {shallow} or {found}"


def test_every_sentence_has_a_case(whole: Path, tmp_path: Path) -> None:
    said: set[str] = set()
    for name, (_, _, do) in CASES.items():
        mine = Path(shutil.copytree(whole, tmp_path / name))
        do(mine)
        for deep in (False, True):
            said.update(texts(proving.verify(str(mine), deep=deep, running=False)))
    sentences = [*sentences_of(checking.__file__), *sentences_of(proving.__file__)]
    assert len(sentences) > 40
    never = [sentence for sentence in sentences if not any(re.search(sentence, text) for text in said)]
    assert never == []


UNREACHED = ("can't be read as a whole",)  # a reader's error without a place: none has been found


def sentences_of(file: str) -> list[str]:
    """What a module may say, as patterns: its texts with a space in them, but for docstrings."""
    tree = ast.parse(Path(file).read_text())
    prose = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    parts = {value for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    found: list[tuple[str, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = ".*".join(re.escape(str(value.value)) for value in node.values if isinstance(value, ast.Constant))
            found.append((text, node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose | parts:
            found.append((re.escape(node.value), node))
    return [text for text, _ in found if text.count(r"\ ") >= 2 and re.escape(UNREACHED[0]) != text]
