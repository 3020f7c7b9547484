"""The watch on the data disk: below the mark nothing is taken in, everything else goes on, and it lifts by itself.

Most tests look at a server that was filled while there was space and then started again with a mark that no disk
reaches: it is low all the time, whatever else happens on the machine. The others let the disk become low and recover,
by a file that takes the space: so large that what others write meanwhile makes no difference.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from topics.actors.inspect.attach import open_board
from topics.actors.startup.datadir_lock import read_lock_info
from topics.shm.counters import Word

from .client import LANES, Answer, Client, Lane
from .pressing import Threads, assert_all_there, fresh_on, gauges, http_writer
from .queues import Queue, make_queue
from .routing import data_of, get_router, name_on, put_router, route, wait_data
from .server import Server, eventually
from .sockets import Socket
from .sse import Watching

pytestmark = pytest.mark.e2e

NEVER = 1 << 40  # the highest mark there is: a test machine has less free space
GIB = 1 << 30
WITHIN_S = 20.0


def start(folder: Path, **environ: object) -> Iterator[Server]:
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output(), server.output()[-3_000:]
    finally:
        server.close()


serving = contextmanager(start)


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def read_only(server: Server) -> dict[str, int]:
    """As the shards say it on the board; nobody is asked."""
    board = open_board(read_lock_info(str(server.data_dir)))
    try:
        return {row.name: row[Word.WAL_READ_ONLY] for row in board.rows() if row.name.startswith("shard-")}
    finally:
        board.close()


def assert_storage_full(answer: Answer, *, mark: int = NEVER, folder: Path | None = None) -> None:
    """The whole refusal."""
    assert answer.refusal == (503, "storage_full"), answer
    assert answer.detail.keys() == {"free_bytes", "min_free_bytes"}, answer
    assert answer.detail["min_free_bytes"] == mark
    assert 0 <= answer.detail["free_bytes"] < mark * 21 // 20
    if folder is not None:
        assert answer.detail["free_bytes"] == pytest.approx(free_bytes(folder), rel=0.25)
    assert 1 <= int(answer.headers["retry-after"]) <= 60


# --- low from the start ------------------------------------------------------------------------------


class Filled:
    """What was written while there was space."""

    def __init__(self, api: Client) -> None:
        self.topics = [name_on(shard, "kept") for shard in range(2)]
        for topic in self.topics:
            assert api.put(topic, idempotency_window_ms=3_600_000).status == 201
            assert api.append_records(topic, [{"data": n, "tag": f"t{n}"} for n in range(100)]).status == 200
            keyed = api.append(topic, "keyed", idempotency_key="key")
            assert keyed["seqs"] == [101]
        self.queue = make_queue(api, name_on(1, "jobs"), default_lease_ms=3_600_000).name
        Queue(api, self.queue).produce(*range(200))
        self.source, self.dest = name_on(0, "source"), name_on(1, "dest")
        assert api.put(self.dest, cap_records=1, discard="reject").status == 201
        self.router = route(api, self.source, self.dest)
        for number in range(5):
            assert api.append(self.source, number).status in (200, 201)
        wait_data(api, self.dest, [0])  # the others have to wait
        self.dropped = [name_on(shard % 2, "dropped") for shard in range(4)]
        for topic in self.dropped:
            assert api.append(topic, 1).status == 201


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Filled]]:
    folder = tmp_path_factory.mktemp("low")
    assert free_bytes(folder) < NEVER, "these tests need a disk with less than a TiB of free space"
    with serving(folder) as first, first.client() as api:
        filled = Filled(api)
        assert first.stop() == 0
    with serving(folder, TOPICS_MIN_FREE_BYTES=NEVER) as server:
        eventually(lambda: set(read_only(server).values()) == {1}, what="shards that know it")
        yield server, filled


@pytest.fixture
def server(low: tuple[Server, Filled]) -> Server:
    return low[0]


@pytest.fixture
def filled(low: tuple[Server, Filled]) -> Filled:
    return low[1]


@pytest.fixture
def api(server: Server, lane: Lane) -> Iterator[Client]:
    with server.client(lane) as client:
        yield client


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize(
    "fields",
    [{}, {"idempotency_key": "new"}, {"disable_backpressure": True}, {"create": True}],
    ids=["plain", "keyed", "patient", "create"],
)
def test_appends_are_refused_and_leave_nothing(
    server: Server, filled: Filled, api: Client, shard: int, fields: dict[str, Any]
) -> None:
    topic = filled.topics[shard]
    before = api.state(topic).without_performance()
    answer = api.append(topic, "no", **fields)
    assert_storage_full(answer, folder=server.data_dir)
    after = api.state(topic).without_performance()
    assert [after[name] for name in ("head_seq", "count", "bytes")] == [
        before[name] for name in ("head_seq", "count", "bytes")
    ]


@pytest.mark.parametrize("shard", [0, 1])
def test_no_topic_is_made(api: Client, shard: int) -> None:
    ways: tuple[Callable[[str], Answer], ...] = (
        lambda topic: api.put(topic),
        lambda topic: api.put(topic, type="queue"),
        lambda topic: api.put(topic, durability="ephemeral"),
        lambda topic: api.append(topic, 1),
        lambda topic: api.append(topic, 1, config={"durability": "fsync"}),
        lambda topic: api.append(topic, 1, disable_backpressure=True),
    )
    for create in ways:
        topic = fresh_on(shard, stem="new")
        assert_storage_full(create(topic))
        assert api.state(topic).refusal == (404, "topic_not_found")
        assert api.list(prefix=topic)["topics"] == []


def test_an_append_to_what_is_not_there_is_still_not_found(api: Client) -> None:
    assert api.append(fresh_on(0, stem="none"), 1, create=False).refusal == (404, "topic_not_found")


def test_a_publish_is_refused_and_the_socket_goes_on(server: Server, filled: Filled) -> None:
    with Socket(server.port) as socket:
        socket.tell("publish", topic=filled.topics[0], request_id=7, records=[{"data": 1}])
        answer = json.loads(socket.receive_text(WITHIN_S))
        assert (answer["op"], answer["code"], answer["request_id"]) == ("error", "storage_full", 7), answer
        assert answer["detail"]["min_free_bytes"] == NEVER
        socket.subscribe(filled.topics[0], from_seq=100)
        assert socket.data(filled.topics[0], 1) == ["keyed"]


@pytest.mark.parametrize("shard", [0, 1])
def test_a_retry_of_what_was_written_is_answered(filled: Filled, api: Client, shard: int) -> None:
    """Whoever did not get the answer before the disk was full is told that it was done."""
    answer = api.append(filled.topics[shard], "keyed", idempotency_key="key")
    assert answer.status == 200, answer
    assert (answer["deduped"], answer["seqs"]) == (True, [101])


@pytest.mark.parametrize("shard", [0, 1])
def test_everything_can_be_read(filled: Filled, api: Client, shard: int) -> None:
    topic = filled.topics[shard]
    page = api.diff(topic, 95)
    assert (page.status, page.data) == (200, [95, 96, 97, 98, 99, "keyed"])
    assert api.diff(topic, 101, wait_ms=50).data == []
    assert api.state(topic)["head_seq"] == 101
    assert topic in [row["topic"] for row in api.list(prefix=topic)["topics"]]


def test_everything_can_be_watched(server: Server, filled: Filled, lane: Lane) -> None:
    with Watching(server, lane) as watching:
        stream = watching.follow({topic: {"from_seq": 98} for topic in filled.topics})
        stream.wait_caught_up(*filled.topics)
        for topic in filled.topics:
            assert stream.data(topic) == [98, 99, "keyed"]


def test_records_can_be_deleted(filled: Filled, api: Client) -> None:
    for topic in filled.topics:
        earliest = api.state(topic)["earliest_seq"]
        answer = api.delete(topic, before_seq=earliest + 3)
        assert (answer.status, answer["deleted"]) == (200, 3), answer
        assert api.state(topic)["earliest_seq"] == earliest + 3
        tag = f"t{earliest + 10}"
        answer = api.delete(topic, match=tag)
        assert (answer.status, answer["deleted"]) == (200, 1), answer


def test_topics_can_be_dropped(filled: Filled, api: Client) -> None:
    for _ in range(2):
        topic = filled.dropped.pop()
        assert api.drop(topic).status == 200
        assert api.state(topic).refusal == (404, "topic_not_found")


def test_topics_that_exist_can_be_configured(filled: Filled, api: Client, lane: Lane) -> None:
    """Whoever needs room may have to lower a cap."""
    for topic in filled.topics:
        ttl_ms = 10_000_000 + LANES.index(lane)
        answer = api.put(topic, idempotency_window_ms=3_600_000, ttl_ms=ttl_ms)
        assert (answer.status, answer["created"]) == (200, False), answer
        assert api.state(topic)["config"]["ttl_ms"] == ttl_ms


def test_workers_go_on(filled: Filled, api: Client) -> None:
    """Claims, acks, nacks and extensions are about jobs that are there already."""
    queue = Queue(api, filled.queue)
    jobs = [job["$seq"] for job in queue.take(12)]
    assert queue.ack(jobs[:6])["acked"] == 6
    assert queue.nack(jobs[6:9])["nacked"] == 3
    assert queue.extend(jobs[9:], lease_ms=3_600_000)["extended"] == 3
    again = [job["$seq"] for job in queue.take(3)]
    assert again == jobs[6:9], "what was given back comes first"
    assert queue.ack(again)["acked"] == 3
    assert queue.ack(jobs[9:])["acked"] == 3
    assert not set(queue.left()) & set(jobs)


def test_jobs_can_not_be_added(filled: Filled, api: Client) -> None:
    count = api.state(filled.queue)["count"]
    assert_storage_full(api.append(filled.queue, "job"))
    assert api.state(filled.queue)["count"] == count


def test_the_gauges_say_so(server: Server) -> None:
    assert gauges(server, "topics_wal_read_only") in ({"": 1.0}, {"shard-0": 1.0, "shard-1": 1.0})
    (shown,) = set(gauges(server, "topics_disk_free_bytes").values())
    assert shown == pytest.approx(free_bytes(server.data_dir), rel=0.25)


def test_probes_do_not_take_it_for_a_failure(api: Client) -> None:
    assert api.get("/v0/health").status == 200


@pytest.mark.full
def test_copies_wait_and_go_on_in_the_next_life(tmp_path: Path) -> None:
    """A destination that was full gets room, but the disk has none; when it has, everything comes, once, in order."""
    with serving(tmp_path) as server, server.client() as api:
        filled = Filled(api)
        assert server.stop() == 0
    with serving(tmp_path, TOPICS_MIN_FREE_BYTES=NEVER) as server, server.client() as api:
        assert api.put(filled.dest, cap_records=100, discard="reject").status == 200
        until = time.monotonic() + 2
        while time.monotonic() < until:  # a router that did not obey would need a few milliseconds
            assert data_of(api, filled.dest) == [0]
            time.sleep(0.1)
        assert get_router(api, filled.router).status == 200
        assert server.stop() == 0
    with serving(tmp_path) as server, server.client() as api:
        wait_data(api, filled.dest, list(range(5)), within_s=60)
        assert api.append(filled.source, 5).status == 200
        wait_data(api, filled.dest, list(range(6)), within_s=60)


@pytest.mark.full
def test_what_was_done_while_it_was_low_survives(tmp_path: Path) -> None:
    """Deletes, acks and leases are written all the same."""
    with serving(tmp_path) as server, server.client() as api:
        filled = Filled(api)
        assert server.stop() == 0
    with serving(tmp_path, TOPICS_MIN_FREE_BYTES=NEVER) as server, server.client() as api:
        queue = Queue(api, filled.queue)
        jobs = [job["$seq"] for job in queue.take(20)]
        assert queue.ack(jobs[:10])["acked"] == 10
        assert api.delete(filled.topics[0], before_seq=51)["deleted"] == 50
        assert api.drop(filled.dropped[0]).status == 200
        assert_storage_full(api.append(filled.topics[0], "no"))
        server.kill()
    with serving(tmp_path) as server, server.client() as api:
        queue = Queue(api, filled.queue)
        assert queue.left() == list(range(11, 201))
        assert queue.counters().in_flight == 10
        assert data_of(api, filled.topics[0], 50) == [*range(50, 100), "keyed"]
        assert api.state(filled.topics[0])["earliest_seq"] == 51
        assert api.state(filled.dropped[0]).refusal == (404, "topic_not_found")
        assert api.append(filled.topics[0], "yes")["seqs"] == [102], "no seq was spent on what was refused"


# --- becoming low, and no longer ---------------------------------------------------------------------


class Space:
    """A server whose mark is below what is free; `fill` takes so much that it is not, `clear` gives it back."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "filler"
        free = free_bytes(folder)
        self.mark = (free - 2 * GIB) * 20 // 21  # it lifts 5 % above, with something to spare
        self._size = free - self.mark + 2 * GIB

    def fill(self) -> None:
        with open(self._file, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, self._size)

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Space]:
    if free_bytes(tmp_path) < 8 * GIB:
        pytest.fail("these tests need a few GiB of free disk")
    made = Space(tmp_path)
    yield made
    made.clear()


