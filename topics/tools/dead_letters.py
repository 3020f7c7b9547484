"""Dead letters, and the shelves they are taken from: logs, which are trimmed, and queues, whose jobs are acked."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
import trio
from msgspec import Raw

from topics.client import Client, NewRecord, Record, TopicState, Work
from topics.client.client import PATIENCE_S
from topics.client.queue import Job
from topics.errors import TopicsError
from topics.tools.tag_glob import TagGlob

LEASE_MS = 120_000  # ends with the connection anyway; longer than one append is tried
PROVENANCE = "$dead_letter_"
_QUIET_S = 0.2  # a stream of jobs that has sent nothing for so long may have nothing more ...
_SILENT_S = 3.0  # ... and has nothing more if it stays so: what is leased is not on its way to us but others'


class CannotMove(TopicsError):
    """A dead letter that can't be redriven; the text says why and what to do."""


class DeadLetter:
    """A record of a dead-letter topic."""

    def __init__(self, topic: str, record: Record) -> None:
        self.topic = topic
        self.record = record
        self._meta: dict[str, Raw] = msgspec.json.decode(record.meta, type=dict[str, Raw]) if bytes(record.meta) else {}

    @property
    def seq(self) -> int:
        return self.record.seq

    @property
    def key(self) -> str:
        """Its identity. A topic that was deleted and made again has the same seqs, but not at the same time."""
        record = self.record
        parts = [self.topic, str(record.seq), str(record.ts_ms), record.tag, record.node, record.data, record.meta]
        digest = hashlib.sha256()
        for part in parts:
            text = b"" if part is None else part.encode() if isinstance(part, str) else bytes(part)
            digest.update(b"%d:%d:" % (part is not None, len(text)))
            digest.update(text)
        return f"redrive:{digest.hexdigest()}"

    @property
    def origin(self) -> str | None:
        """The queue it comes from."""
        try:
            return msgspec.json.decode(self._meta[f"{PROVENANCE}from"], type=str)
        except (KeyError, msgspec.DecodeError):
            return None

    @property
    def provenance(self) -> str | None:
        """Where it comes from, in words; None for what is no dead letter."""
        if self.origin is None:
            return None
        seq, deliveries = self._stamp("src_seq"), self._stamp("deliveries")
        words = f"from={self.origin}" + ("" if seq is None else f":{seq}")
        return words + ("" if deliveries is None else f" deliveries={deliveries}")

    def _stamp(self, name: str) -> str | None:
        """A number in a string; older servers wrote the number itself. Anything else is a client's, as it was sent."""
        value = self._meta.get(f"{PROVENANCE}{name}")
        if value is None:
            return None
        text = bytes(value).decode()
        return number if (number := text.removeprefix('"').removesuffix('"')).isdecimal() else text

    @property
    def job(self) -> NewRecord:
        """As it was before it died."""
        meta = {name: value for name, value in self._meta.items() if not name.startswith(PROVENANCE)}
        return NewRecord(self.record.data, tag=self.record.tag, node=self.record.node, meta=meta or None)

    def resembles(self, record: Record) -> bool:
        mine = self.record
        return (bytes(mine.data), mine.tag, mine.node) == (bytes(record.data), record.tag, record.node)

    def target(self, to: str | None) -> str:
        target = to or self.origin
        if target is None:
            raise CannotMove(
                f"record {self.seq} of {self.topic} does not say which queue it comes from; name one with --to"
            )
        if target == self.topic:
            raise CannotMove(f"record {self.seq} of {self.topic} would go where it is; name another queue with --to")
        return target

    def no_such(self, target: str) -> str:
        return (
            f'record {self.seq} of {self.topic} would go to "{target}", which does not exist; create it, or name '
            "another queue with --to"
        )


