"""Copies of the watch sessions, in a process that neither serves nor keeps them.

Sessions live at their home, shard 0, and each is known to the gateway that made or served it. If both die before the
gateway's successor has served anybody, nobody else would know an idle session. So the home tells this process of each
that begins, is opened or rests, and a home that comes after it is told all of them.

    home ── KEEP_SESSION: made, opened, resting ──► a copy ── RESTORE_SESSION, all of them ──► the next home

Rules: what a gateway knows is newer than a copy of the same opening; a copy of an open session has the cursors of its
opening, and is told as stale. A resting session is forgotten after the sessions' TTL, as at home.

Crash: the copies are gone; the home hears from the next process, and tells it all that it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from topics.actors.messages import RestoreSession

HOME = 0  # the shard that keeps the sessions


class Mirror:
    def __init__(self, *, ttl_ms: int, now_ms: Callable[[], int]) -> None:
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._open: dict[str, RestoreSession] = {}
        self._idle: OrderedDict[str, tuple[int, RestoreSession]] = OrderedDict()  # since when; the longest first

    def __len__(self) -> int:
        return len(self._open) + len(self._idle)

    def keep(self, session: RestoreSession) -> None:
        wid = session.wid
        assert wid is not None
        self._open.pop(wid, None)
        self._idle.pop(wid, None)
        now = self._now_ms()
        if session.stream:
            self._open[wid] = session
        else:
            self._idle[wid] = (now - session.idle_ms, session)
        while self._idle and next(iter(self._idle.values()))[0] <= now - self._ttl_ms:
            self._idle.popitem(last=False)

    def told(self) -> Iterator[RestoreSession]:
        """All of them, as a new home should know them, and the end of the list."""
        now = self._now_ms()
        for session in self._open.values():
            yield msgspec.structs.replace(session, stream=0, stale=True, mirrored=True)
        for since, session in self._idle.values():
            yield msgspec.structs.replace(session, idle_ms=max(0, now - since), mirrored=True)
        yield RestoreSession(None, 0, 0, b"", [], [], 0, mirrored=True)
