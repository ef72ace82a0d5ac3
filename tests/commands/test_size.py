# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel size`: its constants against span trees as exporters send them, its sums, its output."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from opentelemetry.sdk.resources import Resource

from benchmarks import otlp_bodies
from ttft_otel.commands import main as cli
from ttft_otel.commands import size
from ttft_otel.exporter.spans import span_builder
from ttft_otel.model import stages
from ttft_otel.model.metric_table import METRICS
from ttft_otel.model.names import metric_names
from ttft_otel.model.record import Call, Record

LOAD = size.Load(
    "epd", rps=10, instances=4, models=1, routers=1, keep_percent=100.0, retention_days=14
)
CHECKOUT = Path(__file__).parents[2]
LEGS = {
    "router": ("mono",),
    "epd": ("encode", "prefill_decode"),
    "pd": ("prefill", "decode"),
    "epd3": ("encode", "prefill", "decode"),
}
SERVER_STAGES = {
    "mono": (*otlp_bodies.TEXT_STAGES, *otlp_bodies.LAST_STAGES),
    "encode": (*otlp_bodies.ENCODE_STAGES, "ec.transfer", "output", "egress"),
    "prefill": (*otlp_bodies.TEXT_STAGES, "ec.transfer", *otlp_bodies.LAST_STAGES),
    "prefill_decode": (*otlp_bodies.TEXT_STAGES, "ec.transfer", *otlp_bodies.LAST_STAGES),
    "decode": (*otlp_bodies.TEXT_STAGES, "kv.transfer", *otlp_bodies.LAST_STAGES),
}


def build_deployment_records(deployment: str) -> list[Record]:
    """What the processes of a deployment export for one request."""
    draw = random.Random(5)

    def build(role: stages.Role, names: tuple[str, ...], calls: tuple[Call, ...] = ()) -> Record:
        lengths = otlp_bodies.draw_stage_lengths(names, draw)
        outermost = role == "router" or deployment == "mono"
        return otlp_bodies.build_benchmark_record(role, lengths, 1, outermost, calls)

    if deployment == "mono":
        return [build("mono", SERVER_STAGES["mono"])]
    legs = LEGS[deployment]
    router_stages: tuple[str, ...] = ("router.receive", "router.route")
    for leg in legs:
        router_stages += (f"router.hop.{leg}", *(f"{leg}.{name}" for name in SERVER_STAGES[leg]))
    calls = tuple(
        Call(f"c{place:015x}", "POST /v1/chat/completions", leg, 0, 100_000, 200)
        for place, leg in enumerate(legs)
    )
    router = build("router", (*router_stages, "router.egress"), calls)
    return [router, *(build(leg, SERVER_STAGES[leg]) for leg in legs)]  # type: ignore[arg-type]


@pytest.mark.parametrize("deployment", size.DEPLOYMENTS)
def test_spans_and_bytes(deployment: str) -> None:
    """The table holds the spans that the exporter makes, and their mean size."""
    resource = Resource({"service.name": "vllm", "service.instance.id": "vllm:1"})
    spans = [
        span
        for record in build_deployment_records(deployment)
        for span in span_builder.build_spans(record, resource)
    ]

    assert size.DEPLOYMENTS[deployment].spans == len(spans)
    # Messages of hundreds of spans, so that the resource is not sent with each.
    body = otlp_bodies.pack_spans(spans * 20)
    assert len(body.data) / len(spans * 20) == pytest.approx(size.BYTES_PER_SPAN, rel=0.15)


@pytest.mark.parametrize("deployment", size.DEPLOYMENTS)
def test_series(deployment: str) -> None:
    """One series for each stage of the outermost process and, through a router, of each server's leg."""
    described = size.DEPLOYMENTS[deployment]
    legs = LEGS.get(deployment, ("mono",))

    counts = [len(SERVER_STAGES[leg]) for leg in legs]
    own = (
        len(legs) + 3 + 1 if deployment in LEGS else 0
    )  # hops, receive, route, egress, unattributed
    unattributed = 0 if deployment in LEGS else 1
    assert described.router_series == own
    assert described.server_series == round(sum(counts) / len(counts)) + unattributed


def test_series_of_histograms() -> None:
    """Each histogram with bounds has a series for each, +Inf, sum and count; a native one has one."""
    bounded = {name: len(each.bounds_s) + 3 for name, each in METRICS.items() if each.bounds_s}

    whole = (
        bounded[metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN]
        + bounded[metric_names.GEN_AI_SERVER_REQUEST_DURATION]
    )
    assert size.SERIES_PER_MODEL == 1 + whole
    waits = len(stages.WAIT_REASONS) + len(stages.HOLDING_KINDS)
    assert (
        size.SERIES_PER_SERVER == bounded[metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN] + waits
    )
    one, two = (size.estimate_sizing(replace(LOAD, instances=each)).series for each in (4, 5))
    assert two - one == size.DEPLOYMENTS["epd"].server_series + size.SERIES_PER_SERVER


def test_constants_are_those_that_are_quoted() -> None:
    """The collector's sizes and the exporter's result say the same."""
    readme = (CHECKOUT / "collector" / "README.md").read_text("utf-8")
    results = json.loads((CHECKOUT / "benchmarks" / "results" / "exporter.json").read_text("utf-8"))

    assert f"{size.BYTES_PER_SPAN} bytes a span" in readme
    for cost in (size.COLLECTOR_US, size.SAMPLING_COLLECTOR_US, size.FIRST_TIER_US):
        assert f"| {cost} µs |" in readme
    assert size.EXPORTER_US == results["http_span_us"]["value"]
    sampling = (CHECKOUT / "collector" / "sampling.yaml").read_text("utf-8")
    assert f"TTFT_DECISION_WAIT:-{size.DECISION_WAIT_S}s" in sampling


def test_sums() -> None:
    """More requests cost more in proportion, sampling keeps what it says, a second tier is named."""
    one = size.estimate_sizing(LOAD)
    ten = size.estimate_sizing(replace(LOAD, rps=100))
    sampled = size.estimate_sizing(replace(LOAD, rps=100, keep_percent=5))
    huge = size.estimate_sizing(replace(LOAD, rps=10_000))

    assert ten.spans_per_s == pytest.approx(10 * one.spans_per_s)
    assert (ten.series, one.first_tier_cores, one.sampling_memory_bytes) == (one.series, 0, 0)
    assert sampled.kept_bytes_per_day == pytest.approx(ten.kept_bytes_per_day / 20)
    assert sampled.sampling_memory_bytes > 0
    assert huge.first_tier_cores > 0


def test_command() -> None:
    """For people, for programs, and for who forgets the load."""
    runner = CliRunner()
    command = cli.load_subcommand("size", cli.SUBCOMMANDS["size"])
    arguments = ["--rps", "50", "--instances", "8", "--deployment", "epd", "--keep-percent", "10"]

    text = runner.invoke(command, arguments).output
    assert "2,700 /s" in text and "of memory: spans wait 30 s" in text
    answer = json.loads(runner.invoke(command, [*arguments, "--json"]).output)
    assert answer["spans_per_s"] == 2700
    assert runner.invoke(command, ["--instances", "1"]).exit_code == 2
    assert runner.invoke(command, ["--rps", "0", "--instances", "1"]).exit_code == 2
