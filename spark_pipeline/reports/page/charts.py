"""Charts as inline SVG: pure functions from a Chart to text, with no script and no font of their own.

x is a time if it is an int, otherwise a label. Times run along the bottom. Bars of labels lie on their side, because
names of topics are long. Each chart is drawn twice, for a desk and for a phone. What is left out or joined for want of
room is said in the note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec

from .. import units
from ..report import Chart, Series
from . import canvas
from .canvas import NARROW_PX, WIDE_PX, Axis, Frame

MOST_SERIES = 8  # as many colours as can be told apart
MOST_LABELS = 20  # rows of bars on their side

_ROW_PX, _ROW_GAP_PX = 15, 9
_NAMES_SHARE = 0.38  # of the width, at most, for the names beside bars
_LEAST_BAR_PX = 3
_THICKEST_BAR_PX = 48.0  # a single bar need not fill the chart
_MOST_DOTS = 32  # more of them would hide the line
_LARGEST = 1e300  # that sums and steps of it are still numbers
_MOST_TITLES = 400  # for the pointer; more would only make the page large

# Bars of time are joined to one of these until there is room for each.
_SLOTS_MS = (
    *(step * units.MINUTE_MS for step in (1, 5, 15, 30)),
    *(step * units.HOUR_MS for step in (1, 2, 3, 6, 12)),
    *(step * units.DAY_MS for step in (1, 2, 7, 14, 28, 91, 364, 3_640)),
)


class Legend(msgspec.Struct, frozen=True):
    css: str
    name: str


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    wide: str
    narrow: str
    legend: list[Legend]  # empty for a single series
    note: str


def picture(chart: Chart) -> Picture | None:
    """None if there is nothing to draw."""
    lines, note = _prepared(chart)
    if not lines:
        return None
    wide, said = _draw(chart, lines, WIDE_PX)
    narrow, _ = _draw(chart, lines, NARROW_PX)
    return Picture(
        wide=wide,
        narrow=narrow,
        legend=[Legend(line.css, line.name) for line in lines] if len(lines) > 1 else [],
        note=" ".join(f"{words}." for words in (note, said) if words),
    )


def _draw(chart: Chart, lines: list[_Line], width: int) -> tuple[str, str]:
    """The drawing, and what was done to make it fit."""
    timed = all(isinstance(x, int) for line in lines for x, _ in line.points)
    if chart.shape == "lines":
        return _time_lines(chart, lines, width) if timed else _label_lines(chart, lines, width), ""
    return _time_bars(chart, lines, width) if timed else _label_bars(chart, lines, width)


# --- what is drawn -----------------------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True):
    """A series with its colour."""

    css: str
    name: str
    points: list[tuple[int | str, float]]


def _prepared(chart: Chart) -> tuple[list[_Line], str]:
    """Series with a colour each, without what can't be drawn; and what was left out, in words."""
    found = [_Line("", one.name, list(_drawable(one))) for one in chart.series]
    found = [line for line in found if line.points]
    note = ""
    if len(found) > MOST_SERIES:
        found, note = _largest(found, adds_up=chart.shape != "lines" and _adds_up(chart))
    return [_Line(f"s{number}", line.name, line.points) for number, line in enumerate(found)], note


def _drawable(series: Series) -> Iterator[tuple[int | str, float]]:
    for x, y in series.points:
        if y is not None and abs(y) < _LARGEST:  # no NaN is
            yield x, float(y)


def _adds_up(chart: Chart) -> bool:
    """Two hours' counts make a count; two hours' percentiles don't make a percentile."""
    return chart.kind in ("count", "bytes")


def _largest(lines: list[_Line], *, adds_up: bool) -> tuple[list[_Line], str]:
    ranked = sorted(lines, key=lambda line: -sum(abs(y) for _, y in line.points))
    if not adds_up:
        kept = ranked[:MOST_SERIES]
        return [line for line in lines if line in kept], f"The {MOST_SERIES} largest of {len(lines)}"
    kept, rest = ranked[: MOST_SERIES - 1], ranked[MOST_SERIES - 1 :]
    sums: dict[int | str, float] = {}
    for line in rest:
        for x, y in line.points:
            sums[x] = sums.get(x, 0.0) + y
    others = _Line("", f"{len(rest)} others", list(sums.items()))
    return [*(line for line in lines if line in kept), others], f"The others of {len(lines)} are added up"


def _labels(lines: list[_Line]) -> list[str]:
    return list(dict.fromkeys(str(x) for line in lines for x, _ in line.points))


def _extent(lines: list[_Line], *, stacked: bool) -> tuple[float, float]:
    """The lowest and the highest that is reached, 0 among them."""
    if not stacked:
        values = [y for line in lines for _, y in line.points]
        return min(0.0, *values), max(0.0, *values)
    above: dict[int | str, float] = {}
    below: dict[int | str, float] = {}
    for line in lines:
        for x, y in line.points:
            pile = above if y >= 0 else below
            pile[x] = pile.get(x, 0.0) + y
    return min([0.0, *below.values()]), max([0.0, *above.values()])


