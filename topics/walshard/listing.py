"""The names of a shard's topics in order, so that a page of them costs as much as it shows, however many there are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator


class Listing:
    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        insort(self._names, name)

    def remove(self, name: str) -> None:
        at = bisect_left(self._names, name)
        if at < len(self._names) and self._names[at] == name:
            del self._names[at]

    def page(self, *, after: str, prefix: str, allowed: tuple[str, ...], limit: int) -> list[str]:
        """The next names behind `after` with this prefix and one of the allowed ones; none allowed: all are."""
        found: list[str] = []
        names = self._names
        for start in _starts(prefix, allowed or ("",)):
            at = max(bisect_right(names, after), bisect_left(names, start))
            while at < len(names) and len(found) < limit and names[at].startswith(start):
                found.append(names[at])
                at += 1
        return found


def _starts(prefix: str, allowed: tuple[str, ...]) -> Iterator[str]:
    """What names must begin with, in order, and none of them twice."""
    last: str | None = None
    for start in sorted(
        {max(prefix, one, key=len) for one in allowed if one.startswith(prefix) or prefix.startswith(one)}
    ):
        if last is None or not start.startswith(last):
            last = start
            yield start
