# SPDX-License-Identifier: Apache-2.0
"""Both dashboards in a real Grafana and a real browser, with the 2 000 known requests behind them.

The Grafana may be older than the one that docker-compose.yml ships: panels that need a newer one say
so in their description and lie folded; here they stay folded, and test_panels.py runs their queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import panels
from tests.stack.bench import Bench
from tests.stack.browser import REMEDY, Window, chromium, launched, number
from tests.stack.filled import Filled
from tests.stack.known import Truth
from tests.stack.test_panels import BUCKET, near
from ttft_otel import stages

ROUNDED = 0.006  # what a number of three digits can hide
NEWER = {
    panel["title"]
    for dashboard in panels.dashboards()
    for panel in dashboard.panels()
    if "Needs Grafana" in panel.get("description", "")
}


@pytest.fixture(scope="module")
def window(bench: Bench, filled: Filled, grafana_home: Path) -> Iterator[Window]:
    """One tab for all tests, before a Grafana with our provisioning files on the filled stack."""
    if chromium() is None:
        pytest.skip(REMEDY)
    server = bench.grafana(grafana_home, filled.stack.at)
    with server, launched() as browser:
        found = Window(browser, server.url)
        yield found
        found.close()


def span(filled: Filled) -> dict[str, str]:
    """The time in which rows were sent, as Grafana's addresses have it."""
    return {"from": f"{(filled.start - 30) * 1000:.0f}", "to": f"{filled.end * 1000:.0f}"}


def differs(window: Window, true: Truth) -> dict[str, tuple[float | None, float]]:
    """What the top row shows that is not the rows' own: (shown, true), in seconds or as a share."""
    wanted = {
        "TTFT p50": (true.quantile(0.5), BUCKET),
        "TTFT p90": (true.quantile(0.9), BUCKET),
        "TTFT p99": (true.quantile(0.99), BUCKET),
        "Over SLO": (true.over(), 0.01 + ROUNDED),
        "Failed before a first token": (true.failed(), 0.01 + ROUNDED),
    }
    found = {title: number(window.panel(title).first, title) for title in wanted}
    return {
        title: (found[title], value)
        for title, (value, error) in wanted.items()
        if (shown := found[title]) is None or not near(shown, value, error)
    }


def undrawn(window: Window, wanted: set[str]) -> list[tuple[str, str]]:
    """Panels that are missing, should not be there, or show nothing."""
    found = window.panels()
    return [(title, "") for title in {title for title, _, _ in found} ^ wanted] + [
        (title, text)
        for title, text, drawn in found
        if "No data" in text or (text in ("", "–") and not drawn)
    ]


@pytest.mark.parametrize("dashboard", panels.dashboards(), ids=lambda dashboard: dashboard.uid)
def test_every_panel_is_drawn(window: Window, filled: Filled, dashboard: panels.Dashboard) -> None:
    """No error, no empty panel, nothing on the console, no request to anybody but this machine."""
    trace = filled.truth.slow()[0].trace_id
    window.dashboard(dashboard.uid, {**span(filled), "var-trace": trace}, tall=True)
    for row in dashboard.model["panels"]:
        if row.get("collapsed") and not NEWER & {panel["title"] for panel in row["panels"]}:
            window.unfold(row["title"])
    wanted = {str(panel["title"]) for panel in dashboard.panels()} - NEWER
    window.right(lambda: undrawn(window, wanted))
    assert not window.broken()
    assert not window.errors, window.errors
    assert not window.strangers, window.strangers
    assert not window.refused, window.refused


def test_the_top_row_shows_the_known_numbers(window: Window, filled: Filled) -> None:
    """p50, p90, p99, share over SLO and share failed, as a person reads them."""
    window.dashboard("ttft", span(filled))
    window.right(lambda: differs(window, filled.truth))


def test_a_variable_filters(window: Window, filled: Filled) -> None:
    """A model chosen by mouse changes the numbers to its own."""
    model = "Qwen/Qwen3-8B"
    window.dashboard("ttft", span(filled))
    window.choose("model", model)
    window.right(lambda: differs(window, filled.truth.where(model=model)))
    assert differs(window, filled.truth)


def test_a_dot_opens_its_trace(window: Window, filled: Filled) -> None:
    """An exemplar leads to its trace, in Tempo and on the dashboard."""
    known = {row.trace_id: row for row in filled.truth.good}
    window.dashboard("ttft", span(filled))
    links = window.dot("TTFT percentiles")
    assert {"Open in Tempo", "Show this request"} <= set(links)
    trace_id = links["Show this request"].partition("var-trace=")[2][:32]
    row = known[trace_id]
    words = (trace_id, "POST /v1/chat/completions", "ttft", stages.SERVICES[row.role])
    for link in ("Open in Tempo", "Show this request"):
        window.go(links[link], tall=True)
        window.right(lambda: window.lacks(*words))
    assert not window.errors and not window.strangers


def test_a_slow_request_opens_its_waterfall(window: Window, filled: Filled) -> None:
    """The table lists slow requests; a click on one shows its spans below, filters and time kept."""
    slow = {row.trace_id: row for row in filled.truth.slow()}
    window.dashboard("ttft", {**span(filled), "var-role": "router"}, tall=True)
    table = window.panel("Requests over the SLO")
    links = table.get_by_role("link")
    window.right(lambda: not links.count())
    listed = {text.zfill(32): link for link in links.all() if len(text := link.inner_text()) > 24}
    assert listed and set(listed) <= set(slow)
    assert all(slow[trace_id].routed for trace_id in listed)
    trace_id, link = next(iter(listed.items()))
    link.click()
    window.settle()
    window.right(lambda: window.lacks(trace_id, "router.receive", "router.hop.", "unattributed"))
    assert "var-role=router" in window.page.url and span(filled)["from"] in window.page.url
    assert not window.errors and not window.broken()
