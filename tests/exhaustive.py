"""`make test-exhaustive HOURS=n`: the crash, damage, fuzz and model tests in rounds, each with a new seed, for n hours.

    wide round    every file of every family at its usual size: minutes
    deep round    the same with TOPICS_TEST_EXHAUSTIVE=1, all kill points, every byte, twenty times the examples: hours

They alternate, beginning with a wide one. A round takes a step of each family in turn, so that a run of any length
touches all families; the order within a family is shuffled by the round's seed. A step is one run of pytest: one file
with real servers, or all files of the family that are without them. When the time is up, no test starts any more; a
test that runs may finish within a grace period, and is interrupted after that. What the tests did is counted by
tests/figures.py.

Exit code: 0 when everything passed; 1 when a test failed, something was lost, nothing was checked, no test of a step
ran, or a whole round left a figure at zero, which says that the tests no longer do what the figure is about; or a
campaign found something; 128 + n when signal n cut the run short and nothing of that is so. No process of the run is
left then.

Before the rounds come the campaigns of tests/campaigns, with a part of the time: searches without pytest, each with a
figure and a goal. `--campaign NAME` runs one of them alone; `--campaign NAME --help` has its options.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import figures
import offspring
from figures import FIGURES, Told
from offspring import Ending

ROOT = Path(__file__).resolve().parent.parent

# Names of test files below tests/. A file belongs to the first family that names it.
FAMILIES: dict[str, Sequence[str]] = {
    "queues": ("recovery/test_queue_*.py", "unit/test_queue_machine.py", "unit/test_lease_*.py"),
    "routers": ("recovery/test_router_*.py", "unit/test_pipe*.py", "unit/test_folder_pipes.py"),
    "damage": (
        "recovery/test_damage.py",
        "recovery/test_folder_crash.py",
        "unit/test_folder_*.py",
        "unit/test_repair_*.py",
        "unit/test_verify_kinds.py",
        "unit/test_unreadable.py",
        "e2e/test_cli_repair.py",
        "e2e/test_cli_damaged.py",
    ),
    "recovery": ("recovery/test_*.py",),
    "backups": ("unit/test_backup_*.py", "e2e/test_cli_backup.py"),
    "fuzz": ("fuzz/test_*.py",),
    "models": (
        "unit/test_*_machine.py",
        "unit/test_engine_*.py",
        "unit/test_relocator.py",
        "unit/test_mover.py",
        "unit/test_disk.py",
        "unit/test_ring.py",
        "unit/test_rows.py",
        "unit/test_segment.py",
        "unit/test_frames.py",
        "unit/test_columns.py",
        "unit/test_watches.py",
        "unit/test_tails.py",
        "unit/test_campaign_*.py",
    ),
    "processes": (
        "actors/test_*.py",
        "concurrency/test_*.py",
        "e2e/test_faults.py",
        "e2e/test_*_faults.py",
        "e2e/test_caps_restart.py",
        "e2e/test_watch_gateways.py",
    ),
}
LEFT_OUT = (
    "recovery/test_recovery_speed.py",  # it measures, and what runs beside it would disturb it
    "recovery/test_crash_ledgers.py",  # of the harness, as the next one
    "fuzz/test_dials.py",
)
# Every other file has tests that run on every machine. The names are in full: no other file is excused with them.
MAY_BE_SKIPPED = ("recovery/test_disk_full.py",)  # who may not mount a tmpfs can't fill one

DEEP_FUZZ_CASES = 64_000
CAMPAIGNS = ROOT / "tests" / "campaigns"
CAMPAIGN_SHARE = 0.75  # of the time
INTERRUPTED_S = 90.0  # for fixtures to end their servers
STARTED = time.monotonic()

HELP = """examples:
  make test-exhaustive HOURS=0.5
  .venv/bin/python tests/exhaustive.py --hours 8 --markdown --out figures.json
  .venv/bin/python tests/exhaustive.py --hours 1 --seed 7 --family queues --family routers

