"""The decay table of the contract, and what overrides it."""

from __future__ import annotations

import pytest

from topics.storage.config import TopicConfig
from topics.walshard.topic.priority import effective_priority

NOW = 1_700_000_000_000
AUTO = TopicConfig()


@pytest.mark.parametrize(
    ("idle_s", "expected"),
    [(0, 500), (15, 354), (30, 250), (60, 125), (120, 31), (299.9, 0), (300, 0), (301, 0), (86_400, 0)],
)
def test_recency_halves_every_thirty_seconds(idle_s: float, expected: int) -> None:
    read = NOW - int(idle_s * 1_000)
    assert effective_priority(AUTO, last_read_ts=read, now_ms=NOW) == expected


def test_five_minutes_are_a_hard_floor() -> None:
    assert effective_priority(AUTO, last_read_ts=NOW - 299_999, now_ms=NOW) <= 1
    assert effective_priority(AUTO, last_read_ts=NOW - 300_000, now_ms=NOW) == 0


def test_it_only_falls() -> None:
    values = [effective_priority(AUTO, last_read_ts=NOW - idle, now_ms=NOW) for idle in range(0, 310_000, 997)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("priority", [-1_000, -1, 0, 1, 1_000])
def test_a_manual_priority_always_wins(priority: int) -> None:
    for auto in (True, False):
        config = TopicConfig(priority=priority, auto_priority=auto)
        assert effective_priority(config, last_read_ts=NOW, now_ms=NOW) == priority
        assert effective_priority(config, last_read_ts=None, now_ms=NOW) == priority


def test_without_either_it_is_zero() -> None:
    assert effective_priority(TopicConfig(auto_priority=False), last_read_ts=NOW, now_ms=NOW) == 0
    assert effective_priority(AUTO, last_read_ts=None, now_ms=NOW) == 0


def test_a_read_in_the_future_counts_as_now() -> None:
    assert effective_priority(AUTO, last_read_ts=NOW + 5_000, now_ms=NOW) == 500
