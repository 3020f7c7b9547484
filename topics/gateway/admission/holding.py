"""Requests for a process that is being replaced: they wait here instead of being refused.

    Hold(peer)          LinkUp(peer)            its row says READY
       │ held: nothing     │ released: in the        │
       │ new is sent       │ order they came         │ over
       ▼                   ▼                         ▼
       └── kept back ──────┴── sent; what the ring ──┘
                               does not take waits on

Rules: per peer first come, first served, and nobody overtakes; a request waits as long as a call may take, and together
they take HOLD_BYTES at most; what was handed to a peer is never kept back again, so nothing is done twice. A peer that
fails for good, or dies and has to wait for its next start, is held no longer: whoever asks it is refused as always.

Crash: whoever waits here loses the connection with this process; nothing of it was done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from topics import limits
from topics.shm.counters import State

_LOOK_NS = 50_000_000
_FALLEN = frozenset({State.FAILED, State.BACKOFF, State.STOPPED})


class _Kept(msgspec.Struct, gc=False, eq=False):
    send: Callable[[int], bool]  # with how long it has waited in microseconds; False: there is no room
    refuse: Callable[[], None]
    size: int
    since_ns: int
    of: object  # whose it is
    waits: bool  # it would wait there, too: a long poll, a claim


class Holding:
    def __init__(self, *, timeout_ms: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._timeout_ns = timeout_ms * 1_000_000
        self._clock = clock
        self._kept: dict[int, deque[_Kept]] = {}
        self._bytes = 0
        self._held: set[int] = set()
        self.replacing: set[int] = set()  # from the hold until it is ready again

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def hold(self, peer: int) -> None:
        self._held.add(peer)
        self.replacing.add(peer)

    def link_up(self, peer: int) -> None:
        self._held.discard(peer)

    @property
    def busy(self) -> bool:
        return bool(self.replacing or self._kept)

    def held(self, peer: int) -> bool:
        return peer in self._held

    def keeps(self, peer: int) -> bool:
        """Whether what is asked of it now has to wait: it is held, or others wait already."""
        return peer in self._held or peer in self._kept

    def keep(
        self,
        peer: int,
        *,
        send: Callable[[int], bool],
        refuse: Callable[[], None],
        size: int,
        of: object = None,
        waits: bool = False,
    ) -> bool:
        """False: there is no room."""
        if self._bytes + size > limits.HOLD_BYTES:
            return False
        self._bytes += size
        self._kept.setdefault(peer, deque()).append(_Kept(send, refuse, size, self._clock(), of, waits))
        return True

    def abandon(self, of: object, *, waits: bool = False) -> bool:
        """Its client has gone, or, for what would wait at its peer as well, sends no more; True if it waited here."""
        for peer, queue in list(self._kept.items()):
            for kept in queue:
                if kept.of is of and (kept.waits or not waits):
                    queue.remove(kept)
                    self._bytes -= kept.size
                    if not queue:
                        del self._kept[peer]
                    return True
        return False

    def look(self, state_of: Callable[[int], State], *, linked: Callable[[int], bool]) -> None:
        """Once a round, while somebody is replaced: send on, give up, notice the end."""
        now = self._clock()
        for peer in list(self.replacing):
            state = state_of(peer)
            if state in _FALLEN:
                self._held.discard(peer)
                self.replacing.discard(peer)
            elif state is State.READY and peer not in self._held and linked(peer):
                self.replacing.discard(peer)
        for peer in list(self._kept):
            self._step(peer, now)

    def _step(self, peer: int, now: int) -> None:
        queue = self._kept[peer]
        while queue:
            first = queue[0]
            if now - first.since_ns >= self._timeout_ns:
                first.refuse()
            elif peer in self._held or not first.send((now - first.since_ns) // 1_000):
                break
            if queue and queue[0] is first:  # else its connection was closed meanwhile, and it went with that
                queue.popleft()
                self._bytes -= first.size
        if not queue:
            self._kept.pop(peer, None)

    @property
    def next_due_ns(self) -> int | None:
        return self._clock() + _LOOK_NS if self.busy else None
