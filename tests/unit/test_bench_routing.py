"""The lines of routers: the generator and the lines against a stand-in that forwards (this file, run as a program),
the client that copies against a real Redis, and the arithmetic."""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks import BenchFailed, table
from benchmarks.figures import Beside, Figures, arrivals, line, slowdown
from benchmarks.generators import forwards, payload
from benchmarks.generators.forwards import Arrived, ForwardJob, drive, held_of_http, held_of_resp
from benchmarks.generators.load import Outcome
from benchmarks.measure import WITH_REDIS, Measurement, Pace
from benchmarks.scenarios import BY_NAME
from benchmarks.sides import copier, redis
from benchmarks.sides.ours import Ours, name_on
from benchmarks.sides.redis import Redis
from benchmarks.sides.side import Side, spread
from topics.storage.config import owner_of_name

pytestmark = pytest.mark.full

QUICK = Pace(rounds=2, seconds=0.1, warm_s=0.02)
STAND_IN = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", sys.executable, __file__]
NEEDS_REDIS = pytest.mark.skipif(not redis.present(), reason="redis-server is not installed")
LATE_S = 0.6  # longer than a busy machine keeps a process waiting


# --- the stand-in -----------------------------------------------------------------------------------------


class StandIn:
    """Counts records per topic; what comes to a source is at its destinations a little later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[str, int] = {}
        self._dests: dict[str, list[str]] = {}
        self._after_s = float(os.environ.get("STAND_IN_FORWARDS_AFTER_S", "0.01"))
        self._more = {"loses": -1, "doubles": 1}.get(os.environ.get("STAND_IN_FAULT", ""), 0)

    def serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        Path(os.environ["TOPICS_PORT_FILE"]).write_text(str(listener.getsockname()[1]))
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        while request := stream.readline().split():
            length = 0
            while (header := stream.readline()) != b"\r\n":
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            path = request[1].decode().partition("?")[0].split("/")
            body = self._answer(request[0], path, stream.read(length))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def _answer(self, method: bytes, path: list[str], body: bytes) -> bytes:
        if path[2] == "ready":
            return b"{}"
        if path[2] == "routers":
            asked = json.loads(body)
            self._dests.setdefault(asked["source"], []).append(asked["dest"])
            return b"{}"
        topic = path[3]
        if method == b"POST":
            count = body.count(b'"data"')
            self._add(topic, count)
            if dests := self._dests.get(topic):
                threading.Timer(self._after_s, self._forward, (dests, count + self._more)).start()
        with self._lock:
            return json.dumps({"head_seq": self._heads.get(topic, 0)}).encode()

    def _forward(self, dests: list[str], count: int) -> None:
        for dest in dests:
            self._add(dest, count)

    def _add(self, topic: str, count: int) -> None:
        with self._lock:
            self._heads[topic] = self._heads.get(topic, 0) + count


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ours]:
    monkeypatch.setenv("STAND_IN_FORWARDS_AFTER_S", str(LATE_S))
    made = Ours(durability="disk", parent=tmp_path, command=STAND_IN)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def side_of_redis(tmp_path: Path) -> Iterator[Redis]:
    made = Redis(policy="everysec", parent=tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def forward_job(side: Side, *, warm_s: float = 0.05) -> ForwardJob:
    side.route("bench-0", "bench-1")
    job = side.forward_job(source="bench-0", dest="bench-1", connections=2, batch=10, record_bytes=80)
    return msgspec.structs.replace(job, warm_s=warm_s, seconds=0.2)


def check_arrived(side: Side, found: Arrived) -> None:
    assert found.records <= found.acknowledged * 10
    assert 0 <= found.arrived_writing <= found.records
    assert 0.2 <= found.writing_s <= found.wall_s
    assert found.own_cpu_s > 0
    assert side.held("bench-0") == side.held("bench-1")


# --- the generator ----------------------------------------------------------------------------------------


def test_the_clock_stops_when_the_last_record_is_there(ours: Ours) -> None:
    job = forward_job(ours)
    first = drive(job)
    check_arrived(ours, first)
    assert first.wall_s >= first.writing_s + LATE_S / 2
    assert first.arrived_writing < first.records
    second = drive(msgspec.structs.replace(job, warm_s=0.0))  # on top of what is there already
    check_arrived(ours, second)
    assert second.records == second.acknowledged * 10
    assert ours.held("bench-1") == (first.acknowledged + second.acknowledged) * 10


@pytest.mark.parametrize(("fault", "complaint"), [("loses", "have arrived"), ("doubles", "were acknowledged")])
def test_what_does_not_arrive_exactly_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, complaint: str
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    monkeypatch.setattr(forwards, "ARRIVE_S", 0.5)
    wrong = Ours(durability="disk", parent=tmp_path, command=STAND_IN)
    try:
        wrong.start()
        with pytest.raises(BenchFailed, match=complaint):
            drive(forward_job(wrong, warm_s=0.0))
    finally:
        wrong.close()


@pytest.mark.parametrize(
    ("held_of", "answer", "held"),
    [
        (held_of_http, b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"head_seq":42}', 42),
        (held_of_http, b'HTTP/1.1 200 OK\r\nContent-Length: 28\r\n\r\n{"count":1, "head_seq": 123}', 123),
        (held_of_resp, b":0\r\n", 0),
        (held_of_resp, b":1234567\r\n", 1_234_567),
    ],
)
def test_what_is_held_is_read_from_whole_answers(
    held_of: Callable[[bytes], int | None], answer: bytes, held: int
) -> None:
    assert [held_of(answer[:end]) for end in range(len(answer))] == [None] * len(answer)
    assert held_of(answer) == held


@pytest.mark.parametrize(
    ("held_of", "answer"),
    [
        (held_of_http, b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"),
        (held_of_http, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
        (held_of_resp, b"-ERR no\r\n"),
    ],
)
def test_an_answer_without_a_number_is_a_failure(held_of: Callable[[bytes], int | None], answer: bytes) -> None:
    with pytest.raises(BenchFailed):
        held_of(answer)


# --- the client that copies -------------------------------------------------------------------------------


def test_a_reply_becomes_the_same_records_in_another_stream() -> None:
    batch = payload.records(3, first=7, size=80)
    entries = b"".join(
        b"*2\r\n$15\r\n1700000000000-%d\r\n*2\r\n$4\r\ndata\r\n$80\r\n%b\r\n" % (number, data)
        for number, data in enumerate(batch)
    )
    reply = b"*1\r\n*2\r\n$7\r\nbench-0\r\n*3\r\n" + entries
    assert copier.xadds(reply, "bench-1") == payload.resp_append("bench-1", batch)


@NEEDS_REDIS
def test_a_client_copies_every_entry(side_of_redis: Redis) -> None:
    check_arrived(side_of_redis, drive(forward_job(side_of_redis)))


@NEEDS_REDIS
def test_a_client_that_copies_ends_with_its_side(side_of_redis: Redis) -> None:
    side_of_redis.route("bench-0", "bench-1")
    (child,) = side_of_redis._copiers
    assert child.poll() is None
    side_of_redis.stop()
    assert child.poll() is not None


# --- jobs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_a_name_is_on_the_shard_it_was_asked_for(shards: int) -> None:
    for shard in range(shards):
        name = name_on(shard, "from", shards=shards)
        assert owner_of_name(name, shards) == shard
        assert name.startswith("from.")


def test_the_number_of_shards_is_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_WAL_SHARDS", "5")
    side = Ours(durability="disk", parent=tmp_path)
    side.close()
    assert side.shards == 5


def test_one_stream_gets_all_connections() -> None:
    plans = spread(connections=3, per_stream=4, requests=None, streams=1)
    assert [sorted(plan) for plan in plans] == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("side_type", [Ours, Redis])
def test_the_watcher_is_at_the_destination_and_the_writes_go_to_the_source(
    side_type: type[Side], tmp_path: Path
) -> None:
    side: Side = (
        Ours(durability="disk", parent=tmp_path) if side_type is Ours else Redis(policy="everysec", parent=tmp_path)
    )
    side.close()
    job = side.watch_job(
        wire="sse", watchers=1, writers=1, batch=1, rate=200, record_bytes=80, source="there", stream="here"
    )
    assert job.stream == "here"
    assert all(b"there" in write and b"here" not in write.replace(b"there", b"") for write in job.writes)


# --- lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "with_redis"), [(1, False), pytest.param(2, True, marks=NEEDS_REDIS)])
def test_throughput_has_the_other_ways_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, with_redis: bool
) -> None:
    monkeypatch.setenv("TOPICS_WAL_SHARDS", str(shards))
    measurement = Measurement(
        pace=QUICK, tell=lambda text: None, parent=tmp_path, with_redis=with_redis, command=STAND_IN
    )
    found = measurement.run(BY_NAME["router-throughput"])
    expected = ["while writing"] + ["to another shard"] * (shards > 1) + [WITH_REDIS] * with_redis
    assert [each.what for each in found.ours.beside] == expected
    assert all(each.value > 0 for each in found.ours.beside[1:])
    assert found.ours.value > 0
    assert (found.theirs, found.ratio) == (None, None)
    assert found.met is not None
    assert list(tmp_path.iterdir()) == []


def test_acknowledgement_is_measured_with_each_number_of_routers(tmp_path: Path) -> None:
    measurement = Measurement(pace=QUICK, tell=lambda text: None, parent=tmp_path, with_redis=True, command=STAND_IN)
    found = measurement.run(BY_NAME["router-ack"])
    assert [each.what for each in found.ours.beside] == ["0 routers", "1 router", "10 routers"]
    assert [len(each.slices) for each in found.ours.beside] == [2, 2, 2]
    assert found.ours.value == max(each.times or 0 for each in found.ours.beside)
    assert found.theirs is None


def test_a_destination_that_lacks_a_record_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "loses")
    monkeypatch.setattr(forwards, "ARRIVE_S", 0.5)
    measurement = Measurement(pace=QUICK, tell=lambda text: None, parent=tmp_path, with_redis=False, command=STAND_IN)
    with pytest.raises(BenchFailed, match="were acknowledged"):
        measurement.run(BY_NAME["router-ack"])


# --- arithmetic -------------------------------------------------------------------------------------------


def timed(*times_ms: float) -> Outcome:
    return Outcome(
        requests=len(times_ms),
        wall_s=2.0,
        own_cpu_s=0.5,
        watched_cpu_s=3.0,
        acknowledged=len(times_ms),
        times_ns=[int(ms * 1e6) for ms in times_ms],
    )


def test_each_round_is_compared_with_itself_and_the_worst_counts() -> None:
    # The machine is three times slower in the second round.
    found = slowdown(
        {
            0: [timed(1, 1, 9), timed(3, 3, 3), timed(1, 1, 1)],
            1: [timed(1.2, 1.2, 9), timed(3.6, 3.6, 3.6), timed(1.2, 1.2, 1.2)],
            10: [timed(1.5, 1.5, 1.5), timed(4.5, 4.5, 4.5), timed(5, 5, 5)],
        }
    )
    assert found.slices == [1.5, 1.5, 5]
    assert found.value == 1.5
    assert [(each.what, each.value, each.unit) for each in found.beside] == [
        ("0 routers", 1, "ms"),
        ("1 router", 1.2, "ms"),
        ("10 routers", 4.5, "ms"),
    ]
    assert [each.times for each in found.beside] == [None, pytest.approx(1.2), 1.5]
    assert (found.generator_cpu, found.server_cpu) == (0.25, 1.5)


def test_a_round_without_a_request_is_a_failure() -> None:
    with pytest.raises(BenchFailed):
        slowdown({0: [timed(1)], 1: [timed()]})


def test_the_rate_counts_until_the_last_record() -> None:
    outcomes = [
        Arrived(
            wall_s=2.0,
            own_cpu_s=0.5,
            watched_cpu_s=3.0,
            acknowledged=50,
            records=records,
            writing_s=0.5,
            arrived_writing=600,
        )
        for records in (1_000, 4_000, 2_000)
    ]
    found = arrivals(outcomes)
    assert (found.value, found.slices) == (1_000, [500, 2_000, 1_000])
    assert [(each.what, each.value) for each in found.beside] == [("while writing", 1_200)]


def test_turns_for_a_ratio_are_as_many_but_short() -> None:
    assert Pace().dense() == Pace(rounds=3, seconds=1.5 * 0.12, warm_s=0.3 / 6)
    assert Pace(rounds=1, seconds=0.05, warm_s=0.0).dense() == Pace(rounds=1, seconds=0.1, warm_s=0.0)


def test_the_table_says_what_stands_beside() -> None:
    beside = [
        Beside(what="0 routers", value=0.3, unit="ms"),
        Beside(what="1 router", value=0.33, unit="ms", times=1.1),
        Beside(what="10 routers", value=0.45, unit="ms", times=1.5),
    ]
    lines = [
        line(BY_NAME["router-ack"], Figures(value=1.5, beside=beside), None),
        line(
            BY_NAME["router-throughput"],
            Figures(value=250_000, beside=[Beside(what=WITH_REDIS, value=1.2e6, unit="records/s")]),
            None,
        ),
        line(BY_NAME["router-visible"], Figures(value=1.5, p99_ms=4.0), None),
    ]
    assert [table.cells(each)[1:6] for each in lines] == [
        ["1.50x (0 routers 0.300 ms, 1 router 0.330 ms: 1.10x, 10 routers 0.450 ms: 1.50x)", "–", "–", "≤ 1.3x", "NO"],
        ["250.0 k/s (Redis and a client that copies 1.20 M/s)", "–", "–", "≥ 200,000 records/s", "yes"],
        ["1.500 ms (p99 4.00)", "–", "–", "≤ 3 ms", "yes"],
    ]


if __name__ == "__main__":
    StandIn().serve()
