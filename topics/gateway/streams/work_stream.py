"""A /work stream: jobs are pushed to one connection for as long as it lives. What is leased to whom is the
coordinator's business; here is the wire. A client that does not read is let go, and its jobs with it.
"""

from __future__ import annotations

import os
import time
from collections import deque

import msgspec

from topics import limits
from topics.actors import messages
from topics.errors import ApiError
from topics.gateway.api import jobs
from topics.gateway.auth import owner_of
from topics.gateway.streams import frames
from topics.gateway.streams.registry import Streams, is_slow
from topics.gateway.streams.watcher import Outlet
from topics.keys import Key

_HEARTBEAT_NS = limits.DEFAULT_HEARTBEAT_MS * 1_000_000


class WorkStream:
    def __init__(self, streams: Streams, number: int, head: messages.OpenWork, *, key: Key | None = None) -> None:
        self.number = number
        self.key = key
        self.head = msgspec.structs.replace(head, stream=int.from_bytes(os.urandom(7), "little") | 1)
        self.due_ns = 0
        self._streams = streams
        self._topic = head.topic.encode()
        self._outlet: Outlet | None = None
        self._spoke_ns = 0
        self._stuck_at = 0  # what the socket had taken ...
        self._stuck_since_ns = streams.now_ns  # ... when it last took something, or had all
        self._last_lease = 0
        self._unsent: deque[tuple[int, int]] = deque()  # bytes written then, and bytes of jobs pushed by then
        self._pushed = self._sent = self._told = 0  # bytes of jobs: from the coordinator, to the socket, as reported
        self._over = False  # nothing more is written
        self._reported = False  # the home knows that it is closed
        streams.granted(self)

    # --- the lane says ---

    def start(self, outlet: Outlet, received: bytes) -> None:
        streams = self._streams
        self._outlet = outlet
        outlet.write(frames.RETRY)
        self._beat(streams.now_ns)
        streams.schedule(self)
        if streams.draining:
            self.end()
        elif (error := streams.refusal(self)) is not None:
            self.revoke(error)
        else:
            streams.works.open(self)

    def received(self, data: bytes) -> None:
        """An SSE client has nothing to say."""

    def received_end(self) -> None:
        assert self._outlet is not None
        self._outlet.abort()

    def drained(self) -> None:
        outlet, backlog = self._outlet, self._streams.settings.stream_backlog_bytes
        assert outlet is not None
        unsent = self._unsent
        while unsent and unsent[0][0] <= outlet.sent:
            self._sent = unsent.popleft()[1]
        if self._sent - self._told > backlog // 4:
            self._told = self._sent
            self._streams.works.sent(self, self._sent)

    def closed(self) -> None:
        self._stop()
        if not self._reported:
            self._reported = True
            self._streams.closed(self.number, None, None)

    def abort(self) -> None:
        if self._outlet is not None:
            self._outlet.abort()
        else:
            self.discard()

    def discard(self) -> None:
        self.closed()

    def _stop(self) -> None:
        if not self._over:
            self._over = True
            self._streams.works.close(self)

    # --- the coordinator says ---

    def again(self) -> messages.OpenWork:
        """To the next coordinator: what this one was about to send never came."""
        self._pushed = self._sent = self._told = 0
        self._unsent.clear()
        return msgspec.structs.replace(self.head, last_lease=self._last_lease)

    def jobs(self, claimed: messages.Claimed, body: bytes | memoryview) -> None:
        outlet = self._outlet
        if outlet is None or self._over:
            return
        rendered = jobs.rendered(claimed, body)
        outlet.write(
            b"".join([jobs.sse_job(self._topic, seq, job) for seq, job in zip(claimed.seqs, rendered, strict=True)])
        )
        self._last_lease = max([self._last_lease, *claimed.leases])
        self._pushed += len(body) + 1
        self._unsent.append((outlet.written, self._pushed))
        self._spoke_ns = self._streams.now_ns

    def ended(self, code: int, error: str) -> None:
        self._fail(code, error)

    # --- the registry says ---

    def tick(self, now_ns: int) -> None:
        if not self._over and now_ns - self._spoke_ns >= _HEARTBEAT_NS:
            self._beat(now_ns)
        self.due_ns = (now_ns if self._over else self._spoke_ns) + _HEARTBEAT_NS

    def _beat(self, now_ns: int) -> None:
        assert self._outlet is not None
        self._outlet.write(frames.sse_heartbeat(time.time_ns() // 1_000_000))
        self._spoke_ns = now_ns
        self.due_ns = now_ns + _HEARTBEAT_NS

    def sweep(self, now_ns: int) -> None:
        outlet = self._outlet
        if outlet is None or self._over:
            return
        if outlet.sent == outlet.written or outlet.sent != self._stuck_at:
            self._stuck_at, self._stuck_since_ns = outlet.sent, now_ns
        elif is_slow(self._stuck_since_ns, now_ns, self._streams.settings):
            self._fail(408, "this client does not read; its jobs are free again. Reconnect to go on")

    def taken(self) -> None:
        """There is no session that somebody else could open."""

    def end(self) -> None:
        self._fail(503, "the server is shutting down; reconnect to go on")

    def revoke(self, error: ApiError) -> None:
        self._fail(error.status, error.message)

    def restored(self) -> messages.RestoreSession:
        return messages.RestoreSession(None, self.number, 0, b"", [], [], 0, owner_of(self.key))

    def _fail(self, code: int, error: str) -> None:
        """A last word. The leases are free at once, before the connection has closed."""
        if self._outlet is not None and not self._over:
            self._outlet.write(frames.sse_error(code, error))
            self._stop()
            self._outlet.finish()
