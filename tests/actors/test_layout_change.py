"""The shard count changes between two starts: who is told what, and when the manifest is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from harness import RoleServer, eventually

from topics.actors.startup.datadir_lock import read_manifest
from topics.actors.supervisor.process import ProcessSpec
from topics.shm.counters import State, Word
from topics.storage.format import FORMAT_VERSION
from topics.storage.manifest import Manifest

Start = Callable[..., RoleServer]

GATEWAY = ProcessSpec("gateway-0", "roles.pinger", 0, listener=True)


def shards(count: int, module: str = "roles.echo") -> list[ProcessSpec]:
    return [ProcessSpec(f"shard-{i}", module, i, stores=True, stop_order=9) for i in range(count)]


def links(count: int) -> list[tuple[str, str]]:
    return [("gateway-0", f"shard-{i}") for i in range(count)]


def manifest(server: RoleServer) -> Manifest | None:
    return read_manifest(str(server.data_dir))


def first_start(start: Start, count: int) -> RoleServer:
    server = start([GATEWAY, *shards(count)], links(count), wal_shards=count)
    server.wait_all_ready()
    assert manifest(server) == Manifest(format=FORMAT_VERSION, layout=1, shards=count, routers=True)
    assert server.stop() == 0
    (server.data_dir / "trace.jsonl").unlink()
    return server


def test_gateways_start_when_the_new_layout_counts(start: Start) -> None:
    first_start(start, 1)
    server = start([GATEWAY, *shards(3)], links(3), wal_shards=3)
    server.wait_all_ready()
    assert manifest(server) == Manifest(format=FORMAT_VERSION, layout=2, shards=3, routers=True)
    for i in range(3):
        (booted,) = server.trace(f"shard-{i}", "booted")
        assert (booted["layout"], booted["shards"]) == (2, 3)
        assert (booted["old_layout"], booted["old_shards"]) == (1, 1)
        eventually(lambda name=f"shard-{i}": server.trace(name, "layout_committed"), what="told of the commit")
    (gateway,) = server.trace("gateway-0", "booted")
    assert gateway["at_ns"] > max(line["at_ns"] for i in range(3) for line in server.trace(f"shard-{i}", "ready"))
    before = server.word("gateway-0", Word.REQUESTS)
    eventually(lambda: server.word("gateway-0", Word.REQUESTS) > before + 20, what="pings")
    # Whoever starts from now on knows the new layout only.
    server.kill_child("shard-0")
    server.wait_state("shard-0", State.READY, generation=2)
    again = server.trace("shard-0", "booted")[-1]
    assert (again["layout"], again["shards"], again["old_layout"]) == (2, 3, None)
    assert server.stop() == 0


def test_not_committed_before_all_are_ready_and_redone_after_a_crash(start: Start) -> None:
    first_start(start, 1)
    specs = [GATEWAY, *shards(1), ProcessSpec("shard-1", "roles.recovers", 1, stores=True)]
    server = start(specs, links(2), wal_shards=2, heartbeat_ms=400)
    server.wait_state("shard-0", State.READY)
    server.wait_state("shard-1", State.RECOVERING)
    assert manifest(server) == Manifest(format=FORMAT_VERSION, layout=1, shards=1, routers=True)
    assert not server.trace("gateway-0")
    os.kill(server.pid, signal.SIGKILL)
    server.popen.wait()
    again = start([GATEWAY, *shards(2)], links(2), wal_shards=2)
    again.wait_all_ready()
    assert again.trace("shard-0", "booted")[-1]["old_layout"] == 1
    assert manifest(again) == Manifest(format=FORMAT_VERSION, layout=2, shards=2, routers=True)


def test_a_shard_that_dies_on_the_way_gets_the_same_plan_again(start: Start) -> None:
    first_start(start, 1)
    specs = [GATEWAY, *shards(1), ProcessSpec("shard-1", "roles.recovers", 1, stores=True)]
    server = start(specs, links(2), wal_shards=2)
    server.wait_state("shard-0", State.READY)
    server.kill_child("shard-0")
    server.wait_state("shard-0", State.READY, generation=2)
    server.wait_all_ready()
    first, second = server.trace("shard-0", "booted")
    assert first["old_layout"] == second["old_layout"] == 1
    assert manifest(server) == Manifest(format=FORMAT_VERSION, layout=2, shards=2, routers=True)


def test_a_shard_that_can_not_leaves_everything_as_it_was(start: Start) -> None:
    first_start(start, 1)
    specs = [GATEWAY, *shards(1), ProcessSpec("shard-1", "roles.refuses", 1, stores=True)]
    server = start(specs, links(2), wal_shards=2)
    assert server.popen.wait(30) == 1
    assert "TOPICS_WAL_SHARDS=1" in server.stderr()
    assert not server.trace("gateway-0")
    assert manifest(server) == Manifest(format=FORMAT_VERSION, layout=1, shards=1, routers=True)
    # As the message says.
    as_before = start([GATEWAY, *shards(1)], links(1), wal_shards=1)
    as_before.wait_all_ready()
