"""Bodies of the WAL frames that are not batches. Both are msgpack arrays, so fields may only be added at the end."""

from __future__ import annotations

import msgspec

from topics.storage.config import TopicConfig


class PipeFrame(msgspec.Struct, array_like=True, frozen=True):
    """The topic holds copies of another one's records (a router's destination)."""

    source_id: int
    at: int  # the source's seq up to which it has been copied, when this was written
    ring: bool = False  # the two are part of a ring


class TopicFrame(msgspec.Struct, array_like=True, frozen=True):
    """A topic was created or configured; the frame's topic id is the instance."""

    name: str
    config: TopicConfig
    created_ms: int
    ceiling: int
    cap_seq: int = 0  # what caps and TTL had taken by then, before the new config
    ttl_seq: int = 0
    pipe: PipeFrame | None = None


class HeadFrame(msgspec.Struct, array_like=True, frozen=True):
    """The frame's first_seq is the new ceiling: no seq above it has been given out. head_seq was the highest then."""

    head_seq: int


class DeleteFrame(msgspec.Struct, array_like=True, frozen=True):
    """Records a client removed: all below a seq, or these seqs. Exactly one of the two is set."""

    before_seq: int | None = None
    seqs: list[int] | None = None
    cap_seq: int = 0  # what caps and TTL had taken before this delete made room
    ttl_seq: int = 0
    sources: list[int] = []  # of copies that are in no segment yet: the source's seq x 16 + which router's copy
