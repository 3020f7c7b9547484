"""Which records a batch query gets, by its options, and how they are divided among tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from e2e.client import Client
from e2e.server import Server, eventually
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_pipeline.source import SlicePartition, register

from .sourceplay import collected, flushed, frame, reader, rows, rows_of, said
from .sourceworld import SMALL_SEGMENTS

pytestmark = pytest.mark.timeout(400)  # the first query of a session takes long on a busy machine


class Scene(NamedTuple):
    data_dir: Path
    times: dict[str, list[int]]  # $ts of each record, by topic
    api: Client


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Topics a (100 records, each ten at another time), b (30), c (3), none at all in `empty`, and one that is hot."""
    folder = tmp_path_factory.mktemp("batch")
    server = Server(folder / "data", log=folder / "server.log", **SMALL_SEGMENTS)
    try:
        server.wait_ready()
        with server.client() as api:
            for batch in range(10):
                _later(api, "a", *range(batch * 10, batch * 10 + 10))
            api.append("b", *range(30))
            api.append("c", *range(3))
            api.put("empty")
            for batch in range(60):
                api.append("hot", *(f"{batch}:{n}" + "z" * 10_000 for n in range(10)))
            flushed(api, server.data_dir, "hot", segments=5)
            times = {name: [row["timestamp"] for row in said(api, name)[0]] for name in ("a", "b", "c")}
            yield Scene(server.data_dir, times, api)
    finally:
        server.close()


def _later(api: Client, topic: str, *data: object) -> None:
    """In another millisecond than anything before."""
    began = time.time_ns() // 1_000_000
    eventually(lambda: time.time_ns() // 1_000_000 > began, every_s=0.001)
    assert api.append(topic, *data).status in (200, 201)


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


A, B, C = range(1, 101), range(1, 31), range(1, 4)


def offsets(scene: Scene, **options: str) -> dict[str, list[int]]:
    given = options if options.keys() & {"subscribe", "subscribePattern"} else {**options, "subscribePattern": "[abc]"}
    found: dict[str, list[int]] = {}
    for row in rows(scene.data_dir, columns=["topic", "offset"], **given):
        found.setdefault(row["topic"], []).append(row["offset"])
    return found


def expected(**topics: range) -> dict[str, list[int]]:
    return {name: list(seqs) for name, seqs in topics.items() if len(seqs)}


# --- which topics ---


@pytest.mark.gate
def test_by_name_by_pattern_or_all(scene: Scene) -> None:
    assert offsets(scene, subscribe="c, a") == expected(a=A, c=C)
    assert offsets(scene, subscribePattern="b|c") == expected(b=B, c=C)
    assert offsets(scene, subscribePattern="nothing.*") == {}
    assert {row["topic"] for row in rows(scene.data_dir, columns=["topic"])} == {"a", "b", "c", "hot"}


def test_an_empty_topic_and_an_empty_folder(
    scene: Scene, session: SparkSession, start_server: Callable[..., Server]
) -> None:
    assert rows(scene.data_dir, subscribe="empty") == []
    fresh = start_server()
    assert rows(fresh.data_dir) == []
    assert frame(session, fresh.data_dir).count() == 0
    for view in ("topics", "leases", "tombstones", "routers"):
        assert rows(fresh.data_dir, view=view) == []
    assert collected(frame(session, scene.data_dir, subscribe="empty")) == []


# --- where to begin and to end ---


@pytest.mark.parametrize(
    ("options", "topics"),
    [
        ({}, {"a": A, "b": B, "c": C}),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, {"a": A, "b": B, "c": C}),
        ({"startingOffsets": "latest"}, {}),
        ({"startingOffsets": '{"a": 91}'}, {"a": range(91, 101), "b": B, "c": C}),
        ({"startingOffsets": '{"a": {"0": 91}, "b": {"0": -1}}'}, {"a": range(91, 101), "c": C}),
        ({"startingOffsets": '{"a": -1, "b": -2, "c": 3}'}, {"b": B, "c": range(3, 4)}),
        ({"startingOffsets": '{"a": 0}'}, {"a": A, "b": B, "c": C}),
        ({"startingOffsets": '{"a": 101}'}, {"b": B, "c": C}),
        ({"endingOffsets": '{"a": 11, "b": -1}'}, {"a": range(1, 11), "b": B, "c": C}),
        ({"endingOffsets": '{"a": 101, "b": 1}'}, {"a": A, "c": C}),
        ({"startingOffsets": '{"a": 25}', "endingOffsets": '{"a": {"0": 36}}'}, {"a": range(25, 36), "b": B, "c": C}),
        ({"startingOffsets": '{"a": 50}', "endingOffsets": '{"a": 40}'}, {"b": B, "c": C}),
    ],
)
def test_offsets(scene: Scene, options: dict[str, str], topics: dict[str, range]) -> None:
    assert offsets(scene, **options) == expected(**topics)


