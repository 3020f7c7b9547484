"""A log that is damaged in the middle: the integrity report says where, the others say why they can't be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.inspected import copied, golden
from e2e.test_cli_damaged import damaged_log
from onlooker import contents

from topics.errors import TopicsError

from .reportrun import run_once, summary

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.timeout(600)]


def test_integrity_is_reported_where_nothing_else_can_be(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = golden(tmp_path_factory.getbasetemp(), kind="killed")
    folder = copied(whole, tmp_path / "data")
    damaged_log(whole, folder)
    before = contents(folder)
    outcome = run_once(folder, tmp_path / "out", "traffic", "integrity")
    assert contents(folder) == before
    assert summary(outcome, "integrity")["problems"] >= 1
    (failed,) = outcome.failed
    assert failed.name == "traffic"
    assert failed.error is not None
    assert "good frames follow" in failed.error
    with pytest.raises(TopicsError, match="good frames follow"):
        run_once(folder, tmp_path / "out", "traffic")
