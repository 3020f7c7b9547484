"""The metrics about answered requests, as text: it says what prometheus_client makes of the same families."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from topics.gateway.metrics.answered import Answered
from topics.shm.usage import ROUTES, STATUSES, Usage

GATEWAYS = 2
LABELS = [("-", "none"), ("GET", "/v0/topics/:topic"), ("POST", "/v0/topics/:topic"), ("GET", "/v0/metrics")]


class Collected(CollectorRegistry):
    def __init__(self, answered: Answered) -> None:
        super().__init__()
        self._answered = answered

    def collect(self) -> Iterator[Metric]:
        return self._answered.families()


def read(text: bytes) -> list[Metric]:
    """Equal if names, meanings, types, labels and values are."""
    return list(text_string_to_metric_families(text.decode()))


def made(usage: Usage) -> Answered:
    answered = Answered(usage)
    answered.labels = LABELS
    return answered


@pytest.fixture
def usage() -> Iterator[Usage]:
    usage = Usage.create(gateways=GATEWAYS, keys=1)
    yield usage
    usage.close()


_counts = st.lists(
    st.tuples(
        st.integers(0, GATEWAYS - 1),
        st.integers(0, len(LABELS) - 1),
        st.sampled_from([*STATUSES, 599]),
        st.sampled_from([0, 1, 63, 64, 65, 1_000, 123_456, 2**21, 2**40]),
    ),
    max_size=20,
)


@given(rounds=st.lists(_counts, max_size=4))
@examples(50)
def test_every_page_says_what_the_counters_say(rounds: list[list[tuple[int, int, int, int]]]) -> None:
    """Whatever the page before it said."""
    usage = Usage.create(gateways=GATEWAYS, keys=1)
    answered = made(usage)
    meters = [usage.meter(gateway) for gateway in range(GATEWAYS)]
    for counts in [[], *rounds]:
        for gateway, route, status, took_us in counts:
            meters[gateway].count(route, status, took_us)
        assert read(answered.text()) == read(generate_latest(Collected(answered)))
    usage.close()


def test_what_has_not_changed_is_not_made_again(usage: Usage, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    durations = Usage.durations

    def watched(self: Usage, route: int) -> tuple[list[int], int]:
        looked.append(route)
        return durations(self, route)

    monkeypatch.setattr(Usage, "durations", watched)
    answered = made(usage)
    for route in (1, 2, 3):
        usage.meter(0).count(route, 200, 50)
    answered.text()
    usage.meter(1).count(2, 404, 0)  # neither its microseconds nor what it had before tell
    answered.text()
    answered.text()
    assert looked == [1, 2, 3, 2]


@pytest.mark.parametrize("route", [0, ROUTES - 1])
def test_each_counter_of_a_route_is_told_apart(usage: Usage, route: int) -> None:
    seen = {usage.counters(route)}
    for gateway in range(GATEWAYS):
        for status in STATUSES:
            usage.meter(gateway).count(route, status, 0)
            seen.add(usage.counters(route))
    assert len(seen) == 1 + GATEWAYS * len(STATUSES)
    other = usage.counters(1)
    usage.meter(0).count(route, 200, 5)
    assert usage.counters(1) == other
