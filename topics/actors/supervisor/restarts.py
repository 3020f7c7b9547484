"""The life of a child as its supervisor sees it: one table, no IO, and a clock that is passed in.

Rules: TRANSITIONS is the whole machine; a pair that is not in it can't happen, and IllegalEvent says so.
A child that dies is started again at once, then after growing pauses; when it has been restarted as often
as a minute allows and dies once more it stays down, and so does one that reports a failure which a
restart would not help. One that reports what it waits for is started again every few seconds, as often as
it takes. A child that hangs is killed, and its death is then treated like any other.

A child that the server can't do without is restarted for ever (`persist`), whatever it dies of: FOR_EVER is its table.
Its pauses grow up to a bound, and begin anew after it has been ready for a while. Gateways are such children from the
moment at which one of them has served: what clients send may end them again and again, and must not end the server. A
gateway that dies before that is broken or can't work with the settings, and is given up as others are, until another
one has served.

    waiting ──START──► starting ──READY──► ready ──STOP──► stopping ──EXIT──► stopped
                          ▲  │ EXIT          │ EXIT
                          │  ▼               ▼
                   START  └─ backoff ◄───────┘          (budget spent: failed)

A reload asks a child that is ready to make place for another of its name, which costs nothing of the budget:

    ready ──RETIRE──► retiring ──EXIT──► waiting ──START──► starting
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

import msgspec

from topics import limits
from topics.errors import TopicsError

WINDOW_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
POSTPONED_PAUSE_S = 3.0
HEALTHY_S = 60.0  # ready for so long: the deaths before don't count any more


class Life(enum.Enum):
    WAITING = "waiting"  # not started yet
    STARTING = "starting"  # spawned, not ready
    READY = "ready"
    KILLED = "killed"  # it hung; its death is on the way
    REFUSING = "refusing"  # it reported a failure that a restart would not mend; it is about to exit
    POSTPONING = "postponing"  # it reported what it waits for; it is about to exit
    BACKOFF = "backoff"
    FAILED = "failed"  # stays down
    RETIRING = "retiring"  # it finishes its work; its successor is waiting
    STOPPING = "stopping"
    STOPPED = "stopped"


class Event(enum.Enum):
    START = "start"  # the supervisor spawns it
    READY = "ready"  # it says that it serves
    REFUSED = "refused"  # it says why it can't, and that trying again is no use
    POSTPONED = "postponed"  # it says what it can't do without and that may come back
    HUNG = "hung"  # its heart stopped, or it never began to beat
    EXIT = "exit"  # the process is gone, or uses nothing of its name any more
    REVIVE = "revive"  # it was given up before it was known that it can work
    RETIRE = "retire"  # a reload replaces it
    STOP = "stop"  # the server is stopping
    OVERDUE = "overdue"  # it was told to stop and has not


class Action(enum.Enum):
    NOTHING = "nothing"
    KILL = "kill"
    SEND_STOP = "send_stop"
    SEND_RETIRE = "send_retire"
    REPLACE = "replace"  # start its successor at once
    RETRY = "retry"  # start again after `pause_s`
    GIVE_UP = "give_up"
    DONE = "done"  # it will not be started again, as wished


class IllegalEvent(TopicsError):
    """An event that can't happen in this state."""


_RESTART_OR_GIVE_UP = (Life.BACKOFF, Action.RETRY)  # what the budget turns into (FAILED, GIVE_UP)

