"""Batches of records on their way to the server: how they are cut, what key each one carries, and how it is sent.

One task sends its batches one after the other over one connection, which is kept alive. The key of a batch says who
writes, which partition, the batch's number among those of its topic, and a hash of its records:

    spark/<write>/<partition>/<number>/<xxh128 of the records>

- The same batch sent again, by this attempt or by another one of the same partition, has the same key. The topic
  remembers it for its `idempotency_window_ms`, and so long nothing is appended twice.
- The hash is there because of input that comes in another order when a task is repeated: its batches are other ones,
  and without the hash they would be taken for those that are written, and lost. So a record may come twice, but none
  is lost.

How a batch is cut depends on the records alone, not on how Spark hands them over. What is refused for the moment (429,
502, 503, 504) or gets lost on the way is sent again with the same key; any other refusal ends the task, in the server's
own words.
"""

from __future__ import annotations

import http.client
import os
import random
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import xxhash
from msgspec import Raw

from topics.errors import TopicsError

HELD_BYTES = 32 * 1024 * 1024  # of all topics' unfinished batches in one task
RECORD_BYTES = 40  # what the field names of a record take, about
FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 5.0
_LATER = (429, 502, 503, 504)

_encoder = msgspec.json.Encoder()


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where batches go, and with how much patience. It travels to the executors with the task."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # of every path, if a proxy serves the server below one
    api_key: str | None = None
    timeout_s: float
    retries: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def __repr__(self) -> str:
        return f"Target({self})"  # a key is not to be printed by accident

    def connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=self.timeout_s)


def parse_url(url: str) -> dict[str, Any]:
    """`http://host:port` as fields of a Target; the scheme may be left out."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise TopicsError(f"option url: {url!r} is no address of a server: {error}") from None
    if parts.username or parts.password:
        raise TopicsError("option url: it must not hold a name or password; keys go into option apiKeyFile")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise TopicsError(f"option url: {url!r} is no address of a server; it looks like http://127.0.0.1:4000")
    tls = parts.scheme == "https"
    standard = 443 if tls else 80
    return {"host": parts.hostname, "port": port or standard, "tls": tls, "prefix": parts.path.rstrip("/")}


# --- batches -----------------------------------------------------------------------------------------


class Record(msgspec.Struct, gc=False, omit_defaults=True):
    data: Raw
    tag: str | None = None
    node: str | None = None
    meta: Raw | None = None


class Batch(msgspec.Struct):
    """Of one topic. `rows` says where in the partition each record came from, counted from 1."""

    topic: str
    number: int
    records: list[Record] = []
    rows: list[int] = []
    weight: int = 0

    def where(self, at: int | None = None) -> str:
        first, last = self.rows[0], self.rows[-1]
        if at is not None:
            return f"row {self.rows[at]}"
        return f"row {first}" if first == last else f"rows {first} to {last}"


class Batcher:
    """Gathers the records of each topic until they are as many, or as long, as a batch may be."""

    def __init__(self, *, max_records: int, max_bytes: int, held_bytes: int = HELD_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._held_bytes = max(held_bytes, max_bytes)
        self._open: dict[str, Batch] = {}
        self._sent: dict[str, int] = {}  # topic -> the number of its next batch
        self._weight = 0

    def add(self, topic: str, record: Record, row: int) -> Iterator[Batch]:
        """Gives the batches that are complete because of this record, if any."""
        weight = (
            RECORD_BYTES + len(record.data) + len(record.tag or "") + len(record.node or "") + len(record.meta or b"")
        )
        batch = self._open.get(topic)
        if batch is not None and batch.weight + weight > self._max_bytes:
            yield self._take(batch)
            batch = None
        if batch is None:
            batch = self._open[topic] = Batch(topic, self._sent.get(topic, 0))
        batch.records.append(record)
        batch.rows.append(row)
        batch.weight += weight
        self._weight += weight
        if len(batch.records) >= self._max_records:
            yield self._take(batch)
        elif self._weight > self._held_bytes:
            yield from self.finish()  # many topics, each with a little

    def finish(self) -> Iterator[Batch]:
        """What there is, complete or not."""
        for batch in list(self._open.values()):
            yield self._take(batch)

    def _take(self, batch: Batch) -> Batch:
        del self._open[batch.topic]
        self._sent[batch.topic] = batch.number + 1
        self._weight -= batch.weight
        return batch


def batch_key(records: bytes, *, write: str, partition: int, number: int) -> str:
    return f"spark/{write}/{partition}/{number}/{xxhash.xxh3_128_hexdigest(records)}"


# --- sending -----------------------------------------------------------------------------------------


class _Refusal(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, Any] = {}


class _Envelope(msgspec.Struct):
    error: _Refusal


class _Body(msgspec.Struct):
    idempotency_key: str
    records: Raw


class _Receipt(msgspec.Struct):
    count: int
    deduped: bool


_refusal_decoder = msgspec.json.Decoder(_Envelope)
_receipt_decoder = msgspec.json.Decoder(_Receipt)


class CannotWrite(TopicsError):
    """A batch that can't be delivered; the text says which rows and why."""


