# SPDX-License-Identifier: Apache-2.0
"""Spans for the collector's tests: ours, built by the exporter's own code, and those of others, raw.

Sent as OTLP over HTTP, whole requests at once, so that a test knows what was taken and what was refused.
"""

from __future__ import annotations

import itertools
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from tracing_fakes import make_short_record

from lab.otlp_sinks import MetricSink, SpanSink
from tests.stack.running_stack import RunningCollector, wait_until
from ttft_otel.exporter import span_batch as exporter
from ttft_otel.model import stages
from ttft_otel.model.names import keys, metric_names, span_names
from ttft_otel.model.record import Attributes, Piece, Record, Server, Ttft

PUSH_S = 0.4  # of CollectorFront's collector, from one push of metrics to the next
span_numbers = itertools.count(1)


def to_any_value(of: Any) -> AnyValue:
    """A Python value as OTLP has it."""
    if isinstance(of, bool):
        return AnyValue(bool_value=of)
    if isinstance(of, int):
        return AnyValue(int_value=of)
    if isinstance(of, float):
        return AnyValue(double_value=of)
    return AnyValue(string_value=of)


def to_key_values(of: dict[str, Any]) -> list[KeyValue]:
    """Attributes as OTLP has them."""
    return [KeyValue(key=key, value=to_any_value(each)) for key, each in of.items()]


def build_raw_span(
    name: str,
    us: int = 1000,
    events: Sequence[tuple[str, int, dict[str, Any]]] = (),
    trace: str = "",
    failed: bool = False,
    **attributes: Any,
) -> Span:
    """A raw span that ended now; dots in attributes' names are written __."""
    number, end = next(span_numbers), time.time_ns()
    start = end - us * 1000
    made = Span(
        name=name,
        trace_id=bytes.fromhex(trace) if trace else number.to_bytes(16, "big"),
        span_id=number.to_bytes(8, "big"),
        start_time_unix_nano=start,
        end_time_unix_nano=end,
        attributes=to_key_values(
            {key.replace("__", "."): each for key, each in attributes.items()}
        ),
        events=[
            Span.Event(name=each, time_unix_nano=start + at * 1000, attributes=to_key_values(more))
            for each, at, more in events
        ],
    )
    made.status.code = 2 if failed else 0
    return made


def build_export_request(
    spans: Iterable[Span], scope: str = "ttft_otel", service: str = "vllm", **resource: Any
) -> ExportTraceServiceRequest:
    """Raw spans of one scope and one resource."""
    made = ExportTraceServiceRequest()
    each = made.resource_spans.add()
    named = {key.replace("__", "."): item for key, item in resource.items()}
    each.resource.attributes.extend(to_key_values({"service.name": service} | named))
    inner = each.scope_spans.add()
    inner.scope.name = scope
    inner.spans.extend(spans)
    return made


def build_own_record(
    ms: float = 100.0,
    number: int | None = None,
    role: str = "mono",
    outermost: bool = True,
    error: str = "",
    model: str = "tiny",
    name: str = span_names.TTFT,
    service: str = "vllm",
    state: str = "",
    trace_id: str = "",
) -> Record:
    """A request of ours with a TTFT of so many milliseconds, most of it queue, 100 us unattributed."""
    number = next(span_numbers) if number is None else number
    total = round(ms * 1000)
    parts = {"receive": total // 10, "prefill.queue": total - total // 10 - 100}
    pieces, at = [], 0
    for stage, us in (*parts.items(), (stages.UNATTRIBUTED, 100)):
        pieces.append(Piece("stage", stage, at, at + us))
        at += us
    shared: Attributes = {keys.OPERATION: "chat", keys.PROVIDER: "vllm", keys.MODEL: model}
    return make_short_record(
        trace_id=trace_id or f"{number + (0x5EED << 96):032x}",
        span_id=f"{number:016x}",
        state=state,
        start_ns=time.time_ns() - total * 1000,
        role=role,
        outermost=outermost,
        service=service,
        request_id=f"request-{number}",
        attributes=shared,
        ttft=Ttft(
            span_id=f"{number + (1 << 40):016x}",
            name=name,
            start=0,
            end=total,
            stages=parts,
            unattributed=100,
            clamped=0,
            pieces=(*pieces, Piece("part", "tokenize", 0, 10)),
            attributes={keys.STREAMING: True},
            error=error,
        ),
        server=Server("POST /v1/completions", total + 500, 500 if error else 200, {}, error),
    )


def build_own_resource(instance: str, service: str = "vllm") -> Resource:
    """Who a span is from."""
    return Resource({"service.name": service, "service.instance.id": instance})


def build_own_request(
    records: Iterable[Record], instance: str = "host:1"
) -> ExportTraceServiceRequest:
    """Records as the exporter would send them, in one request."""
    made: list[Any] = []
    for each in records:
        made += exporter.build_spans(each, build_own_resource(instance, each.service))
    return encode_spans(made)


def post_export(
    url: str,
    body: Message | bytes,
    kind: str = "application/x-protobuf",
    path: str = "/v1/traces",
) -> int:
    """The status that the collector answers."""
    data = body if isinstance(body, bytes) else body.SerializeToString()
    asked = urllib.request.Request(f"{url}{path}", data, {"content-type": kind})
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def post_records(url: str, records: Sequence[Record], portion: int = 100) -> None:
    """Send all `records` to the collector at `url`, so many in one request, and check that it takes them."""
    for at in range(0, len(records), portion):
        assert post_export(url, build_own_request(records[at : at + portion])) == 200


@dataclass
class CollectorFront:
    """A collector, and what stands in Tempo's and Prometheus's place behind it."""

    collector: RunningCollector
    spans: SpanSink
    metrics: MetricSink

    def send_and_wait(self, *bodies: ExportTraceServiceRequest) -> None:
        """Send what must all be taken, then wait until as many spans have come out."""
        wanted = len(self.spans.list_spans())
        for body in bodies:
            scopes = [scope for each in body.resource_spans for scope in each.scope_spans]
            wanted += sum(len(scope.spans) for scope in scopes)
            assert post_export(self.collector.http, body) == 200
        wait_until(lambda: len(self.spans.list_spans()) >= wanted)

    def count_ttfts(self, **only: str) -> int:
        """TTFTs that have been counted, of a job or an instance if one is given."""
        return int(self.metrics.sum_field(metric_names.TTFT_DURATION, **only))

    def wait_until_counted(
        self,
        many: float,
        metric: str = metric_names.TTFT_DURATION,
        field: str = "count",
        **only: str,
    ) -> None:
        """Wait until a metric has counted so many, of a job or an instance if one is given."""
        wait_until(lambda: self.metrics.sum_field(metric, field, **only) >= many)
