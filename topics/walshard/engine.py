"""The shard's commands: what each request does to topics, and when it is answered.

One drain of the rings is one write: appends are staged (log/commit.py), everything else first writes what is staged, so
the requests of one link take effect in order. Deletes and control frames are written before they take effect in memory,
and answered when they are as durable as the topic's class promises; control commands are always synced. No IO of its
own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from topics.actors import messages
from topics.actors.clock import Clock
from topics.actors.messages import Op
from topics.errors import (
    ApiError,
    CorruptData,
    DiskFull,
    Unreachable,
    being_rebuilt,
    lacks_scopes,
    topic_not_found,
    unreadable,
)
from topics.settings import Settings
from topics.storage import columns
from topics.storage.config import TopicConfig
from topics.storage.control import DeleteFrame, encode_delete
from topics.storage.format import RECORD_OVERHEAD, FrameType, frame_bytes
from topics.walshard.catalogue import Catalogue
from topics.walshard.forwards.copies import CopyMemory
from topics.walshard.forwards.pipes import Pipes
from topics.walshard.jobs import Jobs
from topics.walshard.live.followers import Tails
from topics.walshard.live.long_polls import LongPolls
from topics.walshard.log.commit import Commit, ReplyTo, write_failed
from topics.walshard.log.disk_space import FreeSpace
from topics.walshard.log.large_appends import LargeAppends
from topics.walshard.log.placing import Placing
from topics.walshard.log.syncer import Syncer
from topics.walshard.log.wal import Wal
from topics.walshard.quota import Quota
from topics.walshard.sessions import Sessions
from topics.walshard.tiering.fetcher import Away, Fetcher, need_sizes
from topics.walshard.topic import reads, retention
from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.idempotency import Remembered
from topics.walshard.topic.topic import Topic, Totals

_PLAIN = int(Op.APPEND_PLAIN)
_APPEND = int(Op.APPEND)
_FORWARD = int(Op.FORWARD)
_COMPLETE = int(Op.COMPLETE_JOBS)
_LOG = int(Op.LOG_LEASES)


class Engine:
    def __init__(
        self,
        *,
        settings: Settings,
        topics: dict[str, Topic],
        totals: Totals,
        wal: Wal,
        syncer: Syncer,
        clock: Clock,
        quota: Quota | None = None,
        space: FreeSpace | None = None,
        copies: CopyMemory | None = None,
        restarted: bool = False,
        entropy: Callable[[], int] = lambda: int.from_bytes(os.urandom(8), "little"),
    ) -> None:
        self.settings = settings
        self.topics = topics
        self.totals = totals
        self.wal = wal
        self.clock = clock
        self.cache = BatchCache(most_bytes=settings.cache_bytes)
        self.commit = Commit(
            wal=wal,
            syncer=syncer,
            cache=self.cache,
            disk_sync_ms=settings.disk_sync_ms,
            forget_topic=lambda topic: self.catalogue.forget(topic),
        )
        self.fetcher = Fetcher(self.cache)
        self.polls = LongPolls(self.cache)
        self.tails = Tails(
            topics=topics, cache=self.cache, fetcher=self.fetcher, refresh=self.refresh, now_ms=clock.now_ms
        )
        self.sessions = Sessions(settings, restarted=restarted)
        self.copies = CopyMemory() if copies is None else copies
        self.pipes = Pipes(
            topics=topics,
            commit=self.commit,
            cache=self.cache,
            copies=self.copies,
            refresh=self.refresh,
            now_ms=clock.now_ms,
            check_room=self._check_room,
            filled=self.tails.filled,
        )
        self.jobs = Jobs(
            topics=topics,
            totals=totals,
            commit=self.commit,
            cache=self.cache,
            refresh=self.refresh,
            now_ms=clock.now_ms,
            history_bytes=settings.lease_history_bytes,
        )
        self.catalogue = Catalogue(
            topics=topics,
            totals=totals,
            commit=self.commit,
            jobs=self.jobs,
            refresh=self.refresh,
            now_ms=clock.now_ms,
            check_room=self._check_room_for_topic,
            dropped=self._dropped,
            entropy=entropy,
        )
        self.large = LargeAppends(
            topics=topics, commit=self.commit, append=self._take_large, is_late=lambda due: 0 < due < self._round_ms
        )
        self.kinds = self.catalogue.kinds
        self.listing = self.catalogue.listing
        self.commit.on_publish = self._published
        self.commit.watch_ceilings(topics.values(), clock.now_ms())
        self.dropped: list[Topic] = []  # their files are the mover's to remove
        self.requests = 0
        self._round_ms = 0
        self.quota = quota or Quota(settings)
        self.space = space or FreeSpace(settings.data_dir, mark=0)
        self.on_fault: Callable[[Exception, Any, int], None] = lambda error, reply_to, correlation: None
        self._handlers: dict[int, Callable[[Any, ReplyTo, int], bytes | None]] = {
            Op.DIFF: self._diff,
            Op.DELETE_RECORDS: self._delete_records,
            **self.catalogue.handlers,
            **self.tails.handlers,
            **self.sessions.handlers,
            **self.pipes.handlers,
            **self.jobs.handlers,
        }

    def handle(self, message: bytes, reply_to: ReplyTo) -> None:
        """Take one request; it is answered now, with the next write, or after a sync."""
        op = message[0]
        if op == _PLAIN:
            correlation, deadline_ms, request, body, counts = messages.unpack_plain(message)
            if deadline_ms >= self._round_ms:
                self._plain(request, body, counts, reply_to, correlation)
            return
        _, _, correlation, deadline_ms, head, body = messages.unpack(message)
        if op == Op.CANCEL:
            self.polls.cancel(reply_to, correlation)
            self.fetcher.forget(reply_to, correlation)
            return
        if op == Op.END_POLL:
            self.polls.end(self.refresh, reply_to, correlation)
            return
        if deadline_ms and deadline_ms < self._round_ms:
            return
        self.requests += 1
        request = messages.decode_request(op, head)
        try:
            if op == _APPEND:
                answer = self._append(request, body, reply_to, correlation, 1)
            elif op == _FORWARD:
                answer = self.pipes.forward(request, body, reply_to, correlation)
            elif op == _COMPLETE:
                answer = self.jobs.complete(request, body, reply_to, correlation)
            elif op == _LOG:
                self.jobs.log(request, body, reply_to, correlation)
                return
            else:
                self.commit.write()
                answer = self._handlers[op](request, reply_to, correlation)
        except Away as away:  # nothing has changed yet: once more, when it is here
            self.requests -= 1
            again = partial(self.handle, message, reply_to)
            self.fetcher.fetch(away, again, asked_by=reply_to, correlation=correlation)
            return
        except (ApiError, CorruptData, DiskFull, Unreachable, OSError) as error:
            if not isinstance(error, ApiError):
                self.on_fault(error, reply_to, correlation)
            answer = messages.pack_failure(op, correlation, _as_api_error(error))
        if answer is not None:
            reply_to.send_always(answer)

    def take_long(self, message: bytearray, reply_to: ReplyTo) -> None:
        self.large.take(message, reply_to)

    def begin_round(self, now_ns: int) -> None:
        """One look at the clock for all requests of a drain."""
        self._round_ms = now_ns // 1_000_000
        self.space.look(now_ns)

    def _published(self, topic: Topic) -> None:
        self.polls.wake(topic)
        self.tails.published(topic)
        self.jobs.look(topic)

    def _dropped(self, topic: Topic) -> None:
        self.dropped.append(topic)
        self.polls.topic_dropped(topic)
        self.tails.topic_dropped(topic)
        self.pipes.topic_dropped(topic)
        self.jobs.topic_dropped(topic)

    def caller_gone(self, reply_to: Any) -> None:
        """A link went down: nobody waits at its other end."""
        self.polls.cancel(reply_to)
        self.fetcher.forget(reply_to)
        self.large.caller_gone(reply_to)
        self.tails.follower_gone(reply_to)
        self.sessions.gateway_gone(reply_to)
        self.jobs.caller_gone(reply_to)

    def refresh(self, topic: Topic) -> None:
        """Bring what depends on time up to date before a topic is looked at."""
        if not topic.rebuilding:
            retention.expire(topic, now_ms=self.clock.now_ms())

    # --- append --------------------------------------------------------------------------------------

    def _plain(
        self,
        request: messages.Append,
        body: bytes,
        counts: tuple[int, ...] | None,
        reply_to: ReplyTo,
        correlation: int,
        placing: Placing | None = None,
    ) -> None:
        """One or several appends without options. Several are one batch, unless each must be judged by itself."""
        requests = 1 if counts is None else len(counts)
        self.requests += requests
        if counts is not None:
            topic = self.topics.get(request.topic)
            if topic is None or topic.config.discard == "reject" or self.settings.max_total_bytes:
                self.requests -= requests
                for at, (one, batch) in enumerate(_apart(request, body, counts)):
                    self._plain(one, batch, None, reply_to, correlation + at)
                return
        try:
            answer = self._append(request, body, reply_to, correlation, requests, placing)
            if answer is not None:
                reply_to.send_always(answer)
        except (ApiError, CorruptData, DiskFull, Unreachable, OSError) as error:
            if not isinstance(error, ApiError):
                self.on_fault(error, reply_to, correlation)
            for each in range(correlation, correlation + requests):
                reply_to.send_always(messages.pack_failure(_APPEND, each, _as_api_error(error)))

    def _take_large(
        self, request: messages.Append, body: bytes, reply_to: ReplyTo, correlation: int, placing: Placing | None
    ) -> None:
        self._plain(request, body, None, reply_to, correlation, placing)

    def _append(
        self,
        request: messages.Append,
        body: bytes,
        reply_to: ReplyTo,
        correlation: int,
        requests: int,
        placing: Placing | None = None,
    ) -> bytes | None:
        """With `placing` the body is in a file already."""
        now = self.clock.now_ms()
        topic = self.topics.get(request.topic)
        created = topic is None
        if topic is None:
            topic = self._new_topic(request, now)
        else:
            config = topic.config
            if topic.pipe is not None and topic.rebuilding:
                raise being_rebuilt(topic.name)
            if request.key is not None:
                topic.keys.expire(now_ms=now, window_ms=config.idempotency_window_ms)
                found = topic.keys.find(request.key, now_ms=now, window_ms=config.idempotency_window_ms)
                if found is not None:
                    return self._deduplicated(topic, request.key, found, reply_to, correlation)
            if self.space.low:
                self.space.check()
            if self.settings.max_total_bytes:
                self._check_quota(new_topic=False, size=request.size)
            if config.discard == "reject":
                self._refuse_overflow(topic, records=request.count, size=request.size, now=now)
        ts = now if now > topic.last_ts else topic.last_ts
        first = topic.next_seq
        try:
            if placing is not None:
                self.commit.stage_placed(
                    topic, request, placing, created=created, ts=ts, reply_to=reply_to, correlation=correlation
                )
                return self._remember(topic, request, first, ts)
            self.commit.stage_batch(
                topic,
                request,
                body,
                created=created,
                ts=ts,
                reply_to=reply_to,
                correlation=correlation,
                requests=requests,
            )
        except (ApiError, DiskFull, OSError):
            if created:
                self.catalogue.forget(topic)
            raise
        return None if request.key is None else self._remember(topic, request, first, ts)

    @staticmethod
    def _remember(topic: Topic, request: messages.Append, first: int, ts: int) -> None:
        if request.key is not None:
            topic.keys.remember(request.key, Remembered(first, request.count, ts))
            topic.touched()

    def _deduplicated(
        self, topic: Topic, key: str, found: Remembered, reply_to: ReplyTo, correlation: int
    ) -> bytes | None:
        """Answer a retry with what the first write got, but not before that one is as durable as promised."""
        last = found.first_seq + found.records - 1

        def answer(fsync_us: int) -> bytes:
            head = max(topic.head_seq, last)
            return messages.pack_appended(correlation, found.first_seq, found.records, head, False, True, 0, fsync_us)

        self.commit.write()
        if key not in topic.keys:
            raise self.commit.failure  # the first write was in this very commit, and it failed
        if last > topic.head_seq:
            self.commit.wait_for_sync(reply_to, answer)
            return None
        return answer(0)

    def _check_room(self, topic: Topic, records: int, size: int) -> None:
        """Before copies are taken in: they obey the topic's caps and the instance's quota like anything else."""
        if not topic.rebuilding:  # those that are made again have their room already
            self.space.check()
            if self.settings.max_total_bytes:
                self._check_quota(new_topic=False, size=size)
        if topic.config.discard == "reject":
            self._refuse_overflow(topic, records=records, size=size, now=self.clock.now_ms())

    def _check_room_for_topic(self, size: int) -> None:
        self.space.check()
        self._check_quota(new_topic=True, size=size)

    def _refuse_overflow(self, topic: Topic, *, records: int, size: int, now: int) -> None:
        config = topic.config
        if not config.cap_records and not config.cap_bytes:
            return
        retention.expire(topic, now_ms=now)
        detail = {
            "topic": topic.name,
            "cap_records": config.cap_records,
            "cap_bytes": config.cap_bytes,
            "head_seq": topic.head_seq,
            "earliest_seq": topic.earliest_seq,
        }
        if retention.never_fits(topic, records=records, size=size):
            raise ApiError(
                "record_too_large",
                f'{records} records of {size} bytes can never fit topic "{topic.name}"; '
                "split the write or raise its caps",
                detail,
            )
        if retention.would_overflow(topic, records=records, size=size):
            raise ApiError("topic_full", f'topic "{topic.name}" is full and its policy is to reject', detail)

    def _check_quota(self, *, new_topic: bool, size: int) -> None:
        held = self.totals.bytes + self.totals.pending_bytes
        self.quota.claim(self.catalogue.count, held, new_topic=new_topic, more=size)

    def publish_totals(self) -> None:
        """For the limits that all shards share: before the answers go out."""
        self.quota.publish(self.catalogue.count, self.totals.bytes + self.totals.pending_bytes)

    def _new_topic(self, request: messages.Append, now: int) -> Topic:
        config = request.config or TopicConfig()
        create = config.auto_create if request.create is None else request.create
        if not create:
            raise topic_not_found(request.topic)
        if request.modest and request.config is not None:
            raise lacks_scopes(["admin"])
        self._check_room_for_topic(request.size)
        topic = self.catalogue.create(request.topic, config, now)
        if config.discard == "reject":
            try:
                self._refuse_overflow(topic, records=request.count, size=request.size, now=now)
            except ApiError:
                self.catalogue.forget(topic)
                raise
        return topic

    @property
    def topic_count(self) -> int:
        return self.catalogue.count

    # --- deletes -------------------------------------------------------------------------------------

    def _delete_records(self, request: messages.DeleteRecords, reply_to: ReplyTo, correlation: int) -> bytes | None:
        topic = self.catalogue.existing(request.topic)
        bound = topic.head_seq + 1
        if request.before_seq is not None:
            bound = min(bound, request.before_seq)
        seqs = None
        if request.tag is not None:
            seqs = reads.seqs_with_tag(topic, request.tag, prefix=request.prefix, below=bound)
            cut = topic.rows_cut_by(seqs)
        else:
            front = topic.rows.find(bound - 1)
            cut = [front] if front is not None and front.live and bound <= front.last else []
        need_sizes(cut, self.cache)
        if topic.logged and (seqs or (seqs is None and topic.earliest_seq < bound)):
            before, count = (bound, topic.live_below(bound)) if seqs is None else (None, 0)
            trims = topic.untold
            frame = encode_delete(DeleteFrame(before, seqs, topic.cap_seq, topic.ttl_seq, trims=trims, deleted=count))
            self.commit.make_room(frame_bytes(key_len=0, body_len=len(frame)), reserve=True)
            self.wal.stage(FrameType.DELETE, topic_id=topic.id, ts=self.clock.now_ms(), body=frame)
            self.commit.told_trims(topic)
            self.commit.write_control()
        deleted = topic.delete_before(bound) if seqs is None else topic.delete_seqs(seqs)
        for row in cut:
            row.sizes = row.times = None  # fetched for this delete alone
        self.jobs.look(topic)

        def answer(fsync_us: int) -> bytes:
            result = messages.RecordsDeleted(
                deleted, topic.earliest_seq, topic.head_seq, topic.count, topic.bytes, fsync_us
            )
            return messages.pack(Op.DELETE_RECORDS, correlation, result)

        if topic.needs_sync and deleted:
            self.commit.wait_for_sync(reply_to, answer)
            return None
        self.commit.request_sync()
        return answer(0)

    # --- reads ---------------------------------------------------------------------------------------

    def _diff(self, request: messages.Diff, reply_to: ReplyTo, correlation: int) -> bytes | None:
        topic = self.catalogue.existing(request.topic)
        topic.last_read_ts = self.clock.now_ms()
        reading = reads.read(topic, request, self.cache, from_seq=request.from_seq, nodes=request.nodes)
        if reading.found or not request.wait_ms or reading.next_from_seq != topic.head_seq:
            return reads.diffed(topic, reading, correlation, waited_ms=0)
        self.polls.add(topic, request, reply_to, correlation)
        return None

    @property
    def next_deadline_ns(self) -> int | None:
        """When the engine wants to be called without a request."""
        wanted = (self.polls.next_deadline_ns, self.commit.sync_due_ns, self.tails.next_due_ns)
        due = [at for at in wanted if at is not None]
        return min(due, default=None)


def _apart(request: messages.Append, body: bytes, counts: tuple[int, ...]) -> Iterator[tuple[messages.Append, bytes]]:
    """The requests that were joined into one batch, each with its own."""
    values = columns.Columns(body, count=request.count, ts=0).data()
    at = 0
    for count in counts:
        own = values[at : at + count]
        at += count
        size = sum(map(len, own)) + count * RECORD_OVERHEAD
        yield messages.Append(request.topic, count, size), columns.pack(own)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CorruptData | Unreachable):
        return unreadable(error)
    return write_failed(error)
