"""Predicates: the same rows whether Spark hands them to the source or not; it leaves all of them to Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import pytest
from e2e.client import Client
from e2e.server import Server, eventually
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_pipeline.source import register

from .sourceplay import Row, flushed, frame, said
from .sourceworld import SMALL_SEGMENTS

pytestmark = pytest.mark.timeout(400)  # the first query of a session takes long on a busy machine

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
TOPICS = ("p", "q", "r")


class Scene(NamedTuple):
    data_dir: Path
    records: list[Row]

    @property
    def middle(self) -> int:
        """The $ts of a record in the middle of p."""
        times = [row["timestamp"] for row in self.records if row["topic"] == "p"]
        return int(times[len(times) // 2])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """p: 30 blocks and more, of which some have tags; q: small, in the log; r: with deletes."""
    folder = tmp_path_factory.mktemp("pushdown")
    server = Server(folder / "data", log=folder / "server.log", **SMALL_SEGMENTS)
    try:
        server.wait_ready()
        with server.client() as api:
            for batch in range(40):
                _append(api, "p", batch)
            api.append_records("q", [{"data": n, "tag": t} for n, t in enumerate(["a", None, "b", "ключ", "a"])])
            api.append_records("r", [{"data": n, "tag": "a" if n % 2 else "b"} for n in range(20)])
            api.delete("r", match=["tag", "Eq", "a"])
            flushed(api, server.data_dir, "p", segments=5)
            yield Scene(server.data_dir, [row for name in TOPICS for row in said(api, name)[0]])
    finally:
        server.close()


def _append(api: Client, topic: str, batch: int) -> None:
    """Large enough for a block of their own; every fourth has tags."""
    before = api.state(topic).json.get("last_write_ts") or 0
    records = [
        {"data": f"{batch}:{n}" + "z" * 10_000, "tag": f"{'ab'[n % 2]}" if batch % 4 == 0 else None} for n in range(14)
    ]
    eventually(lambda: datetime.now(UTC).timestamp() * 1_000 > before + 1, every_s=0.001)
    assert api.append_records(topic, records).status in (200, 201)


@pytest.fixture(scope="module")
def on(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    session.conf.set(PUSHDOWN, "true")
    register(session)
    return session


@pytest.fixture(scope="module")
def off(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    session.conf.set(PUSHDOWN, "false")
    session.conf.set("spark.sql.session.timeZone", "America/New_York")  # a time is a time in any zone
    register(session)
    return session


def instant(ms: float) -> str:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    return f"TIMESTAMP '{moment.isoformat(sep=' ', timespec='microseconds')}'"


def _known(value: object) -> bool:
    return value is not None


def cases(scene: Scene) -> list[tuple[str, Callable[[Row], bool]]]:
    ms = scene.middle
    t = instant
    return [
        ("offset = 17", lambda row: row["offset"] == 17),
        ("offset < 5", lambda row: row["offset"] < 5),
        ("5 >= offset", lambda row: row["offset"] <= 5),
        ("offset > 500", lambda row: row["offset"] > 500),
        ("offset BETWEEN 100 AND 130", lambda row: 100 <= row["offset"] <= 130),
        ("offset IN (3, 300, 555)", lambda row: row["offset"] in (3, 300, 555)),
        ("offset < 3 OR offset > 558", lambda row: row["offset"] < 3 or row["offset"] > 558),
        ("NOT (offset > 3)", lambda row: not row["offset"] > 3),
        ("offset <> 1", lambda row: row["offset"] != 1),
        ("offset > 10 AND offset < 5", lambda row: False),
        ("offset > 9223372036854775806", lambda row: False),
        ("offset < -9223372036854775807", lambda row: False),
        ("offset IS NULL", lambda row: False),
        ("offset % 100 = 7", lambda row: row["offset"] % 100 == 7),
        ("topic = 'q'", lambda row: row["topic"] == "q"),
        ("topic IN ('q', 'r', 'x')", lambda row: row["topic"] in "qr"),
        ("topic = 'x'", lambda row: False),
        ("topic > 'p'", lambda row: row["topic"] > "p"),
        ("topic LIKE 'q%'", lambda row: row["topic"].startswith("q")),
        ("NOT (topic = 'p')", lambda row: row["topic"] != "p"),
        ("topic = 'p' AND offset <= 2 OR topic = 'q'", lambda row: row["topic"] == "q" or _first_of_p(row)),
        ("key = 'a'", lambda row: row["key"] == "a"),
        ("key = 'ключ'", lambda row: row["key"] == "ключ"),
        ("key IN ('b', 'nobody')", lambda row: row["key"] == "b"),
        ("key IS NULL", lambda row: row["key"] is None),
        ("key IS NOT NULL", lambda row: _known(row["key"])),
        ("key <=> NULL", lambda row: row["key"] is None),
        ("key <=> 'a'", lambda row: row["key"] == "a"),
        ("NOT (key = 'a')", lambda row: _known(row["key"]) and row["key"] != "a"),
        ("key < 'b'", lambda row: _known(row["key"]) and row["key"] < "b"),
        ("key = 'a' OR key IS NULL", lambda row: row["key"] in ("a", None)),
        ("key = 'a' AND topic = 'r'", lambda row: False),
        (f"timestamp = {t(ms)}", lambda row: row["timestamp"] == ms),
        (f"timestamp < {t(ms)}", lambda row: row["timestamp"] < ms),
        (f"timestamp <= {t(ms)}", lambda row: row["timestamp"] <= ms),
        (f"timestamp > {t(ms)}", lambda row: row["timestamp"] > ms),
        (f"timestamp >= {t(ms)}", lambda row: row["timestamp"] >= ms),
        (f"timestamp > {t(ms - 0.5)} AND timestamp < {t(ms + 0.5)}", lambda row: row["timestamp"] == ms),
        (f"timestamp BETWEEN {t(ms)} AND {t(ms + 5)}", lambda row: ms <= row["timestamp"] <= ms + 5),
        (f"timestamp IN ({t(ms)}, {t(0)})", lambda row: row["timestamp"] == ms),
        (f"timestamp = {t(ms - 0.5)}", lambda row: False),
        (f"timestamp >= {t(ms)} AND key = 'b' AND offset < 400", lambda row: _late_b(row, ms)),
        ("true", lambda row: True),
        ("false", lambda row: False),
    ]


def _first_of_p(row: Row) -> bool:
    return bool(row["topic"] == "p" and row["offset"] <= 2)


def _late_b(row: Row, ms: int) -> bool:
    return bool(row["timestamp"] >= ms and row["key"] == "b" and row["offset"] < 400)


def answers(session: SparkSession, scene: Scene) -> dict[str, list[tuple[str, int]]]:
    """One job for all of them: each predicate is planned and read on its own."""
    chosen: list[DataFrame] = []
    for number, (where, _) in enumerate(cases(scene)):
        df = frame(session, scene.data_dir).where(where)
        chosen.append(df.select(F.lit(number).alias("case"), "topic", "offset"))
    found: dict[str, list[tuple[str, int]]] = {where: [] for where, _ in cases(scene)}
    for row in reduce(DataFrame.union, chosen).collect():
        found[cases(scene)[row["case"]][0]].append((row["topic"], row["offset"]))
    return {where: sorted(each) for where, each in found.items()}


@pytest.mark.parametrize("which", ["on", "off"])
def test_the_rows_are_the_same_with_and_without(request: pytest.FixtureRequest, which: str, scene: Scene) -> None:
    found = answers(request.getfixturevalue(which), scene)
    for where, accepts in cases(scene):
        expected = sorted((row["topic"], row["offset"]) for row in scene.records if accepts(row))
        assert found[where] == expected, where


@pytest.mark.parametrize("which", ["on", "off"])
def test_a_loss_is_a_loss_whatever_the_predicate(
    request: pytest.FixtureRequest, which: str, api: Client, server: Server, topic: str
) -> None:
    api.put(topic, cap_records=3)
    api.append(topic, *range(9))
    df = frame(request.getfixturevalue(which), server.data_dir, startingOffsets=f'{{"{topic}": 1}}')
    with pytest.raises(Exception, match=rf"topic {topic}: records 1 to 6 are gone"):
        df.where("offset > 7").count()


def test_other_views_have_columns_of_the_same_names(on: SparkSession, scene: Scene) -> None:
    found = frame(on, scene.data_dir, view="topics").where("topic = 'q' AND count > 0").collect()
    assert [row["topic"] for row in found] == ["q"]
    assert frame(on, scene.data_dir, view="leases").where("offset > 5").count() == 0
