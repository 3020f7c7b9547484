"""Integrity: every byte that counts, read again and checked.

The driver lists the files (datadir/inventory.py), executors check one each (datadir/fsck/checking.py), and what only
shows between files is found here: frames missing from the log, segments that overlap, files that nobody names. A
damaged file is what this report is for, so it is a finding and never an error; the data source, which refuses such
folders, is not asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F

from spark_pipeline.reports import units
from spark_pipeline.reports.report import Chart, Column, Finding, Job, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.hours import day_of
from topics.datadir import inventory
from topics.datadir.fsck.checking import check_file
from topics.datadir.inventory import Entry, Inventory
from topics.storage.paths import index_path

NAME = "integrity"
TITLE = "Integrity"
QUESTION = "Can everything be read, and does it fit together?"

_TOP = 50
_TOLD = 5
_TASKS_PER_CORE = 4
_PAUSE_S = 0.2
_MOST_DOUBTFUL = 10_000  # files to look at again; whoever has more knows enough
_CHECKED = (
    "file string, kind string, shard int, topic string, missing boolean, bytes bigint, frames bigint, records bigint, "
    "deleted bigint, first_lsn bigint, last_lsn bigint, "
    "problems array<struct<file: string, offset: bigint, text: string>>"
)
_SPAN = "topic_id string, shard int, topic string, file string, first_seq bigint, last_seq bigint"
_PROBLEM = ["shard", "topic", "file", "offset", "text"]


def compute(job: Job) -> Result:
    data_dir = job.data_dir
    listed = inventory.take(data_dir, now_ms=job.now_ms)
    with kept(_checked(job, data_dir, listed.entries)) as checked, kept(_problems(job, checked, listed)) as found:
        problems = found if found.isEmpty() else _confirmed(job, data_dir, found)
        with kept(problems) as problems:
            job.save("problems", problems.withColumn("date", F.lit(day_of(job.now_ms))))
            shards = _shards(checked, problems, listed)
            count = problems.count()
            rows = [row.asDict() for row in problems.orderBy("shard", "file", "offset").limit(_TOP).collect()]
    summary = {
        "problems": count,
        "files": sum(row["files"] for row in shards),
        "bytes": sum(row["bytes"] for row in shards),
        "blocks": sum(row["blocks"] for row in shards),
        "records": sum(row["records"] for row in shards),
        "orphans": len(listed.orphans),
        "orphan_bytes": sum(orphan.bytes for orphan in listed.orphans),
        "by_shard": shards,
    }
    return Result(
        summary=summary,
        findings=_findings(summary, rows),
        tables=_tables(summary, rows, listed),
        charts=_charts(shards),
        metrics=_metrics(summary),
    )


# --- in the executors --------------------------------------------------------------------------------


def _checked(job: Job, data_dir: str, entries: list[Entry]) -> DataFrame:
    """A row a file. Through an RDD: mapInArrow would want pandas, for nothing."""
    context = job.spark.sparkContext
    tasks = max(1, min(len(entries), context.defaultParallelism * _TASKS_PER_CORE))
    rows = context.parallelize(entries, tasks).mapPartitions(partial(_check, data_dir))
    return job.spark.createDataFrame(rows, _CHECKED)


def _check(data_dir: str, entries: Iterable[Entry]) -> Iterator[tuple[Any, ...]]:
    for entry in entries:
        found = check_file(data_dir, entry)
        yield (
            entry.file,
            entry.kind,
            entry.shard,
            entry.topic,
            found.missing,
            found.bytes,
            found.frames,
            found.records,
            found.deleted,
            found.first_lsn,
            found.last_lsn,
            [(problem.file, problem.offset, problem.text) for problem in found.problems],
        )


# --- what is wrong -----------------------------------------------------------------------------------


def _problems(job: Job, checked: DataFrame, listed: Inventory) -> DataFrame:
    return (
        _in_files(checked)
        .unionByName(_in_the_log(checked, job, listed))
        .unionByName(_overlaps(job, listed))
        .unionByName(_damage(job, listed))
    )


def _confirmed(job: Job, data_dir: str, found: DataFrame) -> DataFrame:
    """What is still wrong if one looks again. A server that is at work lets files go between listing and reading, and
    what is read then does not fit together; damage stays."""
    time.sleep(_PAUSE_S)
    doubtful = {row["file"] for row in found.select("file").distinct().limit(_MOST_DOUBTFUL).collect()}
    listed = inventory.take(data_dir, now_ms=job.now_ms)
    again = [
        entry for entry in listed.entries if entry.kind == "wal" or doubtful & {entry.file, index_path(entry.file)}
    ]
    return found.intersect(_problems(job, _checked(job, data_dir, again), listed))


def _in_files(checked: DataFrame) -> DataFrame:
    each = checked.select("shard", "topic", F.explode("problems").alias("problem"))
    missing = F.lit("this file is missing, though it counts; restore it from a backup")
    gone = checked.filter("missing").select(
        "shard", "topic", "file", F.lit(0).cast("bigint").alias("offset"), missing.alias("text")
    )
    return each.select("shard", "topic", "problem.file", "problem.offset", "problem.text").unionByName(gone)


def _in_the_log(checked: DataFrame, job: Job, listed: Inventory) -> DataFrame:
    """Frames that are in no file: between two files, or at the end, where the snapshot has seen more."""
    logs = checked.filter((F.col("kind") == "wal") & (F.col("frames") > 0))
    order = Over.partitionBy("shard").orderBy("file")  # the names end with the file's number
    before, after = F.lag("last_lsn").over(order), F.lead("first_lsn").over(order)
    covered = job.spark.createDataFrame(list(listed.covered.items()), "shard int, covered bigint")
    seen = logs.withColumn("before", before).withColumn("after", after).join(covered, "shard", "left")
    first, last = F.col("first_lsn"), F.col("last_lsn")
    gap = F.concat(F.lit("begins with frame "), first, F.lit("; the file before ends with "), F.col("before"))
    short = F.concat(F.lit("the log ends with frame "), last, F.lit("; the snapshot has seen "), F.col("covered"))
    begun = F.concat(F.lit("the log begins with frame "), first, F.lit("; the snapshot ends with "), F.col("covered"))
    text = (
        F.when(first != F.col("before") + 1, gap)
        .when(F.col("before").isNull() & (first > F.col("covered") + 1), begun)
        .when(F.col("after").isNull() & (last < F.col("covered")), short)
    )
    return (
        seen.select("shard", "topic", "file", F.lit(0).cast("bigint").alias("offset"), text.alias("text"))
        .filter(F.col("text").isNotNull())
        .select(*_PROBLEM)
    )


def _overlaps(job: Job, listed: Inventory) -> DataFrame:
    """Segments of one topic that hold the same seqs, by what the snapshot says."""
    rows = [
        (f"{entry.topic_id:016x}", entry.shard, entry.topic, entry.file, entry.first_seq, entry.last_seq)
        for entry in listed.entries
        if entry.kind == "segment"
    ]
    segments = job.spark.createDataFrame(rows, _SPAN)
    order = Over.partitionBy("topic_id").orderBy("first_seq")
    seen = segments.withColumn("before", F.lag("last_seq").over(order))
    text = F.concat(
        F.lit("begins with seq "), F.col("first_seq"), F.lit("; the one before ends with "), F.col("before")
    )
    return seen.filter(F.col("first_seq") <= F.col("before")).select(
        "shard", "topic", "file", F.lit(0).cast("bigint").alias("offset"), text.alias("text")
    )


def _damage(job: Job, listed: Inventory) -> DataFrame:
    """Snapshots that can't be read."""
    rows = [(one.shard, None, one.file, 0, one.text.removeprefix(f"{one.file}: ")) for one in listed.damage]
    return job.spark.createDataFrame(rows, "shard int, topic string, file string, offset bigint, text string")


