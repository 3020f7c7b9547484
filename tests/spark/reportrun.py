"""Runs as the runner does them, with reports that count so simply that a test knows the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import functions as F

from spark_pipeline.reports import registry
from spark_pipeline.reports.outcome import Entry, Outcome
from spark_pipeline.reports.report import Job, Result
from spark_pipeline.reports.run import Request, run

Compute = Callable[[Any], Result]


class Silent:
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin(self, name: str, title: str) -> None:
        pass

    def tick(self, done: int, total: int) -> None:
        pass

    def end(self, entry: Entry) -> None:
        self.ended.append(entry.name)


def counting(job: Job) -> Result:
    """Records by topic: what this run read, and what all runs have."""
    return Result(summary=_counts(job, "records", "topic"))


def counting_leases(job: Job) -> Result:
    return Result(summary=_counts(job, "leases", "queue"))


def _counts(job: Job, view: Any, column: str) -> dict[str, Any]:
    fresh = job.fresh(view).groupBy(column).agg(F.count("*").alias("n"))
    whole = job.accumulate("counts", fresh.withColumn("date", F.lit("2026-11-16")))
    rows = whole.groupBy(column).agg(F.sum("n").alias("n")).collect()
    return {"read": {row[column]: row["n"] for row in fresh.collect()}, "all": {row[column]: row["n"] for row in rows}}


def stand_in(monkeypatch: pytest.MonkeyPatch, **computes: Compute) -> None:
    """Let these be the reports of that name."""
    real = registry.load

    def load(name: str) -> Any:
        if name in computes:
            return SimpleNamespace(NAME=name, TITLE=name.title(), QUESTION=f"{name}?", compute=computes[name])
        return real(name)

    monkeypatch.setattr(registry, "load", load)


def run_once(folder: Path, out: Path, *names: str, **request: Any) -> Outcome:
    return run(Request(folder=str(folder), out=out, version="test", names=names or ("traffic",), **request), Silent())


def summary(outcome: Outcome, name: str = "traffic") -> dict[str, Any]:
    entry = next(entry for entry in outcome.entries if entry.name == name)
    assert entry.result is not None, entry.error
    return entry.result.summary


def files(folder: Path, pattern: str = "**/*.parquet") -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))
