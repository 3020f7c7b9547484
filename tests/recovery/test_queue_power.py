"""The power fails under queues: what was answered as synced is there afterwards, whatever else the disk lost.

The disk is watched by every process of the server: `SHADOW` is imported before anything else and keeps, for each file,
what it was when it was last synced. After a power cut a file is that, and of what was written since each page is there
or not, as the dice say. Names are taken to be durable at once; a file that was never synced is as long as it was, and
empty. The server must take it for another boot of the machine, so the WAL files say so.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_folder import another_boot
from crash_queues import (
    HOUR_MS,
    Fleet,
    claim,
    counters,
    dead_jobs,
    job,
    make_queue,
    now_ms,
    numbers_in,
    say,
)
from crash_routers import World, name_on
from crash_scene import Scene
from crash_server import EXHAUSTIVE, SMALL, Server, eventually
from figures import POWER_CUTS

from topics.storage.format import FILE_HEADER_BYTES

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 180)]

Start = Callable[..., Server]
PAGE = 4_096
SMALL_WAL = {"TOPICS_WAL_FILE_BYTES": str(1 << 20)}  # they are copied at every sync

# Copied when a sync begins, counted when it has ended: what is written meanwhile may not be on the platter. Slow, so
# that an answer which does not wait for it is far ahead.
SHADOW = """
import os, shutil, threading, time

_data, _shadow = os.environ["SHADOW_OF"], os.environ["SHADOW_IN"]
_copies = {name: getattr(os, name) for name in ("fsync", "fdatasync", "replace")}


def _place(path):
    return os.path.join(_shadow, os.path.relpath(path, _data))


def _ours(path):
    return path.startswith(_data + os.sep) and os.path.basename(path) != "LOCK"


