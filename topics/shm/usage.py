"""The usage page: what each gateway has in flight per key, and what it has answered, in memory that all gateways map.

    0           64                            64 + stride
    | header    | gateway 0                   | gateway 1 ...
    | magic     | one word per key: in flight | STATUSES x ROUTES x BUCKETS: answers by duration | ROUTES: microseconds
    | gateways
    | keys

Rules: a gateway writes its own part alone, so a counter is a plain store and a limit over all gateways needs no lock:
who wants a slot writes down that it has it, and looks at the others after that. Of two that race for the last one both
may find it taken; never do both get it.

Crash: the slots of a gateway that has died are given back by the supervisor; what it had answered stays counted.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from topics.errors import TopicsError
from topics.shm.region import Region

MAGIC: Final = 0x45474153_55504F54  # "TOPUSAGE"
ROUTES: Final = 48
STATUSES: Final = (
    *(200, 201, 101, 400, 401, 403, 404, 405, 406, 408, 409, 413, 414, 415, 417, 421, 422, 426, 429, 431),
    *(500, 503, 505),
    0,  # any other
)
BUCKETS: Final = 16
# Upper bounds in microseconds of all buckets but the last, which has none.
BUCKET_US: Final = tuple(64 << i for i in range(BUCKETS - 1))
_HEADER_WORDS: Final = 8
_STATUS_AT: Final = {status: number * ROUTES * BUCKETS for number, status in enumerate(STATUSES)}
_OTHER: Final = _STATUS_AT[0]
_SPENT: Final = len(STATUSES) * ROUTES * BUCKETS
_COUNTER_WORDS: Final = _SPENT + ROUTES
# By the bits of a duration in whole microseconds, rounded down: the first bucket whose bound it does not exceed.
_BUCKET_OF_BITS: Final = tuple(min(max(bits - 6, 0), BUCKETS - 1) for bits in range(64))
_fence = threading.Lock()


def _stride(keys: int) -> int:
    """Words of one gateway; whole cache lines, so that no two write to the same."""
    return (keys + _COUNTER_WORDS + 7) & -8


class Usage:
    def __init__(self, region: Region) -> None:
        self.region = region
        words = region.view.cast("Q")
        if words[0] != MAGIC:
            raise TopicsError("not a usage page")
        self.gateways: int = words[1]
        self.keys: int = words[2]
        stride = _stride(self.keys)
        self._words = words
        starts = [_HEADER_WORDS + number * stride for number in range(self.gateways)]
        self._slots = [words[at : at + self.keys] for at in starts]
        self._counters = [words[at + self.keys : at + stride] for at in starts]

    @classmethod
    def create(cls, *, gateways: int, keys: int) -> Usage:
        region = Region.create(8 * (_HEADER_WORDS + gateways * _stride(keys)))
        with region.view.cast("Q") as header:
            header[1] = gateways
            header[2] = keys
            header[0] = MAGIC
        return cls(region)

    @classmethod
    def attach(cls, fd: int, size: int) -> Usage:
        return cls(Region.attach(fd, size))

    def slots(self, gateway: int, *, most: int) -> Slots:
        others = [part for number, part in enumerate(self._slots) if number != gateway]
        return Slots(self._slots[gateway], others, most)

    def meter(self, gateway: int) -> Meter:
        return Meter(self._counters[gateway])

    def give_back(self, gateway: int) -> None:
        """Only while no process of this gateway lives."""
        for key in range(self.keys):
            self._slots[gateway][key] = 0

    def in_flight(self) -> int:
        return sum(sum(part) for part in self._slots)

    def answers(self, route: int) -> dict[int, int]:
        """How often a route was answered, by status; only those that it was answered with."""
        counts = {status: sum(self._buckets(route, status)) for status in STATUSES}
        return {status: count for status, count in counts.items() if count}

    def durations(self, route: int) -> tuple[list[int], int]:
        """Answers of a route by bucket, and the sum of their microseconds."""
        by_status = [self._buckets(route, status) for status in STATUSES]
        return [sum(column) for column in zip(*by_status, strict=True)], sum(
            part[_SPENT + route] for part in self._counters
        )

    def counters(self, route: int) -> bytes:
        """All that the two above are made of: as long as it is the same, so are they."""
        starts = [at + route * BUCKETS for at in _STATUS_AT.values()]
        parts = [part[at : at + BUCKETS].tobytes() for part in self._counters for at in starts]
        return b"".join([*parts, *[part[_SPENT + route : _SPENT + route + 1].tobytes() for part in self._counters]])

    def _buckets(self, route: int, status: int) -> list[int]:
        at = _STATUS_AT[status] + route * BUCKETS
        parts = [part[at : at + BUCKETS].tolist() for part in self._counters]
        return parts[0] if len(parts) == 1 else [sum(column) for column in zip(*parts, strict=True)]

    def close(self) -> None:
        for part in (*self._slots, *self._counters):
            part.release()
        self._words.release()
        self.region.close()


class Slots:
    """One gateway's requests in flight per key, under a limit that all gateways share.

    `held` is ours in plain memory, which is cheaper than the page; the page has a copy if there is somebody to read
    it. Where there is nobody (`alone`) the HTTP/1 lane counts in `held` itself.
    """

    def __init__(self, mine: memoryview, others: list[memoryview], most: int) -> None:
        self._mine = mine
        self._others = others
        self.alone = not others
        self.held = list(mine)
        self.most = most
        self.refused: Callable[[], None] = lambda: None  # called by the lanes, for each request that found none free

    def take(self, key: int) -> bool:
        held = self.held
        total = count = held[key] + 1
        if self._others:
            self._mine[key] = count
            with _fence:
                pass  # ours is to be seen by the others before we look at theirs
            for other in self._others:
                total += other[key]
        if total > self.most:
            if self._others:
                self._mine[key] = count - 1
            return False
        held[key] = count
        return True

    def give(self, key: int) -> None:
        count = self.held[key] = self.held[key] - 1
        if self._others:
            self._mine[key] = count


class Meter:
    """One gateway's answers, by route and status."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.plain_us: list[int] = []  # plain appends that were answered with 200, not yet in the page
        self.plain_route = 0

    def count(self, route: int, status: int, took_us: int) -> None:
        words = self._words
        words[_STATUS_AT.get(status, _OTHER) + route * BUCKETS + _BUCKET_OF_BITS[took_us.bit_length()]] += 1
        words[_SPENT + route] += took_us

    def flush(self) -> None:
        """Before answers go out: what a client has seen is counted."""
        times_us, self.plain_us = self.plain_us, []
        words = self._words
        words[_SPENT + self.plain_route] += sum(times_us)
        at = _STATUS_AT[200] + self.plain_route * BUCKETS
        times_us.sort()  # nearly in order already: who came first waited longest
        first, last = _BUCKET_OF_BITS[times_us[0].bit_length()], _BUCKET_OF_BITS[times_us[-1].bit_length()]
        done = 0
        for bucket in range(first, last):
            end = bisect_left(times_us, BUCKET_US[bucket], done)
            words[at + bucket] += end - done
            done = end
        words[at + last] += len(times_us) - done
