"""Processes die while jobs are claimed and done: no job is lost, none is delivered again after its ack was answered,
and leases are what they were."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import livefiles
import pytest
from crash_queues import (
    Auditor,
    Fleet,
    Stream,
    claim,
    counters,
    dead_jobs,
    end_supervisor,
    job,
    kill_processes,
    make_queue,
    now_ms,
    numbers_in,
    say,
)
from crash_routers import World, name_on
from crash_scene import HELD, Entry, Scene
from crash_server import EXHAUSTIVE, SMALL, Answer, Client, NoAnswer, Server, eventually

from topics.shm.counters import State

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 180)]

Start = Callable[..., Server]


LIGHT = {"TOPICS_WAL_FILE_BYTES": str(4 << 20)}  # each life begins another file, and reserves it
# For tests that stop a process: it is not found to hang, and no call is answered because its time is up.
UNHURRIED = {"TOPICS_HEARTBEAT_MS": "60000", "TOPICS_CALL_TIMEOUT_MS": "120000"}
VICTIMS = ["queue", "shard-0", "shard-1", "gateway-0", "router", "queue+shard-0", "queue+gateway-0"]


@pytest.fixture
def serve(serve: Start) -> Start:
    def start(*, env: Mapping[str, str] | None = None, **how: Any) -> Server:
        return serve(env={**LIGHT, **(env or {})}, **how)

    return start


def some(rng: random.Random, what: list[str], few: int) -> list[str]:
    """A few of these in any order; if there is time all of them, several times. In between the whole tree: a process
    that dies too often is given up."""
    rounds = [[*rng.sample(what, len(what)), "tree"] for _ in range(4)] if EXHAUSTIVE else [rng.sample(what, few)]
    chosen = [each for some in rounds for each in some]
    print("some:", chosen)
    return chosen


# --- under load --------------------------------------------------------------------------------------


@pytest.mark.gate
def test_one_process_after_another_dies(serve: Start, seed: int) -> None:
    fleet = Fleet(World(serve), seed=seed)
    fleet.queue(name_on(0, "synced"), leases_durable=True, durability="fsync")
    fleet.queue(name_on(1, "written"), leases_durable=False, durability="disk")
    for victim in some(fleet.rng, VICTIMS, 5):
        fleet.wait_acked(fleet.rng.randint(20, 80))
        fleet.kill(victim)
    fleet.wait_acked(50)
    fleet.finish()
    fleet.drain()


@pytest.mark.parametrize("env", [SMALL, {}] if EXHAUSTIVE else [SMALL], ids=lambda env: "small" if env else "default")
def test_the_whole_tree_dies(serve: Start, seed: int, env: dict[str, str]) -> None:
    fleet = Fleet(World(serve, env=env), seed=seed)
    fleet.queue(name_on(0, "synced"), leases_durable=True, durability="fsync")
    fleet.queue(name_on(1, "written"), leases_durable=False, durability="disk")
    fleet.queue(name_on(1, "mixed"), leases_durable=True, durability="disk", streams=0)
    for at in range(15 if EXHAUSTIVE else 2):
        fleet.wait_acked(fleet.rng.randint(50, 150))
        fleet.kill("supervisor" if at % 2 else "tree", shards=fleet.rng.choice((1, 2, 2, 3)))
    fleet.wait_acked(50)
    fleet.finish()
    fleet.drain()


def test_the_coordinator_dies_while_it_comes_back(serve: Start, seed: int) -> None:
    """Again and again, before it has read all of its logs."""
    fleet = Fleet(World(serve), seed=seed)
    fleet.queue(name_on(0, "q"), leases_durable=True, durability="disk")
    fleet.queue(name_on(1, "q"), leases_durable=False, durability="disk")
    fleet.wait_acked(100)
    server = fleet.world.server
    start = now_ms()
    upset = (start, float("inf"))
    for ledger in fleet.ledgers:
        ledger.upsets.append(upset)
    for _ in range(3 if EXHAUSTIVE else 2):
        pid = server.signal_child("queue")
        eventually(lambda pid=pid: server.pid_of("queue") != pid, what="another coordinator")
        time.sleep(fleet.rng.uniform(0, 0.4))  # it may have come to anything by then
    server.wait_state("queue", State.READY)
    for ledger in fleet.ledgers:
        ledger.upsets = [(start, now_ms())]
    fleet.wait_acked(50)
    fleet.finish()
    fleet.drain()


# Where the queue's shard dies; the first ones are in the default family.
POINTS = ["synced:40", "flushed:1"]
MORE_POINTS = [f"{point}:{n}" for point in ("write", "written", "sync", "synced") for n in (5, 30, 60)]
MORE_POINTS += [f"{point}:{n}" for point in ("publish", "reply") for n in (3, 70)]
MORE_POINTS += ["rotated:1", "flushed:3", "renamed:1", "rename:3", "snapshot:1", "snapshot:2"]


def test_dying_at_one_boundary_after_another(serve: Start, seed: int) -> None:
    """On one folder; one life to die in, whose shard comes back and goes on, then the next."""
    world = World(serve, shards=1, env=SMALL)
    fleet = Fleet(world, seed=seed)
    fleet.queue("synced", leases_durable=True, durability="fsync", streams=0, pace_s=0.03)
    written = fleet.queue(
        "written",
        leases_durable=False,
        durability="disk",
        pace_s=0.03,
        max_deliveries=2,
        dead_letter="dead",
        poison=lambda number: number % 5 == 0,
        leases_ms=(300, 1_500),
    )
    for point in (
        fleet.rng.sample(POINTS + MORE_POINTS, len(POINTS + MORE_POINTS)) if EXHAUSTIVE else some(fleet.rng, POINTS, 1)
    ):
        print("point:", point)
        fleet.moved(written)
        fleet.wait_acked(10)
        start = now_ms()
        upset = (start, float("inf"))
        for ledger in fleet.ledgers:
            ledger.upsets.append(upset)
            ledger.stream_cuts.append(start)
        world.server.kill()
        world.server = serve(shards=1, env={**SMALL, "TOPICS_KILL_POINT": point}, wait=False)
        world.client = world.new_client()
        for _ in range(10):
            with contextlib.suppress(AssertionError):
                eventually(world.server.deaths, within_s=2.0)
                break
            for ledger in fleet.ledgers:
                ledger.resting = not ledger.resting
        else:
            raise AssertionError(f"nobody came by {point}\n{world.server.log()[-2_000:]}")
        for ledger in fleet.ledgers:
            ledger.resting = False
        fleet.kill("tree")
        for ledger in fleet.ledgers:
            ledger.upsets.remove(upset)
            ledger.upsets.append((start, now_ms()))
        fleet.raise_errors()
    fleet.wait_acked(30)
    fleet.finish()
    fleet.drain()


# --- dead letters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("leases_durable", [True, False])
def test_dead_letters_while_processes_die(serve: Start, seed: int, leases_durable: bool) -> None:
    """The coordinator, the queue's shard and the dead letter's shard while jobs are on their way: each job is always
    in at least one of the two, and at the end in one only."""
    world = World(serve)
    fleet = Fleet(world, seed=seed)
    queue, dead = name_on(0, "queue"), name_on(1, "dead")
    ledger = fleet.queue(
        queue,
        leases_durable=leases_durable,
        durability="fsync" if leases_durable else "disk",
        max_deliveries=2,
        dead_letter=dead,
        poison=lambda number: number % 2 == 0,
        leases_ms=(100, 1_000),
        streams=0,
        pace_s=0.005,
    )
    auditor = Auditor(world, ledger)

    def moved() -> int:
        assert auditor.error is None, auditor.error
        return fleet.moved(ledger)

    for victim in some(fleet.rng, ["queue", "shard-0", "shard-1", "queue+shard-1", "tree"], 2):
        goal = moved() + fleet.rng.randint(10, 40)
        eventually(lambda goal=goal: moved() >= goal, what="more dead letters")
        fleet.kill(victim)
    goal = moved() + 10
    eventually(lambda: moved() >= goal, what="more dead letters")
    fleet.finish()
    fleet.drain()  # moves that were refused for a moment are not put off for long
    auditor.finish()
    assert auditor.audits > 5
    found = dead_jobs(world, ledger)
    assert {number for number, _ in found} >= {number for number in ledger.produced if ledger.poison(number)}
    for number, meta in found:
        assert int(meta["$dead_letter_deliveries"]) >= 2, (number, meta)
        assert not leases_durable or meta["$dead_letter_deliveries"] == "2", (number, meta)
    # The last ones are counted when their deletes are synced.
    eventually(
        lambda: counters(world, queue)["dead_lettered"] == len(found),
        what=f"{len(found)} dead letters counted",
    )
    assert world.state(dead)["config"]["durability"] == ("fsync" if leases_durable else "disk")


# --- what leases are after an end --------------------------------------------------------------------


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One folder for all ends, one after another."""
    folder = tmp_path_factory.mktemp("standing")
    servers: list[Server] = []

    def start(**how: Any) -> Server:
        servers.append(Server(folder / "data", env=LIGHT, **how))
        return servers[-1].wait_ready()

    yield World(start)
    for server in servers:
        server.close()


