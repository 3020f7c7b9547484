"""Streams that end and begin again: who remembers what, what an id is worth, and that nothing is lost or repeated."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from .client import Client, unique
from .server import Server, eventually
from .sse import Ended, EventStream, Watching, create, encode_cursor

pytestmark = pytest.mark.e2e

TTL_MS = 2_000


@pytest.fixture
def watching(server: Server, lane: Any) -> Iterator[Watching]:
    with Watching(server, lane) as watching:
        yield watching


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Forgets idle sessions soon, and has room for two, so that a free place shows that one was forgotten."""
    folder = tmp_path_factory.mktemp("forgetful")
    environ = {"TOPICS_SESSION_TTL_MS": TTL_MS, "TOPICS_MAX_WATCH_SESSIONS": 2, "TOPICS_MAX_WATCH_TOPICS": 2}
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


# --- without an id -----------------------------------------------------------------------------------


def test_a_stream_goes_on_after_what_was_delivered(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2, 3)
    session = watching.create(topic)
    first = watching.open(session)
    assert first.events(2) == [("record", topic, [1, 2, 3]), ("caught-up", topic, 3)]
    first.close()
    api.append(topic, 4)
    second = watching.open(session)
    assert second.events(2) == [("record", topic, [4]), ("caught-up", topic, 4)]
    api.append(topic, 5)
    assert second.events(1) == [("record", topic, [5])]
    second.reset()
    third = watching.open(session)
    assert third.events(1) == [("caught-up", topic, 5)]


def test_a_session_that_was_never_opened_begins_where_it_was_asked_to(
    watching: Watching, api: Client, topic: str
) -> None:
    other = f"{topic}.tail"
    for name in (topic, other):
        api.append(name, 1, 2, 3)
    session = watching.create({topic: {"from_seq": 1}, other: {"tail": True}})
    for name in (topic, other):
        api.append(name, 4)
    stream = watching.open(session).wait_caught_up(topic, other)
    assert (stream.seqs(topic), stream.seqs(other)) == ([2, 3, 4], [4])


