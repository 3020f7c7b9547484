"""Amounts in sentences: how many of what. Values by themselves are written by units.py."""

from __future__ import annotations


def several(count: int, noun: str, plural: str | None = None) -> str:
    """`1 record`, `1,234 records`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def compared(percent: float) -> str:
    """`12 % more than`, `3 % less than`, `as many as`."""
    rounded = round(abs(percent))
    if rounded == 0:
        return "as many as"
    return f"{rounded:,} % {'more' if percent > 0 else 'less'} than"


def names(found: list[str], *, most: int = 5, of: int | None = None) -> str:
    """The first few of a list, and how many more there are."""
    shown = found[:most]
    left = (len(found) if of is None else of) - len(shown)
    return ", ".join(shown) + (f" and {left:,} more" if left > 0 else "")
