"""`topics repair` on folders of a real server: for each kind of damage the plan writes nothing, the copy is whole, the
source untouched, and a real server serves everything but what is named as lost, for which readers get tombstones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from onlooker import contents, live_records

from topics.datadir.fsck.verify import verify
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import Frame, decode_wal_header, scan
from topics.storage.segment import decode_segment_header, scan_blocks

from .inspected import copied, golden, topic_in
from .server import Server, eventually, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]

Damage = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden(tmp_path_factory.getbasetemp(), kind="killed")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return copied(whole, tmp_path / "data")


def repair(folder: Path, *options: str, code: int = 0, **environ: Any) -> Any:
    done = run_topics("repair", "--json", "--data-dir", str(folder), *options, **environ)
    assert done.returncode == code, done.stderr + done.stdout
    assert not done.stderr
    return json.loads(done.stdout)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def sealed(whole: Path, number: int = 0) -> Path:
    """A sealed segment of `orders`, below the folder."""
    topic = topic_in(Folder(str(whole)), "orders")
    firsts = [segment.first_seq for segment in topic.segments if segment.sealed]
    return Path("topics", f"{topic.id:016x}", f"{firsts[number]:020d}.data")


def log_of(whole: Path, name: str) -> tuple[Path, list[Frame]]:
    """The log file with the first batch of a topic that is still in the log, below the folder; and its frames."""
    topic = topic_in(Folder(str(whole)), name)
    for path in sorted(whole.glob("wal/*/*.wal")):
        data = path.read_bytes()
        if any(data[:FILE_HEADER_BYTES]):
            frames = list(scan(data, salt=decode_wal_header(data[:64], path=path.name).salt))
            if any(frame.topic_id == topic.id and frame.type == FrameType.APPEND for frame in frames):
                return path.relative_to(whole), frames
    raise AssertionError(f"{name} is in no log")


# --- kinds of damage: done to a copy, planned on the folder that is whole -----------------------------


def an_index_is_lost(whole: Path, mine: Path) -> None:
    (mine / sealed(whole, 0)).with_suffix(".idx").unlink()


def an_index_is_damaged(whole: Path, mine: Path) -> None:
    flip((mine / sealed(whole, 1)).with_suffix(".idx"), 90)


def a_block_is_damaged(whole: Path, mine: Path) -> None:
    path = mine / sealed(whole, 2)
    data = path.read_bytes()
    entry, _ = scan_blocks(data, salt=decode_segment_header(data, path="").salt, path="")[1]
    flip(path, entry.offset + 200)


def a_segment_has_lost_its_header(whole: Path, mine: Path) -> None:
    flip(mine / sealed(whole, 2), 30)


def a_segment_is_cut_short(whole: Path, mine: Path) -> None:
    path = mine / sealed(whole, 0)
    os.truncate(path, path.stat().st_size // 2)


def a_segment_is_missing(whole: Path, mine: Path) -> None:
    (mine / sealed(whole, 1)).unlink()


def the_log_is_damaged_in_the_middle(whole: Path, mine: Path) -> None:
    path, frames = log_of(whole, "jobs")
    flip(mine / path, frames[len(frames) // 2].offset + 60)


def a_log_file_has_lost_its_header(whole: Path, mine: Path) -> None:
    flip(mine / log_of(whole, "late")[0], 33)


def the_manifest_is_damaged(whole: Path, mine: Path) -> None:
    (mine / "topics.json").write_text("{")


def files_lie_around(whole: Path, mine: Path) -> None:
    path = mine / sealed(whole, 2)
    shutil.copy(path, path.with_name(f"{10**9:020d}.data"))
    path.with_name(f"{1:020d}.data.tmp").write_bytes(b"half")


# Each group is served by one server.
GROUPS: dict[str, list[Damage]] = {
    "indexes": [an_index_is_lost, an_index_is_damaged, a_segment_has_lost_its_header, the_manifest_is_damaged],
    "segments": [a_segment_is_cut_short, a_segment_is_missing, a_block_is_damaged, files_lie_around],
    "header": [a_log_file_has_lost_its_header],
    "log": [the_log_is_damaged_in_the_middle],
}


# --- what a repair promises ----------------------------------------------------------------------------


def live(folder: Path) -> dict[str, dict[int, bytes]]:
    found = Folder(str(folder))
    return {
        topic.name: {record.seq: record.data for record in live_records(found, topic)}
        for topic in found.topics
        if not topic.internal
    }


def lost_seqs(report: Any, name: str) -> set[int]:
    return {seq for loss in report["lost"] if loss["topic"] == name for seq in range(loss["first"], loss["last"] + 1)}


@pytest.fixture
def server_on(tmp_path: Path) -> Iterator[Callable[[Path], Server]]:
    servers: list[Server] = []

    def start(folder: Path) -> Server:
        servers.append(Server(folder, log=tmp_path / "server.log"))
        servers[-1].wait_ready()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def read_everything(server: Server, name: str) -> tuple[dict[int, bytes], set[int]]:
    """(records by seq, seqs that tombstones name), as a reader gets them who begins at the first seq."""
    records: dict[int, bytes] = {}
    gaps: set[int] = set()
    at = 0
    with server.client() as api:
        while True:
            page = api.diff(name, at)
            if (stone := page.json.get("tombstone")) is not None:
                gaps.update(range(stone["gap_from"], stone["gap_to"] + 1))
            for record in page["records"]:
                records[record["$seq"]] = json.dumps(record["data"], separators=(",", ":")).encode()
            if page["caught_up"]:
                return records, gaps
            at = page["next_from_seq"]


@pytest.mark.parametrize("group", GROUPS)
def test_a_copy_is_repaired_and_served(
    whole: Path, folder: Path, tmp_path: Path, group: str, server_on: Callable[[Path], Server]
) -> None:
    before = live(whole)
    for damage in GROUPS[group]:
        damage(whole, folder)
    damaged = contents(folder)
    plan = repair(folder, code=1)
    assert not plan["repaired"]
    assert plan["files"]
    assert contents(folder) == damaged
    copy = tmp_path / "copy"
    report = repair(folder, "--to", str(copy))
    assert contents(folder) == damaged  # the source is as it was
    assert report["repaired"]
    assert report["into"] == str(copy)
    verdict = verify(str(copy), deep=True, running=False)
    assert verdict.clean
    assert not verdict.notes
    server = server_on(copy)
    missing = 0
    for name, records in before.items():
        served, gaps = read_everything(server, name)
        lost = lost_seqs(report, name)
        for seq, data in records.items():
            if seq in served:
                assert json.loads(served[seq]) == json.loads(data)
            else:
                missing += 1
                assert seq in lost, f"{name} {seq} went silently"
                assert seq in gaps, f"{name} {seq}: no tombstone"
    assert group in ("segments", "log") or not missing
    assert group != "segments" or missing or report["restored"]
    with server.client() as api:
        for name in before:
            assert api.append(name, "after the repair")["first_seq"] > max(before[name], default=0)


@pytest.mark.gate
def test_in_place_nothing_is_deleted(whole: Path, folder: Path) -> None:
    a_block_is_damaged(whole, folder)
    files_lie_around(whole, folder)
    path = folder / sealed(whole, 2)
    bad = path.read_bytes()
    report = repair(folder, "--yes")
    assert report["whole"]
    assert report["into"] is None
    aside = Path(report["aside"])
    assert aside.parent == folder
    assert (aside / path.relative_to(folder)).read_bytes() == bad
    for done in report["files"]:
        was_there = (whole / done["file"]).exists() or done["action"] == "remove"
        assert (aside / done["file"]).exists() == was_there
    assert repair(folder)["files"] == []  # exit code 0: there is nothing left to do
    assert verify(str(folder), deep=True, running=False).clean


@pytest.mark.parametrize("point", ["write:1", "rename:1", "renamed:1", "rename:2", "renamed:3", "rename:4"])
def test_a_repair_that_is_cut_off_is_begun_again(whole: Path, folder: Path, point: str) -> None:
    for damage in (a_block_is_damaged, an_index_is_damaged, the_log_is_damaged_in_the_middle):
        damage(whole, folder)
    straight = copied(folder, folder.parent / "straight")
    repair(straight, "--yes")
    done = run_topics("repair", "--yes", "--data-dir", str(folder), TOPICS_KILL_POINT=point)
    assert done.returncode == -9, done.stdout
    report = repair(folder, "--yes")
    assert report["whole"]
    assert live(folder) == live(straight)
    for mine, theirs in zip(_topics(folder), _topics(straight), strict=True):
        assert (mine.name, mine.holes, mine.head_seq) == (theirs.name, theirs.holes, theirs.head_seq)


def test_a_copy_that_is_cut_off_has_no_name(whole: Path, folder: Path, tmp_path: Path) -> None:
    a_block_is_damaged(whole, folder)
    copy = tmp_path / "copy"
    args = ("repair", "--to", str(copy), "--data-dir", str(folder))
    assert run_topics(*args, TOPICS_KILL_POINT="rename:3").returncode == -9
    assert not copy.exists()
    assert run_topics(*args).returncode == 0
    assert verify(str(copy), deep=True, running=False).clean
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("copy")] == ["copy"]


def test_a_snapshot_is_repaired_into_a_copy_alone(whole: Path, folder: Path, tmp_path: Path) -> None:
    """Its files are links to those of its folder."""
    assert run_topics("snapshot", "create", "view", "--data-dir", str(folder)).returncode == 0
    view = folder / "snapshots" / "view"
    (view / sealed(whole, 1)).with_suffix(".idx").unlink()
    done = run_topics("repair", "--yes", "--data-dir", str(view))
    assert done.returncode == 1
    assert "is a snapshot" in done.stderr
    repair(view, "--to", str(tmp_path / "copy"))
    assert live(tmp_path / "copy") == live(whole)


def _topics(folder: Path) -> list[Topic]:
    return Folder(str(folder)).topics


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.gate
def test_a_whole_folder_needs_nothing(whole: Path) -> None:
    before = contents(whole)
    done = run_topics("repair", "--data-dir", str(whole))
    assert done.returncode == 0
    assert done.stdout.endswith(": whole, nothing to repair\n")
    assert contents(whole) == before


def test_beyond_repair(whole: Path, folder: Path, tmp_path: Path) -> None:
    snapshot = max(folder.glob("wal/*/*.snap"), key=lambda path: path.stat().st_size)
    flip(snapshot, 60)
    a_block_is_damaged(whole, folder)
    before = contents(folder)
    for options in ([], ["--yes"], ["--to", str(tmp_path / "copy")]):
        done = run_topics("repair", "--data-dir", str(folder), *options)
        assert done.returncode == 1
        said = [line for line in done.stdout.splitlines() if line.startswith("can't be repaired: ")]
        assert str(snapshot.relative_to(folder)) in said[0]
        assert "restore it from a backup" in said[0]
        assert {name: data for name, data in contents(folder).items() if name != "LOCK"} == {
            name: data for name, data in before.items() if name != "LOCK"
        }
    assert not (tmp_path / "copy").exists()


def test_a_folder_that_is_served(start_server: Callable[..., Server]) -> None:
    server = start_server()
    for options in ([], ["--yes"], ["--to", str(server.data_dir) + "-copy"]):
        done = run_topics("repair", "--data-dir", str(server.data_dir), *options)
        assert done.returncode == 1
        assert f"in use by the server with pid {server.pid}" in done.stderr
        assert done.stderr.count("\n") == 1


def test_usage(whole: Path, folder: Path, tmp_path: Path) -> None:
    assert run_topics("repair", "--yes", "--to", "x", "--data-dir", str(folder)).returncode == 2
    done = run_topics("repair", "--data-dir", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "is no data folder" in done.stderr
    an_index_is_lost(whole, folder)
    (tmp_path / "there").mkdir()
    done = run_topics("repair", "--data-dir", str(folder), "--to", str(tmp_path / "there"))
    assert done.returncode == 1
    assert "is there already" in done.stderr


def test_a_newer_format(folder: Path) -> None:
    path = folder / "topics.json"
    path.write_text(path.read_text().replace('"format":1', '"format":9'))
    done = run_topics("repair", "--yes", "--data-dir", str(folder))
    assert done.returncode == 1
    assert "format 9" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.full
@pytest.mark.parametrize("how", ["flipped", "removed"])
def test_rules_that_are_lost_are_told_with_their_copies(tmp_path: Path, how: str) -> None:
    server = Server(tmp_path / "data", log=tmp_path / "server.log", TOPICS_WAL_SHARDS=2)
    try:
        server.wait_ready()
        with server.client() as api:
            for topic in ("a", "b"):
                api.put(topic, durability="fsync")
            assert api.send("PUT", "/v0/routers/r", {"source": "a", "dest": "b"}).status in (200, 201)
            assert api.append_records("a", [{"data": number} for number in range(500)]).status == 200
            eventually(lambda: api.state("b")["count"] == 500, what="copies")
    finally:
        server.kill()
        server.close()
    rules = tmp_path / "data" / "routers"
    if how == "removed":
        rules.unlink()
    else:
        data = bytearray(rules.read_bytes())
        data[40] ^= 1
        rules.write_bytes(data)
    told = run_topics("verify", "--data-dir", str(tmp_path / "data"))
    assert told.returncode == 1
    assert "routers" in told.stdout
    done = run_topics("repair", "--to", str(tmp_path / "copy"), "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 0, done.stdout
    assert "lost: routers: all routers" in done.stdout
    assert "copies of a seq 1..500 that were in memory only" in done.stdout, done.stdout
    assert run_topics("verify", "--data-dir", str(tmp_path / "copy")).returncode == 0
