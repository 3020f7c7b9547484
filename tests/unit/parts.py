"""Parts of a gateway without a process around them."""

from __future__ import annotations

from functools import cache

from topics.gateway.api.queues import QueueHandlers
from topics.gateway.api.routers import RouterHandlers
from topics.gateway.api.watch import Watches
from topics.gateway.calls import Calls
from topics.gateway.metrics.page import MetricsHandlers
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.registry import Streams
from topics.settings import Settings
from topics.shm.counters import Board


@cache
def _board() -> Board:
    """One for all: each is a piece of shared memory with a descriptor."""
    return Board.create(["router"])


def routers(*, shards: int) -> RouterHandlers:
    return RouterHandlers(peer=shards, board=_board())


def queues(*, shards: int, streams: Streams | None = None) -> QueueHandlers:
    return QueueHandlers(watches(shards=shards).streams if streams is None else streams, peer=shards + 1)


def metrics(*, shards: int) -> MetricsHandlers:
    return MetricsHandlers(_board(), shards=shards)


def watches(*, shards: int, settings: Settings | None = None) -> Watches:
    calls = Calls(shards=shards, timeout_ms=1_000)
    streams = Streams(settings=settings or Settings(), calls=calls, feeds=Feeds(calls, shards=shards))
    return Watches(streams, shards=shards)
