"""Reports a failure in its first life, and serves in the second."""

import trio

from topics.actors.context import Context
from topics.shm.counters import Word


async def run(context: Context) -> None:
    stop = trio.Event()
    context.on_stop = stop.set
    if context.row[Word.GENERATION] == 1:
        context.fail("no memory left")
    context.ready()
    await stop.wait()
