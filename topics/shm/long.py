"""Both ends of a long message: the parts that are still to be sent, and the fragments that have come.

Each fragment is copied once at either end, and nothing is copied when the last one has come: a copy of 64 MiB takes as
long as some thousand small messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics.errors import RingPoisoned
from topics.shm.layout import FIRST, LAST, WHOLE


class LongOutput:
    """The rest of a message that is given in parts."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = [part for part in parts if part]
        self._part = 0
        self._at = 0  # in that part
        self.left = sum(map(len, self._parts))
        self.begun = False

    def take(self, length: int) -> bytes:
        """The next bytes, at most as many as are left."""
        self.begun = True
        self.left -= length
        taken: list[memoryview] = []
        while length:
            part = self._parts[self._part]
            piece = memoryview(part)[self._at : self._at + length]
            taken.append(piece)
            length -= len(piece)
            self._at += len(piece)
            if self._at == len(part):
                self._parts[self._part] = b""  # its memory is free as soon as it is sent
                self._part += 1
                self._at = 0
        return b"".join(taken)


class LongInput:
    """Fragments of one message after the other, joined as they come."""

    def __init__(self, max_message: int) -> None:
        self._max_message = max_message
        self._joined: bytearray | None = None
        self.whole: list[bytearray] = []

    def add(self, position: int, flags: int, fragment: memoryview) -> None:
        joined = self._joined
        if bool(flags & FIRST) != (joined is None) or flags & ~WHOLE:
            raise RingPoisoned(f"frame at {position}: fragment of a long message out of order")
        if joined is None:
            joined = self._joined = bytearray()
        joined += fragment  # grows in place: the memory of a large one is moved by the kernel, not copied
        if len(joined) > self._max_message:
            raise RingPoisoned(f"frame at {position}: message longer than {self._max_message} bytes")
        if flags & LAST:
            self.whole.append(joined)
            self._joined = None

    def take(self) -> list[bytearray]:
        whole, self.whole = self.whole, []
        return whole
