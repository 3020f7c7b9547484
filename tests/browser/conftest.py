"""One Chromium for all tests, a server and tabs for each. Without Chromium they are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2e.server import Server

from .chromium import Browser, Page, find_chromium

Open = Callable[..., Page]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium (`make browser` does it, if run by root)")
    browser = Browser(program, tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


@pytest.fixture
def server(browser: Browser, start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Open]:
    """Open tabs on an answer of the server, so that their scripts are of its origin; all are closed at the end."""
    pages: list[Page] = []

    def open_tab(url: str | None = None) -> Page:
        pages.append(browser.open(url or f"{server.url}/v0/health"))
        return pages[-1]

    yield open_tab
    for page in pages:
        page.close()


@pytest.fixture
def page(open_page: Open) -> Page:
    return open_page()
