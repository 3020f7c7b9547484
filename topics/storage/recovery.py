"""What the end of a WAL file means: one table, and what to look for. No IO.

A scan stopped. Behind it there may be nothing, rubbish, or good frames. Good frames behind a hole mean that something
in the middle went bad, and that is never passed over silently, except in one case: after a power cut the pages of a
tail that was never synced reach the disk in any order, so a later page may be there and an earlier one not. `synced` in
the later frames tells: it says which lsn was known to be on the platter when a frame was written. All of them are
asked: frames that were written together with the one that is missing say nothing of it, those of the next round do. And
what a snapshot covers was synced before the snapshot was written.

Without a good frame behind it, rubbish is a write that was cut short, and goes: nothing in it was acknowledged. Or it
is the last frame of the log, acknowledged and damaged since. As long as the machine has not restarted the two can be
told apart. What a process has written is in the page cache, whatever became of the process, and a write that a kill
ends leaves a part from its beginning and zeros behind that: the salt first, and nothing where the frame would end. So
these were whole frames (`Behind.FRAME`):

    behind the last good frame                        for a write that was cut short ...
    other bytes than zeros behind the frame's end     ... the frame would be whole
    bytes where its checksum stands, but not those    ... there would be none, or the first of the right ones
    its length is beyond the bytes, and with another  ... no checksum would stand there
    length, that ends with them, the checksum holds
    another salt, and more than a few stray bytes     ... the salt would be there first

After a restart of the machine any of it may be what a power cut left of an unsynced tail. But a power cut takes
sectors, or all from some byte on, and no frame has fewer than eight bytes in a sector. So a frame that is whole but for
one bit (`Behind.DAMAGED`) was on the platter, and is no tail of whatever kind. Large appends are left out: their frames
are written in pieces.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from topics import limits
from topics.storage.format import CHECKSUM, FRAME_HEADER, aligned, frame_bytes
from topics.storage.frames import Frame, Readable

_LEAST_BYTES = frame_bytes(key_len=0, body_len=0)
_STRAY_BYTES = 16  # a frame without its salt, or without more of its head, has more bytes than these that are not 0
_LENGTHS = slice(4, 12)  # of a frame: its body's, and its key's
_HEAD = struct.Struct("<IIBBH")  # the first bytes of a frame, up to its count
_BITS = tuple(1 << bit for bit in range(8))
_ZEROS = bytes(1 << 20)
_SECTOR_BYTES = 512  # the least that a disk writes as a whole
_BITS_TRIED = 128 << 10  # each bit of a frame of up to so many bytes is tried: at most a second or so, at a start


class TailVerdict(enum.Enum):
    CLEAN = "clean"  # nothing but zeros behind the last frame
    TORN = "torn"  # a cut-short write: forget what is behind the last frame
    UNSYNCED = "unsynced"  # a power cut took part of a tail that was never promised: forget it, and say so
    CORRUPT = "corrupt"  # refuse


class Behind(enum.Enum):
    """What stands behind the last good frame, at its place."""

    ZEROS = "zeros"
    PIECE = "piece"  # the beginning of a frame, or a few bytes of nobody
    FRAME = "frame"  # what was a whole frame once, unless a power cut left it so
    DAMAGED = "damaged"  # a whole frame but for one bit, which no crash leaves so


class Later(NamedTuple):
    """The good frames behind a hole, in its file and in newer ones."""

    first_lsn: int
    synced: int  # the highest that one of them says


def sum_up(frames: Iterable[Frame]) -> Later | None:
    found: Later | None = None
    for frame in frames:
        found = Later(frame.lsn, frame.synced) if found is None else Later(found[0], max(found[1], frame.synced))
    return found


def judge_tail(*, last_lsn: int, behind: Behind, later: Later | None, same_boot: bool, covered: int = 0) -> TailVerdict:
    """last_lsn: of the last good frame, 0 if there is none; behind: what stands at the place of the next one; later:
    the good ones that follow it; same_boot: the machine has not restarted since the file was made; covered: the last
    lsn that the snapshot knows, 0 if there is none."""
    if behind is Behind.DAMAGED:
        return TailVerdict.CORRUPT
    if later is None:
        if behind is Behind.FRAME and same_boot:
            return TailVerdict.CORRUPT
        return TailVerdict.CLEAN if behind is Behind.ZEROS else TailVerdict.TORN
    # A log without a good frame before the hole begins wherever the snapshot lets it.
    before = last_lsn or max(0, min(covered, later.first_lsn - 2))
    if same_boot or max(later.synced, covered) > before:
        return TailVerdict.CORRUPT
    return TailVerdict.UNSYNCED


def look_behind(data: Readable, *, salt: int, start: int = 0) -> Behind:
    """What the bytes from `start` on are, where no good frame is."""
    used = used_bytes(data, start=start)
    if not used:
        return Behind.ZEROS
    if used <= _LEAST_BYTES - CHECKSUM.size:
        return Behind.PIECE
    # The checksum of a frame is its last 8 bytes, at a multiple of 8: a whole one ends with the bytes.
    rest = bytes(data[start : start + aligned(used)])
    rest += bytes(aligned(used) - len(rest))  # a file that is not reserved ends with the write
    own = salt.to_bytes(4, "little")
    if _is_damaged(rest, own):
        return Behind.DAMAGED
    return Behind.FRAME if _was_whole(rest, own) else Behind.PIECE


def used_bytes(data: Readable, *, start: int) -> int:
    """How many bytes from `start` on, without the zeros at the end."""
    end = len(data)
    while end > start:
        piece = data[max(start, end - len(_ZEROS)) : end]
        if piece != _ZEROS[: len(piece)]:
            return end - len(piece) - start + len(bytes(piece).rstrip(b"\0"))
        end -= len(piece)
    return 0


def _was_whole(rest: bytes, salt: bytes) -> bool:
    size = len(rest)
    _, body_len, _, _, key_len, *_ = FRAME_HEADER.unpack_from(rest)
    length = frame_bytes(key_len=key_len, body_len=body_len)
    if rest[:4] != salt:
        stray = size - rest.count(0) <= _STRAY_BYTES
        return not stray or _holds(rest, salt + rest[4 : _LENGTHS.stop])
    if length < size:
        return True
    if length == size:
        found, right = rest[-CHECKSUM.size :], _checksum(rest, rest[: _LENGTHS.stop])
        return not right.startswith(found.rstrip(b"\0"))
    return any(_holds(rest, salt + lengths) for lengths in _other_lengths(rest, body_len, key_len))


def _is_damaged(rest: bytes, salt: bytes) -> bool:
    """Whether these bytes begin with a frame of which one bit is wrong, and that is nothing that a crash takes away."""
    if (found := _wrong_byte(rest, salt)) is None:
        return False
    size, wrong = found
    if size > limits.PLACED_BYTES:
        return False  # it was written in pieces, the head last: each of them may be cut short
    if rest[wrong]:
        return True
    begin = len(rest[:wrong].rstrip(b"\0"))
    end = size - len(rest[wrong:size].lstrip(b"\0"))
    return begin > 0 and end < size and end - begin < _SECTOR_BYTES


def _wrong_byte(rest: bytes, salt: bytes) -> tuple[int, int] | None:
    """How long the frame is, and which of its bytes has the wrong bit."""
    first = rest[: _LENGTHS.stop]
    off = int.from_bytes(first[:4], "little") ^ int.from_bytes(salt, "little")
    if off:
        heads = [salt + first[4:]] if off.bit_count() == 1 else []
    else:
        fields = int.from_bytes(first[_LENGTHS], "little")
        heads = [salt + (fields ^ (1 << bit)).to_bytes(8, "little") for bit in range(64)]
    for head in heads:
        size = _frame_bytes(head)
        if size <= len(rest) and _holds(rest[:size], head):
            return size, next(at for at, (was, right) in enumerate(zip(first, head, strict=True)) if was != right)
    size = _frame_bytes(first)
    if off or size > len(rest):
        return None
    wrong = _wrong_behind_head(bytearray(rest[: size - CHECKSUM.size]), CHECKSUM.unpack_from(rest, size - 8)[0])
    return None if wrong is None else (size, wrong)


def _wrong_behind_head(frame: bytearray, checksum: int) -> int | None:
    """The frame is without its checksum, which may be what is wrong."""
    digest = xxh3_64_intdigest
    if (off := digest(frame) ^ checksum).bit_count() == 1:
        return len(frame) + (off.bit_length() - 1) // 8
    if len(frame) > _BITS_TRIED or not checksum:  # or it was not written
        return None
    for at in range(_LENGTHS.stop, len(frame)):
        was = frame[at]
        for bit in _BITS:
            frame[at] = was ^ bit
            if digest(frame) == checksum:
                return at
        frame[at] = was
    return None


def _frame_bytes(head: bytes) -> int:
    _, body_len, _, _, key_len = _HEAD.unpack(head)
    return frame_bytes(key_len=key_len, body_len=body_len)


def _other_lengths(rest: bytes, body_len: int, key_len: int) -> Iterator[bytes]:
    """The bytes of a head behind its salt, up to the count, with one of the two lengths as the frame would have it if
    it ended here."""
    most = len(rest) - CHECKSUM.size - FRAME_HEADER.size
    middle = rest[8:10]
    for both in range(most, max(-1, most - 8), -1):
        if both >= key_len:
            yield (both - key_len).to_bytes(4, "little") + middle + key_len.to_bytes(2, "little")
        if 0 <= both - body_len < 1 << 16:
            yield body_len.to_bytes(4, "little") + middle + (both - body_len).to_bytes(2, "little")


def _holds(rest: bytes, head: bytes) -> bool:
    return rest.endswith(_checksum(rest, head))


def _checksum(rest: bytes, head: bytes) -> bytes:
    """Of these bytes but their last, with another beginning."""
    found = xxh3_64(head)
    found.update(memoryview(rest)[len(head) : -CHECKSUM.size])
    return CHECKSUM.pack(found.intdigest())
