"""Rows of copies that a crash left without their bytes: what fills them, whatever pieces the source comes in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.storage.columns import Columns, pack
from topics.walshard.forwards.copies import copy_ids
from topics.walshard.forwards.rebuild import Filled, Rebuild, Unfilled
from topics.walshard.topic.index import Row


def unfilled(first: int, sources: list[tuple[int, int]], at: int) -> Unfilled:
    ids = copy_ids(sources)
    return Unfilled(Row(first, len(ids), 0, 0, 0, None, 0, 0, len(ids)), ids, at)


def body(ids: list[int]) -> bytes:
    return pack([b"%d" % id for id in ids], tags=None, nodes=None, metas=None) if ids else b""


def content(filled: Filled) -> dict[int, int]:
    """By seq: the id whose copy stands there."""
    return {
        filled.row.first + run.begin + index: int(data)
        for run in filled.runs
        for index, data in enumerate(Columns(run.body, count=run.records, ts=0).data())
    }


def test_a_row_waits_until_the_source_was_read_as_far_as_then() -> None:
    rebuild = Rebuild(10, [unfilled(1, [(11, 2)], 12), unfilled(5, [(13, 2)], 16)])
    assert (rebuild.at, rebuild.until, rebuild.first_seq) == (10, 16, 1)
    ids = copy_ids([(11, 3)])
    (first,) = rebuild.take(ids, body(ids), to_seq=13, level=False)
    assert content(first) == {1: ids[0], 2: ids[1]}
    assert (rebuild.at, rebuild.first_seq, rebuild.done) == (13, 5, False)
    more = copy_ids([(14, 1)])
    assert rebuild.take(more, body(more), to_seq=14, level=False) == [], "a record may still come before 16"
    (second,) = rebuild.take([], b"", to_seq=16, level=False)
    assert content(second) == {5: ids[2], 6: more[0]}
    assert rebuild.done


def test_what_the_source_has_no_more_leaves_a_gap() -> None:
    rebuild = Rebuild(0, [unfilled(1, [(1, 5)], 5)])
    ids = copy_ids([(1, 2), (4, 1)])
    (row,) = rebuild.take(ids, body(ids), to_seq=5, level=False)
    assert content(row) == {1: ids[0], 2: ids[1], 4: ids[2]}
    assert [(run.begin, run.records) for run in row.runs] == [(0, 2), (3, 1)]


def test_what_was_not_copied_then_is_no_copy_now() -> None:
    """A client deleted all of a batch of copies, and the log forgot it; its records are still in the source."""
    rebuild = Rebuild(0, [unfilled(3, [(3, 1)], 3)])
    ids = copy_ids([(1, 4)])
    (row,) = rebuild.take(ids, body(ids), to_seq=4, level=False)
    assert content(row) == {3: ids[2]}


def test_a_source_that_ends_early_has_no_more() -> None:
    rebuild = Rebuild(0, [unfilled(1, [(1, 2)], 2), unfilled(3, [(3, 1)], 9)])
    ids = copy_ids([(1, 1)])
    first, second = rebuild.take(ids, body(ids), to_seq=1, level=True)
    assert (content(first), content(second)) == ({1: ids[0]}, {})
    assert rebuild.done


def test_the_copies_of_several_routers() -> None:
    sources = [(7, 1), (7, 1), (8, 1), (8, 1), (8, 1)]
    assert len(set(copy_ids(sources))) == 5
    rebuild = Rebuild(0, [unfilled(1, sources, 8)])
    ids = copy_ids(sources)
    (row,) = rebuild.take(ids, body(ids), to_seq=8, level=False)
    assert list(content(row).values()) == ids


@examples(200)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    copied=st.sets(st.integers(1, 32)),
    lost=st.sets(st.integers(1, 32)),
    cuts=st.sets(st.integers(1, 32)),
)
def test_any_pieces_fill_any_rows(counts: list[int], copied: set[int], lost: set[int], cuts: set[int]) -> None:
    """The source's seqs 1 to 32 were copied in some batches, read again in others, and some are gone by then."""
    expected: dict[int, int] = {}
    rows, at, seq = [], 0, 1
    for count in counts:
        seqs = [source for source in range(at + 1, at + 4 * count + 1) if source in copied][:count]
        at += 4 * count
        if seqs:
            rows.append(unfilled(seq, [(source, 1) for source in seqs], at))
            expected |= {seq + index: source << 16 for index, source in enumerate(seqs) if source not in lost}
            seq += len(seqs)
    if not rows:
        return
    rebuild = Rebuild(0, rows)
    found: dict[int, int] = {}
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), rebuild.until], strict=True):
        ids = [source << 16 for source in range(begin + 1, end + 1) if source in copied and source not in lost]
        for row in rebuild.take(ids, body(ids), to_seq=max(end, begin), level=False):
            found |= content(row)
        if rebuild.done:
            break
    assert rebuild.done
    assert found == expected
