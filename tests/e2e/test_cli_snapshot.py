"""`topics snapshot` on the folder of a running server: whole, stable, cheap, and never in the server's way."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import livefiles
import pytest

from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic

from .server import Server, eventually, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def serve(**environ: object) -> Server:
        number = len(servers)
        servers.append(Server(tmp_path / "data", log=tmp_path / f"{number}.log", **environ))
        servers[-1].wait_ready()
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def snapshot(server: Server, *args: object) -> Any:
    done = run_topics("snapshot", *map(str, args), "--json", TOPICS_DATA_DIR=server.data_dir)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def topic_of(folder: Folder, name: str) -> Topic:
    return next(topic for topic in folder.topics if topic.name == name)


def sealed(server: Server, name: str) -> int:
    """How many segments of a topic are final."""
    return sum(segment.sealed for segment in topic_of(Folder(str(server.data_dir)), name).segments)


def values(folder: Folder, name: str) -> list[Any]:
    topic = topic_of(folder, name)
    found: list[Any] = []
    for batch in topic.select(topic.low, topic.disk_seq):
        data = folder.columns(batch).data()
        found.extend(json.loads(data[seq - batch.first]) for seq in batch.live_seqs(topic.low))
    return [value["n"] if isinstance(value, dict) else value for value in found]


def padded(first: int, count: int, size: int = 10_000) -> list[Any]:
    """Large enough that the log goes on in another file soon, and the server writes a snapshot of its own."""
    return [{"n": n, "pad": "x" * size} for n in range(first, first + count)]


ROTATING = {
    "TOPICS_SEGMENT_MAX_EVENTS": 50,
    "TOPICS_SEGMENT_MAX_AGE_MS": 200,
    "TOPICS_WAL_FILE_BYTES": 1 << 20,
}


@pytest.mark.gate
def test_it_holds_what_was_acknowledged_and_stays_so(start: Start) -> None:
    server = start(**ROTATING)
    with server.client() as api:
        for first in range(0, 300, 10):
            api.append("orders", *padded(first, 10))
        eventually(lambda: sealed(server, "orders"), what="a sealed segment")
        made = snapshot(server, "create", "one")
        place = server.data_dir / "snapshots" / "one"
        assert made["records"] == 300
        assert made["linked_files"] > 0
        assert values(Folder(str(place)), "orders") == list(range(300))

        for first in range(300, 600, 10):
            api.append("orders", *padded(first, 10))
        assert api.drop("orders").status == 200
        eventually(lambda: not livefiles.find(server.data_dir, "topics/*/*.data"), what="its segments to go")
        assert values(Folder(str(place)), "orders") == list(range(300))
        assert snapshot(server, "ls")[0]["own_bytes"] > 0


def test_records_do_not_expire_in_it(start: Start) -> None:
    server = start()
    with server.client() as api:
        api.put("ticks", ttl_ms=8_000)  # the command has to come before it is over
        api.append("ticks", 1, 2, 3)
        snapshot(server, "create", "now")
        eventually(lambda: api.diff("ticks").data == [], what="the records to expire")
    assert values(Folder(str(server.data_dir)), "ticks") == []
    assert values(Folder(str(server.data_dir / "snapshots" / "now")), "ticks") == [1, 2, 3]


def test_under_load_each_is_a_prefix(start: Start) -> None:
    server = start(**ROTATING)
    done = threading.Event()
    acknowledged = [0, 0, 0]

    def write(at: int) -> None:
        with server.client() as api:
            while not done.is_set():
                first = acknowledged[at]
                api.append(f"t{at}", *padded(first, 7, size=2_000))
                acknowledged[at] = first + 7

    writers = [threading.Thread(target=write, args=(at,)) for at in range(3)]
    for writer in writers:
        writer.start()
    try:
        for number in range(6):
            eventually(lambda: min(acknowledged) > 200 * (number + 1))  # noqa: B023
            before = list(acknowledged)
            snapshot(server, "create", f"s{number}")
            folder = Folder(str(server.data_dir / "snapshots" / f"s{number}"))
            for at in range(3):
                found = values(folder, f"t{at}")
                assert found == list(range(len(found)))
                assert len(found) >= before[at]
    finally:
        done.set()
        for writer in writers:
            writer.join()
    names = [each["snapshot"]["name"] for each in snapshot(server, "ls")]
    assert names == [f"s{number}" for number in range(6)]
    gone = run_topics("snapshot", "rm", *names, TOPICS_DATA_DIR=server.data_dir)
    assert gone.returncode == 0, gone.stderr
    assert snapshot(server, "ls") == []
    with server.client() as api:
        assert api.state("t0")["count"] == acknowledged[0]


def test_one_that_was_cut_off_is_not_listed_and_not_in_the_way(start: Start) -> None:
    server = start()
    with server.client() as api:
        api.append("t", 1)
    left = server.data_dir / "snapshots" / "a.tmp"
    left.mkdir(parents=True)
    (left / "topics.json").write_text('{"format":1,"layout":1,"shards":2}')
    assert snapshot(server, "ls") == []
    assert snapshot(server, "create", "a")["records"] == 1
    assert not left.exists()


def test_on_another_disk_everything_is_copied(start: Start, tmp_path: Path) -> None:
    place = Path("/dev/shm") / f"topics-test-{os.getpid()}"
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system here")
    server = start(**ROTATING)
    try:
        with server.client() as api:
            for first in range(0, 300, 100):
                api.append("t", *padded(first, 100))
            eventually(lambda: sealed(server, "t"), what="a sealed segment")
        made = snapshot(server, "create", "far", "--dir", place)
        assert made["linked_files"] == 0
        assert values(Folder(str(place / "far")), "t") == list(range(300))
    finally:
        run_topics("snapshot", "rm", "far", "--dir", str(place))
        place.rmdir()


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("create", "../up"), 2, "letters, digits"),
        (("create", "twice"), 1, "there is a snapshot twice"),
        (("rm", "nothing"), 1, "there is no snapshot nothing"),
        (("rm", ".."), 1, "there is no snapshot .."),
    ],
)
def test_what_it_refuses(start: Start, args: tuple[str, ...], code: int, says: str) -> None:
    server = start()
    snapshot(server, "create", "twice")
    done = run_topics("snapshot", *args, TOPICS_DATA_DIR=server.data_dir)
    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 4


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    done = run_topics("snapshot", "create", TOPICS_DATA_DIR=tmp_path / "nowhere")
    assert done.returncode == 1
    assert "does not exist" in done.stderr


def test_nobody_serves_a_snapshot(start: Start) -> None:
    server = start()
    with server.client() as api:
        api.append("t", 1)
    snapshot(server, "create", "a")
    done = run_topics("serve", TOPICS_DATA_DIR=server.data_dir / "snapshots" / "a", TOPICS_PORT=0)
    assert done.returncode == 2
    assert "is a snapshot" in done.stderr


def test_it_takes_moments_whatever_the_size(start: Start) -> None:
    """It does not read what it links: what is copied is the tail, however much there is."""
    server = start(**ROTATING)
    with server.client() as api:
        for first in range(0, 2_000, 100):
            api.append("t", *padded(first, 100))
        eventually(lambda: sealed(server, "t") >= 15, what="sealed segments")
    made = snapshot(server, "create", "large")
    assert made["records"] == 2_000
    assert made["copied_bytes"] < 12 << 20  # of 20 MB


def test_one_that_is_half_removed_can_be_removed(tmp_path: Path) -> None:
    place = tmp_path / "snapshots"
    (place / "half" / "wal").mkdir(parents=True)
    (place / "half" / "snapshot.json").write_text("{}")  # the manifest goes first, this last
    done = run_topics("snapshot", "rm", "half", "--dir", str(place))
    assert done.returncode == 0, done.stderr
    assert not (place / "half").exists()
