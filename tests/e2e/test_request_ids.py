"""X-Request-Id: on every answer, unlike any other, or the client's own word for it; and the way it leaves in the logs.

What a client calls its request comes back byte for byte if it is harmless, and is passed over if it is not: nothing of
it ever reaches a header or a line of the log in another form.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import h2.config
import h2.connection
import pytest

from .client import LANES, Client, Lane, Lost, unique
from .h2wire import H2Wire
from .h2ws import H2Sockets
from .logged import OURS, having, lines_of
from .queues import make_queue
from .routing import name_on
from .server import Server, eventually
from .sockets import RawSocket, handshake
from .sse import Watching
from .wire import Wire, append_request, chunked, request
from .working import Working

pytestmark = pytest.mark.e2e

NAME = "x-request-id"
BODY = b'{"records":[{"data":1}]}'
LONG = "/v0/" + "a" * 9_000
# Valid ones: every character that may occur, the shortest and the longest.
VALID = [
    "a",
    "0",
    "-",
    "01234567-89ab-cdef-0123-456789abcdef",
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "a.b_c:d/e+f=g-h",
    "aGVsbG8gd29ybGQ+/w==",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/+=-",
    "x" * 128,
    "9.9.ff",  # looks like ours, and is theirs
]
INVALID = {
    "empty": b"",
    "too long": b"x" * 129,
    "much too long": b"x" * 20_000,
    "blank": b"a b",
    "quote": b'a"b',
    "comma": b"a,b",
    "semicolon": b"a;b",
    "percent": b"%0d%0aSet-Cookie:a",
    "markup": b"<script>",
    "braces": b"{a}",
    "backslash": b"a\\nb",
    "latin": b"\xe9",
    "utf-8": "é".encode(),
    "tab": b"a\tb",
    "control": b"a\x01b",
    "delete": b"a\x7fb",
    "escape": b"\x1b[31m",
}


def post(path: str, body: bytes, *headers: str) -> bytes:
    return request("POST", path, body, headers=headers)


# what it is -> its bytes and the status it gets
KINDS: dict[str, tuple[bytes, int]] = {
    "created": (append_request("ids-a"), 201),
    "appended": (append_request("ids-a"), 200),
    "appended without seqs": (post("/v0/topics/ids-a?return_seqs=false", BODY), 200),
    "appended with a key": (post("/v0/topics/ids-a", BODY, "Idempotency-Key: k"), 200),
    "appended with an option": (post("/v0/topics/ids-a", b'{"records":[{"data":1}],"create":false}'), 200),
    "appended in chunks": (
        b"POST /v0/topics/ids-a HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, 3, 4),
        200,
    ),
    "packed": (post("/v0/topics/ids-a", gzip.compress(BODY), "Content-Encoding: gzip"), 200),
    "unpacked": (request(path="/v0/metrics", headers=("Accept-Encoding: gzip",)), 200),
    "read": (post("/v0/topics/ids-a/diff", b'{"from_seq":0}'), 200),
    "a long poll": (post("/v0/topics/ids-a/diff", json.dumps({"from_seq": 10**6, "wait_ms": 50}).encode()), 200),
    "configured": (request("PUT", "/v0/topics/ids-a", b"{}"), 200),
    "state": (request(path="/v0/topics/ids-a"), 200),
    "list": (request(path="/v0/topics"), 200),
    "deleted": (post("/v0/topics/ids-a/delete", b'{"before_seq":1}'), 200),
    "dropped": (request("DELETE", "/v0/topics/ids-gone"), 200),
    "claimed": (post("/v0/topics/ids-q/claim", b'{"node":"w"}'), 404),
    "routers": (request(path="/v0/routers"), 200),
    "a router": (request(path="/v0/routers/ids-r"), 404),
    "a session": (post("/v0/watch", b'{"topics":{"ids-a":{}}}'), 200),
    "no session": (request(path="/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA"), 404),
    "health": (request(path="/v0/health"), 200),
    "healthz": (request(path="/healthz"), 200),
    "ready": (request(path="/readyz"), 200),
    "metrics": (request(path="/v0/metrics"), 200),
    "metrics in json": (request(path="/v0/metrics", headers=("Accept: application/json",)), 200),
    "no upgrade": (request(path="/v0/ws"), 426),
    "head": (request("HEAD", "/v0/topics/ids-a"), 200),
    "head of nothing": (request("HEAD", "/v0/topics/ids-gone"), 404),
    "head of metrics": (request("HEAD", "/v0/metrics"), 200),
    "head of a stream": (request("HEAD", "/v0/ws"), 405),
    "no route": (request(path="/v0/nothing"), 404),
    "the root": (request(path="/"), 404),
    "no such method here": (request("DELETE", "/v0/health"), 405),
    "options": (request("OPTIONS", "/v0/topics"), 405),
    "a bad name": (request(path="/v0/topics/-bad"), 400),
    "no json": (post("/v0/topics/ids-a", b"{"), 400),
    "not ours": (post("/v0/topics/ids-a", b'{"records":7}'), 400),
    "another type": (
        b"POST /v0/topics/ids-a HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
        415,
    ),
    "another coding": (post("/v0/topics/ids-a", BODY, "Content-Encoding: br"), 415),
    "closing": (request(headers=("Connection: close",)), 200),
    "http 1.0": (request(version="HTTP/1.0"), 200),
    "http 1.0 without a host": (b"GET /v0/health HTTP/1.0\r\n\r\n", 200),
}
# Where the next request would begin is anybody's guess after these.
FATAL: dict[str, tuple[bytes, int]] = {
    "no such method": (request("BREW", "/v0/health"), 405),
    "garbage": (b"\x16\x03\x01\x02\r\n\r\n", 400),
    "bare line feeds": (b"GET /v0/health HTTP/1.1\nHost: localhost\n\n", 400),
    "no host": (b"GET /v0/health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (request(headers=("Host: u",)), 400),
    "folded": (request(headers=("A: b", " c")), 400),
    "two lengths": (request("POST", "/v0/topics/x", b"{}", headers=("Content-Length: 3",)), 400),
    "length and chunks": (request("POST", "/v0/topics/x", b"{}", headers=("Transfer-Encoding: chunked",)), 400),
    "another transfer coding": (request("POST", "/v0/topics/x", headers=("Transfer-Encoding: gzip",)), 400),
    "bad chunks": (request("POST", "/v0/topics/x", headers=("Transfer-Encoding: chunked",)) + b"zz\r\n", 400),
    "another version": (b"GET /v0/health HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    "another expectation": (request("POST", "/v0/topics/x", b"{}", headers=("Expect: coffee",)), 417),
    "a long target": (request(path=LONG), 414),
    "many headers": (request(headers=tuple(f"A{n}: b" for n in range(200))), 431),
    "long headers": (request(headers=("A: " + "b" * 40_000,)), 431),
    "too large": (
        b"POST /v0/topics/x HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 999999999\r\n\r\n",
        413,
    ),
}


def answer_head(wire: Wire) -> tuple[int, dict[str, str]]:
    """Of the final answer: a head that says to go on is none."""
    status, headers = wire.head()
    return wire.head() if status == 100 else (status, headers)


def ask1(server: Server, raw: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers, whatever the answer's body is; no header may come twice."""
    with Wire(server.port) as wire:
        wire.send(raw)
        return answer_head(wire)


