# SPDX-License-Identifier: Apache-2.0
"""Metrics of routing: pending load, prediction quality, cached prefixes; used by router_metrics.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel.model.names import metric_names
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.policies.prefill_model import PredictionQuality
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.types import Instance

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
    """Metrics of the legs in `routing.reported_legs`; none if the policy does not track load."""
    # Without pending load nothing is predicted: all of the rest would be zeros for ever.
    if not routing.prefill_policy.policy.tracks_load:
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
