"""Clients that take their time: how long a head, a body and an answer may take, how slow they may come, and how large a
head may be.

- Everybody dawdles at the same time, each on a thread of its own; the tests look at what became of each. The patience
  for a body ends well before that for silence, so that one can be told from the other.
- Whoever is slow but above the minimum rate, or waits for something, is let be: each refusal has its counterpart.
- What the server has closed is seen in the kernel's table where the client does not read.
"""

from __future__ import annotations

import itertools
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .client import Answer, Client, Lane, unique
from .h2wire import H2Wire, Stream
from .server import Server, eventually, run_topics
from .sockets import Socket
from .sse import Watching
from .wire import Wire, request

pytestmark = [pytest.mark.e2e, pytest.mark.full]

HEAD_S, BODY_S, IDLE_S = 1.0, 2.0, 10.0
RATE = 1_000  # bytes per second
LATE_S = 6.0  # the server looks once a second, and the machine may be busy
GIVE_UP_S = IDLE_S + LATE_S
PATIENCE = {
    "TOPICS_HEAD_TIMEOUT_MS": int(HEAD_S * 1_000),
    "TOPICS_BODY_TIMEOUT_MS": int(BODY_S * 1_000),
    "TOPICS_IDLE_TIMEOUT_MS": int(IDLE_S * 1_000),
    "TOPICS_MIN_BODY_RATE": RATE,
    "TOPICS_ELASTIC": 0,  # under pressure requests may be refused, which is another story
}
KIB = 1024
BULKY = "bulky"  # a topic whose diff has a MiB
BULKY_DIFFS = 12  # asked at once: more than the kernel takes for a client that does not read
BULKY_DIFF = request("POST", f"/v0/topics/{BULKY}/diff", b'{"limit":1000}')
JSON_LINE = "Content-Type: application/json"
JSON_PAIR = ("content-type", "application/json")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class Fate(NamedTuple):
    answer: Answer | None  # None: it was closed without one
    took_s: float  # since it began to dawdle


def drip(sock: socket.socket, pieces: Iterator[bytes], every_s: float) -> None:
    """One piece after the other, until something comes back, all are sent, or it has gone on for too long."""
    give_up = time.monotonic() + GIVE_UP_S
    for piece in pieces:
        if select.select([sock], [], [], every_s)[0] or time.monotonic() > give_up:
            return
        try:
            sock.sendall(piece)
        except OSError:
            return


def body_of(size: int) -> bytes:
    """An append whose body has that many bytes."""
    empty = b'{"records":[{"data":""}]}'
    return empty[:-4] + b"x" * (size - len(empty)) + empty[-4:]


def is_held(server: Server, sock: socket.socket) -> bool:
    """Whether the server has its end of a connection; before it is accepted, and when the kernel goes on after a close
    on nobody's behalf, it has no inode."""
    client_port = sock.getsockname()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *_, inode = line.split()[:10]
        if (_port(local), _port(remote)) == (server.port, client_port):
            return inode != "0"
    return False


def _port(address: str) -> int:
    return int(address.partition(":")[2], 16)


def wait_dropped(server: Server, sock: socket.socket, *, since: float) -> Fate:
    eventually(lambda: not is_held(server, sock), within_s=GIVE_UP_S, every_s=0.05, what="the connection's end")
    return Fate(None, time.monotonic() - since)


# --- heads -------------------------------------------------------------------------------------------


def drips_a_head(wire: Wire) -> Answer | None:
    drip(wire.sock, (bytes([byte]) for byte in b"GET /v0/health HTTP/1.1\r\nX-A: " + b"a" * 10_000), 0.05)
    return wire.answer()


def drips_header_lines(wire: Wire) -> Answer | None:
    wire.send(b"GET /v0/health HTTP/1.1\r\n")
    drip(wire.sock, (b"X-%d: a\r\n" % number for number in itertools.count()), 0.1)
    return wire.answer()


def drips_a_head_behind_a_request(wire: Wire) -> Answer | None:
    wire.send(request() + b"GET /v0/health")
    assert wire.answer().status == 200
    drip(wire.sock, itertools.repeat(b"x"), 0.05)
    return wire.answer()


