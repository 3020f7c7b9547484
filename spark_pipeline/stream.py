"""`spark.readStream.format("topics")`: offsets are seqs per topic, and what a batch reads is fixed by two of them.

An offset is {topic: {"id": instance, "next": the first seq not read yet}}. The instance tells a topic that was deleted
and made again from the one that was read before. A batch is planned from its two offsets alone, so Spark can repeat it
after a restart of the query or of the server and get the same records; together with a sink that knows batches that is
exactly once. Topics that appear later are read from their beginning; a topic that is deleted is left out silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from spark_pipeline import plan, tables
from spark_pipeline.options import LATEST, Bound, OptionError, Options
from spark_pipeline.plan import DataLoss, Range, Wanted
from spark_pipeline.source import SlicePartition, arrow, read
from topics.folder.topic import Topic
from topics.folder.view import Folder

Offsets = dict[str, dict[str, Any]]


class TopicsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, columns: list[tuple[str, str]]) -> None:
        if options.view not in ("records", "leases"):
            raise OptionError(f"option view: {options.view} can't be streamed; records, leases and tombstones can")
        if options.end.default != LATEST or options.end.by_topic or options.end_ms is not None:
            raise OptionError("a stream has no end: leave out endingOffsets and endingTimestamp")
        self.options = options
        self.columns = columns
        self._folder: Folder | None = None
        self._target: Offsets | None = None  # of a query that reads what is there and ends

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folder": None}  # executors get the reader, not what it has seen

    def _look(self) -> Folder:
        """A second look costs what is new."""
        if self._folder is None:
            self._folder = Folder(self.options.path, cold_dir=self.options.cold_path)
        else:
            self._folder.look()
        return self._folder

    # --- offsets ---

    def initialOffset(self) -> Offsets:
        """Where a new query begins; `latest` unless it says otherwise, as with Kafka."""
        options = self.options
        if not options.start_given and options.start_ms is None:
            options = msgspec.structs.replace(options, start=Bound(LATEST))
        found = {}
        for topic in plan.subscribed(self._look(), options):
            found[plan.shown_name(topic)] = offset(topic, plan.starting_seq(topic, options, plan.shown_name(topic)))
        return found

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.max_per_trigger) if self.options.max_per_trigger else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._heads()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        heads = self._target if self._target is not None else self._heads()
        if isinstance(limit, ReadMaxRows):
            return admitted(start, heads, limit.max_rows, self._begin)
        return forward(start, heads)

    def reportLatestOffset(self) -> Offsets:
        return self._heads()

    def _heads(self) -> Offsets:
        topics = plan.subscribed(self._look(), self.options, must_exist=False)
        return {plan.shown_name(topic): offset(topic, topic.disk_seq + 1) for topic in topics}

    def _begin(self, name: str) -> int:
        """Where a topic begins that the query has not seen yet."""
        assert self._folder is not None
        for topic in self._folder.topics:
            if plan.shown_name(topic) == name and topic.internal == (self.options.view == "leases"):
                return max(1, topic.low)
        return 1

    # --- a batch ---

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        folder = self._look()
        wanted = []
        for name, to in end.items():
            since = start.get(name)
            if since is not None and since == to:
                continue
            topic = folder.topic(int(to["id"], 16))
            if topic is None:
                continue  # deleted since
            first = max(1, topic.low)
            if since is not None and since["id"] == to["id"]:
                first = since["next"]
            elif since is not None:
                self._lost(f"topic {name} was deleted and made again; what was not read of it before is gone")
            last = to["next"] - 1
            if last > topic.disk_seq:
                self._lost(f"topic {name}: records {topic.disk_seq + 1} to {last} are gone (lost with the machine)")
                last = topic.disk_seq
            wanted.append(Range(topic, first, last))
            plan.check_loss(wanted[-1], self.options)
        found = list(plan.slices(wanted, self._condition(), deleted=self.options.deleted))
        return [SlicePartition(each) for each in plan.partitions(found, at_least=self.options.min_partitions)]

    def _lost(self, text: str) -> None:
        if self.options.fail_on_loss:
            raise DataLoss(f"{text}. Set failOnDataLoss to false to go on without them")
        warnings.warn(text, stacklevel=2)

    def _condition(self) -> Wanted:
        return Wanted(self.options.start_ms)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read(self.options, self.columns, self._condition(), partition)


class LossPartition(InputPartition):
    def __init__(self, rows: list[tables.Row]) -> None:
        self.rows = rows


class LossStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """view=tombstones as a stream: each range of lost seqs once, when it is lost.

    An offset is {topic: {"id": instance, "floor": evict_floor, "holes": the last seq of the holes that were told}}."""

    def __init__(self, options: Options, columns: list[tuple[str, str]]) -> None:
        self.options = options
        self.columns = columns
        self._target: Offsets | None = None

    def initialOffset(self) -> Offsets:
        return {}

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._now()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        return self._target if self._target is not None else self._now()

    def _now(self) -> Offsets:
        folder = Folder(self.options.path, cold_dir=self.options.cold_path)
        found = {}
        for topic in folder.topics:
            if self.options.wants(topic.name):
                holes = max((last for _, last in (*topic.holes, *topic.trims)), default=0)
                found[topic.name] = {"id": f"{topic.id:016x}", "floor": topic.evict_floor, "holes": holes}
        return found

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        folder = Folder(self.options.path, cold_dir=self.options.cold_path)
        rows: list[tables.Row] = []
        for name, to in end.items():
            topic = folder.topic(int(to["id"], 16))
            since = start.get(name)
            if topic is None or since == to:
                continue
            if since is None or since["id"] != to["id"]:
                since = {"floor": 1, "holes": 0}
            rows.extend(_losses(topic, since, to))
        return [LossPartition(rows)] if rows else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LossPartition)
        return arrow(iter(partition.rows), self.options, self.columns)


def _losses(topic: Topic, since: dict[str, Any], to: dict[str, Any]) -> Iterator[tables.Row]:
    if to["floor"] > since["floor"]:
        first, last = since["floor"], to["floor"] - 1
        # How many of the range were lost and not deleted before is known for the whole past only.
        yield (topic.name, topic.shard, topic.eviction_reason(first), first, last, last - first + 1)
    for ranges, reason in ((topic.holes, "lost"), (topic.trims, "source_trim")):
        for first, last in ranges:
            if since["holes"] < last <= to["holes"] and last >= to["floor"]:
                yield (topic.name, topic.shard, reason, first, last, last - first + 1)


def offset(topic: Topic, following: int) -> dict[str, Any]:
    return {"id": f"{topic.id:016x}", "next": following}


def forward(start: Offsets, heads: Offsets) -> Offsets:
    """The heads, but never behind where the query is: a look at a folder whose server was just killed may see less."""
    found = {}
    for name, head in sorted(heads.items()):  # Spark compares offsets as text
        since = start.get(name)
        if since is not None and since["id"] == head["id"] and since["next"] > head["next"]:
            head = since
        found[name] = head
    return found


def admitted(start: Offsets, heads: Offsets, most: int, begin: Any) -> Offsets:
    """At most so many records in all, shared among topics by what each has waiting; a topic with any gets one."""
    heads = forward(start, heads)
    waiting: dict[str, tuple[int, int]] = {}  # name -> (where it stands, how many)
    for name, head in heads.items():
        since = start.get(name)
        at = since["next"] if since is not None and since["id"] == head["id"] else min(begin(name), head["next"])
        waiting[name] = at, head["next"] - at
    total = sum(count for _, count in waiting.values())
    if total <= most:
        return heads
    found = {}
    left = most
    for name, (at, count) in sorted(waiting.items(), key=lambda each: each[1][1]):
        share = min(count, max(1, most * count // total), left) if count else 0
        left -= share
        if share or name in start:
            found[name] = {"id": heads[name]["id"], "next": at + share}
    return dict(sorted(found.items()))  # Spark compares offsets as text
