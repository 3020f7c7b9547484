"""The folder of a real server, read beside it: running, stopped, killed, with one shard or several, and while four
writers do all that clients can do. What the folder shows is what the API says."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from effort import EXHAUSTIVE
from onlooker import (
    Api,
    Stream,
    Told,
    assert_same,
    between,
    check_leases,
    check_topic,
    contents,
    is_late,
    moment,
    named,
    shown,
    steady,
)

from topics.datadir.view.folder import Folder

from .bustle import BUSY, HOUR_MS, Writers, prepare, record
from .server import Server, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.full]

Start = Callable[..., Server]
# Small enough that a few seconds bring many segments, sealed and open, several log files and snapshots.
SMALL = {
    "TOPICS_WAL_FILE_BYTES": 1 << 20,
    "TOPICS_SEGMENT_MAX_EVENTS": 60,
    "TOPICS_SEGMENT_MAX_AGE_MS": 400,
    "TOPICS_CACHE_BYTES": 64 << 10,
    "TOPICS_MIN_FREE_BYTES": 0,
}
FORGETFUL = frozenset({"eph"})
TRIMMED = frozenset({"eph-copy"})


def fill(api: Api, numbers: count[int], *, rounds: int = 4) -> None:
    """All that a topic can be, and all that can happen to its records."""

    def some(many: int, size: int = 20) -> list[dict[str, Any]]:
        return [record(next(numbers), size) for _ in range(many)]

    api.put("caps", cap_records=25)
    api.put("capb", cap_bytes=4_000)
    api.put("both", cap_bytes=4_000, cap_records=31, durability="fsync")
    api.put("ttl", ttl_ms=1_500)
    api.put("reject", cap_records=30, discard="reject")
    api.put("eph", durability="ephemeral")
    api.put("mem", durability="memory")
    api.put("sure", durability="fsync")
    api.put("jobs", type="queue", lease_ms=HOUR_MS, max_deliveries=2, dead_letter="letters")
    api.put("kept", type="queue", lease_ms=HOUR_MS, leases_durable=True, durability="fsync")
    for source, dest in (("plain", "copy"), ("copy", "again"), ("tags", "copy-of-tags"), ("eph", "eph-copy")):
        api.must("PUT", f"/v0/routers/{source}-{dest}", {"source": source, "dest": dest})
    for round in range(rounds):
        for topic in ("plain", "caps", "capb", "both", "ttl", "tags", "eph", "mem", "sure", "long", "cleared"):
            for many in (1, 7, 20):
                api.append(topic, some(many), node=f"node-{round % 3}")
        api.append("long", some(12, size=30_000))
        api.ask("POST", "/v0/topics/reject", {"records": some(9)})
        key = f"key-{next(numbers)}"
        for _ in range(2):
            api.append("keyed", [{"data": key}, {"data": round}], idempotency_key=key)
        api.append("copy", some(2))
        api.post("tags", "delete", match=["tag", "Eq", f"t{round % 7}"])
        api.post("sure", "delete", match=["tag", "Glob", "t1*"])
        api.post("capb", "delete", before_seq=10 * round)
        api.post("plain", "delete", before_seq=5 * round)
        api.post("copy-of-tags", "delete", match=["tag", "Eq", "t2"])
        api.append("gone", some(3))
        api.must("DELETE", "/v0/topics/gone")
        api.append("again-made", some(round + 1))
        if round % 2:
            api.must("DELETE", "/v0/topics/again-made")
            api.append("again-made", some(2))
        for queue in ("jobs", "kept"):
            api.append(queue, some(12))
            mine = [job["$seq"] for job in api.post(queue, "claim", node=f"w{round}", max=8)["claimed"]]
            api.post(queue, "ack", node=f"w{round}", seqs=mine[:3])
            api.post(queue, "nack", node=f"w{round}", seqs=mine[3:5])
            api.post(queue, "extend", node=f"w{round}", seqs=mine[5:6], lease_ms=HOUR_MS)
    api.put("sure", durability="disk", cap_records=200)
    api.put("mem", durability="memory", ttl_ms=HOUR_MS)
    state = api.state("cleared")
    api.post("cleared", "delete", before_seq=state["head_seq"] + 1)


def folders(server: Server, *more: Folder) -> list[Folder]:
    return [Folder(str(server.data_dir)), *more]


def features(folder: Folder) -> set[str]:
    found = set()
    for topic in folder.topics:
        found |= {"sealed" if segment.sealed else "open" for segment in topic.segments}
        found |= {"flagged" for segment in topic.segments if segment.flagged}
        found |= {"log" for batch in topic.batches if batch.wal}
        found |= {"pipe" for _ in [topic] if topic.pipe is not None}
        found |= {"internal" for _ in [topic] if topic.internal}
        found |= {kind for kind in ("deleted", "evicted", "expired") if getattr(topic, f"{kind}_total")}
    return found


@pytest.mark.parametrize("shards", [1, 2, 3] if EXHAUSTIVE else [2])
def test_running_stopped_killed_and_with_other_shards(start_server: Start, shards: int) -> None:
    server = start_server(**SMALL, TOPICS_WAL_SHARDS=shards)
    numbers = count(1)
    onlooker = Folder(str(server.data_dir))
    api = Api(server.port)
    fill(api, numbers)
    steady(api, *folders(server, onlooker), forgetful=FORGETFUL, trimmed=TRIMMED)
    # Until everything is where it stays: segments dropped, the log short.
    eventually(lambda: {"sealed", "open", "flagged", "pipe", "internal"} <= features(Folder(str(server.data_dir))))
    steady(api, *folders(server, onlooker), forgetful=FORGETFUL, trimmed=TRIMMED)
    assert {"deleted", "evicted", "expired"} <= features(onlooker)
    rules = {(rule.router, rule.source, rule.dest) for rule in onlooker.rules}
    routers = api.must("GET", "/v0/routers")["routers"]
    assert rules == {(each["router"], each["source"], each["dest"]) for each in routers}
    assert len(rules) == 4

    # One shard dies and comes back, with the others running on.
    died = server.signal_child("shard-0")
    eventually(lambda: server.pid_of("shard-0") != died, what="another shard-0")
    server.wait_ready()
    steady(api, *folders(server, onlooker), forgetful=FORGETFUL, trimmed=TRIMMED)
    fill(api, numbers, rounds=1)
    steady(api, *folders(server, onlooker), forgetful=FORGETFUL, trimmed=TRIMMED)

    # Stopped in order: all is on the disk, where the ephemeral heads are too.
    truth = api.everything()
    api.close()
    assert server.stop() == 0
    check_stopped(server, truth, onlooker)

    # Killed altogether, and more than the snapshot knows in the log.
    server = start_server(**SMALL, TOPICS_WAL_SHARDS=shards)
    api = Api(server.port)
    fill(api, numbers, rounds=2)
    truth = eventually(lambda: quiet_truth(api, server.data_dir), every_s=0.1, what="copies on the disk")
    for name in ("caps", "both", "sure", "keyed", "jobs", "long"):
        api.append(name, [record(next(numbers), 20) for _ in range(5)])
        api.post(name, "delete", match=["tag", "Eq", "t4"])
        truth[name] = api.told(name)
    api.close()
    server.kill()
    killed = Folder(str(server.data_dir))
    assert not any(shard.clean for shard in killed.shards if shard.topics)
    assert any(batch.wal for topic in killed.topics for batch in topic.batches)
    check_dead(killed, truth)
    onlooker.look()
    check_dead(onlooker, truth)

    # The number of shards changes: everything moves.
    other = shards % 3 + 1
    server = start_server(**SMALL, TOPICS_WAL_SHARDS=other)
    api = Api(server.port)
    steady(api, *folders(server, onlooker), forgetful=FORGETFUL, trimmed=TRIMMED)
    assert len(onlooker.shards) == other
    fill(api, numbers, rounds=1)
    steady(api, *folders(server, onlooker), forgetful=FORGETFUL, trimmed=TRIMMED)
    truth = api.everything()
    api.close()
    assert server.stop() == 0
    check_stopped(server, truth, onlooker)


def check_stopped(server: Server, truth: dict[str, Told], onlooker: Folder) -> None:
    before = contents(server.data_dir)
    fresh = Folder(str(server.data_dir))
    onlooker.look(now_ms=fresh.taken_ms)
    assert_same(onlooker, fresh)
    assert all(shard.clean for shard in fresh.shards)
    assert [topic.name for topic in fresh.topics if not topic.internal] == sorted(truth)
    for name, told in truth.items():
        topic = named(fresh, name)
        if name == "ttl":
            continue  # it has gone on since
        check_topic(fresh, topic, told, forgetful=name in FORGETFUL, trimmed=name in TRIMMED)
        assert topic.head_seq == told.head_seq
        if told.queue is not None:
            check_leases(fresh, topic, told)
    assert contents(server.data_dir) == before, "a look must not touch anything"


def quiet_truth(api: Api, data_dir: Path) -> dict[str, Told] | None:
    """What the API says once all copies are on the disk, and nothing changes any more but by TTL."""
    folder = Folder(str(data_dir))
    names = [name for name in api.names() if name != "ttl"]
    if any(is_late(folder, name, api.state(name), TRIMMED) for name in names):
        return None
    return {name: api.told(name) for name in names}


def check_dead(folder: Folder, truth: dict[str, Told]) -> None:
    for name, told in truth.items():
        check_topic(folder, named(folder, name), told, forgetful=name in FORGETFUL, trimmed=name in TRIMMED)
        if told.queue is not None:
            check_leases(folder, named(folder, name), told)


# --- while four writers write ------------------------------------------------------------------------


def settled(api: Api, folder: Folder, names: list[str]) -> dict[str, Told]:
    """What the API says when it has published all that the folder has shown already."""
    for name in names:
        topic = named(folder, name)
        if topic.pipe is None:
            eventually(lambda name=name, head=topic.head_seq: api.state(name)["head_seq"] >= head, what=name)
    return {name: api.told(name) for name in names}


def test_while_four_writers_write(start_server: Start) -> None:
    server = start_server(**SMALL, TOPICS_WAL_SHARDS=2)
    api = Api(server.port)
    prepare(api)
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    writers = Writers(server.port, seed)
    onlooker = Folder(str(server.data_dir))
    stream = Stream(str(server.data_dir), *BUSY)
    held = exact = overtaken = 0
    snapshots: set[object] = set()
    wals: set[object] = set()
    writers.start()
    try:
        until = time.monotonic() + 12
        while time.monotonic() < until or held < 2_000 or exact < 2 or len(snapshots) < 5 or len(wals) < 5:
            assert not writers.failures, writers.failures
            names = [name for name in rng.sample(BUSY, 4)]
            before = {name: api.told(name) for name in names}
            onlooker.look()
            stream.look()
            try:
                held += between(before, onlooker, settled(api, onlooker, names))
                newcomer = Folder(str(server.data_dir))
                between(before, newcomer, settled(api, newcomer, names))
            except FileNotFoundError:
                overtaken += 1  # the server has absorbed a file since the look: look again
            snapshots |= {shard.snapshot for shard in onlooker.shards}
            wals |= {wal.file for shard in onlooker.shards for wal in shard.wals}
            if rng.random() < 0.3:
                writers.hold()  # in a quiet moment the server tidies up
                try:
                    exact += compare_exactly(api, onlooker, rng)
                finally:
                    writers.go_on()
            done = f"{held} records held, {exact} moments, {len(snapshots)} snapshots, {len(wals)} log files"
            assert time.monotonic() < until + 120, f"{done}, {overtaken} overtaken"
    finally:
        writers.stop()
    assert not writers.failures, writers.failures
    assert writers.done > 100
    steady(api, onlooker, stream.folder, Folder(str(server.data_dir)))
    stream.look()
    assert stream.check_end(api.everything()) > 1_000
    onlooker.look(now_ms=0)
    fresh = Folder(str(server.data_dir), now_ms=0)
    assert moment(onlooker) == moment(fresh)
    assert_same(onlooker, fresh)
    api.close()


def compare_exactly(api: Api, onlooker: Folder, rng: random.Random) -> int:
    """No client writes, but the server moves payloads and makes snapshots meanwhile."""
    if rng.random() < 0.5:
        steady(api, onlooker)
    for _ in range(20):
        onlooker.look(now_ms=0)
        fresh = Folder(str(onlooker.files.data_dir), now_ms=0)
        if moment(onlooker) == moment(fresh):
            assert_same(onlooker, fresh)
            return 1
    return 0


class Watchman:
    """Looks all the time, in turns as a newcomer and again and again."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = str(data_dir)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.looks = 0
        self.layouts: set[int] = set()
        self.failures: list[BaseException] = []
        self._thread.start()

    def _run(self) -> None:
        onlooker = Folder(self._data_dir)
        while not self._over.is_set():
            try:
                onlooker.look()
                fresh = Folder(self._data_dir)
            except BaseException as failure:  # told to the test
                self.failures.append(failure)
                return
            self.layouts |= {shard.layout for folder in (onlooker, fresh) for shard in folder.shards}
            self.looks += 1

    def look_on(self, times: int = 5) -> None:
        until = self.looks + times
        eventually(lambda: self.looks >= until or self.failures, what="looks")
        assert not self.failures, self.failures

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)


