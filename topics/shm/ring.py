"""A single-producer single-consumer byte ring: the algorithm over layout.py.

Rules: the producer writes frames, then publishes the tail once per flush; the consumer copies frames out, then
publishes the head once per drain. Neither ever blocks: what does not fit waits in the producer's outbox. A
message longer than a quarter of the ring travels in fragments and arrives whole. A frame that fails its checks
is never delivered: the reader raises RingPoisoned and the link is abandoned.

A crash of either side leaves the region as it is; the supervisor makes a new one with the next generation.
"""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from topics.errors import RingFull, RingPoisoned
from topics.shm import layout
from topics.shm.layout import FIRST, FRAME_HEADER, HEADER_BYTES, LAST, PAD, WHOLE

_fence = threading.Lock()
_HEADER = FRAME_HEADER.size


class RingStatistics(msgspec.Struct, frozen=True):
    capacity: int
    used: int
    outbox_bytes: int
    messages: int
    high_water: int


def format_link(view: memoryview, *, generation: int, ring_bytes: int) -> None:
    """Lay out both rings of a fresh region."""
    span = layout.ring_span(ring_bytes)
    for start in (0, span):
        words = view[start : start + HEADER_BYTES].cast("Q")
        words[layout.WORD_CAPACITY] = span - HEADER_BYTES
        words[layout.WORD_GENERATION] = generation
        words[layout.WORD_TAIL] = words[layout.WORD_HEAD] = words[layout.WORD_WANTS] = 0
        words[layout.WORD_MAGIC] = layout.MAGIC


class _Ring:
    def __init__(self, view: memoryview, *, generation: int) -> None:
        self._words = view[:HEADER_BYTES].cast("Q")
        self._data = view[HEADER_BYTES:]
        self.capacity = self._words[layout.WORD_CAPACITY]
        if self._words[layout.WORD_MAGIC] != layout.MAGIC or self.capacity != len(self._data):
            raise RingPoisoned("not a ring: magic or capacity is wrong")
        if self._words[layout.WORD_GENERATION] != generation:
            raise RingPoisoned(f"ring of generation {self._words[layout.WORD_GENERATION]}, expected {generation}")
        self._generation = generation & 0xFFFF
        self._max_payload = layout.max_payload(self.capacity)
        self._messages = 0
        self._high_water = 0

    def close(self) -> None:
        self._words.release()
        self._data.release()


class RingWriter(_Ring):
    def __init__(self, view: memoryview, *, generation: int) -> None:
        super().__init__(view, generation=generation)
        self._tail = self._words[layout.WORD_TAIL]
        self._outbox: deque[bytes] = deque()
        self._sent = 0  # how much of the first message of the outbox is already in the ring
        self.outbox_bytes = 0

    def send(self, message: bytes) -> None:
        """Queue a message for the next flush; raises RingFull while the outbox holds a ring's worth."""
        if self.outbox_bytes > self.capacity:
            raise RingFull("the ring and its outbox are full")
        self._outbox.append(message)
        self.outbox_bytes += len(message)

    def send_always(self, message: bytes) -> None:
        """For answers: the requests they answer were admitted, so they are never refused."""
        self._outbox.append(message)
        self.outbox_bytes += len(message)

    def flush(self) -> int:
        """Move what fits from the outbox into the ring; returns the number of frames published."""
        if not self._outbox:
            return 0
        frames = self._fill()
        if self._outbox:
            # Ask for a wake-up, then look again: the consumer may have made room in between.
            self._words[layout.WORD_WANTS] = 1
            with _fence:
                pass
            frames += self._fill()
            if not self._outbox:
                self._words[layout.WORD_WANTS] = 0
        return frames

    def _fill(self) -> int:
        words, outbox, capacity = self._words, self._outbox, self.capacity
        tail = self._tail
        room = capacity - (tail - words[layout.WORD_HEAD])
        at = start = tail % capacity  # the run being gathered begins at `start`
        parts: list[bytes | memoryview] = []
        frames = 0
        while outbox:
            message = outbox[0]
            left = len(message) - self._sent
            length = left if left <= self._max_payload else self._max_payload
            span = (length + _HEADER + 15) & -16
            to_end = capacity - at
            if span > to_end:
                if to_end > room:
                    break
                pad = to_end - _HEADER
                check = layout.frame_check(tail, pad, PAD, self._generation)
                parts.append(FRAME_HEADER.pack(pad, PAD, self._generation, check))
                run = b"".join(parts)
                self._data[start : start + len(run)] = run
                parts.clear()
                tail += to_end
                room -= to_end
                at = start = 0
                continue
            if span > room:
                break
            flags = 0
            if self._sent == 0:
                flags = FIRST
            if length == left:
                flags |= LAST
            check = layout.frame_check(tail, length, flags, self._generation)
            parts.append(FRAME_HEADER.pack(length, flags, self._generation, check))
            if flags == WHOLE:
                parts.append(message)
            else:
                parts.append(memoryview(message)[self._sent : self._sent + length])
            if padding := span - _HEADER - length:
                parts.append(bytes(padding))
            tail += span
            at += span
            room -= span
            frames += 1
            self.outbox_bytes -= length
            if flags & LAST:
                outbox.popleft()
                self._sent = 0
                self._messages += 1
            else:
                self._sent += length
        if parts:
            run = b"".join(parts)
            self._data[start : start + len(run)] = run
        if tail != self._tail:
            self._tail = tail
            words[layout.WORD_TAIL] = tail
            used = capacity - room
            if used > self._high_water:
                self._high_water = used
        return frames

    def statistics(self) -> RingStatistics:
        used = self._tail - self._words[layout.WORD_HEAD]
        return RingStatistics(self.capacity, used, self.outbox_bytes, self._messages, self._high_water)


