"""How a value of each Kind is written for people, and where the ticks of an axis go. Pure; all times are UTC.

Values are plain numbers: bytes in bytes, ms in milliseconds, percent from 0 to 100, time in epoch milliseconds (or a
datetime). What is unknown is None or NaN and is shown as a dash, never as 0.
"""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from typing import Any

from .report import Kind

UNKNOWN = "–"
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000

_ABSURD = 1e19  # more than 64 bits hold: better wrong in a few letters than wrong all over the page
_SIGN: dict[Kind, str] = {"bytes": " B", "ms": " ms", "percent": " %"}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SPANS = (("d", DAY_MS, "h", HOUR_MS), ("h", HOUR_MS, "m", MINUTE_MS), ("m", MINUTE_MS, "s", SECOND_MS))
_DURATION_STEPS_MS = [
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(step * SECOND_MS for step in (1, 2, 5, 10, 15, 30)),
    *(step * MINUTE_MS for step in (1, 2, 5, 10, 15, 30)),
    *(step * HOUR_MS for step in (1, 2, 3, 6, 12)),
    *(step * DAY_MS for step in (1, 2, 7, 14, 30, 90, 180, 365)),
]
_CLOCK_STEPS_MS = [
    *(step * SECOND_MS for step in (1, 2, 5, 10, 15, 30)),
    *(step * MINUTE_MS for step in (1, 2, 5, 10, 15, 30)),
    *(step * HOUR_MS for step in (1, 2, 3, 6, 12)),
    *(step * DAY_MS for step in (1, 2, 7, 14)),
]


