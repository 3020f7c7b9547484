"""The long-lived connections of this gateway: their number at home, their clocks, their end.

A stream is counted by the sessions' home (walshard/sessions.py) from before its first byte until it is closed; a stream
that never got to its client is given back. Once a second cursors that moved are saved there, and clients that
don't read are dealt with. If the home dies, it is told again what is open and which sessions were served here lately.
A fault in one stream ends that one alone.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.gateway.admission.budget import Budget
from topics.gateway.auth import Guard
from topics.gateway.calls import Calls
from topics.gateway.http1.append_batch import PlainEntry, PlainRoute
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.watcher import Outlet
from topics.gateway.streams.work_registry import Works
from topics.keys import Key
from topics.settings import Settings

HOME = 0  # the shard that keeps the sessions


class Stream(Protocol):
    """What a lane needs of a stream, and the registry."""

    number: int  # given by the home
    due_ns: int  # when it wants to be ticked

    @property
    def key(self) -> Key | None: ...  # whose it is

    def start(self, outlet: Outlet, received: bytes) -> None: ...
    def received(self, data: bytes) -> None: ...
    def received_end(self) -> None: ...
    def drained(self) -> None: ...
    def closed(self) -> None: ...
    def discard(self) -> None: ...
    def tick(self, now_ns: int) -> None: ...
    def sweep(self, now_ns: int) -> None: ...
    def taken(self) -> None: ...
    def end(self) -> None: ...
    def revoke(self, error: ApiError) -> None: ...
    def restored(self) -> messages.RestoreSession: ...
    def abort(self) -> None: ...


class Remembered(msgspec.Struct):
    """A session that was served here and may be asked for again."""

    epoch: int
    definition: bytes
    cursors: list[int]
    topic_ids: list[int]
    since_ns: int
    owner: bytes = b""


class Streams:
    def __init__(self, *, settings: Settings, calls: Calls, feeds: Feeds, guard: Guard | None = None) -> None:
        self.settings = settings
        self._guard = guard or Guard((), probes=False)
        self.calls = calls
        self.feeds = feeds
        self.now_ns = time.monotonic_ns()
        self.publish: Callable[[PlainRoute, PlainEntry, int, bytes], None] = _nowhere
        self.send_runs: Callable[[], None] = lambda: None  # pass on what was published so far
        self.works = Works(calls)
        self.budget = Budget.of(settings)  # of request bytes in memory
        self._open: dict[int, Stream] = {}
        self._sessions: OrderedDict[str, Remembered] = OrderedDict()
        self._due: list[tuple[int, int]] = []  # when, and the number of a stream that may be gone by then
        self.draining = False

    def __len__(self) -> int:
        return len(self._open)

    # --- lives ---

    def granted(self, stream: Stream) -> None:
        """The home counts it from now on, whether its client is still there or not."""
        self._open[stream.number] = stream

    def schedule(self, stream: Stream) -> None:
        heapq.heappush(self._due, (stream.due_ns, stream.number))

    def closed(self, number: int, cursors: list[int] | None, topic_ids: list[int] | None) -> None:
        self._open.pop(number, None)
        message = messages.pack(Op.CLOSE_STREAM, 0, messages.CloseStream(number, cursors, topic_ids))
        self.calls.tell(HOME, message)

    def save(self, number: int, cursors: list[int], topic_ids: list[int]) -> None:
        self.calls.tell(HOME, messages.pack(Op.SAVE_CURSORS, 0, messages.SaveCursors(number, cursors, topic_ids)))

    def remember(self, wid: str, session: Remembered) -> None:
        self._sessions[wid] = session
        self._sessions.move_to_end(wid)
        oldest = self.now_ns - self.settings.session_ttl_ms * 1_000_000
        while self._sessions and next(iter(self._sessions.values())).since_ns < oldest:
            self._sessions.popitem(last=False)

    # --- what shards say unasked ---

    def unasked(self, shard: int, message: bytes) -> None:
        if shard == self.calls.queue:
            self.works.unasked(message)
            return
        if self.feeds.take(shard, message):
            return
        op = message[0]
        if op == Op.TAKE_STREAM:
            number = messages.decode_answer(message)[0].stream
            if (stream := self._open.get(number)) is not None:
                self._tell(stream, lambda stream: stream.taken())
            else:
                self.closed(number, None, None)
        elif op == Op.OPEN_STREAM and not message[1]:
            # Nobody waits for this one any more.
            self.closed(messages.decode_answer(message)[0].stream, None, None)

    def link_up(self, shard: int) -> None:
        if shard == HOME:
            self._restore()
        self.feeds.link_up(shard)

    def link_down(self, shard: int) -> None:
        self.feeds.link_down(shard)

    def _restore(self) -> None:
        for wid, session in self._sessions.items():
            idle_ms = (self.now_ns - session.since_ns) // 1_000_000
            restored = messages.RestoreSession(
                wid=wid,
                stream=0,
                epoch=session.epoch,
                definition=session.definition,
                cursors=session.cursors,
                topic_ids=session.topic_ids,
                idle_ms=max(0, idle_ms),
                owner=session.owner,
            )
            self.calls.tell(HOME, messages.pack(Op.RESTORE_SESSION, 0, restored))
        self._tell_all(lambda stream: self.calls.tell(HOME, messages.pack(Op.RESTORE_SESSION, 0, stream.restored())))
        the_end = messages.RestoreSession(None, 0, 0, b"", [], [], 0)
        self.calls.tell(HOME, messages.pack(Op.RESTORE_SESSION, 0, the_end))

    # --- time ---

    @property
    def next_due_ns(self) -> int | None:
        return self._due[0][0] if self._due else None

    def tick(self, now_ns: int) -> None:
        """Heartbeats and pings that are due. A stream that has spoken since is looked at again later."""
        due = self._due
        while due and due[0][0] <= now_ns:
            stream = self._open.get(heapq.heappop(due)[1])
            if stream is not None and self._tell(stream, lambda stream: stream.tick(now_ns)):
                self.schedule(stream)

    def sweep(self, now_ns: int) -> None:
        self.feeds.sweep()
        self.works.retry()
        self._tell_all(lambda stream: stream.sweep(now_ns))

    def refusal(self, stream: Stream) -> ApiError | None:
        """Why a stream may not go on, or begin: its key has ended since it was asked for."""
        return self._guard.refusal(stream.key)

    def revoke(self) -> int:
        """Keys have ended: so do their streams. How many those were."""
        count = 0
        for stream in list(self._open.values()):
            if (error := self.refusal(stream)) is not None:
                count += 1
                self._tell(stream, lambda stream, error=error: stream.revoke(error))  # type: ignore[misc]
        return count

    def end_all(self) -> None:
        """The server stops: every client is told."""
        self.draining = True
        self._tell_all(lambda stream: stream.end())

    def _tell_all(self, tell: Callable[[Stream], None]) -> None:
        for stream in list(self._open.values()):
            self._tell(stream, tell)

    def _tell(self, stream: Stream, tell: Callable[[Stream], None]) -> bool:
        try:
            tell(stream)
        except Exception as error:
            self.calls.failed(stream, error)
            return False
        return True


def is_slow(full_since_ns: int, now_ns: int, settings: Settings) -> bool:
    return bool(full_since_ns) and now_ns - full_since_ns > settings.slow_consumer_timeout_ms * 1_000_000


def _nowhere(route: PlainRoute, entry: PlainEntry, size: int, data: bytes) -> None:
    raise NotImplementedError("the lane that gathers plain appends says where they go")


SLOW_CLOSE_NS = limits.SLOW_CLOSE_MS * 1_000_000
