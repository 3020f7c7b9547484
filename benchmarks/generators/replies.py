"""Recognising the end of an answer with as little work as possible.

One recogniser per connection. `take(buffer, n)` is told that the first n bytes of the buffer are the next
bytes of the stream, and says whether the answer that was waited for is complete. The loop is closed, so
there is never more than one answer (or one pipeline of answers) to come: bytes beyond it are a failure, and
so is any answer that is not a success. The buffer is shared by all connections; what lies beyond n is
somebody else's and is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from benchmarks import BenchFailed

_MINUS = ord("-")
_NEWLINE = ord("\n")
_HEADS_KEPT = 1_000  # a head with a clock in it changes; the cache must not grow with the run


class Replies(Protocol):
    def take(self, buffer: bytearray, n: int) -> bool: ...


def _refuse(what: str, buffer: bytes | bytearray) -> BenchFailed:
    return BenchFailed(f"{what}: {bytes(buffer[:300])!r}")


def body_length(head: bytes) -> int:
    """Content-Length of a successful answer; anything else stops the run."""
    if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201")):
        raise _refuse("not a success", head)
    lowered = head.lower()
    at = lowered.find(b"\r\ncontent-length:")
    if at < 0:
        raise _refuse("no Content-Length in", head)
    return int(lowered[at + 17 :].split(b"\r\n", 1)[0])


class HttpReplies:
    """HTTP/1.1 answers with a Content-Length.

    Answers to the same kind of request mostly repeat their head, so the last head is compared first, and
    heads seen before are looked up whole before one is parsed.
    """

    __slots__ = ("_head", "_heads", "_missing", "_partial", "_total")

    def __init__(self) -> None:
        self._head = b"\0"  # matches nothing yet
        self._heads: dict[bytes, int] = {}
        self._missing = 0  # bytes of the body still to come
        self._partial = b""  # a head that came in pieces
        self._total = 0

    def take(self, buffer: bytearray, n: int) -> bool:
        if self._missing:
            self._missing -= n
            if self._missing > 0:
                return False
            if self._missing < 0:
                raise BenchFailed(f"{-self._missing} bytes more than the answer's Content-Length")
            return True
        if buffer.startswith(self._head, 0, n):
            missing = self._total - n
        else:
            missing = self._read_head(buffer, n)
            if missing == _NO_HEAD:
                return False
        if missing == 0:
            return True
        if missing < 0:
            raise BenchFailed(f"{-missing} bytes more than the answer's Content-Length")
        self._missing = missing
        return False

    def _read_head(self, buffer: bytearray, n: int) -> int:
        data = self._partial + bytes(memoryview(buffer)[:n])
        end = data.find(b"\r\n\r\n")
        if end < 0:
            # Fact: a head is small. Hazard: a server that sends something else forever.
            if len(data) > 65_536:
                raise _refuse("no end of head in", data)
            self._partial = data
            return _NO_HEAD
        self._partial = b""
        head = data[: end + 4]
        length = self._heads.get(head)
        if length is None:
            length = body_length(head)
            if len(self._heads) < _HEADS_KEPT:
                self._heads[head] = length
        self._head = head
        self._total = len(head) + length
        return self._total - len(data)


_NO_HEAD = -(2**62)


class PipelineReplies:
    """`depth` bulk strings, each of two lines: counted by their newlines."""

    __slots__ = ("_at_line_start", "_lines", "_missing")

    def __init__(self, depth: int) -> None:
        self._lines = 2 * depth
        self._missing = self._lines
        self._at_line_start = True

    def take(self, buffer: bytearray, n: int) -> bool:
        if (self._at_line_start and buffer[0] == _MINUS) or buffer.find(b"\n-", 0, n) >= 0:
            raise _refuse("an error from Redis in", buffer[:n])
        self._at_line_start = buffer[n - 1] == _NEWLINE
        missing = self._missing - buffer.count(b"\n", 0, n)
        if missing > 0:
            self._missing = missing
            return False
        if missing < 0 or not self._at_line_start:
            raise _refuse("more answers than questions in", buffer[:n])
        self._missing = self._lines
        return True


class SizedReplies:
    """Answers whose sizes are known beforehand, because the same questions were asked once already."""

    __slots__ = ("_fresh", "_missing", "_sizes")

    def __init__(self, sizes: Iterator[int]) -> None:
        self._sizes = sizes
        self._missing = next(sizes, 0)
        self._fresh = True

    def take(self, buffer: bytearray, n: int) -> bool:
        if self._fresh:
            if buffer[0] == _MINUS:
                raise _refuse("an error from Redis", buffer[:n])
            self._fresh = False
        self._missing -= n
        if self._missing > 0:
            return False
        if self._missing < 0:
            raise BenchFailed(f"an answer {-self._missing} bytes longer than the same one before")
        self._missing = next(self._sizes, 0)
        self._fresh = True
        return True


class WsReplies:
    """`depth` WebSocket messages, each an acknowledgement of a publish."""

    __slots__ = ("_depth", "_missing", "_partial")

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._missing = depth
        self._partial = b""  # a frame that came in pieces

    def take(self, buffer: bytearray, n: int) -> bool:
        data: bytes | bytearray = buffer
        if self._partial:
            data = self._partial + bytes(memoryview(buffer)[:n])
            n = len(data)
            self._partial = b""
        at = 0
        while at < n:
            end = ws_frame_end(data, at, n)
            if end == 0:
                self._partial = bytes(memoryview(data)[at:n])
                return False
            if data.find(b'"op":"ack"', at, end) < 0:
                raise _refuse("not an acknowledgement", data[at:end])
            self._missing -= 1
            at = end
        if self._missing > 0:
            return False
        if self._missing < 0:
            raise BenchFailed(f"{-self._missing} acknowledgements more than publishes")
        self._missing = self._depth
        return True


def ws_frame_end(data: bytes | bytearray, at: int, n: int) -> int:
    """Where the server's text frame that begins at `at` ends, or 0 when not all of it lies before n."""
    if n - at < 2:
        return 0
    if data[at] != 0x81:
        raise _refuse("not a whole text frame", data[at:n])
    size = data[at + 1]
    head = 2
    if size == 126:
        head = 4
    elif size == 127:
        head = 10
    elif size > 127:
        raise _refuse("a masked frame from the server", data[at:n])
    if n - at < head:
        return 0
    if head > 2:
        size = int.from_bytes(data[at + 2 : at + head], "big")
    end = at + head + size
    return end if end <= n else 0
