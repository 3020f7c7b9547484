"""A large append, decoded a slice at a time.

msgspec reads 64 MiB of JSON in up to a quarter of a second, and inflating takes as long: nothing else would be served
meanwhile. So a body over DIRECT_BYTES is inflated and walked in slices, and the records are decoded some hundred
kilobytes at a time. `step()` does one slice, of some milliseconds.

Bounds hold while the body is read, not afterwards: the number of records, the size of one record, the size of
everything else, and what a gzip body inflates to. A small body that inflates to millions of records is refused after
the first ten thousand of them.

What is accepted and what is refused is the same as for a small body (api/schemas.py), but for two bounds that only
matter here: one record takes at most twice the bytes that its data and meta may have, and the fields beside the records
together at most OPTIONS_BYTES.

The walk knows the braces and commas of the outermost object and of its `records`. Where one value ends is asked of
msgspec: given a value and what follows it, its error names the byte that does not belong to the value any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Raw

from topics import limits
from topics.errors import ApiError, invalid
from topics.gateway.api.schemas import (
    CUT,
    AppendIn,
    RecordIn,
    append_decoder,
    batch_too_large,
    decode_json,
    json_problem,
)
from topics.gateway.compression import Inflater
from topics.settings import Settings

DIRECT_BYTES = 1 * limits.MIB  # decoded in one go: that takes 15 ms if it is all tiny records
OPTIONS_BYTES = 256 * limits.KIB
_INFLATE_BYTES = 256 * limits.KIB
_SLICE_BYTES = 128 * limits.KIB  # of tiny records these are more than one append may have, and take 2 ms
_VALUE_BYTES = 1 * limits.KIB  # what finding one value costs, in bytes that are read in the same time
_MISSES = 3

_SPACE = re.compile(rb"[ \t\n\r]*")
_PLACE = re.compile(r"\(byte (\d+)\)")
_TOKEN_BYTES = 8  # a number or an escape that is cut off looks wrong, not unfinished
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_find_end = msgspec.json.Decoder(Raw).decode
_key_decoder = msgspec.json.Decoder(str)
_record_decoder = msgspec.json.Decoder(RecordIn)
_slice_decoder = msgspec.json.Decoder(list[RecordIn])
_CLOSING = b'}]"'
_Walk = Generator[None, None, None]


class Given(Protocol):
    records: list[RecordIn]


_G = TypeVar("_G", bound=Given)


def opened(
    body: bytes | bytearray, settings: Settings, *, gzipped: bool, most: int
) -> tuple[bytes | bytearray, LargeBody[AppendIn] | None]:
    """The body of an append: the whole of it if it is small, or one that has to be read in slices."""
    if gzipped and body:
        inflater = Inflater(body, most=most)
        inflated = inflater.more(_INFLATE_BYTES)
        if inflater.done:
            return inflated, None
        # It may have to wait for its turn: packed, so that it does not fill our memory meanwhile.
        return b"", LargeBody(b"", _decode_append, settings, inflater=Inflater(body, most=most))
    if len(body) <= DIRECT_BYTES:
        return body, None
    return b"", LargeBody(body, _decode_append, settings)


def _decode_append(fields: bytes) -> AppendIn:
    return decode_json(append_decoder, fields)


class LargeBody(Generic[_G]):
    """An object with `records` and other fields. `decode` is given the other fields, and an empty list of records."""

    def __init__(
        self,
        data: bytes | bytearray,
        decode: Callable[[bytes], _G],
        settings: Settings,
        *,
        inflater: Inflater | None = None,
        malformed: str = "invalid_request",
    ) -> None:
        self._code = malformed  # what a body that is no JSON is called
        self._data = data  # what is inflated and not yet read
        self._at = 0
        self._before = 0  # bytes that were read and let go
        self._inflater = inflater
        self._decode = decode
        self._most_records = settings.max_batch_records
        self._record_bytes = 2 * settings.max_record_bytes + 64 * limits.KIB
        self._records: list[RecordIn] | None = None
        self._options: list[bytes] = []
        self._options_bytes = 0
        self._missed = 0
        self._spent = 0  # bytes read in this slice, and what their values cost
        self._walk = self._read()
        self._given: _G | None = None

    @property
    def size(self) -> int:
        return self._before + len(self._data)

    @property
    def given(self) -> _G:
        assert self._given is not None
        return self._given

    def step(self) -> bool:
        """Do one slice; True: `given` is there."""
        return next(self._walk, self) is self

    def close(self) -> None:
        """It is not read to its end. Its walk knows it, and with that both would wait for a collection."""
        self._walk.close()
        self._data = b""
        self._inflater = None

    @property
    def fields(self) -> bytes:
        """The fields beside the records, as far as they were read: the answer to a refused command may need one."""
        return b"{%b}" % b",".join(self._options)

    # --- the walk ---

    def _read(self) -> _Walk:
        yield from self._take(b"{")
        yield from self._seek()
        if self._peek() == b"}":
            self._at += 1
        else:
            while True:
                yield from self._field()
                yield from self._seek()
                if self._peek() != b",":
                    break
                self._at += 1
            yield from self._take(b"}")
        yield from self._seek(end=True)
        if self._at < len(self._data):
            raise self._malformed("there is something behind the end")
        self._before += self._at
        self._data = b""
        yield
        fields = self._options if self._records is None else [b'"records":[]', *self._options]
        given = self._decode(b"{%b}" % b",".join(fields))
        if self._records is not None:
            given.records = self._records
        self._given = given

    def _field(self) -> _Walk:
        yield from self._seek()
        if self._peek() != b'"':
            raise self._malformed('a name in "" is expected')
        name = yield from self._value(OPTIONS_BYTES)
        yield from self._take(b":")
        yield from self._seek()
        self._count_options(len(name))
        if decode_json(_key_decoder, name) == "records" and self._peek() == b"[":
            self._records = []
            yield from self._elements()
            return
        value = yield from self._value(OPTIONS_BYTES)
        self._count_options(len(value))
        self._options.append(b"%b:%b" % (name, value))

    def _count_options(self, size: int) -> None:
        """Names count whatever their values are: there is no end of fields that say the same again."""
        self._options_bytes += size
        if self._options_bytes > OPTIONS_BYTES:
            raise _options_too_large()

    def _elements(self) -> _Walk:
        records = self._records
        assert records is not None
        self._at += 1
        yield from self._seek()
        if self._peek() == b"]":
            self._at += 1
            return
        marker = b""
        while True:
            if (leapt := self._leap(marker)) is not None:
                records += leapt
            else:
                value = yield from self._value(self._record_bytes, record=len(records))
                records.append(decode_json(_record_decoder, value))
            if len(records) > self._most_records:
                raise batch_too_large(len(records), self._most_records)
            end = self._before + self._at
            yield from self._seek()
            if self._peek() != b",":
                break
            self._at += 1
            yield from self._seek()
            if leapt is None and not marker and end >= self._before:
                between = bytes(self._data[end - self._before : self._at])
                marker = value[-1:] + between + value[: value.find(b":") + 1]
            if leapt is not None:
                yield
        yield from self._take(b"]")

    def _leap(self, marker: bytes) -> list[RecordIn] | None:
        """Many records at once: up to where, within a slice, one seems to begin as the first one did. If that is
        inside of a value, the slice is no JSON; then the records are taken one by one."""
        if not marker or self._missed > _MISSES:
            return None
        stop = self._data.rfind(marker, self._at, self._at + _SLICE_BYTES) + 1
        if not stop:
            return None
        part = bytes(self._data[self._at : stop])
        try:
            if not part.isascii():
                part.decode()
            records = _slice_decoder.decode(b"[%b]" % part)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._missed += 1
            return None
        self._at = stop
        return records

    # --- reading ---

    def _peek(self) -> bytes:
        return bytes(self._data[self._at : self._at + 1])

    def _take(self, sign: bytes) -> _Walk:
        yield from self._seek()
        if self._peek() != sign:
            raise self._malformed(f"{sign.decode()} is expected")
        self._at += 1

    def _seek(self, *, end: bool = False) -> _Walk:
        """Go to the next byte that is no space."""
        while True:
            stop = self._at + _INFLATE_BYTES
            found = _SPACE.match(self._data, self._at, stop)
            assert found is not None
            self._at = found.end()
            if self._at == stop < len(self._data):
                yield
                continue
            if self._at < len(self._data):
                return
            if not self._has_more:
                if end:
                    return
                raise self._malformed("it ends too early")
            yield from self._fill()

    @property
    def _has_more(self) -> bool:
        return self._inflater is not None and not self._inflater.done

    def _fill(self) -> _Walk:
        assert self._inflater is not None
        rest = bytearray(self._data[self._at :])
        self._before += self._at
        self._at = 0
        rest += self._inflater.more(_INFLATE_BYTES)
        self._data = rest
        yield

    def _value(self, most: int, *, record: int | None = None) -> Generator[None, None, bytes]:
        """The value that begins here."""
        while (end := self._end_of_value(most)) is None:
            if len(self._data) - self._at >= most or not self._has_more:
                if len(self._data) - self._at < most:
                    raise self._malformed(json_problem(CUT, self._data))
                raise _options_too_large() if record is None else _record_too_large(record, most)
            yield from self._fill()
        value = bytes(self._data[self._at : end])
        self._at = end
        self._spent += len(value) + _VALUE_BYTES
        if self._spent > _SLICE_BYTES:
            self._spent = 0
            yield
        return value

    def _end_of_value(self, most: int) -> int | None:
        """None: it goes on behind what is here, or behind `most` bytes."""
        at, data = self._at, self._data
        stop = min(at + most, len(data))
        problem = ""
        with memoryview(data) as view, view[at:stop] as window:
            try:
                _find_end(window)
            except msgspec.DecodeError as error:
                problem = str(error)
            except RecursionError:
                raise invalid("the body is nested too deeply") from None
        if not problem:
            whole = data[stop - 1] in _CLOSING or (stop == len(data) and not self._has_more)
            return stop if whole else None
        if (found := _TRAILING.search(problem)) is not None:
            return at + int(found[1]) - 1
        place = _PLACE.search(problem)
        cut = stop < len(data) or self._has_more
        if "truncated" in problem or (cut and place is not None and int(place[1]) > stop - at - _TOKEN_BYTES):
            return None
        problem = json_problem(problem, b"")
        raise self._malformed(problem.removeprefix("JSON is malformed: ").partition(" (byte")[0])

    def _malformed(self, what: str) -> ApiError:
        return ApiError(self._code, f"the body is not valid JSON: {what} (near byte {self._before + self._at})")


def _options_too_large() -> ApiError:
    return ApiError(
        "payload_too_large",
        f"the fields beside the records have more than {OPTIONS_BYTES} bytes",
        {"max": OPTIONS_BYTES},
    )


def _record_too_large(record: int, most: int) -> ApiError:
    return ApiError(
        "record_too_large", f"record {record} takes more than {most} bytes of the body", {"record": record, "max": most}
    )
