"""200 clients that send the worst bodies for half a minute: the gateway lives, stays small and serves others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from .server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.full]

CLIENTS = 200
SECONDS = 30
MOST_MB = 300
P99_S = 0.2


def resident_mb(pid: int) -> int:
    """The most it ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1_024


def test_a_crowd_of_bombers(tmp_path: Path) -> None:
    with closing(Server(tmp_path / "data", log=tmp_path / "log")) as server:
        server.wait_ready()
        pid = server.pid_of("gateway-0")
        crowd = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("bombers.py"), str(server.port), str(CLIENTS), str(SECONDS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "ready\n"
        took: list[float] = []
        with server.client() as client:
            while crowd.poll() is None:
                began = time.monotonic()
                assert client.append("honest", "record").status in (200, 201)
                assert client.get("/v0/health").status == 200
                took.append((time.monotonic() - began) / 2)
                time.sleep(0.01)  # one normal client, not a flood
            assert client.state("honest")["count"] == len(took)
        answers = json.loads(crowd.communicate()[0])
        assert not any(status.startswith("5") for status in answers), answers
        assert answers.get("413", 0) > 100, answers
        assert server.pid_of("gateway-0") == pid, "the gateway was replaced"
        assert resident_mb(pid) < MOST_MB
        took.sort()
        assert took[int(len(took) * 0.99)] < P99_S, f"p99 of {len(took)} requests"