def stops_within_the_preface(wire: Wire) -> Answer | None:
    return wire.ask(PREFACE[:12])


def drips_a_head_in_time(wire: Wire) -> Answer | None:
    pieces = (bytes([byte]) for byte in request())
    drip(wire.sock, pieces, HEAD_S / 2 / len(request()))
    return wire.answer()


# --- bodies ------------------------------------------------------------------------------------------


def _post(topic: str, *headers: str) -> bytes:
    return request("POST", f"/v0/topics/{topic}", headers=(JSON_LINE, *headers))


def never_begins_a_body(wire: Wire) -> Answer | None:
    return wire.ask(_post("halves", "Content-Length: 100"))


def never_sends_what_it_was_told_to_send(wire: Wire) -> Answer | None:
    wire.send(_post("halves", "Content-Length: 100", "Expect: 100-continue"))
    told = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert wire.sock.recv(len(told), socket.MSG_WAITALL) == told
    return wire.answer()


def drips_a_body(wire: Wire) -> Answer | None:
    """Always some progress, but 50 bytes per second."""
    wire.send(_post("halves", "Content-Length: 10000"))
    drip(wire.sock, itertools.repeat(b"x" * 10), 0.2)
    return wire.answer()


def drips_a_large_body(wire: Wire) -> Answer | None:
    """One that is gathered as it comes."""
    wire.send(_post("halves", "Content-Length: 10000000"))
    drip(wire.sock, itertools.repeat(b"x" * 10), 0.2)
    return wire.answer()


def drips_chunks(wire: Wire) -> Answer | None:
    wire.send(_post("halves", "Transfer-Encoding: chunked"))
    drip(wire.sock, itertools.repeat(b"1\r\nx\r\n"), 0.2)
    return wire.answer()


def drips_within_a_chunk(wire: Wire) -> Answer | None:
    wire.send(_post("halves", "Transfer-Encoding: chunked"), b"2710\r\n")
    drip(wire.sock, itertools.repeat(b"x"), 0.2)
    return wire.answer()


def drips_the_size_of_a_chunk(wire: Wire) -> Answer | None:
    wire.send(_post("halves", "Transfer-Encoding: chunked"))
    drip(wire.sock, (bytes([byte]) for byte in b"000001;" + b"x" * 1_000), 0.2)
    return wire.answer()


def drips_trailers(wire: Wire) -> Answer | None:
    wire.send(_post("halves", "Transfer-Encoding: chunked"), b'8\r\n{"record\r\n0\r\n')
    drip(wire.sock, itertools.repeat(b"A: b\r\n"), 0.2)
    return wire.answer()


START = 5 * RATE  # what somebody sends at once who drips from then on: enough for five seconds


def begins_well_and_drips(wire: Wire) -> Answer | None:
    wire.send(_post("halves", "Content-Length: 1000000"), b"x" * START)
    drip(wire.sock, itertools.repeat(b"x" * 5), 0.2)
    return wire.answer()


def is_slow_but_short(wire: Wire) -> Answer | None:
    """Below the rate, but done before anybody looks at it."""
    body = body_of(100)
    wire.send(_post(unique("short"), f"Content-Length: {len(body)}"))
    drip(wire.sock, (body[at : at + 20] for at in range(0, len(body), 20)), BODY_S / 10)
    return wire.answer()


def takes_long_but_keeps_the_rate(wire: Wire) -> Answer | None:
    """Three times the rate, for three times the patience."""
    body = body_of(int(9 * BODY_S * RATE))
    wire.send(_post(unique("long"), f"Content-Length: {len(body)}"))
    drip(wire.sock, (body[at : at + 300] for at in range(0, len(body), 300)), 0.1)
    return wire.answer()


