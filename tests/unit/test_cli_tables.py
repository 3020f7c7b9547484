"""Tables at any width: what fits is shown, the least important goes first, nothing is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from topics.cli.shared.tables import Column, fitted, turned

COLUMNS = (
    Column("name", justify="left", folds=True),
    Column("one", 3),
    Column("two", 1),
    Column("three", 2),
)
NAME = "a.name.of.thirty.six.letters.as.it.is"
ROWS: list[list[str | Text]] = [[NAME, "11111", "22222", "[red]33333[/]"], [Text("[b]"), "", "2", ""]]


def drawn(shown: RenderableType, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    ("width", "left_out"),
    [(80, []), (46, []), (40, ["one"]), (32, ["one", "three"]), (22, ["one", "two", "three"])],
)
def test_the_least_important_columns_go_first(width: int, left_out: list[str], compact: bool) -> None:
    table, missing = fitted(COLUMNS, ROWS, width=width, compact=compact)
    if not compact:
        assert missing == left_out
    lines = drawn(table, width)
    assert max(map(len, lines)) <= width
    text = "".join(lines)
    assert "…" not in text
    for title, cell in (("one", "11111"), ("two", "22222"), ("three", "33333")):
        assert (title in text) == (cell in text) == (title not in missing)
    assert "[b]" in text  # a name is no markup


def test_a_long_name_is_folded_and_whole() -> None:
    lines = drawn(fitted(COLUMNS, ROWS, width=50)[0], 50)
    cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(cells[:-1]) == NAME


def test_columns_do_not_come_and_go_with_their_figures() -> None:
    columns = (Column("a"), Column("b", 1, at_least=8))
    for cell in ("1", "12345678"):
        assert fitted(columns, [["x", cell]], width=16)[1] == []
        assert fitted(columns, [["x", cell]], width=15)[1] == ["b"]


def test_a_table_is_turned_round_where_it_does_not_fit() -> None:
    columns = (Column("shard"), *(Column(f"figure {n}") for n in range(9)))
    rows = [[str(shard), *(f"{shard}.{n}" for n in range(9))] for shard in range(8)]
    (whole,) = turned(columns, rows, width=200)
    assert len(whole.columns) == 10
    tables = turned(columns, rows, width=30)
    assert len(tables) > 1
    text = ""
    for table in tables:
        lines = drawn(table, 30)
        assert max(map(len, lines)) <= 30
        text += "".join(lines)
    assert all(cell in text for row in rows for cell in row)
