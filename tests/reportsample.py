"""An outcome with every kind of chart, table, level and failure, and with names that try to break the page."""

from __future__ import annotations

import math

from spark_pipeline.reports.outcome import Breach, Entry, Outcome
from spark_pipeline.reports.report import Chart, Column, Finding, Kind, Metric, Result, Series, Table

NOW_MS = 1_794_863_605_000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
HOURS = [NOW_MS // HOUR_MS * HOUR_MS - HOUR_MS * back for back in range(192, 0, -1)]
DAYS = [NOW_MS // DAY_MS * DAY_MS - DAY_MS * back for back in range(21, 0, -1)]
EVIL = '<script>alert("1")</script>&amp;'
NAMES = [
    "orders",
    "payments.settled",
    "audit:login",
    "sensor.telemetry.building-7.floor-3.temperature-and-humidity",
    "WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW",
    EVIL,
    "電信イベント.注文",
]


def wave(at: int, height: float) -> float:
    return height * (1 + 0.6 * math.sin(at / DAY_MS * 2 * math.pi) + 0.1 * math.sin(at / HOUR_MS))


def charts() -> list[Chart]:
    found = [
        Chart(title="Lines of hours", shape="lines", series=[Series("records", [(at, wave(at, 1e5)) for at in HOURS])]),
        Chart(
            title="Three lines",
            shape="lines",
            kind="ms",
            series=[Series(name, [(at, wave(at, size)) for at in HOURS[-48:]]) for name, size in
                    (("p50", 400), ("p95", 4_000), ("p99", 90_000))],
        ),
        Chart(title="Lines of labels", shape="lines", kind="bytes", series=[Series("p50", _by_name(1e3))]),
        Chart(title="One moment", shape="lines", series=[Series("a", [(DAYS[-1], 5.0)])]),
        Chart(title="Days", shape="bars", series=[Series(name, [(at, wave(at, 9)) for at in DAYS]) for name in "ab"]),
        Chart(title="One day", shape="bars", kind="bytes", series=[Series("a", [(DAYS[-1], 5.0)])]),
        Chart(title="Stacked hours", shape="stacked", kind="bytes",
              series=[Series(name, [(at, wave(at, 1e9)) for at in HOURS[-24:]]) for name in NAMES[:5]]),
        Chart(title="Stacked year", shape="stacked",
              series=[Series("hot", [(NOW_MS // HOUR_MS * HOUR_MS - HOUR_MS * n, 1.0) for n in range(7_200)])]),
        Chart(title="More series than colours", shape="stacked",
              series=[Series(f"topic-{n}", [(at, float(n)) for at in HOURS[-24:]]) for n in range(15)]),
        Chart(title="Bars of names", shape="bars", series=[Series("records", _by_name(3e6))]),
        Chart(title="Grouped bars of names", shape="bars", kind="ms",
              series=[Series(name, _by_name(size)) for name, size in (("p50", 400), ("p95", 4_000), ("p99", 9_000))]),
        Chart(title="Stacked bars of names", shape="stacked", kind="bytes",
              series=[Series(name, _by_name(1e9)) for name in ("live", "deleted", "dead", EVIL)]),
        Chart(title="Up and down", shape="bars", kind="percent",
              series=[Series("change", [(name, (-1) ** n * 37.5 * n) for n, name in enumerate(NAMES)])]),
        Chart(title="Up and down in time", shape="lines", kind="percent",
              series=[Series("change", [(at, 50 * math.sin(n)) for n, at in enumerate(HOURS[-24:])])]),
        Chart(title="Many names", shape="bars", series=[Series("n", [(f"topic-{n}", 99.0 - n) for n in range(60)])]),
        Chart(title="All the same", shape="bars", series=[Series("n", [(name, 0.0) for name in NAMES])]),
        Chart(title="Unknown values", shape="lines", series=[Series("n", [(HOURS[0], math.nan), (HOURS[1], 2.0)])]),
        Chart(title="Nothing", shape="lines", series=[Series("n", [])]),
        Chart(title=f"A title {EVIL}", shape="bars", note=EVIL, series=[Series(EVIL, [(EVIL, 1.0)])]),
    ]  # fmt: skip
    return found


def _by_name(height: float) -> list[tuple[int | str, float]]:
    return [(name, height / (number + 1) ** 1.5) for number, name in enumerate(NAMES)]


def tables() -> list[Table]:
    kinds: list[Kind] = ["text", "count", "bytes", "ms", "time", "percent", "number"]
    rows = [
        (name, 3_000_000 // (n + 1), 2_000_000_000 // (n + 1), 12.5 * n, NOW_MS - n * DAY_MS, 33.3 - n, 1 / (n + 1))
        for n, name in enumerate(NAMES * 3)
    ]
    return [
        Table(title="Everything", columns=[Column(kind, kind) for kind in kinds], rows=rows, note="The first 21."),
        Table(title="Unknown", columns=[Column(kind, kind) for kind in kinds], rows=[(None,) * 7]),
        Table(title="Empty", columns=[Column("topic")], rows=[]),
        Table(
            title="Wide",
            columns=[Column(f"a column with a long name {n}", "count") for n in range(14)],
            rows=[tuple(range(1_000_000, 1_000_014))],
        ),
    ]


def outcome() -> Outcome:
    result = Result(
        summary={"records": 123_456_789, "day_bytes": 2**31, "wait_p95_ms": 8_123.4, "first_ms": NOW_MS - DAY_MS,
                 "change_percent": -12.34, "unknown": None, "deep": {"a": [1]}, "word": EVIL},
        findings=[
            Finding("ok", "All is well."),
            Finding("notice", f"Silent for a day: {EVIL}."),
            Finding("breach", "A block is damaged: topics/00/00000000000000000001.data at offset 4096."),
        ],
        charts=charts(),
        tables=tables(),
        metrics=[
            Metric("traffic_day_records", "Records written in the last 24 hours.", 17),
            Metric("traffic_topic_records", 'Of a "topic",\nwith a \\.', 1.5, {"topic": 'a"b\\c\nd', "by": "x"}),
        ],
    )  # fmt: skip
    return Outcome(
        run="20261116T211325-4f2a",
        version="0.1.0",
        folder="/srv/topics-data",
        now_ms=NOW_MS,
        since_ms=NOW_MS - 8 * DAY_MS,
        seconds=74.2,
        entries=[
            Entry(name="traffic", title="Traffic", question="How much is written?", seconds=12.3, result=result),
            Entry(name="letters", title="Dead letters", question="Which jobs were given up?", seconds=0.2, error=EVIL),
        ],
        breaches=[
            Breach(metric="traffic_day_records", labels={}, value=17.0, limit="max of 5", text=f"It is 17. {EVIL}")
        ],
        notices=[Finding("notice", "A threshold applied to nothing.")],
    )
