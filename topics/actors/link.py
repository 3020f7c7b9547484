"""One side of a link between two processes: the ring to the peer, the ring from it, and the peer's bell.

A link lives for one generation. When either process dies the supervisor makes another; this one is closed and
whatever it still held is gone but for the peer's last words, which is why a caller's unanswered calls end with "outcome
unknown".
"""

from __future__ import annotations

from topics import limits
from topics.errors import RingPoisoned
from topics.shm.doorbell import Doorbell
from topics.shm.ring import RingReader, RingWriter

# A request body and its head, or an answer of the largest diff: with room to spare.
_MAX_MESSAGE = 2**30 + 16 * limits.MIB


class Link:
    def __init__(self, peer: str, view: memoryview, *, side: int, generation: int, bell: Doorbell) -> None:
        span = len(view) // 2
        halves = (view[:span], view[span:])
        self.peer = peer
        self.generation = generation
        self.bell = bell
        self.closed = False
        self.writer = RingWriter(halves[side], generation=generation)
        self.reader = RingReader(halves[1 - side], generation=generation, max_message=_MAX_MESSAGE)

    def drain(self) -> list[bytes]:
        messages = self.reader.drain(limits.DRAIN_BYTES)
        if self.reader.made_room:
            self.reader.made_room = False
            self.bell.ring()
        return messages

    def last_words(self) -> list[bytes]:
        """What the peer had said when it went away; if it died while it wrote, up to there."""
        said: list[bytes] = []
        try:
            while received := self.drain():
                said += received
        except RingPoisoned:
            pass
        return said

    def has_work(self) -> bool:
        return not self.reader.empty() or self.writer.room_was_made

    def flush(self) -> None:
        """Publish what was sent since the last flush and ring once."""
        if self.writer.flush():
            self.bell.ring()

    def close(self) -> None:
        self.closed = True
        self.writer.close()
        self.reader.close()
