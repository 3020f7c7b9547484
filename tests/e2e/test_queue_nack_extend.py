"""Giving jobs back and keeping them longer, in both lanes: fields, defaults, clamps, delays, deadlines, tokens."""

from __future__ import annotations

from typing import Any

import pytest

from .client import Client
from .queues import (
    DEFAULT_LEASE_MS,
    LONGEST_MS,
    SHORTEST_MS,
    Queue,
    leases_of,
    make_queue,
    now_ms,
    seqs_of,
)
from .server import eventually

pytestmark = pytest.mark.e2e

U64_MAX = 2**64 - 1


@pytest.fixture
def queue(api: Client) -> Queue:
    return make_queue(api)


# --- nack --------------------------------------------------------------------------------------------


def test_the_answer_of_a_nack(queue: Queue) -> None:
    queue.produce(*range(5))
    queue.take(3)
    answer = queue.nack([1, 3])
    assert answer.without_performance() == {
        "topic": queue.name,
        "nacked": 2,
        "skipped": [],
        "ready": 4,
        "in_flight": 1,
    }


def test_a_nacked_job_is_claimable_at_once(queue: Queue) -> None:
    queue.produce("x")
    (first,) = queue.take(node="a")
    queue.nack([1], node="a")
    assert queue.left() == [1]
    (second,) = queue.take(node="b")
    assert (second["$seq"], second["data"], second["deliveries"]) == (1, "x", 2)
    assert second["lease_id"] != first["lease_id"]
    assert second["$ts"] == first["$ts"]


def test_a_nack_does_not_deliver(queue: Queue) -> None:
    """The count goes up with the next claim, not with the nack."""
    queue.produce(1)
    for times in (1, 2, 3):
        assert queue.take()[0]["deliveries"] == times
        queue.nack([1])


@pytest.mark.parametrize("fields", [{}, {"delay_ms": 0}, {"delay_ms": None}], ids=["absent", "0", "null"])
def test_without_a_delay(queue: Queue, fields: dict[str, Any]) -> None:
    queue.produce(1)
    queue.take()
    answer = queue.nack([1], **fields)
    assert (answer["ready"], answer["in_flight"]) == (1, 0)
    assert queue.claim()["count"] == 1


@pytest.mark.parametrize("delay_ms", [60_000, LONGEST_MS, LONGEST_MS + 1, U64_MAX])
def test_a_delayed_job_is_neither_ready_nor_in_flight(queue: Queue, delay_ms: int) -> None:
    queue.produce(1, 2)
    queue.take(1)
    answer = queue.nack([1], delay_ms=delay_ms)
    assert (answer["nacked"], answer["ready"], answer["in_flight"]) == (1, 1, 0)
    queue.assert_counters(1, 0, hidden=1)
    assert queue.left() == [1, 2]
    assert seqs_of(queue.claim(10)) == [2]
    queue.assert_counters(0, 1, hidden=1)


def test_a_delay_ends_by_itself(queue: Queue) -> None:
    queue.produce(1, 2)
    queue.take()
    before = now_ms()
    queue.nack([1], delay_ms=400)
    queue.wait_counters(2, 0)  # without any claim
    assert now_ms() >= before + 400
    (job,) = queue.take(lease_ms=10_000)
    assert (job["$seq"], job["deliveries"]) == (1, 2), "it goes before the fresh one"
    assert job["deadline"] - 10_000 >= before + 400


def test_a_delayed_job_is_not_claimed_before_its_time(queue: Queue) -> None:
    queue.produce(1)
    queue.take()
    before = now_ms()
    queue.nack([1], delay_ms=300)
    after = now_ms()
    claimed_at = queue.wait_claim(lease_ms=10_000)[0]["deadline"] - 10_000
    assert before + 300 <= claimed_at
    assert claimed_at < after + 5_000


def test_delays_of_their_own(queue: Queue) -> None:
    queue.produce(*range(4))
    queue.take(4)
    queue.nack([1], delay_ms=60_000)
    queue.nack([2, 3], delay_ms=2_000)
    queue.nack([4])
    assert seqs_of(queue.claim(1)) == [4]
    queue.wait_counters(2, 1, hidden=1)
    assert seqs_of(queue.claim(10)) == [2, 3]


def test_a_delayed_job_is_nobodys(queue: Queue) -> None:
    queue.produce(1)
    (job,) = queue.take()
    queue.nack([1], delay_ms=60_000)
    named: list[dict[str, Any]] = [{}, {"lease_ids": [job["lease_id"]]}]
    for fields in named:
        assert queue.ack([1], **fields)["skipped"] == [1]
        assert queue.nack([1], **fields)["skipped"] == [1]
        assert queue.extend([1], **fields)["skipped"] == [1]
    queue.assert_counters(0, 0, hidden=1)


