# SPDX-License-Identifier: Apache-2.0
"""What policies know, how well they predict, and what is cached, read off routing.py; metrics.py shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel import names
from ttft_otel.router.choose import Instance
from ttft_otel.router.policies.model import Quality
from ttft_otel.router.policies.state import State
from ttft_otel.router.prefixes.source import Source
from ttft_otel.router.routing import Routing

WHO: Final = ("leg", "instance")
EVENTS: Final = "kv-events"


def counter(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    """A count for each value of one label."""
    family = CounterMetricFamily(name, says, labels=[label])
    for value, number in list(values.items()):
        family.add_metric([value], number)
    return family


def routes(routing: Routing) -> Iterator[Metric]:
    """Of the leg that prefills, and of encoders with books; nothing where its policy keeps none."""
    if not routing.desk.policy.books:
        return
    refused = "Requests refused because no instance could have begun to answer in time."
    yield CounterMetricFamily(names.METRIC_LATE, refused, value=routing.late)
    if routing.reader is not None:
        says = "Prompts by how their tokens became known, or why not."
        yield counter(names.METRIC_PROMPTS, says, "result", routing.reader.counts)
    yield from _pending(routing)
    yield from _predictions(routing)
    yield from _fits(routing)


def _books(routing: Routing) -> Iterator[tuple[Instance, State]]:
    """Each instance with what its leg's policy knows."""
    for leg in routing.told:
        for each in routing.fleet.get(leg):
            yield each, routing.at(leg).state


def _pending(routing: Routing) -> Iterator[Metric]:
    count = _gauge(names.METRIC_PENDING_PREFILLS, "Requests sent that have no first token yet.")
    tokens = _gauge(names.METRIC_PENDING_TOKENS, "Prompt tokens that these still need computed.")
    for each, state in _books(routing):
        load = state.pending.at(each.url)
        count.add_metric([each.leg, each.url], len(load.entries))
        tokens.add_metric([each.leg, each.url], load.fresh)
    yield from (count, tokens)


def _predictions(routing: Routing) -> Iterator[Metric]:
    error = _gauge(names.METRIC_PREDICTION_ERROR, "Mean error of predicted TTFTs, as a share.")
    shared = _gauge(names.METRIC_PREDICTION_R2, "Share of the TTFTs' variance that was predicted.")
    for each, state in _books(routing):
        quality = state.outcomes.get(each.url, Quality())
        for family, value in ((error, quality.mape), (shared, quality.r2)):
            if value is not None:
                family.add_metric([each.leg, each.url], value)
    yield from (error, shared)


def _fits(routing: Routing) -> Iterator[Metric]:
    says = "Seconds of a prefill: once (a), per token computed (b), per pair (d)."
    lines = _gauge(names.METRIC_FIT, says, "model", "coefficient")
    samples = _gauge(names.METRIC_FIT_SAMPLES, "Prefills that these were learnt from.", "model")
    for leg in routing.told:
        for (model, url), fit in routing.at(leg).state.models.fits().items():
            if url:
                samples.add_metric([leg, url, model], fit.samples)
            if url and fit.line is not None:
                for name, value in fit.line._asdict().items():
                    lines.add_metric([leg, url, model, name], value)
    yield from (lines, samples)


def caches(leg: str, source: Source) -> Iterator[Metric]:
    """Of the leg that prefills, what GET /instances says of each instance's index."""
    blocks = _gauge(names.METRIC_CACHED_BLOCKS, "Blocks that it is known to have cached.", "source")
    said = "What became of its KV events."
    events = CounterMetricFamily(names.METRIC_KV_EVENTS, said, labels=[*WHO, "event"])
    for url, told in sorted(source.status().items()):
        blocks.add_metric([leg, url, told["source"]], told["blocks"])
        if told["source"] == EVENTS:  # an LMCache controller's answers are no instance's own
            for event, number in told["counts"].items():
                events.add_metric([leg, url, event], number)
    yield from (blocks, events)


def _gauge(name: str, says: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, says, labels=[*WHO, *labels])
