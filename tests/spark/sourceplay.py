"""The data source as a test uses it, with a Spark and without one, and the truth to hold it against: what HTTP says.

Rows are dicts with times in epoch milliseconds, however they were read. Without a Spark the same classes run in this
process: what Spark adds is the way to the executors and back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from e2e.client import Answer, Client
from e2e.routing import SHARDS, name_on
from e2e.server import eventually
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as spark_types

from spark_pipeline.options import parse
from spark_pipeline.source import FORMAT, SlicePartition, TopicsReader, TopicsSource
from spark_pipeline.stream import FolderStreamReader
from topics.datadir.view.folder import Folder

Row = dict[str, Any]

_TYPES = {
    "string": spark_types.StringType(),
    "int": spark_types.IntegerType(),
    "bigint": spark_types.LongType(),
    "binary": spark_types.BinaryType(),
    "boolean": spark_types.BooleanType(),
    "timestamp": spark_types.TimestampType(),
}


# --- without a Spark ---------------------------------------------------------------------------------


def schema_of(options: dict[str, str], columns: Iterable[str] | None = None) -> spark_types.StructType:
    """The columns of a view, or some of them."""
    kinds = dict(parse(options).columns)
    return spark_types.StructType(
        [spark_types.StructField(name, _TYPES[kinds[name]]) for name in columns or list(kinds)]
    )


def _given(data_dir: Path, options: dict[str, str]) -> dict[str, str]:
    return {"path": str(data_dir), **options}


def reader(data_dir: Path, *, columns: Iterable[str] | None = None, **options: str) -> TopicsReader:
    given = _given(data_dir, options)
    found = TopicsSource(given).reader(schema_of(given, columns))
    assert isinstance(found, TopicsReader)
    return found


def stream_reader(data_dir: Path, **options: str) -> FolderStreamReader:
    given = _given(data_dir, options)
    found = TopicsSource(given).streamReader(schema_of(given))
    assert isinstance(found, FolderStreamReader)
    return found


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    found: list[Row] = []
    for batch in batches:
        columns = {}
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if pa.types.is_timestamp(field.type):
                micros = column.cast(pa.int64()).to_pylist()
                assert all(value is None or value % 1_000 == 0 for value in micros)
                columns[field.name] = [None if value is None else value // 1_000 for value in micros]
            else:
                columns[field.name] = column.to_pylist()
        found += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return found


def rows(data_dir: Path, *, columns: Iterable[str] | None = None, **options: str) -> list[Row]:
    """Every row, in the order of topics and seqs."""
    made = reader(data_dir, columns=columns, **options)
    return [row for part in made.partitions() for row in rows_of(made.read(part))]


def pieces(made: TopicsReader) -> list[tuple[str, int]]:
    """(topic, first seq) of every batch that the tasks would read."""
    return [
        (each.topic, piece.first)
        for part in made.partitions()
        if isinstance(part, SlicePartition)
        for each in part.parts
        for piece in each.pieces
    ]


# --- with one ----------------------------------------------------------------------------------------


def frame(spark: SparkSession, data_dir: Path, *, schema: str | None = None, **options: str) -> DataFrame:
    made = spark.read.format(FORMAT).options(**options)
    return (made.schema(schema) if schema else made).load(str(data_dir))


def collected(df: DataFrame) -> list[Row]:
    """Rows as `rows` gives them, in any order."""
    times = {
        field.name: F.unix_millis(field.name)
        for field in df.schema.fields
        if isinstance(field.dataType, spark_types.TimestampType)
    }
    found = [row.asDict() for row in (df.withColumns(times) if times else df).collect()]
    return [{name: bytes(cell) if isinstance(cell, bytearray) else cell for name, cell in row.items()} for row in found]


def in_order(found: list[Row], *names: str) -> list[Row]:
    return sorted(found, key=lambda row: [row[name] for name in names or ("topic", "offset")])


# --- the truth ---------------------------------------------------------------------------------------


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    tag: str | None = msgspec.field(name="$tag", default=None)
    node: str | None = msgspec.field(name="$node", default=None)
    meta: msgspec.Raw = msgspec.Raw(b"null")


class _Diff(msgspec.Struct):
    records: list[_Record]
    next_from_seq: int
    caught_up: bool
    tombstone: dict[str, Any] | None


def patient_diff(api: Client, topic: str, at: int) -> Answer:
    """A page of a topic; after a restart, copies may have to be made again first."""
    until = time.monotonic() + 30
    while True:
        answer = api.diff(topic, at, limit=1_000, include_tags=True, include_meta=True)
        if answer.status != 503 or time.monotonic() > until:
            return answer
        time.sleep(0.05)


def said(api: Client, topic: str) -> tuple[list[Row], list[Row]]:
    """(live records with all their headers, tombstones) of a topic, over HTTP; data and meta verbatim."""
    found: list[Row] = []
    lost: list[Row] = []
    at = 0
    while True:
        answer = patient_diff(api, topic, at)
        assert answer.status == 200, answer
        page = msgspec.json.decode(answer.raw, type=_Diff)
        if page.tombstone is not None:
            lost.append(page.tombstone)
        for each in page.records:
            meta = None if bytes(each.meta) == b"null" else bytes(each.meta).decode()
            found.append(
                {
                    "topic": topic,
                    "partition": 0,
                    "offset": each.seq,
                    "timestamp": each.ts,
                    "key": each.tag,
                    "value": bytes(each.data),
                    "node": each.node,
                    "meta": meta,
                }
            )
        at = page.next_from_seq
        if page.caught_up:
            return found, lost


def topic_names(api: Client) -> list[str]:
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = api.list(page_size=1_000, **({} if cursor is None else {"cursor": cursor}))
        found += [row["topic"] for row in page["topics"]]
        cursor = page.json.get("next_cursor")
        if cursor is None:
            return found


def append_raw(api: Client, topic: str, records: list[bytes], *, more: bytes = b"") -> list[int]:
    """Records spelt as the test spells them."""
    answer = api.send("POST", f"/v0/topics/{topic}", content=b'{"records":[' + b",".join(records) + b"]" + more + b"}")
    assert answer.status in (200, 201), answer
    return list(answer["seqs"])


def on_disk(data_dir: Path, *names: str, head: int | None = None) -> None:
    """Wait until all that was copied into these topics is on the disk."""

    def there() -> bool:
        found = {topic.name: topic for topic in Folder(str(data_dir)).topics}
        return all(found[name].disk_seq >= (found[name].head_seq if head is None else head) for name in names)

    eventually(there, every_s=0.1, what=f"copies of {names} on the disk")


def snapshots(api: Client) -> None:
    """Make every shard write one, as it does soon after a topic was dropped."""
    for shard in range(SHARDS):
        name = name_on(shard, "passing")
        assert api.put(name).status == 201
        assert api.drop(name)["deleted"]


def flushed(api: Client, data_dir: Path, topic: str, *, segments: int = 1) -> None:
    """Wait until a snapshot names so many segments of a topic. One that is written before a flush does not."""

    def there() -> bool:
        snapshots(api)
        found = {each.name: each for each in Folder(str(data_dir)).topics}
        return topic in found and len(found[topic].segments) >= segments

    eventually(there, every_s=0.3, what=f"{segments} segments of {topic}")


# --- streams -----------------------------------------------------------------------------------------


class StreamPlay:
    """A query as Spark runs one, step by step: offsets go through JSON, and a batch is fixed by two of them."""

    def __init__(self, data_dir: Path, *, available_now: bool = False, **options: str) -> None:
        self.reader = stream_reader(data_dir, **options)
        self._options = options
        self._data_dir = data_dir
        self.at: dict[str, Any] = json.loads(json.dumps(self.reader.initialOffset()))
        if available_now:
            self.reader.prepareForTriggerAvailableNow()

    def restart(self) -> None:
        """As from a checkpoint: nothing is kept but where it was."""
        self.reader = stream_reader(self._data_dir, **self._options)

    def next_offset(self) -> dict[str, Any]:
        limit = self.reader.getDefaultReadLimit()
        found: dict[str, Any] = json.loads(json.dumps(self.reader.latestOffset(self.at, limit)))
        return found

    def batch(self, start: dict[str, Any], end: dict[str, Any]) -> list[Row]:
        parts = self.reader.partitions(start, end)
        return [row for part in parts for row in rows_of(self.reader.read(part))]

    def step(self) -> list[Row] | None:
        """The next batch; None if there is nothing new, which Spark sees by the text of the offsets."""
        end = self.next_offset()
        if json.dumps(end) == json.dumps(self.at):
            return None
        found = self.batch(self.at, end)
        self.at = end
        return found

    def drain(self) -> list[Row]:
        found: list[Row] = []
        while (batch := self.step()) is not None:
            found += batch
        return found


def places(found: list[Row]) -> list[tuple[str, int]]:
    return [(row["topic"], row["offset"]) for row in found]
