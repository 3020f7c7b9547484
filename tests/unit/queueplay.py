"""The coordinator, shards and gateways in one process, joined by real rings and stepped by hand.

Nothing runs by itself: who takes how many messages from which ring is the test's to say, and one clock, moved by hand,
is everybody's. Processes sleep as real ones do: in `settle` only work in a ring, a bell, a finished sync or a deadline
wakes them, so a wake-up that was forgotten shows as something that never arrives.

The coordinator and the shards' engines are real. A gateway is what is real of it between its handlers and its rings
(Calls, Works, WorkStream); its sockets take what the test lets them. A death leaves what kill -9 would: files, and
nothing of what was in the rings.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import trio
import trio.testing
from model import QuickDisk, Record, Shard, Wall, batch_of

from topics.actors import messages
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.gateway.api import jobs
from topics.gateway.api.types import Call, Response
from topics.gateway.calls import Calls
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.registry import Streams
from topics.gateway.streams.work_stream import WorkStream
from topics.queue.coordinator import Coordinator
from topics.queue.queue import Queue
from topics.settings import Settings
from topics.shm import layout
from topics.shm.counters import ROW_WORDS, State
from topics.shm.ring import format_link
from topics.storage.config import TopicConfig, owner_of_name
from topics.storage.leases import LeaseEvent, decode_event, log_name

RING_BYTES = 64 * 1024
ALL = 1 << 60
_PUSHED = (Op.JOBS, Op.WORK_ENDED)


class Bell:
    """Rung by peers, looked at by its owner."""

    def __init__(self) -> None:
        self.rung = False

    def ring(self) -> None:
        self.rung = True

    ring_always = ring


class GatedLink(Link):
    """A side of a link whose owner finds only as many messages as it is allowed to."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.allowed = ALL
        self._arrived: list[bytes] = []

    @property
    def waiting(self) -> int:
        """Messages that have come and that the owner has not seen."""
        self._arrived += super().drain()
        return len(self._arrived)

    def peek(self) -> list[Op]:
        return [Op(message[0]) for message in self._arrived[: self.waiting]]

    def drain(self) -> list[bytes]:
        taken = self._arrived[: min(self.waiting, self.allowed)]
        del self._arrived[: len(taken)]
        if self.allowed < ALL:
            self.allowed -= len(taken)
        return taken

    def has_work(self) -> bool:
        return (self.allowed > 0 and self.waiting > 0) or self.writer.room_was_made


def join(
    one: tuple[str, Bell], other: tuple[str, Bell], *, ring_bytes: int = RING_BYTES
) -> tuple[GatedLink, GatedLink]:
    """The two sides of a fresh link; each names the other."""
    view = memoryview(bytearray(layout.link_bytes(ring_bytes)))
    format_link(view, generation=1, ring_bytes=ring_bytes)
    return (
        GatedLink(other[0], view, side=0, generation=1, bell=other[1]),
        GatedLink(one[0], view, side=1, generation=1, bell=one[1]),
    )


# --- shards --------------------------------------------------------------------------------------------


class ShardProcess:
    """model.Shard and its links."""

    def __init__(self, name: str, folder: str, wall: Wall, **settings: Any) -> None:
        os.makedirs(folder, exist_ok=True)
        self.name = name
        self.shard = Shard(folder, wall=wall, **settings)
        self.bell = Bell()
        self.links: dict[str, GatedLink] = {}
        self.stays_awake = True
        self.syncs = True  # of itself; or when `sync` says

    @property
    def engine(self) -> Any:
        return self.shard.engine

    @property
    def alive(self) -> bool:
        return self.shard.is_open

    @property
    def is_awake(self) -> bool:
        busy = self.syncs and self.shard.syncer.busy
        return self.alive and (self.stays_awake or self.bell.rung or busy)

    def link_up(self, peer: str, link: GatedLink) -> None:
        """The coordinator first, as in the process."""
        self.links = {peer: link, **self.links} if peer == "queue" else {**self.links, peer: link}

    def link_down(self, peer: str) -> None:
        if (link := self.links.get(peer)) is not None:
            if peer == "queue":
                self._empty(link)
            del self.links[peer]
            self.engine.caller_gone(link.writer)
            link.close()

    def _empty(self, link: GatedLink) -> None:
        """The last words of the coordinator are in the ring."""
        link.allowed = ALL
        for message in link.drain():
            self.engine.handle(message, link.writer)
        self.stays_awake = True

    def round(self) -> None:
        """What the process does between two waits. Before it sleeps it looks for work once more."""
        self.bell.rung = False
        engine = self.engine
        engine.begin_round(0)
        for link in self.links.values():
            for message in link.drain():
                engine.handle(message, link.writer)
        engine.commit.write()
        if self.syncs and self.shard.syncer.busy:
            engine.commit.synced(self.shard.syncer.wait())
        self.flush()
        engine.tails.push()
        self.flush()
        self.stays_awake = any(link.has_work() for link in self.links.values()) or engine.tails.can_push()

    def sync(self) -> bool:
        """A sync that was begun ends."""
        if not self.shard.syncer.busy:
            return False
        self.engine.commit.synced(self.shard.syncer.wait())
        self.flush()
        return True

    def flush(self) -> None:
        for link in self.links.values():
            link.flush()

    def events(self, queue: str) -> list[LeaseEvent]:
        """What a coordinator that starts now finds in the leases log, all of it."""
        if log_name(queue) not in self.engine.topics:
            return []
        return [decode_event(stored.record.data) for stored in self.shard.everything(log_name(queue))]


