"""`topics reload`: have a running server read its keys again and replace its processes one by one, and wait for that.

The work is the supervisor's (topics/actors/supervisor/rolling_restart.py); this asks for it and shows how it goes.
Ctrl-C ends the waiting, not the reload.

Exit codes: 0 every process was replaced and is ready; 1 one was not, and stderr says which and why; 2 there was no
reload: another is under way, the server is not ready, or its key file is not right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
import msgspec

from topics.actors.startup.datadir_lock import read_lock_info
from topics.actors.supervisor.admin_socket import (
    KEYS,
    KINDS,
    REPLACE_TIMEOUT_S,
    KeysRead,
    Order,
    Outcome,
    Progress,
    give_order,
)
from topics.cli.shared.place import data_dir_option, failures_told, folder_name, json_option, print_json
from topics.cli.shared.terminal import say
from topics.errors import ServerNotRunning

if TYPE_CHECKING:
    from rich.status import Status

EXIT_REFUSED = 2


class Replaced(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    took_ms: int


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    replaced: list[Replaced]
    error: str = ""
    refused: bool = False
    keys: KeysRead | None = None


@click.command()
@click.option("--only", type=click.Choice((*KINDS, KEYS)), help="Replace only this kind; keys: none.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    default=REPLACE_TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="How long a new process may take from its start until it is ready.",
)
@data_dir_option
@json_option
def reload(only: str | None, timeout_s: float, data_dir: str | None, as_json: bool) -> None:
    """Read the key file again and replace the processes of a running server one by one, while clients keep working.

    The new ones run the code that is installed now. The supervisor stays, and with it the settings: a changed setting,
    and a new version of the supervisor itself, take a restart. SIGHUP to the supervisor does the same.

    The keys come first, and take effect in all gateways before anything is replaced; streams of keys that are gone end.
    A key file that is not right changes nothing: the keys stay, and no process is replaced.

    It ends with the first process that can't be replaced; what was not replaced by then goes on.

    \b
      topics reload
      topics reload --only keys
      topics reload --only gateway
      systemctl reload topics
    """
    with failures_told():
        info = read_lock_info(folder_name(data_dir))
        news = give_order(info.orders, Order(only, timeout_s))
        result = _follow(news) if as_json else _show(news)
        if as_json:
            print_json(result)
        else:
            if result.keys is not None:
                say(f"keys: {result.keys}")
            if not result.error and only != KEYS:
                say(f"{len(result.replaced)} processes were replaced")
        if result.error:
            say(f"topics: {result.error}", err=True)
            sys.exit(EXIT_REFUSED if result.refused else 1)


def _follow(news: Iterable[Progress | Outcome], on_progress: Callable[[Progress], None] = lambda step: None) -> Result:
    replaced: list[Replaced] = []
    for step in news:
        if isinstance(step, Outcome):
            return Result(replaced=replaced, error=step.error, refused=step.refused, keys=step.keys)
        if step.stage == "ready":
            replaced.append(Replaced(name=step.process, pid=step.pid, took_ms=step.took_ms))
        on_progress(step)
    raise ServerNotRunning("the server did not say how it ended")


def _show(news: Iterable[Progress | Outcome]) -> Result:
    """A line for each process that was replaced; on a terminal also what is being done."""
    from rich.console import Console

    console = Console(stderr=True)
    status: Status | None = console.status("asking the server") if console.is_terminal else None

    def on_progress(step: Progress) -> None:
        if step.stage == "ready":
            say(f"{step.process}: replaced by pid {step.pid} in {step.took_ms / 1_000:.1f} s")
        elif status is not None:
            status.update(f"{step.process} ({step.at} of {step.of}): {step.stage}")

    if status is None:
        return _follow(news, on_progress)
    with status:
        return _follow(news, on_progress)
