"""How much a run tries: each variable is read in one place, so a run is exhaustive everywhere or nowhere. And which
examples property tests draw: the same in every usual run, by conftest.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import effort
import pytest
from effort import is_set
from hypothesis import settings
from model import examples

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


# --- what property tests draw ------------------------------------------------------------------------

DRAWS = """
from hypothesis import given, settings, strategies as st

SEEN = []

@given(st.integers(0, 1 << 60))
def test_it(number): SEEN.append(number)

def test_shown():
    print("drew", SEEN)
"""


def drawn(folder: Path, *options: str, **environ: str) -> str:
    """By a test without settings of its own, in a run with our conftest.py."""
    (folder / "test_it.py").write_text(DRAWS)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV", "TOPICS_", "CI"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-s", *options, "test_it.py"],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(TESTS)} | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (shown,) = re.findall(r"drew (\[.+\])", done.stdout)
    return str(shown)


def test_every_usual_run_draws_the_same_examples_and_a_seed_other_ones(tmp_path: Path) -> None:
    usual, by_seed = drawn(tmp_path), drawn(tmp_path, "--hypothesis-seed=7")
    assert drawn(tmp_path) == usual != by_seed
    assert drawn(tmp_path, "--hypothesis-seed=7", TOPICS_TEST_EXHAUSTIVE="1", CI="true") == by_seed


def test_a_run_that_asks_for_new_ones_gets_them_each_time(tmp_path: Path) -> None:
    asked = {"TOPICS_TEST_EXHAUSTIVE": "1", "CI": "true"}  # Hypothesis derandomizes by itself where CI is set
    assert drawn(tmp_path, **asked) != drawn(tmp_path, **asked)


def test_examples_with_settings_of_their_own_are_drawn_by_the_same_rule(pytestconfig: pytest.Config) -> None:
    anew = effort.draws_anew(pytestconfig.getoption("--hypothesis-seed", None))
    assert settings.default is not None
    assert settings.default.derandomize is examples(10).derandomize is not anew
    assert examples(10).database is None
