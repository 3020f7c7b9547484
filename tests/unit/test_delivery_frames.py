"""The bytes watchers get: frames in every form, composite cursors, and the head of a response that goes on."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from delivery import parse_event
from hypothesis import given
from hypothesis import strategies as st
from model import error_of, examples
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from topics import limits
from topics.actors.messages import Gap, Piece
from topics.errors import ApiError
from topics.gateway.api.types import Response
from topics.gateway.api.watch import SSE_HEADERS
from topics.gateway.http1.response import Answers
from topics.gateway.streams import frames
from topics.gateway.streams.frames import Batch, composite, parse_composite, prefixes


def batch_of(*parts: bytes, nodes: list[str | None] | None = None, topic: bytes = b"t", at: int = 0) -> Batch:
    ends: list[int] | None = None
    if nodes is not None:
        ends = []
        for part in parts:
            ends.append((ends[-1] if ends else 0) + len(part) + 1)
    piece = Piece(9, at, at + len(parts), at + len(parts) + 1, None, nodes, ends)
    return Batch(topic, piece, memoryview(b",".join(parts)))


def record(seq: int, data: bytes = b"1") -> bytes:
    return b'{"$seq":%d,"data":%b}' % (seq, data)


def event_of(text: bytes) -> Any:
    assert text.endswith(b"\n\n")
    assert text.count(b"\n\n") == 1
    return parse_event(text[:-2])


def text_of(frame: bytes) -> Any:
    """The message of a server's WebSocket frame, by a client of the websockets package."""
    protocol = Protocol(CLIENT, state=OPEN, max_size=None)
    protocol.receive_data(frame)
    [event] = protocol.events_received()
    assert protocol.close_expected() is False
    assert isinstance(event, Frame)
    assert (event.opcode, event.fin) == (Opcode.TEXT, True)
    return json.loads(bytes(event.data))


# --- records -------------------------------------------------------------------------------------------


def test_a_record_frame() -> None:
    batch = batch_of(record(5), record(6, b'{"a": [1]}'), at=4)
    event = event_of(b"id: e30" + batch.sse())
    assert event.kind == "record"
    assert event.data == {
        "topic": "t",
        "records": [{"$seq": 5, "data": 1}, {"$seq": 6, "data": {"a": [1]}}],
        "from_seq": 4,
        "to_seq": 6,
        "head_seq": 7,
    }
    alone = event_of(batch.sse_alone())
    assert (alone.data, alone.id) == (event.data, {"t": 6})
    assert text_of(batch.websocket()) == {"op": "record", **event.data}


def test_a_frame_is_made_once() -> None:
    batch = batch_of(record(1))
    assert batch.sse() is batch.sse()
    assert batch.sse_alone() is batch.sse_alone()
    assert batch.websocket() is batch.websocket()


def test_data_goes_through_as_it_is() -> None:
    """Number spelling, key order, escapes and other white space are the client's."""
    data = '{"b":1.0e+05,  "a":"\\u0041\\n\\r é \u2028"}'.encode()
    batch = batch_of(record(1, data))
    assert data in batch.sse()
    assert data in batch.websocket()


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"\n\r", b"\r\r"])
def test_line_ends_between_tokens_do_not_end_an_event(end: bytes) -> None:
    data = b"{" + end + b'"a":' + end + b"[1," + end + b"2]}"
    frame = b"id: e30" + batch_of(record(1, data), record(2)).sse()
    assert b"\r" not in frame
    event = event_of(frame)
    assert [shown["data"] for shown in event.data["records"]] == [{"a": [1, 2]}, 1]


_space = st.text(alphabet=" \t\r\n", max_size=3)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@examples(150)
@given(value=_json, space=_space, ascii_only=st.booleans())
def test_any_json_comes_out_of_a_frame_as_it_went_in(value: Any, space: str, ascii_only: bool) -> None:
    spaced = json.dumps(value, ensure_ascii=ascii_only, separators=("," + space, space + ":" + space), indent=None)
    batch = batch_of(record(1, spaced.encode()), record(2))
    for data in (event_of(b"id: e30" + batch.sse()).data, text_of(batch.websocket())):
        assert data["records"] == [{"$seq": 1, "data": value}, {"$seq": 2, "data": 1}]


