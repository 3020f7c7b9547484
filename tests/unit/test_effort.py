"""How much a run tries: each variable is read in one place, so a run is exhaustive everywhere or nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from effort import is_set

TESTS = Path(__file__).parent.parent
READ = re.compile(r"(environ|getenv)\b.*TOPICS_TEST_(EXHAUSTIVE|GATE)\b")


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_zero_is_the_same_as_nothing(value: str | None, expected: bool) -> None:
    assert is_set("ASKED", {} if value is None else {"ASKED": value}) is expected


def test_nobody_else_reads_the_variables() -> None:
    elsewhere = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if path != Path(__file__) and READ.search(path.read_text())
    }
    assert elsewhere == set()
