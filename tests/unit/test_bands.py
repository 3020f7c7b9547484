"""Bands of priority: who is served first and how much, what waiting is worth, and that nobody waits for ever.

Time is a number that the tests move. Where an adversary chooses the mix, what is checked are bounds that must hold for
every mix: shares within one quantum and one push of what their bands are due, and a longest wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import examples

from topics import limits
from topics.storage.config import TopicConfig
from topics.walshard.live import priority_queue
from topics.walshard.live.priority_queue import (
    AGE_CAP_MS,
    AGE_RATE,
    AGE_TICK_MS,
    COUNT,
    DEFERRED,
    LOWEST,
    QUANTUM,
    TOP,
    WIDTH,
    Bands,
    band_of,
)
from topics.walshard.topic.priority import effective_priority

KIB = 1024
PRIORITIES = st.integers(*limits.PRIORITY_RANGE)
HIGHEST = limits.PRIORITY_RANGE[1]


def lowest_of(band: int) -> int:
    """The lowest priority in a band."""
    return LOWEST + band * WIDTH


class Stage:
    """Items that wait, and a link that takes so many bytes a round. What was pushed stands in `pushed`, in order."""

    def __init__(self) -> None:
        self.bands: Bands[str] = Bands()
        self.now_ms = 1_000_000
        self.priorities: dict[str, int] = {}
        self.backlog: dict[str, int] = {}  # bytes that an item has to be sent
        self.piece: dict[str, int] = {}  # the most that goes with one push
        self.since_ms: dict[str, int] = {}
        self.blocked: set[str] = set()  # not ready, whatever the budget
        self.pushed: list[str] = []
        self.taken: dict[str, int] = {}
        self.budget = 0

    def wants(self, item: str, priority: int, *, backlog: int = 1 << 60, piece: int = 1 * KIB) -> None:
        self.priorities[item] = priority
        self.backlog[item] = backlog
        self.piece[item] = piece
        self.since_ms.setdefault(item, self.now_ms)
        self.bands.add(item, priority, now_ms=self.now_ms)

    def age(self) -> None:
        self.bands.age(self.now_ms, self.priorities.__getitem__)

    def serve(self, budget: int = 1 << 60, *, floor: int = 0) -> list[str]:
        """One round; who was pushed to, in order."""
        self.budget = budget
        before = len(self.pushed)
        self.bands.serve(
            now_ms=self.now_ms,
            ready=self._ready,
            push=self._push,
            behind=lambda item: self.backlog[item] > 0,
            priority=self.priorities.__getitem__,
            floor=floor,
        )
        return self.pushed[before:]

    def _ready(self, item: str) -> bool:
        return self.budget > 0 and item not in self.blocked

    def _push(self, item: str) -> int:
        assert item in self.bands, "pushed without having waited"
        assert self._ready(item)
        size = min(self.piece[item], self.backlog[item])
        self.backlog[item] -= size
        self.budget -= size
        self.taken[item] = self.taken.get(item, 0) + size
        self.pushed.append(item)
        if self.backlog[item] > 0:
            self.since_ms[item] = self.now_ms
        else:
            del self.since_ms[item]
        return size


# --- bands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "band"),
    [(-1_000, 0), (-751, 0), (-750, 1), (-1, 3), (0, 4), (249, 4), (250, 5), (499, 5), (500, 6), (999, 7), (1_000, 8)],
)
def test_a_band_spans_250_points(priority: int, band: int) -> None:
    assert band_of(priority) == band


@pytest.mark.parametrize(
    ("priority", "waited_ms", "band"),
    [
        (0, 2_499, 4),
        (0, 2_500, 5),
        (0, 5_000, 6),
        (0, 9_999, 7),
        (0, 10_000, TOP),
        (-1_000, 2_499, 0),
        (-1_000, 2_500, 1),
        (-1_000, 9_999, 3),
        (-1_000, 10_000, TOP),
        (1_000, 0, 8),
        (1_000, 2_500, 9),
        (1_000, 7_500, 11),
        (2**31, 0, TOP),
        (-(2**31), 0, 0),
        (-(2**31), 10_000, TOP),
    ],
)
def test_waiting_is_worth_a_hundred_points_a_second(priority: int, waited_ms: int, band: int) -> None:
    assert band_of(priority, waited_ms=waited_ms) == band


@given(PRIORITIES, PRIORITIES, st.integers(0, 20_000), st.integers(0, 20_000))
@examples(300)
def test_neither_a_higher_priority_nor_a_longer_wait_is_ever_a_disadvantage(
    priority: int, more: int, waited_ms: int, longer_ms: int
) -> None:
    low, high = sorted((priority, more))
    short_ms, long_ms = sorted((waited_ms, longer_ms))
    assert 0 <= band_of(low, waited_ms=short_ms) <= band_of(high, waited_ms=short_ms) <= TOP
    assert band_of(low, waited_ms=short_ms) <= band_of(low, waited_ms=long_ms)


def test_what_may_be_put_off_is_what_nobody_reads_or_is_set_low() -> None:
    now = 1_700_000_000_000
    read_now = effective_priority(TopicConfig(), last_read_ts=now, now_ms=now)
    read_half_a_minute_ago = effective_priority(TopicConfig(), last_read_ts=now - 30_000, now_ms=now)
    never_read = effective_priority(TopicConfig(), last_read_ts=None, now_ms=now)
    assert band_of(read_now) >= DEFERRED
    assert band_of(read_half_a_minute_ago) >= DEFERRED
    assert band_of(never_read) < DEFERRED
    assert band_of(-1) < DEFERRED
    assert band_of(1) < DEFERRED
    assert COUNT == TOP + 1
    assert band_of(HIGHEST, waited_ms=AGE_CAP_MS - 1) == TOP


# --- who waits ---------------------------------------------------------------------------------------


def test_adding_twice_changes_neither_place_nor_time() -> None:
    stage = Stage()
    stage.wants("a", 0, backlog=10)
    stage.wants("b", 0, backlog=10)
    stage.now_ms += 9_999
    stage.wants("a", 1_000, backlog=10)
    assert len(stage.bands) == 2
    assert list(stage.bands.above(0)) == ["a", "b"]
    stage.now_ms += 1
    stage.age()
    assert set(stage.bands.above(TOP)) == {"a", "b"}  # both have waited since the beginning


def test_discarding_forgets_and_of_a_stranger_is_nothing() -> None:
    stage = Stage()
    stage.wants("a", 0)
    stage.bands.discard("a")
    stage.bands.discard("a")
    stage.bands.discard("never there")
    assert len(stage.bands) == 0
    assert "a" not in stage.bands
    assert stage.serve() == []


def test_who_comes_back_after_leaving_waits_from_anew() -> None:
    stage = Stage()
    stage.wants("a", 0)
    stage.now_ms += 9_000
    stage.bands.discard("a")
    stage.wants("a", 0)
    stage.now_ms += 2_400
    stage.age()
    assert list(stage.bands.below(DEFERRED)) == ["a"]


def test_above_and_below_split_at_the_floor() -> None:
    stage = Stage()
    for band in range(9):
        stage.wants(f"b{band}", lowest_of(band))
    for floor in range(COUNT + 1):
        below, above = set(stage.bands.below(floor)), set(stage.bands.above(floor))
        assert below == {f"b{band}" for band in range(min(floor, 9))}
        assert below | above == {f"b{band}" for band in range(9)}
        assert not below & above


# --- ageing ------------------------------------------------------------------------------------------


def test_it_climbs_as_it_waits_and_no_further_than_the_top() -> None:
    stage = Stage()
    stage.wants("a", -1_000)
    seen = []
    for _ in range(0, 15_000, AGE_TICK_MS):
        seen.append(max(band for band in range(COUNT) if list(stage.bands.above(band))))
        stage.now_ms += AGE_TICK_MS
        stage.age()
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == TOP
    assert seen[AGE_CAP_MS // AGE_TICK_MS - 1] == 3, "points alone bring it no further"


def test_it_looks_once_a_tick() -> None:
    stage = Stage()
    stage.wants("a", 0)
    stage.age()
    asked: list[str] = []

    def priority(item: str) -> int:
        asked.append(item)
        return 0

    stage.bands.age(stage.now_ms + AGE_TICK_MS - 1, priority)
    assert asked == []
    stage.bands.age(stage.now_ms + AGE_TICK_MS, priority)
    assert asked == ["a"]


def test_a_priority_that_changed_counts_with_the_next_look() -> None:
    stage = Stage()
    stage.wants("a", 1_000)
    stage.wants("b", -1_000)
    stage.priorities = {"a": -1_000, "b": 1_000}
    stage.now_ms += AGE_TICK_MS
    stage.age()
    assert list(stage.bands.above(8)) == ["b"]
    assert list(stage.bands.below(1)) == ["a"]


def test_its_turn_ends_the_wait() -> None:
    """Somebody who is always behind has no claim to be first for ever."""
    stage = Stage()
    stage.wants("a", -1_000)
    stage.now_ms += AGE_CAP_MS
    stage.age()
    assert list(stage.bands.above(TOP)) == ["a"]
    stage.serve(budget=1)
    assert list(stage.bands.below(1)) == ["a"]
    stage.now_ms += AGE_CAP_MS - 1
    stage.age()
    assert list(stage.bands.above(4)) == []


# --- turns -------------------------------------------------------------------------------------------


def test_higher_bands_come_first() -> None:
    stage = Stage()
    for band in (3, 8, 0, 5, 1):
        stage.wants(f"b{band}", lowest_of(band), backlog=10)
    assert stage.serve() == ["b8", "b5", "b3", "b1", "b0"]
    assert len(stage.bands) == 0


def test_within_a_band_first_come_first_served_and_then_in_turns() -> None:
    stage = Stage()
    for name in "abc":
        stage.wants(name, 0, backlog=3)
        stage.piece[name] = 1
    assert stage.serve() == list("abcabcabc")


def test_points_within_a_band_make_no_difference() -> None:
    stage = Stage()
    stage.wants("a", 0, backlog=1)
    stage.wants("b", 249, backlog=1)
    stage.wants("c", 100, backlog=1)
    assert stage.serve() == ["a", "b", "c"]


def test_who_has_everything_leaves_and_who_has_not_stays() -> None:
    stage = Stage()
    stage.wants("a", 0, backlog=10)
    stage.wants("b", 0, backlog=10 * KIB)
    stage.serve(budget=2 * KIB)
    assert "a" not in stage.bands
    assert "b" in stage.bands


def test_nobody_is_pushed_to_who_is_not_ready_and_it_keeps_its_place() -> None:
    stage = Stage()
    for name in "abc":
        stage.wants(name, 0, backlog=1)
    stage.blocked = {"a"}
    assert stage.serve() == ["b", "c"]
    stage.wants("d", 0, backlog=1)
    stage.blocked = set()
    assert stage.serve() == ["a", "d"]


def test_who_leaves_while_others_are_served_is_not_pushed_to() -> None:
    """A push may find that a topic is damaged, and end what others wanted of it."""
    stage = Stage()
    for name in "abc":
        stage.wants(name, 0, backlog=1)
    push = stage._push

    def push_and_forget(item: str) -> int:
        if item == "a":
            stage.bands.discard("b")
            del stage.since_ms["b"]
        return push(item)

    stage._push = push_and_forget  # type: ignore[method-assign]
    assert stage.serve() == ["a", "c"]
    assert len(stage.bands) == 0


def test_a_band_alone_is_served_to_the_end_in_one_turn() -> None:
    stage = Stage()
    looks = itertools.count()
    stage.wants("a", -1_000, backlog=100 * QUANTUM, piece=8 * QUANTUM)
    ready = stage._ready
    stage._ready = lambda item: next(looks) >= 0 and ready(item)  # type: ignore[method-assign]
    stage.serve()
    assert stage.taken == {"a": 100 * QUANTUM}
    assert next(looks) < 60, "no turns are spent on a share that nobody else wants"


def test_a_band_is_no_longer_alone_when_one_of_it_falls_into_another() -> None:
    stage = Stage()
    stage.wants("a", lowest_of(8))
    stage.wants("b", lowest_of(8))
    stage.priorities["a"] = lowest_of(4)  # from its first push on
    stage.serve(budget=10 * 14 * QUANTUM)
    assert stage.taken["a"] == pytest.approx(10 * 5 * QUANTUM, rel=0.15)
    assert stage.taken["b"] == pytest.approx(10 * 9 * QUANTUM, rel=0.15)


def test_a_turn_gives_each_band_its_share() -> None:
    stage = Stage()
    for band in range(9):
        stage.wants(f"b{band}", lowest_of(band))
    turn = sum(QUANTUM * (band + 1) for band in range(9))
    stage.serve(budget=turn)
    assert stage.taken == {f"b{band}": QUANTUM * (band + 1) for band in range(9)}
    order = [name for name, _ in itertools.groupby(stage.pushed)]
    assert order == [f"b{band}" for band in range(8, -1, -1)]


def test_what_exceeded_a_share_is_taken_from_the_next() -> None:
    stage = Stage()
    stage.wants("low", -1_000, piece=5 * QUANTUM)  # five turns' worth at once
    stage.wants("next", -750, piece=1)
    stage.piece["next"] = KIB
    stage.serve(budget=5 * QUANTUM + 2 * 5 * QUANTUM)
    assert stage.taken == {"low": 5 * QUANTUM, "next": 2 * 5 * QUANTUM}
    assert stage.pushed.count("low") == 1
    at = stage.pushed.index("low")
    assert stage.pushed[:at].count("next") == 2 * QUANTUM // KIB
    assert stage.pushed[at + 1 :].count("next") == 4 * 2 * QUANTUM // KIB, "it paid for its push with four turns"


def test_shares_that_were_not_used_are_not_saved_up() -> None:
    """Somebody without a backlog has no right to a burst later."""
    stage = Stage()
    stage.wants("high", 1_000, backlog=1)
    stage.wants("low", -1_000)
    stage.serve(budget=50 * QUANTUM)
    stage.wants("high", 1_000)
    before = dict(stage.taken)
    stage.serve(budget=10 * QUANTUM)
    assert stage.taken["high"] - before["high"] == 9 * QUANTUM
    assert stage.taken["low"] - before["low"] == QUANTUM


def test_members_share_what_their_band_gets() -> None:
    """Ten in a high band and one in a low one: the band's weight counts, not how many are in it."""
    stage = Stage()
    for number in range(10):
        stage.wants(f"h{number}", lowest_of(8))
    stage.wants("low", lowest_of(2))
    turns = 20
    stage.serve(budget=turns * 12 * QUANTUM)
    assert stage.taken["low"] == turns * 3 * QUANTUM
    high = [stage.taken[f"h{number}"] for number in range(10)]
    assert sum(high) == turns * 9 * QUANTUM
    assert max(high) - min(high) <= turns * KIB


