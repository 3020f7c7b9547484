"""How long a client may keep us waiting: for its head, its body, its reading of an answer, its next request.

A head has one deadline; a body and an answer may take their time as long as they move, and are not slower than a living
client. Whoever waits for us is never judged.
"""

from __future__ import annotations

import enum
import select

from topics import limits
from topics.errors import ApiError
from topics.gateway.http1.connection import Connection
from topics.settings import Settings

_DISCARD_MS = 2_000


class Verdict(enum.Enum):
    WAIT = 0
    CLOSE = 1


class Patience:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def judge(self, connection: Connection, now_ns: int) -> Verdict | ApiError:
        """What is to become of it; an error is its last answer."""
        settings = self._settings
        late = False
        # Answers may wait for the client without a byte in `out`: then the socket took all it was given, and is full.
        unread = bool(connection.out) or bool(connection.interest & select.EPOLLOUT)
        taken = connection.takes_on(now_ns) if unread and connection.stream is None else 0
        waited_ms = (now_ns - connection.progress_ns) // 1_000_000
        if connection.stream is not None and not connection.discarding:
            late = connection.closing and waited_ms > limits.SLOW_CLOSE_MS  # it did not take its last frame
        elif connection.discarding:
            late = waited_ms > _DISCARD_MS
        elif unread:
            late = waited_ms > settings.body_timeout_ms or self._dawdles(now_ns - connection.out_ns, taken)
        elif connection.exchanges:
            pass  # it waits for us
        elif connection.head is not None:
            slow = self._dawdles(now_ns - connection.body_ns, connection.body_bytes)
            if slow or waited_ms > settings.body_timeout_ms:
                return ApiError("request_timeout", "the body did not arrive in time")
        elif connection.buffer:
            if waited_ms > settings.head_timeout_ms:
                return ApiError("request_timeout", "the request head did not arrive in time")
        else:
            late = waited_ms > settings.idle_timeout_ms
        return Verdict.CLOSE if late else Verdict.WAIT

    def _dawdles(self, elapsed_ns: int, size: int) -> bool:
        """Whether so much in that time is less than a living client manages."""
        if elapsed_ns <= self._settings.body_timeout_ms * 1_000_000:
            return False
        return size * 1_000_000_000 < self._settings.min_body_rate * elapsed_ns
