"""Names that processes have in shared memory: those of the pids asked for, since other tests use the place too."""

from __future__ import annotations

import os
from collections.abc import Iterable

from topics.shm import region


def names_of(pids: Iterable[int]) -> set[str]:
    """Regions of these processes that have a name: create() puts its pid into it, and removes it at once."""
    prefixes = tuple(f"{region._PREFIX}{pid}-" for pid in pids)
    return {name for name in os.listdir(region._SHM_DIR) if name.startswith(prefixes)}