# --- gateways ------------------------------------------------------------------------------------------


class Sink:
    """Whoever asked."""

    def __init__(self, correlation: int = 0) -> None:
        self.correlation = correlation
        self.values: list[Any] = []

    def finish(self, value: Any) -> None:
        self.values.append(value)

    def abort(self) -> None: ...

    @property
    def done(self) -> bool:
        assert len(self.values) < 2, "answered twice"
        return bool(self.values)

    @property
    def value(self) -> Any:
        assert self.done, "not answered"
        return self.values[0]

    @property
    def error(self) -> str:
        """The error's code; empty: it went well."""
        return json.loads(bytes(self.value.body))["error"]["code"] if isinstance(self.value, Response) else ""


class _Call(Call, kw_only=True, gc=False, eq=False):
    def render(self, answer: Any, body: bytes | memoryview) -> Any:
        return Claimed(answer, bytes(body)) if isinstance(answer, messages.Claimed) else answer


@dataclass(frozen=True)
class Job:
    seq: int
    lease: int
    deadline: int
    deliveries: int
    data: Any
    entry: dict[str, Any] = field(compare=False, default_factory=dict)


class Claimed:
    """Jobs as a client gets them."""

    def __init__(self, head: messages.Claimed, body: bytes) -> None:
        self.ready = head.ready
        self.jobs = [_job(text) for text in jobs.rendered(head, body)]

    @property
    def seqs(self) -> list[int]:
        return [job.seq for job in self.jobs]


def _job(text: bytes | str) -> Job:
    entry = json.loads(text)
    lease = int(entry["lease_id"].removeprefix("lease_"), 16)
    return Job(entry["$seq"], lease, entry["deadline"], entry["deliveries"], entry["data"], entry)


class Socket:
    """An Outlet: what the client has of a stream. It takes everything, or nothing while it is `stalled`."""

    def __init__(self) -> None:
        self.written = self.sent = 0
        self.text = b""
        self.stalled = False
        self.finished = False
        self.on_drained: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.text += data

    def drain(self) -> None:
        if not self.stalled and self.sent < self.written:
            self.sent = self.written
            self.on_drained()

    def finish(self) -> None:
        self.finished = True

    abort = finish

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Worker:
    """A client of /work."""

    def __init__(self, gateway: Gateway, stream: WorkStream) -> None:
        self.gateway = gateway
        self.stream = stream
        self.socket = Socket()
        self.socket.on_drained = stream.drained
        self.closed = False

    @property
    def number(self) -> int:
        return self.stream.head.stream

    @property
    def node(self) -> str:
        return self.stream.head.node

    @property
    def jobs(self) -> list[Job]:
        """All that were ever pushed to it."""
        frames = self.socket.text[: self.socket.sent].decode().split("\n\n")
        return [_job(frame.split("data: ", 1)[1]) for frame in frames if "event: job" in frame]

    @property
    def seqs(self) -> list[int]:
        return [job.seq for job in self.jobs]

    @property
    def errors(self) -> list[dict[str, Any]]:
        frames = self.socket.text.decode().split("\n\n")
        return [json.loads(frame.split("data: ", 1)[1]) for frame in frames if "event: error" in frame]

    def close(self) -> None:
        """Its connection breaks."""
        if not self.closed:
            self.closed = True
            self.stream.closed()


