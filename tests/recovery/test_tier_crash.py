"""A shard that dies at each step of moving segments to the cold tier: the next start owes the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_oracle import Oracle
from crash_server import EXHAUSTIVE, SMALL, Server, eventually
from test_kill_points import Script

from topics.datadir.fsck.verify import verify
from topics.shm.counters import State

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 180)]

Start = Callable[..., Server]
# the steps of a relocation, then those of the checkpoint that ends it
POINTS = ["copied:2", "relocate:1", "relocated:3", "leave:2", "left:1", "snapshot:2", "sync:30", "rename:9"]
MORE = [
    "copied:1",
    "relocate:7",
    "relocated:1",
    "leave:1",
    "leave:9",
    "left:4",
    "snapshot:4",
    "renamed:9",
    "written:150",
]


def tiered(tmp_path: Path, **more: str) -> dict[str, str]:
    return {**SMALL, "TOPICS_COLD_DIR": str(tmp_path / "cold"), "TOPICS_HOT_RETAIN_SEGMENTS": "0", **more}


@pytest.mark.gate
def test_dying_at_one_step_after_another(serve: Start, seed: int, tmp_path: Path) -> None:
    points = POINTS + (MORE if EXHAUSTIVE else [])
    random.Random(seed).shuffle(points)
    oracle = Oracle()
    for start in range(0, len(points), 4):
        some = points[start : start + 4]
        for point in some:
            server = serve(shards=1, env=tiered(tmp_path, TOPICS_KILL_POINT=point), wait=False)
            eventually(lambda server=server: server.deaths() or server.state("shard-0") is State.READY, what="a start")
            died = Script(oracle, server).run_until_a_death(steps=200)
            assert died, f"nobody came by {point}\n{server.log()}"
            server.kill()
            oracle.restarted()
        server = serve(shards=1, env=tiered(tmp_path))
        try:
            oracle.check(server)
            oracle.check_keys(server)
            oracle.check(server, crashed=False)
        except AssertionError as error:
            raise AssertionError(f"after deaths at {some}: {error}") from error
        server.kill()
        oracle.restarted()
    verdict = verify(str(tmp_path / "data"), deep=True, running=False)
    assert verdict.clean, verdict.problems
