"""200 clients that send the worst bodies for half a minute: the gateway lives, stays small and serves others.

How long somebody else waits is measured in the processor time of the loops that serve it, as in test_large_holds.py:
whoever else the machine works for does not count. Of the thirds of that time the best one is judged: a client that is
not woken at once sees too long a wait, never too short a one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from topics.storage.config import owner_of_name

from .clocks import loop_ms, nearly_all
from .server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.full]

HONEST = "honest"
CLIENTS = 200
SECONDS = 30
MOST_MB = 300
P99_MS = 200
PARTS = 3


def resident_mb(pid: int) -> int:
    """The most it ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1_024


def test_a_crowd_of_bombers(tmp_path: Path) -> None:
    with closing(Server(tmp_path / "data", log=tmp_path / "log")) as server:
        server.wait_ready()
        pid = server.pid_of("gateway-0")
        loops = [pid, server.pid_of(f"shard-{owner_of_name(HONEST, 2)}")]
        crowd = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("bombers.py"), str(server.port), str(CLIENTS), str(SECONDS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "ready\n"
        waits: list[float] = []
        with server.client() as client:
            while crowd.poll() is None:
                before_ms = loop_ms(*loops)
                assert client.append(HONEST, "record").status in (200, 201)
                assert client.get("/v0/health").status == 200
                waits.append((loop_ms(*loops) - before_ms) / 2)
                time.sleep(0.01)  # one normal client, not a flood
            assert client.state(HONEST)["count"] == len(waits)
        answers = json.loads(crowd.communicate()[0])
        assert not any(status.startswith("5") for status in answers), answers
        assert server.pid_of("gateway-0") == pid, "the gateway was replaced"
        assert resident_mb(pid) < MOST_MB
        size = len(waits) // PARTS
        assert size, "hardly a request was answered"
        slow = [nearly_all(waits[part * size : (part + 1) * size]) for part in range(PARTS)]
        assert min(slow) < P99_MS, f"p99 of {size} requests each: {slow}"
        assert answers.get("413", 0) > 100, answers
