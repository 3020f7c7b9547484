"""A server stopped under load, started with more shards, killed, and started with fewer: what it shows in each life.

One story, told once; the tests look at what was seen.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sharedmemory import names_of

from .client import Answer, Client, Lost
from .server import Server, eventually, run_topics
from .test_topics import DEFAULTS
from .wire import Wire, append_request, request

pytestmark = pytest.mark.e2e

CLASSES = ("ephemeral", "memory", "disk", "fsync")
CONFIG: dict[str, Any] = {
    "type": "queue",
    "ttl_ms": 10_000_000,
    "cap_records": 1_000,
    "cap_bytes": 1_000_000,
    "discard": "reject",
    "durable": True,
    "durability": "fsync",
    "priority": -7,
    "auto_priority": False,
    "auto_create": False,
    "idempotency_window_ms": 3_600_000,
    "dedupe_node": False,
    "lease_ms": 1_234,
    "claim_jitter_ms": 55,
    "max_deliveries": 9,
    "dead_letter": "jobs.dlq",
    "leases_durable": True,
}
TOPICS = ["capped", "configured", "deleted", "empty", "recreated"]
STATE = ("type", "head_seq", "earliest_seq", "next_seq", "count", "bytes", "config", "last_write_ts")


class Writer(threading.Thread):
    """Appends until the server no longer takes it, and remembers what was acknowledged."""

    def __init__(self, server: Server, durability: str) -> None:
        super().__init__()
        self._client = server.client()
        self.durability = durability
        self.topic = f"load.{durability}"
        self.acknowledged: dict[int, str] = {}
        self.refused: Answer | None = None
        self.start()

    def run(self) -> None:
        number = 0
        with self._client as client:
            while self.refused is None:
                number += 1
                data = [f"{number}/{at}" for at in range(3)]
                try:
                    answer = client.append(self.topic, *data, config={"durability": self.durability})
                except Lost:
                    return
                if answer.error is None:
                    self.acknowledged |= dict(zip(answer["seqs"], data, strict=True))
                else:
                    self.refused = answer


class Life:
    """What one life of the server shows."""

    def __init__(self, client: Client) -> None:
        self.states = {name: _chosen(client.state(name, touch=False)) for name in TOPICS}
        self.reads = {name: client.diff(name, include_tags=True).without_performance() for name in TOPICS}
        self.listed = [row["topic"] for row in client.list()["topics"] if row["topic"] in TOPICS]
        self.retry = client.append("configured", "once", idempotency_key="kept")
        self.stale_reader = client.diff("recreated", 3)
        self.dropped = client.state("dropped")
        self.stored = {durability: _read_all(client, f"load.{durability}") for durability in CLASSES}


def _chosen(state: Answer) -> dict[str, Any]:
    return {field: state[field] for field in STATE}


def _read_all(client: Client, topic: str) -> dict[int, str]:
    found: dict[int, str] = {}
    cursor, caught_up = 0, False
    while not caught_up:
        page = client.diff(topic, cursor, limit=1_000)
        found |= dict(zip(page.seqs, page.data, strict=True))
        cursor, caught_up = page["next_from_seq"], page["caught_up"]
    return found


def _populate(client: Client) -> None:
    client.put("configured", **CONFIG)
    client.append("configured", "once", idempotency_key="kept")
    records = [{"data": n, "tag": f"t{n % 3}", "node": "n", "meta": {"n": n}} for n in range(9)]
    client.append_records("deleted", records)
    client.delete("deleted", match="t1")
    client.delete("deleted", before_seq=2)
    client.append("capped", *range(10), config={"cap_records": 3})
    client.append("recreated", 1, 2, 3)
    client.drop("recreated")
    client.append("recreated", "new")
    client.append("dropped", 1)
    client.drop("dropped")
    client.put("empty")
    for durability in CLASSES:
        client.put(f"load.{durability}", durability=durability)


class Story:
    def __init__(self, start: Callable[..., Server]) -> None:
        server = start(TOPICS_WAL_SHARDS=2)
        with server.client() as client:
            _populate(client)
            self.first = Life(client)
        self.writers = [Writer(server, durability) for durability in CLASSES]
        eventually(lambda: all(len(writer.acknowledged) > 60 for writer in self.writers))
        self.exit_code = server.stop()
        for writer in self.writers:
            writer.join(20)
        self.first_log = server.output()

        second = start(TOPICS_WAL_SHARDS=3)
        with second.client() as client:
            self.after_stop = Life(client)
            self.next_ephemeral = client.append("load.ephemeral", "later")["first_seq"]
        processes = [second.popen.pid, *second.pids().values()]
        second.kill()
        self.ps_after_kill = run_topics("ps", TOPICS_DATA_DIR=server.data_dir)
        self.left_over = names_of(processes)

        third = start(TOPICS_WAL_SHARDS=1, TOPICS_GATEWAYS=2)
        with third.client() as client:
            self.after_kill = Life(client)
        third.signal_child("gateway-0")
        self.by_one_gateway = []
        for _ in range(20):
            with Wire(third.port) as wire:
                self.by_one_gateway.append(wire.ask(append_request("polled")).status)
        third.wait_ready()
        with third.client() as client:
            client.put("polled")
            with Wire(third.port) as wire:
                wire.send(request("POST", "/v0/topics/polled/diff", b'{"from_seq":20,"wait_ms":30000}'))
                eventually(lambda: client.state("polled", touch=False)["last_read_ts"] is not None)
                started = time.monotonic()
                third.popen.send_signal(signal.SIGINT)
                self.poll_at_stop = wire.answer()
                self.last_exit_code = third.popen.wait(30)
                self.stop_took_s = time.monotonic() - started


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("lives")
    servers: list[Server] = []

    def start(**environ: object) -> Server:  # on the same folder, always
        server = Server(folder / "data", log=folder / f"server-{len(servers)}.log", **environ)
        servers.append(server)
        server.wait_ready()
        return server

    try:
        return Story(start)
    finally:
        for server in servers:
            server.close()


@pytest.fixture(params=["after_stop", "after_kill"])
def life(story: Story, request: pytest.FixtureRequest) -> Life:
    found: Life = getattr(story, request.param)
    return found


def test_a_stop_under_load_is_clean(story: Story) -> None:
    assert story.exit_code == 0
    assert "Traceback" not in story.first_log


def test_whoever_writes_into_a_stop_is_told(story: Story) -> None:
    errors = {writer.refused.error for writer in story.writers if writer.refused is not None}
    assert errors <= {"shutting_down"}


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_every_acknowledged_record_is_there(story: Story, life: Life, durability: str) -> None:
    writer = next(writer for writer in story.writers if writer.durability == durability)
    stored = life.stored[durability]
    assert writer.acknowledged.items() <= stored.items()
    assert list(stored.values()) == [f"{1 + at // 3}/{at % 3}" for at in range(len(stored))]  # whole, in order, once
    assert len(stored) % 3 == 0


def test_ephemeral_records_are_gone_and_their_seqs_are_not_used_again(story: Story) -> None:
    writer = next(writer for writer in story.writers if writer.durability == "ephemeral")
    assert story.after_stop.stored["ephemeral"] == {}
    assert story.next_ephemeral > max(writer.acknowledged)
    assert story.after_kill.stored["ephemeral"] == {}


@pytest.mark.parametrize("topic", TOPICS)
def test_topics_are_as_they_were(story: Story, life: Life, topic: str) -> None:
    assert life.states[topic] == story.first.states[topic]


@pytest.mark.parametrize("topic", TOPICS)
def test_reads_are_as_they_were(story: Story, life: Life, topic: str) -> None:
    assert life.reads[topic] == story.first.reads[topic]


def test_every_config_field_survives(life: Life) -> None:
    assert life.states["configured"]["config"] == DEFAULTS | CONFIG


def test_the_list_is_as_it_was(life: Life) -> None:
    assert life.listed == TOPICS


def test_a_key_is_remembered(life: Life) -> None:
    assert (life.retry["deduped"], life.retry["seqs"]) == (True, [1])


def test_a_recreated_topic_stays_recreated(life: Life) -> None:
    assert life.stale_reader["tombstone"]["reason"] == "recreated"
    assert life.stale_reader.data == ["new"]


def test_a_deleted_topic_stays_deleted(life: Life) -> None:
    assert life.dropped.refusal == (404, "topic_not_found")


def test_ps_after_a_crash_says_that_none_runs(story: Story) -> None:
    done: subprocess.CompletedProcess[str] = story.ps_after_kill
    assert done.returncode == 1
    assert "no server is running" in done.stderr


def test_a_crash_leaves_no_shared_memory_behind(story: Story) -> None:
    assert story.left_over == set()


def test_a_stop_does_not_wait_for_long_polls(story: Story) -> None:
    assert story.last_exit_code == 0
    assert story.stop_took_s < 20
    assert story.poll_at_stop.status == 200 or story.poll_at_stop.error == "shutting_down"


def test_one_of_two_gateways_serves_while_the_other_is_dead(story: Story) -> None:
    assert story.by_one_gateway == [201] + [200] * 19
