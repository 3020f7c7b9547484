"""The cold lane: Hypercorn and a Quart-Trio app, for what the hot lane does not speak (HTTP/2 by prior knowledge).

It serves the same routes and handlers; a request costs about fifty hot ones, so data belongs into the other lane. A
socket comes with the bytes already read, which are given to Hypercorn first.

TCPServer, WorkerContext and Lifespan are Hypercorn's internals: the version is pinned, and tests/e2e run the whole
contract here.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import trio
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypercorn import protocol
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.protocol import h2
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, StreamBuffer
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from quart import Response as QuartResponse
from quart import request as current
from quart import websocket
from quart_trio import QuartTrio

from topics import limits
from topics.actors import messages
from topics.errors import ApiError, invalid
from topics.gateway import head
from topics.gateway.calls import Calls
from topics.gateway.exchange import Request, Response, error_response
from topics.gateway.handlers import Handlers, shutting_down
from topics.gateway.routes import Routes
from topics.gateway.watches import Watches
from topics.settings import Settings

_DISCARD_S = 30.0  # how long the rest of a body that is too large may take


class _Waiting:
    """The sink of a request whose task waits for the answer."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.response: Response | None = None

    def finish(self, value: Response) -> None:
        self.response = value
        self.done.set()


_SCOPE = "topics.cancel_scope"


def _cancellable(app: Any) -> Any:
    """Each request in a cancel scope of its own, which it finds in its ASGI scope."""

    async def serve(scope: dict[str, Any], receive: Any, send: Any) -> None:
        with trio.CancelScope() as cancel_scope:
            await app({**scope, _SCOPE: cancel_scope}, receive, send)

    return serve


class _PacedBuffer(StreamBuffer):  # type: ignore[misc]
    """Hypercorn 0.18 lets a writer go on whenever less than half a buffer was taken from it, and a client that grants
    no window takes nothing: everything written to it piles up. What is left in the buffer is what counts."""

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError()
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class _Resetting(h2.H2Protocol):  # type: ignore[misc]
    """A stream that ends with data its client does not take is reset; otherwise it would stay open over there."""

    async def _close_stream(self, stream_id: int) -> None:
        await super()._close_stream(stream_id)
        unsent = self.stream_buffers.get(stream_id)
        if unsent is not None and unsent.buffer:
            await unsent.close()
            try:
                self.connection.reset_stream(stream_id, error_code=ErrorCodes.CANCEL)
                await self._flush()
            except ProtocolError:
                pass  # the client was quicker


h2.StreamBuffer = _PacedBuffer
protocol.H2Protocol = _Resetting


