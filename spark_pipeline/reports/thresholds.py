"""Limits for the reports' metrics, from a TOML file: which numbers a person wants to hear of.

    queues_oldest_ready_seconds = { max = 60 }
    queues_wait_seconds = [{ max = 5 }, { max = 0.5, labels = { queue = "mail-*", percentile = "p95" } }]
    traffic_day_records = { min = 1 }

A name may have the prefix `topics_report_` that it has in Prometheus. Labels are compared as globs; those that are not
named don't matter. A name that no report knows is an error, not a limit that never fires.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from topics.errors import TopicsError

from .outcome import Breach
from .report import Metric

PREFIX = "topics_report_"


class BadThresholds(TopicsError):
    """The file can't be read, or says something that means nothing."""


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    metric: str  # without the prefix
    max: float | None = None
    min: float | None = None
    labels: dict[str, str] = {}

    def matches(self, metric: Metric) -> bool:
        return metric.name == self.metric and all(
            name in metric.labels and fnmatchcase(metric.labels[name], glob) for name, glob in self.labels.items()
        )

    def broken_by(self, value: float) -> str | None:
        """The limit, in words. What is unknown breaks none."""
        if math.isnan(value):
            return None
        if self.max is not None and value > self.max:
            return f"max of {_number(self.max)}"
        if self.min is not None and value < self.min:
            return f"min of {_number(self.min)}"
        return None

    def __str__(self) -> str:
        return self.metric + _braces(self.labels)


def read(path: str, *, suggest: Callable[[str], str | None]) -> list[Threshold]:
    """The thresholds of a file. `suggest` gives None for a metric that a report knows, else the end of a sentence."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise BadThresholds(f"--thresholds {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise BadThresholds(f"--thresholds {path}: it is not UTF-8 text") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadThresholds(f"--thresholds {path}: it is not TOML: {error}") from None
    found = []
    for name, value in tables.items():
        metric = name.removeprefix(PREFIX)
        if (hint := suggest(metric)) is not None:
            raise BadThresholds(f"--thresholds {path}: no report has a metric {name}{hint}")
        for one in value if isinstance(value, list) else [value]:
            try:
                found.append(_threshold(metric, one))
            except ValueError as error:
                raise BadThresholds(f"--thresholds {path}: {name}: {error}") from None
    return found


def _threshold(metric: str, table: Any) -> Threshold:
    if not isinstance(table, dict):
        raise ValueError("write { max = N } or { min = N }")
    for key in table:
        if key not in ("max", "min", "labels"):
            raise ValueError(f"there is no {key!r} here, only max, min and labels")
    limits = {key: _limit(key, table[key]) for key in ("max", "min") if key in table}
    if not limits:
        raise ValueError("a max or a min is missing")
    if limits.get("min", -math.inf) > limits.get("max", math.inf):
        raise ValueError("min is above max")
    labels = table.get("labels", {})
    if not isinstance(labels, dict) or not all(isinstance(glob, str) for glob in labels.values()):
        raise ValueError('labels must be a table of texts, as in { queue = "mail-*" }')
    return Threshold(metric=metric, labels=labels, max=limits.get("max"), min=limits.get("min"))


def _limit(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{key} must be a number, not {value!r}")
    return float(value)


def check(thresholds: Iterable[Threshold], metrics: Iterable[Metric]) -> tuple[list[Breach], list[Threshold]]:
    """What is beyond its limit, and the thresholds that applied to nothing."""
    known = list(metrics)
    breaches: list[Breach] = []
    idle: list[Threshold] = []
    for threshold in thresholds:
        matching = [metric for metric in known if threshold.matches(metric)]
        if not matching:
            idle.append(threshold)
        for metric in matching:
            if (limit := threshold.broken_by(metric.value)) is not None:
                breaches.append(
                    Breach(
                        metric=metric.name,
                        labels=metric.labels,
                        value=metric.value,
                        limit=limit,
                        text=f"{metric.name}{_braces(metric.labels)} is {_number(metric.value)}, beyond the {limit}. "
                        f"{metric.help}",
                    )
                )
    return breaches, idle


def _braces(labels: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}={value}" for name, value in labels.items()) + "}" if labels else ""


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.6g}"
