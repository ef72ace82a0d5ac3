# SPDX-License-Identifier: Apache-2.0
"""The page: charts that say what the JSON says, drawn by a real browser that asks for nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from bench.conftest import RunBench
from bench.scripted_server import ServerScript, run_scripted_server
from bench.test_request_statistics import build_result, build_target_document
from ttft_otel.bench.html_report import render_page

SLOW_STAGES = {"prefill.queue": 150.0, "prefill.compute": 40.0}
USUAL_STAGES = {"prefill.queue": 5.0, "prefill.compute": 40.0}


def wrap_target(target: Any) -> Any:
    """A document with one target."""
    empty: dict[str, Any] = {
        "version": "1",
        "load": {"rate": 4.0},
        "comparison": None,
        "uncompared": None,
    }
    return {**empty, "targets": [target]}


def build_mixed_target() -> Any:
    """99 requests of 50 ms and one of 200."""
    usual = [build_result(n, [50, 60], USUAL_STAGES) for n in range(99)]
    return build_target_document([*usual, build_result(99, [200, 210], SLOW_STAGES)], {"ttft": 100})


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A real browser; no event loop of another kind can run meanwhile."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if not executable:
        pytest.skip("no chromium; install it (Debian: apt-get install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_ends() -> None:
    """Both bars have the stages' own widths: they add up to the mean TTFT of their requests."""
    target = build_mixed_target()
    ends = target["summary"]["ends_ms"]

    assert sum(ends["p50"].values()) == 50 and sum(ends["p99"].values()) == 200
    text = render_page(wrap_target(target))
    widths = re.findall(r'class="s-prefill-queue" x="[\d.]+%" y="[\d.]+%" width="([\d.]+)%', text)
    assert [float(each) for each in widths] == [5 / 200 * 100, 150 / 200 * 100]


def test_spread() -> None:
    """Each request is in one bar of the distribution, and is one dot over time."""
    text = render_page(wrap_target(build_mixed_target()))

    assert sum(map(int, re.findall(r"(\d+) requests</title>", text))) == 100
    assert text.count("<circle") == 100


def test_bounded() -> None:
    """Of very many requests not every one is a dot."""
    text = render_page(
        wrap_target(build_target_document([build_result(n, [50]) for n in range(9000)]))
    )

    assert 2000 < text.count("<circle") <= 4000


def test_escaped() -> None:
    """What a server says is text on the page, not a part of it."""
    target = build_mixed_target()
    target["runs"][0]["failures"] = {"HTTP 500": 1}
    target["runs"][0]["complaints"] = {"HTTP 500": "<script>alert(1)</script>"}

    assert "<script" not in render_page(wrap_target(target))


def test_empty() -> None:
    """A run without any success is a page that says so, without charts."""
    text = render_page(wrap_target(build_target_document([])))

    assert "no request succeeded" in text and "<circle" not in text


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser(bench: RunBench, tmp_path: Path, scheme: Any) -> None:
    """A browser draws both sides of --ab and the comparison, without an error or another request."""
    file = tmp_path / "page.html"
    script = ServerScript(first_token_ms=[10.0, 20.0], queue_ms=[5.0], token_count=2, gap_ms=1.0)
    with run_scripted_server(script) as one, run_scripted_server(script) as other:
        words = ("--ab", one.url, other.url, "--concurrency 4 --requests 24")
        bench(*words, "--html", file)
    with open_browser() as browser:
        opened = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 900})
        said: list[str] = []
        asked: list[str] = []
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto(file.as_uri())
        charts = opened.locator("svg[role=img]")
        boxes = [charts.nth(place).bounding_box() for place in range(charts.count())]
        style = "getComputedStyle(document.body)"
        ink, ground = (opened.evaluate(f"{style}.{n}") for n in ("color", "backgroundColor"))
        compared = opened.get_by_text("B minus A").count()

    assert len(boxes) == 2 * 3 and compared == 1
    assert all(box and box["width"] > 600 and box["height"] > 80 for box in boxes)
    assert abs(compute_lightness(ink) - compute_lightness(ground)) > 150, "text can be read"
    assert (said, asked) == ([], [file.as_uri()])


def compute_lightness(color: str) -> float:
    """0 to 255, of `rgb(r, g, b)`."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3
