"""`spark.readStream.format("topics")`: offsets are seqs per topic, and what a batch reads is fixed by two of them.

An offset is {topic: {"id": instance, "next": the first seq not read yet}}. The instance tells a topic that was deleted
and made again from the one that was read before. A batch is planned from its two offsets alone, so Spark can repeat it
after a restart of the query or of the server and get the same records; together with a sink that knows batches that is
exactly once. Topics that appear later are read from their first record; a topic that is deleted is left out silently,
whether or not all of it had been read.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
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
from spark_pipeline.source import SlicePartition, arrow, plainly, read
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.errors import TopicsError

Offsets = dict[str, dict[str, Any]]


class FolderStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What both streams have in common: a folder that is looked at again and again, and a query that may end."""

    def __init__(self, options: Options, columns: list[tuple[str, str]]) -> None:
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

    def prepareForTriggerAvailableNow(self) -> None:
        with plainly():
            self._target = self._heads()

    def reportLatestOffset(self) -> Offsets:
        with plainly():
            return self._heads()

    def _goal(self) -> Offsets:
        return self._heads() if self._target is None else self._target

    @abstractmethod
    def _heads(self) -> Offsets:
        """How far one could read now."""


class TopicsStreamReader(FolderStreamReader):
    def __init__(self, options: Options, columns: list[tuple[str, str]]) -> None:
        if options.view not in ("records", "leases"):
            raise OptionError(f"option view: {options.view} can't be streamed; records, leases and tombstones can")
        if options.end.default != LATEST or options.end.by_topic or options.end_ms is not None:
            raise OptionError("a stream has no end: leave out endingOffsets and endingTimestamp")
        if options.ids is not None:
            raise OptionError("option topicIds is for spark.read: a stream knows the topics that it has begun with")
        super().__init__(options, columns)

    # --- offsets ---

    def initialOffset(self) -> Offsets:
        """Where a new query begins; `latest` unless it says otherwise, as with Kafka."""
        options = self.options
        if not options.start_given and options.start_ms is None:
            options = msgspec.structs.replace(options, start=Bound(LATEST))
        found = {}
        with plainly():
            for topic in plan.subscribed(self._look(), options):
                name = plan.shown_name(topic)
                found[name] = offset(topic, plan.starting_seq(topic, options, name))
        return _sorted(found)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.max_per_trigger) if self.options.max_per_trigger else ReadAllAvailable()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        with plainly():
            heads = self._goal()
        keep = self.options.names or frozenset()  # of a pattern there may be any number of topics that once were
        if isinstance(limit, ReadMaxRows):
            return admitted(start, heads, limit.max_rows, self._begin, keep=keep)
        return forward(start, heads, keep=keep)

    def _heads(self) -> Offsets:
        topics = plan.subscribed(self._look(), self.options, must_exist=False)
        return _sorted({plan.shown_name(topic): offset(topic, topic.disk_seq + 1) for topic in topics})

    def _begin(self, name: str) -> int:
        """Where a topic begins that the query has not seen yet."""
        assert self._folder is not None
        for topic in self._folder.topics:
            if plan.shown_name(topic) == name and topic.internal == (self.options.view == "leases"):
                return plan.beginning(topic, self.options)
        return 1

    # --- a batch ---

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        with plainly():
            wanted = list(self._ranges(self._look(), start, end))
            found = list(plan.slices(wanted, self._condition(), deleted=self.options.deleted))
        return [SlicePartition(each) for each in plan.partitions(found, at_least=self.options.min_partitions)]

    def _ranges(self, folder: Folder, start: Offsets, end: Offsets) -> Iterator[Range]:
        for name, to in end.items():
            since = start.get(name)
            if since is not None and since == to:
                continue
            topic = folder.topic(int(to["id"], 16))
            if topic is None:
                continue  # deleted since
            first = 1  # what caps or TTL took of a topic before its first batch is lost like any other
            if since is not None and since["id"] == to["id"]:
                first = since["next"]
            elif since is not None:
                self._lost(f"topic {name} was deleted and made again; what was not read of it before is gone")
            last = to["next"] - 1
            if last > topic.disk_seq:
                self._lost(f"topic {name}: records {topic.disk_seq + 1} to {last} are gone (lost with the machine)")
                last = topic.disk_seq
            wanted = Range(topic, first, last)
            plan.check_loss(wanted, self.options)
            yield wanted

    def _lost(self, text: str) -> None:
        if self.options.fail_on_loss:
            raise DataLoss(f"{text}. Set failOnDataLoss to false to go on without them")
        warnings.warn(text, stacklevel=2)

    def _condition(self) -> Wanted:
        return Wanted(self.options.start_ms)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read(self.options, self.columns, self._condition(), partition, streaming=True)


