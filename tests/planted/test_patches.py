"""Every planted bug is one: it has its header, its targets exist, and it applies to the code as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from patches import ROOT, BadPatch, Patch, all_patches, apply, parse
from run import GATE, choose
from verdicts import LEAST_QUICK

PATCHES = all_patches()


def named(patch: Patch) -> str:
    return patch.path.name


def test_there_are_thirty_and_the_gate_catches_most() -> None:
    assert [patch.number for patch in PATCHES] == list(range(1, 31))
    assert len({patch.name for patch in PATCHES}) == 30
    assert len({patch.breaks for patch in PATCHES}) == 30
    assert sum(patch.selection == "quick" for patch in PATCHES) >= LEAST_QUICK


@pytest.mark.parametrize("patch", PATCHES, ids=named)
def test_it_changes_a_few_lines_of_the_program_and_nothing_else(patch: Patch) -> None:
    assert patch.files
    assert all(name.startswith("topics/") for name in patch.files)
    lines = patch.path.read_text().partition("\ndiff --git ")[2].splitlines()
    changed = [line for line in lines if line[:1] in "+-" and not line.startswith(("+++ ", "--- "))]
    assert 1 <= len(changed) <= 20


@pytest.mark.parametrize("patch", PATCHES, ids=named)
def test_its_targets_exist(patch: Patch) -> None:
    for target in patch.targets:
        file, *inside = target.split("::")
        assert file.startswith("tests/")
        text = (ROOT / file).read_text()
        for name in inside:
            assert f"def {name.partition('[')[0]}(" in text or f"class {name}" in text, target


def test_each_applies_to_the_tree() -> None:
    refused = apply([patch.path for patch in PATCHES], ROOT, check=True)
    assert not refused, f"refresh these patches:\n{refused}"


def test_one_that_does_not_apply_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree" / "topics").mkdir(parents=True)
    (tmp_path / "tree" / "topics" / "x.py").write_text("a = 1\n")
    good, stale = tmp_path / "01-good.patch", tmp_path / "02-stale.patch"
    body = "breaks: b\n\ndiff --git a/topics/x.py b/topics/x.py\n--- a/topics/x.py\n+++ b/topics/x.py\n@@ -1 +1 @@\n"
    good.write_text(body + "-a = 1\n+a = 2\n")
    stale.write_text(body + "-a = 3\n+a = 4\n")
    said = apply([good, stale], tmp_path / "tree", check=True)
    assert "02-stale.patch" in said
    assert "01-good.patch" not in said
    assert (tmp_path / "tree" / "topics" / "x.py").read_text() == "a = 1\n"
    assert apply([good], tmp_path / "tree") == ""
    assert (tmp_path / "tree" / "topics" / "x.py").read_text() == "a = 2\n"


DIFF = "\ndiff --git a/topics/x.py b/topics/x.py\n--- a/topics/x.py\n+++ b/topics/x.py\n@@ -1 +1 @@\n-a\n+b\n"
HEAD = "breaks: order\ncaught-by: tests/a.py::test_b tests/c.py\nselection: quick\n"


def test_a_patch_is_read(tmp_path: Path) -> None:
    path = tmp_path / "07-swap.patch"
    path.write_text(HEAD + DIFF)
    assert parse(path) == Patch(
        path, 7, "swap", "order", ["tests/a.py::test_b", "tests/c.py"], "quick", ["topics/x.py"]
    )


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("swap.patch", HEAD + DIFF, "NN-short-name"),
        ("07-swap.patch", HEAD, "no diff"),
        ("07-swap.patch", HEAD.replace("breaks", "broke") + DIFF, "lacks breaks"),
        ("07-swap.patch", HEAD.replace("caught-by: tests/a.py::test_b tests/c.py", "") + DIFF, "lacks caught-by"),
        ("07-swap.patch", HEAD.replace("quick", "slow") + DIFF, "quick or full"),
    ],
)
def test_what_is_no_planted_bug_is_refused(tmp_path: Path, name: str, text: str, why: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadPatch, match=why):
        parse(path)


def test_choosing() -> None:
    assert choose(PATCHES, []) == PATCHES
    assert [patch.number for patch in choose(PATCHES, ["3", "01", PATCHES[2].name])] == [1, 3]
    with pytest.raises(SystemExit, match="no planted bug 99"):
        choose(PATCHES, ["99"])


def test_quick_is_what_make_test_runs() -> None:
    assert f'-m "{GATE}" tests' in (ROOT / "Makefile").read_text()
