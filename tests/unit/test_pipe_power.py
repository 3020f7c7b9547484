"""The power fails under a router's destination: lines of copies that were not synced go with it, though readers have
seen the copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import EXHAUSTIVE, Record, examples
from pipeshard import Forwarder, PipeShard
from test_engine_recovery import OTHER_BOOT, PowerDisk

from topics.storage.config import TopicConfig

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("forward"), st.integers(1, 8)),
        st.tuples(st.just("forward"), st.integers(1, 8)),
        st.tuples(st.just("direct"), st.integers(1, 3)),
        st.tuples(st.just("delete source"), st.integers(0, 9)),
        st.tuples(st.just("delete dest"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["flush", "checkpoint", "sync"]), st.just(0)),
    ),
    max_size=25,
)


class Pair:
    """A source of class fsync and a destination; what readers have seen of it, and what clients were promised."""

    def __init__(self, shard: PipeShard, durability: str) -> None:
        self.shard = shard
        shard.put("s", TopicConfig(durability="fsync", durable=True))
        shard.put("d", TopicConfig(durability=durability, durable=durability == "fsync"))  # type: ignore[arg-type]
        self.forwarder = Forwarder(shard, "s", "d")
        self.forwarder.step()
        self.number = 0
        self.written: list[int] = []  # to the source, and still there
        self.direct: list[int] = []
        self.deleted: set[int] = set()  # in the destination
        self.gone = False  # something was deleted in the source
        self.seen: dict[int, bytes] = {}

    def records(self, size: int) -> list[Record]:
        self.number += size
        return [Record(b"%d" % each, tag=str(each % 10)) for each in range(self.number - size, self.number)]

    def run(self, step: str, size: int) -> None:
        shard = self.shard
        if step == "append":
            made = self.records(size)
            shard.append("s", made)
            self.written += [int(record.data) for record in made]
        elif step == "forward":
            self.forwarder.step(limit=size)
        elif step == "direct":
            made = self.records(size)
            shard.append("d", made)
            self.direct += [int(record.data) for record in made]
        elif step == "delete source":
            shard.delete("s", tag=str(size))
            left = [each for each in self.written if each % 10 != size]
            self.gone = self.gone or left != self.written
            self.written = left
        elif step == "delete dest":
            self.deleted |= {int(data) for data in shard.data("d") if int(data) % 10 == size}
            shard.delete("d", tag=str(size))
        else:
            {"flush": lambda: shard.flush("d"), "checkpoint": shard.checkpoint, "sync": shard.sync}[step]()
        self.seen |= shard.seqs("d")

    def check(self, before: dict[int, bytes], *, fsync: bool) -> None:
        found = self.shard.seqs("d")
        for seq, data in found.items():
            assert self.seen.get(seq, data) == data, f"seq {seq} was {self.seen[seq]!r} and is {data!r}"
        numbers = [int(data) for data in found.values()]
        assert len(numbers) == len(set(numbers)), "twice"
        copies = [each for each in numbers if each not in self.direct]
        assert copies == sorted(copies)
        for each in self.written:
            assert each in numbers or each in self.deleted, f"{each} was never copied"
        if fsync:
            assert set(self.direct) - self.deleted <= set(numbers), "an acknowledged record is lost"
            assert not set(numbers) & self.deleted, "a deleted record is there again"
            if not self.gone:
                assert before.items() <= found.items(), "the same seqs"


@pytest.mark.timeout(3_600 if EXHAUSTIVE else 600)
@pytest.mark.parametrize("durability", ["fsync", "disk"])
@examples(60)
@given(steps=STEPS, fate=st.sampled_from(["none", "some", "all"]), random=st.randoms(use_true_random=False))
def test_the_power_fails_under_a_pair(
    tmp_path_factory: pytest.TempPathFactory, durability: str, steps: list[tuple[str, int]], fate: str, random: object
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    disk = PowerDisk()
    shard = PipeShard(folder, disk=disk, wal_file_bytes=9_000, segment_max_events=8)
    try:
        pair = Pair(shard, durability)
        for step, size in steps:
            pair.run(step, size)
        before = shard.seqs("d")
        shard.crash()
        disk.cut_power(folder, lambda: fate == "all" or (fate == "some" and random.random() < 0.5))  # type: ignore[attr-defined]
        shard.open(boot=OTHER_BOOT)
        Forwarder(shard, "s", "d").pump()
        pair.check(before, fsync=durability == "fsync")
        again = shard.seqs("d")
        shard.restart(boot=OTHER_BOOT)
        Forwarder(shard, "s", "d").pump()
        pair.check(again, fsync=durability == "fsync")
    finally:
        shard.crash()
