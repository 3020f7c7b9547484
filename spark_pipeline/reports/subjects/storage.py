"""Storage: what the folder takes on the disk, how much of that is live, and when the disk will be full.

Growth is the difference between two runs at least a day apart: it knows what caps, TTLs and deletes give back. Until
there are such runs it is what was written on the days before today, which can only be more. A cold tier on another disk
takes no space of this one, and its growth does not count.
"""

from __future__ import annotations

import os
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports import units
from spark_pipeline.reports.report import Chart, Column, Finding, Job, Level, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.hours import DAY_MS, date_of, day_of, day_start_ms
from topics.datadir.files import Files
from topics.errors import TopicsError
from topics.storage.format import RECORD_OVERHEAD

NAME = "storage"
TITLE = "Storage"
QUESTION = "What takes the disk's space, how much of it is of use, and how long will it last?"

_TOP = 20
_DAYS = 30  # of history that growth is measured over
_SOON_DAYS = 14
_VERY_SOON_DAYS = 2


def compute(job: Job) -> Result:
    topics = job.view("topics").select("topic", "shard", "internal", F.col("count").alias("records"), "bytes")
    with kept(job.view("segments")) as files, kept(topics) as topics:
        totals = {**_files(files), **_topics(topics)}
        by_topic = _by_topic(files, topics)
        job.save("topics", by_topic.withColumn("date", F.lit(day_of(job.now_ms))))
        order = [F.desc(F.greatest("bytes", "file_bytes")), F.asc("topic")]
        largest = [row.asDict() for row in by_topic.orderBy(*order).limit(_TOP).collect()]
    free, disk = _space(job)
    totals["disk_bytes"] = totals["segment_bytes"] + totals["wal_bytes"]
    elsewhere = 0 if _on_one_disk(job) else totals["cold_bytes"]
    totals["local_bytes"] = totals["disk_bytes"] - elsewhere
    sizes = _sizes(job, totals, free)
    written = _written(job)
    growth, basis = _growth(job.now_ms, sizes, written)
    days = None
    if free is not None and growth is not None and growth > 0:
        days = free / growth
    summary = {
        "disk_bytes": totals["disk_bytes"],
        "live_bytes": totals["live_bytes"],
        "live_records": totals["live_records"],
        "free_bytes": free,
        "daily_growth_bytes": growth,
        "days_to_full": days,
        "growth_basis": basis,
        "disk_size_bytes": disk,
        **totals,
    }
    return Result(
        summary=summary,
        findings=_findings(summary),
        tables=[_disk_table(summary), _topic_table(largest, summary["topics"])],
        charts=_charts(summary, sizes, written, job.now_ms),
        metrics=_metrics(summary),
    )


def _files(files: DataFrame) -> dict[str, Any]:
    """Sums over the files. Where a segment holds both deleted and evicted records, their bytes are told together."""
    segment, wal = F.col("kind") == "segment", F.col("kind") == "wal"
    gone = F.col("total_bytes") - F.col("live_bytes")
    deleted, dead = F.col("deleted") > 0, F.col("dead") > 0

    def total(condition: Any, value: Any) -> Any:
        return F.coalesce(F.sum(F.when(condition, value)), F.lit(0)).cast("bigint")

    row = files.agg(
        total(segment, F.col("file_bytes")).alias("segment_bytes"),
        total(wal, F.col("file_bytes")).alias("wal_bytes"),
        F.count(F.when(segment, 1)).alias("segments"),
        F.count(F.when(segment & F.col("sealed"), 1)).alias("sealed_segments"),
        total(segment & (F.col("tier") == "hot"), F.col("file_bytes")).alias("hot_bytes"),
        total(segment & (F.col("tier") == "cold"), F.col("file_bytes")).alias("cold_bytes"),
        F.count(F.when(segment & (F.col("tier") == "cold"), 1)).alias("cold_segments"),
        F.count(F.when(wal, 1)).alias("wal_files"),
        total(segment, F.col("live_bytes")).alias("segment_live_bytes"),
        total(segment & deleted & ~dead, gone).alias("deleted_bytes"),
        total(segment & dead & ~deleted, gone).alias("dead_bytes"),
        total(segment & deleted & dead, gone).alias("deleted_or_dead_bytes"),
        total(segment, F.col("deleted")).alias("deleted_records"),
        total(segment, F.col("dead")).alias("dead_records"),
    ).first()
    assert row is not None  # an aggregate of all rows
    found: dict[str, Any] = row.asDict()
    return found


def _topics(topics: DataFrame) -> dict[str, Any]:
    row = topics.agg(
        F.count(F.when(~F.col("internal"), 1)).alias("topics"),
        F.coalesce(F.sum("records"), F.lit(0)).alias("live_records"),
        F.coalesce(F.sum("bytes"), F.lit(0)).alias("live_bytes"),
    ).first()
    assert row is not None  # an aggregate of all rows
    found: dict[str, Any] = row.asDict()
    return found