def _spoken(chart: Chart, lines: list[_Line], line: _Line, x: int | str, y: float) -> str:
    """What the pointer shows."""
    where = units.time_text(x) + " UTC" if isinstance(x, int) else x
    name = f"{line.name}, " if len(lines) > 1 else ""
    return f"{name}{where}: {units.text(y, chart.kind)}"


# --- lines -------------------------------------------------------------------------------------------


def _time_lines(chart: Chart, lines: list[_Line], width: int) -> str:
    axis = Axis.fitting(*_extent(lines, stacked=False), chart.kind)
    frame = Frame.beside(axis, width)
    xs = [int(x) for line in lines for x, _ in line.points]
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - _usual_slot(low), high + _usual_slot(low)
    lines = [_Line(line.css, line.name, sorted(line.points, key=lambda point: int(point[0]))) for line in lines]
    drawn = _strokes(chart, lines, frame, axis, lambda x: frame.x((int(x) - low) / (high - low)))
    along = canvas.times(frame, low, high, last_ms=high)
    return frame.svg(chart.title, [*canvas.upright(frame, axis), *along, *drawn])


def _label_lines(chart: Chart, lines: list[_Line], width: int) -> str:
    axis = Axis.fitting(*_extent(lines, stacked=False), chart.kind)
    frame = Frame.beside(axis, width)
    labels = _labels(lines)
    order = {label: number for number, label in enumerate(labels)}
    lines = [_Line(line.css, line.name, sorted(line.points, key=lambda point: order[str(point[0])])) for line in lines]

    def place(x: int | str) -> float:
        return frame.x((order[str(x)] + 0.5) / len(labels))

    drawn = _strokes(chart, lines, frame, axis, place)
    return frame.svg(chart.title, [*canvas.upright(frame, axis), *canvas.names(frame, labels, place), *drawn])


def _strokes(
    chart: Chart, lines: list[_Line], frame: Frame, axis: Axis, place: Callable[[int | str], float]
) -> Iterator[str]:
    titled = sum(len(line.points) for line in lines) <= _MOST_TITLES
    for line in lines:
        at = _thinned([(place(x), frame.y(axis.share(y))) for x, y in line.points], frame.inner)
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        if len(lines) == 1 and len(at) > 1:
            floor = frame.y(axis.share(0.0))
            yield f'<path class="area {line.css}" d="M{path}L{at[-1][0]:.1f} {floor:.1f}L{at[0][0]:.1f} {floor:.1f}Z"/>'
        if len(at) > 1:
            yield f'<path class="line {line.css}" d="M{path}"/>'
        dotted = len(line.points) <= _MOST_DOTS
        if titled or dotted:
            css, radius = ("dot", 2.5) if dotted else ("hover", 4)
            for x, y in line.points:
                said = _spoken(chart, lines, line, x, y)
                yield canvas.dot(f"{css} {line.css}", said, x=place(x), y=frame.y(axis.share(y)), radius=radius)


def _thinned(at: list[tuple[float, float]], inner: float) -> list[tuple[float, float]]:
    """At most a high and a low for each pixel: no peak is lost."""
    if len(at) <= 2 * inner:
        return at
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in at:
        columns.setdefault(int(point[0]), []).append(point)
    return [
        end
        for column in columns.values()
        for end in sorted({min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])})
    ]


# --- bars of time ------------------------------------------------------------------------------------


def _time_bars(chart: Chart, lines: list[_Line], width: int) -> tuple[str, str]:
    stacked = chart.shape == "stacked"
    lines, slot_ms, note = _fitted(chart, lines, int((width - 70) / _LEAST_BAR_PX / (1 if stacked else len(lines))))
    axis = Axis.fitting(*_extent(lines, stacked=stacked), chart.kind)
    frame = Frame.beside(axis, width)
    xs = [int(x) for line in lines for x, _ in line.points]
    low, high = min(xs), max(xs) + slot_ms
    slot_px = frame.inner * slot_ms / (high - low)
    body_px = min(slot_px - min(max(slot_px * 0.18, 0.5), 6), _THICKEST_BAR_PX)
    thick = body_px if stacked else body_px / len(lines)
    parts = [*canvas.upright(frame, axis), *canvas.times(frame, low, high, last_ms=high - 1)]
    piles: dict[tuple[int, bool], float] = {}
    for number, line in enumerate(lines):
        for x, y in line.points:
            left = frame.x((int(x) - low) / (high - low)) + (slot_px - body_px) / 2
            start = piles.get((int(x), y < 0), 0.0) if stacked else 0.0
            piles[int(x), y < 0] = start + y
            ends = sorted((frame.y(axis.share(start)), frame.y(axis.share(start + y))))
            parts.append(
                canvas.bar(
                    line.css,
                    _spoken(chart, lines, line, x, y),
                    x=left + (0 if stacked else number * thick),
                    y=ends[0],
                    width=thick,
                    height=ends[1] - ends[0],
                )
            )
    return frame.svg(chart.title, parts), note


