"""How many requests of one key may be under way at a time: exact over all gateways, free again however a request ends.

Long polls are what stays under way for as long as a test likes. That they have arrived is known from answers to
requests that were sent after them to the same gateway, with another key: one of the same key would need a place itself,
perhaps that of a poll. What overlapped is measured by the client's own clock: a poll that was held for `w` was under
way at least from `w` before its answer came until `w` after it was sent.
"""

from __future__ import annotations

import json
import random
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .client import LANES, Answer, Lane, Lost
from .h2wire import H2Wire
from .h2ws import H2Sockets
from .keyed import Keyed, KeyedWatching, KeyedWorking, bearer
from .racing import (
    Racers,
    all_at_once,
    assert_capped,
    fresh,
    insist,
    kill,
    kill_and_wait,
    processes,
    split,
    still,
    until,
    wait_ready_everywhere,
    wire_to,
)
from .server import Server, eventually
from .sockets import Socket, handshake
from .wire import Wire, chunked, request

pytestmark = pytest.mark.e2e

MOST = 4
LONG_MS = 25_000
ONE, TWO, READER, OUTSIDER = "key-one", "key-two", "key-reader", "key-out"
ENTRIES = f"{ONE},{TWO},{READER}:read:,{OUTSIDER}:read+write+delete+admin:out."
QUIET = "quiet"  # nobody writes to it
QUEUE = "queue"
Start = Callable[..., Server]


def _serve(factory: pytest.TempPathFactory, name: str, **environ: object) -> Iterator[Server]:
    folder = factory.mktemp(name)
    given = {
        "TOPICS_API_KEYS": ENTRIES,
        "TOPICS_MAX_INFLIGHT_PER_KEY": MOST,
        "TOPICS_ELASTIC": 0,  # what stands still for a moment is not under pressure
        **environ,
    }
    server = Server(folder / "data", log=folder / "server.log", **given)
    try:
        wait_ready_everywhere(server)
        with Keyed(server.port, "http1", TWO) as api:
            assert api.put(QUIET).status == 201
            assert api.put(QUEUE, type="queue").status == 201
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory, "single")


@pytest.fixture(scope="module")
def triple(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory, "triple", TOPICS_GATEWAYS=3)


@pytest.fixture(params=["single", "triple"])
def counted(request: pytest.FixtureRequest) -> Server:
    """One gateway, and then three of them."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(autouse=True)
def _all_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that a test did keeps a place."""
    yield
    for name in ("single", "triple"):
        if name in request.fixturenames or ("counted" in request.fixturenames and f"[{name}" in request.node.name):
            assert_all_free(request.getfixturevalue(name))


# --- requests that stay under way --------------------------------------------------------------------


def key_line(secret: str = ONE) -> str:
    return f"Authorization: Bearer {secret}"


def key_pair(secret: str = ONE) -> tuple[str, str]:
    return "authorization", f"Bearer {secret}"


def poll_body(wait_ms: int, from_seq: int = 0) -> bytes:
    """Of answers of the usual size a connection waits for four at a time: the fifth poll would not be looked at."""
    return json.dumps({"from_seq": from_seq, "wait_ms": wait_ms, "max_batch_bytes": 65_536}).encode()


def poll_request(topic: str = QUIET, wait_ms: int = LONG_MS, secret: str = ONE) -> bytes:
    return request("POST", f"/v0/topics/{topic}/diff", poll_body(wait_ms), headers=(key_line(secret),))


class Held:
    """A long poll over a connection of its own, or as one stream of an HTTP/2 connection."""

    def __init__(self, wire: Wire | H2Wire, topic: str, secret: str = ONE, wait_ms: int = LONG_MS) -> None:
        self.wire = wire
        self.topic = topic
        self._number = 0
        if isinstance(wire, Wire):
            wire.send(poll_request(topic, wait_ms, secret))
        else:
            headers = (key_pair(secret), ("content-type", "application/json"))
            self._number = wire.open("POST", f"/v0/topics/{topic}/diff", *headers)
            wire.send(self._number, poll_body(wait_ms), end=True)

    def ring(self) -> None:
        """Come back when the server has taken it in: later streams of the connection have been answered."""
        if isinstance(self.wire, H2Wire):
            for _ in range(2):
                self.wire.finish(self.wire.open("GET", f"/v0/topics/{QUIET}", key_pair(TWO), end=True))

    def is_silent(self) -> bool:
        """Neither answered nor refused so far."""
        if isinstance(self.wire, Wire):
            return not select.select([self.wire.sock], [], [], 0)[0]
        return self.wire.is_alive() and not self.wire.streams[self._number].headers

    def answer(self) -> Answer:
        if isinstance(self.wire, Wire):
            return self.wire.answer()
        stream = self.wire.finish(self._number)
        return Answer(status=int(stream.headers[":status"]), headers=stream.headers, raw=stream.body)

    def end(self, how: str) -> None:
        if how == "cancel":
            assert isinstance(self.wire, H2Wire)
            self.wire.cancel(self._number)
        elif how == "reset":
            assert isinstance(self.wire, Wire)
            self.wire.reset()
        else:
            self.wire.close()