# --- without the reader's own --------------------------------------------------------------------------


def test_own_records_are_left_out() -> None:
    batch = batch_of(record(1), record(2), record(3), record(4), nodes=["a", None, "b", "a"])

    def left(*nodes: str) -> list[int] | None:
        shown = batch.without(frozenset(nodes))
        return None if shown is None else [one["$seq"] for one in event_of(b"id: e30" + shown.sse()).data["records"]]

    assert left("x") == [1, 2, 3, 4]
    assert left("a") == [2, 3]
    assert left("b", "x") == [1, 2, 4]
    assert left("a", "b") == [2]
    assert left("a") == [2, 3]
    assert batch.without(frozenset(["x"])) is batch
    assert batch.without(frozenset(["a"])) is batch.without(frozenset(["a", "y"]))  # shared by all who lose the same
    shown = batch.without(frozenset(["a"]))
    assert shown is not None
    data = event_of(shown.sse_alone())
    assert (data.data["from_seq"], data.data["to_seq"], data.id) == (0, 4, {"t": 4})


def test_nothing_is_left() -> None:
    batch = batch_of(record(1), record(2), nodes=["a", "a"])
    assert batch.without(frozenset(["a"])) is None
    assert batch.without(frozenset(["a"])) is None
    assert not batch.empty
    empty = Batch(b"t", Piece(9, 3, 5, 5), memoryview(b""))
    assert empty.empty
    assert empty.without(frozenset(["a"])) is None


def test_without_origins_everything_is_for_everyone() -> None:
    batch = batch_of(record(1))
    assert batch.without(frozenset(["a"])) is batch


@examples(100)
@given(
    origins=st.lists(st.sampled_from([None, "", "a", "b", "é"]), min_size=1, max_size=8),
    own=st.frozensets(st.sampled_from(["", "a", "b", "é", "z"])),
)
def test_any_filter(origins: list[str | None], own: frozenset[str]) -> None:
    parts = [record(seq, b'"' + b"x" * (seq * 7 % 11) + b'"') for seq in range(1, len(origins) + 1)]
    shown = batch_of(*parts, nodes=origins).without(own)
    expected = [seq for seq, node in enumerate(origins, 1) if node not in own]
    found = [] if shown is None else [one["$seq"] for one in text_of(shown.websocket())["records"]]
    assert found == expected
    assert (shown is None) == (not expected)


# --- the other frames ----------------------------------------------------------------------------------

GAP = Gap(3, 8, "cap", 9)


def test_gaps() -> None:
    expected = {
        "topic": "t",
        "reason": "from_seq_too_old",
        "gap_from": 3,
        "gap_to": 8,
        "earliest_seq": 9,
        "head_seq": 20,
    }
    event = event_of(b"id: e30" + frames.sse_gap(b"t", GAP, 20, b"from_seq_too_old"))
    assert (event.kind, event.data) == ("tombstone", expected)
    assert json.loads(frames.websocket_gap(b"t", GAP, 20, b"from_seq_too_old")) == {"op": "tombstone", **expected}


def test_caught_up() -> None:
    event = event_of(b"id: e30" + frames.sse_caught_up(b"t", 7))
    assert (event.kind, event.data) == ("caught-up", {"topic": "t", "head_seq": 7})
    assert json.loads(frames.websocket_caught_up(b"t", 7)) == {"op": "caught_up", "topic": "t", "head_seq": 7}


def test_gone() -> None:
    expected = {"topic": "t", "head_seq": 7, "reason": "deleted"}
    event = event_of(b"id: e30" + frames.sse_gone(b"t", 7))
    assert (event.kind, event.data) == ("topic-deleted", expected)
    assert json.loads(frames.websocket_gone(b"t", 7)) == {"op": "topic_deleted", **expected}


