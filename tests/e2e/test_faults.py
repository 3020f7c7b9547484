"""Processes that die, hang or stop: who notices, what is answered meanwhile, and that nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from topics.storage.config import owner_of_name

from .client import Answer, Client, Lane, unique
from .conftest import SMALL
from .server import Server, eventually, gone, run_topics
from .wire import Wire, append_request

pytestmark = pytest.mark.e2e

Start = Callable[..., Server]
SHARDS = 2


def topic_on(shard: int, prefix: str = "on") -> str:
    """A new topic that this shard owns."""
    return next(name for name in iter(lambda: unique(prefix), "") if owner_of_name(name, SHARDS) == shard)


@pytest.fixture(scope="module")
def hardy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose processes are killed, in between tests it is whole again."""
    folder = tmp_path_factory.mktemp("hardy")
    environ = {"TOPICS_WAL_SHARDS": SHARDS, "TOPICS_HEARTBEAT_MS": 600, "TOPICS_RING_BYTES": 64 * 1024}
    server = Server(folder / "data", log=folder / "server.log", **environ)
    server.wait_ready()
    yield server
    server.close()


@pytest.fixture
def client(hardy: Server) -> Iterator[Client]:
    hardy.wait_ready()
    with hardy.client() as client:
        yield client


@contextmanager
def paused(server: Server, name: str) -> Iterator[int]:
    """A process that stands still; it goes on afterwards, if it has not been replaced."""
    pid = server.signal_child(name, signal.SIGSTOP)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


# --- a shard -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "shard"), [("http1", 0), ("http2", 1)])
def test_a_killed_shard_is_unavailable_and_comes_back_with_everything(hardy: Server, lane: Lane, shard: int) -> None:
    lost, kept = topic_on(shard), topic_on(1 - shard)
    hardy.wait_ready()
    with hardy.client(lane) as client:
        client.append(lost, "before", config={"durable": True})
        client.append(kept, "before")
        killed = hardy.signal_child(f"shard-{shard}")
        eventually(lambda: gone(killed))
        seen: list[Answer] = []
        readiness: list[Answer] = []

        def back() -> bool:
            seen.append(client.append(lost, "during", idempotency_key="k"))
            assert client.append(kept, "during").status == 200  # the other one never notices
            if seen[-1].status != 200:
                readiness.append(client.get("/v0/ready"))
            return seen[-1].status == 200

        eventually(back, every_s=0.001)
        assert hardy.pid_of(f"shard-{shard}") != killed
        assert {answer.error for answer in seen[:-1]} <= {"shard_unavailable"}
        assert all(f"shard-{shard}" in answer["error"]["message"] for answer in seen[:-1])
        for answer in readiness:
            if answer.status == 503:  # it may have come back in between
                assert answer.error == "not_ready"
                assert f"shard-{shard}" in answer["error"]["message"]
                assert 0 <= answer.detail["replay_progress"] <= 1
        assert client.diff(lost).data == ["before", "during"]
        eventually(lambda: client.get("/v0/ready").status == 200)
    listing = json.loads(run_topics("ps", "--json", TOPICS_DATA_DIR=hardy.data_dir).stdout)
    assert {line["name"]: line["restarts"] for line in listing["processes"]}[f"shard-{shard}"] == 1


def test_every_question_to_a_shard_that_is_down_is_answered_503(hardy: Server) -> None:
    """While it stands still and is then killed for it; none waits longer than that takes. A retry is safe."""
    topic, retried, other = topic_on(0), topic_on(0), topic_on(1)
    with hardy.client() as client:
        for name in (topic, retried, other):
            client.put(name)
    answers: dict[str, Answer] = {}

    def ask(what: str, question: Callable[[Client], Answer]) -> threading.Thread:
        def run() -> None:
            with hardy.client() as own:
                answers[what] = question(own)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with paused(hardy, "shard-0"):
        started = time.monotonic()
        threads = [
            ask("put", lambda own: own.put(topic, ttl_ms=5_000_000)),
            ask("get", lambda own: own.state(topic)),
            ask("append", lambda own: own.append(retried, "once", idempotency_key="k")),
            ask("create", lambda own: own.append(topic_on(0), 1)),
            ask("diff", lambda own: own.diff(topic)),
            ask("poll", lambda own: own.diff(topic, wait_ms=30_000)),
            ask("delete", lambda own: own.delete(topic, before_seq=1)),
            ask("drop", lambda own: own.drop(topic)),
            ask("list", lambda own: own.list()),
        ]
        with hardy.client() as client:
            assert client.append(other, 1)["seqs"] == [1]
            assert client.diff(other).seqs == [1]
            assert client.get("/v0/health").status == 200
        for thread in threads:
            thread.join(20)
    assert time.monotonic() - started < 15
    assert {what: answer.refusal for what, answer in answers.items()} == dict.fromkeys(
        ("put", "get", "append", "create", "diff", "poll", "delete", "drop", "list"), (503, "shard_unavailable")
    )
    assert answers["append"].detail["outcome"] == "unknown"
    hardy.wait_ready()
    with hardy.client() as client:
        assert client.append(retried, "once", idempotency_key="k")["seqs"] == [1]
        assert client.append(retried, "once", idempotency_key="k")["deduped"] is True
        assert client.diff(retried).data == ["once"]


