"""Queues: how long jobs wait, how long workers take, what comes back, and what lies ready now.

A job waits from its own time to its first claim; a worker takes from a claim to the ack of that lease. Each run adds
the events that are new: how many jobs took how many milliseconds, so percentiles over many runs are exact. A claim
whose job is not on the disk any more has no known wait, and an ack whose claim nobody recorded no known service time:
such jobs are counted and not guessed.

Leases that are held when a run ends are kept for the next one, which sees their acks.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports import units
from spark_pipeline.reports.report import Chart, Column, Finding, Job, Metric, Result, Series, Table
from spark_pipeline.reports.subjects import amounts
from spark_pipeline.reports.subjects.cached import kept
from spark_pipeline.reports.subjects.hours import (
    DAY_MS,
    HOUR_MS,
    WEEK_DAYS,
    date_of,
    day_of,
    day_start_ms,
    millis,
    up_to_now,
)

NAME = "queues"
TITLE = "Queues"
QUESTION = "How long do jobs wait and take, how many come back, and is anything left lying?"

_TOP = 20
_DRAWN = 5
_OLD_MS = HOUR_MS  # a ready job older than this is worth a word
_NAMED = 500  # more queues than this are read as part of everything
_LABELLED = 500  # queues with metrics of their own
_PERCENTILES = (0.5, 0.95, 0.99)
_LABELS = ("p50", "p95", "p99")
_TIMES = ("wait", "service")
_COUNTS = ("claimed", "redelivered", "acked", "released", "dead_lettered", "wait_unknown", "service_unknown")
_STATES = ("ready", "in_flight", "delayed")


def compute(job: Job) -> Result:
    topics = job.view("topics").filter((F.col("type") == "queue") & ~F.col("internal")).select("topic")
    queues = [row["topic"] for row in topics.limit(_NAMED + 1).collect()]
    if not queues:
        return Result(summary={"queues": 0}, findings=[Finding("ok", "There are no queues.")])
    with kept(job.fresh("leases")) as events, kept(_jobs(job, queues, topics)) as jobs:
        measures = job.accumulate("measures", _measures(job, events, jobs))
        state = _state(job, topics, jobs)
        with kept(state) as state, kept(_week(job, measures)) as week:
            job.save("state", state.withColumn("date", F.lit(day_of(job.now_ms))))
            job.save("daily", week.groupBy("date", "queue").agg(*_aggregates()))
            rows = _rows(week, state)
            totals = _totals(week, state)
            drawn = [row["queue"] for row in rows[:_TOP] if row["acked"] or row["claimed"]][:_DRAWN]
            by_day = _by_day(week, drawn)
    summary = {"queues": len(queues) if len(queues) <= _NAMED else topics.count(), **totals}
    return Result(
        summary=summary,
        findings=_findings(summary, job.now_ms),
        tables=_tables(rows[:_TOP], summary, job.now_ms),
        charts=_charts(by_day, drawn, rows[:_TOP]),
        metrics=_metrics(summary, rows, job.now_ms),
    )


def _jobs(job: Job, queues: list[str], topics: DataFrame) -> DataFrame:
    """Every job that is on the disk, done or not: queue, seq, posted (ms), deleted."""
    options = {"includeData": "false", "includeDeleted": "true"}
    if len(queues) <= _NAMED:
        options["subscribe"] = ",".join(queues)
    found = job.view("records", **options).join(F.broadcast(topics), "topic", "left_semi")
    return found.select(
        F.col("topic").alias("queue"), F.col("offset").alias("seq"), millis("timestamp").alias("posted"), "deleted"
    )


# --- what happened -----------------------------------------------------------------------------------


def _measures(job: Job, events: DataFrame, jobs: DataFrame) -> DataFrame:
    """date, queue, measure, ms (of times), jobs."""
    lease = ["queue", "seq", "lease"]
    deliveries = F.coalesce("deliveries", F.lit(1))
    claims = events.filter(F.col("event") == "claimed").select(
        *lease, date_of("timestamp").alias("date"), millis("timestamp").alias("claimed"), deliveries.alias("deliveries")
    )
    settled = events.filter(F.col("event").isin("acked", "released", "dead_lettered"))
    held = job.accumulate(
        "held", claims.join(settled.select(*lease), lease, "left_anti").select(*lease, "date", "claimed")
    )
    # What this run found held is among its claims, too. None of it is acked in this run, so no ack meets it twice.
    known = claims.select(*lease, "claimed").unionByName(held.select(*lease, "claimed"))
    acks = events.filter(F.col("event") == "acked").select(
        *lease, date_of("timestamp").alias("date"), millis("timestamp").alias("acked")
    )
    services = acks.join(known, lease, "left").withColumn("ms", F.col("acked") - F.col("claimed"))
    waits = (
        claims.filter(F.col("deliveries") == 1)
        .join(jobs.select("queue", "seq", "posted"), ["queue", "seq"], "left")
        .withColumn("ms", F.col("claimed") - F.col("posted"))
    )
    return _timed(waits, "wait").unionByName(_timed(services, "service")).unionByName(_counted(events))


def _timed(frame: DataFrame, name: str) -> DataFrame:
    ms = F.greatest(F.col("ms"), F.lit(0))  # clocks of two processes may differ by a little
    measure = F.when(F.col("ms").isNull(), f"{name}_unknown").otherwise(name)
    return frame.groupBy("date", "queue", measure.alias("measure"), ms.alias("ms")).agg(F.count("*").alias("jobs"))


def _counted(events: DataFrame) -> DataFrame:
    again = F.when((F.col("event") == "claimed") & (F.coalesce("deliveries", F.lit(1)) > 1), "redelivered")
    because = F.when(F.col("event") == "released", F.concat(F.lit("released:"), F.coalesce("reason", F.lit("?"))))
    names = F.array_compact(F.array(F.col("event"), again, because))
    happened = events.filter(~F.col("event").isin("checkpoint", "extended"))
    return (
        happened.select(date_of("timestamp").alias("date"), "queue", F.explode(names).alias("measure"))
        .groupBy("date", "queue", "measure")
        .agg(F.lit(None).cast("bigint").alias("ms"), F.count("*").alias("jobs"))
    )


def _week(job: Job, measures: DataFrame) -> DataFrame:
    """Of the last seven days, or since --since if that is later; together over all runs."""
    begin = job.now_ms - (WEEK_DAYS - 1) * DAY_MS
    if job.since_ms is not None:
        begin = max(begin, job.since_ms)
    recent = up_to_now(job, measures).filter(F.col("date") >= day_of(begin))
    return recent.groupBy("date", "queue", "measure", "ms").agg(F.sum("jobs").alias("jobs"))


def _aggregates() -> list[Any]:
    """Percentiles of both times and all counts, of any group of measures."""
    found = []
    for name in _TIMES:
        ms = F.when(F.col("measure") == name, F.col("ms"))
        found.append(F.percentile(ms, F.lit(list(_PERCENTILES)), F.col("jobs")).alias(name))
        found.append(_sum_of(name).alias(f"{name}_jobs"))
    found += [_sum_of(name).alias(name) for name in _COUNTS]
    return found


def _sum_of(measure: str) -> Any:
    return F.coalesce(F.sum(F.when(F.col("measure") == measure, F.col("jobs"))), F.lit(0))


# --- what is true now --------------------------------------------------------------------------------


def _state(job: Job, topics: DataFrame, jobs: DataFrame) -> DataFrame:
    """A row a queue: live jobs by what can happen to them, and since when the oldest ready one waits."""
    live = jobs.filter(~F.col("deleted")).join(_leases(job), ["queue", "seq"], "left")
    states = live.withColumn("now", F.coalesce("now", F.lit("ready"))).groupBy("queue")
    counted = states.agg(
        *(F.count(F.when(F.col("now") == name, 1)).alias(name) for name in _STATES),
        F.min(F.when(F.col("now") == "ready", F.col("posted"))).alias("oldest_ready"),
    )
    every = topics.select(F.col("topic").alias("queue"))
    return every.join(counted, "queue", "left").na.fill(0, list(_STATES))


def _leases(job: Job) -> DataFrame:
    """(queue, seq, now) of jobs that the leases log knows, by the rule of docs/FORMAT.md: nothing before the last
    checkpoint counts, and of a job's events those of its last lease."""
    events = job.view("leases")
    checkpoint = F.when(F.col("event") == "checkpoint", F.col("offset"))
    last = events.groupBy("queue").agg(F.max(checkpoint).alias("checkpoint"))
    counting = events.join(F.broadcast(last), "queue").filter(
        F.col("seq").isNotNull() & (F.col("offset") >= F.coalesce("checkpoint", F.lit(0)))
    )
    begins = F.when(F.col("event").isin("claimed", "checkpoint"), F.col("offset"))
    ended = F.struct("event", millis("deadline").alias("deadline"), "state")
    by_lease = counting.groupBy("queue", "seq", "lease").agg(
        F.max(begins).alias("begun"), F.max_by(ended, "offset").alias("last")
    )
    by_job = by_lease.groupBy("queue", "seq").agg(F.max_by("last", F.coalesce("begun", F.lit(-1))).alias("last"))
    later = F.col("last.deadline") > job.now_ms
    event, state = F.col("last.event"), F.col("last.state")
    leased = event.isin("claimed", "extended") | ((event == "checkpoint") & (state == "leased"))
    freed = (event == "released") | ((event == "checkpoint") & (state == "delayed"))
    now = F.when(leased & later, "in_flight").when(freed & later, "delayed").otherwise("ready")
    return by_job.select("queue", "seq", now.alias("now"))


