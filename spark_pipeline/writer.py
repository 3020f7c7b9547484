"""`df.write.format("topics")` and `df.writeStream.format("topics")`: rows become records, appended over HTTP.

    df.write.format("topics").mode("append").option("topic", "orders").save()

Topics are append only: `append` is the only mode. Spark itself refuses `errorifexists`, its default, and `ignore`;
`overwrite` and the streaming mode `complete` are refused here.

Columns: with a column `value` that is the data (option `valueFormat` says what it holds), and `partition`, `offset`,
`timestamp` and `shard` are passed over, so that what was read can be written. Without it all columns but `topic`,
`key`, `node` and `meta` become one JSON object, as to_json would make it, except that timestamps are in UTC with all
their microseconds. Option `topic` wins over a column `topic`, as with Kafka's connector. Each task appends its rows in
their order.

How often a row comes. Each batch carries a key (see delivery.py), so that what is repeated is appended once:

- A task that Spark tries again, a stage that it runs again and a speculative copy send the same batches with the same
  keys: the write's id is drawn on the driver, and the partition's number is Spark's.
- A streaming query that is started again from its checkpoint repeats its last batch with the same keys: they are made
  of the query's id and the batch's number, which the checkpoint holds.
- A job that is started again draws a new id and appends everything again, unless it is given the same
  `idempotencyPrefix`. That must be another one for each write: rows that were written under it before are taken for
  repeated. In foreachBatch it may be made of a name and the batch's number.

A row may come twice, but is never lost, if

- the repetition comes later than the topic's `idempotency_window_ms` (2 minutes unless the topic says otherwise) after
  the first time: give a topic that long tasks or restarts write to a longer one;
- the partition's rows come in another order, are others or are divided otherwise the second time: what follows a
  shuffle without a sort, rand(), current_timestamp() in the rows, other values of `batchRecords` or `batchBytes`.

A write that fails leaves what it has appended.
"""

from __future__ import annotations

import difflib
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as spark
from pyspark.sql.datasource import (
    CaseInsensitiveDict,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from spark_pipeline.delivery import Batcher, CannotWrite, Delivery, Target, parse_url
from spark_pipeline.outbound import BadRow, Shape, ValueFormat, records_of
from topics.errors import TopicsError

DEFAULT_URL = "http://127.0.0.1:4000"
BATCH_RECORDS = (1_000, 1, 10_000)  # default, least, most
BATCH_BYTES = (1 << 20, 1, 60 << 20)  # a record that is longer goes alone; a request may have 64 MiB
TIMEOUT_MS = (30_000, 1, 3_600_000)
RETRIES = (12, 0, 1_000)
MAX_PREFIX_CHARS = 128
KEY_VARIABLE = "TOPICS_API_KEY"
OPTIONS = (
    "url",
    "topic",
    "apiKey",
    "apiKeyFile",
    "valueFormat",
    "batchRecords",
    "batchBytes",
    "timeoutMs",
    "retries",
    "idempotencyPrefix",
)
_OF_SPARK = ("checkpointlocation", "queryname")  # of a stream; they come with ours

# Spark tells the tasks of a micro-batch whose they are. The names are Spark's own (StreamExecution.QUERY_ID_KEY and
# MicroBatchExecution.BATCH_ID_KEY); they are not in its documentation.
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"

_SIDES = ("topic", "key", "node", "meta")  # never part of the data
_PASSED_OVER = ("partition", "offset", "timestamp", "shard")  # of a row that was read
_TEXT = (spark.StringType, spark.BinaryType)
_INTEGRAL = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)
_PLAIN = (
    *_TEXT,
    *_INTEGRAL,
    spark.BooleanType,
    spark.FloatType,
    spark.DoubleType,
    spark.DecimalType,
    spark.DateType,
    spark.TimestampType,
    spark.TimestampNTZType,
    spark.NullType,
)


