"""What a work stream delivers, when it delivers more, and what it gives back when it closes; in both lanes.

That no stream ever holds more than its `max`, nor one job twice, is checked on every frame (`working.py`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from .client import Answer, Client, unique
from .h2wire import H2Wire
from .queues import CLASSES, Counters, Queue, data_of, leases_of, now_ms, seqs_of
from .routing import route
from .server import Server, eventually
from .sse import Ended, EventStream, Http1Source, Http2Source, Watching
from .wire import Wire, request
from .working import HOUR_MS, MOST, Working, WorkStream, claim_within

pytestmark = pytest.mark.e2e

MIB = 1024 * 1024
TIGHT = 4  # streams at a time, of the server that has a limit
STORM = 60


@pytest.fixture
def working(server: Server, lane: Any) -> Iterator[Working]:
    with Working(server, lane) as working:
        yield working


@pytest.fixture
def queue(working: Working) -> Queue:
    return working.queue()


def path_of(queue: Queue, **query: object) -> str:
    return f"/v0/topics/{queue.name}/work?{urlencode({'node': 'w', **query})}"


def read_until(source: Http1Source | Http2Source, enough: Callable[[bytes], bool]) -> bytes:
    """The bytes of a stream as they come."""
    received = b""
    while not enough(received):
        received += source.more(10)
    return received


@contextmanager
def looking(server: Server, queue: Queue) -> Iterator[list[Counters]]:
    """Somebody asks for the counters all the time; what was seen."""
    seen: list[Counters] = []
    done = threading.Event()

    def look() -> None:
        with server.client() as client:
            while not done.is_set():
                seen.append(queue.by(client).counters())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


# --- the response ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["http1"])
def test_the_head_over_http1(working: Working, queue: Queue) -> None:
    stream = working.open(queue)
    assert stream.headers["x-request-id"]
    left_out = ("date", "server", "x-request-id")
    headers = {name: value for name, value in stream.headers.items() if name not in left_out}
    assert headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "connection": "keep-alive",
        "x-accel-buffering": "no",
    }


@pytest.mark.parametrize("lane", ["http2"])
def test_the_head_over_http2(working: Working, queue: Queue) -> None:
    stream = working.open(queue)
    assert stream.headers["x-request-id"]
    left_out = ("date", "server", "x-request-id")
    headers = {name: value for name, value in stream.headers.items() if name not in left_out}
    assert headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "x-accel-buffering": "no",
    }


def test_the_bytes_of_a_stream(working: Working, queue: Queue) -> None:
    """Once spelled out; everywhere else frames are compared after parsing."""
    source = working.connect()
    source.get(path_of(queue, max=2), [("Accept", "text/event-stream")])
    opening = read_until(source, lambda received: received.count(b"\n\n") >= 2)
    first, second, rest = opening.split(b"\n\n")
    assert (first, rest) == (b"retry: 2000", b"")
    assert second.startswith(b": hb ")
    assert abs(now_ms() - int(second.removeprefix(b": hb "))) < 10_000
    queue.produce_records([{"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": [1, 2]}}, {"data": None}])
    records = queue.api.diff(queue.name)["records"]
    received = read_until(source, lambda received: received.count(b"\n\n") >= 2).decode()
    # What only the lease knows is taken from the frames themselves.
    leases, deadlines = [], []
    for frame in received.split("\n\n")[:2]:
        leases.append(frame.partition('"lease_id":"')[2].partition('"')[0])
        deadlines.append(int(frame.partition('"deadline":')[2].partition(",")[0]))
    assert len(set(leases)) == 2
    assert all(abs(deadline - HOUR_MS - now_ms()) < 10_000 for deadline in deadlines)
    assert received == (
        "id: 1\nevent: job\n"
        f'data: {{"topic":"{queue.name}","$seq":1,"lease_id":"{leases[0]}","deadline":{deadlines[0]},"deliveries":1,'
        f'"$ts":{records[0]["$ts"]},"$node":"n","$tag":"t","data":{{"a": 1}},"meta":{{"m": [1, 2]}}}}\n\n'
        "id: 2\nevent: job\n"
        f'data: {{"topic":"{queue.name}","$seq":2,"lease_id":"{leases[1]}","deadline":{deadlines[1]},"deliveries":1,'
        f'"$ts":{records[1]["$ts"]},"data":null}}\n\n'
    )


@pytest.mark.parametrize("lane", ["http1"])
def test_http10_gets_a_stream_too(working: Working, queue: Queue) -> None:
    queue.produce(1)
    stream = working.get(path_of(queue), version="HTTP/1.0", queue=queue.name, node="w")
    assert stream.seqs(1) == [1]
    queue.produce(2)
    working.ack(stream)
    assert stream.seqs(1) == [2]


def test_nobody_gets_a_packed_stream(working: Working, queue: Queue) -> None:
    queue.produce("x" * 5_000)
    stream = working.get(path_of(queue), ("Accept-Encoding", "gzip"))
    assert "content-encoding" not in stream.headers
    assert stream.seqs(1) == [1]


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "",
        "max=1",
        "node=",
        f"node={'x' * 129}",
        f"node={quote('é' * 65)}",
        "node=w&max=0",
        "node=w&max=-1",
        "node=w&max=x",
        "node=w&max=1.5",
        "node=w&max=1e3",
        "node=w&max=",
        "node=w&max=true",
        "node=w&lease_ms=x",
        "node=w&lease_ms=-1",
        "node=w&lease_ms=1.5",
        "node=w&lease_ms=",
        "node=%FF",
    ],
    ids=lambda query: query[:30],
)
def test_a_bad_query(working: Working, queue: Queue, query: str) -> None:
    queue.produce(1)
    answer = working.get(f"/v0/topics/{queue.name}/work?{query}").answer()
    assert answer.refusal == (400, "invalid_request")
    queue.assert_counters(1, 0)


def test_a_topic_that_does_not_exist_is_not_made(working: Working, topic: str) -> None:
    assert working.attempt(topic).answer().refusal == (404, "topic_not_found")
    assert working.client.state(topic).refusal == (404, "topic_not_found")


def test_a_log_is_no_queue(working: Working, topic: str) -> None:
    working.client.append(topic, 1)
    assert working.attempt(topic).answer().refusal == (409, "not_a_queue")


@pytest.mark.parametrize("name", ["a%20b", "%00", "x" * 300, "a%23leases"])
def test_a_bad_name(working: Working, name: str) -> None:
    assert working.get(f"/v0/topics/{name}/work?node=w").answer().refusal == (400, "invalid_request")


def test_the_log_of_leases_can_not_be_worked_on(working: Working, queue: Queue) -> None:
    queue.produce(1)
    working.open(queue).take(1)
    assert working.get(f"/v0/topics/{queue.name}%23leases/work?node=w").status == 400


@pytest.mark.parametrize("accept", [None, "*/*", "text/*", "TEXT/Event-Stream", "text/html, text/event-stream;q=0.9"])
def test_accept_that_allows_an_event_stream(working: Working, queue: Queue, accept: str | None) -> None:
    headers = [] if accept is None else [("Accept", accept)]
    assert working.get(path_of(queue), *headers).status == 200


@pytest.mark.parametrize("accept", ["application/json", "text/html", "text/html, application/*", "text/event-streams"])
def test_accept_that_does_not(working: Working, queue: Queue, accept: str) -> None:
    queue.produce(1)
    assert working.get(path_of(queue), ("Accept", accept)).answer().refusal == (406, "not_acceptable")
    queue.assert_counters(1, 0)


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE"])
def test_streams_are_opened_by_get_alone(
    connect: Callable[..., Wire], working: Working, queue: Queue, method: str
) -> None:
    queue.produce(1)
    if working.lane == "http1":
        wire = connect()
        wire.send(request(method, path_of(queue)))
        status, headers = wire.head()
    else:
        refused = working.get(path_of(queue), method=method)
        status, headers = refused.status, refused.headers
    assert status == 405
    assert headers["allow"] == "GET"
    queue.assert_counters(1, 0)


def test_a_refused_stream_leaves_the_connection_usable(wire: Wire, api1: Client) -> None:
    queue = Queue(api1, unique("q"))
    queue.configure()
    queue.produce(1)
    assert wire.ask(request("GET", path_of(queue), headers=("Accept: text/html",))).status == 406
    assert wire.ask(request("GET", path_of(queue, max=0))).status == 400
    assert wire.ask(request("GET", f"/v0/topics/{unique()}/work?node=w")).status == 404
    queue.assert_counters(1, 0)
    wire.send(request("GET", path_of(queue)))
    status, headers = wire.head()
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    queue.wait_counters(0, 1)


def test_the_length_of_a_node_follows_its_variable(small_server: Server, lane: Any) -> None:
    with Working(small_server, lane) as working:
        queue = working.queue()
        queue.produce(1)
        assert working.attempt(queue, "123456789").answer().refusal == (400, "invalid_request")
        assert working.open(queue, "12345678").seqs(1) == [1]


# --- what is asked for -------------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["n" * 128, "é" * 64, "a b&c=d/e?#%", "🎈", "\n\r"])
def test_any_node_may_work(working: Working, queue: Queue, node: str) -> None:
    queue.produce(1)
    stream = working.open(queue, node)
    assert stream.seqs(1) == [1]
    assert queue.ack([1], node=node + "x" if len(node.encode()) < 128 else "x")["acked"] == 0
    working.ack(stream, 1)
    queue.wait_counters(0, 0)


def test_one_job_at_a_time_unless_asked(working: Working, queue: Queue) -> None:
    queue.produce(1, 2, 3)
    stream = working.get(path_of(queue), queue=queue.name, node="w", most=1)
    assert stream.seqs(1) == [1]
    assert stream.stays_silent()
    queue.assert_counters(2, 1)


def test_what_else_a_query_says_is_ignored(working: Working, queue: Queue) -> None:
    queue.produce(1)
    assert working.open(queue, token="x", other="y").seqs(1) == [1]


def test_max_is_clamped(working: Working, queue: Queue) -> None:
    queue.produce(*range(MOST))
    queue.produce(*range(10))
    stream = working.open(queue, max=2**40)
    assert stream.seqs(MOST) == list(range(1, MOST + 1))
    queue.assert_counters(10, MOST)
    working.ack(stream, *range(1, 6))
    assert stream.seqs(5) == list(range(MOST + 1, MOST + 6))


@pytest.mark.parametrize(
    ("asked", "effective"), [(None, 5_000_000), (250_000, 250_000), (10**12, 86_400_000), (0, 100), (99, 100)]
)
def test_lease_ms(working: Working, asked: int | None, effective: int) -> None:
    """Its own, or the queue's; within its bounds."""
    queue = working.queue(lease_ms=5_000_000)
    query: dict[str, Any] = {} if asked is None else {"lease_ms": asked}
    stream = working.open(queue, **query)
    before = now_ms()
    queue.produce(1)
    job = stream.job()
    assert before + effective <= job["deadline"] <= now_ms() + effective


