"""Chunked bodies, cut at every position, and everything that is no chunk."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.errors import ApiError
from topics.gateway.http1.chunks import ChunkDecoder


def decode(raw: bytes, *, most: int = 1_000) -> tuple[bytes, bytes] | None:
    """(body, what is left behind it), or None if the body is not complete."""
    decoder = ChunkDecoder(most=most)
    at, done = decoder.feed(raw, 0)
    return (bytes(decoder.body), raw[at:]) if done else None


GOOD = {
    b"0\r\n\r\n": b"",
    b"5\r\nhello\r\n0\r\n\r\n": b"hello",
    b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n": b"hello world",
    b"00000005\r\nhello\r\n0000\r\n\r\n": b"hello",
    b"A\r\n0123456789\r\n0\r\n\r\n": b"0123456789",
    b"a\r\n0123456789\r\n0\r\n\r\n": b"0123456789",
    b"5;ext=1\r\nhello\r\n0;last\r\n\r\n": b"hello",
    b'5 ;a="b;c"\r\nhello\r\n0\r\n\r\n': b"hello",
    b"4\r\n\r\n\r\n\r\n0\r\n\r\n": b"\r\n\r\n",
    b"5\r\nhello\r\n0\r\nTrailer: x\r\nOther: y\r\n\r\n": b"hello",
}


@pytest.mark.parametrize("raw", GOOD, ids=repr)
def test_good_bodies(raw: bytes) -> None:
    assert decode(raw) == (GOOD[raw], b"")


@pytest.mark.parametrize("raw", GOOD, ids=repr)
def test_cut_at_every_position(raw: bytes) -> None:
    whole = raw + b"GET / HTTP/1.1\r\n"
    for cut in range(len(whole) + 1):
        decoder = ChunkDecoder(most=1_000)
        buffer = bytearray(whole[:cut])
        at, done = decoder.feed(buffer, 0)
        assert done == (cut >= len(raw))
        del buffer[:at]
        if not done:
            buffer += whole[cut:]
            at, done = decoder.feed(buffer, 0)
            assert done
            del buffer[:at]
        else:
            buffer += whole[cut:]
        assert bytes(decoder.body) == GOOD[raw]
        assert bytes(buffer) == b"GET / HTTP/1.1\r\n"


@pytest.mark.parametrize("raw", GOOD, ids=repr)
def test_byte_by_byte(raw: bytes) -> None:
    decoder = ChunkDecoder(most=1_000)
    buffer = bytearray()
    for number, byte in enumerate(raw):
        buffer.append(byte)
        at, done = decoder.feed(buffer, 0)
        assert done == (number == len(raw) - 1)
        del buffer[:at]
    assert bytes(decoder.body) == GOOD[raw]


@pytest.mark.parametrize("raw", GOOD, ids=repr)
def test_in_a_buffer_that_begins_with_something_else(raw: bytes) -> None:
    decoder = ChunkDecoder(most=1_000)
    assert decoder.feed(b"head" + raw + b"next", 4) == (4 + len(raw), True)
    assert bytes(decoder.body) == GOOD[raw]


@examples(100)
@given(chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=8), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_chunks_any_cuts(chunks: list[bytes], cuts: list[int]) -> None:
    raw = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    decoder = ChunkDecoder(most=1_000)
    buffer = bytearray()
    done = False
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    for start, end in itertools.pairwise(places):
        buffer += raw[start:end]
        if not done:
            at, done = decoder.feed(buffer, 0)
            del buffer[:at]
    assert done
    assert bytes(decoder.body) == b"".join(chunks)
    assert not buffer


BAD = [
    b"\r\n",
    b"x\r\n",
    b"-1\r\n",
    b"+5\r\nhello\r\n",
    b"0x5\r\nhello\r\n",
    b"5_0\r\n",
    b" 5\r\nhello\r\n",
    b"5\nhello\r\n0\r\n\r\n",
    b"5\r\nhello0\r\n\r\n",
    b"5\r\nhello\n0\r\n\r\n",
    b"5\r\nhello\n\r0\r\n\r\n",
    b"5\rhello\r\n",
    b"5;a\nb\r\nhello\r\n",
    b"5;a\rb\r\nhello\r\n",
    b"000000005\r\nhello\r\n",
    b"fffffffff\r\n",
    b"5" + b";" * 300 + b"\r\nhello\r\n",
    b";5\r\nhello\r\n",
    b"\xd9\xa5\r\nhello\r\n",
    b"0\r\nbad\ntrailer\r\n\r\n",
    b"0\r\n" + b"x" * 9_000 + b"\r\n\r\n",
    b"0\r\n" + (b"x" * 100 + b"\r\n") * 100 + b"\r\n",
]


@pytest.mark.parametrize("raw", BAD, ids=lambda raw: repr(raw[:30]))
def test_bad_chunks_are_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode(raw)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("raw", BAD, ids=lambda raw: repr(raw[:30]))
def test_bad_chunks_are_refused_byte_by_byte(raw: bytes) -> None:
    decoder = ChunkDecoder(most=1_000)
    buffer = bytearray()

    def feed() -> None:
        for byte in raw:
            buffer.append(byte)
            at, done = decoder.feed(buffer, 0)
            assert not done
            del buffer[:at]

    with pytest.raises(ApiError):
        feed()


def test_a_line_that_never_ends_is_refused_before_it_fills_memory() -> None:
    with pytest.raises(ApiError):
        decode(b"1" * 300)
    with pytest.raises(ApiError):
        decode(b"0\r\n" + b"x" * 9_000)


def test_too_large_before_the_bytes_arrive() -> None:
    assert decode(b"5\r\nhello\r\n5\r\nworld\r\n0\r\n\r\n", most=10) == (b"helloworld", b"")
    for raw in (b"b\r\n", b"5\r\nhello\r\n6\r\n", b"ffffffff\r\n"):
        with pytest.raises(ApiError) as caught:
            decode(raw, most=10)
        assert caught.value.code == "payload_too_large"


@pytest.mark.parametrize("raw", GOOD, ids=repr)
def test_another_decoder_goes_on_from_every_position(raw: bytes) -> None:
    whole = raw + b"GET / HTTP/1.1\r\n"
    for cut in range(len(raw)):
        decoder = ChunkDecoder(most=1_000)
        at, done = decoder.feed(whole[:cut], 0)
        assert not done
        moved = decoder.encoded() + whole[at:]
        assert decode(moved) == (GOOD[raw], b"GET / HTTP/1.1\r\n"), cut
