"""`topics ps` beside a running server and without one; what `topics serve` refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import RoleServer

from topics.actors.supervisor.process import ProcessSpec
from topics.cli.server.ps import uptime_text
from topics.cli.server.serve import link_table, process_table
from topics.settings import Settings
from topics.shm.counters import State

Start = Callable[..., RoleServer]


def topics(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    return subprocess.run(
        [sys.executable, "-m", "topics.cli.main", *args],
        capture_output=True,
        text=True,
        env={**clean, **environ},
        timeout=60,
    )


def test_ps_without_a_server(tmp_path: Path) -> None:
    done = topics("ps", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "no server is running" in done.stderr
    assert done.stdout == ""


def test_ps_shows_every_process(start: Start) -> None:
    server = start(
        [ProcessSpec("gateway-0", "roles.pinger", 0), ProcessSpec("broken-0", "roles.refuses", 0)],
    )
    server.wait_state("gateway-0", State.READY)
    server.wait_state("broken-0", State.FAILED)
    done = topics("ps", "--json", TOPICS_DATA_DIR=str(server.data_dir))
    assert done.returncode == 0, done.stderr
    listing = json.loads(done.stdout)
    assert listing["address"].startswith("http://127.0.0.1:")
    lines = {line["name"]: line for line in listing["processes"]}
    assert set(lines) == {"supervisor", "gateway-0", "broken-0"}
    assert lines["supervisor"]["pid"] == server.pid
    assert lines["gateway-0"]["pid"] == server.pids()["gateway-0"]
    assert lines["gateway-0"]["state"] == "ready"
    assert lines["gateway-0"]["rss_bytes"] > 1_000_000
    assert lines["gateway-0"]["uptime_ms"] >= 0
    assert lines["broken-0"] == {
        "name": "broken-0",
        "pid": None,
        "state": "failed",
        "restarts": 0,
        "uptime_ms": None,
        "rss_bytes": None,
        "progress_permille": None,
    }
    table = topics("ps", "--data-dir", str(server.data_dir))
    assert table.returncode == 0, table.stderr
    for word in ("gateway-0", "ready", "broken-0", "failed", "MiB"):
        assert word in table.stdout
    assert server.stop() == 0
    assert topics("ps", "--data-dir", str(server.data_dir)).returncode == 1


def test_help_and_version_need_no_server() -> None:
    helped = topics("--help")
    assert helped.returncode == 0
    for verb in ("serve", "ps", "bench"):
        assert verb in helped.stdout
    assert topics("--version").stdout == "topics 0.1.0\n"
    assert topics("nonsense").returncode == 2


@pytest.mark.parametrize(
    ("args", "environ", "words"),
    [
        (["--port", "99999"], {}, "TOPICS_PORT"),
        (["--shards", "0"], {}, "TOPICS_WAL_SHARDS"),
        (["--host", "0.0.0.0"], {}, "TOPICS_ALLOW_INSECURE_NO_AUTH"),
        ([], {"TOPICS_LOG": "loud"}, "TOPICS_LOG"),
        (["--port", "0", "--host", "127.0.0.1"], {"TOPICS_DATA_DIR": "/proc/nowhere"}, "data folder"),
    ],
)
def test_serve_refuses_with_a_reason(args: list[str], environ: dict[str, str], words: str, tmp_path: Path) -> None:
    done = topics("serve", *args, **{"TOPICS_DATA_DIR": str(tmp_path), **environ})
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_process_table_links_who_talks_to_whom() -> None:
    settings = Settings(gateways=2, wal_shards=3)
    specs = process_table(settings)
    assert [spec.name for spec in specs] == [
        "gateway-0",
        "gateway-1",
        "router",
        "queue",
        "shard-0",
        "shard-1",
        "shard-2",
    ]
    assert all(spec.listener and not spec.stores for spec in specs[:2])
    assert all(spec.stores and not spec.listener for spec in specs[4:])
    orders = [spec.stop_order for spec in specs]
    assert max(orders[:2]) < min(orders[2:4])
    assert max(orders[2:4]) < min(orders[4:])
    links = set(link_table(settings))
    # every gateway with every shard, the router and the coordinator; these two with every shard
    assert len(links) == 2 * 5 + 2 * 3


def test_uptimes() -> None:
    assert uptime_text(999) == "0s"
    assert uptime_text(59_999) == "59s"
    assert uptime_text(61_000) == "1m 1s"
    assert uptime_text(3_600_000) == "1h 0m"
    assert uptime_text(90_000_000) == "1d 1h"
