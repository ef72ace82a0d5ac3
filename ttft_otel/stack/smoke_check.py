# SPDX-License-Identifier: Apache-2.0
"""Send one trace through a running stack and look for it at every hop; for commands/stack.py.

It is one `encode` span of a service of its own: panels and alerts of TTFT leave encoders out, so that a
smoke test does not count as a slow request. It is slow enough to pass any sampling.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import click
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from rich.console import Console
from rich.text import Text

from ttft_otel.exporter.spans import span_builder
from ttft_otel.model import record
from ttft_otel.model.names import keys, span_names
from ttft_otel.stack import stack_queries

SMOKE_SERVICE: Final = "ttft-smoke"
# Almost three seconds, above sampling's limit of one; a sum that no other span has by chance.
SMOKE_STAGES_US: Final = {"receive": 500, "preprocess": 1_999_067, "encoder.compute": 1_000_000}
SMOKE_TTFT_MS: Final = sum(SMOKE_STAGES_US.values()) // 1000
# Seconds: a tail sampler waits for late spans, Tempo's search for its first block.
ARRIVAL_TIMEOUT_S: Final = 60.0

COLLECTOR_HOP_REMEDY: Final = "is the stack up? ttft-otel stack status"
TEMPO_HOP_REMEDY: Final = (
    "look for `exporter` errors in the collector's log, then for refusals in Tempo's;"
    " without the attribute ttft_ms the collector runs another configuration"
)
PROMETHEUS_HOP_REMEDY: Final = (
    "look for `exporter` errors in the collector's log; Prometheus needs --web.enable-otlp-receiver"
)
GRAFANA_HOP_REMEDY: Final = "read Grafana's log"


@dataclass(frozen=True, slots=True)
class StackEndpoints:
    """Where a running stack is reached, as base URLs.

    otlp: of the collector, OTLP over HTTP. tempo, prometheus: for queries.
    grafana: "" where the stack has none.
    """

    otlp: str
    tempo: str
    prometheus: str
    grafana: str = ""


@dataclass(frozen=True, slots=True)
class HopVerdict:
    """Result of one hop.

    hop: what was checked, as printed. seconds: until the check passed or was given up.
    why: what is wrong and what to do, when it did not pass.
    """

    hop: str
    passed: bool
    seconds: float
    why: str = ""


def get_container_endpoints(
    otlp: str = "http://127.0.0.1:4318", grafana: str = "http://127.0.0.1:3000"
) -> StackEndpoints:
    """Containers publish only collector and Grafana; queries go through Grafana's proxy."""
    proxy = f"{grafana}/api/datasources/proxy/uid"
    return StackEndpoints(otlp, f"{proxy}/tempo", f"{proxy}/prometheus", grafana)


def check_hops(
    endpoints: StackEndpoints, timeout_s: float = ARRIVAL_TIMEOUT_S
) -> Iterator[HopVerdict]:
    """Check all hops in order; the first failure is where to look, later hops are checked all the same."""
    # A new id each time: an earlier smoke test's trace must not pass for this one.
    trace_id = secrets.token_hex(16)
    started = time.time()
    yield check_hop(
        "collector takes OTLP",
        lambda: send_smoke_trace(endpoints, trace_id),
        0.0,
        COLLECTOR_HOP_REMEDY,
    )
    query = f'{{ span:name = "{span_names.ENCODE}" && span.ttft_ms = {SMOKE_TTFT_MS} }}'

    def is_trace_found() -> bool:
        traces = stack_queries.search_traces(
            endpoints.tempo, query, start=started - 60, end=time.time() + 60
        )
        # Tempo leaves out leading zeros. A minute on both sides allows for clocks that differ.
        return trace_id in {trace["traceID"].zfill(32) for trace in traces}

    def is_ttft_counted() -> bool:
        # By exemplar: the count alone would also be an earlier test's.
        series = f'ttft_duration_seconds{{job="{SMOKE_SERVICE}"}}'
        seen = stack_queries.query_exemplars(
            endpoints.prometheus, series, started - 60, time.time() + 60
        )
        return trace_id in {each["labels"].get("trace_id") for each in seen}

    yield check_hop("Tempo finds it by TraceQL", is_trace_found, timeout_s, TEMPO_HOP_REMEDY)
    # The same trace by the other way, which does not lead through Tempo.
    yield check_hop("Prometheus has its TTFT", is_ttft_counted, timeout_s, PROMETHEUS_HOP_REMEDY)
    if endpoints.grafana:
        health = f"{endpoints.grafana}/api/health"
        yield check_hop(
            # 0 seconds: it answers now or not, as nothing has to arrive there.
            "Grafana answers",
            lambda: bool(stack_queries.fetch_json(health)),
            0.0,
            GRAFANA_HOP_REMEDY,
        )


