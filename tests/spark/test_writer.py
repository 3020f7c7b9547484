"""`df.write.format("topics")` in a real Spark to a real server: what arrives, what is refused, what is repeated."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from e2e.client import Client
from e2e.server import Server, eventually
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark.faltering import FalteringSource
from spark_pipeline.source import register


@pytest.fixture(autouse=True)
def source(spark: SparkSession) -> None:
    register(spark)
    spark.dataSource.register(FalteringSource)


def save(df: DataFrame, server: Server, topic: str | None = None, *, kind: str = "topics", **options: object) -> None:
    given = {"url": server.url, **({} if topic is None else {"topic": topic}), **options}
    df.write.format(kind).mode("append").options(**given).save()


def records(api: Client, topic: str) -> list[dict[str, Any]]:
    """All of a topic, in the order of their seqs."""
    found: list[dict[str, Any]] = []
    at = 0
    while True:
        page = api.diff(topic, at, limit=1_000, include_tags=True)
        assert page["tombstone"] is None
        found += page["records"]
        at = page["next_from_seq"]
        if page["caught_up"]:
            return found


def data(api: Client, topic: str) -> list[Any]:
    return [record["data"] for record in records(api, topic)]


def fails(write: Callable[[], object]) -> str:
    """The line that says what is wrong: the last one of the Python traceback that Spark quotes."""
    with pytest.raises(PySparkException) as caught:
        write()
    lines = re.findall(r"^(?:topics\.errors|spark_pipeline)\.[\w.]+: (.*)$", str(caught.value), flags=re.MULTILINE)
    assert lines, str(caught.value)
    return str(lines[0])


# --- what arrives ---


@pytest.mark.gate
def test_json_with_tag_node_and_meta(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    df = spark.createDataFrame(
        [
            ('{"b": 1.50, "a": [1e2]}', "k1", "n1", {"x": "1"}, 7),
            ('"é"', None, None, None, 8),
        ],
        "value string, key string, node string, meta map<string,string>, offset bigint",
    )
    save(df.coalesce(1), server, topic)
    first, second = records(api, topic)
    assert (first["$seq"], first["$tag"], first["$node"], first["meta"]) == (1, "k1", "n1", {"x": "1"})
    assert {"$seq", "$ts", "data"} == set(second)
    assert b'"data":{"b": 1.50, "a": [1e2]}' in api.diff(topic).raw


def test_all_rows_of_all_partitions_each_in_its_order(
    spark: SparkSession, server: Server, api: Client, topic: str
) -> None:
    df = spark.range(0, 25_000, numPartitions=4).select(F.struct(F.spark_partition_id().alias("p"), "id").alias("row"))
    save(df.select(F.to_json("row").alias("value")), server, topic, batchRecords=700)
    found = data(api, topic)
    assert sorted(row["id"] for row in found) == list(range(25_000))
    for partition in range(4):
        ids = [row["id"] for row in found if row["p"] == partition]
        assert ids == sorted(ids)
        assert len(ids) == 6_250


def test_nothing_to_write(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    save(spark.range(0), server, topic)
    assert api.state(topic).error == "topic_not_found"


def test_columns_become_what_to_json_makes_of_them(
    spark: SparkSession, server: Server, api: Client, topic: str
) -> None:
    df = spark.sql(
        """
        SELECT id, cast(id AS tinyint) b, cast(id * 1000 AS smallint) s, -id i, id > 1 flag,
               cast(id / 10 AS float) f, id / 3 d, cast(id AS decimal(20,3)) / 8 dec,
               CASE id WHEN 0 THEN cast('NaN' AS double) WHEN 1 THEN cast('-Infinity' AS double) ELSE 1e300 END odd,
               if(id = 2, null, concat('é"', id)) text, cast(concat('x', id) AS binary) bin,
               date_add(date'2024-02-28', cast(id AS int)) day, null nothing,
               if(id = 1, null, array(cast(id AS float), null, 0.1f)) floats,
               map(id, id * 2, -1, null) numbered, map('k', array(named_struct('x', id, 'y', null))) deep,
               named_struct('a', if(id = 1, null, id), 'b', named_struct('c', cast(0.1 AS float))) nested,
               timestamp id_free, cast(null AS map<string,int>) no_map
        FROM range(4) CROSS JOIN (SELECT 'not a time' timestamp)
        """
    )
    expected = [json.loads(row[0]) for row in df.select(F.to_json(F.struct("*"))).collect()]
    save(df.coalesce(1), server, topic)
    assert data(api, topic) == expected


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu"])
def test_timestamps_are_the_same_moment_to_the_microsecond(
    spark: SparkSession, server: Server, api: Client, topic: str, zone: str
) -> None:
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        df = spark.sql(
            "SELECT timestamp'2024-02-29 23:59:59.123456Z' at, array(timestamp'1969-12-31 23:59:59Z') list, "
            "timestamp_ntz'2024-02-29 23:59:59.000001' wall"
        )
        save(df, server, topic)
        (found,) = data(api, topic)
        back = spark.createDataFrame([(json.dumps(found),)], "text string").select(
            F.from_json("text", df.schema).alias("row")
        )
        assert back.select("row.*").collect() == df.collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert found == {
        "at": "2024-02-29T23:59:59.123456Z",
        "list": ["1969-12-31T23:59:59Z"],
        "wall": "2024-02-29T23:59:59.000001",
    }


def test_a_column_names_the_topic_unless_the_option_does(
    spark: SparkSession, server: Server, api: Client, topic: str
) -> None:
    df = spark.range(0, 10, numPartitions=1).selectExpr(
        f"concat('{topic}-', id % 3) AS topic", "cast(id AS string) AS value"
    )
    save(df, server, batchRecords=2)
    assert [data(api, f"{topic}-{at}") for at in range(3)] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    save(df, server, topic)
    assert data(api, topic) == list(range(10))
    assert data(api, f"{topic}-0") == [0, 3, 6, 9]


def test_what_was_read_can_be_written_elsewhere(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    api.append_records(
        topic,
        [{"data": {"n": at}, "tag": f"k{at}", "node": "web", "meta": {"m": at}} for at in range(30)],
    )
    read = (
        spark.read.format("topics")
        .options(path=str(server.data_dir), subscribe=topic, includeHeaders="true")
        .load()
        .orderBy("offset")
    )
    save(read.coalesce(1), server, f"{topic}-copy")

    def kept(name: str) -> list[dict[str, Any]]:
        return [{field: value for field, value in record.items() if field != "$ts"} for record in records(api, name)]

    assert kept(f"{topic}-copy") == kept(topic)
    assert len(kept(topic)) == 30


def test_text_and_base64(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    df = spark.createDataFrame([("say {",), (None,)], "value string").coalesce(1)
    save(df, server, topic, valueFormat="text")
    save(df.select(F.col("value").cast("binary")), server, topic, valueFormat="base64")
    assert data(api, topic) == ["say {", None, "c2F5IHs=", None]


# --- what is refused ---


def test_only_append_is_a_mode(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    writer = spark.range(3).write.format("topics").options(url=server.url, topic=topic)
    assert fails(lambda: writer.mode("overwrite").save()).startswith("topics are append only")
    for mode in ("errorifexists", "ignore"):  # Spark asks nobody
        with pytest.raises(PySparkException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
            writer.mode(mode).save()
    assert api.state(topic).error == "topic_not_found"


def test_a_mistake_is_found_before_anything_is_written(spark: SparkSession, server: Server) -> None:
    assert fails(lambda: save(spark.range(1), server)).startswith("option topic: is missing")
    assert fails(lambda: save(spark.range(1), server, "t", batchRecords="0")).startswith("option batchRecords: '0'")
    assert fails(lambda: save(spark.sql("SELECT interval 1 month m"), server, "t")).startswith("column m: interval")


def test_a_row_that_is_not_json_is_named(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    df = spark.range(0, 100, numPartitions=2).selectExpr("if(id = 70, 'oops', cast(id AS string)) AS value")
    said = fails(lambda: save(df, server, topic, batchRecords=5))
    assert said.startswith("partition 1, row 21: column value: is not JSON: invalid character (byte 0)")
    assert "oops" not in said  # what is in a row is not for logs
    found = data(api, topic)
    assert sorted(found) == sorted(set(found))  # four attempts, and what comes before it is there once
    assert {50, 69} <= set(found)
    assert 71 not in found


def test_a_row_that_the_server_refuses_is_named(spark: SparkSession, server: Server, topic: str) -> None:
    df = spark.range(0, 100, numPartitions=1).selectExpr("id", "repeat('x', if(id = 42, 300, 3)) AS key")
    said = fails(lambda: save(df, server, topic, batchRecords=10))
    assert said == f"topic {topic}, partition 0, row 43 is refused: tag is longer than 256 bytes (invalid_request)"


def test_no_server(spark: SparkSession, server: Server, topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    df = spark.range(1)
    said = fails(lambda: save(df, server, topic, url=f"http://127.0.0.1:{port}", retries=1))
    assert f"http://127.0.0.1:{port}: connection refused, 2 times in" in said


def test_keys(
    spark: SparkSession,
    start_server: Callable[..., Server],
    tmp_path: Path,
    topic: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = start_server(ready=False, TOPICS_API_KEYS="gr33n:write:spark,0ther:write:elsewhere,reader:read")
    with server.client() as client:
        eventually(lambda: client.get("/v0/ready").status == 200)
    file = tmp_path / "key"
    file.write_text("gr33n\n")
    df = spark.range(10).coalesce(1)
    save(df, server, topic, apiKeyFile=str(file))  # a key that may write and do nothing else
    with server.client() as client:
        answer = client.send("POST", f"/v0/topics/{topic}/diff", {}, headers={"Authorization": "Bearer reader"})
    assert [row["id"] for row in answer.data] == list(range(10))
    assert "(unauthorized). Name a file with the key in option apiKeyFile" in fails(lambda: save(df, server, topic))
    assert "(unauthorized)" in fails(lambda: save(df, server, topic, apiKey="wr0ng"))
    assert "(forbidden)" in fails(lambda: save(df, server, topic, apiKey="0ther"))
    shown = capfd.readouterr()
    assert not {"gr33n", "wr0ng", "0ther"} & set(re.findall(r"\w+", shown.out + shown.err))


def test_a_limit_of_the_server_is_waited_for_and_then_told(
    spark: SparkSession, start_server: Callable[..., Server], topic: str
) -> None:
    server = start_server(TOPICS_MAX_TOPICS=1)
    save(spark.range(3), server, "first")
    said = fails(lambda: save(spark.range(3).coalesce(1), server, "second", retries=0))
    assert said.startswith("topic second, partition 0, rows 1 to 3: http://127.0.0.1:")
    assert "max_topics (1)" in said
    assert said.endswith("(throttled), once in 0 s. Option retries says how often to try again")


# --- what is repeated ---


ROWS = 12_000
FAULTS = {"between two batches": 4_000, "within a batch": 3_950, "before the first row": 0, "after the last row": -1}


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(rows, id=name, marks=[pytest.mark.gate] if name == "within a batch" else [])
        for name, rows in FAULTS.items()
    ],
)
def test_a_task_that_is_tried_again_writes_once(
    spark: SparkSession, server: Server, api: Client, topic: str, after: int
) -> None:
    rows = spark.range(0, ROWS, numPartitions=2)
    save(rows, server, topic, kind="faltering", batchRecords=100, attempts=2, after=after)
    found = data(api, topic)
    assert sorted(row["id"] for row in found) == list(range(ROWS))


def test_rows_that_come_in_another_order_may_come_twice_but_none_is_lost(
    spark: SparkSession, server: Server, api: Client, topic: str
) -> None:
    rows = spark.range(0, ROWS, numPartitions=1)
    save(rows, server, topic, kind="faltering", batchRecords=100, after=3_950, reversed="")
    found = [row["id"] for row in data(api, topic)]
    assert set(found) == set(range(ROWS))
    assert len(found) == ROWS + 3_900


def test_a_write_that_fails_leaves_what_it_has_written(
    spark: SparkSession, server: Server, api: Client, topic: str
) -> None:
    rows = spark.range(0, ROWS, numPartitions=1)
    with pytest.raises(PySparkException, match="between two rows"):
        save(rows, server, topic, kind="faltering", batchRecords=100, attempts=4, after=3_950)
    assert [row["id"] for row in data(api, topic)] == list(range(3_900))


def test_the_same_write_twice_is_two_writes(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    df = spark.range(5).coalesce(1)
    save(df, server, topic)
    save(df, server, topic)
    assert len(data(api, topic)) == 10


def test_a_job_with_a_prefix_may_be_run_again(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    df = spark.range(0, 5_000, numPartitions=3)
    for _ in range(2):
        save(df, server, topic, batchRecords=100, idempotencyPrefix="load-2024-02-29")
    assert sorted(row["id"] for row in data(api, topic)) == list(range(5_000))
    save(df, server, topic, idempotencyPrefix="load-2024-03-01")
    assert len(data(api, topic)) == 10_000


def test_later_than_the_window_it_comes_twice(spark: SparkSession, server: Server, api: Client, topic: str) -> None:
    api.put(topic, idempotency_window_ms=1)
    for _ in range(2):
        save(spark.range(5).coalesce(1), server, topic, idempotencyPrefix="p")
    assert len(data(api, topic)) == 10


def test_a_server_that_is_killed_meanwhile(
    spark: SparkSession, start_server: Callable[..., Server], topic: str
) -> None:
    first = start_server()
    over = Event()
    midway: list[bool] = []

    def kill() -> None:
        with first.client() as client:
            eventually(lambda: client.state(topic).json.get("head_seq", 0) > 1_000, what="1,000 records")
        first.kill()
        midway.append(not over.is_set())
        start_server(TOPICS_PORT=first.port)

    killer = Thread(target=kill)  # Spark knows its sources in the thread that made the session alone
    killer.start()
    save(spark.range(0, 30_000, numPartitions=2), first, topic, batchRecords=20, retries=30)
    over.set()
    killer.join()
    assert midway == [True]
    with first.client() as client:  # the port is the second one's now
        found = [row["id"] for row in data(client, topic)]
    assert sorted(found) == list(range(30_000))


# --- streams ---


class Lines:
    """A folder that a stream reads; each file is one micro-batch."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self._folder = folder
        self._checkpoint = folder.with_name("checkpoint")
        self._folder.mkdir()
        self._files = 0
        self.df = spark.readStream.schema("id bigint").option("maxFilesPerTrigger", 1).json(str(folder))

    def add(self, *ids: int) -> None:
        self._files += 1
        draft = self._folder / f".{self._files}"
        draft.write_text("".join(f'{{"id": {number}}}\n' for number in ids))
        draft.rename(self._folder / f"{self._files:05}.json")

    def run(self, server: Server, topic: str, *, kind: str = "topics", **options: object) -> None:
        """The query from its checkpoint on, over all that is there."""
        query = (
            self.df.writeStream.format(kind)
            .options(url=server.url, topic=topic, checkpointLocation=str(self._checkpoint), **options)
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()


@pytest.fixture
def lines(tmp_path: Path, spark: SparkSession) -> Lines:
    return Lines(tmp_path / "in", spark)


@pytest.mark.gate
def test_a_stream(lines: Lines, server: Server, api: Client, topic: str) -> None:
    """Batches that are alike are not taken for repetitions."""
    for _ in range(3):
        lines.add(1, 2)
    lines.run(server, topic)
    assert [row["id"] for row in data(api, topic)] == [1, 2] * 3
    lines.add(1, 2)
    lines.run(server, topic)
    assert [row["id"] for row in data(api, topic)] == [1, 2] * 4


@pytest.mark.parametrize("options", [{}, {"idempotencyPrefix": "mine"}], ids=["query", "prefix"])
def test_a_stream_that_fails_within_a_batch_and_is_started_again(
    lines: Lines, tmp_path: Path, server: Server, api: Client, topic: str, options: dict[str, Any]
) -> None:
    well = tmp_path / "well"
    faults: dict[str, Any] = {"kind": "faltering", "batchRecords": 50, "attempts": 4, "unless": well}
    lines.add(*range(100))
    with pytest.raises(StreamingQueryException, match="after the last row"):
        lines.run(server, topic, **faults, **options)
    assert [row["id"] for row in data(api, topic)] == list(range(100))  # of a batch that is not committed
    well.touch()
    lines.run(server, topic, **faults, **options)
    well.unlink()
    lines.add(*range(100, ROWS))
    with pytest.raises(StreamingQueryException, match="between two rows"):
        lines.run(server, topic, after=1_010, **faults, **options)
    assert [row["id"] for row in data(api, topic)] == list(range(1_100))
    well.touch()
    lines.add(*range(ROWS, ROWS + 100))
    lines.run(server, topic, **faults, **options)
    assert [row["id"] for row in data(api, topic)] == list(range(ROWS + 100))


def test_a_stream_that_would_overwrite_is_refused(lines: Lines, server: Server, topic: str) -> None:
    lines.add(1)
    query = (
        lines.df.groupBy()
        .count()
        .writeStream.format("topics")
        .options(url=server.url, topic=topic, checkpointLocation=str(lines._checkpoint))
        .outputMode("complete")
        .start()
    )
    assert fails(lambda: query.awaitTermination(60)).startswith("topics are append only")


def test_in_foreach_batch_the_prefix_names_the_batch(lines: Lines, server: Server, api: Client, topic: str) -> None:
    for _ in range(2):
        lines.add(1, 2)

    def write(df: DataFrame, number: int) -> None:
        for _ in range(2):  # as if the first had been followed by a failure
            save(df.coalesce(1), server, topic, idempotencyPrefix=f"copy-{number}")

    query = (
        lines.df.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(lines._checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(90)
    assert [row["id"] for row in data(api, topic)] == [1, 2, 1, 2]
