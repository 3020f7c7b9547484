"""What a shard does about pressure besides refusing: pushes that are held and joined, followers that are put off and
told so, syncs that are shared by more batches. None of it may lose, double or reorder anything.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from model import Record, Shard, error_of, examples
from test_tails import Follower, Stage, records, seqs

from topics import limits
from topics.actors.messages import FollowHead, Op
from topics.storage.config import TopicConfig
from topics.walshard.log import commit as commit_module
from topics.walshard.log.disk_space import FreeSpace

MS = 1_000_000
LOW, HIGH = TopicConfig(priority=-1_000), TopicConfig(priority=1_000)


class Paced(Stage):
    """A shard with followers, and the clock of its rounds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now_ns = 10**12

    def push(self, later_ms: float = 0) -> bool:
        self.now_ns += int(later_ms * MS)
        pushed: bool = self.tails.push(self.now_ns)
        return pushed

    def append_one(self, topic: str, **more: Any) -> None:
        self.append(topic, [Record(b"1")], **more)


@pytest.fixture
def stage(tmp_path: Path) -> Paced:
    return Paced(tmp_path)


def pushed_seqs(follower: Follower) -> dict[int, list[int]]:
    """By correlation; everything that was pushed since the last look."""
    found: dict[int, list[int]] = {}
    for op, correlation, _, body in follower.take():
        if op == Op.TAIL:
            found.setdefault(correlation, []).extend(seqs(body))
    return found


def paced(follower: Follower) -> list[tuple[int, int]]:
    """Who was told to wait, and how long; pushes are forgotten."""
    return [(correlation, answer.retry_after_ms) for op, correlation, answer, _ in follower.take() if op == Op.PACED]


# --- coalescing --------------------------------------------------------------------------------------


def test_calm_pushes_go_out_with_every_round(stage: Paced) -> None:
    follower = Follower()
    stage.append("t", records(1))
    tail = stage.follow(follower)
    for number in range(3):
        stage.append("t", records(1))
        assert stage.tails.can_push()
        assert stage.push()
        assert pushed_seqs(follower) == {tail: [number + 2]}
    assert stage.tails.next_due_ns is None


def test_held_pushes_are_fewer_and_larger(stage: Paced) -> None:
    follower = Follower()
    stage.append("t", records(1))
    tail = stage.follow(follower)
    stage.append("t", records(1))
    stage.push()
    began = stage.now_ns
    follower.take()
    stage.tails.coalescing = True
    for _ in range(4):
        stage.append("t", records(2))
        assert not stage.push(1)
        assert not stage.tails.can_push(), "or it would not sleep"
        assert stage.tails.next_due_ns == began + limits.COALESCE_MS * MS
    before = stage.tails.pushes
    assert stage.push(1)
    assert stage.tails.pushes == before + 1
    assert pushed_seqs(follower) == {tail: list(range(3, 11))}


def test_a_first_push_need_not_wait(stage: Paced) -> None:
    follower = Follower()
    stage.append("t", records(1))
    tail = stage.follow(follower)
    stage.tails.coalescing = True
    stage.append("t", records(1))
    assert stage.push()
    assert pushed_seqs(follower) == {tail: [2]}


def test_when_it_is_calm_again_what_was_held_goes_out(stage: Paced) -> None:
    follower = Follower()
    stage.append("t", records(1))
    tail = stage.follow(follower)
    stage.tails.coalescing = True
    stage.append("t", records(1))
    stage.push()
    stage.append("t", records(1))
    assert not stage.push(1)
    stage.tails.coalescing = False
    follower.taken = follower.position
    assert stage.tails.can_push()
    assert stage.push()
    assert pushed_seqs(follower) == {tail: [2, 3]}


# --- deferring ---------------------------------------------------------------------------------------


def test_low_ones_are_put_off_and_told_and_high_ones_are_not(stage: Paced) -> None:
    follower = Follower()
    stage.append_one("low", config=LOW)
    stage.append_one("high", config=HIGH)
    low, high = stage.follow(follower, "low"), stage.follow(follower, "high")
    stage.tails.deferring = True
    stage.append_one("low")
    stage.append_one("high")
    follower.take()
    stage.push()
    told = []
    got: dict[int, list[int]] = {}
    for op, correlation, answer, body in follower.take():
        if op == Op.PACED:
            told.append((correlation, answer.retry_after_ms))
        else:
            got.setdefault(correlation, []).extend(seqs(body))
    assert got == {high: [2]}
    assert told == [(low, limits.PACE_RETRY_MS)]
    assert not stage.tails.can_push(), "nothing is to be done for who is put off"
    assert stage.tails.next_due_ns is not None, "but somebody has to look when it has waited long enough"
    stage.tails.deferring = False
    stage.append_one("low")
    assert stage.tails.can_push()
    stage.push()
    assert pushed_seqs(follower) == {low: [2, 3]}


