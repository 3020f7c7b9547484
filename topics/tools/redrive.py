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

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from topics.client import ApiError, Client, OutcomeUnknown, TopicState
from topics.client.client import PATIENCE_S
from topics.errors import TopicsError
from topics.tools.dead_letters import CannotMove, DeadLetter, LogShelf, Shelf, open_shelf
from topics.tools.redrive_journal import Append, Journal, Open
from topics.tools.tag_glob import TagGlob

BATCH = 100  # dead letters that are removed together, and at most leased at a time
LOOK_BEHIND = 10_000  # records of the target that are looked through for a copy
# Between looking at the clock and the server looking at its own: a key that is about to be forgotten is not relied on.
_MARGIN_MS = 5_000

InDoubt = Literal["write", "remove"]


class Target(msgspec.Struct):
    name: str
    window_ms: int  # for how long it remembers keys
    head_seq: int  # at least


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