def own(raw: bytes, id: str | bytes) -> bytes:
    """The same request with a name of its client's."""
    line, _, rest = raw.partition(b"\r\n")
    return b"%b\r\nX-Request-Id: %b\r\n%b" % (line, id.encode() if isinstance(id, str) else id, rest)


def ask2(server: Server, raw: bytes, *headers: tuple[str, str]) -> tuple[int, dict[str, str]]:
    """A request of the other lane, translated."""
    with H2Wire(server.port) as wire:
        number = open2(wire, raw, *headers)
        stream = wire.finish(number)
        return int(stream.headers[":status"]), stream.headers


def open2(wire: H2Wire, raw: bytes, *headers: tuple[str, str]) -> int:
    head, _, body = raw.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = line.split(" ", 2)
    pairs = [(name.lower(), value) for name, value in (text.split(": ", 1) for text in lines)]
    kept = [(name, value) for name, value in pairs if name not in ("host", "connection", "transfer-encoding")]
    if ("transfer-encoding", "chunked") in pairs:
        body = BODY
    number = wire.open(method, path, *kept, *headers, end=not body)
    if body:
        wire.send(number, body, end=True)
    return number


# --- every answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, *FATAL])
def test_every_answer_has_one(server: Server, kind: str) -> None:
    raw, status = {**KINDS, **FATAL}[kind]
    got, headers = ask1(server, raw)
    assert got == status or (kind == "created" and got == 200)
    assert OURS.fullmatch(headers[NAME]), headers


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("http 1.0")])
def test_every_answer_over_http2_has_one(server: Server, kind: str) -> None:
    raw, status = KINDS[kind]
    got, headers = ask2(server, raw)
    assert got == status or (kind == "created" and got == 200)
    assert OURS.fullmatch(headers[NAME]), headers


