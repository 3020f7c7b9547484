"""`topics verify`: a whole folder is called whole, every kind of damage is named with its place, and a server that
works meanwhile raises no alarm."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import livefiles
import msgspec
import pytest

from topics.datadir.view.folder import Folder
from topics.storage.format import FILE_HEADER_BYTES
from topics.storage.manifest import Manifest, decode_manifest, encode_manifest
from topics.storage.segment import decode_segment_header, scan_blocks
from topics.storage.snapshot import decode_snapshot, decode_topic, encode_snapshot, encode_topic

from .inspected import SMALL_SEGMENTS, copied, golden, topic_in
from .server import TOPICS, Server, clean_environment, eventually, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden(tmp_path_factory.getbasetemp())


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return copied(whole, tmp_path / "data")


def verify(folder: Path, *options: str) -> Any:
    done = run_topics("verify", "--json", "--data-dir", str(folder), *options)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["clean"] == (done.returncode == 0)
    return found["verdict"]


def problems(folder: Path, *options: str) -> list[tuple[str, int, str]]:
    return [(one["file"], one["offset"], one["text"]) for one in verify(folder, *options)["problems"]]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def first(folder: Path, pattern: str) -> Path:
    """The largest one: it holds something."""
    return max(folder.glob(pattern), key=lambda path: (path.stat().st_size, path.name))


def sealed(folder: Path) -> Path:
    return next(path for path in sorted(folder.glob("topics/*/*.data")) if path.with_suffix(".idx").exists())


def log_with_frames(folder: Path) -> Path:
    return max(folder.glob("wal/*/*.wal"), key=lambda path: len(path.read_bytes().rstrip(b"\0")))


def test_a_whole_folder(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    for options in ([], ["--deep"]):
        found = verify(whole, *options)
        assert found["problems"] == found["notes"] == []
        assert found["topics"] == 4
        assert found["blocks"] > 3
        assert found["frames"] > 0
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before  # it only reads
    done = run_topics("verify", "--data-dir", str(whole))
    assert re.fullmatch(r".*: whole \(\d+ files, .* live records of 4 topics; --deep reads .*\)\n", done.stdout)


def test_a_killed_server_leaves_a_whole_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert problems(golden(tmp_path_factory.getbasetemp(), kind="killed"), "--deep") == []


def test_every_byte_of_a_frame_counts(folder: Path) -> None:
    log = log_with_frames(folder)
    flip(log, FILE_HEADER_BYTES + 70)
    (found,) = [one for one in problems(folder) if one[1]]
    assert found[:2] == (str(log.relative_to(folder)), FILE_HEADER_BYTES)
    assert "no good frame after frame" in found[2]


def test_a_block_is_read_in_depth_alone(folder: Path) -> None:
    segment = sealed(folder)
    flip(segment, FILE_HEADER_BYTES + 300)  # inside the records of its first block
    assert problems(folder) == []
    file = str(segment.relative_to(folder))
    assert (file, FILE_HEADER_BYTES, "no good block: its checksum fails or it is cut short") in problems(
        folder, "--deep"
    )


@pytest.mark.parametrize("options", [[], ["--deep"]])
def test_the_head_of_a_block(folder: Path, options: list[str]) -> None:
    segment = sealed(folder)
    flip(segment, FILE_HEADER_BYTES + 24)  # its first seq
    found = problems(folder, *options)
    assert found[0][:2] == (str(segment.relative_to(folder)), FILE_HEADER_BYTES)
    assert found[0][2].startswith("no good block")


def test_a_delete_flag_of_no_meaning(folder: Path) -> None:
    segment = sealed(folder)
    data = segment.read_bytes()
    salt = decode_segment_header(data, path="").salt
    entry, _ = scan_blocks(data, salt=salt, path="")[0]
    flip(segment, entry.flags_offset + 1)
    for options in ([], ["--deep"]):
        ((file, offset, text),) = problems(folder, *options)
        assert (file, offset) == (str(segment.relative_to(folder)), entry.flags_offset + 1)
        assert text == f"the delete flag of seq {entry.first_seq + 1} is neither set nor clear"


@pytest.mark.parametrize(
    ("pattern", "offset", "says"),
    [
        ("wal/*/*.wal", 20, "header checksum fails"),
        ("wal/*/*.snap", 60, "snapshot checksum fails"),
        ("topics/*/*.idx", 80, "index checksum fails"),
        ("topics/*/*.data", 30, "header checksum fails"),
        ("wal/*/*.wal", 8, "is newer than this program's"),
        ("wal/*/*.snap", 8, "is newer than this program's"),
        ("topics/*/*.idx", 8, "is newer than this program's"),
        ("topics/*/*.data", 8, "is newer than this program's"),
        ("wal/*/*.wal", 0, "not a topics WAL file"),
        ("wal/*/*.snap", 0, "not a topics snapshot"),
        ("topics/*/*.idx", 0, "not a topics segment index"),
        ("topics/*/*.data", 0, "not a topics segment"),
    ],
)
def test_headers_and_checksums(folder: Path, pattern: str, offset: int, says: str) -> None:
    path = first(folder, pattern)
    flip(path, offset)
    found = [one for one in problems(folder) if one[0] == str(path.relative_to(folder))]
    assert len(found) == 1
    assert says in found[0][2]


@pytest.mark.gate
@pytest.mark.parametrize("suffix", [".data", ".idx"])
def test_a_missing_file(folder: Path, suffix: str) -> None:
    path = sealed(folder).with_suffix(suffix)
    path.unlink()
    found = [text for file, _, text in problems(folder) if file == str(path.relative_to(folder))]
    assert len(found) == 1
    assert "is missing" in found[0]


def test_a_segment_that_is_cut_short(folder: Path) -> None:
    path = sealed(folder)
    size = path.stat().st_size
    os.truncate(path, size - 100)
    for options in ([], ["--deep"]):
        assert (str(path.relative_to(folder)), size - 100, "ends here, 100 bytes too early") in problems(
            folder, *options
        )


@pytest.mark.gate
def test_a_log_that_lacks_frames(folder: Path, start_server: Callable[..., Server]) -> None:
    server = start_server(data_dir=folder, TOPICS_SEGMENT_MAX_AGE_MS=3_600_000)  # the record stays in the log
    with server.client() as api:
        api.append("late", "three")
    assert server.stop() == 0
    assert problems(folder) == []
    log = log_with_frames(folder)
    with log.open("r+b") as file:
        file.seek(FILE_HEADER_BYTES)
        file.write(bytes(log.stat().st_size - FILE_HEADER_BYTES))
    assert problems(folder)


@pytest.mark.gate
def test_a_torn_tail_is_a_note(folder: Path) -> None:
    log = log_with_frames(folder)
    end = len(log.read_bytes().rstrip(b"\0"))
    at = (end + 7) & -8
    with log.open("r+b") as file:
        file.seek(at + 8)
        file.write(b"rubbish of a write that a crash cut short")
    found = verify(folder)
    assert found["problems"] == []
    (note,) = found["notes"]
    assert note["file"] == str(log.relative_to(folder))
    assert "never acknowledged" in note["text"]


def test_orphans_are_notes(folder: Path) -> None:
    segment = sealed(folder)
    shutil.copy(segment, segment.with_name(f"{10**9:020d}.data"))
    (folder / "topics" / "0123456789abcdef").mkdir()
    (folder / "topics" / "0123456789abcdef" / f"{1:020d}.data").write_bytes(b"of a topic that was dropped")
    (folder / "wal" / "shard-00" / "00000001-000000000009.snap.tmp").write_bytes(b"half")
    (folder / "topics" / "README").write_text("somebody's")
    found = verify(folder)
    assert found["problems"] == []
    whys = [re.search(r"\((.+?)\)", note["text"])[1] for note in found["notes"]]  # type: ignore[index]
    assert sorted(whys) == ["in no snapshot", "in no snapshot", "never finished", "not a file of topics"]


def rewrite(folder: Path, change: Callable[[Any], Any]) -> Path:
    """Change one topic of a snapshot, with a checksum that holds."""
    for path in sorted(folder.glob("wal/*/*.snap")):
        state = decode_snapshot(path.read_bytes(), path=str(path))
        topics = [decode_topic(raw) for raw in state.topics]
        if any(topic.name == "orders" for topic in topics):
            for topic in topics:
                if topic.name == "orders":
                    change(topic)
            state.topics = [msgspec.Raw(encode_topic(topic)) for topic in topics]
            path.write_bytes(encode_snapshot(state))
            return path
    raise AssertionError("no snapshot with orders")


def set_to(field: str, value: Any) -> Callable[[Any], None]:
    return lambda topic: setattr(topic, field, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_to("name", "orders-of-others"), "does not belong to its name"),
        (set_to("evict_floor", 10**6), "evict_floor 1000000 is outside"),
        (set_to("ceiling", 3), "is above its ceiling 3"),
        (set_to("flushed_seq", 10**6), "flushed_seq 1000000 is above"),
        (set_to("deleted_total", 10**6), "are more records than the"),
        (set_to("cap_seq", 150), "is below what caps and TTL took"),
        (set_to("holes", [(5, 2)]), "a hole from 5 to 2 is outside"),
        (lambda topic: setattr(topic.segments[0], "sealed", False), "is not its last is not sealed"),
        (lambda topic: topic.segments.pop(0), "seqs have no record"),
        (lambda topic: topic.segments.append(topic.segments[0]), "the one before ends with"),
    ],
)
def test_what_a_snapshot_says(folder: Path, change: Callable[[Any], None], says: str) -> None:
    rewrite(folder, change)
    assert any(says in text for _, _, text in problems(folder)), problems(folder)


def test_a_topic_on_the_wrong_shard(folder: Path) -> None:
    snaps = sorted(folder.glob("wal/*/*.snap"))
    states = [decode_snapshot(path.read_bytes(), path=str(path)) for path in snaps]
    moved = next(state for state in states if state.topics)
    other = next(state for state in states if state is not moved)
    other.topics.append(moved.topics[0])
    at = states.index(other)
    snaps[at].write_bytes(encode_snapshot(other))
    found = problems(folder)
    file = str(snaps[at].relative_to(folder))
    assert any(one[0] == file and f"belongs to shard {states.index(moved)}" in one[2] for one in found)
    assert any("is there twice" in text for _, _, text in found)


def test_a_shard_without_its_snapshot(folder: Path) -> None:
    for path in folder.glob("wal/*/*"):
        path.unlink()
    assert any("has no snapshot, so nobody names its" in text for _, _, text in problems(folder))


def test_the_file_of_routers(folder: Path) -> None:
    (folder / "routers").write_bytes(b"TOPICRTR rubbish")
    assert [file for file, _, _ in problems(folder)] == ["routers"]


def test_the_manifest(folder: Path) -> None:
    path = folder / "topics.json"
    known = decode_manifest(path.read_bytes(), path=str(path))
    path.write_bytes(encode_manifest(Manifest(format=9, layout=known.layout, shards=known.shards)))
    ((file, _, text),) = problems(folder)
    assert file == "topics.json"
    assert "format 9" in text
    path.write_text("{")
    assert "damaged" in problems(folder)[0][2]
    path.unlink()
    assert "missing" in problems(folder)[0][2]


def test_no_data_folder_is_a_mistake_of_usage(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        done = run_topics("verify", "--data-dir", str(place))
        assert done.returncode == 2
        assert "is no data folder" in done.stderr
        assert "--data-dir" in done.stderr


def test_beside_a_server_at_work(tmp_path: Path) -> None:
    """Segments, snapshots and log files come and go; none of that is a problem."""
    server = Server(tmp_path / "data", log=tmp_path / "server.log", **SMALL_SEGMENTS)
    over = threading.Event()

    def work() -> None:
        with server.client() as api:
            n = 0
            api.put("capped", cap_records=100)
            while not over.is_set():
                api.append("capped", *[{"n": n, "pad": "x" * 3_000}] * 10)
                api.append_records("kept", [{"data": {"n": n, "pad": "y" * 3_000}, "tag": str(n % 3)}] * 10)
                if n % 10 == 9:
                    api.delete("kept", match=["tag", "Eq", "1"])
                n += 1
                over.wait(0.05)  # files move in quiet moments

    try:
        server.wait_ready()
        worker = threading.Thread(target=work)
        worker.start()
        try:
            eventually(lambda: livefiles.find(server.data_dir, "topics/*/*.idx"), what="a sealed segment")
            for number in range(6):
                found = verify(server.data_dir, *(["--deep"] if number % 2 else []))
                assert found["problems"] == []
        finally:
            over.set()
            worker.join()
        kept = eventually(
            lambda: topic if (topic := topic_in(Folder(str(server.data_dir)), "kept")).segments else None,
            what="a segment in a snapshot",
        )
        name = f"{kept.segments[0].first_seq:020d}.data"
        flip(server.data_dir / "topics" / f"{kept.id:016x}" / name, 30)
        assert any("header checksum fails" in text for _, _, text in problems(server.data_dir))
    finally:
        server.close()


def test_progress_is_for_terminals(whole: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [TOPICS, "verify", "--deep", "--data-dir", whole],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=clean_environment(TERM="xterm", COLUMNS="120"),
        timeout=60,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.returncode == 0
    assert b"verifying" in shown
    assert b"verifying" not in done.stdout
