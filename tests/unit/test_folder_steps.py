"""A folder seen from outside, step by step beside the shard that writes it: appends, deletes, configs, drops, flushes,
snapshots, crashes, in any order. Who has looked at every step sees what a newcomer sees, and both see the truth."""

from __future__ import annotations

import errno
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from folderplay import check_same, check_truth, newcomer, write_manifest
from hypothesis import example, given
from hypothesis import strategies as st
from model import QuickDisk, Record, Shard, examples
from onlooker import named

from topics import limits
from topics.datadir.view.folder import Folder
from topics.errors import ApiError
from topics.storage.config import TopicConfig

TOPICS = ["a", "b", "c"]
TAGS = [None, "x", "y", "x1"]
CONFIGS = [
    TopicConfig(),
    TopicConfig(durability="fsync", durable=True),
    TopicConfig(durability="memory"),
    TopicConfig(cap_records=7),
    TopicConfig(cap_records=7, durability="fsync", durable=True),
    TopicConfig(cap_bytes=600),
    TopicConfig(cap_bytes=600, cap_records=9, ttl_ms=5_000),
    TopicConfig(ttl_ms=3_000),
    TopicConfig(cap_records=12, discard="reject"),
    TopicConfig(ttl_ms=3_000, cap_bytes=900, discard="reject"),
]
EPHEMERAL = TopicConfig(durability="ephemeral")

Step = tuple[Any, ...]
_topics = st.sampled_from(TOPICS)
STEPS = st.one_of(
    st.tuples(st.just("append"), _topics, st.integers(1, 12)),
    st.tuples(st.just("append"), _topics, st.integers(1, 12)),
    st.tuples(st.just("send"), _topics, st.integers(1, 6)),
    st.tuples(st.just("long"), _topics, st.integers(1, 6)),
    st.tuples(st.just("before"), _topics, st.integers(0, 40)),
    st.tuples(st.just("tag"), _topics, st.sampled_from(["x", "y", "x1"])),
    st.tuples(st.just("put"), _topics, st.integers(0, len(CONFIGS) - 1)),
    st.tuples(st.just("drop"), _topics),
    st.tuples(st.just("flush"), _topics),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("pass"), st.sampled_from([1, 700, 2_000])),
    st.tuples(st.just("crash")),
    st.tuples(st.just("stop")),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 8)


class Play:
    def __init__(self, folder: Any, **settings: Any) -> None:
        self.shard = Shard(folder, wal_file_bytes=9_000, segment_max_events=20, **settings)
        write_manifest(folder)
        self.onlooker = newcomer(self.shard)
        self.forgetful: set[str] = set()  # some records were in memory only
        self._numbers = count(1)

    def records(self, many: int, *, long: bool = False) -> list[Record]:
        found = []
        for _ in range(many):
            number = next(self._numbers)
            data = b'{"n": %d, "p": "%b"}' % (number, b"x" * (700 if long else number % 40))
            tag = TAGS[number % len(TAGS)]
            meta = b'{"m":%d}' % number if number % 5 == 0 else None
            found.append(Record(data, tag, f"node-{number % 2}" if number % 3 == 0 else None, meta))
        return found

    def do(self, step: Step) -> None:
        verb, *rest = step
        shard = self.shard
        if verb in ("append", "long", "send"):
            name, many = rest
            try:
                if verb == "send":
                    # Written, and of some classes not readable yet: a reader of the folder sees it first.
                    shard.send_append(name, self.records(many))
                    shard.engine.commit.write()
                    check_same(self.onlooker, shard)
                else:
                    shard.append(name, self.records(many, long=verb == "long"), key=f"key-{next(self._numbers)}")
            except ApiError as error:
                if error.code not in ("topic_full", "record_too_large"):
                    raise
        elif verb == "put":
            name, config = rest
            if config is EPHEMERAL:
                self.forgetful.add(name)
            shard.put(name, config if isinstance(config, TopicConfig) else CONFIGS[config])
        elif verb == "pass":
            shard.wall.pass_ms(rest[0])
        elif verb == "checkpoint":
            shard.checkpoint()
        elif verb == "crash":
            shard.restart()
        elif verb == "stop":
            shard.stop()
            check_same(self.onlooker, shard)
            shard.open()
        elif rest[0] not in shard.engine.topics:
            return
        elif verb == "before":
            shard.delete(rest[0], before_seq=rest[1])
        elif verb == "tag":
            shard.delete(rest[0], tag=rest[1], prefix=rest[1] == "x")
        elif verb == "drop":
            shard.drop(rest[0])
            self.forgetful.discard(rest[0])
        elif verb == "flush":
            shard.flush(rest[0])

    def check(self) -> None:
        shard = self.shard
        shard.settle()
        for topic in shard.engine.topics.values():
            shard.engine.refresh(topic)
        fresh = check_same(self.onlooker, shard)
        check_truth(fresh, shard, forgetful=self.forgetful)
        check_truth(self.onlooker, shard, forgetful=self.forgetful)


