"""A run counts only if everything that was collected has run.

A worker of pytest-xdist that dies between two tests is replaced, and what it was about to run may be lost without a
failure; the same is true of a fault in the scheduler. So the process that prints the result keeps the books: each test
that a worker has collected must have been reported, and no worker may have died. Otherwise the run fails, whatever else
it says. An interrupted run, or one that ends at the first failure (-x), has failed already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

SHOWN = 10


class Accounting:
    def __init__(self) -> None:
        self.collected: set[str] = set()
        self.reported: set[str] = set()
        self.dead: list[str] = []

    def faults(self) -> list[str]:
        missing = sorted(self.collected - self.reported)
        found = [f"worker {name} died" for name in self.dead]
        if missing:
            found.append(f"{len(missing)} tests were collected and did not run: {', '.join(missing[:SHOWN])}")
        return found

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.collected.update(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if error:
            self.dead.append(str(node.gateway.id))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reported.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self.faults():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for fault in self.faults():
            terminalreporter.write_line(f"this run proves nothing: {fault}", red=True)
