"""A doorbell: an eventfd that wakes one sleeping process, and the flag that says whether it sleeps.

    receiver                                sender
      arm():   flag = 1, fence                publish to the ring
      look at all rings once more             ring():  fence, look at the flag
      nothing there: wait on fileno()                  set: flag = 0, write the eventfd
      clear(), disarm(), drain                         not set: nothing, it is awake

Rules: the sender clears the flag before it writes. The other order loses wake-ups: the receiver could
wake, drain and arm again between the two, and the late clearing would then hide that it sleeps. Two
senders may both see the flag and both write: one wake-up too many, never one too few. A receiver never
relies on bells alone; it looks at its rings once in a while anyway.

The fence: on x86-64 a store may still sit in the core's store buffer when a later load is done, so
"publish, then read the flag" on one side and "set the flag, then read the ring" on the other could both
miss. Taking and releasing a lock executes a locked instruction, which empties the store buffer; Python
offers nothing lighter.

Crash: the eventfd and the flag outlive the process. A flag left at 1 costs the first sender one write.
"""

from __future__ import annotations

import os
import threading


class Doorbell:
    __slots__ = ("_fd", "_fence", "_index", "_words", "rung")

    def __init__(self, fd: int, words: memoryview, index: int) -> None:
        self._fd = fd
        self._words = words
        self._index = index
        self._fence = threading.Lock()
        self.rung = 0  # eventfd writes of this process on this bell

    @staticmethod
    def create_fd() -> int:
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        """Wake the receiver if it sleeps. Call after publishing."""
        with self._fence:
            pass
        if self._words[self._index]:
            self._words[self._index] = 0
            self.rung += 1
            os.eventfd_write(self._fd, 1)

    def ring_always(self) -> None:
        """Wake the receiver whatever the flag says: for what it can't see by looking at its rings."""
        self._words[self._index] = 0
        self.rung += 1
        os.eventfd_write(self._fd, 1)

    def arm(self) -> None:
        """Announce sleep. The caller must look at its rings once more before it waits."""
        self._words[self._index] = 1
        with self._fence:
            pass

    def disarm(self) -> None:
        self._words[self._index] = 0

    def clear(self) -> None:
        """Swallow the rings so far; never blocks."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
