"""What the kernel says of a process that does not beat: its processor time and the state of its main thread.

The processor time comes from the process's CPU clock, which any process may read, to the nanosecond and with all
threads, those that ended too. The state comes from /proc/<pid>/stat, which is opened while the child is just born: a
child that is not dumpable is hidden later where /proc is mounted so (hidepid, ProtectProc of systemd), but what is open
can still be read. Where it can't, the state is unknown, and the processor time decides alone.
"""

from __future__ import annotations

import os
import time

from topics.actors.supervisor.heartbeat import Vitals

_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED, without the bit of a thread's clock


def open_stat(pid: int) -> int:
    """For read_vitals; -1 if there is none."""
    try:
        return os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def read_vitals(pid: int, stat_fd: int) -> Vitals | None:
    """Of a child that has not been reaped, so that the pid is its own; None if it is gone all the same."""
    try:
        cpu_s = time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    except OSError:
        return None
    return Vitals(cpu_s, _state(stat_fd))


def _state(stat_fd: int) -> str | None:
    try:
        fields = os.pread(stat_fd, 4096, 0).rpartition(b")")[2].split()  # the name before may hold anything
    except OSError:
        return None
    return fields[0].decode() if fields else None
