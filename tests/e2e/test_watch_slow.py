"""Clients that stop reading: nobody else notices, nothing durable is lost, and in the end they are shown the door.

Lagging is shown on a server with the usual patience; the end of the patience on one that has little.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from topics import limits

from .client import LANES, Client, unique
from .server import Server, eventually
from .sse import EventStream, Frame, Http1Source, Http2Source, Watching

pytestmark = [pytest.mark.e2e, pytest.mark.full]

PATIENCE_MS = 2_000
RECORD = "x" * 10_000
RECORDS = 800  # 8 MB: more than the kernel takes for a client with a small window, and than the backlog may hold
SMALL_BUFFER = 4_096


def number_of(record: dict[str, Any]) -> int:
    return int(record["data"].partition(" ")[0])


def write(client: Client, topic: str, *, first: int = 0, count: int = RECORDS, batch: int = 20) -> list[float]:
    """Numbered records in batches; how long each batch took."""
    spent = []
    for at in range(first, first + count, batch):
        started = time.monotonic()
        assert client.append(topic, *[f"{number} {RECORD}" for number in range(at, at + batch)]).error is None
        spent.append(time.monotonic() - started)
    return spent


def stalled(watching: Watching, topic: str, **options: object) -> EventStream:
    """A stream that was live and is not read any more."""
    return watching.follow(topic, receive_buffer=SMALL_BUFFER, **options).wait_caught_up(topic)


def covered(frames: list[Frame], topic: str) -> list[int]:
    """Every seq that was delivered or reported as lost, in order."""
    seqs: list[int] = []
    for frame in frames:
        if frame.event == "record" and frame["topic"] == topic:
            seqs += frame.seqs
        elif frame.event == "tombstone" and frame["topic"] == topic:
            seqs += range(frame["gap_from"], frame["gap_to"] + 1)
    return seqs


class Reader(threading.Thread):
    """Reads a stream as fast as it comes, until it has so many records."""

    def __init__(self, stream: EventStream, topic: str, count: int) -> None:
        super().__init__(daemon=True)
        self._stream, self._topic, self._count = stream, topic, count
        self.numbers: list[int] = []
        self.start()

    def run(self) -> None:
        self._stream.wait_records(self._topic, self._count)
        self.numbers = [number_of(record) for record in self._stream.records(self._topic)]


@pytest.fixture
def watching(server: Server, lane: Any) -> Iterator[Watching]:
    with Watching(server, lane) as watching:
        yield watching


# --- lagging -----------------------------------------------------------------------------------------


@pytest.mark.gate
def test_a_stalled_client_delays_nobody_and_lags_without_loss(
    watching: Watching, api: Client, api1: Client, topic: str
) -> None:
    other = f"{topic}.other"
    api.put(topic)
    api.put(other)
    behind = stalled(watching, topic)
    elsewhere = stalled(watching, topic, limit=10)
    brisk = Reader(watching.follow(topic).wait_caught_up(topic), topic, RECORDS)
    spent = write(api1, topic)
    brisk.join(limits.SLOW_CONSUMER_TIMEOUT_MS / 1_000)  # before the others are given up
    assert brisk.numbers == list(range(RECORDS))
    assert statistics.median(spent) < 2
    fresh = watching.follow(other).wait_caught_up(other)  # and streams that are opened meanwhile are as quick as ever
    spent = []
    for seq in range(1, 11):
        started = time.monotonic()
        api.append(other, seq)
        assert fresh.events(1) == [("record", other, [seq])]
        spent.append(time.monotonic() - started)
    assert statistics.median(spent) < 1
    for stream in (behind, elsewhere):
        stream.wait_records(topic, RECORDS)
        assert [number_of(record) for record in stream.records(topic)] == list(range(RECORDS))
        assert stream.of("tombstone") == []
        # It had fallen behind, so it is told when that is over; and is live again then.
        stream.until(lambda stream=stream: stream.caught_up[topic] == RECORDS)  # type: ignore[misc]
    api.append(topic, f"{RECORDS} live")
    for stream in (behind, elsewhere):
        assert stream.events(1) == [("record", topic, [RECORDS + 1])]


def test_what_a_lagging_client_loses_to_a_cap_is_told(
    watching: Watching, api: Client, api1: Client, topic: str
) -> None:
    api.put(topic, cap_records=10)
    stream = stalled(watching, topic, limit=10)
    write(api1, topic, batch=5)  # never more at once than the cap keeps: a client that reads loses nothing
    stream.until(lambda: stream.frames[-1].event == "caught-up" and stream.caught_up[topic] == RECORDS)
    assert covered(stream.frames, topic) == list(range(1, RECORDS + 1))
    assert {frame["reason"] for frame in stream.of("tombstone")} == {"from_seq_too_old"}
    assert len(stream.seqs(topic)) < RECORDS / 2


def test_a_stalled_topic_does_not_hold_up_the_others_for_long(
    watching: Watching, api: Client, api1: Client, topic: str
) -> None:
    """Of the same stream: when it is read again, all topics come."""
    other = f"{topic}.other"
    api.put(topic)
    api.put(other)
    stream = watching.follow([topic, other], receive_buffer=SMALL_BUFFER).wait_caught_up(topic, other)
    write(api1, topic, count=400)
    for number in range(50):
        api.append(other, number)
    stream.wait_records(other, 50)
    stream.wait_records(topic, 400)
    assert stream.data(other) == list(range(50))
    assert [number_of(record) for record in stream.records(topic)] == list(range(400))


def test_the_backlog_of_a_client_is_bounded(server: Server, watching: Watching, api: Client, api1: Client) -> None:
    """Many who stall over what is different for each of them cost the gateway next to nothing."""
    topics = [unique("stall") for _ in range(8)]
    for topic in topics:
        api.put(topic)
    for topic in topics:
        stalled(watching, topic)
    before = _rss_bytes(server)
    for topic in topics:
        write(api1, topic, count=600, batch=50)
    assert _rss_bytes(server) - before < 24_000_000  # of 48 MB


@pytest.mark.parametrize("how", ["closed", "vanished"])
def test_a_client_may_go_while_it_is_behind(
    server: Server, watching: Watching, api1: Client, topic: str, how: str
) -> None:
    api1.put(topic)
    watching.client.get("/v0/health")
    sockets, logged = server.sockets_of("gateway-0"), len(server.output())
    leave = EventStream.close if how == "closed" else EventStream.reset
    for _ in range(2):
        stream = stalled(watching, topic)
        write(api1, topic, count=300, batch=50)
        leave(stream)
        write(api1, topic, count=10, batch=1)
    for frames in range(8):  # and while the server sends as fast as it can
        stream = watching.follow(topic, limit=10)
        stream.events(1 + frames)
        leave(stream)
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, what="the connections' end")
    assert "Traceback" not in server.output()[logged:]


def _rss_bytes(server: Server) -> int:
    return next(line.rss_bytes or 0 for line in server.ps().processes if line.name == "gateway-0")


# --- the end of the patience -------------------------------------------------------------------------


class Story:
    """Four clients of a server with little patience: two that read again when it is over, two that never do."""

    def __init__(self, server: Server) -> None:
        self.topics: dict[str, str] = {lane: unique("slow") for lane in LANES}
        self.capped: dict[str, str] = {lane: unique("capped") for lane in LANES}
        self.ended: dict[str, EventStream] = {}
        self.resumed: dict[str, EventStream] = {}
        never: dict[str, EventStream] = {}
        watching = {lane: Watching(server, lane) for lane in LANES}
        with server.client() as client:
            for lane in LANES:
                client.put(self.topics[lane], durability="fsync")
                client.put(self.capped[lane], cap_records=10)
            sessions = {lane: watching[lane].create([self.topics[lane], self.capped[lane]]) for lane in LANES}
            for lane in LANES:
                stream = watching[lane].open(sessions[lane], receive_buffer=SMALL_BUFFER)
                self.ended[lane] = stream.wait_caught_up(self.topics[lane], self.capped[lane])
                never[lane] = stalled(watching[lane], self.topics[lane])
            for lane in LANES:
                write(client, self.topics[lane])
                write(client, self.capped[lane], count=100, batch=5)
            # It is looked at once a second, and its last frame waits for five; nothing shows from outside that it was.
            time.sleep(PATIENCE_MS / 1_000 + 2.5)
            for lane in LANES:
                self.ended[lane].rest()
            for lane in LANES:
                write(client, self.topics[lane], first=RECORDS, count=20)
                stream = watching[lane].open(sessions[lane], self.ended[lane].last_id)
                self.resumed[lane] = stream.wait_caught_up(self.topics[lane], self.capped[lane])
                stream.close()
        deadline = time.monotonic() + 30
        self.left: list[str] = list(LANES)
        while self.left and time.monotonic() < deadline:
            self.left = [lane for lane in self.left if not _given_up(server, never[lane])]
            time.sleep(0.05)
        for each in watching.values():
            each.close()


def _given_up(server: Server, stream: EventStream) -> bool:
    """Whether the server has done with a stream that nobody reads, seen without reading it."""
    source = stream.source
    if isinstance(source, Http2Source):
        return source.is_over()
    assert isinstance(source, Http1Source)
    client_port = source.sock.getsockname()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *_, inode = line.split()[:10]
        if (_port(local), _port(remote)) == (server.port, client_port):
            return inode == "0"  # the kernel still tries, on nobody's behalf
    return True


def _port(address: str) -> int:
    return int(address.partition(":")[2], 16)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("impatient")
    environ = {"TOPICS_STREAM_BACKLOG_BYTES": 65_536, "TOPICS_SLOW_CONSUMER_TIMEOUT_MS": PATIENCE_MS}
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def story(impatient: Server) -> Story:
    return Story(impatient)


def test_the_last_frame_says_why(story: Story, lane: str) -> None:
    last = story.ended[lane].frames[-1]
    assert last.event == "error"
    assert last["code"] == 408
    assert last.id is None
    assert [frame.event for frame in story.ended[lane].frames].count("error") == 1


def test_it_was_behind_when_it_ended(story: Story, lane: str) -> None:
    assert 0 < len(story.ended[lane].seqs(story.topics[lane])) < RECORDS


def test_the_session_is_resumed_without_loss(story: Story, lane: str) -> None:
    topic = story.topics[lane]
    records = story.ended[lane].records(topic) + story.resumed[lane].records(topic)
    assert [number_of(record) for record in records] == list(range(RECORDS + 20))
    assert story.ended[lane].of("tombstone", topic) + story.resumed[lane].of("tombstone", topic) == []


def test_or_with_the_loss_that_a_cap_allows_told(story: Story, lane: str) -> None:
    topic = story.capped[lane]
    frames = story.ended[lane].frames + story.resumed[lane].frames
    assert covered(frames, topic) == list(range(1, 101))
    assert {frame["reason"] for frame in frames if frame.event == "tombstone"} == {"from_seq_too_old"}


def test_those_that_never_read_again_are_given_up(story: Story, lane: str) -> None:
    assert lane not in story.left


def test_clients_that_read_in_time_are_let_be(impatient: Server) -> None:
    """Again and again behind, but never for as long as the patience lasts; in all for longer than it."""
    topic = unique("breather")
    with impatient.client() as client, Watching(impatient, "http1") as one, Watching(impatient, "http2") as two:
        client.put(topic)
        streams = [stalled(one, topic), stalled(two, topic)]
        started = time.monotonic()
        written = 0
        while time.monotonic() < started + PATIENCE_MS / 1_000 * 1.5:
            write(client, topic, first=written, count=200, batch=50)
            written += 200
            time.sleep(0.3)
            for stream in streams:
                stream.wait_records(topic, written)
        for stream in streams:
            assert [number_of(record) for record in stream.records(topic)] == list(range(written))
            assert stream.of("error") == []
