"""One queue: who waits for jobs, who holds some, and the pass that brings them together. No IO of its own.

    claim, /work ──► waiting ──► a pass (dispatch.py) ──► leased ──► answered
    ack ──► ending ──► COMPLETE_JOBS (one for a round) ──► answered
    nack, extend ──► the table ──► answered

A crash of this process loses nothing but what was on its way: the table is in the log (lease_log.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from topics.actors import messages
from topics.actors.messages import Op
from topics.actors.rpc import Asks, Unavailable, as_api_error, is_gone
from topics.errors import ApiError
from topics.queue.counts import Counts
from topics.queue.dispatch import Passes
from topics.queue.lease_log import Journal
from topics.queue.lease_table import Lease, Leases
from topics.queue.repeats import Repeats
from topics.queue.waiters import Caller, Claimer, Worker
from topics.storage.config import TopicConfig
from topics.storage.leases import LeaseEvent


class Queue:
    def __init__(
        self,
        topic: str,
        *,
        shard: int,
        asks: Asks,
        now_ms: Callable[[], int],
        first_number: int,
        backlog_bytes: int,
        on_dirty: Callable[[Queue], None],
        on_gone: Callable[[Queue], None],
        on_worn: Callable[[Queue, list[Lease]], None],
    ) -> None:
        self.topic = topic
        self.shard = shard
        self.topic_id = 0
        self.config = TopicConfig(type="queue")
        self.leases = Leases(first_number=first_number)
        self.journal = Journal(asks, topic, shard=shard)
        self.counts = Counts(asks, self.leases, topic, shard=shard, on_gone=self._compared)
        self.passes = Passes(self, backlog_bytes=backlog_bytes)
        self.repeats = Repeats(self)
        self.dead_lettered = 0
        self.claimed = self.acked = self.moved = 0  # jobs, since this process started
        self.workers: dict[int, Worker] = {}
        self.used_ms = now_ms()
        self.ended = False
        self.following = 0  # the correlation under which the shard tells of new jobs
        self.asks = asks
        self.now_ms = now_ms
        self._on_dirty = on_dirty
        self._on_gone = on_gone
        self._on_worn = on_worn
        self._unsure: set[int] = set()  # jobs moved away, perhaps: the shard died before it said so
        self._leaving = 0  # jobs whose delete is on its way because they are with the dead letters
        self._acks: list[tuple[Caller, list[Lease], list[int]]] = []

    def touch(self) -> None:
        """There is something to do at the end of this round."""
        self._on_dirty(self)

    def lost(self) -> None:
        """A shard says that there is no such topic."""
        self._on_gone(self)

    def worn(self, leases: list[Lease]) -> None:
        self._on_worn(self, leases)

    # --- knowing the topic ---

    def opened(self, opened: messages.QueueOpened) -> None:
        """The shard is there; if again, what was on its way to the log when it went away has to be said again."""
        again = self.topic_id != 0
        self.topic_id = self.journal.topic_id = self.counts.topic_id = opened.topic_id
        self.counts.forget()
        self.passes.fresh = True
        self.following = 0
        self.configured(opened.config)
        if again and (len(self.leases) or self.journal.has_news):
            self.counts.find_gone(list(self._unsure), self._sure)
            self.counts.compare(opened.removals, self.checkpoint, lambda error: None)

    def _sure(self, gone: list[int]) -> None:
        self.gone(gone)
        self._unsure.clear()

    def loaded(self, removals: int) -> None:
        """The table is known; jobs may have gone while nobody looked after it."""
        if len(self.leases):
            self.counts.compare(removals, lambda: None, lambda error: None)

    def replay(self, event: LeaseEvent) -> None:
        self.leases.replay(event)
        self.repeats.replay(event)
        self.journal.replayed(event)
        if event.event == "checkpoint":
            self.dead_lettered = event.dead_lettered
        elif event.event == "dead_lettered":
            self.dead_lettered += len(event.seqs)

    def configured(self, config: TopicConfig) -> None:
        self.config = config
        self.journal.durable = config.leases_durable
        self.touch()

    def head_moved(self) -> None:
        self.passes.fresh = True
        self.touch()

    def shard_gone(self, error: ApiError | None) -> None:
        """None: it will be back in a moment, and whoever waits goes on waiting."""
        self.following = 0
        if error is not None:
            self.passes.refuse_all(error)

    @property
    def idle(self) -> bool:
        return not (len(self.leases) or self.workers or self._acks) and self.passes.idle and self.repeats.idle

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._acks) or not (self.passes.idle and self.repeats.idle) or self.journal.is_awaited

    @property
    def timed(self) -> bool:
        """Whether something may be due without anybody asking."""
        return bool(self.passes.window_ms or self.workers or self.journal.due_ms or self.passes.held_due_ms)

    def end(self, error: ApiError) -> None:
        """The topic is gone, or no queue any more."""
        self.ended = True
        self.passes.refuse_all(error)
        acks, self._acks = self._acks, []
        for caller, _, _ in acks:
            caller.fail(Op.ACK, error)
        self.journal.fail(error)
        for worker in self.workers.values():
            worker.gone = True
            worker.caller.answer(Op.WORK_ENDED, messages.WorkEnded(error.status, error.message))
        self.workers = {}

    # --- what gateways ask ---

    def claim(self, caller: Caller, request: messages.Claim) -> Claimer:
        claimer = Claimer(caller, request)
        if claimer.key:
            self._advance()
            self.repeats.begin(claimer)
        else:
            self.passes.add(claimer)
        self.touch()
        return claimer

    def ack(self, caller: Caller, request: messages.Ack) -> None:
        held = self.leases.ack(request.node, request.seqs, request.leases)
        self._acks.append((caller, held, _skipped(request.seqs, held)))
        self.touch()

    def nack(self, caller: Caller, request: messages.Nack) -> None:
        until_ms = self.now_ms() + request.delay_ms if request.delay_ms else None
        released = self.leases.nack(request.node, request.seqs, request.leases, until_ms=until_ms)
        skipped = _skipped(request.seqs, released)
        self.journal.record("released", request.node, released, deadline=until_ms or 0, reason="nack")

        def failed(error: ApiError) -> None:
            caller.fail(Op.NACK, error)

        def counted(live: int) -> None:
            self._advance()
            ready = self.counts.ready(live)
            caller.answer(Op.NACK, messages.Nacked(skipped, ready, self.leases.in_flight))

        def answer() -> None:
            self.counts.ask(counted, failed)

        self.journal.when_logged(answer, failed, changed=bool(released))
        self.touch()

    def extend(self, caller: Caller, request: messages.Extend) -> None:
        deadline = self.now_ms() + request.lease_ms
        extended = self.leases.extend(request.node, request.seqs, request.leases, deadline_ms=deadline)
        self.journal.record("extended", request.node, extended, deadline=deadline)
        answer = messages.Extended(_skipped(request.seqs, extended), deadline)
        self.journal.when_logged(
            lambda: caller.answer(Op.EXTEND, answer),
            lambda error: caller.fail(Op.EXTEND, error),
            changed=bool(extended),
        )
        self.touch()

    def count(self, row: messages.QueueRow, then: Callable[[messages.QueueCounts | None], None]) -> None:
        """Its counters, from what a shard said of the topic a moment ago."""
        if row.topic_id != self.topic_id:
            then(None)
            return
        self._advance()

        self.counts.compare(
            row.removals,
            lambda: then(self.counts.of(row, dead_lettered=self.dead_lettered)),
            lambda error: then(None),
        )

    # --- connections ---

    def open_work(self, caller: Caller, request: messages.OpenWork) -> None:
        self.workers[request.stream] = Worker(caller, request)
        lost = self.leases.disconnect(request.stream, after=request.last_lease)
        self.journal.record("released", request.node, lost, reason="disconnect")  # leased, but never sent
        caller.answer(Op.OPEN_WORK, messages.WorkOpened())
        self.passes.fresh = True
        self.touch()

    def work_sent(self, stream: int, sent: int) -> None:
        if (worker := self.workers.get(stream)) is not None:
            worker.sent = sent
            self.touch()

    def removed(self, removals: int) -> None:
        """Jobs went otherwise than by an ack; connections may have held some."""
        if self.workers:
            self.counts.compare(removals, lambda: None, lambda error: None)

    def close_work(self, stream: int) -> None:
        worker = self.workers.pop(stream, None)
        if worker is not None:
            worker.gone = True
        self.release(stream)

    def release(self, stream: int) -> None:
        """The connection is gone: what it holds is free."""
        released = self.leases.disconnect(stream)
        for node in {lease.node for lease in released}:
            of_node = [lease for lease in released if lease.node == node]
            self.journal.record("released", node, of_node, reason="disconnect")
        self.touch()

    def _follow(self) -> None:
        """Connections want to know when there is something new; polls ask by themselves."""
        if self.workers and not self.following:
            head = messages.FollowHead(self.topic, self.topic_id)
            self.following = self.asks.call(self.shard, Op.FOLLOW_HEAD, head, self._followed)
        elif not self.workers and self.following:
            self.asks.unfollow(self.shard, self.following)
            self.following = 0

    def _followed(self, following: messages.Following, body: bytes | memoryview, error: Exception | None) -> None:
        if error is None:
            self.passes.fresh = True
            self.touch()
        else:
            self.following = 0

    # --- passes ---

    def next_due_ms(self) -> int | None:
        """When something happens by itself: a cohort's window ends, a connection can be given a job again, or what was
        recorded has waited for company long enough."""
        times = [self.passes.window_ms, self.journal.due_ms, self.passes.held_due_ms]
        if self.workers:
            times += [self.leases.next_due_ms() or 0, self.passes.pause_ms, self.passes.missed_ms]
        return min(filter(None, times), default=None)

    def _advance(self) -> None:
        if self.leases.advance(self.now_ms()) and self.workers:
            self.touch()  # whoever looked took the news from those who wait for it

    def step(self) -> None:
        """Serve who waits."""
        self._follow()
        self.passes.step()

    # --- ends ---

    def flush(self) -> None:
        """At the end of a round: acks go out as one delete, events as one batch."""
        acks, self._acks = self._acks, []
        ending = [lease for _, held, _ in acks for lease in held]
        if ending:
            self.journal.flush_awaited()
            for _, held, _ in acks:
                if held:
                    self.journal.record("acked", held[0].node, held)
            self._complete(ending, lambda completed, error: self._acked(acks, completed, error))
        else:
            for caller, _, skipped in acks:
                self._answer_ack(caller, skipped)
        self.journal.step(self.now_ms())
        if self.journal.checkpoint_is_due(len(self.leases)) and not self._unsure:
            self.checkpoint()

    def checkpoint(self) -> None:
        # Moves that are under way are in the log before this; if they fail, another one follows.
        self.journal.checkpoint(
            self.leases.checkpoint(),
            dead_lettered=self.dead_lettered + self._leaving,
            keys=self.repeats.checkpoint() if len(self.repeats) else {},
        )

    def _complete(
        self, ending: list[Lease], then: Callable[[messages.JobsCompleted | None, Exception | None], None]
    ) -> None:
        """Delete jobs at the shard, together with the events that say why."""
        seqs = [lease.seq for lease in ending]

        def completed(answer: Any, _: bytes | memoryview, error: Exception | None) -> None:
            if error is None:
                self.leases.remove(seqs)
            elif isinstance(error, ApiError) and is_gone(error):
                self.lost()
            self.touch()
            then(answer, error)

        head, body = self.journal.with_delete(seqs)
        self.asks.call(self.shard, Op.COMPLETE_JOBS, head, completed, body)

    def _acked(
        self,
        acks: list[tuple[Caller, list[Lease], list[int]]],
        completed: messages.JobsCompleted | None,
        error: Exception | None,
    ) -> None:
        if completed is None:
            for caller, held, skipped in acks:
                self.leases.undo(lease.seq for lease in held)
                if held:
                    caller.fail(Op.ACK, as_api_error(error))
                else:
                    self._answer_ack(caller, skipped)
            return
        done = completed
        self.acked += sum(len(held) for _, held, _ in acks)

        def answer() -> None:
            ready = self.counts.ready(done.live)
            for caller, held, skipped in acks:
                fsync_us = done.fsync_us if held else 0
                caller.answer(Op.ACK, messages.Acked(skipped, ready, self.leases.in_flight, fsync_us))

        self.counts.compare(done.removals, answer, lambda error: answer())

    def _answer_ack(self, caller: Caller, skipped: list[int]) -> None:
        def counted(live: int) -> None:
            self._advance()
            ready = self.counts.ready(live)
            caller.answer(Op.ACK, messages.Acked(skipped, ready, self.leases.in_flight, 0))

        self.counts.ask(counted, lambda error: caller.fail(Op.ACK, error))

    # --- dead letters ---

    def is_worn(self, lease: Lease) -> bool:
        config = self.config
        return bool(config.dead_letter and config.max_deliveries and lease.deliveries >= config.max_deliveries)

    def deliver_again(self, leases: Iterable[Lease]) -> None:
        """The queue has been told to be more patient."""
        self.leases.undo((lease.seq for lease in leases), until_ms=self.now_ms())
        self.touch()

    def move_away(self, moving: list[Lease], then: Callable[[Exception | None], None]) -> None:
        """These are with the dead letters: they leave here."""
        self.journal.flush_awaited()
        for lease in moving:
            self.journal.record("dead_lettered", lease.node, [lease])

        def completed(_: messages.JobsCompleted | None, error: Exception | None) -> None:
            self._leaving -= len(moving)
            if error is None:
                self.dead_lettered += len(moving)
                self.moved += len(moving)
            elif isinstance(error, Unavailable):
                self._unsure.update(lease.seq for lease in moving)
            else:
                self.checkpoint()
            then(error)

        self._leaving += len(moving)
        self._complete(moving, completed)

    def gone(self, seqs: list[int]) -> None:
        """Somebody removed these; perhaps we did, and were not told."""
        self.leases.remove(seqs)
        if moved := self._unsure.intersection(seqs):
            self._unsure -= moved
            self.dead_lettered += len(moved)

    def _compared(self, gone: list[int]) -> None:
        self.gone(gone)
        self.touch()


def _skipped(seqs: list[int], changed: list[Lease]) -> list[int]:
    """What was asked for and did not happen; a seq that stands twice happened once."""
    if len(changed) == len(seqs):
        return []
    left = {lease.seq for lease in changed}
    skipped = []
    for seq in seqs:
        if seq in left:
            left.remove(seq)
        else:
            skipped.append(seq)
    return skipped
