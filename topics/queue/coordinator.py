"""The queue coordinator: every queue's leases, in rounds, until told to stop.

A queue is opened when somebody asks for it, and those with leases when the process starts: its config from the shard,
its table from the leases log. It is forgotten when nothing of it is left to know.

A round: take what gateways sent, then what shards sent, so that a change of a topic that a client has seen is known
before the client's next request; serve every queue that has something to do; send everything at once.

    crash of                 what happens
    this process             started again, it rebuilds each table; connections come back to their leases
    a gateway                its connections' leases are free at once
    a shard                  its queues answer 503 until it is back; tables stay

A reload that replaces a shard: requests for its queues wait here until it is back. One that replaces this process: what
was asked is answered, tables are written down, the next process goes on; gateways keep what comes meanwhile.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import trio

from topics import limits
from topics.actors import messages
from topics.actors.clock import Clock
from topics.actors.context import Context
from topics.actors.idle import Idle, spin_us
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.actors.rpc import Asks, Unavailable
from topics.errors import ApiError, CorruptData, client_left, topic_not_found
from topics.queue.dead_letters import Letters
from topics.queue.holds import Holds, Waiting
from topics.queue.lease_table import Lease
from topics.queue.loader import Opener, Opening
from topics.queue.queue import Queue
from topics.queue.tally import Tally
from topics.queue.waiters import Claimer, LinkCaller
from topics.shm.counters import Word
from topics.storage.config import owner_of_name

_SWEEP_MS = 1_000
_RETRY_S = 0.2
_RETIRE_S = 5.0  # for what is under way when a reload replaces this process
_LOOK_MS = 10


async def run(context: Context) -> None:
    coordinator = Coordinator(context)
    gc.collect()
    gc.freeze()
    async with trio.open_nursery() as nursery:
        coordinator.start(nursery)
        context.ready()
        await coordinator.serve()
        nursery.cancel_scope.cancel()


class _Claim:
    """A claim whose client may leave before it is served."""

    __slots__ = ("caller", "claimer", "held", "left", "queue")

    def __init__(self, caller: LinkCaller, *, held: bool) -> None:
        self.caller = caller
        self.held = held  # its shard is being replaced: nothing is looked at until it is back
        self.queue: Queue | None = None  # being opened
        self.claimer: Claimer | None = None
        self.left = False  # its client sends no more

    @property
    def waits(self) -> bool:
        """Whether jobs have yet to be leased for it."""
        return self.queue is None or (self.claimer is not None and self.queue.passes.has(self.claimer))

    def cancel(self) -> None:
        """Nobody waits for the answer."""
        if self.queue is not None and self.claimer is not None:
            self.queue.passes.cancel(self.claimer)

    def leave(self) -> bool:
        """Its client sends no more; True if it waited, and is answered so. A queue is opened quickly: then it is known
        whether there is a window to wait for."""
        self.left = True
        if not self.waits or (self.queue is None and not self.held):
            return False
        self.cancel()
        self.caller.fail(Op.CLAIM, client_left())
        return True


class Coordinator:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._shards = context.shards
        self._asks = Asks(shards=context.shards)
        self._asks.on_unasked = self._unasked
        self._letters = Letters(self._asks, shards=context.shards, log=context.log, on_done=context.bell.ring_always)
        self._gateways: dict[str, Link] = {}
        self._queues: dict[str, Queue] = {}
        self._openings: dict[str, Opening] = {}
        self._opener = Opener(self._asks, shards=context.shards)
        self._claims: dict[tuple[Link, int], _Claim] = {}  # those that may be cancelled, by gateway and correlation
        self._clocked: dict[Queue, None] = {}  # those for which something may be due without anybody asking
        self._streams: dict[int, tuple[Link, Queue | None]] = {}  # None: its queue is being opened
        self._dirty: dict[Queue, None] = {}
        self._away: set[Queue] = set()  # their shard has gone and is not back yet
        self._returning: set[Queue] = set()  # of those, the ones that somebody asks for
        self._deadline_ms = 0  # of the request that is being looked at
        self._sweep_ms = 0
        self._holds = Holds(self._asks, say_held=context.held, board=context.board)
        self._retire_by: float | None = None
        self._tally = Tally(context.row)
        self._stopping = False
        self._now_ms = Clock().now_ms
        # Numbers of leases never come again: they begin with the time.
        self._first_number = self._now_ms() << 20
        for peer, link in context.links.items():
            self._link_up(peer, link)
        context.on_link_up = self._link_up
        context.on_link_down = self._link_down
        context.on_stop = self._stop
        context.on_hold = self._hold
        context.on_retire = self._retire
        self._handlers: dict[int, Callable[[Any, Link, int], None]] = {
            Op.CLAIM: self._claim,
            Op.ACK: self._ack,
            Op.NACK: self._nack,
            Op.EXTEND: self._extend,
            Op.OPEN_WORK: self._open_work,
            Op.CLOSE_WORK: self._close_work,
            Op.COUNT_QUEUES: self._count,
            Op.WORK_SENT: self._work_sent,
        }

    # --- serving ---

    def start(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        for shard in range(self._shards):
            nursery.start_soon(self._open_used, shard)

    async def serve(self) -> None:
        context = self._context
        idle = Idle(
            context.bell,
            spin_us=spin_us(context.settings.spin_us, processes=len(context.board.rows())),
            has_work=self._has_work,
            next_deadline_ns=self._next_deadline_ns,
            row=context.row,
        )
        busy_ns = 0

        def tasks() -> bool:  # that wait for their turn
            return bool(self._openings) or self._letters.under_way > 0

        while not self._stopping and not self._has_retired():
            await idle.wait(expecting=time.monotonic_ns() - busy_ns < 1_000_000, linger=not tasks())
            if self._round():
                busy_ns = time.monotonic_ns()
        self._finish()
        idle.close()

    def _has_work(self) -> bool:
        return (
            bool(self._dirty) or self._asks.has_answers() or any([link.has_work() for link in self._gateways.values()])
        )

    def _next_deadline_ns(self) -> int | None:
        due = [at for queue in self._clocked if not self._is_away(queue) and (at := queue.next_due_ms()) is not None]
        if self._retire_by is not None or self._holds.busy:
            due.append(self._now_ms() + _LOOK_MS)
        if self._queues:
            due.append(self._sweep_ms)
        if not due:
            return None
        return time.monotonic_ns() + max(0, min(due) - self._now_ms()) * 1_000_000

    def _round(self) -> bool:
        received = [(link, link.drain()) for link in list(self._gateways.values())]
        self._asks.drain()
        now_ms = time.monotonic_ns() // 1_000_000
        handled = False
        for link, batch in received:
            if self._context.log.debugging:
                self._context.trace(link, batch)
            for message in batch:
                handled = True
                self._handle(message, link, now_ms)
        now = self._now_ms()
        for queue in self._clocked:
            if (due := queue.next_due_ms()) is not None and due <= now:
                self._dirty[queue] = None
        self._serve_dirty()
        if now >= self._sweep_ms:
            self._sweep_ms = now + _SWEEP_MS
            self._sweep(now)
        self._end_holds_of_fallen()
        self._asks.flush()
        for link in self._gateways.values():
            link.flush()
        self._holds.step()
        return handled

    def _serve_dirty(self) -> None:
        for _ in range(4):  # serving may make more to do; the next round takes up what is left then
            dirty, self._dirty = self._dirty, {}
            if not dirty:
                return
            for queue in dirty:
                if self._queues.get(queue.topic) is queue and not self._is_away(queue):
                    queue.step()
                    queue.flush()
                    if queue.timed:
                        self._clocked[queue] = None
                    else:
                        self._clocked.pop(queue, None)
            # Before the answers leave: what a client has been told is counted.
            self._tally.look([queue for queue in dirty if self._queues.get(queue.topic) is queue])

    def _handle(self, message: bytes, link: Link, now_ms: int) -> None:
        op, _, correlation, deadline_ms, head, _ = messages.unpack(message)
        if op == Op.CANCEL:
            if (claim := self._claims.pop((link, correlation), None)) is not None:
                claim.cancel()
            return
        if op == Op.END_POLL:
            if (claim := self._claims.get((link, correlation))) is not None and claim.leave():
                del self._claims[link, correlation]
            return
        if deadline_ms and deadline_ms < now_ms:
            return
        self._deadline_ms = deadline_ms
        self._handlers[op](messages.decode_request(op, head), link, correlation)

    # --- what gateways ask ---

    def _with(self, topic: str, then: Callable[[Queue], None], failed: Callable[[ApiError], None]) -> None:
        """Go on with the queue when it is known."""
        if (shard := owner_of_name(topic, self._shards)) in self._holds:
            self._holds.wait(shard, Waiting(topic, self._deadline_ms, then, failed))
            return
        queue = self._queues.get(topic)
        if queue is not None:
            if queue in self._away:
                failed(_shard_away(queue.shard))
                return
            queue.used_ms = self._now_ms()
            then(queue)
            return
        opening = self._openings.get(topic)
        if opening is None:
            if not self._asks.linked(shard):
                failed(_shard_away(shard))
                return
            opening = self._openings[topic] = Opening()
            self._nursery.start_soon(self._open, topic, opening)
        opening.waiting.append((then, failed))

    def _claim(self, request: messages.Claim, link: Link, correlation: int) -> None:
        caller = LinkCaller(link, correlation)

        key = (link, correlation)
        deadline_ms = self._deadline_ms

        def claim(queue: Queue) -> None:
            if key not in self._claims:
                return
            if deadline_ms and deadline_ms < time.monotonic_ns() // 1_000_000:
                del self._claims[key]  # opening took so long that nobody waits any more
                return
            if not queue.config.claim_jitter_ms:
                del self._claims[key]
                queue.claim(caller, request)
            elif waiting.left:
                failed(client_left())
            else:
                waiting.queue, waiting.claimer = queue, queue.claim(caller, request)

        def failed(error: ApiError) -> None:
            self._claims.pop(key, None)
            caller.fail(Op.CLAIM, error)

        waiting = self._claims[key] = _Claim(caller, held=owner_of_name(request.topic, self._shards) in self._holds)
        self._with(request.topic, claim, failed)

    def _ack(self, request: messages.Ack, link: Link, correlation: int) -> None:
        caller = LinkCaller(link, correlation)
        self._with(request.topic, lambda queue: queue.ack(caller, request), lambda error: caller.fail(Op.ACK, error))

    def _nack(self, request: messages.Nack, link: Link, correlation: int) -> None:
        caller = LinkCaller(link, correlation)
        self._with(request.topic, lambda queue: queue.nack(caller, request), lambda error: caller.fail(Op.NACK, error))

    def _extend(self, request: messages.Extend, link: Link, correlation: int) -> None:
        caller = LinkCaller(link, correlation)
        self._with(
            request.topic, lambda queue: queue.extend(caller, request), lambda error: caller.fail(Op.EXTEND, error)
        )

    def _open_work(self, request: messages.OpenWork, link: Link, correlation: int) -> None:
        caller = LinkCaller(link, correlation)

        def open_work(queue: Queue) -> None:
            if not request.stream:  # it only wants to know whether it could
                caller.answer(Op.OPEN_WORK, messages.WorkOpened())
            elif request.stream in self._streams:
                self._streams[request.stream] = (link, queue)
                queue.open_work(caller, request)

        def failed(error: ApiError) -> None:
            self._streams.pop(request.stream, None)
            caller.fail(Op.OPEN_WORK, error)

        if request.stream:
            self._streams[request.stream] = (link, None)
        self._with(request.topic, open_work, failed)

    def _work_sent(self, request: messages.WorkSent, link: Link, correlation: int) -> None:
        _, queue = self._streams.get(request.stream, (None, None))
        if queue is not None:
            queue.work_sent(request.stream, request.sent)

    def _close_work(self, request: messages.CloseWork, link: Link, correlation: int) -> None:
        self._close_stream(request.stream)

    def _close_stream(self, stream: int) -> None:
        _, queue = self._streams.pop(stream, (None, None))
        if queue is not None:
            queue.close_work(stream)

    def _count(self, request: messages.CountQueues, link: Link, correlation: int) -> None:
        caller = LinkCaller(link, correlation)
        counts: list[messages.QueueCounts | None] = [None] * len(request.rows)
        left = len(request.rows)

        def counted(at: int, value: messages.QueueCounts | None) -> None:
            nonlocal left
            counts[at] = value
            left -= 1
            if left == 0:
                caller.answer(Op.COUNT_QUEUES, messages.QueuesCounted(counts))

        for at, row in enumerate(request.rows):

            def count(queue: Queue, at: int = at, row: messages.QueueRow = row) -> None:
                queue.count(row, lambda value: counted(at, value))

            def failed(error: ApiError, at: int = at) -> None:
                counted(at, None)

            self._with(row.topic, count, failed)

    # --- opening queues ---

    async def _open(self, topic: str, opening: Opening) -> None:
        try:
            while (queue := await self._load(topic)).ended:
                pass  # it was deleted meanwhile, and perhaps made again
        except (ApiError, Unavailable, CorruptData) as error:
            del self._openings[topic]
            failure = error if isinstance(error, ApiError) else _shard_away(owner_of_name(topic, self._shards))
            if isinstance(error, CorruptData):
                failure = ApiError("internal", f"the leases log is damaged: {error}")
            for _, failed in opening.waiting:
                failed(failure)
        else:
            self._queues[topic] = queue
            del self._openings[topic]
            if queue.leases.streams():
                self._nursery.start_soon(self._release_orphans, queue)
            for then, _ in opening.waiting:
                then(queue)
            self._dirty[queue] = None
        self._context.bell.ring_always()

    async def _load(self, topic: str) -> Queue:
        shard = owner_of_name(topic, self._shards)
        queue = Queue(
            topic,
            shard=shard,
            asks=self._asks,
            now_ms=self._now_ms,
            first_number=self._first_number,
            backlog_bytes=self._context.settings.stream_backlog_bytes,
            on_dirty=self._make_dirty,
            on_gone=self._queue_gone,
            on_worn=self._worn,
        )
        self._first_number += 1 << 20  # each queue has its own; the time moves on faster than this is used up
        await self._opener.load(queue)
        return queue

    async def _open_used(self, shard: int) -> None:
        """Open the queues that have leases: some may have to go on by themselves, and counters show them."""
        while True:
            await self._asks.wait_linked(shard)
            try:
                listed, _ = await self._asks.ask(shard, Op.LIST_QUEUES, messages.ListQueues())
                break
            except (ApiError, Unavailable):
                await trio.sleep(_RETRY_S)
        for topic in listed.topics:
            if topic not in self._queues and topic not in self._openings:
                opening = self._openings[topic] = Opening()
                await self._open(topic, opening)

    async def _release_orphans(self, queue: Queue) -> None:
        """Connections that were served by the process before us come back at once, or not at all."""
        await trio.sleep(limits.ORPHAN_MS / 1_000)
        for stream in queue.leases.streams():
            if stream not in queue.workers:
                queue.release(stream)
        self._context.bell.ring_always()

    # --- reloads ---

    def _is_away(self, queue: Queue) -> bool:
        return queue in self._away or queue.shard in self._holds

    def _hold(self, peer: str) -> None:
        """A shard is about to be replaced: its queues rest until it is back."""
        if peer.startswith("shard-"):
            self._holds.hold(int(peer.removeprefix("shard-")))
            self._context.bell.ring_always()
        else:
            self._context.held(peer)

    def _end_hold(self, shard: int) -> None:
        """It is back, with all its queues: go on with whoever waited."""
        if shard not in self._holds or not self._asks.linked(shard):
            return
        if any(queue.shard == shard for queue in self._away):
            return
        for waiting in self._holds.end(shard):
            self._deadline_ms = waiting.deadline_ms
            self._with(waiting.topic, waiting.then, waiting.failed)
        for queue in self._queues.values():
            if queue.shard == shard:
                self._dirty[queue] = None

    def _end_holds_of_fallen(self, *, gone: int | None = None) -> None:
        """Who should have come instead of a shard has fallen: its queues answer as those of any shard that is down."""
        for shard in self._holds.fallen(gone=gone):
            error = _shard_away(shard)
            for queue in [queue for queue in self._away if queue.shard == shard]:
                queue.shard_gone(error)
            for waiting in self._holds.give_up(shard):
                waiting.failed(error)

    def _retire(self, _: object) -> None:
        self._retire_by = trio.current_time() + _RETIRE_S
        for queue in self._queues.values():
            queue.passes.retiring = True
        self._context.bell.ring_always()

    def _has_retired(self) -> bool:
        """Nobody waits for an answer of ours, or for too long."""
        if self._retire_by is None:
            return False
        if trio.current_time() > self._retire_by:
            return True
        links = self._gateways.values()
        asked = self._openings or self._dirty or any([link.has_work() or link.writer.outbox_bytes for link in links])
        pending = any([self._asks.pending(shard) for shard in range(self._shards)])
        return not (asked or pending or any([queue.is_asked for queue in self._queues.values()]))

    # --- what happens to queues ---

    def _make_dirty(self, queue: Queue) -> None:
        self._dirty[queue] = None

    def _worn(self, queue: Queue, moving: list[Lease]) -> None:
        if self._letters.add(queue, moving):
            self._nursery.start_soon(self._letters.run, queue)

    def _queue_gone(self, queue: Queue) -> None:
        self._end_queue(queue, topic_not_found(queue.topic))

    def _end_queue(self, queue: Queue, error: ApiError) -> None:
        if queue.ended:
            return
        if self._queues.get(queue.topic) is queue:
            del self._queues[queue.topic]
        self._away.discard(queue)
        for stream, (_, of) in list(self._streams.items()):
            if of is queue:
                del self._streams[stream]
        queue.end(error)
        self._letters.look(queue)
        self._forgotten(queue)

    def _forgotten(self, queue: Queue) -> None:
        self._tally.forget(queue)
        self._opener.forget(queue)
        self._clocked.pop(queue, None)

    def _unasked(self, shard: int, message: bytes) -> None:
        op = message[0]
        _, correlation = messages.unpack_correlation(message)
        if op == Op.HEAD_MOVED:
            for known in self._clocked:
                if known.shard == shard and known.following == correlation:
                    known.head_moved()
                    return
        elif (queue := self._opener.watched(shard, correlation)) is not None:
            if op == Op.QUEUE_CHANGED:
                queue.configured(messages.decode_answer(message)[0].config)
                self._letters.look(queue)
            elif op == Op.JOBS_REMOVED:
                queue.removed(messages.decode_answer(message)[0].removals)
            elif op == Op.TOPIC_GONE:
                self._queue_gone(queue)

    def _sweep(self, now: int) -> None:
        for queue in list(self._queues.values()):
            if queue.idle and now - queue.used_ms > limits.QUEUE_IDLE_MS and not self._is_away(queue):
                if queue.journal.has_news:
                    queue.checkpoint()
                del self._queues[queue.topic]
                self._forgotten(queue)
        self._claims = {key: claim for key, claim in self._claims.items() if claim.waits}
        words = self._context.row.words
        words[Word.QUEUES] = len(self._queues)
        words[Word.STREAMS] = len(self._streams)
        self._tally.look(self._queues.values())  # leases have ended by time

    # --- links ---

    def _link_up(self, peer: str, link: Link) -> None:
        if peer.startswith("shard-"):
            shard = int(peer.removeprefix("shard-"))
            self._asks.link_up(shard, link)
            self._holds.came(shard)
            for queue in [queue for queue in self._away - self._returning if queue.shard == shard]:
                self._returning.add(queue)
                self._nursery.start_soon(self._come_back, queue)
            self._end_hold(shard)
        else:
            self._gateways[peer] = link

    async def _come_back(self, queue: Queue) -> None:
        """Its shard is there again; its table is as it was."""
        while queue in self._away:
            await self._asks.wait_linked(queue.shard)
            try:
                await self._opener.attach(queue)
            except ApiError as error:
                if error.code != "shard_unavailable":
                    self._end_queue(queue, error)
                    break
                await trio.sleep(_RETRY_S)
            except Unavailable:
                continue
            else:
                self._away.discard(queue)
                self._dirty[queue] = None
                self._letters.look(queue)
        self._returning.discard(queue)
        self._end_hold(queue.shard)
        self._context.bell.ring_always()

    def _link_down(self, peer: str) -> None:
        if peer.startswith("shard-"):
            shard = int(peer.removeprefix("shard-"))
            self._opener.shard_gone(shard)
            away = [queue for queue in self._queues.values() if queue.shard == shard]
            self._away.update(away)
            self._asks.link_down(shard)
            for queue in away:
                queue.shard_gone(None if shard in self._holds else _shard_away(shard))
            self._end_holds_of_fallen(gone=shard)
        else:
            link = self._gateways.pop(peer, None)
            for stream in [stream for stream, (of, _) in self._streams.items() if of is link]:
                self._close_stream(stream)
            for key in [key for key in self._claims if key[0] is link]:
                self._claims.pop(key).cancel()
        self._context.bell.ring_always()

    def _stop(self) -> None:
        self._stopping = True
        self._context.bell.ring_always()

    def _finish(self) -> None:
        """Gateways have stopped: nobody asks any more. Tables are written down, so that the next start is short."""
        self._round()
        for queue in self._queues.values():
            if queue.journal.has_news and queue not in self._away:
                queue.checkpoint()
        self._asks.flush()


def _shard_away(shard: int) -> ApiError:
    return ApiError(
        "shard_unavailable",
        f"shard-{shard}, which holds this queue, is not serving at the moment; nothing was done. Retry",
        {"shard": shard},
        retry_after_s=1,
    )
