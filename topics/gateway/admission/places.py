"""Places for client connections of one gateway, of both lanes: in all, and per peer address.

Each gateway has its share of the places of all gateways. A connection has a place from its first byte until its socket
is closed, whichever lane it is in. Addresses of IPv6 count by their /64, which is what one client gets. A connection
without a place may still ask how the server is (http1/guests.py).
"""

from __future__ import annotations

import ipaddress
import socket

from topics.errors import ApiError, throttled_by
from topics.settings import Settings


class Places:
    def __init__(self, *, most: int, per_peer: int) -> None:
        self.most = most
        self.per_peer = per_peer  # 0: no limit
        self.open_files = 0  # the limit of descriptors that was met; 0: there are some left
        self._peers: dict[socket.socket, str] = {}
        self._counts: dict[str, int] = {}

    @classmethod
    def of(cls, settings: Settings, gateway: int = 0) -> Places:
        """This gateway's share. No gateway is without any."""
        per_peer = settings.max_connections_per_peer
        return cls(
            most=_share(settings.max_connections, gateway, settings.gateways),
            per_peer=per_peer and _share(per_peer, gateway, settings.gateways),
        )

    def __len__(self) -> int:
        return len(self._peers)

    def take(self, sock: socket.socket, address: str, *, always: bool = False) -> ApiError | None:
        """Why there is no place for it. always: it had one in another process."""
        peer = peer_of(address)
        count = self._counts.get(peer, 0)
        if not always and (error := self._refusal(count)) is not None:
            return error
        if sock not in self._peers:
            self._peers[sock] = peer
            self._counts[peer] = count + 1
        return None

    def _refusal(self, of_peer: int) -> ApiError | None:
        if self.open_files:
            return throttled_by("open_files", self.open_files, "connect again later", whose="the gateway")
        if len(self._peers) >= self.most:
            return throttled_by("max_connections", self.most, "connect again later", whose="the gateway")
        if self.per_peer and of_peer >= self.per_peer:
            remedy = "use the connections that you have"
            return throttled_by("max_connections_per_peer", self.per_peer, remedy, whose="this address")
        return None

    def give(self, sock: socket.socket) -> None:
        """Also for one that has none."""
        peer = self._peers.pop(sock, None)
        if peer is None:
            return
        count = self._counts[peer] - 1
        if count:
            self._counts[peer] = count
        else:
            del self._counts[peer]


def _share(total: int, gateway: int, gateways: int) -> int:
    return max(1, total // gateways + (gateway < total % gateways))


def peer_of(address: str) -> str:
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))
