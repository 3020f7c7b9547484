"""topics bench: ours beside Redis Streams, on the same machine, in the same run.

This package stands outside the server: it starts `topics serve` and `redis-server` as anybody would and
talks to them over their sockets. It imports nothing of the server but errors, limits, settings, and which
shard owns a name, so that what it measures is what a client gets.
"""

from __future__ import annotations

import os
from pathlib import Path

from topics.errors import TopicsError


class BenchFailed(TopicsError):
    """A measurement that can't be trusted: a server that did not start, an answer that was no success,
    a count that does not match what was acknowledged. A missed target is not a failure."""


def child_environment() -> dict[str, str]:
    """Of a child that runs a module of this package: no installation has it, so Python has to be told where it is."""
    places = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