class _Later(Exception):
    """Not now: why, how long the server asked to be left alone, and what to do if it goes on."""

    def __init__(self, reason: str, *, at_least_s: float = 0.0, remedy: str = "") -> None:
        super().__init__(reason)
        self.at_least_s = at_least_s
        self.remedy = remedy


class Delivery:
    """The connection of one task. `write` is the same for every attempt of a write, and of no other write."""

    def __init__(
        self,
        target: Target,
        *,
        write: str,
        partition: int,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._target = target
        self._write = write
        self._partition = partition
        self._sleep = sleep
        self._chance = chance
        self._connection = target.connect()
        self._headers = {"Content-Type": "application/json", "User-Agent": "topics-spark"}
        if target.api_key:
            self._headers["Authorization"] = f"Bearer {target.api_key}"
        self.records = 0
        self.deduped = 0  # of these: were there already, from an earlier attempt

    def close(self) -> None:
        self._connection.close()

    def send(self, batch: Batch) -> None:
        """Returns when the server has answered for it."""
        records = _encoder.encode(batch.records)
        key = batch_key(records, write=self._write, partition=self._partition, number=batch.number)
        body = _encoder.encode(_Body(key, Raw(records)))
        path = f"{self._target.prefix}/v0/topics/{quote(batch.topic, safe='')}?return_seqs=false"
        started_s = time.monotonic()
        ceiling_s = FIRST_PAUSE_S
        for attempt in range(self._target.retries + 1):
            try:
                receipt = self._judge(batch, *self._post(path, body))
                break
            except _Later as error:
                later = error
            if attempt < self._target.retries:
                self._sleep(max(ceiling_s * (0.5 + 0.5 * self._chance()), later.at_least_s))
                ceiling_s = min(ceiling_s * 2, MOST_PAUSE_S)
        else:
            tries = f"{attempt + 1} times" if attempt else "once"
            tries += f" in {time.monotonic() - started_s:.0f} s"
            raise CannotWrite(
                f"{self._place(batch)}: {later}, {tries}. {later.remedy}Option retries says how often to try again"
            )
        self.records += receipt.count
        if receipt.deduped:
            self.deduped += receipt.count

    def _post(self, path: str, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            self._connection.request("POST", path, body=body, headers=self._headers)
            response = self._connection.getresponse()
            return response, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request makes it anew
            if isinstance(error, ssl.SSLCertVerificationError):
                raise CannotWrite(f"option url: {self._target}: {error.verify_message}") from None
            raise _Later(f"{self._target}: {_words(error)}", remedy=_UNREACHABLE) from None

    def _judge(self, batch: Batch, response: http.client.HTTPResponse, content: bytes) -> _Receipt:
        status = response.status
        try:
            if 200 <= status < 300:
                return _receipt_decoder.decode(content)
            refusal = _refusal_decoder.decode(content).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            if status in _LATER:  # a proxy that does not reach the server
                asked_s = _asked_s(response, {})
                raise _Later(f"{self._target} answers {status}", at_least_s=asked_s, remedy=_UNREACHABLE) from None
            raise CannotWrite(f"option url: {self._target} answers {status}, but not as a topics server") from None
        if status in _LATER:
            raise _Later(
                f"{self._target}: {refusal.message} ({refusal.code})", at_least_s=_asked_s(response, refusal.detail)
            )
        at = culprit(batch.records, refusal.detail)
        hint = _HINTS.get(refusal.code, "")
        raise CannotWrite(f"{self._place(batch, at)} is refused: {refusal.message} ({refusal.code}){hint}")

    def _place(self, batch: Batch, at: int | None = None) -> str:
        return f"topic {batch.topic}, partition {self._partition}, {batch.where(at)}"


_UNREACHABLE = "Is option url right, and does a server run there? "
_HINTS = {
    "unauthorized": ". Name a file with the key in option apiKeyFile, or put it into TOPICS_API_KEY",
    "batch_too_large": ". Lower option batchRecords",
    "payload_too_large": ". Lower option batchBytes",
}


def culprit(records: Sequence[Record], detail: dict[str, Any]) -> int | None:
    """Which record the server means, if that can be said. It names some by their place, others by what is too long."""
    at = detail.get("record")
    if isinstance(at, int) and 0 <= at < len(records):
        return at
    field, most = detail.get("field"), detail.get("max")
    if field not in ("tag", "node", "meta") or not isinstance(most, int):
        return None
    for place, record in enumerate(records):
        value = getattr(record, field)
        if value is not None and len(value.encode() if isinstance(value, str) else bytes(value)) > most:
            return place
    return None


def _asked_s(response: http.client.HTTPResponse, detail: dict[str, Any]) -> float:
    """How long the server asked to be left alone."""
    asked_ms = detail.get("retry_after_ms")
    if isinstance(asked_ms, int | float) and asked_ms >= 0:
        return asked_ms / 1_000  # finer than the whole seconds of the header
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time (option timeoutMs)"
    if isinstance(error, OSError) and error.errno and error.errno > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
