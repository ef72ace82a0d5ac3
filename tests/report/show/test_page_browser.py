# SPDX-License-Identifier: Apache-2.0
"""The pages in a real browser, with requests of a real vLLM: axe's rules (WCAG 2.2 AA), keys, widths."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from axe_playwright_python.sync_playwright import Axe
from sample_records import RunningServer, fill_database

from tests.stack.grafana_browser import REMEDY, find_chromium, launch_browser
from ttft_otel.commands import main as cli
from ttft_otel.commands.demo import list_commands, read_recorded
from ttft_otel.model.names import keys

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_chromium() is None, reason=REMEDY),
]

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
WIDE, NARROW = 1400, 360
# Of a waterfall's rows, which are alike, the first ones.
UNFOLD = """document.querySelectorAll("details:not(.row), .row:nth-of-type(-n+3)")
    .forEach((each) => { each.open = true; })"""
SLOWEST = "demo-25"  # of the recorded requests


class RecordedPages(NamedTuple):
    """A server of the recorded requests; its kinds of pages by a name."""

    url: str
    paths: dict[str, str]


@pytest.fixture
def recorded(start_report_server: Callable[..., RunningServer], tmp_path: Path) -> RecordedPages:
    """The recorded requests, served with explanations."""
    spans = read_recorded(time.time_ns())
    path = fill_database(tmp_path / "recorded.db", spans=spans)
    words = shlex.split(list_commands(spans, path)[2])
    windows = urlencode({name[2:]: words[words.index(name) + 1] for name in ("--a", "--b")})
    (trace,) = {s.trace_id for s in spans if s.attributes.get(keys.REQUEST_ID) == SLOWEST}
    server = start_report_server(path=path, explain=cli.answer_question)
    paths = {
        "list": "/",
        "empty list": "/?model=none",
        "trace": f"/trace/{trace}",
        "missing": f"/trace/{'0' * 32}",
        "why": f"/why/{SLOWEST}",
        "why window": "/why",
        "refused": "/why/nobody",
        "diff": f"/diff?{windows}",
        "refused diff": "/diff?a=x",
    }
    return RecordedPages(server.http, paths)


def is_fault(told: Any) -> bool:
    """Whether a message of the console tells of an error; that of a page that is not there is expected."""
    return told.type == "error" and "404 (Not Found)" not in told.text


@pytest.fixture
def tab() -> Iterator[Any]:
    """A tab of a browser whose errors, also those of the Content-Security-Policy, fail the test."""
    with launch_browser() as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda told: errors.append(told.text) if is_fault(told) else None)
        yield page
        assert not errors


def describe_violations(page: Any) -> list[str]:
    """What axe finds, one line for each element."""
    found = Axe().run(page, options={"runOnly": RULES}).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:120]} {node['any'][0]['message'] if node['any'] else ''}"
        for rule in found
        for node in rule["nodes"]
    ]


@pytest.mark.full
@pytest.mark.parametrize(("theme", "width"), [("light", NARROW), ("dark", WIDE)])
def test_everybody_can_read_the_pages(
    recorded: RecordedPages, tab: Any, theme: str, width: int
) -> None:
    """No rule of axe is broken on any page with everything unfolded, and none scrolls sideways."""
    broken: dict[str, list[str]] = {}
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=theme)
    for name, path in recorded.paths.items():
        tab.goto(recorded.url + path)
        tab.evaluate(UNFOLD)
        found = describe_violations(tab)
        if tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append("the page scrolls sideways")
        if found:
            broken[name] = found
    assert not broken


@pytest.mark.full
def test_axe_sees_a_fault(recorded: RecordedPages, tab: Any) -> None:
    """The check is not blind: grey text on grey is told."""
    tab.goto(recorded.url)
    tab.evaluate("document.querySelector('h2').style.color = '#ddd'")
    assert any("color-contrast" in each for each in describe_violations(tab))


def test_a_late_request_is_reached_by_keys(recorded: RecordedPages, tab: Any) -> None:
    """Tab leads to the late dots of the picture, in sight, and Enter to why one of them was late."""
    tab.goto(recorded.url)
    for _ in range(60):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.closest('.scatter') !== null"):
            break
    name = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    ring = tab.evaluate(
        "getComputedStyle(document.activeElement.querySelector('.late')).strokeWidth"
    )
    assert ring == "3px"
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/why/*")
    request_id = name.partition(",")[0]
    assert tab.title() == f"Why? {request_id} · ttft-otel"
    assert request_id in tab.inner_text("main")


def test_the_script_runs(recorded: RecordedPages, tab: Any) -> None:
    """It hides the legs' stages that the router's sum repeats, behind a button."""
    tab.goto(recorded.url + recorded.paths["trace"])
    assert "Show the legs' stages in the router's sum" in tab.inner_text("main")
    assert tab.locator(".row.w-stage.copy.hide").count() > 0


def test_before_and_after(recorded: RecordedPages, tab: Any) -> None:
    """The form compares what it was given; bars are to one scale, and stages within chance are said so."""
    tab.goto(recorded.url + recorded.paths["diff"])
    assert "28 requests" in tab.inner_text(".answer")
    before, after = (
        sum(
            float(each.get_attribute("width").rstrip("%"))
            for each in bar.query_selector_all("rect")
        )
        for bar in tab.query_selector_all(".pair svg")
    )
    assert before == pytest.approx(100, abs=0.5) and 40 < after < 65  # 955 and 514 ms
    assert "within chance" in tab.inner_text(".evidences")
    tab.fill("input[name=a]", "5m..4m")
    tab.click("text=Compare")
    assert "ttft-otel diff --a 5m..4m --b" in tab.inner_text("main")