@pytest.fixture
def standing(lasting: World) -> World:
    return whole(lasting)


def whole(world: World) -> World:
    """With two shards that serve, whatever the test before has left."""
    if world.server.popen.poll() is not None or world.server.shards != 2:
        world.restart("kill", shards=2)
    world.server.wait_ready()
    world.client = world.new_client()
    return world


ENDS = [
    "queue",
    "shard-0",
    "queue+shard-0",
    "queue+gateway-0",
    "tree",
    "supervisor",
    "stop",
    "stop, then 3",
    "tree, then 1",
]


@pytest.mark.parametrize(
    "end",
    [pytest.param(end, marks=pytest.mark.gate) if end in ("queue", "tree", "stop, then 3") else end for end in ENDS],
)
def test_leases_are_as_they_were(lasting: World, end: str) -> None:
    """Both with durable leases and without: what was written survives any process. Also under another number of
    shards, for which the whole server stops or dies."""
    what, _, shards = end.partition(", then ")
    world = lasting if shards else whole(lasting)
    world.client = world.new_client()
    stem = end.replace("+", "-").replace(", ", "-").replace(" ", "-")
    scenes = [Scene(world, name_on(0, f"{stem}.{durable}"), leases_durable=durable) for durable in (True, False)]
    how = {"shards": int(shards)} if shards else {}
    ended = time.monotonic()
    if what in ("tree", "stop"):
        world.restart("kill" if what == "tree" else "stop", **how)
    elif what == "supervisor":
        end_supervisor(world.server)
        world.restart("kill")
    else:
        kill_processes(world, what.split("+"))
        assert time.monotonic() - ended < 30, "takes its time to come back"
        world.client = world.new_client()
    for scene in scenes:
        scene.check()