@pytest.fixture
def watched(space: Space, tmp_path: Path) -> Iterator[Server]:
    yield from start(tmp_path, TOPICS_MIN_FREE_BYTES=space.mark)


def insist(ask: Callable[[], Answer], status: int, *, within_s: float = WITHIN_S) -> Answer:
    """Until it is answered like this; meanwhile it may be refused or taken."""

    def answered() -> Answer | None:
        answer = ask()
        assert answer.status in (200, 201, 503), answer
        return answer if answer.status == status else None

    answer = eventually(answered, within_s=within_s, every_s=0.05, what=f"a {status}")
    assert answer is not None
    return answer


def test_it_comes_and_goes_by_itself(watched: Server, space: Space) -> None:
    with watched.client() as api, watched.client("http2") as other:
        topics = [name_on(shard, "comes") for shard in range(2)]
        for topic in topics:
            assert api.append(topic, "before").status == 201
        assert set(read_only(watched).values()) == {0}
        for _ in range(2):
            space.fill()
            for topic in topics:
                for client in (api, other):
                    refused = insist(lambda topic=topic, client=client: client.append(topic, "perhaps"), 503)  # type: ignore[misc]
                    assert_storage_full(refused, mark=space.mark)
                assert other.diff(topic).status == 200
            eventually(lambda: set(gauges(watched, "topics_wal_read_only").values()) == {1.0})
            space.clear()
            for topic in topics:
                for client in (api, other):
                    insist(lambda topic=topic, client=client: client.append(topic, "again"), 200)  # type: ignore[misc]
            eventually(lambda: set(gauges(watched, "topics_wal_read_only").values()) == {0.0})
        for topic in topics:
            assert [value for value in data_of(api, topic) if value != "perhaps"] == ["before"] + ["again"] * 4


