"""The thread that syncs the WAL, so that the serving loop never waits for the disk.

At most one sync runs; what was written meanwhile is the next one: that is all the grouping there is. Files are
synced in the order they were written. A sync that fails is never tried again: what the kernel did with those pages
is unknown, so the shard stops and recovers.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections import deque
from typing import NamedTuple

from topics.errors import DiskFull
from topics.walshard.log.disk import Disk


def wait_readable(fd: int) -> None:
    """Block. Not with select(), which knows only the first 1,024 descriptors of a process."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()


def read_signal(event_fd: int) -> None:
    """Swallow the signal that belongs to a result. It may still be on its way; unread it would wake us for ever."""
    while True:
        try:
            os.eventfd_read(event_fd)
            return
        except BlockingIOError:
            os.sched_yield()


class Synced(NamedTuple):
    lsn: int
    took_us: int
    error: BaseException | None


class Syncer:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._requests: queue.SimpleQueue[tuple[list[int], int, str | None] | None] = queue.SimpleQueue()
        self._done: deque[Synced] = deque()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.busy = False
        self._thread = threading.Thread(target=self._run, name="syncer", daemon=True)
        self._thread.start()

    def request(self, fds: list[int], lsn: int, *, folder: str | None = None) -> None:
        """Sync these files, and the folder if one of them is new in it; everything up to lsn is durable then. Only
        while not busy."""
        self.busy = True
        self._requests.put((fds, lsn, folder))

    def take(self) -> Synced | None:
        """The outcome of the running sync, if it has ended."""
        if not self._done:
            return None
        read_signal(self.event_fd)
        self.busy = False
        return self._done.popleft()

    def wait(self) -> Synced:
        """Block until the running sync has ended; for stopping and tests."""
        while (done := self.take()) is None:
            wait_readable(self.event_fd)
        return done

    def close(self) -> None:
        self._requests.put(None)
        self._thread.join()
        os.close(self.event_fd)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            fds, lsn, folder = request
            started = time.perf_counter_ns()
            error: BaseException | None = None
            try:
                for fd in fds:
                    self._disk.sync(fd)
                if folder is not None:
                    self._disk.sync_dir(folder)
            except (DiskFull, OSError) as failure:
                error = failure
            self._done.append(Synced(lsn, (time.perf_counter_ns() - started) // 1_000, error))
            os.eventfd_write(self.event_fd, 1)
