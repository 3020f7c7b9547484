"""Who gets how much: streams and pollers of one queue, with a window in which a cohort gathers, and without.

With a window the shares are even (their coefficient of variation is at most 0.15), or follow what each asked for.
Without one whoever comes first is served first, but nobody who waits is passed over for good.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from .client import LANES, Lane
from .queues import Queue, make_queue, seqs_of, together, workers
from .server import Server, eventually
from .working import HOUR_MS, Working, WorkStream, claim_within

pytestmark = [pytest.mark.e2e, pytest.mark.full]

WINDOW_MS = 100
EVEN = 0.15


def variation(shares: Sequence[int]) -> float:
    """The coefficient of variation."""
    return statistics.pstdev(shares) / statistics.mean(shares)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two gateways, as a fleet would find them."""
    folder = tmp_path_factory.mktemp("wide")
    server = Server(folder / "data", log=folder / "server.log", TOPICS_GATEWAYS=2)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture
def both(wide: Server) -> Iterator[list[Working]]:
    with Working(wide, "http1") as one, Working(wide, "http2") as two:
        yield [one, two]


@pytest.fixture
def queue(both: list[Working]) -> Queue:
    """With a window."""
    return both[0].queue(claim_jitter_ms=WINDOW_MS)


def received(streams: Sequence[WorkStream], count: int, *, within_s: float = 30) -> list[int]:
    """What each of them has got when there are so many in all."""

    def enough() -> bool:
        for stream in streams:
            while not stream.stays_silent(0.002):
                stream.take(1)
        return sum(len(stream.jobs) for stream in streams) >= count

    eventually(enough, within_s=within_s, what=f"{count} jobs")
    return [len(stream.jobs) for stream in streams]


# --- one pass ----------------------------------------------------------------------------------------


@pytest.mark.gate
def test_what_waits_is_divided_evenly(both: list[Working], queue: Queue) -> None:
    """Ten streams for ten jobs each, fifty jobs: five for each."""
    streams = [both[n % 2].open(queue, f"w{n}", max=10) for n in range(10)]
    queue.produce(*range(50))
    assert received(streams, 50) == [5] * 10
    queue.assert_counters(0, 50)
    assert sorted(seq for stream in streams for seq in seqs_of(stream.jobs)) == list(range(1, 51))


def test_what_does_not_divide_goes_to_some(both: list[Working], queue: Queue) -> None:
    streams = [both[n % 2].open(queue, f"w{n}", max=10) for n in range(6)]
    queue.produce(*range(20))
    assert sorted(received(streams, 20)) == [3, 3, 3, 3, 4, 4]


def test_shares_follow_what_each_can_take(both: list[Working], queue: Queue) -> None:
    streams = [both[0].open(queue, "small", max=4), both[1].open(queue, "large", max=16)]
    queue.produce(*range(10))
    assert received(streams, 10) == [2, 8]
    both[1].ack(streams[1])  # now it has room for 16, and the other one for 2
    queue.produce(*range(9))
    assert received(streams, 19) == [3, 16]


def test_a_full_stream_takes_no_share(both: list[Working], queue: Queue) -> None:
    full, empty = both[0].open(queue, "full", max=2), both[1].open(queue, "empty", max=20)
    queue.produce(*range(22))
    assert received([full, empty], 22) == [2, 20]
    both[1].ack(empty)
    queue.produce(*range(10))
    assert received([full, empty], 32) == [2, 30]
    assert full.stays_silent(0.1)


def test_streams_and_claims_are_one_cohort(both: list[Working]) -> None:
    """All of them wait when the jobs come, so one pass serves them all."""
    queue = both[0].queue(claim_jitter_ms=1_000)  # long enough for all to come, on a busy machine too
    streams = [both[n % 2].open(queue, f"s{n}", max=8) for n in range(4)]
    with workers(queue, 5) as pollers:
        producer = pollers.pop()

        def poll(poller: Queue, node: str) -> int:
            count: int = poller.claim(8, node=node)["count"]
            return count

        def produce() -> int:
            producer.produce(*range(32))  # within the window that the claims have opened
            return 0

        calls: list[Callable[[], int]] = [
            *(lambda n=n: poll(pollers[n], f"p{n}") for n in range(4)),
            produce,
        ]
        polled = together(calls)[:-1]
    pushed = received(streams, 32 - sum(polled))
    assert sum(polled) + sum(pushed) == 32
    assert variation([*polled, *pushed]) <= EVEN, (polled, pushed)


def test_a_stream_that_closes_in_the_window_takes_nothing_with_it(both: list[Working]) -> None:
    queue = both[0].queue(claim_jitter_ms=1_000)
    leaving = [both[n % 2].open(queue, f"l{n}", max=10) for n in range(4)]
    queue.produce(*range(20))
    for stream in leaving:
        stream.reset()
    assert len(claim_within(queue, 20)) == 20


def test_one_stream_alone_waits_no_longer_than_the_window(both: list[Working]) -> None:
    window_ms = 500
    queue = both[0].queue(claim_jitter_ms=window_ms)
    stream = both[0].open(queue)
    spent = []
    for seq in range(1, 4):
        started = time.monotonic()
        queue.produce(seq)
        assert stream.seqs(1) == [seq]
        spent.append(time.monotonic() - started)
        both[0].ack(stream)
    assert sorted(spent)[1] < 2 * window_ms / 1_000


# --- over time ---------------------------------------------------------------------------------------


