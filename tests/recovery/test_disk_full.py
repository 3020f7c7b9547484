"""A disk without space: writes are refused, everything else goes on, and it ends without a restart when there is
space again. On a small tmpfs, which needs the right to mount."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_oracle import Fate, Oracle, TopicLedger
from crash_server import EXHAUSTIVE, SMALL, Client, Server, eventually

from topics.shm.counters import State

pytestmark = pytest.mark.recovery

Start = Callable[..., Server]
DISK_BYTES = 24 << 20
FILLER_BYTES = 12 << 20
PADDING = "x" * 8_000


# The disk watch would refuse writes long before: here it is about what happens without it.
UNWATCHED = {**SMALL, "TOPICS_MIN_FREE_BYTES": "0"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "topics-test", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    yield mount
    # The servers of this test are killed by their own fixture, which may end after this one.
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


class Filler:
    """A file of somebody else that takes space away."""

    def __init__(self, mount: Path) -> None:
        self._path = mount / "filler"
        self._path.write_bytes(bytes(FILLER_BYTES))

    def take_the_rest(self) -> None:
        with self._path.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def leave(self, size: int) -> None:
        self.take_the_rest()
        os.truncate(self._path, self._path.stat().st_size - size)

    def free(self) -> None:
        self._path.unlink()


def fill_up(topics: list[TopicLedger], client: Client) -> None:
    """Append until every topic's writes are refused for want of space."""
    for topic in topics:
        for _ in range(1_000):
            batch = topic.new_batch([(PADDING, "bulk", None)] * 10)
            answer = topic.send(client, batch)
            if not answer.ok:
                assert (answer.status, answer.code) == (503, "storage_full"), answer.raw
                assert answer.retry_after
                assert batch.fate is Fate.REFUSED
                break
        else:
            raise AssertionError("the disk never filled up")


def accepts(topic: TopicLedger, client: Client) -> bool:
    return topic.append(client, [("", None, None)]).fate is Fate.ACKED


@pytest.mark.gate
def test_writes_are_refused_and_resume_by_themselves(serve: Start, small_disk: Path) -> None:
    filler = Filler(small_disk)
    oracle = Oracle()
    server = serve(shards=1, env=UNWATCHED, data_dir=small_disk / "data")
    client = server.client()
    topics = [oracle.create(client, name, name) for name in ("fsync", "disk", "memory")]
    for topic in topics:
        topic.append(client, [("", "early", None)] * 10, key="early")
    fill_up(topics, client)
    filler.take_the_rest()
    # Reads go on, and deletes, which even need the log.
    oracle.check(server, crashed=False)
    for topic in topics:
        answer = topic.delete(client, tags=["early"], match="early")
        assert answer.ok, answer.raw
        assert answer.body["deleted"] == 10
    refused = client.put("new")
    assert refused.ok or (refused.status, refused.code) == (503, "storage_full")
    # Time for flushes and snapshots to try as well, and to fail.
    answered = 0

    def a_while() -> bool:
        nonlocal answered
        answered += client.diff("disk").ok
        return answered >= 100

    eventually(a_while, what="reads")
    oracle.check(server, crashed=False)
    assert server.restarts("shard-0") == 0, server.log()
    assert server.state("shard-0") is State.READY

    filler.free()
    for topic in topics:
        eventually(lambda topic=topic: accepts(topic, client), what=f"{topic.name} writable again")
    assert server.restarts("shard-0") == 0
    oracle.check(server, crashed=False)
    server.kill()
    oracle.restarted()
    server = serve(shards=1, env=UNWATCHED, data_dir=small_disk / "data")
    oracle.check(server)
    oracle.check_keys(server)


