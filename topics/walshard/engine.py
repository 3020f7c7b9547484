"""The shard's commands: what each request does to topics and log, when it is answered, when it is seen.

One drain of the rings is one commit: appends are staged, everything else first commits what is staged, so requests
of one link take effect in order. The life of an append:

    request -> staged -> written -> [synced] -> published -> answered
                 |          |
                 |          +- memory, disk: published now. fsync, a new topic, or a batch behind one that waits:
                 |             published when a sync covers its lsn, in lsn order
                 +- the write failed: seqs and keys are taken back, 503, nothing was ever visible

Deletes and control frames are written before they take effect in memory, and answered when they are as durable as the
topic's class promises (control: always synced). This module does no IO of its own; Wal and Syncer do.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, CorruptData, DiskFull, topic_not_found
from topics.settings import Settings
from topics.storage.config import TopicConfig, topic_id
from topics.storage.control import DeleteFrame, TopicFrame
from topics.storage.format import FrameType
from topics.walshard import reads, retention
from topics.walshard.cache import BatchCache
from topics.walshard.clock import Clock
from topics.walshard.disk import kill_point
from topics.walshard.idempotency import Remembered
from topics.walshard.priority import effective_priority
from topics.walshard.rows import Row
from topics.walshard.syncer import Synced, Syncer
from topics.walshard.topic import Topic, Totals
from topics.walshard.wal import Wal, append_frame_bytes


class ReplyTo(Protocol):
    """Where an answer goes: a link's writer, or a list in a test."""

    def send_always(self, message: bytes) -> None: ...


class _Written:
    """A staged or written batch on its way to being published."""

    __slots__ = ("correlation", "created", "key", "lsn", "reply_to", "row", "topic", "wal_us", "written_ns")

    def __init__(
        self, topic: Topic, row: Row, *, created: bool, key: str | None, lsn: int, reply_to: ReplyTo, correlation: int
    ) -> None:
        self.topic = topic
        self.row = row
        self.created = created
        self.key = key
        self.lsn = lsn
        self.reply_to = reply_to
        self.correlation = correlation
        self.wal_us = 0
        self.written_ns = 0


class _Answer:
    """An answer that waits for a sync: a delete, a control command, a retry of a batch that waits itself."""

    __slots__ = ("build", "lsn", "reply_to", "written_ns")

    def __init__(self, lsn: int, reply_to: ReplyTo, build: Callable[[int], bytes], written_ns: int) -> None:
        self.lsn = lsn
        self.reply_to = reply_to
        self.build = build
        self.written_ns = written_ns


