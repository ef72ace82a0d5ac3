# SPDX-License-Identifier: Apache-2.0
"""The Pipeline health dashboard: is what the other dashboard shows complete, and will it stay so?

boards.py renders it; its queries are in counters.py, in the order of a span's way.
"""

from __future__ import annotations

from typing import Any, Final

from grafana.build import colors, counters, panels, queries
from grafana.build.queries import RANGE, RATE

UID: Final = "ttft-health"
_NONE_LOST: Final = [(None, colors.GOOD), (0.5, colors.LIMIT)]


def board() -> Any:
    """The dashboard, along the way of a span."""
    made = panels.board(
        "Pipeline health",
        UID,
        "Whether TTFT's telemetry is complete: what is lost, what is queued, what it costs.",
        ("TTFT", "ttft"),
    )
    made.with_variable(panels.source("prometheus", "prometheus", "Prometheus"))
    job = f"label_values({queries.DURATION}, job)"
    made.with_variable(panels.chosen("job", "Service", job))
    _now(made.with_row(panels.row("Is anything lost?")))
    _hops(made)
    _load(made.with_row(panels.row("Does the collector keep up?")))
    _instances(made.with_row(panels.row("Who sends, and who is behind the routers?")))
    return made.with_row(_scraped()).with_row(_sampling())


def _now(made: Any) -> None:
    share = [(None, colors.GOOD), (0.02, colors.LOUD), (0.05, colors.LIMIT)]
    full = [(None, colors.GOOD), (0.5, colors.LOUD), (0.8, colors.LIMIT)]
    for title, says, query, unit, steps in (
        (
            "Lost",
            "Spans, records and traces that any hop counted as lost in the chosen time range.",
            counters.all_lost(RANGE),
            "short",
            _NONE_LOST,
        ),
        (
            "Unattributed",
            "Share of TTFT that no stage accounts for, because a mark is missing. 5 % alerts.",
            counters.unattributed(RANGE),
            "percentunit",
            share,
        ),
        (
            "Queue",
            "How full the collector's fullest queue is. It grows while Tempo or Prometheus is away.",
            counters.fill("").replace("max by ()", "max"),
            "percentunit",
            full,
        ),
        (
            "Spans accepted",
            "Spans per second that the collector took in.",
            counters.rate(counters.ACCEPTED, RANGE),
            "cps",
            None,
        ),
        (
            "Traces kept",
            "Share of traces that sampling lets through to Tempo; all, without sampling. "
            "Metrics count every request in either case.",
            counters.kept(RANGE),
            "percentunit",
            None,
        ),
        (
            "Collectors",
            "Collectors that report.",
            f"count ({counters.UPTIME})",
            "none",
            None,
        ),
    ):
        made.with_panel(panels.number(title, says, query, unit, steps=steps))


def _hops(made: Any) -> None:
    targets = [
        panels.line(counters.counted(counter, base, RATE), hop, f"h{number}")
        for number, (hop, (counter, base)) in enumerate(counters.HOPS.items())
    ]
    made.with_panel(
        panels.lines(
            "Lost at every hop",
            "Per second, from the server that made a record to Tempo. The first two and Tempo's "
            "need their scrape targets (grafana/prometheus/targets); without, they are missing.",
            "cps",
            *targets,
        )
    )
    made.with_panel(
        panels.lines(
            "Unattributed by service",
            "Share of TTFT that no stage accounts for, by outermost service. `ttft-otel doctor` "
            "names the mark that is missing.",
            "percentunit",
            panels.line(f'max by (job) ({counters.RATIO}{{job=~"$job"}})', "{{job}}"),
        )
    )


