"""The body of a batch: its records by column, so that appending and reading cost no work per record.

0           4          8           12          16
| times len | tags len | nodes len | metas len | times | tags | nodes | metas | data ...
| u32       | u32      | u32       | u32       |

times  JSON array of [count, ts_ms] runs; absent (length 0) where the frame's ts holds for all
tags   JSON array of string or null, one per record; absent if no record has a tag
nodes  one JSON string for all records, or an array of string or null
metas  JSON array of object or null, verbatim
data   the JSON values as they were sent, joined by RS (0x1E), which no JSON text can contain
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import TypeVar

import msgspec

from topics.errors import CorruptData
from topics.storage.format import RECORD_OVERHEAD, RECORD_SEPARATOR

_LENGTHS = struct.Struct("<4I")
_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")

Buffer = bytes | memoryview | msgspec.Raw
Raw = msgspec.Raw


def _decoding(decoder: msgspec.json.Decoder[_T]) -> Callable[[Buffer], _T]:
    """A column that was written whole and that nobody can read, or not so deep down, is damage."""

    def decode(column: Buffer) -> _T:
        try:
            return decoder.decode(column)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise CorruptData(f"a column of a batch can't be read: {exc}") from None

    return decode


_decode_runs = _decoding(msgspec.json.Decoder(list[tuple[int, int]]))
_decode_strings = _decoding(msgspec.json.Decoder(list[str | None]))
_decode_nodes = _decoding(msgspec.json.Decoder(str | list[str | None]))
_decode_raws = _decoding(msgspec.json.Decoder(list[msgspec.Raw]))


def pack(
    data: Sequence[Buffer],
    *,
    tags: Sequence[str | None] | None = None,
    nodes: str | Sequence[str | None] | None = None,
    metas: Sequence[Raw | None] | None = None,
) -> bytes:
    """A batch body; a column given as None is absent."""
    return pack_joined(RECORD_SEPARATOR.join(data), tags=tags, nodes=nodes, metas=metas)


PLAIN = _LENGTHS.pack(0, 0, 0, 0)  # the start of a body with nothing but data
NO_TIMES = bytes(4)  # the start of a body of one batch


def pack_joined(
    data: bytes,
    *,
    tags: Sequence[str | None] | None,
    nodes: str | Sequence[str | None] | None,
    metas: Sequence[Raw | None] | None,
) -> bytes:
    """The same for data values that are joined already."""
    if tags is None and nodes is None and metas is None:
        return PLAIN + data
    return _join(
        b"",
        _encode(tags) if tags is not None else b"",
        _encode(nodes) if nodes is not None else b"",
        _encode(metas) if metas is not None else b"",
        data,
    )


def pack_pieces(
    data: Sequence[bytes],
    *,
    tags: Sequence[str | None] | None,
    nodes: str | Sequence[str | None] | None,
    metas: Sequence[bytes],
) -> list[bytes]:
    """The same body in pieces, for one that is too large to be joined in one go. `data` are pieces of the joined
    values, `metas` pieces of the JSON of that column."""
    tags_json = _encode(tags) if tags is not None else b""
    nodes_json = _encode(nodes) if nodes is not None else b""
    lengths = _LENGTHS.pack(0, len(tags_json), len(nodes_json), sum(map(len, metas)))
    return [lengths, tags_json, nodes_json, *metas, *data]


def _join(times: bytes, tags: bytes, nodes: bytes, metas: bytes, data: bytes) -> bytes:
    lengths = _LENGTHS.pack(len(times), len(tags), len(nodes), len(metas))
    return b"".join((lengths, times, tags, nodes, metas, data))


class Columns:
    """A batch body taken apart on demand. `count` and `ts` come from the frame around it."""

    __slots__ = ("_data", "_metas", "_nodes", "_tags", "_times", "count", "ts")

    def __init__(self, body: bytes | memoryview, *, count: int, ts: int) -> None:
        body = bytes(body)
        if len(body) < _LENGTHS.size:
            raise CorruptData("batch body shorter than its column lengths")
        times, tags, nodes, metas = _LENGTHS.unpack_from(body)
        at = _LENGTHS.size
        parts = []
        for length in (times, tags, nodes, metas):
            parts.append(body[at : at + length])
            at += length
        if at > len(body):
            raise CorruptData("batch columns are longer than the body")
        self._times, self._tags, self._nodes, self._metas = parts
        self._data = body[at:]
        self.count = count
        self.ts = ts

    @property
    def has_tags(self) -> bool:
        return bool(self._tags)

    @property
    def has_nodes(self) -> bool:
        return bool(self._nodes)

    @property
    def has_metas(self) -> bool:
        return bool(self._metas)

    @property
    def joined(self) -> bytes:
        """The data values with RECORD_SEPARATOR between them."""
        return self._data

    @property
    def data_bytes(self) -> int:
        return len(self._data)

    def data(self) -> list[bytes]:
        values = self._data.split(RECORD_SEPARATOR)
        if len(values) != self.count:
            raise CorruptData(f"batch of {self.count} records holds {len(values)} data values")
        return values

    def data_text(self) -> list[str]:
        """The data values as latin-1 text: the same bytes, in the type that formats fastest."""
        values = self._data.decode("latin-1").split("\x1e")
        if len(values) != self.count:
            raise CorruptData(f"batch of {self.count} records holds {len(values)} data values")
        return values

    def runs(self) -> list[tuple[int, int]]:
        """(how many records, their ts) in seq order."""
        return _decode_runs(self._times) if self._times else [(self.count, self.ts)]

    def times(self) -> Iterable[int]:
        if not self._times:
            return repeat(self.ts, self.count)
        return chain.from_iterable(repeat(ts, n) for n, ts in _decode_runs(self._times))

    def tags(self) -> list[str | None]:
        return _decode_strings(self._tags) if self._tags else [None] * self.count

    def tags_json(self) -> list[bytes | None]:
        return _raws(self._tags) if self._tags else [None] * self.count

    def nodes(self) -> list[str | None]:
        if not self._nodes:
            return [None] * self.count
        value = _decode_nodes(self._nodes)
        return [value] * self.count if isinstance(value, str) else value

    def nodes_json(self) -> list[bytes | None]:
        if not self._nodes:
            return [None] * self.count
        if self._nodes[:1] == b'"':
            return [self._nodes] * self.count
        return _raws(self._nodes)

    def metas(self) -> list[bytes | None]:
        return _raws(self._metas) if self._metas else [None] * self.count

    def sizes(self) -> list[int]:
        """What each record counts for in the topic's `bytes`."""
        sizes = [len(value) + RECORD_OVERHEAD for value in self.data()]
        if self._metas:
            metas = self.metas()
            if len(metas) != self.count:
                raise CorruptData(f"batch of {self.count} records holds {len(metas)} metas")
            sizes = [size + len(meta or b"") for size, meta in zip(sizes, metas, strict=True)]
        return sizes

    @property
    def size(self) -> int:
        """The sum of sizes(), without looking at each record."""
        size = len(self._data) - (self.count - 1) + self.count * RECORD_OVERHEAD
        if self._metas:
            size += sum(len(meta) for meta in self.metas() if meta is not None)
        return size

    def pick(self, indexes: Sequence[int]) -> bytes:
        """A body of these records alone, in this order. Their times are left out: whoever takes them has its own."""
        data = self.data()
        tags = nodes = metas = None
        if self._tags:
            all_tags = self.tags()
            tags = [all_tags[index] for index in indexes]
        if self._nodes:
            all_nodes = self.nodes()
            nodes = [all_nodes[index] for index in indexes]
        if self._metas:
            all_metas = self.metas()
            metas = [None if (meta := all_metas[index]) is None else Raw(meta) for index in indexes]
        return pack([data[index] for index in indexes], tags=tags, nodes=nodes, metas=metas)

    def timeless(self) -> bytes:
        """The whole body without its times."""
        return _join(b"", self._tags, self._nodes, self._metas, self._data)


