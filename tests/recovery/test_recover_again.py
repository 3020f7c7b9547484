"""Recovery changes nothing that a second recovery would see: killed in the middle, repeated, or after a clean stop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from crash_folder import contents, frames, newest_snapshot, wal_files
from crash_oracle import Oracle, read_all
from crash_server import EXHAUSTIVE, SMALL, Client, Server, eventually
from crash_workload import Workload, create_topics

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 120)]

Start = Callable[..., Server]


def shown(client: Client, oracle: Oracle) -> dict[str, Any]:
    """Everything a client can see, but for times of reading and what reading costs."""
    seen: dict[str, Any] = {}
    for name, ledger in oracle.topics.items():
        if ledger.dropped is not None:
            continue
        state = client.get(name).body
        for volatile in ("performance", "last_read_ts", "effective_priority"):
            state.pop(volatile, None)
        # All pages as one: where a page ends depends on whether a batch is in the log or in a segment by now.
        seen[name] = [state, read_all(client, name)]
    return seen


def loaded(serve: Start, seed: int, env: dict[str, str], *, requests: int) -> tuple[Server, Oracle]:
    oracle = Oracle()
    server = serve(shards=2, env=env)
    client = server.client()
    topics = create_topics(oracle, client)
    load = Workload(oracle, server, topics, seed=seed)
    load.wait_done(requests)
    load.finish()
    return server, oracle


@pytest.mark.gate
def test_killed_in_the_middle_of_recovery_and_each_shows_the_same(serve: Start, seed: int) -> None:
    rng = random.Random(seed)
    server, oracle = loaded(serve, seed, SMALL, requests=700)
    server.kill()
    for _ in range(40 if EXHAUSTIVE else 3):
        dying = serve(shards=2, env=SMALL, wait=False)
        eventually(lambda dying=dying: dying.board.row("shard-0"), what="a shard")
        time.sleep(rng.uniform(0.05, 0.6))
        dying.kill()
    oracle.restarted()
    server = serve(shards=2, env=SMALL)
    oracle.check(server)
    # Ephemeral heads may jump at every start, the rest is still.
    logged = Oracle()
    logged.topics = {name: topic for name, topic in oracle.topics.items() if topic.durability != "ephemeral"}
    first = shown(server.client(), logged)
    server.kill()
    oracle.restarted()
    server = serve(shards=2, env=SMALL)
    assert shown(server.client(), logged) == first
    oracle.check(server)
    oracle.check_keys(server)


@pytest.mark.gate
def test_a_clean_stop_leaves_nothing_to_replay(serve: Start, seed: int) -> None:
    server, oracle = loaded(serve, seed, {}, requests=400)
    before = shown(server.client(), oracle)
    assert server.stop() == 0
    oracle.restarted()
    data_dir = server.data_dir
    for shard in range(2):
        found = newest_snapshot(data_dir, shard)
        assert found is not None
        assert found[0].clean
        lsns = [frame.lsn for path in wal_files(data_dir, shard) for frame in frames(path)]
        assert max(lsns, default=0) <= found[0].lsn, "frames behind the last snapshot"
    files = contents(data_dir, without_zeros=True)
    server = serve(shards=2)
    oracle.check(server)
    after = shown(server.client(), oracle)
    for name, ledger in oracle.topics.items():
        if ledger.dropped is not None:
            continue
        # Ephemeral records are gone, everything else of them is exact.
        assert after[name][0]["head_seq"] == before[name][0]["head_seq"]
        assert after[name][0]["config"] == before[name][0]["config"]
        if ledger.durability != "ephemeral":
            assert after[name] == before[name]
    now = contents(data_dir, without_zeros=True)
    changed = [name for name, digest in files.items() if name in now and now[name] != digest]
    assert not changed, "a start after a clean stop has nothing to mend"
    assert server.stop() == 0
    oracle.restarted()
    server = serve(shards=2)
    oracle.check(server)
    assert {name: seen[0]["head_seq"] for name, seen in shown(server.client(), oracle).items()} == {
        name: seen[0]["head_seq"] for name, seen in before.items()
    }
