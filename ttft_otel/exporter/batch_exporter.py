# SPDX-License-Identifier: Apache-2.0
"""Export batches of spans with the SDK's OTLP exporters: bounded retries, one warning per outage.

export_worker.py passes batches (span_batch.py). Endpoint, headers, TLS, compression and timeout are the
standard OTEL_* variables, which the SDK's exporter reads itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_TIMEOUT,
    OTEL_EXPORTER_OTLP_TRACES_TIMEOUT,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.otlp_exporter import (
    TlsFiles,
    build_span_exporter,
    describe_tls_files,
    renew_exporter,
)
from ttft_otel.exporter.protocol_probe import find_protocol_remedy
from ttft_otel.exporter.spans.span_batch import take_messages
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.settings import Settings

log = logging.getLogger("ttft_otel")

RETRY_PAUSES_S: Final = (1.0, 2.0, 4.0)  # seconds between attempts for a batch; then it is lost
EXPORT_TIMEOUT_S: Final = 4.0  # seconds per attempt, unless OTEL_EXPORTER_OTLP_TIMEOUT is set


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
