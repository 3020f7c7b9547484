"""What counts as caught: a test that failed, and nothing else."""

from __future__ import annotations

import pytest
from verdicts import LEAST_QUICK, Failure, Judged, Report, Row, Verdict, is_success, judge, read_report, sum_up

PASSED = Report(3, [], [])
FAILED = Report(1, [Failure("tests/unit/test_x.py::test_y", "assert 1 == 2")], [])
ERRORS = Report(1, [], [Failure("tests/unit/test_x.py::test_y", "failed on setup")])
NOTHING = Report(0, [], [])


def failed_with(message: str) -> Report:
    return Report(0, [Failure("tests/unit/test_x.py::test_y", message)], [])


@pytest.mark.parametrize(
    ("exit_code", "report", "verdict"),
    [
        (1, FAILED, Verdict.CAUGHT),
        (1, Report(0, FAILED.failed, ERRORS.errors), Verdict.CAUGHT),
        (1, failed_with("Failed: Timeout (>100.0s) from pytest-timeout."), Verdict.CAUGHT),
        (1, failed_with("KeyError: 3"), Verdict.CAUGHT),
        (0, PASSED, Verdict.MISSED),
        (0, NOTHING, Verdict.BROKEN),
        (0, FAILED, Verdict.BROKEN),
        (0, None, Verdict.BROKEN),
        (1, None, Verdict.BROKEN),
        (1, ERRORS, Verdict.BROKEN),
        (1, PASSED, Verdict.BROKEN),
        (1, failed_with("NameError: name 'found' is not defined"), Verdict.BROKEN),
        (1, failed_with("ImportError: cannot import name 'Row'"), Verdict.BROKEN),
        (1, failed_with("SyntaxError: invalid syntax"), Verdict.BROKEN),
        (2, FAILED, Verdict.BROKEN),
        (2, ERRORS, Verdict.BROKEN),
        (3, FAILED, Verdict.BROKEN),
        (4, None, Verdict.BROKEN),
        (5, NOTHING, Verdict.BROKEN),
        (-9, FAILED, Verdict.BROKEN),
        (-11, None, Verdict.BROKEN),
        (None, None, Verdict.HUNG),
        (None, FAILED, Verdict.HUNG),
    ],
)
def test_every_end_of_a_run(exit_code: int | None, report: Report | None, verdict: Verdict) -> None:
    judged = judge(exit_code, report)
    assert judged.verdict is verdict
    assert bool(judged.by) == (verdict is Verdict.CAUGHT)
    assert bool(judged.why) == (verdict is not Verdict.CAUGHT)


def test_it_is_caught_by_the_first_that_failed() -> None:
    report = Report(0, [Failure("tests/a.py::test_1", "assert 0"), Failure("tests/a.py::test_2", "assert 0")], [])
    assert judge(1, report).by == "tests/a.py::test_1"


XML = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="5">
<testcase classname="tests.unit.test_a" name="test_one" time="0.1"/>
<testcase classname="tests.unit.test_a" name="test_two[x-1]"><failure message="assert 1 == 2">...</failure></testcase>
<testcase classname="tests.unit.test_a.TestThree" name="test_three"><error message="failed on setup">...</error>
</testcase>
<testcase classname="tests.unit.test_a" name="test_four"><skipped message="no Java">...</skipped></testcase>
<testcase classname="tests.unit.test_a.TestFive" name="test_five"><failure message="KeyError: 3">...</failure>
</testcase>
</testsuite></testsuites>"""


def test_a_report_is_read() -> None:
    assert read_report(XML) == Report(
        1,
        [
            Failure("tests/unit/test_a.py::test_two[x-1]", "assert 1 == 2"),
            Failure("tests/unit/test_a.py::TestFive::test_five", "KeyError: 3"),
        ],
        [Failure("tests/unit/test_a.py::TestThree::test_three", "failed on setup")],
    )


@pytest.mark.parametrize("text", ["", XML[: len(XML) // 2]])
def test_half_a_report_is_none(text: str) -> None:
    assert read_report(text) is None


def rows(*given: tuple[Verdict, str]) -> list[Row]:
    return [
        Row(number, "name", "something", selection, Judged(verdict, "test", ""), 1.0)
        for number, (verdict, selection) in enumerate(given, 1)
    ]


QUICK, FULL = (Verdict.CAUGHT, "quick"), (Verdict.CAUGHT, "full")


@pytest.mark.parametrize(
    ("given", "whole", "success"),
    [
        ([QUICK] * 30, True, True),
        ([QUICK] * LEAST_QUICK + [FULL] * 4, True, True),
        ([QUICK] * (LEAST_QUICK - 1) + [FULL] * 5, True, False),
        ([FULL], False, True),
        ([QUICK] * 29 + [(Verdict.MISSED, "quick")], True, False),
        ([QUICK] * 29 + [(Verdict.STALE, "quick")], True, False),
        ([QUICK] * 29 + [(Verdict.BROKEN, "full")], True, False),
        ([QUICK, (Verdict.HUNG, "quick")], False, False),
        ([], False, False),
    ],
)
def test_success_is_all_of_them_and_enough_by_the_gate(
    given: list[tuple[Verdict, str]], whole: bool, success: bool
) -> None:
    assert is_success(rows(*given), whole=whole) is success


def test_the_last_line() -> None:
    assert sum_up(rows(QUICK, QUICK, FULL, (Verdict.MISSED, "quick"))) == (
        "3 of 4 caught, 2 by make test's own selection"
    )
