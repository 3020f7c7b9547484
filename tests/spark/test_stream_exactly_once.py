"""Every record once, whatever is killed: the query, a shard, the router, the whole server, while writers go on.

Random, by a seed that is printed when it fails. TOPICS_SPARK_ROUNDS=100 makes it long, TOPICS_TEST_SEED repeats one.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.client import Client
from e2e.routing import route, topic_names
from e2e.server import Server, eventually
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from spark_pipeline.source import FORMAT, register

from .sourcechaos import Stage, Writers, rounds, seed
from .sourceplay import Row, StreamPlay, collected, on_disk, places, said

StartServer = Callable[..., Server]
WRITTEN = ("a", "b", "c")
COPIES = ("a.all", "a.some")


def open_stage(start_server: StartServer, folder: Path, dice: random.Random) -> Stage:
    stage = Stage(start_server, folder / "data", dice)
    with stage.server.client() as api:
        for name in WRITTEN:
            assert api.put(name, idempotency_window_ms=3_600_000).status == 201
        assert api.put("b", durability="fsync", idempotency_window_ms=3_600_000).status == 200
        route(api, "a", "a.all")
        route(api, "a", "a.some", filter=["tag", "Eq", "g2"])
    return stage


def settled(stage: Stage, writers: Writers) -> list[Row]:
    """When everything was copied and is on the disk: what HTTP shows."""
    assert not writers.failures
    with stage.server.client() as api:
        told = set(writers.acked["a"].values())

        def numbers(topic: str) -> set[int]:
            return {json.loads(row["value"])["number"] for row in said(api, topic)[0]}

        eventually(lambda: numbers("a.all") >= told, within_s=60, every_s=0.2, what="all copies")
        some = {number for number in told if number % 5 == 2}
        eventually(lambda: numbers("a.some") >= some, within_s=60, every_s=0.2, what="some copies")
        for name in COPIES:
            on_disk(stage.data_dir, name, head=api.state(name)["head_seq"])
        return everything(api)


def everything(api: Client) -> list[Row]:
    return [row for name in sorted(topic_names(api, "")) for row in said(api, name)[0]]


def bare(found: list[Row]) -> list[tuple[str, int, int, bytes]]:
    return sorted((row["topic"], row["offset"], row["timestamp"], row["value"]) for row in found)


def check(sink: list[Row], truth: list[Row], writers: Writers) -> None:
    twice = {place: count for place, count in Counter(places(sink)).items() if count > 1}
    assert not twice, f"more than once: {list(twice.items())[:10]}"
    assert bare(sink) == bare(truth)
    by_place = {(row["topic"], row["offset"]): json.loads(row["value"])["number"] for row in sink}
    for topic, acked in writers.acked.items():
        assert acked, topic
        for seq, number in acked.items():
            assert by_place[topic, seq] == number
    for copy, wanted in (("a.all", lambda n: True), ("a.some", lambda n: n % 5 == 2)):
        copied = Counter(number for (topic, _), number in by_place.items() if topic == copy)
        for number in filter(wanted, writers.acked["a"].values()):
            assert copied[number] == 1, (copy, number)


# --- without Spark: many rounds ---


class Checkpointed:
    """What Spark does with a source: an offset is written down, its batch is run, then the batch is committed. A query
    that dies in between runs the same batch again, and the sink takes each batch once."""

    def __init__(self, data_dir: Path, dice: random.Random, **options: Any) -> None:
        self._play = StreamPlay(data_dir, startingOffsets="earliest", **options)
        self._dice = dice
        self._planned: dict[str, Any] | None = None
        self.sink: list[Row] = []
        self.deaths = 0

    def die(self) -> None:
        self._play.restart()
        self.deaths += 1

    def step(self) -> bool:
        """Whether there was anything."""
        play = self._play
        if self._planned is None:
            end = play.next_offset()
            if json.dumps(end) == json.dumps(play.at):
                return False
            self._planned = end
        if self._dice.random() < 0.1:
            self.die()
            return True
        batch = play.batch(play.at, self._planned)
        if self._dice.random() < 0.1:
            self.die()  # the sink never got it, or got it and was not told so: it is run again
            again = play.batch(play.at, self._planned)
            assert bare(again) == bare(batch)
            batch = again
        self.sink += batch
        play.at, self._planned = self._planned, None
        return True

    def drain(self) -> None:
        while self.step():
            pass


@pytest.mark.timeout(1_800)
def test_batches_that_are_run_again(start_server: StartServer, tmp_path: Path) -> None:
    dice = random.Random(seed())
    stage = open_stage(start_server, tmp_path, dice)
    query = Checkpointed(tmp_path / "data", dice, maxOffsetsPerTrigger=str(dice.choice([50, 500, 1_000_000])))
    happened = []
    with Writers(stage, *WRITTEN, pause_s=0.03) as writers:
        for _ in range(rounds(6)):
            until = time.monotonic() + dice.uniform(0.1, 1.0)
            while time.monotonic() < until:
                query.step()
            happened.append(stage.disturb())
            query.step()
    truth = settled(stage, writers)
    query.drain()
    print(happened, f"{query.deaths} deaths of the query")
    check(query.sink, truth, writers)


# --- with Spark, into Parquet ---


def begin(spark: SparkSession, data_dir: Path, folder: Path, *, most: int, now: bool = False) -> StreamingQuery:
    df = (
        spark.readStream.format(FORMAT)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(most))
        .load(str(data_dir))
    )
    writer = df.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    writer = writer.trigger(availableNow=True) if now else writer.trigger(processingTime="100 milliseconds")
    return writer.start(str(folder / "sink"))


def failure(query: StreamingQuery) -> str | None:
    found = query.exception()
    return None if found is None else str(found)


@pytest.mark.timeout(3_600)
def test_into_a_checkpointed_sink(spark: SparkSession, start_server: StartServer, tmp_path: Path) -> None:
    register(spark)
    dice = random.Random(seed())
    stage = open_stage(start_server, tmp_path, dice)
    happened: list[str] = []
    with Writers(stage, *WRITTEN, pause_s=0.03) as writers:
        query = begin(spark, stage.data_dir, tmp_path, most=1_000)
        for _ in range(rounds(5)):
            time.sleep(dice.uniform(0.2, 2.5))  # no condition is waited for: the moment is to be any
            if dice.random() < 0.6:
                query.stop()
                assert failure(query) is None
                happened.append("query")
                if dice.random() < 0.5:
                    happened.append(stage.disturb())
                query = begin(spark, stage.data_dir, tmp_path, most=dice.choice([50, 1_000, 100_000]))
            else:
                happened.append(stage.disturb())
            assert failure(query) is None
    truth = settled(stage, writers)
    query.stop()
    assert failure(query) is None
    query = begin(spark, stage.data_dir, tmp_path, most=100_000, now=True)
    assert query.awaitTermination(300)
    assert failure(query) is None
    print(happened)
    check(collected(spark.read.parquet(str(tmp_path / "sink"))), truth, writers)
