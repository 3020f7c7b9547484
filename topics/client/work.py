"""A worker's stream of jobs: one connection at a time, made anew whenever it is lost.

```
server ─ event stream ─► Feed (a task of its own) ─ jobs ─► Work ─► `async for`
```

The server leases at most `max` jobs to a connection and sends the next when one is done, so what waits here for the
reader is bounded by that. Everything is read as soon as it comes, however slow the reader: a stream that is not read
would be ended by the server, and with it all its leases.

With a connection its leases end. Jobs of it that the reader has not taken yet are dropped: they will be sent again, to
this worker or to another. What the reader has taken it may finish; whether its ack still counts is for the server to
say. A failure that another try won't cure ends the iteration with its exception.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote, urlencode

import h11
import msgspec
import trio

from topics.client.address import Address, SocketStream
from topics.client.backoff import Backoff
from topics.client.failures import ClientError, ConnectionLost, NotTopics, Unreachable, at_least_s, is_passing
from topics.client.http import refusal
from topics.client.queue import Job
from topics.client.sse import EventStream, Message
from topics.client.subscription import sole_exception
from topics.errors import ApiError

LOST_AFTER_S = 45.0  # of silence; the server says something every 15 s
_RECEIVE_BYTES = 256 * 1024

# Codes of error frames that end the work for good; all others are worth another connection.
_FINAL = {400: "invalid_request", 404: "topic_not_found", 409: "not_a_queue"}
_PACING = 429  # advice, not an end

_job_decoder = msgspec.json.Decoder(Job)


class _Error(msgspec.Struct):
    code: int
    error: str


_error_decoder = msgspec.json.Decoder(_Error)


class Work:
    """Iterate over it for jobs. It never ends by itself."""

    def __init__(self, jobs: trio.MemoryReceiveChannel[Job], feed: Feed) -> None:
        self._jobs = jobs
        self._feed = feed

    def __aiter__(self) -> Work:
        return self

    async def __anext__(self) -> Job:
        try:
            return await self._jobs.receive()
        except trio.EndOfChannel:
            if self._feed.failure is not None:
                raise self._feed.failure from None
            raise StopAsyncIteration from None

    def take_nowait(self) -> Job | None:
        """A job that is here already."""
        try:
            return self._jobs.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return None


@asynccontextmanager
async def open_work(
    address: Address,
    queue: str,
    *,
    node: str,
    max: int,
    lease_ms: int | None,
    notice: Callable[[str], None],
) -> AsyncIterator[Work]:
    query: dict[str, str | int] = {"node": node, "max": max}
    if lease_ms is not None:
        query["lease_ms"] = lease_ms
    path = f"/v0/topics/{quote(queue, safe='')}/work?{urlencode(query)}"
    send, receive = trio.open_memory_channel[Job](max)
    feed = Feed(address, path, unread=receive, notice=notice)
    with sole_exception():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run, send)
            await feed.begun.wait()
            if feed.failure is not None:
                raise feed.failure
            try:
                yield Work(receive, feed)
            finally:
                nursery.cancel_scope.cancel()


class Feed:
    def __init__(
        self,
        address: Address,
        path: str,
        *,
        unread: trio.MemoryReceiveChannel[Job],
        notice: Callable[[str], None],
        backoff: Backoff | None = None,
    ) -> None:
        self.begun = trio.Event()  # the first connection stands, or has failed
        self.failure: Exception | None = None
        self._address = address
        self._path = path
        self._unread = unread
        self._notice = notice
        self._backoff = backoff or Backoff()
        self._told: str | None = None  # the trouble the reader knows of
        self._first = True  # nothing has come over this connection yet
        self._ended = False  # by the server

    async def run(self, jobs: trio.MemorySendChannel[Job]) -> None:
        try:
            async with jobs:
                while self.failure is None:
                    await self._once(jobs)
        finally:
            self.begun.set()

    async def _once(self, jobs: trio.MemorySendChannel[Job]) -> None:
        """One connection, to its end, and the pause behind it."""
        try:
            await self._follow(jobs)
        except (ApiError, ClientError) as failure:
            self._forget_unread()
            # Before the first connection an address may simply be wrong; after it, the server will be back.
            wrong = isinstance(failure, Unreachable) and not self.begun.is_set() and self._told is None
            if wrong or not is_passing(failure):
                self.failure = failure
                return
            if self._told != str(failure):
                self._told = str(failure)
                self._notice(f"trying again: {failure}")
            await trio.sleep(self._backoff.next_s(at_least_s=at_least_s(failure)))

    def _forget_unread(self) -> None:
        try:
            while True:
                self._unread.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            pass

    async def _follow(self, jobs: trio.MemorySendChannel[Job]) -> None:
        stream = await self._address.open_stream()
        self._first, self._ended = True, False
        protocol = h11.Connection(h11.CLIENT)
        headers = [
            ("Host", self._address.authority),
            ("User-Agent", "topics"),
            ("Accept", "text/event-stream"),
            *self._address.credentials,
        ]
        request = h11.Request(method="GET", target=self._address.prefix + self._path, headers=headers)
        try:
            sent = (protocol.send(request) or b"") + (protocol.send(h11.EndOfMessage()) or b"")
            await stream.send_all(sent)
            await self._accepted(stream, protocol)
            messages = EventStream()
            while True:
                event = await self._next_event(stream, protocol)
                if isinstance(event, h11.Data):
                    for message in messages.feed(event.data):
                        await self._take(message, jobs)
                elif isinstance(event, h11.EndOfMessage):
                    raise ConnectionLost(f"{self._address} ended the stream of jobs")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionLost(f"the connection to {self._address} was lost") from None
        except h11.RemoteProtocolError as error:
            if self._ended:
                raise ConnectionLost(f"the connection to {self._address} was lost") from None
            raise NotTopics(f"{self._address} does not speak HTTP as we do: {error}") from None
        finally:
            await trio.aclose_forcefully(stream)

    async def _accepted(self, stream: SocketStream, protocol: h11.Connection) -> None:
        """Raises what the answer stands for, if it is not a stream of jobs."""
        response = await self._next_event(stream, protocol)
        if not isinstance(response, h11.Response):
            raise ConnectionLost(f"{self._address} closed the connection before it answered")
        headers = dict(response.headers)
        if response.status_code != 200:
            content = bytearray()
            while isinstance(event := await self._next_event(stream, protocol), h11.Data):
                content += event.data
            retry_after = headers.get(b"retry-after", b"")
            raise refusal(response.status_code, bytes(content), retry_after, who=str(self._address))
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise NotTopics(f"{self._address} answers, but not as a topics server: is this its address?")
        self._backoff.reset()
        if self._told is not None:
            self._told = None
            self._notice("connected again")
        self.begun.set()

    async def _next_event(
        self, stream: SocketStream, protocol: h11.Connection
    ) -> h11.Event | type[h11.PAUSED] | type[h11.NEED_DATA]:
        while True:
            event = protocol.next_event()
            if event is not h11.NEED_DATA:
                return event
            with trio.move_on_after(LOST_AFTER_S) as silence:
                data = bytes(await stream.receive_some(_RECEIVE_BYTES))
                self._ended = not data
                if self._first and data and not data.startswith(b"HTTP/"[: len(data)]):
                    raise NotTopics(f"{self._address} does not speak HTTP: is this its address?")
                self._first = False
                protocol.receive_data(data)
            if silence.cancelled_caught:
                raise ConnectionLost(f"{self._address} has said nothing for {LOST_AFTER_S:.0f} s")

    async def _take(self, message: Message, jobs: trio.MemorySendChannel[Job]) -> None:
        try:
            if message.event == "job":
                await jobs.send(_job_decoder.decode(message.data))
            elif message.event == "error":
                error = _error_decoder.decode(message.data)
                if error.code in _FINAL:
                    raise ApiError(_FINAL[error.code], error.error)
                if error.code != _PACING:
                    raise ConnectionLost(f"{self._address} ended the stream of jobs: {error.error}")
        except (msgspec.DecodeError, UnicodeDecodeError) as failure:
            raise NotTopics(f"{self._address} sends messages that can't be understood: {failure}") from None
