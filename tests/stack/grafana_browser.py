# SPDX-License-Identifier: Apache-2.0
"""Grafana's pages in headless Chromium, driven by Playwright, for test_browser.py.

A `GrafanaWindow` records what the developer tools would show: errors on the console, responses with an
error, and requests that leave this machine.
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
    Request,
    Response,
    TimeoutError,
    sync_playwright,
)

FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers give /dev/shm 64 MB: a page of many panels takes more
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
_ROW: Final = "data-testid dashboard-row-title-"
_DOT: Final = '[aria-label="Exemplar marker"], [data-testid="data-testid Exemplar marker"]'
_TIP: Final = ":is([role=tooltip], [data-popper-placement], [class*=tooltip i])"
NO_QUERY: Final[Mapping[str, str]] = {}
WIDTH: Final = 1600
LOW_HEIGHT: Final = 900
TALL_HEIGHT: Final = 5200
QUIET_S: Final = 1.0  # without a request, a dashboard has drawn what it will draw
MAX_WAIT_S: Final = 60.0


def find_chromium() -> str | None:
    """Path of the distribution's Chromium."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def launch_browser() -> Iterator[Browser]:
    """A browser that is closed at the end of the block."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class GrafanaWindow:
    """One tab that shows pages of one Grafana."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.url = url
        self.errors: list[str] = []
        self.strangers: list[str] = []
        self.refused: list[str] = []
        self._asked = time.monotonic()
        self._open: set[Request] = set()
        self.context = browser.new_context(viewport={"width": WIDTH, "height": LOW_HEIGHT})
        self.context.set_default_timeout(MAX_WAIT_S * 1000)
        self.page = self.context.new_page()
        page = self.page
        page.on("console", self._record_console_message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._record_request)
        page.on("response", self._record_response)
        page.on("requestfinished", self._forget_request)
        page.on("requestfailed", self._forget_request)

    def open_dashboard(
        self, uid: str, query: Mapping[str, str] = NO_QUERY, tall: bool = False
    ) -> None:
        """Open a dashboard and wait until the visible panels are drawn; with `tall`, all panels."""
        self.open_path(f"/d/{uid}?{urlencode({**query})}", tall)
        if not self._has_panels():
            self.page.reload()
            self.wait_until_quiet()
            assert self._has_panels(), (
                f"no panel after {MAX_WAIT_S:.0f} s and a reload; text: "
                f"{self.page.inner_text('body')[:500]!r}; console: {self.errors}; "
                f"refused: {self.refused}; elsewhere: {self.strangers}"
            )

    def open_path(self, path: str, tall: bool = False) -> None:
        """Open a page of this Grafana and wait until it has no request under way."""
        self.page.set_viewport_size({"width": WIDTH, "height": TALL_HEIGHT if tall else LOW_HEIGHT})
        self.page.goto(path if "://" in path else self.url + path)
        self.wait_until_quiet()

    def wait_until_quiet(self) -> None:
        """Wait until no request is under way, for a while."""
        end = time.monotonic() + MAX_WAIT_S
        self._asked = time.monotonic()
        while time.monotonic() < end:
            self.page.wait_for_timeout(100)
            if not self._open and time.monotonic() - self._asked > QUIET_S:
                return
        raise AssertionError(f"still loading: {[each.url for each in self._open]}")

    def _has_panels(self) -> bool:
        """Wait for the first panel: on a busy machine the page is quiet long before it draws."""
        try:
            self.page.locator(f'[data-testid^="{_PANEL}"]').first.wait_for()
        except TimeoutError:
            return False
        return True

    def wait_until_right(self, wrong: Callable[[], object]) -> None:
        """Wait until `check` finds nothing wrong: on a busy machine panels are drawn late."""
        end = time.monotonic() + MAX_WAIT_S
        while (found := wrong()) and time.monotonic() < end:
            self.page.wait_for_timeout(500)
        assert not found, found

    def find_panel(self, title: str) -> Locator:
        """A panel by its title; there may be two of one title."""
        return self.page.get_by_test_id(f"{_PANEL}{title}")

    def list_panels(self) -> list[tuple[str, str, bool]]:
        """Of every panel: its title, its text below that, and whether anything else is drawn."""
        return [
            (
                title := (each.get_attribute("data-testid") or "").removeprefix(_PANEL),
                each.inner_text().removeprefix(title).strip(),
                each.locator("canvas").count() > 0,
            )
            for each in self.page.locator(f'[data-testid^="{_PANEL}"]').all()
        ]

    def list_missing_words(self, *words: str) -> list[str]:
        """Which of these words the page does not show."""
        text = self.page.inner_text("body")
        return [word for word in words if word not in text]

    def list_panel_errors(self) -> list[str]:
        """What panels complain about."""
        marks = self.page.locator(
            '[data-testid="data-testid Panel status error"], [aria-label="Panel header error"]'
        )
        return [mark.inner_text() or "an error mark" for mark in marks.all()]

    def unfold_row(self, title: str) -> None:
        """Open a folded row."""
        self.page.get_by_test_id(f"{_ROW}{title}").click()
        self.wait_until_quiet()

    def hover_exemplar(self, title: str) -> dict[str, str]:
        """Text and address of the links that appear under the mouse on a panel's exemplar."""
        marks = self.find_panel(title).locator(_DOT)
        marks.first.hover(force=True)
        links = self.page.locator(f"{_TIP} a")
        links.first.wait_for()
        return {link.inner_text(): str(link.evaluate("each => each.href")) for link in links.all()}

    def measure_height(self) -> int:
        """How tall the drawn dashboard is."""
        found: Any = self.page.evaluate(
            "Math.max(...[...document.querySelectorAll('.react-grid-layout')]"
            ".map(each => each.getBoundingClientRect().height))"
        )
        return int(found)

    def close(self) -> None:
        """Close the tab."""
        self.context.close()

    def _record_console_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _record_request(self, request: Request) -> None:
        self._asked = time.monotonic()
        address = urlsplit(request.url)
        if address.scheme in ("data", "blob"):
            return
        self._open.add(request)
        if address.hostname not in LOOPBACK:
            self.strangers.append(request.url)

    def _record_response(self, response: Response) -> None:
        if response.status >= 400:
            self.refused.append(f"{response.status} {response.url}")

    def _forget_request(self, request: Request) -> None:
        self._asked = time.monotonic()
        self._open.discard(request)


def read_panel_number(panel: Locator, title: str) -> float | None:
    """The number that a panel shows: seconds for times, a share for percent; None while it shows none."""
    text = panel.inner_text().removeprefix(title)
    found = re.search(r"(-?[\d.,]+)\s*(µs|ms|s|mins?|%)?", text)
    scale = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "mins": 60.0, "%": 0.01}
    return float(found[1].replace(",", "")) * scale.get(found[2] or "", 1.0) if found else None
