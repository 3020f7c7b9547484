"""The lease table of a queue: every state with every event, who may say what, and time to the millisecond.

The table of what may happen is written here a second time, so that a change of it has to be said twice. Everything is
done through the public methods, and after each step the counters are compared with a walk over the table.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasebook import CLAIMABLE, check_books, row, rows, states
from model import examples

from topics.queue.lease_table import TRANSITIONS, Event, Lease, Leases, State
from topics.storage.leases import JobState, LeaseEvent

LEASED, EXPIRED, FREE = State.LEASED, State.EXPIRED, State.FREE
DELAYED, ENDING, MOVING = State.DELAYED, State.ENDING, State.MOVING

EXPECTED = {
    LEASED: {
        Event.ACK: ENDING,
        Event.NACK: FREE,
        Event.DELAY: DELAYED,
        Event.EXTEND: LEASED,
        Event.EXPIRE: EXPIRED,
        Event.DISCONNECT: FREE,
    },
    EXPIRED: {
        Event.CLAIM: LEASED,
        Event.ACK: ENDING,
        Event.NACK: FREE,
        Event.DELAY: DELAYED,
        Event.EXTEND: LEASED,
        Event.MOVE: MOVING,
        Event.DISCONNECT: FREE,
    },
    FREE: {Event.CLAIM: LEASED, Event.MOVE: MOVING},
    DELAYED: {Event.ELAPSE: FREE},
    ENDING: {Event.UNDO: LEASED},
    MOVING: {Event.UNDO: DELAYED},
}
PAIRS = [(state, event) for state in State for event in Event]

SEQ, NODE, STREAM = 5, "a", 7
SOON, FAR = 1_000, 1_000_000  # FAR is not reached in a test


def in_state(state: State, *, seq: int = SEQ, deadline_ms: int = FAR, until_ms: int = FAR) -> Leases:
    """A table with one job, brought to a state as a client would."""
    leases = Leases(first_number=40)
    if state == EXPIRED:
        leases.claim([seq], node=NODE, deadline_ms=10, stream=STREAM)
        leases.advance(11)
    else:
        leases.claim([seq], node=NODE, deadline_ms=deadline_ms, stream=STREAM)
    if state == ENDING:
        assert leases.ack(NODE, [seq])
    elif state in (FREE, MOVING):
        assert leases.nack(NODE, [seq])
        if state == MOVING:
            assert leases.pick(1) == ([seq], [])
            assert leases.move([seq])
    elif state == DELAYED:
        assert leases.nack(NODE, [seq], until_ms=until_ms)
    assert states(leases) == {seq: state}
    check_books(leases)
    return leases


def claim_if_free(leases: Leases, *, node: str = "b", deadline_ms: int = FAR, stream: int = 0) -> list[Lease]:
    picked, _ = leases.pick(1)
    return leases.claim(picked, node=node, deadline_ms=deadline_ms, stream=stream)


def happen(leases: Leases, event: Event) -> list[int]:
    """Let an event happen to job SEQ; the seqs that the table says have changed, where it says."""
    changed: list[Lease] = []
    match event:
        case Event.CLAIM:
            changed = claim_if_free(leases)
        case Event.ACK:
            changed = leases.ack(NODE, [SEQ])
        case Event.NACK:
            changed = leases.nack(NODE, [SEQ])
        case Event.DELAY:
            changed = leases.nack(NODE, [SEQ], until_ms=FAR + 1)
        case Event.EXTEND:
            changed = leases.extend(NODE, [SEQ], deadline_ms=FAR + 2)
        case Event.EXPIRE:
            leases.advance(SOON + 1)
        case Event.ELAPSE:
            leases.advance(SOON)
        case Event.MOVE:
            changed = leases.move([SEQ])
        case Event.UNDO:
            leases.undo([SEQ], until_ms=FAR + 3)
        case Event.DISCONNECT:
            changed = leases.disconnect(STREAM)
    return [lease.seq for lease in changed]


SILENT = (Event.EXPIRE, Event.ELAPSE, Event.UNDO)  # the caller is not told what changed


def before(state: State, event: Event) -> Leases:
    """Only what the event is about is due when it happens."""
    if event == Event.EXPIRE:
        return in_state(state, deadline_ms=SOON)
    if event == Event.ELAPSE:
        return in_state(state, until_ms=SOON)
    return in_state(state)


# --- every state with every event ----------------------------------------------------------------------


def test_the_table_is_the_one_written_here() -> None:
    assert {(state, event): to for state, events in EXPECTED.items() for event, to in events.items()} == TRANSITIONS


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda name: name.name.lower())
def test_every_state_with_every_event(state: State, event: Event) -> None:
    leases = before(state, event)
    lease = leases.get(SEQ)
    assert lease is not None
    _, _, node, number, deadline_ms, deliveries, stream = row(lease)
    changed = happen(leases, event)
    check_books(leases)
    after = EXPECTED[state].get(event)
    assert changed == ([SEQ] if after is not None and event not in SILENT else [])
    if after is None:
        assert row(lease)[:-1] == (SEQ, state, node, number, deadline_ms, deliveries)
        assert lease.stream == (0 if (state, event) == (ENDING, Event.DISCONNECT) else stream)
        return
    assert lease.state == after
    if event == Event.CLAIM:
        assert row(lease)[2:] == ("b", number + 1, FAR, deliveries + 1, 0)
        return
    assert (lease.node, lease.number, lease.deliveries) == (node, number, deliveries)
    assert lease.stream == (0 if event == Event.DISCONNECT else stream)
    deadlines = {Event.DELAY: FAR + 1, Event.EXTEND: FAR + 2}
    if (state, event) == (MOVING, Event.UNDO):
        deadlines[Event.UNDO] = FAR + 3
    if after != FREE:
        assert lease.deadline_ms == deadlines.get(event, deadline_ms)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_removed_in_every_state(state: State) -> None:
    leases = in_state(state)
    leases.remove([SEQ, SEQ, 99])
    check_books(leases)
    assert (len(leases), SEQ in leases, leases.get(SEQ)) == (0, False, None)
    assert (leases.in_flight, leases.hidden, leases.streams(), leases.free) == (0, 0, [], False)
    assert leases.pick(9) == ([], [])
    assert leases.disconnect(STREAM) == []
    leases.advance(FAR * 2)
    assert len(leases) == 0
    assert leases.next_due_ms() is None


@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_what_each_state_counts_as(state: State) -> None:
    leases = in_state(state)
    assert leases.in_flight == (state in (LEASED, ENDING))
    assert leases.hidden == (state in (DELAYED, MOVING))
    assert leases.free == (state in CLAIMABLE)
    assert leases.of_stream(STREAM) == (state in (LEASED, ENDING))


@pytest.mark.parametrize("event", [event for event in Event if event != Event.CLAIM], ids=lambda event: event.name)
def test_a_job_nobody_was_given_is_not_here(event: Event) -> None:
    leases = Leases()
    assert happen(leases, event) == []
    assert (len(leases), leases.seqs(), leases.get(SEQ)) == (0, [], None)
    check_books(leases)
    assert leases.claimable(SEQ, fresh=True), "it is in the log and fresh"


@pytest.mark.parametrize("state", [state for state in State if state not in CLAIMABLE], ids=lambda state: state.name)
def test_a_claim_of_what_is_not_claimable_takes_nothing(state: State) -> None:
    """Between a pick and its claim the holder of an expired lease may have spoken."""
    leases = in_state(state)
    was = rows(leases)
    assert leases.claim([SEQ], node="b", deadline_ms=FAR, stream=8) == []
    assert rows(leases) == was
    check_books(leases)


def test_a_job_named_twice_is_claimed_once() -> None:
    leases = Leases()
    claimed = leases.claim([3, 3], node=NODE, deadline_ms=FAR)
    assert [(lease.seq, lease.deliveries) for lease in claimed] == [(3, 1)]
    check_books(leases)


# --- claims --------------------------------------------------------------------------------------------


def test_a_fresh_job() -> None:
    leases = Leases(first_number=9)
    claimed = leases.claim([2, 5], node="a", deadline_ms=100, stream=3)
    assert [row(lease) for lease in claimed] == [(2, LEASED, "a", 9, 100, 1, 3), (5, LEASED, "a", 10, 100, 1, 3)]
    assert (leases.in_flight, leases.hidden, leases.of_stream(3), leases.streams()) == (2, 0, 2, [3])
    check_books(leases)


def test_claiming_nothing() -> None:
    leases = Leases()
    assert leases.claim([], node="a", deadline_ms=100) == []
    assert len(leases) == 0


def test_each_delivery_has_its_own_number_and_is_counted() -> None:
    leases = Leases(first_number=1_000)
    numbers = []
    for delivery in range(1, 30):
        [lease] = leases.claim([SEQ], node=NODE, deadline_ms=100 * delivery)
        assert lease.deliveries == delivery
        numbers.append(lease.number)
        if delivery % 2:
            leases.nack(NODE, [SEQ])
        else:
            leases.advance(100 * delivery + 1)
        assert leases.pick(1) == ([SEQ], [])
    assert numbers == list(range(1_000, 1_029))


def test_a_claim_changes_hands_wholly() -> None:
    """The stream and the node are those of the claim, also when it is no stream's."""
    leases = in_state(EXPIRED)
    [lease] = claim_if_free(leases, node="b", deadline_ms=50, stream=8)
    assert row(lease) == (SEQ, LEASED, "b", 41, 50, 2, 8)
    assert leases.streams() == [8]
    leases.advance(51)
    [lease] = claim_if_free(leases, node="c", deadline_ms=90)
    assert row(lease) == (SEQ, LEASED, "c", 42, 90, 3, 0)
    assert leases.streams() == []
    check_books(leases)


