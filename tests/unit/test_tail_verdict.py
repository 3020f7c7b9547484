"""Every combination of what may stand behind the last good frame of a WAL file."""

from __future__ import annotations

import itertools

import pytest

from topics.storage.format import FrameType
from topics.storage.frames import Frame
from topics.storage.recovery import Later, TailVerdict, judge_tail, sum_up

LAST_LSN = 10


def later(synced: int, *, lsn: int = 12) -> Later:
    return Later(lsn, synced)


def frame(lsn: int, synced: int) -> Frame:
    return Frame(FrameType.APPEND, 0, 1, 1, 1, 1, lsn, synced, b"", b"", 500, 100)


# (rubbish, synced of a good frame behind the hole or None, same boot) -> verdict
TABLE = {
    (False, None, True): TailVerdict.CLEAN,
    (False, None, False): TailVerdict.CLEAN,
    (True, None, True): TailVerdict.TORN,
    (True, None, False): TailVerdict.TORN,
    # The page cache is still the one that was written to: nothing can be missing in the middle.
    (True, LAST_LSN - 1, True): TailVerdict.CORRUPT,
    (True, LAST_LSN, True): TailVerdict.CORRUPT,
    (True, LAST_LSN + 1, True): TailVerdict.CORRUPT,
    (False, LAST_LSN - 1, True): TailVerdict.CORRUPT,
    (False, LAST_LSN, True): TailVerdict.CORRUPT,
    (False, LAST_LSN + 1, True): TailVerdict.CORRUPT,
    # After a power cut: what was missing had never been promised ...
    (True, LAST_LSN - 1, False): TailVerdict.UNSYNCED,
    (True, LAST_LSN, False): TailVerdict.UNSYNCED,
    (False, LAST_LSN - 1, False): TailVerdict.UNSYNCED,
    (False, LAST_LSN, False): TailVerdict.UNSYNCED,
    # ... or it had.
    (True, LAST_LSN + 1, False): TailVerdict.CORRUPT,
    (False, LAST_LSN + 1, False): TailVerdict.CORRUPT,
}


@pytest.mark.parametrize(
    ("rubbish", "synced", "same_boot"),
    list(itertools.product((False, True), (None, LAST_LSN - 1, LAST_LSN, LAST_LSN + 1), (False, True))),
)
def test_every_combination(rubbish: bool, synced: int | None, same_boot: bool) -> None:
    found = None if synced is None else later(synced)
    verdict = judge_tail(last_lsn=LAST_LSN, rubbish=rubbish, later=found, same_boot=same_boot)
    assert verdict is TABLE[(rubbish, synced, same_boot)]


@pytest.mark.parametrize("covered", range(LAST_LSN + 3))
@pytest.mark.parametrize("rubbish", [False, True])
def test_what_a_snapshot_covers_had_been_synced(rubbish: bool, covered: int) -> None:
    verdict = judge_tail(last_lsn=LAST_LSN, rubbish=rubbish, later=later(0), same_boot=False, covered=covered)
    assert verdict is (TailVerdict.CORRUPT if covered > LAST_LSN else TailVerdict.UNSYNCED)


def test_all_frames_behind_a_hole_are_asked() -> None:
    assert sum_up([]) is None
    assert sum_up([frame(12, 3), frame(13, 9), frame(14, 4)]) == Later(12, 9)


def test_a_file_without_any_good_frame() -> None:
    assert judge_tail(last_lsn=0, rubbish=True, later=later(0), same_boot=False) is TailVerdict.UNSYNCED
    assert judge_tail(last_lsn=0, rubbish=True, later=later(1), same_boot=False) is TailVerdict.CORRUPT


# The snapshot covers 10 frames and no good one was found: the lsn of the first that follows, and what they say.
@pytest.mark.parametrize(
    ("lsn", "synced", "verdict"),
    [
        (12, 10, TailVerdict.UNSYNCED),  # 11 is missing, and nobody saw it synced
        (20, 10, TailVerdict.UNSYNCED),
        (12, 11, TailVerdict.CORRUPT),
        (11, 0, TailVerdict.CORRUPT),  # what is missing is 10 or before
        (5, 0, TailVerdict.CORRUPT),
        (1, 0, TailVerdict.CORRUPT),
    ],
)
def test_a_log_that_begins_with_a_hole(lsn: int, synced: int, verdict: TailVerdict) -> None:
    found = later(synced, lsn=lsn)
    assert judge_tail(last_lsn=0, rubbish=True, later=found, same_boot=False, covered=10) is verdict
