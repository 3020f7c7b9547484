"""What a report is made of, whoever computes it and however it is shown.

A report module has NAME, TITLE, QUESTION (the one line that it answers) and `compute(job) -> Result`. It decides what
is counted; a Job gives it the data and keeps what earlier runs counted; outputs.py and page/page.py write the Result
down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Kind = Literal["text", "count", "bytes", "ms", "time", "percent", "number"]  # how a value is written for people
Level = Literal["ok", "notice", "breach"]


class Column(msgspec.Struct, frozen=True):
    name: str
    kind: Kind = "text"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    columns: list[Column]
    rows: list[tuple[Any, ...]]
    note: str = ""


class Series(msgspec.Struct, frozen=True):
    name: str
    points: list[tuple[int | str, float]]  # x is epoch milliseconds, or a label


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    shape: Literal["lines", "bars", "stacked"]
    series: list[Series]
    kind: Kind = "count"  # of the y values
    note: str = ""


class Metric(msgspec.Struct, frozen=True):
    """One number for node_exporter and for thresholds. The name gets the prefix `topics_report_`."""

    name: str
    help: str
    value: float
    labels: dict[str, str] = {}


class Finding(msgspec.Struct, frozen=True):
    """A sentence at the top of the report: what a person should know first."""

    level: Level
    text: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    summary: dict[str, Any]  # JSON: the numbers, with plain names
    findings: list[Finding] = []
    tables: list[Table] = []
    charts: list[Chart] = []
    metrics: list[Metric] = []


class Job(Protocol):
    """What run.py gives a report."""

    spark: SparkSession
    now_ms: int  # of this run, or of the snapshot that it is about; the same for all its reports
    run_ms: int  # when this run began, whatever it is about
    frozen: bool  # it is about a snapshot
    since_ms: int | None  # --since: leave out what is older
    data_dir: str  # as the driver sees it

    def view(self, name: str, **options: str) -> DataFrame:
        """A view of the folder, pinned: all reports of a run see the same heads."""
        ...

    def fresh(self, view: Literal["records", "leases"], **options: str) -> DataFrame:
        """`records` or `leases` without what this report has read in earlier runs."""
        ...

    def accumulate(self, name: str, partial: DataFrame) -> DataFrame:
        """Store this run's share of a table (with a column `date`) and give back that of all runs, this one included.
        It counts when the whole run is done: a run that dies leaves nothing behind that would be counted twice."""
        ...

    def save(self, name: str, frame: DataFrame) -> None:
        """Write a table of this run's as Parquet, partitioned by its column `date`."""
        ...
