"""From a staged batch to a published one: the write, the sync, and taking everything back if the write fails.

    staged -> written -> [synced] -> published -> answered
       |         |
       |         +- memory, disk, ephemeral: published now. fsync, a new topic, a seq above the ceiling on the
       |            platter, or a batch behind one that waits: published when a sync covers its lsn, in lsn order
       +- the write failed: seqs, keys, ceilings and new topics are taken back; 503 `storage_full`
       |          if the disk is full, otherwise 500; nothing was ever visible

A crash before the write leaves nothing; after it, recovery finds the batch, answered or not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, DiskFull
from topics.storage.control import (
    CopiesLine,
    DeleteFrame,
    HeadFrame,
    TopicFrame,
    encode_delete,
    encode_head,
    encode_line,
)
from topics.storage.format import FrameType, frame_bytes
from topics.walshard.forwards.copies import Copies, CopyMemory, Pipe, as_logged, logged_sizes
from topics.walshard.log.disk import KILL_POINTS, kill_point
from topics.walshard.log.placing import Placing
from topics.walshard.log.syncer import Synced, Syncer
from topics.walshard.log.wal import Wal
from topics.walshard.segments.segments import Segment
from topics.walshard.tiering.fetcher import Away
from topics.walshard.topic import retention
from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.index import Row
from topics.walshard.topic.reserve import Reserve
from topics.walshard.topic.topic import Topic

_encode = msgspec.msgpack.Encoder().encode
_FRAME_OVERHEAD = frame_bytes(key_len=0, body_len=0) + 7  # to be rounded down to a multiple of 8
CONTROL_BYTES = limits.CONTROL_BYTES
_HEAD_BYTES = frame_bytes(key_len=0, body_len=16)  # of a HEAD frame, at most
_LINES_BYTES = frame_bytes(key_len=0, body_len=16)  # around the lines of copies, at most
_LOWER_MS = 1_000
_LOWERED = 1_000  # topics at once
_FLOORS_NS = 1_000_000_000  # between two tries to get a log file for nothing but floors
_QUIET_MS = 1_000  # without a write: the log gets a witness of what is synced ...
_WITNESS_MS = 10_000  # ... and not more often than this
_SIZED_RECORDS = 16_384  # whose sizes are logged at once: some 3 ms
_FILLED_BYTES = frame_bytes(key_len=0, body_len=6)  # a frame that fills something, without what it fills


class ReplyTo(Protocol):
    """Where an answer goes: a link's writer, or a list in a test."""

    def send_always(self, message: bytes) -> None: ...


class Written(msgspec.Struct, gc=False, eq=False):
    """A batch on its way to being published."""

    topic: Any  # a Topic
    row: Row
    created: bool
    key: str | None
    lsn: int
    reply_to: Any  # a ReplyTo
    correlation: int
    requests: int = 1  # several plain appends in one batch, with consecutive correlations
    logged: bool = True  # or a copy
    lost: Sequence[tuple[int, int]] | None = None  # no batch, but seqs for lost records: what stage_loss was told
    wal_us: int = 0
    written_ns: int = 0


class Answer(msgspec.Struct, gc=False, eq=False):
    """An answer that waits for a sync: a delete, a control command, a retry of a batch that waits itself."""

    lsn: int
    reply_to: Any
    build: Callable[[int], bytes]
    written_ns: int