# --- who may speak -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """One of the three things a holder says."""

    name: str
    say: Callable[..., list[Lease]]
    becomes: State


SAID = [
    Said("ack", lambda leases, node, seqs, numbers=None: leases.ack(node, seqs, numbers), ENDING),
    Said("nack", lambda leases, node, seqs, numbers=None: leases.nack(node, seqs, numbers), FREE),
    Said("delay", lambda leases, node, seqs, numbers=None: leases.nack(node, seqs, numbers, until_ms=FAR), DELAYED),
    Said(
        "extend", lambda leases, node, seqs, numbers=None: leases.extend(node, seqs, numbers, deadline_ms=FAR), LEASED
    ),
]
whatever_is_said = pytest.mark.parametrize("said", SAID, ids=lambda said: said.name)


def changed_seqs(changed: Sequence[Lease]) -> list[int]:
    return [lease.seq for lease in changed]


@whatever_is_said
@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_a_foreign_node_is_not_heard(said: Said, state: State) -> None:
    leases = in_state(state)
    was = rows(leases)
    for node in ("b", "", "A", NODE + "a"):
        assert said.say(leases, node, [SEQ]) == []
        assert said.say(leases, node, [SEQ], [40]) == []
    assert rows(leases) == was
    check_books(leases)


@whatever_is_said
@pytest.mark.parametrize("state", [LEASED, EXPIRED], ids=lambda state: state.name.lower())
def test_the_number_of_the_lease_opens(said: Said, state: State) -> None:
    leases = in_state(state)
    was = rows(leases)
    for number in (39, 41, 0, -1):
        assert said.say(leases, NODE, [SEQ], [number]) == []
    assert rows(leases) == was
    assert changed_seqs(said.say(leases, NODE, [SEQ], [40])) == [SEQ]
    assert states(leases) == {SEQ: said.becomes}
    check_books(leases)


@whatever_is_said
def test_an_old_number_is_refused_even_to_the_same_node(said: Said) -> None:
    """A worker that was slow, and another of the same name that has the job now."""
    leases = in_state(EXPIRED)
    [lease] = claim_if_free(leases, node=NODE)
    assert lease.number == 41
    assert said.say(leases, NODE, [SEQ], [40]) == []
    assert leases.in_flight == 1
    assert changed_seqs(said.say(leases, NODE, [SEQ], [41])) == [SEQ]


