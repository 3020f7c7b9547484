"""HTTP/2: Hypercorn's, with what we change in it, and the tunnels that carry WebSockets (RFC 8441).

Hypercorn keeps the state and takes the turns; these are its internals, so its version is pinned. Why each override:

    Server.run                    HTTP/2 from the first byte; a connection that is gone takes all its tasks with it
    Server.protocol_send          the idle timeout is a deadline: Hypercorn's is a task, started by whoever ends a
                                  stream, and often cancelled together with that. Bytes once taken from the state
                                  machine are sent, whatever becomes of the task that took them: they may be anybody's
    Connection._create_stream     CONNECT opens a Tunnel; no head that a client can send may end the connection
    Connection._receive           frames that carry nothing and cost us work are paid for; a head that never ends is cut
    Connection._handle_events     data for a stream that is gone is dropped; a tunnel that is paused grants no more of
                                  it; priorities, which RFC 9113 gave up, are not kept (too many ended the connection)
    Connection.stream_send        a stream of ours that ends before it is sent is reset, or it stays open over there
    Connection._close_stream      what its head takes in memory is given back
    Connection._send_data         says when the end of a stream is with the socket
    Connection.handle             nobody goes on waiting for a connection that is gone
    Connection.retire             streams begun so far are answered, those behind them are the client's to send again
                                  elsewhere (GOAWAY says which); Hypercorn would reset them
    PacedBuffer                   a writer waits for its client

For a connection that is gone nothing is sent: Hypercorn may learn of it within a send, and would wait for itself.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote_from_bytes

import trio
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, PriorityUpdated, RequestReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, Data, EndBody, EndData, Request, Response, StreamClosed
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.utils import filter_pseudo_headers, parse_socket_addr
from hyperframe.frame import DataFrame, ExtensionFrame, Frame, PingFrame, PriorityFrame, RstStreamFrame, SettingsFrame
from priority.priority import TooManyStreamsError

from topics import limits
from topics.errors import ApiError, invalid
from topics.gateway.admission.budget import Budget
from topics.gateway.api.types import Response as Answer
from topics.gateway.http2.unread import Unread

_ASCII = bytes(range(128))
_EVENTS = b"text/event-stream"
_LOOK_S = 0.02
_LINGER_S = 2.0  # how long a client may take to end its side of a tunnel when we have ended ours

_U64 = struct.Struct("=Q")
_ACKED_AT = 120  # tcpi_bytes_acked in struct tcp_info, linux/tcp.h
_FIELD_BYTES = 32  # what a header costs beside its name and value (RFC 9113, 6.5.2)

Serve = Callable[["Tunnel"], Awaitable[None]]
TurnAway = Callable[[dict[bytes, bytes]], Answer | None]  # of a head: what is said if there is no memory for it


class Server(TCPServer):  # type: ignore[misc]
    """One connection; whoever gives us its socket has seen the preface."""

    def __init__(
        self,
        *given: Any,
        serve_tunnel: Serve,
        budget: Budget,
        turn_away: TurnAway,
        unread: Unread,
        patience_s: float,
        rate: int,
    ) -> None:
        super().__init__(*given)
        self._budget = budget
        self._turn_away = turn_away
        self._unread = unread
        self._serve_tunnel = serve_tunnel
        self._patience_s = patience_s  # how long a client may take nothing of what waits for it
        self._rate = rate  # what it must take per second after that
        self._sends = False  # the socket has not taken all that it was given ...
        self._pace: Pace | None = None  # ... and how its client takes that, from the first look on
        self._scope = trio.CancelScope()  # around everything that is done for it
        self._retiring = trio.Event()
        self._begun = False  # there is a protocol

    async def protocol_send(self, event: Any) -> None:
        if isinstance(event, RawData):
            with trio.CancelScope(shield=True):
                await self._send(event.data)
        elif isinstance(event, Updated):
            idle_s = self.config.keep_alive_timeout if event.idle else math.inf
            self._scope.deadline = trio.current_time() + idle_s
        else:
            await super().protocol_send(event)

    async def run(self) -> None:
        sock = self.stream.socket
        try:
            client = parse_socket_addr(sock.family, sock.getpeername())
            server = parse_socket_addr(sock.family, sock.getsockname())
        except OSError:
            return  # it has left already
        with self._scope as scope:
            async with TaskGroup() as tasks:
                tasks.spawn(self._watch_reader, tasks)
                given = (self.app, self.config, self.context, tasks, self.state, False, client, server)
                self.protocol = Connection(
                    *given,
                    self.protocol_send,
                    serve_tunnel=self._serve_tunnel,
                    budget=self._budget,
                    turn_away=self._turn_away,
                )
                self._begun = True
                if self._retiring.is_set():
                    self.protocol.retire()
                try:
                    tasks.spawn(self._retire)
                    await self.protocol.initiate()
                    await self.protocol_send(Updated(idle=True))
                    await self._read_data()
                finally:
                    scope.cancel()
                    self.protocol.holds.let_go()
                    await self.stream.aclose()  # a send is shielded; this ends it

    def retire(self) -> None:
        """Answer what was asked, then say goodbye."""
        self._retiring.set()
        if self._begun:
            self.protocol.retire()

    async def _retire(self) -> None:
        await self._retiring.wait()
        while True:
            if await self.protocol.says_goodbye():
                break
            await trio.sleep(_LOOK_S)
        # Closing with bytes unread would reset the connection and take the goodbye with it.
        self._scope.deadline = trio.current_time() + _LINGER_S
        try:
            await self.stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass  # it has left already

    async def _send(self, data: bytes) -> None:
        gone = False
        async with self.send_lock:
            self._sends, self._pace = True, None
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                gone = True
            self._sends = False
        if gone:
            await self.protocol.handle(Closed())

    async def _watch_reader(self, tasks: TaskGroup) -> None:
        """A client that takes nothing of what waits for it, or next to nothing, is given up: the stream, or the
        connection if that is what its socket says. Event streams and tunnels have a patience of their own. A stream
        that has window left waits for the socket, or for its turn: its client is judged by what the socket gets rid of.
        """
        while True:
            await trio.sleep(min(1.0, self._patience_s / 2))
            now = trio.current_time()
            if self._sends and self._dawdles(now):
                self._scope.cancel()
            for stream_id, buffer in list(self.protocol.stream_buffers.items()):
                if self._sends and self.protocol.has_window(stream_id):
                    buffer.begin_wait(now)
                elif buffer.dawdles(now, patience_s=self._patience_s, rate=self._rate):
                    buffer.lasts = True  # not for long, but it is judged
                    self._unread.give_up(now - self._patience_s / 2)
                    tasks.spawn(self.protocol.give_up, stream_id)  # which may have to wait for the socket; we must not

    def _dawdles(self, now: float) -> bool:
        acknowledged = _acknowledged(self.stream.socket)
        if self._pace is None:
            self._pace = Pace(now, acknowledged)
        return self._pace.dawdles(now, acknowledged, patience_s=self._patience_s, rate=self._rate)


def _acknowledged(sock: trio.socket.SocketType) -> int:
    """Bytes that the peer's kernel has taken so far; 0 if ours can't be asked."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + _U64.size)
    except OSError:
        return 0
    return int(_U64.unpack_from(info, _ACKED_AT)[0]) if len(info) == _ACKED_AT + _U64.size else 0


