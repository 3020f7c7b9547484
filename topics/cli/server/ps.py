"""`topics ps`: the processes of a running server, read from its board, which a thread of the supervisor shows."""

from __future__ import annotations

import os
import time

import click
import msgspec

from topics.actors.inspect.attach import look_at
from topics.cli.shared.place import data_dir_option, failures_told, folder_name, json_option, print_json
from topics.cli.shared.terminal import plain
from topics.shm.counters import Row, State, Word


class ProcessLine(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int | None
    state: str
    restarts: int
    uptime_ms: int | None
    rss_bytes: int | None
    progress_permille: int | None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    data_dir: str
    version: str
    processes: list[ProcessLine]


@click.command()
@data_dir_option
@json_option
def ps(data_dir: str | None, as_json: bool) -> None:
    """Show the processes of a running server: which run, since when, and how often they were started again.

    Only the supervisor is asked, so this works while the others hang; for root also while the supervisor does.

    \b
      topics ps
      topics ps --config /etc/topics/topics.toml
      topics ps --json | jq -r '.processes[] | select(.restarts > 0) | .name'
    """
    with failures_told():
        listing = look(folder_name(data_dir))
        if as_json:
            print_json(listing)
        else:
            _print(listing)


def look(data_dir: str) -> Listing:
    info, sight = look_at(data_dir)
    board = sight.board
    try:
        lines = [_line(row) for row in board.rows()]
    finally:
        board.close()
    return Listing(address=info.address, data_dir=data_dir, version=info.version, processes=lines)


def _line(row: Row) -> ProcessLine:
    pid = row[Word.PID]
    state = row.state
    return ProcessLine(
        name=row.name,
        pid=pid or None,
        state=state.name.lower(),
        restarts=row[Word.RESTARTS],
        uptime_ms=max(time.time_ns() // 1_000_000 - row[Word.STARTED_MS], 0) if pid else None,
        rss_bytes=rss_bytes(pid) or row[Word.RESIDENT_BYTES] or None if pid else None,
        progress_permille=row[Word.PROGRESS_PERMILLE] if state is State.RECOVERING else None,
    )


def rss_bytes(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


def _print(listing: Listing) -> None:
    from rich.console import Console
    from rich.table import Table

    colours = {"ready": "green", "failed": "red", "backoff": "red", "stopped": "dim"}
    table = Table(title=plain(f"topics {listing.version} on {listing.address}, data in {listing.data_dir}"))
    table.add_column("name")
    table.add_column("pid", justify="right")
    table.add_column("state")
    table.add_column("restarts", justify="right")
    table.add_column("uptime", justify="right")
    table.add_column("memory", justify="right")
    for line in listing.processes:
        state = line.state
        if line.progress_permille is not None:
            state = f"{state} {line.progress_permille / 10:.0f} %"
        table.add_row(
            line.name,
            "" if line.pid is None else str(line.pid),
            f"[{colours.get(line.state, 'yellow')}]{state}",
            str(line.restarts),
            "" if line.uptime_ms is None else uptime_text(line.uptime_ms),
            "" if line.rss_bytes is None else f"{line.rss_bytes / 2**20:.1f} MiB",
        )
    Console().print(table)


def uptime_text(uptime_ms: int) -> str:
    """The two largest units: 3d 4h, 5m 2s."""
    seconds = uptime_ms // 1_000
    for unit, size, below, smaller in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit} {seconds % size // smaller}{below}"
    return f"{seconds}s"
