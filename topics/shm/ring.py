"""A single-producer single-consumer byte ring: the algorithm over layout.py.

Rules: the producer writes frames, then publishes the tail once per flush, all messages of a flush in one frame if
they fit; the consumer copies frames out, then publishes the head once per drain. Neither ever blocks: what does not
fit waits in the producer's outbox. A message longer than a quarter of the ring travels in fragments and arrives
whole. A frame that fails its checks is never delivered: the reader raises RingPoisoned and the link is abandoned.

Messages keep their order, but for those sent with send_long: of these only some fragments are in the ring at a time,
and whatever is sent meanwhile overtakes them. So a message of many megabytes neither fills the ring nor keeps those
behind it waiting, and no flush or drain copies more of it than these fragments.

A crash of either side leaves the region as it is; the supervisor makes a new one with the next generation.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from topics.errors import RingFull, RingPoisoned
from topics.shm import layout
from topics.shm.layout import (
    BATCH,
    CHECK_MASK,
    CHECK_SALT,
    FIRST,
    FRAME_HEADER,
    HEADER_BYTES,
    LAST,
    LONG,
    LONG_FRAGMENTS,
    PAD,
    WHOLE,
)
from topics.shm.long import LongInput, LongOutput

_fence = threading.Lock()
_HEADER = FRAME_HEADER.size
_U32 = struct.Struct("<I")


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
        self._long: deque[LongOutput] = deque()
        self._long_ends: deque[int] = deque()  # where fragments end that may still be in the ring
        self._long_payload = layout.long_payload(self.capacity)
        self.long_bytes = 0  # of long messages that are not in the ring yet

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

    def send_long(self, parts: Sequence[bytes]) -> None:
        """Queue a message that others may overtake, given in parts; raises RingFull while a ring's worth waits."""
        if self.long_bytes > self.capacity:
            raise RingFull("another long message is on its way")
        message = LongOutput(parts)
        self._long.append(message)
        self.long_bytes += message.left

    @property
    def sent_all(self) -> bool:
        """Everything that was sent is in the ring."""
        return not self._outbox and not self._long

    def flush(self) -> int:
        """Move what fits from the outbox into the ring; returns the number of frames published."""
        if not self._outbox:
            return self._flush_long() if self._long else 0
        frames = self._fill()
        if self._outbox:
            # Ask for a wake-up, then look again: the consumer may have made room in between.
            self._words[layout.WORD_WANTS] = 1
            with _fence:
                pass
            frames += self._fill()  # the wish stays even if all went in: wake_after may have made it too
        if self._long and not self._outbox:
            frames += self._flush_long()
        return frames

    def _flush_long(self) -> int:
        frames = self._fill_long()
        if self._long:
            self._words[layout.WORD_WANTS] = 1
            with _fence:
                pass
            frames += self._fill_long()
        return frames

    @property
    def room_was_made(self) -> bool:
        """Something waits in the outbox and the consumer has drained since: worth another flush."""
        return (bool(self._outbox) or bool(self._long)) and not self._words[layout.WORD_WANTS]

    @property
    def position(self) -> int:
        """Where the next frame will begin. With an empty outbox: the end of all that was sent."""
        return self._tail

    def consumed(self, position: int) -> bool:
        """Whether the consumer has taken everything before a position."""
        return self._words[layout.WORD_HEAD] >= position

    def wake_after(self, position: int) -> bool:
        """The same; and if it has not, it rings when it next takes something."""
        if self.consumed(position):
            return True
        self._words[layout.WORD_WANTS] = 1
        with _fence:
            pass
        return self.consumed(position)

    def _fill(self) -> int:
        outbox = self._outbox
        count = len(outbox)
        if count > 1 and self._sent == 0:
            # The usual case: what one round gathered goes out as one frame.
            length = self.outbox_bytes + 4 * count + 4
            if length <= self._max_payload and self._reserve(length):
                payload = struct.pack(f"<{count + 1}I", count, *map(len, outbox)) + b"".join(outbox)
                self._put(payload, BATCH)
                outbox.clear()
                self.outbox_bytes = 0
                self._messages += count
                self._publish()
                return 1
        frames = 0
        while outbox:
            message = outbox[0]
            left = len(message) - self._sent
            length = left if left <= self._max_payload else self._max_payload
            if not self._reserve(length):
                break
            flags = (FIRST if self._sent == 0 else 0) | (LAST if length == left else 0)
            self._put(message if flags == WHOLE else message[self._sent : self._sent + length], flags)
            frames += 1
            self.outbox_bytes -= length
            if flags & LAST:
                outbox.popleft()
                self._sent = 0
                self._messages += 1
            else:
                self._sent += length
        self._publish()
        return frames

    def _fill_long(self) -> int:
        ends, head, frames = self._long_ends, self._words[layout.WORD_HEAD], 0
        while ends and ends[0] <= head:
            ends.popleft()
        while self._long and len(ends) < LONG_FRAGMENTS:
            message = self._long[0]
            length = min(message.left, self._long_payload)
            if not self._reserve(length):
                break
            flags = LONG if message.begun else LONG | FIRST
            fragment = message.take(length)
            if not message.left:
                flags |= LAST
                self._long.popleft()
                self._messages += 1
            self._put(fragment, flags)
            ends.append(self._tail)
            self.long_bytes -= length
            frames += 1
        self._publish()
        return frames

    def _reserve(self, length: int) -> bool:
        """See that a frame of this payload can be put at the tail; pads to the end of the ring if it must."""
        span = (length + _HEADER + 15) & -16
        room = self.capacity - (self._tail - self._words[layout.WORD_HEAD])
        to_end = self.capacity - self._tail % self.capacity
        if span <= to_end:
            return span <= room
        if to_end > room:
            return False
        self._put_header(to_end - _HEADER, PAD)
        self._tail += to_end
        return span <= room - to_end

    def _put(self, payload: bytes, flags: int) -> None:
        length = len(payload)
        at = self._put_header(length, flags)
        self._data[at : at + length] = payload
        self._tail += (length + _HEADER + 15) & -16

    def _put_header(self, length: int, flags: int) -> int:
        """Returns where the payload goes."""
        tail, generation = self._tail, self._generation
        check = (tail ^ (length << 32 | flags << 16 | generation) ^ CHECK_SALT) & CHECK_MASK
        at = tail % self.capacity
        FRAME_HEADER.pack_into(self._data, at, length, flags, generation, check)
        return at + _HEADER

    def _publish(self) -> None:
        words = self._words
        words[layout.WORD_TAIL] = self._tail
        used = self._tail - words[layout.WORD_HEAD]
        if used > self._high_water:
            self._high_water = used

    def statistics(self) -> RingStatistics:
        used = self._tail - self._words[layout.WORD_HEAD]
        waiting = self.outbox_bytes + self.long_bytes
        return RingStatistics(self.capacity, used, waiting, self._messages, self._high_water)


