"""Streams and keys: a session is its key's, places are counted per key, a socket's commands are judged one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from .client import Answer, Lane, unique
from .h2ws import H2Sockets
from .keyed import (
    ENTRIES,
    FULL,
    INSIDER,
    KEYS,
    OTHER,
    OUTSIDER,
    READER,
    WRITER,
    Keyed,
    KeyedWatching,
    KeyedWorking,
    Secret,
    bearer,
)
from .queues import together
from .server import Server, eventually, gone
from .sockets import Conversation, Socket, handshake
from .sse import EventStream, Http1Source, Http2Source
from .wire import Wire

pytestmark = pytest.mark.e2e

GATEWAYS = ("gateway-0", "gateway-1")
MOST = 3
TOPIC = "in:watched"
Open = Callable[[str | None], Conversation]


@contextmanager
def _serving(folder: Path, **environ: object) -> Iterator[Server]:
    given = {"TOPICS_API_KEYS": ENTRIES, "TOPICS_GATEWAYS": len(GATEWAYS), **environ}
    server = Server(folder / "data", log=folder / "server.log", **given)
    try:
        server.wait_ready()
        with Keyed(server.port, "http1", FULL) as api:
            for name in (TOPIC, "out:there"):
                assert api.put(name).status == 201
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two gateways, and a key of every kind."""
    with _serving(tmp_path_factory.mktemp("guarded")) as server:
        yield server


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two gateways, three streams at a time for each key."""
    with _serving(tmp_path_factory.mktemp("narrow"), TOPICS_MAX_SSE_CONNECTIONS_PER_KEY=MOST) as server:
        yield server


@pytest.fixture
def hardy(tmp_path: Path) -> Iterator[Server]:
    """Its processes may be killed."""
    with _serving(tmp_path, TOPICS_MAX_SSE_CONNECTIONS_PER_KEY=MOST) as server:
        yield server


def _stands_still(pid: int) -> bool:
    """A signal that was sent need not have arrived."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def alone(server: Server, name: str) -> Iterator[None]:
    """Only this gateway accepts connections: the other one stands still for a moment."""
    paused = [server.signal_child(other, signal.SIGSTOP) for other in GATEWAYS if other != name]
    try:
        for pid in paused:
            eventually(lambda pid=pid: _stands_still(pid))
        yield
    finally:
        for pid in paused:
            os.kill(pid, signal.SIGCONT)


def connect(server: Server, watching: KeyedWatching, name: str) -> Http1Source | Http2Source:
    """A connection to this gateway."""
    with alone(server, name):
        source = watching.connect()
        source.ping()
    return source


def goes_on(api: Keyed, stream: EventStream) -> None:
    """A stream that nobody has disturbed delivers what is written now."""
    mark = unique("mark")
    api.append(TOPIC, mark)
    stream.until(lambda: mark in stream.data(TOPIC))
    assert not stream.of("error")
    assert not stream.ended


def dies(server: Server, name: str) -> None:
    """And comes back."""
    pid = server.signal_child(name)
    eventually(lambda: gone(pid))
    eventually(lambda: server.pid_of(name) != pid)
    server.wait_ready()


# --- a session is its key's --------------------------------------------------------------------------


