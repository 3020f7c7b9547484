"""Bodies of the WAL frames that are not batches: msgpack arrays, so fields may only be added at the end."""

from __future__ import annotations

import msgspec

from topics.storage.config import TopicConfig
from topics.storage.format import FrameType
from topics.storage.frames import Frame


class PipeFrame(msgspec.Struct, array_like=True, frozen=True):
    """The topic holds copies of another one's records (a router's destination)."""

    source_id: int
    at: int  # the source's seq up to which it has been copied, when this was written
    ring: bool = False  # the two are part of a ring
    logged: bool = False  # every copy is in the log by its seqs (CopiesLine); older programs logged none


class TopicFrame(msgspec.Struct, array_like=True, frozen=True):
    """A topic was created or configured; the frame's topic id is the instance."""

    name: str
    config: TopicConfig
    created_ms: int
    ceiling: int
    cap_seq: int = 0  # what caps and TTL had taken by then, before the new config
    ttl_seq: int = 0
    pipe: PipeFrame | None = None


class CopiesLine(msgspec.Struct, array_like=True, frozen=True):
    """Which seqs of a router's destination stand for which of its source's. The records are in the source's log: they
    are not written a second time.

    Two kinds of line name no new seqs: the position alone, where nothing had to be copied (`first_seq` is above
    `last_seq`, up to which seqs belong to earlier copies), and the sizes alone of copies that are in the log already
    (a count, but no sources)."""

    topic_id: int  # of the destination
    ts: int
    first_seq: int
    last_seq: int
    at: int  # the source's seq up to which it has been copied with these
    count: int = 0  # as many copies; 0: the seqs stand for records that the source lost before they were copied
    size: int = 0  # what the copies count for in the topic's `bytes`
    sources: list[tuple[int, int]] = []  # the source's seqs, as (first, count) runs
    counts: dict[str, int] = {}  # copies by router
    hops: list[int] | None = None  # of copies in a ring: how many routers each has passed. Without copies: as many of
    # the seqs, then how many routers these have passed, and so on
    sizes: list[int] = []  # of each copy, if a cap may count them; one number if all are of that size

    @property
    def names_seqs(self) -> bool:
        return self.first_seq <= self.last_seq and (self.count == 0 or bool(self.sources))


class HeadFrame(msgspec.Struct, array_like=True, frozen=True):
    """The frame's first_seq is the new ceiling: no seq above it has been given out. head_seq was the highest then."""

    head_seq: int
    copies: list[CopiesLine] = []  # in a frame of no topic: what destinations got in one round, all of them


class DeleteFrame(msgspec.Struct, array_like=True, frozen=True):
    """Records a client removed: all below a seq, or these seqs. Exactly one of the two is set."""

    before_seq: int | None = None
    seqs: list[int] | None = None
    cap_seq: int = 0  # what caps and TTL had taken before this delete made room
    ttl_seq: int = 0
    sources: list[int] = []  # of older programs: those of the copies that were in no segment yet, one each
    copies: int = 0  # of older programs: how many of them were routers' copies that were in no segment yet
    trims: list[tuple[int, int]] = []  # not deleted: copies that went with a process, and the source has them no more
    deleted: int = 0  # with before_seq: how many records that took; older programs did not say


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(HeadFrame).decode


def encode_head(frame: HeadFrame) -> bytes:
    """Without its last field where that says nothing, as the next one."""
    return _encode(frame) if frame.copies else _encode((frame.head_seq,))


def decode_copies(frame: Frame) -> list[CopiesLine]:
    """Of any frame: what it says of copies."""
    if frame.type != FrameType.HEAD or frame.first_seq:
        return []
    return _decode_head(frame.body).copies


def encode_line(line: CopiesLine) -> bytes:
    """Likewise."""
    return _encode(line if line.sizes else msgspec.structs.astuple(line)[:-1])


def encode_delete(frame: DeleteFrame) -> bytes:
    """Likewise."""
    silent = 0 if frame.deleted else 1 if frame.trims else 2 if frame.copies else 3
    fields = msgspec.structs.astuple(frame)
    return _encode(fields[: len(fields) - silent])