class Holding:
    """Polls of one key on one server, each with a topic of its own, so that each can be let go by itself."""

    def __init__(self, server: Server, secret: str = ONE, lane: Lane = "http1", *, wait_ms: int = LONG_MS) -> None:
        self.server = server
        self.secret = secret
        self.lane = lane
        self.wait_ms = wait_ms
        self.held: list[Held] = []
        self._released: list[Held] = []
        self._other = Keyed(server.port, "http1", TWO if secret != TWO else ONE)

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *error: object) -> None:
        self._other.close()
        for held in self.held:
            held.end("reset" if isinstance(held.wire, Wire) else "close")
        for released in self._released:
            released.end("close")

    def attempt(self, gateway: str | None = None) -> Held:
        """One more, whatever is said to it."""
        topic = fresh("poll")
        assert self._other.put(topic).status == 201
        if self.lane == "http1":
            wire: Wire | H2Wire = wire_to(self.server, gateway) if gateway else Wire(self.server.port)
        else:
            wire = H2Wire(self.server.port)
        self.held.append(Held(wire, topic, self.secret, self.wait_ms))
        return self.held[-1]

    def fill(self, count: int = MOST, *, gateways: list[str] | None = None) -> list[Held]:
        """So many more, after which all places are taken."""
        held = [self.attempt(gateways[at % len(gateways)] if gateways else None) for at in range(count)]
        settle(self.server, *held)
        assert_refused(ask(self.server, self.secret))
        for one in held:
            assert one.is_silent(), one.answer()
        return held

    def release(self, one: Held) -> Answer:
        """Write to its topic; what its client is told."""
        key = fresh("key")
        assert insist(lambda: self._other.append(one.topic, "wake up", idempotency_key=key)).status == 200
        answer = one.answer()
        assert (answer.status, answer.data) == (200, ["wake up"])
        self.let_go(one)
        return answer

    def let_go(self, one: Held) -> None:
        """It has been answered; its connection stays until the end."""
        self.held.remove(one)
        self._released.append(one)


def ask(server: Server, secret: str | None = ONE, lane: Lane = "http1") -> Answer:
    with Keyed(server.port, lane, secret) as api:
        return api.state(QUIET)


def assert_refused(answer: Answer) -> None:
    assert_capped(answer, "max_inflight_per_key", MOST)


_bells: dict[tuple[int, int], Wire] = {}  # by port and gateway's pid


def settle(server: Server, *held: Held) -> None:
    """Come back when all that was sent has arrived: every gateway has answered what it was asked after that."""
    for one in held:
        one.ring()
    asked = request("GET", f"/v0/topics/{QUIET}", headers=(key_line(TWO),))
    for name in processes(server, "gateway"):
        place = (server.port, server.pid_of(name))
        if place not in _bells:
            _bells[place] = wire_to(server, name)
        for _ in range(2):
            assert _bells[place].ask(asked).status == 200


def assert_full(server: Server, *held: Held) -> None:
    settle(server, *held)
    assert_refused(ask(server))


def assert_all_free(server: Server, secret: str = ONE) -> None:
    """As soon as all that has ended is known to have: by taking every place."""

    def every_place() -> bool:
        with ExitStack() as stack:
            wires = [stack.enter_context(Wire(server.port)) for _ in range(MOST)]
            for wire in wires:
                wire.send(poll_request(QUIET, 60, secret))
            return all([wire.answer().status == 200 for wire in wires])

    eventually(every_place, within_s=15, every_s=0.05, what="all places")


# --- the edge ----------------------------------------------------------------------------------------


def test_so_many_at_a_time_and_not_one_more(counted: Server, lane: Lane) -> None:
    """Through whichever gateway the next one comes, by either lane, and whatever it wants."""
    gateways = processes(counted, "gateway")
    with Holding(counted, lane=lane) as holding:
        held = holding.fill(gateways=gateways)
        before = refused_by_all(counted)
        for gateway in gateways:
            with wire_to(counted, gateway) as wire:
                for raw in _requests_of_all_kinds():
                    assert_refused(wire.ask(raw))
        for other in LANES:
            assert_refused(ask(counted, lane=other))
        kinds = len(_requests_of_all_kinds())
        assert refused_by_all(counted) - before == len(gateways) * kinds + len(LANES), "the metrics say so at once"
        for one in held:
            assert one.is_silent()
        while holding.held:
            holding.release(holding.held[0])
            assert ask(counted).status == 200, "the place was not free when the answer was there"
            if len(holding.held) == MOST - 1:
                holding.release(holding.fill(1)[0])


