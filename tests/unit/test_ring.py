"""The ring on a bytearray: order, backpressure, wrap-around, fragments, and everything a broken peer could leave."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.errors import RingFull, RingPoisoned
from topics.shm import layout, ring
from topics.shm.ring import RingReader, RingWriter, format_link

CAPACITY = 4096  # the smallest ring the layout can make: wraps and fragments come soon
PAYLOAD = layout.max_payload(CAPACITY)
GENERATION = 0x1_0007  # above 16 bits, of which a frame carries the low ones


class Pair:
    """One ring with both of its ends."""

    def __init__(self, *, capacity: int = CAPACITY, generation: int = GENERATION, max_message: int = 1 << 30) -> None:
        self.memory = bytearray(layout.link_bytes(capacity))
        format_link(memoryview(self.memory), generation=generation, ring_bytes=capacity)
        self.view = memoryview(self.memory)[: layout.ring_span(capacity)]
        self.words = self.view[: layout.HEADER_BYTES].cast("Q")
        self.writer = RingWriter(self.view, generation=generation)
        self.reader = RingReader(self.view, generation=generation, max_message=max_message)
        self.frames = self.view[layout.HEADER_BYTES :]

    def pass_on(self, *messages: bytes) -> list[bytes]:
        for message in messages:
            self.writer.send(message)
        self.writer.flush()
        return self.reader.drain(CAPACITY)

    def move_to(self, position: int) -> None:
        """Let enough messages pass that the next frame starts at this offset of the ring."""
        while self.words[layout.WORD_TAIL] % CAPACITY != position:
            left = (position - self.words[layout.WORD_TAIL]) % CAPACITY
            self.pass_on(bytes(min(left, 1024) - 16))


def message(number: int, length: int) -> bytes:
    """Bytes that show when they are cut, shifted or of another message."""
    block = hashlib.blake2b(number.to_bytes(8, "little")).digest()
    return (block * (length // len(block) + 1))[:length]


# --- what goes in comes out --------------------------------------------------------------------------

LENGTHS = st.one_of(
    st.integers(0, 64),
    st.integers(PAYLOAD - 20, PAYLOAD + 20),
    st.integers(CAPACITY - 40, CAPACITY + 40),
    st.integers(0, 5 * CAPACITY),
)


@examples(150)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("send"), LENGTHS),
            st.tuples(st.just("flush"), st.just(0)),
            st.tuples(st.just("drain"), st.integers(0, 2 * CAPACITY)),
        ),
        max_size=60,
    ),
    start=st.integers(0, CAPACITY // 16 - 1),
)
def test_any_interleaving_delivers_the_same_messages_in_order(steps: list[tuple[str, int]], start: int) -> None:
    pair = Pair()
    pair.move_to(start * 16)
    sent: list[bytes] = []
    got: list[bytes] = []
    for step, size in steps:
        if step == "send":
            try:
                pair.writer.send(message(len(sent), size))
            except RingFull:
                assert pair.writer.outbox_bytes > pair.writer.capacity
            else:
                sent.append(message(len(sent), size))
        elif step == "flush":
            pair.writer.flush()
        else:
            got += pair.reader.drain(size)
        used = pair.writer.statistics().used
        assert 0 <= used <= CAPACITY
        assert used % layout.ALIGN == 0
    while len(got) < len(sent):
        before = pair.words[layout.WORD_HEAD]
        pair.writer.flush()
        got += pair.reader.drain(CAPACITY)
        assert pair.words[layout.WORD_HEAD] > before, "stuck"
    assert got == sent
    assert pair.reader.empty()
    assert pair.writer.outbox_bytes == 0
    assert pair.writer.flush() == 0


@examples(60)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=20), bound=st.integers(1, 300))
def test_a_small_bound_makes_many_drains_of_the_same_messages(lengths: list[int], bound: int) -> None:
    pair = Pair()
    sent = [message(at, length) for at, length in enumerate(lengths)]
    got: list[bytes] = []
    for one in sent:
        pair.writer.send_always(one)
    for _ in range(sum(lengths) + 100 * len(lengths)):
        pair.writer.flush()
        got += pair.reader.drain(bound)
        if len(got) == len(sent):
            break
    assert got == sent


@pytest.mark.parametrize(
    "length", [0, 1, 15, 16, 17, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 2 * PAYLOAD, CAPACITY, 10 * CAPACITY]
)
@pytest.mark.parametrize("start", [0, 16, CAPACITY - 32, CAPACITY - 16])
def test_every_length_from_every_corner(length: int, start: int) -> None:
    pair = Pair()
    pair.move_to(start)
    pair.writer.send(message(1, length))
    pair.writer.send_always(message(2, 5))
    got: list[bytes] = []
    while len(got) < 2:
        pair.writer.flush()
        assert not pair.reader.empty()
        got += pair.reader.drain(CAPACITY)
    assert got == [message(1, length), message(2, 5)]


def test_nothing_is_visible_before_the_flush() -> None:
    pair = Pair()
    pair.writer.send(b"x")
    assert pair.reader.empty()
    assert pair.reader.drain(CAPACITY) == []
    pair.writer.flush()
    assert not pair.reader.empty()
    assert pair.reader.drain(CAPACITY) == [b"x"]


def test_a_drain_takes_at_most_its_bound_and_at_least_one_frame() -> None:
    pair = Pair()
    for number in range(10):
        pair.writer.send(message(number, 100))
        pair.writer.flush()
    assert pair.reader.drain(1) == [message(0, 100)]
    assert len(pair.reader.drain(2 * layout.frame_span(100))) == 2
    assert len(pair.reader.drain(CAPACITY)) == 7


def test_what_one_flush_gathered_is_one_frame_if_it_fits() -> None:
    pair = Pair()
    for number in range(8):
        pair.writer.send(message(number, 10 * number))
    assert pair.writer.flush() == 1
    assert pair.reader.drain(1) == [message(number, 10 * number) for number in range(8)]
    for number in range(8):
        pair.writer.send(message(number, PAYLOAD // 4))
    assert pair.writer.flush() == 8
    assert len(pair.reader.drain(CAPACITY)) == 8


def test_a_batch_behind_half_a_message_waits_for_its_end() -> None:
    pair = Pair()
    sent = [message(1, 2 * CAPACITY), message(2, 5), message(3, 6)]
    for one in sent:
        pair.writer.send_always(one)
    got: list[bytes] = []
    while len(got) < 3:
        pair.writer.flush()
        got += pair.reader.drain(CAPACITY)
    assert got == sent


def test_room_was_made_only_while_something_waits_for_it() -> None:
    pair = Pair()
    assert not pair.writer.room_was_made
    for number in range(10):
        pair.writer.send_always(message(number, 1000))
    pair.writer.flush()
    assert not pair.writer.room_was_made
    pair.reader.drain(CAPACITY)
    assert pair.writer.room_was_made
    pair.writer.flush()
    assert not pair.writer.room_was_made


def test_a_large_message_arrives_whole_or_not_at_all() -> None:
    pair = Pair()
    large = message(7, 3 * CAPACITY)
    pair.writer.send(large)
    drained: list[bytes] = []
    while not drained:
        pair.writer.flush()
        drained = pair.reader.drain(CAPACITY)
    assert drained == [large]


# --- wrap-around -------------------------------------------------------------------------------------


def test_the_rest_of_the_ring_is_padded_when_a_frame_does_not_fit_there() -> None:
    pair = Pair()
    pair.move_to(CAPACITY - 64)
    assert pair.pass_on(message(1, 100)) == [message(1, 100)]
    length, flags, generation, check = layout.FRAME_HEADER.unpack_from(pair.frames, CAPACITY - 64)
    assert (length, flags, generation) == (48, layout.PAD, GENERATION & 0xFFFF)
    assert check == layout.frame_check(
        pair.words[layout.WORD_TAIL] - 64 - layout.frame_span(100), 48, layout.PAD, generation
    )
    assert pair.words[layout.WORD_TAIL] % CAPACITY == layout.frame_span(100)


def test_a_frame_that_fits_exactly_needs_no_padding() -> None:
    pair = Pair()
    pair.move_to(CAPACITY - 64)
    assert pair.pass_on(message(1, 48)) == [message(1, 48)]
    assert pair.words[layout.WORD_TAIL] % CAPACITY == 0


def test_padding_waits_for_room_too() -> None:
    pair = Pair()
    pair.move_to(CAPACITY - 64)
    head = pair.words[layout.WORD_HEAD]
    for number in range(8):
        pair.writer.send_always(message(number, 1000))
    pair.writer.flush()
    assert pair.words[layout.WORD_TAIL] - head <= CAPACITY
    got: list[bytes] = []
    while len(got) < 8:
        got += pair.reader.drain(CAPACITY)
        pair.writer.flush()
    assert got == [message(number, 1000) for number in range(8)]


def test_positions_never_wrap() -> None:
    pair = Pair()
    for number in range(50):
        assert pair.pass_on(message(number, 900)) == [message(number, 900)]
    assert pair.words[layout.WORD_TAIL] == pair.words[layout.WORD_HEAD] > 10 * CAPACITY


# --- backpressure ------------------------------------------------------------------------------------


def test_a_full_ring_and_outbox_refuse_and_room_opens_them_again() -> None:
    pair = Pair()
    sent = 0
    while pair.writer.outbox_bytes <= CAPACITY:
        pair.writer.send(message(sent, 500))
        sent += 1
        pair.writer.flush()
    with pytest.raises(RingFull):
        pair.writer.send(b"")
    refused_at = sent
    got: list[bytes] = []
    while len(got) < refused_at:
        got += pair.reader.drain(CAPACITY)
        pair.writer.flush()
    pair.writer.send(message(sent, 500))
    pair.writer.flush()
    got += pair.reader.drain(CAPACITY)
    assert got == [message(number, 500) for number in range(refused_at + 1)]


def test_answers_are_never_refused() -> None:
    pair = Pair()
    for number in range(100):
        pair.writer.send_always(message(number, 1000))
    got: list[bytes] = []
    while len(got) < 100:
        pair.writer.flush()
        got += pair.reader.drain(CAPACITY)
    assert got == [message(number, 1000) for number in range(100)]


def test_a_producer_without_room_asks_to_be_woken_once() -> None:
    pair = Pair()
    for number in range(10):
        pair.writer.send_always(message(number, 1000))
    pair.writer.flush()
    assert pair.words[layout.WORD_WANTS] == 1
    assert not pair.reader.made_room
    pair.reader.drain(CAPACITY)
    assert pair.reader.made_room
    assert pair.words[layout.WORD_WANTS] == 0
    pair.reader.made_room = False
    pair.writer.flush()
    pair.reader.drain(CAPACITY)
    pair.reader.made_room = False
    pair.writer.flush()
    pair.reader.drain(CAPACITY)
    assert pair.writer.outbox_bytes == 0
    pair.reader.made_room = False
    assert pair.pass_on(b"x") == [b"x"]
    assert not pair.reader.made_room


def test_statistics() -> None:
    pair = Pair()
    pair.writer.send(bytes(100))
    pair.writer.send(bytes(200))
    assert pair.writer.statistics().outbox_bytes == 300
    pair.writer.flush()
    sent = pair.writer.statistics()
    assert (sent.capacity, sent.outbox_bytes, sent.messages) == (CAPACITY, 0, 2)
    assert sent.used == sent.high_water == layout.frame_span(12 + 300)  # one frame for both
    pair.reader.drain(CAPACITY)
    assert pair.reader.statistics().messages == 2
    assert pair.reader.statistics().used == pair.writer.statistics().used == 0
    assert pair.writer.statistics().high_water == sent.high_water


# --- a ring that can't be trusted --------------------------------------------------------------------


def refuses(pair: Pair) -> bool:
    try:
        delivered = pair.reader.drain(CAPACITY)
    except RingPoisoned:
        return True
    assert delivered == [], "something was delivered from a poisoned ring"
    return False


@pytest.mark.parametrize("start", [0, 1024, CAPACITY - 16])
@pytest.mark.parametrize("length", [0, 40])
@pytest.mark.parametrize("byte", range(layout.FRAME_HEADER.size))
def test_every_flipped_bit_of_a_frame_header_is_found(start: int, length: int, byte: int) -> None:
    for bit in range(8):
        pair = Pair()
        pair.move_to(start)
        pair.writer.send(message(1, length))
        pair.writer.flush()
        at = start if start + layout.frame_span(length) <= CAPACITY else 0
        pair.frames[at + byte] ^= 1 << bit
        with pytest.raises(RingPoisoned):
            pair.reader.drain(CAPACITY)


@pytest.mark.parametrize("byte", range(layout.FRAME_HEADER.size))
def test_padding_is_checked_like_any_frame(byte: int) -> None:
    pair = Pair()
    pair.move_to(CAPACITY - 64)
    pair.writer.send(message(1, 100))
    pair.writer.flush()
    pair.frames[CAPACITY - 64 + byte] ^= 0x10
    with pytest.raises(RingPoisoned):
        pair.reader.drain(CAPACITY)


def test_good_messages_before_a_bad_frame_do_not_come_out_either() -> None:
    pair = Pair()
    for message in (b"good", b"bad"):
        pair.writer.send(message)
        pair.writer.flush()
    pair.frames[layout.frame_span(4)] ^= 1
    with pytest.raises(RingPoisoned):
        pair.reader.drain(CAPACITY)
    with pytest.raises(RingPoisoned):
        pair.reader.drain(CAPACITY)


@pytest.mark.parametrize("extra", [16, 4096, 2**40, 2**63])
def test_a_tail_further_ahead_than_the_ring_is_long(extra: int) -> None:
    pair = Pair()
    pair.writer.send(b"x")
    pair.writer.flush()
    pair.words[layout.WORD_TAIL] = CAPACITY + extra
    with pytest.raises(RingPoisoned):
        pair.reader.drain(CAPACITY)


def test_a_tail_behind_the_head() -> None:
    pair = Pair()
    pair.pass_on(b"x", b"y")
    pair.words[layout.WORD_TAIL] = 16
    with pytest.raises(RingPoisoned):
        pair.reader.drain(CAPACITY)


@pytest.mark.parametrize("ahead", [8, 16, 32])
def test_a_tail_that_was_published_before_its_frame(ahead: int) -> None:
    pair = Pair()
    pair.words[layout.WORD_TAIL] = ahead
    assert refuses(pair)


def test_a_tail_inside_a_frame() -> None:
    pair = Pair()
    pair.writer.send(message(1, 100))
    pair.writer.flush()
    pair.words[layout.WORD_TAIL] -= 16
    assert refuses(pair)


def test_a_stale_frame_of_the_last_round_is_not_delivered_again() -> None:
    pair = Pair()
    for number in range(4):
        pair.pass_on(message(number, CAPACITY // 4 - 16))
    assert pair.words[layout.WORD_TAIL] == CAPACITY
    pair.words[layout.WORD_TAIL] += CAPACITY // 4
    assert refuses(pair)


@pytest.mark.parametrize("generation", [GENERATION + 1, GENERATION - 1, GENERATION + 0x1_0000, 0])
def test_a_ring_of_another_generation_is_not_opened(generation: int) -> None:
    pair = Pair()
    with pytest.raises(RingPoisoned, match="generation"):
        RingReader(pair.view, generation=generation, max_message=100)
    with pytest.raises(RingPoisoned, match="generation"):
        RingWriter(pair.view, generation=generation)


def test_frames_of_another_generation_are_not_delivered() -> None:
    pair = Pair()
    pair.writer.send(b"old")
    pair.writer.flush()
    pair.words[layout.WORD_GENERATION] = GENERATION + 1
    fresh = RingReader(pair.view, generation=GENERATION + 1, max_message=100)
    with pytest.raises(RingPoisoned):
        fresh.drain(CAPACITY)


@pytest.mark.parametrize("word", [layout.WORD_MAGIC, layout.WORD_CAPACITY])
def test_memory_that_is_no_ring_is_not_opened(word: int) -> None:
    pair = Pair()
    pair.words[word] ^= 0x1000
    with pytest.raises(RingPoisoned):
        RingReader(pair.view, generation=GENERATION, max_message=100)
    with pytest.raises(RingPoisoned):
        RingWriter(pair.view, generation=GENERATION)


def put_frames(pair: Pair, *frames: tuple[int, bytes]) -> None:
    """Frames with good headers, in an order no writer would choose."""
    position = pair.words[layout.WORD_TAIL]
    for flags, payload in frames:
        check = layout.frame_check(position, len(payload), flags, GENERATION & 0xFFFF)
        header = layout.FRAME_HEADER.pack(len(payload), flags, GENERATION & 0xFFFF, check)
        raw = header + payload
        pair.frames[position : position + len(raw)] = raw
        position += layout.frame_span(len(payload))
    pair.words[layout.WORD_TAIL] = position


@pytest.mark.parametrize(
    "frames",
    [
        [(0, b"middle of nothing")],
        [(layout.LAST, b"end of nothing")],
        [(layout.FIRST, b"a"), (layout.FIRST, b"b")],
        [(layout.FIRST, b"a"), (layout.WHOLE, b"b")],
        [(layout.FIRST, b"a"), (layout.LAST, b"b"), (layout.LAST, b"c")],
        [(layout.FIRST | layout.PAD, b"a")],
        [(layout.LAST | layout.PAD, b"a")],
        [(16, b"a")],
        [(0x8000 | layout.WHOLE, b"a")],
        [(layout.FIRST, b"a"), (layout.BATCH, struct.pack("<2I", 1, 1) + b"b")],
        [(layout.BATCH | layout.FIRST, struct.pack("<2I", 1, 1) + b"b")],
        [(layout.BATCH, b"")],
        [(layout.BATCH, b"abc")],
        [(layout.BATCH, struct.pack("<I", 1))],
        [(layout.BATCH, struct.pack("<I", 2**32 - 1))],
        [(layout.BATCH, struct.pack("<2I", 1, 2) + b"b")],
        [(layout.BATCH, struct.pack("<2I", 1, 2**32 - 1) + b"b")],
        [(layout.BATCH, struct.pack("<2I", 1, 1) + b"bb")],
        [(layout.BATCH, struct.pack("<3I", 2, 1, 1) + b"b")],
    ],
    ids=str,
)
def test_fragments_out_of_order_and_unknown_flags(frames: list[tuple[int, bytes]]) -> None:
    pair = Pair()
    put_frames(pair, *frames)
    with pytest.raises(RingPoisoned):
        pair.reader.drain(CAPACITY)


def test_padding_between_fragments_is_fine() -> None:
    pair = Pair()
    put_frames(pair, (layout.FIRST, b"a"), (layout.PAD, bytes(16)), (0, b"b"), (layout.PAD, b""), (layout.LAST, b"c"))
    assert pair.reader.drain(CAPACITY) == [b"abc"]


@pytest.mark.parametrize("flags", [layout.FIRST, layout.WHOLE])
def test_a_frame_longer_than_what_is_left_of_the_ring(flags: int) -> None:
    pair = Pair()
    length = CAPACITY
    check = layout.frame_check(0, length, flags, GENERATION & 0xFFFF)
    pair.frames[:16] = layout.FRAME_HEADER.pack(length, flags, GENERATION & 0xFFFF, check)
    pair.words[layout.WORD_TAIL] = CAPACITY
    with pytest.raises(RingPoisoned):
        pair.reader.drain(CAPACITY)


def test_a_message_longer_than_any_we_send_is_refused() -> None:
    pair = Pair(max_message=2 * CAPACITY)
    pair.writer.send(bytes(2 * CAPACITY + 1))

    def drain_all() -> None:
        for _ in range(10):
            pair.writer.flush()
            assert pair.reader.drain(CAPACITY) == []

    with pytest.raises(RingPoisoned, match="longer"):
        drain_all()


def test_both_rings_of_a_link_are_laid_out_apart() -> None:
    memory = memoryview(bytearray(layout.link_bytes(CAPACITY)))
    format_link(memory, generation=5, ring_bytes=CAPACITY)
    span = layout.ring_span(CAPACITY)
    there, back = memory[:span], memory[span:]
    one, two = RingWriter(there, generation=5), RingWriter(back, generation=5)
    one.send(b"there")
    two.send(b"back")
    one.flush()
    two.flush()
    assert RingReader(there, generation=5, max_message=9).drain(CAPACITY) == [b"there"]
    assert RingReader(back, generation=5, max_message=9).drain(CAPACITY) == [b"back"]


def test_a_closed_ring_lets_go_of_its_memory() -> None:
    memory = bytearray(layout.link_bytes(CAPACITY))
    view = memoryview(memory)
    format_link(view, generation=5, ring_bytes=CAPACITY)
    half = view[: layout.ring_span(CAPACITY)]
    writer, reader = RingWriter(half, generation=5), RingReader(half, generation=5, max_message=9)
    writer.close()
    reader.close()
    half.release()
    view.release()
    memory.clear()


# --- knowing how far the other side is -----------------------------------------------------------------


def test_a_position_is_consumed_when_everything_before_it_was_taken() -> None:
    pair = Pair()
    start = pair.writer.position
    assert pair.writer.consumed(start)
    pair.writer.send(message(1, 100))
    assert pair.writer.position == start  # not in the ring yet
    pair.writer.flush()
    first = pair.writer.position
    pair.writer.send(message(2, 100))
    pair.writer.flush()
    second = pair.writer.position
    assert start < first < second
    assert not pair.writer.consumed(first)
    pair.reader.drain(1)
    assert pair.writer.consumed(first)
    assert not pair.writer.consumed(second)
    pair.reader.drain(CAPACITY)
    assert pair.writer.consumed(second)


def test_a_wish_is_granted_with_the_next_drain() -> None:
    pair = Pair()
    pair.writer.send(b"x")
    pair.writer.flush()
    assert not pair.writer.wake_after(pair.writer.position)
    assert pair.reader.drain(CAPACITY) == [b"x"]
    assert pair.reader.made_room
    assert pair.writer.wake_after(pair.writer.position)


def test_nobody_is_woken_who_did_not_ask() -> None:
    pair = Pair()
    pair.writer.send(b"x")
    pair.writer.flush()
    assert not pair.writer.consumed(pair.writer.position)
    pair.reader.drain(CAPACITY)
    assert not pair.reader.made_room
    assert pair.writer.wake_after(pair.writer.position)  # nothing to wait for
    pair.writer.send(b"y")
    pair.writer.flush()
    pair.reader.drain(CAPACITY)
    assert not pair.reader.made_room


def test_a_wish_outlives_a_drain_that_took_only_a_part() -> None:
    """It is granted then, and has to be made again."""
    pair = Pair()
    for number in range(2):
        pair.writer.send(message(number, 500))
        pair.writer.flush()
    end = pair.writer.position
    assert not pair.writer.wake_after(end)
    pair.reader.drain(1)
    assert pair.reader.made_room
    pair.reader.made_room = False
    assert not pair.writer.wake_after(end)
    pair.reader.drain(CAPACITY)
    assert pair.reader.made_room


def test_a_flush_that_makes_it_leaves_a_wish_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made exactly between the two tries of a flush, by a reader that has yet to look at the wish."""
    pair = Pair()
    pair.pass_on()
    for number in range(4):
        pair.writer.send_always(message(number, PAYLOAD))
    pair.writer.flush()
    assert pair.writer.outbox_bytes
    waiting = pair.writer.position
    assert not pair.writer.wake_after(waiting)
    head = pair.words[layout.WORD_HEAD]

    class Between:
        """The fence of the writer's flush: here the reader publishes a head, and gets no further."""

        def __enter__(self) -> None:
            pair.words[layout.WORD_HEAD] = head + layout.frame_span(PAYLOAD)

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(ring, "_fence", Between())
    pair.writer.flush()
    assert pair.writer.outbox_bytes == 0
    assert not pair.writer.consumed(waiting)
    assert pair.words[layout.WORD_WANTS] == 1, "the reader would look now, and see no wish"


