"""Every combination of what may stand behind the last good frame of a WAL file."""

from __future__ import annotations

import itertools
import random

import pytest

from topics import limits
from topics.storage.format import FrameType
from topics.storage.frames import Frame, encode_frame
from topics.storage.recovery import Behind, Later, TailVerdict, judge_tail, look_behind, sum_up, used_bytes

LAST_LSN = 10


def later(synced: int, *, lsn: int = 12) -> Later:
    return Later(lsn, synced)


def frame(lsn: int, synced: int) -> Frame:
    return Frame(FrameType.APPEND, 0, 1, 1, 1, 1, lsn, synced, b"", b"", 500, 100)


# (what stands there, synced of a good frame behind the hole or None, same boot) -> verdict
TABLE: dict[tuple[Behind, int | None, bool], TailVerdict] = {
    (Behind.ZEROS, None, True): TailVerdict.CLEAN,
    (Behind.ZEROS, None, False): TailVerdict.CLEAN,
    (Behind.PIECE, None, True): TailVerdict.TORN,
    (Behind.PIECE, None, False): TailVerdict.TORN,
    # A kill leaves no whole frame that is not good; a power cut may.
    (Behind.FRAME, None, True): TailVerdict.CORRUPT,
    (Behind.FRAME, None, False): TailVerdict.TORN,
    # Neither leaves one that is good but for a bit.
    (Behind.DAMAGED, None, True): TailVerdict.CORRUPT,
    (Behind.DAMAGED, None, False): TailVerdict.CORRUPT,
}
LOST = (TailVerdict.UNSYNCED, TailVerdict.CORRUPT)
for each in Behind:
    TABLE |= {
        # The page cache is still the one that was written to: nothing can be missing in the middle.
        (each, LAST_LSN - 1, True): TailVerdict.CORRUPT,
        (each, LAST_LSN, True): TailVerdict.CORRUPT,
        (each, LAST_LSN + 1, True): TailVerdict.CORRUPT,
        # After a power cut: what was missing had never been promised ...
        (each, LAST_LSN - 1, False): LOST[each is Behind.DAMAGED],
        (each, LAST_LSN, False): LOST[each is Behind.DAMAGED],
        # ... or it had.
        (each, LAST_LSN + 1, False): TailVerdict.CORRUPT,
    }


@pytest.mark.parametrize(
    ("behind", "synced", "same_boot"),
    list(itertools.product(Behind, (None, LAST_LSN - 1, LAST_LSN, LAST_LSN + 1), (False, True))),
)
def test_every_combination(behind: Behind, synced: int | None, same_boot: bool) -> None:
    found = None if synced is None else later(synced)
    verdict = judge_tail(last_lsn=LAST_LSN, behind=behind, later=found, same_boot=same_boot)
    assert verdict is TABLE[(behind, synced, same_boot)]


@pytest.mark.parametrize("covered", range(LAST_LSN + 3))
@pytest.mark.parametrize("behind", Behind)
def test_what_a_snapshot_covers_had_been_synced(behind: Behind, covered: int) -> None:
    verdict = judge_tail(last_lsn=LAST_LSN, behind=behind, later=later(0), same_boot=False, covered=covered)
    assert verdict is LOST[covered > LAST_LSN or behind is Behind.DAMAGED]


def test_all_frames_behind_a_hole_are_asked() -> None:
    assert sum_up([]) is None
    assert sum_up([frame(12, 3), frame(13, 9), frame(14, 4)]) == Later(12, 9)


def test_a_file_without_any_good_frame() -> None:
    assert judge_tail(last_lsn=0, behind=Behind.PIECE, later=later(0), same_boot=False) is TailVerdict.UNSYNCED
    assert judge_tail(last_lsn=0, behind=Behind.PIECE, later=later(1), same_boot=False) is TailVerdict.CORRUPT