def refused_by_all(server: Server) -> float:
    with Keyed(server.port, "http1", TWO) as api:
        shown = api.send("GET", "/v0/metrics", headers={"Accept": "application/json"})["metrics"]
    rows = shown["topics_gateway_refusals_total"]
    return sum([float(row["value"]) for row in rows if row["budget"] == "max_inflight_per_key"])


def _requests_of_all_kinds(secret: str = ONE) -> list[bytes]:
    key = (key_line(secret),)
    records = json.dumps({"records": [{"data": 1}]}).encode()
    detailed = json.dumps({"records": [{"data": 1, "tag": "t", "meta": {"a": 1}}], "return_seqs": False}).encode()
    job = json.dumps({"node": "w", "seqs": [1]}).encode()
    return [
        request("GET", "/v0/topics", headers=key),
        request("PUT", f"/v0/topics/{fresh()}", b"{}", headers=key),
        request("POST", "/v0/topics/written", records, headers=key),
        request("POST", "/v0/topics/written", detailed, headers=key),
        request("GET", "/v0/topics/written", headers=key),
        request("POST", "/v0/topics/written/diff", b'{"from_seq":0}', headers=key),
        request("POST", "/v0/topics/written/delete", b'{"before_seq":1}', headers=key),
        request("POST", f"/v0/topics/{QUEUE}/claim", b'{"node":"w"}', headers=key),
        request("POST", f"/v0/topics/{QUEUE}/ack", job, headers=key),
        request("GET", "/v0/routers", headers=key),
        request("POST", "/v0/watch", json.dumps({"topics": {QUIET: {}}}).encode(), headers=key),
        request("DELETE", f"/v0/topics/{fresh()}", headers=key),
    ]


def test_a_refused_request_has_done_nothing(counted: Server) -> None:
    topic = fresh()
    with (
        Holding(counted) as holding,
        Keyed(counted.port, "http1", ONE) as api,
        Keyed(counted.port, "http1", TWO) as two,
    ):
        held = holding.fill()
        assert_refused(api.append(topic, 1))
        assert_refused(api.append_records(QUIET, [{"data": 1, "tag": "t"}], idempotency_key="k"))
        assert_refused(api.drop(QUIET))
        assert_refused(api.put(topic))
        assert two.state(topic).status == 404
        assert two.state(QUIET)["head_seq"] == 0
        holding.release(held[0])
        assert api.append(topic, 1)["created"] is True  # by the same connection, which goes on
        again = api.append_records(topic, [{"data": 1}], idempotency_key="k")
        assert again["deduped"] is False


def test_every_kind_of_request_gives_its_place_back(counted: Server) -> None:
    """Successes, and refusals of every kind, more of them than there are places."""
    key = (key_line(),)
    bad = [
        request("GET", "/v0/topics/absent", headers=key),
        request("GET", "/v0/nothing", headers=key),
        request("PATCH", "/v0/topics", headers=key),
        request("POST", f"/v0/topics/{QUIET}", b"{", headers=key),
        request("POST", f"/v0/topics/{QUIET}", b'{"records":[]}', headers=key),
        request("PUT", "/v0/topics/!", b"{}", headers=key),
        request("GET", "/v0/ws", headers=key),
        request("GET", "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA", headers=key),
        request("GET", f"/v0/topics/{QUIET}/work?node=w", headers=key),
        request("POST", "/v0/watch", b'{"topics":{"absent":{}}}', headers=key),
        request("POST", f"/v0/topics/{QUIET}/claim", b'{"node":"w"}', headers=key),
        request("PUT", "/v0/topics/in", b"{}", headers=(key_line(READER),)),
        request("PUT", "/v0/topics/in", b"{}", headers=(key_line(OUTSIDER),)),
        request("POST", f"/v0/topics/{QUIET}", b"no gzip", headers=(*key, "Content-Encoding: gzip")),
        request("POST", f"/v0/topics/{QUIET}/diff", b'{"from_seq":"x"}', headers=key),
    ]
    with Wire(counted.port) as wire:
        for raw in [*bad, *_requests_of_all_kinds()]:
            for _ in range(MOST + 1):
                assert wire.ask(raw).status != 429, raw
    for raw in bad:
        with Wire(counted.port) as wire:  # and with the connection's end
            assert wire.ask(raw.replace(b"Host:", b"Connection: close\r\nHost:")).status != 429
    assert_all_free(counted)
    assert_all_free(counted, READER)


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One request at a time, whichever of three gateways it comes to."""
    yield from _serve(tmp_path_factory, "lonely", TOPICS_GATEWAYS=3, TOPICS_MAX_INFLIGHT_PER_KEY=1)


@pytest.mark.full
def test_whoever_waits_for_each_answer_is_never_refused(lonely: Server) -> None:
    """One at a time is enough for a client that does one thing at a time, wherever it goes next."""
    kinds = _requests_of_all_kinds()
    with ExitStack() as stack:
        wires = [stack.enter_context(wire_to(lonely, name)) for name in processes(lonely, "gateway")]
        assert wires[0].ask(kinds[2]).status == 201
        for number in range(1_500):
            answer = wires[number % len(wires)].ask(kinds[number % len(kinds)])
            assert answer.status in (200, 201), f"after {number}: {answer}"


@pytest.mark.full
def test_whoever_waits_for_each_answer_is_never_refused_over_http2(lonely: Server) -> None:
    """Nor does it matter which connection and which lane the next request takes."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Keyed(lonely.port, LANES[at % 4 != 0], ONE)) for at in range(8)]
        for number in range(400):
            answer = clients[number % len(clients)].append("h2", number)
            assert answer.status in (200, 201), f"after {number}: {answer}"


