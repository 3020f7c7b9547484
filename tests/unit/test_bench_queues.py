"""The lines of queues: what a worker reads, the generator and the lines against a stand-in that has a queue (this file,
run as a program), against a real Redis and a real beanstalkd if they are there, and the arithmetic."""

import itertools
import json
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import BenchFailed, table
from benchmarks.command import bench
from benchmarks.figures import Beside, Figures, claims_ms, line, unevenness, work_rates
from benchmarks.generators import claims
from benchmarks.generators.claims import BeanstalkdClaims, Claims, HttpClaims, Pushed, RedisClaims, Wire
from benchmarks.generators.workers import Worked, WorkJob, drive, run_apart
from benchmarks.measure import Measurement, Pace, Queueing
from benchmarks.scenarios import BY_NAME, Scenario, Target
from benchmarks.sides import beanstalkd, redis
from benchmarks.sides.beanstalkd import Beanstalkd
from benchmarks.sides.queues import OurQueues
from benchmarks.sides.redis import Redis

pytestmark = pytest.mark.full

QUICK = Pace(rounds=2, seconds=0.3, warm_s=0.02)
STAND_IN = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", sys.executable, __file__]
NEEDS_REDIS = pytest.mark.skipif(not redis.present(), reason="redis-server is not installed")
NEEDS_BEANSTALKD = pytest.mark.skipif(not beanstalkd.present(), reason="beanstalkd is not installed")
LINES = ["queue-1", "queue-8", "queue-64", "queue-push", "queue-latency", "queue-evenness"]


# --- the stand-in -----------------------------------------------------------------------------------------


