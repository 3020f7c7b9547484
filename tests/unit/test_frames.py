"""WAL frames and headers: what is accepted, what is not, and where a scan stops."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples
from xxhash import xxh3_64_intdigest

from topics.errors import CorruptData, FormatError
from topics.storage.format import FILE_HEADER_BYTES, FORMAT_VERSION, FRAME_HEADER, FrameType, aligned, frame_bytes
from topics.storage.frames import (
    Frame,
    WalHeader,
    decode_frame,
    decode_wal_header,
    encode_frame,
    find_frame_after,
    scan,
)

SALT = 0xA1B2C3D5
HEADER = WalHeader(shard=1, layout=2, file_no=3, salt=SALT, boot_id=bytes(16))


def frame(lsn: int, body: bytes = b"body", key: bytes = b"", *, salt: int = SALT) -> bytes:
    return encode_frame(
        salt=salt,
        type=FrameType.APPEND,
        topic_id=9,
        first_seq=lsn,
        count=1,
        ts=5,
        lsn=lsn,
        synced=0,
        body=body,
        key=key,
    )


U64 = st.integers(0, 2**64 - 1)


@examples(200)
@given(
    type=st.sampled_from(FrameType),
    topic_id=U64,
    first_seq=U64,
    count=st.integers(0, 2**32 - 1),
    ts=U64,
    lsn=U64,
    synced=U64,
    body=st.binary(max_size=300),
    key=st.binary(max_size=40),
    flags=st.integers(0, 255),
    before=st.integers(0, 5),
)
def test_round_trip(before: int, body: bytes, key: bytes, **fields: int) -> None:
    raw = encode_frame(salt=SALT, body=body, key=key, **fields)  # type: ignore[arg-type]
    assert len(raw) == frame_bytes(key_len=len(key), body_len=len(body))
    assert len(raw) % 8 == 0
    data = bytes(8 * before) + raw + b"\xff" * 8
    for readable in (data, memoryview(data)):
        found = decode_frame(readable, 8 * before, salt=SALT)
        assert found is not None
        assert (found.body, found.key, found.offset, found.length) == (body, key, 8 * before, len(raw))
        for name, value in fields.items():
            assert getattr(found, name) == value


@pytest.mark.parametrize("key", [b"", b"key"])
@pytest.mark.parametrize("body", [b"", b"x", b"12345678", b"some records here"])
def test_every_flipped_bit_is_found(body: bytes, key: bytes) -> None:
    raw = bytearray(frame(1, body, key) + bytes(64))
    length = frame_bytes(key_len=len(key), body_len=len(body))
    for at in range(length):
        for bit in range(8):
            raw[at] ^= 1 << bit
            assert decode_frame(bytes(raw), 0, salt=SALT) is None, f"byte {at} bit {bit}"
            raw[at] ^= 1 << bit
    assert decode_frame(bytes(raw), 0, salt=SALT) is not None


def test_every_truncation_is_found() -> None:
    raw = frame(1, b"some records here", b"key")
    for length in range(len(raw)):
        assert decode_frame(raw[:length], 0, salt=SALT) is None
        assert list(scan(bytes(FILE_HEADER_BYTES) + raw[:length], salt=SALT)) == []


def test_a_frame_of_another_files_salt_is_none() -> None:
    assert decode_frame(frame(1, salt=SALT + 2), 0, salt=SALT) is None


def test_zeros_are_no_frame() -> None:
    assert decode_frame(bytes(4096), 0, salt=SALT) is None
    assert decode_frame(bytes(4096), 0, salt=0) is None


def test_type_zero_is_no_frame_even_with_a_good_checksum() -> None:
    raw = bytearray(frame(1))
    raw[8] = 0
    raw[-8:] = struct.pack("<Q", xxh3_64_intdigest(bytes(raw[:-8])))
    assert decode_frame(bytes(raw), 0, salt=SALT) is None


def test_a_length_beyond_the_file_is_no_frame() -> None:
    raw = bytearray(frame(1))
    struct.pack_into("<I", raw, 4, 2**32 - 1)
    assert decode_frame(bytes(raw), 0, salt=SALT) is None


# --- scanning ----------------------------------------------------------------------------------------


def file_of(*frames: bytes, tail: bytes = bytes(128)) -> bytes:
    return HEADER.encode() + b"".join(frames) + tail


def lsns(data: bytes) -> list[int]:
    return [found.lsn for found in scan(data, salt=SALT)]


def test_a_scan_ends_at_the_zeros() -> None:
    assert lsns(file_of(frame(1), frame(2, b"x" * 100), frame(3))) == [1, 2, 3]
    assert lsns(file_of(frame(1), tail=b"")) == [1]
    assert lsns(file_of()) == []


def test_a_scan_knows_where_each_frame_is() -> None:
    data = file_of(frame(1), frame(2, b"x" * 100))
    first, second = scan(data, salt=SALT)
    assert first.offset == FILE_HEADER_BYTES
    assert second.offset == first.offset + first.length
    assert data[second.offset : second.offset + second.length] == frame(2, b"x" * 100)


def test_a_scan_stops_at_the_first_bad_frame() -> None:
    middle = bytearray(frame(2))
    middle[20] ^= 1
    assert lsns(file_of(frame(1), bytes(middle), frame(3))) == [1]


def test_stale_frames_of_an_earlier_file_are_not_ours() -> None:
    assert lsns(file_of(frame(1), frame(2, salt=77), frame(3))) == [1]


# --- looking behind a hole ---------------------------------------------------------------------------


def after(data: bytes, start: int) -> Frame | None:
    return find_frame_after(data, salt=SALT, start=start)


@examples(100)
@given(hole=st.integers(0, 30), rubbish=st.binary(max_size=64), start=st.integers(0, 64))
def test_the_next_good_frame_is_found_wherever_it_is(hole: int, rubbish: bytes, start: int) -> None:
    lead = aligned(max(start, len(rubbish) + hole))
    data = (rubbish + bytes(hole)).ljust(lead, b"\0") + frame(5) + frame(6)
    found = after(data, start)
    assert found is not None
    assert (found.lsn, found.offset) == (5, lead)


def test_nothing_good_behind_the_hole() -> None:
    bad = bytearray(frame(1))
    bad[-1] ^= 1
    assert after(bytes(bad) + bytes(64), 0) is None
    assert after(b"", 0) is None
    assert after(b"rubbish" * 20, 0) is None


def test_salts_without_a_frame_are_passed_over() -> None:
    needle = SALT.to_bytes(4, "little")
    found = after(needle * 10 + bytes(4) + needle + frame(8), 0)
    assert found is not None
    assert found.lsn == 8


def test_frames_off_the_grid_are_rubbish() -> None:
    assert after(b"\0" * 4 + frame(1) + bytes(64), 0) is None


def test_a_frame_before_the_start_does_not_count() -> None:
    data = frame(1) + frame(2)
    found = after(data, 8)
    assert found is not None
    assert found.lsn == 2


# --- the header --------------------------------------------------------------------------------------


def test_header_round_trip() -> None:
    assert len(HEADER.encode()) == FILE_HEADER_BYTES
    assert decode_wal_header(HEADER.encode(), path="f") == HEADER


def test_every_flipped_bit_of_a_header_is_found() -> None:
    raw = bytearray(HEADER.encode())
    for at in range(len(raw)):
        for bit in range(8):
            raw[at] ^= 1 << bit
            with pytest.raises((CorruptData, FormatError), match="some/file"):
                decode_wal_header(bytes(raw), path="some/file")
            raw[at] ^= 1 << bit


@pytest.mark.parametrize("length", range(FILE_HEADER_BYTES))
def test_a_short_header(length: int) -> None:
    with pytest.raises((CorruptData, FormatError), match="f:"):
        decode_wal_header(HEADER.encode()[:length], path="f")


def test_a_newer_format_says_upgrade_though_its_checksum_may_be_elsewhere() -> None:
    raw = bytearray(HEADER.encode())
    struct.pack_into("<I", raw, 8, FORMAT_VERSION + 1)
    raw[56:] = bytes(8)
    with pytest.raises(FormatError, match="upgrade"):
        decode_wal_header(bytes(raw), path="f")


def test_not_ours_at_all() -> None:
    with pytest.raises(FormatError, match="not a topics WAL file"):
        decode_wal_header(b"#!/bin/sh\n".ljust(64, b" "), path="f")


def test_the_frame_header_is_as_long_as_its_ruler() -> None:
    assert FRAME_HEADER.size == 56
