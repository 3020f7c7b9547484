"""Long messages in a ring: in fragments of which few are there at a time, overtaken by what is sent meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples
from test_ring import CAPACITY, Pair, message

from topics.errors import RingFull, RingPoisoned
from topics.shm import layout
from topics.shm.long import LongOutput

QUARTER = CAPACITY // 4


def arrive(pair: Pair, *, rounds: int = 1_000) -> tuple[list[bytes], list[bytes]]:
    """Everything, in rounds of a flush and a drain: the usual messages, and the long ones."""
    usual: list[bytes] = []
    long: list[bytes] = []
    for _ in range(rounds):
        pair.writer.flush()
        usual += pair.reader.drain(CAPACITY)
        long += [bytes(one) for one in pair.reader.long.take()]
        if pair.writer.sent_all and pair.reader.empty():
            break
    return usual, long


@examples(200)
@given(
    sizes=st.lists(st.lists(st.integers(0, 3 * CAPACITY), min_size=1, max_size=5), min_size=1, max_size=3),
    usual=st.lists(st.integers(0, 2 * CAPACITY), max_size=6),
    bound=st.integers(1, CAPACITY),
)
def test_every_message_comes_whole_and_each_kind_in_its_order(
    sizes: list[list[int]], usual: list[int], bound: int
) -> None:
    pair = Pair()
    long = [[message(at * 10 + part, size + 1) for part, size in enumerate(each)] for at, each in enumerate(sizes)]
    others = [message(1_000 + at, size) for at, size in enumerate(usual)]
    left, sent, got, got_long = list(long), list(others), [], []
    for _ in range(5_000):
        if left and pair.writer.long_bytes <= CAPACITY:
            pair.writer.send_long(left.pop(0))
        if sent:
            pair.writer.send_always(sent.pop(0))
        pair.writer.flush()
        got += pair.reader.drain(bound)
        got_long += [bytes(one) for one in pair.reader.long.take()]
        if not left and not sent and pair.writer.sent_all and pair.reader.empty():
            break
    assert got == others
    assert got_long == [b"".join(parts) for parts in long]
    assert pair.writer.long_bytes == pair.writer.outbox_bytes == 0


def test_a_long_message_takes_a_quarter_of_the_ring_at_most() -> None:
    pair = Pair()
    pair.writer.send_long([bytes(10 * CAPACITY)])
    for _ in range(5):
        pair.writer.flush()
        assert 0 < pair.reader.waiting <= QUARTER


def test_what_is_sent_behind_it_overtakes_it() -> None:
    pair = Pair()
    pair.writer.send_long([message(1, 10 * CAPACITY)])
    pair.writer.flush()
    for number in range(5):
        assert pair.pass_on(message(number, 200)) == [message(number, 200)], "it waits behind the long one"
    assert not pair.writer.sent_all
    assert arrive(pair) == ([], [message(1, 10 * CAPACITY)])
    assert pair.writer.sent_all


def test_others_are_not_refused_because_of_it() -> None:
    pair = Pair()
    pair.writer.send_long([bytes(10 * CAPACITY)])
    for _ in range(CAPACITY // 16):
        pair.writer.send(bytes(16))
    with pytest.raises(RingFull):
        pair.writer.send_long([b"another"])
    pair.writer.send(bytes(16))
    usual, long = arrive(pair)
    assert len(usual) == CAPACITY // 16 + 1
    assert long == [bytes(10 * CAPACITY)]
    pair.writer.send_long([b"another"])
    assert arrive(pair) == ([], [b"another"])


def test_fragments_of_both_kinds_may_mix() -> None:
    pair = Pair()
    pair.writer.send_long([message(1, 5 * CAPACITY)])
    pair.writer.flush()
    pair.writer.send_always(message(2, 3 * CAPACITY))
    assert arrive(pair) == ([message(2, 3 * CAPACITY)], [message(1, 5 * CAPACITY)])


def test_the_reader_wakes_the_writer_for_the_next_fragments() -> None:
    pair = Pair()
    pair.writer.send_long([bytes(3 * CAPACITY)])
    pair.writer.flush()
    assert not pair.writer.room_was_made
    pair.reader.drain(CAPACITY)
    assert pair.reader.made_room
    assert pair.writer.room_was_made
    arrive(pair)
    assert not pair.writer.room_was_made


def test_a_drain_copies_no_more_than_its_fragments() -> None:
    pair = Pair()
    pair.writer.send_long([bytes(3 * CAPACITY)])
    seen = 0
    while not pair.writer.sent_all:
        pair.writer.flush()
        before = pair.words[layout.WORD_HEAD]
        pair.reader.drain(CAPACITY)
        assert pair.words[layout.WORD_HEAD] - before <= QUARTER
        seen += 1
    assert seen >= 12
    assert [len(one) for one in pair.reader.long.take()] == [3 * CAPACITY]
    assert pair.reader.long.take() == []


@pytest.mark.parametrize(
    "flags",
    [
        [layout.LONG],
        [layout.LONG | layout.LAST],
        [layout.LONG | layout.FIRST, layout.LONG | layout.FIRST],
        [layout.LONG | layout.FIRST, layout.LONG | layout.WHOLE],
        [layout.LONG | layout.FIRST | layout.PAD],
        [layout.LONG | layout.BATCH],
    ],
)
def test_fragments_out_of_order(flags: list[int]) -> None:
    pair = Pair()
    for each in flags:
        pair.writer._put(b"x", each)
    pair.writer._publish()
    with pytest.raises(RingPoisoned, match="out of order"):
        pair.reader.drain(CAPACITY)


def test_one_that_is_longer_than_any_is_refused() -> None:
    pair = Pair(max_message=1_000)
    pair.writer.send_long([bytes(1_001)])
    with pytest.raises(RingPoisoned, match="longer than"):
        arrive(pair)


def test_its_parts_are_let_go_of_as_they_are_sent() -> None:
    output = LongOutput([b"abc", b"", b"def", b"g"])
    assert (output.left, output.begun) == (7, False)
    assert output.take(4) == b"abcd"
    assert output.begun
    assert output._parts == [b"", b"def", b"g"]
    assert output.take(3) == b"efg"
    assert output.left == 0
