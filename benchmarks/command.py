"""The command `topics bench`: measure ours beside Redis Streams and print the table.

The status is 0 whether or not the targets were met; it is 1 when something broke, so that no number can be
trusted. Ctrl-C and SIGTERM end both servers and remove their folders.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path
from types import FrameType

import click
import msgspec
from rich.console import Console

from benchmarks import BenchFailed, machine, table
from benchmarks.figures import Line
from benchmarks.guard import GuardMeasurement
from benchmarks.measure import Pace
from benchmarks.scenarios import BY_NAME, SCENARIOS, Scenario
from benchmarks.sides import beanstalkd, redis

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OPEN_FILES = 8_192
QUICK = Pace(rounds=3, seconds=0.4, warm_s=0.1)


@click.command()
@click.option("--only", metavar="NAME", multiple=True, help="Only these lines; repeat it or use commas.")
@click.option("--quick", is_flag=True, help="Short slices: a first impression, not a result.")
@click.option("--full", is_flag=True, help="Also the lines that take long (memory).")
@click.option("--seconds", type=click.FloatRange(0.05, 600), help="Length of each slice.")
@click.option("--rounds", type=click.IntRange(1, 100), help="Slices of each side.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where the temporary data folders are made: its disk is what fsync measures.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures.")
@click.option("--list", "list_only", is_flag=True, help="Print the names of the lines and end.")
def bench(
    only: tuple[str, ...],
    quick: bool,
    full: bool,
    seconds: float | None,
    rounds: int | None,
    folder: Path | None,
    json_file: Path | None,
    list_only: bool,
) -> None:
    """Measure this server beside Redis Streams on this machine.

    \b
      topics bench --list
      topics bench --quick --only append-100,latency
      topics bench --dir . --json figures.json
    """
    if list_only:
        for scenario in SCENARIOS:
            note = "  (only with --full or --only)" if scenario.only_full else ""
            click.echo(f"{scenario.name:18} {scenario.title}, {scenario.target}{note}")
        return
    chosen = _choose(only, full=full)
    pace = QUICK if quick else Pace()
    pace = msgspec.structs.replace(pace, seconds=seconds or pace.seconds, rounds=rounds or pace.rounds)
    for signum in _ENDING:
        signal.signal(signum, _interrupt)
    _allow_open_files()
    console = Console()
    described = machine.describe(folder)
    console.print(str(described), highlight=False, soft_wrap=True)
    if not redis.present():
        console.print("no redis-server on PATH: our figures only (apt install redis-server)", soft_wrap=True)
    if not beanstalkd.present() and any(scenario.kind.startswith("queue") for scenario in chosen):
        console.print("no beanstalkd on PATH: queues beside Redis only (apt install beanstalkd)", soft_wrap=True)
    try:
        lines = _measure(console, chosen, pace, folder)
    except BenchFailed as failure:
        click.echo(f"topics bench: {failure}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("topics bench: interrupted", err=True)
        sys.exit(130)
    console.print(table.drawn(lines) if console.is_terminal else table.markdown(lines), soft_wrap=True)
    if json_file is not None:
        report = table.Report(machine=described, seconds=pace.seconds, rounds=pace.rounds, lines=lines)
        json_file.write_bytes(table.as_json(report))


def _allow_open_files() -> None:
    # Fact: a thousand watchers are a thousand sockets, in the generator and in the server, which inherit the limit
    # from here. Hazard: a usual soft limit is 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _choose(only: tuple[str, ...], *, full: bool) -> list[Scenario]:
    names = [name.strip() for text in only for name in text.split(",") if name.strip()]
    for name in names:
        if name not in BY_NAME:
            raise click.BadParameter(f"no line {name!r}; --list prints them", param_hint="--only")
    if names:
        return [scenario for scenario in SCENARIOS if scenario.name in names]
    return [scenario for scenario in SCENARIOS if full or not scenario.only_full]


def _measure(console: Console, chosen: list[Scenario], pace: Pace, folder: Path | None) -> list[Line]:
    lines: list[Line] = []
    # A spinner repaints from a thread of this process; at twice a second that is nothing.
    status = console.status("", refresh_per_second=2) if console.is_terminal else None
    current = ""

    def tell(text: str) -> None:
        if status is not None:
            status.update(f"{current}: {text}")

    measurement = GuardMeasurement(pace=pace, tell=tell, parent=folder)
    if status is not None:
        status.start()
    try:
        for number, scenario in enumerate(chosen, 1):
            current = f"[{number}/{len(chosen)}] {scenario.name}"
            line = measurement.run(scenario)
            lines.append(line)
            words = table.cells(line)
            text = f"{current}: ours {words[1]}, Redis {words[2]}, {words[3]} ({words[4]}: {words[5]})"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    finally:
        if status is not None:
            status.stop()
    return lines


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # From here on both servers are being ended and their folders removed: a second Ctrl-C must not stop that.
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
