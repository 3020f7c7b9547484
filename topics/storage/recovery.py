"""What the end of a WAL file means: one table, no IO.

A scan stopped. Behind it there may be nothing, rubbish, or good frames. Rubbish is a write that a crash
cut short: nothing in it was acknowledged, so it goes. Good frames behind a hole mean that something in the middle
went bad, and that is never passed over silently, except in one case: after a power cut the pages of a tail that was
never synced reach the disk in any order, so a later page may be there and an earlier one not. `synced` in the later
frames tells: it says which lsn was known to be on the platter when a frame was written. All of them are asked: frames
that were written together with the one that is missing say nothing of it, those of the next round do. And what a
snapshot covers was synced before the snapshot was written.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from topics.storage.frames import Frame


class TailVerdict(enum.Enum):
    CLEAN = "clean"  # nothing but zeros behind the last frame
    TORN = "torn"  # a cut-short write: forget what is behind the last frame
    UNSYNCED = "unsynced"  # a power cut took part of a tail that was never promised: forget it, and say so
    CORRUPT = "corrupt"  # refuse


class Later(NamedTuple):
    """The good frames behind a hole, in its file and in newer ones."""

    first_lsn: int
    synced: int  # the highest that one of them says


def sum_up(frames: Iterable[Frame]) -> Later | None:
    found: Later | None = None
    for frame in frames:
        found = Later(frame.lsn, frame.synced) if found is None else Later(found[0], max(found[1], frame.synced))
    return found


def judge_tail(*, last_lsn: int, rubbish: bool, later: Later | None, same_boot: bool, covered: int = 0) -> TailVerdict:
    """last_lsn: of the last good frame, 0 if there is none; rubbish: non-zero bytes behind it; same_boot: the machine
    has not restarted since the file was made; covered: the last lsn that the snapshot knows, 0 if there is none."""
    if later is None:
        return TailVerdict.TORN if rubbish else TailVerdict.CLEAN
    # A log without a good frame before the hole begins wherever the snapshot lets it.
    before = last_lsn or max(0, min(covered, later.first_lsn - 2))
    if same_boot or max(later.synced, covered) > before:
        return TailVerdict.CORRUPT
    return TailVerdict.UNSYNCED
