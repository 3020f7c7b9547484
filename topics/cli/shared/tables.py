"""Tables that people can read at any width.

A terminal that is too narrow for all columns gets the more important ones, and a line that names the others; --wide
shows all. Names are never cut: a long one takes a second line. What is piped somewhere is whole, whatever the width of
the terminal that it was typed in, unless COLUMNS says one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from topics.cli.shared.terminal import plain, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_FOLDED = 18  # a column that may be folded is never narrower
_WHOLE = 10_000  # columns of a file or a pipe

wide_option = click.option("--wide", is_flag=True, help="All columns, however narrow the terminal is.")


class Column(msgspec.Struct, frozen=True):
    title: str
    rank: int = 0  # of those that don't fit the highest goes first; 0 never goes
    justify: Literal["left", "right"] = "right"
    folds: bool = False  # may take several lines
    at_least: int = 0  # its width, so that columns don't come and go while figures change


def console() -> Console:
    """On stdout, as wide as whoever reads it can see."""
    from rich.console import Console

    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(width=_WHOLE) if piped else Console()


def fitted(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Text]],
    *,
    width: int,
    compact: bool = False,
) -> tuple[Table, list[str]]:
    """A table of what fits into `width`, and the titles of what does not. `compact` has no frame."""
    from rich.table import Table

    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [_width(column, [row[at] for row in texts]) for at, column in enumerate(columns)]
    gap, edge = (2, 0) if compact else (3, 1)
    shown = list(range(len(columns)))
    while sum(widths[at] + gap for at in shown) + edge > width:
        least = max(shown, key=lambda at: (columns[at].rank, at))
        if not columns[least].rank:
            break
        shown.remove(least)
    frame = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)} if compact else {}
    table = Table(**frame)  # type: ignore[arg-type]
    for at in shown:
        column = columns[at]
        table.add_column(
            column.title,
            justify=column.justify,
            no_wrap=not column.folds,
            overflow="fold",
            min_width=widths[at] if not column.folds else None,
        )
    for row in texts:
        table.add_row(*(row[at] for at in shown))
    return table, [column.title for at, column in enumerate(columns) if at not in shown]


def show(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Text]],
    *,
    wide: bool = False,
    heading: str = "",
) -> None:
    out = console()
    if wide:
        out.width = _WHOLE
    if heading:
        out.print(plain(heading), highlight=False)
    table, left_out = fitted(columns, rows, width=out.width)
    out.print(table)
    if left_out:
        out.print(f"not shown: {', '.join(left_out)}; --wide shows all", style="dim", highlight=False)


def turned(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, width: int) -> list[Table]:
    """The same table if it fits; else turned round, a column for each row, as many tables as that takes."""
    whole, left_out = fitted([msgspec.structs.replace(column, rank=1) for column in columns], rows, width=width)
    if not left_out:
        return [whole]
    texts = [[_text(cell) for cell in row] for row in rows]
    names = max(len(column.title) for column in columns) + 3
    batches: list[list[list[Text]]] = []
    room = 0
    for row in texts:
        needed = max(cell.cell_len for cell in row) + 3
        if not batches or room < needed:
            batches.append([])
            room = width - names - 1
        batches[-1].append(row)
        room -= needed
    return [_turned(columns, batch) for batch in batches]


def _turned(columns: Sequence[Column], rows: list[list[Text]]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column(columns[0].title)
    for row in rows:
        table.add_column(row[0], justify="right", no_wrap=True)
    for at, column in enumerate(columns[1:], 1):
        table.add_row(column.title, *(row[at] for row in rows))
    return table


def _text(cell: str | Text) -> Text:
    from rich.text import Text

    if isinstance(cell, str):
        return Text.from_markup(shown(cell))
    return cell if (text := shown(cell.plain)) == cell.plain else Text(text, cell.style)


def _width(column: Column, cells: list[Text]) -> int:
    widest = max([len(column.title), column.at_least, *(cell.cell_len for cell in cells)])
    return min(widest, max(_FOLDED, len(column.title))) if column.folds else widest
