"""Which worker of pytest-xdist runs what, and when.

A file is run by one worker, so that what its tests share is made once. All of `spark` is one piece of work, because a
Spark session costs ten seconds and a gigabyte, and so is `browser`. Long families and long files start first: what is
left for the end is small, and no worker waits for another one's long file.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# First come, first served. Whatever is not named comes after these.
ORDER = ("spark", "browser", "recovery", "actors", "fuzz", "e2e")
WHOLE = ("spark", "browser")
# Files that take a worker ten seconds or more: they come before the others of their rank.
LONG = (
    "tests/recovery/test_damage.py",
    "tests/recovery/test_queue_crash.py",
    "tests/test_docs.py",
    "tests/unit/test_backup_steps.py",
    "tests/unit/test_campaign_crashpoints.py",
    "tests/unit/test_campaign_ioerrors.py",
    "tests/unit/test_delivery_machine.py",
    "tests/unit/test_engine_machine.py",
    "tests/unit/test_folder_damage.py",
    "tests/unit/test_folder_files.py",
    "tests/unit/test_letters.py",
    "tests/unit/test_pipes.py",
)


def piece_of(nodeid: str) -> str:
    """The piece of work that a test belongs to."""
    file = nodeid.partition("::")[0]
    family = family_of(nodeid)
    return f"tests/{family}" if family in WHOLE else file


def family_of(nodeid: str) -> str:
    """tests/<family>/test_x.py::test_y; a file without a folder is a family of its own."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if parts[0] == "tests" and len(parts) > 1 else parts[0]


def rank_of(nodeid: str) -> tuple[int, bool]:
    """Its place in the order: what is less comes first."""
    family = family_of(nodeid)
    return ORDER.index(family) if family in ORDER else len(ORDER), nodeid.partition("::")[0] not in LONG


class FamilyScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it is not typed
    """Takes the pieces in the order of the collection, which conftest.py sorts by rank_of()."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)
