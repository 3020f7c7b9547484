"""`topics shard inspect`: bytes by what became of them, and what keeps every file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from topics.datadir.view.folder import Folder

from .inspected import SMALL_SEGMENTS, copied, golden, topic_in
from .server import Server, eventually, run_topics

pytestmark = pytest.mark.e2e


def inspect(folder: Path, shard: int) -> Any:
    done = run_topics("shard", "inspect", str(shard), "--json", "--data-dir", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden(tmp_path_factory.getbasetemp())


def test_of_a_stopped_server(whole: Path) -> None:
    folder = Folder(str(whole))
    for shard in folder.shards:
        found = inspect(whole, shard.number)
        assert found["records"] == sum(topic.count for topic in shard.topics.values())
        assert found["clean"]
        assert found["last_lsn"] == found["covered_lsn"]
        for one in found["segments"]:
            assert one["live"] + one["deleted"] + one["dead"] == one["records"]
            total = one["live_bytes"] + one["deleted_bytes"] + one["dead_bytes"]
            assert 0 < total < one["disk_bytes"] + 4096
            assert one["kept_by"]
        assert [log["kept_by"] for log in found["logs"]][-1:] in ([], ["the log goes on here"])
    orders = topic_in(folder, "orders")
    segments = [one for one in inspect(whole, orders.shard)["segments"] if one["topic"] == "orders"]
    assert sum(one["deleted"] for one in segments) > 0
    assert any("records are live; deleting them frees all of it" in one["kept_by"] for one in segments)
    text = run_topics("shard", "inspect", str(orders.shard), "--data-dir", str(whole), COLUMNS=200).stdout
    assert "stopped in order" in text
    assert "kept by" in text


def test_what_keeps_the_log(tmp_path: Path) -> None:
    """A topic with a few old records keeps the oldest file, and that one keeps the rest."""
    settings = {**SMALL_SEGMENTS, "TOPICS_SEGMENT_MAX_AGE_MS": 0, "TOPICS_WAL_SHARDS": 1}
    server = Server(tmp_path / "data", log=tmp_path / "server.log", **settings)
    try:
        server.wait_ready()
        with server.client() as api:
            api.append("quiet", "an old record")
            for _ in range(12):
                api.append("busy", *["x" * 10_000] * 20)
        found = eventually(
            lambda: len((space := inspect(server.data_dir, 0))["logs"]) > 2 and space, what="several log files"
        )
        assert "quiet (1)" in found["logs"][0]["kept_by"]
        assert "TOPICS_SEGMENT_MAX_EVENTS" in found["logs"][0]["kept_by"]
        assert found["logs"][-1]["kept_by"] == "the log goes on here"
        with server.client() as api:
            api.delete("quiet", before_seq=2)
            api.append("busy", "y")
        eventually(
            lambda: "quiet" not in inspect(server.data_dir, 0)["logs"][0]["kept_by"], what="quiet no longer keeps it"
        )
    finally:
        server.close()


def test_damage_and_mistakes(whole: Path, tmp_path: Path) -> None:
    done = run_topics("shard", "inspect", "7", "--data-dir", str(whole))
    assert done.returncode == 2
    assert "there are shards 0 to 1" in done.stderr
    folder = copied(whole, tmp_path / "data")
    orders = topic_in(Folder(str(folder)), "orders")
    next(iter(folder.glob(f"topics/{orders.id:016x}/*.data"))).unlink()
    done = run_topics("shard", "inspect", str(orders.shard), "--data-dir", str(folder))
    assert done.returncode == 1
    assert "missing" in done.stderr
    assert done.stderr.count("\n") == 1
    inspect(folder, 1 - orders.shard)  # the other one is whole