@whatever_is_said
def test_without_numbers_the_name_is_enough(said: Said) -> None:
    leases = in_state(EXPIRED)
    claim_if_free(leases, node=NODE)
    assert changed_seqs(said.say(leases, NODE, [SEQ])) == [SEQ]


@whatever_is_said
def test_numbers_go_with_their_seqs(said: Said) -> None:
    leases = Leases(first_number=1)
    leases.claim([10, 20, 30, 40], node=NODE, deadline_ms=100)
    changed = said.say(leases, NODE, [40, 20, 10, 30, 99], [4, 3, 1, 2, 5])
    assert changed_seqs(changed) == [40, 10], "in the order asked, without those of another's number"
    assert {seq for seq, state in states(leases).items() if state == said.becomes} >= {10, 40}
    lease = leases.get(20)
    assert lease is not None
    assert row(lease) == (20, LEASED, NODE, 2, 100, 1, 0)
    check_books(leases)


@whatever_is_said
def test_a_seq_named_twice_counts_once(said: Said) -> None:
    leases = Leases(first_number=1)
    leases.claim([10, 20], node=NODE, deadline_ms=100)
    assert changed_seqs(said.say(leases, NODE, [20, 10, 20, 20, 10])) == [20, 10]
    check_books(leases)


@whatever_is_said
def test_a_seq_named_twice_with_its_number_once(said: Said) -> None:
    leases = Leases(first_number=1)
    leases.claim([10], node=NODE, deadline_ms=100)
    assert changed_seqs(said.say(leases, NODE, [10, 10, 10], [9, 1, 1])) == [10]
    check_books(leases)


@whatever_is_said
@pytest.mark.parametrize("given_back", ["nack", "delay", "delay that is over", "disconnect", "disconnect after expiry"])
def test_who_gave_a_job_back_has_no_say_in_it(said: Said, given_back: str) -> None:
    leases = in_state(EXPIRED if given_back == "disconnect after expiry" else LEASED)
    if given_back == "nack":
        leases.nack(NODE, [SEQ])
    elif given_back.startswith("disconnect"):
        assert changed_seqs(leases.disconnect(STREAM)) == [SEQ]
    else:
        leases.nack(NODE, [SEQ], until_ms=100)
        leases.advance(100 if given_back == "delay that is over" else 99)
    was = rows(leases)
    assert said.say(leases, NODE, [SEQ]) == []
    assert said.say(leases, NODE, [SEQ], [40]) == []
    assert rows(leases) == was