def chunks_keep_the_rate(wire: Wire) -> Answer | None:
    body = body_of(int(9 * BODY_S * RATE))
    wire.send(_post(unique("long"), "Transfer-Encoding: chunked"))
    chunks = (b"%x\r\n%b\r\n" % (len(part), part) for part in (body[at : at + 300] for at in range(0, len(body), 300)))
    drip(wire.sock, itertools.chain(chunks, [b"0\r\n\r\n"]), 0.1)
    return wire.answer()


# --- silence -----------------------------------------------------------------------------------------


def never_speaks(wire: Wire) -> Answer | None:
    wire.sock.settimeout(GIVE_UP_S)
    wire.assert_closed()
    return None


def sends_empty_lines_only(wire: Wire) -> Answer | None:
    """They mean nothing before a request, so they are no sign of life either."""
    drip(wire.sock, itertools.repeat(b"\r\n"), 0.2)
    _last_words(wire)
    return None


def stops_late_within_the_preface(wire: Wire) -> Answer | None:
    """Where it can't be anything but HTTP/2."""
    wire.send(PREFACE[:20])
    _last_words(wire)
    return None


def says_hello_in_http2_and_no_more(wire: Wire) -> Answer | None:
    wire.send(PREFACE + EMPTY_SETTINGS)
    _last_words(wire)
    return None


def drips_a_frame(wire: Wire) -> Answer | None:
    """A HEADERS frame of 16,000 bytes, ten bytes per second."""
    wire.send(PREFACE + EMPTY_SETTINGS)
    wire.sock.settimeout(GIVE_UP_S)
    wire.sock.recv(1_000)  # its settings
    wire.send(b"\x00\x3e\x80\x01\x04\x00\x00\x00\x01")
    give_up = time.monotonic() + GIVE_UP_S
    while time.monotonic() < give_up:
        if select.select([wire.sock], [], [], 0.1)[0] and not wire.sock.recv(1_000):
            return None
        try:
            wire.send(b"x")
        except OSError:
            return None
    raise AssertionError("it is still listened to")


def _last_words(wire: Wire) -> None:
    """Whatever comes, until the end."""
    wire.sock.settimeout(GIVE_UP_S)
    try:
        while wire.sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


# --- HTTP/2 bodies -----------------------------------------------------------------------------------


def _drip2(server: Server, topic: str, pieces: Iterator[bytes], every_s: float) -> Answer | None:
    with H2Wire(server.port) as wire:
        number = wire.open("POST", f"/v0/topics/{topic}", JSON_PAIR)
        give_up = time.monotonic() + GIVE_UP_S
        stream = wire.streams[number]
        for piece in pieces:
            if select.select([wire.sock], [], [], every_s)[0]:
                wire.receive()
            if stream.ended or stream.reset or wire.goodbye or time.monotonic() > give_up:
                break
            wire.send(number, piece, end=False)
        else:
            wire.send(number, b"", end=True)
        return _finished(wire, stream)


def _finished(wire: H2Wire, stream: Stream) -> Answer | None:
    wire.sock.settimeout(GIVE_UP_S)
    while not (stream.ended or stream.reset):
        if not wire.receive():
            return None
    return Answer(status=int(stream.headers[":status"]), headers=stream.headers, raw=stream.body)


def never_begins_a_body2(server: Server) -> Answer | None:
    with H2Wire(server.port) as wire:
        return _finished(wire, wire.streams[wire.open("POST", "/v0/topics/halves", JSON_PAIR)])


def drips_a_body2(server: Server) -> Answer | None:
    return _drip2(server, "halves", itertools.repeat(b"x" * 10), 0.2)


def begins_well_and_drips2(server: Server) -> Answer | None:
    return _drip2(server, "halves", itertools.chain([b"x" * START], itertools.repeat(b"x" * 5)), 0.2)


def is_slow_but_short2(server: Server) -> Answer | None:
    body = body_of(100)
    return _drip2(server, unique("short"), (body[at : at + 20] for at in range(0, 100, 20)), BODY_S / 10)


def takes_long_but_keeps_the_rate2(server: Server) -> Answer | None:
    body = body_of(int(9 * BODY_S * RATE))
    return _drip2(server, unique("long"), (body[at : at + 300] for at in range(0, len(body), 300)), 0.1)


