"""What is measured: one row per line of the table, with its target.

A target is a ratio to Redis Streams in the same run, or a bound of our own figure. The rows are data; how a
kind of row is measured stands in measure.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RECORD_BYTES = 80
STORED_RECORD_BYTES = 100
READ_TOPIC_RECORDS = 100_000
PIPELINE = 100  # Redis's batch: deeper ones gain it nothing

Kind = Literal[
    "append",
    "read",
    "latency",
    "recovery",
    "memory",
    "idle",
    "deliver",
    "fanout",
    "watcher",
    "publish",
    "router-ack",
    "router-throughput",
    "router-visible",
    "queue",
    "queue-latency",
    "queue-evenness",
    "guard",
    "scrape",
    "scrape-appends",
]
NO_TARGET = "none fixed"  # the table gives no unit to a target with an x in it
WORKERS = 8
Unit = Literal["records/s", "frames/s", "ms", "s", "MB", "KB", "% of a core", "% of the mean", "times", "jobs/s"]


class Target(msgspec.Struct, frozen=True):
    """One of `ratio` (ours over theirs, at least), `most` and `least` (ours, in the row's unit), and `of_sse`
    (ours over what an event stream reached beside it, at least). Or none: a line that is only watched."""

    ratio: float | None = None
    most: float | None = None
    least: float | None = None
    of_sse: float | None = None

    def met(self, *, ours: float | None, theirs: float | None, sse: float | None = None) -> bool | None:
        """None: could not be decided, because a figure is missing."""
        if ours is None:
            return None
        if self.most is not None:
            return ours <= self.most
        if self.least is not None:
            return ours >= self.least
        if self.of_sse is not None:
            return ours / sse >= self.of_sse if sse else None
        times = self.times_better(ours=ours, theirs=theirs)
        return None if times is None or self.ratio is None else times >= self.ratio

    def times_better(self, *, ours: float, theirs: float | None) -> float | None:
        """More is better for a rate, less for a bound."""
        above, below = (ours, theirs) if self.most is None else (theirs, ours)
        return above / below if above and below else None

    def __str__(self) -> str:
        if self.most is not None:
            return f"≤ {self.most:g}"
        if self.least is not None:
            return f"≥ {self.least:,.0f}" if self.least >= 1 else f"≥ {self.least:g}"
        if self.ratio is None and self.of_sse is None:
            return NO_TARGET
        return f"≥ {self.of_sse:g}x of SSE" if self.of_sse is not None else f"≥ {self.ratio:g}x"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    kind: Kind
    unit: Unit
    target: Target
    connections: int = 1
    batch: int = 1  # records per request of ours
    pipeline: int = 1  # XADDs per pipeline of theirs
    durability: Literal["disk", "fsync"] = "disk"
    records: int = 0  # stored before the measurement
    spin_us: int | None = None
    only_full: bool = False
    watchers: int = 0
    writers: int = 1
    rate: float = 0.0  # writes per second; 0: as fast as they are answered
    wire: Literal["sse", "ws"] = "sse"
    routers: tuple[int, ...] = ()  # from as many sources, each with so many
    push: bool = False  # jobs come on a stream instead of being claimed, where there is such a thing
    jitter_ms: int = 0  # how long the queue gathers claims


def _append(
    name: str, title: str, *, ratio: float, batch: int, connections: int, durability: Literal["disk", "fsync"]
) -> Scenario:
    return Scenario(
        name=name,
        title=title,
        kind="append",
        unit="records/s",
        target=Target(ratio=ratio),
        connections=connections,
        batch=batch,
        pipeline=1 if batch == 1 else PIPELINE,
        durability=durability,
    )


def _deliver(name: str, title: str, *, watchers: int, rate: float, most_ms: float) -> Scenario:
    return Scenario(
        name=name,
        title=title,
        kind="deliver",
        unit="ms",
        target=Target(most=most_ms),
        watchers=watchers,
        rate=rate,
    )


def _publish(name: str, title: str, *, depth: int) -> Scenario:
    return Scenario(
        name=name,
        title=title,
        kind="publish",
        unit="records/s",
        target=Target(least=8_000),
        connections=16,
        batch=depth,
        pipeline=depth,
    )


def _queue(name: str, title: str, *, size: int, jobs: int, target: Target, push: bool = False) -> Scenario:
    return Scenario(
        name=name,
        title=title,
        kind="queue",
        unit="jobs/s",
        target=target,
        connections=WORKERS,
        batch=size,
        records=jobs,
        push=push,
    )


def _guard(name: str, title: str, *, connections: int) -> Scenario:
    return Scenario(
        name=name,
        title=title,
        kind="guard",
        unit="times",
        target=Target(least=0.95),
        connections=connections,
    )


def _scrape(name: str, title: str, *, kind: Literal["scrape", "scrape-appends"], unit: Unit, most: float) -> Scenario:
    return Scenario(
        name=name,
        title=title,
        kind=kind,
        unit=unit,
        target=Target(most=most),
        connections=8,
        rate=500,
        records=100_000,  # one in each of as many topics
    )


SCENARIOS: tuple[Scenario, ...] = (
    _append(
        "append-1000",
        "append, batches of 1,000, disk, 16 connections",
        ratio=4,
        batch=1_000,
        connections=16,
        durability="disk",
    ),
    _append(
        "append-100",
        "append, batches of 100, disk, 16 connections",
        ratio=3,
        batch=100,
        connections=16,
        durability="disk",
    ),
    _append(
        "append-100-fsync",
        "append, batches of 100, fsync, 16 connections",
        ratio=2,
        batch=100,
        connections=16,
        durability="fsync",
    ),
    Scenario(
        name="diff-1000",
        title="diff of 1,000 records, 4 connections",
        kind="read",
        unit="records/s",
        target=Target(ratio=1.5),
        connections=4,
        batch=1_000,
        pipeline=1_000,
        records=READ_TOPIC_RECORDS,
    ),
    _append(
        "append-1-c16",
        "append, one record, disk, 16 connections",
        ratio=0.5,
        batch=1,
        connections=16,
        durability="disk",
    ),
    _append(
        "append-1-c64",
        "append, one record, disk, 64 connections",
        ratio=0.5,
        batch=1,
        connections=64,
        durability="disk",
    ),
    _append(
        "append-1-fsync",
        "append, one record, fsync, 16 connections",
        ratio=0.8,
        batch=1,
        connections=16,
        durability="fsync",
    ),
    Scenario(
        name="latency",
        title="one connection, one record, disk: median, no spinning",
        kind="latency",
        unit="ms",
        target=Target(most=0.35),
        spin_us=0,
    ),
    Scenario(
        name="latency-spin",
        title="one connection, one record, disk: median, spinning",
        kind="latency",
        unit="ms",
        target=Target(most=0.15),
        spin_us=50,
    ),
    Scenario(
        name="recovery",
        title="ready again after kill -9, 1 M records of 100 bytes",
        kind="recovery",
        unit="s",
        target=Target(most=4),
        records=1_000_000,
    ),
    Scenario(
        name="memory",
        title="memory of all processes, 5 M records of 100 bytes",
        kind="memory",
        unit="MB",
        target=Target(most=500),
        records=5_000_000,
        only_full=True,
    ),
    Scenario(
        name="idle",
        title="processor time of all processes at rest",
        kind="idle",
        unit="% of a core",
        # One clock tick of 10 ms in the 5 s that are watched: less is not measurable by the usual tools.
        target=Target(most=0.2),
    ),
    _deliver("deliver-1", "write to delivery, 1 watcher, 200 writes/s: median", watchers=1, rate=200, most_ms=1),
    _deliver("deliver-10", "write to delivery, 10 watchers, 100 writes/s: median", watchers=10, rate=100, most_ms=1),
    _deliver("deliver-100", "write to delivery, 100 watchers, 50 writes/s: median", watchers=100, rate=50, most_ms=3),
    _deliver(
        "deliver-1000",
        "write to the last of 1,000 watchers, 20 writes/s: median",
        watchers=1_000,
        rate=20,
        most_ms=20,
    ),
    Scenario(
        name="fanout-frames",
        title="100 watchers, writes of one record as fast as they go: frames",
        kind="fanout",
        unit="frames/s",
        target=Target(least=80_000),
        watchers=100,
        writers=4,
    ),
    Scenario(
        name="fanout-records",
        title="100 watchers, writes of 100 records as fast as they go: records",
        kind="fanout",
        unit="records/s",
        target=Target(least=1_000_000),
        watchers=100,
        writers=4,
        batch=100,
    ),
    Scenario(
        name="watcher-memory",
        title="memory of an idle watcher, 1,000 of them",
        kind="watcher",
        unit="KB",
        target=Target(most=30),
        watchers=1_000,
    ),
    _publish("ws-publish", "WebSocket publish, one record, 16 sockets, 1 in flight", depth=1),
    _publish("ws-publish-16", "WebSocket publish, one record, 16 sockets, 16 in flight", depth=16),
    Scenario(
        name="ws-fanout",
        title="100 WebSockets, writes of one record as fast as they go: frames",
        kind="fanout",
        unit="frames/s",
        target=Target(of_sse=0.5),
        watchers=100,
        writers=4,
        wire="ws",
    ),
    Scenario(
        name="router-ack",
        title="one connection, one record, the source of 1 and of 10 routers: median against none",
        kind="router-ack",
        unit="times",
        target=Target(most=1.3),
        routers=(0, 1, 10),
    ),
    Scenario(
        name="router-throughput",
        title="forwarded by one router, batches of 100: records until the last is there",
        kind="router-throughput",
        unit="records/s",
        target=Target(least=200_000),
        connections=4,
        batch=100,
        pipeline=100,
    ),
    Scenario(
        name="router-visible",
        title="write to delivery one router away, 200 writes/s: median",
        kind="router-visible",
        unit="ms",
        target=Target(most=3),
        watchers=1,
        rate=200,
    ),
    _queue(
        "queue-1",
        "claim and ack, 8 workers, one job per claim",
        size=1,
        jobs=20_000,
        target=Target(least=3_000),
    ),
    _queue("queue-8", "claim and ack, 8 workers, 8 jobs per claim", size=8, jobs=50_000, target=Target()),
    _queue(
        "queue-64",
        "claim and ack, 8 workers, 64 jobs per claim",
        size=64,
        jobs=80_000,
        target=Target(least=20_000),
    ),
    _queue(
        "queue-push",
        "jobs pushed and acked, 8 streams, 64 in flight on each",
        size=64,
        jobs=80_000,
        target=Target(),
        push=True,
    ),
    Scenario(
        name="queue-latency",
        title="claim of one job, 8 workers that claim and ack: median",
        kind="queue-latency",
        unit="ms",
        target=Target(most=2),
        connections=WORKERS,
        batch=1,
        records=20_000,
    ),
    Scenario(
        name="queue-evenness",
        title="jobs of 8 equal workers, 8 per claim, claims gathered for 5 ms: standard deviation",
        kind="queue-evenness",
        unit="% of the mean",
        target=Target(most=15),
        connections=WORKERS,
        batch=8,
        records=50_000,
        jitter_ms=5,
    ),
    _guard(
        "guard-c16",
        "append, one record, 16 connections, keys and metrics and a scrape a second: rate against none of them",
        connections=16,
    ),
    _guard(
        "guard-c64",
        "append, one record, 64 connections, keys and metrics and a scrape a second: rate against none of them",
        connections=64,
    ),
    _scrape("scrape", "scrape of 100,000 topics, 500 appends/s beside it: median", kind="scrape", unit="s", most=1),
    _scrape(
        "scrape-appends",
        "scrapes of 100,000 topics, 500 appends/s: the longest append against that without scrapes",
        kind="scrape-appends",
        unit="ms",
        most=20,
    ),
)

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