def test_both_lanes_count_together(counted: Server) -> None:
    with Holding(counted, lane="http1") as one, Holding(counted, lane="http2") as two:
        settle(counted, *[(one, two)[at % 2].attempt() for at in range(MOST - 1)])
        last = two.fill(1)
        for lane in LANES:
            assert_refused(ask(counted, lane=lane))
        two.release(last[0])
        assert ask(counted).status == 200


# --- whose ---------------------------------------------------------------------------------------------


def test_each_key_has_its_own(counted: Server, lane: Lane) -> None:
    with Holding(counted, ONE, lane) as one, Holding(counted, READER, lane) as reader:
        held = one.fill()
        for secret in (TWO, READER):
            for _ in range(3 * MOST):
                assert ask(counted, secret).status == 200
        reader.fill()
        assert ask(counted, TWO).status == 200
        for secret in (ONE, READER):
            assert_refused(ask(counted, secret))
        one.release(held[0])
        assert ask(counted, ONE).status == 200
        assert_refused(ask(counted, READER))


def test_what_has_no_key_is_not_counted(counted: Server, lane: Lane) -> None:
    """Probes are answered, and strangers are told that they are strangers, while a key has no place left."""
    with Holding(counted, lane=lane) as holding:
        holding.fill()
        with Keyed(counted.port, lane, None) as nobody:
            for path in ("/v0/health", "/health", "/healthz", "/v0/ready", "/ready", "/readyz"):
                for _ in range(MOST + 1):
                    assert nobody.get(path).status == 200
            for _ in range(MOST + 1):
                assert nobody.list().refusal == (401, "unauthorized")
        for _ in range(MOST + 1):
            assert ask(counted, "unknown", lane).refusal == (401, "unauthorized")
        assert_refused(ask(counted, lane=lane))


@pytest.mark.full
def test_without_keys_there_is_no_such_cap(start_server: Start) -> None:
    server = start_server(TOPICS_MAX_INFLIGHT_PER_KEY=2, TOPICS_GATEWAYS=2)
    _hold_many(server, 12, None)


@pytest.mark.full
def test_zero_is_no_cap(start_server: Start) -> None:
    server = start_server(TOPICS_MAX_INFLIGHT_PER_KEY=0, TOPICS_GATEWAYS=2, TOPICS_API_KEYS=ENTRIES)
    _hold_many(server, 40, ONE)


def _hold_many(server: Server, count: int, secret: str | None) -> None:
    """All of them are under way at the same time: none is answered before the topic is written to."""
    with ExitStack() as stack:
        api = stack.enter_context(Keyed(server.port, "http1", secret))
        api.put(QUIET)
        wires = [stack.enter_context(Wire(server.port)) for _ in range(count)]
        headers = tuple(f"{name}: {value}" for name, value in bearer(secret).items())
        for wire in wires:
            wire.send(request("POST", f"/v0/topics/{QUIET}/diff", poll_body(LONG_MS), headers=headers))
        for _ in range(20):
            assert api.state(QUIET).status == 200
        assert not select.select([wire.sock for wire in wires], [], [], 0.2)[0]
        api.append(QUIET, "now")
        assert [wire.answer().status for wire in wires] == [200] * count


# --- several on one connection -------------------------------------------------------------------------


