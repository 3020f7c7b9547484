"""The integrity report on folders that somebody has damaged: each damage is found, by file and offset, and none fails
the report."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import livefiles
import pytest
from e2e.server import Server, eventually
from pyspark.sql import SparkSession

from spark_pipeline.reports.report import Result
from spark_pipeline.reports.subjects import integrity
from topics.storage.format import DELETED
from topics.storage.frames import decode_wal_header, scan
from topics.storage.segment import decode_index, decode_segment_header, scan_blocks

from .reportplay import Frames, Play, findings, metrics, table
from .reportscene import SMALL_SEGMENTS

pytestmark = pytest.mark.timeout(600)  # a Spark on a busy machine

TOPICS = ("a", "b", "c", "d")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sealed segment for each of four topics, and a log with frames."""
    folder = tmp_path_factory.mktemp("whole")
    server = Server(folder / "data", log=folder / "server.log", TOPICS_WAL_SHARDS=1, **SMALL_SEGMENTS)
    try:
        server.wait_ready()
        with server.client() as api:
            for topic in TOPICS:
                for at in range(4):
                    tagged = [{"data": at * 20 + n, "tag": f"t{n % 3}"} for n in range(20)]
                    api.append_records(topic, tagged)
                api.delete(topic, match="t1")
            eventually(lambda: len(livefiles.find(server.data_dir, "topics/*/*.idx")) >= len(TOPICS), what="segments")
            for n in range(9):
                api.append("log", n)
        assert server.stop() == 0
    finally:
        server.close()
    return server.data_dir


