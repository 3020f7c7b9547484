"""Connections without a place: they may ask how the server is, and no more."""

from __future__ import annotations

import time
from collections.abc import Callable

from topics import limits
from topics.errors import ApiError
from topics.gateway.admission.places import Places
from topics.gateway.api.types import error_response
from topics.gateway.http1.connection import Connection
from topics.gateway.http1.head import Head

_ERROR = ApiError(
    "throttled", "there is no place for another connection; connect again later", {"limit": "max_connections"}
)
_SAID = bytes(error_response(_ERROR).body)
TURNED_AWAY = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_SAID), _SAID)
)
# What an HTTP/2 client understands: empty SETTINGS, and GOAWAY with ENHANCE_YOUR_CALM before any stream.
TURNED_AWAY_H2 = b"\0\0\0\4\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0b"

_STAY_NS = limits.GUEST_STAY_MS * 1_000_000


class Guests:
    """`addresses` is for the lane, which asks before every request whether there are any."""

    def __init__(
        self,
        places: Places,
        *,
        hear: Callable[[Connection], bool],
        close: Callable[[Connection], None],
        count: Callable[[], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.places = places
        self._hear = hear  # read what it has sent; True: it waits for nothing
        self._close = close
        self._count = count  # one that was sent away
        self._clock = clock
        self.addresses: dict[Connection, str] = {}  # who came first stands first
        self._came_ns: dict[Connection, int] = {}

    def __len__(self) -> int:
        return len(self.addresses)

    def __contains__(self, connection: object) -> bool:
        return connection in self.addresses

    def add(self, connection: Connection, address: str) -> None:
        self.addresses[connection] = address
        self._came_ns[connection] = self._clock()

    def forget(self, connection: Connection) -> None:
        self.addresses.pop(connection, None)
        self._came_ns.pop(connection, None)

    def refusal(self, connection: Connection, head: Head | None) -> ApiError | None:
        """Why it may not ask this. A guest gets a place if there is one by now."""
        if (address := self.addresses.get(connection)) is None:
            return None
        error = self.places.take(connection.sock, address)
        if error is None:
            self.forget(connection)
        elif head is not None and head.error is None and head.route is not None and head.route.always:
            return None
        return error

    def send_one_away(self) -> bool:
        """The first one that has asked for nothing that is not answered, or else the first if it had its time: who
        asks again and again, or does not read, would keep out all others. False: there is none."""
        for connection in list(self.addresses):
            if self._hear(connection):
                self.send_away(connection, b"" if connection.head_bytes else TURNED_AWAY)
                return True
            if connection.closed:
                return True
        first = next(iter(self.addresses), None)
        if first is None or self._clock() - self._came_ns[first] < _STAY_NS:
            return False
        self.send_away(first, b"")
        return True

    def send_away(self, connection: Connection, said: bytes) -> None:
        """At once: its descriptor is wanted."""
        self._count()
        try:
            connection.sock.send(said)
        except OSError:
            pass  # it does not read, or has left
        self._close(connection)
