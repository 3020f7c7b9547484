"""What watchers are sent, as bytes. Pure.

A batch is rendered once per form and shared by all watchers that get it: the records came from the shard as JSON, so a
frame is a few bytes around them. Nothing a client wrote can end an SSE line: JSON escapes CR and LF inside of strings,
and where they stand between tokens the data is sent in several lines, which the reader joins again.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from topics import limits
from topics.actors.messages import Gap, Piece
from topics.errors import invalid

RETRY = b"retry: 2000\n\n"
_positions_decoder = msgspec.json.Decoder(dict[str, int])
_encode = msgspec.json.Encoder().encode


class Batch:
    """Records of one topic between two cursors, in every form that somebody asked for."""

    __slots__ = ("_body", "_filtered", "_sse", "_sse_alone", "_websocket", "piece", "topic")

    def __init__(self, topic: bytes, piece: Piece, body: bytes | memoryview) -> None:
        self.topic = topic
        self.piece = piece
        self._body: Any = body  # bytes or a view of them: formatting takes either
        self._sse: bytes | None = None
        self._sse_alone: bytes | None = None
        self._websocket: bytes | None = None
        self._filtered: dict[frozenset[str], Batch | None] = {}

    def without(self, nodes: frozenset[str]) -> Batch | None:
        """What is left for a reader that does not want these nodes' records; None: nothing."""
        piece = self.piece
        if piece.nodes is None or nodes.isdisjoint(piece.nodes):
            return self if self._body else None
        own = nodes.intersection(piece.nodes)
        if own in self._filtered:
            return self._filtered[own]
        assert piece.ends is not None
        parts = []
        start = 0
        for node, end in zip(piece.nodes, piece.ends, strict=True):
            if node not in own:
                parts.append(self._body[start : end - 1])
            start = end
        batch = self._filtered[own] = Batch(self.topic, piece, b",".join(parts)) if parts else None
        return batch

    @property
    def empty(self) -> bool:
        return not self._body

    def sse(self) -> bytes:
        """Everything behind the id."""
        if self._sse is None:
            piece = self.piece
            data = b'{"topic":"%b","records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d}' % (
                self.topic,
                self._body,
                piece.from_seq,
                piece.to_seq,
                piece.head_seq,
            )
            if b"\n" in data or b"\r" in data:
                data = b"\ndata: ".join(data.splitlines())
            self._sse = b"\nevent: record\ndata: %b\n\n" % data
        return self._sse

    def sse_alone(self) -> bytes:
        """The whole frame for whoever watches nothing but this topic."""
        if self._sse_alone is None:
            ident = composite([(b'"%b":' % self.topic, self.piece.to_seq)])
            self._sse_alone = b"id: %b%b" % (ident, self.sse())
        return self._sse_alone

    def websocket(self) -> bytes:
        """As a WebSocket frame."""
        if self._websocket is None:
            piece = self.piece
            self._websocket = text_frame(
                b'{"op":"record","topic":"%b","from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]}'
                % (self.topic, piece.from_seq, piece.to_seq, piece.head_seq, self._body)
            )
        return self._websocket


def composite(positions: Iterable[tuple[bytes, int]]) -> bytes:
    """A composite cursor from names, already as `"name":`, and seqs."""
    text = b"{%b}" % b",".join([b"%b%d" % position for position in positions])
    return urlsafe_b64encode(text).rstrip(b"=")


def parse_composite(text: str, *, field: str) -> dict[str, int]:
    try:
        raw = b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        positions = _positions_decoder.decode(raw)
    except (ValueError, msgspec.MsgspecError):
        raise invalid(f"{field} is not an id that this server gave out", field=field) from None
    if not all(0 <= seq <= limits.U64_MAX for seq in positions.values()):
        raise invalid(f"{field} is not an id that this server gave out", field=field)
    return positions


# --- the other frames: SSE ---


def sse_gap(topic: bytes, gap: Gap, head_seq: int, reason: bytes) -> bytes:
    return b"\nevent: tombstone\ndata: %b\n\n" % _gap(b"", topic, gap, head_seq, reason)


def sse_caught_up(topic: bytes, head_seq: int) -> bytes:
    return b'\nevent: caught-up\ndata: {"topic":"%b","head_seq":%d}\n\n' % (topic, head_seq)


def sse_gone(topic: bytes, head_seq: int) -> bytes:
    return b'\nevent: topic-deleted\ndata: {"topic":"%b","head_seq":%d,"reason":"deleted"}\n\n' % (topic, head_seq)


def sse_error(code: int, error: str) -> bytes:
    return b"event: error\ndata: %b\n\n" % _encode({"code": code, "error": error})


PACED = "delivery is paced: the server is under pressure, and these topics have a low priority"


def sse_paced(topics: list[str], retry_after_ms: int) -> bytes:
    """Advice: the stream stays open, and what is put off still comes."""
    content = {"code": 429, "error": PACED, "retry_after_ms": retry_after_ms, "topics": topics}
    return b"event: error\ndata: %b\n\n" % _encode(content)


def sse_heartbeat(now_ms: int) -> bytes:
    return b": hb %d\n\n" % now_ms


# --- and WebSocket, as the text of a message ---


def websocket_gap(topic: bytes, gap: Gap, head_seq: int, reason: bytes) -> bytes:
    return _gap(b'"op":"tombstone",', topic, gap, head_seq, reason)


def websocket_caught_up(topic: bytes, head_seq: int) -> bytes:
    return b'{"op":"caught_up","topic":"%b","head_seq":%d}' % (topic, head_seq)


def websocket_gone(topic: bytes, head_seq: int) -> bytes:
    return b'{"op":"topic_deleted","topic":"%b","head_seq":%d,"reason":"deleted"}' % (topic, head_seq)


def text_frame(payload: bytes) -> bytes:
    """A whole text message from a server: one frame, not masked."""
    size = len(payload)
    if size < 126:
        return b"\x81%c%b" % (size, payload)
    if size < 65_536:
        return b"\x81\x7e%b%b" % (size.to_bytes(2, "big"), payload)
    return b"\x81\x7f%b%b" % (size.to_bytes(8, "big"), payload)


def _gap(op: bytes, topic: bytes, gap: Gap, head_seq: int, reason: bytes) -> bytes:
    return b'{%b"topic":"%b","reason":"%b","gap_from":%d,"gap_to":%d,"earliest_seq":%d,"head_seq":%d}' % (
        op,
        topic,
        reason,
        gap.gap_from,
        gap.gap_to,
        gap.earliest_seq,
        head_seq,
    )


def prefixes(topics: Sequence[str]) -> list[bytes]:
    """Names as they stand in a composite cursor."""
    return [b'"%b":' % topic.encode() for topic in topics]
