"""Client connections on their way from a gateway to its successor: sockets, and what was read of them and not served.

A connection between two requests, or in the middle of one that has not come whole, is a socket and some bytes. So it
can go on in another process, and its client notices nothing.

    packet   | more | bytes |    the first one of a connection brings its socket (SCM_RIGHTS); more = 1: another follows

Crash of either side: connections on their way are closed, between requests or before anything was done for them.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Callable

import trio

from topics.gateway.http1.connection import Connection
from topics.gateway.http1.server import HotLane

_PACKET = 64 * 1024
_FD_BYTES = array.array("i").itemsize


class Bequest:
    """The old gateway's end."""

    def __init__(self, lane: HotLane, heir: socket.socket | None) -> None:
        self._lane = lane
        self._heir = heir
        if heir is not None:
            heir.setblocking(False)

    async def step(self) -> None:
        """Pass on whatever can go; what still has to be sent to its client stays."""
        for connection in [each for each in self._lane.connections.values() if each.movable]:
            if self._heir is not None:
                try:
                    await self._send(self._heir, connection)
                except OSError:  # nobody inherits
                    self._heir.close()
                    self._heir = None
            if self._heir is None:
                self._lane.close(connection)
            else:
                self._lane.give_away(connection)

    async def _send(self, heir: socket.socket, connection: Connection) -> None:
        data = connection.unserved()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection.fd]))]
        for at in range(0, max(len(data), 1), _PACKET):
            piece = data[at : at + _PACKET]
            packet = bytes([at + _PACKET < len(data)]) + piece
            while True:
                try:
                    heir.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
                    break
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(heir)
            rights = []

    def close(self) -> None:
        if self._heir is not None:
            self._heir.close()


async def inherit(source: socket.socket, adopt: Callable[[socket.socket, bytes], None]) -> None:
    """The successor's end: take connections until there are no more."""
    source.setblocking(False)
    taken: socket.socket | None = None
    parts: list[bytes] = []
    with source:
        while True:
            await trio.lowlevel.wait_readable(source)
            try:
                packet, rights, _, _ = source.recvmsg(
                    _PACKET + 1, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                continue
            except ConnectionError:
                packet = b""
            if not packet:
                break
            for level, kind, data in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    taken = socket.socket(fileno=array.array("i", data)[0])
            parts.append(packet[1:])
            if not packet[0]:
                if taken is not None:  # otherwise there were no descriptors left
                    adopt(taken, b"".join(parts))
                taken, parts = None, []
    if taken is not None:
        taken.close()
