"""What a stream delivers: every frame with its fields, in order, whatever the records contain; in both lanes.

That something is silent is shown by what comes next: the frame after it is the one that follows it in the topic.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from topics.storage.config import owner_of_name

from .client import Client, unique
from .h2wire import H2Wire
from .server import Server, eventually
from .sse import Ended, EventStream, Http1Source, Http2Source, Watching, encode_cursor

pytestmark = pytest.mark.e2e

KIB = 1024
MIB = 1024 * KIB


@pytest.fixture
def watching(server: Server, lane: Any) -> Iterator[Watching]:
    with Watching(server, lane) as watching:
        yield watching


@pytest.fixture
def small_watching(small_server: Server, lane: Any) -> Iterator[Watching]:
    with Watching(small_server, lane) as watching:
        yield watching


def topic_on(shard: int) -> str:
    """A new topic that this one of two shards owns."""
    return next(name for name in iter(lambda: unique("on"), "") if owner_of_name(name, 2) == shard)


def live(watching: Watching, topic: str, **options: Any) -> EventStream:
    """A stream that stands at the topic's head."""
    stream = watching.follow({topic: {"tail": True}}, **options)
    assert [what[:2] for what in stream.events(1)] == [("caught-up", topic)]
    return stream


# --- the response ------------------------------------------------------------------------------------


def test_the_head_over_http1(server: Server, api1: Client, topic: str) -> None:
    api1.put(topic)
    with Watching(server) as watching:
        stream = watching.follow(topic)
    assert stream.headers["x-request-id"]
    left_out = ("date", "server", "x-request-id")
    headers = {name: value for name, value in stream.headers.items() if name not in left_out}
    assert headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "connection": "keep-alive",
        "x-accel-buffering": "no",
    }


def test_the_head_over_http2(server: Server, api1: Client, topic: str) -> None:
    api1.put(topic)
    with Watching(server, "http2") as watching:
        stream = watching.follow(topic)
    assert stream.headers["x-request-id"]
    left_out = ("date", "server", "x-request-id")
    headers = {name: value for name, value in stream.headers.items() if name not in left_out}
    assert headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "x-accel-buffering": "no",
    }


def test_nobody_gets_a_packed_stream(watching: Watching, api: Client, topic: str) -> None:
    """Packing would hold frames back."""
    api.append(topic, "x" * 5_000)
    wid = watching.create(topic)["wid"]
    stream = watching.get(f"/v0/watch/{wid}", ("Accept-Encoding", "gzip"))
    assert "content-encoding" not in stream.headers
    assert stream.events(1) == [("record", topic, [1])]


def test_http10_gets_a_stream_too(server: Server, api1: Client, topic: str) -> None:
    api1.append(topic, 1)
    with Watching(server) as watching:
        wid = watching.create(topic)["wid"]
        stream = watching.get(f"/v0/watch/{wid}", version="HTTP/1.0")
        assert stream.events(2) == [("record", topic, [1]), ("caught-up", topic, 1)]
        api1.append(topic, 2)
        assert stream.events(1) == [("record", topic, [2])]


def test_the_bytes_of_a_stream(watching: Watching, api: Client, topic: str) -> None:
    """Once spelled out; everywhere else frames are compared after parsing."""
    api.append_records(topic, [{"data": {"a": 1}, "node": "n"}])
    ts = api.diff(topic)["records"][0]["$ts"]
    source = watching.connect()
    source.get(watching.create(topic)["stream_url"], [])
    received = b""
    while not received.endswith(b"\n\n") or b"caught-up" not in received:
        received += source.more(10)
    cursor = encode_cursor({topic: 1})
    assert received.decode() == (
        "retry: 2000\n\n"
        f"id: {cursor}\nevent: record\n"
        f'data: {{"topic":"{topic}","records":[{{"$seq":1,"$ts":{ts},"$node":"n","data":{{"a": 1}}}}],'
        '"from_seq":0,"to_seq":1,"head_seq":1}\n\n'
        f'id: {cursor}\nevent: caught-up\ndata: {{"topic":"{topic}","head_seq":1}}\n\n'
    )


# --- backlog and live --------------------------------------------------------------------------------


