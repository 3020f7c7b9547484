"""The ledger: what is kept between runs, which folders it refuses, and that one run holds the output folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spark_pipeline.reports import ledger
from spark_pipeline.reports.ledger import Counted, Ledger, LedgerError

IDS = ["0000000000000001", "0000000000000002"]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    assert ledger.load(tmp_path) is None
    saved = Ledger(
        folder="/d",
        ids=IDS,
        run="r2",
        now_ms=5,
        reports={"traffic": Counted(records={IDS[0]: 7}, leases={IDS[1]: 9}, tables={"hourly": ["r1", "r2"]})},
    )
    ledger.save(tmp_path, saved)
    assert ledger.load(tmp_path) == saved
    assert [path.name for path in tmp_path.iterdir()] == [ledger.NAME]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is damaged"),
        ("{}", "is damaged"),
        ('{"version": 1', "is damaged"),
        ('{"version": 1, "folder": 5, "ids": []}', "is damaged"),
        ('{"version": 2, "something": "else"}', "has version 2, this program knows version 1"),
    ],
)
def test_what_cannot_be_gone_on_with(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / ledger.NAME).write_text(text)
    with pytest.raises(LedgerError, match=said) as refused:
        ledger.load(tmp_path)
    assert "--fresh" in str(refused.value)
    assert str(tmp_path / ledger.NAME) in str(refused.value)


@pytest.mark.parametrize(
    ("known", "was", "ids", "folder", "same"),
    [
        (IDS, "/d", IDS, "/d", True),
        (IDS, "/d", IDS[:1], "/snapshot", True),  # moved, or a snapshot
        (IDS, "/d", ["0000000000000003"], "/other", False),
        (IDS, "/d", ["0000000000000003"], "/d", False),  # somebody made it anew
        (IDS, "/d", [], "/d", True),  # all topics were deleted
        (IDS, "/d", [], "/other", False),
        ([], "/d", IDS, "/d", True),  # it was empty
        ([], "/d", IDS, "/other", False),
    ],
)
def test_other_folders_are_refused(known: list[str], was: str, ids: list[str], folder: str, same: bool) -> None:
    before = Ledger(folder=was, ids=known)
    if same:
        ledger.check_folder(before, out=Path("out"), folder=folder, ids=ids)
        return
    with pytest.raises(LedgerError, match="another folder") as refused:
        ledger.check_folder(before, out=Path("out"), folder=folder, ids=ids)
    assert "--fresh" in str(refused.value)
    assert folder in str(refused.value)


def test_marks_go_forward() -> None:
    before = {"a": 10, "b": 20, "gone": 30}
    now = {"a": 12, "b": 5, "new": 3}
    ids = {"a", "b", "new"}
    live = ledger.advanced(before, now, gone_for_good=True, ids=ids)
    assert live == {"a": 12, "b": 20, "new": 3}
    snapshot = ledger.advanced(before, now, gone_for_good=False, ids=ids)
    assert snapshot == {"a": 12, "b": 20, "gone": 30, "new": 3}
    assert before == {"a": 10, "b": 20, "gone": 30}, "a report that fails must find it as it was"
    assert ledger.advanced(before, {}, gone_for_good=True, ids=ids) == {"a": 10, "b": 20}, "nothing was read"


HOLD = """
import sys, pathlib
from spark_pipeline.reports import ledger
with ledger.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_run_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LedgerError, match="another run is writing there"), ledger.locked(out):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with ledger.locked(out):  # whoever dies lets go
        pass
    with ledger.locked(out):
        pass


def test_an_output_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"--out .*file"), ledger.locked(tmp_path / "file"):
        pass
