"""Processes that die while workers are connected: what a stream holds stays its own as long as its connection lives,
and is anybody's at once when it does not, however long its leases are.

A server for each test, because each of them kills something. Workers repeat what was not answered.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from topics.storage.config import owner_of_name

from .client import LANES, Answer, Lane, Lost, unique
from .queues import Job, Queue, make_queue, seqs_of
from .server import Server, eventually, gone
from .sse import Ended, Http1Source, Http2Source
from .working import HOUR_MS, Working, WorkStream, claim_within

pytestmark = [pytest.mark.e2e, pytest.mark.full]

Start = Callable[..., Server]
SHARDS = 2
GATEWAYS = ("gateway-0", "gateway-1")
BACK_S = 30.0  # for a process that died to be there again, and to know what it has to know


def name_on(shard: int) -> str:
    """A new name that this shard owns."""
    return next(name for name in iter(lambda: unique("q"), "") if owner_of_name(name, SHARDS) == shard)


@pytest.fixture
def start(start_server: Start) -> Iterator[Start]:
    """Servers with a log that shows no fault."""
    servers: list[Server] = []

    def started(**environ: object) -> Server:
        servers.append(start_server(TOPICS_WAL_SHARDS=SHARDS, **environ))
        return servers[-1]

    yield started
    for server in servers:
        faults = [line for line in server.output().splitlines() if "Traceback" in line]
        assert not faults, f"{len(faults)} faults in the server's log, the first: {faults[0][-1_500:]}"


def insist(ask: Callable[[], Answer], *, within_s: float = BACK_S) -> Answer:
    """Ask until there is an answer; meanwhile somebody may be unavailable."""

    def answered() -> Answer | None:
        try:
            answer = ask()
        except Lost:
            return None
        assert answer.status in (200, 503), answer
        return answer if answer.status == 200 else None

    answer = eventually(answered, within_s=within_s, what="an answer")
    assert answer is not None
    return answer


def insist_on_ack(queue: Queue, stream: WorkStream, *seqs: int) -> None:
    """Exactly these are acked, though perhaps by an answer that was lost."""
    stream.forget(*seqs)
    answers: list[Answer] = []

    def ack() -> Answer:
        answers.append(queue.post("ack", {"node": stream.node, "seqs": list(seqs)}))
        return answers[-1]

    answer = insist(ack)
    assert answer["acked"] == len(seqs) or len(answers) > 1, answer


def produce(queue: Queue, *data: object) -> None:
    """Once, however often it has to be said."""
    key = unique("key")
    records = [{"data": value} for value in data]
    insist(lambda: queue.api.append_records(queue.name, records, idempotency_key=key))


def kill(server: Server, name: str) -> None:
    """One that runs: what the board shows may have died a moment ago."""

    def killed() -> int:
        pid = server.pid_of(name)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return 0
        return pid

    pid = eventually(killed, every_s=0.05)
    eventually(lambda: gone(pid))


def open_again(working: Working, queue: Queue, node: str = "w", **query: Any) -> WorkStream:
    """As soon as it can be opened; until then it may be unavailable, but nothing else."""

    def attempt() -> WorkStream | None:
        try:
            stream = working.attempt(queue, node, **query)
        except (OSError, EOFError):
            return None
        if stream.status == 200:
            return stream
        assert stream.answer().refusal == (503, "shard_unavailable")
        return None

    return eventually(attempt, within_s=BACK_S, what="a stream")


@contextmanager
def alone(server: Server, name: str) -> Iterator[None]:
    """Only this gateway accepts connections: the others stand still for a moment."""
    paused = [server.signal_child(other, signal.SIGSTOP) for other in GATEWAYS if other != name]
    try:
        for pid in paused:
            eventually(lambda pid=pid: _stands_still(pid))
        yield
    finally:
        for pid in paused:
            os.kill(pid, signal.SIGCONT)


def _stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def connect(server: Server, working: Working, name: str) -> Http1Source | Http2Source:
    """A connection to this gateway."""
    with alone(server, name):
        source = working.connect()
        source.ping()
    return source


# --- a gateway dies ----------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize(("lane", "jitter_ms"), [("http1", 0), ("http2", 50)])
def test_the_jobs_of_a_dead_gateway_are_anybodys_at_once(start: Start, lane: Any, jitter_ms: int) -> None:
    """And those of the other one stay where they are."""
    server = start(TOPICS_GATEWAYS=2)
    with server.client() as client, Working(server, lane) as working:
        with alone(server, "gateway-0"):
            assert client.get("/v0/health").status == 200  # its connection outlives what follows
        queue = make_queue(client, lease_ms=HOUR_MS, claim_jitter_ms=jitter_ms)
        queue.produce(*range(12))
        doomed = [working.open(queue, f"d{n}", max=3, on=connect(server, working, "gateway-1")) for n in range(2)]
        lost = [*doomed[0].seqs(3), *doomed[1].seqs(3)]
        safe = working.open(queue, "safe", max=3, on=connect(server, working, "gateway-0"))
        kept = safe.seqs(3)
        polled = seqs_of(queue.take(1, node="d0"))  # not delivered on any stream
        queue.assert_counters(2, 10)
        kill(server, "gateway-1")
        jobs = claim_within(queue, 8)
        assert sorted(seqs_of(jobs)) == sorted(set(range(1, 13)) - set(kept) - set(polled))
        assert {job["deliveries"] for job in jobs if job["$seq"] in lost} == {2}
        for stream in doomed:
            with pytest.raises(Ended):
                stream.frame(5)
        assert safe.stays_silent(0.1)
        queue.assert_counters(0, 12)
        assert queue.ack(kept, node="safe")["acked"] == 3
        assert queue.ack(polled, node="d0")["acked"] == 1


def test_the_jobs_of_the_only_gateway_come_back_with_it(start: Start, lane: Any) -> None:
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, lease_ms=HOUR_MS)
        queue.produce(*range(5))
        first = working.open(queue, max=5)
        assert first.seqs(5) == [1, 2, 3, 4, 5]
        kill(server, "gateway-0")
        again = open_again(working, queue, max=5)
        assert again.seqs(5) == [1, 2, 3, 4, 5]
        assert {job["deliveries"] for job in again.jobs} == {2}


def test_a_gateway_that_dies_again_and_again(start: Start, lane: Any) -> None:
    """Its workers come back, and nothing is lost or left held by nobody."""
    server = start()
    count = 120
    done: dict[int, int] = {}
    with server.client() as client:
        queue = make_queue(client, lease_ms=HOUR_MS)
        produce(queue, *range(count))
        finished = threading.Event()
        workers = [
            threading.Thread(target=_work, args=(server, queue.name, lane, f"w{n}", done, finished)) for n in range(3)
        ]
        for worker in workers:
            worker.start()
        try:
            for at in (20, 60, 90):
                eventually(lambda at=at: len(done) >= at)
                kill(server, "gateway-0")
            eventually(lambda: len(done) == count, what="all jobs")
        finally:
            finished.set()
            for worker in workers:
                worker.join(30)
        eventually(lambda: insist(lambda: client.state(queue.name))["count"] == 0)
        assert insist(lambda: client.state(queue.name))["queue"] == {"ready": 0, "in_flight": 0, "dead_lettered": 0}
        assert set(done) == set(range(1, count + 1))


def _work(
    server: Server, name: str, lane: Lane, node: str, done: dict[int, int], finished: threading.Event, most: int = 4
) -> None:
    """A worker that comes back whatever happens, and works until there is nothing left to do."""
    while not finished.is_set():
        with Working(server, lane) as working:
            queue = Queue(working.client, name)
            try:
                stream = working.attempt(queue, node, max=most)
                while stream.status == 200 and not finished.is_set():
                    if stream.stays_silent(0.2):
                        continue
                    job = stream.event()
                    if job.event != "job":
                        break
                    seq = job["$seq"]
                    done[seq] = done.get(seq, 0) + 1
                    stream.forget(seq)
                    while (answer := queue.post("ack", {"node": node, "seqs": [seq]})).status == 503:
                        time.sleep(0.01)
                    assert answer.status == 200, answer
            except (OSError, EOFError, Lost, Ended):
                pass
        time.sleep(0.01)


# --- the coordinator dies ----------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize(("lane", "leases_durable"), [("http1", False), ("http2", False), ("http1", True)])
def test_a_stream_outlives_the_coordinator(start: Start, lane: Any, leases_durable: bool) -> None:
    """It goes on when that is back. What it holds stays its own: it can be acked, and goes to nobody else."""
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, lease_ms=HOUR_MS, leases_durable=leases_durable)
        queue.produce(*range(10))
        one, two = working.open(queue, "one", max=3), working.open(queue, "two", max=2)
        assert (one.seqs(3), two.seqs(2)) == ([1, 2, 3], [4, 5])
        for life in range(1, 4):
            kill(server, "queue")
            acked = min(one.held)
            insist_on_ack(queue, one, acked)
            assert one.seqs(1, within_s=BACK_S) == [5 + life]
            assert two.stays_silent(0.1)
            queue.wait_counters(10 - 5 - life, 5)
        produce(queue, "late")
        insist_on_ack(queue, two, 4, 5)
        assert two.seqs(2, within_s=BACK_S) == [9, 10]
        for stream in (one, two):
            assert {job["deliveries"] for job in stream.jobs} == {1}
        one.close()
        queue.wait_counters(1 + 3, 2)
        assert {job["deliveries"] for job in claim_within(queue, 4) if job["$seq"] != 11} == {2}


@pytest.mark.parametrize("lane", ["http1"])
def test_jobs_held_across_a_death_go_to_nobody_else(start: Start, lane: Any) -> None:
    """Whoever asks, for longer than a coordinator needs to find out who is still there."""
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, lease_ms=HOUR_MS)
        queue.produce(*range(5))
        stream = working.open(queue, max=5)
        stream.take(5)
        kill(server, "queue")
        deadline = time.monotonic() + 4
        greedy = open_again(working, queue, "greedy", max=5)
        while time.monotonic() < deadline:
            assert insist(lambda: queue.post("claim", {"node": "poll", "max": 5}))["claimed"] == []
            assert greedy.stays_silent(0.05)
        queue.assert_counters(0, 5)
        working.ack(stream)
        queue.wait_counters(0, 0)


def test_what_closes_while_the_coordinator_is_away_is_released_when_it_is_back(start: Start, lane: Any) -> None:
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, lease_ms=HOUR_MS)
        queue.produce(*range(6))
        goes, stays = working.open(queue, "goes", max=3), working.open(queue, "stays", max=3)
        goes.take(3)
        stays.take(3)
        pid = server.signal_child("queue", signal.SIGSTOP)
        goes.close()
        assert server.signal_child("queue") == pid
        eventually(lambda: gone(pid))
        assert sorted(seqs_of(claim_within(queue, 3, within_s=BACK_S))) == [1, 2, 3]
        assert stays.stays_silent(0.1)
        queue.assert_counters(0, 6)
        working.ack(stays)


def test_a_gateway_and_the_coordinator_die_together(start: Start) -> None:
    """Nobody can say any more that the streams have closed; it is noticed all the same."""
    server = start(TOPICS_GATEWAYS=2)
    with server.client() as client, Working(server) as working:
        with alone(server, "gateway-0"):
            assert client.get("/v0/health").status == 200
        queue = make_queue(client, lease_ms=HOUR_MS)
        queue.produce(*range(6))
        doomed = working.open(queue, "doomed", max=3, on=connect(server, working, "gateway-1"))
        safe = working.open(queue, "safe", max=3, on=connect(server, working, "gateway-0"))
        doomed.take(3)
        safe.take(3)
        stopped = server.signal_child("queue", signal.SIGSTOP)
        kill(server, "gateway-1")
        os.kill(stopped, signal.SIGKILL)
        eventually(lambda: gone(stopped))
        assert sorted(seqs_of(claim_within(queue, 3, within_s=BACK_S))) == [1, 2, 3]
        assert safe.stays_silent(0.1)
        queue.assert_counters(0, 6)
        working.client.close()
        working.ack(safe)


@pytest.mark.parametrize("lane", ["http1"])
def test_a_stream_may_be_opened_while_the_coordinator_is_away(start: Start, lane: Any) -> None:
    """It is told to come again, or it waits; then it works."""
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, lease_ms=HOUR_MS)
        queue.produce(1)
        kill(server, "queue")
        stream = open_again(working, queue)
        assert stream.seqs(1, within_s=BACK_S) == [1]
        insist_on_ack(queue, stream, 1)


def test_a_stream_opened_while_the_coordinator_stands_still(start: Start, lane: Any) -> None:
    """A client that gave up waiting leaves nothing behind that would take jobs."""
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, lease_ms=HOUR_MS)
        queue.produce(*range(5))
        queue.take(1)
        stopped = server.signal_child("queue", signal.SIGSTOP)
        impatient = working.connect()
        impatient.ping()
        with pytest.raises(TimeoutError):
            _read_for_a_while(impatient, f"/v0/topics/{queue.name}/work?node=w&max=5")
        impatient.reset()
        os.kill(stopped, signal.SIGCONT)
        assert seqs_of(claim_within(queue, 4)) == [2, 3, 4, 5]


def _read_for_a_while(source: Http1Source | Http2Source, path: str) -> None:
    """The stream may have been opened; then there is nothing behind its first frames."""
    source.get(path, [], within_s=0.3)
    while source.more(0.3):
        pass


def test_a_coordinator_that_dies_under_load(start: Start) -> None:
    """Streams that stay open the whole time: each job comes once, to one of them, whatever dies in between."""
    server = start()
    count = 400
    got: dict[str, list[Job]] = {}
    with server.client() as client:
        queue = make_queue(client, lease_ms=HOUR_MS, leases_durable=True)
        finished = threading.Event()
        faults: list[BaseException] = []

        def work(lane: Lane, node: str) -> None:
            jobs = got[node] = []
            try:
                with Working(server, lane) as working:
                    own = Queue(working.client, queue.name)
                    stream = open_again(working, queue, node, max=8)
                    while not finished.is_set():
                        if stream.stays_silent(0.1):
                            continue
                        job = stream.job()
                        jobs.append(job)
                        insist_on_ack(own, stream, job["$seq"])
            except BaseException as error:
                faults.append(error)

        workers = [threading.Thread(target=work, args=(lane, f"{lane} {n}")) for lane in LANES for n in range(2)]
        for worker in workers:
            worker.start()
        try:
            for first in range(0, count, 20):
                produce(queue, *range(first, first + 20))
                if first in (60, 160, 260):
                    kill(server, "queue")
            eventually(lambda: faults or sum(map(len, got.values())) >= count, what="all jobs")
        finally:
            finished.set()
            for worker in workers:
                worker.join(30)
        assert not faults, faults[0]
        seqs = sorted(job["$seq"] for jobs in got.values() for job in jobs)
        assert seqs == list(range(1, count + 1))
        assert insist(lambda: client.state(queue.name))["count"] == 0


@pytest.mark.parametrize(("lane", "comes_again"), [("http1", None), ("http2", "log"), ("http1", "queue")])
def test_a_queue_that_is_deleted_while_the_coordinator_is_away(
    start: Start, lane: Any, comes_again: str | None
) -> None:
    """Its streams end when it is back. If there is another queue of that name by then, they may work for that one."""
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, lease_ms=HOUR_MS)
        queue.produce("old", "old")
        stream = working.open(queue)
        stream.take(1)
        kill(server, "queue")
        assert insist(lambda: client.drop(queue.name)).status == 200
        if comes_again is not None:
            assert client.put(queue.name, type=comes_again).status == 201
            client.append(queue.name, "new")
        stream.forget()
        if comes_again == "queue":
            frame = stream.event(BACK_S)
            assert (frame.event, frame.json.get("code"), frame.json.get("data")) in (
                ("error", 404, None),
                ("job", None, "new"),
            )
        else:
            assert stream.last_word(within_s=BACK_S) in ((404,) if comes_again is None else (404, 409))


def test_streams_that_close_at_any_moment_of_a_restart(start: Start) -> None:
    """Before the coordinator dies, while it is away, while it reads what there was: none is kept as if it were open."""
    server = start()
    with server.client() as client, Working(server, "http1") as one, Working(server, "http2") as two:
        queue = make_queue(client, lease_ms=HOUR_MS)
        for _ in range(5):  # so that there is something to read
            queue.produce(*range(1_000))
            assert queue.nack(seqs_of(queue.take(1_000)), delay_ms=HOUR_MS)["nacked"] == 1_000
        jobs = queue.produce(*range(120))
        streams = [(one, two)[n % 2].open(queue, f"w{n}", max=2) for n in range(60)]
        for stream in streams:
            stream.take(2)
        for at, stream in enumerate(streams):
            if at == 5:
                kill(server, "queue")
            stream.close()
            time.sleep(0.02)  # spread over the restart
        assert sorted(seqs_of(claim_within(queue, 120, within_s=BACK_S))) == jobs
        queue.wait_counters(0, 120, hidden=5_000)


SYNC_S = 1.0
SLOW_DISK = f"""
import os, time
_fdatasync = os.fdatasync
def fdatasync(fd):
    time.sleep({SYNC_S})
    _fdatasync(fd)