def test_requests_in_one_go_count_one_by_one(counted: Server) -> None:
    """Answers keep their order, so the refusals are told when those before them have been answered."""
    more = 3
    with Wire(counted.port) as wire, Keyed(counted.port, "http1", TWO) as two:
        topic = fresh("poll")
        two.put(topic)
        wire.send(poll_request(topic) * (MOST + more))
        assert_full(counted)
        wire.assert_silent(0.05)
        two.append(topic, "wake up")
        answers = [wire.answer() for _ in range(MOST + more)]
        assert [answer.status for answer in answers] == [200] * MOST + [429] * more
        for answer in answers[MOST:]:
            assert_refused(answer)
        assert wire.ask(poll_request(topic)).data == ["wake up"]  # the connection goes on


@pytest.mark.parametrize("detailed", [False, True])
def test_appends_in_one_go_are_written_if_they_are_not_refused(counted: Server, detailed: bool) -> None:
    count = 3 * MOST
    topic = fresh()
    with Wire(counted.port) as wire, Keyed(counted.port, "http1", TWO) as two:
        two.put(topic)
        for number in range(5):
            records = [
                json.dumps({"records": [{"data": at, **({"tag": "t"} if detailed else {})}]}).encode()
                for at in range(count)
            ]
            wire.send(b"".join(request("POST", f"/v0/topics/{topic}", body, headers=(key_line(),)) for body in records))
            answers = [wire.answer() for _ in range(count)]
            passed, _ = split(answers, "max_inflight_per_key", MOST)
            assert [answer.status for answer in answers[:MOST]] == [200] * MOST
            written = [at for at, answer in enumerate(answers) if answer.status == 200]
            assert two.diff(topic, limit=1_000).data == written
            assert len(passed) == len(written), number
            two.delete(topic, before_seq=10**9)


def test_an_answer_that_waits_for_its_turn_keeps_its_place(counted: Server) -> None:
    """Behind a poll that is held, answered but not handed over; with its connection all of them are free."""
    with Wire(counted.port) as wire:
        asked = request("GET", f"/v0/topics/{QUIET}", headers=(key_line(),))
        wire.send(poll_request() + asked * (MOST - 1))
        assert_full(counted)
        wire.reset()
    assert_all_free(counted)


def test_streams_of_one_connection_count_one_by_one(counted: Server) -> None:
    """Over HTTP/2 nobody has to wait for those before: the refusals come at once."""
    with H2Wire(counted.port) as wire, Keyed(counted.port, "http1", TWO) as two:
        topic = fresh("poll")
        two.put(topic)
        held = [Held(wire, topic) for _ in range(MOST)]
        assert_full(counted, held[-1])
        for _ in range(3):
            assert_refused(Held(wire, topic).answer())
        assert all(one.is_silent() for one in held)
        two.append(topic, "wake up")
        assert [one.answer().status for one in held] == [200] * MOST
        assert Held(wire, topic).answer().status == 200


def test_half_a_request_is_not_under_way(counted: Server, lane: Lane) -> None:
    """It counts from when it is whole; until then it may take its time."""
    body = poll_body(LONG_MS)
    with ExitStack() as stack, Holding(counted) as holding:
        if lane == "http1":
            wires = [stack.enter_context(Wire(counted.port)) for _ in range(2 * MOST)]
            for at, wire in enumerate(wires):
                raw = request("POST", f"/v0/topics/{QUIET}/diff", body, headers=(key_line(),))
                head = request(
                    "POST",
                    f"/v0/topics/{QUIET}/diff",
                    headers=(key_line(), "Content-Type: application/json", "Transfer-Encoding: chunked"),
                )
                wire.send(raw[:-1] if at % 2 else head + chunked(body)[:-4])
        else:
            wire2 = stack.enter_context(H2Wire(counted.port))
            for _ in range(2 * MOST):
                number = wire2.open(
                    "POST", f"/v0/topics/{QUIET}/diff", key_pair(), ("content-type", "application/json")
                )
                wire2.send(number, body[:-1], end=False)
            wire2.finish(wire2.ask("GET", "/v0/health"))  # it has all of them
        held = holding.fill()
        for one in held:
            holding.release(one)


# --- how a place comes back ----------------------------------------------------------------------------


@pytest.mark.full
def test_polls_whose_time_is_up_give_their_places_back(counted: Server, lane: Lane) -> None:
    with ExitStack() as stack:
        held = []
        for _ in range(MOST):
            wire: Wire | H2Wire = Wire(counted.port) if lane == "http1" else H2Wire(counted.port)
            stack.callback(wire.close)
            held.append(Held(wire, QUIET, wait_ms=4_000))
        assert_full(counted, *held)
        assert [one.answer().status for one in held] == [200] * MOST
        assert ask(counted).status == 200


