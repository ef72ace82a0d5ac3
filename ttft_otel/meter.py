# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics on vLLM's existing /metrics: records, losses, failed hooks, pending requests.

recorder.py counts here; the router shows the same losses by make_lost_metric(). Uses the
prometheus_client of the host process and its default registry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Final, TypeAlias

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ttft_otel import guard, names

CountsReader: TypeAlias = Callable[[], Mapping[str, int]]

# Keys of handoff.get_counts() that are losses: in records, `failed` in spans, `merged` in labels of values.
LOSS_REASONS: Final = ("lost", "overflowed", "foreign", "failed", "merged")
_collectors: Final[list[Collector]] = []


@functools.lru_cache(maxsize=1)
def _get_records_counter() -> Counter:
    return Counter(names.METRIC_RECORDS, "Records handed to the exporter.")


@functools.lru_cache(maxsize=1)
def _get_dropped_counter() -> Counter:
    return Counter(names.METRIC_DROPPED, "Records or requests that tracing lost.", ["reason"])


def count_sent() -> None:
    """Count one record that was sent to the exporter."""
    _get_records_counter().inc()


def count_dropped(reason: str) -> None:
    """Count one lost record (or lost state of a request).

    reason: a metric label, hence one of a fixed set of words.
    """
    _get_dropped_counter().labels(reason).inc()


class _LiveCollector(Collector):
    """Gauges and counters that are computed at each scrape, so that requests pay nothing for them.

    Absent where several API servers share one /metrics (--api-server-count): prometheus_client's
    multiprocess mode adds up files and calls no collectors.
    """

    def __init__(self, awaiting: Sized, counts: CountsReader) -> None:
        self.awaiting = awaiting
        self.counts = counts

    def collect(self) -> Iterator[Metric]:
        """Requests without a first token, errors of our hooks by place, and lost records."""
        yield GaugeMetricFamily(
            names.METRIC_PENDING,
            "Traced engine requests without a first token yet.",
            value=len(self.awaiting),
        )
        errors = CounterMetricFamily(
            names.METRIC_ERRORS, "Errors of the tracing itself, caught.", labels=["place"]
        )
        # A copy: hooks in other threads may count while the scrape iterates.
        for place, number in list(guard.error_counts.items()):
            errors.add_metric([place], number)
        yield errors
        yield make_lost_metric(names.METRIC_LOST, self.counts())


def make_lost_metric(
    name: str, counts: Mapping[str, int], reasons: Iterable[str] = LOSS_REASONS
) -> Metric:
    """A counter of records lost after they were sent, from the exporter's own counts.

    name: of the metric. counts: by reason, as of handoff.get_counts(). reasons: its label values.
    """
    metric = CounterMetricFamily(name, "Telemetry lost on its way out.", labels=["reason"])
    for reason in reasons:
        metric.add_metric([reason], counts.get(reason, 0))
    return metric


def register_collector(awaiting: Sized, counts: CountsReader) -> None:
    """Register the metrics that are read at each scrape. Idempotent.

    awaiting: container whose size is the number of pending requests.
    counts: gives the exporter's counts, see handoff.get_counts().
    """
    if not _collectors:
        _collectors.append(_LiveCollector(awaiting, counts))
        REGISTRY.register(_collectors[0])