os.fdatasync = fdatasync
"""


@pytest.mark.parametrize("lane", ["http1"])
def test_what_was_leased_but_not_pushed_is_not_held(start: Start, tmp_path: Path, lane: Any) -> None:
    """A durable lease is written before its job is pushed. A coordinator that dies in between has leased what nobody
    got; the stream gets it from the next one."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    server = start(PYTHONPATH=tmp_path)
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, lease_ms=HOUR_MS, leases_durable=True)
        stream = working.open(queue)
        queue.produce("job")
        eventually(lambda: queue.counters().in_flight == 1, every_s=0.001)
        kill(server, "queue")
        assert stream.job(BACK_S)["data"] == "job"
        insist_on_ack(queue, stream, 1)
        queue.wait_counters(0, 0)


# --- a shard dies ------------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize(
    ("lane", "shard", "durability"), [("http1", 0, "disk"), ("http2", 1, "fsync"), ("http1", 1, "memory")]
)
def test_a_stream_outlives_the_shard(start: Start, lane: Any, shard: int, durability: str) -> None:
    """The queue's own, and the one that counts the streams."""
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, name_on(shard), lease_ms=HOUR_MS, durability=durability)
        other = make_queue(client, name_on(1 - shard), lease_ms=HOUR_MS)
        queue.produce(*range(8))
        stream, elsewhere = working.open(queue, max=3), working.open(other)
        assert stream.seqs(3) == [1, 2, 3]
        for life in range(1, 3):
            kill(server, f"shard-{shard}")
            produce(other, life)
            assert elsewhere.seqs(1) == [life]
            insist_on_ack(other, elsewhere, life)
            insist_on_ack(queue, stream, min(stream.held))
            assert stream.seqs(1, within_s=BACK_S) == [3 + life]
            server.wait_ready()
            queue.wait_counters(8 - 3 - life, 3)
        produce(queue, "late")
        insist_on_ack(queue, stream, *stream.held)
        assert stream.seqs(3, within_s=BACK_S) == [6, 7, 8]
        assert {job["deliveries"] for job in stream.jobs} == {1}
        stream.close()
        assert len(claim_within(queue, 4)) == 4


