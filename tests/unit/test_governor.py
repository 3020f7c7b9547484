"""The governor: every level by every signal, one step at a time up, a hold on the way down. The clock is a number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import examples

from topics import limits
from topics.actors.governor import Governor, Level

LAG_MS = 500
COMMIT_MS = 2_000
TICK_NS = limits.PRESSURE_TICK_MS * 1_000_000
HOLD_NS = limits.PRESSURE_HOLD_MS * 1_000_000
HOLD_TICKS = limits.PRESSURE_HOLD_MS // limits.PRESSURE_TICK_MS
LEAST_MS, MOST_MS = limits.THROTTLE_RETRY_MS
CAPACITY = 1 << 20

Feed = Callable[[Governor, float], None]

# Each makes a given pressure, all by itself.
SIGNALS: dict[str, Feed] = {
    "ring": lambda governor, pressure: governor.ring(round((0.5 + pressure / 2) * CAPACITY), CAPACITY),
    "round": lambda governor, pressure: governor.round(round(pressure * LAG_MS * 1_000)),
    "sync": lambda governor, pressure: governor.sync(round(pressure * COMMIT_MS * 1_000)),
}
# The least pressure of each level; the calm one's is none.
LEAST = {Level.CALM: 0.0, Level.COALESCE: 0.25, Level.WIDEN: 0.5, Level.DEFER: 0.75, Level.REFUSE: 1.0}


class Play:
    """A governor and its clock."""

    def __init__(self, *, on: bool = True) -> None:
        self.governor = Governor(lag_ms=LAG_MS, commit_ms=COMMIT_MS, on=on)
        self.now_ns = 5_000_000_000

    @property
    def level(self) -> Level:
        return self.governor.level

    def tick(self, pressure: float = 0.0, feed: Feed = SIGNALS["round"]) -> bool:
        """One tick later, with this much measured meanwhile."""
        self.now_ns += TICK_NS
        feed(self.governor, pressure)
        return self.governor.tick(self.now_ns)

    def climb(self, level: Level, feed: Feed = SIGNALS["round"]) -> Play:
        for _ in range(level):
            assert self.tick(LEAST[level], feed)
        assert self.level is level
        return self


@pytest.fixture
def play() -> Play:
    return Play()


def test_it_starts_calm(play: Play) -> None:
    assert play.level is Level.CALM
    assert play.governor.pressure == 0.0
    assert play.governor.next_tick_ns is None


# --- what is measured --------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("start", list(Level))
@pytest.mark.parametrize("wanted", list(Level))
def test_every_level_by_every_signal(signal: str, start: Level, wanted: Level) -> None:
    """From each level, pressure of each: one step towards it per tick up, one per hold down, and there it stays."""
    feed = SIGNALS[signal]
    play = Play().climb(start)
    levels = [start]
    for _ in range(30):
        changed = play.tick(LEAST[wanted], feed)
        assert changed == (play.level is not levels[-1])
        levels.append(play.level)
    direction = 1 if wanted > start else -1
    steps = [level for level, _ in itertools.groupby(levels)]
    assert steps == [Level(level) for level in range(start, wanted + direction, direction)]
    if wanted > start:
        assert levels[wanted - start] is wanted, "a step per tick"
    held = [len(list(run)) for _, run in itertools.groupby(levels)][:-1]
    if wanted < start:
        assert all(ticks >= HOLD_TICKS for ticks in held), held


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("level", list(Level)[1:])
def test_just_below_a_level_is_not_that_level(signal: str, level: Level) -> None:
    play = Play()
    for _ in range(20):
        play.tick(LEAST[level] - 0.001, SIGNALS[signal])
    assert play.level is Level(level - 1)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("pressure", [1.0, 1.5, 10.0, 1_000.0])
def test_too_much_is_still_one_step_per_tick(play: Play, signal: str, pressure: float) -> None:
    seen = []
    for _ in range(6):
        play.tick(pressure, SIGNALS[signal])
        seen.append(play.level)
    assert seen == [Level.COALESCE, Level.WIDEN, Level.DEFER, Level.REFUSE, Level.REFUSE, Level.REFUSE]


def test_the_largest_of_all_signals_counts(play: Play) -> None:
    for first, second in itertools.permutations(SIGNALS.values(), 2):
        first(play.governor, 0.3)
        second(play.governor, 0.8)
        play.tick(0.1)
        assert play.governor.pressure == pytest.approx(0.8, abs=1e-5)


@pytest.mark.parametrize("signal", SIGNALS)
def test_the_worst_since_the_last_tick_counts_once(play: Play, signal: str) -> None:
    feed = SIGNALS[signal]
    for pressure in (0.2, 0.9, 0.1):
        feed(play.governor, pressure)
    play.tick()
    assert play.governor.pressure == pytest.approx(0.9, abs=1e-5)
    play.tick()
    assert play.governor.pressure == 0.0, "it was judged already"


@pytest.mark.parametrize("fill", [0.0, 0.1, 0.4999, 0.5])
def test_a_ring_up_to_half_full_is_no_pressure(play: Play, fill: float) -> None:
    play.governor.ring(int(fill * CAPACITY), CAPACITY)
    play.tick()
    assert play.governor.pressure == 0.0


def test_a_full_ring_is_as_much_as_is_bearable(play: Play) -> None:
    play.governor.ring(CAPACITY, CAPACITY)
    play.tick()
    assert play.governor.pressure == 1.0


def test_the_marks_are_those_of_the_settings() -> None:
    governor = Governor(lag_ms=1, commit_ms=7)
    governor.round(1_000)
    governor.tick(TICK_NS)
    assert governor.pressure == 1.0
    governor.sync(7_000)
    governor.tick(2 * TICK_NS)
    assert governor.pressure == 1.0
    governor.sync(3_500)
    governor.tick(3 * TICK_NS)
    assert governor.pressure == 0.5


# --- ticks -------------------------------------------------------------------------------------------


def test_it_judges_once_a_tick(play: Play) -> None:
    assert play.tick(1.0)
    for early in (0, 1, TICK_NS // 2, TICK_NS - 1):
        play.governor.round(10 * LAG_MS * 1_000)
        assert not play.governor.due(play.now_ns + early)
        assert not play.governor.tick(play.now_ns + early)
        assert play.level is Level.COALESCE
    assert play.governor.due(play.now_ns + TICK_NS)
    assert play.governor.tick(play.now_ns + TICK_NS)
    assert play.level is Level.WIDEN


def test_what_came_between_ticks_is_kept_for_the_next(play: Play) -> None:
    play.tick()
    play.governor.round(10 * LAG_MS * 1_000)
    play.governor.tick(play.now_ns + 1)
    play.tick()
    assert play.level is Level.COALESCE


def test_one_slow_round_refuses_nobody(play: Play) -> None:
    play.tick(100.0)
    assert play.level is Level.COALESCE
    for _ in range(20):
        play.tick()
        assert play.level <= Level.COALESCE
    assert play.governor.level is Level.CALM


def test_it_asks_to_be_asked_again_while_it_is_not_calm(play: Play) -> None:
    for level in list(Level)[1:]:
        play.tick(1.0)
        assert play.level is level
        assert play.governor.next_tick_ns == play.now_ns + TICK_NS
    while play.level:
        play.now_ns = (play.governor.next_tick_ns or 0) - TICK_NS
        play.tick()
    assert play.governor.next_tick_ns is None


def test_a_long_sleep_is_one_tick(play: Play) -> None:
    play.climb(Level.REFUSE)
    play.now_ns += 3_600_000_000_000
    play.tick()
    assert play.level is Level.REFUSE, "it has only now seen that there is less"
    play.now_ns += 3_600_000_000_000
    play.tick()
    assert play.governor.level is Level.DEFER


# --- coming down -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", list(Level)[1:])
def test_it_leaves_a_level_after_the_hold_and_not_before(level: Level) -> None:
    play = Play().climb(level)
    play.tick()
    first_below = play.now_ns
    while play.now_ns + TICK_NS - first_below < HOLD_NS:
        assert not play.tick()
        assert play.level is level
    assert play.tick()
    assert play.level is Level(level - 1)
    assert play.now_ns - first_below == HOLD_NS


def test_from_the_top_it_takes_a_hold_for_each_step(play: Play) -> None:
    play.climb(Level.REFUSE)
    began = play.now_ns
    left: list[int] = []
    while play.level:
        if play.tick():
            left.append(play.now_ns)
    assert len(left) == 4
    assert left[0] - began == HOLD_NS + TICK_NS
    assert [later - earlier for earlier, later in itertools.pairwise(left)] == [HOLD_NS] * 3


def test_it_stops_where_the_pressure_is(play: Play) -> None:
    play.climb(Level.REFUSE)
    for _ in range(50):
        play.tick(0.6)
    assert play.level is Level.WIDEN


def test_a_moment_of_pressure_starts_the_hold_again(play: Play) -> None:
    play.climb(Level.DEFER)
    for _ in range(20):
        for _ in range(HOLD_TICKS):
            assert not play.tick(0.3)
        assert not play.tick(0.75)
    assert play.level is Level.DEFER


def test_while_it_comes_down_more_pressure_brings_it_up_at_once(play: Play) -> None:
    play.climb(Level.REFUSE)
    while play.level > Level.WIDEN:
        play.tick()
    play.tick(1.0)
    assert play.level is Level.DEFER
    play.tick(1.0)
    assert play.governor.level is Level.REFUSE


@pytest.mark.parametrize("period", [2, 3, 4])
@pytest.mark.parametrize("level", list(Level)[1:])
def test_it_does_not_flutter(period: int, level: Level) -> None:
    """Pressure that comes and goes faster than the hold leaves the level where its peaks are."""
    play = Play()
    seen = []
    for number in range(200):
        play.tick(LEAST[level] if number % period == 0 else 0.0)
        seen.append(play.level)
    assert set(seen[-100:]) == {level}


# --- what clients are told ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pressure", "told_ms"),
    [(0.0, 250), (0.4, 250), (1.0, 500), (2.0, 1_000), (9.0, 4_500), (10.0, 5_000), (1e6, 5_000)],
)
def test_the_more_is_too_much_the_longer_they_wait(play: Play, pressure: float, told_ms: int) -> None:
    play.tick(pressure)
    assert play.governor.retry_after_ms == told_ms


@given(st.lists(st.floats(0, 1e9), max_size=20))
@examples(100)
def test_they_are_told_something_bearable(pressures: list[float]) -> None:
    play = Play()
    for pressure in pressures:
        play.tick(pressure)
        assert LEAST_MS <= play.governor.retry_after_ms <= MOST_MS


# --- off ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
def test_switched_off_it_stays_calm(signal: str) -> None:
    play = Play(on=False)
    for _ in range(20):
        assert not play.tick(100.0, SIGNALS[signal])
        assert not play.governor.due(play.now_ns + HOLD_NS)
        assert play.level is Level.CALM
    assert play.governor.next_tick_ns is None


# --- what is logged ----------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.8, 1.0, 2.0]), max_size=120))
@examples(100)
def test_the_last_word_is_the_truth_and_there_are_not_too_many(pressures: list[float]) -> None:
    """Asked after every tick; then it is calm for as long as any silence lasts."""
    play = Play()
    told: list[tuple[int, Level]] = []
    for pressure in (*pressures, *[0.0] * 600):
        play.tick(pressure)
        if play.governor.has_news(play.now_ns):
            told.append((play.now_ns, play.level))
    assert play.level is Level.CALM
    if any(pressure >= LEAST[Level.COALESCE] for pressure in pressures):
        assert told
        assert told[-1][1] is Level.CALM
    for at, _ in told:
        assert sum(at <= other < at + 10_000_000_000 for other, _ in told) <= 30


def test_that_it_refuses_is_said_at_once(play: Play) -> None:
    words = []
    for _ in range(4):
        play.tick(1.0)
        if play.governor.has_news(play.now_ns):
            words.append(play.level)
    assert words[0] is Level.COALESCE
    assert words[-1] is Level.REFUSE


# --- any history -------------------------------------------------------------------------------------


class AnyHistory(RuleBasedStateMachine):
    """Against the rules written down once more: a step up per tick, a step down per hold of ticks below."""

    @initialize()
    def begin(self) -> None:
        self.play = Play()
        self.level = 0
        self.below: list[int] = []  # the times of ticks in a row that wanted less

    @rule(
        pressures=st.lists(
            st.tuples(
                st.sampled_from(sorted(SIGNALS)), st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 0.9, 1, 3])
            ),
            max_size=4,
        ),
        later_ns=st.integers(0, 6 * TICK_NS),
    )
    def pass_time(self, pressures: list[tuple[str, float]], later_ns: int) -> None:
        governor = self.play.governor
        self.play.now_ns += TICK_NS + later_ns
        for signal, pressure in pressures:
            SIGNALS[signal](governor, pressure)
        before = governor.level
        changed = governor.tick(self.play.now_ns)
        assert changed == (governor.level is not before)
        self._expect(min(int(max([0.0, *(pressure for _, pressure in pressures)]) * 4), 4))
        assert governor.level == self.level

    def _expect(self, wanted: int) -> None:
        now = self.play.now_ns
        if wanted >= self.level:
            self.level = min(self.level + 1, wanted)
            self.below = []
            return
        self.below.append(now)
        if now - self.below[0] >= HOLD_NS:
            self.level -= 1
            self.below = [now]

    @invariant()
    def it_wakes_up_to_come_down(self) -> None:
        if hasattr(self, "play"):
            assert (self.play.governor.next_tick_ns is None) == (self.play.level is Level.CALM)


TestAnyHistory: Any = AnyHistory.TestCase
TestAnyHistory.settings = examples(60, stateful_step_count=50)