def test_the_reader_passes_between_the_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken after the first look and before the wish could be seen: the second look finds it."""
    pair = Pair()
    pair.writer.send(b"x")
    pair.writer.flush()
    end = pair.writer.position

    class Between:
        def __enter__(self) -> None:
            pair.words[layout.WORD_HEAD] = end

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(ring, "_fence", Between())
    assert pair.writer.wake_after(end)


@examples(100)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("send"), LENGTHS),
            st.tuples(st.just("flush"), st.just(0)),
            st.tuples(st.just("drain"), st.integers(1, 2 * CAPACITY)),
            st.tuples(st.just("wait"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_whoever_waits_is_woken_by_the_drain_that_reaches_its_position(steps: list[tuple[str, int]]) -> None:
    pair = Pair()
    waiting: int | None = None
    for step, size in steps:
        if step == "send":
            pair.writer.send_always(message(1, size))
        elif step == "flush":
            pair.writer.flush()
        elif step == "wait":
            if waiting is None and not pair.writer.wake_after(pair.writer.position):
                waiting = pair.writer.position
        else:
            pair.reader.made_room = False
            before = pair.words[layout.WORD_HEAD]
            pair.reader.drain(size)
            if waiting is not None and pair.words[layout.WORD_HEAD] > before:
                assert pair.reader.made_room, "something was taken and nobody rings"
                assert pair.writer.consumed(waiting) == (pair.words[layout.WORD_HEAD] >= waiting)
                waiting = None  # woken: it looks, and asks again if it must
