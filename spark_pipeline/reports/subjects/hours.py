"""Hours and days as the reports count them: in UTC, whatever the session's time zone is.

A day of a report is the 24 hours that end with the running one, so that it never compares a morning with whole days;
the trailing week is the seven days before that.
"""

from __future__ import annotations

import datetime

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark_pipeline.reports.report import Job

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
WEEK_DAYS = 7


class Window(msgspec.Struct, frozen=True):
    """Each part begins at its `_ms` and ends where the next one begins; the day ends with the running hour."""

    week_ms: int
    day_ms: int
    hour_ms: int  # the running hour

    def hours(self, first_ms: int | None) -> list[int]:
        """Every hour of the week and the day, but not those before the first one known."""
        begin = self.week_ms if first_ms is None else max(self.week_ms, floor_ms(first_ms, HOUR_MS))
        return list(range(begin, self.hour_ms + 1, HOUR_MS))


def window(now_ms: int) -> Window:
    hour = floor_ms(now_ms, HOUR_MS)
    day = hour - DAY_MS + HOUR_MS
    return Window(week_ms=day - WEEK_DAYS * DAY_MS, day_ms=day, hour_ms=hour)


def up_to_now(job: Job, history: DataFrame) -> DataFrame:
    """Of a snapshot: without the days that later runs have seen."""
    return history.filter(F.col("date") <= day_of(job.now_ms)) if job.frozen else history


def floor_ms(ms: int, unit: int) -> int:
    return ms - ms % unit


def day_of(ms: int) -> datetime.date:
    return datetime.datetime.fromtimestamp(ms / 1_000, datetime.UTC).date()


def day_start_ms(day: datetime.date) -> int:
    return int(datetime.datetime(day.year, day.month, day.day, tzinfo=datetime.UTC).timestamp() * 1_000)


def millis(time: str | Column) -> Column:
    return F.unix_millis(time)


def hour_of(time: str | Column) -> Column:
    """The beginning of its hour."""
    ms = millis(time)
    return F.timestamp_millis(ms - F.pmod(ms, F.lit(HOUR_MS)))


def date_of(time: str | Column) -> Column:
    """The UTC date: to_date() would give the session's."""
    return F.date_from_unix_date(F.floor(millis(time) / F.lit(DAY_MS)).cast("int"))
