# SPDX-License-Identifier: Apache-2.0
"""Send one trace through a running stack and look for it at every hop; command.py shows the verdicts.

It is one `encode` span of a service of its own: panels and alerts of TTFT leave encoders out, so that a
smoke test is nobody's slow request. It is slow enough to pass any sampling.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource

from ttft_otel import names, record
from ttft_otel.exporter import spans
from ttft_otel.lab.stack import ask, parts
from ttft_otel.lab.stack.parts import Addresses

SERVICE: Final = "ttft-smoke"
STAGES: Final = {"receive": 500, "preprocess": 1_999_067, "encoder.compute": 1_000_000}
TTFT_MS: Final = sum(STAGES.values()) // 1000
ARRIVES_S: Final = 60.0  # a tail sampler waits for late spans, Tempo's search for its first cut


@dataclass(frozen=True, slots=True)
class Doors:
    """Where to send and where to ask; grafana "" when there is none."""

    otlp: str
    tempo: str
    prometheus: str
    grafana: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one hop did; why: what is wrong and what to do, when it did not pass."""

    hop: str
    passed: bool
    seconds: float
    why: str = ""


def native(at: Addresses, grafana: str) -> Doors:
    """A native stack: everything can be asked directly."""
    collector, tempo, prometheus = map(parts.url, (at.collector_http, at.tempo, at.prometheus))
    return Doors(collector, tempo, prometheus, grafana)


def contained(at: Addresses) -> Doors:
    """Containers publish the collector and Grafana only; Grafana passes questions on."""
    grafana = parts.url(at.grafana)
    proxy = f"{grafana}/api/datasources/proxy/uid"
    return Doors(parts.url(at.collector_http), f"{proxy}/tempo", f"{proxy}/prometheus", grafana)


def run(doors: Doors, arrives: float = ARRIVES_S) -> Iterator[Verdict]:
    """Hop by hop; the first that fails is the place to look at, later ones are tried all the same."""
    trace_id, began = secrets.token_hex(16), time.time()
    yield attempt("collector takes OTLP", lambda: send(doors, trace_id), 0.0, COLLECTOR)
    query = f'{{ span:name = "{names.ENCODE}" && span.ttft_ms = {TTFT_MS} }}'

    def found() -> bool:
        traces = ask.search(doors.tempo, query, start=began - 60, end=time.time() + 60)
        return trace_id in {trace["traceID"].zfill(32) for trace in traces}

    def counted() -> bool:
        series = f'ttft_duration_seconds{{job="{SERVICE}"}}'
        seen = ask.exemplars(doors.prometheus, series, began - 60, time.time() + 60)
        return trace_id in {each["labels"].get("trace_id") for each in seen}

    yield attempt("Tempo finds it by TraceQL", found, arrives, TEMPO)
    yield attempt("Prometheus has its TTFT", counted, arrives, PROMETHEUS)
    if doors.grafana:
        health = f"{doors.grafana}/api/health"
        yield attempt("Grafana answers", lambda: bool(ask.get(health)), 0.0, GRAFANA)


COLLECTOR: Final = "is the stack up? scripts/stack status"
TEMPO: Final = (
    "look for `exporter` errors in the collector's log, then for refusals in Tempo's;"
    " without the attribute ttft_ms the collector runs another configuration"
)
PROMETHEUS: Final = (
    "look for `exporter` errors in the collector's log; Prometheus needs"
    f" {' '.join(parts.PROMETHEUS_FLAGS)}"
)
GRAFANA: Final = "read Grafana's log; scripts/stack status says where it should be"


def attempt(hop: str, check: Callable[[], bool], seconds: float, remedy: str) -> Verdict:
    """Try until it is true or the time is over; at least once."""
    began = time.monotonic()
    while True:
        why = "it did not arrive"
        try:
            if check():
                return Verdict(hop, True, time.monotonic() - began)
        except ask.AskError as error:
            why = str(error)
        spent = time.monotonic() - began
        if spent >= seconds:
            return Verdict(hop, False, spent, f"{why}; {remedy}")
        time.sleep(0.5)


def send(doors: Doors, trace_id: str) -> bool:
    """The trace, as the exporter would send it."""
    resource = Resource({SERVICE_NAME: SERVICE, SERVICE_INSTANCE_ID: SERVICE})
    body = encode_spans(spans.build(sample(trace_id), resource)).SerializeToString()
    ask.post(f"{doors.otlp}/v1/traces", body)
    return True


def sample(trace_id: str) -> record.Record:
    """One request whose stages add up."""
    total = sum(STAGES.values())
    pieces, at = [], 0
    for stage, length in STAGES.items():
        pieces.append(record.Piece("stage", stage, at, at + length))
        at += length
    ttft = record.Ttft(secrets.token_hex(8), names.ENCODE, 0, total, STAGES, 0, 0, tuple(pieces))
    return record.Record(
        version=record.VERSION,
        trace_id=trace_id,
        span_id=secrets.token_hex(8),
        parent_id="",
        flags=1,
        state="",
        start_ns=time.time_ns() - total * 1000,
        role="encode",
        outermost=True,
        service=SERVICE,
        request_id=f"smoke-{trace_id[:8]}",
        attributes={names.MODEL: "smoke"},
        ttft=ttft,
        server=record.Server("POST /smoke", total, 200),
    )