def assert_fair(stage: Stage, wanting: dict[str, int]) -> None:
    """For bands that always have a backlog: what they got, by weight, differs by one turn and one push at most."""
    biggest = max(stage.piece.values())
    due = {name: stage.taken.get(name, 0) / (QUANTUM * (band + 1)) for name, band in wanting.items()}
    slack = {name: 1 + biggest / (QUANTUM * (band + 1)) for name, band in wanting.items()}
    for one, other in itertools.permutations(wanting, 2):
        assert due[one] - due[other] <= slack[one] + slack[other], (due, slack)


@given(
    st.dictionaries(st.integers(0, 8), st.integers(4 * KIB, 40 * QUANTUM), min_size=2),
    st.integers(1, 1_000).map(lambda quanta: quanta * QUANTUM),
)
@examples(60)
def test_shares_are_fair_whatever_the_size_of_pushes(pieces: dict[int, int], budget: int) -> None:
    stage = Stage()
    for band, piece in pieces.items():
        stage.wants(f"b{band}", lowest_of(band), piece=piece)
    stage.serve(budget=budget)
    assert_fair(stage, {f"b{band}": band for band in pieces})


@given(
    st.dictionaries(st.integers(0, 8), st.integers(8 * KIB, 256 * KIB), min_size=2),
    st.lists(st.integers(1, 2 * limits.PUSH_BYTES), min_size=20, max_size=60),
)
@examples(40)
def test_shares_are_fair_over_rounds_however_little_each_of_them_takes(
    pieces: dict[int, int], budgets: list[int]
) -> None:
    """A round ends when its follower's ring is full, anywhere in a turn; the next one goes on from there. Nobody ages
    here: that the low ones get their share must not depend on it."""
    stage = Stage()
    for band, piece in pieces.items():
        stage.wants(f"b{band}", lowest_of(band), piece=piece)
    for budget in budgets:
        stage.serve(budget=budget)
    assert_fair(stage, {f"b{band}": band for band in pieces})


