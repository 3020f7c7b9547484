"""Which bytes a query reads: the folder and the options become slices, and slices become partitions. Needs no Spark.

Planning pins the head of every topic. A slice is a run of batches of one topic with all that is needed to read them, so
that a task opens files and looks nothing up. Large topics are cut between batches, small ones share a partition.
Segments can be dropped and log files absorbed between planning and reading: a slice knows its topic and seqs, and
whoever does not find its files plans those seqs anew (batches.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import msgspec

from spark_pipeline.options import EARLIEST, LATEST, OptionError, Options
from topics.datadir.batch import Batch
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.errors import TopicsError
from topics.storage.leases import SUFFIX

MIB = 2**20
_SLICE_BYTES = 64 * MIB  # the most one task reads, unless a single batch is larger
_SMALL_BYTES = 1 * MIB  # a task that reads less than this is not worth its start ...
_USUAL_PARTITIONS = 8  # ... above that, so many tasks keep a small cluster busy


class DataLoss(TopicsError):
    """Records that were asked for are gone. Names the topic and the exact range."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A batch to read."""

    file: str
    wal: bool
    salt: int
    offset: int
    length: int
    first: int
    count: int
    flags: bytes | None  # deletes that were known when it was planned; a block's flags on the disk may know more

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Which records of a range, beside their seqs. None: any."""

    start_ms: int | None = None
    end_ms: int | None = None  # not itself

    def excludes(self, batch: Batch) -> bool:
        """Whether a batch can't hold such a record."""
        if self.start_ms is not None and batch.last_ts < self.start_ms:
            return True
        return self.end_ms is not None and batch.first_ts >= self.end_ms


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Some of a topic's records: those from `first` to `last` that are live (or deleted, where those are wanted)."""

    topic: str  # as it is shown: for the leases log of a queue, the queue
    topic_id: int
    shard: int
    first: int
    last: int
    low: int  # below it nothing is live, and what is not deleted was evicted
    pieces: list[Piece]

    @property
    def bytes(self) -> int:
        return sum(piece.length for piece in self.pieces)


class Range(msgspec.Struct, frozen=True):
    """Seqs of one topic: what a query reads of it."""

    topic: Topic
    first: int
    last: int


def subscribed(folder: Folder, options: Options, *, must_exist: bool = True) -> list[Topic]:
    """The topics that the options name, by name; those asked for one by one have to exist, unless ids say which are
    meant: one that is gone or was made again is none of those."""
    if must_exist and options.ids is None:
        _check_names(folder, options)
    leases = options.view == "leases"
    found = [topic for topic in folder.topics if topic.internal == leases and options.wants(shown_name(topic))]
    if options.ids is None:
        return found
    return [topic for topic in found if options.ids[shown_name(topic)] == f"{topic.id:016x}"]


def _check_names(folder: Folder, options: Options) -> None:
    known = {topic.name for topic in folder.topics if not topic.internal}
    given = {
        "subscribe": options.names or frozenset(),
        "startingOffsets": options.start.by_topic,
        "endingOffsets": options.end.by_topic,
    }
    for option, names in given.items():
        missing = sorted(name for name in names if name not in known)
        if not missing:
            continue
        text = f"option {option}: there is no topic {', '.join(missing)} in {options.path}"
        if option == "subscribe" or options.fail_on_loss:
            raise OptionError(text)
        warnings.warn(text, stacklevel=2)  # offsets that were taken down may be of a topic that is gone by now


def shown_name(topic: Topic) -> str:
    return topic.name.removesuffix(SUFFIX) if topic.internal else topic.name


def ranges(folder: Folder, options: Options) -> list[Range]:
    """What a batch query reads."""
    found = []
    for topic in subscribed(folder, options):
        name = shown_name(topic)
        end = options.end.of(name)
        last = topic.disk_seq if end == LATEST else end - 1
        if last > topic.disk_seq:
            _lost(options, name, topic.disk_seq + 1, last, f"it ends with {topic.disk_seq}")
            last = topic.disk_seq
        found.append(Range(topic, starting_seq(topic, options, name), last))
    for each in found:
        check_loss(each, options)
    return [each for each in found if each.first <= each.last]


def starting_seq(topic: Topic, options: Options, name: str) -> int:
    start = options.start.of(name)
    if start == EARLIEST:
        return beginning(topic, options)
    if start == LATEST:
        return topic.disk_seq + 1
    if start > topic.head_seq + 1:
        why = f"the start is beyond the end, {topic.head_seq}: the topic was made again, or the offset is wrong"
        _lost(options, name, topic.head_seq + 1, start - 1, why)
        return beginning(topic, options)
    return max(1, start)


def beginning(topic: Topic, options: Options) -> int:
    """Of what can still be read. Deleted records stand before the first live one, too."""
    return max(1, topic.evict_floor if options.deleted else topic.low)


def check_loss(wanted: Range, options: Options) -> None:
    """A gap fails the query, or is told and passed over. What clients deleted is no gap."""
    topic, at = wanted.topic, wanted.first
    while (gap := topic.find_gap(at, wanted.last)) is not None:
        first, last, reason = gap
        _lost(options, shown_name(topic), first, last, f"reason: {reason}")
        at = last + 1


def _lost(options: Options, topic: str, first: int, last: int, why: str) -> None:
    text = f"topic {topic}: records {first} to {last} are gone ({why})"
    if options.fail_on_loss:
        raise DataLoss(f"{text}. Start behind them, or set failOnDataLoss to false to go on without them")
    warnings.warn(text, stacklevel=2)


def slices(wanted: Iterable[Range], condition: Wanted, *, deleted: bool) -> Iterator[Slice]:
    """One per topic, not cut yet."""
    for each in wanted:
        topic = each.topic
        pieces = [
            _piece(batch)
            for batch in topic.select(each.first, each.last)
            if (deleted or batch.live(topic.low)) and not condition.excludes(batch)
        ]
        if pieces:
            yield Slice(shown_name(topic), topic.id, topic.shard, each.first, each.last, topic.low, pieces)


def _piece(batch: Batch) -> Piece:
    flags = None if batch.flags is None else bytes(batch.flags)
    return Piece(batch.file, batch.wal, batch.salt, batch.offset, batch.length, batch.first, batch.count, flags)


def partitions(whole: list[Slice], *, at_least: int) -> list[list[Slice]]:
    """Cut what is large, gather what is small; a partition is a list of slices."""
    total = sum(each.bytes for each in whole)
    if at_least:
        target = max(1, -(-total // at_least))
    else:
        target = min(max(total // _USUAL_PARTITIONS, _SMALL_BYTES), _SLICE_BYTES)
    found = _gather(whole, target)
    while len(found) < at_least and target > 1 and len(found) < sum(len(each.pieces) for each in whole):
        target //= 2
        found = _gather(whole, target)
    return found


def _gather(whole: list[Slice], target: int) -> list[list[Slice]]:
    found: list[list[Slice]] = []
    room = 0
    for each in whole:
        for part in _cut(each, target):
            if not found or part.bytes > room:
                found.append([])
                room = target
            found[-1].append(part)
            room -= part.bytes
    return found


def _cut(whole: Slice, target: int) -> Iterator[Slice]:
    """Between batches, so that no batch is read twice."""
    taken: list[Piece] = []
    size = 0
    first = whole.first
    for piece in whole.pieces:
        if taken and size + piece.length > target:
            yield msgspec.structs.replace(whole, first=first, last=taken[-1].last, pieces=taken)
            first, taken, size = taken[-1].last + 1, [], 0
        taken.append(piece)
        size += piece.length
    yield msgspec.structs.replace(whole, first=first, pieces=taken)
