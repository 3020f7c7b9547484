"""Processes that die while somebody watches: streams outlive shards, sessions outlive any two processes.

Writers repeat what was not acknowledged with the same key, so what is in a topic is known: 0, 1, 2, ... each once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from topics import limits
from topics.storage.config import owner_of_name

from .client import LANES, Client, Lane, Lost, unique
from .server import Server, eventually, gone
from .sse import Ended, EventStream, Watching

pytestmark = [pytest.mark.e2e, pytest.mark.full]

Start = Callable[..., Server]
SHARDS = 2


def topic_on(shard: int, prefix: str = "on") -> str:
    """A new topic that this shard owns."""
    return next(name for name in iter(lambda: unique(prefix), "") if owner_of_name(name, SHARDS) == shard)


@pytest.fixture(scope="module")
def hardy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose processes are killed, each at most five times, in between tests it is whole again."""
    folder = tmp_path_factory.mktemp("hardy")
    environ = {"TOPICS_WAL_SHARDS": SHARDS, "TOPICS_RING_BYTES": 64 * 1024}  # rings that are small for what they carry
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture
def client(hardy: Server) -> Iterator[Client]:
    hardy.wait_ready()
    with hardy.client() as client:
        yield client


@pytest.fixture
def watching(hardy: Server, lane: Any) -> Iterator[Watching]:
    hardy.wait_ready()
    with Watching(hardy, lane) as watching:
        yield watching


def append(client: Client, topic: str, number: int, *, deadline_s: float = 30) -> None:
    """Once, however often it has to be said."""

    def accepted() -> bool:
        try:
            answer = client.append(topic, number, idempotency_key=f"{number}")
        except Lost:
            return False
        assert answer.status in (200, 503), answer
        return answer.status == 200

    eventually(accepted, within_s=deadline_s, what=f"an answer to {topic} {number}")


class Writer(threading.Thread):
    """Appends 0, 1, 2, ... one by one, whatever dies."""

    def __init__(self, server: Server, topic: str, count: int) -> None:
        super().__init__(daemon=True)
        self._server, self._topic, self._count = server, topic, count
        self.written = 0
        self.start()

    def run(self) -> None:
        with self._server.client() as client:
            for number in range(self._count):
                append(client, self._topic, number)
                self.written = number + 1


def reopen(
    watching: Watching, session: Any, last_id: str | None = None, *, refusals: tuple[int, ...] = (503,)
) -> EventStream:
    """As soon as it can be opened. Meanwhile it may be unavailable, but never unknown."""

    def attempt() -> EventStream | None:
        try:
            stream = watching.attempt(session, last_id)
        except (OSError, EOFError):
            return None
        if stream.status == 200:
            return stream
        assert stream.status in refusals, stream.answer()
        return None

    return eventually(attempt, every_s=0.002, what="a stream")


def made(watching: Watching, topics: Any, **options: Any) -> Any:
    """A session, or None while one of its shards is away."""
    answer = watching.create(topics, **options)
    assert answer.status in (200, 503), answer
    return answer if answer.status == 200 else None


# --- a shard dies ------------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize(("lane", "shard"), [("http1", 0), ("http2", 1)])
def test_a_stream_outlives_a_shard(hardy: Server, client: Client, watching: Watching, shard: int) -> None:
    lost, volatile, kept = topic_on(shard), topic_on(shard), topic_on(1 - shard)
    client.put(lost, durability="fsync")
    client.put(volatile, durability="ephemeral")
    client.put(kept)
    for name in (lost, volatile, kept):
        append(client, name, 0)
    stream = watching.follow([lost, volatile, kept], heartbeat_ms=1_000).wait_caught_up(lost, volatile, kept)
    dying = hardy.signal_child(f"shard-{shard}", signal.SIGSTOP)  # gone, but not missed yet
    for number in range(1, 4):
        append(client, kept, number)
        assert stream.events(1) == [("record", kept, [number + 1])]
    assert stream.frame(5).comment is not None  # heartbeats need no shard
    assert hardy.signal_child(f"shard-{shard}") == dying
    eventually(lambda: gone(dying))
    for number in range(1, 4):
        append(client, lost, number)
        append(client, kept, number + 3)
        append(client, volatile, number)
    stream.until(lambda: (len(stream.data(lost)), len(stream.data(kept)), len(stream.data(volatile))) == (4, 7, 4))
    assert stream.data(lost) == stream.data(volatile) == [0, 1, 2, 3]
    assert stream.data(kept) == list(range(7))
    assert stream.of("tombstone", lost) == stream.of("tombstone", kept) == []
    assert stream.of("topic-deleted") == stream.of("error") == []
    assert stream.seqs(volatile) == sorted(set(stream.seqs(volatile)))