def test_refusals_of_a_server_with_little_patience_have_one(small_server: Server) -> None:
    part = request("POST", "/v0/topics/x", BODY)[:-4]
    for raw, status in ((b"GET /v0", 408), (part, 408), (post("/v0/topics/x", b" " * 30_000), 413)):
        got, headers = ask1(small_server, raw)
        assert got == status
        assert OURS.fullmatch(headers[NAME]), headers
    got, headers = ask2(small_server, post("/v0/topics/x", b" " * 30_000))
    assert got == 413
    assert OURS.fullmatch(headers[NAME]), headers


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [("/v0/health", 200, 431), ("v0/health", 0, 400), ("/v0/" + "a" * 9_000, 0, 414)],
    ids=["many headers", "no path", "a long target"],
)
@pytest.mark.parametrize("named", [False, True], ids=["ours", "theirs"])
def test_heads_that_are_refused_over_http2_have_one(
    server: Server, path: str, headers: int, status: int, named: bool
) -> None:
    given = [(f"a{number}", "b") for number in range(headers)] + ([(NAME, "mine")] if named else [])
    with H2Wire(server.port) as wire:
        stream = wire.finish(wire.open("GET", path, *given, end=True))
    assert int(stream.headers[":status"]) == status
    assert stream.headers[NAME] == "mine" if named else OURS.fullmatch(stream.headers[NAME])


def test_the_answer_to_a_body_that_does_not_come_over_http2_has_one(small_server: Server) -> None:
    with H2Wire(small_server.port) as wire:
        number = wire.open("POST", "/v0/topics/x", ("content-type", "application/json"))
        wire.send(number, b'{"rec', end=False)
        while not wire.streams[number].headers:
            assert wire.receive()
        headers = wire.streams[number].headers
    assert headers[":status"] == "408"
    assert OURS.fullmatch(headers[NAME]), headers


def test_whoever_is_told_to_go_on_gets_one_at_the_end(wire: Wire, topic: str) -> None:
    wire.send(request("POST", f"/v0/topics/{topic}", BODY, headers=("Expect: 100-continue",))[: -len(BODY)])
    status, headers = wire.head()
    assert (status, NAME in headers) == (100, False)
    wire.send(BODY)
    status, headers = wire.head()
    assert status == 201
    assert OURS.fullmatch(headers[NAME]), headers


@pytest.mark.parametrize("lane", LANES)
def test_streams_have_one(server: Server, lane: Lane) -> None:
    with Watching(server, lane) as watching, Working(server, lane) as working:
        topic = unique()
        watching.client.put(topic)
        watched = watching.follow(topic)
        at_work = working.open(working.queue())
        refused = watching.attempt("wid_AAAAAAAAAAAAAAAAAAAAAA")
        ids = [stream.headers[NAME] for stream in (watched, at_work, refused)]
        assert all(OURS.fullmatch(id) for id in ids), ids
        assert len(set(ids)) == 3
        named = watching.get(f"/v0/watch/{watching.create(topic)['wid']}", ("X-Request-Id", "my-stream"))
        assert (named.status, named.headers[NAME]) == (200, "my-stream")