@pytest.mark.parametrize("stranger", [None, "unknown", OTHER, READER, OUTSIDER, INSIDER])
def test_a_wid_is_worth_nothing_without_its_key(guarded: Server, lane: Lane, stranger: str | None) -> None:
    """Idle or streaming: a stranger gets 401, and whoever streams is not disturbed."""
    with KeyedWatching(guarded, lane, FULL) as watching:
        session = watching.create(TOPIC)
        refused = watching.attempt(session, key=stranger)
        assert refused.answer().refusal == (401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
        stream = watching.open(session)
        for name in GATEWAYS:
            source = connect(guarded, watching, name)
            again = watching.attempt(session, on=source, key=stranger)
            assert again.answer().refusal == (401, "unauthorized")
        if stranger is not None:
            by_query = watching.get(f"{session['stream_url']}?token={stranger}", key=None)
            assert by_query.answer().refusal == (401, "unauthorized")
        goes_on(watching.client, stream)


def test_a_key_that_may_not_read_is_told_so(guarded: Server, lane: Lane) -> None:
    with KeyedWatching(guarded, lane, FULL) as watching:
        session = watching.create(TOPIC)
        assert watching.attempt(session, key=WRITER).answer().refusal == (403, "forbidden")


@pytest.mark.parametrize("owner", [FULL, READER, INSIDER])
def test_its_key_opens_it_at_any_gateway_and_takes_it_over(guarded: Server, lane: Lane, owner: str) -> None:
    with KeyedWatching(guarded, lane, owner) as watching, Keyed(guarded.port, lane, FULL) as api:
        session = watching.create(TOPIC)
        for name in (*GATEWAYS, GATEWAYS[0]):
            stream = watching.open(session, on=connect(guarded, watching, name))
            goes_on(api, stream)


def test_a_session_of_a_limited_key_is_limited(guarded: Server, lane: Lane) -> None:
    with KeyedWatching(guarded, lane, INSIDER) as watching:
        assert watching.create([TOPIC, "out:there"]).refusal == (403, "forbidden")
        assert watching.create(["out:there"], lenient=True).refusal == (403, "forbidden")


# --- deaths ------------------------------------------------------------------------------------------


def answered(attempt: Callable[[], EventStream]) -> EventStream:
    """What is said when sessions are known again: while they are not, clients are asked to wait."""
    seen: list[EventStream] = []

    def known() -> bool:
        seen.append(attempt())
        return seen[-1].status != 503

    eventually(known, every_s=0.05, what="an answer about a session")
    return seen[-1]


@pytest.mark.full
@pytest.mark.parametrize("name", ["shard-0", *GATEWAYS])
def test_sessions_keep_their_owner_over_a_death(hardy: Server, lane: Lane, name: str) -> None:
    with KeyedWatching(hardy, lane, FULL) as watching:
        idle, streaming, rested = (watching.create(TOPIC) for _ in range(3))
        stream = watching.open(streaming, on=connect(hardy, watching, GATEWAYS[0]))
        before = watching.open(rested, on=connect(hardy, watching, GATEWAYS[1]))
        before.wait_caught_up(TOPIC)
        before.close()
        dies(hardy, name)
        watching.client.close()
        for session in (idle, streaming, rested):
            for stranger in (OTHER, READER, None):
                refused = answered(lambda: watching.attempt(session, key=stranger))  # noqa: B023
                assert refused.answer().refusal == (401, "unauthorized"), (session, stranger)
        if name != GATEWAYS[0]:
            goes_on(watching.client, stream)
        for session in (idle, streaming, rested):
            opened = answered(lambda: watching.attempt(session))  # noqa: B023
            assert opened.status == 200, opened.answer()
            goes_on(watching.client, opened)
            opened.close()


@pytest.mark.full
def test_places_are_counted_over_the_death_of_their_home(hardy: Server, lane: Lane) -> None:
    """Streams outlive shard-0, and so does the knowledge whose they are."""
    with KeyedWatching(hardy, lane, FULL) as watching, KeyedWatching(hardy, lane, OTHER) as other:
        streams = [watching.open(watching.create(TOPIC)) for _ in range(MOST)]
        session = watching.create(TOPIC)
        dies(hardy, "shard-0")
        refused = answered(lambda: watching.attempt(session))
        assert refused.answer().refusal == (429, "throttled")
        assert answered(lambda: other.attempt(other.create(TOPIC))).status == 200
        for stream in streams:
            goes_on(watching.client, stream)
        streams[0].close()
        eventually(lambda: watching.attempt(session).status == 200, what="a free place")


@pytest.mark.full
@pytest.mark.parametrize("name", GATEWAYS)
def test_the_places_of_a_gateway_that_died_are_free(hardy: Server, lane: Lane, name: str) -> None:
    with KeyedWatching(hardy, lane, FULL) as watching:
        for _ in range(MOST):
            watching.open(watching.create(TOPIC), on=connect(hardy, watching, name))
        assert watching.attempt(watching.create(TOPIC)).status == 429
        dies(hardy, name)
        watching.client.close()
        sessions = [watching.create(TOPIC) for _ in range(MOST)]
        for session in sessions:
            assert answered(lambda: watching.attempt(session)).status == 200  # noqa: B023
        assert watching.attempt(watching.create(TOPIC)).status == 429


# --- places ------------------------------------------------------------------------------------------


@pytest.fixture
def places(narrow: Server) -> Iterator[Server]:
    """All of them free before and after."""
    yield narrow
    for secret in (FULL, OTHER):
        with KeyedWatching(narrow, "http1", secret) as watching:
            for _ in range(MOST):
                session = watching.create(TOPIC)
                eventually(lambda: watching.attempt(session).status == 200, what="a free place")  # noqa: B023


def assert_full(answer: Answer) -> None:
    assert answer.refusal == (429, "throttled")
    assert answer.detail == {"limit": "max_sse_connections_per_key", "max": MOST}


def test_each_key_has_its_places_whatever_gateway_it_comes_to(places: Server, lane: Lane) -> None:
    with KeyedWatching(places, lane, FULL) as watching, KeyedWatching(places, lane, OTHER) as other:
        for one in (watching, other):
            streams = [
                one.open(one.create(TOPIC), on=connect(places, one, GATEWAYS[number % 2])) for number in range(MOST)
            ]
            for name in GATEWAYS:
                assert_full(one.attempt(one.create(TOPIC), on=connect(places, one, name)).answer())
            for stream in streams:
                goes_on(watching.client, stream)
            assert one.client.list().status == 200, "other requests of the key are not held up"


def test_the_places_of_a_key_are_exact_when_all_come_at_once(places: Server, lane: Lane) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(KeyedWatching(places, lane, FULL)) for _ in range(4 * MOST)]
        prepared = [
            (one, one.create(TOPIC), connect(places, one, GATEWAYS[number % 2])) for number, one in enumerate(crowd)
        ]
        attempts = together([lambda it=it: it[0].attempt(it[1], on=it[2]) for it in prepared])
        opened = [attempt for attempt in attempts if attempt.status == 200]
        assert len(opened) == MOST
        for attempt in attempts:
            if attempt.status != 200:
                assert_full(attempt.answer())
        for stream in opened:
            goes_on(crowd[0].client, stream)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_place_comes_back(places: Server, lane: Lane, how: str) -> None:
    with KeyedWatching(places, lane, FULL) as watching:
        streams = [watching.open(watching.create(TOPIC)) for _ in range(MOST)]
        for _ in range(4):
            assert_full(watching.attempt(watching.create(TOPIC)).answer())
            getattr(streams.pop(0), how)()
            session = watching.create(TOPIC)
            opened: list[EventStream] = []

            def free() -> bool:
                opened.append(watching.attempt(session))  # noqa: B023
                return opened[-1].status == 200  # noqa: B023

            eventually(free, what="a free place")
            streams.append(opened[-1])


