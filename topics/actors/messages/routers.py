"""Forwarding: the router process asks shards for records and gives them copies, gateways ask it for routers."""

from __future__ import annotations

from topics.actors.messages.op import Message
from topics.storage.routers import Guarantee


class FollowHead(Message, frozen=True):
    topic: str
    topic_id: int


class HeadMoved(Message, frozen=True):
    head_seq: int


class Paced(Message, frozen=True):
    retry_after_ms: int


class ReadRaw(Message, frozen=True):
    topic: str
    topic_id: int
    from_seq: int
    limit: int
    max_bytes: int
    ring: bool = False  # for the next topic of a ring: it has what comes before
    until: int | None = None  # nothing behind this seq


class RawPiece(Message, frozen=True):
    """What lies between two cursors, as it is stored. The body is a batch (storage/columns.py) of `count` records."""

    to_seq: int
    head_seq: int
    count: int
    seqs: list[tuple[int, int]]  # the records' seqs, as (first, count) runs
    lost: int  # seqs behind the cursor whose records caps or TTL took
    complete: bool  # no seq in between was ever removed
    hops: list[int] | None  # how many routers of a ring each has passed, if any has
    lost_hops: dict[int, int] | None = None  # of `lost`: how many seqs had passed so many routers of a ring


class OpenPipe(Message, frozen=True):
    topic: str
    topic_id: int
    source_id: int
    at: int  # where to begin, if there is no such pipe yet
    routers: list[str]  # whose copies are counted
    ring: bool  # the two are part of a ring


class PipeOpened(Message, frozen=True):
    at: int
    forwarded: dict[str, int]
    until: int | None = None  # the destination wants the source's records up to this seq once more


class Forward(Message, frozen=True):
    """The body is a batch of `count` records, or empty."""

    topic: str
    topic_id: int
    source_id: int
    from_seq: int  # of the source; refused if the pipe stands somewhere else
    to_seq: int
    count: int
    size: int
    lost: int  # seqs behind from_seq that the source has lost
    complete: bool
    level: bool  # it ends at the source's head
    counts: dict[str, int]  # copies by router
    sources: list[tuple[int, int]]  # where each record comes from, as (first seq, count) runs
    hops: list[int] | None
    told: list[tuple[int, int]] | None = None  # of `lost`: as many seqs that have passed so many routers; None: all, 0


class Forwarded(Message, frozen=True):
    at: int  # where the pipe stands now
    until: int | None = None  # as in PipeOpened


class ClosePipe(Message, frozen=True):
    """Answered when every copy is in a segment that a snapshot names."""

    topic: str
    topic_id: int
    source_id: int
    keep: bool  # it stays open: only its rules change


class PipeClosed(Message, frozen=True):
    at: int | None  # None: there was none
    forwarded: dict[str, int]


class ListPipes(Message, frozen=True):
    pass


class PipeRow(Message, frozen=True):
    topic: str
    topic_id: int
    source_id: int
    at: int


class PipesListed(Message, frozen=True):
    rows: list[PipeRow]


class PutRouter(Message, frozen=True):
    router: str
    source: str
    dest: str
    preserve_node: bool
    preserve_tag: bool
    create_dest: bool
    filter: list[str] | None
    allow_cycle: bool
    guarantee: Guarantee
    prefixes: tuple[str, ...] = ()  # a refusal names topics that begin so; none: any


class RouterRow(Message, frozen=True):
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


class GetRouter(Message, frozen=True):
    router: str


class DropRouter(Message, frozen=True):
    router: str


class RoutersDropped(Message, frozen=True):
    routers: list[str]


class ListRouters(Message, frozen=True):
    prefix: str
    source: str | None
    dest: str | None
    after: str
    limit: int
    prefixes: tuple[str, ...] = ()


class RoutersListed(Message, frozen=True):
    rows: list[RouterRow]
    more: bool


class DropRoutersOf(Message, frozen=True):
    topic: str
