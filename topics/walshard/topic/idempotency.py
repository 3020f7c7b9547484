"""Idempotency keys of a topic: key -> what the first write with it was given, for a window of time.

Keys stand in the WAL frame of their batch and in the snapshot, so they survive a crash exactly as their records do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Remembered(NamedTuple):
    first_seq: int
    records: int
    ts: int


class IdempotencyKeys:
    """Insertion order is time order, so forgetting is popping from the front."""

    def __init__(self) -> None:
        self._keys: dict[str, Remembered] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[tuple[str, Remembered]]:
        return iter(self._keys.items())

    def find(self, key: str, *, now_ms: int, window_ms: int) -> Remembered | None:
        found = self._keys.get(key)
        if found is None or now_ms - found.ts > window_ms:
            return None
        return found

    def remember(self, key: str, remembered: Remembered) -> None:
        self._keys.pop(key, None)
        self._keys[key] = remembered

    def forget(self, key: str) -> None:
        self._keys.pop(key, None)

    def expire(self, *, now_ms: int, window_ms: int) -> None:
        while self._keys:
            oldest = next(iter(self._keys))
            if now_ms - self._keys[oldest].ts <= window_ms:
                return
            del self._keys[oldest]
