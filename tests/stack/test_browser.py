# SPDX-License-Identifier: Apache-2.0
"""Both dashboards in a real Grafana and a real browser, with the 2 000 known requests behind them; files that
are provisioned, or added to a Grafana that runs.

The Grafana may be older than the one that docker-compose.yml ships: panels that need a newer one say
so in their description and lie folded; here they stay folded, and test_panels.py runs their queries.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result
from playwright.sync_api import Locator

from grafana.build import request_panels
from lab import free_ports
from lab.server_commands import ServerCommand
from lab.stack import grafana_import, grafana_server, stack_parts
from lab.stack.stack_parts import StackAddresses
from tests.stack import filled_stack
from tests.stack.filled_stack import FilledStack
from tests.stack.grafana_browser import (
    REMEDY,
    GrafanaWindow,
    find_chromium,
    launch_browser,
    read_panel_number,
)
from tests.stack.known_requests import LEFT_ERRORS, SERVER_ERRORS, KnownTruth
from tests.stack.running_stack import RunningBackend, StackPart, StackStarter
from tests.stack.test_panels import BUCKET, is_near
from ttft_otel.commands.stack import dashboards
from ttft_otel.model import stages
from ttft_otel.stack import stack_queries

ROUNDED = 0.006  # what a number of three digits can hide
NEWER = {
    panel["title"]
    for dashboard in filled_stack.list_dashboards()
    for panel in dashboard.list_panels()
    if "Needs Grafana" in panel.get("description", "")
}


@contextmanager
def open_window(grafana: RunningBackend) -> Iterator[GrafanaWindow]:
    """A tab before a Grafana."""
    if find_chromium() is None:
        pytest.skip(REMEDY)
    with launch_browser() as browser:
        found = GrafanaWindow(browser, grafana.url)
        yield found
        found.close()


@pytest.fixture(scope="module")
def provisioned(
    bench: StackStarter, filled: FilledStack, grafana_home: Path | None
) -> Iterator[RunningBackend]:
    """A Grafana with our provisioning files, on the filled stack."""
    with bench.start_grafana(grafana_home, filled.stack.addresses) as started:
        yield started


@pytest.fixture(scope="module")
def window(provisioned: RunningBackend) -> Iterator[GrafanaWindow]:
    """One tab for all tests."""
    with open_window(provisioned) as found:
        yield found


def get_sent_range(filled: FilledStack) -> dict[str, str]:
    """The time in which rows were sent, as Grafana's addresses have it."""
    return {"from": f"{(filled.start - 30) * 1000:.0f}", "to": f"{filled.end * 1000:.0f}"}


def find_differences(
    window: GrafanaWindow, true: KnownTruth
) -> dict[str, tuple[float | None, float]]:
    """What the top row shows that is not the rows' own: (shown, true), in seconds or as a share."""
    wanted = {
        "TTFT p50": (true.compute_quantile_s(0.5), BUCKET),
        "TTFT p90": (true.compute_quantile_s(0.9), BUCKET),
        "TTFT p99": (true.compute_quantile_s(0.99), BUCKET),
        "Over SLO": (true.compute_share_over(), 0.01 + ROUNDED),
        "Server failed": (true.compute_share_ended(SERVER_ERRORS), 0.01 + ROUNDED),
        "Client left": (true.compute_share_ended(LEFT_ERRORS), 0.01 + ROUNDED),
    }
    found = {title: read_panel_number(window.find_panel(title).first, title) for title in wanted}
    return {
        title: (found[title], value)
        for title, (value, error) in wanted.items()
        if (shown := found[title]) is None or not is_near(shown, value, error)
    }


def find_undrawn_panels(window: GrafanaWindow, wanted: set[str]) -> list[tuple[str, str]]:
    """Panels that are missing, should not be there, or show nothing."""
    found = window.list_panels()
    return [(title, "") for title in {title for title, _, _ in found} ^ wanted] + [
        (title, text)
        for title, text, drawn in found
        if "No data" in text or (text in ("", "–") and not drawn)
    ]