TRANSITIONS: dict[tuple[Life, Event], tuple[Life, Action]] = {
    (Life.WAITING, Event.START): (Life.STARTING, Action.NOTHING),
    (Life.WAITING, Event.STOP): (Life.STOPPED, Action.DONE),
    #
    (Life.STARTING, Event.READY): (Life.READY, Action.NOTHING),
    (Life.STARTING, Event.REFUSED): (Life.REFUSING, Action.NOTHING),
    (Life.STARTING, Event.POSTPONED): (Life.POSTPONING, Action.NOTHING),
    (Life.STARTING, Event.HUNG): (Life.KILLED, Action.KILL),
    (Life.STARTING, Event.EXIT): _RESTART_OR_GIVE_UP,
    (Life.STARTING, Event.STOP): (Life.STOPPING, Action.SEND_STOP),
    #
    (Life.READY, Event.READY): (Life.READY, Action.NOTHING),
    (Life.READY, Event.REFUSED): (Life.REFUSING, Action.NOTHING),
    (Life.READY, Event.HUNG): (Life.KILLED, Action.KILL),
    (Life.READY, Event.EXIT): _RESTART_OR_GIVE_UP,
    (Life.READY, Event.STOP): (Life.STOPPING, Action.SEND_STOP),
    (Life.READY, Event.RETIRE): (Life.RETIRING, Action.SEND_RETIRE),
    # As with a stop only the deadline rules: the last snapshot may take longer than a heartbeat.
    (Life.RETIRING, Event.READY): (Life.RETIRING, Action.NOTHING),
    (Life.RETIRING, Event.REFUSED): (Life.REFUSING, Action.NOTHING),
    (Life.RETIRING, Event.HUNG): (Life.RETIRING, Action.NOTHING),
    (Life.RETIRING, Event.OVERDUE): (Life.RETIRING, Action.KILL),
    (Life.RETIRING, Event.EXIT): (Life.WAITING, Action.REPLACE),
    (Life.RETIRING, Event.STOP): (Life.STOPPING, Action.SEND_STOP),
    # What it said before it was killed may be read after.
    (Life.KILLED, Event.READY): (Life.KILLED, Action.NOTHING),
    (Life.KILLED, Event.REFUSED): (Life.REFUSING, Action.NOTHING),
    (Life.KILLED, Event.POSTPONED): (Life.POSTPONING, Action.NOTHING),
    (Life.KILLED, Event.HUNG): (Life.KILLED, Action.NOTHING),
    (Life.KILLED, Event.EXIT): _RESTART_OR_GIVE_UP,
    (Life.KILLED, Event.STOP): (Life.STOPPING, Action.NOTHING),
    #
    (Life.REFUSING, Event.REFUSED): (Life.REFUSING, Action.NOTHING),
    (Life.REFUSING, Event.READY): (Life.REFUSING, Action.NOTHING),
    (Life.REFUSING, Event.HUNG): (Life.REFUSING, Action.KILL),
    (Life.REFUSING, Event.EXIT): (Life.FAILED, Action.GIVE_UP),
    (Life.REFUSING, Event.STOP): (Life.STOPPING, Action.NOTHING),
    #
    (Life.POSTPONING, Event.READY): (Life.POSTPONING, Action.NOTHING),
    (Life.POSTPONING, Event.REFUSED): (Life.REFUSING, Action.NOTHING),
    (Life.POSTPONING, Event.HUNG): (Life.POSTPONING, Action.KILL),
    (Life.POSTPONING, Event.EXIT): (Life.BACKOFF, Action.RETRY),
    (Life.POSTPONING, Event.STOP): (Life.STOPPING, Action.NOTHING),
    #
    (Life.BACKOFF, Event.START): (Life.STARTING, Action.NOTHING),
    (Life.BACKOFF, Event.STOP): (Life.STOPPED, Action.DONE),
    #
    (Life.FAILED, Event.STOP): (Life.FAILED, Action.NOTHING),
    # The stop deadline rules alone here: writing the last snapshot may take longer than a heartbeat.
    (Life.STOPPING, Event.READY): (Life.STOPPING, Action.NOTHING),
    (Life.STOPPING, Event.REFUSED): (Life.STOPPING, Action.NOTHING),
    (Life.STOPPING, Event.POSTPONED): (Life.STOPPING, Action.NOTHING),
    (Life.STOPPING, Event.HUNG): (Life.STOPPING, Action.NOTHING),
    (Life.STOPPING, Event.STOP): (Life.STOPPING, Action.NOTHING),
    (Life.STOPPING, Event.OVERDUE): (Life.STOPPING, Action.KILL),
    (Life.STOPPING, Event.EXIT): (Life.STOPPED, Action.DONE),
    #
    (Life.STOPPED, Event.STOP): (Life.STOPPED, Action.NOTHING),
    (Life.STOPPED, Event.OVERDUE): (Life.STOPPED, Action.NOTHING),
}

