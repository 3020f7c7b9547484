"""The HTTP/2 lane: Hypercorn and a Quart-Trio app, for what the HTTP/1 lane does not speak (HTTP/2 by prior knowledge).

It serves the same routes and handlers; a request costs about fifty hot ones, so data belongs into the other lane. A
socket comes with the bytes already read, which are given to Hypercorn first (h2.py).

An SSE stream is a response of the app. A WebSocket is none of its business: the bytes of its stream go to the same
code as those of an HTTP/1.1 connection that was upgraded.

WorkerContext and Lifespan are Hypercorn's internals: the version is pinned, and tests/e2e run the whole contract here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from msgspec import structs
from quart import Response as QuartResponse
from quart import request as current
from quart_trio import QuartTrio

from topics import limits
from topics.actors import messages
from topics.errors import ApiError, invalid
from topics.gateway.access_log import AccessLog
from topics.gateway.admission.budget import Budget
from topics.gateway.admission.places import Places
from topics.gateway.api.routes import Route, Routes
from topics.gateway.api.topics import Handlers, shutting_down, went_wrong
from topics.gateway.api.types import Call, Outcome, Request, Response, error_response
from topics.gateway.api.watch import Watches
from topics.gateway.auth import Guard, too_many_in_flight
from topics.gateway.calls import Calls
from topics.gateway.compression import gunzip, gzip, too_large
from topics.gateway.http1 import head
from topics.gateway.http2.h2 import Server, Tunnel
from topics.gateway.http2.outlets import ColdOutlet, SocketOutlet
from topics.gateway.http2.unread import Unread
from topics.gateway.large.answer import LargeAnswer, is_large
from topics.gateway.large.append import LargeAppend
from topics.gateway.large.decoder import opened
from topics.gateway.origins import Origins, Visit
from topics.gateway.streams.registry import Stream
from topics.keys import Key
from topics.settings import Settings
from topics.shm.usage import Meter, Slots

_LIFE = "topics.life"  # where a request finds its own in its ASGI scope
_UNREAD = "topics.unread"  # and what waits for its connection, in the state there
_PUSHED_BYTES = 64 * limits.KIB  # of an answer, given to its stream at once: what that holds is held twice
_TURN_BYTES = 4 * limits.KIB  # what one connection may bring before others get their turn: frames can be very small
_HEARD_BYTES = 2 * limits.KIB  # of a WebSocket, at once: of the smallest frames these take some milliseconds
_COSTLY_NS = 200_000  # so long, and others get their turn
_DISCARD_S = 30.0  # how long the rest of a body that is too large may take


class _Life:
    """A request, from its head until its last byte is with the socket or its client is gone."""

    def __init__(self, scope: trio.CancelScope, id: int, budget: Budget, unread: Unread | None = None) -> None:
        self._budget = budget
        self.unread = unread or Unread(budget)  # of its connection; a tunnel has its own pace
        self.again = False  # the client can ask again without harm
        self._owed = 0  # bytes of its answer
        self.scope = scope
        self.abort = scope.cancel
        self.id = id
        self.started_ns = time.perf_counter_ns()
        self.number = 0  # of its route
        self.slot = 0  # the key whose slot it holds
        self.key: int | str = 0  # for the access log: the number or the name of the key that it shows
        self.booked = 0  # bytes of its body, in the budget
        self.peer: tuple[str, int] | None = None
        self.target = ""
        self.hosts: list[bytes] = []
        self.outlet: ColdOutlet | None = None  # if the answer is a stream
        self.waits = False  # for an answer
        self.answered = False  # the answer is made, and compressed if it is to be
        self._answered = trio.Event()
        self._response: Response | None = None
        self._over = False

    @property
    def gone(self) -> bool:
        return self._over

    def let_go(self) -> None:
        """Its body is read."""
        self._budget.give(self.booked)
        self.booked = 0

    def finish(self, value: Response) -> None:
        self.waits = False
        if self._over:
            if value.stream is not None:
                value.stream.discard()
            return
        self._response = self._taken(value)
        self._answered.set()

    def _taken(self, value: Response) -> Response | None:
        """None: too much waits for its connection already."""
        if value.stream is not None:
            return value  # which has a backlog of its own
        size = len(value.body)
        if self.again:
            if size > limits.SMALL_BODY_BYTES and self.unread.full:
                return None
            if not self._budget.takes_answer(size):
                value = error_response(self._budget.refusal())
        self._owed = len(value.body) + limits.H2_STREAM_BYTES
        self.unread.settle(0, self._owed)
        return value

    async def wait_answered(self) -> Response | None:
        """None: it is to be asked again."""
        await self._answered.wait()
        response = self._response
        if response is None:
            self._answered = trio.Event()
        else:
            self._response = structs.replace(response, body=b"", tail=b"", packed=b"")  # a large one is kept once
        return response

    def end(self) -> None:
        """A stream that did not get to its client, or comes when that is gone, is given back."""
        self._over = True
        self.unread.settle(self._owed, 0)
        self._owed = 0
        if self.outlet is not None:
            self.outlet.close()
        elif self._response is not None and self._response.stream is not None:
            self._response.stream.discard()


class _Packing:
    """Waits until a large answer is compressed."""

    gone = False  # when its client is, the job is dropped

    def __init__(self, life: _Life) -> None:
        self.abort = life.abort
        self.done = trio.Event()

    def finish(self, value: Response) -> None:
        self.done.set()


class _PushedBack:
    """A socket stream whose first bytes were read by somebody else. What Hypercorn needs of a stream, no more."""

    def __init__(self, sock: socket.socket, first: bytes) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._first = first
        self.socket = self._stream.socket

    async def receive_some(self, most: int) -> bytes:
        most = min(most, _TURN_BYTES)
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
        self,
        *,
        settings: Settings,
        routes: Routes,
        handlers: Handlers,
        calls: Calls,
        watches: Watches,
        guard: Guard,
        prefix: str,
        slots: Slots | None,
        meter: Meter | None,
        access: AccessLog | None,
        budget: Budget | None = None,
        places: Places | None = None,
    ) -> None:
        self._budget = budget or Budget.of(settings)
        self._places = places
        self._prefix = prefix
        self._slots = slots
        self._meter = meter
        self._access = access
        self._settings = settings
        self._guard = guard
        self._origins = Origins(settings)
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
        self._sockets, self._arrivals = trio.open_memory_channel[tuple[socket.socket, bytes]](settings.max_connections)
        self.connections = self.requests = 0
        self.outlets: set[ColdOutlet] = set()  # of open streams
        self._servers: set[Server] = set()
        self._lives: set[_Life] = set()
        self._heard = trio.Lock()  # the WebSocket whose frames are read
        self._retiring = False

    @property
    def unanswered(self) -> int:
        return sum(not life.answered for life in self._lives)

    def retire(self) -> None:
        """Clients are told to go on elsewhere, each when what it asked is answered."""
        self._retiring = True
        for server in self._servers:
            server.retire()

    def forget_counters(self) -> None:
        """They belong to another process now."""
        self._meter = self._slots = None

    def hand_over(self, sock: socket.socket, first: bytes) -> None:
        """Take a connection from the HTTP/1 lane; never blocks."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.STREAM_TIMEOUT_MS)
        try:
            self._sockets.send_nowait((sock, first))
            self.connections += 1
        except trio.WouldBlock:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        if self._places is not None:
            self._places.give(sock)
        sock.close()

    async def run(self) -> None:
        app = ASGIWrapper(self._app())
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
        try:
            stream = _PushedBack(sock, first)
            unread = Unread(self._budget)
            state = {**state, _UNREAD: unread}
            server = Server(
                app,
                self._config,
                context,
                ConnectionState(state),
                stream,
                serve_tunnel=self._serve_tunnel,
                budget=self._budget,
                turn_away=self._turn_away,
                unread=unread,
                patience_s=self._settings.body_timeout_ms / 1_000,
                rate=self._settings.min_body_rate,
            )
            self._servers.add(server)
            if self._retiring:
                server.retire()
            try:
                await server
            finally:
                self._servers.discard(server)
        except Exception as error:  # one connection's fault is its own
            self._calls.on_fault(error, 0)
        finally:
            self.connections -= 1
            self._close(sock)
            self.on_closed()

    @staticmethod
    def on_closed() -> None:
        """A connection has ended."""

    @staticmethod
    def flush() -> None:
        """See that what was asked goes out."""

    def _app(self) -> Any:
        app = QuartTrio("topics.gateway.http2.lane")
        app.config["MAX_CONTENT_LENGTH"] = None  # counted in _body, which goes on reading
        app.config["BODY_TIMEOUT"] = None
        app.config["RESPONSE_TIMEOUT"] = None

        # Quart's own routing never runs: one table serves both lanes.
        @app.before_request  # type: ignore[untyped-decorator]
        async def serve() -> QuartResponse:
            life = current.scope[_LIFE]
            response = await self._answer(life)
            gzipped = current.method != "HEAD" and head.accepts_gzip(b",".join(_headers("accept-encoding")))
            if gzipped and is_large(response):
                await self._pack(life, response)
            own = head.valid_request_id([value.encode("latin-1") for value in current.headers.getlist("x-request-id")])
            self._note(life, response, own, current.scope["method"], life.target)
            response = structs.replace(response, headers=(*response.headers, self._id_header(life, own)))
            self._give_slot(life)  # before the answer is out: whoever has it may ask again
            if response.stream is not None:
                return self._stream(life, response.stream, response.headers)
            return _to_quart(response, gzipped)

        async def live(scope: dict[str, Any], receive: Any, send: Any) -> None:
            with trio.CancelScope() as cancel_scope, self._life(cancel_scope, scope["state"][_UNREAD]) as life:
                life.target = _target(scope)
                life.peer = scope.get("client")
                life.hosts = [value for name, value in scope["headers"] if name == b"host"]
                # Quart takes targets and hosts apart, and fails on some before it asks us. We read them ourselves.
                kept = [(name, value) for name, value in scope["headers"] if name != b"host"]
                plain = {"path": "/", "raw_path": b"/", "query_string": b"", "headers": [(b"host", b"topics"), *kept]}
                await app({**scope, **plain, _LIFE: life}, receive, send)

        return live

    @contextmanager
    def _life(self, scope: trio.CancelScope, unread: Unread | None = None) -> Iterator[_Life]:
        life = _Life(scope, self._calls.new_id(), self._budget, unread)
        self._lives.add(life)
        try:
            yield life
        finally:
            self._lives.discard(life)
            life.let_go()
            if life.waits:
                self._calls.abandon(life)
            try:
                life.end()
            except Exception as error:
                self._calls.on_fault(error, life.id)
            self._give_slot(life)
            if life.outlet is not None:
                self.outlets.discard(life.outlet)
            self.flush()

    async def _answer(self, life: _Life) -> Response:
        self.requests += 1
        try:
            try:
                outcome = await self._outcome(life)
            except BaseException:
                life.let_go()
                raise
            if not isinstance(outcome, LargeAppend):
                life.let_go()
            return await self._ask(life, outcome)
        except ApiError as error:
            return error_response(error)
        except Exception as error:  # a bug costs one request
            self._calls.on_fault(error, life.id)
            return error_response(went_wrong())

    def _note(self, life: _Life, response: Response, own: bytes | None, method: str, path: str) -> None:
        """For the counters and the log."""
        life.answered = True
        took_us = (time.perf_counter_ns() - life.started_ns) // 1_000
        if self._meter is not None:
            self._meter.count(life.number, response.status, took_us)
        if self._access is not None:
            self._access.note(
                id=life.id,
                request_id=own,
                method=method,
                path=path.partition("?")[0],
                status=response.status,
                size=len(response.body) + len(response.tail),
                took_us=took_us,
                peer=":".join(map(str, life.peer or ["-"])),
                key=life.key,
            )
            self._access.flush()

    def _id_header(self, life: _Life, own: bytes | None) -> tuple[str, str]:
        return "X-Request-Id", f"{self._prefix}{life.id:x}" if own is None else own.decode()

    def _take_slot(self, life: _Life, key: Key | None) -> None:
        if self._slots is not None and key is not None:
            if not self._slots.take(key.number):
                self._slots.refused()
                raise too_many_in_flight(self._settings.max_inflight_per_key)
            life.slot = key.number

    def _give_slot(self, life: _Life) -> None:
        if life.slot and self._slots is not None:
            self._slots.give(life.slot)
            life.slot = 0

    async def _ask(self, life: _Life, outcome: Outcome | LargeAppend) -> Response:
        asked = False
        while True:
            if isinstance(outcome, Call) and outcome.most:
                await life.unread.wait_room()
                self._budget.spare(outcome)
            elif life.again:
                await life.unread.wait_room()
            life.waits = True
            if isinstance(outcome, LargeAppend):
                self._calls.slices.add(outcome)
            else:
                self._calls.submit(outcome, life, life.id)
            self.flush()
            if life.again and not asked and isinstance(outcome, Call) and outcome.timeout_ms:
                life.unread.let_go_on()  # its answer may be long in coming
            response = await life.wait_answered()
            if response is not None:
                return response
            asked = True

    async def _pack(self, life: _Life, response: Response) -> None:
        """Compress a large answer in slices."""
        packing = _Packing(life)
        self._calls.slices.add(LargeAnswer(packing, response))
        self.flush()
        try:
            await packing.done.wait()
        finally:
            self._calls.slices.drop(packing)

    async def _body(self, life: _Life, most: int, *, keep: bool) -> bytearray:
        """The whole body. One that is too large, that there is no memory for, or that is not wanted, is read on and
        dropped: many a client does not look for an answer before it has sent everything."""
        body, size, give_up, refused = bytearray(), 0, 0.0, False
        timeout_s = self._settings.body_timeout_ms / 1_000
        began = trio.current_time()
        try:
            with trio.fail_after(timeout_s) as scope:
                async for part in current.body:
                    now = trio.current_time()
                    scope.deadline = now + timeout_s
                    size += len(part)
                    if now - began > timeout_s and size < (now - began) * self._settings.min_body_rate:
                        raise trio.TooSlowError
                    if size <= most:
                        if keep and not self._budget.settle(life.booked, size):
                            keep, refused = False, True
                            body.clear()
                            self._budget.give(life.booked)
                            life.booked = 0
                        if keep:
                            body += part
                            life.booked = size
                    elif (give_up := give_up or now + _DISCARD_S) < now:
                        break
        except trio.TooSlowError:
            raise ApiError("request_timeout", "the body did not arrive in time") from None
        life.started_ns = time.perf_counter_ns()
        if size > most:
            raise too_large(most)
        if refused:
            raise self._budget.refusal()
        return body

    def _admit(self, life: _Life) -> tuple[Route, Key | None]:
        if len(life.target) > limits.MAX_URI_BYTES:
            raise ApiError("uri_too_long", f"the request target has more than {limits.MAX_URI_BYTES} bytes")
        visit = Visit(life.hosts, b",".join(_headers("sec-fetch-site")), b",".join(_headers("origin")))
        route = self._origins.find(self._routes, current.scope["method"], life.target, visit)
        life.number, life.again = route.number, route.again
        return route, self._owner(life, current.scope["method"], route, visit, _headers("authorization"))

    def _owner(
        self, life: _Life, method: str, route: Route, visit: Visit, authorization: Sequence[bytes]
    ) -> Key | None:
        try:
            self._origins.admit(method, route, visit)
            key = self._guard.admit(route, authorization)
        except ApiError:
            if self._access is not None:
                life.key = self._guard.shown_by(route, authorization)
            raise
        life.key = 0 if key is None else key.number
        return key

    async def _outcome(self, life: _Life) -> Outcome | LargeAppend:
        try:
            route, owner = self._admit(life)
        except ApiError:
            await self._body(life, self._settings.max_body_bytes, keep=False)
            raise
        body: bytes | bytearray = await self._body(life, route.most, keep=route.takes_body)
        if (refusal := self._guard.refusal(owner)) is not None:
            raise refusal  # the key has ended while the body came
        if self._handlers.draining and not route.always:
            raise shutting_down()
        self._take_slot(life, owner)
        if body:
            head.check_content_type(_header("content-type"))
        gzipped, large = head.is_gzipped(b",".join(_headers("content-encoding"))), None
        if route.large:
            body, large = opened(body, self._settings, gzipped=gzipped, most=route.most)
        elif gzipped and body:
            body = gunzip(body, most=route.most)
        try:
            key = _header("idempotency-key").decode() if "idempotency-key" in current.headers else None
        except UnicodeDecodeError:
            raise invalid("the request target and header values must be valid text") from None
        request = Request(route.name, route.shard, route.query, body, key, life.started_ns, key=owner)
        if route.streams or route.looks:
            request.headers = {name.encode("latin-1"): b",".join(_headers(name)) for name in _names()}
        if large is not None:
            return LargeAppend(self._handlers, self._calls, life, request, large)
        return route.handler(request)

    def _turn_away(self, given: dict[bytes, bytes]) -> Response | None:
        """What to answer to a request for which there is no memory. None: it is served all the same."""
        target, method = given.get(b":path", b"").decode("latin-1"), given[b":method"].decode("latin-1")
        life = _Life(trio.CancelScope(), self._calls.new_id(), self._budget)
        try:
            route = self._routes.find(method, target)
        except ApiError:
            pass
        else:
            if route.always:
                return None
            life.number = route.number
        self.requests += 1
        response = error_response(self._budget.refusal())
        own = head.valid_request_id([given[b"x-request-id"]] if b"x-request-id" in given else [])
        self._note(life, response, own, method, target)
        response.headers += (self._id_header(life, own),)
        return response

    # --- streams ---

    def _stream(self, life: _Life, stream: Stream, headers: tuple[tuple[str, str], ...]) -> QuartResponse:
        """An SSE stream: what it writes, as it writes it."""
        outlet = self._open(life, ColdOutlet(stream, life.scope))

        async def body() -> AsyncIterator[bytes]:
            try:
                stream.start(outlet, b"")
                self.flush()
                while (data := await outlet.take()) is not None:
                    yield data
                    outlet.taken(len(data))
                    self.flush()
            except Exception as error:  # one stream's fault is its own
                self._calls.on_fault(error, life.id)

        kept = {name: value for name, value in headers if name not in ("Connection", "Content-Type")}
        return QuartResponse(body(), headers=kept, content_type="text/event-stream; charset=utf-8")

    def _open(self, life: _Life, outlet: ColdOutlet) -> ColdOutlet:
        life.outlet = outlet
        self.outlets.add(outlet)
        return outlet

    async def _serve_tunnel(self, tunnel: Tunnel) -> None:
        self.requests += 1
        try:
            with self._life(tunnel.scope) as life:
                try:
                    response = await self._ask(life, self._open_socket(life, tunnel))
                except ApiError as error:
                    response = error_response(error)
                given = tunnel.headers.get(b"x-request-id")
                own = head.valid_request_id([] if given is None else [given])
                self._note(life, response, own, tunnel.method, tunnel.target)
                self._give_slot(life)
                response.headers += (self._id_header(life, own),)
                if response.stream is None:
                    tunnel.scope.deadline = trio.current_time() + limits.SLOW_CLOSE_MS / 1_000
                    await tunnel.answer(response.status, _lower(response.headers), bytes(response.body))
                else:
                    await self._talk(life, tunnel, response.stream, _lower(response.headers[-1:])[1:])
        except Exception as error:  # one stream's fault is its own
            self._calls.on_fault(error, 0)

    def _open_socket(self, life: _Life, tunnel: Tunnel) -> Outcome:
        """What the handshake is over HTTP/1.1: the same refusals, in the same order."""
        if tunnel.refusal is not None:
            raise tunnel.refusal
        headers = tunnel.headers
        visit = Visit([headers[b"host"]], headers.get(b"sec-fetch-site", b""), headers.get(b"origin", b""))
        if tunnel.target.partition("?")[0] != "/v0/ws":
            self._origins.find(self._routes, "CONNECT", tunnel.target, visit)
        route = self._origins.find(self._routes, "GET", tunnel.target, visit)
        life.number = route.number
        given = [headers[b"authorization"]] if b"authorization" in headers else []
        key = self._owner(life, "GET", route, visit, given)
        if self._handlers.draining:
            raise shutting_down()
        if tunnel.protocol != b"websocket":
            raise ApiError("upgrade_required", "this is a WebSocket endpoint: connect with a WebSocket client")
        if tunnel.headers.get(b"sec-websocket-version") != b"13":
            raise ApiError("upgrade_required", "only WebSocket version 13 is spoken here")
        self._take_slot(life, key)

        def render(opened: messages.StreamOpened, body: bytes | memoryview) -> Response:
            return Response(200, b"", stream=self._watches.new_socket(opened, key))

        return self._watches.open_socket(render, key)

    async def _talk(self, life: _Life, tunnel: Tunnel, stream: Stream, headers: list[tuple[bytes, bytes]]) -> None:
        outlet = self._open(life, SocketOutlet(stream, tunnel))

        async def received(data: bytes) -> None:
            """Frames can be very small: some, then others get their turn, and of all sockets that send such frames one
            at a time."""
            for at in range(0, len(data), _HEARD_BYTES):
                async with self._heard:
                    started_ns = time.perf_counter_ns()
                    stream.received(data[at : at + _HEARD_BYTES])
                    self.flush()
                    if time.perf_counter_ns() - started_ns > _COSTLY_NS:
                        await trio.lowlevel.checkpoint()

        def received_end() -> None:
            if not outlet.closing:  # otherwise it has said goodbye, and waits for ours
                stream.received_end()
                self.flush()

        await tunnel.accept(headers)
        stream.start(outlet, b"")
        await tunnel.listen(received, received_end)
        if tunnel.ended.is_set():
            received_end()
        self.flush()
        while (data := await outlet.take()) is not None:
            await tunnel.send(data)
            outlet.taken(len(data))
            self.flush()
        await tunnel.end()


