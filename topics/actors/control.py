"""The control channel between the supervisor and a child: small messages, and the fds that go with them.

A SOCK_SEQPACKET pair: one message is one packet, file descriptors travel with it (SCM_RIGHTS), and when
either side dies the other reads end-of-file. Orders and news only: nothing on the path of a request comes
this way.

    supervisor ──► child   Prepare, Boot, LinkUp, LinkDown, LayoutCommitted, NewKeys, Hold, Retire, Stop
    child ──► supervisor   Prepared, Ready, Held, Left, Failed, Stopped

Boot is the first packet, but for Prepare: a successor imports its role while the one before it still serves. Boot's
fds, in this order: the board, the usage page if `usage_size`, the bells in the order of `bells`, the links in the order
of `links`, the listening socket if `listener`, the data folder's lock if `holds_lock`, the inheritance if `inherits`.

PROTOCOL changes with whatever processes of different versions would misunderstand: these messages, those in the rings
(messages/), the layout of rings, board and usage page. A reload runs old and new processes side by side, so it is
refused if the new code has another number.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Sequence

import msgspec

from topics.errors import TopicsError
from topics.keys import Key
from topics.settings import Settings

MAX_MESSAGE_BYTES = 192 * 1024  # below the default socket buffer; a Boot for 80 processes is a twentieth
PROTOCOL = 3
_FD_BYTES = array.array("i").itemsize
MAX_FDS = 253  # the kernel's own bound; the largest process table needs about 150


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Be ready to be booted: import this."""

    module: str


class LinkGrant(msgspec.Struct, frozen=True, kw_only=True):
    peer: str
    side: int
    generation: int
    size: int


class Boot(msgspec.Struct, frozen=True, kw_only=True, tag="boot"):
    name: str
    module: str
    index: int
    supervisor_pid: int
    settings: Settings
    board_size: int
    bells: list[str]
    links: list[LinkGrant]
    listener: bool
    holds_lock: bool
    layout: int
    shards: int
    old_layout: int | None = None
    old_shards: int | None = None
    usage_size: int = 0
    cold: str | None = None  # the cold tier, for those who store
    cold_id: str | None = None  # what its marker says
    inherits: bool = False


class LinkUp(msgspec.Struct, frozen=True, tag="link_up"):
    link: LinkGrant


class LinkDown(msgspec.Struct, frozen=True, tag="link_down"):
    peer: str


class LayoutCommitted(msgspec.Struct, frozen=True, tag="layout_committed"):
    pass


class NewKeys(msgspec.Struct, frozen=True, tag="new_keys"):
    """To those who talk to clients: these keys, and no others, from now on."""

    keys: tuple[Key, ...]


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """This peer is about to be replaced: ask it nothing new until its next link is up, and say when all that was asked
    is in its ring (Held)."""

    peer: str


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """Finish as for Stop, but so that nobody notices: a successor waits. With a socket on which it may inherit."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    protocol: int


class Held(msgspec.Struct, frozen=True, tag="held"):
    peer: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """I use nothing of my name any more (row, bell, links, listener), and only wait for clients that read slowly."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    pass


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Don't start me again: what is wrong needs an operator. Or, `again`: not before a while, it may be there then."""

    reason: str
    again: bool = False


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    pass


Message = (
    Prepare
    | Boot
    | LinkUp
    | LinkDown
    | LayoutCommitted
    | NewKeys
    | Hold
    | Retire
    | Stop
    | Prepared
    | Ready
    | Held
    | Left
    | Failed
    | Stopped
)

_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class ChannelClosed(TopicsError):
    """The other side is gone."""


class Channel:
    """One end. Sends never block: a peer that lets its buffer fill up is not listening any more."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """(the supervisor's end, the socket for the child)"""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        return Channel(ours), theirs

    def fileno(self) -> int:
        return self.sock.fileno()

    def send_nowait(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Raises ChannelClosed when the peer is gone, another OSError when the message can't be delivered."""
        packet = msgspec.json.encode(message)
        if len(packet) > MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
            raise OSError(errno.EMSGSIZE, f"control message of {len(packet)} bytes with {len(fds)} fds")
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self.sock.sendmsg([packet], rights, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            raise ChannelClosed("the other side of the control channel is gone") from None

    def receive(self) -> tuple[Message, list[int]]:
        """The next message with its fds; BlockingIOError if there is none and the socket does not block."""
        # Not socket.recv_fds: on 3.11 it drops the flags, and the fds would leak into grandchildren.
        space = socket.CMSG_SPACE(MAX_FDS * _FD_BYTES)
        try:
            packet, rights, flags, _ = self.sock.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise ChannelClosed("the other side of the control channel is gone") from None
        fds = array.array("i")
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
        if not packet:
            raise ChannelClosed("the other side of the control channel is gone")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            # Out of file descriptors, most likely: what arrived is not what was sent.
            for fd in fds:
                os.close(fd)
            raise TopicsError("a control message arrived cut short: raise the open files limit (ulimit -n)")
        return _decoder.decode(packet), list(fds)

    def close(self) -> None:
        self.sock.close()
