"""The books of a run: what was collected has to be reported, and a worker that dies fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accounting import Accounting
from figures import TIME_IS_UP

TESTS = Path(__file__).parent.parent
CONFTEST = """
from accounting import Accounting

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Accounting())
"""
DIES = """
import os

def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        os._exit(1)
"""


def run(folder: Path, source: str, *, conftest: str = CONFTEST, ci: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(source)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ | {"PYTHONPATH": str(TESTS), "CI": ci},
        timeout=60,
    )


def test_a_run_that_ran_everything_passes(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_a(): pass\ndef test_b(): pass\n")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_worker_that_dies_behind_its_last_test_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_a(): pass\n", conftest=CONFTEST + DIES)
    assert "1 passed" in done.stdout
    assert "this run proves nothing: worker gw0 died" in done.stdout
    assert done.returncode == 1


def test_what_was_collected_and_not_reported_is_named() -> None:
    books = Accounting()
    books.pytest_xdist_node_collection_finished(["t.py::a", "t.py::b"])
    books.reported.add("t.py::a")
    assert books.faults() == ["1 tests were collected and did not run: t.py::b"]
    books.reported.add("t.py::b")
    assert books.faults() == []


@pytest.mark.parametrize("error", [None, "", "Not properly terminated"])
def test_a_worker_that_ends_in_order_is_no_fault(error: str | None) -> None:
    class Gateway:
        id = "gw3"

    class Node:
        gateway = Gateway()

    books = Accounting()
    books.pytest_testnodedown(Node(), error)
    assert books.faults() == (["worker gw3 died"] if error else [])


@pytest.mark.parametrize(
    ("workers", "runs"),
    [("1", True), ("12", True), ("0", False), ("00", False), ("-0", False), ("-1", False), ("", False), ("0_0", False)],
)
def test_the_makefile_starts_at_least_one_worker(workers: str, runs: bool) -> None:
    """Without one nothing is collected by workers, and there are no books to keep."""
    done = subprocess.run(
        ["make", "--dry-run", "unit", f"WORKERS={workers}"],
        cwd=TESTS.parent,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode == 0) is runs, done.stderr
    assert (f"pytest -n {workers} " in done.stdout) is runs
    assert ("it takes a number from 1" in done.stderr) is not runs


SKIPS = """
import pytest

def test_a(): pass
def test_b(): pytest.skip({reason!r})
"""
SKIPS_ITSELF = "import pytest\npytest.skip({reason!r}, allow_module_level=True)\n"


@pytest.mark.parametrize("source", [SKIPS, SKIPS_ITSELF], ids=["a test", "a module"])
@pytest.mark.parametrize(
    ("reason", "ci", "proves"),
    [
        ("no Chromium here; on Debian: apt-get install chromium", "true", False),
        ("no Chromium here; on Debian: apt-get install chromium", "", True),
        ("needs nginx", "true", True),
        (TIME_IS_UP, "true", True),
    ],
)
def test_a_skip_fails_a_run_of_ci_unless_the_product_needs_it_not(
    tmp_path: Path, source: str, reason: str, ci: str, proves: bool
) -> None:
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    done = run(tmp_path, source.format(reason=reason), ci=ci)
    assert (done.returncode == 0) is proves, done.stdout
    assert (f"this run proves nothing: 1 skipped: {reason}" in done.stdout) is not proves
