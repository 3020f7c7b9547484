"""Whose turn it is to be sent what it has waited for: bands of priority, served by deficit round-robin. Pure.

A band spans 250 points of effective priority; what waits climbs by 100 points a second, to 1,000 at most. In a turn
each band has a share of bytes that grows with its height. The highest band with something left of its share comes
first; when all who wait have used up theirs, the next turn begins. So higher bands come first and get more, and the
lowest still gets its share of every turn, however long a turn takes. Within a band everyone is served in turns. What
exceeded its share is taken from the next.

Under pressure the lower bands can be left out for a while (`floor`); what has waited for as long as waiting counts is
served all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

AGE_RATE = 100  # points per second waited
AGE_CAP_MS = 10_000
WIDTH = 250
LOWEST = -1_000
COUNT = 12
TOP = COUNT - 1
QUANTUM = 32 * 1024  # bytes of a turn for the lowest band; the others get as many times more as they are high
AGE_TICK_MS = 50
DEFERRED = (250 - LOWEST) // WIDTH  # bands below this one may be left out: nobody reads these, or they are set low

T = TypeVar("T", bound=Hashable)


def band_of(priority: int, *, waited_ms: int = 0) -> int:
    if waited_ms >= AGE_CAP_MS:
        return TOP
    return min(max((priority + AGE_RATE * waited_ms // 1_000 - LOWEST) // WIDTH, 0), TOP)


class Bands(Generic[T]):
    def __init__(self) -> None:
        self._bands: list[dict[T, None]] = [{} for _ in range(COUNT)]
        self._share = [0] * COUNT  # what is left of each band's share of this turn; a debt if it took too much
        self._waiting: dict[T, tuple[int, int]] = {}  # its band, and since when
        self._aged_ms = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: T) -> bool:
        return item in self._waiting

    def above(self, floor: int) -> Iterator[T]:
        for band in self._bands[floor:]:
            yield from band

    def below(self, floor: int) -> Iterator[T]:
        for band in self._bands[:floor]:
            yield from band

    def add(self, item: T, priority: int, *, now_ms: int) -> None:
        if item not in self._waiting:
            self._put(item, band_of(priority), now_ms)

    def _put(self, item: T, band: int, since_ms: int) -> None:
        self._bands[band][item] = None
        self._waiting[item] = (band, since_ms)

    def discard(self, item: T) -> None:
        if (found := self._waiting.pop(item, None)) is not None:
            del self._bands[found[0]][item]

    def age(self, now_ms: int, priority: Callable[[T], int]) -> None:
        """Once a tick: whoever has waited long enough goes into a higher band."""
        if now_ms - self._aged_ms < AGE_TICK_MS:
            return
        self._aged_ms = now_ms
        for item, (band, since_ms) in list(self._waiting.items()):
            better = band_of(priority(item), waited_ms=now_ms - since_ms)
            if better != band:
                del self._bands[band][item]
                self._put(item, better, since_ms)

    def serve(
        self,
        *,
        now_ms: int,
        ready: Callable[[T], bool],
        push: Callable[[T], int],
        behind: Callable[[T], bool],
        priority: Callable[[T], int],
        floor: int = 0,
    ) -> None:
        """Push to whoever is ready, in turns, until nobody is. `push` returns the bytes it took; who is still behind
        after its push waits for its next turn."""
        lines = {at: deque(filter(ready, self._bands[at])) for at in range(TOP, floor - 1, -1) if self._bands[at]}
        while lines := {at: line for at, line in sorted(lines.items(), reverse=True) if line}:
            if all(self._share[at] <= 0 for at in lines):
                lines = {at: deque(filter(ready, line)) for at, line in lines.items()}
                if not any(lines.values()):
                    return  # this turn goes on when somebody is ready
                self._share = [min(left, 0) + QUANTUM * (at + 1) for at, left in enumerate(self._share)]
            alone = len(lines) == 1  # need not leave anything for others
            for at, line in list(lines.items()):
                while line and (alone or self._share[at] > 0):
                    item = line.popleft()
                    if item not in self._waiting or not ready(item):
                        continue
                    taken = push(item)
                    if not alone:
                        self._share[at] -= taken
                    self.discard(item)
                    if behind(item):
                        band = band_of(priority(item))
                        self._put(item, band, now_ms)
                        if band >= floor:
                            alone = alone and band == at
                            lines.setdefault(band, deque()).append(item)
