"""Batches, their keys, and a connection that is not always kind: a proxy before a real server refuses and loses."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from e2e.client import Client
from e2e.server import Server
from msgspec import Raw

from spark_pipeline.delivery import Batch, Batcher, CannotWrite, Delivery, Record, Target, batch_key, culprit, parse_url

pytestmark = pytest.mark.gate

Refuse = tuple[int, dict[str, str], bytes]  # an answer that is not the server's


def record(data: object, **sides: Any) -> Record:
    return Record(Raw(json.dumps(data).encode()), **sides)


def batch(topic: str, *data: object, number: int = 0) -> Batch:
    return Batch(topic, number, [record(value) for value in data], list(range(1, len(data) + 1)))


# --- how batches are cut ---


def cut(batcher: Batcher, rows: list[tuple[str, Record]]) -> list[tuple[str, int, list[int]]]:
    found = []
    for row, (topic, each) in enumerate(rows, 1):
        found += [(done.topic, done.number, done.rows) for done in batcher.add(topic, each, row)]
    return found + [(done.topic, done.number, done.rows) for done in batcher.finish()]


def test_by_records() -> None:
    rows = [("t", record(at)) for at in range(5)]
    assert cut(Batcher(max_records=2, max_bytes=10_000), rows) == [("t", 0, [1, 2]), ("t", 1, [3, 4]), ("t", 2, [5])]
    assert cut(Batcher(max_records=5, max_bytes=10_000), rows) == [("t", 0, [1, 2, 3, 4, 5])]
    assert cut(Batcher(max_records=5, max_bytes=10_000), []) == []


def test_by_bytes_and_what_is_longer_goes_alone() -> None:
    rows = [("t", record("x" * size)) for size in (300, 300, 5_000, 300, 300)]
    assert [rows for _, _, rows in cut(Batcher(max_records=100, max_bytes=1_000), rows)] == [[1, 2], [3], [4, 5]]


def test_tag_node_and_meta_count_too() -> None:
    long = {"tag": "x" * 200, "node": "y" * 100, "meta": Raw(b'{"z":"%s"}' % (b"z" * 400))}
    rows = [("t", record(0, **long)), ("t", record(0, **long))]
    assert [rows for _, _, rows in cut(Batcher(max_records=100, max_bytes=1_000), rows)] == [[1], [2]]


def test_each_topic_has_batches_of_its_own() -> None:
    rows = [(topic, record(0)) for topic in "abababa"]
    found = cut(Batcher(max_records=2, max_bytes=10_000), rows)
    assert found == [("a", 0, [1, 3]), ("b", 0, [2, 4]), ("a", 1, [5, 7]), ("b", 1, [6])]


def test_many_topics_hold_only_so_much() -> None:
    rows = [(f"t{at % 100}", record("x" * 60)) for at in range(1_000)]
    batcher = Batcher(max_records=1_000, max_bytes=1_000, held_bytes=2_000)
    found = cut(batcher, rows)
    assert sorted(row for _, _, rows in found for row in rows) == list(range(1, 1_001))
    waits = [rows[0] for _, _, rows in found]
    assert waits == sorted(waits)  # nothing stayed behind while others went
    assert len(found) == 1_000  # none was ever so long that it met a second of its topic
    for topic in {topic for topic, _, _ in found}:
        assert [number for name, number, _ in found if name == topic] == list(range(10))


def test_a_batch_says_where_it_comes_from() -> None:
    made = Batch("t", 0, [record(0)] * 3, [4, 9, 11])
    assert (made.where(), made.where(1)) == ("rows 4 to 11", "row 9")
    assert Batch("t", 0, [record(0)], [4]).where() == "row 4"


def test_keys_differ_by_all_they_are_made_of_and_fit() -> None:
    keys = [
        batch_key(records, write=write, partition=partition, number=number)
        for records, write, partition, number in itertools.product((b"[1]", b"[2]"), ("w", "v"), (0, 1), (0, 1))
    ]
    assert len(set(keys)) == 16
    assert keys[0] == batch_key(b"[1]", write="w", partition=0, number=0)
    assert len(batch_key(b"", write="x" * 128 + "/" + "9" * 19, partition=1 << 31, number=1 << 63)) <= 256


@pytest.mark.parametrize(
    ("detail", "at"),
    [
        ({"record": 1}, 1),
        ({"record": 7}, None),
        ({"field": "tag", "max": 3}, 2),
        ({"field": "node", "max": 3}, 1),
        ({"field": "meta", "max": 3}, 0),
        ({"field": "meta"}, None),
        ({"field": "records"}, None),
        ({}, None),
    ],
)
def test_whom_the_server_means(detail: dict[str, Any], at: int | None) -> None:
    records = [record(0, tag="abc", meta=Raw(b'{"a":1}')), record(0, node="abcd"), record(0, tag="éé")]
    assert culprit(records, detail) == at


# --- sending ---


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server, except for those that its script says something else about: an answer of its
    own, "drop" (the connection closes, nothing was passed on), "lose" (it was passed on, the answer is lost) or "hold"
    (no answer comes)."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = port
        self.script: list[Refuse | str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Message] = []
        self.connections = 0
        self.over = Event()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def forward(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=30)
        try:
            connection.request("POST", path, body=body, headers={"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))
        self.server.headers.append(self.headers)
        step = self.server.script.pop(0) if self.server.script else "pass"
        if step == "hold":
            self.server.over.wait(30)
        if step in ("drop", "hold"):
            return self._hang_up()
        if isinstance(step, tuple):
            return self._answer(*step)
        status, content = self.server.forward(self.path, body)
        if step == "lose":
            return self._hang_up()
        return self._answer(status, {}, content)

    def _hang_up(self) -> None:
        self.close_connection = True

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server.port)
    thread = Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.over.set()
    made.shutdown()
    thread.join()
    made.server_close()


Deliver = Callable[..., Delivery]


@pytest.fixture
def pauses() -> list[float]:
    """How long a delivery would have slept."""
    return []


@pytest.fixture
def deliver(proxy: Proxy, pauses: list[float]) -> Iterator[Deliver]:
    made: list[Delivery] = []

    def make(
        *, write: str = "w", partition: int = 3, retries: int = 3, timeout_s: float = 30, **target: Any
    ) -> Delivery:
        address = {"host": "127.0.0.1", "port": proxy.server_port, **target}
        where = Target(**address, timeout_s=timeout_s, retries=retries)
        made.append(Delivery(where, write=write, partition=partition, sleep=pauses.append, chance=lambda: 1.0))
        return made[-1]

    yield make
    for delivery in made:
        delivery.close()


def refusal(code: str, message: str = "no", *, retry_after: str | None = None, status: int, **detail: Any) -> Refuse:
    content = json.dumps({"error": {"code": code, "message": message, "detail": detail}}).encode()
    return status, {} if retry_after is None else {"Retry-After": retry_after}, content


def held(api: Client, topic: str) -> list[Any]:
    return list(api.diff(topic, limit=1_000).data)


def test_batches_go_over_one_connection_in_their_order(deliver: Deliver, proxy: Proxy, api: Client, topic: str) -> None:
    delivery = deliver(api_key="s3cret")
    for number in range(5):
        delivery.send(batch(topic, number, str(number), number=number))
    assert held(api, topic) == [value for number in range(5) for value in (number, str(number))]
    assert proxy.connections == 1
    assert (delivery.records, delivery.deduped) == (10, 0)
    assert {headers["Authorization"] for headers in proxy.headers} == {"Bearer s3cret"}
    assert [body["idempotency_key"].rsplit("/", 1)[0] for body in proxy.bodies] == [f"spark/w/3/{n}" for n in range(5)]


def test_what_is_sent_again_by_another_attempt_is_there_once(deliver: Deliver, api: Client, topic: str) -> None:
    deliver().send(batch(topic, 1, 2))
    again = deliver()
    again.send(batch(topic, 1, 2))
    again.send(batch(topic, 3, number=1))
    assert held(api, topic) == [1, 2, 3]
    assert (again.records, again.deduped) == (3, 2)


@pytest.mark.parametrize("other", [{"write": "v"}, {"partition": 4}, {"number": 1}], ids=lambda each: next(iter(each)))
def test_what_another_one_sends_is_another_batch(
    deliver: Deliver, api: Client, topic: str, other: dict[str, Any]
) -> None:
    number = other.pop("number", 0)
    deliver().send(batch(topic, 1))
    deliver(**other).send(batch(topic, 1, number=number))
    assert held(api, topic) == [1, 1]


def test_other_records_under_the_same_number_are_not_taken_for_the_first(
    deliver: Deliver, api: Client, topic: str
) -> None:
    deliver().send(batch(topic, "a", "b"))
    deliver().send(batch(topic, "b", "c"))
    assert held(api, topic) == ["a", "b", "b", "c"]


def test_a_lost_answer_is_asked_for_again(deliver: Deliver, proxy: Proxy, api: Client, topic: str) -> None:
    """The batch is in the log when it is sent again."""
    delivery = deliver()
    proxy.script = ["lose", "lose"]
    delivery.send(batch(topic, 1, 2))
    assert held(api, topic) == [1, 2]
    assert len({body["idempotency_key"] for body in proxy.bodies}) == 1
    assert (len(proxy.bodies), delivery.deduped) == (3, 2)


def test_a_lost_request_is_sent_again(deliver: Deliver, proxy: Proxy, api: Client, topic: str) -> None:
    delivery = deliver()
    delivery.send(batch(topic, 1))
    proxy.script = ["drop"]
    delivery.send(batch(topic, 2, number=1))
    assert held(api, topic) == [1, 2]
    assert (delivery.records, delivery.deduped) == (2, 0)


def test_no_answer_in_time(deliver: Deliver, proxy: Proxy, api: Client, topic: str) -> None:
    proxy.script = ["hold"]
    deliver(timeout_s=0.2).send(batch(topic, 1))
    assert held(api, topic) == [1]
    proxy.script = ["hold", "hold"]
    with pytest.raises(CannotWrite, match=r"no answer in time \(option timeoutMs\), 2 times in \d+ s"):
        deliver(timeout_s=0.2, retries=1).send(batch(topic, 2))


def test_the_server_says_how_long_to_wait(
    deliver: Deliver, proxy: Proxy, api: Client, topic: str, pauses: list[float]
) -> None:
    proxy.script = [
        refusal("throttled", status=429, retry_after="2"),
        refusal("throttled", status=429, retry_after="1", retry_after_ms=735),
        refusal("shard_unavailable", status=503, retry_after="1", outcome="unknown"),
        (503, {"Retry-After": "4"}, b"<html>from a proxy"),
        (502, {}, b""),
    ]
    deliver(retries=5).send(batch(topic, 1))
    assert pauses == [2.0, 0.735, 1.0, 4.0, 1.6]
    assert held(api, topic) == [1]
    assert len({body["idempotency_key"] for body in proxy.bodies}) == 1


def test_pauses_grow_to_a_limit(deliver: Deliver, proxy: Proxy, topic: str, pauses: list[float]) -> None:
    proxy.script = ["drop"] * 9
    deliver(retries=9).send(batch(topic, 1))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_a_server_that_stays_busy(deliver: Deliver, proxy: Proxy, topic: str) -> None:
    proxy.script = [refusal("storage_full", "no space", status=503, retry_after="1")] * 2
    with pytest.raises(CannotWrite) as caught:
        deliver(retries=1).send(batch(topic, 1, 2))
    said = f"topic {topic}, partition 3, rows 1 to 2: http://127.0.0.1:{proxy.server_port}: no space (storage_full)"
    assert str(caught.value).startswith(f"{said}, 2 times in 0 s. Option retries says")


def test_nobody_is_there(deliver: Deliver, topic: str, pauses: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CannotWrite) as caught:
        deliver(port=port, retries=2).send(batch(topic, 1))
    assert str(caught.value) == (
        f"topic {topic}, partition 3, row 1: http://127.0.0.1:{port}: connection refused, 3 times in 0 s. "
        "Is option url right, and does a server run there? Option retries says how often to try again"
    )
    assert len(pauses) == 2


def test_nobody_has_this_name(deliver: Deliver, topic: str) -> None:
    with pytest.raises(CannotWrite, match=r"http://nowhere\.invalid:1: .*, once in"):
        deliver(host="nowhere.invalid", port=1, retries=0).send(batch(topic, 1))


@pytest.mark.parametrize("answer", [(200, {}, b"hello"), (404, {}, b"<html>"), (302, {"Location": "/x"}, b"")])
def test_somebody_else_is_there(deliver: Deliver, proxy: Proxy, topic: str, answer: Refuse) -> None:
    proxy.script = [answer]
    with pytest.raises(CannotWrite, match=rf"^option url: http://.* answers {answer[0]}, but not as a topics server$"):
        deliver().send(batch(topic, 1))
    assert len(proxy.bodies) == 1


def test_a_refusal_names_the_row_and_is_not_repeated(deliver: Deliver, proxy: Proxy, topic: str) -> None:
    made = batch(topic, 1, 2, 3)
    made.records[1].tag = "x" * 300
    with pytest.raises(CannotWrite) as caught:
        deliver().send(made)
    said = "tag is longer than 256 bytes (invalid_request)"
    assert str(caught.value) == f"topic {topic}, partition 3, row 2 is refused: {said}"
    assert len(proxy.bodies) == 1


def test_a_record_that_is_too_long(deliver: Deliver, topic: str) -> None:
    with pytest.raises(CannotWrite, match=rf"^topic {topic}, partition 3, row 2 is refused: record 1 has 20\d* bytes"):
        deliver().send(batch(topic, 1, "x" * 2_000_000))


def test_a_name_that_is_none(deliver: Deliver) -> None:
    with pytest.raises(CannotWrite, match=r"^topic a/b\?c=é, partition 3, row 1 is refused: topic name 'a/b\?c=é'"):
        deliver().send(batch("a/b?c=é", 1))


def test_hints_name_the_option(deliver: Deliver, proxy: Proxy, topic: str) -> None:
    for code, status, option in [
        ("unauthorized", 401, "apiKeyFile"),
        ("batch_too_large", 400, "batchRecords"),
        ("payload_too_large", 413, "batchBytes"),
    ]:
        proxy.script = [refusal(code, "no", status=status)]
        with pytest.raises(CannotWrite, match=rf"is refused: no \({code}\)\. .*option {option}"):
            deliver().send(batch(topic, 1))


def test_below_a_proxys_path(deliver: Deliver, proxy: Proxy, topic: str) -> None:
    with pytest.raises(CannotWrite, match="not_found"):  # the server itself knows no such path
        deliver(prefix=parse_url("http://x/below")["prefix"]).send(batch(topic, 1))
    assert len(proxy.bodies) == 1
