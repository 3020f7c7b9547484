"""A shard against the naive model: any mix of writes, deletes, configs, time, flushes, checkpoints and crashes.

After every step the two must agree on everything a client can see of every topic. The bounds are made small, so
that blocks, segments, WAL files and promised seqs end every few records.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from figures import HISTORIES
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import EXHAUSTIVE, NaiveTopic, Page, Record, Shard, Stored, Wall, error_of, examples, shown

from topics import limits
from topics.actors.messages import GetTopic, Op
from topics.storage.config import Durability, TopicConfig

SMALL = {
    "BLOCK_RECORDS": 5,
    "BLOCK_BYTES": 2_000,
    "SEQ_RESERVE": 12,
    "WAL_RESERVE_BYTES": 500,
    "SEQ_RESERVE_QUIET_MS": 40,
}
SETTINGS: dict[str, Any] = {
    "wal_file_bytes": 4_000,
    "segment_max_events": 11,
    "segment_max_bytes": 3_000,
    "cache_bytes": 2_000,
}

TOPICS = st.sampled_from(["a", "b"])
TAGS = ["x", "x:1", "x:2", "y"]
DATA = st.sampled_from([b"null", b"1", b'{"a":  [1.0]}', '"é"'.encode(), b'"' + b"long" * 40 + b'"'])
RECORDS = st.lists(
    st.builds(
        Record,
        data=DATA,
        tag=st.sampled_from([None, None, *TAGS]),
        node=st.sampled_from([None, None, "n1", "n2"]),
        meta=st.sampled_from([None, None, None, b'{"m": 1}', b"{}"]),
    ),
    min_size=1,
    max_size=7,
)
CLASSES: list[Durability] = ["disk", "fsync", "memory", "ephemeral"]


def config_of(durability: Durability, **more: object) -> TopicConfig:
    return TopicConfig(durability=durability, durable=durability == "fsync", idempotency_window_ms=500, **more)  # type: ignore[arg-type]


RETENTION = st.fixed_dictionaries(
    {},
    optional={
        "ttl_ms": st.sampled_from([1, 40, 300]),
        "cap_records": st.integers(1, 12),
        "cap_bytes": st.sampled_from([1, 40, 200, 700]),
        "discard": st.sampled_from(["old", "reject"]),
    },
)


class ShardMachine(RuleBasedStateMachine):
    classes: list[Durability] = CLASSES

    def __init__(self) -> None:
        super().__init__()
        HISTORIES.add()
        self._limits = {name: getattr(limits, name) for name in SMALL}
        for name, value in SMALL.items():
            setattr(limits, name, value)
        self.folder = tempfile.mkdtemp(prefix="topics-machine-")
        self.shard = Shard(self.folder, wall=Wall(), **SETTINGS, **self.more_settings())
        self.model: dict[str, NaiveTopic] = {}
        self.keys = 0

    def teardown(self) -> None:
        for name, value in self._limits.items():
            setattr(limits, name, value)
        self.shard.crash()
        shutil.rmtree(self.folder)

    def more_settings(self) -> dict[str, Any]:
        return {}

    @property
    def now(self) -> int:
        return self.shard.clock.now_ms()

    def settle(self) -> None:
        """Everybody who waited for a sync gets it; unpublished batches become readable in the model too."""
        self.shard.settle()
        for topic in self.model.values():
            topic.publish()

    def config(self, data: st.DataObject) -> TopicConfig:
        return config_of(data.draw(st.sampled_from(self.classes)), **data.draw(RETENTION))

    # --- writes ---

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.put("a", data)

    @rule(topic=TOPICS, records=RECORDS, keyed=st.booleans(), wait=st.booleans(), data=st.data())
    def append(self, topic: str, records: list[Record], keyed: bool, wait: bool, data: st.DataObject) -> None:
        key = None
        if keyed:
            self.keys += 1
            key = f"k{self.keys}"
        naive = self.model.get(topic)
        config = self.config(data) if naive is None else None
        sent = self.shard.send_append(topic, records, key=key, config=config)
        if naive is None:
            assert config is not None
            naive = NaiveTopic(config)
            if config.discard == "reject" and naive.never_fits(records):
                assert error_of(lambda: self.shard.answer(sent)).code == "record_too_large"
                return
            self.model[topic] = naive
        elif naive.config.discard == "reject" and (naive.config.cap_records or naive.config.cap_bytes):
            naive.expire(now=self.now)
            if naive.never_fits(records) or naive.overflows(naive.waiting + records):
                expected = "record_too_large" if naive.never_fits(records) else "topic_full"
                error = error_of(lambda: self.shard.answer(sent))
                assert error.code == expected
                assert error.detail is not None
                return
        batch = naive.write(records, now=self.now, key=key)
        self.shard.engine.commit.write()
        if wait or self.shard.answered(sent):
            self.settle()
            answer = self.shard.answer(sent)
            assert (answer.first_seq, answer.records, answer.deduped) == (batch[0].seq, len(batch), False)
            assert answer.head_seq >= batch[-1].seq

    @precondition(lambda self: any(naive.keys for naive in self.model.values()))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        name, key = data.draw(
            st.sampled_from([(name, key) for name, naive in self.model.items() for key in naive.keys])
        )
        naive = self.model[name]
        kept = naive.remembered(key, now=self.now)
        if kept is None:
            return
        sent = self.shard.send_append(name, [Record(b'"again"')], key=key)
        self.settle()
        answer = self.shard.answer(sent)
        assert (answer.first_seq, answer.records, answer.deduped) == (kept.first, kept.count, True)

    @rule(topic=TOPICS, before=st.integers(-3, 30))
    def delete_before(self, topic: str, before: int) -> None:
        if (naive := self.model.get(topic)) is None:
            return
        seq = max(0, naive.earliest + before)
        self.delete(naive, topic, lambda stored: stored.seq < seq, before_seq=seq)

    @rule(
        topic=TOPICS,
        tag=st.sampled_from([*TAGS, "x:", "", "z"]),
        prefix=st.booleans(),
        below=st.none() | st.integers(0, 20),
    )
    def delete_tag(self, topic: str, tag: str, prefix: bool, below: int | None) -> None:
        if (naive := self.model.get(topic)) is None:
            return
        before = None if below is None else naive.earliest + below

        def matches(stored: Stored) -> bool:
            known = stored.record.tag
            if known is None or (before is not None and stored.seq >= before):
                return False
            return known.startswith(tag) if prefix else known == tag

        self.delete(naive, topic, matches, tag=tag, prefix=prefix, before_seq=before)

    def delete(self, naive: NaiveTopic, topic: str, matches: Callable[[Stored], bool], **how: object) -> None:
        naive.expire(now=self.now)
        deleted = naive.delete(matches)
        answer = self.shard.delete(topic, **how)  # type: ignore[arg-type]
        assert answer.deleted == deleted
        self.settle()

    @rule(topic=TOPICS, data=st.data())
    def put(self, topic: str, data: st.DataObject) -> None:
        config = self.config(data)
        naive = self.model.get(topic)
        answer = self.shard.put(topic, config)
        assert answer.created == (naive is None)
        assert answer.config == config
        if naive is None:
            self.model[topic] = NaiveTopic(config)
        else:
            naive.configure(config, now=self.now)
        self.settle()

    @rule(topic=TOPICS, if_empty=st.booleans())
    def drop(self, topic: str, if_empty: bool) -> None:
        naive = self.model.get(topic)
        if naive is not None:
            naive.expire(now=self.now)
        if if_empty and naive is not None and (naive.live or naive.pending):
            assert error_of(lambda: self.shard.drop(topic, if_empty=True)).code == "topic_not_empty"
        else:
            assert self.shard.drop(topic, if_empty=if_empty) == (naive is not None)
            self.model.pop(topic, None)
        self.settle()

    # --- time ---

    @rule(ms=st.sampled_from([1, 7, 41, 400]))
    def time_passes(self, ms: int) -> None:
        self.shard.wall.pass_ms(ms)

    @rule(ms=st.sampled_from([1, 50, 10_000]))
    def clock_is_set_back(self, ms: int) -> None:
        before = self.now
        self.shard.wall.set_back_ms(ms)
        assert self.now >= before

    # --- maintenance ---

    @rule(topic=TOPICS)
    def flush(self, topic: str) -> None:
        if topic in self.model:
            self.shard.flush(topic)

    @rule()
    def checkpoint(self) -> None:
        self.shard.checkpoint()

    @rule()
    def lower_ceilings(self) -> None:
        self.settle()
        self.shard.engine.commit.lower_ceilings(self.now)

    @rule(topic=TOPICS, before=st.integers(0, 12), tag=st.sampled_from(TAGS))
    def delete_while_flushing(self, topic: str, before: int, tag: str) -> None:
        """The thread writes blocks while the loop goes on: what was deleted meanwhile stays deleted."""
        if (naive := self.model.get(topic)) is None:
            return
        self.shard.mover.flush(self.shard.topic(topic))
        seq = naive.earliest + before
        self.delete(naive, topic, lambda stored: stored.seq < seq, before_seq=seq)
        self.delete(naive, topic, lambda stored: stored.record.tag == tag, tag=tag)
        self.shard.mover.wait()

    # --- the end of a process ---

    def restarted(self, *, clean: bool) -> None:
        for name, naive in self.model.items():
            before = naive.head
            naive.survive_crash(now=self.now)
            topic = self.shard.topic(name)
            if naive.was_ephemeral:
                # How far ahead the head is set, and what of the loss is shown as a gap, is the shard's choice.
                assert topic.head_seq >= max(before, naive.head), "seqs would be used again"
                assert topic.evict_floor <= topic.earliest_seq
                if clean:
                    assert topic.head_seq == before
                naive.head, naive.evict_floor = topic.head_seq, topic.evict_floor

    @rule()
    def crash(self) -> None:
        # After a restart the clock goes on from the highest time on disk; a wall clock behind that is Clock's test.
        self.shard.wall.wall_ms = max(self.shard.wall.wall_ms, self.now)
        self.shard.restart()
        self.restarted(clean=False)

    @rule()
    def crash_after_flush_was_written(self) -> None:
        """The blocks are on disk, but nobody took the result in."""
        self.shard.wall.wall_ms = max(self.shard.wall.wall_ms, self.now)
        for name in self.model:
            if not self.shard.mover.busy:
                self.shard.mover.flush(self.shard.topic(name))
        self.shard.restart()
        self.restarted(clean=False)

    @rule()
    def crash_after_snapshot_was_written(self) -> None:
        self.shard.wall.wall_ms = max(self.shard.wall.wall_ms, self.now)
        self.shard.mover.checkpoint()
        self.shard.restart()
        self.restarted(clean=False)

    @rule()
    def stop_and_start(self) -> None:
        self.shard.wall.wall_ms = max(self.shard.wall.wall_ms, self.now)
        self.settle()
        self.shard.stop()
        self.shard.open()
        self.restarted(clean=True)

    # --- what must hold ---

    @invariant()
    def agree(self) -> None:
        assert set(self.shard.engine.topics) == set(self.model)
        for name, naive in self.model.items():
            naive.expire(now=self.now)
            self.check_state(name, naive)
            self.check_contents(name, naive)
            if naive.was_ephemeral:
                self.check_losses(name, naive)
            else:
                self.check_gaps(name, naive)
        totals = self.shard.engine.totals
        assert totals.records == sum(naive.count for naive in self.model.values())
        assert totals.bytes == sum(naive.bytes for naive in self.model.values())

    def check_state(self, name: str, naive: NaiveTopic) -> None:
        correlation = self.shard.send(Op.GET_TOPIC, GetTopic(name, False))  # and nobody is settled by it
        report = self.shard.answer(correlation)
        assert (report.head_seq, report.earliest_seq) == (naive.head, naive.earliest)
        assert (report.count, report.bytes) == (naive.count, naive.bytes)
        assert report.config == naive.config
        assert self.shard.topic(name).evict_floor == naive.evict_floor
        assert naive.evict_floor <= naive.earliest

    def check_contents(self, name: str, naive: NaiveTopic) -> None:
        everything = shown(naive.live)
        assert self.shard.everything(name) == everything
        assert self.shard.everything(name, limit=3) == everything
        assert self.shard.everything(name, max_bytes=150) == everything
        foreign = [stored for stored in everything if stored.record.node != "n1"]
        assert self.shard.everything(name, nodes=["n1"], limit=4) == foreign

    def check_losses(self, name: str, naive: NaiveTopic) -> None:
        """What went with a process is told to whoever stood before it, and no live record is called lost."""
        gone = sorted(naive.gone_with_process)
        for seq in {*gone[:2], *gone[-2:]}:
            found = self.shard.diff(name, seq - 1).tombstone
            assert found is not None, f"record {seq} is gone without a word"
            assert found.gap_from <= seq <= found.gap_to
            assert not [stored for stored in naive.live if found.gap_from <= stored.seq <= found.gap_to]

    def check_gaps(self, name: str, naive: NaiveTopic) -> None:
        cursors = {0, naive.evict_floor - 2, naive.evict_floor - 1, naive.earliest - 1, naive.head, naive.head + 1}
        for cursor in sorted(cursor for cursor in cursors if cursor >= 0):
            page = self.shard.diff(name, cursor)
            expected = naive.gap(cursor)
            found = page.tombstone
            if expected is None:
                assert found is None, f"a tombstone for {cursor}: {found}"
            else:
                assert found is not None, f"no tombstone for {cursor}, expected {expected}"
                assert (found.gap_from, found.gap_to) == expected[:2]
                assert found.reason in expected[2]
                assert (found.earliest_seq, found.head_seq) == (naive.earliest, naive.head)
            self.check_page(page, shown(naive.after(cursor)))
            assert (page.head_seq, page.earliest_seq) == (naive.head, naive.earliest)
            assert page.lag == page.head_seq - page.next_from_seq
            assert page.caught_up == (page.lag == 0)

    def check_page(self, page: Page, expected: list[Stored]) -> None:
        assert page.stored == expected


class LoggedMachine(ShardMachine):
    """Without the resident class everything must survive exactly."""

    classes = ["disk", "fsync", "memory"]  # noqa: RUF012


class FsyncMachine(ShardMachine):
    classes = ["fsync"]  # noqa: RUF012


class TieredMachine(ShardMachine):
    """Segments go to the cold tier as soon as they are sealed, or all but one, at any moment between the others."""

    classes = ["disk", "fsync", "memory"]  # noqa: RUF012

    def more_settings(self) -> dict[str, Any]:
        return {"cold_dir": f"{self.folder}/cold", "hot_retain_segments": 0}

    @rule()
    def copy_to_cold(self) -> None:
        self.shard.copy_to_cold()

    @rule()
    def relocate(self) -> None:
        self.shard.relocate()

    @rule()
    def crash_after_relocation(self) -> None:
        """The hot files are gone, the snapshot is written, and nobody took the result in."""
        self.shard.wall.wall_ms = max(self.shard.wall.wall_ms, self.now)
        self.shard.copy_to_cold()
        self.shard.mover.checkpoint()
        self.shard.restart()
        self.restarted(clean=False)

    @rule(topic=TOPICS, before=st.integers(0, 6), tag=st.sampled_from(TAGS))
    def delete_while_it_is_copied(self, topic: str, before: int, tag: str) -> None:
        if (naive := self.model.get(topic)) is None:
            return
        self.settle()
        self.shard.copy_to_cold()
        seq = naive.earliest + before
        self.delete(naive, topic, lambda stored: stored.seq < seq, before_seq=seq)
        self.delete(naive, topic, lambda stored: stored.record.tag == tag, tag=tag)
        self.shard.checkpoint()

    def check_page(self, page: Page, expected: list[Stored]) -> None:
        """It may end before what has to be fetched."""
        assert page.stored == expected[: len(page.stored)]
        assert page.stored or not expected or page.tombstone


@pytest.mark.parametrize("machine", [LoggedMachine, FsyncMachine, ShardMachine, TieredMachine])
@pytest.mark.timeout(3600 if EXHAUSTIVE else 120)
def test_a_shard_is_its_naive_model(machine: type[ShardMachine]) -> None:
    run_state_machine_as_test(machine, settings=examples(60, stateful_step_count=40))
