"""Raises as soon as it runs."""

from roles import trace
from topics.actors.context import Context


async def run(context: Context) -> None:
    trace(context, "booted")
    raise RuntimeError("no use for this life")
