"""Memory that clients take without a large body: answers that they don't read, and heads without a request behind them.

Peaks are the kernel's (VmHWM), so nothing is missed between two looks. What has come is known by an answer to what was
sent last.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import hpack
import pytest
from hyperframe.frame import Frame, HeadersFrame, PingFrame, SettingsFrame

from .h2wire import H2Wire
from .server import Server, eventually
from .wire import Wire, append_request, request

pytestmark = [pytest.mark.e2e, pytest.mark.full]

MIB = 1024 * 1024
JSON = "Accept: application/json"
BIG = "big"  # 8 records of a MB
SMALL = "small"  # 300 records of 1 KB
FULL_DIFF = b'{"max_batch_bytes":8388608}'
PING = b"all came"
UNREAD = 4 * MIB  # of one connection, and one answer more
HEAD = [("x-long", "v" * 3_900)] * 7


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for each test: a peak is never forgotten."""
    folder = tmp_path_factory.mktemp("unread")
    server = Server(folder / "data", log=folder / "log", TOPICS_WAL_SHARDS=1, TOPICS_ELASTIC=0)
    with closing(server):
        server.wait_ready()
        with server.client() as client:
            for _ in range(8):
                assert client.append(BIG, "x" * 1_000_000).error is None
            assert client.append(SMALL, *["x" * 1_000] * 300).error is None
        with H2Wire(server.port) as wire:  # loads that lane
            assert wire.finish(wire.ask("GET", "/v0/health")).headers[":status"] == "200"
        assert len(diff(server, BIG, FULL_DIFF).raw) > 7 * MIB
        yield server
        eventually(lambda: buffered(server) == 0, what="all is given back")
        assert "Traceback" not in server.output()


def buffered(server: Server) -> float:
    return figures(server)["topics_gateway_buffered_bytes"]


def figures(server: Server) -> dict[str, float]:
    with Wire(server.port) as wire:
        shown = wire.ask(request("GET", "/v0/metrics", headers=(JSON,)))["metrics"]
    refused = {row["budget"]: row["value"] for row in shown["topics_gateway_refusals_total"]}
    return {name: rows[0]["value"] for name, rows in shown.items() if name.startswith("topics_gateway_")} | refused


def diff(server: Server, topic: str, body: bytes = b"{}"):  # type: ignore[no-untyped-def]
    with Wire(server.port) as wire:
        return wire.ask(request("POST", f"/v0/topics/{topic}/diff", body))