class StandIn:
    """One queue for all names. The jobs of a stream go back to it when the stream is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[int] = deque()
        self._leased: dict[int, str] = {}
        self._streams: dict[str, int] = {}
        self._head = 0
        self._acked = 0
        self._fault = os.environ.get("STAND_IN_FAULT", "")

    def serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        Path(os.environ["TOPICS_PORT_FILE"]).write_text(str(listener.getsockname()[1]))
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        while request := stream.readline().split():
            length = 0
            while (header := stream.readline()) != b"\r\n":
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            url = urlsplit(request[1].decode())
            if url.path.endswith("/work"):
                asked = parse_qs(url.query)
                self._work(connection, asked["node"][0], int(asked["max"][0]))
                return
            with self._changed:
                body = self._answer(request[0], url.path.split("/"), stream.read(length))
                self._changed.notify_all()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def _answer(self, method: bytes, path: list[str], body: bytes) -> bytes:
        asked = json.loads(body) if body else {}
        if path[-1] == "claim":
            found = [self._lease(asked["node"]) for _ in range(min(asked["max"], len(self._ready)))]
            if self._fault == "gives-nothing" and self._acked >= 20:
                found = []
            if self._fault == "gives-twice" and self._acked == 0 and found:
                found[-1] = self._job(1)
            return b'{"claimed":[' + b",".join(found) + b'],"count":%d,"ready":%d}' % (len(found), len(self._ready))
        if path[-1] == "ack":
            done = {seq for seq in asked["seqs"] if self._leased.get(seq) == asked["node"]}
            for seq in done:
                del self._leased[seq]
                self._acked += self._fault != "forgets-acks"
            return b'{"acked":%d,"skipped":[]}' % len(done)
        if method == b"POST":
            for _ in range(body.count(b'"data"')):
                self._head += 1
                self._ready.append(self._head)
        return json.dumps({"head_seq": self._head, "count": self._head - self._acked}).encode()

    def _lease(self, node: str) -> bytes:
        seq = self._ready.popleft()
        self._leased[seq] = node
        return self._job(seq)

    def _job(self, seq: int) -> bytes:
        return b'{"$seq":%d,"lease_id":"lease_%x","deliveries":1,"data":{"id":"1"}}' % (seq, seq)

    def _work(self, connection: socket.socket, node: str, most: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nretry: 2000\n\n: hb 1\n\n")
        if self._fault == "errors-on-streams":
            connection.sendall(b'event: error\ndata: {"code":503}\n\n')
        closed = threading.Event()
        threading.Thread(target=self._wait_closed, args=(connection, closed), daemon=True).start()
        mine: set[int] = set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: closed.is_set() or self._room(mine, most), timeout=1)
                frames = []
                while not closed.is_set() and self._room(mine, most):
                    mine.add(self._ready[0])
                    frames.append(b"event: job\ndata: %b\n\n" % self._lease(node))
                if closed.is_set():
                    self._ready.extendleft(sorted(mine & set(self._leased), reverse=True))
                    for seq in mine:
                        self._leased.pop(seq, None)
                    return
            try:
                connection.sendall(b"".join(frames))
            except OSError:
                closed.set()

    def _room(self, mine: set[int], most: int) -> bool:
        return bool(self._ready) and len([seq for seq in mine if seq in self._leased]) < most

    def _wait_closed(self, connection: socket.socket, closed: threading.Event) -> None:
        try:
            connection.recv(1)
        except OSError:
            pass
        with self._changed:
            closed.set()
            self._changed.notify_all()


@pytest.fixture
def make_side(tmp_path: Path) -> Iterator[Callable[[str], Queueing]]:
    made: list[Queueing] = []

    def make(name: str) -> Queueing:
        side: Queueing
        if name == "redis":
            side = Redis(policy="everysec", parent=tmp_path)
        elif name == "beanstalkd":
            side = Beanstalkd(parent=tmp_path)
        else:
            side = OurQueues(durability="disk", parent=tmp_path, command=STAND_IN)
        made.append(side)
        side.start()
        side.make_queue(jitter_ms=0)
        return side

    try:
        yield make
    finally:
        for side in made:
            side.close()
        assert list(tmp_path.iterdir()) == []


SIDES = [
    "topics",
    pytest.param("redis", marks=NEEDS_REDIS),
    pytest.param("beanstalkd", marks=NEEDS_BEANSTALKD),
]


def work(side: Queueing, **changes: object) -> WorkJob:
    job = side.work_job(workers=4, size=3, push=False, timed=True)
    return msgspec.structs.replace(job, jobs=side.queued(), **changes)


# --- the generator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIDES)
def test_workers_leave_what_they_did_not_acknowledge(make_side: Callable[[str], Queueing], name: str) -> None:
    side = make_side(name)
    added = side.fill_queue(50_500, job_bytes=100)
    assert side.queued() == added >= 50_500
    first = run_apart(work(side, warm_s=0.05, seconds=0.2))
    assert 0 < first.jobs == sum(first.per_worker) <= first.acknowledged
    assert len(first.per_worker) == 4
    assert 0.2 <= first.wall_s < 10
    assert 0 < len(first.claims_ns) <= first.acknowledged
    assert all(0 < time_ns < 1e10 for time_ns in first.claims_ns)
    assert first.own_cpu_s > 0
    assert side.queued() == added - first.acknowledged


@pytest.mark.parametrize("name", SIDES)
def test_the_window_ends_with_the_last_job(make_side: Callable[[str], Queueing], name: str) -> None:
    side = make_side(name)
    assert side.fill_queue(999, job_bytes=100) == 1_000
    found = drive(work(side, seconds=60.0))
    assert found.acknowledged == found.jobs == 1_000
    assert found.wall_s < 60
    assert side.queued() == 0


def test_pushed_jobs_are_acknowledged_and_the_rest_goes_back(make_side: Callable[[str], Queueing]) -> None:
    side = make_side("topics")
    side.fill_queue(50_000, job_bytes=100)
    found = run_apart(work(side, push=True, size=8, warm_s=0.05, seconds=0.2))
    assert 0 < found.jobs < found.acknowledged
    assert side.queued() == 50_000 - found.acknowledged
    claimed = drive(work(side, size=1_000, seconds=60.0))
    assert claimed.acknowledged == 50_000 - found.acknowledged


def test_a_stream_ends_with_the_last_job(make_side: Callable[[str], Queueing]) -> None:
    side = make_side("topics")
    side.fill_queue(1_000, job_bytes=100)
    found = drive(work(side, push=True, size=8, seconds=60.0))
    assert found.acknowledged == found.jobs == 1_000
    assert side.queued() == 0


def test_a_queue_that_is_empty_before_the_warm_up_is_over_is_a_failure(make_side: Callable[[str], Queueing]) -> None:
    side = make_side("topics")
    side.fill_queue(1_000, job_bytes=100)
    with pytest.raises(BenchFailed, match="before the warm-up was over"):
        drive(work(side, size=100, warm_s=60.0, seconds=1.0))


@pytest.mark.parametrize(
    ("fault", "push", "complaint"),
    [
        ("gives-nothing", False, "a claim got nothing while"),
        ("gives-twice", False, "to be acknowledged"),
        ("errors-on-streams", True, "an error on a stream"),
    ],
)
def test_a_queue_that_goes_wrong_stops_the_run(
    make_side: Callable[[str], Queueing], monkeypatch: pytest.MonkeyPatch, fault: str, push: bool, complaint: str
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    side = make_side("topics")
    side.fill_queue(10_000, job_bytes=100)
    with pytest.raises(BenchFailed, match=complaint):
        run_apart(work(side, push=push, seconds=20.0))


def test_no_queue_is_a_failure_with_the_answer(make_side: Callable[[str], Queueing]) -> None:
    if not redis.present():
        pytest.skip("redis-server is not installed")
    side = make_side("redis")
    with pytest.raises(BenchFailed, match="NOGROUP"):
        drive(msgspec.structs.replace(work(side, seconds=1.0), queue="another", jobs=5))


# --- what a worker reads ----------------------------------------------------------------------------------

STALE = b'HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{"$seq":7,"acked":7,"count":7}\r\n:1\r\nDELETED\r\n' * 40


def feed(take: Callable[[bytearray, int], object], data: bytes, cuts: list[int]) -> list[object]:
    """Give the data in pieces, in a buffer full of somebody else's bytes."""
    edges = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
    said = []
    for begin, end in itertools.pairwise(edges):
        buffer = bytearray(STALE + b"x" * len(data))
        buffer[: end - begin] = data[begin:end]
        said.append(take(buffer, end - begin))
    return said


