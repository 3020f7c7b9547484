"""A topic that is copied from: who wants to know is woken when its head moves, and reads are shared.

Several destinations that stand at the same place get the same batch from one read. The first record after a pause is
read at once; a stream of them in turns of a millisecond or a few.
"""

from __future__ import annotations

import math

import trio

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op, RawPiece
from topics.actors.rpc import Asks

_GAP_S = 0.0005  # between two reads that keep up with the source: four of these, and one for each destination

_UNKNOWN = -1
_SHARED_S = 0.02  # what was read may have been deleted since: only whoever comes at the same time gets it too


class Source:
    def __init__(self, asks: Asks, *, topic: str, topic_id: int, shard: int) -> None:
        self._asks = asks
        self.topic = topic
        self.topic_id = topic_id
        self.shard = shard
        self.head_seq = 0
        self.correlation = 0  # under which the shard tells us; 0: it does not
        self.users = 0
        self._read_at = -math.inf
        self._moved = trio.Event()
        self._last: tuple[int, RawPiece, bytes] | None = None
        self._reading: dict[int, trio.Event] = {}
        self._follow_lock = trio.Lock()

    async def follow(self) -> None:
        """See that the shard tells us when something comes. Raises what ask raises."""
        async with self._follow_lock:
            if self.correlation:
                return
            head = messages.FollowHead(self.topic, self.topic_id)
            correlation, entry = self._asks.send(self.shard, Op.FOLLOW_HEAD, head)
            # Known before the answer is looked at: the first news may come right behind it.
            self.correlation, self.head_seq = correlation, _UNKNOWN
            try:
                answer = await self._asks.answer(self.shard, correlation, entry)
            except BaseException:
                self.correlation = 0
                self._asks.unfollow(self.shard, correlation)
                raise
            self.moved(max(self.head_seq, answer.head_seq))

    def moved(self, head_seq: int) -> None:
        self.head_seq = head_seq
        self._moved.set()
        self._moved = trio.Event()

    def unfollowed(self) -> None:
        """The shard is away: everyone who waits looks for himself."""
        self.correlation = 0
        self._last = None
        self._moved.set()
        self._moved = trio.Event()

    async def wait_moved(self) -> None:
        """Until the shard says something of it: that there is more, or that some of it can be read now."""
        await self._moved.wait()

    async def wait_beyond(self, seq: int) -> None:
        """Until the head is not there any more, or nobody would tell us. Under load not at once: what comes in the
        meantime goes with it, and whoever writes to the source has the processors for himself so long."""
        while self.correlation and self.head_seq == seq:
            await self._moved.wait()
        early_s = self._read_at + _GAP_S * (4 + self.users) - trio.current_time()
        if early_s > 0:
            await trio.sleep(early_s)

    async def read(
        self,
        from_seq: int,
        *,
        limit: int = limits.FORWARD_RECORDS,
        ring: bool = False,
        shared: bool = True,
        until: int | None = None,
    ) -> tuple[RawPiece, bytes]:
        """shared: what another destination at the same place has just read will do. until: nothing behind this seq."""
        if limit < limits.FORWARD_RECORDS or not shared or until is not None:
            return await self._read(from_seq, limit, ring, until)
        while (under_way := self._reading.get(from_seq)) is not None:
            await under_way.wait()
        last = self._last
        fresh = trio.current_time() - self._read_at < _SHARED_S
        if last is not None and fresh and last[0] == from_seq and last[1].to_seq > from_seq:
            return last[1], last[2]
        done = self._reading[from_seq] = trio.Event()
        try:
            piece, body = await self._read(from_seq, limit, ring, None)
            self._last = (from_seq, piece, body) if self.users > 1 else None
            return piece, body
        finally:
            del self._reading[from_seq]
            done.set()

    async def _read(self, from_seq: int, limit: int, ring: bool, until: int | None) -> tuple[RawPiece, bytes]:
        self._read_at = trio.current_time()
        head = messages.ReadRaw(self.topic, self.topic_id, from_seq, limit, limits.FORWARD_BYTES, ring, until)
        piece, body = await self._asks.ask(self.shard, Op.READ_RAW, head)
        return piece, bytes(body)
