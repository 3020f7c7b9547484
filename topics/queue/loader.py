"""How a queue becomes known: its config from the shard, which tells of changes from then on, and its table from the
leases log. After the shard has been away only the first is done again; the table stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.actors.rpc import Asks, Unavailable
from topics.errors import ApiError, topic_not_found
from topics.queue.queue import Queue
from topics.storage.columns import Columns
from topics.storage.leases import decode_event, log_id, log_name

_PAGE_RECORDS = 4_096
_PAGE_BYTES = 4 * limits.MIB


class Opening:
    """Requests that wait until a queue is known."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[Queue], None], Callable[[ApiError], None]]] = []


class Opener:
    def __init__(self, asks: Asks, *, shards: int) -> None:
        self._asks = asks
        self._watches: list[dict[int, Queue]] = [{} for _ in range(shards)]  # by the OPEN_QUEUE's correlation
        self._lives = [0] * shards

    def shard_gone(self, shard: int) -> None:
        self._watches[shard].clear()
        self._lives[shard] += 1

    def watched(self, shard: int, correlation: int) -> Queue | None:
        """Whose changes a push is about."""
        return self._watches[shard].get(correlation)

    def forget(self, queue: Queue) -> None:
        watches = self._watches[queue.shard]
        for correlation in [known for known, of in watches.items() if of is queue]:
            del watches[correlation]

    async def load(self, queue: Queue) -> None:
        life = self._lives[queue.shard]
        opened = await self.attach(queue)
        try:
            await self._replay(queue, opened)
        except BaseException:
            self.forget(queue)  # the next try makes another
            raise
        queue.loaded(opened.removals)
        if self._lives[queue.shard] != life:
            raise Unavailable  # what was said is true, but the one who said it will not tell of changes

    async def _replay(self, queue: Queue, opened: messages.QueueOpened) -> None:
        at = opened.log_from
        while at < opened.log_head:
            name, number = log_name(queue.topic), log_id(queue.topic_id)
            head = messages.ReadRaw(name, number, at, _PAGE_RECORDS, _PAGE_BYTES)
            piece, body = await self._asks.ask(queue.shard, Op.READ_RAW, head)
            if piece.count:
                for data in Columns(body, count=piece.count, ts=0).data():
                    queue.replay(decode_event(data))
            if piece.to_seq <= at:
                break
            at = piece.to_seq

    async def attach(self, queue: Queue) -> messages.QueueOpened:
        """Ask its shard for the topic, and to be told of changes."""
        shard = queue.shard
        life = self._lives[shard]
        outcome: list[tuple[messages.QueueOpened, Exception | None]] = []
        done = trio.Event()

        def take(opened: messages.QueueOpened, _: bytes | memoryview, error: Exception | None) -> None:
            # At once, not when the task gets its turn: a change of the topic may come right behind.
            if error is None and queue.topic_id not in (0, opened.topic_id):
                error = topic_not_found(queue.topic)
            if error is None:
                queue.opened(opened)
            outcome.append((opened, error))
            done.set()

        if not self._asks.linked(shard):
            raise Unavailable
        correlation = self._asks.call(shard, Op.OPEN_QUEUE, messages.OpenQueue(queue.topic), take)
        self._watches[shard][correlation] = queue
        self._asks.flush()
        await done.wait()
        opened, error = outcome[0]
        if error is None and self._lives[shard] != life:
            error = Unavailable()
        if error is not None:
            self._watches[shard].pop(correlation, None)
            raise error
        return opened