def http(body: bytes, *, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def claimed(wire: Wire, ids: list[bytes], *, size: int) -> bytes:
    if wire == "http":
        # A job may hold a field that has the name of one of the answer's.
        jobs = b",".join(b'{"$seq":%b,"data":{"count":99}}' % each for each in ids)
        return http(b'{"claimed":[%b],"count":%d,"ready":5}' % (jobs, len(ids)))
    if wire == "redis":
        if not ids:
            return b"*-1\r\n"
        entries = [b'*2\r\n$%d\r\n%b\r\n*2\r\n$4\r\ndata\r\n$4\r\n{"1"\r\n' % (len(each), each) for each in ids]
        return b"*1\r\n*2\r\n$11\r\nbench-queue\r\n*%d\r\n" % len(ids) + b"".join(entries)
    return b"".join(b'RESERVED %b 9\r\n{"id":"1"}\r\n' % each for each in ids) + b"TIMED_OUT\r\n" * (size - len(ids))


def acked(wire: Wire, count: int) -> bytes:
    if wire == "http":
        return http(b'{"topic":"bench-queue","acked":%d,"skipped":[]}' % count)
    return b":%d\r\n:%d\r\n" % (count, count) if wire == "redis" else b"DELETED\r\n" * count


def made(wire: Wire, size: int) -> Claims:
    return claims.claims(wire, queue="bench-queue", node="worker-1", size=size)


wires = st.sampled_from(["http", "redis", "beanstalkd"])
cut_places = st.lists(st.integers(0, 600), max_size=8)


@given(wire=wires, counts=st.lists(st.integers(0, 5), min_size=1, max_size=4), cuts=cut_places)
@example(wire="http", counts=[2, 0, 1], cuts=list(range(600)))
@example(wire="redis", counts=[2, 0, 1], cuts=list(range(600)))
@example(wire="beanstalkd", counts=[5, 2, 0, 1], cuts=list(range(600)))
def test_claims_are_read_and_acknowledged_however_they_are_cut(wire: Wire, counts: list[int], cuts: list[int]) -> None:
    worker = made(wire, 5)
    numbers = itertools.count(1)
    for count in counts:
        ids = [b"%d-0" % next(numbers) if wire == "redis" else b"%d" % next(numbers) for _ in range(count)]
        said = feed(worker.claimed, claimed(wire, ids, size=5), cuts)
        assert said == [None] * (len(said) - 1) + [ids]
        if ids:
            assert all(worker.ack(ids).count(each) >= 1 for each in ids)
            said = feed(worker.acked, acked(wire, count), cuts)
            assert said == [False] * (len(said) - 1) + [True]


@pytest.mark.parametrize("wire", ["http", "redis", "beanstalkd"])
def test_fewer_acknowledged_than_named_stop_the_run(wire: Wire) -> None:
    worker = made(wire, 5)
    worker.ack([b"1-0", b"2-0"])
    answer = b"DELETED\r\nNOT_FOUND\r\n" if wire == "beanstalkd" else acked(wire, 1)
    with pytest.raises(BenchFailed):
        feed(worker.acked, answer, [])


@pytest.mark.parametrize(
    ("wire", "answer"),
    [
        ("http", http(b'{"error":{}}', status=b"409 Conflict")),
        ("http", http(b'{"claimed":[{"$seq":1}],"count":2}')),
        ("http", http(b"{}")),
        ("redis", b"-NOGROUP No such key\r\n"),
        ("redis", b"*1\r\n*2\r\n$5\r\nother\r\n*0\r\n"),
        ("redis", claimed("redis", [b"1-0"], size=1) * 2),
        ("beanstalkd", b"DEADLINE_SOON\r\n"),
        ("beanstalkd", claimed("beanstalkd", [b"1"], size=1) * 3),
        ("beanstalkd", claimed("beanstalkd", [b"1"], size=1) + b"OUT_OF_MEMORY\r\n" * 2),
    ],
)
def test_anything_but_jobs_stops_the_run(wire: Wire, answer: bytes) -> None:
    with pytest.raises(BenchFailed):
        feed(made(wire, 2).claimed, answer, [])


def test_what_is_asked() -> None:
    assert HttpClaims(queue="q", node="w", size=8).claim.endswith(b'\r\n\r\n{"node":"w","max":8,"lease_ms":60000}')
    assert b'{"node":"w","seqs":[4,7]}' in HttpClaims(queue="q", node="w", size=8).ack([b"4", b"7"])
    assert RedisClaims(queue="q", node="w", size=8).claim.count(b"\r\n") == 19
    assert RedisClaims(queue="q", node="w", size=8).ack([b"4-0"]).count(b"4-0") == 2
    assert BeanstalkdClaims(queue="q", node="w", size=8).claim == b"reserve-with-timeout 0\r\n" * 8
    assert BeanstalkdClaims(queue="q", node="w", size=8).ack([b"4", b"7"]) == b"delete 4\r\ndelete 7\r\n"


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), cuts=cut_places)
@example(counts=[2, 1], cuts=list(range(600)))
def test_pushed_jobs_are_found_once_however_they_are_cut(counts: list[int], cuts: list[int]) -> None:
    numbers = iter(range(1, sum(counts) + 1))
    data = b"retry: 2000\n\n: hb 1\n\n"
    for count in counts:
        for _ in range(count):
            seq = next(numbers)
            data += b'id: %d\nevent: job\ndata: {"topic":"q","$seq":%d,"data":{"id":"1"}}\n\n' % (seq, seq)
        data += b": hb 2\n\n"
    pushed = Pushed()
    said = feed(lambda buffer, n: pushed.take(bytes(buffer[:n])), data, cuts)
    found = [each for ids in said for each in ids]  # type: ignore[attr-defined]
    assert found == [b"%d" % seq for seq in range(1, sum(counts) + 1)]


