"""Writes that would rather wait than be refused (disable_backpressure): they stand here while their shard refuses.

Rules: per shard first come, first served, and nobody overtakes; one that has waited for PARK_MS goes on whatever the
shard says; together they take PARK_BYTES at most, and what comes on top is refused like any other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from topics import limits
from topics.gateway.api.types import Call, Sink

_PARK_NS = limits.PARK_MS * 1_000_000
_LOOK_NS = 20_000_000


class _Parked(msgspec.Struct, gc=False, eq=False):
    call: Call
    sink: Sink
    id: int
    since_ns: int


class Parking:
    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._waiting: dict[int, deque[_Parked]] = {}
        self._bytes = 0
        self.now_ns = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def has(self, shard: int) -> bool:
        return shard in self._waiting

    def park(self, call: Call, sink: Sink, id: int) -> bool:
        """False: there is no room."""
        size = call.size
        if self._bytes + size > limits.PARK_BYTES:
            return False
        self._bytes += size
        self._waiting.setdefault(call.shard, deque()).append(_Parked(call, sink, id, self._clock()))
        return True

    def release(self, now_ns: int, *, waits: Callable[[int], bool], send: Callable[[Call, Sink, int], bool]) -> None:
        """Send on what need not wait any more, with the time it has waited; `send` says whether it could."""
        self.now_ns = now_ns
        for shard in list(self._waiting):
            queue = self._waiting[shard]
            while queue and (not waits(shard) or now_ns - queue[0].since_ns >= _PARK_NS):
                first = queue[0]
                size = first.call.size
                first.call.throttle_us = (now_ns - first.since_ns) // 1_000
                if not send(first.call, first.sink, first.id):
                    break  # there is no room in the ring; it stays the first
                queue.popleft()
                self._bytes -= size
            if not queue:
                del self._waiting[shard]

    @property
    def next_due_ns(self) -> int | None:
        return self.now_ns + _LOOK_NS if self._waiting else None