class Gateway:
    def __init__(self, name: str, settings: Settings, *, shards: int) -> None:
        self.name = name
        self.bell = Bell()
        self.calls = Calls(shards=shards, timeout_ms=600_000)
        self.streams = Streams(settings=settings, calls=self.calls, feeds=Feeds(self.calls, shards=shards))
        self.calls.on_unasked = self._unasked
        self.links: dict[str, GatedLink] = {}
        self.workers: list[Worker] = []
        self.asked: dict[int, tuple[Op, Any]] = {}  # by correlation
        self.alive = True
        self.stays_awake = True
        self._left: set[int] = set()  # calls whose clients left: an answer may come or not

    def _unasked(self, peer: int, message: bytes) -> None:
        op = Op(message[0])
        if op not in _PUSHED:
            correlation = messages.unpack(message).correlation
            assert correlation in self._left, f"{op.name} was answered twice, or nobody asked"
            self._left.remove(correlation)
            return
        self.streams.unasked(peer, message)

    @property
    def is_awake(self) -> bool:
        return self.alive and (self.stays_awake or self.bell.rung or self._can_send())

    def _can_send(self) -> bool:
        return any(worker.socket.sent < worker.socket.written and not worker.socket.stalled for worker in self.workers)

    def round(self) -> None:
        self.bell.rung = False
        self.calls.flush()
        self.calls.drain()
        for worker in self.workers:
            worker.socket.drain()
        self.calls.flush()
        self.stays_awake = self.calls.has_answers()

    def link_up(self, peer: str, link: GatedLink) -> None:
        self.links[peer] = link
        if peer == "queue":
            self.calls.link_up(self.calls.queue, link)
            self.streams.works.link_up()
        else:
            self.calls.link_up(int(peer.removeprefix("shard-")), link)
        self.calls.flush()

    def link_down(self, peer: str) -> None:
        if (link := self.links.pop(peer, None)) is not None:
            self.calls.link_down(self.calls.queue if peer == "queue" else int(peer.removeprefix("shard-")))
            link.close()

    def sweep(self) -> None:
        self.streams.works.retry()
        self.calls.flush()

    # --- requests ---

    def ask(self, peer: int, op: Op, head: Any, body: bytes = b"", *, wait_ms: int = 0) -> Sink:
        sink = Sink()
        call = _Call(shard=peer, op=op, head=head, body=body, timeout_ms=wait_ms)
        sink.correlation = self.calls.ask(call, sink)
        self.asked[sink.correlation] = (op, head)
        self.calls.flush()
        return sink

    def claim(self, topic: str, node: str, most: int = 1, lease_ms: int | None = None, *, key: str = "") -> Sink:
        head = messages.Claim(topic, node, most, lease_ms, key)
        return self.ask(self.calls.queue, Op.CLAIM, head, wait_ms=5_000)

    def ack(self, topic: str, node: str, seqs: list[int], leases: list[int] | None = None) -> Sink:
        return self.ask(self.calls.queue, Op.ACK, messages.Ack(topic, node, seqs, leases))

    def nack(
        self, topic: str, node: str, seqs: list[int], leases: list[int] | None = None, *, delay_ms: int = 0
    ) -> Sink:
        return self.ask(self.calls.queue, Op.NACK, messages.Nack(topic, node, seqs, leases, delay_ms))

    def extend(self, topic: str, node: str, seqs: list[int], lease_ms: int, leases: list[int] | None = None) -> Sink:
        return self.ask(self.calls.queue, Op.EXTEND, messages.Extend(topic, node, seqs, leases, lease_ms))

    def count(self, report: messages.TopicReport, topic: str) -> Sink:
        row = messages.QueueRow(topic, report.topic_id, report.count, report.removals, report.completing)
        return self.ask(self.calls.queue, Op.COUNT_QUEUES, messages.CountQueues([row]))

    def abandon(self, sink: Sink) -> None:
        """Its client left."""
        self._left.add(sink.correlation)
        self.calls.abandon(sink)
        self.calls.flush()

    def leave(self, sink: Sink) -> None:
        """Its client sends no more."""
        self.calls.leave(sink)
        self.calls.flush()

    def work(self, topic: str, node: str, most: int = 1, lease_ms: int | None = None) -> Worker:
        head = messages.OpenWork(topic, node, most, lease_ms, 0)
        stream = WorkStream(self.streams, len(self.workers) + 1, head)
        worker = Worker(self, stream)
        self.workers.append(worker)
        stream.start(worker.socket, b"")
        self.calls.flush()
        return worker