# --- how it is shown ---------------------------------------------------------------------------------


def _rows(week: DataFrame, state: DataFrame) -> list[dict[str, Any]]:
    """The busiest queues, and those with the most to do."""
    counted = week.groupBy("queue").agg(*_aggregates())
    names = [*_COUNTS, *(f"{name}_jobs" for name in _TIMES)]
    joined = state.join(counted, "queue", "left").na.fill(0, names)
    ordered = joined.orderBy(F.desc(F.greatest("claimed", "ready")), "queue").limit(_LABELLED)
    return [_unpacked(row.asDict()) for row in ordered.collect()]


def _unpacked(row: dict[str, Any]) -> dict[str, Any]:
    """With a field for each percentile."""
    found = {}
    for name in _TIMES:
        values = row.pop(name) or [None] * len(_LABELS)
        found.update({f"{name}_{label}_ms": value for label, value in zip(_LABELS, values, strict=True)})
    return {**found, **row}


def _totals(week: DataFrame, state: DataFrame) -> dict[str, Any]:
    happened = week.agg(*_aggregates()).first()
    now = state.agg(
        *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in _STATES),
        F.min(F.when(F.col("oldest_ready").isNotNull(), F.struct("oldest_ready", "queue"))).alias("oldest"),
    ).first()
    assert happened is not None  # both are aggregates of all rows
    assert now is not None
    reasons = (
        week.filter(F.col("measure").startswith("released:"))
        .groupBy(F.substring_index("measure", ":", -1).alias("reason"))
        .agg(F.sum("jobs").alias("jobs"))
        .collect()  # one a reason, of which there are four
    )
    released = {row["reason"]: row["jobs"] for row in sorted(reasons)}
    states = now.asDict()
    oldest = states.pop("oldest")
    return {
        **states,
        "oldest_ready_since_ms": None if oldest is None else oldest["oldest_ready"],
        "oldest_ready_queue": None if oldest is None else oldest["queue"],
        **_unpacked(happened.asDict()),
        "released_by_reason": released,
    }


