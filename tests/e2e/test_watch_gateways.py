"""Several gateways: a session belongs to all of them, a stream to one at a time, and limits are those of the server.

Which gateway a connection comes to is chance; where it matters the others are held still while it is made.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from topics.actors.inspect.attach import open_board
from topics.actors.startup.datadir_lock import read_lock_info
from topics.shm.counters import Word

from .client import LANES, Answer, unique
from .h2wire import H2Wire
from .server import Server, eventually, gone
from .sse import EventStream, Http1Source, Http2Source, Watching, create

pytestmark = pytest.mark.e2e

GATEWAYS = ("gateway-0", "gateway-1", "gateway-2")
MOST = 3
TTL_MS = 2_000


def _serve(factory: pytest.TempPathFactory, name: str, **environ: object) -> Iterator[Server]:
    folder = factory.mktemp(name)
    server = Server(folder / "data", log=folder / "server.log", TOPICS_GATEWAYS=len(GATEWAYS), **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three gateways, three streams at a time."""
    yield from _serve(tmp_path_factory, "narrow", TOPICS_MAX_SSE_CONNECTIONS=MOST)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three gateways, three sessions at a time, soon forgotten."""
    environ = {"TOPICS_MAX_WATCH_SESSIONS": MOST, "TOPICS_SESSION_TTL_MS": TTL_MS}
    yield from _serve(tmp_path_factory, "crowded", **environ)


@pytest.fixture
def watching(narrow: Server, lane: Any) -> Iterator[Watching]:
    """With all its streams gone at the end, and seen to be gone."""
    narrow.wait_ready()
    with Watching(narrow, lane) as watching:
        yield watching


@pytest.fixture(autouse=True)
def _all_places_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test leaves open gives its place back before the next one begins."""
    yield
    if "narrow" not in request.fixturenames:
        return
    narrow: Server = request.getfixturevalue("narrow")
    with Watching(narrow) as watching:
        watching.client.put("places")
        sessions = [watching.create("places") for _ in range(MOST)]
        for session in sessions:
            eventually(lambda session=session: watching.attempt(session).status == 200)


@contextmanager
def alone(server: Server, name: str) -> Iterator[None]:
    """Only this gateway accepts connections: the others stand still for a moment."""
    paused = [server.signal_child(other, signal.SIGSTOP) for other in GATEWAYS if other != name]
    try:
        for pid in paused:
            eventually(lambda pid=pid: _stands_still(pid))
        yield
    finally:
        for pid in paused:
            os.kill(pid, signal.SIGCONT)