@pytest.fixture
def data_dir(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


def check(spark: SparkSession, data_dir: Path, *, at_ms: int | None = None) -> Result:
    play = Play(spark, data_dir.parent / "out", data_dir=data_dir, frames=Frames(spark))
    return play.run(integrity, now_ms=at_ms or now_ms())


def sealed(data_dir: Path) -> list[Path]:
    """Segments with an index, in order."""
    return [path.with_suffix(".data") for path in sorted(data_dir.glob("topics/*/*.idx"))]


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def problems(result: Result) -> set[tuple[str, int]]:
    if not result.summary["problems"]:
        return set()
    return {(row["file"], row["offset"]) for row in table(result, "Problems")}


def test_each_damage_is_named(spark: SparkSession, data_dir: Path) -> None:
    first, second, third, fourth, *_ = sealed(data_dir)
    index = decode_index(first.with_suffix(".idx").read_bytes(), path="")
    flip(first, index.blocks[0].offset + 70)
    flip(second.with_suffix(".idx"), 70)
    data = third.read_bytes()
    (block, _), *_ = scan_blocks(data, salt=decode_segment_header(data, path="").salt, path="")
    with open(third, "r+b") as file:
        file.seek(block.flags_offset + 2)
        file.write(b"\x11")
    fourth.unlink()
    expected = {
        (str(first.relative_to(data_dir)), index.blocks[0].offset),
        (str(second.with_suffix(".idx").relative_to(data_dir)), 0),
        (str(third.relative_to(data_dir)), block.flags_offset + 2),
        (str(fourth.relative_to(data_dir)), 0),
    }
    result = check(spark, data_dir)
    assert problems(result) == expected
    told = findings(result, "breach")
    assert len(told) == 4
    for name, offset in expected:
        assert any(f"{name} at offset {offset}: " in text for text in told)
    assert metrics(result, "integrity_problems") == {("0",): 4}


def test_damage_within_the_log(spark: SparkSession, data_dir: Path) -> None:
    logs = sorted(data_dir.glob("wal/*/*.wal"))
    path = next(log for log in logs if len(_offsets(log)) > 4)
    offsets = _offsets(path)
    flip(path, offsets[2] + 60)
    assert (str(path.relative_to(data_dir)), offsets[2]) in problems(check(spark, data_dir))


def test_a_log_that_ends_too_early(spark: SparkSession, data_dir: Path) -> None:
    """Its last frame is bad, so nothing follows it; only the snapshot knows that there was one."""
    path = [log for log in sorted(data_dir.glob("wal/*/*.wal")) if _offsets(log)][-1]
    last = _offsets(path)[-1]
    flip(path, last + 60)
    result = check(spark, data_dir)
    name = str(path.relative_to(data_dir))
    assert problems(result) == {(name, last), (name, 0)}
    assert "the snapshot has seen" in findings(result, "breach")[0]


def _offsets(path: Path) -> list[int]:
    data = path.read_bytes()
    return [frame.offset for frame in scan(data, salt=decode_wal_header(data, path="").salt)]


def test_a_snapshot_that_cannot_be_read(spark: SparkSession, data_dir: Path) -> None:
    (path,) = data_dir.glob("wal/*/*.snap")
    flip(path, 60)
    result = check(spark, data_dir)
    assert problems(result) == {(str(path.relative_to(data_dir)), 0)}
    assert result.summary["orphans"] == 0, "without it nobody knows which segments count"


def test_orphans_are_told_when_they_have_lain_for_a_while(spark: SparkSession, data_dir: Path) -> None:
    left = data_dir / "topics" / "00000000000000ff"
    left.mkdir()
    (left / f"{1:020d}.data").write_bytes(b"x" * 9_000)
    (data_dir / "wal" / "shard-00" / "00000001-000000000099.snap.tmp").write_bytes(b"y")
    young = check(spark, data_dir)
    assert (young.summary["problems"], young.summary["orphans"]) == (0, 0)
    shutil.rmtree(data_dir.parent / "out")
    old = check(spark, data_dir, at_ms=now_ms() + 3_600_000)
    assert {(row["file"], row["why"]) for row in table(old, "Orphans")} == {
        (f"topics/00000000000000ff/{1:020d}.data", "in no snapshot"),
        ("wal/shard-00/00000001-000000000099.snap.tmp", "never finished"),
    }
    assert old.summary["orphan_bytes"] >= 9_000
    assert findings(old, "breach") == []
    assert len(findings(old, "notice")) == 1


def test_deleted_flags_are_no_damage(spark: SparkSession, whole: Path, tmp_path: Path) -> None:
    play = Play(spark, tmp_path / "out", data_dir=whole, frames=Frames(spark))
    result = play.run(integrity, now_ms=now_ms())
    assert result.summary["problems"] == 0
    deleted = 0
    for path in whole.glob("topics/*/*.data"):
        data = path.read_bytes()
        for block, _ in scan_blocks(data, salt=decode_segment_header(data, path="").salt, path=""):
            deleted += data[block.flags_offset : block.flags_offset + block.count].count(DELETED)
    assert deleted > 0
    (row,) = table(result, "Checked, by shard")
    assert row["deleted"] == deleted
    frames = sum(len(_offsets(path)) for path in whole.glob("wal/*/*.wal") if os.path.getsize(path))
    assert row["frames"] == frames


def test_a_server_at_work_is_not_damaged(spark: SparkSession, tmp_path: Path) -> None:
    """Log files come and go, segments are sealed and dropped while they are checked, and none of that is a finding."""
    server = Server(tmp_path / "data", log=tmp_path / "server.log", TOPICS_WAL_FILE_BYTES=1 << 20, **SMALL_SEGMENTS)
    done = threading.Event()

    def write() -> int:
        batches = 0
        with server.client() as api:
            while not done.is_set():
                answer = api.append("busy", *("z" * 800 for _ in range(20)))
                assert answer.status == 200, answer
                batches += answer.status == 200
        return batches

    try:
        server.wait_ready()
        play = Play(spark, tmp_path / "out", data_dir=server.data_dir, frames=Frames(spark))
        with server.client() as api, ThreadPoolExecutor(1) as pool:
            api.put("busy", cap_records=100)
            writing = pool.submit(write)
            try:
                seen = set()
                for _ in range(3):
                    result = play.run(integrity, now_ms=now_ms())
                    assert result.summary["problems"] == 0, findings(result, "breach")
                    seen |= {path.name for path in livefiles.find(server.data_dir, "wal/*/*.wal")}
            finally:
                done.set()
            assert writing.result() > 0
        assert len(seen) > len(livefiles.find(server.data_dir, "wal/*/*.wal")), "no log file went meanwhile"
    finally:
        server.close()
