"""Producers: who writes how much, who has stopped, and how large records are.

A producer is the `node` that a writer gave; records without one are counted together. Copies that a router made carry
their writer's node and count in their own topic again. Each run adds how many records of which size were new, so
percentiles over many runs are exact.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports import units
from spark_pipeline.reports.report import Chart, Column, Finding, Job, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.hours import DAY_MS, WEEK_DAYS, date_of, day_of, day_start_ms, millis, up_to_now

NAME = "producers"
TITLE = "Producers"
QUESTION = "Who writes how much, who has fallen silent, and how large are the records?"

_TOP = 20
_SILENT = 50
_DRAWN = 5
_DAYS = 30
_PERCENTILES = (0.5, 0.95, 0.99)
_LABELS = ("p50", "p95", "p99")
_NOBODY = "(no node)"


def compute(job: Job) -> Result:
    fresh = job.fresh("records", includeData="false", includeHeaders="true", includeDeleted="true")
    partial = fresh.groupBy("node", date_of("timestamp").alias("date"), "size").agg(
        F.count("*").alias("records"), F.max("timestamp").alias("last_seen")
    )
    history = up_to_now(job, job.accumulate("sizes", partial))
    begin = job.now_ms - _DAYS * DAY_MS if job.since_ms is None else job.since_ms
    recent = history.filter(F.col("date") >= day_of(begin))
    with kept(_merged(recent)) as recent, kept(_by_node(recent)) as nodes:
        job.save("daily", recent.groupBy("node", "date").agg(*_volume()))
        totals = _totals(recent, nodes)
        rows = [_unpacked(row.asDict()) for row in nodes.orderBy(F.desc("bytes"), "node").limit(_TOP).collect()]
        silent_frame = _silent(nodes, job.now_ms)
        silent = [
            _unpacked(row.asDict()) for row in silent_frame.orderBy("last_seen_ms", "node").limit(_SILENT).collect()
        ]
        silent_count = silent_frame.count()
        drawn = [row["node"] for row in rows[:_DRAWN]]
        days = _by_day(recent, drawn, job.now_ms)
    summary = {"silent_nodes": silent_count, **totals, "since_ms": begin}
    return Result(
        summary=summary,
        findings=_findings(summary, silent),
        tables=_tables(summary, rows, silent, job.now_ms),
        charts=_charts(rows, days),
        metrics=_metrics(summary, rows),
    )


def _merged(history: DataFrame) -> DataFrame:
    """The shares of all runs as one."""
    return history.groupBy("node", "date", "size").agg(
        F.sum("records").alias("records"), F.max(millis("last_seen")).alias("last_seen_ms")
    )


def _volume() -> list[Any]:
    return [
        F.coalesce(F.sum("records"), F.lit(0)).alias("records"),
        F.coalesce(F.sum(F.col("size") * F.col("records")), F.lit(0)).cast("bigint").alias("bytes"),
        F.max("last_seen_ms").alias("last_seen_ms"),
        F.max("size").alias("max_bytes"),
        F.percentile(F.col("size"), F.lit(list(_PERCENTILES)), F.col("records")).alias("percentiles"),
    ]


def _by_node(merged: DataFrame) -> DataFrame:
    return merged.groupBy("node").agg(*_volume())


def _silent(nodes: DataFrame, now_ms: int) -> DataFrame:
    """Seen in the trailing week, but not in the last day."""
    last = F.col("last_seen_ms")
    day, week = now_ms - DAY_MS, now_ms - (WEEK_DAYS + 1) * DAY_MS
    return nodes.filter(F.col("node").isNotNull() & (last < day) & (last >= week))


def _totals(recent: DataFrame, nodes: DataFrame) -> dict[str, Any]:
    sizes = recent.agg(*_volume()).first()
    nobody = nodes.agg(
        F.count("node").alias("nodes"),
        F.coalesce(F.sum(F.when(F.col("node").isNull(), F.col("records"))), F.lit(0)).alias("records_without_node"),
    ).first()
    assert sizes is not None  # both are aggregates of all rows
    assert nobody is not None
    return {**nobody.asDict(), **_unpacked(sizes.asDict())}


def _unpacked(row: dict[str, Any]) -> dict[str, Any]:
    found = row.pop("percentiles")
    for label, value in zip(_LABELS, found or [None] * len(_LABELS), strict=True):
        row[f"{label}_bytes"] = value
    return row


def _by_day(merged: DataFrame, drawn: list[str | None], now_ms: int) -> list[tuple[str, dict[int, int]]]:
    """Records by node and day."""
    if not drawn:
        return []
    places = [F.when(F.col("node").eqNullSafe(F.lit(node)), place) for place, node in enumerate(drawn)]
    place = F.coalesce(*places, F.lit(len(drawn)))  # not by what is shown: a node may have the name of others
    rows = merged.groupBy(place.alias("place"), "date").agg(F.sum("records").alias("records")).collect()
    first = min(day_start_ms(row["date"]) for row in rows)
    last = max(day_start_ms(day_of(now_ms)), *(day_start_ms(row["date"]) for row in rows))
    found: dict[int, dict[int, int]] = {}
    for row in rows:
        days = found.setdefault(row["place"], dict.fromkeys(range(first, last + 1, DAY_MS), 0))
        days[day_start_ms(row["date"])] = row["records"]
    names = [*map(_shown, drawn), "others"]
    return [(names[place], found[place]) for place in sorted(found)]


def _shown(node: str | None) -> str:
    return _NOBODY if node is None else node


def _findings(summary: dict[str, Any], silent: list[dict[str, Any]]) -> list[Finding]:
    if not summary["records"]:
        return [Finding("ok", "Nothing was written.")]
    nodes = amounts.several(summary["nodes"], "node")
    found = [
        Finding(
            "ok",
            f"{nodes} wrote {amounts.several(summary['records'] - summary['records_without_node'], 'record')}; "
            f"{summary['records_without_node']:,} came without a node.",
        ),
        Finding(
            "ok",
            f"Half of all records hold {units.bytes_text(summary['p50_bytes'])} of data or less, "
            f"one in a hundred {units.bytes_text(summary['p99_bytes'])} or more; the largest "
            f"{units.bytes_text(summary['max_bytes'])}.",
        ),
    ]
    if silent:
        text = amounts.names([row["node"] for row in silent], of=summary["silent_nodes"])
        found.append(Finding("notice", f"Seen in the week before, but not in the last 24 hours: {text}."))
    return found


def _tables(
    summary: dict[str, Any], rows: list[dict[str, Any]], silent: list[dict[str, Any]], now_ms: int
) -> list[Table]:
    since = units.time_text(day_start_ms(day_of(summary["since_ms"])))
    tables = [
        Table(
            title="Volume by node",
            columns=[
                Column("node"),
                Column("records", "count"),
                Column("data", "bytes"),
                *(Column(f"size {label}", "bytes") for label in _LABELS),
                Column("largest", "bytes"),
                Column("last seen", "time"),
            ],
            rows=[
                (
                    _shown(row["node"]),
                    row["records"],
                    row["bytes"],
                    *(row[f"{label}_bytes"] for label in _LABELS),
                    row["max_bytes"],
                    row["last_seen_ms"],
                )
                for row in rows
            ],
            note=f"Since {since}. "
            + (f"The first {_TOP} of {summary['nodes']:,} nodes. " if summary["nodes"] > _TOP else "")
            + "Copies made by routers count as well.",
        )
    ]
    if silent:
        tables.append(
            Table(
                title="Silent nodes",
                columns=[
                    Column("node"),
                    Column("last seen", "time"),
                    Column("that is", "ms"),
                    Column("records", "count"),
                ],
                rows=[
                    (row["node"], row["last_seen_ms"], now_ms - row["last_seen_ms"], row["records"]) for row in silent
                ],
                note=f"The first {_SILENT} of {summary['silent_nodes']:,}."
                if summary["silent_nodes"] > _SILENT
                else "",
            )
        )
    return tables


def _charts(rows: list[dict[str, Any]], days: list[tuple[str, dict[int, int]]]) -> list[Chart]:
    charts = []
    if days:
        series = [Series(name, [(day, float(count)) for day, count in by.items()]) for name, by in days]
        charts.append(Chart(title="Records by node and day", shape="stacked", series=series))
    if rows:
        charts.append(
            Chart(
                title="Data by node",
                shape="bars",
                series=[Series("data", [(_shown(row["node"]), float(row["bytes"])) for row in rows[:10]])],
                kind="bytes",
            )
        )
    return charts


def _metrics(summary: dict[str, Any], rows: list[dict[str, Any]]) -> list[Metric]:
    found = [
        Metric("producers_nodes", "Nodes that wrote in the last thirty days.", summary["nodes"]),
        Metric("producers_silent_nodes", "Nodes seen in the week before, but not for a day.", summary["silent_nodes"]),
        Metric("producers_records_without_node", "Records without a node.", summary["records_without_node"]),
    ]
    text = "How much data a record holds, by percentile."
    for label in (*_LABELS, "max"):
        if summary[f"{label}_bytes"] is not None:
            found.append(Metric("producers_data_bytes", text, summary[f"{label}_bytes"], {"percentile": label}))
    for row in rows:
        if row["node"] is not None:
            text = f"Data written by a node in the last thirty days; the {_TOP} that wrote most."
            found.append(Metric("producers_node_bytes", text, row["bytes"], {"node": row["node"]}))
    return found
