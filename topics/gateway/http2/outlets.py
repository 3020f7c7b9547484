"""Where the streams of the HTTP/2 lane write: queues that a task per stream empties.

Crash of the task, or its end: the stream is told that its connection is gone.
"""

from __future__ import annotations

from collections import deque

import trio

from topics import limits
from topics.gateway.http2.h2 import Tunnel
from topics.gateway.streams.registry import Stream


class ColdOutlet:
    """Where a stream of this lane writes: a queue that a task empties."""

    def __init__(self, stream: Stream, scope: trio.CancelScope) -> None:
        self._stream = stream
        self._scope = scope  # around the request: how a client that does not read is got rid of
        self._queue: deque[bytes] = deque()
        self._more = trio.Event()
        self._closed = False
        self.closing = False
        self.written = 0
        self.sent = 0

    def write(self, data: bytes) -> None:
        self._queue.append(data)
        self.written += len(data)
        self._more.set()

    def finish(self) -> None:
        self.closing = True
        self._more.set()
        self._scope.deadline = trio.current_time() + limits.SLOW_CLOSE_MS / 1_000

    def abort(self) -> None:
        self._queue.clear()
        self.finish()
        self.close()

    def pause(self) -> None:
        """A client that may say nothing is not listened to anyway."""

    def resume(self) -> None: ...

    async def take(self) -> bytes | None:
        """What is to be sent next, None at the end. One write at a time: a client that has the first of several frames
        must not find its session before it."""
        while not self._queue:
            if self.closing:
                return None
            self._more = trio.Event()
            await self._more.wait()
        return self._queue.popleft()

    def taken(self, size: int) -> None:
        self.sent += size
        if not self.closing:
            self._stream.drained()

    def close(self) -> None:
        """The connection is gone, or done with."""
        if not self._closed:
            self._closed = True
            self._stream.closed()


class SocketOutlet(ColdOutlet):
    def __init__(self, stream: Stream, tunnel: Tunnel) -> None:
        super().__init__(stream, tunnel.scope)
        self._tunnel = tunnel

    def pause(self) -> None:
        self._tunnel.pause()

    def resume(self) -> None:
        self._tunnel.resume()
