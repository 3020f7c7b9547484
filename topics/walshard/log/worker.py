"""Threads for disk work that the serving loop must not wait for. Jobs begin in order; results are taken in on the loop.

A job that fails is handed its error: it decides what that means. A crash loses the jobs, never their effects.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from topics.walshard.log.syncer import read_signal, wait_readable


class _Job(NamedTuple):
    work: Callable[[], Any]  # on a thread
    then: Callable[[Any, Exception | None], None]  # on the loop, with its result or its error


class Worker:
    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[_Job, Any, Exception | None]] = deque()
        # Counts results one by one: a signal without its result would wake the loop for ever.
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self.outstanding = 0
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Any], then: Callable[[Any, Exception | None], None]) -> None:
        self.outstanding += 1
        self._jobs.put(_Job(work, then))

    def take(self) -> bool:
        """Take in what has ended; whether there was anything."""
        taken = False
        while self._done:
            read_signal(self.event_fd)
            job, result, error = self._done.popleft()
            self.outstanding -= 1
            job.then(result, error)
            taken = True
        return taken

    def wait(self) -> None:
        """Block until nothing is left to do; for stopping and tests."""
        while self.outstanding:
            wait_readable(self.event_fd)
            self.take()

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self.event_fd)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            result, error = None, None
            try:
                result = job.work()
            except Exception as failure:  # carried to the loop, which decides
                error = failure
            self._done.append((job, result, error))
            os.eventfd_write(self.event_fd, 1)
