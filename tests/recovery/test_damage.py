"""Files that are not as the server left them: a torn tail is cut, anything else is refused with a clear message."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import pytest
from crash_folder import (
    another_boot,
    contents,
    flip,
    frames,
    indexes,
    newest_snapshot,
    overwrite,
    recover_here,
    segments,
    shard_folder,
    snapshots,
    wal_files,
)
from crash_oracle import Oracle
from crash_server import EXHAUSTIVE, SMALL, TOPICS, Server, eventually, eventually_nudged

from topics.datadir.fsck.verify import verify
from topics.datadir.view.folder import Folder
from topics.errors import CorruptData, FormatError
from topics.shm.counters import State
from topics.storage.config import owner_of_name
from topics.storage.format import FILE_HEADER_BYTES
from topics.storage.paths import segment_name, topic_dir

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 120)]

Start = Callable[..., Server]


def name_on(shard: int, shards: int, stem: str = "topic") -> str:
    """A topic name that this shard owns."""
    return next(name for n in range(1000) if owner_of_name(name := f"{stem}-{n}", shards) == shard)


# --- torn tails ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tail(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    """A killed server's folder, one shard, whose last frame is a batch that the oracle does not know."""
    folder = tmp_path_factory.mktemp("tail") / "data"
    server = Server(folder, shards=1, env=SMALL).wait_ready()
    try:
        client = server.client()
        oracle = Oracle()
        topic = oracle.create(client, "t", "fsync")
        for count in (1, 3, 7):
            topic.append_plain(client, count, key=f"k{count}")
        assert client.append("t", "last", "of", "all").ok
        server.kill()
    finally:
        server.close()
    return folder, oracle


def last_frame(folder: Path) -> tuple[Path, int, int]:
    """Its file, offset and length."""
    (path,) = wal_files(folder)
    frame = frames(path)[-1]
    return path, frame.offset, frame.length


def copy(folder: Path, to: Path) -> Path:
    if to.exists():
        shutil.rmtree(to)
    shutil.copytree(folder, to)
    return to


def cut_points(length: int) -> list[int]:
    return list(range(0, length)) if EXHAUSTIVE else [60]


@pytest.mark.gate
def test_a_tail_cut_at_any_length_is_forgotten(tail: tuple[Path, Oracle], tmp_path: Path) -> None:
    folder, oracle = tail
    _, offset, length = last_frame(folder)
    owed = oracle.topics["t"].highest_acked
    for cut in range(length):
        for zeros in (False, True):
            mine = copy(folder, tmp_path / "cut")
            (path,) = wal_files(mine)
            size = path.stat().st_size
            os.truncate(path, offset + cut)
            if zeros:  # the rest of the preallocated file, as a crash leaves it
                os.truncate(path, size)
            figures.DAMAGES.add()
            recovered = recover_here(mine)
            topic = recovered.topics["t"]
            assert (topic.head_seq, topic.count) == (owed, owed), f"cut to {cut} of {length} bytes"
            assert path.stat().st_size == offset
            torn = any("torn" in note and f"offset {offset}" in note for note in recovered.notes)
            assert torn == (cut > 0), f"cut to {cut} of {length} bytes: {recovered.notes}"


@pytest.mark.gate
def test_a_last_frame_with_any_byte_wrong_is_refused(tail: tuple[Path, Oracle], tmp_path: Path) -> None:
    """It was acknowledged. A kill leaves the beginning of a frame, never a whole one that is wrong."""
    folder, _ = tail
    mine = copy(folder, tmp_path / "wrong")
    path, offset, length = last_frame(mine)
    before = path.read_bytes()
    for at in range(length):
        mask = 0x40 if before[offset + at] != 0x40 else 0x20  # without its last byte it may have been cut short
        flip(path, offset + at, mask)
        figures.DAMAGES.add()
        with pytest.raises(CorruptData, match=f"damaged at offset {offset} .*a whole frame stood here"):
            recover_here(mine)
        flip(path, offset + at, mask)
    assert path.read_bytes() == before, "a refusal must not change the file"