# --- jobs --------------------------------------------------------------------------------------------


def test_first_what_waits_then_what_comes(working: Working, queue: Queue) -> None:
    queue.produce("a", "b")
    stream = working.open(queue, max=10)
    assert data_of(stream.take(2)) == ["a", "b"]
    for seq in (3, 4, 5):
        assert queue.produce(seq) == [seq]
        assert stream.seqs(1) == [seq]
    queue.assert_counters(0, 5)
    assert {job["deliveries"] for job in stream.jobs} == {1}
    assert len({job["lease_id"] for job in stream.jobs}) == 5


def test_a_job_is_what_a_claim_would_have_given(working: Working, queue: Queue) -> None:
    queue.produce_records([{"data": {"n": 1.50}, "tag": "t", "node": "n", "meta": {"m": None}}, {"data": "x"}])
    pushed = working.open(queue, max=2)
    jobs = pushed.take(2)
    pushed.close()
    claimed = claim_within(queue, 2)
    lease = {"lease_id", "deadline", "deliveries"}
    for job, entry in zip(jobs, claimed, strict=True):
        assert {name: value for name, value in job.items() if name not in lease} == {
            "topic": queue.name,
            **{name: value for name, value in entry.items() if name not in lease},
        }
        assert list(job)[1:] == list(entry)


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("leases_durable", [False, True])
def test_every_class_of_queue(working: Working, durability: str, leases_durable: bool) -> None:
    queue = working.queue(durability=durability, leases_durable=leases_durable)
    queue.produce(1, 2)
    stream = working.open(queue, max=2)
    got = stream.seqs(2)
    for seq in range(3, 13):
        queue.produce(seq)
        working.ack(stream, got[-2])
        got += stream.seqs(1)
    working.ack(stream)
    assert got == list(range(1, 13))
    queue.wait_counters(0, 0)


