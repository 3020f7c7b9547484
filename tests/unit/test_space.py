"""The watch on free space, with a disk and a clock that the tests move."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics import limits
from topics.errors import ApiError
from topics.walshard.log.disk_space import FreeSpace

MARK = 1_000_000
LIFTS = 1_050_000
LOOK_NS = limits.FREE_LOOK_MS * 1_000_000


class Disk:
    def __init__(self, free: int) -> None:
        self.free = free
        self.looks = 0
        self.broken = False

    def __call__(self, folder: str) -> int:
        assert folder == "data"
        self.looks += 1
        if self.broken:
            raise OSError("no such disk")
        return self.free


class Play:
    def __init__(self, free: int, *, mark: int = MARK) -> None:
        self.disk = Disk(free)
        self.space = FreeSpace("data", mark=mark, free_bytes=self.disk)
        self.now_ns = 10**12

    def later(self, free: int | None = None) -> bool:
        """When it looks again; whether it is low then."""
        if free is not None:
            self.disk.free = free
        self.now_ns += LOOK_NS
        self.space.look(self.now_ns)
        return self.space.low


@pytest.mark.parametrize(
    ("free", "low"), [(0, True), (1, True), (MARK - 1, True), (MARK, False), (MARK + 1, False), (10**15, False)]
)
def test_less_than_the_mark_is_low(free: int, low: bool) -> None:
    play = Play(free)
    assert play.later() is low
    assert play.space.free == free


def test_before_the_first_look_nothing_is_refused() -> None:
    play = Play(0)
    play.space.check()


def test_the_refusal_names_both_numbers() -> None:
    play = Play(123)
    play.later()
    with pytest.raises(ApiError) as caught:
        play.space.check()
    error = caught.value
    assert (error.code, error.status) == ("storage_full", 503)
    assert error.detail == {"free_bytes": 123, "min_free_bytes": MARK}
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 1


def test_it_lifts_a_little_above_the_mark() -> None:
    play = Play(MARK - 1)
    assert play.later()
    for free in (MARK, MARK + 1, LIFTS - 1):
        assert play.later(free), "still"
    assert not play.later(LIFTS)
    play.space.check()
    for free in (LIFTS - 1, MARK):
        assert not play.later(free), "not again before the mark"
    assert play.later(MARK - 1)


def test_around_the_mark_it_does_not_flutter() -> None:
    play = Play(MARK + 1)
    seen = [play.later(free) for free in [MARK + 1, MARK - 1] * 50]
    changes = sum(before != after for before, after in itertools.pairwise(seen))
    assert changes == 1


def test_it_looks_so_often_and_no_more() -> None:
    play = Play(MARK)
    play.later()
    for early in (0, 1, LOOK_NS - 1):
        play.space.look(play.now_ns + early)
    assert play.disk.looks == 1
    play.disk.free = 0
    play.space.look(play.now_ns + LOOK_NS)
    assert play.disk.looks == 2
    assert play.space.low


def test_switched_off_nobody_looks() -> None:
    play = Play(0, mark=0)
    assert not play.later()
    assert play.disk.looks == 0
    play.space.check()


@pytest.mark.parametrize("low", [True, False])
def test_a_disk_that_does_not_answer_changes_nothing(low: bool) -> None:
    play = Play(0 if low else MARK)
    assert play.later() is low
    play.disk.broken = True
    play.disk.free = MARK * 2
    assert play.later() is low
    play.disk.broken = False
    assert not play.later()


@given(st.lists(st.integers(MARK - 3, LIFTS + 3), max_size=30))
@examples(200)
def test_any_history(history: list[int]) -> None:
    play = Play(MARK)
    low = False
    for free in history:
        low = free < MARK or (low and free < LIFTS)
        assert play.later(free) is low


@given(st.integers(1, 10**15))
@examples(100)
def test_five_percent_more_always_lifts_it(mark: int) -> None:
    play = Play(mark - 1, mark=mark)
    assert play.later()
    assert not play.later(mark + mark // 20 + 1)
    assert not play.later(mark)


def test_the_real_disk(tmp_path: Path) -> None:
    before = os.statvfs(tmp_path)
    generous = FreeSpace(str(tmp_path), mark=1)
    generous.look(10**12)
    assert not generous.low
    assert generous.free == pytest.approx(before.f_bavail * before.f_frsize, rel=0.5)
    greedy = FreeSpace(str(tmp_path), mark=2**62)
    greedy.look(10**12)
    assert greedy.low


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    space = FreeSpace(str(tmp_path / "none"), mark=2**62)
    space.look(10**12)
    assert not space.low