def test_another_end_changes_nothing(serve: Start) -> None:
    """What was rebuilt once is rebuilt from what the first rebuilding left."""
    world = World(serve, env=SMALL)
    scenes = [Scene(world, name_on(0, f"q.{durable}"), leases_durable=durable) for durable in (True, False)]
    for end in ("stop", "kill", "stop") if EXHAUSTIVE else ("kill",):
        world.restart(end)
    kill_processes(world, ["queue"])
    for scene in scenes:
        scene.check()


def test_the_coordinator_is_away(serve: Start) -> None:
    """Whoever asks is told so at once, reads and writes go on, and it is back within a few seconds."""
    world = World(serve)
    client = world.client
    make_queue(world, "q")
    assert client.append("q", job(0), job(1)).ok
    (held,) = claim(client, "q", "a").body["claimed"]
    world.server.signal_child("queue")
    killed = time.monotonic()
    answers: list[Answer] = []

    def back() -> bool:
        answers.append(say(client, "extend", "q", "a", [held["$seq"]], lease_ms=HELD))
        assert client.append("log", len(answers)).ok
        assert client.append("q", job(1 + len(answers))).ok
        return answers[-1].ok

    eventually(back, what="the coordinator")
    assert time.monotonic() - killed < 20
    for answer in answers[:-1]:
        assert (answer.status, answer.code) == (503, "shard_unavailable"), answer
        assert "queue" in answer.body["error"]["message"], answer
        assert answer.retry_after, answer
    assert answers[-1].body["extended"] == 1
    assert world.server.restarts("queue") == 1
    assert world.server.restarts("shard-0") == world.server.restarts("gateway-0") == 0


def kill_coordinator(world: World) -> None:
    kill_processes(world, ["queue"])


def held_in(world: World, queue: str, node: str, entries: list[Entry]) -> None:
    """These are still the node's, and nobody else gets them."""
    mine = [entry["$seq"] for entry in entries]
    others = claim(world.client, queue, "thief", max=1_000, lease_ms=HELD).body["claimed"]
    assert not {entry["$seq"] for entry in others} & set(mine)
    answer = say(world.client, "ack", queue, node, mine, lease_ids=[entry["lease_id"] for entry in entries])
    assert answer.body["skipped"] == [], answer


@pytest.mark.parametrize("end", ["queue", "tree"])
def test_a_queue_made_again_has_no_leases_of_the_one_before(standing: World, end: str) -> None:
    world, queue = standing, f"again.{end}"
    client = world.client
    for _ in range(2):
        make_queue(world, queue, max_deliveries=1, dead_letter=f"{queue}.dead", leases_durable=True)
        assert client.append(queue, *map(job, range(5))).ok
        assert claim(client, queue, "a", max=2).body["count"] == 2
        assert say(client, "nack", queue, "a", [1]).body["nacked"] == 1
        claimed = claim(client, queue, "a", max=1, lease_ms=HELD).body["claimed"]
        assert [(entry["$seq"], entry["deliveries"]) for entry in claimed] == [(3, 1)]
        eventually(lambda: counters(world, queue)["dead_lettered"] == 1, what="a dead letter")
        assert client.call("DELETE", f"/v0/topics/{queue}").ok
    make_queue(world, queue, leases_durable=True)
    assert client.append(queue, *map(job, range(5))).ok
    if end == "tree":
        world.restart("kill")
    else:
        kill_coordinator(world)
    assert counters(world, queue) == {"ready": 5, "in_flight": 0, "dead_lettered": 0, "count": 5}
    entries = claim(world.client, queue, "b", max=10).body["claimed"]
    assert [entry["deliveries"] for entry in entries] == [1] * 5
    assert say(world.client, "ack", queue, "a", [2, 3]).body["acked"] == 0
    held_in(world, queue, "b", entries)


