"""How long to wait before the next try: doubling, with jitter, so that many clients don't come back at once.

Pure: chance is passed in, and sleeping is the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.1
MOST_S = 5.0


class Backoff:
    def __init__(
        self, *, first_s: float = FIRST_S, most_s: float = MOST_S, chance: Callable[[], float] = random.random
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._chance = chance
        self._ceiling_s = first_s

    def next_s(self, *, at_least_s: float = 0.0) -> float:
        """Between half the ceiling and the ceiling, which then doubles; never less than what the server asked for."""
        delay_s = self._ceiling_s * (0.5 + 0.5 * self._chance())
        self._ceiling_s = min(self._ceiling_s * 2, self._most_s)
        return max(delay_s, at_least_s)

    def reset(self) -> None:
        """Things work again."""
        self._ceiling_s = self._first_s
