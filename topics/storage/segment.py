"""Segments: blocks of records in a .data file, and the .idx that finds a seq, a time or a tag in it.

A block is a frame (format.py) of type BLOCK followed by one delete flag per record, outside the checksum: a delete
flips bytes in place and rewrites nothing else. The index is derived: it can be made again from the blocks.

Tags are found without reading the blocks: the index holds the segment's tags in order, in pages of TAGS_PER_PAGE, and a
directory with the first tag of each page. A lookup reads the directory and one page.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import msgspec
from xxhash import xxh3_64_intdigest

from topics.errors import CorruptData, FormatError
from topics.storage.columns import Columns
from topics.storage.format import (
    CHECKSUM,
    FILE_HEADER_BYTES,
    FORMAT_VERSION,
    INDEX_HEADER,
    INDEX_MAGIC,
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    FrameType,
    aligned,
    block_bytes,
    check_version,
)
from topics.storage.frames import Frame, decode_frame, encode_around, encode_frame

TAGS_PER_PAGE = 64


class SegmentHeader(msgspec.Struct, frozen=True):
    topic_id: int
    first_seq: int
    created_ms: int
    salt: int

    def encode(self) -> bytes:
        head = SEGMENT_HEADER.pack(
            SEGMENT_MAGIC, FORMAT_VERSION, 0, self.topic_id, self.first_seq, self.created_ms, self.salt, 0, 0
        )
        return head + CHECKSUM.pack(xxh3_64_intdigest(head))


def decode_segment_header(data: bytes, *, path: str) -> SegmentHeader:
    if len(data) < FILE_HEADER_BYTES:
        raise CorruptData(f"{path}: shorter than a segment header")
    magic, version, _, topic_id, first_seq, created_ms, salt, _, _ = SEGMENT_HEADER.unpack_from(data)
    if magic != SEGMENT_MAGIC:
        raise FormatError(f"{path}: not a topics segment")
    check_version(version, path=path)
    if CHECKSUM.unpack_from(data, SEGMENT_HEADER.size)[0] != xxh3_64_intdigest(data[: SEGMENT_HEADER.size]):
        raise CorruptData(f"{path}: header checksum fails")
    return SegmentHeader(topic_id, first_seq, created_ms, salt)


class BlockEntry(msgspec.Struct, frozen=True, array_like=True):
    """A block as the index lists it."""

    first_seq: int
    count: int
    offset: int
    length: int  # of the frame, without the delete flags
    first_ts: int
    last_ts: int
    bytes: int  # what its records count for
    tagged: bool

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1

    @property
    def flags_offset(self) -> int:
        return self.offset + self.length

    @property
    def end(self) -> int:
        return self.offset + self.length + aligned(self.count)


def encode_block(
    body: bytes,
    *,
    salt: int,
    topic_id: int,
    first_seq: int,
    count: int,
    first_ts: int,
    last_ts: int,
    size: int,
    flags: bytes | None,
) -> bytes:
    frame = encode_frame(
        salt=salt,
        type=FrameType.BLOCK,
        topic_id=topic_id,
        first_seq=first_seq,
        count=count,
        ts=first_ts,
        lsn=last_ts,
        synced=size,
        body=body,
    )
    return frame + _flags(flags, count)


def encode_block_around(
    body: bytes,
    *,
    salt: int,
    topic_id: int,
    first_seq: int,
    count: int,
    first_ts: int,
    last_ts: int,
    size: int,
    flags: bytes | None,
) -> tuple[bytes, bytes]:
    """The same for a body that is too large to be copied: what stands before and behind it."""
    before, behind = encode_around(
        FrameType.BLOCK, salt, topic_id, first_seq, count, first_ts, last_ts, size, body, b""
    )
    return before, behind + _flags(flags, count)


def _flags(flags: bytes | None, count: int) -> bytes:
    return (flags or bytes(count)) + bytes(aligned(count) - count)


def block_entry(frame: Frame) -> BlockEntry:
    tagged = Columns(frame.body, count=frame.count, ts=frame.ts).has_tags
    return BlockEntry(
        frame.first_seq, frame.count, frame.offset, frame.length, frame.ts, frame.lsn, frame.synced, tagged
    )


def scan_blocks(data: bytes | memoryview, *, salt: int, path: str) -> list[tuple[BlockEntry, Frame]]:
    """Every block of a segment's valid bytes; anything else there is corruption."""
    found = []
    offset = FILE_HEADER_BYTES
    while offset < len(data):
        frame = decode_frame(data, offset, salt=salt)
        if frame is None or frame.type != FrameType.BLOCK:
            raise CorruptData(f"{path}: no good block at offset {offset}")
        found.append((block_entry(frame), frame))
        offset += block_bytes(body_len=len(frame.body), count=frame.count)
    return found


def read_block(data: bytes, *, path: str, offset: int, salt: int) -> Frame:
    """Check and decode one block read on its own (`data` starts at the block)."""
    frame = decode_frame(data, 0, salt=salt)
    if frame is None:
        raise CorruptData(f"{path}: checksum of the block at offset {offset} fails")
    return frame


