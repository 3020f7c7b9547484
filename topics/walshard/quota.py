"""The instance's limits on topics and bytes, held by all shards together without a lock.

Rules: a shard writes down what it is about to have before it looks at what the others have; so of two that race for the
last of something both may be refused, and never do both get it. What a shard that is being restarted held still counts.
One that has never said what it holds, because the server has just started, makes others wait; so do copies of routers
that are being made again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from topics.errors import ApiError, throttled_by
from topics.settings import Settings
from topics.shm.counters import Row, State, Word

_fence = threading.Lock()


class Quota:
    """`mine` and `others` are rows of shards; without them it is a shard by itself."""

    def __init__(self, settings: Settings, mine: Row | None = None, others: Sequence[Row] = ()) -> None:
        self._most_topics = settings.max_topics
        self._most_bytes = settings.max_total_bytes
        self._mine = mine
        self._others = others

    def publish(self, topics: int, size: int) -> None:
        """What this shard has."""
        if self._mine is not None:
            self._mine.words[Word.CLAIMED_TOPICS] = topics
            self._mine.words[Word.CLAIMED_BYTES] = size
            self._mine.words[Word.TOTALS_KNOWN] = 1

    def claim(self, topics: int, size: int, *, new_topic: bool, more: int) -> None:
        """Raise if a topic or so many bytes more, beside what this shard has, are too much for the instance."""
        wants_topic = new_topic and self._most_topics
        wants_bytes = more and self._most_bytes
        if not wants_topic and not wants_bytes:
            return
        self.publish(topics + new_topic, size + more)
        with _fence:
            pass
        all_topics, all_bytes = topics + new_topic, size + more
        try:
            if wants_bytes and self._mine is not None and self._mine[Word.DERIVING]:
                raise _copying(self._mine.name)
            for row in self._others:
                if not row[Word.TOTALS_KNOWN] and row.state is not State.FAILED:
                    raise ApiError("not_ready", f"{row.name} has not recovered yet. Retry", retry_after_s=1)
                if wants_bytes and row[Word.DERIVING]:
                    raise _copying(row.name)
                all_topics += row[Word.CLAIMED_TOPICS]
                all_bytes += row[Word.CLAIMED_BYTES]
            if wants_topic and all_topics > self._most_topics:
                raise throttled_by("max_topics", self._most_topics, "delete topics you no longer need")
            if wants_bytes and all_bytes > self._most_bytes:
                raise throttled_by("max_total_bytes", self._most_bytes, "delete records or lower retention")
        except ApiError:
            self.publish(topics, size)
            raise


def _copying(shard: str) -> ApiError:
    """Copies that were lost with a process still have their room; how much that is will be known when they are made."""
    return ApiError("not_ready", f"{shard} makes copies again that were lost in a restart. Retry", retry_after_s=1)
