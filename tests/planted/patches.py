"""A planted bug: a patch against topics/ with a few header lines before its diff.

breaks: what it breaks, in one line
caught-by: pytest targets that have to fail with it, separated by spaces
selection: quick (the selection of `make test` is enough) or full
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SELECTIONS = ("quick", "full")
_NAME = re.compile(r"(\d\d)-([a-z0-9-]+)\.patch")
_FIELDS = ("breaks", "caught-by", "selection")


class BadPatch(Exception):
    """A file that is no planted bug."""


class Patch(NamedTuple):
    path: Path
    number: int
    name: str
    breaks: str
    targets: list[str]
    selection: str
    files: list[str]  # that it changes


def parse(path: Path) -> Patch:
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise BadPatch(f"{path.name}: the name is not NN-short-name.patch")
    head, found, diff = path.read_text().partition("\ndiff --git ")
    if not found:
        raise BadPatch(f"{path.name}: there is no diff in it")
    fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    if missing := [field for field in _FIELDS if not fields.get(field, "").strip()]:
        raise BadPatch(f"{path.name}: lacks {', '.join(missing)}")
    if fields["selection"] not in SELECTIONS:
        raise BadPatch(f"{path.name}: the selection is quick or full")
    files = re.findall(r"^\+\+\+ b/(.+)$", diff, re.MULTILINE)
    targets = fields["caught-by"].split()
    return Patch(path, int(named[1]), named[2], fields["breaks"], targets, fields["selection"], files)


def all_patches() -> list[Patch]:
    return [parse(path) for path in sorted(HERE.glob("*.patch"))]


def apply(paths: Sequence[Path], tree: Path, *, check: bool = False) -> str:
    """Apply to a tree, or see whether each would apply; returns what is said against it, "" if nothing."""
    if shutil.which("git"):
        # Above the tree there may be a repository of someone else's: then git would look at that one's files.
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
        command, ways = ["git", "apply"], ["--check"]
    else:
        env = dict(os.environ)
        command, ways = ["patch", "-p1", "--batch", "--silent", "--forward"], ["--dry-run"]
    said = ""
    for path in paths:
        done = subprocess.run(
            [*command, *(ways if check else [])],
            cwd=tree,
            env=env,
            input=path.read_bytes(),
            capture_output=True,
            check=False,
        )
        if done.returncode:
            said += f"{path.name}: {(done.stderr + done.stdout).decode(errors='replace').strip()}\n"
    return said.strip()
