"""Every call of the disk fails once, or from then on: what was answered holds, what was refused is not there.

A history (stepped.py) is played once to know its calls and what is seen after each step. Then it is played again for
each of its calls, which fails:

    error    EIO, ENOSPC, a write that is cut short and goes on, one that is cut short and then finds no space
    how      once; or this one and all later ones that such an error would hit

    the step then      what must be seen
    succeeds           what was seen without the error
    is refused         what was seen before it, of each topic whose request was refused
    ends the shard     after a start: what was seen before it, or after it

While the error lasts, more steps are tried; then it is gone, the shard is killed, started, and played on. What a client
was told last must be there, no seq may be given out twice, and another start must see the same.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from model import QuickDisk, Record, Shard

from topics.errors import ApiError, TopicsError

from .campaign import Campaign, Finding, Tally
from .copies import ROUTES, Wrong, check_copies, plain
from .crashpoints import _alike, _between, _told
from .stepped import CLASSES, History, Life, Sights, Step, look, plan, prepare, record, scratch, small_limits
from .tape import Fault, Kind, Recorder, TapedDisk, recording

Error = Literal["eio", "enospc", "short", "short_enospc"]
How = Literal["once", "always"]
CASES = 150  # of one seed
MORE = 3  # steps while the error lasts, and after it
NEEDS_SPACE: tuple[Kind, ...] = ("create", "write", "allocate", "make_dir")


@dataclass(frozen=True, slots=True)
class Case:
    call: int  # the n-th that is asked
    error: Error
    how: How

    def __str__(self) -> str:
        return f"{self.call}/{self.error}/{self.how}"

    @staticmethod
    def parse(text: str) -> Case:
        call, error, how = text.split("/")
        assert error in get_args(Error), error
        assert how in get_args(How), how
        return Case(int(call), cast(Error, error), cast(How, how))


class Injector:
    """What a Recorder asks before each call."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._asked = 0
        self._kind: Kind | None = None
        self._full = False  # the rest of a write that was cut short
        self.injected = 0
        self.over = False

    def fault(self, kind: Kind, what: str) -> OSError | int | None:
        self._asked += 1
        if self.over:
            return None
        if self._full and kind == "write":
            self._full = self._case.how == "always"
            return self._error(errno.ENOSPC, what)
        if self._asked < self._case.call or (self._case.how == "once" and self._asked > self._case.call):
            return None
        if self._asked == self._case.call:
            self._kind = kind
        if not self._hits(kind):
            return None
        self.injected += 1
        match self._case.error:
            case "eio":
                return OSError(errno.EIO, "bad sector", what)
            case "enospc":
                return OSError(errno.ENOSPC, "no space", what)
            case "short":
                return 7
            case _:
                self._full = True
                return 7

    def _hits(self, kind: Kind) -> bool:
        if self._case.error == "eio":
            return kind == self._kind
        if self._case.error == "enospc":
            return kind in NEEDS_SPACE
        return kind == "write"

    def _error(self, number: int, what: str) -> OSError:
        self.injected += 1
        return OSError(number, os.strerror(number), what)


def cases_of(history: History, asked: list[Kind]) -> list[Case]:
    """asked: the kinds of all calls."""
    found = []
    for number, kind in enumerate(asked, 1):
        for error in get_args(Error):
            hits = kind == "write" if error.startswith("short") else error == "eio" or kind in NEEDS_SPACE
            found += [Case(number, error, how) for how in get_args(How)] if hits else []
    return found


def kinds_asked(history: History) -> list[Kind]:
    """Of a play without errors: the calls on the tape, in order, those that only truncate at an open included."""
    kinds: list[Kind] = []

    def listen(kind: Kind, what: str) -> OSError | int | None:
        kinds.append(kind)
        return None

    base = scratch()
    try:
        with small_limits():
            Play(history, base, listen).all()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return kinds


