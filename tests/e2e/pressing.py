"""Pressure on a server, made by a test: who makes it, how it is seen from outside, and writers that keep account.

- A server whose syncs may take no longer than ten microseconds is under pressure as soon as somebody writes what has to
  be synced: that presses one shard and leaves gateways calm. One whose rounds may take no longer than a millisecond is
  under pressure as soon as a gateway has something to do.
- Levels are read from the board, which asks nobody: looking does not press.
- Every writer counts its records and knows which of them were acknowledged under which seq, so that what is in the
  topic afterwards can be compared with what the server said, record by record.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from topics import limits
from topics.actors.inspect.attach import open_board
from topics.actors.startup.datadir_lock import read_lock_info
from topics.shm.counters import Word
from topics.storage.config import owner_of_name

from .client import Answer, Client, Lane
from .routing import read
from .server import Server, eventually
from .sockets import Socket
from .wire import Wire, request

WITHIN_S = 30.0
DEFER, REFUSE = 3, 4

_numbers = itertools.count(1)


def fresh_on(shard: int, shards: int = 2, stem: str = "press") -> str:
    """A topic name nobody else uses, on that shard."""
    while owner_of_name(name := f"{stem}-{next(_numbers)}", shards) != shard:
        pass
    return name


# --- looking -----------------------------------------------------------------------------------------


def levels(server: Server) -> dict[str, int]:
    """Of every process, without asking any of them."""
    board = open_board(read_lock_info(str(server.data_dir)))
    try:
        return {row.name: row[Word.PRESSURE] for row in board.rows()}
    finally:
        board.close()


def gauges(server: Server, name: str) -> dict[str, float]:
    """A metric that has a value for every process; under "" if it has no labels."""
    with Wire(server.port) as wire:
        wire.send(request("GET", "/v0/metrics"))
        status, headers = wire.head()
        text = wire.body(headers).decode()
    assert status == 200, text
    return {
        sample.labels.get("process", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def wait_level(server: Server, process: str, level: int, *, within_s: float = WITHIN_S) -> None:
    eventually(
        lambda: levels(server)[process] >= level, within_s=within_s, every_s=0.005, what=f"{process} at level {level}"
    )


def wait_calm(server: Server, *, within_s: float = WITHIN_S) -> None:
    eventually(lambda: not any(levels(server).values()), within_s=within_s, what="a calm server")


def assert_throttled(answer: Answer) -> None:
    """The whole refusal of a server under pressure."""
    assert answer.refusal == (429, "throttled"), answer
    wait_ms = answer.detail["retry_after_ms"]
    assert isinstance(wait_ms, int)
    assert 0 < wait_ms <= 5_000, answer
    assert "limit" not in answer.detail, "that would be a cap"
    after_s = int(answer.headers["retry-after"])
    assert after_s >= 1
    assert (after_s - 1) * 1_000 < wait_ms <= after_s * 1_000, "both say the same"


# --- pressing ----------------------------------------------------------------------------------------


class Threads:
    """Something that is done again and again by several threads, each with its own connection, until the end."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def start(self, client: Client, step: Callable[[Client], object]) -> None:
        def run() -> None:
            try:
                while not self._stop.is_set():
                    step(client)
            except BaseException as failure:
                self._failures.append(failure)
            finally:
                client.close()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def check(self) -> None:
        if self._failures:
            raise self._failures[0]

    def end(self) -> None:
        """And none of them may have failed."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "one of them never ended"
        self.check()


@contextmanager
def pressed(
    server: Server, shard: int, *, shards: int = 2, lane: Lane = "http1", writers: int = 4
) -> Iterator[Threads]:
    """So long a shard has more to sync than it can bear: by writers who won't be refused, so it never ends."""
    topic = fresh_on(shard, shards, "pressing")
    body = {"records": [{"data": "x" * 60_000}], "disable_backpressure": True}

    def step(client: Client) -> None:
        answer = client.send("POST", f"/v0/topics/{topic}", body)
        assert answer.status in (200, 201), answer

    with server.client(lane) as client:
        # Whether the topic is new is nobody's business; its records need not stay.
        created = client.put(topic, durability="fsync", cap_records=50)
        assert created.status == 201, created
    threads = Threads()
    for _ in range(writers):
        threads.start(server.client(lane), step)
    try:
        yield threads
    finally:
        threads.end()