def test_leases_become_durable_and_stop_to_be(standing: World) -> None:
    world, queue = standing, "changed"
    entries: list[Entry] = []
    for at, durable in enumerate((False, True, False, True)):
        make_queue(world, queue, leases_durable=durable)
        assert world.client.append(queue, *map(job, range(4))).ok
        entries += claim(world.client, queue, "a", max=2, lease_ms=HELD).body["claimed"]
        assert say(world.client, "ack", queue, "a", [entries.pop()["$seq"]]).body["acked"] == 1  # all is written
        if at % 2:
            world.restart("kill")
        else:
            kill_coordinator(world)
    assert counters(world, queue) == {"ready": 8, "in_flight": 4, "dead_lettered": 0, "count": 12}
    held_in(world, queue, "a", entries)


def test_jobs_are_deleted_while_the_coordinator_is_away(standing: World) -> None:
    world, queue = standing, name_on(0, "deleted")
    make_queue(world, queue, leases_durable=True)
    client = world.client
    assert client.append(queue, *map(job, range(10))).ok
    entries = claim(client, queue, "a", max=6, lease_ms=HELD).body["claimed"]
    assert say(client, "nack", queue, "a", [6], delay_ms=HELD).body["nacked"] == 1
    for process in ("queue", "queue+shard-0"):
        before = world.server.restarts("queue")
        world.server.signal_child("queue")
        assert client.delete(queue, before_seq=3 if process == "queue" else 7).ok
        eventually(lambda before=before: world.server.restarts("queue") > before, what="another coordinator")
        world.server.wait_ready()
        if process == "queue":
            assert counters(world, queue) == {"ready": 4, "in_flight": 3, "dead_lettered": 0, "count": 8}
            assert say(client, "ack", queue, "a", [1, 2]).body["skipped"] == [1, 2]
            assert say(client, "ack", queue, "a", [3], lease_ids=[entries[2]["lease_id"]]).body["acked"] == 1
        else:
            kill_processes(world, ["queue", "shard-0"])
    assert counters(world, queue) == {"ready": 4, "in_flight": 0, "dead_lettered": 0, "count": 4}
    assert [entry["$seq"] for entry in claim(client, queue, "b", max=10).body["claimed"]] == [7, 8, 9, 10]


def test_jobs_that_die_with_their_shard(standing: World) -> None:
    """Of an ephemeral queue only the coordinator's death leaves everything as it was."""
    world, queue = standing, name_on(0, "ephemeral")
    make_queue(world, queue, durability="ephemeral", lease_ms=HELD)
    client = world.client
    assert client.append(queue, *map(job, range(6))).ok
    entries = claim(client, queue, "a", max=3).body["claimed"]
    assert say(client, "ack", queue, "a", [entries.pop()["$seq"]]).body["acked"] == 1
    kill_coordinator(world)
    assert counters(world, queue) == {"ready": 3, "in_flight": 2, "dead_lettered": 0, "count": 5}
    assert say(client, "ack", queue, "a", [1]).body["acked"] == 1
    for victim in ("shard-0", "tree") if EXHAUSTIVE else ("shard-0",):
        if victim == "tree":
            world.restart("kill")
        else:
            kill_processes(world, [victim])
        client = world.client = world.new_client()
        assert counters(world, queue) == {"ready": 0, "in_flight": 0, "dead_lettered": 0, "count": 0}
        assert say(client, "ack", queue, "a", [2]).body["acked"] == 0
        assert claim(client, queue, "a", max=9).body["count"] == 0
        seq = client.append(queue, job(7)).body["first_seq"]
        assert seq > 6
        (fresh,) = claim(client, queue, "b").body["claimed"]
        assert (fresh["$seq"], fresh["deliveries"]) == (seq, 1)


