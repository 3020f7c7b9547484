"""Queues: the coordinator asks shards, and gateways ask the coordinator."""

from __future__ import annotations

from topics.actors.messages.op import Message
from topics.actors.messages.topics import TopicRow
from topics.storage.config import TopicConfig

# --- the coordinator asks shards ---


class OpenQueue(Message, frozen=True):
    topic: str


class QueueOpened(Message, frozen=True):
    topic_id: int
    config: TopicConfig
    live: int  # records in the topic; here and below those count too whose delete waits for its sync
    removals: int  # records that went otherwise than by COMPLETE_JOBS; any change means: look which
    log_from: int  # where to read the leases log from ...
    log_head: int  # ... and where it ends; 0: there is none


class QueueChanged(Message, frozen=True):
    config: TopicConfig


class ListQueues(Message, frozen=True):
    pass


class QueuesListed(Message, frozen=True):
    topics: list[str]


class TakeJobs(Message, frozen=True):
    topic: str
    topic_id: int
    wanted: list[int]  # these first, as far as they are there, ascending ...
    after: int  # ... then those behind a cursor ...
    held: list[int]  # ... but for these
    limit: int
    max_bytes: int
    fresh: int | None = None  # at most so many from behind the cursor, and one for each wanted that is gone


class JobsTaken(Message, frozen=True):
    """The body is the jobs' JSON, joined by commas."""

    seqs: list[int]
    ends: list[int]  # where each one's JSON ends in the body, its comma counted
    wanted: int  # how many of them were asked for by seq
    gone: list[int]  # asked for, but no longer there
    at: int  # the cursor behind what was looked at, or before the first job there that is missed
    end: bool  # there is nothing behind what was looked at
    live: int
    removals: int
    missed: list[tuple[int, int]]  # all stretches of jobs whose disk is away: first and last seq
    beyond: int  # if the cursor stays: what was looked at, to read on from until the disk is back; else 0
    why: str  # there was nothing but missed jobs, which were tried


class CompleteJobs(Message, frozen=True):
    """The body is a batch of events for the leases log."""

    topic: str
    topic_id: int
    seqs: list[int]
    durable: bool  # of the leases log
    events: int
    size: int


class JobsCompleted(Message, frozen=True):
    live: int
    removals: int
    fsync_us: int


class LogLeases(Message, frozen=True):
    """The body is a batch of events."""

    topic: str
    topic_id: int
    durable: bool
    events: int
    size: int
    checkpoint: bool  # readers may start here


class CheckJobs(Message, frozen=True):
    topic: str
    topic_id: int
    seqs: list[int]


class JobsChecked(Message, frozen=True):
    gone: list[int]
    live: int
    removals: int


# --- and gateways ask the coordinator ---


class Claim(Message, frozen=True):
    topic: str
    node: str
    max: int
    lease_ms: int | None  # None: as the topic says
    key: str = ""  # if sent again with the same, it gets the same jobs


class Claimed(Message, frozen=True):
    """The body is the jobs' JSON without what belongs to the lease, joined by commas."""

    seqs: list[int]
    ends: list[int]
    leases: list[int]
    deliveries: list[int]
    deadline: int
    ready: int
    deadlines: list[int] | None = None  # of each job; None: one for all


class Ack(Message, frozen=True):
    topic: str
    node: str
    seqs: list[int]
    leases: list[int] | None


class Acked(Message, frozen=True):
    skipped: list[int]
    ready: int
    in_flight: int
    fsync_us: int


class Nack(Message, frozen=True):
    topic: str
    node: str
    seqs: list[int]
    leases: list[int] | None
    delay_ms: int


class Nacked(Message, frozen=True):
    skipped: list[int]
    ready: int
    in_flight: int


class Extend(Message, frozen=True):
    topic: str
    node: str
    seqs: list[int]
    leases: list[int] | None
    lease_ms: int


class Extended(Message, frozen=True):
    skipped: list[int]
    deadline: int


class OpenWork(Message, frozen=True):
    topic: str
    node: str
    max: int
    lease_ms: int | None
    stream: int  # the connection; the same again if the coordinator has died meanwhile ...
    last_lease: int = 0  # ... and the last lease that it heard of then


class WorkOpened(Message, frozen=True):
    pass


class WorkEnded(Message, frozen=True):
    code: int
    error: str


class CloseWork(Message, frozen=True):
    topic: str
    stream: int


class WorkSent(Message, frozen=True):
    stream: int
    sent: int  # bytes of the bodies of its JOBS that the client's socket has taken, ever


class JobsRemoved(Message, frozen=True):
    removals: int


class QueueRow(Message, frozen=True):
    """What a shard says of a queue."""

    topic: str
    topic_id: int
    count: int
    removals: int
    completing: int

    @classmethod
    def of(cls, row: TopicRow) -> QueueRow:
        return cls(row.topic, row.topic_id, row.count, row.removals, row.completing)


class CountQueues(Message, frozen=True):
    rows: list[QueueRow]


class QueueCounts(Message, frozen=True):
    ready: int
    in_flight: int
    dead_lettered: int


class QueuesCounted(Message, frozen=True):
    counts: list[QueueCounts | None]  # in the order asked; None: it is gone, or its shard is away