def test_a_nack_can_be_repeated(queue: Queue) -> None:
    queue.produce(1, 2)
    queue.take(2)
    assert queue.nack([1, 2])["nacked"] == 2
    again = queue.nack([1, 2])
    assert (again["nacked"], again["skipped"]) == (0, [1, 2])
    assert [job["deliveries"] for job in queue.take(2)] == [2, 2]


def test_a_repeated_nack_does_not_delay_what_is_free(queue: Queue) -> None:
    queue.produce(1)
    queue.take()
    queue.nack([1])
    assert queue.nack([1], delay_ms=60_000)["skipped"] == [1]
    queue.take()


def test_nacks_skip_what_is_not_held(queue: Queue) -> None:
    queue.produce(*range(5))
    queue.take(2, node="a")
    queue.take(1, node="b")
    answer = queue.nack([5, 3, 1, 99, 0, 1, 2], node="a")
    assert (answer["nacked"], answer["skipped"]) == (2, [5, 3, 99, 0, 1])
    assert queue.nack([3], node="a")["skipped"] == [3]
    assert queue.nack([3], node="b")["nacked"] == 1


def test_a_late_nack_before_anybody_else_counts(queue: Queue) -> None:
    queue.produce(1)
    queue.take(lease_ms=SHORTEST_MS)
    queue.wait_counters(1, 0)
    assert queue.nack([1], delay_ms=60_000)["nacked"] == 1
    queue.assert_counters(0, 0, hidden=1)
    assert queue.claim()["count"] == 0


def test_a_late_nack_after_another_claimed_is_skipped(queue: Queue) -> None:
    queue.produce(1)
    queue.take(node="slow", lease_ms=SHORTEST_MS)
    queue.wait_claim(node="quick")
    assert queue.nack([1], node="slow")["skipped"] == [1]
    assert queue.ack([1], node="quick")["acked"] == 1


def test_tokens_fence_nacks(queue: Queue) -> None:
    queue.produce(1, 2)
    old = leases_of(queue.take(2))
    queue.nack([1, 2], lease_ids=old)
    new = leases_of(queue.take(2))
    assert queue.nack([1, 2], lease_ids=old)["skipped"] == [1, 2]
    assert queue.nack([1, 2], lease_ids=new[::-1])["skipped"] == [1, 2]
    assert queue.nack([1, 2], lease_ids=["", "lease_x"])["skipped"] == [1, 2]
    assert queue.nack([1, 2], lease_ids=[new[0], old[1]])["skipped"] == [2]
    assert queue.nack([1, 2], lease_ids=[new[0], new[1]])["skipped"] == [1]


def test_nack_of_a_thousand(queue: Queue) -> None:
    queue.produce(*range(1_000))
    queue.take(1_000)
    answer = queue.nack(list(range(1, 1_001)))
    assert (answer["nacked"], answer["ready"]) == (1_000, 1_000)
    assert seqs_of(queue.claim(1_000)) == list(range(1, 1_001))


# --- extend ------------------------------------------------------------------------------------------


def test_the_answer_of_an_extend(queue: Queue) -> None:
    queue.produce(*range(3))
    queue.take(2)
    before = now_ms()
    answer = queue.extend([1, 2, 3], lease_ms=45_000)
    after = now_ms()
    deadlines = answer["deadlines"]
    assert answer.without_performance() == {
        "topic": queue.name,
        "extended": 2,
        "skipped": [3],
        "deadlines": deadlines,
    }
    assert deadlines.keys() == {"1", "2"}
    assert deadlines["1"] == deadlines["2"]
    assert before <= deadlines["1"] - 45_000 <= after


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (0, SHORTEST_MS),
        (1, SHORTEST_MS),
        (99, SHORTEST_MS),
        (100, 100),
        (45_678, 45_678),
        (LONGEST_MS, LONGEST_MS),
        (LONGEST_MS + 1, LONGEST_MS),
        (U64_MAX, LONGEST_MS),
    ],
)
def test_an_extension_is_clamped(queue: Queue, asked: int, given: int) -> None:
    queue.produce(1)
    queue.take()
    before = now_ms()
    deadline = queue.extend([1], lease_ms=asked)["deadlines"]["1"]
    assert before <= deadline - given <= now_ms()


