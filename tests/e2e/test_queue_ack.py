"""Acks in both lanes: an ack is the delete, whose ack counts, what is skipped, tokens that fence, durability."""

from __future__ import annotations

import itertools

import pytest

from .client import Client
from .queues import (
    CLASSES,
    SHORTEST_MS,
    Queue,
    leases_of,
    make_queue,
    seqs_of,
    together,
    workers,
)

pytestmark = pytest.mark.e2e

NOT_TOKENS = ["", "lease_", "lease_0", "x", "lease_zz", "LEASE_1", "lease_-1", "lease_" + "f" * 500, "lease_１", "\x00"]


@pytest.fixture
def queue(api: Client) -> Queue:
    return make_queue(api)


# --- an ack is the delete ----------------------------------------------------------------------------


def test_the_answer(queue: Queue) -> None:
    queue.produce(*range(5))
    queue.take(3)
    answer = queue.ack([1, 3])
    assert answer.without_performance() == {
        "topic": queue.name,
        "acked": 2,
        "skipped": [],
        "ready": 2,
        "in_flight": 1,
    }


def test_an_acked_job_is_gone(queue: Queue) -> None:
    queue.produce(*"abcd")
    size = queue.state()["bytes"]
    queue.take(4)
    queue.ack([1, 3])
    assert [(record["$seq"], record["data"]) for record in queue.records()] == [(2, "b"), (4, "d")]
    state = queue.state()
    assert (state["count"], state["earliest_seq"], state["head_seq"]) == (2, 2, 4)
    assert state["bytes"] == size // 2
    queue.ack([2, 4])
    state = queue.state()
    assert (state["count"], state["bytes"], state["earliest_seq"], state["next_seq"]) == (0, 0, 5, 5)
    assert queue.claim(10)["count"] == 0
    assert queue.produce("e") == [5]


def test_an_ack_leaves_no_tombstone(queue: Queue) -> None:
    queue.produce(*range(6))
    queue.take(6)
    queue.ack([1, 2, 5])
    for cursor in range(6):
        read = queue.api.diff(queue.name, cursor)
        assert read["tombstone"] is None
        assert read.seqs == [seq for seq in (3, 4, 6) if seq > cursor]


def test_an_acked_job_is_not_delivered_again_when_its_lease_would_end(queue: Queue) -> None:
    queue.produce(1, 2)
    queue.take(2, lease_ms=SHORTEST_MS)
    queue.ack([1])
    queue.wait_counters(1, 0)
    assert seqs_of(queue.claim(10)) == [2]


def test_jobs_can_be_acked_in_any_order(queue: Queue) -> None:
    queue.produce(*range(10))
    queue.take(10)
    assert queue.ack([7, 2, 10, 1])["acked"] == 4
    assert queue.left() == [3, 4, 5, 6, 8, 9]
    assert queue.ack([9, 8, 6, 5, 4, 3])["acked"] == 6
    queue.assert_counters(0, 0)


def test_jobs_of_several_claims_can_be_acked_together(queue: Queue) -> None:
    queue.produce(*range(9))
    for _ in range(3):
        queue.take(3)
    assert queue.ack(list(range(1, 10)))["acked"] == 9


def test_a_thousand_at_once(queue: Queue) -> None:
    queue.produce(*range(1_200))
    queue.take(1_000)
    answer = queue.ack(list(range(1, 1_001)))
    assert (answer["acked"], answer["skipped"], answer["ready"], answer["in_flight"]) == (1_000, [], 200, 0)


def test_acks_go_by_any_connection(clients: dict[str, Client]) -> None:
    queue = make_queue(clients["http1"])
    queue.produce(1, 2)
    queue.take(2)
    assert queue.by(clients["http2"]).ack([1])["acked"] == 1
    with clients["http1"].twin() as other:
        assert queue.by(other).ack([2])["acked"] == 1


# --- durability --------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_only_an_fsync_queue_waits_for_the_disk(api: Client, durability: str) -> None:
    queue = make_queue(api, durability=durability)
    queue.produce(*range(20))
    queue.take(20)
    times = [queue.ack([seq])["performance"]["fsync_ms"] for seq in range(1, 21)]
    if durability == "fsync":
        assert all(spent > 0 for spent in times)
    else:
        assert times == [0] * 20


def test_durable_is_fsync(api: Client) -> None:
    queue = make_queue(api, durable=True)
    queue.produce(1)
    queue.take()
    assert queue.ack([1])["performance"]["fsync_ms"] > 0


# --- what is skipped ---------------------------------------------------------------------------------


