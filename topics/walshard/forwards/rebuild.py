"""Fills a destination's rows again whose bytes went with an earlier process: what came for which row, and what is still
to come. Pure.

The rows are known from the log, with the source's seqs that they stand for. The source is read once more from where
segments end, in pieces that need not begin and end where rows do: a row is filled when the source has been read up to
the place at which it was copied then. What did not come by then is gone from the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from topics.storage.columns import Columns, coalesce
from topics.walshard.topic.index import Row


class Unfilled(NamedTuple):
    row: Row
    ids: list[int]  # what each of its copies is a copy of, ascending
    at: int  # the source's seq up to which it had been read when the row was copied


class Run(NamedTuple):
    """Neighbouring copies of a row that came."""

    begin: int  # index of the first one in its row
    records: int
    body: bytes


class Filled(NamedTuple):
    row: Row
    runs: list[Run]


class Rebuild:
    def __init__(self, at: int, rows: Sequence[Unfilled]) -> None:
        """`at`: the source's seq up to which copies are in segments; rows in seq order."""
        self.at = at
        self.until = rows[-1].at  # further, if it has to be known what the source holds behind them
        self._rows = deque(rows)
        self._pieces: list[Columns] = []
        self._came: dict[int, tuple[int, int]] = {}  # by id: which piece, which record of it

    @property
    def done(self) -> bool:
        return not self._rows and self.at >= self.until

    @property
    def first_seq(self) -> int | None:
        """Of the first row that has no bytes yet."""
        return self._rows[0].row.first if self._rows else None

    def take(self, ids: Sequence[int], body: bytes, *, to_seq: int, level: bool) -> list[Filled]:
        """Copies of what the source holds up to a seq; level: it holds no more. Returns the rows that can be filled."""
        if ids:
            number = len(self._pieces)
            self._pieces.append(Columns(body, count=len(ids), ts=0))
            self._came.update((id, (number, index)) for index, id in enumerate(ids))
        self.at = self.until if level else to_seq
        filled = []
        while self._rows and self._rows[0].at <= self.at:
            unfilled = self._rows.popleft()
            filled.append(Filled(unfilled.row, self._runs(unfilled.ids)))
        if not self._rows or not self._came or self._rows[0].ids[0] > next(reversed(self._came)):
            self._pieces.clear()
            self._came.clear()
        return filled

    def give_up(self) -> list[Filled]:
        """The source is gone: rows get what came for them."""
        return self.take([], b"", to_seq=self.until, level=True)

    def _runs(self, ids: list[int]) -> list[Run]:
        runs: list[Run] = []
        came = [self._came.get(id) for id in ids]
        index = 0
        while index < len(came):
            begin = index
            while index < len(came) and came[index] is not None:
                index += 1
            if index > begin:
                runs.append(Run(begin, index - begin, self._body([place for place in came[begin:index] if place])))
            index += 1
        return runs

    def _body(self, places: list[tuple[int, int]]) -> bytes:
        """Records of one piece or of several that follow each other."""
        parts: list[Columns] = []
        at = 0
        while at < len(places):
            number = places[at][0]
            indexes = [index for piece, index in places[at:] if piece == number]
            at += len(indexes)
            piece = self._pieces[number]
            if len(indexes) < piece.count:
                piece = Columns(piece.pick(indexes), count=len(indexes), ts=0)
            parts.append(piece)
        return coalesce(parts)
