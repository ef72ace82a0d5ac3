# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel size`: what a load will cost in spans, bytes, series and cores; main.py offers it to planners.

Input are a load and a deployment; figures per span were measured with the benchmarks named beside them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

import click

from ttft_otel.commands.command_options import make_number_option
from ttft_otel.model import stages
from ttft_otel.model.metric_table import METRICS
from ttft_otel.model.names import metric_names

SECONDS_PER_DAY: Final = 86_400
# Span trees of benchmarks/otlp_bodies.py, serialized as the exporter does; test_size.py counts anew.
BYTES_PER_SPAN: Final = 290
# benchmarks/collector.py, one core, in microseconds of CPU per span: collector/README.md, Sizing.
COLLECTOR_US: Final = 10.0
SAMPLING_COLLECTOR_US: Final = 7.9
FIRST_TIER_US: Final = 5.5
# benchmarks/exporter.py: http_span_us of benchmarks/results/exporter.json.
EXPORTER_US: Final = 12.8
# collector/README.md, Sizing: a span that waits for its trace's verdict, and one in the queue on disk.
WAITING_SPAN_BYTES: Final = 1_000
QUEUED_SPAN_BYTES: Final = 300
DECISION_WAIT_S: Final = 30  # TTFT_DECISION_WAIT in collector/sampling.yaml
MAX_COLLECTOR_CORES: Final = 4.0  # beyond it, docs/guides/kubernetes.md advises a second tier
# Of each histogram with bounds: a series for each bucket, +Inf, sum and count; a native one has one.
_SERIES: Final = {
    name: len(each.bounds_s) + 3 if each.bounds_s else 1 for name, each in METRICS.items()
}
SERIES_PER_MODEL: Final = (
    _SERIES[metric_names.TTFT_DURATION]
    + _SERIES[metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN]
    + _SERIES[metric_names.GEN_AI_SERVER_REQUEST_DURATION]
)
# Of every server: time per output token, and its queues by reasons and kinds of work, at most.
SERIES_PER_SERVER: Final = (
    _SERIES[metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN]
    + len(stages.WAIT_REASONS)
    + len(stages.HOLDING_KINDS)
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What one request makes in a kind of deployment, all processes together."""

    spans: int  #: with one image per request where there are encoders
    router_series: int  #: stages of the router itself, 0 without one
    server_series: int  #: stages of one server, the mean of the legs


# Counted from the stages that requests have; tests/commands/test_size.py compares.
DEPLOYMENTS: Final = {
    "mono": Deployment(12, 0, 10),
    "router": Deployment(29, 5, 9),
    "epd": Deployment(54, 6, 10),
    "pd": Deployment(56, 6, 10),
    "epd3": Deployment(79, 7, 10),
}


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be traced."""

    deployment: str
    rps: float
    instances: int
    models: int
    routers: int
    keep_percent: float  #: of traces, after sampling; 100 without it
    retention_days: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a load costs to trace, to store and to process.

    Bytes are OTLP before compression; a core is one of the machine that the benchmarks ran on.
    """

    spans_per_s: float
    otlp_bytes_per_s: float
    received_bytes_per_day: float
    kept_bytes_per_day: float
    trace_store_bytes: float
    series: int
    collector_cores: float
    first_tier_cores: float
    sampling_memory_bytes: float
    queue_bytes_per_outage_hour: float
    exporter_cores: float


def estimate_sizing(load: Load) -> Sizing:
    """Compute what `load` costs."""
    deployment = DEPLOYMENTS[load.deployment]
    spans = load.rps * deployment.spans
    is_sampled = load.keep_percent < 100
    # Before sampling: the collector has to take a trace in before it can drop it.
    received = spans * BYTES_PER_SPAN * SECONDS_PER_DAY
    kept = received * load.keep_percent / 100
    collector_us = SAMPLING_COLLECTOR_US if is_sampled else COLLECTOR_US
    # Microseconds per span times spans per second: a million of them are one busy core.
    collector_cores = spans * collector_us / 1e6
    # Each process that answers clients has series of its own: servers, or routers with all their servers.
    stage_series = deployment.router_series + load.instances * deployment.server_series
    series = (
        load.routers * load.models * (SERIES_PER_MODEL + stage_series)
        if deployment.router_series
        else load.instances * load.models * (SERIES_PER_MODEL + deployment.server_series)
    )
    # Routers know nothing of these.
    series += load.instances * load.models * SERIES_PER_SERVER
    return Sizing(
        spans_per_s=spans,
        otlp_bytes_per_s=spans * BYTES_PER_SPAN,
        received_bytes_per_day=received,
        kept_bytes_per_day=kept,
        trace_store_bytes=kept * load.retention_days,
        series=series,
        collector_cores=collector_cores,
        first_tier_cores=(
            spans * FIRST_TIER_US / 1e6 if collector_cores > MAX_COLLECTOR_CORES else 0.0
        ),
        sampling_memory_bytes=spans * DECISION_WAIT_S * WAITING_SPAN_BYTES if is_sampled else 0.0,
        # After sampling: the queue on disk is behind it.
        queue_bytes_per_outage_hour=spans * load.keep_percent / 100 * 3600 * QUEUED_SPAN_BYTES,
        exporter_cores=spans * EXPORTER_US / 1e6,
    )


def _describe_sizing(load: Load, sizing: Sizing) -> str:
    """The answer for people, with what each line means."""
    rows = [
        (
            "spans",
            f"{sizing.spans_per_s:,.0f} /s",
            f"{DEPLOYMENTS[load.deployment].spans} a request",
        ),
        ("OTLP", f"{_format_bytes(sizing.otlp_bytes_per_s)}/s", "uncompressed, to the collector"),
        (
            "traces kept",
            f"{_format_bytes(sizing.kept_bytes_per_day)}/day",
            f"{load.keep_percent:g} %",
        ),
        (
            "trace store",
            _format_bytes(sizing.trace_store_bytes),
            f"{load.retention_days} days, at most: the store compresses",
        ),
        ("series", f"{sizing.series:,}", "of the collector's histograms, without errors, at most"),
        ("collector", f"{sizing.collector_cores:.2f} cores", "derives, makes metrics, passes on"),
        (
            "exporters",
            f"{sizing.exporter_cores:.2f} cores",
            "beside servers and routers, all together",
        ),
        (
            "outage",
            f"{_format_bytes(sizing.queue_bytes_per_outage_hour)}/hour",
            "of the collector's disk while the trace store is away",
        ),
    ]
    if sizing.sampling_memory_bytes:
        memory = _format_bytes(sizing.sampling_memory_bytes)
        rows.append(("sampling", memory, f"of memory: spans wait {DECISION_WAIT_S} s"))
    if sizing.first_tier_cores:
        rows.append(
            ("first tier", f"{sizing.first_tier_cores:.2f} cores", "too much for one: two tiers")
        )
    return "\n".join(f"{name:<12}{value:>16}   {meaning}" for name, value, meaning in rows)


def _format_bytes(count: float) -> str:
    """Bytes in the unit that makes the number short: `12.3 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # Powers of 1000, as disks and network links are sold and billed.
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} PB"


@click.command("size")
@click.option(
    "--rps", type=click.FloatRange(0, min_open=True), required=True, help="Requests a second."
)
@click.option(
    "--instances", type=click.IntRange(1), required=True, help="vLLM servers, of all legs together."
)
@click.option(
    "--deployment",
    type=click.Choice(tuple(DEPLOYMENTS)),
    default="mono",
    show_default=True,
    help="Servers alone, behind our router, or with legs apart, one image a request.",
)
@make_number_option("--models", click.IntRange(1), 1, "Models.")
@make_number_option("--routers", click.IntRange(1), 1, "Replicas of our router.")
@make_number_option(
    "--keep-percent",
    click.FloatRange(0, 100),
    100.0,
    "Percent of traces that sampling keeps, slow and failed ones included.",
)
@make_number_option("--retention-days", click.IntRange(1), 14, "Days for which traces are kept.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes and cores.")
def command(as_json: bool, **given: object) -> None:
    """Estimate spans, bytes, series and cores for a load, from sizes that were measured."""
    load = Load(**given)  # type: ignore[arg-type] # click has checked the types
    sizing = estimate_sizing(load)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(sizing), indent=2))
    else:
        click.echo(_describe_sizing(load, sizing))