# --- lines ------------------------------------------------------------------------------------------------


def small(name: str) -> Scenario:
    return msgspec.structs.replace(BY_NAME[name], records=20_000)


PEERS = [
    (False, False),
    pytest.param(False, True, marks=NEEDS_BEANSTALKD),
    pytest.param(True, True, marks=[NEEDS_REDIS, NEEDS_BEANSTALKD]),
]


@pytest.mark.parametrize(("with_redis", "with_beanstalkd"), PEERS)
@pytest.mark.parametrize("name", ["queue-8", "queue-push", "queue-latency", "queue-evenness"])
def test_a_line_has_its_peers_beside_it_and_leaves_nothing(
    tmp_path: Path, name: str, with_redis: bool, with_beanstalkd: bool
) -> None:
    measurement = Measurement(
        pace=QUICK,
        tell=lambda text: None,
        parent=tmp_path,
        with_redis=with_redis,
        with_beanstalkd=with_beanstalkd,
        command=STAND_IN,
    )
    found = measurement.run(small(name))
    least = 0 if name == "queue-evenness" else 1e-9  # workers may be exactly even
    assert found.ours.value >= least
    assert len(found.ours.slices) == 2
    assert (found.theirs is not None) == with_redis
    assert [each.what for each in found.ours.beside] == ["beanstalkd"] * with_beanstalkd
    assert all(each.value >= least for each in found.ours.beside)
    assert (found.ours.p99_ms is not None) == (name == "queue-latency")
    assert (found.met is None) == (name in ("queue-8", "queue-push"))
    assert list(tmp_path.iterdir()) == []


