"""How long a client may keep a gateway waiting, by a clock that the test moves: each state just before its deadline and
just behind it. That the gateway looks at the clock is tried in e2e/test_patience.py, of work streams in
e2e/test_work_stream.py."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator

import pytest
from queueplay import Gateway, Worker

from topics import limits
from topics.errors import ApiError
from topics.gateway.http1.chunks import ChunkDecoder
from topics.gateway.http1.connection import Connection
from topics.gateway.http1.head import Head
from topics.gateway.http1.timeouts import Patience, Verdict
from topics.settings import Settings

HEAD_MS, BODY_MS, IDLE_MS, RATE = 1_000, 2_000, 3_000, 100
DISCARD_MS = 2_000
MS = 1_000_000
Arrange = Callable[[Connection], object]


@pytest.fixture
def patience() -> Patience:
    return Patience(
        Settings(head_timeout_ms=HEAD_MS, body_timeout_ms=BODY_MS, idle_timeout_ms=IDLE_MS, min_body_rate=RATE)
    )


@pytest.fixture
def connection() -> Iterator[Connection]:
    """One that has just been accepted, at time 0."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        accepted = Connection(None, ours)
        accepted.progress_ns = 0
        yield accepted


def a_head(length: int) -> Head:
    return Head(None, None, length, True, False, False, False, None)


def is_idle(connection: Connection) -> None:
    pass


def sends_a_head(connection: Connection) -> None:
    connection.buffer = b"GET / HTTP/1.1\r\nHo"


def sends_a_body(connection: Connection) -> None:
    """Fast enough for its rate, and then nothing more."""
    connection.head = a_head(100_000)
    connection.buffer = b"x" * 10_000


def sends_a_chunked_body(connection: Connection) -> None:
    connection.head = a_head(-1)
    connection.chunks = ChunkDecoder(most=1 << 20)
    connection.buffer = b"x" * 10_000


def sends_a_large_body(connection: Connection) -> None:
    connection.head = a_head(100_000)
    connection.large, connection.missing = bytearray(), 90_000


def reads_an_answer(connection: Connection) -> None:
    """It took enough for its rate, and then nothing more."""
    connection.out = b"x" * 10
    connection.out_sent = connection.out_taken = 10_000


def is_discarded(connection: Connection) -> None:
    connection.discarding = True


def ends_its_stream(connection: Connection) -> None:
    connection.stream = object()  # type: ignore[assignment]
    connection.closing = True


@pytest.mark.parametrize(
    ("arrange", "limit_ms", "answered"),
    [
        (is_idle, IDLE_MS, False),
        (sends_a_head, HEAD_MS, True),
        (sends_a_body, BODY_MS, True),
        (sends_a_chunked_body, BODY_MS, True),
        (sends_a_large_body, BODY_MS, True),
        (reads_an_answer, BODY_MS, False),
        (is_discarded, DISCARD_MS, False),
        (ends_its_stream, limits.SLOW_CLOSE_MS, False),
    ],
)
def test_a_deadline(
    patience: Patience, connection: Connection, arrange: Arrange, limit_ms: int, answered: bool
) -> None:
    arrange(connection)
    assert patience.judge(connection, limit_ms * MS) is Verdict.WAIT
    verdict = patience.judge(connection, (limit_ms + 1) * MS)
    if answered:
        assert isinstance(verdict, ApiError)
        assert verdict.code == "request_timeout"
    else:
        assert verdict is Verdict.CLOSE


@pytest.mark.parametrize("arrange", [sends_a_body, sends_a_chunked_body, sends_a_large_body])
def test_a_body_may_take_its_time_as_long_as_it_moves(
    patience: Patience, connection: Connection, arrange: Arrange
) -> None:
    arrange(connection)
    now_ns = 90 * BODY_MS * MS // 2  # 10,000 bytes in 90 s are more than 100 a second
    connection.progress_ns = now_ns
    assert patience.judge(connection, now_ns) is Verdict.WAIT


