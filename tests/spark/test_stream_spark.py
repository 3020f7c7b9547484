"""Streams in a real Spark: triggers, limits, progress, checkpoints, and how a failure looks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.client import Client, unique
from e2e.queues import make_queue
from e2e.server import Server, eventually
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from spark_pipeline.source import FORMAT, register

from .sourceplay import Row, collected, in_order, places, rows, said

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("streaming")
    server = Server(folder / "data", log=folder / "server.log", TOPICS_SEGMENT_MAX_EVENTS=50)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


@pytest.fixture
def stem() -> str:
    return unique("st") + "."


def stream(session: SparkSession, server: Server, **options: str) -> DataFrame:
    return session.readStream.format(FORMAT).options(**options).load(str(server.data_dir))


def start(df: DataFrame, folder: Path, *, now: bool = False) -> StreamingQuery:
    writer = df.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    writer = writer.trigger(availableNow=True) if now else writer.trigger(processingTime="50 milliseconds")
    return writer.start(str(folder / "sink"))


def run(df: DataFrame, folder: Path) -> list[Any]:
    """To the end of what is there; the progress of its batches."""
    query = start(df, folder, now=True)
    assert query.awaitTermination(200)
    assert query.exception() is None
    return [json.loads(each.json) for each in query.recentProgress]


def sink(session: SparkSession, folder: Path) -> list[Row]:
    return collected(session.read.parquet(str(folder / "sink")))


@pytest.mark.gate
def test_what_is_there_now_in_batches_of_limited_size_then_what_came_since(
    session: SparkSession, server: Server, api: Client, stem: str, tmp_path: Path
) -> None:
    api.append_records(stem + "a", [{"data": n, "tag": "k", "meta": {"n": n}} for n in range(70)], node="w")
    api.append(stem + "b", *range(3))
    options = {"subscribePattern": re.escape(stem) + ".*", "startingOffsets": "earliest", "includeHeaders": "true"}
    df = stream(session, server, maxOffsetsPerTrigger="30", **options)
    progress = run(df, tmp_path)
    sizes = [each["numInputRows"] for each in progress if each["numInputRows"]]
    assert sum(sizes) == 73
    assert max(sizes) <= 30
    (source,) = progress[-1]["sources"]
    assert source["endOffset"][stem + "a"]["next"] == 71
    api.append(stem + "a", *range(5))
    api.append(stem + "new", 1)
    progress = run(df, tmp_path)
    assert sum(each["numInputRows"] for each in progress) == 6
    found = in_order(sink(session, tmp_path))
    expected = [row for name in ("a", "b", "new") for row in said(api, stem + name)[0]]
    assert [{name: value for name, value in row.items() if name != "shard"} for row in found] == expected
    assert found == rows(server.data_dir, **options)
    run(df, tmp_path)
    assert len(sink(session, tmp_path)) == 79


def test_a_query_that_follows(session: SparkSession, server: Server, api: Client, stem: str, tmp_path: Path) -> None:
    """Topics appear, are deleted, and are read on; a look costs no batch."""
    api.append(stem + "a", "before")
    query = start(stream(session, server, subscribePattern=re.escape(stem) + ".*"), tmp_path)
    try:
        eventually(lambda: query.lastProgress is not None or query.status["message"].startswith("Wait"), within_s=60)
        api.append(stem + "a", 1)
        eventually(lambda: (stem + "a", 2) in places(sink(session, tmp_path)), within_s=60, every_s=0.5)
        api.append(stem + "b", 1, 2)
        eventually(lambda: (stem + "b", 2) in places(sink(session, tmp_path)), within_s=60, every_s=0.5)
        api.drop(stem + "a")
        api.append(stem + "b", 3)
        eventually(lambda: (stem + "b", 3) in places(sink(session, tmp_path)), within_s=60, every_s=0.5)
        assert query.exception() is None
    finally:
        query.stop()
    assert sorted(places(sink(session, tmp_path))) == [(stem + "a", 2), *((stem + "b", seq) for seq in (1, 2, 3))]


@pytest.mark.parametrize("view", ["leases", "tombstones"])
def test_the_other_views(
    session: SparkSession, server: Server, api: Client, stem: str, tmp_path: Path, view: str
) -> None:
    queue = make_queue(api, stem + "q")
    queue.produce(*range(6))
    api.put(stem + "t", cap_records=2)
    options = {"view": view, "subscribePattern": re.escape(stem) + ".*"}
    if view == "leases":
        options["startingOffsets"] = "earliest"
    df = stream(session, server, **options)
    batch = {name: value for name, value in options.items() if name != "startingOffsets"}
    for step in range(2):
        queue.take(2, node=f"w{step}")
        queue.ack([2 * step + 1], node=f"w{step}")
        api.append(stem + "t", *range(3))
        if view == "leases":  # an event reaches the log a moment after the worker was answered
            eventually(lambda told=3 * step + 3: len(rows(server.data_dir, **batch)) == told)
        run(df, tmp_path)
    found = sink(session, tmp_path)
    if view == "leases":
        assert in_order(found, "offset", "seq") == rows(server.data_dir, **batch)
        assert [row["event"] for row in in_order(found, "offset", "seq")] == ["claimed", "claimed", "acked"] * 2
    else:
        told = [(row["topic"], row["reason"], row["gap_from"], row["gap_to"], row["missed"]) for row in found]
        assert sorted(told) == [(stem + "t", "cap", 1, 1, 1), (stem + "t", "cap", 2, 4, 3)]


def test_a_loss_ends_the_query_with_one_line(
    session: SparkSession, server: Server, api: Client, stem: str, tmp_path: Path
) -> None:
    api.put(stem + "a", cap_records=3)
    api.append(stem + "a", 1)
    options = {"subscribe": stem + "a", "startingOffsets": "earliest"}
    run(stream(session, server, **options), tmp_path)
    api.append(stem + "a", *range(9))
    query = start(stream(session, server, **options), tmp_path, now=True)
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(200)
    text = str(caught.value)
    assert f"topic {stem}a: records 2 to 7 are gone (reason: cap). Start behind them, or set failOnDataLoss" in text
    assert not re.search(r"^\s+at |Traceback|^  File ", text, re.M), text
    # The same query goes on without them once it is told to.
    run(stream(session, server, failOnDataLoss="false", **options), tmp_path)
    assert sorted(places(sink(session, tmp_path))) == [(stem + "a", seq) for seq in (1, 8, 9, 10)]
