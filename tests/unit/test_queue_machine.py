"""Random lives of queues: any order of messages, deaths at any message, and an oracle that listens.

The oracle knows what the coordinator said to gateways, and when; what clients asked for; and what lies in the shards'
files when a coordinator dies. It holds against it:

- a job is never lost, and never given to anybody after its ack was answered.
- nobody is given a job while somebody else's lease of it is active: not expired, not given back, not forgotten because
  first the shard and then the coordinator died. With `leases_durable` nothing that was answered is forgotten.
- connections hold at most what they asked for; while a job is ready, no connection that could take it waits; closed
  ones hold nothing.
- a claim sees the config that was in force when it was sent, or a later one.
- when everything has come to rest, counters are what they should be, nobody waits for an answer, and nobody runs.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from figures import HISTORIES
from model import Record, seeds
from queueplay import Claimed, Gateway, House, Job, Said, Sink, Worker, run

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.queue.lease_table import State
from topics.storage.config import TopicConfig

QUEUE = "jobs"
DEAD = "jobs.dead"  # on the other shard, if there are two
STEPS = 350


@dataclass
class Known:
    """What the oracle knows of a job."""

    life: int  # of the topic
    seq: int
    tag: str
    ack_sent: bool = False
    acked: bool = False
    deleted: bool = False  # by somebody, perhaps at this moment
    deliveries: int = 0  # as last said
    deaths: int = 0  # of coordinators, when that was said


@dataclass
class Active:
    """A lease that somebody may rely on."""

    lease: int
    deadline: int
    stream: int
    untouched: bool = True  # its holder has not said anything about it
    sure: bool = True  # its event is on its way, or there: no shard has died meanwhile


@dataclass
class Held:
    """A job that a client has."""

    gateway: Gateway
    node: str
    alone: bool  # nobody else has ever used this node's name, and it has asked only once
    uid: int
    job: Job
    worker: Worker | None


@dataclass
class Asked:
    gateway: Gateway
    sink: Sink
    kind: str
    node: str = ""
    alone: bool = False
    uids: dict[int, int] = field(default_factory=dict)  # of the seqs that were named
    version: int = 0
    at_ms: int = 0
    default_lease: bool = False
    abandoned: bool = False
    fenced: bool = True


class Machine:
    def __init__(self, house: House, rng: random.Random) -> None:
        self.house = house
        self.rng = rng
        self.trace: list[str] = []
        self.life = 0
        self.jobs: dict[int, Known] = {}  # by their data, which is a number
        self.uid_of: dict[int, int] = {}  # by seq, in this life of the topic
        self.active: dict[int, Active] = {}
        self.asked: list[Asked] = []
        self.held: list[Held] = []
        self.deaths = 0  # of coordinators
        self.reconciles = False  # a coordinator died while the shard was away
        self.versions = [5_000]  # lease_ms of the queue, as it was changed
        self.late: Counter[int] = Counter()  # words by stream about what it held: if late, they bring it back
        self.loose: set[int] = (
            set()
        )  # seqs that were named without a lease_id when the topic went: now they are others'
        self._heard = 0
        self._seen_jobs: Counter[int] = Counter()  # of each worker
        self._nodes = 0
        self.exists = False
        self.durable = rng.random() < 0.4
        self.durability = rng.choice(["disk", "disk", "fsync", "memory"])
        self.jitter_ms = rng.choice([0, 0, 0, 50])
        self.max_deliveries = rng.choice([0, 0, 2, 3])

    # --- the topic ---

    def config(self) -> TopicConfig:
        return TopicConfig(
            type="queue",
            durability=self.durability,  # type: ignore[arg-type]
            durable=self.durability == "fsync",
            leases_durable=self.durable,
            claim_jitter_ms=self.jitter_ms,
            lease_ms=self.versions[-1],
            max_deliveries=self.max_deliveries,
            dead_letter=DEAD if self.max_deliveries else None,
        )

    @property
    def owner(self) -> Any:
        return self.house.owner(QUEUE)

    def make(self) -> None:
        self.life += 1
        self.exists = True
        self.uid_of = {}
        self.owner.shard.put(QUEUE, self.config())
        self.owner.flush()

    def note(self, text: str) -> None:
        self.trace.append(f"{self.house.wall.wall_ms % 10**9}: {text}")

    # --- what clients do ---

    def append(self) -> None:
        if not self.exists or not self.owner.alive:
            return
        uids = [len(self.jobs) + 1 + at for at in range(self.rng.randint(1, 5))]
        tag = self.rng.choice("abcdefgh")
        pad = b" " * self.rng.choice([0, 0, 0, 1_500])
        answer = self.owner.shard.append(QUEUE, [Record(b"%d%b" % (uid, pad), tag=tag) for uid in uids])
        for at, uid in enumerate(uids):
            self.jobs[uid] = Known(self.life, answer.first_seq + at, tag, answer.first_seq + at in self.loose)
            self.uid_of[answer.first_seq + at] = uid
        self.owner.flush()
        self.note(f"append {uids}")

    def claim(self) -> None:
        gateway = self.rng.choice(self.house.gateways)
        alone = self.rng.random() < 0.5
        node = self._node(alone)
        lease_ms = self.rng.choice([None, 100, 300, 1_000, 3_000])
        sink = gateway.claim(QUEUE, node, self.rng.randint(1, 4), lease_ms)
        self.asked.append(
            Asked(
                gateway,
                sink,
                "claim",
                node,
                alone,
                version=len(self.versions) - 1,
                at_ms=self.house.wall.wall_ms,
                default_lease=lease_ms is None,
            )
        )
        self.note(f"{gateway.name} claim by {node} {lease_ms} #{sink.correlation}")

    def _node(self, alone: bool) -> str:
        if not alone:
            return self.rng.choice(["n1", "n2", "n3"])
        self._nodes += 1
        return f"u{self._nodes}"

    def say(self, kind: str) -> None:
        """An ack, a nack or an extension of what somebody holds, or held."""
        if not self.held:
            return
        first = self.rng.choice(self.held)
        mine = [held for held in self.held if held.node == first.node and held.gateway is first.gateway]
        some = self.rng.sample(mine, min(len(mine), self.rng.randint(1, 3)))
        some = list({held.job.seq: held for held in some}.values())
        seqs = [held.job.seq for held in some]
        leases = None if first.alone and self.rng.random() < 0.6 else [held.job.lease for held in some]
        gateway = first.gateway
        if not gateway.alive:
            self.held = [held for held in self.held if held.gateway.alive]
            return
        uids = {held.job.seq: held.uid for held in some}
        asked = Asked(gateway, Sink(), kind, first.node, uids=uids, fenced=leases is not None)
        if kind == "ack":
            asked.sink = gateway.ack(QUEUE, first.node, seqs, leases)
            for held in some:
                self.jobs[held.uid].ack_sent = True
                self.late[held.worker.number if held.worker else 0] += 1
        elif kind == "nack":
            delay_ms = self.rng.choice([0, 0, 400])
            asked.sink = gateway.nack(QUEUE, first.node, seqs, leases, delay_ms=delay_ms)
            for held in some:
                self.active.pop(held.uid, None)
        else:
            lease_ms = self.rng.choice([200, 2_000])
            asked.sink = gateway.extend(QUEUE, first.node, seqs, lease_ms, leases)
            for held in some:
                if (active := self.active.get(held.uid)) is not None:  # it may shorten the lease too
                    active.deadline = min(active.deadline, self.house.wall.wall_ms + lease_ms)
                self.late[held.worker.number if held.worker else 0] += 1
        for held in some:
            if (active := self.active.get(held.uid)) is not None:
                active.untouched = False
        if kind != "extend" and self.rng.random() < 0.9:
            self.held = [held for held in self.held if held not in some]
        self.asked.append(asked)
        self.note(f"{gateway.name} {kind} {seqs} by {first.node} {leases and 'fenced'} #{asked.sink.correlation}")

    def open_stream(self) -> None:
        gateway = self.rng.choice(self.house.gateways)
        if sum(not worker.closed for worker in gateway.workers) < 3:
            alone = self.rng.random() < 0.5
            lease_ms = self.rng.choice([300, 2_000, 60_000])
            worker = gateway.work(QUEUE, self._node(alone), self.rng.randint(1, 3), lease_ms)
            self.note(f"{gateway.name} opens {worker.number % 1_000} for {worker.node}, {worker.stream.head.max}")

    def close_stream(self) -> None:
        if workers := self._open_workers():
            worker = self.rng.choice(workers)
            self._released(worker.number)
            worker.close()
            worker.gateway.calls.flush()
            self.note(f"{worker.gateway.name} closes {worker.number % 1_000}")

    def stall(self) -> None:
        if workers := self._open_workers():
            worker = self.rng.choice(workers)
            worker.socket.stalled = not worker.socket.stalled
            self.note(f"{worker.number % 1_000} stalled: {worker.socket.stalled}")

    def _open_workers(self) -> list[Worker]:
        return [
            worker
            for gateway in self.house.gateways
            for worker in gateway.workers
            if not worker.closed and not worker.socket.finished
        ]

    def _released(self, stream: int) -> None:
        self.active = {uid: active for uid, active in self.active.items() if active.stream != stream}

    def count(self) -> None:
        if not self.exists or not self.owner.alive:
            return
        shard = self.owner.shard
        report = shard.answer(shard.send(Op.GET_TOPIC, messages.GetTopic(QUEUE, False)))
        gateway = self.rng.choice(self.house.gateways)
        self.asked.append(Asked(gateway, gateway.count(report, QUEUE), "count"))

    def abandon(self) -> None:
        claims = [each for each in self.asked if each.kind == "claim" and not each.sink.done and each.gateway.alive]
        if claims:
            asked = self.rng.choice(claims)
            asked.abandoned = True
            asked.gateway.abandon(asked.sink)
            self.note(f"{asked.gateway.name} abandons #{asked.sink.correlation}")

    def delete(self) -> None:
        if not self.exists or not self.owner.alive:
            return
        tag = self.rng.choice("abcdefgh")
        for uid, known in self.jobs.items():
            if known.life == self.life and known.tag == tag:
                known.deleted = True
                self.active.pop(uid, None)
        self.owner.shard.delete(QUEUE, tag=tag)
        self.owner.flush()
        self.note(f"delete {tag}")

    def configure(self) -> None:
        if not self.exists or not self.owner.alive:
            return
        self.versions.append(self.versions[-1] + 1_000)
        self.owner.shard.put(QUEUE, self.config())
        self.owner.flush()
        self.note(f"config {self.versions[-1]}")

    def drop(self) -> None:
        if not self.exists or not self.owner.alive:
            return
        self.owner.shard.drop(QUEUE)
        self.owner.flush()
        for known in self.jobs.values():
            known.deleted = True
        self.active = {}
        self.held = []
        self.loose |= {seq for asked in self.asked if not asked.fenced for seq in asked.uids}
        self.exists = False
        self.note("drop")
        if self.rng.random() < 0.7:
            self.make()
            self.note("and make again")

    def make_again(self) -> None:
        if not self.exists and self.owner.alive:
            self.make()
            self.note("make again")

    # --- what happens to processes ---

    def deliver(self) -> None:
        """Somebody takes some of what waits for it."""
        house = self.house
        owners: list[Any] = [each for each in house.others if each.alive]
        if house.queue is not None:
            owners.append(house.queue)
        links = [(owner, peer) for owner in owners for peer, link in owner.links.items() if link.waiting]
        if not links:
            self.wake()
            return
        owner, peer = self.rng.choice(links)
        taken = house.let(owner, peer, self.rng.choice([1, 1, 2, 100]))
        self.note(f"{getattr(owner, 'name', 'queue')} takes {taken} from {peer}")

    def wake(self) -> None:
        """Whoever would run by itself does."""
        house = self.house
        if house.queue is not None and house.queue.is_awake:
            house.queue.round()
        for each in house.others:
            if each.alive and each.is_awake:
                each.round()

    def sync(self) -> None:
        for shard in self.house.shards:
            if shard.alive:
                shard.sync()

    def slow_disk(self) -> None:
        shard = self.rng.choice(self.house.shards)
        shard.syncs = not shard.syncs

    def flush_segments(self) -> None:
        shard = self.rng.choice(self.house.shards)
        if shard.alive:
            for name in list(shard.engine.topics):
                shard.shard.settle()
                shard.shard.flush(name)
            shard.flush()

    def time(self) -> None:
        ms = self.rng.choice([1, 10, 60, 250, 700])
        self.house.move_clock(ms)
        if self.rng.random() < 0.3:
            for gateway in self.house.gateways:
                gateway.sweep()

    async def rest(self) -> None:
        await self.house.rest()

    async def kill_queue(self) -> None:
        if self.house.queue is None:
            await self.return_queue()
            return
        self.note("queue dies")
        self.listen()
        link = self.house.queue.links.get(self.owner.name)
        if link is not None and link.writer.outbox_bytes:
            for active in self.active.values():
                active.sure = False  # the ring was full
        await self.house.queue_dies()
        self.deaths += 1
        if self.owner.alive:
            self.reconcile()
        else:
            self.reconciles = True
        if self.rng.random() < 0.7:
            await self.return_queue()

    async def return_queue(self) -> None:
        if self.house.queue is None:
            self.house.queue_begins()
            await self.house.rest()
            self.house.hold()
            self.note("queue returns")

    def kill_shard(self) -> None:
        number = self.rng.randrange(len(self.house.shards))
        if not self.house.shards[number].alive:
            self.return_shards()
            return
        self.note(f"shard-{number} dies")
        self.house.shard_dies(number)
        self.listen()  # some are answered because it died
        for active in self.active.values():
            active.sure = False
        if self.rng.random() < 0.6:
            self.return_shards()

    def return_shards(self) -> None:
        for number, shard in enumerate(self.house.shards):
            if not shard.alive:
                self.house.shard_returns(number)
                self.house.hold()
                self.note(f"shard-{number} returns")
        if self.reconciles:
            self.reconciles = False
            self.reconcile()

    def kill_gateway(self) -> None:
        number = self.rng.randrange(len(self.house.gateways))
        self.note(f"gateway-{number} dies")
        for worker in self.house.gateways[number].workers:
            self._released(worker.number)
        self.house.gateway_dies(number)
        self.house.hold()
        self.held = [held for held in self.held if held.gateway.alive]

    def reconcile(self) -> None:
        """What the next coordinator can know: leases whose events went with a shard are nobody's fault any more, unless
        the topic promised otherwise."""
        self.owner.round()
        while self.owner.sync():
            pass
        leased: dict[int, tuple[int, int]] = {}
        for event in self.owner.events(QUEUE) if self.exists else []:
            if event.event == "checkpoint":
                leased = {job.seq: (job.lease, job.deadline) for job in event.jobs if job.state == State.LEASED}
            for seq, lease in zip(event.seqs, event.leases, strict=True):
                if event.event == "claimed" or (event.event == "extended" and leased.get(seq, (0, 0))[0] == lease):
                    leased[seq] = (lease, event.deadline)
                elif leased.get(seq, (0, 0))[0] == lease:
                    del leased[seq]
        streams = {worker.number: worker for worker in self._open_workers()}
        now = self.house.wall.wall_ms
        for uid, active in list(self.active.items()):
            lease, deadline = leased.get(self.jobs[uid].seq, (0, 0))
            worker = streams.get(active.stream)
            if active.stream and (worker is None or worker.stream._last_lease < active.lease):
                del self.active[uid]  # it never got there
            elif lease != active.lease:
                known = active.untouched and (self.durable or active.sure) and not self.jobs[uid].ack_sent
                if known and active.deadline >= now:
                    raise AssertionError(f"job {uid}: lease {active.lease} was answered, but is not in the log")
                del self.active[uid]
            else:
                active.deadline = min(active.deadline, deadline)

    # --- listening ---

    def listen(self) -> None:
        house = self.house
        heard, self._heard = house.said[self._heard :], len(house.said)
        for said in heard:
            if said.op in (Op.CLAIM, Op.JOBS) and not said.failed:
                self._given(said)
            elif said.op == Op.ACK and not said.failed:
                self._acked(said)
            elif said.op == Op.EXTEND and not said.failed:
                self._extended(said)
        for asked in self.asked:
            if asked.kind == "claim" and asked.sink.done and isinstance(asked.sink.value, Claimed):
                for job in asked.sink.value.jobs:
                    self.held.append(Held(asked.gateway, asked.node, asked.alone, job.data, job, None))
        self.asked = [asked for asked in self.asked if not asked.sink.done and asked.gateway.alive]
        for worker in self._open_workers():
            jobs = worker.jobs
            for job in jobs[self._seen_jobs[worker.number] :]:
                # Fenced always: without its lease_id an ack would be good for a later lease of the same connection.
                self.held.append(Held(worker.gateway, worker.node, False, job.data, job, worker))
            self._seen_jobs[worker.number] = len(jobs)
        self._look_at_streams()

    def _asked(self, said: Said) -> Asked | None:
        for asked in self.asked:
            if asked.gateway.name == said.gateway and asked.sink.correlation == said.correlation:
                return asked
        return None

    def _given(self, said: Said) -> None:
        claimed = said.claimed()
        assert claimed.seqs == sorted(set(claimed.seqs)), "in order, and none twice"
        stream = 0
        if said.op == Op.JOBS:
            stream = next(
                (
                    worker.number
                    for worker in self._open_workers()
                    if worker.gateway.name == said.gateway
                    and worker.gateway.streams.works._numbers.get(worker.stream) == said.correlation
                ),
                0,
            )
        for job in claimed.jobs:
            uid = job.data
            known = self.jobs[uid]
            assert not known.acked, f"job {uid} is given to somebody after its ack was answered"
            before = self.active.get(uid)
            if before is not None and known.life == self.life:
                assert before.deadline < said.at_ms, f"job {uid} has two holders: {before} and {job}"
            if known.deaths == self.deaths and known.life == self.life:
                assert job.deliveries > known.deliveries, f"job {uid} is delivered for the same time twice"
            if self.max_deliveries:
                assert job.deliveries <= self.max_deliveries, f"job {uid} was due for the dead letters"
            known.deliveries, known.deaths = job.deliveries, self.deaths
            trusted = known.life == self.life and not known.deleted and known.seq not in self.loose
            if trusted and (stream or said.op == Op.CLAIM):
                self.active[uid] = Active(job.lease, job.deadline, stream)
        asked = self._asked(said)
        if said.op == Op.CLAIM and asked is not None and asked.default_lease and claimed.jobs:
            times = [claimed.jobs[0].deadline - lease_ms for lease_ms in self.versions[asked.version :]]
            assert any(asked.at_ms <= at <= said.at_ms for at in times), "it did not know the config"

    def _acked(self, said: Said) -> None:
        asked = self._asked(said)
        assert asked is not None
        skipped = messages.decode_answer(said.message)[0].skipped
        for seq, uid in asked.uids.items():
            known = self.jobs[uid]
            if seq in skipped:
                continue
            known.acked = True
            self.active.pop(uid, None)
            if known.life == self.life and self.exists and self.owner.alive and seq not in self.loose:
                assert not self.owner.engine.topics[QUEUE].is_live(seq), f"job {uid} is there after its ack"

    def _extended(self, said: Said) -> None:
        asked = self._asked(said)
        if asked is None:
            return
        answer = messages.decode_answer(said.message)[0]
        for seq, uid in asked.uids.items():
            active = self.active.get(uid)
            lease = self._table_lease(seq)
            if seq not in answer.skipped and active is not None and lease == active.lease:
                active.deadline = answer.deadline

    def _table_lease(self, seq: int) -> int:
        queue = self.house.coordinator._queues.get(QUEUE) if self.house.queue is not None else None
        lease = None if queue is None else queue.leases.get(seq)
        return 0 if lease is None else lease.number

    def _look_at_streams(self) -> None:
        if self.house.queue is None:
            return
        queue = self.house.coordinator._queues.get(QUEUE)
        if queue is None or not self.exists or not self.owner.alive:
            return
        topic = self.owner.engine.topics[QUEUE]
        now = self.house.wall.wall_ms
        held = Counter(
            lease.stream
            for seq in queue.leases.seqs()
            if (lease := queue.leases.get(seq)) is not None and lease.state in (State.LEASED, State.ENDING)
            # What is over or gone is noticed when somebody looks.
            if lease.deadline_ms >= now and topic.is_live(seq)
        )
        for stream, worker in queue.workers.items():
            assert held[stream] <= worker.max + self.late[stream], "a connection holds more than it asked for"

    # --- quiet ---

    async def be_quiet(self, ms: int = 400) -> None:
        """Everybody is there and everything has been said: what does it look like?"""
        house = self.house
        self.note("quiet")
        self.return_shards()
        await self.return_queue()
        for shard in house.shards:
            shard.syncs = True
        house.release()
        for _ in range(3):
            await house.settle()
            self.listen()
            house.move_clock(ms)
            for gateway in house.gateways:
                gateway.sweep()
        await house.settle()
        self.listen()
        house.said.clear()
        self._heard = 0
        if self.exists:
            await self._look_at_counters()
        self._nobody_waits()
        self._streams_are_served(orphans_are_free=ms > limits.ORPHAN_MS)
        self._leases_are_known()
        house.hold()

    def _nobody_waits(self) -> None:
        house = self.house
        left = [(each.kind, each.sink.correlation) for each in self.asked if not each.abandoned]
        assert left == [], "somebody waits for ever"
        coordinator = house.coordinator
        assert not coordinator._has_work()
        assert not coordinator._openings
        asks = coordinator._asks
        assert not any(asks._waiting)
        assert not any(asks._called), "a question to a shard has no answer"
        assert house.queue is not None
        assert not house.queue.is_due, "it would turn in circles"

    async def _look_at_counters(self) -> None:
        house = self.house
        await house.counts(QUEUE)  # whoever looks may find that jobs are gone, and others go out instead
        self.listen()
        ready, in_flight, dead = await house.counts(QUEUE)
        self.listen()
        leases = house.table(QUEUE).leases
        topic = self.owner.engine.topics[QUEUE]
        states = Counter(leases.get(seq).state for seq in leases.seqs())  # type: ignore[union-attr]
        gone = [seq for seq in leases.seqs() if not topic.is_live(seq)]
        assert gone == [], "leases of jobs that are not there"
        assert in_flight == states[State.LEASED]
        hidden = states[State.DELAYED] + states[State.MOVING]
        assert states[State.ENDING] == 0
        assert ready + in_flight + hidden == topic.count
        self.ready, self.dead_lettered = ready, dead

    def _streams_are_served(self, *, orphans_are_free: bool) -> None:
        """A stream has what it wants, or there is nothing to give, or its client does not read."""
        if not self.exists:
            assert self._open_workers() == [], "the topic is gone: so are its streams"
            return
        queue = self.house.table(QUEUE)
        for worker in self._open_workers():
            known = queue.workers.get(worker.number)
            assert known is not None, f"stream {worker.number} is open and nobody serves it"
            held = queue.leases.of_stream(worker.number)
            full = held >= known.max or known.unsent >= self.house.settings.stream_backlog_bytes // 4
            gathering = queue.passes.window_ms > self.house.wall.wall_ms
            assert full or gathering or not self.ready, (
                f"stream {worker.number} holds {held} of {known.max}, {self.ready} are ready"
            )
            for seq in queue.leases.seqs():
                lease = queue.leases.get(seq)
                if lease is not None and lease.stream == worker.number and lease.state == State.LEASED:
                    assert lease.number <= worker.stream._last_lease, f"job {seq} was leased to it and never came"
        numbers = {worker.number for worker in self._open_workers()}
        assert set(queue.workers) == numbers, "streams that are not open are served"
        if orphans_are_free:
            assert set(queue.leases.streams()) <= numbers, "streams that are not open hold jobs"

    def _leases_are_known(self) -> None:
        """Whoever relies on a lease is right to do so."""
        if not self.exists:
            return
        leases = self.house.table(QUEUE).leases
        now = self.house.wall.wall_ms
        for uid, active in self.active.items():
            known = self.jobs[uid]
            if known.life != self.life or known.ack_sent or known.deleted or active.deadline < now:
                continue
            lease = leases.get(known.seq)
            assert lease is not None, f"job {uid}: {active} is forgotten"
            assert (lease.number, lease.state) == (active.lease, State.LEASED), f"job {uid}: {active} is now {lease}"

    # --- the end ---

    async def end(self) -> None:
        house = self.house
        await self.be_quiet()
        for worker in self._open_workers():
            self._released(worker.number)
            worker.close()
            worker.gateway.calls.flush()
        await self.be_quiet(limits.ORPHAN_MS + 100)
        house.release()
        self.make_again()
        house.move_clock(200_000)
        await house.pass_time(3_000, step_ms=500)
        self.listen()
        for _ in range(1_000):
            sink = house.gateway.claim(QUEUE, "last", 50, 60_000)
            self.asked.append(Asked(house.gateway, sink, "claim", "last", False))
            await house.pass_time(200)
            self.listen()
            assert sink.error == ""
            claimed = sink.value.jobs
            if not claimed:
                break
            ack = house.gateway.ack(QUEUE, "last", [job.seq for job in claimed], [job.lease for job in claimed])
            uids = {job.seq: job.data for job in claimed}
            self.asked.append(Asked(house.gateway, ack, "ack", "last", uids=uids))
            await house.settle()
            self.listen()
            assert ack.value.skipped == []
        else:
            raise AssertionError("the queue is never empty")
        await house.pass_time(2_000, step_ms=500)
        dead = self._dead_letters()
        for uid, known in self.jobs.items():
            there = known.acked or known.ack_sent or known.deleted or uid in dead
            assert there, f"job {uid} is lost"
        assert house.live(QUEUE) == []
        assert await house.counts(QUEUE) == (0, 0, self._moved(dead))
        rounds = house.queue.rounds if house.queue is not None else 0
        await house.pass_time(5_000)
        assert house.queue is not None
        assert house.queue.rounds - rounds < 30, "it turns in circles"

    def _dead_letters(self) -> list[int]:
        if DEAD not in self.house.owner(DEAD).engine.topics:
            return []
        uids: list[int] = self.house.live(DEAD)
        assert len(uids) == len(set(uids)), "a dead letter came twice"
        return uids

    def _moved(self, dead: list[int]) -> int:
        """Of this life of the topic. What is with the dead letters and was acked or deleted too was not moved."""
        here = [uid for uid in dead if self.jobs[uid].life == self.life]
        sure = [uid for uid in here if not (self.jobs[uid].deleted or self.jobs[uid].ack_sent)]
        counted = self.house.table(QUEUE).dead_lettered
        assert len(sure) <= counted <= len(here), f"{counted} moved, {len(here)} dead letters"
        return counted


ACTIONS = {
    "deliver": 60,
    "wake": 6,
    "rest": 10,
    "sync": 4,
    "slow_disk": 1,
    "time": 8,
    "append": 5,
    "claim": 8,
    "ack": 6,
    "nack": 3,
    "extend": 2,
    "open_stream": 3,
    "close_stream": 1,
    "stall": 1,
    "count": 2,
    "abandon": 1,
    "delete": 1,
    "configure": 1,
    "make_again": 2,
    "flush_segments": 1,
    "quiet": 2,
    "kill_queue": 2,
    "kill_shard": 2,
    "kill_gateway": 1,
    "drop": 0.4,
}


async def live(house: House, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    machine = Machine(house, rng)
    house.owner(DEAD).shard.put(DEAD, TopicConfig(idempotency_window_ms=10**9))
    machine.make()
    house.hold()
    names, weights = list(ACTIONS), list(ACTIONS.values())
    try:
        for _ in range(steps):
            name = rng.choices(names, weights)[0]
            if name in ("ack", "nack", "extend"):
                machine.say(name)
            elif name == "quiet":
                await machine.be_quiet()
            else:
                outcome = getattr(machine, name)()
                if outcome is not None:
                    await outcome
            machine.listen()
        await machine.end()
    except BaseException:
        print(f"seed {seed}; the last of {len(machine.trace)} steps:", *machine.trace[-60:], sep="\n  ")
        raise


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASE_CHECKPOINT_EVENTS", 12)


@pytest.mark.parametrize("seed", seeds(24, 400))
def test_a_life(tmp_path: Path, seed: int) -> None:
    HISTORIES.add()
    shards = 1 + seed % 2
    ring_bytes = 64 * 1024 if seed % 3 else 4 * 1024
    settings: dict[str, Any] = {"lease_history_bytes": 4_000, "stream_backlog_bytes": 4_096, "segment_max_events": 40}
    run(
        tmp_path,
        lambda house: live(house, seed, STEPS),
        shards=shards,
        gateways=2,
        ring_bytes=ring_bytes,
        **settings,
    )
