"""Clients that read their answer slowly, and never stop: they are waited for, over both protocols.

The kernel says in lumps that there is room for more. A slow reader takes longer for one than a client may take nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import h2.config
import h2.connection
import h2.settings
import pytest

from .client import Client
from .server import Server
from .wire import request

pytestmark = pytest.mark.e2e

PATIENCE_S = 1.5
RATE = 500
READS = 4_000  # bytes per second
RECORDS, RECORD = 8, 1_000_000
BODY = b'{"max_batch_bytes":8388608}'
WINDOW = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("slow")
    server = Server(
        folder / "data",
        log=folder / "log",
        TOPICS_WAL_SHARDS=1,
        TOPICS_BODY_TIMEOUT_MS=int(PATIENCE_S * 1_000),
        TOPICS_MIN_BODY_RATE=RATE,
    )
    with closing(server):
        server.wait_ready()
        with server.client() as client:
            for _ in range(RECORDS):
                assert client.append("large", "x" * RECORD).error is None
            assert client.append("quiet", "1").error is None
        yield server
        assert "Traceback" not in server.output()


def over_http1() -> bytes:
    return request("POST", "/v0/topics/large/diff", BODY)


def over_http2() -> bytes:
    """With window for all of it: the socket is what it waits for."""
    wire = h2.connection.H2Connection(h2.config.H2Configuration())
    wire.initiate_connection()
    wire.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
    wire.increment_flow_control_window(WINDOW)
    stream = wire.get_next_available_stream_id()
    pseudo = [(":method", "POST"), (":path", "/v0/topics/large/diff"), (":scheme", "http"), (":authority", "localhost")]
    wire.send_headers(stream, [*pseudo, ("content-type", "application/json")])
    wire.send_data(stream, BODY, end_stream=True)
    return wire.data_to_send()


def pause(api: Client) -> None:
    """A fifth of a second, by the server's clock."""
    assert api.diff("quiet", 1, wait_ms=200).status == 200


@pytest.mark.parametrize("asks", [over_http1, over_http2])
def test_a_slow_reader_gets_all_of_it(server: Server, asks: Callable[[], bytes]) -> None:
    with server.client() as api, closing(socket.socket()) as sock:
        sock.settimeout(30)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(asks())
        began, received = time.monotonic(), 0
        while (took_s := time.monotonic() - began) < 4 * PATIENCE_S:
            while received < READS * took_s:
                received += take(sock, int(READS * took_s) - received + 1)
            pause(api)
        take_rest(sock, received)


@pytest.mark.parametrize("asks", [over_http1, over_http2])
def test_who_reads_nothing_is_not_waited_for(server: Server, asks: Callable[[], bytes]) -> None:
    with server.client() as api, closing(socket.socket()) as sock:
        sock.settimeout(30)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(asks())
        began = time.monotonic()
        while time.monotonic() - began < 4 * PATIENCE_S:
            pause(api)
        with pytest.raises(AssertionError, match="the server has closed"):
            take_rest(sock, 0)


def take_rest(sock: socket.socket, received: int) -> None:
    while received < RECORDS * RECORD:
        received += take(sock, 1 << 20)


def take(sock: socket.socket, most: int) -> int:
    try:
        taken = len(sock.recv(most))
    except ConnectionResetError:
        taken = 0
    assert taken, "the server has closed"
    return taken
