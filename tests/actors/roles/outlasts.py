"""Serves when the process after it has been given up."""

import trio

from topics.actors.context import Context
from topics.shm.counters import State


async def run(context: Context) -> None:
    stop = trio.Event()
    context.on_stop = stop.set
    while context.board.row("gateway-1").state is not State.FAILED:
        await trio.sleep(0.01)
    context.ready()
    await stop.wait()