def _target(scope: dict[str, Any]) -> str:
    path: str = scope["raw_path"].decode("latin-1").partition("?")[0]
    query: str = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _headers(name: str) -> list[bytes]:
    return [value.encode("latin-1") for value in current.headers.getlist(name)]


def _header(name: str) -> bytes:
    """The last one counts, as in the other lane."""
    return _headers(name)[-1] if name in current.headers else b""


def _names() -> set[str]:
    return {str(name).lower() for name, _ in current.headers}


def _lower(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    """As HTTP/2 wants them."""
    given = [("Content-Type", "application/json"), *headers]
    return [(name.lower().encode(), value.encode()) for name, value in given if name != "Upgrade"]


def _to_quart(response: Response, gzipped: bool) -> QuartResponse:
    size = len(response.body) + len(response.tail)
    headers = dict(response.headers)
    headers.pop("Upgrade", None)  # HTTP/2 has no such header
    content_type = headers.pop("Content-Type", "application/json")
    if current.method == "HEAD":
        bodiless = QuartResponse(b"", status=response.status, headers=headers, content_type=content_type)
        bodiless.headers["Content-Length"] = str(size)  # now: a body of no bytes has just said 0
        return bodiless
    if gzipped and size >= limits.GZIP_MIN_BYTES:
        body = response.packed or gzip(b"".join((response.body, response.tail)))
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    else:
        body = b"".join((response.body, response.tail))
    if len(body) > _PUSHED_BYTES:
        headers["Content-Length"] = str(len(body))
        return QuartResponse(_pushed(body), status=response.status, headers=headers, content_type=content_type)
    return QuartResponse(body, status=response.status, headers=headers, content_type=content_type)


async def _pushed(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), _PUSHED_BYTES):
        yield body[at : at + _PUSHED_BYTES]
