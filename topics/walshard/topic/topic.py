"""A topic in memory: its persisted fields, its index rows, and what is true of them now.

Rules that hold between any two calls:
  evict_floor <= earliest_seq <= head_seq + 1 <= next_seq
  the front row, if there is one, has a live record; earliest_seq is its first
  count and bytes are exact over live published records
Only retention.py moves evict_floor; deletes never do. Everything persisted is in `state()`; the rest is rebuilt.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from topics import limits
from topics.errors import CorruptData, Unreachable
from topics.storage.columns import Columns
from topics.storage.config import TopicConfig
from topics.storage.snapshot import ColdState, KeyState, TopicState, encode_topic
from topics.walshard.forwards.copies import Copies, Pipe
from topics.walshard.forwards.rebuild import Run
from topics.walshard.segments.segments import Segment
from topics.walshard.topic.idempotency import IdempotencyKeys, Remembered
from topics.walshard.topic.index import Row, RowList
from topics.walshard.topic.reserve import Reserve
from topics.walshard.topic.tags import TagIndex

_HOP_RANGES = 65_536
_LAST = itemgetter(1)


class Totals:
    """Sums over all topics of a shard."""

    def __init__(self) -> None:
        self.records = 0  # live
        self.added = 0  # that ever became live in this process
        self.evicted = 0  # that caps took since then
        self.expired = 0  # and those that were too old
        self.bytes = 0  # of live records
        self.pending_bytes = 0  # of records that are not readable yet
        self.dead_segments = 0  # files that only wait for the next snapshot
        self.unreadable: list[tuple[str, str]] = []  # topics that went on without a batch, and why: to be logged
        self._internal: Totals | None = None

    @property
    def internal(self) -> Totals:
        """The same for topics that no client sees and no quota counts."""
        if self._internal is None:
            self._internal = Totals()
            self._internal.unreadable = self.unreadable
        return self._internal

    @property
    def all_dead_segments(self) -> int:
        return self.dead_segments + self.internal.dead_segments

    def dead_segments_gone(self) -> None:
        self.dead_segments = self.internal.dead_segments = 0


class Topic:
    def __init__(
        self, *, id: int, name: str, config: TopicConfig, created_ms: int, ceiling: int, totals: Totals
    ) -> None:
        # persisted
        self.id = id
        self.name = name
        self.config = config
        self.created_ms = created_ms
        self.head_seq = 0  # the highest published seq
        self.ceiling = ceiling
        self.evict_floor = 1
        self.cap_seq = 0
        self.ttl_seq = 0
        self.flushed_seq = 0
        self.last_ts = 0
        self.last_write_ts: int | None = None
        self.last_read_ts: int | None = None
        self.deleted_total = 0
        self.evicted_total = 0
        self.expired_total = 0
        self.segments: list[Segment] = []
        self.keys = IdempotencyKeys()
        self.holes: list[tuple[int, int]] = []  # lost with an earlier process, between live records; ascending
        self.pipe: Pipe | None = None  # it is a router's destination
        self.trims: list[tuple[int, int]] = []  # stand for what the source lost before it was copied; ascending
        self.hops: list[tuple[int, int, int]] = []  # of copies in a ring: first, last, routers passed
        self.skipped_total = 0  # see pass_over
        self.lost_total = 0  # of evicted_total: seqs that went with a process or the power, and by no cap
        # runtime
        self.totals = totals
        self.next_seq = 1
        self.rows = RowList()
        self.count = 0
        self.bytes = 0
        self.pending = 0  # batches written but not published
        self.pending_records = 0
        self.pending_bytes = 0
        self.tail_rows = 0  # rows whose bytes are in the WAL ...
        self.tail_records = 0
        self.tail_bytes = 0
        self.tail_since_ms = 0  # ... and since when
        self.resident_rows = 0  # those that are in memory only, of the ephemeral class
        self.floor_due = False  # caps took what is in the log, to make room for what is not: a start could not tell
        self.tags: TagIndex | None = None
        self.hops_read = 0  # how far the next in the ring has read
        self.flushing = False
        self.completed = 0  # of a queue: jobs deleted by acks, since the process started ...
        self.completing = 0  # ... and how many of those deletes wait for their sync
        self.dropped = False
        self.for_router = False  # made for a router, and no client has been told of it
        self.unread: Row | None = None  # what retention could not read ...
        self.unread_ms = 0  # ... and when it tried
        self.untold: list[tuple[int, int]] = []  # those of trims that the log does not know; ascending
        self.ceiling_lsn = 0  # the frame that promised `ceiling` ...
        self.sure_ceiling = 0  # ... and what is sure before that is synced: above it an answer waits for the sync
        self.ceiling_margin = limits.SEQ_RESERVE // 2  # with less than this left the next promise is made
        self.reserve: Reserve | None = None  # None: it has made none but that of its creation
        self._encoded: bytes | None = None

    # --- what is true now ---

    @property
    def earliest_seq(self) -> int:
        front = self.rows.front()
        return self.head_seq + 1 if front is None else front.first_live()

    @property
    def ephemeral(self) -> bool:
        return self.config.durability == "ephemeral"

    @property
    def logged(self) -> bool:
        """Whether some of its records are on disk, or will be."""
        return not self.ephemeral or bool(self.tail_rows or self.segments)

    def ceiling_is_sure(self, synced_lsn: int) -> bool:
        """Whether the promise of `ceiling` is on the platter; the memory class makes none."""
        return self.ceiling_lsn <= synced_lsn or self.config.durability == "memory"

    @property
    def rebuilding(self) -> bool:
        """Copies that readers may have seen are read from the source again; until then nobody may look."""
        return self.pipe is not None and self.pipe.rebuilding

    @property
    def unfilled(self) -> bool:
        """Some rows of copies have no bytes yet: the tail can't be written down as a whole."""
        return self.pipe is not None and self.pipe.rebuild is not None

    @property
    def has_copies(self) -> bool:
        """Whether the tail holds rows that are in memory only, on their way to a segment."""
        return next(self.copies(), None) is not None

    def copies(self) -> Iterator[Row]:
        tail = self.rows.since(self.rows.position(self.flushed_seq + 1))
        return (row for row in tail if row.live and isinstance(row.source, Copies))

    def live_below(self, seq: int) -> int:
        found = 0
        for row in self.rows:
            if row.first >= seq:
                break
            if row.live:
                found += row.live if row.last < seq else sum(row.first + index < seq for index in row.live_indexes())
        return found

    def gone_through(self, marks: Iterable[tuple[int, int, dict[str, int]]]) -> int:
        """The last seq up to which no batch of copies holds a record that is in memory only: 0, if the first does."""
        tail = self.rows.since(self.rows.position(self.flushed_seq + 1))
        held = next((row.first for row in tail if row.live and isinstance(row.source, Copies)), None)
        return max((last for last, _, _ in marks if held is None or last < held), default=0)

    @property
    def needs_sync(self) -> bool:
        return self.config.durability == "fsync"

    def tombstone_reason(self, from_seq: int) -> str:
        """Why records after from_seq are gone; only meaningful below evict_floor."""
        cap, ttl = self.cap_seq > from_seq, self.ttl_seq > from_seq
        return "mixed" if cap and ttl else "ttl" if ttl else "cap"

    def touched(self) -> None:
        """A persisted field changed: the next snapshot encodes this topic again."""
        self._encoded = None

    # --- publishing ---

    def publish(self, row: Row) -> None:
        """Make a batch readable. Retention is the caller's next step."""
        self.rows.append(row)
        self.head_seq = row.first + row.count - 1
        self.add_live(row.live, row.size)
        self.totals.added += row.live
        self.last_ts = self.last_write_ts = row.last_ts
        if row.source is not None:
            self.tail_rows += 1
            self.tail_records += row.count
            self.tail_bytes += row.length
            if self.tail_rows == 1:
                self.tail_since_ms = row.first_ts
        else:
            self.resident_rows += 1
        if self.tags is not None:
            columns = Columns(row.load(), count=row.count, ts=row.first_ts)
            if columns.has_tags:
                self.tags.add(row.first, columns.tags())
        self._encoded = None

    def skip_to(self, seq: int, *, trimmed: bool, hops: Sequence[tuple[int, int]] = ()) -> None:
        """No record has a seq behind the head up to this one. trimmed: they stand for records that the source has lost,
        as many as `hops` says of which have passed so many routers, each after the other."""
        first = self.head_seq + 1
        if trimmed:
            kept = [trim for trim in self.trims if trim[1] >= self.evict_floor]
            self.pass_over(count_seqs(self.trims) - count_seqs(kept))
            self.trims = merge_ranges([*kept, (first, seq)])
            self.remember_lost_hops(first, hops)
        self.head_seq = seq
        # Copies that went with the process, and that a client or a cap had taken before, are counted already.
        self.pass_over(min(self.unaccounted, 0 if trimmed else seq - first + 1))

    def fill(self, row: Row, runs: Sequence[Run]) -> None:
        """Give a row of copies the bytes that came for it, in as many rows as that takes. Live records that did not
        come are no more: their seqs read as a tombstone."""
        source = row.source
        live = set(row.live_indexes())
        filled = []
        for run in runs:
            columns = Columns(run.body, count=run.records, ts=row.first_ts)
            indexes = [index for index in range(run.begin, run.begin + run.records) if index in live]
            live.difference_update(indexes)
            if not indexes:
                continue
            sizes = columns.sizes() if len(indexes) < run.records else None
            size = columns.size if sizes is None else sum(sizes[index - run.begin] for index in indexes)
            part = Row(row.first + run.begin, run.records, row.first_ts, row.last_ts, size, source, 0, 0, len(indexes))
            part.skip = min(max(0, row.skip - run.begin), run.records)
            if row.flags is not None:
                part.flags = row.flags[run.begin : run.begin + run.records]
            filled.append((part, run.body))
        self.rows.replace([row], [part for part, _ in filled])
        self.add_live(-row.live, -row.size)
        self.tail_rows += len(filled) - 1
        self.tail_records -= row.count
        for part, body in filled:
            source.share(part, body)
            self.add_live(part.live, part.size)
            self.tail_records += part.count
            self.tail_bytes += part.length
        source.release(row)
        if live:
            gone = merge_ranges([(row.first + index, row.first + index) for index in live])
            self.trims = merge_ranges([*self.trims, *gone])
            self.untold += gone
        self.trim_front()
        self.touched()

    def add_live(self, records: int, size: int) -> None:
        self.count += records
        self.bytes += size
        self.totals.records += records
        self.totals.bytes += size

    def remember_hops(self, first: int, hops: Iterable[int]) -> None:
        """Of copies in a ring, as ranges; only the latest are kept, because the others have long gone round."""
        ranges = self.hops
        for seq, passed in enumerate(hops, first):
            if not passed:
                continue
            if ranges and ranges[-1][1] == seq - 1 and ranges[-1][2] == passed:
                ranges[-1] = (ranges[-1][0], seq, passed)
            else:
                ranges.append((seq, seq, passed))
        self._forget_hops()

    def remember_lost_hops(self, first: int, hops: Iterable[tuple[int, int]]) -> None:
        """The same of seqs that stand for lost records: how many, and what these have passed."""
        for count, passed in hops:
            if passed:
                self.hops.append((first, first + count - 1, passed))
            first += count
        self._forget_hops()

    def _forget_hops(self) -> None:
        ranges = self.hops
        if len(ranges) > 2 * _HOP_RANGES:
            # The oldest go, but never what the next in the ring has not read yet.
            read = bisect_right(ranges, self.hops_read, key=_LAST)
            del ranges[: min(read, len(ranges) - _HOP_RANGES)]

    # --- removing ---

    def release(self, row: Row) -> None:
        """The row holds no live record any more: its file need not keep it, its bytes need not stay in memory."""
        source = row.source
        if source is not None:
            if not isinstance(source, Segment):
                self.tail_rows -= 1
                self.tail_records -= row.count
                self.tail_bytes -= row.length
            source.release(row)
            if isinstance(source, Segment) and source.live_rows == 0:
                self.totals.dead_segments += 1
        else:
            self.resident_rows -= 1
        if not isinstance(source, Copies):  # the mover may be reading it, and it is nowhere else
            row.body = None
        row.rendered = row.sizes = row.times = None

    def drop(self) -> None:
        """The topic is gone: nothing of it counts any more, and its rows let go of their files."""
        self.dropped = True
        self.totals.records -= self.count
        self.totals.bytes -= self.bytes
        for row in self.rows:
            if row.live:
                self.release(row)

    def trim_front(self) -> None:
        while (front := self.rows.front()) is not None and front.live == 0:
            self.rows.pop_front()
        self._encoded = None

    def remove(self, row: Row, indexes: Sequence[int], *, sizes: Sequence[int] | None) -> None:
        """Take live records (by index, ascending) out of the counts; sizes None: they are all that is live."""
        if len(indexes) == row.live:
            removed = row.size
        else:
            if sizes is None:
                sizes = self.sizes_or_shares(row)
            removed = min(row.size, sum(sizes[index] for index in indexes))
        row.live -= len(indexes)
        row.size -= removed
        self.add_live(-len(indexes), -removed)
        if row.live == 0:
            self.release(row)

    @staticmethod
    def is_unfilled(row: Row) -> bool:
        """Copies that a crash left without their bytes."""
        return row.body is None and isinstance(row.source, Copies)

    def sizes_or_shares(self, row: Row) -> array[int]:
        """For what has to go on though the row can't be read: then each of its records counts the same, from here on,
        and together as many bytes as before."""
        if self.is_unfilled(row):  # they will be known when it is filled
            return shares(row) if row.sizes is None else row.sizes
        if row.sizes is None and isinstance(row.source, Segment) and row.source.unseen:
            return shares(row)  # that the disk is away has been said
        try:
            return record_sizes(row)
        except (CorruptData, Unreachable, OSError) as error:
            self.can_not_read(row, error)
            return shares(row)

    def can_not_read(self, row: Row, error: Exception) -> None:
        """Once for each row: its readers meet the error themselves."""
        if row is not self.unread:
            self.unread = row
            self.totals.unreadable.append((self.name, str(error)))

    @property
    def unaccounted(self) -> int:
        """Seqs up to the head that no count and no range stands for: 0, if nothing is in memory only. After a crash of
        an ephemeral topic fewer, by the records in the hole at its end that clients had deleted before: they count
        twice until the hole lies below the first live record, and is an eviction but for them."""
        gone = self.deleted_total + self.evicted_total + self.expired_total + self.skipped_total
        return self.head_seq - self.count - gone - count_seqs([*self.holes, *self.trims])

    def pass_over(self, seqs: int) -> None:
        """Count seqs that have no record and that no hole or trim names (any more): a recovery went on above them, or
        they lie below the floor. Every seq up to the head is live, deleted, evicted, expired, in a hole or a trim, or
        one of these. Negative: so many of a new trim had been counted when they were copies in memory."""
        self.skipped_total += seqs
        self.touched()

    def delete_before(self, seq: int) -> int:
        """Every live published record below seq."""
        deleted = 0
        while (front := self.rows.front()) is not None and front.first < seq:
            indexes = [index for index in front.live_indexes() if front.first + index < seq]
            if not indexes:
                break
            deleted += self._delete_in(front, indexes)
            front.skip = max(front.skip, indexes[-1] + 1)
            self.trim_front()
        self.deleted_total += deleted
        return deleted

    def delete_seqs(self, seqs: Iterable[int]) -> int:
        """These seqs (ascending), as far as they are live."""
        deleted = 0
        row: Row | None = None
        indexes: list[int] = []
        for seq in seqs:
            if row is None or not row.first <= seq <= row.last:
                if row is not None and indexes:
                    deleted += self._delete_in(row, indexes)
                row, indexes = self.rows.find(seq), []
            if row is not None and row.live and row.is_live(seq - row.first):
                indexes.append(seq - row.first)
        if row is not None and indexes:
            deleted += self._delete_in(row, indexes)
        self.trim_front()
        self.deleted_total += deleted
        return deleted

    def rows_cut_by(self, seqs: Sequence[int]) -> list[Row]:
        """Where these live seqs are (ascending), but for rows that they empty."""
        found: list[Row] = []
        row: Row | None = None
        taken = 0
        for seq in seqs:
            if row is None or seq > row.last:
                if row is not None and taken < row.live:
                    found.append(row)
                row, taken = self.rows.find(seq), 0
            taken += 1
        if row is not None and taken < row.live:
            found.append(row)
        return found

    def is_live(self, seq: int) -> bool:
        row = self.rows.find(seq)
        return row is not None and row.live > 0 and row.is_live(seq - row.first)

    def _delete_in(self, row: Row, indexes: list[int]) -> int:
        for index in indexes:
            row.mark_deleted(index)
        row.rendered = None
        if isinstance(row.source, Segment):
            row.source.flags_changed(row)
        self.remove(row, indexes, sizes=row.sizes)
        return len(indexes)

    # --- tags of what no sealed segment covers ---

    def tail_tags(self) -> TagIndex:
        if self.tags is None:
            self.tags = TagIndex()
            sealed = max((segment.last_seq for segment in self.segments if segment.sealed), default=0)
            for row in self.rows.since(self.rows.position(sealed + 1)):
                if row.live:
                    columns = Columns(row.load(), count=row.count, ts=row.first_ts)
                    if columns.has_tags:
                        self.tags.add(row.first, columns.tags())
        return self.tags

    # --- the snapshot ---

    def state(self) -> TopicState:
        return TopicState(
            id=self.id,
            name=self.name,
            config=self.config,
            created_ms=self.created_ms,
            head_seq=self.head_seq,
            ceiling=max(self.ceiling, self.head_seq),  # fsync and memory make no promises
            floor=self.earliest_seq,
            evict_floor=self.evict_floor,
            cap_seq=self.cap_seq,
            ttl_seq=self.ttl_seq,
            flushed_seq=self.flushed_seq,
            last_ts=self.last_ts,
            last_write_ts=self.last_write_ts,
            last_read_ts=self.last_read_ts,
            deleted_total=self.deleted_total,
            evicted_total=self.evicted_total,
            expired_total=self.expired_total,
            segments=[segment.state() for segment in self.segments],
            keys=[KeyState(key, *remembered) for key, remembered in self.keys if self._outlives(remembered)],
            holes=merge_ranges(self.holes + [(row.first, row.last) for row in self.rows if row.source is None]),
            pipe=None if self.pipe is None else self.pipe.state(),
            trims=self.trims,
            hops=self.hops,
            skipped_total=self.skipped_total,
            lost_total=self.lost_total,
            tail=merge_ranges([(row.first, row.last) for row in self._logged_rows()]),
            cold=self._cold_states(),
        )

    def _cold_states(self) -> list[ColdState]:
        """What a start has to know of segments whose files may be away then."""
        floor = self.earliest_seq
        states = {
            segment: ColdState(segment.first_seq, [], [first for first in segment.dead if first >= floor])
            for segment in self.segments
            if segment.cold
        }
        if not states:
            return []
        for row in self.rows:
            segment = row.source
            if not isinstance(segment, Segment):
                break
            if row.live and not row.whole and segment in states:
                size = 0 if row in segment.guessed else row.size
                states[segment].rows.append((row.first, segment.packed_flags(row), size))
        return [state for segment, state in states.items() if segment.flagged or state.rows]

    def _logged_rows(self) -> Iterator[Row]:
        """Those that a start has to find in the log: batches, and lines of copies."""
        for row in self.rows.since(self.rows.position(self.flushed_seq + 1)):
            if row.live and row.source is not None and not isinstance(row.source, Segment):
                yield row

    def _outlives(self, remembered: Remembered) -> bool:
        """A key lives as long as its records do; those that are in memory only end with the process."""
        row = self.rows.find(remembered.first_seq)
        return not self.ephemeral if row is None else row.source is not None

    def encoded_state(self) -> bytes:
        if self._encoded is None:
            self._encoded = encode_topic(self.state())
        return self._encoded

    def restore(self, state: TopicState) -> None:
        """Take over a snapshot's fields; rows and segments are recovery's work."""
        self.head_seq = state.head_seq
        self.next_seq = state.head_seq + 1
        self.evict_floor = state.evict_floor
        self.cap_seq = state.cap_seq
        self.ttl_seq = state.ttl_seq
        self.flushed_seq = state.flushed_seq
        self.last_ts = state.last_ts
        self.last_write_ts = state.last_write_ts
        self.last_read_ts = state.last_read_ts
        self.deleted_total = state.deleted_total
        self.evicted_total = state.evicted_total
        self.expired_total = state.expired_total
        self.holes = state.holes
        self.trims = state.trims
        self.hops = state.hops
        self.skipped_total = state.skipped_total
        self.lost_total = state.lost_total
        if state.pipe is not None:
            self.pipe = Pipe.restore(state.pipe)
            self.pipe.saved_to = max(self.pipe.flushed_to, state.flushed_seq)
        for key in state.keys:
            self.keys.remember(key.key, Remembered(key.first_seq, key.count, key.ts))


def merge_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, and neighbours joined."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def count_seqs(ranges: list[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def shares(row: Row) -> array[int]:
    """The same for each record, as many bytes together as are live."""
    row.sizes = array("I", [row.size // row.live]) * row.count
    if isinstance(row.source, Segment):
        row.source.guessed.add(row)
    return row.sizes


def record_sizes(row: Row) -> array[int]:
    if row.sizes is not None:
        return row.sizes
    return array("I", Columns(row.load(), count=row.count, ts=row.first_ts).sizes())