A failing test is listed with the command that repeats it: the seeds stand in its environment. The output of every
pytest run with a failure is kept, and its place is printed.
"""


def files_of_families(tests: Path) -> dict[str, list[str]]:
    """Paths below tests/; every file in one family only."""
    taken = set(LEFT_OUT)
    found: dict[str, list[str]] = {}
    for family, patterns in FAMILIES.items():
        paths = sorted({str(path.relative_to(tests)) for pattern in patterns for path in tests.glob(pattern)})
        found[family] = [path for path in paths if path not in taken]
        taken.update(found[family])
    return found


@dataclass(frozen=True)
class Step:
    """One run of pytest."""

    round: int
    deep: bool
    family: str
    files: tuple[str, ...]
    seed: int

    def knobs(self) -> dict[str, str]:
        """What has to be set to run the same again."""
        knobs = {"TOPICS_TEST_SEED": str(self.seed)}
        if self.family == "fuzz":
            knobs = {"TOPICS_FUZZ_SEED": str(self.seed)}
        if self.deep:
            knobs["TOPICS_TEST_EXHAUSTIVE"] = "1"
            if self.family == "fuzz":
                knobs["TOPICS_FUZZ_CASES"] = str(DEEP_FUZZ_CASES)
        return knobs

    def repeat(self, *what: str) -> str:
        knobs = " ".join(f"{name}={value}" for name, value in self.knobs().items())
        return f"{knobs} .venv/bin/pytest --hypothesis-seed={self.seed} {shlex.join(what)}"

    def __str__(self) -> str:
        return f"round {self.round} {'deep' if self.deep else 'wide'}, {self.family}: {self.name}"

    @property
    def name(self) -> str:
        return (
            self.files[0] if len(self.files) == 1 else f"{len(self.files)} files of {self.files[0].partition('/')[0]}"
        )

    @property
    def paths(self) -> list[str]:
        return [f"tests/{file}" for file in self.files]


def grouped(files: Sequence[str]) -> list[tuple[str, ...]]:
    """Each file with real servers alone, all others together: they take less time than pytest takes to start."""
    together = tuple(file for file in files if file.startswith("unit/"))
    return [*((file,) for file in files if file not in together), *([together] if together else [])]


def steps(families: dict[str, list[str]], seed: int) -> Iterator[Step]:
    """Without end."""
    for number in itertools.count(1):
        dice = random.Random(f"{seed}/{number}")
        of_round = dice.randrange(1 << 31)
        shuffled = {}
        for family, files in families.items():
            groups = grouped(dice.sample(files, len(files)))
            shuffled[family] = dice.sample(groups, len(groups))
            if number % 2:  # at its usual size, what is without servers is the quickest of its family, and tries most
                shuffled[family].sort(key=lambda group: not group[0].startswith("unit/"))
        for row in itertools.zip_longest(*shuffled.values()):
            for family, group in zip(shuffled, row, strict=True):
                if group is not None:
                    yield Step(number, number % 2 == 0, family, group, of_round)


@dataclass
class Failure:
    step: Step
    what: str  # a node id, or what became of pytest
    log: Path

    def __str__(self) -> str:
        is_test = "::" in self.what
        title = self.what if is_test else f"{self.step}: {self.what}"
        again = self.step.repeat(self.what) if is_test else self.step.repeat(*self.step.paths)
        return f"{title}\n    again:  {again}\n    output: {self.log}"


@dataclass
class Run:
    """All rounds of one call, and the sum of what they did. What the campaigns did stands apart: it is shown together
    with that, and is no sign that the tests of the rounds do what they are for."""

    seed: int
    until: float  # of time.time()
    grace_s: float
    logs: Path
    all_families: bool = True
    told: Told = field(default_factory=Told)
    failures: list[Failure] = field(default_factory=list)
    finished: int = 0  # steps, whole ones
    interrupted: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)  # steps of which no test ran, and nothing on this machine says why
    rounds: int = 0  # whole ones
    campaign_findings: int = 0
    of_campaigns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0))
    ending: Ending = field(default_factory=Ending)  # told to: as if the time were up, and the grace period too
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def over(self) -> bool:
        return bool(self.ending) or time.time() >= self.until

    def work(self, todo: Iterator[Step], of_a_round: int) -> None:
        """Take steps until the time is up, or there are none."""
        while True:
            with self._lock:
                if self.over:
                    return
                step = next(todo, None)
                if step is None:
                    return
                name = step.name.removesuffix(".py").replace("/", "-").replace(" ", "-")
                at = f"{step.round:03d}-{step.family}-{name}"
            say(f"starts   {step}, seed {step.seed}")
            try:
                whole = self._take(step, self.logs / at)
            except Exception as error:  # a step without a verdict has not passed
                whole = False
                with self._lock:
                    self.failures.append(Failure(step, f"the driver failed: {error!r}", self.logs / at))
            with self._lock:
                self.finished += whole
                self.rounds = self.finished // of_a_round

    def _take(self, step: Step, folder: Path) -> bool:
        """Whether all of its tests ran."""
        folder.mkdir(parents=True)
        log = folder / "output.txt"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOPICS_", "PYTEST_"))}
        environ = {
            **kept,
            **step.knobs(),
            figures.FOLDER: str(folder / "figures"),
            figures.UNTIL: str(self.until),
        }
        command = [sys.executable, "-m", "pytest", f"--hypothesis-seed={step.seed}", "-p", "no:cacheprovider"]
        command += [f"--basetemp={folder / 'tmp'}", *step.paths]
        began = time.monotonic()
        with log.open("wb") as output:
            pytest = subprocess.Popen(
                offspring.led(command, signal.SIGINT),
                cwd=ROOT,
                env=environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            interrupted = self._wait(pytest)
        told = figures.read(sorted((folder / "figures").glob("*.json")))
        failures = [Failure(step, nodeid, log) for nodeid in told.failed]
        if not failures and not interrupted and pytest.returncode not in (0, 5):  # 5: all tests were deselected
            failures.append(Failure(step, f"pytest ended with {pytest.returncode}", log))
        if not failures and not interrupted and not told.ended:
            failures.append(Failure(step, "pytest left before its end", log))
        with self._lock:
            self.told.add(told)
            self.failures += failures
            if interrupted:
                self.interrupted.append(str(step))
            elif not (told.passed or told.unstarted or failures or is_excused(step, told)):
                self.idle.append(str(step))
            outcome = ", ".join(
                f"{count} {name}"
                for name, count in (
                    ("passed", told.passed),
                    ("failed", len(failures)),
                    ("skipped", told.skipped),
                    ("not started", told.unstarted),
                    ("interrupted", int(interrupted)),
                )
                if count
            )
            say(f"finished {step}: {outcome or 'nothing'} in {time.monotonic() - began:.0f} s | {self.summary()}")
        if not failures:
            shutil.rmtree(folder, ignore_errors=True)
        return not interrupted and not told.unstarted

    def _wait(self, pytest: subprocess.Popen[bytes]) -> bool:
        """Until it ends; whether it had to be interrupted."""
        while not self.ending and time.time() < self.until + self.grace_s:
            try:
                pytest.wait(1.0)
                return False
            except subprocess.TimeoutExpired:
                pass
        if pytest.poll() is not None:
            return False
        pytest.send_signal(signal.SIGINT)
        try:
            pytest.wait(INTERRUPTED_S)
        except subprocess.TimeoutExpired:
            pytest.kill()
            pytest.wait()
        return True

    # --- what it says ---

    def summary(self) -> str:
        shown = ("crash_points", "kills", "damages", "fuzzed", "checked", "lost")
        return ", ".join(f"{FIGURES[name].label} {self.told.figures[name]:,}" for name in shown)

    def totals(self) -> dict[str, int]:
        """Of rounds and campaigns."""
        return {name: count + self.of_campaigns[name] for name, count in self.told.figures.items()}

    def zeros(self) -> list[str]:
        """Figures that no test raised, though every file had its turn."""
        if not self.rounds or not self.all_families:
            return []
        return [figure.label for name, figure in FIGURES.items() if name != "lost" and not self.told.figures[name]]

    def verdict(self) -> list[str]:
        """What is wrong; empty when all is well."""
        wrong = []
        if self.failures:
            wrong.append(f"{len(self.failures)} failed")
        if self.campaign_findings:
            wrong.append(f"campaigns found {self.campaign_findings}")
        if lost := self.totals()["lost"]:
            wrong.append(f"{lost} records lost")
        if not self.told.figures["checked"] and not self.ending:
            wrong.append("nothing was checked: the time was too short")
        if self.idle:
            wrong.append(f"no test ran of {len(self.idle)} steps")
        wrong += [f"no test raised the figure of {label}" for label in self.zeros()]
        return wrong

    def table(self, *, markdown: bool) -> str:
        totals = self.totals()
        rows = [(figure.label, f"{totals[name]:,}", figure.meaning) for name, figure in FIGURES.items()]
        rows.append(
            (
                "tests passed",
                f"{self.told.passed:,}",
                f"in {self.finished:,} whole runs of pytest, {self.rounds} whole rounds",
            )
        )
        rows.append(("tests failed", f"{len(self.failures):,}", "each with the command that repeats it"))
        if markdown:
            lines = [f"| {label} | {count} | {meaning} |" for label, count, meaning in rows]
            return "\n".join(["| figure | count | what is counted |", "|---|---|---|", *lines])
        return "\n".join(f"{label:22}{count:>12}  {meaning}" for label, count, meaning in rows)

    def as_json(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "figures": self.totals(),
            "passed": self.told.passed,
            "skipped": self.told.skipped,
            "steps": self.finished,
            "rounds": self.rounds,
            "took_s": round(time.monotonic() - STARTED),
            "interrupted": self.interrupted,
            "idle": self.idle,
            "failures": [
                {"what": each.what, "step": str(each.step), "seed": each.step.seed, "output": str(each.log)}
                for each in self.failures
            ],
        }


def is_excused(step: Step, told: Told) -> bool:
    """Whether all of its tests may be skipped. Deselected is another thing: nobody asks for marks here."""
    return told.skipped > 0 and set(step.files) <= set(MAY_BE_SKIPPED)


def say(text: str) -> None:
    took = datetime.timedelta(seconds=int(time.monotonic() - STARTED))
    print(f"[{took}] {text}", flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--rounds", type=int, help="end after so many, if there is time left; default: no limit")
    parser.add_argument("--hours", type=float, default=1.0, help="how long to start new tests; default 1")
    parser.add_argument(
        "--seed", type=int, help="of the whole run: order of files and seeds of rounds; default: random"
    )
    parser.add_argument(
        "--family", action="append", choices=[*FAMILIES], help="only this one; may be given several times"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(cores, 4),
        help=f"runs of pytest at the same time; default: one a core, here {min(cores, 4)}",
    )
    parser.add_argument(
        "--grace-minutes", type=float, default=5.0, help="for tests that run when the time is up; default 5"
    )
    parser.add_argument("--markdown", action="store_true", help="the table as docs/RELIABILITY.md has it")
    parser.add_argument("--out", type=Path, help="write the figures and failures to this file, as JSON")
    parser.add_argument(
        "--logs", type=Path, help="keep the output of failing runs here; default: a new folder in TMPDIR"
    )
    asked = parser.parse_args(argv)
    if asked.hours <= 0 or asked.jobs < 1:
        parser.error("--hours must be above 0, --jobs at least 1")
    return asked


def run_campaigns(asked: argparse.Namespace, ending: Ending) -> list[tuple[str, dict[str, int], int]]:
    """All of them, one after the other: what each did, its figures, and how much it found."""
    from campaigns import driver
    from campaigns.registry import CAMPAIGNS as every

    outcomes = driver.run_all(
        list(every.values()), hours=asked.hours * CAMPAIGN_SHARE, goal=None, seed=asked.seed, jobs=asked.jobs, say=say,
        ending=ending, to_ledger=True,
    )  # fmt: skip
    return [(driver.summary(each), dict(driver.figures_of([each])), each.tally.found) for each in outcomes]


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] in ("--campaign", "--table") for word in given):
        from campaigns import driver

        return driver.main(given)
    asked = arguments(argv)
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 31)
    families = files_of_families(ROOT / "tests")
    if asked.family:
        families = {name: families[name] for name in asked.family}
    count = sum(len(grouped(files)) for files in families.values())
    if asked.logs and asked.logs.exists() and any(asked.logs.iterdir()):
        sys.exit(f"{asked.logs} is not empty: name a folder for the output of this run alone")
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="topics-exhaustive-"))
    until = time.time() + asked.hours * 3_600
    ending = Ending()
    ending.watch()
    campaigns = run_campaigns(asked, ending) if not asked.family and not asked.rounds and CAMPAIGNS.is_dir() else []
    run = Run(seed, until, asked.grace_minutes * 60, logs, not asked.family, ending=ending)
    say(f"{asked.hours:g} hours, seed {seed}, {len(families)} families, {count} runs a round, {asked.jobs} at a time")
    todo = steps(families, seed)
    if asked.rounds:
        todo = itertools.takewhile(lambda step: step.round <= asked.rounds, todo)
    workers = [threading.Thread(target=run.work, args=[todo, count]) for _ in range(asked.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print()
    for text, figures_of_one, found in campaigns:
        print(text)
        run.campaign_findings += found
        for name, count in figures_of_one.items():
            run.of_campaigns[name] += count
    for failure in run.failures:
        print(f"FAILED {failure}")
    for interrupted in run.interrupted:
        print(f"ended before its end, the grace period was over: {interrupted}")
    for idle in run.idle:
        print(f"no test of it ran: {idle}")
    print(run.table(markdown=asked.markdown))
    if asked.out:
        asked.out.write_text(json.dumps(run.as_json(), indent=2) + "\n")
    wrong = run.verdict()
    print("\n" + ("; ".join(wrong) if wrong else f"all passed, nothing lost (seed {seed})"))
    if not run.failures and not asked.logs:
        shutil.rmtree(logs, ignore_errors=True)
    if ending:
        print(f"cut short by signal {ending.number}")
    if wrong:
        return 1
    return ending.code if ending else 0


if __name__ == "__main__":
    sys.exit(offspring.contained(main))