class _PushedBack:
    """A socket stream whose first bytes were read by somebody else. What Hypercorn needs of a stream, no more."""

    def __init__(self, sock: socket.socket, first: bytes) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._first = first
        self.socket = self._stream.socket

    async def receive_some(self, most: int) -> bytes:
        if self._first:
            data, self._first = self._first[:most], self._first[most:]
            return data
        return bytes(await self._stream.receive_some(most))

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class ColdLane:
    def __init__(
        self, *, settings: Settings, routes: Routes, handlers: Handlers, calls: Calls, watches: Watches
    ) -> None:
        self._settings = settings
        self._routes = routes
        self._handlers = handlers
        self._calls = calls
        self._watches = watches
        self._config = Config()
        self._config.accesslog = self._config.errorlog = None
        self._config.keep_alive_timeout = settings.idle_timeout_ms / 1_000
        self._config.keep_alive_max_requests = 2**62
        self._config.h2_max_header_list_size = limits.MAX_HEAD_BYTES
        self._config.include_server_header = False
        self._config.websocket_ping_interval = limits.WS_PING_MS / 1_000
        self._sockets, self._arrivals = trio.open_memory_channel[tuple[socket.socket, bytes]](limits.MAX_CONNECTIONS)
        self._silent: dict[tuple[Any, ...], trio.CancelScope] = {}  # connections without a request so far
        self.connections = 0
        self.requests = 0
        self.outlets: set[ColdOutlet] = set()  # of open streams

    def hand_over(self, sock: socket.socket, first: bytes) -> None:
        """Take a connection from the hot lane; never blocks."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.STREAM_TIMEOUT_MS)
        try:
            self._sockets.send_nowait((sock, first))
            self.connections += 1
        except trio.WouldBlock:
            sock.close()

    async def run(self) -> None:
        app = ASGIWrapper(_cancellable(self._app()))  # type: ignore[no-untyped-call]
        state: dict[str, Any] = {}
        lifespan = Lifespan(app, self._config, state)
        context = WorkerContext(None)
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            async for sock, first in self._arrivals:
                nursery.start_soon(self._serve, app, context, state, sock, first)

    async def _serve(
        self, app: Any, context: WorkerContext, state: dict[str, Any], sock: socket.socket, first: bytes
    ) -> None:
        client = sock.getpeername()[:2]
        try:
            # Hypercorn's own idle timeout starts with the first answer.
            with trio.move_on_after(self._settings.idle_timeout_ms / 1_000) as scope:
                self._silent[client] = scope
                stream: Any = _PushedBack(sock, first)
                await TCPServer(app, self._config, context, ConnectionState(state.copy()), stream)
        except Exception as error:  # one connection's fault is its own
            self.on_fault(error)
        finally:
            self._silent.pop(client, None)
            self.connections -= 1
            sock.close()

    @staticmethod
    def on_fault(error: Exception) -> None: ...

    @staticmethod
    def flush() -> None:
        """See that what was asked goes out."""

    def _app(self) -> QuartTrio:
        app = QuartTrio("topics.gateway.cold")
        app.config["MAX_CONTENT_LENGTH"] = None  # counted in _body, which goes on reading
        app.config["BODY_TIMEOUT"] = None
        app.config["RESPONSE_TIMEOUT"] = None

        # Quart's own routing never runs: one table serves both lanes.
        @app.before_request  # type: ignore[untyped-decorator]
        async def serve() -> QuartResponse:
            response = await self._answer()
            if response.stream is not None:
                return self._stream(response)
            return _to_quart(response, head.accepts_gzip(_header("accept-encoding")))

        @app.websocket("/v0/ws")  # type: ignore[untyped-decorator]
        async def serve_socket() -> Any:
            return await self._serve_socket()

        return app

    async def _answer(self) -> Response:
        self.requests += 1
        if (scope := self._silent.pop(tuple(current.scope["client"])[:2], None)) is not None:
            scope.deadline = math.inf
        try:
            waiting = _Waiting()
            self._calls.submit(await self._outcome(), waiting)
            self.flush()
            try:
                await waiting.done.wait()
            except trio.Cancelled:
                self._calls.abandon(waiting)
                self.flush()
                raise
            assert waiting.response is not None
            return waiting.response
        except ApiError as error:
            return error_response(error)

    async def _body(self) -> bytes:
        """The whole body. One that is too large is read on and dropped: Hypercorn loses the connection, with all
        its other streams, if an answer overtakes the body of its request."""
        most = self._settings.max_body_bytes
        parts: list[bytes] = []
        size = 0
        give_up = 0.0
        try:
            with trio.fail_after(self._settings.body_timeout_ms / 1_000) as scope:
                async for part in current.body:
                    scope.deadline = trio.current_time() + self._settings.body_timeout_ms / 1_000
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    elif (give_up := give_up or trio.current_time() + _DISCARD_S) < trio.current_time():
                        break
        except trio.TooSlowError:
            raise ApiError("request_timeout", "the body did not arrive in time") from None
        if size > most:
            raise head.too_large(most)
        return b"".join(parts)

    async def _outcome(self) -> Any:
        body = await self._body()
        target = current.scope["raw_path"].decode("latin-1")
        if query := current.scope["query_string"]:
            target = f"{target.partition('?')[0]}?{query.decode('latin-1')}"
        if len(target) > limits.MAX_URI_BYTES:
            raise ApiError("uri_too_long", f"the request target has more than {limits.MAX_URI_BYTES} bytes")
        if not target.isascii():
            raise invalid("the request target must be valid text")
        route = self._routes.find(current.method, target)
        if self._handlers.draining:
            raise shutting_down()
        if body:
            if route.takes_body:
                head.check_content_type(_header("content-type"))
            if head.is_gzipped(_header("content-encoding")):
                body = head.gunzip(body, most=self._settings.max_body_bytes)
        try:
            key = _header("idempotency-key").decode() if "idempotency-key" in current.headers else None
        except UnicodeDecodeError:
            raise invalid("the request target and header values must be valid text") from None
        request = Request(route.name, route.shard, route.query, body, key, time.perf_counter_ns())
        if route.streams:
            request.headers = {
                name.lower().encode("latin-1"): value.encode("latin-1") for name, value in current.headers.items()
            }
        return route.handler(request)

    # --- streams ---

    def _stream(self, response: Response) -> QuartResponse:
        """An SSE stream: what it writes, as it writes it."""
        outlet = self._outlet(response.stream, current.scope)

        async def body() -> AsyncIterator[bytes]:
            try:
                response.stream.start(outlet, b"")
                self.flush()
                while (data := await outlet.take()) is not None:
                    yield data
                    outlet.taken(len(data))
                    self.flush()
            finally:
                outlet.close()
                self.flush()

        headers = {name: value for name, value in response.headers if name not in ("Connection", "Content-Type")}
        return QuartResponse(body(), headers=headers, content_type="text/event-stream; charset=utf-8")

    def _outlet(self, stream: Any, scope: Any) -> ColdOutlet:
        outlet = ColdOutlet(stream, scope[_SCOPE])
        self.outlets.add(outlet)
        outlet.on_close = self.outlets.discard
        return outlet

    async def _serve_socket(self) -> Any:
        self.requests += 1
        if (scope := self._silent.pop(tuple(websocket.scope["client"])[:2], None)) is not None:
            scope.deadline = math.inf
        try:
            if self._handlers.draining:
                raise shutting_down()
            headers = {
                name.lower().encode("latin-1"): value.encode("latin-1") for name, value in websocket.headers.items()
            }
            self._watches.check_origin(headers)
            waiting = _Waiting()
            self._calls.submit(self._watches.open_socket(self._unframed), waiting)
            self.flush()
            await waiting.done.wait()
            assert waiting.response is not None
            if waiting.response.stream is None:
                return _to_quart(waiting.response, False, method="GET")
        except ApiError as error:
            return _to_quart(error_response(error), False, method="GET")
        await self._talk(waiting.response.stream)
        return None

    def _unframed(self, opened: messages.StreamOpened, body: bytes | memoryview) -> Response:
        return Response(200, b"", stream=self._watches.new_socket(opened, framed=False))

    async def _talk(self, socket: Any) -> None:
        outlet = self._outlet(socket, websocket.scope)

        async def send() -> None:
            while (text := await outlet.take(whole=True)) is not None:
                await websocket.send(text.decode())
                outlet.taken(len(text))
                self.flush()
            code, reason = outlet.goodbye or (1000, "")
            await websocket.close(code, reason)
            nursery.cancel_scope.cancel()

        async def receive() -> None:
            while True:
                await outlet.may_receive()
                message = await websocket.receive()
                if isinstance(message, bytes):
                    outlet.close_with(1003, "commands are JSON text")
                    outlet.finish()
                    return
                socket.received_message(message)
                self.flush()

        try:
            await websocket.accept()
            socket.start(outlet, b"")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                nursery.start_soon(receive)
        finally:
            outlet.close()
            self.flush()


class ColdOutlet:
    """Where a stream of this lane writes: a queue that a task empties."""

    def __init__(self, stream: Any, scope: trio.CancelScope) -> None:
        self._stream = stream
        self._scope = scope  # around the request: how a client that does not read is got rid of
        self.on_close: Callable[[ColdOutlet], None] = lambda outlet: None
        self._queue: deque[bytes] = deque()
        self._more = trio.Event()
        self._reading = trio.Event()
        self._reading.set()
        self._closing = False
        self._closed = False
        self.written = 0
        self.sent = 0
        self.goodbye: tuple[int, str] | None = None

    def write(self, data: bytes) -> None:
        self._queue.append(data)
        self.written += len(data)
        self._more.set()

    def finish(self) -> None:
        self._closing = True
        self._more.set()
        self._scope.deadline = trio.current_time() + limits.SLOW_CLOSE_MS / 1_000

    def close_with(self, code: int, reason: str) -> None:
        self.goodbye = (code, reason)

    def abort(self) -> None:
        self._queue.clear()
        self.finish()

    def pause(self) -> None:
        self._reading = trio.Event()

    def resume(self) -> None:
        self._reading.set()

    async def may_receive(self) -> None:
        await self._reading.wait()

    async def take(self, *, whole: bool = False) -> bytes | None:
        """What is to be sent next, one write of it if it must stay whole; None at the end."""
        while not self._queue:
            if self._closing:
                return None
            self._more = trio.Event()
            await self._more.wait()
        if whole:
            return self._queue.popleft()
        data = b"".join(self._queue)
        self._queue.clear()
        return data

    def taken(self, size: int) -> None:
        self.sent += size
        if not self._closing:
            self._stream.drained()

    def close(self) -> None:
        """The connection is gone, or done with."""
        if not self._closed:
            self._closed = True
            self._stream.closed()
            self.on_close(self)


def _header(name: str) -> bytes:
    return str(current.headers.get(name, "")).encode("latin-1")


def _to_quart(response: Response, gzipped: bool, *, method: str | None = None) -> QuartResponse:
    body = b"".join((response.body, response.tail))
    headers = dict(response.headers)
    headers.pop("Upgrade", None)  # HTTP/2 has no such header
    if (method or current.method) == "HEAD":
        headers["Content-Length"] = str(len(body))
        return QuartResponse(b"", status=response.status, headers=headers, content_type="application/json")
    if gzipped and len(body) >= limits.GZIP_MIN_BYTES:
        body = head.gzip(body)
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return QuartResponse(body, status=response.status, headers=headers, content_type="application/json")
