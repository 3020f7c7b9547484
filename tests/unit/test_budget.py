"""The budget of bytes of clients: what is refused, what passes, and that nothing of it is ever lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from delivery import Answer, House, Pipe, WsClient, parse_answer
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import CloseCode

from topics import limits
from topics.gateway.admission.budget import Budget
from topics.gateway.http1 import server
from topics.gateway.metrics.refusals import WORDS, Refusals
from topics.settings import Settings
from topics.shm.counters import Board

KIB = limits.KIB
MOST = 400 * KIB
SMALL = limits.SMALL_BODY_BYTES


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """Hears all that has come in one turn, however slow the machine is."""
    monkeypatch.setattr(server, "_TAKE_NS", 10**12)
    monkeypatch.setattr(server, "_HEAR_NS", 10**12)
    house = House(tmp_path, max_body_bytes=200 * KIB, max_buffered_bytes=MOST, ring_bytes=1 << 20)
    yield house
    house.crash()


def held(house: House) -> int:
    return house.gateways[0].lane.budget.held


def connect(house: House, *parts: bytes) -> Pipe:
    pipe = Pipe()
    house.gateways[0].adopt(pipe)
    say(house, pipe, *parts)
    return pipe


def say(house: House, pipe: Pipe, *parts: bytes) -> None:
    for part in parts:
        pipe.inbox += part
        house.settle()


def head(size: int | None, *, more: str = "") -> bytes:
    framing = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
    return (
        f"POST /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}{framing}\r\n\r\n"
    ).encode()


HEAD = len(head(150 * KIB))


def body_of(size: int) -> bytes:
    body = b'{"records":[{"data":"%b"}]}'
    return body % (b"x" * (size - len(body) + 2))


def answer(pipe: Pipe) -> Answer | None:
    return parse_answer(bytes(pipe.took))


def status(pipe: Pipe) -> int:
    found = answer(pipe)
    return 0 if found is None else found.status


def fill(house: House) -> list[Pipe]:
    """Bodies that don't come to their end, until there is no room for one more. Their heads count."""
    pipes = [connect(house, head(150 * KIB), b"x" * (148 * KIB - HEAD)) for _ in range(2)]
    assert held(house) == 2 * 148 * KIB
    pipes.append(connect(house, head(150 * KIB), b"x" * (4 * KIB - HEAD)))
    assert house.gateways[0].lane.budget.exhausted
    return pipes


# --- what is told of it ---


def test_every_refusal_is_counted_once(house: House) -> None:
    refused: list[str] = []
    house.gateways[0].lane.budget._refused = refused.append
    fill(house)
    assert refused == []
    early = connect(house, head(150 * KIB))
    growing = connect(house, head(None), b"%x\r\n" % SMALL, b"x" * SMALL, b"\r\n%x\r\n" % SMALL, b"x" * SMALL)
    assert [status(early), status(growing)] == [429, 429]
    assert refused == ["max_buffered_bytes"] * 2
    client = WsClient(house.gateways[0])
    house.settle()
    half_a_message(client, 95 * KIB)
    house.settle()
    assert refused == ["max_buffered_bytes"] * 3


def test_the_words_of_a_row_count_and_outlive_a_process() -> None:
    board = Board.create(["gateway-0"])
    row = board.row("gateway-0")
    refusals = Refusals(row)
    for budget in WORDS:
        refusals.count(budget)
    refusals.count("open_files")
    row.clear()
    shown = [row[word] for word in WORDS.values()]
    assert shown == [2 if budget == "open_files" else 1 for budget in WORDS]
    refusals.forget()
    refusals.count("open_files")
    assert [row[word] for word in WORDS.values()] == shown, "it is another process's row now"
    board.close()


# --- the sum ---


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 120_000)), max_size=60))
def test_holders_never_have_more_than_there_is(steps: list[tuple[int, int]]) -> None:
    budget = Budget(500_000)
    holds = [0] * 10
    for who, now in steps:
        before = budget.held
        if budget.settle(holds[who], now):
            holds[who] = now
        else:
            assert now > holds[who]
            assert budget.held == before
        assert budget.held == sum(holds) <= budget.most
        large = sum(size for size in holds if size > SMALL)
        assert large <= 375_000, "a quarter is for small ones"
    for size in holds:
        budget.give(size)
    assert budget.held == 0


def test_a_body_of_the_largest_size_always_fits() -> None:
    settings = Settings(max_body_bytes=1_000_000, max_buffered_bytes=10)
    assert Budget.of(settings).take(1_000_000)


