"""Clients that dawdle: how long the server waits, for what, and what it says then.

All of them dawdle at the same time, each on a thread of its own, and the tests look at what became of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from .client import Answer, Client
from .conftest import SMALL
from .server import Server
from .wire import Wire, request

pytestmark = pytest.mark.e2e

HEAD_S, BODY_S, IDLE_S = (SMALL[f"TOPICS_{name}_TIMEOUT_MS"] / 1_000 for name in ("HEAD", "BODY", "IDLE"))
LATE_S = 6.0  # the server looks once a second, and the machine may be busy
BODY = b'{"records":[{"data":"' + b"x" * 20 + b'"}]}'
JSON_LINE = "Content-Type: application/json"
CHUNKED = (JSON_LINE, "Transfer-Encoding: chunked")


def stops_in_the_head(wire: Wire) -> Answer | None:
    return wire.ask(b"GET /v0/health HTTP/1.1\r\nHost:")


def drips_the_head(wire: Wire) -> Answer | None:
    for byte in b"GET /v0/health HTTP/1.1\r\nX-A: " + b"a" * 1_000:
        try:
            wire.send(bytes([byte]))
        except OSError:
            break
        time.sleep(0.02)
    return wire.answer()


def stops_in_the_second_head(wire: Wire) -> Answer | None:
    wire.ask(request())
    return wire.ask(b"GET /v0/health HTTP/1.1\r\nHost:")


def stops_in_a_body_with_length(wire: Wire) -> Answer | None:
    return wire.ask(request("POST", "/v0/topics/stopped", headers=(JSON_LINE, "Content-Length: 1000")), BODY)


def stops_in_a_large_body(wire: Wire) -> Answer | None:
    return wire.ask(request("POST", "/v0/topics/stopped", headers=(JSON_LINE, "Content-Length: 19000")), b"x" * 10_000)


def stops_in_a_chunked_body(wire: Wire) -> Answer | None:
    return wire.ask(request("POST", "/v0/topics/stopped", headers=CHUNKED), b'8\r\n{"record')


def drips_a_body_with_length(wire: Wire) -> Answer | None:
    wire.send(request("POST", "/v0/topics/dripped", headers=(JSON_LINE, f"Content-Length: {len(BODY)}")))
    _drip(wire, [BODY[:10], BODY[10:20], BODY[20:30], BODY[30:]])
    return wire.answer()


def drips_a_chunked_body(wire: Wire) -> Answer | None:
    wire.send(request("POST", "/v0/topics/dripped", headers=CHUNKED))
    parts = [BODY[:10], BODY[10:20], BODY[20:]]
    _drip(wire, [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"])
    return wire.answer()


def _drip(wire: Wire, parts: list[bytes]) -> None:
    """Each part well within the patience for a body, all together beyond it."""
    for part in parts:
        time.sleep(BODY_S / 2)
        wire.send(part)


def never_speaks(wire: Wire) -> Answer | None:
    wire.assert_closed()
    return None


def speaks_once(wire: Wire) -> Answer | None:
    answer = wire.ask(request())
    wire.assert_closed()
    return answer


def speaks_now_and_then(wire: Wire) -> Answer | None:
    for _ in range(4):
        answer = wire.ask(request())
        time.sleep(IDLE_S / 2)
    return answer


def waits_for_a_long_poll(wire: Wire) -> Answer | None:
    wire.ask(request("PUT", "/v0/topics/awaited", b"{}"))
    wait_ms = int(1_000 * (max(HEAD_S, BODY_S, IDLE_S) + 1.5))
    return wire.ask(request("POST", "/v0/topics/awaited/diff", b'{"wait_ms":%d}' % wait_ms))


DAWDLERS: dict[str, Callable[[Wire], Answer | None]] = {
    dawdle.__name__: dawdle
    for dawdle in (
        stops_in_the_head,
        drips_the_head,
        stops_in_the_second_head,
        stops_in_a_body_with_length,
        stops_in_a_large_body,
        stops_in_a_chunked_body,
        drips_a_body_with_length,
        drips_a_chunked_body,
        never_speaks,
        speaks_once,
        speaks_now_and_then,
        waits_for_a_long_poll,
    )
}


@pytest.fixture(scope="module")
def dawdlers(small_server: Server) -> Iterator[dict[str, Future[tuple[Answer | None, float]]]]:
    def dawdle(how: Callable[[Wire], Answer | None]) -> tuple[Answer | None, float]:
        started = time.monotonic()
        with Wire(small_server.port) as wire:
            return how(wire), time.monotonic() - started

    with ThreadPoolExecutor(len(DAWDLERS)) as pool:
        yield {name: pool.submit(dawdle, how) for name, how in DAWDLERS.items()}


Dawdlers = dict[str, Future[tuple[Answer | None, float]]]


@pytest.mark.parametrize(
    ("who", "patience_s"),
    [
        ("stops_in_the_head", HEAD_S),
        ("drips_the_head", HEAD_S),
        ("stops_in_the_second_head", HEAD_S),
        ("stops_in_a_body_with_length", BODY_S),
        ("stops_in_a_large_body", BODY_S),
        ("stops_in_a_chunked_body", BODY_S),
    ],
)
def test_half_a_request_is_answered_408(dawdlers: Dawdlers, who: str, patience_s: float) -> None:
    answer, took_s = dawdlers[who].result()
    assert answer is not None
    assert answer.refusal == (408, "request_timeout")
    assert answer.headers["connection"] == "close"
    assert patience_s - 0.1 <= took_s < patience_s + LATE_S


@pytest.mark.parametrize("who", ["drips_a_body_with_length", "drips_a_chunked_body"])
def test_a_body_that_makes_progress_is_waited_for(dawdlers: Dawdlers, who: str) -> None:
    answer, _ = dawdlers[who].result()
    assert answer is not None
    assert answer.status in (200, 201)


@pytest.mark.parametrize("who", ["never_speaks", "speaks_once"])
def test_an_idle_connection_is_closed_without_a_word(dawdlers: Dawdlers, who: str) -> None:
    _, took_s = dawdlers[who].result()
    assert IDLE_S - 0.1 <= took_s < IDLE_S + LATE_S


@pytest.mark.parametrize("who", ["speaks_now_and_then", "waits_for_a_long_poll"])
def test_whoever_speaks_or_waits_for_an_answer_is_not_idle(dawdlers: Dawdlers, who: str) -> None:
    answer, _ = dawdlers[who].result()
    assert answer is not None
    assert answer.status == 200


def test_half_a_body_was_nothing(dawdlers: Dawdlers, small_clients: dict[str, Client]) -> None:
    for future in dawdlers.values():
        future.exception()  # wait for it
    assert small_clients["http1"].state("stopped").status == 404
