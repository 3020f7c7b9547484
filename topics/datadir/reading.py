"""A log file or a segment read from end to end, whatever is in it: its frames, and the stretches between them that are
none. For people who want to see a file as it is: nothing is refused, damage is shown where it lies, and what follows it
is shown, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from topics.storage.format import CHECKSUM, FILE_HEADER_BYTES, FrameType, aligned
from topics.storage.frames import Frame, decode_frame, find_frame_after


class Stretch(msgspec.Struct, frozen=True):
    """Bytes that are no frame."""

    offset: int
    length: int
    kind: str  # end: zeros to the end of the file; torn: other bytes, no frame behind them; damaged: frames follow
    text: str


class Block(msgspec.Struct, frozen=True):
    """A block of a segment, and the delete flags behind it."""

    frame: Frame
    flags: bytes


def read_all(fd: int) -> bytes:
    """By reading, not by mapping: a file that is cut off meanwhile must not kill whoever looks."""
    pieces = []
    at = 0
    while piece := os.pread(fd, 1 << 24, at):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def walk_log(data: bytes, *, salt: int) -> Iterator[Frame | Stretch]:
    offset = FILE_HEADER_BYTES
    while offset < len(data):
        if (frame := decode_frame(data, offset, salt=salt)) is not None:
            yield frame
            offset += frame.length
            continue
        stretch = _stretch(data, offset, salt=salt)
        yield stretch
        offset += stretch.length


def walk_segment(data: bytes, *, salt: int, counts: int | None = None) -> Iterator[Block | Stretch]:
    """counts: how many bytes of an open segment the snapshot knows; what follows may be written again."""
    offset = FILE_HEADER_BYTES
    while offset < len(data):
        frame = decode_frame(data, offset, salt=salt)
        if frame is not None and frame.type == FrameType.BLOCK:
            at = offset + frame.length
            yield Block(frame, data[at : at + frame.count])
            offset = at + aligned(frame.count)
            continue
        stretch = _stretch(data, offset, salt=salt)
        if stretch.kind == "torn" and counts is not None and offset < counts:
            stretch = Stretch(offset, stretch.length, "damaged", f"no good block, though {counts} bytes should count")
        yield stretch
        offset += stretch.length


def _stretch(data: bytes, offset: int, *, salt: int) -> Stretch:
    later = find_frame_after(data, salt=salt, start=offset + CHECKSUM.size)
    if later is not None:
        text = f"damaged: no good frame here, but one at offset {later.offset}"
        return Stretch(offset, later.offset - offset, "damaged", text)
    rest = len(data) - offset
    if data.count(0, offset) == rest:
        return Stretch(offset, rest, "end", f"the end; {rest} bytes of zeros are reserved behind it")
    used = len(data[offset:].rstrip(b"\0"))
    return Stretch(offset, rest, "torn", f"{used} bytes that are no frame: a write that was cut short, or damage")
