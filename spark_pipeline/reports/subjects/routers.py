"""Routers: how far each is behind its source, how much it has copied, and which stand still.

Copies are on the disk a few seconds after clients can read them, what a filter passed over within about a minute, and
this looks at the disk, so a small lag is no news. A router stands still if it is behind although its source has been
quiet for a while, or if it is where an earlier run found it. Copies into an ephemeral topic are on no disk: how far
those are nobody outside the server knows.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports.report import Chart, Column, Finding, Job, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.hours import MINUTE_MS, day_of, millis

NAME = "routers"
TITLE = "Router lag"
QUESTION = "Do the routers keep up with their sources, and does any stand still?"

_TOP = 50
_DRAWN = 10
_LABELLED = 20
_PATIENCE_MS = 2 * MINUTE_MS  # copies reach the disk within seconds, a position without copies within a minute


def compute(job: Job) -> Result:
    routers = _judged(job).withColumn("date", F.lit(day_of(job.now_ms)))
    with kept(routers) as routers:
        job.save("routers", routers)
        row = routers.agg(
            F.count("*").alias("routers"),
            F.coalesce(F.sum("forwarded"), F.lit(0)).alias("forwarded"),
            F.count(F.when(F.col("lag") > 0, 1)).alias("behind"),
            F.coalesce(F.sum("lag"), F.lit(0)).alias("lag"),
            F.coalesce(F.max("lag"), F.lit(0)).alias("max_lag"),
            F.count(F.when(F.col("stalled"), 1)).alias("stalled"),
            F.count(F.when(~F.col("known"), 1)).alias("unknown"),
        ).first()
        assert row is not None  # an aggregate of all rows
        summary: dict[str, Any] = row.asDict()
        order = [F.desc("stalled"), F.desc("lag"), F.desc("forwarded"), F.asc("router")]
        rows = [found.asDict() for found in routers.orderBy(*order).limit(_TOP).collect()]
        most = routers.orderBy(F.desc("forwarded"), "router").limit(_DRAWN)
        busiest = [(found["router"], found["forwarded"]) for found in most.collect()]
    return Result(
        summary=summary,
        findings=_findings(summary, rows),
        tables=[_table(rows, summary["routers"])] if rows else [],
        charts=_charts(rows, busiest),
        metrics=_metrics(summary, rows),
    )


def _judged(job: Job) -> DataFrame:
    """The view with `known`, `moved` (copies since the last run; null if there was none) and `stalled`. Where nobody
    can know how far a router is, its lag is null."""
    routers = job.view("routers")
    topics = job.view("topics")
    sources = topics.select(F.col("topic").alias("source"), millis("last_write").alias("source_write"))
    dests = topics.select(F.col("topic").alias("dest"), F.col("durability").alias("dest_durability"))
    found = (
        routers.join(sources, "source", "left")
        .join(dests, "dest", "left")
        .join(_earlier(job, routers), "router", "left")
    )
    known = F.coalesce(F.col("dest_durability") != "ephemeral", F.lit(True))
    same = F.col("made") == millis("created")  # a router that was deleted and made again has no history
    lag = F.when(known, F.col("lag"))
    quiet = F.col("source_write") < job.now_ms - _PATIENCE_MS
    stuck = same & (F.col("at") < job.now_ms - _PATIENCE_MS) & (F.col("was_at") == F.col("copied_to"))
    stalled = known & (F.col("lag") > 0) & (F.coalesce(quiet, F.lit(False)) | F.coalesce(stuck, F.lit(False)))
    return found.select(
        *(name for name in routers.columns if name != "lag"),
        known.alias("known"),
        lag.alias("lag"),
        F.when(same, F.col("forwarded") - F.col("had_forwarded")).alias("moved"),
        F.coalesce(stalled, F.lit(False)).alias("stalled"),
    )


def _earlier(job: Job, routers: DataFrame) -> DataFrame:
    """Where the last run before this one found each router."""
    now = routers.select(
        F.lit(day_of(job.now_ms)).alias("date"),
        F.lit(job.now_ms).cast("bigint").alias("at"),
        "router",
        millis("created").alias("made"),
        F.col("copied_to").alias("was_at"),
        F.col("forwarded").alias("had_forwarded"),
    )
    columns = ["at", "made", "was_at", "had_forwarded"]
    before = job.accumulate("positions", now).filter(F.col("at") < job.now_ms)
    last = before.groupBy("router").agg(F.max_by(F.struct(*columns), "at").alias("last"))
    return last.select("router", "last.*")


def _findings(summary: dict[str, Any], rows: list[dict[str, Any]]) -> list[Finding]:
    if not summary["routers"]:
        return [Finding("ok", "There are no routers.")]
    found = []
    if summary["stalled"]:
        names = amounts.names([row["router"] for row in rows if row["stalled"]], of=summary["stalled"])
        found.append(Finding("notice", f"Standing still, with records to copy: {names}."))
    if summary["behind"]:
        lag = amounts.several(summary["lag"], "record")
        found.append(Finding("ok", f"{summary['behind']:,} of {summary['routers']:,} routers are behind, by {lag}."))
    else:
        found.append(Finding("ok", f"No router is behind; {amounts.several(summary['routers'], 'router')} in all."))
    if summary["unknown"]:
        text = f"{amounts.several(summary['unknown'], 'router')} copy into topics that are on no disk"
        found.append(Finding("ok", f"{text}: their lag is not known here."))
    return found


def _table(rows: list[dict[str, Any]], routers: int) -> Table:
    return Table(
        title="Routers",
        columns=[
            Column("router"),
            Column("source"),
            Column("dest"),
            Column("lag", "count"),
            Column("stands still"),
            Column("copies", "count"),
            Column("since the last run", "count"),
            Column("guarantee"),
            Column("filter"),
        ],
        rows=[
            (
                row["router"],
                row["source"],
                row["dest"],
                row["lag"],
                "yes" if row["stalled"] else "",
                row["forwarded"],
                row["moved"],
                row["guarantee"],
                row["filter"] or "",
            )
            for row in rows
        ],
        note=(f"The first {_TOP} of {routers:,}. " if routers > _TOP else "")
        + "Lag: records of the source that have not been looked at, whether or not the filter lets them through.",
    )


def _charts(rows: list[dict[str, Any]], busiest: list[tuple[str, int]]) -> list[Chart]:
    charts = []
    behind: list[tuple[int | str, float]] = [(row["router"], float(row["lag"])) for row in rows if row["lag"]]
    if behind:
        charts.append(Chart(title="Lag", shape="bars", series=[Series("records", behind[:_DRAWN])]))
    if busiest:
        points: list[tuple[int | str, float]] = [(name, float(count)) for name, count in busiest]
        charts.append(Chart(title="Copies made", shape="bars", series=[Series("copies", points)]))
    return charts


def _metrics(summary: dict[str, Any], rows: list[dict[str, Any]]) -> list[Metric]:
    found = [
        Metric("routers_lag_records", "Records that routers have not looked at yet, of all routers.", summary["lag"]),
        Metric("routers_max_lag_records", "Records that the router furthest behind has to copy.", summary["max_lag"]),
        Metric("routers_stalled", "Routers that stand still although there is something to copy.", summary["stalled"]),
        Metric("routers_forwarded_records", "Copies that routers have made.", summary["forwarded"]),
    ]
    for row in rows[:_LABELLED]:
        if row["lag"] is not None:
            text = f"Records that a router has not looked at yet; the {_LABELLED} furthest behind."
            found.append(Metric("routers_router_lag_records", text, row["lag"], {"router": row["router"]}))
    return found
