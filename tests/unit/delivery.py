"""Gateways and shards in one process, joined by real rings on plain memory and stepped by hand.

A gateway is everything between its sockets and its rings: the HTTP/1 lane, calls, feeds, streams. Its sockets are
`Pipe`s, which take as many bytes as the test lets them. A shard is model.Shard with links. Both sleep as processes do:
after a round they look for work once more, and then only a bell, a socket or a finished sync wakes them. So a wake-up
that was forgotten shows as something that never arrives.
"""

from __future__ import annotations

import json
import os
import select
from base64 import urlsafe_b64decode
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from model import Shard
from parts import metrics, queues, routers
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from topics.actors import messages
from topics.actors.link import Link
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.api.types import Response
from topics.gateway.api.watch import Watches
from topics.gateway.auth import Guard
from topics.gateway.calls import Calls
from topics.gateway.http1.connection import Connection
from topics.gateway.http1.head import Heads
from topics.gateway.http1.server import HotLane
from topics.gateway.origins import Origins
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.registry import Streams
from topics.keys import Key
from topics.settings import Settings
from topics.shm import layout
from topics.shm.ring import format_link
from topics.shm.usage import Slots

RING_BYTES = 16 * 1024
SECOND = 1_000_000_000
UNLIMITED = 1 << 60
_descriptors = count(1_000_000)


class Bell:
    """Rung by peers, looked at by its owner."""

    def __init__(self) -> None:
        self.rung = False

    def ring(self) -> None:
        self.rung = True


def join(gateway_bell: Bell, shard_bell: Bell, *, ring_bytes: int = RING_BYTES) -> tuple[Link, Link]:
    """The gateway's and the shard's side of a fresh link."""
    view = memoryview(bytearray(layout.link_bytes(ring_bytes)))
    format_link(view, generation=1, ring_bytes=ring_bytes)
    gateway = Link("shard", view, side=0, generation=1, bell=shard_bell)  # type: ignore[arg-type]
    shard = Link("gateway", view, side=1, generation=1, bell=gateway_bell)  # type: ignore[arg-type]
    return gateway, shard


# --- sockets -------------------------------------------------------------------------------------------


class Pipe:
    """A socket as the lane sees it. `window` is how much more it takes; what it took is what the client has."""

    def __init__(self, *, window: int = UNLIMITED) -> None:
        self.window = window
        self.inbox = bytearray()  # from the client
        self.ended = False  # the client sends no more
        self.reset = False  # the client is gone, with bytes unread
        self.took = bytearray()  # to the client
        self.shut = False  # the server sends no more
        self.closed = False
        self._fd = next(_descriptors)

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None: ...
    def setsockopt(self, *option: Any) -> None: ...

    def shutdown(self, how: int) -> None:
        self.shut = True

    def close(self) -> None:
        self.closed = True

    @property
    def readable(self) -> bool:
        return bool(self.inbox) or self.ended or self.reset

    def send(self, data: bytes | memoryview) -> int:
        if self.reset:
            raise BrokenPipeError
        if self.window <= 0:
            raise BlockingIOError
        taken = min(self.window, len(data))
        self.took += data[:taken]
        self.window -= taken
        return taken

    def recv_into(self, view: memoryview, most: int = 0) -> int:
        if self.reset:
            raise ConnectionResetError
        if not self.inbox and not self.ended:
            raise BlockingIOError
        taken = min(len(self.inbox), most or len(view))
        view[:taken] = self.inbox[:taken]
        del self.inbox[:taken]
        return taken

    def recv(self, most: int) -> bytes:
        if self.reset:
            raise ConnectionResetError
        if not self.inbox and not self.ended:
            raise BlockingIOError
        data = bytes(self.inbox[:most])
        del self.inbox[:most]
        return data


class Interests:
    """Stands for the epoll."""

    def __init__(self) -> None:
        self.by_fd: dict[int, int] = {}

    def register(self, fd: int, events: int) -> None:
        self.by_fd[fd] = events

    modify = register

    def unregister(self, fd: int) -> None:
        del self.by_fd[fd]


# --- processes -----------------------------------------------------------------------------------------


