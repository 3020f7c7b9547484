"""The first code of a child process, which is forked from the fork server (forkserver.py) with its control channel.

It receives Boot, and before that Prepare if it succeeds a process that still serves; ties its life to the
supervisor's, and runs one role. Rules: a child never outlives the supervisor (the kernel kills it, and end-of-file on
the control channel ends it too); it ignores the signals a terminal or service manager sends to the whole group,
because stopping has an order and the supervisor keeps it; it imports its role by name, so that this package knows no
role.

Crash: an exception that leaves the role is printed and ends the process with code 1; the supervisor does
the rest.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable

import trio

from topics.actors.context import EXIT_ORPHANED, Context
from topics.actors.control import (
    PROTOCOL,
    Boot,
    Channel,
    ChannelClosed,
    Failed,
    Hold,
    LayoutCommitted,
    LinkDown,
    LinkUp,
    NewKeys,
    Prepare,
    Prepared,
    Retire,
    Stop,
    Stopped,
)
from topics.actors.log import Log
from topics.errors import TopicsError

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(control_fd: int) -> None:
    name_process("child")  # until Boot says more
    channel = Channel(socket.socket(fileno=control_fd))
    try:
        boot, fds = channel.receive()
        if isinstance(boot, Prepare):
            _prepare(boot.module, channel)
            boot, fds = channel.receive()
    except ChannelClosed:
        os._exit(EXIT_ORPHANED)
    if not isinstance(boot, Boot):
        raise TopicsError(f"the first control message was {type(boot).__name__}, not Boot")
    die_with_parent()
    # The supervisor may have died before the kernel knew that we want to follow it.
    if os.getppid() != boot.supervisor_pid:
        os._exit(EXIT_ORPHANED)
    name_process(boot.name)
    if not boot.settings.dumpable:
        show_memory(False)
    channel.sock.setblocking(False)
    try:
        context = Context(boot, fds, channel)
        # No beat before this: until the first one only the start deadline counts, and imports can take seconds.
        run = importlib.import_module(boot.module).run
        trio.run(_live, context, channel, run)
    except BaseException:
        log = Log(boot.name, boot.settings.log, boot.settings.log_format)
        log.error("died", pid=os.getpid(), trace=traceback.format_exc())
        os._exit(1)
    # A thread that is still busy must not keep a finished process alive; nothing waits to be flushed.
    sys.stdout.flush()
    os._exit(0)


def _prepare(module: str, channel: Channel) -> None:
    """What takes long is done before our predecessor stops; and if it can't be done at all, it need not."""
    try:
        role = importlib.import_module(module)
        for later in getattr(role, "LATER", ()):  # what it imports while it serves: nobody could be warned then
            importlib.import_module(later)
    except Exception as exc:
        traceback.print_exc()
        channel.send_nowait(Failed(f"{type(exc).__name__}: {exc}"))
        os._exit(1)
    channel.send_nowait(Prepared(PROTOCOL))


async def _live(context: Context, channel: Channel, run: Callable[[Context], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_beat, context)
        nursery.start_soon(_obey, context, channel)
        # Runs up to its first checkpoint before the tasks above begin: the role's callbacks are set by then.
        await run(context)
        nursery.cancel_scope.cancel()
    try:
        channel.send_nowait(Stopped())
    except (ChannelClosed, BlockingIOError):
        pass  # the exit itself says it too


async def _beat(context: Context) -> None:
    """From the trio loop on purpose: a loop that is stuck stops the heart, a slow thread does not."""
    while True:
        context.beat()
        context.publish_counters()
        await trio.sleep(context.settings.heartbeat_ms / 1_000)


async def _obey(context: Context, channel: Channel) -> None:
    while True:
        await trio.lowlevel.wait_readable(channel.sock)
        try:
            message, fds = channel.receive()
        except BlockingIOError:
            continue
        except ChannelClosed:
            os._exit(EXIT_ORPHANED)
        match message:
            case LinkUp(grant):
                context.link_up(grant, fds[0])
            case LinkDown(peer):
                context.link_down(peer)
            case LayoutCommitted():
                context.layout_committed()
            case NewKeys(keys):
                context.on_keys(keys)
            case Hold(peer):
                context.on_hold(peer)
            case Retire():
                context.retire(fds)
            case Stop():
                context.stop()
            case _:
                raise TopicsError(f"unexpected control message {type(message).__name__}")


def leave_signals_to_supervisor() -> None:
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The supervisor blocked them before it spawned us, so that none could strike before this line.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def _prctl(option: int, value: ctypes.c_ulong | ctypes.c_char_p) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, value, zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def adopt_orphans(adopt: bool = True) -> None:
    """A process whose parent ends becomes a child of ours, if it descends from us; or no more."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt))


def show_memory(show: bool) -> None:
    """Whether others of the same user may look into our memory and descriptors, and there are core dumps. What we fork
    has the same. The death signal stays."""
    _prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(show))


def name_process(name: str) -> None:
    """What top and ps show; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))