class Commit:
    def __init__(
        self, *, wal: Wal, syncer: Syncer, cache: BatchCache, disk_sync_ms: int, forget_topic: Callable[[Topic], None]
    ) -> None:
        self.wal = wal
        self.syncer = syncer
        self.read_only = False  # the last write or rotation found no space
        self.failure = storage_full()  # why the last write that failed did
        self.sync_due_ns: int | None = None  # when the disk class wants its sync
        self.on_sync: Callable[[int], None] = lambda took_us: None
        self.on_publish: Callable[[Topic], None] = lambda topic: None
        self._cache = cache
        self._disk_sync_ns = disk_sync_ms * 1_000_000
        self.window_ns = 0  # the least time between two syncs: the governor's wish
        self._synced_ns = 0
        self._forget_topic = forget_topic
        self._staged: list[Written] = []
        self._ceilings: list[tuple[Topic, int, int, int]] = []  # as they were before the staged frames
        self._lines: list[msgspec.Raw] = []  # of copies, each a CopiesLine: not staged yet
        self._lines_bytes = 0
        self._lined: set[int] = set()  # ids of their topics
        self._telling: list[tuple[Topic, list[tuple[int, int]]]] = []  # trims in staged frames
        self._afterwards: list[Callable[[], None]] = []  # to be called behind the next write
        self._floors: dict[Topic, None] = {}  # of which the log does not know what caps took
        self._floors_ns = 0  # until then no new file for that, as there was no space for one
        self._waiting: deque[Written | Answer] = deque()
        self.reserved: dict[Topic, None] = {}  # that promise more than a quiet topic does
        self._lower_ms = 0  # when they are next looked at
        self._hurry_ms = 2 * disk_sync_ms
        self._witness_lsn = 0  # the last frame of the last witness: everything before it is synced
        self._witness_ms = 0  # when the next one may come
        self._quiet_lsn = self._quiet_ms = 0  # the last frame that was seen, and when
        self._hurried_lsn = 0  # a promise that the next seqs may need before the disk class gets its sync

    # --- staging -------------------------------------------------------------------------------------

    def make_room(self, size: int, *, reserve: bool = False) -> None:
        """See that frames of this size fit into the current file: after this, staging them can't fail. Deletes may
        use the part of it that is reserved for them, so that they work on a full disk."""
        if not self.wal.fits(size, reserve=reserve):
            if not self.write():
                raise self.failure  # with what was staged before; the caller's topic may have gone with it
            try:
                self.wal.rotate(size)
            except DiskFull:
                self.read_only = True
                raise

    def stage_batch(
        self,
        topic: Topic,
        request: messages.Append,
        body: bytes,
        *,
        created: bool,
        ts: int,
        reply_to: ReplyTo,
        correlation: int,
        requests: int,
    ) -> None:
        """Give the batch its seqs and put it into the next write."""
        first, count, size, key = topic.next_seq, request.count, request.size, request.key
        last = first + count - 1
        encoded_key = key.encode() if key is not None else b""
        durability = topic.config.durability
        if topic.pipe is not None:
            if topic.id in self._lined:
                self.stage_lines()  # recovery finds rows in the order of their seqs
            self.tell_trims(topic)
        ceiling_frame = last > topic.ceiling - topic.ceiling_margin and durability in ("disk", "ephemeral")
        length = (len(encoded_key) + len(body) + _FRAME_OVERHEAD) & -8 if durability != "ephemeral" else 0
        if created or ceiling_frame:
            self.make_room(length + (CONTROL_BYTES if created else _HEAD_BYTES))
            if created:
                self.stage_topic(topic, ts)
            if ceiling_frame:
                self.stage_ceiling(topic, last, ts, count=count)
        wal = self.wal
        if length > wal.room:
            self.make_room(length)
        if durability == "ephemeral":
            lsn = topic.ceiling_lsn
            row = Row(first, count, ts, ts, size, None, 0, 0, count, body)
        else:
            file = wal.current
            offset, lsn = wal.stage_batch(topic.id, first, count, ts, body, encoded_key)
            file.pins += 1
            row = Row(first, count, ts, ts, size, file, offset, length, count, body)
        topic.next_seq = last + 1
        topic.last_ts = ts
        topic.pending_records += count
        topic.pending_bytes += size
        topic.totals.pending_bytes += size
        self._staged.append(Written(topic, row, created, key, lsn, reply_to, correlation, requests))

    def stage_placed(
        self,
        topic: Topic,
        request: messages.Append,
        placing: Placing,
        *,
        created: bool,
        ts: int,
        reply_to: ReplyTo,
        correlation: int,
    ) -> None:
        """The same for a large batch, whose body is in a file already. Nothing else may be staged before the next
        write, which is the caller's next step, as it was to see that there is room for control frames."""
        self.stage_lines()
        first, count, size = topic.next_seq, request.count, request.size
        last = first + count - 1
        if created:
            self.stage_topic(topic, ts)
        if last > topic.ceiling - topic.ceiling_margin and topic.config.durability == "disk":
            self.stage_ceiling(topic, last, ts, count=count)
        file, offset, lsn = self.wal.stage_placed(placing, topic.id, first, count, ts)
        file.pins += 1
        row = Row(first, count, ts, ts, size, file, offset, placing.length, count)
        topic.next_seq = last + 1
        topic.last_ts = ts
        topic.pending_records += count
        topic.pending_bytes += size
        topic.totals.pending_bytes += size
        self._staged.append(Written(topic, row, created, request.key, lsn, reply_to, correlation))

    def stage_copies(
        self, topic: Topic, request: messages.Forward, body: bytes, *, ts: int, memory: CopyMemory, reply_to: ReplyTo
    ) -> int:
        """The same for copies of another topic's records: they get seqs and are published in their turn, but what is
        logged of them is which seqs they have, here and in the source. Returns the last seq. Those that are made again
        may use the reserve for it: until they are there, nobody can delete anything from the topic."""
        reserve = topic.rebuilding
        if topic.id in self._lined:
            self.stage_lines()  # of what was lost before them: no HEAD frame may come before that
        self.tell_trims(topic, reserve=reserve)
        first, count, size = topic.next_seq, request.count, request.size
        last = first + count - 1
        if last > topic.ceiling - topic.ceiling_margin:
            self.make_room(_HEAD_BYTES, reserve=reserve)
            self.stage_ceiling(topic, last, ts, count=count)
        if topic.ephemeral:
            self.log_position(topic, request.to_seq, counts=request.counts, ts=ts, reserve=reserve)
            row = Row(first, count, ts, ts, size, None, 0, 0, count, body)
        else:
            line = CopiesLine(
                topic.id,
                ts,
                first,
                last,
                request.to_seq,
                count,
                size,
                request.sources,
                request.counts,
                request.hops,
                logged_sizes(topic.config, body, count),
            )
            self.log_copies(line, reserve=reserve)
            source = Copies(memory, self.wal.current)
            row = Row(first, count, ts, ts, size, source, 0, 0, count)
            source.share(row, body)
        topic.next_seq = last + 1
        topic.last_ts = ts
        topic.pending_records += count
        topic.pending_bytes += size
        topic.totals.pending_bytes += size
        self._staged.append(Written(topic, row, False, None, topic.ceiling_lsn, reply_to, 0, logged=False))
        return last

    def log_copies(self, line: CopiesLine, *, reserve: bool = False) -> None:
        """Have the next write say which seqs some copies have. One frame has the lines of all destinations."""
        encoded = encode_line(line)
        self.make_room(len(encoded) + _LINES_BYTES, reserve=reserve)
        taken = len(encoded) if self._lines else len(encoded) + _LINES_BYTES
        self._lines.append(msgspec.Raw(encoded))
        if line.names_seqs:
            self._lined.add(line.topic_id)
        self._lines_bytes += taken
        self.wal.room -= taken  # kept until they are staged

    def log_position(
        self, topic: Topic, at: int, *, counts: dict[str, int] | None = None, ts: int = 0, reserve: bool = False
    ) -> None:
        """The same where nothing had to be copied, or only what an ephemeral topic keeps in memory: its records go with
        the process, and must not come a second time."""
        assert topic.pipe is not None
        last = topic.pipe.last_seq
        line = CopiesLine(topic.id, ts or topic.last_ts, last + 1, last, at, counts=counts or {})
        self.log_copies(line, reserve=reserve)

    def stage_lines(self) -> None:
        if self._lines:
            self.wal.room += self._lines_bytes
            body = _encode((0, self._lines))
            self._lines, self._lines_bytes = [], 0
            self._lined.clear()
            self.wal.stage(FrameType.HEAD, topic_id=self.wal.shard, ts=0, body=body)

    def log_sizes(self, topic: Topic, pipe: Pipe) -> None:
        """What copies that a start may find in the log alone already count for, before a config makes a cap count them:
        also those in segments that no snapshot names yet, and those that are not readable yet. No more of them at once
        than a round has time for: `Away` says whose sizes are wanted next, and what was logged by then stays so. The
        last ones are staged."""
        more = True
        while more:
            due, more = self._unsized(topic, pipe)
            missing = [row for row in due if row.sizes is None and row not in self._cache.lost]
            if more and missing:
                raise Away(missing, measures=True)
            for row in due:
                sizes = as_logged(topic.sizes_or_shares(row))
                line = CopiesLine(topic.id, row.first_ts, row.first, row.last, 0, row.count, row.size, sizes=sizes)
                self.log_copies(line)
                if isinstance(row.source, Copies):
                    row.sizes = row.times = None  # its bytes are in memory, too
            self.stage_lines()
            if more:
                self.write_control()
                pipe.sized_to = due[-1].last

    def _unsized(self, topic: Topic, pipe: Pipe) -> tuple[list[Row], bool]:
        """The next rows of copies whose sizes are not logged, and whether there are others behind them."""
        held = [
            entry.row
            for entry in self._waiting
            if isinstance(entry, Written) and entry.topic is topic and not entry.logged
        ]
        due: list[Row] = []
        records = 0
        logged = max(pipe.saved_to, pipe.sized_to)
        for row in chain(topic.rows.since(topic.rows.position(logged + 1)), held):
            if row.last > logged and row.live and isinstance(row.source, Copies | Segment):
                if records >= _SIZED_RECORDS:
                    return due, True
                due.append(row)
                records += row.count
        return due, False

    def tell_trims(self, topic: Topic, *, reserve: bool = False) -> None:
        """Log which copies a start has not found in the source any more, before there is more for a cap to count: else
        the next start would count them too, and evict what was never evicted."""
        if topic.untold:
            frame = encode_delete(DeleteFrame(None, [], topic.cap_seq, topic.ttl_seq, trims=topic.untold))
            self.make_room(frame_bytes(key_len=0, body_len=len(frame)), reserve=reserve)
            self.wal.stage(FrameType.DELETE, topic_id=topic.id, ts=topic.last_ts, body=frame)
            self.told_trims(topic)

    def told_trims(self, topic: Topic) -> None:
        """They are in a staged frame."""
        if topic.untold:
            self._telling.append((topic, topic.untold))
            topic.untold = []

    def stage_loss(self, topic: Topic, hops: Sequence[tuple[int, int]], *, at: int, ts: int, reply_to: ReplyTo) -> None:
        """The same for records that the source has lost, up to its seq `at`: as many seqs stand for them, and read as a
        tombstone. `hops`: so many of them, each after the other, have passed so many routers. Readers who are told of a
        seq go on behind it, and would miss what got it after a power cut: so it is published in its turn, and when its
        promise is synced. The log file is kept until a snapshot can have them."""
        reserve = topic.rebuilding  # as in stage_copies
        first, count = topic.next_seq, sum(many for many, _ in hops)
        last = first + count - 1
        if topic.reserve is not None:
            topic.reserve.skip(count)
        if last > topic.ceiling - topic.ceiling_margin:
            self.make_room(_HEAD_BYTES, reserve=reserve)
            self.stage_ceiling(topic, last, ts)
        source = None
        if topic.ephemeral:
            self.log_position(topic, at, reserve=reserve)
        else:
            self.log_copies(_line_of_loss(topic, first, last, at, hops), reserve=reserve)
            source = self.wal.current
            source.pin()
        topic.next_seq = last + 1
        row = Row(first, count, ts, ts, 0, source, 0, 0, 0)
        loss = Written(topic, row, False, None, topic.ceiling_lsn, reply_to, 0, logged=False, lost=hops)
        self._staged.append(loss)

    def skip_tail(self, topic: Topic, seq: int, *, trimmed: bool, at: int) -> None:
        """Give out no seq up to this one any more, at once: a power cut has left what tells a start as much. trimmed:
        the source has lost what stood there, up to its seq `at`."""
        first = topic.next_seq
        if seq < first:
            return
        if first > topic.head_seq + 1:
            raise ApiError("throttled", "batches before this one are not readable yet", retry_after_s=1)
        self.write()
        reserve = topic.rebuilding
        if trimmed and not topic.ephemeral:
            self.log_copies(_line_of_loss(topic, first, seq, at, ()), reserve=reserve)
        elif trimmed:
            self.log_position(topic, at, reserve=reserve)
        self.write_control()
        topic.next_seq = seq + 1
        topic.skip_to(seq, trimmed=trimmed)
        self.on_publish(topic)

    def stage_topic(self, topic: Topic, ts: int) -> None:
        body = _encode(
            TopicFrame(
                topic.name,
                topic.config,
                topic.created_ms,
                topic.ceiling,
                topic.cap_seq,
                topic.ttl_seq,
                None if topic.pipe is None else topic.pipe.frame(),
            )
        )
        self._promise(topic, topic.ceiling, self.wal.stage(FrameType.TOPIC, topic_id=topic.id, ts=ts, body=body))

    def stage_ceiling(self, topic: Topic, last: int, ts: int, *, count: int = 0) -> None:
        """Promise on disk that seqs up to the new ceiling are spoken for, before they are given out."""
        if topic.reserve is None:
            topic.reserve = Reserve(ms=ts, seq=last - count)
            soon = True
        else:
            soon = topic.reserve.age_ms(ts) < self._hurry_ms
        reserve = topic.reserve.promise(ms=ts, seq=last, count=count)
        ceiling = last + reserve
        if topic.rebuilding and ceiling < topic.ceiling:
            ceiling = topic.ceiling  # copies that readers have seen may stand anywhere below it
        body = encode_head(HeadFrame(topic.next_seq - 1))
        lsn = self.wal.stage(FrameType.HEAD, topic_id=topic.id, ts=ts, first_seq=ceiling, body=body)
        self._promise(topic, ceiling, lsn)
        topic.ceiling_margin = reserve // 2
        if soon and count:
            self._hurried_lsn = lsn
        if reserve > limits.SEQ_RESERVE:
            self.reserved[topic] = None

    def _promise(self, topic: Topic, ceiling: int, lsn: int) -> None:
        """A frame that says `ceiling` is staged: a crash may leave it, or only what was there before it. So nothing
        above the lower of the two is sure until it is synced (topic/reserve.py says why that is enough)."""
        self._ceilings.append((topic, topic.ceiling, topic.ceiling_lsn, topic.sure_ceiling))
        if 0 < topic.ceiling_lsn <= self.wal.synced_lsn:
            topic.sure_ceiling = topic.ceiling
        topic.sure_ceiling = min(topic.sure_ceiling, ceiling)
        topic.ceiling, topic.ceiling_lsn = ceiling, lsn
        topic.touched()

    def watch_ceilings(self, topics: Iterable[Topic], now_ms: int) -> None:
        """Of topics that were recovered: promises that an earlier process made for its own rate."""
        for topic in topics:
            promises = topic.pipe is not None or topic.config.durability in ("disk", "ephemeral")
            if promises and topic.ceiling - topic.head_seq > limits.SEQ_RESERVE:
                topic.reserve = Reserve(ms=now_ms, seq=topic.head_seq)
                self.reserved[topic] = None

    def lower_ceilings(self, now_ms: int) -> None:
        """Take back what topics that have become quiet have promised, so that a crash skips no more than it must. Only
        where there is room: nothing depends on it."""
        if now_ms < self._lower_ms or self.read_only or self._staged or self.wal.staged:
            return
        self._lower_ms = now_ms + _LOWER_MS
        quiet = [topic for topic in self.reserved if topic.reserve is None or topic.reserve.is_quiet(now_ms)]
        lowered = []
        for topic in quiet[:_LOWERED]:
            if topic.rebuilding:
                continue
            if not self.wal.fits(_HEAD_BYTES, reserve=False):
                break
            del self.reserved[topic]
            if not topic.dropped:
                if now_ms - topic.last_ts >= limits.SEQ_RESERVE_MS:
                    topic.reserve = None  # it wrote nothing in this time, whatever it wrote before
                self.stage_ceiling(topic, topic.next_seq - 1, max(now_ms, topic.last_ts))
                lowered.append(topic)
        try:
            self._write_frames()
        except (DiskFull, OSError):
            self.reserved.update(dict.fromkeys(lowered))  # again when they have been quiet for so long again
        self.request_sync()

    def bear_witness(self, now_ms: int, *, covered: int) -> bool:
        """Where nothing was written for a moment, tell the log that all of it is on the platter: two frames that say
        nothing but that, in their `synced`. After a power cut nobody could tell damage to the last frame from a write
        that was cut short; with a good frame behind it that knows it as synced, recovery can. The first one fills the
        sector, so that the second stands in another. What the snapshot covers needs no witness. Only where there is
        room: nothing depends on it. Returns whether one is still to come."""
        wal = self.wal
        if wal.written_lsn <= max(self._witness_lsn, covered) or self.read_only:
            return False
        if wal.written_lsn != self._quiet_lsn:
            self._quiet_lsn, self._quiet_ms = wal.written_lsn, now_ms
        busy = self._staged or self._lines or wal.staged or wal.synced_lsn < wal.written_lsn
        if busy or now_ms < max(self._quiet_ms + _QUIET_MS, self._witness_ms):
            return True
        fill = -wal.current.end % limits.SECTOR_BYTES
        if fill < _FILLED_BYTES:
            fill += limits.SECTOR_BYTES
        if wal.fits(fill + _LINES_BYTES, reserve=False):
            for body in (_encode((0, [], bytes(fill - _FILLED_BYTES))), _encode((0, []))):
                wal.stage(FrameType.HEAD, topic_id=wal.shard, ts=0, body=body)
            with suppress(DiskFull, OSError):
                self._write_frames()
                self.request_sync()
        self._witness_lsn = wal.written_lsn
        self._witness_ms = now_ms + _WITNESS_MS
        return False

    # --- the write -----------------------------------------------------------------------------------

    def write(self) -> bool:
        """Write what is staged; publish and answer what need not wait for a sync. False: it failed and is undone."""
        written = self._write()
        self._write_floors()
        if self._afterwards:
            afterwards, self._afterwards = self._afterwards, []
            for call in afterwards:
                call()
        return written

    def after_write(self, call: Callable[[], None]) -> None:
        """When what is staged has been written, or could not be."""
        self._afterwards.append(call)

    def _write(self) -> bool:
        staged = self._staged
        if not staged and not self._lines and not self.wal.staged:
            return True
        self._staged = []
        started = time.perf_counter_ns()
        try:
            self._write_frames()
        except (DiskFull, OSError) as error:
            self.failure = write_failed(error)
            self._take_back(staged, self.failure)
            return False
        written = time.perf_counter_ns()
        wal_us = (written - started) // 1_000
        synced_lsn = self.wal.synced_lsn
        for entry in staged:
            entry.wal_us = wal_us
            topic = entry.topic
            if (
                topic.pending
                or entry.created
                or (topic.config.durability == "fsync" and entry.logged)
                or (entry.row.last > topic.sure_ceiling and not topic.ceiling_is_sure(synced_lsn))
            ):
                entry.written_ns = written
                topic.pending += 1
                self._waiting.append(entry)
            else:
                self._publish(entry, 0)
        self.request_sync()
        return True

    def write_control(self) -> None:
        """Write staged control frames, and nothing but them; failure goes up as the answer."""
        try:
            self._write_frames()
        except (DiskFull, OSError) as error:
            raise write_failed(error) from error

    def _write_frames(self) -> None:
        try:
            self.stage_lines()
            self.wal.write()
        except BaseException as error:
            self.read_only = isinstance(error, DiskFull)
            for topic, ceiling, lsn, sure in reversed(self._ceilings):
                # Never up again: a lower one may be in a snapshot, or on the platter all the same.
                topic.ceiling, topic.ceiling_lsn = min(topic.ceiling, ceiling), lsn
                topic.sure_ceiling = min(topic.sure_ceiling, sure)
                topic.touched()
            self._ceilings.clear()
            for topic, trims in reversed(self._telling):
                topic.untold = [*trims, *topic.untold]
            self._telling.clear()
            self._hurried_lsn = 0
            raise
        self._ceilings.clear()
        self._telling.clear()
        self.read_only = False

    def _take_back(self, staged: list[Written], failure: ApiError) -> None:
        """As if these requests had never come."""
        for entry in reversed(staged):
            topic = entry.topic
            topic.next_seq = entry.row.first
            topic.pending_records -= entry.row.live  # of a loss none
            topic.pending_bytes -= entry.row.size
            topic.totals.pending_bytes -= entry.row.size
            if entry.key is not None:
                topic.keys.forget(entry.key)
            if entry.row.source is not None:
                entry.row.source.release(entry.row)
            if entry.created:
                self._forget_topic(topic)
            for correlation in range(entry.correlation, entry.correlation + entry.requests):
                entry.reply_to.send_always(messages.pack_failure(Op.APPEND, correlation, failure))

    def _publish(self, entry: Written, fsync_us: int) -> None:
        topic, row = entry.topic, entry.row
        topic.pending_records -= row.live
        topic.pending_bytes -= row.size
        topic.totals.pending_bytes -= row.size
        if topic.dropped:
            if row.source is not None:
                row.source.release(row)
        else:
            if KILL_POINTS:
                kill_point("publish")
            if entry.lost is not None:
                topic.skip_to(row.last, trimmed=True, hops=entry.lost)
                if row.source is not None:
                    row.source.release(row)
                self.on_publish(topic)
            else:
                topic.publish(row)
            if entry.logged:
                self._cache.keep_body(row)
                self.published(topic)
            # Else it is a copy: whoever staged it takes out what must not come back first.
        if KILL_POINTS:
            kill_point("reply")
        first, head = row.first, topic.head_seq
        last = first + row.count - 1
        entry.reply_to.send_always(
            messages.pack_appended(
                entry.correlation,
                first,
                row.count,
                head if head > last else last,
                entry.created,
                False,
                entry.wal_us,
                fsync_us,
                entry.requests,
            )
        )

    def published(self, topic: Topic) -> None:
        """There is something new to read: what has to go for it goes, and who waits is told."""
        config = topic.config
        if config.cap_records or config.cap_bytes:
            retention.enforce_caps(topic)
            if topic.floor_due:
                self._floors[topic] = None
        self.on_publish(topic)

    def floor_moved(self, topic: Topic) -> None:
        """Caps took what is in the log to make room for what is not: that has to be logged, too. Nothing is staged."""
        if topic.floor_due:
            self._floors[topic] = None
            self._write_floors()

    def _write_floors(self) -> None:
        """Before anybody is told of what is published. What finds no space comes with a later write: with the next one
        that made room in the log, and now and then this asks for a new file itself."""
        for topic in list(self._floors):
            frame = encode_delete(DeleteFrame(None, [], topic.cap_seq, topic.ttl_seq))
            size = frame_bytes(key_len=0, body_len=len(frame))
            with suppress(DiskFull, OSError):
                if not topic.dropped:
                    if not self.wal.fits(size, reserve=True):
                        if time.monotonic_ns() < self._floors_ns:
                            continue
                        self._floors_ns = time.monotonic_ns() + _FLOORS_NS
                        self.wal.rotate(size)
                        self._floors_ns = 0
                    self.wal.stage(FrameType.DELETE, topic_id=topic.id, ts=topic.last_ts, body=frame)
                    self._write_frames()
                topic.floor_due = False
                del self._floors[topic]

    # --- the sync ------------------------------------------------------------------------------------

    def request_sync(self) -> None:
        """Start a sync if somebody waits for one or soon would; else see that the disk class gets its own in time."""
        wal = self.wal
        if wal.written_lsn == wal.synced_lsn or self.syncer.busy:
            return
        wanted = bool(self._waiting) or self._hurried_lsn > wal.synced_lsn
        if wanted and not self.window_ns:
            self.sync_now()
            return
        now = time.monotonic_ns()
        due = self._synced_ns + self.window_ns if wanted else now + self._disk_sync_ns
        if due <= now:
            self.sync_now()
        elif self.sync_due_ns is None or due < self.sync_due_ns:
            self.sync_due_ns = due

    def sync_now(self) -> None:
        self.sync_due_ns = None
        self.wal.syncing = [file for file in self.wal.files if file.last_lsn > self.wal.synced_lsn]
        folder = self.wal.folder if self.wal.renamed else None
        self.wal.renamed = False
        self.syncer.request([file.fd for file in self.wal.syncing], self.wal.written_lsn, folder=folder)

    def wait_for_sync(self, reply_to: ReplyTo, build: Callable[[int], bytes]) -> None:
        """Answer when everything written so far is on the platter; build gets the microseconds waited."""
        if self.wal.written_lsn == self.wal.synced_lsn:
            reply_to.send_always(build(0))
            return
        self._waiting.append(Answer(self.wal.written_lsn, reply_to, build, time.perf_counter_ns()))
        self.request_sync()

    def synced(self, outcome: Synced) -> None:
        """A sync ended: publish and answer what it covers, and start the next if more was written."""
        if outcome.error is not None:
            raise outcome.error  # the shard stops; recovery finds what is really there
        self.wal.synced_lsn = outcome.lsn
        self.wal.syncing = []
        self._synced_ns = time.monotonic_ns()
        self.on_sync(outcome.took_us)
        now = time.perf_counter_ns()
        waiting = self._waiting
        while waiting and waiting[0].lsn <= outcome.lsn:
            entry = waiting.popleft()
            fsync_us = (now - entry.written_ns) // 1_000
            if isinstance(entry, Answer):
                entry.reply_to.send_always(entry.build(fsync_us))
            else:
                entry.topic.pending -= 1
                # Another class waits for its topic's creation or its ceiling, not for its own promise.
                self._publish(entry, fsync_us if entry.topic.needs_sync else 0)
        if self._floors and not self._staged and not self._lines and not self.wal.staged:
            self._write_floors()  # else with the write of what is staged
        self.request_sync()


def _line_of_loss(topic: Topic, first: int, last: int, at: int, hops: Sequence[tuple[int, int]]) -> CopiesLine:
    passed = list(chain.from_iterable(hops)) if any([passed for _, passed in hops]) else None
    return CopiesLine(topic.id, topic.last_ts, first, last, at, hops=passed)


def storage_full() -> ApiError:
    return ApiError(
        "storage_full",
        "no space left on the data disk: nothing was written. Reads and deletes still work; "
        "writes resume by themselves when there is space",
        retry_after_s=5,
    )


def write_failed(error: BaseException) -> ApiError:
    return storage_full() if isinstance(error, DiskFull) else ApiError("internal", f"the log write failed: {error}")
