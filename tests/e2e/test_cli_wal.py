"""`topics wal dump`: every frame, filtered, and every kind of damage where it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from topics.datadir.view.folder import Folder
from topics.storage.format import FILE_HEADER_BYTES

from .inspected import copied, golden, topic_in
from .server import Server, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden(tmp_path_factory.getbasetemp(), kind="killed")


def dump(*args: object, code: int = 0, folder: Path | None = None) -> list[Any]:
    place = ["--data-dir", str(folder)] if folder else []
    done = run_topics("wal", "dump", "--json", *map(str, args), *place)
    assert done.returncode == code, done.stderr or done.stdout[-500:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def frames(lines: list[Any]) -> list[Any]:
    return [line for line in lines if "lsn" in line]


@pytest.mark.gate
def test_every_frame_in_order(whole: Path) -> None:
    lines = dump(folder=whole)
    found = frames(lines)
    assert {line["type"] for line in found} >= {"append", "topic", "delete"}
    for file in {line["file"] for line in found}:
        numbers = [line["lsn"] for line in found if line["file"] == file]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert any("the end" in line.get("note", "") for line in lines)
    assert not any("damage" in line for line in lines)


def test_one_batch_with_its_records(whole: Path) -> None:
    (line,) = frames(dump("--topic", "late", "--from-seq", 2, "--to-seq", 2, "--records", folder=whole))
    assert (line["type"], line["first_seq"], line["count"]) == ("append", 1, 2)
    assert [(record["seq"], record["data"]) for record in line["records"]] == [(1, "one"), (2, "two")]


def test_filters(whole: Path) -> None:
    folder = Folder(str(whole))
    orders = topic_in(folder, "orders")
    assert {line["topic_id"] for line in frames(dump("--topic", "orders", folder=whole))} == {f"{orders.id:016x}"}
    by_id = frames(dump("--topic", f"{orders.id:016x}", "--type", "delete", folder=whole))
    assert len(by_id) == 1
    assert by_id[0]["seqs"]
    assert {line["type"] for line in frames(dump("--type", "topic", "--type", "drop", folder=whole))} == {"topic"}
    some = frames(dump("--shard", orders.shard, folder=whole))
    middle = some[len(some) // 2]["lsn"]
    assert [line["lsn"] for line in frames(dump("--shard", orders.shard, "--lsn", middle, folder=whole))] == [middle]
    near = frames(dump("--shard", orders.shard, "--lsn", f"{middle - 1}-{middle + 1}", folder=whole))
    assert [line["lsn"] for line in near] == [middle - 1, middle, middle + 1]
    assert frames(dump("--shard", orders.shard, "--lsn", f"-{middle}", folder=whole))[-1]["lsn"] == middle
    assert len(frames(dump("--limit", 3, folder=whole))) == 3


@pytest.mark.gate
def test_damage_is_shown_where_it_lies(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "data")
    log = max(folder.glob("wal/*/*.wal"), key=lambda path: len(path.read_bytes().rstrip(b"\0")))
    good = frames(dump(log))
    second = good[1]
    data = bytearray(log.read_bytes())
    data[second["offset"] + 60] ^= 1
    log.write_bytes(data)
    lines = dump(log, code=1)
    (damage,) = [line for line in lines if "damage" in line]
    assert (damage["offset"], damage["length"]) == (second["offset"], second["length"])
    assert [line["lsn"] for line in frames(lines)] == [line["lsn"] for line in good if line is not second]
    text = run_topics("wal", "dump", str(log)).stdout
    assert f"{second['offset']:>10} DAMAGE damaged: no good frame here" in text


def test_a_torn_tail(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "data")
    log = max(folder.glob("wal/*/*.wal"), key=lambda path: len(path.read_bytes().rstrip(b"\0")))
    data = bytearray(log.read_bytes())
    last = frames(dump(log))[-1]
    end = last["offset"] + last["length"]
    data[end : end + 16] = b"half of a frame "
    log.write_bytes(data)
    note = dump(log)[-1]
    assert note["offset"] == end
    assert note["note"].startswith("16 bytes that are no frame")


@pytest.mark.parametrize(
    ("offset", "says"), [(0, "not a topics WAL file"), (8, "is newer than"), (20, "header checksum")]
)
def test_a_header_that_is_none(whole: Path, tmp_path: Path, offset: int, says: str) -> None:
    log = tmp_path / "broken.wal"
    data = bytearray(next(iter(whole.glob("wal/*/*.wal"))).read_bytes())
    data[offset] ^= 0x40
    log.write_bytes(data)
    (line,) = dump(log, code=1)
    assert says in line["damage"]


def test_a_file_of_zeros_and_a_short_one(tmp_path: Path) -> None:
    zeros, short = tmp_path / "zeros.wal", tmp_path / "short.wal"
    zeros.write_bytes(bytes(FILE_HEADER_BYTES * 2))
    short.write_bytes(b"TOPICWAL")
    assert "no header yet" in dump(zeros)[0]["note"]
    assert "shorter than" in dump(short, code=1)[0]["damage"]


def test_mistakes(whole: Path, tmp_path: Path) -> None:
    for args, code, says in (
        (["--topic", "nobody"], 1, 'there is no topic "nobody"'),
        (["--shard", "9"], 2, "there are shards 0 to 1"),
        (["--lsn", "x"], 2, "is no range"),
        (["--type", "block"], 2, "'append'"),
    ):
        done = run_topics("wal", "dump", *args, "--data-dir", str(whole))
        assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    done = run_topics("wal", "dump", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


def test_of_a_server_that_runs(server: Server) -> None:
    with server.client() as api:
        api.append("dumped", *range(3))
        (line,) = frames(dump("--topic", "dumped", "--type", "append", "--records", folder=server.data_dir))
        assert [record["data"] for record in line["records"]] == [0, 1, 2]
