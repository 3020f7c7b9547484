"""Records as the JSON that readers get. A batch is rendered once; readers share the pieces.

Text is handled as latin-1: every byte is one character, so slicing and formatting never look at the encoding.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from topics.storage.columns import Columns
from topics.walshard.topic.index import Row


class Rendered:
    """A row as JSON: its records joined by commas, and where each of them ends."""

    __slots__ = ("_ends", "text")

    def __init__(self, pieces: list[bytes]) -> None:
        self.text = b",".join(pieces)
        self._ends = array("I", accumulate(map(len, pieces)))  # without the commas

    @property
    def weight(self) -> int:
        """Bytes of memory it takes."""
        return len(self.text) + 4 * len(self._ends)

    def size(self, start: int, stop: int) -> int:
        """Bytes of records start to stop - 1, without the commas between them."""
        return self._ends[stop - 1] - (self._ends[start - 1] if start else 0)

    def fitting(self, start: int, stop: int, most: int) -> int:
        """Up to which record, at most `stop`, those from `start` on take so many bytes."""
        begin = self._ends[start - 1] if start else 0
        return bisect_right(self._ends, begin + most, start, stop)

    def slice(self, start: int, stop: int) -> bytes:
        """Records start to stop - 1, still joined."""
        begin = self._ends[start - 1] + start if start else 0
        return self.text[begin : self._ends[stop - 1] + stop - 1]


def default(row: Row) -> Rendered:
    """Each record with data, meta and node, without its tag: what a plain diff wants."""
    return Rendered(render(row, row.load(), include_tags=False, include_meta=True))


def render(row: Row, body: bytes, *, include_tags: bool, include_meta: bool, include_data: bool = True) -> list[bytes]:
    columns = Columns(body, count=row.count, ts=row.first_ts)
    seqs = range(row.first, row.first + row.count)
    tags = columns.tags_json() if include_tags and columns.has_tags else None
    nodes = columns.nodes_json() if columns.has_nodes else None
    metas = columns.metas() if include_meta and columns.has_metas else None
    if tags is None and nodes is None and metas is None and include_data:
        data = columns.data_text()
        runs = columns.runs()
        if len(runs) == 1:
            middle = f',"$ts":{runs[0][1]},"data":'
            return [f'{{"$seq":{seq}{middle}{value}}}'.encode("latin-1") for seq, value in zip(seqs, data, strict=True)]
        return [
            f'{{"$seq":{seq},"$ts":{ts},"data":{value}}}'.encode("latin-1")
            for seq, ts, value in zip(seqs, columns.times(), data, strict=True)
        ]
    none: list[bytes | None] = [None] * row.count
    rendered = []
    values: Iterable[bytes | None] = columns.data() if include_data else none
    for seq, ts, node, tag, meta, value in zip(
        seqs, columns.times(), nodes or none, tags or none, metas or none, values, strict=True
    ):
        piece = b'{"$seq":%d,"$ts":%d' % (seq, ts)
        if node is not None:
            piece += b',"$node":' + node
        if tag is not None:
            piece += b',"$tag":' + tag
        if value is not None:
            piece += b',"data":' + value
        if meta is not None:
            piece += b',"meta":' + meta
        rendered.append(piece + b"}")
    return rendered
