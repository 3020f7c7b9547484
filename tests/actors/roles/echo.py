"""Answers every message with itself, until it is told to stop."""

import trio

from roles import trace, trace_links
from topics.actors.context import Context
from topics.shm.counters import Word


async def run(context: Context) -> None:
    stop = trio.Event()
    trace_links(context)
    context.on_stop = stop.set
    context.on_layout_committed = lambda: trace(context, "layout_committed")
    trace(
        context,
        "booted",
        layout=context.layout,
        shards=context.shards,
        old_layout=context.old_layout,
        old_shards=context.old_shards,
        listener=context.listener is not None,
    )
    context.ready()
    trace(context, "ready")
    while not stop.is_set():
        echo(context)
        context.bell.arm()
        if any(not link.reader.empty() for link in context.links.values()):
            context.bell.disarm()
            await trio.lowlevel.checkpoint()
            continue
        with trio.move_on_after(0.05):  # the backstop of a lost bell, and the time it takes to stop
            await trio.lowlevel.wait_readable(context.bell.fileno())
        context.bell.disarm()
        context.bell.clear()
    trace(context, "stopping")


def echo(context: Context) -> None:
    for link in context.links.values():
        for message in link.drain():
            context.row.add(Word.REQUESTS)
            link.writer.send_always(message)
        link.flush()