# Of a child that is restarted for ever.
FOR_EVER: dict[tuple[Life, Event], tuple[Life, Action]] = {
    **TRANSITIONS,
    (Life.REFUSING, Event.EXIT): (Life.BACKOFF, Action.RETRY),
    (Life.FAILED, Event.REVIVE): (Life.WAITING, Action.NOTHING),
}

ALIVE = frozenset(
    {Life.STARTING, Life.READY, Life.RETIRING, Life.KILLED, Life.REFUSING, Life.POSTPONING, Life.STOPPING}
)
OVER = frozenset({Life.STOPPED, Life.FAILED})


class RestartStatistics(msgspec.Struct, frozen=True):
    life: Life
    starts: int
    restarts_in_window: int


class ChildLife:
    """One child's place in the table, and its restart budget."""

    def __init__(self, clock: Callable[[], float], *, restarts_per_minute: int = limits.RESTARTS_PER_MINUTE) -> None:
        self._clock = clock
        self._budget = restarts_per_minute
        self._restarts: deque[float] = deque()  # when, within the last minute
        self._for_ever = False
        self._deaths = 0  # since it was last healthy; only of one that is restarted for ever
        self._ready_at: float | None = None
        self.life = Life.WAITING
        self.starts = 0
        self.pause_s = 0.0

    def persist(self) -> None:
        """From now on it is restarted for ever; one that has been given up needs a REVIVE."""
        self._for_ever = True

    def handle(self, event: Event) -> Action:
        try:
            life, action = (FOR_EVER if self._for_ever else TRANSITIONS)[self.life, event]
        except KeyError:
            raise IllegalEvent(f"{event.value} can't happen to a child that is {self.life.value}") from None
        if self.life is Life.POSTPONING and action is Action.RETRY:
            self.pause_s = POSTPONED_PAUSE_S  # its own wish: it costs nothing of the budget
        elif action is Action.RETRY:
            life, action = self._back_off() if self._for_ever else self._spend()
        if event is Event.START:
            self.starts += 1
            self._ready_at = None
        if event is Event.READY and self._ready_at is None:
            self._ready_at = self._clock()
        self.life = life
        return action

    def _spend(self) -> tuple[Life, Action]:
        """Take one restart from the budget, and set the pause before it."""
        spent = self._count()
        if spent >= self._budget:
            return Life.FAILED, Action.GIVE_UP
        self.pause_s = _pause_s(spent, first=FIRST_PAUSE_S, longest=LONGEST_PAUSE_S)
        self._restarts.append(self._clock())
        return Life.BACKOFF, Action.RETRY

    def _back_off(self) -> tuple[Life, Action]:
        """Set the pause before the next of any number of restarts."""
        now = self._clock()
        if self._ready_at is not None and now - self._ready_at >= HEALTHY_S:
            self._deaths = 0
        self._count()
        first_ms, longest_ms = limits.GATEWAY_PAUSE_MS
        self.pause_s = _pause_s(self._deaths, first=first_ms / 1_000, longest=longest_ms / 1_000)
        self._deaths += 1
        self._restarts.append(now)
        return Life.BACKOFF, Action.RETRY

    def _count(self) -> int:
        """The restarts of the last minute."""
        now = self._clock()
        while self._restarts and self._restarts[0] <= now - WINDOW_S:
            self._restarts.popleft()
        return len(self._restarts)

    def statistics(self) -> RestartStatistics:
        return RestartStatistics(self.life, self.starts, len(self._restarts))


def _pause_s(deaths: int, *, first: float, longest: float) -> float:
    """None after the first death, then twice as long each time."""
    return 0.0 if deaths == 0 else min(first * 2.0 ** min(deaths - 1, 32), longest)
