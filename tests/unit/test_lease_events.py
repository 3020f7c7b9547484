"""The leases log: what an event is in bytes, and that any history replayed gives the table that wrote it.

Events are always replayed from their bytes. Two tables are the same when nobody could tell them apart: a job that was
given back has neither holder nor deadline any more, whatever its fields still say.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import get_args

import figures
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasebook import Written, check_books, leases_of, replayed, row, rows, seen, states
from model import examples, seeds

from topics.errors import CorruptData
from topics.queue.lease_table import Leases, State
from topics.storage.config import owner_of_id
from topics.storage.leases import (
    EventName,
    JobState,
    LeaseEvent,
    decode_event,
    encode_event,
    is_log_name,
    log_id,
    log_name,
)

LEASED, EXPIRED, FREE = State.LEASED, State.EXPIRED, State.FREE
DELAYED, ENDING, MOVING = State.DELAYED, State.ENDING, State.MOVING
U63 = st.integers(0, 2**63 - 1)
NODES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


# --- names and ids -------------------------------------------------------------------------------------


def test_the_name_of_a_log() -> None:
    assert log_name("jobs") == "jobs#leases"
    assert is_log_name("jobs#leases")
    assert not is_log_name("jobs")
    assert not is_log_name("leases")
    assert not is_log_name("jobs#leases2")


@given(queue_id=st.integers(0, 2**64 - 1), shards=st.integers(1, 64))
@examples(200)
def test_a_log_has_its_own_id_and_its_queues_shard(queue_id: int, shards: int) -> None:
    made = log_id(queue_id)
    assert made != queue_id
    assert 0 <= made < 2**64
    assert log_id(made) == queue_id
    assert owner_of_id(made, shards) == owner_of_id(queue_id, shards)


# --- bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (
            LeaseEvent("claimed", node="é", seqs=[5, 9], leases=[70, 71], deadline=1_000),
            '{"event":"claimed","node":"é","seqs":[5,9],"leases":[70,71],"deadline":1000}',
        ),
        (
            LeaseEvent("claimed", node="a", seqs=[5], leases=[70], deadline=1_000, deliveries=[3], stream=8),
            '{"event":"claimed","node":"a","seqs":[5],"leases":[70],"deadline":1000,"deliveries":[3],"stream":8}',
        ),
        (
            LeaseEvent("released", node="a", seqs=[5], leases=[70], reason="nack"),
            '{"event":"released","node":"a","seqs":[5],"leases":[70],"reason":"nack"}',
        ),
        (
            LeaseEvent("extended", node="a", seqs=[5], leases=[70], deadline=9),
            '{"event":"extended","node":"a","seqs":[5],"leases":[70],"deadline":9}',
        ),
        (LeaseEvent("acked", seqs=[5], leases=[70]), '{"event":"acked","seqs":[5],"leases":[70]}'),
        (LeaseEvent("dead_lettered", seqs=[5], leases=[70]), '{"event":"dead_lettered","seqs":[5],"leases":[70]}'),
        (
            LeaseEvent("checkpoint", dead_lettered=4, jobs=[JobState(5, 1, "a", 70, 1_000, 2, 8)]),
            '{"event":"checkpoint","dead_lettered":4,"jobs":[[5,1,"a",70,1000,2,8]]}',
        ),
        (LeaseEvent("checkpoint"), '{"event":"checkpoint"}'),
    ],
)
def test_the_bytes_of_each_event(event: LeaseEvent, data: str) -> None:
    """They are on disks: a change of these is a change of the format."""
    assert encode_event(event).decode() == data
    assert decode_event(data.encode()) == event


def test_every_kind_of_event_is_known_to_the_replay() -> None:
    assert set(get_args(EventName)) == {"claimed", "released", "extended", "acked", "dead_lettered", "checkpoint"}


def test_the_states_of_a_checkpoint_are_numbers_that_stay() -> None:
    assert (State.LEASED, State.EXPIRED, State.FREE, State.DELAYED) == (1, 2, 3, 4)


@given(
    event=st.builds(
        LeaseEvent,
        event=st.sampled_from(get_args(EventName)),
        node=NODES,
        seqs=st.lists(U63, max_size=4),
        leases=st.lists(U63, max_size=4),
        deadline=U63,
        deliveries=st.lists(U63, max_size=4),
        stream=U63,
        reason=st.sampled_from(["", "nack", "expired", "disconnect"]),
        dead_lettered=U63,
        jobs=st.lists(st.builds(JobState, U63, st.integers(1, 4), NODES, U63, U63, U63, U63), max_size=3),
    )
)
@examples(300)
def test_an_event_comes_back_as_it_was(event: LeaseEvent) -> None:
    data = encode_event(event)
    assert decode_event(data) == event
    assert msgspec.json.decode(data)["event"] == event.event, "it is JSON that anybody can read"


def test_a_later_versions_fields_are_passed_over_and_an_earlier_ones_are_filled() -> None:
    assert decode_event(b'{"event":"acked","seqs":[1],"leases":[2],"more":{"x":1}}') == LeaseEvent(
        "acked", seqs=[1], leases=[2]
    )
    event = decode_event(b'{"event":"checkpoint","jobs":[[5,1,"a",70,1000,2],[6,3,"b",71,0,1,8,"more"]]}')
    assert event.jobs == [JobState(5, 1, "a", 70, 1_000, 2, 0), JobState(6, 3, "b", 71, 0, 1, 8)]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"event":"stolen"}', b'{"event":"acked","seqs":"1"}', b'{"event":']
)
def test_what_is_no_event_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptData, match="leases log"):
        decode_event(data)


# --- each event alone ----------------------------------------------------------------------------------

Step = Callable[[Written], object]
HISTORIES: dict[str, list[Step]] = {
    "claimed": [],
    "nacked": [lambda written: written.nack("a", [1])],
    "delayed": [lambda written: written.nack("a", [1], until_ms=300)],
    "extended": [lambda written: written.extend("a", [1], deadline_ms=300)],
    "extended twice": [
        lambda written: written.extend("a", [1], deadline_ms=300),
        lambda written: written.extend("a", [1], deadline_ms=250),
    ],
    "disconnected": [lambda written: written.disconnect(7)],
    "disconnected after expiry": [
        lambda written: written.advance(101),
        lambda written: written.disconnect(7),
    ],
    "expired": [lambda written: written.advance(101)],
    "nacked after expiry": [
        lambda written: written.advance(101),
        lambda written: written.nack("a", [1]),
    ],
    "delayed after expiry": [
        lambda written: written.advance(101),
        lambda written: written.nack("a", [1], until_ms=300),
    ],
    "extended after expiry": [
        lambda written: written.advance(101),
        lambda written: written.extend("a", [1], deadline_ms=300),
    ],
    "claimed by another after expiry": [
        lambda written: written.advance(101),
        lambda written: written.claim([1], node="b", deadline_ms=400, stream=8),
    ],
    "claimed again by a poll": [
        lambda written: written.disconnect(7),
        lambda written: written.claim([1], node="a", deadline_ms=400),
    ],
    "claimed after a delay": [
        lambda written: written.nack("a", [1], until_ms=150),
        lambda written: written.advance(150),
        lambda written: written.claim([1], node="b", deadline_ms=400),
    ],
    "acked": [lambda written: written.leases.ack("a", [1]), lambda written: written.acked([1])],
    "acked after expiry": [
        lambda written: written.advance(101),
        lambda written: written.leases.ack("a", [1]),
        lambda written: written.acked([1]),
    ],
    "an ack that failed": [lambda written: written.leases.ack("a", [1]), lambda written: written.leases.undo([1])],
    "dead-lettered": [
        lambda written: written.nack("a", [1]),
        lambda written: written.leases.move([1]),
        lambda written: written.dead_lettered([1]),
    ],
}


@pytest.mark.parametrize("checkpoint_at", range(5))
@pytest.mark.parametrize("name", HISTORIES)
def test_each_history_replayed(name: str, checkpoint_at: int) -> None:
    """Three jobs of one claim, to the first of which something happens; with a checkpoint before any of the steps."""
    written = Written(first_number=20)
    steps: list[Step] = [lambda written: written.claim([1, 2, 3], node="a", deadline_ms=100, stream=7)]
    steps += HISTORIES[name]
    steps.insert(checkpoint_at, Written.checkpoint)
    checkpoint = 0
    for step in steps:
        if step is Written.checkpoint:
            checkpoint = len(written.log)
        step(written)
    tables = [replayed(written.log), replayed(written.log[checkpoint:])]
    for now in (written.now_ms, 250, 251, 299, 300, 301, 400, 401):
        written.leases.advance(now)
        for table in tables:
            table.advance(now)
            assert seen(table) == seen(written.leases)
            check_books(table)


def test_a_job_is_its_streams_again() -> None:
    written = Written()
    written.claim([1, 2], node="a", deadline_ms=100, stream=7)
    written.claim([3], node="a", deadline_ms=100)
    written.checkpoint()
    for log in (written.log, written.log[-1:]):
        table = replayed(log)
        assert (table.streams(), table.of_stream(7), table.in_flight) == ([7], 2, 3)
        assert [lease.seq for lease in table.disconnect(7)] == [1, 2]
        check_books(table)


def test_fences_hold_across_a_replay() -> None:
    """The numbers are those of the log, and what is claimed next has another."""
    written = Written(first_number=20)
    written.claim([1, 2], node="a", deadline_ms=100)
    written.nack("a", [1])
    written.claim([1], node="a", deadline_ms=100)
    table = replayed(written.log)
    assert table.ack("a", [1], [20]) == []
    assert [lease.number for lease in table.claim([3, 4], node="a", deadline_ms=100)] == [23, 24]
    assert [row(lease) for lease in table.ack("a", [1, 2], [22, 21])] == [
        (1, ENDING, "a", 22, 100, 2, 0),
        (2, ENDING, "a", 21, 100, 1, 0),
    ]
    assert [lease.number for lease in replayed(written.log, first_number=90).claim([9], node="b", deadline_ms=1)] == [
        90
    ]


def test_numbers_go_on_after_a_checkpoint() -> None:
    written = Written(first_number=20)
    written.claim([1, 2], node="a", deadline_ms=100)
    written.checkpoint()
    table = replayed(written.log[-1:])
    assert [lease.number for lease in table.claim([3], node="a", deadline_ms=100)] == [22]


def test_a_claim_without_deliveries_is_the_first_of_each() -> None:
    table = Leases()
    table.replay(LeaseEvent("claimed", node="a", seqs=[1, 2], leases=[5, 6], deadline=100))
    assert [lease[5] for lease in rows(table)] == [1, 1]
    table.replay(LeaseEvent("claimed", node="b", seqs=[1, 2], leases=[7, 8], deadline=200, deliveries=[4, 2]))
    assert rows(table) == [(1, LEASED, "b", 7, 200, 4, 0), (2, LEASED, "b", 8, 200, 2, 0)]
    check_books(table)


def test_a_checkpoint_is_all_there_is() -> None:
    table = Leases()
    table.replay(LeaseEvent("claimed", node="a", seqs=[1, 2, 3], leases=[5, 6, 7], deadline=100, stream=7))
    jobs = [
        JobState(2, LEASED, "b", 8, 200, 2, 9),
        JobState(4, EXPIRED, "c", 9, 50, 1),
        JobState(5, FREE, "c", 10, 0, 3),
        JobState(6, DELAYED, "c", 11, 300, 4),
    ]
    table.replay(LeaseEvent("checkpoint", jobs=jobs))
    assert rows(table) == [
        (2, LEASED, "b", 8, 200, 2, 9),
        (4, EXPIRED, "c", 9, 50, 1, 0),
        (5, FREE, "c", 10, 0, 3, 0),
        (6, DELAYED, "c", 11, 300, 4, 0),
    ]
    assert (table.in_flight, table.hidden, table.streams()) == (1, 1, [9])
    check_books(table)
    assert table.next_due_ms() == 201
    table.advance(300)
    assert states(table) == {2: EXPIRED, 4: EXPIRED, 5: FREE, 6: FREE}
    assert table.pick(9) == ([2, 4, 5, 6], [])


def test_an_empty_checkpoint_empties_the_table() -> None:
    table = Leases()
    table.replay(LeaseEvent("claimed", node="a", seqs=[1], leases=[5], deadline=100, stream=7))
    table.replay(LeaseEvent("checkpoint"))
    assert (len(table), table.in_flight, table.streams(), table.next_due_ms()) == (0, 0, [], None)
    check_books(table)


def test_what_ends_or_moves_is_in_a_checkpoint_as_it_was() -> None:
    """Neither has happened yet; after a crash the delete may be lost, and the move is tried again."""
    leases = Leases()
    leases.claim([1, 2], node="a", deadline_ms=100, stream=7)
    leases.ack("a", [1])
    leases.nack("a", [2])
    leases.move([2])
    assert states(leases) == {1: ENDING, 2: MOVING}
    assert [(job.seq, job.state) for job in leases.checkpoint()] == [(1, LEASED), (2, FREE)]
    assert leases.checkpoint()[0] == JobState(1, LEASED, "a", 1, 100, 1, 7)


# --- events that do not fit ----------------------------------------------------------------------------

SAID = [
    LeaseEvent("released", node="a", seqs=[1], leases=[5]),
    LeaseEvent("released", node="a", seqs=[1], leases=[5], deadline=500),
    LeaseEvent("extended", node="a", seqs=[1], leases=[5], deadline=500),
    LeaseEvent("acked", seqs=[1], leases=[5]),
    LeaseEvent("dead_lettered", seqs=[1], leases=[5]),
]
whatever_is_said = pytest.mark.parametrize("event", SAID, ids=lambda event: f"{event.event}-{event.deadline}")


@whatever_is_said
def test_an_event_of_an_earlier_lease_changes_nothing(event: LeaseEvent) -> None:
    table = Leases()
    table.replay(LeaseEvent("claimed", node="a", seqs=[1], leases=[6], deadline=100, deliveries=[2], stream=7))
    was = rows(table)
    table.replay(event)
    assert rows(table) == was
    check_books(table)


@whatever_is_said
def test_an_event_of_an_unknown_job_changes_nothing(event: LeaseEvent) -> None:
    """Its claim was before the first event that is still there."""
    table = Leases()
    table.replay(event)
    assert len(table) == 0
    check_books(table)


@pytest.mark.parametrize("state", [FREE, DELAYED], ids=lambda state: state.name.lower())
@pytest.mark.parametrize("event", SAID[:3], ids=lambda event: f"{event.event}-{event.deadline}")
def test_what_was_given_back_is_not_extended_or_given_back_again(event: LeaseEvent, state: State) -> None:
    table = Leases()
    table.replay(LeaseEvent("checkpoint", jobs=[JobState(1, state, "a", 5, 200, 1)]))
    was = rows(table)
    table.replay(event)
    assert rows(table) == was
    check_books(table)


@whatever_is_said
def test_an_event_speaks_of_the_jobs_it_names_alone(event: LeaseEvent) -> None:
    table = Leases()
    table.replay(LeaseEvent("claimed", node="a", seqs=[1, 2, 3], leases=[5, 6, 7], deadline=100))
    was = rows(table)
    table.replay(event)
    assert rows(table)[-2:] == was[-2:]
    assert rows(table)[0] != was[0]
    check_books(table)


@pytest.mark.parametrize("event", [SAID[0], SAID[1], SAID[2]], ids=lambda event: f"{event.event}-{event.deadline}")
def test_time_that_passes_during_a_replay_changes_nothing(event: LeaseEvent) -> None:
    """A reader may look at the clock at any time, also between the expiry of a lease and what its holder said later."""
    tables = []
    for early in (False, True):
        table = Leases()
        table.replay(LeaseEvent("claimed", node="a", seqs=[1], leases=[5], deadline=100, stream=7))
        if early:
            table.advance(101)
        table.replay(event)
        table.advance(101)
        check_books(table)
        tables.append(table)
    assert seen(tables[0]) == seen(tables[1])


# --- any history ---------------------------------------------------------------------------------------


def play(chance: random.Random, written: Written, *, steps: int, moves: bool) -> list[int]:
    """Clients that do anything, on few jobs. What is returned: each checkpoint's place in the log."""
    leases = written.leases
    checkpoints = []
    for _ in range(steps):
        written.advance(written.now_ms + chance.choice([0, 0, 1, 3, 20]))
        node = chance.choice("ab")
        stream = len(written.closed) + chance.choice([1, 2])  # two are open, and no number is used again
        seqs = [chance.randrange(10) for _ in range(chance.randrange(1, 5))]
        until = written.now_ms + chance.choice([0, 1, 4, 15])
        match chance.randrange(10):
            case 0 | 1:
                fit = [seq for seq in dict.fromkeys(seqs) if leases.claimable(seq, fresh=True)]
                written.claim(fit, node=node, deadline_ms=until, stream=chance.choice([0, stream]))
            case 2:
                picked, _ = leases.pick(3)
                written.claim(picked[1:], node=node, deadline_ms=until)
                leases.put_back(picked[:1])
            case 3:
                written.nack(node, seqs, until_ms=chance.choice([None, until]))
            case 4:
                written.extend(node, seqs, deadline_ms=until)
            case 5:
                written.disconnect(len(written.closed) + 1)
            case 6:
                leases.ack(node, seqs)
            case 7:
                written.acked([seq for seq in leases.seqs() if chance.random() < 0.7])
                leases.undo([seq for seq, state in states(leases).items() if state == ENDING])
            case 8 if moves:
                leases.move(seqs)
                written.dead_lettered(seqs[:2])
            case 9:
                checkpoints.append(len(written.log))
                written.checkpoint()
        check_books(leases)
    leases.undo([seq for seq, state in states(leases).items() if state == ENDING])
    written.advance(written.now_ms)
    return checkpoints