def test_a_coordinator_that_hangs_is_replaced(serve: Start) -> None:
    """A pause costs nothing but time; one that does not end costs a restart."""
    world = World(serve, env={"TOPICS_HEARTBEAT_MS": "600"})
    make_queue(world, "q", leases_durable=True)
    client = world.client
    assert client.append("q", *map(job, range(6))).ok
    entries = claim(client, "q", "a", max=3, lease_ms=HELD).body["claimed"]
    pid = world.server.signal_child("queue", signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(pid, signal.SIGCONT)
    assert say(client, "ack", "q", "a", [entries.pop()["$seq"]]).body["acked"] == 1
    assert world.server.restarts("queue") == 0
    world.server.signal_child("queue", signal.SIGSTOP)
    assert client.append("q", job(6)).ok
    eventually(lambda: world.server.restarts("queue") == 1, what="another coordinator")
    world.server.wait_ready()
    assert counters(world, "q") == {"ready": 4, "in_flight": 2, "dead_lettered": 0, "count": 6}
    held_in(world, "q", "a", entries)


def test_many_leases_are_there_again_soon(standing: World) -> None:
    world = standing
    client = world.client
    large, queues = "many.leases", [f"many.{at}" for at in range(60)]
    for queue in (large, *queues):
        make_queue(world, queue)
    count = 100_000 if EXHAUSTIVE else 20_000
    for at in range(0, count, 1_000):
        assert client.append(large, *map(job, range(1_000))).ok
        assert claim(client, large, f"node-{at % 5}", max=1_000, lease_ms=HELD).body["count"] == 1_000
    for queue in queues:
        assert client.append(queue, *map(job, range(4))).ok
        assert claim(client, queue, "a", max=3, lease_ms=HELD).body["count"] == 3
        assert say(client, "ack", queue, "a", [1]).body["acked"] == 1
    assert say(client, "ack", large, "node-0", [1]).body["acked"] == 1
    world.server.signal_child("queue")
    killed = time.monotonic()
    answer = world.insist(lambda c: say(c, "ack", large, "node-0", [2]))
    assert answer.body["acked"] == 1
    assert time.monotonic() - killed < 20 + count / 5_000
    assert counters(world, large) == {"ready": 0, "in_flight": count - 2, "dead_lettered": 0, "count": count - 2}
    for queue in queues:
        assert counters(world, queue) == {"ready": 1, "in_flight": 2, "dead_lettered": 0, "count": 3}


# --- requests on their way ---------------------------------------------------------------------------


def in_background(world: World, call: Callable[..., Answer]) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []

    def run() -> None:
        with contextlib.suppress(NoAnswer):
            answers.append(call(world.new_client()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, answers


def sent_in_background(
    world: World, ring: tuple[str, str], call: Callable[[Client], Answer]
) -> tuple[threading.Thread, list[Answer]]:
    """Likewise; what it asks for has gone into this ring."""
    before = world.server.sent(*ring)
    found = in_background(world, call)
    eventually(lambda: world.server.sent(*ring) > before, what=f"a request in the ring of {ring}")
    return found


def _say(verb: str, queue: str, seq: int, client: Client, **fields: object) -> Answer:
    return say(client, verb, queue, "a", [seq], **fields)


def _claim(queue: str, client: Client) -> Answer:
    return claim(client, queue, "b", lease_ms=1_000)


@pytest.mark.parametrize("victim", ["queue", "shard-0"])
def test_a_process_dies_with_requests_on_their_way(serve: Start, victim: str) -> None:
    """An ack that was not answered is either done or the job comes back; a claim that was not answered keeps a job
    at most until its lease ends."""
    world = World(serve, env=UNHURRIED)
    client = world.client
    queues = [name_on(0, f"q.{durable}") for durable in (True, False)]
    for durable, queue in zip((True, False), queues, strict=True):
        durability = "fsync" if durable else "disk"
        make_queue(world, queue, leases_durable=durable, durability=durability)
        assert client.append(queue, *map(job, range(8))).ok
        assert claim(client, queue, "a", max=4, lease_ms=HELD).body["count"] == 4
    pid = world.server.signal_child(victim, signal.SIGSTOP)
    waiting = {}
    ring = ("gateway-0", "queue") if victim == "queue" else ("queue", "shard-0")  # the way to where an ack is held up
    for queue in queues:
        waiting[queue, "ack"] = sent_in_background(world, ring, partial(_say, "ack", queue, 1))
    for queue in queues:
        ring = ("gateway-0", "queue")
        waiting[queue, "nack"] = sent_in_background(world, ring, partial(_say, "nack", queue, 2))
        waiting[queue, "extend"] = sent_in_background(world, ring, partial(_say, "extend", queue, 3, lease_ms=2 * HELD))
        waiting[queue, "claim"] = sent_in_background(world, ring, partial(_claim, queue))
    os.kill(pid, signal.SIGKILL)
    told: dict[tuple[str, str], Answer] = {}
    for key, (thread, answers) in waiting.items():
        thread.join(30)
        assert answers, f"no answer to {key}: a death is told at once, whatever the deadline of a call"
        told[key] = answers[0]
        assert answers[0].ok or answers[0].code == "shard_unavailable", (key, answers[0])
        assert answers[0].ok or answers[0].retry_after, (key, answers[0])
    for queue in queues:
        # The ack needs the shard and the coordinator; nobody can have answered that it was done.
        assert not told[queue, "ack"].ok, told[queue, "ack"]
        assert told[queue, "ack"].outcome_unknown, told[queue, "ack"]
    world.server.wait_ready()
    for queue in queues:
        check_after_the_death(world, queue, told)


def check_after_the_death(world: World, queue: str, told: dict[tuple[str, str], Answer]) -> None:
    client = world.client
    again = world.insist(lambda c: say(c, "ack", queue, "a", [1])).body
    assert again["acked"] == 1 or again["skipped"] == [1]
    left = numbers_in(world, queue)
    assert left == list(range(0 if again["skipped"] and 0 in left else 1, 8)), "no other job is touched"
    got: dict[int, int] = {}

    def all_free() -> bool:
        answer = claim(client, queue, "c", max=100, lease_ms=HELD)
        got.update({entry["$seq"]: entry["deliveries"] for entry in answer.body["claimed"]})
        return {5, 6, 7, 8} <= got.keys()

    eventually(all_free, what="the job of a claim that was not answered")
    assert not got.keys() & {3, 4}, f"held by a: {got}"
    assert (2 in got) or not told[queue, "nack"].ok
    if 0 in left:
        assert 1 in got, "the ack was skipped, so the job is nobody's"
    assert say(client, "ack", queue, "a", [3, 4]).body["skipped"] == []
    assert say(client, "ack", queue, "c", list(got)).body["skipped"] == []
    if 2 not in got:
        assert say(client, "ack", queue, "a", [2]).body["skipped"] == []
    assert counters(world, queue) == {"ready": 0, "in_flight": 0, "dead_lettered": 0, "count": 0}


def test_the_coordinator_dies_while_a_shard_stands_still(serve: Start) -> None:
    """What it has told the shard may be done yet, when there is another one already; the two have to agree."""
    world = World(serve, shards=1, env=UNHURRIED)
    client = world.client
    make_queue(world, "q", leases_durable=True, durability="fsync")
    assert client.append("q", *map(job, range(10))).ok
    entries = claim(client, "q", "a", max=6, lease_ms=HELD).body["claimed"]
    pid = world.server.signal_child("shard-0", signal.SIGSTOP)
    ring = ("queue", "shard-0")
    waiting = [
        sent_in_background(world, ring, lambda c: say(c, "ack", "q", "a", [1, 2])),
        sent_in_background(world, ring, lambda c: say(c, "nack", "q", "a", [3])),
        sent_in_background(world, ring, lambda c: claim(c, "q", "b", max=2, lease_ms=500)),
    ]
    before = world.server.restarts("queue")
    world.server.signal_child("queue")
    eventually(lambda: world.server.restarts("queue") > before, what="another coordinator")
    os.kill(pid, signal.SIGCONT)
    for thread, answers in waiting:
        thread.join(30)
        assert [answer.status for answer in answers] == [503], answers
    world.server.wait_ready()
    again = world.insist(lambda c: say(c, "ack", "q", "a", [1, 2])).body
    assert again["skipped"] in ([], [1, 2])
    left = len(numbers_in(world, "q"))
    assert left == (8 if again["acked"] or left == 8 else 10)

    def agree() -> bool:
        shown = counters(world, "q")
        return shown["count"] == left == shown["ready"] + shown["in_flight"]

    eventually(agree, what=f"counters that fit {left} jobs: {counters(world, 'q')}")
    taken: list[int] = []

    def all_claimed() -> bool:
        taken.extend(entry["$seq"] for entry in claim(client, "q", "c", max=100, lease_ms=HELD).body["claimed"])
        return {7, 8, 9, 10} <= set(taken)

    eventually(all_claimed, what="what b has never got")
    assert not set(taken) & {4, 5, 6}
    assert len(taken) == len(set(taken))
    rest = [entry for entry in entries if entry["$seq"] in (4, 5, 6)]
    held_in(world, "q", "a", rest)
    assert world.server.restarts("shard-0") == 0


# Where the shard dies that has to write leases down.
LOGGING = ["write:40", "sync:30"]
MORE_LOGGING = [
    f"{point}:{n}" for point in ("write", "written", "sync", "synced", "publish", "reply") for n in (25, 60)
]


@pytest.mark.gate
@pytest.mark.parametrize("point", LOGGING + (MORE_LOGGING if EXHAUSTIVE else []))
def test_a_durable_lease_that_was_answered_is_written_down(serve: Start, point: str) -> None:
    """Claims, nacks and extensions until the shard dies under one of them. What was answered holds, also when the
    coordinator, which knows of all of them, dies right after it."""
    world = World(serve, shards=1, env={"TOPICS_KILL_POINT": point})
    client = world.client
    make_queue(world, "q", leases_durable=True, durability="disk")
    assert client.append("q", *map(job, range(200))).ok
    lease_ids: dict[int, str] = {}
    hidden: set[int] = set()
    unsure: set[int] = set()
    lease_ms = 2_000  # of those that are extended
    claimed_at = 0.0
    for at in range(200):
        if world.server.deaths():
            break
        extends = at % 3 == 1
        answer = claim(client, "q", "a", lease_ms=lease_ms if extends else HELD)
        claimed_at = time.monotonic()
        if not answer.ok:
            continue
        ((seq, lease_id),) = [(entry["$seq"], entry["lease_id"]) for entry in answer.body["claimed"]]
        lease_ids[seq] = lease_id
        if at % 3 == 0:
            continue
        if extends:
            answer = say(client, "extend", "q", "a", [seq], lease_ms=HELD)
        else:
            answer = say(client, "nack", "q", "a", [seq], delay_ms=HELD)
        if not answer.ok:
            unsure.add(seq)
        elif not extends:
            hidden.add(seq)
    else:
        raise AssertionError(f"nobody came by {point}")
    world.server.kill()
    world.server = serve(shards=1)
    client = world.client = world.new_client()
    eventually(lambda: time.monotonic() > claimed_at + lease_ms / 1_000, what="the end of leases that were extended")
    taken = {entry["$seq"] for entry in claim(client, "q", "b", max=1_000).body["claimed"]}
    assert taken & lease_ids.keys() <= unsure, f"answered at {point}, and forgotten"
    assert len(taken) >= 200 - len(lease_ids) - 1  # one claim may have been without an answer
    held = sorted(lease_ids.keys() - hidden - unsure)
    assert held
    assert say(client, "ack", "q", "a", held, lease_ids=[lease_ids[seq] for seq in held]).body["skipped"] == []


# --- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("leases_durable", [False, True] if EXHAUSTIVE else [False])
def test_streams_and_the_processes_behind_them(serve: Start, leases_durable: bool) -> None:
    """A stream goes on over the death of the coordinator and of a shard, with the leases it has; with its gateway it
    dies, and its leases at once, also if the coordinator is not there to see it."""
    world = World(serve)
    queue = name_on(0, "q")
    make_queue(world, queue, leases_durable=leases_durable, durability="disk", lease_ms=HELD)
    client = world.client
    assert client.append(queue, *map(job, range(4))).ok
    polled = claim(client, queue, "other", max=1).body["claimed"][0]
    stream = Stream(world.server, queue, "pushed", max=3)
    pushed = stream.wait_jobs(3)
    for victim in ("queue", "shard-0", "queue+shard-0") if EXHAUSTIVE else ("queue", "shard-0"):
        counters(world, queue)  # the shard has looked, so what it was told without being woken is written down
        kill_processes(world, victim.split("+"))
        answer = world.insist(lambda c: claim(c, queue, "thief", max=10))
        assert answer.body["count"] == 0, victim
        done, *pushed = pushed
        (number,) = client.append(queue, job(done["$seq"] + 100)).body["seqs"]
        answer = say(client, "ack", queue, "pushed", [done["$seq"]], lease_ids=[done["lease_id"]])
        assert answer.body["acked"] == 1, (victim, answer)
        pushed += stream.wait_jobs(1)
        assert pushed[-1]["$seq"] == number, victim
    assert stream.jobs(within_s=0.3) == [], "no more than it asked for"
    for victim in ("gateway-0", "queue+gateway-0", "tree") if EXHAUSTIVE else ("gateway-0", "queue+gateway-0"):
        died = time.monotonic()
        if victim == "tree":
            world.restart("kill")
        else:
            kill_processes(world, victim.split("+"))
        client = world.client = world.new_client()
        eventually(stream.has_ended, what=f"the end of a stream of {victim}")
        stream.close()
        freed: list[Entry] = []

        def all_freed(freed: list[Entry] = freed) -> bool:
            answer = world.insist(lambda c: claim(c, queue, "thief", max=10, lease_ms=HELD))
            freed += answer.body["claimed"]
            return len(freed) >= 3

        eventually(all_freed, what=f"the leases of the stream that died with {victim}")
        assert {entry["$seq"] for entry in freed} == {entry["$seq"] for entry in pushed}, victim
        assert time.monotonic() - died < 60
        for entry in pushed:
            assert say(client, "ack", queue, "pushed", [entry["$seq"]]).body["acked"] == 0, victim
        assert say(client, "nack", queue, "thief", [entry["$seq"] for entry in freed]).body["skipped"] == []
        stream = Stream(world.server, queue, "pushed", max=3)
        again = stream.wait_jobs(3)
        assert [entry["deliveries"] for entry in again] == [entry["deliveries"] + 1 for entry in sort(freed)], victim
        pushed = again
    assert say(client, "ack", queue, "other", [polled["$seq"]], lease_ids=[polled["lease_id"]]).body["acked"] == 1
    stream.close()


def sort(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: int(entry["$seq"]))


def opened(world: World, queue: str, node: str, **query: Any) -> Stream:
    """A stream, as soon as a gateway that is ready gets the connection."""
    stream: list[Stream] = []

    def opens() -> bool:
        with contextlib.suppress(NoAnswer):
            stream.append(Stream(world.server, queue, node, patience_s=1.0, **query))
        return bool(stream)

    eventually(opens, within_s=20, what="a stream")
    return stream[0]


def test_streams_of_the_other_gateway_are_not_touched(serve: Start) -> None:
    world = World(serve, env={"TOPICS_GATEWAYS": "2", "TOPICS_HEARTBEAT_MS": "20000"})
    make_queue(world, "q", lease_ms=HELD)
    assert world.client.append("q", *map(job, range(12))).ok
    streams: dict[str, Stream] = {}
    for gateway, other in ((0, 1), (1, 0)):
        pid = world.server.signal_child(f"gateway-{other}", signal.SIGSTOP)  # all connections go to the first
        for at in range(3):
            streams[f"{gateway}.{at}"] = opened(world, "q", f"{gateway}.{at}", max=2)
        os.kill(pid, signal.SIGCONT)
    pushed = {node: stream.wait_jobs(2) for node, stream in streams.items()}
    killed = time.monotonic()
    kill_processes(world, ["gateway-1"])
    client = world.client = world.new_client()
    world.insist(lambda c: claim(c, "q", "nobody", lease_ms=100))  # the way to the coordinator is there again
    ended = {"1.0", "1.1", "1.2"}
    assert {node for node, stream in streams.items() if stream.has_ended()} == ended
    freed = {entry["$seq"] for node in ended for entry in pushed[node]}
    taken: set[int] = set()

    def all_freed() -> bool:
        taken.update(entry["$seq"] for entry in claim(client, "q", "thief", max=100).body["claimed"])
        return len(taken) >= len(freed)

    eventually(all_freed, what="the leases of streams that ended")
    assert taken == freed
    assert time.monotonic() - killed < 60
    for node in streams.keys() - ended:
        assert streams[node].jobs() == []
        mine = [entry["$seq"] for entry in pushed[node]]
        assert say(client, "ack", "q", node, mine).body["skipped"] == [], node
    for stream in streams.values():
        stream.close()


# --- a long life -------------------------------------------------------------------------------------


class LongLife:
    """Rounds of jobs that are done, beside a few that never are: 1 and 2 are held, 3 is delayed, and 4, 5 and 6 are
    given back in every round."""

    LEFT: ClassVar = {"ready": 3, "in_flight": 2, "dead_lettered": 0, "count": 6}

    def __init__(self, world: World, *, leases_durable: bool) -> None:
        self._world = world
        make_queue(world, "q", leases_durable=leases_durable, durability="disk")
        client = world.client
        assert client.append("q", *map(job, range(6))).ok
        self.held = claim(client, "q", "long", max=3, lease_ms=HELD).body["claimed"]
        assert say(client, "nack", "q", "long", [3], delay_ms=HELD).body["nacked"] == 1
        assert claim(client, "q", "short", max=3, lease_ms=HELD).body["count"] == 3
        assert say(client, "nack", "q", "short", [4, 5, 6]).body["nacked"] == 3
        self._deliveries = 1

    def round(self) -> None:
        client = self._world.client
        self._deliveries += 1
        node = f"node-{self._deliveries % 7}"
        assert client.append("q", *map(job, range(500))).ok
        claimed = claim(client, "q", node, max=503, lease_ms=HELD).body["claimed"]
        assert len(claimed) == 503
        assert [entry["$seq"] for entry in claimed[:3]] == [4, 5, 6]
        assert {entry["deliveries"] for entry in claimed[:3]} == {self._deliveries}
        answer = say(client, "ack", "q", node, [entry["$seq"] for entry in claimed[3:]])
        assert answer.body["acked"] == 500
        assert say(client, "nack", "q", node, [4, 5, 6]).body["nacked"] == 3
        assert say(client, "extend", "q", "long", [1, 2], lease_ms=HELD).body["extended"] == 2


@pytest.mark.parametrize("leases_durable", [False, True] if EXHAUSTIVE else [False])
def test_a_long_life_in_small_files(serve: Start, leases_durable: bool) -> None:
    """The leases log is written down as a whole now and then, and trimmed. Leases that were given at the beginning
    outlive that, whatever dies, and what is on disk does not grow with the jobs that are done: one part of this life
    writes some 700,000 bytes of events."""
    most = 2_200_000  # history, what comes between two checkpoints twice, and segments that are not dead as a whole
    world = World(serve, shards=1, env={**SMALL, "TOPICS_LEASE_HISTORY_BYTES": "150000"})
    life = LongLife(world, leases_durable=leases_durable)
    victims = ["queue", "shard-0", "tree", "queue"]
    for part in range(20 if EXHAUSTIVE else 5):
        for _ in range(25):
            life.round()
        eventually(lambda: log_bytes(world) < most, what=f"a leases log of bounded size in part {part}")
        victim = victims[part % len(victims)]
        if victim == "tree":
            world.restart("kill")
        else:
            kill_processes(world, [victim])
        assert counters(world, "q") == life.LEFT, (part, victim)
    world.restart("kill")
    client = world.client
    assert counters(world, "q") == life.LEFT
    assert [entry["$seq"] for entry in claim(client, "q", "thief", max=10).body["claimed"]] == [4, 5, 6]
    lease_ids = [entry["lease_id"] for entry in life.held[:2]]
    assert say(client, "ack", "q", "long", [1, 2], lease_ids=lease_ids).body["acked"] == 2


def log_bytes(world: World) -> int:
    """What lies in the folder for all topics: the queue is empty but for a few jobs, so this is the leases log."""
    return sum(livefiles.sizes(world.server.data_dir, "topics/**/*").values())