class _Waiter:
    """A long poll."""

    __slots__ = ("correlation", "deadline_ns", "done", "reply_to", "request", "since_ns", "topic")

    def __init__(self, topic: Topic, request: messages.Diff, reply_to: ReplyTo, correlation: int, now_ns: int) -> None:
        self.topic = topic
        self.request = request
        self.reply_to = reply_to
        self.correlation = correlation
        self.since_ns = now_ns
        self.deadline_ns = now_ns + request.wait_ms * 1_000_000
        self.done = False


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
        instance_totals: Callable[[], tuple[int, int]] | None = None,
        entropy: Callable[[], int] = lambda: int.from_bytes(os.urandom(8), "little"),
    ) -> None:
        self.settings = settings
        self.topics = topics
        self.totals = totals
        self.wal = wal
        self.syncer = syncer
        self.clock = clock
        self.cache = BatchCache(most_bytes=settings.cache_bytes)
        self.dropped: list[Topic] = []  # their files are the mover's to remove
        self.requests = 0
        self.read_only = False
        self.sync_due_ns: int | None = None  # when the disk class wants its sync
        self.last_sync_us = 0
        self.on_sync: Callable[[int], None] = lambda took_us: None
        self._instance_totals = instance_totals
        self._entropy = entropy
        self._staged: list[_Written] = []
        self._waiting: deque[_Written | _Answer] = deque()  # for a sync, in lsn order
        self._pollers: dict[int, list[_Waiter]] = {}  # by topic id
        self._poll_deadlines: list[tuple[int, int, _Waiter]] = []
        self._handlers: dict[int, Callable[[msgspec.Struct, bytes, ReplyTo, int], bytes | None]] = {
            Op.APPEND: self._append,  # type: ignore[dict-item]
            Op.DIFF: self._diff,  # type: ignore[dict-item]
            Op.PUT_TOPIC: self._put_topic,  # type: ignore[dict-item]
            Op.GET_TOPIC: self._get_topic,  # type: ignore[dict-item]
            Op.DROP_TOPIC: self._drop_topic,  # type: ignore[dict-item]
            Op.LIST_TOPICS: self._list_topics,  # type: ignore[dict-item]
            Op.DELETE_RECORDS: self._delete_records,  # type: ignore[dict-item]
        }

    # --- the round -----------------------------------------------------------------------------------

    def handle(self, message: bytes, reply_to: ReplyTo) -> None:
        """Take one request; it is answered now, at commit, or after a sync."""
        envelope = messages.unpack(message)
        op, correlation = envelope.op, envelope.correlation
        if op == Op.CANCEL:
            self._cancel(correlation, reply_to)
            return
        if envelope.deadline_ms and time.monotonic_ns() > envelope.deadline_ms * 1_000_000:
            return
        self.requests += 1
        try:
            if op != Op.APPEND:
                self.commit()
            answer = self._handlers[op](
                messages.decode_request(op, envelope.head), envelope.body, reply_to, correlation
            )
        except ApiError as error:
            answer = messages.pack_failure(op, correlation, error)
        except DiskFull:
            self.read_only = True
            answer = messages.pack_failure(op, correlation, _storage_full())
        except CorruptData as error:
            answer = messages.pack_failure(op, correlation, ApiError("internal", f"stored data is damaged: {error}"))
        if answer is not None:
            reply_to.send_always(answer)

    def commit(self) -> None:
        """Write what is staged; publish and answer what need not wait for a sync."""
        staged = self._staged
        if not staged and not self.wal.staged:
            return
        self._staged = []
        started = time.perf_counter_ns()
        try:
            self.wal.write()
        except (DiskFull, OSError) as error:
            self._take_back(staged, error)
            return
        written = time.perf_counter_ns()
        self.read_only = False
        wal_us = (written - started) // 1_000
        for entry in staged:
            entry.wal_us = wal_us
            entry.written_ns = written
            topic = entry.topic
            if (
                topic.pending
                or entry.created
                or topic.needs_sync
                or (entry.row.last > topic.sure_ceiling and not self._ceiling_is_sure(topic))
            ):
                topic.pending += 1
                self._waiting.append(entry)
            else:
                self._publish(entry, fsync_us=0)
        self._request_sync()

    def _request_sync(self) -> None:
        """Start a sync if somebody waits for one; otherwise see that the disk class gets its own in time."""
        wal = self.wal
        if wal.written_lsn == wal.synced_lsn or self.syncer.busy:
            return
        if self._waiting:
            self.sync_now()
        elif self.sync_due_ns is None:
            self.sync_due_ns = time.monotonic_ns() + self.settings.disk_sync_ms * 1_000_000

    def sync_now(self) -> None:
        self.sync_due_ns = None
        unsynced = [file.fd for file in self.wal.files if file.last_lsn > self.wal.synced_lsn]
        self.syncer.request(unsynced, self.wal.written_lsn)

    def synced(self, outcome: Synced) -> None:
        """A sync ended: publish and answer what it covers, and start the next if more was written."""
        if outcome.error is not None:
            raise outcome.error  # the shard stops; recovery finds what is really there
        self.wal.synced_lsn = outcome.lsn
        self.last_sync_us = outcome.took_us
        self.on_sync(outcome.took_us)
        now = time.perf_counter_ns()
        waiting = self._waiting
        while waiting and waiting[0].lsn <= outcome.lsn:
            entry = waiting.popleft()
            fsync_us = (now - entry.written_ns) // 1_000
            if isinstance(entry, _Answer):
                entry.reply_to.send_always(entry.build(fsync_us))
            else:
                entry.topic.pending -= 1
                entry.topic.pending_records -= entry.row.count
                entry.topic.pending_bytes -= entry.row.size
                self._publish(entry, fsync_us=fsync_us, was_pending=True)
        self._request_sync()

    @property
    def sync_is_due(self) -> bool:
        return self.sync_due_ns is not None and time.monotonic_ns() >= self.sync_due_ns and not self.syncer.busy

    # --- append --------------------------------------------------------------------------------------

    def _append(self, request: messages.Append, body: bytes, reply_to: ReplyTo, correlation: int) -> bytes | None:
        now = self.clock.now_ms()
        topic = self.topics.get(request.topic)
        if topic is not None:
            if request.key is not None:
                self._expire_keys(topic, now)
                found = topic.keys.find(request.key, now_ms=now, window_ms=topic.config.idempotency_window_ms)
                if found is not None:
                    return self._deduplicated(topic, request.key, found, reply_to, correlation)
            config = topic.config
            if config.discard == "reject" and (config.cap_records or config.cap_bytes):
                self._refuse_overflow(topic, request, now)
        self._check_quota(new_topic=topic is None, size=request.size)
        created = topic is None
        if topic is None:
            topic = self._new_topic(request, now)
        key = request.key.encode() if request.key is not None else b""
        ts = now if now > topic.last_ts else topic.last_ts
        first = topic.next_seq
        last = first + request.count - 1
        try:
            if created:
                self._stage_topic(topic, ts)
            if last > topic.ceiling - limits.SEQ_RESERVE // 2 and topic.config.durability in ("disk", "ephemeral"):
                self._stage_ceiling(topic, last, ts)
            if topic.ephemeral:
                lsn = topic.ceiling_lsn
                row = Row(
                    first=first, count=request.count, first_ts=ts, last_ts=ts, size=request.size, source=None, body=body
                )
            else:
                self._make_room(append_frame_bytes(key=key, body=body))
                file, offset, length, lsn = self.wal.stage(
                    FrameType.APPEND,
                    topic_id=topic.id,
                    ts=ts,
                    first_seq=first,
                    count=request.count,
                    body=body,
                    key=key,
                )
                row = Row(
                    first=first,
                    count=request.count,
                    first_ts=ts,
                    last_ts=ts,
                    size=request.size,
                    source=file,
                    offset=offset,
                    length=length,
                    body=body,
                )
                file.pins += 1
        except DiskFull:
            if created:
                self._forget_topic(topic)
            raise
        topic.next_seq = last + 1
        topic.last_ts = ts
        topic.pending_records += request.count
        topic.pending_bytes += request.size
        if request.key is not None:
            topic.keys.remember(request.key, Remembered(first, request.count, ts))
        self._staged.append(
            _Written(topic, row, created=created, key=request.key, lsn=lsn, reply_to=reply_to, correlation=correlation)
        )
        return None

    def _expire_keys(self, topic: Topic, now: int) -> None:
        topic.keys.expire(now_ms=now, window_ms=topic.config.idempotency_window_ms)

    def _deduplicated(
        self, topic: Topic, key: str, found: Remembered, reply_to: ReplyTo, correlation: int
    ) -> bytes | None:
        """Answer a retry with what the first write got, but not before that one is as durable as promised."""

        def answer(fsync_us: int) -> bytes:
            head = max(topic.head_seq, found.first_seq + found.count - 1)
            result = messages.Appended(found.first_seq, found.count, head, False, True, 0, fsync_us)
            return messages.pack(Op.APPEND, correlation, result)

        self.commit()
        if key not in topic.keys:
            raise _storage_full()  # the first write was in this very commit, and it failed
        if found.first_seq > topic.head_seq:
            self._wait_for_sync(reply_to, answer)
            return None
        return answer(0)

    def _refuse_overflow(self, topic: Topic, request: messages.Append, now: int) -> None:
        retention.expire(topic, now_ms=now)
        config = topic.config
        detail = {
            "topic": topic.name,
            "cap_records": config.cap_records,
            "cap_bytes": config.cap_bytes,
            "head_seq": topic.head_seq,
            "earliest_seq": topic.earliest_seq,
        }
        if retention.never_fits(topic, records=request.count, size=request.size):
            raise ApiError(
                "record_too_large",
                f'{request.count} records of {request.size} bytes can never fit topic "{topic.name}"; split the write or '
                "raise its caps",
                detail,
            )
        if retention.would_overflow(topic, records=request.count, size=request.size):
            raise ApiError("topic_full", f'topic "{topic.name}" is full and its policy is to reject', detail)

    def _check_quota(self, *, new_topic: bool, size: int) -> None:
        settings = self.settings
        if not (new_topic and settings.max_topics) and not (size and settings.max_total_bytes):
            return
        topics, total = self._instance_totals() if self._instance_totals else (len(self.topics), self.totals.bytes)
        if new_topic and settings.max_topics and topics >= settings.max_topics:
            raise _over_cap("max_topics", settings.max_topics, "delete topics you no longer need")
        if size and settings.max_total_bytes and total + size > settings.max_total_bytes:
            raise _over_cap("max_total_bytes", settings.max_total_bytes, "delete records or lower retention")

    def _new_topic(self, request: messages.Append, now: int) -> Topic:
        config = request.config or TopicConfig()
        create = config.auto_create if request.create is None else request.create
        if not create:
            raise topic_not_found(request.topic)
        topic = self._create(request.topic, config, now)
        if config.discard == "reject":
            try:
                self._refuse_overflow(topic, request, now)
            except ApiError:
                self._forget_topic(topic)
                raise
        return topic

    def _create(self, name: str, config: TopicConfig, now: int) -> Topic:
        topic = Topic(
            id=topic_id(name, self._entropy()),
            name=name,
            config=config,
            created_ms=now,
            ceiling=limits.SEQ_RESERVE,
            totals=self.totals,
        )
        self.topics[name] = topic
        return topic

    def _forget_topic(self, topic: Topic) -> None:
        if self.topics.get(topic.name) is topic:
            del self.topics[topic.name]

    def _stage_topic(self, topic: Topic, ts: int) -> int:
        body = msgspec.msgpack.encode(TopicFrame(topic.name, topic.config, topic.created_ms, topic.ceiling))
        self._make_room(append_frame_bytes(key=b"", body=body))
        lsn = self.wal.stage(FrameType.TOPIC, topic_id=topic.id, ts=ts, body=body)[3]
        topic.ceiling_lsn = max(topic.ceiling_lsn, lsn)
        return lsn

    def _stage_ceiling(self, topic: Topic, last: int, ts: int) -> None:
        """Promise on disk that seqs up to the new ceiling are spoken for, before they are given out."""
        if self._ceiling_is_sure(topic):
            topic.sure_ceiling = topic.ceiling
        self._make_room(append_frame_bytes(key=b"", body=b""))
        ceiling = last + limits.SEQ_RESERVE
        topic.ceiling_lsn = self.wal.stage(FrameType.HEAD, topic_id=topic.id, ts=ts, first_seq=ceiling)[3]
        topic.ceiling = ceiling

    def _ceiling_is_sure(self, topic: Topic) -> bool:
        return topic.config.durability == "memory" or topic.ceiling_lsn <= self.wal.synced_lsn

    def _make_room(self, size: int, *, reserve: int = limits.WAL_RESERVE_BYTES) -> None:
        if not self.wal.fits(size, reserve=reserve):
            self.commit()
            self.wal.rotate(size)

    def _take_back(self, staged: list[_Written], error: BaseException) -> None:
        """The write failed: as if these requests had never come."""
        self.read_only = True
        failure = (
            _storage_full() if isinstance(error, DiskFull) else ApiError("internal", f"the log write failed: {error}")
        )
        for entry in reversed(staged):
            topic = entry.topic
            topic.next_seq = entry.row.first
            topic.pending_records -= entry.row.count
            topic.pending_bytes -= entry.row.size
            if entry.key is not None:
                topic.keys.forget(entry.key)
            if entry.row.source is not None:
                entry.row.source.release(entry.row)
            if entry.created:
                self._forget_topic(topic)
            entry.reply_to.send_always(messages.pack_failure(Op.APPEND, entry.correlation, failure))

    def _publish(self, entry: _Written, *, fsync_us: int, was_pending: bool = False) -> None:
        topic, row = entry.topic, entry.row
        if not was_pending:
            topic.pending_records -= row.count
            topic.pending_bytes -= row.size
        if not topic.dropped:
            kill_point("publish")
            if row.body is not None:
                self.cache.keep_body(row, row.body)
            topic.publish(row)
            config = topic.config
            if config.cap_records or config.cap_bytes:
                retention.enforce_caps(topic)
            if topic.id in self._pollers:
                self._wake_pollers(topic)
        kill_point("reply")
        if not topic.needs_sync:
            fsync_us = 0  # it waited for its topic's creation, not for its own class
        answer = messages.Appended(
            row.first, row.count, max(topic.head_seq, row.last), entry.created, False, entry.wal_us, fsync_us
        )
        entry.reply_to.send_always(messages.pack(Op.APPEND, entry.correlation, answer))

    # --- control commands ----------------------------------------------------------------------------

    def _wait_for_sync(self, reply_to: ReplyTo, build: Callable[[int], bytes]) -> None:
        self._waiting.append(_Answer(self.wal.written_lsn, reply_to, build, time.perf_counter_ns()))
        self._request_sync()

    def _put_topic(self, request: messages.PutTopic, body: bytes, reply_to: ReplyTo, correlation: int) -> bytes | None:
        now = self.clock.now_ms()
        topic = self.topics.get(request.topic)
        created = topic is None
        if topic is None:
            self._check_quota(new_topic=True, size=0)
            config = request.config
            topic = self._create(request.topic, config, now)
        else:
            if request.type is not None and request.type != topic.config.type:
                raise ApiError(
                    "topic_exists_incompatible",
                    f'topic "{topic.name}" is a {topic.config.type}; its type can\'t change. Delete and create it instead',
                    {"topic": topic.name, "type": topic.config.type},
                )
            config = msgspec.structs.replace(request.config, type=topic.config.type)
        before = topic.config
        if created or config != before:
            topic.config = config
            try:
                self._stage_topic(topic, now)
                self.wal.write()
            except (DiskFull, OSError) as error:
                topic.config = before
                if created:
                    self._forget_topic(topic)
                raise _write_failed(error) from error
            topic.touched()
            if before.durability != config.durability:
                self._class_changed(topic, before)
            retention.expire(topic, now_ms=now)
            retention.enforce_caps(topic)

        def answer(fsync_us: int) -> bytes:
            return messages.pack(Op.PUT_TOPIC, correlation, messages.TopicPut(created, config))

        if self.wal.written_lsn == self.wal.synced_lsn:
            return answer(0)
        self._wait_for_sync(reply_to, answer)
        return None

    def _class_changed(self, topic: Topic, before: TopicConfig) -> None:
        """Batches written while ephemeral stay resident-only, so the log must not claim their seqs were never used."""
        topic.ceiling = max(topic.ceiling, topic.next_seq - 1)
        self._stage_ceiling(topic, topic.next_seq - 1, self.clock.now_ms())
        self.wal.write()

    def _get_topic(self, request: messages.GetTopic, body: bytes, reply_to: ReplyTo, correlation: int) -> bytes:
        topic = self._existing(request.topic)
        now = self.clock.now_ms()
        retention.expire(topic, now_ms=now)
        if request.touch:
            topic.last_read_ts = now
        report = messages.TopicReport(
            head_seq=topic.head_seq,
            earliest_seq=topic.earliest_seq,
            count=topic.count,
            bytes=topic.bytes,
            config=topic.config,
            effective_priority=effective_priority(topic.config, last_read_ts=topic.last_read_ts, now_ms=now),
            last_write_ts=topic.last_write_ts,
            last_read_ts=topic.last_read_ts,
        )
        return messages.pack(Op.GET_TOPIC, correlation, report)

    def _drop_topic(
        self, request: messages.DropTopic, body: bytes, reply_to: ReplyTo, correlation: int
    ) -> bytes | None:
        topic = self.topics.get(request.topic)
        if topic is None:
            return messages.pack(Op.DROP_TOPIC, correlation, messages.TopicDropped(False))
        now = self.clock.now_ms()
        retention.expire(topic, now_ms=now)
        if request.if_empty and (topic.count or topic.pending_records):
            raise ApiError(
                "topic_not_empty",
                f'topic "{topic.name}" holds {topic.count} records',
                {"topic": topic.name, "count": topic.count},
            )
        self._make_room(append_frame_bytes(key=b"", body=b""), reserve=0)
        self.wal.stage(FrameType.DROP, topic_id=topic.id, ts=now)
        self._write_now()
        del self.topics[topic.name]
        topic.dropped = True
        self.totals.records -= topic.count
        self.totals.bytes -= topic.bytes
        for row in topic.rows:
            if row.live:
                topic.release(row)
        self.dropped.append(topic)
        for waiter in self._pollers.pop(topic.id, []):
            if not waiter.done:
                waiter.done = True
                failure = messages.pack_failure(Op.DIFF, waiter.correlation, topic_not_found(topic.name))
                waiter.reply_to.send_always(failure)

        def answer(fsync_us: int) -> bytes:
            return messages.pack(Op.DROP_TOPIC, correlation, messages.TopicDropped(True))

        self._wait_for_sync(reply_to, answer)
        return None

    def _write_now(self) -> None:
        try:
            self.wal.write()
        except (DiskFull, OSError) as error:
            raise _write_failed(error) from error

    def _list_topics(self, request: messages.ListTopics, body: bytes, reply_to: ReplyTo, correlation: int) -> bytes:
        """The next topics by name. A heap keeps it linear in the shard's topics, whatever the page."""
        after, prefix = request.after, request.prefix
        names = heapq.nsmallest(
            request.limit + 1, (name for name in self.topics if name > after and name.startswith(prefix))
        )
        now = self.clock.now_ms()
        rows = []
        for name in names[: request.limit]:
            topic = self.topics[name]
            retention.expire(topic, now_ms=now)
            if request.touch:
                topic.last_read_ts = now
            rows.append(
                messages.TopicRow(
                    topic=name,
                    head_seq=topic.head_seq,
                    earliest_seq=topic.earliest_seq,
                    count=topic.count,
                    bytes=topic.bytes,
                    durable=topic.config.durable,
                    effective_priority=effective_priority(topic.config, last_read_ts=topic.last_read_ts, now_ms=now),
                )
            )
        return messages.pack(Op.LIST_TOPICS, correlation, messages.TopicsListed(rows, len(names) > request.limit))

    def _existing(self, name: str) -> Topic:
        topic = self.topics.get(name)
        if topic is None:
            raise topic_not_found(name)
        return topic

    # --- deletes -------------------------------------------------------------------------------------

    def _delete_records(
        self, request: messages.DeleteRecords, body: bytes, reply_to: ReplyTo, correlation: int
    ) -> bytes | None:
        topic = self._existing(request.topic)
        now = self.clock.now_ms()
        retention.expire(topic, now_ms=now)
        bound = topic.head_seq + 1
        if request.before_seq is not None:
            bound = min(bound, request.before_seq)
        seqs = None if request.tag is None else seqs_with_tag(topic, request.tag, prefix=request.prefix, below=bound)
        if not topic.ephemeral and (seqs or (seqs is None and topic.earliest_seq < bound)):
            frame = msgspec.msgpack.encode(DeleteFrame(before_seq=bound if seqs is None else None, seqs=seqs))
            self._make_room(append_frame_bytes(key=b"", body=frame), reserve=0)
            self.wal.stage(FrameType.DELETE, topic_id=topic.id, ts=now, body=frame)
            self._write_now()
        deleted = topic.delete_before(bound) if seqs is None else topic.delete_seqs(seqs)

        def answer(fsync_us: int) -> bytes:
            result = messages.RecordsDeleted(
                deleted, topic.earliest_seq, topic.head_seq, topic.count, topic.bytes, fsync_us
            )
            return messages.pack(Op.DELETE_RECORDS, correlation, result)

        if topic.needs_sync and deleted:
            self._wait_for_sync(reply_to, answer)
            return None
        self._request_sync()
        return answer(0)

    # --- reads ---------------------------------------------------------------------------------------

    def _diff(self, request: messages.Diff, body: bytes, reply_to: ReplyTo, correlation: int) -> bytes | None:
        topic = self._existing(request.topic)
        now = self.clock.now_ms()
        retention.expire(topic, now_ms=now)
        topic.last_read_ts = now
        reading = reads.read(topic, request, self.cache)
        if reading.found or not request.wait_ms:
            return _diffed(topic, reading, correlation, waited_ms=0)
        if reading.next_from_seq != topic.head_seq:
            return _diffed(topic, reading, correlation, waited_ms=0)
        waiter = _Waiter(topic, request, reply_to, correlation, time.monotonic_ns())
        self._pollers.setdefault(topic.id, []).append(waiter)
        heapq.heappush(self._poll_deadlines, (waiter.deadline_ns, correlation, waiter))
        return None

    def _wake_pollers(self, topic: Topic) -> None:
        still = []
        for waiter in self._pollers[topic.id]:
            if waiter.done:
                continue
            reading = reads.read(topic, waiter.request, self.cache)
            if reading.found:
                self._finish(waiter, reading)
            else:
                still.append(waiter)
        if still:
            self._pollers[topic.id] = still
        else:
            del self._pollers[topic.id]

    def _finish(self, waiter: _Waiter, reading: reads.Reading) -> None:
        waiter.done = True
        waited_ms = (time.monotonic_ns() - waiter.since_ns) // 1_000_000
        waiter.reply_to.send_always(_diffed(waiter.topic, reading, waiter.correlation, waited_ms=waited_ms))

    def end_polls(self) -> None:
        """Answer the long polls whose time is up."""
        now = time.monotonic_ns()
        deadlines = self._poll_deadlines
        while deadlines and (deadlines[0][2].done or deadlines[0][0] <= now):
            waiter = heapq.heappop(deadlines)[2]
            if waiter.done:
                continue
            topic = waiter.topic
            retention.expire(topic, now_ms=self.clock.now_ms())
            self._finish(waiter, reads.read(topic, waiter.request, self.cache))
            left = [other for other in self._pollers.get(topic.id, []) if not other.done]
            if left:
                self._pollers[topic.id] = left
            else:
                self._pollers.pop(topic.id, None)

    def _cancel(self, correlation: int, reply_to: ReplyTo) -> None:
        for _, known, waiter in self._poll_deadlines:
            if known == correlation and waiter.reply_to is reply_to:
                waiter.done = True

    def forget(self, reply_to: ReplyTo) -> None:
        """The peer is gone: its long polls end without an answer; what waits for a sync still takes effect."""
        for _, _, waiter in self._poll_deadlines:
            if waiter.reply_to is reply_to:
                waiter.done = True

    @property
    def next_deadline_ns(self) -> int | None:
        """When the engine wants to be called without a request."""
        due = [self._poll_deadlines[0][0]] if self._poll_deadlines else []
        if self.sync_due_ns is not None:
            due.append(self.sync_due_ns)
        return min(due, default=None)


