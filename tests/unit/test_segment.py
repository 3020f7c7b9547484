"""Segments: blocks with their delete flags, the index, and tags found by page."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, batch_of, examples

from topics.errors import CorruptData, FormatError
from topics.storage import segment
from topics.storage.columns import Columns
from topics.storage.format import DELETED, FILE_HEADER_BYTES, FORMAT_VERSION, FrameType, aligned, block_bytes
from topics.storage.frames import encode_frame
from topics.storage.segment import (
    BlockEntry,
    SegmentHeader,
    SegmentIndex,
    decode_index,
    decode_segment_header,
    decode_tag_page,
    encode_block,
    encode_index,
    index_head_bytes,
    read_block,
    scan_blocks,
    tag_rows,
)

SALT = 0x0BADCAFF
HEADER = SegmentHeader(topic_id=7, first_seq=100, created_ms=5, salt=SALT)


def block(first_seq: int, records: list[Record], *, flags: bytes | None = None, ts: int = 50) -> bytes:
    body, size = batch_of(records)
    return encode_block(
        body,
        salt=SALT,
        topic_id=7,
        first_seq=first_seq,
        count=len(records),
        first_ts=ts,
        last_ts=ts + 3,
        size=size,
        flags=flags,
    )


THREE = [Record(b"1", tag="a"), Record(b"22"), Record(b"333", tag="b")]


# --- blocks ------------------------------------------------------------------------------------------


def test_blocks_are_listed_with_their_places() -> None:
    data = HEADER.encode() + block(100, THREE) + block(103, [Record(b"x")] * 9, ts=60)
    (first, frame), (second, _) = scan_blocks(data, salt=SALT, path="s")
    assert (first.first_seq, first.last_seq, first.count, first.offset) == (100, 102, 3, FILE_HEADER_BYTES)
    assert (first.first_ts, first.last_ts, first.tagged) == (50, 53, True)
    assert first.bytes == sum(record.size for record in THREE)
    assert Columns(frame.body, count=3, ts=50).tags() == ["a", None, "b"]
    assert first.end == second.offset
    assert second.flags_offset + 16 == second.end == len(data)
    assert not second.tagged
    assert read_block(data[first.offset : first.end], path="s", offset=first.offset, salt=SALT).body == frame.body


@examples(50)
@given(count=st.integers(1, 40), data=st.data())
def test_delete_flags_lie_behind_the_checksum(count: int, data: st.DataObject) -> None:
    flags = bytes(data.draw(st.lists(st.sampled_from([0, DELETED]), min_size=count, max_size=count)))
    raw = block(1, [Record(b"1")] * count, flags=flags)
    assert len(raw) == block_bytes(body_len=len(batch_of([Record(b"1")] * count)[0]), count=count)
    [(entry, _)] = scan_blocks(HEADER.encode() + raw, salt=SALT, path="s")
    whole = HEADER.encode() + raw
    assert whole[entry.flags_offset : entry.flags_offset + count] == flags
    assert entry.end == len(whole)
    assert aligned(count) == entry.end - entry.flags_offset


def test_every_flipped_bit_is_found_but_in_the_flags() -> None:
    raw = bytearray(HEADER.encode() + block(100, THREE))
    [(entry, _)] = scan_blocks(bytes(raw), salt=SALT, path="s")
    for at in range(FILE_HEADER_BYTES, len(raw)):
        for bit in range(8):
            raw[at] ^= 1 << bit
            if at < entry.flags_offset:
                with pytest.raises(CorruptData, match="seg/1"):
                    scan_blocks(bytes(raw), salt=SALT, path="seg/1")
                with pytest.raises(CorruptData, match="seg/1"):
                    read_block(bytes(raw[entry.offset :]), path="seg/1", offset=entry.offset, salt=SALT)
            else:
                assert len(scan_blocks(bytes(raw), salt=SALT, path="s")) == 1
            raw[at] ^= 1 << bit


def test_every_truncation_inside_a_frame_is_found() -> None:
    raw = HEADER.encode() + block(100, THREE) + block(103, THREE)
    (_, _), (second, _) = scan_blocks(raw, salt=SALT, path="s")
    for length in range(second.offset + 1, second.flags_offset):
        with pytest.raises(CorruptData):
            scan_blocks(raw[:length], salt=SALT, path="s")
    assert len(scan_blocks(raw[: second.offset], salt=SALT, path="s")) == 1


def test_only_blocks_belong_into_a_segment() -> None:
    stray = encode_frame(
        salt=SALT, type=FrameType.APPEND, topic_id=7, ts=0, lsn=0, synced=0, body=batch_of(THREE)[0], count=3
    )
    with pytest.raises(CorruptData, match="offset 64"):
        scan_blocks(HEADER.encode() + stray, salt=SALT, path="s")


# --- the header --------------------------------------------------------------------------------------


def test_header_round_trip() -> None:
    assert len(HEADER.encode()) == FILE_HEADER_BYTES
    assert decode_segment_header(HEADER.encode(), path="s") == HEADER


def test_every_flipped_bit_of_a_header_is_found() -> None:
    raw = bytearray(HEADER.encode())
    for at in range(len(raw)):
        for bit in range(8):
            raw[at] ^= 1 << bit
            with pytest.raises((CorruptData, FormatError), match="s:"):
                decode_segment_header(bytes(raw), path="s")
            raw[at] ^= 1 << bit


@pytest.mark.parametrize("length", [0, 1, 8, 63])
def test_a_short_header(length: int) -> None:
    with pytest.raises(CorruptData):
        decode_segment_header(HEADER.encode()[:length], path="s")


def test_a_newer_segment_says_upgrade() -> None:
    raw = bytearray(HEADER.encode())
    struct.pack_into("<I", raw, 8, FORMAT_VERSION + 1)
    with pytest.raises(FormatError, match="upgrade"):
        decode_segment_header(bytes(raw), path="s")


# --- the index ---------------------------------------------------------------------------------------

ENTRIES = [BlockEntry(100, 3, 64, 200, 50, 53, 90, True), BlockEntry(103, 9, 280, 100, 60, 63, 300, False)]


def index_of(tags: dict[str, list[int]]) -> bytes:
    return encode_index(topic_id=7, first_seq=100, last_seq=111, blocks=ENTRIES, tags=tags)


def opened(data: bytes) -> SegmentIndex:
    return decode_index(data[: index_head_bytes(data[:64], path="i")], path="i")


def test_index_round_trip() -> None:
    index = opened(index_of({"x": [100], "y": [101, 102]}))
    assert (index.topic_id, index.first_seq, index.last_seq, index.blocks) == (7, 100, 111, ENTRIES)


def test_an_index_without_tags_has_no_pages() -> None:
    data = index_of({})
    index = opened(data)
    assert index.pages_offset == len(data)
    assert index.pages_for_tag("x") == index.pages_for_prefix("") == []


def test_every_flipped_bit_of_the_index_is_found() -> None:
    data = bytearray(index_of({"x": [100], "y": [101]}))
    need = index_head_bytes(bytes(data[:64]), path="i")
    [(offset, length)] = opened(bytes(data)).pages_for_tag("x")
    assert offset == need
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises((CorruptData, FormatError), match="i:"):
                decode_index(bytes(data), path="i") if at < need else decode_tag_page(bytes(data[need:]), path="i")
            data[at] ^= 1 << bit
    assert length == len(data) - need


def test_every_truncation_of_the_index_is_found() -> None:
    data = index_of({"x": [100]})
    need = index_head_bytes(data[:64], path="i")
    for length in range(need):
        with pytest.raises(CorruptData):
            decode_index(data[:length], path="i")
    page = data[need:]
    for length in range(len(page)):
        with pytest.raises(CorruptData):
            decode_tag_page(page[:length], path="i")


def test_a_newer_index_says_upgrade() -> None:
    data = bytearray(index_of({}))
    struct.pack_into("<I", data, 8, FORMAT_VERSION + 1)
    with pytest.raises(FormatError, match="upgrade"):
        index_head_bytes(bytes(data), path="i")
    data[:8] = b"SOMETHIN"
    with pytest.raises(FormatError, match="not a topics segment index"):
        index_head_bytes(bytes(data), path="i")


# --- tags --------------------------------------------------------------------------------------------

TAGS = st.text(st.sampled_from("abAB:*é😀\x7f~"), max_size=4)


def find(data: bytes, tag: str, *, prefix: bool) -> tuple[list[int], int]:
    """Seqs found and pages read, as walshard/segments/segments.py does it."""
    index = opened(data)
    places = index.pages_for_prefix(tag) if prefix else index.pages_for_tag(tag)
    found: list[int] = []
    for offset, length in places:
        for known, seqs in decode_tag_page(data[offset : offset + length], path="i"):
            if known == tag or (prefix and known.startswith(tag)):
                found.extend(seqs)
    return sorted(found), len(places)


@examples(150)
@given(tags=st.lists(TAGS, max_size=60), wanted=st.lists(TAGS, min_size=1, max_size=8), page=st.integers(1, 8))
def test_tags_are_found_as_a_search_through_all_of_them_would(tags: list[str], wanted: list[str], page: int) -> None:
    rows: dict[str, list[int]] = {}
    for seq, tag in enumerate(tags, 100):
        rows.setdefault(tag, []).append(seq)
    usual, segment.TAGS_PER_PAGE = segment.TAGS_PER_PAGE, page
    try:
        data = index_of(rows)
    finally:
        segment.TAGS_PER_PAGE = usual
    for tag in [*wanted, *tags[:5], ""]:
        equal, read = find(data, tag, prefix=False)
        assert equal == rows.get(tag, [])
        assert read <= 1
        starts, read = find(data, tag, prefix=True)
        assert starts == sorted(seq for known, seqs in rows.items() if known.startswith(tag) for seq in seqs)
        matching = sum(known.startswith(tag) for known in rows)
        assert read <= (matching + page - 1) // page + 2, "more pages than the matches can be on"


def test_tag_rows_in_seq_order_without_the_untagged() -> None:
    def columns(records: list[Record]) -> Columns:
        return Columns(batch_of(records)[0], count=len(records), ts=0)

    rows = tag_rows([(100, columns(THREE)), (103, columns([Record(b"1")])), (104, columns(THREE))])
    assert rows == {"a": [100, 104], "b": [102, 106]}
