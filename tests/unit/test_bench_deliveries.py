"""Deliveries are counted exactly, however the bytes are cut and whatever lies around them in the buffer."""

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import BenchFailed
from benchmarks.generators import payload
from benchmarks.generators.deliveries import MARGIN, SSE_FRAME_MARK, WS_FRAME_MARK, Deliveries, Pushed, Xread, stamps
from benchmarks.sides.redis import parse

pytestmark = pytest.mark.full

# Marks of everybody else, before and after the bytes that count.
STALE = b'event: record\n"op":"record""$seq":1,"at":"00000000000000000001"*1\r\n\r\n' * 20

batch_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)
cut_places = st.lists(st.integers(0, 5_000), max_size=8)


def stamp_of(number: int) -> int:
    return 1_000_000_000_000 + number


def record(number: int) -> bytes:
    before, after = payload.around_stamp(payload.stamped_record(size=80))
    return before + b"%020d" % stamp_of(number) + after


def fields(numbers: range) -> bytes:
    return b",".join(b'{"$seq":%d,"$ts":1748467200111,"data":%b}' % (number, record(number)) for number in numbers)


def sse_frame(numbers: range) -> bytes:
    data = b'{"topic":"bench-0","records":[%b],"from_seq":1,"to_seq":2,"head_seq":3}' % fields(numbers)
    return b"id: eyJqb2JzIjo0MDk4fQ\nevent: record\ndata: %b\n\n: hb 1748467205000\n\n" % data


def ws_frame(numbers: range) -> bytes:
    data = b'{"op":"record","topic":"bench-0","from_seq":1,"records":[%b]}' % fields(numbers)
    return b"\x81\x7e" + len(data).to_bytes(2, "big") + data


def xread_reply(numbers: range) -> bytes:
    entries = b"".join(
        b"*2\r\n" + payload.resp(entry_id(number))[4:] + payload.resp(b"data", record(number)) for number in numbers
    )
    return b"*1\r\n*2\r\n$7\r\nbench-0\r\n*%d\r\n%b" % (len(numbers), entries)


def entry_id(number: int) -> bytes:
    return b"1748467200111-%d" % number


def feed(deliveries: Deliveries, data: bytes, cuts: list[int]) -> list[bool]:
    edges = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
    said = []
    for begin, end in itertools.pairwise(edges):
        buffer = bytearray(STALE[:MARGIN].ljust(MARGIN, b"x") + data[begin:end] + STALE)
        said.append(deliveries.take(buffer, MARGIN + end - begin))
    return said


def numbered(sizes: list[int]) -> list[range]:
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize(("mark", "frame"), [(SSE_FRAME_MARK, sse_frame), (WS_FRAME_MARK, ws_frame)])
@given(sizes=batch_sizes, cuts=cut_places)
def test_pushed_frames_and_records_are_counted_once(
    mark: bytes, frame: Callable[[range], bytes], sizes: list[int], cuts: list[int]
) -> None:
    deliveries = Pushed(mark, timed=True)
    said = feed(deliveries, b"".join(frame(numbers) for numbers in numbered(sizes)), cuts)
    assert not any(said)
    assert deliveries.frames == len(sizes)
    assert deliveries.records == sum(sizes)
    assert deliveries.stamps == [stamp_of(number) for number in range(sum(sizes))]


@pytest.mark.parametrize(("mark", "frame"), [(SSE_FRAME_MARK, sse_frame), (WS_FRAME_MARK, ws_frame)])
def test_every_single_cut_and_every_byte_alone(mark: bytes, frame: Callable[[range], bytes]) -> None:
    data = frame(range(1)) + frame(range(1, 2))
    for cuts in [*([cut] for cut in range(1, len(data))), list(range(len(data)))]:
        deliveries = Pushed(mark, timed=True)
        feed(deliveries, data, cuts)
        assert (deliveries.frames, deliveries.records, len(deliveries.stamps)) == (2, 2, 2), cuts


def test_what_is_not_timed_has_no_stamps() -> None:
    deliveries = Pushed(SSE_FRAME_MARK, timed=False)
    feed(deliveries, sse_frame(range(3)), [])
    assert deliveries.stamps == []


@given(sizes=batch_sizes, cuts=cut_places)
@example(sizes=[1], cuts=list(range(5_000)))
def test_replies_of_redis_are_counted_and_asked_after(sizes: list[int], cuts: list[int]) -> None:
    deliveries = Xread("bench-0", after=b"0-0", count=1_000, timed=True)
    assert deliveries.question() == payload.resp_xread("bench-0", after=b"0-0", count=1_000)
    for numbers in numbered(sizes):
        said = feed(deliveries, xread_reply(numbers), cuts)
        assert said == [False] * (len(said) - 1) + [True]
        assert deliveries.question() == payload.resp_xread("bench-0", after=entry_id(numbers[-1]), count=1_000)
    assert deliveries.frames == len(sizes)
    assert deliveries.records == sum(sizes)
    assert deliveries.stamps == [stamp_of(number) for number in range(sum(sizes))]


def test_the_replies_made_here_are_what_redis_sends() -> None:
    found = parse(xread_reply(range(2)))
    assert found is not None
    assert found[0] == [[b"bench-0", [[entry_id(number), [b"data", record(number)]] for number in range(2)]]]


@pytest.mark.parametrize(
    "data", [b"-ERR unknown command\r\n", xread_reply(range(1)) + b"*", xread_reply(range(1)) * 2, b"*-1\r\n"]
)
def test_anything_else_from_redis_stops_the_run(data: bytes) -> None:
    with pytest.raises(BenchFailed):
        feed(Xread("bench-0", after=b"0-0", count=1_000, timed=False), data, [])


def test_stamps_are_found_within_their_bounds() -> None:
    data = bytearray(record(1) + record(2))
    assert stamps(data, 0, len(data)) == [stamp_of(1), stamp_of(2)]
    assert stamps(data, 80, len(data)) == [stamp_of(2)]
    digits_end = bytes(data).find(b'","note')
    assert stamps(data, 0, digits_end - 1) == []
    assert stamps(data, 0, digits_end) == [stamp_of(1)]


def test_a_stamped_record_is_json_of_its_size() -> None:
    made = payload.stamped_record(size=80)
    assert len(made) == 80
    assert set(json.loads(made)["at"]) == {"0"}
    with pytest.raises(ValueError, match="at least"):
        payload.stamped_record(size=40)
    with pytest.raises(ValueError, match="not one stamp"):
        payload.around_stamp(made + made)