def test_a_job_is_pushed_when_it_is_produced(working: Working, queue: Queue) -> None:
    stream = working.open(queue, max=100)
    producing, spent = [], []
    for seq in range(1, 31):
        began = time.monotonic()
        queue.produce(seq)
        started = time.monotonic()
        assert stream.seqs(1) == [seq]
        producing.append(started - began)
        spent.append(time.monotonic() - started)
    assert median(spent) < max(0.05, 5 * median(producing))  # nobody polls


def test_a_job_is_replaced_when_it_is_acked(working: Working, queue: Queue) -> None:
    queue.produce(*range(40))
    stream = working.open(queue)
    stream.take(1)
    acking, spent = [], []
    for seq in range(2, 32):
        began = time.monotonic()
        working.ack(stream)
        started = time.monotonic()
        assert stream.seqs(1) == [seq]
        acking.append(started - began)
        spent.append(time.monotonic() - started)
    assert median(spent) < max(0.05, 5 * median(acking))


def test_large_jobs(working: Working, queue: Queue) -> None:
    """Together more than one pass may hold, and more than is sent to somebody who does not read."""
    data = [letter * (MIB - 100) for letter in "abcdefghijkl"]
    for one in data[:-1]:
        queue.produce(one)
    stream = working.open(queue, max=20)
    queue.produce(data[-1])
    assert data_of(stream.take(12)) == data
    queue.assert_counters(0, 12)
    working.ack(stream)
    queue.wait_counters(0, 0)


def test_max_is_reached_whatever_the_size_of_the_jobs(working: Working, queue: Queue) -> None:
    """By a client that reads, without any ack."""
    for _ in range(11):
        queue.produce(*["x" * 10_000] * 100)
    stream = working.open(queue, max=1_000)
    assert stream.seqs(1_000) == list(range(1, 1_001))
    queue.assert_counters(100, 1_000)


def test_thousands_of_jobs(working: Working, queue: Queue) -> None:
    """In batches, whoever is faster: each once, in order, never more than the stream may hold."""
    count = 5_000

    def produce() -> None:
        with working.client.twin() as client:
            for first in range(0, count, 250):
                queue.by(client).produce(*range(first, first + 250))

    producer = threading.Thread(target=produce)
    producer.start()
    stream = working.open(queue, max=200)
    got: list[Any] = []
    while len(got) < count:
        got += data_of(stream.take(1))
        if len(stream.held) >= 130:
            working.ack(stream)
    producer.join()
    working.ack(stream)
    assert got == list(range(count))
    queue.wait_counters(0, 0)


def test_an_id_from_before_says_nothing(working: Working, queue: Queue) -> None:
    """A browser that reconnects sends its last id; who holds what is known here."""
    queue.produce(1, 2)
    for last_id in ("1", "7", "-1", "garbage"):
        stream = working.get(path_of(queue, max=2), ("Last-Event-ID", last_id), queue=queue.name)
        assert stream.seqs(2) == [1, 2]
        stream.close()
        queue.wait_counters(2, 0)


def test_a_worker_gets_what_it_has_produced_itself(working: Working, queue: Queue) -> None:
    queue.produce("own", node="w")
    stream = working.open(queue, "w", max=2)
    queue.produce("own", node="w")
    assert [(job["$node"], job["data"]) for job in stream.take(2)] == [("w", "own")] * 2


def test_forwarded_records_are_jobs(working: Working, queue: Queue, topic: str) -> None:
    api = working.client
    api.put(topic)
    assert route(api, topic, queue.name)
    stream = working.open(queue, max=3)
    for number in range(1, 4):
        api.append(topic, number)
        assert stream.job()["data"] == number
    queue.wait_counters(0, 3)


def test_a_change_of_the_queue_counts_for_the_next_job(working: Working, queue: Queue) -> None:
    stream = working.open(queue, max=10)
    for lease_ms in (HOUR_MS, 20_000, 2_000_000):
        queue.configure(lease_ms=lease_ms)
        before = now_ms()
        queue.produce(lease_ms)
        assert before + lease_ms <= stream.job()["deadline"] <= now_ms() + lease_ms
    queue.configure(claim_jitter_ms=1_000)
    started = time.monotonic()
    queue.produce("gathered")
    assert stream.job()["data"] == "gathered"
    assert time.monotonic() - started >= 0.95
    queue.configure()
    spent = []
    for number in range(5):
        started = time.monotonic()
        queue.produce(number)
        assert stream.job()["data"] == number
        spent.append(time.monotonic() - started)
    assert median(spent) < 0.95


def test_watching_and_reading_a_queue_disturb_nobody(server: Server, working: Working, queue: Queue) -> None:
    queue.produce(1, 2)
    stream = working.open(queue)
    assert stream.seqs(1) == [1]
    with Watching(server) as watching:
        watched = watching.follow(queue.name).wait_caught_up(queue.name)
        queue.produce(3)
        assert watched.wait_records(queue.name, 3) == [1, 2, 3]
        assert queue.left() == [1, 2, 3]
        queue.assert_counters(2, 1)
        working.ack(stream)
        assert stream.seqs(1) == [2]


# --- content -----------------------------------------------------------------------------------------

FORGED = "\n\nid: 7\nevent: error\ndata: {}\n\n"
NASTY = [FORGED, FORGED.replace("\n", "\r"), "\ufeffretry: 1\n\n", "\u2028\u2029\x85\x0b\x0c\x00", "🎈é漢\U0010ffff"]