@whatever_is_said
def test_an_expired_lease_is_its_holders_until_somebody_claims(said: Said) -> None:
    leases = in_state(EXPIRED)
    leases.advance(FAR // 2)
    assert (leases.in_flight, leases.free) == (0, True)
    assert changed_seqs(said.say(leases, NODE, [SEQ], [40])) == [SEQ]
    assert states(leases) == {SEQ: said.becomes}
    assert leases.free == (said.becomes == FREE)
    check_books(leases)

    leases = in_state(EXPIRED)
    [lease] = claim_if_free(leases, node="b")
    assert said.say(leases, NODE, [SEQ]) == []
    assert said.say(leases, NODE, [SEQ], [40]) == []
    assert said.say(leases, "b", [SEQ], [40]) == []
    assert row(lease) == (SEQ, LEASED, "b", 41, FAR, 2, 0)


# --- time ----------------------------------------------------------------------------------------------


def test_a_lease_is_good_to_its_last_millisecond() -> None:
    leases = in_state(LEASED, deadline_ms=100)
    for now, state in ((0, LEASED), (99, LEASED), (100, LEASED), (101, EXPIRED), (102, EXPIRED)):
        leases.advance(now)
        assert states(leases) == {SEQ: state}
        check_books(leases)


def test_a_delay_ends_with_its_last_millisecond() -> None:
    leases = in_state(DELAYED, until_ms=100)
    for now, state in ((0, DELAYED), (99, DELAYED), (100, FREE), (101, FREE)):
        leases.advance(now)
        assert states(leases) == {SEQ: state}
        check_books(leases)


@pytest.mark.parametrize("held", [1, 2, 3])
def test_a_lease_in_its_last_millisecond_keeps_no_delay_waiting(held: int) -> None:
    """All of them have the same deadline: the delays are over then, the lease one later."""
    leases = Leases()
    leases.claim([1, 2, 3], node=NODE, deadline_ms=100)
    delayed = [seq for seq in (1, 2, 3) if seq != held]
    leases.nack(NODE, delayed, until_ms=100)
    assert leases.next_due_ms() == 100
    leases.advance(100)
    assert states(leases) == {seq: LEASED if seq == held else FREE for seq in (1, 2, 3)}
    assert leases.next_due_ms() == 101
    leases.advance(101)
    assert states(leases)[held] == EXPIRED


@pytest.mark.parametrize(("state", "due"), [(LEASED, SOON + 1), (DELAYED, SOON)], ids=["lease", "delay"])
def test_when_there_is_something_to_do(state: State, due: int) -> None:
    leases = in_state(state, deadline_ms=SOON, until_ms=SOON)
    assert leases.next_due_ms() == due
    leases.advance(due - 1)
    assert states(leases) == {SEQ: state}
    assert leases.next_due_ms() == due
    leases.advance(due)
    assert states(leases)[SEQ] in CLAIMABLE
    assert leases.next_due_ms() is None


@pytest.mark.parametrize("state", [EXPIRED, FREE, ENDING, MOVING], ids=lambda state: state.name.lower())
def test_nothing_is_due_for_what_no_time_moves(state: State) -> None:
    leases = in_state(state)
    assert leases.next_due_ms() is None
    leases.advance(FAR + 1)
    assert states(leases) == {SEQ: state}


def test_nothing_is_due_in_an_empty_table() -> None:
    leases = Leases()
    assert leases.next_due_ms() is None
    leases.advance(10**15)
    assert len(leases) == 0


@pytest.mark.parametrize("deadline_ms", [50, 100, 150], ids=["sooner", "the same", "later"])
@pytest.mark.parametrize("state", [LEASED, EXPIRED], ids=lambda state: state.name.lower())
def test_an_extended_lease_ends_when_its_holder_said(state: State, deadline_ms: int) -> None:
    """It is set, not added to: an earlier end is one too, and the old deadline means nothing any more."""
    leases = in_state(state, deadline_ms=100)
    [lease] = leases.extend(NODE, [SEQ], deadline_ms=deadline_ms)
    assert row(lease) == (SEQ, LEASED, NODE, 40, deadline_ms, 1, STREAM)
    assert leases.next_due_ms() == deadline_ms + 1
    assert leases.pick(1) == ([], [])
    assert not leases.free
    leases.advance(deadline_ms)
    assert lease.state == LEASED
    leases.advance(deadline_ms + 1)
    assert lease.state == EXPIRED
    assert leases.pick(9) == ([SEQ], [])
    check_books(leases, picked=[SEQ])


def test_a_lease_may_be_extended_for_ever() -> None:
    leases = in_state(LEASED, deadline_ms=100)
    for now in range(100, 10_000, 100):
        leases.advance(now)
        assert leases.extend(NODE, [SEQ], [40], deadline_ms=now + 100)
        assert leases.next_due_ms() == now + 101
    assert rows(leases) == [(SEQ, LEASED, NODE, 40, 10_000, 1, STREAM)]


@pytest.mark.parametrize("until_ms", [50, 100, 150], ids=["sooner", "with the deadline", "later"])
@pytest.mark.parametrize("state", [LEASED, EXPIRED], ids=lambda state: state.name.lower())
def test_a_delayed_job_is_not_given_out_before_its_time(state: State, until_ms: int) -> None:
    leases = in_state(state, deadline_ms=100)
    assert changed_seqs(leases.nack(NODE, [SEQ], until_ms=until_ms)) == [SEQ]
    assert (leases.in_flight, leases.hidden) == (0, 1)
    assert leases.next_due_ms() == until_ms
    leases.advance(until_ms - 1)
    assert leases.pick(1) == ([], [])
    assert not leases.claimable(SEQ, fresh=False)
    leases.advance(until_ms)
    assert (leases.in_flight, leases.hidden) == (0, 0)
    assert leases.claimable(SEQ, fresh=False)
    assert leases.pick(1) == ([SEQ], [])


def test_a_delay_that_is_over_already() -> None:
    leases = in_state(DELAYED, until_ms=0)
    leases.advance(0)
    assert leases.pick(1) == ([SEQ], [])


def test_a_delete_that_failed_after_the_deadline() -> None:
    """The lease is as it was, so it is over; its holder may try again."""
    leases = in_state(LEASED, deadline_ms=100)
    leases.ack(NODE, [SEQ])
    leases.advance(500)
    assert states(leases) == {SEQ: ENDING}
    leases.undo([SEQ])
    assert states(leases) == {SEQ: LEASED}
    assert leases.next_due_ms() == 101
    leases.advance(500)
    assert states(leases) == {SEQ: EXPIRED}
    assert changed_seqs(leases.ack(NODE, [SEQ], [40])) == [SEQ]
    check_books(leases)


def test_a_delete_that_failed_before_the_deadline() -> None:
    leases = in_state(LEASED, deadline_ms=100)
    leases.ack(NODE, [SEQ])
    leases.undo([SEQ])
    leases.advance(100)
    assert rows(leases) == [(SEQ, LEASED, NODE, 40, 100, 1, STREAM)]
    leases.advance(101)
    assert states(leases) == {SEQ: EXPIRED}


def test_a_move_that_failed_is_tried_again_later() -> None:
    leases = in_state(MOVING)
    leases.undo([SEQ], until_ms=500)
    assert states(leases) == {SEQ: DELAYED}
    assert leases.next_due_ms() == 500
    leases.advance(499)
    assert leases.pick(1, max_deliveries=1) == ([], [])
    leases.advance(500)
    assert leases.pick(1, max_deliveries=1) == ([], [SEQ])
    assert changed_seqs(leases.move([SEQ])) == [SEQ]
    check_books(leases)


@given(
    times=st.lists(st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12))), min_size=1, max_size=12),
    steps=st.lists(st.integers(0, 4), max_size=10),
)
@examples(300)
def test_everything_ends_in_its_millisecond(times: list[tuple[int, int | None]], steps: list[int]) -> None:
    """Any leases and delays, deadlines in common, time in any steps."""
    leases = Leases()
    for seq, (deadline_ms, until_ms) in enumerate(times):
        leases.claim([seq], node=NODE, deadline_ms=deadline_ms)
        if until_ms is not None:
            leases.nack(NODE, [seq], until_ms=until_ms)
    now = 0
    for step in [0, *steps, 20]:
        now += step
        dues = [deadline + 1 if until is None else until for deadline, until in times]
        leases.advance(now)
        expected = {
            seq: (EXPIRED if due <= now else LEASED) if until is None else (FREE if due <= now else DELAYED)
            for seq, ((_, until), due) in enumerate(zip(times, dues, strict=True))
        }
        assert states(leases) == expected
        assert leases.next_due_ms() == min((due for due in dues if due > now), default=None)
        check_books(leases)


# --- streams -------------------------------------------------------------------------------------------


def test_a_closed_stream_gives_back_its_own_jobs_alone() -> None:
    """Another stream and polls of the same node go on, and so does what has left the stream in the meantime."""
    leases = Leases()
    leases.claim([3, 1, 2], node=NODE, deadline_ms=FAR, stream=7)
    leases.claim([4, 5], node=NODE, deadline_ms=FAR, stream=8)
    leases.claim([6, 7], node=NODE, deadline_ms=FAR)
    assert (leases.of_stream(7), leases.of_stream(8), leases.of_stream(9)) == (3, 2, 0)
    was = rows(leases)
    assert changed_seqs(leases.disconnect(7)) == [1, 2, 3]
    assert [states(leases)[seq] for seq in (1, 2, 3)] == [FREE] * 3
    assert rows(leases)[3:] == was[3:]
    assert (leases.in_flight, leases.streams(), leases.of_stream(7)) == (4, [8], 0)
    check_books(leases)
    assert leases.disconnect(7) == []
    assert leases.disconnect(0) == [], "polls are no stream"
    assert leases.in_flight == 4
    assert leases.pick(9) == ([1, 2, 3], [])


