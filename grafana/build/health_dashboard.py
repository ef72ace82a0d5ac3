# SPDX-License-Identifier: Apache-2.0
"""The dashboard "Pipeline health": whether the data of the TTFT dashboard is complete.

all_dashboards.py renders it; its queries are in pipeline_queries.py, in the order of a span's way.
"""

from __future__ import annotations

from typing import Any, Final

from grafana.build import health_rows, panel_kinds, pipeline_queries, series_colors, ttft_queries
from grafana.build.ttft_queries import RANGE, RATE

HEALTH_UID: Final = "ttft-health"
# increase() extrapolates, so that one loss may read 0.9 or 1.2: half of one tells it from none.
_NONE_LOST: Final = [(None, series_colors.GOOD_COLOR), (0.5, series_colors.LIMIT_COLOR)]


def build_health_dashboard() -> Any:
    """The dashboard, along the way of a span."""
    dashboard_builder = panel_kinds.build_empty_dashboard(
        "Pipeline health",
        HEALTH_UID,
        "Whether TTFT's telemetry is complete: what is lost, what is queued, what it costs.",
        ("TTFT", "ttft"),
    )
    dashboard_builder.with_variable(
        panel_kinds.build_datasource_variable("prometheus", "prometheus", "Prometheus")
    )
    # Services that sent a TTFT: the job of a scraped target may be another one.
    job = f"label_values({ttft_queries.DURATION_METRIC}, job)"
    dashboard_builder.with_variable(panel_kinds.build_label_variable("job", "Service", job))
    # Rows that are open have data in every deployment; the folded ones at the end need more.
    _add_current_state(dashboard_builder.with_row(panel_kinds.build_row("Is anything lost?")))
    _add_losses_by_hop(dashboard_builder)
    _add_load(dashboard_builder.with_row(panel_kinds.build_row("Does the collector keep up?")))
    _add_instances(
        dashboard_builder.with_row(
            panel_kinds.build_row("Who sends, and who is behind the routers?")
        )
    )
    return dashboard_builder.with_row(health_rows.build_scraped_row()).with_row(
        health_rows.build_sampling_row()
    )


# Red from where the alert on unattributed time fires (grafana/prometheus/alerts).
_UNATTRIBUTED_STEPS: Final = [
    (None, series_colors.GOOD_COLOR),
    (0.02, series_colors.LOUD_COLOR),
    (0.05, series_colors.LIMIT_COLOR),
]
# Colours begin long before the queue is full: from then on spans are lost (enqueue_failed).
_QUEUE_STEPS: Final = [
    (None, series_colors.GOOD_COLOR),
    (0.5, series_colors.LOUD_COLOR),
    (0.8, series_colors.LIMIT_COLOR),
]


def _add_current_state(dashboard_builder: Any) -> None:
    # Six panels of span 4 fill a line of Grafana's 24 columns.
    for title, says, query, unit, steps in (
        (
            "Lost",
            "Spans, records and traces that any hop counted as lost in the chosen time range.",
            pipeline_queries.sum_all_losses(RANGE),
            "short",
            _NONE_LOST,
        ),
        (
            "Unattributed",
            "Share of TTFT that no stage accounts for, because a mark is missing. 5 % alerts.",
            pipeline_queries.share_unattributed(RANGE),
            "percentunit",
            _UNATTRIBUTED_STEPS,
        ),
        (
            "Queue",
            "How full the collector's fullest queue is. It grows while Tempo or Prometheus is away.",
            # One number: without labels there is nothing to group by.
            pipeline_queries.share_of_queue_used("").replace("max by ()", "max"),
            "percentunit",
            _QUEUE_STEPS,
        ),
        (
            "Spans accepted",
            "Spans per second that the collector took in.",
            pipeline_queries.rate_of_counter(pipeline_queries.ACCEPTED, RANGE),
            "cps",
            None,
        ),
        (
            "Traces kept",
            "Share of traces that sampling lets through to Tempo; all, without sampling. "
            "Metrics count every request in either case.",
            pipeline_queries.share_of_traces_kept(RANGE),
            "percentunit",
            None,
        ),
        (
            "Collectors",
            "Collectors that report.",
            # Pushed, not scraped: a collector that died stays until
            # Prometheus' lookback of five minutes ends.
            f"count ({pipeline_queries.UPTIME})",
            "none",
            None,
        ),
    ):
        dashboard_builder.with_panel(
            panel_kinds.build_number_panel(title, says, query, unit, steps=steps)
        )


