"""The loss report after a crash, against numbers that HTTP tells: every seq up to the head is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.routing import route, wait_records
from e2e.server import Server, eventually
from pyspark.sql import SparkSession

from spark_pipeline.reports import loss
from spark_pipeline.source import register

from .reportplay import Play, findings, metrics
from .sourceplay import on_disk, said


@pytest.mark.timeout(600)
def test_seqs_that_a_crash_skipped_are_explained(
    spark: SparkSession, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """Copies that were in memory come again above the ceiling, because a client wrote behind them."""
    server = start_server()
    with server.client() as api:
        api.put("copies")
        api.append("source", "made before the router")
        route(api, "source", "copies")
        api.append("source", *range(5))
        wait_records(api, "copies", 5)
        api.append("copies", "by a client", "and another")
        head = api.state("copies")["head_seq"]
    server.kill()
    server = start_server(data_dir=server.data_dir)
    with server.client() as api:
        eventually(lambda: len(said(api, "copies")[0]) >= 7, what="all copies")
        records, lost = said(api, "copies")
        offsets = [row["offset"] for row in records]
        deleted = api.delete("copies", before_seq=offsets[1] + 1)["deleted"]
        state = api.state("copies").json
        on_disk(server.data_dir, "copies", head=state["head_seq"])
    assert (head, lost, deleted) == (7, [], 2)
    skipped = state["head_seq"] - len(records)
    assert skipped > 90_000, "it went on above the ceiling"
    register(spark)
    play = Play(spark, tmp_path, data_dir=server.data_dir)
    result = play.run(loss, now_ms=records[-1]["timestamp"])
    (row,) = [row for row in play.saved("loss", "audit") if row["topic"] == "copies"]
    expected: dict[str, Any] = {"assigned": state["head_seq"], "live": len(records) - 2, "deleted": 2}
    expected |= {"skipped": skipped, "evicted": 0, "lost": 0, "trimmed": 0, "uncounted": 0, "unexplained": 0}
    assert {name: row[name] for name in expected} == expected
    assert metrics(result, "loss_unexplained_seqs") == {(): 0}
    assert f"{skipped:,} seqs were skipped by a crash: no record had or will have them." in findings(result, "ok")
