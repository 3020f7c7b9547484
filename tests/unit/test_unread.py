"""What a connection of HTTP/2 holds: its heads, and answers that its client does not take. Pure accounts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import trio_test, wait_all_tasks_blocked

from topics import limits
from topics.errors import ApiError
from topics.gateway.admission.budget import Budget
from topics.gateway.http2.h2 import Holds
from topics.gateway.http2.unread import Unread

KIB, MIB = limits.KIB, limits.MIB
FULL = limits.UNREAD_BYTES
STREAM = limits.H2_STREAM_BYTES


@asynccontextmanager
async def open_nursery() -> AsyncIterator[trio.Nursery]:
    """One that does not wait for ever for those that nobody lets go on."""
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            yield nursery


class Asking:
    """Requests that wait for room, in the order in which they go on."""

    def __init__(self, unread: Unread) -> None:
        self.unread = unread
        self.gone_on: list[str] = []
        self.scopes: dict[str, trio.CancelScope] = {}

    async def ask(self, name: str) -> None:
        with trio.CancelScope() as scope:
            self.scopes[name] = scope
            try:
                await self.unread.wait_room()
                self.gone_on.append(name)
            finally:
                if scope.cancel_called:
                    self.unread.settle(0, 0)  # as every request ends


@trio_test
async def test_none_wait_while_there_is_room() -> None:
    budget = Budget(100 * MIB)
    unread = Unread(budget)
    unread.settle(0, FULL - 1)
    assert (unread.full, budget.held) == (False, FULL - 1)
    with trio.fail_after(5):
        for _ in range(100):
            await unread.wait_room()
    unread.settle(FULL - 1, 0)
    assert (unread.held, budget.held) == (0, 0)


@trio_test
async def test_they_go_on_in_turn_as_answers_are_taken() -> None:
    unread = Unread(Budget(100 * MIB))
    asking = Asking(unread)
    unread.settle(0, FULL)
    async with open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(asking.ask, name)
            await wait_all_tasks_blocked()
        assert asking.gone_on == []
        unread.settle(FULL, FULL - 1)
        await wait_all_tasks_blocked()
        assert asking.gone_on == ["a"], "the others see first what its answer leaves"
        nursery.start_soon(asking.ask, "d")
        await wait_all_tasks_blocked()
        assert asking.gone_on == ["a"], "it came last"
        unread.settle(0, FULL)
        await wait_all_tasks_blocked()
        assert asking.gone_on == ["a"]
        unread.settle(2 * FULL - 1, 0)
        await wait_all_tasks_blocked()
        for _ in range(3):
            unread.settle(0, 100)
            await wait_all_tasks_blocked()
    assert asking.gone_on == ["a", "b", "c", "d"]


@trio_test
async def test_one_whose_turn_is_lost_passes_it_on() -> None:
    """A turn comes while its request is being cancelled."""
    unread = Unread(Budget(100 * MIB))
    asking = Asking(unread)
    unread.settle(0, FULL)
    async with open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(asking.ask, name)
            await wait_all_tasks_blocked()
        unread.settle(FULL, 0)
        asking.scopes["a"].cancel()
        await wait_all_tasks_blocked()
        assert asking.gone_on == ["b"]
        asking.scopes["c"].cancel()
    assert asking.gone_on == ["b"]


@trio_test
async def test_one_that_finds_no_room_when_its_turn_comes_stays_first() -> None:
    unread = Unread(Budget(100 * MIB))
    asking = Asking(unread)
    unread.settle(0, FULL)
    async with open_nursery() as nursery:
        for name in "ab":
            nursery.start_soon(asking.ask, name)
            await wait_all_tasks_blocked()
        unread.settle(FULL, 0)
        unread.settle(0, FULL)  # before it has noticed
        await wait_all_tasks_blocked()
        assert asking.gone_on == []
        unread.settle(FULL, 0)
        await wait_all_tasks_blocked()
        assert asking.gone_on == ["a"]
        unread.settle(0, 0)
    assert asking.gone_on == ["a", "b"]


@trio_test
async def test_those_that_wait_too_long_are_told_so() -> None:
    unread = Unread(Budget(100 * MIB))
    unread.settle(0, FULL)
    refused: list[str] = []

    async def ask() -> None:
        try:
            await unread.wait_room()
        except ApiError as error:
            refused.append(error.code)

    async with open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        unread.give_up(trio.current_time() - 60)
        await wait_all_tasks_blocked()
        assert refused == []
        unread.give_up(trio.current_time())
    assert refused == ["request_timeout"] * 3
    unread.settle(FULL, 0)
    await unread.wait_room()


# --- heads ---

HEADERS = [(b"a", b"v" * 967)]  # counts as 2,000
HEAD = 2_000


def test_a_stream_costs_more_until_its_request_is_whole() -> None:
    budget = Budget(10 * MIB)
    holds = Holds(budget)
    assert holds.open(1, HEADERS, whole=False, always=False)
    assert budget.held == HEAD + STREAM
    for _ in range(2):
        holds.is_whole(1)
        assert budget.held == HEAD
    assert holds.open(3, HEADERS, whole=True, always=False)
    holds.is_whole(3)
    assert budget.held == 2 * HEAD
    for _ in range(2):
        holds.close(1)
        assert budget.held == HEAD
    holds.let_go()
    holds.close(3)
    assert budget.held == 0


def test_streams_of_one_connection_are_bounded() -> None:
    budget = Budget(1_000 * MIB)
    holds = Holds(budget)
    fits = limits.H2_OPEN_BYTES // (HEAD + STREAM)
    assert fits > 100
    assert [holds.open(2 * number + 1, HEADERS, whole=False, always=False) for number in range(fits + 1)] == [
        *[True] * fits,
        False,
    ]
    before = budget.held
    assert holds.open(9_999, HEADERS, whole=True, always=True), "probes are served all the same"
    assert budget.held == before + HEAD


def test_without_room_nothing_is_booked() -> None:
    budget = Budget(STREAM)
    holds = Holds(budget)
    assert not holds.open(1, HEADERS, whole=False, always=False)
    assert not holds.begin(STREAM + 1)
    assert budget.held == 0
    assert holds.begin(STREAM)
    assert not holds.begin(STREAM + 1)
    assert budget.held == STREAM
    assert holds.begin(0)
    assert budget.held == 0
