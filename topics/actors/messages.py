"""What processes say to each other: one struct per request and answer, and the envelope around them.

    envelope, then head, then body
    0    1       2  4          8             16            24
    | op | error | 0 | head len | correlation | deadline ms | head (msgpack) | body (raw bytes)
    | u8 | u8    | u16 | u32    | u64         | u64         |

The head is a small array-like struct; a body is a batch (storage/columns.py) or rendered JSON that the receiver passes
on without looking inside. The deadline is CLOCK_MONOTONIC, which all processes of a machine share; a request found
after its deadline is dropped, because nobody waits for the answer.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import msgspec

from topics.errors import ApiError
from topics.storage.config import TopicConfig, TopicType
from topics.storage.routers import Guarantee

ENVELOPE = struct.Struct("<BBHIQQ")
_HEAD_LEN = struct.Struct("<4xI")
_APPENDED = struct.Struct("<QIQ??II")
_APPENDED_WHOLE = struct.Struct("<BBHIQQQIQ??II")
_PLAIN = struct.Struct("<BBHIQQIQ")  # the third field is the length of the topic's name
_PLAIN_BYTES = _PLAIN.size
_encode = msgspec.msgpack.Encoder().encode


class Op(enum.IntEnum):
    APPEND = 1
    DIFF = 2
    PUT_TOPIC = 3
    GET_TOPIC = 4
    DROP_TOPIC = 5
    LIST_TOPICS = 6
    DELETE_RECORDS = 7
    CANCEL = 8  # the caller of a waiting diff has gone; no answer
    APPEND_PLAIN = 9  # an append without options: its head is a fixed struct and the topic's name
    POSITIONS = 10  # where several topics stand
    READ = 11  # a watcher's diff: the pieces of a frame instead of a response
    FOLLOW = 12  # send me what is published to this topic; then TAIL and TOPIC_GONE under the same correlation
    TAIL = 13  # shard to follower, no answer
    TOPIC_GONE = 14  # shard to follower, no answer
    UNFOLLOW = 15  # no answer
    CREATE_SESSION = 16
    OPEN_STREAM = 17
    SAVE_CURSORS = 18  # no answer
    CLOSE_STREAM = 19  # no answer
    TAKE_STREAM = 20  # home to gateway, no answer: somebody else opened it, close it and say where it was
    RESTORE_SESSION = 21  # no answer
    FOLLOW_HEAD = 22  # tell me when something is published; then HEAD_MOVED and TOPIC_GONE under the same correlation
    HEAD_MOVED = 23  # shard to follower, no answer
    READ_RAW = 24  # records as they are stored
    OPEN_PIPE = 25  # this topic gets copies of that one's records
    FORWARD = 26  # some of them
    CLOSE_PIPE = 27
    LIST_PIPES = 28
    PUT_ROUTER = 29
    GET_ROUTER = 30
    DROP_ROUTER = 31
    LIST_ROUTERS = 32
    DROP_ROUTERS_OF = 33  # a topic is gone
    OPEN_QUEUE = 34  # coordinator to shard; then QUEUE_CHANGED and TOPIC_GONE under the same correlation
    QUEUE_CHANGED = 35  # shard to coordinator, no answer
    LIST_QUEUES = 36  # those with leases
    TAKE_JOBS = 37  # jobs that may be claimed, as JSON
    COMPLETE_JOBS = 38  # they are done: delete them
    LOG_LEASES = 39  # write down what happened to leases; answered only if it has a correlation
    CHECK_JOBS = 40  # which of these are gone
    CLAIM = 41
    ACK = 42
    NACK = 43
    EXTEND = 44
    OPEN_WORK = 45  # push jobs to this connection; then JOBS and WORK_ENDED under the same correlation
    JOBS = 46  # coordinator to gateway, no answer
    WORK_ENDED = 47  # coordinator to gateway, no answer
    CLOSE_WORK = 48  # no answer
    COUNT_QUEUES = 49
    WORK_SENT = 50  # no answer
    JOBS_REMOVED = 51  # shard to coordinator, no answer: under the correlation of OPEN_QUEUE
    PACED = 52  # shard to follower, no answer: what it follows has to wait
    END_POLL = 53  # answer a waiting diff now, as if its time were up


class _Message(msgspec.Struct, array_like=True, frozen=True):
    pass


class Append(_Message, frozen=True):
    topic: str
    count: int
    size: int  # what the records count for in the topic's bytes
    create: bool | None = None
    config: TopicConfig | None = None
    key: str | None = None
    patient: bool = False  # would rather wait than be refused


class Appended(NamedTuple):
    """The commonest answer, so it is a fixed struct and not msgpack."""

    first_seq: int
    records: int
    head_seq: int
    created: bool
    deduped: bool
    wal_us: int
    fsync_us: int


class Diff(_Message, frozen=True):
    topic: str
    from_seq: int
    limit: int
    max_bytes: int
    nodes: list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: int = 0


class Diffed(_Message, frozen=True):
    """The body is the answer's JSON up to its performance block."""

    scanned: int
    waited_ms: int


