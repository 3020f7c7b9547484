"""A queue is a topic, in both lanes: leases of jobs that are deleted, evicted or expired, and of queues that are
deleted and made again; jobs that come by other ways than a plain append.

A job that is gone is never delivered, from the moment its removal was answered. The counters follow in a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from .client import Client, unique
from .queues import (
    CLASSES,
    ENDPOINTS,
    SHORTEST_MS,
    Counters,
    Queue,
    check,
    data_of,
    leases_of,
    make_queue,
    seqs_of,
    together,
    workers,
)
from .routing import read, route, wait_data, wait_records
from .server import Server, eventually
from .sockets import Socket
from .wire import Wire, request

pytestmark = pytest.mark.e2e

BODIES: dict[str, dict[str, object]] = {
    "claim": {"node": "w", "max": 10},
    "ack": {"node": "w", "seqs": [1]},
    "nack": {"node": "w", "seqs": [1]},
    "extend": {"node": "w", "seqs": [1], "lease_ms": 1_000},
}


@pytest.fixture
def queue(api: Client) -> Queue:
    return make_queue(api)


def _assert_nobodys(queue: Queue, seqs: list[int], *, node: str = "w") -> None:
    """Whoever held them has nothing to say about them."""
    assert queue.extend(seqs, node=node)["skipped"] == seqs
    assert queue.nack(seqs, node=node)["skipped"] == seqs
    assert queue.ack(seqs, node=node)["skipped"] == seqs


# --- deleted -----------------------------------------------------------------------------------------


@pytest.fixture
def mixed(queue: Queue) -> Queue:
    """Ten jobs in pairs: leased, given back, delayed, expired, fresh. Odd ones are tagged x, even ones y."""
    queue.produce_records([{"data": n, "tag": "x" if n % 2 else "y"} for n in range(1, 11)])
    queue.take(6)
    queue.take(2, node="late", lease_ms=SHORTEST_MS)
    queue.nack([3, 4])
    queue.nack([5, 6], delay_ms=500)
    queue.wait_counters(8, 2)  # the delay is over too
    assert seqs_of(queue.take(4, node="again")) == [3, 4, 5, 6]
    queue.nack([3, 4], node="again")
    queue.nack([5, 6], node="again", delay_ms=3_600_000)
    queue.assert_counters(6, 2, hidden=2)
    return queue


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"match": "x"}, [2, 4, 6, 8, 10]),
        ({"match": "y"}, [1, 3, 5, 7, 9]),
        ({"match": ["tag", "Glob", "*"]}, []),
        ({"before_seq": 4}, [4, 5, 6, 7, 8, 9, 10]),
        ({"before_seq": 6}, [6, 7, 8, 9, 10]),
        ({"before_seq": 8}, [8, 9, 10]),
        ({"before_seq": 10}, [10]),
        ({"before_seq": 11}, []),
        ({"match": "x", "before_seq": 8}, [2, 4, 6, 8, 9, 10]),
    ],
    ids=str,
)
def test_what_is_deleted_is_not_delivered(mixed: Queue, how: dict[str, Any], left: list[int]) -> None:
    mixed.api.delete(mixed.name, **how)
    claimable = [seq for seq in left if seq in (3, 4, 7, 8, 9, 10)]
    assert seqs_of(mixed.claim(100, node="new")) == claimable
    held = [seq for seq in left if seq in (1, 2)]
    hidden = [seq for seq in left if seq in (5, 6)]
    mixed.wait_counters(0, len(held) + len(claimable), hidden=len(hidden))
    gone = [seq for seq in range(1, 11) if seq not in left]
    _assert_nobodys(mixed, gone)
    _assert_nobodys(mixed, gone, node="new")
    _assert_nobodys(mixed, gone, node="late")
    assert mixed.ack([*held, *gone])["skipped"] == gone
    assert mixed.ack([*claimable, *gone], node="new")["skipped"] == gone
    mixed.wait_counters(0, 0, hidden=len(hidden))
    assert mixed.left() == hidden


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_deleted_jobs_take_nobodys_place(queue: Queue, count: int) -> None:
    """A claim that gives fewer than asked for says that there are no more."""
    queue.produce(*range(20))
    queue.take(6)
    queue.nack([1, 2, 3, 4, 5])
    queue.api.delete(queue.name, before_seq=5)
    assert seqs_of(queue.claim(count)) == [5, 7, 8, 9, 10, 11, 12, 13][:count]


def test_evicted_jobs_take_nobodys_place(api: Client) -> None:
    queue = make_queue(api, cap_records=10)
    queue.produce(*range(10))
    queue.take(5)
    queue.nack([1, 2, 3, 4, 5])
    queue.produce(*range(5))
    assert seqs_of(queue.claim(5)) == [6, 7, 8, 9, 10]


def test_fresh_jobs_that_were_deleted_take_nobodys_place(queue: Queue) -> None:
    queue.produce_records([{"data": n, "tag": "keep" if n % 10 == 0 else "drop"} for n in range(1, 3_001)])
    queue.api.delete(queue.name, match="drop")
    assert seqs_of(queue.claim(100)) == list(range(10, 1_001, 10))
    assert seqs_of(queue.claim(1_000)) == list(range(1_010, 3_001, 10))


def test_a_leased_job_that_was_deleted_is_nobodys(queue: Queue) -> None:
    queue.produce(1, 2)
    jobs = queue.take(2)
    queue.api.delete(queue.name, before_seq=2)
    queue.wait_counters(0, 1)
    answer = queue.ack([1, 2], lease_ids=leases_of(jobs))
    assert (answer["acked"], answer["skipped"]) == (1, [1])


def test_an_ack_right_behind_a_delete(queue: Queue) -> None:
    """Whatever the ack says, the job is gone, and nothing else is."""
    for _ in range(20):
        seqs = queue.produce("x", "y")
        queue.take(2)
        queue.api.delete(queue.name, before_seq=seqs[1])
        assert queue.ack(seqs)["acked"] in (1, 2)
        assert queue.left() == []
    queue.wait_counters(0, 0)


def test_claims_race_with_deletes(queue: Queue) -> None:
    """What was claimed before it was deleted is only held until it is noticed; what was deleted is never claimed."""
    for _ in range(8):
        seqs = queue.produce(*range(20))
        with workers(queue, 2) as (worker, cleaner):
            answer, deleted = together(
                [
                    lambda: worker.claim(20),
                    lambda: cleaner.api.delete(queue.name, before_seq=seqs[10])["deleted"],  # noqa: B023
                ]
            )
        assert deleted == 10
        assert set(seqs_of(answer)) >= set(seqs[10:])
        assert queue.left() == seqs[10:]
        queue.wait_counters(0, 10)
        assert queue.ack(seqs[10:])["acked"] == 10
    queue.assert_counters(0, 0)


def test_a_job_that_waits_for_the_dead_letters_can_be_deleted(api: Client) -> None:
    dlq = unique("dlq")
    api.put(dlq, cap_records=1, discard="reject")
    api.append(dlq, "in the way")
    queue = make_queue(api, max_deliveries=1, dead_letter=dlq)
    queue.produce_records([{"data": "x", "tag": "x"}, {"data": "y", "tag": "y"}])
    queue.wear([1, 2], 1)
    queue.claim()
    queue.wait_counters(0, 0, 0, hidden=2)
    api.delete(queue.name, match="x")
    queue.wait_counters(0, 0, 0, hidden=1)
    api.put(dlq)
    wait_data(api, dlq, ["in the way", "y"])
    queue.wait_counters(0, 0, 1)
    assert api.diff(dlq).data == ["in the way", "y"]


# --- evicted and expired -----------------------------------------------------------------------------


def test_a_cap_evicts_leased_jobs_too(api: Client) -> None:
    queue = make_queue(api, cap_records=4)
    queue.produce(*range(4))
    queue.take(2)
    queue.produce(4, 5, 6)  # 1, 2 and 3 have to go
    assert queue.left() == [4, 5, 6, 7]
    assert seqs_of(queue.claim(10, node="new")) == [4, 5, 6, 7]
    queue.wait_counters(0, 4)
    _assert_nobodys(queue, [1, 2])


def test_a_cap_of_bytes(api: Client) -> None:
    queue = make_queue(api, cap_bytes=1_000)
    for _ in range(6):
        queue.produce("x" * 300)
    left = queue.left()
    assert 1 <= len(left) <= 3
    assert seqs_of(queue.claim(10)) == left
    queue.assert_counters(0, len(left))


def test_a_cap_that_is_tightened(queue: Queue) -> None:
    queue.produce(*range(10))
    queue.take(5)
    queue.nack([3])
    queue.configure(cap_records=3)
    assert seqs_of(queue.claim(10, node="new")) == [8, 9, 10]
    queue.wait_counters(0, 3)
    _assert_nobodys(queue, [1, 2, 3, 4, 5])


def test_a_full_queue_takes_a_job_for_each_that_is_acked(api: Client) -> None:
    queue = make_queue(api, cap_records=3, discard="reject")
    queue.produce(1, 2, 3)
    assert queue.api.append(queue.name, 4).refusal == (422, "topic_full")
    queue.take(3)
    assert queue.api.append(queue.name, 4).refusal == (422, "topic_full"), "a lease makes no room"
    queue.nack([1])
    assert queue.api.append(queue.name, 4).refusal == (422, "topic_full")
    queue.ack([2])
    assert queue.produce(4) == [4]
    assert queue.api.append(queue.name, 5).refusal == (422, "topic_full")
    assert seqs_of(queue.claim(10)) == [1, 4]


def test_a_time_to_live_ends_jobs_in_every_state(api: Client) -> None:
    queue = make_queue(api)
    queue.produce(*range(6))
    queue.take(3)
    queue.nack([2])
    queue.nack([3], delay_ms=60_000)
    queue.assert_counters(4, 1, hidden=1)
    queue.configure(ttl_ms=1)
    eventually(lambda: queue.state()["count"] == 0)
    assert queue.claim(10, node="new")["count"] == 0
    queue.wait_counters(0, 0)
    _assert_nobodys(queue, [1, 2, 3])
    queue.configure()
    assert queue.produce("new") == [7]
    assert [(job["$seq"], job["deliveries"]) for job in queue.take()] == [(7, 1)]


def test_jobs_expire_before_they_are_claimed(api: Client) -> None:
    queue = make_queue(api, ttl_ms=150)
    queue.produce(1, 2)
    eventually(lambda: queue.counters() == (0, 0, 0))
    assert queue.claim(10)["count"] == 0


# --- deleted queues ----------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_deleted_queue_is_gone(queue: Queue, endpoint: str) -> None:
    queue.produce(1, 2)
    queue.take()
    assert queue.api.drop(queue.name).status == 200
    assert queue.post(endpoint, BODIES[endpoint]).refusal == (404, "topic_not_found")
    assert queue.api.state(queue.name).status == 404
    assert queue.api.list(prefix=queue.name)["topics"] == []


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
def test_made_again_as_a_log(api: Client, endpoint: str, durability: str) -> None:
    queue = make_queue(api, durability=durability)
    queue.produce(1, 2)
    queue.take()
    api.drop(queue.name)
    api.append(queue.name, "a", "b")
    assert queue.post(endpoint, BODIES[endpoint]).refusal == (409, "not_a_queue")
    state = api.state(queue.name)
    assert (state["type"], state["count"], "queue" in state.json) == ("log", 2, False)


@pytest.mark.parametrize("durability", CLASSES)
def test_made_again_as_a_queue(api: Client, durability: str) -> None:
    queue = make_queue(api, durability=durability)
    queue.produce("old 1", "old 2", "old 3")
    old = queue.take(3, lease_ms=SHORTEST_MS)
    queue.nack([3], delay_ms=60_000)
    api.drop(queue.name)
    queue.configure(durability=durability)
    queue.assert_counters(0, 0, 0)
    assert queue.claim(5)["count"] == 0
    assert queue.produce("new 1", "new 2") == [1, 2]
    _assert_nobodys(queue, [1, 2])
    new = queue.take(2)
    assert [(job["data"], job["deliveries"]) for job in new] == [("new 1", 1), ("new 2", 1)]
    assert not set(leases_of(old)) & set(leases_of(new))
    assert queue.ack([1, 2], lease_ids=leases_of(old)[:2])["skipped"] == [1, 2]
    assert queue.extend([1, 2], lease_ids=leases_of(old)[:2])["skipped"] == [1, 2]
    assert queue.nack([1, 2], lease_ids=leases_of(old)[:2])["skipped"] == [1, 2]
    assert queue.ack([1, 2], lease_ids=leases_of(new))["acked"] == 2


def test_again_and_again(queue: Queue) -> None:
    for turn in range(15):
        if turn:
            queue.api.drop(queue.name)
            queue.configure()
        assert queue.produce(turn, turn) == [1, 2]
        (job,) = queue.take()
        assert (job["data"], job["deliveries"]) == (turn, 1)
        queue.assert_counters(1, 1)


def test_under_its_workers(queue: Queue) -> None:
    """While it is deleted and made again, workers see jobs of the queue there is, or none, and no other failure."""
    current = 0
    over = threading.Event()
    deadline = time.monotonic() + 60

    def remake(owner: Queue) -> None:
        nonlocal current
        try:
            for turn in range(1, 25):
                assert owner.api.drop(owner.name).status == 200
                current = turn
                owner.configure()
                owner.produce(*[turn] * 10)
        finally:
            over.set()

    def work(worker: Queue, node: str) -> int:
        seen = 0
        while not over.is_set():
            assert time.monotonic() < deadline
            oldest = current
            answer = worker.post("claim", {"node": node, "max": 3})
            if answer.status == 404:
                continue
            check(answer, "claim", worker.name)
            assert all(oldest <= job["data"] <= current for job in answer["claimed"])
            assert all(job["deliveries"] == 1 for job in answer["claimed"])
            seen += answer["count"]
            if answer["claimed"]:
                body = {"node": node, "seqs": seqs_of(answer), "lease_ids": leases_of(answer)}
                acked = worker.post("ack", body)
                assert acked.status in (200, 404), acked
        return seen

    def look(watcher: Queue) -> None:
        while not over.is_set():
            assert time.monotonic() < deadline
            state = watcher.api.state(watcher.name)
            assert state.status in (200, 404), state
            if state.status == 200:
                ready, in_flight, moved = Counters(**state["queue"])
                assert 0 <= ready + in_flight - state["count"] <= 10, "more than were produced meanwhile"
                assert moved == 0

    queue.produce(*[0] * 10)
    with workers(queue, 4) as (owner, one, other, watcher):
        _, *seen, _ = together(
            [lambda: remake(owner), lambda: work(one, "a"), lambda: work(other, "b"), lambda: look(watcher)]
        )
    assert sum(seen) > 0
    rest = queue.claim(1_000, node="last")["claimed"]
    assert all(job["data"] == 24 for job in rest)


def test_a_log_made_again_as_a_queue(api: Client, topic: str) -> None:
    api.append(topic, "log")
    queue = Queue(api, topic)
    assert queue.post("claim", BODIES["claim"]).status == 409
    api.drop(topic)
    queue.configure()
    queue.produce("job")
    assert data_of(queue.claim(5)) == ["job"]


def test_a_type_can_not_be_changed(queue: Queue) -> None:
    queue.produce(1)
    queue.take()
    answer = queue.api.put(queue.name, type="log")
    assert answer.refusal == (409, "topic_exists_incompatible")
    queue.assert_counters(0, 1)
    assert queue.api.put(queue.name)["config"]["type"] == "queue"
    assert queue.ack([1])["acked"] == 1


def test_leased_jobs_are_there_still(queue: Queue) -> None:
    queue.produce(1)
    queue.take()
    assert queue.api.drop(queue.name, if_empty=True).refusal == (409, "topic_not_empty")
    queue.ack([1])
    assert queue.api.drop(queue.name, if_empty=True).status == 200


def test_a_queue_deleted_while_a_claim_waits(api: Client) -> None:
    queue = make_queue(api, claim_jitter_ms=1_000)
    queue.produce(1, 2)
    with workers(queue, 1) as (waiting,):

        def drop() -> int:
            eventually(lambda: queue.state()["count"] == 2)
            return api.drop(queue.name).status

        answer, dropped = together([lambda: waiting.post("claim", BODIES["claim"]), drop])
    assert dropped == 200
    if answer.status == 200:  # its window ended first, or it found nothing
        check(answer, "claim", queue.name)
    else:
        assert answer.refusal == (404, "topic_not_found")


def test_a_client_that_is_gone_leaves_its_job_leased(api1: Client, connect: Callable[..., Wire]) -> None:
    """A poll has no connection to tie its leases to: they end by time."""
    queue = make_queue(api1)
    queue.produce(1)
    wire = connect()
    wire.send(request("POST", f"/v0/topics/{queue.name}/claim", b'{"node":"gone","lease_ms":100}'))
    eventually(lambda: queue.counters() == (0, 1, 0) or queue.counters() == (1, 0, 0))
    wire.reset()
    (job,) = queue.wait_claim(node="other")
    assert job["deliveries"] in (1, 2)


# --- other producers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_router_into_a_queue_is_a_producer(api: Client, queue: Queue, topic: str, guarantee: str) -> None:
    route(api, topic, queue.name, guarantee=guarantee)
    api.append_records(topic, [{"data": n, "tag": f"t{n}", "node": "n", "meta": {"n": n}} for n in range(5)])
    eventually(lambda: queue.counters().ready == 5)
    jobs = queue.take(5)
    assert [(job["data"], job["$tag"], job["$node"], job["meta"]["n"]) for job in jobs] == [
        (n, f"t{n}", "n", n) for n in range(5)
    ]
    assert queue.ack(seqs_of(jobs))["acked"] == 5
    queue.assert_counters(0, 0)
    assert api.state(topic)["count"] == 5, "an ack deletes the job, not what it was copied from"
    api.append(topic, "more")
    assert data_of(queue.wait_claim()) == ["more"]


def test_a_router_out_of_a_queue_copies_jobs_and_no_acks(queue: Queue, topic: str) -> None:
    route(queue.api, queue.name, topic)
    queue.produce("a", "b")
    wait_data(queue.api, topic, ["a", "b"])
    queue.ack(seqs_of(queue.take(2)))
    queue.produce("c")
    wait_data(queue.api, topic, ["a", "b", "c"])
    queue.assert_counters(1, 0)


def test_from_queue_to_queue(api: Client, queue: Queue) -> None:
    other = make_queue(api)
    route(api, queue.name, other.name)
    queue.produce("a", "b")
    eventually(lambda: other.counters().ready == 2)
    queue.ack(seqs_of(queue.take(2)))
    jobs = other.take(2, node="x")
    assert (data_of(jobs), [job["deliveries"] for job in jobs]) == (["a", "b"], [1, 1])
    queue.assert_counters(0, 0)
    other.assert_counters(0, 2)


def test_a_redelivery_is_not_copied_again(queue: Queue, topic: str) -> None:
    route(queue.api, queue.name, topic)
    queue.produce("a")
    queue.wear([1], 5)
    queue.produce("b")
    wait_data(queue.api, topic, ["a", "b"])
    assert len(wait_records(queue.api, topic, 2)) == 2


def test_a_job_produced_twice_with_one_key_is_one(queue: Queue) -> None:
    assert queue.produce("a", idempotency_key="k") == [1]
    assert queue.produce("a", idempotency_key="k") == [1]
    queue.assert_counters(1, 0)
    assert seqs_of(queue.claim(5)) == [1]
    assert queue.produce("a", idempotency_key="k") == [1]
    queue.assert_counters(0, 1)
    queue.ack([1])
    assert queue.produce("a", idempotency_key="k") == [1], "also when it is done"
    queue.assert_counters(0, 0)
    assert queue.claim(5)["count"] == 0


def test_what_a_socket_publishes_is_a_job(server: Server, api1: Client) -> None:
    queue = make_queue(api1)
    with Socket(server.port) as socket:
        socket.publish(queue.name, "a", "b")
    assert data_of(queue.take(2)) == ["a", "b"]


def test_the_node_of_a_producer_is_no_holder(queue: Queue) -> None:
    queue.produce_records([{"data": 1, "node": "w"}])
    assert queue.ack([1], node="w")["skipped"] == [1]
    assert seqs_of(queue.claim(node="w")) == [1], "a worker may get what it produced"
    assert [record["$node"] for record in read(queue.api, queue.name)] == ["w"]
