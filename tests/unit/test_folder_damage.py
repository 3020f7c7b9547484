"""Folders that are none, that are damaged, or that hold more than they should: each is read as it is, or refused with
one sentence that names the file and the place. Never another exception, and never silence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Set
from pathlib import Path

import figures
import msgspec
import pytest
from folderplay import newcomer, stored_records, write_manifest
from model import Record, Shard
from onlooker import contents, shown

from topics import limits
from topics.datadir.fsck.verify import verify
from topics.datadir.log import _boot_id
from topics.datadir.view import folder as folder_module
from topics.datadir.view.folder import Folder
from topics.errors import CorruptData, FormatError, TopicsError
from topics.storage.config import TopicConfig
from topics.storage.format import DELETED, FILE_HEADER_BYTES, FRAME_HEADER, FrameType
from topics.storage.frames import Frame, decode_wal_header, encode_frame, scan
from topics.storage.paths import numbered_name
from topics.storage.routers import Rule, encode_rules
from topics.storage.segment import decode_index, decode_segment_header, scan_blocks
from topics.storage.snapshot import decode_snapshot, encode_snapshot

NOW_MS = 1_700_000_100_000
FLIPPED = 0x40


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 8)
    monkeypatch.setattr(folder_module, "_PAUSE_S", 0.0)


def records(count: int, size: int = 0) -> list[Record]:
    return [
        Record(b'{"n":%d,"p":"%b"}' % (number, b"x" * size), tag=f"t{number % 3}", node="n", meta=b'{"m":1}')
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard that was killed: sealed and open segments with delete flags, a snapshot, several log files before and
    behind it, frames of all types."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
        patch.setattr(limits, "BLOCK_RECORDS", 8)
        folder = tmp_path_factory.mktemp("whole")
        shard = Shard(folder, wal_file_bytes=6_000, segment_max_events=20)
        shard.restart(boot=_boot_id())  # as if this machine had written it
        shard.put("t", TopicConfig())
        shard.put("u", TopicConfig(cap_records=30))
        shard.put("gone", TopicConfig())
        for _ in range(9):
            shard.append("t", records(6))
            shard.append("u", records(6))
        shard.delete("t", tag="t1")
        shard.flush("t")
        shard.flush("u")
        shard.drop("gone")
        shard.checkpoint()
        for _ in range(4):
            shard.append("u", records(3, size=400))
        shard.append("t", records(4))
        shard.delete("t", before_seq=5)
        shard.checkpoint()
        shard.sync()
        for _ in range(4):
            shard.append("u", records(3, size=400))
        shard.put("t", TopicConfig(ttl_ms=3_600_000))
        shard.put("v", TopicConfig(durability="ephemeral"))
        shard.append("v", records(1))
        shard.sync()
        shard.append("t", records(2))
        shard.append("t", records(2))
        shard.crash()
        write_manifest(folder)
        rule = Rule("r", "t", "u", shard.topic("t").id, shard.topic("u").id, 0, 0)
        (folder / "routers").write_bytes(encode_rules([rule]))
    return folder


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


def read(folder: Path) -> dict[str, object]:
    """All that can be seen, to the last record."""
    found = Folder(str(folder), now_ms=NOW_MS)
    everything = shown(found)
    everything["records"] = {topic.name: stored_records(found, topic) for topic in found.topics}
    # Whoever has looked before and looks again is told the same.
    found.look(now_ms=NOW_MS)
    return everything


def wals(folder: Path) -> list[Path]:
    """Those with frames, oldest first."""
    return [path for path in sorted((folder / "wal" / "shard-00").glob("*.wal")) if frames_of(path)]


def frames_of(path: Path) -> list[Frame]:
    data = path.read_bytes()
    return list(scan(data, salt=decode_wal_header(data[:FILE_HEADER_BYTES], path=path.name).salt))


def snapshot(folder: Path) -> Path:
    (path,) = (folder / "wal" / "shard-00").glob("*.snap")
    return path


def sealed(folder: Path) -> Path:
    return sorted(folder.glob("topics/*/*.idx"))[0].with_suffix(".data")


def unsealed(folder: Path) -> Path:
    return next(path for path in sorted(folder.glob("topics/*/*.data")) if not path.with_suffix(".idx").exists())


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, mask: int = FLIPPED) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ mask]))


def refused(folder: Path) -> TopicsError:
    """What reading it ends with. Nothing may have been touched."""
    figures.DAMAGES.add()
    before = contents(folder)
    with pytest.raises(TopicsError) as caught:
        read(folder)
    assert contents(folder) == before
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_folder_itself_is_good_and_has_everything(whole: Path) -> None:
    found = read(whole)
    topics = found["topics"]
    assert isinstance(topics, dict)
    assert set(topics) == {"t", "u", "v"}
    states = [segment for topic in topics.values() for segment in topic["segments"]]
    assert {sealed for _, _, _, sealed, _ in states} == {True, False}
    assert any(flagged for *_, flagged in states)
    assert topics["t"]["deleted_total"] > 4
    assert topics["u"]["evicted_total"] > 0
    folder = Folder(str(whole), now_ms=NOW_MS)
    (shard,) = folder.shards
    assert len(wals(whole)) > 2
    assert shard.wals[0].first_lsn <= shard.covered < shard.wals[-1].last_lsn
    assert [rule.router for rule in folder.rules] == ["r"]
    assert not shard.torn


# --- no folder ---------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"nowhere.*does not exist.*TOPICS_DATA_DIR"):
        Folder(str(tmp_path / "nowhere"))


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no data folder.*topics\.json is missing"):
        Folder(str(tmp_path))


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(FormatError, match="is no folder"):
        Folder(str(tmp_path / "file"))


def test_a_folder_that_was_never_written_to(tmp_path: Path) -> None:
    write_manifest(tmp_path)
    assert Folder(str(tmp_path)).topics == []


def test_a_manifest_that_is_missing(mine: Path) -> None:
    (mine / "topics.json").unlink()
    error = refused(mine)
    assert isinstance(error, FormatError)
    assert "topics.json is missing" in str(error)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ('{"format":2,"layout":1,"shards":1}', FormatError, "format 2"),
        ('{"format":1,"layout":1', CorruptData, "damaged"),
        ("", CorruptData, "damaged"),
        ("\0\0\0", CorruptData, "damaged"),
        ('{"format":1,"layout":0,"shards":1}', CorruptData, "damaged"),
        ('{"format":1,"layout":1,"shards":"1"}', CorruptData, "damaged"),
        ('{"layout":1,"shards":1}', CorruptData, "damaged"),
    ],
)
def test_a_manifest_that_can_not_be_used(mine: Path, text: str, kind: type[TopicsError], says: str) -> None:
    (mine / "topics.json").write_text(text)
    error = refused(mine)
    assert type(error) is kind
    assert says in str(error)
    assert str(mine / "topics.json") in str(error)


def test_a_manifest_that_is_no_file(mine: Path) -> None:
    (mine / "topics.json").unlink()
    (mine / "topics.json").mkdir()
    assert "topics.json" in str(refused(mine))


# --- what is not ours is passed over -----------------------------------------------------------------


def test_files_that_do_not_count(mine: Path) -> None:
    before = read(mine)
    log = mine / "wal" / "shard-00"
    for name in (numbered_name(2, 1, "wal"), numbered_name(7, 99, "snap"), "x.wal", "00000001-000000000001.snap.tmp"):
        (log / name).write_bytes(b"rubbish")
    (mine / "wal" / "shard-01").mkdir()
    (mine / "wal" / "shard-01" / numbered_name(1, 1, "wal")).write_bytes(b"rubbish")
    home = sealed(mine).parent
    (home / "00000000000000099999.data").write_bytes(b"rubbish")
    (home / "00000000000000000001.idx.tmp").write_bytes(b"rubbish")
    (mine / "topics" / "notes").mkdir()
    (mine / "topics" / "0123456789abcdef").mkdir()
    (mine / "LOCK").write_text("{}")
    assert read(mine) == before


def test_what_stands_behind_the_bytes_that_count(mine: Path) -> None:
    """A flush that was not finished."""
    before = read(mine)
    path = unsealed(mine)
    path.write_bytes(path.read_bytes() + b"half a block")
    assert read(mine) == before


def test_a_log_file_that_never_got_its_header(mine: Path) -> None:
    before = read(mine)
    path = mine / "wal" / "shard-00" / numbered_name(1, 0xFF, "wal")
    for content in (b"", bytes(10), bytes(5_000)):
        path.write_bytes(content)
        assert read(mine) == before


# --- damage ------------------------------------------------------------------------------------------

# what happened -> do it to a folder; returns what the message must name
DAMAGES: dict[str, Callable[[Path], list[str]]] = {}


def damage(function: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    DAMAGES[function.__name__] = function
    return function


@damage
def segment_missing(folder: Path) -> list[str]:
    path = sealed(folder)
    path.unlink()
    return [path.name, "missing"]


@damage
def open_segment_missing(folder: Path) -> list[str]:
    path = unsealed(folder)
    path.unlink()
    return [path.name, "missing"]


@damage
def index_missing(folder: Path) -> list[str]:
    path = sealed(folder).with_suffix(".idx")
    path.unlink()
    return [path.name, "missing"]


@damage
def topic_folder_missing(folder: Path) -> list[str]:
    home = sealed(folder).parent
    shutil.rmtree(home)
    return [home.name, "missing"]


@damage
def segment_is_a_folder(folder: Path) -> list[str]:
    path = sealed(folder)
    path.unlink()
    path.mkdir()
    return [path.name]


@damage
def sealed_segment_cut_short(folder: Path) -> list[str]:
    path = sealed(folder)
    os.truncate(path, path.stat().st_size - 1)
    return [path.name, f"offset {path.stat().st_size}"]


@damage
def open_segment_cut_short(folder: Path) -> list[str]:
    path = unsealed(folder)
    os.truncate(path, path.stat().st_size - 9)
    return [path.name, f"offset {path.stat().st_size}"]


@damage
def segment_cut_to_nothing(folder: Path) -> list[str]:
    os.truncate(sealed(folder), 0)
    return [sealed(folder).name]


@damage
def segment_header_damaged(folder: Path) -> list[str]:
    flip(sealed(folder), 20)
    return [sealed(folder).name, "header"]


@damage
def segment_newer(folder: Path) -> list[str]:
    overwrite(sealed(folder), 8, b"\x02")
    return [sealed(folder).name, "newer", "upgrade"]


@damage
def segment_of_somebody_else(folder: Path) -> list[str]:
    path = sealed(folder)
    path.write_bytes(b"hello world, this is no segment of ours at all".ljust(path.stat().st_size))
    return [path.name, "not a topics segment"]


@damage
def segments_exchanged(folder: Path) -> list[str]:
    first, second, *_ = sorted(folder.glob("topics/*/*.data"))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other.ljust(len(one), b"\0"))
    second.write_bytes(one.ljust(len(other), b"\0"))
    return [first.name, "another"]


@damage
def block_of_a_sealed_segment(folder: Path) -> list[str]:
    path = sealed(folder)
    offset = blocks_of(path)[1][0]
    flip(path, offset + FRAME_HEADER.size + 20)
    return [path.name, f"offset {offset}"]


@damage
def block_of_an_open_segment(folder: Path) -> list[str]:
    path = unsealed(folder)
    offset = blocks_of(path)[0][0]
    flip(path, offset + FRAME_HEADER.size + 20)
    return [path.name, f"offset {offset}"]


@damage
def index_damaged(folder: Path) -> list[str]:
    path = sealed(folder).with_suffix(".idx")
    flip(path, 70)
    return [path.name, "checksum"]


@damage
def index_newer(folder: Path) -> list[str]:
    path = sealed(folder).with_suffix(".idx")
    overwrite(path, 8, b"\x02")
    return [path.name, "newer"]


@damage
def index_cut_short(folder: Path) -> list[str]:
    path = sealed(folder).with_suffix(".idx")
    os.truncate(path, 80)
    return [path.name, "cut short"]


@damage
def index_of_another_segment(folder: Path) -> list[str]:
    first, second, *_ = sorted(folder.glob("topics/*/*.idx"))
    shutil.copy(second, first)
    return [first.name, "another"]


@damage
def snapshot_damaged(folder: Path) -> list[str]:
    path = snapshot(folder)
    flip(path, path.stat().st_size // 2)
    return [path.name, "checksum"]


@damage
def snapshot_cut_short(folder: Path) -> list[str]:
    path = snapshot(folder)
    os.truncate(path, path.stat().st_size - 1)
    return [path.name, "checksum"]


@damage
def snapshot_empty(folder: Path) -> list[str]:
    os.truncate(snapshot(folder), 0)
    return [snapshot(folder).name]


@damage
def snapshot_newer(folder: Path) -> list[str]:
    overwrite(snapshot(folder), 8, b"\x02")
    return [snapshot(folder).name, "newer"]


@damage
def snapshot_that_nobody_can_read(folder: Path) -> list[str]:
    """Its checksum holds: a program of the future wrote it, and forgot to say so."""
    path = snapshot(folder)
    state = decode_snapshot(path.read_bytes(), path=path.name)
    topics = [msgspec.Raw(msgspec.msgpack.encode(["not", "a", "topic"]))]
    path.write_bytes(encode_snapshot(msgspec.structs.replace(state, topics=topics)))
    return [path.name, "nobody can read"]


@damage
def snapshot_of_another_shard(folder: Path) -> list[str]:
    path = snapshot(folder)
    state = decode_snapshot(path.read_bytes(), path=path.name)
    path.write_bytes(encode_snapshot(msgspec.structs.replace(state, shard=3)))
    return [path.name, "shard 3"]


@damage
def snapshot_missing(folder: Path) -> list[str]:
    snapshot(folder).unlink()
    return ["wal/shard-00", "missing", f"frame {frames_of(wals(folder)[0])[0].lsn}"]


@damage
def snapshot_is_a_folder(folder: Path) -> list[str]:
    path = snapshot(folder)
    path.unlink()
    path.mkdir()
    return [path.name]


@damage
def log_header_damaged(folder: Path) -> list[str]:
    path = wals(folder)[0]
    flip(path, 30)
    return [path.name, "header"]


@damage
def log_header_newer(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    overwrite(path, 8, b"\x02")
    return [path.name, "newer"]


@damage
def first_log_header_zeroed(folder: Path) -> list[str]:
    path = wals(folder)[0]
    overwrite(path, 0, bytes(FILE_HEADER_BYTES))
    return [path.name, "header"]


@damage
def last_log_header_zeroed(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    for later in path.parent.glob("*.wal"):
        if later > path:
            later.unlink()
    overwrite(path, 0, bytes(FILE_HEADER_BYTES))
    return [path.name, "header"]


@damage
def log_cut_within_its_header(folder: Path) -> list[str]:
    path = wals(folder)[0]
    os.truncate(path, 30)
    return [path.name]


@damage
def frame_in_the_middle_damaged(folder: Path) -> list[str]:
    path = wals(folder)[0]
    frame = frames_of(path)[2]
    flip(path, frame.offset + frame.length // 2)
    return [path.name, f"offset {frame.offset}"]


@damage
def first_frame_damaged(folder: Path) -> list[str]:
    path = wals(folder)[0]
    flip(path, FILE_HEADER_BYTES + 5)
    return [path.name, f"offset {FILE_HEADER_BYTES}"]


@damage
def last_frame_of_a_file_damaged(folder: Path) -> list[str]:
    """The log goes on in the next file."""
    path = wals(folder)[-2]
    frame = frames_of(path)[-1]
    flip(path, frame.offset + frame.length // 2)
    return [path.name, f"offset {frame.offset}"]


@damage
def many_frames_zeroed(folder: Path) -> list[str]:
    """As a disk does that lost a sector: nothing but zeros, and good frames far behind."""
    path = wals(folder)[-1]
    last = frames_of(path)[-1]
    size = path.stat().st_size
    salt = decode_wal_header(path.read_bytes()[:FILE_HEADER_BYTES], path=path.name).salt
    moved = encode_frame(
        salt=salt, type=FrameType.HEAD, topic_id=1, ts=1, lsn=last.lsn + 1, synced=last.synced, body=b"\x91\x01"
    )
    os.truncate(path, max(size, 3 << 20))
    overwrite(path, (2 << 20) + 8, moved)
    overwrite(path, last.offset, bytes(last.length))
    return [path.name, f"offset {last.offset}"]


@damage
def log_file_in_the_middle_missing(folder: Path) -> list[str]:
    *_, before, middle, _ = wals(folder)
    middle.unlink()
    return ["missing", f"frame {frames_of(before)[-1].lsn}"]


@damage
def log_file_of_the_snapshot_missing(folder: Path) -> list[str]:
    """Everything behind it too: only the snapshot knows that there was more."""
    path = snapshot(folder)
    number = decode_snapshot(path.read_bytes(), path=path.name).file_no
    for wal in sorted(path.parent.glob("*.wal")):
        if int(wal.name[9:21], 16) >= number:
            wal.unlink()
    return ["wal/shard-00", f"{number:012x}", "missing"]


@damage
def log_file_of_the_snapshot_zeroed(folder: Path) -> list[str]:
    """It looks like one that never got its header, but it had one."""
    path = snapshot(folder)
    number = decode_snapshot(path.read_bytes(), path=path.name).file_no
    for wal in sorted(path.parent.glob("*.wal")):
        if int(wal.name[9:21], 16) > number:
            wal.unlink()
    wal = path.with_name(numbered_name(1, number, "wal"))
    overwrite(wal, 0, bytes(wal.stat().st_size))
    return [wal.name, "header"]


@damage
def all_log_files_missing(folder: Path) -> list[str]:
    for wal in (folder / "wal" / "shard-00").glob("*.wal"):
        wal.unlink()
    return ["wal", "missing"]


@damage
def log_torn_below_the_snapshot(folder: Path) -> list[str]:
    """No good frame follows, so it looks like a torn write; but the snapshot knows of later frames."""
    path = snapshot(folder)
    state = decode_snapshot(path.read_bytes(), path=path.name)
    for wal in wals(folder):
        found = [frame for frame in frames_of(wal) if frame.lsn == state.lsn]
        if found:
            overwrite(wal, found[0].offset, bytes(wal.stat().st_size - found[0].offset))
            for later in path.parent.glob("*.wal"):
                if later > wal:
                    overwrite(later, FILE_HEADER_BYTES, bytes(later.stat().st_size - FILE_HEADER_BYTES))
            return [f"offset {found[0].offset}", f"frame {state.lsn}"]
    raise AssertionError("no such frame")


@damage
def log_file_under_another_name(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    to = path.with_name(numbered_name(1, 0x77, "wal"))
    path.rename(to)
    return [to.name, "another name"]


@damage
def log_file_is_a_folder(folder: Path) -> list[str]:
    path = folder / "wal" / "shard-00" / numbered_name(1, 0x77, "wal")
    path.mkdir()
    return [path.name]


@damage
def unknown_frame_type(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    return [path.name, f"offset {append_frame(path, FrameType.BLOCK + 1)}", "17", "upgrade"]


@damage
def block_in_the_log(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    return [path.name, f"offset {append_frame(path, FrameType.BLOCK)}"]


@damage
def topic_frame_that_nobody_can_read(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    return [path.name, f"offset {append_frame(path, FrameType.TOPIC, body=b'rubbish')}"]


@damage
def batch_without_columns(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    frame = next(frame for frame in frames_of(path) if frame.type == FrameType.APPEND)
    offset = append_frame(path, FrameType.APPEND, body=b"ab", topic_id=frame.topic_id, first_seq=9_999, count=1)
    return [path.name, f"offset {offset}"]


@damage
def batch_with_columns_beyond_its_end(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    frame = next(frame for frame in frames_of(path) if frame.type == FrameType.APPEND)
    body = (99).to_bytes(4, "little") * 4 + b"ab"
    offset = append_frame(path, FrameType.APPEND, body=body, topic_id=frame.topic_id, first_seq=9_999, count=1)
    return [path.name, f"offset {offset}"]


@damage
def seqs_that_stand_twice(folder: Path) -> list[str]:
    path = wals(folder)[-1]
    frame = [frame for frame in frames_of(path) if frame.type == FrameType.APPEND][-1]
    offset = append_frame(
        path, FrameType.APPEND, body=frame.body, topic_id=frame.topic_id, first_seq=frame.first_seq, count=frame.count
    )
    return [path.name, f"offset {offset}", "twice"]


@damage
def shard_folder_missing(folder: Path) -> list[str]:
    shutil.rmtree(folder / "wal" / "shard-00")
    return ["wal/shard-00", "backup"]


@damage
def rules_damaged(folder: Path) -> list[str]:
    flip(folder / "routers", 40)
    return ["routers", "checksum"]


@damage
def rules_newer(folder: Path) -> list[str]:
    overwrite(folder / "routers", 8, b"\x02")
    return ["routers", "newer"]


@damage
def rules_are_a_folder(folder: Path) -> list[str]:
    (folder / "routers").unlink()
    (folder / "routers").mkdir()
    return ["routers"]


def append_frame(path: Path, kind: int, **fields: object) -> int:
    """A good frame behind the last one; returns where."""
    last = frames_of(path)[-1]
    salt = decode_wal_header(path.read_bytes()[:FILE_HEADER_BYTES], path=path.name).salt
    values = {"topic_id": 1, "ts": last.ts, "lsn": last.lsn + 1, "synced": last.synced, **fields}
    overwrite(path, last.offset + last.length, encode_frame(salt=salt, type=kind, **values))  # type: ignore[arg-type]
    return last.offset + last.length


def blocks_of(path: Path) -> list[tuple[int, int]]:
    """(offset, where the next one begins) of each block."""
    data = path.read_bytes()
    header = decode_segment_header(data[:FILE_HEADER_BYTES], path=path.name)
    return [(entry.offset, entry.end) for entry, _ in scan_blocks(data, salt=header.salt, path=path.name)]


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_told_with_its_place(mine: Path, what: str) -> None:
    names = DAMAGES[what](mine)
    error = str(refused(mine))
    for name in names:
        assert name in error, f"{name!r} is not in {error!r}"


@pytest.mark.parametrize("what", DAMAGES)
def test_who_has_seen_it_whole_is_told_or_knows_better(mine: Path, what: str) -> None:
    """A folder that was looked at before the damage: the same refusal, or what was there, never anything else. And
    when the damage is mended everything is there again."""
    folder = Folder(str(mine), now_ms=NOW_MS)
    good = shown(folder)
    kept = mine.parent / "kept"
    shutil.copytree(mine, kept)
    DAMAGES[what](mine)
    figures.DAMAGES.add()
    for _ in range(2):  # it does not get used to it, either
        try:
            folder.look(now_ms=NOW_MS)
        except TopicsError:
            continue
        assert shown(folder)["topics"] == good["topics"]
    shutil.rmtree(mine)
    shutil.copytree(kept, mine)
    folder.look(now_ms=NOW_MS)
    assert shown(folder) == good


def test_a_log_file_that_goes_goes_for_everybody(mine: Path) -> None:
    """The oldest one, all of whose frames the snapshot covers: it might have been of no use any more, so a newcomer
    can't tell that it is missing. Who has read it before does not go on with batches that nobody can read."""
    folder = Folder(str(mine), now_ms=NOW_MS)
    gone = wals(mine)[0]
    assert any(batch.file.endswith(gone.name) for topic in folder.topics for batch in topic.batches)
    gone.unlink()
    folder.look(now_ms=NOW_MS)
    assert shown(folder) == shown(Folder(str(mine), now_ms=NOW_MS))
    assert not any(batch.file.endswith(gone.name) for topic in folder.topics for batch in topic.batches)