class PutTopic(_Message, frozen=True):
    topic: str
    config: TopicConfig
    type: TopicType | None  # None: keep the type of a topic that exists
    create_only: bool = False  # leave one that exists as it is


class TopicPut(_Message, frozen=True):
    created: bool
    config: TopicConfig


class GetTopic(_Message, frozen=True):
    topic: str
    touch: bool


class TopicReport(_Message, frozen=True):
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


class DropTopic(_Message, frozen=True):
    topic: str
    if_empty: bool
    undo: bool = False  # only if it was made for a router, and nobody has used it since


class TopicDropped(_Message, frozen=True):
    deleted: bool


class ListTopics(_Message, frozen=True):
    prefix: str
    after: str
    limit: int
    touch: bool
    prefixes: tuple[str, ...] = ()  # only names with one of these; none: any


class TopicRow(_Message, frozen=True):
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


class TopicsListed(_Message, frozen=True):
    rows: list[TopicRow]
    more: bool


class DeleteRecords(_Message, frozen=True):
    topic: str
    before_seq: int | None
    tag: str | None
    prefix: bool  # the tag is a prefix


class RecordsDeleted(_Message, frozen=True):
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int
    fsync_us: int


class Positions(_Message, frozen=True):
    topics: list[str]


class Position(_Message, frozen=True):
    topic_id: int
    head_seq: int
    earliest_seq: int


class PositionsFound(_Message, frozen=True):
    found: list[Position | None]  # in the order asked; None: there is no such topic


class Gap(_Message, frozen=True):
    gap_from: int
    gap_to: int
    reason: str
    earliest_seq: int


class Read(_Message, frozen=True):
    topic: str
    topic_id: int  # 0: whichever has the name now
    from_seq: int
    limit: int
    max_bytes: int
    include_tags: bool
    include_meta: bool
    include_data: bool
    nodes: list[str] | None = None


class Piece(_Message, frozen=True):
    """What lies between two cursors. The body is the records' JSON, joined by commas; empty if there are none."""

    topic_id: int
    from_seq: int  # behind the gap, if there is one
    to_seq: int
    head_seq: int
    gap: Gap | None = None
    nodes: list[str | None] | None = None  # each record's origin, if asked for and any has one ...
    ends: list[int] | None = None  # ... and where its JSON ends in the body


class Follow(_Message, frozen=True):
    topic: str
    topic_id: int  # 0: whichever has the name now
    from_seq: int | None  # None: from the head
    limit: int
    max_bytes: int
    include_tags: bool
    include_meta: bool
    include_data: bool
    with_nodes: bool


class Following(_Message, frozen=True):
    topic_id: int
    at: int
    head_seq: int


class TopicGone(_Message, frozen=True):
    head_seq: int


class Unfollow(_Message, frozen=True):
    pass


class CreateSession(_Message, frozen=True):
    wid: str
    definition: bytes  # what a gateway made of the request: not looked at
    cursors: list[int]
    topic_ids: list[int]
    owner: bytes = b""  # the digest of the key that it belongs to


class SessionCreated(_Message, frozen=True):
    pass


class OpenStream(_Message, frozen=True):
    wid: str | None  # None: a WebSocket or a work stream, which have no session
    owner: bytes = b""


class StreamOpened(_Message, frozen=True):
    stream: int
    epoch: int
    definition: bytes
    cursors: list[int]
    topic_ids: list[int]
    stale: bool  # the gateway that moved the cursors died: they may lie behind what was delivered


class SaveCursors(_Message, frozen=True):
    stream: int
    cursors: list[int]
    topic_ids: list[int]


class CloseStream(_Message, frozen=True):
    stream: int
    cursors: list[int] | None
    topic_ids: list[int] | None


class TakeStream(_Message, frozen=True):
    stream: int


