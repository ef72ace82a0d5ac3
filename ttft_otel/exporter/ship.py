# SPDX-License-Identifier: Apache-2.0
"""Export spans with the SDK's own OTLP exporters: batches, bounded retries, one warning an outage.

flow.py gives it lists of spans; whoever reads OTLP gets them. Endpoint, headers, TLS, compression
and timeout are the standard OTEL_* variables, read by the SDK's exporter itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_TIMEOUT,
    OTEL_EXPORTER_OTLP_TRACES_TIMEOUT,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ttft_otel.exporter.health import Health
from ttft_otel.guard import Guard
from ttft_otel.settings import Settings

log = logging.getLogger("ttft_otel")

BATCH: Final = 512  # spans
PAUSES: Final = (1.0, 2.0, 4.0)  # seconds between the tries of one batch; then it is lost
TIMEOUT: Final = 4.0  # seconds of one try, unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise


class Ship:
    """Sends batches, one at a time; while the collector is away the inbox fills up and drops."""

    def __init__(
        self, exporter: SpanExporter, health: Health, endpoint: str, hurry: threading.Event
    ) -> None:
        self.exporter = exporter
        self.health = health
        self.endpoint = endpoint
        self.hurry = hurry  # set when the host is gone: no pauses any more, one try each
        self.reason = _Reason()
        self._failing_since = 0.0
        self._lost = 0

    @property
    def failing(self) -> bool:
        """Whether the collector is away; one line has said so."""
        return bool(self._failing_since)

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Export in batches; returns when each has arrived or was given up and counted."""
        for first in range(0, len(spans), BATCH):
            batch = spans[first : first + BATCH]
            if self._send(batch):
                self.health.add("exported", len(batch))
                self._recovered()
            else:
                self.health.add("failed", len(batch))
                self._lost += len(batch)

    def _send(self, batch: Sequence[ReadableSpan]) -> bool:
        for pause in self._pauses():
            if self._try(batch):
                return True
            self._failed()
            self.hurry.wait(pause)
        return False

    def _pauses(self) -> Iterator[float]:
        for pause in (*PAUSES, 0.0):
            yield pause
            if self.hurry.is_set():
                return

    def _try(self, batch: Sequence[ReadableSpan]) -> bool:
        result = SpanExportResult.FAILURE
        self.reason.text = ""
        with Guard("exporter.ship"):
            try:
                result = self.exporter.export(batch)
            except OSError as error:  # before 1.34 the http exporter raised what requests raises
                self.reason.text = str(error)
        return result is SpanExportResult.SUCCESS

    def _failed(self) -> None:
        if self.failing:
            return
        self._failing_since = time.monotonic()
        log.warning(
            "ttft-otel exporter: no spans accepted at %s (%s); serving goes on, the exporter keeps "
            "trying and drops what it cannot keep",
            self.endpoint,
            self.reason.text or "no answer",
        )

    def _recovered(self) -> None:
        if not self.failing:
            return
        log.warning(
            "ttft-otel exporter: spans are accepted again after %.0f s; %d were lost meanwhile",
            time.monotonic() - self._failing_since,
            self._lost,
        )
        self._failing_since, self._lost = 0.0, 0


class _Reason(logging.Handler):
    """Keeps a try's first complaint for our one line, instead of a line (or trace) per attempt.

    The first says what happened ("connection refused"), the last only that it was given up.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        for name in ("opentelemetry", "urllib3", "requests", "grpc"):
            logger = logging.getLogger(name)
            logger.handlers[:] = [self]
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()[:300]


def exporter(settings: Settings) -> SpanExporter:
    """The SDK's exporter for the protocol asked for; everything else it takes from OTEL_*."""
    attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # our own posts are nobody's spans
    if not os.environ.get(OTEL_EXPORTER_OTLP_TRACES_TIMEOUT):
        os.environ.setdefault(OTEL_EXPORTER_OTLP_TIMEOUT, f"{TIMEOUT:.0f}")
    # One of the two is imported, not both: grpc alone is 0.1 s and 15 MB.
    if settings.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter()