# --- the end of the log ------------------------------------------------------------------------------


def test_a_torn_tail_is_no_damage(mine: Path) -> None:
    path = wals(mine)[-1]
    *_, before, last = frames_of(path)
    whole = path.read_bytes()
    for length in range(1, last.length):
        path.write_bytes(whole[: last.offset + length] + bytes(len(whole) - last.offset - length))
        folder = Folder(str(mine), now_ms=NOW_MS)
        (shard,) = folder.shards
        (topic,) = (topic for topic in folder.topics if topic.id == last.topic_id)
        assert topic.head_seq == before.last_seq
        torn = [(str(path.relative_to(mine)), last.offset)]
        assert shard.torn == (torn if any(whole[last.offset : last.offset + length]) else [])
        # The server goes on: the frame is whole after all.
        path.write_bytes(whole)
        folder.look(now_ms=NOW_MS)
        assert folder.shards[0].torn == []
        assert shown(folder) == shown(Folder(str(mine), now_ms=NOW_MS))


def test_the_tail_that_a_power_cut_left_is_no_damage(whole: Path, tmp_path: Path) -> None:
    """Pages of what was never synced arrive in any order: here the frame before the last is missing. A file of another
    boot of the machine, or of another machine, may look so; one of this boot may not."""
    mine = Path(shutil.copytree(whole, tmp_path / "data"))
    path = wals(mine)[-1]
    *_, before, last = frames_of(path)
    assert before.lsn > last.synced, "it was not synced yet when the last one was written"
    overwrite(path, before.offset, bytes(before.length))
    assert f"offset {before.offset}" in str(refused(mine))
    another_boot(path)
    folder = Folder(str(mine), now_ms=NOW_MS)
    (topic,) = (topic for topic in folder.topics if topic.id == last.topic_id)
    assert topic.head_seq == before.first_seq - 1
    assert folder.shards[0].torn == [(str(path.relative_to(mine)), before.offset)]


