"""Processor time, for what a clock on the wall can't tell on a machine that is busy with something else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICK_MS = 1_000 / os.sysconf("SC_CLK_TCK")


def loop_ms(*pids: int) -> float:
    """Processor time of the main threads of these processes, in ticks."""
    return sum(_ticks(pid) for pid in pids) * _TICK_MS


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def shares_ns(pid: int) -> tuple[int, int]:
    """How long the main thread of this process had a processor, and how long it wanted one and got none."""
    worked, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return int(worked), int(waited)


def nearly_all(waits: Iterable[float]) -> float:
    """What 99 of 100 of them are below."""
    ordered = sorted(waits)
    return ordered[int(len(ordered) * 0.99)]
