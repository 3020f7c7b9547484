"""The folder of a server that was killed, read before anybody starts it again: it shows what recovery will find."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_server import EXHAUSTIVE, SMALL, Server, eventually
from e2e.bustle import BUSY, Writers, prepare
from onlooker import Api, Stream, assert_same, check_leases, contents, live_records, named, steady

from topics.datadir.view.folder import Folder

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 240)]

Start = Callable[..., Server]
ENV = {**SMALL, "TOPICS_SEGMENT_MAX_AGE_MS": "300", "TOPICS_MIN_FREE_BYTES": "0"}


def looked_at(data_dir: Path, onlooker: Folder | None) -> Folder:
    """By a newcomer and by whoever saw it alive; nothing is touched. The look given back is at a copy, because the
    next server removes files."""
    before = contents(data_dir)
    fresh = Folder(str(data_dir))
    if onlooker is not None:
        onlooker.look(now_ms=fresh.taken_ms)
        assert_same(onlooker, fresh)
    assert contents(data_dir) == before
    copy = tempfile.mkdtemp(prefix="dead-", dir=data_dir.parent)
    shutil.copytree(data_dir, copy, dirs_exist_ok=True)
    return Folder(copy)


def check_recovered(dead: Folder, api: Api) -> int:
    """What the dead folder showed is what a server makes of it; how many records that are."""
    found = 0
    visible = [topic for topic in dead.topics if not topic.internal]
    assert [topic.name for topic in visible] == api.names()
    for topic in visible:
        told = api.told(topic.name)
        records = live_records(dead, topic)
        found += len(records)
        if topic.pipe is None:
            assert records == told.records, topic.name
            assert (topic.head_seq, topic.earliest_seq) == (told.head_seq, told.earliest_seq), topic.name
            assert (topic.count, topic.bytes(dead.columns)) == (told.count, told.bytes), topic.name
        else:
            until = topic.disk_seq  # what was in memory comes back behind it, under its old number or another
            seen = [record for record in records if record.seq <= until]
            assert seen == [record for record in told.records if record.seq <= until], topic.name
        if told.queue is not None:
            check_leases(dead, topic, told)
    return found


@pytest.mark.gate
def test_killed_at_any_moment(serve: Start, seed: int) -> None:
    rng = random.Random(seed)
    server = serve(shards=2, env=ENV)
    api = Api(server.port)
    prepare(api)
    stream = Stream(str(server.data_dir), *BUSY)  # through all lives
    for life in range(8 if EXHAUSTIVE else 3):
        onlooker = Folder(str(server.data_dir))
        writers = Writers(server.port, rng.randrange(1 << 32), rough=True)
        writers.start()
        try:
            until = time.monotonic() + rng.uniform(1.0, 3.0)
            while time.monotonic() < until:
                onlooker.look()
                stream.look()
        finally:
            server.kill()
            writers.stop()
        api.close()
        assert writers.done > 20
        dead = looked_at(server.data_dir, onlooker)
        server = serve(shards=2, env=ENV)
        api = Api(server.port)
        assert check_recovered(dead, api) > 50, f"life {life}"
    steady(api, stream.folder)
    stream.look()
    assert stream.check_end(api.everything()) > 500
    api.close()


POINTS = ["rotated:3", "flushed:4", "renamed:3"]
MORE_POINTS = [
    "rename:3",
    "snapshot:2",
    "written:200",
    "write:150",
    "sync:9",
    "synced:9",
    "flushed:1",
    "rename:1",
    "renamed:1",
    "snapshot:1",
    "publish:90",
]


@pytest.mark.parametrize("point", POINTS + (MORE_POINTS if EXHAUSTIVE else []))
def test_killed_in_the_middle_of(serve: Start, seed: int, point: str) -> None:
    """A shard dies between two steps of what it does with files, and nobody comes after it."""
    server = serve(shards=2, env=ENV)
    api = Api(server.port)
    prepare(api)
    api.close()
    assert server.stop() == 0
    server = serve(shards=2, env={**ENV, "TOPICS_KILL_POINT": point}, wait=False)
    eventually(server.listens, what="a listener")
    onlooker = Folder(str(server.data_dir))
    writers = Writers(server.port, seed, rough=True)
    writers.start()
    rng = random.Random(seed)

    def died() -> int:
        onlooker.look()
        if rng.random() < 0.2:  # in a quiet moment it tidies up
            writers.hold()
            time.sleep(rng.uniform(0.1, 0.5))
            writers.go_on()
        return server.deaths()

    try:
        eventually(died, within_s=90, what=f"a death at {point}")
    finally:
        server.kill()
        writers.stop()
    dead = looked_at(server.data_dir, onlooker)
    api = Api(serve(shards=2, env=ENV).port)
    check_recovered(dead, api)
    api.close()


MOVES = ["flushed:2", "renamed:2", "snapshot:1"] if EXHAUSTIVE else ["renamed:2"]


@pytest.mark.parametrize("point", MOVES)
def test_killed_while_everything_moves_to_other_shards(serve: Start, seed: int, point: str) -> None:
    """Until the manifest names the new layout the old one counts, whatever lies beside it."""
    server = serve(shards=2, env=ENV)
    api = Api(server.port)
    prepare(api)
    writers = Writers(server.port, seed, rough=True)
    writers.start()
    eventually(lambda: writers.done > 200, what="some work")
    server.kill()
    writers.stop()
    api.close()
    dead = looked_at(server.data_dir, None)
    dying = serve(shards=3, env={**ENV, "TOPICS_KILL_POINT": point}, wait=False)
    eventually(lambda: dying.deaths() or dying.popen.poll() is not None, what=f"a death at {point}")
    dying.close()
    moving = looked_at(server.data_dir, None)
    for topic in dead.topics:
        if topic.name in {each.name for each in moving.topics} and topic.pipe is None:
            assert live_records(moving, named(moving, topic.name)) == live_records(dead, topic)
    assert len(moving.topics) == len(dead.topics)
    shards = len(moving.shards)
    api = Api(serve(shards=shards, env=ENV).port)
    check_recovered(moving, api)
    api.close()
