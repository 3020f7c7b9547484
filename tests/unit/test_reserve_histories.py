"""Any history of two topics, ended by kills and power cuts: no seq is given out twice, and few are skipped.

The machine knows what was answered, which is what a client or a reader can know, and when what was written. A power
cut takes any part of what was not synced; a write that failed may be on the platter all the same.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from figures import HISTORIES
from hypothesis import given
from hypothesis import strategies as st
from model import EXHAUSTIVE, QuickDisk, Record, Shard, examples
from test_engine_recovery import PowerDisk

from topics import limits
from topics.actors.messages import Op, PutTopic
from topics.errors import ApiError
from topics.storage.config import Durability, TopicConfig

LEAST, WINDOW_MS, QUIET_MS = limits.SEQ_RESERVE, limits.SEQ_RESERVE_MS, limits.SEQ_RESERVE_QUIET_MS
CLASSES: list[Durability] = ["disk", "fsync", "memory", "ephemeral"]
COUNTS = [1, 1, 2, 7, 49, 51, 60, 101, 250, 1_000]
WEIGHTS = {
    "append": 12,
    "put": 3,
    "fail": 2,
    "delete": 1,
    "drop": 1,
    "time_passes": 3,
    "grow_quiet": 3,
    "sync": 2,
    "flush": 1,
    "checkpoint": 2,
    "kill": 2,
    "cut_power": 3,
    "stop_and_start": 1,
}


class DoubtfulDisk(PowerDisk):
    """Writes fail on demand, though their bytes reach the platter; a power cut undoes that they were cut off. What the
    syncer asks for has not happened until the shard hears of it, so that the power can go before."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.at_once = False
        self.asked: list[tuple[int, int]] = []  # inode, and how many of its pieces were there

    def sync(self, fd: int) -> None:
        if self.at_once or threading.current_thread() is threading.main_thread():
            super().sync(fd)
        else:
            inode = os.fstat(fd).st_ino
            self.asked.append((inode, len(self.unsynced.get(inode, []))))

    def reach(self) -> None:
        """The syncs that were asked for are done."""
        for inode, pieces in self.asked:
            del self.unsynced.get(inode, [])[:pieces]
        self.asked.clear()

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self.fails:
            QuickDisk.write(self, fd, data, offset)
            raise OSError(errno.EIO, "bad sector")
        super().write(fd, data, offset)

    def cut(self, fd: int, end: int, size: int) -> None:
        self.fails = False
        rest = os.fstat(fd).st_size - end
        super().write(fd, bytes(rest), end)


class HeldShard(Shard):
    disk: DoubtfulDisk

    def settle(self) -> None:
        self.engine.commit.write()
        while self.syncer.busy:
            outcome = self.syncer.wait()
            self.disk.reach()
            self.engine.commit.synced(outcome)


class Told(msgspec.Struct):
    """What clients know of a topic, and how it was written."""

    highest: int = 0  # of the seqs that were answered
    writes: list[tuple[int, int]] = []  # when, and how many
    failed: int = 0  # a power cut may bring it back
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


