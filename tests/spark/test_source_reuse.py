"""One frame in many queries: none of them changes what another sees, whatever the setting for predicates.

Spark keeps one plan for each loaded frame, so what a plan leaves out is left out of every scan of the frame. The
numbers that are expected come from what HTTP says, in plain Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
from e2e.client import Client, unique
from e2e.server import Server
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_pipeline.source import register

from .sourceplay import Row, frame, said

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
RECORDS = 300

Accepts = Callable[[Row], bool]


class Scene(NamedTuple):
    server: Server
    topics: tuple[str, str]
    records: list[Row]

    def load(self, session: SparkSession) -> DataFrame:
        return frame(session, self.server.data_dir, subscribe=",".join(self.topics))

    def count(self, accepts: Accepts = lambda row: True) -> int:
        return sum(1 for row in self.records if accepts(row))

    def predicates(self) -> list[tuple[str, Accepts]]:
        first, second = self.topics
        middle = self.records[RECORDS // 2]["timestamp"]
        return [
            ("offset <= 100", lambda row: row["offset"] <= 100),
            ("offset > 250", lambda row: row["offset"] > 250),
            (f"topic = '{first}'", lambda row: row["topic"] == first),
            (f"topic = '{second}' AND offset < 9", lambda row: row["topic"] == second and row["offset"] < 9),
            ("key = 'a'", lambda row: row["key"] == "a"),
            (f"timestamp >= timestamp_millis({middle})", lambda row: row["timestamp"] >= middle),
            ("false", lambda row: False),
            ("offset % 7 = 3", lambda row: row["offset"] % 7 == 3),
        ]


@pytest.fixture(scope="module")
def scene(api: Client, server: Server) -> Scene:
    topics = unique("twice"), unique("twice")
    for name in topics:
        for first in range(0, RECORDS, 50):
            records = [{"data": n, "tag": "ab"[n % 2] if n % 3 else None} for n in range(first, first + 50)]
            assert api.append_records(name, records).status in (200, 201)
    return Scene(server, topics, [row for name in topics for row in said(api, name)[0]])


@pytest.fixture(scope="module", params=["true", "false"], ids=["on", "off"])
def session(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[SparkSession]:
    made = spark.newSession()
    made.conf.set(PUSHDOWN, request.param)
    register(made)
    yield made
    made.catalog.dropTempView("twice")


@pytest.mark.gate
def test_a_predicate_of_one_query_is_not_one_of_the_next(session: SparkSession, scene: Scene) -> None:
    df = scene.load(session)
    assert df.where("offset <= 100").count() == 200
    assert df.count() == scene.count() == 2 * RECORDS


def test_queries_in_any_order(session: SparkSession, scene: Scene) -> None:
    df = scene.load(session)
    rng = random.Random(7)
    asked = [*scene.predicates(), ("true", lambda row: True)] * 2
    rng.shuffle(asked)
    for where, accepts in asked:
        assert df.where(where).count() == scene.count(accepts), where


def test_a_frame_made_of_another_keeps_its_rows(session: SparkSession, scene: Scene) -> None:
    """A plan that was made and not run, and one that is run again."""
    df = scene.load(session)
    few, many = df.where("offset <= 100"), df.where("offset > 100")
    assert few.count() == 200
    assert many.count() == 400
    assert (few.count(), df.count(), many.count(), few.count()) == (200, 600, 400, 200)
    few.explain()
    assert [row.asDict() for row in df.groupBy("topic").count().orderBy("topic").collect()] == [
        {"topic": name, "count": RECORDS} for name in sorted(scene.topics)
    ]


def test_unions(session: SparkSession, scene: Scene) -> None:
    predicates = scene.predicates()
    df = scene.load(session)
    whole = df
    expected = scene.count()
    for where, accepts in predicates:
        whole = whole.union(df.where(where))
        expected += scene.count(accepts)
    assert whole.count() == expected
    for (one, ones), (two, twos) in pairwise(predicates):
        both = df.where(one).unionAll(df.where(two))
        assert both.count() == scene.count(ones) + scene.count(twos), (one, two)
    assert df.where("offset <= 9").union(df).count() == df.union(df.where("offset <= 9")).count() == 618


def test_self_joins(session: SparkSession, scene: Scene) -> None:
    df = scene.load(session)
    keys = ["topic", "offset"]
    for join, expected in (("inner", 200), ("left", 600), ("right", 200), ("full", 600), ("leftanti", 400)):
        assert df.join(df.where("offset <= 100"), keys, join).count() == expected, join
    assert df.where("offset <= 100").join(df.where("offset > 90"), keys).count() == 20
    assert df.where("offset <= 100").exceptAll(df.where("offset > 90")).count() == 180
    left, right = df.alias("l"), df.alias("r")
    following = left.join(right, F.expr("l.topic = r.topic AND l.offset + 1 = r.offset AND r.offset > 290"))
    assert following.count() == 20


def test_views_and_sql(session: SparkSession, scene: Scene) -> None:
    scene.load(session).createOrReplaceTempView("twice")

    def one(text: str) -> object:
        (row,) = session.sql(text).collect()
        return row[0] if len(row) == 1 else tuple(row)

    assert one("SELECT count(*) FROM twice WHERE offset <= 100") == 200
    assert one("SELECT count(*) FROM twice") == 600
    assert one("SELECT (SELECT count(*) FROM twice WHERE offset = 5), count(*) FROM twice") == (2, 600)
    assert one("SELECT count(*) FROM twice WHERE offset = (SELECT max(offset) FROM twice WHERE offset < 9)") == 2
    assert one("SELECT count(*) FROM twice WHERE offset IN (SELECT offset + 1 FROM twice WHERE offset > 290)") == 18
    assert (
        one(
            "WITH few AS (SELECT * FROM twice WHERE offset <= 10) SELECT count(*) FROM few f "
            "FULL JOIN twice t ON f.topic = t.topic AND f.offset = t.offset"
        )
        == 600
    )
    assert (
        one(
            "SELECT count(*) FROM twice t WHERE NOT EXISTS "
            "(SELECT 1 FROM twice f WHERE f.offset <= 100 AND f.topic = t.topic AND f.offset = t.offset)"
        )
        == 400
    )
    assert one("SELECT count(*) FROM (SELECT * FROM twice WHERE offset < 5 UNION ALL SELECT * FROM twice)") == 608
    session.sql("CREATE OR REPLACE TEMP VIEW twice_few AS SELECT * FROM twice WHERE offset <= 100")
    assert one("SELECT count(*) FROM twice_few") == 200
    assert one("SELECT count(*) FROM twice") == 600
    assert one("SELECT count(*) FROM twice_few WHERE offset > 50") == 100
    session.catalog.dropTempView("twice_few")


def test_the_setting_may_change_between_two_queries(spark: SparkSession, scene: Scene) -> None:
    session = spark.newSession()
    register(session)
    df = scene.load(session)
    for setting in ("true", "false", "true"):
        session.conf.set(PUSHDOWN, setting)
        assert df.where("offset <= 100").count() == 200
        assert df.count() == 600


def test_cached_frames(session: SparkSession, scene: Scene) -> None:
    df = scene.load(session)
    few = df.where("offset <= 100").cache()
    try:
        assert (few.count(), df.count(), few.where("offset > 90").count()) == (200, 600, 20)
    finally:
        few.unpersist()


# --- heads -------------------------------------------------------------------------------------------


def _written(api: Client, topic: str, count: int) -> None:
    assert api.append(topic, *range(count)).status in (200, 201)


@pytest.mark.gate
def test_a_frame_pins_heads_with_its_first_query(spark: SparkSession, api: Client, server: Server, topic: str) -> None:
    register(spark)
    _written(api, topic, 10)
    df = frame(spark, server.data_dir, subscribe=topic)
    _written(api, topic, 10)
    assert df.count() == 20, "loading it pins nothing"
    _written(api, topic, 10)
    assert (df.count(), df.where("offset > 15").count(), df.union(df).count()) == (20, 5, 40)
    assert frame(spark, server.data_dir, subscribe=topic).count() == 30


def test_with_the_setting_on_a_predicate_pins_newer_heads(
    spark: SparkSession, api: Client, server: Server, topic: str
) -> None:
    """For all queries after it, and for all scans of one query alike."""
    session = spark.newSession()
    session.conf.set(PUSHDOWN, "true")
    register(session)
    _written(api, topic, 10)
    df = frame(session, server.data_dir, subscribe=topic)
    assert df.count() == 10
    _written(api, topic, 10)
    assert df.count() == 10
    assert df.where("offset > 5").union(df).count() == 15 + 20
    assert df.count() == 20


def test_other_views_are_read_anew_by_every_query(spark: SparkSession, api: Client, server: Server, topic: str) -> None:
    register(spark)
    _written(api, topic, 10)
    df = frame(spark, server.data_dir, view="topics").where(f"topic = '{topic}'").select("count")
    assert [row["count"] for row in df.collect()] == [10]
    _written(api, topic, 5)
    assert [row["count"] for row in df.collect()] == [15]
