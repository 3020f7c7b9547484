"""Clients that ask for more than their share, and what the others notice of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from .bystanders import Flooder, bystanders
from .server import Server
from .wire import request

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("flooded")
    with closing(Server(folder / "data", log=folder / "log", TOPICS_WAL_SHARDS=1)) as server:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()


def test_pipelined_scrapes_stop_nobody(flooded: Server) -> None:
    """Each is milliseconds of work for the gateway: they are made together, and a round ends in time."""
    gateway = flooded.pid_of("gateway-0")
    with bystanders(flooded, within_s=2):
        raw = request("GET", "/v0/metrics") * 5_000
        socks = [socket.create_connection(("127.0.0.1", flooded.port)) for _ in range(20)]
        for flooder in [Flooder(sock, raw, 2.0) for sock in socks]:
            flooder.wait()
    assert flooded.pid_of("gateway-0") == gateway
