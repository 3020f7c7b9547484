"""Skew: how evenly the shards carry the load.

A topic belongs to the shard that its name hashes to, so many small topics spread by themselves and one hot topic does
not. `written` is exact, from the seqs: since a run about a week ago, or since the first one.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F

from spark_pipeline.reports import units
from spark_pipeline.reports.report import Chart, Column, Finding, Job, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.heads import growth
from spark_pipeline.reports.subjects.hours import DAY_MS, WEEK_DAYS, day_of

NAME = "skew"
TITLE = "Shard skew"
QUESTION = "Do the shards carry the load evenly, and if not, which topics weigh?"

_HOT = 5  # topics of each shard
_MOST_SHARDS = 64  # that a server may have
_UNEVEN = 1.5  # times the mean: worth a word
_ENOUGH = 1_000  # records: with fewer, skew means nothing
_MEASURES = ("written", "records", "bytes")


def compute(job: Job) -> Result:
    topics = job.view("topics").select(
        "topic", "id", "shard", "internal", "durability", "disk_seq", F.col("count").alias("records"), "bytes"
    )
    grown, since_ms = growth(job, topics, since_ms=job.now_ms - WEEK_DAYS * DAY_MS)
    with kept(grown) as grown:
        job.save("topics", grown.withColumn("date", F.lit(day_of(job.now_ms))))
        shards = _shards(grown, job.view("segments"))
        hot = _hottest(grown)
    skew = {name: _skew([row[name] for row in shards]) for name in _MEASURES}
    summary: dict[str, Any] = {"shards": len(shards)}
    for name in _MEASURES:
        summary[name] = sum(row[name] for row in shards)
        summary |= {f"{name}_{ratio}": value for ratio, value in skew[name].items()}
    summary |= {"written_since_ms": since_ms, "by_shard": shards}
    return Result(
        summary=summary,
        findings=_findings(shards, skew, hot),
        tables=_tables(shards, hot, since_ms),
        charts=_charts(shards, hot),
        metrics=_metrics(shards, skew),
    )


def _shards(topics: DataFrame, files: DataFrame) -> list[dict[str, Any]]:
    load = topics.groupBy("shard").agg(
        F.count(F.when(~F.col("internal"), 1)).alias("topics"),
        *(F.sum(name).alias(name) for name in _MEASURES),
    )
    disk = files.groupBy("shard").agg(
        F.count(F.when(F.col("kind") == "segment", 1)).alias("segments"),
        F.sum(F.when(F.col("kind") == "segment", F.col("file_bytes")).otherwise(0)).alias("segment_bytes"),
        F.sum(F.when(F.col("kind") == "wal", F.col("file_bytes")).otherwise(0)).alias("wal_bytes"),
        F.count(F.when(F.col("kind") == "wal", 1)).alias("wal_files"),
    )
    rows = load.join(disk, "shard", "full").na.fill(0).orderBy("shard").limit(_MOST_SHARDS).collect()
    found = [row.asDict() for row in rows]
    for name in _MEASURES:
        total = sum(row[name] for row in found)
        for row in found:
            row[f"{name}_share"] = 100 * row[name] / total if total else None
    return found


def _hottest(topics: DataFrame) -> list[dict[str, Any]]:
    """The topics of each shard that were written to most."""
    order = Over.partitionBy("shard").orderBy(F.desc("written"), F.desc("bytes"), "topic")
    share = F.col("written") / F.sum("written").over(Over.partitionBy("shard")) * 100
    ranked = topics.withColumn("rank", F.row_number().over(order)).withColumn("share", share)
    chosen = ranked.filter((F.col("rank") <= _HOT) & (F.col("written") > 0)).orderBy("shard", "rank")
    return [row.asDict() for row in chosen.limit(_HOT * _MOST_SHARDS).collect()]


def _skew(values: list[int]) -> dict[str, float | None]:
    """max_mean: the largest against the mean, 1 if all are equal. gini: 0 if all are equal, near 1 if one has all."""
    total = sum(values)
    if not total:
        return {"max_mean": None, "gini": None}
    count = len(values)
    ranked = sum(rank * value for rank, value in enumerate(sorted(values), 1))
    return {
        "max_mean": max(values) * count / total,
        "gini": 2 * ranked / (count * total) - (count + 1) / count,
    }


def _findings(
    shards: list[dict[str, Any]], skew: dict[str, dict[str, float | None]], hot: list[dict[str, Any]]
) -> list[Finding]:
    ratio = skew["written"]["max_mean"]
    if len(shards) < 2:
        return [Finding("ok", "There is no second shard to share with.")]
    if ratio is None or sum(row["written"] for row in shards) < _ENOUGH:
        return [Finding("ok", f"Fewer than {_ENOUGH:,} records were written: too few to speak of skew.")]
    busiest = max(shards, key=lambda row: row["written"])
    text = (
        f"The busiest of {len(shards)} shards, {busiest['shard']}, takes {busiest['written_share']:.0f} % of the writes"
    )
    if ratio < _UNEVEN:
        return [Finding("ok", f"{text}.")]
    first = next(row for row in hot if row["shard"] == busiest["shard"])
    return [
        Finding("notice", f"{text}, {ratio:.1f} times the mean. Its hottest topic is {first['topic']}."),
    ]


def _tables(shards: list[dict[str, Any]], hot: list[dict[str, Any]], since_ms: int | None) -> list[Table]:
    since = "ever" if since_ms is None else f"since {units.time_text(since_ms)}"
    return [
        Table(
            title="Shards",
            columns=[
                Column("shard", "number"),
                Column("topics", "count"),
                Column("written", "count"),
                Column("share", "percent"),
                Column("live records", "count"),
                Column("live", "bytes"),
                Column("share of live", "percent"),
                Column("segments", "count"),
                Column("in segments", "bytes"),
                Column("log", "bytes"),
            ],
            rows=[
                (
                    row["shard"],
                    row["topics"],
                    row["written"],
                    row["written_share"],
                    row["records"],
                    row["bytes"],
                    row["bytes_share"],
                    row["segments"],
                    row["segment_bytes"],
                    row["wal_bytes"],
                )
                for row in shards
            ],
            note=f"Written: records, {since}.",
        ),
        Table(
            title="Hottest topics",
            columns=[
                Column("shard", "number"),
                Column("topic"),
                Column("written", "count"),
                Column("share of its shard", "percent"),
                Column("live", "bytes"),
            ],
            rows=[(row["shard"], row["topic"], row["written"], row["share"], row["bytes"]) for row in hot],
            note=f"{_HOT} of each shard. {amounts.several(len(shards), 'shard')}; written {since}.",
        ),
    ]


def _charts(shards: list[dict[str, Any]], hot: list[dict[str, Any]]) -> list[Chart]:
    def bars(title: str, name: str, kind: Any) -> Chart:
        points: list[tuple[int | str, float]] = [(f"shard {row['shard']}", float(row[name])) for row in shards]
        return Chart(title=title, shape="bars", series=[Series(name, points)], kind=kind)

    if not shards:
        return []
    charts = [bars("Written, by shard", "written", "count"), bars("Live, by shard", "bytes", "bytes")]
    top = sorted(hot, key=lambda row: -row["written"])[:10]
    if top:
        points: list[tuple[int | str, float]] = [(row["topic"], float(row["written"])) for row in top]
        charts.append(Chart(title="Hottest topics, written", shape="bars", series=[Series("records", points)]))
    return charts


def _metrics(shards: list[dict[str, Any]], skew: dict[str, dict[str, float | None]]) -> list[Metric]:
    found = []
    for name, ratios in skew.items():
        of = {"of": name}
        if ratios["max_mean"] is not None and ratios["gini"] is not None:
            text = "The most loaded shard against the mean: 1 is even."
            found.append(Metric("skew_max_mean", text, ratios["max_mean"], of))
            text = "Gini coefficient of the shards' load: 0 is even."
            found.append(Metric("skew_gini", text, ratios["gini"], of))
    for row in shards:
        label = {"shard": str(row["shard"])}
        found.append(Metric("skew_shard_written_records", "Records written, by shard.", row["written"], label))
        found.append(Metric("skew_shard_live_bytes", "What live records count for, by shard.", row["bytes"], label))
        found.append(
            Metric("skew_shard_wal_bytes", "What the log takes on the disk, by shard.", row["wal_bytes"], label)
        )
    return found
