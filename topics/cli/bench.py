"""`topics bench`: runs the benchmark of a checkout, benchmarks/ beside topics/. No installation has it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

EXIT_REFUSED = 2  # as of a command that is not understood


def find(checkout: Path) -> click.Command:
    """The command of the benchmark beside our source, or one that says that there is none."""
    if not (checkout / "benchmarks" / "command.py").is_file():
        return absent
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    command: click.Command = importlib.import_module("benchmarks.command").bench
    return command


@click.command("bench", context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def absent(args: tuple[str, ...]) -> None:
    """Measure this machine. The benchmark is not installed: it is run from a clone of the repository."""
    click.echo("topics bench: the benchmark is not installed; run `make bench` in a clone of the repository", err=True)
    sys.exit(EXIT_REFUSED)


bench = find(Path(__file__).resolve().parents[2])
