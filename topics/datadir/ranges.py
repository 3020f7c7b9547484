"""Ranges of seqs, first and last included: what is there, what is missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]
Ranges = list[Range]


def joined(ranges: Iterable[Range]) -> Ranges:
    """Ascending, without empty ones, neighbours made one."""
    found: Ranges = []
    for first, last in sorted(ranges):
        if first > last:
            continue
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def minus(ranges: Iterable[Range], gone: Iterable[Range]) -> Ranges:
    """What of the one is not in the other."""
    rest: Ranges = []
    taken = joined(gone)
    at = 0
    for first, last in joined(ranges):
        while at and taken[at - 1][1] >= first:
            at -= 1
        while at < len(taken) and taken[at][1] < first:
            at += 1
        here = at
        while here < len(taken) and taken[here][0] <= last:
            if taken[here][0] > first:
                rest.append((first, taken[here][0] - 1))
            first = taken[here][1] + 1
            here += 1
        if first <= last:
            rest.append((first, last))
    return rest


def both(one: Iterable[Range], other: Iterable[Range]) -> Ranges:
    """What is in both."""
    whole = joined(one)
    return minus(whole, minus(whole, other))


def total(ranges: Iterable[Range]) -> int:
    return sum(last - first + 1 for first, last in ranges)
