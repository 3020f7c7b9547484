"""A batch of records as it lies on the disk: a block of a segment, or an APPEND frame of a WAL file.

It knows where the bytes are and which of its records somebody deleted; the bytes are read when they are wanted. What
caps and TTL took is not known to a batch: that is a matter of its topic's floor.
"""

from __future__ import annotations

import msgspec

from topics.storage.format import DELETED


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

    def live(self, low: int) -> int:
        """How many records from seq `low` on nobody has deleted."""
        skip = min(max(0, low - self.first), self.count)
        if self.flags is None:
            return self.count - skip
        return self.count - skip - self.flags.count(DELETED, skip)

    def live_seqs(self, low: int) -> list[int]:
        start = max(low, self.first)
        if self.flags is None:
            return list(range(start, self.last + 1))
        flags, first = self.flags, self.first
        return [seq for seq in range(start, self.last + 1) if flags[seq - first] != DELETED]

    def mark_deleted(self, seq: int) -> bool:
        """False: it was deleted before."""
        if self.flags is None:
            self.flags = bytearray(self.count)
        if self.flags[seq - self.first] == DELETED:
            return False
        self.flags[seq - self.first] = DELETED
        return True

    def mark_deleted_below(self, seq: int) -> None:
        if self.flags is None:
            self.flags = bytearray(self.count)
        stop = min(seq - self.first, self.count)
        self.flags[:stop] = bytes([DELETED]) * stop
