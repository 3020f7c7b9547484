"""Says from which seed the cases grew: a failure can be made again with it."""

from __future__ import annotations

import pytest

from .dials import CASES, SEED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"fuzz: TOPICS_FUZZ_SEED={SEED} TOPICS_FUZZ_CASES={CASES}")