@pytest.mark.gate
def test_after_a_restart_of_the_machine_a_wrong_last_frame_is_forgotten(
    tail: tuple[Path, Oracle], tmp_path: Path
) -> None:
    """A power cut may have left it so, and nothing says that it had been synced."""
    folder, oracle = tail
    _, offset, length = last_frame(folder)
    owed = oracle.topics["t"].highest_acked
    for at in range(length):
        mine = copy(folder, tmp_path / "wrong")
        flip(wal_files(mine)[0], offset + at, 0xFF)
        another_boot(wal_files(mine)[0])
        figures.DAMAGES.add()
        assert recover_here(mine).topics["t"].head_seq == owed, f"byte {at}"


@pytest.mark.gate
def test_after_a_restart_of_the_machine_a_wrong_bit_is_refused(tail: tuple[Path, Oracle], tmp_path: Path) -> None:
    """However soon it went down after the answer: a power cut takes sectors, not bits."""
    folder, _ = tail
    mine = copy(folder, tmp_path / "wrong")
    path, offset, length = last_frame(mine)
    another_boot(path)
    before = path.read_bytes()
    for at in range(length):
        mask = 0x40 if before[offset + at] != 0x40 else 0x20  # without its last byte it may have been cut short
        flip(path, offset + at, mask)
        figures.DAMAGES.add()
        with pytest.raises(CorruptData, match=f"damaged at offset {offset} .*a whole frame stood here"):
            recover_here(mine)
        flip(path, offset + at, mask)
    assert path.read_bytes() == before, "a refusal must not change the file"


@pytest.mark.gate
def test_any_byte_wrong_before_good_frames_is_refused(tail: tuple[Path, Oracle], tmp_path: Path) -> None:
    folder, _ = tail
    mine = copy(folder, tmp_path / "middle")
    (path,) = wal_files(mine)
    middle = frames(path)[2]
    before = path.read_bytes()
    for at in range(middle.length):
        flip(path, middle.offset + at)
        figures.DAMAGES.add()
        with pytest.raises(CorruptData) as refusal:
            recover_here(mine)
        assert str(path) in str(refusal.value)
        assert f"offset {middle.offset}" in str(refusal.value)
        flip(path, middle.offset + at)
    assert path.read_bytes() == before, "a refusal must not change the file"


@pytest.mark.gate
def test_server_on_a_torn_tail_serves_and_goes_on(serve: Start, tail: tuple[Path, Oracle], tmp_path: Path) -> None:
    folder, oracle = tail
    topic = oracle.topics["t"]
    _, offset, length = last_frame(folder)
    for cut in cut_points(length):
        mine = copy(folder, tmp_path / "data")
        os.truncate(wal_files(mine)[0], offset + cut)
        figures.DAMAGES.add()
        server = serve(shards=1, env=SMALL)
        client = server.client()
        topic.check(client)
        assert ("torn tail cut" in server.log()) == (cut > 0)
        # What comes now must not be written behind the cut: it is there after the next crash too.
        answer = client.append("t", {"b": 0, "after": cut})
        assert answer.body["first_seq"] == topic.highest_acked + 1
        server.kill()
        again = serve(shards=1, env=SMALL)
        shown = again.client().diff("t", topic.highest_acked).body
        assert [record["data"] for record in shown["records"]] == [{"b": 0, "after": cut}]
        again.kill()


