"""A topic's configuration as it is stored and shown, and the ownership of topics by shards."""

from __future__ import annotations

from typing import Literal

import msgspec
from xxhash import xxh3_64_intdigest

from topics import limits

TopicType = Literal["log", "queue"]
Discard = Literal["old", "reject"]
Durability = Literal["ephemeral", "memory", "disk", "fsync"]


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Field order is the order on the wire."""

    type: TopicType = "log"
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: Discard = "old"
    durable: bool = False
    durability: Durability = "disk"
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = limits.DEFAULT_IDEMPOTENCY_WINDOW_MS
    dedupe_node: bool = True
    lease_ms: int = limits.DEFAULT_LEASE_MS
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    leases_durable: bool = False


_BUCKETS = 0xFFFF


def bucket_of(name: str) -> int:
    """A stable 16-bit hash of a topic's name: the low bits of its id, and what decides its shard."""
    return xxh3_64_intdigest(name.encode()) & _BUCKETS


def topic_id(name: str, entropy: int) -> int:
    """48 random bits tell instances of a name apart; the bucket below them names the owner."""
    return (entropy & 0xFFFF_FFFF_FFFF) << 16 | bucket_of(name)


def epoch_of(topic_id: int) -> int:
    """What tells this life of a topic from others of its name."""
    return topic_id >> 16


def owner_of_name(name: str, shards: int) -> int:
    return bucket_of(name) % shards


def owner_of_id(topic_id: int, shards: int) -> int:
    return (topic_id & _BUCKETS) % shards
