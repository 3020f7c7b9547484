"""The shard count changes between starts: everything moves, the old layout's files go, and a crash on the way leaves
either the old layout or the new one."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_folder import layouts, newest_snapshot, segments, wal_files
from crash_oracle import Oracle, TopicLedger
from crash_server import EXHAUSTIVE, SMALL, Client, Server, eventually

from topics.actors.startup.datadir_lock import read_manifest
from topics.shm.counters import State
from topics.storage.config import owner_of_name

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 120)]

Start = Callable[..., Server]
HOUR_MS = 3_600_000
PADDING = "x" * 4_000


def fill(oracle: Oracle, client: Client, *, bulk: int = 20) -> list[TopicLedger]:
    """Topics of all classes with keys, tags and deletes; the first has enough for segments."""
    topics = []
    for at in range(8):
        name, durability = f"topic-{at}", ("disk", "fsync", "memory", "ephemeral")[at % 4]
        topic = oracle.topic(name, durability)
        assert topic.put(client, idempotency_window_ms=HOUR_MS, priority=at).ok
        topics.append(topic)
        for batch in range(4):
            tag = f"life{oracle.life}.{batch}"
            topic.append(client, [("", tag, b'{"m":1}'), ("", None, None)], key=f"{tag}-key")
        assert topic.delete(client, tags=[f"life{oracle.life}.1"], match=f"life{oracle.life}.1").ok
    for _ in range(bulk):
        tag = f"life{oracle.life}.bulk"
        topics[0].append(client, [(PADDING, tag if index == 3 else None, None) for index in range(12)])
    return topics


def settled(data_dir: Path, *, shards: int) -> bool:
    """Nothing of any other layout is left, and no folder of a shard that is no more holds files."""
    manifest = read_manifest(str(data_dir))
    assert manifest is not None
    assert manifest.shards == shards
    wanted = {f"shard-{at:02d}" for at in range(shards)}
    return all(found == ({manifest.layout} if name in wanted else set()) for name, found in layouts(data_dir).items())


@pytest.mark.gate
def test_one_three_two_one(serve: Start) -> None:
    oracle = Oracle()
    server = serve(shards=1, env=SMALL)
    data_dir = server.data_dir
    for how, shards in (("kill", 3), ("stop", 2), ("kill", 1)):
        client = server.client()
        topics = fill(oracle, client)
        eventually(lambda: segments(data_dir), what="segments")
        # Not in a segment yet, and the delete of something that is.
        topics[0].append_plain(client, 2)
        assert topics[0].delete(client, tags=[f"life{oracle.life}.bulk"], match=f"life{oracle.life}.bulk").ok
        if how == "kill":
            server.kill()
        else:
            assert server.stop() == 0
        oracle.restarted()
        server = serve(shards=shards, env=SMALL)
        oracle.check(server)
        deduped, _ = oracle.check_keys(server)
        assert deduped
        eventually(
            lambda shards=shards: settled(data_dir, shards=shards),
            what=f"the old layout's files gone: {layouts(data_dir)}",
        )
    server.kill()
    oracle.restarted()
    oracle.check(serve(shards=1, env=SMALL))


def test_a_shard_that_never_held_anything_is_no_damage(serve: Start) -> None:
    """Old shards without a snapshot and without a frame, beside one whose topics have segments."""
    oracle = Oracle()
    server = serve(shards=3, env=SMALL)
    client = server.client()
    name = next(name for at in range(100) if owner_of_name(name := f"only-{at}", 3) == 0)
    topic = oracle.create(client, name, "fsync")
    for _ in range(10):
        topic.append_plain(client, 12, padding=PADDING)
    eventually(lambda: segments(server.data_dir), what="segments")
    server.kill()
    oracle.restarted()
    oracle.check(serve(shards=2, env=SMALL))


POINTS = ["flushed:1", "renamed:1", "snapshot:1"]
MORE_POINTS = [
    "rotated:1",
    "write:2",
    "rename:1",
    "sync:2",
    "written:1",
    "written:4",
    "synced:1",
    "flushed:2",
    "rename:2",
    "renamed:2",
    "sync:1",
    "sync:3",
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    """The folder of a killed server with two shards."""
    folder = tmp_path_factory.mktemp("killed") / "data"
    server = Server(folder, shards=2, env=SMALL)
    try:
        oracle = Oracle()
        fill(oracle, server.wait_ready().client())
    finally:
        server.close()
    oracle.restarted()
    return folder, oracle


@pytest.mark.parametrize("point", POINTS + (MORE_POINTS if EXHAUSTIVE else []))
def test_dying_on_the_way_leaves_one_layout_or_the_other(
    serve: Start, killed: tuple[Path, Oracle], tmp_path: Path, point: str
) -> None:
    data_dir, oracle = tmp_path / "data", killed[1]
    shutil.copytree(killed[0], data_dir)
    dying = serve(shards=3, env={**SMALL, "TOPICS_KILL_POINT": point}, wait=False)
    eventually(lambda: dying.deaths() or dying.popen.poll() is not None, what=f"a death at {point}")
    dying.close()
    # Whoever comes next may want any number of shards.
    shards = random.Random(point).choice([1, 2, 3])
    server = serve(shards=shards, env=SMALL)
    oracle.check(server)
    oracle.check_keys(server)
    eventually(lambda: settled(data_dir, shards=shards), what=f"other layouts' files gone: {layouts(data_dir)}")


def test_killed_at_any_moment_of_a_move(serve: Start, seed: int) -> None:
    rng = random.Random(seed)
    oracle = Oracle()
    server = serve(shards=1, env=SMALL)
    fill(oracle, server.client(), bulk=60)
    server.kill()
    for _ in range(20 if EXHAUSTIVE else 2):
        dying = serve(shards=rng.choice([1, 2, 3, 4]), env=SMALL, wait=False)
        eventually(lambda dying=dying: dying.board.row("shard-0"), what="a shard")
        time.sleep(rng.uniform(0.1, 0.9))
        dying.kill()
    oracle.restarted()
    server = serve(shards=2, env=SMALL)
    oracle.check(server)
    data_dir = server.data_dir
    eventually(lambda: settled(data_dir, shards=2), what=f"other layouts' files gone: {layouts(data_dir)}")


def test_a_move_that_fails_leaves_the_old_layout_whole(serve: Start) -> None:
    """One shard finishes its part, which makes a segment useless, and another can't: back to the old count."""
    oracle = Oracle()
    server = serve(shards=1, env=SMALL)
    client = server.client()
    cleared = oracle.create(client, next(n for i in range(99) if owner_of_name(n := f"cleared-{i}", 2) == 0), "disk")
    for _ in range(25):
        cleared.append_plain(client, 12, padding=PADDING)
    eventually(lambda: newest_snapshot(server.data_dir) and len(segments(server.data_dir)) > 2, what="a snapshot")
    (state,) = newest_snapshot(server.data_dir)[1]  # type: ignore[index]
    assert state.segments
    assert cleared.delete(client, before_seq=cleared.highest_acked).ok
    # The other shard's part: more index files than the first shard writes.
    many = [name for i in range(99) if owner_of_name(name := f"many-{i}", 2) == 1][:6]
    for name in many:
        topic = oracle.create(client, name, "disk")
        for _ in range(2):
            topic.append_plain(client, 40)
    server.kill()
    oracle.restarted()

    failing = serve(shards=2, env={**SMALL, "TOPICS_KILL_POINT": "rename:4"}, wait=False)
    eventually(lambda: failing.state("shard-0") is State.READY, what=f"shard-0's part done\n{failing.log()}")
    eventually(lambda: failing.restarts("shard-1") >= 1, what=f"a death of shard-1\n{failing.log()}")
    failing.kill()

    server = serve(shards=1, env=SMALL, wait=False)
    eventually(lambda: server.state("shard-0") in (State.READY, State.FAILED), what="a decision")
    assert server.state("shard-0") is State.READY, server.log()
    server.wait_ready()
    oracle.check(server)


@pytest.mark.skipif(not EXHAUSTIVE, reason="takes as long as all the restarts that come before giving up")
def test_a_move_given_up_says_how_to_go_back(serve: Start) -> None:
    oracle = Oracle()
    server = serve(shards=1, env=SMALL)
    topic = oracle.create(server.client(), "t", "fsync")
    topic.append_plain(server.client(), 5)
    server.kill()
    oracle.restarted()
    before = wal_files(server.data_dir)
    failing = serve(shards=2, env={**SMALL, "TOPICS_KILL_POINT": "rotated"}, wait=False)
    assert failing.wait_exit() == 1
    assert "TOPICS_WAL_SHARDS=1" in failing.log()
    server = serve(shards=1, env=SMALL)
    oracle.check(server)
    assert set(before) <= set(wal_files(server.data_dir))