# --- the coordinator -----------------------------------------------------------------------------------


class QueueProcess:
    """A life of the coordinator."""

    def __init__(self, house: House) -> None:
        self._wall = house.wall
        self.bell = Bell()
        self.warnings: list[tuple[str, dict[str, Any]]] = []
        self.rounds = 0
        self.stays_awake = True
        self.due_ms: int | None = None  # when it wakes by itself, as it was when it went to sleep
        note = lambda text, **more: self.warnings.append((text, more))  # noqa: E731
        self.states: dict[str, State] = {}  # of those that do not just serve, as the board has them
        self.context: Any = SimpleNamespace(
            board=SimpleNamespace(row=lambda name: SimpleNamespace(state=self.states.get(name, State.READY))),
            held=lambda peer: None,
            settings=house.settings,
            shards=len(house.shards),
            links={},
            row=SimpleNamespace(words=[0] * ROW_WORDS),
            log=SimpleNamespace(debugging=False, info=note, warning=note, error=note),
            bell=self.bell,
        )
        self.links: dict[str, GatedLink] = self.context.links

    def begin(self, nursery: trio.Nursery) -> None:
        with mock.patch("topics.queue.coordinator.Clock", self._wall.clock):
            self.coordinator = Coordinator(self.context)
        self._scope = trio.CancelScope()
        nursery.start_soon(self._live)

    async def _live(self) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                self.coordinator.start(nursery)
                await trio.sleep_forever()

    def end(self) -> None:
        self._scope.cancel()

    @property
    def is_awake(self) -> bool:
        return self.stays_awake or self.bell.rung or self.is_due

    @property
    def is_due(self) -> bool:
        return self.due_ms is not None and self._wall.wall_ms >= self.due_ms

    def round(self) -> None:
        """One turn of its loop, up to the moment when it sleeps: what its tasks do then it must be woken for."""
        self.bell.rung = False
        self.rounds += 1
        self.coordinator._round()
        self.stays_awake = self.coordinator._has_work()
        deadline_ns = self.coordinator._next_deadline_ns()
        self.due_ms = None
        if deadline_ns is not None:
            self.due_ms = self._wall.wall_ms + max(0, round((deadline_ns - time.monotonic_ns()) / 1e6))

    def link_up(self, peer: str, link: GatedLink) -> None:
        self.links[peer] = link
        self.context.on_link_up(peer, link)

    def link_down(self, peer: str) -> None:
        if (link := self.links.pop(peer, None)) is not None:
            self.context.on_link_down(peer)
            link.close()


# --- all of them ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """Something that the coordinator sent to a gateway."""

    at_ms: int
    gateway: str
    link: GatedLink
    op: Op
    failed: bool
    correlation: int
    message: bytes

    def claimed(self) -> Claimed:
        head, body = messages.decode_answer(self.message)
        return Claimed(head, bytes(body))