class Gateway:
    def __init__(self, settings: Settings, *, shards: int = 1, now_ns: int = 1_000 * SECOND) -> None:
        self.settings = settings
        self.bell = Bell()
        self.stays_awake = True  # it saw work before it would have gone to sleep
        self.calls = Calls(shards=shards, timeout_ms=600_000)
        self.feeds = Feeds(self.calls, shards=shards)
        self.wall_ms = 0
        self.guard = Guard(settings.api_keys, probes=settings.probe_auth, now_ms=lambda: self.wall_ms)
        self.streams = Streams(settings=settings, calls=self.calls, feeds=self.feeds, guard=self.guard)
        self.calls.on_unasked = self.streams.unasked
        self.interests = Interests()
        handlers = Handlers(settings, shards=shards, board=None, refusal=self.guard.refusal)  # type: ignore[arg-type]
        self.watches = Watches(self.streams, shards=shards)
        places = memoryview(bytearray(8 * (1 + len(settings.api_keys)))).cast("Q")
        self.slots = Slots(places, [], settings.max_inflight_per_key)
        self.lane = HotLane(
            settings=settings,
            heads=Heads(
                Routes(handlers, self.watches, routers(shards=shards), queues(shards=shards), metrics(shards=shards)),
                max_body_bytes=settings.max_body_bytes,
                guard=self.guard,
                origins=Origins(settings),
            ),
            handlers=handlers,
            calls=self.calls,
            epoll=self.interests,  # type: ignore[arg-type]
            hand_over=lambda sock, first: None,
            slots=self.slots if settings.api_keys else None,
            budget=self.streams.budget,
        )
        self.faults: list[Exception] = []
        self.tolerant = False  # faults are kept here, not raised
        self.calls.on_fault = self._fault
        self.streams.publish = self.lane.add_plain
        self.streams.send_runs = self.lane.send_runs
        self.now_ns = self.streams.now_ns = now_ns
        self._swept_ns = now_ns

    def _fault(self, error: Exception, id: int) -> None:
        if not self.tolerant:
            raise error
        self.faults.append(error)

    def adopt(self, pipe: Pipe) -> Connection:
        self.lane.adopt(pipe)  # type: ignore[arg-type]
        return self.lane.connections[pipe.fileno()]

    def _events(self) -> list[tuple[int, int]]:
        events = []
        for fd, connection in self.lane.connections.items():
            pipe: Any = connection.sock
            interest = self.interests.by_fd[fd]
            event = select.EPOLLIN if pipe.readable and interest & select.EPOLLIN else 0
            if interest & select.EPOLLOUT and pipe.window > 0:
                event |= select.EPOLLOUT
            if pipe.reset:
                event |= select.EPOLLHUP | select.EPOLLERR  # whether they are asked for or not
            if event:
                events.append((fd, event))
        return events

    @property
    def is_awake(self) -> bool:
        return self.stays_awake or self.bell.rung or bool(self._events())

    def round(self) -> None:
        """What process.Gateway does between two waits."""
        self.bell.rung = False
        self._round()
        self.stays_awake = (
            bool(self.lane.unfinished or self.lane.dirty or self.calls.slices) or self.calls.has_answers()
        )

    def _round(self) -> None:
        lane, calls, streams = self.lane, self.calls, self.streams
        lane.begin_round()
        streams.now_ns = self.now_ns
        if self.guard.has_news():
            self.revoke()
        lane.go_on()
        for fd, event in self._events():
            lane.handle(fd, event)
        lane.send_runs()
        calls.flush()
        calls.drain()
        if lane.dirty:
            lane.send_dirty()
            lane.send_runs()
            calls.flush()
        if calls.slices:
            calls.slices.run(0)  # one slice a round
            lane.send_dirty()
            calls.flush()
        if (due := streams.next_due_ns) is not None and self.now_ns >= due:
            streams.tick(self.now_ns)
            lane.send_dirty()
        if self.now_ns - self._swept_ns >= SECOND:
            self._swept_ns = self.now_ns
            streams.sweep(self.now_ns)
            lane.send_dirty()
            calls.flush()

    def link_up(self, shard: int, link: Link) -> None:
        self.calls.link_up(shard, link)
        self.streams.link_up(shard)
        self.calls.flush()

    def link_down(self, shard: int) -> None:
        self.calls.link_down(shard)
        self.streams.link_down(shard)
        self.lane.send_dirty()

    def take_keys(self, keys: tuple[Key, ...]) -> None:
        self.guard.replace(keys)
        self.revoke()

    def revoke(self) -> None:
        self.lane.revoke(self.guard.refusal)
        self.streams.revoke()
        self.calls.answer_polls()
        self.calls.flush()
        self.lane.send_dirty()

    def stop(self) -> None:
        self.lane.handlers.draining = True
        self.streams.end_all()
        self.calls.flush()
        self.lane.send_dirty()

    def ask(self, outcome: Any) -> Sink:
        sink = Sink()
        self.calls.submit(outcome, sink)
        self.calls.flush()
        return sink


