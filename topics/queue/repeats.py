"""Claims with an idempotency key: one whose answer got lost is sent again and gets the same jobs, not others.

    begin ──► is the key being served? ──► wait behind that claim ─┐
                 │ no                                              │ answered: begin again
                 ▼                                                 │ failed: so are those behind it
              does its node hold jobs by this key? ─► read them again, answer
                 │ no
                 ▼
              a claim like any other; what it is leased is noted under its key

Rules: a key is its node's, and means something for as long as one of its leases lasts: jobs that were acked, nacked or
have expired are left out, and when none is left the key is as good as new. Leases are as they are now, so an extended
one has its new deadline. No more keys are kept than twice the jobs that are out.

Crash: keys are in the leases log, with the leases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.actors.rpc import as_api_error
from topics.errors import ApiError, Unreachable, unreadable
from topics.queue.lease_table import Lease, State
from topics.queue.waiters import Caller, Claimer
from topics.storage.leases import LeaseEvent

if TYPE_CHECKING:
    from topics.queue.queue import Queue

_FEW = 64
_Name = tuple[str, str]  # node and key


class _Served:
    """The caller of a claim with a key: whoever waits behind it hears of its end."""

    __slots__ = ("_caller", "_ended")

    def __init__(self, caller: Caller, ended: Callable[[ApiError | None], None]) -> None:
        self._caller = caller
        self._ended: Callable[[ApiError | None], None] | None = ended

    def answer(self, op: Op, head: Any, body: bytes = b"") -> None:
        self._caller.answer(op, head, body)
        self.end(None)

    def fail(self, op: Op, error: ApiError) -> None:
        self._caller.fail(op, error)
        self.end(error)

    def end(self, error: ApiError | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(error)


class Repeats:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._given: dict[_Name, dict[int, int]] = {}  # numbers of leases by seq
        self._serving: dict[_Name, list[Claimer]] = {}  # keys that are being served, and who waits behind

    def __len__(self) -> int:
        return len(self._given)

    @property
    def idle(self) -> bool:
        return not self._serving

    def begin(self, claimer: Claimer) -> None:
        name = (claimer.node, claimer.key)
        if (behind := self._serving.get(name)) is not None:
            behind.append(claimer)
            return
        self._serving[name] = []
        claimer.caller = _Served(claimer.caller, lambda error: self._ended(name, error))
        if held := self._held(name):
            self._read(claimer, [lease.seq for lease in held], [], [])
        else:
            self._queue.passes.add(claimer)

    def left(self, claimer: Claimer) -> None:
        """Its client went before it was served."""
        if isinstance(claimer.caller, _Served):
            claimer.caller.end(None)

    def _ended(self, name: _Name, error: ApiError | None) -> None:
        for claimer in self._serving.pop(name):
            if error is not None:
                claimer.caller.fail(Op.CLAIM, error)
            elif not claimer.gone:
                self.begin(claimer)
                self._queue.touch()

    # --- what was given ---

    def note(self, node: str, key: str, leases: list[Lease]) -> None:
        self._put(node, key, {lease.seq: lease.number for lease in leases})

    def replay(self, event: LeaseEvent) -> None:
        if event.event == "claimed" and event.key:
            self._put(event.node, event.key, dict(zip(event.seqs, event.leases, strict=True)))
        elif event.event == "checkpoint":
            self._given.clear()
            jobs = {job.seq: job for job in event.jobs}
            for key, seqs in event.keys.items():
                for job in [jobs[seq] for seq in seqs if seq in jobs]:
                    self._given.setdefault((job.node, key), {})[job.seq] = job.lease

    def checkpoint(self) -> dict[str, list[int]]:
        """The jobs by key; whose they are is in the table."""
        keys: dict[str, list[int]] = {}
        for name in list(self._given):
            if held := self._held(name):
                keys.setdefault(name[1], []).extend(lease.seq for lease in held)
        return keys

    def _put(self, node: str, key: str, numbers: dict[int, int]) -> None:
        self._given[node, key] = numbers
        if len(self._given) > 2 * len(self._queue.leases) + _FEW:
            for name in list(self._given):
                self._held(name)

    def _held(self, name: _Name) -> list[Lease]:
        """What a node holds by a key; one that means nothing any more is forgotten."""
        table = self._queue.leases
        held = [
            lease
            for seq, number in self._given.get(name, {}).items()
            if (lease := table.get(seq)) is not None and lease.number == number and lease.state == State.LEASED
        ]
        if not held:
            self._given.pop(name, None)
        return held

    # --- reading again ---

    def _read(self, claimer: Claimer, left: list[int], seqs: list[int], pieces: list[bytes]) -> None:
        """Ask for the jobs' records, more than once if they don't come at once: some may be in the cold tier."""
        queue = self._queue

        def taken(answer: messages.JobsTaken, body: bytes | memoryview, error: Exception | None) -> None:
            queue.touch()
            if error is not None:
                claimer.caller.fail(Op.CLAIM, as_api_error(error))
                return
            if answer.why:
                claimer.caller.fail(Op.CLAIM, unreadable(Unreachable(answer.why)))
                return
            queue.gone(answer.gone)
            begin = 0
            for end in answer.ends:
                pieces.append(bytes(body[begin : end - 1]))
                begin = end
            seqs.extend(answer.seqs)
            done = {*answer.seqs, *answer.gone}
            rest = [seq for seq in left if seq not in done]
            if rest and done:
                self._read(claimer, rest, seqs, pieces)
            else:
                self._answer(claimer, dict(zip(seqs, pieces, strict=True)), answer)

        head = messages.TakeJobs(
            topic=queue.topic,
            topic_id=queue.topic_id,
            wanted=left,
            after=0,
            held=[],
            limit=0,  # no fresh ones
            max_bytes=limits.CLAIM_BYTES,
        )
        queue.asks.call(queue.shard, Op.TAKE_JOBS, head, taken)

    def _answer(self, claimer: Claimer, pieces: dict[int, bytes], taken: messages.JobsTaken) -> None:
        queue = self._queue
        queue.leases.advance(queue.now_ms())
        leases = [lease for lease in self._held((claimer.node, claimer.key)) if lease.seq in pieces]
        if not leases:  # they have ended meanwhile
            if claimer.gone:
                self.left(claimer)
            else:
                queue.passes.add(claimer)
            return
        leases.sort(key=lambda lease: lease.seq)
        ends, total = [], 0
        for lease in leases:
            total += len(pieces[lease.seq]) + 1
            ends.append(total)
        body = b",".join([pieces[lease.seq] for lease in leases])

        def send() -> None:
            claimed = messages.Claimed(
                [lease.seq for lease in leases],
                ends,
                [lease.number for lease in leases],
                [lease.deliveries for lease in leases],
                leases[0].deadline_ms,
                queue.counts.ready(taken.live),
                [lease.deadline_ms for lease in leases],
            )
            claimer.caller.answer(Op.CLAIM, claimed, body)

        queue.counts.compare(taken.removals, send, lambda error: send())
