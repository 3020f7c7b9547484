"""Plants each bug in a copy of the tree, and expects a test to fail.

    the tracked files ──► a copy for each worker ──► all targets pass ──► patch, run, restore ──► ... ──► the table

The copy's code is what is tested: PYTHONPATH puts it before the installed one, also in the servers that tests start.
A patch is applied to the copy alone, so a run that is ended leaves nothing behind but a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from patches import ROOT, Patch, all_patches, apply
from verdicts import Judged, Row, Verdict, is_success, judge, read_report, sum_up

PATCH_TIMEOUT_S = 300
TEST_TIMEOUT_S = 100  # pytest-timeout's: a test that hangs fails before the run is ended
BASE_TIMEOUT_S = 1_200
GATE = "gate or not full"  # the selection of `make test`
GATE_ENV = {"TOPICS_TEST_GATE": "1", "TOPICS_FUZZ_CASES": "2000"}  # and how much of each it does
_print_lock = threading.Lock()


def say(text: str) -> None:
    with _print_lock:
        print(text, file=sys.stderr, flush=True)


class Tree:
    """A copy of the tracked files, where patches are applied and tests run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._report = folder / "report.xml"
        self._before: dict[Path, bytes] = {}  # what the planted bug has changed
        for name in _tracked():
            if (ROOT / name).is_file():
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        self._env = {**os.environ, "PYTHONPATH": str(self.root)}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)  # modules would be compiled again for every server
        self._check_imports(folder)

    def _check_imports(self, folder: Path) -> None:
        """If the installed code were tested, every bug would be missed, or caught for no reason."""
        asked = [sys.executable, "-c", "import topics; print(topics.__file__)"]
        found = subprocess.run(asked, cwd=folder, env=self._env, capture_output=True, text=True, check=True)
        if not Path(found.stdout.strip()).resolve().is_relative_to(self.root.resolve()):
            raise SystemExit(f"tests would import {found.stdout.strip()}, not the copy in {self.root}")

    def plant(self, patch: Patch) -> str:
        """Returns why it could not be done, "" if it was."""
        paths = [self.root / name for name in patch.files]
        self._before = {path: path.read_bytes() for path in paths if path.exists()}
        said = apply([patch.path], self.root)
        self._forget_compiled()
        return said

    def restore(self) -> None:
        for path, content in self._before.items():
            path.write_bytes(content)
        self._forget_compiled()

    def _forget_compiled(self) -> None:
        """Python compares seconds and sizes: a patch that swaps two lines may look like what it replaces."""
        for path in self._before:
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink()

    def test(self, targets: Sequence[str], *, full: bool, stop: bool, timeout_s: float) -> tuple[Judged, str]:
        """The verdict, and what pytest printed."""
        self._report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += [f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={self._report}"]
        command += ["-x"] if stop else []
        command += [] if full else ["-m", GATE]
        process = subprocess.Popen(
            [*command, *targets],
            cwd=self.root,
            env=self._env if full else self._env | GATE_ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        code: int | None
        try:
            printed, _ = process.communicate(timeout=timeout_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            code = None
        report = read_report(self._report.read_text()) if self._report.exists() else None
        return judge(code, report), printed


def _tracked() -> list[str]:
    """What git tracks, or would: a test that was just written counts too."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(set(filter(None, listed.stdout.split("\0"))))


def run_one(patch: Patch, tree: Tree) -> Row:
    started = time.monotonic()
    if said := tree.plant(patch):
        judged = Judged(Verdict.STALE, "", f"does not apply any more, refresh it: {said.splitlines()[0]}")
        printed = ""
    else:
        try:
            full = patch.selection == "full"
            judged, printed = tree.test(patch.targets, full=full, stop=True, timeout_s=PATCH_TIMEOUT_S)
        finally:
            tree.restore()
    seconds = time.monotonic() - started
    say(f"{patch.number:02d} {patch.name}: {judged.verdict.value}, {judged.by or judged.why} ({seconds:.1f} s)")
    if judged.verdict in (Verdict.BROKEN, Verdict.HUNG):
        say(textwrap.indent("\n".join(printed.splitlines()[-20:]), "    "))
    return Row(patch.number, patch.name, patch.breaks, patch.selection, judged, seconds)


def check_unpatched(patches: Sequence[Patch], tree: Tree) -> None:
    """What fails anyway catches nothing."""
    for selection in ("quick", "full"):
        targets = sorted({target for patch in patches if patch.selection == selection for target in patch.targets})
        if targets:
            started = time.monotonic()
            judged, printed = tree.test(targets, full=selection == "full", stop=False, timeout_s=BASE_TIMEOUT_S)
            if judged.verdict is not Verdict.MISSED:
                say(textwrap.indent("\n".join(printed.splitlines()[-40:]), "    "))
                raise SystemExit(f"without any planted bug the targets do not all pass: {judged.by or judged.why}")
            say(f"without a planted bug {judged.why} ({time.monotonic() - started:.1f} s)")


def run_all(patches: Sequence[Patch], *, workers: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(max(1, min(workers, len(patches)))):
            (Path(folder) / str(number)).mkdir()
            trees.put(Tree(Path(folder) / str(number)))
        tree = trees.get()
        check_unpatched(patches, tree)
        trees.put(tree)

        def one(patch: Patch) -> Row:
            tree = trees.get()
            try:
                return run_one(patch, tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(trees.qsize()) as pool:
            return list(pool.map(one, patches))


def table(rows: Sequence[Row], *, markdown: bool) -> str:
    if markdown:
        lines = ["| | bug | what it breaks | caught by | s | selection |", "|---|---|---|---|---|---|"]
        for row in rows:
            by = f"`{row.judged.by}`" if row.judged.by else f"**{row.judged.verdict.value}**: {row.judged.why}"
            fields = (f"{row.number:02d}", f"`{row.name}`", row.breaks, by, f"{row.seconds:.1f}", row.selection)
            lines.append("| " + " | ".join(field.replace("|", "\\|") for field in fields) + " |")
        return "\n".join(lines)
    lines = []
    for row in rows:
        head = f"{row.number:02d} {row.name:32} {row.judged.verdict.value:7} {row.seconds:6.1f} s  {row.selection}"
        lines += [head, f"   breaks: {row.breaks}", f"   {row.judged.by or row.judged.why}"]
    return "\n".join(lines)


def choose(patches: Sequence[Patch], wanted: Sequence[str]) -> list[Patch]:
    """By number or name; all of them if nothing is wanted."""
    if not wanted:
        return list(patches)
    chosen: dict[int, Patch] = {}
    for word in wanted:
        found = [patch for patch in patches if word.lstrip("0") == str(patch.number) or word == patch.name]
        if not found:
            raise SystemExit(f"there is no planted bug {word}")
        chosen |= {patch.number: patch for patch in found}
    return [chosen[number] for number in sorted(chosen)]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant bugs, and see that tests catch them.")
    parser.add_argument("which", nargs="*", help="numbers or names of planted bugs; all of them by default")
    parser.add_argument("-j", "--workers", type=int, default=2, help="how many at a time")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(given)
    everything = all_patches()
    patches = choose(everything, options.which)
    rows = run_all(patches, workers=options.workers)
    print(table(rows, markdown=options.markdown))
    print(f"\n{sum_up(rows)}")
    return 0 if is_success(rows, whole=len(patches) == len(everything)) else 1


if __name__ == "__main__":
    sys.exit(main())
