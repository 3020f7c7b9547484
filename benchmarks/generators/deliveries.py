"""Counting what a watcher receives, with as little work as possible, however the bytes are cut.

One counter per watcher. `take(buffer, end)` is told that buffer[MARGIN:end] are the next bytes of the stream.
What lies before MARGIN is room for the end of the bytes before, so that a mark cut in two is found whole;
what lies from `end` on is somebody else's. Nothing is decoded: a frame is a mark, a record is a mark.

`take` says whether the reader must ask again. A server that pushes is never asked; Redis is asked once for
every reply, by `question`.
"""

from __future__ import annotations

from typing import Protocol

from benchmarks import BenchFailed
from benchmarks.generators import payload

MARGIN = 512
_LONGEST_MARK = len(payload.STAMP) + payload.STAMP_DIGITS
_NEWLINE = ord("\n")
_NO_MARK_HAS = b"\n}"


class Deliveries(Protocol):
    frames: int
    records: int
    stamps: list[int]  # of the records since it was emptied, where they are timed

    def take(self, buffer: bytearray, end: int) -> bool: ...

    def question(self) -> bytes: ...


def stamps(buffer: bytearray, start: int, end: int) -> list[int]:
    """The times that the records in buffer[start:end] were sent at."""
    found = []
    at = buffer.find(payload.STAMP, start, end)
    while at >= 0:
        at += len(payload.STAMP)
        if at + payload.STAMP_DIGITS > end:
            break  # cut: it will be whole when the rest has come
        found.append(int(buffer[at : at + payload.STAMP_DIGITS]))
        at = buffer.find(payload.STAMP, at, end)
    return found


class Pushed:
    """Frames of an event stream or of a WebSocket, and the records in them.

    No mark contains a newline or a closing brace, and the bytes of a frame end with one: mostly nothing
    has to be kept from one piece to the next.
    """

    __slots__ = ("_frame_mark", "_tail", "_timed", "frames", "records", "stamps")

    def __init__(self, frame_mark: bytes, *, timed: bool) -> None:
        self._frame_mark = frame_mark
        self._tail = b""
        self.frames = 0
        self.records = 0
        self.stamps: list[int] = []
        self._timed = timed

    def take(self, buffer: bytearray, end: int) -> bool:
        if tail := self._tail:
            buffer[MARGIN - len(tail) : MARGIN] = tail
            kept = len(tail)
            # One byte of each mark at least must be new, or it was counted before.
            self.frames += buffer.count(self._frame_mark, MARGIN - min(kept, len(self._frame_mark) - 1), end)
            self.records += buffer.count(RECORD_MARK, MARGIN - min(kept, len(RECORD_MARK) - 1), end)
        else:
            kept = 0
            self.frames += buffer.count(self._frame_mark, MARGIN, end)
            self.records += buffer.count(RECORD_MARK, MARGIN, end)
        if self._timed:
            self.stamps += stamps(buffer, MARGIN - min(kept, _LONGEST_MARK - 1), end)
        if buffer[end - 1] in _NO_MARK_HAS:
            self._tail = b""
        else:
            self._tail = bytes(buffer[max(MARGIN - kept, end - _LONGEST_MARK + 1) : end])
        return False

    def question(self) -> bytes:
        raise BenchFailed("a server that pushes is not asked")


SSE_FRAME_MARK = b"event: record"
WS_FRAME_MARK = b'"op":"record"'
RECORD_MARK = b'"$seq":'


class Xread:
    """Replies to XREAD on one stream, entries of one field each: counted by their newlines."""

    __slots__ = (
        "_after",
        "_ask",
        "_begin",
        "_entries",
        "_head",
        "_missing",
        "_tail",
        "_timed",
        "frames",
        "records",
        "stamps",
    )

    # *1 *2 $n stream *entries, then for each entry *2 $n id *2 $4 data $n value
    _HEAD_LINES = 5
    _ENTRY_LINES = 8
    _ENTRY_TAIL = 400  # more than the bytes of one entry

    def __init__(self, stream: str, *, after: bytes, count: int, timed: bool) -> None:
        self._after = after
        whole = payload.resp_xread(stream, after=after, count=count)
        self._ask = whole[: -len(_word(after))]
        self._begin = b"*1\r\n*2\r\n$%d\r\n%b\r\n*" % (len(stream), stream.encode())
        self._head = b""  # the beginning of a reply that came in pieces
        self._entries = 0  # of the reply that is coming
        self._missing = 0  # lines of it still to come; 0 before its head
        self._tail = b""
        self.frames = 0
        self.records = 0
        self.stamps: list[int] = []
        self._timed = timed

    def take(self, buffer: bytearray, end: int) -> bool:
        lines = buffer.count(b"\n", MARGIN, end)
        if not self._missing:
            behind = self._head.count(b"\n")
            if not self._read_head(buffer, end):
                return False
            lines += behind
            self._missing = self._HEAD_LINES + self._ENTRY_LINES * self._entries
        kept = len(self._tail)
        if kept:
            buffer[MARGIN - kept : MARGIN] = self._tail
        if self._timed:
            self.stamps += stamps(buffer, MARGIN - min(kept, _LONGEST_MARK - 1), end)
        self._missing -= lines
        if self._missing > 0:
            self._tail = bytes(buffer[max(MARGIN - kept, end - self._ENTRY_TAIL) : end])
            return False
        if self._missing < 0 or buffer[end - 1] != _NEWLINE:
            raise BenchFailed(f"more than one reply from Redis: {bytes(buffer[MARGIN:end][:300])!r}")
        self._tail = b""
        self.frames += 1
        self.records += self._entries
        self._after = self._last_id(buffer, MARGIN - kept, end)
        return True

    def _read_head(self, buffer: bytearray, end: int) -> bool:
        """Learn how many entries the reply has; False while its head is not whole."""
        data = self._head + bytes(buffer[MARGIN : min(end, MARGIN + 64)])
        begin = self._begin
        if not data.startswith(begin[: len(data)]):
            raise BenchFailed(f"not a reply to XREAD: {data!r}")
        line_end = data.find(b"\r\n", len(begin))
        if line_end < 0:
            self._head = data
            return False
        self._head = b""
        self._entries = int(data[len(begin) : line_end])
        return True

    @staticmethod
    def _last_id(buffer: bytearray, start: int, end: int) -> bytes:
        at = buffer.rfind(b"\r\n*2\r\n$4\r\ndata\r\n", start, end)
        before = buffer.rfind(b"\r\n", start, at) if at >= 0 else -1
        if before < 0:
            raise BenchFailed(f"no entry at the end of a reply: {bytes(buffer[start:end][-300:])!r}")
        return bytes(buffer[before + 2 : at])

    def question(self) -> bytes:
        return self._ask + _word(self._after)


def _word(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)
