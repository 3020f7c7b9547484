"""Rings of routers that lose something: what was lost is told once in each topic that it never reached, and never where
it was lost. And rings that are closed or opened while records are on their way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples
from pipeshard import Forwarder, PipeShard, Record, numbers, rule

from topics.router.rules import Rules
from topics.storage.config import TopicConfig
from topics.storage.routers import Rule

NAMES = ["a", "b", "c"]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[PipeShard]:
    shard = PipeShard(tmp_path)
    yield shard
    shard.crash()


def ring(shard: PipeShard, size: int) -> list[Forwarder]:
    """One router after the other: a to b, b to c, back to a."""
    names = NAMES[:size]
    for name in names:
        if name not in shard.engine.topics:
            shard.put(name, TopicConfig())
    return [Forwarder(shard, *pair, ring_hops=size - 1) for pair in pairwise([*names, "a"])]


def rest(shard: PipeShard, forwarders: list[Forwarder]) -> None:
    """Until nothing moves; fails if it never does."""
    for _ in range(60):
        if not any([each.step() for each in forwarders]) and all(each.at is not None for each in forwarders):
            return
    raise AssertionError(f"it never comes to rest: {[topic.head_seq for topic in shard.engine.topics.values()]}")


def trims(shard: PipeShard, size: int) -> list[list[tuple[int, int]]]:
    return [shard.topic(name).trims for name in NAMES[:size]]


# --- losses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("end", [None, "restart", "saved"])
def test_a_loss_is_told_once_in_each_topic_that_it_never_reached(shard: PipeShard, size: int, end: str | None) -> None:
    """The process may die when the next topic has been told and the one behind it has not."""
    forwarders = ring(shard, size)
    shard.put("a", TopicConfig(cap_records=10))
    shard.append("c" if size == 3 else "b", numbers(100, 1))
    rest(shard, forwarders)
    for name in NAMES[:size]:
        shard.flush(name)
    shard.checkpoint()
    for number in range(1, 31):
        shard.append("a", numbers(number, 1))
    forwarders[0].step()
    if end == "saved":
        shard.checkpoint()
    if end is not None:
        shard.restart()
        forwarders = ring(shard, size)
    rest(shard, forwarders)
    assert trims(shard, size) == [[], [(2, 21)], [(2, 21)]][:size]
    assert [shard.report(name).head_seq for name in NAMES[:size]] == [31] * size
    gap = shard.diff(NAMES[size - 1], 1).tombstone
    assert gap is not None
    assert (gap.gap_from, gap.gap_to, gap.reason) == (2, 21, "source_trim")


def test_a_loss_of_a_copy_is_told_where_it_was_to_go(shard: PipeShard) -> None:
    """The second topic of three evicts what came from the first: the third is told, the first has it."""
    forwarders = ring(shard, 3)
    shard.put("b", TopicConfig(cap_records=2))
    forwarders[1].step(), forwarders[2].step()
    shard.append("a", numbers(1, 4))
    shard.append("b", numbers(5, 1))
    forwarders[0].step()
    rest(shard, forwarders)
    assert [shard.data(name) for name in NAMES] == [[b"1", b"2", b"3", b"4"], [b"3", b"4"], [b"3", b"4"]]
    assert trims(shard, 3) == [[(5, 5)], [], [(1, 3)]], "5 was written to b: a never had it"


@pytest.mark.parametrize("size", [2, 3])
def test_copies_whose_originals_are_gone_are_not_told_where_they_were_written(shard: PipeShard, size: int) -> None:
    """They are lost with the process in the second topic; the third was not there yet."""
    forwarders = ring(shard, size)
    shard.append("a", [*numbers(1, 1, tag="x"), *numbers(2, 1)])
    forwarders[0].step()
    shard.delete("a", tag="x")
    shard.restart()
    rest(shard, ring(shard, size))
    assert [shard.data(name) for name in NAMES[:size]] == [[b"2"]] * size
    assert trims(shard, size) == [[], [(1, 1)], [(1, 1)]][:size]
    assert [shard.report(name).head_seq for name in NAMES[:size]] == [2] * size


# --- refilling ---------------------------------------------------------------------------------------


def test_deletes_before_copies_without_bytes_do_not_hold_a_mirror_up(shard: PipeShard) -> None:
    """What is not live before them is passed: the other topic waits for that, and this one for the other."""
    forwarders = ring(shard, 2)
    shard.append("a", numbers(1, 1, tag="x"))
    rest(shard, forwarders)
    shard.append("b", numbers(2, 1))
    rest(shard, forwarders)
    shard.delete("a", tag="x")
    shard.restart()
    rest(shard, ring(shard, 2))
    assert not shard.engine.pipes.rebuilding
    assert (shard.seqs("a"), shard.seqs("b")) == ({2: b"2"}, {2: b"2"})
    assert trims(shard, 2) == [[], [(1, 1)]]


def test_a_read_before_copies_without_bytes_ends_at_a_hole(shard: PipeShard) -> None:
    shard.put("s", TopicConfig(cap_records=2))
    shard.put("d", TopicConfig())
    Forwarder(shard, "s", "d").step()
    shard.append("d", numbers(1, 1, tag="x"))
    for number in range(2, 6):
        shard.append("s", numbers(number, 1))
    Forwarder(shard, "s", "d").pump()
    shard.delete("d", tag="x")
    shard.restart()
    assert shard.topic("d").rebuilding
    assert shard.topic("d").trims == [(2, 3)]
    first, _ = shard.read_raw("d", 0)
    assert (first.to_seq, first.count, first.lost, first.complete) == (1, 0, 0, False)
    second, _ = shard.read_raw("d", 1)
    assert (second.to_seq, second.count, second.lost) == (3, 0, 2)


@examples(60)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([2, 3]))
def test_whatever_happens_to_a_ring(tmp_path_factory: pytest.TempPathFactory, seed: int, size: int) -> None:
    """Appends, deletes and kills at random: it comes to rest, and no record is in a topic twice or back after a
    delete."""
    chance = random.Random(seed)
    shard = PipeShard(tmp_path_factory.mktemp("ring"), segment_max_events=8, wal_file_bytes=60_000)
    forwarders = ring(shard, size)
    names = NAMES[:size]
    seen: dict[tuple[str, int], bytes] = {}
    deleted: set[tuple[str, int]] = set()
    written = 0

    def look() -> None:
        for name in names:
            if shard.topic(name).rebuilding:
                continue
            found = shard.seqs(name)
            for seq, data in found.items():
                assert seen.setdefault((name, seq), data) == data
                assert (name, seq) not in deleted, "it is back"
            assert len(found) == len(set(found.values())), f"{name}: twice"
            assert shard.topic(name).head_seq <= written, f"{name}: more seqs than records"

    try:
        for _ in range(50):
            name = chance.choice(names)
            action = chance.choices(["append", "forward", "delete", "flush", "save", "kill"], [8, 20, 3, 2, 2, 2])[0]
            if action == "forward":
                chance.choice(forwarders).step(limit=chance.randint(1, 6))
            elif action == "flush":
                shard.flush(name)
            elif action == "save":
                shard.checkpoint()
            elif action == "kill":
                shard.restart()
                forwarders = ring(shard, size)
            elif not shard.topic(name).rebuilding:
                if action == "append":
                    count = chance.randint(1, 3)
                    shard.append(name, [Record(b"%d" % n, tag=str(n % 7)) for n in range(written, written + count)])
                    written += count
                else:
                    before = set(shard.seqs(name))
                    shard.delete(name, tag=str(chance.randint(0, 6)))
                    deleted |= {(name, seq) for seq in before - set(shard.seqs(name))}
            look()
        rest(shard, forwarders)
        look()
    finally:
        shard.crash()


# --- closed and opened -------------------------------------------------------------------------------


class Routers:
    """The rules of a shard's topics, and forwarders by what they say."""

    def __init__(self, shard: PipeShard) -> None:
        self.shard = shard
        self.rules = Rules()
        self.pairs: dict[str, Forwarder] = {}

    def put(self, pair: str) -> None:
        changed = Rules(self.rules)
        changed.put(rule(self.shard, pair[0], pair[1], pair, since=self.shard.topic(pair[0]).head_seq))
        self._turn(changed)

    def drop(self, pair: str) -> None:
        changed = Rules(self.rules)
        changed.remove(pair)
        self._turn(changed)
        self.shard.close_pipe(*pair)

    def _turn(self, changed: Rules) -> None:
        heads = {name: topic.head_seq for name, topic in self.shard.engine.topics.items()}
        pipes = {(each.source, each.dest): self.shard.topic(each.dest).pipe for each in self.rules}
        copied = {pair: pipe.at for pair, pipe in pipes.items() if pipe is not None}
        changed.turn(self.rules, heads=heads, copied=copied)
        self.rules = changed
        self.begin()

    def begin(self) -> None:
        self.pairs = {each.router: self._forwarder(each) for each in self.rules}

    def _forwarder(self, each: Rule) -> Forwarder:
        hops = self.rules.ring_hops(each.source, each.dest)
        return Forwarder(self.shard, each.source, each.dest, [each], ring_hops=hops)

    def step(self, *pairs: str) -> None:
        for pair in pairs:
            self.pairs[pair].step()

    def rest(self) -> None:
        rest(self.shard, list(self.pairs.values()))

    def data(self) -> list[list[int]]:
        return [sorted(int(each) for each in self.shard.data(name)) for name in NAMES]