class RestoreSession(_Message, frozen=True):
    """After the sessions' home died: what a gateway knows of one, or of a stream without session."""

    wid: str | None
    stream: int  # 0: none is open
    epoch: int
    definition: bytes
    cursors: list[int]
    topic_ids: list[int]
    idle_ms: int
    owner: bytes = b""


# --- forwarding ---


class FollowHead(_Message, frozen=True):
    topic: str
    topic_id: int


class HeadMoved(_Message, frozen=True):
    head_seq: int


class Paced(_Message, frozen=True):
    retry_after_ms: int


class ReadRaw(_Message, frozen=True):
    topic: str
    topic_id: int
    from_seq: int
    limit: int
    max_bytes: int
    ring: bool = False  # for the next topic of a ring: it has what comes before


class RawPiece(_Message, frozen=True):
    """What lies between two cursors, as it is stored. The body is a batch (storage/columns.py) of `count` records."""

    to_seq: int
    head_seq: int
    count: int
    seqs: list[tuple[int, int]]  # the records' seqs, as (first, count) runs
    lost: int  # seqs behind the cursor whose records caps or TTL took
    complete: bool  # no seq in between was ever removed
    hops: list[int] | None  # how many routers of a ring each has passed, if any has


class OpenPipe(_Message, frozen=True):
    topic: str
    topic_id: int
    source_id: int
    at: int  # where to begin, if there is no such pipe yet
    routers: list[str]  # whose copies are counted
    ring: bool  # the two are part of a ring


class PipeOpened(_Message, frozen=True):
    at: int
    forwarded: dict[str, int]


class Forward(_Message, frozen=True):
    """The body is a batch of `count` records, or empty."""

    topic: str
    topic_id: int
    source_id: int
    from_seq: int  # of the source; refused if the pipe stands somewhere else
    to_seq: int
    count: int
    size: int
    lost: int
    complete: bool
    level: bool  # it ends at the source's head
    counts: dict[str, int]  # copies by router
    sources: list[tuple[int, int]]  # where each record comes from, as (first seq, count) runs
    hops: list[int] | None


class Forwarded(_Message, frozen=True):
    at: int  # where the pipe stands now


class ClosePipe(_Message, frozen=True):
    """Answered when every copy is in a segment that a snapshot names."""

    topic: str
    topic_id: int
    source_id: int
    keep: bool  # it stays open: only its rules change


class PipeClosed(_Message, frozen=True):
    at: int | None  # None: there was none
    forwarded: dict[str, int]


class ListPipes(_Message, frozen=True):
    pass


class PipeRow(_Message, frozen=True):
    topic: str
    topic_id: int
    source_id: int
    at: int


class PipesListed(_Message, frozen=True):
    rows: list[PipeRow]


class PutRouter(_Message, frozen=True):
    router: str
    source: str
    dest: str
    preserve_node: bool
    preserve_tag: bool
    create_dest: bool
    filter: list[str] | None
    allow_cycle: bool
    guarantee: Guarantee


class RouterRow(_Message, frozen=True):
    router: str
    source: str
    dest: str
    preserve_node: bool
    preserve_tag: bool
    filter: list[str] | None
    allow_cycle: bool
    guarantee: Guarantee
    forwarded_total: int
    created: bool = False


class GetRouter(_Message, frozen=True):
    router: str


class DropRouter(_Message, frozen=True):
    router: str


class RoutersDropped(_Message, frozen=True):
    routers: list[str]


class ListRouters(_Message, frozen=True):
    prefix: str
    source: str | None
    dest: str | None
    after: str
    limit: int
    prefixes: tuple[str, ...] = ()


class RoutersListed(_Message, frozen=True):
    rows: list[RouterRow]
    more: bool


class DropRoutersOf(_Message, frozen=True):
    topic: str


# --- queues: the coordinator asks shards ---


class OpenQueue(_Message, frozen=True):
    topic: str


class QueueOpened(_Message, frozen=True):
    topic_id: int
    config: TopicConfig
    live: int  # records in the topic; here and below those count too whose delete waits for its sync
    removals: int  # records that went otherwise than by COMPLETE_JOBS; any change means: look which
    log_from: int  # where to read the leases log from ...
    log_head: int  # ... and where it ends; 0: there is none


class QueueChanged(_Message, frozen=True):
    config: TopicConfig


class ListQueues(_Message, frozen=True):
    pass


class QueuesListed(_Message, frozen=True):
    topics: list[str]


