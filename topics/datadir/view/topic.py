"""One topic as a data folder shows it: the snapshot's word, and what the log says since.

The rules are recovery's (walshard/log/recovery.py), for a reader: nothing is written, and the log may go on while we
look. Caps and TTL leave no frames; what they took by a certain frame stands in that frame. What they have taken since
is worked out at the end of every look (`retain`) and forgotten before the next one (`resume`): a frame that comes later
may tell that it went otherwise, because the server counts a batch when it can be read, and that may be after its sync.

    live      not deleted, and not below the floor
    deleted   a flag on the disk, or a DELETE frame: silent
    evicted   below evict_floor and not deleted: a tombstone
    hole      never reached the disk (an ephemeral topic's, or lost with a process or the power): a tombstone
    skipped   never a record: a recovery went on above it, or a hole or a trim that lies below the floor: silent
    unsettled of a router's destination: may be a copy in memory; the server knows
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from topics.datadir.batch import Batch
from topics.datadir.ranges import minus, total
from topics.errors import CorruptData
from topics.storage.columns import Columns
from topics.storage.config import TopicConfig
from topics.storage.control import CopiesLine, DeleteFrame, PipeFrame, TopicFrame
from topics.storage.leases import is_log_name
from topics.storage.snapshot import PipeState, SegmentState, TopicState

_first = attrgetter("first")


class _Unretained(NamedTuple):
    """What `retain` changes, as it was before."""

    evict_floor: int
    cap_seq: int
    ttl_seq: int
    evicted_total: int
    expired_total: int
    live: int
    front: int


class Topic:
    def __init__(self, *, shard: int, id: int, name: str, config: TopicConfig, created_ms: int) -> None:
        self.shard = shard
        self.id = id
        self.name = name
        self.config = config
        self.created_ms = created_ms
        self.head_seq = 0
        self.evict_floor = 1
        self.floor = 1  # nothing below it is live
        self.cap_seq = 0
        self.ttl_seq = 0
        self.flushed_seq = 0
        self.last_write_ms: int | None = None
        self.last_read_ms: int | None = None
        self.deleted_total = 0
        self.deleted_before = 0  # of those, by the time of the snapshot and perhaps above its floor
        self.evicted_total = 0
        self.expired_total = 0
        self.skipped_total = 0
        self.lost_total = 0  # of evicted_total: in holes
        self.tail: list[tuple[int, int]] = []  # what the snapshot has seen in the log alone
        self.segments: list[SegmentState] = []
        self.holes: list[tuple[int, int]] = []
        self.trims: list[tuple[int, int]] = []
        self.pipe: PipeState | None = None
        self.batches: list[Batch] = []  # all that lie on the disk, dead ones too
        self._front = 0  # the first batch that may hold a live record
        self._count = 0
        self._lined: list[tuple[int, int]] = []  # what the log tells of copies
        self._swept = 1  # a client has deleted all that was below ...
        self._unheld: list[tuple[int, int]] = []  # ... and these, which are in no batch
        self._unretained: _Unretained | None = None

    @classmethod
    def restored(cls, state: TopicState, *, shard: int) -> Topic:
        topic = cls(shard=shard, id=state.id, name=state.name, config=state.config, created_ms=state.created_ms)
        topic.head_seq = state.head_seq
        topic.evict_floor = state.evict_floor
        topic.floor = state.floor
        topic.cap_seq = state.cap_seq
        topic.ttl_seq = state.ttl_seq
        topic.flushed_seq = state.flushed_seq
        topic.last_write_ms = state.last_write_ts
        topic.last_read_ms = state.last_read_ts
        topic.deleted_total = state.deleted_total
        topic.deleted_before = state.deleted_above
        topic.evicted_total = state.evicted_total
        topic.expired_total = state.expired_total
        topic.skipped_total = state.skipped_total
        topic.lost_total = state.lost_total
        topic.tail = state.tail
        topic.segments = state.segments
        topic.holes = list(state.holes)
        topic.trims = list(state.trims)
        topic.pipe = state.pipe
        return topic

    # --- what is true now ---

    @property
    def internal(self) -> bool:
        return is_log_name(self.name)

    @property
    def low(self) -> int:
        """Nothing below it is live, whatever the batches say."""
        return max(self.floor, self.evict_floor)

    @property
    def count(self) -> int:
        return self._count

    @property
    def earliest_seq(self) -> int:
        for batch in self._from_front():
            if batch.live(self.low):
                return batch.live_seqs(self.low)[0]
        return self.head_seq + 1

    @property
    def disk_seq(self) -> int:
        """Everything up to here that is not gone is on the disk. Routers' copies reach it behind later records: up to
        the first seq that is missing a reader can be sure that nothing will be filled in."""
        if self.pipe is None:
            return self.head_seq
        at = max(self.flushed_seq, self.pipe.flushed_to, self.low - 1, self._swept - 1)
        gone = iter(sorted([*self.holes, *self.trims]))
        hole = next(gone, None)
        for batch in self._since(self._position(at + 1)):
            while hole is not None and hole[0] <= at + 1:
                at = max(at, hole[1])
                hole = next(gone, None)
            if batch.first > at + 1:
                return at
            at = max(at, batch.last)
        return at

    @property
    def lost(self) -> int:
        """Seqs in holes, ever; those that recovery has entered as evicted, too. What an ephemeral topic has in memory
        looks from the disk like a hole, and is none yet."""
        return self.lost_total + (0 if self.config.durability == "ephemeral" else total(self.holes))

    @property
    def trimmed(self) -> int:
        return total(self.trims)

    @property
    def flagged(self) -> int:
        """Deleted records whose bytes are still there."""
        return sum(batch.count - batch.live(0) for batch in self.batches)

    @property
    def unsettled(self) -> int:
        """Seqs above what segments hold of a router's destination that are in no file: copies that are in memory, or
        that came and went there. What became of them the next snapshot says."""
        return total(self.unsettled_seqs)

    @property
    def unsettled_seqs(self) -> list[tuple[int, int]]:
        if self.pipe is None:
            return []
        settled = max(self.flushed_seq, self.pipe.flushed_to)
        there = [(batch.first, batch.last) for batch in self._since(self._position(settled + 1))]
        return minus([(settled + 1, self.head_seq)], [*there, *self.holes, *self.trims])

    @property
    def unlogged(self) -> list[tuple[int, int]]:
        """What the snapshot has seen in the log, nobody has removed since, and no file has."""
        gone = [*self.holes, *self.trims, *self._unheld, (1, max(self.low, self._swept) - 1)]
        return minus(self.tail, [*gone, *self._lined, *((batch.first, batch.last) for batch in self.batches)])

    def find_gap(self, first: int, last: int) -> tuple[int, int, str] | None:
        """The first range within these seqs that was lost against the reader's will, and why. Records of an ephemeral
        topic are on no disk: whoever reads that does not miss them."""
        if first > last or self.config.durability == "ephemeral":
            return None
        if first < self.evict_floor:
            return first, min(last, self.evict_floor - 1), self.eviction_reason(first)
        found: list[tuple[int, int, str]] = []
        for ranges, reason in ((self.holes, "lost"), (self.trims, "source_trim")):
            for begin, end in ranges:
                if begin <= last and end >= first:
                    found.append((max(begin, first), min(end, last), reason))
        return min(found, default=None)

    def eviction_reason(self, first: int = 1) -> str:
        cap, ttl = self.cap_seq >= first, self.ttl_seq >= first
        return "mixed" if cap and ttl else "ttl" if ttl else "cap"

    def select(self, first: int, last: int) -> Iterator[Batch]:
        """The batches that hold any of these seqs."""
        for batch in self._since(self._position(first)):
            if batch.first > last:
                return
            if batch.last >= first:
                yield batch

    def _position(self, seq: int) -> int:
        """Where the batch stands that holds the seq, or the first behind it."""
        at = bisect_right(self.batches, seq, key=_first) - 1
        return at if at >= 0 and self.batches[at].last >= seq else at + 1

    def _since(self, position: int) -> Iterator[Batch]:
        """Without a copy of the list: an ack is a frame, and a queue has many."""
        batches = self.batches
        for at in range(position, len(batches)):
            yield batches[at]

    def _from_front(self) -> Iterator[Batch]:
        return self._since(self._front)

    # --- what the log says ---

    def add(self, batch: Batch) -> None:
        if not self.batches or batch.first > self.batches[-1].last:
            self.batches.append(batch)
        else:
            raise CorruptData(
                f"{batch.file}: seq {batch.first} of topic {self.name!r} at offset {batch.offset} stands twice"
            )
        low = self.low
        self._count += batch.count if batch.flags is None and batch.first >= low else batch.live(low)

    def append(self, batch: Batch) -> None:
        """A batch from the log."""
        head = self.head_seq
        if batch.first > head + 1 and self.pipe is None:
            self.lose(head + 1, batch.first - 1)
        self.add(batch)
        self.head_seq = max(head, batch.last)
        self.last_write_ms = max(self.last_write_ms or 0, batch.last_ts)

    def head(self, head_seq: int) -> None:
        if (self.pipe is None or self.pipe.logged) and head_seq > self.head_seq:
            self.lose(self.head_seq + 1, head_seq)
            self.head_seq = head_seq

    def copied(self, line: CopiesLine, *, fresh: bool) -> None:
        """fresh: the snapshot does not know it."""
        if self.pipe is not None and line.names_seqs:
            if not line.count and (fresh or line.first_seq > self.head_seq):  # it was not readable yet
                self.trims.append((line.first_seq, line.last_seq))
            elif line.count and self.tail and line.first_seq <= self.tail[-1][1]:
                self._lined.append((line.first_seq, line.last_seq))
            self.head_seq = max(self.head_seq, line.last_seq)

    def lose(self, first: int, last: int) -> None:
        if self.holes and self.holes[-1][1] + 1 >= first:
            first, last = self.holes[-1][0], max(self.holes.pop()[1], last)
        self.holes.append((first, last))

    def configure(self, frame: TopicFrame) -> None:
        self.raise_floor(cap_seq=frame.cap_seq, ttl_seq=frame.ttl_seq)
        self.config = frame.config
        self._connect(frame.pipe)

    def _connect(self, pipe: PipeFrame | None) -> None:
        if pipe is None:
            self.pipe = None
        elif self.pipe is None or self.pipe.source_id != pipe.source_id:
            # Nothing is copied into it yet, or what was is in segments: all that is there is on the disk.
            self.pipe = PipeState(
                pipe.source_id, pipe.at, {}, flushed_to=self.head_seq, ring=pipe.ring, logged=pipe.logged
            )
        else:
            self.pipe.ring = pipe.ring

    def delete(self, frame: DeleteFrame, *, fresh: bool) -> None:
        """fresh: the snapshot does not know it."""
        if fresh:
            self.trims += frame.trims
            self.raise_floor(cap_seq=frame.cap_seq, ttl_seq=frame.ttl_seq)
        low = self.low
        deleted = 0
        if frame.before_seq is not None:
            # What caps and TTL took before was lost, not deleted; what is below an earlier range is gone already.
            first = max(frame.cap_seq + 1, frame.ttl_seq + 1, self._swept)
            for batch in self.select(first, frame.before_seq - 1):
                before = batch.live(low)
                batch.mark_deleted_between(first, frame.before_seq - 1)
                deleted += before - batch.live(low)
            self._swept = max(self._swept, frame.before_seq)
            self.head_seq = max(self.head_seq, frame.before_seq - 1)
        for seq in frame.seqs or ():
            at = self._position(seq)
            if at < len(self.batches) and self.batches[at].first <= seq:
                deleted += self.batches[at].mark_deleted(seq) and seq >= low
            else:
                self._unheld.append((seq, seq))
        self._count -= deleted
        if fresh:
            # All seqs in a frame were live. Their flags may be on the disk already, and a router's copy may have been
            # in memory only. Older programs did not say how many records a range was: then as many as can be seen.
            seen = deleted + len(frame.sources) + frame.copies
            self.deleted_total += frame.deleted or (seen if frame.seqs is None else len(frame.seqs))
            if self.pipe is not None:
                self.head_seq = max([self.head_seq, *(frame.seqs or ())])
        self._trim()

    # --- caps and TTL ---

    def raise_floor(self, *, cap_seq: int, ttl_seq: int) -> None:
        """What caps and TTL had taken when a frame was written."""
        last = max(cap_seq, ttl_seq)
        lost = self._evict_through(last)
        if ttl_seq > cap_seq:
            self.expired_total += lost
        else:
            self.evicted_total += lost
        self.cap_seq = max(self.cap_seq, cap_seq)
        self.ttl_seq = max(self.ttl_seq, ttl_seq)
        self.evict_floor = max(self.evict_floor, last + 1)
        self.head_seq = max(self.head_seq, last)  # a router's copy may come and go without ever being on the disk
        self._trim()

    def retain(self, *, now_ms: int, columns: Callable[[Batch], Columns]) -> None:
        """Apply the config as the server does; `columns` reads a batch."""
        self.resume()
        self._unretained = _Unretained(
            self.evict_floor,
            self.cap_seq,
            self.ttl_seq,
            self.evicted_total,
            self.expired_total,
            self._count,
            self._front,
        )
        if self.config.ttl_ms:
            self._expire(now_ms - self.config.ttl_ms, columns)
        if self.config.discard != "old":
            return
        if self.config.cap_records and self._count > self.config.cap_records:
            self._cap_records(self._count - self.config.cap_records)
        if self.config.cap_bytes:
            self._cap_bytes(self.bytes(columns) - self.config.cap_bytes, columns)

    def resume(self) -> None:
        """As it was before `retain`: the log goes on from there."""
        if self._unretained is not None:
            (
                self.evict_floor,
                self.cap_seq,
                self.ttl_seq,
                self.evicted_total,
                self.expired_total,
                self._count,
                self._front,
            ) = self._unretained
            self._unretained = None

    def bytes(self, columns: Callable[[Batch], Columns]) -> int:
        """What the live records count for; batches of which some records are gone are read once."""
        return sum(self.live_bytes(batch, columns) for batch in self._from_front())

    def live_bytes(self, batch: Batch, columns: Callable[[Batch], Columns]) -> int:
        low = self.low
        live = batch.live(low)
        if live == batch.count:
            return batch.size
        if live == 0:
            return 0
        if batch.live_size < 0 or batch.live_count != live or batch.live_low != low:
            sizes = columns(batch).sizes()
            batch.live_size = sum(sizes[seq - batch.first] for seq in batch.live_seqs(low))
            batch.live_count, batch.live_low = live, low
        return batch.live_size

    def _expire(self, horizon: int, columns: Callable[[Batch], Columns]) -> None:
        """A record with ts < horizon has expired; ts never falls along a topic, so they are the first ones."""
        last = 0
        for batch in self._from_front():
            if batch.last_ts < horizon:
                last = batch.last
                continue
            if batch.first_ts < horizon:
                last = batch.first - 1 + sum(count for count, ts in columns(batch).runs() if ts < horizon)
            break
        if lost := self._evict_through(last):
            self.expired_total += lost
            self.ttl_seq = max(self.ttl_seq, self.evict_floor - 1)

    def _cap_records(self, excess: int) -> None:
        for batch in self._from_front():
            live = batch.live(self.low)
            if live >= excess:
                break
            excess -= live
        self._evict_by_cap(batch.live_seqs(self.low)[excess - 1])

    def _cap_bytes(self, over: int, columns: Callable[[Batch], Columns]) -> None:
        last = 0
        for batch in self._from_front():
            if over <= 0:
                break
            size = self.live_bytes(batch, columns)
            if over >= size:
                last = batch.last
                over -= size
                continue
            sizes = columns(batch).sizes()
            for seq in batch.live_seqs(self.low):
                last = seq
                over -= sizes[seq - batch.first]
                if over <= 0:
                    break
        if last:
            self._evict_by_cap(last)

    def _evict_by_cap(self, last: int) -> None:
        if lost := self._evict_through(last):
            self.evicted_total += lost
            self.cap_seq = max(self.cap_seq, self.evict_floor - 1)

    def _evict_through(self, last: int) -> int:
        """Take what is live up to this seq; returns how many records that were."""
        low = self.low
        lost = 0
        cut: Batch | None = None
        for batch in self._from_front() if last >= low else ():
            if batch.first > last:
                break
            if live := batch.live(low, last):
                lost += live
                cut = batch
        if cut is not None:
            self._count -= lost
            self.evict_floor = max(self.evict_floor, cut.last_live(last) + 1)
            self._trim()
        return lost

    def _trim(self) -> None:
        while self._front < len(self.batches) and not self.batches[self._front].live(self.low):
            self._front += 1
