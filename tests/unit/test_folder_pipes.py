"""Routers' copies, read from the folder. They reach the disk behind records that were written later, so a reader goes
as far as `disk_seq` and no further: whoever comes back there later must not have missed anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from folderplay import check_same, newcomer, stored_records, unexplained, write_manifest
from hypothesis import given
from hypothesis import strategies as st
from model import BOOT, EXHAUSTIVE, examples
from onlooker import named
from pipeshard import Forwarder, PipeShard, numbers, rule
from test_pipes import MOVES, STEP, Graph, Life

from spark_pipeline import schemas, tables
from topics import limits
from topics.datadir.fsck.verify import topic_troubles
from topics.storage.config import TopicConfig
from topics.storage.routers import encode_rules, routers_path


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


class Reader:
    """Takes what is there up to disk_seq, and comes back there the next time, as a stream does."""

    def __init__(self, shard: PipeShard, *topics: str) -> None:
        self.shard = shard
        self.folder = newcomer(shard)
        self.at = dict.fromkeys(topics, 0)
        self.got: dict[tuple[str, int], bytes] = {}

    def look(self) -> None:
        fresh = check_same(self.folder, self.shard)
        for name, at in self.at.items():
            topic = named(fresh, name)
            disk_seq = topic.disk_seq
            assert disk_seq <= topic.head_seq
            if not self.shard.mover._flushed:  # a recovery's snapshot, which the mover makes first, knows of its jumps
                assert 0 <= unexplained(topic) <= topic.unsettled, name
            for stored in stored_records(fresh, topic):
                if at < stored.seq <= disk_seq:
                    self.got[name, stored.seq] = stored.record.data
            self.at[name] = max(at, disk_seq)

    def check_end(self) -> None:
        """Once everything is on the disk: what is there has been read, and nothing else ever was."""
        for name in self.at:
            topic = named(check_same(self.folder, self.shard), name)
            assert (unexplained(topic), topic.unsettled) == (0, 0), name
            for seq, data in self.shard.seqs(name).items():
                assert self.got.get((name, seq)) == data, f"{name}: {seq} was passed over, now at {self.at[name]}"


def to_disk(shard: PipeShard) -> None:
    for name in shard.engine.topics:
        while shard.topic(name).has_copies:
            shard.flush(name)
    shard.checkpoint()


class Machine(Life):
    """Also loses its machine now and then: copies that were in memory get other seqs then."""

    boot = BOOT

    def reboot(self, _: int) -> None:
        self.capped = True  # seqs that might have been given out are tombstones from now on
        self.boot = bytes([self.boot[0] ^ 1]) + self.boot[1:]
        self.shard.restart(boot=self.boot)
        self.forwarder = Forwarder(self.shard, "s", "d", self.rules)


@pytest.mark.timeout(3_600 if EXHAUSTIVE else 1_200)
@examples(20)
@given(
    steps=st.lists(st.one_of(STEP, STEP, STEP, st.tuples(st.just("reboot"), st.just(0))), min_size=12, max_size=30),
    cap=st.sampled_from([0, 0, 0, 4, 9]),
    routers=st.sampled_from([1, 1, 2]),
    looks=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_a_reader_of_a_destination_misses_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], cap: int, routers: int, looks: list[bool]
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    shard = PipeShard(folder, segment_max_events=8)
    write_manifest(folder)
    try:
        life = Machine(shard, cap=cap, routers=routers)
        reader = Reader(shard, "s", "d")
        for (action, size), look in zip(steps, looks, strict=False):
            life.run("direct_append" if action == "direct" else action, size)
            if look:
                reader.look()
                for (name, seq), data in reader.got.items():
                    assert name == "s" or life.seen[seq] == data, f"{seq} was never {data!r}"
        life.check_end()
        reader.look()
        to_disk(shard)
        reader.look()
        reader.check_end()
    finally:
        shard.crash()


@pytest.mark.full
@pytest.mark.timeout(3_600 if EXHAUSTIVE else 1_200)
@pytest.mark.parametrize(("size", "ring"), [(2, True), (3, True), (3, False)], ids=["mirror", "ring", "chain"])
@examples(25)
@given(moves=st.lists(MOVES, min_size=5, max_size=8).map(lambda parts: [move for part in parts for move in part]))
def test_a_reader_of_rings_and_chains_misses_nothing(
    tmp_path_factory: pytest.TempPathFactory, size: int, ring: bool, moves: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("graph")
    shard = PipeShard(folder, segment_max_events=8)
    write_manifest(folder)
    try:
        graph = Graph(shard, size=size, ring=ring)
        reader = Reader(shard, *graph.names)
        for move in moves:
            graph.run(*move)
            reader.look()
        graph.check_end()
        reader.look()
        to_disk(shard)
        reader.look()
        reader.check_end()
    finally:
        shard.crash()


@pytest.fixture
def shard(tmp_path: Path) -> PipeShard:
    shard = PipeShard(tmp_path, segment_max_events=25)
    write_manifest(tmp_path)
    shard.put("s", TopicConfig())
    shard.put("d", TopicConfig())
    return shard


def seen(shard: PipeShard, name: str = "d") -> Any:
    return named(newcomer(shard), name)


@pytest.mark.parametrize("boot", [BOOT, bytes(16)])
def test_what_clients_write_after_a_kill_is_seen_soon(shard: PipeShard, boot: bytes) -> None:
    """As soon as the copies that were in memory are in a segment; above what the power may have taken."""
    shard.append("s", numbers(1, 4))
    Forwarder(shard, "s", "d").pump()
    shard.append("d", numbers(100, 2))
    assert shard.topic("d").head_seq == 6
    shard.restart(boot=boot)
    Forwarder(shard, "s", "d").pump()
    head = shard.topic("d").head_seq
    assert head == 6 if boot == BOOT else head > limits.SEQ_RESERVE
    assert shard.append("d", numbers(200, 3)).first_seq == head + 1
    assert seen(shard).disk_seq == 0
    to_disk(shard)
    topic = seen(shard)
    assert topic.disk_seq == topic.head_seq == head + 3
    shard.append("d", numbers(300, 1))
    topic = seen(shard)
    assert topic.disk_seq == topic.head_seq == head + 4


@pytest.mark.parametrize(
    ("boot", "lost", "trimmed"),
    [(BOOT, 0, 0), (bytes(16), limits.SEQ_RESERVE - 6, limits.SEQ_RESERVE - 4)],
    ids=["kill", "power"],
)
def test_every_seq_is_accounted_for_after_a_crash(shard: PipeShard, boot: bytes, lost: int, trimmed: int) -> None:
    """1 to 4 were copies in memory, 5 and 6 are in the log. The power takes what may have been written to either topic
    behind them."""
    shard.append("s", numbers(1, 4))
    Forwarder(shard, "s", "d").pump()
    shard.append("d", numbers(100, 2))
    shard.restart(boot=boot)
    Forwarder(shard, "s", "d").pump()
    to_disk(shard)
    topic = seen(shard)
    assert (topic.head_seq, topic.count) == (6 + lost + trimmed, 6)
    assert (topic.skipped_total, topic.lost, topic.trimmed) == (0, lost, trimmed)
    assert (unexplained(topic), topic.unsettled) == (0, 0)
    shard.close_pipe("s", "d", keep=True)
    shard.close_pipe("s", "d")
    shard.restart(boot=boot)
    assert list(topic_troubles(seen(shard))) == []


def test_a_copy_that_was_deleted_in_memory_is_counted_once(shard: PipeShard) -> None:
    shard.append("s", [*numbers(1, 3), *numbers(4, 1, tag="x")])
    Forwarder(shard, "s", "d").pump()
    shard.delete("d", before_seq=3)
    shard.delete("d", tag="x")
    for _ in range(2):
        shard.restart()
        Forwarder(shard, "s", "d").pump()
        assert (seen(shard).deleted_total, shard.topic("d").deleted_total) == (3, 3)
    to_disk(shard)
    topic = seen(shard)
    assert (topic.head_seq, topic.count, topic.deleted_total, unexplained(topic)) == (4, 1, 3, 0)


def test_copies_above_a_jump_keep_their_seqs(shard: PipeShard) -> None:
    shard.append("s", numbers(1, 4))
    Forwarder(shard, "s", "d").pump()
    shard.append("d", numbers(100, 2))
    shard.restart(boot=bytes(16))
    Forwarder(shard, "s", "d").pump()
    shard.checkpoint()
    shard.append("s", numbers(5, 2))
    Forwarder(shard, "s", "d").pump()
    before = shard.seqs("d")
    assert list(before)[:6] == list(range(1, 7))
    assert list(before)[6] > limits.SEQ_RESERVE
    shard.restart(boot=bytes(16))
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == before


def test_a_copy_that_is_in_memory_holds_readers_up_and_a_snapshot_lets_them_go(shard: PipeShard) -> None:
    shard.append("d", numbers(1, 3))
    assert seen(shard).disk_seq == 3
    shard.open_pipe("s", "d")
    assert seen(shard).disk_seq == 3, "what was there before the router is on the disk"
    shard.forward("s", "d", numbers(4, 2))
    assert (seen(shard).disk_seq, seen(shard).head_seq) == (3, 5)
    shard.append("d", numbers(6, 2))
    assert (seen(shard).disk_seq, seen(shard).head_seq, seen(shard).count) == (3, 7, 5)
    shard.flush("d")
    assert seen(shard).disk_seq == 3, "no snapshot names the segment yet"
    shard.checkpoint()
    assert (seen(shard).disk_seq, seen(shard).count) == (7, 7)
    shard.append("d", numbers(8, 2))
    assert seen(shard).disk_seq == 9, "records of clients behind it are there at once"
    shard.restart()
    assert seen(shard).disk_seq == 9


def test_seqs_that_are_gone_hold_nobody_up(shard: PipeShard) -> None:
    """Deleted, evicted or lost: nothing will be filled in there."""
    shard.append("d", numbers(1, 5))
    shard.append("d", numbers(6, 5))
    shard.delete("d", before_seq=6)
    shard.open_pipe("s", "d")
    shard.checkpoint()
    assert seen(shard).disk_seq == 10
    # In memory only, and then a class with a log again: 11 to 13 never reach the disk.
    shard.put("d", TopicConfig(durability="ephemeral"))
    shard.append("d", numbers(11, 3))
    shard.put("d", TopicConfig())
    shard.append("d", numbers(14, 3))
    shard.checkpoint()
    assert seen(shard).holes == [(11, 13)]
    assert seen(shard).disk_seq == 16
    shard.forward("s", "d", numbers(17, 1), lost=2)
    shard.append("d", numbers(20, 1))
    shard.checkpoint()
    assert seen(shard).trims == [(17, 18)]
    assert seen(shard).disk_seq == 18, "19 is a copy and in memory"
    to_disk(shard)
    assert seen(shard).disk_seq == 20


def test_what_came_and_went_before_the_router_holds_nobody_up(shard: PipeShard) -> None:
    """A batch that was deleted as a whole is on the disk nowhere once its log file has gone."""
    shard.append("d", numbers(1, 5))
    shard.flush("d")
    shard.checkpoint()
    shard.append("d", numbers(6, 3, tag="x"))
    shard.delete("d", tag="x")
    shard.restart()
    shard.checkpoint()
    assert [(batch.first, batch.wal) for batch in seen(shard).batches] == [(1, False)]
    assert seen(shard).disk_seq == 8
    folder = newcomer(shard)
    shard.open_pipe("s", "d")
    assert named(check_same(folder, shard), "d").disk_seq == 8
    shard.append("d", numbers(9, 2))
    assert named(check_same(folder, shard), "d").disk_seq == 10
    shard.checkpoint()
    assert named(check_same(folder, shard), "d").disk_seq == 10


def test_copies_that_came_and_went_in_memory(shard: PipeShard) -> None:
    """Evicted or deleted before they were on the disk: the frame of a delete tells of it."""
    shard.put("d", TopicConfig(cap_records=4))
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 9, tag="x"))
    shard.append("d", numbers(10, 1))
    shard.delete("d", before_seq=8)
    topic = seen(shard)
    assert (topic.head_seq, topic.evict_floor, topic.disk_seq) == (10, 7, 7)
    assert topic.earliest_seq == 10
    to_disk(shard)
    topic = seen(shard)
    assert (topic.head_seq, topic.evict_floor, topic.disk_seq, topic.earliest_seq) == (10, 7, 10, 8)


def test_when_the_router_goes_everything_is_on_the_disk(shard: PipeShard) -> None:
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 4))
    shard.append("d", numbers(5, 1))
    folder = newcomer(shard)
    assert named(folder, "d").disk_seq == 0
    shard.close_pipe("s", "d")
    for looked in (check_same(folder, shard), folder):
        topic = named(looked, "d")
        assert (topic.pipe, topic.disk_seq, topic.count) == (None, 5, 5)
        assert [stored.record.data for stored in stored_records(looked, topic)] == [b"1", b"2", b"3", b"4", b"5"]


def test_a_position_reaches_the_disk_without_a_copy(shard: PipeShard, tmp_path: Path) -> None:
    """A filter that lets nothing through: the pipe moves, and there is nothing to flush."""
    filtered = rule(shard, "s", "d", filter=["tag", "Eq", "wanted"])
    Path(routers_path(str(tmp_path))).write_bytes(encode_rules([filtered]))
    forwarder = Forwarder(shard, "s", "d", [filtered])

    def lag() -> int:
        (row,) = tables.rows("routers", newcomer(shard), lambda _: True)
        return int(dict(zip(dict(schemas.columns("routers")), row, strict=True))["lag"])

    def snapshots() -> int:
        done = 0
        while shard.mover.step(quiet=True):
            shard.mover.wait()
            done += 1
            assert done < 10, "it never ends"
        return done

    forwarder.pump()
    snapshots()
    made = 0
    for _ in range(12):
        shard.append("s", numbers(1, 1, tag="other"))
        forwarder.pump()
        assert lag() > 0
        shard.wall.pass_ms(20_000)
        made += snapshots()
    assert made == 4, "one a minute"
    shard.wall.pass_ms(60_000)
    snapshots()
    assert (lag(), seen(shard).pipe.at) == (0, 12)
    shard.wall.pass_ms(60_000)
    assert snapshots() == 0, "nothing has moved"
    shard.restart()
    pipe = shard.topic("d").pipe
    assert pipe is not None
    assert pipe.at == 12, "nothing is read again"


def test_copies_in_a_capped_topic(shard: PipeShard) -> None:
    shard.put("d", TopicConfig(cap_records=5))
    shard.open_pipe("s", "d")
    shard.forward("s", "d", numbers(1, 30))
    shard.append("d", numbers(31, 2))
    to_disk(shard)
    topic = seen(shard)
    report = shard.report("d")
    assert (topic.head_seq, topic.earliest_seq, topic.count) == (report.head_seq, report.earliest_seq, report.count)
    assert topic.disk_seq == 32
    assert topic.find_gap(1, 32) == (1, 27, "cap")
    assert topic.find_gap(28, 32) is None
