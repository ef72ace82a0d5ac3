# SPDX-License-Identifier: Apache-2.0
"""The exporter's worker thread: takes records from the queue, makes batches of spans, exports them.

It exports with the SDK's OTLP exporters, with bounded retries and one warning per outage; endpoint, headers,
TLS, compression and timeout are the standard OTEL_* variables, which these read themselves. With
TTFT_OTEL_METRICS it counts the records, and the measurements of unsampled requests, too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_EXPORTER_OTLP_TIMEOUT,
    OTEL_EXPORTER_OTLP_TRACES_TIMEOUT,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ttft_otel.exporter.otlp_exporter import (
    TlsFiles,
    build_span_exporter,
    describe_tls_files,
    find_protocol_remedy,
    renew_exporter,
)
from ttft_otel.exporter.record_queue import ExporterCounters, RecordQueue
from ttft_otel.exporter.span_batch import (
    MAX_BATCH_SPANS,
    BatchBuilder,
    ResourceCache,
    cut_spans,
    read_limits,
    take_messages,
)
from ttft_otel.tracing import measurement
from ttft_otel.tracing.engine_report import decode_message
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.settings import Settings, read_settings

if TYPE_CHECKING:
    from ttft_otel.exporter.request_metrics import RequestMetrics

log = logging.getLogger("ttft_otel")

RETRY_PAUSES_S: Final = (1.0, 2.0, 4.0)  # seconds between attempts for a batch; then it is lost
EXPORT_TIMEOUT_S: Final = 4.0  # seconds per attempt, unless OTEL_EXPORTER_OTLP_TIMEOUT is set
BATCH_WAIT_S: Final = 1.0  # seconds; OTEL_BSP_SCHEDULE_DELAY
MAX_BATCH_RECORDS: Final = 128  # records per batch; a streamed request has two, of about 16 spans


class _FailureLog(logging.Handler):
    """Keeps the first log message of an attempt, for our own line; other libraries log nothing.

    The first one has the cause ("connection refused"), the last one only says that it gave up.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        for name in ("opentelemetry", "urllib3", "requests", "grpc"):
            logger = logging.getLogger(name)
            # Handlers of the SDK's loggers would write a traceback per attempt to the server's stderr.
            logger.handlers[:] = [self]
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()[:300]


@dataclass(eq=False)
class BatchExporter:
    """Sends one batch at a time; during an outage of the collector records pile up in RecordQueue."""

    exporter: SpanExporter
    counters: ExporterCounters
    endpoint: str  #: for log lines
    stop_retrying: threading.Event  #: set when the host is gone: one attempt per batch, no pauses
    protocol: str = ""  #: for log lines
    failure_log: _FailureLog = field(default_factory=_FailureLog, init=False)
    tls_files: TlsFiles = field(default_factory=describe_tls_files, init=False)
    # 0.0 stands for "not failing": the monotonic clock is past it on a running machine.
    _failing_since: float = field(default=0.0, init=False)
    _lost_spans: int = field(default=0, init=False)

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed; the outage is logged then."""
        return bool(self._failing_since)

    def export_batch(self, batch: Sequence[ReadableSpan]) -> None:
        """Export one batch; returns when it was accepted, or counted as failed."""
        if self._retry_export(batch):
            self.counters.add("exported", len(batch))
            self._note_recovery()
        else:
            self.counters.add("failed", len(batch))
            self._lost_spans += len(batch)

    def _retry_export(self, batch: Sequence[ReadableSpan]) -> bool:
        # The last attempt is followed by no pause: the batch is lost then.
        for pause_s in (*RETRY_PAUSES_S, 0.0):
            if self._try_export(batch):
                return True
            self._note_failure()
            # An event, not sleep(): the host's end cuts a pause short, and the drain may go on.
            if self.stop_retrying.wait(pause_s):
                break
        return False

    def _try_export(self, batch: Sequence[ReadableSpan]) -> bool:
        result = SpanExportResult.FAILURE
        self.failure_log.text = ""
        # Whatever the SDK raises is a failed attempt; the worker's thread has to live on.
        with Guard("exporter.ship"):
            try:
                result = self.exporter.export(batch)
            except OSError as error:  # the SDK before 1.34 lets errors of requests pass
                self.failure_log.text = str(error)
            if result is not SpanExportResult.SUCCESS:
                self.tls_files = renew_exporter(self.exporter, self.tls_files)
        return result is SpanExportResult.SUCCESS

    def _note_failure(self) -> None:
        # One warning per outage, however many batches fail in it.
        if self.is_failing:
            return
        self._failing_since = time.monotonic()
        log.warning(
            "ttft-otel exporter: export to %s failed: %s; retrying. The server is not affected; the "
            "oldest records are dropped when the queue is full",
            self.endpoint,
            self._find_remedy() or self.failure_log.text or "no answer",
        )

    def _find_remedy(self) -> str:
        # Not while the host waits for the drain: the probe may take longer than the rest of it.
        if not self.protocol or self.stop_retrying.is_set():
            return ""
        return find_protocol_remedy(self.protocol, self.endpoint)

    def _note_recovery(self) -> None:
        if not self.is_failing:
            return
        log.warning(
            "ttft-otel exporter: export to %s works again after %.0f s; %d spans were lost",
            self.endpoint,
            time.monotonic() - self._failing_since,
            self._lost_spans,
        )
        self._failing_since = 0.0
        self._lost_spans = 0


def create_span_exporter(settings: Settings) -> SpanExporter:
    """The SDK's exporter for the protocol in `settings`; it reads the other OTEL_* variables itself."""
    # If an HTTP client is instrumented in this environment, our own exports must not become spans.
    attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
    for name in settings.unreadable:
        os.environ.pop(name, None)
    if not os.environ.get(OTEL_EXPORTER_OTLP_TRACES_TIMEOUT):
        os.environ.setdefault(OTEL_EXPORTER_OTLP_TIMEOUT, f"{EXPORT_TIMEOUT_S:.0f}")
    exporter = build_span_exporter(settings.protocol)
    take_messages(exporter)
    return exporter


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
    from ttft_otel.exporter.request_metrics import start_pusher

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