@pytest.mark.full
def test_an_idle_server_notices_too(watched: Server, space: Space) -> None:
    """Nobody writes, nobody asks: what the gauge shows is of now all the same."""
    space.fill()
    eventually(lambda: set(read_only(watched).values()) == {1}, every_s=0.05)
    space.clear()
    eventually(lambda: set(read_only(watched).values()) == {0}, every_s=0.05)


def test_writers_lose_nothing_by_it(watched: Server, space: Space) -> None:
    with watched.client() as api:
        topic = name_on(1, "kept")
        assert api.put(topic).status == 201
        threads = Threads()
        writers = []
        for lane in LANES:
            for kind in ("plain", "patient"):
                client = watched.client(lane)
                writer = http_writer(f"{lane}-{kind}", topic, client)
                writers.append(writer)
                fields = {"disable_backpressure": True} if kind == "patient" else {}
                threads.start(client, lambda _, writer=writer, fields=fields: writer.step(**fields))  # type: ignore[misc]

        def all_have(status: int, count: int) -> bool:
            threads.check()
            return all(writer.statuses[status] >= count for writer in writers)

        try:
            for round_number in range(1, 3):
                eventually(lambda: all_have(200, 20 * round_number))  # noqa: B023
                space.fill()
                eventually(lambda: all_have(503, 5 * round_number))  # noqa: B023
                space.clear()
                before = [len(writer.acked) for writer in writers]
                eventually(
                    lambda: all(len(w.acked) > b + 5 for w, b in zip(writers, before, strict=True)),  # noqa: B023
                    within_s=WITHIN_S,
                )
        finally:
            threads.end()
        assert_all_there(api, topic, writers)


