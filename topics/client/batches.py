"""From bytes to lines, from lines to records, from records to batches. Pure.

A file of any size passes through: what is kept is one unfinished line and one unfinished batch.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from topics import limits
from topics.client.failures import ClientError

BATCH_RECORDS = 500
BATCH_BYTES = 1 * limits.MIB  # a record that is longer goes alone
MAX_LINE_BYTES = limits.MAX_BODY_BYTES  # longer ones would fit no request

_raw_decoder = msgspec.json.Decoder(Raw)


class BadLine(ClientError):
    """A line that can't become a record."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line} {reason}")
        self.line = line
        self.reason = reason


class Line(msgspec.Struct, frozen=True):
    number: int  # from 1
    text: bytes  # without its end


class Lines:
    """Cuts a stream of bytes into lines. The last one needs no newline."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._count = 0

    def feed(self, chunk: bytes) -> list[Line]:
        *whole, rest = chunk.split(b"\n")
        found = []
        if whole:
            whole[0] = b"".join([*self._rest, whole[0]])
            self._rest, self._rest_bytes = [], 0
            first = self._count + 1
            self._count += len(whole)
            found = [Line(number, text.removesuffix(b"\r")) for number, text in enumerate(whole, first)]
        if rest:
            self._rest.append(rest)
            self._rest_bytes += len(rest)
            if self._rest_bytes > MAX_LINE_BYTES:
                raise BadLine(self._count + 1, f"is longer than {MAX_LINE_BYTES // limits.MIB} MiB")
        return found

    def finish(self) -> list[Line]:
        return self.feed(b"\n") if self._rest else []


def json_of(line: Line) -> Raw | None:
    """The value on a line, spelt as it is there; None on an empty line."""
    text = line.text.strip(b" \t\r")
    if not text:
        return None
    try:
        if not text.isascii():
            text.decode()  # raw values are not looked into, so nobody else would notice
        return _raw_decoder.decode(text)
    except UnicodeDecodeError as error:
        raise BadLine(line.number, f"is not UTF-8 (byte {error.start + 1})") from None
    except msgspec.DecodeError as error:
        words = str(error).removeprefix("JSON is malformed: ")
        raise BadLine(line.number, f"is not JSON: {'it ends too early' if 'truncated' in words else words}") from None
    except RecursionError:
        raise BadLine(line.number, "is nested too deeply") from None


def text_of(line: Line) -> Raw:
    """The line itself as a JSON string."""
    try:
        return Raw(msgspec.json.encode(line.text.decode()))
    except UnicodeDecodeError as error:
        raise BadLine(line.number, f"is not UTF-8 (byte {error.start + 1})") from None


class Batch(msgspec.Struct, frozen=True):
    data: list[Raw]
    lines: list[int]  # where each came from


class Batcher:
    """Gathers records until a batch has its number or its bytes."""

    def __init__(self, *, max_records: int = BATCH_RECORDS, max_bytes: int = BATCH_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._batch = Batch([], [])
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batch.data)

    def add(self, line: int, data: Raw) -> Batch | None:
        """Returns the batch that is complete because of this record, if any."""
        size = len(bytes(data))
        full = self.take() if self and self._bytes + size > self._max_bytes else None
        self._batch.data.append(data)
        self._batch.lines.append(line)
        self._bytes += size
        return self.take() if full is None and len(self) >= self._max_records else full

    def take(self) -> Batch | None:
        """What there is, complete or not."""
        if not self:
            return None
        batch, self._batch, self._bytes = self._batch, Batch([], []), 0
        return batch
