# SPDX-License-Identifier: Apache-2.0
"""Sends the metrics of request_metrics.py by the SDK's OTLP exporter, in a thread of its own.

So an endpoint that does not answer keeps no span waiting. Endpoint, headers, TLS, compression, timeout and
interval are the standard OTEL_* variables.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import Final

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.metrics.metric_series import SeriesRegistry
from ttft_otel.exporter.metrics.request_metrics import RequestMetrics
from ttft_otel.exporter.otlp_exporter import build_metric_exporter
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.model.metric_table import PUSH_INTERVAL_S
from ttft_otel.model.names import env_names
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.settings import Settings

log = logging.getLogger("ttft_otel")

MAX_UNSENT: Final = 20  # pushes of delta metrics that are kept during an outage
PUSH_TIMEOUT_MS: Final = 4000.0  # of one push with its retries, for SDKs that ask for it here


class MetricPusher:
    """Pushes `metrics` every `interval_s` seconds, and once more at the end.

    destination: for log lines.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        exporter: MetricExporter,
        destination: str,
        interval_s: float = PUSH_INTERVAL_S,
    ) -> None:
        self.metrics = metrics
        self.exporter = exporter
        self.destination = destination
        self.interval_s = interval_s
        self.is_failing = False
        # Cumulative metrics need no second try: the next push has all of this one.
        is_delta = metrics.registry.is_delta
        self._unsent: deque[MetricsData] = deque(maxlen=MAX_UNSENT if is_delta else 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def finish(self) -> None:
        """Push what is there, and end the thread."""
        # Ends the wait at once; the thread pushes once more, so that the last interval is not lost.
        self._ended.set()
        self._thread.join()

    def push(self) -> None:
        """Send what has been counted; what is not taken is sent with the next push."""
        with Guard("exporter.metrics"):
            data = self.metrics.take_data()
            if data is not None:
                if len(self._unsent) == self._unsent.maxlen and self.metrics.registry.is_delta:
                    log.warning("ttft-otel exporter: the metrics of one interval are lost")
                self._unsent.append(data)
            # The oldest first, and kept until it is taken: each delta arrives once, in order.
            while self._unsent and self._try_export(self._unsent[0]):
                self._unsent.popleft()

    def _run(self) -> None:
        # If an HTTP client is instrumented in this environment, our pushes must not become spans.
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        while not self._ended.wait(self.interval_s):
            self.push()
        self.push()

    def _try_export(self, data: MetricsData) -> bool:
        try:
            result = self.exporter.export(data, timeout_millis=PUSH_TIMEOUT_MS)
        except OSError:  # the SDK before 1.34 lets errors of requests pass
            result = MetricExportResult.FAILURE
        # One line when it begins to fail and one when it works again, none for what is between.
        if (result is MetricExportResult.SUCCESS) is self.is_failing:
            self.is_failing = not self.is_failing
            state = "fails; the next push has what this one had" if self.is_failing else "works"
            log.warning("ttft-otel exporter: sending metrics to %s %s", self.destination, state)
        return not self.is_failing


def start_pusher(
    settings: Settings, resources: ResourceCache, counters: ExporterCounters
) -> MetricPusher:
    """Start to push the metrics of one exporter process; the SDK reads the standard variables."""
    registry = SeriesRegistry(resources, settings.temporality != "cumulative")
    exporter = build_metric_exporter(
        os.environ.get(env_names.OTEL_EXPORTER_OTLP_METRICS_PROTOCOL) or settings.protocol
    )
    destination = os.environ.get(env_names.OTEL_EXPORTER_OTLP_METRICS_ENDPOINT) or settings.endpoint
    pusher = MetricPusher(
        RequestMetrics(registry, counters), exporter, destination, read_interval_s()
    )
    pusher.start()
    return pusher


def read_interval_s() -> float:
    """Seconds between pushes, of the standard variable in milliseconds; ours where it is unset or wrong."""
    text = os.environ.get(env_names.OTEL_METRIC_EXPORT_INTERVAL, "").strip()
    return int(text) / 1000 if text.isdecimal() and int(text) > 0 else PUSH_INTERVAL_S