@pytest.mark.full
def test_copies_and_dead_letters_wait_for_space(watched: Server, space: Space) -> None:
    with watched.client() as api:
        source, dest = name_on(0, "from"), name_on(1, "to")
        assert api.put(dest, cap_records=1, discard="reject").status == 201
        route(api, source, dest)
        for number in range(5):
            assert api.append(source, number).status in (200, 201)
        wait_data(api, dest, [0])
        letters = name_on(0, "letters")
        assert api.put(letters, type="queue").status == 201
        queue = make_queue(api, name_on(1, "worn"), max_deliveries=1, dead_letter=letters)
        queue.produce("worn")
        (job,) = queue.take(1)

        space.fill()
        insist(lambda: api.append(name_on(0, "probe"), 1), 503)
        insist(lambda: api.append(name_on(1, "probe"), 1), 503)
        assert queue.nack([job["$seq"]])["nacked"] == 1
        assert queue.claim()["count"] == 0, "it has been delivered often enough"
        assert api.put(dest, cap_records=100, discard="reject").status == 200
        until = time.monotonic() + 2
        while time.monotonic() < until:  # whoever did not obey would need a few milliseconds
            assert data_of(api, dest) == [0]
            assert data_of(api, letters) == []
            time.sleep(0.1)
        space.clear()
        wait_data(api, dest, list(range(5)), within_s=60)
        wait_data(api, letters, ["worn"], within_s=60)
        assert queue.left() == []


