"""Where child processes come from, as the supervisor sees it: a fork server, started when the first child is wanted.

Rules: one child is asked for at a time. A fork server that is dead, does not answer in time, or was asked by a caller
that stopped waiting is ended, and the next child gets another: no answer is ever taken for that of another request. A
reload has a spawner of its own, whose fork server imports the code that is installed now; the one that it takes the
place of is closed, and whoever still waits there is refused.

Crash of the fork server: the child that was asked for could not be started, which counts as a death of that child. If
it was forked all the same it ends by itself, and is reaped with the next request.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

import trio

from topics.actors.child import GROUP_SIGNALS, adopt_orphans
from topics.actors.control import Channel
from topics.actors.forkserver import FORK, REPLY_BYTES, WARM
from topics.actors.startup.secrecy import SECRETS
from topics.actors.supervisor.process import ChildProcess

_PATIENCE_S = 60.0  # imports on a machine that is busy with other starts
# Large blocks go back to the system when they are freed. glibc would learn to keep them, and a process that once held
# large answers for slow clients would hold their memory for good.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(512 * 1024), "MALLOC_TRIM_THRESHOLD_": str(1024 * 1024)}


class Spawner:
    _out: ClassVar[int] = 0  # requests of all spawners: their children are ours before we know of them

    def __init__(self, modules: Sequence[str] = (), *, dumpable: bool = False) -> None:
        self._modules = tuple(modules)  # of roles: imported before the first fork
        self._dumpable = dumpable  # the fork server; children are told by their settings
        self._server: _ForkServer | None = None
        self._turn = trio.Lock()
        self._closed = False
        adopt_orphans()

    def another(self) -> Spawner:
        """One that imports what is installed now."""
        return Spawner(self._modules, dumpable=self._dumpable)

    async def spawn(self) -> ChildProcess:
        """A process that waits for its Boot; OSError if there can't be one."""
        async with self._turn:
            if self._closed:
                raise OSError("its fork server was closed")
            if not Spawner._out:
                _reap_lost()
            Spawner._out += 1
            try:
                with trio.fail_after(_PATIENCE_S):
                    if self._server is not None and self._server.ended:
                        self._end_server()
                    if self._server is None:
                        self._server = _ForkServer(self._modules, dumpable=self._dumpable)
                        await self._server.wait_warm()
                    return await self._server.fork()
            except trio.TooSlowError:
                self._end_server()
                raise OSError(f"the fork server did not answer within {_PATIENCE_S:g} s") from None
            except BaseException:
                self._end_server()
                raise
            finally:
                Spawner._out -= 1

    def close(self) -> None:
        """No child comes from here any more."""
        self._closed = True
        self._end_server()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None


class _ForkServer:
    """One life of the process."""

    def __init__(self, modules: Sequence[str], *, dumpable: bool) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        # Blocked until the process ignores them: Ctrl-C reaches the whole group, the newborn too.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        arguments = [str(theirs.fileno()), str(os.getpid()), str(int(dumpable)), *modules]
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "topics.actors.forkserver", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        except BaseException:
            self._orders.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        ChildProcess.waited_for.add(self._popen.pid)

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    async def wait_warm(self) -> None:
        if (reply := await self._reply()) != WARM:
            raise OSError(f"the fork server said {reply!r}")

    async def fork(self) -> ChildProcess:
        channel, theirs = Channel.pair()
        try:
            with theirs:
                rights = array.array("i", [theirs.fileno()])
                self._orders.sendmsg([FORK], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            reply = await self._reply()
            if not reply.isdigit():
                raise OSError(reply.decode(errors="replace"))
            return ChildProcess.adopted(int(reply), channel)
        except BaseException:
            channel.close()  # a child that was forked reads end-of-file, and ends
            raise

    async def _reply(self) -> bytes:
        try:
            await trio.lowlevel.wait_readable(self._orders)
        except trio.ClosedResourceError:
            raise OSError("its fork server was closed") from None
        reply = self._orders.recv(REPLY_BYTES)
        if not reply:
            raise OSError("the fork server ended")
        return reply

    def end(self) -> None:
        # Somebody may wait for it; the next descriptor has the same number, and could not be waited for then.
        trio.lowlevel.notify_closing(self._orders)
        self._orders.close()
        self._popen.kill()
        self._popen.wait()
        ChildProcess.waited_for.discard(self._popen.pid)


def _reap_lost() -> None:
    """Processes of a fork server that was killed while it forked: they became ours, and nobody was told."""
    with suppress(ChildProcessError, FileNotFoundError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            pid = ended.si_pid
            with open(f"/proc/{pid}/comm") as source:
                name = source.read().strip()
            if pid in ChildProcess.waited_for or name not in ("forkserver", "child"):
                return  # whoever waits for it is about to reap it, and the next request looks behind it
            os.waitpid(pid, 0)


def _environment() -> dict[str, str]:
    """Ours, with our import path: a child must run the code that we run, wherever it was started from."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    passed_on = {name: value for name, value in os.environ.items() if name not in SECRETS}  # digests come with Boot
    return {**_ALLOCATOR, **passed_on, "PYTHONPATH": path}
