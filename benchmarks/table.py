"""The result as people read it: a table in a terminal, Markdown rows elsewhere, JSON in a file.

The tables of docs/BENCHMARKS.md are made of the Markdown rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from benchmarks.figures import Figures, Line
from benchmarks.machine import Machine

COLUMNS = ("work", "ours", "Redis", "ratio", "target", "met", "generator CPU", "server CPU")


class Report(msgspec.Struct, kw_only=True):
    machine: Machine
    seconds: float
    rounds: int
    lines: list[Line]


def amount(value: float, unit: str) -> str:
    if unit.endswith("/s"):
        if value >= 1e6:
            return f"{value / 1e6:.2f} M/s"
        return f"{value / 1e3:.1f} k/s" if value >= 1e3 else f"{value:.0f} /s"
    if unit == "ms":
        return f"{value:.3f} ms"
    if unit == "s":
        return f"{value:.2f} s"
    if unit == "MB":
        return f"{value:.0f} MB"
    if unit == "KB":
        return f"{value:.1f} KB"
    if unit == "times":
        return f"{value:.2f}x"
    return f"{value:.2f} %"


def _figure(figures: Figures | None, unit: str) -> str:
    if figures is None:
        return "–"
    notes = []
    if figures.p50_ms is not None:
        notes.append(f"p50 {figures.p50_ms:.2f}")
    if figures.p99_ms is not None:
        notes.append(f"p99 {figures.p99_ms:.2f}")
    if figures.per_frame is not None:
        notes.append(f"{figures.per_frame:.1f} per frame")
    if figures.sse:
        notes.append(f"SSE {amount(figures.sse, unit)}: {figures.value / figures.sse:.2f}x")
    for each in figures.beside:
        times = "" if each.times is None else f": {each.times:.2f}x"
        notes.append(f"{each.what} {amount(each.value, each.unit)}{times}")
    text = amount(figures.value, unit)
    return f"{text} ({', '.join(notes)})" if notes else text


def _shares(ours: float | None, theirs: float | None) -> str:
    shares = ["–" if share is None else f"{share:.0%}" for share in (ours, theirs)]
    return "–" if shares == ["–", "–"] else " / ".join(shares)


def cells(line: Line) -> list[str]:
    theirs = line.theirs
    unit = line.unit.split()[0] if "x" not in line.target else ""
    target = f"{line.target}x" if line.unit == "times" else f"{line.target} {unit}".strip()
    return [
        line.title,
        _figure(line.ours, line.unit),
        _figure(theirs, line.unit),
        "–" if line.ratio is None else f"{line.ratio:.2f}x",
        target,
        {True: "yes", False: "NO", None: "–"}[line.met],
        _shares(line.ours.generator_cpu, theirs.generator_cpu if theirs else None),
        _shares(line.ours.server_cpu, theirs.server_cpu if theirs else None),
    ]


def drawn(lines: Sequence[Line]) -> Table:
    table = Table(title="topics beside Redis Streams", title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number > 0)
    for line in lines:
        row: list[str | Text] = list(cells(line))
        row[5] = Text(str(row[5]), style={True: "green", False: "bold red", None: "dim"}[line.met])
        table.add_row(*row)
    return table


def markdown(lines: Sequence[Line]) -> str:
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(cells(line) for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def as_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
