"""Rows on their way out: what each row of an Arrow batch is as a record.

Either the column `value` is the data, or the data is a JSON object made of columns, as Spark's to_json would make it:
fields that are null are left out, in structs too, bytes are base64, NaN and the infinities are strings. Other than
there, timestamps are in UTC and keep their microseconds.

Nothing here asks Spark for anything.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator
from datetime import UTC
from itertools import repeat
from typing import Any, Literal

import msgspec
import pyarrow as pa
from msgspec import Raw

from spark_pipeline.delivery import Record
from topics.errors import TopicsError

ValueFormat = Literal["json", "text", "base64"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Which columns become what. Wherever there are `key`, `node` and `meta`: the tag, and what they are called."""

    topic: str | None  # None: each row names its own
    value_format: ValueFormat | None  # of the column `value`; None: the data are objects made of columns
    columns: tuple[str, ...] = ()  # which, then


Convert = Callable[[Any], Any]
_encoder = msgspec.json.Encoder(decimal_format="number")
_raw_decoder = msgspec.json.Decoder(Raw)
_NULL = Raw(b"null")


class BadRow(TopicsError):
    """A value that can't be part of a record."""


def records_of(shape: Shape, rows: pa.RecordBatch) -> Iterator[tuple[str, Record]]:
    """Each row as a topic's name and a record. A BadRow is about the row after the last one that was given."""
    names = rows.schema.names
    topics = _texts(rows, "topic") if shape.topic is None else repeat(shape.topic)
    tags = _texts(rows, "key") if "key" in names else repeat(None)
    nodes = _texts(rows, "node") if "node" in names else repeat(None)
    metas = _metas(rows) if "meta" in names else repeat(None)
    if shape.value_format is None:
        data = _objects(rows, shape.columns)
    else:
        data = _values(rows, shape.value_format)
    # data comes last: it is the one that ends
    for name, tag, node, meta, datum in zip(topics, tags, nodes, metas, data):  # noqa: B905
        if not name:
            raise BadRow("column topic: is null or empty, and there is no option topic")
        yield name, Record(datum, tag, node, meta)


def _bytes(rows: pa.RecordBatch, name: str) -> list[bytes | None]:
    column = rows.column(name)
    if pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    elif pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    found: list[bytes | None] = column.to_pylist()
    return found


def _texts(rows: pa.RecordBatch, name: str) -> Iterator[str | None]:
    for raw in _bytes(rows, name):
        yield None if raw is None else _decoded(raw, name)


def _decoded(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRow(f"column {name}: is not UTF-8 (byte {error.start + 1})") from None


def _values(rows: pa.RecordBatch, value_format: ValueFormat) -> Iterator[Raw]:
    for raw in _bytes(rows, "value"):
        if raw is None:
            yield _NULL
        elif value_format == "json":
            yield _json(raw, "value")
        elif value_format == "text":
            yield Raw(_encoder.encode(_decoded(raw, "value")))
        else:
            yield Raw(b'"' + base64.b64encode(raw) + b'"')


def _json(raw: bytes, name: str) -> Raw:
    """The text itself, spelt as it is."""
    if not raw.isascii():
        _decoded(raw, name)  # raw values are not looked into, so nobody else would notice
    try:
        return _raw_decoder.decode(raw)
    except msgspec.DecodeError as error:
        words = str(error).removeprefix("JSON is malformed: ")
        words = "it ends too early" if "truncated" in words else words
        hint = '. Option valueFormat "text" sends it as a string' if name == "value" else ""
        raise BadRow(f"column {name}: is not JSON: {words}{hint}") from None
    except RecursionError:
        raise BadRow(f"column {name}: is nested too deeply") from None


def _metas(rows: pa.RecordBatch) -> Iterator[Raw | None]:
    if pa.types.is_map(rows.schema.field("meta").type):
        for pairs in rows.column("meta").to_pylist():
            yield None if pairs is None else Raw(_encoder.encode(dict(pairs)))
        return
    for raw in _bytes(rows, "meta"):
        meta = None if raw is None else _json(raw, "meta")
        if meta is not None and bytes(meta)[:1] != b"{":
            raise BadRow("column meta: is no JSON object")
        yield meta


def _objects(rows: pa.RecordBatch, names: tuple[str, ...]) -> Iterator[Raw]:
    columns = []
    for name in names:
        column = rows.column(name)
        bare, convert = _bare(column.type), converter(column.type)
        values = (column if bare == column.type else column.cast(bare)).to_pylist()
        columns.append(values if convert is None else [None if value is None else convert(value) for value in values])
    for row in zip(*columns, strict=True):
        given = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        yield Raw(_encoder.encode(given))


def _bare(kind: pa.DataType) -> pa.DataType:
    """The type without its time zones: Python would look for each of them, and an executor may have no tables of them.
    The values are in UTC all the same."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_bare(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, kind.item_field.with_type(_bare(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_bare(kind.value_type)))
    return kind


def converter(kind: pa.DataType) -> Convert | None:
    """What makes of a Python value that came from Arrow one that is encoded as to_json would; None: it is one."""
    if pa.types.is_float32(kind):
        return _shortest
    if pa.types.is_floating(kind):
        return _finite
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return lambda value: value.replace(tzinfo=UTC)
    if pa.types.is_struct(kind):
        return _struct_converter(kind)
    if pa.types.is_map(kind):
        value_of = _nullable(converter(kind.item_type))
        return lambda pairs: {str(key): value_of(value) for key, value in pairs}
    if pa.types.is_list(kind):
        element = converter(kind.value_type)
        if element is None:
            return None
        element_of = _nullable(element)
        return lambda values: [element_of(value) for value in values]
    return None


def _struct_converter(kind: pa.DataType) -> Convert:
    fields = [(field.name, _nullable(converter(field.type))) for field in kind]

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        return {name: of(value[name]) for name, of in fields if value[name] is not None}

    return convert


def _nullable(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _shortest(value: float) -> float | str:
    """Of a 32-bit float that was made longer: 0.1, and not 0.10000000149011612."""
    if not math.isfinite(value):
        return _finite(value)
    for digits in range(6, 9):
        shorter = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", shorter))[0] == value:
            return shorter
    return float(f"{value:.9g}")
