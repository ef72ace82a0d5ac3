# SPDX-License-Identifier: Apache-2.0
"""The panels of whole answers: how long they took, and how long each token after the first; ttft_dashboard.py
adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grafana.build import panel_kinds, series_colors, server_queries, ttft_queries
from grafana.build.ttft_queries import RATE


def add_whole_answers(
    dashboard_builder: Any, percentiles: Sequence[tuple[float, str, str]]
) -> None:
    """Two panels with these percentiles: (share, name, colour)."""
    for title, says, quantile in (
        (
            "Request duration",
            "Until the last byte of the answer: gen_ai.server.request.duration of the semantic conventions. "
            "Answers without an error; between its bounds, which double, it is interpolated.",
            ttft_queries.request_quantile,
        ),
        (
            "Time per output token",
            "The time after the first token, divided by the tokens after it: "
            "gen_ai.server.time_per_output_token of the semantic conventions. Of all servers that decode, "
            "filtered by model alone.",
            server_queries.token_time_quantile,
        ),
    ):
        panel = _build_percentiles_panel(title, says, quantile, percentiles)
        dashboard_builder.with_panel(panel.height(7))


def _build_percentiles_panel(
    title: str,
    says: str,
    quantile: Callable[[float, str], str],
    percentiles: Sequence[tuple[float, str, str]],
) -> Any:
    targets = [
        panel_kinds.build_range_target(quantile(part, RATE), name, name)
        for part, name, _ in percentiles
    ]
    return panel_kinds.color_series(
        panel_kinds.build_lines_panel(title, says, "s", *targets),
        [(f"^{name}$", [series_colors.fix_color(hue)]) for _, name, hue in percentiles],
    )
