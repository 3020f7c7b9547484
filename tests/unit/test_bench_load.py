"""The load generator against small responders on threads: counting, cutting, refusing."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from benchmarks import BenchFailed
from benchmarks.generators import payload
from benchmarks.generators.load import Job, Outcome, drive, drive_timed, run_apart

pytestmark = pytest.mark.full

Answer = Callable[[bytes], list[bytes]]


def http_request_end(data: bytes) -> int:
    """Where the first request in the data ends, or 0."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return 0
    length = int(data[:end].split(b"Content-Length: ")[1].split(b"\r\n")[0])
    return end + 4 + length if len(data) >= end + 4 + length else 0


class Responder:
    """Answers each whole request with the pieces that `answer` gives, one send each."""

    def __init__(self, request_end: Callable[[bytes], int], answer: Answer) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._request_end = request_end
        self._answer = answer
        self.answered = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        data = b""
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                while end := self._request_end(data):
                    request, data = data[:end], data[end:]
                    pieces = self._answer(request)
                    if not pieces:
                        return
                    with self._lock:
                        self.answered += 1
                    try:
                        for piece in pieces:
                            connection.sendall(piece)
                    except OSError:
                        return
                try:
                    chunk = connection.recv(1 << 16)
                except OSError:
                    return
                if not chunk:
                    return
                data += chunk

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in self._threads)


@contextmanager
def responder(request_end: Callable[[bytes], int], answer: Answer) -> Iterator[Responder]:
    serving = Responder(request_end, answer)
    try:
        yield serving
    finally:
        serving.close()


def ok(body: bytes = b"{}") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


REQUEST = payload.http_post("/x", b"{}")
# More than a socket takes at once, so that sending in parts is exercised too.
LARGE = payload.http_post("/x", b"x" * 8_000_000)


@pytest.mark.parametrize("run", [drive, run_apart])
def test_every_answer_is_counted_and_none_is_left_out(run: Callable[[Job], Outcome]) -> None:
    with responder(http_request_end, lambda request: [ok()]) as serving:
        outcome = run(
            Job(
                port=serving.port,
                requests=[REQUEST],
                plans=[[0]] * 4,
                replies="http",
                warm_s=0.05,
                seconds=0.2,
            )
        )
    assert outcome.acknowledged == serving.answered
    assert 0 < outcome.requests < outcome.acknowledged
    assert outcome.wall_s >= 0.2
    assert outcome.own_cpu_s > 0


def test_a_plan_is_done_once() -> None:
    with responder(http_request_end, lambda request: [ok()]) as serving:
        outcome = drive(
            Job(port=serving.port, requests=[REQUEST], plans=[[0] * 7, [0] * 5, []], replies="http", once=True)
        )
    assert outcome.acknowledged == outcome.requests == serving.answered == 12


def test_large_requests_and_answers_in_pieces() -> None:
    body = b"y" * 3_000_000  # larger than the generator's buffer
    whole = ok(body)
    pieces = [whole[:10], whole[10:40], whole[40:2_000_000], whole[2_000_000:]]
    with responder(http_request_end, lambda request: pieces) as serving:
        outcome = drive(
            Job(port=serving.port, requests=[LARGE, REQUEST], plans=[[0, 1, 0]] * 3, replies="http", once=True)
        )
    assert outcome.acknowledged == serving.answered == 9


def test_pipelines_and_sized_answers() -> None:
    def answer(request: bytes) -> list[bytes]:
        return [b"$3\r\n1-1\r\n" * request.count(b"\n")]

    with responder(lambda data: data.rfind(b"\n") + 1, answer) as serving:
        asked = {"port": serving.port, "once": True}
        outcome = drive(Job(requests=[b"q\n" * 50], plans=[[0] * 20] * 2, replies="pipeline", depth=50, **asked))
        assert outcome.acknowledged == 40
        outcome = drive(
            Job(
                requests=[b"q\n", b"q\n" * 2],
                plans=[[0, 1, 0], [1, 1, 0]],
                replies="sized",
                sizes=[9, 18],
                **asked,
            )
        )
        assert outcome.acknowledged == 6


def test_each_request_is_timed() -> None:
    with responder(http_request_end, lambda request: [ok()]) as serving:
        outcome = drive_timed(
            Job(
                port=serving.port,
                requests=[REQUEST],
                plans=[[0]],
                replies="http",
                warm_s=0.05,
                seconds=0.2,
                timed=True,
            )
        )
    assert outcome.requests == len(outcome.times_ns) > 0
    assert outcome.acknowledged == serving.answered
    assert sum(outcome.times_ns) <= outcome.wall_s * 1e9


def test_an_error_answer_ends_the_run_with_its_text() -> None:
    full = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 12\r\n\r\nstorage_full"
    with responder(http_request_end, lambda request: [full]) as serving:
        job = Job(port=serving.port, requests=[REQUEST], plans=[[0]] * 2, replies="http", seconds=5)
        with pytest.raises(BenchFailed, match="503 Service Unavailable"):
            run_apart(job)


def test_a_closed_connection_ends_the_run() -> None:
    with responder(http_request_end, lambda request: []) as serving:
        job = Job(port=serving.port, requests=[REQUEST], plans=[[0]], replies="http", seconds=5)
        with pytest.raises(BenchFailed, match="closed"):
            drive(job)
        with pytest.raises(BenchFailed, match="closed"):
            drive_timed(job)


def test_nobody_listening_is_a_failure_with_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BenchFailed, match="refused"):
        run_apart(Job(port=port, requests=[REQUEST], plans=[[0]], replies="http", seconds=1))
