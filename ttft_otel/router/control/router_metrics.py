# SPDX-License-Identifier: Apache-2.0
"""The router's /metrics, computed from pool, endpoint and exporter counts at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ttft_otel.model.names import metric_names
from ttft_otel.model.stages import ENCODE
from ttft_otel.router.control.routing_metrics import (
    build_counter,
    collect_cache_metrics,
    collect_routing_metrics,
)
from ttft_otel.router.discovery.discovery import Discovery
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.types import InstanceState
from ttft_otel.tracing import guard, meter

# By how much each state keeps away, so that a graph of it can be read.
_BREAKER_VALUES: Final = {"closed": 0.0, "half-open": 0.5, "open": 1.0}


MetricsMerger = Callable[[Iterator[Metric]], Iterator[Metric]]


class RouterMetrics(Collector):
    """A Prometheus collector of all metrics of the router.

    reloads: configuration reloads by result. handoff_counts: returns counts of records by result.
    discovery: None without --discover.
    """

    def __init__(
        self,
        endpoint: ProxyEndpoint,
        handoff_counts: Callable[[], Mapping[str, int]],
        discovery: Discovery | None = None,
    ) -> None:
        self.discovery = discovery
        self.endpoint = endpoint
        self.handoff_counts = handoff_counts
        self.reloads = {"ok": 0, "failed": 0}
        self.merge_workers: MetricsMerger | None = None  # with --workers
        # With --shared-state.
        self.collect_shared_state: Callable[[], Iterator[Metric]] | None = None
        # A registry of its own: the default one has what libraries register in it, too.
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render_text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Collect for one scrape, of all workers of this router."""
        own = self.collect_own()
        return own if self.merge_workers is None else self.merge_workers(own)

    def collect_own(self) -> Iterator[Metric]:
        """The metrics of this process."""
        yield from self._collect_tracing()
        yield from self._collect_requests()
        yield from self._collect_instances()
        if self.discovery is not None:
            yield from self._collect_discovery(self.discovery)
        routing = self.endpoint.routing
        yield from collect_routing_metrics(routing)
        if routing.prefix_source is not None:
            yield from collect_cache_metrics(routing.prefilling_leg, routing.prefix_source)
        if self.collect_shared_state is not None:
            yield from self.collect_shared_state()

    def _collect_tracing(self) -> Iterator[Metric]:
        counts = self.handoff_counts()
        records = CounterMetricFamily(metric_names.RECORDS, "Records given to the exporter.")
        # From 0 on: rate() sees the first rise only of a series that was there before.
        records.add_metric([], counts.get("sent", 0))
        yield records
        yield meter.make_lost_metric(
            metric_names.DROPPED, {"handoff": counts.get("dropped", 0)}, ["handoff"]
        )
        help_text = "Errors of the tracing itself, caught."
        yield build_counter(metric_names.HOOK_ERRORS, help_text, "place", guard.error_counts)
        yield meter.make_lost_metric(metric_names.LOST, counts)

    def _collect_requests(self) -> Iterator[Metric]:
        upstream = self.endpoint.upstream
        admission = self.endpoint.admission
        ended_help = "Requests that ended."
        retries_help = "Attempts after a failed one."
        yield build_counter(
            metric_names.ROUTER_REQUESTS, ended_help, "result", self.endpoint.response_counts
        )
        refusals_help = "Requests and connections that the router refused."
        yield build_counter(
            metric_names.ROUTER_REFUSALS, refusals_help, "reason", admission.refusal_counts
        )
        # Not the sum over instances: one request may have several attempts under way.
        yield GaugeMetricFamily(
            metric_names.ROUTER_REQUESTS_IN_FLIGHT,
            "Requests under way.",
            value=admission.requests_under_way,
        )
        yield build_counter(metric_names.ROUTER_RETRIES, retries_help, "leg", upstream.retry_counts)
        mismatch_help = "Requests whose first token from D was not P's."
        yield CounterMetricFamily(
            metric_names.ROUTER_FIRST_TOKEN_MISMATCHES,
            mismatch_help,
            value=self.endpoint.prefill_decode.decode_leg.mismatch_count,
        )
        budget_help = "Retries allowed right now."
        yield GaugeMetricFamily(
            metric_names.ROUTER_RETRY_BUDGET,
            budget_help,
            value=upstream.retry_budget.available_retries,
        )
        reloads_help = "Configurations read again."
        yield build_counter(metric_names.ROUTER_RELOADS, reloads_help, "result", self.reloads)

    def _collect_discovery(self, discovery: Discovery) -> Iterator[Metric]:
        found = GaugeMetricFamily(
            metric_names.ROUTER_DISCOVERED_INSTANCES,
            "Instances that a source names.",
            labels=["source"],
        )
        failures_help = "Times that a source of instances could not be asked."
        failures = CounterMetricFamily(
            metric_names.ROUTER_DISCOVERY_FAILURES, failures_help, labels=["source"]
        )
        # What was refused is not in `roles_by_url`.
        for each in discovery.watched:
            found.add_metric([each.name], len(each.roles_by_url))
            failures.add_metric([each.name], each.failures)
        yield found
        yield failures

    # Instances that were removed are not in the pool, so their series end.
    def _collect_instances(self) -> Iterator[Metric]:
        labels = ["leg", "instance"]
        state = GaugeMetricFamily(
            metric_names.ROUTER_INSTANCE, "1 for the state it is in.", labels=[*labels, "state"]
        )
        in_flight = GaugeMetricFamily(
            metric_names.ROUTER_IN_FLIGHT, "Attempts under way.", labels=labels
        )
        breaker = GaugeMetricFamily(
            metric_names.ROUTER_BREAKER_OPEN,
            "1 while it gets nothing, 0.5 while it is tried.",
            labels=labels,
        )
        attempts = CounterMetricFamily(
            metric_names.ROUTER_ATTEMPTS, "Attempts that ended.", labels=[*labels, "result"]
        )
        recomputed_help = "Media items that it encoded although an encoder had encoded them."
        recomputed = CounterMetricFamily(
            metric_names.ROUTER_RECOMPUTED_ITEMS, recomputed_help, labels=labels
        )
        for instance in self.endpoint.upstream.pool:
            values = [instance.leg, instance.url]
            # A series per state, of which one is 1: no query has to know numbers for states.
            for state_name in get_args(InstanceState):
                state.add_metric([*values, state_name], float(instance.state == state_name))
            # Of this worker; with several, metrics_files.py adds them up.
            in_flight.add_metric(values, instance.in_flight)
            breaker.add_metric(values, _BREAKER_VALUES[instance.breaker.state])
            for result, number in instance.attempt_results.items():
                attempts.add_metric([*values, result], number)
            # An encoder encodes an item for the first time, so it is not asked.
            if self.endpoint.upstream.pool.has_encoders and instance.leg != ENCODE:
                recomputed.add_metric(values, instance.recomputed_items)
        yield from (state, in_flight, breaker, attempts, recomputed)
