"""The state of a router's destination: copies in memory, and the pipe that says how far the source has been copied.

What a snapshot says of a pipe is what its segments hold; the rest is made again after a crash (pipes.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from topics.storage.control import PipeFrame
from topics.storage.snapshot import PipeState
from topics.walshard.rows import Row

_COPIES_BITS = 4  # of several routers between the same two topics
_COPIES_MASK = 2**_COPIES_BITS - 1


class Copies:
    """The source of rows whose only bytes are in memory, until the mover has written them down."""

    def __init__(self) -> None:
        self.bytes = 0

    def read_body(self, row: Row) -> bytes:
        raise AssertionError("a copy has its body until it is in a segment")

    def release(self, row: Row) -> None:
        self.bytes -= row.length


class Pipe:
    def __init__(self, source_id: int, at: int, forwarded: dict[str, int], *, ring: bool = False) -> None:
        self.source_id = source_id
        self.ring = ring
        self.direct = 0  # the last seq that a client wrote itself
        self.flushed_to = 0  # the last seq that `flushed_at` covers
        self.at = at
        self.forwarded = forwarded
        self.flushed_at = at  # what a snapshot may say: everything up to here is in segments
        self.saved_at = at  # what the last snapshot said
        self.flushed_forwarded = dict(forwarded)
        self.marks: deque[tuple[int, int, dict[str, int]]] = deque()  # (last seq here, source's seq, copies by router)
        self.pending = False  # a forward is taken, but its copies are not readable yet
        self.counted_to = 0  # what caps and TTL took up to here was in the counts of the snapshot
        self.deriving = False  # copies that readers may have seen are being made again
        self.sources: dict[int, list[tuple[int, int]]] = {}  # by a row's last seq: where its copies come from
        self.deleted: set[int] = set()  # copies that a client removed and no segment shows yet: see sources_of

    @classmethod
    def restore(cls, state: PipeState) -> Pipe:
        pipe = cls(state.source_id, state.at, dict(state.forwarded), ring=state.ring)
        pipe.deleted = set(state.deleted)
        pipe.flushed_to = state.flushed_to
        pipe.direct = state.direct
        return pipe

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
        for router, count in counts.items():
            self.forwarded[router] = self.forwarded.get(router, 0) + count
        marks = self.marks
        if counts or last_seq != (marks[-1][0] if marks else self.flushed_to):
            marks.append((last_seq, at, counts))
        elif marks:
            marks[-1] = (last_seq, at, marks[-1][2])
        else:
            self.flushed_at = at  # there is nothing new that would have to be in a segment first

    def flushed(self, flushed_seq: int) -> None:
        """Rows up to a seq are in segments."""
        marks = self.marks
        while marks and marks[0][0] <= flushed_seq:
            self.flushed_to, self.flushed_at, counts = marks.popleft()
            self.sources.pop(self.flushed_to, None)
            for router, count in counts.items():
                self.flushed_forwarded[router] = self.flushed_forwarded.get(router, 0) + count
        if self.deleted:
            self.deleted = {copy for copy in self.deleted if copy >> _COPIES_BITS > self.flushed_at}

    def sources_of(self, row: Row, indexes: Iterable[int]) -> list[int]:
        """What some copies of a row are copies of: the source's seq, and which of several routers' copies it is."""
        known: list[int] = []
        for seq in chain.from_iterable(range(first, first + count) for first, count in self.sources.get(row.last, [])):
            again = known[-1] & _COPIES_MASK if known and known[-1] >> _COPIES_BITS == seq else -1
            known.append(seq << _COPIES_BITS | min(again + 1, _COPIES_MASK))
        return [known[index] for index in indexes if index < len(known)]

    def state(self) -> PipeState:
        return PipeState(
            self.source_id,
            self.flushed_at,
            self.flushed_forwarded,
            sorted(self.deleted),
            self.flushed_to,
            self.direct,
            self.ring,
        )

    def frame(self) -> PipeFrame:
        return PipeFrame(self.source_id, self.flushed_at, self.ring)
