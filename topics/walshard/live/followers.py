"""Followers of topics: what is published goes to them without being asked for.

A gateway follows a topic once per set of options, however many clients watch it. Rules:

- a tail is a cursor; a push is what lies between it and the head, so what a round published is one push, and what was
  held back comes with the next one. Nothing is queued here.
- whose turn it is depends on its topic's priority and how long it has waited (priority_queue.py). Under pressure pushes
are held
  for a moment, to become fewer and larger, or those of the lowest bands are put off and their followers told so.
- a follower gets its next push when it has taken the last one out of its ring: while it is busy handing records to
  a thousand clients, the next push grows instead of waiting in line.
- a round pushes for a limited time; who comes after that is first in the next.
- an answer to a READ that reaches the head goes out behind the pushes up to the same seq. Rings keep order, so a
  watcher that has caught up stands exactly where the tail stands, and joins it without a gap.

A crash of the follower ends its tails; a crash of the shard ends all of them, and followers ask again from where they
are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import CorruptData, Unreachable, being_rebuilt, topic_not_found, unreadable
from topics.walshard.live.priority_queue import AGE_TICK_MS, DEFERRED, Bands
from topics.walshard.tiering.fetcher import Away, Fetcher
from topics.walshard.topic import reads
from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.priority import effective_priority
from topics.walshard.topic.topic import Topic

_WAKE_UP = 2**31  # a word that something is there, for processes of ours: never put off
_UNFLUSHED = -1
_COALESCE_NS = limits.COALESCE_MS * 1_000_000
_PACE_MS = limits.PACE_FRAME_MS
_PUSH_NS = 10_000_000  # half of the 20 ms of a round ...
_PUSHES = 16  # ... but so many pushes in any case: who is not run for a moment does not fall behind for it
_ALIGN_PUSHES = 16  # a tail further behind its head than this catches up by itself


class Follower(Protocol):
    """A link's writer."""

    outbox_bytes: int

    @property
    def position(self) -> int: ...
    def send_always(self, message: bytes) -> None: ...
    def wake_after(self, position: int) -> bool: ...


class _Tail:
    __slots__ = ("at", "correlation", "fetching", "follower", "paced_ms", "request", "topic")

    def __init__(
        self,
        topic: Topic,
        request: messages.Follow | messages.FollowHead,
        follower: Follower,
        correlation: int,
        at: int,
    ) -> None:
        self.topic = topic
        self.request = request
        self.follower = follower
        self.correlation = correlation
        self.at = at
        self.paced_ms = 0  # when its follower was last told that it has to wait
        self.fetching = False  # what comes next is on its way from the cold tier

    @property
    def behind(self) -> bool:
        return self.at != self.topic.head_seq