def test_first_the_backlog_then_what_comes(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    stream = watching.follow(topic)
    assert stream.events(2) == [("record", topic, [1, 2]), ("caught-up", topic, 2)]
    for seq in (3, 4, 5):
        api.append(topic, seq)
        assert stream.events(1) == [("record", topic, [seq])]  # and no caught-up: it never fell behind
    assert stream.data(topic) == [1, 2, 3, 4, 5]
    assert [(frame["from_seq"], frame["to_seq"], frame["head_seq"]) for frame in stream.of("record")] == [
        (0, 2, 2),
        (2, 3, 3),
        (3, 4, 4),
        (4, 5, 5),
    ]
    assert [frame.cursor for frame in stream.frames] == [{topic: at} for at in (2, 2, 3, 4, 5)]


def test_an_empty_topic_is_caught_up(watching: Watching, api: Client, topic: str) -> None:
    api.put(topic)
    stream = watching.follow(topic)
    assert stream.events(1) == [("caught-up", topic, 0)]
    assert stream.frames[0].cursor == {topic: 0}
    api.append(topic, 1)
    assert stream.events(1) == [("record", topic, [1])]


def test_tail_begins_at_the_head_of_its_creation(watching: Watching, api: Client, topic: str) -> None:
    """Not of the moment the stream was opened."""
    api.append(topic, 1, 2)
    session = watching.create({topic: {"tail": True}})
    api.append(topic, 3)
    assert watching.open(session).events(2) == [("record", topic, [3]), ("caught-up", topic, 3)]


@pytest.mark.parametrize("from_seq", [1, 2, 3])
def test_from_seq_is_exclusive(watching: Watching, api: Client, topic: str, from_seq: int) -> None:
    api.append(topic, 1, 2, 3)
    stream = watching.follow({topic: {"from_seq": from_seq}}).wait_caught_up(topic)
    assert stream.seqs(topic) == list(range(from_seq + 1, 4))
    assert len(stream.frames) == 1 + (from_seq < 3)


def test_a_burst_comes_in_frames_that_tell_the_lag(watching: Watching, api: Client, topic: str) -> None:
    api.put(topic)
    stream = live(watching, topic, limit=100)
    api.append(topic, *range(1, 351))
    assert stream.wait_records(topic, 350) == list(range(1, 351))
    assert [(frame["to_seq"], frame["head_seq"]) for frame in stream.of("record")] == [
        (100, 350),
        (200, 350),
        (300, 350),
        (350, 350),
    ]
    api.append(topic, 351)
    stream.until(lambda: stream.seqs(topic)[-1] == 351)


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_every_class_is_delivered(watching: Watching, api: Client, topic: str, durability: str) -> None:
    api.put(topic, durability=durability)
    api.append(topic, 1, 2)
    stream = watching.follow(topic, consistency="strong").wait_caught_up(topic)
    for seq in range(3, 13):
        api.append(topic, seq)
    assert stream.wait_records(topic, 12) == list(range(1, 13))


def test_an_answered_write_has_been_pushed_or_will_be_at_once(watching: Watching, api: Client, topic: str) -> None:
    api.put(topic)
    stream = live(watching, topic)
    writing, spent = [], []
    for seq in range(1, 31):
        began = time.monotonic()
        api.append(topic, seq)
        started = time.monotonic()
        stream.wait_records(topic, seq)
        writing.append(started - began)
        spent.append(time.monotonic() - started)
    assert median(spent) < max(0.05, 5 * median(writing))  # nobody polls


def test_many_watchers_of_one_topic_get_the_same(watching: Watching, api: Client, topic: str) -> None:
    """With options of their own, from places of their own."""
    api.append_records(topic, [{"data": n, "tag": f"t{n}", "node": f"n{n % 2}"} for n in range(1, 11)])
    everything = watching.follow(topic)
    later = watching.follow({topic: {"from_seq": 7}})
    tail = watching.follow({topic: {"tail": True}})
    tagged = watching.follow(topic, include_tags=True)
    other = watching.follow(topic, node="n1")
    for stream in (everything, later, tail, tagged, other):
        stream.wait_caught_up(topic)
    api.append_records(topic, [{"data": n, "tag": f"t{n}", "node": f"n{n % 2}"} for n in range(11, 21)])
    for stream in (everything, later, tail, tagged, other):
        stream.until(lambda stream=stream: 20 in stream.seqs(topic))  # type: ignore[misc]
    assert everything.seqs(topic) == tagged.seqs(topic) == list(range(1, 21))
    assert later.seqs(topic) == list(range(8, 21))
    assert tail.seqs(topic) == list(range(11, 21))
    assert other.seqs(topic) == list(range(2, 21, 2))
    assert [record["$tag"] for record in tagged.records(topic)] == [f"t{n}" for n in range(1, 21)]
    assert all("$tag" not in record for record in everything.records(topic))


def test_a_repeated_write_is_delivered_once(watching: Watching, api: Client, topic: str) -> None:
    api.put(topic)
    stream = live(watching, topic)
    for _ in range(3):
        api.append(topic, "once", idempotency_key="k")
    api.append(topic, "after")
    assert stream.wait_records(topic, 2) == ["once", "after"]


def test_a_hundred_watchers(server: Server, api1: Client, topic: str) -> None:
    api1.put(topic)
    with Watching(server) as watching:
        streams = [watching.follow(topic).wait_caught_up(topic) for _ in range(100)]
        for number in range(1, 21):
            api1.append(topic, number)
        for stream in streams:
            assert stream.wait_records(topic, 20) == list(range(1, 21))


def test_a_backlog_from_segments_log_and_cache(small_watching: Watching, small: Client, topic: str) -> None:
    """Small segments and next to no cache: the records of one stream come from all the places where records can be."""
    numbers = list(range(1, 201))
    for first in range(0, 200, 5):
        batch = numbers[first : first + 5]
        small.append_records(topic, [{"data": n, "tag": "x" if n % 7 == 0 else "y", "meta": {"n": n}} for n in batch])
        if first == 100:
            small.delete(topic, match="x")
    expected = [n for n in numbers if n % 7 or n > 105]
    stream = small_watching.follow(topic, include_tags=True).wait_caught_up(topic)
    small.append(topic, "live")
    stream.until(lambda: stream.data(topic)[-1] == "live")
    assert stream.data(topic) == [*expected, "live"]
    assert [record["meta"]["n"] for record in stream.records(topic)[:-1]] == expected


# --- frames have their size --------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (7, 7), (0, 256), (None, 256), (1_000, 1_000), (2**63, 1_000)])
def test_limit(watching: Watching, api: Client, topic: str, limit: int | None, most: int) -> None:
    count = 20 if most < 20 else 1_100
    api.append(topic, *range(1, count + 1))
    options = {} if limit is None else {"limit": limit}
    stream = watching.follow(topic, max_batch_bytes=MIB, **options)
    assert stream.wait_records(topic, count) == list(range(1, count + 1))
    sizes = [len(frame["records"]) for frame in stream.of("record")]
    assert (sizes[0], max(sizes)) == (most, most)
    assert stream.events(1) == [("caught-up", topic, count)]


@pytest.mark.parametrize("limit", [0, 3, 4, 1_000])
def test_the_limit_follows_its_variable(small_watching: Watching, small: Client, topic: str, limit: int) -> None:
    for at in range(5):
        small.append(topic, at)
    stream = small_watching.follow(topic, limit=limit)
    assert stream.events(3) == [("record", topic, [1, 2, 3]), ("record", topic, [4, 5]), ("caught-up", topic, 5)]


def _frame_bytes(stream: EventStream) -> list[list[int]]:
    """For each frame, how long the data of its records is."""
    return [[len(json.dumps(record["data"])) for record in frame["records"]] for frame in stream.of("record")]


@pytest.mark.parametrize(
    ("budget", "effective", "size", "count"),
    [
        (1, 1, 10, 10),
        (5_000, 5_000, 1_000, 50),
        (None, 256 * KIB, 50_000, 20),
        (0, MIB, 200_000, 12),
        (2**40, 8 * MIB, 900_000, 12),
    ],
    ids=["one byte", "five records", "the default", "zero is one MiB", "eight MiB at most"],
)
@pytest.mark.parametrize("batch", ["single records", "one batch"])
def test_max_batch_bytes(
    watching: Watching,
    api: Client,
    topic: str,
    budget: int | None,
    effective: int,
    size: int,
    count: int,
    batch: str,
) -> None:
    data = "x" * (size - 2)
    if batch == "one batch":
        api.append(topic, *[data] * count)
    else:
        for _ in range(count):
            api.append(topic, data)
    options = {} if budget is None else {"max_batch_bytes": budget}
    stream = watching.follow(topic, limit=1_000, **options)
    assert stream.wait_records(topic, count) == [data] * count
    frames = _frame_bytes(stream)
    assert all(len(sizes) == 1 or sum(sizes) <= effective for sizes in frames)  # no record exceeds it but a first one
    assert len(frames[0]) >= max(effective // (size + 50), 1)  # and it does not stop long before


def test_records_of_a_mib_one_by_one(watching: Watching, api: Client, topic: str) -> None:
    big = ["a" * (MIB - 2), "b" * (MIB - 2)]
    for data in big:
        api.append(topic, data)
    stream = watching.follow(topic)
    assert stream.events(3) == [("record", topic, [1]), ("record", topic, [2]), ("caught-up", topic, 2)]
    api.append(topic, big[0])
    api.append(topic, big[1])
    assert stream.wait_records(topic, 4) == big * 2


# --- what is included --------------------------------------------------------------------------------


@pytest.mark.parametrize("include_data", [False, True, None])
@pytest.mark.parametrize("include_meta", [False, True, None])
@pytest.mark.parametrize("include_tags", [False, True, None])
def test_parts_are_included_as_asked(
    watching: Watching,
    api: Client,
    topic: str,
    include_tags: bool | None,
    include_meta: bool | None,
    include_data: bool | None,
) -> None:
    """Of the backlog and of what comes live."""
    asked = {"include_tags": include_tags, "include_meta": include_meta, "include_data": include_data}
    records: list[dict[str, Any]] = [{"data": 1, "tag": "t", "meta": {"a": 1}, "node": "n"}, {"data": 2}]
    api.append_records(topic, records)
    stream = watching.follow(topic, **{name: value for name, value in asked.items() if value is not None})
    stream.wait_caught_up(topic)
    api.append_records(topic, records)
    stream.until(lambda: len(stream.records(topic)) == 4)
    expected = {"$seq", "$ts", "$node"}
    expected |= {"$tag"} if include_tags else set()
    expected |= {"meta"} if include_meta is not False else set()
    expected |= {"data"} if include_data is not False else set()
    plain = {"$seq", "$ts"} | ({"data"} if include_data is not False else set())
    assert [record.keys() for record in stream.records(topic)] == [expected, plain] * 2
    for record in stream.records(topic)[::2]:
        assert record["$node"] == "n"
        assert record.get("$tag", "t") == "t"
        assert record.get("meta", {"a": 1}) == {"a": 1}
        assert record.get("data", 1) == 1


def test_records_are_those_of_a_diff(watching: Watching, api: Client, topic: str) -> None:
    api.append_records(
        topic, [{"data": n, "tag": f"t{n}", "node": "n", "meta": {"n": [n, None]}} for n in range(5)] + [{"data": None}]
    )
    stream = watching.follow(topic, include_tags=True).wait_caught_up(topic)
    assert stream.records(topic) == api.diff(topic, include_tags=True)["records"]


# --- the node filter ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "seqs"),
    [
        ("a", [2, 3, 5]),
        ("b", [1, 3, 4, 6]),
        ("A", [1, 2, 3, 4, 5, 6]),
        ("", [1, 2, 3, 4, 5, 6]),
        (["a"], [2, 3, 5]),
        (["a", "b"], [3]),
        (["zzz", "b", "b"], [1, 3, 4, 6]),
        ([], [1, 2, 3, 4, 5, 6]),
        (None, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_own_records_are_left_out(watching: Watching, api: Client, topic: str, node: object, seqs: list[int]) -> None:
    """Of the backlog and of what comes live; the cursor passes them."""
    written = [{"data": at, "node": origin} for at, origin in enumerate(("a", "b", None, "a", "b", "a"))]
    api.append_records(topic, written)
    stream = watching.follow(topic, node=node).wait_caught_up(topic)
    assert [frame.what for frame in stream.frames] == [("record", topic, seqs), ("caught-up", topic, 6)]
    for record in written:
        api.append_records(topic, [record])
    api.append(topic, "last")
    stream.until(lambda: stream.seqs(topic)[-1] == 13)
    assert stream.seqs(topic) == [*seqs, *(seq + 6 for seq in seqs), 13]
    assert stream.frames[-1].cursor == {topic: 13}
    assert stream.of("tombstone") == []


def test_a_backlog_of_own_records_is_passed_silently(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, *range(600), node="me")
    stream = watching.follow(topic, node="me", limit=100)
    assert stream.events(1) == [("caught-up", topic, 600)]
    api.append(topic, *range(5), node="me")
    api.append(topic, "yours")
    assert stream.events(1) == [("record", topic, [606])]


def test_what_was_passed_silently_is_not_read_again(watching: Watching, api: Client, topic: str) -> None:
    """The session's cursor moves over own records that came live, too."""
    api.put(topic)
    session = watching.create(topic, node="me")
    stream = watching.open(session)
    assert stream.events(1) == [("caught-up", topic, 0)]
    api.append(topic, 1, 2, 3, node="me")
    api.append(topic, "yours")
    assert stream.events(1) == [("record", topic, [4])]
    api.append(topic, 5, 6, node="me")
    api.append(topic, "yours")
    assert stream.events(1) == [("record", topic, [7])]
    stream.close()
    assert watching.open(session).events(1) == [("caught-up", topic, 7)]


def test_the_filter_can_be_switched_off_per_topic(watching: Watching, api: Client, topic: str) -> None:
    echoing = f"{topic}.echo"
    api.put(echoing, dedupe_node=False)
    api.put(topic)
    for name in (topic, echoing):
        api.append(name, 1, 2, node="me")
    stream = watching.follow([topic, echoing], node="me").wait_caught_up(topic, echoing)
    assert (stream.seqs(topic), stream.seqs(echoing)) == ([], [1, 2])
    api.append(topic, 3, node="me")
    api.append(echoing, 3, node="me")
    assert stream.events(1) == [("record", echoing, [3])]


def test_the_filter_may_be_switched_while_somebody_watches(watching: Watching, api: Client, topic: str) -> None:
    """A push is read with the filter of its time, like a diff. It may come some time after the append was answered: the
    records that the stream has passed before the switch are those in front of one that it has delivered."""
    api.put(topic)
    stream = live(watching, topic, node="me")
    api.append(topic, 1, node="me")
    api.append(topic, 2)
    assert stream.events(1) == [("record", topic, [2])]
    api.put(topic, dedupe_node=False)
    api.append(topic, 3, node="me")
    assert stream.events(1) == [("record", topic, [3])]
    api.put(topic)
    api.append(topic, 4, node="me")
    api.append(topic, 5)
    assert stream.events(1) == [("record", topic, [5])]


# --- what was deleted on purpose ---------------------------------------------------------------------


def test_deleted_records_are_passed_silently(watching: Watching, api: Client, topic: str) -> None:
    api.append_records(topic, [{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(1, 11)])
    api.delete(topic, before_seq=4)
    api.delete(topic, match="even")
    for from_seq in (0, 2, 5):
        stream = watching.follow({topic: {"from_seq": from_seq}})
        expected = [seq for seq in (5, 7, 9) if seq > from_seq]
        assert stream.events(2) == [("record", topic, expected), ("caught-up", topic, 10)]


def test_a_delete_is_silent_for_those_who_watch(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2, 3)
    stream = watching.follow(topic).wait_caught_up(topic)
    api.delete(topic, before_seq=3)
    api.delete(topic, before_seq=100)
    api.append(topic, 4)
    assert stream.events(1) == [("record", topic, [4])]


def test_a_topic_of_deleted_records_is_caught_up(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2, 3)
    api.delete(topic, before_seq=4)
    stream = watching.follow(topic)
    assert stream.events(1) == [("caught-up", topic, 3)]
    api.append(topic, 4)
    assert stream.events(1) == [("record", topic, [4])]


def test_deletes_below_the_floor_are_silent_and_evictions_are_not(watching: Watching, api: Client, topic: str) -> None:
    api.put(topic, cap_records=5)
    api.append(topic, *range(1, 7))  # 1 is evicted
    api.delete(topic, before_seq=4)  # 2 and 3 go on purpose
    for from_seq in (1, 2, 3):
        stream = watching.follow({topic: {"from_seq": from_seq}})
        assert stream.events(2) == [("record", topic, [4, 5, 6]), ("caught-up", topic, 6)]
    assert watching.follow(topic).events(2) == [
        ("tombstone", topic, "from_seq_too_old", 1, 3),
        ("record", topic, [4, 5, 6]),
    ]


def test_records_deleted_before_they_are_read_are_not_delivered(watching: Watching, api: Client, topic: str) -> None:
    """By a reader that is on its way through the backlog."""
    for first in range(1, 2_001, 500):
        api.append_records(topic, [{"data": n, "tag": f"t{n % 10}"} for n in range(first, first + 500)])
    session = watching.create(topic, limit=10)
    stream = watching.open(session)
    stream.wait_records(topic, 10)
    stream.close()
    api.delete(topic, match="t3")
    api.delete(topic, before_seq=500)
    again = watching.open(session, encode_cursor({topic: 10})).wait_caught_up(topic)
    assert again.data(topic) == [n for n in range(500, 2_001) if n % 10 != 3]
    assert again.of("tombstone") == []


# --- what was lost -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("from_seq", "gap_from"), [(0, 1), (1, 2), (5, 6), (6, 7), (7, None), (9, None)])
def test_a_cursor_below_the_floor_is_too_old(
    watching: Watching, api: Client, topic: str, from_seq: int, gap_from: int | None
) -> None:
    api.put(topic, cap_records=3)
    api.append(topic, *range(1, 11))
    stream = watching.follow({topic: {"from_seq": from_seq}}).wait_caught_up(topic)
    assert stream.seqs(topic) == [seq for seq in (8, 9, 10) if seq > from_seq]
    if gap_from is None:
        assert stream.of("tombstone") == []
        return
    first = stream.frames[0]
    assert first.json == {
        "topic": topic,
        "reason": "from_seq_too_old",
        "gap_from": gap_from,
        "gap_to": 7,
        "earliest_seq": 8,
        "head_seq": 10,
    }
    assert first.cursor == {topic: 7}
    assert stream.frames[1]["from_seq"] == 7
    assert len(stream.of("tombstone")) == 1


def test_a_tombstone_at_connect_without_any_record_left(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    api.put(topic, ttl_ms=1)
    eventually(lambda: api.state(topic)["count"] == 0)
    stream = watching.follow(topic)
    assert stream.events(2) == [("tombstone", topic, "from_seq_too_old", 1, 2), ("caught-up", topic, 2)]
    assert stream.frames[0]["earliest_seq"] == 3


def test_a_resume_behind_the_tombstone_does_not_see_it_again(watching: Watching, api: Client, topic: str) -> None:
    api.put(topic, cap_records=3)
    api.append(topic, *range(1, 11))
    session = watching.create(topic)
    first = watching.open(session)
    tombstone = first.event()
    first.close()
    again = watching.open(session, tombstone.id)
    assert again.events(2) == [("record", topic, [8, 9, 10]), ("caught-up", topic, 10)]


def test_tail_is_never_too_old(watching: Watching, api: Client, topic: str) -> None:
    api.put(topic, cap_records=3)
    api.append(topic, *range(1, 11))
    stream = watching.follow({topic: {"tail": True}})
    assert stream.events(1) == [("caught-up", topic, 10)]
    api.append(topic, 11)
    assert stream.events(1) == [("record", topic, [11])]


@pytest.mark.parametrize("caps", [{"cap_records": 3}, {"cap_bytes": 3 * 34}], ids=["records", "bytes"])
def test_a_batch_beyond_the_cap_is_a_gap_for_those_who_watch(
    watching: Watching, api: Client, topic: str, caps: dict[str, int]
) -> None:
    api.put(topic, **caps)
    stream = watching.follow(topic)
    assert stream.events(1) == [("caught-up", topic, 0)]
    api.append(topic, *range(10, 20))  # only the last three were ever readable
    assert stream.events(2) == [("tombstone", topic, "cap", 1, 7), ("record", topic, [8, 9, 10])]
    assert stream.frames[-2].json == {
        "topic": topic,
        "reason": "cap",
        "gap_from": 1,
        "gap_to": 7,
        "earliest_seq": 8,
        "head_seq": 10,
    }
    api.append(topic, 20)
    stream.until(lambda: stream.seqs(topic)[-1] == 11)
    assert len(stream.of("tombstone")) == 1


@pytest.mark.parametrize("cap_records", [0, 500])
def test_every_record_is_delivered_or_reported(watching: Watching, api: Client, topic: str, cap_records: int) -> None:
    """Under a TTL that is over before most records can be pushed, and under caps."""
    api.put(topic, ttl_ms=1, cap_records=cap_records)
    stream = live(watching, topic, limit=1)
    head = 0
    for size in (1, 700, 1, 1, 900, 3):
        head = api.append(topic, *range(size))["head_seq"]
    stream.until(lambda: stream.frames[-1].cursor == {topic: head})
    covered: list[int] = []
    for frame in stream.frames:
        if frame.event == "record":
            covered += frame.seqs
        elif frame.event == "tombstone":
            assert frame["reason"] != "recreated"
            covered += range(frame["gap_from"], frame["gap_to"] + 1)
    assert covered == list(range(1, head + 1))
    assert {frame["reason"] for frame in stream.of("tombstone")}, "nothing was lost: the test shows nothing"


def test_what_expires_behind_the_reader_is_not_its_loss(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    stream = watching.follow(topic).wait_caught_up(topic)
    api.put(topic, ttl_ms=1)
    eventually(lambda: api.state(topic)["count"] == 0)
    api.put(topic)
    api.append(topic, 3)
    assert stream.events(1) == [("record", topic, [3])]


def test_evictions_behind_the_reader_are_not_its_loss(watching: Watching, api: Client, topic: str) -> None:
    api.put(topic, cap_records=2)
    stream = live(watching, topic)
    for seq in range(1, 30):
        api.append(topic, seq)
        assert stream.events(1) == [("record", topic, [seq])]


# --- topics that go and come again -------------------------------------------------------------------


def test_a_deleted_topic_is_told_and_the_rest_goes_on(watching: Watching, api: Client, topic: str) -> None:
    gone = f"{topic}.gone"
    api.append(gone, 1, 2)
    api.append(topic, 1)
    stream = watching.follow([topic, gone]).wait_caught_up(topic, gone)
    api.drop(gone)
    frame = stream.event()
    assert frame.event == "topic-deleted"
    assert frame.json == {"topic": gone, "head_seq": 2, "reason": "deleted"}
    assert list(frame.cursor) == [topic, gone]
    assert frame.cursor[topic] == 1
    api.append(gone, "a new life")  # not this stream's any more
    api.append(topic, 2)
    assert stream.events(1) == [("record", topic, [2])]
    assert list(stream.frames[-1].cursor) == [topic, gone]


@pytest.mark.parametrize("lane", ["http1"])
def test_a_deleted_topic_may_be_the_only_one(watching: Watching, api: Client, topic: str) -> None:
    """The stream stays open, for whoever waits to see it end."""
    api.append(topic, 1)
    stream = watching.follow(topic, heartbeat_ms=1_000).wait_caught_up(topic)
    api.drop(topic)
    assert stream.events(1) == [("topic-deleted", topic, 1)]
    assert stream.frame(5).comment is not None


def test_a_topic_that_is_gone_when_the_stream_opens(watching: Watching, api: Client, topic: str) -> None:
    gone = f"{topic}.gone"
    api.append(gone, 1, 2)
    api.append(topic, 1)
    session = watching.create([topic, gone])
    api.drop(gone)
    stream = watching.open(session)
    assert sorted(what[:2] for what in stream.events(3)) == [
        ("caught-up", topic),
        ("record", topic),
        ("topic-deleted", gone),
    ]
    api.append(topic, 2)
    assert stream.events(1) == [("record", topic, [2])]


@pytest.mark.parametrize("fresh", [0, 1, 3, 10], ids=["empty", "shorter", "as long", "longer"])
def test_a_recreated_topic_is_read_from_its_start(watching: Watching, api: Client, topic: str, fresh: int) -> None:
    """Recognised by what it is, not by its length: also if its head is beyond the cursor."""
    api.append(topic, "old 1", "old 2", "old 3")
    session = watching.create(topic)
    watching.open(session).wait_caught_up(topic).close()
    api.drop(topic)
    api.put(topic)
    if fresh:
        api.append(topic, *range(1, fresh + 1))
    stream = watching.open(session)
    first = stream.event()
    assert first.event == "tombstone"
    assert first.json == {
        "topic": topic,
        "reason": "recreated",
        "gap_from": 1,
        "gap_to": fresh,
        "earliest_seq": 1,
        "head_seq": fresh,
    }
    assert first.cursor == {topic: 0}
    stream.wait_caught_up(topic)
    assert stream.data(topic) == list(range(1, fresh + 1))
    api.append(topic, "live")
    assert stream.events(1) == [("record", topic, [fresh + 1])]
    assert len(stream.of("tombstone")) == 1
    stream.close()
    again = watching.open(session)
    assert again.events(1) == [("caught-up", topic, fresh + 1)]  # it is known by now


def test_a_topic_recreated_before_the_first_stream(watching: Watching, api: Client, topic: str) -> None:
    """The session is about the topic that was there when it was made."""
    api.append(topic, 1, 2, 3)
    session = watching.create({topic: {"from_seq": 2}})
    api.drop(topic)
    api.append(topic, *"abcd")
    stream = watching.open(session)
    assert stream.events(3) == [
        ("tombstone", topic, "recreated", 1, 4),
        ("record", topic, [1, 2, 3, 4]),
        ("caught-up", topic, 4),
    ]


def test_after_topic_deleted_a_reconnect_finds_the_new_one(watching: Watching, api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    session = watching.create(topic)
    first = watching.open(session).wait_caught_up(topic)
    api.drop(topic)
    assert first.events(1) == [("topic-deleted", topic, 2)]
    api.append(topic, "a", "b", "c")
    again = watching.open(session, first.last_id)
    assert again.events(3) == [
        ("tombstone", topic, "recreated", 1, 3),
        ("record", topic, [1, 2, 3]),
        ("caught-up", topic, 3),
    ]
    assert again.data(topic) == ["a", "b", "c"]


@pytest.mark.parametrize("from_seq", [4, 1_000, 2**64 - 1])
def test_a_cursor_beyond_the_head_means_recreated(watching: Watching, api: Client, topic: str, from_seq: int) -> None:
    api.append(topic, 1, 2, 3)
    stream = watching.follow({topic: {"from_seq": from_seq}})
    assert stream.events(3) == [
        ("tombstone", topic, "recreated", 1, 3),
        ("record", topic, [1, 2, 3]),
        ("caught-up", topic, 3),
    ]


def test_dropped_and_made_again_at_once(watching: Watching, api: Client, topic: str) -> None:
    """Fast enough that the new topic is there before anybody could look: still another topic than the watched one."""
    api.append(topic, 1, 2)
    stream = watching.follow(topic).wait_caught_up(topic)
    with api.twin() as other:
        other.drop(topic)
        other.append(topic, "new")
    assert stream.events(1) == [("topic-deleted", topic, 2)]


# --- several topics ----------------------------------------------------------------------------------


def test_topics_of_both_shards_in_one_stream(watching: Watching, api: Client) -> None:
    names = [topic_on(0), topic_on(1), topic_on(0), topic_on(1)]
    for name in names:
        api.append(name, 1)
    stream = watching.follow(names).wait_caught_up(*names)
    assert list(stream.frames[-1].cursor.items()) == [(name, 1) for name in names]
    for at in range(2, 12):
        for name in names:
            api.append(name, at)
            assert stream.events(1) == [("record", name, [at])]
    assert stream.frames[-1].cursor == dict.fromkeys(names, 11)


def test_each_topic_from_its_own_place(watching: Watching, api: Client, topic: str) -> None:
    names = [f"{topic}.{n}" for n in range(3)]
    for name in names:
        api.append(name, 1, 2, 3)
    stream = watching.follow({names[0]: {"from_seq": 1}, names[1]: {"tail": True}, names[2]: {}})
    stream.wait_caught_up(*names)
    assert [stream.seqs(name) for name in names] == [[2, 3], [], [1, 2, 3]]


def test_a_hundred_topics_in_one_stream(watching: Watching, api: Client, topic: str) -> None:
    names = [f"{topic}.{n}" for n in range(100)]
    for name in names:
        api.append(name, 1, 2, 3)
    stream = watching.follow(names).wait_caught_up(*names)
    for name in names:
        api.append(name, 4)
    stream.until(lambda: sum(len(frame["records"]) for frame in stream.of("record")) == 400)
    for name in names:
        assert stream.data(name) == [1, 2, 3, 4]
    assert list(stream.frames[-1].cursor.items()) == [(name, 4) for name in names]
    assert len(stream.of("caught-up")) == 100


def test_many_writers_of_many_topics(watching: Watching, api: Client, topic: str) -> None:
    """Whatever the interleaving: each topic whole, in order, once."""
    names = [f"{topic}.{n}" for n in range(6)]
    for at, name in enumerate(names):
        api.put(name, durability=("ephemeral", "memory", "disk", "fsync")[at % 4])
    stream = watching.follow(names, limit=7)

    def write(name: str) -> None:
        with api.twin() as own:
            for first in range(0, 120, 3):
                own.append(name, *range(first, first + 3))

    threads = [threading.Thread(target=write, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    stream.until(lambda: stream.frames and set(stream.frames[-1].cursor.values()) == {120}, within_s=30)
    for thread in threads:
        thread.join()
    for name in names:
        assert stream.data(name) == list(range(120))
    assert stream.of("tombstone") == []


def test_two_streams_on_one_http2_connection(server: Server, api1: Client, topic: str) -> None:
    other = f"{topic}.other"
    api1.put(topic)
    api1.put(other)
    with Watching(server, "http2") as watching, H2Wire(server.port) as wire:
        first, second = (
            watching.open(watching.create(name), on=Http2Source(wire, owns=False)) for name in (topic, other)
        )
        for stream, name in ((first, topic), (second, other)):
            assert stream.events(1) == [("caught-up", name, 0)]
        api1.append(topic, 1)
        api1.append(other, 1)
        assert second.events(1) == [("record", other, [1])]
        assert first.events(1) == [("record", topic, [1])]
        first.close()  # the stream, not the connection
        api1.append(other, 2)
        assert second.events(1) == [("record", other, [2])]


# --- content -----------------------------------------------------------------------------------------

FORGED = "\n\nid: AAAA\nevent: error\ndata: {}\n\n"
NASTY = [
    FORGED,
    FORGED.replace("\n", "\r"),
    FORGED.replace("\n", "\r\n"),
    "\r\n\r\n: hb 1748467205000\r\n\r\n",
    "\ufeffretry: 1\n\n",
    "\u2028\u2029\x85\x0b\x0c\x00",
    "data: x",
    "🎈é漢\U0010ffff",
]


@pytest.mark.parametrize("text", NASTY, ids=repr)
def test_text_cannot_forge_a_frame(watching: Watching, api: Client, topic: str, text: str) -> None:
    record = {"data": {text: [text]}, "tag": text, "node": text, "meta": {text: text}}
    api.append_records(topic, [record])
    stream = watching.follow(topic, include_tags=True).wait_caught_up(topic)
    api.append_records(topic, [record])
    stream.until(lambda: len(stream.records(topic)) == 2)
    for delivered in stream.records(topic):
        assert (delivered["data"], delivered["meta"]) == (record["data"], record["meta"])
        assert (delivered["$tag"], delivered["$node"]) == (text, text)
    assert [frame.event for frame in stream.frames] == ["record", "caught-up", "record"]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r"], ids=repr)
def test_white_space_between_the_tokens_cannot_either(watching: Watching, api: Client, topic: str, end: bytes) -> None:
    """Kept byte for byte, it would end the line of a frame."""
    json_text = end.join([b"", b"{", b'"a"', b":", b"[", b"1", b",", b"2", b"]", b"}", b""])
    body = b'{"records":[{"data":%b,"meta":%b}]}' % (json_text, json_text)
    for _ in range(2):
        assert api.send("POST", f"/v0/topics/{topic}", content=body).error is None
    stream = watching.follow(topic).wait_caught_up(topic)
    assert api.send("POST", f"/v0/topics/{topic}", content=body).error is None
    stream.until(lambda: len(stream.records(topic)) == 3)
    assert [(record["data"], record["meta"]) for record in stream.records(topic)] == [
        ({"a": [1, 2]}, {"a": [1, 2]})
    ] * 3
    assert [frame.event for frame in stream.frames] == ["record", "caught-up", "record"]


@pytest.mark.parametrize(
    "text",
    [
        '{"z":1.50,"a":1e2,"z":1E+2}',
        "123456789012345678901234567890",
        "-0.0",
        r'"\u00e9\/\ud83c\udf88\n"',
        '{"b": [ 1 ,2 ],\t"a":{ }}',
        "null",
        '"é🎈"',
        "[[],{}]",
    ],
)
def test_data_and_meta_come_as_they_were_sent(watching: Watching, api: Client, topic: str, text: str) -> None:
    body = b'{"records":[{"data":%b,"meta":{"m":%b}}]}' % (text.encode(), text.encode())
    api.send("POST", f"/v0/topics/{topic}", content=body)
    stream = watching.follow(topic).wait_caught_up(topic)
    api.send("POST", f"/v0/topics/{topic}", content=body)
    stream.until(lambda: len(stream.records(topic)) == 2)
    for frame in stream.of("record"):
        assert f'"data":{text}' in frame.text
        assert f'"meta":{{"m":{text}}}' in frame.text


# --- heartbeats --------------------------------------------------------------------------------------


def test_heartbeats_come_when_nothing_else_does(server: Server, api1: Client, topic: str) -> None:
    """Many streams at a time, because a second is a long time for a test: the asked interval, the clamped ones."""
    silent = f"{topic}.silent"
    api1.put(topic)
    api1.put(silent)
    with Watching(server, "http1") as one, Watching(server, "http2") as two:
        both = (one, two)
        busy = [watching.follow(topic, heartbeat_ms=1_000) for watching in both]
        deaf = [
            watching.follow(topic, heartbeat_ms=1_000, node="me") for watching in both
        ]  # what flows is not for them
        idle = [watching.follow(silent, heartbeat_ms=ms) for watching in both for ms in (1_000, 1, 0)]
        slow = [watching.follow(silent, heartbeat_ms=1_800) for watching in both]
        never = [watching.follow(silent) for watching in both]
        for stream in (*idle, *slow, *never):
            assert stream.events(1) == [("caught-up", silent, 0)]
        started = time.monotonic()
        count = 0
        while time.monotonic() < started + 2.2:
            count += 1
            api1.append(topic, count, node="me")
            for stream in busy:
                stream.wait_records(topic, count)
            time.sleep(0.05)
        ended_ms = time.time() * 1_000
        for stream in busy:
            last_ms = 0
            for frame in stream.frames:
                if frame.comment:  # only where a whole interval went by without any data
                    assert int(frame.comment.removeprefix("hb ")) - last_ms >= 900, stream.frames
                elif frame.event == "record":
                    last_ms = frame["records"][-1]["$ts"]
            before = stream.last_id
            assert _heartbeat(stream)
            assert stream.last_id == before
        for stream in deaf:
            assert stream.frame().event == "caught-up"
            assert _heartbeat(stream) < ended_ms
            assert _heartbeat(stream)
        for stream in idle:
            first, second = _heartbeat(stream), _heartbeat(stream)
            assert 900 <= second - first < 5_000
        for stream in slow:
            assert _heartbeat(stream)
            assert len(stream.frames) == 2
        api1.append(silent, 1)
        for stream in (*idle, *slow, *never):
            stream.wait_records(silent, 1)
        assert all(frame.comment is None for stream in never for frame in stream.frames)


def _heartbeat(stream: EventStream) -> int:
    """The time in the next frame, which must be a heartbeat."""
    comment = stream.frame().comment
    assert comment is not None
    sent_ms = int(comment.removeprefix("hb "))
    assert abs(time.time() * 1_000 - sent_ms) < 60_000
    return sent_ms


# --- durability --------------------------------------------------------------------------------------

SYNC_S = 0.4
SLOW_DISK = f"""
import os, time
_fdatasync = os.fdatasync
def fdatasync(fd):
    time.sleep({SYNC_S})
    _fdatasync(fd)
os.fdatasync = fdatasync
"""


def test_a_record_is_pushed_when_it_is_committed(
    start_server: Callable[..., Server], tmp_path: Path, topic: str
) -> None:
    """On a disk that takes its time to sync: not before it has, where the class promises that."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    server = start_server(PYTHONPATH=tmp_path, TOPICS_WAL_SHARDS=1)
    with server.client() as client, Watching(server, "http1") as one, Watching(server, "http2") as two:
        committed, quick = f"{topic}.fsync", f"{topic}.memory"
        client.put(committed, durability="fsync")
        client.put(quick, durability="memory")
        client.append(quick, 0)
        streams = {
            name: [
                watching.follow({name: {"tail": True}}, consistency=consistency).wait_caught_up(name)
                for watching in (one, two)
                for consistency in ("eventual", "strong")
            ]
            for name in (committed, quick)
        }
        quickest = []
        for seq in (1, 2, 3):
            started = time.monotonic()
            thread = threading.Thread(target=lambda: _append(server, committed))
            thread.start()
            for stream in streams[committed]:
                assert stream.events(1) == [("record", committed, [seq])]
                assert time.monotonic() - started >= SYNC_S
            thread.join()
            started = time.monotonic()
            client.append(quick, seq)
            for stream in streams[quick]:
                assert stream.events(1) == [("record", quick, [seq + 1])]
            quickest.append(time.monotonic() - started)
        assert min(quickest) < SYNC_S


def _append(server: Server, topic: str) -> None:
    with server.client() as own:
        own.append(topic, 1)


# --- connections -------------------------------------------------------------------------------------


def test_clients_that_go_leave_nothing_behind(server: Server, watching: Watching, api: Client, topic: str) -> None:
    api.put(topic)
    api.append(topic, 1)
    watching.create(topic)  # so that its own connection is counted
    sockets = server.sockets_of("gateway-0")
    streams = [watching.follow(topic) for _ in range(10)]
    for stream in streams:
        stream.wait_caught_up(topic)
    assert server.sockets_of("gateway-0") >= sockets + 10
    for at, stream in enumerate(streams):
        if at % 2:
            stream.close()
        else:
            stream.reset()
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, what="the connections' end")
    assert api.append(topic, 2)["seqs"] == [2]


def test_what_a_client_sends_behind_its_request_is_not_answered(server: Server, api1: Client, topic: str) -> None:
    """The response ends with the connection, so there can be no second one."""
    api1.put(topic)
    with Watching(server) as watching:
        source = watching.connect()
        assert isinstance(source, Http1Source)
        stream = watching.open(watching.create(topic), on=source)
        assert stream.events(1) == [("caught-up", topic, 0)]
        source.sock.sendall(b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        source.sock.sendall(b"\x00\xff" * 5_000)
        api1.append(topic, 1)
        try:
            assert stream.events(1) == [("record", topic, [1])]
        except Ended:  # it may be shown the door for it
            pass
