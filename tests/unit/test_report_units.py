"""How values are written, and where ticks go."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_pipeline.reports import units
from spark_pipeline.reports.report import Kind

NOON_MS = 1_794_830_400_000  # 2026-11-16 12:00 UTC
DAY_MS = units.DAY_MS
KINDS: list[Kind] = ["text", "count", "bytes", "ms", "time", "percent", "number"]


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (1_234_567, "count", "1,234,567"),
        (1_060_660.17, "count", "1,060,660.2"),
        (0, "bytes", "0 B"),
        (1_023, "bytes", "1023 B"),
        (1_024, "bytes", "1 KiB"),
        (1_536, "bytes", "1.5 KiB"),
        (2**20 - 1, "bytes", "1 MiB"),
        (-3 * 2**30, "bytes", "-3 GiB"),
        (2**63, "bytes", "8 EiB"),
        (1e52, "bytes", "1e+52 B"),
        (0.25, "ms", "0.2 ms"),
        (850, "ms", "850 ms"),
        (999.6, "ms", "1 s"),
        (12_400, "ms", "12.4 s"),
        (59_990, "ms", "1m"),
        (119_700, "ms", "2m"),
        (302_000, "ms", "5m 2s"),
        (3 * DAY_MS + 4 * units.HOUR_MS, "ms", "3d 4h"),
        (-90_000, "ms", "-1m 30s"),
        (NOON_MS, "time", "2026-11-16 12:00:00"),
        (datetime(2026, 11, 16, 13, tzinfo=timezone(timedelta(hours=1))), "time", "2026-11-16 12:00:00"),
        (datetime(2026, 11, 16, 12, tzinfo=UTC), "time", "2026-11-16 12:00:00"),
        (date(2026, 11, 16), "time", "2026-11-16"),
        ("yesterday", "time", "yesterday"),
        (12.345, "percent", "12.3 %"),
        (-0.5, "percent", "-0.5 %"),
        (0.12345, "number", "0.123"),
        (4_012_345.5, "number", "4,012,346"),
        (math.inf, "number", "∞"),
        (True, "text", "yes"),
        ("plain", "count", "plain"),
        (b"\xff", "text", "\N{REPLACEMENT CHARACTER}"),
        (None, "count", "–"),
        (math.nan, "ms", "–"),
    ],
)
def test_values(value: Any, kind: Kind, text: str) -> None:
    assert units.text(value, kind) == text


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.sampled_from(KINDS))
def test_every_value_can_be_written(value: Any, kind: Kind) -> None:
    assert isinstance(units.text(value, kind), str)


@given(
    st.floats(-1e15, 1e15),
    st.floats(1e-6, 1e15),
    st.sampled_from(["count", "bytes", "ms", "percent", "number"]),
    st.integers(2, 10),
)
def test_ticks_cover_what_they_are_for(low: float, span: float, kind: Kind, at_most: int) -> None:
    high = low + span
    ticks = units.ticks(low, high, kind, at_most=at_most)
    slack = 1e-6 * max(abs(low), abs(high), 1)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert ticks == sorted(ticks)
    assert 2 <= len(ticks) <= at_most + 2


@pytest.mark.parametrize("kind", ["count", "bytes", "ms", "percent", "number"])
@pytest.mark.parametrize("high", [0.0, 5e-324, 4.5e-213, 1e-13, 1e-10])
def test_ticks_of_next_to_nothing(high: float, kind: Kind) -> None:
    ticks = units.ticks(0, high, kind)
    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-9)
    assert len(ticks) > 1


@pytest.mark.parametrize(
    ("high", "kind", "labels"),
    [
        (3, "count", ["0", "1", "2", "3"]),
        (98_765, "count", ["0", "20k", "40k", "60k", "80k", "100k"]),
        (98_765, "bytes", ["0 B", "32 KiB", "64 KiB", "96 KiB", "128 KiB"]),
        (98_765, "ms", ["0 ms", "30 s", "1m", "1m 30s", "2m"]),
        (0.5, "percent", ["0 %", "0.1 %", "0.2 %", "0.3 %", "0.4 %", "0.5 %"]),
    ],
)
def test_ticks_are_round_in_their_unit(high: float, kind: Kind, labels: list[str]) -> None:
    assert [units.short(tick, kind) for tick in units.ticks(0, high, kind)] == labels


@pytest.mark.parametrize(
    ("span_ms", "labels"),
    [
        (40_000, ["11:59:20", "11:59:25", "11:59:30", "11:59:35", "11:59:40", "11:59:45", "11:59:50", "11:59:55",
                  "12:00:00"]),
        (units.HOUR_MS, ["11:00", "11:10", "11:20", "11:30", "11:40", "11:50", "12:00"]),
        (DAY_MS, ["12:00", "15:00", "18:00", "21:00", "16 Nov", "03:00", "06:00", "09:00", "12:00"]),
        (4 * DAY_MS, ["12:00", "13 Nov", "12:00", "14 Nov", "12:00", "15 Nov", "12:00", "16 Nov", "12:00"]),
        (7 * DAY_MS, ["10 Nov", "11 Nov", "12 Nov", "13 Nov", "14 Nov", "15 Nov", "16 Nov"]),
        (200 * DAY_MS, ["May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov"]),
        (900 * DAY_MS, ["Jul", "Jan 2025", "Jul", "Jan 2026", "Jul"]),
        (9_000 * DAY_MS, ["Jan 2004", "Jan 2008", "Jan 2012", "Jan 2016", "Jan 2020", "Jan 2024"]),
    ],
)  # fmt: skip
def test_time_ticks(span_ms: int, labels: list[str]) -> None:
    assert [label for _, label in units.time_ticks(NOON_MS - span_ms, NOON_MS)] == labels


@pytest.mark.parametrize(
    ("back_ms", "text"),
    [
        (units.HOUR_MS, "16 Nov 2026, UTC"),
        (2 * DAY_MS, "14 – 16 Nov 2026, UTC"),
        (30 * DAY_MS, "17 Oct – 16 Nov 2026, UTC"),
        (366 * DAY_MS, "15 Nov 2025 – 16 Nov 2026, UTC"),
    ],
)
def test_spans(back_ms: int, text: str) -> None:
    assert units.span_text(NOON_MS - back_ms, NOON_MS) == text
