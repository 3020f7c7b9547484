"""kill -9 of the whole tree under concurrent load, several times on one folder."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from crash_oracle import Oracle
from crash_server import EXHAUSTIVE, SMALL, Server
from crash_workload import Workload, create_topics

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(1200 if EXHAUSTIVE else 180)]


@pytest.mark.parametrize(
    ("env", "rounds"),
    [({}, 12 if EXHAUSTIVE else 2), (SMALL, 25 if EXHAUSTIVE else 3)],
    ids=["defaults", "small-files"],
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
