"""What a run of pytest over a planted bug says. Pure: an exit code and a report in, a verdict out.

A bug is caught by a test that fails, and by nothing else: a suite that can't be collected, a fixture that breaks, an
interpreter that finds a name missing or a run that never ends would look the same with any change to the code.
"""

from __future__ import annotations

import enum
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

_EXITS = {
    2: "pytest was interrupted, or could not collect the tests",
    3: "pytest itself failed",
    4: "pytest was called wrongly, or a target does not exist",
    5: "no tests ran",
}
# A patch that leaves a module broken is no bug that a developer would not notice.
_CRASHES = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError")


class Verdict(enum.Enum):
    CAUGHT = "caught"
    MISSED = "MISSED"  # every test passed
    BROKEN = "BROKEN"  # nothing was tested
    HUNG = "HUNG"  # and no test said so
    STALE = "STALE"  # the patch does not apply any more


class Failure(NamedTuple):
    test: str
    message: str


class Report(NamedTuple):
    """Of a JUnit file."""

    passed: int
    failed: list[Failure]
    errors: list[Failure]


class Judged(NamedTuple):
    verdict: Verdict
    by: str  # the test that caught it
    why: str  # otherwise


def read_report(text: str) -> Report | None:
    """None: the run ended before its report was written."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    passed = 0
    failed: list[Failure] = []
    errors: list[Failure] = []
    for case in root.iter("testcase"):
        test = _node_id(case)
        found = [(kind, case.find(kind)) for kind in ("failure", "error", "skipped")]
        told = [(kind, element) for kind, element in found if element is not None]
        if not told:
            passed += 1
        for kind, element in told:
            if kind != "skipped":
                (failed if kind == "failure" else errors).append(Failure(test, element.get("message", "")))
    return Report(passed, failed, errors)


def _node_id(case: ElementTree.Element) -> str:
    """tests/unit/test_x.py::Class::test_y, from classname tests.unit.test_x.Class."""
    parts = case.get("classname", "").split(".")
    last = next((at for at, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: last + 1]) + ".py", *parts[last + 1 :], case.get("name", "")])


def judge(exit_code: int | None, report: Report | None) -> Judged:
    """exit_code None: it took too long and was ended."""
    if exit_code is None:
        return Judged(Verdict.HUNG, "", "the run did not end, and no test failed by its own timeout")
    if exit_code not in (0, 1):
        return Judged(Verdict.BROKEN, "", _EXITS.get(exit_code, f"pytest ended with {exit_code}"))
    if report is None:
        return Judged(Verdict.BROKEN, "", f"pytest ended with {exit_code} and left no report")
    if exit_code == 0:
        if report.failed or report.errors:
            return Judged(Verdict.BROKEN, "", "pytest ended with 0, but its report has failures")
        if not report.passed:
            return Judged(Verdict.BROKEN, "", "every test was skipped")
        return Judged(Verdict.MISSED, "", f"{report.passed} tests passed")
    if not report.failed:
        why = report.errors[0].message if report.errors else "its report has no failure"
        return Judged(Verdict.BROKEN, "", f"no test failed: {why}")
    first = report.failed[0]
    kind = first.message.partition(":")[0].rpartition(".")[2]
    if kind in _CRASHES:
        return Judged(Verdict.BROKEN, "", f"{first.test} met a {kind}: the patch does not leave a program behind")
    return Judged(Verdict.CAUGHT, first.test, "")


class Row(NamedTuple):
    """A line of the table."""

    number: int
    name: str
    breaks: str
    selection: str
    judged: Judged
    seconds: float


LEAST_QUICK = 26


def sum_up(rows: list[Row]) -> str:
    caught = [row for row in rows if row.judged.verdict is Verdict.CAUGHT]
    quick = sum(row.selection == "quick" for row in caught)
    return f"{len(caught)} of {len(rows)} caught, {quick} by make test's own selection"


def is_success(rows: list[Row], *, whole: bool) -> bool:
    """whole: all of them were run, so the gate's share counts too."""
    caught = [row for row in rows if row.judged.verdict is Verdict.CAUGHT]
    quick = sum(row.selection == "quick" for row in caught)
    return bool(rows) and len(caught) == len(rows) and (not whole or quick >= LEAST_QUICK)
