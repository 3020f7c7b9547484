"""How many seqs a topic promises ahead: as many as it writes in two seconds, and SEQ_RESERVE at least. Pure.

The promise is what a crash may skip, so it should be small; it is also what may be given out before the next promise is
on the platter, so it must not be used up at once. A new one is made when half of the last is used: at a steady rate
that is once a second. A topic that becomes busy gets there in steps, each of them as large as what it has written so
far; one that becomes quiet promises anew, and less.

    marks       when promises were made, and the last seq that was given out then; the first is at least two seconds
                old, if the topic is
    promise     what was given out since the first mark, divided by the windows of two seconds since then, the last of
                which may have just begun: never more than it wrote within some two seconds

Why promises are lowered. The obvious rule is that a ceiling only rises, and that the highest one counts. Then one
import of a million records leaves a promise of as many, and a topic that gets a record an hour afterwards skips them in
a crash years later: it is quiet, and skips more than SEQ_RESERVE. So the last promise counts, not the highest.

Why no seq is given out twice. A crash leaves a prefix of the log that ends behind the last sync, or anywhere later; a
snapshot stands for such a prefix. So what recovery may find is the ceiling of the last synced frame, or of one behind
it. `sure_ceiling` is the lowest of these, and log/commit.py publishes nothing above it:

    a promise above the last      not sure until it is synced; before that a crash may leave the last one
    a promise below the last      binds when it is staged: a crash may leave it. It is not below any seq that was given
                                  out, nor below one of a batch that waits
    a write that failed           the ceiling does not go up again, because the bytes of a lower promise may be on the
                                  platter all the same, or a snapshot may have been made of it
    a snapshot                    has the ceiling of its moment; frames that it covers say nothing about it any more,
                                  later ones count as ever
    fsync and memory              make no promises: their records are their own proof, or nothing is. The ceiling that
                                  they leave behind is below the head, and recovery takes the higher of the two
    a change of class             away from disk or ephemeral: a HEAD frame with the head comes before the TOPIC frame.
                                  A crash leaves none, it alone (the ceiling counts), or both (the head does). To
                                  disk or ephemeral: nothing is sure until the TOPIC frame is synced
    copies being made again       readers have seen seqs that are not there yet: until they are, nothing is lowered
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
        windows = max(1, -((since_ms - ms) // window_ms))  # in the fullest of them it wrote so many at least
        return max(limits.SEQ_RESERVE, count, (seq - since_seq) // windows)

    def skip(self, count: int) -> None:
        """The next seqs stand for nothing that is written: they say nothing about its rate."""
        self._marks = [(ms, seq + count) for ms, seq in self._marks]

    def age_ms(self, now_ms: int) -> int:
        """Since the last promise. If that is short, half of the next will not last longer."""
        return now_ms - self._marks[-1][0]

    def is_quiet(self, now_ms: int) -> bool:
        """Half of the promise has not been used for so long: it was made at another rate."""
        return self.age_ms(now_ms) >= limits.SEQ_RESERVE_QUIET_MS
