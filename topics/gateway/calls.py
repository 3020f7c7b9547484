"""Questions on their way to shards: correlation, deadlines, and what happens when a shard goes away.

Rules: every call ends exactly once, with an answer, an error of its own, or 503. A shard that is down answers 503
at once; one that goes down while a call is out makes the outcome unknown, and says so; a retry with the same
idempotency key is safe. For one that a reload replaces, clients' calls wait (admission/holding.py). Whoever fails to
take an answer loses its connection; the answers behind it are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from topics.actors import messages
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.errors import ApiError, RingFull, client_left
from topics.gateway.admission.holding import Holding
from topics.gateway.admission.parking import Parking
from topics.gateway.admission.pressure import Pressure
from topics.gateway.api.types import Call, Gather, GatherSink, Outcome, Response, Sink, Wait, error_response
from topics.gateway.http1.append_batch import PlainEntry, PlainRun
from topics.gateway.large.slices import Slices
from topics.shm.counters import State

_NEVER = 2**63


class Fallible(Protocol):
    def abort(self) -> None: ...


class Pending(Protocol):
    """A call that is out."""

    deadline_ms: int

    def take(self, message: bytes) -> None: ...
    def finish(self, value: Response) -> None: ...
    def abort(self) -> None: ...


class _Asked(msgspec.Struct, gc=False):
    call: Call
    sink: Sink
    deadline_ms: int

    def take(self, message: bytes) -> None:
        try:
            value = self.call.render(*messages.decode_answer(message))
        except ApiError as error:
            value = error_response(error)
        self.sink.finish(value)

    def finish(self, value: Response) -> None:
        self.sink.finish(value)

    def abort(self) -> None:
        self.sink.abort()


class Calls:
    """Peers are numbered: the shards first, then whoever else is asked."""

    def __init__(
        self,
        *,
        shards: int,
        timeout_ms: int,
        pressure: Pressure | None = None,
        state_of: Callable[[int], State] = lambda peer: State.READY,
    ) -> None:
        self.pressure = pressure or Pressure()
        self._state_of = state_of  # what the board says of a peer
        self.parking = Parking()
        self.holding = Holding(timeout_ms=timeout_ms)
        self.slices = Slices(self.failed)  # requests whose bodies are being read, or their answers compressed
        self.router = shards
        self.queue = shards + 1
        peers = shards + 2
        self._links: list[Link | None] = [None] * peers
        self.timeout_ms = timeout_ms
        self._pending: list[dict[int, Pending]] = [{} for _ in range(peers)]
        self._runs: list[dict[int, PlainRun]] = [{} for _ in range(peers)]  # by their first correlation
        self._next = 1
        self._left: dict[int, list[bytes]] = {}  # by peer: messages that were taken from its ring, for the next round
        self._turn = 0  # the peer whose messages the next round begins with
        self.refused = 0
        self.on_unasked: Callable[[int, bytes], None] = lambda shard, message: None  # pushes, and answers too late
        self.on_fault: Callable[[Exception, int], None] = _raised  # a bug; with the id of its request, if there is one

    def __len__(self) -> int:
        return sum(map(len, self._pending)) + len(self.parking) + len(self.holding) + len(self.slices)

    def new_id(self) -> int:
        """For a request; its questions carry it too, as their correlation."""
        id = self._next
        self._next = id + 1
        return id

    # --- links ---

    def link_up(self, shard: int, link: Link) -> None:
        self._links[shard] = link
        self.holding.link_up(shard)

    def link_down(self, shard: int) -> None:
        """Its last answers are in the ring. Nothing else asked of this shard will be answered: say so."""
        if (link := self._links[shard]) is not None:
            self._take(shard, self._left.pop(shard, []) + link.last_words(), lambda shard, message: None)
        self._links[shard] = None
        pending, self._pending[shard] = self._pending[shard], {}
        self._runs[shard].clear()
        for correlation, entry in pending.items():
            self._end(entry, error_response(_unknown_outcome(self._name(shard))), correlation)

    def _name(self, peer: int) -> str:
        return {self.router: "router", self.queue: "queue"}.get(peer, f"shard-{peer}")

    def number(self, name: str) -> int:
        return self.router if name == "router" else self.queue if name == "queue" else int(name.removeprefix("shard-"))

    def linked(self, shard: int) -> bool:
        return self._links[shard] is not None

    def reachable(self, shard: int) -> bool:
        """It can be asked; if it is being replaced, the answer takes a moment longer."""
        return self._links[shard] is not None or shard in self.holding.replacing

    def hold(self, shard: int) -> None:
        """It is about to be replaced: clients' calls wait until it is back."""
        self.holding.hold(shard)

    def has_sent_all(self, shard: int) -> bool:
        link = self._links[shard]
        return link is None or link.writer.sent_all

    # --- asking ---

    def submit(self, outcome: Outcome, sink: Sink, id: int = 0) -> None:
        """See that the sink gets its Response, now or later."""
        if isinstance(outcome, Call):
            self.ask(outcome, sink, id, waits=True)
        elif isinstance(outcome, Response):
            sink.finish(outcome)
        elif isinstance(outcome, Wait):
            outcome.join(sink)
        else:
            self._gather(outcome, sink, id)

    def _gather(self, gather: Gather, sink: Sink, id: int) -> None:
        collector = GatherSink(gather, lambda outcome: self.submit(outcome, sink, id), sink.abort)
        for index, call in enumerate(gather.calls):
            self.ask(call, collector.slot(index), id, waits=True)

    def ask(self, call: Call, sink: Sink, id: int = 0, *, waits: bool = False) -> int:
        """Send one call, under this id if there is one; its correlation, or 0 if it is not out. waits: it may be kept
        back while the shard is replaced; what does not is refused then."""
        shard = call.shard
        link = self._links[shard]
        if self.holding.keeps(shard):
            if not (waits and self._keep(call, sink, id)):
                sink.finish(error_response(_down(self._name(shard))))
            return 0
        if link is None:
            sink.finish(error_response(_down(self._name(shard))))
            return 0
        patient = call.op is Op.APPEND and call.head.patient
        if patient and (self._must_wait(shard) or self.parking.has(shard)):
            if not self.parking.park(call, sink, id):
                sink.finish(error_response(_backpressure(self._name(shard))))
            return 0
        correlation = self._send(link, call, sink, id)
        if not correlation and waits and shard in self.holding.replacing and self._keep(call, sink, id):
            return 0
        if not correlation and not (patient and self.parking.park(call, sink, id)):
            self.refused += 1
            sink.finish(error_response(_backpressure(self._name(shard))))
        return correlation

    def _send(self, link: Link, call: Call, sink: Sink, id: int) -> int:
        """The call's correlation, or 0: the ring is full."""
        pending = self._pending[call.shard]
        correlation = id if id and id not in pending else self.new_id()
        deadline_ms = time.monotonic_ns() // 1_000_000 + self.timeout_ms + call.timeout_ms
        try:
            if call.pieces is None:
                link.writer.send(messages.pack(call.op, correlation, call.head, call.body, deadline_ms=deadline_ms))
            else:
                head = messages.pack(call.op, correlation, call.head, deadline_ms=deadline_ms)
                link.writer.send_long([head, *call.pieces])
                call.pieces = []  # each is let go of when it is in the ring
        except RingFull:
            return 0
        pending[correlation] = _Asked(call, sink, deadline_ms)
        return correlation

    # --- what waits for a shard that is replaced ---

    def _keep(self, call: Call, sink: Sink, id: int) -> bool:
        def send(waited_us: int) -> bool:
            call.throttle_us = waited_us
            return self._send_parked(call, sink, id)

        def refuse() -> None:
            self._end(sink, error_response(_down(self._name(call.shard))), id)

        return self.holding.keep(
            call.shard, send=send, refuse=refuse, size=call.size, of=sink, waits=call.timeout_ms > 0
        )

    def _keep_run(self, run: PlainRun) -> bool:
        def send(waited_us: int) -> bool:
            deadline_ms = time.monotonic_ns() // 1_000_000 + self.timeout_ms
            for entry in run.entries:
                entry.deadline_ms = deadline_ms
            link = self._links[run.shard]
            if link is not None:
                return self._send_run(link, run)
            if run.shard in self.holding.replacing:
                return False
            refuse()
            return True

        def refuse() -> None:
            for entry in run.entries:
                self._end(entry, error_response(_down(self._name(run.shard))), entry.id)

        return self.holding.keep(run.shard, send=send, refuse=refuse, size=run.size)

    # --- writes that wait ---

    def _must_wait(self, shard: int) -> bool:
        self.pressure.look()
        return shard in self.pressure.refusing

    def release(self, now_ns: int) -> None:
        """Once a round: what was kept back goes on as soon as its shard takes it."""
        if self.holding.busy:
            self.holding.look(self._state_of, linked=self.linked)
        if len(self.parking):
            self.parking.release(now_ns, waits=self._must_wait, send=self._send_parked)
        else:
            self.parking.now_ns = now_ns

    def _send_parked(self, call: Call, sink: Sink, id: int) -> bool:
        if self.holding.held(call.shard):
            return False
        link = self._links[call.shard]
        if link is None:
            if call.shard in self.holding.replacing:
                return False
            self._end(sink, error_response(_down(self._name(call.shard))), id)
            return True
        return self._send(link, call, sink, id) != 0

    def tell(self, shard: int, message: bytes) -> None:
        """Something that has no answer; lost if the shard is away."""
        if (link := self._links[shard]) is not None:
            link.writer.send_always(message)

    def send_plain(self, run: PlainRun) -> None:
        """The same for appends without options, whose entries take the answer themselves."""
        shard, entries = run.shard, run.entries
        link = self._links[shard]
        correlation = self._next
        for entry in entries:
            entry.id = correlation
            correlation += 1
        self._next = correlation
        kept = self.holding.keeps(shard)
        if not kept and link is not None and self._send_run(link, run):
            return
        if (kept or shard in self.holding.replacing) and self._keep_run(run):
            return
        if link is None or self.holding.held(shard):
            error = _down(self._name(shard))
        else:
            self.refused += len(entries)
            error = _backpressure(self._name(shard))
        for entry in entries:
            self._end(entry, error_response(error), entry.id)

    def _send_run(self, link: Link, run: PlainRun) -> bool:
        """False: the ring is full."""
        entries = run.entries
        first, deadline_ms = entries[0].id, entries[0].deadline_ms
        try:
            link.writer.send(messages.pack_plain(first, deadline_ms, run.encoded, run.size, run.counts, run.batch()))
        except RingFull:
            return False
        pending = self._pending[run.shard]
        for entry in entries:
            pending[entry.id] = entry
        if len(entries) > 1:
            self._runs[run.shard][first] = run
        return True

    def abandon(self, sink: Sink) -> None:
        """The client has gone: a shard need not wait on its behalf. Rare, so a search will do."""
        self.slices.drop(sink)
        if self.holding.abandon(sink):
            return
        for shard, pending in enumerate(self._pending):
            for correlation, entry in pending.items():
                if isinstance(entry, _Asked) and entry.sink is sink and entry.call.timeout_ms:
                    link = self._links[shard]
                    if link is not None:
                        link.writer.send_always(messages.pack_cancel(correlation))
                    del pending[correlation]
                    return

    def leave(self, sink: Sink) -> None:
        """The client sends no more: what waits on its behalf ends now. What does not wait is answered as always, and
        whether it does is known to whom it was sent."""
        if self.holding.abandon(sink, waits=True):
            sink.finish(error_response(client_left()))
            return
        for shard, pending in enumerate(self._pending):
            for correlation, entry in pending.items():
                if isinstance(entry, _Asked) and entry.sink is sink and entry.call.timeout_ms:
                    if (link := self._links[shard]) is not None:
                        link.writer.send_always(messages.pack_end_poll(correlation))
                    return

    def answer_polls(self) -> None:
        """Long polls are answered now, with what there is: whoever replaces us will be asked again."""
        for shard, pending in enumerate(self._pending):
            link = self._links[shard]
            for correlation, entry in pending.items():
                if link is not None and isinstance(entry, _Asked) and entry.call.op is Op.DIFF:
                    link.writer.send_always(messages.pack_end_poll(correlation))

    def end_polls(self, error: ApiError) -> None:
        """Long polls end now, with this error: nobody waits for a server that stops."""
        for shard, pending in enumerate(self._pending):
            for correlation, entry in list(pending.items()):
                if isinstance(entry, _Asked) and entry.call.timeout_ms and pending.pop(correlation, None) is not None:
                    if (link := self._links[shard]) is not None:
                        link.writer.send_always(messages.pack_cancel(correlation))
                    self._end(entry, error_response(error, close=True), correlation)

    # --- answers ---

    def has_answers(self) -> bool:
        return bool(self._left) or any([link is not None and link.has_work() for link in self._links])

    def drain(self, until_ns: int = _NEVER) -> None:
        """Hand out the answers that have arrived. Rendering one can be a lot of work: at `until_ns` (perf_counter_ns)
        the rest is left for the next call, which begins with the peer behind the last one. One is always taken."""
        peers = len(self._links)
        for _ in range(peers):
            shard = self._turn
            self._turn = shard + 1 if shard + 1 < peers else 0
            link = self._links[shard]
            if link is None or not (received := self._left.pop(shard, None) or link.drain()):
                continue
            done = self._take(shard, received, self.on_unasked, until_ns)
            if done < len(received):
                self._left[shard] = received[done:]
            if time.perf_counter_ns() > until_ns:
                return

    def _take(
        self,
        shard: int,
        received: list[bytes],
        on_unasked: Callable[[int, bytes], None],
        until_ns: int = _NEVER,
    ) -> int:
        """How many of them were handed out."""
        pending = self._pending[shard]
        correlation_of = messages.unpack_correlation
        clock = time.perf_counter_ns
        runs = self._runs[shard]
        for done, message in enumerate(received, 1):
            requests, correlation = correlation_of(message)
            if runs and (run := runs.pop(correlation, None)) is not None and requests > 1:
                self._share_out(run, pending, correlation, message)
            elif (entry := pending.pop(correlation, None)) is not None:
                try:
                    entry.take(message)
                except Exception as error:
                    self.failed(entry, error, correlation)
            else:
                on_unasked(shard, message)
            if clock() > until_ns:
                return done
        return len(received)

    def flush(self) -> None:
        for link in self._links:
            if link is not None:
                link.flush()

    def expire(self) -> None:
        """End calls whose deadline has passed; they are in order but for long polls."""
        now = time.monotonic_ns() // 1_000_000
        for shard, pending in enumerate(self._pending):
            late = [correlation for correlation, entry in pending.items() if entry.deadline_ms <= now]
            for correlation in late:
                if (entry := pending.pop(correlation, None)) is not None:  # it may have gone with another's connection
                    self._end(entry, error_response(_unknown_outcome(self._name(shard))), correlation)
            runs = self._runs[shard]
            over = [first for first, run in runs.items() if all(entry.deadline_ms <= now for entry in run.entries)]
            for first in over:  # a shard does not answer what it took too late
                del runs[first]

    def _share_out(self, run: PlainRun, pending: dict[int, Pending], correlation: int, message: bytes) -> None:
        """One answer for a whole run: each request gets its part of the seqs, also behind one that gave up waiting."""
        first, _, head_seq, created, deduped, wal_us, fsync_us = messages.unpack_appended(message)
        for entry in run.entries:
            if pending.pop(correlation, None) is not None:
                try:
                    entry.take_fields((first, entry.records, head_seq, created, deduped, wal_us, fsync_us))
                except Exception as error:
                    self.failed(entry, error, correlation)
            first += entry.records
            correlation += 1

    def _end(self, entry: Sink | PlainEntry, value: Response, id: int) -> None:
        """Away from whoever asked: a fault is nobody else's."""
        try:
            entry.finish(value)
        except Exception as error:
            self.failed(entry, error, id)

    def failed(self, whose: Fallible, error: Exception, id: int = 0) -> None:
        """A fault is that of one connection, which ends, whatever goes wrong in that, too."""
        self.on_fault(error, id)
        try:
            whose.abort()
        except Exception as another:
            self.on_fault(another, id)


def _raised(error: Exception, id: int) -> None:
    raise error


def _down(peer: str) -> ApiError:
    return ApiError(
        "shard_unavailable",
        f"{peer} is not serving at the moment; nothing was done. Retry",
        _where(peer),
        retry_after_s=1,
    )


def _unknown_outcome(peer: str) -> ApiError:
    advice = "A retry with the same idempotency key is safe"
    if peer == "queue":
        advice = "Retry; a claim with the same idempotency key gets its jobs, others come back when their lease ends"
    return ApiError(
        "shard_unavailable",
        f"{peer} went away before it answered: whether the request took effect is unknown. {advice}",
        {**_where(peer), "outcome": "unknown"},
        retry_after_s=1,
    )


def _backpressure(peer: str) -> ApiError:
    return ApiError(
        "throttled",
        f"{peer} has more work than it can take; nothing was done. Slow down and retry",
        {"retry_after_ms": 100, **_where(peer)},
        retry_after_s=1,
    )


def _where(peer: str) -> dict[str, int]:
    kind, _, number = peer.partition("-")
    return {kind: int(number)} if number else {}
