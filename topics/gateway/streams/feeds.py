"""Feeds: what this gateway follows at the shards, each shared by all watchers that want the same.

A feed is a topic with the options that shape its frames. `at` is how far the shard has pushed it; None while the shard
is away or has not answered yet. Watchers that are level with it are live: a push is handed to each of them. The others
catch up by reading (watcher.py) and join when they stand where the feed stands.

A shard that comes back is asked to go on from `at`, so live watchers see neither a gap nor a repetition. A watcher that
fails to take what it is told loses its connection; the others are told.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from topics.actors import messages
from topics.actors.messages import Op
from topics.gateway.api.types import Call, Response
from topics.gateway.calls import Calls
from topics.gateway.streams.frames import Batch


class Options(NamedTuple):
    """What shapes a topic's frames."""

    limit: int
    max_bytes: int
    include_tags: bool
    include_meta: bool
    include_data: bool


class Member(Protocol):
    """A watcher's place in a topic."""

    def take_push(self, batch: Batch) -> None: ...
    def feed_moved(self) -> None: ...
    def feed_gone(self, head_seq: int) -> None: ...
    def feed_paced(self, retry_after_ms: int) -> None: ...
    def abort(self) -> None: ...


class Feed:
    __slots__ = (
        "_feeds",
        "at",
        "correlation",
        "gone_at",
        "head_seq",
        "key",
        "live",
        "shard",
        "topic",
        "topic_id",
        "users",
        "waiting",
    )

    def __init__(self, feeds: Feeds, key: tuple[str, Options, bool], shard: int) -> None:
        self._feeds = feeds
        self.key = key
        self.topic = key[0].encode()
        self.shard = shard
        self.correlation = 0
        self.topic_id = 0
        self.at: int | None = None
        self.head_seq = 0
        self.live: dict[Member, None] = {}
        self.waiting: dict[Member, None] = {}
        self.gone_at: int | None = None  # the last head of a topic that is no more
        self.users = 0  # also those that are catching up

    # The answer to FOLLOW.
    def finish(self, value: Any) -> None:
        if isinstance(value, Response):
            self._feeds.unfollowed(self)
            if value.status == 404:
                self.gone(self.at or 0)
            else:
                self._feeds.retry[self] = None
            return
        self.topic_id, self.at, self.head_seq = value.topic_id, value.at, value.head_seq
        self._release_waiting()

    def abort(self) -> None:
        """The answer could not be taken: it is asked for again."""
        self._feeds.unfollow(self)
        self._feeds.unfollowed(self)
        self._feeds.retry[self] = None

    def push(self, piece: messages.Piece, body: memoryview | bytes) -> None:
        self.at, self.head_seq = piece.to_seq, piece.head_seq
        batch = Batch(self.topic, piece, body)
        for member in tuple(self.live):
            try:
                member.take_push(batch)
            except Exception as error:
                self._feeds.failed(member, error)
        self._release_waiting()

    def gone(self, head_seq: int) -> None:
        self._feeds.forget(self)
        self.gone_at = head_seq
        for member in (*self.live, *self.waiting):
            try:
                member.feed_gone(head_seq)
            except Exception as error:
                self._feeds.failed(member, error)
        self.live.clear()
        self.waiting.clear()

    def _release_waiting(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for member in waiting:
            try:
                member.feed_moved()
            except Exception as error:
                self._feeds.failed(member, error)


class Feeds:
    def __init__(self, calls: Calls, *, shards: int) -> None:
        self._calls = calls
        self._by_key: dict[tuple[str, Options, bool], Feed] = {}
        self._by_correlation: list[dict[int, Feed]] = [{} for _ in range(shards)]
        self.retry: dict[Feed, None] = {}
        self.pushes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def join(self, topic: str, shard: int, options: Options, *, with_nodes: bool) -> Feed:
        key = (topic, options, with_nodes)
        feed = self._by_key.get(key)
        if feed is None:
            feed = self._by_key[key] = Feed(self, key, shard)
            self._follow(feed)
        feed.users += 1
        return feed

    def leave(self, feed: Feed, member: Member) -> None:
        """The last one to leave tells the shard."""
        feed.live.pop(member, None)
        feed.waiting.pop(member, None)
        feed.users -= 1
        if feed.users == 0 and self._by_key.get(feed.key) is feed:
            self.unfollow(feed)
            self.forget(feed)

    def unfollow(self, feed: Feed) -> None:
        if feed.correlation:
            self._calls.tell(feed.shard, messages.pack(Op.UNFOLLOW, feed.correlation, messages.Unfollow()))

    def forget(self, feed: Feed) -> None:
        if self._by_key.get(feed.key) is feed:
            del self._by_key[feed.key]
        self.unfollowed(feed)
        feed.at = None
        self.retry.pop(feed, None)

    def failed(self, member: Member, error: Exception) -> None:
        self._calls.failed(member, error)

    def unfollowed(self, feed: Feed) -> None:
        self._by_correlation[feed.shard].pop(feed.correlation, None)
        feed.correlation = 0

    # --- talking to shards ---

    def _follow(self, feed: Feed) -> None:
        topic, options, with_nodes = feed.key
        head = messages.Follow(topic, feed.topic_id, feed.at, *options, with_nodes)
        correlation = self._calls.ask(Call(shard=feed.shard, op=Op.FOLLOW, head=head), feed)
        if correlation:
            feed.correlation = correlation
            self._by_correlation[feed.shard][correlation] = feed

    def take(self, shard: int, message: bytes) -> bool:
        """A message that nobody asked for; False if it is not a feed's."""
        op = message[0]
        if op not in (Op.TAIL, Op.TOPIC_GONE, Op.FOLLOW, Op.PACED):
            return False
        _, correlation = messages.unpack_correlation(message)
        feed = self._by_correlation[shard].get(correlation)
        if op == Op.FOLLOW:
            if not message[1]:  # an answer that came too late: nobody uses this one
                self._calls.tell(shard, messages.pack(Op.UNFOLLOW, correlation, messages.Unfollow()))
        elif feed is not None and message[1]:
            self.unfollowed(feed)  # it could not be read; a later try may
            self.retry[feed] = None
        elif feed is not None:
            answer, body = messages.decode_answer(message)
            if op == Op.TAIL:
                self.pushes += 1
                feed.push(answer, body)
            elif op == Op.PACED:
                for member in feed.live:
                    member.feed_paced(answer.retry_after_ms)
            else:
                feed.gone(answer.head_seq)
        return True

    def link_down(self, shard: int) -> None:
        """Live watchers stay where they are; `at` is kept, to go on from."""
        for feed in self._by_correlation[shard].values():
            feed.correlation = 0
        self._by_correlation[shard].clear()

    def link_up(self, shard: int) -> None:
        for feed in list(self._by_key.values()):
            if feed.shard == shard and not feed.correlation:
                self.retry.pop(feed, None)
                self._follow(feed)

    def sweep(self) -> None:
        retry, self.retry = self.retry, {}
        for feed in retry:
            if not feed.correlation and self._by_key.get(feed.key) is feed:
                self._follow(feed)