def test_a_closed_stream_gives_back_in_order() -> None:
    leases = Leases()
    seqs = [64, 9, 1_000_003, 8, 17, 1, 4_096]
    leases.claim(seqs, node=NODE, deadline_ms=FAR, stream=7)
    assert changed_seqs(leases.disconnect(7)) == sorted(seqs)


def test_a_closed_stream_does_not_take_back_what_it_no_longer_holds() -> None:
    leases = Leases()
    leases.claim([1, 2, 3, 4, 5], node=NODE, deadline_ms=100, stream=7)
    leases.nack(NODE, [1])
    leases.nack(NODE, [2], until_ms=FAR)
    leases.ack(NODE, [3])
    leases.remove([4])
    assert leases.of_stream(7) == 2, "one is held, the delete of one is on its way"
    assert changed_seqs(leases.disconnect(7)) == [5]
    assert states(leases) == {1: FREE, 2: DELAYED, 3: ENDING, 5: FREE}
    check_books(leases)


def test_each_end_makes_room_on_the_stream() -> None:
    leases = Leases()
    leases.claim([1, 2, 3, 4, 5], node=NODE, deadline_ms=100, stream=7)
    room = [leases.of_stream(7)]
    leases.nack(NODE, [1])
    room.append(leases.of_stream(7))
    leases.nack(NODE, [2], until_ms=FAR)
    room.append(leases.of_stream(7))
    leases.ack(NODE, [3])
    room.append(leases.of_stream(7))
    leases.remove([3, 4])
    room.append(leases.of_stream(7))
    leases.advance(101)
    room.append(leases.of_stream(7))
    assert room == [5, 4, 3, 3, 1, 0]
    assert leases.streams() == [7], "the last one has only expired"
    leases.remove([5])
    assert leases.streams() == []


def test_a_job_that_went_to_another_stream_is_that_ones() -> None:
    leases = Leases()
    leases.claim([1], node=NODE, deadline_ms=100, stream=7)
    leases.advance(101)
    claim_if_free(leases, node=NODE, stream=8)
    assert leases.disconnect(7) == []
    assert (leases.of_stream(8), leases.in_flight) == (1, 1)
    assert changed_seqs(leases.disconnect(8)) == [1]


def test_an_expired_job_comes_back_to_its_stream_when_extended() -> None:
    leases = in_state(EXPIRED)
    assert leases.of_stream(STREAM) == 0
    leases.extend(NODE, [SEQ], deadline_ms=FAR)
    assert leases.of_stream(STREAM) == 1
    assert changed_seqs(leases.disconnect(STREAM)) == [SEQ]


def test_a_closed_stream_gives_back_what_has_expired_on_it() -> None:
    """Its node may not ack it or extend it any more, which would be a lease without the connection it came by."""
    leases = in_state(EXPIRED)
    assert (leases.streams(), leases.of_stream(STREAM)) == ([STREAM], 0)
    assert changed_seqs(leases.disconnect(STREAM)) == [SEQ]
    assert leases.streams() == []
    assert leases.extend(NODE, [SEQ], deadline_ms=FAR) == []
    assert leases.pick(9) == ([SEQ], [])


def test_only_what_came_later_is_given_back() -> None:
    """Leases with a higher number; the others stay the stream's, and go when it closes."""
    leases = Leases(first_number=1)
    leases.claim([30, 10], node=NODE, deadline_ms=100, stream=7)
    leases.claim([20, 40], node=NODE, deadline_ms=FAR, stream=7)
    leases.claim([50], node=NODE, deadline_ms=FAR, stream=8)
    leases.ack(NODE, [40])
    leases.advance(101)
    assert changed_seqs(leases.disconnect(7, after=4)) == []
    assert changed_seqs(leases.disconnect(7, after=1)) == [10, 20]
    assert states(leases) == {30: EXPIRED, 10: FREE, 20: FREE, 40: ENDING, 50: LEASED}
    assert (leases.of_stream(7), leases.of_stream(8), sorted(leases.streams())) == (0, 1, [7, 8])
    check_books(leases)
    assert changed_seqs(leases.disconnect(7)) == [30]
    assert leases.streams() == [8]
    check_books(leases)


def test_an_ack_on_its_way_outlives_its_stream() -> None:
    """If the delete fails, the lease goes on without the connection it came by."""
    leases = in_state(ENDING)
    assert leases.disconnect(STREAM) == []
    assert (leases.streams(), leases.of_stream(STREAM), leases.in_flight) == ([], 0, 1)
    leases.undo([SEQ])
    assert rows(leases) == [(SEQ, LEASED, NODE, 40, FAR, 1, 0)]
    assert leases.disconnect(STREAM) == []
    assert (leases.streams(), leases.of_stream(STREAM), leases.in_flight) == ([], 0, 1)
    check_books(leases)


# --- picking -------------------------------------------------------------------------------------------


def some_free(*seqs: int, also: int = 0) -> Leases:
    """A table in which these are free; `also` more are leased."""
    leases = Leases()
    leases.claim([*seqs, *range(10_000, 10_000 + also)], node=NODE, deadline_ms=FAR)
    leases.nack(NODE, seqs)
    return leases


def test_the_lowest_go_first_however_they_became_free() -> None:
    leases = Leases()
    leases.claim([9, 2, 7, 4, 5], node=NODE, deadline_ms=FAR)
    leases.claim([8, 1], node=NODE, deadline_ms=100)
    leases.claim([3], node=NODE, deadline_ms=FAR, stream=STREAM)
    leases.nack(NODE, [9, 2])
    leases.nack(NODE, [7], until_ms=100)
    leases.disconnect(STREAM)
    leases.advance(101)
    assert leases.pick(2) == ([1, 2], [])
    assert leases.pick(3) == ([3, 7, 8], [])
    assert leases.pick(3) == ([9], [])
    assert leases.pick(3) == ([], [])


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 9])
def test_no_more_than_asked_for(limit: int) -> None:
    leases = some_free(4, 1, 3, 2, also=2)
    picked, worn = leases.pick(limit)
    assert (picked, worn) == ([1, 2, 3, 4][:limit], [])
    assert leases.free == (limit < 4)
    assert leases.pick(9) == ([1, 2, 3, 4][limit:], [])
    assert not leases.free


