from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest

from topics.actors.log import Log, render


def test_a_line_is_greppable_and_one_line() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 6_789, tzinfo=UTC)
    fields = {"child": "shard-1", "code": 9, "reason": 'say "hi"\nand go', "empty": ""}
    assert render(at, "info", "supervisor", "child_died", fields) == (
        "2026-01-02T03:04:05.006Z info    supervisor child_died child=shard-1 code=9 "
        'reason="say \\"hi\\"\\nand go" empty=""\n'
    )


def test_level_hides_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log("x", "warning")
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [line.split()[3] for line in capsys.readouterr().err.splitlines()] == ["c", "d"]


def test_a_closed_stderr_is_no_reason_to_die(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Gone())
    Log("x", "info").info("still here")
