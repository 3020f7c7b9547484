"""The state of a router's destination: copies in memory, and the pipe that says how far the source has been copied.

A copy's bytes are in memory until the mover has written them to a segment; the log holds its seq and the source's
(storage/control.py, CopiesLine). After a crash the rows are there again, and rebuild.py fills them from the source.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Protocol

import msgspec

from topics.storage.columns import Columns
from topics.storage.config import TopicConfig
from topics.storage.control import CopiesLine, PipeFrame
from topics.storage.snapshot import PipeState
from topics.walshard.forwards.rebuild import Rebuild, Unfilled
from topics.walshard.topic.index import Row

_COPIES_BITS = 16  # which of several routers between the same two topics: more than there can be
_COPIES_MASK = 2**_COPIES_BITS - 1
_NONE: Mapping[str, int] = MappingProxyType({})


class LogFile(Protocol):
    """A WAL file, as far as its rows need it."""

    def pin(self) -> None: ...
    def release(self, row: Row) -> None: ...


class CopyMemory:
    """How much the copies of a shard take."""

    def __init__(self) -> None:
        self.bytes = 0
        self.stuck = False  # the mover has found no space for them


class Copies:
    """The source of a row whose only bytes are in memory, until the mover has written them down. The row keeps the log
    file that knows its seqs."""

    __slots__ = ("_memory", "file")

    def __init__(self, memory: CopyMemory, file: LogFile) -> None:
        self._memory = memory
        self.file = file

    def read_body(self, row: Row) -> bytes:
        raise AssertionError("a copy has its body until it is in a segment")

    def share(self, row: Row, body: bytes) -> None:
        """Another row of the same copies, with these bytes."""
        row.body = body
        row.length = len(body)
        self._memory.bytes += len(body)
        self.file.pin()

    def release(self, row: Row) -> None:
        self._memory.bytes -= row.length
        self.file.release(row)


class Pipe:
    def __init__(
        self, source_id: int, at: int, forwarded: dict[str, int], *, flushed_to: int = 0, ring: bool = False
    ) -> None:
        self.source_id = source_id
        self.ring = ring
        self.logged = True
        self.flushed_to = flushed_to  # the last seq that `flushed_at` covers
        self.at = at
        self.forwarded = forwarded
        self.flushed_at = at  # what a snapshot may say: everything up to here is in segments
        self.saved_at = at  # what the last snapshot said; -1: it can't stand for what is here ...
        self.saved_to = flushed_to  # ... and up to which seq a start finds copies in segments
        self.flushed_forwarded = dict(forwarded)
        self.marks: deque[tuple[int, int, dict[str, int]]] = deque()  # (last seq here, source's seq, copies by router)
        self.pending = 0  # parts of a forward that are taken, and not readable yet: what was lost, and copies
        self.rebuild: Rebuild | None = None  # rows that a crash left without their bytes
        self.tail_lost = False  # a power cut may have taken copies behind the last row that readers have seen ...
        self.tail_to = 0  # ... none of them above this seq
        self.sized_to = 0  # up to this seq the log has the sizes of all copies
        self.sources: dict[int, list[tuple[int, int]]] = {}  # by a row's last seq: where its copies come from
        self._read_to: dict[int, int] = {}  # likewise: the source's seq up to which it had been read for them
        self.sizes: dict[int, array[int]] = {}  # likewise, of rows without bytes: what each copy counts for, as logged

    @classmethod
    def restore(cls, state: PipeState) -> Pipe:
        pipe = cls(state.source_id, state.at, dict(state.forwarded), flushed_to=state.flushed_to, ring=state.ring)
        pipe.logged = state.logged
        pipe.tail_lost = state.tail_lost
        return pipe

    @property
    def rebuilding(self) -> bool:
        """Copies that readers may have seen are read from the source once more."""
        return self.rebuild is not None or self.tail_lost

    @property
    def position(self) -> int:
        """The source's seq from which the next forward has to go on."""
        return self.at if self.rebuild is None else self.rebuild.at

    @property
    def until(self) -> int | None:
        """The source's seq up to which it is to be read, if not to its end."""
        return None if self.rebuild is None else self.rebuild.until

    def keep_only(self, routers: Iterable[str]) -> None:
        """Forget what was copied by routers that are no more."""
        known = set(routers)
        self.forwarded = {router: count for router, count in self.forwarded.items() if router in known}
        flushed = self.flushed_forwarded
        self.flushed_forwarded = {router: count for router, count in flushed.items() if router in known}

    def advance(self, last_seq: int, at: int, counts: dict[str, int], sources: list[tuple[int, int]]) -> None:
        self.at = at
        if sources:
            self.sources[last_seq] = sources
            self._read_to[last_seq] = at
        _add(self.forwarded, counts)
        if counts or last_seq != self.last_seq:
            self.marks.append((last_seq, at, counts))
        else:
            self.move(at)

    @property
    def last_seq(self) -> int:
        """Up to here seqs are of earlier copies, or of none."""
        return self.marks[-1][0] if self.marks else self.flushed_to

    def move(self, at: int, counts: Mapping[str, int] = _NONE) -> None:
        """The source has been read up to here, and there was nothing to copy: or nothing that is left, of an ephemeral
        topic. What clients write here at the same time has no part in it: it may still be taken back."""
        self.at = at
        _add(self.forwarded, counts)
        if self.marks:
            last_seq, _, before = self.marks[-1]
            if counts:
                _add(before := dict(before), counts)
            self.marks[-1] = (last_seq, at, before)
        else:
            self.flushed_at = at  # there is nothing new that would have to be in a segment first
            _add(self.flushed_forwarded, counts)

    def skip(self, last_seq: int) -> None:
        """No copy will ever get a seq up to this one that has none yet."""
        if self.marks:
            self.marks.append((last_seq, self.at, {}))
        else:
            self.flushed_to = max(self.flushed_to, last_seq)

    def flushed(self, flushed_seq: int) -> None:
        """Rows up to a seq are in segments, or hold nothing any more."""
        marks = self.marks
        while marks and marks[0][0] <= flushed_seq:
            self.flushed_to, self.flushed_at, counts = marks.popleft()
            self.sources.pop(self.flushed_to, None)
            self.sizes.pop(self.flushed_to, None)
            self._read_to.pop(self.flushed_to, None)
            _add(self.flushed_forwarded, counts)

    def lose_tail(self, to: int) -> None:
        """A power cut may have taken copies up to this seq. The source is read to where the pipe stands, also if the
        last rows have been deleted: then it is known whether the source ends there."""
        self.tail_lost = True
        self.tail_to = to
        if self.rebuild is not None:
            self.rebuild.until = max(self.rebuild.until, self.at)

    def begin_rebuild(self, rows: Iterable[Row]) -> None:
        """After a crash: these rows of copies have no bytes. Each needs the source up to where it was read for them,
        not to where the pipe has moved since: in a ring that may lie behind what the source itself has to fill."""
        unfilled = [Unfilled(row, self.copy_ids(row), self._read_to[row.last]) for row in rows]
        if unfilled:
            self.rebuild = Rebuild(self.flushed_at, unfilled)

    def line(self, topic_id: int, row: Row) -> CopiesLine:
        """What the log says of a row of copies; it may be the end of what was copied at once."""
        counts = next(counts for last_seq, _, counts in self.marks if last_seq == row.last)
        at = self._read_to[row.last]
        runs: list[tuple[int, int]] = []
        missing = row.count
        for first, count in reversed(self.sources[row.last]):
            taken = min(count, missing)
            if taken:
                runs.append((first + count - taken, taken))
            missing -= taken
        size = row.size * row.count // row.live
        sizes = as_logged(self.sizes.get(row.last, ())[-row.count :])
        line = CopiesLine(topic_id, row.first_ts, row.first, row.last, at, row.count, size, runs[::-1], counts)
        return msgspec.structs.replace(line, sizes=sizes)

    def line_of_none(self, topic_id: int, mark: tuple[int, int, dict[str, int]], *, ts: int) -> CopiesLine:
        """The same of copies without a live one, which have no row, and of what the source had lost."""
        last, at, counts = mark
        runs = self.sources.get(last, []) if counts else []
        count = sum(taken for _, taken in runs)
        return CopiesLine(topic_id, ts, last - max(0, count - 1), last, at, count, 0, runs, counts)

    def knows_sizes(self, row: Row) -> bool:
        """Of a row without bytes: lines of earlier programs don't say what each copy counts for."""
        return row.count == 1 or row.last in self.sizes

    def copy_ids(self, row: Row) -> list[int]:
        """What each copy of a row is a copy of: the source's seq, and which of several routers' copies it is. The row
        may be the end of what was copied at once."""
        return copy_ids(self.sources[row.last])[-row.count :]

    def state(self) -> PipeState:
        return PipeState(
            self.source_id,
            self.flushed_at,
            self.flushed_forwarded,
            flushed_to=self.flushed_to,
            ring=self.ring,
            logged=True,
            tail_lost=self.tail_lost,
        )

    def frame(self) -> PipeFrame:
        return PipeFrame(self.source_id, self.flushed_at, self.ring, logged=True)


