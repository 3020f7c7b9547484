"""A large append that is decoded, checked and packed a slice at a time.

Joining 64 MiB takes some thirty milliseconds, and a batch on its way to its shard would be joined three times. So it is
packed into pieces of some hundred kilobytes, and stays in pieces until the shard has it. `step()` does one of them.

What is accepted and what is refused is the same as for a small append (bodies.resolve_append).
"""

from __future__ import annotations

from collections.abc import Generator

from msgspec import Raw

from topics import limits
from topics.actors.messages import Append
from topics.gateway.api import schemas
from topics.gateway.api.schemas import AppendIn, RecordIn
from topics.settings import Settings
from topics.storage import columns
from topics.storage.format import RECORD_OVERHEAD, RECORD_SEPARATOR

_PIECE_BYTES = 512 * limits.KIB
_PIECE_RECORDS = 1_000


class Packing:
    """`head` and `pieces` are there when step() has said so."""

    head: Append
    pieces: list[bytes]

    def __init__(self, given: AppendIn, topic: str, settings: Settings, *, key: str | None) -> None:
        self._given = given
        self._topic = topic
        self._settings = settings
        self._key = key
        self._walk = self._pack()

    def step(self) -> bool:
        """Do one slice; True: it is packed."""
        return next(self._walk, self) is self

    def _pack(self) -> Generator[None, None, None]:
        given, settings = self._given, self._settings
        records, common = given.records, given.node
        key = schemas.check_batch(given, settings, key=self._key)
        config = None if given.config is None else schemas.resolve_config(given.config, self._topic)
        count = len(records)
        weight = count * RECORD_OVERHEAD
        data: list[bytes] = []
        tags: list[str | None] = []
        nodes: list[str | None] = []
        metas: list[list[Raw | None]] = []
        has_tags = has_nodes = has_metas = False
        at = 0
        while at < count:
            some = _some(records, at)
            schemas.check_record_sizes(some, settings.max_record_bytes, first=at)
            some_tags, some_nodes, some_metas, meta_bytes = schemas.side_columns(some, None, settings)
            has_tags = has_tags or some_tags is not None
            has_nodes = has_nodes or some_nodes is not None
            has_metas = has_metas or some_metas is not None
            tags += some_tags or [None] * len(some)
            nodes += [record.node for record in some]
            metas.append(some_metas or [None] * len(some))
            piece = RECORD_SEPARATOR.join([record.data for record in some])
            weight += len(piece) - (len(some) - 1) + meta_bytes
            data.append(RECORD_SEPARATOR + piece if at else piece)
            at += len(some)
            yield
        packed_metas: list[bytes] = []
        if has_metas:
            for some_raw in metas:
                joined = b",".join([b"null" if meta is None else meta for meta in some_raw])
                packed_metas.append((b"," if packed_metas else b"[") + joined)
                yield
            packed_metas.append(b"]")
        self.pieces = columns.pack_pieces(
            data,
            tags=tags if has_tags else None,
            nodes=[common if node is None else node for node in nodes] if has_nodes else common,
            metas=packed_metas,
        )
        self.head = Append(self._topic, count, weight, given.create, config, key, given.disable_backpressure)


def _some(records: list[RecordIn], at: int) -> list[RecordIn]:
    """The next ones, of about _PIECE_BYTES together and at least one."""
    size = 0
    stop = min(at + _PIECE_RECORDS, len(records))
    for end in range(at, stop):
        record = records[end]
        size += len(record.data) + (0 if record.meta is None else len(record.meta))
        if size > _PIECE_BYTES:
            return records[at : end + 1]
    return records[at:stop]
