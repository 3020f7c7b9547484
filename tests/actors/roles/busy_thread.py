"""A thread of it is stuck, as in a very slow fsync, while its loop is fine; it stops all the same."""

import time

import trio

from roles import trace
from topics.actors.context import Context


async def run(context: Context) -> None:
    stop = trio.Event()
    context.on_stop = stop.set
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: trio.to_thread.run_sync(time.sleep, 3_600, abandon_on_cancel=True))
        context.ready()
        trace(context, "ready")
        await stop.wait()
        nursery.cancel_scope.cancel()
