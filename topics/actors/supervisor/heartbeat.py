"""When a child counts as hung: pure, fed with what its heartbeat word shows and with other signs of life.

Rules: the supervisor looks once per heartbeat interval; a look that finds the word unchanged is a miss. After as many
misses in a row as limits allow, the signs of life of these looks decide:

    misses                          at work in most looks     otherwise
    fewer than HEARTBEAT_MISSES     QUIET                     QUIET
    up to BUSY_LIMIT_MS             BUSY: it is left alone    STUCK: it is killed
    more                            ENDLESS: it is killed     STUCK

At work is a child whose loop can run or waits for the disk, or whose processor time advances: a large request or a slow
disk holds its loop up, and a kill would only lose what it has done. A stopped process (SIGSTOP) is never at work, nor
is one that sleeps while a thread of it uses a tick now and then. An endless loop looks like work; therefore the bound.

Counting looks rather than comparing clocks is deliberate: when the whole machine or the supervisor was held up, the
children get the time back that it lost. Before the first beat only the start deadline counts: a loaded machine takes
seconds to start Python.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

import msgspec

from topics import limits

START_TIMEOUT_MS = 60_000

# By the state of its loop's thread, as in /proc/<pid>/stat; in a state that is not here its processor time decides.
AT_WORK = {
    "R": True,  # runs, or waits for a processor
    "D": True,  # waits for a disk, and could not be killed before that answers
    "T": False,  # stopped
    "t": False,  # stopped by a debugger
    "Z": False,  # dead
    "X": False,
}


class Vitals(msgspec.Struct, frozen=True):
    """What the kernel says of a process."""

    cpu_s: float  # processor time of all its threads since its start
    state: str | None = None  # of the thread that runs its loop; None: this can't be seen


class Verdict(enum.Enum):
    BEATS = "beats"
    QUIET = "quiet"  # not for long enough to say anything
    BUSY = "busy"
    STUCK = "stuck"
    ENDLESS = "endless"


HUNG = frozenset({Verdict.STUCK, Verdict.ENDLESS})


class Patience(msgspec.Struct, frozen=True):
    """How many misses are borne, in which case."""

    starting: int
    beating: int
    busy: int

    @classmethod
    def of(cls, *, interval_ms: int, misses_allowed: int = limits.HEARTBEAT_MISSES) -> Patience:
        return cls(
            starting=max(START_TIMEOUT_MS // interval_ms, misses_allowed),
            beating=misses_allowed,
            busy=max(limits.BUSY_LIMIT_MS // interval_ms, 2 * misses_allowed),
        )


def judge(patience: Patience, *, begun: bool, misses: int, at_work: bool) -> Verdict:
    if misses == 0:
        return Verdict.BEATS
    if not begun:
        return Verdict.QUIET if misses < patience.starting else Verdict.STUCK
    if misses < patience.beating:
        return Verdict.QUIET
    if not at_work:
        return Verdict.STUCK
    return Verdict.BUSY if misses < patience.busy else Verdict.ENDLESS


def works(before: Vitals | None, now: Vitals | None, *, elapsed_s: float) -> bool:
    """Whether it was at work between two looks; `before` is None if the first was not taken."""
    if now is None:
        return False
    certain = AT_WORK.get(now.state or "")
    if certain is not None:
        return certain
    return before is not None and now.cpu_s - before.cpu_s >= limits.BUSY_SHARE * elapsed_s > 0


class HeartbeatWatch:
    """One life of one child; a new life gets a new watch."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._last = 0
        self._vitals: tuple[float, Vitals | None] | None = None  # when, what; of the look before, if that was a miss
        self._worked: deque[bool] = deque(maxlen=patience.beating)
        self.misses = 0

    def look(self, beat: int, vitals: Callable[[], Vitals | None], *, now: float) -> Verdict:
        """Take one look. `vitals` is asked only if the heart has not beaten: most looks cost nothing."""
        if beat != self._last:
            self._last = beat
            self.misses = 0
            self._vitals = None
            self._worked.clear()
        else:
            self.misses += 1
            found = vitals()
            then, before = self._vitals or (now, None)
            self._worked.append(works(before, found, elapsed_s=now - then))
            self._vitals = (now, found)
        at_work = 2 * sum(self._worked) > len(self._worked)
        return judge(self._patience, begun=self._last != 0, misses=self.misses, at_work=at_work)
