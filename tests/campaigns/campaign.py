"""What a campaign is, and how one is run: seeds to worker processes until a goal or a deadline is reached.

A worker takes one seed at a time and returns its Tally. Findings stop nothing: a run lists all of them, each with the
command that repeats it. Seeds follow each other from the first one, so that two runs with different first seeds do
different things, and their figures add up.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

EXAMPLES = 3  # of each kind of finding


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
    took_s: float
    first_seed: int
    units: int

    @property
    def count(self) -> int:
        return self.tally.counts[self.campaign.figure]

    @property
    def rate(self) -> float:
        return self.count / self.took_s if self.took_s else 0.0


Say = Callable[[str], None]


def run(campaign: Campaign, *, goal: int, until: float, first_seed: int, jobs: int, say: Say) -> Outcome:
    """until: of time.monotonic(); units that run then are waited for."""
    tally = Tally()
    began = said = time.monotonic()
    seeds = itertools.count(first_seed)
    units = 0
    if campaign.whole or not campaign.parallel:
        jobs = 1

    def progress(*, always: bool = False) -> None:
        nonlocal said
        now = time.monotonic()
        if always or now - said >= 20.0:
            said = now
            count = tally.counts[campaign.figure]
            say(
                f"{campaign.name}: {count:,} of {goal:,} {campaign.figure}, {count / max(now - began, 0.001):,.0f}/s, "
                f"{units} units, {tally.found} findings"
            )

    # Spawned, not forked: a worker begins without the threads and descriptors of this process.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Tally], int] = {}
        while True:
            wanted = tally.counts[campaign.figure] < goal and time.monotonic() < until
            if campaign.whole and units + len(running):
                wanted = False
            if wanted and len(running) < jobs:
                seed = next(seeds)
                running[pool.submit(campaign.run, seed, None)] = seed
                continue
            if not running:
                break
            done, _ = wait(running, timeout=5.0, return_when=FIRST_COMPLETED)
            for future in done:
                seed = running.pop(future)
                try:
                    tally.take(future.result())
                except Exception as error:  # a unit without a verdict has not passed
                    tally.find(Finding(seed, "", f"the campaign itself failed: {error!r}"))
                units += 1
            progress()
    progress(always=True)
    return Outcome(campaign, tally, time.monotonic() - began, first_seed, units)
