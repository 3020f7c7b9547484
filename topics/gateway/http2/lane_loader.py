"""The lane of Hypercorn and Quart, loaded when the first connection needs it, or a while after the start.

Importing them takes as long as importing all the rest of a gateway, and a gateway that comes back after a crash is
waited for. Until they are there connections wait here, and requests that wait for nothing else are served meanwhile:
the import runs on a thread.
"""

from __future__ import annotations

import importlib
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from topics.gateway.admission.places import Places

if TYPE_CHECKING:
    from topics.gateway.http2.lane import ColdLane

MODULE = "topics.gateway.http2.lane"
LOAD_AFTER_S = 10.0  # so that the first client of HTTP/2 finds it loaded, as a rule


class LateLane:
    def __init__(self, build: Callable[[], ColdLane], *, places: Places, load_after_s: float = LOAD_AFTER_S) -> None:
        self._build = build
        self._places = places
        self._load_after_s = load_after_s
        self._lane: ColdLane | None = None
        self._waiting: deque[tuple[socket.socket, bytes]] = deque()
        self._wanted = trio.Event()
        self._retiring = self._forgot = False

    @property
    def loaded(self) -> bool:
        return self._lane is not None

    @property
    def connections(self) -> int:
        return len(self._waiting) if self._lane is None else self._lane.connections

    @property
    def requests(self) -> int:
        return 0 if self._lane is None else self._lane.requests

    @property
    def unanswered(self) -> int:
        return len(self._waiting) if self._lane is None else self._lane.unanswered

    @property
    def streams(self) -> int:
        """That are open."""
        return 0 if self._lane is None else len(self._lane.outlets)

    def hand_over(self, sock: socket.socket, first: bytes) -> None:
        """Take a connection from the HTTP/1 lane; never blocks. Places bound how many there are."""
        if self._lane is not None:
            self._lane.hand_over(sock, first)
        else:
            self._waiting.append((sock, first))
            self._wanted.set()

    def retire(self) -> None:
        self._retiring = True
        if self._lane is not None:
            self._lane.retire()

    def forget_counters(self) -> None:
        self._forgot = True
        if self._lane is not None:
            self._lane.forget_counters()

    async def run(self) -> None:
        try:
            with trio.move_on_after(self._load_after_s):
                await self._wanted.wait()
            await trio.to_thread.run_sync(importlib.import_module, MODULE)
            lane = self._lane = self._build()
            if self._retiring:
                lane.retire()
            if self._forgot:
                lane.forget_counters()
            while self._waiting:
                lane.hand_over(*self._waiting.popleft())
            await lane.run()
        finally:
            for sock, _ in self._waiting:
                self._places.give(sock)
                sock.close()
