"""A raw HTTP/2 connection by prior knowledge: frames when the test wants them, several streams at a time."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

TIMEOUT_S = 30.0


class Stream:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self.reset = False


class H2Wire:
    def __init__(
        self, port: int, *, window: int | None = None, split_at: int = 0, between: Callable[[], object] | None = None
    ) -> None:
        """`window` is what the server may send per stream; `between` runs after the first `split_at` bytes went out."""
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        if window is not None:
            self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.streams: dict[int, Stream] = {}
        self.goodbye = False  # the server has sent GOAWAY or closed
        self.last_stream: int | None = None  # the last one that a GOAWAY without an error says was served
        first = self.h2.data_to_send()
        self.sock.sendall(first[:split_at])
        if between is not None:
            between()
        self.sock.sendall(first[split_at:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def flush(self) -> None:
        self.sock.sendall(self.h2.data_to_send())

    # --- sending ---

    def open(
        self,
        method: str,
        path: str,
        *headers: tuple[str, str | bytes],
        end: bool = False,
        authority: str | bytes = "localhost",
    ) -> int:
        """Send the head of a request; the stream id."""
        stream = self.h2.get_next_available_stream_id()
        self.streams[stream] = Stream()
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", authority)]
        self.h2.send_headers(stream, [*pseudo, *headers], end_stream=end)
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, *, end: bool) -> None:
        """Send body bytes, waiting for the peer's window where needed. Stops when the stream was answered or reset."""
        while data and not (self.streams[stream].ended or self.streams[stream].reset or self.goodbye):
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(data))
            if room == 0:
                self.receive()
                continue
            self.h2.send_data(stream, data[:room])
            data = data[room:]
            self.flush()
        if end and not data:
            try:
                self.h2.end_stream(stream)
                self.flush()
            except h2.exceptions.StreamClosedError:
                pass

    def ask(self, method: str, path: str, body: bytes | None = None) -> int:
        """A whole request; the stream id."""
        if body is None:
            return self.open(method, path, end=True)
        stream = self.open(method, path, ("content-type", "application/json"))
        self.send(stream, body, end=True)
        return stream

    def cancel(self, stream: int) -> None:
        self.h2.reset_stream(stream, error_code=8)
        self.flush()

    # --- receiving ---

    def receive(self, *, grant: bool = True) -> bool:
        """Take in what comes next; False: nothing more comes. `grant` gives the window back at once."""
        data = self.sock.recv(1 << 16)
        if not data:
            self.goodbye = True
            return False
        for event in self.h2.receive_data(data):
            number = getattr(event, "stream_id", None)
            stream = self.streams.get(number) if number else None
            if isinstance(event, h2.events.ConnectionTerminated):
                self.goodbye = True
                self.last_stream = event.last_stream_id if event.error_code == 0 else None
            elif number is None or stream is None:
                continue
            elif isinstance(event, h2.events.ResponseReceived):
                stream.headers = dict(event.headers)  # type: ignore[arg-type]
            elif isinstance(event, h2.events.DataReceived):
                stream.body += event.data
                if grant and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, number)
            elif isinstance(event, h2.events.StreamEnded):
                stream.ended = True
            elif isinstance(event, h2.events.StreamReset):
                stream.reset = True
        self.flush()
        return True

    def finish(self, number: int) -> Stream:
        """Wait for the end of a stream's answer."""
        stream = self.streams[number]
        while not stream.ended:
            if stream.reset:
                raise EOFError("the server reset the stream")
            if not self.receive():
                raise EOFError("the server closed the connection")
        return stream

    def is_alive(self) -> bool:
        """Take in what has come meanwhile; False: the server has said goodbye."""
        while not self.goodbye and select.select([self.sock], [], [], 0)[0]:
            self.receive()
        return not self.goodbye
