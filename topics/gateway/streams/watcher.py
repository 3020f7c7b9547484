"""A watcher: one client's cursors over topics, and how each of them catches up, goes live, lags and ends.

    state      what it means                                   leaves by
    WAITING    level with nobody: the feed is away or behind   the feed moves: live, or reading
    READING    a READ is out, or waits for its turn            its answer: reading again, live, lagging or gone
    LIVE       stands where the feed stands; gets its pushes   the client does not take them: lagging
    LAGGING    the client has to read first                    its backlog is drained: reading
    GONE       the topic was deleted, or nobody watches it     -

Nothing is kept for a client that lags: the log is its buffer. What it missed there for good is a tombstone. What was
written to a client but not taken by its socket does not count as delivered.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from topics import limits
from topics.actors import messages
from topics.actors.messages import Gap, Op
from topics.gateway.api.types import Call, Response
from topics.gateway.calls import Calls
from topics.gateway.streams.feeds import Feed, Feeds, Options
from topics.gateway.streams.frames import Batch

_PACE_NS = limits.PACE_FRAME_MS * 1_000_000


class State(enum.IntEnum):
    WAITING = 0
    READING = 1
    LIVE = 2
    LAGGING = 3
    GONE = 4


class Outlet(Protocol):
    """Where frames go: a connection of either lane."""

    written: int  # bytes given to it, ever ...
    sent: int  # ... and taken from it by the socket

    def write(self, data: bytes) -> None: ...
    def finish(self) -> None: ...  # close when everything written is out, or soon
    def abort(self) -> None: ...  # close now
    def pause(self) -> None: ...  # stop receiving
    def resume(self) -> None: ...


class Voice(Protocol):
    """How a stream tells its client; sse.py and websocket.py."""

    def tell_records(self, cursor: Cursor, batch: Batch) -> None: ...
    def tell_gap(self, cursor: Cursor, gap: Gap, head_seq: int, reason: bytes) -> None: ...
    def tell_caught_up(self, cursor: Cursor, head_seq: int) -> None: ...
    def tell_gone(self, cursor: Cursor, head_seq: int) -> None: ...
    def tell_paced(self, topics: list[str], retry_after_ms: int) -> None: ...


class Cursor:
    __slots__ = (
        "_feed",
        "_fresh",
        "_owes_caught_up",
        "at",
        "name",
        "nodes",
        "options",
        "shard",
        "state",
        "topic",
        "topic_id",
        "watcher",
    )

    def __init__(
        self,
        watcher: Watcher,
        *,
        topic: str,
        shard: int,
        at: int,
        topic_id: int,
        options: Options,
        nodes: list[str] | None,
    ) -> None:
        self.watcher = watcher
        self.topic = topic
        self.name = topic.encode()
        self.shard = shard
        self.at = at
        self.topic_id = topic_id
        self.options = options
        self.nodes = frozenset(nodes) if nodes else None
        self.state = State.WAITING
        self._fresh = True  # has not been level since it connected or lagged
        self._owes_caught_up = False
        self._feed = self._join()

    def _join(self) -> Feed:
        with_nodes = self.nodes is not None
        return self.watcher.feeds.join(self.topic, self.shard, self.options, with_nodes=with_nodes)

    # --- the feed says ---

    def take_push(self, batch: Batch) -> None:
        """Live: what was just published."""
        watcher = self.watcher
        if watcher.full:
            del self._feed.live[self]
            self.state = State.LAGGING
            watcher.lags(self)
            return
        piece = batch.piece
        if piece.gap is not None:
            self._gap(piece, piece.gap.reason.encode())
        self.at = piece.to_seq
        shown: Batch | None = batch
        if self.nodes is not None:
            shown = batch.without(self.nodes)
        elif batch.empty:
            shown = None
        if shown is not None:
            watcher.voice.tell_records(self, shown)
        if self._owes_caught_up and piece.to_seq == piece.head_seq:
            self._owes_caught_up = False
            watcher.voice.tell_caught_up(self, piece.head_seq)

    def feed_moved(self) -> None:
        if self.state is State.WAITING:
            self.step()

    def feed_gone(self, head_seq: int) -> None:
        if self.state is not State.GONE:
            self.state = State.GONE
            self.at = max(self.at, head_seq)
            self.watcher.voice.tell_gone(self, self.at)

    def feed_paced(self, retry_after_ms: int) -> None:
        self.watcher.paced(self.topic, retry_after_ms)

    # --- catching up ---

    def step(self) -> None:
        """Waiting: see what can be done now."""
        feed = self._feed
        if feed.gone_at is not None and self.topic_id not in (0, feed.topic_id):
            # It has read on in the topic's next life already.
            self.watcher.feeds.leave(feed, self)
            feed = self._feed = self._join()
        if feed.gone_at is not None:
            self.feed_gone(feed.gone_at)
        elif feed.at is None:
            feed.waiting[self] = None
        elif self.at == feed.at and self.topic_id in (0, feed.topic_id):
            self.topic_id = feed.topic_id
            self.state = State.LIVE
            self._fresh = False
            feed.live[self] = None
            self._owes_caught_up = feed.at != feed.head_seq
            if not self._owes_caught_up:
                self.watcher.voice.tell_caught_up(self, self.at)
        else:
            self.state = State.READING
            self.watcher.wants_read(self)

    def read(self) -> None:
        head = messages.Read(
            self.topic, self.topic_id, self.at, *self.options, sorted(self.nodes) if self.nodes else None
        )
        self.watcher.calls.ask(_ReadCall(shard=self.shard, op=Op.READ, head=head), self, waits=True)

    def finish(self, value: Any) -> None:
        """The answer to a READ: (piece, body), or a Response that says why there is none."""
        watcher = self.watcher
        watcher.has_read(self)
        if self.state is not State.READING:
            return
        self.state = State.WAITING
        if isinstance(value, Response):
            if value.status == 404:
                self._feed.waiting.pop(self, None)
                self.feed_gone(0)
            else:
                self._feed.waiting[self] = None
                watcher.retry_later(self)
            return
        if watcher.full:
            # Others' answers came first and filled the backlog: this one is read again when there is room.
            self.state = State.LAGGING
            watcher.lags(self)
            return
        piece, body = value
        before = self.at
        self.topic_id = piece.topic_id
        if piece.gap is not None:
            reason = piece.gap.reason
            if self._fresh and reason not in ("recreated", "source_trim"):
                reason = "from_seq_too_old"
            self._gap(piece, reason.encode())
        self._fresh = False
        self.at = piece.to_seq
        if body:
            watcher.voice.tell_records(self, Batch(self.name, piece, body))
        if watcher.full:
            self.state = State.LAGGING
            watcher.lags(self)
        elif self.at == before and piece.gap is None and (self._feed.at is None or self._feed.at < self.at):
            self._feed.waiting[self] = None  # ahead of the feed: it will come
        else:
            self.step()

    def _gap(self, piece: messages.Piece, reason: bytes) -> None:
        assert piece.gap is not None
        self.at = piece.from_seq
        self.watcher.voice.tell_gap(self, piece.gap, piece.head_seq, reason)

    def drained(self) -> None:
        """The client has taken what it was sent."""
        if self.state is State.LAGGING:
            self.state = State.WAITING
            self._fresh = True
            self.step()

    def abort(self) -> None:
        self.watcher.abort()

    def close(self) -> None:
        self.state = State.GONE
        self.watcher.feeds.leave(self._feed, self)


class _ReadCall(Call, kw_only=True, gc=False, eq=False):
    def render(self, answer: messages.Piece, body: bytes | memoryview) -> tuple[messages.Piece, bytes | memoryview]:
        return answer, body


class Watcher:
    """The cursors of one connection, and its backlog."""

    def __init__(
        self, *, calls: Calls, feeds: Feeds, outlet: Outlet, voice: Voice, backlog_bytes: int, now_ns: Callable[[], int]
    ) -> None:
        self.calls = calls
        self.feeds = feeds
        self.voice = voice
        self.full_since_ns = 0  # since when the client takes less than it is sent
        self._outlet = outlet
        self._backlog_bytes = backlog_bytes
        self._now_ns = now_ns
        self._lagging: list[Cursor] = []
        self._wanted: deque[Cursor] = deque()
        self._reading = 0
        self._starting_reads = False
        self._retry: list[Cursor] = []
        self._paced: dict[str, int] = {}  # topics that are put off, and what the client is to be told to wait
        self._paced_ns = 0  # when it was told

    def abort(self) -> None:
        self._outlet.abort()

    def paced(self, topic: str, retry_after_ms: int) -> None:
        """Told with the next sweep: many topics are put off at the same time."""
        self._paced[topic] = retry_after_ms

    @property
    def full(self) -> bool:
        return self._outlet.written - self._outlet.sent > self._backlog_bytes

    def lags(self, cursor: Cursor) -> None:
        self._lagging.append(cursor)
        self.note_full()

    def note_full(self) -> None:
        if not self.full_since_ns:
            self.full_since_ns = self._now_ns()

    def drained(self) -> None:
        """The backlog is down to half of what it may be."""
        if self.full_since_ns:
            self.full_since_ns = 0
            lagging, self._lagging = self._lagging, []
            for cursor in lagging:
                cursor.drained()

    @property
    def is_drained(self) -> bool:
        return self._outlet.written - self._outlet.sent <= self._backlog_bytes // 2

    # --- reads: a few at a time, so that a watcher of many topics is not sent everything at once ---

    def wants_read(self, cursor: Cursor) -> None:
        if self._reading < limits.WATCH_READS:
            self._reading += 1
            cursor.read()
        else:
            self._wanted.append(cursor)

    def has_read(self, cursor: Cursor) -> None:
        self._reading -= 1
        if self._starting_reads:
            return  # a read that failed at once: whoever started it goes on
        self._starting_reads = True
        while self._wanted and self._reading < limits.WATCH_READS:
            following = self._wanted.popleft()
            if following.state is State.READING:
                self._reading += 1
                following.read()
        self._starting_reads = False

    def retry_later(self, cursor: Cursor) -> None:
        self._retry.append(cursor)

    def sweep(self) -> None:
        """Once a second: what a shard could not answer is asked again."""
        now = self._now_ns()
        if self._paced and (not self._paced_ns or now - self._paced_ns >= _PACE_NS):
            self._paced_ns = now
            paced, self._paced = self._paced, {}
            self.voice.tell_paced(sorted(paced), max(paced.values()))
        if self._retry:
            retry, self._retry = self._retry, []
            for cursor in retry:
                cursor.feed_moved()