def test_every_band_gets_its_share_of_a_busy_link() -> None:
    """As a shard does it: a MiB a round, a quarter of one a push, and every band with more than it can be sent."""
    stage = Stage()
    for band in range(9):
        stage.wants(f"b{band}", lowest_of(band), piece=256 * KIB)
    for _ in range(200):
        stage.serve(budget=limits.PUSH_BYTES)
    total = sum(stage.taken.values())
    for band in range(9):
        share = stage.taken.get(f"b{band}", 0) / total
        assert share == pytest.approx((band + 1) / 45, rel=0.25), stage.taken


# --- the floor ---------------------------------------------------------------------------------------


def test_below_the_floor_nobody_is_served() -> None:
    stage = Stage()
    stage.wants("low", 249, backlog=1)
    stage.wants("high", 250, backlog=1)
    assert stage.serve(floor=DEFERRED) == ["high"]
    assert "low" in stage.bands
    assert stage.serve(floor=0) == ["low"]


def test_who_falls_below_the_floor_with_its_push_waits() -> None:
    stage = Stage()
    stage.wants("a", 500)
    stage.priorities["a"] = 0  # nobody has read it for a while
    assert stage.serve(budget=10 * KIB, floor=DEFERRED) == ["a"]
    assert list(stage.bands.below(DEFERRED)) == ["a"]