class RingReader(_Ring):
    def __init__(self, view: memoryview, *, generation: int, max_message: int) -> None:
        super().__init__(view, generation=generation)
        self._head = self._words[layout.WORD_HEAD]
        self._fragments: list[bytes] = []
        self._fragment_bytes = 0
        self._max_message = max_message
        self.long = LongInput(max_message)  # drain() fills it
        self.made_room = False  # the producer waits for room and wants its bell rung
        self.high_water = 0  # the most bytes that were there to be taken

    def empty(self) -> bool:
        return self._words[layout.WORD_TAIL] == self._head

    @property
    def waiting(self) -> int:
        """Bytes that are there to be taken."""
        return self._words[layout.WORD_TAIL] - self._head

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
        if tail - head > self.high_water:
            self.high_water = tail - head
        stop = min(tail, head + max_bytes)
        messages: list[bytes] = []
        unpack = FRAME_HEADER.unpack_from
        while head < stop:
            at = head % capacity
            length, flags, frame_generation, check = unpack(data, at)
            span = (length + _HEADER + 15) & -16
            if (
                frame_generation != generation
                or check != (head ^ (length << 32 | flags << 16 | generation) ^ CHECK_SALT) & CHECK_MASK
                or span > tail - head
                or at + span > capacity
            ):
                raise RingPoisoned(f"frame at {head} fails its checks")
            begin = at + _HEADER
            if flags in (WHOLE, BATCH):
                if self._fragments:
                    raise RingPoisoned(f"frame at {head}: a message began inside another")
                payload = data[begin : begin + length].tobytes()
                if flags == WHOLE:
                    messages.append(payload)
                else:
                    self._split(head, payload, messages)
            elif flags & LONG:
                self.long.add(head, flags ^ LONG, data[begin : begin + length])
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

    @staticmethod
    def _split(position: int, payload: bytes, messages: list[bytes]) -> None:
        count = _U32.unpack_from(payload)[0] if len(payload) >= 4 else len(payload)
        at = 4 + 4 * count
        if at > len(payload):
            raise RingPoisoned(f"frame at {position}: a batch of {count} messages in {len(payload)} bytes")
        lengths = struct.unpack_from(f"<{count}I", payload, 4)
        if at + sum(lengths) != len(payload):
            raise RingPoisoned(f"frame at {position}: the lengths of a batch don't add up")
        for length in lengths:
            messages.append(payload[at : at + length])
            at += length

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