class Shelf(Protocol):
    async def take(self, most: int) -> list[DeadLetter]:
        """The next ones; none at the end."""

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """They are still being worked on."""

    async def remove(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """The next ones in the order of take(). Returns those that are gone for certain."""


@asynccontextmanager
async def open_shelf(client: Client, state: TopicState, glob: TagGlob | None, *, most: int) -> AsyncIterator[Shelf]:
    queue = state.queue
    if queue is None or glob is not None:
        if queue is not None and queue.in_flight:
            raise CannotMove(
                f"{state.topic} is a queue and workers hold {queue.in_flight} of its jobs; by tag they can't be told "
                "apart from the others. Stop the workers first, or redrive without --tag"
            )
        yield LogShelf(client, state, glob)
    else:
        node = f"redrive-{uuid.uuid4().hex[:8]}"
        async with client.work(state.topic, node, max=most, lease_ms=LEASE_MS) as work:
            yield QueueShelf(client, state, work, node)


class LogShelf:
    """Read from the beginning, and removed by trimming: there is no way to remove one record of a log by its seq.

    Without a glob everything up to the last one moved goes: all of it was moved. With a glob it is everything with
    the same tag up to there: the same holds, tag by tag.
    """

    def __init__(self, client: Client, state: TopicState, glob: TagGlob | None) -> None:
        self._client = client
        self._topic = state.topic
        self._end_seq = state.head_seq
        self._glob = glob
        self._cursor = 0
        self._read: deque[Record] = deque()

    async def take(self, most: int) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        while len(found) < most:
            if not self._read:
                if self._cursor >= self._end_seq:
                    break
                page = await self._client.read(self._topic, self._cursor)
                self._read.extend(record for record in page if record.seq <= self._end_seq)
                self._cursor = self._end_seq if page.caught_up else page.next_from_seq
                continue
            record = self._read.popleft()
            if self._glob is None or self._glob.matches(record.tag):
                found.append(DeadLetter(self._topic, record))
        return found

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        pass

    async def remove(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        last = letters[-1]
        page = await self._client.read(self._topic, last.seq - 1, limit=1)
        there = next(iter(page), None)
        same = there is None or there.seq > last.seq or DeadLetter(self._topic, there).key == last.key
        if page.head_seq < last.seq or not same:
            raise CannotMove(f"{self._topic} was deleted and made again meanwhile; nothing of the new one was removed")
        if self._glob is None:
            await self._client.delete(self._topic, before_seq=last.seq + 1)
        else:
            tagged = {letter.record.tag: letter.seq for letter in letters}
            for tag, seq in tagged.items():
                if tag is not None:  # a glob matches no other; without one everything would be trimmed
                    await self._client.delete(self._topic, before_seq=seq + 1, tag=tag)
        return list(letters)


class QueueShelf:
    """Leased and acked, so that workers on the same queue never hold what is being redriven.

    A stream and not claims, because the leases of a stream end with its connection: after a crash all dead letters are
    there again at once. Those that workers hold, or that wait for their delay, are left alone.
    """

    def __init__(self, client: Client, state: TopicState, work: Work, node: str) -> None:
        self._client = client
        self._topic = state.topic
        self._end_seq = state.head_seq
        self._work = work
        self._node = node
        self._leased_s = time.monotonic()

    async def take(self, most: int) -> list[DeadLetter]:
        job = await self._next()
        found: list[DeadLetter] = []
        while job is not None and job.seq <= self._end_seq:
            found.append(DeadLetter(self._topic, job))
            job = self._work.take_nowait() if len(found) < most else None
        # A newer one comes only when the older ones were handed out. It goes back when the stream is closed.
        self._leased_s = time.monotonic()
        return found

    async def _next(self) -> Job | None:
        started = trio.current_time()
        while True:
            with trio.move_on_after(_QUIET_S):
                return await anext(self._work)
            counts = (await self._client.state(self._topic, patience_s=PATIENCE_S)).queue
            waited_s = trio.current_time() - started
            if counts is None or (not counts.ready and (not counts.in_flight or waited_s > _SILENT_S)):
                return None
            if waited_s > PATIENCE_S:
                raise CannotMove(f"{counts.ready} jobs of {self._topic} are ready, but none is handed out")

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        if time.monotonic() - self._leased_s > LEASE_MS / 3_000:
            await self._client.extend(self._topic, self._node, _jobs(letters), lease_ms=LEASE_MS)
            self._leased_s = time.monotonic()

    async def remove(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        answer = await self._client.ack(self._topic, self._node, _jobs(letters))
        # What was skipped was leased over a connection that is lost. It comes again, and the journal knows it then.
        return [letter for letter in letters if letter.seq not in answer.skipped]


def _jobs(letters: Sequence[DeadLetter]) -> list[Job | int]:
    return [letter.record for letter in letters if isinstance(letter.record, Job)]
