"""Traffic: what was written, by topic and hour.

Each run counts the records that are new since the last one and adds them to the hours of earlier runs. What was deleted
by a client counts as long as it is still on the disk; what was gone before a run could read it is known by number
only, from the seqs, and belongs to no hour.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports import units
from spark_pipeline.reports.report import Chart, Column, Finding, Job, Level, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.heads import growth
from spark_pipeline.reports.subjects.hours import DAY_MS, Window, date_of, hour_of, millis, window

NAME = "traffic"
TITLE = "Traffic"
QUESTION = "How much is written, to which topics, and is that more or less than usual?"

_TOP = 20
_DRAWN = 5
_MARKED = 50.0  # percent: a change of all traffic worth a word


def compute(job: Job) -> Result:
    fresh = job.fresh("records", includeData="false", includeDeleted="true")
    counted = fresh.groupBy("topic", hour_of("timestamp").alias("hour")).agg(
        F.count("*").alias("records"), F.sum("size").cast("bigint").alias("bytes")
    )
    with kept(counted.withColumn("date", date_of("hour"))) as counted:
        hourly = job.accumulate("hourly", counted)
        hourly = hourly.groupBy("topic", "date", "hour").agg(
            F.sum("records").alias("records"), F.sum("bytes").cast("bigint").alias("bytes")
        )
        touched = counted.select("date").distinct()
        job.save("hourly", hourly.join(F.broadcast(touched), "date", "left_semi"))
        unseen = _unseen(job, counted)
    if job.since_ms is not None:
        hourly = hourly.filter(hour_of("hour") >= hour_of(F.timestamp_millis(F.lit(job.since_ms))))
    span = window(job.now_ms)
    if job.frozen:
        hourly = hourly.filter(millis("hour") <= span.hour_ms)  # a later run may have seen more
    with kept(_by_topic(hourly, span)) as by_topic:
        totals = _totals(by_topic, span)
        top = [row.asDict() for row in by_topic.orderBy(*_busiest()).limit(_TOP).collect()]
        silent = by_topic.filter((F.col("day_records") == 0) & (F.col("usual_records") > 0))
        fallen_silent = silent.count()
        silent_names = [row["topic"] for row in silent.orderBy(F.desc("usual_records"), "topic").limit(5).collect()]
    summary = {**totals, "silent_topics": fallen_silent, **unseen}
    return Result(
        summary=summary,
        findings=_findings(summary, silent_names),
        tables=[_table(top, summary["topics"])],
        charts=_charts(hourly, span, [row["topic"] for row in top[:_DRAWN]], totals["first_hour_ms"]),
        metrics=_metrics(summary, top),
    )


def _busiest() -> list[Any]:
    return [F.desc("day_records"), F.desc("week_records"), F.desc("records"), F.asc("topic")]


def _unseen(job: Job, counted: DataFrame) -> dict[str, Any]:
    """What was written since the last run, and how much of it was gone before this one."""
    topics = job.view("topics").filter(~F.col("internal")).select("topic", "id", "durability", "disk_seq")
    grown, since = growth(job, topics, since_ms=job.run_ms)
    read = counted.groupBy("topic").agg(F.sum("records").alias("read"))
    row = (
        grown.join(read, "topic", "left")
        .agg(
            F.coalesce(F.sum("written"), F.lit(0)).alias("written"),
            F.coalesce(F.sum("read"), F.lit(0)).alias("read"),
            F.coalesce(F.sum(F.greatest(F.lit(0), F.col("written") - F.coalesce("read", F.lit(0)))), F.lit(0)).alias(
                "unseen"
            ),
        )
        .first()
    )
    assert row is not None  # an aggregate of all rows
    return {
        "written_since_last_run": row["written"],
        "read_since_last_run": row["read"],
        "unseen_since_last_run": row["unseen"],
        "last_run_ms": since,
    }


def _by_topic(hourly: DataFrame, span: Window) -> DataFrame:
    """One row a topic. `usual` is what it had in a mean day of the trailing week; null if it is younger than a day."""
    hour = millis("hour")
    day = hour >= span.day_ms
    week = (hour >= span.week_ms) & (hour < span.day_ms)
    sums = [
        F.coalesce(F.sum(F.when(part, F.col(name))), F.lit(0)).cast("bigint").alias(f"{prefix}_{name}")
        for prefix, part in (("day", day), ("week", week))
        for name in ("records", "bytes")
    ]
    found = hourly.groupBy("topic").agg(
        F.sum("records").alias("records"),
        F.sum("bytes").cast("bigint").alias("bytes"),
        F.min(hour).alias("first_hour"),
        F.max(hour).alias("last_hour"),
        *sums,
    )
    days = (F.lit(span.day_ms) - F.greatest(F.lit(span.week_ms), F.col("first_hour"))) / F.lit(DAY_MS)
    usual = F.when(days >= 1, F.col("week_records") / days)
    return found.withColumn("usual_records", usual).withColumn(
        "change", F.when(usual > 0, (F.col("day_records") - usual) / usual * 100)
    )


def _totals(by_topic: DataFrame, span: Window) -> dict[str, Any]:
    names = ["day_records", "day_bytes", "week_records", "week_bytes", "records", "bytes"]
    row = by_topic.agg(
        *(F.coalesce(F.sum(name), F.lit(0)).cast("bigint").alias(name) for name in names),
        F.count("*").alias("topics"),
        F.min("first_hour").alias("first_hour_ms"),
    ).first()
    assert row is not None  # an aggregate of all rows
    totals: dict[str, Any] = {
        "change_percent": None,
        "usual_day_records": None,
        "usual_day_bytes": None,
        **row.asDict(),
    }
    if totals["first_hour_ms"] is not None:
        days = (span.day_ms - max(span.week_ms, totals["first_hour_ms"])) / DAY_MS
        if days >= 1:
            totals["usual_day_records"] = totals["week_records"] / days
            totals["usual_day_bytes"] = totals["week_bytes"] / days
        if totals["usual_day_records"]:
            totals["change_percent"] = (totals["day_records"] / totals["usual_day_records"] - 1) * 100
    return totals


def _findings(summary: dict[str, Any], silent: list[str]) -> list[Finding]:
    day = (
        f"{amounts.several(summary['day_records'], 'record')} with {units.bytes_text(summary['day_bytes'])} of data "
        "in the last 24 hours"
    )
    change = summary["change_percent"]
    if change is None:
        found = [Finding("ok", f"{day}. There is no trailing week to compare with yet.")]
    else:
        level: Level = "notice" if abs(change) >= _MARKED else "ok"
        found = [Finding(level, f"{day}: {amounts.compared(change)} on a usual day of the week before.")]
    if silent:
        text = amounts.names(silent, of=summary["silent_topics"])
        found.append(Finding("notice", f"Silent for a day, but written to in the week before: {text}."))
    if summary["unseen_since_last_run"]:
        gone = amounts.several(summary["unseen_since_last_run"], "record")
        found.append(Finding("ok", f"{gone} came and went between two runs: known by number, counted in no hour."))
    return found


def _table(top: list[dict[str, Any]], topics: int) -> Table:
    return Table(
        title="Busiest topics",
        columns=[
            Column("topic"),
            Column("records, 24 h", "count"),
            Column("data, 24 h", "bytes"),
            Column("records a day, week before", "number"),
            Column("change", "percent"),
            Column("records, all", "count"),
            Column("data, all", "bytes"),
            Column("last hour", "time"),
        ],
        rows=[
            (
                row["topic"],
                row["day_records"],
                row["day_bytes"],
                row["usual_records"],
                row["change"],
                row["records"],
                row["bytes"],
                row["last_hour"],
            )
            for row in top
        ],
        note=f"The first {_TOP} of {topics:,} topics." if topics > _TOP else "",
    )


def _charts(hourly: DataFrame, span: Window, drawn: list[str], first_hour: int | None) -> list[Chart]:
    recent = hourly.filter(millis("hour") >= span.week_ms)
    shown = F.when(F.col("topic").isin(drawn), F.col("topic")) if drawn else F.lit(None).cast("string")
    rows = (
        recent.groupBy(millis("hour").alias("hour"), shown.alias("topic"))
        .agg(F.sum("records").alias("records"), F.sum("bytes").cast("bigint").alias("bytes"))
        .filter(F.col("hour") <= span.hour_ms)
        .collect()  # at most 192 hours of six series
    )
    hours = span.hours(first_hour)
    records = dict.fromkeys(hours, 0)
    data = dict.fromkeys(hours, 0)
    by_topic: dict[str, dict[int, int]] = {}
    day = [hour for hour in hours if hour >= span.day_ms]
    for row in rows:
        hour = row["hour"]
        records[hour] += row["records"]
        data[hour] += row["bytes"]
        if hour >= span.day_ms:
            by_topic.setdefault(row["topic"] or "others", dict.fromkeys(day, 0))[hour] += row["records"]
    order = [topic for topic in [*drawn, "others"] if topic in by_topic]
    charts = [
        Chart(
            title="Records an hour, last eight days",
            shape="lines",
            series=[Series("records", [(hour, float(count)) for hour, count in records.items()])],
        ),
        Chart(
            title="Data an hour, last eight days",
            shape="lines",
            series=[Series("data", [(hour, float(size)) for hour, size in data.items()])],
            kind="bytes",
        ),
        Chart(
            title="Records an hour by topic, last 24 hours",
            shape="stacked",
            series=[Series(topic, [(h, float(n)) for h, n in by_topic[topic].items()]) for topic in order],
            note=f"The {_DRAWN} busiest topics; the last hour is not over.",
        ),
    ]
    return [chart for chart in charts if any(series.points for series in chart.series)]


def _metrics(summary: dict[str, Any], top: list[dict[str, Any]]) -> list[Metric]:
    found = [
        Metric("traffic_day_records", "Records written in the last 24 hours.", summary["day_records"]),
        Metric("traffic_day_bytes", "Data written in the last 24 hours, in bytes.", summary["day_bytes"]),
        Metric(
            "traffic_unseen_records",
            "Records written since the last run that were gone before this one.",
            summary["unseen_since_last_run"],
        ),
        Metric(
            "traffic_silent_topics",
            "Topics written to in the week before, but not for a day.",
            summary["silent_topics"],
        ),
    ]
    if summary["change_percent"] is not None:
        text = "Records of the last 24 hours against a usual day of the week before, in percent."
        found.append(Metric("traffic_change_percent", text, summary["change_percent"]))
    for row in top:
        text = f"Records written to a topic in the last 24 hours; the {_TOP} busiest."
        found.append(Metric("traffic_topic_day_records", text, row["day_records"], {"topic": row["topic"]}))
    return found