@pytest.mark.parametrize("text", NASTY, ids=repr)
def test_text_cannot_forge_a_frame(working: Working, queue: Queue, text: str) -> None:
    record = {"data": {text: [text]}, "tag": text, "node": text, "meta": {text: text}}
    queue.produce_records([record])
    stream = working.open(queue, text if "\x00" not in text else "w", max=3)
    queue.produce_records([record])
    queue.produce("last")
    for job in stream.take(3)[:2]:
        assert (job["data"], job["meta"]) == (record["data"], record["meta"])
        assert (job["$tag"], job["$node"]) == (text, text)


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\n\r"], ids=repr)
def test_white_space_between_the_tokens_cannot_either(working: Working, queue: Queue, end: bytes) -> None:
    json_text = end.join([b"", b"{", b'"a"', b":", b"[", b"1", b",", b"2", b"]", b"}", b""])
    body = b'{"records":[{"data":%b,"meta":%b}]}' % (json_text, json_text)
    stream = working.open(queue, max=2)
    for _ in range(2):
        assert queue.api.send("POST", f"/v0/topics/{queue.name}", content=body).error is None
    assert [(job["data"], job["meta"]) for job in stream.take(2)] == [({"a": [1, 2]}, {"a": [1, 2]})] * 2


@pytest.mark.parametrize(
    "text", ['{"z":1.50,"a":1e2,"z":1E+2}', "-0.0", r'"\u00e9\/\ud83c\udf88\n"', '{"b": [ 1 ,2 ]}']
)
def test_data_and_meta_come_as_they_were_sent(working: Working, queue: Queue, text: str) -> None:
    body = b'{"records":[{"data":%b,"meta":{"m":%b}}]}' % (text.encode(), text.encode())
    queue.api.send("POST", f"/v0/topics/{queue.name}", content=body)
    stream = working.open(queue)
    stream.take(1)
    assert f'"data":{text},"meta":{{"m":{text}}}}}' in stream.frames[-1].text


# --- never more than max -----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 7])
def test_max_bounds_what_is_in_flight(working: Working, queue: Queue, most: int) -> None:
    """By what the client has received, and by what the server counts."""
    count = 20
    queue.produce(*range(count))
    stream = working.open(queue, max=most)
    got = stream.seqs(most)
    while stream.held:
        left = count - len(got)
        queue.assert_counters(left, len(stream.held))
        acked = min(stream.held)
        working.ack(stream, acked)
        if left:
            got += stream.seqs(1)
    assert got == list(range(1, count + 1))
    assert stream.stays_silent(0.1)
    queue.assert_counters(0, 0)


def test_as_many_come_as_were_acked(working: Working, queue: Queue) -> None:
    queue.produce(*range(30))
    stream = working.open(queue, max=10)
    stream.take(10)
    for seqs in ([3], [1, 2, 10], [4, 5, 6, 7, 8, 9, 11]):
        working.ack(stream, *seqs)
        stream.take(len(seqs))
        queue.assert_counters(30 - len(stream.jobs), 10)
    assert seqs_of(stream.jobs) == list(range(1, 22))
    assert stream.stays_silent(0.1)


def test_the_server_never_counts_more(server: Server, working: Working, queue: Queue) -> None:
    """Looked at all the time, while the worker is as fast as it can be."""
    queue.produce(*range(600))
    with looking(server, queue) as seen:
        stream = working.open(queue, max=8)
        for seq in range(1, 601):
            assert stream.seqs(1) == [seq]
            if len(stream.held) > 4:
                working.ack(stream)
    assert len(seen) > 20
    assert max(counters.in_flight for counters in seen) <= 8


# --- room for the next -------------------------------------------------------------------------------


def test_a_nacked_job_comes_back_before_fresh_ones(working: Working, queue: Queue) -> None:
    queue.produce("a", "b", "c")
    stream = working.open(queue)
    first = stream.job()
    working.nack(stream)
    again = stream.job()
    assert (again["$seq"], again["deliveries"], again["data"]) == (1, 2, "a")
    assert again["lease_id"] != first["lease_id"]
    working.ack(stream)
    assert stream.seqs(1) == [2]


def test_a_delayed_nack_makes_room_and_comes_when_it_is_due(working: Working, queue: Queue) -> None:
    queue.produce("a", "b")
    stream = working.open(queue)
    stream.take(1)
    before = time.monotonic()
    working.nack(stream, delay_ms=2_000)
    assert stream.seqs(1) == [2]
    queue.assert_counters(0, 1, hidden=1)
    working.ack(stream)
    again = stream.job()
    spent = time.monotonic() - before
    assert (again["$seq"], again["deliveries"]) == (1, 2)
    assert 1.99 <= spent < 20


def test_what_is_due_while_the_stream_is_full_comes_with_the_next_room(working: Working, queue: Queue) -> None:
    queue.produce("a", "b", "c")
    stream = working.open(queue)
    stream.take(1)
    working.nack(stream, delay_ms=100)
    assert stream.seqs(1) == [2]
    queue.wait_counters(2, 1)
    working.ack(stream)
    assert stream.seqs(1) == [1]  # ahead of the fresh one


def test_an_expired_job_comes_back(working: Working, queue: Queue) -> None:
    """Nobody has to ask for it."""
    queue.produce("a", "b")
    stream = working.open(queue, lease_ms=2_000)
    first = stream.job()
    again = stream.job()
    assert (again["$seq"], again["deliveries"]) == (1, 2)
    assert again["deadline"] - first["deadline"] >= 2_000
    assert queue.ack([1], lease_ids=[first["lease_id"]])["skipped"] == [1]
    stream.forget(1)
    assert queue.ack([1], lease_ids=[again["lease_id"]])["acked"] == 1
    assert stream.seqs(1) == [2]


def test_looking_does_not_keep_anything_back(server: Server, working: Working, queue: Queue) -> None:
    """Somebody asks for the counters all the time, also in the moment in which a lease ends or a delay is over."""
    queue.produce(1)
    with looking(server, queue) as seen:
        stream = working.open(queue, lease_ms=100)
        for deliveries in range(1, 11):
            assert stream.job()["deliveries"] == deliveries
        for deliveries in range(11, 21):
            stream.forget()
            queue.nack([1], delay_ms=50)
            assert stream.job()["deliveries"] >= deliveries
    assert {counters[:2] for counters in seen} <= {(0, 0), (0, 1), (1, 0)}


