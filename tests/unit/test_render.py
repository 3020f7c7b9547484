from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from model import Record, batch_of, examples

from topics.storage.columns import Columns, coalesce
from topics.walshard.topic.index import Row
from topics.walshard.topic.render import Rendered, default, render

VALUES = st.sampled_from(
    [b"null", b"1.50", b'{"b" : 1,"a":[ ]}', '"é😀"'.encode(), b'"\\u00e9,}"', b'"' + b"x" * 300 + b'"']
)
TEXTS = st.sampled_from([None, "a", "é", 'quo"te', "a,b"])
METAS = st.sampled_from([None, b"{}", b'{"k" : "v"}'])
BATCHES = st.lists(st.builds(Record, data=VALUES, tag=TEXTS, node=TEXTS, meta=METAS), min_size=1, max_size=6)
PLAIN = st.lists(st.builds(Record, data=VALUES), min_size=1, max_size=6)


def row_of(batches: list[list[Record]]) -> tuple[Row, list[Record], list[int]]:
    parts = [Columns(batch_of(batch)[0], count=len(batch), ts=1_000 + at) for at, batch in enumerate(batches)]
    records = [record for batch in batches for record in batch]
    times = [1_000 + at for at, batch in enumerate(batches) for _ in batch]
    body = coalesce(parts)
    row = Row(50, len(records), times[0], times[-1], 0, None, 0, 0, len(records), body)
    return row, records, times


@examples(200)
@given(
    batches=st.lists(st.one_of(BATCHES, PLAIN), min_size=1, max_size=3),
    include_tags=st.booleans(),
    include_meta=st.booleans(),
    include_data=st.booleans(),
)
def test_each_record_as_its_reader_asked_for_it(
    batches: list[list[Record]], include_tags: bool, include_meta: bool, include_data: bool
) -> None:
    row, records, times = row_of(batches)
    pieces = render(row, row.load(), include_tags=include_tags, include_meta=include_meta, include_data=include_data)
    for at, (piece, record, ts) in enumerate(zip(pieces, records, times, strict=True)):
        expected: dict[str, object] = {"$seq": 50 + at, "$ts": ts}
        if record.node is not None:
            expected["$node"] = record.node
        if include_tags and record.tag is not None:
            expected["$tag"] = record.tag
        if include_data:
            expected["data"] = json.loads(record.data)
            assert b'"data":' + record.data in piece
        if include_meta and record.meta is not None:
            expected["meta"] = json.loads(record.meta)
            assert b'"meta":' + record.meta in piece
        assert json.loads(piece) == expected


@examples(100)
@given(batch=st.one_of(BATCHES, PLAIN), data=st.data())
def test_a_rendered_row_is_cut_where_records_end(batch: list[Record], data: st.DataObject) -> None:
    row, _, _ = row_of([batch])
    pieces = render(row, row.load(), include_tags=False, include_meta=True)
    rendered = default(row)
    assert rendered.text == b",".join(pieces)
    assert [rendered.size(index, index + 1) for index in range(len(pieces))] == [len(piece) for piece in pieces]
    start = data.draw(st.integers(0, len(pieces) - 1))
    stop = data.draw(st.integers(start + 1, len(pieces)))
    assert rendered.slice(start, stop) == b",".join(pieces[start:stop])
    assert rendered.weight >= len(rendered.text)


def test_slices_put_together_are_the_whole() -> None:
    rendered = Rendered([b"a", b"bb", b"", b"cccc"])
    for cuts in ((0, 4), (0, 1, 4), (0, 1, 2, 3, 4), (0, 3, 4)):
        assert b",".join(rendered.slice(start, stop) for start, stop in pairwise(cuts)) == rendered.text


def test_how_many_records_fit_is_found_without_a_look_at_each() -> None:
    rendered = Rendered([b"a", b"bb", b"", b"cccc"])
    assert [rendered.size(start, stop) for start, stop in [(0, 1), (0, 4), (1, 3), (3, 4)]] == [1, 7, 2, 4]
    assert [rendered.fitting(0, 4, most) for most in (0, 1, 2, 3, 6, 7, 99)] == [0, 1, 1, 3, 3, 4, 4]
    assert [rendered.fitting(1, 4, most) for most in (0, 1, 2, 6)] == [1, 1, 3, 4]
    assert [rendered.fitting(1, 2, most) for most in (1, 99)] == [1, 2]