class RingReader(_Ring):
    def __init__(self, view: memoryview, *, generation: int, max_message: int) -> None:
        super().__init__(view, generation=generation)
        self._head = self._words[layout.WORD_HEAD]
        self._fragments: list[bytes] = []
        self._fragment_bytes = 0
        self._max_message = max_message
        self.made_room = False  # the producer waits for room and wants its bell rung

    def empty(self) -> bool:
        return self._words[layout.WORD_TAIL] == self._head

    def drain(self, max_bytes: int) -> list[bytes]:
        """Take complete messages, at most about max_bytes of frames; never blocks."""
        words = self._words
        tail = words[layout.WORD_TAIL]
        head = self._head
        if tail == head:
            return []
        capacity, data, generation = self.capacity, self._data, self._generation
        if not 0 <= tail - head <= capacity:
            raise RingPoisoned(f"tail {tail} and head {head} are further apart than the ring is long")
        stop = min(tail, head + max_bytes)
        messages: list[bytes] = []
        unpack = FRAME_HEADER.unpack_from
        while head < stop:
            at = head % capacity
            length, flags, frame_generation, check = unpack(data, at)
            span = (length + _HEADER + 15) & -16
            if (
                frame_generation != generation
                or check != layout.frame_check(head, length, flags, generation)
                or span > tail - head
                or at + span > capacity
            ):
                raise RingPoisoned(f"frame at {head} fails its checks")
            begin = at + _HEADER
            if flags == WHOLE:
                if self._fragments:
                    raise RingPoisoned(f"frame at {head}: a message began inside another")
                messages.append(data[begin : begin + length].tobytes())
            elif flags != PAD:
                self._join(head, flags, data[begin : begin + length].tobytes(), messages)
            head += span
        self._head = head
        words[layout.WORD_HEAD] = head
        with _fence:
            pass
        if words[layout.WORD_WANTS]:
            words[layout.WORD_WANTS] = 0
            self.made_room = True
        self._messages += len(messages)
        return messages

    def _join(self, position: int, flags: int, fragment: bytes, messages: list[bytes]) -> None:
        if bool(flags & FIRST) == bool(self._fragments) or flags & ~WHOLE:
            raise RingPoisoned(f"frame at {position}: fragment out of order")
        self._fragment_bytes += len(fragment)
        if self._fragment_bytes > self._max_message:
            raise RingPoisoned(f"frame at {position}: message longer than {self._max_message} bytes")
        self._fragments.append(fragment)
        if flags & LAST:
            messages.append(b"".join(self._fragments))
            self._fragments.clear()
            self._fragment_bytes = 0

    def statistics(self) -> RingStatistics:
        used = self._words[layout.WORD_TAIL] - self._head
        return RingStatistics(self.capacity, used, 0, self._messages, 0)
