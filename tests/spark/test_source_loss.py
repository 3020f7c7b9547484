"""failOnDataLoss: what counts as lost, that the range is exact, and that a query which does not mind goes on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.client import Client
from e2e.server import Server, eventually
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_pipeline.plan import DataLoss
from spark_pipeline.source import register

from .sourceplay import collected, frame, rows, said

pytestmark = pytest.mark.timeout(400)  # the first query of a session takes long on a busy machine

REMEDY = ". Start behind them, or set failOnDataLoss to false to go on without them"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("loss")
    server = Server(folder / "data", log=folder / "server.log")
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


def loss(data_dir: Path, topic: str, **options: str) -> str:
    with pytest.raises(DataLoss) as caught:
        rows(data_dir, subscribe=topic, **options)
    return str(caught.value)


def told(data_dir: Path, topic: str, **options: str) -> tuple[list[str], list[int]]:
    """(what a query that goes on is told, the offsets it gets)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = rows(data_dir, subscribe=topic, failOnDataLoss="false", **options)
    return [str(each.message) for each in caught], [row["offset"] for row in found]


def test_what_a_cap_took(server: Server, api: Client, topic: str) -> None:
    api.put(topic, cap_records=4)
    api.append(topic, *range(10))
    (tombstone,) = said(api, topic)[1]
    assert (tombstone["gap_from"], tombstone["gap_to"]) == (1, 6)
    at = f'{{"{topic}": 3}}'
    assert loss(server.data_dir, topic, startingOffsets=at) == (
        f"topic {topic}: records 3 to 6 are gone (reason: cap){REMEDY}"
    )
    assert told(server.data_dir, topic, startingOffsets=at) == (
        [f"topic {topic}: records 3 to 6 are gone (reason: cap)"],
        [7, 8, 9, 10],
    )
    # Whoever begins with what there is has lost nothing, and neither has who begins behind it.
    for start in ("earliest", f'{{"{topic}": 7}}'):
        assert [row["offset"] for row in rows(server.data_dir, subscribe=topic, startingOffsets=start)] == [7, 8, 9, 10]
    # Of a range that ends within the gap only that part is named.
    assert loss(server.data_dir, topic, startingOffsets=at, endingOffsets=f'{{"{topic}": 6}}') == (
        f"topic {topic}: records 3 to 5 are gone (reason: cap){REMEDY}"
    )


def test_what_a_ttl_took(server: Server, api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=1_500)
    api.append(topic, 1, 2, 3)
    eventually(lambda: api.state(topic)["count"] == 0, what="expiry")
    api.append(topic, 4)
    at = f'{{"{topic}": 1}}'
    assert loss(server.data_dir, topic, startingOffsets=at) == (
        f"topic {topic}: records 1 to 3 are gone (reason: ttl){REMEDY}"
    )
    messages, found = told(server.data_dir, topic, startingOffsets=at)
    assert messages == [f"topic {topic}: records 1 to 3 are gone (reason: ttl)"]
    assert found == [4]


def test_deletes_are_no_gap(server: Server, api: Client, topic: str) -> None:
    api.append_records(topic, [{"data": n, "tag": "x" if n % 2 else None} for n in range(1, 11)])
    api.delete(topic, before_seq=3)
    api.delete(topic, match=["tag", "Eq", "x"])
    found = rows(server.data_dir, subscribe=topic, startingOffsets=f'{{"{topic}": 1}}')
    assert [row["offset"] for row in found] == [4, 6, 8, 10]
    api.delete(topic, before_seq=11)
    assert rows(server.data_dir, subscribe=topic, startingOffsets=f'{{"{topic}": 1}}') == []


def test_a_topic_that_was_made_again(server: Server, api: Client, topic: str) -> None:
    api.append(topic, *range(10))
    api.drop(topic)
    api.append(topic, "new", "newer")
    at = f'{{"{topic}": 11}}'  # of the topic that was
    assert loss(server.data_dir, topic, startingOffsets=at) == (
        f"topic {topic}: records 3 to 10 are gone (the start is beyond the end, 2: the topic was made again, or the "
        f"offset is wrong){REMEDY}"
    )
    messages, found = told(server.data_dir, topic, startingOffsets=at)
    assert len(messages) == 1
    assert found == [1, 2]


def test_an_end_that_is_not_there_yet(server: Server, api: Client, topic: str) -> None:
    api.append(topic, 1, 2, 3)
    end = f'{{"{topic}": 9}}'
    assert loss(server.data_dir, topic, endingOffsets=end) == (
        f"topic {topic}: records 4 to 8 are gone (it ends with 3){REMEDY}"
    )
    assert told(server.data_dir, topic, endingOffsets=end)[1] == [1, 2, 3]


def test_holes(start_server: Callable[..., Server]) -> None:
    """Records that were in memory only go with the process; what was logged before and after them stays."""
    server = start_server()
    with server.client() as api:
        api.put("t", durability="disk")
        api.append("t", 1, 2, 3)
        api.put("t", durability="ephemeral")
        api.append("t", 4, 5)
        api.put("t", durability="disk")
        api.append("t", 6)
    server.kill()
    restarted = start_server(data_dir=server.data_dir)
    with restarted.client() as api:
        api.append("t", 7)
        live, lost = said(api, "t")
    assert [(each["gap_from"], each["gap_to"]) for each in lost] == [(4, 5)]  # over HTTP the reason is "cap"
    assert [row["offset"] for row in live] == [1, 2, 3, 6, 7]
    assert loss(server.data_dir, "t") == f"topic t: records 4 to 5 are gone (reason: lost){REMEDY}"
    assert told(server.data_dir, "t") == (
        ["topic t: records 4 to 5 are gone (reason: lost)"],
        [1, 2, 3, 6, 7],
    )
    assert [row["offset"] for row in rows(server.data_dir, startingOffsets='{"t": 6}')] == [6, 7]
    (hole,) = rows(server.data_dir, view="tombstones")
    assert (hole["reason"], hole["gap_from"], hole["gap_to"], hole["missed"]) == ("lost", 4, 5, 2)
    (row,) = rows(server.data_dir, view="topics")
    assert row["lost"] == 2


@pytest.mark.gate
def test_through_spark(session: SparkSession, server: Server, api: Client, topic: str) -> None:
    api.put(topic, cap_records=4)
    api.append(topic, *range(10))
    options = {"subscribe": topic, "startingOffsets": f'{{"{topic}": 3}}'}
    with pytest.raises(PySparkException) as caught:
        frame(session, server.data_dir, **options).count()
    assert f"topic {topic}: records 3 to 6 are gone (reason: cap)" in str(caught.value)
    assert not re.search(r"^\s+at |Traceback|  File ", str(caught.value), re.M)
    found = collected(frame(session, server.data_dir, failOnDataLoss="false", **options))
    assert sorted(row["offset"] for row in found) == [7, 8, 9, 10]
