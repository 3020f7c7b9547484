"""Who holds which job of one queue: a table that knows only jobs that were delivered at least once.

A job that nobody was ever given is not here; it is behind the cursor in the log, so memory follows leases, not jobs.
Rules:

- a job's states and what moves it are TRANSITIONS; what is not there does not happen, and the caller's seq is skipped.
- an expired lease stays its holder's until somebody else claims the job: it may still ack, nack or extend.
- time is given by the caller; expiry is noticed when somebody looks (`advance`), never by a timer per job.
- free jobs go out before fresh ones, the lowest seq first.
- jobs that can't be read for now (`miss`) are no free ones, and the cursor goes on beyond them; with `reach` everything
  is in its place again.

Nothing here is on disk: the events that a caller writes (storage/leases.py) rebuild it with `replay`. A job whose
events were lost is in the log still and is found there again as if it were fresh.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from topics.storage.leases import JobState, LeaseEvent


class State(enum.IntEnum):
    LEASED = 1  # a node holds it until its deadline
    EXPIRED = 2  # the deadline has passed and nobody has claimed it since
    FREE = 3  # given back
    DELAYED = 4  # given back, but not to be claimed before its deadline
    ENDING = 5  # acked: the delete is on its way
    MOVING = 6  # on its way to the dead letters


class Event(enum.IntEnum):
    CLAIM = 1
    ACK = 2
    NACK = 3
    DELAY = 4  # a nack with a delay
    EXTEND = 5
    EXPIRE = 6
    ELAPSE = 7  # the delay is over
    MOVE = 8
    UNDO = 9  # a delete or a move did not happen
    DISCONNECT = 10  # the stream it was delivered on closed


_S, _E = State, Event
TRANSITIONS: dict[tuple[State, Event], State] = {
    (_S.LEASED, _E.ACK): _S.ENDING,
    (_S.LEASED, _E.NACK): _S.FREE,
    (_S.LEASED, _E.DELAY): _S.DELAYED,
    (_S.LEASED, _E.EXTEND): _S.LEASED,
    (_S.LEASED, _E.EXPIRE): _S.EXPIRED,
    (_S.LEASED, _E.DISCONNECT): _S.FREE,
    (_S.EXPIRED, _E.CLAIM): _S.LEASED,
    (_S.EXPIRED, _E.ACK): _S.ENDING,
    (_S.EXPIRED, _E.NACK): _S.FREE,
    (_S.EXPIRED, _E.DELAY): _S.DELAYED,
    (_S.EXPIRED, _E.EXTEND): _S.LEASED,
    (_S.EXPIRED, _E.DISCONNECT): _S.FREE,
    (_S.EXPIRED, _E.MOVE): _S.MOVING,
    (_S.FREE, _E.CLAIM): _S.LEASED,
    (_S.FREE, _E.MOVE): _S.MOVING,
    (_S.DELAYED, _E.ELAPSE): _S.FREE,
    (_S.ENDING, _E.UNDO): _S.LEASED,
    (_S.MOVING, _E.UNDO): _S.DELAYED,
}
_HELD = (State.LEASED, State.ENDING)
_CLAIMABLE = (State.EXPIRED, State.FREE)
_HIDDEN = (State.DELAYED, State.MOVING)
_OWN = (State.LEASED, State.ENDING, State.EXPIRED)  # of its holder, and of the connection it came by
_STALE = 1_024


class Lease(msgspec.Struct, gc=False, eq=False):
    seq: int
    state: State
    node: str
    number: int
    deadline_ms: int
    deliveries: int
    stream: int = 0  # the connection it was pushed to
    queued: bool = False  # it stands on the heap of free jobs, whether or not it still is one


class Leases:
    def __init__(self, *, first_number: int = 1) -> None:
        self._jobs: dict[int, Lease] = {}
        self._free: list[int] = []  # a heap; some have been claimed or removed since
        self._timers: list[tuple[int, int]] = []  # a heap of (when it is due, seq); some no longer hold
        self._streams: dict[int, set[int]] = {}  # jobs by connection ...
        self._held: dict[int, int] = {}  # ... and how many of them it holds
        self._missed: list[tuple[int, int]] = []  # stretches of seqs that can't be read
        self._starts: list[int] = []  # where they begin
        self._aside: list[int] = []  # jobs there that would be on the heap of free ones
        self._stays: int | None = None  # where the cursor goes back to: before the first fresh job there
        self._next = first_number  # the next lease's number
        self._highest = 0  # the highest seq that was ever in the table
        self.cursor = 0  # jobs up to here are not fresh, but for those that `replay` did not know
        self.in_flight = 0
        self.ending = 0  # of those in flight
        self.hidden = 0  # delayed, or on their way to the dead letters

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, seq: int) -> bool:
        return seq in self._jobs

    def get(self, seq: int) -> Lease | None:
        return self._jobs.get(seq)

    def seqs(self, *, but: Sequence[State] = ()) -> list[int]:
        return [seq for seq, lease in self._jobs.items() if lease.state not in but] if but else list(self._jobs)

    # --- time ---

    def advance(self, now_ms: int) -> bool:
        """Let leases expire and delays end that are due; whether any did."""
        timers = self._timers
        freed = False
        while timers and timers[0][0] <= now_ms:
            due_ms, seq = heapq.heappop(timers)
            lease = self._jobs.get(seq)
            if lease is not None and _due_ms(lease) == due_ms:
                self._move(lease, State.EXPIRED if lease.state == State.LEASED else State.FREE)
                freed = True
        return freed

    def next_due_ms(self) -> int | None:
        """When `advance` will have something to do."""
        timers = self._timers
        while timers:
            due_ms, seq = timers[0]
            lease = self._jobs.get(seq)
            if lease is not None and _due_ms(lease) == due_ms:
                return due_ms
            heapq.heappop(timers)
        return None

    # --- claiming ---

    def pick(self, limit: int, *, max_deliveries: int = 0) -> tuple[list[int], list[int]]:
        """Up to `limit` free jobs, the lowest first, and those met on the way that were delivered too often. What is
        not claimed then has to be put back."""
        picked: list[int] = []
        worn: list[int] = []
        free = self._free
        while free and len(picked) < limit:
            seq = heapq.heappop(free)
            lease = self._jobs.get(seq)
            if lease is None or not lease.queued:
                continue
            if self._missed and self._is_missed(seq):
                self._aside.append(seq)
                continue
            lease.queued = False
            if lease.state not in _CLAIMABLE:
                continue
            if max_deliveries and lease.deliveries >= max_deliveries:
                worn.append(seq)
            else:
                picked.append(seq)
        return picked, worn

    def put_back(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if (lease := self._jobs.get(seq)) is not None and lease.state in _CLAIMABLE:
                self._offer(lease)

    @property
    def free(self) -> bool:
        """Whether there is a free job."""
        free = self._free
        while free:
            lease = self._jobs.get(free[0])
            if lease is not None and lease.queued:
                if self._missed and self._is_missed(lease.seq):
                    self._aside.append(lease.seq)
                elif lease.state in _CLAIMABLE:
                    return True
                else:
                    lease.queued = False
            heapq.heappop(free)
        return False

    def claimable(self, seq: int, *, fresh: bool) -> bool:
        lease = self._jobs.get(seq)
        return fresh if lease is None else (lease.state, Event.CLAIM) in TRANSITIONS

    def rewind(self, seqs: Iterable[int]) -> None:
        """These are fresh still: the cursor goes back before them."""
        self.cursor = min([self.cursor, *(seq - 1 for seq in seqs)])

    def claim(self, seqs: Iterable[int], *, node: str, deadline_ms: int, stream: int = 0) -> list[Lease]:
        """Lease these jobs to a node: those that are fresh, or claimable."""
        claimed = []
        for seq in seqs:
            lease = self._jobs.get(seq)
            if lease is not None and (lease.state, Event.CLAIM) not in TRANSITIONS:
                continue
            number = self._next
            self._next = number + 1
            if lease is None:
                lease = self._jobs[seq] = Lease(seq, State.FREE, node, number, deadline_ms, 1, stream)
                if seq > self._highest:
                    self._highest = seq
            else:
                self._count(lease, lease.state, -1)
                lease.node, lease.number, lease.deadline_ms = node, number, deadline_ms
                lease.deliveries += 1
                lease.stream = stream
                lease.state = State.FREE
            self._move(lease, State.LEASED)
            claimed.append(lease)
        return claimed

    def held_beyond(self, cursor: int) -> list[int]:
        """Jobs of the table that a reading of fresh ones from a cursor would meet, lowest first."""
        if cursor >= self._highest:
            return []
        return sorted(seq for seq in self._jobs if seq > cursor)

    # --- jobs that can't be read for now ---

    @property
    def misses(self) -> bool:
        """Whether jobs are passed over."""
        return bool(self._aside) or self._stays is not None

    def _is_missed(self, seq: int) -> bool:
        at = bisect_right(self._starts, seq)
        return at > 0 and seq <= self._missed[at - 1][1]

    def miss(self, stretches: list[tuple[int, int]]) -> bool:
        """Free jobs in these are set aside. Whether they are other stretches than before."""
        if stretches == self._missed:
            return False
        self.reach()
        self._missed = stretches
        self._starts = [first for first, _ in stretches]
        free = self._free
        free.sort()  # which is a heap, too
        for first, last in reversed(stretches):
            begin, end = bisect_left(free, first), bisect_right(free, last)
            self._aside += free[begin:end]
            del free[begin:end]
        return True

    def pass_over(self, *, stays: int, beyond: int) -> None:
        """Fresh jobs behind `stays` are missed; what was looked at goes further."""
        self._stays = stays if self._stays is None else min(self._stays, stays)
        self.cursor = beyond

    def reach(self) -> None:
        """They are to be asked for like others."""
        self._missed, self._starts = [], []
        if self._aside:
            self._free += self._aside
            self._aside = []
            heapq.heapify(self._free)
        if self._stays is not None:
            self.cursor = min(self.cursor, self._stays)
            self._stays = None

    # --- what holders say ---

    def ack(self, node: str, seqs: Sequence[int], numbers: Sequence[int] | None = None) -> list[Lease]:
        """Those that end now; `remove` or `undo` says how it went."""
        return self._apply(Event.ACK, node, seqs, numbers)

    def nack(
        self, node: str, seqs: Sequence[int], numbers: Sequence[int] | None = None, *, until_ms: int | None = None
    ) -> list[Lease]:
        """Give back; until_ms: claimable only then."""
        return self._apply(Event.NACK if until_ms is None else Event.DELAY, node, seqs, numbers, deadline_ms=until_ms)

    def extend(
        self, node: str, seqs: Sequence[int], numbers: Sequence[int] | None = None, *, deadline_ms: int
    ) -> list[Lease]:
        return self._apply(Event.EXTEND, node, seqs, numbers, deadline_ms=deadline_ms)

    def _apply(
        self,
        event: Event,
        node: str,
        seqs: Sequence[int],
        numbers: Sequence[int] | None,
        *,
        deadline_ms: int | None = None,
    ) -> list[Lease]:
        changed: dict[int, Lease] = {}
        for at, seq in enumerate(seqs):
            lease = self._jobs.get(seq)
            if lease is None or lease.node != node or (numbers is not None and numbers[at] != lease.number):
                continue
            state = TRANSITIONS.get((lease.state, event))
            if state is None or seq in changed:
                continue
            if deadline_ms is not None:
                lease.deadline_ms = deadline_ms
            self._move(lease, state)
            changed[seq] = lease
        self._forget_stale()
        return list(changed.values())

    def unclaim(self, seqs: Sequence[int], numbers: Sequence[int]) -> list[Lease]:
        """A claim that nobody got: it does not count as a delivery, and a job that had no other is fresh again."""
        undone = []
        for seq, number in zip(seqs, numbers, strict=True):
            lease = self._jobs.get(seq)
            if lease is None or lease.number != number or (lease.state, Event.NACK) not in TRANSITIONS:
                continue
            lease.deliveries -= 1
            self._move(lease, State.FREE)
            undone.append(lease)
        fresh = [lease.seq for lease in undone if not lease.deliveries]
        self.remove(fresh)
        self.rewind(fresh)
        return undone

    def disconnect(self, stream: int, *, after: int = 0) -> list[Lease]:
        """A connection closed: what it holds is given back; after: only leases with a higher number."""
        released = []
        for seq in sorted(self._streams.get(stream, ())):
            lease = self._jobs[seq]
            if lease.number <= after:
                continue
            before = lease.state
            self._count(lease, before, -1)
            lease.stream = 0
            self._count(lease, before, 1)
            if (before, Event.DISCONNECT) in TRANSITIONS:
                self._move(lease, State.FREE)
                released.append(lease)
        self._forget_stale()
        return released

    # --- ends ---

    def move(self, seqs: Iterable[int]) -> list[Lease]:
        """Begin to take these to the dead letters."""
        moving = []
        for seq in seqs:
            lease = self._jobs.get(seq)
            if lease is not None and (lease.state, Event.MOVE) in TRANSITIONS:
                self._move(lease, State.MOVING)
                moving.append(lease)
        return moving

    def undo(self, seqs: Iterable[int], *, until_ms: int = 0) -> None:
        """A delete or a move did not happen; a move is tried again later."""
        for seq in seqs:
            lease = self._jobs.get(seq)
            state = None if lease is None else TRANSITIONS.get((lease.state, Event.UNDO))
            if lease is None or state is None:
                continue
            if state == State.DELAYED:
                lease.deadline_ms = until_ms
            self._move(lease, state)

    def remove(self, seqs: Iterable[int]) -> None:
        """These jobs are gone, whoever removed them."""
        for seq in seqs:
            lease = self._jobs.get(seq)
            if lease is not None:
                self._count(lease, lease.state, -1)
                del self._jobs[seq]
        self._forget_stale()

    # --- streams ---

    def of_stream(self, stream: int) -> int:
        """How many jobs a connection holds."""
        return self._held.get(stream, 0)

    def streams(self) -> list[int]:
        """Connections that jobs were delivered on and that hold some, or did when they expired."""
        return list(self._streams)

    # --- the log ---

    def checkpoint(self) -> list[JobState]:
        """The table; what ends or moves is as it was before."""
        kept = {State.ENDING: State.LEASED, State.MOVING: State.FREE}
        return [
            JobState(
                lease.seq,
                kept.get(lease.state, lease.state),
                lease.node,
                lease.number,
                lease.deadline_ms,
                lease.deliveries,
                lease.stream,
            )
            for lease in self._jobs.values()
        ]

    def replay(self, event: LeaseEvent) -> None:
        """Apply an event of the log. What it says of jobs that are not as it expects is left alone."""
        kind = event.event
        if kind == "checkpoint":
            self.remove(self.seqs())
            for job in event.jobs:
                self._restore(job)
        elif kind == "claimed":
            deliveries = event.deliveries or [1] * len(event.seqs)
            for seq, number, times in zip(event.seqs, event.leases, deliveries, strict=True):
                self.remove([seq])
                self._restore(JobState(seq, State.LEASED, event.node, number, event.deadline, times, event.stream))
        elif kind == "released":
            for lease in self._matching(event):
                if lease.state in (State.LEASED, State.EXPIRED):
                    lease.deadline_ms = event.deadline
                    self._move(lease, State.DELAYED if event.deadline else State.FREE)
        elif kind == "extended":
            for lease in self._matching(event):
                if (lease.state, Event.EXTEND) in TRANSITIONS:
                    lease.deadline_ms = event.deadline
                    self._move(lease, State.LEASED)
            self._forget_stale()
        else:
            self.remove(lease.seq for lease in self._matching(event))

    def _matching(self, event: LeaseEvent) -> list[Lease]:
        return [
            lease
            for seq, number in zip(event.seqs, event.leases, strict=True)
            if (lease := self._jobs.get(seq)) is not None and lease.number == number
        ]

    def _restore(self, job: JobState) -> None:
        lease = Lease(job.seq, State.FREE, job.node, job.lease, job.deadline, job.deliveries, job.stream)
        self._jobs[job.seq] = lease
        self._highest = max(self._highest, job.seq)
        self._next = max(self._next, job.lease + 1)
        self._move(lease, State(job.state))

    # --- the books ---

    def _move(self, lease: Lease, state: State) -> None:
        """A new state: counted, with its timer, and on the heap of free jobs if it is one."""
        before, lease.state = lease.state, state
        self._count(lease, before, -1)
        self._count(lease, state, 1)
        if state in _CLAIMABLE:
            self._offer(lease)
        elif (due_ms := _due_ms(lease)) is not None:
            heapq.heappush(self._timers, (due_ms, lease.seq))

    def _offer(self, lease: Lease) -> None:
        if not lease.queued:
            lease.queued = True
            heapq.heappush(self._free, lease.seq)

    def _count(self, lease: Lease, state: State, change: int) -> None:
        stream = lease.stream
        if state in _HELD:
            self.in_flight += change
            if state == State.ENDING:
                self.ending += change
            if stream:
                self._held[stream] = self._held.get(stream, 0) + change
                if not self._held[stream]:
                    del self._held[stream]
        elif state in _HIDDEN:
            self.hidden += change
        if stream and state in _OWN:
            own = self._streams.setdefault(stream, set())
            if change > 0:
                own.add(lease.seq)
            else:
                own.discard(lease.seq)
                if not own:
                    del self._streams[stream]

    def _forget_stale(self) -> None:
        """Extensions leave their old deadlines on the heap, acks of expired leases their place among the free."""
        most = 2 * len(self._jobs) + _STALE
        if len(self._timers) > most:
            timed = [(_due_ms(lease), lease.seq) for lease in self._jobs.values()]
            self._timers = [(due_ms, seq) for due_ms, seq in timed if due_ms is not None]
            heapq.heapify(self._timers)
        if len(self._free) + len(self._aside) > most:
            self._free = [lease.seq for lease in self._jobs.values() if lease.queued]
            self._aside = []  # those are on the heap again, and set aside when they are met
            heapq.heapify(self._free)


def _due_ms(lease: Lease) -> int | None:
    """When time moves it on. A lease is good to the last millisecond of its deadline."""
    if lease.state == State.LEASED:
        return lease.deadline_ms + 1
    return lease.deadline_ms if lease.state == State.DELAYED else None
