"""What all runs of the campaigns did together: docs/reliability-runs.json, and the table of docs/RELIABILITY.md.

A run adds one entry per campaign: when, of which code, on how many cores, which seeds, what was counted, what was
found. It does so every minute, and in the end, so that a run that is killed has lost a minute. Figures of runs add up
as long as their seeds differ; an entry with the campaign and the first seed of another replaces it. Several runs may
write at the same time. Code is named by the last commit that changed the program, so that commits of figures and
documents change nothing. A goal is reached by the figures of one code; the table keeps those of older code apart.
"""

from __future__ import annotations

import datetime
import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgspec

from .campaign import Campaign, Outcome

PATH = Path(__file__).resolve().parent.parent.parent / "docs" / "reliability-runs.json"
BEGIN = "<!-- campaigns: written by tests/exhaustive.py --table -->"
END = "<!-- end of campaigns -->"


class Entry(msgspec.Struct, omit_defaults=True):
    campaign: str
    date: str
    version: str  # the last commit that changed `topics/`, with -dirty if files there were changed
    cores: int
    first_seed: int
    units: int  # seeds that are done
    took_s: int
    counts: dict[str, int]
    findings: dict[str, int] = {}  # by kind
    median_ms: float = 0.0  # of what the campaign measures
    p99_ms: float = 0.0
    left_out: list[int] = []  # seeds between the first and the last that are not done: of units that were cut

    @property
    def seeds(self) -> set[int]:
        return set(range(self.first_seed, self.first_seed + self.units + len(self.left_out))) - set(self.left_out)


def entry_of(outcome: Outcome, *, version: str, cores: int) -> Entry:
    """Of an outcome with at least one unit."""
    first, last = min(outcome.done), max(outcome.done)
    return Entry(
        campaign=outcome.campaign.name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        version=version,
        cores=cores,
        first_seed=first,
        units=outcome.units,
        took_s=round(outcome.took_s),
        counts=dict(sorted(outcome.tally.counts.items())),
        findings=dict(outcome.tally.kinds),
        median_ms=round(outcome.median_ms, 1),
        p99_ms=round(outcome.p99_ms, 1),
        left_out=[seed for seed in range(first, last + 1) if seed not in outcome.done],
    )


def seeds_left(entries: Sequence[Entry], campaign: str, *, version: str) -> Iterator[int]:
    """Those that a run of this code has left out, and then all behind the last one of any code."""
    mine = [entry for entry in entries if entry.campaign == campaign]
    done = set().union(*(entry.seeds for entry in mine))
    yield from sorted({seed for entry in mine if entry.version == version for seed in entry.left_out} - done)
    yield from count(max(done, default=0) + 1)


def read(path: Path = PATH) -> list[Entry]:
    return msgspec.json.decode(path.read_bytes(), type=list[Entry]) if path.exists() else []


def add(fresh: Sequence[Entry], path: Path = PATH, *, instead_of: Sequence[Entry] = ()) -> list[Entry]:
    """instead_of: what the same run has written before."""
    with _alone(path):
        replaced = {(entry.campaign, entry.first_seed) for entry in (*fresh, *instead_of)}
        entries = [entry for entry in read(path) if (entry.campaign, entry.first_seed) not in replaced]
        entries = sorted([*entries, *fresh], key=lambda entry: (entry.campaign, entry.date))  # of a day: as they came
        write_whole(path, msgspec.json.format(msgspec.json.encode(entries), indent=1) + b"\n")
    return entries


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else writes beside it meanwhile."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_whole(path: Path, data: bytes) -> None:
    """A reader, or a kill, finds the old content or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)


class Sum(msgspec.Struct):
    """Of one campaign, over its entries."""

    counts: Counter[str]
    findings: int
    took_s: int
    runs: int
    worst_median_ms: float
    worst_p99_ms: float


def sum_up(entries: Sequence[Entry], campaign: str, *, version: str | None = None) -> Sum:
    """version: only of this code."""
    mine = [entry for entry in entries if entry.campaign == campaign and version in (None, entry.version)]
    counts: Counter[str] = Counter()
    for entry in mine:
        counts.update(entry.counts)
    return Sum(
        counts,
        sum(sum(entry.findings.values()) for entry in mine),
        sum(entry.took_s for entry in mine),
        len(mine),
        max((entry.median_ms for entry in mine), default=0.0),
        max((entry.p99_ms for entry in mine), default=0.0),
    )


def newest(entries: Sequence[Entry], campaign: str) -> str | None:
    """The code of the last run."""
    return next((entry.version for entry in reversed(entries) if entry.campaign == campaign), None)


def table(campaigns: Sequence[Campaign], entries: Sequence[Entry]) -> str:
    rows = [
        "| campaign | goal | code | done | found | minutes | of older code | what was counted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for campaign in campaigns:
        version = newest(entries, campaign.name)
        total = sum_up(entries, campaign.name, version=version)
        older = sum_up(entries, campaign.name).counts[campaign.figure] - total.counts[campaign.figure]
        details = {name: count for name, count in sorted(total.counts.items()) if name != campaign.figure}
        shown = ", ".join(f"{name} {count:,}" for name, count in details.items())
        if total.worst_p99_ms:
            shown += f"; back after {total.worst_median_ms:,.0f} ms (median), {total.worst_p99_ms:,.0f} ms (p99)"
        rows.append(
            f"| `{campaign.name}`: {campaign.title} | {campaign.goal:,} | {f'`{version}`' if version else ''} "
            f"| {total.counts[campaign.figure]:,} | {total.findings:,} | {total.took_s / 60:,.0f} | {older:,} "
            f"| {shown or 'nothing yet'} |"
        )
    return "\n".join(rows)


def put_into(text: str, made: str) -> str:
    """The document with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"no place for the table: {BEGIN} and {END} expected")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"
