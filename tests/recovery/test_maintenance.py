"""What goes on behind the clients' backs keeps recovery short: flushes, snapshots, and WAL files that go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from crash_folder import newest_snapshot, segments, wal_files
from crash_oracle import Oracle
from crash_server import SMALL, Server, eventually

pytestmark = pytest.mark.recovery

PADDING = "x" * 4_000


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.gate
def test_the_log_is_trimmed_under_steady_load(serve: Callable[..., Server]) -> None:
    server = serve(shards=1, env=SMALL)
    client = server.client()
    oracle = Oracle()
    topic = oracle.create(client, "t", "disk")
    (first,) = wal_files(server.data_dir)

    def first_file_let_go() -> bool:
        topic.append_plain(client, 12, padding=PADDING)
        time.sleep(0.02)  # a shard that is busy puts this work off on purpose
        return not first.exists()

    eventually(first_file_let_go, what="a WAL file trimmed while the load goes on")
    eventually(lambda: len(wal_files(server.data_dir)) <= 3, what="the log trimmed once it is quiet")
    server.kill()
    oracle.restarted()
    oracle.check(serve(shards=1, env=SMALL))


def test_idle_after_load_costs_nothing(serve: Callable[..., Server]) -> None:
    """No descriptor that stays readable, no maintenance that finds something to do for ever."""
    server = serve(shards=1, env=SMALL)
    client = server.client()
    oracle = Oracle()
    topics = [oracle.create(client, f"t{n}", durability) for n, durability in enumerate(("disk", "fsync", "memory"))]
    for _ in range(100):
        for topic in topics:
            topic.append_plain(client, 12, padding=PADDING)
            time.sleep(0.005)
    eventually(
        lambda: newest_snapshot(server.data_dir) and len(segments(server.data_dir)) > 3, what="moved to segments"
    )
    pids = [server.pid_of(name) for name in ("shard-0", "gateway-0")]

    def idle() -> bool:
        before = [cpu_s(pid) for pid in pids]
        time.sleep(0.5)
        return all(cpu_s(pid) - was <= 0.05 for pid, was in zip(pids, before, strict=True))

    eventually(idle, what="half a second without work")