@pytest.mark.parametrize(
    ("lane", "how"), [("http1", "reset"), ("http1", "close"), ("http2", "close"), ("http2", "cancel")]
)
def test_whoever_goes_gives_its_place_back(counted: Server, lane: Lane, how: str) -> None:
    """One after the other, and no more than there were."""
    with Holding(counted, lane=lane) as holding:
        holding.fill()
        for _ in range(MOST + 1):
            gone = holding.held.pop(0)
            gone.end(how)
            eventually(lambda: ask(counted).status == 200, within_s=LONG_MS / 2_000, what="a free place")
            holding.fill(1)
            assert_refused(ask(counted))
            gone.wire.close()


def test_whoever_only_stops_sending_waits_no_more(counted: Server) -> None:
    """Over HTTP/1.1 a close looks the same."""
    with Holding(counted) as holding:
        held = holding.fill()
        assert isinstance(held[0].wire, Wire)
        held[0].wire.half_close()
        assert held[0].answer().status == 200
        eventually(lambda: ask(counted).status == 200, within_s=LONG_MS / 2_000, what="a free place")


def test_a_connection_with_many_requests_gives_all_places_back(counted: Server, lane: Lane) -> None:
    for _ in range(3):
        if lane == "http1":
            with Wire(counted.port) as wire:
                wire.send(poll_request() * (MOST + 2))
                assert_full(counted)
                wire.reset()
        else:
            with H2Wire(counted.port) as wire2:
                held = [Held(wire2, QUIET) for _ in range(MOST + 2)]
                assert_full(counted, held[-1])
        assert_all_free(counted)


def test_storms_of_clients_that_give_up_leave_nothing_behind(triple: Server) -> None:
    """Some before their request is whole, some before it is answered, some with several of them."""
    chance = random.Random(7)
    for number in range(150):
        wire = Wire(triple.port)
        long_ms = LONG_MS if number % 2 else 500
        raw = poll_request(QUIET, chance.choice((0, 5, long_ms))) * chance.choice((1, 1, 3))
        wire.send(raw[: chance.choice((len(raw), len(raw), len(raw) - 1, 40))])
        if chance.random() < 0.3:
            wire.sock.settimeout(chance.random() / 100)
            try:
                wire.sock.recv(1)
            except TimeoutError:
                pass
        if number % 2:
            wire.reset()
        else:
            wire.close()
    for _ in range(30):
        with H2Wire(triple.port) as wire2:
            held = [Held(wire2, QUIET, wait_ms=chance.choice((0, 5, LONG_MS))) for _ in range(3)]
            if chance.random() < 0.5:
                held[0].end("cancel")
                held[1].end("cancel")
    assert_all_free(triple)