def test_an_expired_job_makes_room_even_if_another_takes_it(working: Working, queue: Queue) -> None:
    queue.produce(1)
    slow = working.open(queue, "slow", lease_ms=300)
    slow.take(1)
    quick = working.open(queue, "quick")
    assert quick.job()["deliveries"] >= 2  # each time it expires it may be anybody's
    queue.produce(2)
    while slow.job()["$seq"] != 2:
        pass


def test_an_extended_job_stays(working: Working, queue: Queue) -> None:
    queue.produce("a", "b")
    stream = working.open(queue, lease_ms=2_000)
    job = stream.job()
    deadline = queue.extend([1], lease_ms=HOUR_MS)["deadlines"]["1"]
    job["deadline"] = deadline
    assert stream.stays_silent(2.2)
    queue.assert_counters(1, 1)
    assert queue.ack([1], lease_ids=[job["lease_id"]])["acked"] == 1
    stream.forget()
    assert stream.seqs(1) == [2]


@pytest.mark.parametrize("how", [{"match": "t"}, {"before_seq": 2}])
def test_a_deleted_job_makes_room(working: Working, queue: Queue, how: dict[str, Any]) -> None:
    queue.produce_records([{"data": "a", "tag": "t"}, {"data": "b"}])
    stream = working.open(queue)
    stream.take(1)
    stream.forget()
    queue.api.delete(queue.name, **how)
    assert stream.seqs(1) == [2]
    assert queue.ack([1])["skipped"] == [1]
    queue.assert_counters(0, 1)


def test_an_evicted_job_makes_room(working: Working) -> None:
    queue = working.queue(cap_records=2)
    queue.produce("a", "b")
    stream = working.open(queue)
    stream.take(1)
    stream.forget()
    queue.produce("c")
    assert stream.seqs(1) == [2]


def test_a_job_whose_time_is_over_makes_room(working: Working) -> None:
    queue = working.queue()
    queue.produce("old")
    stream = working.open(queue)
    stream.take(1)
    stream.forget()
    queue.configure(lease_ms=HOUR_MS, ttl_ms=1)
    eventually(lambda: queue.state()["count"] == 0)
    queue.configure(lease_ms=HOUR_MS)
    queue.produce("new")
    assert stream.job()["data"] == "new"


