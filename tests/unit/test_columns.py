"""Batch bodies: what was sent comes back byte for byte, alone and coalesced."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, batch_of, examples

from topics.errors import CorruptData
from topics.storage.columns import Columns, coalesce, pack
from topics.storage.format import RECORD_OVERHEAD

TS = 1_700_000_000_000

# JSON values as clients spell them: what a parser would normalise must come back untouched.
VALUES = st.sampled_from(
    [
        b"null",
        b"0",
        b"-0",
        b"1.50",
        b"1E+2",
        b"123456789012345678901234567890",
        b'""',
        b'"\\u00e9\\/"',
        '"é→😀"'.encode(),
        b'{"b": 1,  "a" :2, "b":3}',
        b"[1,\t[ ],\n{}]",
        b"true",
    ]
)
TEXTS = st.one_of(
    st.none(),
    st.sampled_from(["a", "a:b", "*", "", 'quo"te', "back\\slash", "tab\tline\n", "é", "😀", "null"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
METAS = st.one_of(
    st.none(), st.sampled_from([b"{}", b'{"k": "v"}', b'{"k":1,"k":2 }', b'{"n":null}', b'{ "\\u0041" : [1.0] }'])
)
RECORDS = st.builds(Record, data=VALUES, tag=TEXTS, node=TEXTS, meta=METAS)
BATCHES = st.lists(RECORDS, min_size=1, max_size=6)
PLAIN = st.lists(st.builds(Record, data=VALUES), min_size=1, max_size=6)


def columns_of(records: list[Record], *, ts: int = TS) -> Columns:
    return Columns(batch_of(records)[0], count=len(records), ts=ts)


def check(columns: Columns, records: list[Record], times: list[int]) -> None:
    encode = msgspec.json.encode
    assert columns.data() == [record.data for record in records]
    assert columns.data_text() == [record.data.decode("latin-1") for record in records]
    assert columns.tags() == [record.tag for record in records]
    assert columns.nodes() == [record.node for record in records]
    assert columns.metas() == [record.meta for record in records]
    assert columns.tags_json() == [None if record.tag is None else encode(record.tag) for record in records]
    assert columns.nodes_json() == [None if record.node is None else encode(record.node) for record in records]
    assert list(columns.times()) == times
    assert [ts for many, ts in columns.runs() for _ in range(many)] == times
    assert columns.sizes() == [record.size for record in records]
    assert columns.size == sum(columns.sizes())
    assert columns.has_tags == any(record.tag is not None for record in records)
    assert columns.has_nodes == any(record.node is not None for record in records)
    assert columns.has_metas == any(record.meta is not None for record in records)


@examples(300)
@given(records=st.one_of(BATCHES, PLAIN))
def test_what_was_sent_comes_back(records: list[Record]) -> None:
    check(columns_of(records), records, [TS] * len(records))


@examples(300)
@given(
    batches=st.lists(st.tuples(st.one_of(BATCHES, PLAIN), st.integers(0, 2)), min_size=1, max_size=5), data=st.data()
)
def test_coalescing_joins_batches_and_nothing_else(batches: list[tuple[list[Record], int]], data: Any) -> None:
    ts = TS
    parts, records, times = [], [], []
    for batch, later in batches:
        ts += later
        parts.append(columns_of(batch, ts=ts))
        records += batch
        times += [ts] * len(batch)
    whole = Columns(coalesce(parts), count=len(records), ts=times[0])
    check(whole, records, times)
    # And again: a block may be made of blocks.
    cut = data.draw(st.integers(0, len(parts)))
    halves = [part for part in (parts[:cut], parts[cut:]) if part]
    joined = []
    for half in halves:
        count = sum(part.count for part in half)
        joined.append(Columns(coalesce(half), count=count, ts=half[0].ts))
    again = Columns(coalesce(joined), count=len(records), ts=times[0])
    check(again, records, times)


@examples(50)
@given(records=BATCHES)
def test_one_batch_alone_coalesces_to_itself(records: list[Record]) -> None:
    body = batch_of(records)[0]
    assert coalesce([columns_of(records)]) == body


def test_one_node_for_all_is_stored_once() -> None:
    body = pack([b"1", b"2", b"3"], nodes="worker")
    columns = Columns(body, count=3, ts=TS)
    assert body.count(b"worker") == 1
    assert columns.nodes() == ["worker"] * 3
    assert columns.nodes_json() == [b'"worker"'] * 3
    whole = Columns(coalesce([columns, columns]), count=6, ts=TS)
    assert whole.nodes() == ["worker"] * 6
    other = Columns(pack([b"4"], nodes="other"), count=1, ts=TS)
    assert Columns(coalesce([columns, other]), count=4, ts=TS).nodes() == ["worker"] * 3 + ["other"]
    nobody = Columns(pack([b"4"]), count=1, ts=TS)
    assert Columns(coalesce([columns, nobody]), count=4, ts=TS).nodes() == ["worker"] * 3 + [None]
    assert Columns(coalesce([nobody, columns]), count=4, ts=TS).nodes() == [None] + ["worker"] * 3


def test_neighbours_of_the_same_time_are_one_run() -> None:
    parts = [columns_of([Record(b"1")] * many, ts=ts) for many, ts in ((2, TS), (3, TS), (1, TS + 5), (1, TS + 5))]
    assert Columns(coalesce(parts), count=7, ts=TS).runs() == [(5, TS), (2, TS + 5)]


def test_a_plain_batch_costs_its_values_and_one_header() -> None:
    assert pack([b"1", b"22", b"333"]) == bytes(16) + b"1\x1e22\x1e333"


def test_sizes_count_data_and_meta_and_an_overhead() -> None:
    columns = columns_of([Record(b"12345", tag="long tag that is free", meta=b'{"a":1}'), Record(b"1", node="free")])
    assert columns.sizes() == [5 + 7 + RECORD_OVERHEAD, 1 + RECORD_OVERHEAD]


def test_bodies_may_be_memoryviews() -> None:
    body = batch_of([Record(b"1", tag="x")])[0]
    assert Columns(memoryview(body), count=1, ts=TS).tags() == ["x"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_count_that_does_not_fit_is_corruption(count: int) -> None:
    columns = Columns(pack([b"1", b"2"]), count=count, ts=TS)
    with pytest.raises(CorruptData, match=f"{count} records"):
        columns.data()
    with pytest.raises(CorruptData, match=f"{count} records"):
        columns.data_text()


@pytest.mark.parametrize(
    "body", [b"", bytes(15), struct.pack("<4I", 0, 0, 0, 1), struct.pack("<4I", 2**32 - 1, 0, 0, 0)]
)
def test_columns_longer_than_the_body_are_corruption(body: bytes) -> None:
    with pytest.raises(CorruptData):
        Columns(body, count=1, ts=TS)


def test_columns_that_nobody_can_read_are_corruption() -> None:
    """One that is no JSON, and one that is more deeply nested than a reader can go."""
    deep = b'{"a":' * 2_000 + b"1" + b"}" * 2_000
    for metas in (b"[nonsense]", b"[%b]" % deep):
        columns = Columns(struct.pack("<4I", 0, 0, 0, len(metas)) + metas + b"1", count=1, ts=TS)
        with pytest.raises(CorruptData, match="can't be read"):
            columns.metas()
        with pytest.raises(CorruptData, match="can't be read"):
            columns.sizes()
