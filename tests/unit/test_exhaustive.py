"""The driver of long runs: which files it takes in which order, how it ends, and what it says then."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import exhaustive
import pytest
from exhaustive import FAMILIES, LEFT_OUT, Failure, Run, Step, files_of_families, grouped, steps
from figures import FIGURES
from offspring import Ending

TESTS = Path(__file__).parent.parent
DRIVER = TESTS / "exhaustive.py"


def test_every_file_has_one_family() -> None:
    families = files_of_families(TESTS)
    assert set(families) == set(FAMILIES)
    every = [file for files in families.values() for file in files]
    assert len(every) == len(set(every))
    for folder in ("recovery", "fuzz", "actors", "concurrency"):
        there = {str(path.relative_to(TESTS)) for path in (TESTS / folder).glob("test_*.py")}
        assert there <= set(every) | set(LEFT_OUT)
    for patterns in FAMILIES.values():
        for pattern in patterns:
            assert list(TESTS.glob(pattern)), f"no file is named {pattern}"


def test_a_short_run_touches_every_family() -> None:
    families = files_of_families(TESTS)
    first = list(itertools.islice(steps(families, 7), len(families)))
    assert {step.family for step in first} == set(families)
    for step in first:
        assert step.files[0].startswith("unit/") == any(file.startswith("unit/") for file in families[step.family])


def test_a_round_takes_every_file_once_and_the_next_has_another_seed() -> None:
    families = files_of_families(TESTS)
    every = sorted(file for files in families.values() for file in files)
    found = itertools.takewhile(lambda step: step.round < 3, steps(families, 7))
    wide, deep = (list(of_round) for _, of_round in itertools.groupby(found, lambda step: step.round))
    for one in (wide, deep):
        assert sorted(file for step in one for file in step.files) == every
        assert len({step.seed for step in one}) == 1
        assert len(one) == sum(len(grouped(files)) for files in families.values())
    assert [step.files for step in wide] != [step.files for step in deep]
    assert wide[0].seed != deep[0].seed
    assert not any(step.deep for step in wide)
    assert all(step.deep for step in deep)


def test_files_without_servers_share_a_run() -> None:
    assert grouped(["unit/test_a.py", "e2e/test_b.py", "unit/test_c.py"]) == [
        ("e2e/test_b.py",),
        ("unit/test_a.py", "unit/test_c.py"),
    ]
    assert grouped(["fuzz/test_a.py"]) == [("fuzz/test_a.py",)]


def test_a_seed_makes_the_same_run() -> None:
    families = files_of_families(TESTS)
    assert list(itertools.islice(steps(families, 7), 50)) == list(itertools.islice(steps(families, 7), 50))
    assert list(itertools.islice(steps(families, 7), 50)) != list(itertools.islice(steps(families, 8), 50))


def test_the_command_that_repeats_a_test() -> None:
    step = Step(2, True, "recovery", ("recovery/test_x.py",), 77)
    words = shlex.split(step.repeat("tests/recovery/test_x.py::test_y[a b]"))
    assert words == [
        "TOPICS_TEST_SEED=77",
        "TOPICS_TEST_EXHAUSTIVE=1",
        ".venv/bin/pytest",
        "--hypothesis-seed=77",
        "tests/recovery/test_x.py::test_y[a b]",
    ]
    fuzz = Step(1, False, "fuzz", ("fuzz/test_http1.py",), 78)
    assert fuzz.repeat("tests/fuzz/test_http1.py::t").startswith("TOPICS_FUZZ_SEED=78 .venv/bin/pytest")


def new_run(tmp_path: Path) -> Run:
    run = Run(1, 0.0, 0.0, tmp_path)
    run.told.figures = dict.fromkeys(FIGURES, 1) | {"lost": 0}
    run.rounds = 1
    return run


def test_the_verdict(tmp_path: Path) -> None:
    assert new_run(tmp_path).verdict() == []
    run = new_run(tmp_path)
    run.told.figures["lost"] = 3
    assert run.verdict() == ["3 records lost"]
    run = new_run(tmp_path)
    run.failures.append(
        Failure(Step(1, False, "fuzz", ("fuzz/test_x.py",), 5), "pytest ended with 3", tmp_path / "log")
    )
    assert run.verdict() == ["1 failed"]
    assert "again:  TOPICS_FUZZ_SEED=5" in str(run.failures[0])
    run = new_run(tmp_path)
    run.told.figures["kills"] = 0
    assert run.verdict() == ["no test raised the figure of kills"]
    run.rounds = 0  # not every file had its turn
    assert run.verdict() == []
    run.told.figures["checked"] = 0
    assert run.verdict() == ["nothing was checked: the time was too short"]


def test_figures_of_campaigns_are_shown_and_are_none_of_the_tests(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.of_campaigns |= {"kills": 1_000, "checked": 2_000}
    assert run.verdict() == []
    run.told.figures |= {"kills": 0, "checked": 0}
    assert run.verdict() == ["nothing was checked: the time was too short"] + [
        f"no test raised the figure of {label}" for label in ("kills", "records checked")
    ]
    assert run.as_json()["figures"] == run.told.figures | {"kills": 1_000, "checked": 2_000}
    assert "| kills | 1,000 |" in run.table(markdown=True)
    run.of_campaigns["lost"] = 1
    assert "1 records lost" in run.verdict()


def test_a_run_of_campaigns_alone_has_checked_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have taken all of the time."""
    monkeypatch.setattr(exhaustive, "steps", lambda families, seed: iter(()))
    monkeypatch.setattr(
        exhaustive, "run_campaigns", lambda asked, ending: [("kills: 7", {"kills": 7, "checked": 9}, 0)]
    )
    monkeypatch.setattr(Ending, "watch", lambda ending: None)  # signals are those of this run of pytest
    assert exhaustive.main(["--out", str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "nothing was checked: the time was too short"
    counted = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert {name: count for name, count in counted.items() if count} == {"kills": 7, "checked": 9}


def test_the_table_has_every_figure(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for markdown in (False, True):
        lines = run.table(markdown=markdown).splitlines()
        for figure in FIGURES.values():
            assert any(figure.label in line for line in lines)
    assert all(line.count("|") == 4 for line in lines)


SKIPPED = "import pytest\n\n@pytest.mark.skip(reason='no')\ndef test_it(): pass\n"
NOT_SELECTED = "import pytest\npytestmark = pytest.mark.full\n\ndef test_it(): pass\n"


@pytest.mark.parametrize(
    ("file", "source", "is_idle"),
    [
        ("recovery/test_other.py", SKIPPED, True),
        ("recovery/test_other.py", NOT_SELECTED, True),
        ("recovery/test_disk_full.py", SKIPPED, False),
        ("recovery/test_disk_full.py", NOT_SELECTED, True),
    ],
)
def test_a_step_of_which_no_test_ran_is_wrong(
    project: Path, monkeypatch: pytest.MonkeyPatch, file: str, source: str, is_idle: bool
) -> None:
    (project / "tests" / file).write_text(source)
    (project / "pytest.ini").write_text("[pytest]\naddopts = -m 'not full'\nmarkers = full\n")
    monkeypatch.setattr(exhaustive, "ROOT", project)
    run = Run(1, time.time() + 100, 60.0, project)
    run.told.figures["checked"] = 1
    assert run._take(Step(1, False, "recovery", (file,), 5), project / "step")
    assert len(run.idle) == is_idle
    assert run.verdict() == (["no test ran of 1 steps"] if is_idle else [])


def test_a_file_that_may_be_skipped_is_there() -> None:
    assert [file for file in exhaustive.MAY_BE_SKIPPED if not (TESTS / file).exists()] == []


@pytest.mark.parametrize("argument", ["--hours=0", "--jobs=0", "--hours=x", "--family=none"])
def test_arguments_that_make_no_sense(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        exhaustive.arguments([argument])
    assert refusal.value.code == 2
    assert argument.partition("=")[0] in capsys.readouterr().err


PLAY = {
    "recovery/test_good.py": "import figures\ndef test_good(): figures.CHECKED.add(40)\n",
    "fuzz/test_bad.py": "import figures\ndef test_bad():\n    figures.LOST.add(2)\n    assert False\n",
    "fuzz/test_broken.py": "import os\ndef test_broken(): os._exit(9)\n",
    "fuzz/test_leaves.py": "import os\ndef test_leaves(): os._exit(0)\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project with the same driver."""
    tests = tmp_path / "tests"
    for name, text in PLAY.items():
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (tests / name).write_text(text)
    (tests / "conftest.py").write_text("import figures\ndef pytest_configure(config): figures.attend(config)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("exhaustive.py", "figures.py", "offspring.py"):
        (tests / name).write_text((TESTS / name).read_text())
    return tmp_path


def drive(project: Path, *args: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOPICS_", "PYTEST_"))}
    out = project / "figures.json"
    command = [sys.executable, "tests/exhaustive.py", "--out", str(out), "--logs", str(project / "logs"), *args]
    done = subprocess.run(command, cwd=project, env=kept, capture_output=True, text=True, timeout=100)
    return done, json.loads(out.read_text())


def test_a_run_sums_and_names_what_failed(project: Path) -> None:
    done, out = drive(
        project, "--rounds", "1", "--family", "recovery", "--family", "fuzz", "--jobs", "2", "--seed", "5", "--markdown"
    )
    assert done.returncode == 1, done.stdout
    counted = out["figures"]
    assert isinstance(counted, dict)
    assert {name: count for name, count in counted.items() if count} == {"checked": 40, "lost": 2}
    assert (out["seed"], out["rounds"], out["steps"], out["passed"]) == (5, 1, 4, 1)
    assert "FAILED tests/fuzz/test_bad.py::test_bad\n    again:  TOPICS_FUZZ_SEED=" in done.stdout
    assert "pytest ended with 9" in done.stdout
    assert "| records checked | 40 | " in done.stdout
    assert done.stdout.splitlines()[-1] == "3 failed; 2 records lost"
    assert "pytest left before its end" in done.stdout
    (output,) = (project / "logs").glob("*-fuzz-fuzz-test_bad/output.txt")
    assert "figures.LOST.add(2)" in output.read_text()
    assert not list((project / "logs").glob("*test_good*")), "only what failed is kept"


def test_a_run_that_is_told_to_end_leaves_no_process_behind(project: Path) -> None:
    (project / "tests/recovery/test_stuck.py").write_text(
        "import pathlib, subprocess, time\n"
        "def test_stuck():\n"
        "    server = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    pathlib.Path({str(project)!r}, 'new').write_text(str(server.pid))\n"
        f"    pathlib.Path({str(project)!r}, 'new').rename(pathlib.Path({str(project)!r}, 'pid'))\n"
        "    time.sleep(600)\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOPICS_", "PYTEST_"))}
    command = [sys.executable, "tests/exhaustive.py", "--family", "recovery", "--rounds", "1", "--jobs", "2"]
    with subprocess.Popen(command, cwd=project, env=kept, stdout=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 60
        while not (project / "pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.terminate()
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "cut short by signal 15" in said
    assert not Path("/proc", (project / "pid").read_text()).exists()


def test_a_step_without_a_verdict_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(1, time.time() + 60, 1.0, tmp_path)

    def fail(step: Step, folder: Path) -> bool:
        raise OSError("no space")

    monkeypatch.setattr(run, "_take", fail)
    run.work(itertools.islice(exhaustive.steps({"fuzz": ["fuzz/test_x.py"]}, 1), 1), 1)
    assert [failure.what for failure in run.failures] == ["the driver failed: OSError('no space')"]
    assert run.verdict()


def test_output_of_two_runs_is_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        exhaustive.main(["--logs", str(tmp_path)])


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_step_whose_tests_find_the_time_up_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    """With our own conftest.py, which is strict about skipped tests in continuous integration."""
    monkeypatch.setenv("CI", ci)
    run = Run(1, time.time(), 60.0, tmp_path)
    assert not run._take(Step(1, False, "models", ("unit/test_units.py",), 5), tmp_path / "step")
    assert run.failures == []
    assert (run.told.passed, run.told.skipped, run.interrupted, run.idle) == (0, 0, [], [])
    assert run.told.unstarted > 0


def test_a_run_that_goes_on_after_the_grace_period_is_interrupted(tmp_path: Path) -> None:
    run = Run(1, time.time(), 0.1, tmp_path)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], stderr=subprocess.DEVNULL) as child:
        assert run._wait(child)
        assert child.returncode


def test_a_run_that_ends_in_time_is_not(tmp_path: Path) -> None:
    run = Run(1, time.time(), 60.0, tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        assert not run._wait(child)
        assert child.returncode == 0