class ShardProcess:
    """model.Shard and its links."""

    def __init__(self, folder: os.PathLike[str] | str, **settings: Any) -> None:
        self.shard = Shard(folder, **settings)
        self.bell = Bell()
        self.stays_awake = True
        self.links: dict[Gateway, Link] = {}

    @property
    def engine(self) -> Any:
        return self.shard.engine

    @property
    def is_awake(self) -> bool:
        return self.stays_awake or self.bell.rung or self.shard.syncer.busy

    def round(self, *, sync: bool = True) -> None:
        """What process.Shard does between two waits."""
        self.bell.rung = False
        engine = self.engine
        engine.begin_round(0)
        for link in self.links.values():
            for message in link.drain():
                engine.handle(message, link.writer)
            for long in link.reader.long.take():
                engine.large.take(long, link.writer)
        engine.large.wait()
        engine.commit.write()
        if sync and self.shard.syncer.busy:
            engine.commit.synced(self.shard.syncer.wait())
        engine.tails.push()
        for link in self.links.values():
            link.flush()
        self.stays_awake = any(link.has_work() for link in self.links.values()) or engine.tails.can_push()


class Sink:
    """Whoever asked."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def finish(self, value: Any) -> None:
        self.values.append(value)

    def abort(self) -> None: ...

    @property
    def value(self) -> Any:
        assert len(self.values) == 1, f"a call ends exactly once, not {len(self.values)} times"
        return self.values[0]

    @property
    def json(self) -> Any:
        value = self.value
        assert isinstance(value, Response)
        return json.loads(bytes(value.body) + value.tail)


class House:
    """Some gateways and shards, all linked."""

    def __init__(
        self,
        folder: os.PathLike[str] | str,
        *,
        gateways: int = 1,
        shards: int = 1,
        ring_bytes: int = RING_BYTES,
        **settings: Any,
    ) -> None:
        settings["gateways"] = gateways
        self.settings = Settings(**settings)
        self.ring_bytes = ring_bytes
        self.now_ns = 1_000 * SECOND
        self.shards: list[ShardProcess] = []
        for number in range(shards):
            data_dir = os.path.join(folder, f"s{number}")
            os.makedirs(data_dir, exist_ok=True)
            self.shards.append(ShardProcess(data_dir, **settings))
        self.gateways: list[Gateway] = []
        for _ in range(gateways):
            self.gateways.append(self._new_gateway())

    def _new_gateway(self) -> Gateway:
        gateway = Gateway(self.settings, shards=len(self.shards), now_ns=self.now_ns)
        for number in range(len(self.shards)):
            self.connect(gateway, number)
        return gateway

    def connect(self, gateway: Gateway, number: int) -> None:
        shard = self.shards[number]
        ours, theirs = join(gateway.bell, shard.bell, ring_bytes=self.ring_bytes)
        shard.links[gateway] = theirs
        gateway.link_up(number, ours)

    # --- deaths ---

    def shard_dies(self, number: int, *, lose: bool = True) -> None:
        """Everything it knew but its files is gone; its links too."""
        shard = self.shards[number]
        shard.links.clear()
        for gateway in self.gateways:
            gateway.link_down(number)
        if lose:
            shard.shard.crash()

    def shard_returns(self, number: int) -> None:
        if not self.shards[number].shard.is_open:
            self.shards[number].shard.open()
        for gateway in self.gateways:
            self.connect(gateway, number)

    def gateway_dies(self, number: int) -> None:
        """Its connections break, its links go down; another takes its place."""
        gateway = self.gateways[number]
        for shard in self.shards:
            if (link := shard.links.pop(gateway, None)) is not None:
                shard.engine.caller_gone(link.writer)
        for connection in gateway.lane.connections.values():
            pipe: Any = connection.sock
            pipe.closed = True
        self.gateways[number] = self._new_gateway()

    # --- time ---

    def pass_time(self, ns: int) -> None:
        self.now_ns += ns
        for gateway in self.gateways:
            gateway.now_ns = self.now_ns

    def settle(self, *, most: int = 3_000) -> None:
        """Run whoever is awake until nobody is. Shards may have been asked directly: they look."""
        for shard in self.shards:
            shard.stays_awake |= shard.shard.is_open
        everyone: list[ShardProcess | Gateway] = [*self.shards, *self.gateways]
        for _ in range(most):
            awake = [process for process in everyone if process.is_awake]
            if not awake:
                return
            for process in awake:
                process.round()
        raise AssertionError("they never come to rest")

    def ask(self, outcome: Any, *, gateway: int = 0) -> Sink:
        sink = self.gateways[gateway].ask(outcome)
        self.settle()
        return sink

    def crash(self) -> None:
        for shard in self.shards:
            shard.shard.crash()


# --- clients -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    kind: str
    id: dict[str, int] | None
    data: Any
    raw_id: str = ""


@dataclass
class Answer:
    """An HTTP answer, so far."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def parse_answer(data: bytes) -> Answer | None:
    head, blank, body = data.partition(b"\r\n\r\n")
    if not blank:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(first.split(" ")[1]), {name.lower(): value for name, value in headers.items()}, body)