def test_timestamps(scene: Scene) -> None:
    """The start is read, the end is not."""
    times = scene.times["a"]
    moment = times[40]
    assert times[39] < moment == times[49] < times[50]
    iso = datetime.fromtimestamp(moment / 1_000, UTC).isoformat(timespec="milliseconds")
    for text in (str(moment), iso):
        assert offsets(scene, subscribe="a", startingTimestamp=text) == expected(a=range(41, 101))
        assert offsets(scene, subscribe="a", endingTimestamp=text) == expected(a=range(1, 41))
    assert offsets(scene, subscribe="a", startingTimestamp=str(moment + 1)) == expected(a=range(51, 101))
    assert offsets(scene, subscribe="a", startingTimestamp=str(moment), endingTimestamp=str(times[50])) == expected(
        a=range(41, 51)
    )
    assert offsets(scene, startingTimestamp=str(10**14)) == {}
    assert offsets(scene, endingTimestamp="1000") == {}


def test_timestamps_and_offsets_together(scene: Scene) -> None:
    moment = str(scene.times["a"][40])
    assert offsets(scene, subscribe="a", startingTimestamp=moment, endingOffsets='{"a": 45}') == expected(
        a=range(41, 45)
    )


def test_no_block_is_read_for_a_time_that_none_holds(scene: Scene) -> None:
    made = reader(scene.data_dir, subscribe="hot", startingTimestamp=str(10**14))
    assert [part.parts for part in made.partitions() if isinstance(part, SlicePartition)] == [[]]


# --- how it is divided ---


def spread(scene: Scene, **options: str) -> list[list[int]]:
    """The offsets of hot that each task reads."""
    made = reader(scene.data_dir, columns=["offset"], subscribe="hot", **options)
    return [[row["offset"] for row in rows_of(made.read(part))] for part in made.partitions()]


def test_one_hot_topic_is_cut(scene: Scene) -> None:
    tasks = spread(scene)
    assert len(tasks) >= 5  # 6 MB
    assert [seq for task in tasks for seq in task] == list(range(1, 601))


@pytest.mark.parametrize("least", [1, 2, 7, 20, 10_000])
def test_min_partitions(scene: Scene, least: int) -> None:
    tasks = spread(scene, minPartitions=str(least))
    assert [seq for task in tasks for seq in task] == list(range(1, 601))
    blocks = len(spread(scene, minPartitions="1000000"))
    assert len(tasks) >= min(least, blocks)
    assert blocks >= 45  # of about 130 KB each
    assert all(tasks)


def test_many_small_topics_share_tasks(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with server.client() as api:
        for n in range(150):
            assert api.append(f"small-{n:03d}", n, n + 1).status == 201
    made = reader(server.data_dir)
    parts = made.partitions()
    assert len(parts) == 1
    found = [row for part in parts for row in rows_of(made.read(part))]
    assert [(row["topic"], row["offset"], json.loads(row["value"])) for row in found] == [
        (f"small-{n:03d}", seq, n + seq - 1) for n in range(150) for seq in (1, 2)
    ]


# --- Spark's part ---


def test_spark_uses_as_many_tasks_as_were_planned(session: SparkSession, scene: Scene) -> None:
    df = frame(session, scene.data_dir, subscribe="hot", minPartitions="12")
    counted = df.groupBy(F.spark_partition_id().alias("task")).count().collect()
    assert len(counted) >= 12
    assert sum(row["count"] for row in counted) == 600


def test_a_schema_of_fewer_columns_in_another_order(session: SparkSession, scene: Scene) -> None:
    df = frame(session, scene.data_dir, schema="offset bigint, topic string", subscribe="b,c")
    assert df.columns == ["offset", "topic"]
    found = collected(df)
    assert sorted((row["topic"], row["offset"]) for row in found) == [
        *(("b", seq) for seq in B),
        *(("c", seq) for seq in C),
    ]


@pytest.mark.gate
def test_sql_over_the_source(session: SparkSession, scene: Scene) -> None:
    frame(session, scene.data_dir, subscribePattern="[abc]").createOrReplaceTempView("records")
    try:
        found = session.sql(
            "SELECT topic, count(*) AS n, max(offset) AS last, sum(cast(cast(value AS string) AS int)) AS total "
            "FROM records GROUP BY topic ORDER BY topic"
        ).collect()
    finally:
        session.catalog.dropTempView("records")
    assert [tuple(row) for row in found] == [
        ("a", 100, 100, sum(range(100))),
        ("b", 30, 30, sum(range(30))),
        ("c", 3, 3, 3),
    ]


def test_a_relative_path_is_the_drivers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scene.data_dir.parent)
    made = reader(Path("data"), subscribe="c")
    monkeypatch.chdir("/")
    assert made.options.path == str(scene.data_dir)
    assert sum(len(rows_of(made.read(part))) for part in made.partitions()) == 3