def seqs_with_tag(topic: Topic, tag: str, *, prefix: bool, below: int) -> list[int]:
    """Live seqs below a bound whose tag matches, from the segments' tag pages and the tail's index."""
    found: list[int] = []
    for segment in topic.segments:
        if segment.sealed and segment.live_rows and segment.first_seq < below:
            found.extend(segment.seqs_with_tag(tag, prefix=prefix))
    tail = topic.tail_tags()
    found.extend(tail.with_prefix(tag) if prefix else tail.equal(tag))
    live = []
    row: Row | None = None
    for seq in found:
        if seq >= below:
            continue
        if row is None or not row.first <= seq <= row.last:
            row = topic.rows.find(seq)
        if row is not None and row.live and row.is_live(seq - row.first):
            live.append(seq)
    return live


def _diffed(topic: Topic, reading: reads.Reading, correlation: int, *, waited_ms: int) -> bytes:
    head = messages.Diffed(reading.scanned, waited_ms)
    return messages.pack(Op.DIFF, correlation, head, reads.diff_json(topic, reading))


def _storage_full() -> ApiError:
    return ApiError(
        "storage_full",
        "no space left on the data disk: nothing was written. Reads and deletes still work; writes resume by themselves "
        "when there is space",
        retry_after_s=5,
    )


def _write_failed(error: BaseException) -> ApiError:
    return _storage_full() if isinstance(error, DiskFull) else ApiError("internal", f"the log write failed: {error}")


def _over_cap(limit: str, most: int, remedy: str) -> ApiError:
    return ApiError(
        "throttled",
        f"the instance has reached {limit} ({most}); {remedy}",
        {"limit": limit, "max": most},
        retry_after_s=5,
    )
