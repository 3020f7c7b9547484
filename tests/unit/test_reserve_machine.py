"""Any history of two topics, ended by kills and power cuts: no seq is given out twice, and few are skipped.

The machine knows what was answered, which is what a client or a reader can know, and when what was written. A power
cut takes any part of what was not synced; a write that failed may be on the platter all the same.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import pytest
from figures import HISTORIES
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from model import EXHAUSTIVE, Record, Shard, examples
from test_engine_recovery import PowerDisk

from topics import limits
from topics.actors.messages import Op, PutTopic
from topics.errors import ApiError
from topics.storage.config import Durability, TopicConfig

LEAST, WINDOW_MS, QUIET_MS = limits.SEQ_RESERVE, limits.SEQ_RESERVE_MS, limits.SEQ_RESERVE_QUIET_MS
TOPICS = st.sampled_from(["a", "b"])
CLASSES: list[Durability] = ["disk", "fsync", "memory", "ephemeral"]
COUNTS = st.sampled_from([1, 1, 2, 7, 49, 51, 60, 101, 250, 1_000])


class DoubtfulDisk(PowerDisk):
    """Writes fail on demand, though all their bytes arrive; cutting them off is undone by a power cut, too."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def write(self, fd: int, data: bytes, offset: int) -> None:
        super().write(fd, data, offset)
        if self.fails:
            raise OSError(errno.EIO, "bad sector")

    def cut(self, fd: int, end: int, size: int) -> None:
        self.fails = False
        rest = os.fstat(fd).st_size - end
        super().write(fd, bytes(rest), end)


class Told(msgspec.Struct):
    """What clients know of a topic, and how it was written."""

    highest: int = 0  # of the seqs that were answered
    writes: list[tuple[int, int]] = []  # when, and how many
    unproven: bool = False  # written in the memory class, and not synced since: a power cut may give it out again

    def most_in_the_window(self) -> int:
        begin = most = within = 0
        for ms, written in self.writes:
            within += written
            while self.writes[begin][0] < ms - WINDOW_MS:
                within -= self.writes[begin][1]
                begin += 1
            most = max(most, within)
        return most


class ReserveMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        HISTORIES.add()
        self.folder = Path(tempfile.mkdtemp(prefix="topics-reserve-"))
        self.disk = DoubtfulDisk()
        self.shard = Shard(self.folder, disk=self.disk, wal_file_bytes=60_000)
        self.told: dict[str, Told] = {}
        self.sent: dict[int, tuple[str, int]] = {}  # appends that wait
        self.boots = count(1)

    def teardown(self) -> None:
        self.shard.crash()
        shutil.rmtree(self.folder)

    # --- what clients do ---

    @rule(topic=TOPICS, durability=st.sampled_from(CLASSES), wait=st.booleans())
    def put(self, topic: str, durability: Durability, wait: bool) -> None:
        config = TopicConfig(durability=durability, durable=durability == "fsync")
        sent = self.shard.send(Op.PUT_TOPIC, PutTopic(topic, config, None))
        self.told.setdefault(topic, Told())
        if wait:
            self.shard.settle()
            self.shard.answer(sent)

    @rule(topic=TOPICS, records=COUNTS, batches=st.integers(1, 4), end=st.sampled_from(["stage", "write", "settle"]))
    def append(self, topic: str, records: int, batches: int, end: str) -> None:
        if topic not in self.told:
            return
        told = self.told[topic]
        for _ in range(batches):
            sent = self.shard.send_append(topic, [Record(b"%d" % number) for number in range(records)])
            self.sent[sent] = (topic, records)
            told.writes.append((self.shard.clock.now_ms(), records))
        if self.shard.topic(topic).config.durability == "memory":
            told.unproven = True
        if end == "write":
            self.shard.engine.commit.write()
        elif end == "settle":
            self.shard.settle()

    @rule(topic=TOPICS, records=COUNTS)
    def fail(self, topic: str, records: int) -> None:
        """The write goes wrong in the middle of it; nobody may have been told anything."""
        if topic not in self.told:
            return
        self.shard.settle()
        self.heard()
        self.disk.fails = True
        sent = self.shard.send_append(topic, [Record(b"0")] * records)
        try:
            self.shard.settle()
            if self.shard.answered(sent):
                answer = self.shard.answer(sent)  # ephemeral, and no promise was due
                self.told[topic].highest = answer.first_seq + records - 1
                self.told[topic].writes.append((self.shard.clock.now_ms(), records))
        except ApiError:
            pass
        self.disk.fails = False

    @rule(topic=TOPICS, share=st.floats(0, 1))
    def delete(self, topic: str, share: float) -> None:
        if topic in self.told:
            self.shard.delete(topic, before_seq=int(share * self.shard.topic(topic).head_seq))

    @rule(topic=TOPICS)
    def drop(self, topic: str) -> None:
        if topic in self.told:
            self.shard.settle()
            self.heard()
            self.shard.drop(topic)
            del self.told[topic]

    # --- what the shard does by itself ---

    @rule(ms=st.sampled_from([1, 30, 300, 1_100, 2_500]))
    def time_passes(self, ms: int) -> None:
        self.shard.wall.pass_ms(ms)
        self.shard.engine.commit.lower_ceilings(self.shard.clock.now_ms())

    @rule(fails=st.booleans(), sync=st.booleans())
    def grow_quiet(self, fails: bool, sync: bool) -> None:
        """Long enough for promises to be lowered, which may fail, or may reach the platter or not."""
        self.shard.settle()
        self.shard.wall.pass_ms(QUIET_MS + WINDOW_MS)
        self.disk.fails = fails and bool(self.shard.engine.commit.reserved)
        self.shard.engine.commit.lower_ceilings(self.shard.clock.now_ms())
        failed, self.disk.fails = fails, False
        if sync:
            self.shard.sync()
            if not failed:
                for told in self.told.values():
                    told.writes.clear()  # it promises no more than a quiet topic does

    @rule()
    def sync(self) -> None:
        self.shard.sync()
        for told in self.told.values():
            told.unproven = False

    @rule(topic=TOPICS)
    def flush(self, topic: str) -> None:
        if topic in self.told:
            self.shard.settle()
            self.shard.flush(topic)

    @rule(wait=st.booleans())
    def checkpoint(self, wait: bool) -> None:
        """Also between a staged promise and its write."""
        if wait:
            self.shard.settle()
        if not self.shard.mover.busy:
            self.shard.mover.checkpoint()
            self.shard.mover.wait()

    # --- how it ends ---

    @rule()
    def kill(self) -> None:
        self.heard()
        last = self.last_given()
        self.shard.restart(self.fresh_disk(), boot=self.boot())
        self.restarted(last, power_cut=False)

    @rule(fate=st.sampled_from(["none", "some", "all"]), seed=st.integers(0, 2**32))
    def cut_power(self, fate: str, seed: int) -> None:
        self.heard()
        last = self.last_given()
        disk, random = self.disk, Random(seed)  # what is synced by now depends on a thread, and so on no strategy
        self.shard.crash()
        disk.cut_power(self.folder, lambda: fate == "all" or (fate == "some" and random.random() < 0.5))
        next(self.boots)
        self.shard.open(self.fresh_disk(), boot=self.boot())
        self.restarted(last, power_cut=True)

    @rule()
    def stop_and_start(self) -> None:
        self.shard.settle()
        self.heard()
        before = {name: self.shard.topic(name).head_seq for name in self.told}
        self.shard.stop()
        self.shard.open(self.fresh_disk(), boot=self.boot())
        assert {name: self.shard.topic(name).head_seq for name in self.told} == before

    def fresh_disk(self) -> DoubtfulDisk:
        self.disk = DoubtfulDisk()
        return self.disk

    def boot(self) -> bytes:
        """Of the machine: another one after each power cut."""
        number = next(self.boots)
        self.boots = count(number)
        return number.to_bytes(16, "little")

    def last_given(self) -> dict[str, int]:
        return {name: self.shard.topic(name).next_seq - 1 for name in self.told}

    def heard(self) -> None:
        """Take the answers that have come."""
        for sent, (topic, records) in list(self.sent.items()):
            if self.shard.answered(sent):
                del self.sent[sent]
                first = self.shard.answer(sent).first_seq
                told = self.told[topic]
                assert first > told.highest, f"{topic}: {first} was given out before"
                told.highest = first + records - 1

    def restarted(self, last: dict[str, int], *, power_cut: bool) -> None:
        self.sent.clear()
        for name, told in list(self.told.items()):
            exempt = power_cut and told.unproven
            if name not in self.shard.engine.topics:
                assert power_cut, f"{name} is gone"
                assert told.highest == 0 or exempt, f"{name}: gone, though {told.highest} seqs were given out"
                del self.told[name]
                continue
            topic = self.shard.topic(name)
            assert topic.next_seq == topic.head_seq + 1
            if not exempt:
                assert topic.head_seq >= told.highest, f"{name}: {told.highest} would be given out again"
            told.highest, told.unproven = topic.head_seq, False
            skipped = topic.head_seq - last[name]
            assert skipped <= max(LEAST, told.most_in_the_window()), f"{name}: {skipped} skipped"

    @invariant()
    def no_seq_comes_twice(self) -> None:
        self.heard()


@pytest.mark.timeout(3600 if EXHAUSTIVE else 120)
def test_no_history_gives_a_seq_out_twice() -> None:
    run_state_machine_as_test(ReserveMachine, settings=examples(150, stateful_step_count=30))
