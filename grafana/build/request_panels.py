# SPDX-License-Identifier: Apache-2.0
"""The second half of the TTFT dashboard: which requests were slow, show me one, why.

ttft_dashboard.py puts these panels below its own; the searches are in ttft_queries.py.
"""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import common
from grafana_foundation_sdk.models import common as shapes

from grafana.build import panel_kinds, series_colors, ttft_queries
from ttft_otel.model import metric_table
from ttft_otel.model.names import keys

TTFT_UID: Final = "ttft"
WHY_PANEL: Final = 35  # the id of the panel "Why?"; tests/stack/test_dashboards.py holds it
# `ttft-otel serve` of deploy/docker-compose.alerts.yml. No variable: a link to the dashboard could set it
# and with it where links lead.
PAGE_URL: Final = "http://127.0.0.1:4319"
# Tempo has no port of its own in docker-compose.yml; the data source's uid is what the variable holds.
TEMPO_THROUGH_GRAFANA: Final = (
    "http://127.0.0.1:3000/api/datasources/proxy/uid/${tempo:percentencode}"
)


def add_slow_requests(dashboard_builder: Any) -> None:
    requests = panel_kinds.build_table_panel(
        "Requests over the SLO",
        "Up to 100 outermost requests whose TTFT is over the SLO (raise it to find the slowest). "
        "Click one: the trace below shows it; click its time: how to ask why.",
        "ns",
        panel_kinds.build_traceql_target(ttft_queries.find_slow_requests()),
    )
    requests.datasource(panel_kinds.TEMPO)
    # Grafana 10 lists traces, whose ID is in the cell; newer ones list spans, with it in a hidden column.
    # A cell with two links is a menu without a link: the reason is asked for in the column of the time.
    listed, hidden = "${__data.fields.traceID}", "${__data.fields.traceIdHidden}"
    for field, link in (
        ("traceID", _link_to_trace("${__value.raw}")),
        ("spanID", _link_to_trace(hidden)),
        ("traceDuration", _link_to_why(listed)),
        ("duration", _link_to_why(hidden)),
    ):
        requests.override_by_name(field, [series_colors.set_property("links", [link])])
    # Overrides of columns that an answer lacks do nothing, so the
    # names of both kinds of table may stand here.
    named = (
        ("duration", "TTFT"),
        (keys.MODEL, "Model"),
        (metric_table.K8S_NAMESPACE, "Namespace"),
        (metric_table.K8S_POD, "Pod"),
        (keys.ROLE, "Role"),
        (keys.INPUT_TOKENS, "Prompt tokens"),
        (keys.ERROR_TYPE, "Error"),
        (keys.REQUEST_ID, "Request"),
        ("traceService", "Service"),
    )
    for field, title in named:
        requests.override_by_name(field, [series_colors.set_property("displayName", title)])
    # Grafana 10 lists traces, without TTFT: the longest first.
    columns = (common.TableSortByFieldState().display_name(each) for each in ("TTFT", "Duration"))
    requests.sort_by([column.desc(True) for column in columns])
    dashboard_builder.with_panel(requests)


def _link_to_trace(trace: str) -> dict[str, object]:
    """A link to this dashboard with a trace in it, filters and time kept."""
    # Variables are not kept by a link by itself: without these the filters would be reset.
    kept = "${prometheus:queryparam}&${tempo:queryparam}&${model:queryparam}&${role:queryparam}"
    kept += "&${namespace:queryparam}&${pod:queryparam}&${instance:queryparam}&${slo:queryparam}"
    kept += "&${__url_time_range}"
    return {"title": "Show this request", "url": f"/d/{TTFT_UID}?var-trace={trace}&{kept}"}


def _link_to_why(trace: str) -> dict[str, object]:
    """A link to the panel that says how to ask why this request took so long."""
    linked = _link_to_trace(trace)
    return {"title": "Why?", "url": f"{linked['url']}&viewPanel={WHY_PANEL}"}