def told(leases: Leases, written: Written, *, moves: bool) -> list[tuple[object, ...]]:
    """With moves a job may be on its way when a table is lost: then it is free, with nobody's name on it."""
    if not moves:
        return seen(leases, closed=written.closed)
    told = seen(leases, closed=written.closed)
    for at, lease in enumerate(leases_of(leases)):
        if lease.state in (EXPIRED, FREE, MOVING):
            told[at] = (lease.seq, "free or moving", lease.deliveries)
    return told


@pytest.mark.parametrize("moves", [False, True], ids=["", "dead letters"])
@pytest.mark.parametrize("seed", seeds(25, 400))
def test_any_history_replayed(seed: int, moves: bool) -> None:
    """All of the log, from each checkpoint on, and as if no checkpoint had been."""
    figures.HISTORIES.add()
    written = Written()
    checkpoints = play(random.Random(seed), written, steps=150, moves=moves)
    assert len(written.log) > 40
    assert checkpoints
    logs = [written.log, *(written.log[at:] for at in checkpoints)]
    logs.append([data for data in written.log if decode_event(data).event != "checkpoint"])
    for now in (written.now_ms, written.now_ms + 4, written.now_ms + 100):
        written.leases.advance(now)
        for log in logs:
            table = replayed(log)
            table.advance(now)
            check_books(table)
            assert told(table, written, moves=moves) == told(written.leases, written, moves=moves)


@pytest.mark.parametrize("seed", seeds(10, 100))
def test_a_log_cut_anywhere_is_the_table_of_that_moment(seed: int) -> None:
    """Events that never reached the log: what is left is the table as it was before them."""
    figures.HISTORIES.add()
    chance = random.Random(1_000 + seed)
    written = Written()
    tables = []
    for _ in range(60):
        play(chance, written, steps=1, moves=False)
        expected = seen(written.leases, closed=written.closed)
        tables.append((len(written.log), written.now_ms, set(written.closed), expected))
    for length, now, closed, expected in tables:
        table = replayed(written.log[:length])
        table.advance(now)
        assert seen(table, closed=closed) == expected