class TakeJobs(_Message, frozen=True):
    topic: str
    topic_id: int
    wanted: list[int]  # these first, as far as they are there, ascending ...
    after: int  # ... then those behind a cursor ...
    held: list[int]  # ... but for these
    limit: int
    max_bytes: int


class JobsTaken(_Message, frozen=True):
    """The body is the jobs' JSON, joined by commas."""

    seqs: list[int]
    ends: list[int]  # where each one's JSON ends in the body, its comma counted
    wanted: int  # how many of them were asked for by seq
    gone: list[int]  # asked for, but no longer there
    at: int  # the cursor behind what was looked at
    end: bool  # there is nothing behind it
    live: int
    removals: int


class CompleteJobs(_Message, frozen=True):
    """The body is a batch of events for the leases log."""

    topic: str
    topic_id: int
    seqs: list[int]
    durable: bool  # of the leases log
    events: int
    size: int


class JobsCompleted(_Message, frozen=True):
    live: int
    removals: int
    fsync_us: int


class LogLeases(_Message, frozen=True):
    """The body is a batch of events."""

    topic: str
    topic_id: int
    durable: bool
    events: int
    size: int
    checkpoint: bool  # readers may start here


class CheckJobs(_Message, frozen=True):
    topic: str
    topic_id: int
    seqs: list[int]


class JobsChecked(_Message, frozen=True):
    gone: list[int]
    live: int
    removals: int


# --- and gateways ask the coordinator ---


class Claim(_Message, frozen=True):
    topic: str
    node: str
    max: int
    lease_ms: int | None  # None: as the topic says


class Claimed(_Message, frozen=True):
    """The body is the jobs' JSON without what belongs to the lease, joined by commas."""

    seqs: list[int]
    ends: list[int]
    leases: list[int]
    deliveries: list[int]
    deadline: int
    ready: int


class Ack(_Message, frozen=True):
    topic: str
    node: str
    seqs: list[int]
    leases: list[int] | None


class Acked(_Message, frozen=True):
    skipped: list[int]
    ready: int
    in_flight: int
    fsync_us: int


class Nack(_Message, frozen=True):
    topic: str
    node: str
    seqs: list[int]
    leases: list[int] | None
    delay_ms: int


class Nacked(_Message, frozen=True):
    skipped: list[int]
    ready: int
    in_flight: int


class Extend(_Message, frozen=True):
    topic: str
    node: str
    seqs: list[int]
    leases: list[int] | None
    lease_ms: int


class Extended(_Message, frozen=True):
    skipped: list[int]
    deadline: int


class OpenWork(_Message, frozen=True):
    topic: str
    node: str
    max: int
    lease_ms: int | None
    stream: int  # the connection; the same again if the coordinator has died meanwhile ...
    last_lease: int = 0  # ... and the last lease that it heard of then


class WorkOpened(_Message, frozen=True):
    pass


class WorkEnded(_Message, frozen=True):
    code: int
    error: str


class CloseWork(_Message, frozen=True):
    topic: str
    stream: int


class WorkSent(_Message, frozen=True):
    stream: int
    sent: int  # bytes of the bodies of its JOBS that the client's socket has taken, ever


class JobsRemoved(_Message, frozen=True):
    removals: int


class QueueRow(_Message, frozen=True):
    """What a shard says of a queue."""

    topic: str
    topic_id: int
    count: int
    removals: int
    completing: int

    @classmethod
    def of(cls, row: TopicRow) -> QueueRow:
        return cls(row.topic, row.topic_id, row.count, row.removals, row.completing)


class CountQueues(_Message, frozen=True):
    rows: list[QueueRow]


class QueueCounts(_Message, frozen=True):
    ready: int
    in_flight: int
    dead_lettered: int


class QueuesCounted(_Message, frozen=True):
    counts: list[QueueCounts | None]  # in the order asked; None: it is gone, or its shard is away


class Failure(_Message, frozen=True):
    code: str
    message: str
    detail: dict[str, Any] | None = None
    retry_after_s: int | None = None


