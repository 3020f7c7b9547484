"""Requests over one HTTP/1.1 connection that is kept alive: one at a time, in the order in which they were made.

Almost every request made here is safe to send twice: reads, appends that carry a key, claims and what is said about
leases. So one that meets a connection that has ended since is sent once more on a new one; beyond that nothing is
repeated. How late that may be can be said, because a topic remembers keys for a time only. 0 is for a topic that
remembers none: its append gets a connection of which nobody can say that it had ended before.

A failure says whether a request was on its way: `Unreachable` if none was, `ConnectionLost` if one was. A connection is
not used again after a failure.
"""

from __future__ import annotations

import math

import h11
import msgspec
import trio

from topics.client.address import Address
from topics.client.failures import ConnectionLost, NotTopics, Unreachable
from topics.errors import ApiError

ANSWER_TIMEOUT_S = 60.0  # the server gives up on its own before this
_CHUNK_BYTES = 65_536


class _ErrorObject(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, object] | None = None


class _Envelope(msgspec.Struct):
    error: _ErrorObject


_envelope_decoder = msgspec.json.Decoder(_Envelope)


class HttpConnection:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._stream: trio.abc.Stream | None = None
        self._protocol = h11.Connection(h11.CLIENT)
        self._ended = False  # by the server
        self._lock = trio.StrictFIFOLock()
        self.ever_connected = False

    async def aclose(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await trio.aclose_forcefully(stream)

    async def ask(self, method: str, path: str, body: bytes = b"", *, repeat_within_s: float = math.inf) -> bytes:
        """The body of a success; any other answer is an ApiError."""
        async with self._lock:
            if repeat_within_s <= 0:
                await self.aclose()
            started = trio.current_time()
            if self._stream is None:
                return await self._exchange(method, path, body)
            try:
                return await self._exchange(method, path, body)
            except ConnectionLost as error:
                lost = error
            if trio.current_time() - started > repeat_within_s:
                raise lost
            # An idle connection may end at any time, and this one probably had before the request was sent.
            try:
                return await self._exchange(method, path, body)
            except Unreachable:
                raise lost from None  # the first request was on its way, after all

    async def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        if self._stream is None:
            self._stream = await self._address.open_stream()
            self._protocol = h11.Connection(h11.CLIENT)
            self._ended = False
            self.ever_connected = True
        done = False
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                await self._send(self._stream, method, path, body)
                response, content = await self._receive(self._stream)
            done = True
        except trio.TooSlowError:
            raise ConnectionLost(f"no answer from {self._address} within {ANSWER_TIMEOUT_S:.0f} s") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionLost(f"the connection to {self._address} was lost") from None
        except h11.RemoteProtocolError as error:
            if self._ended:
                raise ConnectionLost(f"{self._address} closed the connection before it answered") from None
            raise NotTopics(f"{self._address} does not speak HTTP as we do: {error}") from None
        finally:
            if not done:
                await self.aclose()
        if self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE:
            self._protocol.start_next_cycle()
        else:
            await self.aclose()
        return self._judge(response, content)

    async def _send(self, stream: trio.abc.Stream, method: str, path: str, body: bytes) -> None:
        headers = [("Host", self._address.authority), ("User-Agent", "topics"), *self._address.credentials]
        if body:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        request = h11.Request(method=method, target=self._address.prefix + path, headers=headers)
        sent = [self._protocol.send(request)]
        if body:
            sent.append(self._protocol.send(h11.Data(data=body)))
        sent.append(self._protocol.send(h11.EndOfMessage()))
        await stream.send_all(b"".join(part for part in sent if part))

    async def _receive(self, stream: trio.abc.Stream) -> tuple[h11.Response, bytes]:
        response: h11.Response | None = None
        content = bytearray()
        first = True
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                data = bytes(await stream.receive_some(_CHUNK_BYTES))
                self._ended = not data
                if first and data and not data.startswith(b"HTTP/"[: len(data)]):
                    raise NotTopics(f"{self._address} does not speak HTTP: is this its address?")
                first = False
                self._protocol.receive_data(data)
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.EndOfMessage) and response is not None:
                return response, bytes(content)

    def _judge(self, response: h11.Response, content: bytes) -> bytes:
        if 200 <= response.status_code < 300:
            return content
        headers = {name: value for name, value in response.headers if name == b"retry-after"}
        raise refusal(response.status_code, content, headers.get(b"retry-after", b""), who=str(self._address))


def refusal(status: int, content: bytes, retry_after: bytes, *, who: str) -> Exception:
    """The error that an answer stands for."""
    retry_after_s = int(retry_after) if retry_after.isdigit() else None
    try:
        error = _envelope_decoder.decode(content).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        if status in (502, 503, 504):  # a proxy that does not reach the server
            return ConnectionLost(f"{who} answers {status}")
        return NotTopics(f"{who} answers {status}, but not as a topics server: is this its address?")
    return ApiError(error.code, error.message, error.detail, retry_after_s=retry_after_s)
