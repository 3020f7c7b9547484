"""Records as the JSON that readers get. A batch is rendered once; readers share the pieces.

Text is handled as latin-1: every byte is one character, so slicing and formatting never look at the encoding.
"""

from __future__ import annotations

from collections.abc import Iterable

from topics.storage.columns import Columns
from topics.walshard.rows import Row


def default_pieces(row: Row) -> list[bytes]:
    """Each record with data, meta and node, without its tag: what a plain diff wants."""
    return render(row, row.load(), include_tags=False, include_meta=True)


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