def test_a_stream_may_be_opened_while_a_shard_is_away(hardy: Server, client: Client, watching: Watching) -> None:
    """Its topics come when it is back; the others come at once."""
    away, here = topic_on(1), topic_on(0)
    for name in (away, here):
        client.put(name)
        append(client, name, 0)
    session = watching.create([away, here])
    pid = hardy.signal_child("shard-1", signal.SIGSTOP)
    stream = watching.open(session)
    assert stream.events(2) == [("record", here, [1]), ("caught-up", here, 1)]
    assert hardy.signal_child("shard-1") == pid
    eventually(lambda: gone(pid))
    append(client, away, 1)
    assert stream.wait_records(away, 2) == [0, 1]
    append(client, here, 1)
    assert stream.wait_records(here, 2) == [0, 1]
    assert stream.of("tombstone") == stream.of("topic-deleted") == []


def test_a_stream_outlives_shards_that_die_under_load(start_server: Start) -> None:
    """Both, twice, while records come and while the watchers read their backlog."""
    server = start_server(TOPICS_WAL_SHARDS=SHARDS)
    topics = [topic_on(0), topic_on(1), topic_on(0), topic_on(1)]
    count = 150
    with server.client() as client, Watching(server, "http1") as one, Watching(server, "http2") as two:
        for at, topic in enumerate(topics):
            client.put(topic, durability=("disk", "disk", "fsync", "memory")[at])
        streams = [one.follow(topics, limit=10), two.follow(topics)]
        readers = [threading.Thread(target=_read_all, args=(stream, topics, count), daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        writers = [Writer(server, topic, count) for topic in topics]
        for at, shard in ((20, 0), (50, 1), (80, 0), (110, 1)):
            eventually(lambda at=at, shard=shard: min(_progress(writers[shard::2])) >= at)
            server.signal_child(f"shard-{shard}")
        late = reopen(one, eventually(lambda: made(one, topics, limit=3)))
        _read_all(late, topics, count)
        for thread in (*writers, *readers):
            thread.join(60)
        for stream in (*streams, late):
            assert {topic: stream.data(topic) for topic in topics} == {topic: list(range(count)) for topic in topics}
            assert stream.of("tombstone") == stream.of("error") == stream.of("topic-deleted") == []
    assert "Traceback" not in server.output()


def _progress(writers: list[Writer]) -> list[int]:
    return [writer.written for writer in writers]


def _read_all(stream: EventStream, topics: list[str], count: int) -> None:
    for topic in topics:
        stream.wait_records(topic, count, within_s=60)


def test_records_much_larger_than_the_rings(client: Client, watching: Watching) -> None:
    topic = topic_on(0)
    data = [letter * 700_000 for letter in "abcdefgh"]
    client.append(topic, *data[:2])
    stream = watching.follow(topic).wait_caught_up(topic)
    other = watching.follow(topic, node="nobody")
    for one in data[2:]:
        client.append(topic, one)
    assert stream.wait_records(topic, 8) == data
    assert other.wait_records(topic, 8) == data


# --- a gateway dies ----------------------------------------------------------------------------------


@pytest.mark.gate
def test_a_session_outlives_its_gateway(hardy: Server, client: Client, watching: Watching) -> None:
    """With the last id nothing is repeated, also of what the session had not been told about yet."""
    topics = [topic_on(0), topic_on(1)]
    for topic in topics:
        client.put(topic)
        append(client, topic, 0)
    with_id, without_id, unopened = (watching.create(topics) for _ in range(3))
    first, blind = watching.open(with_id).wait_caught_up(*topics), watching.open(without_id).wait_caught_up(*topics)
    for number in range(1, 30):
        for topic in topics:
            append(client, topic, number)
    for stream in (first, blind):
        stream.until(lambda stream=stream: stream.frames[-1].cursor == dict.fromkeys(topics, 30))  # type: ignore[misc]
    killed = hardy.signal_child("gateway-0")
    eventually(lambda: gone(killed))
    with pytest.raises(Ended):
        first.frame(5)
    second = reopen(watching, with_id, first.last_id).wait_caught_up(*topics)
    for topic in topics:
        append(client, topic, 30)
    third = reopen(watching, without_id)
    for topic in topics:
        assert second.wait_records(topic, 1) == [30]  # nothing of what came before
        third.until(lambda topic=topic: 31 in third.seqs(topic))  # type: ignore[misc]
        again = third.data(topic)
        assert again == list(range(again[0], 31))  # it may repeat, without an id, but not miss
    never_opened = reopen(watching, unopened)
    for topic in topics:
        assert never_opened.wait_records(topic, 31) == list(range(31))


@pytest.mark.parametrize("lane", ["http1"])
def test_an_id_counts_until_it_was_used(hardy: Server, client: Client, watching: Watching) -> None:
    """A client that left before its stream began has not used up what only its id can say after a gateway's death."""
    topic = topic_on(1)
    client.put(topic)
    session = watching.create(topic)
    first = watching.open(session).wait_caught_up(topic)
    for number in range(20):
        append(client, topic, number)
    first.wait_records(topic, 20)
    killed = hardy.signal_child("gateway-0")
    eventually(lambda: gone(killed))
    hardy.wait_ready()
    home = hardy.signal_child("shard-0", signal.SIGSTOP)
    assert first.last_id is not None
    path, headers = session["stream_url"], [("Last-Event-ID", first.last_id)]
    impatient = watching.connect()
    impatient.ping()
    with pytest.raises(TimeoutError):
        impatient.get(path, headers, within_s=0.3)
    impatient.reset()
    os.kill(home, signal.SIGCONT)
    append(client, topic, 20)
    again = reopen(watching, session, first.last_id)
    assert again.wait_records(topic, 1) == [20]


def test_gateways_that_die_under_load(start_server: Start) -> None:
    """The id of the last frame that was processed is all it takes, again and again."""
    server = start_server(TOPICS_WAL_SHARDS=SHARDS)
    topics = [topic_on(0), topic_on(1), topic_on(0)]
    count = 150
    with server.client() as client:
        for topic in topics:
            client.put(topic)
    got: dict[Lane, dict[str, list[int]]] = {lane: {topic: [] for topic in topics} for lane in LANES}
    ready: set[Lane] = set()

    def read(lane: Lane) -> None:
        with Watching(server, lane) as watching:
            session, last_id = watching.create(topics), None
            ready.add(lane)
            while min(len(numbers) for numbers in got[lane].values()) < count:
                stream = reopen(watching, session, last_id)
                try:
                    while min(len(numbers) for numbers in got[lane].values()) < count:
                        frame = stream.event()
                        last_id = frame.id
                        assert frame.event in ("record", "caught-up"), frame
                        if frame.event == "record":
                            got[lane][frame["topic"]] += [record["data"] for record in frame["records"]]
                except Ended:
                    pass

    readers = [threading.Thread(target=read, args=[lane], daemon=True) for lane in LANES]
    for reader in readers:
        reader.start()
    eventually(lambda: ready == set(LANES))
    writers = [Writer(server, topic, count) for topic in topics]
    for at in (20, 60, 100):
        eventually(lambda at=at: min(_progress(writers)) >= at)
        server.signal_child("gateway-0")
    for thread in (*writers, *readers):
        thread.join(60)
    assert got == {lane: {topic: list(range(count)) for topic in topics} for lane in LANES}
    assert "Traceback" not in server.output()


# --- the home of the sessions dies -------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize(("lane", "waiting"), [("http1", False), ("http2", False), ("http2", True)])
def test_a_session_outlives_its_home(hardy: Server, client: Client, watching: Watching, waiting: bool) -> None:
    """While no stream is open, while one is, and before any was."""
    topics = [topic_on(0), topic_on(1)]
    for topic in topics:
        client.put(topic)
        append(client, topic, 0)
    with_id, without_id, unopened, open_one = (watching.create(topics) for _ in range(4))
    streams = [watching.open(session).wait_caught_up(*topics) for session in (with_id, without_id, open_one)]
    streams[0].close()
    streams[1].close()
    killed = hardy.signal_child("shard-0")
    eventually(lambda: gone(killed))
    if waiting:
        hardy.wait_ready()
    again = [reopen(watching, with_id, streams[0].last_id), reopen(watching, without_id)]
    first = reopen(watching, unopened)
    for topic in topics:
        append(client, topic, 1)
    for topic in topics:
        for stream in again:
            assert stream.wait_records(topic, 1) == [1]
        assert streams[2].wait_records(topic, 2) == [0, 1]
        assert first.wait_records(topic, 2) == [0, 1]
    for stream in (*again, *streams, first):
        assert stream.of("tombstone") == []  # the topics are the same ones that they were
    # The one that was open all the time can be taken over like any other.
    taken = reopen(watching, open_one).wait_caught_up(*topics)
    assert [frame for frame in streams[2].rest() if frame.event == "record"] == []
    assert [taken.seqs(topic) for topic in topics] == [[], []]


@pytest.mark.parametrize("together", [True, False])
def test_a_session_outlives_its_gateway_and_its_home(start_server: Start, together: bool) -> None:
    """At the same time, or one after the other; whether it was opened or not."""
    server = start_server(TOPICS_WAL_SHARDS=SHARDS)
    with server.client() as client, Watching(server, "http1") as watching:
        topic = topic_on(1)
        client.put(topic)
        append(client, topic, 0)
        unopened, opened = watching.create([topic]), watching.create([topic])
        stream = watching.open(opened).wait_caught_up(topic)
        stream.close()
        killed = [server.signal_child("gateway-0")]
        if not together:
            eventually(lambda: gone(killed[0]))
            server.wait_ready()
        killed.append(server.signal_child("shard-0"))
        eventually(lambda: all(map(gone, killed)))
    with server.client() as client, Watching(server, "http1") as watching:
        assert reopen(watching, unopened).wait_records(topic, 1) == [0]
        again = reopen(watching, opened, stream.last_id)
        append(client, topic, 1)
        assert again.wait_records(topic, 1) == [1]


@pytest.mark.parametrize("lane", ["http1"])
def test_a_session_that_cannot_be_made_is_503(hardy: Server, watching: Watching, client: Client) -> None:
    """Until the shards of its topics are back."""
    topic = topic_on(1)
    client.put(topic)
    killed = hardy.signal_child("shard-1")
    eventually(lambda: gone(killed))
    session = eventually(lambda: made(watching, topic), every_s=0.001)
    assert watching.open(session).events(1) == [("caught-up", topic, 0)]


# --- stopping ----------------------------------------------------------------------------------------


class Stop:
    """A server that is stopped under its watchers, and its next life."""

    def __init__(self, server: Server, again: Callable[[], Server]) -> None:
        self.streams: dict[str, EventStream] = {}
        self.topic = topic_on(0)
        with server.client() as client, Watching(server, "http1") as one, Watching(server, "http2") as two:
            client.put(self.topic)
            append(client, self.topic, 0)
            session = one.create(self.topic)
            self.streams["http1"] = one.open(session).wait_caught_up(self.topic)
            self.streams["http2"] = two.follow(self.topic).wait_caught_up(self.topic)
            one.follow(self.topic, receive_buffer=4_096).wait_caught_up(self.topic)  # does not read any more
            append(client, self.topic, 1)
            for at in range(40):
                client.append(self.topic, *["x" * 50_000] * 10, idempotency_key=f"large {at}")
            for stream in self.streams.values():
                stream.until(lambda stream=stream: 402 in stream.seqs(self.topic))  # type: ignore[misc]
            started = time.monotonic()
            self.exit_code = server.stop()
            self.took_s = time.monotonic() - started
            for stream in self.streams.values():
                stream.rest()
        self.log = server.output()
        next_life = again()
        with next_life.client() as client, Watching(next_life) as watching:
            self.refusal = watching.attempt(session).answer().refusal
            append(client, self.topic, 2)
            self.after = watching.follow(self.topic, cursor=self.streams["http1"].last_id).wait_caught_up(self.topic)
            self.from_the_start = watching.follow({self.topic: {}}).wait_caught_up(self.topic)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stop]:
    folder = tmp_path_factory.mktemp("stopped")
    servers: list[Server] = []

    def start() -> Server:
        servers.append(Server(folder / "data", log=folder / f"{len(servers)}.log", TOPICS_WAL_SHARDS=SHARDS))
        servers[-1].wait_ready()
        return servers[-1]

    try:
        yield Stop(start(), start)
    finally:
        for server in servers:
            server.close()


def test_a_stop_ends_streams_with_a_word(stopped: Stop, lane: str) -> None:
    last = stopped.streams[lane].frames[-1]
    assert (last.event, last["code"], last.id) == ("error", 503, None)
    assert len(stopped.streams[lane].of("error")) == 1


def test_a_stop_is_clean_and_waits_for_nobody(stopped: Stop) -> None:
    assert stopped.exit_code == 0
    assert stopped.took_s < limits.SLOW_CONSUMER_TIMEOUT_MS / 1_000
    assert "Traceback" not in stopped.log


def test_sessions_end_with_the_server(stopped: Stop) -> None:
    assert stopped.refusal == (404, "not_found")


def test_an_id_outlives_the_server(stopped: Stop) -> None:
    assert stopped.after.data(stopped.topic) == [2]
    assert stopped.after.of("tombstone") == []
    assert len(stopped.from_the_start.seqs(stopped.topic)) == 403
