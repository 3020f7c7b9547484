"""What the end of a WAL file means: one table, no IO.

A scan stopped at `end`. Behind it there may be nothing, rubbish, or good frames. Rubbish is a write that a crash
cut short: nothing in it was acknowledged, so it goes. Good frames behind a hole mean that something in the middle
went bad, and that is never passed over silently, except in one case: after a power cut the pages of a tail that was
never synced reach the disk in any order, so a later page may be there and an earlier one not. `synced` in the later
frame tells: it says how much of the file was on the platter when that frame was written.
"""

from __future__ import annotations

import enum

from topics.storage.frames import Frame


class TailVerdict(enum.Enum):
    CLEAN = "clean"  # nothing but zeros behind the last frame
    TORN = "torn"  # a cut-short write: forget what is behind `end`
    UNSYNCED = "unsynced"  # a power cut took part of a tail that was never promised: forget it, and say so
    CORRUPT = "corrupt"  # refuse


def judge_tail(
    *, end: int, rubbish: bool, later: Frame | None, same_boot: bool, last_file: bool
) -> TailVerdict:
    """end: where the scan stopped; rubbish: non-zero bytes behind it; later: a good frame behind the hole;
    same_boot: the machine has not restarted since the file was made; last_file: no newer WAL file exists."""
    if later is None:
        if not rubbish:
            return TailVerdict.CLEAN
        # Rotation syncs a file before it starts the next one: an older file can't have a torn tail.
        return TailVerdict.TORN if last_file else TailVerdict.CORRUPT
    if same_boot or not last_file or later.synced > end:
        return TailVerdict.CORRUPT
    return TailVerdict.UNSYNCED
