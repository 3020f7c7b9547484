"""Small real roles for the supervisor's tests. Each is a module with `async def run(context)`."""

from __future__ import annotations

import json
import os
import time

from topics.actors.context import Context


def trace(context: Context, event: str, **fields: object) -> None:
    """Append what happened to <data>/trace.jsonl: one write per line, so that processes don't mix."""
    line = {
        "at_ns": time.monotonic_ns(),
        "name": context.name,
        "pid": os.getpid(),
        "event": event,
        **fields,
    }
    fd = os.open(os.path.join(context.settings.data_dir, "trace.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def trace_links(context: Context) -> None:
    """Trace the links it was born with, and every change."""
    for peer, link in context.links.items():
        trace(context, "born_with", peer=peer, generation=link.generation)
    context.on_link_up = lambda peer, link: trace(context, "link_up", peer=peer, generation=link.generation)
    context.on_link_down = lambda peer: trace(context, "link_down", peer=peer)
