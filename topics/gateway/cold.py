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
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from quart import Response as QuartResponse
from quart import request as current
from quart_trio import QuartTrio

from topics import limits
from topics.errors import ApiError, invalid
from topics.gateway import head
from topics.gateway.calls import Calls
from topics.gateway.exchange import Request, Response, error_response
from topics.gateway.handlers import Handlers, shutting_down
from topics.gateway.routes import Routes
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
    def __init__(self, *, settings: Settings, routes: Routes, handlers: Handlers, calls: Calls) -> None:
        self._settings = settings
        self._routes = routes
        self._handlers = handlers
        self._calls = calls
        self._config = Config()
        self._config.accesslog = self._config.errorlog = None
        self._config.keep_alive_timeout = settings.idle_timeout_ms / 1_000
        self._config.keep_alive_max_requests = 2**62
        self._config.h2_max_header_list_size = limits.MAX_HEAD_BYTES
        self._config.include_server_header = False
        self._sockets, self._arrivals = trio.open_memory_channel[tuple[socket.socket, bytes]](limits.MAX_CONNECTIONS)
        self._silent: dict[tuple[Any, ...], trio.CancelScope] = {}  # connections without a request so far
        self.connections = 0
        self.requests = 0

    def hand_over(self, sock: socket.socket, first: bytes) -> None:
        """Take a connection from the hot lane; never blocks."""
        try:
            self._sockets.send_nowait((sock, first))
            self.connections += 1
        except trio.WouldBlock:
            sock.close()

    async def run(self) -> None:
        app = ASGIWrapper(self._app())  # type: ignore[no-untyped-call]
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

    def _app(self) -> QuartTrio:
        app = QuartTrio("topics.gateway.cold")
        app.config["MAX_CONTENT_LENGTH"] = None  # counted in _body, which goes on reading
        app.config["BODY_TIMEOUT"] = None
        app.config["RESPONSE_TIMEOUT"] = None

        # Quart's own routing never runs: one table serves both lanes.
        @app.before_request  # type: ignore[untyped-decorator]
        async def serve() -> QuartResponse:
            return _to_quart(await self._answer(), head.accepts_gzip(_header("accept-encoding")))

        return app

    async def _answer(self) -> Response:
        self.requests += 1
        if (scope := self._silent.pop(tuple(current.scope["client"])[:2], None)) is not None:
            scope.deadline = math.inf
        try:
            waiting = _Waiting()
            self._calls.submit(await self._outcome(), waiting)
            self._calls.flush()
            try:
                await waiting.done.wait()
            except trio.Cancelled:
                self._calls.abandon(waiting)
                self._calls.flush()
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
        return route.handler(Request(route.name, route.shard, route.query, body, key, time.perf_counter_ns()))


def _header(name: str) -> bytes:
    return str(current.headers.get(name, "")).encode("latin-1")


def _to_quart(response: Response, gzipped: bool) -> QuartResponse:
    body = b"".join((response.body, response.tail))
    headers = dict(response.headers)
    if current.method == "HEAD":
        headers["Content-Length"] = str(len(body))
        return QuartResponse(b"", status=response.status, headers=headers, content_type="application/json")
    if gzipped and len(body) >= limits.GZIP_MIN_BYTES:
        body = head.gzip(body)
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return QuartResponse(body, status=response.status, headers=headers, content_type="application/json")