def test_jobs_produced_behind_a_shards_death_come(start: Start, lane: Any) -> None:
    """To a stream that waits, without anybody asking for anything."""
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, name_on(1), lease_ms=HOUR_MS)
        stream = working.open(queue, max=10)
        for seq in range(1, 4):
            kill(server, "shard-1")
            produce(queue, seq)
            assert stream.seqs(1, within_s=BACK_S) == [seq]


def test_what_closes_while_the_shard_is_away_is_released(start: Start, lane: Any) -> None:
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, name_on(1), lease_ms=HOUR_MS)
        queue.produce(*range(4))
        stream = working.open(queue, max=4)
        stream.take(4)
        stopped = server.signal_child("shard-1", signal.SIGSTOP)
        stream.close()
        os.kill(stopped, signal.SIGKILL)
        eventually(lambda: gone(stopped))
        jobs = claim_within(queue, 4, within_s=BACK_S)
        assert {job["deliveries"] for job in jobs} == {2}


@pytest.mark.parametrize("lane", ["http1"])
def test_a_queue_in_memory_alone_is_gone_with_its_shard(start: Start, lane: Any) -> None:
    """Its stream goes on with what is produced then."""
    server = start()
    with server.client() as client, Working(server, lane) as working:
        queue = make_queue(client, name_on(1), lease_ms=HOUR_MS, durability="ephemeral")
        queue.produce("old", "old")
        stream = working.open(queue)
        stream.take(1)
        kill(server, "shard-1")
        stream.forget()
        produce(queue, "new")
        assert stream.job(BACK_S)["data"] == "new"
        queue.wait_counters(0, 1)


