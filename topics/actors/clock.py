"""A clock that never goes back, whatever the wall clock does.

When the wall clock falls behind, this one goes on at half speed until the wall has caught up: time still passes, so
TTLs still end, and a wrong clock that was set right is forgotten instead of followed. Recovery starts it from the
highest time on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    def __init__(
        self,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ms = monotonic_ms
        self._last = 0
        self._anchor = monotonic_ms()  # when _last was taken, while behind

    def at_least(self, ms: int) -> None:
        self._last = max(self._last, ms)
        self._anchor = self._monotonic_ms()

    def now_ms(self) -> int:
        wall = self._wall_ns() // 1_000_000
        if wall >= self._last:
            self._last = wall
            self._anchor = 0
            return wall
        monotonic = self._monotonic_ms()
        if self._anchor == 0:
            self._anchor = monotonic
        gained = (monotonic - self._anchor) // 2
        if gained:
            self._last += gained
            self._anchor = monotonic
        return self._last
