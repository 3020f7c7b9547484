"""A child process from the supervisor's side: how it is spawned, told, killed and waited for.

Rules: spawned from the main thread only, because the kernel's parent-death signal is tied to the thread
that spawned; signals go through the pidfd, so that a reused pid is never hit; reaped once, after the
pidfd says that every thread of it is gone, so that a successor never writes the same files at the same
time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable

import msgspec
import trio

from topics.actors.child import GROUP_SIGNALS
from topics.actors.control import Channel
from topics.actors.heartbeat import Vitals
from topics.actors.secrecy import SECRETS
from topics.actors.vitals import open_stat, read_vitals

# Large blocks go back to the system when they are freed. glibc would learn to keep them, and a process that once held
# large answers for slow clients would hold their memory for good.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(512 * 1024), "MALLOC_TRIM_THRESHOLD_": str(1024 * 1024)}


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

    def __init__(self, popen: subprocess.Popen[bytes], pidfd: int, channel: Channel) -> None:
        self._popen = popen
        self._pidfd = pidfd
        self._stat_fd = open_stat(popen.pid)
        self.pid = popen.pid
        self.channel = channel
        self.left = trio.Event()  # it uses nothing of its name any more

    @classmethod
    def spawn(cls) -> ChildProcess:
        """Start Python; what it is to be comes with Boot."""
        channel, theirs = Channel.pair()
        # Blocked until the child ignores them: Ctrl-C reaches the whole group, the newborn too.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "topics.actors.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        except BaseException:
            channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        try:
            return cls(popen, os.pidfd_open(popen.pid), channel)
        except OSError:
            channel.close()
            popen.kill()
            popen.wait()
            raise

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def vitals(self) -> Vitals | None:
        return read_vitals(self.pid, self._stat_fd)

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

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
        code = self._popen.wait()
        os.close(self._pidfd)
        if self._stat_fd >= 0:
            os.close(self._stat_fd)
        self.channel.close()
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"


def _environment() -> dict[str, str]:
    """Ours, with our import path: the child must run the code that we run, wherever it was started from."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    passed_on = {name: value for name, value in os.environ.items() if name not in SECRETS}  # digests come with Boot
    return {**_ALLOCATOR, **passed_on, "PYTHONPATH": path}
