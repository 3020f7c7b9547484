"""Dead letters: jobs that were given up, by the queue they come from and by their tag.

A dead letter is a record whose meta says so ($dead_letter_from), in whatever topic it is; a copy that a router made of
one is one more. Each run adds those that are new, so letters that were redriven or deleted since stay in the history;
how many are still there is counted in the topics that hold any.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports.report import Chart, Column, Finding, Job, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.hours import DAY_MS, date_of, day_of, day_start_ms, millis, up_to_now

NAME = "letters"
TITLE = "Dead letters"
QUESTION = "Which jobs were given up, from which queues, and are they still waiting for somebody?"

_TOP = 50
_DRAWN = 5
_DAYS = 30
_NAMED = 500  # more topics of dead letters than this are read as part of everything
_MARK = "$dead_letter_"
_KEY = ["source", "topic", "tag"]


def compute(job: Job) -> Result:
    fresh = _letters(job.fresh("records", includeData="false", includeHeaders="true"))
    partial = fresh.groupBy(*_KEY, date_of("timestamp").alias("date")).agg(
        F.count("*").alias("letters"),
        F.min("timestamp").alias("first_seen"),
        F.max("timestamp").alias("last_seen"),
        F.max("deliveries").alias("deliveries"),
    )
    history = up_to_now(job, job.accumulate("letters", partial))
    if job.since_ms is not None:
        history = history.filter(F.col("date") >= day_of(job.since_ms))
    seen = history.groupBy(*_KEY).agg(
        F.sum("letters").alias("letters"),
        F.min(millis("first_seen")).alias("first_seen_ms"),
        F.max(millis("last_seen")).alias("last_seen_ms"),
        F.max("deliveries").alias("deliveries"),
    )
    with kept(seen) as seen:
        joined = _with_present(job, seen)
        with kept(joined) as joined:
            job.save("letters", joined.withColumn("date", F.lit(day_of(job.now_ms))))
            totals = _totals(joined, job.now_ms)
            rows = [row.asDict() for row in joined.orderBy(F.desc("letters"), *_KEY).limit(_TOP).collect()]
            sources = _by_source(joined)
    days = _by_day(history, [row["source"] for row in sources[:_DRAWN]], job.now_ms)
    return Result(
        summary={**totals, "by_source": sources},
        findings=_findings(totals, sources),
        tables=_tables(totals, sources, rows),
        charts=_charts(sources, days),
        metrics=_metrics(totals, sources),
    )


def _letters(records: DataFrame) -> DataFrame:
    """Those among the records that are dead letters: source, topic, tag, timestamp, deliveries."""
    marked = records.filter(F.col("meta").contains(f"{_MARK}from"))
    stamped = marked.select(
        F.get_json_object("meta", f"$['{_MARK}from']").alias("source"),
        "topic",
        F.col("key").alias("tag"),
        "timestamp",
        F.get_json_object("meta", f"$['{_MARK}deliveries']").cast("bigint").alias("deliveries"),
    )
    return stamped.filter(F.col("source").isNotNull())  # the text may stand deeper in somebody's own meta


def _with_present(job: Job, seen: DataFrame) -> DataFrame:
    """`seen` with `present`: how many are there now."""
    holders = seen.select("topic").distinct().join(job.view("topics").select("topic"), "topic", "left_semi")
    names = [row["topic"] for row in holders.limit(_NAMED + 1).collect()]
    if not names:
        return seen.withColumn("present", F.lit(0).cast("bigint"))
    options = {"includeData": "false", "includeHeaders": "true"}
    if len(names) <= _NAMED:
        options["subscribe"] = ",".join(names)
    present = _letters(job.view("records", **options)).groupBy(*_KEY).agg(F.count("*").alias("present"))
    there = present.withColumnRenamed("tag", "present_tag")  # no tag equals no tag
    matches = (
        (seen["source"] == there["source"])
        & (seen["topic"] == there["topic"])
        & seen["tag"].eqNullSafe(there["present_tag"])
    )
    return seen.join(there.drop("date"), matches, "left").select(
        *(seen[name] for name in seen.columns), F.coalesce("present", F.lit(0)).alias("present")
    )


def _totals(joined: DataFrame, now_ms: int) -> dict[str, Any]:
    row = joined.agg(
        F.coalesce(F.sum("letters"), F.lit(0)).alias("letters"),
        F.coalesce(F.sum("present"), F.lit(0)).alias("present"),
        F.count("*").alias("kinds"),
        F.min("first_seen_ms").alias("first_seen_ms"),
        F.max("last_seen_ms").alias("last_seen_ms"),
    ).first()
    assert row is not None  # an aggregate of all rows
    found: dict[str, Any] = row.asDict()
    found["last_age_ms"] = None if found["last_seen_ms"] is None else now_ms - found["last_seen_ms"]
    return found


def _by_source(joined: DataFrame) -> list[dict[str, Any]]:
    by_source = joined.groupBy("source", "topic").agg(
        F.sum("letters").alias("letters"),
        F.sum("present").alias("present"),
        F.min("first_seen_ms").alias("first_seen_ms"),
        F.max("last_seen_ms").alias("last_seen_ms"),
        F.max("deliveries").alias("deliveries"),
    )
    return [row.asDict() for row in by_source.orderBy(F.desc("letters"), "source", "topic").limit(_TOP).collect()]


def _by_day(history: DataFrame, drawn: list[str], now_ms: int) -> dict[str, dict[int, int]]:
    """Letters by source and day; every day of the last thirty on which there was any, and those between."""
    if not drawn:
        return {}
    source = F.when(F.col("source").isin(drawn), F.col("source")).otherwise("others")
    recent = history.filter(F.col("date") > day_of(now_ms - _DAYS * DAY_MS))
    rows = recent.groupBy(source.alias("source"), "date").agg(F.sum("letters").alias("letters")).collect()
    if not rows:
        return {}
    first = min(day_start_ms(row["date"]) for row in rows)
    days = range(first, day_start_ms(day_of(now_ms)) + 1, DAY_MS)
    found: dict[str, dict[int, int]] = {}
    for row in rows:
        found.setdefault(row["source"], dict.fromkeys(days, 0))[day_start_ms(row["date"])] = row["letters"]
    return found


def _findings(totals: dict[str, Any], sources: list[dict[str, Any]]) -> list[Finding]:
    if not totals["letters"]:
        return [Finding("ok", "There are no dead letters.")]
    queues = sorted({row["source"] for row in sources})
    text = f"{amounts.several(totals['letters'], 'dead letter')} so far, of queue {amounts.names(queues)}"
    if len(queues) > 1:
        text = text.replace("of queue ", "of queues ")
    if not totals["present"]:
        return [Finding("ok", f"{text}. None is left.")]
    left = f"{totals['present']:,} of them are still there; topics queue redrive puts them back"
    return [Finding("notice", f"{text}. {left}.")]


def _tables(totals: dict[str, Any], sources: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[Table]:
    counts = [
        Column("letters", "count"),
        Column("still there", "count"),
        Column("most deliveries", "count"),
        Column("first seen", "time"),
        Column("last seen", "time"),
    ]
    names = ("letters", "present", "deliveries", "first_seen_ms", "last_seen_ms")
    return [
        Table(
            title="By queue",
            columns=[Column("queue"), Column("now in topic"), *counts],
            rows=[(row["source"], row["topic"], *(row[name] for name in names)) for row in sources],
            note=f"At most {_TOP}." if len(sources) == _TOP else "",
        ),
        Table(
            title="By queue and tag",
            columns=[Column("queue"), Column("now in topic"), Column("tag"), *counts],
            rows=[(row["source"], row["topic"], row["tag"], *(row[name] for name in names)) for row in rows],
            note=f"The first {_TOP} of {totals['kinds']:,}." if totals["kinds"] > _TOP else "",
        ),
    ]


def _charts(sources: list[dict[str, Any]], days: dict[str, dict[int, int]]) -> list[Chart]:
    charts = []
    if days:
        series = [Series(name, [(day, float(count)) for day, count in days[name].items()]) for name in sorted(days)]
        charts.append(Chart(title="Dead letters by day", shape="stacked", series=series))
    if sources:
        queues: dict[str, list[int]] = {}
        for row in sources:
            sums = queues.setdefault(row["source"], [0, 0])
            sums[0] += row["present"]
            sums[1] += row["letters"] - row["present"]
        top = list(queues.items())[:10]
        charts.append(
            Chart(
                title="Dead letters by queue",
                shape="stacked",
                series=[
                    Series("still there", [(queue, float(counts[0])) for queue, counts in top]),
                    Series("gone since", [(queue, float(counts[1])) for queue, counts in top]),
                ],
            )
        )
    return charts


def _metrics(totals: dict[str, Any], sources: list[dict[str, Any]]) -> list[Metric]:
    found = [
        Metric("letters_seen", "Dead letters that reports have seen.", totals["letters"]),
        Metric("letters_present", "Dead letters that are still there.", totals["present"]),
    ]
    queues: dict[str, int] = {}
    for row in sources:
        queues[row["source"]] = queues.get(row["source"], 0) + row["present"]
    for queue, present in queues.items():
        text = "Dead letters that are still there, by the queue they come from."
        found.append(Metric("letters_queue_present", text, present, {"queue": queue}))
    return found
