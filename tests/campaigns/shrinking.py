"""A list made shorter as long as something remains true of it: delta debugging with a bounded number of tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[list[T]], bool], *, tries: int) -> tuple[list[T], int]:
    """The shortest list found that still fails, and how many tries it took. `fails` is asked about shorter lists: first
    without a half of the items, then without a quarter, and so on, from the end on: what comes last is needed least."""
    left = list(items)
    used = 0
    parts = 2
    while len(left) > 1 and used < tries:
        size = max(1, -(-len(left) // parts))
        for start in reversed(range(0, len(left), size)):
            shorter = left[:start] + left[start + size :]
            if not shorter or used >= tries:
                continue
            used += 1
            if fails(shorter):
                left = shorter
                parts = max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), parts * 2)
    return left, used
