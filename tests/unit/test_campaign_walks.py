"""Random histories: the same seed is the same list, what fails is made shorter, and losses are found."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from campaigns import walks
from campaigns.campaign import Tally
from campaigns.shrinking import shrink
from campaigns.walks import DIRECT, LOGS, QUEUE, Operation, Refusal, Walk, World, Wrong, plan


def test_a_seed_is_a_list_of_operations_of_all_kinds() -> None:
    operations = plan(1)
    assert operations == plan(1) != plan(2)
    assert operations == sorted(operations, key=lambda each: each.at_ms)
    assert operations[-1].at_ms > 29_000
    assert msgspec.json.decode(msgspec.json.encode(operations), type=list[Operation]) == operations
    many = Counter(each.what for seed in range(12) for each in plan(seed))
    faults = {"kill", "pair", "tree", "pause", "fill", "reload", "restart", "reshard"}
    work = {"append", "keyed", "long", "delete_tag", "delete_before", "put", "read", "recreate", "write", "look"}
    assert set(many) == faults | work | {"produce", "claim"}
    homes: dict[str, set[int]] = {}
    for each in operations:
        homes.setdefault(each.topic, set()).add(each.who)
    assert all(len(clients) == 1 for name, clients in homes.items() if name), "a topic has one writer"


def test_a_list_is_made_as_short_as_the_tries_allow() -> None:
    def fails(items: list[int]) -> bool:
        return {3, 42} <= set(items)

    found, used = shrink(list(range(100)), fails, tries=200)
    assert found == [3, 42]
    assert used <= 200
    shorter, few = shrink(list(range(100)), fails, tries=4)
    assert fails(shorter)
    assert len(shorter) < 100
    assert few == 4
    assert shrink([1], lambda items: True, tries=9) == ([1], 0)


def test_a_failing_history_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))

    def play(operations: list[Operation], tally: Tally, **more: object) -> str | None:
        return "lost" if any(each.what == "reshard" for each in operations) else None

    monkeypatch.setattr(walks, "play", play)
    seed = next(seed for seed in range(100) if any(each.what == "reshard" for each in plan(seed)))
    tally = walks.run(seed, tries=60)
    [finding] = tally.findings
    assert "--campaign walks --unit" in finding.what
    [kept] = tmp_path.iterdir()
    short = msgspec.json.decode(kept.read_bytes(), type=list[Operation])
    assert len(short) < 500
    assert walks.run(seed, str(kept)).findings
    fine = next(seed for seed in range(100) if not any(each.what == "reshard" for each in plan(seed)))
    assert not walks.run(fine).findings


# --- the checker ---


class Answer:
    ok = True
    status = 200

    def __init__(self, body: Any) -> None:
        self.body = body
        self.raw = json.dumps(body).encode()


class Client:
    """A server that has these records and jobs."""

    def __init__(self, records: dict[str, list[str]], jobs: list[int] | None = None) -> None:
        self.records = records
        self.jobs = jobs or []

    def diff(self, topic: str, from_seq: int, **more: object) -> Answer:
        rows = [{"$seq": at, "data": text} for at, text in enumerate(self.records[topic], 1)]
        return Answer({"records": rows, "next_from_seq": len(rows), "caught_up": True, "tombstone": None})

    def call(self, method: str, path: str, body: Any) -> Answer:
        if path.endswith("/claim"):
            found, self.jobs = self.jobs, []
            return Answer({"claimed": [{"$seq": seq} for seq in found]})
        return Answer({"skipped": []})


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Walk:
    monkeypatch.setattr(walks, "eventually", lambda look, **more: look())
    made = Walk.__new__(Walk)
    made.tally = Tally()
    made.written = {name: [f"{name}-1", f"{name}-2"] for name in DIRECT}
    made.seen = {name: {} for name in WHOLE}
    made.produced, made.acked, made.unsure = {1: 1, 2: 2}, {1: 0.0}, set()
    return made


WHOLE = {
    "a": ["a-1", "a-2"],
    "b": ["a-1", "b-1", "a-2", "b-2"],
    "c": ["a-1", "b-1", "b-2", "a-2"],
    "r1": ["r1-1", "r1-2", "r2-1", "r2-2"],
    "r2": ["r2-1", "r1-1", "r2-2", "r1-2"],
}


def test_whole_destinations_pass(walk: Walk) -> None:
    walk._check_copies(Client(WHOLE), "now")  # type: ignore[arg-type]
    assert walk.tally.counts["checked"] == 18


def test_a_copy_that_was_read_at_another_seq(walk: Walk) -> None:
    walk._look(Client(WHOLE), "c", 3)  # type: ignore[arg-type]
    walk._check_copies(Client(WHOLE), "now")  # type: ignore[arg-type]
    swapped = {**WHOLE, "c": ["b-1", "a-1", "b-2", "a-2"]}
    for later in (walk._check_copies, lambda client, _: walk._look(client, "c", 12)):
        with pytest.raises(Wrong, match="c: seq 1 is b-1, and was a-1"):
            later(Client(swapped), "later")  # type: ignore[arg-type]
    walk.seen["c"] = {7: "a-2"}
    with pytest.raises(Wrong, match=r"seqs \[7\] have been read"):
        walk._check_copies(Client(WHOLE), "later")  # type: ignore[arg-type]


def test_a_5xx_while_nothing_is_away(walk: Walk) -> None:
    walk.away, walk._away_since = [(10.0, 11.0), (20.0, 22.0)], None
    walk.refusals = [Refusal(9.0, 10.5, "503"), Refusal(11.5, 11.6, "503"), Refusal(10.1, 10.2, "507")]
    walk._check_refusals()
    assert (walk.tally.counts["refusals"], walk.tally.counts["away_ms"]) == (3, 3_000)
    walk.refusals.append(Refusal(15.0, 15.1, "GET /v0/topics/d0: 500"))
    with pytest.raises(Wrong, match="nothing is away: GET /v0/topics/d0: 500; 1 of them"):
        walk._check_refusals()


def test_a_server_that_does_not_start_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended: list[str] = []

    class Server:
        def __init__(self, *more: object, **named: object) -> None:
            pass

        def wait_ready(self) -> None:
            raise AssertionError("not ready")

        def close(self) -> None:
            ended.append("server")

    def run(command: list[str], **more: object) -> Done:
        ended.append(command[0])
        return Done()

    monkeypatch.setattr(walks, "Server", Server)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(AssertionError, match="not ready"):
        World(tmp_path)
    assert ended == ["mount", "server", "umount"]


class Done:
    returncode = 0


@pytest.mark.parametrize(
    ("name", "found", "why"),
    [
        ("b", ["a-1", "a-2", "b-1"], "lacks 1"),
        ("c", ["a-1", "b-1", "b-2", "a-2", "a-2"], "1 too many"),
        ("r2", ["r2-1", "r1-1", "r2-2", "r1-2", "made up"], "1 too many"),
        ("b", ["a-2", "b-1", "a-1", "b-2"], "another order"),
    ],
)
def test_a_destination_that_is_not(walk: Walk, name: str, found: list[str], why: str) -> None:
    with pytest.raises(Wrong, match=why):
        walk._check_copies(Client({**WHOLE, name: found}), "now")  # type: ignore[arg-type]


def test_jobs_that_are_lost_or_delivered_again(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    walk._check_jobs(Client({}, [2]), "now")  # type: ignore[arg-type]
    walk.acked = {2: 0.0}
    with pytest.raises(Wrong, match="delivered again"):
        walk._check_jobs(Client({}, [2]), "now")  # type: ignore[arg-type]
    walk.acked = {1: 0.0}
    times = iter(range(0, 10_000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    with pytest.raises(Wrong, match="lost"):
        walk._check_jobs(Client({}, []), "now")  # type: ignore[arg-type]
    assert QUEUE not in LOGS