REQUESTS: dict[Op, type[_Message]] = {
    Op.APPEND: Append,
    Op.DIFF: Diff,
    Op.PUT_TOPIC: PutTopic,
    Op.GET_TOPIC: GetTopic,
    Op.DROP_TOPIC: DropTopic,
    Op.LIST_TOPICS: ListTopics,
    Op.DELETE_RECORDS: DeleteRecords,
    Op.POSITIONS: Positions,
    Op.READ: Read,
    Op.FOLLOW: Follow,
    Op.UNFOLLOW: Unfollow,
    Op.CREATE_SESSION: CreateSession,
    Op.OPEN_STREAM: OpenStream,
    Op.SAVE_CURSORS: SaveCursors,
    Op.CLOSE_STREAM: CloseStream,
    Op.RESTORE_SESSION: RestoreSession,
    Op.FOLLOW_HEAD: FollowHead,
    Op.READ_RAW: ReadRaw,
    Op.OPEN_PIPE: OpenPipe,
    Op.FORWARD: Forward,
    Op.CLOSE_PIPE: ClosePipe,
    Op.LIST_PIPES: ListPipes,
    Op.PUT_ROUTER: PutRouter,
    Op.GET_ROUTER: GetRouter,
    Op.DROP_ROUTER: DropRouter,
    Op.LIST_ROUTERS: ListRouters,
    Op.DROP_ROUTERS_OF: DropRoutersOf,
    Op.OPEN_QUEUE: OpenQueue,
    Op.LIST_QUEUES: ListQueues,
    Op.TAKE_JOBS: TakeJobs,
    Op.COMPLETE_JOBS: CompleteJobs,
    Op.LOG_LEASES: LogLeases,
    Op.CHECK_JOBS: CheckJobs,
    Op.CLAIM: Claim,
    Op.ACK: Ack,
    Op.NACK: Nack,
    Op.EXTEND: Extend,
    Op.OPEN_WORK: OpenWork,
    Op.CLOSE_WORK: CloseWork,
    Op.COUNT_QUEUES: CountQueues,
    Op.WORK_SENT: WorkSent,
}
ANSWERS: dict[Op, type[_Message]] = {
    Op.DIFF: Diffed,
    Op.PUT_TOPIC: TopicPut,
    Op.GET_TOPIC: TopicReport,
    Op.DROP_TOPIC: TopicDropped,
    Op.LIST_TOPICS: TopicsListed,
    Op.DELETE_RECORDS: RecordsDeleted,
    Op.POSITIONS: PositionsFound,
    Op.READ: Piece,
    Op.FOLLOW: Following,
    Op.TAIL: Piece,
    Op.TOPIC_GONE: TopicGone,
    Op.CREATE_SESSION: SessionCreated,
    Op.OPEN_STREAM: StreamOpened,
    Op.TAKE_STREAM: TakeStream,
    Op.FOLLOW_HEAD: Following,
    Op.HEAD_MOVED: HeadMoved,
    Op.PACED: Paced,
    Op.READ_RAW: RawPiece,
    Op.OPEN_PIPE: PipeOpened,
    Op.FORWARD: Forwarded,
    Op.CLOSE_PIPE: PipeClosed,
    Op.LIST_PIPES: PipesListed,
    Op.PUT_ROUTER: RouterRow,
    Op.GET_ROUTER: RouterRow,
    Op.DROP_ROUTER: RoutersDropped,
    Op.LIST_ROUTERS: RoutersListed,
    Op.DROP_ROUTERS_OF: RoutersDropped,
    Op.OPEN_QUEUE: QueueOpened,
    Op.QUEUE_CHANGED: QueueChanged,
    Op.LIST_QUEUES: QueuesListed,
    Op.TAKE_JOBS: JobsTaken,
    Op.COMPLETE_JOBS: JobsCompleted,
    Op.CHECK_JOBS: JobsChecked,
    Op.CLAIM: Claimed,
    Op.ACK: Acked,
    Op.NACK: Nacked,
    Op.EXTEND: Extended,
    Op.OPEN_WORK: WorkOpened,
    Op.JOBS: Claimed,
    Op.WORK_ENDED: WorkEnded,
    Op.COUNT_QUEUES: QueuesCounted,
    Op.JOBS_REMOVED: JobsRemoved,
}
_request_decoders: dict[int, Any] = {int(op): msgspec.msgpack.Decoder(type) for op, type in REQUESTS.items()}
_answer_decoders: dict[int, Any] = {int(op): msgspec.msgpack.Decoder(type) for op, type in ANSWERS.items()}
_decode_failure = msgspec.msgpack.Decoder(Failure).decode


class Envelope(NamedTuple):
    op: int
    error: int
    correlation: int
    deadline_ms: int
    head: bytes
    body: bytes