def _shards(checked: DataFrame, problems: DataFrame, listed: Inventory) -> list[dict[str, Any]]:
    sums = checked.groupBy("shard").agg(
        F.count(F.when(~F.col("missing"), 1)).alias("files"),
        F.sum("bytes").alias("bytes"),
        F.sum(F.when(F.col("kind") == "segment", F.col("frames")).otherwise(0)).alias("blocks"),
        F.sum(F.when(F.col("kind") == "wal", F.col("frames")).otherwise(0)).alias("frames"),
        F.sum("records").alias("records"),
        F.sum("deleted").alias("deleted"),
    )
    wrong = problems.groupBy("shard").agg(F.count("*").alias("problems"))
    rows = sums.join(wrong, "shard", "full").na.fill(0).orderBy("shard").collect()  # one a shard
    found = [row.asDict() for row in rows]
    for row in found:
        own = [orphan for orphan in listed.orphans if orphan.shard == row["shard"]]
        row["orphans"] = len(own)
        row["orphan_bytes"] = sum(orphan.bytes for orphan in own)
    return found


# --- how it is shown ---------------------------------------------------------------------------------


def _findings(summary: dict[str, Any], rows: list[dict[str, Any]]) -> list[Finding]:
    found = [Finding("breach", f"{row['file']} at offset {row['offset']}: {row['text']}.") for row in rows[:_TOLD]]
    if summary["problems"] > _TOLD:
        found.append(Finding("breach", f"{summary['problems'] - _TOLD:,} more problems: see the table."))
    read = f"{amounts.several(summary['files'], 'file')}, {units.bytes_text(summary['bytes'])}"
    if not summary["problems"]:
        found.append(Finding("ok", f"Everything checked is whole: {read}."))
    else:
        found.append(Finding("ok", f"Checked: {read}."))
    if summary["orphans"]:
        size = units.bytes_text(summary["orphan_bytes"])
        text = f"{amounts.several(summary['orphans'], 'file')} ({size}) count for nothing; a restart clears them up."
        found.append(Finding("notice", text))
    return found


