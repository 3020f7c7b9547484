"""What can be made whole of one shard: which of its files are replaced by what, and which seqs are gone then.

Snapshot, log and segments are looked at together, because each may know what another has lost: batches in the log stand
in for a block that is gone, the snapshot says how far a topic had come, and what none of them has becomes a hole in a
snapshot that is written anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from topics import limits
from topics.datadir.files import Files, reading
from topics.datadir.fsck.checking import UNREADABLE
from topics.datadir.inventory import Entry
from topics.datadir.ranges import Ranges, both, joined, minus, total
from topics.datadir.reading import read_all
from topics.datadir.repair.log_salvage import Inserted, LogFile, SalvagedLog, head_raised, named_topic, rebuilt, salvage
from topics.datadir.repair.losses import Tale, Tales, tell
from topics.datadir.repair.segment_salvage import Remains, examine, index_of
from topics.storage.config import bucket_of, owner_of_id
from topics.storage.control import TopicFrame
from topics.storage.format import FrameType
from topics.storage.frames import Frame, decode_frame
from topics.storage.leases import log_id, log_name
from topics.storage.paths import (
    index_path,
    numbered_name,
    parse_numbered,
    parse_topic_dir,
    segment_name,
    shard_dir,
    topic_dir,
    topics_dir,
)
from topics.storage.snapshot import (
    SegmentState,
    ShardState,
    TopicState,
    decode_snapshot,
    decode_topic,
    encode_snapshot,
    encode_topic,
    with_header,
)

_BACKUP = "restore it from a backup"


class Replaced(msgspec.Struct, frozen=True):
    file: str
    what: str
    make: Callable[[], bytes]


class ShardPlan(msgspec.Struct, kw_only=True):
    replaced: list[Replaced] = []  # in this order
    removed: list[tuple[str, str]] = []  # (file, why), after that
    lost: dict[str, Ranges] = {}  # by topic
    restored: dict[str, Ranges] = {}
    untold: list[str] = []
    hopeless: list[str] = []


def mend_shard(files: Files, shard: int) -> ShardPlan:
    """Raises FormatError for files of a newer program, and for those that belong elsewhere."""
    return _Mending(files, shard).run()


class _Mending:
    def __init__(self, files: Files, shard: int) -> None:
        self._files = files
        self._shard = shard
        self._layout = files.manifest.layout
        self._folder = shard_dir(files.data_dir, shard)
        self._plan = ShardPlan()
        self._state: ShardState | None = None
        self._reheaded = False  # its header was damaged, and nothing else
        self._log = SalvagedLog(shard=shard)
        self._tales = Tales(topics={}, untold=[])

    def run(self) -> ShardPlan:
        numbers = self._snapshots()
        damaged = self._pick(numbers)
        state = self._state
        self._log = salvage(
            self._files,
            self._shard,
            covered=0 if state is None else state.lsn,
            file_no=0 if state is None else state.file_no,
            clean=state is not None and state.clean and not self._later_files(state.file_no),
        )
        if (why := self._hopeless(damaged)) is not None:
            self._plan.hopeless.append(why)
            return self._plan
        try:
            topics = [] if state is None else [decode_topic(raw) for raw in state.topics]
        except msgspec.MsgspecError as exc:
            self._plan.hopeless.append(f"{self._snap(max(numbers))}: a topic in it can't be read ({exc}): {_BACKUP}")
            return self._plan
        self._tales = tell(self._log, topics, covered=0 if state is None else state.lsn)
        self._plan.untold += self._tales.untold
        segments = {topic.id: self._examine(topic) for topic in topics}
        changed = self._reheaded or any([self._settle(topic, segments[topic.id]) for topic in topics])
        for tale in self._tales.topics.values():
            if tale.state is None:
                self._tell_loss(tale, minus(tale.suspect, tale.in_log))
        self._write_segments([one for remains in segments.values() for one in remains])
        if changed and state is not None:
            self._write_snapshot(state, topics, max(numbers) + 1)
        self._write_log()
        self._write_indexes([one for remains in segments.values() for one in remains])
        for number in numbers:
            if changed or number in damaged:
                text = "can't be read" if number in damaged else "a newer one takes its place"
                self._plan.removed.append((self._snap(number), text))
        return self._plan

    # --- the snapshot ---

    def _snapshots(self) -> list[int]:
        try:
            parsed = [parse_numbered(name) for name in os.listdir(self._folder)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(one[1] for one in parsed if one is not None and (one[0], one[2]) == (self._layout, "snap"))

    def _snap(self, number: int) -> str:
        return self._files.relative(os.path.join(self._folder, numbered_name(self._layout, number, "snap")))

    def _pick(self, numbers: list[int]) -> list[int]:
        """Take the newest that can be read; returns the newer ones that can't."""
        damaged: list[int] = []
        for number in reversed(numbers):
            name = self._snap(number)
            with reading(name), open(os.path.join(self._files.data_dir, name), "rb") as source:
                data = source.read()
            try:
                self._state = decode_snapshot(data, path=name)
                break
            except UNREADABLE:
                damaged.append(number)
            if (whole := with_header(data)) is not None:
                self._state = decode_snapshot(whole, path=name)
                self._reheaded = True
                break
        return damaged

    def _later_files(self, file_no: int) -> bool:
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        found = [parsed for name in names if (parsed := parse_numbered(name)) is not None]
        return any(one[0] == self._layout and one[2] == "wal" and one[1] > file_no for one in found)

    def _hopeless(self, damaged: list[int]) -> str | None:
        """Why nobody can tell what the shard holds."""
        covered = 0 if self._state is None else self._state.lsn
        first = self._log.first_lsn
        if damaged and not self._reheaded:
            if first and first <= covered + 1 and self._log.last_lsn >= covered:
                return None
            return (
                f"{self._snap(damaged[0])}: this snapshot can't be read, and the log does not go back far enough to do "
                f"without it: {_BACKUP}"
            )
        if self._state is None and first != 1 and (first or self._has_topics()):
            what = "its snapshot is missing" if first else "holds neither a snapshot nor a log"
            return f"{self._files.relative(self._folder)}: {what}: {_BACKUP}"
        if self._state is not None and (self._state.shard, self._state.layout) != (self._shard, self._layout):
            return (
                f"{self._files.relative(self._folder)}: its snapshot is of another shard: put it back where it belongs"
            )
        return None

    def _has_topics(self) -> bool:
        root = topics_dir(self._files.data_dir)
        ids = [parse_topic_dir(name) for name in os.listdir(root)] if os.path.isdir(root) else []
        return any(id is not None and owner_of_id(id, self._files.manifest.shards) == self._shard for id in ids)

    def _write_snapshot(self, state: ShardState, topics: list[TopicState], number: int) -> None:
        raws = [msgspec.Raw(encode_topic(topic)) for topic in topics]
        data = encode_snapshot(msgspec.structs.replace(state, topics=raws))
        self._plan.replaced.append(Replaced(self._snap(number), "a snapshot that says what is there", lambda: data))

    # --- topics ---

    def _examine(self, topic: TopicState) -> list[Remains]:
        home = topic_dir("", topic.id)
        return [
            examine(
                self._files,
                Entry(
                    file=os.path.join(home, segment_name(known.first_seq)),
                    kind="segment",
                    shard=self._shard,
                    topic=topic.name,
                    topic_id=topic.id,
                    first_seq=known.first_seq,
                    last_seq=known.last_seq,
                    data_bytes=known.data_bytes,
                    sealed=known.sealed,
                ),
                self._from_log,
            )
            for known in topic.segments
        ]

    def _from_log(self, topic_id: int, first: int, last: int) -> list[Frame]:
        found = []
        for file in self._log.files:
            wanted = [
                frame
                for frame in file.frames
                if frame.type == FrameType.APPEND
                and frame.topic_id == topic_id
                and first <= frame.first_seq
                and frame.last_seq <= last
            ]
            if wanted:
                data = self._bytes_of(file)
                whole = [decode_frame(data, frame.offset, salt=file.header.salt) for frame in wanted]
                found += [frame for frame in whole if frame is not None]
        return found

    def _bytes_of(self, file: LogFile) -> bytes:
        try:
            with self._files.opened(file.file) as fd:
                return read_all(fd)
        except FileNotFoundError:
            return b""  # it is made again

    def _settle(self, topic: TopicState, segments: list[Remains]) -> bool:
        """Write into a topic's state what is left of it; whether that changes it."""
        tale = self._tales.topics.get(topic.id)
        suspect = [] if tale is None else tale.suspect
        there = [*topic.holes, *topic.trims, *([] if tale is None else tale.in_log)]
        if topic.tail:  # up to the head it says what the log held
            logged = minus(topic.tail, [] if tale is None else tale.deleted)
            suspect = [*minus(suspect, [(1, topic.head_seq)]), *logged]
        for remains in segments:
            there += _kept(remains)
            suspect = [*suspect, *remains.lost]
        low = max(topic.floor, topic.evict_floor)
        lost = minus(suspect, [*there, (1, low - 1)])
        if not topic.tail and topic.pipe is None and topic.config.durability != "ephemeral":
            # Perhaps by an earlier version, which does not tell. What is in no file and was not deleted: the files that
            # had it are gone. Which of it nobody can tell.
            nowhere = minus([(low, topic.head_seq)], [*there, *lost])
            if total(nowhere) > topic.deleted_above:
                lost = joined([*lost, *nowhere])
        if restored := joined(each for remains in segments for each in remains.restored):
            self._plan.restored[topic.name] = restored
        if tale is not None:
            self._tell_loss(tale, lost)
        elif lost:
            self._plan.lost[topic.name] = lost  # dropped later on in the log
        known = lost if topic.pipe is not None else both(lost, [(1, topic.head_seq)])
        before = (topic.holes, topic.segments, None if topic.pipe is None else topic.pipe.logged)
        topic.holes = joined([*topic.holes, *known]) if known else topic.holes
        topic.tail = minus(topic.tail, lost)
        topic.ceiling = max([topic.ceiling, *(last for _, last in known)])
        if topic.pipe is not None and known:
            topic.pipe.logged = False  # what is copied from now on gets seqs above all that may have been seen
        pairs = zip(topic.segments, segments, strict=True)
        topic.segments = [_segment_state(known, remains) for known, remains in pairs if remains.blocks]
        return (topic.holes, topic.segments, None if topic.pipe is None else topic.pipe.logged) != before

    def _tell_loss(self, tale: Tale, lost: Ranges) -> None:
        if lost:
            self._plan.lost.setdefault(tale.name or self._name_for(tale), []).extend(joined(lost))

    # --- files ---

    def _write_segments(self, segments: list[Remains]) -> None:
        for remains in segments:
            if not remains.rewrite:
                continue
            file, what = remains.entry.file, _sentence(remains.faults)
            if remains.blocks:
                self._plan.replaced.append(Replaced(file, what, partial(remains.data, self._files)))
            else:
                self._plan.removed.append((file, what))
                if remains.entry.sealed:
                    self._plan.removed.append((index_path(file), "of a segment that is gone"))

    def _write_indexes(self, segments: list[Remains]) -> None:
        for remains in segments:
            if remains.reindex and remains.blocks:
                what = "of a segment that is written anew" if remains.rewrite else _sentence(remains.faults)
                self._plan.replaced.append(
                    Replaced(index_path(remains.entry.file), what, partial(self._index, remains))
                )

    def _index(self, remains: Remains) -> bytes:
        """After the segment itself has been written."""
        with self._files.opened(remains.entry.file) as fd:
            data = read_all(fd)
        return index_of(data[: remains.data_bytes], path=remains.entry.file)

    def _write_log(self) -> None:
        log = self._log
        names: dict[int, list[Inserted]] = {}
        tail: list[Inserted] = []
        for tale in self._tales.topics.values():
            if tale.name is None:
                name = self._name_for(tale)
                frame = TopicFrame(name, tale.config, tale.made_ms, tale.known + limits.LOST_SEQS)
                names.setdefault(tale.nameless_since, []).append(named_topic(tale.id, frame))
                self._plan.untold.append(f"topic {tale.id:016x}: its name and config; its records are in {name}")
            if tale.raised:
                ceiling = max(tale.ceiling, tale.raised)
                tail.append(head_raised(tale.id, head_seq=tale.raised, ceiling=ceiling))
        # The last one first: as long as one is damaged, the loss can be worked out again.
        for file in reversed(log.files):
            last = file is log.files[-1]
            if not file.whole or (last and tail):
                what = _sentence(file.faults) if file.faults else "seqs that may have been given out are marked"
                self._plan.replaced.append(
                    Replaced(file.file, what, partial(self._rebuilt, file, names, tail if last else []))
                )

    def _rebuilt(self, file: LogFile, names: dict[int, list[Inserted]], tail: list[Inserted]) -> bytes:
        data = self._bytes_of(file)
        return rebuilt(data, file, shard=self._shard, names=names, tail=tail, last_lsn=self._log.last_lsn)

    def _name_for(self, tale: Tale) -> str:
        """A name that belongs to the id, for a topic whose own is gone."""
        queue = self._tales.topics.get(log_id(tale.id))
        if queue is not None and queue.name is not None:
            return log_name(queue.name)
        bucket = tale.id & 0xFFFF
        return next(name for n in count() if bucket_of(name := f"lost-{tale.id:016x}-{n}") == bucket)


def _kept(remains: Remains) -> Ranges:
    return [(block.first_seq, block.last_seq) for block in remains.blocks]


def _segment_state(known: SegmentState, remains: Remains) -> SegmentState:
    if not remains.rewrite:
        return known
    return SegmentState(known.first_seq, remains.last_seq, remains.data_bytes, known.sealed, known.flagged)


def _sentence(faults: list[str]) -> str:
    shown = "; ".join(faults[:3])
    return f"{shown}; {len(faults) - 3} more places" if len(faults) > 3 else shown