def test_looking_never_fails_whatever_happens_to_the_server(start_server: Start) -> None:
    server = start_server(**SMALL, TOPICS_WAL_SHARDS=2)
    api = Api(server.port)
    prepare(api)
    api.close()
    watchman = Watchman(server.data_dir)
    try:
        for seed, shards in enumerate((3, 1, 2)):
            writers = Writers(server.port, seed, rough=True)
            writers.start()
            try:
                watchman.look_on()
                server.signal_child("shard-0")
                watchman.look_on(20)
                eventually(lambda writers=writers: writers.done > 50, what="some work")
                if seed % 2:
                    server.kill()
                else:
                    server.stop()
            finally:
                writers.stop()
            watchman.look_on()
            server = start_server(**SMALL, TOPICS_WAL_SHARDS=shards)
            watchman.look_on()
    finally:
        watchman.stop()
    assert not watchman.failures, watchman.failures
    assert len(watchman.layouts) > 2, "it has seen them move"
    api = Api(server.port)
    steady(api, Folder(str(server.data_dir)))
    api.close()


# --- nothing but reading -----------------------------------------------------------------------------


def test_a_look_asks_nothing_and_changes_nothing(start_server: Start) -> None:
    """Files of a server at rest are the same before and after, and no file is opened to be written."""
    server = start_server(**SMALL)
    api = Api(server.port)
    fill(api, count(1), rounds=2)
    steady(api, Folder(str(server.data_dir)), forgetful=FORGETFUL, trimmed=TRIMMED)
    api.close()
    assert server.stop() == 0
    before = contents(server.data_dir)
    for path in sorted(server.data_dir.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    modes = contents(server.data_dir)
    first = shown(Folder(str(server.data_dir), now_ms=0))
    second = shown(Folder(str(server.data_dir), now_ms=0))
    assert first == second
    assert contents(server.data_dir) == modes
    for path in sorted(server.data_dir.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert {name: each[1:] for name, each in contents(server.data_dir).items()} == {
        name: each[1:] for name, each in before.items()
    }
