"""What of a query's WHERE decides which files and blocks are read: seqs, times, topics and tags.

Spark evaluates every predicate again on what comes, so this only has to be right about what can be left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from spark_pipeline.options import milliseconds

_NO_LIMIT = 2**63 - 1


class Pushed(msgspec.Struct):
    """The bounds that a query's predicates put on its records. A set is None where anything goes."""

    first: int = 1
    last: int = _NO_LIMIT
    start_ms: int | None = None
    end_ms: int | None = None  # not itself
    topics: frozenset[str] | None = None
    tags: frozenset[str] | None = None

    def add(self, predicate: Filter) -> None:
        attribute = getattr(predicate, "attribute", None)
        if attribute is None or len(attribute) != 1:
            return
        column, value = attribute[0], getattr(predicate, "value", None)
        if value is None:
            return
        if column == "offset":
            self._add_seq(predicate, value)
        elif column == "timestamp":
            self._add_time(predicate, value)
        elif column == "topic":
            self.topics = _meet(self.topics, predicate, value)
        elif column == "key":
            self.tags = _meet(self.tags, predicate, value)

    def _add_seq(self, predicate: Filter, value: Any) -> None:
        if isinstance(predicate, EqualTo | EqualNullSafe):
            self._between(value, value)
        elif isinstance(predicate, In):
            known = [seq for seq in value if seq is not None]
            if known:
                self._between(min(known), max(known))
        elif isinstance(predicate, GreaterThan | GreaterThanOrEqual):
            self._between(value + isinstance(predicate, GreaterThan), _NO_LIMIT)
        elif isinstance(predicate, LessThan | LessThanOrEqual):
            self._between(1, value - isinstance(predicate, LessThan))

    def _between(self, first: int, last: int) -> None:
        self.first = max(self.first, first)
        self.last = min(self.last, last)

    def _add_time(self, predicate: Filter, value: Any) -> None:
        """$ts is in whole milliseconds: a bound between two of them is widened to the earlier or the later."""
        if not isinstance(value, datetime) or value.tzinfo is None:
            return  # a time without a zone is one in the session's, which is not known here
        early = milliseconds(value)
        if isinstance(predicate, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual):
            self.start_ms = early if self.start_ms is None else max(self.start_ms, early)
        if isinstance(predicate, EqualTo | EqualNullSafe | LessThan | LessThanOrEqual):
            self.end_ms = early + 1 if self.end_ms is None else min(self.end_ms, early + 1)


def _meet(known: frozenset[str] | None, predicate: Filter, value: Any) -> frozenset[str] | None:
    if isinstance(predicate, EqualTo | EqualNullSafe):
        found = frozenset([value])
    elif isinstance(predicate, In):
        found = frozenset(each for each in value if each is not None)
    else:
        return known
    return found if known is None else known & found


def pushed(predicates: Iterable[Filter]) -> Pushed:
    bounds = Pushed()
    for predicate in predicates:
        bounds.add(predicate)
    return bounds
