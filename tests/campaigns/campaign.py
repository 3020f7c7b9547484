"""What a campaign is, and how one is run: seeds to worker processes until a goal or a deadline is reached.

A worker takes one seed at a time and returns its Tally. Findings stop nothing: a run lists all of them, each with the
command that repeats it. Seeds follow each other, so that two runs with different first seeds do different things, and
their figures add up.

A run that is told to end tells its workers, which leave the unit that they are in, end their servers and are gone.
Seeds of such units count as not done. A worker whose run dies does the same.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

import offspring
from offspring import Ending

EXAMPLES = 3  # of each kind of finding
SAID_EVERY_S = 20.0
NOTED_EVERY_S = 60.0
CUT_WITHIN_S = 30.0  # a worker that is told to end ends its servers
_TOLD = offspring.ENDS
_WAS_CUT = 128 + signal.SIGTERM  # exit code of a worker


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be."""

    seed: int
    only: str  # the case, for `run`
    what: str

    @property
    def kind(self) -> str:
        """The same for findings that differ in names and numbers only."""
        first = self.what.splitlines()[0] if self.what else ""
        return re.sub(r"\d+", "#", re.sub(r"/\S+/|\b[0-9a-f]{8,}\b|\[[^\]]*\]", "", first))[:120]

    def repeat(self, campaign: str) -> str:
        only = f" --only {self.only}" if self.only else ""
        return f".venv/bin/python tests/exhaustive.py --campaign {campaign} --unit {self.seed}{only}"


