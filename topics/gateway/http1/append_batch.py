"""The plain append: records with data and nothing else, no options. It is most of the traffic, so it has its own path.

It does what handlers.append does for such a request, without the objects in between: the request is one struct that
waits for its own answer, the ring message has a fixed head, and the answer goes from the ring into HTTP bytes in
one step. Appends of one round to one topic travel together: they are one message, one batch and one answer.
Whatever is not plain takes the ordinary way; so does every refusal, which finds the words for it.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import msgspec

from topics.actors import messages
from topics.gateway.api.topics import append_json
from topics.gateway.api.types import Response, error_response
from topics.storage import columns
from topics.storage.format import RECORD_SEPARATOR

_RESPONSE = b"%b%x\r\nContent-Length: %d\r\n\r\n%b"


class PlainRoute(NamedTuple):
    shard: int
    topic: str
    encoded: bytes
    return_seqs: bool
    number: int = 0


class PlainEntry(Protocol):
    """A plain append that waits: an HTTP request here, a publish of a WebSocket in streams/websocket.py."""

    records: int
    deadline_ms: int
    id: int

    def take(self, message: bytes) -> None: ...
    def take_fields(self, fields: tuple[int, int, int, bool, bool, int, int]) -> None: ...
    def finish(self, value: Response) -> None: ...
    def abort(self) -> None: ...


class PlainAppend(msgspec.Struct, gc=False, eq=False):
    """In flight: one request of one connection, and its place among the pending calls."""

    connection: Any  # a Connection of HTTP/1
    keep_alive: bool
    gzipped: bool
    topic: str
    records: int
    return_seqs: bool
    started_ns: int
    deadline_ms: int
    number: int = 0  # of its route
    slot: int = 0
    id: int = 0
    answer: bytes | None = None

    @property
    def request_id(self) -> None:
        """A client that gives its requests names sends no plain ones."""
        return None

    @property
    def key(self) -> int:
        return self.slot

    @property
    def line(self) -> tuple[str, str]:
        return "POST", f"/v0/topics/{self.topic}"

    def take(self, message: bytes) -> None:
        """The shard has answered this request alone."""
        if message[1]:
            self.finish(error_response(messages.decode_failure(message)))
        else:
            self.take_fields(messages.unpack_appended(message))

    def take_fields(self, fields: tuple[int, int, int, bool, bool, int, int]) -> None:
        """What it was given: the fields of messages.Appended."""
        connection = self.connection
        lane = connection.lane
        took_us = (time.perf_counter_ns() - self.started_ns) // 1_000
        body = append_json(self.topic, fields, self.return_seqs, took_us)
        status = 201 if fields[3] else 200
        if self.gzipped or lane.access is not None or not self.keep_alive:
            self.finish(Response(status, body))
            return
        meter = lane.meter
        if meter is not None:
            if status == 200:
                meter.plain_route = self.number
                meter.plain_us.append(took_us)
            else:
                meter.count(self.number, status, took_us)
        if not connection.closed:
            self.answer = _RESPONSE % (lane.answers.named[status], self.id, len(body), body)
            lane.dirty.add(connection)

    def finish(self, value: Response) -> None:
        connection = self.connection
        lane = connection.lane
        lane.answered(self, value)
        if connection.closed:
            return
        keep_alive = self.keep_alive = self.keep_alive and not value.close and not lane.handlers.draining
        self.answer = lane.answers.encode(
            value, keep_alive=keep_alive, gzipped=self.gzipped, bodiless=False, id=self.id
        )
        lane.dirty.add(connection)

    def abort(self) -> None:
        self.connection.abort()


class PlainRun:
    """Plain appends to one topic, gathered in one round."""

    __slots__ = ("counts", "data", "encoded", "entries", "shard", "size")

    def __init__(self, shard: int, encoded: bytes) -> None:
        self.shard = shard
        self.encoded = encoded  # the topic's name
        self.entries: list[PlainEntry] = []
        self.counts: list[int] = []
        self.data: list[bytes] = []
        self.size = 0

    def add(self, entry: PlainEntry, size: int, data: bytes) -> None:
        self.entries.append(entry)
        self.counts.append(entry.records)
        self.data.append(data)
        self.size += size

    def batch(self) -> bytes:
        data = self.data
        return columns.PLAIN + (data[0] if len(data) == 1 else RECORD_SEPARATOR.join(data))