def open_all_rows(
    window: GrafanaWindow, dashboard: filled_stack.CommittedDashboard, query: Mapping[str, str]
) -> set[str]:
    """Open a dashboard with all rows that this Grafana can draw; the titles of their panels."""
    window.open_dashboard(dashboard.uid, query, tall=True)
    for row in dashboard.model["panels"]:
        if row.get("collapsed") and not NEWER & {panel["title"] for panel in row["panels"]}:
            window.unfold_row(row["title"])
    return {str(panel["title"]) for panel in dashboard.list_panels()} - NEWER


def check_nothing_failed(window: GrafanaWindow) -> None:
    """Check that no panel complains, nothing is on the console, and nobody else was asked."""
    assert not window.list_panel_errors()
    assert not window.errors, window.errors
    assert not window.strangers, window.strangers
    assert not window.refused, window.refused


@pytest.mark.parametrize(
    "dashboard",
    [
        pytest.param(each, id=each.uid, marks=[] if each.uid == "ttft" else pytest.mark.full)
        for each in filled_stack.list_dashboards()
    ],
)
def test_every_panel_is_drawn(
    window: GrafanaWindow, filled: FilledStack, dashboard: filled_stack.CommittedDashboard
) -> None:
    """No error, no empty panel, nothing on the console, no request to anybody but this machine.

    p50, p90, p99, share over SLO and share failed are the known ones, as a person reads them.
    """
    trace = filled.truth.list_slow_rows()[0].trace_id
    wanted = open_all_rows(window, dashboard, {**get_sent_range(filled), "var-trace": trace})
    window.wait_until_right(lambda: find_undrawn_panels(window, wanted))
    check_nothing_failed(window)
    if dashboard.uid == "ttft":
        window.wait_until_right(lambda: find_differences(window, filled.truth))


@pytest.mark.full
def test_no_data_is_no_error(bench: StackStarter, grafana_home: Path) -> None:
    """Before any data arrived every panel is there and none complains, in folded rows neither."""
    stack = bench.start_stack()
    with (
        bench.start_grafana(grafana_home, stack.addresses) as empty,
        open_window(empty) as window,
    ):
        for dashboard in filled_stack.list_dashboards():
            wanted = open_all_rows(window, dashboard, {})
            assert {title for title, _, _ in window.list_panels()} == wanted
            check_nothing_failed(window)


def test_a_dot_opens_its_trace(window: GrafanaWindow, filled: FilledStack) -> None:
    """An exemplar leads to its trace, in Tempo and on the dashboard."""
    known = {row.trace_id: row for row in filled.truth.good}
    window.open_dashboard("ttft", get_sent_range(filled))
    links = window.hover_exemplar("TTFT percentiles")
    assert {"Open in Tempo", "Show this request"} <= set(links)
    trace_id = links["Show this request"].partition("var-trace=")[2][:32]
    row = known[trace_id]
    words = (trace_id, "POST /v1/chat/completions", "ttft", stages.SERVICE_NAMES[row.role])
    for link in ("Open in Tempo", "Show this request"):
        window.open_path(links[link], tall=True)
        window.wait_until_right(lambda: window.list_missing_words(*words))
    assert not window.errors and not window.strangers


def open_slow_list(window: GrafanaWindow, filled: FilledStack) -> Locator:
    """The links in the table of slow requests, of routers' alone."""
    window.open_dashboard("ttft", {**get_sent_range(filled), "var-role": "router"}, tall=True)
    links = window.find_panel("Requests over the SLO").get_by_role("link")
    window.wait_until_right(lambda: not links.count())
    return links