@pytest.mark.parametrize("gateways", [1, 2, 3, 16])
def test_gateways_share_what_all_may_hold(gateways: int) -> None:
    settings = Settings(max_body_bytes=1_000_000, max_buffered_bytes=64_000_000, gateways=gateways)
    assert Budget.of(settings).most == 64_000_000 // gateways


@pytest.mark.parametrize("body", [1, 1_000_000, limits.MAX_BODY_BYTES])
@pytest.mark.parametrize("gateways", [2, 16])
def test_a_share_has_room_for_one_body_of_the_largest_size(gateways: int, body: int) -> None:
    """And for what came behind it with one read; but not for two."""
    budget = Budget.of(Settings(max_body_bytes=body, max_buffered_bytes=10, gateways=gateways))
    assert budget.take(body + 256 * KIB)
    assert not budget.take(body + 256 * KIB)


# --- HTTP/1.1 ---


def test_a_large_body_finds_no_room(house: House) -> None:
    fill(house)
    pipe = connect(house, head(150 * KIB))
    refused = answer(pipe)
    assert refused is not None
    assert (refused.status, refused.headers["connection"], refused.headers["retry-after"]) == (429, "close", "1")
    assert refused.json["error"]["code"] == "throttled"
    assert refused.json["error"]["detail"] == {"limit": "max_buffered_bytes", "max": MOST}
    assert pipe.shut


def test_one_that_waits_for_100_continue_is_refused_before_that(house: House) -> None:
    fill(house)
    pipe = connect(house, head(150 * KIB, more="Expect: 100-continue\r\n"))
    assert status(pipe) == 429


def test_one_that_grows_beyond_it_is_refused_and_its_bytes_are_free(house: House) -> None:
    first, second, third = fill(house)
    before = held(house)
    say(house, third, b"x" * 100 * KIB)
    assert status(third) == 429
    assert held(house) == before - 4 * KIB
    say(house, first, b"x" * (2 * KIB + HEAD))
    assert status(first) == 400, "it came whole, and is no JSON"
    assert held(house) == 148 * KIB
    second.reset = True
    house.settle()
    assert held(house) == 0


def test_a_chunked_body_that_grows_is_refused(house: House) -> None:
    fill(house)
    pipe = connect(house, head(None), *[b"4000\r\n%b\r\n" % (b"x" * 0x4000)] * 5)
    assert status(pipe) == 429


def test_small_requests_pass(house: House) -> None:
    """Whole ones in any case, others up to the quarter that is theirs."""
    fill(house)
    whole = body_of(60 * KIB)
    assert status(connect(house, head(len(whole)) + whole)) == 201
    assert status(connect(house, head(len(whole)), whole[:1_000], whole[1_000:])) == 200
    small = b'{"records":[{"data":1}]}'
    assert status(connect(house, head(None), b"%x\r\n%b\r\n0\r\n\r\n" % (len(small), small))) == 200
    crowd = [connect(house, head(SMALL), b"x" * (SMALL - 1)) for _ in range(3)]
    assert [status(pipe) for pipe in crowd] == [0, 429, 429]
    assert held(house) <= MOST
    assert status(connect(house, head(len(whole)) + whole)) == 200
    assert status(connect(house, head(len(small)), small)) == 200


def test_bodies_that_are_not_read_count_for_nothing(house: House) -> None:
    fill(house)
    before = held(house)
    pipe = connect(house, head(150 * KIB).replace(b"/v0/topics/t", b"/v0/nothing!"), b"x" * 140 * KIB)
    assert (status(pipe), held(house)) == (0, before + HEAD)
    say(house, pipe, b"x" * 10 * KIB)
    assert status(pipe) == 404


def test_a_client_that_is_too_slow_gives_back_what_it_held(house: House) -> None:
    [first, *_] = fill(house)
    before = held(house)
    lane = house.gateways[0].lane
    lane.connections[first.fileno()].progress_ns -= 60_000_000_000
    lane.sweep()
    house.settle()
    assert status(first) == 408
    lane.sweep()
    assert held(house) == before - 148 * KIB


PIECES = [
    b"POST /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Ty",
    head(150 * KIB) + b"x" * 100,
    head(20 * KIB) + b"x" * 100,
    head(None) + b"5\r\nhel",
    head(None),
    b"8000\r\n" + b"x" * 0x8000 + b"\r\n",
    b"0\r\n\r\n",
    b"x" * 50 * KIB,
    b"x" * 200 * KIB,
    b"\r\n",
    b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
    b"GET /v0/topics/t HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40,
    head(24) + b'{"records":[{"data":1}]}',
]


