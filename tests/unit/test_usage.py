"""The usage page: slots per key that gateways share without a lock, and what each of them has answered.

Racers are threads and real processes. What is certainly in flight is counted under a lock, from after a slot was got
until before it is given back: a count above the limit is a fault, whatever the timing was.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import examples

from topics.errors import STATUS, TopicsError
from topics.shm.region import Region
from topics.shm.usage import BUCKET_US, BUCKETS, ROUTES, STATUSES, Usage

FORK = multiprocessing.get_context("fork")  # children inherit the mapping
GATEWAYS = 3
KEYS = 5


@pytest.fixture
def usage() -> Iterator[Usage]:
    made = Usage.create(gateways=GATEWAYS, keys=KEYS)
    yield made
    made.close()


def test_every_status_has_its_counters(usage: Usage) -> None:
    meter = usage.meter(0)
    for status in {101, 200, 201, *STATUS.values()}:
        meter.count(3, status, 10)
        assert usage.answers(3)[status] == 1
    assert 0 not in usage.answers(3), "none is `other`"


# --- slots -------------------------------------------------------------------------------------------


def test_so_many_and_no_more(usage: Usage) -> None:
    slots = usage.slots(0, most=3)
    assert [slots.take(1) for _ in range(5)] == [True, True, True, False, False]
    assert usage.in_flight() == 3, "those that were refused hold nothing"
    slots.give(1)
    assert slots.take(1)
    assert not slots.take(1)


def test_all_gateways_count(usage: Usage) -> None:
    gateways = [usage.slots(number, most=4) for number in range(GATEWAYS)]
    assert [slots.take(2) for slots in (*gateways, *gateways)] == [True] * 4 + [False] * 2
    gateways[2].give(2)
    assert gateways[1].take(2), "what one gave back another may have"
    assert not gateways[0].take(2)


def test_keys_have_nothing_to_do_with_each_other(usage: Usage) -> None:
    slots = usage.slots(0, most=1)
    assert all(slots.take(key) for key in range(KEYS))
    assert not any(slots.take(key) for key in range(KEYS))
    slots.give(3)
    assert [slots.take(key) for key in range(KEYS)] == [False, False, False, True, False]


def test_limits_may_differ_in_what_they_see(usage: Usage) -> None:
    """A limit belongs to who asks; what counts is what is there."""
    assert all(usage.slots(0, most=10).take(0) for _ in range(10))
    assert not usage.slots(1, most=10).take(0)
    assert usage.slots(1, most=11).take(0)


def test_a_dead_gateways_slots_come_back(usage: Usage) -> None:
    dead, alive = usage.slots(0, most=2), usage.slots(1, most=2)
    meter = usage.meter(0)
    assert dead.take(0)
    assert dead.take(4)
    assert alive.take(0)
    assert not alive.take(0)
    meter.count(7, 200, 100)
    usage.give_back(0)
    assert alive.take(0)
    assert not alive.take(0), "only the dead one's"
    assert usage.in_flight() == 2
    assert usage.answers(7) == {200: 1}, "what it had answered stays counted"


def test_every_gateway_of_a_page_that_is_attached_sees_the_same(usage: Usage) -> None:
    other = Usage.attach(os.dup(usage.region.fd), usage.region.size)
    assert (other.gateways, other.keys) == (GATEWAYS, KEYS)
    assert usage.slots(0, most=1).take(3)
    assert not other.slots(1, most=1).take(3)
    usage.meter(2).count(5, 404, 10)
    assert other.answers(5) == {404: 1}
    other.close()


def test_anything_else_is_no_usage_page() -> None:
    with pytest.raises(TopicsError):
        Usage(Region.create(4_096))


def contend(
    usage: Usage, gateway: int, most: int, rounds: int, lock: Any, there: list[int] | Any, tell: Callable[..., None]
) -> None:
    """One gateway: takes and gives slots of one key, and counts what it certainly has."""
    slots = usage.slots(gateway, most=most)
    mine = got = refused = over = 0
    for number in range(rounds):
        if slots.take(2):
            got += 1
            mine += 1
            with lock:
                there[0] += 1
                over = max(over, there[0] - most)
        else:
            refused += 1
        if mine and (number % 3 == 0 or mine == most):
            with lock:
                there[0] -= 1
            mine -= 1
            slots.give(2)
    while mine:
        with lock:
            there[0] -= 1
        mine -= 1
        slots.give(2)
    tell((got, refused, over))


@pytest.mark.parametrize("most", [1, 4])
def test_racing_threads_never_have_more_together(usage: Usage, most: int) -> None:
    found: list[tuple[int, int, int]] = []
    lock, there = threading.Lock(), [0]
    threads = [
        threading.Thread(target=contend, args=(usage, gateway, most, 20_000, lock, there, found.append))
        for gateway in range(GATEWAYS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == GATEWAYS
    assert max(over for _, _, over in found) <= 0
    assert sum(got for got, _, _ in found) > 1_000
    assert usage.in_flight() == 0, "every slot came back"


@pytest.mark.parametrize("most", [1, 4])
def test_racing_processes_never_have_more_together(usage: Usage, most: int) -> None:
    lock, there, results, go = FORK.Lock(), FORK.Array("q", 1, lock=False), FORK.Queue(), FORK.Event()

    def run(gateway: int) -> None:
        go.wait(30)
        contend(usage, gateway, most, 40_000, lock, there, results.put)

    children = [FORK.Process(target=run, args=(gateway,), daemon=True) for gateway in range(GATEWAYS)]
    for child in children:
        child.start()
    go.set()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert max(over for _, _, over in found) <= 0
    assert sum(got for got, _, _ in found) > 1_000
    assert any(refused for _, refused, _ in found), "it was no race"
    assert usage.in_flight() == 0
    assert [usage.slots(0, most=most).take(2) for _ in range(most + 1)] == [True] * most + [False]


class Gateways(RuleBasedStateMachine):
    """One after the other there is no edge: a slot is got exactly if one is free."""

    MOST = 4

    @initialize()
    def begin(self) -> None:
        self.usage = Usage.create(gateways=GATEWAYS, keys=KEYS)
        self.held = [[0] * KEYS for _ in range(GATEWAYS)]

    @rule(gateway=st.integers(0, GATEWAYS - 1), key=st.integers(0, KEYS - 1))
    def take(self, gateway: int, key: int) -> None:
        free = sum(held[key] for held in self.held) < self.MOST
        assert self.usage.slots(gateway, most=self.MOST).take(key) == free
        self.held[gateway][key] += free

    @rule(gateway=st.integers(0, GATEWAYS - 1), key=st.integers(0, KEYS - 1))
    def give(self, gateway: int, key: int) -> None:
        if self.held[gateway][key]:
            self.usage.slots(gateway, most=self.MOST).give(key)
            self.held[gateway][key] -= 1

    @rule(gateway=st.integers(0, GATEWAYS - 1))
    def die(self, gateway: int) -> None:
        self.usage.give_back(gateway)
        self.held[gateway] = [0] * KEYS

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "usage"):
            assert self.usage.in_flight() == sum(map(sum, self.held))

    def teardown(self) -> None:
        if hasattr(self, "usage"):
            self.usage.close()


TestGateways: Any = Gateways.TestCase
TestGateways.settings = examples(40, stateful_step_count=50)


# --- the meter ---------------------------------------------------------------------------------------


def test_nothing_was_answered_yet(usage: Usage) -> None:
    for route in range(ROUTES):
        assert usage.answers(route) == {}
        assert usage.durations(route) == ([0] * BUCKETS, 0)


@pytest.mark.parametrize("status", STATUSES[:-1])
def test_every_status_has_its_own_counter(usage: Usage, status: int) -> None:
    usage.meter(0).count(3, status, 1)
    assert usage.answers(3) == {status: 1}


@pytest.mark.parametrize("status", [0, 99, 204, 302, 418, 502, 999])
def test_any_other_status_is_counted_as_another(usage: Usage, status: int) -> None:
    usage.meter(0).count(3, status, 1)
    assert usage.answers(3) == {0: 1}


@pytest.mark.parametrize(
    ("took_us", "bucket"),
    [(0, 0), (1, 0), (63, 0), (65, 1), (127, 1), (129, 2)]
    + [(bound - 1, number) for number, bound in enumerate(BUCKET_US)]
    + [(bound + 1, number + 1) for number, bound in enumerate(BUCKET_US)]
    + [(10**9, BUCKETS - 1), (2**60, BUCKETS - 1)],
)
def test_a_duration_is_in_the_bucket_whose_bound_it_stays_below(usage: Usage, took_us: int, bucket: int) -> None:
    usage.meter(1).count(0, 200, took_us)
    buckets, total_us = usage.durations(0)
    assert buckets == [int(number == bucket) for number in range(BUCKETS)]
    assert total_us == took_us


def test_bounds_double() -> None:
    assert BUCKET_US[0] == 64
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(BUCKET_US))
    assert len(BUCKET_US) == BUCKETS - 1, "the last has no bound"


@given(
    st.lists(
        st.tuples(
            st.integers(0, GATEWAYS - 1),
            st.integers(0, ROUTES - 1),
            st.sampled_from([*STATUSES, 299]),
            st.integers(0, 10**8),
        ),
        max_size=60,
    )
)
@examples(60)
def test_the_page_adds_up_what_the_gateways_counted(counted: list[tuple[int, int, int, int]]) -> None:
    usage = Usage.create(gateways=GATEWAYS, keys=KEYS)
    slots = [usage.slots(number, most=100) for number in range(GATEWAYS)]
    for gateway, route, status, took_us in counted:
        assert slots[gateway].take(route % KEYS)
        usage.meter(gateway).count(route, status, took_us)
    assert usage.in_flight() == len(counted), "counters and slots do not touch each other"
    for route in range(ROUTES):
        of_route = [(status, took_us) for _, found, status, took_us in counted if found == route]
        expected: dict[int, int] = {}
        for status, _ in of_route:
            known = status if status in STATUSES else 0
            expected[known] = expected.get(known, 0) + 1
        assert usage.answers(route) == expected
        buckets, total_us = usage.durations(route)
        assert sum(buckets) == len(of_route)
        assert total_us == sum(took_us for _, took_us in of_route)
        for number, bound in enumerate(BUCKET_US):
            below = sum(buckets[: number + 1])
            assert sum(took_us < bound for _, took_us in of_route) <= below
            assert below <= sum(took_us <= bound for _, took_us in of_route)
    usage.close()
