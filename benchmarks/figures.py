"""What comes out of a scenario: figures of a side, and one Line. Arithmetic only.

The figure of a side is the median of its slices.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks import BenchFailed
from benchmarks.generators.apart import Window
from benchmarks.generators.forwards import Arrived
from benchmarks.generators.load import Outcome
from benchmarks.generators.watch import Delivered
from benchmarks.generators.workers import Worked
from benchmarks.scenarios import Scenario, Target


class Beside(msgspec.Struct, kw_only=True):
    """Another figure of the same turns, said beside the value."""

    what: str
    value: float
    unit: str
    times: float | None = None  # how many times the first of them
    slices: list[float] = []


class Figures(msgspec.Struct, kw_only=True):
    """One side of one line."""

    value: float
    slices: list[float] = []
    generator_cpu: float | None = None  # share of one core, median over the slices
    server_cpu: float | None = None  # likewise; more than 1 is more than one core
    p50_ms: float | None = None  # where the value itself is something else
    p99_ms: float | None = None
    per_frame: float | None = None  # records per frame or reply
    sse: float | None = None  # what event streams reached in the same turns, where the line is about something else
    beside: list[Beside] = []


class Line(msgspec.Struct, kw_only=True):
    name: str
    title: str
    unit: str
    target: str
    ours: Figures
    theirs: Figures | None
    ratio: float | None  # how many times better than theirs, whether more or less is better
    met: bool | None


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    if not values:
        raise BenchFailed("no measurement came out")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def rates(outcomes: Sequence[Outcome], *, records_per_request: int) -> Figures:
    slices = [outcome.requests * records_per_request / outcome.wall_s for outcome in outcomes]
    return _figures(outcomes, slices)


def medians_ms(outcomes: Sequence[Outcome]) -> Figures:
    slices = [statistics.median(outcome.times_ns or [0]) / 1e6 for outcome in outcomes]
    figures = _figures(outcomes, slices)
    figures.p99_ms = percentile([time_ns / 1e6 for o in outcomes for time_ns in o.times_ns], 0.99)
    return figures


def deliveries(outcomes: Sequence[Delivered], *, unit: str) -> Figures:
    counts = [o.frames if unit == "frames/s" else o.records for o in outcomes]
    figures = _figures(outcomes, [count / o.wall_s for count, o in zip(counts, outcomes, strict=True)])
    figures.per_frame = sum(o.records for o in outcomes) / max(1, sum(o.frames for o in outcomes))
    return figures


def delivery_ms(outcomes: Sequence[Delivered], *, to_the_last: bool) -> Figures:
    """The median over all pairs of write and watcher, or over the writes until the last watcher had it."""
    pairs = [time_ns / 1e6 for o in outcomes for time_ns in o.times_ns]
    slices = [percentile(o.served_ns if to_the_last else o.times_ns, 0.5) / 1e6 for o in outcomes]
    figures = _figures(outcomes, slices)
    figures.p99_ms = percentile(pairs, 0.99)
    if to_the_last:
        figures.p50_ms = percentile(pairs, 0.5)
    return figures


def slowdown(outcomes: dict[int, Sequence[Outcome]]) -> Figures:
    """By the number of routers, none first: how many times longer a request takes with them, the worst of them.

    Each turn is compared with the turn without routers of the same round, so that a machine that is slow for a
    while is slow for both.
    """
    medians = {routers: [percentile(o.times_ns, 0.5) / 1e6 for o in taken] for routers, taken in outcomes.items()}
    without, *others = medians
    by_round = {
        routers: [ms / base for ms, base in zip(medians[routers], medians[without], strict=True)] for routers in others
    }
    times = {routers: statistics.median(found) for routers, found in by_round.items()}
    worst = max(times, key=lambda routers: times[routers])
    figures = _figures(outcomes[worst], by_round[worst])
    figures.beside = [
        Beside(
            what=f"{routers} router{'' if routers == 1 else 's'}",
            value=statistics.median(slices),
            unit="ms",
            times=times.get(routers),
            slices=slices,
        )
        for routers, slices in medians.items()
    ]
    return figures


def arrivals(outcomes: Sequence[Arrived]) -> Figures:
    """Records per second until the last was there, and beside it the rate while they were being written."""
    figures = _figures(outcomes, [o.records / o.wall_s for o in outcomes])
    writing = [o.arrived_writing / o.writing_s for o in outcomes]
    figures.beside = [
        Beside(what="while writing", value=statistics.median(writing), unit="records/s", slices=writing),
    ]
    return figures


def work_rates(outcomes: Sequence[Worked]) -> Figures:
    return _figures(outcomes, [o.jobs / o.wall_s for o in outcomes])


def claims_ms(outcomes: Sequence[Worked]) -> Figures:
    figures = _figures(outcomes, [percentile(o.claims_ns, 0.5) / 1e6 for o in outcomes])
    figures.p99_ms = percentile([time_ns / 1e6 for o in outcomes for time_ns in o.claims_ns], 0.99)
    return figures


def unevenness(outcomes: Sequence[Worked]) -> Figures:
    """The coefficient of variation of the workers' jobs, in percent."""
    if not all(any(o.per_worker) for o in outcomes):
        raise BenchFailed("a turn without a job")
    return _figures(
        outcomes, [100 * statistics.pstdev(o.per_worker) / statistics.fmean(o.per_worker) for o in outcomes]
    )


def beside(what: str, figures: Figures, unit: str) -> Beside:
    return Beside(what=what, value=figures.value, unit=unit, slices=figures.slices)


def _figures(outcomes: Sequence[Window], slices: list[float]) -> Figures:
    return Figures(
        value=statistics.median(slices),
        slices=slices,
        generator_cpu=statistics.median(o.own_cpu_s / o.wall_s for o in outcomes),
        server_cpu=statistics.median(o.watched_cpu_s / o.wall_s for o in outcomes),
    )


def line(scenario: Scenario, ours: Figures, theirs: Figures | None) -> Line:
    their_value = theirs.value if theirs else None
    target: Target = scenario.target
    return Line(
        name=scenario.name,
        title=scenario.title,
        unit=scenario.unit,
        target=str(target),
        ours=ours,
        theirs=theirs,
        ratio=target.times_better(ours=ours.value, theirs=their_value),
        met=target.met(ours=ours.value, theirs=their_value, sse=ours.sse),
    )