def test_a_slow_request_opens_its_waterfall(window: GrafanaWindow, filled: FilledStack) -> None:
    """The table lists slow requests; a click on one shows its spans below, filters and time kept."""
    slow = {row.trace_id: row for row in filled.truth.list_slow_rows()}
    links = open_slow_list(window, filled)
    listed = {text.zfill(32): link for link in links.all() if len(text := link.inner_text()) > 24}
    assert listed and set(listed) <= set(slow)
    assert all(slow[trace_id].routed for trace_id in listed)
    trace_id, link = next(iter(listed.items()))
    link.click()
    window.wait_until_quiet()
    window.wait_until_right(
        lambda: window.list_missing_words(trace_id, "router.receive", "router.hop.", "unattributed")
    )
    assert (
        "var-role=router" in window.page.url and get_sent_range(filled)["from"] in window.page.url
    )
    assert not window.errors and not window.list_panel_errors()


@pytest.mark.full
def test_the_time_of_a_slow_request_leads_to_why(
    window: GrafanaWindow, filled: FilledStack
) -> None:
    """A click on it shows the command that explains this request, through the Tempo of this dashboard."""
    slow = {row.trace_id for row in filled.truth.list_slow_rows()}
    links = open_slow_list(window, filled)
    times = [link for link in links.all() if re.fullmatch(r"[\d.]+ (ms|s)", link.inner_text())]
    assert times
    times[0].click()
    window.wait_until_quiet()
    window.wait_until_right(lambda: window.list_missing_words("ttft-otel explain --trace"))
    asked = re.search(r"explain --trace (\w+) --tempo \S+", window.page.inner_text("body"))
    assert asked and asked[1].zfill(32) in slow
    assert not window.errors and not window.list_panel_errors()


@pytest.mark.full
def test_the_panel_leads_to_the_explanation_and_back(
    window: GrafanaWindow, filled: FilledStack, bench: StackStarter
) -> None:
    """The link of "Why?" has its time and model; the page explains them from Tempo, and links back."""
    port = free_ports.find_free_port()
    command = ServerCommand(
        "serve",
        (
            sys.executable, "-m", "ttft_otel.commands.main", "serve", f"--http-port={port}",
            f"--tempo={filled.stack.tempo.url}", f"--grafana={window.url}",
        ),
        {}, port, "/healthz",
    )  # fmt: skip
    sent, model = get_sent_range(filled), "Qwen/Qwen3-8B"
    with StackPart(command, filled.stack.addresses, bench.make_folder("serve")) as serve:
        serve.start()
        why = {"viewPanel": str(request_panels.WHY_PANEL), "var-model": model}
        window.open_dashboard("ttft", {**sent, **why})
        link = window.page.get_by_role("link", name="why those of this time").get_attribute("href")
        assert link and link.startswith(f"{request_panels.PAGE_URL}/why?")
        asked = parse_qs(urlsplit(link).query)
        times = {name: [ms] for name, ms in sent.items()}
        # A variable that may have several values is written so.
        assert asked == {**times, "model": [f"{{{model}}}"], "slo_ms": ["1000"]}
        page = window.page
        page.set_default_timeout(300_000)
        page.goto(link.replace(request_panels.PAGE_URL, f"http://127.0.0.1:{port}"))
        assert "requests were later than 1000 ms" in page.inner_text("main")
        back = page.get_by_role("link", name="The dashboard at that time").get_attribute("href")
        page.locator('a[href^="/trace/"]').first.click()
        page.get_by_text("Across all processes").wait_for()
        trace_id = page.url.rpartition("/")[2]
        assert trace_id in {row.trace_id for row in filled.truth.list_slow_rows()}
        there = page.get_by_role("link", name="in Grafana").get_attribute("href")
    assert back and there
    window.open_path(back)
    window.wait_until_right(lambda: find_differences(window, filled.truth.select_rows(model=model)))
    window.open_path(there, tall=True)
    window.wait_until_right(lambda: window.list_missing_words(trace_id))


UIDS = {"prometheus": "Prometheus", "tempo": "Tempo"}
BOARDS = {path.stem for path in stack_parts.DASHBOARDS.glob("*.json")}


