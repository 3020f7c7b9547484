"""How the jobs of one pass are divided between those who ask. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def in_order(available: int, wanted: Sequence[int]) -> list[int]:
    """Whoever came first takes what it wants."""
    shares = []
    for want in wanted:
        share = min(want, available)
        available -= share
        shares.append(share)
    return shares


def evenly(available: int, wanted: Sequence[int], *, turn: int) -> list[int]:
    """In proportion to what each wants; what does not divide goes one by one to those from `turn` on, so that a caller
    who counts the turns up serves everybody alike."""
    total = sum(wanted)
    if available >= total:
        return list(wanted)
    shares = [available * want // total for want in wanted]
    left = available - sum(shares)
    at = turn
    while left:  # fewer than there are claimers
        index = at % len(shares)
        if shares[index] < wanted[index]:
            shares[index] += 1
            left -= 1
        at += 1
    return shares


def remainder(available: int, wanted: Sequence[int]) -> int:
    """How many turns `evenly` takes."""
    total = sum(wanted)
    return 0 if available >= total else available - sum(available * want // total for want in wanted)
