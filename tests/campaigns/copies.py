"""Routers in the histories of stepped.py: forwarders stepped like the rest, and what must hold of their copies.

    s -> cf         fsync to fsync
    s -> cd         fsync to disk
    cf -> cc        a second hop, to disk

Clients write to the destinations as well, and delete there and in the sources. The data of each record is unique, so a
copy is known by it.

    always             a seq has one meaning; each record is there once, copies in the order of their source; what a
                       client deleted stays deleted
    after a kill       copies have their seqs and times; one that is gone is a tombstone, and its record is gone from
                       the source
    after a power cut  the same for copies whose lines were synced; the others are there after they are copied again,
                       perhaps at higher seqs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from model import Stored
from pipeshard import Forwarder, PipeShard

if TYPE_CHECKING:
    from .stepped import Sight, Sights

ROUTES = {"cf": "s", "cd": "s", "cc": "cf"}  # destination -> source, in the order of the copying
CLASSES = {"s": "fsync", "cf": "fsync", "cd": "disk", "cc": "disk"}


class Wrong(AssertionError):
    """What a client was told does not hold."""


class StrictForwarder(Forwarder):
    """It lets errors through; the next step opens the pipe again."""

    def step(self, *, limit: int = 1_000) -> bool:
        try:
            if self.at is None:
                self.open()
            return self._forward(limit)
        except BaseException:
            self.at = None
            raise

    def open(self) -> None:
        opened = self.shard.open_pipe(self.source, self.dest)
        self.at, self.until = opened.at, opened.until

    def refill(self) -> None:
        """As a forwarder begins: copies of an earlier life get their bytes. Nothing is copied that is new, unless the
        power failed since the shard has last been level with the source."""
        self.at = None
        for _ in range(1_000):
            if self.at is None:
                self.open()
            pipe = self.shard.topic(self.dest).pipe
            if self.until is None and self.at is not None and pipe is not None and not pipe.rebuilding:
                return
            self._forward(1_000)
        raise Wrong(f"{self.dest} is never readable again")


class Forwarders:
    """All of a shard. Thrown away with it."""

    def __init__(self, shard: PipeShard) -> None:
        self._shard = shard
        self._all: dict[str, StrictForwarder] = {}

    def _of(self, dest: str) -> StrictForwarder | None:
        topics = self._shard.engine.topics
        if dest not in topics or ROUTES[dest] not in topics:
            return None
        if dest not in self._all:
            self._all[dest] = StrictForwarder(self._shard, ROUTES[dest], dest)
        return self._all[dest]

    def step(self, dest: str, limit: int) -> None:
        forwarder = self._of(dest)
        if forwarder is not None:
            forwarder.step(limit=limit)

    def begin(self) -> None:
        """The shard has started."""
        self._all.clear()
        for dest in ROUTES:
            if dest in self._shard.engine.topics and self._shard.topic(dest).pipe is not None:
                forwarder = self._of(dest)
                if forwarder is not None:
                    forwarder.refill()

    def pump(self) -> None:
        for dest in ROUTES:
            forwarder = self._of(dest)
            if forwarder is not None:
                forwarder.pump()


# --- the oracle --------------------------------------------------------------------------------------


def plain(sights: Sights) -> Sights:
    """Without destinations."""
    return {name: sight for name, sight in sights.items() if name not in ROUTES}


def check_kept(shard: PipeShard, dest: str, told: Sight, now: Sights, deleted: set[bytes], *, exact: bool) -> None:
    """Each record that was told is there at its seq; or it was deleted; or it is a tombstone, and its source has lost
    it."""
    there = {stored.seq: stored for stored in now[dest].records}
    source = now.get(ROUTES[dest])
    left = set() if source is None else {stored.record.data for stored in source.records}
    for was in told.records:
        found = there.get(was.seq)
        if found is not None and (found == was if exact else found.record == was.record):
            continue
        if was.record.data in deleted:
            continue
        if found is not None:
            raise Wrong(f"{dest}: seq {was.seq} is {found}, was {was}")
        if is_direct(was, dest) or was.record.data in left:
            raise Wrong(f"{dest}: seq {was.seq} is gone: {was.record.data!r}; there are {sorted(there)}")
        gap = shard.diff(dest, was.seq - 1, limit=1).tombstone
        if gap is None or not gap.gap_from <= was.seq <= gap.gap_to:
            raise Wrong(f"{dest}: seq {was.seq} went with its source, and a reader is told {gap}")


def is_direct(stored: Stored, dest: str) -> bool:
    return stored.record.data.startswith((b'"%b-' % dest.encode(), b'"next"'))


def check_copies(
    shard: PipeShard,
    sights: Sequence[Sights],
    base: int,
    found: Mapping[str, Sight],
    *,
    under_way: Sights | None = None,
    killed: bool,
) -> None:
    """sights: after each step that was answered; base: the last of them that must hold; under_way: after the next
    step. After a power cut everything has been copied again."""
    for dest, source in ROUTES.items():
        now = found.get(dest)
        promised = sights[base].get(dest)
        if now is None:
            if promised is not None:
                raise Wrong(f"{dest} is gone")
            continue
        history = [each[dest].records for each in sights if dest in each]
        coming = under_way[dest].records if under_way is not None and dest in under_way else ()
        unseen = {stored.seq: stored for stored in coming}
        given = {stored.record.data for stored in found[source].records} if source in found else set()
        seen: dict[int, Stored] = {}
        for records in history:
            for stored in records:
                if seen.setdefault(stored.seq, stored) != stored:
                    raise Wrong(f"{dest}: seq {stored.seq} was {seen[stored.seq]}, then {stored}")
        for stored in now.records:
            was = seen.get(stored.seq)
            if was is None and stored == unseen.get(stored.seq):
                continue
            if was is None and stored.record.data not in given:
                raise Wrong(f"{dest}: nobody has written seq {stored.seq}: {stored}")
            if was is None and killed and promised is not None and stored.seq <= promised.head:
                raise Wrong(f"{dest}: seq {stored.seq} is {stored}, and nobody saw it below {promised.head}")
            if was is not None and (stored != was if killed else stored.record != was.record):
                raise Wrong(f"{dest}: seq {stored.seq} is {stored}, was {was}")
        twice = [data for data, count in Counter(stored.record.data for stored in now.records).items() if count > 1]
        if twice:
            raise Wrong(f"{dest}: {twice[:3]} are there twice")
        _check_order(dest, now, found.get(source))
        # Deleted by then; and by a step that a power cut may have taken back.
        surely = _gone([each[dest].records for each in sights[: base + 1] if dest in each])
        perhaps = _gone([*history, coming] if under_way is not None else history)
        if back := surely & {stored.record.data for stored in now.records}:
            raise Wrong(f"{dest}: {sorted(back)[:3]} had gone, and are back")
        if promised is not None:
            check_kept(shard, dest, promised, dict(found), perhaps, exact=killed)
        if not killed and source in found:
            copied = {stored.record.data for stored in now.records} | perhaps
            if lacking := [s for s in found[source].records if s.record.data not in copied]:
                raise Wrong(f"{dest}: {lacking[0]} of {source} was never copied")


def _gone(history: Sequence[Sequence[Stored]]) -> set[bytes]:
    """What was seen and then not any more."""
    seen: set[bytes] = set()
    gone: set[bytes] = set()
    for records in history:
        there = {stored.record.data for stored in records}
        gone |= seen - there
        seen |= there
    return gone


def _check_order(dest: str, now: Sight, source: Sight | None) -> None:
    place = {} if source is None else {stored.record.data: stored.seq for stored in source.records}
    copied = [place[stored.record.data] for stored in now.records if stored.record.data in place]
    if copied != sorted(copied):
        raise Wrong(f"{dest}: copies of the source's seqs {copied} are in another order")


__all__ = ["CLASSES", "ROUTES", "Forwarders", "Wrong", "check_copies", "check_kept", "plain"]
