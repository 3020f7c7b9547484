"""A server with a cold tier, as its users see it: nothing is different, and the space is elsewhere."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import livefiles
import pytest

from topics.datadir.fsck.verify import verify
from topics.datadir.view.folder import Folder

from .client import Client, unique
from .queues import Queue, seqs_of
from .server import Server, eventually, run_topics
from .sse import Watching

pytestmark = [pytest.mark.e2e, pytest.mark.full]

SEGMENT = 50
RECORDS = 600
PADDING = "x" * 2_700  # so that a batch is a block, and a block a segment
ENVIRON = {"TOPICS_SEGMENT_MAX_EVENTS": SEGMENT, "TOPICS_HOT_RETAIN_SEGMENTS": 2, "TOPICS_CACHE_BYTES": 1_000}

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def begin(**environ: object) -> Server:
        given = {**ENVIRON, "TOPICS_COLD_DIR": tmp_path / "cold", **environ}
        if given["TOPICS_COLD_DIR"] is None:
            del given["TOPICS_COLD_DIR"]
        server = Server(tmp_path / "data", log=tmp_path / f"server-{len(servers)}.log", **given)
        servers.append(server)
        server.wait_ready()
        return server

    yield begin
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiers")
    server = Server(folder / "data", log=folder / "server.log", TOPICS_COLD_DIR=folder / "cold", **ENVIRON)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


def cold_of(server: Server) -> Path:
    return server.data_dir.parent / "cold"


def cold_files(server: Server, topic_id: int | None = None) -> list[Path]:
    below = "*" if topic_id is None else f"{topic_id:016x}"
    return livefiles.find(cold_of(server), f"topics/{below}/*.data")


def id_of(server: Server, topic: str) -> int:
    return int(topic_in(server, topic).id)


def topic_in(server: Server, name: str) -> Any:
    """As it is on the disk."""
    return next(found for found in Folder(str(server.data_dir)).topics if found.name == name)


def fill(server: Server, topic: str, *, count: int = RECORDS, **config: Any) -> int:
    """Records, of which all but the last segments are in the cold tier; the topic's id."""
    with server.client() as api:
        api.put(topic, **config)
        for start in range(0, count, SEGMENT):
            numbers = range(start + 1, start + SEGMENT + 1)
            records = [{"data": [number, PADDING], "tag": f"t{number % 5}"} for number in numbers]
            assert api.append_records(topic, records).status in (200, 201)
    topic_id = id_of(server, topic)
    wanted = count // SEGMENT - int(str(ENVIRON["TOPICS_HOT_RETAIN_SEGMENTS"]))
    eventually(lambda: len(cold_files(server, topic_id)) >= wanted, what="cold segments")
    hot = server.data_dir / "topics" / f"{topic_id:016x}"
    eventually(
        lambda: len(livefiles.find(hot, "*.data")) <= count // SEGMENT - wanted + 1, what="hot files that are gone"
    )
    return topic_id


def everything(api: Client, topic: str) -> list[int]:
    found: list[int] = []
    at = 0
    while True:
        page = api.diff(topic, at, limit=1_000)
        assert page.status == 200, page
        found += [record["data"][0] for record in page["records"]]
        at = page["next_from_seq"]
        if page["caught_up"]:
            return found


ALL = list(range(1, RECORDS + 1))


