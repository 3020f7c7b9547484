"""One queue: who waits for jobs, who holds some, and the pass that brings them together. No IO of its own.

    claim, /work ──► waiting ──► TAKE_JOBS ──► divided, leased ──► answered
    ack ──► ending ──► COMPLETE_JOBS (one for a round) ──► answered
    nack, extend ──► the table ──► answered

One pass at a time: whoever comes while the shard is asked is served by the next one. A claim is answered with nothing
only if nothing is left.

A crash of this process loses nothing but what was on its way: the table is in the log (journal.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.asks import Asks, Unavailable, as_api_error, is_gone
from topics.actors.messages import Op
from topics.errors import ApiError, throttled_by
from topics.queue import division
from topics.queue.claimers import Caller, Claimer, Member, Taking, Worker
from topics.queue.counts import Counts
from topics.queue.journal import Journal
from topics.queue.leases import Lease, Leases, State
from topics.storage.config import TopicConfig
from topics.storage.leases import LeaseEvent

_PAUSE_MS = 200

Share = tuple[Member, messages.Claimed, bytes]


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
        self.dead_lettered = 0
        self.claimed = self.acked = self.moved = 0  # jobs, since this process started
        self.workers: dict[int, Worker] = {}
        self.used_ms = now_ms()
        self.ended = False
        self.following = 0  # the correlation under which the shard tells of new jobs
        self._asks = asks
        self._now_ms = now_ms
        self._backlog_bytes = backlog_bytes  # that a connection may have before it is given more
        self._on_dirty = on_dirty
        self._on_gone = on_gone
        self._on_worn = on_worn
        self._claimers: list[Claimer] = []
        self._taking: Taking | None = None
        self._window_ms = 0  # when the cohort that gathers is served; 0: none gathers
        self._pause_ms = 0  # connections are not served before this: the shard refused
        self._fresh = True  # whether the log may hold jobs behind the cursor
        self._turn = 0
        self._unsure: set[int] = set()  # jobs moved away, perhaps: the shard died before it said so
        self._leaving = 0  # jobs whose delete is on its way because they are with the dead letters
        self._acks: list[tuple[Caller, list[Lease], list[int]]] = []

    # --- knowing the topic ---

    def opened(self, opened: messages.QueueOpened) -> None:
        """The shard is there; if again, what was on its way to the log when it went away has to be said again."""
        again = self.topic_id != 0
        self.topic_id = self.journal.topic_id = self.counts.topic_id = opened.topic_id
        self.counts.forget()
        self._fresh = True
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
        self.journal.replayed(event)
        if event.event == "checkpoint":
            self.dead_lettered = event.dead_lettered
        elif event.event == "dead_lettered":
            self.dead_lettered += len(event.seqs)

    def configured(self, config: TopicConfig) -> None:
        self.config = config
        self.journal.durable = config.leases_durable
        self._on_dirty(self)

    def head_moved(self) -> None:
        self._fresh = True
        self._on_dirty(self)

    def shard_gone(self, error: ApiError) -> None:
        self.following = 0
        claimers, self._claimers = self._claimers, []
        _refuse(claimers, error)

    @property
    def idle(self) -> bool:
        return not (len(self.leases) or self.workers or self._claimers or self._taking or self._acks)

    @property
    def timed(self) -> bool:
        """Whether something may be due without anybody asking."""
        return bool(self._window_ms or self.workers or self.journal.due_ms)

    def end(self, error: ApiError) -> None:
        """The topic is gone, or no queue any more."""
        self.ended = True
        claimers, self._claimers = self._claimers, []
        _refuse(claimers, error)
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
        self._claimers.append(claimer)
        self._on_dirty(self)
        return claimer

    def cancel(self, claimer: Claimer) -> None:
        claimer.gone = True
        if claimer in self._claimers:
            self._claimers.remove(claimer)

    def waits(self, claimer: Claimer) -> bool:
        return claimer in self._claimers or (self._taking is not None and claimer in self._taking.cohort)

    def ack(self, caller: Caller, request: messages.Ack) -> None:
        held = self.leases.ack(request.node, request.seqs, request.leases)
        self._acks.append((caller, held, _skipped(request.seqs, held)))
        self._on_dirty(self)

    def nack(self, caller: Caller, request: messages.Nack) -> None:
        until_ms = self._now_ms() + request.delay_ms if request.delay_ms else None
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
        self._on_dirty(self)

    def extend(self, caller: Caller, request: messages.Extend) -> None:
        deadline = self._now_ms() + request.lease_ms
        extended = self.leases.extend(request.node, request.seqs, request.leases, deadline_ms=deadline)
        self.journal.record("extended", request.node, extended, deadline=deadline)
        answer = messages.Extended(_skipped(request.seqs, extended), deadline)
        self.journal.when_logged(
            lambda: caller.answer(Op.EXTEND, answer),
            lambda error: caller.fail(Op.EXTEND, error),
            changed=bool(extended),
        )
        self._on_dirty(self)

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
        self._fresh = True
        self._on_dirty(self)

    def work_sent(self, stream: int, sent: int) -> None:
        if (worker := self.workers.get(stream)) is not None:
            worker.sent = sent
            self._on_dirty(self)

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
        self._on_dirty(self)

    def _follow(self) -> None:
        """Connections want to know when there is something new; polls ask by themselves."""
        if self.workers and not self.following:
            head = messages.FollowHead(self.topic, self.topic_id)
            self.following = self._asks.call(self.shard, Op.FOLLOW_HEAD, head, self._followed)
        elif not self.workers and self.following:
            self._asks.unfollow(self.shard, self.following)
            self.following = 0

    def _followed(self, following: messages.Following, body: bytes | memoryview, error: Exception | None) -> None:
        if error is None:
            self._fresh = True
            self._on_dirty(self)
        else:
            self.following = 0

    # --- passes ---

    def next_due_ms(self) -> int | None:
        """When something happens by itself: a cohort's window ends, a connection can be given a job again, or what was
        recorded has waited for company long enough."""
        times = [self._window_ms, self.journal.due_ms]
        if self.workers:
            times += [self.leases.next_due_ms() or 0, self._pause_ms]
        return min(filter(None, times), default=None)

    def _advance(self) -> None:
        if self.leases.advance(self._now_ms()) and self.workers:
            self._on_dirty(self)  # whoever looked took the news from those who wait for it

    def step(self) -> None:
        """Serve who waits, if there is anything to serve and the shard is not being asked already."""
        now = self._now_ms()
        leases = self.leases
        leases.advance(now)
        if now >= self._pause_ms:
            self._pause_ms = 0
        self._follow()
        if self._taking is not None:
            return
        wanting: list[Member] = [*self._claimers]
        if (leases.free or self._fresh) and not self._pause_ms:
            wanting += [worker for worker in self.workers.values() if self._room(worker)]
        if not wanting:
            self._window_ms = 0
            return
        jitter_ms = self.config.claim_jitter_ms
        if jitter_ms and now < (self._window_ms or now + jitter_ms):
            self._window_ms = self._window_ms or now + jitter_ms
            return
        self._window_ms = 0
        self._claimers = []
        # Polls alone are served as they came; connections all want the same job, so there it has to be divided.
        self._take(wanting, evenly=jitter_ms > 0 or any([isinstance(member, Worker) for member in wanting]))

    def _room(self, worker: Worker) -> int:
        """How many more jobs a connection wants."""
        if worker.unsent >= self._backlog_bytes:
            return 0
        return max(0, worker.max - self.leases.of_stream(worker.stream))

    def _budget(self, member: Member) -> int:
        """Bytes that it may be given at once. A connection gets no more than its gateway should have to keep."""
        return limits.CLAIM_BYTES if isinstance(member, Claimer) else self._backlog_bytes - member.unsent

    def _take(self, cohort: list[Member], *, evenly: bool) -> None:
        wanted = [member.max if isinstance(member, Claimer) else self._room(member) for member in cohort]
        total = sum(wanted)
        max_deliveries = self.config.max_deliveries if self.config.dead_letter else 0
        picked, worn = self.leases.pick(total, max_deliveries=max_deliveries)
        if worn:
            self._on_worn(self, self.leases.move(worn))
        limit = min(total, len(picked) + max(0, limits.MAX_LEASES - len(self.leases)))
        if not limit:
            _refuse(cohort, throttled_by("max_leases", limits.MAX_LEASES, "ack or nack jobs of this queue first"))
            return
        self._taking = Taking(cohort, wanted, picked, after=self.leases.cursor, evenly=evenly)
        self.counts.passing = True
        head = messages.TakeJobs(
            topic=self.topic,
            topic_id=self.topic_id,
            wanted=picked,
            after=self.leases.cursor,
            held=self.leases.held_beyond(self.leases.cursor),
            limit=limit,
            max_bytes=min(limits.CLAIM_BYTES, sum(map(self._budget, cohort))),
        )
        self._asks.call(self.shard, Op.TAKE_JOBS, head, self._taken)

    def _taken(self, taken: messages.JobsTaken, body: bytes | memoryview, error: Exception | None) -> None:
        taking, self._taking = self._taking, None
        self.counts.taken(-1 if error is not None else taken.removals)
        assert taking is not None
        self._on_dirty(self)
        leases = self.leases
        if error is not None or self.ended:
            leases.put_back(taking.picked)
            self._pause_ms = self._now_ms() + _PAUSE_MS
            _refuse(taking.cohort, as_api_error(error or Unavailable()))
            if isinstance(error, ApiError) and is_gone(error):
                self._on_gone(self)
            return
        self.gone(taken.gone)
        leases.put_back(set(taking.picked).difference(taken.seqs[: taken.wanted]))
        if taken.gone and leases.free:
            # Fresh jobs stand where free ones should: some of those that were asked for had been removed.
            leases.put_back(taken.seqs[: taken.wanted])
            self._claimers[:0] = [member for member in taking.cohort if isinstance(member, Claimer) and not member.gone]
            self._window_ms = self._now_ms() if self._claimers else 0
            return
        self._fresh = not taken.end or leases.cursor < taking.after
        if leases.cursor >= taking.after:  # else somebody's jobs have become fresh again meanwhile
            leases.cursor = taken.at
        leases.advance(self._now_ms())
        usable = [at for at, seq in enumerate(taken.seqs) if leases.claimable(seq, fresh=at >= taken.wanted)]
        self._divide(taking, taken, body, usable)

    def _divide(self, taking: Taking, taken: messages.JobsTaken, body: bytes | memoryview, usable: list[int]) -> None:
        """Everybody gets a share. Whoever got nothing although there is more waits for the next pass."""
        cohort, wanted = taking.present()
        if taking.evenly and cohort:
            shares = division.evenly(len(usable), wanted, turn=self._turn)
            self._turn += division.remainder(len(usable), wanted)
        else:
            shares = division.in_order(len(usable), wanted)
        more = self._fresh or self.leases.free
        now = self._now_ms()
        given: list[Share] = []
        left: list[int] = []
        begin = 0
        for member, share in zip(cohort, shares, strict=True):
            mine = usable[begin : begin + share]
            begin += share
            if isinstance(member, Worker):
                kept = _within(mine, taken.ends, self._budget(member))
                left += mine[kept:]
                mine = mine[:kept]
            elif more and not mine:
                self._claimers.append(member)
                self._window_ms = now
                continue
            given.append((member, *self._lease(member, mine, taken, body, now)))
        if left := left + usable[begin:]:  # or somebody has left meanwhile
            self.leases.put_back(taken.seqs[at] for at in left if at < taken.wanted)
            self.leases.rewind([taken.seqs[at] for at in left if at >= taken.wanted])
            self._fresh = True
        self.journal.when_logged(
            lambda: self._hand_out(given, taken), lambda error: self._take_back(given, error), changed=bool(usable)
        )

    def _lease(
        self, member: Member, mine: list[int], taken: messages.JobsTaken, body: bytes | memoryview, now: int
    ) -> tuple[messages.Claimed, bytes]:
        """Give a member its share: the leases, the event, and the bytes for its answer."""
        mine.sort(key=taken.seqs.__getitem__)
        seqs = [taken.seqs[at] for at in mine]
        self._record_expired(seqs)
        deadline = now + (member.lease_ms or self.config.lease_ms)
        leases = self.leases.claim(seqs, node=member.node, deadline_ms=deadline, stream=member.stream)
        self.journal.record("claimed", member.node, leases, deadline=deadline, stream=member.stream)
        self.claimed += len(leases)
        numbers, deliveries = [lease.number for lease in leases], [lease.deliveries for lease in leases]
        if len(mine) == len(taken.seqs) and mine == list(range(len(mine))):
            ends, text = taken.ends, bytes(body)
        else:
            pieces = [body[taken.ends[at - 1] if at else 0 : taken.ends[at] - 1] for at in mine]
            ends, total = [], 0
            for piece in pieces:
                total += len(piece) + 1
                ends.append(total)
            text = b",".join(pieces)
        if isinstance(member, Worker):
            member.pushed += ends[-1] if ends else 0
        return messages.Claimed(seqs, ends, numbers, deliveries, deadline, 0), text

    def _record_expired(self, seqs: list[int]) -> None:
        """Whoever held these lost them by time; said when somebody else gets them."""
        get = self.leases.get
        for seq in seqs:
            if (lease := get(seq)) is not None and lease.state == State.EXPIRED:
                self.journal.record("released", lease.node, [lease], reason="expired")

    def _hand_out(self, given: list[Share], taken: messages.JobsTaken) -> None:
        def send() -> None:
            ready = self.counts.ready(taken.live)
            for member, claimed, body in given:
                if isinstance(member, Claimer):
                    member.caller.answer(Op.CLAIM, msgspec.structs.replace(claimed, ready=ready), body)
                elif claimed.seqs and not member.gone:
                    member.caller.answer(Op.JOBS, claimed, body)

        self.counts.compare(taken.removals, send, lambda error: send())

    def _take_back(self, given: list[Share], error: ApiError) -> None:
        """The leases could not be made as durable as they have to be: nobody got them."""
        for member, claimed, _ in given:
            released = self.leases.unclaim(claimed.seqs, claimed.leases)
            self.journal.record("released", member.node, released, reason="refused")
            if isinstance(member, Worker) and claimed.ends:
                member.pushed -= claimed.ends[-1]
        self._fresh = True
        _refuse([member for member, _, _ in given], error)
        self._pause_ms = self._now_ms() + _PAUSE_MS
        self._on_dirty(self)

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
        self.journal.step(self._now_ms())
        if self.journal.checkpoint_is_due(len(self.leases)) and not self._unsure:
            self.checkpoint()

    def checkpoint(self) -> None:
        # Moves that are under way are in the log before this; if they fail, another one follows.
        self.journal.checkpoint(self.leases.checkpoint(), dead_lettered=self.dead_lettered + self._leaving)

    def _complete(
        self, ending: list[Lease], then: Callable[[messages.JobsCompleted | None, Exception | None], None]
    ) -> None:
        """Delete jobs at the shard, together with the events that say why."""
        seqs = [lease.seq for lease in ending]

        def completed(answer: Any, _: bytes | memoryview, error: Exception | None) -> None:
            if error is None:
                self.leases.remove(seqs)
            elif isinstance(error, ApiError) and is_gone(error):
                self._on_gone(self)
            self._on_dirty(self)
            then(answer, error)

        head, body = self.journal.with_delete(seqs)
        self._asks.call(self.shard, Op.COMPLETE_JOBS, head, completed, body)

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
        self.leases.undo((lease.seq for lease in leases), until_ms=self._now_ms())
        self._on_dirty(self)

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
        self._on_dirty(self)


def _refuse(members: Iterable[Member], error: ApiError) -> None:
    """Connections just wait."""
    for member in members:
        if isinstance(member, Claimer) and not member.gone:
            member.caller.fail(Op.CLAIM, error)


def _within(mine: list[int], ends: list[int], budget: int) -> int:
    """How many of these jobs fit; at least one."""
    for count, at in enumerate(mine):
        budget -= ends[at] - (ends[at - 1] if at else 0)
        if budget < 0:
            return max(1, count)
    return len(mine)


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
