"""How a process waits for work: one inner epoll that holds its bell and its hot descriptors.

A wait goes through up to three stages, from quick and costly to slow and free:

    spin     look at the rings again and again, yielding the core; only if asked for and work is expected
    linger   sleep in the inner epoll itself: no trio scheduler on the way back. Blocks the other trio tasks of the
             process for at most LINGER_MS, so it is left out while they have work of their own
    rest     sleep in trio, which watches the inner epoll's descriptor

Nothing spins or lingers in a process that has had no work for a moment: an idle server only rests.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

import trio

from topics.shm.counters import Row, Word
from topics.shm.doorbell import Doorbell

LINGER_MS = 5
BACKSTOP_S = 5.0  # rings are looked at this often even if no bell rings
_YIELD_NS = 5_000_000  # a busy process lets trio's other tasks run this often
_LINGER_NS = LINGER_MS * 1_000_000
_LAG_NS = 1_000_000_000


class Idle:
    def __init__(
        self,
        bell: Doorbell,
        *,
        spin_us: int,
        has_work: Callable[[], bool],
        next_deadline_ns: Callable[[], int | None],
        row: Row,
    ) -> None:
        self._bell = bell
        self._words = row.words
        self._bell_fd = bell.fileno()
        self._spin_ns = spin_us * 1_000
        self._has_work = has_work
        self._next_deadline_ns = next_deadline_ns
        self.epoll = select.epoll()
        self.epoll.register(self._bell_fd, select.EPOLLIN)
        self._yielded_ns = time.monotonic_ns()
        self._busy_until_ns = 0
        self._round_ns = self._yielded_ns  # when the last wait ended
        self._lag_from_ns = self._yielded_ns
        self.round_us = 0  # how long the round took that has just ended

    def register(self, fd: int, events: int = select.EPOLLIN) -> None:
        self.epoll.register(fd, events)

    async def wait(self, *, expecting: bool, linger: bool) -> list[tuple[int, int]]:
        """Descriptors that are ready; returns, perhaps with none, when there is work or the deadline has come."""
        now = time.monotonic_ns()
        self._measure(now)
        events = await self._wait(now, expecting=expecting, linger=linger)
        self._round_ns = time.monotonic_ns()
        return events

    def _measure(self, now: int) -> None:
        """A round is over. The longest one of a second is the process's lag: what came meanwhile has waited for it."""
        took_us = self.round_us = (now - self._round_ns) // 1_000
        words = self._words
        words[Word.BUSY_US] += took_us
        if took_us > words[Word.LOOP_LAG_US]:
            words[Word.LOOP_LAG_US] = took_us
        elif now - self._lag_from_ns > _LAG_NS:
            self._lag_from_ns = now
            words[Word.LOOP_LAG_US] = took_us

    async def _wait(self, now: int, *, expecting: bool, linger: bool) -> list[tuple[int, int]]:
        if now - self._yielded_ns > _YIELD_NS:
            self._yielded_ns = now
            await trio.lowlevel.checkpoint()
        events = self.epoll.poll(0)
        if events or self._has_work():
            self._busy_until_ns = now + _LINGER_NS
            return self._without_bell(events)
        if self._spin_ns and expecting and (found := self._spin(now)) is not None:
            return found
        bell = self._bell
        bell.arm()
        if self._has_work():
            bell.disarm()
            return []
        timeout = BACKSTOP_S
        if (deadline := self._next_deadline_ns()) is not None:
            timeout = min(timeout, max(0.0, (deadline - now) / 1e9))
        if linger and now < self._busy_until_ns:
            events = self.epoll.poll(min(timeout, LINGER_MS / 1_000))
        else:
            with trio.move_on_after(timeout):
                await trio.lowlevel.wait_readable(self.epoll.fileno())
            self._yielded_ns = time.monotonic_ns()
            events = self.epoll.poll(0)
        bell.disarm()
        if events:
            self._busy_until_ns = time.monotonic_ns() + _LINGER_NS
        return self._without_bell(events)

    def mute(self) -> None:
        """The bell is somebody else's from now on; what else is registered can be waited for."""
        self.epoll.unregister(self._bell_fd)

    def poll(self) -> list[tuple[int, int]]:
        """Descriptors that are ready now."""
        return self._without_bell(self.epoll.poll(0))

    def _spin(self, now: int) -> list[tuple[int, int]] | None:
        """Look until something comes or the time is up (None)."""
        stop = now + self._spin_ns
        has_work, poll = self._has_work, self.epoll.poll
        while time.monotonic_ns() < stop:
            os.sched_yield()
            if has_work():
                return []
            if events := poll(0):
                return self._without_bell(events)
        return None

    def _without_bell(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The bell is swallowed here: whoever waits looks at its rings anyway."""
        for event in events:
            if event[0] == self._bell_fd:
                self._bell.clear()
                events.remove(event)
                break
        return events

    def close(self) -> None:
        self.epoll.close()


def spin_us(setting: int, *, processes: int) -> int:
    """The automatic setting spins only where a core is left over for it."""
    if setting >= 0:
        return setting
    return 50 if (os.cpu_count() or 1) > processes else 0