def pack(op: Op, correlation: int, head: _Message, *body: bytes, deadline_ms: int = 0) -> bytes:
    """A request or an answer; the parts of the body are joined as the message is built, so none is copied twice."""
    encoded = _encode(head)
    return b"".join((ENVELOPE.pack(op, 0, 0, len(encoded), correlation, deadline_ms), encoded, *body))


def pack_appended(
    correlation: int,
    first_seq: int,
    records: int,
    head_seq: int,
    created: bool,
    deduped: bool,
    wal_us: int,
    fsync_us: int,
    requests: int = 1,
) -> bytes:
    """An append's answer; `requests` of them with consecutive correlations, if several were one batch."""
    return _APPENDED_WHOLE.pack(
        1,
        0,
        requests,
        _APPENDED.size,
        correlation,
        0,
        first_seq,
        records,
        head_seq,
        created,
        deduped,
        wal_us,
        fsync_us,
    )


unpack_correlation = struct.Struct("<2xH4xQ").unpack_from  # (requests answered, the first one's correlation)


def unpack_appended(message: bytes) -> tuple[int, int, int, bool, bool, int, int]:
    """first_seq, records, head_seq, created, deduped, wal_us, fsync_us"""
    return _APPENDED.unpack_from(message, 24)


def requests_in(message: bytes) -> int:
    """How many requests one message is, under consecutive correlations."""
    return int(_HEAD_LEN.unpack_from(message)[0]) if message[0] == Op.APPEND_PLAIN else 1


def pack_plain(correlation: int, deadline_ms: int, topic: bytes, size: int, counts: list[int], body: bytes) -> bytes:
    """One or more plain appends to a topic as one batch; their correlations follow each other, counts are records."""
    requests = len(counts)
    if requests == 1:
        return _PLAIN.pack(9, 0, len(topic), 1, correlation, deadline_ms, counts[0], size) + topic + body
    head = _PLAIN.pack(9, 0, len(topic), requests, correlation, deadline_ms, sum(counts), size)
    return b"".join((head, topic, struct.pack(f"<{requests}I", *counts), body))


def unpack_plain(message: bytes) -> tuple[int, int, Append, bytes, tuple[int, ...] | None]:
    """correlation, deadline, the request, the batch, and the records of each if it is several requests in one"""
    _, _, name_len, requests, correlation, deadline_ms, count, size = _PLAIN.unpack_from(message)
    at = _PLAIN_BYTES + name_len
    request = Append(message[_PLAIN_BYTES:at].decode(), count, size)
    if requests == 1:
        return correlation, deadline_ms, request, message[at:], None
    counts = struct.unpack_from(f"<{requests}I", message, at)
    return correlation, deadline_ms, request, message[at + 4 * requests :], counts


def decode_failure(message: bytes) -> ApiError:
    """The error that an answer carries; only if its error byte is set."""
    envelope = unpack(message)
    failure = _decode_failure(envelope.head)
    return ApiError(failure.code, failure.message, failure.detail, retry_after_s=failure.retry_after_s)


def pack_cancel(correlation: int) -> bytes:
    return ENVELOPE.pack(Op.CANCEL, 0, 0, 0, correlation, 0)


def pack_end_poll(correlation: int) -> bytes:
    return ENVELOPE.pack(Op.END_POLL, 0, 0, 0, correlation, 0)


def pack_failure(op: int, correlation: int, error: ApiError) -> bytes:
    encoded = _encode(Failure(error.code, error.message, error.detail, error.retry_after_s))
    return ENVELOPE.pack(op, 1, 0, len(encoded), correlation, 0) + encoded


def unpack(message: bytes) -> Envelope:
    op, error, _, head_len, correlation, deadline_ms = ENVELOPE.unpack_from(message)
    at = ENVELOPE.size + head_len
    return Envelope(op, error, correlation, deadline_ms, message[ENVELOPE.size : at], message[at:])


decode_append = msgspec.msgpack.Decoder(Append).decode


def decode_request(op: int, head: bytes) -> Any:
    return _request_decoders[op].decode(head)


def decode_answer(message: bytes) -> tuple[Any, memoryview | bytes]:
    """The answer's struct and body; an error answer is raised as the ApiError it carries."""
    if message[1]:
        raise decode_failure(message)
    if message[0] == Op.APPEND:
        return Appended._make(unpack_appended(message)), b""
    (head_len,) = _HEAD_LEN.unpack_from(message)
    at = ENVELOPE.size + head_len
    return _answer_decoders[message[0]].decode(message[ENVELOPE.size : at]), memoryview(message)[at:]