@pytest.mark.gate
def test_reads_deletes_and_what_is_left(server: Server) -> None:
    topic = unique("cold-")
    topic_id = fill(server, topic)
    with server.client() as api:
        assert everything(api, topic) == ALL
        before = api.state(topic)
        assert (before["count"], before["earliest_seq"], before["head_seq"]) == (RECORDS, 1, RECORDS)
        assert api.delete(topic, match="t3")["deleted"] == RECORDS // 5
        assert api.delete(topic, before_seq=8)["deleted"] == 6
        left = [number for number in ALL if number % 5 != 3 and number >= 8]
        assert everything(api, topic) == left
        assert api.delete(topic, before_seq=SEGMENT * 3 + 1).status == 200
        eventually(lambda: len(cold_files(server, topic_id)) == RECORDS // SEGMENT - 2 - 3, what="three files less")
        assert everything(api, topic) == [number for number in left if number > SEGMENT * 3]
        assert api.drop(topic).status == 200
        eventually(lambda: not cold_files(server, topic_id), what="no files of a dropped topic")


def test_a_watcher_from_the_beginning(server: Server) -> None:
    topic = unique("cold-")
    fill(server, topic)
    with Watching(server, "http1") as watching:
        stream = watching.follow(topic)
        stream.wait_records(topic, RECORDS, within_s=30)
        assert [data[0] for data in stream.data(topic)] == ALL


def test_a_queue(server: Server) -> None:
    with server.client() as api:
        queue = unique("cold-q-")
        fill(server, queue, type="queue")
        worker = Queue(api, queue)
        done = 0
        while done < 120:
            jobs = seqs_of(worker.claim(40))  # perhaps fewer: a claim ends before what has to be fetched
            assert jobs
            worker.ack(jobs[::2])
            done += len(jobs[::2])
        assert api.state(queue)["count"] == RECORDS - done


def test_from_outside(server: Server) -> None:
    topic = unique("cold-")
    fill(server, topic)
    assert topic_in(server, topic).head_seq == RECORDS
    verdict = verify(str(server.data_dir), deep=True, running=True)
    assert verdict.clean, verdict.problems
    shown = run_topics("segment", "ls", "--topic", topic, "--data-dir", str(server.data_dir), "--json")
    assert shown.returncode == 0, shown.stderr
    assert '"cold"' in shown.stdout
    with urllib.request.urlopen(f"{server.url}/v0/metrics") as answer:
        metrics = answer.read().decode()
    assert int(metrics.partition("\ntopics_cold_segments ")[2].split(".")[0]) >= 10


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one file system here")
    with tempfile.TemporaryDirectory(dir=memory, prefix="topics-test-") as folder:
        yield Path(folder)


def test_a_snapshot_keeps_what_the_server_drops(server: Server, elsewhere: Path) -> None:
    """Its segments can't be linked into it, and the cold tier is no longer where the server has it."""
    topic = unique("cold-")
    topic_id = fill(server, topic)

    def snapshot(*args: object) -> str:
        done = run_topics("snapshot", *map(str, args), "--dir", str(elsewhere), TOPICS_DATA_DIR=server.data_dir)
        assert done.returncode == 0, done.stderr
        return done.stdout

    snapshot("create", "s")
    links = list(cold_of(server).glob(f"snapshots/s-*/topics/{topic_id:016x}/*.data"))
    assert len(links) >= RECORDS // SEGMENT - 2
    with server.client() as api:
        assert api.drop(topic).status == 200
    eventually(lambda: not cold_files(server, topic_id), what="no files of a dropped topic")
    verdict = verify(str(elsewhere / "s"), deep=True, running=False)
    assert verdict.clean, verdict.problems
    (kept,) = [found for found in Folder(str(elsewhere / "s")).topics if found.name == topic]
    assert kept.count == RECORDS
    (listed,) = json.loads(snapshot("ls", "--json"))
    assert listed["own_bytes"] > sum(link.stat().st_size for link in links)
    (elsewhere / "s").rename(elsewhere / "s.1")
    (elsewhere / "s.tmp").mkdir()
    half = cold_of(server) / "snapshots" / "s-0123456789ab"
    half.mkdir()
    (elsewhere / "s.tmp" / "apart").write_text(str(half))  # of a try that was killed
    snapshot("create", "s")
    assert not half.exists()
    snapshot("rm", "s")
    verdict = verify(str(elsewhere / "s.1"), deep=True, running=False)
    assert verdict.clean, verdict.problems  # each has its own links
    snapshot("rm", "s.1")
    assert not list((cold_of(server) / "snapshots").iterdir())


def test_killed_and_started_again(start: Start, tmp_path: Path) -> None:
    server = start()
    fill(server, "t")
    with server.client() as api:
        assert api.delete("t", match="t2")["deleted"] == RECORDS // 5
    left = [number for number in ALL if number % 5 != 2]
    server.kill()
    server = start()
    with server.client() as api:
        assert everything(api, "t") == left
    assert server.stop() == 0
    for cold, shards in ((None, 2), (tmp_path / "cold", 3)):
        server = start(TOPICS_COLD_DIR=cold, TOPICS_WAL_SHARDS=shards)
        with server.client() as api:
            assert everything(api, "t") == left
        manifest = json.loads((server.data_dir / "topics.json").read_bytes())
        assert manifest["cold"] == str(tmp_path / "cold")
        assert server.stop() == 0
    (tmp_path / "cold").rename(tmp_path / "moved")
    server = start(TOPICS_WAL_SHARDS=3)
    with server.client() as api:
        away = api.diff("t", 0, limit=10)
        assert away.status == 503
        assert f"the cold tier {tmp_path / 'cold'} is not there" in away["error"]["message"]
    assert server.stop() == 0
    server = start(TOPICS_COLD_DIR=tmp_path / "moved", TOPICS_WAL_SHARDS=3)
    with server.client() as api:
        assert everything(api, "t") == left
    assert server.stop() == 0
    verdict = verify(str(server.data_dir), deep=True, running=False)
    assert verdict.clean, verdict.problems


def test_a_missing_cold_segment_is_named(start: Start) -> None:
    server = start()
    fill(server, "t")
    assert server.stop() == 0
    victim = cold_files(server)[0]
    victim.rename(victim.with_suffix(".gone"))
    again = Server(server.data_dir, log=server.log, **ENVIRON)
    try:
        eventually(lambda: f"{victim}: this segment of topic 't' is missing" in again.output(), what="a word about it")
    finally:
        again.close()
    verdict = verify(str(server.data_dir), deep=False, running=False)
    assert not verdict.clean


def metric(server: Server, name: str) -> int:
    with urllib.request.urlopen(f"{server.url}/v0/metrics") as answer:
        text = answer.read().decode()
    return int(text.partition(f"\n{name} ")[2].split("\n")[0].split(".")[0])


def append(api: Client, topic: str, first: int, last: int) -> None:
    for start in range(first, last + 1, SEGMENT):
        records = [{"data": [number, PADDING], "tag": f"t{number % 5}"} for number in range(start, start + SEGMENT)]
        assert api.append_records(topic, records).status in (200, 201)


def test_the_disk_goes_and_comes_back_while_serving(start: Start, tmp_path: Path) -> None:
    server = start(TOPICS_WAL_SHARDS=1)
    topic_id = fill(server, "t")
    hot = server.data_dir / "topics" / f"{topic_id:016x}"
    place, away = tmp_path / "cold", tmp_path / "unmounted"
    place.rename(away)
    place.mkdir()
    with server.client() as api:
        append(api, "t", RECORDS + 1, RECORDS * 2)
        eventually(lambda: len(livefiles.find(hot, "*.idx")) >= 2 * RECORDS // SEGMENT - 1, what="sealed segments")
        eventually(lambda: metric(server, "topics_cold_tier_missing") == 1, what="a sign of it")
        refused = api.diff("t", 0, limit=10)
        assert (refused.status, refused["error"]["code"]) == (503, "shard_unavailable"), refused
        assert f"the cold tier {place} is not there" in refused["error"]["message"]
        assert api.diff("t", RECORDS, limit=10)["records"][0]["$seq"] == RECORDS + 1
        assert api.append_records("other", [{"data": 1}]).status == 201
        assert list(place.iterdir()) == [], "nothing goes to what lies below"
        assert len(livefiles.find(hot, "*.data")) >= RECORDS // SEGMENT, "and no hot file goes"
        place.rmdir()
        away.rename(place)
        eventually(lambda: metric(server, "topics_cold_tier_missing") == 0, what="that it is back")
        assert everything(api, "t") == list(range(1, RECORDS * 2 + 1))
        append(api, "t", RECORDS * 2 + 1, RECORDS * 3)
        eventually(lambda: len(cold_files(server)) >= 2 * RECORDS // SEGMENT, what="that it goes on")
        assert everything(api, "t") == list(range(1, RECORDS * 3 + 1))
    assert server.output().count("relocation stopped") == 1
    assert server.output().count("relocation goes on") == 1
    assert server.stop() == 0
    verdict = verify(str(server.data_dir), deep=True, running=False)
    assert verdict.clean, verdict.problems
    server = start(TOPICS_WAL_SHARDS=1)
    with server.client() as api:
        assert everything(api, "t") == list(range(1, RECORDS * 3 + 1))


@pytest.mark.gate
def test_a_shard_that_dies_meanwhile_comes_back_without_the_disk(start: Start, tmp_path: Path) -> None:
    """And reads what is there as soon as it is."""
    server = start(TOPICS_WAL_SHARDS=1)
    fill(server, "t")
    place, away = tmp_path / "cold", tmp_path / "unmounted"
    place.rename(away)
    server.signal_child("shard-0")
    with server.client() as api:
        eventually(lambda: "relocation stopped" in server.output(), what="the disk missed by another process")
        eventually(lambda: api.append("t", [RECORDS + 1]).status == 200, what="an append")
        assert "recovery postponed" not in server.output()
        away.rename(place)
        assert everything(api, "t") == [*ALL, RECORDS + 1]
    assert server.stop() == 0
