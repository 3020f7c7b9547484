"""An SSE stream: a watch session while a client is connected to it.

Every frame but errors and heartbeats carries the whole map of cursors as its id. What counts as delivered, and is where
a reconnect goes on, is what the socket has taken; Last-Event-ID only rewinds that. If the gateway before us died, the
session's cursors may be older than what the client has; then its id decides.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from topics.actors import messages
from topics.actors.messages import Gap
from topics.errors import ApiError
from topics.gateway.auth import owner_of
from topics.gateway.streams import frames
from topics.gateway.streams.feeds import Options
from topics.gateway.streams.frames import Batch
from topics.gateway.streams.registry import Remembered, Streams, is_slow
from topics.gateway.streams.watcher import Cursor, Outlet, Watcher
from topics.keys import Key
from topics.storage.config import owner_of_name

_PRUNE = 32


class Definition(msgspec.Struct, array_like=True, frozen=True):
    """What POST /v0/watch asked for, as it is kept by the session's home."""

    topics: list[str]
    nodes: list[str] | None
    limit: int
    max_bytes: int
    include_tags: bool
    include_meta: bool
    include_data: bool
    heartbeat_ms: int


class SseStream:
    def __init__(
        self,
        streams: Streams,
        wid: str,
        opened: messages.StreamOpened,
        *,
        shards: int,
        last_id: dict[str, int] | None,
        key: Key | None = None,
    ) -> None:
        self.number = opened.stream
        self.key = key
        self._owner = owner_of(key)
        self._streams = streams
        self._wid = wid
        self._epoch = opened.epoch
        self._encoded = opened.definition
        self._definition = msgspec.msgpack.decode(opened.definition, type=Definition)
        self._shards = shards
        self._positions = _resolve(self._definition.topics, opened.cursors, last_id, trust_id=opened.stale)
        self._ids = opened.topic_ids
        self._moved = self._positions != opened.cursors  # or something was written, since the cursors were saved
        self._heartbeat_ns = self._definition.heartbeat_ms * 1_000_000
        self.due_ns = 0
        self._spoke_ns = 0
        self._cursors: list[Cursor] = []
        self._prefixes = frames.prefixes(self._definition.topics)
        self._alone = len(self._prefixes) == 1
        self._index: dict[Cursor, int] = {}
        # Written, but perhaps not taken by the socket yet: (bytes written, cursor, seq, topic id).
        self._unsent: deque[tuple[int, int, int, int]] = deque()
        self._outlet: Outlet | None = None
        self._watcher: Watcher | None = None
        self._over = False  # nothing more is written
        self._reported = False  # the home knows that it is closed
        streams.granted(self)

    @property
    def topics(self) -> list[str]:
        return self._definition.topics

    # --- the lane says ---

    def start(self, outlet: Outlet, received: bytes) -> None:
        streams, definition = self._streams, self._definition
        self._outlet = outlet
        self._spoke_ns = streams.now_ns
        self.due_ns = streams.now_ns + self._heartbeat_ns
        outlet.write(frames.RETRY)
        if self._over:  # taken by somebody else before it began
            outlet.finish()
            return
        streams.schedule(self)
        if streams.draining:
            self.end()
            return
        if (error := streams.refusal(self)) is not None:
            self.revoke(error)
            return
        watcher = self._watcher = Watcher(
            calls=streams.calls,
            feeds=streams.feeds,
            outlet=outlet,
            voice=self,
            backlog_bytes=streams.settings.stream_backlog_bytes,
            now_ns=lambda: streams.now_ns,
        )
        options = Options(
            definition.limit,
            definition.max_bytes,
            definition.include_tags,
            definition.include_meta,
            definition.include_data,
        )
        for index, topic in enumerate(definition.topics):
            cursor = Cursor(
                watcher,
                topic=topic,
                shard=owner_of_name(topic, self._shards),
                at=self._positions[index],
                topic_id=self._ids[index],
                options=options,
                nodes=definition.nodes,
            )
            self._cursors.append(cursor)
            self._index[cursor] = index
        for cursor in self._cursors:
            cursor.feed_moved()

    def received(self, data: bytes) -> None:
        """An SSE client has nothing to say."""

    def received_end(self) -> None:
        assert self._outlet is not None
        self._outlet.abort()

    def drained(self) -> None:
        watcher = self._watcher
        if watcher is not None and watcher.full_since_ns and watcher.is_drained:
            watcher.drained()

    def closed(self) -> None:
        """The connection is gone, or done with."""
        self._stop()
        if self._reported:
            return
        self._reported = True
        cursors, topic_ids = self._delivered()
        self._streams.closed(self.number, cursors, topic_ids)
        self._streams.remember(
            self._wid, Remembered(self._epoch, self._encoded, cursors, topic_ids, self._streams.now_ns, self._owner)
        )
        self._watcher = None  # it knows us as we know it, and would wait for a collection
        self._index.clear()

    def abort(self) -> None:
        if self._outlet is not None:
            self._outlet.abort()
        else:
            self.discard()

    def discard(self) -> None:
        """The client left before the stream began: nothing was delivered, so there is nothing to say."""
        self._over = True
        if not self._reported:
            self._reported = True
            self._streams.closed(self.number, None, None)

    def _stop(self) -> None:
        if not self._over:
            self._over = True
            self._delivered()
            for cursor in self._cursors:
                cursor.close()
            self._cursors = []

    # --- the registry says ---

    def tick(self, now_ns: int) -> None:
        if self._over:
            self.due_ns = now_ns + self._heartbeat_ns
            return
        if now_ns - self._spoke_ns >= self._heartbeat_ns:
            self._write(frames.sse_heartbeat(time.time_ns() // 1_000_000))
            self._spoke_ns = now_ns
        self.due_ns = self._spoke_ns + self._heartbeat_ns

    def sweep(self, now_ns: int) -> None:
        watcher = self._watcher
        if watcher is None or self._over:
            return
        watcher.sweep()
        if is_slow(watcher.full_since_ns, now_ns, self._streams.settings):
            self._fail(408, "this client reads more slowly than its topics are written; reconnect to go on from here")
            return
        if self._moved:
            self._moved = bool(self._unsent)
            self._streams.save(self.number, *self._delivered())

    def taken(self) -> None:
        """Another connection opened this session: what is not with this client yet goes to that one."""
        self.closed()
        if self._outlet is not None:
            self._outlet.abort()

    def end(self) -> None:
        self._fail(503, "the server is shutting down; reconnect to go on from here")

    def revoke(self, error: ApiError) -> None:
        self._fail(error.status, error.message)

    def restored(self) -> messages.RestoreSession:
        cursors, topic_ids = self._delivered()
        return messages.RestoreSession(
            self._wid, self.number, self._epoch, self._encoded, cursors, topic_ids, 0, self._owner
        )

    def _fail(self, code: int, error: str) -> None:
        """A last word. The session's cursors are where the client's are when the connection has closed."""
        if self._outlet is not None and not self._over:
            self._outlet.write(frames.sse_error(code, error))
            self._stop()
            self._outlet.finish()

    # --- the cursors say ---

    def tell_records(self, cursor: Cursor, batch: Batch) -> None:
        if self._alone:
            self._write_from(cursor, batch.sse_alone())
        else:
            self._write_from(cursor, b"id: %b%b" % (self._id(), batch.sse()))

    def tell_gap(self, cursor: Cursor, gap: Gap, head_seq: int, reason: bytes) -> None:
        self._write_from(cursor, b"id: %b%b" % (self._id(), frames.sse_gap(cursor.name, gap, head_seq, reason)))

    def tell_caught_up(self, cursor: Cursor, head_seq: int) -> None:
        self._write_from(cursor, b"id: %b%b" % (self._id(), frames.sse_caught_up(cursor.name, head_seq)))

    def tell_gone(self, cursor: Cursor, head_seq: int) -> None:
        self._write_from(cursor, b"id: %b%b" % (self._id(), frames.sse_gone(cursor.name, head_seq)))

    def tell_paced(self, topics: list[str], retry_after_ms: int) -> None:
        self._write(frames.sse_paced(topics, retry_after_ms))

    def _id(self) -> bytes:
        return frames.composite(zip(self._prefixes, [cursor.at for cursor in self._cursors], strict=True))

    def _write(self, data: bytes) -> None:
        assert self._outlet is not None
        self._outlet.write(data)
        self._spoke_ns = self._streams.now_ns

    def _write_from(self, cursor: Cursor, data: bytes) -> None:
        outlet = self._outlet
        assert outlet is not None
        outlet.write(data)
        self._spoke_ns = self._streams.now_ns
        self._moved = True
        unsent = self._unsent
        unsent.append((outlet.written, self._index[cursor], cursor.at, cursor.topic_id))
        if len(unsent) > _PRUNE:
            self._settle()

    # --- what counts as delivered ---

    def _settle(self) -> None:
        outlet, unsent = self._outlet, self._unsent
        assert outlet is not None
        positions, ids = self._positions, self._ids
        while unsent and unsent[0][0] <= outlet.sent:
            _, index, at, topic_id = unsent.popleft()
            positions[index], ids[index] = at, topic_id

    def _delivered(self) -> tuple[list[int], list[int]]:
        if self._outlet is not None:
            self._settle()
            if not self._unsent and self._cursors:
                # Nothing is under way: also what was passed over without a frame lies behind the client.
                self._positions = [cursor.at for cursor in self._cursors]
                self._ids = [cursor.topic_id for cursor in self._cursors]
        return list(self._positions), list(self._ids)


def _resolve(topics: list[str], cursors: list[int], last_id: dict[str, int] | None, *, trust_id: bool) -> list[int]:
    """Where a stream begins: the session's cursors, rewound to the client's id if it has one."""
    if last_id is None:
        return list(cursors)
    if trust_id:
        return [last_id.get(topic, at) for topic, at in zip(topics, cursors, strict=True)]
    return [min(at, last_id.get(topic, at)) for topic, at in zip(topics, cursors, strict=True)]
