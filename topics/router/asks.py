"""Questions to shards, awaited. Every one ends: with the answer, with the ApiError it carries, or with Unavailable when
the shard goes away, after which nobody knows whether it took effect."""

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


class _Waiting:
    __slots__ = ("done", "message")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.message: bytes | None = None  # None: there will be none


class Asks:
    def __init__(self, *, shards: int) -> None:
        self._links: list[Link | None] = [None] * shards
        self._linked = [trio.Event() for _ in range(shards)]
        self._waiting: list[dict[int, _Waiting]] = [{} for _ in range(shards)]
        self._next = 1
        self.on_unasked: Callable[[int, bytes], None] = lambda shard, message: None

    def link_up(self, shard: int, link: Link) -> None:
        self._links[shard] = link
        self._linked[shard].set()

    def link_down(self, shard: int) -> None:
        self._links[shard] = None
        self._linked[shard] = trio.Event()
        waiting, self._waiting[shard] = self._waiting[shard], {}
        for entry in waiting.values():
            entry.done.set()

    async def wait_linked(self, shard: int) -> None:
        await self._linked[shard].wait()

    async def ask(self, shard: int, op: Op, head: Any, body: bytes = b"") -> tuple[Any, bytes | memoryview]:
        """The answer and its body."""
        correlation, entry = self.send(shard, op, head, body)
        return await self._wait(shard, correlation, entry)

    async def answer(self, shard: int, correlation: int, entry: _Waiting) -> Any:
        """Of something sent before."""
        return (await self._wait(shard, correlation, entry))[0]

    async def _wait(self, shard: int, correlation: int, entry: _Waiting) -> tuple[Any, bytes | memoryview]:
        try:
            await entry.done.wait()
        finally:
            self._waiting[shard].pop(correlation, None)
        if entry.message is None:
            raise Unavailable
        return messages.decode_answer(entry.message)

    def send(self, shard: int, op: Op, head: Any, body: bytes = b"") -> tuple[int, _Waiting]:
        link = self._links[shard]
        if link is None:
            raise Unavailable
        correlation = self._next
        self._next += 1
        entry = self._waiting[shard][correlation] = _Waiting()
        link.writer.send_always(messages.pack(op, correlation, head, body))
        link.flush()
        return correlation, entry

    def unfollow(self, shard: int, correlation: int) -> None:
        if (link := self._links[shard]) is not None:
            link.writer.send_always(messages.pack(Op.UNFOLLOW, correlation, messages.Unfollow()))
            link.flush()

    def has_answers(self) -> bool:
        return any([link is not None and link.has_work() for link in self._links])

    def drain(self) -> None:
        for shard, link in enumerate(self._links):
            if link is None:
                continue
            for message in link.drain():
                _, correlation = messages.unpack_correlation(message)
                entry = self._waiting[shard].get(correlation)
                if entry is not None and entry.message is None:
                    entry.message = message
                    entry.done.set()
                else:
                    self.on_unasked(shard, message)
            link.flush()


def is_gone(error: ApiError) -> bool:
    return error.code == "topic_not_found"