def test_errors_and_heartbeats_have_no_id() -> None:
    event = event_of(frames.sse_error(408, 'too "slow"\n'))
    assert (event.kind, event.id, event.data) == ("error", None, {"code": 408, "error": 'too "slow"\n'})
    assert frames.sse_heartbeat(1748467205000) == b": hb 1748467205000\n\n"
    assert frames.RETRY == b"retry: 2000\n\n"


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 200_000])
def test_a_text_frame_of_any_size(size: int) -> None:
    text = b'"' + b"x" * max(0, size - 2) + b'"' if size >= 2 else b"1" * size
    protocol = Protocol(CLIENT, state=OPEN, max_size=None)
    protocol.receive_data(frames.text_frame(text))
    [event] = protocol.events_received()
    assert bytes(event.data) == text  # type: ignore[union-attr]


# --- composite cursors ---------------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,20}", fullmatch=True)


@examples(100)
@given(positions=st.dictionaries(NAMES, st.integers(0, limits.U64_MAX), max_size=6))
def test_an_id_is_the_whole_map_in_order(positions: dict[str, int]) -> None:
    ident = composite(zip(prefixes(list(positions)), positions.values(), strict=True)).decode()
    assert not set(ident) & set("=+/\n")
    raw = base64.urlsafe_b64decode(ident + "=" * (-len(ident) % 4))
    assert raw == json.dumps(positions, separators=(",", ":")).encode()
    assert parse_composite(ident, field="cursor") == positions
    assert list(parse_composite(ident, field="cursor")) == list(positions)


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "!!!!",
        "é",
        "eyJ0Ijox fQ",
        "eyJ0I!jox!fQ",
        "e30=x",
        encoded("[]"),
        encoded("null"),
        encoded("1"),
        encoded('{"t":1'),
        encoded('{"t":"1"}'),
        encoded('{"t":null}'),
        encoded('{"t":true}'),
        encoded('{"t":1.5}'),
        encoded('{"t":-1}'),
        encoded('{"t":18446744073709551616}'),
        encoded('{"t":1e400}'),
        encoded('{"t":{"t":1}}'),
        encoded("[" * 2_000),
        base64.urlsafe_b64encode(b'{"\xff":1}').decode(),
    ],
)
def test_what_is_no_id(text: str) -> None:
    error = error_of(lambda: parse_composite(text, field="Last-Event-ID"))
    assert (error.code, error.detail) == ("invalid_request", {"field": "Last-Event-ID"})
    assert "Last-Event-ID" in error.message


def test_an_id_may_be_padded_and_spaced() -> None:
    """Somebody may have made it with another encoder."""
    spaced = base64.urlsafe_b64encode(b'{ "t" : 12 }').decode()
    assert parse_composite(spaced, field="cursor") == {"t": 12}
    assert parse_composite(encoded("{}"), field="cursor") == {}


@examples(150)
@given(text=st.text(max_size=40) | st.binary(max_size=30).map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_nothing_but_an_id_or_a_refusal_comes_out(text: str) -> None:
    try:
        found = parse_composite(text, field="cursor")
    except ApiError:
        return
    assert all(type(seq) is int and 0 <= seq <= limits.U64_MAX for seq in found.values())


# --- the head of a stream ------------------------------------------------------------------------------


def test_the_head_of_an_event_stream() -> None:
    answers = Answers("0.3.")
    answers.tick()
    head = answers.encode_stream(Response(200, b"", SSE_HEADERS), id=0x2F, request_id=None)
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert head.endswith(b"\r\n\r\n")
    assert first == b"HTTP/1.1 200 OK"
    headers = dict(line.decode().split(": ", 1) for line in lines)
    assert headers.pop("Date")
    assert headers == {
        "X-Request-Id": "0.3.2f",
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-store",
        "Connection": "keep-alive",
        "X-Accel-Buffering": "no",
    }


def test_the_head_of_an_upgrade() -> None:
    answers = Answers()
    answers.tick()
    headers = (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", "x"))
    head = answers.encode_stream(Response(101, b"", headers), id=1, request_id=b"mine")
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert first == b"HTTP/1.1 101 Switching Protocols"
    names = [line.split(b":")[0] for line in lines]
    assert names == [b"Date", b"X-Request-Id", b"Upgrade", b"Connection", b"Sec-WebSocket-Accept"]
    assert lines[1] == b"X-Request-Id: mine"