def test_they_are_told_once_in_five_seconds(stage: Paced) -> None:
    follower = Follower()
    stage.append_one("low", config=LOW)
    low = stage.follow(follower, "low")
    stage.tails.deferring = True
    stage.append_one("low")
    follower.take()
    stage.push()
    assert paced(follower) == [(low, limits.PACE_RETRY_MS)]
    for _ in range(4):
        stage.shard.wall.pass_ms(limits.PACE_FRAME_MS // 5)
        stage.append_one("low")
        stage.push(1)
        assert paced(follower) == []
    stage.shard.wall.pass_ms(limits.PACE_FRAME_MS // 5)
    stage.push(1)
    assert paced(follower) == [(low, limits.PACE_RETRY_MS)]


def test_who_is_not_behind_is_told_nothing(stage: Paced) -> None:
    follower = Follower()
    stage.append_one("low", config=LOW)
    stage.append_one("other", config=LOW)
    stage.follow(follower, "low")
    other = stage.follow(follower, "other")
    stage.tails.deferring = True
    follower.take()
    stage.append_one("other")
    stage.push()
    assert paced(follower) == [(other, limits.PACE_RETRY_MS)]


def test_after_ten_seconds_it_is_sent_all_the_same(stage: Paced) -> None:
    follower = Follower()
    stage.append_one("low", config=LOW)
    low = stage.follow(follower, "low")
    stage.tails.deferring = True
    stage.append_one("low")
    follower.take()
    for _ in range(99):
        stage.shard.wall.pass_ms(100)
        stage.push(100)
        assert pushed_seqs(follower) == {}
    stage.shard.wall.pass_ms(101)
    stage.push(101)
    assert pushed_seqs(follower) == {low: [2]}


def test_wake_ups_of_our_own_processes_are_never_put_off(stage: Paced) -> None:
    follower = Follower()
    stage.append_one("low", config=LOW)
    stage.send(Op.FOLLOW_HEAD, follower, FollowHead("low", stage.topic("low").id))
    stage.tails.deferring = True
    stage.append_one("low")
    follower.take()
    stage.push()
    assert [(op, answer.head_seq) for op, _, answer, _ in follower.take()] == [(Op.HEAD_MOVED, 2)]


def test_a_topic_that_somebody_raises_is_no_longer_put_off(stage: Paced) -> None:
    follower = Follower()
    stage.append_one("t", config=LOW)
    tail = stage.follow(follower, "t")
    stage.tails.deferring = True
    stage.append_one("t")
    follower.take()
    stage.push()
    assert pushed_seqs(follower) == {}
    stage.shard.put("t", HIGH)
    stage.shard.wall.pass_ms(50)
    stage.push(50)
    assert pushed_seqs(follower) == {tail: [2]}


def test_a_dropped_topic_is_reported_though_it_is_put_off(stage: Paced) -> None:
    follower = Follower()
    stage.append_one("low", config=LOW)
    low = stage.follow(follower, "low")
    stage.tails.deferring = True
    stage.append_one("low")
    stage.push()
    follower.take()
    stage.shard.drop("low")
    assert [(op, correlation) for op, correlation, _, _ in follower.take()] == [(Op.TOPIC_GONE, low)]
    assert stage.tails.next_due_ns is None


class AnyPressure(RuleBasedStateMachine):
    """Whatever the governor wishes, whoever is slow: each follower gets each record once, in order."""

    TOPICS = ("low", "auto", "high")

    @initialize()
    def begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.stage = Paced(Path(self._folder.name))
        self.followers = [Follower(), Follower()]
        self.tails: dict[tuple[int, int], str] = {}
        self.got: dict[tuple[int, int], list[int]] = {}
        for topic, config in zip(self.TOPICS, (LOW, TopicConfig(), HIGH), strict=True):
            self.stage.append_one(topic, config=config)
            for number, follower in enumerate(self.followers):
                key = (number, self.stage.follow(follower, topic, 0, max_bytes=200, limit=3))
                self.tails[key] = topic
                self.got[key] = []

    @rule(topic=st.sampled_from(TOPICS), count=st.integers(1, 8))
    def append(self, topic: str, count: int) -> None:
        self.stage.append(topic, records(count))

    @rule(coalescing=st.booleans(), deferring=st.booleans())
    def press(self, coalescing: bool, deferring: bool) -> None:
        self.stage.tails.coalescing = coalescing or deferring
        self.stage.tails.deferring = deferring

    @rule(later_ms=st.sampled_from([0, 1, 5, 50, 3_000]))
    def round(self, later_ms: int) -> None:
        self.stage.shard.wall.pass_ms(later_ms)
        self.stage.push(later_ms)

    @rule(number=st.integers(0, 1))
    def take(self, number: int) -> None:
        for correlation, found in pushed_seqs(self.followers[number]).items():
            self.got[number, correlation] += found

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        self.stage.tails.coalescing = self.stage.tails.deferring = False
        for _ in range(400):
            self.stage.push(5)
            self.take(0)
            self.take(1)
        for key, topic in self.tails.items():
            assert self.got[key] == list(range(1, self.stage.topic(topic).head_seq + 1)), topic
        self.stage.shard.crash()
        self._folder.cleanup()


TestAnyPressure: Any = AnyPressure.TestCase
TestAnyPressure.settings = examples(25, stateful_step_count=30)


# --- the commit window -------------------------------------------------------------------------------


class Clocked:
    """A shard whose commit has a clock of the test."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = 10**12
        self.shard = Shard(folder)
        self.commit = self.shard.engine.commit
        self.syncs = 0
        self.commit.on_sync = self._count
        self.shard.append("t", records(1), config=TopicConfig(durability="fsync"))
        self.shard.append("d", records(1), config=TopicConfig(durability="disk"))
        self.shard.sync()
        self.syncs = 0

    def _count(self, took_us: int) -> None:
        self.syncs += 1

    def round(self, later_ms: float = 0) -> None:
        """As the process does it."""
        self.now_ns += int(later_ms * MS)
        self.commit.write()
        if (
            self.commit.sync_due_ns is not None
            and self.now_ns >= self.commit.sync_due_ns
            and not self.shard.syncer.busy
        ):
            self.commit.sync_now()
        while self.shard.syncer.busy:
            self.commit.synced(self.shard.syncer.wait())


@pytest.fixture
def clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocked]:
    holder: list[Clocked] = []
    fake = SimpleNamespace(
        monotonic_ns=lambda: holder[0].now_ns if holder else 10**12, perf_counter_ns=time.perf_counter_ns
    )
    monkeypatch.setattr(commit_module, "time", fake)
    holder.append(Clocked(tmp_path))
    yield holder[0]
    holder[0].shard.crash()


def test_without_a_window_each_round_has_its_sync(clocked: Clocked) -> None:
    for number in range(3):
        correlation = clocked.shard.send_append("t", records(1))
        clocked.round(1)
        assert clocked.shard.answered(correlation)
        assert clocked.syncs == number + 1


def test_within_the_window_batches_share_a_sync(clocked: Clocked) -> None:
    clocked.shard.append("t", records(1))
    assert clocked.syncs == 1
    clocked.commit.window_ns = limits.COMMIT_WINDOW_MS * MS
    waiting = []
    for _ in range(limits.COMMIT_WINDOW_MS - 1):
        waiting.append(clocked.shard.send_append("t", records(1)))
        clocked.round(1)
        assert not any(map(clocked.shard.answered, waiting)), "before it is synced nobody is told that it is"
        assert clocked.shard.engine.next_deadline_ns == 10**12 + limits.COMMIT_WINDOW_MS * MS
    clocked.round(1)
    assert clocked.syncs == 2
    answers = [clocked.shard.answer(correlation) for correlation in waiting]
    assert [answer.first_seq for answer in answers] == list(range(3, 3 + len(waiting)))


def test_after_a_pause_nobody_waits(clocked: Clocked) -> None:
    clocked.commit.window_ns = limits.COMMIT_WINDOW_MS * MS
    clocked.now_ns += 1_000 * MS
    correlation = clocked.shard.send_append("t", records(1))
    clocked.round()
    assert clocked.shard.answered(correlation)


def test_a_window_that_closes_keeps_nobody(clocked: Clocked) -> None:
    clocked.shard.append("t", records(1))
    clocked.commit.window_ns = limits.COMMIT_WINDOW_MS * MS
    first = clocked.shard.send_append("t", records(1))
    clocked.round(1)
    assert not clocked.shard.answered(first)
    clocked.commit.window_ns = 0
    second = clocked.shard.send_append("t", records(1))
    clocked.round(1)
    assert clocked.shard.answered(first)
    assert clocked.shard.answered(second)


def test_a_window_that_closes_without_another_write_keeps_nobody_longer(clocked: Clocked) -> None:
    clocked.shard.append("t", records(1))
    clocked.commit.window_ns = limits.COMMIT_WINDOW_MS * MS
    first = clocked.shard.send_append("t", records(1))
    clocked.round(1)
    clocked.commit.window_ns = 0
    clocked.round(limits.COMMIT_WINDOW_MS)
    assert clocked.shard.answered(first)


def test_what_needs_no_sync_is_answered_at_once(clocked: Clocked) -> None:
    clocked.shard.append("t", records(1))
    clocked.commit.window_ns = limits.COMMIT_WINDOW_MS * MS
    correlation = clocked.shard.send_append("d", records(1))
    clocked.round()
    assert clocked.shard.answered(correlation)
    assert clocked.syncs == 1


def test_the_disk_class_gets_its_sync_in_time(clocked: Clocked) -> None:
    clocked.shard.append("t", records(1))
    clocked.commit.window_ns = limits.COMMIT_WINDOW_MS * MS
    clocked.shard.send_append("d", records(1))
    clocked.round()
    due = clocked.commit.sync_due_ns
    assert due is not None
    assert due - clocked.now_ns == limits.DISK_SYNC_MS * MS
    waiting = clocked.shard.send_append("t", records(1))
    clocked.round()
    assert clocked.commit.sync_due_ns == clocked.now_ns + limits.COMMIT_WINDOW_MS * MS, "who waits wants it sooner"
    clocked.round(limits.COMMIT_WINDOW_MS)
    assert clocked.shard.answered(waiting)
    assert clocked.shard.engine.wal.synced_lsn == clocked.shard.engine.wal.written_lsn


# --- the disk watch ----------------------------------------------------------------------------------


class Watched:
    """A shard on a disk with as much free space as the test says."""

    def __init__(self, folder: Path) -> None:
        self.free = 1_000
        self.shard = Shard(folder)
        self.shard.engine.space = FreeSpace("", mark=100, free_bytes=lambda folder: self.free)
        self.now_ns = 10**12

    def look(self, free: int) -> None:
        self.free = free
        self.now_ns += 1_000 * MS
        self.shard.engine.begin_round(self.now_ns)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_round_looks_at_the_disk_and_refuses_what_takes_space(watched: Watched) -> None:
    shard = watched.shard
    shard.append("t", records(3), key="k")
    watched.look(99)
    for refused in (
        lambda: shard.append("t", records(1)),
        lambda: shard.append("t", records(1), key="other"),
        lambda: shard.append("new", records(1)),
        lambda: shard.put("new", TopicConfig()),
    ):
        error = error_of(refused)
        assert (error.code, error.detail) == ("storage_full", {"free_bytes": 99, "min_free_bytes": 100})
    assert "new" not in shard.engine.topics
    assert len(shard.engine.listing) == 1
    assert shard.topic("t").head_seq == 3
    assert shard.append("t", records(3), key="k").deduped
    assert len(shard.diff("t").stored) == 3
    assert shard.delete("t", before_seq=2).deleted == 1
    assert shard.put("t", TopicConfig(cap_records=5)).created is False
    watched.look(104)
    assert error_of(lambda: shard.append("t", records(1))).code == "storage_full"
    watched.look(105)
    assert shard.append("t", records(1)).first_seq == 4, "no seq was spent"
    assert shard.drop("t")


def test_what_is_refused_for_space_costs_no_quota(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    before = (watched.shard.engine.topic_count, watched.shard.engine.totals.pending_bytes)
    watched.look(0)
    error_of(lambda: watched.shard.append("new", records(5)))
    assert (watched.shard.engine.topic_count, watched.shard.engine.totals.pending_bytes) == before
