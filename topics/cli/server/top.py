"""`topics top`: a running server, live: its shards and its processes, refreshed in place until q or Ctrl-C.

From the counters page alone, for which only the supervisor is asked: so it shows a process that hangs, too.

Exit codes: 0 ended by q, or done with --once; 1 it could not be done, or the server stopped; 2 the command was not
understood; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Literal

import click

from topics.cli.server.shards import Figures, Watched, interval_option, screen
from topics.cli.shared.place import data_dir_option, failures_told, folder_name, json_option, print_json
from topics.cli.shared.tables import console
from topics.errors import ServerNotRunning

_LAST_STEPS_S = 1.0


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
            out = console()
            out.print(screen(figures, width=out.width))
        if once:
            return


def _figures(watched: Watched) -> Figures:
    stopped = ServerNotRunning(f"the server with pid {watched.info.pid} has stopped")
    if not watched.running:
        raise stopped
    try:
        return watched.figures()
    except ServerNotRunning:
        until = time.monotonic() + _LAST_STEPS_S
        while watched.running:  # it shows nothing any more a moment before it ends
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        raise stopped from None


def _live(watched: Watched, interval_s: float) -> None:
    """A terminal that changes its size is drawn anew at once, with the figures that there are."""
    from rich.live import Live

    out = console()
    figures = _figures(watched)
    with _resized() as resized, _keys() as keys, Live(screen=True, auto_refresh=False, console=out) as live:
        while True:
            live.update(screen(figures, width=out.width), refresh=True)
            match _wait(keys, resized, interval_s):
                case "quit":
                    return
                case "time":
                    figures = _figures(watched)


@contextlib.contextmanager
def _resized() -> Iterator[int]:
    """A descriptor with something to read each time the terminal has another size."""
    seen, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGWINCH, lambda number, frame: _tell(told))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(seen)
        os.close(told)


def _tell(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.write(fd, b"x")


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


def _wait(keys: int | None, resized: int, wait_s: float) -> Literal["quit", "size", "time"]:
    """What comes first: q, another size, or the end of the interval."""
    until = time.monotonic() + wait_s
    watched = [resized] if keys is None else [resized, keys]
    while (left := until - time.monotonic()) > 0:
        ready = select.select(watched, [], [], left)[0]
        if keys in ready:
            typed = os.read(keys, 64) if keys is not None else b""
            if not typed or b"q" in typed.lower():
                return "quit"
        if resized in ready:
            os.read(resized, 4_096)
            return "size"
    return "time"
