"""gzip bodies: bounded before they are read. A small body that inflates to a large one is refused as the large one."""

from __future__ import annotations

import zlib

from topics import limits
from topics.errors import ApiError, invalid

_PIECE_BYTES = 64 * limits.KIB


def too_large(most: int) -> ApiError:
    return ApiError("payload_too_large", f"the body is larger than {most} bytes; split it", {"max": most})


def _incomplete() -> ApiError:
    return invalid("the gzip body is incomplete or has something behind it")


def _no_gzip(error: zlib.error) -> ApiError:
    return invalid(f"the body is not valid gzip: {error}")


class Inflater:
    """A gzip body, inflated as far as it is asked for and never beyond `most`.

    zlib is given a piece at a time: it copies what it has no room for, which would be the whole rest each time."""

    def __init__(self, packed: bytes | bytearray, *, most: int) -> None:
        self._unpacker = zlib.decompressobj(wbits=31)
        self._packed: bytes | bytearray = packed
        self._at = 0
        self._most = most
        self.size = 0

    @property
    def done(self) -> bool:
        return self._unpacker.eof

    def more(self, size: int) -> bytes | bytearray:
        """Up to `size` bytes more."""
        found = bytearray()
        while not self.done and len(found) < size:
            piece: bytes | bytearray = self._unpacker.unconsumed_tail
            if not piece:
                piece = self._packed[self._at : self._at + _PIECE_BYTES]
                self._at += len(piece)
            try:
                found += self._unpacker.decompress(piece, size - len(found))
            except zlib.error as error:
                raise _no_gzip(error) from None
            if not self.done and len(found) < size and self._is_read:
                raise _incomplete()
        self.size += len(found)
        if self.size > self._most:
            raise too_large(self._most)
        if self.done and (self._unpacker.unused_data or self._at < len(self._packed)):
            raise _incomplete()
        return found

    @property
    def _is_read(self) -> bool:
        return not self._unpacker.unconsumed_tail and self._at >= len(self._packed)


def gunzip(data: bytes | bytearray, *, most: int) -> bytes:
    """The whole of a gzip body."""
    inflater = Inflater(data, most=most)
    body = inflater.more(most + 1)
    assert inflater.done
    return bytes(body)


def gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)
    return packer.compress(body) + packer.flush()
