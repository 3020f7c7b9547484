"""The plain append: records with data and nothing else, no options. It is most of the traffic, so it has its own path.

It does what handlers.append does for such a request, without the objects in between: the request is one struct that
waits for its own answer, the ring message has a fixed head, and the answer goes from the ring into HTTP bytes in
one step. Whatever is not plain takes the ordinary way; so does every refusal, which finds the words for it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from topics.actors import messages
from topics.gateway.exchange import Response, error_response
from topics.gateway.handlers import append_json

_RESPONSE = b"%bContent-Length: %d\r\n\r\n%b"


class PlainAppend(msgspec.Struct, gc=False, eq=False):
    """In flight: one request of one connection, and its place among the pending calls."""

    connection: Any  # hot.Connection
    keep_alive: bool
    gzipped: bool
    topic: str
    return_seqs: bool
    started_ns: int
    deadline_ms: int
    answer: bytes | None = None

    def take(self, message: bytes) -> None:
        """The shard has answered."""
        if message[1]:
            self.finish(error_response(messages.decode_failure(message)))
            return
        connection = self.connection
        if connection.closed:
            return
        fields = messages.unpack_appended(message)
        body = append_json(self.topic, fields, self.return_seqs, self.started_ns)
        if self.keep_alive and not self.gzipped:
            status = 201 if fields[3] else 200
            self.answer = _RESPONSE % (connection.lane.answers.starts[status], len(body), body)
            connection.lane.dirty.add(connection)
        else:
            self.finish(Response(201 if fields[3] else 200, body))

    def finish(self, value: Response) -> None:
        connection = self.connection
        if connection.closed:
            return
        lane = connection.lane
        keep_alive = self.keep_alive = self.keep_alive and not value.close and not lane.handlers.draining
        self.answer = lane.answers.encode(value, keep_alive=keep_alive, gzipped=self.gzipped, bodiless=False)
        lane.dirty.add(connection)
