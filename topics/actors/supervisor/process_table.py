"""The process table of a running supervisor: its children and the links between them, as they are at the moment.

Rules: a child's life changes through `handle` alone, which wakes whoever waits for a change; what it means to start,
end or replace one is the supervisor's business and the reload's.

Crash: all of this is the supervisor's memory and goes with it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import trio

from topics.actors.control import LinkGrant
from topics.actors.inspect.inspect_socket import LinkSample
from topics.actors.inspect.rings import sample_link
from topics.actors.supervisor.heartbeat import HeartbeatWatch
from topics.actors.supervisor.process import ChildProcess, ProcessSpec
from topics.actors.supervisor.restarts import Action, ChildLife, Event, Life
from topics.shm.counters import Board


class Child:
    """A line of the process table and what became of it."""

    def __init__(self, spec: ProcessSpec, board: Board) -> None:
        self.spec = spec
        self.name = spec.name
        self.row = board.row(spec.name)
        self.links: list[Link] = []
        self.process: ChildProcess | None = None
        self.watch: HeartbeatWatch | None = None
        self.kept = False  # a task looks after it
        self.pause = trio.CancelScope()
        self.over = trio.Event()
        self.reason = ""  # why it can't serve, in its own words
        self.ending = ""  # how its last process ended
        self.replaced = 0  # by reloads: these starts are no restarts
        self.held: set[str] = set()  # peers that it asks nothing new
        self.successor: ChildProcess | None = None  # prepared, started when this one ends
        self.inheritance: socket.socket | None = None  # what this one leaves its successor comes out here
        self._life = ChildLife(trio.current_time)
        self._changed = trio.Event()

    @property
    def life(self) -> Life:
        return self._life.life

    @property
    def starts(self) -> int:
        return self._life.starts

    @property
    def pause_s(self) -> float:
        return self._life.pause_s

    @property
    def peers(self) -> list[Child]:
        """Those whose link with it is up."""
        return [link.peer_of(self) for link in self.links if link.up]

    def handle(self, event: Event) -> Action:
        action = self._life.handle(event)
        self.changed()
        return action

    def persist(self) -> bool:
        """Restart it for ever; True if it had been given up, and wants to be kept again."""
        self._life.persist()
        if self.life is not Life.FAILED:
            return False
        self.handle(Event.REVIVE)
        self.over = trio.Event()
        return True

    def changed(self) -> None:
        before, self._changed = self._changed, trio.Event()
        before.set()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def take_successor(self) -> ChildProcess | None:
        """None: there is none, or it is dead, and booting it would send its peers to nobody."""
        successor, self.successor = self.successor, None
        if successor is not None and successor.ended:
            successor.reap()
            return None
        return successor

    def drop_successor(self) -> None:
        """It will not be needed."""
        if self.successor is not None:
            self.successor.kill()
            self.successor.reap()
            self.successor = None
        if self.inheritance is not None:
            self.inheritance.close()
            self.inheritance = None


class Link:
    def __init__(self, a: Child, b: Child) -> None:
        self.ends = (a, b)
        self.generation = 0
        self.up = False
        # Of its region, for `topics rings`: the ends are not dumpable, so their descriptors can't be opened.
        self._fd = -1
        self._lock = threading.Lock()  # the thread of the inspect socket reads what the event loop closes

    @property
    def label(self) -> str:
        return "+".join(end.name for end in self.ends)

    def keep(self, region_fd: int) -> None:
        """It is up, with this region."""
        self.up = True
        self._let_go()
        try:
            kept = os.dup(region_fd)
        except OSError:
            return  # no descriptor is left: the link works without
        with self._lock:
            self._fd = kept

    def down(self) -> None:
        self.up = False
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def sample(self) -> LinkSample | None:
        """Where its rings stand, from any thread; None while it is down."""
        with self._lock:
            return None if self._fd < 0 else sample_link(self._fd, self.ends[0].name, self.ends[1].name)

    def peer_of(self, child: Child) -> Child:
        return self.ends[1] if child is self.ends[0] else self.ends[0]

    def grant_for(self, child: Child, size: int) -> LinkGrant:
        return LinkGrant(
            peer=self.peer_of(child).name,
            side=0 if child is self.ends[0] else 1,
            generation=self.generation,
            size=size,
        )
