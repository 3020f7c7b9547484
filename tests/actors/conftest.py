from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import RoleServer


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RoleServer]]:
    """Start a server of test roles; whatever it leaves running is killed at the end."""
    servers: list[RoleServer] = []

    def start_server(*args: Any, data_dir: Path | None = None, **settings: Any) -> RoleServer:
        server = RoleServer(data_dir or tmp_path / "data", *args, **settings)
        servers.append(server)
        return server

    yield start_server
    for server in servers:
        server.close()