@pytest.fixture(scope="module")
def hardy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its processes may be killed."""
    yield from _serve(tmp_path_factory, "hardy", TOPICS_GATEWAYS=3, TOPICS_CALL_TIMEOUT_MS=1_500)


def test_the_places_of_a_dead_gateway_come_back_and_no_others(hardy: Server) -> None:
    with Holding(hardy) as doomed, Holding(hardy) as kept:
        for _ in range(MOST - 1):
            doomed.attempt("gateway-1")
        with wire_to(hardy, "gateway-0") as zero, wire_to(hardy, "gateway-2") as two:
            stay = kept.fill(1, gateways=["gateway-2"])
            asked = request("GET", f"/v0/topics/{QUIET}", headers=(key_line(),))
            assert_refused(zero.ask(asked))
            kill_and_wait(hardy, "gateway-1")
            for wire in (zero, two):
                eventually(lambda wire=wire: wire.ask(asked).status == 200, within_s=15)
            assert stay[0].is_silent()
            # Exactly what was lost: the one that stayed still counts, also for the gateway that is new.
            kept.fill(MOST - 1, gateways=["gateway-0", "gateway-1", "gateway-2"])
            for name in ("gateway-0", "gateway-1", "gateway-2"):
                with wire_to(hardy, name) as wire:
                    assert_refused(wire.ask(asked))
            while kept.held:
                kept.release(kept.held[0])
    assert_all_free(hardy)


@pytest.mark.full
def test_a_gateway_that_dies_again_and_again_leaves_nothing_behind(hardy: Server) -> None:
    for _ in range(3):
        with Holding(hardy) as doomed:
            doomed.fill(gateways=["gateway-1"])
            pid = hardy.pid_of("gateway-1")
            kill(hardy, "gateway-1")
            eventually(lambda: ask_again(hardy) == 200, within_s=15)
            eventually(lambda pid=pid: hardy.pid_of("gateway-1") != pid)
            hardy.wait_ready()
    assert_all_free(hardy)


def ask_again(server: Server) -> int:
    """A connection may have been waiting at the gateway that died."""
    try:
        return ask(server).status
    except Lost:
        return 0


def test_the_places_of_requests_to_a_dead_shard_come_back(hardy: Server) -> None:
    for victim in ("shard-0", "shard-1"):
        with Holding(hardy) as holding:
            held = holding.fill(gateways=processes(hardy, "gateway"))
            kill_and_wait(hardy, victim)
            settle(hardy)
            ended = [one for one in held if not one.is_silent()]
            for one in ended:
                assert one.answer().status == 503
                holding.let_go(one)
            if ended:
                holding.fill(len(ended))
            assert_refused(ask(hardy))
            while holding.held:
                holding.release(holding.held[0])
        assert_all_free(hardy)


def test_requests_that_a_shard_does_not_answer_give_their_places_back(hardy: Server) -> None:
    """The gateway gives them up after a while, and says so."""
    asked = request("GET", f"/v0/topics/{QUIET}", headers=(key_line(),))
    with ExitStack() as stack:
        gateways = processes(hardy, "gateway")
        wires = [stack.enter_context(wire_to(hardy, gateways[at % 3])) for at in range(MOST)]
        late = stack.enter_context(wire_to(hardy, gateways[0]))
        with still(hardy, processes(hardy, "shard")):
            for wire in wires:
                wire.send(asked)
            for name in gateways:
                with wire_to(hardy, name):
                    pass  # it has answered something that came later
            assert_refused(late.ask(asked))
            for wire in wires:
                assert wire.answer().status == 503
            late.send(asked)
            late.assert_silent(0.1)  # it has a place
        late.answer()
    assert_all_free(hardy)


# --- streams -------------------------------------------------------------------------------------------


def test_open_streams_are_not_under_way(counted: Server, lane: Lane) -> None:
    """More of them than there are places; then all places are still there, and the streams go on meanwhile."""
    topic = fresh()
    with (
        KeyedWatching(counted, lane, ONE) as watching,
        KeyedWorking(counted, lane, ONE) as working,
        Holding(counted) as holding,
        ExitStack() as stack,
    ):
        assert watching.client.put(topic).status == 201
        watched = [watching.open(watching.create(topic)) for _ in range(MOST + 1)]
        for _ in range(MOST + 1):
            working.open(QUEUE)
        if lane == "http1":
            sockets = [stack.enter_context(Socket(counted.port, **bearer(ONE))) for _ in range(MOST + 1)]
            assert all(socket.ping().op == "pong" for socket in sockets)
        else:
            wire = stack.enter_context(H2Sockets(counted.port))
            assert all(wire.socket(key_pair()).ping().op == "pong" for _ in range(MOST + 1))
        holding.fill()
        with Keyed(counted.port, "http1", TWO) as two:
            two.append(topic, "pushed")
        for stream in watched:
            stream.wait_records(topic, 1)


def test_what_a_socket_is_told_is_not_under_way(counted: Server) -> None:
    """Its commands are the stream's, also while the key has no place left."""
    topic = fresh()
    with Socket(counted.port, **bearer(ONE)) as socket, Holding(counted) as holding:
        socket.publish(topic, 0)
        holding.fill()
        for number in range(1, 2 * MOST):
            assert socket.publish(topic, number)["head_seq"] == number + 1
        assert socket.subscribe(topic, tail=True).op == "subscribed"
        assert socket.ping().op == "pong"


@pytest.mark.parametrize("kind", ["watch", "token", "work", "socket"])
def test_opening_a_stream_needs_a_place_for_a_moment(counted: Server, lane: Lane, kind: str) -> None:
    """Refused like anything else while there is none, and as if nothing had been when there is one."""
    with (
        KeyedWatching(counted, lane, ONE) as watching,
        KeyedWorking(counted, lane, ONE) as working,
        Holding(counted) as holding,
    ):
        session = watching.create(QUIET)

        def attempt() -> tuple[int, Answer | None]:
            if kind == "socket":
                return _socket_attempt(counted, lane)
            if kind == "watch":
                watched = watching.attempt(session)
                return watched.status, None if watched.status == 200 else watched.answer()
            if kind == "token":
                watched = watching.get(f"/v0/watch/{session['wid']}?token={ONE}", key=None)
                return watched.status, None if watched.status == 200 else watched.answer()
            worked = working.attempt(QUEUE)
            return worked.status, None if worked.status == 200 else worked.answer()

        held = holding.fill()
        for _ in range(3):
            status, answer = attempt()
            assert answer is not None, status
            assert_refused(answer)
        holding.release(held[0])
        for _ in range(3):
            status, answer = attempt()
            assert status in (200, 101), answer
            assert ask(counted).status == 200, "an open stream keeps the place it needed to be opened"