@pytest.mark.parametrize("which", [0, 1])
def test_a_power_cut_does_not_excuse_what_was_synced(mine: Path, which: int) -> None:
    path = wals(mine)[0]
    frame = frames_of(path)[which]
    for each in wals(mine):
        another_boot(each)
    flip(path, frame.offset + 60)
    assert f"offset {frame.offset}" in str(refused(mine))


def test_frames_of_one_round_do_not_excuse_each_other(tmp_path: Path) -> None:
    """They were written before it was synced; what came after it says that it was."""
    shard = Shard(tmp_path, wal_file_bytes=4_000)
    write_manifest(tmp_path)
    shard.put("t", TopicConfig(durability="fsync"))
    for _ in range(4):
        shard.send_append("t", records(1))
    shard.settle()
    shard.append("t", records(1))
    shard.append("t", records(1))
    (path,) = wals(tmp_path)
    *_, first, second, _, _, fifth, sixth = frames_of(path)
    assert second.synced < first.lsn < sixth.synced
    shard.crash()
    flip(path, first.offset + 60)
    assert f"offset {first.offset}" in str(refused(tmp_path))
    problems = verify(str(tmp_path), deep=False, running=False).problems
    assert [(one.file, one.offset) for one in problems] == [(str(path.relative_to(tmp_path)), first.offset)]
    # Nobody saw it synced, but no power cut leaves a frame that lacks a bit ...
    overwrite(path, fifth.offset, bytes(fifth.length + sixth.length))
    assert f"offset {first.offset}" in str(refused(tmp_path))
    # ... and it may leave one that lacks a part.
    overwrite(path, first.offset, bytes(64))
    assert newcomer(shard).shards[0].torn == [(str(path.relative_to(tmp_path)), first.offset)]
    assert verify(str(tmp_path), deep=False, running=False).clean


