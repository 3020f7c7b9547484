"""Work that takes longer than a round may: done a slice at a time, between the requests of others.

Large bodies are read like this, and large answers compressed.

Jobs are done one after the other, in the order in which they came, so that what they hold in memory is what one of them
holds (beside answers, which are there already). A round does at least one slice, and more while it has time. A job
whose asker is gone is let go of at once, with all that it holds: it counts for nothing any more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol


class Job(Protocol):
    @property
    def asker(self) -> object:
        """On whose behalf; each asker has one job at a time."""

    def step(self) -> bool:
        """Do one slice; True: it is over."""

    def drop(self) -> None:
        """Its asker is gone: let go of all that it holds."""

    def abort(self) -> None:
        """A slice has failed, by a bug."""


class Slices:
    def __init__(self, failed: Callable[[Job, Exception], None]) -> None:
        self._jobs: OrderedDict[object, Job] = OrderedDict()  # by their askers, in the order in which they came
        self._failed = failed

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.pop(job.asker, None)  # the one that is over, and says so by asking for the next
        self._jobs[job.asker] = job

    def drop(self, asker: object) -> None:
        """It is gone, and with it its job if it has one."""
        if (job := self._jobs.pop(asker, None)) is not None:
            job.drop()

    def run(self, until_ns: int) -> None:
        """One slice, and others until then (of time.perf_counter_ns)."""
        while self._jobs:
            asker, job = next(iter(self._jobs.items()))
            try:
                over = job.step()
            except Exception as error:  # a bug costs one request
                over = True
                self._failed(job, error)
            if over and self._jobs.get(asker) is job:
                del self._jobs[asker]
            if time.perf_counter_ns() > until_ns:
                break
