"""Serves in its first life, reports a failure in the next two, and serves again."""

import trio

from topics.actors.context import Context
from topics.shm.counters import Word


async def run(context: Context) -> None:
    stop = trio.Event()
    context.on_stop = stop.set
    if context.row[Word.GENERATION] in (2, 3):
        context.fail("no memory left")
    context.ready()
    await stop.wait()
