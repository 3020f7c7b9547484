"""Dead letters back into their queues: appended first, removed after.

```
shelf.take() ─► one append each, with a key of its own ─► shelf.remove() ─► take() …
      ▲                       │ journal: begun, written             │ journal: settled
      └── what an earlier redrive left half done is settled first ──┘
```

Rules.
- A dead letter is removed only after its copy was acknowledged. It is written one append at a time, with a key made of
  everything it is: whoever redrives it again, from wherever, writes nothing as long as the target remembers the key.
- Beyond that time the journal knows. What it holds as written is only removed. What was begun and has no answer is
  looked for in the target; if that does not decide it either, nothing is done and a person is asked.
- The first that can't be moved ends it, because a log can be trimmed only from its beginning.
- Only what was there at the start is moved: a job that fails again comes back, and would be moved for ever.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import msgspec
import trio
from msgspec import Raw

from topics.cli.journal import Append, Journal, Open
from topics.client import ApiError, Client, NewRecord, OutcomeUnknown, Record, TopicState, Work
from topics.client.client import PATIENCE_S
from topics.client.queue import Job
from topics.errors import TopicsError

BATCH = 100  # dead letters that are removed together, and at most leased at a time
LEASE_MS = 120_000  # ends with the connection anyway; longer than one append is tried
LOOK_BEHIND = 10_000  # records of the target that are looked through for a copy
PROVENANCE = "$dead_letter_"
# Between looking at the clock and the server looking at its own: a key that is about to be forgotten is not relied on.
_MARGIN_MS = 5_000
_QUIET_S = 0.2  # a stream of jobs that has sent nothing for so long may have nothing more ...
_SILENT_S = 3.0  # ... and has nothing more if it stays so: what is leased is not on its way to us but others'

InDoubt = Literal["write", "remove"]


class CannotMove(TopicsError):
    """A dead letter that can't be redriven; the text says why and what to do."""


class TagGlob:
    """A tag, or with a * at its end all tags that begin so: what a delete takes."""

    def __init__(self, text: str) -> None:
        self._prefix = text.removesuffix("*")
        self._exact = self._prefix == text
        if not self._prefix and self._exact:
            raise ValueError("is empty")
        if "*" in self._prefix:
            raise ValueError("may have one *, at its end")

    def matches(self, tag: str | None) -> bool:
        if tag is None:
            return False
        return tag == self._prefix if self._exact else tag.startswith(self._prefix)


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
        seq, deliveries = (self._meta.get(f"{PROVENANCE}{name}") for name in ("src_seq", "deliveries"))
        words = f"from={self.origin}" + ("" if seq is None else f":{bytes(seq).decode()}")
        return words + ("" if deliveries is None else f" deliveries={bytes(deliveries).decode()}")

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


class Target(msgspec.Struct):
    name: str
    window_ms: int  # for how long it remembers keys
    head_seq: int  # at least


# --- where dead letters lie --------------------------------------------------------------------------


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


# --- moving ------------------------------------------------------------------------------------------


