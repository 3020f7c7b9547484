"""Reports a failure that no restart mends."""

from roles import trace
from topics.actors.context import Context


async def run(context: Context) -> None:
    trace(context, "booted")
    context.fail("frame 7 of file 3 is corrupt: run the repair command")
