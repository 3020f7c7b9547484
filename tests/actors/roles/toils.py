"""Works for longer than a hang may last, without ever yielding to its loop, then serves on."""

import time

import trio

from roles import trace
from topics import limits
from topics.actors.context import Context


async def run(context: Context) -> None:
    stop = trio.Event()
    context.on_stop = stop.set
    context.ready()
    await trio.sleep(2 * context.settings.heartbeat_ms / 1_000)
    until = time.monotonic() + 3 * limits.HEARTBEAT_MISSES * context.settings.heartbeat_ms / 1_000
    while time.monotonic() < until:
        pass
    trace(context, "toiled")
    await stop.wait()