# --- options -----------------------------------------------------------------------------------------


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a task needs to know. Made on the driver, where mistakes are found before anything is written."""

    target: Target
    shape: Shape
    batch_records: int
    batch_bytes: int
    prefix: str | None


def plan_of(options: Mapping[str, str], schema: spark.StructType, overwrite: bool) -> Plan:
    if overwrite:
        raise TopicsError(
            'topics are append only: write with mode("append"), a stream with outputMode("append"). To begin anew, '
            "delete the topic first"
        )
    options = CaseInsensitiveDict(options)
    _check_names(options)
    kinds = _kinds(schema)
    topic = options.get("topic")
    if topic == "":
        raise TopicsError("option topic: is empty")
    if topic is None and "topic" not in kinds:
        raise TopicsError("option topic: is missing, and there is no column topic. Name the topic to append to")
    for name in ("topic", "key", "node"):
        if name in kinds and not isinstance(kinds[name], _TEXT):
            raise TopicsError(
                f"column {name}: is of type {kinds[name].simpleString()}; it must be string or binary. Cast it, or "
                "rename it if it is meant to be data"
            )
    _check_meta_type(kinds.get("meta"))
    value_format, columns = _data_columns(options, kinds)
    return Plan(
        target=_target(options),
        shape=Shape(topic=topic, value_format=value_format, columns=columns),
        batch_records=_number(options, "batchRecords", BATCH_RECORDS),
        batch_bytes=_number(options, "batchBytes", BATCH_BYTES),
        prefix=_prefix(options),
    )


def _check_names(options: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in OPTIONS}
    for name in options:
        if name.lower() == "path":
            raise TopicsError("option path: records are written over HTTP; give options url and topic, and no path")
        if name.lower() not in known and name.lower() not in _OF_SPARK and not name.startswith("__"):
            near = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"; did you mean {known[near[0]]}?" if near else f": the options are {', '.join(OPTIONS)}"
            raise TopicsError(f"option {name} is unknown{hint}")


def _kinds(schema: spark.StructType) -> dict[str, spark.DataType]:
    kinds: dict[str, spark.DataType] = {}
    for field in schema.fields:
        if field.name in kinds:
            raise TopicsError(f"column {field.name}: is there twice. Rename or drop one")
        kinds[field.name] = field.dataType
    return kinds


def _check_meta_type(kind: spark.DataType | None) -> None:
    if kind is None or isinstance(kind, _TEXT):
        return
    if isinstance(kind, spark.MapType) and {type(kind.keyType), type(kind.valueType)} == {spark.StringType}:
        return
    raise TopicsError(
        f"column meta: is of type {kind.simpleString()}; it must hold JSON text or be map<string,string>. Use to_json, "
        "or rename it if it is meant to be data"
    )


def _data_columns(
    options: Mapping[str, str], kinds: dict[str, spark.DataType]
) -> tuple[ValueFormat | None, tuple[str, ...]]:
    given = options.get("valueFormat")
    if "value" not in kinds:
        if given is not None:
            raise TopicsError("option valueFormat: is for a column value, and there is none")
        names = tuple(name for name in kinds if name not in _SIDES)
        if not names:
            raise TopicsError("there is no column to write: neither value nor any that would be part of the data")
        for name in names:
            _check_type(kinds[name], name)
        return None, names
    others = [name for name in kinds if name not in ("value", *_SIDES, *_PASSED_OVER)]
    if others:
        raise TopicsError(
            f"column {others[0]}: would not be written, because there is a column value. Drop it, or make it part of "
            "value with to_json(struct(...))"
        )
    if not isinstance(kinds["value"], _TEXT):
        raise TopicsError(
            f"column value: is of type {kinds['value'].simpleString()}; it must be string or binary. Use to_json"
        )
    match (given or "json").lower():
        case "json" | "text" | "base64" as value_format:
            return value_format, ()
    raise TopicsError(f"option valueFormat: {given!r} is none of json, text, base64")


def _check_type(kind: spark.DataType, name: str) -> None:
    if isinstance(kind, _PLAIN):
        return
    if isinstance(kind, spark.ArrayType):
        return _check_type(kind.elementType, name)
    if isinstance(kind, spark.StructType):
        for field in kind.fields:
            _check_type(field.dataType, f"{name}.{field.name}")
        return None
    if isinstance(kind, spark.MapType):
        if not isinstance(kind.keyType, (spark.StringType, *_INTEGRAL)):
            raise TopicsError(f"column {name}: keys of a map must be strings or whole numbers to become JSON")
        return _check_type(kind.valueType, name)
    raise TopicsError(f"column {name}: {kind.simpleString()} does not become JSON here. Cast it to a string")


def _target(options: Mapping[str, str]) -> Target:
    return Target(
        **parse_url(options.get("url", DEFAULT_URL)),
        api_key=_api_key(options),
        timeout_s=_number(options, "timeoutMs", TIMEOUT_MS) / 1_000,
        retries=_number(options, "retries", RETRIES),
    )


def _api_key(options: Mapping[str, str]) -> str | None:
    """It is read on the driver and travels with the tasks. No message shows it."""
    path = options.get("apiKeyFile")
    source = "option apiKey" if path is None else f"option apiKeyFile: {path}"
    if path is not None:
        if "apiKey" in options:
            raise TopicsError("options apiKey and apiKeyFile: give one of them")
        try:
            with open(path, encoding="utf-8") as file:
                key = file.read().strip()
        except OSError as error:
            raise TopicsError(f"{source}: {(error.strerror or 'unreadable').lower()}") from None
        except UnicodeDecodeError:
            raise TopicsError(f"{source}: is no text") from None
    elif "apiKey" in options:
        key = options["apiKey"].strip()
    else:
        source = KEY_VARIABLE
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key:
            return None
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise TopicsError(f"{source}: a key is one word of printable ASCII")
    return key


def _number(options: Mapping[str, str], name: str, bounds: tuple[int, int, int]) -> int:
    default, least, most = bounds
    text = options.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal() or not least <= int(text) <= most:
        raise TopicsError(f"option {name}: {text!r} is no whole number from {least} to {most}")
    return int(text)


def _prefix(options: Mapping[str, str]) -> str | None:
    prefix = options.get("idempotencyPrefix")
    if prefix is not None and not (1 <= len(prefix) <= MAX_PREFIX_CHARS and prefix.isprintable()):
        raise TopicsError(f"option idempotencyPrefix: it has 1 to {MAX_PREFIX_CHARS} printable characters")
    return prefix


# --- what Spark calls --------------------------------------------------------------------------------


@dataclass
class Written(WriterCommitMessage):
    """What one task has appended."""

    partition: int
    records: int
    deduped: int  # of these: were there already, from an earlier attempt


def write_rows(plan: Plan, batches: Iterator[pa.RecordBatch], *, write: str, partition: int) -> Written:
    """Append what comes, and return when the server has answered for all of it."""
    delivery = Delivery(plan.target, write=write, partition=partition)
    batcher = Batcher(max_records=plan.batch_records, max_bytes=plan.batch_bytes)
    row = 0
    try:
        for rows in batches:
            for topic, record in records_of(plan.shape, rows):
                row += 1
                for batch in batcher.add(topic, record, row):
                    delivery.send(batch)
        for batch in batcher.finish():
            delivery.send(batch)
    except BadRow as error:
        raise CannotWrite(f"partition {partition}, row {row + 1}: {error}") from None
    finally:
        delivery.close()
    return Written(partition, delivery.records, delivery.deduped)


def _task() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise CannotWrite("rows are written by the tasks of a Spark job alone")
    return context


class TopicsWriter(DataSourceArrowWriter):
    """One write of one DataFrame. Spark makes it on the driver and sends it to every task."""

    def __init__(self, options: Mapping[str, str], schema: spark.StructType, overwrite: bool) -> None:
        self._plan = plan_of(options, schema, overwrite)
        self._write = self._plan.prefix or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write_rows(self._plan, iterator, write=self._write, partition=_task().partitionId())


class TopicsStreamWriter(DataSourceStreamArrowWriter):
    """One micro-batch of a query. Spark makes it anew for each, so what must outlast it comes from the task's query."""

    def __init__(self, options: Mapping[str, str], schema: spark.StructType, overwrite: bool) -> None:
        self._plan = plan_of(options, schema, overwrite)
        self._drawn = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        task = _task()
        write = stream_write(
            self._plan.prefix or task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID), drawn=self._drawn
        )
        return write_rows(self._plan, iterator, write=write, partition=task.partitionId())


def stream_write(query: str | None, batch: str | None, *, drawn: str) -> str:
    """The id of a micro-batch. A Spark that does not name it leaves us with what was drawn for this run of it: then a
    task that is tried again writes once, and a query that is started again may write its last batch twice."""
    return f"{query}/{batch}" if query and batch else drawn
