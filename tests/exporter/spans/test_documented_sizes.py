# SPDX-License-Identifier: Apache-2.0
"""The sizes by which a deployment is planned, against span trees as exporters send them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource

from benchmarks import otlp_bodies
from ttft_otel.exporter.spans import span_builder
from ttft_otel.model import stages
from ttft_otel.model.record import Call, Record

CHECKOUT = Path(__file__).parents[3]
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


def test_spans_and_bytes() -> None:
    """docs/guides/kubernetes.md has the spans that the exporter makes of a request, and their mean size."""
    resource = Resource({"service.name": "vllm", "service.instance.id": "vllm:1"})
    guide = (CHECKOUT / "docs" / "guides" / "kubernetes.md").read_text("utf-8")
    row = re.search(r"\| spans \((\d+) bytes each, OTLP\) \| (.+) \|", guide)
    assert row is not None
    bytes_per_span, counts = int(row[1]), [int(each) for each in row[2].split(" | ")]
    for deployment, count in zip(("mono", *LEGS), counts, strict=True):
        spans = [
            span
            for record in build_deployment_records(deployment)
            for span in span_builder.build_spans(record, resource)
        ]
        assert len(spans) == count, deployment
        # Messages of hundreds of spans, so that the resource is not sent with each.
        body = otlp_bodies.pack_spans(spans * 20)
        assert len(body.data) / len(spans * 20) == pytest.approx(bytes_per_span, rel=0.15)
