"""Shards that a reload replaces, as the coordinator sees them: who waits for their queues, and when they may go.

    on_hold ──► nothing new is asked; what was asked is answered ──► held: the shard may go
    link up, all its queues known again ──► whoever waited goes on
    the successor falls ──► whoever waited is refused, and nobody waits any more

Rules: a request waits no longer than its caller does; it has not been looked at before it goes on, so nothing is done
twice. Queues rest meanwhile: their tables are as they were, and are written down whole when the shard is back.

Crash of this process: its callers are told that the outcome is unknown, though nothing was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from topics.actors.rpc import Asks
from topics.errors import ApiError
from topics.queue.queue import Queue
from topics.shm.counters import Board, State

_FALLEN = frozenset({State.FAILED, State.BACKOFF, State.STOPPED})


class Waiting(NamedTuple):
    topic: str
    deadline_ms: int  # 0: none
    then: Callable[[Queue], None]
    failed: Callable[[ApiError], None]


class Holds:
    def __init__(self, asks: Asks, *, say_held: Callable[[str], None], board: Board) -> None:
        self._asks = asks
        self._say_held = say_held
        self._board = board
        self._leaving: list[int] = []  # those that have not been told yet that all is in their rings
        self._waiting: dict[int, list[Waiting]] = {}  # by shard; there is a list for each that is held
        self._came: set[int] = set()  # those of them whose successor was there

    @property
    def busy(self) -> bool:
        return bool(self._leaving or self._waiting)

    def __contains__(self, shard: int) -> bool:
        return shard in self._waiting

    def hold(self, shard: int) -> None:
        self._waiting.setdefault(shard, [])
        self._came.discard(shard)
        self._leaving.append(shard)

    def came(self, shard: int) -> None:
        """Its link is up: it recovers, or serves."""
        self._came.add(shard)

    def fallen(self, *, gone: int | None = None) -> list[int]:
        """Shards that will not be back in a moment; gone: whose link has just ended."""
        return [
            shard
            for shard in self._waiting
            if (shard == gone and shard in self._came) or self._board.row(f"shard-{shard}").state in _FALLEN
        ]

    def step(self) -> None:
        """Once a round: a shard that has answered everything may go."""
        for shard in [each for each in self._leaving if not self._asks.pending(each)]:
            if self._asks.has_sent_all(shard):
                self._leaving.remove(shard)
                self._asks.hold(shard)
                self._say_held(f"shard-{shard}")

    def wait(self, shard: int, waiting: Waiting) -> None:
        self._waiting[shard].append(waiting)

    def end(self, shard: int) -> list[Waiting]:
        """It is back: whoever still waits for its queues, in the order they came."""
        now_ms = time.monotonic_ns() // 1_000_000
        return [each for each in self.give_up(shard) if not each.deadline_ms or each.deadline_ms >= now_ms]

    def give_up(self, shard: int) -> list[Waiting]:
        self._came.discard(shard)
        return self._waiting.pop(shard)
