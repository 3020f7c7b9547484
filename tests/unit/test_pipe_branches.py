"""Chains and forks of topics, from which clients delete at any moment, and kills: what was seen keeps its seq, comes
once, stays deleted, and is told where the source lost it."""

from __future__ import annotations

import random

import pytest
from model import EXHAUSTIVE, Record, seeds
from pipeshard import Forwarder, PipeShard

from topics.storage.config import Durability, TopicConfig

NAMES = "abc"
SHAPES = {"chain": [("a", "b"), ("b", "c")], "fork": [("a", "b"), ("a", "c")]}
WEIGHTS = {
    "append": 6,
    "forward": 14,
    "forward all": 3,
    "direct": 4,
    "delete": 5,
    "trim": 2,
    "flush": 3,
    "checkpoint": 3,
    "kill": 3,
    "stop": 1,
    "be quiet": 1,
}


class World:
    def __init__(self, shard: PipeShard, rng: random.Random, arrows: list[tuple[str, str]], durability: Durability):
        self.shard = shard
        self.rng = rng
        self.arrows = arrows
        for name in NAMES:
            shard.put(name, TopicConfig(durability=durability, durable=durability == "fsync"))
        self.number = 0
        self.seen: dict[str, dict[int, bytes]] = {name: {} for name in NAMES}
        self.deleted: dict[str, set[int]] = {name: set() for name in NAMES}
        self.below: dict[str, int] = dict.fromkeys(NAMES, 0)  # deleted, whatever stood there
        self.begin()
        for forwarder in self.forwarders:
            forwarder.step()

    def begin(self) -> None:
        self.forwarders = [Forwarder(self.shard, source, dest) for source, dest in self.arrows]

    def is_shown(self, name: str) -> bool:
        return not self.shard.topic(name).rebuilding

    def step(self) -> None:
        (action,) = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        shard, name = self.shard, self.rng.choice(NAMES)
        if action == "append":
            self.append("a")
        elif action == "direct":
            self.append(self.rng.choice("bc"))
        elif action == "forward":
            self.rng.choice(self.forwarders).step(limit=self.rng.randint(1, 6))
        elif action == "forward all":
            for forwarder in self.forwarders:
                forwarder.step()
        elif action in ("delete", "trim"):
            if self.is_shown(name):
                self.delete(name, below=action == "trim")
        elif action == "flush":
            shard.flush(name)
        elif action == "checkpoint":
            shard.checkpoint()
        elif action == "be quiet":
            shard.be_quiet()
        elif action == "kill":
            shard.restart()
            self.begin()
        elif not shard.engine.pipes.rebuilding:
            shard.stop()
            shard.open()
            self.begin()
        self.look()

    def append(self, name: str) -> None:
        if self.is_shown(name):
            first, self.number = self.number, self.number + self.rng.randint(1, 5)
            made = [Record(b"%d" % number, tag=str(number % 5)) for number in range(first, self.number)]
            self.shard.append(name, made)

    def delete(self, name: str, *, below: bool) -> None:
        before = self.shard.seqs(name)
        if not below:
            self.shard.delete(name, tag=str(self.rng.randrange(5)))
        elif before:
            self.below[name] = self.rng.choice(list(before)) + 1
            self.shard.delete(name, before_seq=self.below[name])
        self.deleted[name] |= before.keys() - self.shard.seqs(name).keys()

    def look(self) -> None:
        for name in filter(self.is_shown, NAMES):
            found, seen = self.shard.seqs(name), self.seen[name]
            for seq, data in found.items():
                assert seen.setdefault(seq, data) == data, f"{name}: seq {seq} has another meaning"
                assert seq not in self.deleted[name], f"{name}: seq {seq} is there again"
            assert len(set(seen.values())) == len(seen), f"{name}: twice"
            gone = {seq for seq in seen if seq not in found and seq not in self.deleted[name]}
            trims = self.shard.topic(name).trims
            for seq in gone:
                told = any(first <= seq <= last for first, last in trims)
                assert told or seq < self.below[name], f"{name}: seq {seq} is lost without a tombstone"
            for source, dest in self.arrows:
                if dest == name and self.is_shown(source):
                    kept = set(self.shard.seqs(source).values())
                    assert not kept & {seen[seq] for seq in gone}, f"{name}: lost, and {source} has it"

    def check_end(self) -> None:
        for _ in range(3):
            for forwarder in self.forwarders:
                for _ in range(1_000):
                    if not forwarder.step() and forwarder.at is not None:
                        break
        self.look()
        for source, dest in self.arrows:
            assert set(self.shard.seqs(source).values()) <= set(self.seen[dest].values()), f"{dest}: not copied"
            told = {seq for first, last in self.shard.topic(dest).trims for seq in range(first, last + 1)}
            assert set(range(1, self.shard.report(dest).head_seq + 1)) == set(self.seen[dest]) | told, "a jump"


@pytest.mark.timeout(3_600 if EXHAUSTIVE else 300)
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_happens_to_a_chain_or_a_fork(
    tmp_path_factory: pytest.TempPathFactory, shape: str, durability: Durability
) -> None:
    for seed in seeds(20, 3_000):
        rng = random.Random(f"{shape} {durability} {seed}")
        shard = PipeShard(tmp_path_factory.mktemp("branch"), segment_max_events=8, wal_file_bytes=9_000)
        try:
            world = World(shard, rng, SHAPES[shape], durability)
            for _ in range(40):
                world.step()
            world.check_end()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            shard.crash()