# --- answers -----------------------------------------------------------------------------------------


def _asks_much(server: Server) -> socket.socket:
    """More than the kernel takes; the client has hardly any room."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
    sock.settimeout(GIVE_UP_S)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(BULKY_DIFF * BULKY_DIFFS)
    eventually(lambda: is_held(server, sock), what="that it is accepted")
    return sock


def never_reads(server: Server) -> Fate:
    with _asks_much(server) as sock:
        return wait_dropped(server, sock, since=time.monotonic())


def reads_too_slowly(server: Server) -> Fate:
    """A twentieth of the rate."""
    started = time.monotonic()
    with _asks_much(server) as sock:
        while is_held(server, sock) and time.monotonic() < started + GIVE_UP_S:
            time.sleep(0.2)
            sock.recv(RATE // 100)
        return wait_dropped(server, sock, since=started)


def reads_slowly_enough(server: Server) -> tuple[int, float]:
    """Fifty times the rate, for four times the patience, and then everything; how many answers it got."""
    started = time.monotonic()
    received = bytearray()
    with _asks_much(server) as sock:
        while time.monotonic() < started + 4 * BODY_S:
            time.sleep(0.05)
            received += sock.recv(50 * RATE // 20, socket.MSG_WAITALL)
        while received.count(b'"head_seq"') < BULKY_DIFFS:
            part = sock.recv(1 << 18)
            if not part:
                break
            received += part
    return received.count(b'"head_seq"'), time.monotonic() - started


def _ask_much2(wire: H2Wire) -> tuple[int, Stream]:
    wire.sock.settimeout(GIVE_UP_S)
    number = wire.ask("POST", f"/v0/topics/{BULKY}/diff", b'{"limit":1000}')
    return number, wire.streams[number]


def grants_no_window(server: Server) -> Fate:
    started = time.monotonic()
    with H2Wire(server.port, window=0) as wire:
        _, stream = _ask_much2(wire)
        while not stream.reset and wire.receive(grant=False):
            pass
        return Fate(None, time.monotonic() - started)


def grants_too_little(server: Server) -> Fate:
    """A tenth of the rate."""
    started = time.monotonic()
    with H2Wire(server.port, window=0) as wire:
        number, stream = _ask_much2(wire)
        while not stream.reset and not wire.goodbye and time.monotonic() < started + GIVE_UP_S:
            if select.select([wire.sock], [], [], 0.2)[0]:
                wire.receive(grant=False)
            elif stream.headers:
                wire.h2.increment_flow_control_window(RATE // 50, number)
                wire.flush()
        return Fate(None, time.monotonic() - started)


def starves_one_of_several(server: Server) -> Fate:
    """One stream gets no window; the connection is busy with others all the time."""
    started = time.monotonic()
    with H2Wire(server.port, window=0) as wire:
        _, starved = _ask_much2(wire)
        while not starved.reset and not wire.goodbye and time.monotonic() < started + GIVE_UP_S:
            number = wire.open("GET", "/v0/health", end=True)
            wire.h2.increment_flow_control_window(10_000, number)
            wire.flush()
            while not (wire.streams[number].ended or wire.goodbye):
                wire.receive()
            time.sleep(0.1)
        return Fate(None, time.monotonic() - started)


def never_reads2(server: Server) -> Fate:
    """All the window there can be, but nothing is read from the socket."""
    with H2Wire(server.port, window=2**31 - 1) as wire:
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
        wire.h2.increment_flow_control_window(2**31 - 1 - 65_535)
        for _ in range(BULKY_DIFFS):
            wire.ask("POST", f"/v0/topics/{BULKY}/diff", b'{"limit":1000}')
        eventually(lambda: is_held(server, wire.sock), what="that it is accepted")
        return wait_dropped(server, wire.sock, since=time.monotonic())


def grants_slowly_enough(server: Server) -> tuple[int, float]:
    """Ten times the rate, for four times the patience, and then everything."""
    started = time.monotonic()
    with H2Wire(server.port, window=0) as wire:
        number, stream = _ask_much2(wire)
        while time.monotonic() < started + 4 * BODY_S:
            if select.select([wire.sock], [], [], 0.1)[0]:
                assert wire.receive(grant=False), "closed"
            assert not stream.reset
            if stream.headers:
                wire.h2.increment_flow_control_window(RATE, number)
                wire.h2.increment_flow_control_window(RATE)
                wire.flush()
            time.sleep(0.05)
        wire.h2.increment_flow_control_window(2**24, number)
        wire.h2.increment_flow_control_window(2**24)
        wire.flush()
        while not stream.ended and not stream.reset and wire.receive(grant=False):
            pass
    return stream.body.count(b'"head_seq"'), time.monotonic() - started


# --- those who wait for something --------------------------------------------------------------------


def _watches(server: Server, lane: Lane) -> list[object]:
    """Nothing happens for longer than anybody's patience; then a record comes."""
    topic = unique("quiet")
    with server.client() as client, Watching(server, lane) as watching:
        client.put(topic)
        stream = watching.follow(topic, heartbeat_ms=60_000).wait_caught_up(topic)
        time.sleep(GIVE_UP_S - 3)  # what would end it comes at a time of its own
        client.append(topic, "at last")
        return stream.wait_records(topic, 1)


def watches1(server: Server) -> list[object]:
    return _watches(server, "http1")


def watches2(server: Server) -> list[object]:
    return _watches(server, "http2")


def listens_to_a_socket(server: Server) -> list[object]:
    topic = unique("quiet")
    with server.client() as client, Socket(server.port) as conversation:
        client.put(topic)
        conversation.settle(topic, tail=True)
        time.sleep(GIVE_UP_S - 3)
        client.append(topic, "at last")
        return conversation.data(topic, 1)


STALLED_RECORDS = 600  # of 10 kB: more than the kernel, the window and the backlog of a stream hold together


def _stalls(server: Server, lane: Lane) -> list[object]:
    """A stream that is not read for a while is a slow consumer, which has a patience of its own."""
    topic = unique("stalled")
    with server.client() as client, Watching(server, lane) as watching:
        client.put(topic)
        stream = watching.follow(topic, receive_buffer=4 * KIB).wait_caught_up(topic)
        for _ in range(STALLED_RECORDS // 50):
            assert client.append(topic, *["x" * 10_000] * 50).error is None
        time.sleep(3 * BODY_S)  # the time itself is what is tried
        stream.wait_records(topic, STALLED_RECORDS)
        client.append(topic, "at last")
        return stream.wait_records(topic, STALLED_RECORDS + 1)[-1:]


def stalls1(server: Server) -> list[object]:
    return _stalls(server, "http1")


def stalls2(server: Server) -> list[object]:
    return _stalls(server, "http2")


# --- all at once -------------------------------------------------------------------------------------

ON_A_WIRE: tuple[Callable[[Wire], Answer | None], ...] = (
    drips_a_head,
    drips_header_lines,
    drips_a_head_behind_a_request,
    stops_within_the_preface,
    drips_a_head_in_time,
    never_begins_a_body,
    never_sends_what_it_was_told_to_send,
    drips_a_body,
    drips_a_large_body,
    drips_chunks,
    drips_within_a_chunk,
    drips_the_size_of_a_chunk,
    drips_trailers,
    begins_well_and_drips,
    is_slow_but_short,
    takes_long_but_keeps_the_rate,
    chunks_keep_the_rate,
    never_speaks,
    sends_empty_lines_only,
    stops_late_within_the_preface,
    says_hello_in_http2_and_no_more,
    drips_a_frame,
)
BY_HTTP2: tuple[Callable[[Server], Answer | None], ...] = (
    never_begins_a_body2,
    drips_a_body2,
    begins_well_and_drips2,
    is_slow_but_short2,
    takes_long_but_keeps_the_rate2,
)
WITH_ANSWERS: tuple[Callable[[Server], Fate], ...] = (
    never_reads,
    reads_too_slowly,
    grants_no_window,
    grants_too_little,
    starves_one_of_several,
    never_reads2,
)
SLOW_READERS: tuple[Callable[[Server], tuple[int, float]], ...] = (reads_slowly_enough, grants_slowly_enough)
WAITING: tuple[Callable[[Server], list[object]], ...] = (
    watches1,
    watches2,
    listens_to_a_socket,
    stalls1,
    stalls2,
)


class Crowd:
    """Everybody's fate, as a promise."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self._server = server
        self.sockets = server.sockets_of("gateway-0")
        self.on_wire = {how.__name__: pool.submit(self._on_wire, how) for how in ON_A_WIRE}
        self.by_http2 = {how.__name__: pool.submit(self._by_http2, how) for how in BY_HTTP2}
        self.fates: dict[str, Future[Fate]] = {**self.on_wire, **self.by_http2}
        self.fates |= {how.__name__: pool.submit(how, server) for how in WITH_ANSWERS}
        self.read = {how.__name__: pool.submit(how, server) for how in SLOW_READERS}
        self.heard = {how.__name__: pool.submit(how, server) for how in WAITING}

    def _on_wire(self, how: Callable[[Wire], Answer | None]) -> Fate:
        with Wire(self._server.port) as wire:
            wire.sock.settimeout(GIVE_UP_S)
            started = time.monotonic()
            return Fate(how(wire), time.monotonic() - started)

    def _by_http2(self, how: Callable[[Server], Answer | None]) -> Fate:
        started = time.monotonic()
        return Fate(how(self._server), time.monotonic() - started)

    def wait(self) -> None:
        futures: list[Future[Any]] = [*self.fates.values(), *self.read.values(), *self.heard.values()]
        for future in futures:
            future.exception()


def _serve(factory: pytest.TempPathFactory, name: str, **environ: object) -> Iterator[Server]:
    folder = factory.mktemp(name)
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory, "impatient", **PATIENCE)


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As impatient, but it does not measure."""
    yield from _serve(tmp_path_factory, "lenient", **PATIENCE | {"TOPICS_MIN_BODY_RATE": 0})


@pytest.fixture(scope="module")
def crowd(impatient: Server) -> Iterator[Crowd]:
    with impatient.client() as client:
        for _ in range(11):
            assert client.append(BULKY, *["x" * 10_000] * 10).error is None
        assert len(client.diff(BULKY, limit=1_000).raw) > 1_000_000
    everybody = len(ON_A_WIRE) + len(BY_HTTP2) + len(WITH_ANSWERS) + len(SLOW_READERS) + len(WAITING)
    with ThreadPoolExecutor(everybody) as pool:
        yield Crowd(impatient, pool)


# --- what became of them -----------------------------------------------------------------------------


def _assert_timed_out(fate: Fate, patience_s: float) -> None:
    assert fate.answer is not None
    assert fate.answer.refusal == (408, "request_timeout")
    assert patience_s - 0.2 <= fate.took_s < patience_s + LATE_S


@pytest.mark.parametrize(
    ("who", "patience_s"),
    [
        (drips_a_head, HEAD_S),
        (drips_header_lines, HEAD_S),
        (drips_a_head_behind_a_request, HEAD_S),
        (stops_within_the_preface, HEAD_S),
        (never_begins_a_body, BODY_S),
        (never_sends_what_it_was_told_to_send, BODY_S),
        (drips_a_body, BODY_S),
        (drips_a_large_body, BODY_S),
        (drips_chunks, BODY_S),
        (drips_within_a_chunk, BODY_S),
        (drips_the_size_of_a_chunk, BODY_S),
        (drips_trailers, BODY_S),
        (begins_well_and_drips, START / RATE),
    ],
)
def test_what_comes_too_slowly_is_408_and_the_end(crowd: Crowd, who: Callable[..., object], patience_s: float) -> None:
    fate = crowd.on_wire[who.__name__].result()
    _assert_timed_out(fate, patience_s)
    assert fate.answer is not None
    assert fate.answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("who", "patience_s"),
    [(never_begins_a_body2, BODY_S), (drips_a_body2, BODY_S), (begins_well_and_drips2, START / RATE)],
)
def test_by_http2_likewise(crowd: Crowd, who: Callable[..., object], patience_s: float) -> None:
    _assert_timed_out(crowd.by_http2[who.__name__].result(), patience_s)