@pytest.mark.parametrize(("priority", "after_ms"), [(249, 10), (0, 2_500), (-250, 5_000), (-500, 7_500)])
def test_waiting_brings_it_over_the_floor(priority: int, after_ms: int) -> None:
    stage = Stage()
    stage.wants("a", priority, backlog=1)
    stage.now_ms += after_ms - 1
    stage.age()
    assert stage.serve(floor=DEFERRED) == []
    stage.now_ms += AGE_TICK_MS
    stage.age()
    assert stage.serve(floor=DEFERRED) == ["a"]


@pytest.mark.parametrize("priority", [-1_000, -999, -751])
def test_ten_seconds_are_enough_for_anyone(priority: int) -> None:
    stage = Stage()
    stage.wants("a", priority, backlog=1)
    stage.now_ms += AGE_CAP_MS - 1
    stage.age()
    assert stage.serve(floor=DEFERRED) == []
    stage.now_ms += AGE_TICK_MS
    stage.age()
    assert stage.serve(floor=TOP) == ["a"]


# --- nobody starves ----------------------------------------------------------------------------------


def drive(
    stage: Stage, *, until_ms: int, budget: Callable[[], int], floor: Callable[[], int] = lambda: 0, step_ms: int = 50
) -> int:
    """Rounds until then; the longest that anybody has waited for a push at the start of a round."""
    longest = 0
    end = stage.now_ms + until_ms
    while stage.now_ms < end:
        stage.now_ms += step_ms
        stage.age()
        longest = max([longest, *(stage.now_ms - since for since in stage.since_ms.values())])
        stage.serve(budget(), floor=floor())
    return longest


