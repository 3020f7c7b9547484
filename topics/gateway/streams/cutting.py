"""Large WebSocket messages, a piece at a time.

The parser of RFC 6455 waits for all of a frame, copies it and unmasks it in one go: of 60 MiB that takes a tenth of a
second, and nothing else would be served meanwhile. So its input goes through a `Cutter`, which makes fragments of a
large frame; to the parser it looks as if the client had sent them.

    sent      FIN text 60 MiB | mask | payload ...
    parsed    text 256 KiB | mask | ...   continuation 256 KiB | mask | ...   FIN continuation | mask | ...

The mask fits every fragment, because the fragments have multiples of its four bytes. Whether a frame is allowed stays
the parser's business, and what it says of one that is not is the same, but for two things: it may say it before all of
the frame has come, and a control frame that is too long is cut off, not buffered.

`Text` is a message in fragments. That it is UTF-8 is checked with each, not at the end.
"""

from __future__ import annotations

import codecs

from topics import limits

FRAME_BYTES = 256 * limits.KIB
_FIN, _OPCODE, _CONTROL = 0x80, 0x0F, 0x08
_OPCODES = frozenset((0x0, 0x1, 0x2, 0x8, 0x9, 0xA))
_MASKED, _LENGTH = 0x80, 0x7F
_MASK_BYTES = 4
_SHORT_BYTES = 125  # the longest length that needs no more than a byte, and the longest control frame


class Cutter:
    """Of what one client sends."""

    __slots__ = ("_current", "_dead", "_first", "_header", "_left", "_mask", "_most", "_rest", "_size")

    def __init__(self, *, most: int, size: int = FRAME_BYTES) -> None:
        assert size % _MASK_BYTES == 0
        self._most = most  # bytes of a message, as the parser has them
        self._size = size
        self._current = 0  # bytes of the message that goes on
        self._header = b""  # of a frame, not all of it
        self._left = 0  # bytes to come of the frame or fragment that the parser knows of ...
        self._rest = 0  # ... and behind them, in fragments
        self._first = 0  # the first byte of the frame that is cut
        self._mask = b""
        self._dead = False  # the parser has refused something, or is about to: it throws away what follows

    def cut(self, data: bytes) -> bytes:
        """What the parser is given instead."""
        if self._dead:
            return data
        if len(data) <= self._left:
            self._left -= len(data)
            return data
        if self._header:
            data = self._header + data
            self._header = b""
        parts: list[bytes] = []
        start = 0  # from here it goes on as it came
        at, end = self._left, len(data)
        while at < end:
            if self._rest:
                header, size = self._fragment()
                parts += (data[start:at], header)
                start = at
                at += size
                continue
            wide = 0
            if end - at >= 2:
                first, second = data[at], data[at + 1]
                opcode, length = first & _OPCODE, second & _LENGTH
                if second < _MASKED or opcode not in _OPCODES:
                    self._dead = True
                    break
                if length > _SHORT_BYTES:
                    wide = 2 if length == _SHORT_BYTES + 1 else 8
            if end - at < 2 + wide:
                self._header = data[at:]
                end = at
                break
            if wide:
                length = int.from_bytes(data[at + 2 : at + 2 + wide], "big")
            if length > self._most - self._current:
                self._dead = True
                break
            payload = at + 2 + wide + _MASK_BYTES
            if length > (self._size if opcode < _CONTROL else _SHORT_BYTES):
                if end < payload:
                    self._header = data[at:]
                    end = at
                    break
                parts.append(data[start:at])
                start = at = payload
                self._mask = data[payload - _MASK_BYTES : payload]
                if opcode >= _CONTROL:  # so much of it that the parser sees that it is too long
                    parts.append(_header(first, _SHORT_BYTES + 1, self._mask))
                    self._dead = True
                    break
                self._first, self._rest = first, length
            else:
                at = payload + length
            if opcode < _CONTROL:
                self._current = 0 if first & _FIN else self._current + length
        self._left = max(at - end, 0)
        parts.append(data[start:end])
        return b"".join(parts)

    def _fragment(self) -> tuple[bytes, int]:
        """The header of the next one, and its size."""
        size = min(self._rest, self._size)
        self._rest -= size
        first = self._first
        self._first &= _FIN  # the others continue it
        return _header(first & ~_FIN if self._rest else first, size, self._mask), size


def _header(first: int, size: int, mask: bytes) -> bytes:
    return b"%c\xff%b%b" % (first, size.to_bytes(8, "big"), mask)


class Text:
    """A text message that comes in fragments."""

    __slots__ = ("_cut", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._cut = b""  # the first bytes of a character whose others come with the next fragment

    def add(self, part: bytes, *, last: bool) -> None:
        """UnicodeDecodeError: it is no text."""
        self.data += part
        if self._cut or not part.isascii():
            part = self._cut + part
            self._cut = part[codecs.utf_8_decode(part, "strict", last)[1] :]