class Tally:
    """What has happened so far."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()  # by target
        self.finished = 0  # written by an earlier redrive, and now removed

    @property
    def done(self) -> int:
        return self.moved.total() + self.finished


class Redrive:
    def __init__(
        self,
        client: Client,
        topic: str,
        journal: Journal,
        tally: Tally,
        *,
        to: str | None = None,
        glob: TagGlob | None = None,
        limit: int | None = None,
        in_doubt: InDoubt | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.tally = tally
        self.stop = False  # set it to end between two dead letters
        self._client = client
        self._topic = topic
        self._journal = journal
        self._to = to
        self._glob = glob
        self._limit = limit
        self._in_doubt = in_doubt
        self._now_ms = now_ms
        self._targets: dict[str, Target] = {}
        self._written: set[str] = set()  # by this run; kept only until it is removed

    async def run(self) -> None:
        state = await self._client.state(self._topic, patience_s=PATIENCE_S)
        await self._forget_removed()
        await self._decide_doubts()
        async with open_shelf(self._client, state, self._glob, most=self._room()) as shelf:
            while not self.stop:
                letters = await shelf.take(self._room()) if self._room() else []
                if not letters:
                    break
                await self._move(letters, shelf)
        await self._forget_removed()

    def _room(self) -> int:
        """For how many more, in one batch."""
        return BATCH if self._limit is None else min(BATCH, self._limit - self.tally.done)

    async def _move(self, letters: Sequence[DeadLetter], shelf: Shelf) -> None:
        plan, failure = await self._plan(letters)
        written: list[DeadLetter] = []
        for letter, target in plan:
            if self.stop:
                break
            try:
                await shelf.keep(letters)
                await self._write(letter, target)
            except TopicsError as error:
                failure = error
                break
            written.append(letter)
        if written:
            keys = [letter.key for letter in await shelf.remove(written)]
            self._journal.settle(keys)
            self._written.difference_update(keys)
        self._journal.end_plan()
        if failure is not None:
            raise failure

    async def _plan(
        self, letters: Sequence[DeadLetter]
    ) -> tuple[list[tuple[DeadLetter, Target | None]], TopicsError | None]:
        """Each with its target; None for what is written already. Ends at the first that has none, with the reason."""
        plan: list[tuple[DeadLetter, Target | None]] = []
        failure: TopicsError | None = None
        for letter in letters:
            try:
                plan.append((letter, None if self._journal.is_written(letter.key) else await self._target_of(letter)))
            except TopicsError as error:
                failure = error
                break
        self._journal.plan([self._entry(letter, target) for letter, target in plan if target is not None])
        return plan, failure

    def _entry(self, letter: DeadLetter, target: Target) -> Append:
        return Append(
            key=letter.key, seq=letter.seq, target=target.name, head_seq=target.head_seq, at_ms=self._now_ms()
        )

    async def _write(self, letter: DeadLetter, target: Target | None) -> None:
        key = letter.key
        if target is None:
            self.tally.finished += key not in self._written  # not if its lease was lost and it comes again
            return
        self._journal.begin(self._entry(letter, target))
        try:
            await self._append(letter, target, patience_ms=target.window_ms // 2)
        except OutcomeUnknown:
            raise
        except TopicsError:
            self._journal.settle([key])  # it is certain that nothing was written
            raise
        self._written.add(key)
        self.tally.moved[target.name] += 1

    async def _append(self, letter: DeadLetter, target: Target, *, patience_ms: int) -> None:
        """A try later than the target's memory for keys could write a second copy."""
        patience_s = min(PATIENCE_S, patience_ms / 1_000)
        try:
            receipt = await self._client.publish(
                target.name, [letter.job], key=letter.key, create=False, patience_s=patience_s
            )
        except ApiError as error:
            words = f"{target.name} does not take record {letter.seq} of {self._topic}: {error}"
            raise ApiError(error.code, words, error.detail) from None
        self._journal.write(letter.key)
        target.head_seq = max(target.head_seq, receipt.head_seq)

    async def _target_of(self, letter: DeadLetter) -> Target:
        name = letter.target(self._to)
        try:
            return await self._target(name)
        except ApiError as error:
            if error.code != "topic_not_found":
                raise
            raise CannotMove(letter.no_such(name)) from None

    async def _target(self, name: str) -> Target:
        if name not in self._targets:
            self._targets[name] = target_of(await self._client.state(name, patience_s=PATIENCE_S))
        return self._targets[name]

    # --- what an earlier redrive has left ---

    async def _forget_removed(self) -> None:
        gone = [begun.key for begun in self._journal.unremoved() if await self._find(begun) is None]
        if gone:
            self._journal.settle(gone)

    async def _decide_doubts(self) -> None:
        undecided: list[Append] = []
        for begun in self._journal.doubts():
            letter = await self._find(begun)
            try:
                target = None if letter is None else await self._target(begun.target)
            except ApiError as error:
                if error.code != "topic_not_found":
                    raise
                target = None  # whatever was written to it is gone
            if letter is None or target is None:
                self._journal.settle([begun.key])
            elif (rest_ms := self._remembered_ms(begun, target)) > 0:
                await self._append(letter, target, patience_ms=rest_ms)  # writes nothing if it was written
            elif self._in_doubt == "write" or await self._is_absent(letter, begun):
                self._journal.settle([begun.key])
            elif self._in_doubt == "remove":
                self._journal.write(begun.key)
            else:
                undecided.append(begun)
        if undecided:
            raise CannotMove(_question(self._topic, undecided))

    def _remembered_ms(self, begun: Append, target: Target) -> int:
        """For how long the target still knows the key, if it was written."""
        passed_ms = self._now_ms() - begun.at_ms
        return target.window_ms - _MARGIN_MS - passed_ms if passed_ms >= 0 else 0  # a clock that was set back

    async def _find(self, begun: Append) -> DeadLetter | None:
        page = await self._client.read(self._topic, begun.seq - 1, limit=1)
        letters = (DeadLetter(self._topic, record) for record in page)
        return next((letter for letter in letters if letter.key == begun.key), None)

    async def _is_absent(self, letter: DeadLetter, begun: Append) -> bool:
        """Whether it is certain that the target has no copy: everything written there since can be seen, and it is
        something else.
        """
        seq = begun.head_seq
        while True:
            page = await self._client.read(begun.target, seq, meta=False)
            if page.head_seq < begun.head_seq:
                return True  # deleted and made again
            if page.head_seq - begun.head_seq > LOOK_BEHIND:
                return False
            for record in page:
                if record.seq != seq + 1 or letter.resembles(record):
                    return False
                seq = record.seq
            if page.caught_up:
                return seq == page.head_seq


