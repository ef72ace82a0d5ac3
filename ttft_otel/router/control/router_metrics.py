# SPDX-License-Identifier: Apache-2.0
"""The router's /metrics, computed from pool, endpoint and exporter counts at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ttft_otel.model.names import metric_names
from ttft_otel.model.stages import ENCODE
from ttft_otel.router.discovery.discovery import Discovery
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.proxy.hold_queue import HoldQueue
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.types import InstanceState
from ttft_otel.tracing import guard, meter
from ttft_otel.tracing.meter import build_counter, build_gauge

INSTANCE_LABELS: Final = ("leg", "instance")
KV_EVENTS_SOURCE: Final = "kv-events"


def collect_routing_metrics(
    routing: RoutingService, hold_queue: HoldQueue | None = None
) -> Iterator[Metric]:
    """Metrics of the legs in `routing.reported_legs`; none if the policy compares no work."""
    # Without pending load nothing is predicted: all of the rest would be zeros for ever.
    if not routing.prefill_policy.reads_prompts:
        return
    if hold_queue is not None:
        help_text = "Requests that wait for an instance with a shorter queue."
        yield build_gauge(metric_names.ROUTER_HELD, help_text, len(hold_queue))
        help_text, holds = "Requests that waited, by what became of them.", hold_queue.counts
        yield build_counter(metric_names.ROUTER_HOLDS, help_text, holds, "result")
    if routing.prompt_reader is not None:
        help_text = "Prompts by how their tokens became known, or why not."
        counts = routing.prompt_reader.counts
        yield build_counter(metric_names.ROUTER_PROMPTS, help_text, counts, "result")
    yield from _collect_pending(routing)
    yield from _collect_prediction_quality(routing)
    yield from _collect_fits(routing)


def _map_states(routing: RoutingService) -> dict[tuple[str, ...], PolicyState]:
    """The state of the policy that chooses each instance, by leg and URL."""
    return {
        (leg, instance.url): routing.get_policy(leg).state
        for leg in routing.reported_legs
        for instance in routing.pool.get(leg)
    }


def _collect_pending(routing: RoutingService) -> Iterator[Metric]:
    loads = {key: state.pending.get_load(key[1]) for key, state in _map_states(routing).items()}
    help_text = "Requests sent that have no first token yet."
    requests = {key: len(load.entries) for key, load in loads.items()}
    yield build_gauge(metric_names.ROUTER_PENDING_PREFILLS, help_text, requests, *INSTANCE_LABELS)
    help_text = "Prompt tokens that these still need computed."
    tokens = {key: load.tokens_to_compute for key, load in loads.items()}
    yield build_gauge(metric_names.ROUTER_PENDING_TOKENS, help_text, tokens, *INSTANCE_LABELS)


def _collect_prediction_quality(routing: RoutingService) -> Iterator[Metric]:
    judged = {
        key: state.outcomes[key[1]]
        for key, state in _map_states(routing).items()
        # Before something was judged 0 would look like a perfect prediction.
        if key[1] in state.outcomes
    }
    help_text = "Mean error of predicted TTFTs, as a share."
    errors = {key: each.mape for key, each in judged.items() if each.mape is not None}
    yield build_gauge(metric_names.ROUTER_PREDICTION_MAPE, help_text, errors, *INSTANCE_LABELS)
    help_text = "Share of the TTFTs' variance that was predicted."
    explained = {key: each.r2 for key, each in judged.items() if each.r2 is not None}
    yield build_gauge(metric_names.ROUTER_PREDICTION_R2, help_text, explained, *INSTANCE_LABELS)


def _collect_fits(routing: RoutingService) -> Iterator[Metric]:
    fits = {
        (leg, url, model): fit
        for leg in routing.reported_legs
        for (model, url), fit in routing.get_policy(leg).state.models.list_fits().items()
        # Without a URL it is the line that the instances of a model share.
        if url
    }
    help_text = "Seconds of a prefill: once (a), per token (b), pair (d), answer beside it (e)."
    coefficients = {
        (*key, name): value
        for key, fit in fits.items()
        # There is no line before enough samples were taken.
        for name, value in (fit.line._asdict() if fit.line is not None else {}).items()
    }
    labels = (*INSTANCE_LABELS, "model")
    yield build_gauge(
        metric_names.ROUTER_PREFILL_FIT, help_text, coefficients, *labels, "coefficient"
    )
    help_text = "Prefills that these were learnt from."
    samples = {key: fit.samples for key, fit in fits.items()}
    yield build_gauge(metric_names.ROUTER_PREFILL_SAMPLES, help_text, samples, *labels)


def collect_cache_metrics(leg: str, prefix_source: PrefixSource) -> Iterator[Metric]:
    """Metrics of `prefix_source`, which knows the instances of `leg`."""
    # Sorted, so that the lines of two scrapes can be compared.
    described = sorted(prefix_source.describe_instances().items())
    blocks = {(leg, url, each["source"]): each["blocks"] for url, each in described}
    help_text = "Blocks that it is known to have cached."
    labels = INSTANCE_LABELS
    yield build_gauge(metric_names.ROUTER_CACHED_BLOCKS, help_text, blocks, *labels, "source")
    events = {
        (leg, url, event): number
        for url, each in described
        if each["source"] == KV_EVENTS_SOURCE
        for event, number in each["counts"].items()
    }
    help_text = "What became of its KV events."
    yield build_counter(metric_names.ROUTER_KV_EVENTS, help_text, events, *labels, "event")


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
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        own = self.collect_own()
        return own if self.merge_workers is None else self.merge_workers(own)

    def collect_own(self) -> Iterator[Metric]:
        yield from self._collect_tracing()
        yield from self._collect_requests()
        yield from self._collect_instances()
        if self.discovery is not None:
            yield from self._collect_discovery(self.discovery)
        routing = self.endpoint.routing
        yield from collect_routing_metrics(routing, self.endpoint.hold_queue)
        if routing.prefix_source is not None:
            yield from collect_cache_metrics(routing.prefilling_leg, routing.prefix_source)
        if self.collect_shared_state is not None:
            yield from self.collect_shared_state()

    def _collect_tracing(self) -> Iterator[Metric]:
        counts = self.handoff_counts()
        # From 0 on: rate() sees the first rise only of a series that was there before.
        yield build_counter(
            metric_names.RECORDS, "Records given to the exporter.", counts.get("sent", 0)
        )
        dropped = {"handoff": counts.get("dropped", 0)}
        yield build_counter(metric_names.DROPPED, meter.LOST_HELP, dropped, "reason")
        errors = guard.error_counts
        yield build_counter(metric_names.HOOK_ERRORS, meter.ERRORS_HELP, errors, "place")
        losses = {reason: counts.get(reason, 0) for reason in meter.LOSS_REASONS}
        yield build_counter(metric_names.LOST, meter.LOST_HELP, losses, "reason")

    def _collect_requests(self) -> Iterator[Metric]:
        upstream, admission = self.endpoint.upstream, self.endpoint.admission
        responses, refusals = self.endpoint.response_counts, admission.refusal_counts
        yield build_counter(
            metric_names.ROUTER_REQUESTS, "Requests that ended.", responses, "result"
        )
        help_text = "Requests and connections that the router refused."
        yield build_counter(metric_names.ROUTER_REFUSALS, help_text, refusals, "reason")
        # Not the sum over instances: one request may have several attempts under way.
        yield build_gauge(
            metric_names.ROUTER_REQUESTS_IN_FLIGHT,
            "Requests under way.",
            admission.requests_under_way,
        )
        help_text, retries = "Attempts after a failed one.", upstream.retry_counts
        yield build_counter(metric_names.ROUTER_RETRIES, help_text, retries, "leg")
        help_text = "Requests whose first token from D was not P's."
        mismatches = self.endpoint.prefill_decode.mismatch_count
        yield build_counter(metric_names.ROUTER_FIRST_TOKEN_MISMATCHES, help_text, mismatches)
        help_text, available = "Retries allowed right now.", upstream.retry_budget.available_retries
        yield build_gauge(metric_names.ROUTER_RETRY_BUDGET, help_text, available)
        help_text = "Configurations read again."
        yield build_counter(metric_names.ROUTER_RELOADS, help_text, self.reloads, "result")

    def _collect_discovery(self, discovery: Discovery) -> Iterator[Metric]:
        help_text = "Instances that a source names."
        # What was refused is not in `roles_by_url`.
        found = {each.address.text: len(each.roles_by_url) for each in discovery.watched}
        yield build_gauge(metric_names.ROUTER_DISCOVERED_INSTANCES, help_text, found, "source")
        help_text = "Times that a source of instances could not be asked."
        failures = {each.address.text: each.failures for each in discovery.watched}
        yield build_counter(metric_names.ROUTER_DISCOVERY_FAILURES, help_text, failures, "source")

    def _collect_instances(self) -> Iterator[Metric]:
        # Instances that were removed are not in the pool, so their series end.
        instances = {(each.leg, each.url): each for each in self.endpoint.upstream.pool}
        # A series per state, of which one is 1: no query has to know numbers for states.
        states = {
            (*key, name): float(each.state == name)
            for key, each in instances.items()
            for name in get_args(InstanceState)
        }
        labels = INSTANCE_LABELS
        help_text = "1 for the state it is in."
        yield build_gauge(metric_names.ROUTER_INSTANCE, help_text, states, *labels, "state")
        # Of this worker; with several, workers/worker.py adds them up.
        in_flight = {key: each.in_flight for key, each in instances.items()}
        yield build_gauge(metric_names.ROUTER_IN_FLIGHT, "Attempts under way.", in_flight, *labels)
        help_text = "1 while it gets nothing, 0.5 while it is tried."
        breakers = {key: _BREAKER_VALUES[each.breaker.state] for key, each in instances.items()}
        yield build_gauge(metric_names.ROUTER_BREAKER_OPEN, help_text, breakers, *labels)
        results = {
            (*key, result): number
            for key, each in instances.items()
            for result, number in each.attempt_results.items()
        }
        help_text = "Attempts that ended."
        yield build_counter(metric_names.ROUTER_ATTEMPTS, help_text, results, *labels, "result")
        recomputed = {
            key: each.recomputed_items
            for key, each in instances.items()
            # An encoder encodes an item for the first time, so it is not asked.
            if self.endpoint.upstream.pool.has_encoders and each.leg != ENCODE
        }
        help_text = "Media items that it encoded although an encoder had encoded them."
        yield build_counter(metric_names.ROUTER_RECOMPUTED_ITEMS, help_text, recomputed, *labels)
