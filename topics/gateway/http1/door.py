"""The listening socket of a gateway: who gets in, who is only heard, and what happens when descriptors run out.

    a place is free                           a client, until it closes
    no place, GUESTS not reached              a guest: what asks for health, readiness or metrics is answered; anything
                                              else is 429 and closed, unless a place has become free
    GUESTS reached                            the guest that came first and waits for nothing makes room; if all wait,
                                              the one that came first, after GUEST_STAY_MS
    accept fails for want of a descriptor     the spare one is given up, or a guest makes room; what is accepted until
                                              the spare one is back is a guest. If neither helps, the next sweep tries

Fewer connections than TOPICS_MAX_CONNECTIONS have a place where the limit of open files allows no more: guests and our
own files come first.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
from collections.abc import Callable

from topics import limits
from topics.actors.log import Log
from topics.gateway.admission.places import Places
from topics.gateway.http1.guests import TURNED_AWAY
from topics.gateway.http1.server import HotLane
from topics.gateway.metrics.refusals import Refused, uncounted

_ACCEPTS_PER_ROUND = 64
_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})


def _count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Door:
    def __init__(
        self,
        listener: socket.socket,
        lane: HotLane,
        places: Places,
        *,
        most: int,
        log: Log,
        leave_to_others: Callable[[], bool] = lambda: False,
        refused: Refused = uncounted,
    ) -> None:
        self._refused = refused
        self._listener = listener
        self._lane = lane
        self._places = places
        self._most = most
        self._log = log
        self._leave_to_others = leave_to_others  # another gateway has room
        self._own = _count_open_files()  # descriptors that are no connections
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._set_most()
        if places.most < most // 2:
            log.warning("few open files", limit=_open_files(), connections=places.most)

    def _set_most(self) -> None:
        """The limit can be changed from outside while we run."""
        room = _open_files() - self._own - limits.GUESTS - limits.SPARE_FILES
        self._places.most = max(1, min(self._most, room))

    @property
    def is_full(self) -> bool:
        return len(self._places) >= self._places.most and self._leave_to_others()

    def accept(self) -> bool:
        """Take those who knock. False: not before the next sweep."""
        for _ in range(_ACCEPTS_PER_ROUND):
            if self.is_full:
                return False
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return True
            except ConnectionAbortedError:
                continue  # the client is gone already
            except OSError as error:
                if error.errno in _NONE_LEFT:
                    if not self._is_knocked_at():
                        return True  # the descriptor is looked for first, and not needed
                    if self._make_room():
                        continue
                self._log.warning("accept failed", reason=str(error))
                return False  # or we would turn in circles
            self._admit(sock, address[0])
        return True

    def _admit(self, sock: socket.socket, address: str) -> None:
        lane = self._lane
        why = self._places.take(sock, address)
        if why is not None and why.detail is not None:
            self._refused(why.detail["limit"])
        if why is None:
            lane.adopt(sock)
        elif len(lane.guests) < limits.GUESTS or lane.guests.send_one_away():
            lane.adopt(sock)
            lane.guests.add(lane.connections[sock.fileno()], address)
        else:
            sock.setblocking(False)
            try:
                sock.send(TURNED_AWAY)
            except OSError:
                pass  # it has left
            sock.close()

    def _is_knocked_at(self) -> bool:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        return bool(poller.poll(0))

    def _make_room(self) -> bool:
        self._places.open_files = _open_files()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            return True
        return self._lane.guests.send_one_away()

    def sweep(self) -> None:
        """Once a second."""
        self._set_most()
        if self._spare < 0:
            try:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return
        self._places.open_files = 0

    def close(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft
