"""HTTP/2 connections that cost more than they bring: each is told to calm down and closed, and nobody else notices.

- Frames are made by hand here: no library sends what these clients send. What comes back is read as frames too, because
  the code of a GOAWAY is what tells a verdict from an accident.
- Every kind of flood has its counterpart: a client that does the same now and then, or as often as its requests ask
  for it, is let be.
- While somebody is abusive, bystanders of both lanes go on asking, and count how long it takes. Afterwards the gateway
  has no descriptor and no memory more than before.
"""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import hpack
import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from .bystanders import Flooder, bystanders
from .client import unique
from .h2wire import H2Wire
from .server import Server, eventually
from .sse import Http2Source, Watching

pytestmark = [pytest.mark.e2e, pytest.mark.full]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CALM = 11  # ENHANCE_YOUR_CALM
AT_ONCE, PER_S = 200, 20  # what the bucket of a connection holds, and gets
FLOOD = 5 * AT_ONCE
BODY_S, RATE = 2.0, 1_000
PROMPT_S = 8.0  # machines are busy
MOST_HEAD = 32 * 1024
JSON = ("content-type", "application/json")
BULKY = "bulky"  # a topic whose diff has a MiB
MIB = 1024 * 1024


class Rude:
    """A connection that sends the frames it is given."""

    def __init__(self, port: int, *, window: int = 2**30, **settings: int) -> None:
        """`window` is added to that of the connection; settings by the names they have in SettingsFrame."""
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PROMPT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.hpack = hpack.Encoder()
        self.numbers = itertools.count(1, 2)
        self.frames: list[Frame] = []  # received
        self.closed = False
        self._unread = b""
        known = {getattr(SettingsFrame, name): value for name, value in settings.items()}
        granted = [WindowUpdateFrame(0, window_increment=window)] if window else []
        first = [SettingsFrame(settings=known), *granted]
        self.sock.sendall(PREFACE + b"".join(frame.serialize() for frame in first))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    # --- making frames ---

    def head(self, *headers: tuple[str, str], method: str = "GET", path: str = "/v0/health") -> bytes:
        """A header block."""
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "localhost")]
        return self.hpack.encode([*pseudo, *headers])

    def get(self, number: int) -> HeadersFrame:
        return HeadersFrame(number, self.head(), flags=["END_HEADERS", "END_STREAM"])

    def post(self, number: int, path: str) -> HeadersFrame:
        """The head of a request whose body is to come."""
        return HeadersFrame(number, self.head(JSON, method="POST", path=path), flags=["END_HEADERS"])

    # --- talking ---

    def send(self, frames: Iterable[Frame], *, at_once: int = 50) -> None:
        """All of them, or until the server closes; what it says meanwhile is read, or both would wait for ever."""
        frames = iter(frames)
        while batch := b"".join(frame.serialize() for frame in itertools.islice(frames, at_once)):
            while batch and not self.closed:
                readable, writable, _ = select.select([self.sock], [self.sock], [], PROMPT_S)
                if readable:
                    self.receive()
                if writable:
                    try:
                        batch = batch[self.sock.send(batch) :]
                    except OSError:
                        batch = b""
                        self.wait_closed()
                assert readable or writable, "neither reads nor answers"
            if self.closed:
                return

    def receive(self) -> None:
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self.closed = True
        self._unread += data
        while len(self._unread) >= 9:
            frame, size = Frame.parse_frame_header(memoryview(self._unread[:9]))
            if len(self._unread) < 9 + size:
                break
            frame.parse_body(memoryview(self._unread[9 : 9 + size]))
            self.frames.append(frame)
            self._unread = self._unread[9 + size :]

    def wait_for(self, done: Callable[[], object], *, within_s: float = PROMPT_S) -> None:
        deadline = time.monotonic() + within_s
        while not done():
            assert not self.closed, f"closed ({self.goaway})"
            assert select.select([self.sock], [], [], max(deadline - time.monotonic(), 0))[0], "nothing more comes"
            self.receive()

    def wait_closed(self, *, within_s: float = PROMPT_S) -> None:
        deadline = time.monotonic() + within_s
        while not self.closed:
            assert select.select([self.sock], [], [], max(deadline - time.monotonic(), 0))[0], "it is let be"
            self.receive()

    @property
    def goaway(self) -> int | None:
        """The code of the server's farewell."""
        return next((frame.error_code for frame in self.frames if isinstance(frame, GoAwayFrame)), None)

    def has_answer(self, number: int) -> bool:
        """Whether a stream's answer has come to its end."""
        return any(frame.stream_id == number and "END_STREAM" in frame.flags for frame in self.frames)

    def assert_alive(self) -> None:
        number = next(self.numbers)
        self.send([self.get(number)])
        self.wait_for(lambda: self.has_answer(number))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It waits for ever for a connection that does nothing, so whoever is closed was closed for what it did."""
    folder = tmp_path_factory.mktemp("abused")
    environ = {
        "TOPICS_BODY_TIMEOUT_MS": int(BODY_S * 1_000),
        "TOPICS_IDLE_TIMEOUT_MS": 600_000,
        "TOPICS_MIN_BODY_RATE": RATE,
        "TOPICS_ELASTIC": 0,  # under pressure others may be refused, which is another story
    }
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        with server.client() as client:
            for _ in range(11):
                assert client.append(BULKY, *["x" * 10_000] * 10).error is None
            assert len(client.diff(BULKY, limit=1_000).raw) > MIB * 0.9
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


def rss_bytes(server: Server) -> int:
    return next(line.rss_bytes or 0 for line in server.ps().processes if line.name == "gateway-0")


# --- floods ------------------------------------------------------------------------------------------

Flood = Callable[[Rude], Iterator[Frame]]


def rapid_reset(rude: Rude) -> Iterator[Frame]:
    """CVE-2023-44487: requests that are taken back before they are answered."""
    for number in rude.numbers:
        yield rude.get(number)
        yield RstStreamFrame(number, error_code=8)


def rapid_reset_of_appends(rude: Rude) -> Iterator[Frame]:
    for number in rude.numbers:
        yield rude.post(number, "/v0/topics/taken-back")
        yield DataFrame(number, b'{"records":')
        yield RstStreamFrame(number, error_code=8)


def rapid_reset_of_long_polls(rude: Rude) -> Iterator[Frame]:
    for number in rude.numbers:
        yield rude.post(number, f"/v0/topics/{BULKY}/diff")
        yield DataFrame(number, b'{"from_seq":110,"wait_ms":30000}', flags=["END_STREAM"])
        yield RstStreamFrame(number, error_code=8)


def rapid_reset_of_streams(rude: Rude) -> Iterator[Frame]:
    """Of WebSockets, before they are open."""
    headers = [(":method", "CONNECT"), (":protocol", "websocket"), (":path", "/v0/ws"), (":scheme", "http")]
    more = [(":authority", "localhost"), ("sec-websocket-version", "13")]
    for number in rude.numbers:
        yield HeadersFrame(number, rude.hpack.encode([*headers, *more]), flags=["END_HEADERS"])
        yield RstStreamFrame(number, error_code=8)


def provoked_resets(rude: Rude) -> Iterator[Frame]:
    """CVE-2025-8671: the server is made to reset the stream by itself; that costs it the same."""
    for number in rude.numbers:
        yield rude.get(number)
        yield WindowUpdateFrame(number, window_increment=2**31 - 1)


def resets_of_a_closed_stream(rude: Rude) -> Iterator[Frame]:
    number = next(rude.numbers)
    yield rude.get(number)
    while True:
        yield RstStreamFrame(number, error_code=8)


def pings(rude: Rude) -> Iterator[Frame]:
    """CVE-2019-9512: each wants an answer."""
    return itertools.repeat(PingFrame(0, b"12345678"))


def pongs(rude: Rude) -> Iterator[Frame]:
    """To pings nobody sent."""
    return itertools.repeat(PingFrame(0, b"12345678", flags=["ACK"]))


def empty_settings(rude: Rude) -> Iterator[Frame]:
    """CVE-2019-9515: each wants an answer."""
    return itertools.repeat(SettingsFrame())


def settings(rude: Rude) -> Iterator[Frame]:
    """That change the window of all streams to and fro."""
    for size in itertools.cycle((70_000, 60_000)):
        yield SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: size})


def settings_acknowledged(rude: Rude) -> Iterator[Frame]:
    """Which nobody sent."""
    return itertools.repeat(SettingsFrame(flags=["ACK"]))


def priorities(rude: Rude) -> Iterator[Frame]:
    """CVE-2019-9513: of streams that are not there, one below the other."""
    for number in itertools.count(1_001, 2):
        yield PriorityFrame(number, depends_on=number - 2, stream_weight=5, exclusive=True)


def priorities_of_one_stream(rude: Rude) -> Iterator[Frame]:
    for weight in itertools.cycle(range(1, 200)):
        yield PriorityFrame(9_999, depends_on=0, stream_weight=weight)


def empty_data(rude: Rude) -> Iterator[Frame]:
    """CVE-2019-9518: they pass every window, and bring nothing."""
    number = next(rude.numbers)
    yield rude.post(number, "/v0/topics/empty")
    while True:
        yield DataFrame(number, b"")


def padding(rude: Rude) -> Iterator[Frame]:
    """Data frames without data; the window is given back for what is thrown away."""
    number = next(rude.numbers)
    yield rude.post(number, "/v0/topics/empty")
    while True:
        yield DataFrame(number, b"", flags=["PADDED"], pad_length=10)


FLOODS: tuple[Flood, ...] = (
    rapid_reset,
    rapid_reset_of_appends,
    rapid_reset_of_long_polls,
    rapid_reset_of_streams,
    provoked_resets,
    resets_of_a_closed_stream,
    pings,
    pongs,
    empty_settings,
    settings,
    settings_acknowledged,
    priorities,
    priorities_of_one_stream,
    empty_data,
    padding,
)


@pytest.mark.gate
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_told_to_calm_down_and_closed(server: Server, flood: Flood) -> None:
    sockets = server.sockets_of("gateway-0")
    with bystanders(server), Rude(server.port) as rude:
        rude.send(itertools.islice(flood(rude), 3 * FLOOD))
        rude.wait_closed()
        assert rude.goaway == CALM
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, within_s=PROMPT_S, what="the connection's end")


@pytest.mark.parametrize("flood", [rapid_reset, pings, empty_settings])
def test_a_flood_that_does_not_read_is_closed_too(server: Server, flood: Flood) -> None:
    """Its answers fill the socket; they are not gathered, and the connection is not kept."""
    before = rss_bytes(server)
    with bystanders(server), Rude(server.port) as rude:
        rude.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        raw = b"".join(frame.serialize() for frame in itertools.islice(flood(rude), 20 * FLOOD))
        rude.sock.settimeout(PROMPT_S)
        try:
            while True:
                rude.sock.sendall(raw)  # until it is cut off
        except TimeoutError:
            raise AssertionError("it is let be") from None
        except OSError:
            pass
    assert rss_bytes(server) - before < 20 * MIB


def test_what_was_asked_before_the_flood_is_not_done_twice(server: Server) -> None:
    """A connection may end with requests under way; each is done once or not at all."""
    topic = unique("flooded")
    with server.client() as client, Rude(server.port) as rude:
        client.put(topic)
        body = b'{"records":[{"data":1}]}'
        for _ in range(50):
            number = next(rude.numbers)
            rude.send([rude.post(number, f"/v0/topics/{topic}"), DataFrame(number, body, flags=["END_STREAM"])])
        rude.send(itertools.islice(pings(rude), FLOOD))
        rude.wait_closed()
        assert client.state(topic)["head_seq"] <= 50


def window_updates(rude: Rude) -> list[Frame]:
    return [WindowUpdateFrame(0, window_increment=1)] * 2_000


def tiny_data(rude: Rude) -> list[Frame]:
    number = next(rude.numbers)
    rude.send([rude.post(number, "/v0/topics/tiny")])
    return [DataFrame(number, b" ")] * 2_000


def unknown_frames(rude: Rude) -> list[Frame]:
    """Of a type that is to be ignored."""
    return [ExtensionFrame(type=0xBE, stream_id=0)] * 2_000


@pytest.mark.parametrize("frames_of", [window_updates, tiny_data, unknown_frames])
def test_frames_that_are_free_are_no_way_to_stop_others(
    server: Server, frames_of: Callable[[Rude], list[Frame]]
) -> None:
    """A few connections that send nothing else; whether they are closed for it or not."""
    with bystanders(server, within_s=3):
        rudes = [Rude(server.port) for _ in range(4)]
        raws = [b"".join(frame.serialize() for frame in frames_of(rude)) for rude in rudes]
        flooders = [Flooder(rude.sock, raw, 2.5) for rude, raw in zip(rudes, raws, strict=True)]
        for flooder in flooders:
            flooder.wait()


# --- those who do the same within reason -------------------------------------------------------------


def _burst(rude: Rude, flood: Flood, frames: int) -> None:
    """Some of a flood, and a request that shows that it was taken in."""
    rude.send(itertools.islice(flood(rude), frames))
    rude.assert_alive()


BURSTS: tuple[tuple[Flood, int], ...] = (
    (rapid_reset, 2 * 150),
    (pings, 150),
    (empty_settings, 150),
    (priorities, 150),
    (empty_data, 150),
)


def test_a_burst_is_forgiven_and_forgotten(server: Server) -> None:
    """Three quarters of what the bucket holds, and again when it has filled up."""

    def twice(flood: Flood, frames: int) -> None:
        with Rude(server.port) as rude:
            _burst(rude, flood, frames)
            # Nothing shows from outside how full the bucket is.
            time.sleep(1.5 * 100 / PER_S)
            _burst(rude, flood, frames)

    with ThreadPoolExecutor(len(BURSTS)) as pool:
        for future in [pool.submit(twice, *burst) for burst in BURSTS]:
            future.result()


@pytest.mark.parametrize("flood", [rapid_reset, pings, priorities])
def test_but_not_at_once_again(server: Server, flood: Flood) -> None:
    """What the bucket holds counts, not what comes with one segment."""
    frames = 2 * 150 if flood is rapid_reset else 150
    with Rude(server.port) as rude:
        _burst(rude, flood, frames)
        rude.send(itertools.islice(flood(rude), 2 * frames))
        rude.wait_closed()
        assert rude.goaway == CALM


def test_a_thousand_appends_that_end_with_an_empty_frame(server: Server) -> None:
    """It is how many a client ends its body."""
    topic = unique("ended")
    body = b'{"records":[{"data":1}]}'
    with Rude(server.port) as rude:
        for _ in range(20):
            numbers = list(itertools.islice(rude.numbers, 50))
            for number in numbers:
                ended = DataFrame(number, b"", flags=["END_STREAM"])
                rude.send([rude.post(number, f"/v0/topics/{topic}"), DataFrame(number, body), ended])
            rude.wait_for(lambda numbers=numbers: all(map(rude.has_answer, numbers)))  # type: ignore[misc]
            rude.frames.clear()
        rude.assert_alive()
    with server.client() as client:
        assert client.state(topic)["head_seq"] == 1_000


def test_a_thousand_requests_with_priorities(server: Server) -> None:
    """It is how some browsers send every head."""
    with Rude(server.port) as rude:
        for _ in range(20):
            numbers = list(itertools.islice(rude.numbers, 50))
            flags = ["END_HEADERS", "END_STREAM", "PRIORITY"]
            rude.send(
                HeadersFrame(number, rude.head(), flags=flags, depends_on=0, stream_weight=42) for number in numbers
            )
            rude.wait_for(lambda numbers=numbers: all(map(rude.has_answer, numbers)))  # type: ignore[misc]
            rude.frames.clear()
        rude.assert_alive()


def test_a_client_that_pings_and_resets_now_and_then(server: Server) -> None:
    """More often than any client would, many of them at first, and more than the bucket would last for without being
    filled."""
    topic = unique("companion")
    every_s = 1 / (0.75 * PER_S)
    with server.client() as client, Watching(server, "http2") as watching:
        client.put(topic)
        stream = watching.follow(topic).wait_caught_up(topic)
        source = stream.source
        assert isinstance(source, Http2Source)
        wire = source.wire
        sent = 0
        due = time.monotonic()
        while sent < AT_ONCE * 1.25:
            if sent % 2:
                wire.h2.ping(b"12345678")
                wire.flush()
            else:
                wire.cancel(wire.open("POST", f"/v0/topics/{topic}/diff", JSON))
            sent += 1
            due += every_s if sent > AT_ONCE * 0.75 else 0
            wire.is_alive()
            time.sleep(max(due - time.monotonic(), 0))
        client.append(topic, "still there")
        assert stream.wait_records(topic, 1) == ["still there"]


def test_a_long_stream_with_many_window_updates(server: Server) -> None:
    """The window is a few hundred bytes, so every piece has to be paid for."""
    topic, count, data = unique("long"), 2_000, "x" * 400
    with server.client() as client, H2Wire(server.port, window=600) as wire:
        client.put(topic)
        wid = client.send("POST", "/v0/watch", {"topics": {topic: {}}})["wid"]
        number = wire.open("GET", f"/v0/watch/{wid}", ("accept", "text/event-stream"), end=True)
        stream = wire.streams[number]
        for _ in range(count // 100):
            assert client.append(topic, *[data] * 100).error is None
        updates = 0
        deadline = time.monotonic() + 90
        while stream.body.count(data.encode()) < count and time.monotonic() < deadline:
            before = len(stream.body)
            assert wire.receive(grant=False), "closed"
            if size := len(stream.body) - before:
                wire.h2.increment_flow_control_window(size, number)
                wire.h2.increment_flow_control_window(size)
                wire.flush()
                updates += 2
        assert stream.body.count(data.encode()) == count
        assert not stream.reset
        assert updates > FLOOD


# --- headers -----------------------------------------------------------------------------------------


def _fields(size: int) -> list[tuple[str, str]]:
    """Headers that count as so many bytes: RFC 9113 adds 32 to each."""
    each = 1_000
    return [(f"x-{number:04}", "a" * (each - 32 - 6)) for number in range(size // each)]


def _in_pieces(rude: Rude, block: bytes, pieces: int, *, end: bool = True) -> Iterator[Frame]:
    """A request whose header block comes in a HEADERS frame and so many others."""
    number = next(rude.numbers)
    size = -(-len(block) // (pieces + 1))
    parts = [block[at : at + size] for at in range(0, len(block), size)]
    yield HeadersFrame(number, parts[0], flags=["END_STREAM"])
    for part in parts[1:-1]:
        yield ContinuationFrame(number, part)
    yield ContinuationFrame(number, parts[-1], flags=["END_HEADERS"] if end else [])


def test_headers_in_many_pieces(server: Server) -> None:
    with Rude(server.port) as rude:
        rude.send(_in_pieces(rude, rude.head(*_fields(20_000)), 60))
        rude.wait_for(lambda: rude.has_answer(1))
        rude.assert_alive()


def test_headers_within_the_limit(server: Server) -> None:
    with Rude(server.port) as rude:
        rude.send(_in_pieces(rude, rude.head(*_fields(MOST_HEAD - 2_000)), 4))
        rude.wait_for(lambda: rude.has_answer(1))
        rude.assert_alive()


def endless_pieces(rude: Rude) -> Iterator[Frame]:
    """CVE-2024-27316: a head that never ends."""
    number = next(rude.numbers)
    yield HeadersFrame(number, rude.head(), flags=["END_STREAM"])
    for _ in range(FLOOD):
        yield ContinuationFrame(number, rude.hpack.encode([("x-a", "b")]))


def empty_pieces(rude: Rude) -> Iterator[Frame]:
    number = next(rude.numbers)
    yield HeadersFrame(number, b"", flags=["END_STREAM"])
    for _ in range(FLOOD):
        yield ContinuationFrame(number, b"")


def large_pieces(rude: Rude) -> Iterator[Frame]:
    number = next(rude.numbers)
    yield HeadersFrame(number, rude.head(), flags=["END_STREAM"])
    for _ in range(FLOOD):
        yield ContinuationFrame(number, b"\x00\x01a\x7f\x81\x7e" + b"x" * 16_000)


def more_than_64_pieces(rude: Rude) -> Iterator[Frame]:
    yield from _in_pieces(rude, rude.head(*_fields(10_000)), 70)


def a_large_head(rude: Rude) -> Iterator[Frame]:
    yield from _in_pieces(rude, rude.head(*_fields(MOST_HEAD + 4_000)), 4)


def a_large_head_without_end(rude: Rude) -> Iterator[Frame]:
    """Few pieces, each as large as they may be: what is kept until the end comes is too much as well."""
    number = next(rude.numbers)
    yield HeadersFrame(number, rude.head(), flags=["END_STREAM"])
    for _ in range(5):
        yield ContinuationFrame(number, b"x" * 16_000)


def many_small_headers(rude: Rude) -> Iterator[Frame]:
    fields = [(f"x-{number}", "a") for number in range(1_000)]
    yield from _in_pieces(rude, rude.head(*fields), 4)


def a_bomb(rude: Rude) -> Iterator[Frame]:
    """One header of 4,000 bytes is put into the table, and then named 16,000 times with a byte each: 64 MB."""
    block = rude.head(("x-a", "a" * 4_000))
    yield HeadersFrame(next(rude.numbers), block, flags=["END_HEADERS", "END_STREAM"])
    yield HeadersFrame(next(rude.numbers), rude.head() + b"\xbe" * 16_000, flags=["END_HEADERS", "END_STREAM"])


def a_table_that_is_too_large(rude: Rude) -> Iterator[Frame]:
    """The table of the decoder is to have 2 GB, says the encoder."""
    block = b"\x3f\xe1\xff\xff\xff\x07" + rude.head()
    yield HeadersFrame(next(rude.numbers), block, flags=["END_HEADERS", "END_STREAM"])


BOMBS: tuple[Flood, ...] = (
    endless_pieces,
    empty_pieces,
    large_pieces,
    more_than_64_pieces,
    a_large_head,
    a_large_head_without_end,
    many_small_headers,
    a_bomb,
    a_table_that_is_too_large,
)


@pytest.mark.gate
@pytest.mark.parametrize("bomb", BOMBS)
def test_headers_that_are_too_much_end_the_connection(server: Server, bomb: Flood) -> None:
    sockets, before = server.sockets_of("gateway-0"), rss_bytes(server)
    with bystanders(server), Rude(server.port) as rude:
        rude.send(bomb(rude))
        rude.wait_closed()
        assert rude.goaway not in (None, 0)
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, within_s=PROMPT_S, what="the connection's end")
    assert rss_bytes(server) - before < 20 * MIB


def test_nothing_that_comes_with_too_many_headers_is_done(server: Server) -> None:
    topic = unique("bombed")
    with server.client() as client, Rude(server.port) as rude:
        block = rude.head(*_fields(MOST_HEAD + 4_000), method="DELETE", path=f"/v0/topics/{topic}")
        client.put(topic)
        rude.send(_in_pieces(rude, block, 4))
        rude.wait_closed()
        assert client.state(topic).status == 200


# --- windows -----------------------------------------------------------------------------------------


def _ask_for_much(rude: Rude, streams: int) -> None:
    for number in itertools.islice(rude.numbers, streams):
        body = DataFrame(number, b'{"limit":1000}', flags=["END_STREAM"])
        rude.send([rude.post(number, f"/v0/topics/{BULKY}/diff"), body])


def no_window_for_streams(server: Server) -> Rude:
    rude = Rude(server.port, INITIAL_WINDOW_SIZE=0)
    _ask_for_much(rude, 50)
    return rude


def no_window_for_the_connection(server: Server) -> Rude:
    rude = Rude(server.port, window=0, INITIAL_WINDOW_SIZE=2**31 - 1)
    _ask_for_much(rude, 50)
    return rude


def a_window_that_is_taken_back(server: Server) -> Rude:
    rude = Rude(server.port, INITIAL_WINDOW_SIZE=10_000)
    _ask_for_much(rude, 50)
    rude.send([SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0})])
    return rude


STARVING: tuple[Callable[[Server], Rude], ...] = (
    no_window_for_streams,
    no_window_for_the_connection,
    a_window_that_is_taken_back,
)


def _is_over(rude: Rude) -> bool:
    """Whether the connection is closed, or every stream on it was reset."""
    while not rude.closed and select.select([rude.sock], [], [], 0)[0]:
        rude.receive()
    return rude.closed or sum(isinstance(frame, RstStreamFrame) for frame in rude.frames) >= 50


@pytest.mark.parametrize("starve", STARVING)
def test_answers_that_nobody_takes_are_not_kept(server: Server, starve: Callable[[Server], Rude]) -> None:
    with bystanders(server), starve(server) as rude:
        eventually(lambda: _is_over(rude), within_s=BODY_S + PROMPT_S, what="the end of the patience")


def test_a_stream_without_a_window_stops_no_other(server: Server) -> None:
    """Of the same connection."""
    with Rude(server.port, INITIAL_WINDOW_SIZE=0) as rude:
        _ask_for_much(rude, 5)
        rude.send([SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0})])
        number = next(rude.numbers)
        rude.send([rude.get(number), WindowUpdateFrame(number, window_increment=10_000)])
        rude.wait_for(lambda: rude.has_answer(number))


def test_more_streams_than_there_may_be(server: Server) -> None:
    """Refused one by one, or with their connection."""
    with bystanders(server), Rude(server.port) as rude:
        for number in itertools.islice(rude.numbers, 300):
            body = DataFrame(number, b'{"from_seq":110,"wait_ms":30000}', flags=["END_STREAM"])
            rude.send([rude.post(number, f"/v0/topics/{BULKY}/diff"), body])
        rude.wait_for(
            lambda: rude.closed or any(isinstance(frame, RstStreamFrame | GoAwayFrame) for frame in rude.frames)
        )


# --- what is left ------------------------------------------------------------------------------------


def test_many_abusive_connections_leave_nothing_behind(server: Server) -> None:
    def once(flood: Flood) -> None:
        with Rude(server.port) as rude:
            rude.send(itertools.islice(flood(rude), FLOOD))
            rude.wait_closed(within_s=2 * PROMPT_S)

    def all_of_them() -> None:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(once, flood) for flood in (rapid_reset, pings, empty_data, *BOMBS)]:
                future.result()

    sockets = server.sockets_of("gateway-0")
    all_of_them()  # what the first ones need is kept for the next
    before = rss_bytes(server)
    with bystanders(server):
        for _ in range(3):
            all_of_them()
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, within_s=PROMPT_S, what="the connections' end")
    assert rss_bytes(server) - before < 16 * MIB
