"""What the machine has to provide before a server starts: shared memory for the rings, open files for its clients."""

from __future__ import annotations

import resource
import sys

from topics import limits
from topics.errors import StartRefused
from topics.shm.region import free_bytes


def require_shared_memory(needed: int) -> None:
    if needed > free_bytes():
        raise StartRefused(
            f"the rings need {needed} bytes of shared memory and {free_bytes()} are free: enlarge /dev/shm "
            "(in a container --shm-size), or make the rings smaller with TOPICS_RING_BYTES"
        )


def forbid_core_dumps() -> None:
    """Of the supervisor; children inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def raise_open_files_limit(connections: int = limits.MAX_CONNECTIONS) -> None:
    """As far as we may and need: each client connection is one, and children inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * max(connections, limits.MAX_CONNECTIONS)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (ValueError, OSError) as exc:
        sys.stderr.write(f"could not raise the open files limit beyond {soft}: {exc}\n")
