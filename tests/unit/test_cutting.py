"""Large frames in fragments: the parser finds the same messages and refuses the same frames, however the bytes come."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import OPEN, SERVER, Protocol

from topics.gateway.streams.cutting import FRAME_BYTES, Cutter, Text

SIZE = 8
MOST = 400


class Heard(NamedTuple):
    messages: list[tuple[Opcode, bytes]]  # whole ones, and control frames
    close: tuple[int, str] | None


class Peer:
    """A parser, behind a cutter or not."""

    def __init__(self, cutter: Cutter | None, most: int = MOST) -> None:
        self.protocol = Protocol(SERVER, state=OPEN, max_size=most)
        self.frames: list[Frame] = []
        self._cutter = cutter

    def take(self, data: bytes) -> None:
        self.protocol.receive_data(data if self._cutter is None else self._cutter.cut(data))
        self.frames += [event for event in self.protocol.events_received() if isinstance(event, Frame)]

    @property
    def heard(self) -> Heard:
        messages: list[tuple[Opcode, bytes]] = []
        kind, open_ = Opcode.TEXT, b""
        for frame in self.frames:
            if frame.opcode in (Opcode.CLOSE, Opcode.PING, Opcode.PONG):
                messages.append((frame.opcode, bytes(frame.data)))
                continue
            kind = kind if frame.opcode is Opcode.CONT else frame.opcode
            open_ += frame.data
            if frame.fin:
                messages.append((kind, open_))
                open_ = b""
        sent = self.protocol.close_sent
        return Heard(messages, None if sent is None else (sent.code, sent.reason))


def masked(first: int, payload: bytes, *, wide: int = 0, mask: bytes = b"\x01\x80\x37\xfe") -> bytes:
    """A frame of a client; `wide`: the length in so many bytes, though it may need fewer."""
    size = len(payload)
    wide = wide or (0 if size < 126 else 2 if size < 65_536 else 8)
    short = {0: size, 2: 126, 8: 127}[wide]
    hidden = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return bytes([first, 0x80 | short]) + (size.to_bytes(wide, "big") if wide else b"") + mask + hidden


def fed(data: bytes, pieces: list[int], *, cut: bool = True) -> Peer:
    peer = Peer(Cutter(most=MOST, size=SIZE) if cut else None)
    at = 0
    for size in pieces:
        if at < len(data):
            peer.take(data[at : at + size])
        at += size
    if at < len(data):
        peer.take(data[at:])
    return peer


_frames = st.builds(
    masked,
    st.sampled_from([0x81, 0x81, 0x01, 0x80, 0x00, 0x82, 0x02, 0x89, 0x8A, 0x88, 0x83, 0x8B, 0xC1, 0x09]),
    st.integers(0, 140).map(lambda size: bytes(range(size))) | st.sampled_from([b"\x03\xe8", b"x" * 300, b"y" * 401]),
    wide=st.sampled_from([0, 0, 2, 8]),
    mask=st.sampled_from([b"\0\0\0\0", b"\x01\x80\x37\xfe"]),
)


@examples(400)
@given(
    frames=st.lists(_frames | st.binary(min_size=1, max_size=12), min_size=1, max_size=6),
    pieces=st.lists(st.integers(1, 60), max_size=30),
)
def test_the_parser_says_the_same(frames: list[bytes], pieces: list[int]) -> None:
    data = b"".join(frames)
    plain, cut = fed(data, [], cut=False).heard, fed(data, pieces).heard
    assert cut.messages == plain.messages
    if cut.close != plain.close:
        # It is refused for what it is before the rest has come, which the parser waits for otherwise.
        assert plain.close is None
        assert cut.close is not None
        assert cut.close[0] == CloseCode.PROTOCOL_ERROR


@pytest.mark.parametrize("step", [1, 3, 4, 5, 7, 1_000])
@pytest.mark.parametrize("length", [SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 3, 126, MOST])
def test_no_frame_is_larger_than_that(length: int, step: int) -> None:
    payload = bytes(at % 251 for at in range(length))
    data = masked(0x81, payload) + masked(0x89, b"ping") + masked(0x81, b"behind")
    peer = fed(data, [step] * len(data))
    assert peer.heard.messages == [(Opcode.TEXT, payload), (Opcode.PING, b"ping"), (Opcode.TEXT, b"behind")]
    assert all(len(frame.data) <= SIZE for frame in peer.frames)


def test_large_fragments_of_the_client_are_cut_too() -> None:
    data = masked(0x01, b"a" * 20) + masked(0x89, b"") + masked(0x00, b"b" * 20) + masked(0x80, b"c" * 20)
    peer = fed(data, [])
    assert peer.heard.messages == [(Opcode.PING, b""), (Opcode.TEXT, b"a" * 20 + b"b" * 20 + b"c" * 20)]
    assert [frame.fin for frame in peer.frames].count(True) == 2
    assert max(len(frame.data) for frame in peer.frames) == SIZE


def test_a_message_that_is_too_large_is_refused_by_its_header() -> None:
    for before, frame in ((b"", masked(0x81, b"x" * (MOST + 1))), (masked(0x01, b"x" * 20), masked(0x80, b"x" * MOST))):
        header = frame[: -MOST - 4]
        plain = fed(before + header, [], cut=False).heard
        assert plain.close is not None
        assert plain.close[0] == CloseCode.MESSAGE_TOO_BIG
        assert fed(before + header, []).heard.close == plain.close


@pytest.mark.parametrize("first", [0x88, 0x89, 0x8A, 0x09])
def test_a_long_control_frame_is_refused_before_it_has_come(first: int) -> None:
    frame = masked(first, b"x" * 300)
    plain = fed(frame, [], cut=False).heard.close
    assert plain is not None
    assert plain[1] == "control frame too long"
    assert fed(frame[:200], [10] * 20).heard.close == plain
    assert fed(frame + masked(0x81, b"{}"), [10] * 40).heard == Heard([], plain)


def test_what_the_parser_holds_is_bounded() -> None:
    """Of the sizes that are meant: the buffer never has more than one fragment."""
    peer = Peer(Cutter(most=1 << 30), most=1 << 30)
    most = 0
    peer.take(b"\x81\xff" + (40 * FRAME_BYTES).to_bytes(8, "big") + b"\0\0\0\0")
    for _ in range(40 * FRAME_BYTES // 2_048):
        peer.take(b"x" * 2_048)
        most = max(most, len(peer.protocol.reader.buffer))
    assert most <= FRAME_BYTES
    assert [len(frame.data) for frame in peer.frames] == [FRAME_BYTES] * 40
    assert [frame.fin for frame in peer.frames] == [False] * 39 + [True]


# --- text ----------------------------------------------------------------------------------------------


def verdict(parts: list[bytes]) -> bytes | None:
    text = Text()
    try:
        for number, part in enumerate(parts, 1):
            text.add(part, last=number == len(parts))
    except UnicodeDecodeError:
        return None
    return bytes(text.data)


@examples(300)
@given(
    parts=st.lists(
        st.binary(max_size=3)
        | st.text(max_size=3).map(str.encode)
        | st.sampled_from([b"\xf0\x9f", b"\x98\x80", b"\xc3"]),
        min_size=1,
        max_size=6,
    )
)
def test_text_is_what_would_be_text_as_a_whole(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    try:
        whole.decode()
    except UnicodeDecodeError:
        assert verdict(parts) is None
    else:
        assert verdict(parts) == whole


def test_what_is_no_text_is_found_at_once() -> None:
    text = Text()
    text.add(b"\xc3", last=False)
    with pytest.raises(UnicodeDecodeError):
        text.add(b"x", last=False)
