"""A request, what a handler makes of it, and the answer. The same for both lanes.

A handler is a plain function `Request -> Response | Call | Gather | Wait` and does no IO: it answers by itself, names
the question that shards must answer first and how to render what they say, or lets the request wait for an answer that
it shares with others. The lanes do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from topics.actors.messages import Op
from topics.errors import ApiError
from topics.keys import Key

JSON = "application/json"


class Request(msgspec.Struct, gc=False):
    """What a handler may look at. `name` is the checked topic of the path, if the route has one; `shard` owns it."""

    name: str
    shard: int
    query: Mapping[str, str]
    body: bytes | bytearray
    idempotency_key: str | None
    started_ns: int
    headers: Mapping[bytes, bytes] = {}  # only for routes that look at them: names in lower case
    key: Key | None = None  # whose request it is; None: there are no keys


class Response(msgspec.Struct):
    status: int
    body: bytes | memoryview
    headers: tuple[tuple[str, str], ...] = ()
    close: bool = False
    tail: bytes = b""  # the end of the body, kept apart so that a large one need not be copied to add it
    stream: Any = None  # a streams.Stream that goes on where this response ends
    packed: bytes = b""  # body and tail as gzip, once a client wanted that: a response may be the answer to many


class Call(msgspec.Struct, kw_only=True, gc=False, eq=False):
    """One question to one shard. Subclasses add what their answer needs to be rendered."""

    shard: int
    op: Op
    head: Any
    body: bytes = b""
    pieces: list[bytes] | None = None  # of a body that is too large to be joined; others may overtake it
    timeout_ms: int = 0  # beyond the usual one: a long poll's wait
    throttle_us: int = 0  # how long it was kept back
    most: int = 0  # bytes that its answer may have, if these are many

    def render(self, answer: Any, body: bytes | memoryview) -> Any:
        return answer

    def lessen(self) -> None:
        """Ask for a smaller answer, if there is one."""

    @property
    def size(self) -> int:
        return len(self.body) if self.pieces is None else sum(map(len, self.pieces))


class Gather:
    """Questions to several shards; rendered when all have answered, perhaps into the next question."""

    __slots__ = ("calls", "render", "tolerant")

    def __init__(
        self, calls: Sequence[Call], render: Callable[[list[Any]], Outcome], *, tolerant: bool = False
    ) -> None:
        self.calls = calls
        self.render = render
        self.tolerant = tolerant  # a question that failed has the answer None


class Wait:
    """An answer that is made for several requests together: `join` takes the sink of one more."""

    __slots__ = ("join",)

    def __init__(self, join: Callable[[Sink], None]) -> None:
        self.join = join


Outcome = Response | Call | Gather | Wait


class Sink(Protocol):
    """Where the rendered answer of a call goes."""

    def finish(self, value: Any) -> None: ...
    def abort(self) -> None: ...  # finishing it failed: the connection that asked ends


class GatherSink:
    """Collects the answers of a Gather in shard order; the first failure is the whole answer."""

    def __init__(
        self, gather: Gather, submit: Callable[[Outcome], None], abort: Callable[[], None] = lambda: None
    ) -> None:
        self._gather = gather
        self._submit = submit
        self.abort = abort
        self._values: list[Any] = [None] * len(gather.calls)
        self._left = len(gather.calls)

    def slot(self, index: int) -> Sink:
        return _Slot(self, index)

    def take(self, index: int, value: Any) -> None:
        if self._left == 0:
            return
        if isinstance(value, Response):
            if not self._gather.tolerant:
                self._left = 0
                self._submit(value)
                return
            value = None
        self._values[index] = value
        self._left -= 1
        if self._left == 0:
            try:
                outcome = self._gather.render(self._values)
            except ApiError as error:
                outcome = error_response(error)
            self._submit(outcome)


class _Slot:
    def __init__(self, parent: GatherSink, index: int) -> None:
        self._parent = parent
        self._index = index

    def finish(self, value: Any) -> None:
        self._parent.take(self._index, value)

    def abort(self) -> None:
        self._parent.abort()


def error_content(error: ApiError) -> dict[str, Any]:
    """As it stands in an answer, or in the part of one that it is about."""
    content: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.detail is not None:
        content["detail"] = error.detail
    return content


def error_response(error: ApiError, *, close: bool = False) -> Response:
    headers: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        headers = (("Retry-After", str(error.retry_after_s)),)
    if error.code == "method_not_allowed" and error.detail:
        headers += (("Allow", ", ".join(error.detail.get("allow", []))),)
    if error.code == "unauthorized":
        headers += (("WWW-Authenticate", "Bearer"),)
    if error.code == "upgrade_required":
        headers += (("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"))
    return Response(error.status, msgspec.json.encode({"error": error_content(error)}), headers, close)