def test_the_first_frame_behind_a_snapshot_may_go_with_the_power(tmp_path: Path) -> None:
    """The snapshot was made when its log file was still empty; the server cuts this off."""
    shard = Shard(tmp_path, segment_max_events=10)
    write_manifest(tmp_path)
    shard.append("t", records(20))
    shard.stop()
    shard.open()
    shard.flush("t")
    shard.checkpoint()
    for _ in range(2):
        shard.append("t", records(1))
    (path,) = wals(tmp_path)
    first, _ = frames_of(path)
    shard.crash()
    overwrite(path, first.offset, bytes(first.length))
    folder = newcomer(shard)
    assert folder.shards[0].torn == [(str(path.relative_to(tmp_path)), first.offset)]
    assert folder.topics[0].head_seq == 20


def test_an_unsynced_tail_over_two_files(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "data", wal_file_bytes=4_000)
    write_manifest(tmp_path / "data")
    shard.append("t", records(1))
    shard.sync()
    while len(shard.engine.wal.files) < 3:
        shard.append("t", records(1, size=500))
    first, *_ = wals(tmp_path / "data")
    last = frames_of(first)[-1]
    shard.crash()
    overwrite(first, last.offset, bytes(last.length))
    folder = newcomer(shard)
    assert folder.topics[0].head_seq == last.first_seq - 1
    assert folder.shards[0].torn[-1][0].endswith(".wal")
    # The server cuts it off and goes on with other numbers.
    shard.open(boot=bytes(16))
    shard.append("t", records(2))
    folder.look(now_ms=NOW_MS)
    assert shown(folder) == shown(Folder(str(tmp_path / "data"), now_ms=NOW_MS))
    assert folder.topics[0].head_seq == shard.report("t").head_seq