def test_two_sessions_do_not_share_their_place(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    one, two = watching.create(topic), watching.create(topic)
    watching.open(one).wait_caught_up(topic).close()
    assert watching.open(two).events(1) == [("record", topic, [1, 2])]
    assert watching.open(one).events(1) == [("caught-up", topic, 2)]


def test_the_options_stay_those_of_the_session(watching: Watching, api: Client, topic: str) -> None:
    api.append_records(topic, [{"data": n, "tag": "t", "node": "me" if n == 2 else "you"} for n in range(1, 5)])
    session = watching.create(topic, limit=2, include_tags=True, include_data=False, node=["me"])
    for _ in range(2):
        stream = watching.open(session, encode_cursor({topic: 0})).wait_caught_up(topic)
        assert stream.seqs(topic) == [1, 3, 4]
        assert max(len(frame["records"]) for frame in stream.of("record")) <= 2
        assert all(record.keys() == {"$seq", "$ts", "$tag", "$node"} for record in stream.records(topic))
        stream.close()


# --- with an id --------------------------------------------------------------------------------------


def test_an_id_rewinds(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, *range(1, 7))
    session = watching.create(topic, limit=2)
    first = watching.open(session).wait_caught_up(topic)
    ids = {frame.seqs[-1]: frame.id for frame in first.of("record")}
    first.close()
    for at in (4, 2):
        stream = watching.open(session, ids[at]).wait_caught_up(topic)
        assert stream.seqs(topic) == list(range(at + 1, 7))
        stream.close()
    assert watching.open(session).events(1) == [("caught-up", topic, 6)]


def test_a_rewound_session_goes_on_from_there(watching: Watching, api: Client, topic: str) -> None:
    """The place of a session is where it was last rewound to and delivered from, not the furthest it ever was."""
    api.append(topic, *range(1, 5))
    session = watching.create(topic, limit=1)
    watching.open(session).wait_caught_up(topic).close()
    stream = watching.open(session, encode_cursor({topic: 1}))
    assert stream.events(1) == [("record", topic, [2])]


def test_an_id_never_advances(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2, 3)
    session = watching.create(topic)
    stream = watching.open(session, encode_cursor({topic: 3}))
    assert stream.events(2) == [("record", topic, [1, 2, 3]), ("caught-up", topic, 3)]
    stream.close()
    api.append(topic, 4)
    assert watching.open(session, encode_cursor({topic: 2**64 - 1})).events(1) == [("record", topic, [4])]


def test_an_id_rewinds_each_topic_by_itself(watching: Watching, api: Client, topic: str) -> None:
    names = [f"{topic}.{n}" for n in range(4)]
    for name in names:
        api.append(name, 1, 2, 3)
    session = watching.create(names)
    watching.open(session).wait_caught_up(*names).close()
    # Rewound, rewound to the beginning, "advanced", not named.
    stream = watching.open(session, encode_cursor({names[0]: 2, names[1]: 0, names[2]: 9})).wait_caught_up(*names)
    assert [stream.seqs(name) for name in names] == [[3], [1, 2, 3], [], []]


def test_every_id_is_a_place_to_go_on_from(watching: Watching, api: Client, topic: str) -> None:
    """Also those of tombstones and caught-up frames."""
    capped, plain = f"{topic}.capped", f"{topic}.plain"
    api.put(capped, cap_records=4)
    api.append(capped, *range(1, 11))
    api.append(plain, *range(1, 6))
    session = watching.create([capped, plain], limit=2)
    whole = watching.open(session).wait_caught_up(capped, plain)
    whole.close()
    assert len(whole.frames) >= 8
    for at, frame in enumerate(whole.frames):
        stream = watching.open(session, frame.id).wait_caught_up(capped, plain)
        for name in (capped, plain):
            seen_before = [seq for earlier in whole.frames[: at + 1] for seq in _seqs(earlier, name)]
            assert seen_before + stream.seqs(name) == whole.seqs(name), frame
        tombstones = [earlier for earlier in whole.frames[: at + 1] if earlier.event == "tombstone"]
        assert len(tombstones) + len(stream.of("tombstone")) == 1, frame
        stream.close()


def _seqs(frame: Any, topic: str) -> list[int]:
    return frame.seqs if frame.event == "record" and frame["topic"] == topic else []


def test_an_id_in_the_middle_of_a_large_backlog(watching: Watching, api: Client, topic: str) -> None:
    """The client knows better than the server what has arrived: whatever is under way, its next one is the next."""
    for _ in range(15):
        api.append(topic, *["x" * 10_000] * 20)
    for count, how in enumerate(["close", "reset", "leave"] * 8, start=1):
        session = watching.create(topic, limit=(1, 3, 7)[count % 4 % 3])
        first = watching.open(session)
        first.events(count)
        if how != "leave":  # otherwise it is taken over
            getattr(first, how)()
        second = watching.open(session, first.last_id)
        assert second.event().seqs[0] == first.seqs(topic)[-1] + 1, (count, how)
        second.close()


def test_an_id_of_one_session_is_a_cursor_for_another(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, *range(1, 6))
    first = watching.follow(topic, limit=2)
    assert first.events(1) == [("record", topic, [1, 2])]
    session = watching.create(topic, cursor=first.last_id)
    assert session["topics"][topic]["from_seq"] == 2
    stream = watching.open(session).wait_caught_up(topic)
    assert stream.seqs(topic) == [3, 4, 5]


def test_the_id_of_256_topics_can_be_presented(server: Server, api1: Client, topic: str) -> None:
    names = [f"{topic}.{'name' * 10}.{n}" for n in range(256)]
    for name in names:
        api1.append(name, 1, 2)
    with Watching(server) as watching:
        session = watching.create(names, limit=1)
        first = watching.open(session)
        first.events(300)
        first.close()
        for again in (watching.open(session, first.last_id), watching.follow(names, cursor=first.last_id)):
            again.wait_caught_up(*names)
            for name in names:
                assert first.seqs(name) + again.seqs(name) == [1, 2], name
            again.close()


# --- taking over -------------------------------------------------------------------------------------


def test_a_second_stream_takes_over(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    session = watching.create(topic)
    first = watching.open(session).wait_caught_up(topic)
    second = watching.open(session)
    assert second.events(1) == [("caught-up", topic, 2)]
    assert [frame.event for frame in first.rest() if frame.event != "error"] == []
    api.append(topic, 3)
    assert second.events(1) == [("record", topic, [3])]


def test_the_one_that_was_taken_over_no_longer_moves_the_place(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    session = watching.create(topic)
    first = watching.open(session).wait_caught_up(topic)
    second = watching.open(session, encode_cursor({topic: 0}))
    assert second.events(2) == [("record", topic, [1, 2]), ("caught-up", topic, 2)]
    first.rest()
    second.close()
    api.append(topic, 3)
    assert watching.open(session).events(2) == [("record", topic, [3]), ("caught-up", topic, 3)]


def test_a_chain_of_streams_delivers_everything_once(watching: Watching, api: Client, topic: str) -> None:
    """Each takes over from the one before while records come; what one did not deliver, the next one does."""
    api.put(topic)
    session = watching.create(topic)
    written = threading.Event()

    def write() -> None:
        with api.twin() as own:
            for number in range(300):
                own.append(topic, number)
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    streams: list[EventStream] = []
    while not written.is_set():
        streams.append(watching.open(session))
        streams[-1].frame()
    streams.append(watching.open(session))
    streams[-1].until(lambda: streams[-1].caught_up.get(topic) == 300)
    thread.join()
    for stream in streams[:-1]:
        stream.rest()
    assert [number for stream in streams for number in stream.data(topic)] == list(range(300))
    assert len(streams) > 3


def test_opened_many_times_at_once_one_is_left(server: Server, watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1)
    session = watching.create(topic)
    opened: list[EventStream] = []

    def open_one() -> None:
        opened.append(watching.open(session))

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 8
    alive: list[EventStream] = []
    api.append(topic, 2)
    for stream in opened:
        try:
            stream.until(lambda stream=stream: 2 in stream.seqs(topic))  # type: ignore[misc]
            alive.append(stream)
        except Ended:
            pass
    api.append(topic, 3)
    got = sorted(seq for stream in opened for seq in stream.seqs(topic))
    assert got == [1, 2]  # nobody got it twice
    assert len(alive) == 1
    alive[0].until(lambda: 3 in alive[0].seqs(topic))


# --- sessions are forgotten --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("lane", ["http1", "http2"])
def test_an_idle_session_is_forgotten(forgetful: Server, topic: str, lane: Any) -> None:
    with Watching(forgetful, lane) as watching:
        watching.client.append(topic, 1)
        session = _when_there_is_room(watching, topic)
        assert session["session_ttl_ms"] == TTL_MS
        started = time.monotonic()
        _when_there_is_room(watching, topic)
        _when_there_is_room(watching, topic)  # a third place comes only when one was forgotten
        assert time.monotonic() - started > TTL_MS / 2_000
        assert watching.attempt(session).answer().refusal == (404, "not_found")


@pytest.mark.full
@pytest.mark.parametrize("lane", ["http2"])
def test_an_open_stream_keeps_its_session(forgetful: Server, topic: str, lane: Any) -> None:
    """However long; and its end gives it a whole TTL again."""
    with Watching(forgetful, lane) as watching:
        watching.client.append(topic, 1)
        session = _when_there_is_room(watching, topic)
        stream = watching.open(session).wait_caught_up(topic)
        for _ in range(3):  # each waits for an idle one to be forgotten
            _when_there_is_room(watching, topic)
        watching.client.append(topic, 2)
        assert stream.events(1) == [("record", topic, [2])]
        stream.close()
        watching.client.append(topic, 3)
        again = watching.open(session)
        assert again.events(1) == [("record", topic, [3])]
        again.close()
        _when_there_is_room(watching, topic)
        _when_there_is_room(watching, topic)
        assert watching.attempt(session).answer().refusal == (404, "not_found")


def _when_there_is_room(watching: Watching, topic: str) -> Any:
    """A new session, as soon as there are fewer than two. Asking touches none of the others."""

    def ask() -> Any:
        answer = watching.create(topic)
        if answer.status == 200:
            return answer
        assert answer.refusal == (429, "throttled")
        assert (answer.detail["limit"], answer.detail["max"]) == ("max_watch_sessions", 2)
        return None

    return eventually(ask, what="room for a session")


def test_the_number_of_topics_follows_its_variable(forgetful: Server, topic: str) -> None:
    with forgetful.client() as client:
        names = [f"{topic}.{n}" for n in range(3)]
        for name in names:
            client.append(name, 1)
        assert create(client, names).refusal == (400, "invalid_request")
        assert eventually(lambda: create(client, names[:2]).status == 200)


# --- the id as the only state ------------------------------------------------------------------------

WRITTEN = 300


class Writers:
    """One per topic, in classes that differ; what they write is 0, 1, 2, ..."""

    def __init__(self, api: Client, topics: list[str]) -> None:
        self._threads = []
        for at, topic in enumerate(topics):
            api.put(topic, durability=("memory", "disk", "fsync", "ephemeral")[at % 4])
            self._threads.append(threading.Thread(target=self._write, args=(api, topic, at)))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    @staticmethod
    def _write(api: Client, topic: str, at: int) -> None:
        chance = random.Random(at)
        written = 0
        with api.twin() as own:
            while written < WRITTEN:
                size = min(chance.choice((1, 1, 1, 2, 10, 40)), WRITTEN - written)
                own.append(topic, *range(written, written + size))
                written += size


@pytest.mark.parametrize("how", ["new session", "same session"])
@pytest.mark.parametrize("seed", [1, 2])
def test_reconnects_at_random_lose_and_repeat_nothing(watching: Watching, api: Client, how: str, seed: int) -> None:
    """A client that keeps nothing but the id of the last frame it has processed, under writers that do not wait."""
    topics = [unique("resume") for _ in range(5)]
    writers = Writers(api, topics)
    chance = random.Random(seed)
    limit = chance.choice((3, 17, 256))
    processed: dict[str, list[int]] = {topic: [] for topic in topics}
    session = watching.create(topics, limit=limit)
    last_id: str | None = None
    connections = 0
    writers.start()
    deadline = time.monotonic() + 40
    while any(len(numbers) < WRITTEN for numbers in processed.values()):
        assert time.monotonic() < deadline, {topic: len(numbers) for topic, numbers in processed.items()}
        if how == "new session":
            resumed: dict[str, Any] = {} if last_id is None else {"cursor": last_id}
            session = watching.create(topics, limit=limit, **resumed)
            stream = watching.open(session)
        else:
            stream = watching.open(session, last_id)
        connections += 1
        for _ in range(chance.choice((1, 2, 5, 30, 100))):
            frame = stream.event()
            assert frame.event in ("record", "caught-up")
            last_id = frame.id
            if frame.event == "record":
                processed[frame["topic"]] += [record["data"] for record in frame["records"]]
            if all(len(numbers) >= WRITTEN for numbers in processed.values()):
                break
        chance.choice((stream.close, stream.reset, lambda: None))()  # the last one is taken over, or left alone
    writers.join()
    for numbers in processed.values():
        assert numbers == list(range(WRITTEN)), [
            (before, after) for before, after in pairwise(numbers) if after != before + 1
        ]
    assert connections > 3


def test_reconnects_without_an_id_repeat_nothing_and_keep_the_order(
    watching: Watching, api: Client, topic: str
) -> None:
    """The server goes on behind what it has flushed; whoever reads all of that misses nothing."""
    api.put(topic)
    session = watching.create(topic)
    got: list[int] = []
    for first in range(0, 200, 20):
        stream = watching.open(session)
        stream.wait_caught_up(topic)
        for number in range(first, first + 20):
            api.append(topic, number)
        stream.wait_records(topic, 20)
        got += stream.data(topic)
        stream.close()
    assert got == list(range(200))
