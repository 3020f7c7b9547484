"""`topics segment`: listed and dumped, whole and damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from topics.datadir.view.folder import Folder

from .inspected import copied, golden, topic_in
from .server import run_topics

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden(tmp_path_factory.getbasetemp())


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return copied(whole, tmp_path / "data")


def ls(folder: Path, *args: str, code: int = 0) -> list[Any]:
    done = run_topics("segment", "ls", "--json", "--data-dir", str(folder), *args)
    assert done.returncode == code, done.stderr or done.stdout
    found: list[Any] = json.loads(done.stdout)
    return found


def dump(*args: object, code: int = 0) -> list[Any]:
    done = run_topics("segment", "dump", "--json", *map(str, args))
    assert done.returncode == code, done.stderr or done.stdout[-500:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def blocks(lines: list[Any]) -> list[Any]:
    return [line for line in lines if "count" in line]


def test_ls(whole: Path) -> None:
    orders = topic_in(Folder(str(whole)), "orders")
    found = ls(whole, "--topic", "orders")
    assert [line["first_seq"] for line in found] == [known.first_seq for known in orders.segments]
    assert sum(line["records"] for line in found) - sum(line["deleted"] for line in found) <= orders.count
    assert sum(line["deleted"] for line in found) > 0
    assert all(line["problem"] is None and line["disk_bytes"] > 0 for line in found)
    assert {line["topic"] for line in ls(whole)} >= {"orders"}
    assert "orders" in run_topics("segment", "ls", "--data-dir", str(whole), COLUMNS=160).stdout


def test_dump_with_records(whole: Path) -> None:
    place = ("--data-dir", whole)
    everything = blocks(dump("--topic", "orders", "--records", *place))
    records = [record for block in everything for record in block["records"]]
    assert [record["data"]["n"] for record in records] == [record["seq"] - 1 for record in records]
    deleted = {record["tag"] for record in records if record["flag"] == "d5"}
    assert deleted == {"t3"}
    assert all(record["flag"] == "00" for record in records if record["tag"] != "t3")
    (one,) = blocks(dump("--topic", "orders", "--from-seq", 5, "--to-seq", 5, *place))
    assert one["first_seq"] <= 5 < one["first_seq"] + one["count"]
    assert len(blocks(dump("--limit", 1, *place))) == 1
    text = run_topics("segment", "dump", "--topic", "orders", "--records", "--data-dir", str(whole)).stdout
    assert "flag=d5" in text


def test_a_damaged_block(folder: Path) -> None:
    path = max(folder.glob("topics/*/*.data"), key=lambda path: path.stat().st_size)
    good = blocks(dump(path))
    data = bytearray(path.read_bytes())
    data[good[0]["offset"] + 100] ^= 1
    path.write_bytes(data)
    lines = dump(path, code=1)
    (damage,) = [line for line in lines if "damage" in line]
    assert damage["offset"] == good[0]["offset"]
    assert [line["first_seq"] for line in blocks(lines)] == [line["first_seq"] for line in good[1:]]


def test_ls_of_a_damaged_folder(folder: Path) -> None:
    paths = sorted(folder.glob("topics/*/*.idx"))
    paths[0].unlink()
    paths[1].with_suffix(".data").unlink()
    problems = {line["file"]: line["problem"] for line in ls(folder, code=1) if line["problem"]}
    first, second = (str(path.with_suffix(".data").relative_to(folder)) for path in paths[:2])
    assert problems[first] == f"{paths[0].name} is missing"
    assert problems[second].endswith(".data is missing")
    lines = dump("--data-dir", folder, code=1)
    assert {"file": second, "offset": 0, "damage": "this file is missing"} in lines


def test_a_cut_segment_and_a_newer_one(folder: Path) -> None:
    paths = sorted(path.with_suffix(".data") for path in folder.glob("topics/*/*.idx"))
    os.truncate(paths[0], paths[0].stat().st_size - 50)
    data = bytearray(paths[1].read_bytes())
    data[8] = 9
    paths[1].write_bytes(data)
    problems = {line["file"]: line["problem"] for line in ls(folder, code=1) if line["problem"]}
    assert "cut short" in problems[str(paths[0].relative_to(folder))]
    assert "format 9 is newer" in problems[str(paths[1].relative_to(folder))]


def test_a_damaged_snapshot_is_told(folder: Path) -> None:
    for path in folder.glob("wal/*/*.snap"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    done = run_topics("segment", "ls", "--data-dir", str(folder))
    assert "snapshot checksum fails; its segments are not listed" in done.stderr
    assert "Traceback" not in done.stderr
