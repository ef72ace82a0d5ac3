# SPDX-License-Identifier: Apache-2.0
"""Counts every request into series: sampled ones by their Records, others by their measurements.

export_worker.py adds them. A request is a row of numbers, kept below the columns of its labels until many
rows are counted at once: by far the cheaper way. A thread of its own pushes them by the SDK's OTLP
exporter, so that an endpoint that does not answer keeps no span waiting. Endpoint, headers, TLS,
compression, timeout and interval are the standard OTEL_* variables.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.metrics.metric_series import Series, SeriesRegistry
from ttft_otel.exporter.otlp_exporter import (
    build_metric_exporter,
    describe_tls_files,
    renew_exporter,
)
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.exporter.spans.span_content import list_kind_attributes
from ttft_otel.model import stages
from ttft_otel.model.metric_table import METRICS, PUSH_INTERVAL_S, STATUS_LABEL, STATUS_VALUES
from ttft_otel.model.names import env_names, keys, metric_names
from ttft_otel.model.record import Attributes, Record, RecordDecodeError
from ttft_otel.tracing import measurement
from ttft_otel.tracing.context import SAMPLED_FLAG
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.measurement import NOT_MEASURED, Measurement, MeasurementHead
from ttft_otel.tracing.settings import Settings

MAX_PENDING_ROWS: Final = 4096  # requests that are not counted yet, at some 0.6 KB
MAX_PLANS: Final = 4096  # heads whose series are known
# What a few requests have besides their times: a metric, its own label with that label's value ("" for none).
_RECOMPUTED: Final = (metric_names.EC_RECOMPUTED, "", "")
_REASONS: Final = tuple(
    (metric_names.QUEUE_REASON_DURATION, keys.QUEUE_REASON, name)
    for name in stages.WAIT_REASON_NAMES
)
_HELD: Final = tuple(
    (metric_names.QUEUE_HELD_DURATION, keys.HELD_BY_KIND, name)
    for name in stages.HOLDING_KIND_NAMES
)
log = logging.getLogger("ttft_otel")

MAX_UNSENT: Final = 20  # pushes of delta metrics that are kept during an outage
PUSH_TIMEOUT_MS: Final = 4000.0  # of one push with its retries, for SDKs that ask for it here


@dataclass(slots=True)
class _Plan:
    """Where the numbers of one head go; those of its requests that are not counted yet."""

    head: MeasurementHead
    columns: list[list[Series]]  #: the series of each time
    rows: list[tuple[int, ...]] = field(default_factory=list)  #: times, microseconds
    #: Other values (items, microseconds of queues) by metric, label and its value.
    others: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)


class RequestMetrics:
    """The metrics of one exporter process; safe to use from the worker's and the pusher's thread."""

    def __init__(self, registry: SeriesRegistry, counters: ExporterCounters) -> None:
        self.registry = registry
        self.counters = counters
        # By the head's bytes: a known head need not be decoded, which is nearly every one.
        self._plans: dict[bytes, _Plan] = {}
        self._pending_rows = 0
        # The worker counts while the pusher's thread takes data.
        self._lock = threading.Lock()

    def add_measurements(self, batch: list[bytes]) -> None:
        """Count unsampled requests by their measurements; what is none is counted as `foreign`."""
        foreign = 0
        with self._lock:
            for data in batch:
                try:
                    self._add_row(measurement.decode_measurement(data))
                except RecordDecodeError:
                    foreign += 1
            self.counters.add("counted", len(batch) - foreign)
            self.counters.add("foreign", foreign)

    def add_record(self, record: Record) -> None:
        """Count what a sampled request's record has of it. Raises ValueError for broken IDs."""
        found = measurement.measure_record(record)
        if found is None or not record.flags & SAMPLED_FLAG:
            return
        head, measured = found
        # Before the lock: broken IDs raise here, and nothing has been counted yet.
        span_id = record.ttft.span_id if head.has_ttft and record.ttft else record.span_id
        example = int(record.trace_id, 16), int(span_id, 16), time.time_ns()
        with self._lock:
            plan = self._add_row(measured)
            self.counters.add("counted")
            for column, value_us in zip(plan.columns, measured.times_us, strict=True):
                for series in column:
                    series.add_example(value_us, example)

    def take_data(self) -> MetricsData | None:
        """What is to be sent now; None without a value."""
        with self._lock:
            self._count_rows()
            time_ns = time.time_ns()
            if self.registry.forget_idle(time_ns):
                self._plans.clear()
            return self.registry.take_data(time_ns)

    def _add_row(self, measured: Measurement) -> _Plan:
        head = bytes(measured.head)
        plan = self._plans.get(head)
        if plan is None:
            plan = self._make_plan(head)
        # The columns are paired with the times by position: one too few would shift all of them.
        if len(measured.times_us) != len(plan.columns):
            raise RecordDecodeError("a measurement with more or fewer times than its head has")
        if self._pending_rows >= MAX_PENDING_ROWS:
            self._count_rows()
        self._pending_rows += 1
        plan.rows.append(measured.times_us)
        if measured.recomputed_items != NOT_MEASURED:
            plan.others.setdefault(_RECOMPUTED, []).append(measured.recomputed_items)
        for code, length_us in measured.reasons:
            plan.others.setdefault(_REASONS[code], []).append(length_us)
        for code, length_us in measured.held:
            plan.others.setdefault(_HELD[code], []).append(length_us)
        return plan

    def _count_rows(self) -> None:
        self._pending_rows = 0
        for plan in self._plans.values():
            if not plan.rows:
                continue
            rows, plan.rows = plan.rows, []
            for column, values_us in zip(plan.columns, zip(*rows, strict=True), strict=True):
                for series in column:
                    self._add_values(series, values_us)
            # Their series are few, and found anew each time.
            for (metric, label, value), values in plan.others.items():
                series = self._find_series(metric, plan.head, {label: value})
                self._add_values(series, tuple(values))
            plan.others.clear()

    def _add_values(self, series: Series, values: tuple[int, ...]) -> None:
        series.add_values(values)
        if series.is_overflow:
            self.counters.add("merged", len(values))

    def _make_plan(self, data: bytes) -> _Plan:
        """The series of a new head. Raises RecordDecodeError for bytes that are none."""
        head = measurement.decode_head(data)
        if len(self._plans) >= MAX_PLANS:
            self._count_rows()
            self._plans.clear()
        self._plans[data] = plan = _Plan(head, self._find_columns(head))
        return plan

    def _find_columns(self, head: MeasurementHead) -> list[list[Series]]:
        """The series of each of a measurement's times; none for a TTFT that another server counts."""

        def find(metric: str, own: Attributes | None = None) -> Series:
            return self._find_series(metric, head, own or {})

        columns: list[list[Series]] = []
        if head.has_ttft:
            ttft = [find(metric_names.TTFT_DURATION)] if head.is_outermost else []
            # The convention counts answers that began; an encoder's has no token.
            if ttft and not head.error and not head.is_encoder:
                ttft.append(find(metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN))
            columns.append(ttft)
        for stage, instance in head.stages:
            # The spans' own attributes, so that metrics of either origin have the same labels.
            own = list_kind_attributes("stage", stage) | {keys.INSTANCE: instance}
            columns.append([find(metric_names.STAGE_DURATION, own)])
        if head.end_error is not None:
            error: Attributes = {keys.ERROR_TYPE: head.end_error}
            columns.append([find(metric_names.GEN_AI_SERVER_REQUEST_DURATION, error)])
        if head.has_token_time:
            columns.append([find(metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN)])
        return columns

    def _find_series(self, metric: str, head: MeasurementHead, own: Attributes) -> Series:
        """The series of a head and of labels of its `own`, which win."""
        common: Attributes = {
            keys.ROLE: head.role,
            keys.MODEL: head.model,
            keys.ERROR_TYPE: head.error,
            keys.OPERATION: head.operation,
            keys.PROVIDER: keys.PROVIDER_VLLM,
            STATUS_LABEL: STATUS_VALUES[bool(head.error)],
        }
        values = common | own
        # Empty ones are left out: to Prometheus an empty label and a missing one are the same.
        labels = {
            name: str(values[name]) for name in METRICS[metric].all_labels if values.get(name)
        }
        return self.registry.get(metric, head.service, labels, time.time_ns())


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
        self.tls_files = describe_tls_files()
        self.destination = destination
        self.interval_s = interval_s
        self.is_failing = False
        # Cumulative metrics need no second try: the next push has all of this one.
        is_delta = metrics.registry.is_delta
        self._unsent: deque[MetricsData] = deque(maxlen=MAX_UNSENT if is_delta else 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
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
        if result is not MetricExportResult.SUCCESS:
            self.tls_files = renew_exporter(self.exporter, self.tls_files)
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
    interval_ms = settings.numbers.get(
        env_names.OTEL_METRIC_EXPORT_INTERVAL, PUSH_INTERVAL_S * 1000
    )
    pusher = MetricPusher(
        RequestMetrics(registry, counters), exporter, destination, interval_ms / 1000
    )
    pusher.start()
    return pusher