def _socket_attempt(server: Server, lane: Lane) -> tuple[int, Answer | None]:
    if lane == "http2":
        with H2Sockets(server.port) as wire:
            opened = wire.connect(key_pair())
            status = opened.status()
            if status == 200:
                return status, None
            stream = wire.finish(opened.number)
            return status, Answer(status=status, headers=stream.headers, raw=stream.body)
    with Wire(server.port) as raw:
        raw.send(handshake()[:-2] + f"{key_line()}\r\n\r\n".encode())
        status, headers = raw.head()
        if status == 101:
            return status, None
        return status, Answer(status=status, headers=headers, raw=raw.body(headers))


# --- many at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", [None, "gateway", "shard"])
def test_a_crowd_is_never_let_in_beyond_the_cap(triple: Server, hold: str | None) -> None:
    """All polls of a topic end with the same write, so those that it wakes were under way at the same time."""
    crowd = 6 * MOST
    with Racers(triple, crowd) as racers, Keyed(triple.port, "http1", TWO) as two:
        for _ in range(6):
            topic = fresh("poll")
            two.put(topic)
            with racers.sent([poll_request(topic, 3_000) for _ in range(crowd)], hold=hold):
                pass
            settle(triple)
            refused = [wire for wire in racers.wires if select.select([wire.sock], [], [], 0)[0]]
            held = [wire for wire in racers.wires if wire not in refused]
            for wire in refused:
                assert_refused(wire.answer())
            assert len(held) <= MOST, "more at once than there may be"
            with Holding(triple) as rest:
                if len(held) < MOST:
                    rest.fill(MOST - len(held))  # where nobody races, nothing is left over
                assert_refused(ask(triple))
                two.append(topic, "wake up")
                for wire in held:
                    assert wire.answer().data == ["wake up"]


@pytest.mark.full
def test_bursts_at_all_gateways_are_never_let_in_beyond_the_cap(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two gateways take in a hundred requests each, as fast as they can, and reach the cap while both are at it."""
    wires, burst, most = 20, 10, 60
    for server in _serve(tmp_path_factory, "burst", TOPICS_GATEWAYS=2, TOPICS_MAX_INFLIGHT_PER_KEY=most):
        with Racers(server, wires) as racers, Keyed(server.port, "http1", TWO) as two:
            for number in range(25):
                topic = fresh("poll")
                two.put(topic)
                with racers.sent([poll_request(topic) * burst] * wires, hold="gateway"):
                    settle(server)
                assert_capped(ask(server), "max_inflight_per_key", most)
                two.append(topic, "wake up")
                answers = [wire.answer() for wire in racers.wires for _ in range(burst)]
                passed, _ = split(answers, "max_inflight_per_key", most)
                assert len(passed) == most, f"in round {number}"


@pytest.mark.full
@pytest.mark.parametrize("gateways", ["single", "triple"])
def test_what_comes_and_goes_never_overlaps_more_than_it_may(gateways: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(gateways)
    names = processes(server, "gateway")
    overlaps: list[tuple[float, float]] = []
    wires = [wire_to(server, names[at % len(names)]) for at in range(3 * MOST)]

    def live(seed: int) -> int:
        chance = random.Random(seed)
        refusals = 0
        with wires[seed] as wire:
            for _ in until(3.0):
                wait_s = chance.choice((10, 40, 400)) / 1_000  # the long ones overlap on a busy machine too
                sent = time.monotonic()
                answer = wire.ask(poll_request(QUIET, int(1_000 * wait_s)))
                came = time.monotonic()
                if answer.status == 200:
                    certain_s = wait_s - 0.001  # clocks are rounded
                    overlaps.append((came - certain_s, sent + certain_s))
                else:
                    assert_refused(answer)
                    refusals += 1
        return refusals

    refusals = sum(all_at_once([lambda seed=seed: live(seed) for seed in range(len(wires))]))  # type: ignore[misc]
    assert refusals, "nobody was ever refused"
    at_once = most_at_once(overlaps)
    assert at_once <= MOST, f"{at_once} requests were under way at once"
    assert at_once >= MOST - 1, "the edge was never reached"


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """The most of them that contain one instant; those that end before they begin say nothing."""
    edges = sorted(
        [(start, 1) for start, end in spans if start < end] + [(end, -1) for start, end in spans if start < end]
    )
    there = highest = 0
    for _, change in edges:
        there += change
        highest = max(highest, there)
    return highest
