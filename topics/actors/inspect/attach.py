"""A running server seen from outside: how the ops commands get at its board and its rings.

LOCK names the supervisor and its inspect socket, where a thread of it gives a copy of both (inspect_socket.py). Where
nobody answers there, or LOCK names no socket because the server is older, the way is /proc/<pid>/fd, which the kernel
opens to root, and to others only if the server has TOPICS_DUMPABLE. That works also while every process of the server
hangs. Read-only, always.
"""

from __future__ import annotations

import os

import msgspec

from topics.actors.inspect.inspect_socket import LinkSample, NoAnswer, ask
from topics.actors.inspect.rings import links_of
from topics.actors.startup.datadir_lock import LockInfo, read_lock_info
from topics.errors import ServerNotRunning
from topics.shm.counters import Board, Word


class Sight(msgspec.Struct, frozen=True):
    """What was to be seen at one moment; `board` wants to be closed."""

    board: Board
    links: list[LinkSample]


def look_at(data_dir: str) -> tuple[LockInfo, Sight]:
    """The server of this folder. One that ends while it is asked was none, as the second look at LOCK says."""
    info = read_lock_info(data_dir)
    try:
        return info, look_inside(info)
    except ServerNotRunning:
        read_lock_info(data_dir)
        raise


def look_inside(info: LockInfo) -> Sight:
    if info.inspect is None:
        return _through_proc(info)
    try:
        return Sight(*ask(info.inspect, info.pid))
    except NoAnswer as silence:
        try:
            return _through_proc(info)
        except NotAllowed:
            raise ServerNotRunning(f"{silence}; root can look all the same: run this with sudo") from None


class NotAllowed(ServerNotRunning):
    """The kernel keeps us out."""


def _through_proc(info: LockInfo) -> Sight:
    board = open_board(info)
    return Sight(board, links_of(board.row("supervisor")[Word.PID]))


def open_board(info: LockInfo) -> Board:
    """The board itself, not a copy: for root, or if the server is dumpable."""
    if info.board_fd is None or info.board_size is None:
        raise ServerNotRunning(f"the server with pid {info.pid} is just starting; try again")
    try:
        fd = os.open(f"/proc/{info.pid}/fd/{info.board_fd}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ServerNotRunning(f"the server with pid {info.pid} has just stopped") from None
    except PermissionError:
        raise NotAllowed(
            f"not allowed to look into the server with pid {info.pid}: run this as its user, or as root"
        ) from None
    except OSError as exc:
        raise ServerNotRunning(f"can't look into the server with pid {info.pid}: {exc.strerror}") from None
    try:
        return Board.attach(fd, info.board_size, writable=False)
    except (OSError, ValueError):
        os.close(fd)
        raise ServerNotRunning(f"pid {info.pid} is not the server that LOCK names: it has just stopped") from None
