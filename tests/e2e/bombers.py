"""Many clients that do the worst they can, in a process of their own: `bombers.py PORT CLIENTS SECONDS`.

Each has one connection, and connects again when it is sent away. Of ten clients

    6  send the worst bodies over HTTP/1.1, one after the other, and read every answer
    1  sends the same over HTTP/2, some at a time
    1  asks for reads of 8 MiB of BIG as gzip, pipelined, and takes nothing
    1  does so and takes a little now and then
    1  opens HTTP/2 streams with long heads and no request behind them, or sends a head that never ends

Prints how often each status was answered, as JSON: `413` over HTTP/1.1, `h2 413` over HTTP/2. `lost` counts requests
over HTTP/1.1 that got no answer, the others what their names say.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from itertools import cycle

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hpack
from hyperframe.frame import ContinuationFrame, Frame, HeadersFrame, PingFrame, SettingsFrame

MIB = 1 << 20
BIG = "big"  # whoever starts the crowd has filled it
PIPELINED = 8
STREAMS = 100  # of one connection, at most
AT_ONCE = 4  # of bombs over HTTP/2
SIP_S, SIP_BYTES = 0.1, 8_192
STAY_S = 4.0  # so long what can be held is held, and so long nothing


def bomb(before: bytes, unit: bytes, after: bytes, *, size: int = 60 * MIB) -> bytes:
    packer = zlib.compressobj(level=9, wbits=31)
    chunk = unit * max(300_000 // len(unit), 1)
    parts = [packer.compress(chunk) for _ in range(size // len(chunk))]
    return b"".join([packer.compress(before), *parts, packer.compress(after), packer.flush()])


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


_RECORD = b'{"data":[%b]}' % b",".join([b"{}"] * 2_000)
_BODIES = (
    ("/v0/topics/a:x/delete", b'{"match":[', b"{},", b"{}]}"),
    ("/v0/topics/a:x/diff", b'{"node":[', b'"a",', b'"a"]}'),
    ("/v0/watch", b'{"topics":{', b'"a":{},', b'"a":{}}}'),
    ("/v0/topics/a:x", b'{"records":[', b'{"data":1},', b'{"data":1}]}'),
    ("/v0/topics/a:x", b'{"records":[', b"{},", b"{}]}"),
    ("/v0/topics/a:x", b"{", b'"records":[],', b'"records":[]}'),
)


def bombs() -> list[tuple[str, bytes]]:
    nested = bomb(b'{"records":[', _RECORD + b",", b"{}]}", size=40 * MIB)
    return [*((path, bomb(*parts)) for path, *parts in _BODIES), ("/v0/topics/a:x", nested)]


def requests(known: list[tuple[str, bytes]]) -> list[bytes]:
    return [*(post(path, body) for path, body in known), b"GET /v0/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"]


def diffs() -> bytes:
    body = b'{"max_batch_bytes":%d}' % (8 * MIB)
    head = f"POST /v0/topics/{BIG}/diff HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    one = f"{head}Accept-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    return one * PIPELINED


def _h2(*frames: Frame) -> bytes:
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frame.serialize() for frame in (SettingsFrame(), *frames))


def open_streams() -> bytes:
    """As many as there may be, most of them made of indexes into the table of HPACK, and a PING at the end."""
    encoder = hpack.Encoder()
    fields = [(":method", "POST"), (":path", "/v0/topics/t"), (":scheme", "http"), (":authority", "localhost")]
    fields += [("x-long", "v" * 3_900)] * 7
    blocks = [encoder.encode(fields) for _ in range(3)]
    heads = [HeadersFrame(2 * at + 1, blocks[min(at, 2)], flags=["END_HEADERS"]) for at in range(STREAMS)]
    return _h2(*heads, PingFrame(opaque_data=b"all came"))


def open_head() -> bytes:
    """One that goes on, without an end."""
    return _h2(HeadersFrame(1, b"\0" * 16_000), *[ContinuationFrame(1, b"\0" * 16_000)] * 100)


class Client(ABC):
    """One connection, and another when it is over."""

    receive_buffer = 0

    def __init__(self, port: int, answers: Counter[str]) -> None:
        self._port = port
        self._answers = answers
        self.connect()

    def connect(self) -> None:
        self.sock = socket.socket()
        if self.receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        self.sock.settimeout(30)
        self.sock.connect(("127.0.0.1", self._port))
        self.sock.setblocking(False)
        self.out = memoryview(b"")
        self.begin()

    @property
    def interest(self) -> int:
        return (selectors.EVENT_READ if self.reads else 0) | (selectors.EVENT_WRITE if self.out else 0)

    @property
    def reads(self) -> bool:
        return True

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def take(self, received: bytes) -> bool:
        """False: the connection is over."""

    def tick(self, now: float) -> bool:
        """Now and then. False: the connection is over."""
        return True

    def step(self, events: int) -> bool:
        try:
            if events & selectors.EVENT_WRITE and self.out:
                self.out = self.out[self.sock.send(self.out) :]
            if events & selectors.EVENT_READ:
                received = self.sock.recv(1 << 18)
                return (bool(received) and self.take(received)) or self.lost()
        except BlockingIOError:
            pass
        except OSError:
            return self.lost()
        return True

    def lost(self) -> bool:
        return False


class Bomber(Client):
    def __init__(self, port: int, answers: Counter[str], arsenal: list[bytes], shift: int) -> None:
        self._next = cycle(arsenal[shift % len(arsenal) :] + arsenal[: shift % len(arsenal)])
        super().__init__(port, answers)

    def begin(self) -> None:
        self.out = memoryview(next(self._next))
        self._in = b""
        self._answered = False

    def lost(self) -> bool:
        self._answers["lost"] += not self._answered
        return False

    def take(self, received: bytes) -> bool:
        self._in += received
        head, found, body = self._in.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(body) >= length:
                self._answers[head[9:12].decode()] += 1
                if b"connection: close" in head.lower() or self.out:
                    self._answered = True
                    return False
                self.begin()
        return True


class H2Bomber(Client):
    """Several at a time, each as soon as there is room in the windows."""

    def __init__(self, port: int, answers: Counter[str], arsenal: list[tuple[str, bytes]], shift: int) -> None:
        self._next = cycle(arsenal[shift % len(arsenal) :] + arsenal[: shift % len(arsenal)])
        super().__init__(port, answers)

    def begin(self) -> None:
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration())
        self._h2.initiate_connection()
        self._bodies: dict[int, bytes] = {}  # what is still to be sent
        for _ in range(AT_ONCE):
            self._send_another()
        self._pump()

    def _send_another(self) -> None:
        path, body = next(self._next)
        stream = self._h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "localhost")]
        more = [("content-type", "application/json"), ("content-encoding", "gzip")]
        self._h2.send_headers(stream, [*fields, *more])
        self._bodies[stream] = body

    def _pump(self) -> None:
        for stream, body in list(self._bodies.items()):
            while body and (room := min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)):
                self._h2.send_data(stream, body[:room], end_stream=room >= len(body))
                body = body[room:]
            self._bodies[stream] = body
        self.out = memoryview(bytes(self.out) + self._h2.data_to_send())

    def take(self, received: bytes) -> bool:
        try:
            for event in self._h2.receive_data(received):
                if isinstance(event, h2.events.ConnectionTerminated):
                    self._answers["h2 goodbye"] += 1
                    return False
                if isinstance(event, h2.events.ResponseReceived):
                    self._answers[f"h2 {dict(event.headers)[b':status'].decode()}"] += 1
                elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    rest = self._bodies.pop(event.stream_id, None)
                    if rest and isinstance(event, h2.events.StreamEnded):
                        with suppress(h2.exceptions.StreamClosedError):  # the server may have reset it right behind
                            self._h2.reset_stream(event.stream_id)
                    if rest is not None:
                        self._send_another()
            self._pump()
        except h2.exceptions.ProtocolError:
            self._answers["h2 protocol"] += 1
            return False
        return True


class Holder(Client):
    """Holds what it can for a while, then nothing for as long: in that time the others meet a server that has room."""

    name = ""

    def __init__(self, port: int, answers: Counter[str], raw: bytes) -> None:
        self._raw = raw
        self._holds = False
        self._until = 0.0
        super().__init__(port, answers)

    def begin(self) -> None:
        now = time.monotonic()
        if now >= self._until:
            self._holds, self._until = not self._holds, now + STAY_S
        if self._holds:
            self._answers[self.name] += 1
            self.out = memoryview(self._raw)

    def take(self, received: bytes) -> bool:
        return True

    def tick(self, now: float) -> bool:
        return now < self._until


class Hoarder(Holder):
    """Answers of megabytes that are asked for and not taken."""

    receive_buffer = 4_096
    name = "hoarding"

    @property
    def reads(self) -> bool:
        return False


class Sipper(Hoarder):
    name = "sipping"
    _sip_at = 0.0

    def tick(self, now: float) -> bool:
        if self._holds and now >= self._sip_at:
            self._sip_at = now + SIP_S
            with suppress(OSError):
                self._answers["sipped"] += len(self.sock.recv(SIP_BYTES))
        return super().tick(now)


class Streams(Holder):
    name = "streams"


class EndlessHead(Holder):
    name = "endless heads"


def crowd(port: int, clients: int, answers: Counter[str]) -> list[Client]:
    known = bombs()
    arsenal = requests(known)
    diff, streams, head = diffs(), open_streams(), open_head()
    made: list[Client] = []
    for number in range(clients):
        match number % 10:
            case 0:
                made.append(Hoarder(port, answers, diff))
            case 1:
                made.append(Sipper(port, answers, diff))
            case 2:
                made.append(Streams(port, answers, streams) if number % 20 == 2 else EndlessHead(port, answers, head))
            case 3:
                made.append(H2Bomber(port, answers, known, number))
            case _:
                made.append(Bomber(port, answers, arsenal, number))
    return made


def main(port: int, clients: int, seconds: float) -> None:
    answers: Counter[str] = Counter()
    selector = selectors.DefaultSelector()
    everyone = crowd(port, clients, answers)
    watched: dict[Client, int] = {}

    def watch(client: Client) -> None:
        """A selector takes no socket of which nothing is wanted."""
        before, wanted = watched.get(client, 0), client.interest
        if wanted == before:
            return
        if not before:
            selector.register(client.sock, wanted, client)
        elif wanted:
            selector.modify(client.sock, wanted, client)
        else:
            selector.unregister(client.sock)
        watched[client] = wanted

    def again(client: Client) -> None:
        if watched.pop(client, 0):
            selector.unregister(client.sock)
        client.sock.close()
        client.connect()
        watch(client)

    for client in everyone:
        watch(client)
    print("ready", flush=True)
    until = time.monotonic() + seconds
    ticked = 0.0
    while (now := time.monotonic()) < until:
        for key, events in selector.select(0.05):
            if key.data.step(events):
                watch(key.data)
            else:
                again(key.data)
        if now - ticked > SIP_S / 2:
            ticked = now
            for client in everyone:
                if not client.tick(now):
                    again(client)
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
