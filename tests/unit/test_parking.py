"""Writes that wait instead of being refused: in order, not for ever, not without bound, and each sent exactly once."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import examples

from topics import limits
from topics.actors.messages import Op
from topics.gateway.admission.parking import Parking
from topics.gateway.api.types import Call

MS = 1_000_000
PARK_NS = limits.PARK_MS * MS


class Sink:
    def finish(self, value: Any) -> None:
        raise AssertionError("it is nobody's business here to answer")

    def abort(self) -> None: ...


SINK = Sink()


class Play:
    """A parking lot, shards that refuse, and rings that may be full."""

    def __init__(self) -> None:
        self.now_ns = 7_000 * MS
        self.parking = Parking(lambda: self.now_ns)
        self.refusing: set[int] = set()
        self.full: set[int] = set()
        self.room: int | None = None  # so many more are taken; None: any number
        self.sent: list[tuple[int, int]] = []  # shard, id
        self.waited_us: dict[int, int] = {}
        self.look()

    def park(self, id: int, *, shard: int = 0, size: int = 10) -> bool:
        return self.parking.park(Call(shard=shard, op=Op.APPEND, head=None, body=bytes(size)), SINK, id)

    def look(self, later_ms: float = 0) -> list[int]:
        """A round; the ids that were sent on."""
        self.now_ns += int(later_ms * MS)
        before = len(self.sent)
        self.parking.release(self.now_ns, waits=self.refusing.__contains__, send=self._send)
        return [id for _, id in self.sent[before:]]

    def _send(self, call: Call, sink: Any, id: int) -> bool:
        if call.shard in self.full or self.room == 0:
            return False
        if self.room is not None:
            self.room -= 1
        assert sink is SINK
        self.sent.append((call.shard, id))
        self.waited_us[id] = call.throttle_us
        return True


@pytest.fixture
def play() -> Play:
    return Play()


def test_an_empty_one_wants_nothing(play: Play) -> None:
    assert len(play.parking) == 0
    assert play.parking.next_due_ns is None
    assert not play.parking.has(0)
    assert play.look(10) == []


def test_they_wait_while_the_shard_refuses_and_leave_in_order(play: Play) -> None:
    play.refusing = {0}
    for id in (5, 3, 9):
        assert play.park(id)
    assert (len(play.parking), play.parking.has(0), play.parking.has(1)) == (3, True, False)
    assert play.look(1_000) == []
    play.refusing = set()
    assert play.look(1) == [5, 3, 9]
    assert (len(play.parking), play.parking.has(0)) == (0, False)
    assert play.look(1) == [], "each of them once"


def test_each_is_told_how_long_it_has_waited(play: Play) -> None:
    play.refusing = {0}
    play.park(1)
    play.look(250)
    play.park(2)
    play.look(0.5)
    play.refusing = set()
    play.look(100)
    assert play.waited_us == {1: 350_500, 2: 100_500}


def test_the_wait_begins_when_it_is_parked_and_not_with_the_last_round(play: Play) -> None:
    """Requests come between rounds too, and a gateway may have slept for long."""
    play.refusing = {0}
    play.now_ns += 60_000 * MS
    play.park(1)
    assert play.look(limits.PARK_MS - 1) == []
    play.refusing = set()
    assert play.look() == [1]
    assert play.waited_us == {1: (limits.PARK_MS - 1) * 1_000}


def test_shards_do_not_wait_for_each_other(play: Play) -> None:
    play.refusing = {0, 1}
    for id in range(6):
        play.park(id, shard=id % 2)
    play.refusing = {0}
    assert play.look(1) == [1, 3, 5]
    assert play.parking.has(0)
    assert not play.parking.has(1)
    play.refusing = set()
    assert play.look(1) == [0, 2, 4]


def test_nobody_waits_longer_than_it_has_to(play: Play) -> None:
    play.refusing = {0}
    play.park(1)
    play.look(1_000)
    play.park(2)
    assert play.look(limits.PARK_MS - 1_001) == []
    assert play.look(1) == [1], "its time is up, and only its"
    assert play.look(999) == []
    assert play.look(1) == [2]
    assert play.waited_us == {1: limits.PARK_MS * 1_000, 2: limits.PARK_MS * 1_000}


def test_a_full_ring_keeps_the_order(play: Play) -> None:
    play.refusing = {0}
    for id in range(5):
        play.park(id)
    play.refusing = set()
    play.room = 2
    assert play.look(1) == [0, 1]
    assert len(play.parking) == 3
    assert play.look(1) == []
    play.room = None
    assert play.look(1) == [2, 3, 4]


def test_one_shards_full_ring_is_not_the_others_problem(play: Play) -> None:
    play.refusing = {0, 1}
    for id in range(4):
        play.park(id, shard=id % 2)
    play.refusing = set()
    play.full = {0}
    assert play.look(1) == [1, 3]
    play.full = set()
    assert play.look(1) == [0, 2]


def test_a_ring_that_is_full_when_the_time_is_up_is_tried_again(play: Play) -> None:
    play.refusing = {0}
    play.park(1)
    play.full = {0}
    assert play.look(limits.PARK_MS) == []
    play.full = set()
    assert play.look(20) == [1]
    assert play.waited_us == {1: (limits.PARK_MS + 20) * 1_000}


def test_a_round_comes_soon_while_somebody_waits(play: Play) -> None:
    play.refusing = {0}
    play.park(1)
    due = play.parking.next_due_ns
    assert due is not None
    assert play.now_ns < due <= play.now_ns + 50 * MS
    play.refusing = set()
    play.look(1)
    assert play.parking.next_due_ns is None


def test_there_is_no_room_for_more_than_so_many_bytes(play: Play) -> None:
    play.refusing = {0, 1}
    half = limits.PARK_BYTES // 2
    assert play.park(1, size=half)
    assert play.park(2, shard=1, size=half), "exactly as much as there is room for"
    assert not play.park(3, size=1)
    assert not play.park(4, shard=1, size=1), "all shards share the room"
    assert play.park(5, size=0)
    assert len(play.parking) == 3
    play.refusing = {1}
    play.look(1)
    assert play.park(6, shard=1, size=half), "what left has made room"
    assert not play.park(7, shard=1, size=1)


def test_one_larger_than_everything_is_refused_and_takes_no_room(play: Play) -> None:
    play.refusing = {0}
    assert not play.park(1, size=limits.PARK_BYTES + 1)
    assert not play.parking.has(0)
    assert play.park(2, size=limits.PARK_BYTES)


class Lot(RuleBasedStateMachine):
    """Against a queue per shard: nobody lost, doubled, overtaken, or kept too long while there is room in the ring."""

    @initialize()
    def begin(self) -> None:
        self.play = Play()
        self.expected: dict[int, deque[tuple[int, int]]] = {shard: deque() for shard in range(3)}
        self.ids = 0

    @rule(shard=st.integers(0, 2), size=st.sampled_from([0, 1, 1_000]))
    def park(self, shard: int, size: int) -> None:
        self.ids += 1
        assert self.play.park(self.ids, shard=shard, size=size)
        self.expected[shard].append((self.ids, self.play.now_ns))

    @rule(shard=st.integers(0, 2))
    def refuse(self, shard: int) -> None:
        self.play.refusing ^= {shard}

    @rule(shard=st.integers(0, 2))
    def fill(self, shard: int) -> None:
        self.play.full ^= {shard}

    @rule(later_ms=st.sampled_from([0, 1, 20, 1_000, 4_999, 5_000]), room=st.sampled_from([None, None, 0, 1, 3]))
    def look(self, later_ms: int, room: int | None) -> None:
        play = self.play
        play.room = room
        before = len(play.sent)
        play.look(later_ms)
        for shard, id in play.sent[before:]:
            expected, since_ns = self.expected[shard].popleft()
            assert id == expected, "overtaken"
            assert play.waited_us[id] == (play.now_ns - since_ns) // 1_000
            assert shard not in play.refusing or play.now_ns - since_ns >= PARK_NS
        if room is None:
            for shard, left in self.expected.items():
                due = [id for id, since_ns in left if play.now_ns - since_ns >= PARK_NS or shard not in play.refusing]
                assert not due or shard in play.full, "nothing keeps them"

    @invariant()
    def everybody_is_there(self) -> None:
        if hasattr(self, "play"):
            assert len(self.play.parking) == sum(map(len, self.expected.values()))
            for shard, waiting in self.expected.items():
                assert self.play.parking.has(shard) == bool(waiting)
            assert (self.play.parking.next_due_ns is None) == (len(self.play.parking) == 0)


TestLot: Any = Lot.TestCase
TestLot.settings = examples(60, stateful_step_count=50)
