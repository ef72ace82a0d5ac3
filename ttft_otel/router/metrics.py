# SPDX-License-Identifier: Apache-2.0
"""The router's /metrics, read off the fleet and the exporter's counts when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ttft_otel import guard, meter, names
from ttft_otel.router.choose import State
from ttft_otel.router.forward import Forward
from ttft_otel.router.gauges import caches, counter, routes

_BREAKER: Final = {"closed": 0.0, "half-open": 0.5, "open": 1.0}


class Metrics(Collector):
    """Everything there is; `reloads` counts the configurations that were read again."""

    def __init__(self, forward: Forward, counts: Callable[[], Mapping[str, int]]) -> None:
        self.forward, self.counts = forward, counts
        self.reloads = {"ok": 0, "failed": 0}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        yield from self._tracing()
        yield from self._requests()
        yield from self._instances()
        routing = self.forward.legs.routing
        yield from routes(routing)
        if routing.source is not None:
            yield from caches(routing.leg, routing.source)

    def _tracing(self) -> Iterator[Metric]:
        counts = self.counts()
        records = CounterMetricFamily(names.METRIC_RECORDS, "Records given to the exporter.")
        records.add_metric([], counts.get("sent", 0))
        yield records
        yield meter.lost(names.METRIC_DROPPED, {"handoff": counts.get("dropped", 0)}, ["handoff"])
        caught = "Errors of the tracing itself, caught."
        yield counter(names.METRIC_ERRORS, caught, "place", guard.errors)
        yield meter.lost(names.METRIC_LOST, counts)

    def _requests(self) -> Iterator[Metric]:
        legs, gate = self.forward.legs, self.forward.gate
        ended, again = "Requests that ended.", "Attempts after a failed one."
        yield counter(names.METRIC_REQUESTS, ended, "result", self.forward.answered)
        yield GaugeMetricFamily(names.METRIC_UNDER_WAY, "Requests under way.", value=gate.inside)
        yield counter(names.METRIC_RETRIES, again, "leg", legs.retried)
        other = "Requests whose first token from D was not P's."
        yield CounterMetricFamily(
            names.METRIC_MISMATCHES, other, value=self.forward.pair.decode.mismatches
        )
        left = "Retries allowed right now."
        yield GaugeMetricFamily(names.METRIC_BUDGET, left, value=legs.budget.left)
        reread = "Configurations read again."
        yield counter(names.METRIC_RELOADS, reread, "result", self.reloads)

    def _instances(self) -> Iterator[Metric]:
        pair = ["leg", "instance"]
        state = GaugeMetricFamily(
            names.METRIC_INSTANCE, "1 for the state it is in.", labels=[*pair, "state"]
        )
        flying = GaugeMetricFamily(names.METRIC_IN_FLIGHT, "Attempts under way.", labels=pair)
        breaker = GaugeMetricFamily(
            names.METRIC_BREAKER, "1 while it gets nothing, 0.5 while it is tried.", labels=pair
        )
        attempts = CounterMetricFamily(
            names.METRIC_ATTEMPTS, "Attempts that ended.", labels=[*pair, "result"]
        )
        for each in self.forward.legs.fleet:
            who = [each.leg, each.url]
            for word in get_args(State):
                state.add_metric([*who, word], float(each.state == word))
            flying.add_metric(who, each.in_flight)
            breaker.add_metric(who, _BREAKER[each.breaker])
            for result, number in each.results.items():
                attempts.add_metric([*who, result], number)
        yield from (state, flying, breaker, attempts)