def decode_id(text: str) -> dict[str, int]:
    raw = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    found = json.loads(raw)
    assert json.dumps(found, separators=(",", ":")).encode() == raw, "an id is compact JSON"
    assert "=" not in text
    return found  # type: ignore[no-any-return]


def parse_event(block: bytes) -> Event | None:
    """One SSE frame; None for comments and retry."""
    ident: str | None = None
    kind = ""
    data: list[str] = []
    names: list[str] = []
    for line in block.decode().split("\n"):
        name, _, value = line.partition(": ")
        names.append(name)
        if name == "id":
            ident = value
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        else:
            assert line.startswith((": hb ", "retry: ")), f"not a line of an event: {line!r}"
            assert len(block.split(b"\n")) == 1
            return None
    assert names[: 3 if ident is not None else 2] == (
        ["id", "event", "data"] if ident is not None else ["event", "data"]
    )
    return Event(kind, None if ident is None else decode_id(ident), json.loads("\n".join(data)), ident or "")


@dataclass
class SseClient:
    """Parses what its pipe took, as it comes."""

    pipe: Pipe
    connection: Connection
    answer: Answer | None = None
    events: list[Event] = field(default_factory=list)
    heartbeats: int = 0
    _seen: int = 0

    def read(self) -> list[Event]:
        """The events that are complete since the last call."""
        if self.answer is None:
            self.answer = parse_answer(bytes(self.pipe.took))
            if self.answer is None:
                return []
            self._seen = self.pipe.took.index(b"\r\n\r\n") + 4
        if not self.streaming:
            self.answer = parse_answer(bytes(self.pipe.took))
            return []
        fresh: list[Event] = []
        while (end := self.pipe.took.find(b"\n\n", self._seen)) >= 0:
            block = bytes(self.pipe.took[self._seen : end])
            self._seen = end + 2
            event = parse_event(block)
            if event is not None:
                fresh.append(event)
            elif block.startswith(b": hb"):
                self.heartbeats += 1
        self.events += fresh
        return fresh

    @property
    def streaming(self) -> bool:
        return self.answer is not None and self.answer.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def stream(self) -> Any:
        return self.connection.stream

    def kinds(self) -> list[str]:
        self.read()
        return [event.kind for event in self.events]

    def seqs(self, topic: str | None = None) -> list[int]:
        self.read()
        return [
            record["$seq"]
            for event in self.events
            if event.kind == "record" and topic in (None, event.data["topic"])
            for record in event.data["records"]
        ]

    def close(self) -> None:
        """The client goes; the gateway sees it in its next round."""
        self.pipe.ended = True

    @property
    def over(self) -> bool:
        return self.pipe.closed or self.pipe.shut


