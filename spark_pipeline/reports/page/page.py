"""The page of a run: one HTML file that needs nothing else, neither network nor script.

This module says what is shown and how it is written; page.html.j2 where it stands and how it looks. Everything that
comes from records (names of topics, tags, nodes) is escaped by the template.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jinja2
import msgspec
from markupsafe import Markup

from .. import units
from ..outcome import Entry, Outcome
from ..outputs import write_atomically
from ..report import Chart, Finding, Kind, Table
from . import charts

PAGE = "index.html"
MOST_TILES = 12

_CSS: dict[Kind, Literal["right", "time", "left"]] = {"text": "left", "time": "time"}  # numbers stand on the right
_TIMES = ("_ms", "hour", "time", "seen", "first", "last", "at", "when")
_EARLIEST_TIME_MS = 10**11  # as a duration that would be three years


class Cell(msgspec.Struct, frozen=True):
    text: str
    title: str = ""  # the exact value, where the text is rounded
    share: float | None = None  # of the column's largest value, in percent, for the bar behind it


class Head(msgspec.Struct, frozen=True):
    name: str
    css: Literal["right", "time", "left"]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    note: str
    heads: list[Head]
    rows: list[list[Cell]]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    note: str
    legend: list[charts.Legend]
    wide: Markup
    narrow: Markup


class Tile(msgspec.Struct, frozen=True):
    name: str
    text: str


class Section(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    question: str
    level: Literal["ok", "notice", "breach", "failed"]
    error: str | None
    seconds: str
    findings: list[Finding]
    tiles: list[Tile]
    figures: list[Figure]
    grids: list[Grid]


class Headline(msgspec.Struct, frozen=True):
    """A sentence at the top of the page; `section` is where it belongs, "" for the run itself."""

    level: str
    text: str
    section: str
    title: str


def write(out: Path, outcome: Outcome) -> None:
    write_atomically(out / PAGE, render(outcome).encode())


def render(outcome: Outcome) -> str:
    sections = [_section(entry) for entry in outcome.entries]
    headlines = _headlines(outcome, sections)
    level, verdict = _verdict(headlines)
    text: str = _template().render(
        outcome=outcome,
        when=units.time_text(outcome.now_ms),
        since=None if outcome.since_ms is None else units.time_text(outcome.since_ms),
        made=None if outcome.snapshot_ms is None else units.time_text(outcome.snapshot_ms),
        seconds=units.duration_text(outcome.seconds * 1_000),
        level=level,
        verdict=verdict,
        headlines=headlines,
        sections=sections,
    )
    return text


def _template() -> jinja2.Template:
    text = resources.files(__package__).joinpath("page.html.j2").read_text()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def _headlines(outcome: Outcome, sections: list[Section]) -> list[Headline]:
    """What a person should know first, the worst on top."""
    found = [Headline("breach", breach.text, "", "Threshold") for breach in outcome.breaches]
    for section in sections:
        if section.error is not None:
            found.append(Headline("failed", f"This report failed: {section.error}", section.name, section.title))
        found += [
            Headline(finding.level, finding.text, section.name, section.title)
            for finding in section.findings
            if finding.level != "ok"
        ]
    found += [Headline(notice.level, notice.text, "", "Run") for notice in outcome.notices]
    order = {"breach": 0, "failed": 1, "notice": 2, "ok": 3}
    return sorted(found, key=lambda headline: order[headline.level])


def _verdict(headlines: list[Headline]) -> tuple[str, str]:
    counts = {level: sum(headline.level == level for headline in headlines) for level in ("breach", "failed", "notice")}
    words = []
    if number := counts["breach"]:
        words.append(f"{number} {'thing needs' if number == 1 else 'things need'} attention")
    if number := counts["failed"]:
        words.append(f"{number} report{'' if number == 1 else 's'} failed")
    if number := counts["notice"]:
        words.append(f"{number} {'thing' if number == 1 else 'things'} to know")
    if not words:
        return "ok", "Nothing unusual"
    worst = next(level for level in ("breach", "failed", "notice") if counts[level])
    return worst, ", ".join(words)


# --- a report ----------------------------------------------------------------------------------------


def _section(entry: Entry) -> Section:
    result = entry.result
    if result is None:
        level: Literal["ok", "notice", "breach", "failed"] = "failed"
    else:
        levels = {finding.level for finding in result.findings}
        level = "breach" if "breach" in levels else "notice" if "notice" in levels else "ok"
    return Section(
        name=entry.name,
        title=entry.title,
        question=entry.question,
        level=level,
        error=entry.error,
        seconds=units.duration_text(entry.seconds * 1_000),
        findings=[] if result is None else result.findings,
        tiles=[] if result is None else _tiles(result.summary),
        figures=[] if result is None else [figure for chart in result.charts if (figure := _figure(chart))],
        grids=[] if result is None else [_grid(table) for table in result.tables],
    )


def _tiles(summary: dict[str, Any]) -> list[Tile]:
    """The plain numbers of a summary, as far as they are known; what is deeper is in the JSON."""
    found = []
    for name, value in summary.items():
        if isinstance(value, int | float | str):
            found.append(Tile(_words(name), units.text(value, kind_of(name, value))))
    return found[:MOST_TILES]


def _words(name: str) -> str:
    return name.removesuffix("_ms").removesuffix("_percent").replace("_", " ") or name


def kind_of(name: str, value: Any) -> Kind:
    """How a number of a summary is to be read: its name says so, because units come last in names."""
    if isinstance(value, bool | str) or value is None:
        return "text"
    if value >= _EARLIEST_TIME_MS and any(name.endswith(end) or name.startswith(end) for end in _TIMES):
        return "time"
    if name.endswith("_ms"):
        return "ms"
    if name.endswith("bytes"):
        return "bytes"
    if name.endswith("percent"):
        return "percent"
    return "count" if isinstance(value, int) else "number"


def _figure(chart: Chart) -> Figure | None:
    drawn = charts.picture(chart)
    if drawn is None:
        return None
    note = " ".join(part for part in (chart.note, drawn.note) if part)
    return Figure(
        title=chart.title, note=note, legend=drawn.legend, wide=Markup(drawn.wide), narrow=Markup(drawn.narrow)
    )


def _grid(table: Table) -> Grid:
    heads = [Head(column.name, _CSS.get(column.kind, "right")) for column in table.columns]
    measured = next((n for n, column in enumerate(table.columns) if column.kind in ("count", "bytes")), None)
    largest = 0.0
    if measured is not None:
        largest = max((row[measured] or 0 for row in table.rows if _is_number(row[measured])), default=0)
    rows = []
    for row in table.rows:
        cells = []
        for number, (column, value) in enumerate(zip(table.columns, row, strict=True)):
            text = units.text(value, column.kind)
            exact = f"{value:,}" if column.kind in ("bytes", "ms", "number") and _is_number(value) else ""
            share = None
            if number == measured and largest > 0 and _is_number(value) and value > 0:
                share = round(value / largest * 100, 1)
            cells.append(Cell(text, exact if exact != text else "", share))
        rows.append(cells)
    return Grid(title=table.title, note=table.note, heads=heads, rows=rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