def test_what_is_not_held_is_skipped_in_the_order_of_the_request(queue: Queue) -> None:
    queue.produce(*range(6))
    queue.take(3)
    queue.ack([2])
    answer = queue.ack([6, 2, 1, 0, 99, 3, 2**64 - 1])
    assert answer["acked"] == 2
    assert answer["skipped"] == [6, 2, 0, 99, 2**64 - 1]
    assert queue.left() == [4, 5, 6]


def test_an_ack_can_be_repeated(queue: Queue) -> None:
    queue.produce(1, 2)
    queue.take(2)
    assert queue.ack([1, 2])["skipped"] == []
    for _ in range(3):
        again = queue.ack([1, 2])
        assert (again["acked"], again["skipped"]) == (0, [1, 2])


def test_the_first_of_two_equal_seqs_counts(queue: Queue) -> None:
    queue.produce(1, 2)
    queue.take(2)
    answer = queue.ack([1, 1, 2, 1])
    assert (answer["acked"], answer["skipped"]) == (2, [1, 1])


def test_nobody_acks_for_another(queue: Queue) -> None:
    queue.produce(1, 2)
    queue.take(1, node="a")
    queue.take(1, node="b")
    answer = queue.ack([1, 2], node="b")
    assert (answer["acked"], answer["skipped"]) == (1, [1])
    for stranger in ("c", "A", "a ", "a\x00", "aa"):
        assert queue.ack([1], node=stranger)["skipped"] == [1]
    assert queue.ack([1], node="a")["acked"] == 1


def test_fresh_jobs_can_not_be_acked(queue: Queue) -> None:
    queue.produce(1, 2)
    assert queue.ack([1, 2])["skipped"] == [1, 2]
    assert [job["deliveries"] for job in queue.take(2)] == [1, 1]


def test_an_ack_on_an_empty_queue(queue: Queue) -> None:
    answer = queue.ack([1])
    assert (answer["skipped"], answer["ready"], answer["in_flight"]) == ([1], 0, 0)


# --- late acks ---------------------------------------------------------------------------------------


def test_late_but_before_anybody_else_counts(queue: Queue) -> None:
    queue.produce(1, 2)
    jobs = queue.take(2, node="a", lease_ms=SHORTEST_MS)
    queue.wait_counters(2, 0)
    assert queue.ack([1], node="b")["skipped"] == [1]
    assert queue.ack([1], node="a")["acked"] == 1
    assert queue.ack([2], node="a", lease_ids=[jobs[1]["lease_id"]])["acked"] == 1
    queue.assert_counters(0, 0)
    assert queue.claim(5)["count"] == 0


def test_late_after_another_claimed_is_skipped(queue: Queue) -> None:
    queue.produce(1)
    queue.take(node="slow", lease_ms=SHORTEST_MS)
    (job,) = queue.wait_claim(node="quick")
    assert job["deliveries"] == 2
    assert queue.ack([1], node="slow")["skipped"] == [1]
    queue.assert_counters(0, 1)
    assert queue.ack([1], node="quick")["acked"] == 1


def test_late_after_the_same_node_claimed_again_counts_unless_fenced(queue: Queue) -> None:
    queue.produce(1)
    (old,) = queue.take(lease_ms=SHORTEST_MS)
    (new,) = queue.wait_claim()
    assert queue.ack([1], lease_ids=[old["lease_id"]])["skipped"] == [1]
    queue.assert_counters(0, 1)
    assert queue.ack([1], lease_ids=[new["lease_id"]])["acked"] == 1


def test_without_a_token_the_node_is_enough(queue: Queue) -> None:
    queue.produce(1)
    queue.take(lease_ms=SHORTEST_MS)
    queue.wait_claim()
    assert queue.ack([1])["acked"] == 1


def test_after_a_nack_the_job_is_nobodys(queue: Queue) -> None:
    queue.produce(1)
    (job,) = queue.take()
    queue.nack([1])
    assert queue.ack([1])["skipped"] == [1]
    assert queue.ack([1], lease_ids=[job["lease_id"]])["skipped"] == [1]
    queue.assert_counters(1, 0)


# --- tokens ------------------------------------------------------------------------------------------


def test_tokens_that_match(queue: Queue) -> None:
    queue.produce(*range(4))
    jobs = queue.take(4)
    assert queue.ack(seqs_of(jobs), lease_ids=leases_of(jobs))["acked"] == 4


def test_null_is_no_tokens(queue: Queue) -> None:
    queue.produce(1)
    queue.take()
    assert queue.ack([1], lease_ids=None)["acked"] == 1


def test_each_token_is_for_its_seq(queue: Queue) -> None:
    queue.produce(*range(3))
    jobs = queue.take(3)
    one, two, three = leases_of(jobs)
    assert queue.ack([1, 2, 3], lease_ids=[two, one, three])["skipped"] == [1, 2]
    assert queue.left() == [1, 2]
    assert queue.ack([2, 1], lease_ids=[two, one])["acked"] == 2


