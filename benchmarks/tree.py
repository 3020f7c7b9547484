"""A process and its descendants, as /proc shows them: processor time, memory, and their end.

A process is named by pid and start time together, so that a pid that was given to somebody else in the
meantime is never counted and never killed.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    pid: int
    started: int  # clock ticks since boot


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from `state` on; the name before them may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def find(pid: int) -> Process | None:
    stat = _stat(pid)
    return Process(pid, int(stat[19])) if stat else None


def alive(process: Process) -> bool:
    stat = _stat(process.pid)
    return stat is not None and int(stat[19]) == process.started and stat[0] not in "ZX"


def descend(pid: int) -> list[Process]:
    """The process and all below it, parents first; empty when it is gone."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))):
            children.setdefault(int(stat[1]), []).append(Process(int(name), int(stat[19])))
    root = find(pid)
    found = [root] if root else []
    for process in found:
        found.extend(children.get(process.pid, ()))
    return found


def cpu_s(processes: list[Process]) -> float:
    """Processor time used so far by those that live, to a clock tick each."""
    ticks = 0
    for process in processes:
        stat = _stat(process.pid)
        if stat and int(stat[19]) == process.started:
            ticks += int(stat[11]) + int(stat[12])
    return ticks / _TICKS_PER_S


def fine_cpu_s(processes: list[Process]) -> float:
    """Like cpu_s, to the nanosecond, but without threads that have ended; for processes at rest.

    Six processes that use 9 ms each show nothing in ticks of 10 ms.
    """
    total_ns = 0
    for process in processes:
        try:
            for thread in os.listdir(f"/proc/{process.pid}/task"):
                text = Path(f"/proc/{process.pid}/task/{thread}/schedstat").read_text()
                total_ns += int(text.split()[0])
        except FileNotFoundError:
            if Path("/proc/self/schedstat").exists():
                continue  # the thread or the process ended
            return cpu_s(processes)
        except ProcessLookupError:
            continue
    return total_ns / 1e9


def memory_bytes(processes: list[Process]) -> int:
    """Proportional set size: what is shared between them is counted once. Without it, resident size."""
    total = 0
    for process in processes:
        total += _kib(process.pid, "smaps_rollup", "Pss:") or _kib(process.pid, "status", "VmRSS:") or 0
    return total * 1024


def _kib(pid: int, file: str, field: str) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def wait_quiet(processes: list[Process], *, most_s: float) -> bool:
    """Wait until they use less than a twentieth of a core; False when they did not settle in time."""
    deadline = time.monotonic() + most_s
    before = fine_cpu_s(processes)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = fine_cpu_s(processes)
        if now - before < 0.005:
            return True
        before = now
    return False


def kill(processes: list[Process]) -> None:
    """SIGKILL to each, parents first, so that nobody is there to restart a child."""
    for process in processes:
        if alive(process):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def wait_gone(processes: list[Process], *, most_s: float) -> list[Process]:
    """Wait for their end; returns those that are still there."""
    deadline = time.monotonic() + most_s
    while left := [process for process in processes if alive(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return left