def _stands_still(pid: int) -> bool:
    """A signal that was sent need not have arrived."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def connect(server: Server, watching: Watching, name: str) -> Http1Source | Http2Source:
    """A connection to this gateway."""
    with alone(server, name):
        source = watching.connect()
        source.ping()
    return source


# --- a session belongs to all ------------------------------------------------------------------------


def test_a_session_made_by_one_is_opened_by_any(narrow: Server, watching: Watching, topic: str) -> None:
    """And goes on behind what another one delivered."""
    watching.client.put(topic)
    session = made_by(narrow, "gateway-2", topic)
    seq = 0
    for name in (*GATEWAYS, *reversed(GATEWAYS)):
        seq += 1
        watching.client.append(topic, seq)
        stream = watching.open(session, on=connect(narrow, watching, name))
        assert stream.events(2) == [("record", topic, [seq]), ("caught-up", topic, seq)]
        seq += 1
        watching.client.append(topic, seq)
        assert stream.events(1) == [("record", topic, [seq])]
        stream.close()


def test_a_stream_is_taken_over_from_another_gateway(narrow: Server, watching: Watching, topic: str) -> None:
    watching.client.append(topic, 1)
    session = watching.create(topic)
    before = watching.open(session, on=connect(narrow, watching, "gateway-0")).wait_caught_up(topic)
    for name in ("gateway-1", "gateway-2", "gateway-0", "gateway-0"):
        source = connect(narrow, watching, name)
        stream = watching.open(session, on=source)
        assert stream.events(1) == [("caught-up", topic, before.caught_up[topic])]
        assert [frame for frame in before.rest() if frame.event != "error"] == []
        before = stream
    watching.client.append(topic, 2)
    assert before.events(1) == [("record", topic, [2])]


def test_taken_over_and_over_nothing_is_lost_or_repeated(narrow: Server, watching: Watching, topic: str) -> None:
    """Whichever gateways the connections come to, under a writer that does not wait."""
    watching.client.put(topic)
    session = watching.create(topic)
    count = 300

    def write() -> None:
        with narrow.client() as client:
            for number in range(count):
                client.append(topic, number)

    writer = threading.Thread(target=write)
    writer.start()
    streams: list[EventStream] = []
    while writer.is_alive():
        streams.append(watching.open(session))
        streams[-1].frame()
    streams.append(watching.open(session))
    streams[-1].until(lambda: streams[-1].caught_up.get(topic) == count)
    for stream in streams[:-1]:
        stream.rest()
    assert [number for stream in streams for number in stream.data(topic)] == list(range(count))


def test_a_session_outlives_one_of_several_gateways(narrow: Server, watching: Watching, topic: str) -> None:
    watching.client.append(topic, 1, 2)
    session = watching.create(topic)
    first = watching.open(session, on=connect(narrow, watching, "gateway-1")).wait_caught_up(topic)
    killed = narrow.signal_child("gateway-1")
    eventually(lambda: gone(killed))
    with narrow.client() as client:
        client.append(topic, 3)

    def again() -> EventStream | None:
        stream = watching.attempt(session, first.last_id)
        return stream if stream.status == 200 else None

    second = eventually(again, what="a stream")
    assert second.events(2) == [("record", topic, [3]), ("caught-up", topic, 3)]


@pytest.mark.full
def test_a_session_outlives_its_home_whoever_is_late(narrow: Server, watching: Watching, topic: str) -> None:
    """The gateway that served a session comes to the new home only after another one was asked for it. Until then it
    may be unavailable, but neither unknown nor back where it was when it was made."""
    watching.client.append(topic, *range(5))
    sockets = narrow.sockets_of("gateway-1")
    sessions = [made_by(narrow, name, topic) for name in ("gateway-0", "gateway-1")]
    last_ids = []
    for session in sessions:
        stream = watching.open(session, on=connect(narrow, watching, "gateway-1")).wait_caught_up(topic)
        stream.close()
        last_ids.append(stream.last_id)
    eventually(lambda: narrow.sockets_of("gateway-1") <= sockets)
    sources = [connect(narrow, watching, "gateway-0") for _ in sessions]
    late = narrow.signal_child("gateway-1", signal.SIGSTOP)
    killed = narrow.signal_child("shard-0")
    opened: list[EventStream | None] = [None for _ in sessions]

    def open_all() -> bool:
        for at, session in enumerate(sessions):
            if opened[at] is None:
                stream = watching.attempt(session, last_ids[at], on=sources[at])
                if stream.status == 200:
                    opened[at] = stream
                else:
                    assert stream.answer().refusal == (503, "shard_unavailable")
        return all(opened)

    try:
        eventually(
            lambda: (
                {line.name: (line.pid != killed, line.state) for line in narrow.ps().processes}["shard-0"]
                == (True, "ready")
            )
        )
        until = time.monotonic() + 0.3
        while time.monotonic() < until and not open_all():
            time.sleep(0.01)
    finally:
        os.kill(late, signal.SIGCONT)
    eventually(open_all, what="the streams")
    watching.client.append(topic, "after")
    for reopened in opened:
        assert reopened is not None
        assert reopened.wait_records(topic, 1) == ["after"]  # nothing of what came before


def made_by(server: Server, name: str, topic: str) -> Answer:
    """A session that this gateway has made."""
    with alone(server, name), server.client() as client:
        return create(client, topic)


# --- the limit of streams ----------------------------------------------------------------------------


def together(jobs: list[Callable[..., Any]]) -> list[Any]:
    """All of them at the same time; what they return."""
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(at: int) -> None:
        barrier.wait()
        results[at] = jobs[at]()

    threads = [threading.Thread(target=run, args=[at]) for at in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def open_together(watching: Watching, sessions: list[Answer]) -> tuple[list[EventStream], list[Answer]]:
    """Those that opened, and the refusals of the others."""
    streams = together([lambda session=session: watching.attempt(session) for session in sessions])
    opened = [stream for stream in streams if stream.status == 200]
    return opened, [stream.answer() for stream in streams if stream.status != 200]


def sessions_of(watching: Watching, count: int) -> list[Answer]:
    topic = unique("limit")
    watching.client.append(topic, 1)
    return [watching.create(topic) for _ in range(count)]


@pytest.mark.parametrize("how", ["closed", "vanished"])
def test_the_limit_of_streams_is_exact_and_places_come_back(narrow: Server, watching: Watching, how: str) -> None:
    sessions = sessions_of(watching, 12)
    for _ in range(3):
        opened, refused = open_together(watching, sessions)
        assert len(opened) == MOST
        for answer in refused:
            assert answer.refusal == (429, "throttled")
            assert (answer.detail["limit"], answer.detail["max"]) == ("max_sse_connections", MOST)
        for stream in opened:
            assert stream.event().event in ("record", "caught-up")
            if how == "closed":
                stream.close()
            else:
                stream.reset()
        # All places come back, and no more than there were.
        last = [eventually(lambda at=at: _opened(watching, sessions[at])) for at in range(MOST)]
        assert watching.attempt(sessions[MOST]).answer().refusal == (429, "throttled")
        for stream in last:
            stream.close()
        eventually(lambda: _opened(watching, sessions[MOST])).close()
        _wait_until_all_free(narrow, watching, sessions[:MOST])


def _opened(watching: Watching, session: Answer) -> EventStream | None:
    stream = watching.attempt(session)
    return stream if stream.status == 200 else None


def _wait_until_all_free(server: Server, watching: Watching, sessions: list[Answer]) -> None:
    """By taking all places at a time, and giving them back. The next who ask at the same time shall not meet these on
    their way out."""
    streams = [eventually(lambda session=session: _opened(watching, session)) for session in sessions]
    _close(server, streams)


def _close(server: Server, streams: list[EventStream]) -> None:
    """Until the home of the sessions has counted them out. What it shows may be old, so that it has counted them in
    comes first."""
    eventually(lambda: _counted(server) == len(streams), what="the streams counted")
    for stream in streams:
        stream.close()
    eventually(lambda: _counted(server) == 0, what="the streams' end counted")


def _counted(server: Server) -> int:
    board = open_board(read_lock_info(str(server.data_dir)))
    try:
        return board.row("shard-0")[Word.STREAMS]
    finally:
        board.close()


def test_what_is_refused_takes_no_place(watching: Watching) -> None:
    session = sessions_of(watching, 1)[0]
    for _ in range(MOST + 1):
        assert watching.attempt("wid_AAAAAAAAAAAAAAAAAAAAAA").status == 404
        for malformed in ("wid_x", "%00", "%ff"):
            assert watching.attempt(malformed).status == 404
        assert watching.get(session["stream_url"], ("Accept", "image/png")).status == 406
    opened, _ = open_together(watching, sessions_of(watching, MOST))
    assert len(opened) == MOST


def test_taking_over_needs_no_place_of_its_own(narrow: Server, watching: Watching) -> None:
    sessions = sessions_of(watching, MOST + 1)
    streams = [watching.open(session) for session in sessions[:MOST]]
    for name in GATEWAYS:
        again = watching.open(sessions[0], on=connect(narrow, watching, name))
        streams[0].rest()
        streams[0] = again
    assert watching.attempt(sessions[MOST]).status == 429


def test_the_places_of_a_dead_gateway_come_back(narrow: Server, watching: Watching) -> None:
    sessions = sessions_of(watching, MOST + 1)
    watching.open(sessions[0], on=connect(narrow, watching, "gateway-2"))
    watching.open(sessions[1], on=connect(narrow, watching, "gateway-2"))
    kept = watching.open(sessions[2], on=connect(narrow, watching, "gateway-0"))
    assert watching.attempt(sessions[3]).status == 429
    killed = narrow.signal_child("gateway-2")
    eventually(lambda: gone(killed))
    watching.client.close()
    fresh = [eventually(lambda at=at: _opened(watching, sessions[at])) for at in (3, 0)]
    assert watching.attempt(sessions[1]).answer().refusal == (429, "throttled")
    for stream in (kept, *fresh):
        assert stream.event().event in ("record", "caught-up")


@pytest.mark.full
def test_the_count_outlives_the_one_who_counts(narrow: Server, watching: Watching) -> None:
    """When the home of the sessions dies, what is open stays open and stays counted; what closes meanwhile does not."""
    sessions = sessions_of(watching, MOST + 2)
    streams = [
        watching.open(session, on=connect(narrow, watching, name)).wait_caught_up(*session["topics"])
        for session, name in zip(sessions, GATEWAYS, strict=False)
    ]
    killed = narrow.signal_child("shard-0")
    eventually(lambda: gone(killed))
    streams.pop().close()
    fresh = eventually(lambda: _opened(watching, sessions[MOST]), every_s=0.002)
    narrow.wait_ready()
    assert watching.attempt(sessions[MOST + 1]).answer().refusal == (429, "throttled")
    topic = next(iter(sessions[0]["topics"]))
    watching.client.append(topic, 2)
    for stream in (*streams, fresh):
        stream.until(lambda stream=stream: 2 in stream.seqs(topic))  # type: ignore[misc]


def test_a_cancelled_stream_of_a_connection_gives_its_place_back(narrow: Server, topic: str) -> None:
    """Over HTTP/2 the connection goes on."""
    with Watching(narrow, "http2") as watching, H2Wire(narrow.port) as wire:
        sessions = sessions_of(watching, MOST + 1)
        streams = [watching.open(session, on=Http2Source(wire, owns=False)) for session in sessions[:MOST]]
        assert watching.attempt(sessions[MOST]).status == 429
        streams[0].close()
        assert eventually(lambda: _opened(watching, sessions[MOST]))
        assert watching.attempt(sessions[0]).status == 429
        assert streams[1].event().event == "record"


# --- the limit of sessions ---------------------------------------------------------------------------


@pytest.mark.full
def test_the_limit_of_sessions_is_exact_and_places_come_back(crowded: Server, topic: str) -> None:
    crowd = [Watching(crowded, lane) for lane in LANES for _ in range(6)]
    for one in crowd:
        one.client.get("/v0/health")  # connected, to whichever
    first = crowd[0]
    first.client.append(topic, 1)
    time.sleep(TTL_MS / 1_000 + 0.2)  # whoever was here before has been forgotten
    answers = together([lambda one=one: one.create(topic) for one in crowd])
    made = [answer for answer in answers if answer.status == 200]
    assert len(made) == MOST
    for answer in answers:
        if answer.status != 200:
            assert answer.refusal == (429, "throttled")
            assert (answer.detail["limit"], answer.detail["max"]) == ("max_watch_sessions", MOST)
    # Open streams keep their sessions, wherever they are; the third one is forgotten.
    streams = [crowd[at].open(session).wait_caught_up(topic) for at, session in enumerate(made[:2])]
    eventually(lambda: _made(first, topic))
    assert first.create(topic).refusal == (429, "throttled")
    assert first.attempt(made[2]).answer().refusal == (404, "not_found")
    eventually(lambda: _made(first, topic))  # the one that came in its place has gone the same way
    first.client.append(topic, 2)
    for stream in streams:
        assert stream.events(1) == [("record", topic, [2])]
    _close(crowded, streams)
    time.sleep(TTL_MS / 1_000 + 0.2)
    assert [answer.status for answer in (first.create(topic) for _ in range(MOST + 1))] == [200] * MOST + [429]
    for one in crowd:
        one.close()


def _made(watching: Watching, topic: str) -> Answer | None:
    answer = watching.create(topic)
    return answer if answer.status == 200 else None


def test_both_lanes_count_together(narrow: Server) -> None:
    with Watching(narrow, "http1") as one, Watching(narrow, "http2") as two:
        sessions = sessions_of(one, MOST + 1)
        both = [one, two]
        streams = [both[at % 2].open(session) for at, session in enumerate(sessions[:MOST])]
        for lane, watching in zip(LANES, both, strict=True):
            assert watching.attempt(sessions[MOST]).status == 429, lane
        streams[0].close()
        assert eventually(lambda: _opened(two, sessions[MOST]))
