"""What a query's WHERE lets the source leave out: never a record that the predicate accepts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

pytest.importorskip("pyspark")

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from spark_pipeline.filters import Pushed, pushed

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COMPARE = {
    EqualTo: lambda mine, other: mine == other,
    EqualNullSafe: lambda mine, other: mine == other,
    GreaterThan: lambda mine, other: mine > other,
    GreaterThanOrEqual: lambda mine, other: mine >= other,
    LessThan: lambda mine, other: mine < other,
    LessThanOrEqual: lambda mine, other: mine <= other,
    In: lambda mine, others: mine in others,
}


def moment(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def admits(bounds: Pushed, *, topic: str, seq: int, ts_ms: int, tag: str | None) -> bool:
    """As readers use it."""
    return (
        bounds.first <= seq <= bounds.last
        and (bounds.start_ms is None or ts_ms >= bounds.start_ms)
        and (bounds.end_ms is None or ts_ms < bounds.end_ms)
        and (bounds.topics is None or topic in bounds.topics)
        and (bounds.tags is None or tag in bounds.tags)
    )


COMPARING = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]
seqs = st.integers(-3, 12)
# A whole millisecond, and a microsecond before and after it. A float of seconds would miss some by one.
times = st.builds(lambda ms, us: ms * 1_000 + us, st.integers(10**9, 2 * 10**12), st.integers(-1, 1))
words = st.sampled_from("abc")
predicates = st.one_of(
    st.builds(lambda kind, value: kind(("offset",), value), st.sampled_from(COMPARING), seqs),
    st.builds(lambda values: In(("offset",), tuple(values)), st.lists(st.none() | seqs, max_size=3)),
    st.builds(lambda kind, us: kind(("timestamp",), moment(us)), st.sampled_from(COMPARING), times),
    st.builds(lambda kind, value: kind(("topic",), value), st.sampled_from(COMPARING), words),
    st.builds(lambda kind, value: kind(("key",), value), st.sampled_from(COMPARING), words),
    st.builds(lambda name, values: In((name,), tuple(values)), st.sampled_from(["topic", "key"]), st.lists(words)),
)


def accepted(predicate: Filter, row: dict[str, object]) -> bool:
    mine = row[predicate.attribute[0]]
    return mine is not None and COMPARE[type(predicate)](mine, predicate.value)  # type: ignore[no-untyped-call]


@given(where=st.lists(predicates, max_size=4), topic=words, seq=st.integers(1, 10), us=times, tag=st.none() | words)
def test_what_the_predicates_accept_is_read(
    where: list[Filter], topic: str, seq: int, us: int, tag: str | None
) -> None:
    ts_ms = us // 1_000
    row = {"topic": topic, "offset": seq, "timestamp": moment(ts_ms * 1_000), "key": tag}
    if all(accepted(predicate, row) for predicate in where):
        assert admits(pushed(where), topic=topic, seq=seq, ts_ms=ts_ms, tag=tag)


@given(kind=st.sampled_from(COMPARING), ms=st.integers(10**9, 2 * 10**12), us=st.integers(-1_500, 1_500))
def test_a_time_is_met_to_the_microsecond(kind: type[Filter], ms: int, us: int) -> None:
    predicate = kind(("timestamp",), moment(ms * 1_000 + us))
    if accepted(predicate, {"timestamp": moment(ms * 1_000)}):
        assert admits(pushed([predicate]), topic="t", seq=1, ts_ms=ms, tag=None)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ([EqualTo(("offset",), 5)], Pushed(first=5, last=5)),
        ([GreaterThan(("offset",), 5), LessThan(("offset",), 9)], Pushed(first=6, last=8)),
        ([In(("offset",), (7, None, 3))], Pushed(first=3, last=7)),
        ([EqualTo(("topic",), "a"), In(("topic",), ("a", "b"))], Pushed(topics=frozenset("a"))),
        ([EqualTo(("topic",), "a"), EqualTo(("topic",), "b")], Pushed(topics=frozenset())),
        ([EqualTo(("key",), "x")], Pushed(tags=frozenset("x"))),
        (
            [EqualTo(("timestamp",), moment(1_794_805_542_231_000))],
            Pushed(start_ms=1794805542231, end_ms=1794805542232),
        ),
        ([LessThanOrEqual(("timestamp",), moment(1_794_805_542_231_500))], Pushed(end_ms=1794805542232)),
        (
            [GreaterThan(("timestamp",), moment(1_000_000).astimezone(timezone(timedelta(hours=9))))],
            Pushed(start_ms=1_000),
        ),
    ],
)
def test_bounds(where: list[Filter], expected: Pushed) -> None:
    assert pushed(where) == expected


@pytest.mark.parametrize(
    "predicate",
    [
        Not(EqualTo(("offset",), 5)),
        IsNull(("key",)),
        IsNotNull(("offset",)),
        EqualNullSafe(("key",), None),
        StringStartsWith(("topic",), "a"),
        GreaterThan(("topic",), "a"),
        EqualTo(("value",), b"x"),
        EqualTo(("nested", "offset"), 5),
        GreaterThan(("timestamp",), datetime(2026, 1, 1)),  # in the session's zone, which nobody knows here
    ],
)
def test_what_can_not_be_used_leaves_everything(predicate: Filter) -> None:
    assert pushed([predicate]) == Pushed()
