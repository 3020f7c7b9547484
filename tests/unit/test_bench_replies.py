"""The recognisers must find the end of an answer however the bytes are cut, and never look beyond them."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import BenchFailed
from benchmarks.generators.replies import HttpReplies, PipelineReplies, Replies, SizedReplies, WsReplies, ws_frame_end
from benchmarks.sides.redis import parse

pytestmark = pytest.mark.full

STALE = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n-\n-\n" * 40


def feed(replies: Replies, data: bytes, cuts: list[int]) -> list[bool]:
    """Give the data in pieces, in a buffer full of somebody else's bytes."""
    edges = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
    said = []
    for begin, end in itertools.pairwise(edges):
        buffer = bytearray(STALE + b"x" * len(data))
        buffer[: end - begin] = data[begin:end]
        said.append(replies.take(buffer, end - begin))
    return said


def http(body: bytes, *, status: bytes = b"200 OK", length_name: bytes = b"Content-Length") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n%b: %d\r\n\r\n" % (status, length_name, len(body)) + body


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5), st.lists(st.integers(0, 400), max_size=6))
def test_http_answers_end_where_they_end_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    replies = HttpReplies()
    for body in bodies:
        said = feed(replies, http(body), cuts)
        assert said == [False] * (len(said) - 1) + [True]


@given(st.integers(1, 30), st.integers(1, 4), st.lists(st.integers(0, 1_000), max_size=6))
def test_pipelines_are_counted_however_they_are_cut(depth: int, times: int, cuts: list[int]) -> None:
    replies = PipelineReplies(depth)
    data = b"".join(b"$15\r\n1700000000000-%d\r\n" % (number % 10) for number in range(depth))
    for _ in range(times):
        said = feed(replies, data, cuts)
        assert said == [False] * (len(said) - 1) + [True]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=5), st.lists(st.integers(0, 600), max_size=6))
def test_sized_answers_end_at_their_size(sizes: list[int], cuts: list[int]) -> None:
    replies = SizedReplies(itertools.cycle(sizes))
    for size in sizes:
        said = feed(replies, b"*" * size, cuts)
        assert said == [False] * (len(said) - 1) + [True]


@pytest.mark.parametrize("status", [b"201 Created", b"200 OK"])
def test_successes_pass(status: bytes) -> None:
    assert feed(HttpReplies(), http(b"{}", status=status, length_name=b"content-length"), []) == [True]


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 Service Unavailable", b"202 Accepted"])
def test_any_other_status_stops_the_run(status: bytes) -> None:
    with pytest.raises(BenchFailed, match="not a success"):
        feed(HttpReplies(), http(b"{}", status=status), [])


def test_an_error_after_successes_with_the_same_length_is_seen() -> None:
    replies = HttpReplies()
    assert feed(replies, http(b"{}"), []) == [True]
    with pytest.raises(BenchFailed, match="not a success"):
        feed(replies, http(b"{}", status=b"503 no"), [])


def test_bytes_beyond_the_answer_stop_the_run() -> None:
    with pytest.raises(BenchFailed, match="more than"):
        feed(HttpReplies(), http(b"{}") + b"x", [])
    with pytest.raises(BenchFailed, match="more than"):
        feed(HttpReplies(), http(b"{}") + b"x", [len(http(b"")) + 1])
    with pytest.raises(BenchFailed, match="longer"):
        feed(SizedReplies(iter([3])), b"*123", [])
    with pytest.raises(BenchFailed, match="more answers"):
        feed(PipelineReplies(1), b"$1\r\na\r\n$1\r\n", [])


def test_an_answer_without_length_stops_the_run() -> None:
    with pytest.raises(BenchFailed, match="Content-Length"):
        feed(HttpReplies(), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [])


@pytest.mark.parametrize("cuts", [[], [5], [22], [23]])
@pytest.mark.parametrize("before", [b"", b"$15\r\n1700000000000-0\r\n"])
def test_an_error_anywhere_in_a_pipeline_stops_the_run(before: bytes, cuts: list[int]) -> None:
    with pytest.raises(BenchFailed, match="error from Redis"):
        feed(PipelineReplies(3), before + b"-OOM command not allowed\r\n", cuts)


def test_a_minus_within_an_id_is_no_error() -> None:
    data = b"$15\r\n1700000000000-0\r\n"
    assert feed(PipelineReplies(1), data, [data.index(b"-")]) == [False, True]


def test_an_error_instead_of_a_page_stops_the_run() -> None:
    with pytest.raises(BenchFailed, match="error from Redis"):
        feed(SizedReplies(iter([100])), b"-WRONGTYPE\r\n", [])


def test_redis_replies_are_parsed_whole_or_not_at_all() -> None:
    data = b"*2\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nd\r\n$2\r\n{}\r\n:7\r\n"
    value = [[b"1-0", [b"d", b"{}"]], 7]
    assert parse(data) == (value, len(data))
    assert all(parse(data[:end]) is None for end in range(len(data)))
    assert parse(b"+PONG\r\n") == (b"PONG", 7)
    assert parse(b"$-1\r\n") == (None, 5)
    with pytest.raises(BenchFailed, match="LOADING"):
        parse(b"-LOADING Redis is loading\r\n")
    with pytest.raises(BenchFailed, match="not a Redis reply"):
        parse(b"HTTP/1.1 400\r\n")


def ack(size: int) -> bytes:
    """One acknowledgement whose frame has that many bytes of payload, at least."""
    message = b'{"op":"ack","first_seq":1,"note":"%b"}' % (b"x" * max(0, size - 36))
    length = len(message)
    if length < 126:
        return b"\x81" + bytes([length]) + message
    if length < 1 << 16:
        return b"\x81\x7e" + length.to_bytes(2, "big") + message
    return b"\x81\x7f" + length.to_bytes(8, "big") + message


@given(
    st.lists(st.sampled_from([36, 125, 126, 200, 300]), min_size=1, max_size=6),
    st.integers(1, 3),
    st.lists(st.integers(0, 2_000), max_size=8),
)
@example([36, 126], 2, list(range(2_000)))
def test_acknowledgements_are_counted_however_they_are_cut(sizes: list[int], times: int, cuts: list[int]) -> None:
    replies = WsReplies(len(sizes))
    data = b"".join(ack(size) for size in sizes)
    for _ in range(times):
        said = feed(replies, data, cuts)
        assert said == [False] * (len(said) - 1) + [True]


@pytest.mark.parametrize("size", [36, 125, 126, 65_535, 65_536])
def test_a_frame_ends_where_its_length_says(size: int) -> None:
    frame = ack(size)
    assert ws_frame_end(b"xx" + frame + b"xx", 2, len(frame) + 4) == len(frame) + 2
    assert ws_frame_end(b"xx" + frame, 2, len(frame) + 1) == 0
    assert all(ws_frame_end(frame, 0, n) == 0 for n in range(12))


@pytest.mark.parametrize(
    "data",
    [
        b'\x81\x1d{"op":"error","code":"throt"}',
        b"\x88\x02\x03\xe8",  # a close
        b"\x01\x02{}",  # a fragment
        b"\x81\x82\0\0\0\0{}",  # masked
        ack(36) * 2,
    ],
)
def test_anything_but_the_acknowledgement_that_is_due_stops_the_run(data: bytes) -> None:
    with pytest.raises(BenchFailed):
        feed(WsReplies(1), data, [])
