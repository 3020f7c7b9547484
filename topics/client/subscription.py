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
    HandshakeError,
    WebSocketConnection,
    open_websocket,
)

from topics.client.address import CONNECT_TIMEOUT_S, Address, words_of
from topics.client.backoff import Backoff
from topics.client.events import Event, Position, Refused, Subscribed, read_frame
from topics.client.failures import ClientError, ConnectionLost, NotTopics, Unreachable, at_least_s, is_passing
from topics.client.http import refusal
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
    send, receive = trio.open_memory_channel[Event](0)
    feed = Feed(address, Positions(starts), options=options, notice=notice)
    with _sole_exception():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run, send)
            await feed.begun.wait()
            if feed.failure is not None:
                raise feed.failure
            try:
                yield Subscription(receive, feed)
            finally:
                nursery.cancel_scope.cancel()


@contextmanager
def _sole_exception() -> Iterator[None]:
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
        except trio.BrokenResourceError:
            pass  # the reader has gone
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
        with self._failures_in_our_words():
            async with open_websocket(
                self._address.host,
                self._address.port,
                f"{self._address.prefix}/v0/ws",
                use_ssl=self._address.tls,
                max_message_size=MAX_MESSAGE_CHARS,
                receive_buffer_size=_RECEIVE_BYTES,
                connect_timeout=CONNECT_TIMEOUT_S,
                disconnect_timeout=CLOSE_TIMEOUT_S,
            ) as socket:
                await socket.send_message(json.dumps(self.positions.command(_REQUEST_ID, self._options)))
                said = ""
                while self.positions:
                    try:
                        frame = self._read(await self._next_message(socket))
                    except ConnectionClosed as closed:
                        raise ConnectionLost(self._closed_words(closed.reason, said)) from None
                    if isinstance(frame, Subscribed):
                        await self._subscribed(frame, events)
                    elif isinstance(frame, Refused):
                        if frame.request_id == _REQUEST_ID:
                            raise ApiError(frame.code, frame.message, frame.detail)
                        said = frame.message  # probably the reason for the close that follows
                    elif frame is not None:
                        await self._deliver(frame, events)

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

    def _read(self, message: str | bytes) -> Event | Subscribed | Refused | None:
        try:
            return read_frame(message)
        except msgspec.DecodeError as error:
            raise NotTopics(f"{self._address} sends messages that can't be understood: {error}") from None

    def _closed_words(self, reason: CloseReason | None, said: str) -> str:
        code = 1006 if reason is None else reason.code
        if words := said or _CLOSED.get(code):
            return f"{self._address} closed the connection: {words}"
        return f"the connection to {self._address} was lost" + ("" if code == 1006 else f" ({code})")

    @contextmanager
    def _failures_in_our_words(self) -> Iterator[None]:
        try:
            yield
        except ConnectionRejected as rejected:
            headers = {name.lower(): value for name, value in rejected.headers}
            body = bytes(rejected.body or b"")
            who = str(self._address)
            raise refusal(rejected.status_code, body, headers.get(b"retry-after", b""), who=who) from None
        except ConnectionClosed:
            raise ConnectionLost(f"the connection to {self._address} was lost") from None
        except HandshakeError as error:
            if isinstance(error.__cause__, OSError):
                raise Unreachable(f"no connection to {self._address}: {words_of(error)}") from None
            raise ConnectionLost(f"{self._address} did not complete the WebSocket handshake") from None