@dataclass(slots=True)
class Tally:
    """What was done for a seed, or for many."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)  # some of each kind
    kinds: Counter[str] = field(default_factory=Counter)  # how often each kind was found
    times_ms: list[float] = field(default_factory=list)  # of what a campaign measures, if it does

    def add(self, name: str, more: int = 1) -> None:
        self.counts[name] += more

    def find(self, finding: Finding) -> None:
        self.kinds[finding.kind] += 1
        if self.kinds[finding.kind] <= EXAMPLES:
            self.findings.append(finding)

    @property
    def found(self) -> int:
        return self.kinds.total()

    def take(self, other: Tally) -> None:
        self.counts.update(other.counts)
        for finding in other.findings:
            if self.kinds[finding.kind] < EXAMPLES:
                self.findings.append(finding)
        self.kinds.update(other.kinds)
        self.times_ms += other.times_ms


@dataclass(frozen=True, slots=True)
class Campaign:
    name: str
    title: str
    goal: int  # of the figure, in all runs together
    figure: str  # which of the counts it is about
    run: Callable[[int, str | None], Tally]  # a seed, and one of its cases or None
    meaning: str
    whole: bool = False  # one seed is all there is to do
    parallel: bool = True  # several seeds at the same time don't disturb each other


@dataclass(slots=True)
class Outcome:
    campaign: Campaign
    tally: Tally
    took_s: float = 0.0
    done: set[int] = field(default_factory=set)  # seeds
    cut: set[int] = field(default_factory=set)  # seeds of units that did not come to their end

    @property
    def units(self) -> int:
        return len(self.done)

    @property
    def count(self) -> int:
        return self.tally.counts[self.campaign.figure]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.tally.times_ms) if self.tally.times_ms else 0.0

    @property
    def p99_ms(self) -> float:
        times = sorted(self.tally.times_ms)
        return times[int(len(times) * 0.99)] if times else 0.0

    @property
    def rate(self) -> float:
        return self.count / self.took_s if self.took_s else 0.0


Say = Callable[[str], None]


# --- a worker ----------------------------------------------------------------------------------------


class _Cut(BaseException):
    """Leave the unit that is under way: no `except Exception` of it holds this up, its `finally`s end its servers."""


def _cut(number: int, frame: object) -> None:
    for told in _TOLD:
        signal.signal(told, signal.SIG_IGN)  # once is enough: what ends the servers is not to be left, too
    raise _Cut


def _work(campaign_run: Callable[[int, str | None], Tally], orders: Connection, parent: int) -> None:
    try:
        for number in _TOLD:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _cut)
        offspring.adopt()
        offspring.end_with(parent, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD)
        gc.freeze()  # what was imported stays: nobody has to look at it again and again
        while True:
            seed = orders.recv()
            try:
                tally = campaign_run(seed, None)
            except Exception as error:  # a unit without a verdict has not passed
                tally = Tally()
                tally.find(Finding(seed, "", f"the campaign itself failed: {error!r}"))
            orders.send(tally)
            offspring.reap()
    except _Cut:
        sys.exit(_WAS_CUT)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # no more orders
    finally:
        for number in _TOLD:
            signal.signal(number, signal.SIG_IGN)
        offspring.end_descendants()


class _Worker:
    """A process that runs units, one after the other."""

    def __init__(self, campaign: Campaign) -> None:
        # Spawned, not forked: a worker begins without the threads and descriptors of this process. It is deaf until it
        # can hear in order.
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(campaign.run, theirs, os.getpid()))
        resource_tracker.ensure_running()  # it would open the mask again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.seed: int | None = None  # of the unit that it is in

    def begin(self, seed: int) -> None:
        self.seed = seed
        with contextlib.suppress(BrokenPipeError):  # it has died: `take` says so
            self.orders.send(seed)

    def take(self) -> Tally | None:
        """Of the unit that has ended. None: the worker was told to leave it, perhaps with its whole process group."""
        assert self.seed is not None
        seed, self.seed = self.seed, None
        try:
            tally = self.orders.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            if self.process.exitcode == _WAS_CUT:
                return None
            tally = Tally()
            tally.find(Finding(seed, "", f"the worker died with {self.process.exitcode}"))
        assert isinstance(tally, Tally)
        return tally

    def end(self) -> None:
        """Begin to: an idle one sees that there are no more orders."""
        if self.seed is not None:
            self.process.terminate()
        self.orders.close()

    def wait_gone(self, *, within_s: float) -> None:
        self.process.join(within_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


# --- a run -------------------------------------------------------------------------------------------


def run(
    campaign: Campaign,
    *,
    goal: int,
    until: float,
    seeds: Iterable[int],
    jobs: int,
    say: Say,
    ending: Ending | None = None,
    note: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """until: of time.monotonic(); units that run then are waited for. note: called now and then, and in the end."""
    outcome = Outcome(campaign, Tally())
    began = said = noted = time.monotonic()
    todo: Iterator[int] = iter(seeds)
    workers: list[_Worker] = []
    if campaign.whole or not campaign.parallel:
        jobs = 1

    def progress() -> None:
        say(
            f"{campaign.name}: {outcome.count:,} of {goal:,} {campaign.figure}, {outcome.rate:,.0f}/s, "
            f"{outcome.units} units, {outcome.tally.found} findings"
        )

    try:
        while not ending:
            wanted = outcome.count < goal and time.monotonic() < until
            if campaign.whole and (outcome.done or any(worker.seed is not None for worker in workers)):
                wanted = False
            busy = {worker.orders: worker for worker in workers if worker.seed is not None}
            if wanted and len(busy) < jobs:
                seed = next(todo, None)
                if seed is not None:
                    idle = next((worker for worker in workers if worker.seed is None), None)
                    if idle is None:
                        idle = _Worker(campaign)
                        workers.append(idle)
                    idle.begin(seed)
                    continue
            if not busy:
                break
            for orders in wait(list(busy), timeout=0.5):
                worker = busy[orders]  # type: ignore[index]
                seed = worker.seed
                assert seed is not None
                tally = worker.take()
                if tally is None:
                    outcome.cut.add(seed)
                else:
                    outcome.done.add(seed)
                    outcome.tally.take(tally)
                if not worker.process.is_alive():
                    workers.remove(worker)
            now = time.monotonic()
            outcome.took_s = now - began
            if now - said >= SAID_EVERY_S:
                said = now
                progress()
            if now - noted >= NOTED_EVERY_S and outcome.done:
                noted = now
                note(outcome)
    finally:
        outcome.cut |= {worker.seed for worker in workers if worker.seed is not None}
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.wait_gone(within_s=CUT_WITHIN_S)
        outcome.took_s = time.monotonic() - began
    progress()
    if outcome.done:
        note(outcome)
    return outcome