def _tables(summary: dict[str, Any], rows: list[dict[str, Any]], listed: Inventory) -> list[Table]:
    counts = ("blocks", "frames", "records", "deleted", "problems", "orphans")
    names = ("files", "bytes", *counts)
    tables = [
        Table(
            title="Checked, by shard",
            columns=[
                Column("shard", "number"),
                Column("files", "count"),
                Column("bytes", "bytes"),
                *(Column(name, "count") for name in counts),
            ],
            rows=[(row["shard"], *(row[name] for name in names)) for row in summary["by_shard"]],
            note="Blocks are those of segments, frames those of the log; deleted are records whose flag is set.",
        )
    ]
    if rows:
        tables.append(
            Table(
                title="Problems",
                columns=[
                    Column("shard", "number"),
                    Column("topic"),
                    Column("file"),
                    Column("offset", "number"),
                    Column("what"),
                ],
                rows=[tuple(row[name] if name != "topic" else row[name] or "" for name in _PROBLEM) for row in rows],
                note=f"The first {_TOP} of {summary['problems']:,}." if summary["problems"] > _TOP else "",
            )
        )
    if listed.orphans:
        largest = sorted(listed.orphans, key=lambda orphan: (-orphan.bytes, orphan.file))[:_TOP]
        tables.append(
            Table(
                title="Orphans",
                columns=[
                    Column("shard", "number"),
                    Column("file"),
                    Column("size", "bytes"),
                    Column("last changed", "time"),
                    Column("why"),
                ],
                rows=[(one.shard, one.file, one.bytes, one.modified_ms, one.why) for one in largest],
                note=f"The largest {_TOP} of {len(listed.orphans):,}." if len(listed.orphans) > _TOP else "",
            )
        )
    return tables


def _charts(shards: list[dict[str, Any]]) -> list[Chart]:
    if not shards:
        return []
    points: list[tuple[int | str, float]] = [(f"shard {row['shard']}", float(row["bytes"])) for row in shards]
    charts = [Chart(title="Checked, by shard", shape="bars", series=[Series("bytes", points)], kind="bytes")]
    wrong: list[tuple[int | str, float]] = [(f"shard {row['shard']}", float(row["problems"])) for row in shards]
    if any(count for _, count in wrong):
        charts.append(Chart(title="Problems, by shard", shape="bars", series=[Series("problems", wrong)]))
    return charts


def _metrics(summary: dict[str, Any]) -> list[Metric]:
    found = [
        Metric("integrity_files", "Files that were checked.", summary["files"]),
        Metric("integrity_bytes", "Bytes that were checked.", summary["bytes"]),
    ]
    for row in summary["by_shard"]:
        label = {"shard": str(row["shard"])}
        found += [
            Metric("integrity_problems", "Places that are damaged or do not fit.", row["problems"], label),
            Metric("integrity_orphan_files", "Files that count for nothing.", row["orphans"], label),
            Metric("integrity_orphan_bytes", "What they take on the disk.", row["orphan_bytes"], label),
        ]
    return found
