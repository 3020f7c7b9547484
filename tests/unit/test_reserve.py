"""How many seqs a topic promises ahead, by what it has written; and what a crash skips because of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, Shard, examples
from test_reserve_histories import DoubtfulDisk, HeldShard

from topics import limits
from topics.actors.messages import Op, PutTopic
from topics.storage.config import TopicConfig
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import Frame, decode_wal_header, scan
from topics.walshard.topic.reserve import Reserve

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


def frames_of(path: str) -> list[Frame]:
    data = Path(path).read_bytes()
    return list(scan(data, salt=decode_wal_header(data[:FILE_HEADER_BYTES], path=path).salt))


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
@pytest.mark.parametrize("synced", [True, False])
def test_no_seq_above_a_lowered_promise_is_given_out_before_the_next(
    tmp_path: Path, durability: str, synced: bool
) -> None:
    """The lowered one may be all that a power cut leaves."""
    shard = make(tmp_path, durability)
    for _ in range(30):
        shard.append("t", records(100))
    shard.wall.pass_ms(QUIET_MS)
    shard.engine.commit.lower_ceilings(shard.clock.now_ms())
    if synced:
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


@BOTH
def test_a_lowered_promise_binds_though_its_write_failed(tmp_path: Path, durability: str) -> None:
    """Its bytes may be on the platter, and stay there if the power goes."""
    disk = DoubtfulDisk()
    shard = HeldShard(tmp_path, disk=disk, wal_file_bytes=200_000)
    shard.put("t", TopicConfig(durability=durability))  # type: ignore[arg-type]
    for _ in range(30):
        shard.append("t", records(100))
    shard.sync()
    shard.wall.pass_ms(QUIET_MS)
    disk.fails = True
    shard.engine.commit.lower_ceilings(shard.clock.now_ms())
    assert not disk.fails, "it was written, and cut off again"
    assert shard.topic("t").ceiling == 3_000 + LEAST
    sent = shard.send_append("t", records(2 * LEAST))
    shard.engine.commit.write()
    assert not shard.answered(sent), "above what may be left"
    shard.crash()
    disk.cut_power(tmp_path, lambda: False)
    shard.open(boot=OTHER_BOOT)
    assert shard.topic("t").head_seq == 3_000 + LEAST


def test_a_lowered_promise_is_tried_again_if_its_write_failed(tmp_path: Path) -> None:
    disk = DoubtfulDisk()
    shard = HeldShard(tmp_path, disk=disk, wal_file_bytes=200_000)
    shard.put("t", TopicConfig(durability="ephemeral"))
    shard.append("t", records(3_000))
    shard.wall.pass_ms(QUIET_MS)
    disk.fails = True
    shard.engine.commit.lower_ceilings(shard.clock.now_ms())
    assert shard.engine.commit.reserved
    shard.wall.pass_ms(QUIET_MS)
    shard.engine.commit.lower_ceilings(shard.clock.now_ms())
    assert not shard.engine.commit.reserved
    assert killed(shard) == 3_000 + LEAST


@pytest.mark.parametrize("after", ["disk", "fsync", "memory"])
@pytest.mark.parametrize("left", [1, 2])
def test_a_power_cut_between_the_two_frames_of_a_change_of_class(tmp_path: Path, after: str, left: int) -> None:
    shard = make(tmp_path, "ephemeral")
    shard.append("t", records(70))
    shard.sync()
    path = shard.engine.wal.current.path
    before = [frame.offset + frame.length for frame in frames_of(path)]
    shard.put("t", TopicConfig(durability=after))  # type: ignore[arg-type]
    frames = frames_of(path)[len(before) :]
    assert [frame.type for frame in frames] == [FrameType.HEAD, FrameType.TOPIC]
    shard.crash()
    os.truncate(path, frames[left - 1].offset + frames[left - 1].length)
    shard.open(boot=OTHER_BOOT)
    assert shard.topic("t").config.durability == ("ephemeral" if left == 1 else after)
    assert shard.append("t", records(1)).first_seq > 70


def test_what_a_power_cut_skipped_stays_skipped_in_a_class_without_promises(tmp_path: Path) -> None:
    shard = make(tmp_path, "disk")
    shard.append("t", records(7))
    shard.restart(boot=OTHER_BOOT)
    skipped = shard.topic("t").head_seq
    assert skipped > 7
    shard.put("t", TopicConfig(durability="fsync"))
    shard.restart(boot=OTHER_BOOT)
    assert shard.topic("t").head_seq == skipped


@BOTH
def test_nobody_hears_of_seqs_of_a_topic_that_a_power_cut_can_take(tmp_path: Path, durability: str) -> None:
    shard = Shard(tmp_path)
    shard.send(Op.PUT_TOPIC, PutTopic("t", TopicConfig(durability=durability), None))  # type: ignore[arg-type]
    sent = shard.send_append("t", records(1))
    shard.engine.commit.write()
    assert not shard.answered(sent)
    shard.settle()
    assert shard.answer(sent).first_seq == 1


# --- what waits for a sync ---------------------------------------------------------------------------


def test_a_promise_is_synced_before_it_is_needed(tmp_path: Path) -> None:
    """A topic that becomes busy waits once, and then again only if it is faster than the disk."""
    shard = make(tmp_path, "disk")
    commit, wal = shard.engine.commit, shard.engine.wal
    shard.append("t", records(1))
    shard.sync()
    waited = 0
    for _ in range(5_000):
        sent = shard.send_append("t", records(1))
        commit.write()
        waited += not shard.answered(sent)
        shard.settle()  # the syncs that were asked for
    assert waited <= 1
    assert wal.synced_lsn < wal.written_lsn, "none is asked for without need"


def test_a_slow_topic_asks_for_no_sync_of_its_own(tmp_path: Path) -> None:
    shard = make(tmp_path, "disk")
    shard.append("t", records(60))
    shard.sync()
    for _ in range(300):
        shard.wall.pass_ms(20)
        shard.append("t", records(1))
        assert not shard.syncer.busy
        assert shard.topic("t").ceiling_lsn > 0
        shard.engine.commit.sync_now()  # as the disk class does every now and then
        shard.settle()


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