def test_a_pause_shorter_than_the_patience_costs_nothing_but_time(server: Server, connect: Callable[[], Wire]) -> None:
    topic = topic_on(0)
    wire = connect()
    with paused(server, "shard-0") as pid:
        wire.send(append_request(topic))
        wire.assert_silent(for_s=0.3)
    assert wire.answer()["seqs"] == [1]
    assert server.pid_of("shard-0") == pid


def test_a_call_has_a_deadline_of_its_own(small_server: Server) -> None:
    """Before the shard is given up for hung; it goes on as if nothing had been."""
    topic = topic_on(0)
    timeout_s = SMALL["TOPICS_CALL_TIMEOUT_MS"] / 1_000
    with small_server.client() as client:
        with paused(small_server, "shard-0") as pid:
            started = time.monotonic()
            assert client.append(topic, 1, idempotency_key="k").refusal == (503, "shard_unavailable")
            assert timeout_s - 0.1 < time.monotonic() - started < timeout_s + 3
        assert client.append(topic, 1, idempotency_key="k").status in (200, 201)
        assert client.diff(topic).data == [1]
    assert small_server.pid_of("shard-0") == pid


def test_messages_may_be_much_larger_than_the_rings(hardy: Server, client: Client) -> None:
    topic = topic_on(0)
    data = ["x" * 500_000, "y" * 500_000] * 5
    assert client.append(topic, *data)["count"] == 10
    read: list[str] = []
    while len(read) < 10:
        read += client.diff(topic, len(read), limit=2).data
    assert read == data
    with hardy.client("http2") as other:
        assert other.diff(topic, 9).data == data[9:]


# --- a gateway ---------------------------------------------------------------------------------------


def test_connections_made_while_the_gateway_is_dead_are_served_by_the_next(hardy: Server) -> None:
    topic = topic_on(0)
    killed = hardy.signal_child("gateway-0")
    eventually(lambda: gone(killed))
    wires = [Wire(hardy.port) for _ in range(20)]
    for wire in wires:
        wire.send(append_request(topic))
    assert sorted(wire.answer()["first_seq"] for wire in wires) == list(range(1, 21))
    for wire in wires:
        wire.close()
    assert hardy.pid_of("gateway-0") != killed
    hardy.wait_ready()


def test_what_was_acknowledged_before_the_gateway_died_is_there(hardy: Server, client: Client) -> None:
    topic = topic_on(1)
    client.append(topic, 1, 2)
    hardy.signal_child("gateway-0")
    hardy.wait_ready()
    with hardy.client() as again:
        assert again.diff(topic).data == [1, 2]


# --- quotas ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_gateway_that_dies_again_and_again_is_always_back(start_server: Start) -> None:
    """Eight deaths: any other process would stay down, and the server would end with its last gateway."""
    server = start_server(TOPICS_GATEWAYS=1, TOPICS_WAL_SHARDS=1)
    for death in range(1, 9):
        killed = server.signal_child("gateway-0")
        eventually(lambda killed=killed: gone(killed))
        with server.client() as client:  # waits in the backlog, for as long as the pause
            assert client.append("deaths", death).status in (200, 201)
            assert client.diff("deaths").data == list(range(1, death + 1))
        server.wait_ready()
    restarts = {line.name: line.restarts for line in server.ps().processes}
    assert restarts["gateway-0"] == 8
    assert sum(restarts.values()) == 8
    assert server.stop() == 0


@pytest.mark.full
def test_quotas_hold_over_all_shards_and_classes(start_server: Start) -> None:
    server = start_server(TOPICS_MAX_TOPICS=3, TOPICS_MAX_TOTAL_BYTES=10_000, TOPICS_WAL_SHARDS=SHARDS)
    topics = [topic_on(0), topic_on(1), topic_on(0)]
    with server.client() as client:
        for topic in topics:
            client.put(topic, durability="fsync" if topic == topics[1] else "disk")
        for refused in (client.put(topic_on(1)), client.append(topic_on(0), 1)):
            assert refused.refusal == (429, "throttled")
            assert (refused.detail["limit"], refused.detail["max"]) == ("max_topics", 3)
        assert client.put(topics[0], ttl_ms=1_000_000).status == 200
        assert client.append(topics[0], "x" * 4_000).status == 200
        assert client.append(topics[1], "x" * 4_000).status == 200
        refused = client.append(topics[2], "x" * 4_000)
        assert refused.refusal == (429, "throttled")
        assert (refused.detail["limit"], refused.detail["max"]) == ("max_total_bytes", 10_000)
        assert client.state(topics[2])["head_seq"] == 0
        client.delete(topics[1], before_seq=2)
        eventually(lambda: client.append(topics[2], "x" * 4_000).status == 200)
        client.drop(topics[1])
        eventually(lambda: client.put(topic_on(1)).status == 201)
