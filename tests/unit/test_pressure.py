"""Which shards a gateway takes no new work for, and what it tells those who ask: from the words of a real board."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from topics import limits
from topics.actors.governor import Governor, Level
from topics.errors import ApiError
from topics.gateway.admission.pressure import Pressure, under_pressure
from topics.shm.counters import Board, Row, Word

SHARDS = 3
TICK_NS = limits.PRESSURE_TICK_MS * 1_000_000


@pytest.fixture
def rows() -> Iterator[list[Row]]:
    board = Board.create([f"shard-{number}" for number in range(SHARDS)])
    yield [board.row(f"shard-{number}") for number in range(SHARDS)]
    board.close()


def press(row: Row, level: Level, wait_ms: int = 700) -> None:
    row.set(Word.THROTTLE_MS, wait_ms)
    row.set(Word.PRESSURE, level)


def refused(pressure: Pressure) -> set[int]:
    """The shards that are refused, as who asks finds out."""
    found = set()
    for shard in range(SHARDS):
        try:
            pressure.check(shard)
        except ApiError:
            found.add(shard)
    return found


def overload(governor: Governor) -> None:
    for number in range(1, 5):
        governor.round(10_000_000)
        governor.tick(number * TICK_NS)
    assert governor.level is Level.REFUSE


def test_without_a_board_nobody_is_refused() -> None:
    pressure = Pressure()
    pressure.look()
    assert refused(pressure) == set()


@pytest.mark.parametrize("level", list(Level))
def test_only_the_last_level_refuses(rows: list[Row], level: Level) -> None:
    pressure = Pressure(rows)
    press(rows[1], level)
    pressure.look()
    assert refused(pressure) == ({1} if level is Level.REFUSE else set())


def test_each_shard_speaks_for_itself_and_says_how_long(rows: list[Row]) -> None:
    pressure = Pressure(rows)
    press(rows[0], Level.REFUSE, 300)
    press(rows[2], Level.REFUSE, 4_200)
    pressure.look()
    assert pressure.refusing == {0: 300, 2: 4_200}


def test_who_asks_gets_what_is_true_now(rows: list[Row]) -> None:
    """A request may come when nobody has looked for long."""
    pressure = Pressure(rows)
    assert refused(pressure) == set()
    press(rows[0], Level.REFUSE)
    assert refused(pressure) == {0}
    press(rows[0], Level.DEFER)
    press(rows[1], Level.REFUSE)
    assert refused(pressure) == {1}
    press(rows[1], Level.CALM)
    assert refused(pressure) == set()


def test_a_look_forgets_what_was(rows: list[Row]) -> None:
    pressure = Pressure(rows)
    press(rows[0], Level.REFUSE)
    pressure.look()
    assert pressure.refusing.keys() == {0}
    press(rows[0], Level.DEFER)
    press(rows[1], Level.REFUSE)
    pressure.look()
    assert pressure.refusing.keys() == {1}
    press(rows[1], Level.CALM)
    pressure.look()
    assert not pressure.refusing


def test_its_own_governor_speaks_for_all(rows: list[Row]) -> None:
    governor = Governor(lag_ms=500, commit_ms=2_000)
    pressure = Pressure(rows, governor)
    pressure.look()
    assert refused(pressure) == set()
    overload(governor)
    pressure.look()
    assert pressure.refusing == dict.fromkeys(range(SHARDS), governor.retry_after_ms)
    number = 4
    while governor.level is Level.REFUSE:
        number += 1
        governor.tick(number * TICK_NS)
    pressure.look()
    assert refused(pressure) == set()


def test_a_calm_gateway_still_listens_to_its_shards(rows: list[Row]) -> None:
    pressure = Pressure(rows, Governor(lag_ms=500, commit_ms=2_000))
    press(rows[2], Level.REFUSE)
    pressure.look()
    assert refused(pressure) == {2}


@pytest.mark.parametrize(
    ("wait_ms", "retry_after_s"), [(0, 1), (1, 1), (250, 1), (999, 1), (1_000, 1), (1_001, 2), (4_999, 5), (5_000, 5)]
)
def test_the_refusal_says_when_to_come_back(wait_ms: int, retry_after_s: int) -> None:
    error = under_pressure(wait_ms)
    assert (error.code, error.status) == ("throttled", 429)
    assert error.detail == {"retry_after_ms": wait_ms}, "a cap would be named as a limit: this is none"
    assert error.retry_after_s == retry_after_s, "whole seconds, and never less than what is said in milliseconds"
