"""The lines of an export: one JSON object each, for people, `jq` and `topics import`. Pure.

    {"export":1,"id":"…","topic":"orders","config":{…},"head_seq":9,"earliest_seq":3,"count":6}
    {"topic":"orders","tombstone":{"gap_from":1,"gap_to":2,"reason":"cap"}}
    {"topic":"orders","seq":3,"ts":1794835060300,"tag":"a","node":"w1","meta":{…},"data":{…}}
    {"topic":"orders","end":{"records":6,"gaps":1}}

For each topic the head, what is left of it in the order of its seqs, and the end: a file without it was cut short. Data
and meta are the bytes as they were sent. Where such bytes hold a line break, they stand as a string in `data_text` and
`meta_text` instead. `tag`, `node` and `meta` are left out where a record has none.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from topics.client import NewRecord
from topics.client.batches import BadLine, Line

FORMAT = 1
_encode = msgspec.json.Encoder().encode


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Records that were lost against somebody's will."""

    gap_from: int
    gap_to: int
    reason: str


class End(msgspec.Struct, frozen=True, kw_only=True):
    records: int
    gaps: int = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Any line."""

    topic: str
    export: int | None = None
    id: str | None = None
    config: dict[str, Any] | None = None
    seq: int | None = None
    ts: int | None = None
    tag: str | None = None
    node: str | None = None
    meta: Raw | UnsetType = UNSET
    meta_text: str | None = None
    data: Raw | UnsetType = UNSET
    data_text: str | None = None
    tombstone: Gap | None = None
    end: End | None = None

    @property
    def is_record(self) -> bool:
        return self.data is not UNSET or self.data_text is not None

    def record(self) -> NewRecord:
        data = self.data if self.data_text is None else Raw(self.data_text.encode())
        meta: Any = None if self.meta is UNSET or bytes(self.meta) == b"null" else self.meta
        if self.meta_text is not None:
            meta = Raw(self.meta_text.encode())
        return NewRecord(data, tag=self.tag, node=self.node, meta=meta)


_decoder = msgspec.json.Decoder(Entry)


def read_entry(line: Line) -> Entry | None:
    """None on an empty line."""
    if not line.text.strip():
        return None
    try:
        entry = _decoder.decode(line.text)
        if not line.text.isascii():
            line.text.decode()  # raw values are not looked into, so nobody else would notice
    except UnicodeDecodeError as error:
        raise BadLine(line.number, f"is not UTF-8 (byte {error.start + 1})") from None
    except msgspec.ValidationError as error:
        raise BadLine(line.number, f"is no line of an export: {error}") from None
    except msgspec.DecodeError as error:
        words = str(error).removeprefix("JSON is malformed: ")
        raise BadLine(line.number, f"is not JSON: {'it ends too early' if 'truncated' in words else words}") from None
    except RecursionError:
        raise BadLine(line.number, "is nested too deeply") from None
    if entry.export is not None and entry.export > FORMAT:
        raise BadLine(line.number, f"is of export format {entry.export}; this program reads {FORMAT}: upgrade topics")
    meta = b"{" if entry.meta is UNSET else bytes(entry.meta)
    if not meta.startswith(b"{") and meta != b"null":
        raise BadLine(line.number, "has a meta that is no object")
    if not entry.is_record and entry.export is None and entry.tombstone is None and entry.end is None:
        raise BadLine(line.number, "has no data")
    return entry


# --- writing -----------------------------------------------------------------------------------------


def head_line(topic: str, *, id: str, config: Any, head_seq: int, earliest_seq: int, count: int) -> bytes:
    fields = {
        "export": FORMAT,
        "id": id,
        "topic": topic,
        "config": config,
        "head_seq": head_seq,
        "earliest_seq": earliest_seq,
        "count": count,
    }
    return _encode(fields) + b"\n"


class RecordLines:
    """The records of one topic as lines."""

    def __init__(self, topic: str) -> None:
        self._begin = b'{"topic":' + _encode(topic) + b',"seq":%d,"ts":%d'

    def line(
        self, *, seq: int, ts: int, tag: bytes | None, node: bytes | None, meta: bytes | None, data: bytes
    ) -> bytes:
        """tag and node are JSON strings."""
        parts = [self._begin % (seq, ts)]
        if tag is not None:
            parts += [b',"tag":', tag]
        if node is not None:
            parts += [b',"node":', node]
        if meta is not None:
            parts += _verbatim(b"meta", meta)
        parts += _verbatim(b"data", data)
        parts.append(b"}\n")
        return b"".join(parts)


def _verbatim(name: bytes, value: bytes) -> list[bytes]:
    if b"\n" in value or b"\r" in value:
        return [b',"', name, b'_text":', _encode(value.decode())]
    return [b',"', name, b'":', value]


def gap_line(topic: str, gap: Gap) -> bytes:
    return _encode({"topic": topic, "tombstone": gap}) + b"\n"


def end_line(topic: str, end: End) -> bytes:
    return _encode({"topic": topic, "end": end}) + b"\n"
