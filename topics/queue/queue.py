"""One queue: who waits for jobs, who holds some, and the pass that brings them together. No IO of its own.

    claim, /work ──► waiting ──► TAKE_JOBS ──► divided, leased ──► answered
    ack ──► ending ──► COMPLETE_JOBS (one for a round) ──► answered
    nack, extend ──► the table ──► answered

One pass at a time: whoever comes while the shard is asked is served by the next one. Events of a round are one record
batch of the leases log, sent before anything that depends on them; with `leases_durable` answers wait for their sync.

`ready` is counted, not kept: the topic's live records, less those held or hidden. A live count always comes from the
shard, with `removals`, which tells whether jobs that the table knows were removed otherwise; then it is asked which.

A crash of this process loses nothing but what was on its way: the table is in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.asks import Asks, Unavailable, is_gone
from topics.actors.messages import Op
from topics.errors import ApiError, throttled_by
from topics.queue import division
from topics.queue.leases import Lease, Leases, State
from topics.storage import columns
from topics.storage.config import TopicConfig
from topics.storage.format import RECORD_OVERHEAD
from topics.storage.leases import CHECKPOINT_TAG, EventName, LeaseEvent, encode_event

_PAUSE_MS = 200


Failed = Callable[[ApiError], None]


class Caller(Protocol):
    """Where an answer goes: a gateway's link and the request's correlation."""

    def answer(self, op: Op, head: Any, body: bytes = b"") -> None: ...
    def fail(self, op: Op, error: ApiError) -> None: ...


class Claimer:
    """A claim that waits for its pass."""

    __slots__ = ("caller", "gone", "lease_ms", "max", "node")

    def __init__(self, caller: Caller, request: messages.Claim) -> None:
        self.caller = caller
        self.node = request.node
        self.max = request.max
        self.lease_ms = request.lease_ms
        self.gone = False  # nobody waits for the answer any more

    stream = 0


class Worker:
    """A /work connection."""

    __slots__ = ("caller", "gone", "lease_ms", "max", "node", "pushed", "sent", "stream")

    def __init__(self, caller: Caller, request: messages.OpenWork) -> None:
        self.caller = caller
        self.node = request.node
        self.max = request.max
        self.lease_ms = request.lease_ms
        self.stream = request.stream
        self.pushed = 0  # bytes of jobs sent to it ...
        self.sent = 0  # ... and taken by its socket, as far as we were told
        self.gone = False


class _Taking:
    """A pass that waits for the shard."""

    __slots__ = ("cohort", "evenly", "limit", "picked", "wanted")

    def __init__(
        self, cohort: list[Claimer | Worker], wanted: list[int], picked: list[int], limit: int, evenly: bool
    ) -> None:
        self.cohort = cohort
        self.wanted = wanted
        self.picked = picked
        self.limit = limit
        self.evenly = evenly


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
        self.dead_lettered = 0
        self.claimed = 0  # jobs, since this process started
        self.acked = 0
        self.moves = 0  # to the dead letters
        self.workers: dict[int, Worker] = {}
        self.used_ms = now_ms()
        self.ended = False
        self._asks = asks
        self._now_ms = now_ms
        self._backlog_bytes = backlog_bytes  # that a connection may have before it is given more
        self._on_dirty = on_dirty
        self._on_gone = on_gone
        self._on_worn = on_worn
        self._claimers: list[Claimer] = []
        self._taking: _Taking | None = None
        self._window_ms = 0  # when the cohort that gathers is served; 0: none gathers
        self._fresh = True  # whether the log may hold jobs behind the cursor
        self._turn = 0
        self._pause_ms = 0  # connections are not served before this: the shard refused
        self._removals = -1  # as last seen, when every lease was known to be of a job that is there
        self._events: list[LeaseEvent] = []
        self._logged: list[tuple[Callable[[], None], Failed]] = []  # answers that wait for these events' sync
        self._unsure: set[int] = set()  # jobs moved away, perhaps: the shard died before it said so
        self._acks: list[tuple[Caller, list[Lease], list[int]]] = []
        self._named = 0  # jobs in events since the last checkpoint
        self._following = 0  # the correlation under which the shard tells of new jobs

    # --- knowing the topic ---

    def opened(self, opened: messages.QueueOpened) -> None:
        """The shard is there, again perhaps: then what it counts is to be compared anew, and what was on its way to the
        log when it went away has to be said again."""
        if self.topic_id and (len(self.leases) or self._named):
            self._named += 1
            self.checkpoint()
        self.topic_id = opened.topic_id
        self.config = opened.config
        self._removals = -1
        self._fresh = True
        self._following = 0
        self._on_dirty(self)

    def replay(self, event: LeaseEvent) -> None:
        self.leases.replay(event)
        if event.event == "checkpoint":
            self.dead_lettered = event.dead_lettered
            self._named = 0
        elif event.event == "dead_lettered":
            self.dead_lettered += len(event.seqs)
        self._named += len(event.seqs)

    def configured(self, config: TopicConfig) -> None:
        self.config = config
        self._on_dirty(self)

    def head_moved(self) -> None:
        self._fresh = True
        self._on_dirty(self)

    def shard_gone(self) -> None:
        self._following = 0

    @property
    def following(self) -> int:
        return self._following

    @property
    def idle(self) -> bool:
        return not (len(self.leases) or self.workers or self._claimers or self._taking or self._acks)

    @property
    def timed(self) -> bool:
        """Whether something may be due without anybody asking."""
        return bool(self._window_ms or self.workers)

    def waits(self, claimer: Claimer) -> bool:
        return claimer in self._claimers or (self._taking is not None and claimer in self._taking.cohort)

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

    def ack(self, caller: Caller, request: messages.Ack) -> None:
        held = self.leases.ack(request.node, request.seqs, request.leases)
        self._acks.append((caller, held, _skipped(request.seqs, held)))
        self._on_dirty(self)

    def nack(self, caller: Caller, request: messages.Nack) -> None:
        until_ms = self._now_ms() + request.delay_ms if request.delay_ms else None
        released = self.leases.nack(request.node, request.seqs, request.leases, until_ms=until_ms)
        skipped = _skipped(request.seqs, released)
        self._record("released", request.node, released, deadline=until_ms or 0, reason="nack")

        def answer() -> None:
            self._counted(
                lambda ready: caller.answer(Op.NACK, messages.Nacked(skipped, ready, self.leases.in_flight)),
                lambda error: caller.fail(Op.NACK, error),
            )

        self._when_logged(answer, lambda error: caller.fail(Op.NACK, error), bool(released))

    def extend(self, caller: Caller, request: messages.Extend) -> None:
        deadline = self._now_ms() + request.lease_ms
        extended = self.leases.extend(request.node, request.seqs, request.leases, deadline_ms=deadline)
        skipped = _skipped(request.seqs, extended)
        self._record("extended", request.node, extended, deadline=deadline)
        answer = messages.Extended(skipped, deadline)
        self._when_logged(
            lambda: caller.answer(Op.EXTEND, answer), lambda error: caller.fail(Op.EXTEND, error), bool(extended)
        )

    def count(self, row: messages.QueueRow, then: Callable[[messages.QueueCounts | None], None]) -> None:
        """Its counters, from what a shard said of the topic a moment ago."""
        if row.topic_id != self.topic_id:
            then(None)
            return
        self.leases.advance(self._now_ms())

        def counted() -> None:
            # Those whose delete waits for its sync are held here still, but not among the records any more.
            ready = self._ready(row.count + row.completing)
            then(messages.QueueCounts(ready, self.leases.in_flight - row.completing, self.dead_lettered))

        self._compare(row.removals, counted, lambda error: then(None))

    def open_work(self, caller: Caller, request: messages.OpenWork) -> None:
        self.workers[request.stream] = Worker(caller, request)
        lost = self.leases.disconnect(request.stream, after=request.last_lease)
        self._record("released", request.node, lost, reason="disconnect")  # leased, but never sent
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
            self._compare(removals, lambda: None, lambda error: None)

    def close_work(self, stream: int) -> None:
        """The connection is gone: what it holds is free."""
        worker = self.workers.pop(stream, None)
        if worker is not None:
            worker.gone = True
        self.release(stream)

    def release(self, stream: int) -> None:
        released = self.leases.disconnect(stream)
        for node in {lease.node for lease in released}:
            of_node = [lease for lease in released if lease.node == node]
            self._record("released", node, of_node, reason="disconnect")
        self._on_dirty(self)

    def end(self, error: ApiError) -> None:
        """The topic is gone, or no queue any more."""
        for claimer in self._claimers:
            claimer.caller.fail(Op.CLAIM, error)
        self._claimers = []
        self.ended = True
        for worker in self.workers.values():
            worker.gone = True
            worker.caller.answer(Op.WORK_ENDED, messages.WorkEnded(error.status, error.message))
        self.workers = {}

    # --- passes ---

    def next_due_ms(self) -> int | None:
        """When something happens by itself: a cohort's window ends, or a connection can be given a job again."""
        due = self._window_ms or None
        if self.workers:
            times = (due, self.leases.next_due_ms(), self._pause_ms or None)
            due = min((at for at in times if at is not None), default=None)
        return due

    def step(self) -> None:
        """Serve who waits, if there is anything to serve and the shard is not being asked already."""
        now = self._now_ms()
        leases = self.leases
        leases.advance(now)
        self._follow()
        if self._taking is not None:
            return
        wanting: list[Claimer | Worker] = [*self._claimers]
        if (leases.free or self._fresh) and now >= self._pause_ms:
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
        if worker.pushed - worker.sent >= self._backlog_bytes:
            return 0
        return max(0, worker.max - self.leases.of_stream(worker.stream))

    def _budget(self, member: Claimer | Worker) -> int:
        """Bytes that it may be given at once. A connection gets no more than its gateway should have to keep."""
        if isinstance(member, Claimer):
            return limits.CLAIM_BYTES
        return self._backlog_bytes - (member.pushed - member.sent)

    def _take(self, cohort: list[Claimer | Worker], *, evenly: bool) -> None:
        wanted = [self._room(member) if isinstance(member, Worker) else member.max for member in cohort]
        total = sum(wanted)
        max_deliveries = self.config.max_deliveries if self.config.dead_letter else 0
        picked, worn = self.leases.pick(total, max_deliveries=max_deliveries)
        if worn:
            self._on_worn(self, self.leases.move(worn))
        room = limits.MAX_LEASES - len(self.leases)
        limit = min(total, len(picked) + max(0, room))
        if not limit:
            self._refuse(cohort, throttled_by("max_leases", limits.MAX_LEASES, "ack or nack jobs of this queue first"))
            return
        self._taking = _Taking(cohort, wanted, picked, limit, evenly)
        head = messages.TakeJobs(
            topic=self.topic,
            topic_id=self.topic_id,
            wanted=picked,
            after=self.leases.cursor,
            held=self.leases.held_beyond(self.leases.cursor) if limit > len(picked) else [],
            limit=limit,
            max_bytes=min(limits.CLAIM_BYTES, sum(map(self._budget, cohort))),
        )
        self._asks.call(self.shard, Op.TAKE_JOBS, head, self._taken)

    def _taken(self, taken: messages.JobsTaken, body: bytes | memoryview, error: Exception | None) -> None:
        taking, self._taking = self._taking, None
        assert taking is not None
        self._on_dirty(self)
        leases = self.leases
        if error is not None:
            leases.put_back(taking.picked)
            self._refuse(taking.cohort, _as_api_error(error))
            self._pause_ms = self._now_ms() + _PAUSE_MS
            if isinstance(error, ApiError) and is_gone(error):
                self._on_gone(self)
            return
        self._pause_ms = 0
        self.gone(taken.gone)
        leases.put_back(set(taking.picked).difference(taken.seqs[: taken.wanted]))
        if taken.gone and leases.free:
            # Fresh jobs stand where free ones should: some of those that were asked for had been removed.
            leases.put_back(taken.seqs[: taken.wanted])
            self._take([member for member in taking.cohort if not member.gone], evenly=taking.evenly)
            return
        leases.cursor = taken.at
        self._fresh = not taken.end
        now = self._now_ms()
        leases.advance(now)
        usable = [at for at, seq in enumerate(taken.seqs) if leases.claimable(seq, fresh=at >= taken.wanted)]
        cohort = [member for member in taking.cohort if not member.gone]
        wanted = [want for member, want in zip(taking.cohort, taking.wanted, strict=True) if not member.gone]
        if taking.evenly and cohort:
            shares = division.evenly(len(usable), wanted, turn=self._turn)
            self._turn += division.remainder(len(usable), wanted)
        else:
            shares = division.in_order(len(usable), wanted)
        answers: list[tuple[Claimer | Worker, messages.Claimed, bytes]] = []
        begin = 0
        cut = not taken.end and len(taken.seqs) < taking.limit  # there is more, but it would have been too many bytes
        for member, share in zip(cohort, shares, strict=True):
            if cut and not share and isinstance(member, Claimer):
                self._claimers.append(member)
                self._window_ms = now
                continue
            mine = usable[begin : begin + share]
            begin += share
            answers.append((member, *self._lease(member, mine, taken, body, now)))
        if left := usable[begin:]:  # somebody left meanwhile
            leases.put_back(taken.seqs[at] for at in left if at < taken.wanted)
            leases.rewind([taken.seqs[at] for at in left if at >= taken.wanted])
            self._fresh = True
        self._when_logged(
            lambda: self._hand_out(answers, taken), lambda error: self._take_back(answers, error), begin > 0
        )

    def _lease(
        self,
        member: Claimer | Worker,
        mine: list[int],
        taken: messages.JobsTaken,
        body: bytes | memoryview,
        now: int,
    ) -> tuple[messages.Claimed, bytes]:
        """Give a member its share: the lease, the event, and the bytes for its answer."""
        deadline = now + (member.lease_ms or self.config.lease_ms)
        mine.sort(key=taken.seqs.__getitem__)
        seqs = [taken.seqs[at] for at in mine]
        self._record_expired(seqs)
        leases = self.leases.claim(seqs, node=member.node, deadline_ms=deadline, stream=member.stream)
        self._record("claimed", member.node, leases, deadline=deadline, stream=member.stream)
        self.claimed += len(leases)
        numbers, deliveries = [lease.number for lease in leases], [lease.deliveries for lease in leases]
        if isinstance(member, Claimer) and mine == list(range(len(taken.seqs))):
            return messages.Claimed(seqs, taken.ends, numbers, deliveries, deadline, 0), bytes(body)
        ends, pieces = [], []
        total = 0
        for at in mine:
            start = taken.ends[at - 1] if at else 0
            piece = body[start : taken.ends[at] - 1]
            pieces.append(piece)
            total += len(piece) + 1
            ends.append(total)
        if isinstance(member, Worker):
            member.pushed += total
        return messages.Claimed(seqs, ends, numbers, deliveries, deadline, 0), b",".join(pieces)

    def _hand_out(
        self, answers: list[tuple[Claimer | Worker, messages.Claimed, bytes]], taken: messages.JobsTaken
    ) -> None:
        def send() -> None:
            ready = self._ready(taken.live)
            for member, claimed, body in answers:
                if isinstance(member, Worker):
                    if claimed.seqs and not member.gone:
                        member.caller.answer(Op.JOBS, claimed, body)
                else:
                    member.caller.answer(Op.CLAIM, msgspec.structs.replace(claimed, ready=ready), body)

        self._compare(taken.removals, send, lambda error: send())

    def _take_back(self, answers: list[tuple[Claimer | Worker, messages.Claimed, bytes]], error: ApiError) -> None:
        """The leases could not be made as durable as they have to be: nobody got them."""
        for member, claimed, _ in answers:
            released = self.leases.nack(member.node, claimed.seqs, claimed.leases)
            self._record("released", member.node, released, reason="refused")
        self._refuse([member for member, _, _ in answers], error)

    @staticmethod
    def _refuse(cohort: Iterable[Claimer | Worker], error: ApiError) -> None:
        """Connections just wait."""
        for member in cohort:
            if isinstance(member, Claimer) and not member.gone:
                member.caller.fail(Op.CLAIM, error)

    def _follow(self) -> None:
        """Connections want to know when there is something new; polls ask by themselves."""
        if self.workers and not self._following:
            head = messages.FollowHead(self.topic, self.topic_id)
            self._following = self._asks.call(self.shard, Op.FOLLOW_HEAD, head, self._followed)
        elif not self.workers and self._following:
            self._asks.unfollow(self.shard, self._following)
            self._following = 0

    def _followed(self, following: messages.Following, body: bytes | memoryview, error: Exception | None) -> None:
        if error is None:
            self._fresh = True
            self._on_dirty(self)
        else:
            self._following = 0

    # --- ends ---

    def flush(self) -> None:
        """At the end of a round: acks go out as one delete, events as one batch."""
        acks, self._acks = self._acks, []
        ending = [lease for _, held, _ in acks for lease in held]
        if ending:
            for _, held, _ in acks:
                if held:
                    self._record("acked", held[0].node, held)
            self.complete(ending, lambda completed, error: self._acked(acks, completed, error))
        else:
            for caller, _, skipped in acks:
                self._answer_ack(caller, skipped)
        self._flush_events()
        if self._named > max(limits.LEASE_CHECKPOINT_EVENTS, 4 * len(self.leases)):
            self.checkpoint()

    def _answer_ack(self, caller: Caller, skipped: list[int]) -> None:
        self._counted(
            lambda ready: caller.answer(Op.ACK, messages.Acked(skipped, ready, self.leases.in_flight, 0)),
            lambda error: caller.fail(Op.ACK, error),
        )

    def complete(
        self, ending: list[Lease], then: Callable[[messages.JobsCompleted | None, Exception | None], None]
    ) -> None:
        """Delete jobs at the shard, together with the events that say why."""
        seqs = [lease.seq for lease in ending]
        events, body, size = self._packed_events()
        head = messages.CompleteJobs(self.topic, self.topic_id, seqs, self.config.leases_durable, events, size)

        def completed(answer: Any, _: bytes | memoryview, error: Exception | None) -> None:
            if error is None:
                self.leases.remove(seqs)
            elif isinstance(error, ApiError) and is_gone(error):
                self._on_gone(self)
            self._on_dirty(self)
            then(answer, error)

        logged, self._logged = self._logged, []
        self._asks.call(self.shard, Op.COMPLETE_JOBS, head, completed, body)
        if logged:
            # What these wait for is on disk with the delete; a sync of nothing tells when.
            self._log_now(0, b"", 0, logged)

    def _acked(
        self,
        acks: list[tuple[Caller, list[Lease], list[int]]],
        completed: messages.JobsCompleted | None,
        error: Exception | None,
    ) -> None:
        if completed is None:
            failure = _as_api_error(error)
            for caller, held, skipped in acks:
                self.leases.undo(lease.seq for lease in held)
                if held:
                    caller.fail(Op.ACK, failure)
                else:
                    self._answer_ack(caller, skipped)
            return
        done = completed
        self.acked += sum(len(held) for _, held, _ in acks)

        def answer() -> None:
            ready = self._ready(done.live)
            for caller, held, skipped in acks:
                fsync_us = done.fsync_us if held else 0
                caller.answer(Op.ACK, messages.Acked(skipped, ready, self.leases.in_flight, fsync_us))

        self._compare(done.removals, answer, lambda error: answer())

    def moved(self, moving: list[Lease], then: Callable[[Exception | None], None]) -> None:
        """These are with the dead letters: they leave here."""
        for lease in moving:
            self._record("dead_lettered", lease.node, [lease])

        def completed(_: messages.JobsCompleted | None, error: Exception | None) -> None:
            if error is None:
                self.dead_lettered += len(moving)
                self.moves += len(moving)
            elif isinstance(error, Unavailable):
                self._unsure.update(lease.seq for lease in moving)
            then(error)

        self.complete(moving, completed)

    def is_worn(self, lease: Lease) -> bool:
        config = self.config
        return bool(config.dead_letter and config.max_deliveries and lease.deliveries >= config.max_deliveries)

    def deliver_again(self, leases: Iterable[Lease]) -> None:
        """The queue has been told to be more patient."""
        self.leases.undo((lease.seq for lease in leases), until_ms=self._now_ms())
        self._on_dirty(self)

    # --- counting ---

    def _ready(self, live: int) -> int:
        return max(0, live - self.leases.in_flight - self.leases.hidden)

    def _counted(self, then: Callable[[int], None], failed: Failed) -> None:
        """With the number of jobs that are ready now."""

        def checked(answer: messages.JobsChecked, _: bytes | memoryview, error: Exception | None) -> None:
            if error is not None:
                failed(_as_api_error(error))
                return
            self.leases.advance(self._now_ms())
            self._compare(answer.removals, lambda: then(self._ready(answer.live)), failed)

        self._asks.call(self.shard, Op.CHECK_JOBS, messages.CheckJobs(self.topic, self.topic_id, []), checked)

    def gone(self, seqs: list[int]) -> None:
        """Somebody removed these; perhaps we did, and were not told."""
        self.leases.remove(seqs)
        if moved := self._unsure.intersection(seqs):
            self._unsure -= moved
            self.dead_lettered += len(moved)

    def _compare(self, removals: int, then: Callable[[], None], failed: Failed) -> None:
        """Go on when the table knows no job that somebody removed."""
        if removals == self._removals:
            then()
            return
        if not len(self.leases):
            self._removals = removals
            then()
            return

        def checked(answer: messages.JobsChecked, _: bytes | memoryview, error: Exception | None) -> None:
            if error is not None:
                failed(_as_api_error(error))
                return
            self.gone(answer.gone)
            self._removals = answer.removals
            self._on_dirty(self)
            then()

        head = messages.CheckJobs(self.topic, self.topic_id, self.leases.seqs())
        self._asks.call(self.shard, Op.CHECK_JOBS, head, checked)

    # --- the leases log ---

    def _record(
        self,
        event: EventName,
        node: str,
        leases: list[Lease],
        *,
        deadline: int = 0,
        stream: int = 0,
        reason: str = "",
    ) -> None:
        if not leases:
            return
        deliveries: list[int] = []
        if event == "claimed" and any([lease.deliveries > 1 for lease in leases]):
            deliveries = [lease.deliveries for lease in leases]
        seqs, numbers = [lease.seq for lease in leases], [lease.number for lease in leases]
        self._events.append(LeaseEvent(event, node, seqs, numbers, deadline, deliveries, stream, reason))
        self._named += len(leases)
        self._on_dirty(self)

    def _record_expired(self, seqs: list[int]) -> None:
        """Whoever held these lost them by time; said when somebody else gets them."""
        get = self.leases.get
        for seq in seqs:
            if (lease := get(seq)) is not None and lease.state == State.EXPIRED:
                self._record("released", lease.node, [lease], reason="expired")

    def _when_logged(self, answer: Callable[[], None], failed: Failed, changed: bool) -> None:
        """Now, or with leases_durable when what was recorded is synced."""
        if changed and self.config.leases_durable:
            self._logged.append((answer, failed))
            self._on_dirty(self)
        else:
            answer()

    def _packed_events(self) -> tuple[int, bytes, int]:
        events, self._events = self._events, []
        if not events:
            return 0, b"", 0
        encoded = [encode_event(event) for event in events]
        return len(events), columns.pack(encoded), sum(map(len, encoded)) + len(encoded) * RECORD_OVERHEAD

    def _flush_events(self) -> None:
        events, body, size = self._packed_events()
        logged, self._logged = self._logged, []
        if logged:
            self._log_now(events, body, size, logged)
        elif events:
            head = messages.LogLeases(self.topic, self.topic_id, self.config.leases_durable, events, size, False)
            self._asks.tell(self.shard, Op.LOG_LEASES, head, body)

    def _log_now(self, events: int, body: bytes, size: int, logged: list[tuple[Callable[[], None], Failed]]) -> None:
        """And answer when it is synced."""

        def synced(_: Any, __: bytes | memoryview, error: Exception | None) -> None:
            for answer, failed in logged:
                if error is None:
                    answer()
                else:
                    failed(_as_api_error(error))

        head = messages.LogLeases(self.topic, self.topic_id, True, events, size, False)
        self._asks.call(self.shard, Op.LOG_LEASES, head, synced, body)

    def checkpoint(self) -> None:
        """Write down the whole table: whoever reads the log starts here."""
        self._flush_events()
        self._named = 0
        event = LeaseEvent("checkpoint", dead_lettered=self.dead_lettered, jobs=self.leases.checkpoint())
        data = encode_event(event)
        body = columns.pack([data], tags=[CHECKPOINT_TAG])
        durable = self.config.leases_durable
        head = messages.LogLeases(self.topic, self.topic_id, durable, 1, len(data) + RECORD_OVERHEAD, True)
        self._asks.tell(self.shard, Op.LOG_LEASES, head, body)

    @property
    def has_news(self) -> bool:
        """Whether there is something that a checkpoint would say and the last one did not."""
        return self._named > 0


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


def _as_api_error(error: Exception | None) -> ApiError:
    if isinstance(error, ApiError):
        return error
    assert isinstance(error, Unavailable)
    return ApiError(
        "shard_unavailable",
        "the queue's shard went away: whether the request took effect is unknown. Retrying is safe",
        {"outcome": "unknown"},
        retry_after_s=1,
    )
