"""Every combination of what may stand behind the last good frame of a WAL file."""

from __future__ import annotations

import itertools

import pytest

from topics.storage.format import FrameType
from topics.storage.frames import Frame
from topics.storage.recovery import TailVerdict, judge_tail

LAST_LSN = 10


def later(synced: int) -> Frame:
    return Frame(FrameType.APPEND, 0, 1, 1, 1, 1, 12, synced, b"", b"", 500, 100)


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
    frame = None if synced is None else later(synced)
    verdict = judge_tail(last_lsn=LAST_LSN, rubbish=rubbish, later=frame, same_boot=same_boot)
    assert verdict is TABLE[(rubbish, synced, same_boot)]


def test_a_file_without_any_good_frame() -> None:
    assert judge_tail(last_lsn=0, rubbish=True, later=later(0), same_boot=False) is TailVerdict.UNSYNCED
    assert judge_tail(last_lsn=0, rubbish=True, later=later(1), same_boot=False) is TailVerdict.CORRUPT
