"""Clients that take more than their share, in both lanes, and what the others notice of it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from .bystanders import Flooder, bystanders
from .client import unique
from .h2wire import H2Wire
from .server import Server, eventually
from .wire import Wire, append_request, request

pytestmark = pytest.mark.e2e

JSON = "Accept: application/json"
PER_PEER = 30
LARGE = b"x" * 190_000  # no JSON: what is read whole is 400
BODY = b'{"records":[{"data":1}]}'


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("flooded")
    server = Server(
        folder / "data",
        log=folder / "log",
        TOPICS_WAL_SHARDS=1,
        TOPICS_MAX_CONNECTIONS_PER_PEER=PER_PEER,
        TOPICS_MAX_BODY_BYTES=200_000,
        TOPICS_MAX_BUFFERED_BYTES=400_000,
    )
    with closing(server):
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()


@pytest.mark.full  # 100,000 scrapes; unit/test_rounds.py and unit/test_scrapes.py have the rules
def test_pipelined_scrapes_stop_no_one_else(flooded: Server) -> None:
    """Each is milliseconds of work for the gateway: they are made together, and a round ends in time."""
    gateway = flooded.pid_of("gateway-0")
    with bystanders(flooded, within_s=2):
        raw = request("GET", "/v0/metrics") * 5_000
        socks = [socket.create_connection(("127.0.0.1", flooded.port)) for _ in range(20)]
        for flooder in [Flooder(sock, raw, 2.0) for sock in socks]:
            flooder.wait()
    assert flooded.pid_of("gateway-0") == gateway


def test_a_write_is_in_the_next_scrape_of_many(flooded: Server) -> None:
    """However often is asked: what is shared was begun after the request came."""
    topic = unique("scraped")
    with Wire(flooded.port) as writer, Wire(flooded.port) as reader:
        for number in range(1, 11):
            assert writer.ask(append_request(topic)).status in (200, 201)
            shown = reader.ask(request("GET", f"/v0/metrics?topic={topic}*", headers=(JSON,)))["metrics"]
            assert shown["topics_topic_head_seq"] == [{"topic": topic, "value": number}]


# --- connections ---


def budgets(server: Server) -> dict[str, float]:
    """Figures of its only gateway; refusals by budget."""
    with Wire(server.port) as wire:
        shown = wire.ask(request("GET", "/v0/metrics", headers=(JSON,)))["metrics"]
    figures = {name: rows[0]["value"] for name, rows in shown.items() if name.startswith("topics_gateway_")}
    return figures | {row["budget"]: row["value"] for row in shown["topics_gateway_refusals_total"]}


def test_connections_of_one_address_are_bounded_in_both_lanes(flooded: Server) -> None:
    topic = unique("bounded")
    with ExitStack() as stack:
        taken = 0
        for number in range(2 * PER_PEER):
            if number % 2:
                wire = stack.enter_context(Wire(flooded.port))
                answer = wire.ask(append_request(topic))
                if answer.status == 429:
                    assert answer.headers["connection"] == "close"
                    assert answer["error"]["detail"] == {"limit": "max_connections_per_peer", "max": PER_PEER}
                    wire.assert_closed()
                    break
                assert answer.status in (200, 201)
            else:
                framed = stack.enter_context(H2Wire(flooded.port))
                try:
                    framed.finish(framed.ask("POST", f"/v0/topics/{topic}", BODY))
                except (EOFError, OSError):
                    continue
            taken += 1
        else:
            raise AssertionError("all of them were served")
        assert PER_PEER // 2 < taken <= PER_PEER
        shown = budgets(flooded)
        assert shown["max_connections_per_peer"] >= 1
        assert shown["max_connections"] == shown["open_files"] == 0
        assert shown["topics_gateway_connections"] >= PER_PEER
        assert shown["topics_gateway_connections_limit"] > PER_PEER
        for path in ("/v0/health", "/v0/ready", "/v0/metrics"):
            with Wire(flooded.port) as probe:
                assert probe.ask(request("GET", path, headers=(JSON,))).status == 200
        with H2Wire(flooded.port) as late:
            try:
                while late.receive():
                    pass
            except ConnectionResetError:
                pass

    def served() -> bool:
        with Wire(flooded.port) as wire:
            return wire.ask(append_request(topic)).status == 200

    eventually(served, what="a place")


# --- bytes ---


def large_body(server: Server, lane: str) -> int:
    """400 if it was read, 429 if there was no room for it."""
    if lane == "http1":
        with Wire(server.port) as wire:
            answer = wire.ask(request("POST", "/v0/topics/large", LARGE)[: -len(LARGE)], LARGE)
            if answer.status == 429:
                assert answer.headers["connection"] == "close"
                assert answer["error"]["detail"] == {"limit": "max_buffered_bytes", "max": 400_000}
            return answer.status
    with H2Wire(server.port) as framed:
        stream = framed.finish(framed.ask("POST", "/v0/topics/large", LARGE))
        if stream.headers[":status"] == "429":
            assert json.loads(stream.body)["error"]["detail"] == {"limit": "max_buffered_bytes", "max": 400_000}
        return int(stream.headers[":status"])


def test_bodies_that_never_end_leave_room_for_small_requests(flooded: Server) -> None:
    topic = unique("small")
    lanes = ("http1", "http2")
    with ExitStack() as stack:
        for _ in range(2):
            wire = stack.enter_context(Wire(flooded.port))
            wire.send(request("POST", "/v0/topics/t", LARGE)[:-50_000])
        for lane in lanes:
            eventually(lambda lane=lane: large_body(flooded, lane) == 429, what=f"a refusal over {lane}")
        shown = budgets(flooded)
        assert shown["max_buffered_bytes"] >= 2
        assert 150_000 < shown["topics_gateway_buffered_bytes"] <= 400_000
        assert shown["topics_gateway_buffered_bytes_limit"] == 400_000
        with Wire(flooded.port) as wire:
            assert wire.ask(append_request(topic)).status == 201
            first = append_request(topic)
            assert wire.ask(first[:-5], first[-5:]).status == 200
        with H2Wire(flooded.port) as framed:
            assert framed.finish(framed.ask("POST", f"/v0/topics/{topic}", BODY)).headers[":status"] == "200"
    for lane in lanes:
        eventually(lambda lane=lane: large_body(flooded, lane) == 400, what=f"room over {lane}")
    assert budgets(flooded)["topics_gateway_buffered_bytes"] == 0
