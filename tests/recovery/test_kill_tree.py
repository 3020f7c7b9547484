"""kill -9 of the whole tree under concurrent load, several times on one folder."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import pytest
from crash_oracle import Oracle, TopicLedger
from crash_server import EXHAUSTIVE, SMALL, NoAnswer, Server, eventually
from crash_workload import HOUR_MS, Workload, create_topics

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 180)]


@pytest.mark.parametrize(
    ("env", "rounds"),
    [
        pytest.param({}, 12 if EXHAUSTIVE else 2, id="defaults"),
        pytest.param(SMALL, 25 if EXHAUSTIVE else 3, id="small-files", marks=pytest.mark.gate),
    ],
)
def test_everything_acknowledged_is_there_after_each_kill(
    serve: Callable[..., Server], seed: int, env: dict[str, str], rounds: int
) -> None:
    rng = random.Random(seed)
    oracle = Oracle()
    server = serve(env=env)
    client = server.client()
    topics = create_topics(oracle, client)
    client.close()
    deduped = written = 0
    for _ in range(rounds):
        load = Workload(oracle, server, topics, seed=rng.randrange(1 << 30), pace_s=0.005 if env else 0)
        load.wait_done(rng.randint(300, 900))
        server.kill()
        load.finish()
        assert load.unanswered, "nobody was waiting for an answer when the server died: no test"
        oracle.restarted()
        server = serve(env=env)
        oracle.check(server)
        more, again = oracle.check_keys(server)
        deduped += more
        written += again
        oracle.check(server, crashed=False)
    assert deduped
    assert server.stop() == 0
    oracle.restarted()
    oracle.check(serve(env=env))


def test_batches_larger_than_a_file_and_a_ring(serve: Callable[..., Server], seed: int) -> None:
    """Each is one frame in a file of its own, and as whole as any other."""
    rng = random.Random(seed)
    oracle = Oracle()
    server = serve(shards=1, env=SMALL)
    client = server.client()
    topic = oracle.create(client, "large", "fsync", idempotency_window_ms=HOUR_MS)
    topic.append_plain(client, 3)
    topic.append_plain(client, 6, padding="x" * 500_000, key="large")
    topic.append_plain(client, 3)
    # And some that are on their way when the server dies.
    load = LargeLoad(topic, server)
    eventually(lambda: load.sent >= 2, what="large batches")
    time.sleep(rng.uniform(0, 0.05))
    server.kill()
    load.join()
    oracle.restarted()
    server = serve(shards=1, env=SMALL)
    oracle.check(server)
    oracle.check_keys(server)


class LargeLoad(threading.Thread):
    def __init__(self, topic: TopicLedger, server: Server) -> None:
        super().__init__(daemon=True)
        self._topic = topic
        self._client = server.client()
        self.sent = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(NoAnswer):
            while True:
                self.sent += 1
                self._topic.append(self._client, [("y" * 400_000, None, None)] * 5, key=f"large-{self.sent}")
