"""What a role gets to know about the process it runs in: its identity, settings, counters, bells and links.

Rules for the role's `async run(context)`: set the callbacks before the first checkpoint, then none is
missed, because the task that calls them starts only when the role yields. Callbacks are plain functions
and must not block. Call ready() once it serves; while it recovers without yielding, call recovering() at
least every second, which counts as a heartbeat. After on_stop finish the work and return.

A reload: after on_hold(peer) ask that peer nothing new, and call held(peer) when all that was asked is in its ring; its
next link ends the hold. After on_retire finish as for on_stop, so that whoever asked does not notice; it may be given
a socket on which the successor inherits, for a role that calls leave() before it is done.

Crash: everything here is remade from the next Boot; links come back with a new generation.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from topics.actors import messages
from topics.actors.control import Boot, Channel, ChannelClosed, Failed, Held, Left, LinkGrant, Ready
from topics.actors.link import Link
from topics.actors.log import Log
from topics.keys import Key
from topics.shm.counters import Board, State, Word
from topics.shm.doorbell import Doorbell
from topics.shm.region import Region
from topics.shm.usage import Usage

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
EXIT_FAILED = 70  # the role called fail(): the supervisor must not start it again
EXIT_ORPHANED = 71  # the supervisor is gone


def _resident_bytes() -> int:
    """Told by each process itself: where /proc hides processes that are not dumpable, others can't see it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _ignore(*_: object) -> None:
    pass


class Context:
    def __init__(self, boot: Boot, fds: list[int], channel: Channel) -> None:
        self._channel = channel
        self._regions: dict[str, Region] = {}
        supply = iter(fds)
        self.name = boot.name
        self.index = boot.index
        self.settings = boot.settings
        self.layout = boot.layout
        self.shards = boot.shards
        self.shard_count = boot.shards
        self.old_layout = boot.old_layout
        self.old_shards = boot.old_shards
        self.cold = boot.cold
        self.cold_id = boot.cold_id
        self.log = Log(boot.name, boot.settings.log, boot.settings.log_format)

        self.board = Board.attach(next(supply), boot.board_size)
        self.row = self.board.row(boot.name)
        self.usage = Usage.attach(next(supply), boot.usage_size) if boot.usage_size else None
        self.bells: dict[str, Doorbell] = {
            name: Doorbell(next(supply), self.board.words, self.board.sleeping_index(name)) for name in boot.bells
        }
        self.bell = self.bells.pop(boot.name)
        self.links: dict[str, Link] = {}
        for grant in boot.links:
            self._attach(grant, next(supply))
        self.listener = socket.socket(fileno=next(supply)) if boot.listener else None
        # Never read or closed: holding it keeps the data folder locked until this process is gone.
        self._lock_fd = next(supply) if boot.holds_lock else -1

        self.inheritance = socket.socket(fileno=next(supply)) if boot.inherits else None

        self._busy_us = 0
        self.stopping = False
        self.left = False
        self.on_link_up: Callable[[str, Link], None] = _ignore
        self.on_link_down: Callable[[str], None] = _ignore
        self.on_layout_committed: Callable[[], None] = _ignore
        self.on_stop: Callable[[], None] = _ignore
        self.on_keys: Callable[[tuple[Key, ...]], None] = _ignore
        self.on_hold: Callable[[str], None] = self.held
        self.on_retire: Callable[[socket.socket | None], None] = lambda heir: self.on_stop()
        self.on_beat: Callable[[], None] = _ignore  # about once a second, also when nothing happens

    def beat(self) -> None:
        if not self.left:
            self.row.words[Word.HEARTBEAT] = time.monotonic_ns()

    def publish_counters(self) -> None:
        """What every process counts in the same way."""
        if self.left:
            return
        words = self.row.words
        readers = [link.reader for link in self.links.values()]
        words[Word.RING_DEPTH] = sum(reader.waiting for reader in readers)
        words[Word.RING_HIGH_WATER] = max([words[Word.RING_HIGH_WATER], *(reader.high_water for reader in readers)])
        if words[Word.BUSY_US] == self._busy_us:
            words[Word.LOOP_LAG_US] = 0  # there was no round
        self._busy_us = words[Word.BUSY_US]
        words[Word.RESIDENT_BYTES] = _resident_bytes()
        words[Word.DOORBELLS] = sum(bell.rung for bell in self.bells.values())
        self.on_beat()

    def recovering(self, permille: int) -> None:
        self.row.set(Word.STATE, State.RECOVERING)
        self.row.set(Word.PROGRESS_PERMILLE, permille)
        self.beat()

    def ready(self) -> None:
        self.row.set(Word.PROGRESS_PERMILLE, 1_000)
        self.beat()  # one that is ready has begun: from now on it is not given the time of a start
        if not self.stopping:
            self.row.set(Word.STATE, State.READY)
        self._channel.send_nowait(Ready())

    def held(self, peer: str) -> None:
        """Everything that this process has asked of the peer is in its ring."""
        self._channel.send_nowait(Held(peer))

    def leave(self) -> None:
        """The name is the successor's from now on: row, bell, links and listening socket are not touched any more."""
        self.left = True
        self._channel.send_nowait(Left())

    def trace(self, link: Link, taken: list[bytes]) -> None:
        """At the debug level: every message, under the id of the request that it belongs to."""
        for message in taken:
            _, correlation = messages.unpack_correlation(message)
            fields = {"op": messages.Op(message[0]).name.lower(), "bytes": len(message)}
            if (requests := messages.requests_in(message)) > 1:
                fields["requests"] = requests  # with consecutive ids
            self.log.debug("taken", id=self.id_of(link.peer, correlation), **fields)

    def id_of(self, peer: str, correlation: int) -> str:
        """What a question of another process is called in logs; of a gateway's: as its client knows it."""
        kind, _, number = peer.partition("-")
        if kind != "gateway":
            return f"{peer}.{correlation:x}"
        return f"{number}.{self.board.row(peer)[Word.GENERATION]}.{correlation:x}"

    def fail(self, reason: str, *, again: bool = False) -> NoReturn:
        """End this process at once and for good: it is not started again until an operator has looked; `again`: it is,
        every few seconds."""
        try:
            self._channel.send_nowait(Failed(reason, again))
        except (ChannelClosed, BlockingIOError):
            pass
        os._exit(EXIT_FAILED)

    # What follows is called by the control task in child.py.

    def link_up(self, grant: LinkGrant, fd: int) -> None:
        self.link_down(grant.peer)
        link = self._attach(grant, fd)
        self.on_link_up(grant.peer, link)

    def link_down(self, peer: str) -> None:
        if (link := self.links.pop(peer, None)) is None:
            return
        self.on_link_down(peer)
        link.close()
        self._regions.pop(peer).close()

    def layout_committed(self) -> None:
        self.old_layout = self.old_shards = None
        self.on_layout_committed()

    def stop(self) -> None:
        self.stopping = True
        if not self.left:
            self.row.set(Word.STATE, State.STOPPING)
        self.on_stop()

    def retire(self, fds: list[int]) -> None:
        self.stopping = True
        self.row.set(Word.STATE, State.STOPPING)
        self.on_retire(socket.socket(fileno=fds[0]) if fds else None)

    def _attach(self, grant: LinkGrant, fd: int) -> Link:
        region = Region.attach(fd, grant.size)
        region.close_fd()
        link = Link(
            grant.peer,
            region.view,
            side=grant.side,
            generation=grant.generation,
            bell=self.bells[grant.peer],
        )
        self._regions[grant.peer] = region
        self.links[grant.peer] = link
        return link
