"""What the generators have found, each by itself with as few bytes as it takes."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import hpack
import pytest
from e2e.h2wire import H2Wire, Stream
from e2e.server import eventually
from e2e.sockets import close_frame, handshake
from e2e.wire import Wire, request

from .dials import SEED
from .http2 import END_HEADERS, END_STREAM, PREFACE, Frame, settings
from .player import Case
from .scene import PATIENT, Scene, memory_of, scene
from .verdict import HEADERS, H2Talk, check_events, read_h2, read_replies, read_socket

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("found"), "found", **PATIENT) as opened:
        opened.furnish()
        yield opened
        opened.finish()


# --- requests behind one that becomes a stream -------------------------------------------------------


WHEN = pytest.mark.parametrize("when", ["with it", "behind its answer"])


def _behind_a_stream(stage: Scene, opening: bytes, behind: bytes, until: bytes, when: str) -> bytes:
    """While a long poll holds the answers back: a request for a stream, then more; all that comes up to `until`. What
    is more comes with the request, or when the stream's answer is with the gateway and waits for the poll's."""
    head_seq = stage.ask("GET", "/v0/topics/log")["head_seq"]
    poll = request("POST", "/v0/topics/log/diff", b'{"from_seq":%d,"wait_ms":20000}' % head_seq)
    received = b""
    eventually(lambda: stage.streams() == 0, what="the end of those before")
    with Wire(stage.server.port) as wire:
        if when == "with it":
            wire.send(poll + opening + behind)
        else:
            wire.send(poll + opening)
            eventually(lambda: stage.streams() == 1, what="a stream that its home counts")
            # Its home answers in order, each shard is asked: with this the answer that grants it has come, too.
            assert stage.ask("GET", "/v0/topics").status == 200
            assert not select.select([wire.sock], [], [], 0)[0], "answers came before the poll's"
            wire.send(behind)
        stage.ask("POST", "/v0/topics/log", {"records": [{"data": "the end of the poll"}]})
        while until not in received:
            received += wire.sock.recv(1 << 16)
    return received


@pytest.mark.gate
@WHEN
@pytest.mark.parametrize("kind", ["watch", "work"])
def test_an_event_stream_holds_events_only(stage: Scene, kind: str, when: str) -> None:
    stage.furnish()
    target = f"/v0/watch/{stage.open_session()}" if kind == "watch" else "/v0/topics/jobs/work?node=w"
    opening = request("GET", target, headers=("Accept: text/event-stream",))
    received = _behind_a_stream(stage, opening, request(), b"\nid: ", when)
    replies, events = read_replies(received, clean=False)
    assert [reply.status for reply in replies] == [200, 200]
    assert events.startswith(b"retry: 2000\n\n")
    check_events(events)


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["plain", "other"])
def test_an_answer_before_an_event_stream_lets_nothing_in_behind_it(stage: Scene, kind: str) -> None:
    before = {
        "plain": request("POST", "/v0/topics/still-1", b'{"records":[{"data":1}]}'),
        "other": request("GET", "/v0/topics/log"),
    }[kind]
    for _ in range(40):
        opening = request("GET", f"/v0/watch/{stage.open_session()}", headers=("Accept: text/event-stream",))
        received = b""
        with Wire(stage.server.port) as wire:
            wire.send(before + opening + request() * 3)
            while b"retry: 2000\n\n" not in received:
                received += wire.sock.recv(1 << 16)
        replies, events = read_replies(received, clean=False)
        assert [reply.is_stream for reply in replies] == [False, True]
        assert events.startswith(b"retry: 2000\n\n")


@pytest.mark.gate
@WHEN
def test_what_is_sent_behind_a_handshake_is_frames(stage: Scene, when: str) -> None:
    text = b'{"op":"ping",\r\n\r\n"request_id":"early"}'  # to a reader of heads this would be one
    behind = bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text + close_frame(1000)
    received = _behind_a_stream(stage, handshake(), behind, b"\x88\x02\x03\xe8", when)
    replies, frames = read_replies(received, clean=False)
    assert [reply.status for reply in replies] == [200, 101]
    talk = read_socket(frames)
    assert [message["request_id"] for message in talk.messages] == ["early"]
    assert talk.close_code == 1000


# --- HTTP/2 ------------------------------------------------------------------------------------------

GOOD = {b":method": b"GET", b":scheme": b"http", b":path": b"/v0/health", b":authority": b"localhost"}


ODD_HEADS = [
    (b":path", b"?"),
    (b":path", b"?a=b"),
    (b":path", b"v0"),
    (b":path", b"http://[t"),
    (b":path", b"http://\xef\xbc\x8f/x"),
    (b":authority", b"x" * 64),
    (b":authority", b"x" * 5_000),
    (b":authority", b"a..b"),
    (b":authority", b"."),
]


def _answer_to(stage: Scene, fields: list[tuple[bytes, bytes]]) -> H2Talk:
    block = bytes(hpack.Encoder().encode(fields))
    said = PREFACE + settings().encode() + Frame(HEADERS, END_HEADERS | END_STREAM, 1, block).encode()
    (outcome,) = stage.player.play([Case(1, "head", [said], "quiet")])
    return read_h2(outcome.received, clean=False)  # raises for a 500, and for an answer without an id


@pytest.mark.gate
@pytest.mark.parametrize(
    ("field", "value"), ODD_HEADS, ids=[f"{name.decode()}={value[:20]!r}" for name, value in ODD_HEADS]
)
def test_no_head_is_a_fault_of_the_server(stage: Scene, field: bytes, value: bytes) -> None:
    talk = _answer_to(stage, list({**GOOD, field: value}.items()))
    assert talk.replies or talk.resets or talk.goaway is not None


@pytest.mark.gate
def test_a_refused_head_has_an_id_too(stage: Scene) -> None:
    talk = _answer_to(stage, [*GOOD.items(), *((b"x-%d" % number, b"v") for number in range(101))])
    assert talk.replies[1].status == 431
    assert talk.replies[1].code == "header_too_large"


@pytest.mark.gate
def test_a_stream_that_is_cancelled_takes_nothing_of_the_others(stage: Scene) -> None:
    """Whenever the cancel comes: before, during or after the answer. Too many of them would be abuse: few for each
    connection, many connections."""
    stage.furnish()
    dice = Random(SEED)
    for _ in range(20):
        with H2Wire(stage.server.port) as wire:
            for _ in range(8):
                asked = _ask_at_once(wire, 8)
                time.sleep(dice.random() * 0.012)
                for stream in asked[:4]:
                    wire.h2.reset_stream(stream, error_code=8)
                wire.flush()
                answers = [wire.finish(stream) for stream in asked[4:]]
                assert [answer.headers[":status"] for answer in answers] == ["200"] * 4
                for answer in answers:
                    assert len(answer.body) == int(answer.headers["content-length"])


def _ask_at_once(wire: H2Wire, count: int) -> list[int]:
    """So many requests in one write, so that their answers are made at the same time."""
    streams = []
    for _ in range(count):
        stream = wire.h2.get_next_available_stream_id()
        wire.streams[stream] = Stream()
        fields = [(":method", "GET"), (":path", "/v0/topics/log"), (":scheme", "http"), (":authority", "localhost")]
        wire.h2.send_headers(stream, fields, end_stream=True)
        streams.append(stream)
    wire.flush()
    return streams


# --- memory ------------------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.timeout(180)
def test_a_stream_that_is_closed_leaves_nothing_behind(tmp_path: Path) -> None:
    """Thousands of sockets, one after the other, and the gateway is as large as after the first thousand of them."""
    with scene(tmp_path, "churn") as stage:
        gateway = stage.server.pids()["gateway-0"]

        def churn(count: int) -> None:
            for _ in range(count // 200):
                stage.player.play([Case(number, "churn", [handshake()]) for number in range(200)])

        churn(1_000)
        before = memory_of(gateway)
        churn(6_000)

        def fits() -> bool:
            stage.ask("GET", "/v0/health")  # a gateway without connections need not tidy up
            return memory_of(gateway) - before < 10 << 20  # the leak was of 30 MiB

        eventually(fits, within_s=20, every_s=0.2, what=f"no more than 10 MiB above {before >> 20} MiB")
        stage.finish()
