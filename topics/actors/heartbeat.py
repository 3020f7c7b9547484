"""When a child counts as hung: pure, fed with what its heartbeat word shows.

Rules: the supervisor looks once per heartbeat interval; a look that finds the word unchanged is a miss,
and as many misses in a row as limits allow mean that the child hangs. Counting looks rather than
comparing clocks is deliberate: when the whole machine or the supervisor was held up, the children get the
time back that it lost. Before the first beat only the start deadline counts: a loaded machine takes
seconds to start Python.
"""

from __future__ import annotations

from topics import limits

START_TIMEOUT_MS = 60_000


class HeartbeatWatch:
    """One life of one child; a new life gets a new watch."""

    def __init__(self, *, interval_ms: int, misses_allowed: int = limits.HEARTBEAT_MISSES) -> None:
        self._looks_until_first = max(START_TIMEOUT_MS // interval_ms, misses_allowed)
        self._misses_allowed = misses_allowed
        self._last = 0
        self.misses = 0

    def look(self, beat: int) -> bool:
        """Take one look at the word; True when the child hangs."""
        if beat != self._last:
            self._last = beat
            self.misses = 0
            return False
        self.misses += 1
        return self.misses >= (self._misses_allowed if self._last else self._looks_until_first)
