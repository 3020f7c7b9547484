"""The lease table against a naive model: producers, workers, streams, a clock moved by hand, failures and crashes.

The model knows two things of a job: what the log of events says of it, and what has begun and is not in the log yet.
A crash forgets the second, and perhaps the end of the first. Whether a lease is over it works out anew each time it is
asked, so nothing in it can be forgotten.

Whatever happens: each job produced is acked once, deleted, or with the dead letters; or it is still there, and then it
is fresh, free, leased, delayed or on its way. At the end time passes, one pass takes everything and acks it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from figures import HISTORIES
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from leasebook import HELD, HIDDEN, Written, check_books, replayed
from model import EXHAUSTIVE, examples

from topics.queue.fair_share import evenly, in_order, remainder
from topics.queue.lease_table import Lease, Leases, State

NODES = st.sampled_from(["a", "b"])
WAITS = st.sampled_from([0, 1, 2, 5, 10, 40])
Doing = Literal["ending", "moving"]


@dataclass(frozen=True)
class Kept:
    """What the log says of a job that was delivered."""

    node: str
    number: int
    deliveries: int
    stream: int
    deadline_ms: int | None  # while it is leased
    until_ms: int = 0  # since it was given back


@dataclass(frozen=True)
class Retry:
    """A move to the dead letters that failed."""

    until_ms: int


@dataclass(frozen=True)
class Asking:
    """Somebody who wants jobs in a pass."""

    node: str
    stream: int
    wants: int


class LeaseMachine(RuleBasedStateMachine):
    durable = False

    def __init__(self) -> None:
        super().__init__()
        HISTORIES.add()
        self.written = Written()
        self.now = 1_000
        self.head = 0
        self.live: set[int] = set()  # the jobs log
        self.acked: Counter[int] = Counter()
        self.deleted: Counter[int] = Counter()
        self.lettered: Counter[int] = Counter()
        self.kept: dict[int, Kept] = {}
        self.doing: dict[int, Doing | Retry] = {}
        self.history: list[dict[int, Kept]] = [{}]  # `kept` after each event of the log
        self.tickets: list[tuple[int, str, int]] = []  # what workers believe to hold, for long perhaps not
        self.numbers: set[int] = set()
        self.streams: dict[int, str] = {}
        self.opened = 0
        self.turn = 0

    @property
    def table(self) -> Leases:
        return self.written.leases

    # --- the model ---

    def state(self, seq: int) -> State:
        doing = self.doing.get(seq)
        if isinstance(doing, Retry):
            return State.FREE if doing.until_ms <= self.now else State.DELAYED
        if doing is not None:
            return State.ENDING if doing == "ending" else State.MOVING
        kept = self.kept[seq]
        if kept.deadline_ms is None:
            return State.FREE if kept.until_ms <= self.now else State.DELAYED
        return State.EXPIRED if self.now > kept.deadline_ms else State.LEASED

    def claimable(self, seq: int) -> bool:
        return self.state(seq) in (State.EXPIRED, State.FREE)

    def on_stream(self, stream: int) -> int:
        return sum(self.kept[seq].stream == stream and self.state(seq) in HELD for seq in self.kept)

    def logged(self) -> None:
        """An event may have been written: `kept` is what it left."""
        if len(self.written.log) > len(self.history) - 1:
            self.history.append(dict(self.kept))
        assert len(self.written.log) == len(self.history) - 1

    def free_order(self) -> list[int]:
        return sorted(seq for seq in self.kept if self.claimable(seq))

    # --- producers and time ---

    @initialize(jobs=st.integers(2, 6))
    def begin(self, jobs: int) -> None:
        self.produce(jobs)

    @rule(jobs=st.integers(1, 4))
    def produce(self, jobs: int) -> None:
        self.live.update(range(self.head + 1, self.head + jobs + 1))
        self.head += jobs

    @rule(wait=WAITS)
    def tick(self, wait: int) -> None:
        self.now += wait
        self.written.advance(self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """By somebody who is no worker."""
        self.lose(data.draw(st.sampled_from(sorted(self.live))))

    def lose(self, seq: int) -> None:
        self.live.discard(seq)
        self.deleted[seq] += 1
        self.kept.pop(seq, None)
        self.doing.pop(seq, None)
        self.table.remove([seq])

    # --- streams ---

    @precondition(lambda self: len(self.streams) < 2)
    @rule(node=NODES)
    def connect(self, node: str) -> None:
        self.opened += 1
        self.streams[self.opened] = node

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(sorted(self.streams)))
        del self.streams[stream]
        self.release(stream)

    def release(self, stream: int) -> None:
        came = [seq for seq in sorted(self.kept) if self.kept[seq].stream == stream]
        own = [seq for seq in came if self.state(seq) in (State.LEASED, State.EXPIRED)]
        assert [lease.seq for lease in self.written.disconnect(stream)] == own
        for seq in own:
            self.kept[seq] = replace(self.kept[seq], deadline_ms=None, until_ms=0)
        self.logged()

    # --- a pass ---

    @rule(
        polls=st.lists(st.tuples(NODES, st.integers(1, 3)), max_size=2),
        push=st.booleans(),
        lease_ms=WAITS,
        max_deliveries=st.sampled_from([0, 0, 1, 2]),
        meanwhile=st.sampled_from(["", "", "", "said", "time", "deleted"]),
        leaves=st.sampled_from([False, False, True]),
        data=st.data(),
    )
    def serve(
        self,
        polls: list[tuple[str, int]],
        push: bool,
        lease_ms: int,
        max_deliveries: int,
        meanwhile: str,
        leaves: bool,
        data: st.DataObject,
    ) -> None:
        cohort = [Asking(node, 0, wants) for node, wants in polls]
        push = push or not polls
        if push:
            for stream, node in self.streams.items():
                room = 3 - self.on_stream(stream)
                assert room == 3 - self.table.of_stream(stream)
                if room > 0:  # an expired lease that was extended may have made one too many
                    cohort.append(Asking(node, stream, room))
        picked, fresh = self.pick(sum(asking.wants for asking in cohort), max_deliveries)
        # The shard is being asked, and workers go on.
        if meanwhile == "said" and self.tickets:
            self.say(data)
        elif meanwhile == "time":
            self.tick(data.draw(WAITS))
        elif meanwhile == "deleted" and picked:
            self.lose(picked[-1])
        usable = [seq for seq in picked if self.table.claimable(seq, fresh=False)]
        assert usable == [seq for seq in picked if seq in self.kept and self.claimable(seq)]
        usable += [seq for seq in fresh if self.table.claimable(seq, fresh=True)]
        if leaves:
            cohort = cohort[1:]
        wanted = [asking.wants for asking in cohort]
        if push:
            shares = evenly(len(usable), wanted, turn=self.turn)
            self.turn += remainder(len(usable), wanted)
        else:
            shares = in_order(len(usable), wanted)
        begin = 0
        for asking, share in zip(cohort, shares, strict=True):
            self.claim(usable[begin : begin + share], asking, self.now + lease_ms)
            begin += share
        left = usable[begin:]
        self.table.put_back(seq for seq in left if seq in self.kept)
        self.table.rewind([seq for seq in left if seq not in self.kept])

    def pick(self, limit: int, max_deliveries: int) -> tuple[list[int], list[int]]:
        """Free jobs in order, then fresh ones behind the cursor; those worn out begin to move."""
        expected: list[int] = []
        worn: list[int] = []
        for seq in self.free_order():
            if len(expected) == limit:
                break
            often = max_deliveries and self.kept[seq].deliveries >= max_deliveries
            (worn if often else expected).append(seq)
        assert self.table.pick(limit, max_deliveries=max_deliveries) == (expected, worn)
        assert [lease.seq for lease in self.table.move(worn)] == worn
        self.doing.update((seq, "moving") for seq in worn)
        beyond = sorted(seq for seq in self.kept if seq > self.table.cursor)
        held = self.table.held_beyond(self.table.cursor)
        assert held == beyond
        fresh = sorted(self.live.difference(self.kept))
        read = [seq for seq in sorted(self.live.difference(held)) if seq > self.table.cursor]
        assert read == fresh, "no fresh job is before the cursor"
        room = limit - len(expected)
        self.table.cursor = read[room - 1] if 0 < room <= len(read) else self.head if room else self.table.cursor
        return expected, fresh[:room]

    def claim(self, seqs: list[int], asking: Asking, deadline_ms: int) -> None:
        claimed = self.written.claim(seqs, node=asking.node, deadline_ms=deadline_ms, stream=asking.stream)
        assert [lease.seq for lease in claimed] == seqs
        for lease in claimed:
            before = self.kept.get(lease.seq)
            assert lease.deliveries == (before.deliveries if before else 0) + 1
            assert (lease.node, lease.stream, lease.deadline_ms) == (asking.node, asking.stream, deadline_ms)
            assert lease.number not in self.numbers
            self.numbers.add(lease.number)
            self.kept[lease.seq] = Kept(asking.node, lease.number, lease.deliveries, asking.stream, deadline_ms)
            self.doing.pop(lease.seq, None)
            self.tickets.append((lease.seq, asking.node, lease.number))
        self.logged()
        del self.tickets[:-25]

    # --- what workers say ---

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def say(self, data: st.DataObject) -> None:
        """Of jobs that somebody was given once, with their tickets or without: its own, others', and long gone."""
        held = [(seq, kept) for seq, kept in self.kept.items() if self.state(seq) in (State.LEASED, State.EXPIRED)]
        good = [(seq, kept.node, kept.number) for seq, kept in held]
        node = data.draw(st.sampled_from([name for _, name, _ in good] or ["a", "b"]))
        mine = [ticket for ticket in good if ticket[1] == node]
        tickets = data.draw(st.lists(st.sampled_from(mine or self.tickets), min_size=1, max_size=4))
        tickets += data.draw(st.lists(st.sampled_from(self.tickets), max_size=2))
        tickets = data.draw(st.permutations(tickets))
        seqs = [seq for seq, _, _ in tickets]
        numbers = [number for _, _, number in tickets] if data.draw(st.booleans()) else None
        expected: list[int] = []
        for at, seq in enumerate(seqs):
            kept = self.kept.get(seq)
            if kept is None or kept.node != node or self.state(seq) not in (State.LEASED, State.EXPIRED):
                continue
            if seq not in expected and (numbers is None or numbers[at] == kept.number):
                expected.append(seq)
        until = self.now + data.draw(WAITS)
        changed: list[Lease]
        match data.draw(st.sampled_from(["nack", "delay", "extend", "ack"])):
            case "ack":
                changed = self.table.ack(node, seqs, numbers)
                self.doing.update((seq, "ending") for seq in expected)
            case "nack":
                changed = self.written.nack(node, seqs, numbers)
                self.keep(expected, deadline_ms=None, until_ms=0)
            case "delay":
                changed = self.written.nack(node, seqs, numbers, until_ms=until)
                self.keep(expected, deadline_ms=None, until_ms=until)
            case _:
                changed = self.written.extend(node, seqs, numbers, deadline_ms=until)
                self.keep(expected, deadline_ms=until, until_ms=0)
        assert [lease.seq for lease in changed] == expected
        self.logged()
        self.written.advance(self.now)  # a delay of nothing is over

    def keep(self, seqs: list[int], *, deadline_ms: int | None, until_ms: int) -> None:
        for seq in seqs:
            self.kept[seq] = replace(self.kept[seq], deadline_ms=deadline_ms, until_ms=until_ms)

    def begun(self, what: Doing) -> list[int]:
        return sorted(seq for seq, doing in self.doing.items() if doing == what)

    @precondition(lambda self: self.begun("ending"))
    @rule(fails=st.booleans(), data=st.data())
    def finish_acks(self, fails: bool, data: st.DataObject) -> None:
        """The shard answers for some of the deletes: done, or refused."""
        seqs = data.draw(st.lists(st.sampled_from(self.begun("ending")), min_size=1, unique=True))
        if fails:
            self.table.undo(seqs)
            for seq in seqs:
                del self.doing[seq]
            self.written.advance(self.now)
        else:
            self.end(seqs, self.acked)
            self.written.acked(seqs)
            self.logged()

    @precondition(lambda self: self.begun("moving"))
    @rule(fails=st.booleans(), wait=WAITS, data=st.data())
    def finish_moves(self, fails: bool, wait: int, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.sampled_from(self.begun("moving")), min_size=1, unique=True))
        if fails:
            self.table.undo(seqs, until_ms=self.now + wait)
            self.doing.update((seq, Retry(self.now + wait)) for seq in seqs)
            self.written.advance(self.now)
        else:
            self.end(seqs, self.lettered)
            self.written.dead_lettered(seqs)
            self.logged()

    def end(self, seqs: list[int], how: Counter[int]) -> None:
        how.update(seqs)
        for seq in seqs:
            self.live.remove(seq)
            self.kept.pop(seq, None)
            self.doing.pop(seq, None)

    # --- the log ---

    @rule()
    def checkpoint(self) -> None:
        """It is written as of now: what moves has no holder any more, a move that failed is a delay."""
        for seq, doing in self.doing.items():
            if isinstance(doing, Retry) or doing == "moving":
                until = doing.until_ms if isinstance(doing, Retry) else 0
                self.kept[seq] = replace(self.kept[seq], deadline_ms=None, until_ms=until)
        self.written.checkpoint()
        self.logged()

    @rule(share=st.floats(0, 1), lost=st.integers(0, 5), from_checkpoint=st.booleans(), data=st.data())
    def crash(self, share: float, lost: int, from_checkpoint: bool, data: st.DataObject) -> None:
        """The table is gone; deletes that were on their way happened or not, and their events were written or not."""
        ending = self.begun("ending")
        done = ending[: round(share * len(ending))]
        if data.draw(st.booleans()):
            self.written.acked(done)
            for seq in done:
                self.kept.pop(seq, None)
            self.logged()
        self.end(done, self.acked)
        log = self.written.log
        if not self.durable:
            del log[max(0, len(log) - lost) :]
            del self.history[len(log) + 1 :]
        self.kept = {seq: kept for seq, kept in self.history[len(log)].items() if seq in self.live}
        self.doing = {}
        checkpoints = [at for at, data in enumerate(log) if data.startswith(b'{"event":"checkpoint"')]
        begin = checkpoints[-1] if from_checkpoint and checkpoints else 0
        self.written.leases = replayed(log[begin:], first_number=max(self.numbers, default=0) + 100)
        self.table.remove([seq for seq in self.table.seqs() if seq not in self.live])
        self.written.advance(self.now)
        # Connections live elsewhere and are there still; what closed ones hold is given back again.
        for stream in sorted(set(self.table.streams()).difference(self.streams)):
            self.release(stream)

    # --- what always holds ---

    @invariant()
    def the_table_is_the_model(self) -> None:
        table = self.table
        assert sorted(table.seqs()) == sorted(self.kept)
        for seq, kept in self.kept.items():
            lease = table.get(seq)
            assert lease is not None
            state = self.state(seq)
            assert (lease.state, lease.deliveries, lease.number) == (state, kept.deliveries, kept.number)
            if state in (State.LEASED, State.EXPIRED, State.ENDING):
                stream = kept.stream if kept.stream in self.streams else 0
                assert (lease.node, lease.deadline_ms, lease.stream) == (kept.node, kept.deadline_ms, stream)
        check_books(table)

    @invariant()
    def every_job_is_accounted_for(self) -> None:
        ended = self.acked + self.deleted + self.lettered
        assert all(times == 1 for times in ended.values())
        assert self.live.isdisjoint(ended)
        assert self.live.union(ended) == set(range(1, self.head + 1))

    @invariant()
    def the_counters_add_up(self) -> None:
        states = Counter(self.state(seq) for seq in self.kept)
        fresh = len(self.live.difference(self.kept))
        ready = len(self.live) - self.table.in_flight - self.table.hidden
        assert ready == fresh + states[State.FREE] + states[State.EXPIRED]
        assert self.table.in_flight == sum(states[state] for state in HELD)
        assert self.table.hidden == sum(states[state] for state in HIDDEN)
        assert set(self.table.streams()) <= set(self.streams)
        assert all(self.table.of_stream(stream) == self.on_stream(stream) for stream in self.streams)

    @invariant()
    def what_is_due_is_known(self) -> None:
        dues = []
        for seq, kept in self.kept.items():
            doing = self.doing.get(seq)
            if self.state(seq) == State.LEASED:
                assert kept.deadline_ms is not None
                dues.append(kept.deadline_ms + 1)
            elif self.state(seq) == State.DELAYED:
                dues.append(doing.until_ms if isinstance(doing, Retry) else kept.until_ms)
        assert self.table.next_due_ms() == min(dues, default=None)

    def teardown(self) -> None:
        """Nothing is stuck: when time has passed, one pass takes every job there is."""
        self.table.undo([*self.begun("ending"), *self.begun("moving")], until_ms=self.now)
        self.doing = {
            seq: doing if isinstance(doing, Retry) else Retry(self.now)
            for seq, doing in self.doing.items()
            if doing != "ending"
        }
        self.tick(1_000)
        picked, fresh = self.pick(1_000_000, 0)
        jobs = picked + fresh
        assert sorted(jobs) == sorted(self.live)
        self.claim(jobs, Asking("last", 0, len(jobs)), self.now + 10)
        numbers = [self.kept[seq].number for seq in jobs]
        assert [lease.seq for lease in self.table.ack("last", jobs, numbers)] == jobs
        self.end(jobs, self.acked)
        self.written.acked(jobs)
        self.every_job_is_accounted_for()
        assert (len(self.table), self.table.in_flight, self.table.hidden, self.table.streams()) == (0, 0, 0, [])


class DurableMachine(LeaseMachine):
    """Every event survives: after a crash leases are as they were."""

    durable = True


@pytest.mark.parametrize("machine", [LeaseMachine, DurableMachine])
@pytest.mark.timeout(3600 if EXHAUSTIVE else 120)
def test_the_lease_table_is_its_naive_model(machine: type[LeaseMachine]) -> None:
    run_state_machine_as_test(machine, settings=examples(120, stateful_step_count=50))