@pytest.mark.parametrize("how", ["kill", "stop"] if EXHAUSTIVE else ["kill"])
@pytest.mark.parametrize("file_bytes", [8 << 20, 1 << 20] if EXHAUSTIVE else [8 << 20])
def test_ended_and_started_while_the_disk_is_full(serve: Start, small_disk: Path, how: str, file_bytes: int) -> None:
    """Nothing is lost, what can be served is served, and space mends the rest without an operator. Also if all that the
    end gives back is much less than a log file."""
    env = {**UNWATCHED, "TOPICS_WAL_FILE_BYTES": str(file_bytes)}
    filler = Filler(small_disk)
    oracle = Oracle()
    server = serve(shards=1, env=env, data_dir=small_disk / "data")
    client = server.client()
    topics = [oracle.create(client, name, name) for name in ("fsync", "disk")]
    fill_up(topics, client)
    filler.take_the_rest()
    if how == "kill":
        server.kill()
    else:
        server.stop()
    oracle.restarted()
    filler.take_the_rest()
    server = serve(shards=1, env=env, data_dir=small_disk / "data", wait=False)
    client = server.client()
    eventually(lambda: client.get("fsync").ok, what=f"reads on a full disk\n{server.log()}")
    oracle.check(server)
    deleted = topics[0].delete(client, before_seq=3)
    assert deleted.ok, deleted.raw
    assert server.restarts("shard-0") == 0, server.log()
    filler.free()
    for topic in topics:
        eventually(lambda topic=topic: accepts(topic, client), what=f"{topic.name} writable again")
    server.kill()
    oracle.restarted()
    oracle.check(serve(shards=1, env=env, data_dir=small_disk / "data"))


@pytest.mark.gate
def test_a_destination_after_a_kill_on_a_full_disk(serve: Start, small_disk: Path) -> None:
    """Its copies were in memory: they are there again though nothing can be written, and reads and deletes go on."""
    env = {**UNWATCHED, "TOPICS_WAL_FILE_BYTES": str(8 << 20)}
    filler = Filler(small_disk)
    server = serve(shards=1, env=env, data_dir=small_disk / "data")
    client = server.client()
    assert client.call("PUT", "/v0/routers/r", {"source": "s", "dest": "d"}).ok
    for number in range(5):
        assert client.append("s", number).ok
    eventually(lambda: client.diff("d").body["head_seq"] == 5, what="the copies")
    assert client.append("d", "direct").ok
    assert client.delete("s", before_seq=3).ok
    filler.take_the_rest()
    server.kill()
    filler.take_the_rest()
    server = serve(shards=1, env=env, data_dir=small_disk / "data", wait=False)
    client = server.client()
    eventually(lambda: client.call("GET", "/v0/ready").ok, what=f"ready on a full disk\n{server.log()}")
    assert client.call("GET", "/v0/topics").ok
    page = client.diff("d").body
    found = {record["$seq"]: record["data"] for record in page["records"]}
    everything = {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: "direct"}
    assert found in (everything, {seq: data for seq, data in everything.items() if seq > 2})
    assert (page["tombstone"] is None) == (found == everything)
    assert page["head_seq"] == 6
    deleted = client.delete("d", before_seq=4)
    assert deleted.ok, deleted.raw
    assert [record["$seq"] for record in client.diff("d", 3).body["records"]] == [4, 5, 6]
    filler.free()
    eventually(lambda: client.append("s", "later").ok, what="writable again")
    eventually(lambda: client.diff("d").body["head_seq"] == 7, what="the next copy")


def test_another_shard_count_on_a_full_disk_is_given_up(serve: Start, small_disk: Path) -> None:
    """It says so, and the old count serves everything."""
    env = {**UNWATCHED, "TOPICS_WAL_FILE_BYTES": str(8 << 20)}
    filler = Filler(small_disk)
    oracle = Oracle()
    server = serve(shards=1, env=env, data_dir=small_disk / "data")
    client = server.client()
    topics = [oracle.create(client, name, "fsync") for name in ("a", "b", "c", "d")]
    for _ in range(3):
        for topic in topics:
            topic.append(client, [(PADDING, "bulk", None)] * 10)
    server.kill()
    oracle.restarted()
    filler.leave(300 << 10)  # enough for log files, snapshots and the manifest
    moving = serve(shards=2, env=env, data_dir=small_disk / "data", wait=False)
    assert moving.wait_exit() == 1
    assert "TOPICS_WAL_SHARDS=1" in moving.log()
    assert "no space to move the records" in moving.log()
    server = serve(shards=1, env=env, data_dir=small_disk / "data", wait=False)
    client = server.client()
    eventually(lambda: client.get("a").ok, what=f"reads on a full disk\n{server.log()}")
    oracle.check(server)
    filler.free()
    server.kill()
    oracle.restarted()
    server = serve(shards=2, env=env, data_dir=small_disk / "data")
    oracle.check(server)
    assert all(accepts(topic, server.client()) for topic in topics)