@pytest.mark.parametrize("arrange", [sends_a_body, sends_a_chunked_body, sends_a_large_body])
def test_a_body_that_moves_slower_than_any_client_is_refused(
    patience: Patience, connection: Connection, arrange: Arrange
) -> None:
    arrange(connection)
    enough_ns = 100 * 1_000 * MS  # 10,000 bytes in 100 s: exactly the rate
    connection.progress_ns = enough_ns + MS
    assert patience.judge(connection, enough_ns) is Verdict.WAIT
    verdict = patience.judge(connection, enough_ns + MS)
    assert isinstance(verdict, ApiError)
    assert verdict.code == "request_timeout"


def test_a_reader_that_takes_less_than_any_client_is_closed(patience: Patience, connection: Connection) -> None:
    reads_an_answer(connection)
    enough_ns = 100 * 1_000 * MS
    connection.progress_ns = enough_ns
    assert patience.judge(connection, enough_ns) is Verdict.WAIT
    assert patience.judge(connection, enough_ns + MS) is Verdict.CLOSE


def test_what_a_reader_took_since_counts_as_progress(patience: Patience, connection: Connection) -> None:
    reads_an_answer(connection)
    connection.out_taken = 0  # it has taken 10,000 bytes since the last look
    assert patience.judge(connection, 3 * BODY_MS * MS) is Verdict.WAIT
    assert connection.progress_ns == 3 * BODY_MS * MS


def test_a_reader_whose_socket_took_all_it_was_given_is_judged(patience: Patience, connection: Connection) -> None:
    """The socket is full with whole answers, and the next one waits for it."""
    connection.exchanges.append(object())  # type: ignore[arg-type]
    connection.interest |= select.EPOLLOUT
    assert patience.judge(connection, BODY_MS * MS) is Verdict.WAIT
    assert patience.judge(connection, (BODY_MS + 1) * MS) is Verdict.CLOSE


@pytest.mark.parametrize("waits_for", ["an answer", "a stream"])
def test_a_client_that_waits_for_the_server_is_never_late(
    patience: Patience, connection: Connection, waits_for: str
) -> None:
    if waits_for == "an answer":
        connection.exchanges.append(object())  # type: ignore[arg-type]
    else:
        connection.stream = object()  # type: ignore[assignment]
    assert patience.judge(connection, 1_000_000 * IDLE_MS * MS) is Verdict.WAIT


# --- work streams --------------------------------------------------------------------------------------

SLOW_MS = 4_000
START_NS = 1_000 * MS


@pytest.fixture
def worker() -> Worker:
    """One that has taken all it was sent until START_NS, and reads no more."""
    gateway = Gateway("gateway-0", Settings(slow_consumer_timeout_ms=SLOW_MS), shards=1)
    gateway.streams.now_ns = START_NS
    worker = gateway.work("jobs", "w")
    worker.socket.drain()
    worker.stream.sweep(START_NS)
    worker.socket.stalled = True
    worker.socket.write(b"x" * 1_000)
    return worker


def test_a_worker_that_takes_nothing_is_told_and_let_go(worker: Worker) -> None:
    worker.stream.sweep(START_NS + SLOW_MS * MS)
    assert not worker.socket.finished
    worker.stream.sweep(START_NS + SLOW_MS * MS + 1)
    assert [error["code"] for error in worker.errors] == [408]
    assert worker.socket.finished


def test_a_worker_that_takes_something_in_time_is_let_be(worker: Worker) -> None:
    """Behind all the time, in all for much longer than the patience."""
    now_ns = START_NS
    for _ in range(20):
        now_ns += SLOW_MS * MS
        worker.socket.sent += 1
        worker.stream.sweep(now_ns)
        assert worker.socket.sent < worker.socket.written
    assert not worker.socket.finished
    worker.stream.sweep(now_ns + SLOW_MS * MS + 1)  # and from then on it does not
    assert [error["code"] for error in worker.errors] == [408]


def test_a_worker_that_has_all_is_never_late(worker: Worker) -> None:
    worker.socket.sent = worker.socket.written
    worker.stream.sweep(START_NS + 1_000 * SLOW_MS * MS)
    assert not worker.socket.finished
    worker.socket.write(b"x")  # its time begins with what it does not take
    worker.stream.sweep(START_NS + 1_001 * SLOW_MS * MS)
    assert not worker.socket.finished
    worker.stream.sweep(START_NS + 1_001 * SLOW_MS * MS + 1)
    assert worker.socket.finished
