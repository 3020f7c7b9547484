"""A running server seen from outside: how the ops commands get at its board.

LOCK names the supervisor and the fd of its board, and /proc/<pid>/fd opens that from any process of the
same user. So the commands work also while every process of the server hangs, and cost them nothing.
Read-only, always.
"""

from __future__ import annotations

import os

from topics.actors.datadir import LockInfo
from topics.errors import ServerNotRunning
from topics.shm.counters import Board


def open_board(info: LockInfo) -> Board:
    if info.board_fd is None or info.board_size is None:
        raise ServerNotRunning(f"the server with pid {info.pid} is just starting; try again")
    try:
        fd = os.open(f"/proc/{info.pid}/fd/{info.board_fd}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ServerNotRunning(f"the server with pid {info.pid} has just stopped") from None
    except PermissionError:
        raise ServerNotRunning(
            f"not allowed to look into the server with pid {info.pid}: run this as its user, or as root"
        ) from None
    return Board.attach(fd, info.board_size, writable=False)
