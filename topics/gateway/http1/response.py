"""HTTP/1.1 response bytes."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus

from topics import limits
from topics.gateway.api.types import Response
from topics.gateway.compression import gzip

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Answers:
    """Formats responses; the date is formatted once a second. `prefix` is what ids of requests begin with."""

    def __init__(self, prefix: str = "") -> None:
        self._second = 0
        self._id_line = b"X-Request-Id: " + prefix.encode()
        self.starts: dict[int, bytes] = {}  # by status: everything up to the request's id
        self.named: dict[int, bytes] = {}  # the same with the id's prefix

    def tick(self) -> None:
        second = int(time.time())
        if second != self._second:
            self._second = second
            date = formatdate(second, usegmt=True).encode()
            self.starts = {
                status.value: b"HTTP/1.1 %d %b\r\nDate: %b\r\nContent-Type: application/json\r\n"
                % (status.value, status.phrase.encode(), date)
                for status in HTTPStatus
            }
            self.named = {status: start + self._id_line for status, start in self.starts.items()}

    def _id(self, id: int, request_id: bytes | None) -> bytes:
        return b"%b%x\r\n" % (self._id_line, id) if request_id is None else b"X-Request-Id: %b\r\n" % request_id

    def encode_stream(self, response: Response, *, id: int, request_id: bytes | None) -> bytes:
        """The head of a response that goes on for as long as the connection lives."""
        start = self.starts[response.status].partition(b"Content-Type")[0]
        lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers]
        return b"".join((start, self._id(id, request_id), *lines, b"\r\n"))

    def encode(
        self,
        response: Response,
        *,
        keep_alive: bool,
        gzipped: bool,
        bodiless: bool,
        id: int,
        request_id: bytes | None = None,
    ) -> bytes:
        body, tail = response.body, response.tail
        size = len(body) + len(tail)
        start = self.starts[response.status]
        line = self._id(id, request_id)
        if keep_alive and not response.headers and not bodiless and (not gzipped or size < limits.GZIP_MIN_BYTES):
            return b"".join((start, line, b"Content-Length: %d\r\n\r\n" % size, body, tail))
        if any(name == "Content-Type" for name, _ in response.headers):
            start = start.partition(b"Content-Type")[0]
        lines = [start, line]
        if gzipped and size >= limits.GZIP_MIN_BYTES:
            if not response.packed:
                response.packed = gzip(b"".join((body, tail)))
            body, tail = response.packed, b""
            size = len(body)
            lines.append(b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n")
        for name, value in response.headers:
            lines.append(f"{name}: {value}\r\n".encode("latin-1"))
        if not keep_alive:
            lines.append(b"Connection: close\r\n")
        lines.append(b"Content-Length: %d\r\n\r\n" % size)
        if not bodiless:
            lines.extend((bytes(body), tail))
        return b"".join(lines)
