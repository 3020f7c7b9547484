"""How a scenario is measured, and what comes out: one Line.

Rules: fresh servers on fresh folders for every scenario; the two sides take turns in short slices and are
never loaded at once; a slice begins when both are at rest, so that what one does in the background is not
charged to the other; the figure of a side is the median of its slices. After the slices, each side must
hold exactly what it acknowledged.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from topics.bench import BenchFailed, load, redis, tree, watch
from topics.bench.apart import Window
from topics.bench.load import Job, Outcome
from topics.bench.opening import close_watchers
from topics.bench.ours import Ours
from topics.bench.redis import Redis
from topics.bench.scenarios import RECORD_BYTES, STORED_RECORD_BYTES, Scenario, Target
from topics.bench.side import STREAMS, Side
from topics.bench.watch import Delivered, WatchJob

FILL_BATCH = 1_000
FILL_PIPELINE = 100
QUIET_S = 5.0
IDLE_S = 5.0
MB = 1_000_000
KB = 1_000
SHORTEST_S = 0.1  # at the lowest rate, two writes
ALL_SERVED_FROM = 1_000  # watchers from which on the time until the last one has it is the figure
WATCHERS_BEFORE = 20  # open already when memory is taken first: what the first of them needs once is not theirs

J = TypeVar("J", Job, WatchJob)
W = TypeVar("W", bound=Window)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int = 3
    seconds: float = 1.5  # of each slice
    warm_s: float = 0.3

    def short(self) -> Pace:
        """For the lines about delivery: there are many of them, and most count thousands of frames at once."""
        seconds = max(self.seconds * 0.3, SHORTEST_S)
        return Pace(rounds=-(-self.rounds * 2 // 3), seconds=seconds, warm_s=self.warm_s / 4)


class Measurement:
    """Runs scenarios one after the other; `tell` is called with a short text as it goes."""

    def __init__(
        self,
        *,
        pace: Pace,
        tell: Callable[[str], None],
        parent: Path | None = None,
        with_redis: bool | None = None,
        command: list[str] | None = None,
    ) -> None:
        self._pace = pace
        self._tell = tell
        self._parent = parent
        self._with_redis = redis.present() if with_redis is None else with_redis
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
        makers: list[Callable[[], Side]] = [
            lambda: Ours(
                durability=scenario.durability,
                parent=self._parent,
                spin_us=scenario.spin_us,
                command=self._command,
            )
        ]
        if self._with_redis:
            fsync = scenario.durability == "fsync"
            makers.append(lambda: Redis(policy="always" if fsync else "everysec", parent=self._parent))
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

    # --- parts -----------------------------------------------------------------------------------------
    def _take_turns(self, turns: Sequence[tuple[Side, J]], run_apart: Callable[[J], W], pace: Pace) -> list[list[W]]:
        taken: list[list[W]] = [[] for _ in turns]
        for number in range(pace.rounds):
            numbered = list(enumerate(turns))
            # The side that goes first changes, so that neither always has the warmer machine.
            for index, (side, job) in numbered if number % 2 == 0 else numbered[::-1]:
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


def _check_stored(side: Side, acknowledged: int) -> None:
    stored = side.stored()
    if stored != acknowledged:
        raise BenchFailed(f"{side.name} acknowledged {acknowledged:,} records and holds {stored:,}")