def text(value: Any, kind: Kind) -> str:
    """A value in a table or beside a bar."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return UNKNOWN
    if kind == "time":
        return time_text(value)
    if kind == "text" or isinstance(value, bool | str | bytes) or not isinstance(value, int | float):
        return _plain(value)
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= _ABSURD:
        return f"{value:.3g}{_SIGN.get(kind, '')}"
    if kind == "count":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    if kind == "bytes":
        return bytes_text(value)
    if kind == "ms":
        return duration_text(value)
    if kind == "percent":
        return f"{_digits(value)} %"
    return _digits(value)


def short(value: float, kind: Kind) -> str:
    """A value at a tick: as few letters as tell it from its neighbours."""
    if kind in ("bytes", "ms", "percent", "time"):
        return text(value, kind)
    if abs(value) >= _ABSURD:
        return text(value, kind)
    for size, letter in _LARGE:
        if abs(value) >= size:
            return f"{_trimmed(value / size, 2)}{letter}"
    return _trimmed(value, 6)


def bytes_text(value: float) -> str:
    size, power = abs(value), 0
    while size >= (1024 if power == 0 else 1023.5) and power < len(_BINARY) - 1:  # what would be written as 1024
        size, power = size / 1024, power + 1
    number = f"{size:.0f}" if power == 0 or size >= 100 else _trimmed(size, 1)
    return f"{'-' if value < 0 else ''}{number} {_BINARY[power]}"


def duration_text(ms: float) -> str:
    """One number below a minute, then the two largest units: 850 ms, 12.4 s, 5m 2s, 3d 4h."""
    sign, ms = ("-", -ms) if ms < 0 else ("", ms)
    if ms < 999.5:
        return f"{sign}{_trimmed(ms, 0 if ms >= 10 else 1)} ms"
    if ms < 59_950:
        return f"{sign}{_trimmed(ms / 1_000, 1)} s"
    for unit, size, below, smaller in _SPANS:
        whole = round(ms / smaller)  # in the smaller unit, so that 119.7 s is 2m and not 1m 60s
        ratio = size // smaller
        if whole >= ratio:
            rest = whole % ratio
            return f"{sign}{whole // ratio:,}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{sign}{ms:.0f} ms"


def time_text(value: Any) -> str:
    """2026-11-16 21:13:05"""
    if isinstance(value, datetime):
        when = value if value.tzinfo is None else value.astimezone(UTC)
    elif isinstance(value, date):
        return value.isoformat()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            when = moment(value)
        except OverflowError:
            return _digits(value)
    else:
        return str(value)
    return f"{when:%Y-%m-%d %H:%M:%S}"


def moment(ms: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def epoch_ms(when: datetime) -> int:
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


# --- ticks -------------------------------------------------------------------------------------------


_NOTHING = 1e-12  # a difference that nobody means


def ticks(low: float, high: float, kind: Kind, *, at_most: int = 6) -> list[float]:
    """Round values that cover low..high; the first is not above low, the last not below high."""
    if high - low < _NOTHING:
        high = low + 1
    step = _step((high - low) / max(at_most - 1, 1), kind)
    first = math.floor(low / step)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [number * step for number in range(first, last + 1)]


def _step(least: float, kind: Kind) -> float:
    """The smallest round step that is not below `least`."""
    if kind == "bytes":
        return float(2 ** max(math.ceil(math.log2(least)), 0))
    if kind == "ms":
        for step in _DURATION_STEPS_MS:
            if step >= least:
                return float(step)
        return _decimal_step(least / DAY_MS) * DAY_MS
    return max(_decimal_step(least), 1.0) if kind == "count" else _decimal_step(least)


def _decimal_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return float(next(factor for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)) * power)


def time_ticks(low_ms: float, high_ms: float, *, at_most: int = 8) -> list[tuple[int, str]]:
    """(epoch ms, label) of round moments inside low..high."""
    least = (high_ms - low_ms) / max(at_most, 1)
    step = next((step for step in _CLOCK_STEPS_MS if step >= least), None)
    if step is None:
        return _month_ticks(low_ms, high_ms, at_most=at_most)
    first = math.ceil(low_ms / step) * step
    return [(ms, _tick_label(ms, step)) for ms in range(first, math.floor(high_ms) + 1, step)]


def _tick_label(ms: int, step: int) -> str:
    when = moment(ms)
    if ms % DAY_MS == 0:
        return f"{when.day} {when:%b}"
    return f"{when:%H:%M}" if step >= MINUTE_MS else f"{when:%H:%M:%S}"


def _month_ticks(low_ms: float, high_ms: float, *, at_most: int) -> list[tuple[int, str]]:
    start, end = moment(low_ms), moment(high_ms)
    months = (end.year - start.year) * 12 + end.month - start.month + 1
    every = next((step for step in (1, 2, 3, 6, 12) if months / step <= at_most), None)
    if every is None:
        every = 12 * math.ceil(months / 12 / at_most)
    found = []
    for number in range(start.year * 12 + start.month - 1, end.year * 12 + end.month):
        if number % every:
            continue
        ms = epoch_ms(datetime(number // 12, number % 12 + 1, 1, tzinfo=UTC))
        if low_ms <= ms <= high_ms:
            when = moment(ms)
            found.append((ms, f"{when:%b %Y}" if every >= 12 or when.month == 1 else f"{when:%b}"))
    return found


def span_text(low_ms: float, high_ms: float) -> str:
    """What lies below a time axis: 16 Nov 2026, UTC; 9 – 16 Nov 2026, UTC."""
    start, end = moment(low_ms), moment(high_ms)
    last = f"{end.day} {end:%b %Y}, UTC"
    if start.date() == end.date():
        return last
    if start.year != end.year:
        return f"{start.day} {start:%b %Y} – {last}"
    return f"{start.day} – {last}" if start.month == end.month else f"{start.day} {start:%b} – {last}"


# --- numbers -----------------------------------------------------------------------------------------


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return _digits(value)
    return str(value)


def _digits(value: float) -> str:
    """Three digits that matter, whole where it is large."""
    size = abs(value)
    if size >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return _trimmed(value, 1 if size >= 10 else 2 if size >= 1 else 3)


def _trimmed(value: float, places: int) -> str:
    written = f"{value:,.{places}f}"
    return written.rstrip("0").rstrip(".") if "." in written else written
