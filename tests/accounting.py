"""A run counts only if everything that was collected has run.

A worker of pytest-xdist that dies between two tests is replaced, and what it was about to run may be lost without a
failure; the same is true of a fault in the scheduler. So the process that prints the result keeps the books: each test
that a worker has collected must have been reported, and no worker may have died. Otherwise the run fails, whatever else
it says. An interrupted run, or one that ends at the first failure (-x), has failed already.

A test that is skipped has proved nothing either. In continuous integration (CI is set) it fails the run, unless its
reason is one of `MAY_BE_MISSING`: a browser or a Java that could not be installed must not turn a family green.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from figures import TIME_IS_UP

SHOWN = 10
# Reasons to skip that are no fault of CI's machine: peers and tools that are no part of the product, what root can't be
# kept from, what one machine has and another has not, and what only `make test-exhaustive` asks for, or leaves out when
# its time is up: that run counts such tests by itself, and the Makefile takes TOPICS_TEST_UNTIL out of the others.
MAY_BE_MISSING = re.compile(
    r"needs (nginx|caddy|promtool|tmux|systemd-analyze)"
    r"|(redis-server|beanstalkd) is not installed"
    r"|root may (write|read) every"
    r"|no IPv6 here|only one file system|no second file system|more free space than|does not let a process look"
    r"|a tmpfs can't be mounted|no mount command|there is no setpriv|only root can run|the user nobody can't"
    r"|TOPICS_TEST_EXHAUSTIVE is not set|one of the two is enough for every day|takes as long as all the restarts"
    r"|two servers for each point"
    f"|{TIME_IS_UP}"
)


class Accounting:
    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.is_strict = bool(environ.get("CI"))
        self.skipped: Counter[str] = Counter()
        self.collected: set[str] = set()
        self.reported: set[str] = set()
        self.dead: list[str] = []

    def faults(self) -> list[str]:
        missing = sorted(self.collected - self.reported)
        found = [f"worker {name} died" for name in self.dead]
        if missing:
            found.append(f"{len(missing)} tests were collected and did not run: {', '.join(missing[:SHOWN])}")
        if self.is_strict:
            lacking = {why: count for why, count in self.skipped.items() if not MAY_BE_MISSING.search(why)}
            found += [f"{count} skipped: {why}" for why, count in sorted(lacking.items())]
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
        self._note_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note_skip(report)

    def _note_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):  # of an expected failure it is no tuple
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self.faults():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for fault in self.faults():
            terminalreporter.write_line(f"this run proves nothing: {fault}", red=True)
