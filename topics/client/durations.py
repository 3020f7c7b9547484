"""Durations as people write them: 30s, 10m, 2h, 1d. Pure."""

from __future__ import annotations

import re

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART = r"(\d+(?:\.\d+)?)(ms|[smhdw])"
_WHOLE = re.compile(rf"(?:{_PART})+", re.ASCII)
_EACH = re.compile(_PART, re.ASCII)


def parse_ms(text: str) -> int:
    """Milliseconds. A number needs its unit; parts may follow one another, as in 1h30m. Raises ValueError."""
    compact = text.strip().replace(" ", "")
    if _WHOLE.fullmatch(compact) is None:
        raise ValueError(f"{text!r} is no duration: write 30s, 10m, 2h, 1d or 1h30m")
    return round(sum(float(number) * _UNITS_MS[unit] for number, unit in _EACH.findall(compact)))
