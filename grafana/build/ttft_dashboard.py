# SPDX-License-Identifier: Apache-2.0
"""The TTFT dashboard: how is it now and over time, which stage, who, which requests, show me one.

all_dashboards.py renders it; its queries are in ttft_queries.py, its words are those of docs/stages.md.
"""

from __future__ import annotations

from typing import Any, Final

from grafana.build import (
    answer_panels,
    dashboard_variables,
    panel_kinds,
    request_panels,
    series_colors,
    stage_panels,
    ttft_queries,
)
from grafana.build.ttft_queries import RANGE, RATE

_PERCENTILES: Final = (
    (0.5, "p50", series_colors.CALM_COLOR),
    (0.9, "p90", series_colors.MIDDLE_COLOR),
    (0.99, "p99", series_colors.LOUD_COLOR),
)
_ENDS_WITHOUT_TOKEN: Final = (
    (
        "Server failed",
        "a server or its engine failed before their first token",
        ttft_queries.FAILED_SELECTOR,
    ),
    (
        "Client left",
        "their client gave up before their first token",
        ttft_queries.LEFT_SELECTOR,
    ),
    (
        "Refused",
        "were refused with a status of 4xx",
        ttft_queries.REFUSED_SELECTOR,
    ),
)
_ALL_AGREE: Final = (
    "Only requests that got a first token, each counted once, at its outermost server."
)


def build_ttft_dashboard() -> Any:
    """The dashboard, its panels in the order of the questions."""
    dashboard_builder = panel_kinds.build_empty_dashboard(
        "TTFT",
        request_panels.TTFT_UID,
        "Where the time to first token of vLLM requests goes, from the spans of ttft-otel.",
        ("Pipeline health", "ttft-health"),
    )
    for variable in dashboard_variables.build_variables():
        dashboard_builder.with_variable(variable)
    _add_current_state(dashboard_builder.with_row(panel_kinds.build_row("How is TTFT now?")))
    _add_time_series(dashboard_builder.with_row(panel_kinds.build_row("How was it over time?")))
    stage_panels.add_stages(
        dashboard_builder.with_row(panel_kinds.build_row("Which stage is it in?"))
    )
    _add_breakdown_by_role(
        dashboard_builder.with_row(panel_kinds.build_row("For which model, role, instance?"))
    )
    request_panels.add_slow_requests(
        dashboard_builder.with_row(panel_kinds.build_row("Which requests were slow?"))
    )
    request_panels.add_request_trace(
        dashboard_builder.with_row(panel_kinds.build_row("Show me one"))
    )
    request_panels.add_why(dashboard_builder)
    dashboard_builder.with_row(request_panels.build_budget_row())
    dashboard_builder.with_row(request_panels.build_common_stages_row())
    return dashboard_builder.with_row(stage_panels.build_foreign_row())


def _add_current_state(dashboard_builder: Any) -> None:
    for part, name, hue in _PERCENTILES:
        says = f"{part:.0%} of requests had their first token within this time. {_ALL_AGREE}"
        query = ttft_queries.ttft_quantile(part, RANGE)
        dashboard_builder.with_panel(
            panel_kinds.build_number_panel(f"TTFT {name}", says, query, "s", hue).span(3)
        )
    steps = [
        (None, series_colors.GOOD_COLOR),
        (0.01, series_colors.LOUD_COLOR),
        (0.05, series_colors.LIMIT_COLOR),
    ]
    dashboard_builder.with_panel(
        panel_kinds.build_number_panel(
            "Over SLO",
            "Share of requests that were without a first token at the SLO, or failed, however soon. "
            "Refused ones are left out.",
            ttft_queries.share_over_slo(RANGE),
            "percentunit",
            steps=steps,
        ).span(3)
    )
    dashboard_builder.with_panel(
        panel_kinds.build_number_panel(
            "Requests",
            "Requests per second that reached the outermost servers.",
            ttft_queries.request_rate(RANGE),
            "reqps",
        ).span(3)
    )
    for title, says, chosen in _ENDS_WITHOUT_TOKEN:
        panel = panel_kinds.build_number_panel(
            title,
            f"Share of requests that {says}. They are in no percentile.",
            ttft_queries.share_ended(chosen, RANGE),
            "percentunit",
            steps=steps if chosen == ttft_queries.FAILED_SELECTOR else None,
        )
        dashboard_builder.with_panel(panel.span(3))


