"""The counters of a queue in both lanes: what one topic shows and what the list shows after every operation, checked
against a queue that is obviously right; and that looking changes nothing."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from .client import Client, unique
from .queues import CLASSES, SHORTEST_MS, Counters, Queue, make_queue, seqs_of, together, workers
from .server import Server
from .sse import Watching

pytestmark = pytest.mark.e2e


@pytest.fixture
def queue(api: Client) -> Queue:
    return make_queue(api)


# --- where they are shown ----------------------------------------------------------------------------


def test_only_queues_have_them(api: Client, topic: str) -> None:
    log, queue = f"{topic}.log", make_queue(api, f"{topic}.queue")
    api.append(log, 1)
    queue.produce(1)
    state = queue.state()
    assert state["queue"] == {"ready": 1, "in_flight": 0, "dead_lettered": 0}
    assert state["config"]["type"] == "queue"
    assert "queue" not in api.state(log).json
    rows = {row["topic"]: row for row in api.list(prefix=topic)["topics"]}
    assert "queue" not in rows[log]
    assert rows[queue.name]["queue"] == state["queue"]
    assert set(rows[queue.name]) - set(rows[log]) == {"queue"}


def test_a_queue_that_nobody_has_claimed_from(queue: Queue) -> None:
    queue.assert_counters(0, 0)
    queue.produce(*range(5))
    queue.assert_counters(5, 0)
    queue.api.delete(queue.name, before_seq=3)
    queue.assert_counters(3, 0)


@pytest.mark.parametrize("touch", [True, False])
def test_with_touch_or_without(queue: Queue, touch: bool) -> None:
    queue.produce(1, 2)
    queue.take()
    expected = {"ready": 1, "in_flight": 1, "dead_lettered": 0}
    assert queue.api.state(queue.name, touch=touch)["queue"] == expected
    assert queue.api.list(prefix=queue.name, touch=touch)["topics"][0]["queue"] == expected


def test_every_page_of_the_list_has_them(api: Client) -> None:
    prefix = unique("many")
    for number in range(12):
        queue = make_queue(api, f"{prefix}.{number:02}")
        queue.produce(*range(12))
        if number:
            queue.take(number)
    rows: list[dict[str, Any]] = []
    query: dict[str, object] = {"prefix": prefix, "page_size": 5}
    while True:
        page = api.list(**query)
        rows += page["topics"]
        if "next_cursor" not in page.json:
            break
        query["cursor"] = page["next_cursor"]
    assert [(row["queue"]["ready"], row["queue"]["in_flight"]) for row in rows] == [(12 - n, n) for n in range(12)]


# --- after every operation ---------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_step_by_step(api: Client, durability: str) -> None:
    queue = make_queue(api, durability=durability)
    queue.produce(*range(10))
    queue.assert_counters(10, 0)
    assert queue.claim(4)["ready"] == 6
    queue.assert_counters(6, 4)
    answer = queue.ack([1])
    assert (answer["ready"], answer["in_flight"]) == (6, 3)
    queue.assert_counters(6, 3)
    answer = queue.nack([2])
    assert (answer["ready"], answer["in_flight"]) == (7, 2)
    queue.assert_counters(7, 2)
    answer = queue.nack([3], delay_ms=60_000)
    assert (answer["ready"], answer["in_flight"]) == (7, 1)
    queue.assert_counters(7, 1, hidden=1)
    queue.extend([4])
    queue.assert_counters(7, 1, hidden=1)
    queue.produce("late")
    queue.assert_counters(8, 1, hidden=1)
    assert queue.claim(100)["ready"] == 0
    queue.assert_counters(0, 9, hidden=1)
    answer = queue.ack(queue.left())
    assert (answer["acked"], answer["skipped"], answer["ready"], answer["in_flight"]) == (9, [3], 0, 0)
    queue.assert_counters(0, 0, hidden=1)


def test_expiry_shows_without_anybody_claiming(queue: Queue) -> None:
    queue.produce(*range(5))
    queue.take(3, lease_ms=SHORTEST_MS)
    queue.wait_counters(5, 0)
    queue.take(2, lease_ms=SHORTEST_MS)
    queue.wait_counters(5, 0)


def test_an_expired_lease_shows_in_the_answers_too(queue: Queue) -> None:
    queue.produce(1, 2, 3)
    queue.take(1, node="a")
    queue.take(2, node="b", lease_ms=SHORTEST_MS)
    queue.wait_counters(2, 1)
    answer = queue.ack([1], node="a")
    assert (answer["ready"], answer["in_flight"]) == (2, 0)
    answer = queue.nack([2], node="b")
    assert (answer["ready"], answer["in_flight"]) == (2, 0)
    assert queue.claim(1)["ready"] == 1


def test_what_is_skipped_changes_nothing(queue: Queue) -> None:
    queue.produce(*range(4))
    queue.take(2)
    for skipped in (queue.ack([3, 4, 99]), queue.nack([3, 4, 99])):
        assert (skipped["ready"], skipped["in_flight"]) == (2, 2)
    queue.extend([3, 4, 99])
    queue.ack([1, 2], node="other")
    queue.nack([1, 2], lease_ids=["x", "y"])
    queue.assert_counters(2, 2)


class NaiveQueue:
    """The jobs in a dict, each walked at every step. No lease ends by itself here."""

    def __init__(self) -> None:
        self.head = 0
        self.jobs: dict[int, tuple[str, str, int]] = {}  # seq -> (state, holder, deliveries)

    def produce(self, count: int) -> None:
        for _ in range(count):
            self.head += 1
            self.jobs[self.head] = ("fresh", "", 0)

    def _in(self, state: str) -> list[int]:
        return sorted(seq for seq, job in self.jobs.items() if job[0] == state)

    def claim(self, node: str, most: int) -> list[tuple[int, int]]:
        claimed = sorted((self._in("free") + self._in("fresh"))[:most])
        for seq in claimed:
            self.jobs[seq] = ("leased", node, self.jobs[seq][2] + 1)
        return [(seq, self.jobs[seq][2]) for seq in claimed]

    def settle(self, node: str, seqs: list[int], state: str | None) -> list[int]:
        """What is skipped; state: what the others become, None: gone."""
        skipped = []
        for seq in seqs:
            job = self.jobs.get(seq)
            if job is None or job[:2] != ("leased", node):
                skipped.append(seq)
            elif state is None:
                del self.jobs[seq]
            else:
                self.jobs[seq] = (state, node, job[2])
        return skipped

    def counters(self) -> tuple[int, int]:
        return len(self._in("free")) + len(self._in("fresh")), len(self._in("leased"))

    @property
    def hidden(self) -> int:
        return len(self._in("delayed"))


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_operations_against_a_naive_queue(queue: Queue, seed: int) -> None:
    dice = random.Random(seed)
    naive = NaiveQueue()
    for step in range(150):
        node = dice.choice("abc")
        seqs = dice.sample(range(max(naive.head - 40, 0), naive.head + 2), k=dice.randint(1, min(6, naive.head + 1)))
        what = dice.choices(("produce", "claim", "ack", "nack", "delay", "extend", "delete"), (4, 6, 4, 4, 1, 2, 1))[0]
        if what == "produce":
            count = dice.randint(1, 8)
            queue.produce(*range(count))
            naive.produce(count)
        elif what == "claim":
            most = dice.randint(1, 9)
            answer = queue.claim(most, node=node)
            expected = naive.claim(node, most)
            assert [(job["$seq"], job["deliveries"]) for job in answer["claimed"]] == expected, step
            assert answer["ready"] == naive.counters()[0], step
        elif what == "ack":
            answer = queue.ack(seqs, node=node)
            assert answer["skipped"] == naive.settle(node, seqs, None), step
            assert (answer["ready"], answer["in_flight"]) == naive.counters(), step
        elif what in ("nack", "delay"):
            delay_ms = 3_600_000 if what == "delay" else 0
            answer = queue.nack(seqs, node=node, delay_ms=delay_ms)
            assert answer["skipped"] == naive.settle(node, seqs, "delayed" if delay_ms else "free"), step
            assert (answer["ready"], answer["in_flight"]) == naive.counters(), step
        elif what == "extend":
            assert queue.extend(seqs, node=node)["skipped"] == naive.settle(node, seqs, "leased"), step
        elif step % 5 == 0:
            before = dice.randint(0, naive.head + 1)
            queue.api.delete(queue.name, before_seq=before)
            naive.jobs = {seq: job for seq, job in naive.jobs.items() if seq >= before}
            queue.wait_counters(*naive.counters(), hidden=naive.hidden)
        if step % 3 == 0:
            queue.assert_counters(*naive.counters(), hidden=naive.hidden)
    assert queue.left() == sorted(naive.jobs)


# --- looking changes nothing -------------------------------------------------------------------------


def test_reading_touches_no_lease(queue: Queue) -> None:
    queue.produce(*range(6))
    queue.take(2, node="a")
    queue.take(1, node="b")
    queue.nack([3], node="b", delay_ms=60_000)
    for _ in range(3):
        assert queue.left() == [1, 2, 3, 4, 5, 6]
        assert queue.api.diff(queue.name, 1, node="a", limit=2).seqs == [2, 3]
        queue.assert_counters(3, 2, hidden=1)
    assert [(job["$seq"], job["deliveries"]) for job in queue.take(3)] == [(4, 1), (5, 1), (6, 1)]
    assert queue.ack([1, 2], node="a")["acked"] == 2


def test_a_reader_sees_jobs_as_they_were_produced(queue: Queue) -> None:
    record = {"data": {"x": 1}, "tag": "t", "node": "n", "meta": {"m": 1}}
    queue.produce_records([record])
    before = queue.records()
    queue.take()
    queue.extend([1])
    queue.nack([1])
    queue.take()
    assert queue.records() == before


def test_a_long_poll_is_woken_by_jobs_alone(queue: Queue) -> None:
    queue.produce(1, 2)
    queue.take(1)
    started = time.monotonic()
    with queue.api.twin() as other:
        queue.ack([1])
        answer = other.diff(queue.name, 2, wait_ms=300)
    assert answer.seqs == []
    assert time.monotonic() - started >= 0.29


def test_a_watcher_sees_jobs_and_no_leases(server: Server, api: Client, lane: Any, queue: Queue) -> None:
    with Watching(server, lane) as watching:
        stream = watching.follow(queue.name)
        queue.produce("a", "b", "c")
        assert stream.wait_records(queue.name, 3) == ["a", "b", "c"]
        queue.assert_counters(3, 0)
        jobs = queue.take(3)
        assert [job["deliveries"] for job in jobs] == [1, 1, 1]
        queue.ack([1])
        queue.nack([2])
        queue.extend([3])
        queue.take()
        queue.produce("d")
        assert stream.wait_records(queue.name, 4) == ["a", "b", "c", "d"]
        assert {frame.event for frame in stream.frames if frame.comment is None} <= {"record", "caught-up"}
        queue.assert_counters(1, 2)


def test_a_watcher_that_comes_later_sees_what_is_left(server: Server, lane: Any, queue: Queue) -> None:
    queue.produce(*"abcd")
    queue.take(3)
    queue.ack([1, 3])
    with Watching(server, lane) as watching:
        stream = watching.follow(queue.name)
        assert stream.wait_records(queue.name, 2) == ["b", "d"]
        assert stream.of("tombstone") == []
    queue.assert_counters(1, 1)


def test_counters_add_up_at_every_moment(queue: Queue) -> None:
    """While leases end and jobs are taken, no look shows more jobs than there are."""
    queue.produce(*range(50))
    with queue.api.twin() as other:
        watched = queue.by(other)
        for turn in range(60):
            queue.claim(7, node=f"n{turn % 3}", lease_ms=SHORTEST_MS)
            if turn % 4 == 0 and (claimed := seqs_of(queue.claim(1))):
                assert queue.ack(claimed)["acked"] == 1
            state = watched.state()
            ready, in_flight, moved = Counters(**state["queue"])
            assert (ready + in_flight, moved) == (state["count"], 0)
    queue.wait_counters(queue.state()["count"], 0)


@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
def test_counters_add_up_while_others_work(api: Client, durability: str) -> None:
    """An ack takes the job out of both counts at once, however long the disk takes. Nothing is produced meanwhile: the
    count of a look is a little older than its counters."""
    queue = make_queue(api, durability=durability)
    wrong = []
    with workers(queue, 3) as (one, other, watched):
        for _ in range(20):
            queue.produce(*range(10))
            over = threading.Semaphore(0)

            def work(worker: Queue, node: str) -> None:
                try:
                    claimed = seqs_of(worker.claim(5, node=node))
                    assert worker.ack(claimed, node=node)["acked"] == 5
                finally:
                    over.release()  # noqa: B023

            def watch() -> None:
                left = 2
                while left:
                    state = watched.state()
                    shown = state["queue"]["ready"] + state["queue"]["in_flight"]
                    if shown != state["count"]:
                        wrong.append((shown, state["count"]))
                    while over.acquire(blocking=False):  # noqa: B023
                        left -= 1

            together([lambda: work(one, "a"), lambda: work(other, "b"), watch])
    assert wrong == []
    queue.assert_counters(0, 0)
