"""Live delivery: gateways follow topics on shards, and keep their sessions and streams at home (shard 0)."""

from __future__ import annotations

from topics.actors.messages.op import Message


class Follow(Message, frozen=True):
    topic: str
    topic_id: int  # 0: whichever has the name now
    from_seq: int | None  # None: from the head
    limit: int
    max_bytes: int
    include_tags: bool
    include_meta: bool
    include_data: bool
    with_nodes: bool


class Following(Message, frozen=True):
    topic_id: int
    at: int
    head_seq: int


class TopicGone(Message, frozen=True):
    head_seq: int


class Unfollow(Message, frozen=True):
    pass


class CreateSession(Message, frozen=True):
    wid: str
    definition: bytes  # what a gateway made of the request: not looked at
    cursors: list[int]
    topic_ids: list[int]
    owner: bytes = b""  # the digest of the key that it belongs to


class SessionCreated(Message, frozen=True):
    pass


class OpenStream(Message, frozen=True):
    wid: str | None  # None: a WebSocket or a work stream, which have no session
    owner: bytes = b""


class StreamOpened(Message, frozen=True):
    stream: int
    epoch: int
    definition: bytes
    cursors: list[int]
    topic_ids: list[int]
    stale: bool  # the gateway that moved the cursors died: they may lie behind what was delivered


class SaveCursors(Message, frozen=True):
    stream: int
    cursors: list[int]
    topic_ids: list[int]


class CloseStream(Message, frozen=True):
    stream: int
    cursors: list[int] | None
    topic_ids: list[int] | None


class TakeStream(Message, frozen=True):
    stream: int


class RestoreSession(Message, frozen=True):
    """After the sessions' home died: what a gateway or the mirror knows of one, or of a stream without session. To the
    mirror: what it should know."""

    wid: str | None
    stream: int  # 0: none is open
    epoch: int
    definition: bytes
    cursors: list[int]
    topic_ids: list[int]
    idle_ms: int
    owner: bytes = b""
    stale: bool = False  # its cursors may lie behind what was delivered
    mirrored: bool = False  # told by the mirror
