# SPDX-License-Identifier: Apache-2.0
"""Grafana's pages in headless Chromium, driven by Playwright; test_browser.py looks through it.

A `Window` remembers what a person with open developer tools would see: errors on the console,
answers with an error, requests that leave this machine.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    Response,
    sync_playwright,
)

FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
REMEDY: Final = "no chromium; install it (Debian: apt-get install chromium)"
LOOPBACK: Final = {"127.0.0.1", "localhost", "[::1]"}
# Grafana's own marks for tests, of 10.1 and of newer ones.
_PANEL: Final = "data-testid Panel header "
_OPTION: Final = "data-testid Dashboard template variables Variable Value DropDown option text "
_ROW: Final = "data-testid dashboard-row-title-"
_DOT: Final = '[aria-label="Exemplar marker"], [data-testid="data-testid Exemplar marker"]'
_TIP: Final = ":is([role=tooltip], [data-popper-placement], [class*=tooltip i])"
NOTHING: Final[Mapping[str, str]] = {}
WIDTH: Final = 1600
LOW: Final = 900
TALL: Final = 5200
QUIET_S: Final = 1.0  # without a request, a dashboard has drawn what it will draw
LONGEST_S: Final = 60.0


def chromium() -> str | None:
    """Where the distribution's Chromium is."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser of its own, gone with the block."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Window:
    """One tab before one Grafana."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.url = url
        self.errors: list[str] = []
        self.strangers: list[str] = []
        self.refused: list[str] = []
        self._asked = time.monotonic()
        self._open: set[Request] = set()
        self.context = browser.new_context(viewport={"width": WIDTH, "height": LOW})
        self.page = self.context.new_page()
        self.watch(self.page)

    def watch(self, page: Page) -> None:
        """Listen to a tab."""
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._started)
        page.on("response", self._answered)
        page.on("requestfinished", self._ended)
        page.on("requestfailed", self._ended)

    def dashboard(self, uid: str, query: Mapping[str, str] = NOTHING, tall: bool = False) -> None:
        """Open a dashboard and wait until it has drawn: what is in view, `tall` all of it."""
        self.go(f"/d/{uid}?{urlencode({**query})}", tall)

    def go(self, path: str, tall: bool = False) -> None:
        """Open a page of this Grafana and wait until it is quiet."""
        self.page.set_viewport_size({"width": WIDTH, "height": TALL if tall else LOW})
        self.page.goto(path if "://" in path else self.url + path)
        self.settle()

    def settle(self) -> None:
        """Wait until no request is under way, for a while."""
        end = time.monotonic() + LONGEST_S
        self._asked = time.monotonic()
        while time.monotonic() < end:
            self.page.wait_for_timeout(100)
            if not self._open and time.monotonic() - self._asked > QUIET_S:
                return
        raise AssertionError(f"still loading: {[each.url for each in self._open]}")

    def right(self, wrong: Callable[[], object]) -> None:
        """Wait until nothing is wrong any more: a busy machine draws late."""
        end = time.monotonic() + LONGEST_S
        while (found := wrong()) and time.monotonic() < end:
            self.page.wait_for_timeout(500)
        assert not found, found

    def panel(self, title: str) -> Locator:
        """A panel by its title; there may be two of one title."""
        return self.page.get_by_test_id(f"{_PANEL}{title}")

    def panels(self) -> list[tuple[str, str, bool]]:
        """Of every panel: its title, its text below that, and whether anything else is drawn."""
        return [
            (
                title := (each.get_attribute("data-testid") or "").removeprefix(_PANEL),
                each.inner_text().removeprefix(title).strip(),
                each.locator("canvas").count() > 0,
            )
            for each in self.page.locator(f'[data-testid^="{_PANEL}"]').all()
        ]

    def lacks(self, *words: str) -> list[str]:
        """Which of these words the page does not show."""
        text = self.page.inner_text("body")
        return [word for word in words if word not in text]

    def broken(self) -> list[str]:
        """What panels complain about."""
        marks = self.page.locator(
            '[data-testid="data-testid Panel status error"], [aria-label="Panel header error"]'
        )
        return [mark.inner_text() or "an error mark" for mark in marks.all()]

    def unfold(self, title: str) -> None:
        """Open a folded row."""
        self.page.get_by_test_id(f"{_ROW}{title}").click()
        self.settle()

    def choose(self, variable: str, value: str) -> None:
        """Give a variable one value, by mouse."""
        self.page.locator(f"#var-{variable}").click()
        self.page.get_by_test_id(f"{_OPTION}{value}").click()
        self.page.mouse.click(2, 300)  # beside it: that closes the list
        self.settle()

    def dot(self, title: str) -> dict[str, str]:
        """Text and address of the links that appear under the mouse on a panel's exemplar."""
        marks = self.panel(title).locator(_DOT)
        marks.first.hover(force=True)
        links = self.page.locator(f"{_TIP} a")
        links.first.wait_for()
        return {link.inner_text(): str(link.evaluate("each => each.href")) for link in links.all()}

    def height(self) -> int:
        """How tall the drawn dashboard is."""
        found: Any = self.page.evaluate(
            "Math.max(...[...document.querySelectorAll('.react-grid-layout')]"
            ".map(each => each.getBoundingClientRect().height))"
        )
        return int(found)

    def close(self) -> None:
        """Close the tab."""
        self.context.close()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _started(self, request: Request) -> None:
        self._asked = time.monotonic()
        address = urlsplit(request.url)
        if address.scheme in ("data", "blob"):
            return
        self._open.add(request)
        if address.hostname not in LOOPBACK:
            self.strangers.append(request.url)

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.refused.append(f"{response.status} {response.url}")

    def _ended(self, request: Request) -> None:
        self._asked = time.monotonic()
        self._open.discard(request)


def number(panel: Locator, title: str) -> float | None:
    """The number that a panel shows: of time in seconds, of percent a share; None while it shows none."""
    text = panel.inner_text().removeprefix(title)
    found = re.search(r"(-?[\d.,]+)\s*(µs|ms|s|mins?|%)?", text)
    scale = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "mins": 60.0, "%": 0.01}
    return float(found[1].replace(",", "")) * scale.get(found[2] or "", 1.0) if found else None
