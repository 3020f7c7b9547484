"""A WebSocket over HTTP/2: RFC 8441, one stream opened by an extended CONNECT.

Several sockets and plain requests share one connection (`H2Sockets`), so what comes for others while one is read stays
with its stream. The frames inside are those of RFC 6455, masked as over HTTP/1.1.
"""

from __future__ import annotations

import time

import h2.exceptions
from h2.settings import SettingCodes

from .h2wire import H2Wire, Stream
from .sockets import (
    ABNORMAL,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    Closed,
    Conversation,
    RawFrame,
    close_frame,
    close_reason,
    frame,
    take_frame,
    text_frame,
)


class H2Sockets(H2Wire):
    """A connection on which the server has said that it knows extended CONNECT."""

    def __init__(self, port: int, *, window: int | None = None) -> None:
        super().__init__(port, window=window)
        while not self.h2.remote_settings.get(SettingCodes.ENABLE_CONNECT_PROTOCOL):
            assert self.receive(), "closed before its settings"

    def connect(
        self,
        *headers: tuple[str, str],
        path: str = "/v0/ws",
        protocol: str = "websocket",
        authority: str = "localhost",
        version: str | None = "13",
    ) -> H2Socket:
        """Send the request; nothing is waited for."""
        number = self.h2.get_next_available_stream_id()
        self.streams[number] = Stream()
        pseudo = [(":method", "CONNECT"), (":protocol", protocol), (":scheme", "http"), (":path", path)]
        given = [] if version is None else [("sec-websocket-version", version)]
        self.h2.send_headers(number, [*pseudo, (":authority", authority), *given, *headers])
        self.flush()
        return H2Socket(self, number)

    def socket(self, *headers: tuple[str, str]) -> H2Socket:
        """An open one."""
        opened = self.connect(*headers)
        assert opened.status() == 200, opened.stream.headers
        return opened


class H2Socket(Conversation):
    def __init__(self, wire: H2Sockets, number: int) -> None:
        super().__init__()
        self.wire = wire
        self.number = number
        self.stream = wire.streams[number]
        self.pongs: list[bytes] = []
        self._closing = False  # we have sent a close, which ends what we may send

    def status(self) -> int:
        while ":status" not in self.stream.headers:
            if self.stream.reset or not self.wire.receive():
                raise Closed(ABNORMAL, "before the answer")
        return int(self.stream.headers[":status"])

    # --- frames ---

    def send(self, *parts: bytes) -> None:
        for part in parts:
            try:
                self.wire.send(self.number, part, end=False)
            except h2.exceptions.StreamClosedError:
                raise Closed(ABNORMAL, "the stream is closed") from None

    def send_text(self, text: str) -> None:
        self.send(text_frame(text))

    def take(self, within_s: float) -> RawFrame:
        deadline = time.monotonic() + within_s
        while (taken := take_frame(self.stream.body)) is None:
            remaining = deadline - time.monotonic()
            if self.stream.ended or self.stream.reset:
                raise Closed(ABNORMAL, "reset" if self.stream.reset else "ended")
            if remaining <= 0:
                raise TimeoutError
            self.wire.sock.settimeout(remaining)
            if not self.wire.receive():
                raise Closed(ABNORMAL, "the connection ended")
        found, self.stream.body = taken
        return found

    def receive_text(self, within_s: float) -> str:
        deadline = time.monotonic() + within_s
        parts: list[bytes] = []
        while True:
            found = self.take(max(deadline - time.monotonic(), 0))
            if found.opcode == PING:
                self.send(frame(PONG, found.payload))
            elif found.opcode == PONG:
                self.pongs.append(found.payload)
            elif found.opcode == CLOSE:
                self._answer_close(found.payload)
                raise close_reason(found.payload)
            else:
                assert (found.opcode == CONTINUATION) == bool(parts), found
                parts.append(found.payload)
                if found.fin:
                    return b"".join(parts).decode()

    def _answer_close(self, payload: bytes) -> None:
        if self._closing or self.stream.ended or self.stream.reset:
            return
        self._closing = True
        try:
            self.send(frame(CLOSE, payload))
        except Closed:
            pass  # its side may be over already

    # --- ending ---

    def close_code(self) -> int:
        """The code the server closes with, and that it ends the stream too."""
        code = self.wait_closed().code
        while not (self.stream.ended or self.stream.reset) and self.wire.receive():
            pass
        return code

    def end(self, code: int = 1000) -> int:
        """The closing handshake, begun by us; the code that the server answered."""
        self._closing = True
        self.send(close_frame(code))
        return self.close_code()

    def cancel(self) -> None:
        """The stream is reset: the client is gone, the connection is not."""
        self.wire.cancel(self.number)

    def close(self) -> None:
        if not (self.stream.ended or self.stream.reset or self.wire.goodbye):
            try:
                self.cancel()
            except (h2.exceptions.ProtocolError, OSError):
                pass
