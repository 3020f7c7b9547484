"""Which shards take no new work at the moment: their governors say so on the board, and our own may say it for all.

Looked at once a round. What relieves a shard is never refused: acknowledgements, deletes, and everything that only asks
how things stand.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics.actors.governor import Governor, Level
from topics.errors import ApiError
from topics.shm.counters import Row, Word

_REFUSE = int(Level.REFUSE)


class Pressure:
    def __init__(self, shards: Sequence[Row] = (), governor: Governor | None = None) -> None:
        self._shards = [row.words for row in shards]
        self._governor = governor
        self.refusing: dict[int, int] = {}  # shards, and what clients are told to wait in milliseconds

    def look(self) -> None:
        own = self._governor
        if own is not None and own.level == _REFUSE:
            self.refusing = dict.fromkeys(range(len(self._shards)), own.retry_after_ms)
            return
        if self.refusing:
            self.refusing = {}
        for shard, words in enumerate(self._shards):
            if words[Word.PRESSURE] == _REFUSE:
                self.refusing[shard] = words[Word.THROTTLE_MS]

    def check(self, shard: int) -> None:
        """Raise 429 if this shard takes nothing new, now: a request may come outside of rounds."""
        self.look()
        if self.refusing and shard in self.refusing:
            raise under_pressure(self.refusing[shard])


def under_pressure(retry_after_ms: int) -> ApiError:
    return ApiError(
        "throttled",
        "the server is under pressure; nothing was done. Slow down and retry",
        {"retry_after_ms": retry_after_ms},
        retry_after_s=max(1, -(-retry_after_ms // 1_000)),
    )