def test_a_token_does_not_make_a_holder(queue: Queue) -> None:
    queue.produce(1)
    (job,) = queue.take(node="a")
    assert queue.ack([1], node="b", lease_ids=[job["lease_id"]])["skipped"] == [1]
    queue.assert_counters(0, 1)


@pytest.mark.parametrize("token", NOT_TOKENS)
def test_what_is_no_token_matches_nothing(queue: Queue, token: str) -> None:
    queue.produce(1, 2)
    jobs = queue.take(2)
    assert queue.ack([1, 2], lease_ids=[token, jobs[1]["lease_id"]])["skipped"] == [1]
    assert queue.ack([1], lease_ids=[jobs[0]["lease_id"]])["acked"] == 1


def test_a_token_spelled_differently_is_another(queue: Queue) -> None:
    queue.produce(1)
    (job,) = queue.take()
    token = job["lease_id"]
    digits = token.removeprefix("lease_")
    for other in (f" {token}", f"{token} ", f"lease_0{digits}", f"lease_+{digits}", f"lease_0x{digits}", digits):
        assert queue.ack([1], lease_ids=[other])["skipped"] == [1], other
    assert queue.ack([1], lease_ids=[token])["acked"] == 1


def test_a_token_of_another_queue_matches_nothing(api: Client) -> None:
    one, other = make_queue(api), make_queue(api)
    one.produce(1)
    other.produce(1, 2)
    mine = leases_of(one.take())
    foreign = set(leases_of(other.take(2))) - set(mine)
    for token in foreign:
        assert one.ack([1], lease_ids=[token])["skipped"] == [1]
    assert one.ack([1], lease_ids=mine)["acked"] == 1


def test_duplicates_with_a_stale_and_a_good_token(queue: Queue) -> None:
    queue.produce(1)
    (old,) = queue.take()
    queue.nack([1])
    (new,) = queue.take()
    answer = queue.ack([1, 1], lease_ids=[old["lease_id"], new["lease_id"]])
    assert (answer["acked"], answer["skipped"]) == (1, [1])


# --- at the same time --------------------------------------------------------------------------------


def test_of_many_acks_of_one_job_one_counts(queue: Queue) -> None:
    for seq in range(1, 6):
        queue.produce(seq)
        queue.take()
        with workers(queue, 4) as many:
            answers = together([lambda w=w, s=seq: w.ack([s]) for w in many])
        assert sorted(answer["acked"] for answer in answers) == [0, 0, 0, 1]
    queue.assert_counters(0, 0)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_an_ack_and_a_claim_of_an_expired_job_exclude_each_other(api: Client, durability: str) -> None:
    queue = make_queue(api, durability=durability)
    outcomes = set()
    for turn in itertools.count():
        (seq,) = queue.produce(turn)
        queue.take(node="slow", lease_ms=SHORTEST_MS)
        queue.wait_counters(1, 0)
        with workers(queue, 2) as (slow, quick):
            calls = [lambda: slow.ack([seq], node="slow")["acked"], lambda: quick.claim(node="quick")["count"]]  # noqa: B023
            if turn % 2:
                claimed, acked = together(calls[::-1])
            else:
                acked, claimed = together(calls)
        assert acked + claimed == 1
        outcomes.add(acked)
        if claimed:
            assert queue.ack([seq], node="quick")["acked"] == 1
        if turn >= 11 or (turn >= 3 and len(outcomes) == 2):
            break
    queue.assert_counters(0, 0)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_an_ack_and_a_nack_of_one_job_exclude_each_other(api: Client, durability: str) -> None:
    queue = make_queue(api, durability=durability)
    with workers(queue, 3) as (one, other, third):
        for turn in range(15):
            (seq,) = queue.produce(turn)
            queue.take()
            acked, nacked, extended = together(
                [
                    lambda s=seq: one.ack([s])["acked"],
                    lambda s=seq: other.nack([s])["nacked"],
                    lambda s=seq: third.extend([s])["extended"],
                ]
            )
            assert acked + nacked == 1
            assert extended in (0, 1)
            if nacked:
                assert queue.ack(seqs_of(queue.take()))["acked"] == 1
    queue.assert_counters(0, 0)


def test_the_class_of_the_last_put_counts(api: Client) -> None:
    queue = make_queue(api, durability="fsync")
    queue.produce(1, 2, 3)
    queue.take(3)
    assert queue.ack([1])["performance"]["fsync_ms"] > 0
    if queue.configure(durability="disk")["config"]["durability"] == "disk":
        assert queue.ack([2])["performance"]["fsync_ms"] == 0
    queue.configure(durability="fsync")
    assert queue.ack([3])["performance"]["fsync_ms"] > 0