def watch_request(body: dict[str, Any], *, lenient: bool = False) -> bytes:
    encoded = json.dumps(body).encode()
    target = "/v0/watch?lenient=true" if lenient else "/v0/watch"
    return (
        f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(encoded)}\r\n\r\n"
    ).encode() + encoded


def send(gateway: Gateway, request: bytes, *, window: int = UNLIMITED) -> SseClient:
    """A request on a connection of its own; it is read in the gateway's next round."""
    pipe = Pipe(window=window)
    pipe.inbox += request
    return SseClient(pipe, gateway.adopt(pipe))


def open_request(wid: str, *, last_id: str | None = None) -> bytes:
    more = "" if last_id is None else f"Last-Event-ID: {last_id}\r\n"
    return f"GET /v0/watch/{wid} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n{more}\r\n".encode()


def create(house: House, body: dict[str, Any], *, gateway: int = 0, lenient: bool = False) -> str:
    """A watch session's wid."""
    client = send(house.gateways[gateway], watch_request(body, lenient=lenient))
    house.settle()
    client.read()
    assert client.answer is not None
    assert client.answer.status == 200, client.answer.body
    wid = client.answer.json["wid"]
    client.close()
    house.settle()
    return str(wid)


def watch(
    house: House, wid: str, *, gateway: int = 0, last_id: str | None = None, window: int = UNLIMITED
) -> SseClient:
    client = send(house.gateways[gateway], open_request(wid, last_id=last_id), window=window)
    house.settle()
    client.read()
    return client


def append_message(topic: str, records: list[Any], correlation: int, **more: Any) -> bytes:
    from model import batch_of

    body, size = batch_of(records)
    return messages.pack(messages.Op.APPEND, correlation, messages.Append(topic, len(records), size, **more), body)


UPGRADE = (
    b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class WsClient:
    """A WebSocket client: the frames of the `websockets` package over a pipe."""

    def __init__(
        self, gateway: Gateway, *, window: int = UNLIMITED, first: bytes = b"", upgrade: bytes = UPGRADE
    ) -> None:
        self.pipe = Pipe(window=window)
        self.pipe.inbox += upgrade + first
        self.connection = gateway.adopt(self.pipe)
        self.protocol = Protocol(CLIENT, state=OPEN, max_size=None)
        self.answer: Answer | None = None
        self.close_code: int | None = None
        self.pings = 0
        self._seen = 0

    def send(self, *commands: Any) -> None:
        """Commands, or texts of such; all in one go."""
        for command in commands:
            text = command if isinstance(command, str | bytes) else json.dumps(command)
            self.protocol.send_text(text.encode() if isinstance(text, str) else text)
        self.pass_on()

    def pass_on(self) -> None:
        for data in self.protocol.data_to_send():
            self.pipe.inbox += data

    def read(self) -> list[Any]:
        """The messages that came since the last call."""
        if self.answer is None:
            self.answer = parse_answer(bytes(self.pipe.took))
            if self.answer is None:
                return []
            self._seen = self.pipe.took.index(b"\r\n\r\n") + 4
        if self.answer.status != 101:
            return []
        fresh = bytes(self.pipe.took[self._seen :])
        self._seen += len(fresh)
        self.protocol.receive_data(fresh)
        found = []
        for event in self.protocol.events_received():
            assert isinstance(event, Frame)
            assert event.fin
            if event.opcode is Opcode.TEXT:
                found.append(json.loads(bytes(event.data)))
            elif event.opcode is Opcode.PING:
                self.pings += 1
            else:
                assert event.opcode in (Opcode.CLOSE, Opcode.PONG)
        if self.protocol.close_rcvd is not None:
            self.close_code = self.protocol.close_rcvd.code
        return found

    @property
    def socket(self) -> Any:
        return self.connection.stream

    @property
    def over(self) -> bool:
        return self.pipe.closed or self.pipe.shut

    @property
    def is_read_from(self) -> bool:
        return not self.connection.paused