class Play:
    """The steps of a history on a folder of their own, with calls that fail."""

    def __init__(self, history: History, base: Path, fault: Fault) -> None:
        self.history = history
        self.base = base
        self.recorder = Recorder(os.fspath(base), history.seed)
        self.recorder.fault = fault

    def all(self) -> None:
        prepare(self.base, cold=self.history.cold)
        with recording(self.recorder):
            life = Life(self.base, cold=self.history.cold, disk=cast(QuickDisk, TapedDisk(self.recorder)))
            try:
                for at, step in enumerate(self.history.steps):
                    life.play(step, at)
                    look(life.shard)
            finally:
                life.shard.crash()

    def check(self, injector: Injector) -> None:
        prepare(self.base, cold=self.history.cold)
        with recording(self.recorder):
            try:
                life = Life(self.base, cold=self.history.cold, disk=cast(QuickDisk, TapedDisk(self.recorder)))
            except (OSError, TopicsError):
                injector.over = True
                life = Life(self.base, cold=self.history.cold, disk=cast(QuickDisk, TapedDisk(self.recorder)))
            try:
                self._check(life, injector)
            finally:
                injector.over = True
                life.shard.crash()

    def _check(self, life: Life, injector: Injector) -> None:
        steps, moments = self.history.steps, self.history.moments
        at = 0
        while at < len(steps) and not injector.injected:
            before = injector.injected
            ended = self._play(life, steps[at], at)
            if injector.injected == before:
                at += 1
                continue
            self._judge(life, injector, steps[at], moments[at].sights, moments[at + 1].sights, ended)
            at += 1
        told = look(life.shard)
        for more in range(at, min(at + MORE, len(steps))):  # while the error lasts
            told = self._go_on(life, injector, steps[more], more, told)
        injector.over = True
        _restart(life, told, "the error was over")
        for more in range(at + MORE, min(at + 2 * MORE, len(steps))):
            life.play(steps[more], more)
        _check_seqs(life)
        _restart(life, look(life.shard), "steps after the error")

    def _play(self, life: Life, step: Step, at: int) -> BaseException | None:
        try:
            life.play(step, at)
        except (ApiError, OSError, TopicsError) as error:
            return error
        return None

    def _judge(
        self, life: Life, injector: Injector, step: Step, before: Sights, after: Sights, ended: BaseException | None
    ) -> None:
        if ended is not None and not isinstance(ended, ApiError):
            injector.over = True
            self._reopen(life)
            there = look(life.shard)
            _between_all(plain(there), plain(before), plain(after), f"{step} ended the shard ({ended!r})")
            check_copies(life.shard, [before], 0, there, under_way=after, killed=True)
            return
        now = look(life.shard)
        if ended is None:
            for name in sorted(now.keys() | after.keys()):
                found, expected_one = now.get(name), after.get(name)
                if found != expected_one:
                    raise Wrong(f"{step} succeeded: {name} is {_told(now.get(name))}, not {_told(after.get(name))}")
            return
        answered = set(step.others) - life.refused if step.operation == "round" else set()
        for name in sorted(now.keys() | before.keys() | after.keys()):
            expected = after if name in answered else before
            if now.get(name) != expected.get(name):
                raise Wrong(
                    f"{step} was refused ({ended!r}), but for {sorted(answered)}: {name} is {_told(now.get(name))}, "
                    f"not {_told(expected.get(name))}"
                )

    def _go_on(self, life: Life, injector: Injector, step: Step, at: int, told: Sights) -> Sights:
        """What is seen after another step; one that is refused changes nothing of what was there."""
        ended = self._play(life, step, at)
        if ended is not None and not isinstance(ended, ApiError):
            injector.over = True
            self._reopen(life)
        now = look(life.shard)
        if ended is None:
            return now
        touched = {step.topic, *step.others}
        if not isinstance(ended, ApiError):  # it was started again
            under_way = {name: now[name] for name in touched & now.keys()}
            check_copies(life.shard, [told], 0, now, under_way=under_way, killed=True)
            touched |= ROUTES.keys()
        for name in sorted((now.keys() | told.keys()) - touched):
            was, found = told.get(name), now.get(name)
            if not _alike(found, was) and not (was is not None and was.durability == "ephemeral"):
                raise Wrong(f"{step} failed ({ended!r}): {name} is {_told(found)}, was {_told(was)}")
        for name in (touched & told.keys()) - (set() if isinstance(ended, ApiError) else ROUTES.keys()):
            if CLASSES[name] == "ephemeral" or step.operation in ("delete", "delete_tag", "drop", "put"):
                continue
            kept = told[name].records
            found = now.get(name)
            if found is None or (not told[name].config.cap_records and found.records[: len(kept)] != kept):
                raise Wrong(f"{step} failed ({ended!r}): {name} is {_told(found)}, was {_told(told[name])}")
        return now

    def _reopen(self, life: Life) -> None:
        life.shard.crash()
        try:
            life.open(cast(QuickDisk, TapedDisk(self.recorder)))
        except (OSError, TopicsError) as error:
            raise Wrong(f"it does not start: {type(error).__name__}: {error}") from error