def play(folder: Any, steps: list[Step]) -> None:
    here = Play(folder)
    for step in steps:
        here.do(step)
        here.check()
    here.shard.stop()
    here.onlooker.look(now_ms=here.shard.clock.now_ms())
    assert here.onlooker.shards[0].clean
    assert not here.onlooker.shards[0].torn


FSYNC_CAP = 4


@examples(40)
@given(steps=st.lists(STEPS, min_size=15, max_size=40))
# The folder shows a batch before it can be read, and a delete then makes room: nothing is evicted after all.
@example(steps=[("put", "a", FSYNC_CAP), ("append", "a", 7), ("send", "a", 5), ("before", "a", 6)])
def test_any_steps(tmp_path_factory: pytest.TempPathFactory, steps: list[Step]) -> None:
    play(tmp_path_factory.mktemp("steps"), steps)


MORE = [("append", "a", 5), ("append", "b", 12), ("flush", "b"), ("checkpoint",)]


@pytest.mark.full
@examples(60)
@given(
    steps=st.lists(
        st.one_of(
            STEPS,
            st.tuples(st.just("put"), _topics, st.just(EPHEMERAL)),
            st.tuples(st.just("put"), _topics, st.just(CONFIGS[0])),
        ),
        min_size=12,
        max_size=30,
    )
)
@example(steps=[("put", "a", EPHEMERAL), ("append", "a", 9), ("put", "a", CONFIGS[0]), *MORE, ("crash",), *MORE])
def test_records_that_are_in_memory_only(tmp_path_factory: pytest.TempPathFactory, steps: list[Step]) -> None:
    """Of an ephemeral topic the folder shows what was written while it was none, and never more."""
    play(tmp_path_factory.mktemp("ephemeral"), steps)


def test_nobody_misses_what_is_on_no_disk(tmp_path: Path) -> None:
    """A reader over all topics does not fail because of one that never had a record for it."""
    shard = Shard(tmp_path)
    write_manifest(tmp_path)
    shard.append("t", [Record(b"1")] * 3, config=msgspec.structs.replace(EPHEMERAL, cap_records=2))
    shard.restart()
    shard.append("t", [Record(b"2")] * 3)
    shard.checkpoint()
    topic = named(newcomer(shard), "t")
    assert 3 < topic.evict_floor <= topic.head_seq
    assert topic.find_gap(1, topic.head_seq) is None
    assert topic.find_gap(topic.head_seq, topic.head_seq) is None
    shard.put("t", TopicConfig())
    gap = named(newcomer(shard), "t").find_gap(1, topic.head_seq)
    assert gap is not None, "of another class it is a loss"
    assert gap[0] == 1


def features(folder: Folder) -> set[str]:
    """Which of the cases that matter there are to be seen."""
    found: set[str] = set()
    for topic in folder.topics:
        name = topic.name
        found |= {f"{name} {'sealed' if segment.sealed else 'open'}" for segment in topic.segments}
        found |= {f"{name} flagged" for segment in topic.segments if segment.flagged}
        found |= {f"{name} log" for batch in topic.batches if batch.wal}
        found |= {f"{name} cut" for batch in topic.batches if 0 < batch.live(topic.low) < batch.live(0)}
        found |= {f"{name} {kind}" for kind in ("deleted", "evicted", "expired") if getattr(topic, f"{kind}_total")}
    return found


