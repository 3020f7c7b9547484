"""Answers that wait in front of an event stream: they are in the byte budget until they are with the socket, and the
stream begins behind them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from .client import Client
from .server import Server, eventually
from .wire import Wire, request

pytestmark = pytest.mark.e2e

RECORD = 900_000  # bytes: its answer is less than what is sent at once
SMALL = 64 * 1024  # so much of an answer may go with a stream


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("unread")
    server = Server(folder / "data", log=folder / "log", TOPICS_WAL_SHARDS=1)
    with closing(server):
        server.wait_ready()
        with server.client() as client:
            assert client.append("large", "x" * RECORD).error is None
            assert client.append("quiet", "1").error is None
        yield server
        assert "Traceback" not in server.output()


class Figures:
    def __init__(self, api: Client) -> None:
        self._shown = api.send("GET", "/v0/metrics", headers={"Accept": "application/json"})["metrics"]

    @property
    def buffered(self) -> float:
        return float(self._shown["topics_gateway_buffered_bytes"][0]["value"])

    def answered(self, route: str) -> float:
        rows = self._shown["topics_http_requests_total"]
        return float(sum([row["value"] for row in rows if row["route"] == route]))


class Unread:
    """A client that asks for answers until one of them waits in the gateway, and then for an event stream."""

    def __init__(self, port: int, api: Client) -> None:
        self.wire = Wire(port)
        self.wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        self.answers = 0
        while Figures(api).buffered <= SMALL:
            assert self.answers < 100, "the kernel has no end"
            self.wire.send(request("POST", "/v0/topics/large/diff", b"{}"))
            self.answers += 1
            eventually(lambda: Figures(api).answered("/v0/topics/:topic/diff") == self.answers, what="an answer")
        wid = api.send("POST", "/v0/watch", {"topics": {"quiet": {}}})["wid"]
        self.wire.send(request("GET", f"/v0/watch/{wid}", headers=("Accept: text/event-stream",)))
        eventually(lambda: Figures(api).answered("/v0/watch/:wid") == 1, what="the head of a stream")


def test_they_are_counted_and_the_stream_begins_behind_them(server: Server) -> None:
    with server.client() as api:
        unread = Unread(server.port, api)
        with unread.wire as wire:
            assert Figures(api).buffered > SMALL
            for _ in range(unread.answers):
                answer = wire.answer()
                assert answer.status == 200
                assert answer["records"][0]["data"] == "x" * RECORD
            status, headers = wire.head()
            assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            assert api.append("quiet", "of the stream").error is None
            eventually(lambda: b"of the stream" in wire.sock.recv(1 << 16), what="a frame of the stream")
            assert Figures(api).buffered == 0


def test_a_client_that_leaves_gives_all_back(server: Server) -> None:
    with server.client() as api:
        with Unread(server.port, api).wire:
            assert Figures(api).buffered > SMALL
        eventually(lambda: Figures(api).buffered == 0, what="all is given back")
