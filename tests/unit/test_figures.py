"""The ledger of a run: what it counts, how processes write it, and that every figure is raised where it happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import figures
import pytest
from figures import CRASH_POINTS, DISK_FAULTS, FIGURES, POWER_CUTS, RECOVERIES, Figure
from model import Shard, error_of
from test_engine_faults import DyingDisk, FaultyDisk, Gone, records
from test_engine_recovery import PowerDisk

TESTS = Path(__file__).parent.parent

PLAY = """
import threading
import figures, pytest

def test_kills():
    figures.KILLS.add(3)
    threads = [threading.Thread(target=lambda: [figures.CHECKED.add() for _ in range(500)]) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def test_loses():
    figures.LOST.add(2)
    assert False

def test_skipped():
    pytest.skip("no reason")

@pytest.fixture
def broken():
    raise OSError

def test_broken(broken):
    pass

@pytest.mark.parametrize("n", range(3))
def test_last(n):
    figures.KILLS.add()
"""


def run_pytest(folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text("import figures\ndef pytest_configure(config): figures.attend(config)\n")
    (folder / "test_play.py").write_text(PLAY)
    (folder / "pytest.ini").write_text("[pytest]\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOPICS_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args, "test_play.py"]
    env = {**kept, "PYTHONPATH": str(TESTS), **environ}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_a_process_writes_what_it_did(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, TOPICS_TEST_FIGURES=str(tmp_path / "figures"))
    assert done.returncode == 1, done.stdout
    (path,) = (tmp_path / "figures").iterdir()
    told = figures.read([path, path])  # as if two processes had done the same
    assert {name: count for name, count in told.figures.items() if count} == {"kills": 12, "checked": 4_000, "lost": 4}
    assert (told.passed, told.skipped, told.unstarted) == (8, 2, 0)
    assert told.failed == ["test_play.py::test_loses", "test_play.py::test_broken"] * 2


def test_nothing_is_written_without_the_variable(tmp_path: Path) -> None:
    before = {"conftest.py", "test_play.py", "pytest.ini"}
    assert run_pytest(tmp_path).returncode == 1
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before


def test_no_test_starts_when_the_time_is_up(tmp_path: Path) -> None:
    folder = str(tmp_path / "figures")
    done = run_pytest(tmp_path, TOPICS_TEST_FIGURES=folder, TOPICS_TEST_UNTIL=str(time.time() - 1))
    assert done.returncode == 0, done.stdout
    told = figures.read(Path(folder).iterdir())
    assert (told.passed, told.skipped, told.unstarted, told.failed) == (0, 0, 7, [])
    assert not any(told.figures.values())


def test_of_a_run_with_workers_only_they_write(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    done = run_pytest(tmp_path, "-n", "2", TOPICS_TEST_FIGURES=str(tmp_path / "figures"))
    assert done.returncode == 1, done.stdout
    paths = list((tmp_path / "figures").iterdir())
    assert len(paths) == 2
    told = figures.read(paths)
    assert (told.figures["kills"], told.figures["lost"], told.passed) == (6, 2, 4)
    assert sorted(told.failed) == ["test_play.py::test_broken", "test_play.py::test_loses"]


def test_a_process_that_dies_leaves_what_it_counted(tmp_path: Path) -> None:
    dying = "import os, figures\ndef test_first(): figures.KILLS.add(5)\ndef test_second(): os._exit(9)\n"
    (tmp_path / "test_dying.py").write_text(dying)
    folder = tmp_path / "figures"
    assert run_pytest(tmp_path, "test_dying.py", TOPICS_TEST_FIGURES=str(folder)).returncode == 9
    (path,) = folder.glob("*.json")
    assert json.loads(path.read_text())["figures"]["kills"] == 5


def test_what_is_planted_does_not_count() -> None:
    before = {name: figure.count for name, figure in FIGURES.items()}
    with figures.apart():
        for figure in FIGURES.values():
            figure.add(7)
    assert {name: figure.count for name, figure in FIGURES.items()} == before


def test_threads_count_together() -> None:
    figure = Figure("", "")

    def count() -> None:
        for _ in range(2_000):
            figure.add(2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert figure.count == 16_000


@pytest.mark.parametrize("name", [name for name, figure in vars(figures).items() if isinstance(figure, Figure)])
def test_every_figure_is_raised_somewhere(name: str) -> None:
    assert vars(figures)[name] in FIGURES.values()
    raised = re.compile(rf"\b{name}\.add\(")
    places = [path for path in TESTS.rglob("*.py") if path != Path(__file__) and raised.search(path.read_text())]
    assert places, f"no test raises {name}"


# --- the disks of stepped shards -----------------------------------------------------------------------


def test_a_disk_that_dies_is_a_crash_point(tmp_path: Path) -> None:
    with figures.apart():
        before = CRASH_POINTS.count
        disk = DyingDisk(3, before=True)
        with pytest.raises(Gone):  # nothing else ends it
            Shard(tmp_path, disk=disk).append("t", records(1))
        for _ in range(3):
            with pytest.raises(Gone):
                disk.write_whole(str(tmp_path / "x"), b"")
        assert CRASH_POINTS.count == before + 1


def test_a_disk_that_fails_and_a_shard_that_starts_again(tmp_path: Path) -> None:
    with figures.apart():
        faults, recoveries = DISK_FAULTS.count, RECOVERIES.count
        disk = FaultyDisk()
        shard = Shard(tmp_path, disk=disk)
        assert (DISK_FAULTS.count, RECOVERIES.count) == (faults, recoveries)
        disk.broken()
        error_of(lambda: shard.append("t", records(1)))
        assert DISK_FAULTS.count > faults
        shard.restart()
        assert RECOVERIES.count == recoveries + 1


def test_a_power_cut(tmp_path: Path) -> None:
    with figures.apart():
        before = POWER_CUTS.count
        disk = PowerDisk()
        shard = Shard(tmp_path, disk=disk)
        shard.crash()
        disk.cut_power(tmp_path, lambda: False)
        assert POWER_CUTS.count == before + 1
