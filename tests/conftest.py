"""What every family of tests may use: whole servers, started on demand, of which none outlives its test.

This folder is on the path because of this file, so the harness is `e2e.server` and `e2e.client` from anywhere.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.server import Server


def pytest_configure(config: pytest.Config) -> None:
    """Whoever started us may ignore signals (nohup, the background of a shell), and what is ignored is inherited: no
    server under test could be interrupted then."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server: `start_server(data_dir=..., TOPICS_WAL_SHARDS=2)`. The same folder again is a restart."""
    servers: list[Server] = []

    def start(*, data_dir: Path | None = None, ready: bool = True, **environ: object) -> Server:
        server = Server(data_dir or tmp_path / "data", log=tmp_path / f"server-{len(servers)}.log", **environ)
        servers.append(server)
        if ready:
            server.wait_ready()
        return server

    yield start
    for server in servers:
        server.close()