# --- the index ---------------------------------------------------------------------------------------

_TagPage = list[tuple[str, list[int]]]
_Directory = list[tuple[str, int, int]]  # first tag, offset from the start of the file, length
_encode = msgspec.msgpack.Encoder().encode
_decode_table = msgspec.msgpack.Decoder(list[BlockEntry]).decode
_decode_directory = msgspec.msgpack.Decoder(_Directory).decode
_decode_page = msgspec.msgpack.Decoder(_TagPage).decode


def tag_rows(blocks: Iterable[tuple[int, Columns]]) -> dict[str, list[int]]:
    """tag -> seqs in order, from (first seq, columns) pairs in order."""
    rows: dict[str, list[int]] = {}
    for first_seq, columns in blocks:
        if not columns.has_tags:
            continue
        for seq, tag in enumerate(columns.tags(), first_seq):
            if tag is not None:
                rows.setdefault(tag, []).append(seq)
    return rows


def encode_index(
    *, topic_id: int, first_seq: int, last_seq: int, blocks: list[BlockEntry], tags: dict[str, list[int]]
) -> bytes:
    table = _encode(blocks)
    ordered = sorted(tags.items())
    pages = []
    for start in range(0, len(ordered), TAGS_PER_PAGE):
        page = _encode(ordered[start : start + TAGS_PER_PAGE])
        pages.append((ordered[start][0], page + CHECKSUM.pack(xxh3_64_intdigest(page))))
    # Pages lie behind the directory, whose own length depends on the offsets in it: store offsets relative to the
    # end of the directory.
    directory: _Directory = []
    at = 0
    for first_tag, page in pages:
        directory.append((first_tag, at, len(page)))
        at += len(page)
    encoded = _encode(directory)
    head = INDEX_HEADER.pack(INDEX_MAGIC, FORMAT_VERSION, 0, topic_id, first_seq, last_seq, len(table), len(encoded))
    checksum = CHECKSUM.pack(xxh3_64_intdigest(head + table + encoded))
    return b"".join((head, checksum, table, encoded, *(page for _, page in pages)))


class SegmentIndex(msgspec.Struct, frozen=True):
    topic_id: int
    first_seq: int
    last_seq: int
    blocks: list[BlockEntry]
    directory: _Directory
    pages_offset: int

    def pages_for_tag(self, tag: str) -> list[tuple[int, int]]:
        """(offset, length) of the page that would hold this tag, if any."""
        at = bisect.bisect_right(self.directory, tag, key=lambda entry: entry[0]) - 1
        return [self._place(at)] if at >= 0 else []

    def pages_for_prefix(self, prefix: str) -> list[tuple[int, int]]:
        start = max(0, bisect.bisect_right(self.directory, prefix, key=lambda entry: entry[0]) - 1)
        places = []
        for at in range(start, len(self.directory)):
            if at > start and not self.directory[at][0].startswith(prefix):
                break
            places.append(self._place(at))
        return places

    def _place(self, at: int) -> tuple[int, int]:
        _, offset, length = self.directory[at]
        return self.pages_offset + offset, length


def index_head_bytes(data: bytes, *, path: str) -> int:
    """How many bytes of the file decode_index needs, from its first 64."""
    if len(data) < FILE_HEADER_BYTES:
        raise CorruptData(f"{path}: shorter than an index header")
    magic, version, _, _, _, _, table, directory = INDEX_HEADER.unpack_from(data)
    if magic != INDEX_MAGIC:
        raise FormatError(f"{path}: not a topics segment index")
    check_version(version, path=path)
    return int(FILE_HEADER_BYTES + table + directory)


def decode_index(data: bytes, *, path: str) -> SegmentIndex:
    need = index_head_bytes(data, path=path)
    if len(data) < need:
        raise CorruptData(f"{path}: index is cut short")
    _, _, _, topic_id, first_seq, last_seq, table_len, _ = INDEX_HEADER.unpack_from(data)
    at = INDEX_HEADER.size
    covered = data[:at] + data[FILE_HEADER_BYTES:need]
    if CHECKSUM.unpack_from(data, at)[0] != xxh3_64_intdigest(covered):
        raise CorruptData(f"{path}: index checksum fails")
    table_end = FILE_HEADER_BYTES + table_len
    return SegmentIndex(
        topic_id=topic_id,
        first_seq=first_seq,
        last_seq=last_seq,
        blocks=_decode_table(data[FILE_HEADER_BYTES:table_end]),
        directory=_decode_directory(data[table_end:need]),
        pages_offset=need,
    )


def decode_tag_page(data: bytes, *, path: str) -> _TagPage:
    page = data[: -CHECKSUM.size]
    if len(data) < CHECKSUM.size or CHECKSUM.unpack_from(data, len(page))[0] != xxh3_64_intdigest(page):
        raise CorruptData(f"{path}: tag page checksum fails")
    return _decode_page(page)
