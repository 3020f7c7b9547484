"""A chunked body, decoded as it arrives. Strict: hex sizes, CR LF, extensions ignored within a bound."""

from __future__ import annotations

from topics.errors import invalid
from topics.gateway.compression import too_large

_MAX_LINE = 256
_MAX_TRAILER = 8_192
_HEX = frozenset(b"0123456789abcdefABCDEF")


_CHUNKS_PER_TURN = 1_000


class ChunkDecoder:
    def __init__(self, *, most: int, keep: bool = True) -> None:
        self._most = most
        self._keep = keep  # somebody reads it
        self.body = bytearray()
        self.size = 0
        self._left = 0  # of the current chunk; -1: its CR LF is due
        self.tired = False
        self._trailer = -1  # bytes of trailer seen, once the last chunk came

    def encoded(self) -> bytes:
        """What has come so far, as bytes that bring another decoder to where this one is, if they were kept."""
        body = bytes(self.body)
        size = len(body)
        if self._left > 0:
            return b"%x\r\n%b" % (size + self._left, body)
        if self._left < 0:
            return b"%x\r\n%b" % (size, body)
        before = b"%x\r\n%b\r\n" % (size, body) if size else b""
        return before if self._trailer < 0 else before + b"0\r\n"

    def feed(self, data: bytes | bytearray, at: int) -> tuple[int, bool]:
        """Take bytes from `at` on; returns where it stopped and whether the body is complete. Chunks can be very small:
        it stops after a while though there is more (`tired`)."""
        self.tired = False
        for _ in range(_CHUNKS_PER_TURN):
            if self._left > 0:
                part = data[at : at + self._left]
                if self._keep:
                    self.body += part
                at += len(part)
                self.size += len(part)
                self._left -= len(part)
                if self._left:
                    return at, False
                self._left = -1
            if self._left == -1:
                if len(data) - at < 2:
                    return at, False
                if data[at : at + 2] != b"\r\n":
                    raise invalid("a chunk does not end with CR LF")
                at += 2
                self._left = 0
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > (_MAX_LINE if self._trailer < 0 else _MAX_TRAILER):
                    raise invalid("a chunk size or trailer line is too long")
                return at, False
            line = bytes(data[at:end])
            if b"\n" in line or b"\r" in line:
                raise invalid("a chunk size or trailer line contains a bare CR or LF")
            at = end + 2
            if self._trailer >= 0:
                if not line:
                    return at, True
                self._trailer += len(line)
                if self._trailer > _MAX_TRAILER:
                    raise invalid("the trailer is too long")
                continue
            size = line.partition(b";")[0].rstrip(b" \t")
            if not 1 <= len(size) <= 8 or not _HEX.issuperset(size) or len(line) > _MAX_LINE:
                raise invalid("a chunk size is not a hexadecimal number")
            self._left = int(size, 16)
            if self._left == 0:
                self._trailer = 0
            elif self.size + self._left > self._most:
                raise too_large(self._most)
        self.tired = True
        return at, False