# --- places ------------------------------------------------------------------------------------------


def test_the_limit_of_streams_outlives_whoever_counts_and_whoever_serves(start: Start, lane: Any) -> None:
    server = start(TOPICS_GATEWAYS=2, TOPICS_MAX_SSE_CONNECTIONS=3)
    with server.client() as client, Working(server, lane) as working:
        with alone(server, "gateway-0"):
            assert client.get("/v0/health").status == 200
        queue = make_queue(client, lease_ms=HOUR_MS)
        kept = working.open(queue, on=connect(server, working, "gateway-0"))
        goes = working.open(queue, on=connect(server, working, "gateway-0"))
        doomed = working.open(queue, on=connect(server, working, "gateway-1"))
        assert working.attempt(queue).answer().refusal == (429, "throttled")
        source = connect(server, working, "gateway-0")
        kill(server, "shard-0")  # it counts
        goes.close()
        fresh = _place(working, queue, on=source)
        server.wait_ready()
        assert working.attempt(queue).answer().refusal == (429, "throttled")
        kill(server, "gateway-1")
        doomed.source.close()
        again = _place(working, queue)
        assert working.attempt(queue).answer().refusal == (429, "throttled")
        kill(server, "queue")  # it counts nothing
        produce(queue, 1, 2, 3)
        for stream in (kept, fresh, again):
            stream.job(BACK_S)


