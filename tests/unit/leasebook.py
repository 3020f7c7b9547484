"""What the tests of the lease table share: its books counted anew, and a table that writes its events.

Only the public face of the table is used. Written does to a table what its owner does and writes each event that the
owner would write, so that any history can be replayed from its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from topics.queue.lease_table import Lease, Leases, State
from topics.storage.leases import LeaseEvent, decode_event, encode_event

HELD = {State.LEASED, State.ENDING}
CLAIMABLE = {State.EXPIRED, State.FREE}
OWN = HELD | {State.EXPIRED}  # the connection they came by gives them back when it closes
HIDDEN = {State.DELAYED, State.MOVING}
Row = tuple[int, State, str, int, int, int, int]


def row(lease: Lease) -> Row:
    return lease.seq, lease.state, lease.node, lease.number, lease.deadline_ms, lease.deliveries, lease.stream


def leases_of(leases: Leases) -> list[Lease]:
    found = [leases.get(seq) for seq in sorted(leases.seqs())]
    assert None not in found
    return [lease for lease in found if lease is not None]


def rows(leases: Leases) -> list[Row]:
    return [row(lease) for lease in leases_of(leases)]


def states(leases: Leases) -> dict[int, State]:
    return {lease.seq: lease.state for lease in leases_of(leases)}


def check_books(leases: Leases, *, picked: Iterable[int] = (), missed: Iterable[int] = ()) -> None:
    """Every counter is what walking the table gives. picked: taken by `pick` and neither claimed nor put back yet;
    missed: not to be picked."""
    table = leases_of(leases)
    assert len(leases) == len(table) == len(set(leases.seqs()))
    assert all(lease.seq in leases for lease in table)
    assert leases.in_flight == sum(lease.state in HELD for lease in table)
    assert leases.hidden == sum(lease.state in HIDDEN for lease in table)
    held = Counter(lease.stream for lease in table if lease.stream and lease.state in HELD)
    owned = {lease.stream for lease in table if lease.stream and lease.state in OWN}
    assert sorted(leases.streams()) == sorted(owned)
    assert {stream: leases.of_stream(stream) for stream in owned} == {stream: held[stream] for stream in owned}
    claimable = {lease.seq for lease in table if lease.state in CLAIMABLE}
    assert all(leases.claimable(lease.seq, fresh=False) == (lease.seq in claimable) for lease in table)
    assert leases.free == bool(claimable.difference(picked, missed))


def seen(leases: Leases, *, closed: Collection[int] = ()) -> list[tuple[object, ...]]:
    """The table as far as anybody can tell tables apart: a job that was given back has no holder and no deadline. A
    lease whose ack was on its way when its stream closed is no stream's; the log does not say so, it has to be told."""
    shown: list[tuple[object, ...]] = []
    for lease in leases_of(leases):
        if lease.state in (State.LEASED, State.EXPIRED):
            shown.append((*row(lease)[:-1], 0 if lease.stream in closed else lease.stream))
        elif lease.state == State.DELAYED:
            shown.append((lease.seq, lease.state, lease.deadline_ms, lease.deliveries))
        else:
            shown.append((lease.seq, lease.state, lease.deliveries))
    return shown


class Written:
    """A table and the log of its events."""

    def __init__(self, *, first_number: int = 1) -> None:
        self.leases = Leases(first_number=first_number)
        self.log: list[bytes] = []
        self.now_ms = 0
        self.closed: set[int] = set()  # streams

    def advance(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.leases.advance(now_ms)

    def _write(self, event: LeaseEvent) -> None:
        self.log.append(encode_event(event))

    def claim(self, seqs: Iterable[int], *, node: str, deadline_ms: int, stream: int = 0) -> list[Lease]:
        claimed = self.leases.claim(seqs, node=node, deadline_ms=deadline_ms, stream=stream)
        if claimed:
            deliveries = [lease.deliveries for lease in claimed]
            self._write(
                LeaseEvent(
                    "claimed",
                    node=node,
                    seqs=[lease.seq for lease in claimed],
                    leases=[lease.number for lease in claimed],
                    deadline=deadline_ms,
                    deliveries=[] if set(deliveries) == {1} else deliveries,
                    stream=stream,
                )
            )
        return claimed

    def _of(self, changed: Sequence[Lease]) -> tuple[list[int], list[int]]:
        return [lease.seq for lease in changed], [lease.number for lease in changed]

    def nack(
        self, node: str, seqs: Sequence[int], numbers: Sequence[int] | None = None, *, until_ms: int | None = None
    ) -> list[Lease]:
        changed = self.leases.nack(node, seqs, numbers, until_ms=until_ms)
        if changed:
            names, leases = self._of(changed)
            self._write(
                LeaseEvent("released", node=node, seqs=names, leases=leases, deadline=until_ms or 0, reason="nack")
            )
        return changed

    def extend(
        self, node: str, seqs: Sequence[int], numbers: Sequence[int] | None = None, *, deadline_ms: int
    ) -> list[Lease]:
        changed = self.leases.extend(node, seqs, numbers, deadline_ms=deadline_ms)
        if changed:
            names, leases = self._of(changed)
            self._write(LeaseEvent("extended", node=node, seqs=names, leases=leases, deadline=deadline_ms))
        return changed

    def disconnect(self, stream: int) -> list[Lease]:
        self.closed.add(stream)
        changed = self.leases.disconnect(stream)
        if changed:
            names, leases = self._of(changed)
            self._write(LeaseEvent("released", seqs=names, leases=leases, reason="disconnect"))
        return changed

    def acked(self, seqs: Iterable[int]) -> None:
        """The delete of what was acked has happened."""
        self._end("acked", State.ENDING, seqs)

    def dead_lettered(self, seqs: Iterable[int]) -> None:
        self._end("dead_lettered", State.MOVING, seqs)

    def _end(self, name: str, state: State, seqs: Iterable[int]) -> None:
        found = [self.leases.get(seq) for seq in seqs]
        ended = [lease for lease in found if lease is not None and lease.state == state]
        if ended:
            names, leases = self._of(ended)
            self._write(LeaseEvent(name, seqs=names, leases=leases))  # type: ignore[arg-type]
            self.leases.remove(names)

    def checkpoint(self) -> None:
        self._write(LeaseEvent("checkpoint", jobs=self.leases.checkpoint()))


def replayed(log: Iterable[bytes], *, first_number: int = 1) -> Leases:
    leases = Leases(first_number=first_number)
    for data in log:
        leases.replay(decode_event(data))
    return leases
