"""Recovers for longer than a hang may last, without ever yielding to its loop, then serves."""

import time

import trio

from roles import trace
from topics import limits
from topics.actors.context import Context


async def run(context: Context) -> None:
    stop = trio.Event()
    context.on_stop = stop.set
    trace(context, "booted")
    steps = 2 * limits.HEARTBEAT_MISSES + 2
    for step in range(steps):
        context.recovering(1_000 * step // steps)
        time.sleep(context.settings.heartbeat_ms / 1_000)
    context.ready()
    trace(context, "ready")
    await stop.wait()
