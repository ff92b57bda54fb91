"""A headless Chromium for tests that look at pages, and a page that notes what goes wrong on it.

conftest.py makes its fixtures those of all tests: ask for ``open_page``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Looked:
    """A page with what it said on its console, its errors and what it asked the network for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.route(lambda url: url.startswith(("http:", "https:", "ws:", "wss:")), lambda route: route.abort())

    @property
    def network(self) -> list[str]:
        """What it asked for that is not in a file of this machine."""
        return [url for url in self.asked if not url.startswith(("file:", "data:", "blob:", "about:"))]


@pytest.fixture(scope="module")  # while it is open, its event loop runs: other tests could not start theirs
def browser() -> Iterator[Any]:
    """The browser of this machine, one for a file of tests; where there is none, what needs it is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)}")
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Looked]]:
    """A function that opens a file, with the options of a new page, such as ``color_scheme="dark"``."""
    pages = []

    def open_file(path: Path, **options: Any) -> Looked:
        looked = Looked(browser.new_page(**options))
        pages.append(looked.page)
        looked.page.goto(path.resolve().as_uri())
        return looked

    yield open_file
    for page in pages:
        page.close()