def test_what_is_put_back_is_picked_again_in_order() -> None:
    leases = some_free(1, 2, 3, 4)
    assert leases.pick(3) == ([1, 2, 3], [])
    leases.put_back([3, 1])
    assert leases.free
    assert leases.pick(9) == ([1, 3, 4], [])
    leases.put_back([1, 3, 4])
    leases.claim([2], node="b", deadline_ms=FAR)
    assert leases.pick(9) == ([1, 3, 4], [])


def test_what_can_not_be_read_is_passed_over_and_comes_back_in_order() -> None:
    leases = some_free(1, 2, 5, 6, 9)
    assert leases.miss([(1, 2), (4, 5)])
    assert not leases.miss([(1, 2), (4, 5)]), "known"
    assert leases.free
    assert leases.pick(9, max_deliveries=1) == ([], [6, 9]), "what can't be read can't be moved away either"
    assert not leases.free
    leases.put_back([9, 6, 5])
    leases.remove([1])
    assert leases.miss([(1, 2), (4, 6)])
    assert leases.pick(9) == ([9], [])
    assert leases.misses
    leases.reach()
    assert not leases.misses
    assert leases.pick(9) == ([2, 5, 6], [])


def test_what_becomes_free_while_it_can_not_be_read_waits_too() -> None:
    leases = some_free(1, also=1)
    leases.claim([2, 3], node=NODE, deadline_ms=100)
    leases.miss([(1, 3)])
    leases.nack(NODE, [3])
    leases.advance(101)
    assert not leases.free
    assert len(leases.extend(NODE, [2], deadline_ms=FAR)) == 1
    assert leases.pick(9) == ([], [])
    leases.reach()
    assert leases.pick(9) == ([1, 3], [])


def test_the_cursor_goes_beyond_what_can_not_be_read_and_back() -> None:
    leases = Leases()
    leases.cursor = 5
    leases.pass_over(stays=5, beyond=90)
    leases.pass_over(stays=95, beyond=99)
    assert (leases.cursor, leases.misses) == (99, True)
    leases.rewind([3])
    assert leases.cursor == 2
    leases.reach()
    assert (leases.cursor, leases.misses) == (2, False)
    leases.pass_over(stays=2, beyond=90)
    leases.reach()
    assert leases.cursor == 2


def test_what_is_put_back_twice_is_picked_once() -> None:
    leases = some_free(1, 2)
    assert leases.pick(9) == ([1, 2], [])
    leases.put_back([1, 2])
    leases.put_back([2, 1, 1])
    assert leases.pick(9) == ([1, 2], [])
    assert leases.pick(9) == ([], [])


@pytest.mark.parametrize("state", [LEASED, DELAYED, ENDING, MOVING], ids=lambda state: state.name.lower())
def test_what_is_not_claimable_is_not_put_back(state: State) -> None:
    leases = in_state(state)
    leases.put_back([SEQ, 99])
    assert not leases.free
    assert leases.pick(9) == ([], [])


@pytest.mark.parametrize("said", ["ack", "extend", "delay", "gone"])
def test_a_picked_job_whose_holder_speaks_up_is_not_put_back(said: str) -> None:
    leases = in_state(EXPIRED)
    assert leases.pick(1) == ([SEQ], [])
    if said == "ack":
        leases.ack(NODE, [SEQ])
    elif said == "extend":
        leases.extend(NODE, [SEQ], deadline_ms=FAR)
    elif said == "delay":
        leases.nack(NODE, [SEQ], until_ms=FAR)
    else:
        leases.remove([SEQ])
    leases.put_back([SEQ])
    assert not leases.free
    assert leases.pick(1) == ([], [])
    check_books(leases)


@pytest.mark.parametrize("becomes", ["leased", "delayed", "ending", "gone"])
def test_what_stopped_being_free_is_passed_over(becomes: str) -> None:
    leases = Leases()
    leases.claim([1, 2, 3], node=NODE, deadline_ms=10)
    leases.advance(11)
    if becomes == "leased":
        leases.extend(NODE, [1, 2], deadline_ms=FAR)
    elif becomes == "delayed":
        leases.nack(NODE, [1, 2], until_ms=FAR)
    elif becomes == "ending":
        leases.ack(NODE, [1, 2])
    else:
        leases.remove([1, 2])
    assert leases.free
    assert leases.pick(1) == ([3], [])
    assert not leases.free


def free_again_and_again(times: int = 3) -> Leases:
    """Free, and not for the first time: an expired lease was extended, and expired once more."""
    leases = Leases()
    leases.claim([1, 2], node=NODE, deadline_ms=10)
    leases.advance(11)
    for at in range(1, times):
        leases.extend(NODE, [1, 2], deadline_ms=at * 100)
        leases.advance(at * 100 + 1)
    return leases


def test_a_job_that_became_free_twice_is_picked_once() -> None:
    assert free_again_and_again().pick(9) == ([1, 2], [])
    assert free_again_and_again().pick(9, max_deliveries=1) == ([], [1, 2])


def test_a_job_that_became_free_twice_is_not_picked_by_two() -> None:
    leases = free_again_and_again()
    assert [leases.pick(1) for _ in range(3)] == [([1], []), ([2], []), ([], [])]
    leases.put_back([2])
    assert [leases.pick(1) for _ in range(2)] == [([2], []), ([], [])]