def measure(body: bytes, *, count: int) -> tuple[int, bool]:
    """What the records of a body count for, and whether it has tags, without a copy of the data. The body has no times:
    it is one batch."""
    times, tags, nodes, metas = _LENGTHS.unpack_from(body)
    at = _LENGTHS.size + times + tags + nodes
    if times or at + metas > len(body):
        raise CorruptData("not the columns of one batch")
    size = len(body) - at - metas - (count - 1) + count * RECORD_OVERHEAD
    if metas:
        size += sum(len(meta) for meta in _raws(body[at : at + metas]) if meta is not None)
    return size, bool(tags)


def _raws(column: bytes) -> list[bytes | None]:
    return [None if raw == b"null" else raw for raw in map(bytes, _decode_raws(column))]


def coalesce_plain(bodies: Sequence[bytes], counts: Sequence[int], times: Sequence[int]) -> bytes | None:
    """coalesce() for batches of nothing but data, the usual case, without looking inside; None if one has more."""
    if not all([body.startswith(PLAIN) for body in bodies]):
        return None
    runs: list[tuple[int, int]] = []
    records, current = 0, times[0]
    for count, ts in zip(counts, times, strict=True):
        if ts != current:
            runs.append((records, current))
            records, current = 0, ts
        records += count
    runs.append((records, current))
    start = len(PLAIN)
    data = RECORD_SEPARATOR.join([body[start:] for body in bodies])
    return _join(_encode(runs) if len(runs) > 1 else b"", b"", b"", b"", data)


def coalesce(batches: Sequence[Columns]) -> bytes:
    """One body for several batches in seq order: the data columns are joined as they stand."""
    if len(batches) == 1 and not batches[0]._times:
        only = batches[0]
        return _join(b"", only._tags, only._nodes, only._metas, only._data)
    runs: list[tuple[int, int]] = []
    for batch in batches:
        for count, ts in batch.runs():
            if runs and runs[-1][1] == ts:
                runs[-1] = (runs[-1][0] + count, ts)
            else:
                runs.append((count, ts))
    tags = nodes = metas = b""
    if any(batch.has_tags for batch in batches):
        tags = _encode(list(chain.from_iterable(batch.tags() for batch in batches)))
    if any(batch.has_nodes for batch in batches):
        first = batches[0]._nodes
        if first[:1] == b'"' and all(batch._nodes == first for batch in batches):
            nodes = first
        else:
            nodes = _encode(list(chain.from_iterable(batch.nodes() for batch in batches)))
    if any(batch.has_metas for batch in batches):
        values = chain.from_iterable(batch.metas() for batch in batches)
        metas = _encode([None if meta is None else msgspec.Raw(meta) for meta in values])
    return _join(
        _encode(runs) if len(runs) > 1 else b"",
        tags,
        nodes,
        metas,
        RECORD_SEPARATOR.join(batch._data for batch in batches),
    )