def add_request_trace(dashboard_builder: Any) -> None:
    dashboard_builder.with_panel(
        panel_kinds.build_plugin_panel(
            "traces",
            "Trace",
            "The spans of the request in the variable Trace: click a request above, or paste a "
            "trace id there. The stages are the children of the span `ttft`.",
            # A bare trace id in place of a query fetches that whole trace.
            panel_kinds.build_traceql_target("$trace", limit=1),
        ).datasource(panel_kinds.TEMPO)
    )
    dashboard_builder.with_panel(
        panel_kinds.build_node_graph(
            "Calls",
            "The same trace as a graph: who called whom, and how long each took.",
            panel_kinds.build_traceql_target("$trace", limit=1),
        )
    )


def link_explanation() -> dict[str, object]:
    """A link to the page's explanation of the requests over the SLO in a panel's time range."""
    window = "from=${__from}&to=${__to}&model=${model:percentencode}&slo_ms=${slo:percentencode}"
    # In a tab of its own: the page is no part of Grafana, and may not run.
    return {"title": "Why?", "url": f"{PAGE_URL}/why?{window}", "targetBlank": True}


def add_why(dashboard_builder: Any) -> None:
    """Links to the reason, and what to type: a dashboard compares no request with its like."""
    source = f"--tempo {TEMPO_THROUGH_GRAFANA}"
    dashboard_builder.with_panel(
        panel_kinds.build_text_panel(
            "Why?",
            "The commands that explain the request in the variable Trace, and all late requests.",
            # percentencode: whoever makes a link to this dashboard chooses the variable, and this is copied
            # into a shell. A trace id stays as it is.
            f"Where the page runs: [why this request]({PAGE_URL}/why?trace=${{trace:percentencode}}), "
            f"[why those of this time]({link_explanation()['url']}).\n\n"
            "Else click a request above, and ask in a terminal why it took so long; `--tempo` is the address "
            "of Tempo, here through Grafana:\n\n"
            f"    ttft-otel explain --trace ${{trace:percentencode}} {source}\n\n"
            "What the requests over the SLO have in common, and which stage ate how much of it:\n\n"
            f"    ttft-otel explain --since 1h --slo ${{slo:percentencode}} {source}\n\n"
            "docs/guides/slow-ttft.md says how it decides, docs/guides/alerts.md how the page is started.",
        )
    )


def build_budget_row() -> Any:
    """Who used the error budget up; folded away, as it is for when there is none left."""
    row = panel_kinds.build_row("What ate the error budget?")
    for by, title, legend in (
        (ttft_queries.MODEL_LABEL, "Late or failed, by model", "{{gen_ai_request_model}}"),
        ("instance", "Late or failed, by instance", "{{instance}}"),
    ):
        bars = panel_kinds.build_bars_panel(
            title,
            "Share of the requests that missed the SLO (no first token in time, or failed), in the chosen "
            "time range: the ten largest.",
            "percentunit",
            f"sort_desc(topk(10, {ttft_queries.share_of_missed(ttft_queries.RANGE, by)}))",
            legend,
        )
        row.with_panel(bars.span(12).height(8))
    return row


def build_common_stages_row() -> Any:
    """What older Grafanas cannot draw, folded away."""
    # Means of all requests hide why the slow ones are slow: these come from their traces alone.
    common_stages = panel_kinds.build_lines_panel(
        "Stages of the slow requests",
        "Time per stage in the traces of requests over the SLO only, from Tempo: what the slow ones "
        "have in common, where the means above show the many fast ones.",
        "s",
        panel_kinds.build_traceql_target(ttft_queries.sum_slow_stages()),
    ).datasource(panel_kinds.TEMPO)
    common_stages.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    common_stages.draw_style(shapes.GraphDrawStyle.BARS).fill_opacity(75).span(24)
    tinted = panel_kinds.require_newer_grafana(
        panel_kinds.color_series(common_stages, series_colors.list_stage_colors()), "11.0"
    )
    return panel_kinds.build_row("What do the slow ones have in common? (Grafana 11)").with_panel(
        tinted
    )
