"""`topics top`: a running server, live: its shards and its processes, refreshed in place until q or Ctrl-C.

From the counters page alone: none of its processes is asked, so it shows one that hangs, too.

Exit codes: 0 ended by q, or done with --once; 1 it could not be done, or the server stopped; 2 the command was not
understood; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from topics.cli.place import data_dir_option, failures_told, folder_name, json_option, print_json
from topics.cli.shards import Figures, Watched, interval_option, process_table, shard_table
from topics.errors import ServerNotRunning

if TYPE_CHECKING:
    from rich.console import Group


@click.command()
@click.option("--once", is_flag=True, help="Print one reading and end, for a script; so it does without a terminal.")
@interval_option
@data_dir_option
@json_option
def top(once: bool, interval_s: float, data_dir: str | None, as_json: bool) -> None:
    """Watch a running server: its shards and its processes, refreshed in place. q or Ctrl-C ends it.

    \b
      topics top
      topics top --interval 5
      topics top --once --json              # one reading
      topics top --json                     # a line of JSON every second

    busy: the share of time in which a process's loop did something. lag: its longest round of about the last second.
    ring: bytes that wait to be taken. outbox: bytes that wait for room. heartbeat: a process that hangs stops beating.
    """
    with failures_told():
        watched = Watched(folder_name(data_dir))
        try:
            if as_json or once or not sys.stdout.isatty():
                _print(watched, interval_s, once=once or not as_json, as_json=as_json)
            else:
                _live(watched, interval_s)
        finally:
            watched.close()


def _print(watched: Watched, interval_s: float, *, once: bool, as_json: bool) -> None:
    while True:
        time.sleep(interval_s)
        figures = _figures(watched)
        if as_json:
            print_json(figures)
            sys.stdout.flush()
        else:
            from rich.console import Console

            Console().print(_screen(figures))
        if once:
            return


def _figures(watched: Watched) -> Figures:
    if not watched.running:
        raise ServerNotRunning(f"the server with pid {watched.info.pid} has stopped")
    return watched.figures()


def _screen(figures: Figures) -> Group:
    from rich.console import Group

    return Group(shard_table(figures), process_table(figures))


def _live(watched: Watched, interval_s: float) -> None:
    from rich.live import Live

    with _keys() as keys, Live(_screen(_figures(watched)), screen=True, auto_refresh=False) as live:
        while not _pressed(keys, interval_s):
            live.update(_screen(_figures(watched)), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Keys as they are pressed, not line by line; None where nobody can press any."""
    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(keys: int | None, wait_s: float) -> bool:
    """Wait; whether q came meanwhile."""
    if keys is None:
        time.sleep(wait_s)
        return False
    until = time.monotonic() + wait_s
    while (left := until - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0]:
            typed = os.read(keys, 64)
            if not typed or b"q" in typed.lower():
                return True
    return False
