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
from ttft_otel.router.discovery.discovery import Discovery
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.policies.prefill_model import PredictionQuality
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.types import Instance, InstanceState
from ttft_otel.tracing import guard, meter

INSTANCE_LABELS: Final = ("leg", "instance")
KV_EVENTS_SOURCE: Final = "kv-events"


def build_counter(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter family with one `label`.

    name, help_text: of the metric. values: counts by label value.
    """
    family = CounterMetricFamily(name, help_text, labels=[label])
    # A copy, so that a count that is new in this moment cannot break the loop.
    for value, number in list(values.items()):
        family.add_metric([value], number)
    return family


def collect_routing_metrics(routing: RoutingService) -> Iterator[Metric]:
    """Metrics of the legs in `routing.reported_legs`; none if the policy compares no work."""
    # Without pending load nothing is predicted: all of the rest would be zeros for ever.
    if not routing.prefill_policy.policy.reads_prompts:
        return
    help_text = "Requests refused because no instance could have begun to answer in time."
    yield CounterMetricFamily(
        metric_names.ROUTER_SLO_REFUSALS, help_text, value=routing.slo_rejections
    )
    if routing.prompt_reader is not None:
        prompts_help = "Prompts by how their tokens became known, or why not."
        yield build_counter(
            metric_names.ROUTER_PROMPTS, prompts_help, "result", routing.prompt_reader.counts
        )
    yield from _collect_pending(routing)
    yield from _collect_prediction_quality(routing)
    yield from _collect_fits(routing)


def _list_tracked_instances(routing: RoutingService) -> Iterator[tuple[Instance, PolicyState]]:
    """Each instance with the state of its leg's policy."""
    for leg in routing.reported_legs:
        for instance in routing.pool.get(leg):
            yield instance, routing.get_leg_policy(leg).state


def _collect_pending(routing: RoutingService) -> Iterator[Metric]:
    requests = _build_gauge(
        metric_names.ROUTER_PENDING_PREFILLS, "Requests sent that have no first token yet."
    )
    tokens = _build_gauge(
        metric_names.ROUTER_PENDING_TOKENS, "Prompt tokens that these still need computed."
    )
    for instance, state in _list_tracked_instances(routing):
        load = state.pending.get_load(instance.url)
        requests.add_metric([instance.leg, instance.url], len(load.entries))
        tokens.add_metric([instance.leg, instance.url], load.tokens_to_compute)
    yield from (requests, tokens)


def _collect_prediction_quality(routing: RoutingService) -> Iterator[Metric]:
    error = _build_gauge(
        metric_names.ROUTER_PREDICTION_MAPE, "Mean error of predicted TTFTs, as a share."
    )
    explained = _build_gauge(
        metric_names.ROUTER_PREDICTION_R2, "Share of the TTFTs' variance that was predicted."
    )
    for instance, state in _list_tracked_instances(routing):
        quality = state.outcomes.get(instance.url, PredictionQuality())
        for family, value in ((error, quality.mape), (explained, quality.r2)):
            # None before something was judged; 0 would look like a perfect prediction.
            if value is not None:
                family.add_metric([instance.leg, instance.url], value)
    yield from (error, explained)


def _collect_fits(routing: RoutingService) -> Iterator[Metric]:
    help_text = "Seconds of a prefill: once (a), per token computed (b), per pair (d)."
    lines = _build_gauge(metric_names.ROUTER_PREFILL_FIT, help_text, "model", "coefficient")
    samples = _build_gauge(
        metric_names.ROUTER_PREFILL_SAMPLES, "Prefills that these were learnt from.", "model"
    )
    for leg in routing.reported_legs:
        for (model, url), fit in routing.get_leg_policy(leg).state.models.list_fits().items():
            # Without a URL it is the line that the instances of a model share.
            if url:
                samples.add_metric([leg, url, model], fit.samples)
            # There is no line before enough samples were taken.
            if url and fit.line is not None:
                for name, value in fit.line._asdict().items():
                    lines.add_metric([leg, url, model, name], value)
    yield from (lines, samples)


def collect_cache_metrics(leg: str, prefix_source: PrefixSource) -> Iterator[Metric]:
    """Metrics of `prefix_source`, which knows the instances of `leg`."""
    blocks = _build_gauge(
        metric_names.ROUTER_CACHED_BLOCKS, "Blocks that it is known to have cached.", "source"
    )
    help_text = "What became of its KV events."
    events = CounterMetricFamily(
        metric_names.ROUTER_KV_EVENTS, help_text, labels=[*INSTANCE_LABELS, "event"]
    )
    # Sorted, so that the lines of two scrapes can be compared.
    for url, described in sorted(prefix_source.describe_instances().items()):
        blocks.add_metric([leg, url, described["source"]], described["blocks"])
        if described["source"] == KV_EVENTS_SOURCE:
            for event, number in described["counts"].items():
                events.add_metric([leg, url, event], number)
    yield from (blocks, events)


def _build_gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=[*INSTANCE_LABELS, *labels])


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