@pytest.mark.parametrize(
    ("who", "at_least_s"),
    [
        (drips_a_head_in_time, 0.0),
        (is_slow_but_short, 0.0),
        (is_slow_but_short2, 0.0),
        (takes_long_but_keeps_the_rate, 2 * BODY_S),
        (takes_long_but_keeps_the_rate2, 2 * BODY_S),
        (chunks_keep_the_rate, 2 * BODY_S),
    ],
)
def test_what_is_slow_but_not_too_slow_is_served(crowd: Crowd, who: Callable[..., object], at_least_s: float) -> None:
    answer, took_s = crowd.fates[who.__name__].result()
    assert answer is not None
    assert answer.status in (200, 201)
    assert took_s > at_least_s


@pytest.mark.parametrize(
    "who",
    [
        never_speaks,
        sends_empty_lines_only,
        stops_late_within_the_preface,
        says_hello_in_http2_and_no_more,
        drips_a_frame,
    ],
)
def test_a_connection_without_a_request_ends(crowd: Crowd, who: Callable[..., object]) -> None:
    assert crowd.fates[who.__name__].result().took_s < IDLE_S + LATE_S


def test_but_silence_is_not_cut_short(crowd: Crowd) -> None:
    assert crowd.fates["never_speaks"].result().took_s > IDLE_S - 0.2


