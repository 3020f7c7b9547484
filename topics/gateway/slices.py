"""Work that takes longer than a round may: done a slice at a time, between the requests of others.

Jobs are done one after the other, in the order in which they came, so that what they hold in memory is what one of them
holds. A round does at least one slice, and more while it has time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Job(Protocol):
    def step(self) -> bool:
        """Do one slice; True: it is over."""

    def abort(self) -> None:
        """A slice has failed, by a bug."""


class Slices:
    def __init__(self, failed: Callable[[Job, Exception], None]) -> None:
        self._jobs: deque[Job] = deque()
        self._failed = failed

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def run(self, until_ns: int) -> None:
        """One slice, and others until then (of time.perf_counter_ns)."""
        while self._jobs:
            job = self._jobs[0]
            try:
                over = job.step()
            except Exception as error:  # a bug costs one request
                over = True
                self._failed(job, error)
            if over:
                self._jobs.popleft()
            if time.perf_counter_ns() > until_ns:
                break