class House:
    def __init__(
        self,
        folder: os.PathLike[str],
        nursery: trio.Nursery,
        clock: trio.testing.MockClock,
        *,
        shards: int = 1,
        gateways: int = 1,
        ring_bytes: int = RING_BYTES,
        disk: QuickDisk | None = None,
        **settings: Any,
    ) -> None:
        self.wall = Wall()
        self.settings = Settings(data_dir=os.fspath(folder), **settings)
        self.ring_bytes = ring_bytes
        self.said: list[Said] = []
        self._nursery = nursery
        self._clock = clock
        self.shards = [
            ShardProcess(f"shard-{number}", os.path.join(folder, f"s{number}"), self.wall, disk=disk, **settings)
            for number in range(shards)
        ]
        self.gateways = [
            Gateway(f"gateway-{number}", self.settings, shards=len(self.shards)) for number in range(gateways)
        ]
        for gateway in self.gateways:
            for shard in self.shards:
                self._join(gateway, shard)
        self.queue: QueueProcess | None = None
        self.queue_begins()

    # --- who there is ---

    @property
    def others(self) -> list[ShardProcess | Gateway]:
        return [*self.shards, *self.gateways]

    @property
    def process(self) -> QueueProcess:
        """The coordinator's, while there is one."""
        assert self.queue is not None
        return self.queue

    @property
    def shard(self) -> ShardProcess:
        return self.shards[0]

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    @property
    def coordinator(self) -> Coordinator:
        assert self.queue is not None
        return self.queue.coordinator

    def owner(self, topic: str) -> ShardProcess:
        return self.shards[owner_of_name(topic, len(self.shards))]

    def table(self, topic: str) -> Queue:
        """What the coordinator knows of a queue."""
        return self.coordinator._queues[topic]

    # --- links ---

    def _join(self, one: Any, other: Any) -> None:
        name, peer = (
            "queue" if isinstance(one, QueueProcess) else one.name,
            "queue" if isinstance(other, QueueProcess) else other.name,
        )
        ours, theirs = join((name, one.bell), (peer, other.bell), ring_bytes=self.ring_bytes)
        if isinstance(one, QueueProcess) and isinstance(other, Gateway):
            self._listen(ours)
        one.link_up(peer, ours)
        other.link_up(name, theirs)

    def _listen(self, link: GatedLink) -> None:
        """Keep what the coordinator says on this link."""
        send = link.writer.send_always

        def heard(message: bytes) -> None:
            parts = messages.unpack(message)
            said = Said(
                self.wall.wall_ms, link.peer, link, Op(message[0]), bool(message[1]), parts.correlation, message
            )
            self.said.append(said)
            send(message)

        link.writer.send_always = heard  # type: ignore[method-assign]

    # --- deaths and births ---

    def queue_begins(self) -> None:
        """A coordinator starts, linked to whoever is alive."""
        process = QueueProcess(self)
        theirs: list[tuple[Any, GatedLink]] = []
        for other in self.others:
            if other.alive:
                ours, link = join(("queue", process.bell), (other.name, other.bell), ring_bytes=self.ring_bytes)
                if isinstance(other, Gateway):
                    self._listen(ours)
                process.links[other.name] = ours
                theirs.append((other, link))
        process.begin(self._nursery)
        self.queue = process
        for other, link in theirs:
            other.link_up("queue", link)

    async def queue_dies(self) -> None:
        process, self.queue = self.queue, None
        assert process is not None
        for other in self.others:
            if other.alive:
                other.link_down("queue")
        for link in process.links.values():
            link.closed = True  # what its tasks do before they notice is heard by nobody
        process.end()
        await self.rest()
        for link in process.links.values():
            link.close()

    async def queue_dies_and_returns(self) -> None:
        await self.queue_dies()
        self.queue_begins()
        await self.rest()

    def shard_dies(self, number: int = 0) -> None:
        shard = self.shards[number]
        for link in shard.links.values():
            link.close()
        shard.links = {}
        shard.shard.crash()
        for gateway in self.gateways:
            if gateway.alive:
                gateway.link_down(shard.name)
        if self.queue is not None:
            self.queue.link_down(shard.name)

    def shard_returns(self, number: int = 0) -> None:
        shard = self.shards[number]
        shard.shard.open()
        shard.stays_awake = True
        for gateway in self.gateways:
            if gateway.alive:
                self._join(gateway, shard)
        if self.queue is not None:
            self._join(self.queue, shard)

    def gateway_dies(self, number: int = 0) -> Gateway:
        """With its connections; another takes its place at once, without any."""
        gateway = self.gateways[number]
        gateway.alive = False
        for link in gateway.links.values():
            link.close()
        for worker in gateway.workers:
            worker.closed = True
        for shard in self.shards:
            if shard.alive:
                shard.link_down(gateway.name)
        if self.queue is not None:
            self.queue.link_down(gateway.name)
        fresh = self.gateways[number] = Gateway(gateway.name, self.settings, shards=len(self.shards))
        for shard in self.shards:
            if shard.alive:
                self._join(fresh, shard)
        if self.queue is not None:
            self._join(self.queue, fresh)
        return fresh

    # --- steps ---

    async def rest(self) -> None:
        """Until every task of the coordinator waits for something."""
        await trio.testing.wait_all_tasks_blocked()

    def hold(self) -> None:
        """From now on messages wait in their rings until they are let through."""
        for link in self._links():
            link.allowed = 0

    def release(self) -> None:
        """Messages go through again, and whoever slept on some looks."""
        for link in self._links():
            link.allowed = ALL
        for process in self._everyone():
            process.stays_awake = True

    def _everyone(self) -> list[Any]:
        others = [each for each in self.others if each.alive]
        return [*others, self.queue] if self.queue is not None else others

    def _links(self) -> list[GatedLink]:
        return [link for process in self._everyone() for link in process.links.values()]

    def let(self, owner: Any, peer: str, most: int = ALL) -> int:
        """Let messages through to their owner, who takes them at once. How many there were to take."""
        link: GatedLink = owner.links[peer]
        waiting = link.waiting
        link.allowed = most
        owner.round()
        if peer in owner.links and owner.links[peer] is link:
            link.allowed = 0
        return min(waiting, most)

    async def step(self, *hops: tuple[Any, str]) -> None:
        """One hop after the other: everything that waits at `owner` from `peer` goes through; then tasks run."""
        for owner, peer in hops:
            self.let(owner, peer)
            await self.rest()

    async def settle(self, *, most: int = 4_000) -> int:
        """Run whoever is awake until nobody is, at this moment of the clock. How many rounds that took."""
        for shard in self.shards:
            shard.stays_awake |= shard.alive  # tests ask shards directly too
        for rounds in range(most):
            await self.rest()
            awake = [process for process in self._everyone() if process.is_awake]
            if not awake:
                return rounds
            for process in awake:
                process.round()
        raise AssertionError("they never come to rest")

    def move_clock(self, ms: int) -> None:
        self.wall.pass_ms(ms)
        self._clock.jump(ms / 1_000)

    async def pass_time(self, ms: int, *, step_ms: int = 100) -> None:
        """Whatever happens in this time; gateways look after their streams once a second."""
        await self.settle()
        for at in range(0, ms, step_ms):
            self.move_clock(min(step_ms, ms - at))
            if at // 1_000 != (at + step_ms) // 1_000:
                for gateway in self.gateways:
                    gateway.sweep()
            await self.settle()

    # --- the usual things, from beginning to end ---

    def make(self, topic: str, jobs: int = 0, **config: Any) -> None:
        """A queue, and jobs whose data are their numbers. Nobody but the shard takes part."""
        self.owner(topic).shard.put(topic, TopicConfig(**{"type": "queue", **config}))
        self.add(topic, range(1, jobs + 1))
        self.owner(topic).flush()

    def add(self, topic: str, numbers: Any, **more: Any) -> None:
        records = [Record(b"%d" % number, **more) for number in numbers]
        if records:
            self.owner(topic).shard.append(topic, records)

    async def claim(self, topic: str, node: str, most: int = 1, lease_ms: int | None = None) -> list[Job]:
        sink = self.gateway.claim(topic, node, most, lease_ms)
        await self.settle()
        assert isinstance(sink.value, Claimed), sink.error
        return sink.value.jobs

    async def ask(self, sink: Sink) -> Any:
        """Its answer, or the code of its error."""
        await self.settle()
        return sink.error or sink.value

    def report(self, topic: str) -> messages.TopicReport:
        return self.owner(topic).shard.report(topic)

    async def counts(self, topic: str) -> tuple[int, int, int]:
        """ready, in_flight and dead_lettered, as GET shows them."""
        answer = await self.ask(self.gateway.count(self.report(topic), topic))
        counts = answer.counts[0]
        assert counts is not None, "no counters"
        return counts.ready, counts.in_flight, counts.dead_lettered

    def live(self, topic: str) -> list[Any]:
        """The data of the jobs that are in the queue's log."""
        return [json.loads(stored.record.data) for stored in self.owner(topic).shard.everything(topic)]


def append_call(topic: str, records: list[Record], **more: Any) -> tuple[messages.Append, bytes]:
    body, size = batch_of(records)
    return messages.Append(topic, len(records), size, **more), body


def run(folder: os.PathLike[str], script: Callable[[House], Awaitable[None]], **settings: Any) -> None:
    """One play in a new house."""
    clock = trio.testing.MockClock()
    houses: list[House] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            house = House(folder, nursery, clock, **settings)
            houses.append(house)
            await house.rest()
            await script(house)
            nursery.cancel_scope.cancel()

    try:
        trio.run(main, clock=clock)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None
    finally:
        for house in houses:
            for shard in house.shards:
                shard.shard.crash()


__all__ = ["ALL", "Claimed", "Gateway", "House", "Job", "Record", "Said", "Worker", "append_call", "run"]
