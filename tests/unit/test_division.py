"""How the jobs of one pass are divided: who gets how many, in one pass and over many."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.queue.fair_share import evenly, in_order, remainder

WANTED = st.lists(st.integers(0, 50), max_size=12)
WANTING = st.lists(st.integers(1, 50), min_size=1, max_size=12)
TURNS = st.integers(0, 10_000)


def variation(totals: list[int]) -> float:
    return statistics.pstdev(totals) / statistics.fmean(totals)


# --- first come, first served --------------------------------------------------------------------------


def test_whoever_comes_first_takes_what_it_wants() -> None:
    assert in_order(50, [10] * 10) == [10] * 5 + [0] * 5
    assert in_order(7, [3, 0, 3, 3, 3]) == [3, 0, 3, 1, 0]
    assert in_order(100, [3, 4]) == [3, 4]


def test_nothing_in_order() -> None:
    assert in_order(0, [3, 4]) == [0, 0]
    assert in_order(9, []) == []


@given(available=st.integers(0, 300), wanted=WANTED)
@examples(200)
def test_in_order_nobody_gets_a_job_while_one_before_wants(available: int, wanted: list[int]) -> None:
    shares = in_order(available, wanted)
    assert sum(shares) == min(available, sum(wanted))
    assert len(shares) == len(wanted)
    for at, (share, want) in enumerate(zip(shares, wanted, strict=True)):
        assert 0 <= share <= want
        if share < want:
            assert not any(shares[at + 1 :])


# --- evenly, one pass ----------------------------------------------------------------------------------


def test_ten_workers_who_want_ten_share_fifty_jobs() -> None:
    for turn in range(20):
        assert evenly(50, [10] * 10, turn=turn) == [5] * 10


def test_shares_follow_what_was_asked_for() -> None:
    assert evenly(10, [5, 15], turn=0) == [3, 7]
    assert evenly(10, [5, 15], turn=1) == [2, 8]
    assert evenly(12, [10, 20, 30], turn=0) == [2, 4, 6]


def test_enough_for_everybody() -> None:
    assert evenly(60, [10, 20, 30], turn=1) == [10, 20, 30]
    assert evenly(1_000, [10, 0, 30], turn=1) == [10, 0, 30]


def test_nothing_evenly() -> None:
    assert evenly(0, [10, 20], turn=1) == [0, 0]
    assert evenly(5, [], turn=3) == []
    assert evenly(0, [], turn=3) == []
    assert evenly(5, [0, 0], turn=3) == [0, 0]


def test_one_job_goes_to_whose_turn_it_is() -> None:
    assert [evenly(1, [10] * 3, turn=turn).index(1) for turn in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_who_wants_nothing_gets_nothing_in_its_turn() -> None:
    assert evenly(1, [0, 4, 4], turn=0) == [0, 1, 0]
    assert evenly(1, [4, 4, 0], turn=2) == [1, 0, 0]


@given(available=st.integers(0, 400), wanted=WANTED, turn=TURNS)
@examples(500)
def test_every_job_is_given_and_nobody_gets_more_than_it_wants(available: int, wanted: list[int], turn: int) -> None:
    shares = evenly(available, wanted, turn=turn)
    assert len(shares) == len(wanted)
    assert sum(shares) == min(available, sum(wanted))
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))


@given(available=st.integers(0, 400), wanted=WANTED, turn=TURNS)
@examples(500)
def test_shares_are_in_proportion_within_one(available: int, wanted: list[int], turn: int) -> None:
    total = sum(wanted)
    shares = evenly(available, wanted, turn=turn)
    for share, want in zip(shares, wanted, strict=True):
        exact = min(available, total) * want // max(total, 1)  # rounded down
        assert exact <= share <= exact + 1


@given(available=st.integers(0, 400), want=st.integers(1, 50), claimers=st.integers(1, 12), turn=TURNS)
@examples(200)
def test_who_wants_the_same_gets_the_same_within_one(available: int, want: int, claimers: int, turn: int) -> None:
    shares = evenly(available, [want] * claimers, turn=turn)
    assert max(shares) - min(shares) <= 1


# --- evenly, over many passes --------------------------------------------------------------------------


@given(available=st.integers(0, 400), wanted=WANTING, turn=TURNS)
@examples(300)
def test_turns_go_round(available: int, wanted: list[int], turn: int) -> None:
    """In as many passes as there are claimers, everybody gets as much of what does not divide."""
    total, claimers = sum(wanted), len(wanted)
    assert evenly(available, wanted, turn=turn) == evenly(available, wanted, turn=turn + claimers)
    passes = [evenly(available, wanted, turn=turn + at) for at in range(claimers)]
    whole = [min(available, total) * want // total for want in wanted]
    left = min(available, total) - sum(whole)
    assert [sum(shares) for shares in zip(*passes, strict=True)] == [claimers * share + left for share in whole]


@given(available=st.integers(0, 400), wanted=WANTED)
@examples(300)
def test_the_remainder_is_what_was_given_one_by_one(available: int, wanted: list[int]) -> None:
    total = sum(wanted)
    whole = [min(available, total) * want // max(total, 1) for want in wanted]
    left = remainder(available, wanted)
    assert left == sum(evenly(available, wanted, turn=0)) - sum(whole)
    assert 0 <= left < max(1, sum(want > 0 for want in wanted)), "so one round is enough"


def test_no_rhythm_of_the_load_favours_anybody() -> None:
    """Every second pass divides without a remainder: who only counted passes would give each one to the same worker."""
    turn = 0
    totals = [0, 0]
    for at in range(100):
        available = 1 + at % 2
        shares = evenly(available, [5, 5], turn=turn)
        turn += remainder(available, [5, 5])
        totals = [total + share for total, share in zip(totals, shares, strict=True)]
    assert totals == [75, 75]


@pytest.mark.parametrize("claimers", [2, 3, 7, 10])
def test_equal_workers_are_served_alike_over_many_passes(claimers: int) -> None:
    chance = random.Random(claimers)
    totals = [0] * claimers
    turn = 0
    for _ in range(2_000):
        available = chance.randrange(10 * claimers)
        shares = evenly(available, [10] * claimers, turn=turn)
        turn += remainder(available, [10] * claimers)
        totals = [total + share for total, share in zip(totals, shares, strict=True)]
    assert variation(totals) < 0.01


def test_scarce_jobs_are_served_alike_to_workers_who_come_and_go() -> None:
    """Fewer jobs than claimers in every pass, so that all of them are remainders."""
    chance = random.Random(20)
    totals = [0] * 20
    turn = 0
    for _ in range(4_000):
        present = sorted(chance.sample(range(20), 10))
        available = chance.randrange(1, 10)
        for worker, share in zip(present, evenly(available, [10] * 10, turn=turn), strict=True):
            totals[worker] += share
        turn += remainder(available, [10] * 10)
    assert variation(totals) < 0.05


def test_without_turns_the_same_workers_would_always_gain() -> None:
    """What the turn is for: the measure above does see a division that always begins with the first."""
    totals = [0] * 10
    for _ in range(2_000):
        totals = [total + share for total, share in zip(totals, evenly(3, [10] * 10, turn=0), strict=True)]
    assert variation(totals) > 1
    assert totals[3:] == [0] * 7


def test_a_pass_is_divided_at_once_whatever_its_size() -> None:
    """What is left to give one by one is less than the claimers, so size costs nothing."""
    shares = evenly(3 * 10**15 - 1, [10**15] * 3, turn=2)
    assert sorted(shares) == [10**15 - 1, 10**15, 10**15]
    assert shares[1] == 10**15 - 1
