"""How a scenario is measured; what comes out is one Line (figures.py).

Rules: fresh servers on fresh folders for every scenario; the two sides take turns in short slices and are
never loaded at once; a slice begins when both are at rest, so that what one does in the background is not
charged to the other; the figure of a side is the median of its slices. After the slices, each side must
hold exactly what it acknowledged.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from benchmarks import BenchFailed, tree
from benchmarks.figures import (
    Beside,
    Figures,
    Line,
    arrivals,
    beside,
    claims_ms,
    deliveries,
    delivery_ms,
    line,
    medians_ms,
    rates,
    slowdown,
    unevenness,
    work_rates,
)
from benchmarks.generators import forwards, load, watch, workers
from benchmarks.generators.apart import Window
from benchmarks.generators.forwards import ForwardJob
from benchmarks.generators.load import Job
from benchmarks.generators.opening import close_watchers
from benchmarks.generators.watch import Delivered, WatchJob
from benchmarks.generators.workers import Worked, WorkJob
from benchmarks.scenarios import RECORD_BYTES, STORED_RECORD_BYTES, Scenario
from benchmarks.sides import beanstalkd, redis
from benchmarks.sides.beanstalkd import Beanstalkd
from benchmarks.sides.ours import Ours, name_on
from benchmarks.sides.queues import OurQueues
from benchmarks.sides.redis import Redis
from benchmarks.sides.side import STREAMS, Side

FILL_BATCH = 1_000
FILL_PIPELINE = 100
QUIET_S = 5.0
IDLE_S = 5.0
MB = 1_000_000
KB = 1_000
SHORTEST_S = 0.1  # at the lowest rate, two writes
ALL_SERVED_FROM = 1_000  # watchers from which on the time until the last one has it is the figure
WATCHERS_BEFORE = 20  # open already when memory is taken first: what the first of them needs once is not theirs

WITH_REDIS = "Redis and a client that copies"

Queueing = OurQueues | Redis | Beanstalkd

J = TypeVar("J", Job, WatchJob, ForwardJob, WorkJob)
W = TypeVar("W", bound=Window)
S = TypeVar("S", bound=Side)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int = 3
    seconds: float = 1.5  # of each slice
    warm_s: float = 0.3

    def short(self, share: float = 0.3) -> Pace:
        """For the lines about delivery: there are many of them, and most count thousands of frames at once."""
        seconds = max(self.seconds * share, SHORTEST_S)
        return Pace(rounds=-(-self.rounds * 2 // 3), seconds=seconds, warm_s=self.warm_s / 4)

    def dense(self) -> Pace:
        """For a ratio of our own figures: many short turns rather than few long ones."""
        return Pace(rounds=self.rounds, seconds=max(self.seconds * 0.12, SHORTEST_S), warm_s=self.warm_s / 6)


class Measurement:
    """Runs scenarios one after the other; `tell` is called with a short text as it goes."""

    def __init__(
        self,
        *,
        pace: Pace,
        tell: Callable[[str], None],
        parent: Path | None = None,
        with_redis: bool | None = None,
        with_beanstalkd: bool | None = None,
        command: list[str] | None = None,
    ) -> None:
        self._pace = pace
        self._tell = tell
        self._parent = parent
        self._with_redis = redis.present() if with_redis is None else with_redis
        self._with_beanstalkd = beanstalkd.present() if with_beanstalkd is None else with_beanstalkd
        self._command = command

    def run(self, scenario: Scenario) -> Line:
        kinds: dict[str, Callable[[Scenario, list[Side]], list[Figures]]] = {
            "append": self._append,
            "read": self._read,
            "latency": self._latency,
            "recovery": self._recovery,
            "memory": self._memory,
            "idle": self._idle,
            "deliver": self._deliver,
            "fanout": self._fanout,
            "watcher": self._watcher,
            "publish": self._publish,
            "router-ack": self._router_ack,
            "router-throughput": self._router_throughput,
            "router-visible": self._router_visible,
            "queue": lambda scenario, sides: self._queue(scenario, sides, work_rates),
            "queue-latency": lambda scenario, sides: self._queue(scenario, sides, claims_ms),
            "queue-evenness": lambda scenario, sides: self._queue(scenario, sides, unevenness),
        }
        with ExitStack() as stack:
            sides: list[Side] = []
            for make in self._makers(scenario):
                side = make()
                stack.callback(side.close)
                sides.append(side)
                self._tell(f"starting {side.name}")
                side.start()
                side.declare()
            figures = kinds[scenario.kind](scenario, sides)
            return line(scenario, figures[0], figures[1] if len(figures) > 1 else None)

    def _makers(self, scenario: Scenario) -> list[Callable[[], Side]]:
        queues = scenario.kind.startswith("queue")
        ours = OurQueues if queues else Ours
        makers: list[Callable[[], Side]] = [
            lambda: ours(
                durability=scenario.durability,
                parent=self._parent,
                spin_us=scenario.spin_us,
                command=self._command,
            )
        ]
        if self._with_redis and scenario.kind != "router-ack":
            fsync = scenario.durability == "fsync"
            makers.append(lambda: Redis(policy="always" if fsync else "everysec", parent=self._parent))
        if self._with_beanstalkd and queues:
            makers.append(lambda: Beanstalkd(parent=self._parent))
        return makers

    # --- kinds -----------------------------------------------------------------------------------------
    def _append(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        sizes = [scenario.batch, scenario.pipeline]
        jobs = [
            side.append_job(connections=scenario.connections, batch=size, record_bytes=RECORD_BYTES)
            for side, size in zip(sides, sizes, strict=False)
        ]
        taken = self._take_turns(list(zip(sides, jobs, strict=True)), load.run_apart, self._pace)
        for side, size, outcomes in zip(sides, sizes, taken, strict=False):
            _check_stored(side, sum(outcome.acknowledged for outcome in outcomes) * size)
        return [rates(outcomes, records_per_request=size) for outcomes, size in zip(taken, sizes, strict=False)]

    def _latency(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        jobs = [side.append_job(connections=1, batch=1, record_bytes=RECORD_BYTES, timed=True) for side in sides]
        taken = self._take_turns(list(zip(sides, jobs, strict=True)), load.run_apart, self._pace)
        for side, outcomes in zip(sides, taken, strict=True):
            _check_stored(side, sum(outcome.acknowledged for outcome in outcomes))
        return [medians_ms(outcomes) for outcomes in taken]

    def _read(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        for side in sides:
            self._fill(side, scenario.records * len(STREAMS), record_bytes=RECORD_BYTES)
        jobs = [side.read_job(connections=scenario.connections, limit=scenario.batch) for side in sides]
        taken = self._take_turns(list(zip(sides, jobs, strict=True)), load.run_apart, self._pace)
        return [rates(outcomes, records_per_request=scenario.batch) for outcomes in taken]

    def _recovery(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        figures = []
        for side in sides:
            self._fill(side, scenario.records, record_bytes=STORED_RECORD_BYTES)
            side.crash()
            self._tell(f"{side.name}: killed, starting again")
            seconds = side.start()
            _check_stored(side, scenario.records)
            side.stop()
            figures.append(Figures(value=seconds))
        return figures

    def _memory(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        figures = []
        for side in sides:
            self._fill(side, scenario.records, record_bytes=STORED_RECORD_BYTES)
            tree.wait_quiet(side.processes(), most_s=30.0)
            figures.append(Figures(value=tree.memory_bytes(side.processes()) / MB))
            side.stop()
        return figures

    def _idle(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        figures = []
        for side in sides:
            processes = side.processes()
            tree.wait_quiet(processes, most_s=QUIET_S)
            self._tell(f"{side.name}: watching {len(processes)} processes at rest")
            before, began = tree.fine_cpu_s(processes), time.monotonic()
            time.sleep(IDLE_S)
            used, wall = tree.fine_cpu_s(processes) - before, time.monotonic() - began
            figures.append(Figures(value=100 * used / wall))
        return figures

    def _deliver(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        taken = self._watch(scenario, [(side, scenario.wire) for side in sides])
        return [delivery_ms(outcomes, to_the_last=scenario.watchers >= ALL_SERVED_FROM) for outcomes in taken]

    def _fanout(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        turns: list[tuple[Side, Literal["sse", "ws"]]] = [(side, scenario.wire) for side in sides]
        if scenario.target.of_sse is not None:
            turns.append((sides[0], "sse"))
        figures = [deliveries(outcomes, unit=scenario.unit) for outcomes in self._watch(scenario, turns)]
        if scenario.target.of_sse is not None:
            figures[0].sse = figures.pop().value
        return figures

    def _watch(self, scenario: Scenario, turns: Sequence[tuple[Side, Literal["sse", "ws"]]]) -> list[list[Delivered]]:
        jobs = [
            (
                side,
                side.watch_job(
                    wire=wire,
                    watchers=scenario.watchers,
                    writers=scenario.writers,
                    batch=scenario.batch,
                    rate=scenario.rate,
                    record_bytes=RECORD_BYTES,
                ),
            )
            for side, wire in turns
        ]
        taken = self._take_turns(jobs, watch.run_apart, self._pace.short())
        acknowledged: Counter[Side] = Counter()
        for (side, _), outcomes in zip(turns, taken, strict=True):
            acknowledged[side] += sum(outcome.acknowledged for outcome in outcomes)
        for side, writes in acknowledged.items():
            _check_stored(side, writes * scenario.batch)
        return taken

    def _publish(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        depth = scenario.batch
        jobs = [
            (side, side.publish_job(connections=scenario.connections, depth=depth, record_bytes=RECORD_BYTES))
            for side in sides
        ]
        taken = self._take_turns(jobs, load.run_apart, self._pace.short())
        for side, outcomes in zip(sides, taken, strict=True):
            _check_stored(side, sum(outcome.acknowledged for outcome in outcomes) * depth)
        return [rates(outcomes, records_per_request=depth) for outcomes in taken]

    def _watcher(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        figures = []
        for side in sides:
            self._tell(f"{side.name}: opening {scenario.watchers:,} watchers")
            opened = side.open_watchers(WATCHERS_BEFORE)
            try:
                tree.wait_quiet(side.processes(), most_s=QUIET_S)
                before = tree.memory_bytes(side.processes())
                opened += side.open_watchers(scenario.watchers)
                tree.wait_quiet(side.processes(), most_s=QUIET_S)
                grown = tree.memory_bytes(side.processes()) - before
            finally:
                close_watchers(opened)
            figures.append(Figures(value=grown / scenario.watchers / KB))
        return figures

    # --- routers: Redis has none, so its column stays empty -----------------------------------------------
    def _router_ack(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        side = _ours(sides)
        dests: dict[str, list[str]] = {}
        for routers in scenario.routers:
            # The sources share a shard; the destinations are dealt out to all, the first to the source's own.
            source = name_on(0, f"from-{routers}", shards=side.shards)
            side.make(source)
            dests[source] = [
                name_on(number % side.shards, f"{source}.to-{number}", shards=side.shards) for number in range(routers)
            ]
            for dest in dests[source]:
                side.route(source, dest)
        jobs = [
            (side, side.append_job(connections=1, batch=1, record_bytes=RECORD_BYTES, timed=True, streams=(source,)))
            for source in dests
        ]
        taken = self._take_turns(jobs, load.run_apart, self._pace.dense())
        for source, outcomes in zip(dests, taken, strict=True):
            for stream in [source, *dests[source]]:
                _wait_held(side, stream, sum(outcome.acknowledged for outcome in outcomes))
        return [slowdown(dict(zip(scenario.routers, taken, strict=True)))]

    def _router_throughput(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        ways = _ways(sides, far=True)
        sizes = [scenario.pipeline if isinstance(side, Redis) else scenario.batch for _, side, _, _ in ways]
        jobs = []
        for (_, side, source, dest), size in zip(ways, sizes, strict=True):
            side.route(source, dest)
            job = side.forward_job(
                source=source, dest=dest, connections=scenario.connections, batch=size, record_bytes=RECORD_BYTES
            )
            jobs.append((side, job))
        taken = self._take_turns(jobs, forwards.run_apart, self._pace.short(0.2))
        for (_, side, source, dest), size, outcomes in zip(ways, sizes, taken, strict=True):
            for stream in (source, dest):
                _wait_held(side, stream, sum(outcome.acknowledged for outcome in outcomes) * size)
        first, *others = [arrivals(outcomes) for outcomes in taken]
        first.beside += _besides(ways, others, scenario.unit)
        return [first]

    def _router_visible(self, scenario: Scenario, sides: list[Side]) -> list[Figures]:
        ways = _ways(sides, far=False)
        jobs = []
        for _, side, source, dest in ways:
            side.route(source, dest)
            job = side.watch_job(
                wire=scenario.wire,
                watchers=scenario.watchers,
                writers=scenario.writers,
                batch=scenario.batch,
                rate=scenario.rate,
                record_bytes=RECORD_BYTES,
                source=source,
                stream=dest,
            )
            jobs.append((side, job))
        taken = self._take_turns(jobs, watch.run_apart, self._pace.short(0.2))
        first, *others = [delivery_ms(outcomes, to_the_last=False) for outcomes in taken]
        first.beside = _besides(ways, others, scenario.unit)
        return [first]

    # --- queues: Redis has its column, beanstalkd stands beside ours ----------------------------------------
    def _queue(
        self, scenario: Scenario, sides: list[Side], figures_of: Callable[[Sequence[Worked]], Figures]
    ) -> list[Figures]:
        filled: Counter[Side] = Counter()
        turns = []
        for side in _queueing(sides):
            side.make_queue(jitter_ms=scenario.jitter_ms)
            job = side.work_job(
                workers=scenario.connections,
                size=scenario.batch,
                push=scenario.push,
                timed=scenario.kind == "queue-latency",
            )
            turns.append((side, job))

        def fill(side: Queueing, job: WorkJob) -> WorkJob:
            queued = side.queued()
            self._tell(f"{side.name}: {queued:,} jobs, filling up to {scenario.records:,}")
            added = side.fill_queue(max(0, scenario.records - queued), job_bytes=STORED_RECORD_BYTES)
            filled[side] += added
            return msgspec.structs.replace(job, jobs=queued + added)

        taken = self._take_turns(turns, workers.run_apart, self._pace.short(0.2), prepare=fill)
        for (side, _), outcomes in zip(turns, taken, strict=True):
            left = filled[side] - sum(outcome.acknowledged for outcome in outcomes)
            if side.queued() != left:
                raise BenchFailed(f"{side.name}: {left:,} jobs were not acknowledged, and {side.queued():,} are there")
        found = {side.name: figures_of(outcomes) for (side, _), outcomes in zip(turns, taken, strict=True)}
        ours, *theirs = [figures for name, figures in found.items() if name != Beanstalkd.name]
        if Beanstalkd.name in found:
            ours.beside.append(beside(Beanstalkd.name, found[Beanstalkd.name], scenario.unit))
        return [ours, *theirs]

    # --- parts -----------------------------------------------------------------------------------------
    def _take_turns(
        self,
        turns: Sequence[tuple[S, J]],
        run_apart: Callable[[J], W],
        pace: Pace,
        prepare: Callable[[S, J], J] | None = None,
    ) -> list[list[W]]:
        taken: list[list[W]] = [[] for _ in turns]
        for number in range(pace.rounds):
            numbered = list(enumerate(turns))
            # The side that goes first changes, so that neither always has the warmer machine.
            for index, (side, job) in numbered if number % 2 == 0 else numbered[::-1]:
                if prepare is not None:
                    job = prepare(side, job)
                everyone = {process for each, _ in turns for process in each.processes()}
                tree.wait_quiet(list(everyone), most_s=QUIET_S)
                self._tell(f"round {number + 1} of {pace.rounds}: {side.name}")
                timed = msgspec.structs.replace(job, warm_s=pace.warm_s, seconds=pace.seconds)
                taken[index].append(run_apart(timed))
        return taken

    def _fill(self, side: Side, records: int, *, record_bytes: int) -> None:
        self._tell(f"{side.name}: storing {records:,} records")
        batch = FILL_PIPELINE if isinstance(side, Redis) else FILL_BATCH
        job = side.append_job(
            connections=len(STREAMS), batch=batch, record_bytes=record_bytes, requests=records // batch
        )
        load.run_apart(job)
        _check_stored(side, records)


class _Way(NamedTuple):
    what: str
    side: Side
    source: str
    dest: str


def _ours(sides: list[Side]) -> Ours:
    side = sides[0]
    assert isinstance(side, Ours)
    return side


def _queueing(sides: list[Side]) -> list[Queueing]:
    found = [side for side in sides if isinstance(side, Queueing)]
    assert len(found) == len(sides)
    return found


def _ways(sides: list[Side], *, far: bool) -> list[_Way]:
    """From where to where: within a shard, with `far` from one to another if there are two, and on Redis."""
    ours = _ours(sides)
    shards = ours.shards
    ways = [_Way("", ours, name_on(0, "from", shards=shards), name_on(0, "to", shards=shards))]
    if far and shards > 1:
        source, dest = name_on(0, "from-far", shards=shards), name_on(1, "to-far", shards=shards)
        ways.append(_Way("to another shard", ours, source, dest))
    return ways + [_Way(WITH_REDIS, side, STREAMS[0], STREAMS[1]) for side in sides[1:]]


def _besides(ways: list[_Way], others: list[Figures], unit: str) -> list[Beside]:
    return [beside(way.what, figures, unit) for way, figures in zip(ways[1:], others, strict=True)]


def _wait_held(side: Side, stream: str, records: int) -> None:
    deadline = time.monotonic() + forwards.ARRIVE_S
    while (held := side.held(stream)) < records and time.monotonic() < deadline:
        time.sleep(forwards.ASK_EVERY_S)
    if held != records:
        raise BenchFailed(f"{side.name}: {stream} holds {held:,} records, and {records:,} were acknowledged")


def _check_stored(side: Side, acknowledged: int) -> None:
    stored = side.stored()
    if stored != acknowledged:
        raise BenchFailed(f"{side.name} acknowledged {acknowledged:,} records and holds {stored:,}")
