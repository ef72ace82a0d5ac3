# SPDX-License-Identifier: Apache-2.0
"""The TTFT dashboard: how is it now and over time, which stage, who, which requests, show me one.

boards.py renders it; its queries are in queries.py, its words are those of docs/stages.md.
"""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from grafana.build import colors, panels, queries, requests
from grafana.build.queries import RANGE, RATE
from ttft_otel import palette

SLO_MS: Final = "1000"
# A TraceQL search that finds nothing, and says what to do: an empty box would be an error.
NO_TRACE: Final = '{ name = "click a request above" }'

_PERCENTILES: Final = (
    (0.5, "p50", colors.CALM),
    (0.9, "p90", colors.MIDDLE),
    (0.99, "p99", colors.LOUD),
)
_ALL_AGREE: Final = (
    "Only requests that got a first token, each counted once, at its outermost server."
)


def board() -> Any:
    """The dashboard, its panels in the order of the questions."""
    made = panels.board(
        "TTFT",
        requests.UID,
        "Where the time to first token of vLLM requests goes, from the spans of ttft-otel.",
        ("Pipeline health", "ttft-health"),
    )
    for variable in variables():
        made.with_variable(variable)
    _now(made.with_row(panels.row("How is TTFT now?")))
    _over_time(made.with_row(panels.row("How was it over time?")))
    _stages(made.with_row(panels.row("Which stage is it in?")))
    _who(made.with_row(panels.row("For which model, role, instance?")))
    requests.slow(made.with_row(panels.row("Which requests were slow?")))
    requests.one(made.with_row(panels.row("Show me one")))
    return made.with_row(requests.more())


def variables() -> list[Any]:
    """Data sources, filters, the SLO, and the request to look at."""
    found = f"{queries.DURATION}{{{queries.NOT_ENCODE}}}"
    return [
        panels.source("prometheus", "prometheus", "Prometheus"),
        panels.source("tempo", "tempo", "Tempo"),
        panels.chosen("model", "Model", f"label_values({found}, {queries.MODEL})"),
        panels.chosen("role", "Role", f"label_values({found}, {queries.ROLE})"),
        panels.chosen("instance", "Instance", f"label_values({found}, instance)"),
        _text("slo", "SLO (ms)", SLO_MS),
        _text("trace", "Trace", NO_TRACE),
    ]


def _text(name: str, label: str, value: str) -> Any:
    made = dashboard.TextBoxVariable(name).label(label).default_value(value)
    return made.current(models.VariableOption(text=value, value=value, selected=True))


def _now(made: Any) -> None:
    for part, name, hue in _PERCENTILES:
        says = f"{part:.0%} of requests had their first token within this time. {_ALL_AGREE}"
        query = queries.quantile(part, RANGE)
        made.with_panel(panels.number(f"TTFT {name}", says, query, "s", hue))
    steps = [(None, colors.GOOD), (0.01, colors.LOUD), (0.05, colors.LIMIT)]
    made.with_panel(
        panels.number(
            "Over SLO",
            "Share of requests that were still without a first token at the SLO, failed ones among them.",
            queries.over_slo(RANGE),
            "percentunit",
            steps=steps,
        )
    )
    made.with_panel(
        panels.number(
            "Requests",
            "Requests per second that reached the outermost servers.",
            queries.requests(RANGE),
            "reqps",
        ).span(3)
    )
    made.with_panel(
        panels.number(
            "Failed before a first token",
            "Share of requests that failed or were aborted before their first token. "
            "They are in no percentile.",
            queries.failed(RANGE),
            "percentunit",
            steps=steps,
        ).span(5)
    )


def _over_time(made: Any) -> None:
    targets = [
        panels.line(queries.quantile(part, RATE), name, name, exemplars=name == "p99")
        for part, name, _ in _PERCENTILES
    ]
    slo = panels.line("vector($slo / 1000)", "SLO", "slo")
    percentiles = panels.lines(
        "TTFT percentiles",
        f"Every dot is one request: click it to open its trace. {_ALL_AGREE}",
        "s",
        *targets,
        slo,
    )
    panels.tinted(
        percentiles, [(f"^{name}$", [colors.fixed(hue)]) for _, name, hue in _PERCENTILES]
    )
    dashed = colors.set_to("custom.lineStyle", {"fill": "dash", "dash": [8, 8]})
    thin = colors.set_to("custom.lineWidth", 1)
    bare = colors.set_to("custom.showPoints", "never")
    panels.tinted(percentiles, [("^SLO$", [colors.fixed(colors.LIMIT), dashed, thin, bare])])
    made.with_panel(percentiles)
    made.with_panel(
        panels.heat(
            "TTFT distribution",
            "Requests per bucket of the semantic conventions' gen_ai.server.time_to_first_token: "
            "two bands are two kinds of request.",
            queries.heat(RATE),
            colors.MIDDLE,
        )
    )
    over = panels.lines(
        "Over SLO",
        "Share of requests that were still without a first token at the SLO.",
        "percentunit",
        panels.line(queries.over_slo(RATE), "over SLO"),
        legend=False,
    )
    made.with_panel(panels.tinted(over, [("^over SLO$", [colors.fixed(colors.LIMIT)])]).height(6))
    made.with_panel(_burn().height(6))


