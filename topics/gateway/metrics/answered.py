"""The metrics about answered requests: how many by status, how long they took. By route, of all gateways together.

They are three quarters of a page's lines, and of what it costs to make them. So the lines of a route are made again
only when one of its counters has changed: what a scrape shows is exact, and what nobody asked for costs a look.

JSON is made of families, as the rest of the page is; text by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from topics.shm.usage import BUCKET_US, Usage

_ANSWERS = ("topics_http_requests", "Answered requests.")
_DURATIONS = ("topics_http_request_duration_seconds", "From a request's last byte to its answer.")
_BOUNDS = [*(str(bound / 1e6) for bound in BUCKET_US), "+Inf"]


class Answered:
    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self.labels: list[tuple[str, str]] = []  # method and path of routes, by number
        self._made: dict[int, tuple[bytes, str, str]] = {}  # by route: its counters then, and the lines of both blocks

    def families(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(*_ANSWERS, labels=["method", "route", "status"])
        durations = HistogramMetricFamily(*_DURATIONS, labels=["method", "route"])
        for number, (method, route) in enumerate(self.labels):
            counts = self._usage.answers(number)
            if not counts:
                continue
            for status, count in counts.items():
                answers.add_metric([method, route, _status(status)], count)
            buckets, spent_us = self._usage.durations(number)
            cumulative = list(zip(_BOUNDS, itertools.accumulate(buckets), strict=True))
            durations.add_metric([method, route], cumulative, spent_us / 1e6)
        yield answers
        yield durations

    def text(self) -> bytes:
        answers, durations = [], []
        for number in range(len(self.labels)):
            counters = self._usage.counters(number)
            made = self._made.get(number)
            if made is None or made[0] != counters:
                made = self._made[number] = (counters, *self._lines(number))
            answers.append(made[1])
            durations.append(made[2])
        head = "# HELP {0} {1}\n# TYPE {0} {2}\n"
        parts = (
            head.format(f"{_ANSWERS[0]}_total", _ANSWERS[1], "counter"),
            *answers,
            head.format(*_DURATIONS, "histogram"),
            *durations,
        )
        return "".join(parts).encode()

    def _lines(self, number: int) -> tuple[str, str]:
        counts = self._usage.answers(number)
        if not counts:
            return "", ""
        method, route = self.labels[number]
        name, of_route = _DURATIONS[0], f'method="{method}",route="{route}"'
        answers = [
            f'{_ANSWERS[0]}_total{{{of_route},status="{_status(status)}"}} {count}\n'
            for status, count in counts.items()
        ]
        buckets, spent_us = self._usage.durations(number)
        durations = [
            f'{name}_bucket{{le="{bound}",{of_route}}} {count}\n'
            for bound, count in zip(_BOUNDS, itertools.accumulate(buckets), strict=True)
        ]
        durations.append(f"{name}_count{{{of_route}}} {sum(buckets)}\n")
        durations.append(f"{name}_sum{{{of_route}}} {spent_us / 1e6}\n")
        return "".join(answers), "".join(durations)


def _status(status: int) -> str:
    return str(status) if status else "other"
