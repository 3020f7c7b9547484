"""The topics of a shard by name: how they are made, configured, shown, listed and dropped.

Control frames are written before they take effect in memory, and answered when they are synced. A topic whose first
write fails has never been. The leases logs of queues are among the topics, but no client sees them: they are neither
listed nor counted, and go with their queues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, being_rebuilt, topic_not_found
from topics.storage.config import TopicConfig, topic_id
from topics.storage.format import FrameType, frame_bytes
from topics.storage.leases import is_log_name
from topics.walshard.forwards.copies import counts_bytes
from topics.walshard.jobs import Jobs, removals
from topics.walshard.kinds import Kinds
from topics.walshard.listing import Listing
from topics.walshard.log.commit import CONTROL_BYTES, Commit, ReplyTo
from topics.walshard.topic import retention
from topics.walshard.topic.priority import effective_priority
from topics.walshard.topic.topic import Topic, Totals


class Catalogue:
    def __init__(
        self,
        *,
        topics: dict[str, Topic],
        totals: Totals,
        commit: Commit,
        jobs: Jobs,
        refresh: Callable[[Topic], None],
        now_ms: Callable[[], int],
        check_room: Callable[[int], None],
        dropped: Callable[[Topic], None],
        entropy: Callable[[], int],
    ) -> None:
        self.kinds = Kinds(topics.values())
        self.listing = Listing(name for name in topics if not is_log_name(name))
        self._topics = topics
        self._totals = totals
        self._commit = commit
        self._jobs = jobs
        self._refresh = refresh
        self._now_ms = now_ms
        self._check_room = check_room  # for one more topic with so many bytes
        self._dropped = dropped
        self._entropy = entropy
        self.handlers: dict[int, Callable[[Any, Any, int], bytes | None]] = {
            Op.PUT_TOPIC: self._put,
            Op.GET_TOPIC: self._get,
            Op.DROP_TOPIC: self._drop,
            Op.LIST_TOPICS: self._list,
        }

    @property
    def count(self) -> int:
        """Without the leases logs, which nobody sees."""
        return len(self._topics) - self._jobs.logs

    def create(self, name: str, config: TopicConfig, now: int) -> Topic:
        topic = Topic(
            id=topic_id(name, self._entropy()),
            name=name,
            config=config,
            created_ms=now,
            ceiling=limits.SEQ_RESERVE,
            totals=self._totals,
        )
        self._topics[name] = topic
        self.kinds.add(config)
        self.listing.add(name)
        return topic

    def forget(self, topic: Topic) -> None:
        if is_log_name(topic.name):
            self._jobs.forget_log(topic)
        elif self._topics.get(topic.name) is topic:
            del self._topics[topic.name]
            self.kinds.remove(topic.config)
            self.listing.remove(topic.name)

    def existing(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise topic_not_found(name)
        if topic.rebuilding:
            raise being_rebuilt(name)
        self._refresh(topic)
        return topic

    # --- what clients ask ---

    def _put(self, request: messages.PutTopic, reply_to: ReplyTo, correlation: int) -> bytes | None:
        now = self._now_ms()
        topic = self._topics.get(request.topic)
        created = topic is None
        if topic is None:
            self._check_room(0)
            config = before = request.config
            self._commit.make_room(CONTROL_BYTES)
            topic = self.create(request.topic, config, now)
            topic.for_router = request.create_only
        elif request.create_only:
            return messages.pack(Op.PUT_TOPIC, correlation, messages.TopicPut(False, topic.config))
        elif topic.rebuilding:
            raise being_rebuilt(topic.name)  # a cap that rejects would keep its copies out for good
        else:
            before = topic.config
            topic.for_router = False  # a client knows of it now
            if request.type is not None and request.type != before.type:
                raise ApiError(
                    "topic_exists_incompatible",
                    f'topic "{topic.name}" is a {before.type} and can\'t become a {request.type}; delete it first',
                    {"topic": topic.name, "type": before.type},
                )
            retention.expire(topic, now_ms=now)  # under the old config: what has expired stays expired
            config = msgspec.structs.replace(request.config, type=before.type)
            self._commit.tell_trims(topic)
            if topic.pipe is not None and counts_bytes(config) and not counts_bytes(before):
                self._commit.log_sizes(topic, topic.pipe)
            self._commit.make_room(CONTROL_BYTES)
        if created or config != before:
            topic.config = config
            self.kinds.change(before, config)
            try:
                if before.durability in ("disk", "ephemeral") and config.durability != before.durability:
                    # Seqs of lost records are in no frame; without this one recovery would give them out again. First,
                    # because a power cut may leave one of the two: under the old class the ceiling counts.
                    self._commit.stage_ceiling(topic, topic.next_seq - 1, now)
                self._commit.stage_topic(topic, now)
                if before.durability in ("fsync", "memory") and config.durability in ("disk", "ephemeral"):
                    topic.sure_ceiling = 0  # a power cut may leave the old class alone, under which no promise counts
                self._commit.write_control()
            except ApiError:
                topic.config = before
                self.kinds.change(config, before)
                if created:
                    self.forget(topic)
                raise
            topic.touched()
            retention.expire(topic, now_ms=now)
            retention.enforce_caps(topic)
            self._commit.floor_moved(topic)
            self._jobs.configured(topic)
            self._jobs.look(topic)

        def answer(fsync_us: int) -> bytes:
            return messages.pack(Op.PUT_TOPIC, correlation, messages.TopicPut(created, config))

        if self._commit.wal.written_lsn == self._commit.wal.synced_lsn:
            return answer(0)
        self._commit.wait_for_sync(reply_to, answer)
        return None

    def _get(self, request: messages.GetTopic, reply_to: ReplyTo, correlation: int) -> bytes:
        topic = self.existing(request.topic)
        now = self._now_ms()
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
            topic_id=topic.id,
            removals=removals(topic),
            completing=topic.completing,
        )
        return messages.pack(Op.GET_TOPIC, correlation, report)

    def _drop(self, request: messages.DropTopic, reply_to: ReplyTo, correlation: int) -> bytes | None:
        topic = self._topics.get(request.topic)
        if topic is None:
            return messages.pack(Op.DROP_TOPIC, correlation, messages.TopicDropped(False))
        self._refresh(topic)
        if request.undo and (topic.head_seq or topic.pending_records or not topic.for_router):
            return messages.pack(Op.DROP_TOPIC, correlation, messages.TopicDropped(False))
        if request.if_empty and topic.rebuilding:
            raise being_rebuilt(topic.name)
        if request.if_empty and (topic.count or topic.pending_records):
            count = topic.count + topic.pending_records
            raise ApiError(
                "topic_not_empty",
                f'topic "{topic.name}" holds {count} records',
                {"topic": topic.name, "count": count},
            )
        log = self._jobs.log_of(topic)
        gone = [topic] if log is None else [log, topic]  # the log first: without its queue it would mean nothing
        self._commit.make_room(len(gone) * frame_bytes(key_len=0, body_len=0), reserve=True)
        for each in gone:
            self._commit.wal.stage(FrameType.DROP, topic_id=each.id, ts=self._now_ms())
        self._commit.write_control()
        for each in gone:
            self.forget(each)
            each.drop()
        for each in gone:
            self._dropped(each)

        def answer(fsync_us: int) -> bytes:
            return messages.pack(Op.DROP_TOPIC, correlation, messages.TopicDropped(True))

        self._commit.wait_for_sync(reply_to, answer)
        return None

    def _list(self, request: messages.ListTopics, reply_to: ReplyTo, correlation: int) -> bytes:
        """The next topics by name."""
        names = self.listing.page(
            after=request.after, prefix=request.prefix, allowed=request.prefixes, limit=request.limit + 1
        )
        now = self._now_ms()
        rows = []
        for name in names[: request.limit]:
            topic = self._topics[name]
            self._refresh(topic)
            if request.touch:
                topic.last_read_ts = now
            is_queue = topic.config.type == "queue"
            rows.append(
                messages.TopicRow(
                    topic=name,
                    head_seq=topic.head_seq,
                    earliest_seq=topic.earliest_seq,
                    count=topic.count,
                    bytes=topic.bytes,
                    durable=topic.config.durable,
                    effective_priority=effective_priority(topic.config, last_read_ts=topic.last_read_ts, now_ms=now),
                    topic_id=topic.id if is_queue else 0,
                    removals=removals(topic) if is_queue else 0,
                    completing=topic.completing if is_queue else 0,
                    rebuilding=topic.rebuilding,
                )
            )
        return messages.pack(Op.LIST_TOPICS, correlation, messages.TopicsListed(rows, len(names) > request.limit))
