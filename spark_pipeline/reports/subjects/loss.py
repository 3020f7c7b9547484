"""Loss: what readers can't have any more against their will, and whether the books balance.

Every seq up to a topic's head is a live record, or was deleted by a client, evicted by a cap, expired, lost with a
process or the power, stands for what a router's source had lost, or was skipped: the server went on above it after a
crash. What is left over has no explanation.

One thing is in nobody's books: seqs that are in memory only. Those of an ephemeral topic are on no disk, and copies
that a router has just made are in memory for some seconds. So for ephemeral topics, and as far as a destination's seqs
are unsettled, a rest is called uncounted and not unexplained.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports.report import Chart, Column, Finding, Job, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.hours import day_of

NAME = "loss"
TITLE = "Loss and retention"
QUESTION = "What is gone, why, and does every record that was ever written have an explanation?"

_TOP = 20
_RANGES = 50
_WENT = ("deleted", "evicted", "expired", "lost", "trimmed", "skipped")
_REASONS = ("cap", "ttl", "mixed", "lost", "source_trim")


def compute(job: Job) -> Result:
    today = F.lit(day_of(job.now_ms))
    audit = _audited(job.view("topics")).withColumn("date", today)
    ranges = job.view("tombstones").withColumn("date", today)
    with kept(audit) as audit, kept(ranges) as ranges:
        job.save("audit", audit)
        job.save("tombstones", ranges)
        totals = _totals(audit)
        reasons = _reasons(ranges)
        off = _rows(audit.filter(F.col("unexplained") != 0).orderBy(F.desc(F.abs("unexplained")), "topic"), _RANGES)
        most = F.col("evicted") + F.col("expired") + F.col("lost") + F.col("trimmed")
        worst = _rows(audit.filter(most > 0).orderBy(F.desc(most), "topic"), _TOP)
        longest = _rows(ranges.orderBy(F.desc("missed"), "topic", "gap_from"), _RANGES)
    summary = {**totals, "ranges": sum(row["ranges"] for row in reasons), "by_reason": reasons}
    return Result(
        summary=summary,
        findings=_findings(summary, off),
        tables=_tables(summary, off, worst, longest),
        charts=_charts(reasons, worst),
        metrics=_metrics(summary),
    )


def _rest() -> Any:
    """Of the seqs given out, those that nothing accounts for."""
    rest = F.col("head_seq") - F.col("count")
    for name in _WENT:
        rest = rest - F.col(name)
    return rest


def _audited(topics: DataFrame) -> DataFrame:
    ephemeral = F.col("durability") == "ephemeral"
    rest = _rest()
    bound = F.when(ephemeral, rest).otherwise(F.col("unsettled"))
    uncounted = F.greatest(F.lit(0), F.least(rest, bound))
    return topics.select(
        "topic",
        "shard",
        "internal",
        "durability",
        F.col("head_seq").alias("assigned"),
        F.col("count").alias("live"),
        *_WENT,
        uncounted.alias("uncounted"),
        (rest - uncounted).alias("unexplained"),
    )


def _rows(frame: DataFrame, most: int) -> list[dict[str, Any]]:
    return [row.asDict() for row in frame.limit(most).collect()]


def _totals(audit: DataFrame) -> dict[str, Any]:
    names = ("assigned", "live", *_WENT, "uncounted")
    row = audit.agg(
        F.count("*").alias("topics"),
        F.count(F.when(F.col("unexplained") != 0, 1)).alias("topics_off"),
        F.coalesce(F.sum(F.abs("unexplained")), F.lit(0)).alias("unexplained"),
        *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in names),
    ).first()
    assert row is not None  # an aggregate of all rows
    found: dict[str, Any] = row.asDict()
    return found


def _reasons(ranges: DataFrame) -> list[dict[str, Any]]:
    rows = ranges.groupBy("reason").agg(F.count("*").alias("ranges"), F.sum("missed").alias("missed")).collect()
    by_reason = {row["reason"]: row.asDict() for row in rows}
    known = [by_reason[reason] for reason in _REASONS if reason in by_reason]
    return known + [row for reason, row in sorted(by_reason.items()) if reason not in _REASONS]


def _findings(summary: dict[str, Any], off: list[dict[str, Any]]) -> list[Finding]:
    found = []
    for row in off[:5]:
        count = row["unexplained"]
        what = (
            f"{amounts.several(count, 'seq')} of topic {row['topic']} {'has' if count == 1 else 'have'} no explanation"
            if count > 0
            else f"Topic {row['topic']} accounts for {amounts.several(-count, 'seq')} more than were given out"
        )
        found.append(Finding("breach", f"{what}."))
    if len(off) > 5:
        found.append(Finding("breach", f"The books of {summary['topics_off']:,} topics do not balance."))
    if not off:
        text = f"The books of {amounts.several(summary['topics'], 'topic')} balance"
        found.append(Finding("ok", f"{text}: {amounts.several(summary['assigned'], 'seq')} given out."))
    if summary["lost"]:
        gone = amounts.several(summary["lost"], "record")
        found.append(Finding("notice", f"{gone} went with a process or the power: they had been in memory only."))
    if summary["trimmed"]:
        gone = amounts.several(summary["trimmed"], "record")
        found.append(Finding("notice", f"{gone} could not be copied by routers: their sources had lost them before."))
    if summary["skipped"]:
        seqs = amounts.several(summary["skipped"], "seq")
        text = f"{seqs} {'was' if summary['skipped'] == 1 else 'were'} skipped by a crash: no record had or will have "
        found.append(Finding("ok", f"{text}{'it' if summary['skipped'] == 1 else 'them'}."))
    if summary["evicted"] or summary["expired"]:
        text = f"Caps have taken {amounts.several(summary['evicted'], 'record')}, TTLs {summary['expired']:,}."
        found.append(Finding("ok", text))
    return found


def _tables(
    summary: dict[str, Any],
    off: list[dict[str, Any]],
    worst: list[dict[str, Any]],
    longest: list[dict[str, Any]],
) -> list[Table]:
    columns = ["assigned", "live", *_WENT, "uncounted", "unexplained"]
    books = [Column("topic"), *(Column(name, "count") for name in columns)]
    tables = []
    if off:
        tables.append(
            Table(
                title="Topics whose books do not balance",
                columns=books,
                rows=[(row["topic"], *(row[name] for name in columns)) for row in off],
                note=f"The first {_RANGES} of {summary['topics_off']:,}." if summary["topics_off"] > _RANGES else "",
            )
        )
    tables.append(
        Table(
            title="Topics that lost most to caps, TTLs and accidents",
            columns=books,
            rows=[(row["topic"], *(row[name] for name in columns)) for row in worst],
            note=f"At most {_TOP}. Assigned is every seq up to the head. Skipped: passed over after a crash, without a "
            "record. Uncounted: in memory only; on no disk.",
        )
    )
    tables.append(
        Table(
            title="Tombstones",
            columns=[
                Column("topic"),
                Column("reason"),
                Column("from seq", "number"),
                Column("to seq", "number"),
                Column("records missed", "count"),
            ],
            rows=[(row["topic"], row["reason"], row["gap_from"], row["gap_to"], row["missed"]) for row in longest],
            note=f"The largest {_RANGES} of {summary['ranges']:,} ranges." if summary["ranges"] > _RANGES else "",
        )
    )
    return tables


def _charts(reasons: list[dict[str, Any]], worst: list[dict[str, Any]]) -> list[Chart]:
    charts = []
    if reasons:
        points: list[tuple[int | str, float]] = [(row["reason"], float(row["missed"])) for row in reasons]
        charts.append(Chart(title="Records missed, by reason", shape="bars", series=[Series("records", points)]))
    if worst:
        series = [
            Series(name, [(row["topic"], float(row[name])) for row in worst[:10]])
            for name in ("evicted", "expired", "lost", "trimmed")
            if any(row[name] for row in worst[:10])
        ]
        charts.append(Chart(title="Where records went, by topic", shape="stacked", series=series))
    return charts


def _metrics(summary: dict[str, Any]) -> list[Metric]:
    found = [
        Metric("loss_unexplained_seqs", "Seqs that no live or removed record accounts for.", summary["unexplained"]),
        Metric("loss_unbalanced_topics", "Topics whose books do not balance.", summary["topics_off"]),
        Metric("loss_uncounted_seqs", "Seqs that were in memory only and are on no disk.", summary["uncounted"]),
    ]
    for name in _WENT:
        text = "Records that left their topics, ever, by what took them; of topics that exist."
        found.append(Metric("loss_records", text, summary[name], {"by": name}))
    for row in summary["by_reason"]:
        text = "Records in the tombstones that readers get, by reason."
        found.append(Metric("loss_tombstone_records", text, row["missed"], {"reason": row["reason"]}))
    return found
