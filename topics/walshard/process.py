"""The shard process: recover, then serve the rings in rounds until told to stop.

A round: drain every ring, handle what came, commit once, take in finished syncs and moves, flush every ring, ring each
bell at most once. What it has no time for waits for the next one (intake.py). Stopping: answer what is in the rings,
sync, write a clean snapshot. In a reload it is the same: those who ask have put everything into the rings by then, and
send no more.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from topics import limits
from topics.actors.clock import Clock
from topics.actors.context import Context
from topics.actors.governor import Governor, Level
from topics.actors.idle import Idle, spin_us
from topics.actors.link import Link
from topics.errors import ApiError, ColdTierGone, CorruptData, DiskFull, FormatError, RingPoisoned, Unreachable
from topics.shm.counters import Row, Word, sync_bucket
from topics.storage.paths import parse_numbered, shard_dir
from topics.walshard.engine import Engine
from topics.walshard.intake import Intake
from topics.walshard.log.disk import Disk
from topics.walshard.log.disk_space import FreeSpace
from topics.walshard.log.recovery import Recovered, Recovery, boot_id
from topics.walshard.log.syncer import Syncer
from topics.walshard.log.wal import Wal
from topics.walshard.quota import Quota
from topics.walshard.segments.checkpointer import Mover
from topics.walshard.segments.orphans import remove_leftovers, remove_stale
from topics.walshard.segments.segments import OpenFiles
from topics.walshard.tiering.relocator import Relocator
from topics.walshard.tiering.tier import ColdTier
from topics.walshard.topic.topic import Topic

MAINTENANCE_NS = 200_000_000
_WINDOW_NS = limits.COMMIT_WINDOW_MS * 1_000_000
_LAST_WORDS_NS = 3_000_000_000  # how long peers that don't listen may keep a shard that stops
QUIET_SHARE = 0.02  # busy for less than this share of the time: a good moment to move things


async def run(context: Context) -> None:
    sys.setswitchinterval(0.0001)  # the syncer and the mover must get the interpreter quickly
    shard = Shard(context)
    try:
        shard.recover()
    except (CorruptData, FormatError) as error:
        context.log.error("recovery refused", reason=str(error))
        context.fail(str(error))
    except Unreachable as error:
        context.log.error("recovery postponed", reason=str(error))
        context.fail(str(error), again=True)
    except DiskFull as error:
        if context.old_layout is None:
            raise
        context.log.error("the shard count can't be changed", reason=str(error))
        context.fail(str(error))
    gc.collect()
    gc.freeze()  # what recovery built lives long: later collections need not walk it
    context.on_beat = shard.beat
    context.ready()
    await shard.serve()


class Shard:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._links: dict[str, Link] = {}
        for peer, link in context.links.items():
            self._link_up(peer, link)
        context.on_link_up = self._link_up
        context.on_link_down = self._link_down
        context.on_stop = self._stop
        context.on_layout_committed = self._layout_committed
        self._before = list(context.row.words[: Word.NAME])  # what was counted by processes before this one
        self._stopping = False
        self._disk = Disk()
        self._cold = None if context.cold is None else ColdTier(context.cold, context.cold_id)
        self._relocator: Relocator | None = None  # where there is a cold tier
        self._busy_ns = 0
        self._maintain_ns = 0  # when maintenance is next due ...
        self._settled = False  # ... unless nothing came since it last found nothing to do
        settings = context.settings
        self._governor = Governor(
            lag_ms=settings.pressure_lag_ms, commit_ms=settings.pressure_commit_ms, on=settings.elastic
        )

    # --- start ---------------------------------------------------------------------------------------

    def recover(self) -> None:
        context, settings = self._context, self._context.settings
        started = time.monotonic()
        context.recovering(0)
        clock = Clock()
        files = OpenFiles(self._disk)
        boot = boot_id()
        old_layout = context.layout if context.old_layout is None else context.old_layout
        old_shards = context.shards if context.old_shards is None else context.old_shards
        moving = context.old_layout is not None
        folder = shard_dir(settings.data_dir, context.index)
        self._disk.make_dir(folder)
        if moving:
            self._remove_unfinished(context.layout)
        recovery = Recovery(
            settings=settings,
            disk=self._disk,
            files=files,
            clock=clock,
            shard=context.index,
            shards=context.shards,
            boot=boot,
            progress=context.recovering,
            cold=self._cold,
        )
        recovered = recovery.run(layout=old_layout, old_shards=old_shards)
        for note in recovered.notes:
            context.log.warning("recovery", note=note)
        if not moving:
            self._clear_up(recovered)  # the log may need the space
        wal = Wal(
            self._disk,
            folder,
            shard=context.index,
            layout=context.layout,
            boot_id=boot,
            file_bytes=settings.wal_file_bytes,
            next_lsn=1 if moving else recovered.next_lsn,
            next_file_no=1 if moving else recovered.next_file_no,
            recovered=recovered.wal_files,
        )
        self._syncer = Syncer(self._disk)
        self._engine = Engine(
            settings=settings,
            topics=recovered.topics,
            totals=recovered.totals,
            copies=recovered.copies,
            wal=wal,
            syncer=self._syncer,
            clock=clock,
            quota=Quota(settings, context.row, self._other_shards()),
            space=FreeSpace(settings.data_dir, mark=settings.min_free_bytes),
            restarted=context.row[Word.GENERATION] > 1,
        )
        self._engine.on_fault = self._fault
        self._intake = Intake(self._engine, trace=context.trace if context.log.debugging else None)
        self._engine.dropped = recovered.dropped
        self._engine.commit.on_sync = self._count_sync
        if self._cold is not None:
            place = self._cold.path
            self._relocator = Relocator(self._disk, tier=self._cold, settings=settings, now_ms=clock.now_ms)
            self._relocator.on_trouble = lambda reason: context.log.warning("relocation stopped", reason=reason)
            self._relocator.on_back = lambda: context.log.info("relocation goes on", cold_dir=place)
            if recovered.away is not None:
                self._relocator.trouble(ColdTierGone(recovered.away))
            for topic in recovered.topics.values():
                self._relocator.consider(topic)
        self._mover = Mover(
            self._engine,
            self._disk,
            files,
            settings=settings,
            shard=context.index,
            layout=context.layout,
            folder=folder,
            next_snapshot_no=recovered.next_snapshot_no,
            snapshot_lsn=0 if moving else recovered.snapshot_lsn,
            snapshot_due=recovered.snapshot_due,
            relocator=self._relocator,
        )
        self._engine.pipes.settle = self._mover.settle
        if moving:
            self._move_all()
        else:
            for path in recovered.snapshots:
                self._mover.adopt_snapshot(path)
        self._publish_counters()
        context.log.info(
            "recovered",
            topics=len(recovered.topics),
            records=recovered.totals.records,
            frames=recovered.frames,
            seconds=round(time.monotonic() - started, 3),
        )

    def _move_all(self) -> None:
        """The shard count changed: everything of ours goes into segments and a snapshot of the new layout."""
        wal = self._engine.wal
        self._mover.keep_files = True  # until the manifest names the new layout the old one must stay whole
        for topic in self._engine.topics.values():
            if topic.tail_rows:
                self._mover.flush(topic)
                self._mover.wait()
                if topic.rebuilding:
                    self._log_again(topic)
                elif topic.tail_rows:
                    raise DiskFull(f"no space to move the records of {topic.name!r} out of the log")
                self._context.recovering(999)  # counts as a heartbeat
        foreign = [file for file in wal.older if file.header.layout != self._context.layout]
        wal.older = [file for file in wal.older if file not in foreign]  # what was logged again may fill several
        for file in foreign:
            file.last_lsn = 0  # the new layout's frames count from 1
        self._mover.checkpoint()
        self._mover.wait()
        if not self._mover.snapshot_ms:
            raise DiskFull("no space for the snapshot of the new layout, here or in the cold tier")
        for file in foreign:
            self._disk.close(file.fd)

    def _log_again(self, topic: Topic) -> None:
        try:
            self._mover.log_again(topic)
        except ApiError as error:
            if error.code != "storage_full":
                raise
            raise DiskFull(f"no space to log the copies in {topic.name!r} again") from error

    def _clear_up(self, recovered: Recovered) -> None:
        """Files that nothing names: of another layout, or of what did not get to its end."""
        context = self._context
        self._remove_stale(context.layout)
        removed = self._remove_leftovers(recovered, context.settings.data_dir, cold=False)
        if self._cold is not None:
            try:
                with self._cold.opened() as root:
                    removed += self._remove_leftovers(recovered, root, cold=True)
            except ColdTierGone as error:
                recovered.away = str(error)
        if removed:
            context.log.info("removed leftover files", files=removed)

    def _remove_leftovers(self, recovered: Recovered, root: str, *, cold: bool) -> int:
        context = self._context
        return remove_leftovers(recovered, root, cold=cold, shard=context.index, shards=context.shards, disk=self._disk)

    def _remove_unfinished(self, layout: int) -> None:
        """Of a move to this layout that did not get to its end."""
        folder = shard_dir(self._context.settings.data_dir, self._context.index)
        for entry in os.listdir(folder):
            parsed = parse_numbered(entry)
            if parsed is not None and parsed[0] == layout:
                self._disk.unlink(os.path.join(folder, entry))

    def _layout_committed(self) -> None:
        """The manifest names our layout now: what others left is of no use."""
        self._mover.keep_files = False
        self._remove_stale(self._context.layout)

    def _remove_stale(self, layout: int) -> None:
        context = self._context
        remove_stale(context.settings, layout=layout, shard=context.index, shards=context.shards, disk=self._disk)

    # --- serving -------------------------------------------------------------------------------------

    async def serve(self) -> None:
        context, mover, commit = self._context, self._mover, self._engine.commit
        processes = len(context.board.rows())
        idle = Idle(
            context.bell,
            spin_us=spin_us(context.settings.spin_us, processes=processes),
            has_work=self._has_work,
            next_deadline_ns=self._next_deadline_ns,
            row=context.row,
        )
        idle.register(self._syncer.event_fd)
        idle.register(mover.event_fd)
        self._engine.fetcher.on_start = self._engine.large.on_start = idle.register
        relocator = self._relocator
        if relocator is not None:
            idle.register(relocator.event_fd)
        self._maintain_ns = time.monotonic_ns() + MAINTENANCE_NS
        last_work_ns = 0
        while not self._stopping:
            await idle.wait(expecting=time.monotonic_ns() - last_work_ns < 1_000_000, linger=True)
            started = time.monotonic_ns()
            self._govern(started, idle.round_us)
            if self._round(started):
                last_work_ns = started
            now = time.monotonic_ns()
            self._busy_ns += now - started
            if now >= self._maintain_ns:
                period = now - self._maintain_ns + MAINTENANCE_NS
                quiet = self._busy_ns < QUIET_SHARE * period
                self._settled = not mover.step(quiet=quiet) and quiet
                if relocator is not None:
                    self._settled = not relocator.step() and self._settled
                    self._look_ahead()
                if commit.reserved:
                    commit.lower_ceilings(self._engine.clock.now_ms())
                    self._settled = self._settled and not commit.reserved
                to_come = commit.bear_witness(self._engine.clock.now_ms(), covered=mover.snapshot_lsn)
                self._settled = self._settled and not to_come
                self._busy_ns = 0
                self._maintain_ns = now + MAINTENANCE_NS
                self._publish_counters()
                self._log_unreadable()
        self._finish()
        idle.close()

    def _look_ahead(self) -> None:
        """Before caps and TTL cut into what is in the cold tier."""
        assert self._relocator is not None
        for topic in self._relocator.tiered:
            self._engine.fetcher.look_ahead(topic)

    def _has_work(self) -> bool:
        late = self._intake.is_late
        return late or any([link.has_work() for link in self._links.values()]) or self._engine.tails.can_push()

    def _next_deadline_ns(self) -> int | None:
        maintain_ns = None if self._settled else self._maintain_ns
        wanted = (self._engine.next_deadline_ns, maintain_ns, self._governor.next_tick_ns)
        return min([due for due in wanted if due is not None], default=None)

    def _govern(self, now_ns: int, round_us: int) -> None:
        governor = self._governor
        governor.round(max(round_us, self._intake.late_us(now_ns)))
        if not governor.due(now_ns):
            return
        for link in self._links.values():
            governor.ring(link.reader.waiting, link.reader.capacity)
        changed = governor.tick(now_ns)
        if not changed and governor.level is Level.CALM:
            return
        engine, words = self._engine, self._context.row.words
        engine.tails.coalescing = governor.level >= Level.COALESCE
        engine.commit.window_ns = _WINDOW_NS if governor.level >= Level.WIDEN else 0
        engine.tails.deferring = governor.level >= Level.DEFER
        words[Word.THROTTLE_MS] = governor.retry_after_ms
        words[Word.PRESSURE] = governor.level
        if governor.has_news(now_ns):
            log = self._context.log.warning if governor.level is Level.REFUSE else self._context.log.info
            log("pressure", step=governor.level.name.lower(), pressure=round(governor.pressure, 2))

    def _round(self, now_ns: int) -> bool:
        engine = self._engine
        commit = engine.commit
        engine.begin_round(now_ns)
        handled = self._intake.take(self._links, now_ns)
        changed = engine.large.busy
        if changed:
            engine.large.collect()
        commit.write()
        changed = changed or handled > 0
        if self._syncer.busy and (outcome := self._syncer.take()) is not None:
            commit.synced(outcome)
            changed = True
        if self._mover.busy:
            self._mover.take()
        if engine.fetcher.busy:
            engine.fetcher.take()
        if self._relocator is not None and self._relocator.busy:
            self._relocator.take()
            self._settled = False
        if commit.sync_due_ns is not None and now_ns >= commit.sync_due_ns and not self._syncer.busy:
            commit.sync_now()
        engine.polls.end_due(engine.refresh)
        if handled:
            self._settled = False
        # Before the answers go out: other shards read these for the limits of the whole instance, and a client that
        # has its answer finds in the metrics what it says.
        engine.publish_totals()
        words = self._context.row.words
        words[Word.DERIVING] = len(engine.pipes.rebuilding)
        if changed:
            self._publish_contents()
        for link in self._links.values():
            link.flush()
        if engine.tails.push(now_ns):  # behind the answers: nobody waits for them
            for link in self._links.values():
                link.flush()
        return handled > 0

    def _finish(self) -> None:
        """Everything in the rings is answered, everything written is synced, and the snapshot is clean if the disk has
        room for routers' copies."""
        until_ns = time.monotonic_ns() + _LAST_WORDS_NS
        self._round(time.monotonic_ns())
        while self._is_asked() and time.monotonic_ns() < until_ns:
            self._round(time.monotonic_ns())
        self._engine.large.wait()
        self._engine.commit.write()
        self._engine.polls.end(self._engine.refresh)
        self._engine.fetcher.wait()
        self._mover.wait()
        self._answer_synced()
        self._mover.flush_copies()
        self._answer_synced()  # what waited for copies
        until_ns = time.monotonic_ns() + _LAST_WORDS_NS
        while any([link.writer.outbox_bytes for link in self._links.values()]) and time.monotonic_ns() < until_ns:
            time.sleep(0.001)  # the rings are full: whoever asked for so much takes it
            for link in self._links.values():
                link.flush()
        self._mover.finish()
        self._syncer.close()
        self._mover.close()
        self._engine.fetcher.close()
        self._engine.large.close()
        if self._relocator is not None:
            self._relocator.close()
        self._context.log.info("stopped", lsn=self._engine.wal.written_lsn)

    def _is_asked(self) -> bool:
        return self._intake.is_late or any([not link.reader.empty() for link in self._links.values()])

    def _answer_synced(self) -> None:
        while self._syncer.busy or self._engine.wal.synced_lsn < self._engine.wal.written_lsn:
            if not self._syncer.busy:
                self._engine.commit.sync_now()
            self._engine.commit.synced(self._syncer.wait())
        for link in self._links.values():
            link.flush()

    # --- callbacks -----------------------------------------------------------------------------------

    def _link_up(self, peer: str, link: Link) -> None:
        # Another dict, because a round may be under way. The coordinator's comes first: it has to know of a change
        # before the client that made it does.
        others = {name: known for name, known in self._links.items() if name != peer}
        if (before := self._links.get(peer)) is not None:
            self._intake.forget(before)
        self._links = {peer: link, **others} if peer == "queue" else {**others, peer: link}

    def _link_down(self, peer: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            if peer == "queue":
                self._empty(link)
            self._intake.forget(link)
            self._links = {name: other for name, other in self._links.items() if name != peer}
            self._engine.caller_gone(link.writer)

    def _empty(self, link: Link) -> None:
        """The coordinator does not wake us for every lease that it gives out: its last words are in the ring."""
        try:
            self._intake.empty(link)
        except RingPoisoned as error:
            self._context.log.warning("ring poisoned", peer=link.peer, reason=str(error))

    def _stop(self) -> None:
        self._stopping = True
        self._context.bell.ring_always()

    def _fault(self, error: Exception, reply_to: object, correlation: int) -> None:
        peer = next((name for name, link in self._links.items() if link.writer is reply_to), "?")
        id = self._context.id_of(peer, correlation)
        self._context.log.error("request failed", id=id, reason=str(error))

    def _log_unreadable(self) -> None:
        unreadable = self._engine.totals.unreadable
        for topic, reason in unreadable:
            self._context.log.error("batch unreadable", topic=topic, reason=reason)
        unreadable.clear()

    def beat(self) -> None:
        """Also while nobody writes: what the disk watch shows is of now."""
        self._engine.space.look(time.monotonic_ns())
        self._publish_space()
        if self._relocator is not None:
            self._relocator.look()

    def _publish_space(self) -> None:
        words = self._context.row.words
        words[Word.WAL_READ_ONLY] = int(self._engine.commit.read_only or self._engine.space.low)
        words[Word.DISK_FREE] = self._engine.space.free

    def _count_sync(self, took_us: int) -> None:
        self._governor.sync(took_us)
        words = self._context.row.words
        words[Word.WAL_FSYNCS] += 1
        words[Word.WAL_SYNC_US_SUM] += took_us
        words[Word.SYNC_BUCKETS + sync_bucket(took_us)] += 1

    def _other_shards(self) -> list[Row]:
        context = self._context
        return [context.board.row(f"shard-{shard}") for shard in range(context.shards) if shard != context.index]

    def _publish_contents(self) -> None:
        """What requests change: fifteen stores in a round that had some."""
        engine, words, before = self._engine, self._context.row.words, self._before
        totals, wal, by_class = engine.totals, engine.wal, engine.kinds.by_class
        words[Word.TOPICS] = engine.topic_count
        words[Word.TOPICS_EPHEMERAL] = by_class["ephemeral"]
        words[Word.TOPICS_MEMORY] = by_class["memory"]
        words[Word.TOPICS_DISK] = by_class["disk"]
        words[Word.TOPICS_FSYNC] = by_class["fsync"]
        words[Word.QUEUE_TOPICS] = engine.kinds.queues
        words[Word.RECORDS_LIVE] = totals.records
        words[Word.BYTES_LIVE] = totals.bytes
        words[Word.RECORDS_EVICTED] = before[Word.RECORDS_EVICTED] + totals.evicted
        words[Word.RECORDS_EXPIRED] = before[Word.RECORDS_EXPIRED] + totals.expired
        words[Word.WAL_FRAMES] = before[Word.WAL_FRAMES] + wal.frames
        words[Word.WAL_BATCHES] = before[Word.WAL_BATCHES] + wal.batches
        words[Word.WAL_BYTES] = before[Word.WAL_BYTES] + wal.bytes_written
        words[Word.SESSIONS] = engine.sessions.sessions
        words[Word.STREAMS] = engine.sessions.streams

    def _publish_counters(self) -> None:
        engine, wal = self._engine, self._engine.wal
        words = self._context.row.words
        self._publish_contents()
        words[Word.RECORDS_ADDED] = engine.totals.added
        if self._relocator is not None:
            words[Word.COLD_SEGMENTS], words[Word.COLD_BYTES] = self._relocator.held()
            words[Word.COLD_GONE] = self._relocator.gone
            words[Word.COLD_FETCHES] = engine.fetcher.fetches
        words[Word.WAL_LSN] = wal.written_lsn
        words[Word.WAL_BACKLOG] = wal.backlog_bytes
        words[Word.SNAPSHOT_MS] = self._mover.snapshot_ms
        words[Word.REQUESTS] = engine.requests
        words[Word.DERIVING] = len(engine.pipes.rebuilding)
        words[Word.FEEDS] = len(engine.tails)
        words[Word.PUSHES] = engine.tails.pushes
        words[Word.WAL_ROTATIONS] = self._before[Word.WAL_ROTATIONS] + wal.rotations
        self._publish_space()
        engine.publish_totals()
