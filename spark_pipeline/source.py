"""`spark.read.format("topics")`: the data source as Spark sees it. What is read where is plan.py's and batches.py's.

Spark makes the source anew in a process of its own for every step (options, schema, planning), pickles the reader to
the executors, and never gives any of them its session.

Plans: Spark 4.2 and 4.3 keep one plan (the partitions and the pickled reader) for each loaded frame. The first query
makes it and later ones use it, also both sides of a join and every branch of a union. With
spark.sql.python.filterPushdown.enabled each query that has a predicate makes it again and puts it in the place of the
old one, for all scans of the frame. So a reader that left out what a predicate excludes would leave it out of other
queries: there is no `pushFilters` here, and options alone decide what is read.

Mistakes: Spark shows the Python stack of an error, and hides it where an environment variable says so. What is raised
on purpose says all there is to say in one line, so it sets that variable in the process that is about to fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import SparkContext, SparkFiles
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from spark_pipeline import plan, schemas, tables
from spark_pipeline.batches import ARROW, Reading
from spark_pipeline.options import OptionError, Options, parse
from spark_pipeline.plan import Slice, Wanted
from topics.datadir.view.folder import Folder
from topics.errors import TopicsError

FORMAT = "topics"
_HIDE_STACK = "SPARK_HIDE_TRACEBACK"
_TABLE_ROWS = 10_000
_TRIES = 3  # to read a table while a server replaces files
_LOG_COLUMNS = [("offset", "bigint"), ("timestamp", "timestamp"), ("value", "binary")]


class SlicePartition(InputPartition):
    """What one task reads."""

    def __init__(self, parts: list[Slice]) -> None:
        self.parts = parts


class TopicsSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        with plainly():
            options = parse(self.options)
            return schemas.ddl(options.view, headers=options.headers, data=options.data, deleted=options.deleted)

    def reader(self, schema: StructType) -> DataSourceReader:
        with plainly():
            options = _here(self.options)
            if options.max_per_trigger:
                raise OptionError("option maxOffsetsPerTrigger is for streams (spark.readStream), not for spark.read")
            return TopicsReader(options, wanted_columns(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from spark_pipeline.stream import LossStreamReader, RefusedStreamReader, TopicsStreamReader

        try:
            options = _here(self.options)
            kind = LossStreamReader if options.view == "tombstones" else TopicsStreamReader
            return kind(options, wanted_columns(options, schema))
        except TopicsError as exc:
            return RefusedStreamReader(exc)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from spark_pipeline.writer import TopicsWriter

        return TopicsWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from spark_pipeline.writer import TopicsStreamWriter

        return TopicsStreamWriter(self.options, schema, overwrite)


def _here(given: Mapping[str, str]) -> Options:
    """A relative path is one of the driver: tasks run in other folders."""
    options = parse(given)
    cold = options.cold_path
    return msgspec.structs.replace(
        options, path=os.path.abspath(options.path), cold_path=None if cold is None else os.path.abspath(cold)
    )


def _main_module() -> str:
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "" if main is None else str(main.name)


@contextmanager
def plainly() -> Iterator[None]:
    """Errors that are raised on purpose end a worker of Spark without a Python stack."""
    try:
        yield
    except TopicsError:
        if _main_module().startswith("pyspark."):
            os.environ[_HIDE_STACK] = "1"
        raise


def wanted_columns(options: Options, schema: StructType) -> list[tuple[str, str]]:
    """The columns to produce: the view's, or fewer if the query brought a schema of its own."""
    known = dict(options.columns)
    found = []
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name not in known:
            raise OptionError(f"view {options.view} has no column {field.name}: it has {', '.join(known)}")
        if kind != known[field.name]:
            raise OptionError(f"column {field.name} of view {options.view} is {known[field.name]}, not {kind}")
        found.append((field.name, kind))
    return found


