"""A server that starts while the disk of its cold tier is not mounted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topics.datadir.fsck.verify import verify

from .queues import Counters, Queue, seqs_of
from .server import Server, eventually, run_topics
from .test_tiers import ALL, RECORDS, Start, append, everything, fill, metric, start

__all__ = ["start"]
pytestmark = [pytest.mark.e2e, pytest.mark.full]


def shards(server: Server, *options: str) -> str:
    done = run_topics("shards", "--interval", "0.1", "--data-dir", str(server.data_dir), *options)
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.gate
def test_it_serves_the_rest_and_goes_on_when_the_disk_is_there(start: Start, tmp_path: Path) -> None:
    server = start(TOPICS_WAL_SHARDS=1)
    fill(server, "t")
    assert server.stop() == 0
    place, away = tmp_path / "cold", tmp_path / "unmounted"
    place.rename(away)
    place.mkdir()
    server = start(TOPICS_WAL_SHARDS=1)
    with server.client() as api:
        line = next(line for line in server.output().splitlines() if "cold tier away" in line)
        assert "error" in line
        assert str(place) in line
        assert "mount its disk" in line
        ready = api.get("/v0/ready")
        assert (ready.status, ready["degraded"]) == (200, {"cold_tier_missing": ["shard-0"]})
        assert metric(server, "topics_cold_tier_missing") == 1
        assert "no cold disk" in shards(server)
        assert [each["cold_tier_missing"] for each in json.loads(shards(server, "--json"))["shards"]] == [True]
        refused = api.diff("t", 0, limit=10)
        assert (refused.status, refused["error"]["code"]) == (503, "shard_unavailable"), refused
        assert f"the cold tier {place} is not there" in refused["error"]["message"]
        append(api, "t", RECORDS + 1, RECORDS * 2)
        assert api.diff("t", RECORDS, limit=10)["records"][0]["$seq"] == RECORDS + 1
        deleted = api.delete("t", before_seq=6)
        assert (deleted.status, deleted["deleted"]) == (200, 5), deleted
    server.kill()
    server = start(TOPICS_WAL_SHARDS=1)
    with server.client() as api:
        assert api.state("t")["count"] == 2 * RECORDS - 5
        assert list(place.iterdir()) == [], "nothing goes to what lies below"
        place.rmdir()
        away.rename(place)
        assert everything(api, "t") == [*ALL[5:], *range(RECORDS + 1, RECORDS * 2 + 1)]
        eventually(lambda: metric(server, "topics_cold_tier_missing") == 0, what="that it is back")
        assert "no cold disk" not in shards(server)
        assert "degraded" not in json.dumps(api.get("/v0/ready").json)
    assert server.stop() == 0
    verdict = verify(str(server.data_dir), deep=True, running=False)
    assert verdict.clean, verdict.problems


def test_a_queue_hands_out_what_is_hot(start: Start, tmp_path: Path) -> None:
    """The other jobs keep their place, and go out first when the disk is back."""
    server = start(TOPICS_WAL_SHARDS=1)
    fill(server, "q", type="queue", lease_ms=60_000)
    place, away = tmp_path / "cold", tmp_path / "unmounted"
    place.rename(away)
    server.signal_child("shard-0")
    with server.client() as api:
        queue = Queue(api, "q")
        eventually(lambda: "relocation stopped" in server.output(), what="the disk missed by another process")
        eventually(lambda: api.append("q", [RECORDS + 1]).status == 200, what="an append")
        held = seqs_of(queue.claim(1))
        hot = list(held)
        while (claimed := queue.post("claim", {"node": "w", "max": 100})).status == 200:
            seqs = seqs_of(claimed)
            assert seqs
            queue.ack(seqs)
            hot += seqs
        assert (claimed.status, claimed["error"]["code"]) == (503, "shard_unavailable"), claimed
        assert f"the cold tier {place} is not there" in claimed["error"]["message"]
        assert 1 < min(hot) < RECORDS
        assert sorted(hot) == list(range(min(hot), RECORDS + 2))
        assert queue.counters() == Counters(ready=min(hot) - 1, in_flight=1)
        away.rename(place)
        eventually(lambda: metric(server, "topics_cold_tier_missing") == 0, what="that it is back")
        rest: list[int] = []
        while seqs := seqs_of(queue.claim(100)):
            queue.ack(seqs)
            rest += seqs
        assert rest == list(range(1, min(hot))), "in their order, none twice"
        queue.ack(held)
    assert server.stop() == 0


def test_another_number_of_shards_without_the_disk(start: Start, tmp_path: Path) -> None:
    """Topics move to their new owners with what is known of the segments there, deletes included."""
    server = start(TOPICS_WAL_SHARDS=1)
    fill(server, "t")
    with server.client() as api:
        assert api.delete("t", match="t1", before_seq=21)["deleted"] == 4
    assert server.stop() == 0
    place, away = tmp_path / "cold", tmp_path / "unmounted"
    place.rename(away)
    left = [seq for seq in ALL if seq > 20 or (seq % 5) != 1]
    for shards in (3, 2):
        server = start(TOPICS_WAL_SHARDS=shards)
        with server.client() as api:
            assert api.state("t")["count"] == len(left)
            assert api.diff("t", 0, limit=10).status == 503
            assert api.delete("t", before_seq=3).status == 200
            left = [seq for seq in left if seq >= 3]
            assert api.append("other", [1]).status in (200, 201)
        server.kill()
    server = start(TOPICS_WAL_SHARDS=2)
    with server.client() as api:
        assert api.state("t")["count"] == len(left)
        away.rename(place)
        assert everything(api, "t") == left
        eventually(lambda: metric(server, "topics_cold_tier_missing") == 0, what="that it is back")
    assert server.stop() == 0
    verdict = verify(str(server.data_dir), deep=True, running=False)
    assert verdict.clean, verdict.problems