def test_an_extension_is_from_now_and_may_be_shorter(queue: Queue) -> None:
    queue.produce(1)
    (job,) = queue.take(lease_ms=LONGEST_MS)
    deadline = queue.extend([1], lease_ms=200)["deadlines"]["1"]
    assert deadline < job["deadline"]
    (again,) = queue.wait_claim(node="other", lease_ms=10_000)
    assert deadline < again["deadline"] - 10_000 < deadline + 5_000


def test_nothing_but_the_deadline_changes(queue: Queue) -> None:
    queue.produce(1)
    (job,) = queue.take()
    for _ in range(3):
        assert queue.extend([1], lease_ids=[job["lease_id"]])["extended"] == 1
    queue.assert_counters(0, 1)
    queue.nack([1], lease_ids=[job["lease_id"]])
    assert queue.take()[0]["deliveries"] == 2


def test_a_worker_that_extends_keeps_its_job(queue: Queue) -> None:
    queue.produce(1)
    (job,) = queue.take(node="a", lease_ms=1_500)
    while now_ms() < job["deadline"] + 500:
        assert queue.claim(node="b")["count"] == 0
        assert queue.extend([1], node="a", lease_ms=1_500)["extended"] == 1
    (again,) = queue.wait_claim(node="b")  # and loses it when it stops
    assert again["deliveries"] == 2
    assert queue.extend([1], node="a")["skipped"] == [1]


def test_extends_skip_what_is_not_held(queue: Queue) -> None:
    queue.produce(*range(5))
    queue.take(3, node="a")
    queue.ack([2], node="a")
    queue.nack([3], node="a")
    answer = queue.extend([5, 3, 2, 1, 99, 0], node="a")
    assert (answer["extended"], answer["skipped"]) == (1, [5, 3, 2, 99, 0])
    assert queue.extend([1], node="b")["skipped"] == [1]


def test_the_first_of_two_equal_seqs_is_extended(queue: Queue) -> None:
    queue.produce(1)
    queue.take()
    answer = queue.post("extend", {"node": "w", "seqs": [1, 1], "lease_ms": 1_000})
    assert (answer.status, answer["extended"], answer["skipped"]) == (200, 1, [1])
    assert answer["deadlines"].keys() == {"1"}


def test_a_late_extend_before_anybody_else_brings_the_lease_back(queue: Queue) -> None:
    queue.produce(1)
    (job,) = queue.take(node="a", lease_ms=SHORTEST_MS)
    queue.wait_counters(1, 0)
    assert queue.extend([1], node="b")["skipped"] == [1]
    assert queue.extend([1], node="a")["extended"] == 1
    queue.assert_counters(0, 1)
    assert queue.claim(node="b")["count"] == 0
    assert queue.ack([1], node="a", lease_ids=[job["lease_id"]])["acked"] == 1


def test_a_late_extend_after_another_claimed_is_skipped(queue: Queue) -> None:
    queue.produce(1)
    queue.take(node="slow", lease_ms=SHORTEST_MS)
    (job,) = queue.wait_claim(node="quick")
    answer = queue.extend([1], node="slow", lease_ms=SHORTEST_MS)
    assert (answer["extended"], answer["skipped"], answer["deadlines"]) == (0, [1], {})
    assert queue.ack([1], node="quick", lease_ids=[job["lease_id"]])["acked"] == 1


def test_tokens_fence_extends(queue: Queue) -> None:
    queue.produce(1, 2)
    old = leases_of(queue.take(2))
    queue.nack([1, 2])
    new = leases_of(queue.take(2))
    assert queue.extend([1, 2], lease_ids=old)["skipped"] == [1, 2]
    assert queue.extend([1, 2], lease_ids=new[::-1])["skipped"] == [1, 2]
    assert queue.extend([1, 2], lease_ids=["", "lease_x"])["skipped"] == [1, 2]
    assert queue.extend([1, 2], lease_ids=[new[0], old[1]])["deadlines"].keys() == {"1"}
    assert queue.extend([1, 2], lease_ids=None)["extended"] == 2


def test_extend_of_a_thousand(queue: Queue) -> None:
    queue.produce(*range(1_000))
    queue.take(1_000, lease_ms=5_000)
    answer = queue.extend(list(range(1, 1_001)), lease_ms=LONGEST_MS)
    assert (answer["extended"], len(answer["deadlines"])) == (1_000, 1_000)


def test_extended_jobs_end_at_their_new_deadline_only(queue: Queue) -> None:
    queue.produce(1, 2)
    queue.take(2, node="a", lease_ms=1_000)
    queue.extend([1], node="a", lease_ms=DEFAULT_LEASE_MS)
    assert seqs_of(eventually(lambda: queue.claim(10, node="b")["claimed"])) == [2]
    assert queue.claim(10, node="b")["count"] == 0
    queue.assert_counters(0, 2)
