"""Dead letters: jobs that were delivered too often go to another topic.

Append there, with a key that is the job's own, then delete here: a crash in between leaves the job in both, and the
next try finds its key and appends nothing. What is refused (the topic is full, or may not be made) stays where it is,
out of sight, and is tried again until it is taken or the queue's config changes.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio

from topics import limits
from topics.actors import messages
from topics.actors.log import Log
from topics.actors.messages import Op
from topics.actors.rpc import Asks, Unavailable, Waiting
from topics.errors import ApiError
from topics.queue.lease_table import Lease
from topics.queue.queue import Queue
from topics.storage import columns
from topics.storage.columns import Columns
from topics.storage.config import TopicConfig, owner_of_name

_MARK = "$dead_letter_"
_STAMPED = (f"{_MARK}from", f"{_MARK}deliveries", f"{_MARK}src_seq")
_encode = msgspec.json.Encoder().encode
_decode_meta = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def stamped(meta: bytes | None, *, source: str, deliveries: int, seq: int) -> bytes:
    """A record's meta and where it comes from, in strings. What an earlier move stamped is replaced; the rest stays as
    it was."""
    stamp = _encode(dict(zip(_STAMPED, (source, str(deliveries), str(seq)), strict=True)))
    if meta is None:
        return stamp
    if _MARK.encode() in meta:
        kept = {key: value for key, value in _decode_meta(meta).items() if key not in _STAMPED}
        meta = _encode(kept)
    inside = meta.strip()[1:-1].strip()
    return b"{%b,%b" % (inside, stamp[1:]) if inside else stamp


class _Moving:
    """The jobs of a queue that are on their way."""

    __slots__ = ("jobs", "pausing", "wake")

    def __init__(self) -> None:
        self.jobs: list[Lease] = []
        self.pausing = False  # the last ones were refused
        self.wake = trio.Event()


class Letters:
    def __init__(self, asks: Asks, *, shards: int, log: Log, on_done: Callable[[], None]) -> None:
        self._asks = asks
        self._shards = shards
        self._log = log
        self._on_done = on_done
        self._moving: dict[Queue, _Moving] = {}
        self.under_way = 0  # queues whose jobs are being moved right now

    def add(self, queue: Queue, jobs: list[Lease]) -> bool:
        """More to move; True: nobody is at it yet, so `run` has to be started."""
        moving = self._moving.get(queue)
        if moving is not None:
            moving.jobs.extend(jobs)
            if moving.pausing:
                queue.passes.tried([lease.seq for lease in jobs])  # nobody should wait for the next try
            return False
        moving = self._moving[queue] = _Moving()
        moving.jobs.extend(jobs)
        return True

    def look(self, queue: Queue) -> None:
        """Something has changed: don't wait for the next try."""
        if (moving := self._moving.get(queue)) is not None:
            moving.wake.set()

    async def run(self, queue: Queue) -> None:
        """Until nothing is left to move, with pauses that grow while it is refused."""
        moving = self._moving[queue]
        pause_ms, longest_ms = limits.DEAD_LETTER_RETRY_MS
        try:
            while moving.jobs and not queue.ended:
                jobs = moving.jobs[: limits.DEAD_LETTER_BATCH]
                del moving.jobs[: len(jobs)]
                patient = [lease for lease in jobs if not queue.is_worn(lease)]
                queue.deliver_again(patient)
                self.under_way += 1
                try:
                    left, refused = await self._move([lease for lease in jobs if lease not in patient], queue)
                finally:
                    self.under_way -= 1
                queue.passes.tried([lease.seq for lease in jobs])
                self._on_done()
                moving.jobs.extend(left)  # behind the others: what never fits must not keep them
                if len(left) < len(jobs):
                    pause_ms = limits.DEAD_LETTER_RETRY_MS[0]
                    continue
                self._log.warning(
                    "dead letters refused",
                    queue=queue.topic,
                    to=queue.config.dead_letter,
                    jobs=len(moving.jobs),
                    reason=str(refused) or "the shard went away",
                    retry_ms=pause_ms,
                )
                moving.wake = trio.Event()
                moving.pausing = True
                queue.passes.tried([lease.seq for lease in moving.jobs])
                with trio.move_on_after(pause_ms / 1_000):
                    await moving.wake.wait()
                moving.pausing = False
                pause_ms = min(2 * pause_ms, longest_ms)
        finally:
            del self._moving[queue]
            queue.passes.tried([lease.seq for lease in moving.jobs])

    async def _move(self, jobs: list[Lease], queue: Queue) -> tuple[list[Lease], Exception | None]:
        """Those that could not be moved, and why."""
        moved: list[Lease] = []
        gone: list[Lease] = []
        refused: Exception | None = None
        reads: list[tuple[int, Waiting]] = []
        appends: list[tuple[Lease, int, int, Waiting]] = []
        try:
            for lease in jobs:
                reads.append(self._asks.send(queue.shard, Op.READ_RAW, self._read(queue, lease)))
            for lease, (correlation, entry) in zip(jobs, reads, strict=True):
                piece, body = await self._asks.wait(queue.shard, correlation, entry)
                if piece.seqs != [(lease.seq, 1)]:
                    gone.append(lease)  # somebody deleted it meanwhile
                    continue
                appends.append((lease, *self._append(queue, lease, bytes(body))))
            for lease, shard, correlation, entry in appends:
                try:
                    await self._asks.wait(shard, correlation, entry)
                    moved.append(lease)
                except (ApiError, Unavailable) as error:
                    refused = error
        except (ApiError, Unavailable) as error:
            refused = error
        finally:
            for correlation, _ in reads:
                self._asks.abandon(queue.shard, correlation)
            for _, shard, correlation, _ in appends:
                self._asks.abandon(shard, correlation)
        queue.gone([lease.seq for lease in gone])
        if moved and (failed := await self._delete(moved, queue)) is not None:
            moved, refused = [], failed
        return [lease for lease in jobs if lease not in moved and lease not in gone], refused

    async def _delete(self, moved: list[Lease], queue: Queue) -> Exception | None:
        outcome: list[Exception | None] = []
        done = trio.Event()

        def then(error: Exception | None) -> None:
            outcome.append(error)
            done.set()

        queue.move_away(moved, then)
        self._asks.flush()
        await done.wait()
        return outcome[0]

    @staticmethod
    def _read(queue: Queue, lease: Lease) -> messages.ReadRaw:
        return messages.ReadRaw(queue.topic, queue.topic_id, lease.seq - 1, 1, 1)

    def _append(self, queue: Queue, lease: Lease, body: bytes) -> tuple[int, int, Waiting]:
        config = queue.config
        target = config.dead_letter
        if target is None:
            raise ApiError("topic_not_found", "this queue has no dead-letter topic any more")
        record = Columns(body, count=1, ts=0)
        meta = stamped(record.metas()[0], source=queue.topic, deliveries=lease.deliveries, seq=lease.seq)
        batch = columns.pack(record.data(), tags=record.tags(), nodes=record.nodes(), metas=[msgspec.Raw(meta)])
        head = messages.Append(
            topic=target,
            count=1,
            size=Columns(batch, count=1, ts=0).size,
            create=config.auto_create,
            config=TopicConfig(durability=config.durability, durable=config.durable),
            key=f"{_MARK}{queue.topic_id:x}:{lease.seq}",
        )
        shard = owner_of_name(target, self._shards)
        correlation, entry = self._asks.send(shard, Op.APPEND, head, batch)
        return shard, correlation, entry
