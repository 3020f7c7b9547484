"""How long a client waits before it tries again, and what it tries again at all."""

from __future__ import annotations

import pytest

from topics.client.backoff import Backoff
from topics.client.failures import (
    BadUrl,
    ConnectionLost,
    NotTopics,
    Unreachable,
    at_least_s,
    is_passing,
    may_have_happened,
)
from topics.errors import ApiError


def test_delays_double_up_to_the_most() -> None:
    backoff = Backoff(first_s=0.1, most_s=1.0, chance=lambda: 1.0)
    assert [round(backoff.next_s(), 3) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_jitter_takes_up_to_half() -> None:
    assert Backoff(first_s=0.1, chance=lambda: 0.0).next_s() == pytest.approx(0.05)
    assert Backoff(first_s=0.1, chance=lambda: 0.5).next_s() == pytest.approx(0.075)


def test_real_chance_spreads_the_clients() -> None:
    delays = {Backoff().next_s() for _ in range(20)}
    assert len(delays) > 10
    assert all(0.05 <= delay <= 0.1 for delay in delays)


def test_success_begins_anew() -> None:
    backoff = Backoff(first_s=0.1, chance=lambda: 1.0)
    for _ in range(5):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.1)


def test_what_the_server_asks_for_is_kept() -> None:
    backoff = Backoff(first_s=0.1, chance=lambda: 1.0)
    assert backoff.next_s(at_least_s=7.0) == 7.0
    assert backoff.next_s(at_least_s=0.01) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("failure", "asked_s"),
    [
        (ApiError("throttled", "", retry_after_s=3), 3.0),
        (ApiError("throttled", "", {"retry_after_ms": 250}, retry_after_s=1), 0.25),
        (ApiError("throttled", "", {"retry_after_ms": "soon"}, retry_after_s=1), 1.0),
        (ApiError("not_ready", ""), 0.0),
        (ConnectionLost(""), 0.0),
    ],
)
def test_how_long_the_server_asks_for(failure: Exception, asked_s: float) -> None:
    assert at_least_s(failure) == asked_s


# failure -> (worth another try, may have been written)
VERDICTS: list[tuple[Exception, bool, bool]] = [
    (ApiError("throttled", ""), True, False),
    (ApiError("not_ready", ""), True, False),
    (ApiError("shutting_down", ""), True, False),
    (ApiError("storage_full", ""), True, False),
    (ApiError("shard_unavailable", ""), True, False),
    (ApiError("shard_unavailable", "", {"outcome": "unknown"}), True, True),
    (ApiError("invalid_request", ""), False, False),
    (ApiError("topic_full", ""), False, False),
    (ApiError("internal", ""), False, False),
    (ApiError("a_code_of_a_later_version", ""), False, False),
    (ConnectionLost(""), True, True),
    (Unreachable(""), True, False),
    (NotTopics(""), False, False),
    (BadUrl(""), False, False),
]


@pytest.mark.parametrize(("failure", "passing", "happened"), VERDICTS, ids=lambda value: getattr(value, "code", None))
def test_what_is_tried_again(failure: Exception, passing: bool, happened: bool) -> None:
    assert is_passing(failure) is passing
    assert may_have_happened(failure) is happened
