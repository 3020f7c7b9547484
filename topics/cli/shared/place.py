"""Which data folder a verb looks at, and what the verbs that look at one have in common: --data-dir, --config, --json,
failures in one line, amounts as people read them.

The folder is the one that `topics serve` would use: --data-dir, else TOPICS_DATA_DIR, else data_dir of the file that
--config or TOPICS_CONFIG names, else ./topics-data. Of that file nothing else matters here, and nothing else in it can
keep somebody from looking.

Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any, NoReturn, TypeVar

import click
import msgspec

from topics import settings
from topics.actors.startup.datadir_lock import LockInfo, read_lock_info
from topics.cli.shared.exits import EXIT_INTERRUPTED
from topics.cli.shared.terminal import say
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.errors import ServerNotRunning, SettingsError, TopicsError

_CONFIG = "topics.config"  # in the context: the file that --config names
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class WrongSettings(click.ClickException):
    """Of the file that says where the folder is: nothing was begun."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        say(f"topics: {self.message}", err=True)


def _remember(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    ctx.meta[_CONFIG] = value


def data_dir_option(command: Decorated) -> Decorated:
    """--data-dir, and --config to find it; the command gets `data_dir`, for `folder_name`."""
    config = click.option(
        "--config",
        metavar="FILE",
        callback=_remember,
        expose_value=False,
        is_eager=True,
        help="A TOML file that says where the data folder is (TOPICS_CONFIG).",
    )
    data_dir = click.option(
        "--data-dir",
        metavar="DIR",
        help="The data folder (TOPICS_DATA_DIR; else of --config; else ./topics-data).",
    )
    return data_dir(config(command))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def folder_name(data_dir: str | None, ctx: click.Context | None = None) -> str:
    if named := data_dir or os.environ.get("TOPICS_DATA_DIR"):
        return named
    ctx = ctx or click.get_current_context(silent=True)
    file = (ctx.meta.get(_CONFIG) if ctx else None) or os.environ.get("TOPICS_CONFIG")
    try:
        return (_configured(file) if file else None) or settings.Settings().data_dir
    except SettingsError as exc:
        raise WrongSettings(str(exc)) from None


def _configured(file: str) -> str | None:
    found = settings.read_config(file)
    if (value := found.values.get("data_dir")) is None and found.faults:
        raise SettingsError(f"{found.faults[0]}; until the file is right, say where the data is with --data-dir")
    return None if value is None else str(value)


@contextmanager
def failures_told() -> Iterator[None]:
    """Whatever goes wrong inside becomes one line and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except TopicsError as exc:
        fail(str(exc))
    except BrokenPipeError:
        # Whoever read has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as exc:
        fail(f"{exc.filename or 'the data folder'}: {exc.strerror or exc}")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def fail(text: str) -> NoReturn:
    say(f"topics: {text}", err=True)
    sys.exit(1)


def server_of(data_dir: str) -> LockInfo | None:
    """Who serves the folder now."""
    try:
        return read_lock_info(data_dir)
    except ServerNotRunning:
        return None


def find_topic(folder: Folder, name: str) -> Topic:
    """By its name, or by the 16 hex digits of its id."""
    for topic in folder.topics:
        if topic.name == name:
            return topic
    for topic in folder.topics:
        if f"{topic.id:016x}" == name.lower():
            return topic
    raise TopicsError(f'there is no topic "{name}" in {folder.files.data_dir}; `topics topic ls` lists them')


def print_json(value: Any) -> None:
    say(msgspec.json.encode(value))


def bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def time_text(ms: int | None) -> str:
    if not ms:
        return "never"
    try:
        return datetime.fromtimestamp(ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"  # of damaged bytes
