# SPDX-License-Identifier: Apache-2.0
"""The exporter's worker thread: takes records from the queue, makes batches of spans, exports them.

With TTFT_OTEL_METRICS it counts them, and the measurements of unsampled requests, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
)

from ttft_otel.exporter.batch_exporter import BatchExporter, create_span_exporter
from ttft_otel.exporter.record_queue import RecordQueue
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.exporter.spans.span_batch import (
    MAX_BATCH_SPANS,
    BatchBuilder,
    cut_spans,
    read_limits,
)
from ttft_otel.tracing import measurement
from ttft_otel.tracing.engine_report import decode_message
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.settings import read_settings

if TYPE_CHECKING:
    from ttft_otel.exporter.metrics.request_metrics import RequestMetrics

BATCH_WAIT_S: Final = 1.0  # seconds; OTEL_BSP_SCHEDULE_DELAY
MAX_BATCH_RECORDS: Final = 128  # records per batch; a streamed request has two, of about 16 spans


def run_worker(
    record_queue: RecordQueue, pid: int, engine_settings: Mapping[str, int] | None = None
) -> None:
    """Export until the queue has ended.

    pid, engine_settings: the host's process, and what it knows of its engine, for the spans' resource.
    """
    settings = read_settings()
    span_exporter = BatchExporter(
        create_span_exporter(settings),
        record_queue.counters,
        settings.endpoint,
        record_queue.ended,
        settings.protocol,
    )
    resources = ResourceCache(pid, settings.metrics, engine_settings)
    numbers = settings.numbers
    builder = BatchBuilder(
        resources, settings.detail, numbers.get(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, MAX_BATCH_SPANS)
    )
    limits = read_limits(numbers)
    wait_s = numbers.get(OTEL_BSP_SCHEDULE_DELAY, BATCH_WAIT_S * 1000) / 1000
    if not settings.metrics:
        export_records(record_queue, span_exporter, builder, None, limits, wait_s)
        return
    # Imported where metrics are on: the SDK's part for them takes 30 ms and 2 MB.
    from ttft_otel.exporter.metrics.request_metrics import start_pusher

    pusher = start_pusher(settings, resources, record_queue.counters)
    export_records(record_queue, span_exporter, builder, pusher.metrics, limits, wait_s)
    pusher.finish()


def export_records(
    record_queue: RecordQueue,
    span_exporter: BatchExporter,
    builder: BatchBuilder,
    metrics: RequestMetrics | None = None,
    limits: Mapping[str, int] | None = None,
    wait_s: float = BATCH_WAIT_S,
) -> None:
    """Take batches from `record_queue` and export their spans, until the queue has ended.

    A record that cannot be decoded is counted and skipped. limits: what is cut off spans. wait_s: seconds
    until a batch that is not full is exported.
    """
    # take_batch() returns [] only when the stream has ended and the queue is empty.
    while batch := record_queue.take_batch(MAX_BATCH_RECORDS, wait_s):
        taken = len(batch)
        if metrics is not None:
            batch = _count_measurements(batch, metrics)
        for data in batch:
            with Guard("exporter.spans"):
                try:
                    decoded = decode_message(data)
                    builder.add_record(decoded)
                    if metrics is not None:
                        metrics.add_record(decoded)
                except ValueError:  # not a record of this version, or with broken ids
                    span_exporter.counters.add("foreign")
        for spans in builder.take_batches():
            if limits:
                cut_spans(spans.request, limits)
            span_exporter.export_batch(spans)
        # Last: what an exporter holds that is killed has to count as lost.
        span_exporter.counters.add("finished", taken)
        if not span_exporter.is_failing:  # during an outage its one line is enough
            span_exporter.counters.log_losses()


def _count_measurements(batch: list[bytes], metrics: RequestMetrics) -> list[bytes]:
    """Count the measurements in `batch`; returns what else is in it."""
    first_byte = measurement.PREFIX[0]
    measurements = [data for data in batch if data[0] == first_byte]
    if not measurements:
        return batch
    with Guard("exporter.metrics"):
        metrics.add_measurements(measurements)
    return [data for data in batch if data[0] != first_byte]
