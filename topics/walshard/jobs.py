"""A queue's topic as the coordinator sees it: jobs to hand out, jobs that are done, and the leases log beside it.

The coordinator decides who gets what; here is what exists. Rules:

- jobs are read when they are handed out, so what somebody deleted is never given to anyone.
- jobs in the cold tier are passed over while its disk is away, and stay free or fresh: those behind them go out. Every
  answer says where such jobs are. If there are no others they are fetched all the same, and the answer says why they
  can't be.
- an ack is a delete: written before it takes effect, answered when it is as durable as the topic's class promises.
  Its event is written before it, in the same write: a delete that survived a crash has its event too.
- `removals` counts what left the topic otherwise. The coordinator compares it and asks which, if it has changed; a
  restart changes it too.
- the leases log is a topic of this shard under a name no client can use (storage/leases.py), dropped before its queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import (
    ApiError,
    CorruptData,
    DiskFull,
    Unreachable,
    being_rebuilt,
    not_a_queue,
    topic_not_found,
    unreadable,
)
from topics.storage.config import TopicConfig
from topics.storage.control import DeleteFrame, encode_delete
from topics.storage.format import FrameType, frame_bytes
from topics.storage.leases import CHECKPOINT_TAG, is_log_name, log_id, log_name
from topics.walshard.log.commit import Commit, ReplyTo
from topics.walshard.tiering.fetcher import Away, need_sizes, window
from topics.walshard.topic import retention
from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.index import Row
from topics.walshard.topic.reads import seqs_with_tag
from topics.walshard.topic.render import Rendered, render
from topics.walshard.topic.topic import Topic, Totals

_RENDERED_BYTES = 8 * limits.MIB  # batches that are being handed out job by job
_encode = msgspec.msgpack.Encoder().encode


def last_checkpoint(log: Topic) -> int:
    """Where readers of a leases log begin."""
    found = seqs_with_tag(log, CHECKPOINT_TAG, prefix=False, below=log.head_seq + 1)
    return max(found, default=log.earliest_seq)


def removals(topic: Topic) -> int:
    return topic.deleted_total + topic.evicted_total + topic.expired_total - topic.completed


def missed_stretches(topic: Topic) -> list[tuple[int, int]]:
    """Where its jobs are out of reach: first and last seqs of segments whose disk is away."""
    stretches: list[tuple[int, int]] = []
    joins = False
    for segment in topic.segments:
        missed = segment.cold and segment.is_missed
        if missed and joins:
            stretches[-1] = (stretches[-1][0], segment.last_seq)
        elif missed:
            stretches.append((segment.first_seq, segment.last_seq))
        joins = missed
    return stretches


class _Found:
    """For one request for jobs."""

    __slots__ = ("budget", "missed", "pieces", "seqs", "stays", "why")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # bytes that are left
        self.seqs: list[int] = []
        self.pieces: list[bytes] = []
        self.missed: Row | None = None  # the first whose disk is away
        self.why = ""  # it could not be fetched
        self.stays: int | None = None  # where the cursor stays: before the first fresh job that is missed


class _Nobody:
    def send_always(self, message: bytes) -> None:
        """Nobody waits for this answer."""


class Jobs:
    def __init__(
        self,
        *,
        topics: dict[str, Topic],
        totals: Totals,
        commit: Commit,
        cache: BatchCache,
        refresh: Callable[[Topic], None],
        now_ms: Callable[[], int],
        history_bytes: int,
    ) -> None:
        self._topics = topics
        self._totals = totals
        self._commit = commit
        self._cache = cache
        self._refresh = refresh
        self._now_ms = now_ms
        self._history_bytes = history_bytes
        self._watched: dict[int, tuple[ReplyTo, int]] = {}  # by topic id: who is told of changes, and its correlation
        self._told: dict[int, int] = {}  # by topic id: the removals it was told of last
        self._rendered: OrderedDict[int, tuple[Row, Rendered]] = OrderedDict()
        self._rendered_bytes = 0
        self.logs = sum(map(is_log_name, topics))  # leases logs among the topics
        self.handlers: dict[int, Callable[[Any, Any, int], bytes | None]] = {
            Op.OPEN_QUEUE: self._open,
            Op.LIST_QUEUES: self._list,
            Op.TAKE_JOBS: self._take,
            Op.CHECK_JOBS: self._check,
        }

    # --- what the coordinator has to know ---

    def _open(self, request: messages.OpenQueue, reply_to: ReplyTo, correlation: int) -> bytes | None:
        topic = self._topics.get(request.topic)
        if topic is None:
            raise topic_not_found(request.topic)
        if topic.config.type != "queue":
            raise not_a_queue(topic.name)
        if topic.rebuilding:
            raise being_rebuilt(topic.name)
        self._refresh(topic)
        log = self._topics.get(log_name(topic.name))

        def answer(fsync_us: int) -> bytes:
            if topic.dropped:
                return messages.pack_failure(Op.OPEN_QUEUE, correlation, topic_not_found(topic.name))
            log_from = log_head = 0
            if log is not None:
                log_from, log_head = last_checkpoint(log) - 1, log.head_seq
            # Changes are told from here on: one that came before its answer would be taken for that.
            self._watched[topic.id] = (reply_to, correlation)
            self._told[topic.id] = removals(topic)
            opened = messages.QueueOpened(
                topic.id, topic.config, topic.count + topic.completing, removals(topic), log_from, log_head
            )
            return messages.pack(Op.OPEN_QUEUE, correlation, opened)

        def synced(fsync_us: int) -> bytes:
            try:
                return answer(fsync_us)
            except (CorruptData, Unreachable, OSError) as error:  # of this queue alone; nobody else would catch it here
                self._totals.unreadable.append((topic.name, str(error)))
                return messages.pack_failure(Op.OPEN_QUEUE, correlation, unreadable(error))

        if log is not None and log.pending:
            self._commit.wait_for_sync(reply_to, synced)  # some of it can't be read before
            return None
        return answer(0)

    def _list(self, request: messages.ListQueues, reply_to: ReplyTo, correlation: int) -> bytes:
        names = [name for name, topic in self._topics.items() if topic.config.type == "queue"]
        listed = messages.QueuesListed([name for name in names if log_name(name) in self._topics])
        return messages.pack(Op.LIST_QUEUES, correlation, listed)

    def configured(self, topic: Topic) -> None:
        if (watcher := self._watched.get(topic.id)) is not None:
            reply_to, correlation = watcher
            changed = messages.QueueChanged(topic.config)
            reply_to.send_always(messages.pack(Op.QUEUE_CHANGED, correlation, changed))

    def look(self, topic: Topic) -> None:
        """Records may have gone otherwise than by an ack: then a connection that held one may have another."""
        if (watcher := self._watched.get(topic.id)) is not None and self._told[topic.id] != (now := removals(topic)):
            self._told[topic.id] = now
            reply_to, correlation = watcher
            reply_to.send_always(messages.pack(Op.JOBS_REMOVED, correlation, messages.JobsRemoved(now)))

    def topic_dropped(self, topic: Topic) -> None:
        self._told.pop(topic.id, None)
        if (watcher := self._watched.pop(topic.id, None)) is not None:
            reply_to, correlation = watcher
            reply_to.send_always(messages.pack(Op.TOPIC_GONE, correlation, messages.TopicGone(topic.head_seq)))

    def caller_gone(self, reply_to: Any) -> None:
        self._watched = {id: watcher for id, watcher in self._watched.items() if watcher[0] is not reply_to}

    def _queue(self, name: str, topic_id: int) -> Topic:
        topic = self._topics.get(name)
        if topic is None or topic.id != topic_id:
            raise topic_not_found(name)
        if topic.rebuilding:
            raise being_rebuilt(name)
        self._refresh(topic)
        return topic

    # --- handing out ---

    def _take(self, request: messages.TakeJobs, reply_to: ReplyTo, correlation: int) -> bytes:
        topic = self._queue(request.topic, request.topic_id)
        topic.last_read_ts = self._now_ms()
        found = _Found(request.max_bytes)
        pieces, seqs = found.pieces, found.seqs
        gone: list[int] = []
        for seq in request.wanted:
            row = topic.rows.find(seq)
            if row is None or not row.live or not row.is_live(seq - row.first):
                gone.append(seq)
            elif found.budget > 0:
                if self._away(row):
                    if row.source.is_missed:
                        found.missed = found.missed or row
                        continue
                    if pieces:
                        found.budget = 0
                        continue
                    raise self._wanted(topic, request)
                piece = self._piece_or_why(row, seq - row.first, found)
                if piece is None:
                    continue
                if len(piece) > found.budget and pieces:
                    found.budget = 0
                    continue
                found.budget -= len(piece)
                pieces.append(piece)
                seqs.append(seq)
        wanted = len(seqs)
        at, end = request.after, False
        room = request.limit - wanted
        if request.fresh is not None:
            room = min(room, request.fresh + len(gone))
        if room > 0 and found.budget > 0:
            at, end = self._take_fresh(topic, request, room, found)
        if found.missed is not None and not (pieces or gone or found.why):
            raise Away([found.missed])  # it may have come back
        taken = messages.JobsTaken(
            seqs=seqs,
            ends=list(accumulate([len(piece) + 1 for piece in pieces])),
            wanted=wanted,
            gone=gone,
            at=at if found.stays is None else found.stays,
            end=end,
            live=topic.count + topic.completing,
            removals=removals(topic),
            missed=missed_stretches(topic),
            beyond=0 if found.stays is None else at,
            why="" if pieces or gone else found.why,
        )
        return messages.pack(Op.TAKE_JOBS, correlation, taken, b",".join(pieces))

    def _take_fresh(self, topic: Topic, request: messages.TakeJobs, room: int, found: _Found) -> tuple[int, bool]:
        """Jobs behind the cursor; what was looked at, and whether nothing is left behind it. Before the first job that
        is missed the cursor stays."""
        at = request.after
        held = frozenset(request.held)
        pieces = found.pieces
        for row in topic.rows.since(topic.rows.position(at + 1)):
            if not row.live:
                continue
            for index in row.live_indexes(max(0, at + 1 - row.first)):
                seq = row.first + index
                if seq in held:
                    at = seq
                    continue
                if room <= 0 or found.budget <= 0:
                    return at, False
                piece = None
                if not self._away(row):
                    piece = self._piece_or_why(row, index, found)
                elif row.source.is_missed:
                    found.missed = found.missed or row
                elif pieces:
                    return at, False
                else:
                    raise window(topic, self._cache, first=row, records=room, size=found.budget)
                if piece is None:
                    found.stays = at if found.stays is None else found.stays
                    break
                if len(piece) > found.budget and pieces:
                    return at, False
                pieces.append(piece)
                found.seqs.append(seq)
                room -= 1
                found.budget -= len(piece)
                at = seq
            at = max(at, row.last)
        return max(at, topic.head_seq), True

    def _piece_or_why(self, row: Row, index: int, found: _Found) -> bytes | None:
        """None: it could not be fetched just now, because its disk is away."""
        try:
            return self._piece(row, index)
        except Unreachable as error:
            if not row.source.is_missed:
                raise
            found.missed = found.missed or row
            found.why = str(error)
            return None

    def _wanted(self, topic: Topic, request: messages.TakeJobs) -> Away:
        """What is away of the jobs that are asked for by seq."""
        rows: dict[Row, None] = {}
        size = 0
        for seq in request.wanted:
            row = topic.rows.find(seq)
            if row is not None and row.live and self._away(row) and row not in rows:
                if rows and size + row.length > limits.FETCH_BYTES:
                    break
                rows[row] = None
                size += row.length
        return Away(list(rows))

    def _away(self, row: Row) -> bool:
        return row.body is None and id(row) not in self._rendered and self._cache.away(row)

    def _piece(self, row: Row, index: int) -> bytes:
        """One job as JSON. A batch is rendered once and kept while its jobs go out: acks don't change it."""
        known = self._rendered.get(id(row))
        if known is not None and known[0] is row:
            rendered = known[1]
        else:
            rendered = Rendered(render(row, self._cache.body(row), include_tags=True, include_meta=True))
            if row.count > 1:
                self._keep(row, rendered)
        return rendered.slice(index, index + 1)

    def _keep(self, row: Row, rendered: Rendered) -> None:
        kept = self._rendered
        if (old := kept.pop(id(row), None)) is not None:
            self._rendered_bytes -= old[1].weight
        kept[id(row)] = (row, rendered)
        self._rendered_bytes += rendered.weight
        while self._rendered_bytes > _RENDERED_BYTES and len(kept) > 1:
            _, (_, oldest) = kept.popitem(last=False)
            self._rendered_bytes -= oldest.weight

    def _check(self, request: messages.CheckJobs, reply_to: ReplyTo, correlation: int) -> bytes:
        topic = self._queue(request.topic, request.topic_id)
        gone = [seq for seq in request.seqs if not topic.is_live(seq)]
        return messages.pack(
            Op.CHECK_JOBS, correlation, messages.JobsChecked(gone, topic.count + topic.completing, removals(topic))
        )

    # --- done ---

    def complete(
        self, request: messages.CompleteJobs, body: bytes, reply_to: ReplyTo, correlation: int
    ) -> bytes | None:
        """Delete jobs that were acked or moved away. One write for the events and the delete."""
        topic = self._queue(request.topic, request.topic_id)
        seqs = sorted(seq for seq in request.seqs if topic.is_live(seq))
        need_sizes(topic.rows_cut_by(seqs), self._cache)  # they stay: more of the same batches will follow
        commit = self._commit
        commit.write()
        frame = b""
        if seqs and topic.logged:
            frame = encode_delete(DeleteFrame(None, seqs, topic.cap_seq, topic.ttl_seq, trims=topic.untold))
        delete_bytes = frame_bytes(key_len=0, body_len=len(frame))
        try:
            commit.make_room(delete_bytes + frame_bytes(key_len=0, body_len=len(body)) + limits.CONTROL_BYTES)
            if request.events:
                self._stage_events(topic, request.durable, request.events, request.size, body)
        except DiskFull:
            commit.make_room(delete_bytes, reserve=True)  # the delete matters more than its history
        if frame:
            commit.wal.stage(FrameType.DELETE, topic_id=topic.id, ts=self._now_ms(), body=frame)
            commit.told_trims(topic)
        if not commit.write():
            raise commit.failure
        deleted = topic.delete_seqs(seqs)
        topic.completed += deleted

        def answer(fsync_us: int) -> bytes:
            completed = messages.JobsCompleted(topic.count + topic.completing, removals(topic), fsync_us)
            return messages.pack(Op.COMPLETE_JOBS, correlation, completed)

        def synced(fsync_us: int) -> bytes:
            topic.completing -= deleted
            return answer(fsync_us)

        if topic.needs_sync and deleted:
            topic.completing += deleted
            commit.wait_for_sync(reply_to, synced)
            return None
        commit.request_sync()
        return answer(0)

    # --- the leases log ---

    def log(self, request: messages.LogLeases, body: bytes, reply_to: ReplyTo, correlation: int) -> None:
        """Goes out with the round's write. Without events: answered when everything before it is synced."""
        topic = self._queue(request.topic, request.topic_id)
        if not request.events:
            self._commit.write()
            self._commit.wait_for_sync(
                reply_to, lambda fsync_us: messages.pack_appended(correlation, 0, 0, 0, False, False, 0, fsync_us)
            )
            return
        if request.checkpoint:
            self._trim(topic)
        answer_to = reply_to if correlation else _Nobody()
        self._stage_events(topic, request.durable, request.events, request.size, body, answer_to, correlation)

    def _stage_events(
        self,
        topic: Topic,
        durable: bool,
        events: int,
        size: int,
        body: bytes,
        reply_to: ReplyTo | None = None,
        correlation: int = 0,
    ) -> None:
        now = self._now_ms()
        name = log_name(topic.name)
        log = self._topics.get(name)
        created = log is None
        config = TopicConfig(durability="fsync" if durable else "memory", durable=durable)
        if log is None:
            log = self._topics[name] = Topic(
                id=log_id(topic.id),
                name=name,
                config=config,
                created_ms=now,
                ceiling=limits.SEQ_RESERVE,
                totals=self._totals.internal,
            )
            self.logs += 1
        elif log.config != config:
            self._commit.make_room(limits.CONTROL_BYTES)
            log.config = config
            self._commit.stage_topic(log, now)
        try:
            self._commit.stage_batch(
                log,
                messages.Append(name, events, size),
                body,
                created=created,
                ts=max(now, log.last_ts),
                reply_to=reply_to or _Nobody(),
                correlation=correlation,
                requests=1,
            )
        except (ApiError, DiskFull, OSError):
            if created:
                self.forget_log(log)
            raise

    def forget_log(self, log: Topic) -> None:
        """It is gone, or never was: its first write failed."""
        if self._topics.get(log.name) is log:
            del self._topics[log.name]
            self.logs -= 1

    def log_of(self, topic: Topic) -> Topic | None:
        return self._topics.get(log_name(topic.name)) if topic.config.type == "queue" else None

    def _trim(self, topic: Topic) -> None:
        """History has its bound. What follows the checkpoint before the one that comes now stays: that one may not
        survive a crash."""
        log = self.log_of(topic)
        if log is None or log.bytes <= self._history_bytes:
            return
        checkpoint = last_checkpoint(log)
        last = 0
        kept = log.bytes
        for row in log.rows:
            if kept <= self._history_bytes or row.last >= checkpoint:
                break
            kept -= row.size
            last = row.last
        if last:
            retention.raise_floor(log, cap_seq=last, ttl_seq=0)
            log.touched()