@pytest.mark.parametrize("who", WITH_ANSWERS)
def test_whoever_does_not_take_its_answer_is_dropped(crowd: Crowd, who: Callable[..., object]) -> None:
    took_s = crowd.fates[who.__name__].result().took_s
    assert BODY_S - 0.2 <= took_s < BODY_S + LATE_S


@pytest.mark.parametrize(("who", "answers"), [(reads_slowly_enough, BULKY_DIFFS), (grants_slowly_enough, 1)])
def test_whoever_takes_it_slowly_gets_all_of_it(crowd: Crowd, who: Callable[..., object], answers: int) -> None:
    got, took_s = crowd.read[who.__name__].result()
    assert got == answers
    assert took_s >= 4 * BODY_S


@pytest.mark.parametrize("who", WAITING)
def test_a_stream_is_let_be(crowd: Crowd, who: Callable[..., object]) -> None:
    assert crowd.heard[who.__name__].result() == ["at last"]


def test_half_a_body_was_nothing(crowd: Crowd, impatient: Server) -> None:
    crowd.wait()
    with impatient.client() as client:
        assert client.state("halves").status == 404


def test_nothing_of_them_is_left(crowd: Crowd, impatient: Server) -> None:
    crowd.wait()
    eventually(lambda: impatient.sockets_of("gateway-0") <= crowd.sockets, what="the end of all connections")


# --- without a minimum -------------------------------------------------------------------------------


def _drips(server: Server, lane: Lane) -> Answer | None:
    """A few bytes at a time, never pausing for as long as the patience lasts, in all for more than twice of it."""
    body = body_of(100)
    pieces, every_s = (body[at : at + 10] for at in range(0, len(body), 10)), BODY_S / 4
    if lane == "http2":
        return _drip2(server, unique("dripped"), pieces, every_s)
    with Wire(server.port) as wire:
        wire.send(_post(unique("dripped"), f"Content-Length: {len(body)}"))
        drip(wire.sock, pieces, every_s)
        return wire.answer()


def test_without_a_minimum_any_progress_will_do(lenient: Server, lane: Lane) -> None:
    started = time.monotonic()
    answer = _drips(lenient, lane)
    assert time.monotonic() - started > 2 * BODY_S
    assert answer is not None
    assert answer.status == 201