def _by_day(week: DataFrame, drawn: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Under "" all queues together, then some by name; a row a day, at most seven each."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ["", *drawn]:
        chosen = week.filter(F.col("queue") == name) if name else week
        rows = chosen.groupBy("date").agg(*_aggregates()).orderBy("date").collect()
        found[name] = [{**_unpacked(row.asDict()), "day": day_start_ms(row["date"])} for row in rows]
    return found


def _findings(summary: dict[str, Any], now_ms: int) -> list[Finding]:
    done = amounts.several(summary["acked"], "job")
    found = [Finding("ok", f"{done} done in the last seven days; {summary['ready']:,} ready now.")]
    if summary["wait_p95_ms"] is not None and summary["service_p95_ms"] is not None:
        wait, service = units.duration_text(summary["wait_p95_ms"]), units.duration_text(summary["service_p95_ms"])
        found.append(Finding("ok", f"19 of 20 jobs wait for {wait} at most and take {service} at most."))
    if summary["oldest_ready_since_ms"] is not None and now_ms - summary["oldest_ready_since_ms"] > _OLD_MS:
        age = units.duration_text(now_ms - summary["oldest_ready_since_ms"])
        queue = summary["oldest_ready_queue"]
        found.append(Finding("notice", f"Queue {queue} has a job that has been ready for {age}."))
    if summary["dead_lettered"]:
        dead = amounts.several(summary["dead_lettered"], "job")
        found.append(Finding("notice", f"{dead} went to the dead letters in the last seven days."))
    if summary["wait_unknown"]:
        unknown = amounts.several(summary["wait_unknown"], "job")
        found.append(Finding("ok", f"{unknown} had left the disk before a run could tell how long they had waited."))
    return found


def _tables(rows: list[dict[str, Any]], summary: dict[str, Any], now_ms: int) -> list[Table]:
    note = f"The first {_TOP} of {summary['queues']:,} queues. " if summary["queues"] > _TOP else ""
    times = [f"{name}_{label}_ms" for name in _TIMES for label in _LABELS]
    return [
        Table(
            title="Times, last seven days",
            columns=[
                Column("queue"),
                *(Column(f"{name} {label}", "ms") for name in ("waiting", "service") for label in _LABELS),
                Column("waits not known", "count"),
                Column("services not known", "count"),
            ],
            rows=[
                (row["queue"], *(row[name] for name in times), row["wait_unknown"], row["service_unknown"])
                for row in rows
            ],
            note=note + "Waiting: from a job's own time to its first claim. Service: from a claim to its ack.",
        ),
        Table(
            title="Jobs, last seven days and now",
            columns=[
                Column("queue"),
                *(Column(name.replace("_", " "), "count") for name in _COUNTS[:5]),
                *(Column(name.replace("_", " "), "count") for name in _STATES),
                Column("oldest ready since", "time"),
                Column("that is", "ms"),
            ],
            rows=[
                (
                    row["queue"],
                    *(row[name] for name in _COUNTS[:5]),
                    *(row[name] for name in _STATES),
                    row["oldest_ready"],
                    None if row["oldest_ready"] is None else now_ms - row["oldest_ready"],
                )
                for row in rows
            ],
            note=note + "Redelivered: claims of jobs that had been delivered before.",
        ),
    ]


def _charts(by_day: dict[str, list[dict[str, Any]]], drawn: list[str], rows: list[dict[str, Any]]) -> list[Chart]:
    charts = []
    for name, title in (("wait", "Waiting time p95 by day"), ("service", "Service time p95 by day")):
        series = []
        for queue in drawn:
            known = [row for row in by_day[queue] if row[f"{name}_p95_ms"] is not None]
            points: list[tuple[int | str, float]] = [(row["day"], float(row[f"{name}_p95_ms"])) for row in known]
            if points:
                series.append(Series(queue, points))
        if series:
            charts.append(Chart(title=title, shape="lines", series=series, kind="ms"))
    if by_day[""]:
        series = [
            Series(name.replace("_", " "), [(row["day"], float(row[name])) for row in by_day[""]])
            for name in ("acked", "redelivered", "dead_lettered")
        ]
        charts.append(Chart(title="Jobs by day, all queues", shape="lines", series=series))
    ready: list[tuple[int | str, float]] = [(row["queue"], float(row["ready"])) for row in rows if row["ready"]]
    if ready:
        charts.append(Chart(title="Ready now", shape="bars", series=[Series("jobs", ready[:10])]))
    return charts


def _metrics(summary: dict[str, Any], rows: list[dict[str, Any]], now_ms: int) -> list[Metric]:
    found = [
        Metric("queues_ready_jobs", "Jobs that a claim would get.", summary["ready"]),
        Metric("queues_in_flight_jobs", "Jobs with a lease.", summary["in_flight"]),
        Metric("queues_acked_jobs", "Jobs done in the last seven days.", summary["acked"]),
        Metric("queues_redelivered_jobs", "Deliveries that were not the first, of seven days.", summary["redelivered"]),
        Metric("queues_dead_lettered_jobs", "Jobs given up in the last seven days.", summary["dead_lettered"]),
        Metric(
            "queues_unknown_wait_jobs", "Jobs of seven days whose waiting time is not known.", summary["wait_unknown"]
        ),
    ]
    if summary["oldest_ready_since_ms"] is not None:
        age = (now_ms - summary["oldest_ready_since_ms"]) / 1_000
        found.append(Metric("queues_oldest_ready_seconds", "For how long the oldest ready job has been there.", age))
    for label in _LABELS:
        for row in rows:
            labels = {"queue": row["queue"], "percentile": label}
            if (ms := row[f"wait_{label}_ms"]) is not None:
                text = f"From a job's own time to its first claim, over seven days; the {_LABELLED} busiest queues."
                found.append(Metric("queues_wait_seconds", text, ms / 1_000, labels))
            if (ms := row[f"service_{label}_ms"]) is not None:
                text = f"From a claim to its ack, over seven days; the {_LABELLED} busiest queues."
                found.append(Metric("queues_service_seconds", text, ms / 1_000, labels))
    return found