@pytest.fixture
def routers(shard: PipeShard) -> Routers:
    for name in NAMES:
        shard.put(name, TopicConfig())
    return Routers(shard)


@pytest.mark.parametrize("killed", [False, True])
def test_what_is_on_its_way_when_a_ring_is_closed_stops_before_the_new_router(routers: Routers, killed: bool) -> None:
    shard = routers.shard
    for pair in ("ab", "bc"):
        routers.put(pair)
    shard.append("a", numbers(1, 1))
    routers.step("ab", "bc")
    shard.append("a", numbers(2, 1))
    routers.step("ab")
    shard.append("a", numbers(3, 1))
    shard.append("b", numbers(4, 1))
    routers.put("ca")
    if killed:
        shard.restart()
        routers.begin()
    shard_ready(routers)
    shard.append("c", numbers(5, 1)), shard.append("b", numbers(6, 1)), shard.append("a", numbers(7, 1))
    routers.rest()
    assert routers.data() == [[1, 2, 3, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("closed_again", [False, True])
def test_what_is_on_its_way_when_a_ring_is_opened_goes_nowhere_twice(
    routers: Routers, killed: bool, closed_again: bool
) -> None:
    """Nor after a kill that takes the positions back to where nothing was copied."""
    shard = routers.shard
    for pair in ("ab", "bc", "ca"):
        routers.put(pair)
    routers.step("ab", "bc", "ca")
    shard.append("a", numbers(1, 1)), shard.append("b", numbers(2, 1)), shard.append("c", numbers(3, 1))
    routers.step("ab", "bc", "ca")
    routers.drop("ca")
    if killed:
        shard.restart()
        routers.begin()
        shard_ready(routers)
    shard.append("a", numbers(4, 1)), shard.append("b", numbers(5, 1))
    if closed_again:
        routers.put("ca")
        shard.append("c", numbers(6, 1))
    routers.rest()
    new = [6] if closed_again else []
    assert routers.data() == [[1, 2, 3, 4, *new], [1, 2, 3, 4, 5, *new], [1, 2, 3, 4, 5, *new]]


def test_a_smaller_ring_takes_what_a_larger_one_had_on_its_way(routers: Routers) -> None:
    """The hops of the two mean different topics: what came from the third one by the larger ring is still copied."""
    shard = routers.shard
    for pair in ("ab", "bc", "ca"):
        routers.put(pair)
    routers.step("ab", "bc", "ca")
    shard.append("c", numbers(1, 1)), shard.append("b", numbers(2, 1))
    routers.step("bc", "ca")
    routers.drop("ca")
    routers.put("ba")
    shard.append("a", numbers(3, 1)), shard.append("b", numbers(4, 1))
    routers.rest()
    assert routers.data() == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]


def test_what_was_on_its_way_in_a_chain_stays_so_when_the_ring_is_opened_elsewhere(routers: Routers) -> None:
    """It was copied before there was a ring, and is handed on after the ring has gone: not back to where it was
    written."""
    shard = routers.shard
    for pair in ("ab", "bc"):
        routers.put(pair)
    routers.step("ab", "bc")
    shard.append("a", numbers(1, 1))
    routers.step("ab")
    routers.put("ca")
    routers.drop("ab")
    shard.append("b", numbers(2, 1))
    routers.rest()
    assert routers.data() == [[1, 2], [1, 2], [1, 2]]


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_small_ring_holds_back_its_own_after_any_number_of_larger_ones(routers: Routers, turns: int) -> None:
    """What came from b by the ring of two is not for b, however often a larger ring was closed and opened since."""
    shard = routers.shard
    for pair in ("ab", "ba"):
        routers.put(pair)
    routers.step("ab", "ba")
    shard.append("b", numbers(1, 1))
    routers.step("ba")
    routers.drop("ba")
    routers.put("bc")
    for _ in range(turns):
        routers.put("ca")
        routers.drop("ca")
    routers.put("ca")
    shard.append("a", numbers(2, 1)), shard.append("c", numbers(3, 1))
    routers.rest()
    assert routers.data() == [[1, 2, 3], [1, 2, 3], [2, 3]]


def test_a_ring_of_four_takes_nothing_further_than_one_of_three_would_have(routers: Routers) -> None:
    """The second router on the way knows nothing of what comes later from the first."""
    shard = routers.shard
    shard.put("d", TopicConfig())
    for pair in ("ab", "ca", "cd", "bc"):
        routers.put(pair)
    routers.step("ab", "ca", "cd", "bc")
    shard.append("c", numbers(1, 1))
    routers.step("ca")
    routers.drop("ca")
    routers.put("da")
    shard.append("c", numbers(2, 1)), shard.append("d", numbers(3, 1))
    routers.rest()
    assert routers.data() == [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    assert sorted(shard.data("d")) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("turns", [1, 3])
def test_what_has_been_copied_leaves_no_past(routers: Routers, turns: int) -> None:
    shard = routers.shard
    for pair in ("ab", "ba"):
        routers.put(pair)
    for number in range(turns):
        shard.append("b", numbers(number, 1))
        routers.rest()
        routers.drop("ba")
        routers.put("ba")
    (rule,) = routers.rules.between("a", "b")
    assert rule.past is not None
    assert rule.past.before is None


def test_an_earlier_ring_holds_nothing_back_that_a_later_one_brings(routers: Routers) -> None:
    """a -> b was in a ring of two; now it leads out of another one."""
    shard = routers.shard
    for pair in ("ab", "ba"):
        routers.put(pair)
    routers.step("ab", "ba")
    shard.append("b", numbers(1, 1))
    routers.step("ba")
    routers.drop("ba")
    shard.append("a", numbers(2, 1))
    for pair in ("ac", "ca"):
        routers.put(pair)
    shard.append("c", numbers(3, 1)), shard.append("a", numbers(4, 1)), shard.append("b", numbers(5, 1))
    routers.rest()
    assert routers.data() == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [3, 4]]


def shard_ready(routers: Routers) -> None:
    """Until topics that a kill has closed can be written to."""
    while routers.shard.engine.pipes.rebuilding:
        routers.step(*routers.pairs)


def test_routers_of_one_pair_have_one_past(shard: PipeShard) -> None:
    for name in NAMES:
        shard.put(name, TopicConfig())
    before = Rules([rule(shard, "a", "b", "one"), rule(shard, "a", "b", "two"), rule(shard, "b", "c", "out")])
    closed = Rules([*before, rule(shard, "b", "a", "back")])
    closed.turn(before, heads={"a": 7, "b": 9})
    pasts = {each.router: each.past and msgspec.structs.astuple(each.past) for each in closed}
    assert pasts == {"one": (None, 7, 0, None, None), "two": (None, 7, 0, None, None), "out": None, "back": None}
    opened = Rules(each for each in closed if each.router != "back")
    opened.turn(closed, heads={})
    pasts = {each.router: each.past and msgspec.structs.astuple(each.past) for each in opened}
    assert pasts == {"one": (None, 7, 0, 1, None), "two": (None, 7, 0, 1, None), "out": None}
