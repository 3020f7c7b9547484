"""Sends a ping over every link soon after the last was answered, and counts the answers per row."""

import trio

from roles import trace, trace_links
from topics.actors.context import Context
from topics.shm.counters import Word

PACE_S = 0.005  # other tests run beside this one: what is sent matters, not how much of it


async def run(context: Context) -> None:
    stop = trio.Event()
    trace_links(context)
    context.on_stop = stop.set
    trace(context, "booted", listener=context.listener is not None)
    context.ready()
    trace(context, "ready")
    waiting: dict[object, bytes] = {}
    number = 0
    while not stop.is_set():
        context.row.set(Word.CONNECTIONS, len(context.links))
        for link in context.links.values():
            for message in link.drain():
                assert message == waiting.pop(link)
                context.row.add(Word.REQUESTS)
            if link not in waiting:
                number += 1
                waiting[link] = b"ping %d" % number
                link.writer.send(waiting[link])
                link.flush()
        context.bell.arm()
        if any(not link.reader.empty() for link in context.links.values()):
            context.bell.disarm()
            await trio.sleep(PACE_S)
            continue
        with trio.move_on_after(0.05):
            await trio.lowlevel.wait_readable(context.bell.fileno())
        context.bell.disarm()
        context.bell.clear()
        await trio.sleep(PACE_S)
    trace(context, "stopping")
