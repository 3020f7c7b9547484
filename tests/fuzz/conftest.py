"""Says from which seed the cases grow: a failure can be made again with it."""

from __future__ import annotations

import pytest

from .dials import CASES, SEED


def pytest_report_header() -> str:
    return f"fuzz: TOPICS_FUZZ_SEED={SEED} TOPICS_FUZZ_CASES={CASES}"


@pytest.fixture(scope="session", autouse=True)
def _said_seed(pytestconfig: pytest.Config) -> None:
    """Also where no header is printed (-q)."""
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"fuzz: TOPICS_FUZZ_SEED={SEED} TOPICS_FUZZ_CASES={CASES}")