def test_jobs_delivered_too_often_are_set_apart() -> None:
    leases = Leases()
    for deliveries in (1, 2, 3):
        leases.claim(range(deliveries, 7), node=NODE, deadline_ms=FAR)
        leases.nack(NODE, range(1, 7))
        picked, worn = leases.pick(9)
        if deliveries < 3:
            assert (picked, worn) == ([1, 2, 3, 4, 5, 6], [])
            leases.put_back([1, 2, 3, 4, 5, 6])
        leases.put_back(picked)
    # delivered once: 1; twice: 2; three times: the rest
    assert leases.pick(9, max_deliveries=4) == ([1, 2, 3, 4, 5, 6], [])
    leases.put_back(range(1, 7))
    assert leases.pick(9, max_deliveries=2) == ([1], [2, 3, 4, 5, 6])
    leases.put_back(range(1, 7))
    assert leases.pick(1, max_deliveries=1) == ([], [1, 2, 3, 4, 5, 6])
    leases.put_back(range(1, 7))
    assert leases.pick(9, max_deliveries=0) == ([1, 2, 3, 4, 5, 6], [])


def test_jobs_delivered_too_often_do_not_fill_the_limit() -> None:
    leases = some_free(1, 2, 3)
    leases.pick(3)
    leases.claim([1, 2], node=NODE, deadline_ms=FAR)
    leases.nack(NODE, [1, 2])
    leases.put_back([3])
    assert leases.pick(1, max_deliveries=2) == ([3], [1, 2])


def test_a_move_takes_only_what_is_free() -> None:
    leases = some_free(1, 2, also=1)
    leases.claim([3], node=NODE, deadline_ms=FAR)
    assert changed_seqs(leases.move([2, 10_000, 3, 1, 2, 99])) == [2, 1]
    assert leases.pick(9) == ([], [])
    assert (leases.hidden, leases.in_flight) == (2, 2)
    check_books(leases)


# --- jobs beyond the cursor ----------------------------------------------------------------------------


def test_which_jobs_a_reading_would_meet() -> None:
    leases = Leases()
    leases.claim([50, 10, 40, 20, 30], node=NODE, deadline_ms=FAR)
    leases.nack(NODE, [20])
    leases.nack(NODE, [30], until_ms=FAR)
    leases.ack(NODE, [40])
    assert leases.held_beyond(0) == [10, 20, 30, 40, 50]
    assert leases.held_beyond(10) == [20, 30, 40, 50]
    assert leases.held_beyond(49) == [50]
    assert leases.held_beyond(50) == []
    leases.remove([20, 50])
    assert leases.held_beyond(10) == [30, 40]
    assert leases.held_beyond(40) == []
    assert Leases().held_beyond(0) == []


def test_a_reading_meets_what_a_replay_brought() -> None:
    leases = Leases()
    leases.replay(LeaseEvent("claimed", node=NODE, seqs=[10, 30], leases=[1, 2], deadline=FAR))
    leases.claim([20], node=NODE, deadline_ms=FAR)
    assert leases.held_beyond(0) == [10, 20, 30]
    assert leases.held_beyond(29) == [30]
    leases.replay(LeaseEvent("checkpoint", jobs=[JobState(40, FREE, NODE, 3, 0, 1)]))
    assert leases.held_beyond(30) == [40]


def test_a_job_that_is_not_in_the_table_is_claimable_if_it_is_fresh() -> None:
    """If it was in the table a moment ago and is not now, it is done."""
    leases = Leases()
    assert leases.claimable(SEQ, fresh=True)
    assert not leases.claimable(SEQ, fresh=False)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_what_is_in_the_table_is_claimable_by_its_state(state: State) -> None:
    leases = in_state(state)
    assert leases.claimable(SEQ, fresh=True) == leases.claimable(SEQ, fresh=False) == (state in CLAIMABLE)


def test_the_cursor_goes_back_before_what_was_not_handed_out() -> None:
    leases = Leases()
    leases.cursor = 50
    leases.rewind([])
    assert leases.cursor == 50
    leases.rewind([60, 51])
    assert leases.cursor == 50, "never forward"
    leases.rewind([48, 42, 45])
    assert leases.cursor == 41


# --- memory --------------------------------------------------------------------------------------------


def extend_once(leases: Leases, at: int) -> None:
    assert leases.extend(NODE, [SEQ], deadline_ms=FAR + at)


def extend_expired(leases: Leases, at: int) -> None:
    leases.advance(10 * at + 1)
    assert leases.extend(NODE, [SEQ], deadline_ms=10 * at + 10)


def nack_and_claim(leases: Leases, at: int) -> None:
    assert leases.nack(NODE, [SEQ])
    assert claim_if_free(leases, node=NODE, deadline_ms=FAR + at, stream=STREAM)


def delay_and_claim(leases: Leases, at: int) -> None:
    assert leases.nack(NODE, [SEQ], until_ms=at)
    leases.advance(at)
    assert claim_if_free(leases, node=NODE, deadline_ms=FAR + at, stream=STREAM)


def expire_and_claim(leases: Leases, at: int) -> None:
    leases.advance(FAR + 2 * at + 1)
    assert claim_if_free(leases, node=NODE, deadline_ms=FAR + 2 * at + 2, stream=STREAM)


def disconnect_and_claim(leases: Leases, at: int) -> None:
    assert leases.disconnect(STREAM)
    assert claim_if_free(leases, node=NODE, deadline_ms=FAR + at, stream=STREAM)


def undo_a_delete(leases: Leases, at: int) -> None:
    assert leases.ack(NODE, [SEQ])
    leases.undo([SEQ])


def undo_a_move(leases: Leases, at: int) -> None:
    leases.nack(NODE, [SEQ])
    picked, worn = leases.pick(1, max_deliveries=1)
    assert leases.move(picked + worn)
    leases.undo([SEQ], until_ms=at)
    leases.advance(at)


def remove_and_claim(leases: Leases, at: int) -> None:
    leases.remove([SEQ])
    assert leases.claim([SEQ], node=NODE, deadline_ms=FAR + at, stream=at + 1)


def remove_while_free(leases: Leases, at: int) -> None:
    seq = 100 + at
    leases.claim([seq], node=NODE, deadline_ms=FAR)
    leases.nack(NODE, [seq])
    leases.remove([seq])


