"""Jobs that nobody finishes, in both lanes: when they are moved, what the copy says, where it goes, and what happens
when it can not go there.

A move follows the claim that found the job worn, so what came of it is waited for.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import livefiles
import pytest

from .client import Client, unique
from .queues import CLASSES, SHORTEST_MS, Queue, data_of, make_queue, now_ms, seqs_of, together, workers
from .routing import name_on, read, route, wait_records
from .server import Server, eventually
from .sse import Watching

pytestmark = pytest.mark.e2e

MIB = 1 << 20


@pytest.fixture
def dlq() -> str:
    return unique("dlq")


@pytest.fixture
def queue(api: Client, dlq: str) -> Queue:
    """Two deliveries, then the dead letters."""
    return make_queue(api, max_deliveries=2, dead_letter=dlq)


def _stamp(queue: Queue, seq: int, deliveries: int) -> dict[str, Any]:
    return {
        "$dead_letter_from": queue.name,
        "$dead_letter_deliveries": str(deliveries),
        "$dead_letter_src_seq": str(seq),
    }


def _dead(api: Client, dlq: str, count: int = 1) -> list[dict[str, Any]]:
    """What has been moved, once it is so many."""
    eventually(lambda: api.state(dlq).status == 200, what=f"{dlq} is made")
    records = wait_records(api, dlq, count)
    assert len(records) == count
    return records


def _sources(records: list[dict[str, Any]]) -> list[int]:
    return [int(record["meta"]["$dead_letter_src_seq"]) for record in records]


# --- when --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_job_is_delivered_so_many_times_and_then_moved(api: Client, dlq: str, most: int) -> None:
    queue = make_queue(api, max_deliveries=most, dead_letter=dlq)
    queue.produce("x")
    for times in range(1, most + 1):
        assert queue.take()[0]["deliveries"] == times
        queue.assert_counters(0, 1)
        queue.nack([1])
        queue.assert_counters(1, 0)
        assert api.state(dlq).status == 404
    answer = queue.claim(5)
    assert (answer["count"], answer["ready"]) == (0, 0)
    (record,) = _dead(api, dlq)
    assert (record["data"], record["meta"]) == ("x", _stamp(queue, 1, most))
    queue.wait_counters(0, 0, 1)
    assert queue.left() == []


@pytest.mark.parametrize(
    "config",
    [{}, {"max_deliveries": 2}, {"dead_letter": "never-made"}, {"max_deliveries": 0, "dead_letter": "never-made"}],
)
def test_both_settings_are_needed(api: Client, config: dict[str, Any]) -> None:
    queue = make_queue(api, **config)
    queue.produce("x")
    queue.wear([1], 8)
    assert queue.take()[0]["deliveries"] == 9
    queue.assert_counters(0, 1, 0)
    assert api.state("never-made").status == 404


def test_expired_leases_count_as_deliveries(queue: Queue, dlq: str) -> None:
    queue.produce("x")
    for times in (1, 2):
        assert queue.wait_claim(lease_ms=SHORTEST_MS)[0]["deliveries"] == times
        queue.wait_counters(1, 0)
    assert queue.claim()["count"] == 0
    assert _sources(_dead(queue.api, dlq)) == [1]
    queue.wait_counters(0, 0, 1)


def test_only_a_claim_moves(queue: Queue, dlq: str) -> None:
    queue.produce("x")
    queue.wear([1], 1)
    queue.take(lease_ms=SHORTEST_MS)
    queue.wait_counters(1, 0)
    before = now_ms()
    while now_ms() < before + 500:
        assert queue.counters() == (1, 0, 0)
        assert queue.left() == [1]
    assert queue.api.state(dlq).status == 404


def test_the_last_delivery_may_still_be_acked_late(queue: Queue, dlq: str) -> None:
    queue.produce("x")
    queue.wear([1], 1)
    queue.take(lease_ms=SHORTEST_MS)
    queue.wait_counters(1, 0)
    assert queue.ack([1])["acked"] == 1
    assert queue.claim()["count"] == 0
    queue.assert_counters(0, 0, 0)
    assert queue.api.state(dlq).status == 404


def test_the_claim_that_moves_a_job_delivers_others(queue: Queue, dlq: str) -> None:
    queue.produce("poison", "a", "b", "c")
    queue.wear([1], 2)
    answer = queue.claim(2)
    assert data_of(answer) == ["a", "b"]
    assert answer["ready"] == 1
    assert _sources(_dead(queue.api, dlq)) == [1]
    queue.wait_counters(1, 2, 1)
    assert data_of(queue.claim(5)) == ["c"]


def test_worn_and_less_worn_jobs_together(queue: Queue, dlq: str) -> None:
    queue.produce(*range(6))
    queue.wear([1, 2], 1)
    queue.wear([1, 2, 3, 4], 1)
    answer = queue.claim(10)
    assert [(job["$seq"], job["deliveries"]) for job in answer["claimed"]] == [(3, 2), (4, 2), (5, 1), (6, 1)]
    assert sorted(_sources(_dead(queue.api, dlq, 2))) == [1, 2]
    queue.wait_counters(0, 4, 2)


def test_many_at_once(queue: Queue, dlq: str) -> None:
    seqs = queue.produce(*range(700))
    queue.wear(seqs, 2)
    assert queue.claim(1)["count"] == 0
    queue.wait_counters(0, 0, 700)
    records = _dead(queue.api, dlq, 700)
    assert sorted(_sources(records)) == seqs
    assert all(record["data"] == int(record["meta"]["$dead_letter_src_seq"]) - 1 for record in records)


def test_large_ones_at_once(queue: Queue, dlq: str) -> None:
    """More than fits into one answer, and into one message between processes."""
    for number in range(12):
        queue.produce(str(number % 10) * 1_000_000)
    for _ in range(2):
        held = seqs_of(queue.claim(12)) + seqs_of(queue.claim(12))
        assert queue.nack(held)["nacked"] == 12
    eventually(lambda: queue.claim(12)["count"] == 0 and queue.counters().dead_lettered == 12, within_s=20)
    queue.wait_counters(0, 0, 12)
    records = _dead(queue.api, dlq, 12)
    assert sorted(_sources(records)) == list(range(1, 13))
    for record in records:
        assert record["data"] == str((int(record["meta"]["$dead_letter_src_seq"]) - 1) % 10) * 1_000_000


# --- what is moved -----------------------------------------------------------------------------------


def test_the_copy_is_the_record_and_where_it_came_from(queue: Queue, dlq: str) -> None:
    record = {"data": {"a": [1, None]}, "tag": "clip:1", "node": "producer", "meta": {"trace": "z9", "n": 1}}
    queue.produce_records([record])
    queue.wear([1], 2)
    before = now_ms()
    queue.claim()
    (moved,) = _dead(queue.api, dlq)
    assert before <= moved.pop("$ts") <= now_ms()
    assert moved == {
        "$seq": 1,
        "$tag": "clip:1",
        "$node": "producer",
        "data": {"a": [1, None]},
        "meta": {"trace": "z9", "n": 1, **_stamp(queue, 1, 2)},
    }


@pytest.mark.parametrize(
    "fields", [{}, {"tag": "t"}, {"node": "n"}, {"meta": {}}, {"meta": {"a": {"b": [1]}}}], ids=str
)
def test_what_the_record_did_not_have_is_not_invented(queue: Queue, dlq: str, fields: dict[str, Any]) -> None:
    queue.produce_records([{"data": 1, **fields}])
    queue.wear([1], 2)
    queue.claim()
    (moved,) = _dead(queue.api, dlq)
    assert moved["meta"] == {**fields.get("meta", {}), **_stamp(queue, 1, 2)}
    assert moved.get("$tag") == fields.get("tag")
    assert moved.get("$node") == fields.get("node")


def test_a_copy_of_an_odd_record(queue: Queue, dlq: str) -> None:
    odd = 'q"\\\n\t\u0001é\u2028😀</script>'
    meta = {odd: odd, "": None, "from": "x"}
    queue.produce_records([{"data": odd, "tag": odd, "node": odd, "meta": meta}])
    queue.wear([1], 2)
    queue.claim()
    (moved,) = _dead(queue.api, dlq)
    assert (moved["data"], moved["$tag"], moved["$node"]) == (odd, odd, odd)
    assert moved["meta"] == {**meta, **_stamp(queue, 1, 2)}


def test_data_and_meta_stay_as_they_were_sent(queue: Queue, dlq: str) -> None:
    value = rb'{"b":1.50e3,"a":-0.0,"big":12345678901234567890123,"e":"\u00e9\/","s":[1,  2]}'
    body = b'{"records":[{"data":%b,"meta":{"m":%b}}]}' % (value, value)
    assert queue.api.send("POST", f"/v0/topics/{queue.name}", content=body).status == 200
    queue.wear([1], 2)
    queue.claim()
    _dead(queue.api, dlq)
    raw = queue.api.diff(dlq).raw
    assert b'"data":%b' % value in raw
    assert b'"m":%b' % value in raw


def test_older_provenance_is_replaced(queue: Queue, dlq: str) -> None:
    meta = {"$dead_letter_from": "elsewhere", "keep": 1, "$dead_letter_src_seq": [9], "$dead_letter_deliveries": None}
    queue.produce_records([{"data": 1, "meta": meta}])
    queue.wear([1], 2)
    queue.claim()
    (moved,) = _dead(queue.api, dlq)
    assert moved["meta"] == {"keep": 1, **_stamp(queue, 1, 2)}
    raw = queue.api.diff(dlq).raw
    assert [raw.count(json.dumps(key).encode()) for key in _stamp(queue, 1, 2)] == [1, 1, 1]


def test_other_keys_that_look_like_provenance_stay(queue: Queue, dlq: str) -> None:
    meta = {
        "$dead_letter_note": "mine",
        "$dead_letter_": 1,
        "x": {"$dead_letter_from": "inside"},
        "dead_letter_from": 2,
    }
    queue.produce_records([{"data": 1, "meta": meta}])
    queue.wear([1], 2)
    queue.claim()
    (moved,) = _dead(queue.api, dlq)
    assert moved["meta"] == {**meta, **_stamp(queue, 1, 2)}


def test_an_older_key_is_replaced_however_it_is_spelled(queue: Queue, dlq: str) -> None:
    meta = rb'{ "\u0024dead_letter_from" : "x" , "a" : 1 }'
    body = b'{"records":[{"data":1,"meta":%b},{"data":2,"meta":{ } }]}' % meta
    assert queue.api.send("POST", f"/v0/topics/{queue.name}", content=body).status == 200
    queue.wear([1, 2], 2)
    queue.claim()
    records = _dead(queue.api, dlq, 2)
    assert [record["meta"] for record in records] == [{"a": 1, **_stamp(queue, 1, 2)}, _stamp(queue, 2, 2)]


@pytest.mark.parametrize(
    "record",
    [
        {"data": 1, "meta": {f"k{n}": n for n in range(64)}},
        {"data": 1, "meta": {"k": "x" * (16 * 1024 - 9)}},
        {"data": "x" * (MIB - 2)},
        {"data": 1, "tag": "t" * 256, "node": "n" * 128},
    ],
    ids=["64 keys", "16 KiB of meta", "1 MiB", "tag and node"],
)
def test_a_record_at_its_limits_can_be_moved(queue: Queue, dlq: str, record: dict[str, Any]) -> None:
    queue.produce_records([record])
    queue.wear([1], 2)
    queue.claim()
    (moved,) = _dead(queue.api, dlq)
    assert moved["data"] == record["data"]
    assert moved["meta"] == {**record.get("meta", {}), **_stamp(queue, 1, 2)}
    queue.wait_counters(0, 0, 1)


def test_jobs_go_from_segments_too_and_beyond_what_an_append_may_carry(small: Client, small_server: Server) -> None:
    before = set(livefiles.find(small_server.data_dir, "topics/*/*.data"))
    dlq = unique("dlq")
    queue = make_queue(small, max_deliveries=1, dead_letter=dlq)
    for start in range(0, 30, 5):
        queue.produce_records([{"data": "x" * 500, "meta": {"n": start + n, "m": "y" * 60}} for n in range(5)])
    eventually(
        lambda: len(set(livefiles.find(small_server.data_dir, "topics/*/*.data")) - before) >= 1, what="a segment"
    )
    seqs = list(range(1, 31))
    queue.wear(seqs, 1)
    queue.claim()
    queue.wait_counters(0, 0, 30)
    small.put(dlq)
    records = _dead(small, dlq, 30)
    assert sorted(_sources(records)) == seqs
    assert {record["data"] for record in records} == {"x" * 500}


def test_a_job_can_be_driven_again(queue: Queue, dlq: str) -> None:
    queue.produce("x")
    queue.wear([1], 2)
    queue.claim()
    (moved,) = _dead(queue.api, dlq)
    queue.produce_records([{"data": moved["data"], "meta": moved["meta"]}])
    (job,) = queue.take()
    assert (job["$seq"], job["data"], job["deliveries"]) == (2, "x", 1)
    queue.nack([2])
    queue.wear([2], 1)
    queue.claim()
    assert _sources(_dead(queue.api, dlq, 2)) == [1, 2]
    queue.wait_counters(0, 0, 2)


# --- where to ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_the_topic_is_made_in_the_class_of_the_queue(api: Client, dlq: str, durability: str) -> None:
    queue = make_queue(api, max_deliveries=1, dead_letter=dlq, durability=durability, cap_records=7, ttl_ms=3_600_000)
    queue.produce("x")
    queue.wear([1], 1)
    queue.claim()
    assert [record["data"] for record in _dead(api, dlq)] == ["x"]
    state = api.state(dlq)
    config = state["config"]
    assert (state["type"], config["durability"], config["durable"]) == ("log", durability, durability == "fsync")
    assert (config["cap_records"], config["ttl_ms"], config["dead_letter"]) == (0, 0, None)
    queue.wait_counters(0, 0, 1)


@pytest.mark.parametrize("durability", CLASSES)
def test_a_topic_that_is_there_stays_as_it_is(api: Client, dlq: str, durability: str) -> None:
    made = api.put(dlq, durability=durability, cap_records=1)
    queue = make_queue(api, max_deliveries=1, dead_letter=dlq)
    queue.produce("x", "y")
    queue.wear([1, 2], 1)
    queue.claim()
    queue.wait_counters(0, 0, 2)
    state = api.state(dlq)
    assert state["config"] == made["config"]
    assert (state["count"], state["head_seq"]) == (1, 2), "it evicts as it was told"


@pytest.mark.parametrize(("from_shard", "to_shard"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_on_any_shard(api: Client, from_shard: int, to_shard: int) -> None:
    dlq = name_on(to_shard, "buried")
    queue = make_queue(api, name_on(from_shard, "burying"), max_deliveries=1, dead_letter=dlq)
    queue.produce("x")
    queue.wear([1], 1)
    queue.claim()
    assert _sources(_dead(api, dlq)) == [1]
    queue.wait_counters(0, 0, 1)


def test_several_queues_share_one(api: Client, dlq: str) -> None:
    queues = [make_queue(api, max_deliveries=1, dead_letter=dlq) for _ in range(3)]
    for queue in queues:
        queue.produce("x")
        queue.wear([1], 1)
        queue.claim()
    records = _dead(api, dlq, 3)
    assert sorted(record["meta"]["$dead_letter_from"] for record in records) == sorted(queue.name for queue in queues)
    for queue in queues:
        queue.wait_counters(0, 0, 1)


def test_the_dead_letters_may_be_a_queue(api: Client, queue: Queue, dlq: str) -> None:
    graves = make_queue(api, dlq)
    queue.produce_records([{"data": "x", "tag": "t", "node": "n"}])
    queue.wear([1], 2)
    queue.claim()
    (job,) = graves.wait_claim()
    assert (job["data"], job["deliveries"], job["$tag"], job["$node"]) == ("x", 1, "t", "n")
    assert job["meta"] == _stamp(queue, 1, 2)
    graves.assert_counters(0, 1, 0)
    queue.wait_counters(0, 0, 1)
    assert graves.ack([job["$seq"]])["acked"] == 1


def test_from_queue_to_queue_to_log(api: Client, dlq: str) -> None:
    last = f"{dlq}.last"
    middle = make_queue(api, dlq, max_deliveries=3, dead_letter=last)
    first = make_queue(api, max_deliveries=1, dead_letter=dlq)
    middle.produce("before")
    middle.ack(seqs_of(middle.take()))
    first.produce_records([{"data": "x", "meta": {"a": 1}}])
    first.wear([1], 1)
    first.claim()
    eventually(lambda: middle.counters().ready == 1)
    middle.wear([2], 3)
    middle.claim()
    (record,) = _dead(api, last)
    assert record["meta"] == {"a": 1, **_stamp(middle, 2, 3)}
    first.wait_counters(0, 0, 1)
    middle.wait_counters(0, 0, 1)


def test_two_queues_that_bury_each_others_jobs(api: Client, dlq: str) -> None:
    other = make_queue(api, dlq)
    queue = make_queue(api, max_deliveries=1, dead_letter=dlq)
    other.configure(max_deliveries=1, dead_letter=queue.name)
    queue.produce("x")
    for turn in range(3):
        here, there = (queue, other) if turn % 2 == 0 else (other, queue)
        (job,) = here.wait_claim()
        assert (job["data"], job["deliveries"]) == ("x", 1)
        here.nack([job["$seq"]])
        assert here.claim()["count"] == 0
        eventually(lambda there=there: there.counters().ready == 1)
    queue.wait_counters(0, 0, 2)
    other.wait_counters(1, 0, 1)


def test_a_deleted_topic_is_made_again(queue: Queue, dlq: str) -> None:
    queue.produce("x", "y")
    queue.wear([1], 2)
    assert seqs_of(queue.claim()) == [2]
    _dead(queue.api, dlq)
    queue.api.drop(dlq)
    queue.nack([2])
    queue.wear([2], 1)
    queue.claim()
    assert _sources(_dead(queue.api, dlq)) == [2]
    queue.wait_counters(0, 0, 2)


def test_a_watcher_of_the_dead_letters_sees_the_job(
    server: Server, api: Client, lane: Any, queue: Queue, dlq: str
) -> None:
    api.put(dlq)
    with Watching(server, lane) as watching:
        stream = watching.follow(dlq)
        queue.produce("x")
        queue.wear([1], 2)
        queue.claim()
        assert stream.wait_records(dlq, 1) == ["x"]
        assert stream.records(dlq)[0]["meta"] == _stamp(queue, 1, 2)


def test_a_router_takes_dead_letters_further(api: Client, queue: Queue, dlq: str) -> None:
    route(api, dlq, f"{dlq}.copy")
    queue.produce("x")
    queue.wear([1], 2)
    queue.claim()
    assert wait_records(api, f"{dlq}.copy", 1)[0]["meta"] == _stamp(queue, 1, 2)


# --- where it can not go -----------------------------------------------------------------------------


@pytest.fixture
def full(api: Client, dlq: str) -> Iterator[str]:
    """Dead letters that take no more."""
    api.put(dlq, cap_records=1, discard="reject")
    api.append(dlq, "in the way")
    yield dlq
    api.drop(dlq)


def test_a_full_topic_is_tried_again_until_there_is_room(queue: Queue, full: str) -> None:
    queue.produce("poison", "a", "b")
    queue.wear([1], 2)
    assert data_of(queue.claim(1)) == ["a"]
    queue.wait_counters(1, 1, 0, hidden=1)
    assert queue.left() == [1, 2, 3]
    before = now_ms()
    while now_ms() < before + 1_200:  # more than one of its attempts
        assert queue.counters() == (1, 1, 0)
    assert data_of(queue.claim(5)) == ["b"], "the job that waits is not delivered"
    assert queue.api.diff(full).data == ["in the way"]
    queue.api.delete(full, before_seq=2)
    eventually(lambda: queue.api.diff(full).data == ["poison"])
    queue.wait_counters(0, 2, 1)
    assert queue.left() == [2, 3]
    assert read(queue.api, full)[0]["meta"] == _stamp(queue, 1, 2)


def test_room_for_some_of_them(api: Client, dlq: str) -> None:
    api.put(dlq, cap_records=3, discard="reject")
    queue = make_queue(api, max_deliveries=1, dead_letter=dlq)
    queue.produce(*range(8))
    queue.wear(list(range(1, 9)), 1)
    found: set[int] = set()

    def take() -> bool:
        queue.claim(10)
        page = api.diff(dlq)
        for record in page["records"]:
            found.add(int(record["meta"]["$dead_letter_src_seq"]))
        if page.seqs:
            api.delete(dlq, before_seq=page.seqs[-1] + 1)
        return len(found) == 8

    eventually(take, within_s=60, every_s=0.05, what="all eight")
    queue.wait_counters(0, 0, 8)
    assert api.state(dlq)["head_seq"] == 8, "each was moved once"


def test_a_job_that_waits_is_nobodys(queue: Queue, full: str) -> None:
    queue.produce("poison")
    queue.wear([1], 1)
    (job,) = queue.take(node="slow", lease_ms=SHORTEST_MS)
    queue.wait_counters(1, 0)
    assert queue.claim(node="quick")["count"] == 0
    queue.wait_counters(0, 0, 0, hidden=1)
    named: list[dict[str, Any]] = [{}, {"lease_ids": [job["lease_id"]]}]
    for fields in named:
        assert queue.ack([1], node="slow", **fields)["skipped"] == [1]
        assert queue.nack([1], node="slow", **fields)["skipped"] == [1]
        assert queue.extend([1], node="slow", **fields)["skipped"] == [1]
    assert queue.left() == [1]
    queue.api.delete(full, before_seq=2)
    eventually(lambda: queue.api.diff(full).data == ["poison"])


def test_a_job_that_never_fits_waits(api: Client, dlq: str) -> None:
    api.put(dlq, cap_bytes=100, discard="reject")
    queue = make_queue(api, max_deliveries=1, dead_letter=dlq)
    queue.produce("x" * 1_000, "y")
    queue.wear([1], 1)
    assert data_of(queue.claim()) == ["y"]
    queue.wait_counters(0, 1, 0, hidden=1)
    api.put(dlq)
    eventually(lambda: api.diff(dlq).data == ["x" * 1_000])
    queue.wait_counters(0, 1, 1)


def test_a_queue_that_may_not_make_topics_waits_for_one(api: Client, dlq: str) -> None:
    queue = make_queue(api, max_deliveries=1, dead_letter=dlq, auto_create=False)
    queue.produce("x")
    queue.wear([1], 1)
    assert queue.claim()["count"] == 0
    queue.wait_counters(0, 0, 0, hidden=1)
    before = now_ms()
    while now_ms() < before + 1_200:
        assert api.state(dlq).status == 404
        assert queue.counters() == (0, 0, 0)
    api.put(dlq)
    eventually(lambda: api.diff(dlq).data == ["x"])
    queue.wait_counters(0, 0, 1)


def test_a_full_topic_holds_up_no_other_queue(api: Client, queue: Queue, full: str) -> None:
    queue.produce("poison")
    queue.wear([1], 2)
    queue.claim()
    other = make_queue(api, max_deliveries=1, dead_letter=f"{full}.other")
    other.produce("x")
    other.wear([1], 1)
    started = time.monotonic()
    other.claim()
    assert _sources(_dead(api, f"{full}.other")) == [1]
    assert time.monotonic() - started < 5


# --- settings that change ----------------------------------------------------------------------------


def test_fewer_deliveries_count_from_the_next_claim(api: Client, dlq: str) -> None:
    queue = make_queue(api)
    queue.produce("x", "y")
    queue.wear([1], 3)
    queue.configure(max_deliveries=2, dead_letter=dlq)
    assert data_of(queue.claim()) == ["y"]
    assert _dead(api, dlq)[0]["meta"] == _stamp(queue, 1, 3)
    queue.wait_counters(0, 1, 1)


@pytest.mark.parametrize(
    "config", [{"max_deliveries": 3, "dead_letter": "{dlq}"}, {"dead_letter": "{dlq}"}, {"max_deliveries": 2}, {}]
)
def test_more_deliveries_count_from_the_next_claim(queue: Queue, dlq: str, config: dict[str, Any]) -> None:
    queue.produce("x")
    queue.wear([1], 2)
    if "dead_letter" in config:
        config = config | {"dead_letter": dlq}
    queue.configure(**config)
    assert queue.take()[0]["deliveries"] == 3
    assert queue.api.state(dlq).status == 404


def test_another_topic_counts_from_the_next_claim(queue: Queue, dlq: str) -> None:
    queue.produce("x")
    queue.wear([1], 2)
    queue.configure(max_deliveries=2, dead_letter=f"{dlq}.other")
    queue.claim()
    assert _sources(_dead(queue.api, f"{dlq}.other")) == [1]
    assert queue.api.state(dlq).status == 404


def test_a_job_that_waits_follows_the_settings(queue: Queue, full: str) -> None:
    queue.produce("x")
    queue.wear([1], 2)
    queue.claim()
    queue.wait_counters(0, 0, 0, hidden=1)
    queue.configure(max_deliveries=2)
    (job,) = queue.wait_claim()
    assert (job["$seq"], job["deliveries"]) == (1, 3)
    assert queue.ack([1])["acked"] == 1
    queue.assert_counters(0, 0, 0)


def test_the_length_of_leases_counts_from_the_next_claim(api: Client) -> None:
    queue = make_queue(api, lease_ms=50_000)
    queue.produce(1, 2)
    (first,) = queue.take()
    queue.configure(lease_ms=60_000)
    before = now_ms()
    (second,) = queue.take()
    assert before <= second["deadline"] - 60_000 <= now_ms()
    queue.configure(lease_ms=SHORTEST_MS)
    queue.assert_counters(0, 2)  # leases that are given stay as they are
    assert first["deadline"] < second["deadline"]


# --- counting and instances --------------------------------------------------------------------------


def test_the_count_goes_on(queue: Queue, dlq: str) -> None:
    for number in range(1, 4):
        (seq,) = queue.produce(number)
        queue.wear([seq], 2)
        queue.claim()
        queue.wait_counters(0, 0, number)
    queue.configure(max_deliveries=9)
    queue.assert_counters(0, 0, 3)
    assert queue.row()["queue"]["dead_lettered"] == 3


def test_a_queue_made_again_counts_anew_and_loses_nothing(queue: Queue, dlq: str) -> None:
    """The same name, the same seqs, the same dead letters: the second job is not taken for the first."""
    for turn in range(3):
        if turn:
            queue.api.drop(queue.name)
            queue.configure(max_deliveries=2, dead_letter=dlq)
            queue.assert_counters(0, 0, 0)
        assert queue.produce(turn) == [1]
        queue.wear([1], 2)
        queue.claim()
        queue.wait_counters(0, 0, 1)
    records = _dead(queue.api, dlq, 3)
    assert [record["data"] for record in records] == [0, 1, 2]


# --- all together ------------------------------------------------------------------------------------


def test_every_job_ends_once(api: Client, dlq: str) -> None:
    """Workers that finish, give back, delay, and forget; each job is acked once or moved once."""
    queue = make_queue(api, max_deliveries=4, dead_letter=dlq)
    jobs = 200
    queue.produce(*range(jobs))
    deadline = time.monotonic() + 60

    def work(worker: Queue, node: str) -> list[tuple[int, int]]:
        dice = random.Random(node)
        acked: list[tuple[int, int]] = []
        while worker.state()["count"]:
            assert time.monotonic() < deadline, worker.counters()
            claimed = worker.claim(dice.randint(1, 8), node=node, lease_ms=dice.choice([SHORTEST_MS, 30_000]))[
                "claimed"
            ]
            for job in claimed:
                how: dict[str, Any] = {"node": node, "lease_ids": [job["lease_id"]]}
                fate = dice.choice(["ack", "nack", "delay", "forget", "late"])
                if fate in ("ack", "late"):
                    if fate == "late" and job["deadline"] < now_ms() + 1_000:
                        eventually(lambda job=job: now_ms() > job["deadline"])
                    if worker.ack([job["$seq"]], **how)["acked"]:
                        acked.append((job["$seq"], job["deliveries"]))
                elif fate == "forget":
                    worker.extend([job["$seq"]], lease_ms=SHORTEST_MS, **how)
                else:
                    worker.nack([job["$seq"]], delay_ms=50 if fate == "delay" else 0, **how)
        return acked

    with workers(queue, 4) as many:
        done = together([lambda w=w, n=n: work(w, f"w{n}") for n, w in enumerate(many)])
    acked = [seq for share in done for seq, _ in share]
    assert len(acked) == len(set(acked)), "acked twice"
    assert all(deliveries <= 4 for share in done for _, deliveries in share)
    moved = [int(record["meta"]["$dead_letter_src_seq"]) for record in read(api, dlq)] if len(acked) < jobs else []
    assert sorted(acked + moved) == list(range(1, jobs + 1))
    queue.assert_counters(0, 0, len(moved))
