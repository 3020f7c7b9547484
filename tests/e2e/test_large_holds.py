"""Appends of 60 MiB, over HTTP or as one frame of a WebSocket, and reads of 8 MiB as gzip don't hold others up: what a
small request of another client waits for, measured while they are taken in or answered.

A clock on the wall says nothing on a machine that is busy with other tests. So the wait is measured in the processor
time that the loop of the gateway and that of the shard took between the request and its answer: that is their work for
somebody else, and whoever else the machine works for does not count. Of several large appends the one with the
shortest longest wait is judged: a measuring process that is not woken sees too long a wait, never too short a one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

import pytest

from topics.storage.config import owner_of_name

from .client import Client
from .clocks import loop_ms
from .heavy import RECORDS
from .server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.full]

ROUNDS = 4
MOST_MS = 60  # 50, and the tick in which processor time is counted
DEADLINE_S = 60

_HTTP = [("http", probe, shard) for probe in ("health", "diff", "append") for shard in (0, 1)]
# What is different is behind the gateway's door alone.
_SOCKETS = [("ws", "health", 1), ("ws-utf8", "health", 1), ("ws-utf8", "append", 0), ("ws-http2", "health", 1)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("holds")
    with closing(Server(folder / "data", log=folder / "log", TOPICS_WAL_FILE_BYTES=64 << 20)) as server:
        server.wait_ready()
        yield server


def name_on(shard: int, prefix: str) -> str:
    return next(name for name in (f"{prefix}-{n}" for n in range(100)) if owner_of_name(name, 2) == shard)


def _hear(source: IO[str], said: list[str]) -> None:
    said.append(source.readline())


PROBES: dict[str, Callable[[Client, str], int]] = {
    "health": lambda client, topic: client.get("/v0/health").status,
    "diff": lambda client, topic: client.send("POST", f"/v0/topics/{topic}/diff", {"limit": 1}).status,
    "append": lambda client, topic: client.send("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]}).status,
}


@pytest.mark.parametrize(
    ("way", "probe", "shard"),
    _HTTP + _SOCKETS,
    ids=lambda value: ("the same shard", "another shard")[value] if isinstance(value, int) else value,
)
def test_others_wait_for_50_ms_at_most(own: Server, way: str, probe: str, shard: int) -> None:
    large, small = name_on(0, f"large-{way}-{probe}-{shard}"), name_on(shard, "small")
    pids = [own.pid_of("gateway-0"), own.pid_of(f"shard-{shard}")]
    worst = longest_waits(own, way, probe, pids, large, small)
    assert min(worst) <= MOST_MS, worst
    with own.client() as reader:
        assert reader.get(f"/v0/topics/{large}")["head_seq"] == ROUNDS * RECORDS


@pytest.mark.parametrize("way", ["gzip", "gzip-http2"])
def test_others_wait_for_50_ms_at_most_for_large_answers(own: Server, way: str) -> None:
    worst = longest_waits(own, way, "health", [own.pid_of("gateway-0")], name_on(0, way), "small")
    assert min(worst) <= MOST_MS, worst


def longest_waits(own: Server, way: str, probe: str, pids: list[int], large: str, small: str) -> list[float]:
    """In each round of somebody heavy (heavy.py)."""
    worst: list[float] = []
    with own.client() as client:
        assert client.send("POST", f"/v0/topics/{small}", {"records": [{"data": 1}]}).status in (200, 201)
        with subprocess.Popen(
            [sys.executable, "-m", "e2e.heavy", way, str(own.port), large, str(ROUNDS)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as sender:
            assert sender.stdin is not None
            assert sender.stdout is not None
            try:
                for _ in range(ROUNDS):
                    said: list[str] = []
                    heard = threading.Thread(target=_hear, args=(sender.stdout, said))
                    heard.start()
                    sender.stdin.write("\n")
                    sender.stdin.flush()
                    waits = []
                    while heard.is_alive():
                        before_ms = loop_ms(*pids)
                        assert PROBES[probe](client, small) in (200, 201), "refused because of somebody else's append"
                        waits.append(loop_ms(*pids) - before_ms)
                    heard.join(DEADLINE_S)
                    assert said[0].strip() == "done"
                    worst.append(max(waits))
            finally:
                sender.kill()
    return worst
