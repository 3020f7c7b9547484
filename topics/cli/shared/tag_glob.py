"""The option --tag GLOB (tools/tag_glob.py)."""

from __future__ import annotations

import click

from topics.tools.tag_glob import TagGlob


def _glob(ctx: click.Context, param: click.Parameter, value: str | None) -> TagGlob | None:
    try:
        return None if value is None else TagGlob(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}") from None


tag_option = click.option(
    "--tag", "glob", metavar="GLOB", callback=_glob, help="Only those with this tag; user:* is all that begin so."
)
