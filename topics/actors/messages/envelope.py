"""The envelope around a message: who asked what under which number, and which struct its head is.

    envelope, then head, then body
    0    1       2  4          8             16            24
    | op | error | 0 | head len | correlation | deadline ms | head (msgpack) | body (raw bytes)
    | u8 | u8    | u16 | u32    | u64         | u64         |

The head is a small array-like struct; a body is a batch (storage/columns.py) or rendered JSON that the receiver passes
on without looking inside. The deadline is CLOCK_MONOTONIC, which all processes of a machine share; a request found
after its deadline is dropped, because nobody waits for the answer.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec

from topics.actors.messages import queues, routers, streams, topics
from topics.actors.messages.op import Message, Op
from topics.errors import ApiError

ENVELOPE = struct.Struct("<BBHIQQ")
_HEAD_LEN = struct.Struct("<4xI")
_APPENDED = struct.Struct("<QIQ??II")
_APPENDED_WHOLE = struct.Struct("<BBHIQQQIQ??II")
_PLAIN = struct.Struct("<BBHIQQIQ")  # the third field is the length of the topic's name
_PLAIN_BYTES = _PLAIN.size
_encode = msgspec.msgpack.Encoder().encode


class Failure(Message, frozen=True):
    code: str
    message: str
    detail: dict[str, Any] | None = None
    retry_after_s: int | None = None


REQUESTS: dict[Op, type[Message]] = {
    Op.APPEND: topics.Append,
    Op.DIFF: topics.Diff,
    Op.PUT_TOPIC: topics.PutTopic,
    Op.GET_TOPIC: topics.GetTopic,
    Op.DROP_TOPIC: topics.DropTopic,
    Op.LIST_TOPICS: topics.ListTopics,
    Op.DELETE_RECORDS: topics.DeleteRecords,
    Op.POSITIONS: topics.Positions,
    Op.READ: topics.Read,
    Op.FOLLOW: streams.Follow,
    Op.UNFOLLOW: streams.Unfollow,
    Op.CREATE_SESSION: streams.CreateSession,
    Op.OPEN_STREAM: streams.OpenStream,
    Op.SAVE_CURSORS: streams.SaveCursors,
    Op.CLOSE_STREAM: streams.CloseStream,
    Op.RESTORE_SESSION: streams.RestoreSession,
    Op.FOLLOW_HEAD: routers.FollowHead,
    Op.READ_RAW: routers.ReadRaw,
    Op.OPEN_PIPE: routers.OpenPipe,
    Op.FORWARD: routers.Forward,
    Op.CLOSE_PIPE: routers.ClosePipe,
    Op.LIST_PIPES: routers.ListPipes,
    Op.PUT_ROUTER: routers.PutRouter,
    Op.GET_ROUTER: routers.GetRouter,
    Op.DROP_ROUTER: routers.DropRouter,
    Op.LIST_ROUTERS: routers.ListRouters,
    Op.DROP_ROUTERS_OF: routers.DropRoutersOf,
    Op.OPEN_QUEUE: queues.OpenQueue,
    Op.LIST_QUEUES: queues.ListQueues,
    Op.TAKE_JOBS: queues.TakeJobs,
    Op.COMPLETE_JOBS: queues.CompleteJobs,
    Op.LOG_LEASES: queues.LogLeases,
    Op.CHECK_JOBS: queues.CheckJobs,
    Op.CLAIM: queues.Claim,
    Op.ACK: queues.Ack,
    Op.NACK: queues.Nack,
    Op.EXTEND: queues.Extend,
    Op.OPEN_WORK: queues.OpenWork,
    Op.CLOSE_WORK: queues.CloseWork,
    Op.COUNT_QUEUES: queues.CountQueues,
    Op.WORK_SENT: queues.WorkSent,
}
ANSWERS: dict[Op, type[Message]] = {
    Op.DIFF: topics.Diffed,
    Op.PUT_TOPIC: topics.TopicPut,
    Op.GET_TOPIC: topics.TopicReport,
    Op.DROP_TOPIC: topics.TopicDropped,
    Op.LIST_TOPICS: topics.TopicsListed,
    Op.DELETE_RECORDS: topics.RecordsDeleted,
    Op.POSITIONS: topics.PositionsFound,
    Op.READ: topics.Piece,
    Op.FOLLOW: streams.Following,
    Op.TAIL: topics.Piece,
    Op.TOPIC_GONE: streams.TopicGone,
    Op.CREATE_SESSION: streams.SessionCreated,
    Op.OPEN_STREAM: streams.StreamOpened,
    Op.TAKE_STREAM: streams.TakeStream,
    Op.KEEP_SESSION: streams.RestoreSession,
    Op.FOLLOW_HEAD: streams.Following,
    Op.HEAD_MOVED: routers.HeadMoved,
    Op.PACED: routers.Paced,
    Op.READ_RAW: routers.RawPiece,
    Op.OPEN_PIPE: routers.PipeOpened,
    Op.FORWARD: routers.Forwarded,
    Op.CLOSE_PIPE: routers.PipeClosed,
    Op.LIST_PIPES: routers.PipesListed,
    Op.PUT_ROUTER: routers.RouterRow,
    Op.GET_ROUTER: routers.RouterRow,
    Op.DROP_ROUTER: routers.RoutersDropped,
    Op.LIST_ROUTERS: routers.RoutersListed,
    Op.DROP_ROUTERS_OF: routers.RoutersDropped,
    Op.OPEN_QUEUE: queues.QueueOpened,
    Op.QUEUE_CHANGED: queues.QueueChanged,
    Op.LIST_QUEUES: queues.QueuesListed,
    Op.TAKE_JOBS: queues.JobsTaken,
    Op.COMPLETE_JOBS: queues.JobsCompleted,
    Op.CHECK_JOBS: queues.JobsChecked,
    Op.CLAIM: queues.Claimed,
    Op.ACK: queues.Acked,
    Op.NACK: queues.Nacked,
    Op.EXTEND: queues.Extended,
    Op.OPEN_WORK: queues.WorkOpened,
    Op.JOBS: queues.Claimed,
    Op.WORK_ENDED: queues.WorkEnded,
    Op.COUNT_QUEUES: queues.QueuesCounted,
    Op.JOBS_REMOVED: queues.JobsRemoved,
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


def pack(op: Op, correlation: int, head: Message, *body: bytes, deadline_ms: int = 0) -> bytes:
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


def unpack_plain(message: bytes) -> tuple[int, int, topics.Append, bytes, tuple[int, ...] | None]:
    """correlation, deadline, the request, the batch, and the records of each if it is several requests in one"""
    _, _, name_len, requests, correlation, deadline_ms, count, size = _PLAIN.unpack_from(message)
    at = _PLAIN_BYTES + name_len
    request = topics.Append(message[_PLAIN_BYTES:at].decode(), count, size)
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


def unpack_long(message: bytearray) -> tuple[int, int, topics.Append, memoryview]:
    """Correlation, deadline, head and body of a large append: without a copy of its body."""
    _, _, _, head_len, correlation, deadline_ms = ENVELOPE.unpack_from(message)
    at = ENVELOPE.size + head_len
    view = memoryview(message)
    return correlation, deadline_ms, decode_append(view[ENVELOPE.size : at]), view[at:]


decode_append = msgspec.msgpack.Decoder(topics.Append).decode


def decode_request(op: int, head: bytes) -> Any:
    return _request_decoders[op].decode(head)


def decode_answer(message: bytes) -> tuple[Any, memoryview | bytes]:
    """The answer's struct and body; an error answer is raised as the ApiError it carries."""
    if message[1]:
        raise decode_failure(message)
    if message[0] == Op.APPEND:
        return topics.Appended._make(unpack_appended(message)), b""
    (head_len,) = _HEAD_LEN.unpack_from(message)
    at = ENVELOPE.size + head_len
    return _answer_decoders[message[0]].decode(message[ENVELOPE.size : at]), memoryview(message)[at:]
