"""Blocks its loop in its first life; lives on in the second."""

import time

import trio

from roles import trace
from topics.actors.context import Context
from topics.shm.counters import Word


async def run(context: Context) -> None:
    stop = trio.Event()
    context.on_stop = stop.set
    trace(context, "booted")
    context.ready()
    await trio.sleep(0.1)
    if context.row[Word.GENERATION] == 1:
        time.sleep(3_600)
    await stop.wait()
