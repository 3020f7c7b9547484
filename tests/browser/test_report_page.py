"""The page of the reports in a real browser: nothing overlaps, nothing is cut off, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from reportsample import outcome

from spark_pipeline.reports.page import page as report_page

from .chromium import SCRIPT_S, Browser, Page

# Every text of a chart against every other of the same chart, in pixels of the screen. A pixel of touching is the
# rounding of letters' boxes, which are higher than letters.
OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [words, box] of texts) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 2)
        found.push([svg.getAttribute('aria-label'), 'sticks out: ' + words]);
    }
    for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
      const [a, p] = texts[i], [b, q] = texts[j];
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 1 && high > 3) found.push([svg.getAttribute('aria-label'), a + ' / ' + b]);
    }
  }
  return found;
}"""
SHOWN = "() => [...document.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width).length"
TOO_WIDE = """() => {
  const room = document.documentElement.clientWidth;
  const inside = node => node && (node.classList.contains('scroll') || inside(node.parentElement));
  return [...document.querySelectorAll('body *')]
    .filter(node => !inside(node.parentElement) && node.getBoundingClientRect().right > room + 1)
    .map(node => node.tagName + '.' + node.className + ': ' + node.textContent.slice(0, 60));
}"""


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    report_page.write(tmp_path, outcome())
    page = browser.open((tmp_path / report_page.PAGE).as_uri())
    yield page
    page.close()


def emulate(page: Page, method: str, **parameters: Any) -> None:
    page._command(f"Emulation.{method}", SCRIPT_S, **parameters)


def resize(page: Page, width: int) -> None:
    emulate(page, "setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)


@pytest.mark.parametrize("width", [1_200, 800, 375, 340])
def test_nothing_overlaps_or_sticks_out(page: Page, width: int) -> None:
    resize(page, width)
    assert page.call(SHOWN) == 18, "each chart is shown once"
    assert page.call(OVERLAPS) == []
    assert page.call(TOO_WIDE) == []
    assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1_200, 375])
def test_letters_keep_their_size(page: Page, width: int) -> None:
    resize(page, width)
    scales: list[float] = page.run(
        "[...document.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width)"
        ".map(svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"
    )
    assert min(scales) > 0.9


def test_dark_and_paper(page: Page) -> None:
    def colours(**media: Any) -> list[str]:
        emulate(page, "setEmulatedMedia", **media)
        found: list[str] = page.run(
            "[document.body, document.querySelector('.card'), document.querySelector('h1')]"
            ".map((node, n) => getComputedStyle(node)[n < 2 ? 'backgroundColor' : 'color'])"
        )
        return found

    def light(colour: str) -> bool:
        return sum(map(int, colour[4:-1].split(","))) > 3 * 128

    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    assert list(map(light, colours(features=[]))) == [True, True, False]
    assert list(map(light, colours(**dark))) == [False, False, True]
    assert list(map(light, colours(media="print", **dark))) == [True, True, False]
    assert page.call(OVERLAPS) == []


@pytest.mark.gate
def test_nothing_is_fetched_and_nothing_runs(page: Page) -> None:
    assert page.run("performance.getEntriesByType('resource').filter(entry => !entry.name.startsWith('data:'))") == []
    assert page.run("document.scripts.length") == 0
    assert "<script>" in page.run("document.querySelector('.verdict').innerText"), "as text"
