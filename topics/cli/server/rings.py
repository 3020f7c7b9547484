"""`topics rings`: every ring between the processes of a running server, for one that is stuck.

Only the supervisor is asked, and nothing is written to shared memory.

Exit codes: 0 done; 1 it could not be done, or a ring is stuck or damaged; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
import time

import click
import msgspec

from topics.actors.inspect.attach import look_at, look_inside
from topics.actors.inspect.rings import RingState, look_at_rings
from topics.cli.shared.place import bytes_text, data_dir_option, failures_told, folder_name, json_option, print_json
from topics.cli.shared.tables import Column, show, wide_option
from topics.cli.shared.terminal import say
from topics.shm.counters import Board, Word


class RingLine(msgspec.Struct, frozen=True, kw_only=True):
    ring: RingState
    moved: int  # bytes that the reader took between the two looks
    high_water: int  # the most that the reader saw in any of its rings
    problem: str | None


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.05, 60),
    default=0.5,
    metavar="SECONDS",
    help="Time between the two looks that tell whether a ring moves (default 0.5).",
)
@data_dir_option
@wide_option
@json_option
def rings(interval_s: float, data_dir: str | None, wide: bool, as_json: bool) -> None:
    """Show the rings between the processes of a running server.

    A ring is stuck if something waits in it and its reader has taken nothing between two looks: the reader hangs, or
    sleeps although its bell should have rung. written and taken are bytes since the ring was made; a ring is made anew,
    with the next generation, when either of its processes starts again.

    \b
      topics rings
      topics rings --interval 5 --json | jq '.[] | select(.problem)'

    The exit code is 1 if a ring is stuck or damaged.
    """
    with failures_told():
        info, sight = look_at(folder_name(data_dir))
        try:
            before = look_at_rings(sight.links, sight.board)
        finally:
            sight.board.close()
        time.sleep(interval_s)
        sight = look_inside(info)
        try:
            lines = [_line(ring, before, sight.board) for ring in look_at_rings(sight.links, sight.board)]
        finally:
            sight.board.close()
        if as_json:
            print_json(lines)
        else:
            _print(lines, wide=wide)
    sys.exit(1 if any(line.problem for line in lines) else 0)


def _line(ring: RingState, before: list[RingState], board: Board) -> RingLine:
    key = (ring.writer, ring.reader, ring.generation)
    known = next((one for one in before if (one.writer, one.reader, one.generation) == key), None)
    problem = ring.problem
    moved = ring.taken if known is None else ring.taken - known.taken
    if problem is None and known is not None and known.depth and ring.depth and not moved:
        beat_s = (time.monotonic_ns() - board.row(ring.reader)[Word.HEARTBEAT]) / 1e9
        why = (
            "sleeps though something waits"
            if ring.reader_sleeps
            else f"hangs: its last heartbeat is {beat_s:.1f} s old"
        )
        problem = f"stuck: {ring.reader} took nothing and {why}"
    high_water = board.row(ring.reader)[Word.RING_HIGH_WATER]
    return RingLine(ring=ring, moved=moved, high_water=high_water, problem=problem)


_COLUMNS = (
    Column("ring", justify="left"),
    Column("generation", 3),
    Column("capacity", 5),
    Column("depth", 1),
    Column("reader's high", 4),
    Column("written", 6),
    Column("taken", 7),
    Column("moved", 1),
    Column("flags", 2, justify="left"),
)


def _print(lines: list[RingLine], *, wide: bool) -> None:
    show(_COLUMNS, [_cells(line) for line in lines], wide=wide)
    for line in lines:
        if line.problem:
            say(f"{line.ring.writer} → {line.ring.reader}: {line.problem}")


def _cells(line: RingLine) -> list[str]:
    ring = line.ring
    flags = [
        *(["reader sleeps"] if ring.reader_sleeps else []),
        *(["writer waits for room"] if ring.writer_waits else []),
    ]
    name = f"{ring.writer} → {ring.reader}"
    return [
        f"[red]{name}[/]" if line.problem else name,
        str(ring.generation),
        bytes_text(ring.capacity),
        bytes_text(ring.depth),
        bytes_text(line.high_water),
        str(ring.written),
        str(ring.taken),
        bytes_text(line.moved),
        ", ".join(flags),
    ]
