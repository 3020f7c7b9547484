"""How far each topic had been written in earlier runs: what was written since is exact, whatever has been deleted or
evicted meanwhile, because seqs are given out one by one.

A topic that was deleted and made again has another id and begins at 0. After a crash seqs may be skipped, 100,000 at
most, and count as written. An ephemeral topic skips that many at every one and has no records on the disk: nothing is
known about it here, and `written` is 0.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports.report import Job
from spark_pipeline.reports.subjects.hours import day_of


def growth(job: Job, topics: DataFrame, *, since_ms: int) -> tuple[DataFrame, int | None]:
    """`topics` with `written`: the seqs given out since the last run at or before `since_ms`, else since the first run;
    and when that was. None: this is the first run, and `written` is everything."""
    now = topics.select(
        F.lit(day_of(job.now_ms)).alias("date"),
        F.lit(job.run_ms).cast("bigint").alias("at"),
        "id",
        F.col("disk_seq").alias("seq"),
    )
    earlier = job.accumulate("heads", now).filter(F.col("at") < job.run_ms)
    runs = earlier.agg(
        F.max(F.when(F.col("at") <= since_ms, F.col("at"))).alias("before"), F.min("at").alias("first")
    ).first()
    base_ms = None if runs is None else runs["before"] or runs["first"]
    base = earlier.filter(F.col("at") == base_ms).select("id", F.col("seq").alias("base"))
    written = F.greatest(F.lit(0), F.col("disk_seq") - F.coalesce("base", F.lit(0)))
    stored = F.when(F.col("durability") == "ephemeral", F.lit(0)).otherwise(written)
    grown = topics.join(base, "id", "left").withColumn("written", stored.cast("bigint"))
    return grown.drop("base"), base_ms
