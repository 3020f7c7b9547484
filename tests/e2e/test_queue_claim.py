"""Claiming over HTTP in both lanes: every field, default and clamp, which jobs go out and in which order, expiry, the
bound on one answer, and how cohorts divide."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from typing import Any

import livefiles
import pytest

from .client import Answer, Client, unique
from .h2wire import H2Wire
from .queues import (
    CLASSES,
    DEFAULT_LEASE_MS,
    LONGEST_MS,
    SHORTEST_MS,
    Queue,
    check,
    data_of,
    leases_of,
    make_queue,
    now_ms,
    seqs_of,
    together,
    workers,
)
from .server import Server, eventually, gone
from .wire import Wire, request

pytestmark = pytest.mark.e2e

U64_MAX = 2**64 - 1
MIB = 1 << 20
WINDOW_MS = 700  # long enough that all of a cohort arrive in it, on a busy machine too


@pytest.fixture
def queue(api: Client) -> Queue:
    return make_queue(api)


# --- the answer --------------------------------------------------------------------------------------


def test_a_job_has_everything_its_record_has(queue: Queue) -> None:
    record = {"data": {"a": [1, None]}, "tag": "clip:1", "node": "producer", "meta": {"trace": "z9", "n": 1}}
    (seq,) = queue.produce_records([record])
    before = now_ms()
    answer = queue.claim(node="worker-1")
    after = now_ms()
    (job,) = answer["claimed"]
    stored = queue.records()[0]
    lease_id, deadline = job.pop("lease_id"), job.pop("deadline")
    assert job == {
        "$seq": seq,
        "$ts": stored["$ts"],
        "$tag": "clip:1",
        "$node": "producer",
        "deliveries": 1,
        "data": {"a": [1, None]},
        "meta": {"trace": "z9", "n": 1},
    }
    assert lease_id.startswith("lease_")
    assert before <= deadline - DEFAULT_LEASE_MS <= after
    assert (answer["topic"], answer["count"], answer["ready"]) == (queue.name, 1, 0)


def test_what_a_record_does_not_have_is_left_out(queue: Queue) -> None:
    queue.produce_records(
        [{"data": None}, {"data": 0, "tag": "t"}, {"data": "", "node": "n"}, {"data": [], "meta": {}}]
    )
    plain, tagged, noded, described = queue.take(4)
    assert not {"$tag", "$node", "meta"} & set(plain)
    assert plain["data"] is None
    assert (tagged["$tag"], "$node" in tagged, "meta" in tagged) == ("t", False, False)
    assert (noded["$node"], "$tag" in noded, "meta" in noded) == ("n", False, False)
    assert (described["meta"], "$tag" in described, "$node" in described) == ({}, False, False)


@pytest.mark.parametrize(
    "value",
    [
        b'{"b":1.50e3,"a":-0.0,"b2":12345678901234567890123}',
        rb'"\u00e9\/\n"',
        '"é\u2028😀"'.encode(),
        b"[1,  2]",
        b'{"claimed":[],"$seq":9}',
    ],
    ids=["numbers", "escapes", "unicode", "spaces", "our own words"],
)
def test_data_and_meta_come_as_they_were_sent(queue: Queue, value: bytes) -> None:
    body = b'{"records":[{"data":%b,"meta":{"m":%b}}]}' % (value, value)
    assert queue.api.send("POST", f"/v0/topics/{queue.name}", content=body).status == 200
    raw = queue.claim().raw
    assert b'"data":%b' % value in raw
    assert b'"m":%b' % value in raw


def test_tags_and_nodes_with_every_kind_of_character(queue: Queue) -> None:
    odd = 'q"\\\n\t\u0001é\u2028😀</script>'
    queue.produce_records([{"data": 1, "tag": odd, "node": odd}])
    (job,) = queue.take(node=odd)
    assert (job["$tag"], job["$node"]) == (odd, odd)
    assert queue.ack([job["$seq"]], node=odd)["acked"] == 1


def test_an_empty_queue_is_no_error(queue: Queue) -> None:
    answer = queue.claim(10)
    assert (answer["claimed"], answer["count"], answer["ready"]) == ([], 0, 0)
    queue.produce(1)
    queue.take()
    answer = queue.claim(10)  # all are leased
    assert (answer["claimed"], answer["count"], answer["ready"]) == ([], 0, 0)


def test_ready_is_what_is_still_claimable(queue: Queue) -> None:
    queue.produce(*range(10))
    assert [queue.claim(3)["ready"] for _ in range(4)] == [7, 4, 1, 0]


def test_every_lease_has_an_id_of_its_own(queue: Queue) -> None:
    queue.produce(*range(50))
    seen = leases_of(queue.take(50))
    queue.nack(queue.left())
    seen += leases_of(queue.take(50))
    assert len(set(seen)) == 100


# --- fields, defaults, clamps ------------------------------------------------------------------------


def test_one_job_unless_more_are_asked_for(queue: Queue) -> None:
    queue.produce(1, 2, 3)
    assert seqs_of(queue.claim()) == [1]
    assert seqs_of(queue.claim(None)) == [2]
    assert seqs_of(check(queue.post("claim", {"node": "w", "max": None}), "claim", queue.name)) == [3]


def test_at_most_a_thousand_at_once(queue: Queue) -> None:
    queue.produce(*range(2_100))
    for most in (5_000, 2**32, U64_MAX):
        left = queue.counters().ready
        answer = queue.claim(most)
        assert (answer["count"], answer["ready"]) == (min(left, 1_000), max(left - 1_000, 0))
    assert queue.counters() == (0, 2_100, 0)


@pytest.mark.parametrize("count", [1, 999, 1_000])
def test_so_many_as_are_asked_for(queue: Queue, count: int) -> None:
    queue.produce(*range(1_001))
    assert seqs_of(queue.claim(count)) == list(range(1, count + 1))


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (0, SHORTEST_MS),
        (1, SHORTEST_MS),
        (99, SHORTEST_MS),
        (100, 100),
        (101, 101),
        (45_678, 45_678),
        (LONGEST_MS, LONGEST_MS),
        (LONGEST_MS + 1, LONGEST_MS),
        (U64_MAX, LONGEST_MS),
    ],
)
def test_the_length_of_a_lease_is_clamped(queue: Queue, asked: int, given: int) -> None:
    queue.produce(1)
    before = now_ms()
    (job,) = queue.take(lease_ms=asked)
    assert before <= job["deadline"] - given <= now_ms()


@pytest.mark.parametrize("fields", [{}, {"lease_ms": None}], ids=["absent", "null"])
def test_a_lease_is_as_long_as_the_queue_says(api: Client, fields: dict[str, Any]) -> None:
    queue = make_queue(api, lease_ms=7_777)
    queue.produce(1)
    before = now_ms()
    (job,) = queue.take(**fields)
    assert before <= job["deadline"] - 7_777 <= now_ms()


def test_jobs_of_one_claim_end_together(queue: Queue) -> None:
    queue.produce(*range(100))
    assert len({job["deadline"] for job in queue.take(100)}) == 1


@pytest.mark.parametrize("node", ["a", "x" * 128, "é" * 64, "😀" * 32, " ", "0", "a b/c?d#e", "null"])
def test_any_text_of_up_to_128_bytes_is_a_node(queue: Queue, node: str) -> None:
    queue.produce(1)
    assert queue.ack(seqs_of(queue.take(node=node)), node=node)["acked"] == 1


def test_what_is_unknown_is_ignored(queue: Queue) -> None:
    queue.produce(1, 2)
    unknown: dict[str, Any] = {"lease": "x", "wait_ms": [], "$seq": 9}
    assert seqs_of(queue.claim(1, **unknown)) == [1]


def test_of_two_fields_of_one_name_the_last_counts(queue: Queue) -> None:
    queue.produce(*range(5))
    body = b'{"node":"a","max":1,"node":"c","max":2,"max":3,"node":"b"}'
    answer = queue.api.send("POST", f"/v0/topics/{queue.name}/claim", content=body)
    assert seqs_of(check(answer, "claim", queue.name)) == [1, 2, 3]
    assert queue.ack([1, 2, 3], node="b")["acked"] == 3


def test_a_zipped_body_and_a_zipped_answer(queue: Queue) -> None:
    queue.produce("x" * 5_000)
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    body = gzip.compress(b'{"node":"w"}')
    answer = queue.api.send("POST", f"/v0/topics/{queue.name}/claim", content=body, headers=headers)
    assert answer.headers["content-encoding"] == "gzip"
    assert data_of(check(answer, "claim", queue.name)) == ["x" * 5_000]


def test_an_append_can_make_the_queue(api: Client, topic: str) -> None:
    queue = Queue(api, topic)
    assert queue.produce(1, 2, config={"type": "queue", "lease_ms": 5_000}) == [1, 2]
    before = now_ms()
    (job,) = queue.take()
    assert before <= job["deadline"] - 5_000 <= now_ms()


@pytest.mark.parametrize("leases_durable", [False, True])
@pytest.mark.parametrize("durability", CLASSES)
def test_in_every_durability_class(api: Client, durability: str, leases_durable: bool) -> None:
    queue = make_queue(api, durability=durability, leases_durable=leases_durable)
    queue.produce(*range(6))
    first = queue.take(3, node="a")
    assert queue.claim(10, node="b")["count"] == 3
    assert queue.ack([1], node="a")["acked"] == 1
    assert queue.nack([2], node="a")["nacked"] == 1
    assert queue.extend([3], node="a")["extended"] == 1
    (again,) = queue.take(node="c")
    assert (again["$seq"], again["deliveries"]) == (2, 2)
    assert again["lease_id"] not in leases_of(first)
    queue.assert_counters(0, 5)


@pytest.mark.parametrize("letter", ["x", "Z", "0:"])
def test_a_queue_may_have_the_longest_name(api: Client, letter: str) -> None:
    name = (unique("long") + letter * 255)[:255]
    queue = make_queue(api, name)
    queue.produce(1, 2)
    queue.take()
    queue.nack([1])
    assert [job["deliveries"] for job in queue.take(2)] == [2, 1]
    assert queue.ack([1, 2])["acked"] == 2
    api.drop(name)


def test_a_job_may_be_delivered_any_number_of_times(queue: Queue) -> None:
    """So often that the leases log is written down anew more than once."""
    seqs = queue.produce(*range(1_000))
    queue.wear(seqs, 45)
    assert {job["deliveries"] for job in queue.take(1_000)} == {46}
    queue.assert_counters(0, 1_000)


# --- which jobs, and in which order ------------------------------------------------------------------


def test_jobs_go_out_in_order_and_once(queue: Queue) -> None:
    queue.produce(*"abcdef")
    assert data_of(queue.claim(2, node="a")) == ["a", "b"]
    assert data_of(queue.claim(3, node="b")) == ["c", "d", "e"]
    assert data_of(queue.claim(5, node="a")) == ["f"]
    assert queue.claim(5, node="a")["count"] == 0
    assert queue.claim(5, node="c")["count"] == 0


def test_what_is_produced_later_is_claimed_at_once(queue: Queue) -> None:
    for number in range(20):
        assert queue.claim(5)["count"] == 0
        (seq,) = queue.produce(number)
        assert seqs_of(queue.claim(5)) == [seq]


def test_what_was_given_back_goes_before_what_is_fresh(queue: Queue) -> None:
    queue.produce(*range(8))
    queue.take(5)
    queue.nack([4])
    queue.nack([2])
    assert seqs_of(queue.claim(1)) == [2]  # the lowest, not the first that came back
    assert seqs_of(queue.claim(3)) == [4, 6, 7]
    queue.nack([7, 1])
    assert seqs_of(queue.claim(10)) == [1, 7, 8]


def test_what_expired_goes_before_what_is_fresh(queue: Queue) -> None:
    queue.produce(*range(6))
    queue.take(3, lease_ms=SHORTEST_MS)
    queue.wait_counters(6, 0)
    assert seqs_of(queue.claim(2)) == [1, 2]
    assert seqs_of(queue.claim(2)) == [3, 4]


def test_expired_and_given_back_are_one_list(queue: Queue) -> None:
    queue.produce(*range(9))
    queue.take(4, node="long")
    queue.take(2, node="short", lease_ms=SHORTEST_MS)
    queue.wait_counters(5, 4)
    queue.nack([4, 1], node="long")
    assert [(job["$seq"], job["deliveries"]) for job in queue.take(6)] == [
        (1, 2),
        (4, 2),
        (5, 2),
        (6, 2),
        (7, 1),
        (8, 1),
    ]


def test_a_lease_ends_after_its_deadline_and_not_before(queue: Queue) -> None:
    queue.produce("x")
    (first,) = queue.take(node="a", lease_ms=300)
    second = queue.wait_claim(node="b", lease_ms=5_000)[0]
    claimed_at = second["deadline"] - 5_000
    assert first["deadline"] < claimed_at
    assert claimed_at < first["deadline"] + 5_000, "the expiry was noticed late"
    assert second["lease_id"] != first["lease_id"]
    assert (second["$seq"], second["data"], second["deliveries"]) == (1, "x", 2)
    assert second["$ts"] == first["$ts"]


def test_deliveries_are_counted_however_a_job_came_back(queue: Queue) -> None:
    queue.produce("x", "y")
    for times in range(1, 6):
        job = queue.wait_claim(lease_ms=SHORTEST_MS if times % 2 else DEFAULT_LEASE_MS)[0]
        assert (job["$seq"], job["deliveries"]) == (1, times)
        if times % 2:
            queue.wait_counters(2, 0)
        else:
            queue.nack([1])
    assert [job["deliveries"] for job in queue.take(2)] == [6, 1]


def test_the_same_node_may_claim_its_expired_job_again(queue: Queue) -> None:
    queue.produce(1)
    (first,) = queue.take(node="a", lease_ms=SHORTEST_MS)
    queue.wait_counters(1, 0)
    (second,) = queue.take(node="a")
    assert (second["deliveries"], second["lease_id"] != first["lease_id"]) == (2, True)


def test_queues_do_not_know_each_other(api: Client) -> None:
    one, other = make_queue(api), make_queue(api)
    one.produce("a", "b")
    other.produce("c")
    assert data_of(one.take(1)) == ["a"]
    assert data_of(other.take(1)) == ["c"]
    assert one.ack([1, 2])["skipped"] == [2]
    other.assert_counters(0, 1)


def test_a_job_is_given_to_one_of_many(queue: Queue) -> None:
    queue.produce(*range(400))
    with workers(queue, 8) as many:

        def drain(worker: Queue, node: str) -> list[int]:
            found: list[int] = []
            while claimed := seqs_of(worker.claim(7, node=node)):
                found += claimed
            return found

        shares = together([lambda w=w, n=n: drain(w, f"w{n}") for n, w in enumerate(many)])
    assert sorted(seq for share in shares for seq in share) == list(range(1, 401))
    queue.assert_counters(0, 400)
    for number, share in enumerate(shares):  # and it is the one who was told so
        for at in range(0, len(share), 1_000):
            assert queue.ack(share[at : at + 1_000], node=f"w{number}")["skipped"] == []
    queue.assert_counters(0, 0)


def test_jobs_are_worked_off_while_they_are_produced(queue: Queue) -> None:
    batches, size = 30, 10

    def produce(worker: Queue) -> list[int]:
        return [seq for _ in range(batches) for seq in worker.produce(*range(size))]

    def work(worker: Queue, node: str) -> list[int]:
        done: list[int] = []
        deadline = time.monotonic() + 30
        while worker.state()["head_seq"] < batches * size or worker.counters().ready:
            assert time.monotonic() < deadline
            if claimed := seqs_of(worker.claim(25, node=node)):
                assert worker.ack(claimed, node=node)["skipped"] == []
                done += claimed
        return done

    with workers(queue, 3) as (producer, one, other):
        produced, first, second = together(
            [lambda: produce(producer), lambda: work(one, "a"), lambda: work(other, "b")]
        )
    assert sorted(first + second) == sorted(produced)
    queue.assert_counters(0, 0)


def test_claims_in_one_pipe_are_answered_in_order(api1: Client, connect: Callable[..., Wire]) -> None:
    queue = make_queue(api1)
    queue.produce(*range(10))
    queue.take(2)
    wire = connect()
    path = f"/v0/topics/{queue.name}"
    ask = request("POST", f"{path}/claim", b'{"node":"w","max":2}')
    wire.send(ask + ask + request("POST", f"{path}/ack", b'{"node":"w","seqs":[1,2,10]}') + ask)
    assert seqs_of(check(wire.answer(), "claim", queue.name)) == [3, 4]
    assert seqs_of(check(wire.answer(), "claim", queue.name)) == [5, 6]
    acked = check(wire.answer(), "ack", queue.name)
    assert (acked["acked"], acked["skipped"]) == (2, [10])
    assert seqs_of(check(wire.answer(), "claim", queue.name)) == [7, 8]


# --- jobs that are no longer in memory ---------------------------------------------------------------


def test_jobs_are_claimed_from_segments_too(small: Client, small_server: Server) -> None:
    before = set(livefiles.find(small_server.data_dir, "topics/*/*.data"))
    queue = make_queue(small)
    for start in range(0, 60, 5):
        queue.produce(*range(start, start + 5))
    eventually(
        lambda: len(set(livefiles.find(small_server.data_dir, "topics/*/*.data")) - before) >= 1, what="a segment"
    )
    assert data_of(queue.take(45)) == list(range(45))
    queue.nack([1, 3, 44])
    assert queue.ack(list(range(4, 44)))["acked"] == 40
    assert [(job["data"], job["deliveries"]) for job in queue.take(5)] == [(0, 2), (2, 2), (43, 2), (45, 1), (46, 1)]


# --- large jobs --------------------------------------------------------------------------------------


def test_an_answer_has_at_most_eight_mib_of_jobs(queue: Queue) -> None:
    size = 1_000_000
    for number in range(12):
        queue.produce(str(number % 10) * size)
    first = queue.claim(12)
    assert len(first.raw) <= 8 * MIB + 10_000
    assert seqs_of(first) == list(range(1, 9)), "as many as fit, and no more"
    assert first["ready"] == 4
    queue.assert_counters(4, 8)
    second = queue.claim(12)
    assert (seqs_of(second), second["ready"]) == ([9, 10, 11, 12], 0)
    for job in first["claimed"] + second["claimed"]:
        assert job["data"] == str((job["$seq"] - 1) % 10) * size


def test_the_bound_holds_for_jobs_that_came_back(queue: Queue) -> None:
    for _ in range(10):
        queue.produce("x" * 1_000_000)
    queue.claim(10)
    queue.claim(10)
    assert queue.nack(list(range(1, 11)))["nacked"] == 10
    queue.produce("small")
    first = queue.claim(20)
    assert len(first.raw) <= 8 * MIB + 10_000
    assert seqs_of(first) == list(range(1, 9))
    rest = queue.claim(20)
    assert [(job["$seq"], job["deliveries"]) for job in rest["claimed"]] == [(9, 2), (10, 2), (11, 1)]


def test_the_largest_job_goes_out(queue: Queue) -> None:
    data = "x" * (MIB - 2)
    queue.produce(data)
    (job,) = queue.take()
    assert job["data"] == data
    assert queue.ack([1])["acked"] == 1


def test_each_of_a_cohort_gets_large_jobs_if_there_are_enough(api: Client) -> None:
    """The bound is on an answer, not on a pass: an answer without jobs would say that the queue is empty."""
    queue = make_queue(api, claim_jitter_ms=WINDOW_MS)
    for _ in range(12):
        queue.produce("x" * 1_000_000)
    assert [answer["count"] for answer in _shares(queue, [1] * 12)] == [1] * 12


def test_a_thousand_jobs_of_a_few_kib_fit_into_one_answer(queue: Queue) -> None:
    for start in range(0, 1_000, 100):
        queue.produce(*("x" * 5_000 for _ in range(start, start + 100)))
    assert queue.claim(1_000)["count"] == 1_000


# --- cohorts -----------------------------------------------------------------------------------------


def _shares(queue: Queue, wanted: list[int]) -> list[Answer]:
    """One claim each, all within one window."""
    with workers(queue, len(wanted)) as cohort:
        return together(
            [
                lambda w=w, n=n, m=m: w.claim(m, node=f"w{n}")
                for n, (w, m) in enumerate(zip(cohort, wanted, strict=True))
            ]
        )


@pytest.mark.parametrize(
    ("jobs", "wanted", "shares"),
    [
        (50, [10] * 10, [5] * 10),
        (100, [10] * 10, [10] * 10),
        (10, [10] * 10, [1] * 10),
        (12, [5, 10, 15], [2, 4, 6]),
        (40, [1, 3, 6, 30], [1, 3, 6, 30]),
        (20, [1_000, 1_000], [10, 10]),
    ],
    ids=["half each", "enough for all", "one each", "in proportion", "exactly enough", "more than there is"],
)
def test_a_cohort_shares_evenly(api: Client, jobs: int, wanted: list[int], shares: list[int]) -> None:
    queue = make_queue(api, claim_jitter_ms=WINDOW_MS)
    queue.produce(*range(jobs))
    answers = _shares(queue, wanted)
    assert [answer["count"] for answer in answers] == shares
    claimed = [seq for answer in answers for seq in seqs_of(answer)]
    assert len(claimed) == len(set(claimed)) == sum(shares)
    queue.assert_counters(jobs - sum(shares), sum(shares))
    for number, answer in enumerate(answers):
        assert queue.ack(seqs_of(answer), node=f"w{number}")["skipped"] == []


def test_what_does_not_divide_differs_by_one(api: Client) -> None:
    queue = make_queue(api, claim_jitter_ms=WINDOW_MS)
    queue.produce(*range(11))
    assert sorted(answer["count"] for answer in _shares(queue, [10] * 4)) == [2, 3, 3, 3]


def test_fewer_jobs_than_claimers(api: Client) -> None:
    queue = make_queue(api, claim_jitter_ms=WINDOW_MS)
    queue.produce(1, 2, 3)
    assert sorted(answer["count"] for answer in _shares(queue, [5] * 6)) == [0, 0, 0, 1, 1, 1]


def test_a_cohort_gets_what_came_back_first(api: Client) -> None:
    queue = make_queue(api)
    queue.produce(*range(10))
    queue.take(4)
    queue.nack([1, 2, 3, 4])
    queue.configure(claim_jitter_ms=WINDOW_MS)
    answers = _shares(queue, [3, 3])
    assert sorted(seq for answer in answers for seq in seqs_of(answer)) == [1, 2, 3, 4, 5, 6]


def test_a_cohort_of_streams_of_one_connection(server: Server) -> None:
    with server.client("http2") as client:
        queue = make_queue(client, claim_jitter_ms=WINDOW_MS)
        queue.produce(*range(20))
    with H2Wire(server.port) as wire:
        body = b'{"node":"w","max":10}'
        numbers = [wire.ask("POST", f"/v0/topics/{queue.name}/claim", body) for _ in range(5)]
        counts = [json.loads(wire.finish(number).body)["count"] for number in numbers]
    assert counts == [4] * 5


def test_a_claim_waits_for_the_window_and_no_longer(api: Client) -> None:
    queue = make_queue(api, claim_jitter_ms=400)
    for jobs in (0, 3):
        if jobs:
            queue.produce(*range(jobs))
        started = time.monotonic()
        answer = queue.claim(10)
        spent = time.monotonic() - started
        assert answer["count"] == jobs
        assert 0.39 <= spent < 5
        assert answer["performance"]["server_total_ms"] >= 390


def test_what_is_produced_during_the_window_counts(api: Client) -> None:
    queue = make_queue(api, claim_jitter_ms=WINDOW_MS)
    with workers(queue, 2) as (producer, worker):
        produced, answer = together([lambda: producer.produce(1, 2, 3), lambda: worker.claim(10)])
    assert seqs_of(answer) == produced


def test_a_lease_begins_when_the_window_ends(api: Client) -> None:
    queue = make_queue(api, claim_jitter_ms=500)
    queue.produce(1)
    before = now_ms()
    (job,) = queue.take(lease_ms=10_000)
    assert before + 490 <= job["deadline"] - 10_000 <= now_ms()


def test_nobody_waits_without_a_window(queue: Queue) -> None:
    queue.produce(*range(20))
    fastest = min(queue.claim(1)["performance"]["server_total_ms"] for _ in range(20))
    assert fastest < 50


def test_one_queues_window_holds_up_no_other(api: Client) -> None:
    slow, fast = make_queue(api, claim_jitter_ms=3_000), make_queue(api)
    fast.produce(1)
    with workers(slow, 1) as (waiting,):

        def hurry() -> float:
            started = time.monotonic()
            fast.take(1)
            return time.monotonic() - started

        answer, spent = together([lambda: waiting.claim(1), hurry])
    assert answer["count"] == 0
    assert spent < 2.9, "it waited for the other queue's window"


def test_the_window_is_that_of_the_last_put(api: Client) -> None:
    queue = make_queue(api, claim_jitter_ms=5_000)
    queue.configure(claim_jitter_ms=0)
    queue.produce(1)
    assert queue.claim()["performance"]["server_total_ms"] < 2_500
    queue.configure(claim_jitter_ms=300)
    assert queue.claim()["performance"]["server_total_ms"] >= 290


def test_ack_nack_and_extend_do_not_wait_for_a_window(api: Client) -> None:
    queue = make_queue(api)
    queue.produce(1, 2, 3)
    queue.take(3)
    queue.configure(claim_jitter_ms=3_000)
    with workers(queue, 1) as (waiting,):

        def others() -> float:
            started = time.monotonic()
            assert queue.extend([1, 2, 3])["extended"] == 3
            assert queue.ack([1])["acked"] == 1
            assert queue.nack([2])["nacked"] == 1
            return time.monotonic() - started

        answer, spent = together([lambda: waiting.claim(5, node="late"), others])
    assert spent < 2.9, "they waited for the window"
    assert seqs_of(answer) == [2]


@pytest.mark.parametrize("leave", [Wire.close, Wire.reset, Wire.half_close])
def test_who_leaves_during_the_window_gets_nothing(
    api1: Client, connect: Callable[..., Wire], leave: Callable[[Wire], None]
) -> None:
    queue = make_queue(api1, claim_jitter_ms=1_500)
    queue.produce(1, 2, 3, 4)
    leaving = connect()
    leaving.send(request("POST", f"/v0/topics/{queue.name}/claim", b'{"node":"gone","max":10}'))
    leaving.assert_silent(0.3)
    leave(leaving)
    answer = queue.claim(10, node="here")
    assert (seqs_of(answer), [job["deliveries"] for job in answer["claimed"]]) == ([1, 2, 3, 4], [1] * 4)


def test_a_stream_cancelled_during_the_window_gets_nothing(server: Server, clients: dict[str, Client]) -> None:
    queue = make_queue(clients["http2"], claim_jitter_ms=1_500)
    queue.produce(1, 2, 3, 4)
    with H2Wire(server.port) as wire:
        leaving, staying = (
            wire.ask("POST", f"/v0/topics/{queue.name}/claim", b'{"node":"%b","max":10}' % node)
            for node in (b"gone", b"here")
        )
        wire.cancel(leaving)
        answer = json.loads(wire.finish(staying).body)
    assert answer["count"] == 4
    assert queue.ack([1, 2, 3, 4], node="here")["acked"] == 4


# --- two gateways ------------------------------------------------------------------------------------


def test_two_gateways_serve_one_queue(start_server: Callable[..., Server]) -> None:
    server = start_server(TOPICS_GATEWAYS=2)
    with server.client() as api:
        queue = make_queue(api, unique("gw"), claim_jitter_ms=WINDOW_MS)
        queue.produce(*range(60))
        answers = _shares(queue, [10] * 12)
        assert [answer["count"] for answer in answers] == [5] * 12
        for number, answer in enumerate(answers):
            with server.client() as other:
                assert queue.by(other).ack(seqs_of(answer), node=f"w{number}")["acked"] == 5
        queue.assert_counters(0, 0)


# --- claims that are sent again ----------------------------------------------------------------------


def test_a_claim_with_a_key_can_be_sent_again(api: Client) -> None:
    """In the body or as a header; the body wins."""
    queue = make_queue(api)
    queue.produce(1, 2, 3, 4, 5, 6)
    path = f"/v0/topics/{queue.name}/claim"
    first = api.send("POST", path, {"node": "w", "max": 2, "idempotency_key": "k"})
    assert seqs_of(first) == [1, 2]
    again = api.send("POST", path, {"node": "w", "max": 2}, headers={"Idempotency-Key": "k"})
    assert (again["claimed"], again["count"], again["ready"]) == (first["claimed"], 2, 4)
    both = {"node": "w", "max": 2, "idempotency_key": "other"}
    assert seqs_of(api.send("POST", path, both, headers={"Idempotency-Key": "k"})) == [3, 4]
    assert queue.ack([1], node="w")["acked"] == 1
    assert api.send("POST", path, {"node": "w", "idempotency_key": "k"})["claimed"] == first["claimed"][1:]
    queue.assert_counters(2, 3)


@pytest.mark.parametrize("key", ["", "x" * 257, 7])
def test_keys_that_are_none(api: Client, key: object) -> None:
    queue = make_queue(api)
    answer = api.send("POST", f"/v0/topics/{queue.name}/claim", {"node": "w", "idempotency_key": key})
    assert answer.refusal == (400, "invalid_request")


@pytest.mark.full
def test_a_claim_whose_answer_got_lost_is_made_up_for(start_server: Callable[..., Server]) -> None:
    """Its client leaves at once, and the queue process dies: the next one knows whose the jobs are."""
    server = start_server()
    with server.client() as api:
        queue = make_queue(api, leases_durable=True)
        queue.produce(1, 2, 3)
        queue.take(1, node="first")  # the queue is open: a claim does not wait
        body = {"node": "w", "max": 1, "idempotency_key": "k"}
        with Wire(server.port) as wire:
            wire.send(request("POST", f"/v0/topics/{queue.name}/claim", json.dumps(body).encode()))
        eventually(lambda: queue.counters().in_flight == 2, what="leases")
        killed = server.signal_child("queue")
        eventually(lambda: gone(killed))

        def claimed() -> Any:
            answer = api.send("POST", f"/v0/topics/{queue.name}/claim", body)
            assert answer.status in (200, 503), answer
            return answer if answer.status == 200 else None

        assert seqs_of(eventually(claimed, what="the queue process")) == [2]
        assert queue.ack([2], node="w")["acked"] == 1
