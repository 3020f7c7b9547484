"""Reads from the cold tier, on threads of their own: the serving loop never waits for that disk.

A request that needs what is only there stops with `Away` before it has changed anything, and is taken up again, from
its beginning, when the rows are in memory. One that has something to say already says it, and ends before them. So
every fetch is followed by progress, however small the cache.

What caps and TTL are about to cut through is fetched ahead (`look_ahead`): an append must not wait for it. If it comes
to that all the same, it is read in place: a cap is exact at any time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from topics import limits
from topics.errors import Unreachable
from topics.storage.columns import Columns
from topics.walshard.log.worker import Worker
from topics.walshard.segments.segments import Segment
from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.index import Row
from topics.walshard.topic.topic import Topic, record_sizes, shares

_THREADS = 4
_AHEAD = 2  # rows at the front of a topic whose sizes and times are known before they are cut


class Away(Exception):
    """These rows are in the cold tier only, or they are too many to be measured at once."""

    def __init__(self, rows: list[Row], *, measures: bool = False) -> None:
        super().__init__(f"{len(rows)} batches")
        self.rows = rows
        self.measures = measures  # what is wanted: the sizes of their records, or the batches themselves


def window(topic: Topic, cache: BatchCache, *, first: Row, records: int, size: int) -> Away:
    """`first` and what a reader will want behind it."""
    rows: list[Row] = []
    records += first.count  # its beginning may not be wanted
    room = min(size + first.length, limits.FETCH_BYTES)
    for row in topic.rows.since(topic.rows.position(first.first)):
        if rows and (records <= 0 or room <= 0):
            break
        if not row.live:
            continue
        if cache.away(row):
            rows.append(row)
        elif not (isinstance(row.source, Segment) and row.source.cold):
            break
        records -= row.count
        room -= row.length
    return Away(rows)


def need_sizes(rows: Sequence[Row], cache: BatchCache) -> None:
    """Before something changes that needs the sizes of these rows' records: what can't be read is an error now, unless
    the disk of the cold tier is away. Then the sizes are estimated."""
    missing = [row for row in rows if row.sizes is None and cache.away(row)]
    if missing:
        raise Away(missing, measures=True)
    for row in rows:
        try:
            row.sizes = record_sizes(row)
        except Unreachable:
            if not row.source.out_of_reach:
                raise
            shares(row)  # nobody knows when the disk will be back, and a delete needs no more than the seqs


class _Flight:
    def __init__(self, away: Away) -> None:
        self.away = away
        self.waiting: list[tuple[Any, int, Callable[[], None]]] = []  # who asked, its correlation, what to do then


class Fetcher:
    def __init__(self, cache: BatchCache) -> None:
        self._cache = cache
        self._worker: Worker | None = None  # begins with the first fetch: most servers have no cold tier
        self._flights: dict[tuple[Row, bool], _Flight] = {}
        self.on_start: Callable[[int], None] = lambda event_fd: None
        self.fetches = 0

    @property
    def busy(self) -> bool:
        return self._worker is not None and self._worker.outstanding > 0

    def fetch(self, away: Away, then: Callable[[], None], *, asked_by: Any = None, correlation: int = 0) -> None:
        """Call `then` when the rows are there, or can't be read: then whoever reads them in place meets the error."""
        keys = [(row, away.measures) for row in away.rows]
        flight = self._flights.get(keys[-1])
        if flight is None or any(key not in self._flights for key in keys):
            flight = _Flight(away)
            for key in keys:
                self._flights.setdefault(key, flight)
            self._start().submit(lambda: _read(away), lambda found, error: self._landed(flight, found))
            self.fetches += 1
        flight.waiting.append((asked_by, correlation, then))

    def look_ahead(self, topic: Topic) -> None:
        """What retention will cut next."""
        config = topic.config
        if not (config.ttl_ms or (config.discard == "old" and (config.cap_records or config.cap_bytes))):
            return
        found = []
        for at, row in enumerate(topic.rows):
            if at == _AHEAD:
                break
            if row.sizes is None and self._cache.away(row) and (row, True) not in self._flights:
                found.append(row)
        if found:
            self.fetch(Away(found, measures=True), lambda: None)

    def forget(self, asked_by: Any, correlation: int | None = None) -> None:
        """Nobody waits for these answers any more."""
        for flight in set(self._flights.values()):
            flight.waiting = [
                waiting
                for waiting in flight.waiting
                if waiting[0] is not asked_by or correlation not in (None, waiting[1])
            ]

    def take(self) -> bool:
        return self._worker is not None and self._worker.take()

    def wait(self) -> None:
        if self._worker is not None:
            self._worker.wait()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _start(self) -> Worker:
        if self._worker is None:
            self._worker = Worker("fetcher", threads=_THREADS)
            self.on_start(self._worker.event_fd)
        return self._worker

    def _landed(self, flight: _Flight, found: list[bytes | tuple[array[int], array[int]] | None] | None) -> None:
        away = flight.away
        for row in away.rows:
            if self._flights.get((row, away.measures)) is flight:
                del self._flights[row, away.measures]
        cache = self._cache
        for row, each in zip(away.rows, found or [None] * len(away.rows), strict=True):
            if each is None:
                cache.lost.add(row)
            elif isinstance(each, bytes):
                if row.body is None and row.live:
                    row.body = each
            elif row.live:
                row.sizes, row.times = each
        for _, _, then in flight.waiting:
            then()
        for row in away.rows:
            cache.lost.discard(row)
            if not away.measures and row.live:
                cache.keep_body(row)  # only now: a small cache lets go of it at once


def _read(away: Away) -> list[bytes | tuple[array[int], array[int]] | None]:
    """On a thread: every row that can be read."""
    found: list[bytes | tuple[array[int], array[int]] | None] = []
    by_segment: dict[Segment, list[Row]] = {}
    bodies: dict[Row, bytes | None] = {}
    for row in away.rows:
        if (body := row.body) is not None:
            bodies[row] = body
        else:
            by_segment.setdefault(row.source, []).append(row)
    for segment, rows in by_segment.items():
        bodies.update(zip(rows, segment.read_bodies(rows), strict=True))
    for row in away.rows:
        body = bodies[row]
        if body is None or not away.measures:
            found.append(body)
        else:
            columns = Columns(body, count=row.count, ts=row.first_ts)
            found.append((array("I", columns.sizes()), array("Q", columns.times())))
    return found
