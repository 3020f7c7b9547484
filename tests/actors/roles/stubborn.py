"""Does not stop."""

import trio

from roles import trace
from topics.actors.context import Context


async def run(context: Context) -> None:
    context.on_stop = lambda: trace(context, "told_to_stop")
    context.ready()
    await trio.sleep_forever()
