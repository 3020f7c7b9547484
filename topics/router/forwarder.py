"""Copies one topic into another: one task per pair, for all routers between the two.

    open -> read -> copy -> forward -> read -> ...
     |       |               |
     |       |               +- the pipe stands elsewhere: go on from there
     |       +- nothing new: sleep until the source's head moves
     +- a shard is away: wait for it and open again; the destination says where to go on

The destination holds the position together with the copies, so nothing needs to be remembered here. A destination that
refuses (full, and its policy is to reject; or too much in memory) is asked again, ever more slowly; nothing is skipped.
"""

from __future__ import annotations

from typing import Any

import trio

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.actors.rpc import Asks, Unavailable, is_gone
from topics.errors import ApiError
from topics.router.copying import copy
from topics.router.source import Source
from topics.storage.routers import Rule

_SHORTEST_S = 0.02
_LONGEST_S = 1.0


class TopicGone(Exception):
    """One of the two topics, or the life of it that was meant, does not exist any more."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic


class Forwarder:
    def __init__(
        self, asks: Asks, source: Source, rules: list[Rule], *, dest_shard: int, ring_hops: int | None
    ) -> None:
        self._asks = asks
        self._source = source
        self.rules = rules
        self.ring_hops = ring_hops
        self.dest_shard = dest_shard
        self.dest = rules[0].dest
        self.dest_id = rules[0].dest_id
        self.at = 0
        self._until: int | None = None  # the destination wants what lies before this seq once more
        self.forwarded: dict[str, int] = {}
        self.records = 0
        self._limit = limits.FORWARD_RECORDS
        self.waits_for = ""  # why it does not go on, in words
        self._pause_s = _SHORTEST_S
        self._life = trio.CancelScope()
        self.scope = trio.CancelScope()
        self.opened = trio.Event()  # `forwarded` is known
        self.ended = trio.Event()

    async def run(self) -> None:
        """Until cancelled; raises TopicGone."""
        try:
            with self.scope:
                while True:
                    with trio.CancelScope() as self._life:
                        await self._live()
        finally:
            self.ended.set()

    async def _live(self) -> None:
        """From opening the pipe until something is wrong with it, and a pause."""
        try:
            await self._asks.wait_linked(self.dest_shard)
            await self._asks.wait_linked(self._source.shard)
            await self._open()
            while True:
                await self._step()
                self._pause_s = _SHORTEST_S
        except Unavailable:
            self.waits_for = "a shard that is away"
            await trio.sleep(_SHORTEST_S)
        except ApiError as error:
            self.waits_for = error.message
            with trio.move_on_after(self._pause_s):
                if error.code == "shard_unavailable":
                    await self._source.wait_moved()  # it may be waiting for copies of its own
                else:
                    await trio.sleep_forever()
            self._pause_s = min(2 * self._pause_s, _LONGEST_S)

    def dest_gone(self) -> None:
        """The destination's shard went away: when it is back it may stand elsewhere, and wait for us."""
        self._life.cancel()

    @property
    def pipe(self) -> messages.PipeRow:
        return messages.PipeRow(self.dest, self.dest_id, self._source.topic_id, self.at)

    @property
    def lag(self) -> int:
        """Records of the source that were not looked at yet, as far as we know of them."""
        return max(0, self._source.head_seq - self.at) if self.opened.is_set() else 0

    async def stop(self) -> None:
        self.scope.cancel()
        await self.ended.wait()

    async def _open(self) -> None:
        at = min(rule.since for rule in self.rules)
        routers = [rule.router for rule in self.rules]
        ring = self.ring_hops is not None
        head = messages.OpenPipe(self.dest, self.dest_id, self._source.topic_id, at, routers, ring)
        opened = await self._ask_dest(Op.OPEN_PIPE, head)
        self.at, self._until, self.forwarded = opened.at, opened.until, dict(opened.forwarded)
        self.opened.set()
        # Even if there is nothing: the destination may wait to hear that. And anew: what a destination has refused, and
        # another one has read, may have been deleted since.
        await self._forward(shared=False)

    async def _step(self) -> None:
        if self._until is None:
            await self._source.wait_beyond(self.at)
        await self._forward()

    async def _forward(self, *, shared: bool = True) -> None:
        source = self._source
        try:
            await source.follow()
            ring = self.ring_hops is not None
            limit, until = self._limit, self._until
            piece, body = await source.read(self.at, limit=limit, ring=ring, shared=shared, until=until)
        except ApiError as error:
            if is_gone(error):
                raise TopicGone(source.topic) from None
            raise
        copied = copy(self.rules, piece, body, ring_hops=self.ring_hops)
        head = messages.Forward(
            topic=self.dest,
            topic_id=self.dest_id,
            source_id=source.topic_id,
            from_seq=self.at,
            to_seq=piece.to_seq,
            count=copied.count,
            size=copied.size,
            lost=piece.lost,
            complete=piece.complete,
            level=piece.to_seq == piece.head_seq,
            counts=copied.counts,
            sources=copied.sources,
            hops=copied.hops,
            told=copied.told,
        )
        try:
            answer = await self._ask_dest(Op.FORWARD, head, copied.body)
        except ApiError as error:
            if not _is_short_of_room(error) or piece.count <= 1:
                raise
            self._limit = piece.count // 2  # there may be room for a part
            return
        self._limit = min(2 * self._limit, limits.FORWARD_RECORDS)
        self.waits_for = ""
        if self._until is not None:
            self.at, self._until = answer.at, answer.until
            self._pause_s = _SHORTEST_S
            return  # none of these copies is new
        if answer.at != piece.to_seq:
            raise Unavailable  # somebody else was there, or nobody any more: ask again where it stands
        self.at = answer.at
        self.records += copied.count
        for router, count in copied.counts.items():
            self.forwarded[router] = self.forwarded.get(router, 0) + count

    async def _ask_dest(self, op: Op, head: messages.OpenPipe | messages.Forward, body: bytes = b"") -> Any:
        try:
            answer, _ = await self._asks.ask(self.dest_shard, op, head, body)
        except ApiError as error:
            if is_gone(error):
                raise TopicGone(self.dest) from None
            if error.code == "not_found":
                raise Unavailable from None  # its pipe was closed meanwhile: open it again
            raise
        return answer


def _is_short_of_room(error: ApiError) -> bool:
    over_quota = error.detail is not None and error.detail.get("limit") == "max_total_bytes"
    return over_quota or error.code in ("topic_full", "record_too_large")
