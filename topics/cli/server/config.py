"""`topics config`: what a server would run with, and whether a file of settings is right. Starts nothing.

Exit codes: 0 right; 1 not, and stderr says what is wrong, one line for each; 2 the command was not understood.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click
import msgspec

from topics.errors import SettingsError
from topics.settings import Configured, Settings, load, read_config, require_keys, strangers


@click.group()
def config() -> None:
    """Check a file of settings, and show which are in effect.

    Settings come from a TOML file, from TOPICS_* variables, and from the options of `topics serve`; the later ones win:

    \b
      topics config check /etc/topics/topics.toml
      topics config show
      TOPICS_PORT=4001 topics config show --config /etc/topics/topics.toml
    """


@config.command()
@click.argument("file", required=False, metavar="[FILE]")
def check(file: str | None) -> None:
    """Say everything that is wrong with FILE (TOPICS_CONFIG if it is not given) and with the environment.

    \b
      topics config check /etc/topics/topics.toml
      TOPICS_PORT=4001 topics config check
    """
    path = file or os.environ.get("TOPICS_CONFIG")
    try:
        if path and (faults := read_config(path).faults):
            _fail(*faults)
        found = load(os.environ, config=path)
    except SettingsError as exc:
        _fail(str(exc))
    for note in notes(found):
        click.echo(f"note: {note}", err=True)
    told = sum(origin.kind not in ("default", "file") for origin in found.origins.values())
    beside = f", {told} beside it" if told else ""
    if path:
        of_file = sum(origin.kind == "file" for origin in found.origins.values())
        click.echo(f"{path}: right ({of_file} {'setting' if of_file == 1 else 'settings'} in effect{beside})")
    else:
        click.echo(f"the environment: right ({told} {'setting' if told == 1 else 'settings'}); no file is named")


@config.command()
@click.option("--config", "file", help="The file (TOPICS_CONFIG).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(file: str | None, as_json: bool) -> None:
    """Show every setting: the value that a server started like this would use, and where it came from.

    API keys are counted and not shown.

    \b
      topics config show
      topics config show --config /etc/topics/topics.toml --json | jq -r .settings.data_dir.value
    """
    try:
        found = load(os.environ, config=file)
    except SettingsError as exc:
        _fail(str(exc))
    if as_json:
        listed = {
            field: {"value": value, "from": found.origins[field].kind, "where": found.origins[field].where}
            for field, value in shown(found.settings).items()
        }
        click.echo(msgspec.json.encode({"file": found.file, "settings": listed}))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("setting", "value", "from"):
        table.add_column(title, overflow="fold")
    for field, value in shown(found.settings).items():
        origin = found.origins[field]
        table.add_row(field, _text(value), origin.where or origin.kind, style="dim" if origin.kind == "default" else "")
    Console().print(table)
    for note in notes(found):
        click.echo(f"note: {note}", err=True)


def shown(settings: Settings) -> dict[str, object]:
    """Every setting as it may be seen: of the keys only how many there are."""
    values: dict[str, object] = {field: getattr(settings, field) for field in Settings.__struct_fields__}
    return values | {
        "api_keys": len(settings.api_keys),
        "spin_us": "auto" if settings.spin_us < 0 else settings.spin_us,
    }


def notes(found: Configured) -> list[str]:
    """What is no mistake in itself, but probably not meant. Keys may come with the service, which is not here."""
    said = strangers(os.environ)
    if found.key_file is not None and (exposure := found.key_file.exposure()):
        said.append(exposure)
    try:
        require_keys(found.settings)
    except SettingsError as exc:
        said.append(f"started like this, a server would refuse: {exc}")
    return said


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(value)
    return "" if value is None else str(value)


def _fail(*lines: str) -> NoReturn:
    for line in lines:
        click.echo(f"topics: {line}", err=True)
    sys.exit(1)