class Pace:
    """How a client takes what waits in its socket. We are told that there is room in lumps of a third of the socket's
    buffer, so what it takes is judged by what its kernel acknowledges: a slow reader is no dead one."""

    def __init__(self, now: float, acknowledged: int) -> None:
        self._since = self._moved = now
        self._first = self._last = acknowledged

    def dawdles(self, now: float, acknowledged: int, *, patience_s: float, rate: int) -> bool:
        if acknowledged > self._last:
            self._last, self._moved = acknowledged, now
        waits = now - self._since
        return now - self._moved > patience_s or (waits > patience_s and self._last - self._first < rate * waits)


class Nuisances:
    """What a client may send that costs us work and carries nothing: so many at once, so many more per second."""

    def __init__(self, now: float) -> None:
        self._left = float(limits.H2_NUISANCES)
        self._at = now

    def pay(self, now: float) -> bool:
        """False: it has had its share."""
        self._left = min(self._left + (now - self._at) * limits.H2_NUISANCES_PER_S, limits.H2_NUISANCES) - 1
        self._at = now
        return self._left >= 0


class CalmDown(ProtocolError):
    """Ends a connection."""

    error_code = ErrorCodes.ENHANCE_YOUR_CALM


class PacedBuffer(StreamBuffer):  # type: ignore[misc]
    """What a stream has to send. Hypercorn 0.18 lets a writer go on whenever less than half a buffer was taken from it,
    and a client that grants no window takes nothing: everything written to it piles up. What is left in the buffer is
    what counts."""

    def __init__(self, event_class: Any) -> None:
        super().__init__(event_class)
        self.over = trio.Event()  # the end is with the socket, or will never be
        self.lasts = False  # an event stream or a tunnel: somebody else watches its pace
        self._since = self._moved = 0.0  # when it began to wait for its client, and when that last took something
        self._taken = 0

    def dawdles(self, now: float, *, patience_s: float, rate: int) -> bool:
        if not self.buffer or self.lasts:
            return False
        waits = now - self._since
        return now - self._moved > patience_s or (waits > patience_s and self._taken < rate * waits)

    def begin_wait(self, now: float) -> None:
        """From now on it waits for its client."""
        self._since = self._moved = now
        self._taken = 0

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError()
        if not self.buffer:
            self.begin_wait(trio.current_time())
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if data:
            self._moved = trio.current_time()
            self._taken += len(data)
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data

    async def drain(self) -> None:
        await super().drain()
        if self._complete:
            await self.over.wait()

    async def close(self) -> None:
        await super().close()
        self.over.set()


