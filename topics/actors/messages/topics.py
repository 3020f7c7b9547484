"""Gateways ask shards: topics and their records."""

from __future__ import annotations

from typing import NamedTuple

from topics.actors.messages.op import Message
from topics.storage.config import TopicConfig, TopicType


class Append(Message, frozen=True):
    topic: str
    count: int
    size: int  # what the records count for in the topic's bytes
    create: bool | None = None
    config: TopicConfig | None = None
    key: str | None = None
    patient: bool = False  # would rather wait than be refused
    modest: bool = False  # its key may not configure: `config` must not make a topic


class Appended(NamedTuple):
    """The commonest answer, so it is a fixed struct and not msgpack."""

    first_seq: int
    records: int
    head_seq: int
    created: bool
    deduped: bool
    wal_us: int
    fsync_us: int


class Diff(Message, frozen=True):
    topic: str
    from_seq: int
    limit: int
    max_bytes: int
    nodes: list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: int = 0


class Diffed(Message, frozen=True):
    """The body is the answer's JSON up to its performance block."""

    scanned: int
    waited_ms: int


class PutTopic(Message, frozen=True):
    topic: str
    config: TopicConfig
    type: TopicType | None  # None: keep the type of a topic that exists
    create_only: bool = False  # leave one that exists as it is


class TopicPut(Message, frozen=True):
    created: bool
    config: TopicConfig


class GetTopic(Message, frozen=True):
    topic: str
    touch: bool


class TopicReport(Message, frozen=True):
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    config: TopicConfig
    effective_priority: int
    last_write_ts: int | None
    last_read_ts: int | None
    topic_id: int = 0
    removals: int = 0  # of a queue: records that went otherwise than by an ack
    completing: int = 0  # of a queue: deleted by an ack that waits for its sync


class DropTopic(Message, frozen=True):
    topic: str
    if_empty: bool
    undo: bool = False  # only if it was made for a router, and nobody has used it since


class TopicDropped(Message, frozen=True):
    deleted: bool


class ListTopics(Message, frozen=True):
    prefix: str
    after: str
    limit: int
    touch: bool
    prefixes: tuple[str, ...] = ()  # only names with one of these; none: any


class TopicRow(Message, frozen=True):
    topic: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    durable: bool
    effective_priority: int
    topic_id: int = 0  # only of queues, like what follows
    removals: int = 0
    completing: int = 0
    rebuilding: bool = False  # its copies are being made again: nothing of this may be shown


class TopicsListed(Message, frozen=True):
    rows: list[TopicRow]
    more: bool


class DeleteRecords(Message, frozen=True):
    topic: str
    before_seq: int | None
    tag: str | None
    prefix: bool  # the tag is a prefix


class RecordsDeleted(Message, frozen=True):
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int
    fsync_us: int


class Positions(Message, frozen=True):
    topics: list[str]
    touch: bool = True  # it is a read for their priority


class Position(Message, frozen=True):
    topic_id: int
    head_seq: int
    earliest_seq: int


class PositionsFound(Message, frozen=True):
    found: list[Position | None]  # in the order asked; None: there is no such topic


class Gap(Message, frozen=True):
    gap_from: int
    gap_to: int
    reason: str
    earliest_seq: int


class Read(Message, frozen=True):
    topic: str
    topic_id: int  # 0: whichever has the name now
    from_seq: int
    limit: int
    max_bytes: int
    include_tags: bool
    include_meta: bool
    include_data: bool
    nodes: list[str] | None = None


class Piece(Message, frozen=True):
    """What lies between two cursors. The body is the records' JSON, joined by commas; empty if there are none."""

    topic_id: int
    from_seq: int  # behind the gap, if there is one
    to_seq: int
    head_seq: int
    gap: Gap | None = None
    nodes: list[str | None] | None = None  # each record's origin, if asked for and any has one ...
    ends: list[int] | None = None  # ... and where its JSON ends in the body