def test_a_router_made_while_it_is_low_copies_when_it_is_over(watched: Server, space: Space) -> None:
    with watched.client() as api:
        source, dest = name_on(0, "from"), name_on(1, "to")
        for topic in (source, dest):
            assert api.put(topic).status == 201
        assert api.append(source, *range(10)).status == 200
        space.fill()
        insist(lambda: api.append(name_on(0, "probe"), 1), 503)
        insist(lambda: api.append(name_on(1, "probe"), 1), 503)
        answer = put_router(api, "late", source, dest, from_start=True)
        if answer.status == 503:
            assert answer.error == "storage_full", answer
        elif answer.status == 201:
            assert data_of(api, dest) == []
        space.clear()
        insist(lambda: api.append(name_on(1, "probe"), 1), 201)
        if answer.status == 503:
            assert insist(lambda: put_router(api, "late", source, dest), 201).status == 201
        insist(lambda: api.append(source, "after"), 200)
        eventually(lambda: "after" in data_of(api, dest), within_s=60)
        copied = data_of(api, dest)
        assert copied in ([*range(10), "after"], ["after"])


# --- off ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_switched_off_nobody_looks(tmp_path: Path) -> None:
    with serving(tmp_path, TOPICS_MIN_FREE_BYTES=0) as server, server.client() as api:
        assert api.append(name_on(0, "off"), 1).status == 201
        assert set(gauges(server, "topics_wal_read_only").values()) == {0.0}
        (shown,) = set(gauges(server, "topics_disk_free_bytes").values())
        assert shown == pytest.approx(free_bytes(server.data_dir), rel=0.25), "the gauge is there all the same"


@pytest.mark.full
def test_a_disk_with_enough_is_no_reason(tmp_path: Path) -> None:
    with serving(tmp_path, TOPICS_MIN_FREE_BYTES=1) as server, server.client() as api:
        assert api.append(name_on(0, "enough"), 1).status == 201
        assert set(read_only(server).values()) == {0}
