# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics on vLLM's existing /metrics: records, losses, failed hooks, pending requests.

recorder.py counts drops here; the router shows the same losses by make_lost_metric(). Uses the
prometheus_client of the host process and its default registry.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Final, TypeAlias

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ttft_otel.model.names import metric_names
from ttft_otel.tracing import guard

CountsReader: TypeAlias = Callable[[], Mapping[str, int]]

# Keys of handoff.get_counts() that are losses: in records, `failed` in spans, `merged` in labels of values.
LOSS_REASONS: Final = ("lost", "overflowed", "foreign", "failed", "merged")
RECORDS_HELP: Final = "Records handed to the exporter."
PENDING_HELP: Final = "Traced engine requests without a first token yet."
ERRORS_HELP: Final = "Errors of the tracing itself, caught."
LOST_HELP: Final = "Telemetry lost on its way out."
# Set where several API servers share one /metrics (--api-server-count), or by a chart.
ENV_SHARED_METRICS: Final = "PROMETHEUS_MULTIPROC_DIR"
SENT_RECORDS: Final = "sent"  # key of handoff.get_counts()
PUBLISH_PAUSE_S: Final = 1.0  # seconds between two writes of what is not counted when it happens
_collectors: Final[list[Collector]] = []
_publishers: Final[list[SharedPublisher]] = []


@functools.lru_cache(maxsize=1)
def _get_dropped_counter() -> Counter:
    # Made at the first use: importing this module registers nothing with Prometheus.
    return Counter(metric_names.DROPPED, "Records or requests that tracing lost.", ["reason"])


def count_dropped(reason: str) -> None:
    """Count one lost record (or lost state of a request).

    reason: a metric label, hence one of a fixed set of words.
    """
    _get_dropped_counter().labels(reason).inc()


class _LiveCollector(Collector):
    """Gauges and counters that are computed at each scrape, so that requests pay nothing for them."""

    def __init__(self, awaiting: Sized, counts: CountsReader) -> None:
        self.awaiting = awaiting
        self.counts = counts

    def collect(self) -> Iterator[Metric]:
        """Requests without a first token, errors of our hooks by place, records sent and lost."""
        counts = self.counts()
        yield CounterMetricFamily(
            metric_names.RECORDS, RECORDS_HELP, value=counts.get(SENT_RECORDS, 0)
        )
        yield GaugeMetricFamily(
            metric_names.PENDING,
            PENDING_HELP,
            value=len(self.awaiting),
        )
        errors = CounterMetricFamily(metric_names.HOOK_ERRORS, ERRORS_HELP, labels=["place"])
        # A copy: hooks in other threads may count while the scrape iterates.
        for place, number in list(guard.error_counts.items()):
            errors.add_metric([place], number)
        yield errors
        yield make_lost_metric(metric_names.LOST, counts)


def make_lost_metric(
    name: str, counts: Mapping[str, int], reasons: Iterable[str] = LOSS_REASONS
) -> Metric:
    """A counter of records lost after they were sent, from the exporter's own counts.

    name: of the metric. counts: by reason, as of handoff.get_counts(). reasons: its label values.
    """
    metric = CounterMetricFamily(name, LOST_HELP, labels=["reason"])
    for reason in reasons:
        metric.add_metric([reason], counts.get(reason, 0))
    return metric


class SharedPublisher:
    """The same metrics in prometheus_client's multiprocess mode, which adds up files of all processes.

    Collectors are not asked there, so values are written again and again, by publish_counts().
    """

    def __init__(self, awaiting: Sized, counts: CountsReader) -> None:
        self.awaiting = awaiting
        self.counts = counts
        # "live": without the processes that have been marked as dead.
        self._pending = Gauge(metric_names.PENDING, PENDING_HELP, multiprocess_mode="livesum")
        self._errors = Counter(metric_names.HOOK_ERRORS, ERRORS_HELP, ["place"])
        self._lost = Counter(metric_names.LOST, LOST_HELP, ["reason"])
        self._records = Counter(metric_names.RECORDS, RECORDS_HELP)
        self._published: dict[Counter, int] = {}

    def publish(self) -> None:
        """Write the values of this moment; about 10 us."""
        self._pending.set(len(self.awaiting))
        for place, number in list(guard.error_counts.items()):
            self._raise_counter(self._errors.labels(place), number)
        counts = self.counts()
        self._raise_counter(self._records, counts.get(SENT_RECORDS, 0))
        for reason in LOSS_REASONS:
            self._raise_counter(self._lost.labels(reason), counts.get(reason, 0))

    def _raise_counter(self, counter: Counter, number: int) -> None:
        # By the difference: a counter of a file cannot be set. max(): a new sender counts from 0.
        counter.inc(max(0, number - self._published.get(counter, 0)))
        self._published[counter] = number


def register_collector(awaiting: Sized, counts: CountsReader) -> None:
    """Register the metrics that are not counted when something happens. Idempotent.

    awaiting: container whose size is the number of pending requests.
    counts: gives the exporter's counts, see handoff.get_counts().
    """
    if _collectors or _publishers:
        return
    if os.environ.get(ENV_SHARED_METRICS) is not None:  # as vLLM decides it
        _publishers.append(SharedPublisher(awaiting, counts))
    else:
        _collectors.append(_LiveCollector(awaiting, counts))
        REGISTRY.register(_collectors[0])


def publish_counts() -> bool:
    """Write the shared metrics, if there are any; whether to do it again in PUBLISH_PAUSE_S."""
    for publisher in _publishers:
        publisher.publish()
    return bool(_publishers)