@contextmanager
def busy_gateway(server: Server) -> Iterator[Threads]:
    """So long a gateway has more to do than it can bear: by questions that are never refused."""
    threads = Threads()

    # A body that has to be decoded, as large as it may be, and nothing that would have to be stored.
    body = b'{"seqs":[%b]}' % b",".join([b"[]"] * 80_000)
    assert len(body) < limits.CONTROL_BODY_BYTES

    def step(client: Client) -> None:
        answer = client.send("POST", "/v0/topics/nobody-home/delete", content=body)
        assert answer.status in (400, 404), answer

    for _ in range(6):
        threads.start(server.client(), step)
    try:
        yield threads
    finally:
        threads.end()


# --- writers that keep account -----------------------------------------------------------------------


class Writer:
    """Writes [its name, 0], [its name, 1] ... into a topic; each again until it is taken, and only then the next."""

    def __init__(self, name: str, topic: str, ask: Callable[[str, dict[str, Any]], Answer | dict[str, Any]]) -> None:
        self.name = name
        self.topic = topic
        self._ask = ask
        self.acked: dict[int, int] = {}  # number -> seq
        self.statuses: Counter[int] = Counter()
        self.waits_ms: list[float] = []

    def step(self, **fields: object) -> None:
        number = len(self.acked)
        body = {"records": [{"data": [self.name, number], "node": "n"}], **fields}
        status, content = self._answer(body)
        self.statuses[status] += 1
        if status in (429, 503):
            time.sleep(0.003)  # impolite on purpose
            return
        assert status in (200, 201), content
        assert content["count"] == 1
        self.acked[number] = content["first_seq"]
        self.waits_ms.append(content["performance"]["throttle_wait_ms"])

    def _answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = self._ask(self.topic, body)
        if isinstance(answer, Answer):
            if answer.status == 429:
                assert_throttled(answer)
            elif answer.status == 503:
                assert answer.error == "storage_full", answer
            return answer.status, answer.json
        if answer["op"] == "error":
            assert answer["code"] == "throttled", answer
            assert 0 < answer["detail"]["retry_after_ms"] <= 5_000
            assert "limit" not in answer["detail"]
            return 429, answer
        assert answer["op"] == "ack", answer
        return 200, answer


def http_writer(name: str, topic: str, client: Client) -> Writer:
    return Writer(name, topic, lambda topic, body: client.send("POST", f"/v0/topics/{topic}", body))


def socket_writer(name: str, topic: str, socket: Socket) -> Writer:
    def publish(topic: str, body: dict[str, Any]) -> dict[str, Any]:
        socket.send_text(json.dumps({"op": "publish", "topic": topic, "request_id": 1, **body}))
        answer: dict[str, Any] = json.loads(socket.receive_text(WITHIN_S))
        return answer

    return Writer(name, topic, publish)


def assert_all_there(api: Client, topic: str, writers: Sequence[Writer]) -> None:
    """What was acknowledged is there, under its seq, once, in its writer's order; and nothing else is."""
    records = read(api, topic)
    assert [record["$seq"] for record in records] == list(range(1, len(records) + 1)), "seqs have holes"
    by_seq = {record["$seq"]: record["data"] for record in records}
    expected = {seq: [writer.name, number] for writer in writers for number, seq in writer.acked.items()}
    assert by_seq == expected
    for writer in writers:
        numbers = [number for name, number in by_seq.values() if name == writer.name]
        assert numbers == list(range(len(writer.acked))), f"{writer.name} is out of order"
