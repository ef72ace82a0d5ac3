# SPDX-License-Identifier: Apache-2.0
"""Both dashboards in a real browser before anybody has sent anything: empty, and not a single error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import panels
from tests.stack.bench import Bench
from tests.stack.browser import REMEDY, Window, chromium, launched
from tests.stack.test_browser import NEWER


@pytest.fixture(scope="module")
def window(bench: Bench, grafana_home: Path) -> Iterator[Window]:
    """A tab before a Grafana on a stack of its own that has just started."""
    if chromium() is None:
        pytest.skip(REMEDY)
    stack = bench.stack()
    server = bench.grafana(grafana_home, stack.at)
    with server, launched() as browser:
        found = Window(browser, server.url)
        yield found
        found.close()


@pytest.mark.parametrize("dashboard", panels.dashboards(), ids=lambda dashboard: dashboard.uid)
def test_no_data_is_no_error(window: Window, dashboard: panels.Dashboard) -> None:
    """Every panel is there and none complains, in folded rows neither."""
    window.dashboard(dashboard.uid, tall=True)
    for row in dashboard.model["panels"]:
        if row.get("collapsed") and not NEWER & {panel["title"] for panel in row["panels"]}:
            window.unfold(row["title"])
    titles = {title for title, _, _ in window.panels()}
    assert titles == {str(panel["title"]) for panel in dashboard.panels()} - NEWER
    assert not window.broken()
    assert not window.errors, window.errors
    assert not window.refused, window.refused
