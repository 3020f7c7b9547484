"""How many seqs a topic promises ahead, by what it has written; and what a crash skips because of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, Shard, examples

from topics import limits
from topics.storage.config import TopicConfig
from topics.walshard.reserve import Reserve

LEAST, WINDOW_MS, QUIET_MS = limits.SEQ_RESERVE, limits.SEQ_RESERVE_MS, limits.SEQ_RESERVE_QUIET_MS
OTHER_BOOT = bytes(16)


# --- the rule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "promises"),
    [
        pytest.param([(0, 51, 1)], [LEAST], id="the first promise"),
        pytest.param([(0, 51, 1), (60_000, 101, 1), (120_000, 151, 1)], [LEAST] * 3, id="a quiet topic"),
        pytest.param([(0, 5_000, 5_000)], [5_000], id="one batch is what it writes in two seconds"),
        pytest.param([(0, 5_000, 5_000), (5_000, 10_000, 5_000)], [5_000] * 2, id="one now and then"),
        pytest.param([(0, 50, 1), (100, 250, 1), (200, 1_050, 1)], [LEAST, 201, 1_001], id="it becomes busy"),
        pytest.param(
            [(0, 1, 1), (1_000, 2_001, 1), (2_000, 4_001, 1), (3_000, 6_001, 1), (4_000, 8_001, 1)],
            [LEAST, 2_001, 4_000, 4_000, 4_000],
            id="a steady rate",
        ),
        pytest.param([(0, 1_000, 1_000), (10_000, 1_000, 0)], [1_000, LEAST], id="it becomes quiet"),
        pytest.param([(0, 1_000, 1_000), (10_000, 2_000, 0)], [1_000, 200], id="it becomes slower"),
        pytest.param([(0, 1_000, 1_000), (5, 900, 1), (5, 901, 1)], [1_000, 900, 901], id="seqs were taken back"),
        pytest.param([(9, 1_000, 1_000), (5, 2_000, 1)], [1_000, 2_000], id="a clock that went back"),
    ],
)
def test_promises(steps: list[tuple[int, int, int]], promises: list[int]) -> None:
    ms, seq, count = steps[0]
    reserve = Reserve(ms=ms, seq=seq - count)
    assert [reserve.promise(ms=ms, seq=seq, count=count) for ms, seq, count in steps] == promises


def test_when_a_promise_is_stale() -> None:
    reserve = Reserve(ms=0, seq=0)
    reserve.promise(ms=500, seq=10, count=1)
    assert not reserve.is_quiet(500 + QUIET_MS - 1)
    assert reserve.is_quiet(500 + QUIET_MS)


class Writer:
    """A topic as commit.py counts for it: a new promise when half of the last is used."""

    def __init__(self) -> None:
        self.last = 0
        self.ceiling, self.margin = LEAST, LEAST // 2
        self.reserve: Reserve | None = None
        self.promises = 0
        self.given: list[tuple[int, int]] = []  # when, and the last seq

    def write(self, ms: int, count: int) -> None:
        self.last += count
        self.given.append((ms, self.last))
        if self.last > self.ceiling - self.margin:
            self.reserve = self.reserve or Reserve(ms=ms, seq=self.last - count)
            promise = self.reserve.promise(ms=ms, seq=self.last, count=count)
            self.ceiling, self.margin = self.last + promise, promise // 2
            self.promises += 1
            assert promise <= max(LEAST, self.most_in_the_window())

    def most_in_the_window(self) -> int:
        """The most seqs that it has given out within two seconds."""
        begin = most = 0
        for ms, last in self.given:
            while self.given[begin][0] < ms - WINDOW_MS:
                begin += 1
            most = max(most, last - (self.given[begin - 1][1] if begin else 0))
        return most


@pytest.mark.parametrize(("per_ms", "count"), [(1, 1), (4, 10), (1, 1_000)])
def test_a_steady_rate_costs_a_promise_a_second(per_ms: int, count: int) -> None:
    writer = Writer()
    for ms in range(1_500):
        for _ in range(per_ms):
            writer.write(ms, count)
    starting, writer.promises = writer.promises, 0
    assert starting <= 25
    writer.given = [(ms, last) for ms, last in writer.given if ms % 50 == 0]  # it is looked through at each promise
    for ms in range(1_500, 8_000):
        for _ in range(per_ms):
            writer.write(ms, count)
        del writer.given[: -2 * WINDOW_MS * per_ms]
    assert 4 <= writer.promises <= 13


@examples(200)
@given(writes=st.lists(st.tuples(st.sampled_from([0, 0, 1, 30, 900, 4_000]), st.integers(1, 300)), max_size=80))
def test_a_promise_is_no_more_than_two_seconds_of_writes(writes: list[tuple[int, int]]) -> None:
    writer, ms = Writer(), 0
    for pause_ms, count in writes:
        ms += pause_ms
        writer.write(ms, count)
    assert writer.ceiling - writer.last <= max(LEAST, writer.most_in_the_window())


# --- what a crash skips ------------------------------------------------------------------------------


def records(count: int) -> list[Record]:
    return [Record(b"%d" % number) for number in range(count)]


def make(folder: Path, durability: str) -> Shard:
    shard = Shard(folder)
    shard.put("t", TopicConfig(durability=durability))  # type: ignore[arg-type]
    return shard


def killed(shard: Shard) -> int:
    """Ends as the class dislikes it; the head after that."""
    boot = OTHER_BOOT if shard.topic("t").config.durability == "disk" else None
    shard.restart() if boot is None else shard.restart(boot=boot)
    return shard.topic("t").head_seq


BOTH = pytest.mark.parametrize("durability", ["ephemeral", "disk"])


@BOTH
def test_a_quiet_topic_skips_a_hundred_at_most(tmp_path: Path, durability: str) -> None:
    shard = make(tmp_path, durability)
    shard.append("t", records(2))
    assert 2 < killed(shard) <= 2 + LEAST
    for _ in range(130):
        shard.wall.pass_ms(1_000)
        head = shard.append("t", records(1)).head_seq
    assert head < killed(shard) <= head + LEAST


@BOTH
def test_a_busy_topic_skips_two_seconds_of_its_writes_at_most(tmp_path: Path, durability: str) -> None:
    shard = make(tmp_path, durability)
    for _ in range(400):
        shard.wall.pass_ms(10)
        head = shard.append("t", records(10)).head_seq
    assert head == 4_000
    assert 4_000 < killed(shard) <= 4_000 + 2_010


@BOTH
@pytest.mark.parametrize("checkpoint", ["none", "before", "after"])
def test_a_topic_that_becomes_quiet_takes_back_its_promise(tmp_path: Path, durability: str, checkpoint: str) -> None:
    shard = make(tmp_path, durability)
    commit = shard.engine.commit
    for _ in range(30):
        shard.append("t", records(100))
    if checkpoint == "before":
        shard.checkpoint()
    assert shard.topic("t").ceiling > 3_000 + 10 * LEAST
    shard.wall.pass_ms(QUIET_MS - 1)
    commit.lower_ceilings(shard.clock.now_ms())
    assert shard.topic("t").ceiling > 3_000 + 10 * LEAST, "so soon it may come back"
    shard.wall.pass_ms(1_000)
    commit.lower_ceilings(shard.clock.now_ms())
    assert shard.topic("t").ceiling == 3_000 + LEAST
    assert not commit.reserved, "nothing is left to do"
    shard.sync()
    if checkpoint == "after":
        shard.checkpoint()
    assert 3_000 < killed(shard) <= 3_000 + LEAST


@BOTH
def test_no_seq_above_a_lowered_promise_is_given_out_before_the_next(tmp_path: Path, durability: str) -> None:
    """The lowered one may be all that a power cut leaves."""
    shard = make(tmp_path, durability)
    for _ in range(30):
        shard.append("t", records(100))
    shard.wall.pass_ms(QUIET_MS)
    shard.engine.commit.lower_ceilings(shard.clock.now_ms())
    shard.sync()
    sent = shard.send_append("t", records(LEAST + 1))
    shard.engine.commit.write()
    assert not shard.answered(sent)
    shard.settle()
    assert shard.answer(sent).head_seq == 3_101
    assert killed(shard) > 3_101


@BOTH
def test_what_an_earlier_process_promised_is_taken_back_too(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(limits, "SEQ_RESERVE", 100_000)
        shard = make(tmp_path, durability)
        shard.append("t", records(2))
        shard.stop()
    shard.open()
    assert shard.topic("t").ceiling == 100_000
    shard.wall.pass_ms(QUIET_MS)
    shard.engine.commit.lower_ceilings(shard.clock.now_ms())
    shard.sync()
    assert 2 < killed(shard) <= 2 + LEAST


def test_a_full_log_is_not_continued_for_it(tmp_path: Path) -> None:
    shard = make(tmp_path, "ephemeral")
    shard.append("t", records(3_000))
    wal = shard.engine.wal
    shard.wall.pass_ms(QUIET_MS)
    files, wal.room = len(wal.files), 50
    shard.engine.commit.lower_ceilings(shard.clock.now_ms())
    assert (len(wal.files), shard.topic("t").ceiling) == (files, 6_000)
    assert shard.engine.commit.reserved, "later"


def test_a_class_without_promises_is_no_trouble_to_verify(tmp_path: Path) -> None:
    shard = make(tmp_path, "fsync")
    shard.append("t", records(3 * LEAST))
    state = shard.topic("t").state()
    assert state.ceiling >= state.head_seq