def test_taking_over_needs_no_place(places: Server, lane: Lane) -> None:
    with KeyedWatching(places, lane, FULL) as watching:
        sessions = [watching.create(TOPIC) for _ in range(MOST)]
        for _ in range(3):
            streams = [watching.open(session) for session in sessions]
        for stream in streams:
            goes_on(watching.client, stream)
        assert_full(watching.attempt(watching.create(TOPIC)).answer())


def test_refusals_take_no_place(places: Server, lane: Lane) -> None:
    with KeyedWatching(places, lane, FULL) as watching:
        session = watching.create(TOPIC)
        for _ in range(3 * MOST):
            assert watching.attempt(session, key=OTHER).status == 401
            assert watching.attempt("wid_AAAAAAAAAAAAAAAAAAAAAA", key=OTHER).status == 404
    with KeyedWatching(places, lane, OTHER) as other:
        for _ in range(MOST):
            other.open(other.create(TOPIC))


def test_streams_of_every_kind_share_the_places(places: Server, lane: Lane) -> None:
    """An event stream, a work stream and a socket; then the fourth of each kind."""
    with (
        KeyedWatching(places, lane, FULL) as watching,
        KeyedWorking(places, lane, FULL) as working,
        opening(places, lane) as open_socket,
    ):
        queue = working.queue(f"in:{unique('q')}")
        socket = open_socket(FULL)
        working.open(queue)
        watching.open(watching.create(TOPIC))
        assert_full(watching.attempt(watching.create(TOPIC)).answer())
        assert_full(working.attempt(queue).answer())
        assert socket_status(places, lane, FULL) == 429
        assert socket_status(places, lane, OTHER) in (101, 200)
        socket.close()
        eventually(lambda: working.attempt(queue).status == 200, what="the place of the socket")


# --- sockets -----------------------------------------------------------------------------------------


@contextmanager
def opening(server: Server, lane: Lane) -> Iterator[Open]:
    """Opens sockets with keys; all are closed at the end."""
    with ExitStack() as stack:
        wire = stack.enter_context(H2Sockets(server.port)) if lane == "http2" else None

        def open_socket(secret: str | None) -> Conversation:
            if wire is not None:
                return wire.socket(*[(name.lower(), value) for name, value in bearer(secret).items()])
            socket: Conversation = stack.enter_context(Socket(server.port, **bearer(secret)))
            return socket

        yield open_socket


@pytest.fixture
def open_socket(guarded: Server, lane: Lane) -> Iterator[Open]:
    with opening(guarded, lane) as opened:
        yield opened


def socket_status(server: Server, lane: Lane, *secrets: str | None, path: str = "/v0/ws") -> int:
    """What is said to an upgrade with these keys."""
    headers = [("authorization", f"Bearer {secret}") for secret in secrets if secret is not None]
    if lane == "http2":
        with H2Sockets(server.port) as wire:
            opened = wire.connect(*headers, path=path)
            status = opened.status()
            if status == 401:
                assert opened.stream.headers["www-authenticate"] == "Bearer"
            return status
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    with Wire(server.port) as raw:
        raw.send(handshake(path=path)[:-2] + lines.encode() + b"\r\n")
        status, received = raw.head()
        if status == 401:
            assert received["www-authenticate"] == "Bearer"
        return status