def print_hops(endpoints: StackEndpoints, timeout_s: float, as_json: bool) -> bool:
    """Check all hops and print a line for each, or a JSON document; gives whether all passed."""
    console = Console(highlight=False)
    verdicts = []
    for verdict in check_hops(endpoints, timeout_s):
        verdicts.append(verdict)
        mark = Text("ok  ", "green") if verdict.passed else Text("FAIL", "bold red")
        why = "" if verdict.passed else f": {verdict.why}"
        # Line by line: a hop may take a minute, and a reader should see which one.
        if not as_json:
            said = Text.assemble(mark, f"  {verdict.hop}, {verdict.seconds:.1f} s{why}")
            # Soft: remedies are copied from the terminal, and line breaks would be copied, too.
            console.print(said, soft_wrap=True)
    if as_json:
        click.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    return all(verdict.passed for verdict in verdicts)


def check_hop(hop: str, check: Callable[[], bool], seconds: float, remedy: str) -> HopVerdict:
    """Try until the check passes or the time is over, at least once."""
    started = time.monotonic()
    while True:
        why = "it did not arrive"
        try:
            if check():
                return HopVerdict(hop, True, time.monotonic() - started)
        # The last reason is reported: an early one may have passed while parts were starting.
        except stack_queries.BackendQueryError as error:
            why = str(error)
        spent = time.monotonic() - started
        if spent >= seconds:
            return HopVerdict(hop, False, spent, f"{why}; {remedy}")
        time.sleep(0.5)


def send_smoke_trace(endpoints: StackEndpoints, trace_id: str) -> bool:
    """The trace, as the exporter would send it."""
    resource = Resource({SERVICE_NAME: SMOKE_SERVICE, SERVICE_INSTANCE_ID: SMOKE_SERVICE})
    # With the exporter's own code: what passes here is what servers send.
    body = encode_spans(
        span_builder.build_spans(build_smoke_record(trace_id), resource)
    ).SerializeToString()
    stack_queries.send_body(f"{endpoints.otlp}/v1/traces", body)
    return True


def build_smoke_record(trace_id: str) -> record.Record:
    """One request whose stages add up."""
    total = sum(SMOKE_STAGES_US.values())
    pieces = []
    offset_us = 0
    for stage, length in SMOKE_STAGES_US.items():
        pieces.append(record.Piece("stage", stage, offset_us, offset_us + length))
        offset_us += length
    ttft = record.Ttft(
        secrets.token_hex(8), span_names.ENCODE, 0, total, SMOKE_STAGES_US, 0, 0, tuple(pieces)
    )
    return record.Record(
        version=record.RECORD_VERSION,
        trace_id=trace_id,
        span_id=secrets.token_hex(8),
        parent_id="",
        flags=1,
        state="",
        # In the past by its own length, so that it ends now.
        start_ns=time.time_ns() - total * 1000,
        role="encode",
        outermost=True,
        service=SMOKE_SERVICE,
        request_id=f"smoke-{trace_id[:8]}",
        attributes={keys.MODEL: "smoke"},
        ttft=ttft,
        server=record.Server("POST /smoke", total, 200),
    )