def test_jobs_that_are_there_after_their_acknowledgement_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "forgets-acks")
    measurement = Measurement(
        pace=Pace(rounds=1, seconds=0.1, warm_s=0.0),
        tell=lambda text: None,
        parent=tmp_path,
        with_redis=False,
        with_beanstalkd=False,
        command=STAND_IN,
    )
    with pytest.raises(BenchFailed, match="were not acknowledged, and 20,000 are there"):
        measurement.run(small("queue-64"))


def test_the_lines_are_chosen_by_name() -> None:
    listed = CliRunner().invoke(bench, ["--list"])
    assert [row.split()[0] for row in listed.output.splitlines() if row.startswith("queue")] == LINES
    refused = CliRunner().invoke(bench, ["--only", "queue-7"])
    assert refused.exit_code == 2


# --- arithmetic -------------------------------------------------------------------------------------------


def worked(*per_worker: int, claims_ms: list[float] | None = None) -> Worked:
    return Worked(
        wall_s=2.0,
        own_cpu_s=0.5,
        watched_cpu_s=3.0,
        jobs=sum(per_worker),
        per_worker=list(per_worker),
        acknowledged=sum(per_worker) + 8,
        claims_ns=[int(ms * 1e6) for ms in claims_ms or []],
    )


def test_rates_are_of_the_jobs_acknowledged_in_the_window() -> None:
    found = work_rates([worked(100, 300), worked(10, 10), worked(50, 50)])
    assert (found.value, found.slices) == (50, [200, 10, 50])
    assert (found.generator_cpu, found.server_cpu) == (0.25, 1.5)


def test_the_claims_of_all_workers_are_one_distribution() -> None:
    found = claims_ms([worked(1, claims_ms=[1, 2, 3]), worked(1, claims_ms=[2, 4, 60]), worked(1, claims_ms=[3, 3, 3])])
    assert (found.value, found.slices, found.p99_ms) == (3, [2, 4, 3], 60)
    with pytest.raises(BenchFailed):
        claims_ms([worked(1)])


def test_evenness_is_the_deviation_in_percent_of_the_mean() -> None:
    found = unevenness([worked(100, 100, 100, 100), worked(50, 150), worked(90, 110)])
    assert (found.value, found.slices) == (10, [0, 50, 10])
    with pytest.raises(BenchFailed, match="without a job"):
        unevenness([worked(1, 1), worked(0, 0)])


def test_the_table_names_beanstalkd_and_knows_lines_without_a_target() -> None:
    peer = [Beside(what="beanstalkd", value=98_000, unit="jobs/s")]
    lines = [
        line(BY_NAME["queue-64"], Figures(value=21_000, beside=peer), Figures(value=210_000)),
        line(BY_NAME["queue-8"], Figures(value=900), Figures(value=150_000)),
        line(BY_NAME["queue-latency"], Figures(value=2.5, p99_ms=9.0), Figures(value=0.25)),
        line(BY_NAME["queue-evenness"], Figures(value=2.5), Figures(value=5)),
    ]
    assert [table.cells(each)[1:6] for each in lines] == [
        ["21.0 k/s (beanstalkd 98.0 k/s)", "210.0 k/s", "0.10x", "≥ 20,000 jobs/s", "yes"],
        ["900 /s", "150.0 k/s", "0.01x", "none fixed", "–"],
        ["2.500 ms (p99 9.00)", "0.250 ms", "0.10x", "≤ 2 ms", "NO"],
        ["2.50 %", "5.00 %", "2.00x", "≤ 15 %", "yes"],
    ]
    assert Target().met(ours=1.0, theirs=1.0) is None


if __name__ == "__main__":
    StandIn().serve()
