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


def shown(window: Window) -> dict[str, float]:
    """The numbers of the top row, in seconds or as a share."""
    titles = ("TTFT p50", "TTFT p90", "TTFT p99", "Failed before a first token")
    found = {title: number(window.panel(title), title) for title in titles}
    return found | {"Over SLO": number(window.panel("Over SLO").first, "Over SLO")}


def right(found: dict[str, float], true: Truth) -> bool:
    """Whether these are the rows' own."""
    quantiles = {"TTFT p50": 0.5, "TTFT p90": 0.9, "TTFT p99": 0.99}
    return (
        all(near(found[name], true.quantile(at), BUCKET) for name, at in quantiles.items())
        and near(found["Over SLO"], true.over(), 0.01 + ROUNDED)
        and abs(found["Failed before a first token"] - true.failed()) <= ROUNDED * true.failed()
    )


@pytest.mark.parametrize("dashboard", panels.dashboards(), ids=lambda dashboard: dashboard.uid)
def test_every_panel_is_drawn(window: Window, filled: Filled, dashboard: panels.Dashboard) -> None:
    """No error, no empty panel, nothing on the console, no request to anybody but this machine."""
    trace = filled.truth.slow()[0].trace_id
    window.dashboard(dashboard.uid, {**span(filled), "var-trace": trace}, tall=True)
    for row in dashboard.model["panels"]:
        if row.get("collapsed") and not NEWER & {panel["title"] for panel in row["panels"]}:
            window.unfold(row["title"])
    found = window.panels()
    wanted = {str(panel["title"]) for panel in dashboard.panels()} - NEWER
    assert {title for title, _, _ in found} == wanted
    assert not [
        (title, text)
        for title, text, drawn in found
        if "No data" in text or (text in ("", "–") and not drawn)
    ]
    assert not window.broken()
    assert not window.errors, window.errors
    assert not window.strangers, window.strangers
    assert not window.refused, window.refused


def test_the_top_row_shows_the_known_numbers(window: Window, filled: Filled) -> None:
    """p50, p90, p99, share over SLO and share failed, as a person reads them."""
    window.dashboard("ttft", span(filled))
    found = shown(window)
    assert right(found, filled.truth), found


def test_a_variable_filters(window: Window, filled: Filled) -> None:
    """A model chosen by mouse changes the numbers to its own."""
    model = "Qwen/Qwen3-8B"
    window.dashboard("ttft", span(filled))
    window.choose("model", model)
    found = shown(window)
    assert right(found, filled.truth.where(model=model)), found
    assert not right(found, filled.truth)


def test_a_dot_opens_its_trace(window: Window, filled: Filled) -> None:
    """An exemplar leads to its trace, in Tempo and on the dashboard."""
    known = {row.trace_id: row for row in filled.truth.good}
    window.dashboard("ttft", span(filled))
    links = window.dot("TTFT percentiles")
    assert {"Open in Tempo", "Show this request"} <= set(links)
    trace_id = links["Show this request"].partition("var-trace=")[2][:32]
    row = known[trace_id]
    for link in ("Open in Tempo", "Show this request"):
        window.go(links[link])
        text = window.page.inner_text("body")
        assert trace_id in text
        assert "POST /v1/chat/completions" in text and "ttft" in text
        assert ("ttft-otel-router" in text) == row.routed
    assert not window.errors and not window.strangers


def test_a_slow_request_opens_its_waterfall(window: Window, filled: Filled) -> None:
    """The table lists slow requests; a click on one shows its spans below, filters and time kept."""
    slow = {row.trace_id: row for row in filled.truth.slow()}
    window.dashboard("ttft", {**span(filled), "var-role": "router"}, tall=True)
    links = window.panel("Requests over the SLO").get_by_role("link")
    listed = {text.zfill(32): link for link in links.all() if len(text := link.inner_text()) > 24}
    assert listed and set(listed) <= set(slow)
    assert all(slow[trace_id].routed for trace_id in listed)
    trace_id, link = next(iter(listed.items()))
    link.click()
    window.settle()
    text = window.panel("Trace").inner_text()
    assert trace_id in text
    assert "router.receive" in text or "ttft" in text
    assert "var-role=router" in window.page.url and span(filled)["from"] in window.page.url
    assert not window.errors and not window.broken()