def test_a_flood_of_high_ones_does_not_starve_the_lowest() -> None:
    stage = Stage()
    for number in range(20):
        stage.wants(f"h{number}", HIGHEST, piece=256 * KIB)
    stage.wants("low", -1_000, piece=256 * KIB)
    longest = drive(stage, until_ms=60_000, budget=lambda: 1)  # one push a round: never enough for a whole turn
    assert stage.pushed.count("low") >= 4
    assert longest <= AGE_CAP_MS + 21 * 50 + AGE_TICK_MS


def test_the_floor_held_for_ever_does_not_starve_the_lowest() -> None:
    stage = Stage()
    for number in range(5):
        stage.wants(f"h{number}", HIGHEST, piece=256 * KIB)
        stage.wants(f"l{number}", -1_000 + number, piece=KIB)
    longest = drive(stage, until_ms=60_000, budget=lambda: limits.PUSH_BYTES, floor=lambda: DEFERRED)
    assert all(stage.pushed.count(f"l{number}") >= 4 for number in range(5))
    assert longest <= AGE_CAP_MS + 10 * 50 + AGE_TICK_MS


def test_newcomers_do_not_overtake_those_who_have_waited_longest() -> None:
    """An adversary that sends a new high one every round, each with one push's worth and never the same again."""
    stage = Stage()
    numbers = itertools.count()
    stage.wants("low", -1_000, piece=KIB)
    for _ in range(60_000 // 50):
        for _ in range(3):
            stage.wants(f"n{next(numbers)}", HIGHEST, backlog=256 * KIB, piece=256 * KIB)
        drive(stage, until_ms=50, budget=lambda: 256 * KIB)
    # It reaches the top after ten seconds, behind what got there before it, and is overtaken by nobody.
    assert stage.pushed.count("low") >= 1


class Adversary(RuleBasedStateMachine):
    """Any mix of comers, priorities that change, blocked followers, floors and stingy rounds."""

    NAMES = tuple("abcdefgh")

    @initialize()
    def begin(self) -> None:
        self.stage = Stage()
        self.floor = 0
        self.served_ms: dict[str, int] = {}  # ready and waiting since, in rounds that could push

    def _pass(self, step_ms: int) -> None:
        self.stage.now_ms += step_ms
        self.stage.age()

    @rule(
        name=st.sampled_from(NAMES), priority=PRIORITIES, backlog=st.integers(1, 1 << 22), piece=st.integers(1, 1 << 19)
    )
    def want(self, name: str, priority: int, backlog: int, piece: int) -> None:
        if name in self.stage.bands:
            self.stage.backlog[name] += backlog
            self.stage.bands.add(name, priority, now_ms=self.stage.now_ms)
        else:
            self.stage.wants(name, priority, backlog=backlog, piece=piece)

    @rule(name=st.sampled_from(NAMES), priority=PRIORITIES)
    def change(self, name: str, priority: int) -> None:
        if name in self.stage.priorities:
            self.stage.priorities[name] = priority

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.stage.bands.discard(name)
        self.stage.since_ms.pop(name, None)

    @rule(name=st.sampled_from(NAMES))
    def block(self, name: str) -> None:
        self.stage.blocked ^= {name}

    @rule(floor=st.sampled_from([0, DEFERRED]))
    def lift(self, floor: int) -> None:
        self.floor = floor

    @rule(step_ms=st.integers(0, 3_000), budget=st.integers(1, 1 << 21))
    def round(self, step_ms: int, budget: int) -> None:
        self._pass(step_ms)
        stage = self.stage
        firsts = self._firsts()
        deferred = {name for name in stage.bands.below(self.floor)}
        pushed = stage.serve(budget, floor=self.floor)
        assert not deferred & set(pushed), "pushed to somebody below the floor"
        if firsts:
            assert pushed[0] in firsts, "somebody was overtaken within its band"
        # It does not stop while there is something that it could do.
        if stage.budget > 0:
            assert not [name for name in stage.bands.above(self.floor) if name not in stage.blocked]

    def _firsts(self) -> list[str]:
        """Of each band the first one that is ready."""
        ready = {name for name in self.stage.bands.above(self.floor) if name not in self.stage.blocked}
        lines = [[name for name in self._in_band(band) if name in ready] for band in range(self.floor, COUNT)]
        return [line[0] for line in lines if line]

    def _in_band(self, band: int) -> list[str]:
        above = set(self.stage.bands.above(band + 1))
        return [name for name in self.stage.bands.above(band) if name not in above]

    @invariant()
    def everybody_waits_in_exactly_one_place(self) -> None:
        if not hasattr(self, "stage"):
            return
        listed = list(self.stage.bands.above(0))
        assert sorted(listed) == sorted(set(listed))
        assert set(listed) == set(self.stage.since_ms)
        assert len(self.stage.bands) == len(listed)

    def teardown(self) -> None:
        """Whatever the adversary has left: a push a round, and everybody gets theirs."""
        if not hasattr(self, "stage"):
            return
        self.stage.blocked = set()
        waiting = set(self.stage.since_ms)
        longest = drive_on(self.stage, waiting)
        assert longest <= AGE_CAP_MS + (len(self.NAMES) + 2) * 50 + AGE_TICK_MS


def drive_on(stage: Stage, waiting: Iterable[str]) -> int:
    """Stingy rounds at the highest floor until each of these has had a push; how long the last one took."""
    began = stage.now_ms
    left = set(waiting)
    while left:
        stage.now_ms += 50
        assert stage.now_ms - began <= 20_000, f"{left} starve"
        stage.age()
        left -= set(stage.serve(1, floor=DEFERRED))
    return stage.now_ms - began


TestAdversary: Any = Adversary.TestCase
TestAdversary.settings = examples(40, stateful_step_count=40)


def test_the_numbers_are_the_documented_ones() -> None:
    assert (AGE_RATE, AGE_CAP_MS, WIDTH) == (100, 10_000, 250)
    assert limits.PRIORITY_RANGE[0] == LOWEST
    assert AGE_RATE * AGE_CAP_MS // 1_000 == 1_000
    assert priority_queue.DEFERRED == 5
