"""A live subscription: one WebSocket at a time, made anew whenever it is lost.

```
server ─ frames ─► Feed (a task of its own) ─ events ─► Subscription ─► `async for`
```

The feed has at most one event in hand that the reader has not taken, so a slow reader slows the server down and not
this process's memory. What the reader has taken is where the next connection begins: nothing twice, nothing left out.

A failure that another try won't cure ends the iteration with its exception. The feed itself never raises, so the
reader's own exceptions leave `async with` as they are and not inside a group.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import trio
from trio_websocket import (
    CloseReason,
    ConnectionClosed,
    ConnectionRejected,
    WebSocketConnection,
    wrap_client_stream,
)

from topics.client.address import CONNECT_TIMEOUT_S, Address, SocketStream
from topics.client.backoff import Backoff
from topics.client.events import Event, Position, Refused, Subscribed, read_frame
from topics.client.failures import ClientError, ConnectionLost, NotTopics, Unreachable, at_least_s, is_passing
from topics.client.http import HttpConnection, refusal
from topics.client.positions import Positions
from topics.errors import ApiError

PING_AFTER_S = 20.0  # of silence
LOST_AFTER_S = 20.0  # of silence after the ping
CLOSE_TIMEOUT_S = 1.0
MAX_MESSAGE_CHARS = 2**30  # the largest body a server can be told to take, so no record is longer
_RECEIVE_BYTES = 256 * 1024
_REQUEST_ID = "subscribe"
_PING = json.dumps({"op": "ping"})

# Close codes that say more than "lost".
_CLOSED: dict[int, str] = {
    1001: "the server is stopping",
    1009: "a message was too long",
    1013: "the server found this reader too slow",
}


class Subscription:
    """Iterate over it for events. It ends when every topic was deleted."""

    def __init__(self, events: trio.MemoryReceiveChannel[Event], feed: Feed) -> None:
        self._events = events
        self._feed = feed

    @property
    def first(self) -> dict[str, Position]:
        """What each topic held when the subscription began."""
        return self._feed.positions.first

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        try:
            return await self._events.receive()
        except trio.EndOfChannel:
            if self._feed.failure is not None:
                raise self._feed.failure from None
            raise StopAsyncIteration from None


@asynccontextmanager
async def open_subscription(
    address: Address,
    starts: Mapping[str, int | None],
    *,
    options: Mapping[str, Any],
    notice: Callable[[str], None],
) -> AsyncIterator[Subscription]:
    await _greet(address)
    send, receive = trio.open_memory_channel[Event](0)
    feed = Feed(address, Positions(starts), options=options, notice=notice)
    with sole_exception():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run, send)
            await feed.begun.wait()
            if feed.failure is not None:
                raise feed.failure
            try:
                yield Subscription(receive, feed)
            finally:
                nursery.cancel_scope.cancel()


async def _greet(address: Address) -> None:
    """Somebody is there and speaks HTTP: what else it may be is found out sooner and said better so than by a WebSocket
    handshake that gets stuck.
    """
    http = HttpConnection(address)
    try:
        await http.ask("GET", "/v0/health")
    except (ApiError, ConnectionLost):
        pass  # a server that has its troubles; they will pass, or be told again
    finally:
        await http.aclose()


@contextmanager
def sole_exception() -> Iterator[None]:
    """The one exception of a nursery without the group around it."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        sole = group.exceptions[0]
        context = sole.__context__
        try:
            raise sole
        finally:
            sole.__context__ = context  # and not the group that it is in


