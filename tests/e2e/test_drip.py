"""Slow clients by the thousand: they get what their patience allows and no more, and nobody else pays for them.

- A child process besieges the server: well over a thousand connections at a time, each slow in its own way, and each
  that the server closes is replaced until the siege is lifted. It uses one epoll and no threads, and keeps a note of
  how each connection ended and after how long.
- Meanwhile this process asks on fresh connections, as it did before the siege: same code, same server, so the two can
  be compared.
- At the end nothing may be left: no descriptor, no memory to speak of, no process that had to be started again.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import resource
import select
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .bystanders import Flooder, bystanders
from .client import LANES, Client, Lane, unique
from .server import Server, eventually
from .sse import Watching
from .wire import Wire, append_request, request

pytestmark = [pytest.mark.e2e, pytest.mark.full]

HEAD_S, BODY_S, IDLE_S, RATE = 2.0, 3.0, 6.0, 1_000
LATE_S = 10.0  # the server looks once a second, and is busy
ENVIRON = {
    "TOPICS_HEAD_TIMEOUT_MS": int(HEAD_S * 1_000),
    "TOPICS_BODY_TIMEOUT_MS": int(BODY_S * 1_000),
    "TOPICS_IDLE_TIMEOUT_MS": int(IDLE_S * 1_000),
    "TOPICS_MIN_BODY_RATE": RATE,
    "TOPICS_ELASTIC": 0,  # under pressure requests may be refused, which is another story
}
MIB = 1024 * 1024
BULKY = "bulky"  # a topic whose diff has a MiB
BULKY_DIFF = request("POST", f"/v0/topics/{BULKY}/diff", b'{"limit":1000}')
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
# POST /v0/topics/drips over HTTP/2, as literals that need no table, and without an end of the stream
HEAD2_BLOCK = b"\x83\x86\x04\x10/v0/topics/drips\x01\x01t\x0f\x10\x10application/json"
HEAD2 = b"\x00\x00%c\x01\x04\x00\x00\x00\x01" % len(HEAD2_BLOCK) + HEAD2_BLOCK
DATA2 = b"\x00\x00\x0a\x00\x00\x00\x00\x00\x01" + b"x" * 10


class Kind(NamedTuple):
    """A way to be slow."""

    clients: int  # at a time
    first: bytes  # what is sent at once
    drop: bytes  # and again and again
    reads: bool
    patience_s: float  # how long the server is expected to bear it
    answer: bytes  # what it says begins with this


LARGE_ANSWERS = 6  # of a MiB each: more than the kernel takes for a client that does not read
EVERY_S = 0.5  # between two drops
LENGTH = "Content-Length: 100000"
KINDS: dict[str, Kind] = {
    "silent": Kind(400, b"", b"", True, IDLE_S, b""),
    "heads": Kind(400, b"GET /v0/health HTTP/1.1\r\nX-A: ", b"a", True, HEAD_S, b"HTTP/1.1 408 "),
    "header lines": Kind(100, b"GET /v0/health HTTP/1.1\r\n", b"X-A: a\r\n", True, HEAD_S, b"HTTP/1.1 408 "),
    "bodies": Kind(
        300, request("POST", "/v0/topics/drips", headers=(LENGTH,)), b"x" * 10, True, BODY_S, b"HTTP/1.1 408 "
    ),
    "chunks": Kind(
        100,
        request("POST", "/v0/topics/drips", headers=("Transfer-Encoding: chunked",)),
        b"1\r\nx\r\n",
        True,
        BODY_S,
        b"HTTP/1.1 408 ",
    ),
    "large bodies": Kind(
        50,
        request("POST", "/v0/topics/drips", headers=("Content-Length: 10000000",)) + b"x" * 2_000,
        b"x" * 10,
        True,
        BODY_S,
        b"HTTP/1.1 408 ",
    ),
    "small answers": Kind(200, request(), b"", False, IDLE_S, b"HTTP/1.1 200 "),
    "large answers": Kind(20, BULKY_DIFF * LARGE_ANSWERS, b"", False, BODY_S, b"HTTP/1.1 200 "),
    "silent, HTTP/2": Kind(100, PREFACE, b"", True, IDLE_S, b""),
    "bodies, HTTP/2": Kind(50, PREFACE + HEAD2, DATA2, True, BODY_S, b""),
}
BESIEGERS = sum(kind.clients for kind in KINDS.values())
THERE = BESIEGERS * 0.6  # at least so many at a time: some are just being replaced


class Ending(NamedTuple):
    kind: str
    lived_s: float
    said: bytes  # the beginning of what the server said
    by_server: bool


# --- the siege ---------------------------------------------------------------------------------------


class Dripper:
    """One slow connection."""

    def __init__(self, port: int, name: str) -> None:
        self.name, self.kind = name, KINDS[name]
        self.sock = socket.socket()
        self.sock.setblocking(False)
        if not self.kind.reads:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        self.sock.connect_ex(("127.0.0.1", port))
        self.fd = self.sock.fileno()
        self.connected_at = 0.0
        self.accepted = False  # if it has been looked at
        self.said = b""

    @property
    def interest(self) -> int:
        """Of one that does not read only the end is noticed."""
        return (select.EPOLLIN if self.kind.reads else 0) | select.EPOLLRDHUP


def is_answered2(said: bytes) -> bool:
    """Whether there is an answer for stream 1 among the frames; the connection may live on."""
    at = 0
    while at + 9 <= len(said):
        if said[at + 3] == 1 and said[at + 5 : at + 9] == b"\0\0\0\1":
            return True
        at += 9 + int.from_bytes(said[at : at + 3])
    return False


def held_by(port: int) -> set[int]:
    """The ports of clients whose connection the server has accepted and not closed."""
    held = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *_, inode = line.split()[:10]
        if inode != "0" and int(local.partition(":")[2], 16) == port:
            held.add(int(remote.partition(":")[2], 16))
    return held


class Siege:
    """All of them, in a process of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._epoll = select.epoll()
        self._drippers: dict[int, Dripper] = {}
        self._due: deque[tuple[float, Dripper]] = deque()
        self._look_at = 0.0
        self._lifted = False
        self.endings: list[Ending] = []
        self.failures = 0

    def open(self, name: str) -> None:
        dripper = Dripper(self._port, name)
        self._drippers[dripper.fd] = dripper
        self._epoll.register(dripper.fd, select.EPOLLOUT)

    def run(self, parent: Connection) -> None:
        for name, kind in KINDS.items():
            for _ in range(kind.clients):
                self.open(name)
                self.step(0)
        self._until(lambda: all(dripper.connected_at for dripper in self._drippers.values()), BODY_S * 5)
        parent.send(self.held())
        while not parent.poll():
            self.step(0.02)
        parent.recv()
        parent.send(self.held())
        self._lifted = True  # whoever is there stays until the server has had enough
        self._until(lambda: not self._drippers, IDLE_S + LATE_S)
        for dripper in list(self._drippers.values()):
            self._end(dripper, by_server=False)
        parent.send((self.endings, self.failures))

    def held(self) -> int:
        return sum(bool(dripper.connected_at) for dripper in self._drippers.values())

    def _until(self, done: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not done() and time.monotonic() < deadline:
            self.step(0.02)

    def step(self, wait_s: float) -> None:
        for fd, event in self._epoll.poll(wait_s):
            dripper = self._drippers[fd]
            try:
                self._handle(dripper, event)
            except OSError:
                self._end(dripper, by_server=True)
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, dripper = self._due.popleft()
            if self._drippers.get(dripper.fd) is dripper:
                self._drip(dripper, now)
        if now > self._look_at:
            self._look_at = now + EVERY_S
            self._look_for_orphans()

    def _look_for_orphans(self) -> None:
        """Whoever reads nothing is not told that it was closed: the farewell is behind what it has not read. But where
        the server's end belongs to nobody any more, only the kernel still tries."""
        held = held_by(self._port)
        for dripper in list(self._drippers.values()):
            if dripper.kind.reads or not dripper.connected_at:
                continue
            if dripper.sock.getsockname()[1] in held:
                dripper.accepted = True
            elif dripper.accepted:
                self._end(dripper, by_server=True)

    def _handle(self, dripper: Dripper, event: int) -> None:
        if not dripper.connected_at:
            if dripper.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.failures += 1
                self._end(dripper, by_server=False)
                return
            dripper.connected_at = time.monotonic()
            self._epoll.modify(dripper.fd, dripper.interest)
            if dripper.kind.first:
                dripper.sock.send(dripper.kind.first)
            if dripper.kind.drop:
                self._due.append((dripper.connected_at + EVERY_S, dripper))
            return
        if event & select.EPOLLIN and dripper.kind.reads:
            data = dripper.sock.recv(1 << 16)
            dripper.said += data
            if not data or (dripper.kind.first.startswith(PREFACE) and is_answered2(dripper.said)):
                self._end(dripper, by_server=True)
        elif event & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            self._end(dripper, by_server=True)

    def _drip(self, dripper: Dripper, now: float) -> None:
        try:
            dripper.sock.send(dripper.kind.drop)
        except OSError:
            return  # its end is noticed, with what the server said before
        self._due.append((now + EVERY_S, dripper))

    def _end(self, dripper: Dripper, *, by_server: bool) -> None:
        del self._drippers[dripper.fd]
        if not dripper.kind.reads:
            dripper.said = self._unread(dripper)
        lived_s = time.monotonic() - dripper.connected_at if dripper.connected_at else 0.0
        self.endings.append(Ending(dripper.name, lived_s, dripper.said[:500], by_server))
        dripper.sock.close()
        if not self._lifted:
            self.open(dripper.name)

    @staticmethod
    def _unread(dripper: Dripper) -> bytes:
        """The beginning of what it could have read."""
        try:
            return dripper.sock.recv(500)
        except OSError:
            return b""


def besiege(port: int, parent: Connection) -> None:
    """The child's whole life."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    Siege(port).run(parent)


# --- the others --------------------------------------------------------------------------------------


class Latency(NamedTuple):
    median_s: float
    p99_s: float


def latency(server: Server, lane: Lane) -> list[Latency]:
    """Of appends on fresh connections, their opening included; in rounds, because the machine has other work too."""
    topic = unique("others")
    rounds = []
    for _ in range(ROUNDS):
        spent: list[float] = []
        until = time.monotonic() + ROUND_S
        while len(spent) < SAMPLES[lane] and (time.monotonic() < until or len(spent) < 10):
            started = time.perf_counter()
            if lane == "http1":
                with Wire(server.port) as wire:
                    assert wire.ask(append_request(topic)).status in (200, 201)
            else:
                with Client(server.port, "http2") as client:
                    assert client.append(topic, 1).status in (200, 201)
            spent.append(time.perf_counter() - started)
            time.sleep(0.003)
        rounds.append(Latency(statistics.median(spent), sorted(spent)[int((len(spent) - 1) * 0.99)]))
    return rounds


def best(rounds: list[Latency]) -> Latency:
    return Latency(min(each.median_s for each in rounds), min(each.p99_s for each in rounds))


def worst(rounds: list[Latency]) -> Latency:
    return Latency(max(each.median_s for each in rounds), max(each.p99_s for each in rounds))


ROUNDS, ROUND_S = 3, 3.0
SAMPLES: dict[Lane, int] = {"http1": 200, "http2": 100}


def rss_bytes(server: Server) -> int:
    return next(line.rss_bytes or 0 for line in server.ps().processes if line.name == "gateway-0")


class Story:
    """Before, during and after; told once, looked at by all tests."""

    def __init__(self, server: Server) -> None:
        topic = unique("watched")
        with server.client() as client, Watching(server) as watching:
            client.put(topic)
            stream = watching.follow(topic).wait_caught_up(topic)
            client.close()
            self.before = {lane: latency(server, lane) for lane in LANES}
            self.rss_before = rss_bytes(server)
            self.sockets_before = server.sockets_of("gateway-0")
            self.pids_before = server.pids()
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            child = context.Process(target=besiege, args=(server.port, theirs), daemon=True)
            child.start()
            try:
                self.held = [self._hear(ours, 40)]
                self.sockets_during = self._wait_accepted(server)
                self.during = {lane: latency(server, lane) for lane in LANES}
                self.watcher_s = []
                for number in range(1, 6):
                    started = time.monotonic()
                    client.append(topic, number)
                    stream.wait_records(topic, number)
                    self.watcher_s.append(time.monotonic() - started)
                client.close()
                self.rss_during = rss_bytes(server)
                ours.send("that is all")
                self.held.append(self._hear(ours, 10))
                self.endings, self.failures = self._hear(ours, IDLE_S + LATE_S + 10)
                child.join(10)
            finally:
                child.kill()
            # What the kernel tries on nobody's behalf is not the gateway's.
            self.left = self._wait_left(server)
            self.after = {lane: latency(server, lane) for lane in LANES}
            self.rss_after = rss_bytes(server)
            self.pids_after = server.pids()
            client.append(topic, 6)
            self.watched = stream.wait_records(topic, 6)

    @staticmethod
    def _hear(ours: Connection, within_s: float) -> Any:
        assert ours.poll(within_s), "the besiegers are silent"
        return ours.recv()

    def _wait_accepted(self, server: Server) -> int:
        """They are connected as soon as the kernel says so; a gateway on a busy machine accepts them later."""
        deadline = time.monotonic() + LATE_S
        while (there := server.sockets_of("gateway-0")) - self.sockets_before <= THERE and time.monotonic() < deadline:
            time.sleep(0.1)
        return there

    def _wait_left(self, server: Server) -> int:
        deadline = time.monotonic() + LATE_S
        while (left := server.sockets_of("gateway-0") - self.sockets_before) > 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def of(self, name: str) -> list[Ending]:
        return [ending for ending in self.endings if ending.kind == name]


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("besieged")
    server = Server(folder / "data", log=folder / "server.log", **ENVIRON)
    try:
        server.wait_ready()
        with server.client() as client:
            for _ in range(11):
                assert client.append(BULKY, *["x" * 10_000] * 10).error is None
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def story(besieged: Server) -> Story:
    return Story(besieged)


def test_they_were_all_there_at_once(story: Story) -> None:
    assert BESIEGERS > 1_500
    assert story.failures == 0
    assert story.held[0] == BESIEGERS
    assert story.sockets_during - story.sockets_before > THERE


def test_the_siege_lasted(story: Story) -> None:
    """As long as they were measured against, they came back."""
    assert story.held[1] > BESIEGERS * 0.4  # some are just being replaced
    assert len(story.endings) > BESIEGERS


@pytest.mark.parametrize("lane", LANES)
def test_others_keep_their_latency(story: Story, lane: Lane) -> None:
    """Within a generous factor: the machine has to serve the besiegers too, and they run on it. What they do to the
    gateway they would do in every round."""
    before, during = worst(story.before[lane]), best(story.during[lane])
    assert during.median_s < 5 * before.median_s + 0.01
    assert during.p99_s < 5 * before.p99_s + 1.5


@pytest.mark.parametrize("lane", LANES)
def test_and_have_it_back_afterwards(story: Story, lane: Lane) -> None:
    before, after = worst(story.before[lane]), best(story.after[lane])
    assert after.median_s < 2 * before.median_s + 0.01
    assert after.p99_s < 3 * before.p99_s + 0.5


def test_a_watcher_notices_nothing(story: Story) -> None:
    assert statistics.median(story.watcher_s) < 1
    assert story.watched == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", KINDS)
def test_each_is_closed_in_time(story: Story, name: str) -> None:
    kind, endings = KINDS[name], story.of(name)
    assert len(endings) >= kind.clients
    lived = [ending.lived_s for ending in endings]
    assert all(ending.by_server for ending in endings), "some were let be"
    assert min(lived) > kind.patience_s / 2  # a busy machine starts our clock after the server's
    assert max(lived) < kind.patience_s + LATE_S


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.answer])
def test_each_is_answered(story: Story, name: str) -> None:
    said = [ending.said for ending in story.of(name)]
    assert [each for each in said if not each.startswith(KINDS[name].answer)] == []


def test_those_of_http2_too(story: Story) -> None:
    assert all(is_answered2(ending.said) for ending in story.of("bodies, HTTP/2"))


def test_nothing_of_them_is_left(story: Story, besieged: Server) -> None:
    assert story.left <= 0
    assert story.pids_after == story.pids_before
    with besieged.client() as client:
        assert client.state("drips").status == 404


def test_the_gateway_did_not_grow_for_good(story: Story) -> None:
    """While they are there, each costs little; what they asked for and don't take is the most of it. Of that the
    allocator keeps a part for the next ones."""
    unread = KINDS["large answers"].clients * LARGE_ANSWERS * MIB
    assert story.rss_during - story.rss_before < unread + BESIEGERS * 40_000
    assert story.rss_after - story.rss_before < unread / 2


def _wave(server: Server) -> int:
    """Clients that ask for much and read nothing, until all are dropped; the memory of the gateway then."""
    socks = [socket.socket() for _ in range(KINDS["large answers"].clients)]
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(BULKY_DIFF * LARGE_ANSWERS)
    ours = {sock.getsockname()[1] for sock in socks}
    waiting = set(ours)

    def all_accepted() -> bool:
        waiting.difference_update(held_by(server.port))
        return not waiting

    eventually(all_accepted, what="that all are accepted")
    eventually(lambda: not ours & held_by(server.port), within_s=BODY_S + LATE_S, what="that all are dropped")
    for sock in socks:
        sock.close()
    return rss_bytes(server)


def test_the_next_wave_costs_nothing_more(story: Story, besieged: Server) -> None:
    first = _wave(besieged)
    assert _wave(besieged) - first < 32 * MIB


def test_whoever_asks_far_ahead_and_reads_nothing_is_nobodys_burden(besieged: Server) -> None:
    """As many requests as may be on the way, on a few connections: neither time nor memory of the others."""
    ahead, connections = 128, 5
    with Wire(besieged.port) as wire:
        wire.ask(append_request(unique("others")))
        before = rss_bytes(besieged)
        socks = [socket.create_connection(("127.0.0.1", besieged.port)) for _ in range(connections)]
        worst_s, most = 0.0, before
        try:
            for sock in socks:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                sock.sendall(BULKY_DIFF * ahead)
            deadline = time.monotonic() + BODY_S
            while time.monotonic() < deadline:
                started = time.monotonic()
                assert wire.ask(append_request("others")).status in (200, 201)
                worst_s = max(worst_s, time.monotonic() - started)
                most = max(most, rss_bytes(besieged))
                time.sleep(0.01)
        finally:
            for sock in socks:
                sock.close()
    assert worst_s < 2
    assert most - before < connections * 32 * MIB


# --- those who are not slow at all -------------------------------------------------------------------

CHUNKED = request("POST", "/v0/topics/drips", headers=("Content-Type: application/json", "Transfer-Encoding: chunked"))


def tiny_chunks() -> tuple[bytes, bytes]:
    """What is sent first, and what is sent for ever."""
    return CHUNKED, b"1\r\n \r\n" * 20_000


def empty_lines() -> tuple[bytes, bytes]:
    return b"", b"\r\n" * 50_000


def bodies_that_swell() -> tuple[bytes, bytes]:
    """Each is a thousand times as large when it is unpacked, and nothing then; still within the limit."""
    body = gzip.compress(b" " * 20_000_000)
    headers = ("Content-Type: application/json", "Content-Encoding: gzip", f"Content-Length: {len(body)}")
    return b"", request("POST", "/v0/topics/drips", headers=headers) + body


@pytest.mark.parametrize("flood", [tiny_chunks, empty_lines, bodies_that_swell])
def test_busy_clients_stop_nobody(besieged: Server, flood: Callable[[], tuple[bytes, bytes]]) -> None:
    """A few connections that make as much work as they can with as few bytes as they can."""
    first, raw = flood()
    gateway = besieged.pid_of("gateway-0")
    with bystanders(besieged, within_s=6):
        socks = [socket.create_connection(("127.0.0.1", besieged.port)) for _ in range(4)]
        for sock in socks:
            sock.sendall(first)
        for flooder in [Flooder(sock, raw, 2.5) for sock in socks]:
            flooder.wait()
    assert besieged.pid_of("gateway-0") == gateway


# --- when there are no descriptors left --------------------------------------------------------------


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_out_of_descriptors_the_gateway_serves_those_it_has(tmp_path: Path) -> None:
    """It neither spins nor fills its log over connections that it can't take, says how it is to those who ask for no
    more than that, and takes others again when it can."""
    server = Server(tmp_path / "data", log=tmp_path / "server.log", TOPICS_WAL_SHARDS=1)
    wires: list[Wire] = []
    try:
        server.wait_ready()
        pid = server.pid_of("gateway-0")
        with server.client() as client:
            assert client.append("served", 1).status == 201
            highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 20, hard))
            for _ in range(100):
                wires.append(Wire(server.port))
            eventually(lambda: server.sockets_of("gateway-0") >= 10, what="as many as there is room for")
            cpu, log, started = _cpu_s(pid), len(server.output().splitlines()), time.monotonic()
            while time.monotonic() < started + 2:
                assert client.append("served", 1).status == 200
                time.sleep(0.05)
            assert _cpu_s(pid) - cpu < 1
            assert len(server.output().splitlines()) - log < 50
            for path in ("/v0/health", "/v0/ready", "/v0/metrics"):
                with Wire(server.port) as wire:
                    assert wire.ask(request("GET", path, headers=("Accept: application/json",))).status == 200
            with Wire(server.port) as wire:
                refused = wire.ask(append_request("served"))
                assert (refused.status, refused.headers["connection"]) == (429, "close")
            for wire in wires:
                wire.close()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 200, hard))

            def served() -> bool:
                with Wire(server.port) as wire:
                    return wire.ask(append_request("served")).status == 200

            eventually(served, what="a place")
        assert server.pid_of("gateway-0") == pid
    finally:
        for wire in wires:
            wire.close()
        server.close()
