"""Index rows: one per batch in the WAL or block in a segment, in seq order.

A row knows where its bytes are, not the bytes: those are read when asked for and cached within the shard's bound.
Memory therefore follows the number of rows. A record is live if it is not among the first `skip` of its row and its
flag is not DELETED; `live` and `size` count the live ones.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from topics.storage.format import DELETED


class RowSource(Protocol):
    """What holds rows: a WAL file, a segment, or memory."""

    def read_body(self, row: Row) -> bytes: ...
    def release(self, row: Row) -> None: ...


class Row(msgspec.Struct, eq=False):
    first: int
    count: int
    first_ts: int
    last_ts: int
    size: int
    source: Any  # a RowSource; None: resident only (the ephemeral class)
    offset: int
    length: int
    live: int
    body: bytes | None = None
    skip: int = 0
    flags: bytearray | None = None
    rendered: Any = None  # a render.Rendered, kept by the cache
    sizes: array[int] | None = None  # of its records, while they are removed one by one
    times: array[int] | None = None  # likewise

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def whole(self) -> bool:
        return self.live == self.count

    def is_live(self, index: int) -> bool:
        return index >= self.skip and (self.flags is None or self.flags[index] != DELETED)

    def live_indexes(self, start: int = 0) -> Iterator[int]:
        flags = self.flags
        begin = max(start, self.skip)
        if flags is None:
            return iter(range(begin, self.count))
        return (index for index in range(begin, self.count) if flags[index] != DELETED)

    def first_live(self) -> int:
        """Seq of the first live record; only for rows that have one."""
        return self.first + next(self.live_indexes())

    def load(self) -> bytes:
        if self.body is not None:
            return self.body
        assert self.source is not None, "a resident row always has its body"
        body: bytes = self.source.read_body(self)
        return body

    def mark_deleted(self, index: int) -> None:
        if self.flags is None:
            self.flags = bytearray(self.count)
        self.flags[index] = DELETED


class RowList:
    """Rows in seq order, cheap to append to, to cut at the front, and to search."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._firsts: list[int] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._rows) - self._start

    def __iter__(self) -> Iterator[Row]:
        for at in range(self._start, len(self._rows)):
            yield self._rows[at]

    def front(self) -> Row | None:
        return self._rows[self._start] if self._start < len(self._rows) else None

    def back(self) -> Row | None:
        return self._rows[-1] if self._start < len(self._rows) else None

    def append(self, row: Row) -> None:
        self._rows.append(row)
        self._firsts.append(row.first)

    def pop_front(self) -> Row:
        row = self._rows[self._start]
        self._start += 1
        if self._start > 512 and self._start * 2 > len(self._rows):
            del self._rows[: self._start]
            del self._firsts[: self._start]
            self._start = 0
        return row

    def position(self, seq: int) -> int:
        """Where to start reading for seqs from `seq` on; an index for `since`."""
        at = bisect_right(self._firsts, seq, lo=self._start) - 1
        if at >= self._start and self._rows[at].last >= seq:
            return at
        return max(at + 1, self._start)

    def since(self, position: int) -> Iterator[Row]:
        rows = self._rows
        for at in range(position, len(rows)):
            yield rows[at]

    def find(self, seq: int) -> Row | None:
        at = bisect_right(self._firsts, seq, lo=self._start) - 1
        if at < self._start or self._rows[at].last < seq:
            return None
        return self._rows[at]

    def replace(self, old: list[Row], new: list[Row]) -> None:
        """Put `new` where the rows of `old` (neighbours, in order) stand, as far as they still do."""
        present = [row for row in old if self.find(row.first) is row]
        if present:
            at = bisect_right(self._firsts, present[0].first, lo=self._start) - 1
            self._rows[at : at + len(present)] = new
            self._firsts[at : at + len(present)] = [row.first for row in new]

    def compact(self) -> None:
        """Let go of rows without a live record."""
        self._rows = [row for row in self._rows[self._start :] if row.live]
        self._firsts = [row.first for row in self._rows]
        self._start = 0
