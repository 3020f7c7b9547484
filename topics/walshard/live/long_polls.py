"""Long polls: diffs that found nothing and wait for a record or for their time to end.

Each has a cursor, which stands at the head whenever nothing is published: a reader's own records, which don't end its
poll, are looked at once.

A topic may have thousands of them, and one record answers them all: whom a round has no time for is answered in the
next, in the order in which they came.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable

from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import CorruptData, Unreachable, topic_not_found, unreadable
from topics.walshard.log.commit import ReplyTo
from topics.walshard.topic import reads
from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.topic import Topic

_LOOK_NS = 10_000_000  # half of the 20 ms of a round ...
_LOOKS = 64  # ... but so many in any case


class _Poll:
    __slots__ = ("at", "correlation", "deadline_ns", "done", "own", "reply_to", "request", "since_ns", "topic", "woken")

    def __init__(self, topic: Topic, request: messages.Diff, reply_to: ReplyTo, correlation: int) -> None:
        self.topic = topic
        self.request = request
        self.reply_to = reply_to
        self.correlation = correlation
        self.since_ns = time.monotonic_ns()
        self.deadline_ns = self.since_ns + request.wait_ms * 1_000_000
        self.at = request.from_seq
        self.own = 0  # records of the reader itself that it has passed
        self.done = False
        self.woken = False  # there is something new, and no time yet to look at it


class LongPolls:
    def __init__(self, cache: BatchCache, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._cache = cache
        self._clock = clock
        self._woken: deque[_Poll] = deque()
        self._by_topic: dict[int, list[_Poll]] = {}
        self._deadlines: list[tuple[int, int, _Poll]] = []

    def add(self, topic: Topic, request: messages.Diff, reply_to: ReplyTo, correlation: int) -> None:
        poll = _Poll(topic, request, reply_to, correlation)
        self._by_topic.setdefault(topic.id, []).append(poll)
        heapq.heappush(self._deadlines, (poll.deadline_ns, correlation, poll))

    def wake(self, topic: Topic) -> None:
        """Something was published."""
        polls = self._by_topic.get(topic.id)
        if polls is None:
            return
        late = False
        until_ns, looks = self._clock() + _LOOK_NS, 0
        for poll in polls:
            if poll.done or poll.woken:
                continue
            if late:
                poll.woken = True
                self._woken.append(poll)
                continue
            self._look(poll)
            looks += 1
            late = looks >= _LOOKS and self._clock() > until_ns
        self._forget_done([topic.id])

    def topic_dropped(self, topic: Topic) -> None:
        for poll in self._by_topic.pop(topic.id, []):
            if not poll.done:
                poll.done = True
                failure = messages.pack_failure(Op.DIFF, poll.correlation, topic_not_found(topic.name))
                poll.reply_to.send_always(failure)

    def end_due(self, refresh: Callable[[Topic], None]) -> None:
        """Once a round: answer the polls whose time is up, and look at those that were woken; refresh brings a topic's
        retention up to date first."""
        deadlines, woken = self._deadlines, self._woken
        if not deadlines and not woken:
            return
        now = self._clock()
        looked: set[int] = set()
        looks = 0
        while True:
            if last := bool(deadlines) and (deadlines[0][2].done or deadlines[0][0] <= now):
                poll = heapq.heappop(deadlines)[2]
            elif woken:
                poll = woken.popleft()
            else:
                break
            poll.woken = False
            if poll.done:
                continue
            refresh(poll.topic)
            self._look(poll, last=last)
            looked.add(poll.topic.id)
            looks += 1
            if looks >= _LOOKS and self._clock() > now + _LOOK_NS:
                break
        self._forget_done(looked)

    def end(
        self, refresh: Callable[[Topic], None], reply_to: ReplyTo | None = None, correlation: int | None = None
    ) -> None:
        """Answer one poll, or all of them, as if its time were up: a process that keeps it waiting is about to end."""
        ended = set()
        for _, known, poll in self._deadlines:
            if not poll.done and reply_to in (None, poll.reply_to) and correlation in (None, known):
                refresh(poll.topic)
                self._look(poll, last=True)
                ended.add(poll.topic.id)
        self._forget_done(ended)

    def cancel(self, reply_to: ReplyTo, correlation: int | None = None) -> None:
        """The caller of one poll, or of all from one peer, has gone."""
        topics = set()
        for _, known, poll in self._deadlines:
            if poll.reply_to is reply_to and correlation in (None, known):
                poll.done = True
                topics.add(poll.topic.id)
        self._forget_done(topics)

    def _look(self, poll: _Poll, *, last: bool = False) -> None:
        """Answer it if there is something to tell, or for the last time."""
        try:
            reading = self._read(poll)
        except (CorruptData, Unreachable, OSError) as error:  # nobody's but its reader's
            poll.done = True
            poll.reply_to.send_always(messages.pack_failure(Op.DIFF, poll.correlation, unreadable(error)))
            return
        if reading.found or last:
            self._finish(poll, reading)

    def _read(self, poll: _Poll) -> reads.Reading:
        """In place: what has come since it last looked is among the newest."""
        topic, request = poll.topic, poll.request
        if request.nodes and topic.config.dedupe_node:
            poll.at, own = reads.behind_own(topic, request.nodes, self._cache, from_seq=poll.at)
            poll.own += own
        reading = reads.read(topic, request, self._cache, from_seq=poll.at, nodes=request.nodes, in_place=True)
        if not reading.found:
            poll.at = reading.next_from_seq
        return reading._replace(scanned=reading.scanned + poll.own)

    @property
    def next_deadline_ns(self) -> int | None:
        if self._woken:
            return 0  # at once
        return self._deadlines[0][0] if self._deadlines else None

    def _finish(self, poll: _Poll, reading: reads.Reading) -> None:
        poll.done = True
        waited_ms = (time.monotonic_ns() - poll.since_ns) // 1_000_000
        poll.reply_to.send_always(reads.diffed(poll.topic, reading, poll.correlation, waited_ms=waited_ms))

    def _forget_done(self, topic_ids: Iterable[int]) -> None:
        for topic_id in topic_ids:
            left = [poll for poll in self._by_topic.get(topic_id, []) if not poll.done]
            if left:
                self._by_topic[topic_id] = left
            else:
                self._by_topic.pop(topic_id, None)
