"""The campaign over decoders finds decoders that take what nobody wrote, that raise what is not documented, or hang."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from campaigns import decoders
from campaigns.decoders import TARGETS, Target
from xxhash import xxh3_64_intdigest

from topics.errors import CorruptData
from topics.storage.columns import Columns, pack
from topics.storage.format import CHECKSUM, FRAME_HEADER, frame_bytes
from topics.storage.frames import Frame, decode_frame
from topics.storage.leases import decode_event
from topics.storage.manifest import decode_manifest


def target(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)


@pytest.mark.parametrize("name", [target.name for target in TARGETS])
def test_every_decoder_passes(name: str) -> None:
    tally = decoders.run(1, inputs=1_500, targets=[target(name)])
    assert not tally.findings, tally.findings[0].what
    assert tally.counts["inputs"] == 1_500


def careless(data: bytes, offset: int, *, salt: int) -> Frame | None:
    """Takes every checksum for good."""
    if len(data) >= FRAME_HEADER.size + CHECKSUM.size:
        _, body_len, _, _, key_len, *_ = FRAME_HEADER.unpack_from(data, offset)
        end = offset + frame_bytes(key_len=key_len, body_len=body_len) - CHECKSUM.size
        data = data[:end] + CHECKSUM.pack(xxh3_64_intdigest(data[offset:end])) + data[end + CHECKSUM.size :]
    return decode_frame(data, offset, salt=salt)


def test_a_checksum_that_is_not_looked_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "decode_frame", careless)
    found = decoders.run(1, inputs=500, targets=[target("frame")]).findings
    assert found
    assert "nobody wrote" in found[0].what
    assert decoders.run(1, found[0].only, inputs=500, targets=[target("frame")]).findings == [found[0]]


def test_an_exception_that_is_not_documented_is_found() -> None:
    def take(data: bytes) -> Any:
        return data[:4].decode()

    found = decoders.run(1, inputs=500, targets=[replace(target("frame"), take=take)]).findings
    assert found
    assert "UnicodeDecodeError" in found[0].what


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "SLOW_S", 0.01)
    slow = replace(target("frame"), take=lambda data: spin(0.02))
    assert "took" in decoders.run(1, inputs=2, targets=[slow]).findings[0].what


# --- what it has found ---


def test_text_that_is_not_utf8_is_damage() -> None:
    body = pack([b"1"], tags=["tag"]).replace(b"tag", b"t\xffg")
    with pytest.raises(CorruptData):
        Columns(body, count=1, ts=0).tags()
    with pytest.raises(CorruptData):
        decode_event(b'{"e":"claimed","node":"\xff"}')
    with pytest.raises(CorruptData):
        decode_manifest(b'{"format":1,"layout":1,"shards":1,"cold":"\xff"}', path="topics.json")


def test_columns_of_different_lengths_are_damage() -> None:
    body = pack([b"1", b"2"], metas=[None, None])
    with pytest.raises(CorruptData, match="metas"):
        Columns(body.replace(b"[null,null]", b"[null]     "), count=2, ts=0).sizes()