class RefusedStreamReader(DataSourceStreamReader):
    """Stands for a reader that can't be made. What is raised while Spark makes one it hides behind an error of its own
    (`reader` is not bound), so the mistake is told when the reader is asked for something."""

    def __init__(self, problem: TopicsError) -> None:
        self.problem = problem

    def initialOffset(self) -> Offsets:
        with plainly():
            raise self.problem

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        with plainly():
            raise self.problem

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        with plainly():
            raise self.problem

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self.problem


class LossPartition(InputPartition):
    def __init__(self, rows: list[tables.Row]) -> None:
        self.rows = rows


class LossStreamReader(FolderStreamReader):
    """view=tombstones as a stream: each range of lost seqs once, when it is lost.

    An offset is {topic: {"id": instance, "floor": evict_floor, "lost": how many records caps and TTL took,
    "holes" and "trims": the last seqs of those}}."""

    def initialOffset(self) -> Offsets:
        return {}

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        with plainly():
            return self._goal()

    def _heads(self) -> Offsets:
        return _sorted({topic.name: losses(topic) for topic in self._look().topics if self.options.wants(topic.name)})

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        with plainly():
            folder = self._look()
        rows: list[tables.Row] = []
        for name, to in end.items():
            topic = folder.topic(int(to["id"], 16))
            since = start.get(name)
            if topic is None or since == to:
                continue
            if since is None or since["id"] != to["id"]:
                since = _NO_LOSSES
            rows.extend(losses_between(topic, since, to))
        return [LossPartition(rows)] if rows else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LossPartition)
        return arrow(iter(partition.rows), self.options, self.columns)


_NO_LOSSES = {"floor": 1, "lost": 0, "holes": 0, "trims": 0}


def losses(topic: Topic) -> dict[str, Any]:
    return {
        "id": f"{topic.id:016x}",
        "floor": topic.evict_floor,
        "lost": topic.evicted_total + topic.expired_total,
        "holes": max((last for _, last in topic.holes), default=0),
        "trims": max((last for _, last in topic.trims), default=0),
    }


def losses_between(topic: Topic, since: dict[str, Any], to: dict[str, Any]) -> Iterator[tables.Row]:
    if to["floor"] > since["floor"]:
        first, last = since["floor"], to["floor"] - 1
        missed = max(0, to["lost"] - since["lost"])
        yield (topic.name, topic.shard, topic.eviction_reason(first), first, last, missed)
    for kind, ranges, reason in (("holes", topic.holes, "lost"), ("trims", topic.trims, "source_trim")):
        for begin, end in ranges:
            # A range may have grown since it was told, or lie partly below the floor, which tells of it too.
            first, last = max(begin, since[kind] + 1, to["floor"]), min(end, to[kind])
            if first <= last:
                yield (topic.name, topic.shard, reason, first, last, last - first + 1)


# --- arithmetic of offsets ---


def offset(topic: Topic, following: int) -> dict[str, Any]:
    return {"id": f"{topic.id:016x}", "next": following}


def _sorted(offsets: Offsets) -> Offsets:
    """Spark compares offsets as text."""
    return dict(sorted(offsets.items()))


def forward(start: Offsets, heads: Offsets, *, keep: frozenset[str] = frozenset()) -> Offsets:
    """The heads, but never behind where the query is: a look at a folder whose server was just killed may see less.
    Of topics that are gone those in `keep` stay where they are, so that one is known again if it is made again."""
    found = {name: since for name, since in start.items() if name in keep} | heads
    for name, head in heads.items():
        since = start.get(name)
        if since is not None and since["id"] == head["id"] and since["next"] > head["next"]:
            found[name] = since
    return _sorted(found)


def admitted(
    start: Offsets, heads: Offsets, most: int, begin: Callable[[str], int], *, keep: frozenset[str] = frozenset()
) -> Offsets:
    """At most so many records in all: one of each topic that has any waiting, and the rest in proportion to what each
    has. Where there are more topics than records they take turns."""
    heads = forward(start, heads, keep=keep)
    places: dict[str, tuple[int, int]] = {}  # name -> (where it stands, how many wait)
    for name, head in heads.items():
        since = start.get(name)
        at = since["next"] if since is not None and since["id"] == head["id"] else min(begin(name), head["next"])
        places[name] = at, head["next"] - at
    total = sum(count for _, count in places.values())
    if total <= most:
        return heads
    busy = [name for name, (_, count) in places.items() if count]
    # A batch moves the sum of all places by as many as it takes, so the next one begins where this one ends.
    turn = sum(at for at, _ in places.values()) % len(busy)
    shares = dict.fromkeys((busy[turn:] + busy[:turn])[:most], 1)
    if most > len(busy):
        spare, waiting = most - len(busy), total - len(busy)
        shares = {name: 1 + spare * (places[name][1] - 1) // waiting for name in busy}
    found = {}
    for name, (at, _) in places.items():
        share = shares.get(name, 0)
        if share or name in start:
            found[name] = {"id": heads[name]["id"], "next": at + share}
    return found
