"""A shard that dies at each durability boundary, while serving and while recovering: the next start owes the same."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable

import livefiles
import pytest
from crash_oracle import Fate, Oracle, TopicLedger
from crash_server import EXHAUSTIVE, SMALL, Client, NoAnswer, Server, eventually

from topics.shm.counters import State

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 180)]

Start = Callable[..., Server]
PADDING = "x" * 3_000
HOUR_MS = 3_600_000


class Script:
    """The same requests in the same order each time: a walk through everything that writes."""

    def __init__(self, oracle: Oracle, server: Server) -> None:
        self._oracle = oracle
        self._server = server
        self._steps = 0
        self.ledgers = [
            oracle.topic(name, durability)
            for name, durability in (("f", "fsync"), ("d", "disk"), ("m", "memory"), ("e", "ephemeral"))
        ]

    def run_until_a_death(self, *, steps: int) -> bool:
        """Whether a shard died. Between the walks there is quiet, in which maintenance does its part."""
        for _ in range(10):
            self.walk(steps)
            with contextlib.suppress(AssertionError):
                eventually(self._server.deaths, within_s=3)
                return True
        return False

    def walk(self, steps: int) -> None:
        client = self._server.client()
        try:
            # An append that came first would make a topic of another class.
            if not all(ledger.put(client, idempotency_window_ms=HOUR_MS).ok for ledger in self.ledgers):
                return
            for _ in range(steps):
                if self._server.deaths():
                    return
                self._step(client)
        except NoAnswer:
            pass
        finally:
            client.close()

    def _step(self, client: Client) -> None:
        self._steps += 1
        step = self._steps
        ledger = self.ledgers[step % 4]
        tag = f"tag-{self._oracle.life}-{step // 12}"
        key = f"key-{self._oracle.life}-{step}" if step % 3 == 0 else None
        if step % 12 == 11:
            ledger = self.ledgers[(step // 12) % 4]
            ledger.delete(client, tags=[tag], match=tag)
        elif step % 29 == 28:
            before = ledger.highest_acked - 30
            if before > 0:
                ledger.delete(client, before_seq=before)
        elif step % 31 == 30:
            short = self._oracle.topic(f"short-{self._oracle.life}-{step}", "disk")
            if short.put(client).ok:
                short.append(client, [("", None, None)])
                short.drop(client)
        elif step % 37 == 36:
            ledger.put(client, idempotency_window_ms=HOUR_MS, priority=step)
        else:
            # A tag is never used again after the step that deletes it.
            mine = tag if step % 12 < 11 else None
            records = [
                (PADDING if index % 2 else "", mine if index % 3 else None, None) for index in range(1 + step % 17)
            ]
            ledger.append(client, records, key)
        time.sleep(0.002)


# point -> which arrivals there are worth dying at; the first is in the default family
SERVING: dict[str, list[int]] = {
    "write": [40, 3, 5, 11, 90],
    "written": [41, 2, 4, 12, 91],
    "sync": [9, 2, 3, 30],
    "synced": [8, 1, 4, 31],
    "rotated": [2, 3],
    "publish": [50, 1, 7, 120],
    "reply": [51, 2, 8, 121],
    "flushed": [1, 2, 3, 5],
    "rename": [1, 2, 3, 4, 6],
    "renamed": [1, 2, 3, 4, 5],
    "snapshot": [1, 2],
}


def start_dying(serve: Start, point: str) -> Server:
    """A server that will die; perhaps it does so already while it starts."""
    server = serve(shards=1, env={**SMALL, "TOPICS_KILL_POINT": point}, wait=False)
    eventually(lambda: server.deaths() or server.state("shard-0") is State.READY, what="a start")
    return server


CASES = [f"{point}:{arrival}" for point, arrivals in SERVING.items() for arrival in arrivals]


@pytest.mark.skipif(not EXHAUSTIVE, reason="two servers for each point; the walk below goes through all of them")
@pytest.mark.parametrize("point", CASES)
def test_dying_while_serving(serve: Start, point: str) -> None:
    oracle = Oracle()
    server = start_dying(serve, point)
    died = Script(oracle, server).run_until_a_death(steps=400)
    assert died, f"nobody came by {point}: the walk does not reach it"
    server.kill()
    oracle.restarted()
    server = serve(shards=1, env=SMALL)
    oracle.check(server)
    oracle.check_keys(server)
    oracle.check(server, crashed=False)


def test_dying_while_serving_at_one_boundary_after_another(serve: Start, seed: int) -> None:
    """On one folder, each server recovering what the death before left; a server that lives checks now and then.
    Recovery comes by some of the points too, and dying there is as good."""
    points = [f"{point}:{arrivals[0]}" for point, arrivals in SERVING.items()]
    random.Random(seed).shuffle(points)
    oracle = Oracle()
    for start in range(0, len(points), 3):
        some = points[start : start + 3]
        for point in some:
            server = start_dying(serve, point)
            assert Script(oracle, server).run_until_a_death(steps=150), f"nobody came by {point}\n{server.log()}"
            server.kill()
            oracle.restarted()
        server = serve(shards=1, env=SMALL)
        try:
            oracle.check(server)
            oracle.check_keys(server)
            oracle.check(server, crashed=False)
        except AssertionError as error:
            raise AssertionError(f"after deaths at {some}: {error}") from error
        server.kill()
        oracle.restarted()


RECOVERING = ["sync:1", "rotated:1"]
MORE_RECOVERING = ["write:1", "written:1", "sync:2", "synced:1", "synced:2"]


@pytest.mark.gate
def test_dying_while_recovering_at_every_boundary(serve: Start) -> None:
    """One after another on one folder, each time again and again until the supervisor is about to give up."""
    oracle = Oracle()
    server = serve(shards=1, env=SMALL)
    Script(oracle, server).walk(120)
    server.kill()
    oracle.restarted()
    for point in RECOVERING + (MORE_RECOVERING if EXHAUSTIVE else []):
        dying = serve(shards=1, env={**SMALL, "TOPICS_KILL_POINT": point}, wait=False)
        eventually(lambda dying=dying: dying.deaths() >= 2, what=f"deaths at {point}\n{dying.log()}")
        dying.kill()
    server = serve(shards=1, env=SMALL)
    oracle.check(server)
    oracle.check_keys(server)


@pytest.mark.skipif(not EXHAUSTIVE, reason="takes as long as all the restarts that come before giving up")
def test_given_up_after_five_restarts_and_a_fresh_start_mends_it(serve: Start) -> None:
    oracle = Oracle()
    server = serve(shards=2, env=SMALL)
    client = server.client()
    topics: list[TopicLedger] = [oracle.create(client, f"t-{n}", "fsync") for n in range(6)]
    for topic in topics:
        topic.append_plain(client, 3)
    server.kill()
    oracle.restarted()
    server = serve(shards=2, env={**SMALL, "TOPICS_KILL_POINT": "rotated"}, wait=False)
    for name in ("shard-0", "shard-1"):
        server.wait_state(name, State.FAILED)
        assert server.restarts(name) == 5
    ready = server.ready()
    assert ready.status == 503
    assert ready.body["error"]["detail"]["waiting_for"] == {"shard-0": "failed", "shard-1": "failed"}
    assert server.client().get("t-0").status == 503
    server.kill()
    oracle.check(serve(shards=2, env=SMALL))


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_dying_with_the_body_of_a_large_append_in_place(serve: Start, durability: str) -> None:
    """It was put into a file without a name: nothing of it took effect, and the next start removes the file."""
    oracle = Oracle()
    server = serve(shards=1, env={**SMALL, "TOPICS_KILL_POINT": "placed:2"})
    client = server.client()
    ledger = oracle.create(client, "large", durability)
    ledger.append_plain(client, 10, key="whole", padding="x" * 900_000)
    with contextlib.suppress(NoAnswer):
        cut = ledger.append(client, [("x" * 900_000, None, None)] * 10, "cut")
        assert cut.fate is not Fate.ACKED
    eventually(server.deaths, what="a death")
    server.kill()
    assert livefiles.find(server.data_dir, "**/*.wal.tmp")
    oracle.restarted()
    server = serve(shards=1, env=SMALL)
    oracle.check(server)
    oracle.check_keys(server)
    assert not livefiles.find(server.data_dir, "**/*.wal.tmp")