class History:
    """Steps drawn by weight: most of what strategies find by themselves are histories in which little was written."""

    def __init__(self, folder: Path, random: Random) -> None:
        HISTORIES.add()
        self.folder, self.random = folder, random
        self.disk = DoubtfulDisk()
        self.shard = HeldShard(self.folder, disk=self.disk, wal_file_bytes=60_000)
        self.told: dict[str, Told] = {}
        self.sent: dict[int, tuple[str, int]] = {}  # appends that wait
        self.boot = 1
        self.steps: list[str] = []
        for name in ("a", "b"):
            self.put(name)

    def run(self, steps: int) -> None:
        rules = [rule for rule, weight in WEIGHTS.items() for _ in range(weight)]
        for _ in range(steps):
            rule = self.random.choice(rules)
            self.steps.append(rule)
            name = self.random.choice(["a", "b"])
            if rule in ("append", "fail", "delete", "drop", "flush", "put"):
                if name in self.told or rule == "put":
                    getattr(self, rule)(name)
            else:
                getattr(self, rule)()
            self.heard()

    def odds(self, share: float) -> bool:
        return self.random.random() < share

    # --- what clients do ---

    def put(self, topic: str) -> None:
        durability = self.random.choice(CLASSES)
        config = TopicConfig(durability=durability, durable=durability == "fsync")
        sent = self.shard.send(Op.PUT_TOPIC, PutTopic(topic, config, None))
        self.told.setdefault(topic, Told())
        if self.odds(0.5):
            self.shard.settle()
            self.shard.answer(sent)

    def append(self, topic: str) -> None:
        told, records = self.told[topic], self.random.choice(COUNTS)
        for _ in range(self.random.randint(1, 4)):
            sent = self.shard.send_append(topic, [Record(b"%d" % number) for number in range(records)])
            self.sent[sent] = (topic, records)
            told.writes.append((self.shard.clock.now_ms(), records))
        if self.shard.topic(topic).config.durability == "memory":
            told.unproven = True
        if self.odds(0.8):
            self.shard.engine.commit.write()
        if self.odds(0.5):
            self.shard.settle()

    def fail(self, topic: str) -> None:
        """The write goes wrong in the middle of it; nobody may have been told anything."""
        records = self.random.choice(COUNTS)
        self.shard.settle()
        self.heard()
        self.disk.fails = True
        sent = self.shard.send_append(topic, [Record(b"0")] * records)
        told = self.told[topic]
        told.writes.append((self.shard.clock.now_ms(), records))
        told.failed = max(told.failed, self.shard.topic(topic).next_seq - 1)
        try:
            self.shard.settle()
            if self.shard.answered(sent):
                answer = self.shard.answer(sent)  # ephemeral, and no promise was due
                told.highest = answer.first_seq + records - 1
        except ApiError:
            pass
        self.disk.fails = False

    def delete(self, topic: str) -> None:
        self.shard.delete(topic, before_seq=self.random.randint(0, self.shard.topic(topic).head_seq))

    def drop(self, topic: str) -> None:
        self.shard.settle()
        self.heard()
        self.shard.drop(topic)
        del self.told[topic]

    # --- what the shard does by itself ---

    def time_passes(self) -> None:
        self.shard.wall.pass_ms(self.random.choice([1, 30, 300, 1_100, 2_500]))
        self.shard.engine.commit.lower_ceilings(self.shard.clock.now_ms())

    def grow_quiet(self) -> None:
        """Long enough for promises to be lowered, which may fail, or may reach the platter or not."""
        fails = self.odds(0.3)
        self.shard.settle()
        self.shard.wall.pass_ms(QUIET_MS + WINDOW_MS)
        self.disk.fails = fails and bool(self.shard.engine.commit.reserved)
        self.shard.engine.commit.lower_ceilings(self.shard.clock.now_ms())
        failed, self.disk.fails = fails, False
        if self.odds(0.5):
            self.shard.sync()
            if not failed:
                for told in self.told.values():
                    told.writes.clear()  # it promises no more than a quiet topic does

    def sync(self) -> None:
        self.shard.sync()
        for told in self.told.values():
            told.unproven = False

    def flush(self, topic: str) -> None:
        self.shard.settle()
        self.at_once(lambda: self.shard.flush(topic))

    def checkpoint(self) -> None:
        """Also between a staged promise and its write."""
        if self.odds(0.5):
            self.shard.settle()
        if not self.shard.mover.busy:
            self.at_once(self.shard.mover.checkpoint)

    # --- how it ends ---

    def kill(self) -> None:
        self.heard()
        last = self.last_given()
        self.shard.crash()
        self.open()
        self.restarted(last, power_cut=False)

    def cut_power(self) -> None:
        self.heard()
        last = self.last_given()
        self.shard.crash()
        if self.odds(0.5):
            self.disk.reach()
        fate = Random(self.random.random())  # of its own: what is synced by now depends on a thread
        share = fate.choice([0.0, 0.5, 0.9, 1.0])
        self.disk.cut_power(self.folder, lambda: fate.random() < share)
        self.boot += 1
        self.open()
        self.restarted(last, power_cut=True)

    def stop_and_start(self) -> None:
        self.shard.settle()
        self.heard()
        before = {name: self.shard.topic(name).head_seq for name in self.told}
        self.at_once(self.shard.stop)
        self.open()
        assert {name: self.shard.topic(name).head_seq for name in self.told} == before

    def open(self) -> None:
        self.disk = DoubtfulDisk()
        self.shard.open(self.disk, boot=self.boot.to_bytes(16, "little"))

    def at_once(self, work: Callable[[], None]) -> None:
        """What the mover syncs it goes on from itself."""
        self.disk.at_once = True
        work()
        if self.shard.is_open:
            self.shard.mover.wait()
        self.disk.at_once = False

    def last_given(self) -> dict[str, int]:
        return {name: max(self.shard.topic(name).next_seq - 1, told.failed) for name, told in self.told.items()}

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
            told.highest, told.failed, told.unproven = topic.head_seq, 0, False
            skipped = topic.head_seq - last[name]
            assert skipped <= max(LEAST, told.most_in_the_window()), f"{name}: {skipped} skipped"


