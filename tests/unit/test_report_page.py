"""The page as text: it holds everything, escapes everything, needs nothing. tests/browser looks at it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("jinja2")

from reportsample import EVIL, NOW_MS, outcome

from spark_pipeline.reports.outcome import Outcome
from spark_pipeline.reports.page import page
from spark_pipeline.reports.report import Kind, Result

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Text by the tags around it; fails on tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def within(self, tag: str) -> list[str]:
        return [text for around, text in self.texts if around == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return page.render(outcome())


@pytest.fixture(scope="module")
def reader(text: str) -> Reader:
    return Reader(text)


def test_it_needs_nothing_else(text: str, reader: Reader) -> None:
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    for tag, attributes in reader.tags:
        assert tag not in ("script", "img", "iframe", "object")
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        if tag in ("a", "link"):
            assert str(attributes["href"]).startswith(("#", "data:", "summary.json"))


def test_names_are_text(text: str, reader: Reader) -> None:
    assert "<script" not in text
    assert EVIL in reader.within("td")
    assert EVIL in reader.within("li"), "a legend"
    assert f"This report failed: {EVIL}" in reader.within("p")


def test_the_worst_comes_first(reader: Reader) -> None:
    said = [text for text in reader.within("span") if text != ""]
    order = [
        "It is 17.",
        "A block is damaged",
        f"This report failed: {EVIL}",
        "Silent for a day",
        "A threshold applied",
    ]
    places = [next(n for n, line in enumerate(said) if line.startswith(words)) for words in order]
    assert places == sorted(places)
    assert "2 things need attention, 1 report failed, 2 things to know" in reader.within("p")


def test_every_section_is_linked(reader: Reader) -> None:
    sections = [str(attributes["id"]) for tag, attributes in reader.tags if tag == "section" and "id" in attributes]
    links = {str(attributes["href"]) for tag, attributes in reader.tags if tag == "a"}
    assert sections == ["traffic", "letters"]
    assert {f"#{name}" for name in sections} <= links


def test_tables_say_what_they_hold(reader: Reader) -> None:
    cells = reader.within("td")
    for text in ("3,000,000", "1.9 GiB", "12 ms", "2026-11-16 21:13:25", "33.3 %", "0.5", "–"):
        assert text in cells
    titles = [attributes.get("title") for tag, attributes in reader.tags if tag == "td"]
    assert "2,000,000,000" in titles, "the exact number of bytes"


def test_tiles(reader: Reader) -> None:
    assert reader.within("dt") == ["records", "day bytes", "wait p95", "first", "change", "word"]
    assert reader.within("dd")[:5] == ["123,456,789", "2 GiB", "8.1 s", "2026-11-15 21:13:25", "-12.3 %"]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("records", 5, "count"),
        ("days_to_full", 2.5, "number"),
        ("live_bytes", 5, "bytes"),
        ("bytes", 5, "bytes"),
        ("oldest_ms", 5_000, "ms"),
        ("oldest_ms", NOW_MS, "time"),
        ("first_hour", NOW_MS, "time"),
        ("records", NOW_MS, "count"),
        ("change_percent", 2.5, "percent"),
        ("ok", True, "text"),
    ],
)
def test_kinds_of_a_summary(name: str, value: Any, kind: Kind) -> None:
    assert page.kind_of(name, value) == kind


def test_a_quiet_run() -> None:
    quiet = Outcome(run="r", version="1", folder="/d", now_ms=NOW_MS, since_ms=None, seconds=1.0, entries=[])
    reader = Reader(page.render(quiet))
    assert "Nothing unusual" in reader.within("p")
    entry = msgspec.structs.replace(outcome().entries[0], result=Result(summary={}))
    Reader(page.render(msgspec.structs.replace(quiet, entries=[entry])))


def test_it_replaces_the_old_one_at_once(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.html").write_text("old")
    page.write(tmp_path, outcome())
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == text
