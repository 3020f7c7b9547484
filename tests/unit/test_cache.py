from __future__ import annotations

from model import Record, batch_of

from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.index import Row


class Source:
    """A file that counts how often it is read."""

    def __init__(self) -> None:
        self.bodies: dict[int, bytes] = {}
        self.reads = 0

    def read_body(self, row: Row) -> bytes:
        self.reads += 1
        return self.bodies[row.first]

    def release(self, row: Row) -> None:
        raise AssertionError("nobody asked for that")

    def row(self, first: int, size: int = 100) -> Row:
        body, accounted = batch_of([Record(b'"' + b"x" * size + b'"')])
        self.bodies[first] = body
        return Row(first, 1, 0, 0, accounted, self, 0, 0, 1)


def test_a_body_is_read_once_while_it_is_kept() -> None:
    source, cache = Source(), BatchCache(most_bytes=10_000)
    row = source.row(1)
    assert cache.body(row) == cache.body(row) == source.bodies[1]
    assert source.reads == 1


def test_the_oldest_go_first() -> None:
    source, cache = Source(), BatchCache(most_bytes=500)
    rows = [source.row(number) for number in range(10)]
    for row in rows:
        cache.body(row)
    kept = [row.first for row in rows if row.body is not None]
    assert kept == list(range(10 - len(kept), 10))
    assert sum(len(source.bodies[first]) for first in kept) <= 500
    assert len(kept) >= 3


def test_what_is_larger_than_all_we_keep_is_still_given_out() -> None:
    source, cache = Source(), BatchCache(most_bytes=10)
    row = source.row(1)
    assert cache.body(row) == source.bodies[1]
    assert row.body is None
    assert b'"$seq":1' in cache.rendered(row).text
    assert row.rendered is None


def test_resident_rows_are_not_ours_to_let_go() -> None:
    source, cache = Source(), BatchCache(most_bytes=100)
    body, size = batch_of([Record(b'"resident"')])
    resident = Row(1, 1, 0, 0, size, None, 0, 0, 1, body)
    cache.keep_body(resident)
    assert cache.body(resident) == body
    for number in range(2, 20):
        cache.body(source.row(number))
    assert resident.body == body


def test_a_row_is_rendered_once_for_all_its_readers() -> None:
    source, cache = Source(), BatchCache(most_bytes=10_000)
    row = source.row(1)
    assert cache.rendered(row) is cache.rendered(row)
    assert source.reads == 1


def test_memory_stays_within_its_bound_whatever_is_read() -> None:
    source, cache = Source(), BatchCache(most_bytes=2_000)
    rows = [source.row(number, size=number * 3) for number in range(1, 100)]
    for turn in range(3):
        for row in rows:
            cache.body(row) if turn % 2 else cache.rendered(row)
            held = sum(len(one.body) for one in rows if one.body is not None)
            held += sum(len(one.rendered.text) for one in rows if one.rendered is not None)
            assert held <= 2_000