class TopicsReader(DataSourceReader):
    def __init__(self, options: Options, columns: list[tuple[str, str]]) -> None:
        self.options = options
        self.columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        with plainly():
            return self._plan()

    def _plan(self) -> list[InputPartition]:
        options = self.options
        folder = Folder(options.path, cold_dir=options.cold_path)
        if options.view not in ("records", "leases"):
            plan.subscribed(folder, options)
            return [SlicePartition([])]
        found = list(plan.slices(plan.ranges(folder, options), self._condition(), deleted=options.deleted))
        parts = plan.partitions(found, at_least=options.min_partitions)
        return [SlicePartition(each) for each in parts] or [SlicePartition([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read(self.options, self.columns, self._condition(), partition)

    def _condition(self) -> Wanted:
        return Wanted(self.options.start_ms, self.options.end_ms)


def read(
    options: Options,
    columns: list[tuple[str, str]],
    condition: Wanted,
    partition: SlicePartition,
    *,
    streaming: bool = False,
) -> Iterator[pa.RecordBatch]:
    """What a task does, in batch and in streaming queries."""
    with plainly():
        if options.view == "records":
            yield from _reading(options, columns, condition, streaming).read(partition.parts)
        elif options.view == "leases":
            yield from arrow(_lease_rows(options, condition, partition, streaming), options, columns)
        else:
            yield from arrow(iter(_table(options)), options, columns)


def _table(options: Options) -> list[tables.Row]:
    for _ in range(_TRIES):
        folder = Folder(options.path, cold_dir=options.cold_path)
        try:
            return list(tables.rows(options.view, folder, options.wants))
        except FileNotFoundError:
            continue  # a segment or a log file went since the look
    raise TopicsError(f"{options.path}: its files change faster than they can be read; try again")


def _reading(options: Options, columns: list[tuple[str, str]], condition: Wanted, streaming: bool) -> Reading:
    return Reading(
        data_dir=options.path,
        cold_dir=options.cold_path,
        columns=columns,
        wanted=condition,
        deleted=options.deleted,
        fail_on_loss=options.fail_on_loss,
        drops_are_loss=not streaming,
    )


def _lease_rows(
    options: Options, condition: Wanted, partition: SlicePartition, streaming: bool
) -> Iterator[tables.Row]:
    reading = _reading(options, _LOG_COLUMNS, condition, streaming)
    for part in partition.parts:
        for batch in reading.read([part]):
            # As numbers: times with a zone would need the machine's table of zones.
            times = pc.divide(batch.column(1).cast(pa.int64()), 1_000).to_pylist()
            for seq, ts_ms, value in zip(batch.column(0).to_pylist(), times, batch.column(2).to_pylist(), strict=True):
                yield from tables.leases(part.topic, part.shard, seq, ts_ms, value)


def arrow(rows: Iterator[tables.Row], options: Options, columns: list[tuple[str, str]]) -> Iterator[pa.RecordBatch]:
    """Rows of a table, as far as their columns are wanted."""
    places = {name: at for at, (name, _) in enumerate(options.columns)}
    schema = pa.schema([(name, ARROW[kind]) for name, kind in columns])
    picked = [places[name] for name, _ in columns]
    chunk: list[tables.Row] = []

    def batch() -> pa.RecordBatch:
        arrays = [
            pa.array([row[at] for row in chunk], ARROW[kind]) for at, (_, kind) in zip(picked, columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    for row in rows:
        chunk.append(row)
        if len(chunk) >= _TABLE_ROWS:
            yield batch()
            chunk.clear()
    if chunk:
        yield batch()


def register(spark: Any) -> None:
    """Make `format("topics")` known to a session. Not needed where the wheel is installed: there Spark finds it by
    itself (pyspark_topics), and refuses to be told again. Executors need the code too, installed or by --py-files."""
    try:
        spark.dataSource.register(TopicsSource)
    except AnalysisException as exc:
        if exc.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
    _let_streams_find_py_files()


def _let_streams_find_py_files() -> None:
    """On the driver Spark 4.3 looks for them in a folder below the one that they are in, which nobody makes: a stream
    would find no `spark_pipeline`. So there is one, which is the same."""
    if SparkContext._active_spark_context is None:
        return  # Spark Connect: the driver is elsewhere
    link = os.path.join(SparkFiles.getRootDirectory(), "streaming_job")
    if not os.path.lexists(link):
        os.symlink(os.curdir, link)
