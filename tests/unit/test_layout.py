from __future__ import annotations

import platform

import pytest

from topics.errors import StartRefused
from topics.limits import MIN_RING_BYTES
from topics.shm import layout


def test_every_control_word_has_a_cache_line_of_its_own() -> None:
    lines = {word * 8 // 64 for word in (layout.WORD_MAGIC, layout.WORD_TAIL, layout.WORD_HEAD, layout.WORD_WANTS)}
    assert len(lines) == 4
    assert max(lines) * 64 + 64 <= layout.HEADER_BYTES


@pytest.mark.parametrize(
    ("length", "span"), [(0, 16), (1, 32), (16, 32), (17, 48), (32, 48), (4096 - 16, 4096), (4096 - 15, 4112)]
)
def test_frames_are_16_byte_aligned(length: int, span: int) -> None:
    assert layout.frame_span(length) == span
    assert span % layout.ALIGN == 0


@pytest.mark.parametrize("ring_bytes", [MIN_RING_BYTES, MIN_RING_BYTES + 1, MIN_RING_BYTES + 4097, 8 << 20])
def test_a_link_is_two_rings_of_whole_pages(ring_bytes: int) -> None:
    span = layout.ring_span(ring_bytes)
    assert (span - layout.HEADER_BYTES) % 4096 == 0
    assert span - layout.HEADER_BYTES <= ring_bytes
    assert layout.link_bytes(ring_bytes) == 2 * span


def test_a_frames_check_depends_on_each_of_its_fields() -> None:
    usual = layout.frame_check(64, 10, layout.WHOLE, 3)
    others = {
        layout.frame_check(80, 10, layout.WHOLE, 3),
        layout.frame_check(64, 11, layout.WHOLE, 3),
        layout.frame_check(64, 10, layout.FIRST, 3),
        layout.frame_check(64, 10, layout.WHOLE, 4),
    }
    assert usual not in others
    assert len(others) == 4


def test_zeros_are_no_frame() -> None:
    """Fresh memory must not pass for an empty message."""
    for position in range(0, 1 << 16, 16):
        assert layout.frame_check(position, 0, 0, 0) != 0


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "riscv64", "i686"])
def test_other_machines_are_refused(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(StartRefused, match="x86-64"):
        layout.require_supported_machine()


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_this_machine_is_supported(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    layout.require_supported_machine()