def test_rubbish_behind_the_tail_is_cut(serve: Start, tail: tuple[Path, Oracle], tmp_path: Path, seed: int) -> None:
    folder, oracle = tail
    mine = copy(folder, tmp_path / "data")
    path, offset, length = last_frame(mine)
    rng = random.Random(seed)
    # Rubbish that looks like a frame at first: the right salt, then noise.
    salt = path.read_bytes()[32:36]
    overwrite(path, offset + length, salt + rng.randbytes(5000))
    server = serve(shards=1, env=SMALL)
    shown = server.client().diff("t", 0).body
    assert shown["head_seq"] == oracle.topics["t"].highest_acked + 3
    assert len(shown["records"]) == oracle.topics["t"].highest_acked + 3
    assert f"torn tail cut at offset {offset + length}" in server.log()


# --- damage in the only frame, and in the last one ---

# Where in a frame: its salt, its length, its type, its number, its body, its checksum.
PLACES = {"salt": 1, "length": 5, "more length": 7, "type": 8, "lsn": 40, "body": 60, "checksum": -6}
SOME_IN_GATE = [
    pytest.param(place, marks=pytest.mark.gate) if place in ("length", "body") else place for place in PLACES
]


def refused_by_all(serve: Start, mine: Path, path: Path, offset: int) -> None:
    """The server, verify and a reader agree that this is damage."""
    found = verify(str(mine), deep=False, running=False)
    name = str(path.relative_to(mine))
    assert [(one.file, one.offset) for one in found.problems] == [(name, offset)]
    assert "a whole one stood here" in found.problems[0].text
    with pytest.raises(CorruptData, match=f"damaged at offset {offset} "):
        Folder(str(mine))
    server = serve(shards=1, env=SMALL, wait=False)
    server.wait_state("shard-0", State.FAILED)
    assert f"damaged at offset {offset} " in server.log()
    server.kill()


