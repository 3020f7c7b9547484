"""The loss report after a crash, against numbers that HTTP tells: every seq up to the head is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e.routing import route, wait_records
from e2e.server import Server, eventually
from pyspark.sql import SparkSession

from spark_pipeline.reports.subjects import loss
from spark_pipeline.source import register
from topics.storage.frames import decode_wal_header

from .reportplay import Play, findings, metrics
from .sourceplay import on_disk, said


def another_boot(path: Path) -> None:
    """As if the machine had restarted since this file of the log was written."""
    data = path.read_bytes()
    header = msgspec.structs.replace(decode_wal_header(data, path=str(path)), boot_id=bytes(16)).encode()
    path.write_bytes(header + data[len(header) :])


@pytest.mark.timeout(600)
def test_seqs_that_a_crash_skipped_are_explained(
    spark: SparkSession, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """After a power cut nobody knows which seqs readers have seen of the copies: the next is above all of them."""
    server = start_server()
    with server.client() as api:
        api.put("copies", durability="memory")
        api.put("source", durability="fsync")
        api.append("source", "made before the router")
        route(api, "source", "copies")
        api.append("source", *range(5))
        wait_records(api, "copies", 5)
        head = api.state("copies")["head_seq"]
    server.kill()
    for path in server.data_dir.glob("wal/*/*.wal"):
        another_boot(path)
    server = start_server(data_dir=server.data_dir)
    with server.client() as api:
        api.append("source", "after it", "and another")
        eventually(lambda: len(said(api, "copies")[0]) >= 7, what="all copies")
        records, lost = said(api, "copies")
        deleted = api.delete("copies", before_seq=records[1]["offset"] + 1)["deleted"]
        state = api.state("copies").json
        on_disk(server.data_dir, "copies", head=state["head_seq"])
    assert (head, lost, len(records), deleted) == (5, [], 7, 2)
    skipped = state["head_seq"] - len(records)
    assert 0 < skipped <= 100, "it went on above the ceiling"
    register(spark)
    play = Play(spark, tmp_path, data_dir=server.data_dir)
    result = play.run(loss, now_ms=records[-1]["timestamp"])
    (row,) = [row for row in play.saved("loss", "audit") if row["topic"] == "copies"]
    expected: dict[str, Any] = {"assigned": state["head_seq"], "live": len(records) - 2, "deleted": 2}
    expected |= {"skipped": skipped, "evicted": 0, "lost": 0, "trimmed": 0, "uncounted": 0, "unexplained": 0}
    assert {name: row[name] for name in expected} == expected
    assert metrics(result, "loss_unexplained_seqs") == {(): 0}
    assert f"{skipped:,} seqs were skipped by a crash: no record had or will have them." in findings(result, "ok")