class Tails:
    def __init__(
        self,
        *,
        topics: dict[str, Topic],
        cache: BatchCache,
        fetcher: Fetcher,
        refresh: Callable[[Topic], None],
        now_ms: Callable[[], int],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock = clock
        self._topics = topics
        self._cache = cache
        self._fetcher = fetcher
        self._refresh = refresh
        self._now_ms = now_ms
        self._by_topic: dict[int, list[_Tail]] = {}
        self._by_correlation: dict[tuple[int, int], _Tail] = {}
        self._behind: Bands[_Tail] = Bands()
        self.coalescing = False  # the governor's wishes
        self.deferring = False
        self._pushed_ns = 0
        self._marks: dict[Follower, int] = {}  # where a follower's last push ends in its ring
        self.pushes = 0
        self.handlers: dict[int, Callable[[Any, Any, int], bytes | None]] = {
            Op.POSITIONS: self._positions,
            Op.READ: self._read,
            Op.FOLLOW: self._follow,
            Op.FOLLOW_HEAD: self._follow_head,
            Op.UNFOLLOW: self._unfollow,
        }

    def __len__(self) -> int:
        return len(self._by_correlation)

    # --- what followers ask ---

    def _positions(self, request: messages.Positions, follower: Follower, correlation: int) -> bytes:
        found: list[messages.Position | None] = []
        for name in request.topics:
            topic = self._topics.get(name)
            if topic is None:
                found.append(None)
                continue
            if topic.rebuilding:
                raise being_rebuilt(name)
            self._refresh(topic)
            if request.touch:
                topic.last_read_ts = self._now_ms()
            found.append(messages.Position(topic.id, topic.head_seq, topic.earliest_seq))
        return messages.pack(Op.POSITIONS, correlation, messages.PositionsFound(found))

    def _read(self, request: messages.Read, follower: Follower, correlation: int) -> bytes:
        topic = self._existing(request.topic)
        from_seq = request.from_seq
        if request.topic_id and request.topic_id != topic.id:
            from_seq = topic.head_seq + 1  # a cursor of another life of this name
        answer, to_seq = reads.piece(Op.READ, topic, request, self._cache, correlation, from_seq=from_seq)
        if to_seq == topic.head_seq:
            for tail in self._by_topic.get(topic.id, ()):
                if tail.follower is follower and tail.at != to_seq:
                    self._align(tail)
        return answer

    def _follow(self, request: messages.Follow, follower: Follower, correlation: int) -> bytes:
        topic = self._existing(request.topic)
        if request.topic_id and request.topic_id != topic.id:
            raise topic_not_found(request.topic)  # the one that was followed is gone
        at = topic.head_seq if request.from_seq is None else request.from_seq
        tail = _Tail(topic, request, follower, correlation, at)
        self._by_topic.setdefault(topic.id, []).append(tail)
        self._by_correlation[id(follower), correlation] = tail
        if tail.behind:
            self._fell_behind(tail)
        return messages.pack(Op.FOLLOW, correlation, messages.Following(topic.id, at, topic.head_seq))

    def _follow_head(self, request: messages.FollowHead, follower: Follower, correlation: int) -> bytes:
        """For who wants to know that there is something, and reads it by itself."""
        topic = self._topics.get(request.topic)
        if topic is None or topic.id != request.topic_id:
            raise topic_not_found(request.topic)
        tail = _Tail(topic, request, follower, correlation, topic.head_seq)
        self._by_topic.setdefault(topic.id, []).append(tail)
        self._by_correlation[id(follower), correlation] = tail
        following = messages.Following(topic.id, topic.head_seq, topic.head_seq)
        return messages.pack(Op.FOLLOW_HEAD, correlation, following)

    def _unfollow(self, request: messages.Unfollow, follower: Follower, correlation: int) -> None:
        tail = self._by_correlation.pop((id(follower), correlation), None)
        if tail is not None:
            self._forget(tail)

    def _existing(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise topic_not_found(name)
        if topic.rebuilding:
            raise being_rebuilt(name)
        self._refresh(topic)
        topic.last_read_ts = self._now_ms()
        return topic

    # --- what happens to topics ---

    def published(self, topic: Topic) -> None:
        if topic.rebuilding:
            return
        for tail in self._by_topic.get(topic.id, ()):
            if tail not in self._behind and not tail.fetching:
                self._fell_behind(tail)

    def filled(self, topic: Topic) -> None:
        """Copies that had no bytes have them now: routers behind it can go on, though it is not shown to anyone yet."""
        for tail in self._by_topic.get(topic.id, ()):
            if isinstance(tail.request, messages.FollowHead) and tail not in self._behind:
                self._fell_behind(tail)

    def _fell_behind(self, tail: _Tail) -> None:
        self._behind.add(tail, self._priority(tail), now_ms=self._now_ms())

    def _priority(self, tail: _Tail) -> int:
        if isinstance(tail.request, messages.FollowHead):
            return _WAKE_UP
        topic = tail.topic
        return effective_priority(topic.config, last_read_ts=topic.last_read_ts, now_ms=self._now_ms())

    def topic_dropped(self, topic: Topic) -> None:
        for tail in self._by_topic.pop(topic.id, ()):
            del self._by_correlation[id(tail.follower), tail.correlation]
            self._behind.discard(tail)
            gone = messages.TopicGone(topic.head_seq)
            tail.follower.send_always(messages.pack(Op.TOPIC_GONE, tail.correlation, gone))

    def follower_gone(self, follower: Follower) -> None:
        for tail in [tail for tail in self._by_correlation.values() if tail.follower is follower]:
            del self._by_correlation[id(follower), tail.correlation]
            self._forget(tail)
        self._marks.pop(follower, None)

    def _forget(self, tail: _Tail) -> None:
        self._behind.discard(tail)
        left = [other for other in self._by_topic[tail.topic.id] if other is not tail]
        if left:
            self._by_topic[tail.topic.id] = left
        else:
            del self._by_topic[tail.topic.id]

    # --- pushing ---

    def can_push(self) -> bool:
        """Whether a tail that was held back may go on: its follower has taken what it was sent. If not, it rings when
        it has; a process asks this before it goes to sleep, when everything is in the rings."""
        if not self._behind or self.coalescing:
            return False
        followers = {tail.follower for tail in self._behind.above(self._floor)}
        return any([self._ready(follower) for follower in followers])

    @property
    def next_due_ns(self) -> int | None:
        """When something is to be pushed, or to be looked at again, though nobody rings."""
        if not self._behind or not (self.coalescing or self.deferring):
            return None
        return self._pushed_ns + (_COALESCE_NS if self.coalescing else AGE_TICK_MS * 1_000_000)

    @property
    def _floor(self) -> int:
        return DEFERRED if self.deferring else 0

    def push(self, now_ns: int = 0) -> bool:
        """Once a round, behind the answers: send what is behind to whoever is ready for it, in turns."""
        behind = self._behind
        if not behind or (self.coalescing and now_ns - self._pushed_ns < _COALESCE_NS):
            return False
        self._pushed_ns = now_ns
        now_ms = self._now_ms()
        behind.age(now_ms, self._priority)
        floor = self._floor
        budget = {
            follower: limits.PUSH_BYTES if self._ready(follower) else 0
            for follower in {tail.follower for tail in behind.above(floor)}
        }

        clock = self._clock
        until_ns = clock() + _PUSH_NS
        enough = self.pushes + _PUSHES

        def push(tail: _Tail) -> int:
            size = self._push(tail)
            budget[tail.follower] -= size
            if self.pushes >= enough and clock() > until_ns:
                budget.update(dict.fromkeys(budget, 0))
            return size

        behind.serve(
            now_ms=now_ms,
            ready=lambda tail: budget[tail.follower] > 0,
            push=push,
            behind=lambda tail: tail.behind and not tail.fetching,
            priority=self._priority,
            floor=floor,
        )
        if floor:
            self._tell_paced(floor, now_ms)
        return True

    def _tell_paced(self, floor: int, now_ms: int) -> None:
        """Who is put off should know why nothing comes."""
        for tail in self._behind.below(floor):
            if now_ms - tail.paced_ms >= _PACE_MS:
                tail.paced_ms = now_ms
                paced = messages.pack(Op.PACED, tail.correlation, messages.Paced(limits.PACE_RETRY_MS))
                tail.follower.send_always(paced)

    def _ready(self, follower: Follower) -> bool:
        if follower.outbox_bytes > limits.PUSH_BYTES:
            return False  # the ring is full; there is a wake-up when it no longer is
        mark = self._marks.get(follower, 0)
        if mark == _UNFLUSHED:
            mark = self._marks[follower] = follower.position
        return follower.wake_after(mark)

    def _push(self, tail: _Tail) -> int:
        topic = tail.topic
        self._refresh(topic)
        if isinstance(tail.request, messages.Follow):
            topic.last_read_ts = self._now_ms()
        try:
            message, tail.at = self._piece(tail)
        except Away as away:
            tail.fetching = True
            self._fetcher.fetch(away, partial(self._fetched, tail), asked_by=tail.follower, correlation=-1)
            return 0
        except (CorruptData, Unreachable, OSError) as error:
            # One topic's damage is not the shard's: its followers are told and may ask again.
            message = messages.pack_failure(Op.TAIL, tail.correlation, unreadable(error))
            del self._by_correlation[id(tail.follower), tail.correlation]
            self._forget(tail)
            tail.at = topic.head_seq
        tail.follower.send_always(message)
        self._marks[tail.follower] = _UNFLUSHED
        self.pushes += 1
        return len(message)

    def _fetched(self, tail: _Tail) -> None:
        """Pushed at once: nothing says that a small cache still has it later."""
        tail.fetching = False
        if self._by_correlation.get((id(tail.follower), tail.correlation)) is not tail:
            return
        if self._ready(tail.follower):
            self._push(tail)
        if tail.behind and not tail.fetching:
            self._fell_behind(tail)

    def _piece(self, tail: _Tail) -> tuple[bytes, int]:
        if isinstance(tail.request, messages.FollowHead):
            head_seq = tail.topic.head_seq
            return messages.pack(Op.HEAD_MOVED, tail.correlation, messages.HeadMoved(head_seq)), head_seq
        return reads.piece(
            Op.TAIL,
            tail.topic,
            tail.request,
            self._cache,
            tail.correlation,
            from_seq=tail.at,
            origins=tail.request.with_nodes,
        )

    def _align(self, tail: _Tail) -> None:
        for _ in range(_ALIGN_PUSHES):
            if tail.fetching or tail.follower.outbox_bytes > limits.PUSH_BYTES:
                return
            self._push(tail)
            if tail.fetching:
                self._behind.discard(tail)
                return
            if tail.at == tail.topic.head_seq:
                self._behind.discard(tail)
                return