@pytest.fixture(scope="module")
def foreign(
    bench: StackStarter, grafana_home: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a Grafana that knows nothing of us, with the name of its admin."""
    if grafana_home is None:
        pytest.skip("GRAFANA_URL is no Grafana to experiment with; set GRAFANA_HOME")
    plain = grafana_server.GRAFANA_INI.replace(
        "disable_initial_admin_creation = true", "admin_password = secret"
    )
    addresses = StackAddresses.choose_free()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grafana_server, "PROVISIONING", tmp_path_factory.mktemp("none"))
        patch.setattr(grafana_server, "GRAFANA_INI", plain)
        with bench.start_grafana(grafana_home, addresses, is_provisioned=False) as running:
            yield running.url.replace("http://", "http://admin:secret@")


def list_boards(url: str) -> set[str]:
    """Uids of the dashboards that a Grafana shows to who asks."""
    return {each["uid"] for each in stack_queries.fetch_json(f"{url}/api/search", type="dash-db")}


def post_json(url: str, body: str) -> Any:
    """What a Grafana answers to an object that it should create."""
    return json.loads(stack_queries.send_body(url, body.encode(), stack_queries.JSON_CONTENT_TYPE))


def test_provisioned(provisioned: RunningBackend) -> None:
    """Anybody sees both dashboards and may ask both data sources, whose uids links rely on."""
    url = provisioned.url
    assert list_boards(url) == BOARDS
    sources = f"{url}/api/datasources/proxy/uid"
    assert stack_queries.fetch_json(f"{sources}/prometheus/api/v1/query", query="1")["data"]
    assert stack_queries.fetch_json(f"{sources}/tempo/api/search/tags")["tagNames"]

    # There is no admin login, and an anonymous viewer can change nothing.
    admin = url.replace("http://", "http://admin:admin@")
    with pytest.raises(stack_queries.BackendQueryError, match="answered 401"):
        stack_queries.fetch_json(f"{admin}/api/org")
    with pytest.raises(stack_queries.BackendQueryError, match="answered 40[13]"):
        post_json(f"{url}/api/folders", '{"title": "mine"}')


def test_command(foreign: str, tmp_path: Path) -> None:
    """`ttft-otel dashboards` imports both, by user or by token, and prints no password."""
    account = post_json(f"{foreign}/api/serviceaccounts", '{"name": "importer", "role": "Admin"}')
    made = post_json(f"{foreign}/api/serviceaccounts/{account['id']}/tokens", '{"name": "once"}')
    url, public = foreign.replace(":secret@", "@"), stack_queries.strip_credentials(foreign)

    def run(grafana: str, secret: str) -> Result:
        (file := tmp_path / "secret").write_text(secret + "\n", "utf-8")
        return CliRunner().invoke(dashboards, ["--grafana", grafana, "--token-file", str(file)])

    by_user, by_token, refused = run(url, "secret"), run(public, made["key"]), run(url, "guess")

    assert (by_user.exit_code, by_token.exit_code) == (0, 0), by_user.output + by_token.output
    assert f"{public}/d/ttft\n" in by_token.output and "secret" not in by_user.output
    assert ("data source" in by_user.output) == ("data source" in by_token.output)
    assert list_boards(foreign) == BOARDS
    assert refused.exit_code == 1 and "answered 401" in refused.output


def test_adopted(foreign: str) -> None:
    """A Grafana that runs already gets the same files, also twice; its password is not printed."""
    at, public = StackAddresses.choose_free(), stack_queries.strip_credentials(foreign)

    done = [grafana_import.import_dashboards(url, at) for url in (public, foreign, foreign)]

    assert done == [False, True, True] and "secret" not in public
    found = {each["uid"]: each for each in stack_queries.fetch_json(f"{foreign}/api/datasources")}
    assert UIDS == {uid: each["name"] for uid, each in found.items()}
    assert stack_parts.format_loopback_url(at.tempo) == found["tempo"]["url"]
    assert "$__tags" in found["tempo"]["jsonData"]["tracesToMetrics"]["queries"][0]["query"]
    assert list_boards(public) == BOARDS