def test_handshakes_have_one(server: Server) -> None:
    with RawSocket(server.port, upgraded=False) as first, RawSocket(server.port, upgraded=False) as second:
        ids = [socket.upgrade(handshake())[NAME] for socket in (first, second)]
        assert all(OURS.fullmatch(id) for id in ids), ids
        assert len(set(ids)) == 2
        first.ping()
    with RawSocket(server.port, upgraded=False) as named:
        assert named.upgrade(own(handshake(), "my-socket"))[NAME] == "my-socket"
        named.ping()


def test_handshakes_over_http2_have_one(server: Server) -> None:
    with H2Sockets(server.port) as wire:
        sockets = [wire.socket(), wire.socket(), wire.connect(path="/v0/nothing"), wire.connect(version="12")]
        assert [socket.status() for socket in sockets] == [200, 200, 404, 426]
        ids = [socket.stream.headers[NAME] for socket in sockets]
        assert all(OURS.fullmatch(id) for id in ids), ids
        assert len(set(ids)) == 4
        named = wire.socket((NAME, "my-socket"))
        assert named.stream.headers[NAME] == "my-socket"


# --- one of its own ----------------------------------------------------------------------------------


def test_all_of_a_pipeline_are_different(wire: Wire, topic: str) -> None:
    """Plain appends, which travel together, and others between them."""
    others = [raw for kind, (raw, _) in KINDS.items() if kind not in ("closing", "unpacked") and "1.0" not in kind]
    others = [raw for raw in others if not raw.startswith(b"HEAD")]
    many = [append_request(topic, str(number)) for number in range(100)]
    for at, raw in enumerate(others):
        many.insert(3 * at, raw)
    ids = []
    for at in range(0, len(many), 40):
        wire.send(b"".join(many[at : at + 40]))
        for _ in many[at : at + 40]:
            _, headers = wire.head()
            wire.body(headers)
            ids.append(headers[NAME])
    assert len(set(ids)) == len(many)
    assert all(OURS.fullmatch(id) for id in ids), ids


def test_all_streams_of_a_connection_are_different(server: Server, topic: str) -> None:
    with H2Wire(server.port) as wire:
        raws = [append_request(topic)] * 40 + [raw for raw, _ in KINDS.values() if b"HTTP/1.0" not in raw]
        numbers = [open2(wire, raw) for raw in raws]
        ids = [wire.finish(number).headers[NAME] for number in numbers]
    assert len(set(ids)) == len(raws)
    assert all(OURS.fullmatch(id) for id in ids), ids


def collect(server: Server, ids: list[str], stop: Callable[[], bool]) -> None:
    """Ask on one connection after the other, by both lanes, until told to stop."""
    while not stop():
        for lane in LANES:
            client = server.client(lane)
            try:
                for _ in range(5):
                    answer = client.append("spread", 1)
                    ids.append(answer.headers[NAME])
                    ids.append(client.get("/v0/nothing").headers[NAME])
            except Lost:  # the gateway was killed under it
                pass
            finally:
                client.close()


@pytest.mark.full
def test_no_two_gateways_and_no_two_lives_use_the_same(start_server: Callable[..., Server]) -> None:
    server = start_server(TOPICS_GATEWAYS=2, TOPICS_WAL_SHARDS=1)
    kept: list[list[str]] = [[] for _ in range(4)]
    over = threading.Event()
    with ThreadPoolExecutor(len(kept)) as pool:
        asking = [pool.submit(collect, server, ids, over.is_set) for ids in kept]

        def lives() -> set[str]:
            for each in asking:
                if each.done():
                    each.result()  # it has been told nothing yet, so it failed
            return {id.rpartition(".")[0] for ids in list(kept) for id in list(ids)}

        try:
            eventually(lambda: lives() >= {"0.1", "1.1"}, what="both gateways")
            server.signal_child("gateway-0")
            eventually(lambda: lives() >= {"0.2"}, what="its next life")
            server.signal_child("gateway-1")
            eventually(lambda: lives() >= {"1.2"}, what="the next life of the other")
        finally:
            over.set()
    for each in asking:
        each.result()
    ids = [id for each in kept for id in each]
    assert len(set(ids)) == len(ids)
    assert lives() == {"0.1", "0.2", "1.1", "1.2"}


