"""--tag GLOB: one tag, or all that begin so."""

from __future__ import annotations

import click


class TagGlob:
    """A tag, or with a * at its end all tags that begin so: what a delete takes."""

    def __init__(self, text: str) -> None:
        self._prefix = text.removesuffix("*")
        self._exact = self._prefix == text
        if not self._prefix and self._exact:
            raise ValueError("is empty")
        if "*" in self._prefix:
            raise ValueError("may have one *, at its end")

    def matches(self, tag: str | None) -> bool:
        if tag is None:
            return False
        return tag == self._prefix if self._exact else tag.startswith(self._prefix)


def _glob(ctx: click.Context, param: click.Parameter, value: str | None) -> TagGlob | None:
    try:
        return None if value is None else TagGlob(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}") from None


tag_option = click.option(
    "--tag", "glob", metavar="GLOB", callback=_glob, help="Only those with this tag; user:* is all that begin so."
)
