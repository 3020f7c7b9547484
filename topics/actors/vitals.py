"""What the kernel says of a process that does not beat: its processor time and the state of its main thread.

The processor time comes from the process's CPU clock, which any process may read, to the nanosecond and with all
threads, those that ended too. The state comes from /proc/<pid>/stat; where /proc hides processes that are not dumpable
(hidepid, ProtectProc of systemd) it is unknown, and the processor time decides alone.
"""

from __future__ import annotations

import time

from topics.actors.heartbeat import Vitals

_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED, without the bit of a thread's clock


def read_vitals(pid: int) -> Vitals | None:
    """Of a child that has not been reaped, so that the pid is its own; None if it is gone all the same."""
    try:
        cpu_s = time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    except OSError:
        return None
    return Vitals(cpu_s, _state(pid))


def _state(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
    except OSError:
        return None
    return fields[0].decode() if fields else None
