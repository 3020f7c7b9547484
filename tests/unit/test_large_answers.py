"""Large answers as gzip: compressed a slice at a time, between the requests of others, and sent in their turn."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from delivery import Gateway, House, Pipe

from topics import limits
from topics.gateway.api.routes import Route
from topics.gateway.api.types import Request, Response
from topics.gateway.compression import Deflater
from topics.gateway.large.answer import is_large

SLICE = limits.GZIP_SLICE_BYTES
HEALTH = b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIST = b"GET /v0/topics HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n"
LARGE = bytes(number * number % 251 for number in range(5 * SLICE))


class Packer:
    """zlib's, and how much it was given at once."""

    given: list[int]

    def __init__(self, *, level: int, wbits: int) -> None:
        self._packer = zlib.compressobj(level=level, wbits=wbits)

    def compress(self, part: bytes) -> bytes:
        Packer.given.append(len(part))
        return self._packer.compress(part)

    def flush(self) -> bytes:
        return self._packer.flush()


class Zlib:
    """As compression.py sees it."""

    error = zlib.error
    decompressobj = staticmethod(zlib.decompressobj)
    compressobj = Packer


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    Packer.given = []
    monkeypatch.setattr("topics.gateway.compression.zlib", Zlib)
    return Packer.given


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.crash()


def answer_list(gateway: Gateway, handler: Callable[[Request], Any]) -> None:
    """The list of topics is this."""
    find = gateway.lane._heads._routes.find

    def found(method: str, target: str) -> Route:
        route = find(method, target)
        return route._replace(handler=handler) if target == "/v0/topics" else route

    gateway.lane._heads._routes.find = found  # type: ignore[method-assign]


def connect(gateway: Gateway, sent: bytes) -> Pipe:
    pipe = Pipe()
    pipe.inbox += sent
    gateway.adopt(pipe)
    return pipe


def answers(took: bytes | bytearray) -> list[tuple[bytes, bytes]]:
    """Heads and bodies."""
    rest, found = bytes(took), []
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        found.append((head, rest[:size]))
        rest = rest[size:]
    return found


# --- the slices ---