def _between_all(found: Sights, before: Sights, after: Sights, when: str) -> None:
    for name in sorted(found.keys() | before.keys() | after.keys()):
        if not _between(found.get(name), before.get(name), after.get(name)):
            raise Wrong(
                f"{when}: {name} is {_told(found.get(name))}, was {_told(before.get(name))}, "
                f"would be {_told(after.get(name))}"
            )


def _restart(life: Life, told: Sights, when: str) -> None:
    life.shard.crash()
    try:
        life.open(life.shard.disk)
    except (OSError, TopicsError) as error:
        raise Wrong(f"{when}: it does not start: {type(error).__name__}: {error}") from error
    now = look(life.shard)
    check_copies(life.shard, [told], 0, now, killed=True)
    for name in sorted(now.keys() | told.keys()):
        if name not in ROUTES and not _alike(now.get(name), told.get(name)):
            raise Wrong(f"{when}: {name} is {_told(now.get(name))}, was {_told(told.get(name))}")
        if told[name].head > now[name].head:
            raise Wrong(f"{when}: the head of {name} went from {told[name].head} back to {now[name].head}")


def _check_seqs(life: Life) -> None:
    for name, sight in look(life.shard).items():
        first = life.shard.append(name, [Record(b'"next"')]).first_seq
        if first <= sight.head:
            raise Wrong(f"{name}: seq {first} is given out, the head was {sight.head}")


def run(seed: int, only: str | None = None) -> Tally:
    tally = Tally()
    steps, cold = plan(seed)
    history = record(seed, steps=[step for step in steps if step.operation != "reboot"], cold=cold)
    chosen: list[Case]
    if only is not None:
        chosen = [Case.parse(only)]
    else:
        every = cases_of(history, kinds_asked(history))
        chosen = random.Random(f"ioerrors/{seed}").sample(every, min(CASES, len(every)))
    for case in chosen:
        base = scratch()
        injector = Injector(case)
        try:
            with small_limits():
                Play(history, base, injector.fault).check(injector)
        except Wrong as wrong:
            tally.find(Finding(seed, str(case), str(wrong)))
        except Exception as error:
            tally.find(Finding(seed, str(case), f"{type(error).__name__}: {error}"))
        finally:
            Shard.forget_all()
            shutil.rmtree(base, ignore_errors=True)
        tally.add("cases")
        tally.add("errors", injector.injected)
        tally.add(f"cases_{case.error}_{case.how}")
        tally.add("cases_without_an_error", injector.injected == 0)
    return tally


CAMPAIGN = Campaign(
    name="ioerrors",
    title="I/O errors injected: EIO, ENOSPC, short writes; once and always",
    goal=5_000,
    figure="cases",
    run=run,
    meaning="a call of the disk of a stepped shard fails, and perhaps all later ones",
)
