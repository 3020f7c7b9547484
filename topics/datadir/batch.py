"""A batch of records as it lies on the disk: a block of a segment, or an APPEND frame of a WAL file.

It knows where the bytes are and which of its records somebody deleted; the bytes are read when they are wanted. What
caps and TTL took is not known to a batch: that is a matter of its topic's floor.
"""

from __future__ import annotations

import msgspec

from topics.storage.format import DELETED

_DELETED = bytes([DELETED])


class Batch(msgspec.Struct, gc=False, eq=False):
    file: str  # below the data folder
    wal: bool
    salt: int
    offset: int
    length: int  # of the frame; a block's delete flags follow it
    first: int
    count: int
    first_ts: int
    last_ts: int
    size: int  # what all its records count for
    tagged: bool
    flags: bytearray | None = None  # deletes that were known when the folder was looked at
    live_size: int = -1  # a memo: what its live records count for, ...
    live_low: int = 0  # ... when the floor was here ...
    live_count: int = 0  # ... and so many were live

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def deleted(self, index: int) -> bool:
        return self.flags is not None and self.flags[index] == DELETED

    def live(self, low: int, high: int | None = None) -> int:
        """How many records from seq `low` on, up to `high`, nobody has deleted."""
        start = max(0, low - self.first)
        stop = self.count if high is None else min(self.count, high - self.first + 1)
        if start >= stop:
            return 0
        if self.flags is None:
            return stop - start
        return stop - start - self.flags.count(DELETED, start, stop)

    def live_seqs(self, low: int) -> list[int]:
        start = max(low, self.first)
        if self.flags is None:
            return list(range(start, self.last + 1))
        flags, first = self.flags, self.first
        return [seq for seq in range(start, self.last + 1) if flags[seq - first] != DELETED]

    def last_live(self, high: int) -> int:
        """The last seq up to `high` that nobody has deleted; there has to be one."""
        last = min(self.last, high)
        if self.flags is None:
            return last
        return self.first + len(self.flags[: last - self.first + 1].rstrip(_DELETED)) - 1

    def mark_deleted(self, seq: int) -> bool:
        """False: it was deleted before."""
        if self.flags is None:
            self.flags = bytearray(self.count)
        if self.flags[seq - self.first] == DELETED:
            return False
        self.flags[seq - self.first] = DELETED
        return True

    def mark_deleted_between(self, first: int, last: int) -> None:
        start, stop = max(0, first - self.first), min(last - self.first + 1, self.count)
        if start < stop:
            if self.flags is None:
                self.flags = bytearray(self.count)
            self.flags[start:stop] = _DELETED * (stop - start)
