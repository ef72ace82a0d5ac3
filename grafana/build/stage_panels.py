# SPDX-License-Identifier: Apache-2.0
"""The panels of the TTFT dashboard about stages: their means, shares and percentiles, why requests wait
and behind what, media items that were encoded twice, and other products' spans; ttft_dashboard.py adds them.
"""

from __future__ import annotations

from typing import Any

from grafana.build import (
    panel_kinds,
    request_panels,
    series_colors,
    server_queries,
    ttft_queries,
)
from grafana.build.ttft_queries import RANGE, RATE
from ttft_otel.model import stages


def add_stages(dashboard_builder: Any) -> None:
    sums = "Colours say the kind: " + ", ".join(
        f"{hue} {stages.KIND_LABELS[kind]}"
        for kind, hue in (
            ("wait", "yellow"),
            ("work", "violet"),
            ("move", "green"),
            ("host", "grey"),
        )
    )
    longest = panel_kinds.build_bars_panel(
        "Longest stages",
        f"Mean time per request of the ten longest stages, in the chosen time range. {sums}.",
        "s",
        f"sort_desc(topk(10, {ttft_queries.stage_mean(RANGE)}))",
        "{{ttft_stage}}",
    )
    dashboard_builder.with_panel(
        panel_kinds.link_series(
            panel_kinds.color_series(longest, series_colors.list_stage_colors()),
            ".*",
            request_panels.link_explanation(),
        )
    )
    _add_stage_stacks(dashboard_builder, sums)
    tails = panel_kinds.build_lines_panel(
        "Stages, p99",
        "The slowest hundredth of every stage's spans; a stage in several pieces counts several "
        "times. Percentiles of stages do not add up to a percentile of TTFT.",
        "s",
        # Exemplars lead from a stage's tail to a trace that was slow there.
        panel_kinds.build_range_target(
            ttft_queries.stage_quantile(0.99, RATE), "{{ttft_stage}}", exemplars=True
        ),
    )
    dashboard_builder.with_panel(
        panel_kinds.color_series(
            panel_kinds.rank_series(tails, "max"), series_colors.list_stage_colors()
        ).height(11)
    )
    dashboard_builder.with_panel(_build_reason_panel().height(8).span(12))
    dashboard_builder.with_panel(_build_held_panel().height(8).span(12))
    dashboard_builder.with_panel(_build_recomputed_panel().height(6).span(24))


def _add_stage_stacks(dashboard_builder: Any, sums: str) -> None:
    """Means and shares, stacked; `sums` says what the colours mean."""
    for title, says, unit, query, width in (
        (
            "Mean TTFT by stage",
            f"Mean time per request in every stage. They add up to the mean TTFT. {sums}.",
            "s",
            ttft_queries.stage_mean,
            16,
        ),
        (
            "Share of TTFT by stage",
            f"Each stage's share of the mean TTFT; together 100 %. {sums}.",
            "percentunit",
            ttft_queries.stage_share,
            12,
        ),
    ):
        # A query for each kind: series are stacked in the order of
        # the queries, so that kinds stay together.
        targets = [
            panel_kinds.build_range_target(query(RATE, kind), "{{ttft_stage}}", kind or "rest")
            for kind in ttft_queries.STAGE_KINDS
        ]
        panel = panel_kinds.build_stacked_panel(title, says, unit, *targets).height(11).span(width)
        # The stack ends at 100 %: an axis that Grafana chooses would go beyond.
        if unit == "percentunit":
            panel.max(1)
        dashboard_builder.with_panel(
            panel_kinds.color_series(panel, series_colors.list_stage_colors())
        )


def _build_reason_panel() -> Any:
    """What would have to change for the queues to move on."""
    return panel_kinds.build_stacked_panel(
        "Why requests wait",
        "How many requests wait in a server's queue for which reason, on average: max_num_seqs and "
        "token_budget are settings, kv_blocks is memory, in_step is the step that ran when they came. "
        "docs/concepts.md explains all of them. Of all servers, filtered by model alone.",
        "none",
        panel_kinds.build_range_target(
            server_queries.waiting_requests(RATE), "{{ttft_queue_reason}}"
        ),
    )


def _build_held_panel() -> Any:
    """Whose work the queues stood behind: it says whether prompts, answers or media are to be moved."""
    return panel_kinds.build_stacked_panel(
        "What held waiting requests",
        "The same waiting requests by what their engine worked on meanwhile: prompts, answers (decode) or "
        "media of other requests, or nothing (idle). Which requests these were, the links of a queue's "
        "span tell. Of all servers, filtered by model alone.",
        "none",
        panel_kinds.build_range_target(server_queries.held_requests(RATE), "{{ttft_held_by_kind}}"),
    )


def _build_recomputed_panel() -> Any:
    """Why encoder.compute shows where encodings should have come from an encoder."""
    return panel_kinds.build_lines_panel(
        "Media encoded twice",
        "Images and other media that an instance encoded although an encoder had encoded them for the "
        "same request: 0 where encoders work. Otherwise encoder.compute on that instance is time lost; "
        "docs/router.md, 'Encoder-cache parameters', says what to check. Filtered by model alone.",
        "none",
        panel_kinds.build_range_target(
            server_queries.recomputed_items(RATE), "{{ttft_role}} {{instance}}"
        ),
    )


def build_foreign_row() -> Any:
    """What spans of other products tell; folded away, as most have none."""
    lines = panel_kinds.build_lines_panel(
        "TTFT, by other products' spans",
        "Of vLLM's own tracing, SGLang, TensorRT-LLM and Dynamo: each instance's time to its first token. "
        "Not in any figure above, and not filtered.",
        "s",
        *(
            panel_kinds.build_range_target(
                server_queries.foreign_quantile(part, RATE),
                f"{name} {{{{ttft_foreign}}}} {{{{ttft_role}}}}",
                name,
                exemplars=name == "p99",
            )
            for part, name in ((0.5, "p50"), (0.99, "p99"))
        ),
    )
    bars = panel_kinds.build_bars_panel(
        "Stages, by other products' spans",
        "Mean time per request in the stages that they tell, by a host's clock, and in none of these "
        "(unattributed); docs/reference/vocabulary.md says what each name holds.",
        "s",
        server_queries.foreign_stage_mean(RANGE),
        "{{ttft_foreign}}: {{ttft_stage}}",
    )
    row = panel_kinds.build_row("What do other products tell?")
    return row.with_panel(lines.height(11)).with_panel(bars.span(12))
