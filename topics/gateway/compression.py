"""gzip bodies: bounded before they are read. A small body that inflates to a large one is refused as the large one."""

from __future__ import annotations

import zlib

from topics.errors import ApiError, invalid


def too_large(most: int) -> ApiError:
    return ApiError("payload_too_large", f"the body is larger than {most} bytes; split it", {"max": most})


def _incomplete() -> ApiError:
    return invalid("the gzip body is incomplete or has something behind it")


def _no_gzip(error: zlib.error) -> ApiError:
    return invalid(f"the body is not valid gzip: {error}")


class Inflater:
    """A gzip body, inflated as far as it is asked for and never beyond `most`."""

    def __init__(self, packed: bytes | bytearray, *, most: int) -> None:
        self._unpacker = zlib.decompressobj(wbits=31)
        self._packed: bytes | bytearray = packed
        self._most = most
        self.size = 0

    @property
    def done(self) -> bool:
        return self._unpacker.eof

    def more(self, size: int) -> bytes:
        """Up to `size` bytes more."""
        try:
            part = self._unpacker.decompress(self._packed, size)
        except zlib.error as error:
            raise _no_gzip(error) from None
        self._packed = self._unpacker.unconsumed_tail
        self.size += len(part)
        if self.size > self._most:
            raise too_large(self._most)
        if self.done:
            if self._unpacker.unused_data:
                raise _incomplete()
        elif len(part) < size:
            raise _incomplete()
        return part


def gunzip(data: bytes | bytearray, *, most: int) -> bytes:
    """The whole of a gzip body."""
    inflater = Inflater(data, most=most)
    body = inflater.more(most + 1)
    assert inflater.done
    return body


def gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)
    return packer.compress(body) + packer.flush()
