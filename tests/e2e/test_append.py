"""Appending: answers, creation, idempotency, nodes, verbatim data and meta; in both lanes."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from .client import Client
from .server import eventually
from .test_topics import DEFAULTS

pytestmark = pytest.mark.e2e

# --- the answer --------------------------------------------------------------------------------------


def test_the_first_write_creates(api: Client, topic: str) -> None:
    answer = api.append(topic, "a", "b", "c")
    assert answer.status == 201
    assert answer.without_performance() == {
        "topic": topic,
        "first_seq": 1,
        "last_seq": 3,
        "seqs": [1, 2, 3],
        "head_seq": 3,
        "count": 3,
        "created": True,
        "deduped": False,
    }


def test_the_next_write_continues(api: Client, topic: str) -> None:
    api.append(topic, "a", "b")
    answer = api.append(topic, "c")
    assert answer.status == 200
    assert answer.without_performance() == {
        "topic": topic,
        "first_seq": 3,
        "last_seq": 3,
        "seqs": [3],
        "head_seq": 3,
        "count": 1,
        "created": False,
        "deduped": False,
    }
    assert api.diff(topic).data == ["a", "b", "c"]


@pytest.mark.parametrize("off", ["false", "0"])
def test_seqs_can_be_left_out(api: Client, topic: str, off: str) -> None:
    body = {"records": [{"data": 1}, {"data": 2}]}
    answer = api.send("POST", f"/v0/topics/{topic}", body, return_seqs=off)
    assert "seqs" not in answer.json
    assert (answer["first_seq"], answer["last_seq"], answer["count"]) == (1, 2, 2)


def test_return_seqs_true_is_the_default_said_aloud(api: Client, topic: str) -> None:
    answer = api.send("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]}, return_seqs=True)
    assert answer["seqs"] == [1]


def test_a_bad_return_seqs_is_refused(api: Client, topic: str) -> None:
    answer = api.send("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]}, return_seqs="some")
    assert answer.refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


@pytest.mark.parametrize(("durability", "waits"), [("ephemeral", 0), ("memory", 0), ("disk", 0), ("fsync", 1)])
def test_only_the_fsync_class_waits_for_the_disk(api: Client, topic: str, durability: str, waits: int) -> None:
    api.put(topic, durability=durability)
    answers = [api.append(topic, 1) for _ in range(3)]
    assert all((answer["performance"]["fsync_ms"] > 0) == bool(waits) for answer in answers)
    assert all("wal_append_ms" in answer["performance"] for answer in answers)


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_every_class_is_readable_once_acknowledged(api: Client, topic: str, durability: str) -> None:
    api.put(topic, durability=durability)
    for number in range(1, 4):
        assert api.append(topic, number)["last_seq"] == number
        assert api.diff(topic, number - 1).data == [number]


@pytest.mark.parametrize("before", ["ephemeral", "memory", "disk", "fsync"])
@pytest.mark.parametrize("after", ["ephemeral", "memory", "disk", "fsync"])
def test_the_class_may_change_in_place(api: Client, topic: str, before: str, after: str) -> None:
    api.put(topic, durability=before)
    api.append_records(topic, [{"data": 1, "tag": "a"}, {"data": 2, "tag": "b"}])
    assert api.put(topic, durability=after)["config"]["durability"] == after
    assert api.append_records(topic, [{"data": 3, "tag": "a"}])["seqs"] == [3]
    assert (api.diff(topic).data, api.diff(topic)["tombstone"]) == ([1, 2, 3], None)
    assert api.delete(topic, match="a")["deleted"] == 2
    assert api.diff(topic).data == [2]


def test_disable_backpressure_is_accepted(api: Client, topic: str) -> None:
    assert api.append(topic, 1, disable_backpressure=True).status == 201


def test_unknown_fields_are_ignored(api: Client, topic: str) -> None:
    assert api.append_records(topic, [{"data": 1, "colour": "blue", "$seq": 9}], colour="red")["seqs"] == [1]
    assert api.diff(topic)["records"][0].keys() == {"$seq", "$ts", "data"}


def test_concurrent_writers_get_contiguous_batches_without_overlap(api: Client, topic: str) -> None:
    def write(worker: int) -> None:
        with api.twin() as own:
            for number in range(10):
                taken.append(own.append(topic, *[[worker, number, at] for at in range(3)])["seqs"])

    taken: list[list[int]] = []
    workers = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(seq for seqs in taken for seq in seqs) == list(range(1, 121))
    assert all(seqs == list(range(seqs[0], seqs[0] + 3)) for seqs in taken)
    batches = {tuple(data[:2]) for data in api.diff(topic, limit=3).data}
    assert len(batches) == 1


# --- creating ----------------------------------------------------------------------------------------


def test_create_false_refuses_an_absent_topic(api: Client, topic: str) -> None:
    answer = api.append(topic, 1, create=False)
    assert answer.refusal == (404, "topic_not_found")
    assert answer.detail == {"topic": topic}
    assert api.state(topic).status == 404


def test_create_false_writes_to_an_existing_topic(api: Client, topic: str) -> None:
    api.put(topic)
    assert api.append(topic, 1, create=False)["seqs"] == [1]


def test_create_true_overrides_auto_create_of_the_inline_config(api: Client, topic: str) -> None:
    answer = api.append(topic, 1, create=True, config={"auto_create": False})
    assert (answer.status, answer["created"]) == (201, True)


def test_inline_config_without_auto_create_does_not_create(api: Client, topic: str) -> None:
    assert api.append(topic, 1, config={"auto_create": False}).refusal == (404, "topic_not_found")


def test_create_null_is_as_if_left_out(api: Client, topic: str) -> None:
    assert api.append(topic, 1, create=None).status == 201


def test_inline_config_counts_when_the_write_creates(api: Client, topic: str) -> None:
    api.append(topic, 1, config={"ttl_ms": 60_000, "cap_records": 10, "durable": True})
    wanted = DEFAULTS | {"ttl_ms": 60_000, "cap_records": 10, "durable": True, "durability": "fsync"}
    assert api.state(topic)["config"] == wanted


def test_inline_config_is_ignored_when_the_topic_exists(api: Client, topic: str) -> None:
    api.put(topic, ttl_ms=5_000)
    api.append(topic, 1, config={"cap_records": 1, "type": "queue"})
    assert api.state(topic)["config"] == DEFAULTS | {"ttl_ms": 5_000}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("config", [{"ttl_ms": -1}, {"discard": "x"}, {"durable": 1}, 5, []])
def test_a_bad_inline_config_is_refused_and_appends_nothing(
    api: Client, topic: str, config: object, exists: bool
) -> None:
    if exists:
        api.put(topic)
    assert api.append(topic, 1, config=config).refusal == (400, "invalid_request")
    state = api.state(topic)
    assert state["head_seq"] == 0 if exists else state.status == 404


# --- idempotency -------------------------------------------------------------------------------------


def test_a_retry_gets_the_first_answer_and_appends_nothing(api: Client, topic: str) -> None:
    first = api.append(topic, "a", "b", idempotency_key="k1")
    api.append(topic, "c")
    retry = api.append(topic, "a", "b", idempotency_key="k1")
    assert (first.status, first["deduped"], retry.status, retry["deduped"]) == (201, False, 200, True)
    assert retry["created"] is False
    assert (retry["first_seq"], retry["last_seq"], retry["seqs"], retry["count"]) == (1, 2, [1, 2], 2)
    assert retry["head_seq"] == 3
    assert api.diff(topic).data == ["a", "b", "c"]


def test_the_key_may_be_a_header(api: Client, topic: str) -> None:
    body = {"records": [{"data": 1}]}
    seqs = [api.send("POST", f"/v0/topics/{topic}", body, headers={"Idempotency-Key": "h"})["seqs"] for _ in range(2)]
    assert seqs == [[1], [1]]
    assert api.append(topic, 1, idempotency_key="h")["deduped"] is True


def test_the_key_in_a_header_is_utf8(api: Client, topic: str) -> None:
    api.append(topic, 1, idempotency_key="clé-🎈")
    headers: dict[str, Any] = {"Idempotency-Key": "clé-🎈".encode(), "Content-Type": "application/json"}
    answer = api.send("POST", f"/v0/topics/{topic}", content=b'{"records":[{"data":1}]}', headers=headers)
    assert answer["deduped"] is True


def test_the_key_in_the_body_wins_over_the_header(api: Client, topic: str) -> None:
    api.append(topic, 1, idempotency_key="body")
    body = {"records": [{"data": 2}], "idempotency_key": "other"}
    assert api.send("POST", f"/v0/topics/{topic}", body, headers={"Idempotency-Key": "body"})["deduped"] is False
    assert api.append(topic, 1, idempotency_key="other")["seqs"] == [2]


def test_keys_belong_to_their_topic(api: Client, topic: str) -> None:
    api.append(f"{topic}.a", 1, idempotency_key="k")
    assert api.append(f"{topic}.b", 1, idempotency_key="k")["deduped"] is False


def test_different_keys_are_different_writes(api: Client, topic: str) -> None:
    assert api.append(topic, 1, idempotency_key="k")["seqs"] == [1]
    assert api.append(topic, 1, idempotency_key="K")["seqs"] == [2]


def test_writes_without_a_key_are_never_the_same(api: Client, topic: str) -> None:
    assert [api.append(topic, 1)["deduped"] for _ in range(2)] == [False, False]


def test_a_key_is_forgotten_after_the_window(api: Client, topic: str) -> None:
    assert api.append(topic, 1, idempotency_key="k")["deduped"] is False
    assert api.append(topic, 1, idempotency_key="k")["deduped"] is True
    api.put(topic, idempotency_window_ms=1)
    eventually(lambda: api.append(topic, 1, idempotency_key="k")["seqs"] == [2])


def test_with_a_window_of_zero_nothing_is_remembered(api: Client, topic: str) -> None:
    api.put(topic, idempotency_window_ms=0)
    api.append(topic, 1, idempotency_key="k")
    time.sleep(0.002)  # the clock of the window counts whole milliseconds
    assert api.append(topic, 1, idempotency_key="k")["deduped"] is False


def test_a_retry_of_a_refused_write_is_a_first_write(api: Client, topic: str) -> None:
    assert api.append_records(topic, [{"tag": "no data"}], idempotency_key="k").status == 400
    assert api.append(topic, 1, idempotency_key="k")["deduped"] is False


def test_a_retry_to_a_full_topic_is_still_answered(api: Client, topic: str) -> None:
    api.put(topic, cap_records=1, discard="reject")
    api.append(topic, 1, idempotency_key="k")
    assert api.append(topic, 1, idempotency_key="other").refusal == (422, "topic_full")
    assert api.append(topic, 1, idempotency_key="k")["deduped"] is True


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_simultaneous_retries_append_once(api: Client, topic: str, durability: str) -> None:
    api.put(topic, durability=durability)
    answers = []

    def write() -> None:
        with api.twin() as own:
            answers.append(own.append(topic, 1, 2, idempotency_key="k"))

    writers = [threading.Thread(target=write) for _ in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [answer["seqs"] for answer in answers] == [[1, 2]] * 6
    assert sorted(answer["deduped"] for answer in answers) == [False] + [True] * 5
    assert api.state(topic)["head_seq"] == 2


# --- nodes and tags ----------------------------------------------------------------------------------


def test_the_node_of_a_record_overrides_that_of_the_batch(api: Client, topic: str) -> None:
    api.append_records(topic, [{"data": 1}, {"data": 2, "node": "own"}, {"data": 3, "node": None}], node="batch")
    assert [record["$node"] for record in api.diff(topic)["records"]] == ["batch", "own", "batch"]


def test_without_a_node_there_is_no_node(api: Client, topic: str) -> None:
    api.append_records(topic, [{"data": 1}, {"data": 2, "node": "own"}])
    records = api.diff(topic)["records"]
    assert "$node" not in records[0]
    assert records[1]["$node"] == "own"


def test_what_is_null_is_absent(api: Client, topic: str) -> None:
    api.append_records(topic, [{"data": 1, "tag": None, "node": None, "meta": None}], node=None, idempotency_key=None)
    assert api.diff(topic, include_tags=True)["records"][0].keys() == {"$seq", "$ts", "data"}


@pytest.mark.parametrize("text", ["plain", 'quo"te', "back\\slash", "new\nline", "ünïcödé", "🎈", "\u0000", "<&>", " "])
def test_tags_and_nodes_come_back_as_they_were(api: Client, topic: str, text: str) -> None:
    api.append_records(topic, [{"data": 1, "tag": text, "node": text}, {"data": 2}])
    first, second = api.diff(topic, include_tags=True)["records"]
    assert (first["$tag"], first["$node"]) == (text, text)
    assert second.keys() == {"$seq", "$ts", "data"}


def test_timestamps_are_now_and_never_fall(api: Client, topic: str) -> None:
    before = time.time_ns() // 1_000_000
    for number in range(5):
        api.append(topic, number, number)
    after = time.time_ns() // 1_000_000
    times = [record["$ts"] for record in api.diff(topic)["records"]]
    assert times == sorted(times)
    assert before <= times[0]
    assert times[-1] <= after


# --- verbatim ----------------------------------------------------------------------------------------

VERBATIM = {
    "null": b"null",
    "true": b"true",
    "false": b"false",
    "number spelling": b"1.50",
    "exponent": b"1e3",
    "capital exponent": b"-1E+3",
    "minus zero": b"-0",
    "minus zero float": b"-0.0",
    "larger than u64": b"123456789012345678901234567890",
    "more digits than a double": b"0.1000000000000000055511151231257827",
    "smaller than a double": b"1e-999",
    "larger than a double": b"1e999",
    "empty string": b'""',
    "escapes": rb'"\u0041\/\b\f\n\r\t\"\\ \u00e9"',
    "surrogate pair": rb'"\ud83c\udf88"',
    "escaped nul": rb'"\u0000"',
    "escaped record separator": rb'"\u001e"',
    "unicode": '"é 漢字 🎈 \u2028"'.encode(),
    "delete character": b'"\x7f"',
    "empty object": b"{}",
    "empty array": b"[]",
    "key order": b'{"z":1,"a":2,"m":{"y":1,"b":2}}',
    "duplicate keys": b'{"a":1,"a":2,"a":3}',
    "dollar keys": b'{"$seq":9,"$ts":8,"data":7}',
    "white space inside": b'{ "a" :\t[ 1 ,\r\n 2 ] }',
    "nested": b'[[[[{"a":[[[]]]}]]]]',
}


@pytest.mark.parametrize("value", VERBATIM.values(), ids=VERBATIM.keys())
def test_data_is_returned_byte_by_byte(api: Client, topic: str, value: bytes) -> None:
    answer = api.send("POST", f"/v0/topics/{topic}", content=b'{"records":[{"data":%b},{"data":0}]}' % value)
    assert answer.status == 201
    raw = api.diff(topic).raw
    assert b'"data":%b' % value in raw
    assert raw.count(value) >= 1
    assert json.loads(raw)["records"][1]["data"] == 0


@pytest.mark.parametrize("value", VERBATIM.values(), ids=VERBATIM.keys())
def test_meta_is_returned_byte_by_byte(api: Client, topic: str, value: bytes) -> None:
    meta = b'{ "b" : %b ,"a":1}' % value
    answer = api.send("POST", f"/v0/topics/{topic}", content=b'{"records":[{"data":1,"meta":%b}]}' % meta)
    assert answer.status == 201
    assert b'"meta":%b' % meta in api.diff(topic).raw


def test_a_lone_surrogate_is_no_text(api: Client, topic: str) -> None:
    answer = api.send("POST", f"/v0/topics/{topic}", content=rb'{"records":[{"data":"\ud800"}]}')
    assert answer.refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


def test_white_space_around_a_value_is_no_part_of_it(api: Client, topic: str) -> None:
    api.send("POST", f"/v0/topics/{topic}", content=b'{"records":[{"data":  [1, 2]  ,"meta" :\n{"a":1} \n}]}')
    raw = api.diff(topic).raw
    assert b'"data":[1, 2]' in raw
    assert b'"meta":{"a":1}' in raw


def test_data_null_is_data(api: Client, topic: str) -> None:
    api.append(topic, None)
    assert api.diff(topic)["records"][0]["data"] is None


def test_an_empty_meta_is_kept(api: Client, topic: str) -> None:
    api.append_records(topic, [{"data": 1, "meta": {}}])
    assert api.diff(topic)["records"][0]["meta"] == {}


def test_the_last_of_duplicate_keys_in_a_record_counts(api: Client, topic: str) -> None:
    body = b'{"records":[{"data":0}],"records":[{"data":1,"data":2,"tag":"a","tag":"b"}]}'
    assert api.send("POST", f"/v0/topics/{topic}", content=body)["count"] == 1
    record = api.diff(topic, include_tags=True)["records"][0]
    assert (record["data"], record["$tag"]) == (2, "b")


# --- what is refused ---------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"data": 1}
BAD_BODIES: dict[str, object] = {
    "no records": {},
    "records null": {"records": None},
    "records empty": {"records": []},
    "records an object": {"records": {}},
    "records a string": {"records": "x"},
    "a record that is a number": {"records": [GOOD, 5]},
    "a record that is null": {"records": [GOOD, None]},
    "a record without data": {"records": [GOOD, {"tag": "x"}]},
    "tag a number": {"records": [{"data": 1, "tag": 5}]},
    "tag a list": {"records": [{"data": 1, "tag": ["x"]}]},
    "node a number": {"records": [{"data": 1, "node": 5}]},
    "meta a string": {"records": [{"data": 1, "meta": "x"}]},
    "meta a list": {"records": [{"data": 1, "meta": []}]},
    "meta a number": {"records": [{"data": 1, "meta": 0}]},
    "meta false": {"records": [{"data": 1, "meta": False}]},
    "batch node a number": {"records": [GOOD], "node": 5},
    "batch node a list": {"records": [GOOD], "node": ["a"]},
    "key a number": {"records": [GOOD], "idempotency_key": 5},
    "key empty": {"records": [GOOD], "idempotency_key": ""},
    "create a string": {"records": [GOOD], "create": "true"},
    "create a number": {"records": [GOOD], "create": 1},
    "config a string": {"records": [GOOD], "config": "x"},
    "disable_backpressure a number": {"records": [GOOD], "disable_backpressure": 1},
    "a list": [GOOD],
    "a string": "x",
    "a number": 5,
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_bad_body_is_refused_whole(api: Client, topic: str, body: object) -> None:
    assert api.send("POST", f"/v0/topics/{topic}", body).refusal == (400, "invalid_request")
    assert api.state(topic).status == 404
    api.put(topic)
    assert api.send("POST", f"/v0/topics/{topic}", body).refusal == (400, "invalid_request")
    assert api.state(topic)["head_seq"] == 0
