"""Plays many hostile connections at the same time, from one thread, and gathers what the server said to each.

A case is what one client sends, in which pieces, and how it leaves. Whatever that is, the server has to bring the
connection to an end: it answers, or refuses, or runs out of patience. A connection that is still open when the
deadline of its case has passed is a hang; a stream, which may stay open for as long as its client listens, is left by
the client as soon as it is recognised.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from figures import FUZZED

WIDTH = 120  # connections at the same time
# Of silence: more than all the patience of the server together. How long the answers take in all says nothing: 200
# scrapes in a row are answered one each SCRAPE_MS.
DEADLINE_S = 12.0

# How the client leaves: it ends its side and listens, it listens until the server has had enough, it resets the
# connection, it closes and does not read, or it listens until there is nothing more for a moment and ends its side.
Leaving = Literal["half", "wait", "reset", "close", "quiet"]
QUIET_S = 0.25
LONG_ENOUGH_S = 1.0  # for one to whom something is pushed again and again


@dataclass(slots=True)
class Case:
    number: int
    label: str
    parts: list[bytes]
    leaving: Leaving = "half"
    pause_s: float = 0.0  # between pieces
    # Looks at what has come; a stream that is open is left, and with these last words.
    farewell: Callable[[bytes], bytes | None] = lambda received: None
    inputs: int = 1  # hostile requests in it

    @property
    def sent(self) -> bytes:
        return b"".join(self.parts)


@dataclass(slots=True)
class Outcome:
    case: Case
    received: bytes = b""
    clean: bool = False  # the server closed its side, nothing was cut off by a reset
    left: bool = False  # the client went without waiting for the end
    hung: bool = False
    took_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Visit:
    outcome: Outcome
    sock: socket.socket
    started: float
    heard: float
    sent_at: float
    pending: list[memoryview]
    next_at: float = 0.0  # not before that; 0: at once
    sent_all: bool = False
    said_farewell: bool = False
    received: bytearray = field(default_factory=bytearray)


class Player:
    def __init__(self, port: int, *, width: int = WIDTH, deadline_s: float = DEADLINE_S) -> None:
        self._port = port
        self._width = width
        self._deadline_s = deadline_s

    def play(self, cases: Iterable[Case]) -> list[Outcome]:
        waiting = list(reversed(list(cases)))
        outcomes: list[Outcome] = []
        visits: dict[int, _Visit] = {}
        poll = select.epoll()
        try:
            while waiting or visits:
                while waiting and len(visits) < self._width:
                    self._begin(waiting.pop(), poll, visits)
                for fd, event in poll.poll(0.02):
                    visit = visits[fd]
                    if self._attend(visit, event, poll):
                        self._end(visit, poll, visits, outcomes)
                now = time.monotonic()
                for visit in list(visits.values()):
                    if self._look(visit, now, poll):
                        self._end(visit, poll, visits, outcomes)
        finally:
            poll.close()
            for visit in visits.values():
                visit.sock.close()
        hostile = [outcome.case for outcome in outcomes if outcome.case.number >= 0]  # honest ones are below 0
        FUZZED.add(sum(case.inputs for case in hostile))
        outcomes.sort(key=lambda outcome: outcome.case.number)
        return outcomes

    # --- one visit ---

    def _begin(self, case: Case, poll: select.epoll, visits: dict[int, _Visit]) -> None:
        sock = socket.create_connection(("127.0.0.1", self._port), timeout=self._deadline_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        now = time.monotonic()
        pending = [memoryview(part) for part in reversed(case.parts) if part]
        visits[sock.fileno()] = _Visit(Outcome(case), sock, now, now, now, pending)
        poll.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _end(self, visit: _Visit, poll: select.epoll, visits: dict[int, _Visit], outcomes: list[Outcome]) -> None:
        fd = visit.sock.fileno()
        poll.unregister(fd)
        del visits[fd]
        visit.sock.close()
        visit.outcome.received = bytes(visit.received)
        visit.outcome.took_s = time.monotonic() - visit.started
        outcomes.append(visit.outcome)

    def _attend(self, visit: _Visit, event: int, poll: select.epoll) -> bool:
        """True: it is over."""
        try:
            if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and self._receive(visit):
                return True
            if event & select.EPOLLOUT and not visit.sent_all:
                return self._send(visit, poll)
        except OSError:
            # It closed while we were sending: what it said before may still be there to read.
            return self._rest(visit)
        return False

    def _receive(self, visit: _Visit) -> bool:
        try:
            data = visit.sock.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            return True  # a reset
        if not data:
            visit.outcome.clean = True
            return True
        visit.received += data
        visit.heard = time.monotonic()
        return False

    def _rest(self, visit: _Visit) -> bool:
        try:
            while data := visit.sock.recv(1 << 18):
                visit.received += data
            visit.outcome.clean = True
        except OSError:
            pass
        return True

    def _send(self, visit: _Visit, poll: select.epoll) -> bool:
        """One piece in one turn, so that the server sees the pieces."""
        pending = visit.pending
        if pending:
            try:
                sent = visit.sock.send(pending[-1])
            except BlockingIOError:
                return False
            pending[-1] = pending[-1][sent:]
            if not pending[-1]:
                pending.pop()
                if pending and visit.outcome.case.pause_s:
                    visit.next_at = time.monotonic() + visit.outcome.case.pause_s
                    poll.modify(visit.sock.fileno(), select.EPOLLIN)
        if pending:
            return False
        visit.sent_all = True
        visit.heard = visit.sent_at = time.monotonic()
        poll.modify(visit.sock.fileno(), select.EPOLLIN)
        leaving = visit.outcome.case.leaving
        if leaving == "half":
            visit.sock.shutdown(socket.SHUT_WR)
        elif leaving in ("reset", "close"):
            if leaving == "reset":
                visit.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            visit.outcome.left = True
            return True
        return False

    def _look(self, visit: _Visit, now: float, poll: select.epoll) -> bool:
        if now - visit.heard > self._deadline_s:
            visit.outcome.hung = True
            return True
        case = visit.outcome.case
        if visit.next_at and now >= visit.next_at:
            visit.next_at = 0.0
            poll.modify(visit.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        if not visit.sent_all or visit.said_farewell or case.leaving == "half":
            return False
        words = case.farewell(bytes(visit.received))
        if words is None and case.leaving == "quiet":
            quiet = now - visit.heard > QUIET_S or now - visit.sent_at > LONG_ENOUGH_S
            words = b"" if quiet else None
        if words is None:
            return False
        visit.said_farewell = True
        try:
            if words:
                visit.sock.send(words)
            visit.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return self._rest(visit)
        return False