def repaired(mine: Path) -> dict[str, Any]:
    command = [TOPICS, "repair", "--json", "--yes", "--data-dir", str(mine)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    found = verify(str(mine), deep=True, running=False)
    assert not found.problems
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("place", SOME_IN_GATE)
def test_damage_to_the_only_frame(serve: Start, place: str) -> None:
    server = serve(shards=1, env=SMALL)
    assert server.client().put("only", durability="fsync").status == 201
    server.kill()
    (path,) = wal_files(server.data_dir)
    (frame,) = frames(path)
    at = PLACES[place] % frame.length
    flip(path, frame.offset + at)
    figures.DAMAGES.add()
    refused_by_all(serve, server.data_dir, path, frame.offset)
    lost = repaired(server.data_dir)["also_lost"]
    assert len(lost) == 1
    if place == "checksum":  # all else of it can be read
        assert lost[0].endswith("was a change of topic only, or its creation")
    server = serve(shards=1, env=SMALL)
    client = server.client()
    assert client.get("only").status == 404
    assert client.append("only", 1).ok


@pytest.mark.parametrize("place", SOME_IN_GATE)
def test_damage_to_the_last_frame(serve: Start, tail: tuple[Path, Oracle], tmp_path: Path, place: str) -> None:
    folder, oracle = tail
    topic = oracle.topics["t"]
    owed = topic.highest_acked
    mine = copy(folder, tmp_path / "data")
    path, offset, length = last_frame(mine)
    flip(path, offset + PLACES[place] % length)
    figures.DAMAGES.add()
    refused_by_all(serve, mine, path, offset)
    losses = repaired(mine)["lost"]
    assert [(loss["topic"], loss["first"]) for loss in losses] == [("t", owed + 1)]
    assert losses[0]["last"] >= owed + 3
    if place in ("salt", "body", "checksum"):
        assert losses[0]["last"] == owed + 3
    server = serve(shards=1, env=SMALL)
    client = server.client()
    shown = client.diff("t", owed).body
    assert shown["tombstone"] is not None
    assert shown["records"] == []
    assert shown["head_seq"] == losses[0]["last"]
    assert client.append("t", 1).body["first_seq"] == losses[0]["last"] + 1


def test_damage_to_the_only_record_of_a_log_that_was_quiet(serve: Start) -> None:
    """After a restart of the machine, too: the log knows what was synced."""
    server = serve(shards=1, env=SMALL)
    client = server.client()
    assert client.put("only", durability="fsync").status == 201
    assert client.append("only", "one").ok
    (path,) = wal_files(server.data_dir)
    eventually(lambda: frames(path)[-1].synced >= 2, within_s=60, what="a witness")
    server.kill()
    record = next(frame for frame in frames(path) if frame.count)
    flip(path, record.offset + record.length // 2)
    another_boot(path)
    figures.DAMAGES.add()
    assert not verify(str(server.data_dir), deep=False, running=False).clean
    again = serve(shards=1, env=SMALL, wait=False)
    again.wait_state("shard-0", State.FAILED)
    assert f"damaged at offset {record.offset} " in again.log()
    again.kill()
    assert [loss["topic"] for loss in repaired(server.data_dir)["lost"]] == ["only"]


# --- damage in the middle -----------------------------------------------------------------------------


@pytest.mark.gate
def test_one_damaged_shard_stays_down_and_the_others_serve(serve: Start, tmp_path: Path) -> None:
    server = serve(shards=2, env=SMALL)
    client = server.client()
    oracle = Oracle()
    sick, well = (oracle.create(client, name_on(shard, 2), "fsync") for shard in (0, 1))
    for topic in (sick, well):
        for _ in range(10):
            topic.append_plain(client, 5)
    server.kill()
    (path,) = wal_files(server.data_dir, 0)
    frame = frames(path)[5]
    flip(path, frame.offset + 70)
    before = contents(server.data_dir)

    server = serve(shards=2, env=SMALL, wait=False)
    server.wait_state("shard-0", State.FAILED)
    server.wait_state("shard-1", State.READY)
    server.wait_state("gateway-0", State.READY)
    client = server.client()
    eventually(lambda: client.get(well.name).ok, what="the other shard's topic")
    shown = server.ps()
    assert (shown["shard-0"]["state"], shown["shard-0"]["pid"]) == ("failed", None)
    assert shown["shard-1"]["state"] == "ready"
    assert shown["shard-0"]["restarts"] == 0, "a restart would not mend it"
    ready = server.ready()
    assert (ready.status, ready.code) == (503, "not_ready")
    assert "shard-0" in ready.body["error"]["message"]
    assert "shard-1" not in ready.body["error"]["message"]
    assert ready.retry_after
    assert client.call("GET", "/v0/health").ok
    log = server.log()
    assert str(path) in log
    assert f"offset {frame.offset}" in log
    for answer in (client.get(sick.name), client.append(sick.name, 1), client.diff(sick.name)):
        assert (answer.status, answer.code) == (503, "shard_unavailable")
        assert answer.retry_after
    oracle.restarted()
    well.check(client)
    well.append_plain(client, 3)
    assert (
        contents(server.data_dir)[str(path.relative_to(server.data_dir))]
        == before[str(path.relative_to(server.data_dir))]
    )
    server.kill()

    flip(path, frame.offset + 70)
    oracle.restarted()
    oracle.check(serve(shards=2, env=SMALL))


def test_a_damaged_end_of_an_older_file_is_refused_and_left_alone(serve: Start) -> None:
    """Between the damage and the frames that follow lies the file of a life that wrote nothing."""
    server = serve(shards=1, env=SMALL)
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "t", "fsync")
    topic.append_plain(client, 2)
    topic.append_plain(client, 3)
    server.kill()
    serve(shards=1, env=SMALL).kill()
    server = serve(shards=1, env=SMALL)
    oracle.restarted()
    topic.append_plain(server.client(), 4)
    server.kill()
    first, empty, last = wal_files(server.data_dir)
    assert [len(frames(path)) > 0 for path in (first, empty, last)] == [True, False, True]
    damaged = frames(first)[-1]
    flip(first, damaged.offset + 60)
    before = contents(server.data_dir)
    with pytest.raises(CorruptData):
        recover_here(server.data_dir)
    assert contents(server.data_dir) == before, "what is refused must stay as it is, so that it can be mended"
    flip(first, damaged.offset + 60)
    oracle.restarted()
    oracle.check(serve(shards=1, env=SMALL))


def test_a_power_cut_may_take_what_was_never_synced_and_nothing_else(serve: Start, tmp_path: Path) -> None:
    """The pages of an unsynced tail reach the platter in any order: a hole in it, with good frames behind, is no
    damage after a restart of the machine. The same hole in synced frames is, and so is it without a restart."""
    env = {**SMALL, "TOPICS_DISK_SYNC_MS": "60000"}
    server = serve(shards=1, env=env)
    oracle = Oracle()
    client = server.client()
    synced = oracle.create(client, "synced", "fsync")
    for _ in range(4):
        synced.append_plain(client, 2)
    assert client.put("unsynced", durability="disk").ok
    assert client.append("unsynced", "first").ok  # synced, because it waits for its topic
    synced.append_plain(client, 2)
    for at in range(20):
        assert client.append("unsynced", at).ok
    server.kill()
    (path,) = wal_files(server.data_dir)
    found = frames(path)
    (last_synced,) = [frame for frame in found if frame.topic_id == found[2].topic_id][-1:]
    hole = next(frame for frame in found if frame.offset > last_synced.offset and frame.first_seq == 11)
    assert found[-1].synced < hole.lsn, "the tail was synced after all: no test"

    flip(path, hole.offset + 60, 0xFF)
    with pytest.raises(CorruptData, match=f"offset {hole.offset}"):
        recover_here(server.data_dir)
    another_boot(path)
    mine = copy(server.data_dir, tmp_path / "synced-hole")
    flip(wal_files(mine)[0], last_synced.offset + 60)
    with pytest.raises(CorruptData, match=f"offset {last_synced.offset}"):
        recover_here(mine)

    oracle.restarted()
    server = serve(shards=1, env=env)
    synced.check(server.client())
    assert f"unsynced tail cut at offset {hole.offset}" in server.log()
    client = server.client()
    shown = client.diff("unsynced").body
    assert [record["data"] for record in shown["records"]] == ["first", *range(9)]
    assert client.append("unsynced", "again").body["first_seq"] > 21, "seqs that were given out are given out again"
    gap = client.diff("unsynced", 10).body["tombstone"]
    assert gap is not None, "acknowledged records were lost without a word"
    assert synced.append_plain(client, 1).first_seq == 11


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    """A killed server's folder with everything in it: a snapshot that names sealed and open segments, and WAL files
    of two lives with frames that it does not cover."""
    folder = tmp_path_factory.mktemp("full") / "data"
    env = {**SMALL, "TOPICS_SEGMENT_MAX_AGE_MS": "200"}
    oracle = Oracle()
    server = Server(folder, shards=1, env=env).wait_ready()

    def burst() -> None:
        for _ in range(25):
            topic.append(client, [("x" * 4000, "tag", None)] * 13)

    def snapshot_names_all_kinds() -> bool:
        found = newest_snapshot(folder)
        kinds = {segment.sealed for state in found[1] for segment in state.segments} if found else set()
        return kinds == {True, False}

    try:
        client = server.client()
        topic = oracle.create(client, "t", "fsync")
        oracle.create(client, "u", "disk")
        eventually_nudged(snapshot_names_all_kinds, burst, what="a snapshot that names sealed and open segments")
        for life in (1, 2):
            client = server.client()
            for _ in range(3):
                topic.append_plain(client, 2)
                oracle.topics["u"].append_plain(client, 2)
            server.kill()
            oracle.restarted()
            if life == 1:
                server = Server(folder, shards=1, env=SMALL).wait_ready()
                oracle.check(server)
    finally:
        server.close()
    covered = newest_snapshot(folder)
    assert covered is not None
    after = [path for path in wal_files(folder) if any(frame.lsn > covered[0].lsn for frame in frames(path))]
    assert len(after) >= 2
    return folder, oracle


@pytest.mark.gate
def test_the_folder_itself_is_good(serve: Start, full: tuple[Path, Oracle], tmp_path: Path) -> None:
    copy(full[0], tmp_path / "data")
    full[1].check(serve(shards=1, env=SMALL))


def newer_header(path: Path) -> None:
    """The format version stands behind the magic number in all our files."""
    overwrite(path, 8, (99).to_bytes(4, "little"))


def first_with_frames(folder: Path) -> Path:
    return next(path for path in wal_files(folder) if frames(path))


# what happened -> do it to a folder; returns the path that the message must name
DAMAGES: dict[str, Callable[[Path], Path]] = {}


def damage(function: Callable[[Path], Path]) -> Callable[[Path], Path]:
    DAMAGES[function.__name__] = function
    return function


def open_segment(folder: Path) -> tuple[Path, int]:
    found = newest_snapshot(folder)
    assert found is not None
    return next(
        (Path(topic_dir(str(folder), topic.id)) / segment_name(segment.first_seq), segment.data_bytes)
        for topic in found[1]
        for segment in topic.segments
        if not segment.sealed
    )


def moved_away(path: Path) -> Path:
    path.rename(path.parent / f"away-{path.name}.bak")
    return path


@damage
def segment_missing(folder: Path) -> Path:
    path = segments(folder)[0]
    path.unlink()
    return path


@damage
def segment_header_damaged(folder: Path) -> Path:
    flip(segments(folder)[0], 20)
    return segments(folder)[0]


@damage
def segment_header_newer(folder: Path) -> Path:
    newer_header(segments(folder)[0])
    return segments(folder)[0]


@damage
def segment_cut_short(folder: Path) -> Path:
    """The open one, which has no index: recovery reads all of it."""
    path, data_bytes = open_segment(folder)
    os.truncate(path, data_bytes - 9)
    return path


@damage
def open_segment_damaged(folder: Path) -> Path:
    path, _ = open_segment(folder)
    flip(path, FILE_HEADER_BYTES + 100)
    return path


@damage
def index_missing(folder: Path) -> Path:
    path = indexes(folder)[0]
    path.unlink()
    return path


@damage
def index_damaged(folder: Path) -> Path:
    flip(indexes(folder)[0], 70)
    return indexes(folder)[0]


@damage
def index_newer(folder: Path) -> Path:
    newer_header(indexes(folder)[0])
    return indexes(folder)[0]


@damage
def snapshot_damaged(folder: Path) -> Path:
    path = snapshots(folder)[-1]
    flip(path, path.stat().st_size // 2)
    return path


@damage
def snapshot_cut_short(folder: Path) -> Path:
    path = snapshots(folder)[-1]
    os.truncate(path, path.stat().st_size - 1)
    return path


@damage
def snapshot_newer(folder: Path) -> Path:
    newer_header(snapshots(folder)[-1])
    return snapshots(folder)[-1]


@damage
def snapshot_missing(folder: Path) -> Path:
    for path in snapshots(folder):
        moved_away(path)
    return shard_folder(folder, 0)


@damage
def wal_header_damaged(folder: Path) -> Path:
    path = first_with_frames(folder)
    flip(path, 30)
    return path


@damage
def wal_header_newer(folder: Path) -> Path:
    path = first_with_frames(folder)
    newer_header(path)
    return path


@damage
def last_wal_header_zeroed(folder: Path) -> Path:
    """Frames follow it, so it is not a file whose life ended before its header was written."""
    path = next(path for path in reversed(wal_files(folder)) if frames(path))
    for later in wal_files(folder):
        if later > path:
            later.unlink()
    overwrite(path, 0, bytes(FILE_HEADER_BYTES))
    return path


@damage
def first_wal_file_missing(folder: Path) -> Path:
    """With it go frames that no snapshot covers."""
    moved_away(first_with_frames(folder))
    return shard_folder(folder, 0)


@damage
def shard_folder_missing(folder: Path) -> Path:
    shutil.move(shard_folder(folder, 0), folder.parent / "elsewhere")
    return shard_folder(folder, 0)


@pytest.mark.gate
@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_refused_and_nothing_is_touched(full: tuple[Path, Oracle], tmp_path: Path, what: str) -> None:
    mine = copy(full[0], tmp_path / "data")
    named = DAMAGES[what](mine)
    figures.DAMAGES.add()
    before = contents(mine)
    with pytest.raises((CorruptData, FormatError)) as refusal:
        recover_here(mine)
    assert contents(mine) == before, "a refusal must not touch the folder"
    assert str(named) in str(refusal.value)
    if what.endswith("newer"):
        assert "newer" in str(refusal.value)


@pytest.mark.parametrize("what", DAMAGES if EXHAUSTIVE else ["segment_missing", "snapshot_newer"])
def test_a_server_on_a_damaged_folder_says_so(
    serve: Start, full: tuple[Path, Oracle], tmp_path: Path, what: str
) -> None:
    mine = copy(full[0], tmp_path / "data")
    named = DAMAGES[what](mine)
    figures.DAMAGES.add()
    before = contents(mine)
    server = serve(shards=1, env=SMALL, wait=False)
    settled = {State.FAILED, State.READY}
    eventually(lambda: server.state("shard-0") in settled, what=f"a decision\n{server.log()}")
    after = contents(mine)
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    assert server.state("shard-0") is State.FAILED, f"served a folder with {what}; changed files: {changed}"
    assert not changed, "a refusal must not touch the folder"
    refusal = next(line for line in server.log().splitlines() if "recovery refused" in line)
    assert str(named) in refusal
    eventually(lambda: server.state("gateway-0") is State.READY, what="the gateway")
    assert "shard-0" in server.ready().body["error"]["message"]


def test_a_server_goes_on_where_a_cap_meets_a_damaged_block(
    serve: Start, full: tuple[Path, Oracle], tmp_path: Path
) -> None:
    mine = copy(full[0], tmp_path / "data")
    found = newest_snapshot(mine)
    assert found is not None
    [state] = [state for state in found[1] if state.name == "t"]
    first = state.segments[0]
    assert first.sealed
    flip(Path(topic_dir(str(mine), state.id), segment_name(first.first_seq)), FILE_HEADER_BYTES + 200)
    server = serve(shards=1, env=SMALL)
    client = server.client()
    count = client.get("t").body["count"]
    assert client.diff("t").code == "internal"
    for less in (1, 2, 5):
        assert client.put("t", durability="fsync", cap_records=count - less).ok
        now = client.get("t").body
        assert (now["count"], now["earliest_seq"]) == (count - less, less + 1)
    assert client.append("t", "new").ok
    assert client.get("t").body["earliest_seq"] == 7
    eventually(lambda: "batch unreadable" in server.log(), what="a line in the log")
    assert server.log().count("batch unreadable") == 1
    assert server.deaths() == 0
    server.stop()
    again = serve(shards=1, env=SMALL).client()
    assert again.get("t").body["earliest_seq"] == 7


# --- the manifest -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({"format": 99, "layout": 1, "shards": 1}), "newer"),
        ("{", "damaged"),
        (None, "no topics.json"),
    ],
    ids=["newer", "cut", "missing"],
)
def test_a_manifest_that_can_not_be_used_refuses_the_start(
    serve: Start, full: tuple[Path, Oracle], tmp_path: Path, text: str | None, says: str
) -> None:
    mine = copy(full[0], tmp_path / "data")
    manifest = mine / "topics.json"
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
    before = contents(mine)
    server = serve(shards=1, env=SMALL, wait=False)
    assert server.wait_exit() == 2
    assert says in server.log()
    assert str(mine) in server.log()
    assert contents(mine) == before
