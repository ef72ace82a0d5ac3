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

import msgspec
from google.protobuf.message import Message
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource

from lab.otlp_sinks import MetricSink, SpanSink
from tests.report.sample_records import fetch_any_status, make_leg_record
from tests.stack.running_stack import RunningCollector, wait_until
from ttft_otel.exporter import span_batch as exporter
from ttft_otel.model.names import metric_names
from ttft_otel.model.record import RECORD_VERSION, Record
from ttft_otel.model.stages import Role

PUSH_S = 0.4  # of CollectorFront's collector, from one push of metrics to the next
span_numbers = itertools.count(1)


VALUE_FIELDS = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}


def to_key_values(of: dict[str, Any]) -> list[KeyValue]:
    """Attributes as OTLP has them."""
    return [
        KeyValue(key=key, value=AnyValue(**{VALUE_FIELDS[type(each)]: each}))
        for key, each in of.items()
    ]


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
    role: Role = "mono",
    outermost: bool = True,
    model: str = "tiny",
    **fields: str,
) -> Record:
    """A request of ours with a TTFT of so many milliseconds, most of it queue."""
    number, total = next(span_numbers), round(ms * 1000)
    made = make_leg_record(
        role,
        {"receive": total // 10, "prefill.queue": total - total // 10},
        f"{number + (0x5EED << 96):032x}",
        start_ns=time.time_ns() - total * 1000,
        request_id=f"request-{number}",
        outermost=outermost,
        lost=0,
        tail=500,
        model=model,
    )
    return msgspec.structs.replace(made, version=RECORD_VERSION, **{"service": "vllm", **fields})


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
    return fetch_any_status(asked)[0]


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