def _by_topic(files: DataFrame, topics: DataFrame) -> DataFrame:
    """Live bytes wherever they are, and its segments."""
    gone = F.col("total_bytes") - F.col("live_bytes")
    segments = (
        files.filter(F.col("kind") == "segment")
        .groupBy("topic")
        .agg(
            F.count("*").alias("segments"),
            F.sum("file_bytes").alias("file_bytes"),
            F.sum(F.when(F.col("tier") == "cold", F.col("file_bytes")).otherwise(0)).alias("cold_bytes"),
            F.sum(gone).alias("gone_bytes"),
            F.sum("deleted").alias("deleted"),
            F.sum("dead").alias("dead"),
        )
    )
    counted = ("segments", "file_bytes", "cold_bytes", "gone_bytes", "deleted", "dead")
    return topics.join(segments, "topic", "left").na.fill(0, list(counted))


def _space(job: Job) -> tuple[int | None, int | None]:
    """(free, whole) bytes of the disk under the folder, as the driver sees it; None if it does not."""
    try:
        found = os.statvfs(job.data_dir)
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _on_one_disk(job: Job) -> bool:
    """Whether the cold tier takes its space from the disk under the folder, too."""
    try:
        return len({os.stat(root).st_dev for _, root in Files(job.data_dir).roots()}) == 1
    except (OSError, TopicsError):
        return False


def _sizes(job: Job, totals: dict[str, Any], free: int | None) -> list[dict[str, Any]]:
    """What this and earlier runs found, the last of each day, in order."""
    names = ["disk_bytes", "local_bytes", "live_bytes", "live_records"]
    columns = ["at", *names, "free_bytes"]
    row = (day_of(job.now_ms), job.now_ms, *(totals[name] for name in names), free)
    now = job.spark.createDataFrame([row], "date date, " + ", ".join(f"{name} bigint" for name in columns))
    found = (
        job.accumulate("sizes", now)
        .filter((F.col("date") > day_of(job.now_ms - _DAYS * DAY_MS)) & (F.col("at") <= job.now_ms))
        .groupBy("date")
        .agg(F.max_by(F.struct(*columns), "at").alias("last"))
        .select("date", "last.*")
        .orderBy("date")
    )
    return [row.asDict() for row in found.collect()]  # at most one a day


def _written(job: Job) -> dict[int, int]:
    """Bytes that were written, by the beginning of the day."""
    fresh = job.fresh("records", includeData="false", includeDeleted="true")
    partial = fresh.groupBy(date_of("timestamp").alias("date")).agg(
        F.count("*").alias("records"), F.sum(F.col("size") + RECORD_OVERHEAD).cast("bigint").alias("bytes")
    )
    days = (
        job.accumulate("written", partial)
        .filter(F.col("date") > day_of(job.now_ms - _DAYS * DAY_MS))
        .groupBy("date")
        .agg(F.sum("bytes").cast("bigint").alias("bytes"))
    )
    return {day_start_ms(row["date"]): row["bytes"] for row in days.collect()}  # at most one a day


def _growth(now_ms: int, sizes: list[dict[str, Any]], written: dict[int, int]) -> tuple[float | None, str]:
    """(bytes a day on the folder's own disk, what that was taken from)."""
    known = [row for row in sizes if row["local_bytes"] is not None]  # runs of earlier programs did not tell
    first, last = known[0], known[-1]
    if last["at"] - first["at"] >= DAY_MS:
        grown = last["local_bytes"] - first["local_bytes"]
        return grown / (last["at"] - first["at"]) * DAY_MS, "size of earlier runs"
    today = day_start_ms(day_of(now_ms))
    before = [day for day in written if day < today]
    if before:
        days = (today - min(before)) // DAY_MS
        return sum(written[day] for day in before) / days, "records written before today"
    return None, "unknown"


def _findings(summary: dict[str, Any]) -> list[Finding]:
    taken, live = units.bytes_text(summary["disk_bytes"]), units.bytes_text(summary["live_bytes"])
    records = amounts.several(summary["live_records"], "live record")
    found = [Finding("ok", f"The folder takes {taken}; its {records} count for {live}.")]
    free, growth, days = summary["free_bytes"], summary["daily_growth_bytes"], summary["days_to_full"]
    if free is None:
        found.append(Finding("notice", "How much space is left is not known: the driver does not see the folder."))
    elif growth is None:
        text = f"{units.bytes_text(free)} are free. How long that lasts is known after a day of history."
        found.append(Finding("ok", text))
    elif days is None:
        found.append(Finding("ok", f"{units.bytes_text(free)} are free, and what the folder takes is not growing."))
    else:
        level: Level = "breach" if days < _VERY_SOON_DAYS else "notice" if days < _SOON_DAYS else "ok"
        text = f"{units.bytes_text(free)} are free: {days:,.0f} days at {units.bytes_text(growth)} a day"
        found.append(Finding(level, f"{text} ({summary['growth_basis']})."))
    return found


