"""A large answer that its client wants as gzip, compressed in slices.

8 MiB take 200 ms, and the loop would do nothing else meanwhile. So a body over GZIP_SLICE_BYTES is compressed a slice
at a time, between the requests of others, and its asker gets the answer again when `packed` is there: in its turn,
behind the answers to what its client asked before. If the connection closes, the rest is left undone.

A response may be the answer to many: the first of them has it compressed, for the others it is there already.

An answer to a plain append (http1/append_batch.py) is compressed at once whatever its size: seqs of 10,000 records take
1 ms.
"""

from __future__ import annotations

from typing import Protocol

from topics import limits
from topics.gateway.api.types import Response
from topics.gateway.compression import Deflater


class Asker(Protocol):
    """Waits for the answer: a request of either lane."""

    @property
    def gone(self) -> bool: ...
    def finish(self, value: Response) -> None: ...
    def abort(self) -> None: ...


def is_large(response: Response) -> bool:
    """Compressing it at once would hold the loop."""
    size = len(response.body) + len(response.tail)
    return size > limits.GZIP_SLICE_BYTES and not response.packed and response.stream is None


class LargeAnswer:
    def __init__(self, asker: Asker, response: Response) -> None:
        self.asker = asker
        self._response = response
        self._deflater: Deflater | None = None  # only while it is done: it holds 256 KiB

    def step(self) -> bool:
        response = self._response
        if self.asker.gone:
            return True
        if response.packed:
            self.asker.finish(response)  # copies it, which takes as long as some slices
            return True
        if self._deflater is None:
            self._deflater = Deflater(response.body, response.tail)
        response.packed = self._deflater.step()
        return False

    def drop(self) -> None:
        self._deflater = None

    def abort(self) -> None:
        self.asker.abort()
