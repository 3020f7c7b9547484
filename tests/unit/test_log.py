from __future__ import annotations

import sys
from datetime import UTC, datetime

import msgspec
import pytest

from topics.actors.log import Log, render, render_json


def test_a_line_is_greppable_and_one_line() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 6_789, tzinfo=UTC)
    fields = {"child": "shard-1", "code": 9, "reason": 'say "hi"\nand go', "empty": ""}
    assert render(at, "info", "supervisor", "child_died", fields) == (
        "time=2026-01-02T03:04:05.006Z level=info process=supervisor event=child_died child=shard-1 code=9 "
        'reason="say \\"hi\\"\\nand go" empty=""\n'
    )


def test_level_hides_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log("x", "warning")
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [line.split()[3] for line in capsys.readouterr().err.splitlines()] == ["event=c", "event=d"]


def test_the_same_as_json() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 6_789, tzinfo=UTC)
    line = render_json(at, "warning", "shard-0", "recovery refused", {"code": 9, "reason": 'say "hi"\nand go'})
    assert line.endswith("}\n")
    assert line.count("\n") == 1
    assert msgspec.json.decode(line) == {
        "time": "2026-01-02T03:04:05.006Z",
        "level": "warning",
        "process": "shard-0",
        "event": "recovery refused",
        "code": 9,
        "reason": 'say "hi"\nand go',
    }


def test_the_form_is_the_servers_choice(capsys: pytest.CaptureFixture[str]) -> None:
    Log("x", "info", "json").info("a", n=1)
    shown = msgspec.json.decode(capsys.readouterr().err)
    assert (shown["event"], shown["n"]) == ("a", 1)


def test_a_closed_stderr_is_no_reason_to_die(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Gone())
    Log("x", "info").info("still here")
