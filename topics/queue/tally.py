"""Sums over all queues, for the board: brought up to date in the round that changed a queue, before its answers leave.

Only queues that were served are looked at: a round costs as much with ten thousand other queues as with none.
"""

from __future__ import annotations

from collections.abc import Iterable

from topics.queue.queue import Queue
from topics.shm.counters import Row, Word

_WORDS = (Word.LEASES, Word.JOBS_CLAIMED, Word.JOBS_ACKED, Word.DEAD_LETTERED)


class Tally:
    def __init__(self, row: Row) -> None:
        self._words = row.words
        self._sums = [0] * len(_WORDS)
        self._known: dict[Queue, tuple[int, ...]] = {}  # what of each queue is in the sums

    def look(self, queues: Iterable[Queue]) -> None:
        changed = False
        for queue in queues:
            now = (queue.leases.in_flight, queue.claimed, queue.acked, queue.moved)
            known = self._known.get(queue, (0, 0, 0, 0))
            if now != known:
                self._known[queue] = now
                self._sums = [total + new - old for total, new, old in zip(self._sums, now, known, strict=True)]
                changed = True
        if changed:
            self._publish()

    def forget(self, queue: Queue) -> None:
        """What it did stays counted; what it holds does not."""
        self.look([queue])
        leases, *_ = self._known.pop(queue, (0,))
        self._sums[0] -= leases
        self._publish()

    def _publish(self) -> None:
        for word, total in zip(_WORDS, self._sums, strict=True):
            self._words[word] = total
