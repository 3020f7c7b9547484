"""The files of a folder in which a server is at work: what it removes during the walk is left out."""

import glob
from pathlib import Path


def find(folder: Path, pattern: str) -> list[Path]:
    """What matches the pattern, in order of name. `Path.glob` raises if a folder goes while it looks inside."""
    return sorted(folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True, include_hidden=True))


def sizes(folder: Path, pattern: str) -> dict[Path, int]:
    """The size of each file that matches and is still there when it is asked for it."""
    found: dict[Path, int] = {}
    for path in find(folder, pattern):
        try:
            found[path] = path.stat().st_size
        except FileNotFoundError:
            continue
    return found
