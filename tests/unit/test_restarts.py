"""Every state × event of a child's life, and the budget of restarts."""

from __future__ import annotations

import itertools

import pytest

from topics import limits
from topics.actors.heartbeat import START_TIMEOUT_MS, HeartbeatWatch
from topics.actors.restarts import (
    ALIVE,
    LONGEST_PAUSE_S,
    OVER,
    TRANSITIONS,
    WINDOW_S,
    Action,
    ChildLife,
    Event,
    IllegalEvent,
    Life,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


# The shortest way into each state.
WAY_TO: dict[Life, list[Event]] = {
    Life.WAITING: [],
    Life.STARTING: [Event.START],
    Life.READY: [Event.START, Event.READY],
    Life.KILLED: [Event.START, Event.HUNG],
    Life.REFUSING: [Event.START, Event.REFUSED],
    Life.BACKOFF: [Event.START, Event.EXIT],
    Life.FAILED: [Event.START, Event.REFUSED, Event.EXIT],
    Life.STOPPING: [Event.START, Event.STOP],
    Life.STOPPED: [Event.STOP],
    Life.RETIRING: [Event.START, Event.READY, Event.RETIRE],
}

# state -> event -> (next state, action): what is wanted, written out once more and apart from the table.
S, A = Life, Action
WANTED: dict[Life, dict[Event, tuple[Life, Action]]] = {
    S.WAITING: {Event.START: (S.STARTING, A.NOTHING), Event.STOP: (S.STOPPED, A.DONE)},
    S.STARTING: {
        Event.READY: (S.READY, A.NOTHING),
        Event.REFUSED: (S.REFUSING, A.NOTHING),
        Event.HUNG: (S.KILLED, A.KILL),
        Event.EXIT: (S.BACKOFF, A.RETRY),
        Event.STOP: (S.STOPPING, A.SEND_STOP),
    },
    S.READY: {
        Event.READY: (S.READY, A.NOTHING),
        Event.REFUSED: (S.REFUSING, A.NOTHING),
        Event.HUNG: (S.KILLED, A.KILL),
        Event.EXIT: (S.BACKOFF, A.RETRY),
        Event.STOP: (S.STOPPING, A.SEND_STOP),
        Event.RETIRE: (S.RETIRING, A.SEND_RETIRE),
    },
    S.RETIRING: {
        Event.READY: (S.RETIRING, A.NOTHING),
        Event.REFUSED: (S.REFUSING, A.NOTHING),
        Event.HUNG: (S.RETIRING, A.NOTHING),
        Event.OVERDUE: (S.RETIRING, A.KILL),
        Event.EXIT: (S.WAITING, A.REPLACE),
        Event.STOP: (S.STOPPING, A.SEND_STOP),
    },
    S.KILLED: {
        Event.READY: (S.KILLED, A.NOTHING),
        Event.REFUSED: (S.REFUSING, A.NOTHING),
        Event.HUNG: (S.KILLED, A.NOTHING),
        Event.EXIT: (S.BACKOFF, A.RETRY),
        Event.STOP: (S.STOPPING, A.NOTHING),
    },
    S.REFUSING: {
        Event.READY: (S.REFUSING, A.NOTHING),
        Event.REFUSED: (S.REFUSING, A.NOTHING),
        Event.HUNG: (S.REFUSING, A.KILL),
        Event.EXIT: (S.FAILED, A.GIVE_UP),
        Event.STOP: (S.STOPPING, A.NOTHING),
    },
    S.BACKOFF: {Event.START: (S.STARTING, A.NOTHING), Event.STOP: (S.STOPPED, A.DONE)},
    S.FAILED: {Event.STOP: (S.FAILED, A.NOTHING)},
    S.STOPPING: {
        Event.READY: (S.STOPPING, A.NOTHING),
        Event.REFUSED: (S.STOPPING, A.NOTHING),
        Event.HUNG: (S.STOPPING, A.NOTHING),
        Event.STOP: (S.STOPPING, A.NOTHING),
        Event.OVERDUE: (S.STOPPING, A.KILL),
        Event.EXIT: (S.STOPPED, A.DONE),
    },
    S.STOPPED: {Event.STOP: (S.STOPPED, A.NOTHING), Event.OVERDUE: (S.STOPPED, A.NOTHING)},
}


def child_in(life: Life) -> ChildLife:
    child = ChildLife(Clock())
    for event in WAY_TO[life]:
        child.handle(event)
    assert child.life is life
    return child


@pytest.mark.parametrize(("life", "event"), list(itertools.product(Life, Event)))
def test_every_state_and_event(life: Life, event: Event) -> None:
    child = child_in(life)
    if event not in WANTED[life]:
        with pytest.raises(IllegalEvent, match=life.value):
            child.handle(event)
        assert child.life is life
        return
    after, action = WANTED[life][event]
    assert child.handle(event) is action
    assert child.life is after


def test_every_living_child_can_die_hang_and_be_stopped() -> None:
    for life in ALIVE:
        for event in (Event.EXIT, Event.STOP, Event.HUNG, Event.READY, Event.REFUSED):
            assert (life, event) in TRANSITIONS
    for life in OVER:
        assert (life, Event.START) not in TRANSITIONS


def die(child: ChildLife) -> Action:
    if child.life is not Life.STARTING:
        child.handle(Event.START)
    return child.handle(Event.EXIT)


def test_first_restart_is_immediate_then_pauses_grow_then_it_stays_down() -> None:
    child = ChildLife(Clock(), restarts_per_minute=5)
    pauses = []
    while die(child) is Action.RETRY:
        pauses.append(child.pause_s)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert child.life is Life.FAILED
    assert child.statistics().starts == 6


def test_pauses_are_bounded() -> None:
    child = ChildLife(Clock(), restarts_per_minute=12)
    pauses = []
    while die(child) is Action.RETRY:
        pauses.append(child.pause_s)
    assert max(pauses) == LONGEST_PAUSE_S == pauses[-1]


def test_restarts_older_than_a_minute_no_longer_count() -> None:
    clock = Clock()
    child = ChildLife(clock)
    for _ in range(limits.RESTARTS_PER_MINUTE):
        assert die(child) is Action.RETRY
    clock.now += WINDOW_S
    assert die(child) is Action.RETRY
    assert child.pause_s == 0.0
    assert child.statistics().restarts_in_window == 1


def test_a_child_that_dies_now_and_then_is_always_restarted() -> None:
    clock = Clock()
    child = ChildLife(clock)
    for _ in range(100):
        assert die(child) is Action.RETRY
        clock.now += WINDOW_S / limits.RESTARTS_PER_MINUTE + 0.001


def test_deaths_by_hanging_count_too() -> None:
    child = ChildLife(Clock(), restarts_per_minute=1)
    child.handle(Event.START)
    child.handle(Event.HUNG)
    assert child.handle(Event.EXIT) is Action.RETRY
    child.handle(Event.START)
    child.handle(Event.HUNG)
    assert child.handle(Event.EXIT) is Action.GIVE_UP
    assert child.life is Life.FAILED


def test_heart_that_stops_is_noticed_after_the_misses_allowed() -> None:
    watch = HeartbeatWatch(interval_ms=1_000, misses_allowed=3)
    assert not watch.look(10)
    assert [watch.look(10) for _ in range(3)] == [False, False, True]


def test_one_beat_forgives_all_misses() -> None:
    watch = HeartbeatWatch(interval_ms=1_000, misses_allowed=3)
    for beat in (10, 10, 10, 11, 11, 11, 12):
        assert not watch.look(beat)


def test_before_the_first_beat_only_the_start_deadline_counts() -> None:
    watch = HeartbeatWatch(interval_ms=1_000, misses_allowed=3)
    looks = START_TIMEOUT_MS // 1_000
    assert [watch.look(0) for _ in range(looks)] == [False] * (looks - 1) + [True]


def test_start_deadline_is_never_shorter_than_a_hang() -> None:
    watch = HeartbeatWatch(interval_ms=60_000, misses_allowed=5)
    assert [watch.look(0) for _ in range(5)] == [False] * 4 + [True]