def test_jobs_deleted_before_they_are_delivered_never_come(working: Working, queue: Queue) -> None:
    queue.produce_records([{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(1, 11)])
    stream = working.open(queue)
    assert stream.seqs(1) == [1]
    queue.api.delete(queue.name, match="even")
    got = [1]
    while len(got) < 5:
        working.ack(stream)
        got += stream.seqs(1)
    assert got == [1, 3, 5, 7, 9]
    working.ack(stream)
    queue.wait_counters(0, 0)
    assert stream.stays_silent(0.1)


def test_what_others_say_of_a_job_makes_no_room(working: Working, queue: Queue) -> None:
    queue.produce("a", "b")
    stream = working.open(queue, "mine")
    job = stream.job()
    assert queue.ack([1], node="other")["skipped"] == [1]
    assert queue.nack([1], node="other")["skipped"] == [1]
    assert queue.ack([1], node="mine", lease_ids=["lease_0"])["skipped"] == [1]
    assert stream.stays_silent(0.2)
    queue.assert_counters(1, 1)
    working.ack(stream, lease_ids=leases_of([job]))
    assert stream.seqs(1) == [2]


def test_every_redelivery_is_counted(working: Working, queue: Queue) -> None:
    queue.produce(1)
    stream = working.open(queue)
    for deliveries in range(1, 6):
        assert stream.job()["deliveries"] == deliveries
        working.nack(stream)
    assert stream.job()["deliveries"] == 6
    stream.close()
    assert claim_within(queue, 1)[0]["deliveries"] == 7


# --- dead letters, without any claim -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["nacked", "expired", "left"])
def test_a_job_that_fails_too_often_goes_to_the_dead_letters(working: Working, how: str) -> None:
    dead = unique("dead")
    queue = working.queue(max_deliveries=2, dead_letter=dead)
    queue.produce_records([{"data": "poison", "tag": "t", "node": "n", "meta": {"m": 1}}])
    query: dict[str, Any] = {"lease_ms": 200} if how == "expired" else {}
    stream = working.open(queue, **query)
    for deliveries in (1, 2):
        job = stream.job(5)
        assert (job["$seq"], job["deliveries"]) == (1, deliveries)
        if how == "nacked":
            working.nack(stream)
        elif how == "left":
            stream.close()
            stream = working.open(queue)
    queue.wait_counters(0, 0, 1)
    records = eventually(lambda: working.client.diff(dead, include_tags=True).json.get("records"))
    assert [(record["data"], record["$tag"], record["$node"]) for record in records] == [("poison", "t", "n")]
    assert records[0]["meta"] == {
        "m": 1,
        "$dead_letter_from": queue.name,
        "$dead_letter_deliveries": "2",
        "$dead_letter_src_seq": "1",
    }
    queue.produce("sound")
    assert stream.seqs(1) == [2]
    assert queue.left() == [2]


def test_dead_letters_may_be_worked_on_too(working: Working) -> None:
    dead = working.queue()
    queue = working.queue(max_deliveries=1, dead_letter=dead.name)
    mourner, worker = working.open(dead, "mourner"), working.open(queue, "worker")
    for number in range(1, 4):
        queue.produce(number)
        worker.take(1)
        working.nack(worker)
        job = mourner.job(5)
        assert (job["data"], job["deliveries"]) == (number, 1)
        assert job["meta"]["$dead_letter_src_seq"] == str(number)
        working.ack(mourner)
    queue.wait_counters(0, 0, 3)
    dead.wait_counters(0, 0)


def test_poison_does_not_hold_up_the_rest(working: Working) -> None:
    dead = unique("dead")
    queue = working.queue(max_deliveries=3, dead_letter=dead)
    queue.produce(*range(1, 31))
    stream = working.open(queue, max=4)
    acked: list[int] = []
    while len(acked) < 20:
        job = stream.job()
        if job["data"] % 3 == 0:
            working.nack(stream, job["$seq"])
        else:
            acked.append(job["data"])
            working.ack(stream, job["$seq"])
    assert acked == [n for n in range(1, 31) if n % 3]

    def rest_is_dead() -> bool:
        while not stream.stays_silent(0.02):
            working.nack(stream, stream.job()["$seq"])
        return queue.counters() == (0, 0, 10)

    eventually(rest_is_dead)
    assert sorted(working.client.diff(dead).data) == list(range(3, 31, 3))


# --- several streams ---------------------------------------------------------------------------------


def test_two_streams_of_one_node(working: Working, queue: Queue) -> None:
    """Each with a bound of its own; what the node acks makes room where it was delivered."""
    queue.produce(*range(12))
    one, two = working.open(queue, max=3), working.open(queue, max=2)
    first, second = one.seqs(3), two.seqs(2)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    queue.assert_counters(7, 5)
    working.ack(two)
    assert two.seqs(2) == [6, 7]
    assert one.stays_silent(0.1)
    working.ack(one, first[0])
    assert one.seqs(1) == [8]
    assert two.stays_silent(0.1)
    queue.assert_counters(4, 5)
    one.close()
    queue.wait_counters(4 + 3, 2)
    working.ack(two)  # what the other one of its name gave back comes here, but no more than fits
    assert two.seqs(2) == sorted([*first[1:], 8])[:2]
    queue.wait_counters(5, 2)


def test_many_streams_share_without_overlap(server: Server, topic: str) -> None:
    count = 400
    with Working(server, "http1") as one, Working(server, "http2") as two:
        queue = one.queue()
        streams = [(each, each.open(queue, f"w{at % 3}", max=5)) for at in range(8) for each in (one, two)]
        queue.produce(*range(count))
        got: list[int] = []
        deadline = time.monotonic() + 30
        while len(got) < count:
            assert time.monotonic() < deadline, f"{len(got)} of {count}"
            for working, stream in streams:
                while not stream.stays_silent(0.001):
                    got += stream.seqs(1)
                if stream.held:
                    working.ack(stream)
        assert sorted(got) == list(range(1, count + 1))
        queue.wait_counters(0, 0)


def test_two_streams_on_one_http2_connection(server: Server) -> None:
    with Working(server, "http2") as working, H2Wire(server.port) as wire:
        queue = working.queue()
        queue.produce(*range(6))
        first, second = (working.open(queue, max=2, on=Http2Source(wire, owns=False)) for _ in range(2))
        assert (first.seqs(2), second.seqs(2)) == ([1, 2], [3, 4])
        first.close()  # the stream, not the connection
        queue.wait_counters(4, 2)
        working.ack(second)
        assert second.seqs(2) == [1, 2]
        assert {job["deliveries"] for job in second.jobs[2:]} == {2}


def test_a_poll_of_the_same_node_is_its_own(working: Working, queue: Queue) -> None:
    queue.produce(*range(6))
    polled = queue.take(2)
    stream = working.open(queue, max=2)
    assert stream.seqs(2) == [3, 4]
    stream.close()
    queue.wait_counters(4, 2)
    assert queue.ack(seqs_of(polled), lease_ids=leases_of(polled))["acked"] == 2
    assert seqs_of(queue.take(2, node="other")) == [3, 4]


def test_a_lease_that_moved_on_is_not_the_streams_any_more(working: Working, queue: Queue) -> None:
    """Delivered here once, given back, claimed by a poll of the same node: the stream's end does not touch it."""
    queue.produce("a", "b")
    stream = working.open(queue)
    assert stream.seqs(1) == [1]
    working.nack(stream, delay_ms=100)
    assert stream.seqs(1) == [2]
    (polled,) = claim_within(queue, 1, node="w")
    assert polled["$seq"] == 1
    stream.close()
    queue.wait_counters(1, 1)
    assert seqs_of(queue.take(1, node="other")) == [2]
    assert queue.ack([1], lease_ids=leases_of([polled]))["acked"] == 1


# --- what closes gives back --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "vanished", "half closed"])
def test_a_closed_stream_gives_its_jobs_back_at_once(working: Working, queue: Queue, how: str) -> None:
    queue.produce(*range(10))
    stream = working.open(queue, max=5)
    stream.take(5)
    working.ack(stream, 2)
    stream.take(1)
    if how == "closed":
        stream.close()
    elif how == "vanished":
        stream.reset()
    else:
        source = stream.source
        (source.sock if isinstance(source, Http1Source) else source.wire.sock).shutdown(socket.SHUT_WR)  # type: ignore[attr-defined]
    jobs = claim_within(queue, 9)
    assert sorted((job["$seq"], job["deliveries"]) for job in jobs) == [
        *((seq, 2) for seq in (1, 3, 4, 5, 6)),
        *((seq, 1) for seq in (7, 8, 9, 10)),
    ]
    queue.assert_counters(0, 9)


def test_what_was_given_back_is_not_the_nodes_any_more(working: Working, queue: Queue) -> None:
    queue.produce(1)
    stream = working.open(queue)
    job = stream.job()
    stream.close()
    queue.wait_counters(1, 0)
    assert queue.ack([1])["skipped"] == [1]
    assert queue.ack([1], lease_ids=leases_of([job]))["skipped"] == [1]
    assert queue.extend([1])["skipped"] == [1]
    queue.assert_counters(1, 0)


def test_another_stream_gets_it_at_once(working: Working, queue: Queue) -> None:
    queue.produce(*range(4))
    first, second = working.open(queue, "first", max=4), working.open(queue, "second", max=4)
    assert first.seqs(4) == [1, 2, 3, 4]
    assert second.stays_silent(0.1)
    first.reset()
    assert second.seqs(4) == [1, 2, 3, 4]
    assert {job["deliveries"] for job in second.jobs} == {2}


def test_a_job_that_was_extended_is_given_back_too(working: Working, queue: Queue) -> None:
    queue.produce(1)
    stream = working.open(queue)
    stream.take(1)
    assert queue.extend([1], lease_ms=HOUR_MS * 20)["extended"] == 1
    stream.close()
    assert seqs_of(claim_within(queue, 1)) == [1]


def test_jobs_that_nobody_read_are_given_back_too(working: Working, queue: Queue) -> None:
    """They are with the gateway or the kernel when the client goes; the rest it was never given."""
    queue.produce(*["x" * 20_000] * 200)
    stream = working.open(queue, max=200, receive_buffer=4_096)
    eventually(lambda: queue.counters().in_flight > 2)
    stream.close()
    assert len(claim_within(queue, 200)) == 200


# --- topics that go ----------------------------------------------------------------------------------


def test_a_deleted_queue_ends_its_streams(working: Working, queue: Queue) -> None:
    queue.produce(1, 2)
    holding, waiting = working.open(queue, max=2), working.open(queue)
    holding.take(2)
    working.client.drop(queue.name)
    assert holding.last_word() == 404
    assert waiting.last_word() == 404
    assert working.attempt(queue).answer().refusal == (404, "topic_not_found")


def test_a_queue_that_comes_again_as_a_log(working: Working, queue: Queue) -> None:
    queue.produce(1)
    stream = working.open(queue)
    stream.take(1)
    working.client.drop(queue.name)
    working.client.put(queue.name)
    working.client.append(queue.name, "a record")
    assert stream.last_word() in (404, 409)
    assert working.attempt(queue).answer().refusal == (409, "not_a_queue")


def test_a_queue_that_comes_again_as_a_queue(working: Working, queue: Queue) -> None:
    """It is another one: its jobs are for streams that are opened now."""
    queue.produce("old", "old")
    stream = working.open(queue)
    stream.take(1)
    working.client.drop(queue.name)
    queue.configure(lease_ms=HOUR_MS)
    queue.produce("new")
    assert stream.last_word() == 404
    assert data_of(stream.jobs) == ["old"]
    queue.wait_counters(1, 0)
    again = working.open(queue)
    (job,) = again.take(1)
    assert (job["$seq"], job["data"], job["deliveries"]) == (1, "new", 1)


def test_other_queues_go_on(working: Working, queue: Queue) -> None:
    other = working.queue()
    gone, kept = working.open(queue), working.open(other)
    working.client.drop(queue.name)
    assert gone.last_word() == 404
    other.produce(1)
    assert kept.seqs(1) == [1]


# --- the limit of streams ----------------------------------------------------------------------------


def _serve(factory: pytest.TempPathFactory, name: str, **environ: object) -> Iterator[Server]:
    folder = factory.mktemp(name)
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two gateways, a few streams at a time."""
    yield from _serve(tmp_path_factory, "tight", TOPICS_GATEWAYS=2, TOPICS_MAX_SSE_CONNECTIONS=TIGHT)


def _opened(working: Working, queue: Queue, **query: Any) -> WorkStream | None:
    stream = working.attempt(queue, **query)
    if stream.status == 200:
        return stream
    answer = stream.answer()
    assert answer.refusal == (429, "throttled")
    assert (answer.detail["limit"], answer.detail["max"]) == ("max_sse_connections", TIGHT)
    return None


def test_streams_are_counted_with_those_that_watch(tight: Server, lane: Any) -> None:
    with Working(tight, lane) as working, Watching(tight, lane) as watching:
        queue = working.queue()
        session, unopened = watching.create(queue.name), watching.create(queue.name)
        watched = eventually(lambda: _watched(watching, session))
        streams = [eventually(lambda: _opened(working, queue)) for _ in range(TIGHT - 1)]
        assert _opened(working, queue) is None
        assert watching.attempt(unopened).answer().refusal == (429, "throttled")
        queue.produce(*range(TIGHT))
        for stream in streams:
            stream.take(1)
        streams[0].close()
        streams[0] = eventually(lambda: _opened(working, queue))
        assert _opened(working, queue) is None
        watched.close()
        streams.append(eventually(lambda: _opened(working, queue)))
        assert watching.attempt(unopened).status == 429
        working.client.drop(queue.name)
        for stream in streams:
            assert stream.last_word() == 404
        assert (
            eventually(lambda: stream if (stream := watching.attempt(unopened)).status == 200 else None).status == 200
        )


def _watched(watching: Watching, session: Answer) -> EventStream | None:
    stream = watching.attempt(session)
    return stream if stream.status == 200 else None


def test_what_is_refused_takes_no_place(tight: Server, lane: Any) -> None:
    with Working(tight, lane) as working:
        queue = working.queue()
        for _ in range(TIGHT + 1):
            assert working.attempt(unique()).status == 404
            assert working.attempt(queue, max=0).status == 400
            assert working.get(path_of(queue), ("Accept", "image/png")).status == 406
        assert [eventually(lambda: _opened(working, queue)) for _ in range(TIGHT)]
        assert _opened(working, queue) is None


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two gateways, and room for one storm at a time."""
    yield from _serve(tmp_path_factory, "roomy", TOPICS_GATEWAYS=2, TOPICS_MAX_SSE_CONNECTIONS=STORM)


@pytest.mark.full
@pytest.mark.parametrize("jitter_ms", [0, 30])
def test_storms_of_clients_leave_nothing_behind(roomy: Server, jitter_ms: int) -> None:
    """Clients that come and go, some of them before they could be answered, while jobs are there for all."""
    with Working(roomy, "http1") as one, Working(roomy, "http2") as two:
        queue = one.queue(claim_jitter_ms=jitter_ms)
        queue.produce(*range(200))
        for storm in range(3):
            for at in range(50):
                working = (one, two)[at % 2]
                if at % 5 == 4:  # asks and goes
                    source = working.connect()
                    if isinstance(source, Http1Source):
                        source.sock.sendall(request("GET", path_of(queue, max=7)))
                    else:
                        source.wire.open("GET", path_of(queue, max=7), end=True)
                    source.reset()
                    continue
                stream = eventually(lambda working=working: _roomy(working, queue))
                if at % 3 == 0 and storm:
                    stream.frame(5)
                if at % 2 == storm % 2:
                    stream.close()
                else:
                    stream.reset()
            queue.wait_counters(200, 0)
        assert len(claim_within(queue, 200)) == 200
        streams = [eventually(lambda: _roomy(one, queue)) for _ in range(STORM)]
        assert one.attempt(queue).status == 429
        queue.produce(*range(STORM))
        for stream in streams:
            stream.take(1)
            stream.close()
        queue.wait_counters(STORM, 200)


def _roomy(working: Working, queue: Queue) -> WorkStream | None:
    stream = working.attempt(queue, max=7)
    return stream if stream.status == 200 else None


def test_clients_that_go_leave_no_connections(server: Server, working: Working, queue: Queue) -> None:
    queue.produce(*range(5))
    sockets = server.sockets_of("gateway-0")
    streams = [working.open(queue) for _ in range(10)]
    assert server.sockets_of("gateway-0") >= sockets + 10
    for at, stream in enumerate(streams):
        if at % 2:
            stream.close()
        else:
            stream.reset()
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, what="the connections' end")
    queue.wait_counters(5, 0)


