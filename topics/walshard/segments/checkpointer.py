"""Moves payloads from the WAL into segments, writes snapshots, and lets go of WAL files. All disk work is on one
thread. Where there is a cold tier, checkpoints also finish what tiering/relocator.py has begun.

One job at a time: a flush of one topic, or a checkpoint (delete flags, then the snapshot, then what it made
useless). The serving loop plans a job, the thread does the IO, the loop takes the result in. Until it does, nothing
has changed; a crash before the next snapshot leaves blocks that nobody names, and they are written again.

Flushing waits for a quiet moment: it costs the serving loop cycles and the disk a second write. It stops waiting
when the WAL holds more than recovery should have to replay.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from topics import limits
from topics.errors import DiskFull
from topics.settings import Settings
from topics.storage.control import CopiesLine, DeleteFrame, encode_delete
from topics.storage.format import FrameType, frame_bytes
from topics.storage.paths import numbered_name, topic_dir
from topics.storage.snapshot import ShardState, encode_snapshot
from topics.walshard.engine import Engine
from topics.walshard.forwards.copies import Copies
from topics.walshard.log.disk import Disk, kill_point
from topics.walshard.log.wal import WalFile
from topics.walshard.log.worker import Worker
from topics.walshard.segments.flush import Flush, Moved
from topics.walshard.segments.orphans import files_of
from topics.walshard.segments.segments import OpenFiles, Segment
from topics.walshard.tiering.relocator import Relocator
from topics.walshard.topic.topic import Topic

_RETRY_MS = 1_000
_EXPIRE_MS = 60_000
_EXPIRE_SOON_MS = 1_000  # where what has expired takes room from others
_PATIENCE = 5
_FREEABLE_FILES = 4  # WAL files that only wait for a snapshot: enough of them are worth one under load
_ARRIVED = 16  # likewise of segments that were copied to the cold tier
_MOVED_MS = 60_000  # how often pipes that have moved without a copy are worth one
_FLAGS_MS = 30_000  # likewise delete flags that the cold tier did not take


class _Job(NamedTuple):
    work: Callable[[], Any]  # on the thread
    finished: Callable[[Any], None]  # on the loop, with its result
    failed: Callable[[], None]  # on the loop, if the disk was full


class _Settling:
    __slots__ = ("done", "snapshot", "then", "topic")

    def __init__(self, topic: Topic, then: Callable[[], None]) -> None:
        self.topic = topic
        self.then = then
        self.snapshot = False  # the snapshot that runs is the one it waits for
        self.done = False


class Mover:
    def __init__(
        self,
        engine: Engine,
        disk: Disk,
        files: OpenFiles,
        *,
        settings: Settings,
        shard: int,
        layout: int,
        folder: str,
        next_snapshot_no: int,
        snapshot_lsn: int,
        snapshot_due: bool = False,
        relocator: Relocator | None = None,
    ) -> None:
        self._engine = engine
        self._disk = disk
        self._files = files
        self._settings = settings
        self._shard = shard
        self._layout = layout
        self._folder = folder
        self._snapshot_no = next_snapshot_no
        self._old_snapshots: list[str] = []
        self._dead: list[Segment] = []  # not in the next snapshot; unlinked when it is written
        self._flush = Flush(disk, files, settings=settings)
        self._relocator = relocator
        self._leaving: list[Segment] = []  # their copies count, their hot files are not gone yet
        self._flags_due = False  # the cold disk lacks delete flags ...
        self._flags_ms = 0  # ... and is not asked to take them before this
        self.snapshot_lsn = snapshot_lsn
        self.snapshot_ms = 0  # when the last one of this process was written
        self._written = False  # the last one that was begun has been written
        self.keep_files = False  # while the snapshot before this one may still be needed; a later start clears up
        self._freed: list[WalFile] = []  # log files that nothing names any more
        self._flushed = snapshot_due  # since the last snapshot
        self._pipe_flushed = snapshot_due  # copies are in segments, but no snapshot says so yet
        self._settling: deque[_Settling] = deque()
        self._expire_ms = 0  # when every topic's TTL is next looked at
        self._moved_ms = 0  # likewise every pipe's position
        self._retry_ms = 0  # after a full disk: not before this
        self._worker = Worker("mover")
        self.event_fd = self._worker.event_fd
        self.busy = False

    # --- when ----------------------------------------------------------------------------------------

    def step(self, *, quiet: bool) -> bool:
        """Start the next useful job, if there is one; returns whether one runs. The loop calls this now and then."""
        if self.busy:
            return True
        engine = self._engine
        wal = engine.wal
        pressed = (
            wal.backlog_bytes > limits.WAL_BACKLOG_BYTES
            or sum(file.pins for file in wal.files) > limits.TAIL_ROWS
            or engine.copies.bytes > limits.COPIES_BYTES // 2
        )
        now = engine.clock.now_ms()
        if now < self._retry_ms:
            return True
        if now >= self._expire_ms:
            self._expire_ms = now + (_EXPIRE_SOON_MS if engine.settings.max_total_bytes else _EXPIRE_MS)
            for each in engine.topics.values():
                engine.refresh(each)  # nobody may ever look at it again
                engine.jobs.look(each)
        self._settle_next()
        if self.busy:
            return True
        self._unlink_freed()
        if self._relocator is not None and self._relocator.returned and not self.keep_files:
            self._relocator.returned = False
            self._catch_up(self._relocator)
        if self._snapshot_is_due(quiet=quiet, pressed=pressed):
            self.checkpoint()
        elif (quiet or pressed) and (topic := self._next_to_flush(pressed=pressed)) is not None:
            self.flush(topic)
        elif engine.copies.bytes and (old := self._old_copies(now)) is not None:
            self.flush(old)
        return self.busy

    def _catch_up(self, relocator: Relocator) -> None:
        """The cold disk is back: it gets the flags that it lacks, and loses what nothing names. What the last snapshot
        may name stays until there is another."""
        engine = self._engine
        cold = [segment for topic in engine.topics.values() for segment in topic.segments if segment.cold]
        self._flags_due = any(segment.dirty for segment in cold)
        self._flags_ms = 0
        named = {topic.id: files_of(topic, cold=True) for topic in engine.topics.values()}
        for segment in self._dead:
            named.setdefault(segment.header.topic_id, set()).add(os.path.basename(segment.path))
        spared = {topic.id for topic in engine.dropped}
        relocator.tidy(named, spared, shard=self._shard, shards=self._settings.wal_shards)

    def _next_to_flush(self, *, pressed: bool) -> Topic | None:
        settings = self._settings
        now = self._engine.clock.now_ms()
        oldest = self._engine.wal.older[0] if pressed and self._engine.wal.older else None
        for topic in self._engine.topics.values():
            if not topic.tail_rows or topic.unfilled:
                continue
            if (
                topic.tail_records >= settings.segment_max_events
                or topic.tail_bytes >= settings.segment_max_bytes
                or (settings.segment_max_age_ms and now - topic.tail_since_ms >= settings.segment_max_age_ms)
                or (topic.pipe is not None and now - topic.tail_since_ms >= limits.COPIES_AGE_MS and topic.has_copies)
            ):
                return topic
        if pressed and self._engine.copies.bytes > limits.COPIES_BYTES // 2:
            copied = (topic for topic in self._engine.topics.values() if topic.pipe and not topic.unfilled)
            return next((topic for topic in copied if topic.has_copies), None)
        if pressed:
            # Nobody is full, so the log is long because of many small tails: free the oldest file first.
            for topic in self._engine.topics.values():
                if topic.tail_rows and not topic.unfilled and (oldest is None or _reads_from(topic, oldest)):
                    return topic
        return None

    def _old_copies(self, now: int) -> Topic | None:
        """A topic whose copies have waited for a quiet moment long enough: a restart would have to make them again."""
        longest_ms = _PATIENCE * limits.COPIES_AGE_MS
        for topic in self._engine.topics.values():
            old = topic.pipe is not None and now - topic.tail_since_ms >= longest_ms
            if old and topic.has_copies and not topic.unfilled:
                return topic
        return None

    def _snapshot_is_due(self, *, quiet: bool, pressed: bool) -> bool:
        wal = self._engine.wal
        dead = self._engine.totals.all_dead_segments + len(self._dead)
        arrived = 0 if self._relocator is None else len(self._relocator.arrived)
        if self._relocator and arrived and (arrived >= _ARRIVED or (quiet and not self._relocator.copying)):
            return True
        if self._engine.pipes.unsaved or self._has_moved() or (quiet and (self._leaving or self._flags_are_due())):
            return True
        if wal.written_lsn == self.snapshot_lsn and not dead and not self._flushed:
            return False
        freeable = wal.unused()
        if quiet or pressed:
            return freeable > 0 or bool(self._engine.dropped) or dead > 0 or self._pipe_flushed
        return freeable >= _FREEABLE_FILES or self._pipe_flushed

    def _flags_are_due(self) -> bool:
        if self._relocator is not None and self._relocator.gone:
            return False  # it says when the disk is back
        return self._flags_due and self._engine.clock.now_ms() >= self._flags_ms

    def _has_moved(self) -> bool:
        """Now and then: whether a pipe stands elsewhere than on the disk and has no copies that would bring it there.
        A filter may let nothing through for days."""
        now = self._engine.clock.now_ms()
        if now < self._moved_ms:
            return False
        self._moved_ms = now + _MOVED_MS
        return any(
            topic.pipe is not None
            and topic.pipe.saved_at != topic.pipe.at
            and not topic.ephemeral
            and not topic.has_copies
            for topic in self._engine.topics.values()
        )

    # --- flush ---------------------------------------------------------------------------------------

    def flush(self, topic: Topic) -> None:
        """Move the tail of a topic into its segments."""
        blocks = self._flush.plan(topic, now_ms=self._engine.clock.now_ms())
        if not blocks:
            return
        topic.flushing = True

        def failed() -> None:
            topic.flushing = False
            self._engine.copies.stuck = True

        work = partial(self._flush.write, topic, blocks)
        self._submit(_Job(work, partial(self._take_blocks, topic), failed))

    def _take_blocks(self, topic: Topic, moved: list[Moved]) -> None:
        """On the loop: rows that read from the WAL become rows that read from segments."""
        topic.flushing = False
        self._engine.copies.stuck = False
        if topic.dropped:
            return
        for block, entry, flags in moved:
            segment, old = block.segment, block.rows
            if segment not in topic.segments:
                topic.segments.append(segment)
            row = segment.add_block(entry)
            row.live = sum(was.live for was in old)
            row.size = sum(was.size for was in old)
            row.skip = min(max(0, topic.earliest_seq - row.first), row.count)
            if any(was.flags is not None for was in old):
                row.flags = bytearray().join(was.flags or bytearray(was.count) for was in old)
                segment.flagged = True
                if bytes(row.flags) != (flags or bytes(row.count)):
                    segment.dirty.add(row)
            topic.rows.replace(old, [row] if row.live else [])
            for was in old:
                if was.live:
                    topic.release(was)
            if not row.live:
                segment.release(row)
            topic.flushed_seq = entry.last_seq
            if topic.pipe is not None:
                topic.pipe.flushed(entry.last_seq)
                self._pipe_flushed = True
            if block.seals:
                segment.seal()
                topic.tags = None
                if self._relocator is not None:
                    self._relocator.consider(topic)
        topic.rows.compact()
        topic.touched()
        self._flushed = True

    def log_again(self, topic: Topic) -> None:
        """Another layout, whose log is empty: what can't be flushed, because it stands behind copies that have no bytes
        yet, is logged there as it was in the old one. The snapshot that follows covers these frames."""
        commit, wal, now = self._engine.commit, self._engine.wal, self._engine.clock.now_ms()
        pipe = topic.pipe
        assert pipe is not None
        marks = deque(pipe.marks)
        dead: list[int] = []

        def log_empty(below: int) -> None:
            """Copies without a live one: they say how far the source has been copied, and how many there were."""
            while marks and marks[0][0] < below:
                line = pipe.line_of_none(topic.id, marks.popleft(), ts=topic.last_ts)
                commit.log_copies(line)
                dead.extend(range(max(line.first_seq, topic.flushed_seq + 1), line.last_seq + 1 if line.count else 0))

        for row in topic.rows.since(topic.rows.position(topic.flushed_seq + 1)):
            if not row.live:
                continue
            log_empty(row.first)
            if isinstance(row.source, Copies):
                line = pipe.line(topic.id, row)
                commit.log_copies(line)
                row.source.file = wal.current
                _, at, _ = marks.popleft()
                if at != line.at:
                    commit.log_copies(CopiesLine(topic.id, row.first_ts, row.last + 1, row.last, at))
            else:
                body = row.load()
                commit.stage_lines()  # of the rows before it
                commit.make_room(frame_bytes(key_len=0, body_len=len(body)))
                offset, _ = wal.stage_batch(topic.id, row.first, row.count, row.first_ts, body, b"")
                row.source, row.offset = wal.current, offset
                row.length = frame_bytes(key_len=0, body_len=len(body))
            wal.current.pin()
            dead += [row.first + index for index in range(row.count) if not row.is_live(index)]
        log_empty(topic.next_seq)
        if dead:
            commit.stage_lines()
            frame = encode_delete(DeleteFrame(None, dead))
            commit.make_room(frame_bytes(key_len=0, body_len=len(frame)))
            wal.stage(FrameType.DELETE, topic_id=topic.id, ts=now, body=frame)
        commit.write_control()

    # --- checkpoint ----------------------------------------------------------------------------------

    def checkpoint(self, *, clean: bool = False, stopped: bool = False) -> None:
        """Write delete flags, then a snapshot of all topics; then remove what it no longer names."""
        engine = self._engine
        wal = engine.wal
        flags = []
        dirty = []
        leaving, self._leaving = self._leaving, []
        if self._relocator is not None:
            leaving += self._relocator.switch()
        for topic in engine.topics.values():
            if topic.pipe is not None and topic.pipe.marks:
                topic.pipe.flushed(topic.gone_through(topic.pipe.marks))
                topic.touched()
            for segment in list(topic.segments):
                if segment.live_rows == 0 and not topic.flushing:
                    topic.segments.remove(segment)
                    topic.touched()
                    self._dead.append(segment)
                elif segment.dirty:
                    dirty.append((segment, segment.dirty))
                    flags.append((segment, segment.take_dirty()))
                    topic.touched()
        engine.totals.dead_segments_gone()
        self._flags_due = False
        flushed, self._flushed = self._flushed, False
        pipe_flushed, self._pipe_flushed = self._pipe_flushed or engine.pipes.unsaved, False
        engine.pipes.unsaved = False
        dropped, engine.dropped = engine.dropped, []
        dead, self._dead = self._dead, []
        covered, unused = wal.written_lsn, wal.unused()
        saved = [
            (
                topic.pipe,
                -1 if topic.pipe.tail_lost else topic.pipe.flushed_at,  # when that ends, this one says too little
                max(topic.pipe.flushed_to, topic.flushed_seq),
            )
            for topic in engine.topics.values()
            if topic.pipe is not None
        ]
        state = ShardState(
            shard=self._shard,
            layout=self._layout,
            lsn=covered,
            clock_ms=engine.clock.now_ms(),
            clean=clean,
            file_no=wal.current.header.file_no,
            topics=[msgspec.Raw(topic.encoded_state()) for topic in engine.topics.values()],
            stopped=stopped,
        )
        path = os.path.join(self._folder, numbered_name(self._layout, self._snapshot_no, "snap"))
        self._snapshot_no += 1
        self._written = False
        stale, self._old_snapshots = self._old_snapshots, [path]

        unsynced = [file.fd for file in wal.files if file.last_lsn > wal.synced_lsn]

        stayed: dict[Segment, Exception] = {}  # their copies are out of reach
        missed: dict[Segment, DiskFull] = {}  # the cold tier is away or takes no flags; the snapshot has them

        def write() -> None:
            for fd in unsynced:  # a snapshot never covers what is not on the platter
                self._disk.sync(fd)
            try:
                if unsynced:
                    self._disk.sync_dir(self._folder)  # nor a file whose name is not
                for segment, rows in flags:
                    try:
                        segment.write_flags(rows)
                    except DiskFull as error:
                        if segment.is_hot:
                            raise
                        missed[segment] = error
                self._disk.write_whole(path, encode_snapshot(state))
            except DiskFull:
                leave()  # a full disk needs what they take, before it has room for a snapshot
                raise
            kill_point("snapshot")
            leave()
            for old in stale:
                self._disk.unlink(old)

        def leave() -> None:
            for segment in leaving:
                if (error := segment.leave()) is not None:
                    stayed[segment] = error

        def settle(segments: list[Segment]) -> None:
            for segment in segments:
                segment.settle()
                if self._relocator is not None:
                    self._relocator.settled(segment, stayed.get(segment))

        def finished(_: None) -> None:
            self.snapshot_lsn = covered
            self.snapshot_ms = engine.clock.now_ms()
            self._written = True
            for pipe, at, to in saved:
                pipe.saved_at, pipe.saved_to = at, to
            settle(leaving)
            for segment, rows in dirty:
                if (error := missed.get(segment)) is not None:
                    segment.dirty |= rows
                    self._flags_due = True
                    self._flags_ms = engine.clock.now_ms() + _FLAGS_MS
                    if self._relocator is not None:
                        self._relocator.trouble(error)
            if self.keep_files:
                return
            for segment in dead:
                segment.unlink()
                if segment.cold and self._relocator is not None:
                    self._relocator.remove(segment.header.topic_id, segment)
            for topic in dropped:
                for segment in topic.segments:
                    segment.forget_files()
                self._disk.remove_dir(topic_dir(self._settings.data_dir, topic.id))
                if self._relocator is not None:
                    self._relocator.remove_topic(topic.id)
            self._freed.extend(wal.trim(covered_lsn=covered, unused=unused))
            self._unlink_freed()

        def failed() -> None:
            """Nothing was promised: everything taken for this snapshot waits for the next."""
            for segment, rows in dirty:
                segment.dirty |= rows
            settle([segment for segment in leaving if segment in stayed])
            self._leaving = [segment for segment in leaving if segment not in stayed] + self._leaving
            engine.dropped = dropped + engine.dropped
            self._dead = dead + self._dead
            self._flushed |= flushed
            self._pipe_flushed |= pipe_flushed
            self._old_snapshots = [*stale, path]  # it may have got its name, and no more

        self._submit(_Job(write, finished, failed))

    def _unlink_freed(self) -> None:
        """Oldest first. One that the syncer is at waits: closed under its hands, it would fail, or sync whatever file
        got that descriptor next."""
        while self._freed and self._freed[0] not in self._engine.wal.syncing:
            self._freed.pop(0).unlink()

    # --- stopping ------------------------------------------------------------------------------------

    def flush_copies(self) -> None:
        """Routers' copies go into segments, as far as there is space: they are in memory only."""
        for topic in self._engine.topics.values():
            if topic.has_copies and not topic.unfilled:
                self.flush(topic)
                self.wait()

    def finish(self) -> None:
        """The last snapshot. It is clean, unless there was no space for copies: the next start makes them again, but
        those whose source has lost its records are lost. What finds no space is therefore tried once more, after the
        first try has given up what it could."""
        for _ in range(2):
            self.flush_copies()
            unsaved = any([topic.has_copies and not topic.unfilled for topic in self._engine.topics.values()])
            clean = not unsaved and not self._engine.pipes.rebuilding
            self.checkpoint(clean=clean, stopped=not clean)
            self.wait()
            if self._written and not unsaved:
                return

    # --- settling: before a rule changes, everything made under the old one must be on disk -----------

    def settle(self, topic: Topic, then: Callable[[], None]) -> None:
        """Flush a topic's copies, write a snapshot that names them, then call back."""
        self._settling.append(_Settling(topic, then))
        self._settle_next()

    def _settle_next(self) -> None:
        while self._settling and not self.busy:
            entry = self._settling[0]
            if entry.done or entry.topic.dropped:
                self._settling.popleft()
                entry.then()
            elif entry.topic.pipe is not None and entry.topic.pipe.pending:
                return  # its copies are on their way; the next step looks again
            elif entry.topic.has_copies:
                self.flush(entry.topic)
            else:
                entry.snapshot = True
                self.checkpoint()

    def adopt_snapshot(self, path: str) -> None:
        """A snapshot from before this start: it goes when the next one is written."""
        self._old_snapshots.append(path)

    # --- the thread ----------------------------------------------------------------------------------

    def _submit(self, job: _Job) -> None:
        self.busy = True
        self._worker.submit(job.work, partial(self._ended, job))

    def take(self) -> None:
        """Take in the result of the job that ended, if one did."""
        self._worker.take()

    def _ended(self, job: _Job, result: Any, error: Exception | None) -> None:
        self.busy = False
        if error is None:
            job.finished(result)
            if self._settling:
                self._settling[0].done = self._settling[0].snapshot
                self._settle_next()
        elif isinstance(error, DiskFull):
            job.failed()  # nothing has changed; the next try may find space
            if self._settling:
                self._settling[0].snapshot = False
            self._retry_ms = self._engine.clock.now_ms() + _RETRY_MS
        else:
            raise error

    def wait(self) -> None:
        """Block until no job runs; for stopping, recovery and tests."""
        self._worker.wait()

    def close(self) -> None:
        self._worker.close()


def _reads_from(topic: Topic, file: WalFile) -> bool:
    for row in topic.rows.since(topic.rows.position(topic.flushed_seq + 1)):
        if row.live and isinstance(row.source, WalFile | Copies):
            return (row.source.file if isinstance(row.source, Copies) else row.source) is file
    return False
