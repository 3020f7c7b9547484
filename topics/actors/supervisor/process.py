"""A child process from the supervisor's side: how it is told, killed and waited for. Where it comes from: spawner.py.

Rules: signals go through the pidfd, so that a reused pid is never hit; reaped once, after the pidfd says that every
thread of it is gone, so that a successor never writes the same files at the same time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import ClassVar

import msgspec
import trio

from topics.actors.control import Channel
from topics.actors.supervisor.heartbeat import Vitals
from topics.actors.supervisor.vitals import open_stat, read_vitals


class ProcessSpec(msgspec.Struct, frozen=True):
    """One line of the process table."""

    name: str
    module: str  # holds `async def run(context)`
    index: int
    listener: bool = False  # gets the listening socket
    stores: bool = False  # writes the data folder: holds its lock, and takes part in a change of layout
    stop_order: int = 0  # lower ones have stopped before higher ones are asked to


class ChildProcess:
    """One life of a child."""

    waited_for: ClassVar[set[int]] = set()  # pids that somebody will reap

    def __init__(self, pid: int, pidfd: int, channel: Channel) -> None:
        self._pidfd = pidfd
        self._stat_fd = open_stat(pid)
        self.pid = pid
        self.waited_for.add(pid)
        self.channel = channel
        self.left = trio.Event()  # it uses nothing of its name any more

    @classmethod
    def adopted(cls, pid: int, channel: Channel) -> ChildProcess:
        """Of a process whose parent we are; what it is to be comes with Boot."""
        try:
            return cls(pid, os.pidfd_open(pid), channel)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
            os.waitpid(pid, 0)
            raise

    @property
    def ended(self) -> bool:
        return os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def vitals(self) -> Vitals | None:
        return read_vitals(self.pid, self._stat_fd)

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def discard(self) -> None:
        self.kill()
        with trio.CancelScope(shield=True):
            await self.wait_exit()
        self.reap()

    async def wait_exit(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)

    async def wait_gone(self) -> None:
        """Until it has ended or left: its name is free then."""
        async with trio.open_nursery() as nursery:

            async def first(wait: Callable[[], Awaitable[None]]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(first, self.wait_exit)
            nursery.start_soon(first, self.left.wait)

    def reap(self) -> str:
        """After wait_exit: how it ended, in words."""
        ending = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        assert ending is not None
        self.waited_for.discard(self.pid)
        os.close(self._pidfd)
        if self._stat_fd >= 0:
            os.close(self._stat_fd)
        self.channel.close()
        if ending.si_code == os.CLD_EXITED:
            return f"exit code {ending.si_status}"
        try:
            return signal.Signals(ending.si_status).name
        except ValueError:
            return f"signal {ending.si_status}"
