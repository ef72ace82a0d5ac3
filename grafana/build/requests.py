# SPDX-License-Identifier: Apache-2.0
"""The second half of the TTFT dashboard: which requests were slow, show me one, what have they in common.

ttft.py puts these panels below its own; the searches are in queries.py.
"""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import common
from grafana_foundation_sdk.models import common as shapes

from grafana.build import colors, panels, queries
from ttft_otel import names

UID: Final = "ttft"


def slow(made: Any) -> None:
    requests = panels.rows(
        "Requests over the SLO",
        "Up to 100 outermost requests whose TTFT is over the SLO (raise it to find the slowest). "
        "Click one: the trace below shows it.",
        "ns",
        panels.traces(queries.slow()),
    )
    requests.datasource(panels.TEMPO)
    for field, value in (
        ("traceID", "${__value.raw}"),
        ("spanID", "${__data.fields.traceIdHidden}"),
    ):
        requests.override_by_name(field, [colors.set_to("links", [_to(value)])])
    named = (
        ("duration", "TTFT"),
        (names.MODEL, "Model"),
        (names.ROLE, "Role"),
        (names.INPUT_TOKENS, "Prompt tokens"),
        (names.ERROR_TYPE, "Error"),
        (names.REQUEST_ID, "Request"),
        ("traceService", "Service"),
    )
    for field, title in named:
        requests.override_by_name(field, [colors.set_to("displayName", title)])
    # Grafana 10 lists traces, without TTFT: the longest first.
    columns = (common.TableSortByFieldState().display_name(each) for each in ("TTFT", "Duration"))
    requests.sort_by([column.desc(True) for column in columns])
    made.with_panel(requests)


def _to(trace: str) -> dict[str, object]:
    """A link to this dashboard with a trace in it, filters and time kept."""
    kept = "${prometheus:queryparam}&${tempo:queryparam}&${model:queryparam}&${role:queryparam}"
    kept += "&${instance:queryparam}&${slo:queryparam}&${__url_time_range}"
    return {"title": "Show this request", "url": f"/d/{UID}?var-trace={trace}&{kept}"}


def one(made: Any) -> None:
    made.with_panel(
        panels.foreign(
            "traces",
            "Trace",
            "The spans of the request in the variable Trace: click a request above, or paste a "
            "trace id there. The stages are the children of the span `ttft`.",
            panels.traces("$trace", limit=1),
        ).datasource(panels.TEMPO)
    )
    made.with_panel(
        panels.nodes(
            "Calls",
            "The same trace as a graph: who called whom, and how long each took.",
            panels.traces("$trace", limit=1),
        )
    )


def more() -> Any:
    """What older Grafanas cannot draw, folded away."""
    common_stages = panels.lines(
        "Stages of the slow requests",
        "Time per stage in the traces of requests over the SLO only, from Tempo: what the slow ones "
        "have in common, where the means above show the many fast ones.",
        "s",
        panels.traces(queries.slow_stages()),
    ).datasource(panels.TEMPO)
    common_stages.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    common_stages.draw_style(shapes.GraphDrawStyle.BARS).fill_opacity(75).span(24)
    tinted = panels.newer(panels.tinted(common_stages, colors.stage_colors()), "11.0")
    return panels.row("What do the slow ones have in common? (Grafana 11)").with_panel(tinted)