class Peak:
    """What the gateway has taken in memory since."""

    def __init__(self, server: Server) -> None:
        self._pid = server.pid_of("gateway-0")
        self._before = self._now()

    def _now(self) -> int:
        with open(f"/proc/{self._pid}/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    @property
    def grown(self) -> int:
        return self._now() - self._before


def ask_diffs(wire: H2Wire, number: int, body: bytes) -> list[int]:
    """All of them are taken when it returns."""
    streams = [wire.ask("POST", f"/v0/topics/{BIG}/diff", body) for _ in range(number)]
    assert wire.finish(wire.ask("GET", "/v0/health")).headers[":status"] == "200"
    return streams


@pytest.mark.gate
def test_streams_of_a_client_that_reads_late_wait_and_are_all_answered(server: Server) -> None:
    peak = Peak(server)
    with H2Wire(server.port, window=1_024) as wire:
        streams = ask_diffs(wire, 12, b'{"max_batch_bytes":4194304}')
        eventually(lambda: buffered(server) > 3 * MIB, what="answers that wait")
        assert diff(server, BIG, FULL_DIFF).status == 200
        assert buffered(server) < UNREAD + 6 * MIB
        wire.h2.increment_flow_control_window(2**30)
        for stream in streams:
            wire.h2.increment_flow_control_window(2**29, stream)
        wire.flush()
        for stream in streams:
            answer = wire.finish(stream)
            assert answer.headers[":status"] == "200"
            assert len(answer.body) == int(answer.headers["content-length"])
            assert len(json.loads(answer.body)["records"]) in (4, 5)
    assert peak.grown < 60 * MIB
    assert figures(server)["max_buffered_bytes"] == 0


def test_one_connection_that_reads_nothing(server: Server) -> None:
    peak = Peak(server)
    with H2Wire(server.port, window=1_024) as wire:
        ask_diffs(wire, 60, FULL_DIFF)
        eventually(lambda: buffered(server) > UNREAD, what="answers that wait")
        assert diff(server, BIG, FULL_DIFF).status == 200
        assert buffered(server) < UNREAD + 12 * MIB
        assert peak.grown < 100 * MIB
    eventually(lambda: buffered(server) == 0, what="all is given back")
    assert peak.grown < 100 * MIB, "nothing is asked for a connection that is gone"


def unread_wire(stack: ExitStack, port: int) -> socket.socket:
    sock = stack.enter_context(closing(socket.socket()))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(("127.0.0.1", port))
    return sock


def test_pipelined_requests_of_a_client_that_reads_nothing(server: Server) -> None:
    peak = Peak(server)
    raw = request("POST", f"/v0/topics/{BIG}/diff", FULL_DIFF)
    with ExitStack() as stack:
        for _ in range(4):
            unread_wire(stack, server.port).sendall(raw * 16)
        eventually(lambda: buffered(server) > 4 * UNREAD / 2, what="answers that wait")
        assert diff(server, BIG, FULL_DIFF).status == 200
        assert buffered(server) < 4 * (UNREAD + 8 * MIB)
        assert peak.grown < 100 * MIB


def test_a_crowd_that_reads_nothing_meets_the_budget_of_the_gateway(server: Server) -> None:
    """Others go on with what is small, and large answers are 429; later all is as before."""
    peak = Peak(server)
    most = figures(server)["topics_gateway_buffered_bytes_limit"]
    raw = request("POST", f"/v0/topics/{BIG}/diff", FULL_DIFF)
    with ExitStack() as stack:
        for _ in range(40):
            unread_wire(stack, server.port).sendall(raw * 16)
        eventually(lambda: figures(server)["max_buffered_bytes"] > 0, what="a refusal")
        assert buffered(server) < most
        refused = diff(server, BIG)
        assert (refused.status, refused["error"]["detail"]) == (429, {"limit": "max_buffered_bytes", "max": most})
        with Wire(server.port) as wire:
            assert wire.ask(append_request("others")).status == 201
            part = wire.ask(request("POST", f"/v0/topics/{SMALL}/diff", b'{"limit":1000}'))
            assert (part.status, len(part["records"]) < 300) == (200, True)
            for path in ("/v0/health", "/v0/ready", "/v0/metrics"):
                assert wire.ask(request("GET", path, headers=(JSON,))).status == 200
        assert peak.grown < 1.7 * most
    eventually(lambda: diff(server, BIG).status == 200, what="room")


def heads() -> bytes:
    """A connection's first bytes: 100 streams that end nowhere, most of them made of indexes into the table of HPACK.
    At the end a PING: what came before it is taken when it is acknowledged."""
    encoder = hpack.Encoder()
    fields = [(":method", "POST"), (":path", "/v0/topics/t"), (":scheme", "http"), (":authority", "localhost"), *HEAD]
    blocks = [encoder.encode(fields) for _ in range(3)]
    frames: list[Frame] = [SettingsFrame()]
    frames += [HeadersFrame(2 * at + 1, blocks[min(at, 2)], flags=["END_HEADERS"]) for at in range(100)]
    frames.append(PingFrame(opaque_data=PING))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join([frame.serialize() for frame in frames])


def test_heads_of_streams_without_a_request(server: Server) -> None:
    peak = Peak(server)
    most = figures(server)["topics_gateway_buffered_bytes_limit"]
    raw = heads()
    assert len(raw) < 10_000
    with ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            sock.sendall(raw)
            said = b""
            while PING not in said:
                part = sock.recv(1 << 16)
                assert part, "closed"
                said += part
        assert peak.grown < 150 * MIB
        shown = figures(server)
        assert most / 2 < shown["topics_gateway_buffered_bytes"] <= most
        assert shown["max_buffered_bytes"] > 1_000
        with H2Wire(server.port) as wire:
            assert wire.finish(wire.ask("POST", "/v0/topics/others", b'{"records":[{"data":1}]}')).ended


def test_a_stream_without_room_is_answered(server: Server) -> None:
    """One connection has a bound of its own."""
    with H2Wire(server.port) as wire:
        streams = [wire.open("POST", "/v0/topics/t", *HEAD) for _ in range(99)]
        assert wire.finish(wire.ask("GET", "/v0/health")).headers[":status"] == "200"
        refused = [wire.streams[number] for number in streams if wire.streams[number].ended]
        assert 0 < len(refused) < 60
        for answer in refused:
            assert answer.headers[":status"] == "429"
            assert {"retry-after", "x-request-id", "content-type"} <= answer.headers.keys()
            assert json.loads(answer.body)["error"]["detail"]["limit"] == "max_buffered_bytes"
        assert figures(server)["max_buffered_bytes"] == len(refused)


def test_a_hundred_small_requests_at_once_are_served(server: Server) -> None:
    bearer = ("authorization", "Bearer " + "k" * 4_000)
    body = b'{"records":[{"data":1}]}'
    with H2Wire(server.port) as wire:
        for _ in range(2):
            json_body = ("content-type", "application/json")
            streams = [wire.open("POST", "/v0/topics/crowd", json_body, bearer) for _ in range(100)]
            for stream in streams:
                wire.send(stream, body, end=True)
            assert {wire.finish(stream).headers[":status"] for stream in streams} <= {"200", "201"}
    assert figures(server)["max_buffered_bytes"] == 0


def test_unfinished_heads_are_counted(server: Server) -> None:
    with ExitStack() as stack:
        for number in range(100):
            more = (f"X-{number}: {'v' * 30_000}",)
            raw = request("POST", "/v0/topics/t", b"{}", headers=more)
            stack.enter_context(Wire(server.port)).send(raw[:-1])
        eventually(lambda: 3_000_000 < buffered(server) < 3_300_000, what="heads of HTTP/1.1")
    eventually(lambda: buffered(server) == 0, what="all is given back")
    frame = b"\x00\x3f\xff%b\x00\x00\x00\x00\x01" + b"\x00" * 16_383
    with ExitStack() as stack:
        for _ in range(100):
            wire = stack.enter_context(H2Wire(server.port))
            wire.sock.sendall(frame % b"\x01" + frame % b"\x09")
        eventually(lambda: 3_200_000 < buffered(server) < 3_500_000, what="heads of HTTP/2")
