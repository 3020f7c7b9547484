"""The leases log of a queue: what happened to its jobs, as records of an internal topic beside it.

Each record's data is one event in JSON; its time is the record's. An event names several jobs, because a pass hands out
many: the n-th of `seqs` goes with the n-th of `leases` and of `deliveries`. A reader that wants to know who holds what
starts at the last checkpoint and applies what follows; one that wants history reads everything.

The log's topic id is its queue's with the highest bit turned, so the same shard owns both, and a queue that was
deleted and made again has another log.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from topics.errors import CorruptData

SUFFIX = "#leases"  # no client can name a topic so
CHECKPOINT_TAG = "checkpoint"
_TURNED = 1 << 63

EventName = Literal["claimed", "released", "extended", "acked", "dead_lettered", "checkpoint"]


class JobState(msgspec.Struct, array_like=True):
    """One job of a checkpoint: it is leased, or was, or will be claimable at a later time."""

    seq: int
    state: int  # queue/lease_table.py: 1 leased, 2 expired, 3 free, 4 delayed
    node: str
    lease: int
    deadline: int
    deliveries: int
    stream: int = 0


class LeaseEvent(msgspec.Struct, omit_defaults=True):
    event: EventName
    node: str = ""
    seqs: list[int] = []
    leases: list[int] = []
    deadline: int = 0  # claimed, extended: when the lease ends; released: when the job is claimable again
    deliveries: list[int] = []  # claimed: how often each has been delivered, this time counted; absent: once
    stream: int = 0  # claimed: the connection that the jobs were pushed to
    reason: str = ""  # released: nack, expired, disconnect
    dead_lettered: int = 0  # checkpoint: jobs moved away so far
    jobs: list[JobState] = []  # checkpoint
    key: str = ""  # claimed: the idempotency key of the claim
    keys: dict[str, list[int]] = {}  # checkpoint: jobs that are leased by a claim with a key


encode_event = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LeaseEvent).decode


def decode_event(data: bytes) -> LeaseEvent:
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptData(f"an event of a leases log can't be read: {exc}") from None


def log_name(queue: str) -> str:
    return queue + SUFFIX


def is_log_name(name: str) -> bool:
    return name.endswith(SUFFIX)


def log_id(queue_id: int) -> int:
    return queue_id ^ _TURNED
