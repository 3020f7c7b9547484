"""One process of the server dies: the others go on, it comes back, and nobody waits longer than they must."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
from crash_oracle import Oracle
from crash_server import EXHAUSTIVE, Answer, Client, NoAnswer, Server, children_of, eventually, gone
from crash_workload import Workload, create_topics
from sharedmemory import names_of

from topics.shm.counters import State
from topics.storage.config import owner_of_name

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 120)]

Start = Callable[..., Server]


def name_on(shard: int, stem: str = "topic") -> str:
    return next(name for n in range(100) if owner_of_name(name := f"{stem}-{n}", 2) == shard)


def in_background(call: Callable[..., Answer], server: Server) -> tuple[threading.Thread, list[Answer | NoAnswer]]:
    answers: list[Answer | NoAnswer] = []

    def run() -> None:
        client = server.client()
        try:
            answers.append(call(client))
        except NoAnswer as error:
            answers.append(error)
        finally:
            client.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, answers


@pytest.mark.gate
def test_a_shard_dies_with_requests_on_their_way(serve: Start) -> None:
    # Longer than the test waits: who is answered has been told of the death.
    server = serve(shards=2, env={"TOPICS_CALL_TIMEOUT_MS": "120000", "TOPICS_HEARTBEAT_MS": "60000"})
    oracle = Oracle()
    client = server.client()
    mine, other = (oracle.create(client, name_on(shard), "fsync") for shard in (0, 1))
    for topic in (mine, other):
        topic.append_plain(client, 5)
    # A shard that stands still has everything that is sent to it in its ring, unanswered.
    pid = server.signal_child("shard-0", signal.SIGSTOP)
    calls: list[Callable[[Client], Answer]] = [
        lambda c: c.append(mine.name, "in flight", idempotency_key="flight"),
        lambda c: c.diff(mine.name, 5, wait_ms=20_000),
        lambda c: c.diff(mine.name),
        lambda c: c.get(mine.name),
        lambda c: c.delete(mine.name, before_seq=1),
    ]
    waiting = []
    for call in calls:
        sent = server.sent("gateway-0", "shard-0")
        waiting.append(in_background(call, server))
        eventually(lambda sent=sent: server.sent("gateway-0", "shard-0") > sent, what="a request in the shard's ring")
    other.append_plain(client, 5)
    assert not any(answers for _, answers in waiting)
    os.kill(pid, signal.SIGKILL)
    for thread, answers in waiting:
        thread.join(30)
        assert answers, "no answer: the deadline is for shards that hang, a death is told at once"
        (answer,) = answers
        assert isinstance(answer, Answer), answer
        assert (answer.status, answer.code) == (503, "shard_unavailable")
        assert answer.outcome_unknown
        assert answer.retry_after
    other.append_plain(client, 5)
    eventually(lambda: client.get(mine.name).ok, what="the shard back")
    server.wait_ready()
    again = client.append(mine.name, "in flight", idempotency_key="flight").body
    assert again["first_seq"] == 6
    shown = [record["data"] for record in client.diff(mine.name, 5).body["records"]]
    assert shown == ["in flight"], "exactly once, whether or not the first one was written"
    assert client.delete(mine.name, before_seq=7).ok
    mine.deletions.clear()
    other.check(client, crashed=False)
    assert server.restarts("shard-0") == 1
    assert server.restarts("shard-1") == 0
    assert server.restarts("gateway-0") == 0


def test_shards_die_under_load_again_and_again(serve: Start, seed: int) -> None:
    oracle = Oracle()
    server = serve(shards=2)
    client = server.client()
    # Ephemeral records live in one shard only: what is left of them depends on who died when.
    topics = [topic for topic in create_topics(oracle, client) if topic.durability != "ephemeral"]
    for topic in list(oracle.topics.values()):
        if topic not in topics:
            assert topic.drop(client).ok
    load = Workload(oracle, server, topics, seed=seed, outlives=True, classes=("fsync", "disk", "memory"))
    for name in ("shard-0", "shard-1", "shard-0", "shard-1")[: 4 if EXHAUSTIVE else 2]:
        load.wait_done(150)
        before = server.restarts(name)
        server.signal_child(name)
        eventually(
            lambda name=name, before=before: server.restarts(name) > before and server.state(name) is State.READY,
            what=f"{name} back\n{server.log()}",
        )
    load.wait_done(150)
    load.finish()
    oracle.check(server, crashed=False)
    oracle.check_keys(server)
    server.kill()
    oracle.restarted()
    oracle.check(serve(shards=2))


@pytest.mark.gate
def test_the_gateway_dies_and_connections_made_meanwhile_are_served(serve: Start) -> None:
    server = serve(shards=2)
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "t", "fsync")
    topic.append_plain(client, 3)
    pid = server.pid_of("gateway-0")
    shard = f"shard-{owner_of_name('t', 2)}"
    sent = server.sent("gateway-0", shard)
    poll, polled = in_background(lambda c: c.diff("t", 3, wait_ms=20_000), server)
    eventually(lambda: server.sent("gateway-0", shard) > sent, what="a poll in the shard's ring")
    server.signal_child("gateway-0")
    # From the moment of its death on: every connection is accepted by the kernel and answered by the next gateway.
    callers = [in_background(lambda c, n=n: c.append("t", n), server) for n in range(20)]
    poll.join(30)
    assert isinstance(polled[0], NoAnswer)
    first_seqs = set()
    lost = 0
    for thread, answers in callers:
        thread.join(30)
        assert answers, "a caller still waits"
        if isinstance(answers[0], NoAnswer):
            lost += 1  # accepted by the old one in its last moment
        else:
            assert answers[0].ok, answers[0].raw
            first_seqs.add(answers[0].body["first_seq"])
    assert lost <= 3
    assert len(first_seqs) == 20 - lost
    assert server.pid_of("gateway-0") != pid
    assert server.restarts("shard-0") == server.restarts("shard-1") == 0
    assert server.ready().ok
    topic_records = server.client().diff("t").body["records"]
    assert len(topic_records) in (3 + len(first_seqs), 3 + 20)


def test_gateway_and_shard_die_at_once(serve: Start) -> None:
    server = serve(shards=2)
    oracle = Oracle()
    client = server.client()
    topics = [oracle.create(client, name_on(shard), "disk") for shard in (0, 1)]
    for topic in topics:
        topic.append_plain(client, 4)
    for name in ("gateway-0", "shard-1"):
        server.signal_child(name)
    eventually(lambda: server.restarts("gateway-0") and server.restarts("shard-1"), what="both restarted")
    server.wait_ready()
    for topic in topics:
        eventually(lambda topic=topic: server.client().get(topic.name).ok, what=f"{topic.name} served")
    oracle.check(server)
    for topic in topics:
        topic.append_plain(server.client(), 4)


@pytest.mark.gate
def test_the_supervisor_dies_and_nothing_is_left(serve: Start) -> None:
    server = serve(shards=2)
    oracle = Oracle()
    client = server.client()
    topics = create_topics(oracle, client, per_class=1)
    load = Workload(oracle, server, topics, seed=1, workers=3)
    load.wait_done(100)
    children = children_of(server.pid)
    assert len(children) == 6  # gateway, router, coordinator, two shards; the fork server
    os.kill(server.pid, signal.SIGKILL)
    server.popen.wait()
    eventually(lambda: all(map(gone, children)), what="the children gone")
    load.finish()
    assert names_of([server.pid, *children]) == set()
    oracle.restarted()
    oracle.check(serve(shards=2))


def test_the_supervisor_dies_while_a_shard_stands_still(serve: Start) -> None:
    """The kernel's parting signal reaches a stopped process too, and the lock goes with the last writer."""
    server = serve(shards=2)
    client = server.client()
    assert client.append("t", 1).ok
    stopped = server.signal_child("shard-0", signal.SIGSTOP)
    children = children_of(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    server.popen.wait()
    eventually(lambda: all(map(gone, children)), what="the children gone")
    assert gone(stopped)
    assert serve(shards=2).client().diff("t").body["head_seq"] == 1
