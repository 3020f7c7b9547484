"""What a terminal is shown. Names, nodes, tags, metas, data and error texts come from clients, servers and files: a
terminal must show them and never obey them. Only a terminal: what is piped stays byte for byte.

Every verb prints such text with `say`, `shown`, `cell` or `stdout`. Where colours are wanted, each part goes through
`harmless` before it is coloured.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, BinaryIO, Protocol

import click

if TYPE_CHECKING:
    from rich.text import Text

# Characters that a terminal would obey instead of showing, and halves of a pair, which are bytes that are no UTF-8. In
# JSON they occur in strings alone, where an escape says the same.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shown(text: str, *, err: bool = False) -> str:
    """Harmless if stdout, or with `err` stderr, is a terminal."""
    return harmless(text) if (sys.stderr if err else sys.stdout).isatty() else text


def say(text: str | bytes, *, err: bool = False) -> None:
    """One line: a line break within it is escaped as well, so that no text passes for a line of its own."""
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        text = harmless(text.decode(errors="replace") if isinstance(text, bytes) else text)
    click.echo(text, err=err)


def cell(text: str, style: str = "") -> Text:
    """For a table of rich: text, not markup."""
    from rich.text import Text

    return Text(shown(text), style)


def plain(text: str, *, err: bool = False) -> str:
    """For titles and descriptions of rich, which read markup."""
    from rich.markup import escape

    return escape(shown(text, err=err))


class Output(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> None: ...


class _Screen:
    """Whole lines, each harmless."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, data: bytes, /) -> None:
        lines = data.decode(errors="replace").split("\n")
        self._out.write("\n".join(map(harmless, lines)).encode())

    def flush(self) -> None:
        self._out.flush()


def stdout() -> Output:
    """For lines as bytes, each write ending with one."""
    return _Screen(sys.stdout.buffer) if sys.stdout.isatty() else sys.stdout.buffer