def _burn() -> Any:
    """Alerts in a picture: recorded by grafana/prometheus/rules, with the SLO written there."""
    windows = ("5m", "1h", "6h")
    made = panels.lines(
        "Error budget burn",
        "1 uses up exactly the error budget of the SLO in grafana/prometheus/rules (not of the "
        "variable above); 14.4 pages.",
        "none",
        *(
            panels.line(
                f'max(ttft:over_slo:ratio{window}{{{queries.MODEL}=~"$model"}}) '
                "/ scalar(ttft:slo:budget)",
                window,
                f"w{window}",
            )
            for window in windows
        ),
    )
    hues = zip(windows, (colors.CALM, colors.MIDDLE, colors.LOUD), strict=True)
    return panels.tinted(made, [(f"^{window}$", [colors.fixed(hue)]) for window, hue in hues])


def _stages(made: Any) -> None:
    sums = "Colours say the kind: " + ", ".join(
        f"{hue} {palette.KINDS[kind]}"
        for kind, hue in (
            ("wait", "yellow"),
            ("work", "violet"),
            ("move", "green"),
            ("host", "grey"),
        )
    )
    longest = panels.bars(
        "Longest stages",
        f"Mean time per request of the ten longest stages, in the chosen time range. {sums}.",
        "s",
        f"sort_desc(topk(10, {queries.stage_mean(RANGE)}))",
        "{{ttft_stage}}",
    )
    made.with_panel(panels.tinted(longest, colors.stage_colors()))
    for title, says, unit, query, width in (
        (
            "Mean TTFT by stage",
            f"Mean time per request in every stage. They add up to the mean TTFT. {sums}.",
            "s",
            queries.stage_mean,
            16,
        ),
        (
            "Share of TTFT by stage",
            f"Each stage's share of the mean TTFT; together 100 %. {sums}.",
            "percentunit",
            queries.stage_share,
            12,
        ),
    ):
        targets = [
            panels.line(query(RATE, kind), "{{ttft_stage}}", kind or "rest")
            for kind in queries.KINDS
        ]
        panel = panels.stacked(title, says, unit, *targets).height(11).span(width)
        if unit == "percentunit":
            panel.max(1)
        made.with_panel(panels.tinted(panel, colors.stage_colors()))
    tails = panels.lines(
        "Stages, p99",
        "The slowest hundredth of every stage's spans; a stage in several pieces counts several "
        "times. Percentiles of stages do not add up to a percentile of TTFT.",
        "s",
        panels.line(queries.stage_quantile(0.99, RATE), "{{ttft_stage}}", exemplars=True),
    )
    made.with_panel(panels.tinted(panels.ranked(tails, "max"), colors.stage_colors()).height(11))


def _who(made: Any) -> None:
    made.with_panel(_models())
    by_role = panels.stacked(
        "Mean TTFT by role",
        "Mean time per request in the router (with the network to each leg) and in each leg's "
        "servers. They add up to the mean TTFT.",
        "s",
        panels.line(queries.by_role(RATE), "{{role}}"),
    )
    made.with_panel(panels.tinted(by_role, colors.role_colors()).span(8))
    made.with_panel(
        panels.lines(
            "TTFT p99 by model",
            f"The slowest hundredth of each model's requests. {_ALL_AGREE}",
            "s",
            panels.line(queries.quantile(0.99, RATE, queries.MODEL), "{{gen_ai_request_model}}"),
        ).span(8)
    )
    made.with_panel(
        panels.lines(
            "Mean time by instance",
            "What each server took of the TTFT, per request that it served: one line away from the "
            "others of its role is the instance to look at.",
            "s",
            panels.line(queries.by_instance(RATE), "{{server}}"),
        ).span(8)
    )


def _models() -> Any:
    """One row per model, role and instance, worst p99 first."""
    by = f"{queries.MODEL}, {queries.ROLE}, instance"
    made = panels.joined(
        "Models, roles and instances",
        "Every model at every outermost server, in the chosen time range; worst p99 first.",
        "p99",
        {queries.MODEL: "Model", queries.ROLE: "Role", "instance": "Instance"},
        ("Requests", "reqps", queries.requests(RANGE, by=by)),
        ("p50", "s", queries.quantile(0.5, RANGE, by)),
        ("p90", "s", queries.quantile(0.9, RANGE, by)),
        ("p99", "s", queries.quantile(0.99, RANGE, by)),
        ("Over SLO", "percentunit", queries.over_slo(RANGE, by)),
        ("Failed", "percentunit", queries.failed(RANGE, by)),
    )
    wide = [colors.set_to("displayName", "Model"), colors.set_to("custom.width", 320)]
    return made.override_by_name(queries.MODEL, wide)