def another_boot(path: Path) -> None:
    header = decode_wal_header(path.read_bytes()[:FILE_HEADER_BYTES], path=path.name)
    overwrite(path, 0, msgspec.structs.replace(header, boot_id=bytes(16)).encode())


# --- every byte --------------------------------------------------------------------------------------


def flags_of(path: Path) -> set[int]:
    """Offsets of the delete flags: the only bytes without a checksum."""
    data = path.read_bytes()
    header = decode_segment_header(data[:FILE_HEADER_BYTES], path=path.name)
    entries = [entry for entry, _ in scan_blocks(data, salt=header.salt, path=path.name)]
    return {entry.flags_offset + index for entry in entries for index in range(entry.count)}


def padding_of(path: Path) -> set[int]:
    data = path.read_bytes()
    header = decode_segment_header(data[:FILE_HEADER_BYTES], path=path.name)
    entries = [entry for entry, _ in scan_blocks(data, salt=header.salt, path=path.name)]
    return {at for entry in entries for at in range(entry.flags_offset + entry.count, entry.end)}


def every_flip(folder: Path, path: Path, until: int, *, step: int = 1, without: Set[int] = frozenset()) -> set[int]:
    """Damage one byte after the other; returns where nobody noticed, and nothing that can be seen changed."""
    good = read(folder)
    unnoticed = set()
    for at in sorted({*range(0, until, step)} - without):
        flip(path, at)
        outcome = outcome_of(folder)
        if isinstance(outcome, str):
            assert path.name in outcome, f"byte {at}: {outcome}"
        else:
            assert outcome == good, f"byte {at} of {path.name} went unnoticed"
            unnoticed.add(at)
        flip(path, at)
    return unnoticed