def _disk_table(summary: dict[str, Any]) -> Table:
    rows: list[tuple[Any, ...]] = [
        ("segments, hot", summary["hot_bytes"], summary["segments"] - summary["cold_segments"]),
        ("segments, cold", summary["cold_bytes"], summary["cold_segments"]),
        ("log files", summary["wal_bytes"], summary["wal_files"]),
    ]
    return Table(
        title="On the disk",
        columns=[Column("what"), Column("size", "bytes"), Column("files", "count")],
        rows=rows,
        note="Log files are reserved in full when they are made.",
    )


def _topic_table(largest: list[dict[str, Any]], topics: int) -> Table:
    return Table(
        title="Largest topics",
        columns=[
            Column("topic"),
            Column("live records", "count"),
            Column("live", "bytes"),
            Column("segments", "count"),
            Column("in segments", "bytes"),
            Column("of that cold", "bytes"),
            Column("deleted or dead", "bytes"),
            Column("records deleted", "count"),
            Column("records dead", "count"),
        ],
        rows=[
            (
                row["topic"],
                row["records"],
                row["bytes"],
                row["segments"],
                row["file_bytes"],
                row["cold_bytes"],
                row["gone_bytes"],
                row["deleted"],
                row["dead"],
            )
            for row in largest
        ],
        note=(f"The first {_TOP} of {topics:,} topics. " if topics > _TOP else "")
        + "Deleted: by clients; dead: evicted or expired; both as far as they are still in segments.",
    )


def _charts(summary: dict[str, Any], sizes: list[dict[str, Any]], written: dict[int, int], now_ms: int) -> list[Chart]:
    parts: list[tuple[int | str, float]] = [
        ("live", float(summary["segment_live_bytes"])),
        ("deleted", float(summary["deleted_bytes"])),
        ("dead", float(summary["dead_bytes"])),
        ("deleted or dead", float(summary["deleted_or_dead_bytes"])),
        ("log files", float(summary["wal_bytes"])),
    ]
    charts = [
        Chart(
            title="What lies in the segments, and the log",
            shape="bars",
            series=[Series("bytes", [part for part in parts if part[1] or part[0] == "live"])],
            kind="bytes",
            note="Records count for their data, their meta and 32 bytes.",
        )
    ]
    if len(sizes) > 1:
        series = [
            Series("on the disk", [(row["at"], float(row["disk_bytes"])) for row in sizes]),
            Series("live", [(row["at"], float(row["live_bytes"])) for row in sizes]),
        ]
        charts.append(Chart(title="Size by day", shape="lines", series=series, kind="bytes"))
    if written:
        days = range(min(written), day_start_ms(day_of(now_ms)) + 1, DAY_MS)
        points: list[tuple[int | str, float]] = [(day, float(written.get(day, 0))) for day in days]
        charts.append(Chart(title="Written by day", shape="bars", series=[Series("bytes", points)], kind="bytes"))
    return charts


def _metrics(summary: dict[str, Any]) -> list[Metric]:
    found = [
        Metric("storage_disk_bytes", "What the data folder takes on the disk.", summary["disk_bytes"]),
        Metric("storage_live_bytes", "What live records count for.", summary["live_bytes"]),
        Metric("storage_live_records", "Live records of all topics.", summary["live_records"]),
        Metric("storage_segments", "Segments.", summary["segments"]),
        Metric("storage_wal_bytes", "What log files take on the disk.", summary["wal_bytes"]),
    ]
    for tier in ("hot", "cold"):
        text = "What segments take on the disk, by tier."
        found.append(Metric("storage_segment_bytes", text, summary[f"{tier}_bytes"], {"tier": tier}))
    for name in ("deleted", "dead"):
        text = "Records that are gone but still lie in segments."
        found.append(Metric("storage_gone_records", text, summary[f"{name}_records"], {"why": name}))
    gone = summary["deleted_bytes"] + summary["dead_bytes"] + summary["deleted_or_dead_bytes"]
    found.append(Metric("storage_gone_bytes", "What records count for that are gone but still lie in segments.", gone))
    free, growth, days = summary["free_bytes"], summary["daily_growth_bytes"], summary["days_to_full"]
    if free is not None:
        found.append(Metric("storage_free_bytes", "Free space of the data folder's disk.", free))
    if growth is not None:
        found.append(
            Metric("storage_growth_bytes_per_day", "By how much the folder grows a day on its own disk.", growth)
        )
    if days is not None:
        text = "When the data folder's disk is full if the folder goes on growing as it does."
        found.append(Metric("storage_days_to_full", text, days))
    return found