@pytest.mark.parametrize("value", ["-1", "fast"])
def test_a_minimum_that_is_none_is_refused_at_the_start(tmp_path: Path, value: str) -> None:
    ended = run_topics("serve", TOPICS_MIN_BODY_RATE=value, TOPICS_DATA_DIR=tmp_path, TOPICS_PORT=0)
    assert ended.returncode != 0
    assert "TOPICS_MIN_BODY_RATE" in ended.stderr


# --- how large a head may be -------------------------------------------------------------------------

MOST_LINES, MOST_HEAD, MOST_TARGET = 100, 32 * KIB, 8 * KIB
Heads = Callable[[int], bytes]


def _of_lines(count: int) -> bytes:
    return request(headers=tuple(f"X-{number}: a" for number in range(count - 1)))  # and Host


def _of_bytes(size: int) -> bytes:
    return request(headers=("X-A: " + "a" * (size - len(request(headers=("X-A: ",)))),))


def _of_target(size: int) -> bytes:
    path = "/v0/topics?prefix="
    return request(path=path + "a" * (size - len(path)))


@pytest.mark.gate
@pytest.mark.parametrize(
    ("head_of", "most", "refusal"),
    [
        (_of_lines, MOST_LINES, (431, "header_too_large")),
        (_of_bytes, MOST_HEAD, (431, "header_too_large")),
        (_of_target, MOST_TARGET, (414, "uri_too_long")),
    ],
    ids=["lines", "bytes", "target"],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_a_head_at_its_limit_and_beyond(
    impatient: Server, head_of: Heads, most: int, refusal: tuple[int, str], pieces: int
) -> None:
    def ask(wire: Wire, head: bytes) -> Answer:
        size = len(head) // pieces + 1
        for at in range(0, len(head), size):
            try:
                wire.send(head[at : at + size])
            except OSError:
                break  # it has been refused already
        return wire.answer()

    with Wire(impatient.port) as wire:
        assert ask(wire, head_of(most)).status == 200
        assert ask(wire, head_of(most)).status == 200
        answer = ask(wire, head_of(most + 1))
        assert answer.refusal == refusal
        assert answer.headers["connection"] == "close"
        wire.assert_closed()


def test_a_refused_client_that_stays_is_left(impatient: Server) -> None:
    """It neither closes nor sends: its connection is not kept for its sake."""
    with Wire(impatient.port) as wire:
        assert wire.ask(_of_lines(MOST_LINES + 1)).status == 431
        assert wait_dropped(impatient, wire.sock, since=time.monotonic()).took_s < LATE_S


def test_a_refused_client_that_goes_on_is_cut_off(impatient: Server) -> None:
    with Wire(impatient.port) as wire:
        assert wire.ask(_of_lines(MOST_LINES + 1)).status == 431
        started = time.monotonic()
        try:
            while time.monotonic() < started + GIVE_UP_S:
                wire.send(b"x" * 10_000)
        except OSError:
            pass
        assert time.monotonic() - started < LATE_S


def test_a_long_target_by_http2(impatient: Server) -> None:
    path = "/v0/topics?prefix="
    with Client(impatient.port, "http2") as client:
        assert client.get(path + "a" * (MOST_TARGET - len(path))).status == 200
        assert client.get(path + "a" * (MOST_TARGET - len(path) + 1)).refusal == (414, "uri_too_long")
        assert client.get("/v0/health").status == 200


def test_many_header_lines_by_http2(impatient: Server) -> None:
    """What is too many is the business of the connection: test_h2_abuse.py."""
    headers = {f"x-{number}": "a" for number in range(MOST_LINES - 10)}
    with Client(impatient.port, "http2") as client:
        assert client.send("GET", "/v0/health", headers=headers).status == 200


def test_what_is_asked_with_a_large_head_is_not_done(impatient: Server) -> None:
    topic = unique("large")
    with Wire(impatient.port) as wire, impatient.client() as client:
        wire.send(request("PUT", f"/v0/topics/{topic}", b"{}", headers=(f"X-A: {'a' * MOST_HEAD}",)))
        assert wire.answer().status == 431
        assert client.state(topic).status == 404
        assert json.loads(client.get("/v0/health").raw)["status"] == "ok"