class Feed:
    def __init__(
        self,
        address: Address,
        positions: Positions,
        *,
        options: Mapping[str, Any],
        notice: Callable[[str], None],
        backoff: Backoff | None = None,
    ) -> None:
        self.positions = positions
        self.begun = trio.Event()  # the first connection is subscribed, or has failed
        self.failure: Exception | None = None
        self._address = address
        self._options = options
        self._notice = notice
        self._backoff = backoff or Backoff()
        self._told: str | None = None  # the trouble the reader knows of

    async def run(self, events: trio.MemorySendChannel[Event]) -> None:
        try:
            async with events:
                while self.failure is None and (self.positions or not self.begun.is_set()):
                    await self._once(events)
        finally:
            self.begun.set()

    async def _once(self, events: trio.MemorySendChannel[Event]) -> None:
        """One connection, to its end, and the pause behind it."""
        try:
            await self._follow(events)
        except (ApiError, ClientError) as failure:
            # Before the first connection an address may simply be wrong; after it, the server will be back.
            wrong = isinstance(failure, Unreachable) and not self.begun.is_set() and self._told is None
            if wrong or not is_passing(failure):
                self.failure = failure
                return
            if self._told != str(failure):
                self._told = str(failure)
                self._notice(f"trying again: {failure}")
            await trio.sleep(self._backoff.next_s(at_least_s=at_least_s(failure)))

    async def _follow(self, events: trio.MemorySendChannel[Event]) -> None:
        stream = await self._address.open_stream()
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                socket = await self._shake_hands(nursery, stream)
                if socket is None:
                    failure = ConnectionLost(f"{self._address} did not complete the WebSocket handshake")
                else:
                    failure = await self._converse(socket, events)
                    with trio.move_on_after(CLOSE_TIMEOUT_S):
                        await socket.aclose()
                nursery.cancel_scope.cancel()
        except* ConnectionRejected as group:
            failure = self._refusal(group)
        finally:
            await trio.aclose_forcefully(stream)
        if failure is not None:
            raise failure

    async def _shake_hands(self, nursery: trio.Nursery, stream: SocketStream) -> WebSocketConnection | None:
        """Not open_websocket(): when its time is up it still waits for the server."""
        with trio.move_on_after(CONNECT_TIMEOUT_S):
            return await wrap_client_stream(
                nursery,
                stream,
                self._address.authority,
                f"{self._address.prefix}/v0/ws",
                extra_headers=[(name.encode(), value.encode()) for name, value in self._address.credentials],
                max_message_size=MAX_MESSAGE_CHARS,
                receive_buffer_size=_RECEIVE_BYTES,
            )
        return None

    async def _converse(self, socket: WebSocketConnection, events: trio.MemorySendChannel[Event]) -> Exception | None:
        """Returns what ended it: raised, it would arrive in a group."""
        said = ""
        try:
            await socket.send_message(json.dumps(self.positions.command(_REQUEST_ID, self._options)))
            while self.positions:
                frame = read_frame(await self._next_message(socket))
                if isinstance(frame, Subscribed):
                    await self._subscribed(frame, events)
                elif isinstance(frame, Refused):
                    if frame.request_id == _REQUEST_ID:
                        return ApiError(frame.code, frame.message, frame.detail)
                    said = frame.message  # probably the reason for the close that follows
                elif frame is not None:
                    await self._deliver(frame, events)
        except ConnectionClosed as closed:
            return ConnectionLost(self._closed_words(closed.reason, said))
        except ConnectionLost as lost:
            return lost
        except msgspec.DecodeError as error:
            return NotTopics(f"{self._address} sends messages that can't be understood: {error}")
        return None

    async def _subscribed(self, frame: Subscribed, events: trio.MemorySendChannel[Event]) -> None:
        gone = self.positions.subscribed(frame.topics)
        self._backoff.reset()
        if self._told is not None:
            self._told = None
            self._notice("connected again")
        self.begun.set()
        for event in gone:
            await self._deliver(event, events)

    async def _deliver(self, event: Event, events: trio.MemorySendChannel[Event]) -> None:
        await events.send(event)
        self.positions.moved(event)

    async def _next_message(self, socket: WebSocketConnection) -> str | bytes:
        """A connection that died without a word is found out by asking."""
        with trio.move_on_after(PING_AFTER_S):
            return await socket.get_message()
        await socket.send_message(_PING)
        with trio.move_on_after(LOST_AFTER_S):
            return await socket.get_message()
        raise ConnectionLost(f"{self._address} has not answered for {PING_AFTER_S + LOST_AFTER_S:.0f} s")

    def _closed_words(self, reason: CloseReason | None, said: str) -> str:
        code = 1006 if reason is None else reason.code
        if words := said or _CLOSED.get(code):
            return f"{self._address} closed the connection: {words}"
        return f"the connection to {self._address} was lost" + ("" if code == 1006 else f" ({code})")

    def _refusal(self, group: ExceptionGroup[ConnectionRejected]) -> Exception:
        rejected = group.exceptions[0]
        if not isinstance(rejected, ConnectionRejected):
            return group
        headers = {name.lower(): value for name, value in rejected.headers}
        retry_after = headers.get(b"retry-after", b"")
        return refusal(rejected.status_code, bytes(rejected.body or b""), retry_after, who=str(self._address))