@pytest.mark.parametrize("size", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE, 5 * SLICE - 7])
@pytest.mark.parametrize("tail", [0, 1, SLICE + 1])
def test_no_step_compresses_more_than_a_slice(given: list[int], size: int, tail: int) -> None:
    body, end = LARGE[:size], LARGE[:tail]
    deflater, steps = Deflater(memoryview(body), end), 1
    while not (packed := deflater.step()):
        assert len(given) == steps
        steps += 1
    assert gzip.decompress(packed) == body + end
    assert max(given, default=0) <= SLICE
    assert steps == 1 + -(-size // SLICE) + -(-tail // SLICE)


@pytest.mark.parametrize(("body", "tail", "large"), [(SLICE, 0, False), (SLICE, 1, True), (SLICE + 1, 0, True)])
def test_what_one_slice_takes_is_compressed_at_once(
    house: House, given: list[int], body: int, tail: int, large: bool
) -> None:
    response = Response(200, LARGE[:body], tail=LARGE[:tail])
    assert is_large(response) == large
    [gateway] = house.gateways
    answer_list(gateway, lambda request: response)
    pipe = connect(gateway, LIST)
    gateway.round()
    assert (len(gateway.calls.slices), bool(pipe.took)) == (large, not large)
    house.settle()
    [(_, packed)] = answers(pipe.took)
    assert gzip.decompress(packed) == LARGE[:body] + LARGE[:tail]
    assert max(given) <= SLICE


# --- a round ---


def test_others_are_answered_between_slices(house: House, given: list[int]) -> None:
    [gateway] = house.gateways
    answer_list(gateway, lambda request: Response(200, LARGE, tail=b"}"))
    pipes = [connect(gateway, LIST * 4) for _ in range(2)]
    served = 0
    while gateway.calls.slices or not served:
        before = len(given)
        other = connect(gateway, HEALTH)
        gateway.round()
        assert other.took.count(b"HTTP/1.1 200") == 1
        assert sum(given[before:]) <= SLICE
        served += 1
    assert served >= 8 * 6
    house.settle()
    for pipe in pipes:
        assert [gzip.decompress(packed) for _, packed in answers(pipe.took)] == [LARGE + b"}"] * 4


def test_answers_keep_their_order(house: House) -> None:
    [gateway] = house.gateways
    answer_list(gateway, lambda request: Response(200, LARGE))
    pipe = connect(gateway, LIST + HEALTH + LIST + HEALTH)
    gateway.round()
    assert not pipe.took
    house.settle()
    heads = [head for head, _ in answers(pipe.took)]
    assert [b"Content-Encoding: gzip\r\nVary: Accept-Encoding" in head for head in heads] == [True, False, True, False]
    ids = [head.partition(b"X-Request-Id: ")[2].partition(b"\r\n")[0] for head in heads]
    assert ids == sorted(ids, key=lambda id: int(id, 16))


def test_one_that_is_the_answer_to_many_is_compressed_once(house: House, given: list[int]) -> None:
    [gateway] = house.gateways
    response = Response(200, LARGE)
    answer_list(gateway, lambda request: response)
    pipes = [connect(gateway, LIST) for _ in range(3)]
    house.settle()
    assert {gzip.decompress(body) for pipe in pipes for _, body in answers(pipe.took)} == {LARGE}
    assert sum(given) == len(LARGE)


def test_only_who_wants_gzip_waits_for_it(house: House, given: list[int]) -> None:
    [gateway] = house.gateways
    answer_list(gateway, lambda request: Response(200, LARGE))
    pipe = connect(gateway, LIST.replace(b"gzip", b"identity"))
    gateway.round()
    [(head, body)] = answers(pipe.took)
    assert (body, b"Encoding" in head, given) == (LARGE, False, [])


def test_the_head_of_a_large_answer_alone(house: House) -> None:
    [gateway] = house.gateways
    answer_list(gateway, lambda request: Response(200, LARGE))
    whole, pipe = connect(gateway, LIST), connect(gateway, LIST.replace(b"GET", b"HEAD"))
    house.settle()
    [(_, packed)] = answers(whole.took)
    assert b"Content-Length: %d\r\n\r\n" % len(packed) in pipe.took
    assert pipe.took.endswith(b"\r\n\r\n")


# --- ends ---


def test_of_a_client_that_leaves_nothing_is_left(house: House, given: list[int]) -> None:
    [gateway] = house.gateways
    answer_list(gateway, lambda request: Response(200, LARGE))
    pipe = connect(gateway, LIST * 3)
    gateway.round()
    assert len(gateway.calls) == 3  # a gateway that stops waits for them
    assert gateway.lane.budget.held == 3 * len(LARGE), "what is being compressed counts as unread"
    pipe.reset = True
    gateway.round()
    assert (len(gateway.calls), len(gateway.lane.connections), gateway.lane.budget.held) == (0, 0, 0)
    done = list(given)
    house.settle()
    assert given == done


@pytest.mark.parametrize("last", ["the client says so", "it sends no more"])
def test_the_last_answer_before_a_connection_ends(house: House, last: str) -> None:
    [gateway] = house.gateways
    answer_list(gateway, lambda request: Response(200, LARGE))
    pipe = connect(gateway, LIST.replace(b"Host", b"Connection: close\r\nHost") if "says" in last else LIST)
    gateway.round()
    pipe.ended = "sends" in last
    house.settle()
    [(_, packed)] = answers(pipe.took)
    assert gzip.decompress(packed) == LARGE
    assert pipe.shut


def test_a_bug_in_a_slice_ends_one_connection(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    [gateway] = house.gateways
    gateway.tolerant = True
    answer_list(gateway, lambda request: Response(200, LARGE))

    def fail(deflater: Deflater) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(Deflater, "step", fail)
    pipe, other = connect(gateway, LIST), connect(gateway, HEALTH)
    house.settle()
    assert (pipe.closed, bytes(pipe.took), other.took.count(b"HTTP/1.1 200")) == (True, b"", 1)
    assert [type(error) for error in gateway.faults] == [ZeroDivisionError]
