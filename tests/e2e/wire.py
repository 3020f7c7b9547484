"""A raw HTTP/1.1 connection: sends any bytes, reads answers one by one, and tells a close from a silence."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import Self

from .client import Answer

TIMEOUT_S = 30.0


def request(
    method: str = "GET",
    path: str = "/v0/health",
    body: bytes | None = None,
    *,
    headers: tuple[str, ...] = (),
    version: str = "HTTP/1.1",
) -> bytes:
    """A well-formed request; `headers` are added as they are."""
    lines = [f"{method} {path} {version}", "Host: localhost"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, *headers, "", ""]).encode("latin-1")
    return head + (body or b"")


def append_request(topic: str, data: str = "1", **fields: str) -> bytes:
    """An append of one record, as bytes."""
    more = "".join(f',"{name}":{value}' for name, value in fields.items())
    return request("POST", f"/v0/topics/{topic}", f'{{"records":[{{"data":{data}}}]{more}}}'.encode())


def chunked(body: bytes, *sizes: int, end: bytes = b"0\r\n\r\n") -> bytes:
    """The body in chunks of these sizes, the rest in one."""
    parts = []
    at = 0
    for size in (*sizes, len(body)):
        if part := body[at : at + size]:
            parts.append(b"%x\r\n%b\r\n" % (len(part), part))
        at += size
    return b"".join(parts) + end


class Wire:
    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Close with a RST: the client is gone, and the server can know it at once."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    # --- talking ---

    def send(self, *parts: bytes) -> None:
        """Each part goes out by itself."""
        for part in parts:
            self.sock.sendall(part)

    def ask(self, *parts: bytes) -> Answer:
        self.send(*parts)
        return self.answer()

    def _more(self) -> None:
        received = self.sock.recv(1 << 16)
        if not received:
            raise EOFError(f"the server closed; unread: {self._unread[:200]!r}")
        self._unread += received

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer, names in lower case."""
        while b"\r\n\r\n" not in self._unread:
            self._more()
        raw, _, self._unread = self._unread.partition(b"\r\n\r\n")
        status_line, *lines = raw.decode("latin-1").split("\r\n")
        version, status, _ = status_line.split(" ", 2)
        assert version == "HTTP/1.1"
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            assert colon, line
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value.strip()
        return int(status), headers

    def body(self, headers: dict[str, str]) -> bytes:
        size = int(headers["content-length"])
        while len(self._unread) < size:
            self._more()
        body, self._unread = self._unread[:size], self._unread[size:]
        return body

    def answer(self) -> Answer:
        status, headers = self.head()
        return Answer(status=status, headers=headers, raw=self.body(headers))

    def assert_closed(self) -> None:
        """Nothing more comes, and the server's side is closed."""
        assert self._unread == b""
        try:
            assert self.sock.recv(1) == b""
        except ConnectionResetError:
            pass

    def assert_silent(self, for_s: float) -> None:
        """No answer and no close within that time."""
        assert self._unread == b""
        self.sock.settimeout(for_s)
        try:
            received = self.sock.recv(1 << 16)
        except TimeoutError:
            return
        finally:
            self.sock.settimeout(TIMEOUT_S)
        raise AssertionError(f"expected silence, got {received!r}")
