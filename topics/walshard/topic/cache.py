"""Batches kept in memory: recent ones and recently read ones, within a bound, the oldest let go first."""

from __future__ import annotations

from collections import deque

from topics.walshard.forwards.copies import Copies
from topics.walshard.segments.segments import Segment
from topics.walshard.topic import render
from topics.walshard.topic.index import Row


class BatchCache:
    def __init__(self, *, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._kept: deque[tuple[Row, int, bool]] = deque()  # row, bytes, whether it is the rendered form
        self.lost: set[Row] = set()  # could not be fetched just now: whoever wants them meets the error

    def keep_body(self, row: Row) -> None:
        """A row whose body is nowhere else keeps it; it is not ours to let go."""
        if row.source is not None and not isinstance(row.source, Copies) and row.body is not None:
            self._keep(row, len(row.body), False)

    def away(self, row: Row) -> bool:
        """Whether its bytes are in the cold tier only."""
        source = row.source
        return row.body is None and isinstance(source, Segment) and source.cold and row not in self.lost

    def body(self, row: Row) -> bytes:
        body = row.body
        if body is None:
            body = row.body = row.load()
            self.keep_body(row)  # may let go of it at once, if it is larger than all we keep
        return body

    def rendered(self, row: Row) -> render.Rendered:
        rendered: render.Rendered | None = row.rendered
        if rendered is None:
            rendered = row.rendered = render.default(row)
            self._keep(row, rendered.weight, True)
        return rendered

    def _keep(self, row: Row, size: int, rendered: bool) -> None:
        self._kept.append((row, size, rendered))
        self._bytes += size
        while self._bytes > self._most and self._kept:
            old, freed, was_rendered = self._kept.popleft()
            self._bytes -= freed
            if was_rendered:
                old.rendered = None
            elif old.source is not None:
                old.body = None
