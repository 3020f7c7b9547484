"""The looks at the heartbeats of all children: who is busy is left alone and named, who hangs is killed.

What a look means is heartbeat.py's table, and what follows from it for a child's life is restarts.py's. Rules: a child
that begins to be busy is logged once, and so is its return; children that stop or retire have their own deadlines, and
nothing is said of them.

Crash: this is the supervisor's memory and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topics import limits
from topics.actors.log import Log
from topics.actors.supervisor.heartbeat import HUNG, HeartbeatWatch, Patience, Verdict
from topics.actors.supervisor.process import ChildProcess
from topics.actors.supervisor.process_table import Child
from topics.actors.supervisor.restarts import Action, Event, Life
from topics.shm.counters import Word

_WATCHED = frozenset({Life.STARTING, Life.READY})


class Pulse:
    def __init__(
        self,
        children: Sequence[Child],
        *,
        interval_ms: int,
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._children = children
        self._interval_ms = interval_ms
        self._patience = Patience.of(interval_ms=interval_ms)
        self._log = log
        self._clock = clock
        self.busy: set[str] = set()  # names of those that work without a beat

    def begin(self, child: Child) -> None:
        """A new life of it begins."""
        child.watch = HeartbeatWatch(self._patience)
        self.busy.discard(child.name)

    def look(self) -> None:
        now = self._clock()
        for child in self._children:
            if child.process is None or child.watch is None:
                self.busy.discard(child.name)  # it died of something else
            else:
                self._look(child, child.watch, child.process, now)

    def _look(self, child: Child, watch: HeartbeatWatch, process: ChildProcess, now: float) -> None:
        pid = process.pid
        silent_ms = (watch.misses + 1) * self._interval_ms
        verdict = watch.look(child.row[Word.HEARTBEAT], process.vitals, now=now)
        if verdict in HUNG:
            self.busy.discard(child.name)
            if child.handle(Event.HUNG) is Action.KILL:
                self._log.warning("child_hangs", child=child.name, pid=pid, how=verdict.value, silent_ms=silent_ms)
                process.kill()
        elif verdict is Verdict.BUSY and child.life in _WATCHED and child.name not in self.busy:
            self.busy.add(child.name)
            self._log.warning(
                "child_busy", child=child.name, pid=pid, silent_ms=silent_ms, killed_after_ms=limits.BUSY_LIMIT_MS
            )
        elif verdict is Verdict.BEATS and child.name in self.busy:
            self.busy.discard(child.name)
            self._log.info("child_beats_again", child=child.name, pid=pid, silent_ms=silent_ms)
