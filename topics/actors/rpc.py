"""Questions to shards. Every one ends: with the answer, with the ApiError it carries, or with Unavailable when the
shard goes away, after which nobody knows whether it took effect. One that a reload is about to replace is asked nothing
more: `ask` waits for its successor, the others find it gone.

Two ways to ask: `ask` is awaited, for work that takes several steps; `call` takes a function, for what is done often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from topics.actors import messages
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.errors import ApiError


class Unavailable(Exception):
    """The shard is not there, or went away before it answered."""


Then = Callable[[Any, bytes | memoryview, Exception | None], None]  # the answer and its body, or what went wrong


class Waiting:
    """An answer that has not come yet."""

    __slots__ = ("done", "message")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.message: bytes | None = None  # None: there will be none


class Asks:
    def __init__(self, *, shards: int) -> None:
        self._links: list[Link | None] = [None] * shards
        self._linked = [trio.Event() for _ in range(shards)]
        self._waiting: list[dict[int, Waiting]] = [{} for _ in range(shards)]
        self._called: list[dict[int, Then]] = [{} for _ in range(shards)]
        self._loud = [False] * shards  # something was sent that the shard has to be woken for
        self._next = 1
        self._held = [False] * shards
        self.on_unasked: Callable[[int, bytes], None] = lambda shard, message: None

    def link_up(self, shard: int, link: Link) -> None:
        self._links[shard] = link
        self._held[shard] = False
        self._linked[shard].set()

    def hold(self, shard: int) -> None:
        """It is about to be replaced: what was asked is answered, and no more is asked until its next link is up."""
        self._held[shard] = True
        self._linked[shard] = trio.Event()

    def pending(self, shard: int) -> int:
        """Questions that it has not answered."""
        return len(self._called[shard]) + sum(entry.message is None for entry in self._waiting[shard].values())

    def has_sent_all(self, shard: int) -> bool:
        link = self._links[shard]
        return link is None or link.writer.sent_all

    def _open_link(self, shard: int) -> Link | None:
        return None if self._held[shard] else self._links[shard]

    def link_down(self, shard: int) -> None:
        """Its last answers are in the ring."""
        if (link := self._links[shard]) is not None:
            self._take(shard, link.last_words(), lambda shard, message: None)
        self._links[shard] = None
        if self._linked[shard].is_set():
            self._linked[shard] = trio.Event()
        waiting, self._waiting[shard] = self._waiting[shard], {}
        for entry in waiting.values():
            entry.done.set()  # those that have no answer will get none
        called, self._called[shard] = self._called[shard], {}
        for then in called.values():
            then(None, b"", Unavailable())

    def linked(self, shard: int) -> bool:
        return self._open_link(shard) is not None

    async def wait_linked(self, shard: int) -> None:
        await self._linked[shard].wait()

    # --- awaited ---

    async def ask(self, shard: int, op: Op, head: Any, body: bytes = b"") -> tuple[Any, bytes | memoryview]:
        """The answer and its body."""
        if self._held[shard]:
            await self.wait_linked(shard)
        correlation, entry = self.send(shard, op, head, body)
        return await self.wait(shard, correlation, entry)

    async def answer(self, shard: int, correlation: int, entry: Waiting) -> Any:
        """Of something sent before."""
        return (await self.wait(shard, correlation, entry))[0]

    async def wait(self, shard: int, correlation: int, entry: Waiting) -> tuple[Any, bytes | memoryview]:
        try:
            await entry.done.wait()
        finally:
            self._waiting[shard].pop(correlation, None)
        if entry.message is None:
            raise Unavailable
        return messages.decode_answer(entry.message)

    def send(self, shard: int, op: Op, head: Any, body: bytes = b"") -> tuple[int, Waiting]:
        link = self._open_link(shard)
        if link is None:
            raise Unavailable
        correlation = self._next
        self._next += 1
        entry = self._waiting[shard][correlation] = Waiting()
        link.writer.send_always(messages.pack(op, correlation, head, body))
        link.flush()
        return correlation, entry

    def abandon(self, shard: int, correlation: int) -> None:
        """Nobody will wait for this answer any more."""
        self._waiting[shard].pop(correlation, None)

    # --- called back ---

    def call(self, shard: int, op: Op, head: Any, then: Then, body: bytes = b"") -> int:
        """Goes out with the next flush; returns its correlation, or 0 if the shard is away."""
        link = self._open_link(shard)
        if link is None:
            then(None, b"", Unavailable())
            return 0
        correlation = self._next
        self._next += 1
        self._called[shard][correlation] = then
        self._loud[shard] = True
        link.writer.send_always(messages.pack(op, correlation, head, body))
        return correlation

    def tell(self, shard: int, op: Op, head: Any, body: bytes = b"", *, quietly: bool = False) -> None:
        """Something that has no answer; lost if the shard is away. Quietly: it is there when the shard next looks, but
        no reason to wake it."""
        if (link := self._links[shard]) is not None:
            self._loud[shard] = self._loud[shard] or not quietly
            link.writer.send_always(messages.pack(op, 0, head, body))

    def wake(self, shard: int) -> None:
        if (link := self._links[shard]) is not None:
            link.bell.ring()

    def unfollow(self, shard: int, correlation: int) -> None:
        if (link := self._links[shard]) is not None:
            link.writer.send_always(messages.pack(Op.UNFOLLOW, correlation, messages.Unfollow()))
            link.flush()

    # --- rounds ---

    def has_answers(self) -> bool:
        return any([link is not None and link.has_work() for link in self._links])

    def drain(self) -> None:
        for shard, link in enumerate(self._links):
            if link is not None:
                self._take(shard, link.drain(), self.on_unasked)
                self._flush(shard, link)

    def _take(self, shard: int, received: list[bytes], on_unasked: Callable[[int, bytes], None]) -> None:
        called = self._called[shard]
        for message in received:
            _, correlation = messages.unpack_correlation(message)
            if (then := called.pop(correlation, None)) is not None:
                _tell(then, message)
                continue
            entry = self._waiting[shard].get(correlation)
            if entry is not None and entry.message is None:
                entry.message = message
                entry.done.set()
            else:
                on_unasked(shard, message)

    def flush(self) -> None:
        for shard, link in enumerate(self._links):
            if link is not None:
                self._flush(shard, link)

    def _flush(self, shard: int, link: Link) -> None:
        if self._loud[shard]:
            link.flush()
            self._loud[shard] = link.writer.outbox_bytes > 0  # the rest will be as loud, when there is room for it
        else:
            link.writer.flush()


def _tell(then: Then, message: bytes) -> None:
    try:
        answer, body = messages.decode_answer(message)
    except ApiError as error:
        then(None, b"", error)
        return
    then(answer, body, None)


def is_gone(error: ApiError) -> bool:
    return error.code == "topic_not_found"


def as_api_error(error: Exception | None) -> ApiError:
    """What a client is told when a question of ours failed."""
    if isinstance(error, ApiError):
        return error
    return ApiError(
        "shard_unavailable",
        "a shard went away before it answered: whether the request took effect is unknown. Retry",
        {"outcome": "unknown"},
        retry_after_s=1,
    )
