"""Every state × event of a child's life, and the budget of restarts."""

from __future__ import annotations

import itertools

import pytest

from topics import limits
from topics.actors.supervisor.restarts import (
    ALIVE,
    FOR_EVER,
    HEALTHY_S,
    LONGEST_PAUSE_S,
    OVER,
    POSTPONED_PAUSE_S,
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
    Life.POSTPONING: [Event.START, Event.POSTPONED],
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
        Event.POSTPONED: (S.POSTPONING, A.NOTHING),
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
        Event.POSTPONED: (S.POSTPONING, A.NOTHING),
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
    S.POSTPONING: {
        Event.READY: (S.POSTPONING, A.NOTHING),
        Event.REFUSED: (S.REFUSING, A.NOTHING),
        Event.HUNG: (S.POSTPONING, A.KILL),
        Event.EXIT: (S.BACKOFF, A.RETRY),
        Event.STOP: (S.STOPPING, A.NOTHING),
    },
    S.BACKOFF: {Event.START: (S.STARTING, A.NOTHING), Event.STOP: (S.STOPPED, A.DONE)},
    S.FAILED: {Event.STOP: (S.FAILED, A.NOTHING)},
    S.STOPPING: {
        Event.POSTPONED: (S.STOPPING, A.NOTHING),
        Event.READY: (S.STOPPING, A.NOTHING),
        Event.REFUSED: (S.STOPPING, A.NOTHING),
        Event.HUNG: (S.STOPPING, A.NOTHING),
        Event.STOP: (S.STOPPING, A.NOTHING),
        Event.OVERDUE: (S.STOPPING, A.KILL),
        Event.EXIT: (S.STOPPED, A.DONE),
    },
    S.STOPPED: {Event.STOP: (S.STOPPED, A.NOTHING), Event.OVERDUE: (S.STOPPED, A.NOTHING)},
}


# What is otherwise for a child that is restarted for ever.
WANTED_FOR_EVER = {
    **WANTED,
    S.REFUSING: {**WANTED[S.REFUSING], Event.EXIT: (S.BACKOFF, A.RETRY)},
    S.FAILED: {**WANTED[S.FAILED], Event.REVIVE: (S.WAITING, A.NOTHING)},
}


def child_in(life: Life, *, for_ever: bool = False) -> ChildLife:
    child = ChildLife(Clock())
    for event in WAY_TO[life]:
        child.handle(event)
    if for_ever:
        child.persist()
    assert child.life is life
    return child


@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize(("life", "event"), list(itertools.product(Life, Event)))
def test_every_state_and_event(life: Life, event: Event, for_ever: bool) -> None:
    child = child_in(life, for_ever=for_ever)
    wanted = WANTED_FOR_EVER if for_ever else WANTED
    if event not in wanted[life]:
        with pytest.raises(IllegalEvent, match=life.value):
            child.handle(event)
        assert child.life is life
        return
    after, action = wanted[life][event]
    assert child.handle(event) is action
    assert child.life is after


def test_nothing_that_happens_to_a_child_that_is_restarted_for_ever_leads_to_failed() -> None:
    for (life, _), (after, action) in FOR_EVER.items():
        assert action is not Action.GIVE_UP
        assert life is Life.FAILED or after is not Life.FAILED


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


@pytest.mark.parametrize("for_ever", [False, True])
def test_one_that_waits_for_something_is_started_again_as_often_as_it_takes(for_ever: bool) -> None:
    child = ChildLife(Clock(), restarts_per_minute=1)
    if for_ever:
        child.persist()
    for _ in range(100):
        child.handle(Event.START)
        child.handle(Event.POSTPONED)
        assert child.handle(Event.EXIT) is Action.RETRY
        assert child.pause_s == POSTPONED_PAUSE_S
    assert child.statistics().restarts_in_window == 0
    assert die(child) is Action.RETRY, "deaths are still counted, from the first"
    assert child.pause_s == 0.0


# --- for ever ---


def persistent(clock: Clock) -> ChildLife:
    child = ChildLife(clock)
    child.persist()
    return child


def test_a_child_that_is_restarted_for_ever_is_never_given_up_and_its_pauses_are_bounded() -> None:
    clock = Clock()
    child = persistent(clock)
    pauses = []
    for _ in range(1_000):
        assert die(child) is Action.RETRY
        pauses.append(child.pause_s)
        clock.now += child.pause_s
    assert pauses[:10] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
    assert set(pauses[8:]) == {10.0}
    assert child.life is Life.BACKOFF
    assert child.statistics().restarts_in_window <= 7  # of the last minute alone: this does not grow


def live(child: ChildLife, clock: Clock, seconds: float) -> None:
    child.handle(Event.START)
    child.handle(Event.READY)
    clock.now += seconds / 2
    child.handle(Event.READY)  # said twice: counted from the first
    clock.now += seconds / 2
    assert child.handle(Event.EXIT) is Action.RETRY


def test_pauses_begin_anew_after_a_while_of_health() -> None:
    clock = Clock()
    child = persistent(clock)
    for _ in range(5):
        live(child, clock, 1.0)
    assert child.pause_s == pytest.approx(0.8)
    live(child, clock, HEALTHY_S - 0.001)
    assert child.pause_s == pytest.approx(1.6)
    live(child, clock, HEALTHY_S)
    assert child.pause_s == 0.0
    live(child, clock, 1.0)
    assert child.pause_s == pytest.approx(0.1)


def test_only_the_time_in_which_it_was_ready_is_health() -> None:
    clock = Clock()
    child = persistent(clock)
    live(child, clock, 1.0)
    child.handle(Event.START)
    clock.now += 10 * HEALTHY_S  # it never gets there
    assert child.handle(Event.EXIT) is Action.RETRY
    assert child.pause_s == pytest.approx(0.1)


def test_a_child_becomes_persistent_with_what_it_has_spent_and_is_revived_if_it_was_given_up() -> None:
    child = ChildLife(Clock(), restarts_per_minute=2)
    die(child)
    die(child)
    child.persist()
    assert [die(child) for _ in range(10)] == [Action.RETRY] * 10
    failed = child_in(Life.FAILED, for_ever=True)
    with pytest.raises(IllegalEvent):
        failed.handle(Event.START)
    failed.handle(Event.REVIVE)
    assert [die(failed) for _ in range(10)] == [Action.RETRY] * 10


def test_a_persistent_child_can_be_replaced_and_stopped() -> None:
    child = persistent(Clock())
    for event in (Event.START, Event.READY, Event.RETIRE):
        child.handle(event)
    assert child.handle(Event.EXIT) is Action.REPLACE
    die(child)
    assert child.handle(Event.STOP) is Action.DONE
    assert child.life is Life.STOPPED