# The snapshot covers 10 frames and no good one was found: the lsn of the first that follows, and what they say.
@pytest.mark.parametrize(
    ("lsn", "synced", "verdict"),
    [
        (12, 10, TailVerdict.UNSYNCED),  # 11 is missing, and nobody saw it synced
        (20, 10, TailVerdict.UNSYNCED),
        (12, 11, TailVerdict.CORRUPT),
        (11, 0, TailVerdict.CORRUPT),  # what is missing is 10 or before
        (5, 0, TailVerdict.CORRUPT),
        (1, 0, TailVerdict.CORRUPT),
    ],
)
def test_a_log_that_begins_with_a_hole(lsn: int, synced: int, verdict: TailVerdict) -> None:
    found = later(synced, lsn=lsn)
    assert judge_tail(last_lsn=0, behind=Behind.PIECE, later=found, same_boot=False, covered=10) is verdict


# --- what stands behind the last good frame ---

SALT = 0x5A5A1357
RESERVED = bytes(300)  # behind what was written


def frames(seed: int) -> list[bytes]:
    """Of every kind, with and without a key, a body of any length."""
    rng = random.Random(seed)
    return [
        encode_frame(
            salt=SALT,
            type=kind,
            topic_id=rng.getrandbits(64),
            first_seq=rng.randrange(1 << 20),
            count=rng.randrange(4),
            ts=1_700_000_000_000 + rng.randrange(1 << 30),
            lsn=rng.randrange(1, 1 << 20),
            synced=rng.randrange(1 << 10),
            body=rng.randbytes(rng.randrange(60)) if kind is not FrameType.DROP else b"",
            key=b"" if rng.randrange(2) else rng.randbytes(rng.randrange(20)),
        )
        for kind in (FrameType.APPEND, FrameType.DELETE, FrameType.TOPIC, FrameType.DROP, FrameType.HEAD)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_write_that_was_cut_short_is_a_piece(seed: int) -> None:
    """Of one frame and of several, at every byte, in a file that is reserved and in one that ends there."""
    *_, before, first, second = frames(seed)
    for written in (first, first + second):
        for cut in range(1, len(written)):
            if cut == len(first):
                continue  # that frame is good
            start = len(first) if cut > len(first) else 0
            for reserved in (RESERVED, b""):
                data = before + written[:cut] + reserved
                assert look_behind(data, salt=SALT, start=len(before) + start) is Behind.PIECE, f"cut to {cut}"
    assert look_behind(before + RESERVED, salt=SALT, start=len(before)) is Behind.ZEROS
    assert look_behind(before, salt=SALT, start=len(before)) is Behind.ZEROS


@pytest.mark.parametrize("seed", range(4))
def test_every_flipped_bit_of_a_whole_frame_shows(seed: int) -> None:
    for whole in frames(seed):
        for bit in range(len(whole) * 8):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            expected = Behind.DAMAGED
            if bit // 8 == len(whole) - 1 and not data[-1]:
                expected = Behind.PIECE  # as if the very last byte had not been written: no telling
            for reserved in (RESERVED, b""):
                assert look_behind(bytes(data) + reserved, salt=SALT) is expected, f"bit {bit} of {len(whole) * 8}"


def large(size: int, *, salt: int = SALT) -> bytes:
    body = random.Random(size).randbytes(size)
    return encode_frame(
        salt=salt, type=FrameType.APPEND, topic_id=7, first_seq=1, count=1, ts=1, lsn=3, synced=2, body=body
    )


def flipped(data: bytes, at: int, bit: int = 3) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@pytest.mark.parametrize("at", [0, 4, 8, 9, 10, 12, 56, 9_000, -9, -8, -1])
@pytest.mark.parametrize("behind", [RESERVED, large(80), large(80)[:70]], ids=["nothing", "a frame", "a torn frame"])
def test_a_bit_of_a_larger_frame(at: int, behind: bytes) -> None:
    data = large(20_000)
    assert look_behind(b"before" + flipped(data, at % len(data)) + behind, salt=SALT, start=6) is Behind.DAMAGED


def test_not_every_bit_of_the_largest_is_tried() -> None:
    data = large(200_000)
    for at in (0, 5, len(data) - 8):  # of these there are few
        assert look_behind(flipped(data, at), salt=SALT) is Behind.DAMAGED
    assert look_behind(flipped(data, 50_000), salt=SALT) is Behind.FRAME


def test_a_frame_that_is_written_in_pieces_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head comes last, and what of that was cut short may be one bit: the only one of `synced`, for example."""
    data = large(2_000)
    damaged = flipped(data, 48, 1)
    assert look_behind(damaged, salt=SALT) is Behind.DAMAGED
    monkeypatch.setattr(limits, "PLACED_BYTES", 1_000)
    assert look_behind(damaged, salt=SALT) is Behind.FRAME


def test_two_bits_are_no_proof() -> None:
    data = large(300)
    for first, second in ((0, 1), (4, 100), (100, 200), (200, len(data) - 1)):
        assert look_behind(flipped(flipped(data, first), second), salt=SALT) is Behind.FRAME


@pytest.mark.parametrize("zeros", [400, 2_000])
@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_bit_among_zeros_may_be_a_sector_that_did_not_arrive(zeros: int, place: str) -> None:
    body = bytearray(b"x" + bytes(zeros) + b"x")
    body[zeros // 2] = 0x10
    data = encode_frame(
        salt=SALT, type=FrameType.HEAD, topic_id=7, first_seq=0, ts=1, lsn=3, synced=2, body=bytes(body)
    )
    at = data.index(0x10, 56)
    gone = data[:at] + b"\0" + data[at + 1 :]
    if place == "end":
        gone = data[:at] + bytes(len(data) - at)
        assert look_behind(gone, salt=SALT) is not Behind.DAMAGED
    else:
        assert look_behind(gone, salt=SALT) is (Behind.DAMAGED if zeros < 512 else Behind.FRAME)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_power_cut_leaves_is_not_taken_for_damage(seed: int) -> None:
    """Sectors that are there, that are zeros, or that hold what was on the disk before."""
    dice = random.Random(seed)
    before = large(dice.randrange(600))
    for _ in range(40):
        tail = b"".join(large(dice.choice([0, 1, 30, 700, 3_000])) for _ in range(dice.randrange(1, 4)))
        data = bytearray(before + tail + bytes(2_000))
        whole = bytes(data)
        for sector in range(0, len(data), 512):
            begin, end = max(sector, len(before)), min(sector + 512, len(before) + len(tail))
            if begin < end and (kept := dice.choice(["all", "zeros", "rubbish"])) != "all":
                data[begin:end] = bytes(end - begin) if kept == "zeros" else dice.randbytes(end - begin)
        if data != whole:
            assert look_behind(bytes(data), salt=SALT, start=len(before)) is not Behind.DAMAGED


@pytest.mark.parametrize("seed", range(4))
def test_other_damage_of_a_whole_frame(seed: int) -> None:
    rng = random.Random(seed)
    for whole in frames(seed):
        lengths = whole[:4] + rng.randbytes(4) + whole[8:]
        key_len = whole[:10] + rng.randbytes(2) + whole[12:]
        salt = rng.randbytes(4) + whole[4:]
        head = bytes(24) + whole[24:]
        body = whole[:40] + rng.randbytes(len(whole) - 48) + whole[-8:]
        end = whole[:-8] + rng.randbytes(7) + b"\1"
        for damaged in (lengths, key_len, salt, head, body, end):
            assert look_behind(damaged + RESERVED, salt=SALT) is Behind.FRAME, damaged.hex()
        for damaged in (salt, head, body, end):  # and more was written since, and cut short
            assert look_behind(damaged + whole[:30] + RESERVED, salt=SALT) is Behind.FRAME, damaged.hex()


@pytest.mark.parametrize("at", [0, 3, 55, 56, 63, 64, 200, 299])
def test_a_bit_among_zeros_is_no_frame(at: int) -> None:
    """Nothing was written there, so nothing is lost."""
    data = bytearray(RESERVED)
    data[at] = 0x40
    assert look_behind(bytes(data), salt=SALT) is Behind.PIECE


def test_bytes_without_the_zeros_behind_them() -> None:
    large = bytes(1 << 20)
    assert used_bytes(b"", start=0) == 0
    assert used_bytes(large * 3, start=5) == 0
    assert used_bytes(b"\1" + large * 2, start=0) == 1
    assert used_bytes(b"\1" + large * 2, start=1) == 0
    assert used_bytes(large + b"\1" + large, start=8) == (1 << 20) - 7