def _add(totals: dict[str, int], counts: Mapping[str, int]) -> None:
    for router, count in counts.items():
        totals[router] = totals.get(router, 0) + count


def counts_bytes(config: TopicConfig) -> bool:
    """Whether a cap evicts by size."""
    return config.cap_bytes > 0 and config.discard == "old"


def logged_sizes(config: TopicConfig, body: bytes, count: int) -> list[int]:
    """What a line says of its copies' sizes: where a cap counts them, a start must be able to tell what it took."""
    if count == 1 or not counts_bytes(config):
        return []
    return as_logged(Columns(body, count=count, ts=0).sizes())


def as_logged(sizes: Sequence[int]) -> list[int]:
    return list(sizes[:1] if sizes == sizes[:1] * len(sizes) else sizes)  # type: ignore[operator]


def copy_ids(sources: Iterable[tuple[int, int]]) -> list[int]:
    """For copies from these runs of the source's seqs: a number each, ascending. A seq that stands there several times
    was copied by several routers."""
    known: list[int] = []
    for seq in chain.from_iterable(range(first, first + count) for first, count in sources):
        again = known[-1] & _COPIES_MASK if known and known[-1] >> _COPIES_BITS == seq else -1
        known.append(seq << _COPIES_BITS | again + 1)
    return known