# --- the client's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("id", VALID, ids=lambda id: id[:20])
def test_a_name_comes_back_as_it_was(api: Client, topic: str, id: str) -> None:
    headers = {"X-Request-Id": id}
    for answer in (
        api.send("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]}, headers=headers),
        api.send("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]}, headers=headers),  # again, the same bytes
        api.send("GET", f"/v0/topics/{topic}", headers=headers),
        api.send("GET", "/v0/nothing", headers=headers),
        api.send("POST", f"/v0/topics/{topic}", {"records": 7}, headers=headers),
    ):
        assert answer.headers[NAME] == id
    without = api.get(f"/v0/topics/{topic}")
    assert without.headers[NAME] != id
    assert OURS.fullmatch(without.headers[NAME])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "created"])
def test_every_answer_has_the_clients_own(server: Server, kind: str) -> None:
    raw, status = KINDS[kind]
    got, headers = ask1(server, own(raw, f"mine/{status}"))
    assert (got, headers[NAME]) == (status, f"mine/{status}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "created" and "1.0" not in kind])
def test_every_answer_over_http2_has_the_clients_own(server: Server, kind: str) -> None:
    raw, status = KINDS[kind]
    got, headers = ask2(server, raw, (NAME, f"mine/{status}"))
    assert (got, headers[NAME]) == (status, f"mine/{status}")


@pytest.mark.parametrize("kind", ["too large", "another expectation", "a long target"])
def test_who_was_understood_is_refused_by_name(server: Server, kind: str) -> None:
    """The head could be read, though what follows it can't be."""
    raw, status = FATAL[kind]
    got, headers = ask1(server, own(raw, "mine"))
    assert (got, headers[NAME]) == (status, "mine")


def test_who_takes_too_long_is_refused_by_name(small_server: Server) -> None:
    got, headers = ask1(small_server, own(request("POST", "/v0/topics/x", BODY)[:-4], "mine"))
    assert (got, headers[NAME]) == (408, "mine")


def test_names_of_a_pipeline_are_each_ones_own(wire: Wire, topic: str) -> None:
    raw = append_request(topic)
    wire.send(*[part for n in range(20) for part in (own(raw, f"n{n}"), raw)])
    ids = [wire.answer().headers[NAME] for _ in range(40)]
    assert ids[::2] == [f"n{n}" for n in range(20)]
    assert all(OURS.fullmatch(id) for id in ids[1::2])
    assert len(set(ids)) == 40


def test_the_headers_name_is_of_any_case(wire: Wire) -> None:
    for name in ("X-Request-Id", "x-request-id", "X-REQUEST-ID", "x-ReQuEsT-iD"):
        assert wire.ask(request(headers=(f"{name}: mine",))).headers[NAME] == "mine"
    assert wire.ask(request(headers=("X-Request-Id: \t mine \t ",))).headers[NAME] == "mine"


# --- what is not taken -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INVALID)
def test_another_name_is_passed_over(server: Server, kind: str) -> None:
    """The request is served like one without a name, unless HTTP itself forbids such a header."""
    for raw, status in ((append_request("ids-invalid"), (200, 201)), (request(path="/v0/nothing"), (404,))):
        got, headers = ask1(server, own(raw, INVALID[kind]))
        assert got in status or (kind in ("control", "delete", "escape") and got == 400), got
        assert OURS.fullmatch(headers[NAME]), headers
        assert "set-cookie" not in headers


@pytest.mark.parametrize("kind", INVALID)
def test_another_name_over_http2_is_passed_over(server: Server, kind: str) -> None:
    got = ask_freely(server, INVALID[kind])
    if got is None:
        assert kind in ("control", "delete", "escape", "tab"), "only what HTTP/2 forbids may end the connection"
        return
    status, headers = got
    assert status == "404"
    assert [value for name, value in headers if name == NAME.encode()] != [INVALID[kind]]
    assert all(OURS.fullmatch(value.decode()) for name, value in headers if name == NAME.encode())
    assert sum(name == NAME.encode() for name, _ in headers) == 1


def ask_freely(server: Server, *values: bytes) -> tuple[str, list[tuple[bytes, bytes]]] | None:
    """With these as X-Request-Id, whatever they are; None: the server would not have such a request."""
    with H2Wire(server.port) as wire:
        config = h2.config.H2Configuration(
            header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        raw = h2.connection.H2Connection(config)
        raw.initiate_connection()
        raw.data_to_send()  # the preface is out already
        pseudo = [
            (b":method", b"GET"),
            (b":path", b"/v0/nothing"),
            (b":scheme", b"http"),
            (b":authority", b"localhost"),
        ]
        raw.send_headers(1, [*pseudo, *((NAME.encode(), value) for value in values)], end_stream=True)
        wire.sock.sendall(raw.data_to_send())
        while True:
            data = wire.sock.recv(1 << 16)
            if not data:
                return None
            for event in raw.receive_data(data):
                if type(event).__name__ == "ResponseReceived":
                    headers = [(bytes(name), bytes(value)) for name, value in event.headers]  # type: ignore[attr-defined]
                    return dict(headers)[b":status"].decode(), headers
                if type(event).__name__ in ("StreamReset", "ConnectionTerminated"):
                    return None


def test_two_names_are_none(server: Server) -> None:
    _, headers = ask1(server, own(own(request(), "one"), "two"))
    assert OURS.fullmatch(headers[NAME])
    _, headers = ask1(server, own(own(request(), "one"), "one"))
    assert OURS.fullmatch(headers[NAME])
    got = ask_freely(server, b"one", b"two")
    assert got is not None
    assert [OURS.fullmatch(value.decode()) is not None for name, value in got[1] if name == NAME.encode()] == [True]


SPLITS = [
    b"a\r\nSet-Cookie: split=1",
    b"a\nSet-Cookie: split=1",
    b"a\rSet-Cookie: split=1",
    b"a\r\n\r\nHTTP/1.1 200 OK\r\nSet-Cookie: split=1\r\nContent-Length: 0\r\n\r\n",
    b"a\x00\r\nSet-Cookie: split=1",
    b"a\r\n Set-Cookie: split=1",
    b"a\xc4\x8d\xc4\x8aSet-Cookie: split=1",  # become CR LF where somebody cuts code points to bytes
    b"a\xe5\x98\x8d\xe5\x98\x8aSet-Cookie: split=1",
]


@pytest.mark.parametrize("value", SPLITS)
def test_nobody_splits_an_answer(server: Server, value: bytes) -> None:
    """All that comes back is answers, and none has what was smuggled in."""
    with Wire(server.port) as wire:
        wire.send(own(request(path="/v0/nothing"), value))
        wire.half_close()
        received = b""
        while data := wire.sock.recv(1 << 16):
            received += data
    assert b"split" not in received.lower()
    starts = re.findall(rb"^HTTP/1\.1 \d{3} ", received, re.M)
    ids = re.findall(rb"^X-Request-Id: (.*)\r$", received, re.M)
    assert len(starts) == len(ids) >= 1
    assert all(id == b"a" or OURS.fullmatch(id.decode()) for id in ids), ids


@pytest.mark.parametrize("value", SPLITS)
def test_nobody_splits_an_answer_over_http2(server: Server, value: bytes) -> None:
    got = ask_freely(server, value)
    if got is not None:
        assert not [pair for pair in got[1] if b"split" in pair[0] + pair[1] or b"\r" in pair[1] or b"\n" in pair[1]]
        assert b"set-cookie" not in dict(got[1])
    with H2Wire(server.port) as wire:  # and it still serves
        assert wire.finish(wire.ask("GET", "/v0/health")).headers[":status"] == "200"


# --- from the answer to the logs ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("talkative")
    server = Server(folder / "data", log=folder / "server.log", TOPICS_LOG="debug", TOPICS_GATEWAYS=2, TOPICS_ELASTIC=0)
    with closing(server):
        server.wait_ready()
        yield server


def followed(server: Server, id: str, *processes: str) -> None:
    """A gateway's line and those of all processes that had to do with it, under one id."""

    def there() -> bool:
        lines = lines_of(server, id=id)
        found = {line["process"] for line in lines}
        return f"gateway-{id.partition('.')[0]}" in found and found >= set(processes)

    eventually(there, every_s=0.1, what=f"{id} in the logs of a gateway and {processes}")


@pytest.mark.full
@pytest.mark.parametrize("lane", LANES)
def test_a_request_can_be_followed_to_its_shard(talkative: Server, lane: Lane) -> None:
    with talkative.client(lane) as api:
        for shard in (0, 1):
            name = name_on(shard, f"follow-{lane}")
            answers = [
                api.put(name),
                api.append(name, 1),
                api.append(name, 1, idempotency_key="k"),
                api.diff(name),
                api.state(name),
                api.delete(name, before_seq=1),
            ]
            for answer in answers:
                followed(talkative, answer.headers[NAME], f"shard-{shard}")
        followed(talkative, api.list().headers[NAME], "shard-0", "shard-1")


@pytest.mark.parametrize("lane", LANES)
def test_a_request_can_be_followed_to_queue_and_router(talkative: Server, lane: Lane) -> None:
    with talkative.client(lane) as api:
        queue = make_queue(api)
        queue.produce(1, 2)
        claimed = queue.claim(2)
        followed(talkative, claimed.headers[NAME], "queue")
        seqs = [job["$seq"] for job in claimed["claimed"]]
        leases = [job["lease_id"] for job in claimed["claimed"]]
        followed(talkative, queue.ack(seqs, lease_ids=leases).headers[NAME], "queue")
        router = api.send("PUT", f"/v0/routers/{unique()}", {"source": unique(), "dest": unique()})
        followed(talkative, router.headers[NAME], "router")
        followed(talkative, api.get("/v0/routers").headers[NAME], "router")


@pytest.mark.parametrize("lane", LANES)
def test_a_named_request_can_be_followed_too(talkative: Server, lane: Lane) -> None:
    """The gateway's line has both names; further on ours is used."""
    mine = unique(f"mine-{lane}")
    with talkative.client(lane) as api:
        name = name_on(1, "named")
        api.put(name)
        answer = api.send("GET", f"/v0/topics/{name}", headers={"X-Request-Id": mine})
        assert answer.headers[NAME] == mine

        def found() -> list[str]:
            return [line["id"] for line in lines_of(talkative, request_id=mine)]

        (ours,) = eventually(found, every_s=0.1, what="the line with both names")
        assert OURS.fullmatch(ours)
        followed(talkative, ours, "shard-1")


def test_appends_that_travel_together_can_be_followed(talkative: Server) -> None:
    """The shard has a line for each of them, or one for all that says how many follow its id."""
    name = name_on(0, "together")
    with talkative.client() as api:
        api.put(name)
    with Wire(talkative.port) as wire:
        wire.send(b"".join([append_request(name)] * 30))
        ids = {wire.answer().headers[NAME] for _ in range(30)}

    def missing() -> set[str]:
        taken: set[str] = set()
        for line in lines_of(talkative, process="shard-0", event="taken"):
            life, _, number = line["id"].rpartition(".")
            first = int(number, 16)
            taken |= {f"{life}.{first + at:x}" for at in range(int(line.get("requests", 1)))}
        return ids - taken

    eventually(lambda: not missing(), every_s=0.1, what="all of them in the log of their shard")


def test_what_a_log_shows_of_a_request_is_what_it_was(talkative: Server) -> None:
    with talkative.client() as api:
        missing = api.get("/v0/topics/follow-missing")
        refused = api.get("/v0/nothing")
    for answer, path in ((missing, "/v0/topics/follow-missing"), (refused, "/v0/nothing")):
        id = answer.headers[NAME]
        line = eventually(
            lambda id=id: having(lines_of(talkative), id=id, event="request"), within_s=10, every_s=0.1, what=id
        )[0]
        assert (line["method"], line["path"], line["status"]) == ("GET", path, "404")
