"""What a round of a shard takes from its rings: as much as it has time for; the rest waits for the next round.

Rules: messages of one link are handled in the order in which they came, and nothing more is taken from its ring before
they are; every link gets its turn, the next round begins behind the link that the last one ended with; every round
handles one message at least. A long message comes behind those it was taken with.

A link that goes down takes what it still waits with, as if it had never left the ring.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from topics.actors.link import Link
from topics.walshard.log.commit import ReplyTo

_GATHER = 2  # how often a round looks for more requests before it writes
# Half of the 20 ms of a round: writing what was taken and sending answers have the rest. One message may take longer.
_TAKE_NS = 10_000_000


class Takers(Protocol):
    """The engine's ways in."""

    def handle(self, message: bytes, reply_to: ReplyTo) -> None: ...
    def take_long(self, message: bytearray, reply_to: ReplyTo) -> None: ...


class Intake:
    def __init__(
        self,
        takers: Takers,
        *,
        trace: Callable[[Link, list[bytes]], None] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._takers = takers
        self._trace = trace
        self._clock = clock
        self._left: dict[Link, deque[bytes]] = {}  # out of the ring, and not handled ...
        self._since_ns: dict[Link, int] = {}  # ... since when
        self._last: str | None = None  # the peer that the last round had no time left behind

    @property
    def is_late(self) -> bool:
        """Something is left that no round had time for."""
        return bool(self._left)

    def late_us(self, now_ns: int) -> int:
        """For how long the oldest of it has waited."""
        return (now_ns - min(self._since_ns.values())) // 1_000 if self._left else 0

    def take(self, links: Mapping[str, Link], now_ns: int) -> int:
        """Handle what has come, for as long as a round may take. Returns how many messages."""
        until_ns = now_ns + _TAKE_NS
        turns: Iterable[Link] = links.values() if self._last is None else self._in_turn(links)
        self._last = None
        handled = 0
        for _ in range(_GATHER):
            before = handled
            for link in turns:
                handled += self._take(link, until_ns)
                if self._last is not None:
                    return handled
            if handled - before < 2:
                break
        return handled

    def _in_turn(self, links: Mapping[str, Link]) -> list[Link]:
        names = list(links)
        begin = names.index(self._last) + 1 if self._last is not None and self._last in links else 0
        return [links[name] for name in names[begin:] + names[:begin]]

    def _take(self, link: Link, until_ns: int) -> int:
        if (taken := self._left.get(link) if self._left else None) is not None:
            return self._go_on(link, taken, until_ns)
        handled = 0
        if received := link.drain():
            if self._trace is not None:
                self._trace(link, received)
            handle, writer, clock = self._takers.handle, link.writer, self._clock
            for message in received:
                handle(message, writer)
                handled += 1
                if clock() > until_ns:
                    self._last = link.peer
                    if handled < len(received):
                        self._left[link] = deque(received[handled:])
                        self._since_ns[link] = until_ns - _TAKE_NS
                        return handled
                    break
        return handled + self._take_long(link)

    def _go_on(self, link: Link, taken: deque[bytes], until_ns: int) -> int:
        handled = 0
        while taken:
            message = taken.popleft()
            self._takers.handle(message, link.writer)
            handled += 1
            if self._clock() > until_ns:
                self._last = link.peer
                break
        if taken:
            return handled
        self.forget(link)
        return handled + self._take_long(link)

    def _take_long(self, link: Link) -> int:
        if not link.reader.long.whole:
            return 0
        whole = link.reader.long.take()
        for long in whole:
            self._takers.take_long(long, link.writer)
        return len(whole)

    def forget(self, link: Link) -> None:
        self._left.pop(link, None)
        self._since_ns.pop(link, None)

    def empty(self, link: Link) -> None:
        """Handle everything that a peer said, as it has gone and says no more."""
        left = self._left.get(link, ())
        self.forget(link)
        for message in left:
            self._takers.handle(message, link.writer)
        while received := link.drain():
            for message in received:
                self._takers.handle(message, link.writer)
