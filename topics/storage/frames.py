"""WAL files and frames: encode, decode, scan.

Validation goes magic, version, checksum. A scan stops at the first thing that is no frame and says where; whether
that is the end, a torn tail or corruption is recovery.py's decision.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from topics.errors import CorruptData, FormatError
from topics.storage.format import (
    CHECKSUM,
    FILE_HEADER_BYTES,
    FORMAT_VERSION,
    FRAME_HEADER,
    WAL_HEADER,
    WAL_MAGIC,
    FrameType,
    aligned,
    check_version,
    frame_bytes,
)

Readable = bytes | memoryview | mmap.mmap
_pack_header = FRAME_HEADER.pack
_pack_checksum = CHECKSUM.pack
_PADDING = [bytes(n) for n in range(8)]
_KINDS = frozenset(map(int, FrameType))
WHOLE = b"\xff" * 16  # a boot id: the file was put in place whole and synced, so no power cut took any of it


class WalHeader(msgspec.Struct, frozen=True):
    shard: int
    layout: int
    file_no: int
    salt: int
    boot_id: bytes

    def encode(self) -> bytes:
        head = WAL_HEADER.pack(
            WAL_MAGIC, FORMAT_VERSION, self.shard, self.layout, self.file_no, self.salt, 0, self.boot_id
        )
        return head + CHECKSUM.pack(xxh3_64_intdigest(head))


def decode_wal_header(data: bytes, *, path: str) -> WalHeader:
    if len(data) < FILE_HEADER_BYTES:
        raise FormatError(f"{path}: shorter than a WAL header")
    magic, version, shard, layout, file_no, salt, _, boot_id = WAL_HEADER.unpack_from(data)
    if magic != WAL_MAGIC:
        raise FormatError(f"{path}: not a topics WAL file")
    check_version(version, path=path)
    if CHECKSUM.unpack_from(data, WAL_HEADER.size)[0] != xxh3_64_intdigest(data[: WAL_HEADER.size]):
        raise CorruptData(f"{path}: header checksum fails")
    return WalHeader(shard, layout, file_no, salt, boot_id)


def header_is_whole(data: bytes) -> bool:
    """Whether the checksum of a WAL file's or a segment's header holds, whatever its version."""
    at = WAL_HEADER.size
    return len(data) >= FILE_HEADER_BYTES and CHECKSUM.unpack_from(data, at)[0] == xxh3_64_intdigest(data[:at])


class Frame(NamedTuple):
    """A decoded frame; body and key are copies, `offset` and `length` are its place in the file."""

    type: int
    flags: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    topic_id: int
    first_seq: int
    ts: int
    lsn: int
    synced: int
    key: bytes
    body: bytes
    offset: int
    length: int

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1


def encode_frame(
    *,
    salt: int,
    type: FrameType,
    topic_id: int,
    first_seq: int = 0,
    count: int = 0,
    ts: int,
    lsn: int,
    synced: int,
    body: bytes = b"",
    key: bytes = b"",
    flags: int = 0,
) -> bytes:
    size = FRAME_HEADER.size + len(key) + len(body)
    header = FRAME_HEADER.pack(salt, len(body), type, flags, len(key), count, topic_id, first_seq, ts, lsn, synced)
    frame = b"".join((header, key, body, _PADDING[-size & 7]))
    return frame + CHECKSUM.pack(xxh3_64_intdigest(frame))


def encode_batch(
    salt: int,
    topic_id: int,
    first_seq: int,
    count: int,
    ts: int,
    lsn: int,
    synced: int,
    body: bytes,
    key: bytes,
) -> bytes:
    """encode_frame for an append, without the price of its keywords."""
    key_len, body_len = len(key), len(body)
    header = _pack_header(salt, body_len, FrameType.APPEND, 0, key_len, count, topic_id, first_seq, ts, lsn, synced)
    frame = header + key + body + _PADDING[-(key_len + body_len) & 7]
    return frame + _pack_checksum(xxh3_64_intdigest(frame))


def encode_around(
    type: FrameType,
    salt: int,
    topic_id: int,
    first_seq: int,
    count: int,
    ts: int,
    lsn: int,
    synced: int,
    body: bytes | memoryview,
    key: bytes,
) -> tuple[bytes, bytes]:
    """What stands before and behind the body of a frame, for a body that is too large to be copied."""
    key_len, body_len = len(key), len(body)
    header = _pack_header(salt, body_len, type, 0, key_len, count, topic_id, first_seq, ts, lsn, synced)
    before, padding = header + key, _PADDING[-(key_len + body_len) & 7]
    checksum = xxh3_64(before)
    checksum.update(body)
    checksum.update(padding)
    return before, padding + _pack_checksum(checksum.intdigest())


def read_large_body(read: Callable[[int, int], bytes], *, length: int, salt: int) -> bytes | None:
    """The body of the frame of this length, or None if it does not pass its checks. `read(length, at)` gives bytes of
    the frame. The body is read by itself: a slice of the frame would be a copy, and all threads wait for that."""
    header = read(FRAME_HEADER.size, 0)
    found, body_len, _, _, key_len, *_ = FRAME_HEADER.unpack(header)
    if found != salt or frame_bytes(key_len=key_len, body_len=body_len) != length:
        return None
    at = FRAME_HEADER.size + key_len
    body = read(body_len, at)
    checksum = xxh3_64(header + read(key_len, FRAME_HEADER.size))
    checksum.update(body)
    behind = read(length - at - body_len, at + body_len)
    checksum.update(behind[: -CHECKSUM.size])
    return body if behind.endswith(_pack_checksum(checksum.intdigest())) else None


def decode_frame(data: Readable, offset: int, *, salt: int) -> Frame | None:
    """The frame at `offset`, or None if there is none that passes its checks."""
    room = len(data) - offset
    if room < FRAME_HEADER.size + CHECKSUM.size:
        return None
    found, body_len, kind, flags, key_len, count, topic_id, first_seq, ts, lsn, synced = FRAME_HEADER.unpack_from(
        data, offset
    )
    if found != salt or kind == 0:
        return None
    length = frame_bytes(key_len=key_len, body_len=body_len)
    if length > room:
        return None
    end = offset + length - CHECKSUM.size
    if CHECKSUM.unpack_from(data, end)[0] != xxh3_64_intdigest(data[offset:end]):
        return None
    at = offset + FRAME_HEADER.size
    key = bytes(data[at : at + key_len])
    body = bytes(data[at + key_len : at + key_len + body_len])
    return Frame(kind, flags, count, topic_id, first_seq, ts, lsn, synced, key, body, offset, length)


def scan(data: Readable, *, salt: int, start: int = FILE_HEADER_BYTES) -> Iterator[Frame]:
    """Good frames from `start` on, until the first place that holds none."""
    offset = start
    while (frame := decode_frame(data, offset, salt=salt)) is not None:
        yield frame
        offset += frame.length


def find_frame_after(data: Readable, *, salt: int, start: int) -> Frame | None:
    """The first good frame at or after `start` (8-byte steps): shows whether a log goes on behind a hole."""
    return next(frames_after(data, salt=salt, start=start), None)


def frames_after(data: Readable, *, salt: int, start: int) -> Iterator[Frame]:
    """Every good frame at or after `start` (8-byte steps), whatever stands between them."""
    needle = salt.to_bytes(4, "little")
    whole = bytes(data)
    at = whole.find(needle, aligned(start))
    while at >= 0:
        frame = decode_frame(whole, at, salt=salt) if at % 8 == 0 else None
        if frame is not None:
            yield frame
        at = whole.find(needle, at + (1 if frame is None else frame.length))


def find_salt(data: bytes) -> int | None:
    """The salt of a WAL file or a segment whose header can't be trusted: what its first good frame begins with."""
    for offset in range(FILE_HEADER_BYTES, len(data) - FRAME_HEADER.size, 8):
        kind, flags = data[offset + 8], data[offset + 9]
        if flags == 0 and kind in _KINDS:
            salt = int.from_bytes(data[offset : offset + 4], "little")
            if salt and decode_frame(data, offset, salt=salt) is not None:
                return salt
    return None
