"""What the end of a WAL file means: one table, no IO.

A scan stopped. Behind it there may be nothing, rubbish, or good frames. Rubbish is a write that a crash
cut short: nothing in it was acknowledged, so it goes. Good frames behind a hole mean that something in the middle
went bad, and that is never passed over silently, except in one case: after a power cut the pages of a tail that was
never synced reach the disk in any order, so a later page may be there and an earlier one not. `synced` in the later
frame tells: it says which lsn was known to be on the platter when that frame was written.
"""

from __future__ import annotations

import enum

from topics.storage.frames import Frame


class TailVerdict(enum.Enum):
    CLEAN = "clean"  # nothing but zeros behind the last frame
    TORN = "torn"  # a cut-short write: forget what is behind the last frame
    UNSYNCED = "unsynced"  # a power cut took part of a tail that was never promised: forget it, and say so
    CORRUPT = "corrupt"  # refuse


def judge_tail(*, last_lsn: int, rubbish: bool, later: Frame | None, same_boot: bool) -> TailVerdict:
    """last_lsn: of the last good frame; rubbish: non-zero bytes behind it; later: a good frame behind the hole, in this
    file or a newer one; same_boot: the machine has not restarted since the file was made."""
    if later is None:
        return TailVerdict.TORN if rubbish else TailVerdict.CLEAN
    if same_boot or later.synced > last_lsn:
        return TailVerdict.CORRUPT
    return TailVerdict.UNSYNCED
