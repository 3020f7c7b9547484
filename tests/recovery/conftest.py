from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from crash_server import Server


@pytest.fixture
def seed() -> int:
    """Shown when a test fails; TOPICS_TEST_SEED runs it again, or another one; "random" finds one."""
    asked = os.environ.get("TOPICS_TEST_SEED") or "2892898596"  # the same in every usual run
    chosen = random.SystemRandom().randrange(1 << 32) if asked == "random" else int(asked)
    print(f"TOPICS_TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server on tmp_path/data; whatever still runs at the end is killed."""
    servers: list[Server] = []

    def start(
        *, shards: int = 2, env: Mapping[str, str] | None = None, data_dir: Path | None = None, wait: bool = True
    ) -> Server:
        server = Server(data_dir or tmp_path / "data", shards=shards, env=env, beside=tmp_path)
        servers.append(server)
        return server.wait_ready() if wait else server

    yield start
    for server in servers:
        server.close()
