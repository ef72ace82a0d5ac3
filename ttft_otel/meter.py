# SPDX-License-Identifier: Apache-2.0
"""Counts of ours on the host's existing /metrics: records, losses, failed hooks, requests under way.

recorder.py counts here, and the router shows its counts through LOSSES; prometheus_client is the
host's own, in its default registry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Final, TypeAlias

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ttft_otel import guard, names

Counts: TypeAlias = Callable[[], Mapping[str, int]]

# What handoff.counts() tells about losses: records, but `failed` is spans.
LOSSES: Final = ("lost", "overflowed", "foreign", "failed")
_watched: Final[list[Collector]] = []


@functools.lru_cache(maxsize=1)
def _records() -> Counter:
    return Counter(names.METRIC_RECORDS, "Records handed to the exporter.")


@functools.lru_cache(maxsize=1)
def _dropped() -> Counter:
    return Counter(names.METRIC_DROPPED, "Records or requests that tracing lost.", ["reason"])


def sent() -> None:
    """One record was handed off."""
    _records().inc()


def dropped(reason: str) -> None:
    """One record (or one request's state) was lost; `reason` is one of a few words."""
    _dropped().labels(reason).inc()


class _Live(Collector):
    """Read when somebody scrapes, so that it costs a request nothing.

    Absent where vLLM's API servers share one /metrics (--api-server-count): they add up files.
    """

    def __init__(self, awaiting: Sized, counts: Counts) -> None:
        self.awaiting = awaiting
        self.counts = counts

    def collect(self) -> Iterator[Metric]:
        """What is under way now, and what failed so far."""
        yield GaugeMetricFamily(
            names.METRIC_PENDING,
            "Traced engine requests without a first token yet.",
            value=len(self.awaiting),
        )
        errors = CounterMetricFamily(
            names.METRIC_ERRORS, "Errors of the tracing itself, caught.", labels=["place"]
        )
        for place, number in list(guard.errors.items()):
            errors.add_metric([place], number)
        yield errors
        yield lost(names.METRIC_LOST, self.counts())


def lost(name: str, counts: Mapping[str, int], reasons: Iterable[str] = LOSSES) -> Metric:
    """What became of records after they were handed off: the exporter's own counts."""
    found = CounterMetricFamily(name, "Telemetry lost on its way out.", labels=["reason"])
    for reason in reasons:
        found.add_metric([reason], counts.get(reason, 0))
    return found


def watch(awaiting: Sized, counts: Counts) -> None:
    """Show the size of this container, and the errors, from now on. Idempotent."""
    if not _watched:
        _watched.append(_Live(awaiting, counts))
        REGISTRY.register(_watched[0])