def target_of(state: TopicState) -> Target:
    return Target(state.topic, int(state.config["idempotency_window_ms"]), state.head_seq)


def _question(topic: str, undecided: Sequence[Append]) -> str:
    first = undecided[0]
    more = f" (and {len(undecided) - 1} more)" if len(undecided) > 1 else ""
    return (
        f"an earlier redrive was cut off while it wrote record {first.seq} of {topic}{more} to {first.target}, too "
        f"long ago for {first.target} to know whether it did. The copy would be behind seq {first.head_seq} there, "
        "unless a worker has done it since. Look for it, then run this again with --in-doubt write (if it is there, "
        "it will be there twice) or --in-doubt remove (if it is not, it will be lost)"
    )


# --- looking first -----------------------------------------------------------------------------------


class Share(msgspec.Struct, kw_only=True):
    """What would go to one target."""

    target: str
    dead_letters: int = 0
    first_seq: int = 0
    last_seq: int = 0
    exists: bool = True


class Survey(msgspec.Struct, kw_only=True):
    shares: list[Share]
    finish: int  # already written by an earlier redrive: would only be removed
    obstacle: str | None  # where it would end


async def survey(
    client: Client, topic: str, left_open: Open, *, to: str | None, glob: TagGlob | None, limit: int | None
) -> Survey:
    """What a redrive would do. Nothing is leased for it."""
    shares: dict[str, Share] = {}
    found = Survey(shares=[], finish=0, obstacle=None)
    shelf = LogShelf(client, await client.state(topic), glob)
    done = 0
    while found.obstacle is None:
        room = BATCH if limit is None else min(BATCH, limit - done)
        letters = await shelf.take(room) if room else []
        if not letters:
            break
        for letter in letters:
            done += 1
            if letter.key in left_open.written:
                found.finish += 1
                continue
            try:
                share = await _share(client, letter.target(to), shares)
            except CannotMove as error:
                found.obstacle = str(error)
                break
            if not share.exists:
                found.obstacle = letter.no_such(share.target)
                break
            share.first_seq = share.first_seq or letter.seq
            share.last_seq = letter.seq
            share.dead_letters += 1
    found.shares = list(shares.values())
    return found


async def _share(client: Client, target: str, shares: dict[str, Share]) -> Share:
    if target not in shares:
        share = shares[target] = Share(target=target)
        try:
            await client.state(target)
        except ApiError as error:
            if error.code != "topic_not_found":
                raise
            share.exists = False
    return shares[target]
