"""Which files of tests `make test` runs under coverage.

Tracing makes a test of Python code three times as slow, and the coverage that is asked for is that of a few modules. So
the files that reach them are traced, and all others run at full speed: the figure falls by less than a point, the gate
by minutes. `make test-full` traces everything; it is the figure to compare with. A file that is the only one to reach
something new of these modules belongs here: the figure that `make test` prints tells.
"""

from __future__ import annotations

TRACED = frozenset(
    {
        "tests/concurrency/test_ring_processes.py",
        "tests/golden/test_golden.py",
        *(
            f"tests/unit/test_{name}.py"
            for name in (
                # the log, recovery, and what makes both fail
                *("engine", "engine_faults", "engine_recovery", "large_appends", "log", "log_announce", "tail_verdict"),
                *("wal", "unreadable", "reserve", "reserve_histories", "mover", "cold_away", "pacing", "folder_pipes"),
                *("pipes", "pipe_faults", "pipe_power", "pipe_tail", "pipe_moves", "pipe_classes", "pipe_caps"),
                # bytes on disk
                *("columns", "config", "copying", "datadir", "frames", "repair_kinds", "router_store", "rows", "rules"),
                *("segment", "snapshot", "tags", "campaign_decoders"),
                # bytes in memory
                *("answered", "counters", "doorbell", "inspect_socket", "layout", "long_messages", "region"),
                *("ring", "usage"),
                # leases, keys, requests
                *("lease_events", "leases", "queue_machine", "keyfile", "keys", "revoking", "chunks", "head", "hosts"),
                "passing_bodies",
            )
        ),
    }
)


def is_traced(nodeid: str) -> bool:
    return nodeid.partition("::")[0] in TRACED
