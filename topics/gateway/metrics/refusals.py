"""What a gateway has refused because one of its budgets was used up, counted by budget in the words of its row.

A budget is called as the answer names it (`detail.limit`). A request counts when it is refused, a connection when it
finds no place, whatever becomes of it as a guest. Rare enough that each is written at once: who was refused finds it in
the next scrape.

Crash: the counts are kept in the row, and the next process of this name goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics.shm.counters import Row, Word

WORDS: Final = {
    "max_buffered_bytes": Word.REFUSED_BUFFERED_BYTES,
    "max_connections": Word.REFUSED_CONNECTIONS,
    "max_connections_per_peer": Word.REFUSED_CONNECTIONS_PER_PEER,
    "open_files": Word.REFUSED_OPEN_FILES,
    "max_inflight_per_key": Word.REFUSED_INFLIGHT_PER_KEY,
    "scrapes": Word.REFUSED_SCRAPES,
}
Refused = Callable[[str], None]  # is told the name of the budget


def uncounted(budget: str) -> None:
    """Where nobody counts."""


class Refusals:
    def __init__(self, row: Row) -> None:
        self._row: Row | None = row

    def count(self, budget: str) -> None:
        if self._row is not None:
            self._row.add(WORDS[budget])

    def forget(self) -> None:
        """The row belongs to another process now."""
        self._row = None