def outcome_of(folder: Path) -> dict[str, object] | str:
    """What can be seen, or the refusal."""
    figures.DAMAGES.add()
    try:
        return read(folder)
    except TopicsError as error:
        return str(error)


@pytest.mark.parametrize("which", [sealed, unsealed])
def test_every_byte_of_a_segment(mine: Path, which: Callable[[Path], Path]) -> None:
    path = which(mine)
    deleted = {at for at in flags_of(path) if path.read_bytes()[at] == DELETED}
    assert deleted
    for at in deleted:
        overwrite(path, at, b"\0")  # a flag that is set and loses a bit is a record that is back: nobody could tell
    unnoticed = every_flip(mine, path, path.stat().st_size)
    assert unnoticed == flags_of(path) | padding_of(path)


def test_every_byte_of_an_index(mine: Path) -> None:
    path = sealed(mine).with_suffix(".idx")
    pages = decode_index(path.read_bytes(), path=path.name).pages_offset
    assert every_flip(mine, path, path.stat().st_size) == set(range(pages, path.stat().st_size)), "tags are not read"


def test_every_byte_of_a_snapshot(mine: Path) -> None:
    path = snapshot(mine)
    assert every_flip(mine, path, path.stat().st_size) == set(range(12, 16)), "the reserved word"


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.full), 13])
def test_every_byte_of_the_log(mine: Path, step: int) -> None:
    """Every thirteenth in `make test`: frame headers are longer, so each is hit in another place."""
    first = wals(mine)[0]
    *_, last = frames_of(first)
    assert every_flip(mine, first, last.offset + last.length, step=3 * step) == set()
    path = wals(mine)[-1]
    *_, last = frames_of(path)
    end = last.offset + last.length
    untold = {end - 1} if path.read_bytes()[end - 1] == FLIPPED else set()  # as if the last byte had not been written
    assert every_flip(mine, path, end, step=step, without=untold) == set()
    # After a restart of the machine it may be what a power cut left, if it is more than a bit.
    another_boot(path)
    for at in range(last.offset, end, step):
        flip(path, at)
        if at not in untold:
            assert f"offset {last.offset}" in str(refused(mine)), f"byte {at}"
        flip(path, at, 0xFF)
        figures.DAMAGES.add()
        (shard,) = Folder(str(mine), now_ms=NOW_MS).shards
        assert shard.torn == [(str(path.relative_to(mine)), last.offset)], f"byte {at}"
        flip(path, at, 0xFF)
        flip(path, at)