def _place(working: Working, queue: Queue, *, on: Http1Source | Http2Source | None = None) -> WorkStream:
    """A stream, as soon as there is a place for it."""

    def attempt() -> WorkStream | None:
        try:
            stream = working.attempt(queue, on=on)
        except (OSError, EOFError):
            return None
        if stream.status == 200:
            return stream
        assert stream.answer().refusal in ((503, "shard_unavailable"), (429, "throttled"))
        return None

    return eventually(attempt, within_s=BACK_S, what="a place")


# --- all of them -------------------------------------------------------------------------------------


def test_whatever_dies_all_jobs_are_done(start: Start) -> None:
    """Workers that come back, a producer that repeats itself, and one process after the other killed."""
    server = start(TOPICS_GATEWAYS=2)
    count = 300
    done: dict[int, int] = {}
    finished = threading.Event()
    with server.client() as client:
        queue = make_queue(client, lease_ms=HOUR_MS)
        workers = [
            threading.Thread(target=_work, args=(server, queue.name, LANES[n % 2], f"w{n}", done, finished))
            for n in range(4)
        ]
        for worker in workers:
            worker.start()
        try:
            names = ["queue", "shard-0", "gateway-0", "shard-1", "queue", "gateway-1", "shard-0", "queue"]
            for first in range(0, count, 15):
                produce(queue, *range(first, first + 15))
                if first % 30 == 15 and names:
                    kill(server, names.pop(0))
            assert not names
            eventually(lambda: len(done) >= count, what=f"all jobs ({len(done)})")
            eventually(lambda: insist(lambda: client.state(queue.name))["count"] == 0, what="all acked")
        finally:
            finished.set()
            for worker in workers:
                worker.join(30)
        assert set(done) == set(range(1, count + 1))
        assert insist(lambda: client.state(queue.name))["queue"]["in_flight"] == 0
        server.wait_ready()
        # And everything works as ever.
        produce(queue, "after")
        with Working(server) as working:
            assert open_again(working, queue).seqs(1) == [count + 1]