def test_steps_that_touch_everything(tmp_path: Any) -> None:
    """The features above in one fixed play, so that none of them depends on luck."""
    here = Play(tmp_path)
    seen: set[str] = set()

    def do(*step: Any) -> None:
        here.do(step)
        here.check()
        seen.update(features(here.onlooker))

    for number in range(6):
        for name, config in (("a", 0), ("b", 5), ("c", 7)):
            do("put", name, config)
            for _ in range(7):
                do("append", name, 3)
                do("pass", 700)
            do("tag", name, "x")
            do("before", name, 10 * number)
            do("flush", name)
            do("checkpoint")
        for _ in range(5):
            do("pass", 300)
        do("long", "a", 6)
        do("long", "b", 6)
        do("checkpoint")
        do("crash" if number % 2 else "stop")
    assert {"a sealed", "a open", "a flagged", "a log", "a deleted"} <= seen
    assert {"b evicted", "b cut", "c expired", "c cut"} <= seen
    assert len({wal.number for wal in here.onlooker.shards[0].wals}) > 1
    # Dropped and made again: another topic under the same name.
    before = {topic.name: topic.id for topic in here.onlooker.topics}
    for name in TOPICS:
        here.do(("drop", name))
        here.do(("append", name, 3))
        here.check()
    assert not {topic.id for topic in here.onlooker.topics} & set(before.values())


def test_a_segment_that_nobody_needs_any_more_goes(tmp_path: Any) -> None:
    here = Play(tmp_path)
    here.do(("append", "a", 12))
    here.do(("append", "a", 12))
    here.do(("flush", "a"))
    here.do(("append", "a", 12))
    here.do(("flush", "a"))
    here.do(("checkpoint",))
    here.check()
    first = here.onlooker.topics[0].segments[0].first_seq
    assert first == 1
    here.do(("before", "a", 25))
    here.check()
    here.do(("checkpoint",))
    here.check()
    assert here.onlooker.topics[0].segments[0].first_seq == 25


def test_the_clock_of_the_shard_counts_where_it_is_ahead(tmp_path: Any) -> None:
    """It never goes back; the machine's may."""
    here = Play(tmp_path)
    here.do(("put", "a", TopicConfig(ttl_ms=1_000)))
    here.do(("append", "a", 3))
    here.do(("pass", 2_000))
    here.do(("append", "a", 2))
    here.shard.wall.set_back_ms(1_900)
    here.check()
    early = Folder(str(tmp_path), now_ms=here.shard.wall.wall_ms)
    assert (early.topics[0].count, here.shard.report("a").count) == (2, 2)


def test_a_write_that_is_taken_back_is_taken_back_here_too(tmp_path: Any) -> None:
    """A failed write is cut off, and its numbers go to another one: whoever saw the first must not keep it."""
    here = Play(tmp_path)
    here.do(("append", "a", 3))
    here.do(("send", "a", 2))
    here.shard.settle()
    wal = here.shard.engine.wal
    file = here.onlooker.shards[0].wals[-1]
    seen = here.onlooker.topics[0].head_seq
    assert seen == 5
    # As wal.write() does when the disk fails behind the frame.
    path = tmp_path / file.file
    whole = path.read_bytes()
    start = here.onlooker.topics[0].batches[-1].offset
    path.write_bytes(whole[:start] + bytes(len(whole) - start))
    here.onlooker.look(now_ms=here.shard.clock.now_ms())
    assert here.onlooker.topics[0].head_seq == 3
    assert Folder(str(tmp_path), now_ms=0).topics[0].head_seq == 3
    assert wal.current.path == str(path)


class WithoutSnapshots(QuickDisk):
    """Takes everything but a snapshot, as the disk of a shard that is killed just before it writes one."""

    def write_whole(self, path: str, data: bytes) -> None:
        if path.endswith(".snap"):
            raise OSError(errno.EIO, "the shard is killed")
        super().write_whole(path, data)


@pytest.mark.parametrize("match", [{"before_seq": 5}, {"before_seq": 11}, {"tag": "x"}], ids=str)
def test_deletes_are_counted_though_their_flags_reached_the_segment_before_a_snapshot(
    tmp_path: Path, match: dict[str, Any]
) -> None:
    here = Play(tmp_path)
    shard = here.shard
    shard.append("t", [Record(b"1", tag="x"), Record(b"2")] * 6)
    shard.flush("t")
    shard.delete("t", tag="x", before_seq=2)
    shard.checkpoint()
    shard.restart(WithoutSnapshots())
    before = shard.delete("t", **match).deleted + 1
    here.check()
    with pytest.raises(OSError, match="killed"):
        shard.checkpoint()
    assert check_same(here.onlooker, shard).topics[0].deleted_total == before
    for _ in range(2):
        shard.restart()
        assert (shard.topic("t").deleted_total, shard.topic("t").unaccounted) == (before, 0)
        shard.checkpoint()
        assert check_same(here.onlooker, shard).topics[0].deleted_total == before