class Holds:
    """What a connection's heads take in memory: those of open streams, and one that has not come whole. What else a
    stream costs counts until its request is whole: then something is done for it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._booked = 0
        self._heads: dict[int, int] = {}  # by stream
        self._partial: set[int] = set()  # streams whose request is not whole
        self._unfinished = 0

    def open(self, stream_id: int, headers: list[tuple[bytes, bytes]], *, whole: bool, always: bool) -> bool:
        """False: there is no room for it. always: it has it all the same."""
        size = 2 * sum([len(name) + len(value) + _FIELD_BYTES for name, value in headers])
        if not whole:
            size += limits.H2_STREAM_BYTES
        now = self._booked + size
        if always:
            self._budget.book(self._booked, now)
        elif now > limits.H2_OPEN_BYTES or not self._budget.settle(self._booked, now):
            return False
        self._heads[stream_id] = size
        if not whole:
            self._partial.add(stream_id)
        self._booked = now
        return True

    def is_whole(self, stream_id: int) -> None:
        if stream_id in self._partial:
            self._partial.discard(stream_id)
            self._heads[stream_id] -= limits.H2_STREAM_BYTES
            self._give(limits.H2_STREAM_BYTES)

    def close(self, stream_id: int) -> None:
        self._partial.discard(stream_id)
        self._give(self._heads.pop(stream_id, 0))

    def begin(self, size: int) -> bool:
        """So much of a head has come that is not whole. False: there is no room for it."""
        now = self._booked - self._unfinished + size
        if not self._budget.settle(self._booked, now):
            return False
        self._booked, self._unfinished = now, size
        return True

    def _give(self, size: int) -> None:
        self._budget.give(size)
        self._booked -= size

    def let_go(self) -> None:
        """The connection has ended."""
        self._give(self._booked)
        self._heads.clear()
        self._partial.clear()
        self._unfinished = 0


class Connection(H2Protocol):  # type: ignore[misc]
    def __init__(self, *given: Any, serve_tunnel: Serve, budget: Budget, turn_away: TurnAway) -> None:
        super().__init__(*given)
        self.holds = Holds(budget)
        self._budget = budget
        self._turn_away = turn_away
        self._serve_tunnel = serve_tunnel
        self._nuisances = Nuisances(trio.current_time())
        self._newest = 0  # of the streams that were begun
        self._last: int | None = None  # the last one that is served here
        self._retired = False  # goodbye is said
        self.connection.decoder.max_header_list_size = limits.MAX_HEAD_BYTES
        table = self.connection._frame_dispatch_table
        for kind in (RstStreamFrame, PingFrame, SettingsFrame, PriorityFrame, ExtensionFrame, DataFrame):
            table[kind] = self._paid(table[kind])

    # --- what it may not do ---

    def _paid(self, receive: Callable[[Frame], Any]) -> Callable[[Frame], Any]:
        def receive_paid(frame: Frame) -> Any:
            if not isinstance(frame, DataFrame) or not (frame.data or "END_STREAM" in frame.flags):
                self._pay()
            return receive(frame)

        return receive_paid

    def _pay(self) -> None:
        if not self._nuisances.pay(trio.current_time()):
            raise CalmDown("too many frames that carry nothing")

    async def _end(self) -> None:
        """Say why, and go."""
        self.connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
        await self._flush()
        await self.send(Closed())

    # --- its end ---

    def retire(self) -> None:
        self._last = self._newest

    async def says_goodbye(self) -> bool:
        """If everything is answered."""
        if self.closed:
            return True
        if self.streams or self.stream_buffers:
            return False
        self._retired = True
        self.connection.close_connection(ErrorCodes.NO_ERROR, last_stream_id=self._last)
        await self._flush()
        return True

    async def handle(self, event: Any) -> None:
        if isinstance(event, RawData) and event.data and self._retired:
            return  # it was sent before our goodbye came, and is sent again elsewhere
        await super().handle(event)
        if isinstance(event, RawData) and not self.closed:
            begun = self.connection.incoming_buffer._headers_buffer
            size = sum([len(frame.data) for frame in begun])
            if size > limits.MAX_HEAD_BYTES:
                await self._end()
            elif not self.holds.begin(size + len(self.connection.incoming_buffer._data)) and begun:
                self._budget.refusal()
                await self._end()
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()

    # --- receiving ---

    async def _create_stream(self, request: RequestReceived) -> None:
        head = dict(request.headers)
        stream_id = request.stream_id
        if self._last is not None and stream_id > self._last:
            return  # the goodbye will say that it was not served
        self._newest = stream_id
        whole = request.stream_ended is not None
        if not self.holds.open(stream_id, request.headers, whole=whole, always=False):
            answer = self._turn_away(head)
            if answer is not None:
                self._answer_at_once(stream_id, answer, whole=whole)
                return
            self.holds.open(stream_id, request.headers, whole=whole, always=True)
        try:
            self.priority.insert_stream(stream_id)
        except TooManyStreamsError:  # it has opened and reset many while it did not read
            self.connection.reset_stream(stream_id, error_code=ErrorCodes.REFUSED_STREAM)
            self.holds.close(stream_id)
            return
        self.priority.block(stream_id)
        self.stream_buffers[stream_id] = PacedBuffer(self.context.event_class)
        self.keep_alive_requests += 1
        headers = filter_pseudo_headers(request.headers)
        refusal = _refusal(head, headers)
        if head[b":method"] == b"CONNECT" or refusal is not None:
            tunnel = Tunnel(self, stream_id, head, _joined(headers), refusal)
            self.streams[stream_id] = tunnel
            self.task_group.spawn(tunnel.run, self._serve_tunnel)
            return
        stream = self.streams[stream_id] = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            stream_id,
        )
        method = head[b":method"].decode("latin-1")
        path = quote_from_bytes(head[b":path"], safe=_ASCII).encode()  # other bytes can't be in it; Hypercorn decodes
        await stream.handle(Request(stream_id, headers, "2", method, path, self.connection_state))

    def _answer_at_once(self, stream_id: int, answer: Answer, *, whole: bool) -> None:
        """Without a task. The body is left out if the client has no window for it."""
        headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers]
        headers = [(b":status", b"%d" % answer.status), (b"content-type", b"application/json"), *headers]
        try:
            self.connection.send_headers(stream_id, [*headers, *self.config.response_headers("h2")])
            if self.connection.local_flow_control_window(stream_id) >= len(answer.body):
                self.connection.send_data(stream_id, bytes(answer.body))
            self.connection.end_stream(stream_id)
            if not whole:
                self.connection.reset_stream(stream_id, error_code=ErrorCodes.NO_ERROR)
        except ProtocolError:
            pass  # the client was quicker

    async def _close_stream(self, stream_id: int) -> None:
        self.holds.close(stream_id)
        await super()._close_stream(stream_id)

    async def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, DataReceived):
                await self._take_data(event)
            elif not isinstance(event, PriorityUpdated):
                if isinstance(event, StreamEnded):
                    self.holds.is_whole(event.stream_id)
                await super()._handle_events([event])
                if isinstance(event, StreamReset):  # perhaps of the last stream; Hypercorn would wait for ever
                    await self.send(Updated(idle=self.idle))
                    if not event.remote_reset and not self._nuisances.pay(trio.current_time()):
                        await self._end()  # it makes us reset them
                        return
        await self._flush()

    async def _take_data(self, event: DataReceived) -> None:
        stream_id, size = event.stream_id, event.flow_controlled_length
        stream = self.streams.get(stream_id)
        if stream is not None:
            await stream.handle(Body(stream_id, event.data))
        if isinstance(stream, Tunnel) and stream.paused and size:
            # The others must not wait for it: the window of the connection is given back all the same.
            self.connection.increment_flow_control_window(size)
            stream.withheld += size
        else:
            self.connection.acknowledge_received_data(size, stream_id)

    def has_window(self, stream_id: int) -> bool:
        """Its client lets us send more of it."""
        try:
            return bool(self.connection.local_flow_control_window(stream_id) > 0)
        except (KeyError, ProtocolError):
            return False  # the stream has ended meanwhile

    async def grant(self, stream_id: int, size: int) -> None:
        try:
            self.connection.increment_flow_control_window(size, stream_id)
        except (KeyError, ProtocolError):
            return  # the stream has ended meanwhile
        await self._flush()

    # --- sending ---

    async def stream_send(self, event: Any) -> None:
        if isinstance(event, StreamClosed) and not self.closed:
            await self._reset_unfinished(event.stream_id)
        if isinstance(event, Response) and event.stream_id in self.stream_buffers:
            kinds = [value for name, value in event.headers if name == b"content-type"]
            tunnel = isinstance(self.streams.get(event.stream_id), Tunnel)
            if tunnel:
                self.holds.is_whole(event.stream_id)  # it is answered, and may last for days
            self.stream_buffers[event.stream_id].lasts = not kinds or (not tunnel and kinds[0].startswith(_EVENTS))
        await super().stream_send(event)

    async def _reset_unfinished(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        buffer = self.stream_buffers.get(stream_id)
        if stream is None:
            return  # the client has reset it
        if buffer is not None:
            if buffer.complete:
                return
            error = ErrorCodes.CANCEL
        elif isinstance(stream, Tunnel) and not stream.ended.is_set():
            error = ErrorCodes.NO_ERROR  # all is said, and the client does not end its side
        else:
            return
        try:
            self.connection.reset_stream(stream_id, error_code=error)
        except ProtocolError:
            pass  # the client was quicker
        if buffer is not None:
            await buffer.close()
            await self._window_updated(stream_id)  # the sender finds that the stream is gone, and forgets it
        await self._flush()

    async def give_up(self, stream_id: int) -> None:
        """Its client does not take it."""
        try:
            self.connection.reset_stream(stream_id, error_code=ErrorCodes.CANCEL)
        except ProtocolError:
            pass  # the client was quicker
        if stream_id in self.stream_buffers:
            await self.stream_buffers[stream_id].close()
        await self._close_stream(stream_id)
        await self._window_updated(stream_id)  # the sender finds that the stream is gone, and forgets it
        await self._flush()
        await self.send(Updated(idle=self.idle))

    async def _send_data(self, stream_id: int) -> None:
        buffer = self.stream_buffers[stream_id]
        await super()._send_data(stream_id)
        if stream_id not in self.stream_buffers:
            buffer.over.set()


class Tunnel:
    """A stream opened by CONNECT: bytes both ways, as over a connection of its own."""

    idle = False

    def __init__(
        self,
        connection: Connection,
        stream_id: int,
        head: dict[bytes, bytes],
        headers: dict[bytes, bytes],
        refusal: ApiError | None = None,
    ) -> None:
        self.headers = headers
        self.method = head[b":method"].decode("latin-1")
        self.refusal = refusal  # it is none, but whoever serves tunnels answers it
        self.protocol = head.get(b":protocol", b"")
        self.target = (head.get(b":path") or head.get(b":authority", b"")).decode("latin-1")
        self.scope = trio.CancelScope()  # around everything that is done for it; ends with the stream
        self.ended = trio.Event()  # the client sends no more
        self.paused = True  # until somebody listens
        self.withheld = 0  # bytes received while paused, for which the client was given no window
        self._connection = connection
        self._stream_id = stream_id
        self._early = bytearray()
        self._received: Callable[[bytes], Awaitable[None]] | None = None
        self._received_end: Callable[[], None] = lambda: None

    async def run(self, serve: Serve) -> None:
        with self.scope:
            await serve(self)
            with trio.move_on_after(_LINGER_S):
                await self.ended.wait()
        await self._connection.stream_send(StreamClosed(self._stream_id))

    async def handle(self, event: Any) -> None:
        """What the connection says."""
        if isinstance(event, Body):
            if self._received is None:
                self._early += event.data
            else:
                await self._received(bytes(event.data))
        elif isinstance(event, EndBody):
            self.ended.set()
            self._received_end()
        elif isinstance(event, StreamClosed):
            self.ended.set()
            self.scope.cancel()

    # --- whoever serves it says ---

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """No tunnel, but an answer."""
        await self._connection.stream_send(Response(self._stream_id, headers, status))
        await self.send(body)
        await self.end()

    async def accept(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._connection.stream_send(Response(self._stream_id, headers, 200))

    async def listen(self, received: Callable[[bytes], Awaitable[None]], received_end: Callable[[], None]) -> None:
        """Tell them what has come, and from now on what comes."""
        self.resume()
        while self._early:
            early, self._early = bytes(self._early), bytearray()
            await received(early)
        self._received, self._received_end = received, received_end

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        if self.withheld:
            withheld, self.withheld = self.withheld, 0
            self._connection.task_group.spawn(self._connection.grant, self._stream_id, withheld)

    async def send(self, data: bytes) -> None:
        """Returns when the client has taken most of it."""
        await self._connection.stream_send(Data(self._stream_id, data))

    async def end(self) -> None:
        """Returns when all of it is with the socket."""
        await self._connection.stream_send(EndData(self._stream_id))


def _refusal(head: dict[bytes, bytes], headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """What nobody should have to read."""
    if len(headers) > limits.MAX_HEADERS:
        return ApiError("header_too_large", f"more than {limits.MAX_HEADERS} headers")
    if head[b":method"] != b"CONNECT" and not head[b":path"].startswith(b"/"):
        return invalid("the request target must be a path")
    return None


def _joined(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """By name; what stands there twice is joined, so that nobody can choose which of two keys is looked at."""
    joined: dict[bytes, bytes] = {}
    for name, value in headers:
        joined[name] = b", ".join((joined[name], value)) if name in joined else value
    return joined