def _synced(name):
    def sync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not _ours(path) or not os.path.isfile(path):
            return _copies[name](fd)
        place = _place(path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        taken = f"{place}.{os.getpid()}.{threading.get_ident()}.taken"
        shutil.copyfile(path, taken)
        time.sleep(0.04)
        _copies[name](fd)
        _copies["replace"](taken, place)

    return sync


def _replaced(source, target, **options):
    _copies["replace"](source, target, **options)
    for path in (source, target):
        if not isinstance(path, str) or not _ours(os.path.abspath(path)):
            return
    if os.path.exists(_place(os.path.abspath(source))):
        _copies["replace"](_place(os.path.abspath(source)), _place(os.path.abspath(target)))


os.fsync, os.fdatasync, os.replace = _synced("fsync"), _synced("fdatasync"), _replaced
"""


class Machine:
    """A World whose disk is watched, and whose power can fail."""

    def __init__(self, serve: Start, tmp_path: Path, *, rng: random.Random, **how: Any) -> None:
        self._rng = rng
        self._data = tmp_path / "data"
        self._shadow = tmp_path / "shadow"
        modules = tmp_path / "modules"
        modules.mkdir()
        (modules / "sitecustomize.py").write_text(SHADOW)
        env = {
            **how.pop("env", {}),
            "PYTHONPATH": os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "SHADOW_OF": str(self._data),
            "SHADOW_IN": str(self._shadow),
        }
        self.world = World(serve, env=env, **how)
        self.kept = self.gone = 0  # pages that were not synced

    def cut(self) -> None:
        """kill -9 of everything that still runs, and only what was synced is sure to be there."""
        POWER_CUTS.add()
        if self.world.server.popen.poll() is None:
            self.world.server.kill()
        for path in sorted(self._data.rglob("*")):
            if not path.is_file() or path.name == "LOCK":
                continue
            place = self._shadow / path.relative_to(self._data)
            if path.suffix == ".tmp":
                path.unlink()
                continue
            written = path.read_bytes()
            synced = place.read_bytes() if place.exists() else b""
            path.write_bytes(self._survives(written, synced))
            if path.suffix == ".wal" and len(synced) >= FILE_HEADER_BYTES:
                another_boot(path)
        shutil.rmtree(self._shadow)
        shutil.copytree(self._data, self._shadow)

    def _survives(self, written: bytes, synced: bytes) -> bytes:
        found = bytearray(synced.ljust(len(written), b"\0"))
        share = self._rng.choice((0.0, 0.5, 0.9))  # of the pages that were not synced and survive all the same
        for at in range(0, len(written), PAGE):
            page = slice(at, at + PAGE)
            if written[page] != found[page]:
                if self._rng.random() < share:
                    found[page] = written[page]
                    self.kept += 1
                else:
                    self.gone += 1
        return bytes(found)

    def restart(self) -> None:
        """After a cut."""
        self.world.restart("kill")


def cut_under_load(machine: Machine, fleet: Fleet) -> None:
    start = now_ms()
    upset = (start, float("inf"))
    for ledger in fleet.ledgers:
        ledger.stream_cuts.append(start)
        ledger.upsets.append(upset)
    if fleet.rng.random() < 0.5:  # a process that died before, and came back on files that are not synced
        victim = fleet.rng.choice(("shard-0", "shard-1", "queue"))
        machine.world.server.signal_child(victim)
        time.sleep(fleet.rng.uniform(0, 1.5))
    machine.cut()
    machine.restart()
    for ledger in fleet.ledgers:
        ledger.upsets.remove(upset)
        ledger.upsets.append((start, now_ms()))


@pytest.mark.gate
@pytest.mark.parametrize("env", [SMALL, {}] if EXHAUSTIVE else [SMALL], ids=lambda env: "small" if env else "default")
def test_synced_acks_and_durable_leases(serve: Start, tmp_path: Path, seed: int, env: dict[str, str]) -> None:
    rng = random.Random(seed)
    # Nothing is synced but what has to be.
    machine = Machine(serve, tmp_path, rng=rng, env={**env, "TOPICS_DISK_SYNC_MS": "60000", **SMALL_WAL})
    fleet = Fleet(machine.world, seed=rng.randrange(1 << 30))
    fleet.queue(name_on(0, "durable"), leases_durable=True, durability="fsync")
    fleet.queue(name_on(1, "durable"), leases_durable=True, durability="fsync", streams=0)
    for _ in range(12 if EXHAUSTIVE else 1):
        fleet.wait_acked(rng.randint(20, 60))
        cut_under_load(machine, fleet)
    fleet.wait_acked(30)
    fleet.finish()
    fleet.drain()


def test_synced_acks_and_leases_that_are_not(serve: Start, tmp_path: Path, seed: int) -> None:
    """Leases may be lost, all of them or some; acks may not."""
    rng = random.Random(seed)
    machine = Machine(serve, tmp_path, rng=rng, env={"TOPICS_DISK_SYNC_MS": "60000", **SMALL_WAL})
    fleet = Fleet(machine.world, seed=rng.randrange(1 << 30))
    ledgers = [
        fleet.queue(name_on(shard, "q"), leases_durable=False, durability="fsync", streams=shard) for shard in (0, 1)
    ]
    for _ in range(6 if EXHAUSTIVE else 1):
        fleet.wait_acked(rng.randint(20, 60))
        cut_under_load(machine, fleet)
        for ledger in ledgers:  # anything that was told since the last sync may be forgotten
            ledger.upsets = [(0.0, now_ms())]
    fleet.wait_acked(30)
    fleet.finish()
    fleet.drain()
    assert machine.gone + machine.kept, "everything was synced: no test"


def test_after_a_clean_stop_nothing_is_lost(serve: Start, tmp_path: Path, seed: int) -> None:
    """Of leases that are not durable and of queues that are not synced neither."""
    machine = Machine(serve, tmp_path, rng=random.Random(seed), env={"TOPICS_DISK_SYNC_MS": "60000", **SMALL_WAL})
    world = machine.world
    scenes = [Scene(world, name_on(shard, "q"), leases_durable=bool(shard)) for shard in (0, 1)]
    assert world.server.stop() == 0
    machine.cut()
    machine.restart()
    for scene in scenes:
        scene.check()


def test_durable_leases_and_all_that_goes_with_them(serve: Start, tmp_path: Path, seed: int) -> None:
    machine = Machine(serve, tmp_path, rng=random.Random(seed), env={"TOPICS_DISK_SYNC_MS": "60000", **SMALL_WAL})
    scene = Scene(machine.world, name_on(0, "q"), leases_durable=True)
    machine.cut()
    machine.restart()
    scene.check()


def test_dead_letters(serve: Start, tmp_path: Path, seed: int) -> None:
    """The copy is synced before the job goes: both lie in logs of their own."""
    rng = random.Random(seed)
    machine = Machine(serve, tmp_path, rng=rng, env={"TOPICS_DISK_SYNC_MS": "60000", **SMALL_WAL})
    world = machine.world
    fleet = Fleet(world, seed=rng.randrange(1 << 30))
    queue, dead = name_on(0, "queue"), name_on(1, "dead")
    ledger = fleet.queue(
        queue,
        leases_durable=True,
        durability="fsync",
        max_deliveries=2,
        dead_letter=dead,
        poison=lambda number: number % 2 == 0,
        leases_ms=(100, 1_000),
        streams=0,
        pace_s=0.005,
    )

    for _ in range(8 if EXHAUSTIVE else 1):
        goal = fleet.moved(ledger) + rng.randint(5, 30)
        eventually(lambda goal=goal: fleet.moved(ledger) >= goal, what="more dead letters")
        cut_under_load(machine, fleet)
    fleet.wait_acked(10)
    fleet.finish()
    fleet.drain()
    found = dead_jobs(world, ledger)
    assert {number for number, _ in found} >= {number for number in ledger.produced if ledger.poison(number)}
    # The last ones are counted when their deletes are synced.
    eventually(
        lambda: counters(world, queue)["dead_lettered"] == len(found),
        what=f"{len(found)} dead letters counted",
    )


def test_a_disk_queue_loses_what_was_not_synced_and_serves_on(serve: Start, tmp_path: Path, seed: int) -> None:
    """Acks and jobs since the last sync may be gone; the rest is whole, and leases of jobs that are gone are too."""
    rng = random.Random(seed)
    machine = Machine(serve, tmp_path, rng=rng, env={"TOPICS_DISK_SYNC_MS": "60000", **SMALL_WAL}, shards=1)
    world = machine.world
    make_queue(world, "q", durability="disk", leases_durable=False)
    client = world.client
    assert client.append("q", *map(job, range(20))).ok
    assert claim(client, "q", "a", max=5, lease_ms=HOUR_MS).body["count"] == 5
    assert client.append("synced", 0, config={"durability": "fsync"}).ok  # and all that was written before
    first, second = claim(client, "q", "a", max=2, lease_ms=HOUR_MS).body["claimed"]
    assert say(client, "ack", "q", "a", [1, 2, first["$seq"]]).body["acked"] == 3
    assert client.append("q", *map(job, range(20, 30))).ok
    later = claim(client, "q", "a", max=100, lease_ms=HOUR_MS).body["claimed"]
    assert len(later) == 23
    machine.cut()
    assert machine.gone + machine.kept, "everything was synced: no test"
    machine.restart()
    client = world.client
    left = numbers_in(world, "q")
    assert set(left) >= set(range(2, 20)) - {first["data"]["n"]}
    assert set(left) <= set(range(30))
    shown = counters(world, "q")
    assert shown["ready"] + shown["in_flight"] == shown["count"] == len(left)
    # What was synced: three of the first five are held, whatever became of the acks.
    taken = {entry["$seq"]: entry for entry in claim(client, "q", "b", max=100, lease_ms=HOUR_MS).body["claimed"]}
    assert not taken.keys() & {3, 4, 5}
    assert say(client, "ack", "q", "a", [3, 4, 5]).body["skipped"] == []
    assert say(client, "ack", "q", "b", [*taken] or [1]).body["acked"] == len(taken)
    for seq in {*range(1, 41)} - {3, 4, 5} - taken.keys():
        say(client, "ack", "q", "a", [seq])
    assert counters(world, "q") == {"ready": 0, "in_flight": 0, "dead_lettered": 0, "count": 0}
    first_seq = client.append("q", job(30)).body["first_seq"]
    assert first_seq > max(entry["$seq"] for entry in later), "a seq that was given out is given out again"
    (fresh,) = claim(client, "q", "c", max=5).body["claimed"]
    assert (fresh["$seq"], fresh["deliveries"]) == (first_seq, 1)
    assert second["lease_id"] != fresh["lease_id"]