def ack_expired(leases: Leases, at: int) -> None:
    seq = 100 + at
    leases.claim([seq], node="b", deadline_ms=at)
    leases.advance(at + 1)
    assert leases.ack("b", [seq])
    leases.remove([seq])


def pick_and_put_back(leases: Leases, at: int) -> None:
    leases.nack(NODE, [SEQ])
    picked, _ = leases.pick(1)
    leases.put_back(picked)


def replay_an_extension(leases: Leases, at: int) -> None:
    leases.replay(LeaseEvent("extended", seqs=[SEQ], leases=[40], deadline=FAR + at))


def replay_a_checkpoint(leases: Leases, at: int) -> None:
    leases.replay(LeaseEvent("checkpoint", jobs=[JobState(SEQ, FREE, NODE, at, 0, at)]))


CYCLES = [
    extend_once,
    extend_expired,
    nack_and_claim,
    delay_and_claim,
    expire_and_claim,
    disconnect_and_claim,
    undo_a_delete,
    undo_a_move,
    remove_and_claim,
    remove_while_free,
    ack_expired,
    pick_and_put_back,
    replay_an_extension,
    replay_a_checkpoint,
]


@pytest.mark.full
@pytest.mark.parametrize("cycle", CYCLES, ids=lambda cycle: cycle.__name__)
def test_memory_follows_jobs_not_what_happened_to_them(cycle: Callable[[Leases, int], None]) -> None:
    """What is kept for each time, if only a number in a list, is fifty kilobytes here. Peaks are compared, because
    what is forgotten now and then goes up and down."""
    leases = in_state(LEASED)
    peaks = []
    tracemalloc.start()
    try:
        for at in range(10_000):
            if at in (1_500, 8_500):
                tracemalloc.reset_peak()
            cycle(leases, at)
            if at in (2_999, 9_999):
                peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert len(leases) == 1
    check_books(leases)
    assert peaks[1] - peaks[0] < 20_000, f"{peaks[1] - peaks[0]} bytes more after 7,000 times"


def test_many_extends_lose_nobodys_time() -> None:
    """Old deadlines are forgotten now and then; those that hold are not, whatever the job's state is then."""
    leases = Leases()
    leases.claim([1, 2, 3, 4, 5], node=NODE, deadline_ms=1_000)
    leases.nack(NODE, [2], until_ms=1_000)
    leases.ack(NODE, [3])
    leases.nack(NODE, [4])
    assert leases.move([4])
    for at in range(20_000):
        leases.extend(NODE, [5], deadline_ms=10_000 + at)
    assert leases.next_due_ms() == 1_000
    leases.undo([3])
    leases.undo([4], until_ms=1_001)
    leases.advance(1_000)
    assert states(leases) == {1: LEASED, 2: FREE, 3: LEASED, 4: DELAYED, 5: LEASED}
    leases.advance(1_001)
    assert states(leases) == {1: EXPIRED, 2: FREE, 3: EXPIRED, 4: FREE, 5: LEASED}
    assert leases.next_due_ms() == 30_000
    leases.advance(30_000)
    assert states(leases)[5] == EXPIRED


def test_many_ends_lose_no_free_job() -> None:
    """The places of jobs that ended while free are forgotten now and then; nobody else's is."""
    leases = Leases()
    leases.claim([9, 7, 5, 3, 1], node=NODE, deadline_ms=10)
    leases.claim([8, 2, 6], node=NODE, deadline_ms=FAR)
    leases.nack(NODE, [8, 2])
    leases.advance(11)
    assert leases.pick(1) == ([1], [])
    leases.extend(NODE, [7], deadline_ms=100)
    for at in range(5_000):
        remove_while_free(leases, at)
    assert leases.free
    leases.put_back([1])
    assert leases.pick(4) == ([1, 2, 3, 5], [])
    leases.advance(101)
    assert leases.pick(9) == ([7, 8, 9], [])
    assert states(leases)[6] == LEASED
    check_books(leases, picked=[1, 2, 3, 5, 7, 8, 9])


# --- anything in any order -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_books_are_right_whatever_is_called(seed: int) -> None:
    """Calls without any sense in them: foreign nodes, jobs that are gone, things undone that never began."""
    chance = random.Random(seed)
    leases = Leases()
    now = 0
    missed: set[int] = set()
    for _ in range(1_500):
        now += chance.choice([0, 0, 1, 5])
        seqs = [chance.randrange(12) for _ in range(chance.randrange(1, 5))]
        node = chance.choice("abc")
        when = now + chance.choice([0, 1, 3, 10])
        match chance.randrange(14):
            case 0 | 1:
                fit = [seq for seq in dict.fromkeys(seqs) if leases.claimable(seq, fresh=True)]
                leases.claim(fit, node=node, deadline_ms=when, stream=chance.choice([0, 7, 8]))
            case 2:
                picked, worn = leases.pick(chance.randrange(4), max_deliveries=chance.choice([0, 0, 3]))
                check_books(leases, picked=[*picked, *worn], missed=missed)
                claimed = leases.claim(picked[:2], node=node, deadline_ms=when)
                assert changed_seqs(claimed) == picked[:2]
                leases.put_back([*worn, *picked[2:]])
            case 3:
                leases.ack(node, seqs)
            case 4:
                leases.nack(node, seqs)
            case 5:
                leases.nack(node, seqs, until_ms=when)
            case 6:
                leases.extend(node, seqs, deadline_ms=when)
            case 7:
                leases.move(seqs)
            case 8:
                leases.undo(seqs, until_ms=when)
            case 9:
                leases.remove(seqs[:1])
            case 10:
                leases.disconnect(chance.choice([7, 8, 9]))
            case 11:
                leases.advance(now)
            case 12:
                stretches = [(low, low + 3) for low in chance.choice([[0], [0, 6], [7], []])]
                leases.miss(stretches)
                missed = {seq for first, last in stretches for seq in range(first, last + 1)}
            case 13:
                leases.reach()
                missed = set()
        check_books(leases, missed=missed)
    assert now > 100