@pytest.mark.timeout(3600 if EXHAUSTIVE else 120)
@examples(60)
@given(seed=st.integers(0, 2**32))
def test_no_history_gives_a_seq_out_twice(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    history = History(tmp_path_factory.mktemp("history"), Random(seed))
    try:
        history.run(40)
    except AssertionError as error:
        raise AssertionError(f"{error}; after {' '.join(history.steps)}") from error
    finally:
        history.shard.crash()
        shutil.rmtree(history.folder)


@pytest.mark.parametrize("large", [False, True])
def test_what_was_cut_off_does_not_come_back_before_a_file_that_was_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """The log goes on in another file, with the lsn of the write that failed."""
    monkeypatch.setattr(limits, "PLACED_BYTES", 4_000)
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 2_000)
    disk = DoubtfulDisk()
    shard = HeldShard(tmp_path, disk=disk, wal_file_bytes=20_000)
    shard.put("t", TopicConfig(durability="fsync", durable=True))
    disk.fails = True
    with pytest.raises(ApiError):
        shard.append("t", [Record(b"0")])
    disk.fails = False
    records = [Record(b'"%b"' % (b"x" * 600))] * 40
    if large:
        disk.at_once = True  # what the thread syncs it goes on from itself
        sent = shard.send_large("t", records)
        shard.engine.large.wait()
        disk.at_once = False
    else:
        sent = shard.send_append("t", records)
    shard.settle()
    assert shard.answer(sent).first_seq == 1
    shard.append("t", [Record(b"1")])
    assert shard.engine.wal.rotations
    shard.crash()
    disk.cut_power(tmp_path, lambda: False)
    shard.open(boot=bytes(15) + b"2")
    assert [stored.seq for stored in shard.everything("t")] == list(range(1, 42))


@pytest.mark.parametrize("before", ["fsync", "memory"])
@pytest.mark.parametrize("after", ["disk", "ephemeral"])
def test_seqs_of_a_class_that_promises_are_not_given_out_before_the_change_is_sure(
    tmp_path: Path, before: Durability, after: Durability
) -> None:
    """A power cut may leave the class of before, under which a ceiling says nothing."""
    disk = DoubtfulDisk()
    shard = HeldShard(tmp_path, disk=disk)
    shard.put("t", TopicConfig(durability=before, durable=before == "fsync"))
    shard.append("t", [Record(b"0")] * 5)
    shard.sync()
    shard.send(Op.PUT_TOPIC, PutTopic("t", TopicConfig(durability=after), None))
    sent = shard.send_append("t", [Record(b"1")] * 30)
    shard.engine.commit.write()
    assert not shard.answered(sent)
    assert shard.topic("t").head_seq == 5
    shard.settle()
    assert shard.answer(sent).first_seq == 6
    shard.crash()
    disk.cut_power(tmp_path, lambda: False)
    shard.open(boot=bytes(15) + b"2")
    assert shard.topic("t").head_seq >= 35