def test_a_socket_needs_a_key_and_no_scope(guarded: Server, lane: Lane) -> None:
    opened = 101 if lane == "http1" else 200
    assert [socket_status(guarded, lane, key.secret) for key in KEYS] == [opened] * len(KEYS)
    assert [socket_status(guarded, lane, secret) for secret in (None, "unknown", "")] == [401] * 3
    assert socket_status(guarded, lane, None, path=f"/v0/ws?token={FULL}") == 401
    assert socket_status(guarded, lane, FULL, FULL) == 401
    assert socket_status(guarded, lane, "unknown", FULL) == 401
    assert socket_status(guarded, lane, FULL, "unknown") == 401


def _expect(key: Secret, *needs: str) -> str | None:
    return None if set(needs) <= key.scopes and key.area != "out" else "forbidden"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.secret)
def test_every_command_with_every_key(guarded: Server, open_socket: Open, key: Secret) -> None:
    name = f"in:{unique()}"
    records = [{"data": 1}]
    with open_socket(key.secret) as socket:
        assert socket.call("publish", topic=name, records=records).error == _expect(key, "write")
        config = {"durability": "disk"}
        with_config = socket.call("publish", topic=f"{name}-c", records=records, config=config)
        assert with_config.error == _expect(key, "write", "admin")
        assert socket.call("subscribe", topic=TOPIC).error == _expect(key, "read")
        assert socket.call("subscribe", topics={TOPIC: {}}).error == _expect(key, "read")
        assert socket.call("unsubscribe", topic=TOPIC).op == "unsubscribed"
        assert socket.ping().op == "pong"
    with Keyed(guarded.port, "http1", FULL) as api:
        assert api.state(name).status == (404 if _expect(key, "write") else 200)
        assert api.state(f"{name}-c").status == (404 if _expect(key, "write", "admin") else 200)


def test_one_name_outside_refuses_the_whole_subscribe(guarded: Server, open_socket: Open) -> None:
    with open_socket(INSIDER) as socket, Keyed(guarded.port, "http1", FULL) as api:
        for fields in ({"topics": {TOPIC: {"tail": True}, "out:there": {}}}, {"topic": "out:there"}):
            frame = socket.call("subscribe", **fields)
            assert (frame.error, frame["detail"]) == ("forbidden", {"name": "out:there"})
            assert socket.call("subscribe", lenient=True, **fields).error == "forbidden"
        api.append(TOPIC, 1)
        api.append("out:there", 1)
        frame = socket.ping()
        assert not socket._kept, "something was delivered"


def test_dead_letters_of_a_published_config(guarded: Server, open_socket: Open) -> None:
    name = f"in:{unique('q')}"
    config = {"type": "queue", "max_deliveries": 1, "dead_letter": "out:dead"}
    with open_socket(INSIDER) as socket:
        assert socket.call("publish", topic=name, records=[{"data": 1}], config=config).error == "forbidden"
        config["dead_letter"] = "in:dead"
        assert socket.call("publish", topic=name, records=[{"data": 1}], config=config).op == "ack"


def test_commands_in_a_row_are_judged_one_by_one(open_socket: Open) -> None:
    """Plain publishes travel together: those that may not are not among them."""
    name = f"in:{unique()}"
    with open_socket(INSIDER) as socket:
        for number in range(20):
            for topic in (name, f"out:{name}"):
                socket.tell("publish", topic=topic, records=[{"data": number}], request_id=f"{topic} {number}")
        replies = {frame.request_id: frame.error for frame in socket.replies(40)}
        assert replies == {
            f"{topic} {number}": error
            for topic, error in ((name, None), (f"out:{name}", "forbidden"))
            for number in range(20)
        }
        socket.subscribe(name)
        assert socket.data(name, 20) == list(range(20))


def test_sockets_of_one_connection_keep_their_own_rights(guarded: Server) -> None:
    name = f"in:{unique()}"
    with H2Sockets(guarded.port) as wire:
        sockets = {secret: wire.socket(("authorization", f"Bearer {secret}")) for secret in (FULL, READER, OUTSIDER)}
        for _ in range(3):
            seen = {
                secret: socket.call("publish", topic=name, records=[{"data": 1}]).error
                for secret, socket in sockets.items()
            }
            assert seen == {FULL: None, READER: "forbidden", OUTSIDER: "forbidden"}