def test_single_jobs_go_round(both: list[Working]) -> None:
    """What does not divide is nobody's for good: one job at a time for five who wait."""
    queue = both[0].queue(claim_jitter_ms=10)
    streams = {f"w{n}": both[n % 2].open(queue, f"w{n}", max=3) for n in range(5)}
    for number in range(1, 61):
        queue.produce(number)
        received(list(streams.values()), number)
        for at, stream in enumerate(streams.values()):
            if stream.held:
                both[at % 2].ack(stream)
    shares = [len(stream.jobs) for stream in streams.values()]
    assert variation(shares) <= EVEN, shares


class Fleet:
    """Streams and pollers that ack as soon as they have something, each in a thread of its own."""

    def __init__(self, server: Server, queue: Queue, *, streams: int, pollers: int, most: int) -> None:
        self.done: Counter[str] = Counter()
        self.seqs: list[int] = []
        self._server, self._queue, self._most = server, queue.name, most
        self._finished = threading.Event()
        self.faults: list[BaseException] = []
        self._ready = threading.Barrier(streams + pollers + 1)
        members = [(self._stream, f"s{n}", LANES[n % 2]) for n in range(streams)]
        members += [(self._poller, f"p{n}", LANES[n % 2]) for n in range(pollers)]
        self._threads = [threading.Thread(target=self._run, args=member, daemon=True) for member in members]
        self.names = [name for _, name, _ in members]
        for thread in self._threads:
            thread.start()
        self._ready.wait(30)

    def _run(self, work: Callable[[Working, Queue, str], None], name: str, lane: Lane) -> None:
        try:
            with Working(self._server, lane) as working:
                working.client.get("/v0/health")
                work(working, Queue(working.client, self._queue), name)
        except BaseException as error:
            self.faults.append(error)

    def _stream(self, working: Working, queue: Queue, name: str) -> None:
        stream = working.open(queue, name, max=self._most)
        self._ready.wait(30)
        while not self._finished.is_set():
            if stream.stays_silent(0.05):
                continue
            stream.take(1)
            while not stream.stays_silent(0.001):  # what came with it
                stream.take(1)
            self._count(name, list(stream.held))
            working.ack(stream)

    def _poller(self, working: Working, queue: Queue, name: str) -> None:
        self._ready.wait(30)
        while not self._finished.is_set():
            seqs = seqs_of(queue.claim(self._most, node=name))
            if seqs:
                self._count(name, seqs)
                assert queue.ack(seqs, node=name)["acked"] == len(seqs)

    def _count(self, name: str, seqs: list[int]) -> None:
        self.done[name] += len(seqs)
        self.seqs += seqs

    def shares(self) -> list[int]:
        return [self.done[name] for name in self.names]

    def wait_done(self, count: int, *, within_s: float = 60) -> None:
        eventually(
            lambda: self.faults or sum(self.shares()) >= count, within_s=within_s, every_s=0.05, what=f"{count} jobs"
        )
        assert not self.faults, self.faults[0]

    def close(self) -> None:
        self._finished.set()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.gate
@pytest.mark.parametrize(("streams", "pollers"), [(6, 0), (3, 3), (1, 5)])
def test_equal_workers_get_even_shares(wide: Server, streams: int, pollers: int) -> None:
    """More jobs than one pass can give away, and fewer."""
    count = 900
    with wide.client() as client:
        queue = make_queue(client, lease_ms=HOUR_MS, claim_jitter_ms=WINDOW_MS)
        fleet = Fleet(wide, queue, streams=streams, pollers=pollers, most=10)
        try:
            produced = 0
            while produced < count:
                batch = 90 if produced < count / 2 else 30
                queue.produce(*range(batch))
                produced += batch
                fleet.wait_done(produced - 60)
            fleet.wait_done(count)
        finally:
            fleet.close()
        assert not fleet.faults, fleet.faults[0]
        assert sorted(fleet.seqs) == list(range(1, count + 1))
        assert variation(fleet.shares()) <= EVEN, fleet.shares()
        queue.wait_counters(0, 0)


def test_without_a_window_streams_do_not_starve(wide: Server) -> None:
    """Beside pollers that ask again and again, as fast as they can."""
    count = 3_000
    with wide.client() as client:
        queue = make_queue(client, lease_ms=HOUR_MS)
        fleet = Fleet(wide, queue, streams=2, pollers=4, most=5)
        try:
            for first in range(0, count, 50):
                queue.produce(*range(50))
                fleet.wait_done(first - 200)
            fleet.wait_done(count)
        finally:
            fleet.close()
        assert not fleet.faults, fleet.faults[0]
        assert sorted(fleet.seqs) == list(range(1, count + 1))
        assert min(fleet.shares()) >= count / 6 / 4, fleet.shares()


def test_without_a_window_pollers_do_not_starve(wide: Server) -> None:
    """Beside streams that could take everything."""
    count = 2_000
    with wide.client() as client:
        queue = make_queue(client, lease_ms=HOUR_MS)
        fleet = Fleet(wide, queue, streams=3, pollers=2, most=5)
        try:
            queue.produce(*range(1_000))
            queue.produce(*range(count - 1_000))
            fleet.wait_done(count)
        finally:
            fleet.close()
        assert not fleet.faults, fleet.faults[0]
        assert sorted(fleet.seqs) == list(range(1, count + 1))
        assert min(fleet.shares()) >= count / 5 / 4, fleet.shares()
