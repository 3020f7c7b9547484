"""The server's log as a machine reads it: every line of a whole life, what the access log says, and what is never said.

Nothing is skipped: one line that is no line of the log fails the test that finds it, whoever wrote it.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from .client import LANES, Client, Lane, unique
from .h2wire import H2Wire
from .h2ws import H2Sockets
from .keyed import Keyed, KeyedWatching, bearer
from .logged import LEVELS, OURS, Fields, having, lines_of, parse_all
from .queues import make_queue
from .server import DEADLINE_S, Server, eventually
from .sockets import RawSocket, handshake
from .sse import Watching
from .wire import Wire, append_request, request
from .working import Working

pytestmark = pytest.mark.e2e

FORMS = ("logfmt", "json")
ALL = {"supervisor", "gateway-0", "gateway-1", "router", "queue", "shard-0", "shard-1"}
# In this order, and no other; request_id and key only where there is one.
FIELDS = ["time", "level", "process", "event", "id", "method", "path", "status", "bytes", "ms", "peer"]
SECRET = "Wq7secret-93ab51f0"
READER = "Wq7reader-cc10e2d4"
STRANGER = "Wq7stranger-77e0a9"
SECRETS = (SECRET, READER, STRANGER)


def serve(folder: Path, **environ: object) -> Server:
    return Server(folder / "data", log=folder / "server.log", **environ)


def use(server: Server) -> None:
    """A bit of everything, some of it hostile."""
    for lane in LANES:
        with server.client(lane) as api, Watching(server, lane) as watching, Working(server, lane) as working:
            name = unique("logs")
            api.put(name)
            api.append(name, 1, 2)
            api.diff(name)
            api.list(prefix=name)
            api.state("logs-missing")
            api.get("/v0/nothing/%22quoted%22/%20blank/%0a")
            api.send("PUT", f"/v0/routers/{name}", {"source": name, "dest": f"{name}-d"})
            watching.follow(name).wait_caught_up(name)
            queue = working.queue()
            queue.produce(1)
            working.open(queue).job()
            make_queue(api).claim()
    with RawSocket(server.port) as socket:
        socket.publish("logs-socket", 1)
    for raw in (
        b"\x16\x03\x01\r\n\r\n",
        b'GET /v0/"a=b"\\x/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n',
        b"GET /v0/\x1b[31m HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v0/x HTTP/1.1\r\nHost: localhost\r\nX: a\nlevel=error event=forged\r\n\r\n",
        b"GET /v0/\xe2\x80\xa8\xc2\x85line HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        with Wire(server.port) as wire:
            wire.send(raw)
            wire.head()


# --- every line of a whole life ----------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loud", [True, False], ids=["everything", "the usual"])
def test_every_line_of_a_life_can_be_read(tmp_path: Path, form: str, loud: bool) -> None:
    environ: dict[str, Any] = {"TOPICS_LOG": "debug", "TOPICS_ACCESS_LOG": 1} if loud else {}
    server = serve(tmp_path, TOPICS_LOG_FORMAT=form, TOPICS_GATEWAYS=2, TOPICS_PRESSURE_LAG_MS=20, **environ)
    with closing(server):
        server.wait_ready()
        use(server)
        for name in ("shard-1", "router", "queue", "gateway-1"):
            pid = server.signal_child(name)
            eventually(lambda name=name, pid=pid: server.pids().get(name, pid) != pid)
            server.wait_ready()
        use(server)
        with server.client() as api:  # long enough to be pressure
            api.send("POST", "/v0/topics/logs-large", {"records": [{"data": "x" * 900}] * 10_000})
        assert server.stop() == 0
    lines = parse_all(server.output(), form)
    # Who has nothing to say at the usual level says nothing; a gateway has if it was the one under pressure.
    heard = {line["process"] for line in lines}
    assert heard | (set() if loud else {"gateway-0", "gateway-1"}) == ALL - (set() if loud else {"router", "queue"})
    by_event = Counter(line["event"] for line in lines)
    assert by_event["child_started"] == by_event["child_ready"] == 6 + 4
    assert by_event["child_died"] == 4
    assert by_event["recovered"] == 2 + 1
    assert by_event["stopping"] == 1
    assert lines[-1]["event"] == "stopped"
    assert int(lines[-1]["exit_code"]) == 0
    assert "forged" not in by_event
    died = having(lines, event="child_died")
    assert {line["child"] for line in died} == {"shard-1", "router", "queue", "gateway-1"}
    assert {line["level"] for line in died} == {"warning"}
    own = having(lines, process="supervisor")
    assert [line["time"] for line in own] == sorted(line["time"] for line in own)
    assert (by_event["request"] > 0) is loud
    assert (by_event["taken"] > 0) is loud


@pytest.mark.full
def test_both_forms_say_the_same(tmp_path: Path) -> None:
    """The fields of an event are the same, whichever way they are written."""
    shapes = []
    for form in FORMS:
        (tmp_path / form).mkdir()
        server = serve(tmp_path / form, TOPICS_LOG_FORMAT=form, TOPICS_ACCESS_LOG=1, TOPICS_ELASTIC=0)
        with closing(server):
            server.wait_ready()
            with server.client() as api:
                api.append("a", 1)
                api.send("GET", "/v0/topics/a", headers={"X-Request-Id": "mine"})
            server.stop()
        lines = parse_all(server.output(), form)
        shapes.append({(line["process"], line["event"], *line) for line in lines})
    assert shapes[0] == shapes[1]


def test_a_start_that_is_refused_says_why_without_a_log(tmp_path: Path) -> None:
    """Nothing but the reason: whoever reads it is a person at a terminal, or the journal of a unit that failed."""
    server = serve(tmp_path, TOPICS_LOG_FORMAT="xml")
    with closing(server):
        assert server.popen.wait(DEADLINE_S) == 2
    assert re.fullmatch(r"topics: TOPICS_LOG_FORMAT='xml': expected .*\n", server.output())


@pytest.mark.full
def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    """Also where the log goes through a pipe whose reader is slow, and many lines are written at once."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    received: list[bytes] = []

    def read() -> None:
        with open(fifo, "rb", buffering=0) as source:
            while data := source.read(4_000):
                received.append(data)
                time.sleep(0.002)  # slower than what is written: the pipe is full most of the time

    reader = threading.Thread(target=read)
    reader.start()
    server = Server(tmp_path / "data", log=fifo, TOPICS_GATEWAYS=2, TOPICS_ACCESS_LOG=1, TOPICS_ELASTIC=0)
    with closing(server):
        server.wait_ready()
        names = [unique("mix") for _ in range(6)]
        threads = [threading.Thread(target=pipeline, args=(server, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.stop()
    reader.join()
    lines = parse_all(b"".join(received).decode())
    asked = Counter(line["path"] for line in having(lines, event="request"))
    assert {name: asked[f"/v0/topics/{name}"] for name in names} == dict.fromkeys(names, 1_000)


def pipeline(server: Server, name: str) -> None:
    """A thousand requests, a hundred at a time."""
    with Wire(server.port) as wire:
        for _ in range(10):
            wire.send(b"".join([append_request(name)] * 100))
            for _ in range(100):
                wire.answer()


# --- levels ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_shows_itself_and_what_is_worse(tmp_path: Path, level: str) -> None:
    server = serve(tmp_path, TOPICS_LOG=level)
    with closing(server):
        server.wait_ready()
        pid = server.signal_child("router")
        eventually(lambda: server.pids().get("router", pid) != pid)
        server.wait_ready()
        with server.client() as api:
            api.append("a", 1)
        server.stop()
    seen = {line["level"] for line in parse_all(server.output())} if server.output() else set()
    assert seen <= set(LEVELS[LEVELS.index(level) :])
    for other in ("debug", "info", "warning"):  # nothing of this is an error
        assert (other in seen) is (LEVELS.index(other) >= LEVELS.index(level)), other


@pytest.mark.full
def test_the_access_log_does_not_depend_on_the_level(tmp_path: Path) -> None:
    server = serve(tmp_path, TOPICS_LOG="error", TOPICS_ACCESS_LOG=1)
    with closing(server):
        server.wait_ready()
        with server.client() as api:
            id = api.append("a", 1).headers["x-request-id"]
        eventually(lambda: lines_of(server, id=id), what="its line")
        assert {line["event"] for line in lines_of(server)} == {"request"}


# --- off by default ----------------------------------------------------------------------------------


@pytest.mark.full
def test_no_request_is_logged_unless_it_was_asked_for(tmp_path: Path) -> None:
    server = serve(tmp_path, TOPICS_GATEWAYS=2, TOPICS_ELASTIC=0)
    with closing(server):
        server.wait_ready()
        before = server.output()
        use(server)
        use(server)
        # What a request writes is written by then: whoever is asked later answers later.
        with server.client() as api:
            for _ in range(20):
                assert api.get("/v0/health").status == 200
        assert server.output() == before


# --- the access log ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, form: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("access")
    server = serve(
        folder,
        TOPICS_ACCESS_LOG=1,
        TOPICS_LOG_FORMAT=form,
        TOPICS_ELASTIC=0,
        TOPICS_API_KEYS=f"{SECRET},{READER}:read",
        TOPICS_MAX_BODY_BYTES=20_000,
        TOPICS_BODY_TIMEOUT_MS=1_000,
    )
    with closing(server):
        server.wait_ready()
        yield server


@pytest.fixture
def line_of(watched: Server, form: str) -> Callable[[str], Fields]:
    """The line of a request, by its id or by the name that its client gave it; there must be one alone."""

    def find(id: str) -> Fields:
        field = "id" if OURS.fullmatch(id) else "request_id"
        found = eventually(lambda: lines_of(watched, form, event="request", **{field: id}), every_s=0.05, what=id)
        (line,) = found
        assert (line["level"], OURS.fullmatch(line["id"]) is not None) == ("info", True)
        assert float(line["ms"]) >= 0
        optional = [name for name in ("request_id", "key") if name in line]
        expected = [*FIELDS]
        if "request_id" in optional:
            expected.insert(5, "request_id")
        if "key" in optional:
            expected.append("key")
        assert list(line) == expected
        return {name: str(value) for name, value in line.items()}

    return find


@pytest.mark.parametrize("lane", LANES)
def test_a_line_says_what_was_asked_and_answered(watched: Server, line_of: Callable[[str], Fields], lane: Lane) -> None:
    name = unique("access")
    with Keyed(watched.port, lane, SECRET) as api, Keyed(watched.port, lane, READER) as reader:
        asked = [
            (api.put(name), "PUT", f"/v0/topics/{name}", 201, 1),
            (api.append(name, 1), "POST", f"/v0/topics/{name}", 200, 1),
            (api.append(name, 1, node="n"), "POST", f"/v0/topics/{name}", 200, 1),
            (reader.diff(name), "POST", f"/v0/topics/{name}/diff", 200, 2),
            (reader.state(name), "GET", f"/v0/topics/{name}", 200, 2),
            (api.list(), "GET", "/v0/topics", 200, 1),
            (api.drop(name), "DELETE", f"/v0/topics/{name}", 200, 1),
            (reader.state("access-none"), "GET", "/v0/topics/access-none", 404, 2),
            (api.get("/v0/nothing"), "GET", "/v0/nothing", 404, None),
            (api.send("DELETE", "/v0/health"), "DELETE", "/v0/health", 405, None),
            (api.get("/v0/health"), "GET", "/v0/health", 200, None),
            (api.send("PUT", f"/v0/topics/{name}", content=b"{"), "PUT", f"/v0/topics/{name}", 400, 1),
            (reader.append(name, 1), "POST", f"/v0/topics/{name}", 403, 2),
            (
                reader.send("GET", "/v0/topics", headers={**bearer(READER), "Origin": "null"}),
                "GET",
                "/v0/topics",
                403,
                2,
            ),
            (api.send("GET", "/v0/topics", headers=bearer(STRANGER)), "GET", "/v0/topics", 401, None),
        ]
    for answer, method, path, status, key in asked:
        line = line_of(answer.headers["x-request-id"])
        assert (line["method"], line["path"], line["status"]) == (method, path, str(status))
        assert line["bytes"] == str(len(answer.raw))
        assert line.get("key") == (None if key is None else str(key)), line


@pytest.mark.parametrize("lane", LANES)
def test_a_line_has_both_names(watched: Server, line_of: Callable[[str], Fields], lane: Lane) -> None:
    mine = unique(f"mine-{lane}")
    with Keyed(watched.port, lane, SECRET) as api:
        answer = api.send(
            "POST", "/v0/topics/named", {"records": [{"data": 1}]}, headers={"X-Request-Id": mine, **bearer(SECRET)}
        )
    assert answer.headers["x-request-id"] == mine
    assert line_of(mine)["path"] == "/v0/topics/named"


@pytest.mark.parametrize("lane", LANES)
def test_a_line_says_how_long_it_took_and_for_whom(
    watched: Server, line_of: Callable[[str], Fields], lane: Lane
) -> None:
    with Keyed(watched.port, lane, SECRET) as api:
        api.put("polled")
        waited = api.diff("polled", 0, wait_ms=300)
    assert 300 <= float(line_of(waited.headers["x-request-id"])["ms"]) < 5_000
    if lane == "http1":
        with Wire(watched.port) as wire:
            id = wire.ask(request()).headers["x-request-id"]
            peer = wire.sock.getsockname()
    else:
        with H2Wire(watched.port) as wire2:
            id = wire2.finish(wire2.ask("GET", "/v0/health")).headers["x-request-id"]
            peer = wire2.sock.getsockname()
    assert line_of(id)["peer"] == f"{peer[0]}:{peer[1]}"


@pytest.mark.parametrize("lane", LANES)
def test_streams_are_logged_when_they_open(watched: Server, line_of: Callable[[str], Fields], lane: Lane) -> None:
    with KeyedWatching(watched, lane, SECRET) as watching:
        watching.client.put("streamed")
        session = watching.create("streamed")
        stream = watching.open(session)
        line = line_of(stream.headers["x-request-id"])
        assert (line["method"], line["status"], line["key"]) == ("GET", "200", "1")
        assert line["path"].startswith("/v0/watch/")
    if lane == "http1":
        with RawSocket(watched.port, upgraded=False) as socket:
            id = socket.upgrade(handshake({"Authorization": f"Bearer {SECRET}"}))["x-request-id"]
            line = line_of(id)
            assert (line["method"], line["path"], line["status"], line["key"]) == ("GET", "/v0/ws", "101", "1")
    else:
        with H2Sockets(watched.port) as wire:
            opened = wire.socket(("authorization", f"Bearer {SECRET}"))
            line = line_of(opened.stream.headers["x-request-id"])
            assert (line["method"], line["path"], line["status"], line["key"]) == ("CONNECT", "/v0/ws", "200", "1")


def test_all_of_a_pipeline_are_logged(watched: Server, form: str) -> None:
    name = unique("pipeline")
    raw = append_request(name).replace(b"Host:", f"Authorization: Bearer {SECRET}\r\nHost:".encode())
    with Wire(watched.port) as wire:
        wire.send(raw * 100)
        ids = [wire.answer().headers["x-request-id"] for _ in range(100)]
    lines = eventually(
        lambda: len(found := lines_of(watched, form, path=f"/v0/topics/{name}")) >= 100 and found, what="their lines"
    )
    assert isinstance(lines, list)
    assert sorted(line["id"] for line in lines) == sorted(ids)
    assert {str(line["status"]) for line in lines} == {"200", "201"}


def test_what_could_not_be_understood_is_logged_too(watched: Server, line_of: Callable[[str], Fields]) -> None:
    for raw, status in (
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\r\n\r\n", 400),
        (b"POST /v0/x HTTP/1.1\r\n", 408),
    ):
        with Wire(watched.port) as wire:
            wire.send(raw)
            if status == 408:
                wire.half_close()
                continue
            got, headers = wire.head()
        assert got == status
        assert line_of(headers["x-request-id"])["status"] == str(status)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v0/topics/big HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000\r\n\r\n", 413),
        (b"POST /v0/topics/slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{", 408),
        (b"POST /v0/topics/odd HTTP/1.1\r\nHost: localhost\r\nExpect: coffee\r\nContent-Length: 2\r\n\r\n{}", 417),
    ],
    ids=["too large", "too slow", "another expectation"],
)
def test_a_head_that_was_read_is_shown(
    watched: Server, line_of: Callable[[str], Fields], raw: bytes, status: int
) -> None:
    with Wire(watched.port) as wire:
        wire.send(raw)
        got, headers = wire.head()
    assert got == status
    line = line_of(headers["x-request-id"])
    assert (line["method"], line["path"]) == ("POST", raw.split(b" ")[1].decode())


# --- what is never said ------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
def test_no_query_no_token_and_no_key(watched: Server, form: str, lane: Lane) -> None:
    """Wherever a client may put a secret, and where it should not."""
    with Keyed(watched.port, lane, SECRET) as api, KeyedWatching(watched, lane, SECRET) as watching:
        api.put("private")
        api.append("private", 1)
        session = watching.create("private")
        assert watching.get(f"{session['stream_url']}?token={SECRET}", key=None).status == 200
        assert watching.get(f"{session['stream_url']}?token={STRANGER}", key=None).status == 401
        for path in (
            f"/v0/topics?token={STRANGER}",
            f"/v0/topics?prefix=a&api_key={STRANGER}",
            f"/v0/nothing?token={STRANGER}",
            f"/v0/topics/private?a=b?token={STRANGER}",
            f"/v0/health?{STRANGER}",
            f"/v0/topics/private/work?node=w&token={STRANGER}",
        ):
            api.get(path)
            api.send("DELETE", path)
        for value in (STRANGER, f"Basic {STRANGER}", f"Bearer {STRANGER} {STRANGER}", f"bearer  {STRANGER}"):
            api.send("GET", "/v0/topics", headers={"Authorization": value})
        api.send("POST", "/v0/topics/private", {"records": [{"data": STRANGER}]}, headers={"Idempotency-Key": STRANGER})
        api.send("POST", "/v0/topics/private", {"records": STRANGER, STRANGER: STRANGER})
        last = api.get("/v0/health").headers["x-request-id"]
    eventually(lambda: lines_of(watched, form, id=last), every_s=0.05, what="the last line")
    output = watched.output()
    assert not [secret for secret in SECRETS if secret in output]
    assert not [line for line in lines_of(watched, form, event="request") if "?" in line["path"]]


@pytest.mark.parametrize(
    "target",
    [
        f"http://user:{STRANGER}@t/v0/topics?token={STRANGER}",
        f"http://{STRANGER}@t/v0/health",
        f"/v0/topics#token={STRANGER}",
    ],
    ids=["a password of the address", "a user of the address", "a fragment"],
)
def test_no_secret_of_an_unusual_target(watched: Server, form: str, target: str) -> None:
    with Wire(watched.port) as wire:
        wire.send(request(path=target, headers=(f"Authorization: Bearer {SECRET}",)))
        _, headers = wire.head()
    (line,) = eventually(lambda: lines_of(watched, form, id=headers["x-request-id"]), every_s=0.05, what="its line")
    assert STRANGER not in line["path"]


def test_nobody_writes_a_line_of_his_own(watched: Server, form: str) -> None:
    """Paths and names are fields; what is in them stays in them."""
    for lane in LANES:
        with Keyed(watched.port, lane, SECRET) as api:
            api.get("/v0/%0atime=2026-01-01T00:00:00.000Z%20level=error%20process=supervisor%20event=forged")
            api.get('/v0/"},{"event":"forged"}')
            api.send("GET", "/v0/health", headers={"X-Request-Id": "a level=error event=forged"})
            last = api.get("/v0/health").headers["x-request-id"]
        eventually(lambda last=last: lines_of(watched, form, id=last), every_s=0.05, what="the last line")
    assert not lines_of(watched, form, event="forged")
    assert not lines_of(watched, form, process="supervisor", level="error")


@pytest.mark.full
def test_a_reader_that_goes_away_stops_nobody(tmp_path: Path) -> None:
    """The other end of the log's pipe is closed: the server serves on."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    server = Server(tmp_path / "data", log=fifo, TOPICS_ACCESS_LOG=1, TOPICS_LOG="debug", TOPICS_RING_BYTES=1 << 20)
    try:
        drain = threading.Thread(target=read_until, args=(reader, b"ready on"))
        drain.start()
        server.wait_ready()
        drain.join()
        os.close(reader)
        for lane in LANES:
            with server.client(lane) as api:
                for _ in range(20):
                    assert api.append("unread", 1).status in (200, 201)
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(DEADLINE_S) == 0
    finally:
        server.close()


def read_until(fd: int, mark: bytes) -> None:
    received = b""

    def more() -> bool:
        nonlocal received
        try:
            received += os.read(fd, 1 << 16)
        except BlockingIOError:
            pass
        return mark in received

    eventually(more, what="the ready line")


def test_clients_know_their_requests_by_the_same_ids(watched: Server, form: str) -> None:
    """As many lines as answers, and each of them of one answer."""
    before = {line["id"] for line in lines_of(watched, form, event="request")}
    ids: list[str] = []

    def ask(api: Client) -> None:
        ids.extend(api.append("counted", 1).headers["x-request-id"] for _ in range(50))

    clients = [Keyed(watched.port, lane, SECRET) for lane in LANES for _ in range(3)]
    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()

    def logged() -> list[str]:
        found = [line["id"] for line in lines_of(watched, form, event="request", path="/v0/topics/counted")]
        return found if len(found) >= len(ids) else []

    assert sorted(eventually(logged, every_s=0.05, what="all lines")) == sorted(ids)
    assert len(ids) == 300
    assert not before & set(ids)
