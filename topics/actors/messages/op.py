"""The kinds of message, and what all their heads are: array-like, so that a head is as short as its values."""

from __future__ import annotations

import enum

import msgspec


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
    END_POLL = 53  # a diff or a claim that waits is answered now; what does not wait is not touched
    KEEP_SESSION = 54  # sessions' home to router process, no answer: a copy, for a home that comes after this one


class Message(msgspec.Struct, array_like=True, frozen=True):
    pass