def test_every_byte_of_the_rules(mine: Path) -> None:
    path = mine / "routers"
    assert every_flip(mine, path, path.stat().st_size) == set(range(12, 16))


@pytest.mark.parametrize("step", [pytest.param(7, marks=pytest.mark.full), 61])
@pytest.mark.parametrize("kind", ["data", "idx", "snap", "wal"])
def test_cut_at_every_length(mine: Path, kind: str, step: int) -> None:
    """Only the log may be shorter, where the snapshot does not say otherwise: then its last frames never were."""
    path = {
        "data": sealed(mine),
        "idx": sealed(mine).with_suffix(".idx"),
        "snap": snapshot(mine),
        "wal": wals(mine)[-1],
    }[kind]
    whole = path.read_bytes()
    good = read(mine)
    if kind == "wal":
        *_, last = frames_of(path)
        whole_end = last.offset + last.length
    elif kind == "idx":
        whole_end = decode_index(whole, path=path.name).pages_offset
    else:
        whole_end = len(whole)
    for length in range(0, len(whole), step):
        path.write_bytes(whole[:length])
        found = outcome_of(mine)
        if isinstance(found, str):
            assert path.name in found
            assert length < whole_end
            continue
        assert length >= whole_end or kind == "wal", f"{length} bytes of {len(whole)} went unnoticed"
        if length >= whole_end:
            assert found == good
        else:
            assert isinstance(found["topics"], dict)
            heads = {name: topic["head_seq"] for name, topic in found["topics"].items()}
            assert all(heads[name] <= topic["head_seq"] for name, topic in good["topics"].items() if name in heads)  # type: ignore[attr-defined]


def test_a_log_that_holds_everything_needs_no_snapshot(tmp_path: Path) -> None:
    """Before the first log file goes a snapshot is only a shortcut."""
    shard = Shard(tmp_path, wal_file_bytes=1 << 20, segment_max_events=20)
    write_manifest(tmp_path)
    for _ in range(5):
        shard.append("t", records(9))
    shard.delete("t", tag="t1")
    shard.flush("t")
    shard.checkpoint()
    shard.append("t", records(2))
    expected = shard.everything("t")
    shard.crash()
    folder = newcomer(shard)
    assert stored_records(folder, folder.topics[0]) == expected
    snapshot(tmp_path).unlink()
    folder = newcomer(shard)
    assert stored_records(folder, folder.topics[0]) == expected
