"""The watch on the disk's free space: below a mark a shard takes no more records, while there is still room for what
makes room.

Looked at every FREE_LOOK_MS at most. It lifts by itself, a little above the mark, so that it does not flutter.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from topics import limits
from topics.errors import ApiError

_LOOK_NS = limits.FREE_LOOK_MS * 1_000_000


def _free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class FreeSpace:
    def __init__(self, folder: str, *, mark: int, free_bytes: Callable[[str], int] = _free_bytes) -> None:
        self.low = False
        self.free = 0
        self._folder = folder
        self._mark = mark  # 0: nobody looks
        self._free_bytes = free_bytes
        self._look_ns = 0

    def look(self, now_ns: int) -> None:
        if now_ns < self._look_ns or not self._mark:
            return
        self._look_ns = now_ns + _LOOK_NS
        try:
            self.free = self._free_bytes(self._folder)
        except OSError:
            return  # whatever it is, writing will tell
        self.low = self.free < (self._mark * 21 // 20 if self.low else self._mark)

    def check(self) -> None:
        if self.low:
            raise ApiError(
                "storage_full",
                f"only {self.free} bytes are free on the data disk; TOPICS_MIN_FREE_BYTES says how many must be. "
                "Nothing was written. Reads and deletes still work; writes resume by themselves when there is space",
                {"free_bytes": self.free, "min_free_bytes": self._mark},
                retry_after_s=5,
            )
