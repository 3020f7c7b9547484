"""What a run found, before it is written down: an entry for each report, whether it succeeded or not."""

from __future__ import annotations

import msgspec

from .report import Finding, Metric, Result


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One report of a run. Either there is a result, or an error in words."""

    name: str
    title: str
    question: str
    seconds: float
    result: Result | None = None
    error: str | None = None


class Breach(msgspec.Struct, frozen=True, kw_only=True):
    """A metric beyond its limit."""

    metric: str  # without the prefix
    labels: dict[str, str]
    value: float
    limit: str  # "max of 5", "min of 2"
    text: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    version: str  # of the program
    folder: str
    now_ms: int  # when the run began
    since_ms: int | None
    snapshot_ms: int | None = None  # of a snapshot: when it was made, which is now for its reports
    seconds: float
    entries: list[Entry]
    breaches: list[Breach] = []
    notices: list[Finding] = []  # of the run itself, not of one report

    @property
    def failed(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.error is not None]

    @property
    def metrics(self) -> list[Metric]:
        return [metric for entry in self.entries if entry.result is not None for metric in entry.result.metrics]