@pytest.mark.parametrize("seed", range(6))
def test_after_whatever_clients_do_nothing_is_held(house: House, seed: int) -> None:
    chosen = random.Random(seed)
    lane = house.gateways[0].lane
    pipes: list[Pipe] = []
    for _ in range(150):
        pipes = [pipe for pipe in pipes if not pipe.closed]
        if not pipes or chosen.random() < 0.2:
            pipes.append(Pipe())
            house.gateways[0].adopt(pipes[-1])
        pipe = chosen.choice(pipes)
        if chosen.random() < 0.85:
            pipe.inbox += chosen.choice(PIECES)
        elif chosen.random() < 0.5:
            pipe.ended = True
        else:
            pipe.reset = True
        if chosen.random() < 0.1:
            lane.late = True
        house.settle()
        booked = [connection.booked + connection.owed for connection in lane.connections.values()]
        assert held(house) == sum(booked) <= MOST
        for connection in lane.connections.values():
            assert connection.booked == connection.held_bytes
    for pipe in pipes:
        pipe.reset = True
    house.settle()
    lane.sweep()
    assert not lane.connections
    assert held(house) == 0
    assert len(lane.guests.places) == len(lane.guests) == 0


# --- heads ---


def test_the_head_of_a_body_that_is_not_whole_is_counted_until_it_is(house: House) -> None:
    lane = house.gateways[0].lane
    long = head(24, more=f"X-Long: {'v' * 30_000}\r\n")
    pipe = connect(house, long, b'{"records"')
    connection = lane.connections[pipe.fileno()]
    assert held(house) == len(long) + 10
    say(house, pipe, b':[{"data":1}]}')
    assert status(pipe) == 201
    assert held(house) == len(connection.raw_head) == 0


def test_heads_without_room_are_refused(house: House) -> None:
    long = head(24, more=f"X-Long: {'v' * 30_000}\r\n")
    crowd = [connect(house, long, b"{") for _ in range(20)]
    found = [status(pipe) for pipe in crowd]
    fits = MOST // (len(long) + 1)
    assert found == [0] * fits + [429] * (20 - fits)
    assert held(house) == fits * (len(long) + 1)
    assert status(connect(house, head(24) + b'{"records":[{"data":1}]}')) == 201


# --- answers ---

RECORD = 20 * KIB


def store(house: House, records: int, size: int = RECORD) -> None:
    for _ in range(records):
        whole = body_of(size)
        assert status(connect(house, head(len(whole)) + whole)) in (200, 201)


def diff(**fields: int) -> bytes:
    body = msgspec.json.encode({"from_seq": 0, **fields})
    return head(len(body)).replace(b"/t HTTP", b"/t/diff HTTP") + body


def answers(pipe: Pipe) -> list[Answer]:
    found, rest = [], bytes(pipe.took)
    while rest and (one := parse_answer(rest)) is not None:
        found.append(one)
        rest = rest[rest.index(b"\r\n\r\n") + 4 + int(one.headers["content-length"]) :]
    return found


def read_to_the_end(house: House, pipe: Pipe, window: int) -> None:
    before = -1
    while before < len(pipe.took):
        before = len(pipe.took)
        pipe.window = window
        house.settle()