# --- stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_the_next_life_of_the_server(start_server: Start, tmp_path: Path, how: str) -> None:
    """A stop ends streams with a word; either way what they held is claimable when the server is back."""
    server = start_server(TOPICS_WAL_SHARDS=SHARDS)
    with server.client() as client, Working(server, "http1") as one, Working(server, "http2") as two:
        queue = make_queue(client, lease_ms=HOUR_MS, leases_durable=how == "killed")
        name = queue.name
        queue.produce(*range(10))
        streams = [one.open(queue, max=3), two.open(queue, max=3)]
        assert [stream.seqs(3) for stream in streams] == [[1, 2, 3], [4, 5, 6]]
        polled = queue.take(1, node="poll")
        unread = one.open(queue, max=3, receive_buffer=4_096)
        queue.wait_counters(0, 10)
        if how == "stopped":
            assert server.stop() == 0
            for stream in (*streams, unread):
                assert stream.last_word() == 503
        else:
            server.kill()
    assert "Traceback" not in server.output()
    again = start_server(TOPICS_WAL_SHARDS=SHARDS)
    with again.client() as client:
        queue = Queue(client, name)
        jobs = claim_within(queue, 9, within_s=BACK_S)
        assert sorted(seqs_of(jobs)) == [1, 2, 3, 4, 5, 6, 8, 9, 10]
        assert {job["deliveries"] for job in jobs} == {2}
        assert queue.ack(seqs_of(polled), node="poll")["acked"] == 1  # a lease of its own
    assert "Traceback" not in again.output()
