"""How many seqs a topic promises ahead: as many as it writes in two seconds, and SEQ_RESERVE at least. Pure.

The promise is what a crash may skip, so it should be small; it is also what may be given out before the next promise is
on the platter, so it must not be used up at once. A new one is made when half of the last is used: at a steady rate
that is once a second. A topic that becomes busy gets there in steps, each of them as large as what it has written so
far; one that becomes quiet takes back what it has promised.

    marks       when promises were made, and the last seq that was given out then; the first is at least two seconds
                old, if the topic is
    promise     what was given out since the first mark, per two seconds if that is longer ago
"""

from __future__ import annotations

from topics import limits


class Reserve:
    """The promises of one topic."""

    __slots__ = ("_marks",)

    def __init__(self, *, ms: int, seq: int) -> None:
        self._marks = [(ms, seq)]

    def promise(self, *, ms: int, seq: int, count: int) -> int:
        """How many seqs to promise beyond this one, the last of a batch of `count`."""
        window_ms = limits.SEQ_RESERVE_MS
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= ms - window_ms:
            del marks[0]
        since_ms, since_seq = marks[0]
        if len(marks) > 1 and marks[-1][0] == ms:
            marks[-1] = (ms, seq)
        else:
            marks.append((ms, seq))
        written = (seq - since_seq) * window_ms // max(window_ms, ms - since_ms)
        return max(limits.SEQ_RESERVE, count, written)

    def is_quiet(self, now_ms: int) -> bool:
        """Half of the promise has not been used for so long: it was made at another rate."""
        return now_ms - self._marks[-1][0] >= limits.SEQ_RESERVE_QUIET_MS
