"""Passes: jobs for those who wait, one question to the shard at a time.

    claims, connections ──► a cohort ──► TAKE_JOBS ──► divided, leased, recorded ──► answered

Whoever comes while the shard is asked is served by the next pass. A claim is answered with nothing only if nothing is
left. Without a window claims are served as they came; with one, and wherever connections wait, jobs are divided.
A claim whose pass sends jobs to the dead letters is answered when they are there, so that the next read finds them; or
when they were refused, or after a moment: the job that it got has a lease that ends.

While the disk of the cold tier is away the shard says where the jobs are that it can't read. They are set aside, so a
pass asks for others, and reads on beyond them: it need not name all leases behind the first of them. When the shard has
them back, and at least every two seconds, they are asked for again. A claim for which there are no others is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.actors.rpc import Unavailable, as_api_error, is_gone
from topics.errors import ApiError, Unreachable, throttled_by, unreadable
from topics.queue import fair_share
from topics.queue.lease_table import State
from topics.queue.waiters import Claimer, Member, Taking, Worker

if TYPE_CHECKING:
    from topics.queue.queue import Queue

_PAUSE_MS = 200
_MISSED_MS = 2_000  # so long jobs are set aside that can't be read: as often the shard looks for their disk
_LETTERS_MS = 1_000  # a claim waits so long for its dead letters

Share = tuple[Member, messages.Claimed, bytes]


class _Held:
    """Answers that wait for dead letters."""

    __slots__ = ("due_ms", "send", "seqs")

    def __init__(self, seqs: set[int], send: Callable[[], None], due_ms: int) -> None:
        self.seqs = seqs
        self.send = send
        self.due_ms = due_ms


class Passes:
    def __init__(self, queue: Queue, *, backlog_bytes: int) -> None:
        self._queue = queue
        self._leases = queue.leases
        self._backlog_bytes = backlog_bytes  # that a connection may have before it is given more
        self._claimers: list[Claimer] = []
        self._taking: Taking | None = None
        self._turn = 0
        self.window_ms = 0  # when the cohort that gathers is served; 0: none gathers
        self.pause_ms = 0  # connections are not served before this: the shard refused
        self.missed_ms = 0  # when the jobs are asked for again that could not be read; 0: there are none
        self._why = ""  # they can't be read, as far as it has been said
        self.fresh = True  # whether the log may hold jobs behind the cursor
        self.retiring = False  # connections are served by the next process
        self._untried: set[int] = set()  # jobs on their way to the dead letters for the first time
        self._held: list[_Held] = []

    @property
    def idle(self) -> bool:
        return not self._claimers and self._taking is None and not self._held

    def add(self, claimer: Claimer) -> None:
        self._claimers.append(claimer)

    def cancel(self, claimer: Claimer) -> None:
        claimer.gone = True
        waited = self.has(claimer)
        if claimer in self._claimers:
            self._claimers.remove(claimer)
        if claimer.key and waited:
            self._queue.repeats.left(claimer)

    def has(self, claimer: Claimer) -> bool:
        return claimer in self._claimers or (self._taking is not None and claimer in self._taking.cohort)

    def refuse_all(self, error: ApiError) -> None:
        claimers, self._claimers = self._claimers, []
        _refuse(claimers, error)
        self.tried(self._untried)  # what was leased before that is answered

    @property
    def held_due_ms(self) -> int:
        """When an answer has waited for its dead letters long enough; 0: none waits."""
        return min([held.due_ms for held in self._held], default=0)

    def tried(self, seqs: Iterable[int]) -> None:
        """These are with the dead letters now, or were refused there."""
        self._untried.difference_update(set(seqs))
        self._send_held()

    def _send_held(self) -> None:
        if not self._held:
            return
        now = self._queue.now_ms()
        due = [held for held in self._held if held.due_ms <= now or held.seqs.isdisjoint(self._untried)]
        self._held = [held for held in self._held if held not in due]
        for held in due:
            held.send()

    def step(self) -> None:
        """Serve who waits, if there is anything to serve and the shard is not being asked already."""
        now = self._queue.now_ms()
        leases = self._leases
        leases.advance(now)
        self._send_held()
        if now >= self.pause_ms:
            self.pause_ms = 0
        if self.missed_ms and now >= self.missed_ms:
            self._reach()
        if self._taking is not None:
            return
        wanting: list[Member] = [*self._claimers]
        if (leases.free or self.fresh) and not self.pause_ms and not self.retiring:
            wanting += [worker for worker in self._queue.workers.values() if self._room(worker)]
        if not wanting:
            self.window_ms = 0
            return
        jitter_ms = self._queue.config.claim_jitter_ms
        if jitter_ms and now < (self.window_ms or now + jitter_ms):
            self.window_ms = self.window_ms or now + jitter_ms
            return
        self.window_ms = 0
        self._claimers = []
        # Polls alone are served as they came; connections all want the same job, so there it has to be divided.
        self._take(wanting, evenly=jitter_ms > 0 or any([isinstance(member, Worker) for member in wanting]))

    def _room(self, worker: Worker) -> int:
        """How many more jobs a connection wants."""
        if worker.unsent >= self._backlog_bytes:
            return 0
        return max(0, worker.max - self._leases.of_stream(worker.stream))

    def _budget(self, member: Member) -> int:
        """Bytes that it may be given at once. A connection gets no more than its gateway should have to keep."""
        return limits.CLAIM_BYTES if isinstance(member, Claimer) else self._backlog_bytes - member.unsent

    def _take(self, cohort: list[Member], *, evenly: bool) -> None:
        wanted = [member.max if isinstance(member, Claimer) else self._room(member) for member in cohort]
        total = sum(wanted)
        picked = self._pick(cohort, total)
        room = max(0, limits.MAX_LEASES - len(self._leases))
        if not picked and not room and self._leases.misses and not self._why:
            self._reach()
            picked = self._pick(cohort, total)
        limit = min(total, len(picked) + room)
        if not limit:
            full = throttled_by("max_leases", limits.MAX_LEASES, "ack or nack jobs of this queue first")
            _refuse(cohort, self._out_of_reach() if self._leases.misses else full)
            return
        self._taking = Taking(cohort, wanted, picked, after=self._leases.cursor, evenly=evenly)
        self._queue.counts.passing = True
        head = messages.TakeJobs(
            topic=self._queue.topic,
            topic_id=self._queue.topic_id,
            wanted=picked,
            after=self._leases.cursor,
            held=self._leases.held_beyond(self._leases.cursor),
            limit=limit,
            max_bytes=min(limits.CLAIM_BYTES, sum(map(self._budget, cohort))),
            fresh=room,
        )
        self._queue.asks.call(self._queue.shard, Op.TAKE_JOBS, head, self._taken)

    def _pick(self, cohort: list[Member], total: int) -> list[int]:
        """Free jobs to ask for. Those that were delivered too often go to the dead letters."""
        max_deliveries = self._queue.config.max_deliveries if self._queue.config.dead_letter else 0
        picked, worn = self._leases.pick(total, max_deliveries=max_deliveries)
        if worn:
            moving = self._leases.move(worn)
            seqs = [lease.seq for lease in moving]
            self._untried.update(seqs)
            for member in cohort:
                if isinstance(member, Claimer):
                    member.moving.update(seqs)
            self._queue.worn(moving)
        return picked

    def _miss(self, taken: messages.JobsTaken) -> bool:
        """Set aside what the shard can't read; whether that is news."""
        if not taken.missed:
            if self.missed_ms:
                self._reach()
            return False
        self.missed_ms = self.missed_ms or self._queue.now_ms() + _MISSED_MS
        self._why = taken.why or self._why
        return self._leases.miss(taken.missed)

    def _reach(self) -> None:
        """The next pass asks for what could not be read, too."""
        self.missed_ms = 0
        self._why = ""
        self._leases.reach()
        self.fresh = True

    def _out_of_reach(self) -> ApiError:
        return unreadable(Unreachable(self._why))

    def _taken(self, taken: messages.JobsTaken, body: bytes | memoryview, error: Exception | None) -> None:
        taking, self._taking = self._taking, None
        self._queue.counts.taken(-1 if error is not None else taken.removals)
        assert taking is not None
        self._queue.touch()
        leases = self._leases
        if error is not None or self._queue.ended:
            leases.put_back(taking.picked)
            self.pause_ms = self._queue.now_ms() + _PAUSE_MS
            _refuse(taking.cohort, as_api_error(error or Unavailable()))
            if isinstance(error, ApiError) and is_gone(error):
                self._queue.lost()
            return
        self._queue.gone(taken.gone)
        leases.put_back(set(taking.picked).difference(taken.seqs[: taken.wanted]))
        news = self._miss(taken)
        if (taken.gone or (news and taken.wanted < len(taking.picked))) and leases.free:
            # Fresh jobs stand where free ones should: some that were asked for had been removed, or are missed.
            leases.put_back(taken.seqs[: taken.wanted])
            self._claimers[:0] = [member for member in taking.cohort if isinstance(member, Claimer) and not member.gone]
            self.window_ms = self._queue.now_ms() if self._claimers else 0
            return
        self.fresh = not taken.end or leases.cursor < taking.after
        if leases.cursor >= taking.after:  # else somebody's jobs have become fresh again meanwhile
            leases.cursor = taken.at
            if taken.beyond:
                leases.pass_over(stays=taken.at, beyond=taken.beyond)
        leases.advance(self._queue.now_ms())
        usable = [at for at, seq in enumerate(taken.seqs) if leases.claimable(seq, fresh=at >= taken.wanted)]
        self._divide(taking, taken, body, usable)

    def _divide(self, taking: Taking, taken: messages.JobsTaken, body: bytes | memoryview, usable: list[int]) -> None:
        """Everybody gets a share. Whoever got nothing although there is more waits for the next pass."""
        cohort, wanted = taking.present()
        if taking.evenly and cohort:
            shares = fair_share.evenly(len(usable), wanted, turn=self._turn)
            self._turn += fair_share.remainder(len(usable), wanted)
        else:
            shares = fair_share.in_order(len(usable), wanted)
        now = self._queue.now_ms()
        empty: list[Claimer] = []
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
            elif not mine:
                empty.append(member)
                continue
            given.append((member, *self._lease(member, mine, taken, body, now)))
        if left := left + usable[begin:]:  # or somebody has left meanwhile
            self._leases.put_back(taken.seqs[at] for at in left if at < taken.wanted)
            self._leases.rewind([taken.seqs[at] for at in left if at >= taken.wanted])
            self.fresh = True
        if empty and self._leases.misses and not self._why and not (self.fresh or self._leases.free):
            self._reach()  # there are no others
        if empty and (self.fresh or self._leases.free):
            self._claimers[:0] = empty  # before those who came meanwhile
            self.window_ms = now
        elif empty and self._why:
            _refuse(empty, self._out_of_reach())
        else:
            given += [(member, *self._lease(member, [], taken, body, now)) for member in empty]
        self._queue.journal.when_logged(
            lambda: self._hand_out(given, taken), lambda error: self._take_back(given, error), changed=bool(usable)
        )

    def _lease(
        self, member: Member, mine: list[int], taken: messages.JobsTaken, body: bytes | memoryview, now: int
    ) -> tuple[messages.Claimed, bytes]:
        """Give a member its share: the leases, the event, and the bytes for its answer."""
        mine.sort(key=taken.seqs.__getitem__)
        seqs = [taken.seqs[at] for at in mine]
        self._record_expired(seqs)
        deadline = now + (member.lease_ms or self._queue.config.lease_ms)
        leases = self._leases.claim(seqs, node=member.node, deadline_ms=deadline, stream=member.stream)
        self._queue.journal.record(
            "claimed", member.node, leases, deadline=deadline, stream=member.stream, key=member.key
        )
        if member.key and leases:
            self._queue.repeats.note(member.node, member.key, leases)
        self._queue.claimed += len(leases)
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
        get = self._leases.get
        for seq in seqs:
            if (lease := get(seq)) is not None and lease.state == State.EXPIRED:
                self._queue.journal.record("released", lease.node, [lease], reason="expired")

    def _hand_out(self, given: list[Share], taken: messages.JobsTaken) -> None:
        def send() -> None:
            ready = self._queue.counts.ready(taken.live)
            for member, claimed, body in given:
                if isinstance(member, Claimer):
                    self._answer(member, msgspec.structs.replace(claimed, ready=ready), body)
                elif claimed.seqs and not member.gone:
                    member.caller.answer(Op.JOBS, claimed, body)

        self._queue.counts.compare(taken.removals, send, lambda error: send())

    def _answer(self, claimer: Claimer, claimed: messages.Claimed, body: bytes) -> None:
        def send() -> None:
            claimer.caller.answer(Op.CLAIM, claimed, body)

        if claimer.moving.isdisjoint(self._untried):
            send()
        else:
            self._held.append(_Held(claimer.moving, send, self._queue.now_ms() + _LETTERS_MS))

    def _take_back(self, given: list[Share], error: ApiError) -> None:
        """The leases could not be made as durable as they have to be: nobody got them."""
        for member, claimed, _ in given:
            released = self._leases.unclaim(claimed.seqs, claimed.leases)
            self._queue.journal.record("released", member.node, released, reason="refused")
            if isinstance(member, Worker) and claimed.ends:
                member.pushed -= claimed.ends[-1]
        self.fresh = True
        _refuse([member for member, _, _ in given], error)
        self.pause_ms = self._queue.now_ms() + _PAUSE_MS
        self._queue.touch()


def _refuse(members: Iterable[Member], error: ApiError) -> None:
    """Connections just wait."""
    for member in members:
        if isinstance(member, Claimer) and (member.key or not member.gone):  # behind a key others may wait
            member.caller.fail(Op.CLAIM, error)


def _within(mine: list[int], ends: list[int], budget: int) -> int:
    """How many of these jobs fit; at least one."""
    for count, at in enumerate(mine):
        budget -= ends[at] - (ends[at - 1] if at else 0)
        if budget < 0:
            return max(1, count)
    return len(mine)
