"""Large appends in a shard: a thread writes their bodies, others are served meanwhile.

The loop of a shard would take a fifth of a second to frame and write 64 MiB, and everything else would wait. So a body
over PLACED_BYTES is first put into a log file by a thread (placing.py), one after the other in the order in which they
came. When it is there, the append is judged, gets its seqs and is committed like any other: before that it has done
nothing, and what others do meanwhile comes before it.

What can't be placed, because the disk is full or the log does not take it, is appended in one go: that fails as any
append would, or takes long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, DiskFull
from topics.storage.config import TopicConfig
from topics.walshard.log.commit import CONTROL_BYTES, Commit, ReplyTo
from topics.walshard.log.placing import Placing
from topics.walshard.log.worker import Worker
from topics.walshard.topic.topic import Topic

_RENUMBERED = 8  # so often the log may go on in another file while one is placed


class TakeAppend(Protocol):
    """The engine's: it answers in any case."""

    def __call__(
        self, request: messages.Append, body: bytes, reply_to: ReplyTo, correlation: int, placing: Placing | None
    ) -> None: ...


class _Waiting(msgspec.Struct, gc=False, eq=False):
    request: messages.Append
    body: memoryview
    reply_to: Any  # a ReplyTo; None: it has gone
    correlation: int
    deadline_ms: int
    renumbered: int = 0


class LargeAppends:
    def __init__(
        self,
        *,
        topics: dict[str, Topic],
        commit: Commit,
        append: TakeAppend,
        is_late: Callable[[int], bool],
    ) -> None:
        self._topics = topics
        self._commit = commit
        self._append = append
        self._is_late = is_late
        self._waiting: deque[_Waiting] = deque()  # the first one is being placed
        self._bytes = 0
        self._worker: Worker | None = None  # begins with the first one: most servers never see any
        self.on_start: Callable[[int], None] = lambda event_fd: None

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def take(self, message: bytearray, reply_to: ReplyTo) -> None:
        correlation, deadline_ms, request, body = messages.unpack_long(message)
        if self._is_late(deadline_ms):
            return
        size = len(body)
        if size <= limits.PLACED_BYTES or self._is_ephemeral(request):
            self._append(request, bytes(body), reply_to, correlation, None)
            return
        if self._waiting and self._bytes + size > limits.PLACED_WAITING_BYTES:
            refusal = ApiError(
                "throttled", "too many large appends wait for the disk; nothing was done. Retry", retry_after_s=1
            )
            reply_to.send_always(messages.pack_failure(Op.APPEND, correlation, refusal))
            return
        self._waiting.append(_Waiting(request, body, reply_to, correlation, deadline_ms))
        self._bytes += size
        if len(self._waiting) == 1:
            self._begin()

    def caller_gone(self, reply_to: Any) -> None:
        """Nobody waits for the answer: what has not taken effect need not."""
        for entry in self._waiting:
            if entry.reply_to is reply_to:
                entry.reply_to = None

    def collect(self) -> None:
        """Commit what has been placed, if anything has."""
        if self._worker is not None:
            self._worker.take()

    def wait(self) -> None:
        """Block until all of them are committed; for stopping and tests."""
        if self._worker is not None:
            self._worker.wait()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _is_ephemeral(self, request: messages.Append) -> bool:
        """It is not logged at all."""
        topic = self._topics.get(request.topic)
        config = (request.config or TopicConfig()) if topic is None else topic.config
        return config.durability == "ephemeral"

    def _begin(self) -> None:
        first = self._waiting[0]
        key = b"" if first.request.key is None else first.request.key.encode()
        placing = self._commit.wal.place(first.body, key)
        if self._worker is None:
            self._worker = Worker("placing")
            self.on_start(self._worker.event_fd)
        self._worker.submit(placing.write, lambda _, error: self._placed(placing, error))

    def _placed(self, placing: Placing, error: Exception | None) -> None:
        entry = self._waiting[0]
        if entry.reply_to is None or self._is_late(entry.deadline_ms):
            placing.drop()
        elif error is not None or self._is_ephemeral(entry.request) or not self._make_room(entry.request):
            placing.drop()
            self._append(entry.request, bytes(entry.body), entry.reply_to, entry.correlation, None)
        elif (number := self._commit.wal.file_no_of(placing)) is not None and entry.renumbered < _RENUMBERED:
            entry.renumbered += 1
            assert self._worker is not None
            self._worker.submit(lambda: placing.renumber(number), lambda _, error: self._placed(placing, error))
            return
        elif number is not None:
            placing.drop()
            self._append(entry.request, bytes(entry.body), entry.reply_to, entry.correlation, None)
        else:
            self._append(entry.request, b"", entry.reply_to, entry.correlation, placing)
            self._commit.write()
            placing.drop()  # unless it is a file of the log now
        self._waiting.popleft()
        self._bytes -= len(entry.body)
        if self._waiting:
            self._begin()

    def _make_room(self, request: messages.Append) -> bool:
        """For the control frames that may come before it: after this the current file does not change."""
        try:
            if (topic := self._topics.get(request.topic)) is not None:
                self._commit.tell_trims(topic)
            if not self._commit.write():
                return False
            self._commit.make_room(CONTROL_BYTES)
        except (ApiError, DiskFull, OSError):
            return False
        return True