@pytest.mark.parametrize("lane", ["http1"])
def test_what_a_client_sends_behind_its_request_is_not_answered(working: Working, queue: Queue) -> None:
    stream = working.open(queue)
    assert isinstance(stream.source, Http1Source)
    stream.source.sock.sendall(b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    stream.source.sock.sendall(b"\x00\xff" * 5_000)
    queue.produce(1)
    try:
        assert stream.seqs(1) == [1]
    except Ended:  # it may be shown the door for it
        pass


# --- heartbeats --------------------------------------------------------------------------------------


@pytest.mark.full
def test_heartbeats_come_when_nothing_else_does(server: Server) -> None:
    """All at once, because fifteen seconds are long: those that wait, one that is full, and one that is busy."""
    with Working(server, "http1") as one, Working(server, "http2") as two:
        started = time.monotonic()
        idle = [working.open(working.queue()) for working in (one, two)]
        full_queue, busy_queue = one.queue(), one.queue()
        full_queue.produce(1, 2)
        full, busy = one.open(full_queue), one.open(busy_queue)
        full.take(1)
        jobs = 0
        while time.monotonic() < started + 17:
            jobs += 1
            busy_queue.produce(jobs)
            busy.take(1)
            one.ack(busy)
            time.sleep(0.2)
        for stream in (*idle, full):
            comments = [frame for frame in stream.frames if frame.comment is not None]
            assert len(comments) == 1  # the one at the beginning
            comments.append(stream.frame())
            first, second = (int((frame.comment or "hb 0").removeprefix("hb ")) for frame in comments)
            assert 14_000 <= second - first < 25_000
        assert [frame.comment for frame in busy.frames if frame.comment is not None] == [busy.frames[0].comment]
        assert len(busy.jobs) == jobs
        full_queue.assert_counters(1, 1)


# --- clients that do not read ------------------------------------------------------------------------

PATIENCE_MS = 2_000
SMALL_BUFFER = 4_096


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environ = {"TOPICS_STREAM_BACKLOG_BYTES": 65_536, "TOPICS_SLOW_CONSUMER_TIMEOUT_MS": PATIENCE_MS}
    yield from _serve(tmp_path_factory, "impatient", **environ)


@pytest.mark.full
@pytest.mark.parametrize("reads_again", [True, False])
def test_a_client_that_stops_reading_loses_its_jobs(impatient: Server, lane: Any, reads_again: bool) -> None:
    """Nobody else notices anything but that there is more to do."""
    with Working(impatient, lane) as working:
        queue = working.queue()
        for _ in range(40):
            queue.produce(*["x" * 10_000] * 20)
        before = time.monotonic()
        stalled = working.open(queue, "stalled", max=1_000, receive_buffer=SMALL_BUFFER)

        def is_stuck() -> bool:
            """Until the kernel takes no more, nobody can tell that it does not read."""
            held = queue.counters().in_flight
            time.sleep(0.2)
            return held > 0 and queue.counters().in_flight == held

        eventually(is_stuck)
        other = working.queue()
        brisk = working.open(other, "brisk")
        spent = []
        for seq in range(1, 11):
            started = time.monotonic()
            other.produce(seq)
            assert brisk.seqs(1) == [seq]
            working.ack(brisk)
            spent.append(time.monotonic() - started)
        assert median(spent) < 1
        jobs = claim_within(queue, 800)
        assert time.monotonic() - before > PATIENCE_MS / 1_000 * 0.8
        assert sorted(seqs_of(jobs)) == list(range(1, 801))
        if reads_again:
            assert stalled.last_word() == 408
            assert len(stalled.jobs) < 800
        assert brisk.stays_silent(0.05)


@pytest.mark.full
def test_a_client_that_reads_in_time_is_let_be(impatient: Server, lane: Any) -> None:
    """Again and again behind, but never for as long as the patience lasts; in all for longer than it."""
    with Working(impatient, lane) as working:
        queue = working.queue()
        stream = working.open(queue, max=1_000, receive_buffer=SMALL_BUFFER)
        started = time.monotonic()
        while time.monotonic() < started + PATIENCE_MS / 1_000 * 1.5:
            queue.produce(*["x" * 10_000] * 100)
            queue.produce(*["x" * 10_000] * 100)
            time.sleep(0.3)
            stream.take(200)
            working.ack(stream)
        assert {job["deliveries"] for job in stream.jobs} == {1}
        queue.wait_counters(0, 0)


def test_jobs_larger_than_the_backlog(impatient: Server, lane: Any) -> None:
    """One at a time, each taken before the next."""
    data = [letter * 1_000_000 for letter in "abcdef"]
    with Working(impatient, lane) as working:
        queue = working.queue()
        for one in data[:3]:
            queue.produce(one)
        stream = working.open(queue, max=10)
        for one in data[3:]:
            queue.produce(one)
        assert data_of(stream.take(6)) == data
        queue.assert_counters(0, 6)


@pytest.mark.full
def test_those_who_read_nothing_cost_little(impatient: Server) -> None:
    """A stream holds back what does not fit, whatever its max; the jobs of those that leave are there for others."""
    with Working(impatient) as working:
        queues = [working.queue() for _ in range(6)]
        for queue in queues:
            for _ in range(20):
                queue.produce(*["x" * 10_000] * 40)
        before = _rss_bytes(impatient)
        for queue in queues:
            working.open(queue, max=1_000, receive_buffer=SMALL_BUFFER)
        for queue in queues:
            eventually(lambda queue=queue: queue.counters().in_flight > 0)
        assert _rss_bytes(impatient) - before < 24_000_000  # of 48 MB
        for queue in queues:
            queue.wait_counters(800, 0)


def _rss_bytes(server: Server) -> int:
    return next(line.rss_bytes or 0 for line in server.ps().processes if line.name == "gateway-0")
