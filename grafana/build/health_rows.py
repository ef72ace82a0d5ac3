# SPDX-License-Identifier: Apache-2.0
"""The folded rows of the health dashboard, for data that not every deployment has; health_dashboard.py
adds them: what routers and servers report on /metrics, and what the sampling collector reports.
"""

from __future__ import annotations

from typing import Any

from grafana.build import panel_kinds, pipeline_queries
from grafana.build.ttft_queries import RANGE, RATE


def build_scraped_row() -> Any:
    """Folded away: it has data only where servers and routers are scraped."""
    row = panel_kinds.build_row(
        "What do routers and servers say themselves? (needs scrape targets)"
    )
    row.with_panel(_build_tracing_lines())
    row.with_panel(
        panel_kinds.build_lines_panel(
            "Retries",
            "Attempts that routers made after a failed one, per second and leg.",
            "cps",
            panel_kinds.build_range_target(
                pipeline_queries.rate_of_counter(pipeline_queries.RETRIES, RATE, "leg"), "{{leg}}"
            ),
        )
    )
    return row.with_panel(_build_instances_table())


def _build_tracing_lines() -> Any:
    return panel_kinds.build_lines_panel(
        "Records, drops and errors of tracing",
        "What servers and routers count on their own /metrics: records given to their exporter, "
        "what they dropped, and errors of the hooks, caught.",
        "cps",
        panel_kinds.build_range_target(
            # By job: drops of one service must not vanish among the records of another.
            pipeline_queries.rate_of_counter(pipeline_queries.RECORDS_TOTAL, RATE, "job"),
            "records {{job}}",
            "records",
        ),
        panel_kinds.build_range_target(
            # A labelled counter has no series before its first count:
            # 0 is drawn where records are counted.
            pipeline_queries.rate_or_zero(
                pipeline_queries.DROPPED_TOTAL, pipeline_queries.RECORDS_TOTAL, RATE, "job"
            ),
            "dropped {{job}}",
            "dropped",
        ),
        panel_kinds.build_range_target(
            pipeline_queries.rate_or_zero(
                pipeline_queries.ERRORS_TOTAL, pipeline_queries.RECORDS_TOTAL, RATE, "job"
            ),
            "errors {{job}}",
            "errors",
        ),
    )


def _build_instances_table() -> Any:
    return panel_kinds.build_joined_table(
        "Instances behind the routers",
        "As each router sees them: state, requests under way, attempts, and the share that failed.",
        "Failed",
        {
            "instance": "Router",
            "leg": "Leg",
            "exported_instance": "Instance",
            "state": "State",
        },
        (
            "Is",
            "none",
            # A series for each state, 1 for the one that it is in:
            # `== 1` keeps that, and `state` names it.
            f"max by ({pipeline_queries.INSTANCE_LABELS}, state) ({pipeline_queries.STATE} == 1)",
        ),
        (
            "Breaker",
            "none",
            f"max by ({pipeline_queries.INSTANCE_LABELS}) ({pipeline_queries.BREAKER})",
        ),
        (
            "Under way",
            "none",
            f"sum by ({pipeline_queries.INSTANCE_LABELS}) ({pipeline_queries.IN_FLIGHT})",
        ),
        (
            "Attempts",
            "reqps",
            pipeline_queries.rate_of_counter(
                pipeline_queries.ATTEMPTS, RANGE, pipeline_queries.INSTANCE_LABELS
            ),
        ),
        (
            "Failed",
            "percentunit",
            pipeline_queries.share_of_failed_attempts(RANGE, pipeline_queries.INSTANCE_LABELS),
        ),
    )


def build_sampling_row() -> Any:
    """Folded away: it has data only with collector/sampling.yaml."""
    row = panel_kinds.build_row("What does sampling keep?")
    # How full the sampler's memory is beside what it keeps:
    # too small a memory evicts undecided traces.
    for title, says, unit, target in (
        (
            "Traces by policy",
            "Traces per second that each policy of collector/sampling.yaml keeps.",
            "cps",
            panel_kinds.build_range_target(
                # The policies' counters count both outcomes; only kept
                # ones say which policy fills Tempo.
                pipeline_queries.rate_of_counter(
                    f'{pipeline_queries.POLICIES}{{sampled="true"}}', RATE, "policy"
                ),
                "{{policy}}",
            ),
        ),
        (
            "Traces waiting for a decision",
            "Held in memory until their TTFT is known; evicted ones were dropped undecided.",
            "short",
            panel_kinds.build_range_target(f"sum ({pipeline_queries.WAITING})", "waiting"),
        ),
    ):
        row.with_panel(panel_kinds.build_lines_panel(title, says, unit, target).height(7))
    return row
