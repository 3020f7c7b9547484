"""What a run of tests did, in numbers: crash points, kills, damage, hostile inputs, and what an oracle found missing.

A test, or the harness it stands on, adds to a Figure at the moment at which the thing happens. With TOPICS_TEST_FIGURES
set to a folder, each process of pytest keeps a file of its own there and writes it anew after every test, so a process
that ends early leaves what it counted until then; `read` sums the files. Without the variable nothing is written.

TOPICS_TEST_UNTIL (seconds since the epoch) ends such a run in order: a test that would start later does not.

LOST is raised where an oracle finds that something owed is missing or changed, and the test fails there as well. A run
that lost nothing has to show in CHECKED how much was looked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "TOPICS_TEST_FIGURES"
UNTIL = "TOPICS_TEST_UNTIL"
TIME_IS_UP = "the time of this run is up"

_lock = threading.Lock()


class Figure:
    def __init__(self, label: str, meaning: str) -> None:
        self.label = label
        self.meaning = meaning
        self.count = 0

    def add(self, more: int = 1) -> None:
        with _lock:  # clients of a server under test are threads
            self.count += more


CRASH_POINTS = Figure(
    "crash points", "a process ended at a named kill point, or a stepped shard at the n-th call of its disk"
)
POWER_CUTS = Figure("power cuts", "writes that were not synced are taken back, page by page")
DISK_FAULTS = Figure("disk faults", "a call of the disk failed on purpose: no space, bad sector")
KILLS = Figure("kills", "SIGKILL sent to a process of a real server")
STOPS = Figure("stops", "SIGSTOP sent to a process of a real server: it hangs without dying")
RECOVERIES = Figure("recoveries", "starts on the files of an earlier life, of real servers and of stepped shards")
DAMAGES = Figure("damages", "a byte changed, a file cut, zeroed, removed or replaced")
FUZZED = Figure("fuzzed inputs", "hostile connections and requests that were played against a real server")
DECODED = Figure("decoded bytes", "mutated frames, blocks, snapshots and rings that were given to their decoders")
HISTORIES = Figure("random histories", "walks of a state machine beside a naive model")
ACKNOWLEDGED = Figure("records acknowledged", "to the clients of the crash tests")
CHECKED = Figure("records checked", "an oracle looked for a record, a copy or a job that the server owed after a crash")
LOST = Figure("losses", "of those: missing or changed")

FIGURES: dict[str, Figure] = {
    "crash_points": CRASH_POINTS,
    "power_cuts": POWER_CUTS,
    "disk_faults": DISK_FAULTS,
    "kills": KILLS,
    "stops": STOPS,
    "recoveries": RECOVERIES,
    "damages": DAMAGES,
    "fuzzed": FUZZED,
    "decoded": DECODED,
    "histories": HISTORIES,
    "acknowledged": ACKNOWLEDGED,
    "checked": CHECKED,
    "lost": LOST,
}


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """What is counted meanwhile does not count: for tests that plant a loss."""
    before = {name: figure.count for name, figure in FIGURES.items()}
    try:
        yield
    finally:
        for name, figure in FIGURES.items():
            figure.count = before[name]


class Told:
    """The sum of what processes wrote."""

    def __init__(self) -> None:
        self.figures = dict.fromkeys(FIGURES, 0)
        self.passed = 0
        self.skipped = 0
        self.unstarted = 0  # the time was up
        self.ended = 0  # processes that came to the end of their run
        self.failed: list[str] = []

    def add(self, other: Told) -> None:
        for name, count in other.figures.items():
            self.figures[name] += count
        self.passed += other.passed
        self.skipped += other.skipped
        self.unstarted += other.unstarted
        self.ended += other.ended
        self.failed += other.failed

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def read(paths: Iterable[Path]) -> Told:
    told = Told()
    for path in paths:
        one = Told()
        vars(one).update(json.loads(path.read_text()))
        told.add(one)
    return told


class Bookkeeper:
    """The plugin of one process."""

    def __init__(self, folder: Path, until: float | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}-{time.monotonic_ns()}.json"
        self._until = until
        self._told = Told()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._until is not None and time.time() > self._until:
            pytest.skip(TIME_IS_UP)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._told
        if report.failed:
            if report.nodeid not in told.failed:
                told.failed.append(report.nodeid)
        elif report.skipped:
            if TIME_IS_UP in str(report.longrepr):
                told.unstarted += 1
            else:
                told.skipped += 1
        elif report.when == "call":
            told.passed += 1

    def pytest_runtest_logfinish(self) -> None:
        self.write()

    def pytest_sessionfinish(self) -> None:
        self._told.ended = 1
        self.write()

    def write(self) -> None:
        self._told.figures = {name: figure.count for name, figure in FIGURES.items()}
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._told.as_json()))
        os.replace(beside, self._path)


def attend(config: pytest.Config) -> None:
    """Keep the books of this process, if the run is to be counted. Of pytest-xdist's processes only the workers run
    tests; their reports come by in the process that started them, too."""
    folder = os.environ.get(FOLDER)
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if folder and not starts_workers:
        until = os.environ.get(UNTIL)
        config.pluginmanager.register(Bookkeeper(Path(folder), float(until) if until else None), "figures")
