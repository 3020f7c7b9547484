"""Orders to a running supervisor from outside, and what it says of them: `topics reload` on one end of a socket.

    command ──► supervisor   Order: once, first
    supervisor ──► command   Progress, as it happens; then Outcome, and the end

A SOCK_SEQPACKET socket in the abstract namespace: it is no file, so nothing is left over, and LOCK says its name.
Rules: only the user of the server, or root, may give orders; the supervisor never waits for whoever listens, and goes
on if nobody does any more.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterator

import msgspec

from topics.errors import ServerNotRunning
from topics.keys import Difference

KINDS = ("gateway", "shard", "router", "queue")
KEYS = "keys"  # read the key file again, and replace nothing
_SHOWN_KEYS = 20  # named in an answer, which has to fit into a packet
REPLACE_TIMEOUT_S = 120.0  # for one process: a shard may have a log to replay
_MAX_PACKET = 64 * 1024
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Order(msgspec.Struct, frozen=True):
    """Read the keys again, then replace every process, or those of one kind, or none; each may take so long."""

    only: str | None = None
    timeout_s: float = REPLACE_TIMEOUT_S


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """`process` has come to `stage`: preparing, stopping, starting, ready."""

    process: str
    stage: str
    at: int  # which of them it is, from 1
    of: int
    pid: int = 0
    took_ms: int = 0


class KeysRead(msgspec.Struct, frozen=True):
    """The keys that are in effect now, and what has changed: names, or numbers of keys without one."""

    total: int
    added: list[str]
    removed: list[str]
    changed: list[str]

    @classmethod
    def of(cls, total: int, found: Difference) -> KeysRead:
        return cls(total, *(_shortened(each) for each in (found.added, found.removed, found.changed)))

    def __str__(self) -> str:
        parts = [
            f"{what}: {', '.join(labels)}"
            for what, labels in (("added", self.added), ("removed", self.removed), ("changed", self.changed))
            if labels
        ]
        return "; ".join([f"{self.total} in effect", *(parts or ["none has changed"])])


def _shortened(labels: list[str]) -> list[str]:
    more = len(labels) - _SHOWN_KEYS
    return labels if more <= 0 else [*labels[:_SHOWN_KEYS], f"and {more} more"]


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    replaced: list[str]
    error: str = ""  # empty: all went well
    refused: bool = False  # it was not even begun
    keys: KeysRead | None = None  # None: they come from no file that could be read again


_answers: msgspec.json.Decoder[Progress | Outcome] = msgspec.json.Decoder(Progress | Outcome)


class Desk:
    """The supervisor's end: where orders come in."""

    def __init__(self) -> None:
        self.name = f"topics-{os.getpid()}-{secrets.token_hex(8)}"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.sock.setblocking(False)
        self.sock.bind(f"\0{self.name}")
        self.sock.listen(8)

    def accept(self) -> socket.socket | None:
        """Whoever is next, if it may give orders."""
        try:
            peer, _ = self.sock.accept()
        except OSError:
            return None  # it has left
        peer.setblocking(False)
        _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user not in (0, os.geteuid()):
            peer.close()
            return None
        return peer

    def close(self) -> None:
        self.sock.close()


def receive_order(peer: socket.socket) -> Order | None:
    """None: it was none, or whoever came has left."""
    try:
        return msgspec.json.decode(peer.recv(_MAX_PACKET), type=Order)
    except (msgspec.DecodeError, OSError):
        return None


def tell(peer: socket.socket, news: Progress | Outcome) -> None:
    """Lost if it is not listened to."""
    try:
        peer.send(msgspec.json.encode(news), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        pass


def give_order(name: str | None, order: Order) -> Iterator[Progress | Outcome]:
    """What a server says to an order, up to its outcome. ServerNotRunning if it goes away before that."""
    if name is None:
        raise ServerNotRunning("the server takes no orders: it is just starting, or older than this command")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as peer:
        try:
            peer.connect(f"\0{name}")
            peer.send(msgspec.json.encode(order))
        except OSError:
            raise ServerNotRunning("the server can't be reached: it has just stopped, or is in a container") from None
        while True:
            try:
                packet = peer.recv(_MAX_PACKET)
            except ConnectionError:
                packet = b""
            if not packet:
                raise ServerNotRunning(
                    "the server hung up: it stopped meanwhile, or this is neither its user nor root; "
                    "`topics ps` shows what runs"
                )
            news = _answers.decode(packet)
            yield news
            if isinstance(news, Outcome):
                return