def test_a_client_that_does_not_read_is_asked_for_no_more(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests wait; all are answered as it reads, and then nothing is held."""
    monkeypatch.setattr(limits, "UNREAD_BYTES", 80 * KIB)
    lane = house.gateways[0].lane
    store(house, 10)
    pipe = Pipe(window=0)
    lane.adopt(pipe)  # type: ignore[arg-type]
    say(house, pipe, diff(max_batch_bytes=60 * KIB) * 12)
    connection = lane.connections[pipe.fileno()]
    assert 40 * KIB < connection.owed == connection.unread_bytes < 80 * KIB + 64 * KIB
    assert connection.exchanges or connection.out
    assert held(house) == connection.owed + connection.booked
    assert connection.booked > 0, "the rest of what it has sent"
    waits = held(house)
    say(house, pipe, b"")
    assert held(house) == waits
    read_to_the_end(house, pipe, 10 * KIB)
    assert [one.status for one in answers(pipe)] == [200] * 12
    assert held(house) == connection.owed == connection.unread == connection.booked == 0


def test_small_requests_in_a_row_are_all_taken(house: House) -> None:
    pipe = connect(house)
    small = b'{"records":[{"data":1}]}'
    say(house, pipe, (head(len(small)) + small) * 16 + diff(limit=1) * 16)
    assert [one.status for one in answers(pipe)] == [201] + [200] * 31
    assert held(house) == 0


def test_answers_without_room_are_refused_and_small_ones_are_not(house: House) -> None:
    """Large batches become small ones first; what does not fit into one of those is 429, and comes when there is
    room. The connection stays."""
    store(house, 10)
    store(house, 1, 150 * KIB)
    hoarders = []
    while not house.gateways[0].lane.budget.exhausted:
        pipe = Pipe(window=0)
        house.gateways[0].adopt(pipe)
        hoarders.append(pipe)
        say(house, pipe, diff(max_batch_bytes=165 * KIB))
    reader = connect(house)
    say(house, reader, diff())
    assert [one.status for one in answers(reader)] == [200]
    assert 1 <= len(answers(reader)[0].json["records"]) < 10
    large = connect(house, diff(from_seq=10))
    assert [one.json["error"]["detail"]["limit"] for one in answers(large)] == ["max_buffered_bytes"]
    assert not large.shut
    whole = body_of(60 * KIB)
    assert status(connect(house, head(len(whole)) + whole)) == 200
    hoarders[0].reset = True
    house.settle()
    for pipe in hoarders:
        pipe.reset = True
    house.settle()
    assert held(house) == 0
    say(house, large, diff(from_seq=10))
    assert [one.status for one in answers(large)] == [429, 200]


# --- WebSocket ---


def test_a_socket_that_does_not_take_its_answers_is_answered_no_more(house: House) -> None:
    """Frames of some bytes, each answered with many more: what has come with one read waits, too."""
    client = WsClient(house.gateways[0])
    house.settle()
    client.read()
    backlog = house.gateways[0].lane.settings.stream_backlog_bytes
    client.pipe.window = 0
    how_many = 4 * backlog // 200
    client.send(*[{"op": "x", "request_id": number} for number in range(how_many)])
    sent = len(client.pipe.inbox)
    house.settle()
    connection = client.connection
    assert not client.is_read_from
    assert backlog < connection.written - connection.sent < backlog + 64 * KIB
    assert 0 < connection.held_bytes == connection.booked < sent
    said: list[int] = []
    while len(said) < how_many:
        before = len(said)
        client.pipe.window = backlog
        house.settle()
        said += [one["request_id"] for one in client.read()]
        assert len(said) > before
    assert said == list(range(how_many))
    client.pipe.window = backlog
    client.send({"op": "ping"})
    house.settle()
    assert [one["op"] for one in client.read()] == ["pong"]
    assert client.is_read_from
    assert connection.held_bytes == connection.booked == 0


def half_a_message(client: WsClient, size: int) -> None:
    """A frame that says how long it is, and its beginning."""
    client.pipe.inbox += b"\x81\xff" + (2 * size).to_bytes(8, "big") + b"\0\0\0\0" + b"x" * size


def test_a_message_that_is_not_whole_is_counted(house: House) -> None:
    client = WsClient(house.gateways[0])
    house.settle()
    half_a_message(client, 90 * KIB)
    house.settle()
    assert 90 * KIB <= held(house) < 91 * KIB
    client.pipe.reset = True
    house.settle()
    assert held(house) == 0


def test_fragments_are_counted_until_they_are_whole(house: House) -> None:
    client = WsClient(house.gateways[0])
    house.settle()
    client.protocol.send_text(b'{"op":"ping"' + b" " * 90 * KIB, fin=False)
    client.pass_on()
    house.settle()
    assert 90 * KIB <= held(house) < 91 * KIB
    client.protocol.send_continuation(b"}", fin=True)
    client.pass_on()
    house.settle()
    assert [one["op"] for one in client.read()] == ["pong"]
    assert held(house) == 0


def test_a_message_without_room_is_answered_with_an_error_and_closed(house: House) -> None:
    clients = [WsClient(house.gateways[0]) for _ in range(4)]
    house.settle()
    for client in clients[:3]:
        half_a_message(client, 95 * KIB)
    house.settle()
    said = []
    half_a_message(clients[3], 95 * KIB)
    house.settle()
    said = clients[3].read()
    assert [(one["op"], one["code"], one["detail"]["limit"]) for one in said] == [
        ("error", "throttled", "max_buffered_bytes")
    ]
    assert clients[3].close_code == CloseCode.TRY_AGAIN_LATER
    assert 3 * 95 * KIB <= held(house) < 3 * 96 * KIB
    for client in clients:
        client.pipe.reset = True
    house.settle()
    house.gateways[0].lane.sweep()
    assert held(house) == 0