def _usual_slot(x: int) -> int:
    """What a time stands for that has no neighbours."""
    return next((slot for slot in (units.DAY_MS, units.HOUR_MS) if x % slot == 0), units.MINUTE_MS)


def _fitted(chart: Chart, lines: list[_Line], room: int) -> tuple[list[_Line], int, str]:
    """The lines, their points joined until no more than `room` slots are needed; and how long a slot is."""
    xs = sorted({int(x) for line in lines for x, _ in line.points})
    slot_ms = min((after - before for before, after in pairwise(xs)), default=_usual_slot(xs[0]))
    if (xs[-1] - xs[0]) // slot_ms < room:
        return lines, slot_ms, ""
    fitting = (slot for slot in _SLOTS_MS if slot > slot_ms and (xs[-1] - xs[0]) // slot + 1 < room)
    slot_ms = next(fitting, xs[-1] - xs[0] + 1)
    found = []
    for line in lines:
        slots: dict[int, list[float]] = {}
        for x, y in line.points:
            slots.setdefault(int(x) // slot_ms * slot_ms, []).append(y)
        joined: list[tuple[int | str, float]] = [
            (x, sum(ys) if _adds_up(chart) else sum(ys) / len(ys)) for x, ys in sorted(slots.items())
        ]
        found.append(_Line(line.css, line.name, joined))
    return found, slot_ms, f"Each bar is {units.duration_text(slot_ms)}"


# --- bars of labels ----------------------------------------------------------------------------------


def _label_bars(chart: Chart, lines: list[_Line], width: int) -> tuple[str, str]:
    """On their side, one row per label, the value at the end of each."""
    stacked = chart.shape == "stacked"
    labels = _labels(lines)
    note = f"The first {MOST_LABELS} of {len(labels)}" if len(labels) > MOST_LABELS else ""
    labels = labels[:MOST_LABELS]
    shown = set(labels)
    lines = [_Line(line.css, line.name, [(x, y) for x, y in line.points if str(x) in shown]) for line in lines]
    lines = [line for line in lines if line.points]
    per_row = 1 if stacked else len(lines)
    thick = _ROW_PX if per_row == 1 else max(_ROW_PX - per_row, 13)  # a value is written beside each
    row_px = thick * per_row + _ROW_GAP_PX
    axis = Axis.fitting(*_extent(lines, stacked=stacked), chart.kind, at_most=6 if width == WIDE_PX else 4)
    ends = _ends(lines, stacked=stacked)
    names_px = min(max(map(canvas.text_px, labels)) + 12, width * _NAMES_SHARE)
    frame = Frame(
        width=width,
        height=row_px * len(labels) + 32,
        left=names_px,
        right=max(canvas.text_px(units.text(value, chart.kind)) for value in ends.values()) + 10,
        top=2,
        bottom=26,
    )
    tops = {label: frame.top + number * row_px + _ROW_GAP_PX / 2 for number, label in enumerate(labels)}
    parts = list(canvas.sideways(frame, axis))
    for label, top in tops.items():
        middle = top + thick * per_row / 2
        parts.append(canvas.text(frame.left - 8, middle + 4, label, "end", room_px=names_px - 10))
    piles: dict[tuple[str, bool], float] = {}
    for number, line in enumerate(lines):
        for x, y in line.points:
            start = piles.get((str(x), y < 0), 0.0) if stacked else 0.0
            piles[str(x), y < 0] = start + y
            left, right = sorted((frame.x(axis.share(start)), frame.x(axis.share(start + y))))
            top = tops[str(x)] + (0 if stacked else number * thick)
            said = _spoken(chart, lines, line, x, y)
            parts.append(canvas.bar(line.css, said, x=left, y=top, width=right - left, height=thick - (per_row > 1)))
    for (label, number), value in ends.items():
        reach = piles.get((label, False), 0.0) if stacked else max(value, 0.0)
        middle = tops[label] + number * thick + thick / 2
        end = frame.x(axis.share(reach)) + 5
        parts.append(canvas.text(end, middle + 4, units.text(value, chart.kind), "start", css="value"))
    return frame.svg(chart.title, parts), note


def _ends(lines: list[_Line], *, stacked: bool) -> dict[tuple[str, int], float]:
    """The numbers at the ends of bars: by label and which bar of its row."""
    found: dict[tuple[str, int], float] = {}
    for number, line in enumerate(lines):
        for x, y in line.points:
            key = (str(x), 0 if stacked else number)
            found[key] = found.get(key, 0.0) + y if stacked else y
    return found
