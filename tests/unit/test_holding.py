"""Requests that wait for a process that is being replaced: in order, each sent once or refused, not for ever, and not
without bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import examples

from topics import limits
from topics.gateway.admission.holding import Holding
from topics.shm.counters import State

MS = 1_000_000
TIMEOUT_MS = 1_000


class Play:
    """Peers that come and go, and rings that may be full."""

    def __init__(self) -> None:
        self.now_ns = 5_000 * MS
        self.holding = Holding(timeout_ms=TIMEOUT_MS, clock=lambda: self.now_ns)
        self.states: dict[int, State] = {}
        self.linked: set[int] = {0, 1}
        self.full: set[int] = set()
        self.sent: list[tuple[int, int]] = []
        self.refused: list[int] = []
        self.waited_us: dict[int, int] = {}

    def keep(self, number: int, *, peer: int = 0, size: int = 10, of: object = None) -> bool:
        def send(waited_us: int) -> bool:
            assert not self.holding.held(peer)
            if peer in self.full or peer not in self.linked:
                return False
            self.sent.append((peer, number))
            self.waited_us[number] = waited_us
            return True

        refuse: Callable[[], None] = lambda: self.refused.append(number)  # noqa: E731
        return self.holding.keep(peer, send=send, refuse=refuse, size=size, of=of)

    def look(self, later_ms: int = 0) -> None:
        self.now_ns += later_ms * MS
        self.holding.look(lambda peer: self.states.get(peer, State.READY), linked=self.linked.__contains__)

    def goes(self, peer: int = 0) -> None:
        self.holding.hold(peer)
        self.linked.discard(peer)
        self.states[peer] = State.STARTING

    def comes(self, peer: int = 0) -> None:
        self.linked.add(peer)
        self.holding.link_up(peer)


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_whole_replacement(play: Play) -> None:
    assert not play.holding.busy
    play.holding.hold(0)
    play.look()
    assert play.holding.keeps(0)
    assert not play.holding.keeps(1)
    assert all(play.keep(number) for number in range(3))
    play.goes()
    play.look(100)
    assert play.sent == []
    assert play.holding.replacing == {0}
    play.comes()
    play.look(100)
    assert play.sent == [(0, 0), (0, 1), (0, 2)]
    assert play.waited_us == dict.fromkeys(range(3), 200_000)
    assert not play.holding.keeps(0)
    assert play.holding.replacing == {0}  # it may be recovering still
    play.states[0] = State.READY
    play.look()
    assert not play.holding.busy
    assert play.refused == []


def test_what_does_not_fit_stays_the_first(play: Play) -> None:
    play.goes()
    for number in range(2):
        play.keep(number)
    play.comes()
    play.full.add(0)
    play.look()
    assert play.sent == []
    assert play.holding.keeps(0)  # whoever comes now waits behind them
    play.keep(2)
    play.full.clear()
    play.look()
    assert play.sent == [(0, 0), (0, 1), (0, 2)]


def test_nobody_waits_longer_than_a_call_may_take(play: Play) -> None:
    play.goes()
    play.keep(0)
    play.look(TIMEOUT_MS // 2)
    play.keep(1)
    play.look(TIMEOUT_MS // 2)
    assert play.refused == [0]
    play.comes()
    play.look()
    assert (play.sent, play.refused) == ([(0, 1)], [0])


@pytest.mark.parametrize("others", [0, 1])
def test_one_that_goes_with_its_connection_as_it_is_refused(play: Play, others: int) -> None:
    """Nobody else is taken for it."""
    play.goes()
    client = object()

    def refuse() -> None:
        play.holding.abandon(client)

    play.holding.keep(0, send=lambda _: False, refuse=refuse, size=10, of=client)
    play.look(TIMEOUT_MS // 2)
    for number in range(others):
        play.keep(number)
    play.look(TIMEOUT_MS // 2)
    play.comes()
    play.look()
    assert play.sent == [(0, number) for number in range(others)]
    assert not len(play.holding)


def test_there_is_room_for_so_many_bytes(play: Play) -> None:
    play.goes()
    assert play.keep(0, size=limits.HOLD_BYTES - 1)
    assert not play.keep(1, size=2, peer=0)
    play.comes()
    play.look()
    play.goes()
    assert play.keep(2, size=limits.HOLD_BYTES)


@pytest.mark.parametrize("state", [State.FAILED, State.BACKOFF, State.STOPPED])
def test_one_that_falls_is_not_waited_for(play: Play, state: State) -> None:
    play.goes()
    play.keep(0)
    play.states[0] = state
    play.look()
    assert not play.holding.held(0)
    assert play.holding.replacing == set()
    play.look(TIMEOUT_MS)
    assert play.refused == [0]
    assert not play.holding.busy


def test_whose_client_has_gone(play: Play) -> None:
    play.goes()
    who = object()
    play.keep(0, of=who)
    play.keep(1)
    assert play.holding.abandon(who)
    assert not play.holding.abandon(who)
    play.comes()
    play.look()
    assert play.sent == [(0, 1)]


class Machine(RuleBasedStateMachine):
    """Whatever happens in whatever order: everyone is sent once, in order per peer, or refused, and never both."""

    @initialize()
    def begin(self) -> None:
        self.play = Play()
        self.kept: list[tuple[int, int]] = []

    @rule(peer=st.integers(0, 1))
    def ask(self, peer: int) -> None:
        if self.play.holding.keeps(peer):
            number = len(self.kept)
            assert self.play.keep(number, peer=peer)
            self.kept.append((peer, number))

    @rule(peer=st.integers(0, 1))
    def goes(self, peer: int) -> None:
        self.play.goes(peer)

    @rule(peer=st.integers(0, 1), state=st.sampled_from([State.READY, State.RECOVERING, State.BACKOFF]))
    def comes(self, peer: int, state: State) -> None:
        self.play.comes(peer)
        self.play.states[peer] = state

    @rule(full=st.sets(st.integers(0, 1)), later_ms=st.integers(0, TIMEOUT_MS))
    def look(self, full: set[int], later_ms: int) -> None:
        self.play.full = full
        self.play.look(later_ms)

    @invariant()
    def nobody_is_served_twice_or_overtaken(self) -> None:
        if not hasattr(self, "play"):
            return
        for peer in (0, 1):
            mine = [number for at, number in self.play.sent if at == peer]
            assert mine == sorted(set(mine))
        ended = [number for _, number in self.play.sent] + self.play.refused
        assert len(ended) == len(set(ended))
        assert len(ended) + len(self.play.holding) == len(self.kept)


TestMachine = Machine.TestCase
TestMachine.settings = examples(30)
