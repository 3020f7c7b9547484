"""One moment of a data folder: the files that a backup takes, and how much of each.

A restore of it comes up as the server would have, had all its processes been killed at that moment. Shards don't write
in step, and what one does may follow from what another did: a job leaves its queue after it has reached the dead
letters, a copy is made after its original. So no shard may be seen later than another:

    1. look at the folder: the snapshot of each shard, and its log as far as it goes
    2. read the delete flags of the segments that these snapshots name; some may be newer than their snapshot
    3. take the time
    4. look again. If a shard has a newer snapshot, or the routers changed: begin again
    5. of what came since the first look only frames up to that time count

Whatever was acknowledged before the first look is in it. An effect has no earlier time than its cause, and whoever saw
the cause saw it written, so nothing in it lacks its cause (unless the machine's clock was just set back: a shard's own
goes ahead of it then, and less of the shard may be in it than of others; never less than the first look saw).

The server may remove files while they are copied. Log files and snapshots go soonest, so they are held open from here
on; segments are not, and whoever misses one begins again with another moment.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from types import TracebackType

import msgspec

from topics.backup.catalog import Run
from topics.datadir.batch import Batch
from topics.datadir.files import Superseded
from topics.datadir.log import WalFile, same_boot
from topics.datadir.view.folder import Folder
from topics.datadir.view.shard import Shard
from topics.datadir.view.topic import Topic
from topics.errors import TopicsError
from topics.storage.format import CHECKSUM, DELETED, FILE_HEADER_BYTES
from topics.storage.frames import scan
from topics.storage.manifest import Manifest
from topics.storage.paths import index_path, segment_name, topic_dir
from topics.storage.routers import Rule, routers_path
from topics.storage.snapshot import SegmentState

_DELETED = re.compile(re.escape(bytes([DELETED])) + b"+")
_TRIES = 50  # a server makes a snapshot every few seconds at most


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """A log file, up to the end of a frame."""

    file: str
    fd: int
    salt: int
    end: int
    checksum: bytes  # of the last frame; empty: there is none
    whole: bool  # written in the machine's present life: no power cut took any of it


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a shard."""

    file: str
    fd: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    salt: int
    bytes: int  # that count
    blocks: list[Batch]
    sealed: bool  # then it has an index
    deleted: list[Run]

    @property
    def index(self) -> str:
        return index_path(self.file)


class Moment:
    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files = folder.files
        self.at_ms = 0
        self.logs: list[Log] = []
        self.states: list[State] = []
        self.segments: list[Segment] = []
        self.rules: list[Rule] = []
        self.topics = 0
        self.records = 0

    @property
    def manifest(self) -> Manifest:
        return self.files.manifest

    @property
    def routers(self) -> str:
        return self.files.relative(routers_path(self.files.data_dir))

    def __enter__(self) -> Moment:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for fd in [*(log.fd for log in self.logs), *(state.fd for state in self.states)]:
            os.close(fd)
        self.logs, self.states = [], []


def take(data_dir: str) -> Moment:
    folder = Folder(data_dir)
    for _ in range(_TRIES):
        moment = Moment(folder)
        try:
            if _take(moment):
                return moment
        except (FileNotFoundError, Superseded):
            pass
        except BaseException:
            moment.close()
            raise
        moment.close()
        with suppress(FileNotFoundError):
            folder.look()
    raise TopicsError(f"{data_dir}: its files change faster than they can be looked at; try again")


_Seen = dict[str, tuple[int, bytes]]  # by file of the log: where its last frame ends, and that frame's checksum


def _take(moment: Moment) -> bool:
    """False: a look saw something else than the one before."""
    folder = moment.folder
    before = _picture(folder)
    seen: list[_Seen] = [{wal.file: (wal.end, wal.checksum) for wal in shard.wals} for shard in folder.shards]
    moment.rules = folder.rules
    for shard in folder.shards:
        moment.segments += [segment for topic in _named(shard) for segment in _segments(moment, topic)]
    moment.topics = sum(not topic.internal for topic in folder.topics)
    moment.records = sum(topic.count for topic in folder.topics if not topic.internal)
    moment.at_ms = time.time_ns() // 1_000_000
    folder.look()
    if _picture(folder) != before:
        return False
    for shard, known in zip(folder.shards, seen, strict=True):
        if shard.snapshot is not None:
            moment.states.append(State(file=moment.files.relative(shard.snapshot), fd=_open(shard.snapshot)))
        _cut(moment, shard, known)
    return True


def _picture(folder: Folder) -> tuple[Manifest, list[Rule], list[str | None]]:
    return folder.files.manifest, folder.rules, [shard.snapshot for shard in folder.shards]


def _named(shard: Shard) -> list[Topic]:
    """What the snapshot names has to be there, also if the log drops it."""
    return [*shard.topics.values(), *shard.dropped]


# --- segments ---


def _segments(moment: Moment, topic: Topic) -> list[Segment]:
    by_file: dict[str, list[Batch]] = {}
    for batch in topic.batches:
        if batch.wal:
            break
        by_file.setdefault(batch.file, []).append(batch)
    return [_segment(moment, topic, known, by_file) for known in topic.segments]


def _segment(moment: Moment, topic: Topic, known: SegmentState, by_file: dict[str, list[Batch]]) -> Segment:
    file = os.path.join(topic_dir("", topic.id), segment_name(known.first_seq))
    blocks = by_file.get(file, [])
    return Segment(
        file=file,
        salt=blocks[0].salt if blocks else 0,
        bytes=known.data_bytes,
        blocks=blocks,
        sealed=known.sealed,
        deleted=_deleted(moment, file, blocks) if known.flagged else [],
    )


def _deleted(moment: Moment, file: str, blocks: list[Batch]) -> list[Run]:
    """Where the flags on the disk are set. What the log deletes besides is in the log."""
    runs: list[Run] = []
    with moment.files.opened(file) as fd:
        for block in blocks:
            at = block.offset + block.length
            found = _DELETED.finditer(os.pread(fd, block.count, at))
            runs += [(at + run.start(), run.end() - run.start()) for run in found]
    return runs


# --- the log ---


def _cut(moment: Moment, shard: Shard, seen: _Seen) -> None:
    for wal in shard.wals:
        fd = _open(os.path.join(moment.files.data_dir, wal.file))
        end, checksum, cut = _end(fd, wal, seen.get(wal.file), moment.at_ms)
        log = Log(file=wal.file, fd=fd, salt=wal.salt, end=end, checksum=checksum, whole=same_boot(wal))
        moment.logs.append(log)
        if cut:
            return


def _end(fd: int, wal: WalFile, known: tuple[int, bytes] | None, at_ms: int) -> tuple[int, bytes, bool]:
    """(end of the last frame that counts, its checksum, whether later ones follow)"""
    end, checksum = known or (FILE_HEADER_BYTES, b"")
    data = os.pread(fd, wal.end - end, end)
    start = end
    for frame in scan(data, salt=wal.salt, start=0):
        if frame.ts > at_ms:
            return end, checksum, True
        stop = frame.offset + frame.length
        end, checksum = start + stop, data[stop - CHECKSUM.size : stop]
    return end, checksum, False


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