def _load(made: Any) -> None:
    for title, says, unit, *targets in (
        (
            "Spans in and out",
            "What the collector accepted, and what it sent to Tempo. Apart for long: sampling, or a "
            "queue that grows.",
            "cps",
            panels.line(counters.rate(counters.ACCEPTED, RATE), "accepted", "in"),
            panels.line(
                counters.counted(counters.TO_TEMPO, counters.ACCEPTED, RATE), "sent to Tempo", "out"
            ),
        ),
        (
            "Queues",
            "How full each exporter's queue is. The one towards Tempo is on disk and survives a "
            "restart.",
            "percentunit",
            panels.line(counters.fill("exporter, data_type"), "{{exporter}} {{data_type}}"),
        ),
        (
            "Collector CPU",
            "Cores that each collector uses.",
            "none",
            panels.line(f"rate({counters.CPU}[{RATE}])", "{{instance}}"),
        ),
        (
            "Collector memory",
            "Resident memory of each collector; above its limit it refuses and counts.",
            "bytes",
            panels.line(counters.MEMORY, "{{instance}}"),
        ),
    ):
        panel = panels.lines(title, says, unit, *targets).height(7)
        made.with_panel(panel.axis_soft_max(1) if unit == "percentunit" else panel)
    made.with_panel(
        panels.lines(
            "Metric points",
            "What the collector pushed to Prometheus, and what Prometheus did not take. Sums are "
            "cumulative, so a later push makes up for a lost one.",
            "cps",
            panels.line(
                counters.counted(counters.POINTS_SENT, counters.ACCEPTED, RATE), "sent", "sent"
            ),
            panels.line(
                counters.counted(counters.POINTS_FAILED, counters.ACCEPTED, RATE),
                "failed",
                "failed",
            ),
        )
        .height(7)
        .span(24)
    )


def _instances(made: Any) -> None:
    by = "job, instance"
    chosen = f'{queries.NOT_ENCODE},job=~"$job"'
    senders = panels.joined(
        "Outermost servers",
        "Routers, and servers that clients call directly: their load, and how much of their TTFT "
        "no stage accounts for.",
        "Requests",
        {"job": "Service", "instance": "Instance"},
        ("Requests", "reqps", queries.requests(RANGE, chosen, by)),
        ("Unattributed", "percentunit", f'max by ({by}) ({counters.RATIO}{{job=~"$job"}})'),
    )
    made.with_panel(senders.span(12).height(8))
    made.with_panel(
        panels.lines(
            "Requests behind the routers",
            "Requests per second that routers gave to each instance of a leg: even lines are an "
            "even load.",
            "reqps",
            panels.line(counters.routed(RATE), "{{ttft_leg}} {{ttft_instance}}"),
        ).height(8)
    )


def _scraped() -> Any:
    """Folded away: it has data only where servers and routers are scraped."""
    row = panels.row("What do routers and servers say themselves? (needs scrape targets)")
    row.with_panel(
        panels.lines(
            "Records, drops and errors of tracing",
            "What servers and routers count on their own /metrics: records given to their exporter, "
            "what they dropped, and errors of the hooks, caught.",
            "cps",
            panels.line(counters.rate(counters.RECORDS, RATE, "job"), "records {{job}}", "records"),
            panels.line(
                counters.counted(counters.DROPPED, counters.RECORDS, RATE, "job"),
                "dropped {{job}}",
                "dropped",
            ),
            panels.line(
                counters.counted(counters.ERRORS, counters.RECORDS, RATE, "job"),
                "errors {{job}}",
                "errors",
            ),
        )
    )
    row.with_panel(
        panels.lines(
            "Retries",
            "Attempts that routers made after a failed one, per second and leg.",
            "cps",
            panels.line(counters.rate(counters.RETRIES, RATE, "leg"), "{{leg}}"),
        )
    )
    return row.with_panel(
        panels.joined(
            "Instances behind the routers",
            "As each router sees them: state, requests under way, attempts, and the share that failed.",
            "Failed",
            {
                "instance": "Router",
                "leg": "Leg",
                "exported_instance": "Instance",
                "state": "State",
            },
            ("Is", "none", f"max by ({counters.BEHIND}, state) ({counters.STATE} == 1)"),
            ("Breaker", "none", f"max by ({counters.BEHIND}) ({counters.BREAKER})"),
            ("Under way", "none", f"sum by ({counters.BEHIND}) ({counters.IN_FLIGHT})"),
            ("Attempts", "reqps", counters.rate(counters.ATTEMPTS, RANGE, counters.BEHIND)),
            ("Failed", "percentunit", counters.failing(RANGE, counters.BEHIND)),
        )
    )


def _sampling() -> Any:
    """Folded away: it has data only with collector/sampling.yaml."""
    row = panels.row("What does sampling keep?")
    for title, says, unit, target in (
        (
            "Traces by policy",
            "Traces per second that each policy of collector/sampling.yaml keeps.",
            "cps",
            panels.line(
                counters.rate(f'{counters.POLICIES}{{sampled="true"}}', RATE, "policy"),
                "{{policy}}",
            ),
        ),
        (
            "Traces waiting for a decision",
            "Held in memory until their TTFT is known; evicted ones were dropped undecided.",
            "short",
            panels.line(f"sum ({counters.WAITING})", "waiting"),
        ),
    ):
        row.with_panel(panels.lines(title, says, unit, target).height(7))
    return row