def _add_losses_by_hop(dashboard_builder: Any) -> None:
    # Refs must be unique in a panel, and hops have names that are no refs: hence h0, h1, ...
    targets = [
        panel_kinds.build_range_target(
            pipeline_queries.rate_or_zero(counter, base, RATE), hop, f"h{number}"
        )
        for number, (hop, (counter, base)) in enumerate(pipeline_queries.LOSSES_BY_HOP.items())
    ]
    dashboard_builder.with_panel(
        panel_kinds.build_lines_panel(
            "Lost at every hop",
            "Per second, from the server that made a record to Tempo. The first two and Tempo's "
            "need their scrape targets (grafana/prometheus/targets); without, they are missing.",
            "cps",
            *targets,
        )
    )
    dashboard_builder.with_panel(
        panel_kinds.build_lines_panel(
            "Unattributed by service",
            "Share of TTFT that no stage accounts for, by outermost service. `ttft-otel doctor` "
            "names the mark that is missing.",
            "percentunit",
            # The recorded ratio is by job and instance: the worst instance stands for its service.
            panel_kinds.build_range_target(
                f'max by (job) ({pipeline_queries.RATIO}{{job=~"$job"}})', "{{job}}"
            ),
        )
    )


def _add_load(dashboard_builder: Any) -> None:
    for title, says, unit, *targets in (
        (
            "Spans in and out",
            "What the collector accepted, and what it sent to Tempo. Apart for long: sampling, or a "
            "queue that grows.",
            "cps",
            panel_kinds.build_range_target(
                pipeline_queries.rate_of_counter(pipeline_queries.ACCEPTED, RATE), "accepted", "in"
            ),
            panel_kinds.build_range_target(
                # Sent spans are 0, not missing, while Tempo has been
                # away since the collector's start.
                pipeline_queries.rate_or_zero(
                    pipeline_queries.TO_TEMPO, pipeline_queries.ACCEPTED, RATE
                ),
                "sent to Tempo",
                "out",
            ),
        ),
        (
            "Queues",
            "How full each exporter's queue is. The one towards Tempo is on disk and survives a "
            "restart.",
            "percentunit",
            panel_kinds.build_range_target(
                pipeline_queries.share_of_queue_used("exporter, data_type"),
                "{{exporter}} {{data_type}}",
            ),
        ),
        (
            "Collector CPU",
            "Cores that each collector uses.",
            "none",
            # Not summed: the collector that is at its core's limit would hide among idle ones.
            panel_kinds.build_range_target(f"rate({pipeline_queries.CPU}[{RATE}])", "{{instance}}"),
        ),
        (
            "Collector memory",
            "Resident memory of each collector; above its limit it refuses and counts.",
            "bytes",
            panel_kinds.build_range_target(pipeline_queries.MEMORY, "{{instance}}"),
        ),
    ):
        # Shares are drawn against 100 %, else a queue that is 1 % full would fill the panel.
        panel = panel_kinds.build_lines_panel(title, says, unit, *targets).height(7)
        dashboard_builder.with_panel(panel.axis_soft_max(1) if unit == "percentunit" else panel)
    dashboard_builder.with_panel(_build_points_panel())


def _build_points_panel() -> Any:
    return (
        panel_kinds.build_lines_panel(
            "Metric points",
            "What the collector pushed to Prometheus, and what Prometheus did not take. Sums are "
            "cumulative, so a later push makes up for a lost one.",
            "cps",
            panel_kinds.build_range_target(
                pipeline_queries.rate_or_zero(
                    pipeline_queries.POINTS_SENT, pipeline_queries.ACCEPTED, RATE
                ),
                "sent",
                "sent",
            ),
            panel_kinds.build_range_target(
                pipeline_queries.rate_or_zero(
                    pipeline_queries.POINTS_FAILED, pipeline_queries.ACCEPTED, RATE
                ),
                "failed",
                "failed",
            ),
        )
        .height(7)
        .span(24)
    )


def _add_instances(dashboard_builder: Any) -> None:
    by = "job, instance"
    chosen = f'{ttft_queries.NOT_ENCODE_SELECTOR},job=~"$job"'
    senders = panel_kinds.build_joined_table(
        "Outermost servers",
        "Routers, and servers that clients call directly: their load, and how much of their TTFT "
        "no stage accounts for.",
        "Requests",
        {"job": "Service", "instance": "Instance"},
        ("Requests", "reqps", ttft_queries.request_rate(RANGE, chosen, by)),
        ("Unattributed", "percentunit", f'max by ({by}) ({pipeline_queries.RATIO}{{job=~"$job"}})'),
    )
    dashboard_builder.with_panel(senders.span(12).height(8))
    dashboard_builder.with_panel(
        panel_kinds.build_lines_panel(
            "Requests behind the routers",
            "Requests per second that routers gave to each instance of a leg: even lines are an "
            "even load.",
            "reqps",
            # Of stages, not of the routers' own counters: those need scrape targets.
            panel_kinds.build_range_target(
                pipeline_queries.rate_of_routed_requests(RATE), "{{ttft_leg}} {{ttft_instance}}"
            ),
        ).height(8)
    )
