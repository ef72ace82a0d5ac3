# SPDX-License-Identifier: Apache-2.0
"""The exporter's worker thread: takes records from the queue, makes batches of spans, exports them."""

from __future__ import annotations

from typing import Final

from ttft_otel import record
from ttft_otel.exporter.batch_exporter import BatchExporter, create_span_exporter
from ttft_otel.exporter.record_queue import RecordQueue
from ttft_otel.exporter.resource_cache import ResourceCache
from ttft_otel.exporter.span_batch import BatchBuilder
from ttft_otel.guard import Guard
from ttft_otel.settings import read_settings

BATCH_WAIT_S: Final = 1.0  # seconds until a batch that is not full is exported
MAX_BATCH_RECORDS: Final = 128  # records per batch; a streamed request has two, of about 16 spans


def run_worker(record_queue: RecordQueue, pid: int) -> None:
    """Export until the queue has ended. pid: the host's process, for the spans' resource."""
    settings = read_settings()
    span_exporter = BatchExporter(
        create_span_exporter(settings),
        record_queue.counters,
        settings.endpoint,
        record_queue.ended,
        settings.protocol,
    )
    export_records(record_queue, span_exporter, BatchBuilder(ResourceCache(pid), settings.detail))


def export_records(
    record_queue: RecordQueue, span_exporter: BatchExporter, builder: BatchBuilder
) -> None:
    """Take batches from `record_queue` and export their spans, until the queue has ended.

    A record that cannot be decoded is counted and skipped.
    """
    # take_batch() returns [] only when the stream has ended and the queue is empty.
    while batch := record_queue.take_batch(MAX_BATCH_RECORDS, BATCH_WAIT_S):
        for data in batch:
            with Guard("exporter.spans"):
                try:
                    builder.add_record(record.decode_record(data))
                except ValueError:  # not a record of this version, or with broken ids
                    span_exporter.counters.add("foreign")
        for spans in builder.take_batches():
            span_exporter.export_batch(spans)
        if not span_exporter.is_failing:  # during an outage its one line is enough
            span_exporter.counters.log_losses()