def _add_time_series(dashboard_builder: Any) -> None:
    targets = [
        # Exemplars belong to the metric, not to the quantile: with
        # three queries each dot would come thrice.
        panel_kinds.build_range_target(
            ttft_queries.ttft_quantile(part, RATE), name, name, exemplars=name == "p99"
        )
        for part, name, _ in _PERCENTILES
    ]
    slo = panel_kinds.build_range_target("vector($slo / 1000)", "SLO", "slo")
    percentiles = panel_kinds.build_lines_panel(
        "TTFT percentiles",
        f"Every dot is one request: click it to open its trace. {_ALL_AGREE}",
        "s",
        *targets,
        slo,
    )
    panel_kinds.color_series(
        percentiles,
        [(f"^{name}$", [series_colors.fix_color(hue)]) for _, name, hue in _PERCENTILES],
    )
    # Dashed, thin and without points: a limit must not look like a measured series.
    dashed = series_colors.set_property("custom.lineStyle", {"fill": "dash", "dash": [8, 8]})
    thin = series_colors.set_property("custom.lineWidth", 1)
    bare = series_colors.set_property("custom.showPoints", "never")
    panel_kinds.color_series(
        percentiles,
        [("^SLO$", [series_colors.fix_color(series_colors.LIMIT_COLOR), dashed, thin, bare])],
    )
    why = request_panels.link_explanation()
    # Not on the exemplars' fields, which have links of their own.
    dashboard_builder.with_panel(panel_kinds.link_series(percentiles, r"^p\d+$", why))
    dashboard_builder.with_panel(
        panel_kinds.build_heatmap_panel(
            "TTFT distribution",
            "Requests per bucket of the semantic conventions' gen_ai.server.time_to_first_token: "
            "two bands are two kinds of request.",
            ttft_queries.ttft_heatmap(RATE),
            series_colors.MIDDLE_COLOR,
        )
    )
    over = panel_kinds.build_lines_panel(
        "Over SLO",
        "Share of requests that were without a first token at the SLO, or failed, however soon.",
        "percentunit",
        panel_kinds.build_range_target(ttft_queries.share_over_slo(RATE), "over SLO"),
        legend=False,
    )
    panel_kinds.color_series(
        over, [("^over SLO$", [series_colors.fix_color(series_colors.LIMIT_COLOR)])]
    )
    dashboard_builder.with_panel(panel_kinds.link_series(over, "^over SLO$", why).height(6))
    dashboard_builder.with_panel(_build_burn_rate_panel().height(6))
    answer_panels.add_whole_answers(dashboard_builder, _PERCENTILES)


def _build_burn_rate_panel() -> Any:
    """Alerts in a picture: recorded by grafana/prometheus/rules, with the SLO written there."""
    # 14.4 uses up 2 % of a 30 days' budget in an hour (Google's SRE Workbook, chapter 5).
    windows = ("5m", "1h", "6h")
    made = panel_kinds.build_lines_panel(
        "Error budget burn",
        "1 uses up exactly the error budget of the SLO in grafana/prometheus/rules (not of the "
        "variable above); 14.4 pages.",
        "none",
        *(
            panel_kinds.build_range_target(
                f'max(ttft:over_slo:ratio{window}{{{ttft_queries.MODEL_LABEL}=~"$model"}}) '
                "/ scalar(ttft:slo:budget)",
                window,
                f"w{window}",
            )
            for window in windows
        ),
    )
    hues = zip(
        windows,
        (series_colors.CALM_COLOR, series_colors.MIDDLE_COLOR, series_colors.LOUD_COLOR),
        strict=True,
    )
    return panel_kinds.color_series(
        made, [(f"^{window}$", [series_colors.fix_color(hue)]) for window, hue in hues]
    )


def _add_breakdown_by_role(dashboard_builder: Any) -> None:
    dashboard_builder.with_panel(_build_model_table())
    by_role = panel_kinds.build_stacked_panel(
        "Mean TTFT by role",
        "Mean time per request in the router (with the network to each leg) and in each leg's "
        "servers. They add up to the mean TTFT.",
        "s",
        panel_kinds.build_range_target(ttft_queries.mean_by_role(RATE), "{{role}}"),
    )
    dashboard_builder.with_panel(
        panel_kinds.color_series(by_role, series_colors.list_role_colors()).span(8)
    )
    dashboard_builder.with_panel(
        panel_kinds.build_lines_panel(
            "TTFT p99 by model",
            f"The slowest hundredth of each model's requests. {_ALL_AGREE}",
            "s",
            panel_kinds.build_range_target(
                ttft_queries.ttft_quantile(0.99, RATE, ttft_queries.MODEL_LABEL),
                "{{gen_ai_request_model}}",
            ),
        ).span(8)
    )
    dashboard_builder.with_panel(
        panel_kinds.build_lines_panel(
            "Mean time by instance",
            "What each server took of the TTFT, per request that it served: one line away from the "
            "others of its role is the instance to look at.",
            "s",
            panel_kinds.build_range_target(ttft_queries.mean_by_instance(RATE), "{{server}}"),
        ).span(8)
    )


def _build_model_table() -> Any:
    """One row per model, role and instance, worst p99 first."""
    by = f"{ttft_queries.MODEL_LABEL}, {ttft_queries.ROLE_LABEL}, instance"
    made = panel_kinds.build_joined_table(
        "Models, roles and instances",
        "Every model at every outermost server, in the chosen time range; worst p99 first.",
        "p99",
        {
            ttft_queries.MODEL_LABEL: "Model",
            ttft_queries.ROLE_LABEL: "Role",
            "instance": "Instance",
        },
        ("Requests", "reqps", ttft_queries.request_rate(RANGE, by=by)),
        ("p50", "s", ttft_queries.ttft_quantile(0.5, RANGE, by)),
        ("p90", "s", ttft_queries.ttft_quantile(0.9, RANGE, by)),
        ("p99", "s", ttft_queries.ttft_quantile(0.99, RANGE, by)),
        ("Over SLO", "percentunit", ttft_queries.share_over_slo(RANGE, by)),
        *(
            (title, "percentunit", ttft_queries.share_ended(chosen, RANGE, by))
            for title, _, chosen in _ENDS_WITHOUT_TOKEN
        ),
    )
    wide = [
        series_colors.set_property("displayName", "Model"),
        series_colors.set_property("custom.width", 320),
    ]
    return made.override_by_name(ttft_queries.MODEL_LABEL, wide)
