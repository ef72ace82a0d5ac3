# SPDX-License-Identifier: Apache-2.0
"""Both dashboards in a real browser before any data arrived: no panel shows an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import panel_queries
from tests.stack.grafana_browser import REMEDY, GrafanaWindow, find_chromium, launch_browser
from tests.stack.running_stack import StackStarter
from tests.stack.test_browser import NEWER


@pytest.fixture(scope="module")
def window(bench: StackStarter, grafana_home: Path) -> Iterator[GrafanaWindow]:
    """A tab before a Grafana on a stack of its own that has just started."""
    if find_chromium() is None:
        pytest.skip(REMEDY)
    stack = bench.start_stack()
    server = bench.start_grafana(grafana_home, stack.addresses)
    with server, launch_browser() as browser:
        found = GrafanaWindow(browser, server.url)
        yield found
        found.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "dashboard", panel_queries.list_dashboards(), ids=lambda dashboard: dashboard.uid
)
def test_no_data_is_no_error(
    window: GrafanaWindow, dashboard: panel_queries.CommittedDashboard
) -> None:
    """Every panel is there and none complains, in folded rows neither."""
    window.open_dashboard(dashboard.uid, tall=True)
    for row in dashboard.model["panels"]:
        if row.get("collapsed") and not NEWER & {panel["title"] for panel in row["panels"]}:
            window.unfold_row(row["title"])
    titles = {title for title, _, _ in window.list_panels()}
    assert titles == {str(panel["title"]) for panel in dashboard.list_panels()} - NEWER
    assert not window.list_panel_errors()
    assert not window.errors, window.errors
    assert not window.refused, window.refused
